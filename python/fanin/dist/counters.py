"""What a group has sent, and statistics of sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass(frozen=True)
class GroupCounters:
    """The work of one rank in a group (`Group.counters`)."""

    sums: int = 0  #: buckets and arrays whose sums travelled
    planned: int = 0  #: sums without headers, by plans of earlier ones
    messages: int = 0  #: messages to other ranks, headers included
    bytes_sent: int = 0  #: their bytes
    messages_between: int = 0  #: messages to ranks of other nodes (`Group.nodes`)
    bytes_between: int = 0  #: their bytes
    wait_seconds: float = 0.0  #: in headers: the wait for the last rank
    data_seconds: float = 0.0  #: from the first byte of a sum's data to the end of the sum
    hidden_seconds: float = 0.0  #: .. the part during which a backward pass of this rank still ran
    on_device: int = 0  #: sums of arrays on a device that were made there

    @property
    def hidden(self) -> float:
        """The share of `data_seconds` behind backward passes, from 0 to 1; 0 if no data travelled."""
        return self.hidden_seconds / self.data_seconds if self.data_seconds else 0.0


@dataclass(frozen=True)
class BadTerm:
    """A contribution with an inf or NaN (`SumStats.bad`)."""

    rank: int  #: the rank that brought it
    leaf: str  #: the leaf's name
    elements: int  #: how many of the leaf's elements are inf or NaN
    contribution: int  #: its place among those of its rank
    key: int | None  #: its key; None without keys


@dataclass(frozen=True)
class SumStats:
    """Statistics of the sums of a reducer (`Reducer.stats`)."""

    norm: float  #: the 2-norm, exact but for one rounding; inf if an element is inf or NaN
    absmax: float  #: the largest magnitude of a finite element
    nonfinite: int  #: how many elements are inf or NaN
    #: With `Reducer(stats=True)` the first contribution of the last pass with an inf or NaN: by key, else by rank.
    bad: BadTerm | None


class Outgoing(NamedTuple):
    """The messages of one operation of this rank, as counters have them."""

    sizes: tuple[int, ...]  #: bytes for each rank
    messages: int
    bytes_sent: int
    messages_between: int
    bytes_between: int


def sent_to(sizes: Sequence[int], rank: int, nodes: Sequence[int]) -> Outgoing:
    """Messages of so many bytes to each rank; `rank` is this one, and `nodes` has the node of each."""
    others = [0 if r == rank else n for r, n in enumerate(sizes)]
    between = [n for n, node in zip(others, nodes, strict=True) if n and node != nodes[rank]]
    return Outgoing(tuple(others), len(others) - others.count(0), sum(others), len(between), sum(between))


class Tally:
    """Counters in progress."""

    def __init__(self) -> None:
        self.sums = self.planned = self.messages = self.bytes_sent = self.messages_between = self.bytes_between = 0
        self.first_bytes = self.first_between = 0  #: bytes of first messages, which the ones above lack
        self.wait_ns = self.data_ns = self.hidden_ns = self.on_device = 0

    def counters(self) -> GroupCounters:
        waited, travelled, hidden = (1e-9 * ns for ns in (self.wait_ns, self.data_ns, self.hidden_ns))
        bytes_sent, bytes_between = self.bytes_sent + self.first_bytes, self.bytes_between + self.first_between
        sent = self.messages, bytes_sent, self.messages_between, bytes_between
        return GroupCounters(self.sums, self.planned, *sent, waited, travelled, hidden, self.on_device)

    def sent(self, sent: Outgoing, begin_ns: int, end_ns: int, header: bool) -> None:
        """Count an operation."""
        self.messages += sent.messages
        self.bytes_sent += sent.bytes_sent
        self.messages_between += sent.messages_between
        self.bytes_between += sent.bytes_between
        self.wait_ns += (end_ns - begin_ns) * header
