"""Work that is over for one host thread because another one waited for it: the edges that the checker draws between
host threads, and those that it must not draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, explore, replay

pytestmark = pytest.mark.core


def write(v: Any) -> None:
    v.fill(1)


def read(v: Any) -> None:
    pass


def one_by_one(*steps: Callable[[Machine], Any], setup: Callable[[Machine], Any] = lambda m: None) -> None:
    """Each step on a host thread of its own, the first to its end before the second begins, without a call that shows
    this order to the checker.
    """

    def scenario(m: Machine) -> None:
        setup(m)
        for step in steps:
            m.spawn(step, m)
        m.join()

    replay(scenario, "")  # after its end the lowest thread acts first


class Kit:
    """Streams a, b, c (b: blocking), an array, what a step leaves for the next."""

    def __call__(self, m: Machine) -> None:
        self.m = m
        self.a, self.b, self.c = m.stream(), m.stream(blocking=True), m.stream()
        self.legacy = fanin.Stream("sim:0", 1)
        self.x: Any = m.array(np.zeros(4))
        m.launch(self.a, write, writes=[self.x], name="first")


def waits_for_first_write(k: Kit) -> Callable[[Machine], Any]:
    """A step after which its thread has waited for the first write."""
    return lambda m: k.a.synchronize()


def writes(k: Kit) -> Callable[[Machine], Any]:
    """A step that writes again, and so must come after the first write."""
    return lambda m: m.launch(k.c, write, writes=[k.x], name="second")


def test_a_synchronize_of_a_blocking_stream_adds_no_order_with_another_threads_work() -> None:
    k = Kit()

    def first(m: Machine) -> None:
        k.a.synchronize()
        k.b.synchronize()  # nothing is queued there: a wait for it adds no order

    def second(m: Machine) -> None:
        k.b.synchronize()
        writes(k)(m)

    with pytest.raises(fanin.RaceError, match=r"'second'.* writes what 'first'"):
        one_by_one(first, second, setup=k)


def test_queued_work_comes_after_everything_its_thread_waited_for() -> None:
    k = Kit()

    def first(m: Machine) -> None:
        k.a.synchronize()
        m.launch(k.b, read, reads=[m.array(np.zeros(1))])

    def second(m: Machine) -> None:
        k.b.synchronize()
        writes(k)(m)

    one_by_one(first, second, setup=k)


def test_a_host_read_on_a_stream_is_ordered_with_what_others_queue_there() -> None:
    k = Kit()

    def reads(m: Machine) -> None:
        with fanin.stream(k.a):
            k.x.numpy()

    def beside(m: Machine) -> None:
        m.launch(k.a, write, writes=[k.x], name="second")

    one_by_one(reads, beside, setup=k)
    one_by_one(beside, reads, setup=k)

    def scenario(m: Machine) -> None:
        k(m)
        m.spawn(reads, m)
        m.spawn(beside, m)
        m.join()

    assert explore(scenario).ok


def test_a_host_read_races_with_another_streams_write() -> None:
    k = Kit()

    def reads(m: Machine) -> None:
        with fanin.stream(k.a):
            k.x.numpy()

    def later(m: Machine) -> None:
        k.c.wait(k.first)
        writes(k)(m)

    def setup(m: Machine) -> None:
        k(m)
        k.first: Any = k.a.record()

    with pytest.raises(
        fanin.RaceError,
        match=(
            r"'second' \(stream 4 of sim:0, .*\) writes what host thread 0 .*must be queued after host thread 0 has"
            r" read"
        ),
    ):
        one_by_one(reads, later, setup=setup)
    with pytest.raises(
        fanin.RaceError, match=r"host thread 1 .* reads what 'second' .*Stream\(\"sim:0\", 4\).synchronize"
    ):
        one_by_one(later, reads, setup=setup)


@pytest.mark.parametrize("kind", ["device", "host", "small strided", "small reversed", "sparse"])
@pytest.mark.parametrize("see", ["ready", "take", "take out", "snapshot"])
def test_an_add_that_a_thread_observed_comes_before_its_next_step(kind: str, see: str) -> None:
    k = Kit()
    box: dict[str, Any] = {}

    def setup(m: Machine) -> None:
        k(m)
        box["buf"] = fanin.InputBuffer(1)
        box["buf"].expect(0, 1)
        box["g"] = {
            "device": lambda: m.array(np.ones(4)),
            "host": lambda: np.ones(4),
            "small strided": lambda: np.ones(8)[::2],
            "small reversed": lambda: np.ones(4)[::-1],
            "sparse": lambda: fanin.Sparse("coo", (np.zeros((1, 1), np.int64), np.ones(1)), (4,)),
        }[kind]()

    def first(m: Machine) -> None:
        k.a.synchronize()
        box["buf"].add(0, box["g"])

    def second(m: Machine) -> None:
        buf = box["buf"]
        if see == "ready":
            assert buf.ready(0)
        elif see == "snapshot":
            assert buf[0] is not None
        else:
            buf.take(**({"out": [m.empty(4) if kind == "device" else np.empty(4)]} if see == "take out" else {}))
        writes(k)(m)

    one_by_one(first, second, setup=setup)


def test_an_add_that_no_thread_observed_orders_nothing() -> None:
    k = Kit()
    box: dict[str, Any] = {}

    def setup(m: Machine) -> None:
        k(m)
        box["buf"], box["other"] = fanin.InputBuffer(1), fanin.InputBuffer(1)

    def first(m: Machine) -> None:
        k.a.synchronize()
        box["buf"].add(0, np.ones(4))

    def second(m: Machine) -> None:
        box["other"].add(0, np.ones(4))
        box["other"].take()
        writes(k)(m)

    with pytest.raises(fanin.RaceError):
        one_by_one(first, second, setup=setup)


def test_a_threads_result_comes_before_the_next_step_of_its_reader() -> None:
    k = Kit()

    def run(ask: bool) -> None:
        def scenario(m: Machine) -> None:
            k(m)
            first = m.spawn(waits_for_first_write(k), m)

            def second() -> None:
                if ask:
                    first.result
                writes(k)(m)

            m.spawn(second)
            m.join()

        replay(scenario, "")

    run(True)
    with pytest.raises(fanin.RaceError):
        run(False)


def test_the_last_reference_is_dropped_after_all_that_its_holders_waited_for() -> None:
    k = Kit()
    box: dict[str, Any] = {}

    def setup(m: Machine) -> None:
        k(m)
        with fanin.stream(k.c):
            buf = fanin.InputBuffer(1)  # its sum is its own memory: nothing marks what a launch does with it
            for _ in range(2):
                buf.add(0, m.array(np.ones(4)))
            (box["sum"],) = buf.take()
        k.d: Any = m.stream()
        k.d.wait(k.c)

    def first(m: Machine) -> None:
        mine = box["sum"]
        m.launch(k.d, read, reads=[mine])
        k.d.synchronize()
        del mine

    def early(m: Machine) -> None:
        m.launch(k.d, read, reads=[box["sum"]])

    def last(m: Machine) -> None:
        box.clear()

    one_by_one(first, last, setup=setup)
    with pytest.raises(fanin.RaceError, match="memory is freed"):
        one_by_one(early, last, lambda m: m.step(), setup=setup)

    def scenario(m: Machine) -> None:
        setup(m)
        m.spawn(early, m)
        m.spawn(known_c, m)
        m.spawn(last, m)
        m.join()

    def known_c(m: Machine) -> None:
        k.d.synchronize()

    report = explore(scenario)
    assert report.complete and report.races > 0 and report.runs > report.races, (
        "who lets go before the wait races, who lets go after it does not"
    )


def test_a_wait_of_the_legacy_stream_is_a_barrier_each_time() -> None:
    with Machine() as m:
        a, b, n, legacy = m.stream(blocking=True), m.stream(blocking=True), m.stream(), fanin.Stream("sim:0", 1)
        x = m.array(np.zeros(4))
        e = n.record()
        legacy.wait(e)
        m.launch(a, write, writes=[x])
        legacy.wait(e)  # it has waited for e already, but counts again between the blocking streams
        m.launch(b, read, reads=[x])


def test_no_call_that_names_the_legacy_stream_is_no_barrier() -> None:
    with pytest.raises(fanin.RaceError), Machine() as m:
        a, b, n = m.stream(blocking=True), m.stream(blocking=True), m.stream()
        x = m.array(np.zeros(4))
        n.wait(n.record())
        m.launch(a, write, writes=[x])
        m.launch(b, read, reads=[x])


def test_an_array_that_the_legacy_stream_used_is_dropped_without_a_barrier() -> None:
    with pytest.raises(fanin.RaceError), Machine() as m:
        a, b, legacy = m.stream(blocking=True), m.stream(blocking=True), fanin.Stream("sim:0", 1)
        x, y = m.array(np.zeros(4)), m.array(np.zeros(4))
        m.launch(legacy, read, reads=[y])
        m.launch(a, write, writes=[x])
        del y
        m.launch(b, read, reads=[x])


def test_an_array_that_the_legacy_stream_used_may_be_dropped_beside_a_capture() -> None:
    with Machine() as m:
        a, legacy = m.stream(blocking=True), fanin.Stream("sim:0", 1)
        x, y = m.array(np.zeros(4)), m.array(np.zeros(4))
        m.launch(legacy, write, writes=[y])
        m.begin_capture(a)
        m.launch(a, write, writes=[x])
        del y
        graph = m.end_capture(a)
        m.launch_graph(graph, a)
        a.synchronize()
        with fanin.stream(a):
            assert x.numpy().tolist() == [1, 1, 1, 1]


def test_a_drop_orders_no_stream_after_work_that_its_host_waited_for() -> None:
    k = Kit()

    def setup(m: Machine) -> None:
        k(m)
        k.y: Any = m.array(np.zeros(4))
        m.launch(k.c, read, reads=[k.y])

    def first(m: Machine) -> None:
        k.a.synchronize()
        del k.y

    with pytest.raises(fanin.RaceError):
        one_by_one(first, writes(k), setup=setup)


@pytest.mark.parametrize("case", ["two devices", "legacy", "legacy of two devices", "host", "release"])
def test_the_call_that_a_race_message_advises_fixes_the_race(case: str) -> None:
    """It names streams as their repr does, and belongs between the two operations that it names."""

    def program(advice: str) -> None:
        with Machine(2) as m:
            a = {"legacy": fanin.Stream("sim:0", 1), "legacy of two devices": fanin.Stream("sim:0", 1)}.get(
                case
            ) or m.stream(0)
            b = {"legacy of two devices": fanin.Stream("sim:1", 1), "legacy": m.stream(0)}.get(case) or m.stream(1)
            array: Any = m.array(np.zeros(4))
            if case == "release":
                with fanin.stream(a):
                    buf = fanin.InputBuffer(1)
                    for _ in range(2):
                        buf.add(0, m.array(np.ones(4)))
                    (array,) = buf.take()
                b.wait(a)
            m.launch(
                b if case == "release" else a,
                read if case == "release" else write,
                **{"reads" if case == "release" else "writes": [array]},
            )
            if advice:
                eval(advice, {"Stream": fanin.Stream, "array": array})
            if case == "host":
                array.numpy()
            elif case != "release":
                m.launch(b, read, reads=[array])
            del array

    with pytest.raises(fanin.RaceError) as raised:
        program("")
    text = str(raised.value)
    advice = text[text.rindex(" (") + 2 : -1]
    assert advice.endswith({"host": ".synchronize()", "release": ")"}.get(case, "))")), text
    program(advice)
