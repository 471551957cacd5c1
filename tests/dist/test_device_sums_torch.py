"""What the engine of torch.distributed asks of NCCL, tried with Gloo and tensors in host memory in their places: the
sizes of pieces, the calls, and the bits of sums. Streams are not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from dist.test_gloo import on_processes
from fanin import dist
from fanin.dist import device_sums
from fanin.dist.device_sums import Where
from fanin.dist.group import Group

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners

DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn", "int32", "bool")
#: Elements of which three ranks own as many each, other numbers, and of which two own none.
SIZES = (3 * 256, 1000, 5)


class OnHost(Where):
    """Tensors of the host, which has no streams."""

    def current(self) -> Any:
        return contextlib.nullcontext()

    def mark(self, x: Any) -> None:
        pass


def where(group: Group, arrays: Sequence[Any]) -> Where | None:
    carries: Any = group._engine.carries  # type: ignore[attr-defined]
    alike = carries(arrays[0], "cpu") if arrays else None
    return None if alike is None else OnHost(arrays[0], None, alike)  # type: ignore[arg-type]


def use_gloo_as_nccl(group: Group) -> None:
    engine: Any = group._engine
    engine._nccl = torch.distributed.new_group(backend="gloo")
    engine.device = torch.device("cpu")
    device_sums.where = where


def tensors(dtype: str, size: int, first: int, n: int) -> list[Any]:
    made = []
    for k in range(n):
        rng = np.random.default_rng([size, first + k])
        x = torch.from_numpy(rng.standard_normal(size) * 2.0 ** rng.integers(-5, 5, size))
        made.append((x.abs() if dtype in ("int32", "bool") else x).to(getattr(torch, dtype)))
    return made


def sums(group: Group, counts: Sequence[int]) -> list[bytes | None]:
    found = []
    first, n = sum(counts[: group.rank]), counts[group.rank]
    for dtype in DTYPES:
        for size in SIZES:
            mine = tensors(dtype, size, first, n)
            for order, into in (("key", "all"), ("rank", "shard"), (None, group.size - 1)):
                total = dist.add_n(mine, group, order, into=into)  # type: ignore[arg-type]
                assert total is None or (total.dtype == mine[0].dtype and not total._is_view())
                found.append(None if total is None else total.contiguous().view(torch.uint8).numpy().tobytes())
    return found


def both_ways(group: Group, counts: Sequence[int]) -> tuple[bool, int, int]:
    """Whether the bits are the same, and the sums that were made each way."""
    host = sums(group, counts)
    before = group.counters.on_device
    use_gloo_as_nccl(group)
    return sums(group, counts) == host, before, group.counters.on_device


@pytest.mark.parametrize(
    "counts", [(1, 2), (1, 1, 1), *(pytest.param(c, marks=pytest.mark.full) for c in [(3, 2, 1, 2), (1,)])]
)
def test_sums_by_the_calls_for_nccl_have_the_bits_of_those_through_the_host(
    counts: tuple[int, ...], tmp_path: Path
) -> None:
    ways = len(DTYPES) * len(SIZES) * 3
    found = on_processes(len(counts), partial(both_ways, counts=counts), tmp_path)
    assert found == [(True, 0, ways)] * len(counts)


def mixed(group: Group) -> Any:
    """A rank whose tensor is elsewhere: all go through the host."""
    use_gloo_as_nccl(group)
    if group.rank == 1:
        device_sums.where = lambda group, arrays: None
    totals = [dist.add_n([torch.full((300,), 1.0 + group.rank)], group).tolist() for _ in range(3)]
    return totals == [[3.0] * 300] * 3, group.counters.on_device, group.counters.planned


def test_a_tensor_elsewhere_on_one_rank_sends_the_sum_through_the_host(tmp_path: Path) -> None:
    assert on_processes(2, mixed, tmp_path) == [(True, 0, 2)] * 2


def test_which_tensors_may_be_summed_on_a_device() -> None:
    """The conditions, of tensors whose device a test replaces; a group without NCCL carries none."""
    x = torch.ones(3)
    assert device_sums.device_of(x) is None and device_sums.device_of(np.ones(3)) is None
    assert dist.threads(1, lambda group: device_sums.where(group, [x]), timeout=None) == [None]
    with fanin.sim.Machine(1) as m:
        a = m.array(np.ones(3))
        assert device_sums.device_of(a) == "sim:0"
