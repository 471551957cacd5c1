"""N adds of 16 floats and the take, N = 2, 8, 64, beside chains of + and torch.stack().sum(0)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .timing import Result, at_least, measure, peer, pinned

PEERS = ("functools.reduce(np.add)", "a + b, then +=", "torch + then add_", "torch.stack().sum(0)", "numexpr")
NUMPY = """\
t = gs[0] + gs[1]
for g in rest:
    t += g"""
TORCH = """\
t = ts[0] + ts[1]
for y in trest:
    t.add_(y)"""


def one(n: int, where: str, quick: bool) -> Result:
    """ns for each sum of n."""
    torch, numexpr = peer("torch"), peer("numexpr")
    gs = [np.full(16, i + 0.5, "f4") for i in range(n)]
    buf = fanin.InputBuffer(1)
    names: dict[str, Any] = {"gs": gs, "rest": gs[2:], "add": buf.add, "take": buf.take, "add_n": fanin.add_n}
    names |= {"reduce": functools.reduce, "np_add": np.add, "slots": [0] * n, "add_many": buf.add_many}
    work: dict[str, Any] = {
        "functools.reduce(np.add)": "reduce(np_add, gs)",
        "a + b, then +=": NUMPY,
        "buf.add, N times, buf.take": "for g in gs:\n    add(0, g)\ntake()",
        "buf.add_many, buf.take": "add_many(slots, gs)\ntake()",
        "fanin.add_n": "add_n(gs)",
        "torch + then add_": None,
        "torch.stack().sum(0)": None,
    }
    if n <= 8:  # more operands than it is made for
        work["numexpr"] = None
    if torch is not None:
        ts = [torch.from_numpy(g) for g in gs]
        names |= {"ts": ts, "trest": ts[2:], "stack": torch.stack}
        work |= {"torch + then add_": TORCH, "torch.stack().sum(0)": "stack(ts).sum(0)"}
    if numexpr is not None and n <= 8:
        names |= {"again": numexpr.re_evaluate}
        numexpr.evaluate(" + ".join(f"g{i}" for i in range(n)), {f"g{i}": g for i, g in enumerate(gs)})
        names["local"] = {f"g{i}": g for i, g in enumerate(gs)}
        work["numexpr"] = "again(local_dict=local)"
    least = {2: 1.8, 8: 4, 64: 6}[n]
    return measure(
        f"{n} adds of 16 float32 and the take, core {where}",
        work,
        base="functools.reduce(np.add)",
        names=names,
        after=buf.clear,
        targets=[at_least(least, row, *PEERS) for row in ("buf.add, N times, buf.take", "fanin.add_n")],
        rounds=5 if quick else 2000,
        calls=max(1, 64 // n),
    )


def results(quick: bool) -> Iterator[Result]:
    """All N."""
    with pinned() as where:
        for n in (2, 8, 64):
            yield one(n, where, quick)
