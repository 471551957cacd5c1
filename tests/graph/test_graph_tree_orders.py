"""Arrays of graph trees on the CPU: in which order NumPy's functions read and lay them, and what they do not do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _cpu_arrays

pytestmark = pytest.mark.core

Function = Callable[[Any], Any]

#: How an array of three axes lies, as views of one that lies in C's order.
LAYOUTS: dict[str, Function] = {
    "in C's order": lambda x: x,
    "in Fortran's": lambda x: x.T,
    "in another": lambda x: x.transpose(1, 0, 2),
    "with gaps": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1, :, ::-1],
    "backwards, in another": lambda x: x[:, ::-1].transpose(2, 0, 1),
    "of one axis": lambda x: x[1, :, 2],
    "without axes": lambda x: x[1, 1, 1],
    "with axes of one": lambda x: x[:1, :, 1:2].T,
}
ORDERS = ("C", "F", "A", "K")
COPIES: dict[str, Callable[[Any], Function]] = {
    "np.ravel": lambda o: lambda x: np.ravel(x, o),
    "ravel": lambda o: lambda x: x.ravel(order=o),
    "flatten": lambda o: lambda x: x.flatten(o),
    "np.copy": lambda o: lambda x: np.copy(x, order=o),
    "copy": lambda o: lambda x: x.copy(o),
    "astype": lambda o: lambda x: x.astype(np.float32, o, "same_kind", False),
    "astype without a copy": lambda o: lambda x: x.astype(x.dtype, order=o, copy=False),
    "np.reshape": lambda o: lambda x: np.reshape(x, (-1, 1) if o != "K" else -1, order=o.replace("K", "C")),
}


def recorded(f: Function, x: Any) -> Any:
    """What it gives in a replay."""
    tree = fanin.GraphTree("cpu")
    step = tree.function(f)
    for _ in range(3):
        with tree.step():
            out = step(x).numpy()
    assert step.last.did == "replayed"
    return out


@pytest.mark.parametrize("what", COPIES)
def test_copies_in_each_order_are_those_of_numpy(what: str) -> None:
    full = np.arange(24.0).reshape(2, 3, 4)
    for (_, lie), order in itertools.product(LAYOUTS.items(), ORDERS):

        def of(x: Any, lie: Function = lie, order: str = order) -> Any:
            return COPIES[what](order)(lie(x + 0))

        want, got = of(full), recorded(of, full)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.array_equal(got, want), (what, lie(full).strides, order)


@pytest.mark.parametrize("order", ORDERS)
def test_copies_lie_in_memory_as_numpys_do(order: Any) -> None:
    full = np.arange(24.0).reshape(2, 3, 4)
    steps: list[Any] = []

    def of(x: Any) -> Any:
        for lie in LAYOUTS.values():
            y = lie(x + 0)
            made = [y.copy(order), np.copy(y, order), y.astype(np.float32, order)]
            steps.append([[s for s, n in zip(z.strides, z.shape, strict=True) if n > 1] for z in made])
        return x + 0

    of(full)
    want = steps.copy()
    steps.clear()
    recorded(of, full)
    assert steps[: len(want)] == want


@pytest.mark.parametrize("how", [{}, {"kind": "stable"}, {"axis": 0, "kind": "heapsort"}, {"axis": 1}], ids=str)
def test_sort_takes_what_numpys_takes(how: dict[str, Any]) -> None:
    def of(x: Any) -> Any:
        y = -x
        y.sort(**how)
        return y

    x = np.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert np.array_equal(recorded(of, x), of(x))


REFUSED: dict[str, tuple[Function, type[Exception], str]] = {
    "a list": (
        lambda y: y.__setitem__(..., [1.0, 2.0]),
        TypeError,
        r"got a list: pass np.asarray\(x\) to the function",
    ),
    "a tuple": (
        lambda y: y.fill((1, 2)),
        TypeError,
        r"got a tuple: pass np.asarray\(x\) to the function as an operand",
    ),
    "a str": (lambda y: y.__setitem__(0, "a"), TypeError, "reads arrays on the CPU and numbers, got a str"),
    "float": (
        lambda y: float(y[0]),
        TypeError,
        r"is not made a Python number: .* or read x.numpy\(\).item\(\) outside",
    ),
    "int": (lambda y: int(y[0]), TypeError, "is not made a Python number"),
    "an order": (lambda y: np.ravel(y, "Z"), ValueError, r"order must be one of 'C', 'F', 'A', or 'K' \(got 'Z'\)"),
    "an order of reshape": (lambda y: np.reshape(y, 2, order="K"), ValueError, "order must be one of 'C', 'F', or 'A'"),
    "a cast": (lambda y: y.astype(int, casting="safe"), TypeError, "Cannot cast array data .* to the rule 'safe'"),
    "an argument": (lambda y: np.ravel(y, foo=1), TypeError, r"ravel\(\) got an unexpected keyword argument 'foo'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_recorded_is_refused_in_words_of_the_caller(what: str) -> None:
    call, kind, text = REFUSED[what]
    tree = fanin.GraphTree("cpu")
    step = tree.function(lambda x: call(x + 0))
    with tree.step(), pytest.raises(kind, match=text) as e:
        step(np.ones(2))
    assert "lambda" not in e.value.args[0]


def test_a_number_of_a_device_is_read_by_numpy_and_the_error_says_so() -> None:
    with fanin.sim.Machine() as m:
        x = m.array(np.ones(()))
        for number in (float, int):
            with pytest.raises(TypeError, match=r"^converting an array on a device is work .* x\.numpy\(\)$"):
                number(x)


def test_the_stubs_name_every_method_that_is_recorded() -> None:
    text = (fanin.__file__ or "").replace("__init__.py", "_core.pyi")
    with open(text) as f:
        stubs = f.read().split("\nclass _OfNumPy:\n")[1].split("\nclass ")[0]
    assert [name for name in _cpu_arrays.METHODS if f"    def {name}(" not in stubs] == []
