"""Passes backward in a picture: their nodes and gradients, and what a pass took as long as."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._words import counted
from .line import HOST, Line
from .picture import Gradient, Lane, Neighbours, Node, Picture, Slice, Workers

__tracebackhide__ = True  # no frames of ours in reports of pytest

SHOWN = 12  # names of a critical path


class Step(NamedTuple):
    """A piece of a critical path."""

    work: Slice
    wait: float  #: Between the end of the step before it and its own beginning


@dataclass(frozen=True)
class CriticalPath:
    """The chain of work and waits that a pass took as long as; prints as a sentence."""

    pass_number: int
    rank: int  #: Of traces of several ranks; else -1
    steps: tuple[Step, ...]
    clock: str
    nodes: Mapping[tuple[int, int], str]  #: Names of nodes, by pass and number

    @property
    def took(self) -> float:
        return self.steps[-1].work.end - self.steps[0].work.start

    @property
    def waited(self) -> float:
        return sum(step.wait for step in self.steps)

    @property
    def names(self) -> list[str]:
        """Its nodes and sums, from the first to the last; consecutive ones of one name count as one."""
        runs = [(name, len(list(run))) for name, run in itertools.groupby(map(self.name, self.steps))]
        return [name if n == 1 else f"{name} x {n}" for name, n in runs]

    def name(self, step: Step) -> str:
        """Of a sum its own, of other work that of its node."""
        work = step.work
        node_of_pass = (work.line.pass_number, work.line.node) if work.line and not work.buffer else (0, 0)
        return self.nodes.get(node_of_pass, work.name)

    def __str__(self) -> str:
        names = self.names
        if len(names) > SHOWN:
            left = len(names) - SHOWN
            names = [*names[: SHOWN - 4], f".. {left} more ..", *names[-4:]]
        took = counted(len(self.steps), "step")
        if not self.clock.startswith("logical"):
            took = f"{amount(self.took)}, {amount(self.waited)} of them waits"
        path = f"critical path{f' of rank {self.rank}' * (self.rank >= 0)}"
        return f"{path}: {took}: {' > '.join(names)}"


def amount(us: float) -> str:
    """A time, in the unit that suits it."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"


def add_passes(picture: Picture, lines: Sequence[Line]) -> Picture:
    """Add the nodes of passes to a picture: on the CPU by the host's clock, if the picture uses it; on a stream around
    their own work there; else after the producers of their gradients.
    """
    workers = Workers(lines)
    came: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of each node: the givers, and to which slot
    found: dict[tuple[int, int], Node] = {}
    ends: dict[Lane, float] = {}
    work: dict[tuple[int, int], list[Slice]] = {}
    for s in picture.slices:
        if s.line and s.line.pass_number and not s.buffer:
            work.setdefault((s.line.pass_number, s.line.node), []).append(s)
    for line in lines:  # nodes in the order in which they ended
        if line.kind == "gradient":
            came.setdefault((line.pass_number, line.to), []).append((line.node, line.slot))
        if line.kind != "node":
            continue
        node_of_pass, lane = (line.pass_number, line.node), workers.lane(line)
        givers = [(found.get((line.pass_number, n)), slot) for n, slot in came.get(node_of_pass, [])]
        own = work.get(node_of_pass, [])
        if lane.device == HOST and not picture.measured and own:
            lane = own[0].lane  # its own stream is unknown: the lane of its work
        own = [s for s in own if s.lane == lane]
        if picture.measured:
            start, end = workers.time(line.begin_ns), workers.time(line.host_ns)
        elif own:
            start, end = min(s.start for s in own), max(s.end for s in own)
        else:
            start = max([ends.get(lane, 0.0), *(n.end for n, _ in givers if n)])
            end = start + (lane.device == HOST and picture.clock.startswith("logical"))
        made = Node(lane, line.label, start, end, "", line, line.node, line.pass_number)
        picture.nodes.append(made)
        picture.gradients += [Gradient(n, made, slot) for n, slot in givers if n]
        found[node_of_pass] = made
        ends[lane] = max(end, ends.get(lane, 0.0))
    picture.nodes.sort(key=lambda node: (node.start, -node.end))
    return picture


# The critical path


def critical_paths(picture: Picture) -> list[CriticalPath]:
    """Of each pass, in the order in which they began. On the host's clock a path goes over nodes; on that of devices
    over their work: what nodes queued, and sums.
    """
    found = []
    for rank, number in dict.fromkeys((node.lane.rank, node.pass_number) for node in picture.nodes):
        mine = [n for n in picture.nodes if (n.lane.rank, n.pass_number) == (rank, number)]
        every: list[Slice] = [
            s for s in picture.slices if s.line and s.line.pass_number == number and s.lane.device != HOST
        ]
        follows: list[tuple[Slice, Slice]] = []  # what waits, after what it waits for
        if picture.measured or not every:
            every = [*mine]
            follows += [(g.source, g.target) for g in picture.gradients]
        else:
            neighbours, ids = Neighbours(picture), {id(s) for s in every}
            for arrow in picture.arrows:
                awaited, waits = neighbours.before(*arrow.at), neighbours.after(*arrow.to)
                if awaited and waits and id(awaited) in ids:
                    follows.append((awaited, waits))
        lanes: dict[Lane, list[Slice]] = {}
        for s in every:
            lanes.setdefault(s.lane, []).append(s)
        for row in lanes.values():
            follows += itertools.pairwise(sorted(row, key=lambda s: (s.start, s.end)))
        before: dict[int, list[Slice]] = {}
        for one, next_ in follows:
            before.setdefault(id(next_), []).append(one)
        # From the end: before each step whatever ended last of what it had to wait for.
        last: Slice | None = max(every, key=lambda s: s.end)
        steps: list[Step] = []
        seen: set[int] = set()
        while last is not None:
            seen.add(id(last))
            earlier = [s for s in before.get(id(last), []) if id(s) not in seen]
            held = max(earlier, key=lambda s: s.end, default=None)
            steps.append(Step(last, max(last.start - held.end, 0.0) if held else 0.0))
            last = held
        names = {(n.pass_number, n.number): n.name for n in mine}
        found.append(CriticalPath(number, rank, tuple(steps[::-1]), picture.clock, names))
    return found


def summary(picture: Picture) -> str:
    """The text of `Trace.summary`."""
    said = []
    for found in critical_paths(picture):
        of_pass = found.rank, found.pass_number
        nodes = [n for n in picture.nodes if (n.lane.rank, n.pass_number) == of_pass]
        given = sum((g.target.lane.rank, g.target.pass_number) == of_pass for g in picture.gradients)
        lanes = {n.lane for n in nodes}
        workers, streams = (len({n for n in lanes if (n.device == HOST) == host}) for host in (True, False))
        on = [counted(workers, "worker")] * bool(workers) + [counted(streams, "stream")] * bool(streams)
        of = f"rank {found.rank}, " if found.rank >= 0 else ""
        said.append(
            f"{of}pass {found.pass_number}: {len(nodes)} nodes and leaves on {' and '.join(on)},"
            f" {counted(given, 'gradient')} between them\n{found}"
        )
    return "\n".join(said) or "no pass backward was recorded"
