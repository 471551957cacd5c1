"""The exceptions and warning categories of fanin.

Calls also raise Python's own exceptions: IndexError for a slot out of range, TypeError for an argument that is no array
or no stream, ValueError for shapes, keys, counts, options and dtypes that do not match, BufferError for an array that
cannot be imported, MemoryError, and RuntimeError for a poisoned buffer.

An error about a buffer has the parts of its message as attributes, each only if the error has it: `object` (the name of
the buffer), `slot`, `slot_name`, `key`, `expected`, `got`, and `reason` (the message without the place).
"""

from __future__ import annotations

from ._core import CaptureError, DeviceError, DeviceOutOfMemoryError, DTypeError, RaceError, StreamMismatchWarning

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = [
    "CaptureError",
    "DTypeError",
    "DeviceError",
    "DeviceOutOfMemoryError",
    "PeerError",
    "RaceError",
    "StreamMismatchWarning",
]


class PeerError(RuntimeError):
    """A sum over ranks ended on every rank, because one failed, is gone, or brought something else than the others."""

    rank: int | None  #: the rank that failed or differs; None if it is not known
    leaf: str | None  #: the name of the leaf that differs

    def __init__(self, message: str, rank: int | None = None, leaf: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.leaf = rank, leaf
