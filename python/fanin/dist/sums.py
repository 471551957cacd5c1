"""The sum over ranks of one bucket: each rank sends each owner its part, the owner adds, rounds once, and answers.

    order    what a rank sends to an owner                          what the owner does
    key      its contributions, in their dtype (N2)                 the left fold in the order of keys
    exact    its one contribution, or the exact partial sum of      adds them exactly
             several, packed (N3)
    rank     the fold of its contributions, in the accumulation     the left fold in the order of ranks
             dtype (N4)

Integers and bool are sums of every order alike; they are folded by rank for "exact".
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fanin import _core
from fanin._interop.protocols import NDArray
from fanin._words import type_of

from .group import Call, Group, Header
from .group import group as group_of
from .layout import Layout, Leaf, Segment, accumulation, digest, is_inexact, leaf_of, typed

Order = Literal["key", "exact", "rank"]
Into = Literal["all", "shard"] | int
ORDERS = ("key", "exact", "rank")


@dataclass
class Term:
    """One contribution of this rank to all leaves of a bucket."""

    flats: list[NDArray]  #: bytes, for each segment
    key: int | None = None


@dataclass
class Options:
    """How a sum is made; the same on every rank."""

    order: Order | None
    scale: complex | None = None
    into: Into = "all"
    accumulate: str | None = None  #: the dtype in which owners fold, or "exact"; None: that of rule A11

    def check(self, call: str, size: int) -> None:
        """Raise ValueError or TypeError for an option that does not exist."""
        if self.order is not None and self.order not in ORDERS:
            raise ValueError(f'{call}: expected order="key", "exact" or "rank", got {self.order!r}')
        if self.into in ("all", "shard"):
            return
        if isinstance(self.into, bool) or not isinstance(self.into, int):
            raise TypeError(f'{call}: expected into="all", "shard" or a rank, got {type_of(self.into)}')
        if not 0 <= self.into < size:
            raise ValueError(f"{call}: into={self.into}: there are ranks 0 to {size - 1}")

    def check_dtypes(self, layout: Layout) -> None:
        """Raise if an option does not fit a dtype: before headers, so that no rank waits for data."""
        for segment in layout.segments if (self.scale, self.accumulate) != (None, None) else ():
            one = typed(np.zeros(segment.itemsize, np.uint8), segment.dtype)
            _core.add_n([one], out=one, scale=self.scale, accumulate=self.accumulate)

    @property
    def text(self) -> str:
        scale = self.scale.item() if isinstance(self.scale, np.generic) else self.scale
        sums = "" if self.accumulate is None else f", accumulate={self.accumulate!r}"
        return f"order={self.order!r}, scale={scale!r}, into={self.into!r}{sums}"


#: Numbers of a window: it stays near the core while it is filled and packed, or merged and rounded; and its 1 MiB are
#: reused by the next one (D26).
CHUNK = 1 << 17


class Partial:
    """The exact sum of this rank's contributions to a segment, in windows of CHUNK numbers of each owner's shard.

    Contributions wait, and are added to a window when it is used; `settle` adds them at once.
    """

    def __init__(self, segment: Segment, waiting: Iterable[NDArray] = ()) -> None:
        self.segment = segment
        self.waiting = list(waiting)
        self.kept: dict[int, object] = {}  #: windows by their first element

    def settle(self) -> None:
        """Add the contributions that wait."""
        for owner in range(len(self.segment.bounds) - 1):
            for start, _, window in self.windows(owner):
                self.kept[start] = window
        self.waiting = []

    def windows(self, owner: int) -> Iterator[tuple[int, int, object]]:
        """The windows of an owner's shard, each with its elements [start, stop); once, as they get what waits."""
        terms = [typed(raw, self.segment.dtype) for raw in self.waiting]
        low, high = self.segment.bounds[owner : owner + 2]
        chunk = CHUNK // 2 if self.segment.dtype.startswith("complex") else CHUNK
        for start in range(low, high, chunk):
            stop = min(high, start + chunk)
            window = self.kept.pop(start, None) or _core.window_new(self.segment.dtype, stop - start)
            _core.window_add(window, tuple(x[start:stop] for x in terms))
            yield start, stop, window

    def pack(self, rank: int) -> tuple[NDArray, list[int]]:
        """The messages to all owners but this rank, padded, side by side; and their sizes."""
        owners = len(self.segment.bounds) - 1
        raw, at, sizes = _core.message_new(9 * self.segment.size), 0, []
        for owner in range(owners):
            begin = at
            for _, _, window in self.windows(owner) if owner != rank else ():
                room = at + _core.window_room(window)
                if room > len(raw):
                    more = _core.message_new(2 * room)
                    more[:at] = raw[:at]
                    raw = more
                at += _core.window_pack(window, raw[at:])
            sizes.append(at - begin)
            at += -at % 8
        return raw[:at], sizes


@dataclass
class Sent:
    """The messages of this rank to the owners, made before headers are exchanged."""

    terms: list[Term]
    #: For each segment of which several terms are summed exactly: this rank's sum, its messages, rank after rank, and
    #: their bytes.
    packed: dict[int, tuple[Partial, NDArray, list[int]]] = field(default_factory=dict)

    @property
    def header(self) -> Header:
        return {
            "terms": len(self.terms),
            "keys": [t.key for t in self.terms],
            "sizes": {str(i): sizes for i, (_, _, sizes) in self.packed.items()},
        }


def padded(sizes: Iterable[int]) -> list[int]:
    """Sizes of messages as they travel: multiples of 8."""
    return [n + -n % 8 for n in sizes]


def aligned(message: NDArray) -> NDArray:
    """The message at an address that is a multiple of 8: a copy if a part of another size came before it."""
    return message if message.__array_interface__["data"][0] % 8 == 0 else message.copy()


def prepare(layout: Layout, terms: list[Term], options: Options, rank: int) -> Sent:
    """Everything that does not depend on other ranks."""
    sent = Sent(terms)
    options.check_dtypes(layout)
    for i, segment in enumerate(layout.segments if options.order == "exact" and len(terms) > 1 else ()):
        if is_inexact(segment.dtype):
            partial = Partial(segment, [t.flats[i] for t in terms])
            sent.packed[i] = (partial, *partial.pack(rank))
    return sent


def agree_on_keys(call: Call, headers: list[Header]) -> list[list[int]]:
    """The keys of each rank's contributions; by default their places, those of rank 0 first."""
    given = [(r, k) for r, h in enumerate(headers) for k in h["keys"]]
    bare = [r for r, k in given if k is None]
    for r, k in given:
        if (k is None) != (given[0][1] is None):
            gives, none = (r, given[0][0]) if given[0][1] is None else (given[0][0], r)
            raise call.refuse(
                f"rank {gives} gives keys and rank {none} gives none: expected keys on all ranks or none", r
            )
    if bare:
        numbers = iter(range(len(bare)))
        return [[next(numbers) for _ in h["keys"]] for h in headers]
    owner: dict[int, int] = {}
    for r, k in given:
        if k in owner:
            raise call.refuse(f"key {k} of rank {r} was given by rank {owner[k]} before: expected each key once", r)
        owner[k] = r
    return [list(h["keys"]) for h in headers]


def order_of(options: Options, counts: Sequence[int]) -> Order:
    """The order of a sum to which each rank brings so many contributions."""
    return options.order or ("key" if max(counts) <= 1 else "rank")


class Sum:
    """The sum of one bucket, once headers are agreed."""

    def __init__(self, call: Call, layout: Layout, sent: Sent, headers: list[Header], options: Options) -> None:
        self.call, self.layout, self.sent, self.headers, self.options = call, layout, sent, headers, options
        self.rank, self.size = call.group.rank, call.group.size
        self.counts: list[int] = [h["terms"] for h in headers]
        self.order: Order = order_of(options, self.counts)
        self.keys: list[list[int]] = []
        if self.order == "key":
            self.keys = agree_on_keys(call, headers)

    def run(self) -> list[NDArray]:
        """For each segment the bytes of the whole sum, or of this rank's shard; nothing if another rank gets them."""
        return [self.segment(i, s) for i, s in enumerate(self.layout.segments)]

    def segment(self, i: int, segment: Segment) -> NDArray:
        into, shards = self.options.into, segment.counts()
        if self.size > 1 and into != "shard":
            self.check_size(shards)
        low = sum(shards[: self.rank])
        whole = _core.message_new(sum(shards) if into in ("all", self.rank) else shards[self.rank])
        own = whole[low : low + shards[self.rank]] if into in ("all", self.rank) else whole
        if any(str(i) in h["sizes"] for h in self.headers):
            self.exact(i, segment, own)
        else:
            self.fold(i, segment, own)
        if into == "all" and self.size > 1:
            self.call.start("all_gather", whole, shards)
        elif isinstance(into, int) and self.size > 1:
            receives = [n if self.rank == into and r != into else 0 for r, n in enumerate(shards)]
            sends = [shards[self.rank] if r == into and r != self.rank else 0 for r in range(self.size)]
            got = _core.message_new(sum(receives))
            self.call.start("all_to_all", own if sum(sends) else own[:0], sends, got, receives, step="back")
            if self.rank == into:
                whole[:low], whole[low + len(own) :] = got[:low], got[low:]
        return whole

    def check_size(self, messages: Iterable[int]) -> None:
        """Raise an error on every rank if the engine has no message of so many bytes."""
        largest, n = getattr(self.call.group._engine, "largest", None), max(messages)
        if largest is not None and n > largest:
            raise self.call.refuse(
                f"{n} bytes in one message: {self.call.group.name} has at most {largest}; use smaller buckets"
                " (bucket_bytes=), or MPI 4"
            )

    def exact(self, i: int, segment: Segment, own: NDArray) -> None:
        """A rank with several contributions has packed their sum; a rank with one sends it as it is."""
        flats, shards = [t.flats[i] for t in self.sent.terms], segment.counts()
        if i in self.sent.packed:
            partial, message, sends = self.sent.packed[i]
            sends = padded(sends)
        else:
            partial, message = Partial(segment, flats), flats[0] if flats else np.empty(0, np.uint8)
            sends = [len(flats) * n for n in shards]
        table = [padded(h["sizes"][str(i)]) if str(i) in h["sizes"] else shards for h in self.headers if h["terms"]]
        self.check_size(itertools.chain([0], *table))
        packed = [h["sizes"][str(i)][self.rank] if str(i) in h["sizes"] else None for h in self.headers]
        plain = [shards[self.rank] if h["terms"] else 0 for h in self.headers]
        receives = [bare if n is None else padded([n])[0] for n, bare in zip(packed, plain, strict=True)]
        got = _core.message_new(sum(receives))
        if self.size > 1:
            self.call.start("all_to_all", message, sends, got, receives)
        terms, messages, at = [], [], 0
        for rank, (n, room) in enumerate(zip(packed, receives, strict=True)):
            if rank != self.rank and n is not None:
                messages.append(aligned(got[at : at + n]))
            elif rank != self.rank and room:
                terms.append(typed(got[at : at + room], segment.dtype))
            at += room
        rounded, low = typed(own, segment.dtype), segment.bounds[self.rank]
        for start, stop, window in partial.windows(self.rank):
            _core.window_add(window, tuple(x[start - low : stop - low] for x in terms))
            for k, message in enumerate(messages):
                messages[k] = message[_core.window_merge_packed(window, message) :]
            _core.window_round(window, rounded[start - low : stop - low], self.options.scale)
        if any(map(len, messages)):
            raise ValueError("not a message of exact sums: bytes follow its last block")

    def fold(self, i: int, segment: Segment, own: NDArray) -> None:
        counts, flats = self.counts, [t.flats[i] for t in self.sent.terms]
        folded = self.order != "key" and max(counts) > 1
        dtype = accumulation(segment.dtype) if folded else segment.dtype
        if folded and flats:
            total = _core.message_new(sum(segment.counts(dtype)))
            if segment.size:
                _core.add_n([typed(f, segment.dtype) for f in flats], out=typed(total, dtype))
            flats = [total]
        if folded:
            counts = [min(n, 1) for n in counts]
        shards = segment.counts(dtype)
        self.check_size([max(counts) * max(shards)])
        mine = shards[self.rank]
        ends = [0, *itertools.accumulate(shards)]
        parts = [f[ends[self.rank] : ends[self.rank + 1]] for f in flats]
        pieces = flats if len(flats) == 1 else [f[a:b] for a, b in itertools.pairwise(ends) for f in flats]
        message = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
        got = _core.message_new(mine * sum(counts))
        if self.size > 1:
            self.call.start("all_to_all", message, [n * len(flats) for n in shards], got, [n * mine for n in counts])
        if not mine:
            return
        at = sum(counts[: self.rank])
        raws = [got[k * mine : (k + 1) * mine] for k in range(sum(counts))]
        raws[at : at + len(parts)] = parts  # engines leave this rank's out
        terms = [typed(raw, dtype) for raw in raws]
        keys = [k for keys in self.keys for k in keys] if self.order == "key" else list(range(len(terms)))
        ordered = [terms[k] for k in sorted(range(len(terms)), key=keys.__getitem__)]
        exact = self.order == "exact" and is_inexact(segment.dtype)
        accumulate = "exact" if exact else self.options.accumulate
        _core.add_n(ordered, out=typed(own, segment.dtype), scale=self.options.scale, accumulate=accumulate)


def check_keys(keys: Iterable[int], n: int) -> list[int]:
    """The keys as a list of as many non-negative ints as there are arrays."""
    made = []
    for k in keys:
        if isinstance(k, bool) or not hasattr(k, "__index__"):
            raise TypeError(f"add_n: keys: expected integers, got {type_of(k)}")
        made.append(operator.index(k))
        if not 0 <= made[-1] < 1 << 63:
            raise ValueError(f"add_n: keys: expected a non-negative int64, got {made[-1]}")
    if len(made) != n:
        raise ValueError(f"add_n: expected as many keys as arrays, {n}, got {len(made)}")
    return made


def _one_leaf(arrays: Sequence[Any]) -> Leaf | None:
    """The leaf of arrays of one shape and dtype; None without arrays."""
    leaf = None
    for i, x in enumerate(arrays):
        one = leaf_of(x, f"arrays[{i}]")._replace(name="")
        if leaf is not None and one != leaf:
            raise ValueError(
                f"add_n: arrays[{i}]: expected {leaf.dtype} of shape {leaf.shape}, as arrays[0] has, got {one.dtype} of"
                f" shape {one.shape}"
            )
        leaf = one
    return leaf


def add_n(
    arrays: Iterable[Any],
    group: object = None,
    order: Order | None = None,
    *,
    keys: Iterable[int] | None = None,
    scale: complex | None = None,
    into: Into = "all",
    timeout: float | None = None,
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
    scale : number, optional
        Multiplies the sum before the rounding.
    into : "all", "shard" or int
        "all" ranks get the sum; each gets its "shard", a flat run of whole blocks of 256 elements; or one rank gets it
        and the others None.
    timeout : float, optional
        Seconds after which this rank no longer waits for another. Default: the group's.

    Raises
    ------
    fanin.PeerError
        On every rank: if a rank failed, is gone, or brings another shape, dtype, options or number of passes.
    TypeError, ValueError
        On this rank, for arrays or options that do not fit; the others get a PeerError.
    RuntimeError
        If the group is closed, was made before fork(), or is used by another thread.

    >>> def one_each(group):
    ...     return fanin.dist.add_n([np.array([1.0, 2.0]) * group.rank], group, scale=1 / 2)
    >>> fanin.dist.threads(3, one_each)[0]
    array([1.5, 3. ])
    """
    ranks = group if isinstance(group, Group) else group_of(group)
    with ranks.call("add_n", timeout) as call:
        options = Options(order, scale, into)
        options.check("add_n", ranks.size)
        given = list(arrays)
        numbers = None if keys is None else check_keys(keys, len(given))
        present = [(None if numbers is None else numbers[i], x) for i, x in enumerate(given) if x is not None]
        leaf = _one_leaf([x for _, x in present])
        layout = None if leaf is None else Layout([leaf], ranks.size)
        if layout:
            terms = [Term(layout.flatten([x]), key) for key, x in present]
            sent = prepare(layout, terms, options, ranks.rank)
        else:
            sent = Sent([])
        headers = call.meet({**sent.header, "leaf": leaf}, digest=digest(options.text))
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
            layout = Layout([agreed], ranks.size)
            sent = prepare(layout, [], options, ranks.rank)
        return finish(call, layout, sent, headers, options, [present[0][1] if present else None])[0]


def finish(
    call: Call, layout: Layout, sent: Sent, headers: list[Header], options: Options, like: Sequence[Any]
) -> list[Any]:
    """The sums of a bucket's leaves, or this rank's shards of them, or None where another rank gets them."""
    flats = Sum(call, layout, sent, headers, options).run()
    if options.into == "shard":
        return layout.shards(flats, call.group.rank, like)
    if options.into in ("all", call.group.rank):
        return layout.unflatten(flats, like)
    return [None] * len(layout.leaves)
