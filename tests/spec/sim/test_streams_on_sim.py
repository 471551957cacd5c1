"""The stream rules, carried out on the simulated device: upstream's cases one by one, and the purpose of each wait,
record and mark.

Each case runs under every schedule and many seeds, and is judged twice: by the values that the consumer reads, and by
the checker of happens-before. Then every bit of every plan is omitted in turn: the checker must name the race.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from fanin.sim.machine import SCHEDULES
from kit import hooks
from kit.inside import inside

pytestmark = pytest.mark.core

RUNS = [("seeded", seed) for seed in range(12)] + [(s, 0) for s in SCHEDULES if s not in ("seeded", "starve")]
RUNS += [("starve", handle) for handle in (1, 2, 3, 4)]
#: The checker finds a race under each schedule (test_an_omitted_bit_is_a_race_that_names_it runs them all), so
#: that few are enough for what must have none.
SAMPLE = [("seeded", 0), ("lifo", 0), ("round robin", 0), ("starve", 2)]
BUDGETS = [0, 100, math.inf]


@pytest.fixture(
    params=[pytest.param(run, marks=() if run in SAMPLE else pytest.mark.full, id=f"{run[0]}-{run[1]}") for run in RUNS]
)
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    """A machine of two devices under one schedule; a test with it must have no race."""
    schedule, number = request.param
    return a_world("sim", 2, number, schedule=schedule, starve=number)


def produce(m: Any, s: fanin.Stream, value: float, device: int = 0, n: int = 16, dtype: str = "float32") -> Any:
    """A gradient full of `value`, made on s."""
    g = m.empty(n, dtype, device=device)
    m.launch(s, lambda view: view.fill(value), writes=[g], name=f"produce {value:g}")
    return g


def consume(m: Any, s: fanin.Stream, x: Any) -> list[Any]:
    """Reads x on s; the list has the value once the machine has run."""
    seen: list[Any] = []
    m.launch(s, lambda view: seen.append(view.copy()), reads=[x], name="consume")
    return seen


def check(m: Any, seen: list[Any], value: float, n: int = 16) -> None:
    m.synchronize()
    np.testing.assert_array_equal(seen[0], np.full(n, value, seen[0].dtype))


def adds(t: Any) -> list[Any]:
    return [line for line in t.lines if line.kind == "add"]


# The first gradient of a slot: the devices of producer and consumer


@pytest.mark.rule("S8", "S16")
def test_on_one_stream_nothing_waits_and_nothing_is_recorded(m: Any) -> None:
    s = m.stream()
    buf = fanin.InputBuffer(1, stream=s)
    with fanin.trace() as t:
        for value in (1, 2, 4):
            buf.add(0, produce(m, s, value), stream=s)
        (total,) = buf.take()
    assert [line.how for line in adds(t)] == ["A", "+", "+"]
    assert "S8" in adds(t)[0].rules
    assert (buf.counters.events, buf.counters.waits) == (0, 0)
    check(m, consume(m, s, total), 7)


@pytest.mark.rule("S9", "S18")
def test_on_another_stream_one_gradient_costs_one_event_and_the_consumer_one_wait(m: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    g = produce(m, p, 3)
    with fanin.trace() as t:
        buf.add(0, g, stream=p)
        assert (buf.counters.events, buf.counters.waits) == (1, 0)
        (total,) = buf.take()
    assert total is g
    assert adds(t)[0].how == "a" and "S9" in adds(t)[0].rules
    assert (buf.counters.events, buf.counters.waits) == (1, 1)
    assert c in g.users
    check(m, consume(m, c, total), 3)


@pytest.mark.rule("S10", "S15")
@pytest.mark.parametrize("budget", BUDGETS)
def test_with_the_producer_alone_on_the_device_the_sum_runs_on_its_stream(m: Any, budget: float) -> None:
    p, c = m.stream(0), m.stream(1)
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    with fanin.trace() as t:
        for value in (1, 2, 4):
            buf.add(0, produce(m, p, value), stream=p)
        (total,) = buf.take()
    assert adds(t)[0].how == "B" and "S10" in adds(t)[0].rules
    folds = [line for line in t.lines if line.kind == "fold" and line.count > 1]
    assert folds and all((line.device, line.stream) == (0, p.handle) and "S15" in line.rules for line in folds)
    assert buf.counters.waits == 1
    check(m, consume(m, c, total), 7)


@pytest.mark.rule("S11")
@pytest.mark.parametrize("budget", BUDGETS)
def test_with_neither_on_the_device_the_sum_runs_on_its_current_stream(m: Any, budget: float) -> None:
    p, q, c, here = m.stream(1), m.stream(1), m.stream(1), m.stream(0)
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    with fanin.trace() as t, fanin.stream(here):
        buf.add(0, produce(m, p, 1, device=0), stream=p)
        buf.add(0, produce(m, q, 2, device=0), stream=q)
        (total,) = buf.take()
    assert adds(t)[0].how == "C" and "S11" in adds(t)[0].rules
    folds = [line for line in t.lines if line.kind == "fold" and line.count > 1]
    assert folds and all((line.device, line.stream) == (0, here.handle) for line in folds)
    check(m, consume(m, c, total), 3)


@pytest.mark.rule("S11")
def test_with_neither_on_the_device_an_event_is_recorded_even_if_they_are_one_stream(m: Any) -> None:
    p = m.stream(1)
    buf = fanin.InputBuffer(1, stream=p)
    buf.add(0, produce(m, p, 5, device=0), stream=p)
    assert buf.counters.events == 1
    (total,) = buf.take()
    assert buf.counters.waits == 0  # R is P, and so is the consumer
    check(m, consume(m, p, total), 5)


@pytest.mark.rule("S9", "S12", "S13")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_producers_on_different_devices_meet_in_one_slot(m: Any, budget: float, order: tuple[int, ...]) -> None:
    streams = [m.stream(0), m.stream(1), m.stream(0)]
    c = m.stream(0)
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    for i in order:
        buf.add(0, produce(m, streams[i], 2.0**i, device=0), stream=streams[i])
    (total,) = buf.take()
    check(m, consume(m, c, total), 7)


@pytest.mark.rule("S3")
def test_on_the_cpu_there_is_no_stream_and_no_event(m: Any) -> None:
    c = m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    for value in (1, 2):
        buf.add(0, np.full(3, float(value)))
    (total,) = buf.take()
    assert (buf.counters.events, buf.counters.waits) == (0, 0)
    np.testing.assert_array_equal(total, np.full(3, 3.0))


@pytest.mark.rule("S4")
def test_a_producer_that_names_no_stream_is_on_the_current_one(m: Any) -> None:
    p, q, c = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    with fanin.trace() as t:
        for s, value in ((p, 1), (q, 2)):
            with fanin.stream(s):
                buf.add(0, produce(m, s, value))
        (total,) = buf.take()
    assert [line.stream for line in adds(t)] == [p.handle, q.handle]
    assert all("S4" in line.rules for line in adds(t))
    check(m, consume(m, c, total), 3)


@pytest.mark.rule("S5")
def test_a_missing_consumer_is_the_current_stream_at_the_first_gradient(m: Any) -> None:
    p, first, later = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1)
    for _ in range(2):  # a take makes the slot forget it
        with fanin.stream(first):
            buf.add(0, produce(m, p, 1), stream=p)
        with fanin.stream(later), fanin.trace() as t:
            buf.add(0, produce(m, p, 2), stream=p)
            (total,) = buf.take()
        folds = [line for line in t.lines if line.kind == "fold"]
        assert [line.stream for line in folds] == [first.handle]
        check(m, consume(m, first, total), 3)
        first, later = later, first


@pytest.mark.rule("S1", "S2")
def test_undefined_gradients_cost_nothing(m: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(2, stream=c)
    buf.add(0, None, stream=p)
    buf.add(1, None, stream=p)
    buf.add(1, produce(m, p, 2), stream=p)
    with pytest.raises(IndexError):
        buf.add(2, produce(m, p, 2), stream=p)
    undefined, total = buf.take()
    assert undefined is None
    assert (buf.counters.events, buf.counters.waits) == (1, 1)
    check(m, consume(m, c, total), 2)


@pytest.mark.rule("S6")
def test_a_leaf_on_another_stream_is_warned_of_once_and_counted_always(m: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, leaf=True, name="w")
    fanin.set_options(warn_stream_mismatch=True)  # and forget that it was given
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for _ in range(3):
                buf.add(0, produce(m, p, 1), stream=p)
                buf.take()
            buf.add(0, produce(m, c, 1), stream=c)
            buf.take()
        mine = [str(w.message) for w in given if w.category is fanin.StreamMismatchWarning]
        assert len(mine) == 1
        for word in ("w", "slot 0", str(p.handle), str(c.handle), "S6"):
            assert word in mine[0]
        assert buf.counters.mismatches == 3
        fanin.set_options(warn_stream_mismatch=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            buf.add(0, produce(m, p, 1), stream=p)
        assert buf.counters.mismatches == 4
        buf.clear()
    finally:
        fanin.set_options(warn_stream_mismatch=True)


# Counts


@pytest.mark.rule("S9", "S12", "S13", "S16")
@pytest.mark.parametrize("k", [2, 3, 5])
def test_eager_k_producers_cost_k_events_and_k_waits_and_the_consumer_none(m: Any, k: int) -> None:
    producers, c = [m.stream() for _ in range(k)], m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    for i, p in enumerate(producers):
        buf.add(0, produce(m, p, 2.0**i), stream=p)
        assert (buf.counters.events, buf.counters.waits) == (i + 1, i + 1 if i else 0)
    (total,) = buf.take()
    assert (buf.counters.events, buf.counters.waits) == (k, k)
    check(m, consume(m, c, total), 2.0**k - 1)


@pytest.mark.rule("S12")
def test_fused_there_is_one_wait_for_each_distinct_stream(m: Any) -> None:
    p, q, c = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=math.inf)
    for i in range(6):
        s = (p, q, c)[i % 3]
        buf.add(0, produce(m, s, 2.0**i), stream=s)
    assert buf.counters.waits == 0
    (total,) = buf.take()
    assert buf.counters.waits == 2
    check(m, consume(m, c, total), 63)


@pytest.mark.rule("S12")
def test_a_third_producer_on_the_consumers_stream_does_not_wait_for_the_first_two() -> None:
    with Machine(1) as m:
        p, q, c = m.stream(), m.stream(), m.stream()
        slow = [m.empty(16) for _ in range(2)]
        for s, g in zip((p, q), slow, strict=True):
            m.launch(s, lambda view: view.fill(1), writes=[g], us=10_000, name="slow")
        buf = fanin.InputBuffer(1, stream=c, budget=math.inf)
        with fanin.trace() as t:
            buf.add(0, slow[0], stream=p)
            buf.add(0, slow[1], stream=q)
            buf.add(0, produce(m, c, 2), stream=c)
            (total,) = buf.take()
        (third,) = [line for line in t.lines if line.label == "produce 2"]
        assert third.end_us < 1000
        (sum_,) = [line for line in t.lines if line.kind == "kernel" and line.label.startswith("sum")]
        assert sum_.start_us >= 10_000
        check(m, consume(m, c, total), 4)


@pytest.mark.rule("S12")
def test_a_wait_that_holds_already_is_omitted_and_counted(m: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(2, stream=c, budget=math.inf)
    for slot in (1, 1, 0, 0):
        buf.add(slot, produce(m, p, 1), stream=p)
    x, y = buf.take()  # slot 0 waits for p's newest event, which covers the older ones of slot 1
    assert (buf.counters.waits, buf.counters.waits_elided) == (1, 1)
    seen = consume(m, c, x), consume(m, c, y)
    check(m, seen[0], 2)
    check(m, seen[1], 2)


@pytest.mark.rule("S12")
@pytest.mark.parametrize("newest", range(3))
def test_the_sum_waits_only_for_the_newest_gradient_of_a_producer_in_every_key_order(m: Any, newest: int) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=math.inf)
    for key in (*(k for k in range(3) if k != newest), newest):
        buf.add(0, produce(m, p, 2.0**key), key=key, stream=p)
    (total,) = buf.take()
    assert (buf.counters.waits, buf.counters.waits_elided) == (1, 0)
    check(m, consume(m, c, total), 7)


@pytest.mark.rule("S12")
def test_the_sum_does_not_wait_for_work_that_a_producer_queues_after_its_add(m: Any) -> None:
    """Elision counts events only: a wait for an older event of the same stream covers nothing newer."""
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    buf.add(0, produce(m, p, 1), stream=p)
    buf.add(0, produce(m, p, 2), stream=p)  # folds: c waits for p
    buf.add(0, produce(m, p, 4), stream=p)  # made since: c must wait again
    (total,) = buf.take()
    check(m, consume(m, c, total), 7)


# Consumers


@pytest.mark.rule("S18", "S19")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("where", ["C", "P", "other", "other device"])
def test_the_taker_may_use_the_sum_on_its_stream(m: Any, count: int, where: str) -> None:
    p, c = m.stream(), m.stream()
    taker = {"C": c, "P": p, "other": m.stream(), "other device": m.stream(1)}[where]
    buf = fanin.InputBuffer(1, stream=c)
    for i in range(count):
        buf.add(0, produce(m, p, 2.0**i), stream=p)
    (total,) = buf.take(stream=taker)
    assert taker in total.users
    check(m, consume(m, taker, total), 2.0**count - 1)


@pytest.mark.rule("S18")
def test_without_an_event_one_is_recorded_when_the_sum_is_taken(m: Any) -> None:
    s, taker = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, produce(m, s, 3), stream=s)
    assert buf.counters.events == 0
    (total,) = buf.take(stream=taker)
    assert (buf.counters.events, buf.counters.waits) == (1, 1)
    check(m, consume(m, taker, total), 3)


@pytest.mark.rule("S20")
def test_at_the_end_of_a_pass_the_caller_waits_for_its_streams(m: Any) -> None:
    caller, one, other = m.stream(0), m.stream(0), m.stream(1)
    x, y = produce(m, one, 1), produce(m, other, 2, device=1)
    hooks.pass_end(caller, [one, other, caller], [x, y])
    assert caller in x.users and caller in y.users
    check(m, consume(m, caller, x), 1)
    check(m, consume(m, caller, y), 2)


# Conversions, out=


@pytest.mark.rule("S21")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("what", ["cast", "shape", "copy"])
@pytest.mark.parametrize("device", [0, 1])
def test_conversions_run_where_they_are_ordered(m: Any, budget: float, what: str, device: int) -> None:
    p, c = m.stream(device), m.stream(0)
    slot = {
        "cast": fanin.Slot(dtype="float64"),
        "shape": fanin.Slot(shape=(16,)),
        "copy": fanin.Slot(),
    }[what]
    buf = fanin.InputBuffer([slot], stream=c, budget=budget)
    for i in range(3):
        g = m.empty((2, 16) if what == "shape" else 16, "float32", device=0)
        m.launch(p, lambda view, value=2.0**i: view.fill(value), writes=[g], name=f"produce {i}")
        buf.add(0, g, stream=p, copy=what == "copy")
        m.launch(p, lambda view: view.fill(-1), writes=[g], name="reuse") if what == "copy" and device == 0 else None
    (total,) = buf.take()
    assert total.dtype == ("float64" if what == "cast" else "float32")
    check(m, consume(m, c, total), 14 if what == "shape" else 7)


@pytest.mark.rule("S21", "S11")
def test_a_conversion_on_the_accumulation_stream_is_waited_for_by_the_consumer(m: Any) -> None:
    p, c = m.stream(1), m.stream(1)
    buf = fanin.InputBuffer([fanin.Slot(dtype="float64")], stream=c)
    buf.add(0, produce(m, p, 3, device=0), stream=p)
    (total,) = buf.take()
    check(m, consume(m, c, total), 3)


@pytest.mark.rule("S22")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("where", ["C", "P", "other"])
def test_out_is_written_after_its_owners_work_on_it(
    m: Any, budget: float, count: int, scale: float | None, where: str
) -> None:
    p, c = m.stream(), m.stream()
    taker = {"C": c, "P": p, "other": m.stream()}[where]
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    for i in range(count):
        buf.add(0, produce(m, p, 2.0**i), stream=p)
    out = produce(m, taker, -1)
    (total,) = buf.take(stream=taker, out=[out], scale=scale)
    assert total is out
    check(m, consume(m, taker, total), (2.0**count - 1) * (scale or 1))


@pytest.mark.rule("S22")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_last_rounding_is_ordered_like_a_sum(m: Any, dtype: str) -> None:
    p, c = m.stream(0), m.stream(1)
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    for i in range(3):
        buf.add(0, produce(m, p, 2.0**i, dtype=dtype), stream=p)
    (total,) = buf.take(scale=2.0)
    assert total.dtype == dtype
    check(m, consume(m, c, total), 14)


@pytest.mark.rule("S14")
def test_objects_are_summed_with_the_accumulation_stream_current(m: Any) -> None:
    p, q, c = m.stream(), m.stream(), m.stream()
    held = {s: produce(m, s, 1) for s in (p, q)}

    class Wrapped:
        def __init__(self, part: Any) -> None:
            self.part = part

        def __fanin_parts__(self) -> list[Any]:
            return [self.part]

    current: list[Any] = []

    def combine(old: Any, new: Any) -> Any:
        current.append(fanin.current_stream("sim:0"))
        out = m.empty(16, "float32")
        m.launch(
            current[-1], lambda a, b, o: np.add(a, b, out=o), reads=[old.part, new.part], writes=[out], name="combine"
        )
        return Wrapped(out)

    buf = fanin.InputBuffer([fanin.Slot(combine=combine)], stream=c)
    before = fanin.current_stream("sim:0")
    for s, g in held.items():
        buf.add(0, Wrapped(g), stream=s)
    (total,) = buf.take()
    assert current == [c]
    assert fanin.current_stream("sim:0") == before
    check(m, consume(m, c, total.part), 2)


@pytest.mark.rule("S12", "S13")
@pytest.mark.parametrize("budget", BUDGETS)
def test_sparse_parts_are_waited_for_and_marked(m: Any, budget: float) -> None:
    p, q, c = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    kept = []
    for s, rows in ((p, [0, 2]), (q, [2, 3])):
        values = produce(m, s, 1, n=2)
        indices = m.array(np.array([rows]))
        g = fanin.Sparse("coo", (indices, values), (4,))
        buf.add(0, g, stream=s)
        kept.append(g)
    assert c in kept[0].parts[0].users and c in kept[0].parts[1].users
    (total,) = buf.take()
    assert all(c in part.users for g in kept for part in g.parts)
    seen = [consume(m, c, part) for part in total.parts]
    m.synchronize()
    dense = np.zeros(4)
    np.add.at(dense, tuple(seen[0][0]), seen[1][0])
    np.testing.assert_array_equal(dense, [1, 0, 2, 1])


# Devices that meet


@pytest.mark.rule("A12")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("host", [2.0, np.float32(2), np.array(2, "float32")], ids=["a number", "a scalar", "0-d"])
def test_a_host_number_is_copied_to_the_slots_device(m: Any, budget: float, host: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    g = m.empty((), "float32")
    m.launch(p, lambda view: view.fill(1), writes=[g], name="produce")
    buf.add(0, g, stream=p)
    buf.add(0, host, stream=p)
    (total,) = buf.take()
    assert total.device == "sim:0" and total.dtype == "float32"
    seen = consume(m, c, total)
    m.synchronize()
    assert seen[0] == 3


@pytest.mark.rule("A12")
def test_a_gradient_of_another_device_is_refused(m: Any) -> None:
    s = m.stream()
    buf = fanin.InputBuffer(2, stream=s, name="grads")
    buf.add(0, produce(m, s, 1), stream=s)
    buf.add(1, np.ones(16, "float32"))
    for slot, wrong in ((0, produce(m, m.stream(1), 1, device=1)), (0, np.ones(16, "float32")), (1, produce(m, s, 1))):
        with pytest.raises((ValueError, BufferError), match=rf"grads.*slot {slot}"):
            buf.add(slot, wrong)
    total, host = buf.take()
    check(m, consume(m, s, total), 1)
    np.testing.assert_array_equal(host, np.ones(16, "float32"))


@pytest.mark.rule("A12")
def test_a_slot_that_is_declared_so_takes_from_a_device_to_the_host(m: Any) -> None:
    p = m.stream()
    buf = fanin.InputBuffer([fanin.Slot(device="cpu")])
    for value in (1, 2):
        buf.add(0, produce(m, p, value), stream=p)
    (total,) = buf.take()
    assert isinstance(total, np.ndarray)
    np.testing.assert_array_equal(total, np.full(16, 3, "float32"))


# Lifetime


@pytest.mark.rule("S9", "S12", "S13", "S19")
@pytest.mark.parametrize("budget", BUDGETS)
def test_memory_is_freed_only_after_all_streams_that_used_it(m: Any, budget: float) -> None:
    """Everything is dropped as soon as it may be, and the arena hands it out again: a mark that is missing is a race,
    or a wrong sum.
    """
    p, q, c, user = (m.stream() for _ in range(4))
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    for turn in range(6):
        for i, s in enumerate((p, q, p)):
            buf.add(0, produce(m, s, turn + 2.0**i), stream=s)
        (total,) = buf.take(stream=user)
        seen = consume(m, user, total)
        del total
        check(m, seen, 3 * turn + 7) if turn % 2 else None


@pytest.mark.rule("S19")
def test_a_sum_in_place_waits_for_streams_that_still_use_the_memory(m: Any) -> None:
    """A reference count of one is not enough: another stream's kernel may still read."""
    p, c, other = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    g = produce(m, p, 1)
    other.wait(p)
    m.launch(other, lambda view: None, reads=[g], name="reader")
    buf.add(0, g, stream=p, donate=True)
    del g
    buf.add(0, produce(m, p, 2), stream=p)
    (total,) = buf.take()
    check(m, consume(m, c, total), 3)


@pytest.mark.rule("S7")
def test_the_capture_table_is_a_pure_function() -> None:
    """What carries it out is tried in tests/graph/test_capture.py."""
    assert inside().rules_capture(0, 0, False, False) == "go"
    assert inside().rules_capture(7, 7, False, False) == "go"
    assert inside().rules_capture(0, 7, True, False) == "redirect"
    assert inside().rules_capture(0, 7, False, True) == "error"
    assert inside().rules_capture(0, 7, False, False) == "go"
    assert {inside().rules_capture(7, t, f, g) for t in (0, 8) for f in (0, 1) for g in (0, 1)} == {"error"}


@pytest.mark.rule("S17")
def test_after_a_fold_the_sum_is_ready_on_the_accumulation_stream(m: Any) -> None:
    p, q, c = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    buf.add(0, produce(m, p, 1), stream=p)
    buf.add(0, produce(m, q, 2), stream=q)
    waits = buf.counters.waits
    (total,) = buf.take(stream=c)
    assert buf.counters.waits == waits  # R is A is C: the consumer need not wait
    check(m, consume(m, c, total), 3)


# What each bit is for


@dataclass(frozen=True)
class Mutant:
    """A scenario in which omitting `words` is a race, with the text that the message must have."""

    words: tuple[str, ...]
    run: Callable[[Machine], float]
    """Does it all, up to the point where a fault must have shown; returns what the consumer saw, less what it should
    have.
    """
    says: tuple[str, ...]


def finish(m: Any, seen: list[Any], value: float) -> float:
    """Runs the rest, step by step, while new arrays reuse all freed memory; returns the largest error of any
    value.
    """
    newcomers = []
    for _ in range(6):
        m.step()
        newcomers.append(m.array(np.full(16, 7, "float32")))
    m.synchronize()
    off = [float(np.abs(view - value).max()) for view in seen]
    return max(off + [float(np.abs(x.numpy() - 7).max()) for x in newcomers])


def saw(m: Any, s: fanin.Stream, x: Any, value: float) -> float:
    return finish(m, consume(m, s, x), value)


def one_gradient(m: Any, p: fanin.Stream, c: fanin.Stream, taker: fanin.Stream | None = None, **take: Any) -> float:
    """One gradient on device 0 from p, for c, taken on `taker`."""
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, produce(m, p, 3, device=0), stream=p)
    (total,) = buf.take(stream=taker, **take)
    return saw(m, taker or c, total, 3 * take.get("scale", 1))


def two_gradients(m: Any, p: fanin.Stream, q: fanin.Stream, c: fanin.Stream, budget: float = 0) -> float:
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    buf.add(0, produce(m, p, 1, device=0), stream=p)
    buf.add(0, produce(m, q, 2, device=0), stream=q)
    (total,) = buf.take()
    return saw(m, c, total, 3)


def converted(m: Any, c: fanin.Stream) -> float:
    """A gradient on device 0 from a stream of device 1, to be cast; the caller drops it at once."""
    p = m.stream(1)
    buf = fanin.InputBuffer([fanin.Slot(dtype="float64")], stream=c)
    buf.add(0, produce(m, p, 3, device=0), stream=p)
    (total,) = buf.take()
    return saw(m, c, total, 3)


def handed_through_and_dropped(m: Any) -> float:
    """One gradient, made on its consumer's stream, taken and read on another, and dropped there."""
    s, taker = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=s)
    g = produce(m, s, 3)
    buf.add(0, g, stream=s)
    buf.add(0, produce(m, s, 1), stream=s)  # so that the sum is the buffer's memory, which launch does not mark (D31)
    del g
    (total,) = buf.take(stream=taker)
    seen = consume(m, taker, total)
    del total
    return finish(m, seen, 4)


def out_of_the_takers(m: Any) -> float:
    """The taker's out= was written on the taker's stream just before."""
    p, c, taker = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, produce(m, p, 1), stream=p)
    buf.add(0, produce(m, p, 2), stream=p)
    out = produce(m, taker, -1)
    buf.take(stream=taker, out=[out])
    return saw(m, taker, out, 3)


def fresh_out_and_dropped(m: Any) -> float:
    """An out= without earlier work and without other references."""
    p, c, taker = m.stream(), m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, produce(m, p, 1), stream=p)
    buf.add(0, produce(m, p, 2), stream=p)
    buf.take(stream=taker, out=[m.empty(16, "float32")])
    return finish(m, [], 3)


def pass_ended(m: Any) -> float:
    caller, s = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for value in (1, 2):
        buf.add(0, produce(m, s, value), stream=s)
    (total,) = buf.take()
    hooks.pass_end(caller, [s], [total])
    seen = consume(m, caller, total)
    del total
    return finish(m, seen, 3)


MUTANTS = [
    Mutant(("S9.record",), lambda m: one_gradient(m, m.stream(), m.stream()), ("produce 3", "consume")),
    Mutant(("S9.mark", "S13.mark"), lambda m: two_gradients(m, m.stream(), m.stream(), m.stream()), ("sum",)),
    Mutant(("S10.record",), lambda m: one_gradient(m, m.stream(0), m.stream(1)), ("produce 3", "consume")),
    Mutant(("S11.record",), lambda m: one_gradient(m, m.stream(1), m.stream(1)), ("produce 3", "consume")),
    Mutant(("S12.record",), lambda m: two_gradients(m, m.stream(), m.stream(), m.stream()), ("produce 2", "sum")),
    Mutant(("S12.wait",), lambda m: two_gradients(m, m.stream(), m.stream(), m.stream()), ("produce 2", "sum")),
    Mutant(("S12.mark",), lambda m: two_gradients(m, m.stream(), m.stream(), m.stream()), ("sum",)),
    Mutant(("S13.wait",), lambda m: two_gradients(m, m.stream(), m.stream(), m.stream()), ("produce 1", "sum")),
    Mutant(("S13.mark",), lambda m: two_gradients(m, m.stream(1), m.stream(1), m.stream(1)), ("sum",)),
    Mutant(("S15.record",), lambda m: two_gradients(m, m.stream(0), m.stream(0), m.stream(1)), ("sum", "consume")),
    Mutant(("S18.record",), lambda m: one_gradient(m, s := m.stream(), s, m.stream()), ("produce 3", "consume")),
    Mutant(("S18.wait",), lambda m: one_gradient(m, m.stream(), m.stream()), ("produce 3", "consume")),
    Mutant(("S19.mark",), handed_through_and_dropped, ("consume",)),
    Mutant(("S20.wait",), pass_ended, ("sum", "consume")),
    Mutant(("S20.mark",), pass_ended, ("consume",)),
    Mutant(("S21.wait",), lambda m: converted(m, m.stream(0)), ("produce 3",)),
    Mutant(("S21.mark",), lambda m: converted(m, m.stream(0)), ()),
    Mutant(("S21.record",), lambda m: converted(m, m.stream(1)), ("consume",)),
    Mutant(("S22.wait",), out_of_the_takers, ("produce -1", "sum")),
    Mutant(("S22.mark", "S19.mark"), fresh_out_and_dropped, ("sum",)),
    Mutant(("S22.record",), lambda m: one_gradient(m, m.stream(0), m.stream(1), scale=2.0), ("finish", "consume")),
]


def test_every_bit_of_a_plan_has_a_case() -> None:
    assert {mutant.words[0] for mutant in MUTANTS} == set(inside().rules_plan_words())


@pytest.mark.rule("S8", "S9", "S10", "S11", "S12", "S13", "S15", "S18", "S19", "S20", "S21", "S22")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: "+".join(x.words))
def test_an_omitted_bit_is_a_race_that_names_it(mutant: Mutant) -> None:
    for schedule, number in RUNS:
        with Machine(2, number, schedule=schedule, starve=number) as m:
            assert mutant.run(m) == 0
            assert m.races == 0
    for schedule, number in RUNS:
        m = Machine(2, number, schedule=schedule, starve=number)
        m.leave_out(*mutant.words)
        with pytest.raises(fanin.RaceError) as caught, m:
            mutant.run(m)
        text = str(caught.value)
        missing = "mark as used on" if mutant.words[0].endswith("mark") else "must wait for"
        for word in (*mutant.says, "missing: ", missing):
            assert word in text, text
        assert len(re.findall(r"test_streams_on_sim\.py:\d+", text)) >= 2, text
        assert m.races >= 1


@pytest.mark.parametrize("mutant", [x for x in MUTANTS if len(x.words) > 1], ids=lambda x: x.words[0])
def test_of_two_waits_for_one_edge_each_is_enough(mutant: Mutant) -> None:
    """Left out alone, the other still holds: no false report."""
    for word in mutant.words:
        with Machine(2) as m:
            m.leave_out(word)
            assert mutant.run(m) == 0
            assert m.races == 0


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda x: "+".join(x.words))
def test_a_race_found_by_the_checker_gives_a_wrong_sum_under_some_schedule(mutant: Mutant) -> None:
    """The second oracle: with the checker off, the bytes themselves are wrong."""

    def is_wrong(schedule: str, number: int) -> bool:
        with Machine(2, number, schedule=schedule, starve=number, check=False) as m:
            m.leave_out(*mutant.words)
            return mutant.run(m) != 0

    assert any(is_wrong(*run) for run in [*RUNS, *(("seeded", seed) for seed in range(100, 200))])
