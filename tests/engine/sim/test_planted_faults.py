"""The tests of passes find a planted fault in a pass: a value that they check changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, explore
from kit import hooks

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1"),
]


@pytest.fixture(autouse=True)
def nothing_stays_planted() -> Iterator[None]:
    yield
    hooks.fault(None)


def sum_of_three(backwards: bool) -> float:
    """Of three producers whose sum depends on its order."""
    w = fanin.Leaf(np.zeros(1))
    producers = [fanin.Node(lambda g, c=c: g * c, edges=[(w, 0)]) for c in (1.0, 1e16, -1e16)]
    top = fanin.Node(lambda g: (g, g, g), edges=[(p, 0) for p in producers])
    fanin.backward([(top, 0, np.ones(1))], schedule=(lambda ready: ready[-1]) if backwards else None)
    return float(w.grad[0])


@pytest.mark.rule("E2", "A15")
def test_keys_by_the_order_of_arrival_are_found() -> None:
    assert sum_of_three(False) == sum_of_three(True) == (-1e16 + 1e16) + 1.0
    hooks.fault("KEY_BY_ARRIVAL")
    assert sum_of_three(False) != sum_of_three(True)


def calls(inner: bool) -> list[float]:
    """What a node, or a leaf's hook, is called with where two nodes give it 1 and 2."""
    w, seen = fanin.Leaf(np.zeros(1)), []

    def low(g: np.ndarray | None) -> None:
        seen.append(0.0 if g is None else float(g[0]))

    if not inner:
        w.register_hook(low)
    node = fanin.Node(low) if inner else w
    producers = [fanin.Node(lambda g, c=c: g * c, edges=[(node, 0)]) for c in (1.0, 2.0)]
    top = fanin.Node(lambda g: (g, g), edges=[(p, 0) for p in producers])
    fanin.backward([(top, 0, np.ones(1))], keep_graph=True)
    return seen


@pytest.mark.rule("E1")
def test_sums_that_are_taken_too_early_are_found() -> None:
    assert calls(inner=False) == [3.0]
    hooks.fault("TAKEN_BEFORE_LAST")
    with pytest.raises(RuntimeError, match="cycle"):  # it counts more nodes than there are
        calls(inner=False)


@pytest.mark.rule("E2")
def test_a_node_that_runs_twice_is_found() -> None:
    assert calls(inner=True) == [3.0]
    hooks.fault("RUN_TWICE")
    with pytest.raises(RuntimeError, match="cycle"):
        calls(inner=True)


class Number:
    """Sums by its own `+` (A8)."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __add__(self, other: Number) -> Number:
        return Number(self.value + other.value)


def two_passes_at_once(m: Machine) -> float:
    """Each brings one gradient to a leaf that has one: 1 + 2 + 4."""
    leaf = fanin.Leaf(Number(0.0))
    leaf.grad = Number(1.0)
    for value in (2.0, 4.0):
        m.spawn(fanin.backward, [(leaf, 0, Number(value))])
    m.join()
    total: float = leaf.grad.value
    return total


def test_two_passes_at_one_leaf_lose_nothing_in_any_order() -> None:
    report = explore(two_passes_at_once, limit=2_000)
    assert report.complete and report.runs > 1 and list(report.results) == [7.0], report


def test_a_leaf_that_is_not_claimed_is_found() -> None:
    hooks.fault("LEAF_UNCLAIMED")
    report = explore(two_passes_at_once, limit=2_000)
    assert set(report.results) > {7.0}, report
