"""The inside of the core as Python has it, in a library that only tests and benchmarks load: the pure rules, and single
functions of array/. `inside()` builds it from tests/c/inside*.c and the rungs that it shows, with the same compiler,
and keeps it under a hash of all that went in.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import sysconfig
from types import ModuleType

import numpy as np

from kit.support import CSRC, TEST_C, build_c, compiler

#: What the library shows a copy of: the lower rungs, and what decides.
SHOWN = ("base/*.c", "array/*.c", "device/capture_rule.c", "buffer/sync.c", "buffer/accum.c", "buffer/plan.c")


@functools.cache
def inside(*optimize: str) -> ModuleType:
    """The library; where no compiler is, the test that asks is skipped. Benchmarks want a release's flags."""
    if not compiler():
        import pytest

        pytest.skip("no C compiler: set CC")
    sources = [*sorted(TEST_C.glob("inside*.c")), *sorted(p for pattern in SHOWN for p in CSRC.glob(pattern))]
    flags = ["-fPIC", *optimize, f"-isystem{sysconfig.get_path('include')}"]
    link = ["-shared"] if sys.platform != "darwin" else ["-bundle", "-undefined", "dynamic_lookup"]
    path = build_c(sources, *flags, core=False, link=link)
    loader = importlib.machinery.ExtensionFileLoader("inside", str(path))
    spec = importlib.util.spec_from_loader("inside", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def view(x: np.ndarray) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """An array as the library takes it; whoever calls keeps it alive."""
    return x.__array_interface__["data"][0], x.dtype.name, x.shape, x.strides
