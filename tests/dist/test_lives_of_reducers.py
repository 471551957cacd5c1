"""Reducers end: by `close()`, with their last reference, and with the parameters of the blocks that use them in turn.
Threads, memory and descriptors do not grow with steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist.group import Call, Group
from fanin.dist.plans import PLANS
from fanin.dist.reducer import Reducer
from kit.messages import Messages

ONES = np.ones(300, "f4")
LISTING = threading.Lock()


def leaf() -> fanin.Leaf:
    return fanin.Leaf(np.zeros(300, "f4"), name="w")


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fanin.dist"}


@pytest.mark.core
def test_close_ends_the_thread_and_frees_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, before = Messages(monkeypatch), senders()

    def rank(group: Group) -> Any:
        w, other = leaf(), leaf()
        reducer = Reducer([w, other], group, bucket_bytes=1200, order="rank")
        for _ in range(3):
            with reducer.accumulate():
                fanin.backward([(w, 0, ONES), (other, 0, ONES)])
        fanin.backward([(w, 0, ONES), (other, 0, ONES)], reducer=reducer)
        reducer.close()
        reducer.close()
        found = float(w.grad[0]), reducer.norm() > 0, "w" in reducer.explain(w)
        w.grad = other.grad = None
        group.barrier()
        return found, messages.now

    found = dist.threads(2, rank, timeout=None)
    assert found == [((8.0, True, True), 0)] * 2
    for thread in senders() - before:
        thread.join()


@pytest.mark.core
@pytest.mark.parametrize("way", ["pass", "block", "accumulate"])
def test_a_pass_after_close_is_refused_on_every_rank(way: str) -> None:
    def rank(group: Group) -> Any:
        w = leaf()
        reducer = Reducer([w], group)
        if group.rank == 1:
            reducer.close()
        kind = RuntimeError if group.rank == 1 else fanin.PeerError
        with pytest.raises(kind, match="it was closed by close"):
            if way == "block":
                with reducer:
                    fanin.backward([(w, 0, ONES)])
            if way == "accumulate":
                with reducer.accumulate():
                    fanin.backward([(w, 0, ONES)])
            fanin.backward([(w, 0, ONES)], reducer=reducer)
        assert w.grad is None
        fanin.backward([(w, 0, ONES)], reducer=Reducer([w], group))
        return float(w.grad[0])

    assert dist.threads(2, rank, timeout=None) == [2.0, 2.0]


@pytest.mark.core
def test_close_inside_a_pass_is_refused() -> None:
    def rank(group: Group) -> Any:
        w = leaf()
        reducer = Reducer([w], group)

        def closes(g: Any) -> Any:
            with pytest.raises(RuntimeError, match="inside a pass"):
                reducer.close()
            return g

        node = fanin.Node(closes, edges=[(w, 0)])
        fanin.backward([(node, 0, ONES)], reducer=reducer, keep_graph=True)
        with reducer.accumulate():
            fanin.backward([(node, 0, ONES)], keep_graph=True)
        fanin.backward([(node, 0, ONES)], reducer=reducer)
        return float(w.grad[0])

    assert dist.threads(1, rank, timeout=None) == [3.0]


# ---------------------------------------------------------------- blocks of torch


def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Reducer]]:
    """The reducers that are made."""
    found: list[weakref.ref[Reducer]] = []
    init = Reducer.__init__

    def counted(reducer: Reducer, *args: Any, **options: Any) -> None:
        found.append(weakref.ref(reducer))
        init(reducer, *args, **options)

    monkeypatch.setattr(Reducer, "__init__", counted)
    return found


def block(group: Group, named: Any, factor: float = 1.0, last: bool = False, **options: Any) -> Any:
    """The gradients of a block with two passes. last: sums travel, on a thread, while the second one runs."""
    torch = pytest.importorskip("torch")
    for _, p in named:
        p.grad = None
    with fanin.torch.accumulate(named, group=group, **options) as made:
        for turn in range(2):
            with made.last() if last and turn else contextlib.nullcontext():
                torch.autograd.backward(sum(factor * p.float().sum() for _, p in named if p.requires_grad))
    return [None if p.grad is None else p.grad.tolist() for _, p in named]


def parameters() -> list[tuple[str, Any]]:
    torch = pytest.importorskip("torch")
    return [(name, torch.nn.Parameter(torch.ones(3))) for name in ("a", "b")]


@pytest.mark.partners
def test_a_block_takes_the_reducer_of_the_last_one_with_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)

    def rank(group: Group) -> Any:
        named, others = parameters(), parameters()
        sums = [block(group, one, k) for k in range(1, 4) for one in (named, others)]
        with fanin.torch.accumulate(named, group=group) as again:
            pass_of(named)
        with again:
            pass_of(named)
        return [one[0][0] for one in sums], float(named[0][1].grad[0])

    def pass_of(named: Any) -> None:
        for _, p in named:
            p.grad = None
        sum(p.sum() for _, p in named).backward()

    assert dist.threads(2, rank, timeout=None) == [([4, 4, 8, 8, 12, 12], 2.0)] * 2
    assert len(found) == 4


def other_options(group: Group, named: Any) -> Any:
    return block(group, named, order="exact", scale=0.5)


def other_names(group: Group, named: Any) -> Any:
    return block(group, [(name + "2", p) for name, p in named])


def fewer(group: Group, named: Any) -> Any:
    return block(group, named[:1])


def other_dtype(group: Group, named: Any) -> Any:
    named[0][1].data = named[0][1].data.double()
    return block(group, named)


def other_shape(group: Group, named: Any) -> Any:
    named[0][1].data = named[0][1].data.new_ones(5)
    return block(group, named)


def other_memory(group: Group, named: Any) -> Any:
    named[0][1].data = named[0][1].data.clone()
    return block(group, named)


def other_strides(group: Group, named: Any) -> Any:
    torch = pytest.importorskip("torch")
    wide = torch.nn.Parameter(torch.ones(2, 3))
    block(group, [("w", wide)])
    wide.data = wide.data.t().contiguous().t()
    sums = block(group, [("w", wide)])
    assert wide.grad.stride() == wide.stride() == (1, 2)
    return sums


def other_gradients(group: Group, named: Any) -> Any:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        named[0][1].data = named[0][1].data.bfloat16()
    named[0][1].grad_dtype = torch.float32
    sums = block(group, named)
    assert named[0][1].grad.dtype == torch.float32
    return sums


def frozen(group: Group, named: Any) -> Any:
    named[1][1].requires_grad_(False)
    first = block(group, named)
    named[1][1].requires_grad_(True)
    return [first, block(group, named)]


THREE, FOUR = [4.0] * 3, [[4.0] * 3] * 2
CHANGES: list[tuple[Callable[[Group, Any], Any], Any]] = [
    (other_options, [[2.0] * 3] * 2),
    (other_names, FOUR),
    (fewer, [THREE]),
    (other_dtype, FOUR),
    (other_shape, [[4.0] * 5, THREE]),
    (other_memory, FOUR),
    (other_strides, [[THREE, THREE]]),
    (other_gradients, FOUR),
    (frozen, [[THREE, None], FOUR]),
]


@pytest.mark.partners
@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_a_block_after_a_change_of_its_parameters_is_right(change: Any, expected: Any) -> None:
    def rank(group: Group) -> Any:
        named = parameters()
        assert block(group, named) == FOUR
        return change(group, named)

    assert dist.threads(2, rank, timeout=None) == [expected] * 2


@pytest.mark.partners
def test_a_block_whose_parameters_changed_on_one_rank_alone_is_right() -> None:
    """That rank makes another reducer, and the others take the last one."""

    def rank(group: Group) -> Any:
        named = parameters()
        block(group, named)
        first = named[0][1]
        if group.rank == 1:
            first.__class__ = type("Other", (type(first),), {})
        return block(group, named)

    assert dist.threads(2, rank, timeout=None) == [FOUR] * 2


@pytest.mark.partners
def test_after_a_block_that_raises_the_next_one_is_right() -> None:
    def rank(group: Group) -> Any:
        named = parameters()
        block(group, named)
        with (
            pytest.raises(ZeroDivisionError if group.rank else fanin.PeerError),
            fanin.torch.accumulate(named, group=group),
        ):
            if group.rank:
                raise ZeroDivisionError
            sum(p.sum() for _, p in named).backward()
        return block(group, named)

    assert dist.threads(2, rank, timeout=None) == [FOUR] * 2


@pytest.mark.partners
def test_a_reducer_at_rest_keeps_neither_its_parameters_nor_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    found, groups = made(monkeypatch), []

    def rank(group: Group) -> Any:
        own = Group(group._engine, timeout=None)
        groups.append(weakref.ref(own))
        named, others = parameters(), parameters()
        block(own, named)
        block(own, others)
        gone = weakref.ref(named[0][1])
        del named
        return gone() is None, sum(one() is not None for one in found)

    gc.disable()
    try:
        assert dist.threads(1, rank, timeout=None) == [(True, 1)]
        assert [one() for one in (*groups, *found)] == [None] * 3
    finally:
        gc.enable()


def descriptors() -> int:
    """How many descriptors the process has. The list opens one itself, so one thread lists at a time."""
    with LISTING:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def steps(group: Group, n: int, last: bool = False) -> tuple[int, int, int]:
    """How many reducers, threads and descriptors there are more after `n` steps than after the first ones."""
    named = parameters()

    def counts() -> tuple[int, int, int]:
        alive = sum(type(one) is Reducer for one in gc.get_objects())
        return alive, len(senders()), descriptors()

    gc.disable()
    try:
        for _ in range(5):
            block(group, named, last=last)
        group.barrier()
        before = counts()
        group.barrier()
        for _ in range(n):
            block(group, named, last=last)
        group.barrier()
        after = counts()
        group.barrier()
    finally:
        gc.enable()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


@pytest.mark.partners
def test_reducers_threads_memory_and_descriptors_do_not_grow_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, found = Messages(monkeypatch), made(monkeypatch)
    assert dist.threads(2, lambda group: steps(group, 1000), timeout=None) == [(0, 0, 0)] * 2
    print(messages.most, len(found))
    assert messages.most < 2 * 10 * 24 and len(found) == 2


@pytest.mark.partners
def test_reducers_threads_and_descriptors_do_not_grow_with_steps_over_gloo(tmp_path: Path) -> None:
    from dist.test_gloo import on_processes

    assert on_processes(2, functools.partial(steps, n=50), tmp_path) == [(0, 0, 0)] * 2


def in_turn(group: Group) -> Callable[[], Any]:
    """A step of blocks of two models, of which one sends in its last pass."""
    named, others = parameters(), parameters()

    def step() -> None:
        block(group, named)
        block(group, others, last=True, order="exact")

    return step


def of_rows(group: Group) -> Callable[[], Any]:
    """A step of a reducer of a table, of which rows travel, and of small leaves."""
    table, small = fanin.Leaf(np.zeros((600, 32), "f4"), name="table"), leaf()
    reducer = Reducer([table, small], group, bucket_bytes=1)
    numbers = iter(range(1 << 30))

    def step() -> None:
        k = next(numbers) % 50
        rows, columns = np.array([k, k + group.rank]), np.array([0, 31])
        sparse = fanin.Sparse("coo", (np.stack([rows, columns]), np.ones(2, "f4")), (600, 32))
        table.grad = small.grad = None
        with reducer.accumulate():
            fanin.backward([(table, 0, sparse), (small, 0, ONES)])
        fanin.backward([(table, 0, sparse), (small, 0, ONES)], reducer=reducer)

    return step


def of_arrays(group: Group) -> Callable[[], Any]:
    """A step of sums of arrays, of which some have plans, and of one that is skipped on a rank."""
    numbers = iter(range(1 << 30))

    def step() -> None:
        group.step = next(numbers)
        dist.add_n([ONES], group, scale=1 / (group.step + 1))  # a plan that is never used again
        if group.rank == 1:
            group.skip()
        else:
            dist.add_n([ONES], group)
        group.step = next(numbers)  # ends the skip
        dist.add_n([ONES], group)

    return step


def grown(group: Group, make: Callable[[Group], Callable[[], Any]], n: int) -> tuple[int, int, int, int]:
    """How many more threads, descriptors, plans and objects that a collection would look at there are after `n` steps
    without one.
    """
    step = make(group)

    def counts() -> list[int]:
        group.barrier()
        found = [len(senders()), descriptors(), len(group._plans), len(gc.get_objects())]
        group.barrier()
        return found

    gc.disable()
    try:
        for _ in range(PLANS + 50):  # caches are full then
            step()
        before = counts()
        for _ in range(n):
            step()
        after = counts()
    finally:
        gc.enable()
    threads, files, plans, objects = (b - a for a, b in zip(before, after, strict=True))
    return threads, files, plans, objects


GROWING = [in_turn, of_rows, of_arrays]


@pytest.mark.partners
@pytest.mark.parametrize("n", [300, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", GROWING)
def test_nothing_grows_with_steps_without_collections(make: Any, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, files, plans, objects in dist.threads(2, lambda group: grown(group, make, n), timeout=None):
        assert threads == files == plans == 0 and objects < 50, (threads, files, plans, objects)
    messages = Messages(monkeypatch)
    dist.threads(2, lambda group: grown(group, make, n // 3), timeout=None)
    assert messages.most < 2 << 20, messages.most


@pytest.mark.partners
def test_what_a_step_leaves_in_a_cycle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted fault: each call is in a cycle."""
    real = Call.__init__

    def cyclic(self: Any, *args: Any) -> None:
        real(self, *args)
        self.itself = self

    monkeypatch.setattr(Call, "__init__", cyclic)
    found = dist.threads(2, lambda group: grown(group, of_rows, 100), timeout=None)
    assert all(objects >= 2 * 100 for _, _, _, objects in found), found


@pytest.mark.partners
def test_reducers_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted fault: blocks whose reducers are never used again, and stay."""
    from fanin.dist import resting

    monkeypatch.setattr("fanin.dist.reducer.SMALL", 0)  # small buckets have no thread
    kept: list[Any] = []
    monkeypatch.setattr(resting, "rest", lambda reducer, *args: kept.append(reducer))
    found = dist.threads(2, lambda group: steps(group, 20, last=True), timeout=None)
    assert all(reducers >= 20 and threads >= 20 for reducers, threads, _ in found)
