"""Small scenes of two host threads whose outcome hangs on their order, for the search of host orders: for each kind of
footprint one whose outcomes are fewer where that kind is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fanin
from fanin.sim import Machine
from kit import hooks


def pair(m: Machine, one: Callable[[], Any], two: Callable[[], Any]) -> tuple[Any, Any]:
    threads = [m.spawn(call) for call in (one, two)]
    m.join()
    return threads[0].result, threads[1].result


def streams(m: Machine) -> Any:
    s, ran = m.stream(), list[int]()
    pair(m, lambda: m.launch(s, lambda: ran.append(0)), lambda: m.launch(s, lambda: ran.append(1)))
    m.synchronize()
    return ran


def events(m: Machine) -> Any:
    s, e = m.stream(), m.event()
    return pair(m, lambda: e.record(s), lambda: e.stream is None)


def blocks(m: Machine) -> Any:
    x, t = m.empty(1), m.stream()
    return pair(m, lambda: x.record_stream(t), lambda: len(x.users))


def slots(m: Machine) -> Any:
    buf = fanin.InputBuffer(1)
    buf.expect(0, 1)
    return pair(m, lambda: buf.add(0, np.ones(2)), lambda: buf.ready(0))


def progress(m: Machine) -> Any:
    m.launch(m.stream(), lambda: None)
    return pair(m, m.step, m.step)


def faults(m: Machine) -> Any:
    s, t = m.stream(), m.stream()

    def record(stream: Any) -> bool:
        try:
            stream.record()
        except fanin.DeviceError:
            return False
        return True

    hooks.fail_call(m, 0)
    return pair(m, lambda: record(s), lambda: record(t))


def queued(m: Machine) -> Any:
    s = m.stream()
    return pair(m, lambda: m.launch(s, lambda: None), m.step)


def captures(m: Machine) -> Any:
    s, ran = m.stream(), list[int]()

    def capture() -> None:
        m.begin_capture(s)
        m.end_capture(s)

    pair(m, capture, lambda: m.launch(s, lambda: ran.append(1)))
    m.synchronize()
    return len(ran)


def short_memory(m: Machine) -> Any:
    kept = list[Any]()

    def take() -> bool:
        try:
            kept.append(m.empty(40_000, "uint8"))
        except fanin.DeviceOutOfMemoryError:
            return False
        return True

    return pair(m, take, take)


def streams_made(m: Machine) -> Any:
    return pair(m, m.stream, lambda: len(m.streams))[1]


def clocks(m: Machine) -> Any:
    s = m.stream()
    return pair(m, lambda: m.launch(s, lambda: None), lambda: m.clock().device_us > 0)


def ends(m: Machine) -> Any:
    one = m.spawn(lambda: 1)

    def ask() -> int:
        try:
            return one.result
        except RuntimeError:
            return 0

    two = m.spawn(ask)
    m.join()
    return two.result


def actors(m: Machine) -> Any:
    return pair(m, lambda: m.spawn(lambda: None).name, lambda: m.spawn(lambda: None).name)


def budgets(m: Machine) -> Any:
    buf = fanin.InputBuffer(2, budget=40)
    buf.add(0, np.ones(2))
    pair(m, lambda: buf.add(0, np.ones(2)), lambda: buf.add(1, np.ones(2)))
    return buf.counters.folds


def counters(m: Machine) -> Any:
    buf, before = fanin.InputBuffer(1), fanin.counters().adds
    return pair(m, lambda: buf.add(0, np.ones(2)), lambda: fanin.counters().adds - before)


def host_memory(m: Machine) -> Any:
    buf, out = fanin.InputBuffer(1), np.zeros(2)
    buf.add(0, np.ones(2))
    return pair(m, lambda: buf.take(out=[out]) and None, lambda: fanin.add_n([out, out]))[1]


def options(m: Machine) -> Any:
    """A fold is due at once where the budget was set before the buffer was made."""

    def made() -> object:
        return fanin.InputBuffer(1).budget

    def set_budget() -> None:
        fanin.set_options(budget=0)

    try:
        return pair(m, set_budget, made)
    finally:
        fanin.set_options(budget="auto")


def pools(m: Machine) -> Any:
    """A large sum takes memory from the pool, unless the pool freed it before."""
    terms = [np.ones(1 << 17)] * 2
    fanin.add_n(terms)  # its memory is kept
    before = fanin.counters().pool_hits
    kept = pair(m, lambda: fanin.add_n(terms), fanin.trim)[0]
    return fanin.counters().pool_hits - before, len(kept)


def graphs(m: Machine) -> Any:
    leaf = fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g: g, edges=[(leaf, 0)])

    def freed() -> bool:
        return node.freed

    return pair(m, lambda: fanin.backward([(node, 0, np.ones(2))]), freed)[1]


SCENES = {
    "OF_STREAM": streams,
    "OF_EVENT": events,
    "OF_BLOCK": blocks,
    "OF_MUTEX": slots,
    "OF_PROGRESS": progress,
    "OF_FAULTS": faults,
    "OF_QUEUED": queued,
    "OF_CAPTURES": captures,
    "OF_MEMORY": short_memory,
    "OF_CALLS": clocks,
    "OF_STREAMS": streams_made,
    "OF_THREAD": ends,
    "OF_ACTORS": actors,
    "OF_BUDGET": budgets,
    "OF_COUNTERS": counters,
    "OF_HOST": host_memory,
    "OF_OPTIONS": options,
    "OF_POOL": pools,
    "OF_GRAPH": graphs,
}
