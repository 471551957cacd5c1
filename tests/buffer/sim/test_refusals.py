"""Calls that are refused because their sum would silently be wrong; a refusal loses nothing."""

from __future__ import annotations

import math
import operator
import random
import threading
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin

G = np.float32([1, 2, 3])
TOP = 2**63 - 1


# ---------------------------------------------------------------- slots


@pytest.mark.parametrize("number", [3, True, 1.5, 2j, np.int64(3), np.bool_(True)])
def test_a_number_among_the_slots_is_refused_with_the_call_that_was_meant(number: Any) -> None:
    for slots in ((number,), [number, 4], [np.zeros(2), number], iter([number])):
        with pytest.raises(
            TypeError, match=r"w: slot \d: .* is a number, and no example array: .*\[fanin\.Slot\(shape=\(3, 4\)\)\]"
        ):
            fanin.InputBuffer(slots, name="w")
    assert len(fanin.InputBuffer([np.asarray(number), np.float32(1), fanin.Slot(shape=())])) == 3


# ---------------------------------------------------------------- donate and copy


def test_a_gradient_is_given_away_or_copied_and_not_both() -> None:
    buf = fanin.InputBuffer(2, name="w")
    for call in (
        lambda: buf.add(0, G, donate=True, copy=True),
        lambda: buf.add_many([0, 1], [G, G], donate=True, copy=True),
    ):
        with pytest.raises(ValueError, match="w: donate=True gives the array away, copy=True keeps it yours: give one"):
            call()
    assert buf.take() == [None, None]
    buf.add(0, G, donate=False, copy=True)
    buf.add(0, G, donate=True, copy=False)
    assert buf.take()[0].tolist() == [2, 4, 6]


# ---------------------------------------------------------------- take and clear inside a target


def declared(n: int, **how: Any) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(shape=3, dtype="float32")] * n, name="w", **how)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("slot", [0, 1])
def test_take_and_clear_inside_a_target_are_refused_and_change_nothing(direct: bool, slot: int) -> None:
    buf = declared(2, budget=0)
    for _ in range(2 * direct):
        buf.add(slot, G)
    buf.add(1 - slot, G)
    with buf.target(slot) as out:
        out += G
        for call in (
            buf.take,
            lambda: buf.take(out=[np.zeros(3, np.float32)] * 2),
            lambda: buf.take(scale=2),
            buf.clear,
        ):
            with pytest.raises(
                RuntimeError,
                match=rf"w: slot {slot}: (take|clear)\(\) from within a target of that slot: .* leave the block",
            ):
                call()
        out += G
    sums = buf.take()
    assert sums[slot].tolist() == ((2 + 2 * direct) * G).tolist()
    assert sums[1 - slot] is not None and sums[1 - slot].tolist() == G.tolist()
    buf.clear()


def test_after_a_target_that_failed_or_was_dropped_take_is_free_again() -> None:
    buf = declared(1)
    with pytest.raises(ZeroDivisionError), buf.target(0):
        raise ZeroDivisionError
    assert buf.take() == [None]
    some = [buf.target(0) for _ in range(3)]
    for t in some:
        t.__enter__()
    for k in (1, 0, 2):  # ended in another order than begun
        with pytest.raises(RuntimeError, match="from within a target"):
            buf.take()
        some[k].__exit__(None, None, None)
    assert buf.take()[0].tolist() == [0, 0, 0]


@pytest.mark.threads
def test_a_take_on_another_thread_leaves_a_target_to_the_next_pass() -> None:
    buf = declared(1)
    taken: list[Any] = []
    with buf.target(0) as out:
        buf.add(0, G)
        other = threading.Thread(target=lambda: taken.extend(buf.take()))
        other.start()
        other.join()
        out += 2 * G
    assert taken[0].tolist() == G.tolist()
    assert buf.take()[0].tolist() == (2 * G).tolist()


# ---------------------------------------------------------------- Python ints


def test_python_ints_that_leave_int64_are_an_error_and_nothing_is_lost() -> None:
    with pytest.raises(
        OverflowError,
        match="add_n: the sum of its Python ints does not fit int64; add floats, or object arrays",
    ):
        fanin.add_n([2**62, 2**62])
    with pytest.raises(OverflowError, match="does not fit int64"):
        fanin.add_n([2**63])
    for budget in (0, 1, None, math.inf):
        buf = fanin.InputBuffer(2, budget=budget, name="w")
        buf.add(1, G)
        for _ in range(2):
            buf.add(0, 2**62)
        out = np.zeros((), np.int64)
        ways: list[dict[str, Any]] = [{}, {"out": [out, None]}, {"scale": 1}, {"writable": True}]
        for how in ways:
            with pytest.raises(OverflowError, match="w: slot 0"):
                buf.take(**how)
        with pytest.raises(OverflowError, match="w: slot 0"):
            buf[0]
        assert out == 0
        buf.add(0, -1)
        assert buf[0] == TOP
        with pytest.raises(OverflowError):
            buf.take(scale=-3)
        assert buf.take(scale=-1)[0] == -TOP
        buf.add(0, TOP)
        with pytest.raises(OverflowError):
            buf.take(scale=2)
        assert buf.take() == [TOP, None]


def test_the_other_terms_decide_the_result_of_ints_that_leave_int64() -> None:
    for budget in (0, math.inf):
        for after, sum_of in (
            (1.5, None),
            (Fraction(1), None),
            (np.float32(1), None),
            (np.int64(1), -(2**63) + 1),
            (np.int64(-(2**62)), 2**62),
        ):
            buf = fanin.InputBuffer(1, budget=budget)
            for x in (2**62, 2**62, after):
                buf.add(0, x)
            if sum_of is None:
                with pytest.raises(OverflowError):
                    buf.take()
                buf.clear()
            else:
                assert buf.take() == [sum_of]  # integers of NumPy's wrap, and go on counting
        buf = fanin.InputBuffer(1, budget=budget)
        for x in (np.array(2**62, object), 2**62, 2**62):
            buf.add(0, x)
        assert buf.take() == [3 * 2**62]


def test_python_ints_fit_the_dtype_that_the_slot_declares() -> None:
    for dtype in ("int8", "uint8", "int32", "uint64"):
        info = np.iinfo(dtype)
        for budget in (0, math.inf):
            buf = fanin.InputBuffer([fanin.Slot(dtype=dtype)], budget=budget)
            left = int(info.max)
            while left:
                buf.add(0, min(left, TOP))
                left -= min(left, TOP)
            assert buf[0] == info.max
            buf.add(0, 1)
            with pytest.raises(OverflowError, match=f"does not fit {dtype}"):
                buf.take()


def test_sums_of_python_ints_are_pythons_own_or_an_error() -> None:
    """Compared with Python's `+`, under every budget, with and without keys."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        draw = random.Random(seed)
        some = [1, -1, 2**61, 2**62, -(2**62), TOP, -(2**63), True, False, 3]
        terms = [draw.choice(some) for _ in range(draw.randint(1, 7))]
        scale = draw.choice([None, None, 2, -1, 3])
        true = terms[0]
        for t in terms[1:]:
            true = (true or t) if type(true) is type(t) is bool else true + t
        true = true if scale is None else (bool(true * scale) if type(true) is bool else true * scale)
        order = list(range(len(terms)))
        keyed = draw.random() < 0.5
        if keyed:
            draw.shuffle(order)
        buf = fanin.InputBuffer(1, budget=draw.choice([0, 1, 9, None, math.inf]))
        for k in order:
            buf.add(0, terms[k], key=k if keyed else None)
        fits = -(2**63) <= true <= TOP
        seen[f"{fits}"] += 1
        try:
            got = buf.take(scale=scale)[0]
        except OverflowError:
            assert not fits, (seed, terms, scale)
            buf.add(0, 0, key=len(terms) if keyed else None)  # the buffer still works
            with pytest.raises(OverflowError):
                buf.take(scale=scale)
        else:
            assert fits and (type(got), got) == (type(true), true), (seed, terms, scale, got)
    assert min(seen["True"], seen["False"]) > 80, seen


def test_add_n_of_ints_is_operator_add_where_that_fits() -> None:
    assert fanin.add_n([TOP - 1, 1]) == operator.add(TOP - 1, 1)
    assert fanin.add_n([-(2**63), 0]) == -(2**63)
    with pytest.raises(OverflowError):
        fanin.add_n([-(2**63), -1], keys=[1, 0])


@pytest.mark.rule("A12")
def test_an_array_of_another_machine_is_named_as_such() -> None:
    with fanin.sim.Machine(2) as m, fanin.sim.Machine(2) as other:
        buf = fanin.InputBuffer(1, name="w")
        buf.add(0, m.array(G))
        with pytest.raises(
            ValueError, match=r"expected a gradient on sim:0, got one on sim:0 of another machine \(A12\)"
        ):
            buf.add(0, other.array(G))
        with pytest.raises(ValueError, match=r"expected a gradient on sim:0, got one on sim:1 \(A12\)"):
            buf.add(0, m.array(G, device=1))
        assert buf.take()[0].numpy().tolist() == G.tolist()
