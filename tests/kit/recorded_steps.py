"""Random steps for tape.compiled, and steps that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin._interop.protocols import NDArray
from fanin.tape import Var

UNARY: list[Callable[[Var], Var]] = [
    tape.tanh,
    tape.relu,
    lambda x: -x,
    lambda x: x.T.T,
    lambda x: x * 0.5,
    lambda x: 1 - x,
    lambda x: x.reshape(12).reshape(3, 4),
    lambda x: tape.softmax(x),
    lambda x: x + x.mean(0),
    lambda x: x - x.sum(1).reshape(3, 1),
    lambda x: tape.reshape(x.T, (3, 4)),
    lambda x: tape.rows(x, 1, 1) + x,
    lambda x: tape.softmax(x.T).T,
]


def program(seed: int, p: list[Var]) -> Callable[[NDArray], Any]:
    """A random step over (3, 4) arrays: operations with fan-in, views, a pass backward, an update, results."""
    rng = np.random.default_rng(seed)
    picks = [
        (int(rng.integers(4)), int(rng.integers(99)), int(rng.integers(99)), int(rng.integers(len(UNARY))))
        for _ in range(8)
    ]
    update, keep = rng.random() < 0.6, rng.random() < 0.3

    def step(x: NDArray) -> Any:
        values = [tape.array(x), *p]
        for kind, i, j, u in picks:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append([UNARY[u](a), a + b, a * b, (a @ b.T) @ (b * 0.1)][kind])
        loss = (values[-1] * values[-2]).sum() + sum(q.sum() for q in p)
        tape.backward(loss)
        grads = [q.grad for q in p]
        if update:
            for q in p:
                tape.update(lambda g, w: np.subtract(w, 0.01 * g, out=w), [q.grad], [q])
        if not keep:
            for q in p:
                q.grad = None
        return {"loss": loss, "grads": grads if not keep else [], "some": (values[4], None)}

    return step


def flat(x: Any) -> Iterator[bytes]:
    if isinstance(x, dict | list | tuple):
        for y in x.values() if isinstance(x, dict) else x:
            yield from flat(y)
    else:
        yield b"" if x is None else (x.data if isinstance(x, Var) else x).tobytes()


def run_program(seed: int, verify: int = 0) -> tuple[int, int]:
    rng = np.random.default_rng(seed)
    start = [rng.normal(size=(3, 4)).astype("f4" if seed % 3 else "f8") for _ in range(2)]
    one, two = ([tape.parameter(x) for x in start] for _ in range(2))
    eager, step = program(seed, one), tape.compiled(program(seed, two), static=two, verify=verify)
    for _ in range(8):
        x = rng.normal(size=(3, 4)).astype("f4")
        with np.errstate(all="ignore"), fanin.set_options(debug=bool(seed % 2)):
            a, b = eager(x), step(x)
        assert list(flat(a)) == list(flat(b)), seed
        for p, q in zip(one, two, strict=True):
            assert p.data.tobytes() == q.data.tobytes(), seed
            assert list(flat(p.grad)) == list(flat(q.grad)), seed
        if rng.random() < 0.5:
            for p in (*one, *two):
                p.grad = None
    assert step.stats.raw == 0, (seed, step.last)
    return step.stats.recorded, step.stats.replayed


def refused(step: Callable[..., Any], *args: Any, static: Any = ()) -> str:
    """The error of a step in its first call, or in the second, which records it."""
    own = tape.compiled(step, static=static)
    with pytest.raises(fanin.CaptureError) as e:
        for _ in range(2):
            own(*args)
    assert not fanin._core.cpu_wants_handles() and own.stats.nodes == 0
    return str(e.value)
