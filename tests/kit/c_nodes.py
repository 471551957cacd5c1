"""Nodes whose functions are in C (tests/c/nodes.c), compiled as authors would, against fanin.h alone."""

from __future__ import annotations

import functools
from types import ModuleType

import fanin
from kit.support import TEST_C, extension

PASS, SCALE, IN_PLACE, NOTHING, FAIL, WRAP, CALL_PYTHON, RAISE, LOOK, FRESH = range(10)
TYPE, VALUE, STATE, NOMEM, PYTHON = range(1, 6)
LONG = 1


@functools.cache
def module() -> ModuleType:
    """The library; without a compiler, the calling test is skipped."""
    return extension("nodes", [TEST_C / "nodes.c"], "-O2", f"-I{fanin.get_include()}")
