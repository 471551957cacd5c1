"""A trace as Chrome trace JSON, which Perfetto opens."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from types import MappingProxyType

from .._words import size
from .line import HOST
from .passes import critical_paths, summary
from .picture import Lane, Names, Neighbours, Picture, Slice

__tracebackhide__ = True  # no frames of ours in reports of pytest


def chrome(
    picture: Picture, names: Names = MappingProxyType({}), digests: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Chrome trace JSON, in microseconds; `digests` as `digests.as_json` made them."""
    events: list[dict[str, object]] = []
    names = picture.called(names)
    lanes = picture.in_order(names)
    for row, lane in enumerate(
        [*lanes, *([Lane(HOST, 0)] if picture.parked and lanes and lanes[0].device != HOST else [])]
    ):
        said = process_name(lane)
        stream = f"stream {lane.stream}" if lane.device != HOST else lane.name.rpartition(", ")[2]
        if lane[:2] in names:
            stream += f" ({names[lane[:2]]})"
        for what, value in (
            ("process_name", {"name": said}),
            ("process_sort_index", {"sort_index": max(lane.device, lane.rank)}),
            ("thread_name", {"name": stream}),
            ("thread_sort_index", {"sort_index": row}),
        ):
            events.append({"ph": "M", "name": what, "pid": pid(lane), "tid": lane.stream, "args": value})
    critical = {id(step.work) for found in critical_paths(picture) for step in found.steps}
    for n in picture.nodes:  # before its work, which lies within
        args: dict[str, object] = {"pass": n.pass_number, "node": n.number, "critical": id(n) in critical}
        events.append(at(n.lane, n.start, "X", n.name, "node", dur=round(n.end - n.start, 3), args=args))
    for s in picture.slices:
        args = {"bytes": s.line.bytes if s.line else 0}
        if s.buffer:
            args["buffer"] = s.buffer
        kind = s.line.kind if s.line else ""
        cat = "accumulate" if s.buffer else {"copy": "gpu_memcpy", "bucket": "bucket"}.get(kind, "kernel")
        events.append(at(s.lane, s.start, "X", s.name, cat, dur=round(s.end - s.start, 3), args=args))
    neighbours, numbers = Neighbours(picture), itertools.count(1)
    for arrow in picture.arrows:
        number = next(numbers)
        # A flow is drawn between the slices that enclose its ends: so both ends get a thin one of their own, at the
        # tail of the work that was recorded and at the head of the work that waits.
        for word, phase, (lane, time) in (("record", "s", arrow.at), ("wait", "f", arrow.to)):
            work = neighbours.before(lane, time) if phase == "s" else neighbours.after(lane, time)
            dur = rim(work) if work else 0.0
            start = time
            if work:
                start = work.end - dur if phase == "s" else work.start
            events.append(at(lane, start, "X", f"{word} {arrow.name}", "event", dur=round(dur, 3), args={}))
            events.append(flow(phase, lane, start, arrow.name, "event", number))
    for g in picture.gradients:  # from the tail of the node that gave it to the head of the one that got it
        a, b, name, number = g.source, g.target, f"to slot {g.slot} of {g.target.name}", next(numbers)
        events.append(flow("s", a.lane, a.end - rim(a), name, "gradient", number))
        events.append(flow("f", b.lane, b.start, name, "gradient", number))
    for m in picture.messages:  # from the head of the sender's step to the tail of the receiver's
        sender, owner, number = m.source, m.target, next(numbers)
        name = f"{sender.name}: {size(m.bytes)} from rank {sender.lane.rank} to rank {owner.lane.rank}"
        events.append(flow("s", sender.lane, sender.start + rim(sender), name, "message", number))
        events.append(flow("f", owner.lane, owner.end - rim(owner), name, "message", number))
    for lane, time, line in picture.notes:
        args = {"slot": line.slot, "key": line.key, "rules": ", ".join(line.rules), "bytes": line.bytes}
        events.append(at(lane, time, "i", f"{line.kind} {line.label}", "fanin", s="t", args=args))
    for buffer, time, parked in picture.parked:
        events.append(at(Lane(HOST, 0), time, "C", f"parked bytes of {buffer}", "fanin", args={"bytes": parked}))
    for race in picture.races:
        events.append(at(race.lane, race.time, "i", "RACE", "race", s="g", cname="terrible", args={"text": race.text}))
    other: dict[str, object] = {"made by": "fanin", "clock": picture.clock, "passes": summary(picture)}
    if digests is not None:
        other["digests"] = digests
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": 0,
        "otherData": other,
        "traceEvents": events,
    }


def rim(s: Slice) -> float:
    """How far from the end of a slice an arrow is, so that it lies within."""
    return min(0.5, (s.end - s.start) / 8)


def flow(phase: str, lane: Lane, time: float, name: str, category: str, number: int) -> dict[str, object]:
    """The tail ("s") or the head ("f") of an arrow."""
    return at(lane, time, phase, name, category, id=number, **({"bp": "e"} if phase == "f" else {}))


def pid(lane: Lane) -> int:
    """Ranks have their numbers, devices their ordinals, as in torch.profiler's traces; the host the process's own."""
    if lane.rank >= 0:
        return lane.rank
    return lane.device if lane.device != HOST else os.getpid()


def process_name(lane: Lane) -> str:
    if lane.device != HOST:
        return f"device {lane.device}"
    return "host" if lane.rank < 0 else f"rank {lane.rank}"


def at(lane: Lane, time: float, phase: str, name: str, category: str, **more: object) -> dict[str, object]:
    where = {"pid": pid(lane), "tid": lane.stream, "ts": round(time, 3)}
    return {"ph": phase, "name": name, "cat": category, **where, **more}
