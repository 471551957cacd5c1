"""The exceptions and warning categories of fanin.

Besides these, calls raise Python's own: IndexError for a slot that is not there, TypeError for what is no array or no
stream, ValueError for shapes, keys, counts, options and dtypes that do not go together, BufferError for an array that
cannot be imported, MemoryError, and RuntimeError for a poisoned buffer.
"""

from __future__ import annotations

from ._core import CaptureError, DeviceError, DeviceOutOfMemoryError, DTypeError, RaceError, StreamMismatchWarning

__all__ = ["CaptureError", "DTypeError", "DeviceError", "DeviceOutOfMemoryError", "RaceError", "StreamMismatchWarning"]
