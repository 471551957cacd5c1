"""Gradients of parts of an array (`fanin.Partial`), and of rows (`fanin.add_rows`), beside padding, `numpy.add.at` and
torch: its `split`, `x[i:j]` in a loop, `index_add_`.

On the tape each part is passed through `tanh` before all are joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fanin
from fanin import tape

from .common import effort, size_text
from .timing import Result, Work, at_most, measure, peer, pinned

WIDTH = 256
OURS, TORCH = "fanin", "torch"


def places(rows: int, parts: int) -> list[slice]:
    step = rows // parts
    return [slice(i * step, (i + 1) * step) for i in range(parts)]


def buffer(size: int, parts: int, quick: bool, where: str) -> Result:
    """One slot gets the gradients of all parts."""
    rows = size // (4 * WIDTH)
    whole, own = (rows, WIDTH), places(rows, parts)
    gradients = [np.ones((rows // parts, WIDTH), np.float32) for _ in own]
    terms = [fanin.Partial(g, at, whole) for g, at in zip(gradients, own, strict=True)]
    buf = fanin.InputBuffer(1)

    def added(some: list[Any]) -> Callable[[], None]:
        def pass_() -> None:
            for x in some:
                buf.add(0, x)
            buf.take()

        return pass_

    def padded() -> None:
        for g, at in zip(gradients, own, strict=True):
            wide = np.zeros(whole, np.float32)
            wide[at] = g
            buf.add(0, wide)
        buf.take()

    work: Work = {
        "Partial": added(terms),
        "padded": padded if parts <= 16 or quick else None,
        "np.concatenate": lambda: np.concatenate(gradients),
    }
    return measure(
        f"parts: {size_text(size)} in {parts} gradients, core {where}", work, base="Partial",
        targets=[at_most(1, "Partial", "padded")], **effort(2 * size, quick),
    )  # fmt: skip


def split(size: int, parts: int, quick: bool, where: str) -> Result:
    """A step on the tape: an array is split, each part passed on, all joined."""
    rows = size // (4 * WIDTH)
    x = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32)
    w, torch = tape.parameter(x), peer("torch")

    def ours() -> None:
        w.grad = None
        tape.backward(tape.concatenate([tape.tanh(p) for p in tape.split(w, parts)]).sum())

    theirs: Callable[[], None] | None = None
    if torch is not None:
        v = torch.from_numpy(x.copy()).requires_grad_()

        def by_torch() -> None:
            v.grad = None
            torch.cat([p.tanh() for p in v.split(rows // parts)]).sum().backward()

        theirs = by_torch
    return measure(
        f"split of {size_text(size)} in {parts} parts, core {where}", {OURS: ours, TORCH: theirs}, base=OURS,
        targets=[at_most(1, OURS, TORCH)] if parts <= 64 else [], **effort(4 * size, quick),
    )  # fmt: skip


def slices(size: int, parts: int, quick: bool, where: str) -> Result:
    """The same by one slice after the other, in a loop."""
    rows = size // (4 * WIDTH)
    x = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32)
    w, torch, own = tape.parameter(x), peer("torch"), places(rows, parts)

    def ours() -> None:
        w.grad = None
        tape.backward(tape.concatenate([tape.tanh(w[at]) for at in own]).sum())

    theirs: Callable[[], None] | None = None
    if torch is not None:
        v = torch.from_numpy(x.copy()).requires_grad_()

        def by_torch() -> None:
            v.grad = None
            torch.cat([v[at].tanh() for at in own]).sum().backward()

        theirs = by_torch
    return measure(
        f"x[i:j] of {size_text(size)} in {parts} parts, core {where}", {OURS: ours, TORCH: theirs}, base=OURS,
        targets=[at_most(1, OURS, TORCH)], **effort(4 * size, quick),
    )  # fmt: skip


def embedding(count: int, n: int, quick: bool, where: str) -> Result:
    """Rows of 64 float32 by random numbers."""
    rng, torch = np.random.default_rng(0), peer("torch")
    ids, rows = rng.integers(0, n, count), rng.standard_normal((count, 64), np.float32)
    theirs: Callable[[], object] | None = None
    if torch is not None:
        numbers, values = torch.from_numpy(ids), torch.from_numpy(rows)

        def index_add() -> object:
            return torch.zeros(n, 64).index_add_(0, numbers, values)

        theirs = index_add

    def at() -> None:
        np.add.at(np.zeros((n, 64), np.float32), ids, rows)

    work: Work = {
        "add_rows": lambda: fanin.add_rows(ids, rows, n),
        "add_rows, exact": lambda: fanin.add_rows(ids, rows, n, accumulate="exact"),
        "index_add_": theirs,
        "np.add.at": at,
    }
    targets = [at_most(1, "add_rows", "index_add_"), at_most(2, "add_rows, exact", "index_add_")]
    return measure(
        f"rows: {count} of 64 float32 into {n}, core {where}", work, base="add_rows", targets=targets,
        **effort(count * 256, quick),
    )  # fmt: skip


def results(quick: bool) -> Iterator[Result]:
    """All rows."""
    size = (1 if quick else 4) << 20
    with pinned() as where:
        for parts in (4, 16, 64, 256):
            yield buffer(size, parts, quick, where)
        for parts in (4, 16, 64, 256):
            yield split(size, parts, quick, where)
        for parts in (4, 64):
            yield slices(size, parts, quick, where)
        for count, n in ((1000, 100), (10_000, 500)) if quick else ((100_000, 10_000), (1_000_000, 50_000)):
            yield embedding(count, n, quick, where)
