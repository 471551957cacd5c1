"""Streams captured into a graph: what is legal, with CUDA's codes, on the simulated device and on the CUDA backend over
the fake driver; and the buffer under capture (K1-K4, S7).
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda.driver import DriverError
from fanin.sim import Machine
from kit import hooks

pytestmark = pytest.mark.core


def code_of(error: BaseException) -> int:
    """CUDA's code in the text of an error."""
    if isinstance(error, DriverError):
        return error.code
    found = re.search(r"code (\d+)\)", str(error))
    return int(found[1]) if found else 0


def refused(code: int, act: Callable[[], Any]) -> None:
    with pytest.raises((fanin.CaptureError, DriverError)) as caught:
        act()
    assert code_of(caught.value) == code, caught.value


def bump(w: Any, s: Any, x: Any, n: float) -> None:
    """x += n on s."""
    w.launch(s, lambda v: np.add(v, n, out=v), writes=[x], name="bump")


def ended(w: Any, s: Any) -> None:
    """The end of a capture in which a wait was refused: fanin refuses it before any call of the device, the driver
    breaks the capture.
    """
    if w.kind == "sim":
        w.end_capture(s)
    else:
        refused(901, lambda: w.end_capture(s))


def fork(w: Any, s: Any, t: Any) -> None:
    e = w.event()
    w.record(e, s)
    w.wait(t, e)


# What makes a capture legal: each rule kept once, and broken once


def test_captured_work_runs_at_each_launch_of_the_graph(w: Any) -> None:
    s, x = w.stream(), w.array(np.zeros(4))
    w.begin_capture(s)
    bump(w, s, x, 1)
    assert w.state(s) == 1
    graph = w.end_capture(s)
    w.synchronize()
    with fanin.stream(s):
        assert x.numpy().tolist() == [0] * 4
        for _ in range(3):
            w.launch_graph(graph, s)
        bump(w, s, x, 10)
        assert x.numpy().tolist() == [13] * 4
    assert w.state(s) == 0 and w.races == 0


def test_the_legacy_stream_is_not_captured_and_no_stream_twice(w: Any) -> None:
    s = w.stream()
    refused(900, lambda: w.begin_capture(w.legacy()))
    w.begin_capture(s)
    refused(1, lambda: w.begin_capture(s))
    w.end_capture(s)
    refused(1, lambda: w.end_capture(s))


def test_a_capture_ends_where_it_began(w: Any) -> None:
    s, t = w.stream(), w.stream()
    w.begin_capture(s)
    fork(w, s, t)
    refused(903, lambda: w.end_capture(t))
    refused(901, lambda: w.end_capture(s))
    w.begin_capture(s)  # a new one is in order
    fork(w, s, t)
    fork(w, t, s)
    w.end_capture(s)


@pytest.mark.parametrize("mode", ["global", "thread-local", "relaxed"])
def test_a_capture_ends_on_its_own_thread_unless_it_is_relaxed(w: Any, mode: str) -> None:
    s = w.stream()
    w.begin_capture(s, mode)
    failed: list[BaseException] = []

    def end() -> None:
        try:
            w.end_capture(s)
        except Exception as e:
            failed.append(e)

    other = threading.Thread(target=end)
    other.start()
    other.join()
    if mode == "relaxed":
        assert not failed
    else:
        assert code_of(failed[0]) == 908
        w.end_capture(s)


def test_a_forked_stream_is_captured_and_runs_beside_the_first_in_the_graph(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x, y = w.array(np.zeros(4)), w.array(np.zeros(4))
    w.begin_capture(s)
    fork(w, s, t)
    assert w.state(t) == 1
    bump(w, s, x, 1)
    bump(w, t, y, 2)
    fork(w, t, s)
    w.launch(s, lambda a, b: np.add(a, b, out=b), reads=[x], writes=[y])
    graph = w.end_capture(s)
    w.launch_graph(graph, s)
    w.synchronize()
    with fanin.stream(s):
        assert y.numpy().tolist() == [3] * 4
    assert w.races == 0


def test_unordered_work_in_a_graph_is_a_race_when_it_is_launched(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    w.begin_capture(s)
    fork(w, s, t)
    bump(w, s, x, 1)
    bump(w, t, x, 2)
    fork(w, t, s)
    graph = w.end_capture(s)
    assert w.races == 0
    w.races_are_planted()
    try:
        w.launch_graph(graph, s)
    except fanin.RaceError:
        assert w.kind == "sim"
    assert w.races > 0


def test_a_fork_that_is_not_joined_is_found_at_the_end(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    w.begin_capture(s)
    fork(w, s, t)
    bump(w, t, x, 1)
    refused(904, lambda: w.end_capture(s))
    assert (w.state(s), w.state(t)) == (0, 0)


def test_a_join_through_a_third_stream_counts(w: Any) -> None:
    s, t, u = (w.stream() for _ in range(3))
    x = w.array(np.zeros(4))
    w.begin_capture(s)
    fork(w, s, t)
    bump(w, t, x, 1)
    fork(w, t, u)
    fork(w, u, s)
    w.end_capture(s)


def test_a_launch_that_races_with_other_work_raises() -> None:
    with Machine() as m:
        s, t, x = m.stream(), m.stream(), m.array(np.zeros(4))
        m.begin_capture(s)
        m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x], name="captured")
        m.launch(s, lambda: None, name="behind it")
        graph = m.end_capture(s)
        m.launch(t, lambda v: np.add(v, 1, out=v), writes=[x], name="other")
        with pytest.raises(fanin.RaceError, match=r"'captured'.*writes what 'other'.*wrote: nothing orders them"):
            m.launch_graph(graph, s)
        assert m.races == 1


@pytest.mark.parametrize("ask", ["query", "sync_event"])
def test_a_captured_event_has_no_time(w: Any, ask: str) -> None:
    s = w.stream()
    e = w.event()
    w.record(e, s)
    w.sync_event(e)
    w.query(e)  # outside it has
    w.begin_capture(s)
    w.record(e, s)
    refused(907, lambda: getattr(w, ask)(e))
    refused(901, lambda: w.end_capture(s))
    refused(907, lambda: getattr(w, ask)(e))  # nor after the end
    w.record(e, s)
    w.sync_event(e)


def test_a_captured_stream_does_not_wait_for_work_outside(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    e = w.event()
    bump(w, t, x, 1)
    w.record(e, t)
    w.wait(s, e)  # before the capture: legal
    w.begin_capture(s)
    w.record(e, t)
    refused(905, lambda: w.wait(s, e))
    ended(w, s)


def test_two_captures_do_not_become_one(w: Any) -> None:
    s, t = w.stream(), w.stream()
    e = w.event()
    w.begin_capture(s)
    w.begin_capture(t)
    w.record(e, s)
    refused(902, lambda: w.wait(t, e))
    ended(w, s)
    ended(w, t)


def test_an_event_of_a_capture_is_waited_for_inside_it_alone(w: Any) -> None:
    s, t = w.stream(), w.stream()
    e = w.event()
    w.begin_capture(s)
    w.record(e, s)
    w.wait(s, e)
    w.end_capture(s)
    refused(907, lambda: w.wait(t, e))


@pytest.mark.parametrize("ask", ["sync", "device_sync"])
def test_a_captured_stream_is_not_synchronized(w: Any, ask: str) -> None:
    s, t = w.stream(), w.stream()
    w.begin_capture(s)
    w.sync(t)  # another stream may be
    refused(900, lambda: w.sync(s) if ask == "sync" else w.device_sync())
    refused(901, lambda: w.end_capture(s))


def test_the_legacy_stream_rests_while_a_blocking_stream_is_captured(w: Any) -> None:
    x = w.array(np.zeros(4))
    s, b = w.stream(), w.stream(blocking=True)
    w.begin_capture(s)
    bump(w, w.legacy(), x, 1)  # s is no blocking stream
    w.end_capture(s)
    w.begin_capture(b)
    refused(906, lambda: bump(w, w.legacy(), x, 1))
    refused(901, lambda: w.end_capture(b))


def test_the_legacy_stream_is_not_pulled_into_a_capture(w: Any) -> None:
    s = w.stream()
    e = w.event()
    w.begin_capture(s)
    w.record(e, s)
    refused(906, lambda: w.wait(w.legacy(), e))
    ended(w, s)


def test_a_broken_capture_refuses_everything_until_its_end(w: Any) -> None:
    s, t, u = w.stream(), w.stream(), w.stream()
    w.begin_capture(u)
    graph = w.end_capture(u)
    x = w.array(np.zeros(4))
    e = w.event()
    w.begin_capture(s)
    fork(w, s, t)
    w.record(e, t)
    refused(900, lambda: w.sync(s))
    assert (w.state(s), w.state(t)) == (2, 2)
    acts = {
        "work": lambda: bump(w, t, x, 1),
        "record": lambda: w.record(e, s),
        "wait": lambda: w.wait(s, e),
        "pull another in": lambda: w.wait(u, e),
        "query": lambda: w.query(e),
        "synchronize an event": lambda: w.sync_event(e),
        "synchronize a stream": lambda: w.sync(s),
        "synchronize a stream that was pulled in": lambda: w.sync(t),
        "synchronize the device": w.device_sync,
        "launch a graph": lambda: w.launch_graph(graph, s),
        "begin": lambda: w.begin_capture(s),
        "end elsewhere": lambda: w.end_capture(t),
        "an unsafe call": w.unsafe,
    }
    for act in acts.values():
        refused(901, act)
        assert (w.state(s), w.state(t)) == (2, 2)
    refused(901, lambda: w.end_capture(s))
    bump(w, t, x, 1)
    w.synchronize()


def test_the_legacy_stream_beside_a_broken_capture_is_refused_as_the_capture_is(w: Any) -> None:
    b, x = w.stream(blocking=True), w.array(np.zeros(4))
    w.begin_capture(b)
    refused(906, lambda: bump(w, w.legacy(), x, 1))
    refused(901, lambda: bump(w, w.legacy(), x, 1))
    refused(901, lambda: w.end_capture(b))
    bump(w, w.legacy(), x, 1)
    w.synchronize()


def test_an_empty_capture_is_legal(w: Any) -> None:
    s = w.stream()
    w.begin_capture(s)
    w.launch_graph(w.end_capture(s), s)
    w.synchronize()


def from_thread(act: Callable[[], Any]) -> BaseException | None:
    """What it raised there; a skip is one of the test."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except (Exception, pytest.skip.Exception) as e:
            failed.append(e)

    other = threading.Thread(target=run)
    other.start()
    other.join()
    if failed and isinstance(failed[0], pytest.skip.Exception):
        raise failed[0]
    return failed[0] if failed else None


@pytest.mark.parametrize(("mode", "here", "there"), [("global", 900, 900), ("thread-local", 900, 0), ("relaxed", 0, 0)])
def test_unsafe_calls_are_forbidden_by_the_mode_of_the_capture(w: Any, mode: str, here: int, there: int) -> None:
    for where, code in ((False, here), (True, there)):
        s = w.stream()
        w.begin_capture(s, mode)
        if where:
            error = from_thread(w.unsafe)
            assert (code_of(error) if error else 0) == code
        elif code:
            refused(code, w.unsafe)
        else:
            w.unsafe()
        if code:
            refused(901, lambda s=s: w.end_capture(s))
        else:
            w.end_capture(s)


# The buffer under capture


def captured_pass(w: Any, c: Any, p: Any, q: Any, g: list[Any], **how: Any) -> Any:
    """Two producers that were forked from c, and the sum on c; nothing but the buffer joins them."""
    buf = fanin.InputBuffer(1, stream=c, **how)
    bump(w, p, g[0], 1)
    buf.add(0, g[0], stream=p)
    bump(w, q, g[1], 2)
    buf.add(0, g[1], stream=q)
    buf.add(0, g[2], stream=c)
    return buf.take()[0]


@pytest.mark.rule("K1", "K4", "S7")
@pytest.mark.parametrize("budget", [0, None])
def test_adding_and_taking_are_captured_and_replayed(w: Any, budget: Any) -> None:
    c, p, q = (w.stream() for _ in range(3))
    g = [w.array(np.full(8, v, "f4")) for v in (1, 10, 100)]
    w.begin_capture(c)
    fork(w, c, p)
    fork(w, c, q)
    total = captured_pass(w, c, p, q, g, budget=budget)
    graph = w.end_capture(c)  # p and q were joined by the buffer's own waits
    seen = []
    for _ in range(3):
        w.launch_graph(graph, c)
        with fanin.stream(c):
            seen.append(total.numpy().tolist()[0])
    assert seen == [2 + 12 + 100, 3 + 14 + 100, 4 + 16 + 100]
    assert w.races == 0


@pytest.mark.rule("K2")
def test_nothing_is_queried_or_waited_for_while_it_is_captured(a_world: Any) -> None:
    world = a_world("fake")
    d = world.driver
    c, p, q = (d.stream() for _ in range(3))
    g = [d.array(np.full(8, v)) for v in (1, 10, 100)]
    for _ in range(3):  # memory that leaves, to be polled
        left = d.array(np.ones(4))
        bump(d, p, left, 1)
        del left
    d.begin_capture(c)
    fork(world, c, p)
    fork(world, c, q)
    names = (
        "EventQuery",
        "EventSynchronize",
        "StreamSynchronize",
        "CtxSynchronize",
        "ModuleLoadData",
        "MemFree",
        "MemFreeAsync",
    )
    before = {name: d.calls(name) for name in names}
    total = captured_pass(world, c, p, q, g, budget=0)
    assert {name: d.calls(name) for name in before} == before
    graph = d.end_capture(c)
    d.launch_graph(graph, c)
    with fanin.stream(c):
        assert total.numpy().tolist() == [114] * 8
    d.synchronize()
    assert d.races == 0, d.race


@pytest.mark.rule("K3")
def test_memory_dropped_during_a_capture_lives_as_long_as_its_graph(a_world: Any) -> None:
    world = a_world("fake")
    d = world.driver
    c, p, q = (d.stream() for _ in range(3))
    g = [d.array(np.full(8, v)) for v in (1, 10, 100)]
    d.begin_capture(c)
    fork(world, c, p)
    fork(world, c, q)
    total = captured_pass(world, c, p, q, g, budget=0)
    graph = d.end_capture(c)
    held = d.live()
    del total, g
    gc.collect()
    other = [d.array(np.full(8, 7.0)) for _ in range(4)]  # freed memory would be reused
    assert d.live() == held + 4
    d.launch_graph(graph, c)
    d.synchronize()
    for x in other:
        with fanin.stream(c):
            assert x.numpy().tolist() == [7] * 8
    assert d.races == 0, d.race
    d.destroy_graph(graph)
    del other, x
    last = d.array(np.zeros(2))  # reaps
    fanin.trim()
    assert d.live() == 1
    del last
    gc.collect()


@pytest.mark.rule("K3")
@pytest.mark.parametrize("call", ["UserObjectCreate", "GraphRetainUserObject"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_memory_whose_registration_with_a_graph_failed_is_registered_again(a_world: Any, at: int, call: str) -> None:
    """The result's, the first gradient's or the second's: the take fails, and the next one in the same capture
    registers all its memory with the graph.
    """
    driver = a_world("fake", 1).driver
    c = driver.stream()
    g = [driver.array(np.full(8, v)) for v in (1, 10)]
    driver.begin_capture(c)
    buf = fanin.InputBuffer(1, stream=c)
    for x in g:
        buf.add(0, x, stream=c)
    driver.fail(at, 2, call=call)
    with pytest.raises(fanin.DeviceOutOfMemoryError, match=call):
        buf.take()
    total = buf.take()[0]
    graph = driver.end_capture(c)
    held = driver.live()
    del g, x
    gc.collect()
    others = [driver.array(np.full(8, 7.0)) for _ in range(4)]  # freed memory would be reused
    assert driver.live() == held + 4
    driver.launch_graph(graph, c)
    with fanin.stream(c):
        assert total.numpy().tolist() == [11] * 8
    driver.synchronize()
    assert driver.races == 0, driver.race
    driver.destroy_graph(graph)
    del others, total
    gc.collect()


@pytest.mark.rule("S7")
def test_a_wait_across_the_captures_edge_is_refused_before_any_driver_call(w: Any) -> None:
    c, p, free = (w.stream() for _ in range(3))
    g = w.array(np.ones(4))
    w.begin_capture(c)
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, g, stream=c)
    buf.add(0, g, stream=free)  # recorded outside
    with pytest.raises(
        fanin.CaptureError,
        match=r"stream \d+ of \w+:0 is captured and cannot wait for stream \d+ of \w+:0, which is in none",
    ):
        buf.take()
    assert w.state(c) == 1  # and the capture continues
    bump(w, c, g, 1)
    w.end_capture(c)
    with pytest.raises(RuntimeError, match="poisoned until clear"):
        buf.take()
    buf.clear()
    buf.add(0, g, stream=p)
    buf.take()


@pytest.mark.rule("S7")
def test_the_error_for_a_legacy_consumer_of_captured_work_names_the_remedy(w: Any) -> None:
    p = w.stream()
    g = w.array(np.ones(4))
    w.begin_capture(p)
    buf = fanin.InputBuffer(1, stream=w.legacy())
    buf.add(0, g, stream=p)
    with pytest.raises(
        fanin.CaptureError, match=r"legacy default stream.*cannot be pulled into the capture.*pass it as stream="
    ):
        buf.take()
    assert w.state(p) == 1
    w.end_capture(p)


@pytest.mark.rule("S7")
def test_a_free_consumer_is_forked_into_the_capture(w: Any) -> None:
    c, p = w.stream(), w.stream()
    g = w.array(np.ones(4))
    w.begin_capture(p)
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, g, stream=p)
    buf.take()
    assert w.state(c) == 1
    fork(w, c, p)
    w.end_capture(p)


def test_a_call_that_needs_the_host_is_refused_and_the_capture_continues(a_world: Any) -> None:
    world = a_world("fake")
    d = world.driver
    s = d.stream()
    g = d.array(np.ones(4))
    d.begin_capture(s)
    for act in (
        lambda: s.synchronize(),
        lambda: fanin.Event("cuda:0").record(s) or g[:2].numpy(),
    ):
        with fanin.stream(s), pytest.raises(fanin.CaptureError, match="captured"):
            act()
    e = s.record()
    for ask in (e.query, e.synchronize):
        with pytest.raises(fanin.CaptureError, match="it has no time"):
            ask()
    assert world.state(s) == 1
    d.end_capture(s)


def test_a_capture_that_another_thread_breaks_is_an_error_and_the_next_one_works(a_world: Any) -> None:
    world = a_world("fake")
    d = world.driver
    s = d.stream()
    g = d.array(np.ones(4))
    d.begin_capture(s)
    assert code_of(from_thread(world.unsafe) or RuntimeError()) == 900
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, g, stream=s)
    buf.add(0, g, stream=s)
    with pytest.raises(fanin.CaptureError, match="an earlier violation has ended this capture"):
        buf.take()
    with pytest.raises(DriverError, match="901"):
        d.end_capture(s)
    buf.clear()
    buf.add(0, g, stream=s)
    buf.add(0, g, stream=s)
    with fanin.stream(s):
        assert buf.take()[0].numpy().tolist() == [2] * 4


def test_memory_of_a_simulated_graph_is_kept_as_well() -> None:
    with Machine(1) as m:
        s = m.stream()
        x = m.array(np.zeros(4))
        y = m.array(np.zeros(4))
        m.begin_capture(s)
        m.launch(s, lambda x, y: np.add(x, 1, out=y), reads=[x], writes=[y])
        graph = m.end_capture(s)
        del x
        others = [m.array(np.full(4, 9.0)) for _ in range(3)]
        m.launch_graph(graph, s)
        s.synchronize()
        with fanin.stream(s):
            assert y.numpy().tolist() == [1] * 4
        del graph, others
        m.synchronize()
        assert m.races == 0


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_memory_of_a_graph_that_is_freed_too_early_is_found(a_world: Any) -> None:
    world = a_world("fake")
    d = world.driver
    c = d.stream()
    g = [d.array(np.full(8, v)) for v in (1, 10)]
    d.begin_capture(c)
    buf = fanin.InputBuffer(1, stream=c)
    for x in g:
        buf.add(0, x, stream=c)
    total = buf.take()[0]
    graph = d.end_capture(c)
    hooks.fault("CUDA_CAPTURED_FREE")
    try:
        del total, g, x
        gc.collect()
    finally:
        hooks.fault(None)
    world.races_are_planted()
    d.launch_graph(graph, c)
    try:
        d.synchronize()
    except DriverError:
        pass
    assert d.races > 0


@pytest.mark.parametrize("schedule", ["seeded", "fifo", "lifo", "starve", "round robin"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_graph_of_the_buffers_sums_keeps_its_memory_until_it_has_run(schedule: str, seed: int) -> None:
    with Machine(1, seed, schedule=schedule) as m:
        s, o = m.stream(), m.empty(4)
        buf = fanin.InputBuffer(1)
        grads = [m.array(np.full(4, 1.0)), m.array(np.full(4, 2.0))]
        m.begin_capture(s)
        with fanin.stream(s):
            for g in grads:
                buf.add(0, g)
            buf.take(out=[o])
        graph = m.end_capture(s)
        del g, grads, buf
        m.synchronize()
        m.launch_graph(graph, s)
        del graph
        others = [m.array(np.full(4, 100.0 * i)) for i in range(4)]  # what is free is used again at once
        with fanin.stream(s):
            assert o.numpy().tolist() == [3, 3, 3, 3]
        del others


def test_memory_of_a_graph_outlives_the_work_before_its_launch() -> None:
    with Machine(1) as m:
        s, t = m.stream(), m.stream()
        with fanin.stream(s):
            buf = fanin.InputBuffer(1)
            for _ in range(2):
                buf.add(0, m.array(np.ones(4)))
            (x,) = buf.take()
        t.wait(s)
        m.synchronize()
        m.begin_capture(s)
        m.launch(s, lambda half: None, reads=[x[:2]])
        graph = m.end_capture(s)
        m.launch(t, lambda x: None, reads=[x])  # which no stream marks
        m.launch_graph(graph, t)
        del x
        assert m.races == 0
        del graph


def test_memory_of_a_graph_is_still_a_race_for_streams_that_did_not_mark_it() -> None:
    with (
        pytest.raises(
            fanin.RaceError, match=r"memory is freed .* while 'other'.*missing: mark as used on stream 3 of sim:0"
        ),
        Machine(1) as m,
    ):
        s, t = m.stream(), m.stream()
        with fanin.stream(s):
            buf = fanin.InputBuffer(1)
            for _ in range(2):
                buf.add(0, m.array(np.ones(4)))
            (x,) = buf.take()
        t.wait(s)
        m.synchronize()
        m.begin_capture(s)
        m.launch(s, lambda x: None, reads=[x])
        graph = m.end_capture(s)
        m.launch(t, lambda x: None, reads=[x], name="other")
        del x
        assert m.races == 1
        del graph


@pytest.mark.core
@pytest.mark.parametrize("taker", ["legacy", "own", "consumer"])
def test_a_sum_whose_own_wait_joins_a_capture_redirects_its_taker(taker: str) -> None:
    """S7, S22: whether the taker of `out` is redirected is decided when A waits for it, not before A's other waits."""
    with fanin.set_options(capture_redirect=True), Machine() as m:
        c, p, other = m.stream(), m.stream(), m.stream()
        first, second, out = m.array(np.ones(3)), m.array(np.ones(3)), m.array(np.zeros(3))
        m.synchronize()
        buf = fanin.InputBuffer(1, stream=c)
        m.begin_capture(p)
        buf.add(0, first, stream=c)
        buf.add(0, second, stream=p)
        buf.take(slot=0, out=out, stream={"legacy": fanin.Stream("sim:0", 1), "own": other, "consumer": c}[taker])
        p.wait(c.record())
        graph = m.end_capture(p)
        m.launch_graph(graph, p)
        m.synchronize()
        assert out.numpy().tolist() == [2.0] * 3
        assert m.races == 0
