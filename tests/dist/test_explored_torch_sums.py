"""Every order of ranks in `fanin.torch.accumulate(group=)`: one outcome, no deadlock; and planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import fanin
from fanin import _core, dist
from fanin._threads import here
from fanin.dist import reducer as reducer_module
from fanin.dist import sums
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer, _Collecting
from fanin.dist.threads import World
from fanin.sim import Machine, Report, explore

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.threads, pytest.mark.partners]


@pytest.fixture(autouse=True)
def a_thread_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of buckets that are not small, so that there are orders to explore."""
    monkeypatch.setattr(reducer_module, "SMALL", 0)


def total(named: list[tuple[str, Any]], factor: float) -> Any:
    return sum((factor * w).sum() for _, w in named)


def blocks(group: Group, options: dict[str, Any], fails: int | None, uneven: bool, after: bool, last: bool) -> Any:
    """A block of two passes, with keys if order="key", with weights 1 and 3 of ranks 0 and 1 if mean=True, `after` it
    once more; how each ended, and the sums.

    `fails`: a rank raises between its passes. `uneven`: rank 0 runs no pass. `last`: a thread sends during the second.
    """
    named = [(f"w{i}", torch.ones(3, requires_grad=True)) for i in range(2)]
    block = fanin.torch.accumulate(named, group=group, **options)
    seen: list[Any] = []
    for turn in range(1 + after):
        try:
            with block:
                for k in range(0 if uneven and group.rank == 0 else 2):
                    if fails == group.rank and turn == 0 and k == 1:
                        raise ZeroDivisionError("planted")
                    if options.get("order") == "key":
                        block.at(2 * group.rank + k)
                    weighed = block.weight((1, 3)[group.rank]) if options.get("mean") else contextlib.nullcontext()
                    with weighed, block.last() if last and k == 1 else contextlib.nullcontext():
                        total(named, 1.0 + group.rank).backward()
            seen.append("ended")
        except Exception as e:
            seen.append((type(e).__name__, getattr(e, "rank", None)))
    return seen, [None if w.grad is None else w.grad.tolist() for _, w in named]


def scenario(
    machine: Machine,
    n: int = 2,
    fails: int | None = None,
    uneven: bool = False,
    after: bool = False,
    last: bool = False,
    **options: Any,
) -> Any:
    how = {"options": options, "fails": fails, "uneven": uneven, "after": after, "last": last}
    ranks = machine.spawn(dist.threads, n, partial(blocks, **how))
    machine.join()
    good = (fails is None) + after
    each = 2.0 * sum(1.0 + r for r in range(n) if r or not uneven)
    if options.get("mean"):
        each = (1.0 * 1 + 2.0 * 3) / (1 + 3)
    ends: list[Any] = ["ended"] * n
    if fails is not None:
        ends = [("ZeroDivisionError", None) if r == fails else ("PeerError", fails) for r in range(n)]
    grads = [[good * each] * 3 if good else None] * 2
    assert ranks.result == [([end, *["ended"] * after], grads) for end in ends], ranks.result
    return ranks.result


def explored(limit: int = 4000, **options: Any) -> Report:
    return explore(partial(scenario, **options), limit=limit)


#: options, orders that there are at least
SCENES: list[tuple[dict[str, Any], int]] = [
    ({"n": 1}, 1),
    ({}, 1),
    ({"order": "exact"}, 1),
    ({"order": "key"}, 1),
    ({"order": "rank", "uneven": True, "missing": "skip"}, 1),
    ({"mean": True}, 1),
    ({"mean": True, "order": "exact"}, 1),
    ({"mean": True, "fails": 0, "after": True}, 1),
    ({"fails": 1}, 1),
    ({"fails": 0, "after": True}, 1),
    ({"last": True}, 3),
    ({"last": True, "order": "exact"}, 3),
    ({"last": True, "mean": True, "order": "key"}, 3),
    ({"last": True, "fails": 1}, 1),
]


@pytest.mark.parametrize(("options", "least"), SCENES)
def test_every_order_of_blocks_on_ranks_has_one_outcome(options: dict[str, Any], least: int) -> None:
    report = explored(**options)
    assert report.ok and report.runs >= least, report


@pytest.mark.parametrize("options", [options for options, _ in SCENES])
def test_every_order_of_blocks_with_a_small_bucket_has_one_outcome(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer_module, "SMALL", 1 << 16)
    assert explored(**options).ok


class Ticket:
    """A lock for which the machine's threads wait in the order of their arrival, so that the machine can order them."""

    def __init__(self) -> None:
        self.drawn, self.served = 0, _core.EventCount()

    def __enter__(self) -> None:
        self.drawn += 1
        self.served.wait(self.drawn - 1)

    def __exit__(self, *error: object) -> None:
        self.served.advance()


#: of each rank, what its two threads bring: whole numbers, and sums of float16 in float32
WHOLE = ("float32", [(1.0, 2.0)], 3.0)
WIDER = ("float16", [(4096.0, 1.0), (-4096.0, 0.0)], 1.0)


def threads_in_a_block(
    machine: Machine, lock: Callable[[], Any], what: tuple[str, list[tuple[float, ...]], float] = WHOLE
) -> Any:
    """Two threads of each rank run passes in a block, and are joined there."""
    dtype, factors, expected = what

    def rank(group: Group) -> Any:
        w = torch.ones(3, requires_grad=True, dtype=getattr(torch, dtype))
        over = _core.EventCount()
        errors: list[str] = []

        def run(factor: float) -> None:
            try:
                total([("w", w)], factor).backward()
            except ValueError as e:
                errors.append(str(e))
            over.advance()

        block = fanin.torch.accumulate([("w", w)], group=group, order="exact" if what is WHOLE else "rank")
        block._reducer._lock = lock()  # type: ignore[union-attr]
        with block:
            for k, factor in enumerate(factors[group.rank]):
                here.spawn(partial(run, factor), name=f"worker {k}")  # type: ignore[misc]
            over.wait(2)
        return errors, w.grad.tolist()

    ranks = machine.spawn(dist.threads, len(factors), rank)
    machine.join()
    assert ranks.result == [([], [expected] * 3)] * len(factors), ranks.result
    return ranks.result


@pytest.mark.parametrize("what", [WHOLE, WIDER], ids=lambda what: what[0])
def test_every_order_of_threads_in_a_block_has_one_outcome(what: Any) -> None:
    scene = partial(threads_in_a_block, lock=Ticket, what=what)
    report = explore(scene, limit=300, reduce=False)
    assert not report.failed and report.runs >= 10, report


def test_sums_of_threads_in_the_dtype_of_their_terms_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "accumulation", lambda dtype: dtype)
    scene = partial(threads_in_a_block, lock=Ticket, what=WIDER)
    report = explore(scene, limit=20, reduce=False)
    assert report.errors == report.runs > 0, report


def test_threads_that_put_gradients_without_the_lock_are_found() -> None:
    report = explore(partial(threads_in_a_block, lock=contextlib.nullcontext), limit=300, reduce=False)
    assert report.failed and report.deadlocks == 0, report


def overlapping(machine: Machine) -> Any:
    """A block of a reducer with a bucket for each parameter, whose gradients come in another order on rank 1."""

    def rank(group: Group) -> Any:
        named = [(f"w{i}", torch.ones(3, requires_grad=True)) for i in range(2)]
        reducer = Reducer(named, group, bucket_bytes=1)
        with reducer.accumulate():
            total(named, 1.0).backward()
        with reducer:
            torch.autograd.backward(total(named[:: 1 - 2 * group.rank], 2.0))
        return [w.grad.tolist() for _, w in named]

    ranks = machine.spawn(dist.threads, 2, rank)
    machine.join()
    assert ranks.result == [[[6.0] * 3] * 2] * 2, ranks.result
    return ranks.result


def in_the_last_pass(machine: Machine) -> Any:
    """The same in the last pass of a block over ranks."""

    def rank(group: Group) -> Any:
        named = [(f"w{i}", torch.ones(3, requires_grad=True)) for i in range(2)]
        block = fanin.torch.accumulate(named, group=group, order="rank")
        block._reducer = Reducer(named, group, order="rank", bucket_bytes=1)
        with block:
            total(named, 1.0).backward()
            with block.last():
                torch.autograd.backward(total(named[:: 1 - 2 * group.rank], 2.0))
        return [w.grad.tolist() for _, w in named]

    ranks = machine.spawn(dist.threads, 2, rank)
    machine.join()
    assert ranks.result == [[[6.0] * 3] * 2] * 2, ranks.result
    return ranks.result


@pytest.mark.parametrize("scene", [overlapping, in_the_last_pass])
def test_every_order_of_buckets_of_torch_passes_has_one_outcome(scene: Any) -> None:
    report = explore(scene, limit=150)
    assert not report.failed and report.runs >= 10, report


# ---------------------------------------------------------------- planted faults


def test_a_block_that_raises_and_sends_no_failure_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "_fail", lambda self, error: None)
    monkeypatch.setattr(World, "leave", lambda *args: None)  # nor does its rank leave
    report = explored(fails=1)
    assert report.deadlocks == report.runs > 0


def test_a_block_whose_error_is_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Collecting.finish
    monkeypatch.setattr(_Collecting, "finish", lambda self, error: real(self, None))
    assert explored(fails=1).failed


def test_a_block_that_leaves_the_contributions_of_a_failed_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "_reset", lambda self, keep=True: setattr(self, "_error", None))
    assert explored(fails=0, after=True, order="exact").failed
    assert explored().ok, "a first block has nothing to forget"


@pytest.mark.parametrize("scene", [overlapping, in_the_last_pass])
def test_buckets_of_torch_passes_that_are_sent_when_the_first_leaf_is_there_are_found(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender does not wait until a bucket is closed: in some orders it sends one without its gradient."""
    monkeypatch.setattr(Reducer, "_until", lambda self, bucket: None)
    report = explore(scene, limit=150)
    assert report.failed
