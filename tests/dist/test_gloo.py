"""Sums over ranks by torch.distributed with Gloo: processes that meet at a file."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from kit.child import in_child
from kit.ranks import alone, check_messages, gathered, train

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners


def _process(rank: int, size: int, meet: str, work: Callable[[Any], Any], result: Any, over: Any) -> None:
    import torch.distributed as td

    try:
        td.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
        result.send((True, work(dist.group(timeout=None))))
    except BaseException:
        result.send((False, traceback.format_exc()))
    result.close()
    if over is not None:
        over.wait()
    os._exit(0)  # a process group must not be destroyed after its ranks have ended


def on_processes(size: int, work: Callable[[Any], Any], folder: Path, alive: int | None = None) -> list[Any]:
    """Return the result of `work` on each rank; ranks stay until all have a result. `alive`: how many ranks are not
    killed. These leave at once: a rank that exchanges nothing with a killed one waits for those that did.
    """
    context = mp.get_context("spawn")
    over = context.Event() if alive is None else None
    ranks, waits, found = [], {}, {}
    try:
        for r in range(size):
            here, there = context.Pipe(duplex=False)
            ranks.append(context.Process(target=_process, args=(r, size, str(folder / "meet"), work, there, over)))
            ranks[r].start()
            there.close()  # the end of the process is then the end of the pipe
            waits[here] = r
        while waits:
            for here in wait(list(waits)):
                rank = waits.pop(here)
                with contextlib.suppress(EOFError):  # it was killed
                    good, value = here.recv()
                    assert good, f"rank {rank}: {value}"
                    found[rank] = value
    except BaseException:
        for p in ranks:
            p.kill()
        raise
    if over is not None:
        over.set()
    for p in ranks:
        p.join()
    assert len(found) == (alive or size), f"results of ranks {sorted(found)} alone"
    return [found[r] for r in sorted(found)]


def arrays_of(dtype: str) -> list[Any]:
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(3000) * 2.0 ** rng.integers(-9, 9, 3000) for _ in range(8)]
    return [torch.tensor(v).to(getattr(torch, dtype)) for v in values]


def same_bits(group: Any) -> list[str]:
    wrong = []
    for dtype in ("float32", "bfloat16", "float64"):
        arrays = arrays_of(dtype)
        in_runs = len(set(group.nodes)) > 1  # so that a fold runs from node to node
        mine = [k for k in range(8) if (k * group.size // 8 if in_runs else k % group.size) == group.rank]
        for order, accumulate in (("key", None), ("exact", "exact")):
            expected = fanin.add_n(arrays, accumulate=accumulate, scale=0.3)
            keys = mine if order == "key" else None
            got = dist.add_n([arrays[k] for k in mine], group, order, keys=keys, scale=0.3)
            if not (type(got) is torch.Tensor and got.dtype == expected.dtype and torch.equal(got, expected)):
                wrong.append(f"{order} {dtype}")
    return wrong


def gathers(group: Any) -> bool:
    whole = gathered(group)
    if whole:
        check_messages(whole, group.size)
    return whole is not None


def test_the_traces_of_all_ranks_are_gathered_on_one(tmp_path: Path) -> None:
    assert on_processes(2, gathers, tmp_path) == [True, False]


@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_of_tensors_has_the_bits_of_one_process(size: int, tmp_path: Path) -> None:
    assert on_processes(size, same_bits, tmp_path) == [[]] * size


def in_two_levels(group: Any) -> Any:
    """The law on one node, as the host's name has it; then on two."""
    here = group.nodes
    dist.group(group, nodes=2)
    return here, same_bits(group), weights(group), group.counters.messages_between > 0


def test_sums_in_two_levels_have_the_bits_of_one_process(tmp_path: Path) -> None:
    assert on_processes(4, in_two_levels, tmp_path) == [((0,) * 4, [], [True, True], True)] * 4


def weights(group: Any) -> list[bool]:
    return [train(group, o, 1000, lambda k: k % group.size, 20) == alone(o, 20) for o in ("exact", "key")]


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor that claims to be on a CUDA device: its memory must not be read before it is copied to the host."""

    is_cuda = True

    def detach(self) -> Any:
        return self

    def cpu(self) -> Any:
        return self.as_subclass(torch.Tensor)

    def numpy(self) -> Any:
        raise AssertionError("device memory was read")


def test_a_tensor_of_a_device_is_copied_to_the_host_before_it_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.sums, "object_text", lambda x: None)  # it has a class of its own, unlike one on a device

    def rank(group: Any) -> Any:
        x = torch.arange(3.0).as_subclass(OnDevice)
        bucket = dist.reducer._Bucket(0, [0], dist.layout.Layout([dist.layout.Leaf("w", (3,), "float32")], 2))
        bucket.put(0, x, False)
        return dist.add_n([x], group).tolist(), bucket.take_memory().places[0].tolist()

    assert dist.threads(2, rank, timeout=None) == [([0.0, 2.0, 4.0], [0.0, 1.0, 2.0])] * 2


def of_some(group: Any) -> list[str]:
    """What a group says that nobody named, where more ranks were launched than are in torch.distributed's world."""
    found = []
    for launched in (group.size, group.size + 1):
        os.environ["WORLD_SIZE"] = str(launched)
        try:
            found.append("" if dist.group() is group else "another group")
        except RuntimeError as e:
            found.append(str(e))
    named = dist.group(torch.distributed.group.WORLD)
    assert named is group
    return found


def test_a_world_that_nobody_named_has_all_ranks_that_were_launched(tmp_path: Path) -> None:
    for whole, part in on_processes(2, of_some, tmp_path):
        assert whole == ""
        assert part == (
            "group: WORLD_SIZE=3 says that 3 ranks were started, and torch.distributed's world has 2: call"
            " torch.distributed.init_process_group() before fanin.dist.group();"
            " fanin.dist.group(torch.distributed.group.WORLD) uses it as it is"
        )


ENDS = """
import atexit, sys, weakref
import torch, torch.distributed as td

def gone():
    print("dropped before Python ends:", ref() is None)

atexit.register(gone)  # runs after those that are registered later
import fanin
from fanin import dist

td.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.group(timeout=None)
hook = fanin.torch.ddp_hook().__self__
assert fanin.dist.torch_ranks._group("ddp_hook", None, hook.known) is group
ref, world = weakref.ref(group._engine._pg), weakref.ref(td.group.WORLD)
if sys.argv[2] == "destroyed":
    td.destroy_process_group()
    print("its world:", world() is None)
"""


@pytest.mark.parametrize("way", ["destroyed", "left"])
def test_process_groups_end_before_python_does(way: str, tmp_path: Path) -> None:
    """A thread of Gloo that outlives Python may abort the process as it drops a tensor."""
    words = [sys.executable, "-c", ENDS, str(tmp_path / "meet"), way]
    made = subprocess.run(words, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    world = ["its world: True"] if way == "destroyed" else []
    assert made.stdout.splitlines() == [*world, "dropped before Python ends: True"]


REPLICA_ENDS = """
import glob, sys
import torch, torch.distributed as td
import torch.distributed.nn

td.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
names = lambda: [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
before = sum("gloo" in name for name in names())
del model
td.destroy_process_group()
print(before > 0, sum("gloo" in name for name in names()))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc that lists the threads")
def test_no_thread_of_a_replica_that_was_dropped_outlives_its_process_group(tmp_path: Path) -> None:
    """What docs/ranks.md tells users to do: otherwise such a thread may abort the end of Python."""
    words = [sys.executable, "-c", REPLICA_ENDS, str(tmp_path / "meet")]
    made = subprocess.run(words, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stdout == "True 0\n"


@pytest.mark.parametrize("size", [2, 3])
def test_weights_after_twenty_steps_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    assert on_processes(size, weights, tmp_path) == [[True, True]] * size


def read_only(group: Any) -> Any:
    x = np.arange(1000.0)
    x.flags.writeable = False
    return dist.add_n([x], group).tolist() == (group.size * x).tolist()


def test_read_only_arrays_are_sent(tmp_path: Path) -> None:
    assert on_processes(2, read_only, tmp_path) == [True, True]


def waits(group: Any) -> Any:
    torch.distributed.barrier()
    if group.rank != 1:
        call_the_roll = group._engine.roll_call

        def until_the_others_answer(*how: Any) -> list[int]:
            while (late := call_the_roll(*how)) != [1]:  # on a busy machine an answer may take longer
                pass
            return late

        group._engine.roll_call = until_the_others_answer
        with pytest.raises(fanin.PeerError, match=r"within 2 s; .* is closed") as e:
            dist.add_n([np.ones(3)], group, timeout=2)
        torch.distributed.barrier()
        return str(e.value), group.closed
    torch.distributed.barrier()
    with pytest.raises(fanin.PeerError, match="within 2 s") as e:
        dist.add_n([np.ones(3)], group)
    return str(e.value), group.closed


@pytest.mark.parametrize("size", [2, 3])
def test_a_late_rank_is_named_within_the_time_limit_and_raises_the_same_when_it_comes(
    size: int, tmp_path: Path
) -> None:
    for text, closed in on_processes(size, waits, tmp_path):
        assert "rank 1 did not answer within 2 s" in text and "rank 1 did not answer" in closed


def without_answers(group: Any) -> Any:
    group._engine._notes.write = lambda *note: None
    torch.distributed.barrier()
    if group.rank == 1:
        return None
    with pytest.raises(fanin.PeerError) as e:
        dist.add_n([np.ones(3)], group, timeout=2)
    return str(e.value)


def test_a_rank_that_answers_no_roll_call_is_named_with_the_late_one(tmp_path: Path) -> None:
    """The planted fault of the test above: a waiting rank does not answer the roll call."""
    first, _, last = on_processes(3, without_answers, tmp_path)
    assert "no answer of ranks 1, 2 within 2 s" in first and "no answer of ranks 0, 1 within 2 s" in last


def leaves_first(group: Any) -> Any:
    """Rank 0 closes its group after a sum; rank 1 reads that in the middle of the sum and continues."""
    engine = group._engine
    dist.add_n([np.ones(3)], group)
    if group.rank == 0:
        group.close()
        torch.distributed.barrier()
        return None
    torch.distributed.barrier()
    engine.met -= 1  # as if the sum's header were on its way
    engine.check()
    engine.met += 1
    with pytest.raises(fanin.PeerError, match="rank 0 closed its group") as e:
        dist.add_n([np.ones(3)], group)
    return e.value.rank


def test_a_rank_that_leaves_ends_the_waits_that_come_after_its_last_answer(tmp_path: Path) -> None:
    assert on_processes(2, leaves_first, tmp_path) == [None, 0]


def interrupted(group: Any) -> Any:
    if group.rank == 1:
        torch.distributed.barrier()
        with pytest.raises(fanin.PeerError) as e:
            dist.add_n([np.ones(3)], group)
        return e.value.rank, group.closed
    engine, calls = group._engine, iter(range(1000))
    alive = engine._alive

    def between_waits() -> Any:
        if next(calls) == 1:  # 0: as the operation starts
            os.kill(os.getpid(), signal.SIGINT)
        return alive()

    engine._alive = between_waits
    try:
        dist.add_n([np.ones(3)], group)
    except KeyboardInterrupt:
        torch.distributed.barrier()
        return group.closed


def test_ctrl_c_ends_the_waits_of_all_ranks(tmp_path: Path) -> None:
    closed, (rank, other) = on_processes(2, interrupted, tmp_path)
    assert "rank 0 was interrupted" in closed and "rank 0 was interrupted" in other and rank == 0


def forked(group: Any) -> Any:
    def child() -> None:
        with pytest.raises(RuntimeError, match="before fork"):
            dist.add_n([np.ones(1)], group)

    return in_child(child)


def test_a_group_is_not_used_after_fork(tmp_path: Path) -> None:
    assert on_processes(2, forked, tmp_path) == [0, 0]


def destroyed(group: Any) -> Any:
    world, found = torch.distributed.group.WORLD, []
    torch.distributed.destroy_process_group()
    for call in (lambda: dist.add_n([np.ones(1)], group), lambda: dist.group(world)):
        try:
            call()
        except (fanin.PeerError, ValueError) as e:
            found.append(f"{type(e).__name__}: {e}")
    return found


def test_a_process_group_that_was_destroyed_is_refused(tmp_path: Path) -> None:
    for used, given in on_processes(2, destroyed, tmp_path):
        assert used.startswith("PeerError") and "the process group was destroyed" in used
        assert given == "ValueError: group: the process group was destroyed: expected one that is alive"


def killed(group: Any, order: Any = "exact") -> Any:
    if group.size == 4:
        dist.group(group, nodes=2)
    sums = 0
    try:
        while True:
            dist.add_n([np.ones(200_000)], group, order)
            sums += 1
            if group.rank == 1 and sums == 5:
                threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except fanin.PeerError:
        return sums, group.closed


def test_a_rank_that_is_killed_in_a_sum_is_an_error_on_the_others(tmp_path: Path) -> None:
    [(sums, closed)] = on_processes(2, killed, tmp_path, alive=1)
    assert sums >= 5 and closed


@pytest.mark.parametrize("order", ["exact", "key"])
def test_a_rank_that_is_killed_in_a_sum_in_two_levels_is_an_error_on_the_others(order: str, tmp_path: Path) -> None:
    for sums, closed in on_processes(4, partial(killed, order=order), tmp_path, alive=3):
        assert sums >= 5 and closed


def started_again(group: Any) -> Any:
    """A group on a store that has what ranks wrote which torchrun has started again."""
    engine = group._engine
    engine._notes.write("end", 0, 0, "rank 0 ended before")
    engine._board.put("left 0", "")
    torch.distributed.new_group = lambda *args, **options: engine._pg  # its name, and so its keys, are the same
    again = type(engine)(torch.distributed.group.WORLD)
    again.check()
    return again._board.left(), dist.add_n([np.ones(2)], dist.Group(again)).tolist()


def test_a_group_reads_nothing_that_ranks_wrote_before_they_were_started_again(tmp_path: Path) -> None:
    assert on_processes(1, started_again, tmp_path) == [([], [1.0, 1.0])]


def gone_between_sums(group: Any) -> Any:
    """What the others say of rank 1, which is killed between two sums."""
    dist.processes._ANSWER_LOST = 1e6  # a rank that is left may be late
    dist.add_n([np.ones(3)], group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fanin.PeerError) as found:
        dist.add_n([np.ones(3)], group)
    return found.value.rank, str(found.value)


def test_the_others_name_a_rank_that_was_killed_between_two_sums(tmp_path: Path) -> None:
    for rank, text in on_processes(4, gone_between_sums, tmp_path, alive=3):
        assert rank == 1, text
        assert "bucket 0: rank 1 cannot be reached: " in text and "pair.cc" not in text, text


LEAVES = """
import sys
import numpy as np, torch.distributed as td
import fanin
from fanin import dist
td.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=3)
group = dist.group()
dist.add_n([np.ones(3)], group)
if group.rank == 1:
    exec(sys.argv[3])
    sys.exit(0)
try:
    dist.add_n([np.ones(3)], group)
except fanin.PeerError as e:
    print(e.rank, e)
"""


@pytest.mark.parametrize(("end", "why"), [("", ""), ("raise ValueError('spilt')", ": ValueError: spilt")])
def test_the_others_learn_that_a_rank_has_ended(end: str, why: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEAVES, str(tmp_path / "meet")]
    ranks = [subprocess.Popen([*words, str(r), end], stdout=subprocess.PIPE, text=True) for r in range(3)]
    said = [p.communicate()[0] for p in ranks]
    assert [p.returncode for p in ranks] == [0, 1 if end else 0, 0]
    for text in (said[0], said[2]):
        ended = f"rank 1 ended after pass 1{why}"
        assert text == f"1 add_n, pass 2, bucket 0: {ended}; the group torch.distributed (gloo) is closed\n"
