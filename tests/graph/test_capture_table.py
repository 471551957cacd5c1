"""Rule S7 at every place where the buffer lets a stream wait for another (K4), row by row, and S11 under capture: one
script for the simulated device and for the CUDA backend over the fake driver.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from graph import test_capture as law
from graph.test_capture import bump, code_of
from kit import hooks
from kit.inside import inside

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def no_redirection_is_left() -> Iterator[None]:
    yield
    assert not _core.get_options()["capture_redirect"]


def fork(s: Any, t: Any) -> None:
    """t continues after the work on s, on any devices."""
    t.wait(s)


# The places. Each lets stream s wait for stream t, once, and gives what was summed there.


def adding(w: Any, s: Any, t: Any) -> Any:
    """S21: a gradient that t's device made for s's has to be cast there, on s, before anything else is in the slot."""
    buf = fanin.InputBuffer([fanin.Slot(dtype="f8")], stream=s, name="grads")
    buf.add(0, w.keep.ones, stream=t)
    return buf


def adding_more(w: Any, s: Any, t: Any) -> Any:
    """The same of a later gradient."""
    buf = fanin.InputBuffer([fanin.Slot(dtype="f8")], stream=s, name="grads")
    buf.add(0, w.keep.wide, stream=s)
    buf.add(0, w.keep.ones, stream=t)
    return buf


def folding(w: Any, s: Any, t: Any) -> Any:
    """S12: the sum of both is taken on s."""
    buf = fanin.InputBuffer(1, stream=s, budget=0, name="grads")
    buf.add(0, w.keep.ones, stream=s)
    buf.add(0, w.keep.ones, stream=t)
    return buf


def consuming(w: Any, s: Any, t: Any) -> Any:
    """S18: s takes what is ready on t."""
    buf = fanin.InputBuffer(1, stream=t, name="grads")
    buf.add(0, w.keep.ones, stream=t)
    w.keep.taken = buf.take(stream=s)
    return buf


def looking(w: Any, s: Any, t: Any) -> Any:
    """S18: the same of a snapshot."""
    buf = fanin.InputBuffer(1, stream=s, name="grads")
    buf.add(0, w.keep.ones, stream=t)
    w.keep.taken = buf[0]
    return buf


def writing(w: Any, s: Any, t: Any) -> Any:
    """S22: the taker's out= is written on t, where the sum is: t waits for s, and s for t."""
    buf = fanin.InputBuffer(1, stream=t, name="grads")
    buf.add(0, w.keep.ones, stream=t)
    buf.add(0, w.keep.ones, stream=t)
    w.keep.taken = buf.take(stream=s, out=[w.keep.out])
    return buf


def ending(w: Any, s: Any, t: Any) -> Any:
    """S20: s is the caller's."""
    hooks.pass_end(s, [t], [w.keep.ones])


#: Of each place: the call, whether s may be redirected to t there, and the stream that its message names.
PLACES: dict[str, tuple[Callable[[Any, Any, Any], Any], bool, str]] = {
    "adding": (adding, True, r"^grads: slot 0: "),
    "adding more": (adding_more, False, r"^grads: slot 0: "),
    "folding": (folding, False, r"^grads: slot 0: "),
    "consuming": (consuming, True, r"^grads: slot 0: "),
    "the end of the pass": (ending, True, r"^the end of the pass: "),
}


@contextmanager
def streams(w: Any, place: str, s_in: int, t_in: int, legacy: bool) -> Iterator[tuple[Any, Any, list[Any]]]:
    """s and t, each in no capture (0) or in capture 1 or 2; and the streams on which those began. t is another device's
    where the place is "adding".
    """
    t = w.stream(1 if place.startswith("adding") else 0)
    s = w.legacy() if legacy else w.stream()
    w.keep.ones, w.keep.wide, w.keep.out = w.array(np.ones(4, "f4")), w.array(np.ones(4)), w.array(np.zeros(4, "f4"))
    began: list[Any] = []
    for x, number in ((t, t_in), (s, s_in)):
        if number and number == t_in == s_in and began:
            fork(began[0], x)
        elif number:
            w.begin_capture(x)
            began.append(x)
    yield s, t, began
    for x in began:
        w.end_capture(x)  # whole still, and everything that was pulled in has been joined


def decided(s_in: int, t_in: int, legacy: bool, free: bool) -> str:
    """The table. free: redirection is on, and the slot is empty or s is only the consumer."""
    if s_in == t_in:
        return "go"
    if s_in:
        return "error"
    if free:
        return "redirect"
    return "error" if legacy else "fork"


ROWS = [
    *((0, 0, legacy, on) for legacy in (False, True) for on in (False, True)),
    *((1, 1, False, on) for on in (False, True)),
    *((0, 1, legacy, on) for legacy in (False, True) for on in (False, True)),
    *((1, t, False, on) for t in (0, 2) for on in (False, True)),
]


@pytest.mark.rule("S7", "K1", "K4")
@pytest.mark.parametrize(("s_in", "t_in", "legacy", "redirect"), ROWS)
@pytest.mark.parametrize("place", PLACES)
def test_every_wait_is_decided_by_the_table(
    w: Any, place: str, s_in: int, t_in: int, legacy: bool, redirect: bool
) -> None:
    act, may, named = PLACES[place]
    want = decided(s_in, t_in, legacy, redirect and may)
    assert inside().rules_capture(s_in, t_in, redirect and may, legacy) == ("go" if want == "fork" else want)
    with streams(w, place, s_in, t_in, legacy) as (s, t, _), fanin.set_options(capture_redirect=redirect):
        if want == "error":
            with pytest.raises(fanin.CaptureError, match=named) as caught:
                act(w, s, t)
            said = str(caught.value)
            assert code_of(caught.value) == (906 if not s_in else 902 if t_in else 905)
            if not s_in:  # the remedies: all of them, and only those that are left
                assert "pass it as stream=" in said and ("capture_redirect=True" in said) == (not redirect)
            assert (w.state(s), w.state(t)) == (bool(s_in), bool(t_in))
            return
        kept = act(w, s, t)
        assert w.state(t) == bool(t_in)
        assert w.state(s) == (1 if want == "fork" else bool(s_in)), "who is pulled in, and who is not"
        if want == "fork" or (s_in and s_in == t_in):
            fork(s, t)
        if kept is not None and want == "redirect":
            kept.take()  # what was converted beside t is joined back to it
    assert w.races == 0


def test_every_row_of_the_table_is_tried() -> None:
    tried = {decided(s, t, legacy, on and may) for _, may, _ in PLACES.values() for s, t, legacy, on in ROWS}
    assert tried == {"go", "error", "redirect", "fork"}
    for _, may, _ in PLACES.values():
        of_place = {(bool(s), bool(t), s == t, legacy, on and may) for s, t, legacy, on in ROWS}
        assert len(of_place) == (14 if may else 7), of_place


# Redirection


@pytest.mark.rule("S7", "S18", "S19")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("place", [looking, writing])
def test_every_kind_of_take_is_redirected_to_the_captured_stream(w: Any, place: Any, legacy: bool) -> None:
    with streams(w, "", 0, 1, legacy) as (s, t, _):
        if legacy or place is writing:
            with pytest.raises(fanin.CaptureError):
                place(w, s, t)
        with fanin.set_options(capture_redirect=True):
            place(w, s, t)
        assert (w.state(s), w.state(t)) == (0, 1)
    assert w.races == 0


@pytest.mark.rule("S7")
@pytest.mark.parametrize("budget", [0, None])
@pytest.mark.parametrize("buffers_stream", [True, False])
def test_a_stale_consumer_is_replaced_for_the_whole_pass_and_the_graph_sums_on(
    w: Any, budget: Any, buffers_stream: bool
) -> None:
    """The consumer's stream is the legacy one, as that of a node which was made before the capture."""
    c, p, q = w.legacy(), w.stream(), w.stream()
    g = [w.array(np.full(8, v, "f4")) for v in (1, 10, 100)]
    buf = fanin.InputBuffer(1, stream=c if buffers_stream else None, budget=budget)
    w.begin_capture(p)
    fork(p, q)
    with fanin.set_options(capture_redirect=True):
        bump(w, p, g[0], 1)
        buf.add(0, g[0], stream=p)
    bump(w, q, g[1], 2)
    buf.add(0, g[1], stream=q)  # .. which counts until the take, even if the option changes before it
    buf.add(0, g[2], stream=p)
    (total,) = buf.take()
    graph = w.end_capture(p)
    for n in (1, 2, 3):
        w.launch_graph(graph, p)
        with fanin.stream(p):
            assert total.numpy().tolist() == [111 + 3 * n] * 8
    buf.add(0, g[0], stream=p)  # the next pass has the buffer's own consumer again
    assert re.search(rf"consumer.* stream {c.handle}\b|stream {c.handle}\b.*consumer", buf.explain(0)), buf.explain(0)
    buf.take()
    assert w.races == 0


@pytest.mark.rule("S5", "S7")
def test_a_stream_that_need_not_be_redirected_is_unchanged(w: Any) -> None:
    s = w.stream()
    x = w.array(np.ones(4))
    explained = []
    for on in (False, True):
        buf = fanin.InputBuffer(1, name="grads")
        with fanin.set_options(capture_redirect=on), fanin.stream(s):
            buf.add(0, x)
            explained.append(buf.explain(0))
            buf.take()
    assert explained[0] == explained[1] and "S5" in explained[0]


@pytest.mark.rule("S6", "S7")
def test_a_leaf_that_gave_way_is_no_mismatch(w: Any) -> None:
    p = w.stream()
    x = w.array(np.ones(4))
    w.begin_capture(p)
    for on, mismatches in ((True, 0), (False, 1)):
        buf = fanin.InputBuffer(1, stream=w.legacy(), leaf=True)
        with fanin.set_options(capture_redirect=on, warn_stream_mismatch=False):
            buf.add(0, x, stream=p)
        assert buf.counters.mismatches == mismatches
        buf.clear()
    w.end_capture(p)


@pytest.mark.rule("S7", "S20")
def test_at_the_end_of_a_pass_one_captured_stream_represents_its_capture(w: Any) -> None:
    caller, outside, s, t, u = (w.stream() for _ in range(5))
    x = w.array(np.ones(4))
    w.begin_capture(s)
    fork(s, t)
    fork(s, u)
    for other in (t, u):
        bump(w, other, x, 1) if other is t else None
    with fanin.set_options(capture_redirect=True):
        hooks.pass_end(caller, [outside, s, t, u], [x])
    assert (w.state(caller), w.state(outside)) == (0, 0)
    w.end_capture(s)  # t was joined
    assert w.races == 0


@pytest.mark.rule("S7")
def test_a_stream_of_an_ended_capture_is_not_redirected(w: Any) -> None:
    """The capture has ended: its stream is as any other."""
    c, p = w.stream(), w.stream()
    x = w.array(np.ones(4))
    w.begin_capture(p)
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, x, stream=p)  # with an event of the capture
    w.end_capture(p)
    with fanin.set_options(capture_redirect=True), pytest.raises(fanin.CaptureError):
        buf.take()


def test_redirection_is_an_option_of_the_process() -> None:
    assert _core.get_options()["capture_redirect"] is False
    with fanin.set_options(capture_redirect=True):
        assert _core.get_options()["capture_redirect"] is True
        with fanin.set_options(capture_redirect=False):
            assert _core.get_options()["capture_redirect"] is False
        with fanin.set_options(debug=True):
            assert _core.get_options()["capture_redirect"] is True
        assert _core.get_options()["capture_redirect"] is True
    assert _core.get_options()["capture_redirect"] is False
    fanin.set_options(capture_redirect=True)
    try:
        assert _core.get_options()["capture_redirect"] is True
    finally:
        fanin.set_options(capture_redirect=False)


# S11 under capture: D's current stream is the legacy one, which no capture takes in


def two_from_another_device(w: Any, p: Any, q: Any, c: Any, g: list[Any], budget: Any) -> fanin.InputBuffer:
    """The gradients lie on device 0; their producer and consumer are on device 1."""
    buf = fanin.InputBuffer(1, stream=c, budget=budget)
    for s, x in ((p, g[0]), (q, g[1])):
        bump(w, s, x, 1)
        buf.add(0, x, stream=s)
    return buf


@pytest.mark.rule("S7", "S11", "K1")
@pytest.mark.parametrize("budget", [0, None])
def test_a_sum_that_neither_side_can_take_runs_on_a_stream_of_the_pool_and_is_joined_back(w: Any, budget: Any) -> None:
    p, q = w.stream(1), w.stream(1)
    g = [w.array(np.full(8, v)) for v in (1, 10)]
    w.begin_capture(p)
    fork(p, q)
    (total,) = two_from_another_device(w, p, q, p, g, budget).take()
    graph = w.end_capture(p)  # 904 if anything that was pulled in were not joined
    assert w.state(w.legacy()) == 0
    for n in (1, 2, 3):
        w.launch_graph(graph, p)
        with fanin.stream(w.legacy()):
            w.device_sync()
            assert total.numpy().tolist() == [11 + 2 * n] * 8
    assert w.races == 0


@pytest.mark.rule("S7", "S11")
@pytest.mark.parametrize("how", ["clear", "drop", "fail"])
def test_a_pooled_stream_is_joined_back_without_a_take(w: Any, how: str) -> None:
    p, q, c, outside = (w.stream(1) for _ in range(4))
    g = [w.array(np.full(8, v)) for v in (1, 10)]
    w.begin_capture(p)
    fork(p, q)
    buf = two_from_another_device(w, p, q, c, g, 0)
    if how == "fail":
        with pytest.raises(fanin.CaptureError):
            buf.add(0, g[0], stream=outside)
    if how == "drop":
        del buf
        gc.collect()
    else:
        buf.clear()
    fork(q, p)
    w.end_capture(p)
    assert w.state(c) == 0
    assert w.races == 0


def where_summed(explained: str) -> int:
    """The stream of the take according to explain()."""
    found = re.search(r"the sum is taken on .*stream (\d+)", explained)
    assert found, explained
    return int(found[1])


@pytest.mark.rule("S11")
def test_without_a_capture_the_current_stream_is_not_redirected(w: Any) -> None:
    p = w.stream(1)
    g = [w.array(np.full(8, v)) for v in (1, 10)]
    buf = two_from_another_device(w, p, p, p, g, 0)
    assert where_summed(buf.explain(0)) == 1
    buf.take()
    own = w.stream()
    w.begin_capture(p)
    with fanin.stream(own):
        buf = two_from_another_device(w, p, p, p, g, 0)
        assert where_summed(buf.explain(0)) == own.handle and w.state(own) == 1
        buf.take()
    w.end_capture(p)
    assert w.races == 0


@pytest.mark.rule("S11", "K2")
def test_the_pool_lends_a_stream_to_one_capture_at_a_time_and_again_afterwards(a_world: Any) -> None:
    world = a_world("fake")
    driver = world.driver
    first, second = driver.stream(1), driver.stream(1)
    driver.array(np.ones(1))
    begun = driver.live("streams")
    totals: list[Any] = []
    for turn in range(3):
        g = [driver.array(np.full(8, v)) for v in (1, 10)]
        driver.begin_capture(first, "thread-local")
        totals += two_from_another_device(world, first, first, first, g, 0).take()
        totals += two_from_another_device(world, first, first, first, g, 0).take()
        assert driver.live("streams") == begun + (1 if turn == 0 else 2), "one for both sums"
        driver.begin_capture(second, "thread-local")
        totals += two_from_another_device(world, second, second, second, g, 0).take()
        assert driver.live("streams") == begun + 2, "one for each capture"
        for s in (first, second):
            driver.destroy_graph(driver.end_capture(s))
        totals.clear()
        del g
        driver.synchronize()
        gc.collect()
        driver.array(np.ones(1))  # polls the released arrays: their streams have no other reference
    assert driver.races == 0, driver.race


# What makes a capture legal: of every row of the law one test that keeps it and one that breaks it

LAW = {
    "a capture begins on a stream of one's own, once for a stream": (
        "captured_work_runs_at_each_launch_of_the_graph",
        "the_legacy_stream_is_not_captured_and_no_stream_twice",
    ),
    "it ends on the stream where it began": (
        "captured_work_runs_at_each_launch_of_the_graph",
        "a_capture_ends_where_it_began",
    ),
    "and on its thread, unless it is relaxed": (
        "a_capture_ends_on_its_own_thread_unless_it_is_relaxed",
        "a_capture_ends_on_its_own_thread_unless_it_is_relaxed",
    ),
    "a stream that waits for a captured event is forked": (
        "a_forked_stream_is_captured_and_runs_beside_the_first_in_the_graph",
        "unordered_work_in_a_graph_is_a_race_when_it_is_launched",
    ),
    "what was forked is joined before the end": (
        "a_join_through_a_third_stream_counts",
        "a_fork_that_is_not_joined_is_found_at_the_end",
    ),
    "a captured event is a place in the graph, no time": (
        "a_captured_event_is_a_place_that_may_be_waited_for",
        "a_captured_event_has_no_time",
    ),
    "nor is there a time for it in any mode": (
        "a_captured_event_is_a_place_that_may_be_waited_for",
        "no_mode_gives_a_captured_event_a_time",
    ),
    "nothing crosses the capture's edge but the order of a stream": (
        "work_queued_on_a_stream_before_its_capture_comes_before_the_graph",
        "a_captured_stream_does_not_wait_for_work_outside",
    ),
    "an event belongs to its capture alone": (
        "two_captures_side_by_side_do_not_meet",
        "two_captures_do_not_become_one",
    ),
    ".. and ends with it": (
        "a_captured_event_is_a_place_that_may_be_waited_for",
        "an_event_of_a_capture_is_waited_for_inside_it_alone",
    ),
    "a captured stream, its device and its context are not synchronized": (
        "another_stream_than_the_captured_is_synchronized",
        "a_captured_stream_is_not_synchronized",
    ),
    "the legacy stream rests beside a captured blocking stream": (
        "the_legacy_stream_runs_beside_a_captured_stream_that_does_not_block",
        "the_legacy_stream_rests_while_a_blocking_stream_is_captured",
    ),
    ".. and is pulled into none": (
        "a_forked_stream_is_captured_and_runs_beside_the_first_in_the_graph",
        "the_legacy_stream_is_not_pulled_into_a_capture",
    ),
    "a violation breaks the capture until its end": (
        "after_a_broken_capture_its_streams_are_as_any_other",
        "a_broken_capture_refuses_everything_until_its_end",
    ),
    "an empty capture is legal": ("an_empty_capture_is_legal", "the_legacy_stream_is_not_captured_and_no_stream_twice"),
    "unsafe calls go by the mode": (
        "unsafe_calls_are_forbidden_by_the_mode_of_the_capture",
        "unsafe_calls_are_forbidden_by_the_mode_of_the_capture",
    ),
}


@pytest.mark.parametrize("row", LAW)
def test_every_row_of_the_law_has_a_test_that_keeps_it_and_one_that_breaks_it_on_both_devices(row: str) -> None:
    for name in LAW[row]:
        test = getattr(law, "test_" + name, None) or globals().get("test_" + name)
        assert test is not None, f"{row}: there is no test_{name}"
        asked = test.__code__.co_varnames[: test.__code__.co_argcount]
        assert "w" in asked, f"test_{name} does not run on both devices"


@pytest.mark.rule("K1")
def test_a_captured_event_is_a_place_that_may_be_waited_for(w: Any) -> None:
    s, t = w.stream(), w.stream()
    e = w.event()
    w.begin_capture(s)
    fork(s, t)
    w.record(e, s)
    for x in (s, t, t):
        w.wait(x, e)
    w.record(e, t)  # another place from now on
    w.wait(s, e)
    w.end_capture(s)


@pytest.mark.rule("K2")
@pytest.mark.parametrize("ask", ["query", "sync_event"])
@pytest.mark.parametrize("mode", ["global", "thread-local", "relaxed"])
def test_no_mode_gives_a_captured_event_a_time(w: Any, mode: str, ask: str) -> None:
    s = w.stream()
    e = w.event()
    w.begin_capture(s, mode)
    w.record(e, s)
    law.refused(907, lambda: getattr(w, ask)(e))
    law.refused(901, lambda: w.end_capture(s))


def test_work_queued_on_a_stream_before_its_capture_comes_before_the_graph(w: Any) -> None:
    s = w.stream()
    x = w.array(np.zeros(4))
    bump(w, s, x, 1)
    w.begin_capture(s)
    bump(w, s, x, 10)
    graph = w.end_capture(s)
    w.launch_graph(graph, s)
    with fanin.stream(s):
        assert x.numpy().tolist() == [11] * 4
    assert w.races == 0


def test_two_captures_side_by_side_do_not_meet(w: Any) -> None:
    pairs = [(w.stream(), w.stream(), w.array(np.zeros(4))) for _ in range(2)]
    for s, _, _ in pairs:
        w.begin_capture(s)
    for s, t, x in pairs:
        fork(s, t)
        bump(w, t, x, 1)
        fork(t, s)
    for s, _, x in pairs:
        w.launch_graph(w.end_capture(s), s)
        with fanin.stream(s):
            assert x.numpy().tolist() == [1] * 4
    assert w.races == 0


def test_another_stream_than_the_captured_is_synchronized(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    e = w.event()
    w.begin_capture(s)
    bump(w, t, x, 1)
    w.record(e, t)
    w.sync(t)
    assert w.state(s) == 1
    w.end_capture(s)
    w.sync_event(e)
    w.device_sync()


def test_the_legacy_stream_runs_beside_a_captured_stream_that_does_not_block(w: Any) -> None:
    s = w.stream()
    x, y = w.array(np.zeros(4)), w.array(np.zeros(4))
    w.begin_capture(s)
    bump(w, w.legacy(), x, 1)
    bump(w, s, y, 1)
    w.end_capture(s)
    with fanin.stream(w.legacy()):
        assert (x.numpy().tolist(), y.numpy().tolist()) == ([1] * 4, [0] * 4)


def test_after_a_broken_capture_its_streams_are_as_any_other(w: Any) -> None:
    s, t = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    w.begin_capture(s)
    fork(s, t)
    bump(w, t, x, 1)
    law.refused(900, lambda: w.sync(s))
    law.refused(901, lambda: w.end_capture(s))
    assert (w.state(s), w.state(t)) == (0, 0)
    w.begin_capture(s)
    fork(s, t)
    bump(w, t, x, 10)
    fork(t, s)
    w.launch_graph(w.end_capture(s), s)
    with fanin.stream(s):
        assert x.numpy().tolist() == [10] * 4, "nothing of what was broken runs"
