"""Situations in which small engines of gradients were wrong: second uses, bends, empty arrays, dtypes, infinities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var


def dense(g: Any) -> Any:
    if not isinstance(g, fanin.Sparse):
        return g
    made = np.zeros(g.shape)
    np.add.at(made, tuple(g.parts[0]), g.parts[1])
    return made


def test_a_result_that_is_used_many_times_passes_its_gradient_on_once() -> None:
    x = tape.parameter(np.array([1.5, -2.0]))
    y = x * x
    z = y * x + x * y + y * y + y  # 2 x^3 + x^4 + x^2
    ran: list[Any] = []
    y.register_hook(ran.append)
    tape.backward(z)
    v = x.numpy()
    assert len(ran) == 1
    assert np.allclose(x.grad, 6 * v**2 + 4 * v**3 + 2 * v)


def test_a_second_pass_adds_the_same_and_results_keep_nothing_of_the_first() -> None:
    a, b = tape.parameter(np.array(3.0)), tape.parameter(np.array(2.0))
    d = (a + b) * (a * b)
    tape.backward(d)
    first = a.grad.copy(), b.grad.copy()
    for n in (2, 3):
        tape.backward(d)
        assert a.grad == n * first[0]
        assert b.grad == n * first[1]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_relu_has_no_slope_at_zero_and_a_whole_one_above_it(dtype: str) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    w = tape.parameter(np.array([0, -0.0, tiny, -tiny, 1, -1, np.inf, -np.inf], dtype))
    tape.backward(tape.relu(w))
    assert w.grad.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]


def test_a_value_that_repeats_itself_gets_the_sum() -> None:
    w = tape.parameter(np.arange(3.0))
    y = tape.expand(w, (4, 3))
    tape.backward(y * np.arange(12.0).reshape(4, 3))
    assert w.grad.tolist() == [18, 22, 26]


@pytest.mark.parametrize("op", [tape.embedding, tape.gathered])
def test_rows_of_a_table_that_repeats_itself_get_the_sum(op: Any) -> None:
    w = tape.parameter(np.array([[1.0, 2.0]]))
    rows = op(tape.expand(w, (3, 2)), np.array([2, 0, 2, 1]))
    tape.backward(rows * np.arange(8.0).reshape(4, 2))
    assert dense(w.grad).tolist() == [[12, 16]]


@pytest.mark.parametrize("op", [tape.embedding, tape.gathered])
@pytest.mark.parametrize("rows", [0, 3])
def test_no_rows_of_a_table_have_a_gradient_of_zeros(op: Any, rows: int) -> None:
    t = tape.parameter(np.ones((rows, 2)))
    y = op(t, np.zeros((0,), int))
    assert y.shape == (0, 2)
    tape.backward(y.sum())
    assert dense(t.grad).tolist() == np.zeros((rows, 2)).tolist()
    with pytest.raises(IndexError):
        op(t, np.array([rows]))


EMPTY: dict[str, tuple[Callable[..., Var], list[tuple[int, ...]]]] = {
    "add, broadcast": (lambda a, b: a + b, [(0, 3), (3,)]),
    "mul, broadcast from one": (lambda a, b: a * b, [(1,), (0,)]),
    "matmul of no columns": (lambda a, b: a @ b, [(2, 0), (0, 3)]),
    "matmul of no rows": (lambda a, b: a @ b, [(0, 2), (2, 3)]),
    "tanh": (tape.tanh, [(0,)]),
    "relu": (tape.relu, [(2, 0)]),
    "reshape, transpose": (lambda a: a.reshape(3, 0).T, [(0, 2)]),
    "sum over nothing": (lambda a: a.sum(0), [(0, 3)]),
    "split": (lambda a: tape.split(a, 2)[1], [(0, 2)]),
    "softmax": (tape.softmax, [(0, 3)]),
    "pool": (lambda a: tape.pool(a, 2), [(0, 2, 2, 1)]),
    "conv2d": (tape.conv2d, [(0, 2, 2, 1), (3, 3, 1, 2)]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_gradients_of_empty_arrays_are_zeros_of_the_parameters_shapes(name: str) -> None:
    f, shapes = EMPTY[name]
    parameters = [tape.parameter(np.ones(s)) for s in shapes]
    y = f(*parameters)
    tape.backward(y)
    for p, shape in zip(parameters, shapes, strict=True):
        assert p.grad.shape == shape
        assert not p.grad.any()


DTYPES = ["float16", "float32", "float64"]
LAYERS: dict[str, Callable[[Var, Any], Var]] = {
    "add": lambda w, x: w + x,
    "mul": lambda w, x: w * x,
    "matmul": lambda w, x: w @ x,
    "mean": lambda w, x: (w * x).mean(0),
    "tanh": lambda w, x: tape.tanh(w * x),
    "cross entropy": lambda w, x: tape.cross_entropy(w + x, [0, 1]),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_gradient_has_its_parameters_dtype_beside_every_other_operand(name: str, own: str, other: str) -> None:
    w, v = (tape.parameter(np.array([[0.5, 1], [2, 1]], d)) for d in (own, other))
    y = LAYERS[name](w, v)
    assert y.dtype == np.result_type(own, other)
    tape.backward(y)
    assert w.grad.dtype == own
    assert v.grad.dtype == other
    wide = [tape.parameter(np.array([[0.5, 1], [2, 1]])) for _ in "wv"]
    tape.backward(LAYERS[name](*wide))
    for p, exact in zip((w, v), wide, strict=True):
        assert np.allclose(p.grad, exact.grad, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1, 0.5, 3])
def test_a_python_number_widens_neither_a_result_nor_a_gradient(scale: float) -> None:
    w = tape.parameter(np.ones(3, "f2"))
    y = (w * scale - scale).mean() + scale
    assert y.dtype == np.float16
    tape.backward(y)
    assert w.grad.dtype == np.float16


def test_classes_that_are_ruled_out_have_no_gradient() -> None:
    z = np.array([[-np.inf, 0.5, 1.0], [2.0, -np.inf, -np.inf]])
    w = tape.parameter(z)
    y = tape.cross_entropy(w, [1, 0])
    tape.backward(y)
    p = np.exp(0.5) / (np.exp(0.5) + np.exp(1.0))
    assert y.numpy() == pytest.approx(-np.log(p) / 2)
    assert np.allclose(w.grad, [[0, (p - 1) / 2, (1 - p) / 2], [0, 0, 0]])
    [softened] = tape.grad((tape.softmax(w) * np.array([[1.0, 2, 3], [4, 5, 6]])).sum(), [w])
    assert np.isfinite(softened).all()
    assert softened[:, 0].tolist()[0] == 0


def test_large_logits_neither_overflow_nor_lose_their_gradient() -> None:
    w = tape.parameter(np.array([[1e4, 0.0], [-1e4, 0.0]]))
    y = tape.cross_entropy(w, [1, 0])
    tape.backward(y)
    assert y.numpy() == 1e4
    assert w.grad.tolist() == [[0.5, -0.5], [-0.5, 0.5]]


@pytest.mark.parametrize("part", [0, 1])
def test_an_update_of_a_part_is_a_write_to_the_whole(part: int) -> None:
    w = tape.parameter(np.arange(4.0))
    x = w + 1
    square = x * x
    tape.update(lambda v: np.multiply(v, 5, out=v), [], [tape.split(x, 2)[part]])
    with pytest.raises(RuntimeError, match=r"mul: tape.update of '<lambda>' has changed"):
        tape.backward(square)
    tape.backward(x * x)
    assert w.grad.tolist() == (2 * x.numpy()).tolist()
