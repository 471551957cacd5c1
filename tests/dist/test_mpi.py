"""Sums over ranks by MPI: programs under mpiexec."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fanin.dist.group import _LAUNCHERS
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


LAUNCHED = """
import json, os, sys
from fanin import dist
from mpi4py import MPI
os.environ.update(json.loads(sys.argv[1]))  # MPI itself has read its own
try:
    print(dist.group().size)
except RuntimeError as e:
    print(e)
print(dist.group(MPI.COMM_WORLD).size)
"""


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "1"),
        ({"WORLD_SIZE": "1", "PMIX_RANK": "0", "SLURM_NTASKS": "", "PMI_SIZE": "two"}, "1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that 2 ranks were started, and MPI.COMM_WORLD has 1: call torch"),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE=3 says that 3 ranks were started, and MPI.COMM_WORLD"),
        ({"PMI_SIZE": "16"}, "PMI_SIZE=16 says that 16 ranks were started, and MPI.COMM_WORLD has 1: mpi4py is of"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 says that at least 2 ranks were started, and MPI.COMM_WORLD has 1: mpi4py"),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4 says that 4 ranks were started, and MPI.COMM_WORLD has 1: start the"),
    ],
)
def test_a_group_that_nobody_named_has_all_ranks_that_were_launched(variables: dict[str, str], found: str) -> None:
    """A launcher whose ranks do not meet would train each of them alone."""
    environment = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS}
    words = [sys.executable, "-c", LAUNCHED, json.dumps(variables)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.removeprefix("group: ").startswith(found), first
    if first != "1":
        assert first.endswith("; fanin.dist.group(MPI.COMM_WORLD) uses it as it is")
    assert last == "1"


#: (ranks, nodes): sums in one level; with order="exact" in two.
LAYOUTS: list[tuple[int, object]] = [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, [3, 1, 3, 1]), (4, [0, 0, 0, 1])]

SAME_BITS = """
assert dist.group().nodes == (0,) * comm.size, "MPI says that all ranks share this machine"
group = dist.group(nodes=NODES, timeout=None)
assert group is dist.group(comm) and (group.rank, group.size) == (comm.rank, comm.size)
assert len(group._levels) == (2 if str(NODES) in ("2", "[3, 1, 3, 1]") else 1)
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


@pytest.mark.parametrize(("ranks", "nodes"), LAYOUTS)
def test_the_sum_has_the_bits_of_one_process(ranks: int, nodes: object) -> None:
    mpiexec(ranks, SAME_BITS.replace("NODES", str(nodes)))


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_weights_after_twenty_steps_are_those_of_one_process(ranks: int, nodes: int) -> None:
    mpiexec(
        ranks,
        f"""
from kit.ranks import alone, train
dist.group(nodes={nodes}, timeout=None)
for order in ("exact", "key"):
    for bucket in (1000, 25 << 20):
        assert train(dist.group(), order, bucket, lambda k: k % comm.size, 20) == alone(order, 20), (order, bucket)
""",
    )


def test_nodes_that_do_not_fit_or_differ_are_refused_on_every_rank() -> None:
    mpiexec(
        4,
        """
group = dist.group(timeout=None)
for nodes, other, kind, words in (
    (2, 3, ValueError, "divides the 4 ranks evenly, got 3"),
    (2, [0, 1], ValueError, "the node of each of 4 ranks, got 2"),
    ([0, 1, 0, 1], 2, fanin.PeerError, "rank 2 is at .*nodes 2 of 0.2 of 1, rank 0 at .*nodes 1 of 0.1 of 1"),
):
    with pytest.raises(kind if comm.rank == 2 else fanin.PeerError, match=words) as e:
        dist.group(nodes=other if comm.rank == 2 else nodes)
    assert getattr(e.value, "rank", 2) == 2 and group.nodes == (0, 0, 0, 0)
    assert dist.add_n([np.ones(3)], order="exact").tolist() == [4, 4, 4]
""",
    )


DATA = """
group = dist.group(comm.Dup(), nodes=NODES, timeout=None)
swap, left = group._engine.all_to_all, [AT]
class Broken:
    def __init__(self, pending):
        self.pending = pending
    def wait(self, timeout):
        raise OSError("planted")
def counted(*args):
    left[0] -= 1
    return Broken(swap(*args)) if left[0] == 0 and comm.rank == 1 else swap(*args)
group._engine.all_to_all = counted
with pytest.raises(fanin.PeerError, match="rank 1 failed: OSError: planted") as e:
    while True:
        dist.add_n([np.ones(3000)] * 2, group, "exact")
assert e.value.rank == (None if comm.rank == 1 else 1)
assert "planted" in group.closed
"""


@pytest.mark.parametrize(("nodes", "at"), [(1, 2), (1, 3), *((2, k) for k in range(2, 7))])
def test_a_rank_that_fails_between_two_messages_of_a_sum_closes_the_group_on_every_rank(nodes: int, at: int) -> None:
    """The header is the first one."""
    mpiexec(4, DATA.replace("NODES", str(nodes)).replace("AT", str(at)))


def test_buffers_of_messages_in_progress_outlive_python() -> None:
    """MPI_Finalize runs later, and still writes to them."""
    mpiexec(
        2,
        """
import mmap
engine = dist.group(comm.Dup(), timeout=None)._engine
nothing, data = np.empty(0, np.uint8), np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
if comm.rank == 0:
    engine.all_to_all([nothing] * 2, [nothing, data])
comm.Barrier()
if comm.rank == 1:
    engine.all_to_all([data, nothing], [nothing] * 2)
""",
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_traces_of_all_ranks_are_gathered_on_one(ranks: int) -> None:
    mpiexec(
        ranks,
        """
from kit.ranks import check_messages, gathered
whole = gathered(dist.group(timeout=None))
assert (whole is None) == (comm.rank > 0)
if whole:
    check_messages(whole, comm.size)
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


LATE = """
# of three ranks the other one is late, too, on a busy machine
RANK_1 = r"(rank 1 did not answer|no answer of ranks (0, 1|1, 2))"
group = dist.group(comm.Dup(), timeout=None)
comm.Barrier()
if comm.rank != 1:
    with pytest.raises(fanin.PeerError, match=f"{RANK_1} within 2 s; .* closed") as e:
        dist.add_n([np.ones(3)], group, timeout=2)
    assert e.value.rank in (0, 1)
    with pytest.raises(RuntimeError, match=f"closed: {RANK_1}"):
        dist.add_n([np.ones(3)], group)
comm.Barrier()
if comm.rank == 1:
    with pytest.raises(fanin.PeerError, match=f"{RANK_1} within 2 s"):
        dist.add_n([np.ones(3)], group)
assert dist.add_n([np.ones(3)]).tolist() == [comm.size] * 3  # another group works
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_rank_is_named_within_the_time_limit_and_raises_the_same_when_it_comes(ranks: int) -> None:
    mpiexec(ranks, LATE)


def test_a_late_rank_without_its_name_is_found() -> None:
    nameless = """
from fanin.dist import mpi
mpi.Late = lambda ranks: TimeoutError()
import sys
def hook(*error):
    sys.__excepthook__(*error)
    if comm.rank == 0:  # rank 1 waits for it
        comm.Barrier()
sys.excepthook = hook
"""
    done = under_mpiexec(2, "-c", BEGIN + nameless + LATE)
    assert done.returncode and "no answer within 2 s" in done.stderr


def test_a_rank_that_waits_gives_up_its_core() -> None:
    """Rank 1 joins after the wait of rank 0 has yielded the core three times."""
    mpiexec(
        2,
        """
from fanin.dist import mpi
group = dist.group(comm.Dup(), timeout=None)
class Core:
    calls = 0
    def yield_thread(self):
        self.calls += 1
        if self.calls == 3:
            comm.send(True, 1)
if comm.rank == 0:
    mpi._core = Core()
else:
    comm.recv(source=0)
group.barrier()
""",
    )


def test_a_rank_that_leaves_after_it_answered_ends_no_wait_of_the_others() -> None:
    """Rank 0 has all answers and leaves; the answer of rank 2 to rank 1 is still on its way."""
    mpiexec(
        3,
        """
group = dist.group(comm.Dup(), timeout=None)
group._engine.share = None  # headers travel by exchange, whose messages start one after the other
if comm.rank == 2:
    from fanin.dist import mpi
    mpi.requests_new = lambda *_: None  # as where messages are large: mpi4py starts each by itself
    send = group._engine._comm
    class Slow:
        waits = [True]
        def Isend(self, message, to, tag):
            if to == 1 and self.waits:  # its answer; at its end it tells rank 1 of that at once
                self.waits.pop()
                comm.recv(source=1)
            return send.Isend(message, to, tag)
        def __getattr__(self, name):
            return getattr(send, name)
    group._engine._comm = Slow()
if comm.rank == 1:
    gone, seen = group._engine.gone, []
    def look():
        found = gone()
        if 0 in found and not seen:
            seen.append(dict(found))
            comm.send(True, 2)
        return found
    group._engine.gone = look
group.barrier()
if comm.rank == 0:
    group.close()
if comm.rank == 1:
    assert seen == [{0: "rank 0 closed its group after pass 1"}] and group.closed is None
""",
    )


#: interrupt_when(engine, holds): a SIGINT for this process as soon as its engine waits for other ranks and holds().
INTERRUPT = """
import os, signal
def interrupt_when(engine, holds):
    gone = engine.gone
    def look():
        found = gone()
        if holds():
            engine.gone = gone
            os.kill(os.getpid(), signal.SIGINT)
        return found
    engine.gone = look
"""


@pytest.mark.parametrize(
    ("call", "holds"),
    [("dist.add_n([np.ones(3)], group)", "True"), ("fanin.backward(roots, reducer=reducer)", "reducer._ended")],
)
def test_ctrl_c_on_a_rank_that_waits_is_an_error_on_the_others(call: str, holds: str) -> None:
    mpiexec(
        2,
        f"""
{INTERRUPT}
group = dist.group(comm.Dup(), timeout=None)
ws = [fanin.Leaf(np.zeros(3), name=f"w{{i}}") for i in range(3)]
roots = [(w, 0, np.ones(3)) for w in ws]
reducer = dist.Reducer(ws, group, bucket_bytes=1)
if comm.rank == 1:
    interrupt_when(group._engine, lambda: {holds})
    with pytest.raises(KeyboardInterrupt):
        {call}
    assert "rank 1 was interrupted" in group.closed
    [one] = group._engine.open  # the answer of rank 0 is on its way to its buffers
    assert one.keep
    comm.send(True, 0)
else:
    comm.recv(source=1)
    with pytest.raises(fanin.PeerError, match="rank 1 was interrupted: KeyboardInterrupt") as e:
        {call}
    assert e.value.rank == 1
assert all(w.grad is None for w in ws)
assert dist.add_n([np.ones(3)]).tolist() == [2, 2, 2]  # another group works
""",
    )


def test_a_rank_that_ends_by_an_exception_ends_the_wait_of_the_others() -> None:
    done = under_mpiexec(
        3,
        "-c",
        BEGIN
        + """
group = dist.group(timeout=None)
if comm.rank == 1:
    raise ValueError("planted")
with pytest.raises(fanin.PeerError, match="rank 1 ended before a pass: ValueError: planted") as e:
    dist.add_n([np.ones(3)])
assert e.value.rank == 1
print("ended")
""",
    )
    assert done.returncode and done.stdout.count("ended") == 2, done.stdout + done.stderr


def test_mpiexec_ends_the_other_ranks_if_one_is_killed() -> None:
    done = under_mpiexec(
        2,
        "-c",
        BEGIN
        + """
import os, signal
while True:
    dist.add_n([np.ones(300)])
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.returncode


def test_a_bucket_above_the_largest_message_is_an_error_on_every_rank_before_data_travels() -> None:
    mpiexec(
        2,
        """
group = dist.group(timeout=None)
assert group._engine.largest == (None if MPI.Get_version() >= (4, 0) else 2**31 - 1)
group._engine.largest = 3000
for order in ("key", "exact", "rank"):
    with pytest.raises(fanin.PeerError, match="4096 bytes in one message: .* has at most 3000; use smaller buckets"):
        dist.add_n([np.ones(1000)], order=order)
    assert dist.add_n([np.ones(100)], order=order).tolist() == [2] * 100
for order, sent in (("key", [np.ones(300)] * (2 - comm.rank)), ("exact", [np.array([1e-300, 1e300] * 400)])):
    with pytest.raises(fanin.PeerError, match="bytes in one message"):  # the shards of one rank
        dist.add_n(sent, order=order, into="shard")
group._engine.largest = None
assert dist.add_n([np.ones(1000)]).tolist() == [2] * 1000
""",
    )


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


def test_objects_of_mpi_that_are_no_communicators_are_refused_by_name() -> None:
    mpiexec(
        1,
        """
with pytest.raises(TypeError, match="an mpi4py communicator, got a mpi4py.Group: give MPI.COMM_WORLD.Create_group"):
    dist.group(comm.Get_group())
with pytest.raises(TypeError, match="an mpi4py communicator, got a mpi4py.Info$"):
    dist.group(MPI.INFO_NULL)
assert dist.add_n([np.ones(1)], dist.group(comm.Create_group(comm.Get_group()))).tolist() == [1]
""",
    )


@pytest.mark.parametrize("before", ["", "dist.group(timeout=None).close()", "dist.group(timeout=None)"])
def test_a_group_is_refused_after_mpi_has_ended_and_the_process_goes_on(before: str) -> None:
    program = f"""
{before}
MPI.Finalize()
with pytest.raises((RuntimeError, fanin.PeerError), match="MPI was finalized|the engine was closed"):
    dist.group().barrier()
print("goes on")
"""
    assert "goes on" in mpiexec(1, program)


def test_a_group_is_refused_before_mpi_is_initialised() -> None:
    program = """
with pytest.raises(RuntimeError, match="MPI is not initialised yet: expected a call between"):
    dist.group()
MPI.Init_thread(MPI.THREAD_MULTIPLE)
assert dist.add_n([np.ones(1)]).tolist() == [1]
print("goes on")
"""
    assert "goes on" in mpiexec(1, program, f"import mpi4py\nmpi4py.rc.initialize = False\n{BEGIN}")


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_an_mpi_without_threads_is_refused_by_name(level: str) -> None:
    mpiexec(
        1,
        f"""
with pytest.raises(RuntimeError, match="MPI_THREAD_{level.upper()}: expected .* set mpi4py.rc.thread_level = 'multi"):
    dist.group()
""",
        f"import mpi4py\nmpi4py.rc.thread_level = '{level}'\n{BEGIN}",
    )


def test_a_group_is_not_used_after_fork() -> None:
    mpiexec(
        1,
        """
import os
group = dist.group(timeout=None)
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


@pytest.mark.parametrize("end", ["raise SystemExit", "raise SystemExit(0)", "pass"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_ends_without_an_error_ends_the_waits_of_the_others(end: str, ranks: int) -> None:
    """The others have no time limit."""
    program = f"""
group = dist.group(timeout=None)
assert dist.add_n([np.ones(3)], group).tolist() == [comm.size] * 3
if comm.rank == 1:
    {end}
else:
    with pytest.raises(fanin.PeerError, match="rank 1 ended after pass 1;") as e:
        dist.add_n([np.ones(3)], group)
    assert e.value.rank == 1 and "rank 1 ended" in group.closed
    print("named")
"""
    assert mpiexec(ranks, program).count("named") == ranks - 1


def test_ranks_that_end_at_different_times_disturb_no_sum_that_they_answered() -> None:
    """The sums of the ranks that end later are complete, in messages of every size, and the last ranks go on alone."""
    program = """
import sys
groups = [dist.group(comm.Split(0 if comm.rank >= gone else MPI.UNDEFINED), timeout=None)
          if comm.rank >= gone else comm.Split(MPI.UNDEFINED) for gone in range(3)]
for gone, group in enumerate(groups):
    for n in (1, 3000, 700_000):
        for into in ("all", "shard", 0):
            got = dist.add_n([np.ones(n)], group, "exact", into=into)
            assert got is None or (got == comm.size - gone).all()
    if comm.rank == gone:
        print("complete")
        sys.exit()
print("complete")
"""
    assert mpiexec(4, program).count("complete") == 4


def test_a_child_of_fork_that_ends_disturbs_no_rank() -> None:
    mpiexec(
        2,
        """
import os, sys
group = dist.group(timeout=None)
child = os.fork() if comm.rank == 1 else 0
if comm.rank == 1 and child == 0:
    import atexit
    try:
        atexit._run_exitfuncs()
    finally:
        os._exit(0)
if child:
    os.waitpid(child, 0)
comm.Barrier()
assert dist.add_n([np.ones(3)], group).tolist() == [2] * 3
assert dist.add_n([np.ones(3)], group).tolist() == [2] * 3
""",
    )


SAME_MEANS = """
from dist import test_weighted_ranks as law
group = dist.group(nodes=NODES, timeout=None)
terms, weights = law.terms_of("float32", n=600), law.weights_of(1, "tokens")
for order in ("key", "exact"):
    expected = law.bits(law.oracle(terms, weights, order, True, "float32"))
    for owner in law.DEALINGS:
        assert law.bits(law.summed(group, terms, weights, order, True, owner, "all")) == expected, (order, owner)
        grads = law.of_reducer(group, terms, weights, order, True, law.round_robin, "weight")
        assert [law.bits(g) for g in grads] == [expected] * 2, order
for mean in (True, comm.rank == 0):
    try:
        dist.add_n([np.ones(3)], group, weights=[comm.rank - (comm.size - 1) / 2], mean=mean)
    except ZeroDivisionError as e:
        assert mean and "sum to 0" in str(e)
    except fanin.PeerError as e:
        assert comm.size > 1 and "mean=True" in str(e)
    else:
        raise AssertionError("no error")
    if comm.size == 1:
        break
"""


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_weighted_sums_and_means_have_the_bits_of_one_process(ranks: int, nodes: int) -> None:
    mpiexec(ranks, SAME_MEANS.replace("NODES", repr(nodes)))
