"""Sums of arrays that a cache holds, 16 KB to 4 MB each, beside their peers."""

from __future__ import annotations

from collections.abc import Iterator

import fanin

from .common import CHAIN, FRESH, JAX, OFFSETS, TORCH, array, arrays, compiled, effort, fresh, size_text, sums
from .timing import Result, at_least, measure, pinned


def one(n: int, size: int, offset: str, where: str, quick: bool) -> Result:
    """One sum; the best of ours is what an engine would call."""
    inputs, out = arrays(n, size, offset), array(size // 4)
    work = sums(inputs, out) | {FRESH: fresh(inputs), "fanin.add_n": lambda: fanin.add_n(inputs)}
    peers = [CHAIN, FRESH, TORCH]
    if offset == "0":
        work[JAX] = compiled(inputs)
        peers.append(JAX)
    least = 1.0 if size < 256 << 10 or n < 8 else 1.6
    return measure(
        f"{n} x {size_text(size)} float32, offsets {offset}, core {where}",
        work,
        base=CHAIN,
        targets=[at_least(least, name, *peers) for name in ("fanin.add_n(out=)", "fanin.add_n")],
        more={"bytes": (n + 1) * size, "bytes_read": n * size},
        **effort((n + 1) * size, quick),
    )


def results(quick: bool) -> Iterator[Result]:
    """Sizes, N and offsets."""
    with pinned() as where:
        for size in (16 << 10, 256 << 10, 4 << 20):
            for n in (2, 8):
                for offset in list(OFFSETS)[: 1 if quick else None]:
                    yield one(n, size, offset, where, quick)
