"""Which producers have contributed: rules S1, S2, A15, A16; errors change nothing and name the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.core
ONE = np.ones(2, np.float32)


@pytest.mark.rule("S1")
@pytest.mark.parametrize("call", ["add", "expect", "ready", "snapshot"])
@pytest.mark.parametrize("slot", [2, -1, 2**70, -(2**70)])
def test_a_slot_out_of_range_is_an_index_error(make_buffer: Any, call: str, slot: int) -> None:
    b = make_buffer(2, name="grads")
    b.add(0, ONE)
    with pytest.raises(IndexError):
        _call(b, call, slot)
    assert b.take()[0] is ONE


def _call(b: Any, call: str, slot: Any) -> None:
    if call == "add":
        b.add(slot, object())  # S1 goes first
    elif call == "expect":
        b.expect(slot, 1)
    elif call == "ready":
        b.ready(slot)
    else:
        b[slot]


@pytest.mark.rule("S1")
@pytest.mark.parametrize("call", ["add", "expect", "ready", "snapshot"])
@pytest.mark.parametrize("slot", [True, 1.0, "0", None])
def test_a_slot_is_an_integer(make_buffer: Any, call: str, slot: Any) -> None:
    with pytest.raises(TypeError):
        _call(make_buffer(2), call, slot)


@pytest.mark.rule("S1")
def test_an_integer_of_numpys_is_a_slot_and_a_key(make_buffer: Any) -> None:
    b = make_buffer(np.int64(2))
    b.add(np.uint8(1), ONE, key=np.int16(3))
    assert b.take()[1] is ONE
    assert len(b) == 2


@pytest.mark.rule("S2")
def test_undefined_gradients_are_counted_and_add_no_value(make_buffer: Any) -> None:
    for budget in (0, None):
        b = make_buffer(2, budget=budget)
        b.expect(0, 3)
        b.add(0, None, key=1)
        assert b[0] is None
        b.add(0, ONE, key=2)
        assert not b.ready(0)
        b.add(0, None, key=0)
        assert b.ready(0)
        with pytest.raises(ValueError, match="slot 0"):
            b.add(0, None, key=3)
        assert b.take()[0] is ONE
        b.add(1, None)
        b.add(1, None)
        for key in range(3):
            b.add(0, None, key=key)
        assert b.take() == [None, None], "undefined is not zero"


@pytest.mark.rule("S2", "A16")
def test_an_undefined_gradient_fills_its_place(make_buffer: Any) -> None:
    b = make_buffer(1)
    b.add(0, None, key=4)
    with pytest.raises(ValueError, match=r"slot 0.*4"):
        b.add(0, ONE, key=4)
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, None)


@pytest.mark.rule("A16")
@pytest.mark.parametrize("budget", [0, None])
def test_a_key_contributes_once_per_slot_and_pass(make_buffer: Any, budget: Any) -> None:
    b = make_buffer(2, budget=budget, name="grads")
    for key in (0, 1, 7):
        b.add(0, ONE, key=key)
    for key in (0, 1, 7):
        with pytest.raises(ValueError, match=rf"grads.*slot 0.*{key}"):
            b.add(0, ONE, key=key)
    b.add(1, ONE, key=7)
    assert b.take()[0].tolist() == [3, 3]
    b.add(0, ONE, key=7)
    assert b.take()[0] is ONE, "a new pass"


@pytest.mark.rule("A15")
def test_keyed_and_unkeyed_contributions_do_not_mix(make_buffer: Any) -> None:
    b = make_buffer(2)
    b.add(0, ONE)
    b.add(1, ONE, key=0)
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, ONE, key=5)
    with pytest.raises(ValueError, match="slot 1"):
        b.add(1, ONE)
    assert [x is ONE for x in b.take()] == [True, True]
    b.add(0, ONE, key=5)
    assert b.take()[0] is ONE


@pytest.mark.rule("A16")
@pytest.mark.parametrize(
    ("key", "error"), [(-1, ValueError), (2**63, ValueError), (True, TypeError), (1.0, TypeError), ("a", TypeError)]
)
def test_a_key_is_an_integer_that_is_not_negative(make_buffer: Any, key: Any, error: Any) -> None:
    b = make_buffer(1)
    with pytest.raises((error, OverflowError) if key == 2**63 else error):
        b.add(0, ONE, key=key)
    b.add(0, ONE, key=2**63 - 1)
    assert b.take()[0] is ONE


@pytest.mark.rule("A16")
def test_take_checks_the_expected_count(make_buffer: Any) -> None:
    b = make_buffer(2, name="grads")
    with pytest.raises(ValueError, match="slot 0"):
        b.ready(0)
    b.expect(0, 2)
    for _ in range(2):  # it stays over passes
        assert not b.ready(0)
        with pytest.raises(ValueError, match=r"grads.*slot 0.*2.*0"):
            b.take()
        b.add(0, ONE)
        assert not b.ready(0)
        with pytest.raises(ValueError, match=r"slot 0.*2.*1"):
            b.take()
        b.add(0, ONE)
        assert b.ready(0)
        with pytest.raises(ValueError, match=r"slot 0.*2"):
            b.add(0, ONE)
        assert b.take()[0].tolist() == [2, 2]
    b.clear()
    assert not b.ready(0), "clear leaves it too"
    b.expect(0, 0)
    assert b.ready(0)
    with pytest.raises(ValueError, match="slot 0"):
        b.add(0, None)
    assert b.take() == [None, None]


@pytest.mark.rule("A16")
def test_expect_is_a_count_and_at_least_the_contributions_so_far(make_buffer: Any) -> None:
    b = make_buffer(1)
    b.add(0, ONE)
    for n, error in ((0, ValueError), (-1, ValueError), ("2", TypeError), (1.5, TypeError), (None, TypeError)):
        with pytest.raises(error):
            b.expect(0, n)
    b.expect(0, 1)
    assert b.take()[0] is ONE


@pytest.mark.rule("A16")
def test_an_add_that_fails_leaves_the_buffer_as_it_was(make_buffer: Any, lib: Any) -> None:
    b = make_buffer([lib.Slot(shape=(2,), dtype="float32"), lib.Slot()])
    for bad, error in (
        (np.ones(3), ValueError),
        (np.ones(2, np.complex64), ValueError),
        ([1.0, 2.0], TypeError),
        (np.ones(2, ">f4"), BufferError),
        (2**70, OverflowError),
    ):
        with pytest.raises(error):
            b.add(0, bad, key=0)
    b.add(0, ONE, key=0)
    with pytest.raises(ValueError, match="slot 1"):
        b.add(1, ONE, key=-1)
    b.add(1, ONE)  # neither keyed nor shaped by what failed
    with pytest.raises(ValueError, match="slot 1"):
        b.add(1, np.ones(3))
    assert [x is ONE for x in b.take()] == [True, True]


@pytest.mark.rule("A9", "A10", "A16")
def test_messages_name_buffer_slot_key_expected_and_got(make_buffer: Any, lib: Any) -> None:
    b = make_buffer([lib.Slot(), lib.Slot(shape=(3, 4), dtype="float32", name="w1")], name="grads")
    with pytest.raises(ValueError, match="slot 1") as e:
        b.add(1, np.ones((4, 3)), key=2)
    for word in ("grads", "slot 1", "w1", "key 2", "(3, 4)", "(4, 3)"):
        assert word in str(e.value)
    with pytest.raises(ValueError, match="slot 1") as e:
        b.add(1, np.ones((3, 4), np.complex64), key=2)
    for word in ("grads", "slot 1", "key 2", "float32", "complex64"):
        assert word in str(e.value)


@pytest.mark.rule("A16")
def test_a_buffer_is_reused_pass_after_pass(make_buffer: Any) -> None:
    b = make_buffer(1)
    for n in (2, 3):
        b.add(0, np.ones(n))
        b.add(0, np.ones(n, np.float16))
        result = b.take()[0]
        assert (result.shape, result.dtype) == ((n,), np.float64)
        assert b.take() == [None]
    b.add(0, np.ones(2))
    b.clear()
    b.add(0, ONE, key=0)
    assert b.take()[0] is ONE


@pytest.mark.rule("A9", "A10")
def test_slots_are_a_count_or_examples_or_declarations(make_buffer: Any, lib: Any) -> None:
    assert len(make_buffer(0)) == 0
    assert make_buffer(0).take() == []
    b = make_buffer([np.zeros((2, 3), np.float16), lib.Slot(shape=(2,)), np.float32(1)])
    assert len(b) == 3
    for slot in range(2):
        with pytest.raises(ValueError, match=f"slot {slot}"):
            b.add(slot, np.zeros((5, 5)))
    b.add(0, np.ones((2, 3)))
    assert b.take()[0].dtype == np.float16
    for bad, error in (
        (np.zeros(2), TypeError),
        ("ab", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (True, TypeError),
        (1.5, TypeError),
        ([None], TypeError),
        ([[1.0]], TypeError),
    ):
        with pytest.raises(error):
            make_buffer(bad)
    for declared in ({"shape": (-1,)}, {"dtype": "float7"}, {"device": "sin:0"}):
        with pytest.raises((ValueError, TypeError)):
            make_buffer([lib.Slot(**declared)])
    with pytest.raises(TypeError, match=r"\[array\]"):
        make_buffer(np.zeros(2))
    for budget in (-1, float("nan")):
        with pytest.raises(ValueError, match="budget"):
            make_buffer(1, budget=budget)
