"""Litmus tests of streams, events and the buffer: one script on the fake driver, where the checker judges, and on a
GPU, where kernels that spin make what is not waited for late. Each rule has its control: the wait left out, which must
show.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks

pytestmark = pytest.mark.core

N = 1 << 12


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    return a_world(request.param, 1, seed=3)


def late(m: Any, s: Any, x: Any, value: float) -> None:
    """x is filled on s, late."""
    m.delay(s)
    m.fill(s, x, value)


def zeros(m: Any, n: int = N) -> Any:
    return m.array(np.zeros(n, "f4"))


def clean(m: Any) -> None:
    m.synchronize()
    assert m.races == 0, m.race


def shows(m: Any, seen: Any, right: float) -> None:
    """A fault that was planted: a GPU gives a wrong number, the fake driver names a race."""
    m.races_are_planted()
    m.synchronize()
    assert m.races > 0 or (m.real and not np.all(seen == right))


# Streams and events


def test_a_wait_shows_what_was_written_before_the_record(m: Any) -> None:
    s, t, x = m.stream(), m.stream(), zeros(m)
    late(m, s, x, 1)
    t.wait(s.record())
    assert np.all(m.read(t, x) == 1)
    clean(m)


@pytest.mark.outlasts
def test_without_a_wait_the_reader_is_early(m: Any) -> None:
    s, t, x = m.stream(), m.stream(), zeros(m)
    late(m, s, x, 1)
    shows(m, m.read(t, x), 1)


@pytest.mark.outlasts
def test_a_wait_for_an_event_that_was_recorded_too_early_is_too_little(m: Any) -> None:
    s, t, x = m.stream(), m.stream(), zeros(m)
    e = s.record()
    late(m, s, x, 1)
    t.wait(e)
    shows(m, m.read(t, x), 1)


def test_an_event_recorded_again_counts_for_later_waits(m: Any) -> None:
    s, t, u, x, y = m.stream(), m.stream(), m.stream(), zeros(m), zeros(m)
    e = fanin.Event("cuda:0")
    late(m, s, x, 1)
    e.record(s)
    t.wait(e)
    late(m, s, y, 2)
    e.record(s)
    u.wait(e)
    assert np.all(m.read(t, x) == 1) and np.all(m.read(u, y) == 2)
    clean(m)


@pytest.mark.outlasts
def test_an_event_recorded_again_does_not_delay_earlier_waits(m: Any) -> None:
    s, t, x, y = m.stream(), m.stream(), zeros(m), zeros(m)
    e = fanin.Event("cuda:0")
    m.fill(s, x, 1)
    e.record(s)
    t.wait(e)
    late(m, s, y, 2)
    e.record(s)
    shows(m, m.read(t, y), 2)


def test_waits_are_transitive(m: Any) -> None:
    s, t, u, x = m.stream(), m.stream(), m.stream(), zeros(m)
    late(m, s, x, 1)
    t.wait(s.record())
    m.delay(t)
    u.wait(t.record())
    assert np.all(m.read(u, x) == 1)
    clean(m)


def test_an_event_may_go_while_a_wait_for_it_is_queued(m: Any) -> None:
    s, t, x = m.stream(), m.stream(), zeros(m)
    for value in range(1, 9):
        late(m, s, x, value)
        e = s.record()
        t.wait(e)
        del e
        gc.collect()
        again = m.stream().record()  # takes the event's place
        assert np.all(m.read(t, x) == value)
        s.wait(t.record())
        del again
    clean(m)


@pytest.mark.outlasts
def test_an_event_is_done_when_its_work_has_run(m: Any) -> None:
    s, x = m.stream(), zeros(m)
    late(m, s, x, 1)
    e = s.record()
    assert not e.query()
    e.synchronize()
    assert e.query() and np.all(m.read(m.stream(), x) == 1)
    clean(m)


@pytest.mark.outlasts
@pytest.mark.parametrize("blocking", [True, False])
def test_the_legacy_stream_waits_for_blocking_streams_alone(m: Any, blocking: bool) -> None:
    s, x = m.stream(blocking=blocking), zeros(m)
    late(m, s, x, 1)
    seen = m.read(fanin.Stream("cuda:0", 1), x)
    if blocking:
        assert np.all(seen == 1)
        clean(m)
    else:
        shows(m, seen, 1)


# Memory


@pytest.mark.outlasts
@pytest.mark.parametrize("early", [False, True])
def test_dropped_memory_stays_until_its_reader_has_run(m: Any, early: bool) -> None:
    """Memory of the pool, freed in the order of a stream without a wait: if it is freed too early, the next array gets
    it while it is read. (cuMemFree waits for the device, so it shows nothing.)
    """
    if early and not hooks.DEVELOPMENT:
        pytest.skip("faults are planted in test builds alone: FANIN_DEV=1")
    p, c = m.stream(), m.stream()
    seen: list[Any] = []
    for _ in range(4):
        with fanin.stream(p):
            x = fanin.add_n([zeros(m), zeros(m)])
        m.fill(p, x, 7)
        c.wait(p.record())
        m.delay(c)
        x.record_stream(c)
        with fanin.stream(c):
            y = fanin.add_n([x, x])
        hooks.fault("CUDA_EARLY_FREE" if early else None)
        try:
            del x
            gc.collect()
            others = [zeros(m) for _ in range(2)]
            with fanin.stream(p):
                others += [fanin.add_n([z, z]) for z in others]
        finally:
            hooks.fault(None)
        for other in others:
            m.fill(p, other, -1)
        seen.append(m.read(c, y))
    if early:
        shows(m, np.concatenate(seen), 14)
    else:
        assert all(np.all(one == 14) for one in seen)
        clean(m)


# The buffer


def produced(m: Any, streams: list[Any], latest: tuple[int, ...] = ()) -> list[Any]:
    """A gradient 2**k for each stream, written late on it; those of `latest` when the others have been there
    for long.
    """
    made = [zeros(m) for _ in streams]
    for k, (s, x) in enumerate(zip(streams, made, strict=True)):
        for _ in range(4 if k in latest else 1):
            m.delay(s)
        m.fill(s, x, 2.0**k)
    return made


@pytest.mark.parametrize("budget", [0, None, float("inf")])
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_a_sum_over_streams_has_every_gradient(m: Any, n: int, budget: Any) -> None:
    streams, c = [m.stream() for _ in range(n)], m.stream()
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    for k, (s, x) in enumerate(zip(streams, produced(m, streams), strict=True)):
        buf.add(0, x, key=k, stream=s)
    del x
    [total] = buf.take()
    assert np.all(m.read(c, total) == 2.0**n - 1)
    clean(m)


@pytest.mark.outlasts
@pytest.mark.parametrize(("word", "latest"), [("S12.wait", (1, 2)), ("S13.wait", (0,))])
def test_a_wait_that_the_buffer_leaves_out_shows(m: Any, word: str, latest: tuple[int, ...]) -> None:
    streams, c = [m.stream() for _ in range(3)], m.stream()
    m.leave_out(word)
    try:
        buf = fanin.InputBuffer(1, stream=c)
        for k, (s, x) in enumerate(zip(streams, produced(m, streams, latest), strict=True)):
            buf.add(0, x, key=k, stream=s)
        [total] = buf.take()
        seen = m.read(c, total)
        shows(m, seen, 7)
    finally:
        m.leave_out()


def test_a_gradient_that_goes_through_is_waited_for_by_its_consumer(m: Any) -> None:
    p, c = m.stream(), m.stream()
    buf = fanin.InputBuffer(1, stream=c)
    [x] = produced(m, [p])
    buf.add(0, x, stream=p)
    [same] = buf.take()
    assert same is x and np.all(m.read(c, x) == 1)
    clean(m)


def test_sums_in_place_wait_for_readers_of_the_last_one(m: Any) -> None:
    p, q, c = (m.stream() for _ in range(3))
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    xs = produced(m, [p, q, p])
    for k, (s, x) in enumerate(zip((p, q, p), xs, strict=True)):
        buf.add(0, x, key=k, stream=s)
    [total] = buf.take()
    with fanin.stream(c):
        other = fanin.add_n([total, total])
    assert np.all(m.read(c, other) == 14) and np.all(m.read(c, total) == 7)
    clean(m)


def test_several_slots_taken_at_once_are_each_their_own(m: Any) -> None:
    streams, c = [m.stream() for _ in range(4)], m.stream()
    buf = fanin.InputBuffer(8, stream=c)
    for turn in range(3):
        for k, s in enumerate(streams):
            xs = [zeros(m) for _ in range(8)]
            for slot, x in enumerate(xs):
                late(m, s, x, 2.0**k * (slot + 1))
            buf.add_many(range(8), xs, keys=[k] * 8, stream=s)
            del xs, x
        made = buf.take()
        for slot, x in enumerate(made):
            assert np.all(m.read(c, x) == 15 * (slot + 1)), turn
    clean(m)


@pytest.mark.threads
def test_threads_with_streams_of_their_own_lose_nothing(m: Any) -> None:
    c, streams = m.stream(), [m.stream() for _ in range(4)]
    buf = fanin.InputBuffer(2, stream=c, budget=0)
    failed: list[BaseException] = []

    def produce(k: int) -> None:
        try:
            for turn in range(4):
                x = zeros(m, 64)
                m.fill(streams[k], x, 2.0 ** (4 * k + turn))
                buf.add(turn % 2, x, key=4 * k + turn, stream=streams[k])
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed
    for slot, x in enumerate(buf.take()):
        want = sum(2.0 ** (4 * k + turn) for k in range(4) for turn in range(slot, 4, 2))
        assert np.all(m.read(c, x) == want)
    clean(m)


# Under capture


def test_a_captured_sum_is_computed_at_each_run_of_the_graph(m: Any) -> None:
    p, q, c = (m.stream() for _ in range(3))
    xs = [m.array(np.full(N, v, "f4")) for v in (1, 10, 100)]
    m.begin_capture(c)
    for s in (p, q):
        s.wait(c.record())
    buf = fanin.InputBuffer(1, stream=c)
    for k, (s, x) in enumerate(zip((p, q, c), xs, strict=True)):
        buf.add(0, x, key=k, stream=s)
    [total] = buf.take()
    graph = m.end_capture(c)
    for turn in range(3):
        late(m, c, xs[0], turn)
        m.launch_graph(graph, c)
        assert np.all(m.read(c, total) == turn + 110)
    clean(m)
    m.destroy_graph(graph)
