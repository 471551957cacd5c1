"""Sums over ranks by MPI: programs under mpiexec."""

from __future__ import annotations

import pytest

from kit.ranks import NO_MPI, under_mpiexec

pytestmark = [pytest.mark.partners, pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")]

BEGIN = """
import numpy as np, pytest, fanin
from fanin import dist
from mpi4py import MPI
comm = MPI.COMM_WORLD
"""


def mpiexec(ranks: int, program: str, begin: str = BEGIN) -> str:
    done = under_mpiexec(ranks, "-c", begin + program)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAME_BITS = """
group = dist.group()
assert group is dist.group(comm) and (group.rank, group.size) == (comm.rank, comm.size)
rng = np.random.default_rng(7)
arrays = [(rng.standard_normal(5000) * 2.0 ** rng.integers(-9, 9, 5000)).astype("f4") for _ in range(8)]
mine = [k for k in range(8) if k * comm.size // 8 == comm.rank]
for order, accumulate in (("key", None), ("exact", "exact")):
    expected = fanin.add_n(arrays, accumulate=accumulate, scale=1 / 3)
    keys = mine if order == "key" else None
    for into in ("all", "shard", comm.size - 1):
        got = dist.add_n([arrays[k] for k in mine], order=order, keys=keys, scale=1 / 3, into=into)
        if into == "shard":
            got = np.concatenate(comm.allgather(got))
        if got is not None:
            assert got.tobytes() == expected.tobytes(), (order, into)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_sum_has_the_bits_of_one_process(ranks: int) -> None:
    mpiexec(ranks, SAME_BITS)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_after_twenty_steps_are_those_of_one_process(ranks: int) -> None:
    mpiexec(
        ranks,
        """
from kit.ranks import alone, train
for order in ("exact", "key"):
    for bucket in (1000, 25 << 20):
        assert train(dist.group(), order, bucket, lambda k: k % comm.size, 20) == alone(order, 20), (order, bucket)
""",
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_traces_of_all_ranks_are_gathered_on_one(ranks: int) -> None:
    mpiexec(
        ranks,
        """
from kit.ranks import check_messages, gathered
whole = gathered(dist.group())
assert (whole is None) == (comm.rank > 0)
if whole:
    check_messages(whole, comm.size)
""",
    )


def test_what_differs_is_an_error_on_every_rank_and_the_next_pass_works() -> None:
    mpiexec(
        3,
        """
with pytest.raises(fanin.PeerError, match=r"rank 2 brings float64 of shape \\(4,\\), rank 0"):
    dist.add_n([np.ones(3 + (comm.rank == 2))])
with pytest.raises(TypeError if comm.rank == 1 else fanin.PeerError, match="expected an array"):
    dist.add_n([object() if comm.rank == 1 else np.ones(3)])
assert dist.add_n([np.ones(3)]).tolist() == [3, 3, 3]
""",
    )


def test_a_header_longer_than_its_frame_travels_in_two_messages() -> None:
    mpiexec(
        2,
        """
keys = [1000000 * comm.rank + k for k in range(400)]
got = dist.add_n([np.full(2, 1.0)] * 400, order="key", keys=keys)
assert got.tolist() == [800, 800]
""",
    )


def test_a_rank_that_is_killed_is_an_error_within_the_time_limit() -> None:
    out = mpiexec(
        2,
        """
import sys, threading
group = dist.group(comm.Dup())
if comm.rank == 0:
    with pytest.raises(fanin.PeerError, match="no answer of a rank within 0.3 s; .* closed"):
        dist.add_n([np.ones(3)], group, timeout=0.3)
    with pytest.raises(RuntimeError, match="closed: no answer"):
        dist.add_n([np.ones(3)], group)
    print("ended")
comm.Barrier()  # rank 1 never comes to the sum
""",
    )
    assert "ended" in out


def test_communicators_that_cannot_be_used_are_refused_by_name() -> None:
    mpiexec(
        2,
        """
freed = comm.Dup()
freed.Free()
with pytest.raises(ValueError, match="was freed"):
    dist.group(freed)
other = comm.Dup()
group = dist.group(other)
assert dist.add_n([np.ones(1)], group).tolist() == [2]
other.Free()
with pytest.raises(fanin.PeerError, match="was freed"):
    dist.add_n([np.ones(1)], group)
with pytest.raises(RuntimeError, match="closed: .*was freed"):
    group.barrier()
""",
    )


def test_an_mpi_without_threads_is_refused_by_name() -> None:
    single = "import mpi4py\nmpi4py.rc.thread_level = 'single'\n" + BEGIN
    mpiexec(1, "with pytest.raises(RuntimeError, match='MPI_THREAD_SINGLE: expected'):\n    dist.group()\n", single)


def test_a_group_is_not_used_after_fork() -> None:
    mpiexec(
        1,
        """
import os
group = dist.group()
child = os.fork()
if child == 0:
    try:
        dist.add_n([np.ones(1)], group)
    except RuntimeError as e:
        os._exit(0 if "fork" in str(e) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
""",
    )
