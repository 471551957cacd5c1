"""What norm, largest element and non-finite count cost beside the sum itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .common import array, arrays, effort, size_text
from .timing import Result, at_most, measure, peer, pinned


def one(size: int, n: int, where: str, quick: bool) -> Result:
    """n x size bytes."""
    inputs, out = arrays(n, size, "1088 k"), array(size // 4)
    torch = peer("torch")

    def total(stats: bool = False) -> None:
        fanin.add_n(inputs, out=out, stats=stats)

    def apart() -> None:
        total()
        np.dot(out, out)
        np.isfinite(out).all()

    def clip() -> None:
        total()
        torch.linalg.vector_norm(torch.from_numpy(out))

    work: dict[str, Any] = {
        "sum": total,
        "sum and statistics": lambda: total(True),
        "sum, then np.dot, np.isfinite": apart,
        "sum, then torch's norm": clip if torch else None,
    }
    return measure(
        f"{n} x {size_text(size)} float32, core {where}", work, base="sum",
        targets=[at_most(1.05, "sum and statistics", "sum")], **effort((n + 1) * size, quick),
    )  # fmt: skip


def results(quick: bool) -> Iterator[Result]:
    """Sizes and N."""
    with pinned() as where:
        for size in [256 << 10, 4 << 20] + ([] if quick else [128 << 20]):
            for n in (2, 4, 8):
                yield one(size, n, where, quick)
