"""Passes that record themselves: sums by the arrays' own +, leaves out of place, graphs that are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin


class Recorded:
    """A number that writes down what it was made of."""

    def __init__(self, value: float, made_of: str) -> None:
        self.value, self.made_of = value, made_of

    def __add__(self, other: Recorded) -> Recorded:
        return Recorded(self.value + other.value, f"({self.made_of} + {other.made_of})")


def two_ways(end: Any) -> list[tuple[Any, int, Any]]:
    """Two nodes that each hand an object to `end`."""
    nodes = [fanin.Node(lambda g: g, edges=[(end, 0)], name=name) for name in "ab"]
    return [(node, 0, Recorded(1.0, name)) for node, name in zip(nodes, "ab", strict=True)]


@pytest.mark.rule("A1", "L6")
def test_a_leaf_of_an_array_takes_recording_gradients_only_in_a_recording_pass() -> None:
    w = fanin.Leaf(np.zeros(()), name="w")
    fanin.backward(two_ways(w), create_graph=True)
    assert w.grad.made_of == "(b + a)", "keys: the node made later comes first"
    with pytest.raises(TypeError, match="sums by its own"):
        fanin.backward(two_ways(w))
    assert w.grad.made_of == "(b + a)"


@pytest.mark.rule("L6")
def test_while_recording_grad_becomes_a_new_object_and_the_old_one_is_unchanged() -> None:
    w = fanin.Leaf(np.zeros(2))
    roots = [(w, 0, np.array([1.0, 2.0])), (w, 0, np.array([3.0, 4.0]))]
    fanin.backward(roots, create_graph=True)
    first = w.grad
    assert first.tolist() == [4, 6]
    fanin.backward(roots, create_graph=True)
    assert w.grad is not first
    assert w.grad.tolist() == [8, 12]
    assert first.tolist() == [4, 6]
    second = w.grad
    fanin.backward(roots)
    assert w.grad is second, "a pass that does not record itself adds in place again (L5)"
    assert second.tolist() == [12, 18]


@pytest.mark.parametrize(
    ("given", "freed"), [({}, False), ({"keep_graph": False}, True), ({"keep_graph": None}, False)]
)
def test_a_recording_pass_keeps_the_graph_by_default(given: Any, freed: bool) -> None:
    node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(1)), 0)])
    fanin.backward([(node, 0, np.ones(1))], create_graph=True, **given)
    assert node.freed is freed
    other = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(1)), 0)])
    fanin.backward([(other, 0, np.ones(1))])
    assert other.freed


@pytest.mark.rule("A9", "A10")
def test_while_recording_a_gradient_is_conformed_to_its_declared_slot_and_stays_declared() -> None:
    w = fanin.Leaf(np.zeros(2, "f4"))
    node = fanin.Node(lambda g: g, slots=[np.zeros(2, "f4")], edges=[(w, 0)])
    for _ in range(2):
        fanin.backward([(node, 0, np.ones((3, 2), "f4")), (node, 0, np.ones(2, "f4"))], create_graph=True)
    assert w.grad.tolist() == [8, 8]
    for create_graph in (True, False):
        with pytest.raises(ValueError, match=r"expected a gradient of shape \(2,\).*got \(5,\)|expected .*2.*got .*5"):
            fanin.backward([(node, 0, np.ones(5, "f4")), (node, 0, np.ones(2, "f4"))], create_graph=create_graph)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("other", [np.ones(3), np.ones(0), fanin.Sparse("coo", (np.array([[1]]), np.ones(1)), (3,))])
def test_while_recording_a_fanin_sparse_beside_another_gradient_is_refused(other: Any, swap: bool) -> None:
    sparse = fanin.Sparse("coo", (np.zeros((1, 0), int), np.ones(0)), np.shape(other) or other.shape)
    pair = [other, sparse] if swap else [sparse, other]
    w = fanin.Leaf(like=fanin.Slot(), accumulate=print, name="w")
    with pytest.raises(TypeError, match=r"records itself sums by the arrays' own \+, and a fanin.Sparse has none"):
        fanin.backward([(w, 0, g) for g in pair], create_graph=True)


def test_torchs_gradients_can_be_differentiated_again() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    leaf = fanin.Leaf(x)
    square = fanin.Node(lambda g: g * 2 * x, edges=[(leaf, 0)])
    cube = fanin.Node(lambda g: g * 3 * x * x, edges=[(leaf, 0)])
    roots = [(square, 0, torch.ones(2)), (cube, 0, torch.ones(2))]
    (g,) = fanin.grad(roots, [leaf], create_graph=True)
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [8, 14]
    fanin.backward(roots, create_graph=True)
    first = x.grad
    fanin.backward(roots[:1], create_graph=True)
    assert x.grad is not first
    assert torch.autograd.grad(x.grad.sum(), x)[0].tolist() == [10, 16]
