"""Sums over ranks of the gradients of leaves, in buckets that travel while a pass runs."""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from fractions import Fraction
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from fanin import _core
from fanin._checks import flag
from fanin._interop.arrays import object_text
from fanin._interop.classes import is_tensor, is_torch
from fanin._interop.protocols import DTypeLike, NDArray
from fanin._threads import here
from fanin._trace.recording import beside, recording
from fanin._weights import Kind, Weight, weight_of
from fanin._words import counted, names_nearest, note, type_of
from fanin.slots import scaled

from . import sparse, sums
from .bucket_plans import Brought, BucketPlan, brought, can_be_planned, facts_of
from .counters import BadTerm, SumStats
from .explain import explain
from .group import Call, Group, Header, TimeLimit, Use, failure_of, limit_of
from .group import group as group_of
from .layout import (
    Layout,
    Leaf,
    Segment,
    accumulation,
    digest,
    flat_bytes,
    host,
    is_inexact,
    itemsize,
    leaf_of,
    typed,
)
from .norms import Squares, merged, root, values_of
from .options import Into, Options, Order
from .plans import Agreed
from .sender import Sender
from .sums import Counted, Sent, Term
from .wire import names_of, rounded, sent_codec

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Bytes of a gradient: copying more costs more than finding out whether a copy is needed.
LARGE = 1 << 16

#: Bytes of a reducer's only bucket up to which it travels at the end of a pass, on its thread: the last gradient of one
#: bucket comes near that end, so another thread could hide little, and takes a while to begin.
SMALL = 1 << 27

#: The reducer whose pass runs here. The workers of the pass have the context of the thread that began it.
_inside: ContextVar[object] = ContextVar("fanin.dist.Reducer", default=None)


class Passes(Protocol):
    """The weights of the passes of a block of `fanin.torch.accumulate`."""

    now: list[Any]  #: empty: every pass weighs 1, and none is counted

    def weight_here(self, gradient: Any) -> Weight | None:
        """The weight of the pass that runs here, which is counted; None: 1."""

    def freeze(self, why: str) -> None:
        """No other weight may count."""

    def total(self) -> Fraction:
        """The sum of all weights."""

    def kind(self) -> Kind:
        """Whether all are integers."""


class _Memory(NamedTuple):
    """Where a contribution lies."""

    flats: list[NDArray]  #: bytes, for each segment
    places: list[Any]  #: of each leaf in them


class _Bucket:
    """Some leaves, and the contributions of this rank to their next sum.

    A contribution lies in memory of its own until it is complete; then it is added to the running sums of its segments
    (`settle`), or kept as a term where there are none. So what raises amid a contribution is in no running sum.
    """

    def __init__(
        self, number: int, indices: Sequence[int], layout: Layout, wire: str | None = None, in_turn: bool = False
    ) -> None:
        self.number, self.indices, self.layout, self.wire = number, indices, layout, wire
        #: Of one large leaf: a gradient that nothing else has travels from its own memory, and .grad takes the sum.
        self.is_single = len(indices) == 1 and layout.leaves[0].size * itemsize(layout.leaves[0].dtype) >= LARGE

        #: Memory for a contribution is taken with its first gradient; else before, as several threads may bring some.
        self.is_lazy = self.is_single or in_turn
        self.every = (1 << len(indices)) - 1  #: all leaves, as bits
        self.closed = _core.EventCount()  #: the passes in which it was closed
        self.terms: list[Term] = []
        self.masks: list[int] = []  #: for each term: the leaves that it has, as bits
        self.partials: dict[int, sums.ExactSum] = {}  #: exact sums of the terms so far, by segment
        self.folded: dict[int, sums.Fold] = {}  #: folds of the terms so far, by segment
        self.total: list[NDArray] | None = None
        self.result: NDArray | None = None  #: the array that has the memory of `total`
        self.anywhere = 0  #: the leaves that any rank has, as bits
        self.bad: list[int] | None = None  #: the first contribution with an inf or NaN, its leaf, how many elements
        self.headers: Sequence[Header] | None = None  #: of the last sum
        self.plan: BucketPlan | None = None  #: of a sum whose header is that of the last one
        self.is_planned = False  #: the last sum had one
        self.brought: Brought | None = None  #: what this rank then brings
        self.missed = False  #: not all ranks had the last plan
        self.kept: dict[int, Any] = {}  #: gradients that came unshared, on a rank alone
        #: For a leaf: dtype, shape, layout, device of a tensor that fits.
        self.fitting: dict[int, tuple[object, ...]] = {}
        self.weight: Weight | None = None  #: of the contribution at hand; None: 1
        self.rows = sparse.Noted()  #: of sparse contributions
        self.used: dict[int, _Memory] = {}  #: memory of terms that are in no running sum
        self.spare: _Memory | None = None  #: for the next contribution
        #: `has`, the places of leaves, and the block's `Passes.now`, where the core copies plain gradients; else empty.
        self.gate: list[Any] = []
        self.start()

    def start(self) -> None:
        """Begin a contribution."""
        self.is_open = True  #: it takes gradients
        self.given: NDArray | None = None  #: bytes of the only gradient, which nothing else has
        self.memory: _Memory | None = None
        if not self.is_lazy:
            self.memory, self.spare = self.spare or self.new_memory(), None
        self.has = bytearray(len(self.indices))  #: the leaves of which it has a gradient
        self.weight = None

    def take_memory(self) -> _Memory:
        """Memory for the contribution at hand."""
        if self.memory is None:
            self.memory, self.spare = self.spare or self.new_memory(), None
        return self.memory

    def new_memory(self) -> _Memory:
        flats, places = [], [None] * len(self.indices)
        for segment in self.layout.segments:
            raw, elements = segment.empty()
            flats.append(raw)
            for leaf, low, high in segment.places:
                places[leaf] = elements[low:high].reshape(self.layout.leaves[leaf].shape)
        return _Memory(flats, places)

    def reset(self, keep: bool = True) -> None:
        """Forget all contributions, and all memory but that of one; unless `keep`, that too: what was interrupted may
        have it still.
        """
        if self.terms:
            self.forget()
            self.terms, self.masks = [], []
        if self.gate:
            self.gate.clear()
        self.spare = self.memory or self.spare if keep else None
        self.total = self.result = self.bad = None
        self.anywhere = 0
        if self.kept:
            self.kept.clear()
        if self.rows.rows:
            self.rows = sparse.Noted()
        self.start()

    def free(self) -> None:
        """Drop all memory."""
        self.reset(keep=False)
        self.memory = self.plan = None

    def forget(self) -> None:
        """Drop the terms and the running sums, but the memory of one term."""
        for one in self.used.values():
            self.spare = self.spare or one
        self.used, self.partials, self.folded = {}, {}, {}
        for term in self.terms:
            term.flats = []

    @property
    def begun(self) -> bool:
        """Whether the contribution at hand has a gradient."""
        return 1 in self.has or bool(self.kept)

    def lacking(self) -> int:
        """The leaves that no contribution has a gradient of, as bits."""
        if 0 not in self.has or len(self.kept) == len(self.has) or self.every in self.masks:
            return 0
        has = bytearray(self.has)
        for i in self.kept:
            has[i] = 1
        return self.every & ~reduce(operator.or_, self.masks, bits_of(has))

    def open_gate(self, now: list[Any]) -> None:
        """Let the core copy plain gradients of the contribution at hand: what any thread brings to the same bucket, but
        for the first gradient of a contribution, and the second one of a leaf.
        """
        if self.memory is not None and self.weight is None:
            self.gate[:] = self.has, self.memory.places, now

    def put_plain(self, i: int, gradient: Any, weight: Weight | None) -> bool:
        """Copy the gradient of leaf i of the bucket, if it is an array that needs no more; return whether it was."""
        memory = self.memory
        if memory is None or not self.is_open or self.has[i] or self.weight != weight or i in self.kept:
            return False
        return _core.copy_plain(gradient, memory.places[i])

    def put(self, i: int, gradient: Any, stats: bool, weight: Weight | None = None, owned: bool = False) -> int:
        """Copy the gradient of leaf i of the bucket, or keep it if it is `owned`: nothing else has it. Return how many
        elements are inf or NaN, as they travel and times the weight, if they are counted.
        """
        leaf = self.layout.leaves[i]
        if self.has[i] or i in self.kept:
            raise ValueError(
                f"Reducer: {leaf.name} got a second gradient: open accumulate() anew, or call at(), for each pass; and"
                " torch.utils.checkpoint, which runs passes of its own, needs use_reentrant=False"
            )
        if not self.is_open:  # the caller refuses the gradient
            return 0
        if owned and not stats:
            self.given = bytes_of(gradient, leaf)
            if self.given is not None:
                return 0
        place = self.take_memory().places[i]
        if not stats and _core.copy_plain(gradient, place):
            return 0
        facts = None
        if not stats and is_torch(gradient):
            facts = gradient.dtype, gradient.shape, gradient.layout, gradient.device
            if facts == self.fitting.get(i):
                tensor: Any = gradient
                try:
                    if _core.copy_plain(tensor.numpy(), place):
                        return 0
                except (RuntimeError, TypeError):  # a view with torch's negative bit; a dtype that NumPy has not
                    pass
                _core.add_n([gradient], out=place)
                return 0
        dtype = _core.dtype_name(gradient.dtype) if hasattr(gradient, "dtype") else leaf.dtype
        shape = tuple(getattr(gradient, "shape", leaf.shape))
        if shape != leaf.shape or dtype != leaf.dtype:
            raise ValueError(
                f"Reducer: {leaf.name}: expected {leaf.dtype} of shape {leaf.shape}, got {dtype} of shape {shape}"
            )
        if not leaf.size:
            return 0
        try:
            done = _core.add_n([host(gradient)], out=place, stats=stats)
        except TypeError as e:
            raise TypeError(f"Reducer: {leaf.name}: cannot copy its gradient, {type_of(gradient)}: {e}") from e
        self.rows.note(i, leaf, gradient)
        if not stats:
            if facts is not None and gradient.device.type == "cpu" and str(gradient.layout) == "torch.strided":
                self.fitting[i] = facts
            return 0
        travels = rounded(place, leaf, self.wire)
        if weight is not None:
            done = _core.add_n([travels], weights=[weight], stats=True)
        elif travels is not place:
            done = _core.add_n([travels], stats=True)
        nonfinite: int = done[1].nonfinite
        return nonfinite

    def finish(self, key: int | None, alone: bool = False) -> None:
        """The contribution is complete. alone: it is the sum, and the gradients that were kept stay as they are."""
        self.gate.clear()
        for i in list(self.kept):
            if not alone:
                self.put(i, self.kept.pop(i), False)
            self.has[i] = 1
        is_whole = 0 not in self.has
        memory = _Memory([self.given], []) if self.given is not None else self.take_memory()
        for segment in () if is_whole or alone else self.layout.segments:
            for leaf, _, _ in segment.places:
                if not self.has[leaf]:
                    segment.leave_out(memory.places[leaf])
        self.terms.append(Term(list(memory.flats), key, self.weight))
        self.masks.append(self.every if is_whole else bits_of(self.has))
        if self.given is None:
            self.used[len(self.terms) - 1] = memory
        self.memory = self.given = None
        self.is_open = False

    def settle(self, order: Order | None) -> None:
        """Add the contribution to the running sums, so that its memory is free."""
        term = self.terms[-1]
        for i, segment in enumerate(self.layout.segments):
            if order == "exact" and is_inexact(segment.dtype):
                self.partials.setdefault(i, sums.ExactSum(segment)).wait(term.flats[i], term.weight)
                term.flats[i] = sums.NOTHING
            elif sums.folds(order, segment):
                self.fold(i, segment)
        for one in self.partials.values():
            one.settle()
        self.recycle()

    def fold(self, i: int, segment: Segment) -> None:
        """Add the contribution to a fold, if there is one before: a rank's only contribution travels as it is."""
        if len(self.terms) < 2:
            return
        fold = self.folded.setdefault(i, sums.Fold(segment))
        pending = self.terms[fold.count :]
        if not pending:
            return
        took = fold.add([term.flats[i] for term in pending], [term.weight for term in pending])
        if took:
            self.used.pop(0, None)
        for term in pending:
            term.flats[i] = sums.NOTHING

    def recycle(self) -> None:
        """Keep the memory of one term that is in running sums, and drop that of others."""
        for k in [*self.used]:
            if not any(map(len, self.terms[k].flats)):
                memory = self.used.pop(k)
                self.spare = self.spare or memory

    def overflow(self, order: Order | None) -> tuple[int, int] | None:
        """A leaf of which this rank's fold has inf or NaN when it is rounded for its way, and in how many elements."""
        folds = order not in ("key", "exact") and len(self.terms) > 1
        for i, segment in enumerate(self.layout.segments if folds else ()):
            codec = sent_codec(segment)
            if codec is None:
                continue
            self.fold(i, segment)
            fold = self.folded[i]
            assert fold.total is not None
            travels = typed(codec.rounded(fold.total, fold.dtype), fold.dtype)
            for leaf, start, stop in segment.places:
                nonfinite = _core.add_n([travels[start:stop]], stats=True)[1].nonfinite if start < stop else 0
                if nonfinite:
                    return leaf, nonfinite
        return None

    def places_of_results(self, options: Options, rank: int, like: Any) -> dict[int, NDArray]:
        """Where the sums of segments are made: in an ndarray that becomes .grad."""
        if not self.is_single or options.into not in ("all", rank) or is_tensor(like):
            return {}
        if self.layout.segments[0].wire_out is not None:  # what comes is widened into another array
            return {}
        leaf = self.layout.leaves[0]
        self.result = np.empty(leaf.shape, typed(sums.NOTHING, leaf.dtype).dtype)
        return {0: self.result.reshape(-1).view(np.uint8)}

    def sent(self, group: Group, options: Options, counts: Counted | Passes) -> Sent:
        """The messages to the owners; `counts`: the weights of this rank."""
        for i, segment in enumerate(self.layout.segments if self.terms else ()):
            last = self.terms[-1]
            if options.order == "exact" and is_inexact(segment.dtype):
                settled = not len(last.flats[i])
                packs = i in self.partials or sums.must_pack(self.terms, segment, options, group)
                if packs and not settled:
                    self.partials.setdefault(i, sums.ExactSum(segment)).wait(last.flats[i], last.weight)
            elif sums.folds(options.order, segment):
                self.fold(i, segment)
        weigh = sums.weighed(self.terms, counts, options, self.partials)
        packed = sums.packed(group, self.layout, options, self.partials)
        return Sent(self.terms, packed, weigh, self.folded, self.rows.found(self.masks))

    def again(self, call: Call, plan: BucketPlan, reducer: Reducer) -> bool:
        """Make the sum of one contribution of each rank as the last one was made; return whether all ranks can."""
        plain = plan.plain
        if plain is None or not plain.sends or plain.is_general or 0 in self.has or self.terms or self.kept:
            return False
        if self.weight is not None or self.bad or self.rows.rows:
            return False
        term = self.take_memory().flats[0] if self.given is None else self.given
        keys = plain.meet(call, [term], reducer._key)
        if keys is None:
            self.plan, self.missed = None, True
            return False
        self.is_open, self.is_planned, self.anywhere = False, True, plan.anywhere
        self.headers = headers = plan.headers if keys is plain.no_keys else plan.headers_of(keys)
        place = None
        if self.is_single:
            like = reducer.leaves[self.indices[0]].array
            place = self.places_of_results(reducer._options, call.group.rank, like).get(0)
        self.total = plan.of_terms(call, plain, term, headers, place)
        return True

    def meet(self, call: Call, sent: Sent, own: str, ended: bool) -> Sequence[Header]:
        """The headers of all ranks, by a plan if all have the same one. own: the digest of the reducer; ended: nothing
        can fail on this rank any more before the sum.
        """
        has = f"{reduce(operator.or_, self.masks, 0):x}"
        self.is_planned = False
        mine = None if self.bad else brought(call, sent, has, ended)
        if self.plan is not None:
            headers = self.plan.meet(call, sent) if mine is not None and mine == self.brought else None
            if headers is not None:
                self.is_planned, self.anywhere = True, self.plan.anywhere
                return headers
            self.missed = True
        self.plan, self.brought = None, mine
        return call.meet({**sent.header, "has": has, "bad": self.bad, "ended": ended}, digest=own)

    def keep_plan(self, call: Call, options: Options, before: Sequence[Header] | None, own: str) -> None:
        """Plan a sum like this one, which ended well. After a plan that some rank did not have it is made when the
        headers are alike twice, so that headers that change cost no message more. before: those of the sum before.
        """
        assert self.headers is not None
        if self.brought is None or not can_be_planned(self.headers):
            return
        if self.missed and (before is None or facts_of(before) != facts_of(self.headers)):
            return
        self.missed = False
        self.plan = BucketPlan(call, self.layout, options, self.headers, own, self.brought)


def bits_of(flags: bytearray) -> int:
    """Bytes that are 0 or 1 as bits, the first one lowest."""
    return int.from_bytes(np.packbits(np.frombuffer(flags, np.uint8), bitorder="little").tobytes(), "little")


def bytes_of(gradient: Any, leaf: Leaf) -> NDArray | None:
    """The memory of a gradient, as bytes; None if it is not as a contribution lies in a bucket."""
    raw = flat_bytes(gradient)
    if raw is None or not raw.flags.writeable:  # a running sum may be made in it
        return None
    fits = tuple(gradient.shape) == leaf.shape and _core.dtype_name(gradient.dtype) == leaf.dtype
    return raw if fits else None


class Reducer(_core.Block):
    """Sums the gradients of leaves over ranks while a backward pass runs.

    `fanin.backward(roots, reducer=reducer)` is one pass. So is a `with` block of the reducer, in which one backward
    pass of torch runs: `with reducer: loss.backward()`; or several passes, each of which reaches other leaves. The sums
    travel while the pass runs, and are added to `.grad` at its end. If the block raises, no rank's `.grad` changes.

    Every rank makes it with the same leaves, in the same order, and the same options.

    It has buckets, and a thread from its first pass on. They end with its last reference, or by `close()`; not at the
    end of a `with` block, which is a pass.

    Parameters
    ----------
    leaves : sequence of fanin.Leaf, of parameters of fanin.tape or torch, or of (str, torch.Tensor)
        The last ones travel first. Arrays are on the CPU; gradients of CUDA tensors are copied to it. Tensors that
        require no gradient are skipped. `fanin.torch.accumulate(group=)` makes the reducer itself.
    group : optional
        A group, or what `fanin.dist.group` accepts.
    order : "key", "exact" or "rank", optional
        As for `fanin.dist.add_n`. Default: "key" if no rank has more than one contribution, else "rank".
    bucket_bytes : int
        Bytes of gradients that travel together. The bits do not depend on it.
    into : "all", "shard" or int
        "all": every rank's `.grad` gets the sum. "shard": `shards` has each leaf's elements that this rank owns, and no
        `.grad` changes. A rank: its `.grad` alone gets it.
    missing : "error" or "skip"
        Whether a leaf with a gradient on some ranks only is an error on every rank, or is summed over those ranks. With
        "error" a pass also raises ValueError if no leaf has a gradient, and `fanin.backward(reducer=)` for a tensor
        without one, which it does not reach.
    scale : number, optional
        Multiplies each sum, or mean, before the rounding.
    wire, wire_out : DTypeLike, optional
        The narrower dtypes as which gradients and sums travel, as for `fanin.dist.add_n`. The bits depend neither on
        the buckets nor, unless order="rank", on the number of ranks.
    mean : bool
        Divide each sum by that of the weights of all contributions of all ranks (`fanin.backward(reducer=, weight=)`,
        `accumulate(weight=)`, `at(key, weight=)`; without them 1), of those too that have no gradient of a leaf. It is
        added to an earlier `.grad`.
    detect : bool
        A gradient with an inf or NaN, or that has one when it is rounded to `wire`, ends the pass: FloatingPointError
        on its rank, and on the others a PeerError with rank and leaf. `fanin.backward(detect=True)` names the node that
        made it, too.
    stats : bool
        Count the inf and NaN of each contribution, so that `stats()` names the first bad one.
    timeout : float or "group", optional
        Seconds after which a rank no longer waits for another. None: it waits without a limit. Default: the group's.

    Raises
    ------
    TypeError, ValueError
        For leaves or options that do not fit.
    RuntimeError
        In a `with` block of the reducer: another pass of the same group runs on this thread or another.
    fanin.PeerError
        At the end of a pass: another rank raised, is gone, or brings something else.
    ZeroDivisionError
        At the end of a pass, on every rank, whose `.grad` do not change: `mean`, and all weights sum to 0.

    >>> def train(group):
    ...     w = fanin.Leaf(np.zeros(2), name="w")
    ...     reducer = fanin.dist.Reducer([w], group, order="exact")
    ...     fanin.backward([(w, 0, np.array([1.0, group.rank]))], reducer=reducer)
    ...     return w.grad, reducer.norm()
    >>> fanin.dist.threads(3, train)[2]
    (array([3., 3.]), 4.242640687119285)
    """

    __slots__ = (
        "__weakref__",
        "_are_arrays",
        "_bad",
        "_blocks",
        "_buckets",
        "_closed",
        "_collectors",
        "_copies",
        "_count_bad",
        "_counted",
        "_digest",
        "_each",
        "_ended",
        "_ends",
        "_error",
        "_failed",
        "_frozen",
        "_holder",
        "_in_block",
        "_is_complete",
        "_keeps",
        "_key",
        "_lock",
        "_name",
        "_options",
        "_parts",
        "_passes",
        "_passing",
        "_refused",
        "_sender",
        "_sends_at_end",
        "_sent",
        "_takers",
        "_takes",
        "_taking",
        "_tensors",
        "_timeout",
        "_travels",
        "_turn",
        "_unentered",
        "_weight",
        "detect",
        "group",
        "leaves",
        "missing",
        "shards",
    )

    @names_nearest
    def __init__(
        self,
        leaves: Iterable[Any],
        group: object = None,
        *,
        order: Order | None = None,
        bucket_bytes: int = 25 << 20,
        into: Into = "all",
        missing: Literal["error", "skip"] = "error",
        scale: complex | None = None,
        mean: bool = False,
        wire: DTypeLike | None = None,
        wire_out: DTypeLike | None = None,
        detect: bool = False,
        stats: bool = False,
        timeout: TimeLimit = "group",
    ) -> None:
        self.group: Group = group if isinstance(group, Group) else group_of(group)
        self._frozen: list[tuple[Any, Any]] = []  #: names, and tensors that required no gradient
        self.leaves = _leaves(leaves, self._frozen)
        self._tensors = [leaf for leaf in self.leaves if not isinstance(leaf, _core.Leaf)]
        self._taking: Any = None
        if self._tensors:
            from fanin._interop.torch_leaves import Taking

            self._taking = Taking("Reducer", [t.tensor for t in self._tensors], [t.name for t in self._tensors])
        self.missing = missing
        self.detect = detect = flag("Reducer: detect", detect)
        self._count_bad = stats = flag("Reducer: stats", stats)
        self._bad: BadTerm | None = None  #: of the last pass: the first by key, or by rank and contribution; then leaf
        self.shards: list[Any] = [None] * len(self.leaves)  #: with into="shard": of each leaf the elements owned here
        sent_as, returned_as = names_of("Reducer", wire, wire_out)
        mean = flag("Reducer: mean", mean)
        self._options = Options(order, scale, into, mean=mean, wire=sent_as, wire_out=returned_as)
        self._options.check("Reducer", self.group.size)
        if not isinstance(missing, str) or missing not in ("error", "skip"):
            raise ValueError(f'Reducer: expected missing="error" or "skip", got {missing!r}')
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"Reducer: expected a positive number of bucket_bytes, got {bucket_bytes!r}")
        if len({id(getattr(leaf, "tensor", leaf)) for leaf in self.leaves}) < len(self.leaves):
            raise ValueError("Reducer: expected each leaf once")
        limit_of("Reducer", timeout, None)  # refused before a pass
        self._timeout = timeout
        specs = [_declared(leaf, leaf.name or f"leaf {i}") for i, leaf in enumerate(self.leaves)]
        groups: list[list[int]] = []
        room = 0
        for i in range(len(specs) - 1, -1, -1):
            n = specs[i].size * itemsize(specs[i].dtype)
            if not groups or n > room:
                groups.append([])
                room = bucket_bytes
            groups[-1].append(i)
            room -= n
        layouts = [self._options.layout([specs[i] for i in g], self.group.size) for g in groups]
        self._buckets = made = [
            _Bucket(b, g, layout, sent_as, bool(self._tensors))
            for b, (g, layout) in enumerate(zip(groups, layouts, strict=True))
        ]
        for bucket in made:
            self._options.check_dtypes(bucket.layout, "Reducer")
        #: A bucket alone travels when the pass has ended, on its thread. So its header says that no rank failed.
        self._sends_at_end = len(made) == 1 and sum(leaf.size * itemsize(leaf.dtype) for leaf in specs) <= SMALL
        self._parts = [["", f"{self._options.text}, missing={self.missing!r}, {len(made)} buckets"]]
        self._parts += [part for bucket in made for part in bucket.layout.parts]
        self._digest = digest(self._parts)
        mine = weakref.ref(self)  # a reference in a cycle would keep its memory and its thread until a collection
        takers = {i: (partial(_put_of, mine, b, k), b, k) for b in made for k, i in enumerate(b.indices)}
        #: For a leaf alone in its bucket: the same for a gradient that nothing else has.
        owners = {i: partial(take, owned=True) for i, (take, b, _) in takers.items() if b.is_single}
        #: Of each leaf of fanin what takes its sums, and what takes them from a rank alone.
        self._takers = [
            (leaf, (take, None, k, owners.get(i)), (take, b.kept, k, None))
            for i, leaf, (take, b, k) in ((i, leaf, takers[i]) for i, leaf in enumerate(self.leaves))
            if isinstance(leaf, _core.Leaf)
        ]
        self._collectors = [
            leaf.collector(takers[i][0], owners.get(i), takers[i][1].gate, takers[i][2])
            for i, leaf in enumerate(self.leaves)
            if not isinstance(leaf, _core.Leaf)
        ]
        #: On a rank alone the only contribution is the sum: a gradient is not copied if nothing else has it. An exact
        #: sum makes signaling NaNs quiet.
        plain = scale is None and not mean and order != "exact" and into != "shard" and not (detect or stats)
        as_it_is = wire is None and wire_out is None
        self._keeps = self.group.size == 1 and plain and as_it_is
        self._key: int | None = None
        self._are_arrays = all(type(leaf.array) is np.ndarray for leaf in self.leaves)
        self._copies = not (detect or stats)  # most gradients are copied, and that is all
        self._unentered = False  # accumulate() was called, and not entered
        self._weight: Weight | None = None  # of the contribution at hand, or of the next one; None: 1
        self._counted = Counted()  # the weights of the contributions to the next sum
        self._passes: Passes | None = (
            None  # of a block of fanin.torch.accumulate, whose passes have weights of their own
        )
        self._takes = False  # gradients go to the buckets
        self._each = False  # gradients of several passes come: a second one of a leaf begins a contribution
        self._name = "backward"
        self._lock = threading.Lock()  # of what buckets have; held by no thread that waits
        self._in_block = False  # the pass is a `with` block of the reducer, whose passes may reach every leaf
        self._blocks: dict[int, _Pass] = {}  # by thread: the last such block
        self._refused: set[int] = set()  # threads that tried to begin another one inside
        self._travels: list[tuple[int, int]] = []  # when each bucket's data began and ended to travel
        self._turn = 0  # passes so far ..
        self._ended, self._sent = _core.EventCount(), _core.EventCount()  # .. that ended on this rank, and the sender's
        self._passing = False
        self._is_complete = False  # all gradients of the pass came before it began, so that nothing can fail in it
        self._ends: Agreed | None = None  # what the end of a pass sends
        self._error: BaseException | None = None  # by which the pass ended here
        self._failed: BaseException | None = None  # .. or its sums
        self._sender = Sender(self, "fanin.dist")
        self._closed = False
        self._holder: dict[str, _core.Block] = {}  #: "now": what has diverted the leaves

    def close(self) -> None:
        """End the reducer's thread, and free its buckets. Closing it twice does nothing.

        A pass after it is a RuntimeError on this rank, and a PeerError on the others; `explain` and `norm` still work.
        The end of its last reference closes it, too. `with reducer:` is a pass, and does not close it.

        Raises
        ------
        RuntimeError
            Inside a pass of the reducer.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(2), name="w")
        ...     reducer = fanin.dist.Reducer([w], group)
        ...     fanin.backward([(w, 0, np.ones(2))], reducer=reducer)
        ...     reducer.close()
        ...     return w.grad
        >>> fanin.dist.threads(2, train)[0]
        array([2., 2.])
        """
        if "now" in self._holder or self._passing:
            raise RuntimeError("Reducer: close() inside a pass of the reducer: call it after the pass")
        self._closed = True
        self._sender.close()
        for bucket in self._buckets:
            bucket.free()

    def at(self, key: int | None, weight: float | None = None) -> Self:
        """Set the key of the next pass's contribution (order="key") and its weight, and return the reducer."""
        number = None if key is None else sums.check_keys([key], 1)[0]
        self._weight = self._weight_of("at", weight)
        self._key = number
        return self

    def _weight_of(self, call: str, weight: float | None) -> Weight | None:
        return None if weight is None else weight_of(f"Reducer: {call}", weight, self._sums_run_in())

    def _sums_run_in(self) -> list[str]:
        """The dtypes in which weights are rounded."""
        if self._options.order == "exact":
            return []
        dtypes = {segment.dtype for bucket in self._buckets for segment in bucket.layout.segments}
        return sorted(map(accumulation, dtypes))

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _begin(self) -> Self:
        thread = threading.get_ident()
        last = self._blocks.get(thread)
        if last is not None and last.is_ours():
            self._refused.add(thread)
            raise RuntimeError("Reducer: this thread is inside a pass of the same reducer: expected it to end first")
        self._blocks[thread] = one = self._reduced(block=True)
        one._begin()
        return self

    def _end(self, error: BaseException | None) -> None:
        thread = threading.get_ident()
        if thread in self._refused:
            self._refused.discard(thread)
            return
        one = self._blocks.get(thread)
        if one is not None:
            one._end(error)
        elif error is None:
            raise RuntimeError("Reducer: __exit__ without __enter__ on this thread")

    # ---- contributions

    def _divert(self, holder: _core.Block) -> None:
        """The leaves' sums go to the buckets until `_undivert(holder)`."""
        if self._closed:
            raise RuntimeError("Reducer: it was closed by close(): make a new one for this pass")
        for name, tensor in self._frozen:
            if tensor.requires_grad:
                raise RuntimeError(
                    f"Reducer: {name} required no gradient when it was given, and requires one now: make the reducer"
                    " anew"
                )
        if self._holder.setdefault("now", holder) is not holder:
            name = self.leaves[0].name or "leaf 0"
            raise ValueError(
                f"Reducer: the gradient of {name} is collected by another block already, of the same reducer: expected"
                " that to end first"
            )
        self._takes = True
        _core.leaves_divert(self._takers, self._keeps and self._weight is None)
        if self._taking:
            self._taking.begin(self._collectors)

    def _undivert(self, holder: _core.Block) -> None:
        """The leaves' sums go to .grad again. May be repeated, and come without `_divert`, or amid it."""
        if self._holder.get("now") is not holder:
            return
        with self._lock:
            self._takes_no_more()
        _core.leaves_undivert(self._takers)
        if self._taking:
            self._taking.end()
        del self._holder["now"]

    def _takes_no_more(self) -> None:
        """The buckets refuse gradients. May be repeated."""
        self._takes = False
        for bucket in self._buckets if self._each else ():
            bucket.gate.clear()

    def _check_grads(self) -> None:
        """RuntimeError if a .grad was set while the leaves' sums went to the buckets."""
        if self._taking:
            self._taking.check()

    def _of_another(self, bucket: _Bucket, i: int) -> RuntimeError:
        now = self._holder.get("now")
        if isinstance(now, _Collecting) and now.last is not None and not self._takes:
            return RuntimeError(
                f"accumulate: {bucket.layout.leaves[i].name} got a gradient after last(), whose end has summed all"
                " gradients: run this pass before it, or in another block"
            )
        when = "during the reducer's pass" if self._takes and not self._each else "after the end"
        return RuntimeError(
            f"Reducer: {bucket.layout.leaves[i].name} got a gradient {when}, of a pass in another thread: join the"
            " thread before"
        )

    def _put(self, bucket: _Bucket, i: int, gradient: Any, owned: bool = False) -> None:
        nonfinite, weight, ours = 0, self._weight, _inside.get() is self
        if self._passing and not ours and not _on_device_thread(gradient):
            raise self._of_another(bucket, i)
        if self._passes is not None:
            weight = self._passes.weight_here(gradient) if self._passes.now else None
            if self._passing:
                self._passes.freeze("a gradient came in last()")
        if self._copies and self._taking is None and bucket.put_plain(i, gradient, weight):
            pass
        elif self._taking is None:  # one pass of fanin's engine: workers copy gradients of several leaves at once
            nonfinite = self._copy(bucket, i, gradient, weight, owned)
        with self._lock:
            # A pass may have begun while this thread waited.
            if not self._takes or (self._passing and not ours and not _on_device_thread(gradient)):
                raise self._of_another(bucket, i)
            if self._taking is not None:
                bucket.gate.clear()  # while this thread copies, no other one may
                another = bucket.has[i] or (bucket.weight != weight and bucket.begun)
                if another and self._each and self._key is None:
                    self._contribute(bucket)
                nonfinite = self._copy(bucket, i, gradient, weight, owned)
            bucket.has[i] = 1
            if nonfinite:
                one = [len(bucket.terms), i, nonfinite]
                bucket.bad = min(bucket.bad or one, one)
            whole = 0 not in bucket.has
            if self._each and self._copies and not self._passing and self._passes is not None:
                bucket.open_gate(self._passes.now)
        if whole and self._passing:
            bucket.closed.advance()

    def _copy(self, bucket: _Bucket, i: int, gradient: Any, weight: Weight | None, owned: bool) -> int:
        if bucket.weight != weight and bucket.begun:
            raise ValueError(
                f"Reducer: {bucket.layout.leaves[i].name}: a contribution has one weight: expected"
                f" {_weight_text(bucket.weight)}, got {_weight_text(weight)}"
            )
        nonfinite = bucket.put(i, gradient, self.detect or self._count_bad, weight, owned)
        bucket.weight = weight
        if nonfinite and self.detect:
            raise self._nonfinite(bucket.layout.leaves[i].name, nonfinite)
        return nonfinite

    def _contribute(self, bucket: _Bucket) -> None:
        """The bucket's contribution is complete: begin the next one."""
        if bucket.begun:
            bucket.finish(self._key)
            bucket.settle(self._options.order)
            bucket.start()

    def _contribute_all(self, key: int | None) -> None:
        """.. of all buckets; the next one has this key."""
        for bucket in self._buckets:
            self._contribute(bucket)
        self._key = key

    def accumulate(self, key: int | None = None, *, weight: float | None = None) -> AbstractContextManager[None]:
        """The pass inside is one more contribution of this rank to the next sum; nothing travels.

        If it raises, the next sum's pass ends at once, on every rank. A call without its `with` is an error of the next
        sum's pass.

        Parameters
        ----------
        key : int, optional
            The key of the contribution.
        weight : number, optional
            A finite real number that multiplies its gradients before they are added. Default: 1.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(2))
        ...     reducer = fanin.dist.Reducer([w], group, order="exact")
        ...     with reducer.accumulate():
        ...         fanin.backward([(w, 0, np.array([1.0, 1.0]))])
        ...     fanin.backward([(w, 0, np.array([1.0, 1.0]))], reducer=reducer)
        ...     return w.grad
        >>> fanin.dist.threads(2, train)[0]
        array([4., 4.])
        """
        if key is not None or weight is not None:
            self.at(self._key if key is None else key, weight)
        number, weighs = self._key, self._weight
        self._key = self._weight = None
        self._unentered = True
        return _Contribution(self, number, weighs)

    def _reset(self, keep: bool = True) -> None:
        self._error, self._failed, self._key, self._weight = None, None, None, None
        self._is_complete = False
        self._counted.clear()
        for bucket in self._buckets:
            bucket.reset(keep)

    # ---- a pass

    def _reduced(self, block: bool = False, weight: float | None = None) -> _Pass:
        """The pass of a call of fanin.backward, which calls this; or of a block, with passes of any engine."""
        return _Pass(self, block, weight)

    def _made(self, ended: int) -> list[Any]:
        """For each leaf the sum of the pass, which came to its end at the time `ended`, or None."""
        if self._travels:
            self.group._tally.hidden_ns += sum(max(0, min(end, ended) - begin) for begin, end in self._travels)
        self._bad = None
        for bucket in self._buckets:
            if not bucket.is_planned:
                self._bad = self._first_bad()
                break
        into = self._options.into
        if into != "all" and into not in ("shard", self.group.rank):
            return [None] * len(self.leaves)
        first = self._buckets[0]
        if len(self._buckets) == 1 and first.total is not None and first.anywhere == first.every:
            return self._pieces(first, first.total)[::-1]  # it has the leaves from the last one to the first
        made: list[Any] = [None] * len(self.leaves)
        for bucket in self._buckets:
            if bucket.total is None:
                continue
            pieces = self._pieces(bucket, bucket.total)
            anywhere = f"{bucket.anywhere:b}"[::-1].ljust(len(bucket.indices), "0")
            for index, piece, has in zip(bucket.indices, pieces, anywhere, strict=True):
                if has == "1":
                    made[index] = piece
        return made

    def _first_bad(self) -> BadTerm | None:
        """The first contribution of the pass with an inf or NaN."""
        found: list[tuple[tuple[int, ...], BadTerm]] = []
        for bucket in self._buckets:
            for rank, h in enumerate(() if bucket.is_planned else bucket.headers or ()):
                if h["bad"]:
                    place, i, elements = h["bad"]
                    key = h["keys"][place]
                    term = BadTerm(rank, bucket.layout.leaves[i].name, elements, place, key)
                    found.append(((-1 if key is None else key, rank, place, bucket.indices[i]), term))
        return min(found, key=operator.itemgetter(0))[1] if found else None

    def _pieces(self, bucket: _Bucket, flats: list[NDArray]) -> list[Any]:
        """Of each leaf of a bucket the sum, or this rank's shard of it."""
        if bucket.result is not None:
            pieces, bucket.result, bucket.total = [bucket.result], None, None  # .grad takes the only reference
            return pieces
        kept = bucket.kept
        if len(kept) == len(bucket.indices):
            return list(map(kept.__getitem__, range(len(kept))))
        if self._options.into == "shard":
            like = [self.leaves[i].array for i in bucket.indices]
            return bucket.layout.shards(flats, self.group.rank, like)
        if self._are_arrays:
            pieces = bucket.layout.arrays(flats)
        else:
            pieces = bucket.layout.unflatten(flats, [self.leaves[i].array for i in bucket.indices])
        for i, gradient in kept.items():
            pieces[i] = gradient
        return pieces

    def _check_reached(self) -> None:
        """At the end of a pass: ValueError if no leaf has a gradient, or a tensor has none in a fanin.backward."""
        for bucket in self._buckets:
            if bucket.closed.value < self._turn:
                break
        else:  # every leaf has its gradient
            return
        lack: list[int] = []
        for bucket in self._buckets:
            lacking = bucket.lacking()
            if lacking:
                lack += (i for k, i in enumerate(bucket.indices) if lacking >> k & 1)
        tensors = [] if self._in_block else [i for i in lack if not isinstance(self.leaves[i], _core.Leaf)]
        if tensors:
            raise ValueError(
                f"backward: {self.leaves[tensors[0]].name} of the reducer is a tensor and has no gradient: run all"
                ' passes in `with reducer:`, or torch\'s in `with reducer.accumulate():` before, or give missing="skip"'
            )
        if len(lack) == len(self.leaves):
            raise ValueError(
                f"{'Reducer' if self._in_block else 'backward'}: no leaf of the reducer has a gradient: make it of the"
                ' leaves of this graph, or give missing="skip"'
            )

    # ---- fanin.torch.accumulate

    def _collect(self, passes: Passes) -> _Collecting:
        """A block in which gradients of any number of passes come, on any thread; its end sums them over ranks."""
        self._each, self._name, self._taking.call = True, "accumulate", "accumulate"
        self._ends = None
        self._passes = passes
        return _Collecting(self)

    def _rest(self) -> None:
        """Let the parameters and the group go, until `_wake`."""
        for leaf in self._tensors:
            leaf.rest()
        self._passes = None
        self._taking.parameters = []
        del self.group

    def _fits(self, parameters: list[Any]) -> bool:
        """Whether nothing of the parameters has changed that a reducer at rest was made of."""
        from fanin._interop.torch_leaves import facts_of

        return all(leaf.facts == facts_of(p) for leaf, p in zip(self._tensors, parameters, strict=True))

    def _wake(self, group: Group, parameters: list[Any]) -> None:
        """Take the same parameters and group again."""
        for leaf, p in zip(self._tensors, parameters, strict=True):
            leaf.wake(p)
        self._taking.take(parameters)
        self.group = group

    def _collect_at(self, key: int) -> None:
        """The gradients that come next have this key."""
        number = sums.check_keys([key], 1)[0]
        with self._lock:
            self._contribute_all(number)

    def _fail(self, error: BaseException) -> None:
        """End the pass of every rank with this rank's error, on this thread, which uses the group."""
        self.group._passes += 1
        self._turn += 1
        self._pass_ended(error)
        try:
            self._send(self.group._passes)
        except RuntimeError:
            pass  # this rank raises its own error
        finally:
            self._sent.advance()

    def _pass_ended(self, error: BaseException | None, again: bool = False) -> None:
        """No gradient comes any more: all buckets are closed. again: some may have been closed so before."""
        self._passing, self._error = False, error
        if not again or self._ended.value < self._turn:
            self._ended.advance()  # before buckets: the sender reads the error when they are closed
        for bucket in self._buckets:
            if bucket.closed.value < self._turn:
                bucket.closed.advance()

    # ---- on the sending thread

    def _send(self, number: int) -> None:
        """Sum all buckets, in their order on every rank; then agree that no rank failed, which is known of a small one
        alone.
        """
        at_end = self._sends_at_end or self._is_complete
        limit = self.group.timeout
        if self._timeout != "group":
            limit = limit_of(self._name, self._timeout, limit)
        for bucket in self._buckets:
            failed = self._error if at_end else self._until(bucket)
            with Call(self.group, self._name, number, bucket.number, limit) as call:
                if failed is not None:
                    call.meet({}, failure=failure_of(failed))
                self._sum(call, bucket)
            if not at_end:
                self._travels.append(call.data_ns)
        if self._sends_at_end or self._have_ended():
            return
        failed = self._until(None)
        with Call(self.group, self._name, number, len(self._buckets), limit) as call:
            call.title = "pass end"
            if self._ends is None:
                self._ends = Agreed((call.title, call.name, self._digest))
            if failed is not None or self._ends.meet(call) is None:
                call.meet({}, failure=None if failed is None else failure_of(failed))

    def _have_ended(self) -> bool:
        """Whether by the last bucket the pass had ended on every rank."""
        headers = self._buckets[-1].headers
        return headers is not None and all(h["ended"] for h in headers)

    def _until(self, bucket: _Bucket | None) -> BaseException | None:
        """Wait until a bucket is closed (None: until the pass has ended), and return this rank's error."""
        (self._ended if bucket is None else bucket.closed).wait(self._turn)
        return self._error if self._ended.value >= self._turn else None

    def _sum(self, call: Call, bucket: _Bucket) -> None:
        begin = time.monotonic_ns()
        plan = bucket.plan
        has_one = self._passes is None and self._counted.weights == [None]  # contribution, and that without a weight
        if has_one and plan is not None and plan.whole == (call.name, self._is_complete):
            call.trace("pack", begin)
            if bucket.again(call, plan, self):
                return
        alone = self._keeps and not bucket.terms and bucket.weight is None
        if bucket.begun:
            bucket.finish(self._key, alone)
        if self.detect:
            self._check_fold(bucket)
        sent = bucket.sent(self.group, self._options, self._passes or self._counted)
        call.trace("pack", begin)
        before = bucket.headers
        headers = bucket.meet(call, sent, self._digest, self._is_complete)
        if not bucket.is_planned:
            self._compare(call, bucket, headers)
        bucket.headers = headers
        if alone and bucket.terms:
            bucket.total = bucket.terms[0].flats
            if len(bucket.kept) < len(bucket.has):
                bucket.used.clear()  # .grad may become a view of it
        elif bucket.anywhere:
            like = self.leaves[bucket.indices[0]].array
            places = bucket.places_of_results(self._options, self.group.rank, like)
            if bucket.plan is not None:
                bucket.total = bucket.plan.sum(call, sent, headers, places)
            else:
                bucket.total = sums.summed(call, bucket.layout, sent, list(headers), self._options, places)
        if not bucket.is_planned:
            bucket.keep_plan(call, self._options, before, self._digest)
        bucket.forget()

    def _compare(self, call: Call, bucket: _Bucket, headers: Sequence[Header]) -> None:
        """Raise an error on every rank if headers of a bucket do not fit."""
        call.compare(list(headers), self._parts)
        bucket.headers = headers
        has = [int(h["has"], 16) for h in headers]
        bucket.anywhere = reduce(operator.or_, has)
        lacking = bucket.anywhere & ~reduce(operator.and_, has)
        if self.missing == "error" and lacking:
            i = (lacking & -lacking).bit_length() - 1
            name = bucket.layout.leaves[i].name
            with_it = [r for r, mask in enumerate(has) if mask >> i & 1]
            without = [r for r in range(len(has)) if r not in with_it]
            raise call.refuse(
                f"{name} has a gradient on ranks {with_it} and none on ranks {without}: expected it on all or none, or"
                " missing='skip'",
                without[0],
                name,
            )

    def _check_fold(self, bucket: _Bucket) -> None:
        """Raise FloatingPointError if this rank's fold overflows in the dtype as which it travels."""
        found = bucket.overflow(self._options.order)
        if found is not None:
            leaf, nonfinite = found
            name = bucket.layout.leaves[leaf].name
            raise self._nonfinite(name, nonfinite, f" in this rank's fold as {self._options.wire}")

    def _nonfinite(self, name: str, elements: int, where: str = "") -> FloatingPointError:
        bad = FloatingPointError(f"Reducer: {name}: {counted(elements, 'element')} inf or NaN{where}")
        bad.leaf = name  # type: ignore[attr-defined]
        return bad

    # ---- what is known of the sums

    def explain(self, which: Any) -> str:
        """Sentences, with the numbers of the rules, about a bucket: who owns its elements, whose terms are summed in
        which order, what travelled as which type, with bytes. Of the last pass; no message is sent.

        Parameters
        ----------
        which : int, or a leaf
            The number of a bucket, or one of the leaves, of which only the elements are explained.

        Raises
        ------
        IndexError, ValueError
            For a bucket that does not exist, or a leaf that is not the reducer's.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(300, "f4"), name="w")
        ...     reducer = fanin.dist.Reducer([w], group)
        ...     fanin.backward([(w, 0, np.ones(300, "f4"))], reducer=reducer)
        ...     return reducer.explain(w)
        >>> print(fanin.dist.threads(2, train)[0])
        bucket 0 of 1: w: 300 elements, 1.172 KiB.
        w, float32: rank 0 owns elements 0 to 255, rank 1 owns elements 256 to 299 (N1).
        Terms: 1 of rank 0, 1 of rank 1.
        The owner folds from the left, in float32: key 0 of rank 0, key 1 of rank 1 (N2).
        This rank sent float32 to owners: 176 B.
        Each owner sends its part of the sum to all ranks, as float32; this rank 1 KiB to each (N6).
        """
        only = None
        if isinstance(which, int) and not isinstance(which, bool):
            if not 0 <= which < len(self._buckets):
                raise IndexError(f"explain: expected a bucket from 0 to {len(self._buckets) - 1}, got {which}")
            bucket = self._buckets[which]
        else:
            leaf = getattr(which, "edge", (which,))[0]
            index = next((i for i, x in enumerate(self.leaves) if leaf is x or leaf is getattr(x, "tensor", x)), None)
            if index is None:
                raise ValueError(f"explain: expected a leaf of this reducer, got {which!r:.80}")
            bucket = next(b for b in self._buckets if index in b.indices)
            only = list(bucket.indices).index(index)
        where = f"bucket {bucket.number} of {len(self._buckets)}"
        return explain(where, bucket.layout, self._options, bucket.headers, self.group, only)

    def norm(self) -> float:
        """The 2-norm of the sums, exact but for one rounding; inf if an element is inf or NaN.

        It is that of all `.grad`, or with into="shard" of all shards. Unless into="all", every rank must call it.
        Inside a pass of the reducer it is a RuntimeError.
        """
        return self._over_ranks("Reducer.norm", False).norm

    def stats(self) -> SumStats:
        """Statistics of the sums, the same on every rank: their norm, their largest magnitude, how many elements are
        inf or NaN, and with `Reducer(stats=True)` the first contribution that brought one.

        They are those of all `.grad`, or with into="shard" of all shards. Unless into="all", every rank must call it.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(2), name="w")
        ...     reducer = fanin.dist.Reducer([w], group, stats=True)
        ...     fanin.backward([(w, 0, np.array([1.0, np.nan if group.rank == 2 else 1.0]))], reducer=reducer)
        ...     return reducer.stats()
        >>> fanin.dist.threads(3, train)[0]
        SumStats(norm=inf, absmax=3.0, nonfinite=1, bad=BadTerm(rank=2, leaf='w', elements=1, contribution=0, key=None))
        """
        return self._over_ranks("Reducer.stats", True)

    def _sums(self) -> dict[int, Any]:
        """The shards, or each .grad, of this rank, by leaf; none on a rank that gets no sums."""
        if self._options.into not in ("all", "shard", self.group.rank):
            return {}
        mine = self.shards if self._options.into == "shard" else [leaf.grad for leaf in self.leaves]
        return {i: x for i, x in enumerate(mine) if x is not None}

    def _over_ranks(self, call_name: str, every: bool) -> SumStats:
        if self._passing:
            raise RuntimeError(
                f"{call_name}: called inside a pass of the reducer, whose sums are made at its end: call it after the"
                " pass"
            )
        squares, absmax, nonfinite = Squares(), 0.0, 0
        for x in map(merged, self._sums().values()):
            squares.add(x)
            if every:
                one = _core.add_n([x], stats=True)[1]
                absmax, nonfinite = max(absmax, one.absmax), nonfinite + one.nonfinite
        n, e = squares.total() if squares.finite else (0, 0)
        facts = {"squares": [f"{n:x}", e], "finite": squares.finite, "absmax": absmax, "nonfinite": nonfinite}
        headers: list[Header] = [facts]
        if self._options.into != "all":
            with self.group.call(call_name, self._timeout) as call:
                headers = call.meet(facts)
        finite = all(h["finite"] for h in headers)
        return SumStats(
            root([(int(h["squares"][0], 16), h["squares"][1]) for h in headers]) if finite else float("inf"),
            max(h["absmax"] for h in headers),
            sum(h["nonfinite"] for h in headers),
            self._bad,
        )


class _State(_core.Block):
    """What a reducer does from `_begin` to `_end`. Ctrl-C may come at any place of both: `_end` undoes all of it.

    If Ctrl-C ended `_begin`, or `_end` before the sum was made, the group is closed: the other ranks wait for the sum.
    """

    begun = False  #: `_begin` is complete
    ending = False  #: `_end` has begun ..
    finished = False  #: .. the sum is made ..
    over = False  #: .. and all is undone

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def finish(self, error: BaseException | None) -> None:
        """The end of all ranks' sum, with or without an error of this rank, which is raised."""
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Undo what has been done, after Ctrl-C. May be repeated."""
        try:
            self.reducer.group.interrupted(error)
        finally:
            self.reducer._undivert(self)

    def release(self, keep: bool) -> None:
        """Forget all contributions, and end the use of the group. May be repeated."""
        raise NotImplementedError

    def is_ours(self) -> bool:
        """Whether `_begin` was not refused."""
        return True

    def _end(self, error: BaseException | None) -> None:
        if self.over or not self.is_ours():
            return
        interrupted = error is not None and not isinstance(error, Exception)
        again, self.ending = self.ending, True
        keep = not again and not interrupted
        try:
            if self.finished:
                pass
            elif again or (interrupted and not self.begun):
                assert error is not None
                self.give_up(error)
            else:
                self.finish(error)
                self.finished = True
        except BaseException as e:
            if isinstance(e, Exception) or e is error:  # else it is Ctrl-C, after which `_end` is repeated
                self.release(keep)
                self.over = True
            raise
        self.release(keep)
        self.over = True


class _Pass(_State, Use):
    """A pass: the gradients of its leaves are summed over ranks while it runs, and its thread uses the group."""

    turn = 0  #: the reducer's number for it
    number = 0  #: the group's
    made: list[Any] | None = None  #: the sums that are not added to .grad yet
    errors: tuple[BaseException, ...] = ()  #: of leaves' hooks after accumulation

    def __init__(self, reducer: Reducer, block: bool, weight: float | None = None) -> None:
        self.reducer, self.group = reducer, reducer.group
        self.name = "Reducer" if block else "backward"
        self.block = block  #: a `with` block of the reducer
        self.weight = weight  #: of fanin.backward(weight=)
        self.senders: dict[str, object] = {}  #: "now": what sends

    def _begin(self) -> None:
        reducer, group = self.reducer, self.group
        Use._begin(self)
        _inside.set(reducer)
        reducer._passing = True
        self.turn = reducer._turn = reducer._turn + 1
        self.number = group._passes = group._passes + 1
        if reducer._unentered:
            reducer._unentered = False
            raise RuntimeError(
                "Reducer: accumulate() was called and never entered, so its pass is no contribution: use `with"
                " reducer.accumulate():` around the pass"
            )
        if self.weight is not None:
            if reducer._weight is not None:
                raise ValueError("backward: weight= and reducer.at(key, weight=): a pass has one weight: give it once")
            reducer._weight = reducer._weight_of("backward", self.weight)
        reducer._counted.add(reducer._weight)
        reducer._in_block = self.block
        reducer._travels = []
        if reducer._is_complete:  # what has diverted the leaves hands them over: no gradient is to come
            reducer._holder["now"] = self
        else:
            reducer._divert(self)
        if reducer._sends_at_end or reducer._is_complete:
            pass
        elif here.spawn is not None:
            here.spawn(partial(self.send, "thread", ()))
        else:
            reducer._sender.put(partial(self.send, "thread", beside()))
        self.begun = True

    def sends(self, who: str) -> bool:
        """Whether the sending thread ("thread") or the end ("end") sends: the one that comes first."""
        return self.senders.setdefault("now", who) == who

    def send(self, who: str, rings: Sequence[_core.Trace]) -> None:
        """Send, and receive, all buckets."""
        if not self.sends(who):
            return
        try:
            if rings:
                with recording(rings):
                    self.reducer._send(self.number)
            else:
                self.reducer._send(self.number)
        except BaseException as e:
            self.reducer._failed = e
        finally:
            self.reducer._sent.advance()

    def is_ours(self) -> bool:
        return self.holds

    def _end(self, error: BaseException | None) -> None:
        _State._end(self, error)
        if self.made is not None:
            self.accumulate()

    def finish(self, error: BaseException | None) -> None:
        reducer = self.reducer
        try:
            reducer._undivert(self)
            if self.begun and reducer._taking:
                reducer._check_grads()
            if error is None and reducer.missing == "error":
                reducer._check_reached()
        except (RuntimeError, ValueError) as e:  # .grad was set in the pass, or leaves were not reached
            error = error or e
        ended = time.monotonic_ns()
        reducer._pass_ended(error)
        if not self.begun or reducer._sends_at_end or reducer._is_complete:
            self.send("end", ())
        reducer._sent.wait(self.turn)
        error = error or reducer._failed
        if error is not None:
            raise error
        self.made = reducer._made(ended)

    def give_up(self, error: BaseException) -> None:
        reducer = self.reducer
        try:
            super().give_up(error)
        finally:
            if self.turn:
                reducer._turn = self.turn
                reducer._pass_ended(error, again=True)
                self.sends("end")  # if the sending thread has not begun, it does nothing

    def release(self, keep: bool) -> None:
        self.reducer._passing = False
        self.reducer._reset(keep)
        _inside.set(None)
        Use._end(self, None)

    def accumulate(self) -> None:
        """Add the sums to .grad. May be repeated: each is taken out of the list first."""
        reducer, made = self.reducer, self.made
        assert made is not None
        if reducer._options.into == "shard":
            reducer.shards, self.made = made, None
            return
        first = 0
        while failed := _core.leaves_accumulate(reducer.leaves, made, first):
            i, error = failed
            note(error, f"backward: {reducer.leaves[i].name or f'leaf {i}'} was accumulated")
            self.errors = (*self.errors, error)
            first = i + 1  # a hook that raises keeps no other leaf from its sum
        self.made = None
        if self.errors:
            main = next((one for one in self.errors if not isinstance(one, Exception)), self.errors[0])  # Ctrl-C first
            for one in self.errors:
                if one is not main:
                    note(main, f"{'; '.join(one.__notes__)}: {type(one).__name__}: {one}")
            raise main


class _Contribution(_State):
    """A pass that is one more contribution of this rank; nothing travels."""

    def __init__(self, reducer: Reducer, key: int | None, weight: Weight | None) -> None:
        super().__init__(reducer)
        self.key, self.weight = key, weight
        self.use = reducer.group.entered("Reducer.accumulate")
        self.failed = False

    def _begin(self) -> None:
        self.use._begin()
        self.reducer._unentered = False
        self.reducer._weight = self.weight
        self.reducer._divert(self)
        self.begun = True

    def is_ours(self) -> bool:
        return self.use.holds

    def finish(self, error: BaseException | None) -> None:
        reducer = self.reducer
        try:
            reducer._undivert(self)
            if self.begun:
                reducer._check_grads()
            if error is None:
                reducer._key = self.key
                reducer._contribute_all(None)
                reducer._counted.add(self.weight)
                reducer._weight = None
        except Exception as e:
            error = error or e
        if error is not None:
            self.failed = True
            reducer._fail(error)
            raise error

    def give_up(self, error: BaseException) -> None:
        self.failed = True
        super().give_up(error)

    def release(self, keep: bool) -> None:
        if self.failed:
            self.reducer._reset(keep)
        self.use._end(None)


class _Collecting(_State):
    """Collects the gradients of any number of passes, on any thread; the end sums them over ranks."""

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self.last: _Last | None = None  #: the pass whose end has summed them, or will

    def _begin(self) -> None:
        self.reducer._divert(self)
        self.begun = True

    def finish(self, error: BaseException | None) -> None:
        reducer = self.reducer
        if self.last is not None:
            reducer._undivert(self)
            if error is not None:
                raise error
            return
        if error is None:
            try:
                with reducer._lock:
                    reducer._takes_no_more()
                reducer._contribute_all(None)
                reducer._is_complete = True
                with reducer._reduced(block=True):  # it ends what this has diverted ..
                    return
            finally:
                reducer._undivert(self)  # .. unless it was refused
        reducer._undivert(self)
        with suppress(RuntimeError), reducer.group.entered(reducer._name):  # this rank raises its own error
            reducer._fail(error)
        raise error

    def at_last(self) -> _Last:
        return _Last(self)

    @property
    def is_summed(self) -> bool:
        """Whether the end of `last()` has summed the gradients."""
        return self.last is not None and self.last.one is not None and self.last.one.over

    def drop(self) -> None:
        """End without a sum: the other ranks wait until their time limit."""
        self.reducer._undivert(self)
        self.release(False)
        self.over = True

    def release(self, keep: bool) -> None:
        self.last = None  # it refers to this: in a cycle the reducer would outlive its block
        self.reducer._reset(keep)


class _Last(_core.Block):
    """The last pass of a `_Collecting`: all sums travel while it runs, and are in .grad at its end."""

    def __init__(self, collecting: _Collecting) -> None:
        self.collecting = collecting
        self.one: _Pass | None = None

    def _begin(self) -> None:
        collecting, reducer = self.collecting, self.collecting.reducer
        if collecting.last is not None:
            raise RuntimeError("accumulate: last() a second time in one block: its sums are in .grad already")
        collecting.last = self
        reducer._undivert(collecting)
        try:
            reducer._check_grads()
        except RuntimeError as e:  # .grad was set in the block
            with suppress(RuntimeError), reducer.group.entered(reducer._name):  # this rank raises its own error
                reducer._fail(e)
            raise
        reducer._contribute_all(reducer._key)
        reducer._each = False  # a second gradient of a leaf is an error
        self.one = reducer._reduced(block=True)
        self.one._begin()

    def _end(self, error: BaseException | None) -> None:
        collecting, reducer = self.collecting, self.collecting.reducer
        if collecting.last is not self:
            return
        try:
            if self.one is not None:
                self.one._end(error)
        finally:
            summed = self.one is None or not self.one.is_ours()
            if summed and not collecting.over and reducer._holder.get("now") is not collecting:
                reducer._divert(collecting)
                reducer._takes = False  # what comes until the end of the block is refused


def _weight_text(weight: Weight | None) -> str:
    return "no weight" if weight is None else f"weight {weight}"


def _put_of(mine: weakref.ref[Reducer], bucket: _Bucket, i: int, gradient: Any, owned: bool = False) -> None:
    """Give the reducer the gradient of leaf i of a bucket. owned: nothing else has it."""
    reducer = mine()
    if reducer is None:
        raise RuntimeError(f"Reducer: {bucket.layout.leaves[i].name} got a gradient after the end of its reducer")
    reducer._put(bucket, i, gradient, owned)


def _on_device_thread(gradient: Any) -> bool:
    """Whether torch's engine made a gradient on a thread of its own, which has one for each device but the CPU."""
    return is_tensor(gradient) and gradient.device.type != "cpu"


def _leaves(leaves: Any, frozen: list[tuple[Any, Any]]) -> list[Any]:
    made: list[Any] = []
    single = isinstance(leaves, _core.Leaf) or is_tensor(leaves)
    if single or not isinstance(leaves, Iterable):
        hint = ": give [leaf]" if single else ": give model.parameters()" if hasattr(leaves, "parameters") else ""
        raise TypeError(f"Reducer: expected several leaves, got {type_of(leaves)}{hint}")
    for i, x in enumerate(leaves):
        name, leaf = x if isinstance(x, tuple) and len(x) == 2 else (i, x)
        if is_tensor(leaf):
            from fanin._interop.torch_leaves import TorchLeaf

            if leaf.requires_grad:
                made.append(TorchLeaf(leaf, name))
            else:
                frozen.append((name, leaf))
            continue
        leaf = x if isinstance(x, _core.Leaf) else getattr(x, "edge", (None,))[0]
        if not isinstance(leaf, _core.Leaf):
            raise TypeError(
                f"Reducer: leaves[{i}]: expected a fanin.Leaf or a parameter of fanin.tape or torch, got {type_of(x)}"
            )
        if leaf.array is None:
            raise TypeError(f"Reducer: leaves[{i}]: expected a leaf made of an array, got one with like=")
        made.append(leaf)
    if not made:
        raise ValueError("Reducer: expected leaves, got none that requires a gradient (a used iterator is empty)")
    return made


def _declared(leaf: Any, name: str) -> Leaf:
    """The shape and dtype of a leaf's gradients: of its array, but for the dtype that `grad_dtype` gives."""
    spec = leaf_of(leaf.array, name)
    if not isinstance(leaf, _core.Leaf):
        return spec
    dtype = _core.leaf_dtype(leaf)
    if dtype is None:
        raise TypeError(f"Reducer: {name}: expected a leaf of an array, got one of {object_text(leaf.array)}")
    return spec._replace(dtype=dtype)


def clip_norm(reducer: Reducer, max_norm: float) -> float:
    """Scale the sums in place so that their norm is at most `max_norm`, and return the norm before.

    Nothing is scaled if the norm is inf, and nothing on a rank that gets no sums. Unless into="all", every rank must
    call it.

    Parameters
    ----------
    reducer : Reducer
        After a pass.
    max_norm : float
        A non-negative number.

    Raises
    ------
    ValueError
        For a negative `max_norm`.
    BufferError, TypeError, ValueError
        For a `.grad` that cannot be scaled in place, such as an expanded or read-only one; then none was scaled.

    >>> def train(group):
    ...     w = fanin.Leaf(np.zeros(2))
    ...     reducer = fanin.dist.Reducer([w], group, order="exact")
    ...     fanin.backward([(w, 0, np.array([1.5, 2.0]))], reducer=reducer)
    ...     return fanin.dist.clip_norm(reducer, 1.0), w.grad
    >>> fanin.dist.threads(2, train)[0]
    (5.0, array([0.6, 0.8]))
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(f"clip_norm: expected a non-negative max_norm, got {max_norm!r}")
    if not isinstance(reducer, Reducer):
        raise TypeError(f"clip_norm: reducer: expected a fanin.dist.Reducer, got {type_of(reducer)}")
    norm = reducer.norm()
    if norm > max_norm and norm != float("inf"):
        sums = {i: values_of(x) for i, x in reducer._sums().items()}
        for i, x in sums.items():  # before the first write
            try:
                _core.add_n([x], out=x, scale=1.0)  # raises where `scaled` would, and changes nothing
            except (BufferError, TypeError, ValueError) as e:
                name = reducer.leaves[i].name or f"leaf {i}"
                raise type(e)(f"clip_norm: the sum of {name}: {str(e).removeprefix('add_n: ')}") from None
        for x in sums.values():
            scaled(x, x, float(max_norm), norm)
    return norm
