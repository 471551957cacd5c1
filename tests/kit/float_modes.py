"""The floating-point modes of the calling thread, read and set through the C library's fenv_t (glibc on x86-64), and
numbers whose sums depend on them.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

SEED = 20261128

#: Whether this module has the layout of this machine's fenv_t.
KNOWN = platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"

_MXCSR = 28  # its place in fenv_t, after the state of the x87 unit
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


def numbers(dtype: np.dtype[Any], n: int, seed: int = SEED) -> Any:
    """Numbers of all sizes down to subnormal ones, with digits down to the last place."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "c":
        parts = np.empty((n, 2), "f4" if dtype.itemsize == 8 else "f8")
        parts[:, 0], parts[:, 1] = (numbers(parts.dtype, n, seed + i) for i in (1, 2))
        return parts.view(dtype)[:, 0]
    kind = ml_dtypes.finfo(dtype)
    least, most = int(kind.minexp) - int(kind.nmant), int(kind.maxexp) - 4
    exponent = np.where(rng.random(n) < 0.5, rng.integers(least, least + kind.nmant + 2, n), rng.integers(-9, 9, n))
    exponent = np.minimum(exponent, most)
    return np.ldexp(rng.choice([-1.0, 1.0], n) * (1 + rng.random(n)), exponent).astype(dtype)


def terms(dtype: np.dtype[Any], n: int, count: int = 3) -> list[Any]:
    return [numbers(dtype, n, SEED + 10 * k) for k in range(count)]


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return np.array_equal(np.atleast_1d(a).view(np.uint8), np.atleast_1d(b).view(np.uint8))
