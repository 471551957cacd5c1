"""Many slots in one launch: what a batch of adds makes due, and what a take of all slots sums, on the simulated device
and on the fake driver.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin.sim import Machine, explore
from fanin.sim.machine import SCHEDULES
from kit import hooks
from kit.sample import sizes
from kit.values import LOW, PLAIN, bits
from kit.world import world

pytestmark = pytest.mark.core

REJECTED, NO_MEMORY, STICKY = 701, 2, 700
PIECE = 65536  # of a table that goes to the device


def read(x: Any, stream: Any) -> Any:
    with fanin.stream(stream):
        return x.numpy()


def rows(world: Any, values: Any) -> list[Any]:
    """The rows of a matrix as arrays on the device, in one piece of memory."""
    whole = world.array(values)
    return [whole[i] for i in range(len(values))]


# One launch


@pytest.mark.parametrize("n", sizes(300, 10_000))
def test_a_batch_of_small_sums_is_one_launch_and_a_few_copies_of_its_table(a_world: Any, n: int) -> None:
    w = a_world("fake")
    s = w.stream()
    parts = [rows(w, np.full((n, 256), 2.0**k, np.float32)) for k in range(4)]
    buf = fanin.InputBuffer(n, stream=s, budget=0)
    buf.add_many(range(n), parts[0], stream=s)
    counted = []
    for k in (1, 2, 3):
        names = ("", "LaunchKernel", "MemcpyHtoDAsync", "EventRecord", "StreamWaitEvent")
        before = [w.driver.calls(name) for name in names]
        live = w.driver.live("memory")
        buf.add_many(range(n), parts[k], stream=s)
        counted.append(
            ([w.driver.calls(name) - b for name, b in zip(names, before, strict=True)], w.driver.live("memory") - live)
        )
    table = n * (24 + 2 * 8 + 4)  # a row, its two sources, its one tile
    pieces = -(-table // PIECE)
    assert [c[1:] for c, _ in counted] == [[1, pieces, 0, 0]] * 3
    assert [made for _, made in counted] == [n, 0, 0]  # the second and all later sums are in place
    assert counted[1][0][0] == counted[2][0][0] < 20 + pieces, "calls of a round do not grow with the slots"
    sums = buf.take()
    for i in (0, 1, n // 2, n - 1):
        assert read(sums[i], s).tolist() == [15.0] * 256
    w.synchronize()
    assert w.races == 0, w.race


def test_a_take_of_all_slots_is_one_launch(w: Any) -> None:
    n, s = 200, w.stream()
    values = np.arange(n * 16, dtype=np.float32).reshape(n, 16)
    for how in ({}, {"scale": 0.5}, {"writable": True}):
        buf = fanin.InputBuffer(n, stream=s)
        for _ in range(3):
            buf.add_many(range(n), rows(w, values), stream=s)
        sums: list[Any] = []
        assert w.launches(lambda: sums.extend(buf.take(**how))) == 1  # noqa: B023
        for i in (0, 77, n - 1):
            assert read(sums[i], s).tolist() == (values[i] * 3 * how.get("scale", 1)).tolist()


def test_sums_into_out_are_one_launch(w: Any) -> None:
    n, s, taker = 50, w.stream(), w.stream()
    values = np.arange(n * 8, dtype=np.float32).reshape(n, 8)
    buf = fanin.InputBuffer(n, stream=s)
    for _ in range(2):
        buf.add_many(range(n), rows(w, values), stream=s)
    out = rows(w, np.zeros((n, 8), np.float32))
    assert w.launches(lambda: buf.take(out=out, stream=taker)) == 1
    assert [read(x, taker).tolist() for x in out] == (2 * values).tolist()


def test_each_stream_each_dtype_and_each_device_has_a_launch_of_its_own(w: Any) -> None:
    streams = [w.stream(0), w.stream(0), w.stream(1)]
    buf = fanin.InputBuffer(12, budget=0)
    kinds = [np.float32, np.float64] if w.kind == "fake" else [np.float32, np.float32]
    grads = []
    for i in range(12):
        k = i % 3
        with fanin.stream(streams[k]):
            grads.append(w.array(np.full(5, i, kinds[i // 6]), device=k // 2))
            buf.add(i, grads[i], stream=streams[k])
    order = list(range(12))[::-1]

    def add() -> None:
        for k in range(3):  # one call for each stream
            mine = [i for i in order if i % 3 == k]
            buf.add_many(mine, [grads[i] for i in mine], stream=streams[k])

    assert w.launches(add) == (6 if w.kind == "fake" else 3)
    buf = fanin.InputBuffer(12)
    for _, i in itertools.product(range(2), order):
        with fanin.stream(streams[i % 3]):
            buf.add(i, grads[i], stream=streams[i % 3])
    sums: list[Any] = []
    assert w.launches(lambda: sums.extend(buf.take())) == (6 if w.kind == "fake" else 3)
    for i, x in enumerate(sums):
        assert read(x, streams[i % 3]).tolist() == [2 * i] * 5


def test_the_trace_line_of_a_launch_names_its_slots_and_their_buffer() -> None:
    with Machine() as m, fanin.trace() as t:
        s = m.stream()
        buf = fanin.InputBuffer(5, stream=s, budget=0, name="grads")
        for _ in range(2):
            buf.add_many(range(5), rows(m, np.ones((5, 4))), stream=s)
        clock = m.clock()
    (line,) = [line for line in t.lines if line.kind == "kernel"]
    assert (line.label, line.count) == ("5 slots: sum grads[0], sum grads[1], sum grads[2] ..", 5)
    assert line.bytes == 5 * 3 * 32 and 0 <= line.start_us < line.end_us <= clock.device_us
    assert sum(line.kind == "fold" for line in t.lines) == 5
    assert [x.buffer for x in t.picture().slices if x.name == line.label] == ["grads"]


def test_large_sums_go_alone(a_world: Any) -> None:
    w = a_world("fake")
    s = w.stream()
    buf = fanin.InputBuffer(5, stream=s)
    for _ in range(2):
        buf.add_many(range(5), [w.array(np.ones(n, np.float32)) for n in (8, 8, 1 << 19, 8, 8)], stream=s)
    assert w.launches(buf.take) == 2  # 6 MiB are read and written for the one


@pytest.mark.parametrize("due", ["at the take", "at an add"])
@pytest.mark.parametrize("mib, rounds", [(24, [3, 3]), (32, [2, 2, 2])])  # of 72 MiB, and of 64
def test_results_of_64_mib_fill_a_round(due: str, mib: int, rounds: list[int]) -> None:
    with Machine(memory=1 << 29) as m:
        s = m.stream()
        buf = fanin.InputBuffer(6, stream=s, budget=1 << 40 if due == "at the take" else 0)
        gradients = [m.empty(mib << 20, "int8")] * 6
        with fanin.trace() as t:
            for _ in range(2):
                buf.add_many(range(6), gradients, stream=s)
            buf.take()
        assert [line.count for line in t.lines if line.kind == "kernel"] == rounds


# Bits


def some(rng: np.random.Generator, dtype: np.dtype[Any], n: int) -> Any:
    wide = rng.standard_normal(n) * 2.0 ** rng.integers(-8, 8, n) * (16 if dtype.kind in "iu" else 1)
    with np.errstate(all="ignore"):
        return (wide + (1j * wide[::-1] if dtype.kind == "c" else 0)).astype(dtype)


@pytest.mark.parametrize("dtype", PLAIN + LOW, ids=str)
def test_the_bits_are_those_of_slot_by_slot(a_world: Any, dtype: np.dtype[Any]) -> None:
    """Sizes on both sides of a tile and of sixteen bytes, addresses that are no multiple of them, several terms, a
    scale, a running sum.
    """
    seed = 17 + dtype.num
    print("seed", seed)
    rng = np.random.default_rng(seed)
    tile = 1024 // dtype.itemsize
    sizes = [1, 2, 3, 16 // dtype.itemsize, tile - 1, tile, tile + 1, 2 * tile, 3 * tile + 5, 0, 7]
    n = len(sizes)
    turns = [[some(rng, dtype, size + 3) for size in sizes] for _ in range(4)]
    shifts = [int(x) for x in rng.integers(0, 4, n)]
    scale = 3 if dtype.kind in "iub" else 0.37
    w = a_world("fake")
    s = w.stream()
    on = [[w.array(x)[k : k + size] for x, k, size in zip(turn, shifts, sizes, strict=True)] for turn in turns]
    for budget, how in ((None, {}), (None, {"scale": scale}), (0, {})):
        buf, cpu = fanin.InputBuffer(n, stream=s, budget=budget), fanin.InputBuffer(n)
        for turn, host in zip(on, turns, strict=True):
            buf.add_many(range(n), turn, stream=s)
            for i, x in enumerate(host):
                cpu.add(i, x[shifts[i] : shifts[i] + sizes[i]])
        sums: list[Any] = []
        launches = w.launches(lambda: sums.extend(buf.take(**how)))  # noqa: B023
        with np.errstate(all="ignore"):
            wanted = cpu.take(**how)
        for size, x, want in zip(sizes, sums, wanted, strict=True):
            got = read(x, s)
            assert got.dtype == want.dtype and bits(got) == bits(want), (dtype, size, budget, how)
        assert budget == 0 or launches == 1 or (dtype.kind == "c" and bool(how))
    w.synchronize()
    assert w.races == 0, w.race


def test_sums_that_do_not_fit_the_table_are_launched_singly_in_the_same_flush(w: Any) -> None:
    s = w.stream()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = [x, x.T, x[:, ::2], x.astype(np.float64), x]
    buf = fanin.InputBuffer(6, stream=s)
    for turn in range(2):
        on = [w.array(x) if i in (0, 4) or turn else w.array(np.ascontiguousarray(g)) for i, g in enumerate(given)]
        on = [
            w.array(x).T
            if i == 1 and turn
            else w.array(x)[:, ::2]
            if i == 2 and turn
            else w.array(given[3])
            if i == 3 and not turn
            else a
            for i, a in enumerate(on)
        ]
        sparse = fanin.Sparse("coo", (w.array(np.array([[1]])), w.array(np.ones((1, 4), np.float32))), (3, 4))
        buf.add_many(range(6), [*on, sparse if turn else w.array(x)], stream=s)
    sums: list[Any] = []
    launches = w.launches(lambda: sums.extend(buf.take()))
    print(launches)
    for got, want in zip(sums[:5], given, strict=True):
        np.testing.assert_array_equal(read(got, s), 2 * np.asarray(want, np.float64))
    np.testing.assert_array_equal(read(sums[5], s), x + np.array([[0], [1], [0]], np.float32))


# Slots that meet


def test_one_slot_many_times_in_a_batch_is_one_sum(w: Any) -> None:
    s = w.stream()
    buf = fanin.InputBuffer(2, stream=s, budget=0)
    for turn in range(3):
        buf.add_many([1, 0, 1, 1], rows(w, np.full((4, 3), 10.0**turn)), stream=s)
    assert buf.counters.folds == 5  # slot 0: two; slot 1: the first three, and two more
    assert [read(x, s).tolist() for x in buf.take()] == [[111.0] * 3, [333.0] * 3]


@pytest.mark.parametrize("many", [False, True], ids=["slot by slot", "a batch"])
def test_sums_that_share_memory_go_one_after_the_other(w: Any, many: bool) -> None:
    """A promise is broken: an array is donated to one slot, and others have it. The result is that of slot by slot."""
    s = w.stream()
    x, ones = w.array(np.full(4, 1.0)), rows(w, np.full((3, 4), 5.0))
    buf = fanin.InputBuffer(3, stream=s, budget=0)
    twice = w.kind == "fake"  # the simulated device refuses a second donation
    for slot in (0, 1, 2) if twice else (0, 2, 1):
        buf.add(slot, x, stream=s, donate=slot == 1 or (slot == 2 and twice))
    launches = w.launches(
        lambda: (
            buf.add_many(range(3), ones, stream=s) if many else [buf.add(i, g, stream=s) for i, g in enumerate(ones)]
        )
    )
    assert launches == 3
    # 1 + 5 beside x; x = 1 + 5; 6 + 5, into x where that was donated twice
    assert [read(v, s)[0] for v in buf.take()] == ([6.0, 11.0, 11.0] if twice else [6.0, 6.0, 11.0])


# Order


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_a_consumer_on_another_stream_reads_the_sums_under_every_schedule(kind: str, schedule: str) -> None:
    def taken(w: Any, budget: int | None, far: bool) -> None:
        c, p, q, other = (w.stream() for _ in range(4))
        n = 8
        buf = fanin.InputBuffer(n, stream=w.stream(1) if far else c, budget=budget)
        for turn, s in enumerate((p, q, p)):
            grads = []
            for i in range(n):
                g = w.empty(6)
                w.launch(s, lambda v, turn=turn, i=i: v.fill(i + 10.0**turn), writes=[g])
                grads.append(g)
            buf.add_many(range(n), grads, stream=s)
            del grads, g
        sums = buf.take(stream=other)
        seen: list[list[float]] = []
        for x in sums:
            w.launch(other, lambda v: seen.append(v.tolist()), reads=[x])
        w.synchronize()
        assert seen == [[3 * i + 111.0] * 6 for i in range(n)]

    for budget, far in ((None, False), (0, False), (0, True)):
        with world(kind, seed=3, schedule=schedule) as w:
            taken(w, budget, far)


def batches_from_threads(m: Machine) -> Any:
    c = m.stream()
    buf = fanin.InputBuffer(2, stream=c, budget=0)

    def producer(turn: int) -> None:
        s = m.stream()
        grads = [m.empty(2) for _ in range(2)]
        for i, g in enumerate(grads):
            m.launch(s, lambda v, i=i: v.fill(10.0**turn * (i + 1)), writes=[g])
        buf.add_many([0, 1], grads, stream=s)

    producer(0)
    for turn in (1, 2):
        m.spawn(producer, turn)
    m.join()
    return [read(x, c) for x in buf.take()]


def test_batches_of_two_threads_race_in_no_order() -> None:
    report = explore(batches_from_threads, limit=25)
    assert report.outcome == "incomplete", report  # it has millions of orders
    assert len(report.results) == 1 and report.runs > 20, report


@pytest.mark.threads
def test_threads_add_batches_to_the_same_slots_and_another_takes(a_world: Any) -> None:
    rounds, n = 30, 6
    w = a_world("fake")
    c = w.stream()
    streams = [w.stream() for _ in range(3)]
    grads = [rows(w, np.full((n, 8), 1.0)) for _ in streams]
    buf = fanin.InputBuffer(n, stream=c, budget=0)
    failed: list[BaseException] = []
    total = np.zeros(n)
    done = threading.Event()

    def add(k: int) -> None:
        try:
            for turn in range(rounds):
                slots = list(range(n)) if turn % 2 else list(range(n))[::-1]
                buf.add_many(slots, grads[k], stream=streams[k])
        except BaseException as e:
            failed.append(e)

    def take() -> None:
        try:
            while not done.is_set():
                for i, x in enumerate(buf.take()):
                    total[i] += 0 if x is None else read(x, c)[0]
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=add, args=(k,)) for k in range(len(streams))]
    taker = threading.Thread(target=take)
    for t in (*threads, taker):
        t.start()
    for t in threads:
        t.join()
    done.set()
    taker.join()
    assert not failed, failed
    for i, x in enumerate(buf.take()):
        total[i] += 0 if x is None else read(x, c)[0]
    assert total.tolist() == [rounds * len(streams)] * n
    w.synchronize()
    assert w.races == 0, w.race


# Captures


def test_under_a_capture_sums_are_launches_that_a_graph_can_repeat(w: Any) -> None:
    s, n = w.stream(), 4
    values = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    grads = [rows(w, values), rows(w, 10 * values)]
    out = rows(w, np.zeros((n, 3), np.float32))
    w.synchronize()
    buf = fanin.InputBuffer(n, stream=s)
    copies = w.driver.calls("MemcpyHtoDAsync") if w.kind == "fake" else 0
    w.begin_capture(s)
    for g in grads:
        buf.add_many(range(n), g, stream=s)
    launches = w.launches(lambda: buf.take(out=out, stream=s))
    graph = w.end_capture(s)
    assert launches == (n if w.kind == "fake" else 1)
    assert w.kind != "fake" or w.driver.calls("MemcpyHtoDAsync") == copies
    for _ in range(2):
        for x in out:
            w.launch(s, lambda v: v.fill(-1), writes=[x])
        w.launch_graph(graph, s)
        assert [read(x, s).tolist() for x in out] == (11 * values).tolist()
    if w.kind == "fake":
        w.destroy_graph(graph)


# Failures


def test_a_failed_launch_poisons_its_slots_and_names_them(a_world: Any) -> None:
    w = a_world("fake")
    s = w.stream()
    buf = fanin.InputBuffer(6, stream=s, budget=0, name="grads")
    floats = [rows(w, np.full((4, 8), k + 1, np.float32)) for k in range(2)]
    doubles = [rows(w, np.full((2, 8), k + 1, np.float64)) for k in range(2)]
    buf.add_many(range(6), floats[0] + doubles[0], stream=s)
    w.driver.fail(1, REJECTED, call="LaunchKernel")  # that of the doubles
    with pytest.raises(fanin.DeviceError, match=r"cuLaunchKernel\(2 slots: sum grads\[4\], sum grads\[5\]\)"):
        buf.add_many(range(6), floats[1] + doubles[1], stream=s)
    w.driver.fail(-1, 0)
    for slot in range(6):
        buf.expect(slot, 2)
        if slot < 4:
            assert buf.ready(slot)
        else:
            with pytest.raises(
                RuntimeError, match=rf"grads: slot {slot}: poisoned until clear\(\): .*2 slots: sum grads\[4\]"
            ):
                buf.ready(slot)
    buf.clear()
    for k in range(2):
        buf.add_many(range(6), floats[k] + doubles[k], stream=s)
    assert [read(x, s).tolist() for x in buf.take()] == [[3.0] * 8] * 6


@pytest.mark.parametrize("call", ["MemAllocFromPoolAsync", "MemcpyHtoDAsync"])
def test_memory_that_is_short_for_the_table_costs_launches_and_no_sum(a_world: Any, call: str) -> None:
    w = a_world("fake")
    s = w.stream()
    parts = [rows(w, np.full((5, 8), k + 1, np.float32)) for k in range(3)]
    buf = fanin.InputBuffer(5, stream=s, budget=0)
    buf.add_many(range(5), parts[0], stream=s)
    buf.add_many(range(5), parts[1], stream=s)
    w.driver.fail(0, NO_MEMORY, call=call)
    launches = w.launches(lambda: buf.add_many(range(5), parts[2], stream=s))
    assert launches == (1 if call == "MemAllocFromPoolAsync" else 5)  # trims the pool, and tries again
    assert [read(x, s).tolist() for x in buf.take()] == [[6.0] * 8] * 5


def test_without_stream_ordered_memory_sums_go_one_by_one(a_world: Any) -> None:
    w = a_world("fake")
    w.driver.set(pools=False)
    s = w.stream()
    parts = [rows(w, np.full((5, 8), k + 1, np.float32)) for k in range(2)]
    buf = fanin.InputBuffer(5, stream=s)
    for part in parts:
        buf.add_many(range(5), part, stream=s)
    sums: list[Any] = []
    assert w.launches(lambda: sums.extend(buf.take())) == 5
    assert [read(x, s).tolist() for x in sums] == [[3.0] * 8] * 5


def one_pass(w: Any, fail: Callable[[], None], heal: Callable[[], None]) -> tuple[bool, int]:
    """Batches of two dtypes from two streams, folded as they come, and a take of sums that waited for it: one call of
    the device fails. Whether that showed, and how many slots were poisoned.
    """
    n, (p, q, c) = 4, (w.stream() for _ in range(3))
    parts = [[w.array(np.full(4, 2.0**k, np.float32 if i % 2 else np.float64)) for i in range(n)] for k in range(3)]
    bufs = [fanin.InputBuffer(n, stream=c, budget=budget, name="grads") for budget in (0, None)]
    fail()
    try:
        for k, s in enumerate((p, q, p)):
            for b in bufs[: 2 if k else 1]:
                b.add_many(range(n), parts[k], stream=s)
        sums = [b.take() for b in bufs]
        heal()
        assert [[read(x, c).tolist() for x in y] for y in sums] == [[[7.0] * 4] * n, [[6.0] * 4] * n]
        return False, 0
    except fanin.DeviceError as e:
        heal()
        assert "cu" in str(e) or w.kind == "sim", e
    poisoned = 0
    for b in bufs:
        for slot in range(n):
            try:
                left = b[slot]  # all or nothing of what a batch brought
                assert left is None or read(left, c).tolist() in ([[x] * 4 for x in (1.0, 3.0, 7.0, 2.0, 6.0)])
            except RuntimeError as e:
                assert "poisoned until clear" in str(e)
                poisoned += 1
        b.clear()
        for k in (0, 2):
            b.add_many(range(n), parts[k], stream=q)
        assert [read(x, c).tolist() for x in b.take()] == [[5.0] * 4] * n
    return True, poisoned


@pytest.mark.parametrize("code", [REJECTED, NO_MEMORY], ids=["rejected", "no memory"])
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])
def test_every_driver_call_of_a_batch_failed_once_leaks_nothing_and_clear_makes_good(code: int, step: int) -> None:
    shown = poisonings = tried = 0
    with world("fake") as w:
        one_pass(w, lambda: None, lambda: None)
        before = w.driver.calls()
        one_pass(w, lambda: None, lambda: None)
        calls = w.driver.calls() - before
    for at in range(code % step, calls, step):
        with world("fake", seed=at) as w:
            w.forgive("memory", "events")
            failed, poisoned = one_pass(w, lambda: w.driver.fail(at, code), lambda: w.driver.fail(-1, 0))  # noqa: B023
            shown += failed
            poisonings += poisoned
            tried += 1
    print(f"{calls} calls, {tried} failed once each, {shown} showed, {poisonings} slots poisoned")
    assert shown * step > 50 and (poisonings * step > 50 or code == NO_MEMORY)


@pytest.mark.parametrize("memory", [False, True], ids=["failed", "no memory"])
def test_every_call_of_the_simulated_device_failed_once_poisons_or_changes_nothing(memory: bool) -> None:
    shown = poisonings = tried = 0
    quiet = 0
    while quiet < 40:
        with world("sim", seed=tried) as w:
            failed, poisoned = one_pass(
                w,
                lambda m=w.machine, n=tried: hooks.fail_call(m, n, memory),
                lambda m=w.machine: hooks.fail_call(m, -1),
            )
        tried += 1
        shown += failed
        poisonings += poisoned
        quiet = 0 if failed else quiet + 1
    print(f"{tried} failed once each, {shown} showed, {poisonings} slots poisoned")
    assert shown > 10 and (memory or poisonings > shown)


def test_memory_of_the_host_that_is_short_fails_nothing_or_leaves_the_slots_as_they_were(a_world: Any) -> None:
    failed = 0
    w = a_world("fake")
    s = w.stream()
    parts = [rows(w, np.full((4, 8), 2.0**k, np.float32)) for k in range(3)]
    for at in range(300):
        buf = fanin.InputBuffer(4, stream=s, budget=0)
        buf.add_many(range(4), parts[0], stream=s)
        wanted = [5.0]
        hooks.fail_at(at)
        try:
            buf.add_many(range(4), parts[2], stream=s)
        except MemoryError:
            wanted = [1.0]
            failed += 1
        finally:
            hooks.fail_at(-1)
        assert [read(x, s).tolist() for x in buf.take()] == [wanted * 8] * 4, at
    assert failed > 4


# Memory


def test_rounds_of_a_batch_take_no_more_memory(a_world: Any) -> None:
    w = a_world("fake")
    s = w.stream()
    part = rows(w, np.ones((64, 8), np.float32))
    buf = fanin.InputBuffer(64, stream=s, budget=0)
    held = []
    for _ in range(12):
        buf.add_many(range(64), part, stream=s)
        w.synchronize()
        held.append((hooks.memory()[0], w.driver.live("memory"), w.driver.live("events")))
    assert len(set(held[4:])) == 1, held


def test_a_take_that_needs_memory_first_frees_unused_pooled_memory(a_world: Any) -> None:
    w = a_world("fake")
    s, t = w.stream(), w.stream()
    buf = fanin.InputBuffer(1, stream=s)
    held = [w.array(np.ones(4)) for _ in range(2)]
    buf.add_many([0, 0], held, stream=s)
    x = w.array(np.zeros(4))
    w.delay(t)
    w.fill(t, x, 1.0)
    del x  # while a stream that is not its own is at work on it
    w.synchronize()
    before = w.driver.live("memory")
    (total,) = buf.take()
    assert w.driver.live("memory") == before, "the sum's, and no longer x's"
    assert read(total, s).tolist() == [2.0] * 4


# Planted faults

BATCH = {
    "late": "BATCH_LATE",
    "late at take": "BATCH_LATE",
    "late into out": "BATCH_LATE",
    "dependent": "BATCH_DEPENDENT",
    "not exclusive": "BATCH_NOT_EXCLUSIVE",
    "failure ignored": "BATCH_FAILURE_IGNORED",
}


def late(w: Any, budget: int | None = 0, out: bool = False) -> None:
    """Results are waited for by their events alone."""
    c, p, other = w.stream(1), w.stream(), w.stream()
    buf = fanin.InputBuffer(3, stream=c, budget=budget)  # case B: A is the producer's
    for k in range(2):
        buf.add_many(range(3), rows(w, np.full((3, 4), 2.0**k)), stream=p)
    into = rows(w, np.zeros((3, 4))) if out else None
    for x in buf.take(stream=other, out=into):
        w.launch(other, lambda v: None, reads=[x])


def not_exclusive(w: Any) -> None:
    """Slot 1's memory is read on slot 0's stream, by a sum that waits."""
    a, b = w.stream(), w.stream()
    buf = fanin.InputBuffer(2, budget=0)
    mine = w.array(np.ones(4))
    with fanin.stream(a):
        buf.add(0, mine, stream=a)
    with fanin.stream(b):
        buf.add(1, mine, stream=b, donate=True)
    with fanin.stream(a):
        buf.add_many([0, 1], [w.array(np.ones(4)), w.array(np.ones(4))], stream=a)


def dependent(w: Any) -> None:
    s = w.stream()
    for seed in range(8):
        x, fives = w.array(np.full(4, 1.0)), rows(w, np.full((2, 4), 5.0))
        buf = fanin.InputBuffer(2, stream=s, budget=0)
        buf.add(1, x, stream=s)
        buf.add(0, x, stream=s, donate=True)
        buf.add_many(range(2), fives, stream=s)
        assert [read(v, s).tolist() for v in buf.take()] == [[6.0] * 4, [11.0] * 4], seed


def failure_ignored(w: Any) -> None:
    s = w.stream()
    buf = fanin.InputBuffer(2, stream=s, budget=0)
    buf.add_many(range(2), rows(w, np.ones((2, 4))), stream=s)
    part = rows(w, np.ones((2, 4)))
    w.driver.fail(0, REJECTED, call="LaunchKernel")
    with pytest.raises(fanin.DeviceError):
        buf.add_many(range(2), part, stream=s)
    with pytest.raises(RuntimeError, match="poisoned"):
        buf.add(0, part[0])


EXERCISES: dict[str, Callable[[Any], None]] = {
    "late": late,
    "late at take": lambda w: late(w, None),
    "late into out": lambda w: late(w, None, True),
    "not exclusive": not_exclusive,
    "dependent": dependent,
    "failure ignored": failure_ignored,
}


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in BATCH for k in ("sim", "fake") if (n, k) != ("failure ignored", "sim")]
)
def test_a_planted_fault_of_batches_is_found(name: str, kind: str, planted: bool) -> None:
    found = ""
    hooks.fault(BATCH[name] if planted else None)
    try:
        with world(kind, seed=1) as w:
            EXERCISES[name](w)
    except (AssertionError, fanin.RaceError, pytest.fail.Exception) as e:
        found = type(e).__name__
    finally:
        hooks.fault(None)
    print(found)
    assert bool(found) == planted


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
def test_a_table_that_is_freed_before_its_launch_is_found(planted: bool) -> None:
    hooks.fault("CUDA_EARLY_TABLE" if planted else None)
    try:
        with use_driver(FakeDriver(1)) as driver:
            assert driver
            s = driver.stream()
            buf = fanin.InputBuffer(3, stream=s)
            found = ""
            try:
                for _ in range(2):
                    buf.add_many(range(3), rows(driver, np.ones((3, 4))), stream=s)
                sums = buf.take()
                assert [read(x, s).tolist() for x in sums] == [[2.0] * 4] * 3
                driver.synchronize()
            except fanin.DeviceError as e:
                found = str(e)
            found += driver.race
    finally:
        hooks.fault(None)
    print(found)
    assert bool(found) == planted


@pytest.mark.parametrize("n", [1, 4, 5, 499, 500, 501, 1000])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_slot_beyond_the_last_is_refused_however_many_there_are(n: int, kept: bool, keyed: bool) -> None:
    """len(buf) is the first that is not there; with sums that are kept the batch goes straight into them."""
    buf = fanin.InputBuffer(n, budget=0 if kept else math.inf, name="w")
    passes = 3 if kept else 0
    for k in range(passes):
        buf.add_many(range(n), [np.ones(2)] * n, keys=[k] * n if keyed else None)
    for slots in ([*range(n), n], [n], [*range(n - 1), n]):
        keys = [passes] * len(slots) if keyed else None
        with pytest.raises(IndexError, match=f"w: .*from 0 to {n - 1}.* got {n}"):
            buf.add_many(slots, [np.ones(2)] * len(slots), keys=keys)
    assert all(x is None if not passes else x.tolist() == [passes] * 2 for x in buf.take())


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "stats"), [("float32", True), ("float16", False), ("float16", True)])
def test_a_slot_repeated_in_a_batch_is_summed_whenever_its_budget_is_exceeded(dtype: str, stats: bool) -> None:
    """The fast path's list may be empty when the next checks the budget: the sum before made items of it."""
    buf = fanin.InputBuffer(1, stats=stats)
    buf.add_many([0] * 400, [np.ones(200_000, dtype) for _ in range(400)])
    (total,) = buf.take()
    assert (total == 400).all()


def test_a_batch_that_is_refused_beside_another_thread_takes_its_gradients_back_in_every_order() -> None:
    """Unlocking a lock that is not held ends the run."""

    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot((3,), "float64")])

        def refused() -> None:
            with pytest.raises(ValueError, match=r"slot 1.*\(2,\)"):
                buf.add_many([0, 1], [np.full(2, 5.0)] * 2)

        m.spawn(refused)
        m.spawn(buf.add, 0, np.full(2, 1.0))
        m.join()
        return buf.take()[0]

    report = explore(scenario)
    assert report.ok, report.errors
    assert report.runs > 1 and [x.tolist() for x in report.results] == [[1.0, 1.0]]


# Waits for the producer


@pytest.mark.rule("S12")
@pytest.mark.parametrize("converted", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("budget", [0, math.inf])
def test_a_sum_waits_for_the_one_producer_of_a_batch(w: Any, converted: int | None, budget: float) -> None:
    """Several gradients of one call share an event: the sum waits for it once, even if it omits other waits. A
    kernel of the producer's writes them, so a sum that does not wait races.
    """
    consumer, producer = w.stream(), w.stream()
    for keys in itertools.permutations(range(4)):
        given = [w.empty((2, 3) if i == converted else (1, 3), np.float32) for i in range(4)]
        w.launch(producer, lambda *all_: [x.fill(1) for x in all_] and None, writes=given)
        buf = fanin.InputBuffer([fanin.Slot(shape=(1, 3))], stream=consumer, budget=budget)
        buf.add_many([0] * 4, given, keys=keys, stream=producer)
        with fanin.stream(consumer):
            (got,) = buf.take()
        assert read(got, consumer).tolist() == [[4.0 + (converted is not None)] * 3]
