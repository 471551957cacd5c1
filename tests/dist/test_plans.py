"""Sums with plans: the bits of one process for every way that terms travel; ranks whose plans differ, and what the
first message of a rank may lack, are a right sum or an error that names the rank, on every rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core, dist
from fanin.dist import frames, plans
from fanin.dist.frames import ALL, FULL, HEAD, HEAD_SIZE, PART, PLAN, CutShort, Head
from fanin.dist.group import Call, Group
from fanin.dist.plans import Plan
from fanin.sim import Machine, explore
from kit.planned import wrongs
from kit.ranks import NO_MPI, under_mpiexec

#: Elements of float64 that travel in each way, on two ranks.
WAYS = {ALL: 100, PART: 20_000, HEAD: 40_000}


def one(group: Group, size: int = 100, **options: Any) -> Any:
    return dist.add_n([np.full(size, 1.0 + group.rank)], group, **options)


def is_right(x: Any, ranks: int) -> bool:
    return bool((x == ranks * (ranks + 1) / 2).all())


def message(plan: int, key: int, size: int = 80) -> Any:
    """A message of 80 bytes, of which the first 48 are those of the plan."""
    made = np.zeros(size, np.uint8)
    made[:48], made[48:64] = plan, key
    return made


@pytest.mark.parametrize(
    ("others", "sizes", "found"),
    [
        ([], [], frames.SAME),
        ([message(1, 1), message(1, 1)], [80, 96], frames.SAME),
        ([message(1, 1), message(1, 2)], [80, 80], frames.SAME_PLAN),
        ([message(1, 2), message(2, 2)], [80, 80], frames.OTHER_PLAN),
        ([message(1, 1), message(1, 1)], [80, 63], frames.CUT_SHORT),
        ([message(1, 1), message(1, 1)], [80, 79], frames.CUT_SHORT),
        ([message(2, 1), message(1, 1)], [64, 0], frames.OTHER_PLAN),
        ([message(1, 1), message(2, 1)], [0, 80], frames.CUT_SHORT),
    ],
)
def test_heads_are_compared_rank_by_rank(others: list[Any], sizes: list[int], found: int) -> None:
    own = message(1, 1)
    assert _core.heads_compare([own, *others], (80, *sizes), own, HEAD_SIZE, frames.ALIKE) == found


@pytest.mark.parametrize("wrong", [np.zeros(63, np.uint8), np.zeros(80, np.int8), np.zeros(160, np.uint8)[::2], None])
def test_what_has_no_head_is_refused(wrong: Any) -> None:
    own = message(1, 1)
    with pytest.raises(TypeError, match="expected messages with heads"):
        _core.heads_compare([own, wrong], [80, 80], own, HEAD_SIZE, frames.ALIKE)
    with pytest.raises(ValueError, match="expected a size for each message"):
        _core.heads_compare([own, own], [80], own, HEAD_SIZE, frames.ALIKE)


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16", "int32"), ("float64", "float16", "complex64", "bool")])
def test_sums_with_plans_have_the_bits_of_one_process(n: int, dtypes: tuple[str, ...]) -> None:
    pytest.importorskip("ml_dtypes")
    assert dist.threads(n, partial(wrongs, dtypes=dtypes), timeout=None) == [[]] * n


def test_sums_in_two_levels_with_plans_have_the_bits_of_one_process() -> None:
    assert dist.threads(4, partial(wrongs, dtypes=("float32",)), nodes=2, timeout=None) == [[]] * 4


def test_a_term_in_the_wrong_place_of_a_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Plan.put

    def turned(self: Plan, x: Any) -> None:
        real(self, x[::-1].copy())

    monkeypatch.setattr(Plan, "put", turned)
    assert all(dist.threads(2, partial(wrongs, dtypes=("float32",)), timeout=None))


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
@pytest.mark.parametrize("n", [2, 3])
def test_sums_of_mpi_with_plans_have_the_bits_of_one_process(n: int) -> None:
    program = (
        "from fanin import dist; from kit.planned import wrongs\n"
        "assert wrongs(dist.group(timeout=None), ('float32', 'float64')) == []"
    )
    done = under_mpiexec(n, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr


def of_floats(group: Group) -> list[Any]:
    return wrongs(group, ("float32",))


@pytest.mark.partners
def test_sums_of_gloo_with_plans_have_the_bits_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(2, of_floats, tmp_path) == [[], []]


class Old:
    """An engine without `share`."""

    def __init__(self, engine: Any) -> None:
        self.rank, self.size, self.name = engine.rank, engine.size, engine.name
        self.exchange, self.all_to_all = engine.exchange, engine.all_to_all
        self.abort, self.close = engine.abort, engine.close


def test_an_engine_without_share_has_plans_too() -> None:
    def rank(group: Group) -> Any:
        old = Group(Old(group._engine), timeout=None)
        return wrongs(old, ("float32",)), old._alike

    assert dist.threads(2, rank, timeout=None) == [([], True)] * 2


def test_tensors_and_arrays_with_gaps_have_plans() -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> Any:
        found = []
        for x in (
            torch.arange(6.0).reshape(2, 3).t(),
            np.arange(6.0).reshape(2, 3).T,
            torch.ones(3, requires_grad=True),
        ):
            for _ in range(3):
                got = dist.add_n([x], group)
                found.append(type(got) is type(x) and got.shape == x.shape and bool((got == 2 * x).all()))
        return found, group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [([True] * 9, 6)] * 2


# ---------------------------------------------------------------- what has plans


@pytest.mark.parametrize(
    "options",
    [
        {"weights": [2.0]},
        {"mean": True},
        {"scale": 0.0},
        {"scale": np.float64(0.5)},
        {"scale": np.array(0.5)},
        {"scale": True},
    ],
)
def test_sums_with_weights_a_mean_or_another_scale_than_a_python_number_have_none(options: dict[str, Any]) -> None:
    def rank(group: Group) -> int:
        for _ in range(3):
            one(group, **options)
        return group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [0, 0]


@pytest.mark.parametrize("brings", [0, 2])
def test_sums_have_none_unless_each_rank_brings_one_array(brings: int) -> None:
    def rank(group: Group) -> Any:
        arrays = [np.ones(3)] * (brings if group.rank else 1)
        return [dist.add_n(arrays, group).tolist() for _ in range(3)], group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [([[1.0 + brings] * 3] * 3, 0)] * 2


def test_a_value_that_is_equal_to_one_with_a_plan_but_not_allowed_is_refused() -> None:
    def rank(group: Group) -> Any:
        one(group, into=1), one(group, into=1)
        with pytest.raises(TypeError, match="or a rank, got a bool"):
            one(group, into=True)
        return group.counters.planned

    with pytest.raises(TypeError):
        dist.threads(2, lambda group: one(group, into=True), timeout=None)
    assert dist.threads(2, rank, timeout=None) == [1, 1]


def test_a_planned_sum_is_refused_where_a_graph_tree_records() -> None:
    def rank(group: Group) -> None:
        x = np.ones(4, "f4")
        for order in ("key", "exact"):
            for _ in range(2):
                dist.add_n([x], group, order)  # type: ignore[arg-type]
            tree = fanin.GraphTree("cpu")
            fn = tree.function(lambda x: dist.add_n([x], group, order))  # noqa: B023
            with tree.step(), pytest.raises(fanin.CaptureError, match="operand"):
                fn(x)

    dist.threads(1, rank, timeout=None)


# ---------------------------------------------------------------- ranks that differ


def made_ready(group: Group, size: int) -> None:
    """Both ranks have a plan."""
    for _ in range(2):
        assert is_right(one(group, size), group.size)
    assert group.counters.planned == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_one_rank_alone_knows_is_a_right_sum_and_both_know_it_then(way: int) -> None:
    def rank(group: Group) -> Any:
        made_ready(group, WAYS[way])
        (plan,) = group._plans.values()
        assert plan.way == way
        if group.rank == 1:
            group._plans.clear()
        return [is_right(one(group, WAYS[way]), 2) for _ in range(2)], group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [([True, True], 2)] * 2


@pytest.mark.parametrize("ways", [(ALL, PART), (PART, ALL), (HEAD, ALL), (PART, HEAD)])
def test_ranks_that_send_the_same_sum_in_other_ways_make_it_right(
    ways: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if they had other thresholds."""
    real = Plan.prepare

    def prepared(self: Plan, group: Group) -> None:
        mine = ways[group.rank]
        rooms = group._room, group._alike
        limits[threading.get_ident()] = 1 << 20 if mine == ALL else 0
        group._alike = mine == HEAD
        real(self, group)
        group._room, group._alike = rooms
        assert self.way == mine

    def rank(group: Group) -> Any:
        return [is_right(one(group, 1000), 2) for _ in range(3)], group.counters.planned

    limits: dict[int, int] = {}
    monkeypatch.setattr(frames, "whole_of", lambda ranks: limits.get(threading.get_ident(), 0))
    monkeypatch.setattr(Plan, "prepare", prepared)
    assert dist.threads(2, rank, timeout=None) == [([True] * 3, 0)] * 2


def test_keys_by_an_iterator_are_read_once_though_a_rank_has_no_plan() -> None:
    def rank(group: Group) -> Any:
        for turn in range(3):
            if turn == 2 and group.rank == 1:
                group._plans.clear()
            assert is_right(one(group, 3, keys=iter([5 - group.rank])), 2)
        return group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [1, 1]


def test_other_sizes_of_which_both_ranks_have_plans_are_an_error_that_names_both() -> None:
    def rank(group: Group) -> Any:
        for size in (3, 4, 3, 4):
            one(group, size)
        with pytest.raises(
            fanin.PeerError, match=r"rank 1 brings float64 of shape \(4,\), rank 0 .* shape \(3,\)"
        ) as e:
            one(group, 3 + group.rank)
        return e.value.rank, is_right(one(group, 3), 2), group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [(1, True, 3)] * 2


def test_other_steps_are_an_error_that_names_them_though_both_ranks_have_the_plan() -> None:
    def rank(group: Group) -> Any:
        group.step = 1
        made_ready(group, 100)
        group.step = 2 + group.rank
        with pytest.raises(fanin.PeerError, match=r"rank 1 is at step 3, .*rank 0 at step 2, ") as e:
            one(group)
        group.step = 4
        return e.value.rank, is_right(one(group), 2), group.counters.planned

    assert dist.threads(2, rank, timeout=None) == [(1, True, 2)] * 2


def test_a_group_made_anew_on_one_rank_is_found_though_both_ranks_have_the_plan() -> None:
    def rank(group: Group) -> Any:
        made_ready(group, 100)
        second = Group(group._engine, timeout=None) if group.rank == 1 else group
        second._plans = group._plans
        with pytest.raises(fanin.PeerError, match=r"rank 1 is at call add_n, pass 1, .* rank 0 at call add_n, pass 3"):
            one(second)

    dist.threads(2, rank, timeout=None)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_raises_instead_of_its_planned_sum_is_named_and_the_next_sum_works(way: int) -> None:
    def rank(group: Group) -> Any:
        made_ready(group, WAYS[way])
        with pytest.raises(TypeError if group.rank else fanin.PeerError, match="expected an array, got an object") as e:
            one(group, WAYS[way]) if group.rank == 0 else dist.add_n([object()], group)
        return getattr(e.value, "rank", 1), is_right(one(group, WAYS[way]), 2)

    assert dist.threads(2, rank, timeout=None) == [(1, True)] * 2


def test_a_rank_in_another_call_is_named_though_the_others_have_a_plan() -> None:
    def rank(group: Group) -> Any:
        made_ready(group, 100)
        with pytest.raises(fanin.PeerError, match=r"rank 2 is at call barrier, .* rank 0 at call add_n") as e:
            group.barrier() if group.rank == 2 else one(group)
        return e.value.rank, is_right(one(group), 3)

    assert dist.threads(3, rank, timeout=None) == [(2, True)] * 3


def test_keys_of_planned_sums_decide_the_order_and_are_checked() -> None:
    terms = [np.array([x], "f4") for x in (1e8, -1e8, 1.0)]

    def rank(group: Group) -> Any:
        def of(keys: list[Any]) -> Any:
            key = keys[group.rank]
            return dist.add_n([terms[group.rank]], group, "key", keys=None if key is None else [key])

        found = [float(of(keys)[0]) for keys in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [None] * 3)]
        for keys, words in (
            ([5, 6, 5], "key 5 of rank 2 was given by rank 0 before"),
            ([None, 1, None], "rank 1 gives keys and rank 0 gives none"),
            ([0, None, 1], "rank 0 gives keys and rank 1 gives none"),
        ):
            with pytest.raises(fanin.PeerError, match=words):
                of(keys)
        return found, group.counters.planned, float(of([0, 1, 2])[0])

    orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]
    right = [float(fanin.add_n([terms[k] for k in order])[0]) for order in orders]
    assert len(set(right)) > 1, "the order matters"
    assert dist.threads(3, rank, timeout=None) == [(right, 6, right[0])] * 3


# ---------------------------------------------------------------- messages


class Cuts:
    """An engine whose first messages lack their last bytes."""

    def __init__(self, engine: Any, left: int) -> None:
        self.engine, self.left = engine, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def share(self, sends: Any, receives: Any, again: bool) -> Any:
        return self.engine.share([x[: self.left] for x in sends], receives, again)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("left", [0, 20, HEAD_SIZE, HEAD_SIZE + 8])
def test_a_message_that_is_cut_short_closes_the_group_of_every_rank(left: int, planned: bool) -> None:
    def rank(group: Group) -> Any:
        if planned:
            made_ready(group, 100)
        if group.rank == 1:
            group._engine = Cuts(group._engine, left)
        with pytest.raises(fanin.PeerError, match=r"a header cannot be read|ended"):
            one(group)
            one(group)  # the rank that sent it hears of it here
        return bool(group.closed)

    assert dist.threads(2, rank, timeout=None) == [True, True]


def test_a_head_is_read_as_it_was_written() -> None:
    head = Head(PLAN, 12, PART, bytes(range(16)), 3, 4, 5, 6, 7, 8)
    raw = np.frombuffer(head.write() + bytes(12), np.uint8)
    assert frames.read(raw) == head and len(head.write()) == HEAD_SIZE == 64
    for wrong in (raw[:63], raw[1:], np.zeros(99, np.uint8)):
        with pytest.raises(CutShort):
            frames.read(wrong)


def test_a_group_keeps_the_last_plans_it_used_and_sums_leave_nothing_behind() -> None:
    """1,500 sums of 300 shapes: the plans, and descriptors."""

    def rank(group: Group) -> Any:
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        for k in range(1500):
            one(group, 1 + k % 300)
        after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        shapes = [name[2] for name in group._plans]  # type: ignore[index]
        return after - before, shapes, group.counters.planned

    last = [(1 + k,) for k in range(300 - plans.PLANS, 300)]
    assert dist.threads(1, rank, timeout=None) == [(0, last, 0)]


# ---------------------------------------------------------------- every order of ranks

SCENES: dict[str, Callable[[Group], None]] = {
    "the same plan": lambda group: None,
    "a plan of one rank": lambda group: group._plans.clear() if group.rank else None,
}


def sums(machine: Machine, prepare: Callable[[Group], None]) -> Any:
    """Two sums of which the second has a plan; the third begins as `prepare` says."""

    def rank(group: Group) -> Any:
        one(group), one(group)
        prepare(group)
        return is_right(one(group), group.size)

    ranks = machine.spawn(partial(dist.threads, timeout=None), 2, rank)
    machine.join()
    assert ranks.result == [True, True]
    return ranks.result


def other_sizes(machine: Machine) -> Any:
    """Each rank has the plans of two sizes, and they bring other ones."""

    def rank(group: Group) -> Any:
        for size in (3, 4):
            one(group, size), one(group, size)
        try:
            return one(group, 3 + group.rank).tolist()
        except fanin.PeerError as e:
            return e.rank

    ranks = machine.spawn(partial(dist.threads, timeout=None), 2, rank)
    machine.join()
    assert ranks.result == [1, 1], ranks.result
    return ranks.result


@pytest.mark.threads
@pytest.mark.parametrize("scene", SCENES)
def test_planned_sums_have_one_outcome_in_every_order(scene: str) -> None:
    report = explore(partial(sums, prepare=SCENES[scene]), limit=60, samples=60)
    assert not report.failed, str(report)


@pytest.mark.threads
def test_other_sizes_are_an_error_in_every_order() -> None:
    report = explore(other_sizes, limit=60, samples=60)
    assert not report.failed, str(report)


@pytest.mark.threads
def test_a_rank_that_does_not_compare_plans_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "ALIKE", 0)
    assert explore(other_sizes, limit=5, samples=5).failed


@pytest.mark.threads
def test_a_rank_without_a_plan_that_does_not_answer_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the head of a plan for the header that it lacks."""
    real = Call._heads

    def full(self: Call, message: Any) -> Any:
        messages, heads = real(self, message)
        return messages, [h._replace(kind=FULL) for h in heads]

    monkeypatch.setattr(Call, "_heads", full)
    assert explore(partial(sums, prepare=SCENES["a plan of one rank"]), limit=5, samples=5).failed


@pytest.mark.threads
def test_a_plan_without_the_size_of_its_term_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Head.write
    monkeypatch.setattr(plans, "digest", lambda *facts: "00" * 16)
    monkeypatch.setattr(Head, "write", lambda self: real(self._replace(body=0)))
    assert explore(other_sizes, limit=5, samples=5).failed
