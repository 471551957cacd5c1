"""In a pass that records itself, an object with a shape is held to the declared shape, by its own `sum` (A9)."""

from __future__ import annotations

from functools import partial
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


class Untold(Shapeless):
    """Its `shape` raises, as that of torch's nested tensors."""

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            raise RuntimeError("it has no shape")
        raise AttributeError(name)


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


@pytest.mark.parametrize("kind", [Shapeless, Named, Untold])
def test_objects_without_a_shape_pass(kind: type[Value]) -> None:
    value = kind(np.ones((7, 5)))
    assert into_leaf(value) is value
    assert fanin.add_n([value, kind(np.ones((7, 5)))]).array.tolist() == [[2.0] * 5] * 7


class Broadcasts:
    """An object whose + broadcasts."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape = x, x.shape

    def __add__(self, other: Broadcasts) -> Broadcasts:
        return Broadcasts(self.x + other.x)


class NoSum:
    """An object whose + has no result."""

    def __add__(self, other: object) -> None:
        return None if isinstance(other, NoSum) else NotImplemented


#: How a slot sums two that do not match, for each: the first, the second, and the words of the refusal.
UNLIKE: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "two shapes": (
        Broadcasts(np.ones((3, 1))),
        Broadcasts(np.ones(2)),
        ValueError,
        r"expected a gradient of shape \(3, 1\) as those before, got .*Broadcasts of shape \(2,\) \(A9\)",
    ),
    "two classes": (
        NoSum(),
        np.ones(2),
        TypeError,
        "NoSum and .*ndarray have no sum: neither class adds the other",
    ),
    "a sum that is None": (NoSum(), NoSum(), TypeError, r"by \+ is None; expected the sum"),
}


@pytest.mark.parametrize("keys", [None, (0, 1)])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize("name", UNLIKE)
def test_two_objects_that_do_not_match_are_refused_with_the_slot_and_nothing_is_lost(
    name: str, budget: Any, create_graph: bool, keys: Any
) -> None:
    """With budget 0 by `add`, else by `take`."""
    first, second, kind, words = UNLIKE[name]
    buffer = fanin.InputBuffer(2, budget=budget, create_graph=create_graph, name="grads")
    given = [{} if keys is None else {"key": k} for k in keys or (0, 0)]
    at = r"grads: slot 1: " if keys is None else r"grads: slot 1, key 1: "
    refused = partial(buffer.add, 1, second, **given[1]) if budget == 0 else buffer.take
    buffer.add(1, first, **given[0])
    if budget is None:
        buffer.add(1, second, **given[1])
    for _ in range(2):  # the same error again
        with pytest.raises(kind, match=f"^{at}.*{words}") as e:
            refused()
        error: Any = e.value
        assert (error.object, error.slot, getattr(error, "key", None)) == ("grads", 1, keys and 1)
    if budget == 0:  # what came before is there
        assert buffer.take()[1] is first
    else:
        buffer.clear()
    buffer.add(1, second, **given[1])
    assert buffer.take()[1] is second


@pytest.mark.parametrize("budget", [0, None])
def test_a_buffer_that_records_sums_objects_to_the_declared_shape_and_loses_nothing_by_a_refusal(budget: Any) -> None:
    buffer = fanin.InputBuffer([fanin.Slot(shape=(3,))], budget=budget, create_graph=True, name="grads")
    refused = r"^grads: slot 0, key 1: expected a gradient of shape \(3,\) .*got \(7, 5\) \(A9\)"
    buffer.add(0, Summing(np.ones((4, 3))), key=0)
    for _ in range(2):
        with pytest.raises(ValueError, match=refused):
            buffer.add(0, Summing(np.ones((7, 5))), key=1)
    buffer.add(0, Summing(np.full((2, 1, 3), 10.0)), key=1)
    total = buffer.take()[0]
    assert isinstance(total, Summing) and total.shape == (3,) and total.array.tolist() == [24, 24, 24]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_pass_names_the_node_whose_two_objects_do_not_match_and_the_next_pass_is_right(create_graph: bool) -> None:
    shapes = [(3, 1), (2,)]
    leaf = fanin.Leaf(Broadcasts(np.zeros(2)))
    node = fanin.Node(lambda g: g, edges=[(leaf, 0)], name="sum")
    both = fanin.Node(lambda g: [Broadcasts(np.ones(s)) for s in shapes], edges=[(node, 0), (node, 0)], name="both")
    with pytest.raises(ValueError, match=r"slot 0, key 1: expected .*\(3, 1\) as those before(.|\n)*in sum"):
        fanin.backward([(both, 0, 1.0)], create_graph=create_graph, keep_graph=True)
    assert leaf.grad is None
    shapes[0] = (2,)
    fanin.backward([(both, 0, 1.0)], create_graph=create_graph)
    assert leaf.grad.x.tolist() == [2, 2]
