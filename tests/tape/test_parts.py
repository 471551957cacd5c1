"""Parts of a value on the tape: their gradients are partial, beside differences and a pass that records itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var

SHAPE = (6, 4)

PROGRAMS: dict[str, Callable[[Var], Var]] = {
    "rows": lambda a: (a[1] * a[1]).sum() + (a[::-2, 1:] * a[::2, :3] * 2).sum(),
    "None and ...": lambda a: (tape.tanh(a[..., None, 2]) * a[:, 1:2]).sum(),
    "one element": lambda a: a[3, 2] * a[-1, 0] * a[3, 2],
    "take": lambda a: (tape.take(a, -1, 1) * tape.take(a, 0, axis=-1)).sum(),
    "some of split": lambda a: (tape.split(a, 3)[1] * tape.split(a, 3)[2]).sum() + tape.tanh(a).sum(),
    "all of split": lambda a: sum(((p * p * p).sum() for p in tape.split(a, 3)[1:]), tape.split(a, 3)[0].sum()),
    "diagonal": lambda a: (tape.tanh(tape.diagonal(a, 1)) * tape.diagonal(a, -1, 1, 0)[:3]).sum(),
    "concatenate": lambda a: (tape.tanh(tape.concatenate([a[:2], a[1:4] * 2, a[5:]])) * a).sum(),
    "stack": lambda a: (tape.tanh(tape.stack([a[:, 0], a[:, 1] * 3], -1)) * a[:, 2:]).sum(),
}


def slope(f: Callable[[Any], float], x: Any, step: float = 1e-6) -> Any:
    found = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        beside = [x.copy(), x.copy()]
        beside[0][i] += step
        beside[1][i] -= step
        found[i] = (f(beside[0]) - f(beside[1])) / (2 * step)
    return found


@pytest.mark.rule("P1", "P2")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient_is_that_of_differences_and_the_second_one_too(name: str) -> None:
    program, rng = PROGRAMS[name], np.random.default_rng(0)
    x, v = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
    w = tape.parameter(x)
    tape.backward(program(w))
    expected = slope(lambda y: float(program(tape.array(y)).numpy()), x)
    assert np.allclose(w.grad, expected, atol=1e-6)
    [first] = tape.grad(program(w), [w], create_graph=True)
    [second] = tape.grad((first * v).sum(), [w])

    def along(y: Any) -> float:
        u = tape.parameter(y)
        return float((np.asarray(tape.grad(program(u), [u])[0]) * v).sum())

    assert np.allclose(second, slope(along, x), atol=1e-5)


def test_a_part_of_many_reaches_its_sum_without_the_others() -> None:
    w = tape.parameter(np.zeros((64, 8)))
    with fanin.trace() as t:
        tape.backward((tape.split(w, 64)[5] * 3).sum())
    assert (w.grad == (np.arange(64) == 5)[:, None] * np.full(8, 3.0)).all()
    assert len([line for line in t if str(line).startswith("add")]) <= 64


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: w[[0, 1]], TypeError, "no basic index.*tape.embedding"),
        (lambda w: w[np.ones(6, bool)], TypeError, "no basic index"),
        (lambda w: w[True], TypeError, "no basic index"),
        (lambda w: w[1.0], TypeError, "no basic index"),
        (lambda w: w[7], IndexError, "7"),
        (lambda w: tape.take(w, 9), IndexError, "9"),
        (lambda w: tape.take(w, 0, 2), ValueError, "axis"),
        (lambda w: tape.diagonal(w, 0, 1, 1), ValueError, "axis"),
        (lambda w: tape.concatenate([]), ValueError, "at least one"),
        (lambda w: tape.concatenate([w, w[0]]), ValueError, "differ"),
        (lambda w: tape.stack([w, w[:2]]), ValueError, "differ"),
        (lambda w: tape.stack([w], 3), ValueError, "axis 3"),
        (lambda w: list(w), TypeError, "iter"),
    ],
)
def test_a_wrong_part_is_an_error(call: Callable[[Any], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(tape.parameter(np.zeros(SHAPE)))
