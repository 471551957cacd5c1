"""What slots keep between passes: an idle one nothing, a used one room for its next pass, until `clear()`."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.world import blocks

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not hooks.DEVELOPMENT, reason="blocks of memory are counted in test builds alone: FANIN_DEV=1"),
]

SLOTS = 100
flat, gaps = np.ones(16, np.float32), np.ones((16, 2), np.float32)[:, 0]


def kept_blocks(work: Callable[[fanin.InputBuffer], None]) -> tuple[float, float]:
    """By how many blocks of memory for each slot a buffer has grown after a pass, and after clear()."""
    gc.collect()
    buf = fanin.InputBuffer(SLOTS)
    idle = blocks()
    work(buf)
    gc.collect()
    used = blocks()
    buf.clear()
    return (used - idle) / SLOTS, (blocks() - idle) / SLOTS


def pass_of(*gradients: np.ndarray) -> Callable[[fanin.InputBuffer], None]:
    def run(buf: fanin.InputBuffer) -> None:
        for slot in range(len(buf)):
            for gradient in gradients:
                buf.add(slot, gradient)
        buf.take()

    return run


def test_a_used_slot_keeps_one_block_and_none_after_clear() -> None:
    """One list of 240 bytes, so that the adds of its next pass allocate nothing (list.h asserts the size)."""
    assert kept_blocks(pass_of(flat, flat)) == (1, 0)
    assert kept_blocks(pass_of(flat, gaps)) == (1, 0)
    assert kept_blocks(pass_of(gaps, gaps)) == (1, 0)


def test_a_slot_keeps_room_for_64_terms_and_not_for_more() -> None:
    assert kept_blocks(pass_of(*[flat] * 64)) == (2, 0)
    assert kept_blocks(pass_of(*[flat] * 65)) == (1, 0)


def test_a_slot_that_was_cleared_serves_again() -> None:
    buf = fanin.InputBuffer(SLOTS)
    for _ in range(2):
        buf.add_many(range(SLOTS), [flat] * SLOTS)
        buf.clear()
        buf.add_many(range(SLOTS), [flat] * SLOTS)
        assert all(x is flat for x in buf.take())


def test_one_pass_allocates_no_block_after_another() -> None:
    buf, work = fanin.InputBuffer(SLOTS), pass_of(flat, flat)
    work(buf)
    made = hooks.memory()[1]
    work(buf)
    assert hooks.memory()[1] == made
