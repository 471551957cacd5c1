"""A trace: what a buffer decided and a device did, line by line; as a file for Perfetto, a picture, a graph.

    with fanin.trace() as t:
        ...
    t.save("pass.json")      # opens in ui.perfetto.dev, merges with torch.profiler's
    t.plot("pass.svg")       # a lane for each stream, sums as bars, waits as arrows
    print(t.dot())           # what happens before what, for Graphviz

A trace records its own thread, and the host threads that a simulated machine spawns on it. Without one nothing is
recorded.
"""

from __future__ import annotations

import bisect
import errno
import io
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

from .. import _core
from .._words import counted

__all__ = ["Line", "Trace", "trace"]

HOST = -1
WORK = (
    "sum",
    "finish",
    "copy",
    "cast",
    "reduce",
    "upload",
    "download",
    "fill",
    "zero",
    "scatter",
    "widen",
    "merge",
)
LABEL = 127  # bytes that a label has room for (csrc/base/trace.h)
Names = Mapping[tuple[int, int], str]


@dataclass(frozen=True)
class Line:
    """One thing that was decided or queued."""

    kind: str
    """add, fold, take: what a buffer did. record, wait, mark, kernel, copy, free, sync: what was asked of a device;
    elided: a wait that was left out, known to hold.
    """
    how: str
    """The case letter of the plan (rules S8-S11), or ""."""
    in_place: bool
    device: int
    """The ordinal of the device; -1 for the CPU."""
    slot: int
    """-1: none."""
    count: int
    """How many contributions a fold summed."""
    buffer: int
    """The buffer's number; 0: none."""
    key: int
    """-1: none."""
    rules: tuple[str, ...]
    stream: int
    """The handle of the stream; 0: none."""
    other: int
    """Of a wait: the handle of the stream that is waited for."""
    event: int
    bytes: int
    host_ns: int
    """When it was asked for, in nanoseconds of a monotonic clock."""
    start_us: float
    """On the clock of a simulated device, in microseconds; below 0: not known."""
    end_us: float
    label: str

    def __str__(self) -> str:
        where = "cpu" if self.device < 0 else f"device {self.device}, stream {self.stream}"
        words = [f"{self.kind:<6} {where}"]
        if self.kind == "wait":
            words.append(f"for event {self.event} of stream {self.other}")
        elif self.kind in ("record", "elided"):
            words.append(f"event {self.event}")
        if self.label:
            words.append(self.label)
        if self.slot >= 0:
            words.append(f"slot {self.slot}" + (f", key {self.key}" if self.key >= 0 else ""))
        if self.kind == "fold":
            words.append(f"{counted(self.count, 'term')}{', in place' if self.in_place else ''}")
        if self.rules:
            words.append("by " + ", ".join(self.rules))
        return "  ".join(words)


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


class Trace:
    """What `fanin.trace` gives: a context manager, and afterwards its lines."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        self._capacity = capacity
        self._cores: list[_core.Trace] = []
        self._races: list[tuple[int, str]] = []  # (lines before it, what was said)
        self._depth = 0

    def __enter__(self) -> Trace:
        if self._depth:
            raise RuntimeError("trace: this trace is recording already; a second one needs fanin.trace() of its own")
        self._depth = 1
        core = _core.Trace(self._capacity)
        self._cores.append(core)
        core.begin()
        active().append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cores[-1].end()
        self._depth = 0
        active().remove(self)
        from ..errors import RaceError

        if isinstance(value, RaceError):
            self._races.append((len(self), str(value)))

    def _beside(self) -> _core.Trace:
        """A ring for another thread; its lines become part of this trace."""
        core = _core.Trace(self._capacity)
        self._cores.insert(0, core)  # the last one is this thread's own
        return core

    @property
    def lines(self) -> tuple[Line, ...]:
        """What was recorded, in the order in which it was asked for."""
        every = [Line(*line) for core in self._cores for line in core.lines()]
        return tuple(sorted(every, key=lambda line: line.host_ns))

    @property
    def dropped(self) -> int:
        """How many of the oldest lines were pushed out by newer ones; `capacity` sets how many are kept."""
        return sum(core.dropped for core in self._cores)

    def __len__(self) -> int:
        return sum(map(len, self._cores))

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __repr__(self) -> str:
        return f"<fanin.Trace: {counted(len(self), 'line')}{', recording' if self._depth else ''}>"

    def _repr_svg_(self) -> str | None:
        """What a notebook shows: the picture, once there is something to draw and where matplotlib is installed."""
        from .plot import draw

        picture = self.picture()
        if self._depth or not picture.lanes:
            return None
        out = io.BytesIO()
        try:
            draw(picture, out)
        except ImportError:
            return None
        return out.getvalue().decode()

    # What comes of it

    def picture(self) -> Picture:
        """The lines, placed in time: on the clock of the simulated device where there is one, else in logical order."""
        return place(self.lines, self._races)

    def save(self, path: str | os.PathLike[str], *, names: Names | None = None) -> None:
        """Write Chrome trace JSON: pid = device, tid = stream, an arrow for each wait.

        `names` says what streams are called: {(0, 2): "copies"} is stream 2 of device 0. OSError if it cannot be
        written; then nothing is.
        """
        target = named(path, "trace.save")
        text = json.dumps(chrome(self.picture(), names or {}), indent=1)
        write_whole(target, lambda out: out.write(text.encode()))

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None, names: Names | None = None) -> None:
        """Draw it (.svg, .png, .pdf): a lane for each stream, sums as bars coloured by buffer, waits as arrows, races
        red.

        `names` is as for `save`; the lanes of a device stand in its order. What is too narrow for its name bears a
        number that is explained below, with all else that is seen. A notebook shows a trace as this picture.
        ImportError, with what to install, where matplotlib is missing.
        """
        from .plot import draw

        target = named(path, "trace.plot")
        suffix = Path(target).suffix.lstrip(".").lower() or "svg"
        write_whole(target, lambda out: draw(self.picture(), out, format=suffix, title=title, names=names))

    def dot(self) -> str:
        """What happens before what, as Graphviz DOT text: a cluster for each stream, dashed edges for waits."""
        return dot(self.picture())


def trace(*, capacity: int = 1 << 16) -> Trace:
    """Record what this thread does inside the `with` block; the last `capacity` lines are kept.

    >>> import fanin, numpy as np
    >>> with fanin.trace() as t:
    ...     total = fanin.add_n([np.ones(3), np.ones(3)])
    >>> len(t) > 0
    True
    """
    if capacity < 1:
        raise ValueError(f"trace: capacity: expected an integer from 1 on, got {capacity}")
    return Trace(capacity)


_here = threading.local()


def active() -> list[Trace]:
    """The traces that record this thread."""
    if not hasattr(_here, "traces"):
        _here.traces = []
    return _here.traces  # type: ignore[no-any-return]


def named(path: str | os.PathLike[str], what: str) -> str:
    """The path as text."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected a path, a str or an os.PathLike of one, got {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what}: a path cannot hold a NUL, as {text!r} does")
    return text


def write_whole(path: str, fill: Callable[[Any], object]) -> None:
    """A file that appears whole or not at all. Its OSErrors name the path, whatever was written on the way."""
    name = None
    try:
        if not path or os.path.isdir(path):
            code = errno.EISDIR if path else errno.ENOENT
            raise OSError(code, os.strerror(code))
        folder, last = os.path.split(path)
        handle, name = tempfile.mkstemp(prefix=f".{last[:40]}.", dir=folder or os.curdir)
        with os.fdopen(handle, "wb") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as e:
        if name is not None:
            os.unlink(name)
        if isinstance(e, OSError) and e.errno is not None and (name is None or e.filename in (None, name)):
            raise OSError(e.errno, e.strerror, path) from None
        raise


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


# Files


def chrome(picture: Picture, names: Names = MappingProxyType({})) -> dict[str, Any]:
    """Chrome trace JSON, in microseconds."""
    events: list[dict[str, Any]] = []
    lanes = picture.in_order(names)
    for row, lane in enumerate(
        [*lanes, *([Lane(HOST, 0)] if picture.parked and lanes and lanes[0].device != HOST else [])]
    ):
        said = f"device {lane.device}" if lane.device != HOST else "host"
        stream = f"stream {lane.stream}" if lane.device != HOST else "cpu"
        if lane in names:
            stream += f" ({names[lane]})"
        for what, value in (
            ("process_name", {"name": said}),
            ("process_sort_index", {"sort_index": lane.device}),
            ("thread_name", {"name": stream}),
            ("thread_sort_index", {"sort_index": row}),
        ):
            events.append({"ph": "M", "name": what, "pid": pid(lane), "tid": lane.stream, "args": value})
    for s in picture.slices:
        args: dict[str, Any] = {"bytes": s.line.bytes if s.line else 0}
        if s.buffer:
            args["buffer"] = s.buffer
        cat = "accumulate" if s.buffer else "gpu_memcpy" if s.line and s.line.kind == "copy" else "kernel"
        events.append(at(s.lane, s.start, "X", s.name, cat, dur=round(s.end - s.start, 3), args=args))
    neighbours = Neighbours(picture)
    for number, arrow in enumerate(picture.arrows, 1):
        # A flow is drawn between the slices that enclose its ends: so both ends get a thin one of their own, at the
        # tail of the work that was recorded and at the head of the work that waits.
        for word, phase, (lane, time) in (("record", "s", arrow.at), ("wait", "f", arrow.to)):
            work = neighbours.before(lane, time) if phase == "s" else neighbours.after(lane, time)
            dur = min(0.5, (work.end - work.start) / 8) if work else 0.0
            start = time if not work else work.end - dur if phase == "s" else work.start
            events.append(at(lane, start, "X", f"{word} {arrow.name}", "event", dur=round(dur, 3), args={}))
            flow = at(lane, start, phase, arrow.name, "event", id=number)
            events.append({**flow, "bp": "e"} if phase == "f" else flow)
    for lane, time, line in picture.notes:
        args = {"slot": line.slot, "key": line.key, "rules": ", ".join(line.rules), "bytes": line.bytes}
        events.append(at(lane, time, "i", f"{line.kind} {line.label}", "fanin", s="t", args=args))
    for buffer, time, n in picture.parked:
        events.append(at(Lane(HOST, 0), time, "C", f"parked bytes of {buffer}", "fanin", args={"bytes": n}))
    for race in picture.races:
        events.append(at(race.lane, race.time, "i", "RACE", "race", s="g", cname="terrible", args={"text": race.text}))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": 0,
        "otherData": {"made by": "fanin", "clock": picture.clock},
        "traceEvents": events,
    }


def pid(lane: Lane) -> int:
    """Devices have their ordinals, as in torch.profiler's traces; the host has the process's own number."""
    return lane.device if lane.device != HOST else os.getpid()


def at(lane: Lane, time: float, phase: str, name: str, category: str, **more: Any) -> dict[str, Any]:
    return {
        "ph": phase,
        "name": name,
        "cat": category,
        "pid": pid(lane),
        "tid": lane.stream,
        "ts": round(time, 3),
        **more,
    }


def dot(picture: Picture) -> str:
    """Graphviz text. Nodes are pieces of work; edges say what comes before what."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    out = ["digraph fanin {", "  rankdir=LR;", "  node [shape=box, fontsize=10];"]
    number = {id(s): i for i, s in enumerate(picture.slices)}
    for k, lane in enumerate(picture.lanes):
        mine = [s for s in picture.slices if s.lane == lane]
        out += [f"  subgraph cluster_{k} {{", f"    label={quoted(lane.name)};"]
        for s in mine:
            style = ', style=filled, fillcolor="#cfe2f3"' if s.buffer else ""
            out.append(f"    n{number[id(s)]} [label={quoted(s.name)}{style}];")
        out.append("  }")
        out += [f"  n{number[id(a)]} -> n{number[id(b)]} [style=bold];" for a, b in itertools.pairwise(mine)]
    neighbours = Neighbours(picture)
    for arrow in picture.arrows:
        a, b = neighbours.before(*arrow.at), neighbours.after(*arrow.to)
        if a and b:
            out.append(f"  n{number[id(a)]} -> n{number[id(b)]} [style=dashed, label={quoted(arrow.name)}];")
    for i, race in enumerate(picture.races):
        out.append(f"  race{i} [label={quoted(race.text)}, color=red, fontcolor=red];")
    return "\n".join([*out, "}"]) + "\n"
