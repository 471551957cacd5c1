"""The memory of a simulated machine: everything that was dropped is freed, and repeated work needs no more memory from
turn to turn.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin.sim import Machine
from kit import hooks
from kit.prepared import run_prepared

pytestmark = pytest.mark.core


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def bytes_in_use() -> int:
    """Bytes that the C library's heap has handed out."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("the C library does not say what is in use: no mallinfo2")
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def blocks_in_use() -> int:
    gc.collect()
    return hooks.memory()[0]


def growth(turn: Callable[[], object], n: int = 200) -> tuple[float, float]:
    """Blocks of the core's and bytes of the heap that a turn leaks, after as many turns that warm it up."""
    for _ in range(n):
        turn()
    blocks, size = blocks_in_use(), bytes_in_use()
    for _ in range(n):
        turn()
    return (blocks_in_use() - blocks) / n, (bytes_in_use() - size) / n


@pytest.fixture
def m() -> Iterator[Machine]:
    with Machine(1) as m:
        yield m


def test_a_dropped_event_is_freed(m: Machine, sanitized: str) -> None:
    s = m.stream()

    def turn() -> None:
        e = m.event()
        e.record(s)
        s.wait(e)
        fanin.Event("sim:0")
        m.synchronize()

    blocks, size = growth(turn)
    assert blocks == 0
    assert sanitized or size < 16


def test_a_dropped_event_of_a_driver_is_destroyed() -> None:
    d = FakeDriver(1)
    with use_driver(d.path):
        s = d.stream()
        fanin.Event("cuda:0").record(s)
        before = d.live("events")
        for _ in range(100):
            e = fanin.Event("cuda:0")
            e.record(s)
            s.wait(e)
            del e
            assert d.live("events") == before
        held = [fanin.Event("cuda:0") for _ in range(5)]
        assert d.live("events") == before + 5
        held.clear()
        assert d.live("events") == before


def test_a_dropped_stream_is_freed(m: Machine, sanitized: str) -> None:
    def turn() -> None:
        t, y = m.stream(), m.array(np.zeros(4))
        m.launch(t, lambda v: None, reads=[y])
        t.synchronize()

    blocks, size = growth(turn)
    assert blocks == 0
    assert sanitized or size < 16
    assert m.streams == ()


def test_a_stream_that_is_kept_costs_a_kilobyte(m: Machine, sanitized: str) -> None:
    kept: list[Any] = []
    blocks, size = growth(lambda: kept.append(m.stream()), 1000)
    assert m.streams == tuple(kept)
    assert blocks <= 3
    assert sanitized or size < 1000


def test_a_dropped_stream_has_run_its_queued_work(m: Machine) -> None:
    x = m.array(np.zeros(4))
    m.launch(m.stream(), lambda v: v.fill(1), writes=[x])
    m.synchronize()
    assert x.numpy().tolist() == [1, 1, 1, 1]


def test_a_new_graph_in_each_turn_needs_no_more_memory(m: Machine, sanitized: str) -> None:
    s, t, x = m.stream(), m.stream(), m.array(np.zeros(4))

    def turn() -> None:
        m.begin_capture(s)
        m.launch(s, lambda v: None, writes=[x])
        t.wait(s)
        m.launch(t, lambda v: None, reads=[x])
        s.wait(t)
        m.launch_graph(m.end_capture(s), s)
        s.synchronize()

    blocks, size = growth(turn)
    assert blocks == 0
    assert sanitized or size < 16


def cycles() -> dict[str, Callable[[Machine], None]]:
    def queued(m: Machine) -> None:
        m.launch(m.stream(), lambda: m)

    def captured(m: Machine) -> None:
        s = m.stream()
        m.begin_capture(s)
        m.launch(s, lambda: m)
        m.graph = m.end_capture(s)  # type: ignore[attr-defined]

    def graph_alone(m: Machine) -> None:
        s, kept = m.stream(), []  # type: ignore[var-annotated]
        m.begin_capture(s)
        m.launch(s, lambda: kept)
        kept.append(m.end_capture(s))

    def on_its_way(m: Machine) -> None:
        s = m.stream()
        m.begin_capture(s)
        m.launch(s, lambda: m)
        m.launch_graph(m.end_capture(s), s)

    def capturing(m: Machine) -> None:
        s = m.stream()
        m.begin_capture(s)
        m.launch(s, lambda: m)

    return {f.__name__: f for f in (queued, captured, graph_alone, on_its_way, capturing)}


@pytest.mark.parametrize("cycle", cycles())
def test_a_machine_in_a_cycle_is_collected(cycle: str) -> None:
    def make() -> weakref.ref[Machine]:
        m = Machine(1)
        cycles()[cycle](m)
        return weakref.ref(m)

    make()
    before = blocks_in_use()
    gc.disable()
    try:
        gone = make()
        assert gone() is not None, "it is in no cycle: the test tests nothing"
    finally:
        gc.enable()
    gc.collect()
    assert gone() is None
    assert blocks_in_use() == before, "the machine's memory is still there"


def test_a_referenced_machine_is_not_collected() -> None:
    m = Machine(1)
    s, x = m.stream(), m.array(np.zeros(1))
    m.launch(s, lambda v: v.fill(1) or m, writes=[x])
    gc.collect()
    m.synchronize()
    assert x.numpy() == 1


def test_an_error_reports_work_that_was_lost_with_its_machine() -> None:
    def make() -> Any:
        m = Machine(1)
        s, x = m.stream(), m.array(np.zeros(1))
        m.launch(s, lambda v: v.fill(1) or m, writes=[x], name="fill")
        return s

    s = make()
    gc.collect()
    with pytest.raises(RuntimeError, match="kernel 'fill' cannot run: its machine was collected"):
        s.synchronize()


def test_a_graph_is_launched_on_its_own_machine(m: Machine) -> None:
    other = Machine(1)
    s, t = m.stream(), other.stream()
    m.begin_capture(s)
    graph = m.end_capture(s)
    with pytest.raises(ValueError, match="another machine"):
        other.launch_graph(graph, t)
    with pytest.raises(TypeError, match="expected a graph"):
        m.launch_graph(3, s)
    assert repr(graph) == f"<fanin.sim graph of {m!r}>"


@pytest.mark.parametrize("producers", [1, 2])
@pytest.mark.parametrize("device", [0, 1])
def test_a_snapshot_frees_its_events_across_devices_too(producers: int, device: int, sanitized: str) -> None:
    with Machine(2) as m:
        streams, c = [m.stream(0) for _ in range(producers)], m.stream(device)
        buf = fanin.InputBuffer(1, stream=c)
        for s in streams:
            buf.add(0, m.array(np.ones(4)), stream=s)

        def turn() -> None:
            assert buf[0] is not None
            m.synchronize()

        blocks, size = growth(turn, 50)
        assert blocks == 0
        assert sanitized or size < 64
        buf.clear()


def test_freed_memory_keeps_none_of_its_values() -> None:
    with Machine(1) as m:
        x = m.array(np.full(64, 7.0))
        m.synchronize()
        del x
        y = m.empty(64)
        m.synchronize()
        assert 7.0 not in y.numpy(), "who reads it too late must not find what was there"


def test_a_machine_with_more_streams_than_fit_in_a_clock_frees_all_its_memory() -> None:
    gc.collect()
    before = hooks.blocks()
    with Machine(1) as m:
        for s in [m.stream() for _ in range(40)]:
            x = m.empty(4)
            m.launch(s, lambda x: x.fill(1), writes=[x])
            s.synchronize()
            with fanin.stream(s):
                assert x.numpy().tolist() == [1] * 4
    del m, s, x
    gc.collect()
    assert hooks.blocks() <= before


def test_a_machine_with_host_threads_frees_all_its_memory() -> None:
    def act() -> None:
        with Machine(1) as m:
            buf = fanin.InputBuffer(1)
            for _ in range(2):
                m.spawn(buf.add, 0, np.ones(4))
            m.join()
            assert buf.take()[0].tolist() == [2] * 4

    act()
    gc.collect()
    before = hooks.blocks()
    act()
    gc.collect()
    assert hooks.blocks() == before


def test_memory_dropped_in_a_capture_drops_its_machine() -> None:
    def one() -> None:
        with Machine() as m:
            s, x = m.stream(), m.array(np.zeros(4))
            m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x])
            m.begin_capture(s)
            m.launch(s, lambda v: np.add(v, 1, out=v), writes=[x])
            del x
            m.end_capture(s)

    one()
    before = blocks_in_use()
    for _ in range(3):
        one()
    assert blocks_in_use() == before


#: Every method of an object of one machine, called with each kind of object of another: which calls were accepted.
STRANGERS = """
import os, sys
import numpy as np
import fanin
from fanin import _core

if sys.argv[1:]:
    _core._test_fault(sys.argv[1])

def things(machine):
    stream = machine.stream()
    return {"stream": stream, "array": machine.array(np.ones(3)), "event": stream.record()}

#: An array has a dtype; slots without a device take what comes; a node's function may be called with anything.
MAY = {("machine", "empty", "array"), ("buffer", "add", "array"), ("buffer", "take", "stream"),
       ("node", "fn", "stream"), ("node", "fn", "array"), ("node", "fn", "event")}
one, other = fanin.sim.Machine(devices=1), fanin.sim.Machine(devices=1)
with one, other:
    own, strange = things(one), things(other)
    owners = {**own, "machine": one, "buffer": fanin.InputBuffer(1), "node": fanin.Node(lambda g: g, 1),
              "leaf": fanin.Leaf(own["array"])}
    tried, found = 0, set()
    for owner, o in owners.items():
        for name in dir(o):
            if name.startswith("_") or not callable(method := getattr(o, name, None)):
                continue
            for kind, x in strange.items():
                for args in ((x,), (0, x), (x, 0)):
                    tried += 1
                    try:
                        method(*args)
                    except Exception:
                        continue
                    found.add((owner, name, kind))
    print(tried > 300, sorted(found - MAY), flush=True)
    os._exit(0)  # what was accepted wrongly would be used when the machines end
"""


def test_no_object_of_a_machine_takes_one_of_another() -> None:
    assert run_prepared(STRANGERS).stdout == "True []\n"


def test_a_method_that_takes_a_stream_of_another_machine_is_found() -> None:
    hooks.memory()  # skips in a release
    found = run_prepared(STRANGERS, "USER_OF_ANOTHER_MACHINE").stdout
    assert found == "True [('array', 'record_stream', 'stream')]\n"


#: Every public call with a parameter for a stream, and every call on one, after the block of the stream's machine.
CLOSED = """
import os, re, sys
import numpy as np
import fanin
from fanin import _core
from kit.fuzz import entries

if sys.argv[1:]:
    _core._test_fault(sys.argv[1])

machine, results = fanin.sim.Machine(devices=1), {}
with machine:
    stream = machine.stream()
    machine.begin_capture(stream)
    own = {"Stream": stream, "Graph": machine.end_capture(stream), "Event": stream.record(), "Machine": machine,
           "StreamLike | Event": stream.record(),
           "Array": machine.array(np.ones(3)), "InputBuffer": fanin.InputBuffer([fanin.Slot(shape=(3,), dtype=float)]),
           "object": machine.array(np.ones(3)), "Sequence[object]": [machine.array(np.ones(3))], "int": 0,
           "_A": np.ones(3), "Sequence[int]": [0], "Callable[..., object]": print, "int | Iterable[object]": 1}

def result(entry, parameter):
    places, names = [], {}
    for name, _, annotation, default in entry.parameters:
        if name == parameter and default:
            names[name] = stream
        elif not default:
            places.append(stream if name == parameter else own[annotation.removeprefix("_core.")])
    try:
        owner = own.get(entry.owner.__name__, entry.owner)
        x = entry.owner(*places, **names) if entry.name == "__init__" else getattr(owner, entry.name)(*places, **names)
        if hasattr(x, "__enter__"):
            x.__enter__()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "accepted"

for entry in entries().values():
    if parameters := [name for name, _, annotation, _ in entry.parameters if "Stream" in annotation]:
        results[f"{entry}, {parameters[0]}"] = result(entry, parameters[0])
    if entry.owner is fanin.Stream and entry.kind == "method" and not entry.name.startswith("__"):
        results[f"{entry}, self"] = result(entry, "")
results["InputBuffer.add, gradient"] = result(entries()["InputBuffer.add"], "")
words = "stream [12] of sim:0 is closed: the block of its machine has ended; use it within the block"
others = {call: x for call, x in results.items() if not re.match("RuntimeError: .*" + words, x)}
print(len(results), others, flush=True)
os._exit(0)
"""


def test_no_public_call_takes_a_stream_after_the_block_of_its_machine() -> None:
    tried, others = run_prepared(CLOSED).stdout.split(" ", 1)
    assert int(tried) >= 19
    assert ast.literal_eval(others) == {"Stream.synchronize, self": "accepted"}  # it queues nothing


def test_a_call_that_takes_a_stream_after_the_block_of_its_machine_is_found() -> None:
    hooks.memory()  # skips in a release
    _, others = run_prepared(CLOSED, "STREAM_STAYS_OPEN").stdout.split(" ", 1)
    assert ast.literal_eval(others).keys() >= {
        "InputBuffer.add, stream",
        "InputBuffer.add, gradient",
        "Stream.record, self",
    }


def test_results_of_a_closed_machine_can_be_read_and_its_streams_are_open_in_another_block() -> None:
    buf = fanin.InputBuffer(1)
    with Machine(1) as m:
        s, x = m.stream(), m.array(np.ones(3))
        buf.add(0, x, stream=s)
    with pytest.raises(RuntimeError, match="stream 2 of sim:0 is closed"):
        buf.add(0, x, stream=s)
    assert x.numpy().tolist() == buf.take()[0].numpy().tolist() == [1] * 3
    with m:
        buf.add(0, x, stream=s)
        assert buf.take()[0].numpy().tolist() == [1] * 3


def test_a_machine_is_open_while_any_of_its_threads_is_in_its_block_and_before_the_first() -> None:
    m = Machine(1)
    s = m.stream()
    s.record()
    with m:
        with m:
            pass
        s.record()
    with pytest.raises(RuntimeError, match="is closed"):
        s.record()


def test_record_stream_names_the_stream_of_another_machine() -> None:
    words = "stream 2 of sim:0 belongs to another machine than the memory"
    with Machine(devices=1) as one, Machine(devices=1) as other, pytest.raises(ValueError, match=words):
        one.array(np.ones(3)).record_stream(other.stream())
