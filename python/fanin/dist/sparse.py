"""Sparse gradients over ranks: the rows that any rank has travel, and their numbers, instead of the whole table (N13).

Each rank says in its header how many rows it has of a leaf. If every rank has few, or nothing of that leaf, all ranks
send each other the numbers of their rows. Then the sum is made of tables of the rows that any rank has, and of one more
row, which stands for all that no rank has. So each element has the terms that it has in a sum of whole tables, in the
same order, and the same bits, with every order, weight, scale and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from fanin import _core
from fanin._interop.classes import is_scipy, is_torch
from fanin._interop.protocols import NDArray
from fanin.slots import Sparse

from .group import Call, Group, Header
from .layout import Layout, Leaf, itemsize
from .options import Options
from .wire import BLOCKED

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Bytes of a table: a smaller one travels sooner than the numbers of its rows.
LEAST = 1 << 16


def is_sparse(x: Any) -> bool:
    """Whether rows of an array may travel, but for its size: it is sparse, and lists its elements."""
    if type(x) is np.ndarray:
        return False
    if is_torch(x):
        tensor: Any = x
        return bool(tensor.is_sparse)
    return x.format == "coo" if isinstance(x, Sparse) else is_scipy(x)


def may_travel(x: Any) -> bool:
    """Whether rows of an array may travel, so that its sum has no plan."""
    return is_sparse(x) and math.prod(x.shape) >= LEAST // 16


def rows_of(x: Any) -> NDArray:
    """The numbers of the rows of a sparse array that may differ from 0, each once, in their order."""
    found: Any
    if is_torch(x):
        numbers: Any = x._indices()
        found = numbers[0].cpu()
    elif isinstance(x, Sparse):
        found = x.parts[0][0]
    else:
        one = x.tocoo()
        found = one.coords[0] if hasattr(one, "coords") else one.row
    return np.unique(np.asarray(found).astype(np.int64))


class Noted:
    """The rows of the sparse contributions of this rank, by leaf."""

    def __init__(self) -> None:
        self.rows: dict[int, list[NDArray]] = {}

    def note(self, i: int, leaf: Leaf, x: Any) -> None:
        """Note a gradient of leaf i, if it is sparse and large."""
        if is_sparse(x) and is_large(leaf):
            self.rows.setdefault(i, []).append(rows_of(x))

    def found(self, masks: Sequence[int]) -> dict[int, NDArray]:
        """The rows of each leaf whose contributions are all sparse. masks: the leaves of each one, as bits."""
        counts = {i: sum(mask >> i & 1 for mask in masks) for i in self.rows}
        return {i: reduce(np.union1d, every) for i, every in self.rows.items() if len(every) == counts[i]}


def is_large(leaf: Leaf) -> bool:
    """Whether rows of a leaf may travel."""
    return bool(leaf.shape) and leaf.size * itemsize(leaf.dtype) >= LEAST


def row_size(leaf: Leaf) -> int:
    """The elements of a row."""
    return leaf.size // leaf.shape[0]


def has_leaf(header: Header, i: int) -> bool:
    """Whether a rank has a contribution of leaf i."""
    return bool(int(header["has"], 16) >> i & 1) if "has" in header else header["terms"] > 0


def chosen(group: Group, layout: Layout, headers: Sequence[Header], options: Options) -> list[int]:
    """The leaves of which rows travel: the same on every rank."""
    if options.into == "shard" or len(headers) == 1 or not any(h.get("rows") for h in headers):
        return []
    made = []
    largest = getattr(group._engine, "largest", None)
    for k, segment in enumerate(layout.segments):
        packed = any(str(k) in h["sizes"] for h in headers)
        if packed or segment.wire in BLOCKED or segment.wire_out in BLOCKED:
            continue
        for i, _, _ in segment.places:
            counts = [n for h in headers if (n := rows_in(h, i)) is not None]
            if len(counts) < len(headers) or not any(str(i) in h.get("rows", ()) for h in headers):
                continue
            fits = largest is None or 8 * max(counts) <= largest
            few = 2 * travels(layout.leaves[i], at_most(layout.leaves[i], headers, i))
            if fits and few <= layout.leaves[i].size * segment.itemsize:
                made.append(i)
    return made


def at_most(leaf: Leaf, headers: Sequence[Header], i: int) -> int:
    """No more rows of leaf i than these differ from 0 on any rank."""
    return min(sum(rows_in(h, i) or 0 for h in headers), leaf.shape[0])


def rows_in(header: Header, i: int) -> int | None:
    """How many rows a rank has of leaf i; None: all."""
    found: int | None = header.get("rows", {}).get(str(i))
    return 0 if found is None and not has_leaf(header, i) else found


def travels(leaf: Leaf, rows: int) -> int:
    """The bytes of so many rows, the one that stands for all others, and their numbers."""
    return (rows + 1) * row_size(leaf) * itemsize(leaf.dtype) + 8 * rows


class Few:
    """A bucket of which leaves have the rows alone that any rank has."""

    def __init__(self, layout: Layout, rows: Mapping[int, NDArray], options: Options, ranks: int) -> None:
        self.whole, self.rows = layout, rows
        leaves = list(layout.leaves)
        self.taken: dict[int, NDArray] = {}  #: the rows, and one that no rank has, if there is one
        for i, mine in rows.items():
            absent = absent_row(mine, leaves[i].shape[0])
            self.taken[i] = mine if absent is None else np.append(mine, absent)
            leaves[i] = leaves[i]._replace(shape=(len(self.taken[i]), *leaves[i].shape[1:]))
        self.layout = options.layout(leaves, ranks)

    def taken_of(self, k: int, raw: NDArray) -> NDArray:
        """The rows of a flat array of segment k, as bytes of elements of any size."""
        segment, few = self.whole.segments[k], self.layout.segments[k]
        if not len(raw):
            return raw
        each = len(raw) // segment.size
        made = _core.message_new(each * few.size)
        for place, less in zip(segment.places, few.places, strict=True):
            into, came = made[each * less.start : each * less.stop], raw[each * place.start : each * place.stop]
            if place.leaf not in self.rows:
                into[:] = came
            elif less.stop > less.start:
                table = came.reshape(self.whole.leaves[place.leaf].shape[0], -1)
                taken = self.taken[place.leaf]
                np.take(table, taken, axis=0, out=into.reshape(len(taken), -1), mode="clip")
        return made

    def spread(self, k: int, raw: NDArray, out: NDArray | None) -> NDArray:
        """The whole sums of segment k, in `out`, if it is given, of those of its rows."""
        segment, few = self.whole.segments[k], self.layout.segments[k]
        each = segment.itemsize
        if out is None:
            out = _core.message_new(each * segment.size)
        for place, less in zip(segment.places, few.places, strict=True):
            into, came = out[each * place.start : each * place.stop], raw[each * less.start : each * less.stop]
            if place.leaf in self.rows:
                self.spread_leaf(place.leaf, came, into)
            else:
                into[:] = came
        return out

    def spread_leaf(self, i: int, raw: NDArray, out: NDArray) -> None:
        mine = self.rows[i]
        came, table = raw.reshape(len(self.taken[i]), -1), out.reshape(self.whole.leaves[i].shape[0], -1)
        if len(came) > len(mine):
            table[:] = came[-1]
        table[mine] = came[: len(mine)]


def absent_row(rows: NDArray, size: int) -> int | None:
    """The first row that is not among some, which are in their order; None: there is none."""
    if len(rows) == size:
        return None
    gaps = np.nonzero(rows != np.arange(len(rows)))[0]
    return int(gaps[0]) if len(gaps) else len(rows)


def exchanged(
    call: Call, leaves: Sequence[int], mine: Mapping[int, NDArray], headers: Sequence[Header]
) -> dict[int, NDArray]:
    """The rows of leaves that any rank has, by leaf. mine: those of this rank."""
    nothing: NDArray = np.empty(0, np.int64)
    rank = call.group.rank
    counts = [[rows_in(h, i) or 0 for i in leaves] for h in headers]
    own = np.concatenate([mine.get(i, nothing) for i in leaves])
    receives = [np.empty(sum(n) if r != rank else 0, np.int64) for r, n in enumerate(counts)]
    sends = [own if r != rank else nothing for r in range(len(headers))]
    call.start(
        "all_to_all", [x.view(np.uint8) for x in sends], [x.view(np.uint8) for x in receives], step="numbers of rows"
    )
    receives[rank] = own
    pieces = [np.split(x, np.cumsum(n)[:-1]) for x, n in zip(receives, counts, strict=True)]
    return {i: reduce(np.union1d, [of_rank[k] for of_rank in pieces]) for k, i in enumerate(leaves)}
