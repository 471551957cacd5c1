"""The laws of a buffer of gradients. Numbers like A14 are those of docs/rules.md."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import fanin
from fanin._interop.protocols import NDArray

from .protocols import Make
from .values import at_once, has_part, late, left_fold, needs, same_bits, seen, some, takes

DTYPES = ["float32", "float64", "complex64", "int8", "int64", "bool"]


# Order


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_sum_is_the_left_fold_in_the_order_of_arrival(make_buffer: Make, n: int, dtype: str) -> None:
    """A15."""
    gradients = some(n, n, dtype=dtype)
    buf = make_buffer(1)
    for g in gradients:
        buf.add(0, g)
    assert same_bits(buf.take()[0], left_fold(gradients))


def test_the_order_of_arrival_does_not_matter_to_a_keyed_sum(keyed: Make) -> None:
    """A15."""
    gradients = some(1, 4)
    want = left_fold(gradients)
    for order in itertools.permutations(range(4)):
        buf = keyed(1)
        for key in order:
            buf.add(0, gradients[key], key=key)
        assert same_bits(buf.take()[0], want), order


def test_gaps_between_keys_are_skipped_at_take(keyed: Make) -> None:
    """A15."""
    gradients = some(2)
    buf = keyed(1)
    for key, g in zip((7, 2, 5), gradients, strict=True):
        buf.add(0, g, key=key)
    assert same_bits(buf.take()[0], left_fold([gradients[1], gradients[2], gradients[0]]))


def test_slots_do_not_meet(make_buffer: Make) -> None:
    gradients = some(3, 6)
    buf = make_buffer(3)
    for i, g in enumerate(gradients):
        buf.add(i % 3, g)
    for slot, total in enumerate(buf.take()):
        assert same_bits(total, left_fold(gradients[slot::3]))


# Aliasing


def aliases() -> dict[str, tuple[NDArray, NDArray]]:
    """(gradient, the memory under it) by what is special about it."""
    base = np.arange(24.0).reshape(4, 6)
    frozen = np.ones((4, 3))
    frozen.flags.writeable = False
    row = np.arange(3.0)
    return {
        "an array that the caller holds": (base[:, :3].copy(), base),
        "a view": (base[:, ::2], base),
        "a transposed view": (np.arange(12.0).reshape(3, 4).T, base),
        "a read-only array": (frozen, frozen),
        "a broadcast": (np.broadcast_to(row, (4, 3)), row),
        "a reversed view": (base[::-1, 5:2:-1], base),
    }


@pytest.mark.parametrize("what", list(aliases()))
def test_what_the_caller_added_is_never_written(make_buffer: Make, what: str) -> None:
    g, memory = aliases()[what]
    before, under = g.copy(), memory.copy()
    buf = make_buffer(1)
    for x in (g, np.ones((4, 3)), g):
        buf.add(0, x)
    total = buf.take()[0]
    assert same_bits(g, before) and same_bits(memory, under)
    assert same_bits(total, before + 1 + before)
    assert not np.may_share_memory(total, memory)


def test_one_array_sent_to_two_slots_stays_as_it_is(make_buffer: Make) -> None:
    """A7: z = x + y sends one gradient both ways."""
    g = np.arange(6.0)
    buf = make_buffer(2)
    for slot in (0, 1):
        buf.add(slot, g)
        buf.add(slot, np.full(6, slot + 1.0))
    x, y = buf.take()
    assert same_bits(g, np.arange(6.0))
    assert same_bits(x, g + 1) and same_bits(y, g + 2)
    assert not np.may_share_memory(x, y)


def test_a_single_contribution_is_handed_through(make_buffer: Make) -> None:
    """A14."""
    g = np.arange(3.0)
    buf = make_buffer(1)
    buf.add(0, g)
    assert buf.take()[0] is g


def test_a_sum_that_was_taken_is_not_changed_by_the_next_pass(make_buffer: Make) -> None:
    buf = make_buffer(1)
    taken = []
    for i in range(3):
        buf.add(0, np.full(4, float(i)))
        buf.add(0, np.full(4, 10.0))
        taken.append(buf.take()[0])
    assert [t[0] for t in taken] == [10.0, 11.0, 12.0]


def test_a_snapshot_is_not_changed_by_later_adds(make_buffer: Make) -> None:
    buf = make_buffer(1)
    needs(buf, "__getitem__")
    buf.add(0, np.ones(3))
    buf.add(0, np.ones(3))
    seen = buf[0]
    buf.add(0, np.ones(3))
    assert same_bits(seen, np.full(3, 2.0))
    assert same_bits(buf.take()[0], np.full(3, 3.0))


# Ledger


def test_a_taken_buffer_is_empty(make_buffer: Make) -> None:
    buf = make_buffer(2)
    buf.add(1, np.ones(2))
    buf.take()
    assert list(buf.take()) == [None, None]


def test_undefined_is_not_zero(make_buffer: Make) -> None:
    """S2."""
    buf = make_buffer(2)
    buf.add(0, None)
    buf.add(1, None)
    buf.add(1, np.ones(2))
    undefined, defined = buf.take()
    assert undefined is None
    assert same_bits(defined, np.ones(2))


def test_a_slot_that_is_not_there_is_an_error_and_changes_nothing(make_buffer: Make) -> None:
    """S1."""
    buf = make_buffer(1)
    buf.add(0, np.ones(2))
    for slot in (1, -1, 10**9):
        with pytest.raises(IndexError):
            buf.add(slot, np.ones(2))
    assert same_bits(buf.take()[0], np.ones(2))


def test_shapes_are_never_broadcast_silently(make_buffer: Make) -> None:
    """A9."""
    buf = make_buffer(1)
    buf.add(0, np.ones((3, 1)))
    for shape in ((3,), (1, 3), (3, 3), ()):
        with pytest.raises(ValueError):
            buf.add(0, np.ones(shape))
    assert same_bits(buf.take()[0], np.ones((3, 1)))


def test_a_key_contributes_once(keyed: Make) -> None:
    """A16."""
    buf = keyed(1)
    buf.add(0, np.ones(2), key=3)
    with pytest.raises(ValueError, match="3"):
        buf.add(0, np.ones(2), key=3)
    assert same_bits(buf.take()[0], np.ones(2))
    buf.add(0, np.ones(2), key=3)  # the next pass
    assert same_bits(buf.take()[0], np.ones(2))


def test_keyed_and_unkeyed_do_not_mix(keyed: Make) -> None:
    """A15."""
    buf = keyed(1)
    buf.add(0, np.ones(2), key=0)
    with pytest.raises(ValueError):
        buf.add(0, np.ones(2))
    assert same_bits(buf.take()[0], np.ones(2))


def test_one_too_many_is_an_error_at_add_and_one_missing_at_take(make_buffer: Make) -> None:
    """A16."""
    buf = make_buffer(1)
    needs(buf, "expect", "ready")
    buf.expect(0, 2)
    buf.add(0, None)
    assert not buf.ready(0)
    with pytest.raises(ValueError):
        buf.take()
    buf.add(0, np.ones(2))
    assert buf.ready(0)
    with pytest.raises(ValueError):
        buf.add(0, np.ones(2))
    assert same_bits(buf.take()[0], np.ones(2))


def test_a_cleared_buffer_is_empty(make_buffer: Make) -> None:
    buf = make_buffer(1)
    needs(buf, "clear")
    buf.add(0, np.ones(2))
    buf.clear()
    assert buf.take()[0] is None


# Errors


@pytest.mark.parametrize("bad", ["a text", ["a", "list"], object()], ids=["a text", "a list", "an object"])
def test_what_is_no_array_is_an_error_and_changes_nothing(make_buffer: Make, bad: object) -> None:
    buf = make_buffer(1)
    buf.add(0, np.ones(2))
    with pytest.raises(TypeError):
        buf.add(0, bad)
    assert same_bits(buf.take()[0], np.ones(2))


# Threads


def test_each_contribution_of_several_threads_is_summed_once(make_buffer: Make) -> None:
    buf = make_buffer(2)
    has_part(buf, "threads")

    def producer(value: float) -> None:
        for i in range(300):
            buf.add(i % 2, np.full(3, value))

    at_once(*(lambda value=value: producer(value) for value in (1.0, 1000.0, 1e6)))
    for total in buf.take():
        assert same_bits(total, np.full(3, 150 * 1001001.0))


def test_a_keyed_sum_does_not_depend_on_threads(keyed: Make) -> None:
    """A15."""
    has_part(keyed(1), "threads")
    gradients = some(5, 60)
    want = left_fold(gradients)
    for _ in range(5):
        buf = keyed(1)

        def producer(first: int, buf: Any = buf) -> None:
            for key in range(first, 60, 3):
                buf.add(0, gradients[key], key=key)

        at_once(*(lambda first=first: producer(first) for first in range(3)))
        assert same_bits(buf.take()[0], want)


# Streams, on the simulated machine, which raises RaceError where an order is missing


@pytest.fixture
def streamed(make_buffer: Make) -> Make:
    """The buffer under test, for laws about streams."""
    buf = make_buffer(1)
    has_part(buf, "streams")
    if not takes(buf.add, "stream") or not takes(buf.take, "stream"):
        pytest.skip("this buffer's add and take have no stream=")
    return make_buffer


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_several_streams_waits_for_each_producer(streamed: Make, seed: int) -> None:
    """S12."""
    gradients = some(6, 3)
    with fanin.sim.Machine(seed=seed) as m:
        consumer, *producers = (m.stream() for _ in range(4))
        buf = streamed(1)
        for g, s in zip(gradients, producers, strict=True):
            buf.add(0, late(m, s, g), stream=s)
        assert same_bits(seen(m, consumer, buf.take(stream=consumer)[0]), left_fold(gradients))


@pytest.mark.parametrize("seed", range(3))
def test_a_single_contribution_waits_for_its_producer(streamed: Make, seed: int) -> None:
    """A14, S18."""
    with fanin.sim.Machine(seed=seed) as m:
        producer, consumer = m.stream(), m.stream()
        buf = streamed(1)
        buf.add(0, late(m, producer, np.arange(3.0)), stream=producer)
        assert same_bits(seen(m, consumer, buf.take(stream=consumer)[0]), np.arange(3.0))


@pytest.mark.parametrize("seed", range(3))
def test_what_another_stream_still_reads_is_never_written(streamed: Make, seed: int) -> None:
    """A6."""
    with fanin.sim.Machine(seed=seed) as m:
        producer, reader, consumer = m.stream(), m.stream(), m.stream()
        buf = streamed(1)
        g = late(m, producer, np.arange(3.0))
        reader.wait(producer)
        found: list[Any] = []
        m.launch(reader, lambda v: found.append(v.copy()), reads=[g], name="another reader")
        buf.add(0, g, stream=producer)
        del g
        buf.add(0, late(m, producer, np.ones(3)), stream=producer)
        assert same_bits(seen(m, consumer, buf.take(stream=consumer)[0]), np.arange(3.0) + 1)
        assert same_bits(found[0], np.arange(3.0))
