"""Sums of arrays on a device that are made there: the bits of the host's way, and waits of streams that no order lacks.

Ranks are threads, on the simulated device, and on the CUDA backend with the fake driver.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import device_sums, layout
from fanin.dist.device_sums import Trip, Where
from fanin.dist.group import Group
from fanin.dist.layout import is_inexact, itemsize, typed
from fanin.dist.threads import ThreadEngine, World, _Queued
from fanin.sim import Array, Machine, Report, explore
from kit import standins
from kit.exchange_cuda import like, torch_like
from kit.sample import every, sizes
from kit.world import world

pytestmark = pytest.mark.threads

FLOATS = ("float32", "bfloat16", "float8_e4m3fn", "float64", "float16", "float8_e5m2", "complex64", "complex128")
OTHERS = ("int32", "uint8", "bool")
#: How many arrays each of up to four ranks brings.
COUNTS = ((1, 1, 1, 1), (2, 1, 3, 1), (3, 3, 2, 3))
SIZES = (1000, 3)


def on_ranks(w: Any, n: int, fn: Callable[[Group], Any], nodes: Any = 1) -> list[Any]:
    """The results of fn(group) on ranks that are threads, of the machine where there is one."""
    ranks = partial(dist.threads, n, fn, nodes=nodes, timeout=None)
    if w.kind != "sim":
        return ranks()
    made = w.machine.spawn(ranks)
    w.machine.join()
    return made.result


def values(dtype: str, size: int, number: int) -> Any:
    """Numbers of many magnitudes, the same for the same number; without sums that overflow: NaNs have other bits."""
    rng = np.random.default_rng([size, number])
    x = typed(np.zeros(size * itemsize(dtype), np.uint8), dtype)
    most = -1 if dtype == "float8_e4m3fn" else 5
    wide = rng.standard_normal(size) * 2.0 ** rng.integers(-5, most, size)
    if dtype.startswith("complex"):
        wide = wide + 1j * rng.standard_normal(size)
    elif not is_inexact(dtype):
        wide = np.abs(wide)
    x[...] = wide.astype(x.dtype)
    return x


def options_of(dtype: str, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Options of a sum. Lists have an item for each array of all ranks."""
    n, total = len(counts), sum(counts)
    turned = list(range(total))[::-1]
    made: list[dict[str, Any]] = [{}, {"order": "key", "keys": turned}, {"order": "rank", "into": "shard"}]
    if is_inexact(dtype):
        weights = [0.5 + k for k in range(total)]
        made += [{"order": "key", "scale": 1 / 3, "into": n - 1}, {"order": "rank", "scale": 1 / 3}]
        made += [{"order": "key", "weights": weights}, {"order": "rank", "weights": weights, "mean": True}]
    return made


def of_rank(options: dict[str, Any], counts: Sequence[int], rank: int) -> dict[str, Any]:
    """The options that one rank gives: its part of each list."""
    first = sum(counts[:rank])
    return {k: x[first : first + counts[rank]] if isinstance(x, list) else x for k, x in options.items()}


def on_host(x: Any) -> Any:
    return x.numpy() if isinstance(x, Array) else x


def summed(group: Group, dtype: str, counts: Sequence[int], put: Callable[[Any], Any] = np.asarray) -> list[Any]:
    """The bytes of the sums of all cases, each made twice."""
    found = []
    first = sum(counts[: group.rank])
    for size in SIZES:
        mine = [put(values(dtype, size, first + k)) for k in range(counts[group.rank])]
        for options in options_of(dtype, counts):
            for _ in range(2):
                total = dist.add_n(mine, group, **of_rank(options, counts, group.rank))
                found.append(None if total is None else (total.shape, on_host(total).tobytes()))
    return found


def on_device_of(w: Any, dtype: str, counts: Sequence[int], group: Group) -> tuple[list[Any], int, int]:
    """`summed` of arrays on a device; the sums that were made there, and those with a plan."""
    with fanin.stream(w.stream()):
        made = summed(group, dtype, counts, w.array)
    return made, group.counters.on_device, group.counters.planned


def law(w: Any, n: int, dtype: str) -> list[str]:
    """The cases whose bits on the device are other than the host's."""
    wrong = []
    for counts in COUNTS:
        counts = counts[:n]
        host = dist.threads(n, partial(summed, dtype=dtype, counts=counts), timeout=None)

        for r, (sums, on_device, planned) in enumerate(on_ranks(w, n, partial(on_device_of, w, dtype, counts))):
            wrong += [f"{counts}, rank {r}, sum {k}" for k, x in enumerate(sums) if x != host[r][k]]
            if on_device != len(sums):
                wrong.append(f"{counts}, rank {r}: {on_device} of {len(sums)} sums on the device")
            plans = sum("weights" not in o for o in options_of(dtype, counts)) * len(SIZES) * (max(counts) == 1)
            if planned != plans:
                wrong.append(f"{counts}, rank {r}: {planned} sums had a plan, {plans} should")
    return wrong


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sim", "fake", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", every(3, [*FLOATS, *OTHERS]))
def test_sums_on_a_device_have_the_bits_of_those_on_the_host(kind: str, n: int, dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    with world(kind, 1) as w:
        assert law(w, n, dtype) == []


def test_terms_of_ranks_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trip.to_owners
    monkeypatch.setattr(Trip, "to_owners", lambda self, *args: real(self, *args)[::-1])
    with world("sim", 1) as w:
        assert law(w, 3, "float32") != []


def test_a_sum_that_goes_through_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sums, "agreed", lambda call, headers: False)
    monkeypatch.setattr(layout.Layout, "flatten", lambda self, arrays: flat_on_host(arrays))
    with world("sim", 1) as w:
        assert any("on the device" in text for text in law(w, 2, "float32"))


def flat_on_host(arrays: Sequence[Any]) -> list[Any]:
    return [on_host(x).reshape(-1).view(np.uint8) for x in arrays]


# ---------------------------------------------------------------- shapes, and what goes another way


def ended(fn: Callable[[], Any]) -> Any:
    """What a call returns, or its error as [type, text, rank]."""
    try:
        return fn()
    except Exception as e:
        return [type(e).__name__, str(e), getattr(e, "rank", None)]


@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_arrays_with_gaps_without_axes_and_without_elements(kind: str) -> None:
    def rank(group: Group) -> Any:
        with fanin.stream(w.stream()):
            x = w.array(np.arange(600.0).reshape(20, 30) * (1 + group.rank))
            arrays = [x.T, x[::2, 1:9], x[3, 4], x[:0], x[2:3].reshape(30)]
            return [dist.add_n([a], group).numpy().tolist() for a in arrays], group.counters.on_device

    x = np.arange(600.0).reshape(20, 30) * 6
    right = [a.tolist() for a in (x.T, x[::2, 1:9], x[3, 4], x[:0], x[2])]
    with world(kind, 1) as w:
        assert on_ranks(w, 3, rank) == [(right, 5)] * 3


def test_a_sum_is_ready_on_the_current_stream_and_arrays_may_be_written_after_the_call() -> None:
    def rank(group: Group) -> Any:
        s = w.stream()
        with fanin.stream(s):
            x = w.array(np.ones(600))
            w.fill(s, x, 1 + group.rank)
            total = dist.add_n([x], group)
            w.fill(s, x, 100)  # before the other rank's copy has run
            w.launch(s, lambda v: np.multiply(v, 2, out=v), writes=[total], name="double")
            return set(total.numpy().tolist())

    for seed in range(5):
        with world("sim", 1, seed) as w:
            assert on_ranks(w, 2, rank) == [{6.0}] * 2


def test_counters_have_the_bytes_that_travel_between_devices() -> None:
    def rank(group: Group) -> Any:
        with fanin.stream(w.stream()):
            arrays = [w.array(np.ones(1024, "f4")) for _ in range(1 + group.rank)]
            before = group.counters.bytes_sent
            dist.add_n(arrays, group, "key")
            after = group.counters
            return after.bytes_sent - before, after.sums

    with world("sim", 1) as w:
        first, second = on_ranks(w, 2, rank)
    # a half of each array to the other rank, and a half of the sum; what is left are headers
    assert 2 * 2048 < first[0] < 2 * 2048 + 600 and 3 * 2048 < second[0] < 3 * 2048 + 600
    assert first[1] == second[1] == 1


def held_by(group: Group, w: Any) -> list[int]:
    """The blocks of the device's memory in use after some sums, and after three times as many."""
    held = []
    with fanin.stream(w.stream()):
        x = w.array(np.ones(600))
        for turn in range(30):
            dist.add_n([x], group)
            dist.add_n([x, x], group)
            if turn in (9, 29):
                group.barrier()
                w.synchronize()
                group.barrier()
                fanin.trim()
                group.barrier()  # what one rank frees, another one does not, and may go on before it is free
                held.append(w.driver.live("memory"))
                group.barrier()
    return held


@pytest.mark.parametrize("cycle", [False, True])
def test_sums_leave_no_memory_to_the_collector(cycle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cycle: a planted one, which is found."""
    real = _Queued.copy

    def copy(self: Any, *args: Any) -> None:
        real(self, *args)
        if cycle:
            self.receives = self, args

    monkeypatch.setattr(_Queued, "copy", copy)
    with world("fake", 1) as w:
        gc.disable()
        try:
            held = on_ranks(w, 2, partial(held_by, w=w))
        finally:
            gc.enable()
    # a block or two may wait for an event that no call has looked at
    grows = [late - early > 20 for early, late in held]
    assert grows == [cycle, cycle], held


def refusals() -> dict[str, tuple[Callable[[Any, Group], Any], str]]:
    """Calls on two ranks of arrays that cannot be summed on their device, and what rank 1's error says."""

    def array(w: Any, group: Group, device: int = 0) -> Any:
        return w.array(np.ones(300, "f4"), device)

    def elsewhere(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group) if group.rank else np.ones(300, "f4")], group)

    def nothing(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group)] if group.rank else [], group)

    def two_devices(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group, group.rank)], group)

    def several(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group), array(w, group, 1)], group)

    def mixed(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group), np.ones(300, "f4")], group)

    def exact(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group)], group, "exact")

    def narrow(w: Any, group: Group) -> Any:
        return dist.add_n([array(w, group)], group, wire="bfloat16")

    here = "do not travel between ranks in this call: give x.numpy()"
    brings = "none that are summed there: give x.numpy()"
    return {
        "an ndarray on a rank": (elsewhere, brings),
        "no array on a rank": (nothing, brings),
        "another device on each rank": (two_devices, brings),
        "two devices on a rank": (several, here),
        "an ndarray beside an array": (mixed, here),
        "an exact sum": (exact, here),
        "a narrow dtype on the way": (narrow, here),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_summed_on_its_device_is_an_error_on_every_rank_and_the_next_sum_works(case: str) -> None:
    call, text = refusals()[case]

    def rank(group: Group) -> Any:
        with fanin.stream(w.stream()):
            found = ended(lambda: call(w, group))
            total = dist.add_n([w.array(np.ones(300, "f4"))], group)
            return found, set(total.numpy().tolist())

    with world("sim", 2) as w:
        sums = on_ranks(w, 2, rank)
    assert [total for _, total in sums] == [{2.0}] * 2
    for found, _ in sums:
        assert found[0] in ("PeerError", "TypeError") and text in found[1], found


def test_two_levels_are_an_error_that_names_the_remedy() -> None:
    def rank(group: Group) -> Any:
        return ended(lambda: dist.add_n([w.array(np.ones(3))], group))

    with world("sim", 1) as w:
        for found in on_ranks(w, 4, rank, nodes=2):
            assert "give x.numpy()" in found[1]


def test_sums_of_ndarrays_and_of_arrays_on_a_device_do_not_share_a_plan() -> None:
    def rank(group: Group) -> Any:
        with fanin.stream(w.stream()):
            here, there = np.full(300, 1.0 + group.rank), w.array(np.full(300, 10.0 + group.rank))
            found = []
            for x in (here, there, here, there):
                total = dist.add_n([x], group)
                found.append(float(on_host(total)[0]))
            return found, group.counters.planned, group.counters.on_device

    with world("sim", 1) as w:
        assert on_ranks(w, 2, rank) == [([3.0, 21.0, 3.0, 21.0], 2, 2)] * 2


def test_a_plan_that_one_rank_has_forgotten_is_made_again() -> None:
    def rank(group: Group) -> Any:
        with fanin.stream(w.stream()):
            x, found = w.array(np.ones(300)), []
            for turn in range(4):
                if turn == 2 and group.rank == 1:
                    group._plans.clear()
                found.append(float(dist.add_n([x], group).numpy()[0]))
            return found, group.counters.planned

    with world("sim", 1) as w:
        assert on_ranks(w, 2, rank) == [([2.0] * 4, 2)] * 2


@pytest.mark.parametrize("each", [1, 2])
def test_a_sum_asks_once_where_its_arrays_lie(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = device_sums.where, []

    def where(group: Group, arrays: Any) -> Any:
        asked.append(group.rank)
        return real(group, arrays)

    monkeypatch.setattr(device_sums, "where", where)

    def rank(group: Group) -> Any:
        for _ in range(2):  # the second sum of one array has a plan
            dist.add_n([w.array(np.ones(600))] * each, group)
        return group.counters.on_device

    with world("sim", 1) as w:
        assert on_ranks(w, 2, rank) == [2, 2]
    assert sorted(asked) == [0, 0, 1, 1]


def test_a_rank_that_fails_amid_a_sum_on_a_device_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Queued.copy

    def copy(self: _Queued, *args: Any) -> None:
        if self.rank == 1:
            raise OSError("planted")
        real(self, *args)

    monkeypatch.setattr(_Queued, "copy", copy)

    def rank(group: Group) -> Any:
        return ended(lambda: dist.add_n([w.array(np.ones(600))], group)), group.closed

    with world("sim", 1) as w:
        found = on_ranks(w, 2, rank)
    for (name, text, _), closed in found:
        assert name == "PeerError" and "rank 1 failed: OSError: planted" in text and closed


# ---------------------------------------------------------------- orders of threads and streams

#: The waits of a transport with a queue of its own.
WAITS = ("queue_for_caller", "queue_for_sender", "caller_for_queue", "caller_for_receivers")


class QueuedEngine(ThreadEngine):
    """Its copies run on a stream of their own, as NCCL's do."""

    def __init__(self, world: World, rank: int, machine: Machine, device: int = 0) -> None:
        super().__init__(world, rank)
        self.own = machine.stream(device, name=f"queue of {rank}")

    def queue(self, stream: Any) -> Any:
        return self.own


class AcrossDevices(QueuedEngine):
    """Each rank has a device of its own."""

    def carries(self, x: Any, device: str) -> str:
        return "any device"


def stream_ordered(real: Callable[..., Any]) -> Callable[..., Any]:
    """`Where.empty` by an allocator as torch's: memory is given again while work on its stream still runs."""
    memory: dict[Any, Any] = {}

    def empty(self: Where, shape: Any, dtype: Any = None) -> Any:
        key = self.stream.device, self.stream.handle, shape, str(dtype)
        if key not in memory:
            memory[key] = real(self, shape, dtype)
        return memory[key]

    return empty


def trained(machine: Machine, group: Group, each: int, into: Any, device: int = 0) -> list[Any]:
    """Make arrays by kernels, sum them, and write to them, and to the sum, after the call; twice. Return the sums."""
    s, kept = machine.stream(device, name=f"rank {group.rank}"), []
    with fanin.stream(s):
        for turn in range(2):
            arrays = [machine.empty(600, "float32", device) for _ in range(each)]
            for x in arrays:
                machine.launch(s, lambda v, k=turn: v.fill(1 + group.rank + k), writes=[x], name="fill")
            total = dist.add_n(arrays, group, "key", into=into)
            for x in arrays:
                machine.launch(s, lambda v: v.fill(100), writes=[x], name="zero_grad")
            del arrays, x
            if total is not None:
                kept.append(machine.empty(total.shape, "float32", device))
                machine.launch(s, lambda a, b: np.copyto(b, a), reads=[total], writes=kept[-1:], name="keep")
                machine.launch(s, lambda v: np.multiply(v, 2, out=v), writes=[total], name="use")
        return [sorted(set(x.numpy().tolist())) for x in kept]


def scenario(machine: Machine, n: int, each: int, queued: bool, into: Any) -> Any:
    shared, apart = World(n), machine.devices > 1

    def rank(r: int) -> Any:
        engine = ThreadEngine(shared, r)
        if queued:
            engine = AcrossDevices(shared, r, machine, r) if apart else QueuedEngine(shared, r, machine)
        group = Group(engine, timeout=None)
        try:
            return trained(machine, group, each, into, r if apart else 0)
        finally:
            group.close()

    def put(self: _Queued, piece: Any, place: Any) -> None:
        machine.launch(self.queue, lambda a, b: np.copyto(b, a), reads=[piece], writes=[place], name="send")

    with pytest.MonkeyPatch.context() as patch:
        if queued:
            patch.setattr(Where, "empty", stream_ordered(Where.empty))
        if apart:
            patch.setattr(_Queued, "put", put)
        threads = [machine.spawn(rank, r, name=f"rank {r}", apart=r + 1) for r in range(n)]
        machine.join()
    sums = [[each * (n * (n + 1) / 2 + n * turn)] for turn in range(2)]
    outcome = [t.result for t in threads]
    assert outcome == [sums if into in ("all", "shard", r) else [] for r in range(n)]
    return outcome


#: With a wait left out, one of so many orders, or of as many at random, has a race.
SAMPLE = 8


def explored(
    n: int,
    each: int,
    queued: bool = True,
    into: Any = "all",
    limit: int = SAMPLE,
    devices: int = 1,
    **options: Any,
) -> Report:
    run = partial(scenario, n=n, each=each, queued=queued, into=into)
    return explore(run, limit=limit, samples=limit, devices=devices, **options)


@pytest.mark.parametrize("limit", sizes(SAMPLE, 60))
@pytest.mark.parametrize(
    ("n", "each", "queued", "into"),
    [
        *[(2, 1, True, "all"), (2, 2, False, "all"), (2, 1, True, 1)],
        *(pytest.param(*scene, marks=pytest.mark.full) for scene in [(3, 1, True, "all"), (3, 2, True, "shard")]),
    ],
)
def test_sums_on_a_device_race_in_no_order(n: int, each: int, queued: bool, into: Any, limit: int) -> None:
    report = explored(n, each, queued, into, limit)
    assert not report.failed and (report.runs >= limit or report.complete), str(report)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.full)])
def test_sums_of_ranks_with_a_device_each_race_in_no_order(n: int) -> None:
    report = explored(n, 1, devices=n)
    assert not report.failed and (report.runs >= SAMPLE or report.complete), str(report)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("wait", WAITS[1:])
def test_each_wait_that_is_left_out_is_a_race(wait: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Queued, wait, lambda *args: None)
    assert explored(2, 1, devices=devices, stop_at_first=True).races > 0, wait


def one_way(machine: Machine) -> list[Any]:
    """Rank 0 sends, and rank 1 receives into memory that its stream still writes."""
    shared = World(2)

    def rank(r: int) -> Any:
        engine, s = QueuedEngine(shared, r, machine), machine.stream(name=f"rank {r}")
        with fanin.stream(s):
            x = machine.empty(4, "float32")
            machine.launch(s, lambda v: v.fill(1 + r), writes=[x], name="fill")
            sends, receives = ([0, 4], [0, 0]) if r == 0 else ([0, 0], [4, 0])
            engine.device_all_to_all(x if r == 0 else x[:0], sends, x if r else x[:0], receives, s).wait(None)
            return x.numpy().tolist()

    threads = [machine.spawn(rank, r, name=f"rank {r}", apart=r + 1) for r in range(2)]
    machine.join()
    return [t.result for t in threads]


def test_a_rank_receives_into_memory_that_its_stream_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    report = explore(one_way, limit=SAMPLE, samples=SAMPLE, devices=1)
    assert not report.failed and list(report.results) == [[[1.0] * 4] * 2], str(report)
    monkeypatch.setattr(_Queued, WAITS[0], lambda *args: None)
    assert explore(one_way, limit=SAMPLE, samples=SAMPLE, devices=1, stop_at_first=True).races > 0


@pytest.mark.parametrize("wait", ["queue_for_sender", "caller_for_receivers"])
def test_each_wait_of_copies_on_the_callers_stream_that_is_left_out_is_a_race(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Queued, wait, lambda *args: None)
    assert explored(2, 1, queued=False, stop_at_first=True).races > 0, wait


# ---------------------------------------------------------------- torch's tensors


class OfThreads(standins.Library):
    """A library whose current stream is each thread's own."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.here = threading.local()

    def stream(self, device: int = 0) -> int:
        return getattr(self.here, "handle", 0)


@pytest.mark.parametrize("library", ["cupy", "numba", "dlpack"])
def test_arrays_of_other_libraries_on_a_device_are_refused(library: str) -> None:
    with world("fake", 1) as w, like(library, of := standins.Library(w.driver)) as made:
        x = made(of, (300,), "f4").fill(w.stream(), 1)
        [[name, text, _]] = dist.threads(1, lambda group: ended(lambda: dist.add_n([x], group)), timeout=None)
        assert name == "ValueError" and "on cuda:0" in text


@pytest.fixture
def torch_on_fake() -> Iterator[tuple[Any, Any, OfThreads]]:
    """The fake driver, and a stand-in for torch on it, with what sums on a device ask of torch's tensors."""
    with world("fake", 1) as w, torch_like(library := OfThreads(w.driver), True) as made:
        module = sys.modules["torch"]
        made.is_cuda, made.is_sparse, made.is_contiguous = True, False, device_sums.is_gap_free
        made.itemsize = property(lambda self: self.dtype.itemsize)
        made.reshape = lambda self, *shape: made(
            library, np.empty(self.shape, "?").reshape(*shape).shape, self.dtype, 0, self.memory, None, self.offset
        )
        made.__len__ = lambda self: self.shape[0]

        def piece(self: Any, at: slice) -> Any:
            begin, end, _ = at.indices(len(self))
            offset = self.offset + begin * self.itemsize
            return made(library, (max(end - begin, 0),), self.dtype, 0, self.memory, None, offset)

        made.__getitem__ = piece
        module.empty = lambda shape, dtype, device: made(library, shape if type(shape) is tuple else (shape,), dtype)
        module.cuda.is_current_stream_capturing = lambda: False
        yield w, module, library


def test_tensors_are_summed_on_the_device_where_they_lie(torch_on_fake: tuple[Any, Any, OfThreads]) -> None:
    w, module, library = torch_on_fake

    def rank(group: Group) -> Any:
        s = w.stream()
        library.here.handle = s.handle
        x = module.Tensor(library, (20, 30), "f4").fill(s, 1 + group.rank)
        total = dist.add_n([x, x], group, "key", scale=0.5)
        x.fill(s, 100)
        assert (x.address, s.handle) in library.recorded
        return type(total) is module.Tensor, total.shape, set(np.ravel(total.read(s))), group.counters.on_device

    assert on_ranks(w, 3, rank) == [(True, (20, 30), {6.0}, 1)] * 3


def test_tensors_go_through_the_host_where_torch_has_another_stream_or_captures(
    torch_on_fake: tuple[Any, Any, OfThreads],
) -> None:
    w, module, library = torch_on_fake
    s, x = w.stream(), module.Tensor(library, (3,), "f4")
    assert device_sums.stream_of(x, "cuda:0") == fanin.Stream("cuda:0", 1)
    library.here.handle = s.handle
    with fanin.stream(s):
        assert device_sums.stream_of(x, "cuda:0") == s
    with fanin.stream(w.stream()):
        assert device_sums.stream_of(x, "cuda:0") is None
    assert device_sums.stream_of(x, "cuda:0") == s
    module.cuda.is_current_stream_capturing = lambda: True
    assert device_sums.stream_of(x, "cuda:0") is None
