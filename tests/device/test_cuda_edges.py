"""The CUDA backend at its edges, on the fake driver: destroyed streams, broken captures, failed allocations,
forks, numbers that do not fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from kit.prepared import run_prepared
from kit.standins import ProtocolStream

pytestmark = pytest.mark.core

MIB = 1 << 20


def destroy(driver: FakeDriver, s: fanin.Stream) -> None:
    with driver.context():
        driver.call("cuStreamDestroy_v2", ctypes.c_void_p(s.handle))


# Streams and devices


def test_a_destroyed_stream_is_an_error_and_loses_no_device(driver: FakeDriver) -> None:
    """CUDA's code for it is that of a destroyed context; the backend queries the context."""
    s, t = driver.stream(), driver.stream()
    x = driver.array(np.ones(4))
    buf = fanin.InputBuffer(1, stream=t)
    destroy(driver, s)
    for act in (s.record, s.synchronize, lambda: buf.add(0, x, stream=s), lambda: driver.stream().wait(s)):
        with pytest.raises(
            fanin.DeviceError, match=r"CONTEXT_IS_DESTROYED \(709\).*Was a stream destroyed|was destroyed"
        ) as outcomes:
            act()
        assert outcomes.value.code == 709
        buf.clear()
    buf.add(0, x, stream=t)
    buf.add(0, x, stream=t)
    with fanin.stream(t):
        assert buf.take()[0].numpy().tolist() == [2] * 4


def test_a_destroyed_streams_handle_is_not_queried_twice_and_may_be_another_streams(driver: FakeDriver) -> None:
    s = driver.stream()
    destroy(driver, s)
    with pytest.raises(fanin.DeviceError):
        s.record()
    calls = driver.calls("StreamGetCaptureInfo")
    for _ in range(3):
        with pytest.raises(fanin.DeviceError, match="was destroyed: keep a stream until"):
            s.record()
    assert driver.calls("StreamGetCaptureInfo") == calls
    with pytest.raises(fanin.DeviceError, match="709"):  # it is requested again
        fanin.Stream("cuda:0", s.handle)


@pytest.mark.parametrize("pools", [False, True])
def test_memory_that_a_destroyed_stream_used_is_freed_on_request(a_world: Any, pools: bool) -> None:
    """Only a wait for the whole device would show that nothing runs there any more, and that breaks every capture."""
    driver = a_world("fake", 1, memory=4 * MIB).driver
    driver.set(pools=pools)
    s, t = driver.stream(), driver.stream()
    keep, used = ([driver.array(np.ones(MIB // 8)) for _ in range(2)] for _ in range(2))
    for x in used:
        driver.launch(s, lambda v: v.fill(1), writes=[x])
    destroy(driver, s)
    del used, x
    gc.collect()
    buf = fanin.InputBuffer(1, stream=t)
    for g in keep:
        buf.add(0, g, stream=t)
    with pytest.raises(fanin.DeviceOutOfMemoryError):
        buf.take()
    assert driver.calls("CtxSynchronize") == 0
    fanin.trim()
    assert driver.calls("CtxSynchronize") == 1
    buf.clear()
    for g in keep:
        buf.add(0, g, stream=t)
    with fanin.stream(t):
        assert buf.take()[0].numpy().tolist() == [2] * (MIB // 8)
    del buf, keep, g
    gc.collect()


def test_a_device_lost_during_its_initialisation_is_not_queried_again(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.world.device_is_lost()
    driver.fail(0, 700, call="ModuleLoadData", sticky=True)
    with pytest.raises(fanin.DeviceError, match="ILLEGAL_ADDRESS"):
        fanin.Stream("cuda:0", 1)
    calls = driver.calls()
    for _ in range(3):
        with pytest.raises(fanin.DeviceError, match="lost by an earlier failure"):
            fanin.Stream("cuda:0", 1)
    assert driver.calls() == calls


def test_an_event_of_a_lost_device_is_not_waited_for_on_another(driver: FakeDriver) -> None:
    s, t = driver.stream(0), driver.stream(1)
    e = s.record()
    driver.world.device_is_lost()
    driver.fail(0, 700, call="EventRecord", sticky=True)
    with pytest.raises(fanin.DeviceError):
        s.record()
    waits = driver.calls("StreamWaitEvent")
    with pytest.raises(fanin.DeviceError, match="cuda:0 was lost"):
        t.wait(e)
    assert driver.calls("StreamWaitEvent") == waits
    t.record().synchronize()


def test_finding_a_handles_device_begins_no_other_device() -> None:
    """A context costs time, and memory of an unused device."""
    driver = FakeDriver(4)
    with use_driver(driver), driver.context(2):
        made = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(made), 1)
        assert driver.live("contexts") == 1
        with fanin.stream(ProtocolStream((0, made.value))) as s:
            assert s.device == "cuda:2"
        assert driver.live("contexts") == 2  # the test's and ours, of the same one
    del s
    gc.collect()


def test_a_driver_may_lie_under_a_long_path(tmp_path: Path) -> None:
    driver = FakeDriver(1)
    folder = tmp_path / ("a" * 200) / ("b" * 200)
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").symlink_to(driver.path)
    with use_driver(folder / "libcuda.so.1"):
        assert fanin.Stream("cuda:0", 1).device == "cuda:0"
    gc.collect()


@pytest.mark.parametrize("number", [2**31, 2**32, 2**32 + 1, 2**64, 10**30])
def test_a_device_number_that_fits_no_int_is_no_other_device(driver: FakeDriver, number: int) -> None:
    with pytest.raises(ValueError, match=f"there is no cuda:{number}: no machine has so many"):
        fanin.Stream(f"cuda:{number}", 1)


# Captures


def test_an_event_of_a_capture_is_not_queried_and_the_capture_continues(driver: FakeDriver) -> None:
    s, x = driver.stream(), driver.array(np.ones(4))
    driver.begin_capture(s)
    driver.launch(s, lambda v: np.multiply(v, 2, out=v), writes=[x])
    e = s.record()
    for ask in (e.query, e.synchronize):
        with pytest.raises(fanin.CaptureError, match="on a captured stream of cuda:0: it has no time"):
            ask()
    driver.launch_graph(driver.end_capture(s), s)
    with fanin.stream(s):
        assert x.numpy().tolist() == [2] * 4


def test_the_legacy_stream_is_refused_beside_a_captured_blocking_stream_and_the_capture_continues(
    driver: FakeDriver,
) -> None:
    """Work on it would break the capture; a query does not."""
    b = driver.stream(blocking=True)
    legacy = fanin.Stream("cuda:0", 1)
    x, y = driver.array(np.ones(4)), driver.array(np.ones(4))
    buf = fanin.InputBuffer(1, stream=legacy)
    driver.begin_capture(b)

    def total() -> None:
        buf.add(0, x, stream=legacy)
        buf.add(0, y, stream=legacy)
        buf.take()

    for act in (legacy.record, legacy.synchronize, total, lambda: y.numpy()):
        with pytest.raises(fanin.CaptureError, match=r"\(906\).*use other streams"):
            act()
        buf.clear()
    driver.launch(b, lambda v: np.multiply(v, 2, out=v), writes=[x])
    driver.launch_graph(driver.end_capture(b), b)
    assert x.numpy().tolist() == [2] * 4


@pytest.mark.parametrize("known", [False, True])
def test_another_threads_own_stream_is_waited_for_beside_a_capture(driver: FakeDriver, known: bool) -> None:
    """By the legacy stream, which waits for all such streams: to wait for the device would break every capture, of
    streams outside of fanin too.
    """
    theirs: list[fanin.Stream] = []
    x, y = driver.array(np.ones(4)), driver.array(np.ones(4))

    def their_work() -> None:
        theirs.append(fanin.Stream("cuda:0", 2))
        driver.launch(theirs[0], lambda v: v.fill(5), writes=[y])

    thread = threading.Thread(target=their_work)
    thread.start()
    thread.join()
    made = ctypes.c_void_p()
    with driver.context():
        driver.call("cuStreamCreate", ctypes.byref(made), 1)
    c = fanin.Stream("cuda:0", made.value or 0) if known else None
    with driver.context():
        driver.call("cuStreamBeginCapture_v2", made, 0)
    theirs[0].synchronize()
    assert y.numpy().tolist() == [5] * 4
    graph = ctypes.c_void_p()
    with driver.context():
        driver.call("cuStreamEndCapture", made, ctypes.byref(graph))  # whole
        driver.call("cuGraphDestroy", graph)
        driver.call("cuStreamDestroy_v2", made)
    assert driver.calls("CtxSynchronize") == 0 and x.numpy().tolist() == [1] * 4
    del c


def test_beside_a_captured_blocking_stream_another_threads_own_stream_cannot_be_waited_for(driver: FakeDriver) -> None:
    theirs: list[fanin.Stream] = []
    thread = threading.Thread(target=lambda: theirs.append(fanin.Stream("cuda:0", 2)))
    thread.start()
    thread.join()
    c, x = driver.stream(blocking=True), driver.array(np.ones(4))
    driver.begin_capture(c)
    with pytest.raises(fanin.CaptureError, match=r"\(906\).*use other streams"):
        theirs[0].synchronize()
    driver.launch(c, lambda v: np.multiply(v, 2, out=v), writes=[x])
    driver.launch_graph(driver.end_capture(c), c)
    theirs[0].synchronize()
    assert x.numpy().tolist() == [2] * 4


def test_a_broken_capture_is_an_error_before_more_work_reaches_the_driver(driver: FakeDriver) -> None:
    s = driver.stream()
    x = driver.array(np.ones(4))
    driver.begin_capture(s)
    with pytest.raises(Exception, match="900"), driver.context():
        driver.call("cuStreamSynchronize", ctypes.c_void_p(s.handle))
    calls = {
        name: driver.calls(name) for name in ("EventRecord", "LaunchKernel", "StreamWaitEvent", "MemAllocFromPoolAsync")
    }
    buf = fanin.InputBuffer(1, stream=s)

    def total() -> None:
        buf.add(0, x, stream=s)
        buf.add(0, x, stream=s)
        buf.take()

    for act in (s.record, total):
        with pytest.raises(
            fanin.CaptureError, match="an earlier violation has ended this capture: end it and begin again"
        ):
            act()
    assert {name: driver.calls(name) for name in calls} == calls
    with pytest.raises(Exception, match="901"):
        driver.end_capture(s)


@pytest.mark.rule("K3")
@pytest.mark.parametrize("call", ["UserObjectCreate", "GraphRetainUserObject"])
def test_memory_whose_registration_with_a_graph_failed_is_registered_by_the_next_job(
    driver: FakeDriver, call: str
) -> None:
    c = driver.stream()
    x, y = driver.array(np.full(8, 3.0)), driver.array(np.full(8, 4.0))
    driver.begin_capture(c)
    buf = fanin.InputBuffer(1, stream=c)
    driver.fail(1, 701, call=call)  # of x; the first is the sum's
    with pytest.raises(fanin.DeviceError, match=call):
        buf.add(0, x, stream=c)
        buf.add(0, y, stream=c)
        buf.take()
    buf.clear()
    buf.add(0, x, stream=c)
    buf.add(0, y, stream=c)
    total = buf.take()[0]
    graph = driver.end_capture(c)
    driver.array(np.zeros(1))  # what was left by the failed one goes
    live = driver.live()
    del x, y
    gc.collect()
    driver.array(np.zeros(1))
    assert driver.live() == live, "a graph reads memory that was given back"
    driver.launch_graph(graph, c)
    with fanin.stream(c):
        assert total.numpy().tolist() == [7] * 8
    driver.destroy_graph(graph)


def test_scratch_memory_without_pools_is_freed_during_the_capture_of_another_stream(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.set(pools=False)
    c, t = driver.stream(), driver.stream()
    x = driver.array(np.arange(8.0))
    every_second = x.reshape(4, 2).T
    driver.begin_capture(c)
    gapped = driver.array(np.arange(8.0)) if False else every_second
    with fanin.stream(t):
        assert gapped.numpy().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    wide = [driver.array(np.ones(4, "f4")) for _ in range(3)]
    buf = fanin.InputBuffer([fanin.Slot(accumulate="float64")], stream=t)
    for k, g in enumerate([*wide, *wide] * 100):
        buf.add(0, g, key=k, stream=t)
    total = buf.take()[0]
    driver.end_capture(c)
    with fanin.stream(t):
        assert total.numpy().tolist() == [600] * 4
    gc.collect()


# Memory


@pytest.mark.rule("K2")
def test_a_failed_allocation_inside_a_capture_is_an_error_without_a_query_or_wait(a_world: Any) -> None:
    driver = a_world("fake", 1, memory=4 * MIB).driver
    c, q = driver.stream(), driver.stream()
    x, y = driver.array(np.ones(MIB // 8)), driver.array(np.ones(MIB // 8))
    gone = driver.array(np.ones(MIB // 8))
    driver.launch(q, lambda v: v.fill(1), writes=[gone])
    del gone
    gc.collect()
    fill = [driver.empty(MIB // 8)]
    driver.begin_capture(c)
    calls = {name: driver.calls(name) for name in ("EventQuery", "EventSynchronize", "StreamSynchronize")}
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, x, stream=c)
    buf.add(0, y, stream=c)
    with pytest.raises(fanin.DeviceOutOfMemoryError):
        buf.take()
    assert {name: driver.calls(name) for name in calls} == calls
    driver.end_capture(c)  # which is whole
    del fill
    driver.synchronize()
    gc.collect()


@pytest.mark.parametrize("captured", [0, 1])
def test_a_failed_allocation_waits_for_memory_unless_a_stream_is_captured(a_world: Any, captured: int) -> None:
    driver = a_world("fake", 1, memory=4 * MIB).driver
    driver.set(pools=False)
    c, q = driver.stream(), driver.stream()
    keep, leave = ([driver.array(np.ones(MIB // 8)) for _ in range(2)] for _ in range(2))
    driver.launch(q, lambda v: v.fill(1), writes=[leave[1 - captured]])
    driver.begin_capture(c)
    driver.launch(c, lambda v: v.fill(1), writes=[leave[captured]])
    for _ in range(2):
        del leave[0]  # in this order
        gc.collect()
    buf = fanin.InputBuffer(1, stream=q)
    for x in keep:
        buf.add(0, x, stream=q)
    waits = driver.calls("EventSynchronize")
    total = buf.take()[0]
    assert driver.calls("EventSynchronize") == waits + 1, "it was not short"
    driver.end_capture(c)
    with fanin.stream(q):
        assert total.numpy().tolist() == [2] * (MIB // 8)
    del buf, total, keep
    driver.synchronize()
    gc.collect()


def test_a_failed_allocation_of_a_replaced_driver_is_an_error_though_some_memory_is_never_freed() -> None:
    done = run_prepared(
        "import gc, numpy as np, fanin\n"
        "from fake_cuda import FakeDriver, use_driver\n"
        "driver = FakeDriver(1, memory=1 << 20)\n"
        "with use_driver(driver):\n"
        "    c = driver.stream()\n"
        "    x, y = driver.array(np.ones(4)), driver.array(np.ones(1 << 16))\n"
        "    driver.begin_capture(c)\n"
        "    driver.launch(c, lambda v: v.fill(1), writes=[x])\n"
        "    del x\n"
        "    gc.collect()\n"
        "try:\n"
        "    keep = [y.__dlpack__(copy=True) for _ in range(4)]\n"
        "except fanin.DeviceOutOfMemoryError:\n"
        "    print('told')\n",
    )
    assert done.stdout.strip() == "told", done.stderr


@pytest.mark.parametrize("streams", [33, 65, 100])
def test_memory_that_many_streams_used_is_reused_after_all_of_them(driver: FakeDriver, streams: int) -> None:
    x = driver.array(np.zeros(64))
    used = [driver.stream() for _ in range(streams)]
    for s in used:
        driver.launch(s, lambda v: v.sum(), reads=[x])
    c = driver.stream()
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, x, stream=used[0], donate=True)
    address = x.address
    del x
    buf.add(0, driver.array(np.ones(64)), stream=c)
    total = buf.take()[0]
    assert total.address == address  # else this shows nothing
    assert len(total.users) > streams
    consumer = driver.stream()
    total.__dlpack__(stream=consumer.handle)
    driver.launch(consumer, lambda v: v.fill(5), writes=[total])


def sum_in_turns(driver: FakeDriver, call: int, sparse_first: bool, stats: bool) -> str:
    """Dense and sparse in turn, in place; launch number `call` finds no memory. What became of the slot."""
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s, budget=80, stats=stats)
    dense = [driver.array(np.full(6, v, "f4")) for v in (1, 10, 100)]
    sparse = [
        fanin.Sparse("coo", (driver.array(np.array([[k]])), driver.array(np.array([1000.0 * 10**k], "f4"))), (6,))
        for k in range(2)
    ]
    order = (
        [sparse[0], dense[0], dense[1], sparse[1], dense[2]]
        if sparse_first
        else [dense[0], sparse[0], dense[1], sparse[1], dense[2]]
    )
    for x in order[:-1]:
        buf.add(0, x, stream=s, donate=True)
    driver.fail(call, 2, call="LaunchKernel")
    with contextlib.suppress(fanin.DeviceError):
        buf.add(0, order[-1], stream=s, donate=True)
    driver.fail(-1, 0)
    try:
        with fanin.stream(s):
            assert buf.take()[0].numpy().tolist() == [1111.0, 10111.0] + [111.0] * 4
    except RuntimeError as e:
        assert "poisoned until clear" in str(e)
        buf.clear()
        return "lost"
    return "right"


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("sparse_first", [False, True])
def test_short_memory_in_the_middle_of_a_sum_in_place_doubles_nothing(
    driver: FakeDriver, sparse_first: bool, stats: bool
) -> None:
    """If any launch fails, the sum is right at the next try, or the slot is poisoned."""
    outcomes = [sum_in_turns(driver, call, sparse_first, stats) for call in range(6)]
    assert "right" in outcomes
    assert ("lost" in outcomes) == (not sparse_first and not stats), (
        outcomes
    )  # else the sum is made in memory of its own


@pytest.mark.parametrize("transposed", [False, True])
def test_memory_of_a_failed_upload_is_freed_after_its_copy(transposed: bool) -> None:
    """If any driver call fails, with any code: memory that the copy still writes is not reused."""
    outcomes = {"failed": 0, "made": 0}
    values = np.ones((4, 4)).T if transposed else np.ones((4, 4))
    for code in (1, 2, 400, 700, 999):
        for seed in range(2):
            for call in range(12):
                driver = FakeDriver(devices=1, seed=seed)
                with use_driver(driver):
                    driver.array(np.zeros(4))  # the device is ready
                    driver.fail(call, code)
                    with contextlib.suppress(fanin.DeviceError):
                        made = driver.array(values)
                        outcomes["made"] += 1
                        del made
                    driver.fail(-1, 0)
                    with contextlib.suppress(fanin.DeviceError):  # a lost device takes no more
                        driver.array(np.zeros((4, 4)))
                        driver.synchronize()
                    assert driver.races == 0, f"call {call} failed with {code}, seed {seed}: {driver.race}"
                outcomes["failed"] += 1
    outcomes["failed"] -= outcomes["made"]
    assert min(outcomes.values()) > 20, outcomes
