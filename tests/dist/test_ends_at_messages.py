"""A rank that fails, leaves, is late or is killed at any message of a sum: every other rank gets a PeerError that names
it, no sum is wrong, and the group is closed.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fanin import dist
from fanin.dist.group import Group
from fanin.dist.threads import ThreadEngine
from kit import ends
from kit.ends import IN_ONE_LEVEL, IN_TWO_LEVELS, Scene, Seen
from kit.ranks import NO_MPI, under_mpiexec
from kit.sample import sizes

pytestmark = pytest.mark.core

#: (ranks, nodes, scene)
SCENES = [(2, 1, scene) for scene in IN_ONE_LEVEL] + [(4, 2, scene) for scene in IN_TWO_LEVELS]


def operations(n: int, nodes: int, scene: Scene) -> int:
    """How many operations of the engine the rank that will end starts in a scene."""
    every = dist.threads(n, lambda g: ends.seen(g, scene, None, ends.fails), nodes=nodes, timeout=None)
    assert all(all(one.right) and not one.error for one in every), every
    return every[ends.ENDING].operations


def on_threads(n: int, nodes: int, scene: Scene, at: int, act: Any, timeout: float | None = None) -> list[Seen]:
    over = threading.Barrier(n)

    def rank(group: Group) -> Seen:
        one = ends.seen(group, scene, at, act)
        over.wait()  # no rank leaves before
        return one

    return dist.threads(n, rank, nodes=nodes, timeout=timeout)


@pytest.mark.parametrize("act", [ends.fails, ends.leaves])
@pytest.mark.parametrize(("n", "nodes", "scene"), SCENES)
def test_the_others_name_a_rank_that_ends_at_any_message(n: int, nodes: int, scene: Scene, act: Any) -> None:
    words = "rank 1 failed: OSError: planted" if act is ends.fails else "rank 1 was interrupted: SystemExit"
    for at in range(operations(n, nodes, scene)):
        found = ends.wrong(on_threads(n, nodes, scene, at, act), words=words)
        assert not found, (at, found)


def late(n: int, nodes: int, scene: Scene, at: int) -> list[Any]:
    """What is wrong where rank 1 comes when every other rank has given up. It waits for them without a limit itself."""
    told, gone = threading.Event(), threading.Semaphore(0)

    def rank(group: Group) -> Seen:
        if group.rank == ends.ENDING:
            group.timeout = None
        one = ends.seen(group, scene, at, ends.until_told(told))
        if group.rank == ends.ENDING:
            return one
        gone.release()
        if group.rank == 0:
            for _ in range(n - 1):
                gone.acquire()
            told.set()
        told.wait()
        return one

    every = dist.threads(n, rank, nodes=nodes, timeout=0.2)
    found = ends.wrong(every, blames=n == 2, words="did not answer" if n == 2 else "")
    own = every[ends.ENDING].error
    return found if own.startswith("PeerError") else [*found, own]


@pytest.mark.parametrize("step", sizes(4, 1))
@pytest.mark.parametrize(("n", "nodes", "scene"), SCENES)
def test_a_rank_that_is_late_at_any_message_is_an_error_on_all(n: int, nodes: int, scene: Scene, step: int) -> None:
    for at in range(step // 2, operations(n, nodes, scene), step):
        found = late(n, nodes, scene, at)
        assert not found, (at, found)


def test_a_rank_that_tells_the_others_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadEngine, "abort", lambda self, reason: None)
    every = on_threads(2, 1, ends.buckets_with_plans, 3, ends.fails, timeout=0.2)
    assert ends.wrong(every, words="planted")


def test_a_sum_without_what_did_not_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ThreadEngine.all_to_all

    class Forgiving:
        def __init__(self, pending: Any, receives: Any) -> None:
            self.pending, self.receives = pending, receives

        def wait(self, timeout: float | None) -> None:
            try:
                self.pending.wait(timeout)
            except Exception:
                for place in self.receives:
                    place[:] = 0

    monkeypatch.setattr(
        ThreadEngine, "all_to_all", lambda self, sends, places: Forgiving(real(self, sends, places), places)
    )
    every = on_threads(2, 1, ends.arrays_with_plans, 5, ends.fails, timeout=None)
    assert ends.wrong(every)


# ---------------------------------------------------------------- processes


def at_message(group: Group, scene: Scene, at: int, nodes: int) -> Seen:
    if nodes > 1:
        dist.group(group, nodes=nodes)
    return ends.seen(group, scene, at, ends.is_killed)


def wrong_of_killed(n: int, nodes: int, scene: Scene, at: int, folder: Path) -> list[Any]:
    from dist.test_gloo import on_processes

    left = on_processes(n, partial(at_message, scene=scene, at=at, nodes=nodes), folder, alive=n - 1)
    return ends.wrong([left[0], left[0], *left[1:]], blames=n == 2)  # that of the killed one is not read


@pytest.mark.partners
@pytest.mark.parametrize(("n", "nodes", "scene"), [(2, 1, ends.buckets_with_plans), (4, 2, ends.fold_over_nodes)])
def test_a_rank_that_is_killed_in_a_scene_over_gloo_is_an_error_on_the_others(
    n: int, nodes: int, scene: Scene, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    found = wrong_of_killed(n, nodes, scene, operations(n, nodes, scene) - 3, tmp_path)
    assert not found, found


@pytest.mark.partners
@pytest.mark.slow
@pytest.mark.parametrize(("n", "nodes", "scene"), SCENES)
def test_a_rank_that_is_killed_at_any_message_of_gloo_is_an_error_on_the_others(
    n: int, nodes: int, scene: Scene, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    for at in range(operations(n, nodes, scene)):
        folder = tmp_path / str(at)
        folder.mkdir()
        found = wrong_of_killed(n, nodes, scene, at, folder)
        assert not found, (at, found)


PROGRAM = """
from mpi4py import MPI
from fanin import dist
from kit import ends
comm, number, found = MPI.COMM_WORLD, [0], []
def seen(scene, at, act):
    group = dist.group(comm.Dup(), nodes=NODES, timeout=None)
    one = ends.seen(group, scene, at, act)
    comm.Barrier()
    return comm.allgather(one)
for scene in ends.IN_ONE_LEVEL if NODES == 1 else ends.IN_TWO_LEVELS:
    for act in (ends.fails, ends.leaves):
        for at in range(seen(scene, None, act)[ends.ENDING].operations):
            every = seen(scene, at, act)
            words = "planted" if act is ends.fails else "SystemExit"
            found += [(scene.__name__, act.__name__, at, *one) for one in ends.wrong(every, words=words)]
            number[0] += 1
assert not found, found
assert number[0] > 20, number
"""


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (4, 2)])
def test_the_others_name_a_rank_that_ends_at_any_message_of_mpi(n: int, nodes: int) -> None:
    done = under_mpiexec(n, "-c", PROGRAM.replace("NODES", str(nodes)))
    assert done.returncode == 0, done.stdout + done.stderr
