"""Calls that run while another thread imports a library: its module is there, its names are not."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import analysis, dist, sim

pytestmark = pytest.mark.core

LIBRARIES = ["torch", "torch.distributed", "torch.nn", "torch._C", "scipy.sparse", "jax", "cupy", "numba", "ml_dtypes"]


class Exports:
    """An object that offers its memory by DLPack."""

    def __init__(self) -> None:
        self.array = np.ones(3, np.float32)

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__()  # NumPy 1.26 takes no max_version

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Own:
    """An object with a `+`."""

    def __add__(self, other: object) -> Own:
        return self


def added(x: Any) -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, x)
    buf.add(0, x)
    assert buf.take()[0] is not None


def reduced() -> None:
    def rank(group: Any) -> list[float]:
        w = fanin.Leaf(np.zeros((2, 3), order="F"))
        reducer = dist.Reducer([w], group)
        fanin.backward([(w, 0, np.ones((2, 3), order="F"))], reducer=reducer)
        reducer.stats()
        return list(w.grad.ravel())

    assert dist.threads(2, rank, timeout=None) == [[2.0] * 6] * 2


def no_leaf() -> None:
    with pytest.raises(TypeError, match="expected several leaves"):
        dist.threads(1, lambda group: dist.Reducer(3, group), timeout=None)


def functionalized() -> None:
    def double(x: Any) -> Any:
        x *= 2
        return x[:1]

    x = np.ones(3)
    analysis.functionalize(double)(x)
    assert x.tolist() == [2, 2, 2]


def explored() -> None:
    @sim.scenario
    def scenario(m: Any) -> Any:
        buf = fanin.InputBuffer(1)
        m.thread(lambda: buf.add(0, np.ones(2), key=0))
        m.thread(lambda: buf.add(0, np.ones(2), key=1))
        yield
        return buf.take()[0]

    assert sim.explore(scenario).complete


CALLS: dict[str, Callable[[], object]] = {
    "an object": lambda: added(Own()),
    "a memoryview": lambda: added(memoryview(np.ones(2))),
    "a DLPack object": lambda: added(Exports()),
    "a masked array": lambda: added(np.ma.ones(2)),
    "a number": lambda: added(2.5),
    "overlap": lambda: fanin.overlap(Exports(), np.ones(2)),
    "a sum over ranks": lambda: dist.threads(
        2, lambda g: dist.add_n([np.ones((2, 3), order="F")], group=g), timeout=None
    ),
    "a sum of objects over ranks": lambda: dist.threads(
        2, lambda g: dist.add_n([np.ones((4, 2))[:, 0]], group=g), timeout=None
    ),
    "a reducer": reduced,
    "no leaf": no_leaf,
    "functionalize": functionalized,
    "explore": explored,
    "repr": lambda: repr(fanin.Sparse("coo", (np.zeros((1, 2), int), np.ones(2)), (3,))),
    "backward": lambda: fanin.backward([(fanin.Leaf(np.zeros(2)), 0, np.ones(2))]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_works_while_libraries_are_imported(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    CALLS[call]()


def test_the_default_group_is_found_while_torch_distributed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be initialised"):
        dist.group()


def unguarded(source: str) -> list[int]:
    """The lines that call `sys.modules.get`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if ast.unparse(node.func) == "sys.modules.get"]


@pytest.mark.tools
def test_classes_of_libraries_are_read_through_one_function() -> None:
    """`sys.modules.get` is for classes.py, whose `attribute` finds no name in a module that is half imported, and for
    getattr with a default.
    """
    package = Path(fanin.__file__).parent
    found = {}
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        lines = [n for n in unguarded(source) if "getattr(sys.modules.get(" not in source.splitlines()[n - 1]]
        if lines:
            found[str(path.relative_to(package))] = len(lines)
    assert found == {"_interop/classes.py": 2}, found


@pytest.mark.tools
def test_the_checker_finds_a_kept_module() -> None:
    assert unguarded("import sys\ntorch = sys.modules.get('torch')\nif torch: torch.Tensor\n") == [2]
    assert unguarded("import sys\nx = attribute('torch', 'Tensor')\n") == []
