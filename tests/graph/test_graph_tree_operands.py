"""Operands of graph trees and steps on the CPU that repeat themselves, outputs that lie in operands, and recorded
functions as methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from kit.sample import sizes

pytestmark = pytest.mark.core


def tree_here() -> Any:
    return fanin.GraphTree("cpu", memory=1 << 20)


# ---- what repeats itself


def test_an_operand_that_repeats_itself_is_copied_once_and_not_element_by_element() -> None:
    """An array of 2**40 elements in 8 bytes: a copy of each element would not end."""
    step = tape.compiled(lambda x: tape.array(x[:2, :3]) * 2.0)
    with tree_here() as tree:
        f = tree.function(lambda x: x[:2, :3] * 2.0)
        for k in range(4):
            x = np.broadcast_to(float(k), (1 << 20, 1 << 20))
            with tree.step():
                assert f(x).numpy().tolist() == [[2.0 * k] * 3] * 2
            assert step(x).numpy().tolist() == [[2.0 * k] * 3] * 2
        assert f.last.did == "replayed" and step.last is not None and step.last.did == "replayed"


def repeated(rng: np.random.Generator, base: Any, kind: int) -> Any:
    """A view of `base`, (6, 5, 8), that has some of its elements several times."""
    windows = np.lib.stride_tricks.sliding_window_view
    return [
        lambda: np.broadcast_to(base[:, None], (6, 3, 5, 8)),
        lambda: np.broadcast_to(base[:1], (4, 5, 8)).transpose(2, 0, 1),
        lambda: np.broadcast_to(base[0, 0, 0], (7,)),
        lambda: windows(base[0, 0], 4),
        lambda: windows(base, 3, axis=2)[:, ::2],
        lambda: windows(np.broadcast_to(base[:1], (4, 5, 8)), 2, axis=1)[..., ::-1],
        lambda: np.broadcast_to(base[:, :0], (2, 6, 0, 8)),
        lambda: np.broadcast_to(base[::-2, ::2, None, ::-1], (3, 3, 2, 8)),
    ][kind]()


@pytest.mark.parametrize("count", sizes(16, 400))
def test_an_operand_that_repeats_itself_has_its_values_in_each_replay(count: int) -> None:
    for seed in range(count):
        rng = np.random.default_rng(seed)
        dtype = ("f8", "f4", "i2", "c8", "?")[seed % 5]
        step = tape.compiled(lambda x: tape.array(x))
        with tree_here() as tree:
            f, together = tree.function(lambda x: np.copy(x)), tree.function(lambda x, y, z: np.copy(x))
            for _ in range(4):
                base = rng.normal(0, 3, (6, 5, 8)).astype(dtype)
                x = repeated(rng, base, seed % 8)
                for got in (f, lambda a, base=base, f=together: f(a, base, a)):
                    with tree.step():
                        assert got(x).numpy().tobytes() == x.tobytes(), (seed, x.strides)
                assert step(x).numpy().tobytes() == x.tobytes(), (seed, x.strides)
            assert f.last.did == together.last.did == "replayed"


# ---- outputs that lie in operands


def test_an_output_is_the_callers_own_operand_only_if_the_function_returns_that_operand() -> None:
    for role in ("static", "accumulate"):
        for n in range(5):
            x = np.arange(4.0)
            with tree_here() as tree:
                part, whole = tree.function(lambda x, n=n: x[:n], roles=role), tree.function(lambda x: x, roles=role)
                for _ in range(4):
                    x += 1
                    with tree.step():
                        got = part(x)
                        assert type(got) is fanin.sim.Array, (role, n, part.last)
                        assert got.numpy().tolist() == x[:n].tolist()
                        assert whole(x) is x
                assert part.last.did == "replayed"


@pytest.mark.parametrize("view", [lambda x: x[:], lambda x: x.T, lambda x: x.reshape(-1), lambda x: x.ravel()])
def test_a_view_of_all_of_a_copied_operand_is_a_handle_with_the_values_of_the_call(view: Any) -> None:
    with tree_here() as tree:
        f, same = tree.function(view), tree.function(lambda x: x)
        for k in range(4):
            x = np.arange(3.0) + k
            with tree.step():
                got = f(x)
                assert type(got) is fanin.sim.Array and got.numpy().tolist() == x.tolist(), f.last
                assert same(x) is x
        assert f.last.did == "replayed"


def test_a_view_of_a_part_of_a_copied_operand_is_refused_in_the_first_call_already() -> None:
    with tree_here() as tree:
        f = tree.function(lambda x: x[1:])
        for _ in range(3):
            with tree.step(), pytest.raises(ValueError, match="output 0 is a view of operand 0, which is copied"):
                f(np.ones(3))
        assert tree.stats.in_use == 0


# ---- methods


def test_recorded_functions_bind_as_methods() -> None:
    tree = tree_here()

    class Layer:
        def __init__(self, by: float) -> None:
            self.by = by

        scaled = tree.function(lambda self, x: x * self.by)
        twice = tape.compiled(lambda self, x: tape.array(x) * (2.0 * self.by))

    one, two = Layer(3.0), Layer(5.0)
    for k in range(4):
        x = np.full(2, float(k))
        for layer in (one, two):
            with tree.step():
                assert layer.scaled(x).numpy().tolist() == [layer.by * k] * 2
            assert layer.twice(x).numpy().tolist() == [2 * layer.by * k] * 2
    assert Layer.scaled.last.did == "replayed" and Layer.twice.last.did == "replayed"
    tree.close()
