"""What fresh pages cost: sums into recycled and into fresh memory, beside NumPy's.

"fresh" means that every page of the result has to be given by the system first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import fanin

from .common import CHAIN, FRESH, arrays, effort, fresh, size_text, sums
from .timing import Result, at_most, measure, peer, pinned


def one(n: int, size: int, where: str, quick: bool) -> Result:
    """n x size bytes."""
    inputs = arrays(n, size)
    out = np.zeros(size // 4, "f4")
    torch = peer("torch")

    def cold() -> None:
        with fanin.set_options(pool_bytes=0):
            fanin.add_n(inputs)

    def recycled() -> np.ndarray:
        return fanin.add_n(inputs)

    def torch_fresh() -> None:
        total = tensors[0] + tensors[1]
        for x in tensors[2:]:
            total.add_(x)

    tensors = [torch.from_numpy(x) for x in inputs] if torch else []
    shared = sums(inputs, out)
    work = {
        FRESH: fresh(inputs),
        CHAIN: shared[CHAIN],
        "torch, fresh": torch_fresh if torch else None,
        "fanin, fresh": cold,
        "fanin, recycled": recycled,
        "fanin, out=": shared["fanin.add_n(out=)"],
    }
    with fanin.set_options(pool_bytes=2 * size):
        return measure(
            f"{n} x {size_text(size)} float32, core {where}",
            work,
            base=FRESH,
            targets=[at_most(0.75, "fanin, fresh", FRESH)] if n >= 4 else [],
            before={"fanin, recycled": recycled},
            longest=5,
            **{**effort((n + 1) * size, quick), "calls": 1},
        )


def results(quick: bool) -> Iterator[Result]:
    """All N."""
    with pinned() as where:
        for n in (2, 8) if quick else (2, 4, 8, 16):
            yield one(n, (4 if quick else 128) << 20, where, quick)
