"""Sums of one array a rank, and passes of reducers, each made several times: the first by headers, the others by their
plan. An engine whose messages have one size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import fanin
from fanin import dist
from fanin.dist.frames import PARTS, whole_of
from fanin.dist.group import Group
from fanin.dist.layout import deal, is_inexact, itemsize, typed

TIMES = 3
DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int32", "bool")


def sizes_of(ranks: int, dtype: str) -> list[int]:
    """Numbers of elements around the blocks that ranks own, and around each way that a term travels."""
    each = itemsize(dtype)
    of_one_size = PARTS // ranks  # of messages of one size, as over Gloo
    limits = [limit // each + more for limit in (whole_of(ranks), of_one_size) for more in (0, 1)]
    return [1, 257, *dict.fromkeys(limits), PARTS // each + 300]


def terms_of(dtype: str, size: int, ranks: int) -> list[Any]:
    rng = np.random.default_rng(size)
    made = []
    for _ in range(ranks):
        x = typed(np.zeros(size * itemsize(dtype), np.uint8), dtype)
        x[...] = (rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9, size)).astype(x.dtype)
        made.append(x)
    return made


def expected(terms: Sequence[Any], dtype: str, order: str, scale: Any, into: Any, rank: int) -> bytes | None:
    """The bytes of the sum that a rank gets, by the `add_n` of one process."""
    exact = order == "exact" and is_inexact(dtype)
    total = fanin.add_n(terms, scale=scale, accumulate="exact" if exact else None)
    if into == "shard":
        low, high = deal(len(total), len(terms))[rank : rank + 2]
        return bytes(total[low:high].tobytes())
    return bytes(total.tobytes()) if into in ("all", rank) else None


def wrongs(group: Group, dtypes: Sequence[str] = DTYPES) -> list[Any]:
    """The sums that have other bits than those of one process, and those that had no plan."""
    found: list[Any] = []
    for dtype in dtypes:
        for size in sizes_of(group.size, dtype):
            terms = terms_of(dtype, size, group.size)
            for order, into in itertools.product(("key", "exact", "rank"), ("all", "shard", group.size - 1)):
                scale = 1 / 3 if order != "rank" and is_inexact(dtype) else None
                right = expected(terms, dtype, order, scale, into, group.rank)
                before = group.counters.planned
                for _ in range(TIMES):
                    got = dist.add_n([terms[group.rank]], group, order, scale=scale, into=into)  # type: ignore[arg-type]
                    if (None if got is None else got.tobytes()) != right:
                        found.append((dtype, size, order, into))
                if group.counters.planned != before + TIMES - 1:
                    found.append((dtype, size, order, into, "no plan"))
    return found


# ---------------------------------------------------------------- reducers

PASSES = 3
#: How many contributions each rank brings, and whether they have keys.
CONTRIBUTIONS = ((1, False), (1, True), (2, False))


def reducer_cases(ranks: int) -> Any:
    """Dtypes of leaves, bytes of all, order, where the sum goes, contributions, keys."""
    small, part, large = 100, 100_000, PARTS + 4096
    for dtypes, size in (
        (("float32",), small),
        (("float32",), part),
        (("float32",), large),
        (("float16", "float32"), 600),
    ):
        for order, (each, keyed) in itertools.product(("key", "exact", "rank", None), CONTRIBUTIONS):
            if not keyed or order == "key":
                yield dtypes, size, order, "all", each, keyed
    for into in ("shard", ranks - 1):
        yield ("float32",), small, "key", into, 1, False
        yield ("float32",), part, "exact", into, 1, False


def sum_of_keys(terms: Sequence[Any], order: str | None, each: int, keyed: bool, scale: Any) -> Any:
    """The sum of all contributions by one process. Keys turn the order of ranks."""
    ranks = len(terms) // each
    if order == "exact" and is_inexact(str(terms[0].dtype)):
        return fanin.add_n(terms, scale=scale, accumulate="exact")
    if order == "key" or (order is None and each == 1):
        turned = [terms[r * each + k] for r in reversed(range(ranks)) for k in range(each)] if keyed else terms
        return fanin.add_n(turned, scale=scale)
    out = np.empty_like(terms[0])
    if each > 1 and out.dtype == np.float16:  # folds of a rank run, and travel, in float32
        terms = [t.astype("f4") for t in terms]
    folds = [fanin.add_n(terms[r * each : (r + 1) * each]) for r in range(ranks)]
    return fanin.add_n(folds, scale=scale, out=out)


def wrong_reducers(group: Group, every: int = 1) -> list[Any]:
    """The cases whose passes have other bits than one process, or that should have a plan and had none; of all cases,
    or of each second, third ..
    """
    found: list[Any] = []
    for case in [*reducer_cases(group.size)][::every]:
        dtypes, size, order, into, each, keyed = case
        scale = 1 / 3 if all(map(is_inexact, dtypes)) else None
        sizes = [size // itemsize(d) for d in dtypes]
        terms = [terms_of(d, n, group.size * each) for d, n in zip(dtypes, sizes, strict=True)]
        leaves = [fanin.Leaf(np.zeros(n, d)) for n, d in zip(sizes, dtypes, strict=True)]
        reducer = dist.Reducer(leaves, group, order=order, into=into, scale=scale)
        first = group.rank * each
        for turn in range(PASSES):
            for k in range(each):
                key = (group.size - 1 - group.rank) * each + k if keyed else None
                roots = [(w, 0, t[first + k]) for w, t in zip(leaves, terms, strict=True)]
                if k + 1 < each:
                    with reducer.accumulate(key):
                        fanin.backward(roots)
                else:
                    fanin.backward(roots, reducer=reducer.at(key))
            got = reducer.shards if into == "shard" else [w.grad for w in leaves]
            for w, t, one in zip(leaves, terms, got, strict=True):
                right = sum_of_keys(t, order, each, keyed, scale)
                if into == "shard":
                    low, high = deal(len(right), group.size)[group.rank : group.rank + 2]
                    right = right[low:high]
                here = into in ("all", "shard", group.rank)
                if (one is not None) != here or (here and one.tobytes() != right.tobytes()):
                    found.append((*case, turn, w.array.dtype))
                w.grad = None
            packed = order == "exact" and each > 1 and any(map(is_inexact, dtypes))
            if reducer._buckets[0].is_planned != (turn > 0 and not packed and not (keyed and each > 1)):
                found.append((*case, turn, "plan"))
    return found


class Padded:
    """The engine of a thread, whose first messages have one size on all ranks, which it checks."""

    padded = True

    def __init__(self, engine: Any) -> None:
        self.engine, self.sizes = engine, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def share(self, sends: Sequence[Any], receives: Sequence[Any], again: bool) -> Any:
        each = len(receives[0])
        self.sizes.append(each)
        assert max(map(len, sends)) <= each and all(len(x) == each for x in receives)
        messages = [np.concatenate([x, np.zeros(each - len(x), np.uint8)]) for x in sends]
        pending = self.engine.share(messages, receives, again)
        return Checked(pending, each)


class Checked:
    """Messages of which all have to be of one size."""

    def __init__(self, pending: Any, each: int) -> None:
        self.pending, self.each = pending, each

    def wait(self, timeout: float | None) -> list[int]:
        sizes: list[int] = self.pending.wait(timeout)
        assert sizes == [self.each] * len(sizes), f"messages of {sizes} bytes"
        return sizes
