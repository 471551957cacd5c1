"""`retain_grad()`: what a node keeps is memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine

pytestmark = pytest.mark.core


def through(n: int, first: Any) -> list[fanin.Node]:
    """n nodes that keep the gradient that one node hands to all of them."""
    complex_valued = str(getattr(first, "dtype", "")).startswith("complex")
    leaf = fanin.Leaf(np.zeros(first.shape, complex if complex_valued else float))
    nodes = [fanin.Node(lambda g: g, edges=[(leaf, 0)]) for _ in range(n)]
    for node in nodes:
        node.retain_grad()
    top = fanin.Node(lambda g: (g,) * n, edges=[(node, 0) for node in nodes])
    fanin.backward([(top, 0, first)], keep_graph=True)
    return nodes


@pytest.mark.parametrize("layout", ["C", "F", "expanded", "strided", "read-only"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "c16", "i8", "?"])
def test_kept_gradients_share_memory_with_nothing(layout: str, dtype: str) -> None:
    first = np.ones((2, 3), dtype, order="F" if layout == "F" else "C")
    if layout == "expanded":
        first = np.broadcast_to(np.ones((1, 3), dtype), (2, 3))
    elif layout == "strided":
        first = np.ones((4, 6), dtype)[::2, ::2]
    elif layout == "read-only":
        first.flags.writeable = False
    nodes = through(3, first)
    kept = [node.grad for node in nodes]
    assert all(g.tolist() == first.tolist() and g.dtype == first.dtype for g in kept)
    arrays = [first, *kept]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    assert all(g.flags.writeable for g in kept)


def test_later_passes_add_to_the_kept_gradient_and_not_to_one_that_was_read() -> None:
    leaf = fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g: g, edges=[(leaf, 0)])
    node.retain_grad()
    fanin.backward([(node, 0, np.ones(2))], keep_graph=True)
    early = node.grad
    fanin.backward([(node, 0, np.ones(2))], keep_graph=True)
    assert node.grad.tolist() == [2, 2] and early.tolist() == [1, 1]


def test_each_slot_of_a_node_keeps_a_copy_of_its_own_dtype() -> None:
    leaf = fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g, h: g, slots=[np.zeros(2, "f4"), np.zeros(3)], edges=[(leaf, 0)])
    node.retain_grad(0)
    node.retain_grad(1)
    one, two = np.ones(2, "f4"), np.full(3, 2.0)
    fanin.backward([(node, 0, one), (node, 1, two)])
    kept = node.grad
    assert [g.dtype.name for g in kept] == ["float32", "float64"] and kept[1].tolist() == [2, 2, 2]
    assert not np.shares_memory(kept[0], one) and not np.shares_memory(kept[1], two)


def test_sparse_gradients_are_kept_as_copies() -> None:
    values = np.ones(2)
    [node] = through(1, fanin.Sparse("coo", (np.array([[2, 0]]), values), (3,)))
    values[:] = 9
    assert isinstance(node.grad, fanin.Sparse) and sorted(node.grad.parts[1].tolist()) == [1, 1]


def test_on_a_device_they_are_copies_too() -> None:
    with Machine() as m, fanin.stream(m.stream()):
        first = m.array(np.ones(3))
        leaf = fanin.Leaf(m.array(np.zeros(3)))
        node = fanin.Node(lambda g: g, edges=[(leaf, 0)])
        node.retain_grad()
        fanin.backward([(node, 0, first)])
        assert node.grad.address != first.address and node.grad.numpy().tolist() == [1, 1, 1]


def test_an_object_with_a_plus_of_its_own_is_kept_itself() -> None:
    class Value:
        def __add__(self, other: object) -> Value:
            return self

    value = Value()
    leaf = fanin.Leaf(like=((), "float64", "cpu"), accumulate=lambda g: None)
    node = fanin.Node(lambda g: None, edges=[(leaf, 0)])
    node.retain_grad()
    fanin.backward([(node, 0, value)])
    assert node.grad is value
