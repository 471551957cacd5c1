"""What norm, largest element and non-finite count cost beside the sum itself: python benchmarks/statistics_cost.py [--quick]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import QUICK, array, finish, pin, size_text, timed

import fanin
from fanin import _core
from fanin.cli import bench


def row(size: int, n: int) -> dict[str, Any]:
    """n x size bytes."""
    arrays = [array(size // 4, "f4", 1088 * k) for k in range(n)]
    for k, x in enumerate(arrays):
        x[:] = k + 0.5
    out = array(size // 4)
    sources, in_place = tuple(arrays), (out, *arrays[1:])

    def fold(sources: tuple[Any, ...], stats: bool) -> None:
        _core._test_sum(out, sources, "float32", stats)

    def apart() -> None:
        fold(sources, False)
        np.dot(out, out)
        np.isfinite(out).all()

    work: bench.Work = {
        "sum": lambda: fold(sources, False),
        "sum and statistics": lambda: fold(sources, True),
        "sum, then np.dot, np.isfinite": apart,
        "in place": lambda: fold(in_place, False),
        "in place and statistics": lambda: fold(in_place, True),
    }
    torch = bench.peer("torch")
    if torch is not None:
        torch.set_num_threads(1)
        total = torch.from_numpy(out)

        def clip() -> None:
            fold(sources, False)
            torch.linalg.vector_norm(total)

        work["sum, then torch's norm"] = clip
    return timed(f"{n} x {size_text(size)} float32", work, "sum", (n + 1) * size)


def results() -> Iterator[dict[str, Any]]:
    """All rows."""
    print(f"core {pin()}")
    fanin.set_options(threads=1)
    for size in [256 << 10, 4 << 20] + ([] if QUICK else [128 << 20]):
        for n in (2, 4, 8):
            yield row(size, n)


if __name__ == "__main__":
    finish("statistics_cost", results())
