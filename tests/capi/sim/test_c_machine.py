"""A simulated machine from C (docs/c-api.md): an engine in C is proved on it, by itself or under `explore`."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fanin import sim
from fanin.sim import explore
from kit import c_api
from kit.c_api import Buffer, Failed, Machine, Stream, Value, after, api, read

pytestmark = pytest.mark.core

F = np.float32
SCHEDULES = {"seeded": 0, "fifo": 1, "lifo": 2, "round robin": 4}


@pytest.fixture
def m() -> Iterator[Machine]:
    made = Machine(devices=2)
    yield made
    made.close()


def fill(x: Any, by: float) -> None:
    x[:] = by


def produced(m: Machine, s: Stream, by: float) -> Value:
    v = m.array(np.zeros(4, F))
    m.launch(s, lambda x: fill(x, by), writes=[v], name=f"make {by}")
    return v


@pytest.mark.rule("S18")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_two_streams_meet_without_a_race(schedule: str, seed: int) -> None:
    m = Machine(devices=1, seed=seed, schedule=SCHEDULES[schedule])
    one, two, taker = m.stream(), m.stream(), m.stream()
    b = Buffer(1)
    for s, by in ((one, 1.0), (two, 2.0), (one, 3.0)):
        v = produced(m, s, by)
        b.add(0, v, stream=s)
        api.drop(ct.byref(v))
    assert b.counters()["events"] > 0
    got = b.take_values(0, stream=taker)
    assert (got.device_type, got.device_id) == (12, 0)
    assert read(got, taker).tolist() == [6] * 4 and api.machine_races(m.at) == 0 and m.released == 3
    b.free()
    m.close()


def test_a_wait_that_is_missing_is_a_race(m: Machine) -> None:
    one, two = m.stream(), m.stream()
    v = produced(m, one, 1.0)
    with pytest.raises(Failed, match=r"race on 16 bytes of sim:0: 'use' .*'make 1.0'.*missing: stream") as e:
        m.launch(two, lambda x: None, reads=[v], name="use")
    assert e.value.status == c_api.RACE and api.machine_races(m.at) == 1
    after(two, one)
    m.launch(two, lambda x: None, reads=[v], name="use")
    m.synchronize()
    assert m.released == 2 and api.machine_races(m.at) == 1
    api.drop(ct.byref(v))


def test_a_kernel_that_fails_fails_the_call_that_runs_it(m: Machine) -> None:
    s = m.stream()
    v = m.array(np.zeros(4, F))
    m.launch(s, lambda x: c_api.VALUE, writes=[v], name="bad")
    with pytest.raises(Failed, match="the kernel 'bad' failed"):
        m.synchronize()
    assert m.released == 1
    api.drop(ct.byref(v))


def test_a_buffer_that_no_stream_was_named_to_uses_the_current_one(m: Machine) -> None:
    b, v = Buffer(1), m.array(np.ones(4, F), device=1)
    b.add(0, v)
    b.add(0, v)
    api.drop(ct.byref(v))
    got = b.take_values(0)
    assert got.device_id == 1 and read(got).tolist() == [2] * 4
    b.free()


def test_an_object_of_no_machine_is_refused(m: Machine) -> None:
    s, host = m.stream(), c_api.value(np.zeros(4, F))
    with pytest.raises(Failed, match="read 0 is no array of this machine"):
        m.launch(s, lambda x: None, reads=[host])
    with pytest.raises(Failed, match="the CPU has no streams"):
        v = m.array(np.zeros(4, F))
        m.launch(Stream(device_type=1), lambda x: None, writes=[v])
    with pytest.raises(Failed, match="no device 7"):
        m.array(np.zeros(4, F), device=7)
    with pytest.raises(Failed, match="there is no schedule 3"):
        Machine(schedule=3)
    with pytest.raises(Failed, match="value_read: the value is float32 of shape"):
        c_api.call("value_read", ct.byref(v), None, ct.byref(c_api.view(np.zeros(3, F))))
    with pytest.raises(Failed, match="expected a stream, got NULL"):
        c_api.call("stream_sync", None)
    c_api.call("stream_sync", ct.byref(s))
    assert m.released == 0
    for x in (host, v):
        api.drop(ct.byref(x))
    m.close()
    with pytest.raises(Failed, match="has entered no simulated machine"):
        Machine(entered=True)


@pytest.mark.threads
@pytest.mark.parametrize("seed", range(6))
def test_spawned_threads_fill_a_buffer_in_turns(seed: int) -> None:
    m = Machine(seed=seed)
    b, streams = Buffer(2), [m.stream() for _ in range(3)]
    kept: list[Any] = []

    def producer(i: int) -> None:
        v = produced(m, streams[i], float(i + 1))
        b.add(0, v, key=i, stream=streams[i])
        x = np.full(4, 0.5, F)
        kept.append(x)
        b.add(1, x)
        api.drop(ct.byref(v))

    for i in range(3):
        m.spawn(lambda i=i: producer(i))
    m.join()
    got = b.take_values()
    assert read(got[0]).tolist() == [6] * 4 and c_api.dropped(got[1]).tolist() == [1.5] * 4
    assert api.machine_races(m.at) == 0
    b.free()
    m.close()


def test_explore_searches_the_orders_of_threads_that_call_the_c_api() -> None:
    def scenario(m: sim.Machine) -> list[float]:
        c, b = Machine(entered=True), Buffer(1)
        streams = [c.stream() for _ in range(2)]

        def producer(i: int) -> None:
            v = produced(c, streams[i], float(i + 1))
            b.add(0, v, key=i, stream=streams[i])
            api.drop(ct.byref(v))

        for i in range(2):
            m.spawn(producer, i)
        m.join()
        got: list[float] = read(b.take_values(0)).tolist()
        b.free()
        c.close()
        return got

    report = explore(scenario)
    assert report.ok and report.complete and report.runs > 1


def test_explore_finds_that_a_take_which_does_not_wait_for_all_differs() -> None:
    """The planted fault: the consumer takes an incomplete sum; some orders give another sum."""

    def scenario(m: sim.Machine) -> list[Any]:
        b, x, got = Buffer(1), np.ones(2, F), []  # type: tuple[Buffer, Any, list[Any]]

        def consumer() -> None:
            s = b.take(0)
            got.append(None if s is None else s.tolist())

        m.spawn(b.add, 0, x)
        m.spawn(consumer)
        m.join()
        b.free()
        return got

    report = explore(scenario)
    assert not report.ok and report.runs > 1
