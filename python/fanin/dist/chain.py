"""A left fold over several nodes: each node continues the running sum of the node before (N12).

    to node         a rank gets the terms of its node's ranks, of the shards at its place in every node
    to next node    the running sum goes from node to node, in pieces that follow each other
    to owners       the last node sends each owner the sum of its shard

So one running sum travels over the link of a node, in the dtype of the sum, and no term does; and its bits are those of
one fold, as a fold that is continued has them. It is made where the terms of each node lie side by side in the order of
the sum. Where those of two nodes alternate, as keys that are dealt out in turn do, every change from one node to
another would be a step, so such sums have one level.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fanin import _core
from fanin._interop.protocols import NDArray
from fanin._weights import Weight

from .layout import Level, Runs, Segment, accumulation, itemsize, typed
from .products import weighing_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Bytes of a piece of the running sum, at least; fewer cost more than they hide.
PIECE = 1 << 16

#: So many pieces for each node, at most: then the first and the last node are idle for a fifth of the time.
PIECES = 4


def nodes_in_order(nodes: Sequence[int], terms: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    """The nodes that bring terms in the order of their terms; None if terms of two nodes alternate. nodes: of each
    rank; terms: the place of each term in the sum, and its rank.
    """
    runs = tuple(node for node, _ in itertools.groupby(nodes[rank] for _, rank in sorted(terms)))
    return runs if len(set(runs)) == len(runs) else None


class Chain:
    """The running sum of a segment on one rank. nodes: those that bring terms, in the order of their terms; accumulate:
    the dtype of the sum, where terms are narrower.
    """

    def __init__(
        self, segment: Segment, rank: int, levels: Sequence[Level], nodes: Sequence[int], accumulate: str | None
    ) -> None:
        near, across = levels
        self.segment, self.rank, self.dtype = segment, rank, accumulation(segment.dtype)
        self.accumulate = accumulate
        self.owners = near.owners(rank)
        #: The ranks at this place in the nodes of the chain.
        self.ranks = [across.team[node] for node in nodes]
        self.each = itemsize(self.dtype)
        shards = [self.each * n for n in segment.counts("uint8")]
        self.places = Runs(self.owners, shards)
        sizes = [sum(shards[owner] for owner in owners) for owners in near.shards]
        self.size = sizes[near.team.index(rank)]
        piece = max(PIECE, -(-max(sizes) // (PIECES * len(across.team))))
        self.piece_size = piece - piece % self.each
        #: The same on every rank, as all ranks start the same operations.
        self.steps = -(-max(sizes) // self.piece_size) + len(self.ranks) - 2

    def run(
        self,
        terms: Sequence[Any],
        weights: Sequence[Weight | None],
        travel: Callable[[dict[int, NDArray], dict[int, NDArray], str], None],
    ) -> NDArray:
        """The sum of this rank's shard, as bytes in the dtype of the sum. terms: those of this rank's node, in the
        order of the sum, each the shards of the owners side by side; weights: of each term.
        """
        total = _core.message_new(self.size)
        place = self.ranks.index(self.rank) if self.rank in self.ranks else None
        last = len(self.ranks) - 1
        for step in range(self.steps + 1):
            sends, receives = {}, {}
            if place is not None:
                made, coming = self.piece(step - place), self.piece(step + 1 - place)
                if made.stop > made.start:
                    self.add(made, total, terms, weights, place > 0)
                if place < last:
                    sends[self.ranks[place + 1]] = total[made]
                if place > 0:
                    receives[self.ranks[place - 1]] = total[coming]
            if step < self.steps and last > 0:
                travel(sends, receives, "to next node")
        return self.to_owners(total, place == last, travel)

    def piece(self, number: int) -> slice:
        """The bytes of a piece of the running sum; none before the first piece and after the last one."""
        start, stop = (min(max(k, 0) * self.piece_size, self.size) for k in (number, number + 1))
        return slice(start, stop)

    def add(
        self, piece: slice, total: NDArray, terms: Sequence[Any], weights: Sequence[Weight | None], continued: bool
    ) -> None:
        """Add this node's terms to a piece of the running sum, which has those of the nodes before if `continued`."""
        out = typed(total[piece], self.dtype)
        start, stop = piece.start // self.each, piece.stop // self.each
        every = [term[start:stop] for term in terms]
        if continued:
            every, weights = [out, *every], [None, *weights]
        _core.add_n(every, out=out, accumulate=self.accumulate, **weighing_of(weights))

    def to_owners(self, total: NDArray, is_last: bool, travel: Callable[..., None]) -> NDArray:
        """Send the owners their sums, if this rank has them, and return its own."""
        origin = self.ranks[-1]
        if is_last:
            travel({owner: total[self.places[owner]] for owner in self.owners}, {}, "to owners")
            return total[self.places[self.rank]]
        own = _core.message_new(self.each * self.segment.counts("uint8")[self.rank])
        travel({}, {origin: own}, "to owners")
        return own
