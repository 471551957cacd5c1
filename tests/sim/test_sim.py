"""The simulated machine as Python has it: schedules, the messages of races, failures."""

from __future__ import annotations

import gc
import math
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from fanin.sim.machine import SCHEDULES
from kit import hooks

pytestmark = pytest.mark.core


# Schedules


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_seed_and_a_schedule_give_the_same_run_again(schedule: str) -> None:
    def run(seed: int) -> list[int]:
        ran: list[int] = []
        with Machine(2, seed, schedule=schedule) as m:
            for i in range(12):
                m.launch(m.stream(i % 2), lambda x, i=i: ran.append(i), writes=[m.empty(1, device=i % 2)])
        return ran

    assert run(3) == run(3)
    assert sorted(run(4)) == list(range(12))
    if schedule == "seeded":
        assert len({tuple(run(seed)) for seed in range(8)}) > 1
    if schedule == "fifo":
        assert run(0) == list(range(12))
    if schedule == "lifo":
        assert run(0) == list(range(12))[::-1]


def test_the_starved_stream_runs_last() -> None:
    ran: list[str] = []
    first = Machine(1).stream().handle
    with Machine(1, schedule="starve", starve=first) as m:
        starved, other = m.stream(), m.stream()
        assert starved.handle == first
        for s, word in ((starved, "starved"), (other, "other"), (other, "other")):
            m.launch(s, lambda x, word=word: ran.append(word), writes=[m.empty(1)])
    assert ran == ["other", "other", "starved"]


def test_steps_run_one_thing_at_a_time() -> None:
    ran: list[int] = []
    with Machine(1) as m:
        s = m.stream()
        for i in range(3):
            m.launch(s, lambda x, i=i: ran.append(i), writes=[m.empty(1)])
        while not ran:
            assert m.step()
        assert ran == [0]
        while m.step():
            pass
        assert ran == [0, 1, 2]
        assert not m.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "1 to 64"),
        ({"devices": 65}, "1 to 64"),
        ({"schedule": "no"}, "round robin"),
        ({"memory": 0}, "memory"),
        *[({name: x}, f"{name}: .*{x}") for name in ("launch_us", "gbytes_per_s") for x in (-1, math.nan, math.inf)],
    ],
)
def test_invalid_arguments_of_a_machine_raise_a_clear_error(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Machine(**options)


def test_the_clock_counts_overlap() -> None:
    def took(streams: int) -> float:
        with Machine(1) as m:
            all_ = [m.stream() for _ in range(streams)]
            for i in range(4):
                m.launch(all_[i % streams], lambda x: None, writes=[m.empty(1)], us=1000)
            return m.clock().device_us

    assert 4000 <= took(1) < 4100
    assert 1000 <= took(4) < 1100
    assert took(1) > 3 * took(4)


# Races


def test_a_race_names_both_sides_and_the_wait_that_is_missing() -> None:
    with Machine(2) as m:
        a, b = m.stream(0), m.stream(1)
        x = m.empty(4)
        m.launch(a, lambda x: x.fill(1), writes=[x], name="writer")
        with pytest.raises(fanin.RaceError) as caught:
            m.launch(b, lambda x: None, reads=[x], name="reader")
        text = str(caught.value)
        for word in (
            "writer",
            "reader",
            f"stream {a.handle}",
            f"stream {b.handle}",
            "sim:0",
            "sim:1",
            "test_sim.py:",
            "wait",
        ):
            assert word in text, text
        assert m.races == 1
        m.synchronize()  # it was raised once


def test_disjoint_bytes_are_no_race() -> None:
    with Machine() as m:
        a, b, c = m.stream(), m.stream(), m.stream()
        x = m.empty((4, 6))
        m.launch(a, lambda v: v.fill(1), writes=[x[:, ::2]])
        m.launch(b, lambda v: v.fill(2), writes=[x[:, 1::2]])
        with pytest.raises(fanin.RaceError):
            m.launch(c, lambda v: None, reads=[x[3]])
        c.wait(a)
        m.launch(c, lambda v: None, reads=[x[3, ::2]])
        c.wait(b)
        m.launch(c, lambda v: None, reads=[x])
        m.synchronize()


def test_a_blocking_stream_synchronizes_with_the_legacy_stream() -> None:
    def race(blocking: bool) -> bool:
        with Machine() as m:
            legacy, s = fanin.Stream("sim:0", 1), m.stream(blocking=blocking)
            x = m.empty(1)
            m.launch(s, lambda v: v.fill(1), writes=[x])
            try:
                m.launch(legacy, lambda v: None, reads=[x])
            except fanin.RaceError:
                return True
            return False

    assert race(False) and not race(True)


def test_an_unchecked_machine_finds_nothing() -> None:
    with Machine(check=False) as m:
        x = m.empty(1)
        m.launch(m.stream(), lambda v: None, writes=[x])
        m.launch(m.stream(), lambda v: None, writes=[x])
        assert m.races == 0


def test_a_race_that_no_call_could_raise_is_raised_at_the_end() -> None:
    """A release cannot raise."""
    m = Machine()
    m.leave_out("S19.mark")
    with pytest.raises(fanin.RaceError), m:
        s, other = m.stream(), m.stream()
        buf = fanin.InputBuffer(1, stream=s)
        for _ in range(2):
            g = m.empty(4)
            m.launch(s, lambda v: v.fill(1), writes=[g])
            buf.add(0, g, stream=s)
        (total,) = buf.take(stream=other)
        m.launch(other, lambda v: None, reads=[total])
        del total
    assert m.races >= 1


def test_leave_out_lists_its_words() -> None:
    with Machine() as m:
        with pytest.raises(ValueError, match=r"S12\.wait"):
            m.leave_out("no such rule")
        for wrong in ("", "S1", "S12.", "wait", "S12.no"):
            with pytest.raises(ValueError, match="leave_out"):
                m.leave_out("S12", wrong)
        with pytest.raises(ValueError):
            m.leave_out(12)  # type: ignore[arg-type]
        m.leave_out("S12", "S9.mark")
        m.leave_out()


# Failures


def a_machine_at_work() -> None:
    with fanin.trace() as t, Machine(2) as m:
        c = m.stream()
        s = c
        buf = fanin.InputBuffer(1, stream=c)
        for k in range(2):
            s, g = m.stream(k), m.empty(16, device=0)
            m.launch(s, lambda v: v.fill(1), writes=[g])
            buf.add(0, g, stream=s)
        (x,) = buf.take()
        e = m.event()
        e.record(c)
        s.wait(e)
        s.wait(c)
        with fanin.stream(c):
            assert (x[::2].reshape(2, 4).T.broadcast_to(3, 4, 2).numpy() == 2).all()
        m.spawn(lambda: m.event().record(c))
        m.join()
        x.record_stream(s)
        hooks.pass_end(s, [c], [x])
    assert t.lines


def two_orders() -> None:
    def scenario(m: Machine) -> None:
        s = m.stream()
        for _ in range(2):
            m.spawn(lambda: s.record())

    report = fanin.sim.explore(scenario)
    if report.error is not None:
        raise report.error


@pytest.mark.parametrize("work", [a_machine_at_work, two_orders])
def test_every_allocation_may_fail(work: Any) -> None:
    """Each once: MemoryError, or the call succeeds all the same; nothing leaks."""
    work()
    gc.collect()
    gc.collect()
    live, failed, n = hooks.memory()[0], 0, 0
    hit = True
    while hit:
        before = hooks.memory()[2]
        hooks.fail_at(n)
        try:
            work()
        except MemoryError:
            failed += 1
        finally:
            hooks.fail_at(-1)
        hit = hooks.memory()[2] > before
        n += 1
        if n % 8 == 0:
            gc.collect()  # CPython keeps few MemoryErrors; beyond them one is shared and never drops its frames
    gc.collect()
    assert failed > 30 and n > failed
    assert hooks.memory()[0] == live


@pytest.mark.parametrize("nth", range(4))
def test_a_thread_that_cannot_be_started_ends_the_join(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = threading.Thread.start, iter(range(10))

    def sometimes(self: threading.Thread) -> None:
        if next(starts) == nth:
            raise RuntimeError("can't start new thread")
        start(self)

    ran: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", sometimes)
    with Machine() as m:
        for i in range(3):
            m.spawn(ran.append, i)
        if nth < 3:
            with pytest.raises(RuntimeError, match="can't start"):
                m.join()
            with pytest.raises(RuntimeError, match="make a new one"):
                m.synchronize()
            assert not ran
        else:  # the one that listens for Ctrl-C: it can be done without
            m.join()
            assert sorted(ran) == [0, 1, 2]


def test_a_machine_has_a_number_of_devices() -> None:
    for wrong, error in ((True, TypeError), ("2", TypeError), (0, ValueError), (65, ValueError)):
        with pytest.raises(error, match="devices" if error is ValueError or wrong is True else "integer"):
            Machine(devices=wrong)  # type: ignore[arg-type]


def test_ctrl_c_inside_synchronize_leaves_a_machine_without_host_threads_usable() -> None:
    lines = 0

    def interrupted_at(n: int) -> bool:
        """An interrupt at the n-th line that synchronize runs; False: it has no so many."""
        nonlocal lines
        lines, raised = 0, False

        def trace(frame: Any, event: str, arg: object) -> Any:
            nonlocal lines, raised
            if frame.f_code.co_filename != Machine.synchronize.__code__.co_filename:
                return None
            if event == "line":
                lines += 1
                if lines == n + 1:
                    raised = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        m = Machine(1)
        s, x = m.stream(), m.array(np.zeros(2))
        m.launch(s, lambda v: v.fill(1), writes=[x])
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            m.synchronize()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(old)
        m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x])
        m.spawn(lambda: m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x]))
        m.synchronize()
        assert x.numpy().tolist() == [3, 3]
        return raised

    n = 0
    while interrupted_at(n):
        n += 1
    assert n >= 5, "the loop never came into synchronize"


def test_ctrl_c_inside_a_kernel_leaves_the_machine_usable() -> None:
    m = Machine(1)
    s, x = m.stream(), m.array(np.zeros(2))

    def interrupt(v: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    m.launch(s, interrupt, writes=[x])
    m.launch(s, lambda v: v.fill(1), writes=[x])
    with pytest.raises(KeyboardInterrupt):
        m.synchronize()
    m.synchronize()
    assert x.numpy().tolist() == [1, 1]


def test_the_views_of_a_kernel_that_raised_show_the_values_of_that_time() -> None:
    def inner(part: Any, back: Any) -> None:
        raise LookupError("in the kernel")

    def fail(view: Any, grid: Any) -> None:
        view[0] = 7
        try:
            inner(view[1:], grid[::-1, 0])
        except LookupError:
            raise LookupError("in the kernel")  # noqa: B904

    m = Machine(1)
    s, x, y = m.stream(), m.array(np.arange(4.0)), m.array(np.arange(12.0).reshape(3, 4)[:, ::-1])
    m.launch(s, fail, writes=[x, y])
    with pytest.raises(LookupError, match="in the kernel") as caught:
        m.synchronize()
    m.launch(s, lambda *v: [one.fill(-1) for one in v] and None, writes=[x, y])
    m.synchronize()
    frames = {
        f.f_code.co_name: f
        for e in (caught.value, caught.value.__context__)
        for f, _ in traceback.walk_tb(e.__traceback__)
    }  # type: ignore[union-attr]
    assert frames["fail"].f_locals["view"].tolist() == [7, 1, 2, 3]
    assert frames["fail"].f_locals["grid"].tolist() == np.arange(12.0).reshape(3, 4)[:, ::-1].tolist()
    assert frames["inner"].f_locals["part"].tolist() == [1, 2, 3]
    assert frames["inner"].f_locals["back"].tolist() == [11, 7, 3]
    frames["fail"].f_locals["view"][:] = 100  # only the traceback refers to it
    assert x.numpy().tolist() == [-1] * 4 and y.numpy().tolist() == [[-1] * 4] * 3
    del m, s, x, y
    gc.collect()
    assert frames["inner"].f_locals["part"].shape == (3,)


def test_a_release_race_is_reported_by_a_later_call_of_any_kind() -> None:
    calls: dict[str, Callable[[Machine, Any, Any, Any], object]] = {
        "launch": lambda m, s, y, g: m.launch(s, lambda v: None, reads=[y]),
        "synchronize": lambda m, s, y, g: m.synchronize(),
        "stream": lambda m, s, y, g: s.synchronize(),
        "event": lambda m, s, y, g: g[1].synchronize(),
        "read": lambda m, s, y, g: y.numpy(),
        "step": lambda m, s, y, g: m.step(),
        "graph": lambda m, s, y, g: m.launch_graph(g[0], s),
        "take": lambda m, s, y, g: [g[2].clear(), g[2].add(0, y), g[2].add(0, y), g[2].take()],
    }
    for name, call in calls.items():
        m = Machine(1)
        s, t, y = m.stream(), m.stream(), m.array(np.zeros(4))
        m.begin_capture(s)
        m.launch(s, lambda v: None, reads=[y])
        graph, buf = m.end_capture(s), fanin.InputBuffer(1, stream=s)
        event = s.record()
        with fanin.stream(s):
            first = fanin.InputBuffer(1)
            for _ in range(2):
                first.add(0, m.array(np.ones(4)))
            (x,) = first.take()
        t.wait(s)
        m.launch(t, lambda v: None, reads=[x], name="late")
        assert m.races == 0
        del x  # no mark was made: this call cannot raise
        assert m.races == 1
        with pytest.raises(fanin.RaceError, match=r"memory is freed .* while 'late'"):
            call(m, s, y, (graph, event, buf))
        call(m, s, y, (graph, event, buf))  # reported once
        assert m.races == 1, name


def test_a_race_names_the_streams_that_have_names() -> None:
    with Machine(1) as m:
        main, other, x = m.stream(name="main"), m.stream(), m.array(np.zeros(4))
        left, right = m.stream(name="it's " + "\xe9" * 40), m.stream(name="main")

        def add_one(v: Any) -> None:
            v += 1

        m.launch(main, add_one, [], [x], name="first")
        with pytest.raises(fanin.RaceError) as e:
            m.launch(other, add_one, [], [x], name="second")
        mine, others = f"stream {main.handle} 'main' of sim:0", f"stream {other.handle} of sim:0"
        text = str(e.value)
        assert re.search(rf"'second' \({others}, .*\) writes what 'first' \({mine}, .*\) wrote", text), text
        assert f"{others} must wait for {mine} after 'first'" in text
        with pytest.raises(fanin.RaceError, match=rf"\(stream {left.handle} 'it's \xe9+.?' of sim:0, "):
            m.launch(left, add_one, [], [x], name="third")
        with pytest.raises(fanin.RaceError, match=rf"\(stream {right.handle} 'main' of sim:0, .*\) writes what "):
            m.launch(right, add_one, [], [x], name="fourth")


def test_a_named_stream_without_memory_is_an_error_and_the_machine_goes_on() -> None:
    hooks.memory()
    with Machine(1) as m:
        for attempt in hooks.attempts():
            with attempt:
                m.stream(name="main")
        assert m.stream(name="last").handle > 2


def test_a_captured_kernel_ends_with_its_graph() -> None:
    class Fn:
        def __call__(self, v: Any) -> None:
            v += 1

    for launches in range(3):
        m = Machine(1)
        s, x, fn = m.stream(), m.array(np.zeros(1)), Fn()
        gone = weakref.ref(fn)
        m.begin_capture(s)
        m.launch(s, fn, writes=[x])
        graph = m.end_capture(s)
        del fn
        for _ in range(launches):
            m.launch_graph(graph, s)
        assert gone() is not None
        del graph
        assert (gone() is not None) == (launches > 0), "what is on its way keeps it"
        m.synchronize()
        assert gone() is None
        assert x.numpy() == launches


@pytest.mark.parametrize("launch_us", [3, 6])
def test_the_launch_of_a_graph_counts_once_and_little_for_each_kernel_in_it(launch_us: float) -> None:
    """2.5 us and 1 ns a kernel of the host's time where a kernel takes 3 us; the device's time is the kernels' own."""
    for kernels in (1, 10, 1000):
        with Machine(1, launch_us=launch_us) as m:
            s = m.stream()
            before = m.host_us
            m.begin_capture(s)
            for _ in range(kernels):
                m.launch(s, lambda: None, reads=[], writes=[], us=1)
            graph = m.end_capture(s)
            assert m.host_us == before
            m.launch_graph(graph, s)
            assert m.host_us - before == pytest.approx(launch_us / 3 * (2.5 + kernels / 1000))
            assert m.clock().device_us - m.host_us == pytest.approx(kernels)
            m.launch(s, lambda: None, reads=[], writes=[])
            assert m.host_us - before == pytest.approx(launch_us / 3 * (2.5 + kernels / 1000) + launch_us)


@pytest.mark.parametrize("index", [2, 9, 10])
def test_a_device_that_the_machine_does_not_have_is_refused_with_how_to_make_one(index: int) -> None:
    with Machine(), pytest.raises(ValueError, match=rf"this machine has 2 devices; .*Machine\(devices={index + 1}\)"):
        fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float32", device=f"sim:{index}")])


def test_naming_a_call_site_runs_no_python_code_in_which_an_interrupt_would_be_lost() -> None:
    code = compile("m.launch(s, fill, writes=[x])", "a_file_that_no_call_came_from.py", "exec")
    entered: set[str] = set()

    def seen(frame: FrameType, what: str, arg: object) -> None:
        entered.add(frame.f_code.co_filename)

    with Machine() as m:
        x = m.empty(1)
        with pytest.raises(fanin.RaceError, match=r"a_file_that_no_call_came_from\.py:1"):
            for s in (m.stream(), m.stream()):
                sys.setprofile(seen)
                try:
                    exec(code, {"m": m, "s": s, "x": x, "fill": lambda x: None})
                finally:
                    sys.setprofile(None)
            m.synchronize()
    assert not [name for name in entered if name.endswith("_words.py")]
