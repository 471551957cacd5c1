"""Steps in which a rank has nothing: `group.skip`, and the passes that a rank names as it ends.

The others' sums go on without it, it gets them too, and no sum pairs with one of another step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from dist.test_explored_ranks import on_ranks
from fanin import dist
from fanin.dist import skip as skipping
from fanin.dist.group import Group
from kit.ranks import NO_MPI, under_mpiexec

pytestmark = pytest.mark.core


def value(step: int, call: int, rank: int) -> float:
    return 10.0 ** (3 * step + call) * (rank + 1)


def expected(step: int, call: int, bring: set[int]) -> float:
    return sum(value(step, call, r) for r in bring)


def of_add_n(group: Group, step: int, call: int) -> float:
    return float(dist.add_n([np.full(300, value(step, call, group.rank))], group)[-1])


def trained(group: Group, calls: list[int], skips: Callable[[int, int], bool]) -> list[list[float]]:
    """The sums of each step, of as many `add_n` as `calls` says, on a rank that skips some steps."""
    found = []
    for group.step, n in enumerate(calls):
        if skips(group.step, group.rank):
            found.append([float(x[-1]) for x in group.skip()])
        else:
            found.append([of_add_n(group, group.step, k) for k in range(n)])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_the_sums_of_a_step_are_those_of_the_ranks_that_did_not_skip_it(ranks: int, seed: int) -> None:
    rng = random.Random(f"{ranks} {seed}")
    calls = [rng.randrange(4) for _ in range(6)]
    skipped = {(s, r): rng.random() < 0.4 for s in range(6) for r in range(ranks)}
    every = dist.threads(ranks, lambda g: trained(g, calls, lambda s, r: skipped[s, r]), timeout=None)
    for step, n in enumerate(calls):
        bring = {r for r in range(ranks) if not skipped[step, r]}
        sums = [expected(step, k, bring) for k in range(n)] if bring else []
        assert [found[step] for found in every] == [sums] * ranks, (step, bring)


def test_a_rank_that_counts_no_pass_of_a_step_that_it_skipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    found = skipping._next_call

    def one_pass_late(group: Group, timeout: Any) -> Any:
        one = found(group, timeout)
        group._passes += 1
        return one

    monkeypatch.setattr(skipping, "_next_call", one_pass_late)
    with pytest.raises(fanin.PeerError, match=r"rank 1 is at step 0, call add_n, pass 2, .* rank 0 at .* pass 1"):
        dist.threads(2, lambda g: trained(g, [2, 2], lambda s, r: (s, r) == (0, 1)), timeout=None)


@pytest.mark.parametrize("order", ["key", "exact", "rank"])
@pytest.mark.parametrize("into", ["all", "shard", 1])
@pytest.mark.parametrize("scale", [None, 0.1, np.float32(0.3), 1j, np.array(0.1), Fraction(1, 3), -math.inf, math.nan])
def test_a_sum_has_the_bits_of_one_in_which_the_rank_brings_no_array(order: Any, into: Any, scale: Any) -> None:
    options = {"order": order, "into": into, "scale": scale}
    dtype = "complex64" if scale == 1j else "float32"

    def rank(group: Group, skips: bool) -> Any:
        rng = np.random.default_rng(group.rank)
        arrays = [] if group.rank == 1 else [rng.standard_normal(700).astype(dtype) for _ in range(group.rank + 1)]
        group.step = 5
        if skips and group.rank == 1:
            [got] = group.skip()
        else:
            got = dist.add_n(arrays, group, **options)
        return None if got is None else (got.dtype, got.tobytes())

    every = [dist.threads(3, lambda g, s=skips: rank(g, s), timeout=None) for skips in (False, True)]
    assert every[0] == every[1]


def reduced(group: Group, skipping_rank: int, **options: Any) -> Any:
    """A step in which every rank but one runs a pass of two reducers, which the last skips; then one of all."""
    ws = [fanin.Leaf(np.zeros(n, "f4"), name=f"w{n}") for n in (300, 5)]
    reducers = [dist.Reducer([w], group, missing="skip", bucket_bytes=1, **options) for w in ws]
    found = []
    for group.step in range(3):
        if (group.step, group.rank) == (1, skipping_rank):
            with reducers[0].accumulate():
                fanin.backward([(ws[0], 0, np.full(300, 1000, "f4"))])  # the second micro-batch could not be read
            assert group.skip(reducers=reducers) == []
        else:
            for w, reducer in zip(ws, reducers, strict=True):
                root = [(w, 0, np.full(w.array.shape, group.rank + 1, "f4"))]
                with reducer.accumulate():
                    fanin.backward(root)
                fanin.backward(root, reducer=reducer)
        found.append([float(w.grad[-1]) for w in ws])
        for w in ws:
            w.grad = None
    return found


@pytest.mark.parametrize("order", ["key", "exact", "rank"])
def test_a_rank_that_skips_gets_the_sums_of_reducers_and_brings_nothing(order: Any) -> None:
    for found in dist.threads(3, lambda g: reduced(g, 1, order=order), timeout=None):
        assert found == [[12, 12], [8, 8], [12, 12]]


def test_a_rank_that_skips_has_no_part_in_the_divisor_of_a_mean() -> None:
    for found in dist.threads(3, lambda g: reduced(g, 0, mean=True), timeout=None):
        assert found == [[2, 2], [2.5, 2.5], [2, 2]]


def errors_of(group: Group, call: Callable[[Group], Any], skip: Callable[[Group], Any]) -> str:
    """What the call of rank 0 and the skip of rank 1 raise; then a sum of all works."""
    group.step = 1
    with pytest.raises((fanin.PeerError, RuntimeError, ValueError)) as e:
        call(group) if group.rank == 0 else skip(group)
    group.step = 2
    assert of_add_n(group, 0, 0) == 3
    return f"{type(e.value).__name__} {getattr(e.value, 'rank', None)} {e.value}"


def a_pass(missing: Any) -> Callable[[Group], Any]:
    def run(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(3), name="w")
        reducer = dist.Reducer([w], group, missing=missing)
        if group.rank:
            return group.skip(reducers=reducer)
        return fanin.backward([(w, 0, np.ones(3))], reducer=reducer)

    return run


def test_a_reducer_that_needs_every_rank_is_an_error_on_all_that_names_the_one_that_skips() -> None:
    own = 'skip: rank 1 skips step 1 and brings no gradient: expected a reducer with missing="skip" on every rank'
    other, mine = dist.threads(2, lambda g: errors_of(g, a_pass("error"), a_pass("error")), timeout=None)
    assert mine == f"ValueError None {own}"
    assert other == f"PeerError 1 backward, pass 1, bucket 0: rank 1 failed: ValueError: {own}"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (a_pass("skip"), "cannot take part in backward: expected group.skip(step, reducers=[reducer]), so that"),
        (lambda g: dist.gather_trace(fanin.trace(), g), "cannot take part in gather_trace: expected no such call"),
    ],
)
def test_a_call_in_which_the_rank_cannot_take_part_is_an_error_on_every_rank(call: Any, words: str) -> None:
    other, mine = dist.threads(2, lambda g: errors_of(g, call, Group.skip), timeout=None)
    assert mine.startswith("RuntimeError None skip: rank 1 skips step 1 and ")
    assert other.startswith("PeerError 1 ") and "rank 1 failed: RuntimeError: skip: rank 1 skips step 1" in other
    assert words in mine and words in other


def test_ranks_without_a_step_or_in_an_earlier_one_are_named() -> None:
    def rank(group: Group, step: int | None) -> str:
        with pytest.raises(fanin.PeerError) as e:
            if group.rank:
                group.skip(4)
            else:
                group.step = step
                of_add_n(group, 0, 0)
        group.step = 5
        assert of_add_n(group, 0, 0) == 3
        return str(e.value)

    for step, words in ((None, "has no group.step: expected every"), (3, "is at step 3, call add_n, pass 1")):
        for text in dist.threads(2, lambda g, s=step: rank(g, s), timeout=None):
            assert f"rank 1 skips step 4, and rank 0 {words}" in text, text


def test_a_skip_ends_with_the_group_where_the_others_leave_without_an_error() -> None:
    def rank(group: Group) -> Any:
        group.step = 7
        if group.rank == 2:
            return [x.tolist() for x in group.skip()]
        dist.add_n([np.ones(1)], group)
        group.barrier()
        return None

    assert dist.threads(3, rank, timeout=None)[2] == [[2]]


def test_a_skip_raises_where_another_rank_leaves_with_an_error() -> None:
    def rank(group: Group) -> Any:
        group.step = 7
        if group.rank == 1:
            with pytest.raises(fanin.PeerError, match=r"skip, pass 0, .* rank 0 failed: OSError: no disk") as e:
                group.skip()
            return e.value.rank
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        dist.threads(2, rank, timeout=None)


def test_sums_that_fail_on_another_rank_do_not_end_a_skip() -> None:
    def rank(group: Group) -> Any:
        group.step = 0
        if group.rank == 1:
            return [x.tolist() for x in group.skip()]
        for arrays in ([np.ones(1), np.ones(2)], [np.ones(3) * 2]):
            try:
                dist.add_n(arrays, group)
            except ValueError:
                pass
        return None

    assert dist.threads(2, rank, timeout=None)[1] == [[2, 2, 2]]


def test_what_is_no_step_and_no_reducer_is_refused() -> None:
    def rank(group: Group) -> None:
        for step, error in ((True, TypeError), (1.5, TypeError), (-1, ValueError), (None, ValueError)):
            with pytest.raises(error, match="expected "):
                group.skip(step)
        other = dist.Reducer([fanin.Leaf(np.zeros(1))], other_group)
        for reducers, error in ((3, TypeError), ([3], TypeError), ([other], ValueError)):
            with pytest.raises(error, match=r"^skip: reducers: expected reducers of th"):
                group.skip(1, reducers=reducers)

    [other_group] = dist.threads(1, lambda g: g, timeout=None)
    dist.threads(1, rank, timeout=None)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_ends_names_its_last_pass(ranks: int) -> None:
    """A rank that left a step out without `group.step` has made fewer passes than the others."""

    def rank(group: Group) -> str:
        for step in range(3):
            if (step, group.rank) == (1, 1):
                continue
            try:
                of_add_n(group, step, 0)
            except fanin.PeerError as e:
                return str(e)
        return ""

    first, second, *_ = dist.threads(ranks, rank, timeout=None)
    assert second == ""
    assert first.startswith("add_n, pass 3, bucket 0: rank 1 closed its group after pass 2;"), first


BEGIN = """
import numpy as np, pytest, sys, fanin
from fanin import dist
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""

MPI = """
from dist.test_skip import reduced, trained, expected
group = dist.group(timeout=None)
for found in comm.allgather(trained(group, [2, 0, 1, 1], lambda s, r: s < 3 and (s + r) % 3 == 0)):
    for s, n in enumerate([2, 0, 1, 1]):
        bring = {r for r in range(comm.size) if (s + r) % 3 or s == 3}
        assert found[s] == [expected(s, k, bring) for k in range(n)], (found, s)
other = dist.group(comm.Dup(), timeout=None)
n = comm.size
assert [x[0] for x in reduced(other, 1)] == [n * (n + 1), n * (n + 1) - 4, n * (n + 1)]
group.step = 9
if comm.rank == 1:
    assert [x.tolist() for x in group.skip()] == [[n - 1]]
    print("returned", group.closed)
else:
    dist.add_n([np.ones(1)], group)
"""


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_are_skipped_over_mpi(ranks: int) -> None:
    done = under_mpiexec(ranks, "-c", BEGIN + MPI)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "returned" in done.stdout and "ended after pass" in done.stdout


def over_gloo(group: Group) -> bool:
    calls = [2, 0, 1, 1]
    found = trained(group, calls, lambda s, r: s < 3 and (s + r) % 3 == 0)
    for s, n in enumerate(calls):
        bring = {r for r in range(group.size) if (s + r) % 3 or s == 3}
        if found[s] != [expected(s, k, bring) for k in range(n)]:
            return False
    group.step = 4
    sums = [row[0] for row in reduced(group, 1)] if group.size == 3 else []
    return sums == [12, 8, 12]


@pytest.mark.partners
def test_steps_are_skipped_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(3, over_gloo, tmp_path) == [True] * 3


def test_each_order_of_threads_pairs_the_sums_of_a_step() -> None:
    def program(machine: Any) -> None:
        every = on_ranks(machine, 2, lambda g: trained(g, [1, 1], lambda s, r: s == r))
        wanted = [[expected(0, 0, {1})], [expected(1, 0, {0})]]
        assert every == [wanted, wanted]

    report = fanin.sim.explore(program, limit=400)
    assert report.ok, report
    assert report.runs > 1
