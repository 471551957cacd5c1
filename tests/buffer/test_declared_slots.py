"""A buffer declares the fields of its Slots, however they were set."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit.prepared import run_prepared

pytestmark = pytest.mark.core


class Shaped(fanin.Slot):
    """A subclass of Slot that computes its shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (2, 3)

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return "float32"


def with_more() -> fanin.Slot:
    """One whose dict has a key that is no field of a Slot."""
    slot = fanin.Slot((2, 3), "float32", name="w")
    slot.__dict__["mine"] = 1
    return slot


def with_other_words() -> fanin.Slot:
    """One whose dict has keys that are equal to the interned strings, but other objects."""
    slot = fanin.Slot()
    slot.__dict__.update({"".join(list(key)): value for key, value in with_more().__dict__.items() if key != "mine"})
    return slot


def with_none() -> fanin.Slot:
    """One whose dict has None for three fields."""
    slot = fanin.Slot((2, 3), "float32", name="w")
    slot.__dict__.update(device=None, accumulate=None, combine=None)
    return slot


SLOTS: dict[str, Callable[[], fanin.Slot]] = {
    "given": lambda: fanin.Slot((2, 3), "float32", name="w"),
    "copied": lambda: copy.copy(fanin.Slot((2, 3), "float32", name="w")),
    "pickled": lambda: pickle.loads(pickle.dumps(fanin.Slot((2, 3), "float32", name="w"))),
    "a kind of Slot": lambda: Shaped(name="w"),
    "with more in it": with_more,
    "with other strings": with_other_words,
    "with None": with_none,
}


@pytest.mark.parametrize("kind", SLOTS)
def test_a_buffer_declares_the_fields_of_a_slot_however_they_were_set(kind: str) -> None:
    buf = fanin.InputBuffer([fanin.Slot(), SLOTS[kind]()])
    buf.add(0, np.ones(7, np.int8))
    buf.add(1, np.ones((4, 2, 3)))
    with pytest.raises(ValueError, match=r"slot 1 \(w\)"):
        buf.add(1, np.ones(7))
    one, other = buf.take()
    assert one.dtype == np.int8 and one.shape == (7,)
    assert other.dtype == np.float32 and other.tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("word", ["shape", "dtype", "device", "accumulate", "combine", "name"])
def test_an_error_raised_while_a_slot_subclass_is_read_reaches_the_caller(word: str) -> None:
    def broken(self: Any) -> Any:
        raise LookupError(word)

    kind: Any = type("Broken", (fanin.Slot,), {word: property(broken)})
    slots = [fanin.Slot((2,), "float64", combine=max, name="w"), kind()]
    for _ in range(3):
        with pytest.raises(LookupError, match=word):
            fanin.InputBuffer(slots)
    assert fanin.InputBuffer(2).take() == [None, None]


def test_a_slot_refuses_a_name_that_c_would_end_early() -> None:
    with pytest.raises(ValueError, match=r"Slot: name: expected text without a NUL character, got 'a\\x00b'"):
        fanin.Slot(name="a\0b")
    with pytest.raises(ValueError, match=r"Slot: name: expected text without surrogates, got 'a\\ud800'"):
        fanin.Slot(name="a\ud800")


def test_a_buffer_keeps_the_name_of_a_declared_slot_alive() -> None:
    name = "".join(["the name", " of a slot"])
    slot = fanin.Slot(name=name)
    before = sys.getrefcount(name)
    for _ in range(9):
        fanin.InputBuffer([slot])
    assert sys.getrefcount(name) == before


def test_a_slot_of_a_dtype_that_only_ml_dtypes_gives_numpy_refuses_before_anything_is_added() -> None:
    run_prepared("""
import sys
import numpy as np
import fanin

buf = fanin.InputBuffer([fanin.Slot(dtype="bfloat16")])
assert "ml_dtypes" not in sys.modules
try:
    buf.add(0, np.ones(2))
except TypeError as e:
    assert "slot 0" in str(e) and "import ml_dtypes first" in str(e), e
else:
    raise AssertionError("it was added")
assert buf.counters.adds == 0
import ml_dtypes
buf.add(0, np.ones(2))
assert buf.take()[0].dtype == ml_dtypes.bfloat16
""")
