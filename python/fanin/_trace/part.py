"""Which part of a trace its picture shows: all of it if that has room, else the place that says most.

That place is, in this order: where a race was found; a sum for which streams meet; the beginning.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .line import HOST
from .picture import Lane, Names, Neighbours, Picture, Slice, Sum

__tracebackhide__ = True  # no frames of ours in reports of pytest

MOST_LANES = 6
BEFORE = 3  # bars of a lane that are shown before the one that a sum waits for
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Follows(NamedTuple):
    """Work that waits for other work: a wait of a stream, a gradient of a worker, a message of a rank."""

    source: Slice
    target: Slice
    is_wait: bool  #: Of a stream: the source ends before the target begins


@dataclass
class Part:
    """What is shown: the lanes from the top, and of each one consecutive bars."""

    rows: dict[Lane, list[Slice]]
    cut: set[Lane] = field(default_factory=set)  #: Lanes with earlier work that is not shown
    focus: Slice | None = None  #: The sum for which streams meet
    producers: int = 0  #: How many streams meet there
    left_out: tuple[int, int] = (0, 0)  #: Lanes and bars that are not shown

    @property
    def bars(self) -> list[Slice]:
        return list(itertools.chain(*self.rows.values()))


def bars_of(picture: Picture) -> dict[Lane, list[Slice]]:
    """The bars of each lane, in the order of time. On the CPU a node stands for the work within it."""
    nodes = [n for n in picture.nodes if n.lane.device == HOST]
    inside = {(n.lane.rank, n.pass_number, n.number) for n in nodes}
    work = [s for s in picture.slices if s.bucket or not is_inside(s, inside)]
    rows: dict[Lane, list[Slice]] = {}
    for s in sorted([*nodes, *work], key=lambda s: (s.start, s.end)):
        rows.setdefault(s.lane, []).append(s)
    return rows


def is_inside(work: Slice, nodes: set[tuple[int, int, int]]) -> bool:
    """Whether work on the CPU is that of a node that has a bar."""
    if work.lane.device != HOST or work.line is None or not work.line.pass_number:
        return False
    return (work.lane.rank, work.line.pass_number, work.line.node) in nodes


def follows_of(picture: Picture) -> list[Follows]:
    """Each wait, gradient and message between two lanes, once."""
    neighbours, found = Neighbours(picture), dict[tuple[int, int], Follows]()
    for arrow in picture.arrows:
        source, target = neighbours.before(*arrow.at), neighbours.after(*arrow.to)
        if source is not None and target is not None and source.lane != target.lane:
            found[id(source), id(target)] = Follows(source, target, True)
    for one, other, _ in picture.gradients:
        if one.lane != other.lane and HOST == one.lane.device == other.lane.device:
            found[id(one), id(other)] = Follows(one, other, True)
    for sender, receiver, _ in picture.messages:
        found[id(sender), id(receiver)] = Follows(sender, receiver, False)
    return list(found.values())


class Chooser:
    """The bars of a picture, and what is known of where streams meet."""

    def __init__(self, picture: Picture, names: Names, has_room: Callable[[Mapping[Lane, Sequence[Slice]]], bool]):
        self.picture, self.has_room = picture, has_room
        self.every = bars_of(picture)
        self.order = [lane for lane in picture.in_order(names) if lane in self.every]
        self.neighbours = Neighbours(picture)
        self.meeting = self.find_meeting()

    def choose(self) -> Part:
        """The part to show."""
        rows = {lane: self.every[lane] for lane in self.order}
        if self.meeting:  # below the streams for which it waits
            rows[self.meeting.work.lane] = rows.pop(self.meeting.work.lane)
        if len(rows) > MOST_LANES or not self.has_room(rows):
            if self.picture.races:
                rows = self.at_race()
            else:
                rows = self.at_meeting() if self.meeting else self.at_beginning()
        part = Part({lane: bars for lane, bars in rows.items() if bars})
        part.cut = {lane for lane, bars in part.rows.items() if bars[0] is not self.every[lane][0]}
        if self.meeting and any(bar is self.meeting.work for bar in part.bars):
            part.focus, part.producers = self.meeting.work, len(self.meeting.producers)
        whole = sum(map(len, self.every.values()))
        part.left_out = len(self.every) - len(part.rows), whole - len(part.bars)
        return part

    def find_meeting(self) -> Sum | None:
        """The sum to show: one that waits for two streams that have work to show before one that waits for more. None
        if a race was found, which says more.
        """
        if self.picture.races:
            return None
        waiting = {id(f.target) for f in follows_of(self.picture) if f.is_wait}
        found = []
        for one in self.picture.sums:
            producers = one.producers
            shown = [lane for lane, when in one.terms if self.neighbours.before(lane, when)]
            if id(one.work) in waiting and len(producers) > 1 and set(shown) == set(producers):
                devices = {lane.device for lane in [one.work.lane, *producers]}
                crowded = max(0, len({one.work.lane, *producers}) - MOST_LANES)
                found.append((crowded, len(devices), len(producers), one.work.start, one))
        return min(found, key=lambda entry: entry[:-1])[-1] if found else None

    def place(self, work: Slice) -> int:
        """Where a bar is in its lane."""
        return next(i for i, bar in enumerate(self.every[work.lane]) if bar is work)

    def at_meeting(self) -> dict[Lane, list[Slice]]:
        """The sum, the newest work that it waits for, and as much before and after as has room."""
        assert self.meeting is not None
        own, at = self.meeting.work.lane, self.place(self.meeting.work)
        ends: dict[Lane, int] = {}
        for lane, when in self.meeting.terms:
            work = self.neighbours.before(lane, when)
            if work is not None and lane != own and lane in self.every:
                ends[lane] = max(ends.get(lane, 0), self.place(work) + 1)
        kept = sorted(ends, key=self.order.index)[: MOST_LANES - 1]
        spans = {**{lane: (ends[lane] - 1, ends[lane]) for lane in kept}, own: (at, at + 1)}
        for _ in range(BEFORE):  # one bar more in each lane, and after the sum
            for lane in [own, *kept]:
                begin, end = spans[lane]
                self.grow(spans, lane, (max(begin - 1, 0), end))
        self.grow(spans, own, (spans[own][0], min(at + 2, len(self.every[own]))))
        return self.cut_out(spans)

    def grow(self, spans: dict[Lane, tuple[int, int]], lane: Lane, span: tuple[int, int]) -> None:
        """Show more of a lane, if that has room."""
        if self.has_room(self.cut_out({**spans, lane: span})):
            spans[lane] = span

    def cut_out(self, spans: Mapping[Lane, tuple[int, int]]) -> dict[Lane, list[Slice]]:
        return {lane: self.every[lane][begin:end] for lane, (begin, end) in spans.items()}

    def at_race(self) -> dict[Lane, list[Slice]]:
        """The newest work of the lanes that were used last: a race ends its trace."""
        newest = sorted(self.order, key=lambda lane: -self.every[lane][-1].end)[:MOST_LANES]
        raced = [race.lane for race in self.picture.races if race.lane in self.every]
        kept = list(dict.fromkeys([*raced, *newest]))[:MOST_LANES]
        lanes = [lane for lane in self.order if lane in kept]
        for most in range(BEFORE + 1, 0, -1):
            rows = {lane: self.every[lane][-most:] for lane in lanes}
            if self.has_room(rows):
                break
        return rows

    def at_beginning(self) -> dict[Lane, list[Slice]]:
        """The first lanes, and as much of their first work as has room."""
        lanes = self.order[:MOST_LANES]
        first = sorted(itertools.chain(*(self.every[lane] for lane in lanes)), key=lambda s: (s.start, s.end))

        def rows(count: int) -> dict[Lane, list[Slice]]:
            found: dict[Lane, list[Slice]] = {lane: [] for lane in lanes}
            for bar in first[:count]:
                found[bar.lane].append(bar)
            return found

        low, high = 1, len(first)
        while low < high:  # the most that has room
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.has_room(rows(middle)) else (low, middle - 1)
        return rows(low)
