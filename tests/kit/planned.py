"""Sums of one array a rank, each made several times: the first by headers, the others by their plan."""

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
    return [1, 257, whole_of(ranks) // each, whole_of(ranks) // each + 1, PARTS // each + 300]


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
