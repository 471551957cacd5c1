"""Gradients that are made just before they are added, and dropped at once, as engines make them.

What is timed is the whole loop, the making too: the memory that an add keeps is memory that the next gradient cannot
have. "variable" binds each to a name before it is added, so that its maker has it still when the call comes, and until
the next is made; the others add the result of an expression. The last row is the opposite: gradients to which other
references remain.
Peaks are growths of the resident memory, in a process of its own for each variant.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable, Iterator

import numpy as np

import fanin

from .common import effort
from .timing import Result, Work, at_most, measure, peer, pinned

ADD, NEW, TORCH, ADD_NAMED = "s += g", "s = s + g", "torch s.add_(g)", "s += g, variable"
OURS, NAMED, BEFORE, AT_ONCE = "fanin", "fanin, variable", "fanin, 64 MiB", "fanin, budget=0"


def of(budget: float | None, make: Callable[[], np.ndarray], n: int) -> Callable[[], object]:
    def add() -> object:
        buf = fanin.InputBuffer(1, budget=budget)
        for _ in range(n):
            buf.add(0, make())
        return buf.take()

    return add


def works(n: int, size: int) -> Work:
    """Each makes n gradients of `size` float64 and sums them."""
    x = np.linspace(0.0, 1.0, size)
    torch = peer("torch")
    tensor = torch.from_numpy(x) if torch else None

    def make() -> np.ndarray:
        return x * 0.5

    def in_place() -> object:
        s = make()
        for _ in range(n - 1):
            s += make()
        return s

    def in_place_named() -> object:
        s = make()
        for _ in range(n - 1):
            g = make()
            s += g
        return s

    def anew() -> object:
        s = make()
        for _ in range(n - 1):
            s = s + make()
        return s

    def of_torch() -> object:
        assert tensor is not None
        s = tensor * 0.5
        for _ in range(n - 1):
            s.add_(tensor * 0.5)
        return s

    def named() -> object:
        buf = fanin.InputBuffer(1)
        for _ in range(n):
            g = make()
            buf.add(0, g)
        del g
        return buf.take()

    return {
        ADD: in_place,
        ADD_NAMED: in_place_named,
        NEW: anew,
        TORCH: of_torch if torch else None,
        OURS: of(None, make, n),
        NAMED: named,
        BEFORE: of(64 << 20, make, n),
        AT_ONCE: of(0, make, n),
    }


def kept(n: int, size: int) -> Work:
    """The same gradients each time, which stay."""
    all_ = [np.linspace(0.0, k, size) for k in range(n)]

    def in_place() -> object:
        s = all_[0].copy()
        for g in all_[1:]:
            s += g
        return s

    def ours(budget: float | None) -> Callable[[], object]:
        def add() -> object:
            buf = fanin.InputBuffer(1, budget=budget)
            for g in all_:
                buf.add(0, g)
            return buf.take()

        return add

    return {ADD: in_place, OURS: ours(None), BEFORE: ours(64 << 20), AT_ONCE: ours(0)}


def peak(work: Callable[[], object]) -> int:
    """By how many bytes the resident memory grows at most."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        # Python and jax warn of a fork where threads are: this child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writes, str(grown * 1024).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        grown = int(answer.read() or 0)
    os.waitpid(child, 0)
    return grown


def one(n: int, size: int, where: str, quick: bool, keep: bool = False) -> Result:
    work = (kept if keep else works)(n, size)
    fanin.trim()
    return measure(
        f"{n} x {size:.0e} float64 {'that stay' if keep else 'made and dropped'}, core {where}", work, base=ADD,
        targets=[at_most(1.05, OURS, BEFORE)] if keep else [at_most(1.05, OURS, ADD), at_most(1.05, NAMED, ADD_NAMED)],
        more={"peaks": {name: peak(f) for name, f in work.items() if callable(f)}},
        longest=20, **{**effort(2 * n * size * 8, quick), "unit": "ms", "calls": 1},
    )  # fmt: skip


def results(quick: bool) -> Iterator[Result]:
    """From arrays that a cache holds to those that none does."""
    with pinned() as where:
        for n, size in (
            ((20, 10**4), (8, 10**5))
            if quick
            else ((200, 10**4), (1000, 10**4), (50, 10**5), (20, 10**6), (8, 8 * 10**6))
        ):
            yield one(n, size, where, quick)
        yield one(4 if quick else 20, 10**5 if quick else 10**6, where, quick, keep=True)
