"""Sums of N arrays that no cache holds, beside their peers and the read floor.

The floor is every input read once and nothing done; no algorithm is faster. Results go into memory that was written
before; for cold pages see recycling.py. Offsets of the inputs relative to each other are swept, as processors mind
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fanin

from .common import CHAIN, FLOOR, JAX, OFFSETS, array, arrays, compiled, effort, engine, size_text, sums
from .timing import Result, at_least, at_most, cores, measure, pinned

ENGINE = "torch's engine"
WEIGHTED = "InputBuffer, weights, take(out=)"


def one(n: int, size: int, offset: str, where: str, quick: bool, peers: bool) -> Result:
    """One sum; the slow peers where `peers`."""
    inputs, out = arrays(n, size, offset), array(size // 4)
    work = sums(inputs, out)
    buf = fanin.InputBuffer(1, budget=float("inf"))

    def through() -> None:
        for x in inputs:
            buf.add(0, x)
        buf.take(out=[out])

    ours = "fanin.add_n(out=)"
    work["InputBuffer, take(out=)"] = through
    if n == 8:

        def weighted() -> None:
            for k, x in enumerate(inputs):
                buf.add(0, x, weight=k + 0.5)
            buf.take(out=[out])

        work[WEIGHTED] = weighted
    targets = [at_most(1.15, ours, FLOOR)] if n >= 4 else []
    if n == 8:
        targets += [at_least(1.5, ours, CHAIN), at_most(1.1, WEIGHTED, "InputBuffer, take(out=)")]
    if peers:
        work |= {JAX: compiled(inputs), ENGINE: engine(inputs)}
        targets += [at_least(3, ours, ENGINE), at_least(2.5, ours, JAX)]
    more: dict[str, Any] = {"bytes": (n + 1) * size, "bytes_read": n * size} if "," not in where else {}
    return measure(
        f"{n} x {size_text(size)} float32, offsets {offset}, cores {where}",
        work,
        base=CHAIN,
        targets=targets,
        more=more,
        longest=5,
        **effort((n + 1) * size, quick),
    )


def results(quick: bool) -> Iterator[Result]:
    """Every N at every offset on one core; eight on two."""
    size = (1 if quick else 128) << 20
    with pinned() as where:
        for n in (2, 8) if quick else (2, 4, 8, 16):
            for offset in OFFSETS:
                yield one(n, size, offset, where, quick, n == 8 and offset == "0")
    if len(cores()) > 1:
        with pinned(2) as where:
            for offset in ("0", "1088 k"):
                yield one(8, size, offset, where, quick, False)
