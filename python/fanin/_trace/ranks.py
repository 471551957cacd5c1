"""The traces of several ranks as one: a process for each rank, an arrow for each message of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from .._words import counted
from .line import HOST, Line
from .passes import add_passes
from .picture import Message, Picture, Slice, Workers, clock_of, place
from .recording import Pictured

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: The fields of a line, as it travels.
FIELDS = tuple(f.name for f in fields(Line))


def packed(lines: Sequence[Line]) -> list[list[object]]:
    """Lines as JSON has them; ValueError if they have no times on the host's clock."""
    if any(line.device != HOST for line in lines):
        raise ValueError("gather_trace: expected a trace of work on the CPU, got one of a device's")
    return [[getattr(line, name) for name in FIELDS] for line in lines]


def unpacked(rows: Sequence[Sequence[object]]) -> list[Line]:
    """The lines that `packed` packed."""
    made = [Line(*row) for row in rows]  # type: ignore[arg-type]
    return [replace(line, rules=tuple(line.rules)) for line in made]


class RanksTrace(Pictured):
    """The traces of all ranks on one clock, by `fanin.dist.gather_trace`."""

    def __init__(
        self, lines: Sequence[Sequence[Line]], groups: Sequence[int], offsets: Sequence[int], errors: Sequence[int]
    ) -> None:
        #: The lines of each rank, in nanoseconds of the gathering rank's clock.
        self.lines = tuple(tuple(moved(line, -by) for line in mine) for mine, by in zip(lines, offsets, strict=True))
        #: Nanoseconds by which each rank's clock was ahead of the gathering rank's ..
        self.offsets_ns = tuple(offsets)
        #: .. and the most by which that may be wrong.
        self.errors_ns = tuple(errors)
        self._groups = tuple(groups)

    def __repr__(self) -> str:
        lines = sum(map(len, self.lines))
        return f"<fanin.dist.RanksTrace: {counted(len(self.lines), 'rank')}, {counted(lines, 'line')}>"

    def _digests_json(self) -> dict[str, object] | None:
        from .digests import as_json, run_of

        has_digests = any(line.kind == "digest" for mine in self.lines for line in mine)
        return as_json([run_of(mine) for mine in self.lines]) if has_digests else None

    def picture(self) -> Picture:
        """The lines of all ranks, placed in time: lanes for each rank, a message from each sender to each owner and
        back.
        """
        clock = clock_of([line for mine in self.lines for line in mine])
        whole = Picture(
            clock.replace("host's clock", f"clock of a rank, others within {max(self.errors_ns) / 1000:g} us")
        )
        begin = min((Workers(mine).begin for mine in self.lines if mine), default=0)
        for rank, mine in enumerate(self.lines):
            if mine:  # notes of adds and parked bytes are left out
                one, later = add_passes(place(mine), mine), (Workers(mine).begin - begin) / 1000
                for s in [*one.slices, *one.nodes]:
                    s.lane = s.lane._replace(rank=rank)
                    s.start += later
                    s.end += later
                whole.slices += one.slices
                whole.nodes += one.nodes
                whole.gradients += one.gradients
        steps: dict[tuple[int, int, int, str], list[Slice]] = {}
        for s in whole.slices:
            if s.line and s.line.kind == "bucket" and s.line.buffer == self._groups[s.lane.rank]:
                steps.setdefault((s.lane.rank, *at(s.line)), []).append(s)
        for rank, mine in enumerate(self.lines):
            turn: dict[tuple[int, int, str], int] = {}
            for line in mine:
                if line.buffer != self._groups[rank]:
                    continue
                if line.kind == "bucket":
                    turn[at(line)] = turn.get(at(line), -1) + 1
                elif line.kind == "send" and at(line) in turn:
                    ends = [steps.get((r, *at(line)), [])[turn[at(line)] :] for r in (rank, line.to)]
                    if all(ends):  # else a ring was full
                        whole.messages.append(Message(ends[0][0], ends[1][0], line.bytes))
        return whole


def at(line: Line) -> tuple[int, int, str]:
    """Which step of which sum a line belongs to: the same on every rank."""
    return line.key, line.slot, line.label


def moved(line: Line, ns: int) -> Line:
    """The line, later by `ns`."""
    return replace(line, host_ns=line.host_ns + ns, begin_ns=line.begin_ns and line.begin_ns + ns)
