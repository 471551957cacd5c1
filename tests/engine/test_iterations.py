"""An exception of a callback never ends an iteration as if that were complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin


class Raises:
    """An object whose `+` raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __add__(self, other: object) -> Raises:
        raise self.error


def walked(callback: str, error: BaseException) -> tuple[fanin.Leaf, list[fanin.Node]]:
    """Walks a pass in which one callback raises: the leaf, and the nodes that ran."""

    def fails(*args: object, **more: object) -> Any:
        raise error

    leaf = fanin.Leaf(np.zeros(2), accumulate=fails) if callback == "accumulate" else fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g: g * 3, edges=[(leaf, 0)])
    options: dict[str, Any] = {}
    first: Any = np.ones(2)
    roots = [(node, 0, first)]
    if callback == "prehook":
        node.register_prehook(fails)
    elif callback == "hook":
        node.register_hook(fails)
    elif callback == "leaf hook":
        leaf.register_hook(fails)
    elif callback == "after accumulation":
        leaf.register_post_accumulate_grad_hook(fails)
    elif callback == "+":
        roots = [(node, 0, Raises(error)), (node, 0, Raises(error))]
    elif callback in ("schedule", "progress"):
        options[callback] = fails
    ran = []
    walk = fanin.walk(roots, **options)
    for one, sums in walk:
        ran.append(one)
        walk.give(one.fn(*sums))
    return leaf, ran


CALLBACKS = ["prehook", "hook", "leaf hook", "after accumulation", "accumulate", "+", "schedule", "progress"]


@pytest.mark.core
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_walk_raises_the_stop_iteration_of_a_callback_as_a_runtime_error(callback: str) -> None:
    error = StopIteration(3)
    with pytest.raises(RuntimeError, match="walk: a callback raised StopIteration") as caught:
        walked(callback, error)
    assert caught.value.__cause__ is error


@pytest.mark.core
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_walk_raises_every_other_exception_of_a_callback_itself(callback: str) -> None:
    error = IndexError("an index")
    with pytest.raises(IndexError) as caught:
        walked(callback, error)
    assert caught.value is error


@pytest.mark.core
@pytest.mark.parametrize("kind", [IndexError, StopIteration])
@pytest.mark.parametrize("through", [list, tuple, lambda b: [*map(type, b)], lambda b: [*zip(b, b, strict=True)]])
def test_an_iteration_over_a_buffer_raises_what_would_end_it_as_a_runtime_error(
    kind: type[Exception], through: Callable[[Any], object]
) -> None:
    error = kind("of a callback")
    buf = fanin.InputBuffer(3)
    buf.add(0, np.ones(2))
    for _ in range(2):
        buf.add(1, Raises(error))
    with pytest.raises(RuntimeError, match=f"a callback raised {kind.__name__}") as caught:
        through(buf)
    assert caught.value.__cause__ is error
    with pytest.raises(kind) as caught_again:  # no iteration: the exception itself
        buf[1]
    assert caught_again.value is error


@pytest.mark.core
def test_an_iteration_over_a_buffer_ends_after_its_slots() -> None:
    buf = fanin.InputBuffer(3)
    buf.add(1, np.ones(2))
    sums = list(buf)
    assert sums[0] is sums[2] is None and sums[1].tolist() == [1, 1] and len(sums) == 3
