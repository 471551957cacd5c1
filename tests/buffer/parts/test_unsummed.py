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
NO_NUMBERS: list[Any] = [
    np.array([1, 2, 3], "m8[s]"),
    np.array([1, 2, 3], "M8[s]"),
    np.array(["a", "b", "c"]),
    np.array([b"a", b"b", b"c"]),
    np.zeros(3, [("a", "f4")]),
    np.zeros(3, "V4"),
]
OTHERS: list[Any] = [np.ones(3, ml_dtypes.int4), np.array([1, None, 2], object)]


def named(x: Any) -> str:
    return str(x.dtype)


class Sub(np.ndarray[Any, Any]):
    pass


def given_to(slot: Any) -> fanin.InputBuffer:
    return fanin.InputBuffer([slot], name="g")


def full() -> fanin.InputBuffer:
    buf = given_to(fanin.Slot(name="w1"))
    buf.add_many([0, 0], [np.ones(3), np.ones(3)])
    return buf


def targeted(x: Any) -> None:
    with given_to(fanin.Slot(3, x.dtype)).target(0):
        pass


def engine(fn: Any, root: Any) -> Any:
    leaf = fanin.Leaf(np.ones(3))
    fanin.backward([(fanin.Node(fn, edges=[(leaf, 0)]), 0, root)])


def hooked(x: Any) -> None:
    leaf = fanin.Leaf(np.ones(3))
    leaf.register_hook(lambda g: x)
    fanin.backward([(fanin.Node(lambda g: g, edges=[(leaf, 0)]), 0, np.ones(3))])


def walked(x: Any) -> None:
    node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.ones(3)), 0)])
    for _ in (steps := fanin.walk([(node, 0, np.ones(3))])):
        steps.give(x)


def recorded(x: Any) -> None:
    tree = fanin.GraphTree("cpu")
    with tree.step():
        tree.function(lambda a: a + a)(x)


#: The entry points for an array or a dtype, and what the message must name besides the dtype. In these an object
#: array is none of numbers, too: the slot declares what it holds, or there is no slot.
DOORS: dict[str, tuple[Any, str]] = {
    "add, declared": (lambda x: given_to(fanin.Slot(3, name="w1")).add(0, x, key=3), r"^g: slot 0 \(w1\), key 3: "),
    "add_n(out=)": (lambda x: fanin.add_n([np.ones(3)], out=x), "^add_n: out: "),
    "add_n(accumulate=)": (lambda x: fanin.add_n([np.ones(3)], accumulate=x.dtype), "^add_n: "),
    "Slot(dtype=)": (lambda x: fanin.Slot(3, x.dtype), "^Slot: dtype: "),
    "Slot(accumulate=)": (lambda x: fanin.Slot(3, "float32", accumulate=x.dtype), "^Slot: accumulate: "),
    "InputBuffer([x])": (lambda x: given_to(x), "^g: slot 0: "),
    "InputBuffer(accumulate=)": (lambda x: fanin.InputBuffer(1, accumulate=x.dtype), "dtype .* is not summed"),
    "target": (targeted, "Slot: dtype: dtype .* is not summed"),
    "take(out=)": (lambda x: full().take(out=[x]), r"^g: slot 0 \(w1\): out: "),
    "take(slot=, out=)": (lambda x: full().take(slot=0, out=x), r"^g: slot 0 \(w1\): out: "),
    "a gradient of the engine": (lambda x: engine(lambda g: x, np.ones(3)), "returned an invalid gradient at index 0"),
    "a hook's gradient": (hooked, "returned an invalid gradient"),
    "a gradient by hand": (walked, "returned an invalid gradient at index 0"),
    "Leaf": (lambda x: fanin.Leaf(x, name="w"), "^w: slot 0: "),
    "Leaf(accumulate=)": (lambda x: fanin.Leaf(np.ones(3), accumulate=x.dtype), "dtype .* is not summed"),
    "Zero": (lambda x: fanin.Zero(3, x.dtype), "^Zero: "),
    "Machine.array": (lambda x: fanin.sim.Machine().array(x), "^Machine.array: "),
    "Machine.empty": (lambda x: fanin.sim.Machine().empty(3, x.dtype), "dtype .* is not summed"),
    "a function of a graph tree": (recorded, "operand 0 has dtype"),
}
#: And those where an object array is summed by its own + (A8).
OPEN: dict[str, tuple[Any, str]] = {
    "add": (lambda x: given_to(fanin.Slot(name="w1")).add(0, x, key=3), r"^g: slot 0 \(w1\), key 3: the array "),
    "add, a subclass": (lambda x: given_to(fanin.Slot()).add(0, x.view(Sub)), "^g: slot 0: the array "),
    "add_many": (lambda x: given_to(fanin.Slot()).add_many([0], [x]), "^g: slot 0: the array "),
    "add_n": (lambda x: fanin.add_n([x, x]), "^add_n: the array "),
    "a root of the engine": (lambda x: engine(lambda g: g, x), "was given an invalid gradient at index 0"),
}


@pytest.mark.parametrize("door", [*DOORS, *OPEN])
def test_every_entry_point_raises_one_error_that_names_the_place_and_the_unsupported_dtype(door: str) -> None:
    call, says = (DOORS | OPEN)[door]
    arrays = [x for x in [*UNSUMMED, *NO_NUMBERS, *OTHERS] if x.ndim and (door in DOORS or x.dtype != np.object_)]
    for x in arrays:
        with pytest.raises(fanin.DTypeError, match=says) as e:
            call(x)
        assert e.type is fanin.DTypeError
        assert str(x.dtype) in str(e.value) or x.dtype == np.object_, str(e.value)
    call(np.ones(3))


@pytest.mark.parametrize("x", [*UNSUMMED, *NO_NUMBERS, OTHERS[0]], ids=named)
def test_a_refusal_changes_nothing_and_names_the_remedy(x: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(name="w1")], name="g")
    with pytest.raises(fanin.DTypeError, match=r"(the array|the scalar) has dtype .*x\.astype\(.*Slot\(combine=f\)"):
        buf.add(0, x)
    assert buf.take() == [None]


@pytest.mark.parametrize("x", [np.longdouble(1), np.datetime64(1, "s"), np.void(b"ab")], ids=named)
def test_a_numpy_scalar_of_such_a_dtype_is_the_same_error(x: Any) -> None:
    with pytest.raises(fanin.DTypeError, match="slot 0: the scalar has dtype "):
        fanin.InputBuffer(1).add(0, x)


def test_the_error_is_each_class_by_which_libraries_call_it() -> None:
    for kind in (ValueError, TypeError, BufferError):
        with pytest.raises(kind, match=r"float128|longdouble"):
            fanin.add_n([np.ones(3, np.longdouble)])
    assert fanin.DTypeError.__module__ == "fanin"


@pytest.mark.parametrize("x", NO_NUMBERS[:3], ids=named)
def test_combine_sums_arrays_without_numbers(x: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(combine=lambda old, new: np.concatenate([old, new]))])
    buf.add(0, x)
    buf.add(0, x)
    assert buf.take(slot=0).tolist() == [*x.tolist(), *x.tolist()]


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


def test_objects_and_arrays_of_unsupported_dtypes_sum_together() -> None:
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
