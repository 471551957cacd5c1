"""A trace, placed in time: lanes, work, waits. Files and pictures are made of it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fanin._words import counted

from .line import HOST, LABEL, WORK, Line

__tracebackhide__ = True  # no frames of ours in reports of pytest

Names = Mapping[tuple[int, int], str]  #: what streams are called, by device and stream


#: Streams of lanes of the host from this number on are threads that send buckets to other ranks.
SENDING = 1000


class Lane(NamedTuple):
    device: int
    stream: int
    rank: int = -1  #: Of traces of several ranks; else -1

    @property
    def name(self) -> str:
        if self.device >= 0:
            return f"device {self.device}, stream {self.stream}"
        where = "cpu" if self.rank < 0 else f"rank {self.rank}"
        if self.stream >= SENDING:
            return f"{where}, sending"
        return f"{where}, worker {self.stream}" if self.stream else where


@dataclass
class Slice:
    """Work on a lane, placed in time."""

    lane: Lane
    name: str
    start: float
    end: float
    buffer: str = ""
    """The buffer whose sum it is; "" for other work."""
    line: Line | None = None

    @property
    def bucket(self) -> str:
        """The sum over ranks of which it is a step: "bucket 3"; "" for other work."""
        return self.name.partition(": ")[0] if self.line and self.line.kind == "bucket" else ""


@dataclass
class Node(Slice):
    """A node of a pass backward, or a leaf: from its sums to its last gradient."""

    number: int = 0
    pass_number: int = 0


class Gradient(NamedTuple):
    """One that a node gave to another."""

    source: Node
    target: Node
    slot: int


class Message(NamedTuple):
    """One of a sum over ranks: the sender's step, the receiver's, and bytes."""

    source: Slice
    target: Slice
    bytes: int


@dataclass
class Arrow:
    """A wait: `to` is held back until `at` has passed."""

    name: str
    at: tuple[Lane, float]
    to: tuple[Lane, float]


class Sum(NamedTuple):
    """A sum that a device made: its work, and where each thing that it added was ready."""

    work: Slice
    terms: tuple[tuple[Lane, float], ...]

    @property
    def producers(self) -> list[Lane]:
        """The lanes that made what it adds, each once."""
        return list(dict.fromkeys(lane for lane, _ in self.terms))


@dataclass
class Race:
    lane: Lane
    time: float
    text: str


@dataclass(repr=False)
class Picture:
    """A trace, placed in time: what files and pictures are made of."""

    clock: str
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    notes: list[tuple[Lane, float, Line]] = field(default_factory=list)  #: Adds and takes: points in a lane
    parked: list[tuple[str, float, int]] = field(default_factory=list)
    """(buffer, time, bytes that are parked from then on)."""
    races: list[Race] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    names: dict[tuple[int, int], str] = field(default_factory=dict)  #: Of streams, as they were made
    elided: int = 0  #: Waits that were left out because they already held

    def __repr__(self) -> str:
        races = f", {counted(len(self.races), 'race')}" if self.races else ""
        return f"<Picture: {counted(len(self.lanes), 'lane')}, {counted(len(self.slices), 'slice')}{races}>"

    def called(self, names: Names) -> Names:
        """The names of streams: those that are given, then those with which the streams were made."""
        given = {lane[:2]: text for lane, text in names.items()}  # keys may be lanes
        return {**given, **{stream: text for stream, text in self.names.items() if stream not in given}}

    def in_order(self, names: Names) -> list[Lane]:
        """The lanes by device and role: of one device as `names` lists them, then those of producers alone, then those
        with sums.
        """
        listed = {lane[:2]: i for i, lane in enumerate(names)}
        summing = {s.lane for s in self.slices if s.buffer}

        def place(lane: Lane) -> tuple[int, int, int, bool, int]:
            at = listed.get(lane[:2], len(listed))
            return lane.rank, lane.device, at, lane in summing and lane.device != HOST, lane.stream

        return sorted(self.lanes, key=place)

    @property
    def lanes(self) -> list[Lane]:
        """In the order of their numbers."""
        found = {s.lane for s in self.slices} | {lane for a in self.arrows for lane in (a.at[0], a.to[0])}
        found |= {n.lane for n in self.nodes}
        return sorted(found | {n[0] for n in self.notes} | {r.lane for r in self.races})

    @property
    def measured(self) -> bool:
        """Whether times are those of the host's clock."""
        return self.clock.startswith("measured")


class Neighbours:
    """Which work of a lane ends before a time, and which begins after it."""

    def __init__(self, picture: Picture) -> None:
        self.lanes: dict[Lane, list[Slice]] = {}
        for s in picture.slices:
            self.lanes.setdefault(s.lane, []).append(s)
        for work in self.lanes.values():
            work.sort(key=lambda s: s.start)  # a lane does one thing at a time: so the ends are sorted too

    def before(self, lane: Lane, time: float) -> Slice | None:
        work = self.lanes.get(lane, [])
        i = bisect.bisect_right(work, time + 1e-9, key=lambda s: s.end)
        return work[i - 1] if i else None

    def after(self, lane: Lane, time: float) -> Slice | None:
        work = self.lanes.get(lane, [])
        i = bisect.bisect_left(work, time - 1e-9, key=lambda s: s.start)
        return work[i] if i < len(work) else None


# Placing lines in time


def place(lines: Sequence[Line], races: Sequence[tuple[int, str]] = ()) -> Picture:
    """Place each line: at its own time if it has one, else after the previous work and after the work that it waits
    for. `passes.py` places the nodes of passes afterwards.
    """
    timed = any(line.start_us >= 0 for line in lines if line.kind in ("kernel", "copy"))
    picture = Picture(clock_of(lines))
    workers = Workers(lines)
    owner_of = owners(lines)
    now: dict[Lane, float] = {}  # the end of what a lane has so far
    recorded: dict[int, tuple[Lane, float]] = {}
    parked: dict[tuple[int, int], list[tuple[int, int, Lane, float]]] = {}  # of each slot: key, bytes, where, when
    summed: set[tuple[int, int]] = set()
    red = dict(races)
    last = Lane(HOST, 0)
    for i, line in enumerate(lines):
        lane = workers.lane(line)
        if i in red:
            picture.races.append(Race(last, now.get(last, 0.0), red.pop(i)))
        t = workers.time(line.host_ns) if picture.measured else now.get(lane, 0.0)
        if line.kind in ("kernel", "copy", "bucket") and picture.measured:
            start = workers.time(line.begin_ns or line.host_ns)
            picture.slices.append(Slice(lane, line.label or line.kind, start, t, owner_of.get(i, ""), line))
        elif line.kind in ("kernel", "copy"):
            start, end = (line.start_us, line.end_us) if timed and line.start_us >= 0 else (t, t + 1.0)
            picture.slices.append(Slice(lane, line.label or line.kind, start, end, owner_of.get(i, ""), line))
            now[lane] = max(t, end)
        elif line.kind == "elided":
            picture.elided += 1
        elif line.kind == "record":
            recorded[line.event] = lane, t
        elif line.kind == "wait":
            at = recorded.get(line.event)
            if at is not None:
                now[lane] = max(t, at[1])
                picture.arrows.append(Arrow(f"e{line.event}", at, (lane, now[lane])))
        elif line.kind in ("add", "take"):
            picture.notes.append((lane, t, line))
        if line.kind in ("add", "fold", "take") and line.buffer:
            slot = line.buffer, line.slot
            mine = parked.setdefault(slot, [])
            if line.kind == "add":
                mine.append((line.key if line.key >= 0 else len(mine), line.bytes, lane, t))
                mine.sort()
            elif line.kind == "fold":
                added = line.count - (slot in summed)
                work = next((s for s in reversed(picture.slices) if s.buffer == line.label), None)
                if work is not None:
                    picture.sums.append(Sum(work, tuple((where, when) for _, _, where, when in mine[:added])))
                del mine[:added]
                summed.add(slot)
            else:
                mine.clear()
                summed.discard(slot)
            total = sum(n for (buffer, _), items in parked.items() if buffer == line.buffer for _, n, _, _ in items)
            time = t if picture.measured else max(now.values(), default=0.0)
            picture.parked.append((line.label or f"buffer {line.buffer}", time, total))
        if line.kind in ("kernel", "copy", "add", "take"):
            last = lane
    picture.races += [Race(last, now.get(last, 0.0), text) for text in red.values()]
    return picture


def clock_of(lines: Sequence[Line]) -> str:
    """The clock of the picture. The host's clock does not apply to devices, which run later."""
    work = [line for line in lines if line.kind in ("kernel", "copy")]
    if any(line.start_us >= 0 for line in work):
        return "simulated: a cost model, no measurement"
    if all(line.device == HOST for line in work) and any(line.kind in ("node", "bucket") for line in lines):
        return "measured: the host's clock"
    return "logical order, no times"


class Workers:
    """The threads that ran nodes of passes: one lane each, the caller's first, then those that sent buckets meanwhile;
    and when the first of them began.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        nodes = sorted((line for line in lines if line.kind == "node"), key=lambda line: line.begin_ns)
        first: dict[int, int] = {}
        for line in nodes:
            first.setdefault(line.thread, line.worker)
        self.place = {thread: i for i, thread in enumerate(sorted(first, key=lambda thread: (first[thread], thread)))}
        sends = {line.thread for line in lines if line.kind == "bucket" and first} - set(first)
        self.place |= {thread: SENDING + i for i, thread in enumerate(sorted(sends))}
        self.begin = min([line.begin_ns or line.host_ns for line in lines], default=0)

    def lane(self, line: Line) -> Lane:
        """Where a line goes: to its stream, or, of the CPU, to its thread."""
        return Lane(HOST, self.place.get(line.thread, 0)) if line.device == HOST else Lane(line.device, line.stream)

    def time(self, ns: int) -> float:
        """In microseconds since the first line."""
        return (ns - self.begin) / 1000


def owners(lines: Sequence[Line]) -> dict[int, str]:
    """The buffer of each kernel, by labels: "sum w1" and "copy grads[3]" belong to the slots with these labels.

    "9 slots: sum w1, sum w2, .." belongs to the buffer of the first one, as all of them do.
    """
    slots = {(line.label, line.slot) for line in lines if line.kind in ("add", "fold", "take") and line.buffer}
    own = {text: label for label, slot in slots for text in (label, f"{label}[{slot}]")}
    found = {}
    for i, line in enumerate(lines):
        _, many, first = line.label.partition(" slots: ")
        word, _, of = (first if many else line.label).partition(" ")
        if line.kind not in ("kernel", "copy") or word not in WORK:
            continue
        if many:
            of = next((text for text in own if of.startswith(f"{text}, ")), of)
        if (
            of not in own and len(line.label.encode()) >= LABEL
        ):  # the word before it has cut it shorter than the buffer's own lines are
            of = next((text for text in own if text.startswith(of)), of)
        if of in own:
            found[i] = own[of]
    return found
