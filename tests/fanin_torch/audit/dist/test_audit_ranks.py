"""Audits over ranks: averages of DistributedDataParallel, and what is refused."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

from dist.test_gloo import on_processes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners

import fanin.torch  # noqa: E402
from fanin_torch.audit.loops import Loop, alarms  # noqa: E402

if torch.distributed.is_available():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

#: Ranks, and how many random loops run on them.
COUNTS = [
    pytest.param(1, 6, id="one"),
    pytest.param(2, 8, id="two"),
    pytest.param(3, 4, id="three"),
    pytest.param(4, 3, id="four"),
    *(pytest.param(n, 100, id=f"{n}-all", marks=pytest.mark.slow) for n in (1, 2, 3, 4)),
]


def replicated(net: Any) -> Any:
    return DDP(net, find_unused_parameters=True)


def right_loops(group: Any, count: int) -> list[str]:
    torch.set_num_threads(1)
    wrong = []
    for seed in range(count):
        loop = Loop(seed, wrap=replicated, replicated=True, size=group.size, rank=group.rank).run()
        if [*alarms(loop.rows)]:
            wrong.append(str(loop))
        if not any("mean" in row.arrivals for row in loop.rows):
            wrong.append(f"{seed}: no average was seen")
    return wrong


@pytest.mark.parametrize(("size", "count"), COUNTS)
def test_right_loops_over_ranks_raise_no_alarm(size: int, count: int, tmp_path: Path) -> None:
    for wrong in on_processes(size, functools.partial(right_loops, count=count), tmp_path):
        assert not wrong, "\n".join(wrong)


def planted(group: Any) -> dict[str, list[str]]:
    """Faults of ranks, by name."""
    torch.set_num_threads(1)
    found = {}
    for name in ("alone", "tokens", "hook"):
        torch.manual_seed(0)
        net = torch.nn.Linear(20, 30)
        model = replicated(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        tokens = 1 + 2 * group.rank  # this rank's micro-batches have as many each
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with fanin.torch.audit(net.named_parameters(), optimizer) as audit:
                for i in range(2):
                    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * i + group.rank))
                    loss = audit.loss(model(x).square().mean(), tokens if name == "tokens" else None)
                    (loss / 2).backward()
                if name == "alone" and group.rank == 0:
                    net.bias.grad += 1
                if name == "hook":
                    model.register_comm_hook(None, halved)
                    model(torch.randn(4, 20)).square().mean().backward()
                optimizer.step()
        found[name] = [str(row) for row in audit.rows if row.verdict not in ("right", "note")]
    return found


def halved(state, bucket):  # type: ignore[no-untyped-def] # torch checks annotations by identity
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def test_faults_of_ranks_are_named(tmp_path: Path) -> None:
    first, second = on_processes(2, planted, tmp_path)
    # Rank 0 changes its sum after the average, which its own audit alone detects.
    assert any(row.startswith("bias: warning: changed by other code") for row in first["alone"]), first
    # A rank that normalizes by its own tokens gives its micro-batches too large or too small a share.
    for rows, share in ((first, "0.25"), (second, "0.75")):
        assert any(f"counts 0.5, expected {share}" in row for row in rows["tokens"]), rows
    assert any("a communication hook sums it over ranks" in row for row in first["hook"]), first


def refused(group: Any) -> str:
    net = torch.nn.Linear(8, 8)
    fully_shard(net)
    try:
        fanin.torch.audit(net.named_parameters(), torch.optim.SGD(net.parameters(), 0.1))
    except RuntimeError as e:
        return str(e)
    return "taken"


def test_parameters_that_fsdp_shards_are_refused_by_name(tmp_path: Path) -> None:
    for said in on_processes(2, refused, tmp_path):
        assert said.startswith("audit: weight is sharded by DTensor"), said


def hooks_of_a_shard(group: Any) -> list[int]:
    """How often hooks of a sharded parameter run in two passes: of the tensor, and after the accumulation."""
    net = torch.nn.Linear(8, 8)
    fully_shard(net)
    seen = [0, 0]

    def made(_: Any) -> None:
        seen[0] += 1

    def arrived(_: Any) -> None:
        seen[1] += 1

    net.weight.register_hook(made)
    net.weight.register_post_accumulate_grad_hook(arrived)
    for _ in range(2):
        net(torch.ones(2, 8)).sum().backward()
    return seen


def test_no_hook_of_a_shard_shows_what_a_pass_made(tmp_path: Path) -> None:
    """Why shards are refused: where torch shows it, an audit can compare it with what arrived."""
    assert on_processes(2, hooks_of_a_shard, tmp_path) == [[0, 2]] * 2
