"""Sums that a rank has made before: with a plan of one no header travels, and a small one takes one exchange.

A plan is made of a sum of `add_n` that ended well, if each rank brought one array with elements, no weights and no
mean. So all ranks make it alike. It belongs to the group, has what does not change from call to call, and is found by
what the caller gives: type, dtype and shape of the array, and the options. Each rank forgets the least recently used
ones above PLANS; then it sends its header, and so do the others, who know no less for it (frames.py).

    size of the array                    what travels
    at most `frames.whole_of(ranks)`     the array, to every rank: each folds all terms itself, in the same order
      (of messages of one size: all
      for which they have room)
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
from .counters import sent_to
from .frames import ALL, HEAD, HEAD_SIZE, PART, Head
from .layout import Layout, Leaf, as_tensor, digest, is_inexact, placed
from .options import Options

if TYPE_CHECKING:
    from .group import Call, Group

__tracebackhide__ = True  # no frames of ours in reports of pytest

_ndarray = np.ndarray
PLANS = 256  #: how many a group keeps
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


def find(group: Group, name: tuple[object, ...]) -> Any:
    """The plan of that name, which is then the last to be forgotten; None: there is none."""
    plan = group._plans.pop(name, None)
    if plan is not None:
        group._plans[name] = plan
    return plan


def keep(group: Group, name: tuple[object, ...], leaf: Leaf, options: Options, flat: bool) -> None:
    """Keep the plan of a sum that ended well on every rank; flat: in one level."""
    facts = "add_n", leaf, options.text, group.size, group._nodes_text
    put(group, name, Plan(Layout([leaf], group.size), options, flat, facts))


def put(group: Group, name: tuple[object, ...], plan: Agreed) -> None:
    """Keep a plan, and forget the least recently used ones."""
    group._plans[name] = plan
    while len(group._plans) > PLANS:
        del group._plans[next(iter(group._plans))]


class Agreed(frames.Known):
    """What all ranks have agreed on once, so that the next call of its kind begins without headers."""

    way = HEAD

    def __init__(self, facts: tuple[object, ...]) -> None:
        self.facts = facts
        self.sends: list[NDArray] = []  #: this rank's first messages; they and the rest are made when it is used

    def prepare(self, group: Group) -> None:
        """Make the messages, and views of what the other ranks send."""
        self.open(group, 0, [0])

    def open(self, group: Group, body: int, bodies: Sequence[int]) -> list[NDArray]:
        """Make messages with bodies of so many bytes, one for all ranks or one for each; return where those of all
        ranks lie. body: the bytes of the term.
        """
        rank, nodes = group.rank, group._nodes
        self.step = {HEAD: "headers", ALL: "to all", PART: "to owners"}[self.way]
        head = Head(frames.PLAN, body, self.way, bytes.fromhex(digest(self.facts))).write()
        made = [np.frombuffer(head + bytes(n), np.uint8).copy() for n in bodies]
        sends = made if len(made) > 1 else made * group.size
        self.written = [x.data for x in made]
        self.length = max(map(len, made))
        self.sent = sum(map(len, sends)) - len(sends[rank])
        self.between = sum(len(x) for x, node in zip(sends, nodes, strict=True) if node != nodes[rank])
        rows = list(group._receives())
        rows[rank] = sends[rank]
        self.own, self.rows = sends[rank], rows
        self.no_keys: list[int | None] = [None] * group.size
        self.sends = sends
        return rows

    def put(self, x: Any) -> None:
        """Write this rank's term into its messages."""

    def meet(self, call: Call, x: Any = None, key: int | None = None) -> list[int | None] | None:
        """Send the first messages of this call, and return the keys of all ranks; None if some rank has not agreed on
        the same.
        """
        if not self.sends:
            self.prepare(call.group)
        after = call.expect(self, self.length) if call.group._padded else 0
        frames.place(self.written, call.step, call.number, call.bucket, self.length, after, key)
        if self.way != HEAD:
            self.put(x)
        sizes = call.share(self.sends, self.sent, self.between, True)
        found = _core.heads_compare(self.rows, sizes, self.own, HEAD_SIZE, frames.ALIKE)
        if found == frames.CUT_SHORT:
            raise call.unreadable()
        if found == frames.OTHER_PLAN:
            return None
        call.met(self.step, self.sends)
        return self.no_keys if key is None and found == frames.SAME else list(map(frames.key_of, self.rows))


class Plan(Agreed):
    """What does not change from one sum of one term a rank to the next. The layout has one segment."""

    def __init__(self, layout: Layout, options: Options, flat: bool, facts: tuple[object, ...]) -> None:
        super().__init__(facts)
        self.layout, self.options, self.flat = layout, options, flat
        (self.segment,) = layout.segments
        self.dtype = self.segment.dtype
        self.elements = self.segment.elements
        self.place: Any = None  #: where a term that is an array lies in the message

    def prepare(self, group: Group) -> None:
        options, segment, rank = self.options, self.segment, group.rank
        self.each = each = segment.itemsize
        total, shards = segment.size * each, segment.counts()
        self.natural = [slice(each * a, each * b) for a, b in pairwise(segment.bounds)]
        self.way = HEAD
        # A message of one size takes longer than a copy of all that there is room for.
        whole = group._room - HEAD_SIZE if group._padded else frames.whole_of(group.size)
        if total <= whole:
            self.way = ALL
        elif self.flat and not group._alike and HEAD_SIZE + max(shards) <= group._room:
            self.way = PART
        largest = getattr(group._engine, "largest", None)
        too_large = largest is not None and max(shards) > largest
        #: `Sum` makes it: it refuses messages that are too large, or it has two levels.
        self.is_general = self.way == HEAD and (too_large or not self.flat)
        low, high = segment.bounds[rank : rank + 2]
        if self.way == ALL and options.into != "shard":
            low, high = 0, segment.size
        self.gets = options.into in ("all", "shard", rank)
        self.size = each * (high - low)  #: bytes of what this rank sums
        self.receives = [self.size if r != rank else 0 for r in range(group.size)]
        self.to_owners = sent_to(shards, rank, group._nodes)
        self.to_all = sent_to([self.size * (options.into in ("all", r)) for r in range(group.size)], rank, group._nodes)
        self.nothing = np.empty(0, np.uint8)
        self.exact = options.order == "exact" and is_inexact(self.dtype)
        self.accumulate = "exact" if self.exact else options.accumulate
        rows = self.open(group, total, {HEAD: [0], ALL: [total], PART: shards}[self.way])
        self.body = self.own[HEAD_SIZE:]
        at = HEAD_SIZE + (each * low if self.way == ALL else 0)
        self.terms = [self.elements(row[at : at + self.size]) for row in rows] if self.way != HEAD else []
        if len(self.layout.leaves) == 1:
            shape = self.layout.leaves[0].shape
            self.shape = shape if options.into != "shard" else (high - low,)
            if self.way == ALL:
                self.place = self.elements(self.body).reshape(shape)

    def flats(self, x: Any) -> list[NDArray]:
        """A term as bytes."""
        return self.layout.flatten([x])

    def put(self, x: Any) -> None:
        place = self.place
        if type(x) is _ndarray is type(place) and x.dtype == place.dtype:
            place[...] = x
            return
        (flat,) = self.flats(x)
        if self.way == ALL:
            self.body[...] = flat
            return
        for message, part in zip(self.sends, self.natural, strict=True):
            message[HEAD_SIZE:] = flat[part]

    def sum(self, call: Call, x: Any, places: Sequence[int] | None, whole: NDArray | None = None) -> NDArray | None:
        """The sum of all terms in an order of ranks, as bytes; None if another rank gets it. whole: where it is made,
        if this rank gets the whole.
        """
        if self.way == ALL:
            if not self.gets:
                return None
            raw = _core.message_new(self.size) if whole is None else whole
            self.fold(self.terms, places, raw)
            return raw
        raw, own = self.memory(call.group.rank, whole)
        terms = self.terms if self.way == PART else self.exchanged(call, x)
        self.fold(terms, places, own)
        self.back(call, raw, own)
        return raw if self.gets else None

    def like(self, raw: NDArray, x: Any) -> Any:
        """A sum of arrays like one of them."""
        if is_tensor(x):
            return placed(as_tensor(raw, self.dtype, self.shape), x)
        made = self.elements(raw)
        return made if len(self.shape) == 1 else made.reshape(self.shape)

    def fold(self, terms: list[Any], places: Sequence[int] | None, raw: NDArray) -> None:
        """Write the sum of terms, in the order of `places`, to `raw`."""
        if not self.size:
            return
        if places is not None:
            terms = [terms[r] for r in places]
        out = self.elements(raw)
        few = self.exact and self.size <= FEW
        if not few or not _core.exact_into(terms, out, self.options.scale):
            _core.add_n(terms, out=out, scale=self.options.scale, accumulate=self.accumulate)

    def memory(self, rank: int, whole: NDArray | None) -> tuple[NDArray, NDArray]:
        """Memory for what this rank gets, and for its shard, as bytes."""
        if self.options.into not in ("all", rank):
            shard = _core.message_new(self.size)
            return shard, shard
        if whole is None:
            whole = _core.message_new(self.natural[-1].stop)
        return whole, whole[self.natural[rank]]

    def exchanged(self, call: Call, x: Any) -> list[Any]:
        """The terms of all ranks in this rank's shard, which travel."""
        rank = call.group.rank
        (flat,) = self.flats(x)
        sends = [flat[part] for part in self.natural]
        mine, sends[rank] = sends[rank], self.nothing
        receives = [_core.message_new(n) if n else self.nothing for n in self.receives]
        if len(sends) > 1:
            call.start("all_to_all", sends, receives, step="to owners", sent=self.to_owners)
        receives[rank] = mine
        return [self.elements(raw) for raw in receives]

    def back(self, call: Call, whole: NDArray, own: NDArray) -> None:
        """Send the rounded shard to the ranks that get the sum."""
        into, rank, size = self.options.into, call.group.rank, call.group.size
        if into == "shard" or size == 1:
            return
        sends = [own if n else self.nothing for n in self.to_all.sizes]
        receives = [whole[part] for part in self.natural] if self.gets else [self.nothing] * size
        receives[rank] = self.nothing
        call.start("all_to_all", sends, receives, step="back", sent=self.to_all)
