"""Plans of the buckets of reducers: what every rank brought to the last sum of a bucket, so that a sum to which all
bring the same, but for its numbers and keys, sends no header.

    the bucket, in the last sum                                    what is planned
    one dtype, one term of each rank, or a fold of several in      the sum (plans.py): a small one takes one exchange
    that dtype; no weights, no mean, nothing narrower on the way
    everything else whose header does not change                   the header alone: terms travel as without a plan

A rank whose header is another one has no plan, and sends it; then all ranks do (frames.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from fanin._interop.protocols import NDArray

from .layout import Layout, accumulation
from .options import Options, Order
from .plans import Agreed, Plan
from .sums import NOTHING, Sent, Sum, folds, keys_of_ranks, levels_for, order_of

if TYPE_CHECKING:
    from .group import Call, Header

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Brought(NamedTuple):
    """What a rank's header says of a bucket, but for keys."""

    call: str
    terms: int
    has: str  #: the leaves of which it has a gradient, as bits
    weigh: Header | None
    ended: bool  #: nothing can fail on this rank any more before the sum


def brought(call: Call, sent: Sent, has: str, ended: bool) -> Brought | None:
    """What this rank brings; None if it changes with the numbers, or has several keys."""
    terms = sent.terms
    keyed = len(terms) > 1 and any(term.key is not None for term in terms)
    if sent.packed or sent.rows or keyed:
        return None
    return Brought(call.name, len(terms), has, sent.weigh, ended)


def is_plain(layout: Layout, headers: Sequence[Header], order: Order) -> bool:
    """Whether a sum is that of one term a rank, or of a fold, in the dtype of the bucket."""
    counts = [h["terms"] for h in headers]
    first = layout.segments[0]
    as_it_is = first.wire is None and first.wire_out is None and not any("weigh" in h for h in headers)
    if len(layout.segments) > 1 or not first.size or not as_it_is or not min(counts):
        return False
    return max(counts) == 1 or (folds(order, first) and accumulation(first.dtype) == first.dtype)


class OfTerms(Plan):
    """A plan of terms that are bytes already."""

    def flats(self, x: Any) -> list[NDArray]:
        return list(x)


def can_be_planned(headers: Sequence[Header]) -> bool:
    """Whether headers may be those of the next sum, too: nothing in them is of the numbers of this one."""
    return not any(
        h["bad"] or h["sizes"] or h.get("rows") or (h["terms"] > 1 and h["keys"] != [None] * h["terms"])
        for h in headers
    )


def facts_of(headers: Sequence[Header]) -> list[tuple[object, ...]]:
    """What headers say of each rank, but for keys."""
    return [(h["terms"], h["has"], h.get("weigh"), h["ended"]) for h in headers]


class BucketPlan:
    """The plan of a bucket, made of the headers of a sum that ended well on every rank."""

    def __init__(
        self, call: Call, layout: Layout, options: Options, headers: Sequence[Header], own: str, mine: Brought
    ) -> None:
        group = call.group
        self.layout, self.options, self.headers = layout, options, list(headers)
        facts = call.name, call.bucket, own, facts_of(headers), group.size, group._nodes_text
        self.anywhere = reduce(operator.or_, (int(h["has"], 16) for h in headers))  #: the leaves that any rank has
        self.order = order_of(options, [h["terms"] for h in headers])
        self.plain: OfTerms | None = None  #: the plan of the sum
        if group.size > 1 and is_plain(layout, headers, self.order):
            levels = levels_for(group, layout.segments[0], options)
            self.plain = OfTerms(layout, options, len(levels) == 1, facts)
        self.agreed = self.plain or Agreed(facts)
        whole = Brought(call.name, 1, f"{(1 << len(layout.leaves)) - 1:x}", None, mine.ended)
        #: Of a sum to which this rank brings one contribution of all leaves: its call, and whether that has ended.
        self.whole = (call.name, mine.ended) if self.plain and mine == whole else None

    def meet(self, call: Call, sent: Sent) -> Sequence[Header] | None:
        """The headers of all ranks, for which first messages stand; None if some rank has another plan, or none."""
        key = sent.terms[0].key if len(sent.terms) == 1 else None
        keys = self.agreed.meet(call, [self.term(sent)] if self.plain else None, key)
        return None if keys is None else self.headers_of(keys)

    def headers_of(self, keys: list[int | None]) -> Sequence[Header]:
        """The headers of all ranks with their keys."""
        if keys is self.agreed.no_keys:
            return self.headers
        return [{**h, "keys": [k] * h["terms"]} for h, k in zip(self.headers, keys, strict=True)]

    def term(self, sent: Sent) -> NDArray:
        """What this rank brings to a plain sum: its fold, or its only term."""
        fold = sent.folded.get(0)
        return sent.terms[0].flats[0] if fold is None or fold.total is None else fold.total

    def sum(self, call: Call, sent: Sent, headers: Sequence[Header], places: Mapping[int, NDArray]) -> list[NDArray]:
        """For each segment the bytes of the sum, as `Sum.run`, after all ranks have met."""
        plan = self.plain
        if plan is None or plan.is_general:
            return Sum(call, self.layout, sent, list(headers), self.options, places).run()
        return self.of_terms(call, plan, self.term(sent), headers, places.get(0))

    def of_terms(
        self, call: Call, plan: OfTerms, term: NDArray, headers: Sequence[Header], place: NDArray | None
    ) -> list[NDArray]:
        """.. of the term that each rank brings."""
        turn = None
        if headers is not self.headers and self.order == "key":
            keys = keys_of_ranks(call, [h["keys"] for h in headers])
            turn = sorted(range(len(keys)), key=keys.__getitem__)
        total = plan.sum(call, [term], turn, place)
        return [NOTHING if total is None else total]
