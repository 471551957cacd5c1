"""The exceptions and warning categories of fanin.

Besides these, calls raise Python's own: IndexError for a slot that is not there, TypeError for what is no array or no
stream, ValueError for shapes, dtypes, keys, counts and options, BufferError for an array that cannot be imported,
MemoryError, and RuntimeError for a poisoned buffer.
"""

from __future__ import annotations

from ._core import CaptureError, DeviceError, DeviceOutOfMemoryError, RaceError, StreamMismatchWarning

__all__ = ["CaptureError", "DeviceError", "DeviceOutOfMemoryError", "RaceError", "StreamMismatchWarning"]
