"""Nodes whose functions are in C (tests/c/nodes.c), compiled as authors would, against fanin.h alone."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import sysconfig
from types import ModuleType

import fanin
from kit.support import TEST_C, build_c, compiler

PASS, SCALE, IN_PLACE, NOTHING, FAIL, WRAP, CALL_PYTHON, RAISE, LOOK, FRESH = range(10)
TYPE, VALUE, STATE, NOMEM, PYTHON = range(1, 6)
LONG = 1


@functools.cache
def module() -> ModuleType:
    """The library; where no compiler is, the test that asks is skipped."""
    if not compiler():
        import pytest

        pytest.skip("no C compiler: set CC")
    flags = ["-fPIC", "-O2", f"-isystem{sysconfig.get_path('include')}", f"-I{fanin.get_include()}"]
    link = ["-shared"] if sys.platform != "darwin" else ["-bundle", "-undefined", "dynamic_lookup"]
    path = build_c([TEST_C / "nodes.c"], *flags, core=False, link=link)
    loader = importlib.machinery.ExtensionFileLoader("nodes", str(path))
    spec = importlib.util.spec_from_loader("nodes", loader)
    assert spec
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made
