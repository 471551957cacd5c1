"""explore: every order of host threads, its report, its replays, and that the reduction loses nothing."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, Report, explore, replay, scenario, scenarios
from fanin.sim.search import bits_of
from kit import scenes
from kit.prepared import run_prepared
from kit.sample import sizes

pytestmark = pytest.mark.core


def keyed_sum(m: Machine, n: int = 2, keyed: bool = True, out: tuple[str, ...] = ()) -> Any:
    m.leave_out(*out)
    c = m.stream()
    buf = fanin.InputBuffer(1, stream=c)

    def producer(key: int) -> None:
        s = m.stream()
        g = m.empty(2, "float32")
        m.launch(s, lambda v: v.fill(1e8 if key == 1 else 3), writes=[g], name=f"produce {key}")
        buf.add(0, g, key=key if keyed else None, stream=s)

    for key in range(n):
        m.spawn(producer, key, name=f"producer {key}")
    m.join()
    (total,) = buf.take()
    with fanin.stream(c):
        return total.numpy()


def test_a_keyed_sum_is_the_same_in_every_order() -> None:
    report = explore(keyed_sum)
    assert report.ok and report.complete, report
    assert report.runs > 1 and report.sampled == 0
    assert report.schedule is None and report.error is None
    assert len(report.results) == 1
    assert str(report).startswith(
        f"keyed_sum: {report.runs} orders of host threads (all of them), no races, no deadlocks"
    )


def test_a_sum_without_keys_differs_with_the_order_of_arrival() -> None:
    """The order is the order of arrival then, and rounding shows it."""
    report = explore(functools.partial(keyed_sum, n=3, keyed=False), limit=60, samples=20)
    assert not report.ok and not report.races
    assert len(report.results) > 1
    assert report.schedule is not None and "differs" in str(report)
    again = report.replay()
    assert again.tobytes() != report.results[0].tobytes()


def test_an_omitted_wait_is_found_and_its_schedule_replays() -> None:
    report = explore(functools.partial(keyed_sum, out=("S12.wait",)))
    assert report.races and not report.ok
    assert isinstance(report.error, fanin.RaceError)
    for _ in range(2):
        with pytest.raises(fanin.RaceError) as caught:
            report.replay()
        assert str(caught.value).split("\n")[0] == str(report.error).split("\n")[0]
    assert repr(report.schedule) in str(report)


def lost_wait(m: Machine) -> Any:
    """A flag passed between threads: only when the reader comes second does it wait for the writer."""
    a, b = m.stream(), m.stream()
    x = m.array(np.zeros(1))
    flag: list[Any] = []

    def writer() -> None:
        m.launch(a, lambda v: v.fill(1), writes=[x], name="write")
        flag.append(a.record())

    def reader() -> None:
        if flag:
            b.wait(flag[0])
        m.launch(b, lambda v: None, reads=[x], name="read")

    m.spawn(writer)
    m.spawn(reader)
    m.join()


def test_a_race_of_some_orders_only_is_found() -> None:
    report = explore(lost_wait)
    assert 0 < report.races < report.runs
    assert report.schedule is not None
    with pytest.raises(fanin.RaceError):
        replay(lost_wait, report.schedule)
    first = explore(lost_wait, stop_at_first=True)
    assert first.races == 1 and not first.complete and first.sampled == 0


def racy(m: Machine, mask: int) -> Any:
    """Threads whose accesses conflict or not, ordered or not, by the bits of `mask`."""
    a, b = m.stream(), m.stream()
    x, y = m.array(np.zeros(2)), m.array(np.zeros(2))
    log: list[str] = []
    events: list[Any] = []

    def one() -> None:
        m.launch(a, lambda v: v.__iadd__(1), writes=[x], name="one")
        if mask & 1:
            events.append(a.record())
        if mask & 2:
            m.launch(a, lambda v: v.fill(2), writes=[y], name="one more")
        log.append("one")

    def two() -> None:
        if mask & 4 and events:
            b.wait(events[-1])
        m.launch(b, lambda v: None, reads=[x if mask & 8 else y], name="two")
        log.append("two")

    m.spawn(one)
    m.spawn(two)
    m.join()
    m.synchronize()
    return tuple(log) if mask & 16 else None


def verdict(report: Report) -> Any:
    return bool(report.races), bool(report.deadlocks), bool(report.errors), {repr(r) for r in report.results}


@pytest.mark.parametrize("mask", range(16))
def test_the_reduction_finds_what_the_whole_search_finds(mask: int) -> None:
    run = functools.partial(racy, mask=mask)
    reduced, whole = explore(run, limit=100_000), explore(run, limit=100_000, reduce=False)
    assert reduced.complete and whole.complete
    assert verdict(reduced) == verdict(whole)
    assert reduced.runs <= whole.runs and whole.skipped == 0


def test_state_that_threads_share_outside_of_fanin_needs_the_whole_search() -> None:
    """The words of explore: threads whose steps commute are run in one order, and a list that they share is no step."""
    run = functools.partial(racy, mask=16)
    assert len(explore(run, reduce=False, limit=100_000).results) == 2
    assert len(explore(run, limit=100_000).results) >= 1


def test_the_reduction_omits_orders() -> None:
    """Threads that touch nothing in common need one order alone."""

    def apart(m: Machine) -> Any:
        def actor(s: fanin.Stream) -> None:
            for _ in range(2):
                m.launch(s, lambda: None)

        for s in [m.stream() for _ in range(2)]:
            m.spawn(actor, s)
        m.join()

    reduced, whole = explore(apart, limit=100_000), explore(apart, limit=100_000, reduce=False)
    assert reduced.complete and whole.complete
    assert reduced.runs < whole.runs / 4


@pytest.mark.parametrize("limit", sizes(100, 3000))
def test_reduced_and_whole_agree_on_sums(limit: int) -> None:
    run = functools.partial(keyed_sum, keyed=False)
    reduced, whole = explore(run, limit=limit), explore(run, limit=limit, reduce=False, samples=0)
    assert {r.tobytes() for r in reduced.results} >= {r.tobytes() for r in whole.results}
    assert verdict(reduced)[:3] == (False, False, False)


def test_every_order_is_run() -> None:
    """Unreduced, with steps that all use one object: every interleaving runs."""

    def two(m: Machine) -> Any:
        s = m.stream()
        order: list[int] = []

        def actor(i: int) -> None:
            for _ in range(2):
                s.record()
                order.append(i)

        for i in range(2):
            m.spawn(actor, i)
        m.join()
        return tuple(order)

    found = explore(two, limit=100_000, reduce=False)
    assert found.complete
    assert {tuple(r) for r in found.results} == set(itertools.permutations((0, 0, 1, 1)))
    reduced = explore(two, limit=100_000)
    assert reduced.complete and set(reduced.results) == set(found.results)


def test_beyond_the_limit_orders_are_random_and_the_report_says_so() -> None:
    run = functools.partial(keyed_sum, n=4)
    report = explore(run, limit=5, samples=7)
    assert (report.ok, report.failed, report.outcome) == (False, False, "incomplete") and not report.complete
    assert "incomplete: no fault was found, but orders are missing" in str(report) and "incomplete" in repr(report)
    assert report.sampled == 7 and report.runs <= 12
    assert "not all: 7 of these were drawn at random" in str(report)
    assert str(report) == str(explore(run, limit=5, samples=7))


def test_deadlocks_are_found_and_distinguished() -> None:
    """Each thread takes its buffer, and within that sum the other's: fine, unless both have begun."""

    def crossed(m: Machine) -> Any:
        mine = threading.local()

        def combine(i: int, a: Any, b: Any) -> Any:
            if mine.number == i:
                buffers[1 - i].take()
            return a

        def taker(i: int) -> None:
            mine.number = i
            buffers[i].take()

        buffers = [fanin.InputBuffer([fanin.Slot(combine=functools.partial(combine, i))]) for i in range(2)]
        for i, buf in enumerate(buffers):
            buf.add(0, {1: 1})
            buf.add(0, {1: 1})
            m.spawn(taker, i)
        m.join()

    report = explore(crossed, limit=60, samples=20)
    assert report.deadlocks and not report.ok and not report.races and not report.errors and report.repeats
    assert report.deadlocks < report.runs
    assert isinstance(report.error, fanin.sim.DeadlockError)
    with pytest.raises(fanin.sim.DeadlockError, match="waits for"):
        report.replay()


def test_errors_of_a_scenario_are_counted() -> None:
    def sometimes(m: Machine) -> Any:
        order: list[int] = []
        s = m.stream()
        for i in range(2):
            m.spawn(lambda i=i: (s.record(), order.append(i)))
        m.join()
        assert order[0] == 0

    report = explore(sometimes)
    assert 0 < report.errors < report.runs
    assert isinstance(report.error, AssertionError)
    with pytest.raises(AssertionError):
        report.replay()


def once_in_a_while(extra: Callable[[int], bool], value: Callable[[int], object]) -> Callable[[Machine], Any]:
    """Two threads that record events; in some runs the first takes turns of its own before."""
    runs = itertools.count()

    def scene(m: Machine) -> Any:
        run, s = next(runs), m.stream()

        def first() -> None:
            if extra(run):
                s.record()
                s.record()
            s.record()

        m.spawn(first)
        m.spawn(s.record)
        m.join()
        return value(run)

    return scene


def test_one_time_work_of_a_process_does_not_spoil_the_first_search() -> None:
    report, plain = (explore(once_in_a_while(lambda run, at=at: run == at, lambda run: 1)) for at in (0, -1))
    assert report.ok and report.repeats and report.runs == plain.runs


def test_a_scenario_that_never_repeats_itself_is_incomplete() -> None:
    report = explore(once_in_a_while(lambda run: run % 2 == 0, lambda run: 1), limit=20, samples=5)
    assert not report.repeats and report.outcome == "incomplete", report


def test_a_result_of_the_first_search_alone_is_not_lost() -> None:
    report = explore(once_in_a_while(lambda run: run == 0, lambda run: run == 0))
    assert report.failed and sorted(report.results) == [False, True], report


def test_a_scenario_without_threads_has_one_order() -> None:
    report = explore(lambda m: m.array(np.ones(2)))
    assert report.ok and report.runs == 1
    with pytest.raises(ValueError, match="no run failed"):
        report.replay()


def test_results_are_compared_by_their_bits() -> None:
    same = [
        (np.float32(1), np.array(1, "float32")),
        (float("nan"), float("nan")),
        ([1, (2.0, "a")], [1, (2.0, "a")]),
        ({"a": 1, "b": np.ones(2)}, {"b": np.ones(2), "a": 1}),
        ({1, 2}, {2, 1}),
        (np.array([1, "a"], object), np.array([1, "a"], object)),
        (ValueError("a"), ValueError("a")),
    ]
    for a, b in same:
        assert bits_of(a) == bits_of(b)
    differ = [
        (0.0, -0.0),
        (1, 1.0),
        (True, 1),
        ([1], (1,)),
        (np.ones(2), np.ones(2, "float32")),
        (np.ones(2), np.ones((2, 1))),
        (np.array([1, 2.0], object), np.array([1, -2.0], object)),
        (ValueError("a"), ValueError("b")),
        (ByDLPack(np.ones(2)), ByDLPack(np.zeros(2))),
    ]
    for a, b in differ:
        assert bits_of(a) != bits_of(b)


class ByDLPack:
    """An array of a library that has DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Opaque:
    """A class without values to compare."""


@pytest.mark.parametrize("inside", [Opaque(), [Opaque()], {"a": (Opaque(),)}, np.array([Opaque()], object)])
def test_results_without_a_value_cannot_be_compared_and_are_not_ok(inside: Any) -> None:
    def opaque(m: Machine) -> Any:
        m.spawn(len, [])
        m.join()
        return inside

    report = explore(opaque)
    assert (report.ok, report.failed, report.outcome) == (False, False, "cannot be compared")
    assert "cannot be compared: a result holds" in str(report) and report.complete


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: explore(lost_wait, limit=0), "limit"),
        (lambda: explore(lost_wait, samples=-1), "samples"),
        (lambda: replay(lost_wait, "0_1"), "is no schedule"),
        (lambda: replay(lost_wait, "9999"), "does not fit"),
    ],
)
def test_scenarios_that_cannot_be_explored_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_scenarios_are_marked_and_collected() -> None:
    import types

    module = types.ModuleType("module")

    @scenario
    def one(m: Machine) -> None: ...

    @scenario(limit=7)
    def two(m: Machine) -> None: ...

    module.one, module.two, module.other = one, two, lost_wait  # type: ignore[attr-defined]
    assert [(name, options) for name, _, options in scenarios(module)] == [("one", {}), ("two", {"limit": 7})]
    assert explore(one).ok


# Calls that take no lock are turns, and accesses


def test_small_gradients_of_threads_are_added_in_every_order() -> None:
    """They go the fast path, which takes no lock; without keys the order of arrival is the order of the sum."""

    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(1)
        for v in (1e8, -1e8, 1.0):
            m.spawn(buf.add, 0, np.full(2, v, np.float32))
        m.join()
        return buf.take()

    report, whole = explore(scenario), explore(scenario, reduce=False)
    assert report.complete and report.runs == 6, report
    assert {bits_of(r) for r in report.results} == {bits_of(r) for r in whole.results}
    assert len(report.results) == 2 and not report.ok


def test_the_example_of_explore_has_two_orders_and_one_result() -> None:
    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(1)
        for i in range(2):
            m.spawn(lambda i=i: buf.add(0, np.full(2, i + 0.5), key=i))
        m.join()
        return buf.take()

    report = explore(scenario)
    assert report.ok and report.complete and report.runs == 2, report


def test_adds_to_different_slots_commute() -> None:
    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(2)
        for slot in range(2):
            m.spawn(lambda slot=slot: [buf.add(slot, np.ones(2)) for _ in range(3)])
        m.join()
        return buf.take()

    report = explore(scenario)
    assert report.ok and report.complete and report.runs == 1, report


def test_adds_to_different_slots_do_not_commute_where_the_budget_decides() -> None:
    """The last thread decides which slot is folded; the counters of a run show it."""

    def scenario(m: Machine, budget: int) -> Any:
        buf = fanin.InputBuffer(2, budget=budget)
        buf.add(0, np.ones(2))
        for slot in range(2):
            m.spawn(buf.add, slot, np.ones(2))
        m.join()
        return buf.counters.folds

    for budget, results in [(1000, {0}), (40, {0, 1})]:
        run = functools.partial(scenario, budget=budget)
        reduced, whole = explore(run), explore(run, reduce=False)
        assert reduced.complete and set(reduced.results) == set(whole.results) == results, (budget, reduced, whole)


@pytest.mark.parametrize("reduce", [True, False])
def test_counters_that_a_thread_reads_depend_on_the_order(reduce: bool) -> None:
    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(2)
        m.spawn(buf.add, 0, np.ones(2))
        seen = m.spawn(lambda: buf.counters.adds)
        m.join()
        return seen.result

    assert set(explore(scenario, reduce=reduce).results) == {0, 1}


def test_whether_another_thread_has_ended_depends_on_the_order() -> None:
    assert set(explore(scenes.ends).results) == {0, 1}


# Queries of events by host threads


def test_whether_an_event_was_recorded_depends_on_the_order() -> None:
    """The first query finds no record, so there is nothing to wait for: True."""

    def scenario(m: Machine) -> Any:
        s, e = m.stream(), m.event()
        m.launch(s, lambda v: v.fill(1), writes=[m.empty(1)])
        m.spawn(lambda: e.record(s))
        asked = m.spawn(e.query)
        m.join()
        return asked.result

    report = explore(scenario)
    assert report.complete and set(report.results) == {True, False}, report


def test_a_thread_that_waits_for_an_event_reads_what_was_written_before_it() -> None:
    """synchronize blocks without the GIL, lets others act, and orders the host after the record if there
    was one.
    """

    def scenario(m: Machine, waits: bool = True) -> Any:
        s = m.stream()
        x, flag = m.array(np.zeros(1)), list[Any]()
        m.launch(s, lambda v: v.fill(1), writes=[x], name="write")
        e = s.record()

        def reader() -> None:
            if waits:
                e.synchronize()
            flag.append(x.numpy().tolist())

        for _ in range(2):
            m.spawn(reader)
        m.spawn(lambda: m.launch(s, lambda v: None, reads=[x], name="read"))
        m.join()
        return flag

    report = explore(scenario)
    assert report.ok and report.complete and report.results == ([[1.0], [1.0]],), report
    assert report.runs > 1
    assert explore(functools.partial(scenario, waits=False)).races


@pytest.mark.parametrize("what", ["synchronize", "query"])
def test_threads_that_query_an_event_do_not_stop_a_running_thread(what: str) -> None:
    """Other threads than the machine's: a kernel that takes its time has the GIL for itself, and they wait
    without it.
    """
    with Machine() as m:
        s, x, began, seen = m.stream(), m.empty(1), threading.Event(), list[Any]()

        def slow(v: np.ndarray) -> None:
            began.set()
            for _ in range(200):
                sum(range(1000))
            v.fill(1)

        m.launch(s, slow, writes=[x])
        e = s.record()
        first = threading.Thread(target=s.synchronize)
        others = [threading.Thread(target=lambda: seen.append(getattr(e, what)())) for _ in range(4)]
        first.start()
        began.wait()
        for t in others:
            t.start()
        for t in [first, *others]:
            t.join()
        assert len(seen) == 4


def test_a_buffer_reused_from_before_the_first_machine_is_explored_like_a_new_one() -> None:
    code = """
import fanin
if {before}:
    fanin.InputBuffer(1)  # is kept for its next life

def scenario(m):
    buf = fanin.InputBuffer(1)
    buf.add(0, 1e16)
    for value in (1.0, -1e16):
        m.spawn(buf.add, 0, value)
    m.join()
    return buf.take()

report = fanin.sim.explore(scenario)
print(report.runs, len(report.results))
"""
    fresh, kept = (run_prepared(code.format(before=before)).stdout for before in (False, True))
    assert fresh == kept
    assert fresh.split()[1] == "2"


def test_two_threads_that_wait_for_all_work_commute() -> None:
    def scene(m: Any) -> None:
        m.spawn(m.synchronize)
        m.spawn(m.synchronize)

    assert explore(scene).runs == 1
