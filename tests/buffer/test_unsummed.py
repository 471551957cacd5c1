"""Arrays of dtypes that are not summed: objects where the slot has a combine, one class of error elsewhere."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin

UNSUMMED: list[Any] = [
    np.ones(3, ">f2"),
    np.ones(3, ">f8"),
    np.arange(3, dtype=">i4"),
    np.ones(3, ">c16"),
    np.ones(3, np.longdouble),
    np.ones(3, np.clongdouble),
    np.longdouble(1),
    np.ones(3, ml_dtypes.float8_e4m3b11fnuz),
]
NO_NUMBERS: list[Any] = [np.array([1, 2, 3], "m8[s]"), np.array(["a", "b", "c"]), np.zeros(3, [("a", "f4")])]


def named(x: Any) -> str:
    return str(x.dtype)


class Sub(np.ndarray[Any, Any]):
    pass


@pytest.mark.parametrize("x", UNSUMMED, ids=named)
def test_elsewhere_they_are_one_error_that_names_slot_and_dtype(x: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(name="w1")], name="g")
    for given in (x, np.asarray(x).view(Sub)):
        with pytest.raises(BufferError, match=r"g: slot 0 \(w1\)(, key 3)?: the (array|scalar) has dtype "):
            buf.add(0, given, key=3)
        with pytest.raises(BufferError):
            buf.add_many([0], [given])
    with pytest.raises(BufferError, match="add_n"):
        fanin.add_n([x, x])
    assert buf.take() == [None]
    with pytest.raises(ValueError, match="Slot: dtype"):
        fanin.Slot(dtype=x.dtype)


@pytest.mark.parametrize("x", NO_NUMBERS, ids=named)
def test_what_holds_no_numbers_has_no_sum(x: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot(combine=lambda old, new: np.concatenate([old, new]))])
    with pytest.raises(TypeError, match=r"slot 0: the array has dtype .* has no sum"):
        buf.add(0, x)
    buf.add(1, x)
    buf.add(1, x)
    assert buf.take(slot=1).tolist() == [*x.tolist(), *x.tolist()]


@pytest.mark.parametrize("x", UNSUMMED, ids=named)
@pytest.mark.parametrize("budget", [0, None, math.inf])
def test_a_slot_with_combine_sums_them(x: Any, budget: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(combine=lambda old, new: old + new), fanin.Slot()], budget=budget)
    for k in (2, 0, 1):
        buf.add(0, x, key=k)
    (got, _), want = buf.take(), x + x + x
    assert (type(got), got.dtype) == (type(want), want.dtype) and np.array_equal(got, want)
    buf.add(0, x)
    assert buf.take(slot=0) is x, "a single one comes back as it is"


def test_they_meet_arrays_that_are_summed_as_objects_do() -> None:
    seen: list[Any] = []

    def combine(old: Any, new: Any) -> Any:
        seen.append((old.dtype.str, new.dtype.str))
        return old + new

    buf = fanin.InputBuffer([fanin.Slot(combine=combine)])
    for x in (np.ones(2), np.ones(2), np.ones(2, ">f2"), np.ones(2, np.float32)):
        buf.add(0, x)
    assert buf.take()[0].tolist() == [4, 4]
    assert seen == [("<f8", ">f2")], (
        "what comes before the first of them is summed as ever, and what combine made is an array again"
    )
