"""What a pass holds over time, and who holds the most at its peak (rule H2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._words import counted, size
from .line import Line

__tracebackhide__ = True  # no frames of ours in reports of pytest

SHOWN = 8  #: holders that are printed
RUNNING = -1  #: the key of a running sum
TAKEN = -2  #: .. of a sum that its node has


class Point(NamedTuple):
    """The bytes that are held from a moment on."""

    us: float  #: Since the first line of the trace
    bytes: int
    node: str  #: The node that was at work


@dataclass(frozen=True)
class Holder:
    """A gradient or a sum that is held; prints as a sentence."""

    node: str
    slot: int
    key: int | None  #: Of a contribution that waits; None: a sum
    bytes: int
    is_taken: bool  #: The node has the sum: it is at work

    def __str__(self) -> str:
        if self.key is not None:
            return f"slot {self.slot} of node {self.node} holds {size(self.bytes)} for key {self.key}"
        what = "the sum that its function has" if self.is_taken else "its sum so far"
        return f"slot {self.slot} of node {self.node} holds {size(self.bytes)}: {what}"


@dataclass(frozen=True)
class Memory:
    """The memory of the passes of a trace; prints the peak and its holders."""

    curve: tuple[Point, ...]
    peak: int  #: The most bytes at one time
    node: str  #: The node that was at work then
    holders: tuple[Holder, ...]  #: At the peak, the largest first; memory that two slots share is listed for both
    unknown: int  #: Gradients whose bytes are unknown, as objects with a `+` of their own

    def __str__(self) -> str:
        if not self.peak:
            return "no pass backward was recorded"
        lines = [f"at most {size(self.peak)} at once, while node {self.node} was at work"]
        lines += map(str, self.holders[:SHOWN])
        if len(self.holders) > SHOWN:
            lines.append(f".. and {len(self.holders) - SHOWN} more")
        if self.unknown:
            lines.append(f"{counted(self.unknown, 'gradient')} of unknown size not counted")
        return "\n".join(lines)


class _Item(NamedTuple):
    key: int
    bytes: int
    address: int  #: 0: memory of its own


_Place = tuple[int, int, int]  # pass, node, slot


class _Held:
    """What is held, as lines say it one after the other."""

    def __init__(self) -> None:
        self.slots: dict[_Place, list[_Item]] = {}
        self.mine: dict[tuple[int, int], set[_Place]] = {}  # the slots of each node
        self.shared: dict[int, Counter[int]] = {}  # of each address how many hold how many bytes there
        self.total = 0
        #: Of each thread: who added last, and the folds since, before the line of the gradient itself.
        self.pending: dict[int, tuple[Line, list[Line]]] = {}
        #: Of each buffer and slot: gradients of roots, which are the caller's memory.
        self.roots: Counter[tuple[int, int]] = Counter()
        self.most = 0  # while a sum is made beside its terms

    def put(self, place: _Place, items: Sequence[_Item]) -> None:
        """The slot holds these from now on."""
        for item in self.slots.pop(place, ()):
            self.count(item, -1)
        for item in items:
            self.append(place, item)

    def append(self, place: _Place, item: _Item) -> None:
        """The slot holds this, too."""
        self.count(item, 1)
        self.slots.setdefault(place, []).append(item)
        self.mine.setdefault(place[:2], set()).add(place)

    def count(self, item: _Item, by: int) -> None:
        """Memory that two slots share counts once."""
        if not item.address:
            self.total += by * item.bytes
            return
        holders = self.shared.setdefault(item.address, Counter())
        before = max(holders, default=0)
        holders[item.bytes] += by
        if not holders[item.bytes]:
            del holders[item.bytes]
        self.total += max(holders, default=0) - before
        if not holders:
            del self.shared[item.address]

    def fold(self, place: _Place, line: Line) -> None:
        """Some of the slot's terms become a running sum."""
        items = sorted(self.slots.get(place, []), key=lambda item: item.key)
        added = line.count - any(item.key == RUNNING for item in items) - self.roots.pop((line.buffer, line.slot), 0)
        if not line.in_place:
            self.most = max(self.most, self.total + line.bytes)
        waiting = [item for item in items if item.key != RUNNING]
        self.put(place, [_Item(RUNNING, line.bytes, 0), *waiting[max(added, 0) :]])

    def gradient(self, line: Line) -> None:
        place = line.pass_number, line.to, line.slot
        self.append(place, _Item(line.key, line.bytes, line.other))
        add, folds = self.pending.pop(line.thread, (None, []))
        if add is not None:
            self.roots[add.buffer, add.slot] -= 1
        for fold in folds:
            self.fold(place, fold)

    def step(self, line: Line) -> None:
        """What a line changes."""
        self.most = 0
        place = line.pass_number, line.node
        slot = (*place, line.slot)
        add, folds = self.pending.get(line.thread, (None, []))
        if line.kind == "add" and line.buffer:
            self.roots[line.buffer, line.slot] += 1
            self.pending[line.thread] = line, []
        elif line.kind == "gradient":
            self.gradient(line)
        elif line.kind == "fold" and add is not None and line.pass_number and place == (add.pass_number, add.node):
            folds.append(line)
        elif line.kind == "fold" and line.pass_number:
            self.fold(slot, line)
        elif line.kind == "take" and slot in self.slots:
            self.put(slot, [_Item(TAKEN, line.bytes, 0)])
        elif line.kind == "drop":
            self.put(slot, [])
        elif line.kind == "node":
            for mine in self.mine.pop(place, ()):
                self.put(mine, [])


def memory(lines: Sequence[Line]) -> Memory:
    """The curve of a trace's lines."""
    names = {(line.pass_number, line.node): line.label for line in lines if line.kind == "node"}
    begin = min((line.begin_ns or line.host_ns for line in lines), default=0)
    held, curve = _Held(), list[Point]()
    peak, at = 0, -1
    for i, line in enumerate(lines):
        held.step(line)
        if not curve or curve[-1].bytes != held.total:
            curve.append(Point((line.host_ns - begin) / 1000, held.total, names.get((line.pass_number, line.node), "")))
        if max(held.total, held.most) > peak:
            peak, at = max(held.total, held.most), i
    then = _Held()
    for line in lines[:at]:
        then.step(line)
    if at >= 0 and then.total < peak and lines[at].kind != "fold":
        then.step(lines[at])
    holders = [
        Holder(
            names.get(where[:2], f"node {where[1]}"),
            where[2],
            item.key if item.key >= 0 else None,
            item.bytes,
            item.key == TAKEN,
        )
        for where, items in then.slots.items()
        for item in items
        if item.bytes
    ]
    unknown = sum(line.kind == "gradient" and not line.bytes and not line.other for line in lines)
    node = names.get((lines[at].pass_number, lines[at].node), "") if at >= 0 else ""
    return Memory(tuple(curve), peak, node, tuple(sorted(holders, key=lambda h: -h.bytes)), unknown)
