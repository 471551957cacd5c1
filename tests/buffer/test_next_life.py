"""A buffer without references is kept for reuse, and then has no state of its earlier use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks

pytestmark = pytest.mark.core

F = np.float32


class Joined:
    """A combine= that a weak reference can watch."""

    def __call__(self, old: Any, new: Any) -> Any:
        return ("joined", old, new)


def plain(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer(n)


def shaped(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot((3,), "float32", name=f"w{i}") for i in range(n)])


def low(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(dtype="bfloat16", accumulate="float64", device="cpu")] * n)


def joining(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(combine=Joined()) for _ in range(n)])


def exact(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot(accumulate="exact", name="e")] * n, budget=0)


def recorded(n: int) -> fanin.InputBuffer:
    return fanin.InputBuffer([fanin.Slot((3,), name="r")] * n, create_graph=True)


LIVES = [plain, shaped, low, joining, exact, recorded]


def outcome(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except (TypeError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"


def observed(buf: fanin.InputBuffer) -> list[str]:
    """Everything observable of a buffer: what it accepts and refuses, with which messages, and its reports."""
    slot = len(buf) - 1
    seen = [repr(buf), str(buf.name), str(buf.budget), outcome(lambda: buf.ready(slot)), str(buf.counters)]
    for gradients in ([np.ones(3, F)] * 2, [np.ones((2, 3))] * 2, [1.5, 2.5], [{1}, {2}], [np.ones((4, 1), "O")] * 2):
        seen += [outcome(lambda g=g: buf.add(slot, g)) for g in gradients]  # type: ignore[misc]
        seen += [outcome(lambda: buf.explain(slot)), outcome(buf.take)]
    buf.expect(slot, 2)  # and something is left in it
    return [*seen, outcome(lambda: buf.add(slot, np.ones(3, F))), outcome(lambda: buf.ready(slot))]


@pytest.mark.parametrize("slots", [1, 4, 5])
@pytest.mark.parametrize("now", LIVES)
@pytest.mark.parametrize("before", LIVES)
def test_a_reused_buffer_behaves_like_a_new_one(before: Any, now: Any, slots: int) -> None:
    fanin.trim()
    first = observed(now(slots))
    fanin.trim()
    observed(before(slots))
    assert observed(now(slots)) == first
    assert observed(now(slots)) == first


@pytest.mark.parametrize("slots", [1, 4, 5])
def test_declarations_of_slots_end_with_the_buffer(slots: int) -> None:
    joined = Joined()
    gone = weakref.ref(joined)
    buf = fanin.InputBuffer([fanin.Slot(combine=joined)] * slots)
    buf.add(0, {1})
    del joined, buf
    assert gone() is None


def test_a_declaration_that_fails_leaves_a_buffer_that_declares_nothing() -> None:
    good, bad = fanin.Slot((2,), combine=Joined(), name="weight"), fanin.Slot(dtype="complex64", accumulate="float32")
    refusals = set()
    for _ in range(3):
        observed(plain(2))
        with pytest.raises(ValueError, match=r"InputBuffer: slot 1: .*complex64") as e:
            fanin.InputBuffer([good, bad])
        refusals.add(str(e.value))
        buf = plain(2)
        buf.add(0, np.ones((4, 4)))
        assert "weight" not in buf.explain(0)
    assert len(refusals) == 1


def test_a_declaration_that_refers_to_its_buffer_is_collected() -> None:
    def life() -> weakref.ref[fanin.InputBuffer]:
        joined: Any = Joined()
        buf = fanin.InputBuffer([fanin.Slot(combine=joined)])
        joined.buffer = buf
        return weakref.ref(buf)

    plain(1)
    gone = life()
    gc.collect()
    assert gone() is None
    assert observed(plain(1)) == observed(plain(1))


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="blocks of memory are counted in test builds alone: FANIN_DEV=1")
def test_a_reused_buffer_allocates_only_what_its_slots_declare() -> None:
    slots = [fanin.Slot((3,), "float32", name="w")]

    def made() -> int:
        before = hooks.memory()[1]
        fanin.InputBuffer(slots)
        return hooks.memory()[1] - before

    fanin.trim()
    fresh = made()
    assert made() == made() == fresh - 1


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="blocks of memory are counted in test builds alone: FANIN_DEV=1")
def test_memory_that_a_kept_buffer_reserves_for_reuse_counts_as_kept() -> None:
    fanin.trim()
    before = hooks.blocks()
    for n in (1, 20, 200):
        buf = fanin.InputBuffer(1)
        for i in range(n):
            buf.add(0, np.ones(3, F), key=i)
        assert hooks.blocks() > before
        buf.take()
        del buf
        assert hooks.blocks() == before
    fanin.trim()
    assert hooks.blocks() == before
