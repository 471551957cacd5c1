"""Many slots in one call: add_many and take beside torch's _foreach_add_ and a dict of ndarrays.

"in place" is acc += g in every slot: of a buffer that keeps its sums (budget=0), or of arrays that it is given and
writes to (take(out=)); "8 each" sums eight gradients in every slot, the first of which the peers copy. "one by one"
walks a graph: two gradients meet in each slot, whose sum is taken before the next slot is visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import numpy as np

import fanin

from .common import size_text
from .timing import Result, at_least, measure, peer, pinned

IN_PLACE = "add_many into kept sums"
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
FOREACH, DICT = "torch._foreach_add_", "a dict of ndarrays, np.add(out=)"


def foreach(torch: ModuleType, sets: Sequence[Sequence[Floats]], accs: Sequence[Floats]) -> Callable[[], None]:
    """The sums of `sets` into `accs` by torch; of one set in place."""
    tsets, taccs = [[torch.from_numpy(g) for g in gs] for gs in sets], [torch.from_numpy(a) for a in accs]

    def sum_all() -> None:
        if len(tsets) > 1:
            torch._foreach_copy_(taccs, tsets[0])
        for ts in tsets[len(tsets) > 1 :]:
            torch._foreach_add_(taccs, ts)

    return sum_all


def one(slots: int, size: int, n: int, where: str, quick: bool) -> Result:
    """us for all slots; n = 1: in place."""
    torch = peer("torch")
    every = list(range(slots))
    sets = [[np.ones(size // 4, "f4") for _ in every] for _ in range(n)]
    accs = [np.zeros(size // 4, "f4") for _ in every]
    sums = dict(enumerate(accs))
    buf, kept = fanin.InputBuffer(slots, budget=float("inf")), fanin.InputBuffer(slots, budget=0)
    for gs in (accs, sets[0]):
        kept.add_many(every, gs)

    def by_dict() -> None:
        if n > 1:
            for k, g in enumerate(sets[0]):
                np.copyto(sums[k], g)
        for gs in sets[n > 1 :]:
            for k, g in enumerate(gs):
                acc = sums[k]
                np.add(acc, g, out=acc)

    def adds() -> None:
        if n == 1:
            buf.add_many(every, accs)
        for gs in sets:
            buf.add_many(every, gs)

    def with_out() -> None:
        adds()
        buf.take(out=accs)

    def fresh() -> None:
        adds()
        buf.take()

    work: dict[str, Callable[[], object] | None] = {
        DICT: by_dict,
        FOREACH: None,
        "add_many, take()": fresh,
        "add_many alone": adds,
        "add_many, take(out=)": with_out,
    }
    if n == 1:
        work[IN_PLACE] = lambda: kept.add_many(every, sets[0])
    if torch is not None:
        work[FOREACH] = foreach(torch, sets, accs)
    ours = IN_PLACE if n == 1 else "add_many, take()"
    targets = [at_least(10 if size <= 64 else 3, ours, FOREACH)] if slots == 10_000 else []
    touched = slots * size * (n + 2)
    return measure(
        f"{slots} slots of {size_text(size)}, {'in place' if n == 1 else f'{n} each'}, core {where}",
        work,
        base=DICT,
        unit="us",
        after=buf.clear,
        targets=targets,
        rounds=2 if quick else 7 if touched > 1 << 25 else 25,
        longest=1,
    )


def one_by_one(slots: int, size: int, where: str, quick: bool) -> Result:
    """us for all slots of one pass, two gradients each: `take(slot=i)` of one buffer, a buffer for each, a dict."""
    first, second = ([np.full(size // 4, k + 0.5, "f4") for _ in range(slots)] for k in range(2))
    buf, own = fanin.InputBuffer(slots), [fanin.InputBuffer(1) for _ in range(slots)]

    def shared() -> None:
        for i, (x, y) in enumerate(zip(first, second, strict=True)):
            buf.add(i, x)
            buf.add(i, y)
            buf.take(slot=i)

    def each() -> None:
        for b, x, y in zip(own, first, second, strict=True):
            b.add(0, x)
            b.add(0, y)
            b.take()

    def by_dict() -> None:
        sums: dict[int, Floats] = {}
        for i, (x, y) in enumerate(zip(first, second, strict=True)):
            sums[i] = x
            sums[i] = sums[i] + y
            del sums[i]

    return measure(
        f"{slots} slots of {size_text(size)}, one by one, core {where}",
        {"a dict of ndarrays, a + b": by_dict, "take(slot=i)": shared, "a buffer for each": each},
        base="a dict of ndarrays, a + b",
        unit="us",
        after=buf.clear,
        rounds=2 if quick else 25,
        longest=1,
    )


def results(quick: bool) -> Iterator[Result]:
    """Slots by size by N."""
    with pinned() as where:
        for slots in (100,) if quick else (100, 1000, 10_000, 100_000):
            for size in (64, 1024):
                for n in (1, 8) if slots < 100_000 else (1,):
                    yield one(slots, size, n, where, quick)
        yield one_by_one(100 if quick else 1000, 64, where, quick)
