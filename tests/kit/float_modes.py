"""The floating-point modes of the calling thread, read and set through the C library's fenv_t (glibc on x86-64)."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

#: Whether this machine is one whose fenv_t is known here.
KNOWN = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"

_MXCSR = 28  # its place in fenv_t, behind the state of the x87 unit
_CONTROL = 0xFFC0  # without the flags of exceptions that have occurred
DEFAULT = 0x1F80

#: Flush subnormal results, take subnormal operands for zero, round down, up, to zero.
MODES = {"flush": 0x8000, "zero": 0x0040, "both": 0x8040, "down": 0x2000, "up": 0x4000, "to zero": 0x6000}


def _environment() -> ctypes.Array[ctypes.c_ubyte]:
    environment = (ctypes.c_ubyte * 32)()
    ctypes.CDLL(None).fegetenv(environment)
    return environment


def current() -> int:
    """The modes of this thread."""
    return int.from_bytes(bytes(_environment()[_MXCSR:]), "little") & _CONTROL


def change(mode: int) -> None:
    """Set the modes of this thread: the default ones, and these bits."""
    environment = _environment()
    environment[_MXCSR:] = list((DEFAULT | mode).to_bytes(4, "little"))  # type: ignore[assignment]
    ctypes.CDLL(None).fesetenv(environment)


@contextmanager
def modes(name: str) -> Iterator[int]:
    """The body runs in a mode; the value is what `current()` returns in it."""
    change(MODES[name])
    try:
        yield DEFAULT | MODES[name]
    finally:
        change(0)
