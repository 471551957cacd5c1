"""Graph trees on the CUDA backend: which driver calls they make and in which mode, which they may not make, the
driver's memory for a recording, and the limits of tracking user kernels. On the fake driver.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda.driver import DriverError
from graph.test_capture import from_thread
from kit import hooks
from kit.child import in_child

pytestmark = pytest.mark.core

HERE = "cuda:0"


@pytest.fixture
def w(a_world: Callable[..., Any]) -> Any:
    return a_world("fake", 1, seed=5)


def doubled(x: Any) -> Any:
    return fanin.add_n([x, x])


def tree_of(**more: Any) -> fanin.GraphTree:
    return fanin.GraphTree(HERE, **{"memory": 1 << 14, **more})


def called(tree: fanin.GraphTree, f: Any, x: Any, times: int = 3) -> str:
    for _ in range(times):
        with tree.step():
            f(x)
    return str(f.last.did)


def allocate(w: Any) -> None:
    """On the current stream, by the driver's own stream-ordered allocation: a node of the graph."""
    out = ctypes.c_uint64()
    stream = ctypes.c_void_p(fanin.current_stream(HERE).handle)
    w.call("cuMemAllocAsync", ctypes.byref(out), ctypes.c_size_t(64), stream)


# Calls of the driver


def test_a_recording_is_captured_once_instantiated_once_and_launched_at_every_call(w: Any) -> None:
    d = w.driver
    names = ("StreamBeginCapture", "StreamEndCapture", "GraphInstantiateWithFlags", "GraphLaunch", "GraphDestroy")
    tree, x = tree_of(), w.array(np.ones(4))
    f = tree.function(doubled, roles="static")
    counts = []
    for times in (1, 1, 3):
        before = [d.calls(name) for name in names]
        called(tree, f, x, times)
        counts.append([d.calls(name) - n for name, n in zip(names, before, strict=True)])
    assert counts == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 3, 0]]
    tree.close()


def test_a_replay_launches_the_graph_and_no_kernel(w: Any) -> None:
    tree, x = tree_of(), w.array(np.ones(4))
    f = tree.function(doubled, roles="static")
    assert called(tree, f, x) == "replayed"
    kernels, allocations = w.driver.calls("LaunchKernel"), w.driver.calls("MemAllocFromPoolAsync")
    called(tree, f, x, 4)
    assert w.driver.calls("LaunchKernel") == kernels
    assert w.driver.calls("MemAllocFromPoolAsync") == allocations and w.driver.calls("MemAlloc") == 0
    tree.close()


def test_unsafe_calls_of_other_threads_do_not_break_a_recording(w: Any) -> None:
    """It is captured in thread-local mode; in global mode the call would be refused, and the capture broken."""
    tree, x = tree_of(), w.array(np.ones(4))
    errors = []

    def f(x: Any) -> Any:
        errors.append(from_thread(w.unsafe))
        return doubled(x)

    assert called(tree, tree.function(f), x) == "replayed" and errors == [None, None]
    tree.close()


def test_a_tree_does_not_disturb_a_capture_of_other_code(w: Any) -> None:
    """A capture in thread-local mode on the same thread, the worst case, survives every call of the tree."""
    s, x = w.stream(), w.array(np.ones(4))
    tree = tree_of()
    f = tree.function(doubled, roles="static")
    w.begin_capture(s, "thread-local")
    assert called(tree, f, x) == "replayed"
    tree.close()
    assert w.state(s) == 1
    w.end_capture(s)


@pytest.mark.parametrize(
    "name", ["StreamBeginCapture", "GraphInstantiateWithFlags", "StreamGetCaptureInfo", "UserObjectCreate"]
)
def test_the_error_for_a_driver_without_a_needed_function_names_it(w: Any, name: str) -> None:
    w.driver.hide(name)
    with pytest.raises(fanin.DeviceError, match=rf"the driver of cuda:0 has no cu{name}: graph trees need"):
        tree_of()
    assert doubled(w.array(np.ones(4))).numpy().tolist() == [2.0] * 4


# What it takes


@pytest.mark.parametrize("role", ["static", "copy"])
def test_a_steady_call_allocates_nothing_in_the_core_and_keeps_nothing_in_python(w: Any, role: str) -> None:
    tree = tree_of()
    f = tree.function(lambda *xs: doubled(xs[0]), roles=role)
    s = w.stream()
    for n in (1, 8, 32):
        xs = [w.array(np.ones(4)) for _ in range(n)]
        counts, blocks = set(), []
        with fanin.stream(s):
            for times in (20, 10, 10, 10):
                before = hooks.memory()[1]
                for _ in range(times):
                    with tree.step():
                        f(*xs)
                        w.synchronize()
                counts.add(hooks.memory()[1] - before)
                blocks.append(sys.getallocatedblocks())
        assert f.last.did == "replayed" and min(counts) == 0, (n, counts)
        assert max(blocks[1:]) - min(blocks[1:]) < 10, blocks
    tree.close()


def test_stats_count_the_drivers_memory_for_recordings(w: Any) -> None:
    tree = tree_of()
    f, g = tree.function(doubled), tree.function(lambda x: doubled(doubled(x)))
    taken = []
    for function in (f, g):
        called(tree, function, w.array(np.ones(4)))
        taken.append(tree.stats.driver_bytes)
    assert 0 < taken[0] < taken[1] - taken[0]
    tree.close()
    assert tree.stats.driver_bytes == 0


def test_after_close_no_graph_no_memory_and_no_object_is_left(w: Any) -> None:
    d = w.driver
    doubled(w.array(np.ones(4)))
    gc.collect()
    doubled(w.array(np.ones(4)))
    fanin.trim()
    kinds = ("graphs", "memory", "objects")
    before = {kind: d.live(kind) for kind in kinds}
    streams = []
    for _ in range(3):
        tree, x = tree_of(), w.array(np.ones(4))
        f = tree.function(doubled)
        assert called(tree, f, x) == "replayed"
        assert d.live("graphs") == 1
        tree.close()
        del tree, f, x  # whose memory is marked with the tree's stream
        w.synchronize()
        doubled(w.array(np.ones(4)))  # polls for memory to free
        fanin.trim()
        assert {kind: d.live(kind) for kind in kinds} == before
        streams.append(d.live("streams"))
    assert streams[0] == streams[2], "the next tree has the stream of the last one"


def test_memory_of_a_dropped_tree_stays_as_long_as_its_graph_runs(w: Any) -> None:
    s, x = w.stream(), w.array(np.ones(4))
    with fanin.stream(s):
        tree = tree_of()
        f = tree.function(lambda x, out: fanin.add_n([doubled(x), x], out=out), roles="static")
        out = w.array(np.zeros(4))
        for _ in range(3):
            with tree.step():
                f(x, out)
        assert f.last.did == "replayed"
        tree.close()
        del tree, f
        gc.collect()
        others = [w.array(np.full(512, 7.0)) for _ in range(4)]
        assert out.numpy().tolist() == [3.0] * 4
    assert all((o.numpy() == 7.0).all() for o in others)


# Calls that the tree may not make


@pytest.mark.rule("R10")
def test_a_function_that_allocates_from_the_driver_is_refused_by_name(w: Any) -> None:
    tree, x, asks = tree_of(), w.array(np.ones(4)), [False]

    def f(x: Any) -> Any:
        if asks[0]:
            allocate(w)
        return doubled(x)

    g = tree.function(f)
    called(tree, g, x, 1)
    asks[0] = True
    for _ in range(2):
        with (
            tree.step(),
            pytest.raises(fanin.CaptureError, match=r"f cannot be recorded: it allocates .*MemAllocAsync"),
        ):
            g(x)
    assert w.driver.live("graphs") == 0 and tree.stats.nodes == 0
    asks[0] = False
    assert called(tree, g, x, 2) == "replayed"
    tree.close()
    w.forgive("memory")  # without a reference


@pytest.mark.parametrize("call", ["GraphGetNodes", "GraphNodeGetType", "GraphInstantiateWithFlags", "MemGetInfo"])
def test_a_graph_that_cannot_be_made_ready_is_destroyed(w: Any, call: str) -> None:
    tree, x = tree_of(), w.array(np.ones(4))
    f = tree.function(doubled)
    called(tree, f, x, 1)
    w.driver.fail(0, 2, call=call)
    with tree.step(), pytest.raises(fanin.DeviceOutOfMemoryError, match="out of memory"):
        f(x)
    assert w.driver.live("graphs") == 0 and tree.stats.nodes == 0
    assert called(tree, f, x, 2) == "replayed"
    tree.close()


def test_a_device_lost_in_a_replay_is_an_error_and_the_tree_can_be_closed(w: Any) -> None:
    w.judges_itself("a graph of a lost device is never destroyed, nor is what counts it")
    tree, x = tree_of(), w.array(np.ones(4))
    f = tree.function(doubled)
    called(tree, f, x)
    w.driver.fail(0, 719, call="GraphLaunch", sticky=True)
    with tree.step():
        with pytest.raises(fanin.DeviceError, match="cuGraphLaunch on cuda:0 failed"):
            f(x)
        with pytest.raises(fanin.DeviceError, match="was lost by an earlier failure"):
            f(x)
    tree.close()
    assert tree.closed


def test_a_forked_child_gets_an_error_and_may_drop_the_tree(w: Any) -> None:
    tree, x = tree_of(), w.array(np.ones(4))
    f = tree.function(doubled)
    assert called(tree, f, x) == "replayed"

    def use() -> None:
        with pytest.raises(RuntimeError, match="forked child"), tree.step():
            f(x)
        tree.close()

    assert in_child(use) == 0
    assert called(tree, f, x, 1) == "replayed"
    tree.close()


# Tracked work


def test_accesses_of_user_kernels_are_not_tracked_and_roles_are_trusted(w: Any) -> None:
    """A limit: a kernel that is not fanin's writes into a copied operand, and no check can find it."""
    tree, x, mine = tree_of(), w.array(np.zeros(4)), w.array(np.ones(4))

    def f(x: Any) -> Any:
        y = w.empty(4)
        w.launch(w.current_stream(), lambda a, b, c: np.add(a, b, out=c), reads=[x, mine], writes=[y])
        return y

    g = tree.function(f)
    assert called(tree, g, x) == "replayed"
    tree.close()


@pytest.mark.parametrize(("debug", "poisoned"), [(False, False), (True, True)])
def test_memory_of_an_ended_path_is_poisoned_with_debug(w: Any, debug: bool, poisoned: bool) -> None:
    tree = tree_of()
    f, g = tree.function(doubled), tree.function(lambda: None)
    with fanin.set_options(debug=debug):
        for _ in range(3):
            with tree.step():
                at = f(w.array(np.ones(4))).address
        with tree.step():
            g()  # .. whose path has none of it
    w.synchronize()
    seen = np.ctypeslib.as_array((ctypes.c_double * 4).from_address(at & ~(1 << 62)))
    assert (seen.tobytes() == b"\xa5" * 32) == poisoned
    tree.close()


# What runs short


@pytest.mark.parametrize("how", ["raises", "breaks its capture", "does well"])
def test_nothing_stays_captured_after_any_failed_call_of_the_driver(w: Any, how: str) -> None:
    """While a function is recorded that goes wrong itself, or does not: each call of the driver fails once. Then the
    same function is recorded as if nothing had been.
    """
    tree, x, mode = tree_of(), w.array(np.ones(4)), [""]

    def f(x: Any) -> Any:
        y = doubled(x)
        if mode[0] == "raises":
            raise KeyError("half-way")
        if mode[0] == "breaks its capture":
            try:
                w.sync(w.current_stream())
            except DriverError:
                pass
        return y

    failures, n, ran_out = 0, 0, False
    while not ran_out:
        g = tree.function(f)
        mode[0] = ""
        called(tree, g, x, 1)
        mode[0] = how
        before = w.driver.calls()
        with tree.step():
            w.driver.fail(n, 999)
            try:
                g(x)
            except (fanin.DeviceError, fanin.CaptureError, DriverError, KeyError, RuntimeError) as e:
                failures += not isinstance(e, KeyError)
                del e
            finally:
                w.driver.fail(-1, 0)
        ran_out = w.driver.calls() - before < n
        mode[0] = ""
        assert called(tree, g, x, 2) == "replayed", n
        with tree.step():
            assert g(x).numpy().tolist() == [2.0] * 4
        n += 1
    print(failures, "failures of", n)
    assert failures > 12
    tree.close()
    w.forgive("contexts")  # FakeDriver.call's own


def test_a_replay_makes_no_more_driver_calls_for_more_operands(w: Any) -> None:
    tree, s = tree_of(memory=1 << 16), w.stream()
    counts = {}
    with fanin.stream(s), w.driver.context():
        for n in (1, 32):
            f = tree.function(lambda *a: fanin.add_n(a), roles="static")
            operands = [w.array(np.ones(4)) for _ in range(n)]
            for _ in range(5):
                with tree.step():
                    before = w.driver.calls()
                    f(*operands)
                    counts[n] = w.driver.calls() - before
            assert f.last.did == "replayed"
    assert counts[1] == counts[32] <= 28, counts
    tree.close()


# Planted faults


def recorded_again_after_a_failure(w: Any) -> bool:
    tree, x, fails = tree_of(), w.array(np.ones(4)), [False]

    def f(x: Any) -> Any:
        if fails[0]:
            raise KeyError("half-way")
        return doubled(x)

    g = tree.function(f)
    called(tree, g, x, 1)
    fails[0] = True
    with tree.step(), pytest.raises(KeyError):
        g(x)
    fails[0] = False
    try:
        return called(tree, g, x, 2) == "replayed"
    except (fanin.CaptureError, fanin.DeviceError):
        return False


def foreign_memory_is_found(w: Any) -> bool:
    tree, x, mine = tree_of(), w.array(np.ones(4)), w.array(np.ones(4))
    f = tree.function(lambda x: fanin.add_n([x, mine]))
    called(tree, f, x, 1)
    try:
        called(tree, f, x, 1)
    except fanin.CaptureError:
        return True
    return False


def allocating_graphs_are_refused(w: Any) -> bool:
    tree, x = tree_of(), w.array(np.ones(4))

    def f(x: Any) -> Any:
        allocate(w)
        return doubled(x)

    g = tree.function(f)
    w.forgive("memory")
    try:
        return called(tree, g, x, 2) != "recorded"
    except fanin.CaptureError:
        return True


FAULTS = {
    "CUDA_STAYS_CAPTURED": recorded_again_after_a_failure,
    "CUDA_NOTES_NOTHING": foreign_memory_is_found,
    "CUDA_ANY_NODE": allocating_graphs_are_refused,
}


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_recordings_is_found(w: Any, name: str) -> None:
    assert FAULTS[name](w)
    w.judges_itself("a stream may stay captured")
    hooks.fault(name)
    try:
        assert not FAULTS[name](w)
    finally:
        hooks.fault(None)


def test_unsafe_calls_of_the_function_break_its_capture_and_the_tree_raises(w: Any) -> None:
    tree, x, asks = tree_of(), w.array(np.ones(4)), [False]

    def f(x: Any) -> Any:
        if asks[0]:
            with pytest.raises(DriverError, match="900"):
                w.unsafe()
        return doubled(x)

    g = tree.function(f)
    called(tree, g, x, 1)
    asks[0] = True
    with tree.step(), pytest.raises(fanin.CaptureError, match=r"f cannot be recorded|already|captured"):
        g(x)
    asks[0] = False
    assert called(tree, g, x, 2) == "replayed"
    tree.close()
