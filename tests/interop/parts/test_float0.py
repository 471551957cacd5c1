"""An array of JAX's float0 is the cotangent of integers and means "no gradient", as None does (S2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot, tape

pytestmark = pytest.mark.core

#: As jax.dtypes.float0.
FLOAT0 = np.dtype([("float0", np.void, 0)])
ONE = np.array([1.0, 2.0, 3.0])


class Typed(np.ndarray):
    """JAX's own cotangents are of a subclass of ndarray."""


def none() -> np.ndarray:
    return np.zeros(3, FLOAT0)


def typed() -> np.ndarray:
    return none().view(Typed)


def by_add(slot: Slot | int, *terms: Any, **options: Any) -> Any:
    buffer = fanin.InputBuffer([slot] if isinstance(slot, Slot) else slot, **options)
    for term in terms:
        buffer.add(0, term)
    return buffer.take()[0]


def by_many(*terms: Any) -> Any:
    buffer = fanin.InputBuffer(1)
    buffer.add_many([0] * len(terms), list(terms))
    return buffer.take()[0]


def by_engine(*terms: Any, **options: Any) -> Any:
    """Into a leaf, along one edge for each term."""
    leaf = fanin.Leaf(np.zeros(3))
    node = fanin.Node(lambda g: terms, edges=[(leaf, 0)] * len(terms))
    fanin.backward([(node, 0, ONE)], **options)
    return leaf.grad


def by_grad(*terms: Any) -> Any:
    leaf = fanin.Leaf(np.zeros(3))
    node = fanin.Node(lambda g: terms, edges=[(leaf, 0)] * len(terms))
    return fanin.grad([(node, 0, ONE)], [leaf])[0]


def by_walk(*terms: Any) -> Any:
    leaf = fanin.Leaf(np.zeros(3))
    node = fanin.Node(lambda g: terms, edges=[(leaf, 0)] * len(terms))
    for _, _ in (walk := fanin.walk([(node, 0, ONE)])):
        walk.give(terms)
    return leaf.grad


def by_hook(*terms: Any) -> Any:
    """A post-hook replaces the gradients."""
    leaf = fanin.Leaf(np.zeros(3))
    node = fanin.Node(lambda g: [ONE] * len(terms), edges=[(leaf, 0)] * len(terms))
    node.register_posthook(lambda sums, gradients: terms)
    fanin.backward([(node, 0, ONE)])
    return leaf.grad


def by_roots(*terms: Any) -> Any:
    leaf = fanin.Leaf(np.zeros(3))
    fanin.backward([(leaf, 0, term) for term in terms])
    return leaf.grad


def by_wide_leaf(*terms: Any) -> Any:
    leaf = fanin.Leaf(np.zeros(3), accumulate="float64")
    fanin.backward([(leaf, 0, term) for term in terms])
    return leaf.grad


def by_tape(*terms: Any) -> Any:
    leaf = tape.parameter(np.zeros(3))
    made = tape.custom("terms", lambda *xs: [xs[0] * 1], [leaf] * len(terms), lambda grads, need: list(terms))
    fanin.backward([(*made[0].edge, ONE)])
    return leaf.grad


def by_tape_that_records(*terms: Any) -> Any:
    leaf = tape.parameter(np.zeros(3))
    vars_of = [tape.array(t) if t.dtype != FLOAT0 else t for t in terms]
    made = tape.custom("terms", lambda *xs: [xs[0] * 1], [leaf] * len(terms), lambda grads, need: vars_of)
    fanin.backward([(*made[0].edge, tape.array(ONE))], create_graph=True)
    return None if leaf.grad is None else leaf.grad.numpy()


def by_tree(*terms: Any) -> Any:
    """A function of a graph tree returns gradients."""
    tree = fanin.GraphTree("cpu")
    function = tree.function(lambda x: tuple(x if t is ONE else t for t in terms))
    for _ in range(3):  # plain, recorded, replayed
        with tree.step():
            made = [None if y is None else np.array(y) for y in function(ONE)]
    return by_add(1, *made)


WAYS: dict[str, Callable[..., Any]] = {
    "add": lambda *terms: by_add(1, *terms),
    "add, budget 0": lambda *terms: by_add(1, *terms, budget=0),
    "a declared slot": lambda *terms: by_add(Slot(shape=(3,), dtype="float64"), *terms),
    "an exact slot": lambda *terms: by_add(Slot(accumulate="exact"), *terms),
    "a slot with combine": lambda *terms: by_add(Slot(combine=lambda a, b: a + b), *terms),
    "a buffer that records": lambda *terms: by_add(1, *terms, create_graph=True),
    "add_many": by_many,
    "add_n": lambda *terms: fanin.add_n(list(terms)),
    "add_n, exact": lambda *terms: fanin.add_n(list(terms), accumulate="exact"),
    "backward": by_engine,
    "backward, workers": lambda *terms: by_engine(*terms, workers=2),
    "backward, detect": lambda *terms: by_engine(*terms, detect=True),
    "grad": by_grad,
    "walk": by_walk,
    "a post-hook": by_hook,
    "roots": by_roots,
    "accumulate=": by_wide_leaf,
    "tape.custom": by_tape,
    "tape.custom that records": by_tape_that_records,
    "a graph tree": by_tree,
}


@pytest.mark.rule("S2")
@pytest.mark.parametrize("absent", [none, typed])
@pytest.mark.parametrize("way", WAYS)
def test_an_array_of_float0_adds_nothing_alone_twice_and_beside_gradients(way: str, absent: Any) -> None:
    put = WAYS[way]
    assert put(absent()) is None
    assert put(absent(), absent()) is None
    assert np.array_equal(put(absent(), ONE), ONE)
    assert np.array_equal(put(ONE, absent()), ONE)
    assert np.array_equal(put(ONE, absent(), ONE), 2 * ONE)


def test_the_ledger_counts_float0_like_none() -> None:
    buffer = fanin.InputBuffer(1)
    buffer.add(0, none(), key=1)
    with pytest.raises(ValueError, match=r"key 1: this key has contributed already .*\(A16\)"):
        buffer.add(0, ONE, key=1)


def test_a_node_with_only_float0_gets_none() -> None:
    got: list[Any] = []
    leaf = fanin.Leaf(np.zeros(3))
    last = fanin.Node(lambda g: got.append(g), edges=[(leaf, 0)])
    fanin.backward([(fanin.Node(lambda g: none(), edges=[(last, 0)]), 0, ONE)])
    assert got == [None]


def test_a_leaf_calls_no_hook_for_float0() -> None:
    calls: list[Any] = []
    leaf = fanin.Leaf(np.zeros(3), accumulate=calls.append)
    leaf.register_hook(calls.append)
    fanin.backward([(leaf, 0, none())])
    assert calls == []


def test_setting_grad_to_float0_sets_none() -> None:
    leaf = fanin.Leaf(np.zeros(3))
    fanin.backward([(leaf, 0, ONE)])
    leaf.grad = none()
    assert leaf.grad is None


def test_ranks_add_nothing_for_float0() -> None:
    def rank(group: Any) -> Any:
        return fanin.dist.add_n([none()] if group.rank else [none(), ONE], group).tolist()

    assert fanin.dist.threads(2, rank, timeout=None) == [ONE.tolist()] * 2


def test_on_a_device_float0_adds_nothing_either() -> None:
    with fanin.sim.Machine() as machine:
        x = machine.array(ONE)
        assert np.array_equal(by_add(1, none(), x, none()).numpy(), ONE)
        leaf = tape.parameter(ONE, tape.devices(machine)[0])
        made = tape.custom("terms", lambda x: [x], [leaf], lambda grads, need: [none()])
        fanin.backward([(*made[0].edge, x)])
        assert leaf.grad is None


@pytest.mark.parametrize("make", [fanin.Leaf, lambda x: fanin.InputBuffer([x])])
def test_float0_declares_no_slot_and_no_leaf(make: Any) -> None:
    with pytest.raises(fanin.DTypeError, match="float0"):
        make(none())


@pytest.mark.parametrize(
    "dtype", [np.dtype([("float0", "V1")]), np.dtype([("float1", np.void, 0)]), np.dtype("V0"), np.dtype([])]
)
def test_other_structured_dtypes_are_refused_as_before(dtype: Any) -> None:
    with pytest.raises(fanin.DTypeError):
        by_add(1, np.zeros(3, dtype))
