"""The inside of the core as Python has it, in a library that only tests and benchmarks load: the pure rules, and single
functions of array/. `inside()` builds it from tests/c/inside*.c and the rungs that it shows, with the same compiler,
and keeps it under a hash of all that went in.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from kit.support import CSRC, TEST_C, extension

#: What the library shows a copy of: the lower rungs, and what decides.
SHOWN = ("base/*.c", "array/*.c", "device/capture_rule.c", "buffer/sync.c", "buffer/accum.c", "buffer/plan.c")


@functools.cache
def inside(*optimize: str) -> ModuleType:
    """The library; without a compiler, the calling test is skipped. Benchmarks use a release's flags."""
    sources = [*sorted(TEST_C.glob("inside*.c")), *sorted(p for pattern in SHOWN for p in CSRC.glob(pattern))]
    return extension("inside", sources, *optimize)


def view(x: np.ndarray) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """An array as the library takes it; the caller keeps it alive."""
    return x.__array_interface__["data"][0], x.dtype.name, x.shape, x.strides
