"""A recorded layout checks whether later arrays lie like the recorded ones, and names the first difference."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fanin.analysis.memory import Layout
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core
Array = np.ndarray[Any, Any]
SEED = 20261121


def flat() -> list[Array]:
    """Parameters that are views of one buffer, one array that spans two of them, one of its own, and an empty one."""
    x = np.zeros(100, "f4")
    return [x[:60].reshape(6, 10), x[60:80], x[50:70], np.zeros((2, 3), "i8"), x[80:], x[3:3]]


def test_the_same_relations_in_other_memory_are_the_same_layout() -> None:
    layout = Layout(flat())
    assert len(layout) == 6
    assert layout.components == (0, 0, 0, 1, 2, 3)
    assert layout.offsets == (0, 240, 200, 0, 0, 0)
    first = flat()
    for arrays in (first, tuple(first), iter(flat())):
        assert layout.check(arrays) is None


def changed(what: str) -> tuple[list[Array], tuple[Any, ...]]:
    """The arrays of `flat` with one change, and the expected result of the check."""
    a = flat()
    x = a[1].base
    assert x is not None
    if what == "dtype":
        a[3] = np.zeros((2, 3), "u8")
        return a, (3, "dtype", None)
    if what == "dtype, byte-swapped":
        a[3] = np.zeros((2, 3), ">i8")
        return a, (3, "dtype", None)
    if what == "shape":
        a[3] = np.zeros((3, 2), "i8")
        return a, (3, "shape", None)
    if what == "number of axes":
        a[3] = np.zeros((2, 3, 1), "i8")
        return a, (3, "shape", None)
    if what == "strides":
        a[3] = np.zeros((3, 2), "i8").T
        return a, (3, "strides", None)
    if what == "a negative stride":
        a[1] = a[1][::-1]
        return a, (1, "strides", None)
    if what == "read-only":
        a[3].flags.writeable = False
        return a, (3, "read-only", None)
    if what == "offset":
        a[2] = x[49:69]
        return a, (2, "offset", 0)
    if what == "apart":
        a[1] = np.zeros(20, "f4")
        return a, (1, "apart", 0)
    if what == "the one that joined them is gone":
        a[2] = np.zeros(20, "f4")
        return a, (1, "apart", 0)
    if what == "overlap":
        a[4] = x[79:99]
        return a, (4, "overlap", 1)
    a[3] = x[80:92].view("i8").reshape(2, 3)
    return a, (4, "overlap", 3)


@pytest.mark.parametrize(
    "what",
    [
        "dtype",
        "dtype, byte-swapped",
        "shape",
        "number of axes",
        "strides",
        "a negative stride",
        "read-only",
        "offset",
        "apart",
        "the one that joined them is gone",
        "overlap",
        "overlap of another dtype",
    ],
)
def test_the_first_difference_is_named(what: str) -> None:
    arrays, said = changed(what)
    assert Layout(flat()).check(arrays) == said
    assert Layout(arrays).check(arrays) is None


def test_strides_without_meaning_are_not_compared() -> None:
    """Strides along axes of extent 1 and of empty arrays, equal dtypes that are other objects, where memory is."""
    x = np.zeros((4, 6))
    record = [("a", "i4"), ("b", "f8")]
    layout = Layout([x[:, 2:3], x[1:1], np.zeros(3, record), np.zeros(2, ">f4")])
    odd = np.lib.stride_tricks.as_strided(x[:, 2:], (4, 1), (48, 12345))
    assert (
        layout.check(
            [
                odd,
                np.zeros((0, 6), order="F"),
                np.zeros(3, np.dtype(record)),
                np.zeros(2, np.dtype("f4").newbyteorder(">")),
            ]
        )
        is None
    )
    assert layout.check([odd, np.zeros((0, 6)), np.zeros(3, [("a", "i4"), ("c", "f8")]), np.zeros(2, ">f4")]) == (
        2,
        "dtype",
        None,
    )


def test_columns_that_now_are_arrays_of_their_own_are_the_same_if_their_strides_are() -> None:
    m = np.zeros((5, 4))
    layout = Layout(list(m.T))
    assert layout.components == (0, 1, 2, 3)
    assert layout.check([np.zeros((5, 4))[:, 0] for _ in range(4)]) is None
    assert layout.check([m[:, 0], m[:, 2], m[:, 1], m[:, 3]]) is None
    assert layout.check([m[:, 0], m[:, 1], m[:, 1], m[:, 3]]) == (2, "overlap", 1)


def test_a_read_only_array_that_became_writable_is_reported() -> None:
    x = np.zeros(3)
    x.flags.writeable = False
    layout = Layout([x])
    assert layout.check([np.zeros(3)]) == (0, "writable", None)


@pytest.mark.parametrize("count", sizes(500, 1500))
def test_a_layout_is_the_same_exactly_where_numpy_finds_it_so(count: int) -> None:
    rng = np.random.default_rng(SEED)
    seen: Counter[str] = Counter()
    for _ in range(count):
        n = int(rng.integers(1, 8))
        places = rng.integers(0, 30, (n, 2))
        moved = places + (rng.random((n, 1)) < 0.15) * rng.integers(-3, 4, (n, 2)) + int(rng.integers(0, 5))
        sides = rng.integers(1, 6, (n, 2))

        def views_at(at: Any, sides: Any = sides) -> list[Array]:
            m = np.zeros((60, 60), "i2")
            return [m[i : i + h, j : j + w] for (i, j), (h, w) in zip(np.maximum(at, 0), sides, strict=True)]

        was, now = views_at(places), views_at(moved)
        said = Layout(was).check(now)
        assert (said is None) == (relations(was) == relations(now)), (places, moved, sides, said)
        seen["same" if said is None else said[1]] += 1
    assert min(seen[w] for w in ("same", "apart", "offset", "overlap")) > count // 50, f"seed {SEED}: {seen}"


def relations(arrays: list[Array]) -> list[tuple[Any, ...]]:
    """For each array its component's first member and the distance to it, by NumPy's exact answers."""
    first = list(range(len(arrays)))
    meet = [p for p in itertools.combinations(range(len(arrays)), 2) if np.shares_memory(arrays[p[0]], arrays[p[1]])]
    for _ in arrays:
        for i, j in meet:
            first[i] = first[j] = min(first[i], first[j])
    at = [x.__array_interface__["data"][0] for x in arrays]
    return [(f, at[i] - at[f]) for i, f in enumerate(first)]


def test_a_layout_references_no_array() -> None:
    class Kept(np.ndarray[Any, Any]):
        pass

    x = np.zeros(3).view(Kept)
    gone = weakref.ref(x)
    layout = Layout([x])
    layout.check([x])
    del x
    assert gone() is None
    assert layout.check([np.zeros(3)]) is None


def test_a_layout_leaks_nothing() -> None:
    hooks.memory()  # skips in a release, which counts no blocks
    x = np.zeros(9)
    before = hooks.blocks()
    for arrays in ([], [x], [x[:4], x[2:], x[8:], np.zeros(3)]):
        layout = Layout(arrays)
        assert layout.check(arrays) is None
        layout.check([a.copy() for a in arrays])  # compares the components too
        with pytest.raises(ValueError, match="expected"):
            layout.check([*arrays, x])
        del layout
        assert hooks.blocks() == before


def test_bad_arguments_are_refused() -> None:
    layout = Layout(flat())
    with pytest.raises(ValueError, match=r"^Layout\.check: expected 6 arrays, as were recorded, got 5$"):
        layout.check(flat()[1:])
    with pytest.raises(TypeError, match=r"^Layout\.check: array 1: a NoneType is no array"):
        layout.check([flat()[0], None])
    with pytest.raises(TypeError, match=r"^Layout: array 0: a float is no array"):
        Layout([1.0])
    with pytest.raises(TypeError, match=r"^Layout: expected a sequence of arrays"):
        Layout(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget"):
        Layout([], budget=-1)
    assert Layout([]).check([]) is None


class At:
    """float32 elements at an address, which NumPy does not read."""

    def __init__(self, address: int, n: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (n,), "typestr": "<f4", "version": 3}


def test_an_array_that_would_end_beyond_memory_is_not_taken_to_lie_apart_from_others() -> None:
    far, near = np.asarray(At(2**64 - 16, 100)), np.zeros(100, "f4")
    layout = Layout([near, near.copy()])
    assert layout.check([near, near.copy()]) is None
    for pair in ([near, far], [far, near]):
        found = layout.check(pair)  # a message with the arrays would read them
        assert found == (1, "overlap", 0)
