"""In a pass that records itself, an object with a shape is held to the declared shape, by its own `sum` (A9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core


class Value:
    """An object of a user's engine: an array, a shape and a `+`."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.shape: Any = self.array.shape

    def __add__(self, other: Any) -> Any:
        return type(self)(self.array + other.array)


class Summing(Value):
    def sum(self, axes: tuple[int, ...]) -> Any:
        return type(self)(self.array.sum(axes))

    def reshape(self, shape: tuple[int, ...]) -> Any:
        return type(self)(self.array.reshape(shape))


class WithoutReshape(Value):
    def sum(self, axes: tuple[int, ...]) -> Any:
        return type(self)(self.array.sum(axes))


class Wrong(Value):
    def sum(self, axes: tuple[int, ...]) -> Any:
        return type(self)(self.array.sum())


class Shapeless(Value):
    def __init__(self, array: Any) -> None:
        super().__init__(array)
        del self.shape


class Named(Value):
    """Its `shape` is no tuple of integers."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.shape = "large"


def into_leaf(gradient: Any, shape: tuple[int, ...] = (3,)) -> Any:
    leaf = fanin.Leaf(np.zeros(shape), name="w")
    fanin.backward([(leaf, 0, gradient)], create_graph=True)
    return leaf.grad


@pytest.mark.parametrize("kind", [Value, Summing, Wrong])
def test_an_object_of_the_declared_shape_passes_as_it_is(kind: type[Value]) -> None:
    value = kind([1.0, 2.0, 3.0])
    assert into_leaf(value) is value


@pytest.mark.parametrize(("has", "shape"), [((4, 3), (3,)), ((2, 4, 3), (4, 3)), ((4, 3), (1, 3)), ((2, 4, 3), (1, 3))])
def test_an_object_that_the_shape_broadcasts_to_is_summed_by_its_own_sum(
    has: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(has), dtype=float).reshape(has)
    grad = into_leaf(Summing(array), shape)
    lead = len(has) - len(shape)
    axes = tuple(i for i in range(len(has)) if i < lead or shape[i - lead] != has[i])
    assert isinstance(grad, Summing) and grad.shape == shape
    assert np.array_equal(grad.array, array.sum(axes).reshape(shape))


def test_a_sum_of_the_right_shape_needs_no_reshape() -> None:
    assert into_leaf(WithoutReshape(np.ones((4, 3)))).array.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (Summing(np.ones((7, 5))), r"of shape \(3,\) .*got \(7, 5\)"),
        (Value(np.ones((7, 5))), r"of shape \(3,\) .*got \(7, 5\)"),
        (Summing(np.ones(())), r"of shape \(3,\) .*got \(\)"),
        (Value(np.ones((4, 3))), r"of shape \(3,\), got .*Value of shape \(4, 3\) without sum\(\)"),
        (Wrong(np.ones((4, 3))), r"of shape \(3,\), got .*Wrong of shape \(4, 3\), whose sum\(\(0,\)\) has shape \(\)"),
    ],
)
def test_any_other_shape_is_refused_with_both_shapes(gradient: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        into_leaf(gradient)


def test_a_refusal_names_the_slot_of_a_node() -> None:
    leaf = fanin.Leaf(np.zeros(3))
    node = fanin.Node(lambda g: g, slots=[np.zeros((4, 3))], edges=[(leaf, 0)])
    with pytest.raises(ValueError, match=r"index 0: expected a gradient of shape \(4, 3\) .*got \(7, 5\)"):
        fanin.backward([(node, 0, Summing(np.ones((7, 5))))], create_graph=True)
    fanin.backward([(node, 0, Summing(np.ones((4, 3))))], create_graph=True)
    assert leaf.grad.array.tolist() == [4, 4, 4]


@pytest.mark.parametrize("kind", [Shapeless, Named])
def test_objects_without_a_shape_pass(kind: type[Value]) -> None:
    value = kind(np.ones((7, 5)))
    assert into_leaf(value) is value


class Broadcasts:
    """An object whose + broadcasts."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape = x, x.shape

    def __add__(self, other: Broadcasts) -> Broadcasts:
        return Broadcasts(self.x + other.x)


def test_two_objects_of_one_slot_whose_shapes_differ_are_refused_with_both() -> None:
    buffer = fanin.InputBuffer(1)
    with pytest.raises(ValueError, match=r"shape \(3, 1\) as those before, got .*Broadcasts of shape \(2,\)"):
        for shape in ((3, 1), (2,)):
            buffer.add(0, Broadcasts(np.ones(shape)))
        buffer.take()
