"""The exceptions and warning categories of fanin.

Calls also raise Python's own exceptions: IndexError for a slot out of range, TypeError for an argument that is no array
or no stream, ValueError for shapes, keys, counts, options and dtypes that do not match, BufferError for an array that
cannot be imported, MemoryError, and RuntimeError for a poisoned buffer.

An error about a buffer has the parts of its message as attributes, each only if the error has it: `object` (the name of
the buffer), `slot`, `slot_name`, `key`, `expected`, `got`, and `reason` (the message without the place).
"""

from __future__ import annotations

from ._core import CaptureError, DeviceError, DeviceOutOfMemoryError, DTypeError, RaceError, StreamMismatchWarning

__all__ = ["CaptureError", "DTypeError", "DeviceError", "DeviceOutOfMemoryError", "RaceError", "StreamMismatchWarning"]
