"""The CUDA backend on the fake driver: its own code, with no GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin import _core
from fanin.sim.machine import SCHEDULES
from kit import hooks
from kit.child import in_child
from kit.exchange_cuda import values
from kit.prepared import run_prepared
from kit.support import run_python

pytestmark = pytest.mark.core


STICKY, REJECTED, NO_MEMORY = 700, 701, 2


# What is there, and why something is not


def test_no_driver_is_opened_before_a_device_is_requested() -> None:
    said = run_prepared(
        "import sys, fanin, numpy as np\n"
        "fanin.add_n([np.ones(3), np.ones(3)])\n"
        "buf = fanin.InputBuffer(1); buf.add(0, np.ones(2)); buf.take()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('libcuda' in maps or 'testing/_driver' in maps)"
    )
    assert said.stdout.split() == ["False"]


def test_without_a_driver_a_device_is_an_error_and_all_else_works() -> None:
    with pytest.raises(fanin.DeviceError, match=r"no CUDA driver: libcuda-of-no-machine\.so\.1") as caught:
        fanin.Stream("cuda:0", 1)
    assert caught.value.code == 0  # type: ignore[attr-defined]
    assert "no CUDA driver" in " ".join(str(fanin.info()).split())
    assert fanin.devices() == ["cpu"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (34, "stub library of a toolkit"),
        (35, "older than this library requires"),
        (100, "finds no GPU"),
        (802, "nvidia-fabricmanager must run"),
        (803, "different releases"),
        (804, "compatibility library"),
        (999, "could not be initialised"),
    ],
)
def test_the_error_of_a_driver_that_cannot_be_initialised_has_code_path_and_versions(
    a_world: Any, code: int, words: str
) -> None:
    driver = a_world("fake", devices=1).driver
    driver.fail(0, code, call="Init")
    with pytest.raises(fanin.DeviceError, match=words) as caught:
        fanin.Stream("cuda:0", 1)
    assert caught.value.code == code  # type: ignore[attr-defined]
    assert str(driver.path) in str(caught.value)
    assert "CUDA 12.4; fanin needs 11.0" in str(caught.value)


def test_the_error_for_a_driver_without_a_required_function_names_it() -> None:
    driver = FakeDriver(devices=1)
    driver.hide("StreamWaitEvent")
    with use_driver(driver), pytest.raises(fanin.DeviceError, match="has no cuStreamWaitEvent"):
        fanin.Stream("cuda:0", 1)


@pytest.mark.parametrize(
    "name",
    [
        "MemAllocFromPoolAsync",
        "MemPoolTrimTo",
        "StreamGetId",
        "ThreadExchangeStreamCaptureMode",
        "StreamGetCaptureInfo",
        "UserObjectCreate",
    ],
)
def test_a_feature_that_a_driver_lacks_is_off_and_named(a_world: Any, name: str) -> None:
    driver = a_world("fake", devices=1).driver
    driver.hide(name)
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for value in (1.0, 2.0):
        buf.add(0, driver.array(np.full(3, value)), stream=s)
    assert values(buf.take()[0], s) == [3, 3, 3]
    assert f"its driver has no cu{name}" in " ".join(str(fanin.info()).split())
    assert name in "".join(fanin.info()["backends"]["cuda"]["missing"].values())
    assert driver.calls(name) == 0


def test_an_old_driver_has_the_functions_of_its_version(a_world: Any) -> None:
    driver = a_world("fake", devices=1).driver
    driver.set(version=11000)
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, driver.array(np.ones(3)), stream=s)
    buf.add(0, driver.array(np.ones(3)), stream=s)
    assert values(buf.take()[0], s) == [2, 2, 2]
    missing = _core.cuda_info()["missing"]
    assert set(missing.values()) == {
        "cuMemAllocFromPoolAsync",
        "cuStreamGetId",
        "cuStreamGetCaptureInfo",
        "cuUserObjectCreate",
        "cuGraphInstantiateWithFlags",
    }


def test_a_device_without_memory_pools_gets_plain_memory(a_world: Any) -> None:
    driver = a_world("fake", devices=1).driver
    driver.set(pools=False)
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for _ in range(2):
        buf.add(0, driver.array(np.ones(3)), stream=s)
    assert values(buf.take()[0], s) == [2, 2, 2]
    assert driver.calls("MemAllocFromPoolAsync") == 0 and driver.calls("MemAlloc") > 2


def test_the_error_for_a_missing_device_has_the_number_of_devices(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="no device cuda:2: the driver has 2 devices"):
        fanin.Stream("cuda:2", 1)


def test_a_driver_without_devices_has_none() -> None:
    with use_driver(FakeDriver(devices=0)), pytest.raises(ValueError, match="has 0 devices"):
        fanin.Stream("cuda:0", 1)


def test_info_describes_the_devices(driver: FakeDriver) -> None:
    found = fanin.info()["backends"]["cuda"]
    assert found["available"] and found["version"] == "12.4" and len(found["devices"]) == 2
    said = " ".join(str(fanin.info()).split())
    assert str(driver.path) in said and "CUDA 12.4" in said and "cuda:1 is fanin's fake device, compute 7.5" in said
    assert driver.calls("DevicePrimaryCtxRetain") == 0  # looking makes no context


# Contexts


def test_the_current_context_is_unchanged(driver: FakeDriver) -> None:
    s, t = driver.stream(0), driver.stream(1)
    with driver.context(1):
        assert driver.depth == 1
        buf = fanin.InputBuffer(1, stream=s)
        for _ in range(2):
            buf.add(0, driver.array(np.ones(4)), stream=s)
        assert values(buf.take()[0], s) == [2] * 4
        t.synchronize()
        assert driver.depth == 1
    pushed, popped = driver.calls("CtxPushCurrent"), driver.calls("CtxPopCurrent")
    assert pushed == popped > 0


def test_a_context_that_is_current_is_not_pushed_again(driver: FakeDriver) -> None:
    s = driver.stream()
    with driver.context():
        before = driver.calls("CtxPushCurrent")
        s.synchronize()
        assert driver.calls("CtxPushCurrent") == before


def test_the_context_is_restored_when_a_call_fails(driver: FakeDriver) -> None:
    s, t = driver.stream(), driver.stream()
    e = fanin.Event("cuda:0")
    for call, act in (
        ("EventRecord", lambda: e.record(s)),
        ("StreamWaitEvent", lambda: t.wait(e)),
        ("StreamSynchronize", s.synchronize),
        ("MemAllocFromPoolAsync", lambda: driver.array(np.ones(3))),
        ("EventCreate", lambda: fanin.Event("cuda:0")),
    ):
        e.record(s)
        driver.fail(0, REJECTED, call=call)
        with pytest.raises(
            fanin.DeviceError, match=rf"cu{call}.* on cuda:0 failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES \(701\)"
        ) as caught:
            act()
        assert caught.value.code == REJECTED  # type: ignore[attr-defined]
        assert driver.depth == 0
        driver.fail(-1, 0)


def test_the_primary_context_is_released_with_the_last_reference() -> None:
    driver = FakeDriver(devices=1)
    with use_driver(driver):
        x = driver.array(np.ones(3))
        assert driver.live("contexts") == 1
    gc.collect()
    assert driver.live("contexts") == 1  # x holds it
    del x
    gc.collect()
    assert [driver.live(k) for k in ("contexts", "memory", "events", "modules")] == [0, 0, 0, 0]


# Streams


def test_a_handle_is_one_stream(driver: FakeDriver) -> None:
    s = driver.stream()
    assert fanin.Stream("cuda:0", s.handle) == s
    assert fanin.Stream("cuda:0", 0) == fanin.Stream("cuda", 1)
    assert fanin.Stream("cuda:0", 1) != fanin.Stream("cuda:1", 1)


def test_a_stream_of_another_device_is_refused(driver: FakeDriver) -> None:
    s = driver.stream(1)
    with pytest.raises(ValueError, match="not of cuda:0's primary context"):
        fanin.Stream("cuda:0", s.handle)


def test_a_destroyed_stream_is_refused_by_the_driver(driver: FakeDriver) -> None:
    with pytest.raises(fanin.DeviceError, match="CUDA_ERROR_INVALID_HANDLE"):
        fanin.Stream("cuda:0", 0x1234560)


def test_the_per_thread_stream_is_another_one_in_each_thread(driver: FakeDriver) -> None:
    import threading

    mine = fanin.Stream("cuda:0", 2)
    theirs: list[Any] = []
    other = threading.Thread(target=lambda: theirs.append(fanin.Stream("cuda:0", 2)))
    other.start()
    other.join()
    assert mine == fanin.Stream("cuda:0", 2) != theirs[0]
    for act in (theirs[0].record, lambda: theirs[0].wait(mine), lambda: mine.wait(theirs[0])):
        with pytest.raises(ValueError, match="per-thread default stream of another thread"):
            act()
    theirs[0].synchronize()  # by waiting for everything
    x = driver.array(np.arange(4.0))
    buf = fanin.InputBuffer(1, stream=mine)
    buf.add(0, x, stream=mine)
    buf.add(0, x, stream=mine)
    assert values(buf.take()[0], mine) == [0, 2, 4, 6]


def test_the_legacy_stream_waits_for_blocking_streams(driver: FakeDriver) -> None:
    s = driver.stream(blocking=True)
    x = driver.array(np.zeros(4))
    driver.launch(s, lambda v: v.fill(5), writes=[x])
    assert values(x, fanin.Stream("cuda:0", 1)) == [5] * 4  # no event was needed


def test_waiting_for_an_event_never_recorded_is_warned_of(driver: FakeDriver) -> None:
    s = driver.stream()
    with pytest.warns(RuntimeWarning, match="this does nothing"):
        s.wait(fanin.Event("cuda:0"))


def test_streams_of_two_devices_wait_for_each_other(driver: FakeDriver) -> None:
    p, q = driver.stream(0), driver.stream(1)
    order: list[int] = []
    driver.launch(p, lambda: order.append(0))
    q.wait(p.record())
    driver.launch(q, lambda: order.append(1))
    driver.synchronize()
    assert order == [0, 1]


# The buffer on it: every schedule, no race


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("budget", [0, 100, None])
def test_a_sum_over_streams_is_right_under_every_schedule(schedule: str, budget: Any) -> None:
    ran = 0
    for seed in range(4 if schedule == "seeded" else 1):
        driver = FakeDriver(1, seed, schedule=schedule, starve=2)
        with use_driver(driver):
            streams = [driver.stream() for _ in range(4)]
            buf = fanin.InputBuffer(1, stream=streams[0], budget=budget)
            for k, s in enumerate(streams):
                g = driver.empty(16, np.float32)
                driver.launch(s, lambda v, k=k: v.fill(2**k), writes=[g])
                buf.add(0, g, key=k, stream=s)
                del g
            [total] = buf.take()
            seen: list[Any] = []
            driver.launch(streams[0], lambda v, seen=seen: seen.append(v.copy()), reads=[total])
            driver.synchronize()
            assert seen[0].tolist() == [15] * 16
            assert driver.races == 0, driver.race
            ran += 1
    assert ran


def test_events_and_waits_are_those_of_the_rules(driver: FakeDriver) -> None:
    c, *ps = (driver.stream() for _ in range(5))
    made = [(p, driver.array(np.ones(4))) for p in ps]
    buf = fanin.InputBuffer(1, stream=c)
    records, waits = driver.calls("EventRecord"), driver.calls("StreamWaitEvent")
    for p, g in made:
        buf.add(0, g, stream=p)
    buf.take()
    assert driver.calls("EventRecord") - records >= len(ps)
    assert driver.calls("StreamWaitEvent") - waits == len(ps)
    assert driver.calls("LaunchKernel") == 1


def test_events_come_from_a_pool(driver: FakeDriver) -> None:
    c, p = driver.stream(), driver.stream()
    g = driver.array(np.ones(4))
    for _ in range(20):
        buf = fanin.InputBuffer(1, stream=c)
        buf.add(0, g, stream=p)
        buf.add(0, g, stream=p)
        del buf
        driver.synchronize()
    assert driver.calls("EventCreate") < 12


def test_memory_is_freed_only_after_its_last_use(driver: FakeDriver) -> None:
    s, t = driver.stream(), driver.stream()
    x = driver.array(np.ones(1000))
    seen: list[Any] = []
    driver.launch(s, lambda v: seen.append(v.copy()), reads=[x])
    x.record_stream(t)
    live = driver.live()
    del x
    gc.collect()
    assert driver.live() == live  # s has not run
    driver.synchronize()
    y = driver.array(np.zeros(1000))  # polls
    assert seen[0].tolist() == [1] * 1000
    assert driver.live() == live
    del y


@pytest.mark.threads
def test_threads_add_from_streams_of_their_own(driver: FakeDriver) -> None:
    import threading

    c = driver.stream()
    streams = [driver.stream() for _ in range(4)]
    buf = fanin.InputBuffer(3, stream=c, budget=0)
    failed: list[BaseException] = []

    def produce(k: int) -> None:
        try:
            for turn in range(6):
                g = _core.device_array("cuda:0", np.full(32, 2.0 ** (6 * k + turn)), False)
                buf.add(turn % 3, g, key=6 * k + turn, stream=streams[k])
                fanin.Stream("cuda:0", streams[k].handle).record()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    with fanin.stream(c):
        sums = [x.numpy().tolist() for x in buf.take()]
    assert sums == [
        [sum(2.0 ** (6 * k + turn) for k in range(4) for turn in (slot, slot + 3))] * 32 for slot in range(3)
    ]


# Failures


def one_pass(driver: FakeDriver, fail: int, code: int, sticky: bool) -> tuple[str, bool]:
    """Streams, a conversion, a sparse part, a reduction, a read: its driver call `fail` fails. Returns the outcome."""
    p, q, c = (driver.stream() for _ in range(3))
    wish = [fanin.Slot(dtype="float32", shape=(4, 2)), fanin.Slot(shape=(2,))]
    g = [driver.array(np.full((4, 2), k, dtype)) for k, dtype in ((1, "f4"), (2, "f8"), (4, "f4"))]
    sparse = fanin.Sparse("coo", (driver.array(np.array([[0, 0]])), driver.array(np.ones((2, 2), "f4"))), (4, 2))
    buf = fanin.InputBuffer(wish, stream=c)
    happened, error = "nothing", None
    driver.fail(fail, code, sticky=sticky)
    try:
        for k, (x, s) in enumerate(zip([*g, sparse], (p, q, p, q), strict=True)):
            buf.add(0, x, key=k, stream=s)
        buf.add(1, g[0], stream=p)
        result = buf.take()
        with fanin.stream(c):
            read = [x.numpy().tolist() for x in result]
    except fanin.DeviceOutOfMemoryError as e:
        happened, error = "no memory", e
    except fanin.DeviceError as e:
        happened, error = "failed", e
    finally:
        driver.fail(-1, 0)
    if error is None:
        assert read == [[[9, 9], *[[7, 7]] * 3], [4, 4]]
        return happened, False
    assert error.code == code  # type: ignore[attr-defined]
    assert "cu" in str(error) and "cuda:0" in str(error) and f"({code})" in str(error), error
    if sticky:
        with pytest.raises(fanin.DeviceError, match=r"lost by an earlier failure.*Restart the process"):
            driver.array(np.ones(2))
        return happened, True
    poisoned = False
    for slot in range(2):
        try:
            buf.ready(slot)
        except RuntimeError as e:
            poisoned |= "poisoned" in str(e)
            with pytest.raises(RuntimeError, match="poisoned until clear"):
                buf.add(slot, g[0], key=9)
        except ValueError:
            pass
    buf.clear()
    buf.add(0, g[0], stream=p)
    buf.add(0, g[2], stream=q)
    with fanin.stream(c):
        assert buf.take()[0].numpy().tolist() == [[5, 5]] * 4
    return happened, poisoned


@pytest.mark.parametrize(
    ("code", "sticky"), [(REJECTED, False), (NO_MEMORY, False), (STICKY, True)], ids=["rejected", "no memory", "sticky"]
)
def test_every_driver_call_failed_once_poisons_at_most_its_slot_and_leaks_nothing(code: int, sticky: bool) -> None:
    """The plan fails the first call, then the second, until a pass goes through; what a release swallows is no failure
    of the pass.
    """
    gc.collect()
    baseline = hooks.memory()[0]
    outcomes: dict[str, int] = {}
    called = poisonings = quiet = 0
    for fail in range(2000):
        driver = FakeDriver(1)
        with use_driver(driver):
            before = driver.calls()
            happened, poisoned = one_pass(driver, fail, code, sticky)
            called = driver.calls() - before
            if not sticky:
                driver.synchronize()
                assert driver.races == 0, driver.race
            assert (driver.depth, driver.capture_mode) == (0, 0)
        gc.collect(1)
        if not sticky and happened != "nothing":
            assert driver.live("contexts") <= 1
        outcomes[happened] = outcomes.get(happened, 0) + 1
        poisonings += poisoned
        quiet = quiet + 1 if happened == "nothing" else 0
        if quiet > 40:
            break
    gc.collect()
    assert hooks.memory()[0] == baseline
    tried = sum(outcomes.values()) - quiet
    print(f"driver calls failed once each: {tried} ({outcomes}, {poisonings} poisonings) of {called}")
    assert tried > 60 and outcomes.get("failed", 0) + outcomes.get("no memory", 0) > 60
    assert quiet > 40, "the plan ran out before the calls"
    assert sticky or code == NO_MEMORY or poisonings > 0


def test_a_failed_allocation_trims_the_pool_and_is_tried_again(driver: FakeDriver) -> None:
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    g = driver.array(np.ones(4))
    buf.add(0, g, stream=s)
    buf.add(0, g, stream=s)
    driver.fail(0, NO_MEMORY, call="MemAllocFromPoolAsync")
    trims = driver.calls("MemPoolTrimTo")
    assert values(buf.take()[0], s) == [2] * 4
    assert driver.calls("MemPoolTrimTo") == trims + 1


def test_a_final_allocation_failure_is_an_error_and_the_device_still_works(a_world: Any) -> None:
    driver = a_world("fake", 1, memory=1 << 16).driver
    with pytest.raises(
        fanin.DeviceOutOfMemoryError,
        match=r"cuMemAllocFromPoolAsync\(\d+ bytes\) on cuda:0 failed: CUDA_ERROR_OUT_OF_MEMORY",
    ) as caught:
        driver.empty(1 << 16)
    assert caught.value.code == 2  # type: ignore[attr-defined]
    assert isinstance(caught.value, MemoryError)
    s = driver.stream()
    assert values(driver.array(np.ones(3)), s) == [1] * 3


def test_a_sticky_error_loses_one_device_and_not_the_other(driver: FakeDriver) -> None:
    s, t = driver.stream(0), driver.stream(1)
    x, y = driver.array(np.ones(4)), driver.array(np.ones(4), 1)
    with driver.context():
        driver.fail(0, STICKY, call="StreamSynchronize", sticky=True)
        with pytest.raises(
            fanin.DeviceError,
            match=(
                r"cuStreamSynchronize on cuda:0 failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\).*Any earlier work may have"
                r" caused it"
            ),
        ):
            s.synchronize()
    with pytest.raises(
        fanin.DeviceError, match=r"cuda:0 was lost by an earlier failure: cuStreamSynchronize .*\(700\)"
    ):
        s.record()
    frees = driver.calls("MemFree")
    del x
    gc.collect()
    assert driver.calls("MemFree") == frees
    assert values(y, t) == [1] * 4
    driver.__init__(devices=2)  # type: ignore[misc]


def test_a_kernel_that_strays_is_found_by_the_next_wait(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.world.device_is_lost()
    s = driver.stream()
    x, out = driver.array(np.ones(4)), driver.array(np.ones(4))
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    driver._lib.cuMemFree_v2.argtypes = [__import__("ctypes").c_uint64]
    with driver.context():
        driver.call("cuMemFree_v2", x.address)  # other code frees it
    with pytest.raises(fanin.DeviceError, match="ILLEGAL_ADDRESS"):
        buf.take(out=[out])
        s.synchronize()


def test_after_a_reset_by_other_code_the_device_is_lost_and_nothing_dead_is_freed(a_world: Any) -> None:
    old = a_world("fake", 1).driver
    old.world.judges_itself("another driver takes its place")
    x, s = old.array(np.ones(4)), old.stream()
    new = FakeDriver(1)  # every handle of the old machine is invalid from here on
    with pytest.raises(fanin.DeviceError, match="CUDA_ERROR_INVALID_CONTEXT"):
        s.record()
    frees = new.calls("MemFree")
    del x, s
    gc.collect()
    assert new.calls("MemFree") == frees


def test_a_forked_child_gets_an_error_and_may_drop_what_it_inherited(driver: FakeDriver) -> None:
    s = driver.stream()
    x = driver.array(np.ones(4))
    calls = driver.calls()

    def use() -> None:
        nonlocal x, s
        for act in (s.synchronize, s.record, lambda: driver.array(np.ones(2)), lambda: fanin.Stream("cuda:0", 1)):
            with pytest.raises(RuntimeError, match="forked child"):
                act()
        del x, s
        gc.collect()
        assert driver.calls() == calls

    assert in_child(use) == 0
    assert values(x, s) == [1] * 4  # the parent continues


# In a Python of its own, whose exit status is checked.
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import gc; gc.collect(); del buf, x",
    ],
)
def test_a_process_may_end_with_work_pending_and_arrays_alive(ending: str) -> None:
    done = run_python(
        "import numpy as np, fanin\n"
        "from fake_cuda import FakeDriver, use_driver\n"
        "driver = FakeDriver(1)\n"
        "using = use_driver(driver); using.__enter__()\n"
        "s, t = driver.stream(), driver.stream()\n"
        "x = driver.array(np.ones(4)); keep = [x, s]\n"
        "buf = fanin.InputBuffer(1, stream=t)\n"
        "driver.launch(s, lambda v: v.fill(2), writes=[x])\n"
        "buf.add(0, x, stream=s); buf.add(0, x, stream=t)\n" + ending
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


# What leaving something out does


def test_leave_out_lists_its_words() -> None:
    driver = FakeDriver(1)
    with use_driver(driver):
        for wrong in ("no such rule", "S12.no", "S12\0", "\ud800", 12):
            with pytest.raises(ValueError, match=r"S12\.wait" if wrong != "\ud800" else None):
                driver.leave_out("S12", wrong)
        driver.leave_out("S12", "S9.mark")


@pytest.mark.parametrize("word", ["S9", "S12.wait", "S18.wait"])
def test_a_rule_that_is_left_out_shows_as_a_race(word: str) -> None:
    raced = 0
    for seed in range(4):
        driver = FakeDriver(1, seed)
        with use_driver(driver):
            p, q, c = (driver.stream() for _ in range(3))
            driver.leave_out(word)
            buf = fanin.InputBuffer(1, stream=c)
            for s in (p, q)[: 1 if word != "S12.wait" else 2]:
                g = driver.empty(8)
                driver.launch(s, lambda v: v.fill(1), writes=[g])
                buf.add(0, g, stream=s)
            [total] = buf.take()
            driver.launch(c, lambda v: None, reads=[total])
            driver.synchronize()
            raced += driver.races > 0
    assert raced == 4


MUTANTS = {
    "no wait": "CUDA_NO_WAIT",
    "no record": "CUDA_NO_RECORD",
    "no pop": "CUDA_NO_POP",
    "early free": "CUDA_EARLY_FREE",
    "no sync": "CUDA_NO_SYNC",
    "no poison": "CUDA_NO_POISON",
}


def exercise(driver: FakeDriver) -> list[str]:
    """What a sound backend does; the names of what was not so."""
    wrong = []
    p, q, c = (driver.stream() for _ in range(3))
    buf = fanin.InputBuffer(1, stream=c, budget=0)
    for k, s in enumerate((p, q, p)):
        g = driver.empty(8)
        driver.launch(s, lambda v, k=k: v.fill(2**k), writes=[g])
        buf.add(0, g, key=k, stream=s)
        del g
    [total] = buf.take()
    seen: list[Any] = []
    driver.launch(c, lambda v: seen.append(v.copy()), reads=[total])
    c.synchronize()
    if not seen:
        wrong.append("synchronize did not wait")
    driver.synchronize()
    if driver.races:
        wrong.append("race")
    if seen and seen[0].tolist() != [7] * 8:
        wrong.append("value")
    if driver.depth:
        wrong.append("context")
    driver.fail(0, STICKY, call="EventCreate", sticky=True)
    try:
        fanin.Event("cuda:0")
    except fanin.DeviceError:
        pass
    calls = driver.calls()
    try:
        p.record()
    except fanin.DeviceError:
        pass
    if driver.calls() != calls:
        wrong.append("called after a sticky error")
    return wrong


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_planted_fault_of_the_backend_is_found(a_world: Any, name: str | None) -> None:
    driver = a_world("fake", 1).driver
    if name:
        driver.world.judges_itself("a fault of the backend shows where it likes")
    else:
        driver.world.device_is_lost()  # exercise ends with an error that stays
    hooks.fault(name and MUTANTS[name])
    try:
        wrong = exercise(driver)
    finally:
        hooks.fault(None)
    print(name, wrong)
    assert bool(wrong) == (name is not None)
