"""What is parked is others' memory, and what is added others' objects: whatever becomes of them meanwhile ends in an error that names it, never in a crash."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot, Sparse

pytestmark = pytest.mark.core

N = 3000


def shrunk(a: Any) -> None:
    """Its memory goes elsewhere, or back: what was parked lies there no longer."""
    a.resize(5, refcheck=False)


def plain() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, a


def strided() -> tuple[Any, Any]:
    a = np.ones(2 * N)
    return a, a[::2]


def view() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, a[:]


def by_memoryview() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, np.asarray(memoryview(a))


def fortran() -> tuple[Any, Any]:
    a = np.ones((N // 10, 10), order="F")
    return a, a


def converted() -> tuple[Any, Any]:
    a = np.ones(N, np.float32)
    return a, a


def coo_values() -> tuple[Any, Any]:
    a = np.ones(N)
    return a, Sparse("coo", (np.arange(N).reshape(1, N), a), (N,))


def coo_indices() -> tuple[Any, Any]:
    a = np.zeros((1, N), np.int64)
    return a, Sparse("coo", (a, np.ones(N)), (N,))


def csr_pointers() -> tuple[Any, Any]:
    a = np.arange(N + 1)
    return a, Sparse("csr", (a, np.zeros(N, np.int64), np.ones(N)), (N, 1))


WAYS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "take of two": lambda b, s: (b.add(0, np.ones(s)), b.take()),
    "take(out=)": lambda b, s: b.take(out=[np.empty(s)]),
    "take(out=) of two": lambda b, s: (b.add(0, np.ones(s)), b.take(out=[np.empty(s)])),
    "take(scale=)": lambda b, s: b.take(scale=2.0),
    "take(writable=True)": lambda b, s: b.take(writable=True),
    "snapshot": lambda b, s: (b.add(0, np.ones(s)), b[0]),
    "add": lambda b, s: (b.add(0, np.ones(s)), b.take()),
    "add_many": lambda b, s: (b.add_many([0], [np.ones(s)]), b.take()),
}
MADE: list[Callable[[], tuple[Any, Any]]] = [
    plain,
    strided,
    view,
    by_memoryview,
    fortran,
    converted,
    coo_values,
    coo_indices,
    csr_pointers,
]


@pytest.mark.parametrize("made", MADE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_memory_that_was_resized_while_it_was_parked_is_not_read(made: Callable[[], tuple[Any, Any]], way: str) -> None:
    for stats, budget, copy in itertools.product((False, True), (0, None), (False, True)):
        owner, gradient = made()
        shape = tuple(gradient.shape)
        buf = fanin.InputBuffer([Slot(name="w1")], stats=stats, budget=budget, name="grads")
        buf.add(0, gradient, copy=copy)
        shrunk(owner)
        if copy:
            WAYS[way](buf, shape)
            continue
        with pytest.raises(
            RuntimeError,
            match=r"^grads: slot 0 \(w1\): a gradient added without a key was changed after it was added .*copy=True",
        ):
            WAYS[way](buf, shape)
        buf.clear()
        buf.add(0, np.ones(3))
        assert buf.take()[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("donate", [False, True])
def test_the_key_of_a_gradient_that_was_changed_is_named(donate: bool) -> None:
    for sink in ("plain", "stats", "exact", "debug"):
        with fanin.set_options(debug=sink == "debug"):
            buf = fanin.InputBuffer(
                2, stats=sink == "stats", accumulate="exact" if sink == "exact" else None, name="grads"
            )
            a = np.ones(N)
            buf.add(1, np.ones(N), key=0)
            buf.add(1, a, key=7, donate=donate)
            shrunk(a)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"^grads: slot 1: the gradient added with key 7 was changed"):
                    buf.take()
            buf.clear()


def test_what_an_object_of_another_slot_moves_during_the_take_is_not_read() -> None:
    """combine is others' code: it may resize what a later slot, or out=, is about to read or write."""
    moved: list[Any] = []

    def combine(old: Any, new: Any) -> Any:
        for a in moved:
            shrunk(a)
        moved.clear()
        return old + new

    for stats in (False, True):
        for what in ("term", "only term", "out"):
            buf = fanin.InputBuffer([Slot(combine=combine), Slot()], stats=stats, budget=float("inf"))
            a, out = np.ones(N), np.empty(N)
            buf.add(0, "x")
            buf.add(0, "y")
            buf.add(1, a)
            if what != "only term":
                buf.add(1, np.ones(N))
            moved.append(out if what == "out" else a)
            with pytest.raises(RuntimeError, match=r"slot 1: .*was changed"):
                buf.take(out=[None, out])
            assert not moved


def test_an_empty_or_hand_through_gradient_that_was_resized_is_no_error() -> None:
    for _ in range(2):
        a, b = np.ones(N), np.ones((0, 3))
        buf = fanin.InputBuffer(2)
        buf.add(0, a)
        buf.add(1, b)
        buf.add(1, np.ones((0, 3)))
        shrunk(a)
        one, two = buf.take()
        assert one is a  # A14: the very object, whatever it is now
        assert two.shape == (0, 3)


# ---------------------------------------------------------------- sparse gradients whose parts are not what they should be (16)


def sparse_parts(format: str) -> tuple[list[Any], tuple[int, ...]]:
    if format == "coo":
        return [np.array([[0, 1]]), np.ones(2)], (4,)
    values = np.ones((3, 1, 1)) if format in ("bsr", "bsc") else np.ones(3)
    return [np.arange(4), np.arange(3), values], (3, 3)


WRONG: dict[str, Any] = {
    "None": None, "int": 1, "list": [1, 2, 3], "str": "x", "bytes": b"xyz", "objects": np.array([object()] * 3), "masked": np.ma.ones(3), "0-d": np.array(1.0),
    "Zero": fanin.Zero((3,), "int32"), "object": object(), "memoryview": memoryview(b"abcd"), "strings": np.array(["a"] * 3), "long double": np.zeros(3, "g"),
    "4 axes": np.zeros((2, 3, 4, 5)), "Sparse": Sparse("coo", (np.array([[0]]), np.ones(1)), (3,)), "huge": np.broadcast_to(np.int64(2**62), (3,)), "type": type, "function": np.ones,
    "struct": np.zeros(3, [("a", "i4")]), "dates": np.zeros(3, "M8[s]"), "foreign": np.zeros(3, np.dtype("i4").newbyteorder()), "int8": np.zeros(3, np.int8), "none": np.zeros(0, np.int64),
    "negative": np.full(4, -1), "short": np.zeros(1, np.int64),
}  # fmt: skip


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_part_of_a_sparse_gradient_that_is_no_part_is_an_error_that_names_the_slot(format: str) -> None:
    refused = taken = 0
    good, shape = sparse_parts(format)
    for at, (_, wrong) in itertools.product(range(len(good)), WRONG.items()):
        parts = [*good[:at], wrong, *good[at + 1 :]]
        buf = fanin.InputBuffer([Slot(name="w1")], name="grads")
        try:
            buf.add(0, Sparse(format, tuple(parts), shape))
            buf.add(0, Sparse(format, tuple(good), shape))
            buf.take()
            taken += 1
        except (TypeError, ValueError, BufferError) as e:
            assert str(e).startswith("grads: slot 0 (w1): "), e
            refused += 1
    assert refused >= 20 * len(good)
    assert taken or format not in ("csr", "csc")  # values of int8, and the like
    buf = fanin.InputBuffer(1)
    buf.add(0, Sparse(format, tuple(good), shape))
    assert isinstance(buf.take()[0], Sparse)
