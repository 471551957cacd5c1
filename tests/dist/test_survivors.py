"""Groups of the ranks that are left: all of them get the same group, or an error; its sums are right."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from dist.test_explored_ranks import on_ranks
from fanin import dist
from fanin.dist import survivors
from fanin.dist.group import Group
from fanin.dist.threads import ThreadEngine
from kit.ranks import NO_MPI, alone, train, under_mpiexec
from kit.sample import sizes

pytestmark = pytest.mark.core


def wrong_sums(group: Group) -> list[str]:
    """The orders in which a sum of eight arrays, dealt out to the ranks, has not the bits of one process."""
    rng = np.random.default_rng(group.size)
    arrays = [(rng.standard_normal(3000) * 2.0 ** rng.integers(-9, 9, 3000)).astype("f4") for _ in range(8)]
    mine = [k for k in range(8) if k % group.size == group.rank]
    wrong = []
    for order, accumulate in (("key", None), ("exact", "exact")):
        wanted = fanin.add_n(arrays, accumulate=accumulate, scale=0.3)
        keys = mine if order == "key" else None
        got = dist.add_n([arrays[k] for k in mine], group, order, keys=keys, scale=0.3)
        if got.tobytes() != wanted.tobytes():
            wrong.append(order)
    return wrong


def left_alone(group: Group) -> Group:
    """Sums until a rank is gone; then the group of the others."""
    with pytest.raises(fanin.PeerError):
        while True:
            dist.add_n([np.ones(200)], group)
    return group.survivors()


def sums_of_those_left(group: Group, ends: list[int]) -> Any:
    """The ranks `ends` end one after the other, each after a sum of the others."""
    me = group.rank
    left = list(range(group.size))
    for rank in ends:
        dist.add_n([np.ones(2)], group)
        if rank == me:
            return "ended"
        group = left_alone(group)
        left.remove(rank)
        assert [left[r] for r in range(group.size)][group.rank] == me
        assert dist.group() is group and group.size == len(group.former_ranks) == len(left)
        assert wrong_sums(group) == []
    return group.former_ranks


@pytest.mark.parametrize(("ranks", "ends"), [(2, [0]), (3, [1]), (3, [0, 2]), (4, [3, 0]), (4, [1, 2, 0])])
def test_the_ranks_that_are_left_go_on_and_their_sums_have_the_bits_of_one_process(ranks: int, ends: list[int]) -> None:
    found = dist.threads(ranks, partial(sums_of_those_left, ends=ends), timeout=None)
    now = list(range(ranks))
    for k, rank in enumerate(ends):
        assert found[rank] == "ended"
        formerly = tuple(r for r in range(len(now)) if now[r] != rank)
        now.remove(rank)
        assert all(found[r] == formerly for r in now) or k + 1 < len(ends)


def trains(group: Group) -> Any:
    if group.rank == 1:
        return None
    group = left_alone(group)
    return [train(group, order, 1000, lambda k: k % group.size, 5) == alone(order, 5) for order in ("key", "exact")]


def test_survivors_train_as_one_process_does() -> None:
    assert dist.threads(3, trains, timeout=None) == [[True, True], None, [True, True]]


def is_here(group: Group, rank: int) -> None:
    """Returns when a rank has called `survivors`."""
    engine: Any = group._engine
    board = engine.board()
    while board.get(f"1 here {rank}") is None:
        board.pause(survivors.LOOK)


def hurried(board: Any, suspects: Any, rank: int, size: int, attempt: int, timeout: Any) -> list[int]:
    """As `_members`, but the first rank that comes waits for none: it leaves ranks out that are alive."""
    board.put(f"{attempt} here {rank}", "[]")
    said = [r for r in range(size) if board.get(f"{attempt} here {r}") is not None]
    members: list[int] = json.loads(board.first(f"{attempt} members", json.dumps(said)))
    return members


@pytest.mark.parametrize("limit", sizes(60, 300))
@pytest.mark.parametrize("fault", [False, True])
def test_every_rank_that_is_alive_is_a_survivor_in_each_order_of_threads(
    fault: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fault: a planted one."""
    if fault:
        monkeypatch.setattr(survivors, "_members", hurried)

    def rank(group: Group) -> Any:
        if group.rank == 1:
            group.close()
            return ()
        try:
            group.barrier()
        except fanin.PeerError:
            return group.survivors().former_ranks

    def program(machine: Any) -> None:
        assert on_ranks(machine, 3, rank) == [(0, 2), (), (0, 2)]

    report = fanin.sim.explore(program, limit=limit)
    assert bool(report.failed) is fault, report
    assert report.runs > 1


def test_an_attempt_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remade = ThreadEngine.remade

    def fails_once(engine: ThreadEngine, members: Any, attempt: int, timeout: Any) -> Any:
        if (engine.rank, attempt) == (2, 1):
            raise OSError("planted")
        return remade(engine, members, attempt, timeout)

    def rank(group: Group) -> Any:
        if group.rank == 0:
            return None
        with pytest.raises(fanin.PeerError):
            group.barrier()
        with pytest.raises(fanin.PeerError) as e:
            group.survivors()
        assert e.value.rank == 2 and str(e.value) == "survivors: rank 2 failed: OSError: planted; call it again"
        group = group.survivors()
        return group.former_ranks, wrong_sums(group)

    monkeypatch.setattr(ThreadEngine, "remade", fails_once)
    assert dist.threads(3, rank, timeout=None) == [None, ((1, 2), []), ((1, 2), [])]


def test_a_rank_that_does_not_come_is_left_out_at_the_time_limit_and_told_so_when_it_comes() -> None:
    made = threading.Event()

    def rank(group: Group) -> Any:
        if group.rank == 0:
            group.abort("rank 0 failed: OSError: planted")
        else:
            with pytest.raises(fanin.PeerError):
                group.barrier()
        if group.rank == 2:
            made.wait()
            with pytest.raises(fanin.PeerError, match="ranks 0, 1 went on without rank 2, which came late") as e:
                group.survivors()
            return e.value.rank
        if group.rank == 0:
            is_here(group, 1)
        group = group.survivors(timeout=None if group.rank else 1)
        made.set()
        return group.former_ranks

    assert dist.threads(3, rank, timeout=None) == [(0, 1), (0, 1), 2]


def test_a_rank_that_ends_amid_an_attempt_fails_it_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    remade = ThreadEngine.remade

    def ends(engine: ThreadEngine, members: Any, attempt: int, timeout: Any) -> Any:
        if engine.rank == 2:
            raise SystemExit
        return remade(engine, members, attempt, timeout)

    def rank(group: Group) -> Any:
        if group.rank == 0:
            return None
        with pytest.raises(fanin.PeerError):
            group.barrier()
        try:
            group.survivors()
        except SystemExit:
            return "ended"
        except fanin.PeerError as e:
            return e.rank, str(e), group.survivors().former_ranks

    monkeypatch.setattr(ThreadEngine, "remade", ends)
    told = (2, "survivors: rank 2 ended meanwhile; call it again", (1,))
    assert dist.threads(3, rank, timeout=None) == [None, told, "ended"]


def test_groups_that_are_open_closed_by_the_rank_or_of_other_engines_are_refused() -> None:
    class Other:
        rank, size, name = 0, 1, "other"

        def abort(self, reason: str) -> None:
            pass

    def rank(group: Group) -> None:
        with pytest.raises(RuntimeError, match="survivors: the group 1 threads is open: expected a PeerError"):
            group.survivors()
        group.close()
        with pytest.raises(RuntimeError, match="survivors: this rank has closed the group 1 threads itself"):
            group.survivors()
        with pytest.raises(TypeError, match="survivors: timeout"):
            group.survivors(timeout="soon")  # type: ignore[arg-type]
        other: Any = Group(Other(), timeout=None)  # type: ignore[arg-type]
        other.abort("lost")
        with pytest.raises(RuntimeError, match="survivors: other cannot go on without a rank: its engine has no"):
            other.survivors()

    dist.threads(1, rank, timeout=None)


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
def test_a_group_of_mpi_says_why_it_has_no_survivors() -> None:
    done = under_mpiexec(
        2,
        "-c",
        """
import numpy as np, pytest, fanin
from fanin import dist
group = dist.group(timeout=None)
if group.rank == 0:
    with pytest.raises(fanin.PeerError):
        dist.add_n([np.ones(3)], group)
    with pytest.raises(RuntimeError, match="cannot go on without a rank: mpiexec ends all ranks where one is killed"):
        group.survivors()
    print("refused")
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused" in done.stdout


# ---------------------------------------------------------------- Gloo


def killed_one_by_one(group: Group, ends: list[int], seed: int) -> Any:
    """The ranks `ends` are killed, each at a random moment of a sum; the others go on, as `sums_of_those_left`."""
    rng = random.Random(seed)
    me, left, found = group.rank, list(range(group.size)), []
    for rank in ends:
        sums, at, after = 0, rng.randrange(1, 4), rng.uniform(0, 0.01)
        n, order = rng.choice([(300, "key"), (200_000, "key"), (200_000, "exact")])
        try:
            while True:
                dist.add_n([np.ones(n)], group, order)  # type: ignore[arg-type]
                sums += 1
                if (me, sums) == (rank, at):
                    threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        except fanin.PeerError as e:
            text = str(e)
        group = group.survivors()
        left.remove(rank)
        found.append((left[group.rank] == me, wrong_sums(group), group.former_ranks, text))
    trained = train(group, "exact", 1000, lambda k: k % group.size, 3) == alone("exact", 3)
    return trained, found


@pytest.mark.partners
@pytest.mark.parametrize(("ranks", "ends", "seed"), [(3, [1], 1), (4, [3, 0], 2), (4, [2, 1, 3], 3)])
def test_ranks_that_are_killed_in_a_sum_are_left_out_and_the_others_train_on(
    ranks: int, ends: list[int], seed: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    work = partial(killed_one_by_one, ends=ends, seed=seed)
    every = on_processes(ranks, work, tmp_path, alive=ranks - len(ends))
    for trained, found in every:
        print(*(text for *_, text in found), sep="\n")
        assert trained and all(mine and not wrong for mine, wrong, *_ in found)
    assert all([step[2] for step in found] == [step[2] for step in every[0][1]] for _, found in every)


def killed_amid_an_attempt(group: Group) -> Any:
    """Rank 1 is killed before a sum, rank 2 as it makes the group of ranks 0 and 2."""
    from fanin.dist.processes import TorchEngine

    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fanin.PeerError):
        group.barrier()
    if group.rank == 2:
        TorchEngine.remade = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        group.survivors(timeout=None)
    is_here(group, 2)
    told = []
    while True:
        try:
            group = group.survivors(timeout=10)
            return told, group.former_ranks, wrong_sums(group)
        except fanin.PeerError as e:
            told.append(str(e))


@pytest.mark.partners
def test_a_rank_that_is_killed_while_the_group_is_made_is_an_error_and_the_next_call_works(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    [(told, formerly, wrong)] = on_processes(3, killed_amid_an_attempt, tmp_path, alive=1)
    print(told)
    assert told and all(text.startswith("survivors: rank ") and text.endswith("; call it again") for text in told)
    assert (formerly, wrong) == ((0,), [])


def wakes(group: Group, pid: Path) -> Any:
    """Rank 1 is stopped for longer than the time limit; rank 0 wakes it when it has its own error."""
    dist.add_n([np.ones(3)], group)
    if group.rank == 1:
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(fanin.PeerError) as e:
        dist.add_n([np.ones(3)], group, timeout=2)
    if group.rank == 0:
        os.kill(int(pid.read_text()), signal.SIGCONT)
    again = group.survivors()
    return str(e.value), again.former_ranks, wrong_sums(again)


@pytest.mark.partners
def test_a_rank_that_was_stopped_for_longer_than_the_limit_reads_the_truth_and_goes_on_with_the_others(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    found = on_processes(3, partial(wakes, pid=tmp_path / "pid"), tmp_path)
    for text, formerly, wrong in found:
        # on a busy machine another one may answer late, too
        assert re.search(r"(rank 1 did not answer|no answer of ranks (0, 1|1, 2)) within 2 s", text), text
        assert (formerly, wrong) == ((0, 1, 2), [])


STORE_GONE = """
import os, signal, sys
import numpy as np, torch.distributed as td
import fanin
from fanin import dist
store = td.TCPStore("127.0.0.1", int(sys.argv[2]), 2, sys.argv[1] == "0")
td.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
group = dist.group()
dist.add_n([np.ones(3)], group)
if group.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
for call in (lambda: dist.add_n([np.ones(3)], group), group.survivors):
    try:
        call()
    except fanin.PeerError as e:
        print(e)
os._exit(0)
"""


@pytest.mark.partners
def test_a_store_that_is_gone_with_its_rank_is_named() -> None:
    pytest.importorskip("torch")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-c", STORE_GONE]
    ranks = [subprocess.Popen([*words, str(r), port], stdout=subprocess.PIPE, text=True) for r in range(2)]
    said = [p.communicate()[0] for p in ranks]
    lost, store = said[1].splitlines()
    assert "store of torch.distributed cannot be reached" in lost or "rank 0 cannot be reached" in lost
    assert store.startswith("survivors: the store of torch.distributed is gone: the rank that held it, rank 0 but")
