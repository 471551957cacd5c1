"""A trace, placed in time: lanes, work, waits. Files and pictures are made of it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .line import HOST, LABEL, WORK, Line

Names = Mapping[tuple[int, int], str]  #: what streams are called, by device and stream


class Lane(NamedTuple):
    device: int
    stream: int

    @property
    def name(self) -> str:
        return "cpu" if self.device < 0 else f"device {self.device}, stream {self.stream}"


@dataclass
class Slice:
    """Work on a lane, placed in time."""

    lane: Lane
    name: str
    start: float
    end: float
    buffer: str = ""
    """The buffer whose sum it is; "" for work of others."""
    line: Line | None = None


@dataclass
class Arrow:
    """A wait: `to` is held back until `at` has passed."""

    name: str
    at: tuple[Lane, float]
    to: tuple[Lane, float]


@dataclass
class Race:
    lane: Lane
    time: float
    text: str


@dataclass
class Picture:
    """A trace, placed in time: what files and pictures are made of."""

    clock: str
    slices: list[Slice] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    notes: list[tuple[Lane, float, Line]] = field(default_factory=list)
    """Adds and takes: points in a lane."""
    parked: list[tuple[str, float, int]] = field(default_factory=list)
    """(buffer, time, bytes that are parked from then on)."""
    races: list[Race] = field(default_factory=list)
    elided: int = 0
    """Waits that were left out because they were known to hold."""

    def in_order(self, names: Names) -> list[Lane]:
        """The lanes by device and role: of one device as `names` lists them, then those of producers alone, then those
        with sums.
        """
        listed = {lane: i for i, lane in enumerate(names)}
        summing = {s.lane for s in self.slices if s.buffer}

        def place(lane: Lane) -> tuple[int, int, bool, int]:
            return lane.device, listed.get(lane, len(listed)), lane in summing, lane.stream

        return sorted(self.lanes, key=place)

    @property
    def lanes(self) -> list[Lane]:
        """In the order of their numbers."""
        found = {s.lane for s in self.slices} | {lane for a in self.arrows for lane in (a.at[0], a.to[0])}
        return sorted(found | {n[0] for n in self.notes} | {r.lane for r in self.races})


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
    """Where each line goes: work at its own time where it has one, else behind the work before it and behind what that
    waits for.
    """
    timed = any(line.start_us >= 0 for line in lines if line.kind in ("kernel", "copy"))
    picture = Picture("simulated: a cost model, no measurement" if timed else "logical order, no times")
    whose = owners(lines)
    now: dict[Lane, float] = {}  # the end of what a lane has so far
    recorded: dict[int, tuple[Lane, float]] = {}
    parked = Parked()
    red = dict(races)
    last = Lane(HOST, 0)
    for i, line in enumerate(lines):
        lane = Lane(line.device, line.stream)
        if i in red:
            picture.races.append(Race(last, now.get(last, 0.0), red.pop(i)))
        t = now.get(lane, 0.0)
        if line.kind in ("kernel", "copy"):
            start, end = (line.start_us, line.end_us) if timed and line.start_us >= 0 else (t, t + 1.0)
            picture.slices.append(Slice(lane, line.label or line.kind, start, end, whose.get(i, ""), line))
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
        for change in parked.after(line):
            picture.parked.append((change[0], max(now.values(), default=0.0), change[1]))
        if line.kind in ("kernel", "copy", "add", "take"):
            last = lane
    picture.races += [Race(last, now.get(last, 0.0), text) for text in red.values()]
    return picture


def owners(lines: Sequence[Line]) -> dict[int, str]:
    """Which buffer's work a kernel is: "sum w1" and "copy grads[3]" are those of the slots whose adds, folds and takes
    are labelled so.

    "9 slots: sum w1, sum w2, .." is the first one's: all are of one buffer.
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


class Parked:
    """How many bytes are parked in each buffer, as the lines tell it."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.summed: set[tuple[int, int]] = set()

    def after(self, line: Line) -> Iterator[tuple[str, int]]:
        """(label of the buffer, its bytes) where the line changes them."""
        if line.kind not in ("add", "fold", "take") or not line.buffer:
            return
        slot = line.buffer, line.slot
        mine = self.slots.setdefault(slot, [])
        if line.kind == "add":
            mine.append((line.key if line.key >= 0 else len(mine), line.bytes))
            mine.sort()
        elif line.kind == "fold":
            del mine[: line.count - (slot in self.summed)]
            self.summed.add(slot)
        else:
            mine.clear()
            self.summed.discard(slot)
        total = sum(n for (buffer, _), items in self.slots.items() if buffer == line.buffer for _, n in items)
        yield line.label or f"buffer {line.buffer}", total
