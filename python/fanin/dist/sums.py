"""The sum over ranks of one bucket: each rank sends each owner its part, the owner adds, rounds once, and answers.

    order    what a rank sends to an owner                          what the owner does
    key      its contributions, in their dtype (N2)                 the left fold in the order of keys
    exact    its one contribution, or the exact partial sum of      adds them exactly
             several, packed (N3)
    rank     the fold of its contributions, in the accumulation     the left fold in the order of ranks
             dtype (N4)

Integers and bool are sums of every order alike; they are folded by rank for "exact".

A sum goes through a list of levels (`layout.levels_of`): one, in which every rank sends to every owner; or two where
nodes hold several ranks. With "exact" the ranks of a node sum their terms exactly in the first one; in the second one
the owners sum the nodes' sums, and round. With "key" and "rank" one rank of a node gets the terms in the first one, and
the fold runs from node to node in the second one (`chain`). The results travel back through the same levels. Headers
travel from every rank to every rank, so that all name the same rank in an error.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from fanin import _core
from fanin._checks import flag, sequence
from fanin._interop.arrays import object_text
from fanin._interop.protocols import DTypeLike, NDArray
from fanin._weights import Kind, Weight, exact_sum, kind_of, parts_of, weight_of
from fanin._words import names_nearest, type_of
from fanin.partial import Partial

from . import device_sums, plans, sparse
from .chain import Chain, nodes_in_order
from .group import Call, Group, Header, TimeLimit
from .group import group as group_of
from .layout import (
    Layout,
    Leaf,
    Level,
    Runs,
    Segment,
    accumulation,
    digest,
    example_of,
    is_inexact,
    itemsize,
    leaf_of,
    like_of,
    typed,
)
from .options import Into, Options, Order
from .products import check_products, products, weighing_of, wide_dtype, window_parts
from .wire import names_of, returned_codec, sent_codec, shard_sizes, sum_dtype

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass
class Term:
    """One contribution of this rank to all leaves of a bucket."""

    flats: list[NDArray]  #: bytes, for each segment
    key: int | None = None
    weight: Weight | None = None  #: None: 1, the plain term


@dataclass
class Counted:
    """What the contributions of this rank weigh, for the divisor of a mean."""

    weights: list[Weight | None] = field(default_factory=list)  #: None: 1, and none was given

    def add(self, weight: Weight | None) -> None:
        self.weights.append(weight)

    def clear(self) -> None:
        self.weights.clear()

    def kind(self) -> Kind:
        """Whether all that were given are integers."""
        return kind_of(w for w in self.weights if w is not None)

    def total(self) -> Fraction:
        """The sum of all."""
        return exact_sum([1 if w is None else w for w in self.weights])


#: Numbers of a window: it stays near the core while it is filled and packed, or merged and rounded; and its 1 MiB are
#: reused by the next one (D26).
CHUNK = 1 << 17

#: Bytes of a number in the largest message: no fewer than those of a superaccumulator of float64.
ROOM = 320

NOTHING: NDArray = np.empty(0, np.uint8)


def levels_for(
    group: Group, segment: Segment, options: Options, headers: Sequence[Header] | None = None
) -> tuple[Level, ...]:
    """The levels of a sum: the same on every rank. One, too, if a message between nodes may be too large, or if two
    nodes alternate in the order of a fold, as headers of all ranks say; without them a fold may have two.
    """
    levels, largest = group._levels, getattr(group._engine, "largest", None)
    if len(levels) == 1:
        return levels
    folds = is_inexact(segment.dtype) and options.order != "exact"
    if folds and headers is not None and chain_of(group, options, headers) is None:
        return group._flat
    if largest is not None:
        numbers = segment.counts("complex64" if segment.dtype.startswith("complex") else "float32")
        held = max(sum(numbers[o] for o in owners) for owners in levels[0].shards) // 4
        each = 2 * itemsize("float64") * max(h["terms"] for h in headers) if folds and headers else ROOM
        return levels if each * held <= largest else group._flat
    return levels


def chain_of(group: Group, options: Options, headers: Sequence[Header]) -> tuple[int, ...] | None:
    """The nodes in the order in which a fold runs through them; None if two of them alternate, or an option asks for
    another dtype than that of the sum.
    """
    counts = [h["terms"] for h in headers]
    if options.accumulate is not None:
        return None
    terms = [(rank, rank) for rank, n in enumerate(counts) if n]
    if order_of(options, counts) == "key":
        ranks = [rank for rank, n in enumerate(counts) for _ in range(n)]
        keys = [key for h in headers for key in h["keys"]]
        terms = list(zip(range(len(ranks)) if None in keys else keys, ranks, strict=True))
    return nodes_in_order(group.nodes, terms)


class ExactSum:
    """The exact sum of this rank's contributions to a segment, in windows of CHUNK numbers of each owner's shard.

    Contributions and messages of other ranks wait, and are added to a window when it is used; `settle` adds
    contributions at once. From the first contribution with a weight on, the windows are wide: of float64, whose numbers
    hold each product exactly.
    """

    def __init__(self, segment: Segment, waiting: Iterable[tuple[NDArray, Weight | None]] = ()) -> None:
        self.segment = segment
        self.wide = False
        self.waiting: list[tuple[NDArray, Weight | None]] = []  #: contributions of this rank, and their weights
        for raw, weight in waiting:
            self.wait(raw, weight)
        self.shards: list[dict[int, NDArray]] = []  #: contributions of other ranks, each as bytes of shards by owner
        self.packed: list[NDArray] = []  #: packed sums of other ranks ..
        self.wide_packed: list[NDArray] = []  #: .. and wide ones
        self.kept: dict[int, object] = {}  #: windows by their first element
        self.kept_narrow: set[int] = set()  #: those that are not wide

    def wait(self, raw: NDArray, weight: Weight | None) -> None:
        """Add a contribution, later; ValueError for a product that no exact sum has."""
        codec = sent_codec(self.segment)
        if codec is not None:
            raw = codec.rounded(raw, self.segment.dtype)
        if weight is not None:
            check_products("Reducer", typed(raw, self.segment.dtype), weight, self.segment.dtype)
            self.wide = True
        self.waiting.append((raw, weight))

    def settle(self) -> None:
        """Add the contributions that wait."""
        for owner in range(len(self.segment.bounds) - 1):
            self.keep(owner)
        self.end()

    def keep(self, owner: int) -> None:
        """Add what waits to the windows of an owner's shard."""
        for start, _, window in self.windows(owner):
            self.kept[start] = window
            self.kept_narrow.discard(start)
            if not self.wide:
                self.kept_narrow.add(start)

    def end(self) -> None:
        """Nothing waits any more; ValueError if messages were not read to their ends."""
        if any(map(len, (*self.packed, *self.wide_packed))):
            raise ValueError("not a message of exact sums: bytes follow its last block")
        self.waiting, self.shards, self.packed, self.wide_packed = [], [], [], []

    def windows(self, owner: int) -> Iterator[tuple[int, int, object]]:
        """The windows of an owner's shard, each with its elements [start, stop); once, as they get what waits. Packed
        sums are read in the order of their shards.
        """
        dtype = self.segment.dtype
        low, high = self.segment.bounds[owner : owner + 2]
        terms = [(typed(raw, dtype)[low:high], weight) for raw, weight in self.waiting]
        terms += [(typed(shards[owner], dtype), None) for shards in self.shards]
        chunk = CHUNK // 2 if dtype.startswith("complex") else CHUNK
        for start in range(low, high, chunk):
            stop = min(high, start + chunk)
            narrow = not self.wide or start in self.kept_narrow or (bool(self.packed) and start not in self.kept)
            window = self.kept.pop(start, None) or _core.window_new(
                dtype if narrow else wide_dtype(dtype), stop - start
            )
            if narrow:
                merge(window, self.packed)
                if self.wide:
                    window = _core.window_wide(window)
            elif self.packed:
                other = _core.window_new(dtype, stop - start)
                merge(other, self.packed)
                add_window(window, _core.window_wide(other))
            merge(window, self.wide_packed)
            pieces = [(x[start - low : stop - low], weight) for x, weight in terms]
            _core.window_add(window, tuple(x for x, weight in pieces if weight is None))
            for x, weight in pieces:
                if weight is not None:
                    _core.window_add(window, tuple(products(x, weight, dtype)))
            yield start, stop, window

    def pack(self, level: Level, rank: int, received: bool = False) -> list[NDArray]:
        """The messages to the ranks of a level's team, each the windows of its shards, padded to multiples of 8; none
        to this rank. received: after a level before; then the windows of this rank get what waits, and nothing waits.
        """
        bounds = self.segment.bounds
        ends, at = [0], 0
        away = [o for to, owners in zip(level.team, level.shards, strict=True) if to != rank for o in owners]
        raw = _core.message_new(9 * sum(bounds[o + 1] - bounds[o] for o in away))
        for to, owners in zip(level.team, level.shards, strict=True):
            if to == rank and received:
                for owner in owners:
                    self.keep(owner)
            for owner in owners if to != rank else ():
                for _, _, window in self.windows(owner):
                    room = at + _core.window_room(window)
                    if room + 8 > len(raw):
                        more = _core.message_new(2 * room + 8)
                        more[:at] = raw[:at]
                        raw = more
                    at += _core.window_pack(window, raw[at:])
                    at += -at % 8
            ends.append(at)
        if received:
            self.end()
        return [raw[a:b] for a, b in itertools.pairwise(ends)]


class Fold:
    """The left fold of this rank's contributions to a segment, in the dtype of the sum: a running sum with the bits of
    a fold of all of them at once.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self.dtype = segment, accumulation(segment.dtype)
        self.total: NDArray | None = None  #: bytes
        self.count = 0  #: the contributions in it

    def add(self, raws: Sequence[NDArray], weights: Sequence[Weight | None]) -> bool:
        """Add contributions, of which the first fold takes two or more; return whether the memory of the first one is
        now the fold's.
        """
        takes = self.total is None and self.dtype == self.segment.dtype
        terms = [typed(raw, self.segment.dtype) for raw in raws]
        total = self.total
        if total is None:
            total = raws[0] if takes else _core.message_new(self.segment.size * itemsize(self.dtype))
        else:
            terms, weights = [typed(total, self.dtype), *terms], [None, *weights]
        self.count += len(raws)
        if len(total):
            _core.add_n(terms, out=typed(total, self.dtype), **weighing_of(weights))
        self.total = total
        return takes


def folds(order: Order | None, segment: Segment) -> bool:
    """Whether a rank folds its contributions to a segment, if it has several: None is "rank" then."""
    return order != "key" and not (order == "exact" and is_inexact(segment.dtype))


def merge(window: object, messages: list[NDArray]) -> None:
    """Add the packed sums at the begins of messages, which become what follows."""
    for k, message in enumerate(messages):
        used = _core.window_merge_packed(window, message)
        messages[k] = message[used + -used % 8 :]


def add_window(window: object, other: object) -> None:
    """Add a window of the same dtype and size."""
    message = _core.message_new(_core.window_room(other))
    merge(window, [message[: _core.window_pack(other, message)]])


@dataclass
class Sent:
    """The messages of this rank in the first level, made before headers are exchanged."""

    terms: list[Term]
    #: For each segment of which several terms are summed exactly: this rank's sum, and its messages.
    packed: dict[int, tuple[ExactSum, list[NDArray]]] = field(default_factory=dict)
    #: What travels of weights; None: no weight was given, and there is no mean.
    weigh: Header | None = None
    #: For each segment whose terms were folded as they came: the fold.
    folded: dict[int, Fold] = field(default_factory=dict)
    #: For each leaf all of whose terms are sparse: the rows that they have.
    rows: Mapping[int, NDArray] = field(default_factory=dict)

    @property
    def header(self) -> Header:
        made: Header = {
            "terms": len(self.terms),
            "keys": [t.key for t in self.terms],
            "sizes": {str(i): [len(m) for m in messages] for i, (_, messages) in self.packed.items()},
        }
        if self.rows:
            made["rows"] = {str(i): len(rows) for i, rows in self.rows.items()}
        return made if self.weigh is None else {**made, "weigh": self.weigh}


class Counts(Protocol):
    """What the contributions of a rank weigh."""

    def kind(self) -> Kind:
        """Whether all weights that were given are integers."""

    def total(self) -> Fraction:
        """The sum of all."""


def weighed(terms: Sequence[Term], counts: Counts, options: Options, partials: dict[int, ExactSum]) -> Header | None:
    """`Sent.weigh`: the weights of this rank's terms, whether all that it gave are integers, what it counts, and which
    segments it sends as wide windows.
    """
    kind = counts.kind()
    if kind == "none" and not options.mean:
        return None
    weights = [term.weight for term in terms]
    given = weights if any(w is not None for w in weights) else None
    return {
        "terms": given,
        "kind": kind,
        "sum": str(counts.total()),
        "wide": [i for i, one in partials.items() if one.wide],
    }


def divisor_of(call: Call, headers: Sequence[Header], options: Options) -> Fraction | None:
    """The exact sum of all ranks' weights, of a mean; None: there is none. An error on every rank if ranks give other
    kinds of weights, or that is 0.
    """
    found = [(r, h["weigh"]) for r, h in enumerate(headers) if "weigh" in h]
    given = [(r, weigh["kind"]) for r, weigh in found if weigh["kind"] != "none"]
    for r, kind in given:
        first, expected = given[0]
        if kind != expected:
            raise call.refuse(
                f"rank {r} gives {_KINDS[kind]} as weights and rank {first} {_KINDS[expected]}: expected one kind, as"
                " weight=float(n) on every rank",
                r,
            )
    if not options.mean:
        return None
    divisor = sum((Fraction(weigh["sum"]) for _, weigh in found), Fraction(0))
    if divisor == 0:
        raise call.no_divisor("the weights of all ranks sum to 0, and mean=True divides by that: no rank gets a mean")
    return divisor


_KINDS = {"integer": "integers", "float": "floats"}


def packed(group: Group, layout: Layout, options: Options, partials: dict[int, ExactSum]) -> dict[int, Any]:
    """`Sent.packed` of exact sums, by segment."""
    return {
        i: (one, one.pack(levels_for(group, layout.segments[i], options)[0], group.rank)) for i, one in partials.items()
    }


def check_weights(layout: Layout, weights: Iterable[Weight | None], call: str = "add_n") -> None:
    """Raise if a weight does not fit a dtype, before headers."""
    given = [w for w in weights if w is not None]
    for segment in layout.segments if given else ():
        one = typed(np.zeros(segment.itemsize, np.uint8), segment.dtype)
        for weight in given:
            try:
                _core.add_n([one], weights=[weight])
            except (TypeError, ValueError) as e:
                raise type(e)(f"{call}: {str(e).removeprefix('add_n: ').removeprefix('slot 0: ')}") from None


def must_pack(terms: Sequence[Term], segment: Segment, options: Options, group: Group) -> bool:
    """Whether this rank sends its exact sum packed: of several contributions, or where a rank of its node could not
    send a product on.
    """
    if len(terms) != 1:
        return len(terms) > 1
    return terms[0].weight is not None and len(levels_for(group, segment, options)) > 1


def prepare(layout: Layout, terms: list[Term], options: Options, group: Group, counted: Counted | None = None) -> Sent:
    """Everything that does not depend on other ranks. counted: what this rank counts; None: its terms alone."""
    if counted is None:
        counted = Counted([t.weight for t in terms])
    options.check_dtypes(layout)
    check_weights(layout, [t.weight for t in terms])
    partials = {
        i: ExactSum(segment, [(t.flats[i], t.weight) for t in terms])
        for i, segment in enumerate(layout.segments if options.order == "exact" else ())
        if is_inexact(segment.dtype) and must_pack(terms, segment, options, group)
    }
    weigh = weighed(terms, counted, options, partials)
    return Sent(terms, packed(group, layout, options, partials), weigh)


def order_of(options: Options, counts: Sequence[int]) -> Order:
    """The order of a sum to which each rank brings so many contributions."""
    return options.order or ("key" if max(counts) <= 1 else "rank")


def keys_of_ranks(call: Call, keys: Sequence[Sequence[int | None]]) -> list[list[int]]:
    """The keys of each rank's contributions; by default their places, those of rank 0 first. An error on every rank if
    some have a key and others none, or two have the same.
    """
    made: list[list[int]] = [[] for _ in keys]
    given = [(r, k) for r, mine in enumerate(keys) for k in mine]
    owner: dict[int, int] = {}
    for place, (r, k) in enumerate(given):
        first, other = given[0]
        if (k is None) != (other is None):
            gives, none = (r, first) if other is None else (first, r)
            raise call.refuse(
                f"rank {gives} gives keys and rank {none} gives none: expected keys on all ranks or none", r
            )
        number = place if k is None else k
        if number in owner:
            raise call.refuse(
                f"key {number} of rank {r} was given by rank {owner[number]} before: expected each key once", r
            )
        owner[number] = r
        made[r].append(number)
    return made


class Sum:
    """The sum of one bucket, once headers are agreed. places: bytes in which whole sums of segments are made."""

    def __init__(
        self,
        call: Call,
        layout: Layout,
        sent: Sent,
        headers: list[Header],
        options: Options,
        places: Mapping[int, NDArray] | None = None,
    ) -> None:
        self.places = places or {}
        self.call, self.layout, self.sent, self.headers, self.options = call, layout, sent, headers, options
        self.rank, self.size = call.group.rank, call.group.size
        self.counts: list[int] = [h["terms"] for h in headers]
        self.order: Order = order_of(options, self.counts)
        self.divisor = divisor_of(call, headers, options)
        #: Of each rank's terms.
        self.weights = [
            h.get("weigh", {}).get("terms") or [None] * n for h, n in zip(headers, self.counts, strict=True)
        ]
        self.keys: list[list[int]] = [[] for _ in headers]
        if self.order == "key":
            self.keys = keys_of_ranks(call, [h["keys"] for h in headers])

    def run(self) -> list[NDArray]:
        """For each segment the bytes of the whole sum, or of this rank's shard; nothing if another rank gets them."""
        return [self.segment(i, s) for i, s in enumerate(self.layout.segments)]

    def segment(self, i: int, segment: Segment) -> NDArray:
        into, back = self.options.into, returned_codec(segment)
        shards = shard_sizes(segment, back)
        if self.size > 1 and into != "shard":
            self.check_size(shards)
        natural = Runs(range(self.size), shards)
        whole = self.places.get(i)
        if whole is None:
            whole = _core.message_new(sum(shards) if into in ("all", self.rank) else shards[self.rank])
        own = whole[natural[self.rank]] if into in ("all", self.rank) else whole
        if back is None:
            self.add(i, segment, typed(own, segment.dtype))
        elif back.is_array:
            self.add(i, segment, typed(own, back.dtype))
        else:
            rounded = _core.message_new(segment.counts()[self.rank])
            self.add(i, segment, typed(rounded, segment.dtype))
            back.encode(rounded, segment.dtype, self.rank, own)
        levels = levels_for(self.call.group, segment, self.options, self.headers)
        if into == "all":
            for level, step in zip(reversed(levels), ("back", "back in node"), strict=False):
                self.back(level, whole, natural, step)
        elif into != "shard":
            every = {r: whole[natural[r]] for r in range(self.size)} if self.rank == into else {}
            self.travel({} if self.rank == into else {into: own}, every, "back")
        if back is None or into not in ("all", "shard", self.rank):
            return whole
        return back.widened(whole, [self.rank] if into == "shard" else range(self.size), segment.dtype)

    def add(self, i: int, segment: Segment, own: Any) -> None:
        """Write the sum of this rank's shard into `own`."""
        levels = levels_for(self.call.group, segment, self.options, self.headers)
        packs = len(levels) > 1 or any(str(i) in h["sizes"] for h in self.headers)
        if is_inexact(segment.dtype) and self.order == "exact" and packs:
            self.exact(i, segment, own, levels)
        else:
            self.fold(i, segment, own, levels)

    def travel(self, sends: dict[int, NDArray], receives: dict[int, NDArray], step: str) -> None:
        """Send arrays to ranks, and fill arrays from ranks; those of this rank itself are left out."""
        if self.size > 1:
            both = [
                [x.get(r, NOTHING) if r != self.rank else NOTHING for r in range(self.size)] for x in (sends, receives)
            ]
            self.call.start("all_to_all", *both, step=step)

    def back(self, level: Level, whole: NDArray, natural: Runs, step: str) -> None:
        """Send the shards of this rank to its team, and get theirs, in `whole`."""
        mine = natural.take(whole, level.shards[level.team.index(self.rank)])
        receives, spread = {}, []
        for r, owners in zip(level.team, level.shards, strict=True):
            place = natural.run(whole, owners)
            if place is None and r != self.rank:
                place = _core.message_new(sum(natural[o].stop - natural[o].start for o in owners))
                spread.append((owners, place))
            receives[r] = NOTHING if place is None else place
        self.travel(dict.fromkeys(level.team, mine), receives, step)
        for owners, got in spread:
            at = 0
            for o in owners:
                n = natural[o].stop - natural[o].start
                whole[natural[o]] = got[at : at + n]
                at += n

    def check_size(self, messages: Iterable[int]) -> None:
        """Raise an error on every rank if the engine has no message of so many bytes."""
        largest, n = getattr(self.call.group._engine, "largest", None), max(messages)
        if largest is not None and n > largest:
            raise self.call.refuse(
                f"{n} bytes in one message: {self.call.group.name} has at most {largest}; use smaller buckets"
                " (bucket_bytes=), or MPI 4"
            )

    def exact(self, i: int, segment: Segment, own: Any, levels: Sequence[Level]) -> None:
        """A rank with several contributions has packed their sum; a rank with one sends it as it is. Between nodes the
        sums of nodes travel packed.
        """
        codec = sent_codec(segment)
        flats, shards = [t.flats[i] for t in self.sent.terms], shard_sizes(segment, codec)
        natural, level = Runs(range(self.size), shards), levels[0]
        sizes: list[list[int] | None] = [h["sizes"].get(str(i)) for h in self.headers]
        brings = [h["terms"] > 0 for h in self.headers]
        self.check_size(
            itertools.chain((sum(shards[o] for o in owners) for owners in level.shards), *filter(None, sizes))
        )
        if i in self.sent.packed:
            partial, messages = self.sent.packed[i]
        else:
            weight = self.weights[self.rank][0] if flats else None
            if codec is not None:
                flats = [codec.encoded(flat, segment.dtype) for flat in flats]
            wait = weight is None and codec is None
            partial = ExactSum(segment, [(flat, None) for flat in flats] if wait else [])
            messages = [
                natural.take(flats[0], owners) if flats and r != self.rank else NOTHING
                for r, owners in zip(level.team, level.shards, strict=True)
            ]
        me = level.team.index(self.rank)
        plain = sum(shards[o] for o in level.shards[me])
        room = {r: n[me] if (n := sizes[r]) else plain for r in level.team if brings[r]}
        packed = [n is not None for n in sizes]
        wide = [i in h.get("weigh", {}).get("wide", ()) for h in self.headers]
        weighted = any(w is not None for weights in self.weights for w in weights)
        partial.wide = weighted
        #: Terms with weights that came as they are, as bytes of this rank's shard, by rank.
        alone: dict[int, NDArray] = {}
        if i not in self.sent.packed and flats and weight is not None:
            alone[self.rank] = natural.take(flats[0], [self.rank])
        elif i not in self.sent.packed and flats and codec is not None:
            partial.shards.append({o: codec.shard(flats[0][natural[o]], o, segment.dtype) for o in level.shards[me]})
        for level in levels:
            if level is not levels[0]:
                messages = partial.pack(level, self.rank, received=True)
                packed, brings = [True] * self.size, self.of_nodes(brings)
                wide = [weighted] * self.size
                # The sizes of the messages are known after the level before, so headers do not have them.
                each = [(r, m) for r, m in zip(level.team, messages, strict=True) if brings[self.rank] and len(m)]
                sizes_out = {r: np.array([len(m)], "<i8").view(np.uint8) for r, m in each}
                sizes_in = {r: np.zeros(8, np.uint8) for r in level.team if brings[r] and shards[self.rank]}
                self.travel(sizes_out, sizes_in, "sizes")
                room = {r: int(n.view("<i8")[0]) for r, n in sizes_in.items()}
            receives = {r: _core.message_new(n if r != self.rank else 0) for r, n in room.items()}
            sends = dict(zip(level.team, messages, strict=True)) if brings[self.rank] else {}
            self.travel(sends, receives, "to owners" if level is levels[-1] else "to node")
            owners = level.shards[level.team.index(self.rank)]
            there = Runs(owners, shards)
            for r, got in receives.items():
                if len(got) and packed[r]:
                    (partial.wide_packed if wide[r] else partial.packed).append(got)
                elif len(got) and self.weights[r][0] is not None:
                    alone[r] = got
                elif len(got):
                    pieces = {o: got[there[o]] for o in owners}
                    if codec is not None:
                        pieces = {o: codec.shard(raw, o, segment.dtype) for o, raw in pieces.items()}
                    partial.shards.append(pieces)
        low = segment.bounds[self.rank]
        if codec is not None:
            alone = {r: codec.shard(raw, self.rank, segment.dtype) for r, raw in alone.items()}
        terms = [(typed(raw, segment.dtype), self.weights[r][0]) for r, raw in alone.items()]
        for start, stop, window in partial.windows(self.rank):
            out, scale = own[start - low : stop - low], self.options.scale
            if not terms and self.parts is None:
                _core.window_round(window, out, scale)
                continue
            if not weighted:
                window = _core.window_wide(window)
            ours = window_parts(window, stop - start, segment.dtype)
            every = [*ours, *(x[start - low : stop - low] for x, _ in terms)]
            weights = [*([None] * len(ours)), *(w for _, w in terms)]
            self.rounded(every, weights, out, scale, "exact")
        partial.end()

    def rounded(
        self, terms: Sequence[Any], weights: Sequence[Weight | None], out: Any, scale: Any, accumulate: str | None
    ) -> None:
        """The sum of terms times their weights, or the mean, rounded once into `out`."""
        if self.parts is None:
            _core.add_n(terms, out=out, scale=scale, accumulate=accumulate, **weighing_of(weights))
        else:
            _core.add_n_over(terms, out, accumulate, scale, weights, self.parts)

    @property
    def parts(self) -> tuple[float, ...] | None:
        """The divisor, as floats whose sum it is."""
        return None if self.divisor is None else parts_of(self.divisor)

    def of_nodes(self, brings: Sequence[bool]) -> list[bool]:
        """For each rank whether any rank of its node brings something."""
        nodes = self.call.group.nodes
        busy = {node for node, one in zip(nodes, brings, strict=True) if one}
        return [node in busy for node in nodes]

    def fold(self, i: int, segment: Segment, own: Any, levels: Sequence[Level]) -> None:
        counts, weights, flats = self.counts, self.weights, [t.flats[i] for t in self.sent.terms]
        folded = self.order != "key" and max(counts) > 1
        dtype = accumulation(segment.dtype) if folded else segment.dtype
        if folded:
            fold = self.sent.folded.get(i)
            if fold is None or fold.total is None:
                flats = added(flats, segment.dtype, dtype, weights[self.rank])
            else:
                flats = [fold.total]
            counts = [min(n, 1) for n in counts]
            weights = [[None] * n for n in counts]
        codec = sent_codec(segment)
        shards = shard_sizes(segment, codec, dtype)
        if codec is not None:
            flats = [codec.encoded(f, dtype) for f in flats]
        there = Runs(range(self.size), shards)
        self.check_size(max(counts) * sum(shards[o] for o in owners) for owners in levels[0].shards)
        runs_on = len(levels) > 1 and self.order != "exact" and is_inexact(segment.dtype)
        if runs_on:
            raws = self.gathered(levels[0], "to node", flats, there, shards, counts)
            self.chained(segment, own, levels, raws, weights, dtype)
            return
        for level in levels:
            step = "to owners" if level is levels[-1] else "to node"
            raws = self.gathered(level, step, flats, there, shards, counts)
            if level is not levels[-1]:  # integers, whose sum is the same in any order
                each = list(itertools.chain.from_iterable(weights[r] for r in level.team))
                flats, there = added(raws, dtype, dtype, each), Runs(level.owners(self.rank), shards)
                counts = [int(one) for one in self.of_nodes([n > 0 for n in counts])]
                weights = [[None] * n for n in counts]
        if not len(own):
            return
        terms = [typed(raw, dtype) if codec is None else codec.term(raw, self.rank, dtype) for raw in raws]
        each, places = self.in_order(segment, levels[-1], weights)
        exact = self.order == "exact" and is_inexact(segment.dtype)
        accumulate = "exact" if exact else sum_dtype(codec, dtype, self.options.accumulate)
        self.rounded([terms[k] for k in places], each, own, self.options.scale, accumulate)

    def gathered(
        self,
        level: Level,
        step: str,
        flats: Sequence[NDArray],
        there: Runs,
        shards: Sequence[int],
        counts: Sequence[int],
    ) -> list[NDArray]:
        """The terms of a level's team, of which each rank sends this one the shards of its owners."""
        mine = sum(shards[owner] for owner in level.owners(self.rank))
        sends = {}
        for r, theirs in zip(level.team, level.shards, strict=True):
            pieces = [there.take(f, theirs) for f in flats]
            sends[r] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else NOTHING
        receives = {r: _core.message_new(0 if r == self.rank else mine * counts[r]) for r in level.team}
        self.travel(sends, receives, step)
        receives[self.rank] = sends[self.rank]
        return [receives[r][k * mine : (k + 1) * mine] for r in level.team for k in range(counts[r])]

    def in_order(
        self, segment: Segment, level: Level, weights: Sequence[Sequence[Weight | None]]
    ) -> tuple[list[Weight | None], list[int]]:
        """The weights of a team's terms in the order of the sum, and the places of these terms in that of ranks."""
        each = list(itertools.chain.from_iterable(weights[r] for r in level.team))
        keys: Sequence[int] = range(len(each))
        if self.order == "key" and is_inexact(segment.dtype):  # integers have the same sum in any order
            keys = list(itertools.chain.from_iterable(self.keys[r] for r in level.team))
        places = sorted(range(len(each)), key=keys.__getitem__)
        return [each[k] for k in places], places

    def chained(
        self,
        segment: Segment,
        own: Any,
        levels: Sequence[Level],
        raws: Sequence[NDArray],
        weights: Sequence[Sequence[Weight | None]],
        dtype: str,
    ) -> None:
        """The fold runs from node to node. raws: the terms of this rank's node, in its shards."""
        codec, nodes = sent_codec(segment), chain_of(self.call.group, self.options, self.headers)
        assert nodes is not None
        each, places = self.in_order(segment, levels[0], weights)
        sent_as = dtype
        if codec is not None and codec.is_array:
            sent_as = codec.dtype
        elif codec is not None:
            owners = levels[0].owners(self.rank)
            raws = [codec.widened(raw, owners, dtype) for raw in raws]
        terms = [typed(raw, sent_as) for raw in raws]
        chain = Chain(segment, self.rank, levels, nodes, sum_dtype(codec, dtype, None))
        total = chain.run([terms[k] for k in places], each, self.travel)
        if len(own):
            self.rounded([typed(total, chain.dtype)], [None], own, self.options.scale, None)

    def on_device(self, arrays: Sequence[Any], place: device_sums.Where | None) -> Any:
        """The sum of dense arrays of every rank, made on the device where they lie; None if another rank gets it."""
        assert place is not None
        (segment,) = self.layout.segments
        counts, weights = self.counts, self.weights
        trip = device_sums.Trip(self.call, place, segment.bounds, self.options.into)
        with place.current():
            terms = [place.flat(x) for x in arrays]
            if self.order != "key" and max(counts) > 1:
                terms = [place.folded(terms, accumulation(segment.dtype), weighing_of(weights[self.rank]))]
                counts = [1] * self.size
                weights = [[None]] * self.size
            every = trip.to_owners(terms, counts)
            whole, own = trip.memory(self.layout.leaves[0].shape)
            each, places = self.in_order(segment, self.call.group._flat[0], weights)
            if len(own):
                self.rounded([every[k] for k in places], each, own, self.options.scale, None)
            trip.back(whole, own)
        self.call.group._tally.on_device += 1
        return whole


def added(flats: Sequence[NDArray], dtype: str, wide: str, weights: Sequence[Weight | None]) -> list[NDArray]:
    """The sum of arrays of bytes in another dtype; none of none."""
    if not flats:
        return []
    terms = [typed(f, dtype) for f in flats]
    total = _core.message_new(len(terms[0]) * itemsize(wide))
    if len(total):
        _core.add_n(terms, out=typed(total, wide), **weighing_of(weights))
    return [total]


def check_keys(keys: Iterable[int], n: int) -> list[int]:
    """The keys as a list of as many non-negative ints as there are arrays."""
    made = []
    for k in sequence("add_n: keys", keys, "integers"):
        if isinstance(k, bool) or not hasattr(k, "__index__") or isinstance(k, np.ndarray):
            raise TypeError(f"add_n: keys: expected integers, got {type_of(k)}")
        made.append(operator.index(k))
        if not 0 <= made[-1] < 1 << 63:
            raise ValueError(f"add_n: keys: expected a non-negative int64, got {made[-1]}")
    if len(made) != n:
        raise ValueError(f"add_n: expected as many keys as arrays, {n}, got {len(made)}")
    return made


@names_nearest
def add_n(
    arrays: Iterable[Any],
    group: object = None,
    order: Order | None = None,
    *,
    keys: Iterable[int] | None = None,
    weights: Iterable[float] | None = None,
    mean: bool = False,
    scale: complex | None = None,
    into: Into = "all",
    wire: DTypeLike | None = None,
    wire_out: DTypeLike | None = None,
    timeout: TimeLimit = "group",
) -> Any:
    """Sum arrays of one shape and dtype over all ranks, with one rounding.

    Every rank of the group calls it with the same options.

    Parameters
    ----------
    arrays : sequence of arrays
        The contributions of this rank: none, one or several; None adds nothing. ndarrays, tensors, sparse arrays.
    group : optional
        A group, or what `fanin.dist.group` accepts.
    order : "key", "exact" or "rank", optional
        "key": the left fold in the order of `keys`, the bits of `fanin.add_n(all_arrays, keys=all_keys)`. "exact": the
        exact sum, rounded once, the bits of `accumulate="exact"`: they do not depend on the number of ranks, or on
        which rank brings what. "rank": each rank folds its own, then the ranks' sums are folded in their order.
        Default: "key" if no rank brings more than one array, else "rank".
    keys : sequence of int, optional
        One for each array, each once in all ranks. Default: the place of each array, those of rank 0 first.
    weights : sequence of number, optional
        One for each array, by which it is multiplied, in the dtype of the sum, before it is added. All ranks give
        integers, or all give floats, or none. Default: 1 for each.
    mean : bool
        Divide the sum by that of all ranks' weights, before the rounding; a weight of None counts, too.
    scale : number, optional
        Multiplies the sum, or the mean, before the rounding.
    into : "all", "shard" or int
        "all" ranks get the sum; each gets its "shard", a flat run of whole blocks of 256 elements; or one rank gets it
        and the others None.
    wire : DTypeLike, optional
        "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2": each array of a wider float is rounded to it, on any
        number of ranks, and travels so; the sum runs as without it. With order="rank" each rank's fold is rounded
        instead. float8 has a power of two for each 256 elements. Default: arrays travel as they are.
    wire_out : DTypeLike, optional
        A dtype as for `wire`, to which the sum is rounded before it travels back; the result has the dtype of the
        arrays. Default: that one.
    timeout : float or "group", optional
        Seconds after which this rank no longer waits for another. None: it waits without a limit. Default: the group's.

    Raises
    ------
    fanin.PeerError
        On every rank: if a rank failed, is gone, or brings another shape, dtype, options or number of passes.
    TypeError, ValueError
        On this rank, for arrays or options that do not fit; the others get a PeerError.
    ZeroDivisionError
        On every rank: `mean`, and the weights of all ranks sum to 0.
    RuntimeError
        If the group is closed, was made before fork(), or is used by another thread.

    >>> def one_each(group):
    ...     return fanin.dist.add_n([np.array([1.0, 2.0]) * group.rank], group, scale=1 / 2)
    >>> fanin.dist.threads(3, one_each)[0]
    array([1.5, 3. ])

    The mean over the tokens of all ranks, of which rank r has r + 1:

    >>> def of_tokens(group):
    ...     tokens = group.rank + 1
    ...     return fanin.dist.add_n([np.array([6.0]) * group.rank], group, weights=[tokens], mean=True)
    >>> fanin.dist.threads(3, of_tokens)[0]
    array([8.])
    """
    ranks = group if isinstance(group, Group) else group_of(group)
    plain = weights is None and mean is False and wire is wire_out is None
    some: Any = arrays
    with ranks.call("add_n", timeout) as call:
        name = place = None
        alone = plain and type(some) in (list, tuple) and len(some) == 1 and not sparse.may_travel(some[0])
        if alone:
            name = plans.name_of(some[0], order, scale, into)
            place = device_sums.where(ranks, some) if order != "exact" else None
            if name is not None and place is not None:
                name = (place.alike, *name)
        plan = None if name is None else plans.find(ranks, name)
        if plan is not None:
            if keys is not None:
                keys = check_keys(keys, 1)
            found = plan.meet(call, some[0], None if keys is None else keys[0])
            if found is not None and isinstance(plan, device_sums.DevicePlan):
                sums = Sum(call, plan.layout, Sent([Term([])]), headers_of(found), plan.options)
                return sums.on_device(some, place)
            if found is not None:
                return planned(call, plan, some[0], found)
        sent_as, returned_as = names_of("add_n", wire, wire_out)
        options = Options(order, scale, into, mean=flag("add_n: mean", mean), wire=sent_as, wire_out=returned_as)
        options.check("add_n", ranks.size)
        if hasattr(arrays, "shape"):
            raise TypeError(f"add_n: arrays: expected several arrays, got {type_of(arrays)}: give [x]")
        given = sequence("add_n: arrays", arrays, "arrays")
        numbers = [None] * len(given) if keys is None else check_keys(keys, len(given))
        counted = Counted([None] * len(given) if weights is None else list(weights_of(weights, len(given))))
        present: list[tuple[int | None, Weight | None, Any]] = []
        places: list[int] = []
        for i, x in enumerate(given):
            if _core.is_no_gradient(x):
                continue
            present.append((numbers[i], counted.weights[i], x))
            places.append(i)
        leaf = None
        if not alone and order != "exact" and sent_as is returned_as is None:
            place = device_sums.where(ranks, [x for _, _, x in present])
        for i, (_, _, x) in zip(places, present, strict=True):
            if isinstance(x, Partial):
                raise TypeError(f"add_n: arrays[{i}]: expected an array, got a fanin.Partial: give x.dense()")
            one = leaf_of(x, f"arrays[{i}]", place is not None)._replace(name="")
            if (text := object_text(x)) is not None:
                raise TypeError(f"add_n: arrays[{i}]: expected an array, got {text}")
            leaf = leaf or one
            if one != leaf:
                raise ValueError(
                    f"add_n: arrays[{i}]: expected {leaf.dtype} of shape {leaf.shape}, as arrays[{places[0]}] has, got"
                    f" {one.dtype} of shape {one.shape}"
                )
        layout = None if leaf is None else options.layout([leaf], ranks.size)
        if layout:
            terms = [Term([] if place else layout.flatten([x]), key, w) for key, w, x in present]
            sent = prepare(layout, terms, options, ranks, counted)
            sent.rows = rows_of_terms(layout, [x for _, _, x in present])
        else:
            sent = Sent([], weigh=weighed([], counted, options, {}))
        like = like_of(present[0][2]) if present else None
        call.options = options.text
        where = {} if place is None else place.header
        headers = call.meet({**sent.header, "leaf": leaf, "like": like, **where}, digest=digest(options.text))
        call.compare(headers, [["", options.text]])
        leaves = [(r, Leaf("", tuple(h["leaf"][1]), h["leaf"][2])) for r, h in enumerate(headers) if h["leaf"]]
        if not leaves:
            raise call.refuse("no rank brings an array: the sum of none has no shape and no dtype")
        first, agreed = leaves[0]
        for r, other in leaves:
            if other != agreed:
                raise call.refuse(
                    f"rank {r} brings {other.dtype} of shape {other.shape}, rank {first} {agreed.dtype} of shape"
                    f" {agreed.shape}",
                    r,
                )
        if layout is None:
            layout = options.layout([agreed], ranks.size)
            sent = prepare(layout, [], options, ranks, counted)
        if any(h["terms"] != 1 or "weigh" in h for h in headers):
            name = None
        if device_sums.agreed(call, headers) and place is not None:
            total = Sum(call, layout, sent, headers, options).on_device([x for _, _, x in present], place)
            if name is not None:
                plans.put(ranks, name, device_sums.DevicePlan(ranks, agreed, options, place))
            return total
        if place is not None:
            for term, (_, _, x) in zip(sent.terms, present, strict=True):
                term.flats = layout.flatten([x])
        example = present[0][2] if present else example_of(headers[first]["like"])
        total = finish(call, layout, sent, headers, options, [example])[0]
        if name is not None and agreed.size:
            flat = len(levels_for(ranks, layout.segments[0], options)) == 1
            plans.keep(ranks, name, agreed, options, flat)
        return total


def planned(call: Call, plan: plans.Plan, x: Any, keys: list[int | None]) -> Any:
    """The sum of one array of each rank, of which all ranks have a plan; the keys that ranks gave."""
    options, group = plan.options, call.group
    if plan.is_general:
        sent = Sent([Term(plan.layout.flatten([x]), keys[group.rank])])
        return finish(call, plan.layout, sent, headers_of(keys), options, [x])[0]
    places = None
    if options.order in (None, "key") and keys is not plan.no_keys:
        mine = keys_of_ranks(call, [[key] for key in keys])
        places = sorted(range(len(mine)), key=mine.__getitem__)
    raw = plan.sum(call, x, places)
    return None if raw is None else plan.like(raw, x)


def headers_of(keys: Sequence[int | None]) -> list[Header]:
    """What is in the headers of ranks that bring one array each."""
    return [{"terms": 1, "keys": [key], "sizes": {}} for key in keys]


def weights_of(weights: Iterable[float], n: int) -> Iterator[Weight]:
    """The weights, checked: as many as there are arrays."""
    given = sequence("add_n: weights", weights, "numbers")
    if len(given) != n:
        raise ValueError(f"add_n: expected as many weights as arrays, {n}, got {len(given)}")
    for i, weight in enumerate(given):
        yield weight_of(f"add_n: arrays[{i}]", weight)


def rows_of_terms(layout: Layout, arrays: Sequence[Any]) -> dict[int, NDArray]:
    """`Sent.rows` of a bucket of one leaf."""
    noted = sparse.Noted()
    for x in arrays:
        noted.note(0, layout.leaves[0], x)
    return noted.found([1] * len(arrays))


def summed(
    call: Call,
    layout: Layout,
    sent: Sent,
    headers: list[Header],
    options: Options,
    places: Mapping[int, NDArray] | None = None,
) -> list[NDArray]:
    """`Sum.run` of a bucket; of leaves of which every rank has few rows, these alone travel."""
    leaves = sparse.chosen(call.group, layout, headers, options)
    if not leaves:
        return Sum(call, layout, sent, headers, options, places).run()
    few = sparse.Few(layout, sparse.exchanged(call, leaves, sent.rows, headers), options, call.group.size)
    terms = [Term([few.taken_of(k, raw) for k, raw in enumerate(t.flats)], t.key, t.weight) for t in sent.terms]
    folded = {}
    for k, fold in sent.folded.items():
        folded[k] = Fold(few.layout.segments[k])
        folded[k].count = fold.count
        folded[k].total = None if fold.total is None else few.taken_of(k, fold.total)
    sums = Sum(call, few.layout, replace(sent, terms=terms, folded=folded), headers, options).run()
    if options.into not in ("all", call.group.rank):
        return sums
    return [few.spread(k, raw, (places or {}).get(k)) for k, raw in enumerate(sums)]


def finish(
    call: Call, layout: Layout, sent: Sent, headers: list[Header], options: Options, like: Sequence[Any]
) -> list[Any]:
    """The sums of a bucket's leaves, or this rank's shards of them, or None where another rank gets them."""
    flats = summed(call, layout, sent, headers, options)
    if options.into == "shard":
        return layout.shards(flats, call.group.rank, like)
    if options.into in ("all", call.group.rank):
        return layout.unflatten(flats, like)
    return [None] * len(layout.leaves)
