"""Sums that a rank has made before: with a plan of one no header travels, and a small one takes one exchange.

A plan is made of a sum of `add_n` that ended well, if each rank brought one array with elements, no weights and no
mean. So all ranks make it alike. It belongs to the group, has what does not change from call to call, and is found by
what the caller gives: type, dtype and shape of the array, and the options. Each rank forgets the least recently used
ones above PLANS; then it sends its header, and so do the others, who know no less for it (frames.py).

    size of the array                    what travels
    at most `frames.body_of(ranks)`      the array, to every rank: each folds all terms itself, in the same order
    more                                 a head without a body; then terms to owners, and the sum back (sums.py)

Both have the same bits, since a fold's result hangs on the terms of an element alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fanin import _core
from fanin._interop.classes import is_tensor
from fanin._interop.protocols import NDArray

from . import frames
from .frames import ALL, HEAD, HEAD_SIZE, PART, Head
from .layout import Layout, Leaf, as_tensor, digest, is_inexact, placed, typed
from .options import Options

if TYPE_CHECKING:
    from .group import Call, Group

__tracebackhide__ = True  # no frames of ours in reports of pytest

_ndarray = np.ndarray
PLANS = 64  #: how many a group keeps
FEW = 64 << 10  #: bytes of an exact sum for which `add_n` starts no threads, so that its own work counts


def name_of(x: Any, order: object, scale: object, into: object) -> tuple[object, ...] | None:
    """By what a plan is found; None: there is none for such options, or what is given is no array."""
    if scale is not None and (type(scale) not in (float, int) or not scale):  # -0.0 == 0.0, and True == 1
        return None
    try:
        name = type(x), x.dtype, x.shape, order, type(scale), scale, type(into), into
        hash(name)
    except (AttributeError, TypeError):
        return None
    return name


def find(group: Group, name: tuple[object, ...]) -> Plan | None:
    """The plan of that name, which is then the last to be forgotten."""
    plan: Plan | None = group._plans.pop(name, None)
    if plan is not None:
        group._plans[name] = plan
    return plan


def keep(group: Group, name: tuple[object, ...], leaf: Leaf, options: Options, flat: bool) -> None:
    """Keep the plan of a sum that ended well on every rank; flat: in one level."""
    group._plans[name] = Plan(leaf, options, flat)
    while len(group._plans) > PLANS:
        del group._plans[next(iter(group._plans))]


class Plan:
    """What does not change from one sum of one array a rank to the next."""

    def __init__(self, leaf: Leaf, options: Options, flat: bool) -> None:
        self.leaf, self.options, self.flat = leaf, options, flat
        self.sends: list[NDArray] = []  #: this rank's first messages; they and the rest are made when it is used

    def prepare(self, group: Group, x: Any) -> None:
        """Make the messages for arrays like `x`, and views of what the other ranks send."""
        leaf, options, rank = self.leaf, self.options, group.rank
        self.layout = Layout([leaf], group.size)
        (segment,) = self.layout.segments
        self.each = each = segment.itemsize
        total, shards = segment.size * each, segment.counts()
        self.natural = [slice(each * a, each * b) for a, b in pairwise(segment.bounds)]
        self.way = HEAD
        if total <= frames.whole_of(group.size):
            self.way = ALL
        elif self.flat and not group._alike and HEAD_SIZE + max(shards) <= group._room:
            self.way = PART
        self.tensor = is_tensor(x)
        self.step = {HEAD: "headers", ALL: "to all", PART: "to owners"}[self.way]
        bodies = {HEAD: [0], ALL: [total], PART: shards}[self.way]
        facts = "add_n", leaf, options.text, group.size, group._nodes_text
        head = Head(frames.PLAN, total, self.way, bytes.fromhex(digest(facts))).write()
        made = [np.frombuffer(head + bytes(n), np.uint8).copy() for n in bodies]
        sends = made if self.way == PART else made * group.size
        self.written = [x.data[:HEAD_SIZE] for x in made]
        self.sent = sum(map(len, sends)) - len(sends[rank])
        nodes = group._nodes
        self.between = sum(len(x) for x, node in zip(sends, nodes, strict=True) if node != nodes[rank])
        rows = list(group._receives())
        rows[rank] = sends[rank]
        self.mine = sends[rank].data[:HEAD_SIZE]
        self.heads = [row.data[:HEAD_SIZE] for row in rows]
        self.no_keys: list[int | None] = [None] * group.size
        self.gets = options.into in ("all", "shard", rank)
        low, high = segment.bounds[rank : rank + 2]
        if self.way == ALL and options.into != "shard":
            low, high = 0, segment.size
        self.size = each * (high - low)  #: bytes of what this rank sums
        at = HEAD_SIZE + (each * low if self.way == ALL else 0)
        self.terms = [typed(row[at : at + self.size], leaf.dtype) for row in rows] if self.way != HEAD else []
        self.shape = leaf.shape if options.into != "shard" else (high - low,)
        self.place = typed(sends[rank][HEAD_SIZE:], leaf.dtype).reshape(leaf.shape) if self.way == ALL else None
        #: Of arrays that are no tensors.
        self.dtype = self.place.dtype if type(self.place) is _ndarray else None
        self.exact = options.order == "exact" and is_inexact(leaf.dtype)
        how = {"scale": options.scale, "accumulate": "exact" if self.exact else options.accumulate}
        self.how: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
        self.sends = sends

    def put(self, x: Any) -> None:
        """Write this rank's term into its messages."""
        place = self.place
        if place is not None and type(x) is _ndarray is type(place) and x.dtype == place.dtype:
            place[...] = x
            return
        (flat,) = self.layout.flatten([x])
        if place is not None:
            self.sends[0][HEAD_SIZE:] = flat
            return
        for message, part in zip(self.sends, self.natural, strict=True):
            message[HEAD_SIZE:] = flat[part]

    def meet(self, call: Call, x: Any, key: int | None) -> list[int | None] | None:
        """Send the first messages of this sum, and return the keys of all ranks; None if some rank has another plan, or
        none.
        """
        if not self.sends:
            self.prepare(call.group, x)
        for head in self.written:
            frames.place(head, call.number, call.bucket, call.step, key)
        if self.way != HEAD:
            self.put(x)
        sizes = call.share(self.sends, self.sent, self.between, True)
        mine, keyed = self.mine.tobytes(), key is not None
        expected = len(self.sends[call.group.rank])
        for head, came in zip(self.heads, sizes, strict=True):
            if came < HEAD_SIZE:
                raise call.unreadable()
            if head != mine:
                if head[: frames.ALIKE] != mine[: frames.ALIKE]:
                    return None
                keyed = True
            if came < expected:
                raise call.unreadable()
        call.met(self.step, self.sends)
        return [frames.key_of(head) for head in self.heads] if keyed else self.no_keys

    def sum(self, call: Call, x: Any, places: Sequence[int] | None) -> Any:
        """The sum of all terms in an order of ranks, like `x`; None if another rank gets it."""
        if self.way == ALL:
            if not self.gets:
                return None
            raw = own = _core.message_new(self.size)
            terms = self.terms
        else:
            raw, own = self.memory(call.group.rank)
            terms = self.terms if self.way == PART else self.exchanged(call, x)
        if places is not None:
            terms = [terms[r] for r in places]
        if self.size:
            self.fold(terms, self.elements(own))
        if self.way != ALL:
            self.back(call, raw, own)
            if not self.gets:
                return None
        if self.tensor:
            return placed(as_tensor(raw, self.leaf.dtype, self.shape), x)
        made = self.elements(raw)
        return made if len(self.shape) == 1 else made.reshape(self.shape)

    def fold(self, terms: list[Any], out: Any) -> None:
        """Write the sum of terms to `out`."""
        few = self.exact and self.size <= FEW
        if not few or not _core.exact_into(terms, out, self.options.scale):
            _core.add_n(terms, out=out, **self.how)

    def elements(self, raw: NDArray) -> Any:
        """Bytes as an array of the leaf's dtype."""
        return typed(raw, self.leaf.dtype) if self.dtype is None else raw.view(self.dtype)

    def memory(self, rank: int) -> tuple[NDArray, NDArray]:
        """Memory for what this rank gets, and for its shard, as bytes."""
        if self.options.into not in ("all", rank):
            shard = _core.message_new(self.size)
            return shard, shard
        whole = _core.message_new(self.natural[-1].stop)
        return whole, whole[self.natural[rank]]

    def exchanged(self, call: Call, x: Any) -> list[Any]:
        """The terms of all ranks in this rank's shard, which travel."""
        rank, size = call.group.rank, call.group.size
        (flat,) = self.layout.flatten([x])
        sends = [flat[part] for part in self.natural]
        receives = [_core.message_new(self.size if r != rank else 0) for r in range(size)]
        mine, sends[rank] = sends[rank], receives[rank]
        if size > 1:
            call.start("all_to_all", sends, receives, step="to owners")
        receives[rank] = mine
        return [typed(raw, self.leaf.dtype) for raw in receives]

    def back(self, call: Call, whole: NDArray, own: NDArray) -> None:
        """Send the rounded shard to the ranks that get the sum."""
        into, rank, size = self.options.into, call.group.rank, call.group.size
        nothing = whole[:0]
        if into == "shard" or size == 1:
            return
        sends = [own if into == "all" or r == into else nothing for r in range(size)]
        receives = [whole[part] for part in self.natural] if self.gets else [nothing] * size
        sends[rank] = receives[rank] = nothing
        call.start("all_to_all", sends, receives, step="back")
