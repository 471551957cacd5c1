"""What bad input gets: an exception of the right class that names buffer, slot, key, what was expected and what came;
and all is as before.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import InputBuffer, Slot, Sparse, Zero, _core
from kit import hooks
from kit.support import CSRC

pytestmark = pytest.mark.core


def grads() -> InputBuffer:
    """Slot 0 has a float32 of shape (2,), slot 1 is declared, slot 2 expects two, slot 3 has keys 0 and 5."""
    slots = [Slot(), Slot(shape=(3,), dtype="float32", name="b1"), Slot(name="w1"), Slot()]
    buf = InputBuffer(slots, name="grads")
    buf.add(0, np.ones(2, np.float32))
    buf.expect(2, 1)
    buf.add(2, 1.0)
    buf.add(3, 1.0, key=0)
    buf.add(3, 2.0, key=5)
    return buf


ADDS: list[tuple[str, Callable[[InputBuffer], Any], type[Exception], str]] = [
    ("slot out of range", lambda b: b.add(4, 1.0), IndexError, "grads: expected a slot from 0 to 3, got 4 (S1)"),
    (
        "slot out of range, and no array",
        lambda b: b.add(4, object()),
        IndexError,
        "grads: expected a slot from 0 to 3, got 4 (S1)",
    ),
    ("negative slot", lambda b: b.add(-1, 1.0), IndexError, "grads: slot: expected a non-negative integer, got -1"),
    (
        "huge slot",
        lambda b: b.add(10**30, 1.0),
        IndexError,
        "grads: slot: expected a non-negative integer that fits 64 bits, got 1000",
    ),
    ("slot of bool", lambda b: b.add(True, 1.0), TypeError, "grads: slot: expected an integer, got the bool True"),
    ("slot of np.bool", lambda b: b.add(np.True_, 1.0), TypeError, "grads: slot: expected an integer, got the bool"),
    ("slot of float", lambda b: b.add(0.0, 1.0), TypeError, "grads: slot: expected an integer, got a float"),
    ("slot of None", lambda b: b.add(None, 1.0), TypeError, "grads: slot: expected an integer, got None"),
    (
        "shape",
        lambda b: b.add(0, np.ones(3)),
        ValueError,
        "grads: slot 0: expected a gradient of shape (2,) as the first one, got (3,) (A9)",
    ),
    (
        "shape, never broadcast",
        lambda b: b.add(0, np.ones((2, 1))),
        ValueError,
        "expected a gradient of shape (2,) as the first one, got (2, 1)",
    ),
    (
        "scalar for an array",
        lambda b: b.add(0, 1.0),
        ValueError,
        "expected a gradient of shape (2,) as the first one, got ()",
    ),
    (
        "declared shape",
        lambda b: b.add(1, np.ones(2)),
        ValueError,
        "grads: slot 1 (b1): expected a gradient of shape (3,) (or of a shape that is broadcast from it), got (2,)",
    ),
    (
        "complex into real",
        lambda b: b.add(1, np.ones(3, complex)),
        ValueError,
        "grads: slot 1 (b1): expected dtype float32, got complex128",
    ),
    (
        "no array",
        lambda b: b.add(0, object(), key=None),
        TypeError,
        "grads: slot 0: an object is no array and has no +",
    ),
    ("list", lambda b: b.add(1, [1.0], key=7), TypeError, "grads: slot 1 (b1), key 7: a list is no array"),
    (
        "strings",
        lambda b: b.add(1, np.array(["x"])),
        TypeError,
        "grads: slot 1 (b1): the array has dtype <U1, which has no sum",
    ),
    (
        "byte order",
        lambda b: b.add(0, np.ones(2, ">f4")),
        BufferError,
        "grads: slot 0: the array has dtype >f4 of foreign byte order",
    ),
    (
        "negative key",
        lambda b: b.add(3, 1.0, key=-1),
        ValueError,
        "grads: slot 3: key: expected a non-negative integer, got -1",
    ),
    (
        "huge key",
        lambda b: b.add(3, 1.0, key=2**63),
        ValueError,
        "grads: slot 3: key: expected a non-negative integer that fits 64 bits",
    ),
    (
        "key of bool",
        lambda b: b.add(3, 1.0, key=True),
        TypeError,
        "grads: slot 3: key: expected an integer, got the bool True",
    ),
    (
        "key of float",
        lambda b: b.add(3, 1.0, key=1.0),
        TypeError,
        "grads: slot 3: key: expected an integer, got a float",
    ),
    (
        "the same key",
        lambda b: b.add(3, 1.0, key=5),
        ValueError,
        "grads: slot 3, key 5: this key has contributed already",
    ),
    ("no key among keys", lambda b: b.add(3, 1.0), ValueError, "grads: slot 3: this pass adds with keys to this slot"),
    (
        "a key among none",
        lambda b: b.add(0, np.ones(2), key=1),
        ValueError,
        "grads: slot 0, key 1: this pass adds without keys",
    ),
    (
        "one too many",
        lambda b: b.add(2, 1.0),
        ValueError,
        "grads: slot 2 (w1): expected 1 contribution, got one more (A16)",
    ),
    ("stream", lambda b: b.add(0, np.ones(2), stream="s"), TypeError, "stream"),
    ("unknown argument", lambda b: b.add(0, np.ones(2), keys=1), TypeError, "add() has no argument 'keys'"),  # type: ignore[call-arg]
    ("an argument twice", lambda b: b.add(0, 1.0, slot=0), TypeError, "add() got 'slot' twice"),  # type: ignore[misc]
    ("by position", lambda b: b.add(0, 1.0, 3), TypeError, "add() takes slot and gradient by position"),  # type: ignore[misc]
    ("nothing", lambda b: b.add(), TypeError, "add() needs 'slot'"),  # type: ignore[call-arg]
    (
        "a flag that is an array",
        lambda b: b.add(0, np.ones(2), donate=np.ones(2)),
        TypeError,
        "add(): donate: expected a bool",
    ),  # type: ignore[arg-type]
    ("expect", lambda b: b.expect(0, -1), ValueError, "grads: slot 0: n: expected a non-negative integer, got -1"),
    (
        "expect too few",
        lambda b: b.expect(0, 0),
        ValueError,
        "grads: slot 0: expects 0 contributions but has 1 already",
    ),
    (
        "expect of bool",
        lambda b: b.expect(0, True),
        TypeError,
        "grads: slot 0: n: expected an integer, got the bool True",
    ),
    ("ready", lambda b: b.ready(0), ValueError, "grads: slot 0: ready() needs expect(0, n)"),
    ("snapshot", lambda b: b[-1], IndexError, "grads: slot: expected a non-negative integer, got -1"),
    ("slice", lambda b: b[0:1], TypeError, "grads: slot: expected an integer, got a slice"),  # type: ignore[index]
    ("explain", lambda b: b.explain(4), IndexError, "grads: expected a slot from 0 to 3, got 4"),
    (
        "out is bare",
        lambda b: b.take(out=np.ones(2)),
        TypeError,
        "grads: out: expected a list of 4 arrays or Nones, got a numpy.ndarray: give [array]",
    ),
    (
        "out too short",
        lambda b: b.take(out=[None]),
        ValueError,
        "grads: out: expected 4 entries, one for each slot, got 1",
    ),
    (
        "out of a number",
        lambda b: b.take(out=[1.0, None, None, None]),
        TypeError,
        "grads: slot 0: out: expected a dense array to write into, got a float",
    ),
    (
        "out of an object",
        lambda b: b.take(out=[None, [], None, None]),
        TypeError,
        "grads: slot 1 (b1): a list is no array",
    ),
    (
        "out of shape",
        lambda b: b.take(out=[np.ones(3), None, None, None]),
        ValueError,
        "grads: slot 0: out= has shape (3,), the sum (2,)",
    ),
    (
        "out of dtype",
        lambda b: b.take(out=[np.ones(2, int), None, None, None]),
        ValueError,
        "out= of dtype int64 cannot take a sum of dtype float32",
    ),
    (
        "out repeats itself",
        lambda b: b.take(out=[overlapping(), None, None, None]),
        BufferError,
        "grads: slot 0: out: expected an array that can be written",
    ),
    (
        "out is read-only",
        lambda b: b.take(out=[frozen(), None, None, None]),
        BufferError,
        "got a numpy.ndarray that is read-only",
    ),
    ("scale of str", lambda b: b.take(scale="2"), TypeError, "grads: scale: expected a number, got a str"),  # type: ignore[arg-type]
    (
        "scale of array",
        lambda b: b.take(scale=np.ones(2)),
        TypeError,
        "grads: scale: expected a number, got a numpy.ndarray",
    ),  # type: ignore[arg-type]
    ("scale too large", lambda b: b.take(scale=10**400), ValueError, "grads: scale: 1000"),
    ("complex scale", lambda b: b.take(scale=1j), ValueError, "slot 0: scale=0+1j: a float32 sum needs a real number"),
    ("take of stream", lambda b: b.take("s"), TypeError, "stream"),
]


def overlapping() -> Any:
    return np.lib.stride_tricks.as_strided(np.ones(3, np.float32), (2,), (2,))


def frozen() -> Any:
    x = np.ones(2, np.float32)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("what", [a[0] for a in ADDS])
def test_a_call_that_raises_names_the_cause_and_changes_nothing(what: str) -> None:
    _, call, kind, words = next(a for a in ADDS if a[0] == what)
    buf = grads()
    explained = [buf.explain(i) for i in range(4)]
    counted = buf.counters
    gc.collect()
    blocks = hooks.memory()[0]
    with pytest.raises(kind, match=re.escape(words)):
        call(buf)
    gc.collect()
    assert hooks.memory()[0] == blocks
    assert [buf.explain(i) for i in range(4)] == explained
    assert buf.counters.adds == counted.adds
    results = buf.take()
    assert results[0].tolist() == [1, 1]
    assert (results[1], results[2], results[3]) == (None, 1.0, 3.0)


MADE: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    (
        "one array",
        lambda: InputBuffer(np.ones(3)),
        TypeError,
        "InputBuffer: slots: expected a count or a sequence of arrays and Slots, got one numpy.ndarray: give [array]",
    ),
    ("one Slot", lambda: InputBuffer(Slot()), TypeError, "got one Slot: give [array]"),
    (
        "one Sparse",
        lambda: InputBuffer(Sparse("coo", (np.zeros((1, 0), int), np.zeros(0)), (3,))),
        TypeError,
        "give [array]",
    ),
    (
        "one string",
        lambda: InputBuffer("ab"),
        TypeError,
        "expected a count or a sequence of arrays and Slots, got a str",
    ),
    (
        "a float",
        lambda: InputBuffer(2.5),
        TypeError,
        "expected a count or a sequence of arrays and Slots, got one float",
    ),
    ("a bool", lambda: InputBuffer(True), TypeError, "slots: expected an integer, got the bool True"),
    ("a dict", lambda: InputBuffer({}), TypeError, "got a dict"),
    ("None", lambda: InputBuffer(None), TypeError, "got None"),
    (
        "negative",
        lambda: InputBuffer(-1, name="grads"),
        ValueError,
        "grads: slots: expected a non-negative integer, got -1",
    ),
    ("more slots than memory", lambda: InputBuffer(2**61), MemoryError, "out of memory"),
    (
        "None among the slots",
        lambda: InputBuffer([None], name="grads"),
        TypeError,
        "grads: slot 0: expected an example array or a fanin.Slot, got None; fanin.Slot() declares nothing",
    ),
    ("a list among the slots", lambda: InputBuffer([np.ones(1), [2.0]]), TypeError, "slot 1: a list is no array"),
    (
        "numbers among the slots",
        lambda: InputBuffer((3, 4), name="grads"),
        TypeError,
        "grads: slot 0: 3 is a number, and no example array: for one slot of a shape give [fanin.Slot(shape=(3, 4))]",
    ),
    (
        "an object among the slots",
        lambda: InputBuffer([Slot(), np.array([None])]),
        fanin.DTypeError,
        "slot 1: the example array has dtype object, which has no sum",
    ),
    (
        "budget NaN",
        lambda: InputBuffer(1, budget=math.nan),
        ValueError,
        "budget: expected a non-negative whole number of bytes, or math.inf, got nan",
    ),
    (
        "budget negative",
        lambda: InputBuffer(1, budget=-1),
        ValueError,
        "budget: expected a non-negative whole number of bytes, or math.inf, got -1",
    ),
    ("budget -inf", lambda: InputBuffer(1, budget=-math.inf), ValueError, "budget"),
    (
        "budget half a byte",
        lambda: InputBuffer(1, budget=0.5),
        ValueError,
        "budget: expected a non-negative whole number",
    ),
    (
        "budget bool",
        lambda: InputBuffer(1, budget=True),
        TypeError,
        'budget: expected "auto", a number of bytes, math.inf or None, got True',
    ),
    (
        "budget str",
        lambda: InputBuffer(1, budget="1"),
        ValueError,
        "budget: expected \"auto\", a number of bytes or math.inf, got '1'",
    ),  # type: ignore[arg-type]
    ("accumulate unknown", lambda: InputBuffer(1, accumulate="foo"), ValueError, "expected a dtype"),
    ("accumulate not summed", lambda: InputBuffer(1, accumulate=object), ValueError, "dtype object is not summed"),
    ("accumulate a number", lambda: InputBuffer(1, accumulate=3), TypeError, "expected a dtype"),
    (
        "accumulate too small",
        lambda: InputBuffer([Slot(dtype="float64", accumulate="float32")]),
        ValueError,
        "accumulate=float32 cannot hold a sum of dtype float64",
    ),
    ("stream", lambda: InputBuffer(1, stream="s"), TypeError, "stream"),
    ("unknown device", lambda: InputBuffer([Slot(device="tpu:0")]), ValueError, "tpu:0"),
    (
        "Slot shape",
        lambda: Slot(shape=(2, -1)),
        ValueError,
        "Slot: expected a shape of non-negative extents, got (2, -1)",
    ),
    (
        "Slot shape of floats",
        lambda: Slot(shape=(2.0,)),
        TypeError,
        "Slot: expected a shape, a tuple of ints, got (2.0,)",
    ),  # type: ignore[arg-type]
    (
        "Slot of too many axes",
        lambda: InputBuffer([Slot(shape=(1,) * 65)]),
        ValueError,
        "slot 0: expected a shape of at most 64 axes",
    ),
    (
        "Slot of huge extents",
        lambda: InputBuffer([Slot(shape=(2**70,))]),
        ValueError,
        "slot 0: shape: expected a non-negative integer that fits 64 bits",
    ),
    ("Slot dtype", lambda: Slot(dtype="foo"), ValueError, "Slot: dtype: expected a dtype"),
    ("Slot dtype object", lambda: Slot(dtype="O"), ValueError, "Slot: dtype: dtype object is not summed"),
    ("Slot dtype byte order", lambda: Slot(dtype=">f4"), ValueError, "native byte order"),
    ("Slot device", lambda: Slot(device=0), TypeError, "Slot: expected a device's name"),  # type: ignore[arg-type]
    ("Slot combine", lambda: Slot(combine=3), TypeError, "Slot: expected combine(old, new), got 3"),  # type: ignore[arg-type]
    (
        "Sparse format",
        lambda: Sparse("lil", (), (2,)),
        ValueError,
        "Sparse: expected a format among coo, csr, csc, bsr, bsc, got 'lil'",
    ),
    (
        "Sparse parts",
        lambda: Sparse("csr", (1, 2), (2,)),
        ValueError,
        "Sparse: csr has 3 parts, (pointers, indices, values); got 2",
    ),
    ("Sparse parts no tuple", lambda: Sparse("coo", 3, (2,)), TypeError, "Sparse: expected the parts as a tuple"),  # type: ignore[arg-type]
    ("Zero dtype", lambda: Zero((2,), None), TypeError, "Zero: expected a dtype, got None"),
    ("Zero shape", lambda: Zero("ab", "f4"), TypeError, "Zero: expected a shape"),  # type: ignore[arg-type]
    ("add_n of nothing", lambda: fanin.add_n([]), ValueError, "add_n: expected at least one array"),
    (
        "add_n of one array",
        lambda: fanin.add_n(np.ones(3)),
        TypeError,
        "add_n: expected a sequence of arrays, got one numpy.ndarray: give list(x) or [x, ..]",
    ),
    ("add_n of a number", lambda: fanin.add_n(3), TypeError, "add_n: expected a sequence of arrays, got one int"),  # type: ignore[arg-type]
    ("add_n of a string", lambda: fanin.add_n("ab"), TypeError, "add_n: expected a sequence of arrays"),
    (
        "add_n keys",
        lambda: fanin.add_n([1.0], keys=[1, 2]),
        ValueError,
        "add_n: expected as many keys as arrays, 1, got 2",
    ),
    (
        "add_n same keys",
        lambda: fanin.add_n([1.0, 2.0], keys=[1, 1]),
        ValueError,
        "key 1: this key has contributed already",
    ),
    ("add_n out", lambda: fanin.add_n([1.0], out=[1.0]), TypeError, "add_n: a list is no array"),
    (
        "options",
        lambda: fanin.set_options(budget=-1),
        ValueError,
        "budget: expected a non-negative whole number of bytes, or math.inf, got -1",
    ),
    ("options by position", lambda: fanin.set_options(True), TypeError, "positional"),  # type: ignore[misc]
    ("unknown option", lambda: fanin.set_options(thread=4), TypeError, "thread"),  # type: ignore[call-arg]
]


@pytest.mark.parametrize("what", [m[0] for m in MADE])
def test_a_constructor_that_fails_names_the_cause(what: str) -> None:
    _, call, kind, words = next(m for m in MADE if m[0] == what)
    gc.collect()
    blocks, options = hooks.memory()[0], _core.get_options()
    with pytest.raises(kind, match=re.escape(words)):
        call()
    gc.collect()
    assert hooks.memory()[0] == blocks
    assert _core.get_options() == options


def test_errors_of_add_n_name_the_array() -> None:
    with pytest.raises(ValueError) as caught:
        fanin.add_n([np.ones(2), np.ones(2), np.ones(3)])
    assert caught.value.__notes__ == ["it was arrays[2] of add_n"]


@pytest.mark.parametrize(
    ("call", "start"),
    [
        (lambda: fanin.add_n([np.ones(2), np.ones(3)]), "add_n: expected a gradient of shape"),
        (lambda: fanin.add_n([np.ones(2)] * 2, keys=[1, 1]), "add_n, key 1: "),
        (lambda: fanin.add_n([np.ones(2)] * 2, out=np.ones(3)), "add_n: out= has shape"),
        (lambda: fanin.add_n([np.ones(2)] * 2, out=[np.ones(2)]), "add_n: a list is no array"),
        (lambda: fanin.add_n([2**62, 2**62]), "add_n: the sum of its Python ints"),
        (lambda: fanin.add_n([np.ones(2)] * 2, scale="2"), "add_n: scale: "),
        (lambda: fanin.add_n([object()] * 2), "add_n: an object is no array"),
    ],
)
def test_errors_of_add_n_name_no_slot(call: Any, start: str) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)) as e:
        call()
    assert str(e.value).startswith(start)
    assert not hasattr(e.value, "slot") and e.value.object == "add_n"  # type: ignore[attr-defined]


def test_missing_contributions_are_named_at_take() -> None:
    buf = InputBuffer(2, name="grads")
    buf.expect(1, 2)
    buf.add(1, 1.0)
    with pytest.raises(ValueError, match=r"grads: slot 1: expected 2 contributions, got 1"):
        buf.take()
    assert not buf.ready(1)
    buf.add(1, 2.0)
    assert buf.ready(1)
    assert buf.take() == [None, 3.0]
    assert not buf.ready(1), "expect stays"


def test_debug_mode_finds_a_change_of_an_added_gradient() -> None:
    buf = InputBuffer(1, name="grads")
    x = np.ones(4)
    with fanin.set_options(debug=True):
        buf.add(0, x, key=3)
        buf.add(0, np.ones(4), key=4)
        x[0] = 5
        with pytest.raises(
            RuntimeError, match="grads: slot 0: the gradient added with key 3 was changed after it was added"
        ):
            buf.take()
    buf.clear()
    assert _core.get_options()["debug"] is False


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_buffer_is_neither_pickled_nor_copied(how: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"cannot pickle or copy <fanin\.InputBuffer 'grads': 2 slots, empty>"):
        how(InputBuffer(2, name="grads"))


def test_a_buffer_can_be_referred_to_weakly_and_not_subclassed() -> None:
    buf = InputBuffer(1)
    ref = weakref.ref(buf)
    assert ref() is buf
    del buf
    assert ref() is None
    with pytest.raises(TypeError):
        type("Mine", (InputBuffer,), {})
    with pytest.raises((TypeError, AttributeError)):
        InputBuffer.add = None  # type: ignore[method-assign, assignment]


def test_names_may_be_any_object_that_prints() -> None:
    class Descriptor:
        def __str__(self) -> str:
            return "layer1/β"

    buf = InputBuffer([Slot(name=Descriptor())], name=Descriptor())
    assert buf.name == "layer1/β"
    with pytest.raises(ValueError, match="layer1/β: slot 0 \\(layer1/β\\), key 2: expected"):
        buf.add(0, np.ones(2), key=1)
        buf.add(0, np.ones(3), key=2)
    with pytest.raises(ValueError, match=r"^name: expected text without surrogates, got '\\ud800'"):
        InputBuffer(1, name="\ud800")


@pytest.mark.rule("S1")
def test_the_slot_is_checked_before_the_gradient() -> None:
    class Loud:
        def __dlpack_device__(self) -> Any:
            raise AssertionError("asked")

        __dlpack__ = __dlpack_device__

    with pytest.raises(IndexError):
        InputBuffer(1).add(1, Loud())


def test_the_live_exception_becomes_the_context() -> None:
    try:
        raise KeyError("first")
    except KeyError as first:
        with pytest.raises(IndexError) as caught:
            InputBuffer(1).add(1, None)
        assert caught.value.__context__ is first


def test_counters_read_as_attributes_and_as_a_mapping() -> None:
    buf = InputBuffer(1)
    buf.add(0, np.ones(2))
    buf.add(0, None)
    c = buf.counters
    assert c.adds == c["adds"] == dict(c)["adds"] == 2
    header = (CSRC / "buffer/buffer.h").read_text()
    counted = re.search(r"#define FAN_COUNTER_LIST\(X\)(.*?[^\\])\n", header, re.DOTALL)
    assert counted and list(c) == re.findall(r"X\((\w+)\)", counted[1])
    assert len(c) == len(list(c)) > 10
    with pytest.raises(KeyError):
        c["nothing"]
    with pytest.raises(AttributeError):
        c.adds = 3  # type: ignore[misc]
    assert fanin.counters().adds >= 2


def test_options_are_restored_by_the_block() -> None:
    before = _core.get_options()
    with fanin.set_options(budget=1000, warn_stream_mismatch=False):
        assert _core.get_options() == {**before, "budget": 1000, "warn_stream_mismatch": False}
        with fanin.set_options(budget=math.inf):
            assert _core.get_options()["budget"] == math.inf
        assert _core.get_options()["budget"] == 1000
    assert _core.get_options() == before


def test_errors_of_devices_are_also_pythons_own() -> None:
    assert issubclass(fanin.DeviceOutOfMemoryError, fanin.DeviceError)
    assert issubclass(fanin.DeviceOutOfMemoryError, MemoryError)
    for e in (fanin.RaceError, fanin.CaptureError, fanin.DeviceError):
        assert issubclass(e, RuntimeError)
        assert e.__module__ == "fanin"
        assert e.__doc__
    assert issubclass(fanin.StreamMismatchWarning, Warning)


@pytest.mark.rule("S6")
def test_a_mismatch_warns_once_and_a_warning_made_an_error_loses_nothing() -> None:
    with fanin.sim.Machine(devices=1) as m:
        consumer, producer = m.stream(), m.stream()
        x = m.array(np.ones(2))
        with fanin.set_options(warn_stream_mismatch=True):
            buf = InputBuffer(2, stream=consumer, leaf=True, name="leaf")
            with pytest.warns(fanin.StreamMismatchWarning, match=r"leaf: slot 1: .*\(S6\)"):
                buf.add(1, x, stream=producer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                buf.add(0, x, stream=producer)
            assert buf.counters.mismatches == 2
            buf.take(consumer)
        seen: list[Any] = []
        old, sys.unraisablehook = sys.unraisablehook, seen.append
        try:
            with fanin.set_options(warn_stream_mismatch=True), warnings.catch_warnings():
                warnings.simplefilter("error")
                buf.add(0, x, stream=producer)
        finally:
            sys.unraisablehook = old
        assert [u.exc_type for u in seen] == [fanin.StreamMismatchWarning]
        assert buf.take(consumer)[0] is x


def test_a_failed_allocation_is_a_memory_error_and_loses_nothing() -> None:
    for n in range(200):
        buf = grads()
        buf.explain(0)  # what is plain becomes items here, which take memory
        gc.collect()
        blocks = hooks.memory()[0]
        x = np.ones(2, np.float32)
        hooks.fail_at(n, 1)
        try:
            buf.add(0, x, copy=True)
            done = True
        except MemoryError:
            done = False
            assert hooks.memory()[0] == blocks
        finally:
            hooks.fail_at(-1)
        assert buf.take()[0].tolist() == ([2, 2] if done else [1, 1])
        if done and hooks.memory()[2] == 0:
            break
        if done:
            assert n > 0
            break
    else:
        raise AssertionError("adds never succeeded")


ONES = [
    (lambda: fanin.InputBuffer(1).take(out=[None, None]), "out: expected 1 entry, one for each slot, got 2"),
    (lambda: fanin.InputBuffer(1).add_many([0], [1.0, 2.0]), "got 1 slot and 2 gradients"),
    (lambda: fanin.InputBuffer(1).add_many([0, 0], [1.0]), "got 2 slots and 1 gradient"),
    (lambda: fanin.InputBuffer(1).add_many([0], [1.0], keys=[]), "got 1 slot and 0 keys"),
    (lambda: expecting(1).take(), "expected 1 contribution, got 0 (A16)"),
    (lambda: expecting(2).take(), "expected 2 contributions, got 0 (A16)"),
    (lambda: fanin.clip_norm(fanin.InputBuffer(1, stats=True), [], 1.0), "expected the 1 sum of InputBuffer, got 0"),
]


def expecting(n: int) -> fanin.InputBuffer:
    buf = fanin.InputBuffer(1)
    buf.expect(0, n)
    return buf


@pytest.mark.parametrize(("call", "said"), ONES, ids=[said for _, said in ONES])
def test_one_thing_is_named_as_one(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "scale", "said"),
    [
        ("int32", 0.5, "slot 0: scale=0.5: an int32 sum needs an integer"),
        ("uint8", 0.1, "slot 0: scale=0.1: a uint8 sum needs an integer"),
        ("int64", 2**70, "slot 0: scale=1.18059162072e+21: an int64 sum needs an integer that fits int64"),
        ("bool", float("inf"), "slot 0: scale=inf: a bool sum needs an integer that fits int64"),
        ("int8", float("nan"), "slot 0: scale=nan: an int8 sum needs an integer"),
        ("float32", 1 - 2j, "slot 0: scale=1-2j: a float32 sum needs a real number"),
    ],
)
def test_the_error_for_a_scale_that_does_not_fit_has_its_value_and_the_dtype(
    dtype: str, scale: complex, said: str
) -> None:
    buf = fanin.InputBuffer(1)
    for _ in range(2):
        buf.add(0, np.ones(3, dtype))
    with pytest.raises(ValueError) as caught:
        buf.take(scale=scale)
    assert said in str(caught.value)
    assert buf.take()[0].dtype == dtype, "nothing is lost"


def test_the_error_for_an_object_that_is_no_array_names_the_conversion() -> None:
    for x in ([1.0], (1.0,), "a", {"a": 1}, object()):
        with pytest.raises(TypeError, match=r"pass np\.asarray\(x\); for objects of your own give combine="):
            fanin.InputBuffer(1).add(0, x)


@pytest.mark.parametrize("made", [0, 1, 3])
def test_every_call_refuses_the_index_after_the_last_slot(made: int) -> None:
    with fanin.sim.Machine() as m:
        x, s = m.array(np.ones(2)), m.stream()
        strided = np.ones((4, 4)).T[::-2]
        calls: list[Callable[[InputBuffer, int], object]] = [
            lambda b, n: b.add(n, 1.0),
            lambda b, n: b.add(n, x, stream=s),
            lambda b, n: b.add(n, strided, key=1, copy=True),
            lambda b, n: b.add_many([n], [x]),
            lambda b, n: b.target(n).__enter__(),
            lambda b, n: b.expect(n, 1),
            lambda b, n: b.ready(n),
            lambda b, n: b.take(slot=n),
            lambda b, n: b.take(s, slot=n, scale=2.0),
            lambda b, n: b.stats(n),
            lambda b, n: b.explain(n),
            lambda b, n: b[n],
        ]
        for call in calls:
            for n in (made, made + 1):
                with pytest.raises(IndexError, match=rf"got {n}\b|no slot {n}\b"):
                    call(InputBuffer([Slot((2,), "float64")] * made, stats=True), n)
