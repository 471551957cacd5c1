"""An exception that is raised again has the notes of the pass that raised it last, and what a hook returns has its
class in the message.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core


def failing(error: BaseException, name: str) -> fanin.Node:
    def fn(g: Any) -> Any:
        raise error

    return fanin.Node(fn, edges=[(fanin.Leaf(np.zeros(2)), 0)], name=name)


def raised_by(root: fanin.Node | fanin.Leaf, **options: Any) -> BaseException:
    with pytest.raises(BaseException) as e:
        fanin.backward([(root, 0, np.ones(2))], **options)
    return e.value


def places(error: BaseException) -> list[str]:
    """The names of the nodes in the notes."""
    return [note.partition(" (")[0] for note in error.__notes__ if note.startswith("in ")]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_raised_again_names_only_the_node_of_the_last_pass(workers: int) -> None:
    error = ValueError("always the same object")
    for i in range(40):
        assert raised_by(failing(error, f"n{i}"), workers=workers) is error
        assert error.__notes__ == [error.__notes__[0]] and places(error) == [f"in n{i}"]


def test_notes_of_the_users_own_stay() -> None:
    error = ValueError("always the same object")
    error.add_note("mine")
    for i in range(3):
        raised_by(failing(error, f"n{i}"))
        error.add_note(f"mine {i}")
    assert [note for note in error.__notes__ if note.startswith("mine")] == ["mine", "mine 0", "mine 1", "mine 2"]
    assert places(error) == ["in n2"]


def test_nested_passes_keep_the_note_of_each_level() -> None:
    error = ValueError("always the same object")

    def around(root: fanin.Node, name: str) -> fanin.Node:
        return fanin.Node(lambda g: fanin.backward([(root, 0, g)]), edges=[None], name=name)

    for i in range(3):
        raised_by(around(around(failing(error, f"inner{i}"), f"middle{i}"), f"outer{i}"))
        assert places(error) == [f"in inner{i}", f"in middle{i}", f"in outer{i}"]


def test_the_second_of_two_passes_inside_a_node_replaces_the_notes_of_the_first() -> None:
    error = ValueError("always the same object")

    def twice(g: Any) -> Any:
        raised_by(failing(error, "first"))
        fanin.backward([(failing(error, "second"), 0, g)])

    raised_by(fanin.Node(twice, edges=[None], name="outer"))
    assert places(error) == ["in second", "in outer"]


def test_the_note_that_counts_others_is_of_the_last_pass_too() -> None:
    error = ValueError("always the same object")

    def deeper(depth: int) -> Any:
        if depth == 0:
            raise error
        fanin.backward([(fanin.Node(lambda g: deeper(depth - 1), edges=[None]), 0, 1.0)])

    for depth in (40, 30, 3):
        with pytest.raises(ValueError, match="always"):
            deeper(depth)
        folded = [note for note in error.__notes__ if note.startswith("..")]
        assert folded == ([f".. and {depth - 16} notes more, of the passes around these"] if depth > 16 else [])
        assert len(error.__notes__) == min(depth, 17)


def test_an_exception_that_takes_no_attributes_is_raised_as_it_is() -> None:
    class Closed(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    error = Closed("always the same object")
    for i in range(3):
        assert raised_by(failing(error, f"n{i}")) is error
        assert not hasattr(error, "__notes__")


def test_two_nodes_that_raise_one_object_at_once_do_not_note_it_beside_itself() -> None:
    error, other = ValueError("always the same object"), ValueError("another")
    met = threading.Barrier(2)

    def node(raised: BaseException) -> fanin.Node:
        def fn(g: Any) -> Any:
            met.wait()
            raise raised

        return fanin.Node(fn, edges=[None])

    for second in (error, other):
        both = fanin.Node(lambda g: (g, g), edges=[(node(error), 0), (node(second), 0)])
        first = raised_by(both, workers=2)
        beside = [note for note in first.__notes__ if note.startswith("beside it")]
        assert len(beside) == (second is other)


class Always:
    """An object whose + raises one object."""

    error = ValueError("always the same object")

    def __add__(self, other: Any) -> Any:
        raise self.error

    __radd__ = __add__


def test_notes_of_add_n_ranks_and_releases_are_there_once() -> None:
    error = Always.error

    def rank(group: Any) -> None:
        raise error

    def release() -> None:
        raise error

    for _ in range(5):
        with pytest.raises(ValueError, match="always"):
            fanin.add_n([Always(), Always()])
        with pytest.raises(ValueError, match="always"):
            fanin.dist.threads(1, rank, timeout=None)
    node = fanin.Node(lambda g: g, edges=[None], name="n", release=release)
    with pytest.raises(ValueError, match="always"):
        fanin.free([node])
    assert len(error.__notes__) == len(set(error.__notes__)) <= 4


# ---------------------------------------------------------------- what a hook returns


class Masked(np.ma.MaskedArray):
    pass


WRONG = {
    "MaskedArray": np.ma.ones(2, "f4"),
    "Masked": Masked([1.0, 2.0]),
    "matrix": np.zeros((1, 2)).view(np.matrix),
    "list": [1.0, 2.0],
    "str": "ab",
    "array of float0": np.zeros(2, [("float0", np.void, 0)]),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("when", ["slot", "pre"])
def test_a_hook_that_returns_another_class_is_an_error_that_names_the_class(when: str, name: str) -> None:
    node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(2, "f4")), 0)], name="n")
    if when == "slot":
        node.register_hook(lambda g: WRONG[name])
    else:
        node.register_prehook(lambda sums: (WRONG[name],))
    words = rf"returned an invalid gradient.*: expected .*, got an? {name}"
    if name[:2] in ("Ma", "ma"):
        words += ", which sums by its own \\+: return np.asarray\\(x\\)"
    with pytest.raises(ValueError, match=words):
        fanin.backward([(node, 0, np.ones(2, "f4"))])


def test_a_hook_that_returns_an_array_of_a_dtype_without_a_sum_is_an_error_that_names_the_dtype() -> None:
    node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(2, "f4")), 0)])
    node.register_hook(lambda g: np.array(["a", "b"]))
    with pytest.raises(fanin.DTypeError, match=r"expected \(2,\) float32 on cpu, got an array of dtype <U1: x.astype"):
        fanin.backward([(node, 0, np.ones(2, "f4"))])
