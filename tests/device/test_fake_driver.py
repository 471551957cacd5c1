"""The fake driver does what a real one may do: it waits where CUDA may wait, breaks captures that CUDA may break,
reuses handles, reports errors late. Each of these once hid a defect of the backend.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fake_cuda.driver import DriverError
from fanin import _core
from kit import hooks

pytestmark = pytest.mark.core


# Blocks of threads


def summed_stats(driver: FakeDriver, x: Any) -> fanin.Stats:
    s = driver.stream()
    buf = fanin.InputBuffer(1, stats=True, stream=s)
    for _ in range(2):
        buf.add(0, driver.array(x), stream=s)
    buf.take()
    found = buf.stats(0)
    assert found is not None
    return found


def test_statistics_need_the_barriers_of_their_kernels(driver: FakeDriver) -> None:
    """Which run as on a GPU: without the barriers the threads of a block add up what is not there yet."""
    x = np.arange(5000.0)
    right = float(np.sum((2 * x) ** 2))
    assert summed_stats(driver, x).sumsq == pytest.approx(right, rel=1e-12)
    driver._lib.fanFakeBarriers(0)
    try:
        assert summed_stats(driver, x).sumsq != pytest.approx(right, rel=1e-3)
    finally:
        driver._lib.fanFakeBarriers(1)


# Errors that come late


def odd(driver: FakeDriver, n: int = 64) -> Any:
    """Numbers that begin 4 bytes after a multiple of 16."""
    return driver.array(np.ones(n + 1, "f4"))[1:]


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_an_access_off_its_size_loses_the_context_when_it_runs(driver: FakeDriver) -> None:
    """As on a GPU: the launch succeeds, and the next wait reports the error."""
    driver.world.device_is_lost()
    s = driver.stream()
    xs = [odd(driver) for _ in range(2)]
    out = driver.empty(64, "f4")
    hooks.fault("CUDA_ALWAYS_WIDE")
    try:
        fanin.add_n(xs, out=out)
    finally:
        hooks.fault(None)
    s.record()  # nothing has run, so the error is not reported yet
    with pytest.raises(fanin.DeviceError, match=r"CUDA_ERROR_MISALIGNED_ADDRESS \(716\)") as e:
        out.numpy()
    assert e.value.code == 716
    with pytest.raises(fanin.DeviceError, match=r"cuda:0 was lost by an earlier failure: .*\(716\)"):
        s.record()


def test_memory_not_aligned_to_16_bytes_is_summed_in_smaller_accesses(driver: FakeDriver) -> None:
    """The control: the backend checks the alignment of its operands."""
    for dtype in ("f4", "f2", "u1", "c8"):
        for stats in (False, True):
            xs = [driver.array(np.ones(71, dtype))[1:] for _ in range(3)]
            buf = fanin.InputBuffer(1, stats=stats)
            for x in xs:
                buf.add(0, x)
            assert buf.take()[0].numpy().tolist() == [3] * 70


@pytest.mark.parametrize("code", [226, 721, 810, 911])
def test_a_code_after_which_a_process_must_end_loses_the_device_and_its_first_cause_is_kept(
    driver: FakeDriver, code: int
) -> None:
    driver.world.device_is_lost()
    s = driver.stream()
    driver.fail(0, code, call="EventRecord", sticky=True)
    with pytest.raises(fanin.DeviceError, match="The device is lost to this process"):
        s.record()
    calls = driver.calls()
    with pytest.raises(fanin.DeviceError, match=rf"cuda:0 was lost by an earlier failure: cuEventRecord .*\({code}\)"):
        s.synchronize()
    assert driver.calls() == calls


# Handles that come back


def destroy(driver: FakeDriver, s: fanin.Stream) -> None:
    with driver.context():
        driver.call("cuStreamDestroy_v2", ctypes.c_void_p(s.handle))


def test_a_handle_that_comes_back_is_another_stream(driver: FakeDriver) -> None:
    old = driver.stream()
    destroy(driver, old)
    new = driver.stream()
    assert new.handle == old.handle and new != old
    new.record().synchronize()
    with pytest.raises(fanin.DeviceError, match="was destroyed: keep a stream until"):
        old.record()
    assert fanin.Stream("cuda:0", old.handle) == new


@pytest.mark.parametrize(
    "planted",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not hooks.DEVELOPMENT, reason="FANIN_DEV=1 plants faults")),
    ],
)
def test_the_successor_of_a_destroyed_stream_repeats_its_waits(driver: FakeDriver, planted: bool) -> None:
    p, old = driver.stream(), driver.stream()
    x = driver.empty(8)
    driver.launch(p, lambda v: v.fill(1), writes=[x])
    e = p.record()
    old.wait(e)
    destroy(driver, old)
    hooks.fault("CUDA_SAME_HANDLE" if planted else None)
    try:
        new = driver.stream()
        new.wait(e)
        driver.launch(new, lambda v: v.sum(), reads=[x])
    finally:
        hooks.fault(None)
    if planted:
        driver.world.races_are_planted()
    driver.synchronize()
    assert (driver.races > 0) == planted


def test_without_numbers_for_streams_only_the_handle_identifies_one(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.set(version=11080)
    old = driver.stream()
    destroy(driver, old)
    assert driver.stream() == old


# What waits, and what breaks a capture


@contextlib.contextmanager
def captured_by_others(driver: FakeDriver) -> Iterator[None]:
    """The capture of a stream that is not fanin's: it is whole at the end."""
    s, graph = ctypes.c_void_p(), ctypes.c_void_p()
    with driver.context():
        driver.call("cuStreamCreate", ctypes.byref(s), 1)
        driver.call("cuStreamBeginCapture_v2", s, 0)
    try:
        yield
    finally:
        with driver.context():
            try:
                driver.call("cuStreamEndCapture", s, ctypes.byref(graph))
                driver.call("cuGraphDestroy", graph)
            finally:
                driver.call("cuStreamDestroy_v2", s)


def driver_operations(driver: FakeDriver) -> dict[str, Callable[[], object]]:
    s, t = driver.stream(), driver.stream()
    x, y = driver.array(np.ones(4)), driver.array(np.ones((4, 4)))
    xs = [driver.array(np.ones(16, "f4")) for _ in range(40)]
    e = s.record()

    def total(stats: bool = False, **how: Any) -> None:
        buf = fanin.InputBuffer(1, stream=s, stats=stats, **how)
        for g, on in ((x, t), (x, s), (x, t)):
            buf.add(0, g, stream=on)
        buf.take()
        assert not stats or buf.stats(0).count == 4

    def many() -> None:
        buf = fanin.InputBuffer(20, stream=s, budget=0)
        buf.add_many(range(20), xs[:20], stream=s)
        buf.add_many(range(20), xs[20:], stream=t)
        assert all(g is not None for g in buf.take())

    def handle() -> None:
        made = ctypes.c_void_p()
        mode = ctypes.c_int(2)
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        with driver.context():
            driver.call("cuStreamCreate", ctypes.byref(made), 1)
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        driver._streams.append(made.value or 0)
        fanin.Stream("cuda:0", made.value or 0).synchronize()

    return {
        "a copy to the device": lambda: driver.array(np.ones(5)),
        "memory alone": lambda: driver.empty(1 << 20),
        "a read": x.numpy,
        "a read of what has gaps": lambda: y[:, ::2].numpy(),
        "a sum": total,
        "a sum with statistics": lambda: total(stats=True),
        "an exact sum": lambda: total(accumulate="exact"),
        "many sums": many,
        "memory that goes": lambda: (xs.clear(), gc.collect()),
        "events": lambda: (e.query(), e.synchronize(), fanin.Event("cuda:0")),
        "a wait": s.synchronize,
        "a handle that is new": handle,
        "the first use of a device": lambda: fanin.Stream("cuda:1", 1),
        "trim": fanin.trim,
        "pool_bytes": lambda: fanin.set_options(pool_bytes=1 << 20),
    }


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize("theirs", [False, True])
def test_no_call_of_fanin_breaks_a_foreign_capture(a_world: Any, pools: bool, theirs: bool) -> None:
    """In the capturing thread, and in another one."""
    driver = a_world("fake").driver
    driver.set(pools=pools)
    kept = _core.get_options()["pool_bytes"]
    broken = []
    for what, act in driver_operations(driver).items():
        if what == "trim" and not pools:
            continue  # it frees the pool, which waits for the device: the user decides when
        try:
            with captured_by_others(driver):
                if theirs:
                    thread = threading.Thread(target=act)
                    thread.start()
                    thread.join()
                else:
                    act()
        except DriverError as e:
            broken.append(f"{what}: {e}")
    fanin.set_options(pool_bytes=kept)
    assert not broken, broken
    assert driver.calls("CtxSynchronize") == 0 and driver.calls("MemFree") == 0


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
def test_calls_that_are_not_made_in_relaxed_mode_break_the_captures_of_others(driver: FakeDriver) -> None:
    """The control of each of them."""
    acts = driver_operations(driver)
    broken = []
    for what in ("a copy to the device", "memory alone", "a read", "many sums", "events", "trim", "pool_bytes"):
        hooks.fault("CUDA_NO_RELAX")
        try:
            with captured_by_others(driver), contextlib.suppress(fanin.CaptureError):
                acts[what]()
        except DriverError:
            broken.append(what)
        finally:
            hooks.fault(None)
    assert broken == ["a copy to the device", "memory alone", "a read", "many sums", "events", "trim", "pool_bytes"]
    fanin.set_options(pool_bytes=1 << 30)


def test_a_wait_for_the_device_breaks_the_captures_of_all(driver: FakeDriver) -> None:
    """The control: what this driver does when cuMemFree is called, in any mode."""
    at, mode = ctypes.c_uint64(), ctypes.c_int(2)
    with driver.context():
        driver.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(64))
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def free() -> None:
        with pytest.raises(DriverError, match="900"), driver.context():
            driver.call("cuMemFree_v2", at)

    with pytest.raises(DriverError, match="901"), captured_by_others(driver):
        free()
    with driver.context():
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        driver.call("cuMemFree_v2", at)


def test_without_pools_memory_is_kept_for_reuse_and_freed_on_request(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.set(pools=False)
    s = driver.stream()
    x = driver.array(np.ones(1000))
    s.synchronize()
    for _ in range(5):
        made = driver.calls("MemAlloc")
        with fanin.stream(s):
            y = fanin.add_n([x, x])
        s.synchronize()
        del y
        gc.collect()
    assert driver.calls("MemAlloc") == made and driver.calls("MemFree") == 0
    live = driver.live()
    assert fanin.trim() >= 8000 and driver.live() < live
    assert x.numpy().tolist() == [1] * 1000


# Memory pools


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_memory_stays_when_other_code_synchronizes(driver: FakeDriver, kept: int) -> None:
    """The control: a pool that keeps nothing maps its memory again in each turn."""
    with fanin.set_options(pool_bytes=kept):
        s = driver.stream()
        xs = [driver.array(np.ones(4000)) for _ in range(2)]
        mapped = []
        for _ in range(6):
            with fanin.stream(s):
                total = fanin.add_n(xs)
            s.synchronize()
            del total
            driver.array(np.zeros(1))
            with driver.context():  # as loss.item() does
                driver.call("cuStreamSynchronize", ctypes.c_void_p(s.handle))
            mapped.append(driver.mapped)
        assert (mapped[-1] == mapped[1]) == (kept > 0), mapped


def test_the_pool_is_private_and_trim_frees_unused_memory(driver: FakeDriver) -> None:
    x = driver.array(np.ones(1 << 17))
    fanin.trim()
    y = driver.empty(1 << 17)
    del y
    gc.collect()
    assert driver.live("pools") == 1
    given = fanin.trim()
    assert 1 << 20 <= given < 1 << 21  # not x's
    assert fanin.trim() == 0 and x.numpy()[0] == 1


def test_pool_bytes_applies_to_devices_that_exist_already(driver: FakeDriver) -> None:
    driver.array(np.ones(4))
    calls = driver.calls("MemPoolSetAttribute")
    with fanin.set_options(pool_bytes=0):
        assert driver.calls("MemPoolSetAttribute") == calls + 1
    assert driver.calls("MemPoolSetAttribute") == calls + 2


def test_a_device_that_makes_no_pool_gets_plain_memory(driver: FakeDriver) -> None:
    driver.fail(0, 801, call="MemPoolCreate")
    x = driver.array(np.ones(3))
    assert fanin.add_n([x, x]).numpy().tolist() == [2] * 3
    assert driver.calls("MemAllocFromPoolAsync") == 0


# Copies that read late


@pytest.mark.parametrize(
    "planted",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not hooks.DEVELOPMENT, reason="FANIN_DEV=1 plants faults")),
    ],
)
def test_host_memory_is_reused_only_after_a_device_has_read_it(a_world: Any, planted: bool) -> None:
    """The table of many sums lies in memory that the next batch writes over."""
    driver = a_world("fake", 1).driver
    driver.set(coherent=True)
    s = driver.stream()
    xs = [driver.array(np.full(16, k, "f4")) for k in range(120)]
    if planted:
        driver.world.device_is_lost()
    hooks.fault("CUDA_EARLY_HOST" if planted else None)
    try:
        buf = fanin.InputBuffer(40, stream=s, budget=0)
        for part in range(3):
            buf.add_many(range(40), xs[40 * part : 40 * part + 40], stream=s)
        sums = buf.take()
        if not planted:
            with fanin.stream(s):
                assert sums[7].numpy().tolist() == [7 + 47 + 87] * 16
        else:
            with pytest.raises(fanin.DeviceError, match="700"):
                s.synchronize()
    finally:
        hooks.fault(None)


def a_wider_running_sum(driver: FakeDriver) -> None:
    """float16 into float32: the second fold begins with what the first one left."""
    s = driver.stream()
    buf = fanin.InputBuffer([fanin.Slot(accumulate="float32")], stream=s, budget=0)
    for value in (1024, 0.25, 0.25):
        buf.add(0, driver.array(np.full(99, value, "f2")), stream=s)
    [total] = buf.take(out=[driver.empty(99, "f4")])
    s.synchronize()
    assert total.numpy().tolist() == [1024.5] * 99


def a_sum_over_axes(driver: FakeDriver) -> None:
    s = driver.stream()
    buf = fanin.InputBuffer([fanin.Slot(shape=())], stream=s)
    buf.add(0, driver.array(np.ones(8193, "f4")), stream=s)
    [total] = buf.take()
    s.synchronize()
    assert total.numpy() == 8193


def what_leaves_by_two_streams(driver: FakeDriver) -> None:
    """Both sums are read by kernels of their own stream, and leave in one call."""
    streams = [driver.stream() for _ in range(2)]
    late = driver.stream()
    buf = fanin.InputBuffer(2, budget=math.inf)
    for slot, s in enumerate(streams):
        with fanin.stream(s):
            x = fanin.add_n([driver.array(np.ones(64, "f4"))] * 2)
            buf.add(slot, x)
            buf.add(slot, fanin.add_n([x, x]))
            del x
    driver.launch(late, lambda: None, name="late")
    streams[1].wait(late)
    with fanin.stream(streams[1]):
        sums = buf.take()
    streams[0].synchronize()
    for _ in range(4):
        fanin.add_n([sums[0], sums[0]])  # polls
    driver.synchronize()
    assert driver.races == 0, driver.race


def entries_that_meet(driver: FakeDriver) -> None:
    """Rows of two digits, which come as they please."""
    s = driver.stream()
    rng = np.random.default_rng(7)
    rows, values, right = rng.integers(0, 1000, 3000), rng.standard_normal(3000, "f4"), np.zeros(1000, "f4")
    np.add.at(right, rows, values)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, driver.array(np.zeros(1000, "f4")), stream=s)
    buf.add(0, fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (1000,)), stream=s)
    [total] = buf.take()
    s.synchronize()
    assert total.numpy().tolist() == right.tolist()


SUMS = {
    "CUDA_NARROW_SUM": a_wider_running_sum,
    "CUDA_EARLY_LANES": a_sum_over_axes,
    "CUDA_SHORT_SORT": entries_that_meet,
    "CUDA_EARLY_SORT": entries_that_meet,
    "SHARE_ANY_EVENT": what_leaves_by_two_streams,
}


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
def test_a_planted_fault_of_sums_is_found(name: str, planted: bool) -> None:
    found = ""
    hooks.fault(name if planted else None)
    try:
        with use_driver(FakeDriver(1)) as driver:
            assert driver
            SUMS[name](driver)
    except (AssertionError, fanin.DeviceError, fanin.RaceError) as e:
        found = type(e).__name__
    finally:
        hooks.fault(None)
    assert bool(found) == planted, found


def test_memory_freed_after_pending_work_cannot_be_trimmed(driver: FakeDriver) -> None:
    """The table of many sums goes back in the order of their stream."""
    s = driver.stream()
    xs = [driver.array(np.ones(16, "f4")) for _ in range(200)]
    buf = fanin.InputBuffer(100, stream=s, budget=0)
    buf.add_many(range(100), xs[:100], stream=s)
    fanin.trim()
    buf.add_many(range(100), xs[100:], stream=s)
    before = fanin.trim()
    driver.synchronize()
    table = 100 * (24 + 2 * 8 + 4)
    assert fanin.trim() >= table > before
    with fanin.stream(s):
        assert buf.take()[5].numpy().tolist() == [2] * 16


def test_state_of_an_older_driver_does_not_affect_the_next() -> None:
    """As after a test that failed: its frames hold what it made."""
    with use_driver(FakeDriver(1)) as older:
        assert older
        left = older.array(np.ones(3))
    with use_driver(FakeDriver(1)) as newer:
        assert newer
        x = newer.array(np.ones(3))
        del left
        assert fanin.add_n([x, x]).numpy().tolist() == [2] * 3
        assert newer.live("contexts") == 1
