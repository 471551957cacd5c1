"""A trace: the decisions of a buffer and the work of a device, line by line; as a file for Perfetto, a picture, a
graph.

    with fanin.trace() as t:
        ...
    t.save("pass.json")      # opens in ui.perfetto.dev, merges with torch.profiler's
    t.plot("pass.svg")       # where streams meet: work as bars, waits as arrows
    print(t.summary())       # of passes backward: their critical path
    print(t.dot())           # the order of the work, for Graphviz

A trace records its own thread, and the host threads that a simulated machine spawns on it.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .. import _core
from .._checks import flag, integer
from .._files import path_text, write_whole
from .._words import counted, names_nearest, rule_names
from ..errors import RaceError
from .line import Line

if TYPE_CHECKING:  # pictures are imported when one is drawn
    from .memory import Memory
    from .picture import Names, Picture

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Trace", "trace"]


class Pictured(ABC):
    """Lines placed in time: as a file, a picture, a text."""

    @abstractmethod
    def picture(self) -> Picture:
        """The lines, placed in time."""

    def _repr_svg_(self) -> str | None:
        """The picture for a notebook, if there is something to draw."""
        from .plot import draw

        picture = self.picture()
        return draw(picture)._repr_svg_() if picture.lanes else None

    def summary(self) -> str:
        """For each pass backward: its nodes, gradients, workers, and the critical path: the chain of nodes and waits
        that it took as long as, found from its end: before each node whatever ended last of what the node had to wait
        for, a gradient or the work before it on its worker or stream.

        >>> import fanin, numpy as np
        >>> w = fanin.Leaf(np.zeros(2), name="w")
        >>> double = fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="double")
        >>> with fanin.trace() as t:
        ...     fanin.backward([(double, 0, np.ones(2))])
        >>> print(t.summary())  # doctest: +ELLIPSIS
        pass ...: 2 nodes and leaves on 1 worker, 1 gradient between them
        critical path: ... us, ... us of them waits: double > w
        """
        from .passes import summary

        return summary(self.picture())

    def save(self, path: str | os.PathLike[str], *, names: Names | None = None) -> None:
        """Write Chrome trace JSON, with a slice for each node around its work, an arrow for each wait and each
        gradient.

        In the file pid is the device, tid the stream or worker; `fanin.compare` reads its digests. OSError if it cannot
        be written; then no file is left.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        names : dict
            Names of streams: {(0, 2): "copies"} is stream 2 of device 0.
        """
        import json

        from .chrome import chrome

        target = path_text(path, "trace.save")
        text = json.dumps(chrome(self.picture(), names or {}, self._digests_json()), indent=1)
        write_whole(target, lambda out: out.write(text.encode()))

    def _digests_json(self) -> dict[str, object] | None:
        """The digests for the file; None: there are none."""
        return None

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None, names: Names | None = None) -> None:
        """Draw what waits for what as SVG, to be read in ten seconds.

        A device has a lane for each stream, sums as blue bars, waits as arrows, races with a red rim; a pass on the CPU
        has a lane for each worker, nodes as bars, gradients as arrows. Bars have names, and lie in the order that waits
        enforce, not to scale. A picture has at most six lanes: of a longer trace it shows the place where a race was
        found or where streams meet, and says how much it leaves out; `save` writes all of it with the times. A notebook
        shows a trace as this picture. ValueError for a file name with another ending than .svg; OSError if it cannot be
        written.

        Parameters
        ----------
        path : str or os.PathLike
            The file.
        title : str
            A line above the picture.
        names : dict
            As for `save`; a device's lanes are in this order, and the sum that the picture is about is in the last one.
            Names that `Machine.stream` gave need not be repeated; a stream without a name is called by its work.
        """
        from .._svg import save, svg_path
        from .plot import draw

        target = svg_path(path, "trace.plot")
        save(draw(self.picture(), title=title, names=names), target)

    def dot(self) -> str:
        """The order of the work, as Graphviz DOT text: a cluster for each stream, dashed edges for waits."""
        from .graphviz import dot

        return dot(self.picture())


class Trace(Pictured):
    """The result of `fanin.trace`: a context manager, and afterwards its lines."""

    def __init__(self, capacity: int = 1 << 16, digests: bool = False) -> None:
        self._capacity, self._digests = capacity, digests
        self._cores = [self._core()]
        self._races: list[tuple[int, str]] = []  # (lines before it, the message)
        self._named: list[Names] = []  # of the machines that were entered while it recorded
        self._depth, self._begun = 0, False

    def __enter__(self) -> Trace:
        if self._depth:
            raise RuntimeError("trace: this trace is recording already; a second one needs fanin.trace() of its own")
        if self._begun:
            self._cores.append(self._core())
        self._cores[-1].begin()
        self._begun, self._depth = True, 1
        self._named += entered()
        active().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if self not in active():
            raise RuntimeError("trace: __exit__ without __enter__ on this thread")
        self._cores[-1].end()
        self._depth = 0
        active().remove(self)
        self._settle()
        if isinstance(value, RaceError):
            self._races.append((len(self), str(value)))

    def _beside(self) -> _core.Trace:
        """A ring for another thread; its lines become part of this trace."""
        core = self._core()
        self._cores.insert(0, core)  # the last one is this thread's own
        return core

    def _core(self) -> _core.Trace:
        """A new ring."""
        return _core.Trace(self._capacity, self._digests)

    def _settle(self) -> None:
        """Read what digests of device memory have copied."""
        if self._digests:
            self._cores[-1].settle()

    @property
    def lines(self) -> tuple[Line, ...]:
        """The recorded lines, in order."""
        at, every = list(Line.__annotations__).index("rules"), []  # the core has rules as bits
        for core in self._cores:
            for line in core.lines():
                fields: list[Any] = list(line)
                fields[at] = rule_names(fields[at])
                every.append(Line(*fields))
        return tuple(sorted(every, key=lambda line: line.host_ns))

    def memory(self) -> Memory:
        """The bytes that passes hold over time, their peak, and who holds the most then; print it.

        A pass holds each gradient from its delivery, and each sum until its node has run (of a boxed one until its
        function drops it). Memory that two slots share counts once. Not counted: what functions make before they return
        it, gradients of roots, which are the caller's, and `.grad` of leaves. A trace that lost lines is a ValueError.

        >>> w = fanin.Leaf(np.zeros(3), name="w")
        >>> low = fanin.Node(lambda *g: g[0].sum() * np.ones(3), 2, edges=[(w, 0)], name="low")
        >>> top = fanin.Node(lambda g: (g, np.ones(1000)), edges=[(low, 0), (low, 1)], name="top")
        >>> with fanin.trace() as t:
        ...     fanin.backward([(top, 0, np.ones(10))])
        >>> print(t.memory())
        at most 7.891 KiB at once, while node top was at work
        slot 1 of node low holds 7.812 KiB for key 0
        slot 0 of node low holds 80 B for key 0
        """
        from .memory import memory

        if self.dropped:
            lost = counted(self.dropped, "line")
            raise ValueError(f"trace.memory: {lost} did not fit and are lost: record with a larger capacity=")
        return memory(self.lines)

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

    def picture(self) -> Picture:
        """The lines, placed in time: on the clock of the simulated device where there is one, on that of the host for
        passes on the CPU, else in logical order.
        """
        from .passes import add_passes
        from .picture import place

        lines = self.lines
        picture = add_passes(place(lines, self._races), lines)
        for names in self._named:
            picture.names.update(names)
        return picture

    def _digests_json(self) -> dict[str, object] | None:
        from .digests import as_json, run_of

        return as_json([run_of(self.lines, self.dropped)]) if self._digests else None

    def _repr_svg_(self) -> str | None:
        """The picture for a notebook, once the trace has ended."""
        return None if self._depth else super()._repr_svg_()


def beside() -> list[_core.Trace]:
    """Rings for one thread more, of the traces that record this one."""
    return [trace._beside() for trace in active()]


@contextmanager
def recording(rings: Sequence[_core.Trace]) -> Iterator[None]:
    """Record this thread in rings that `beside` made for it."""
    for ring in rings:
        ring.begin()
    try:
        yield
    finally:
        for ring in rings:
            ring.end()


@names_nearest
def trace(*, capacity: int = 1 << 16, digests: bool = False) -> Trace:
    """Record what this thread does inside the `with` block; the last `capacity` lines are kept.

    Parameters
    ----------
    capacity : int
        Lines that each thread keeps.
    digests : bool
        Keep a 64-bit digest of every contribution, sum and leaf of passes, and of every contribution and sum of
        buffers outside of passes. `save` writes them, and `fanin.compare` names the first that differs. Objects with a
        `+` of their own and what a graph tree records have none; on a device each costs a copy until the block ends.

    >>> import fanin, numpy as np
    >>> with fanin.trace() as t:
    ...     total = fanin.add_n([np.ones(3), np.ones(3)])
    >>> len(t) > 0
    True
    """
    return Trace(integer("trace: capacity", capacity, 1), flag("trace: digests", digests))


class _Here(threading.local):
    """What belongs to one thread."""

    def __init__(self) -> None:
        self.named: list[Names] = []  # the names of streams of each machine that it has entered
        self.traces: list[Trace] = []  # those that record it


_here = _Here()


def entered() -> list[Names]:
    """The names of streams of each machine that this thread has entered."""
    return _here.named


def begin_names(names: Names) -> None:
    """A machine begins on this thread: traces show these names of its streams, and those that are added later."""
    entered().append(names)
    for trace in active():
        trace._named.append(names)


def end_names(names: Names) -> None:
    """The block of a machine ends on this thread."""
    last = max(i for i, one in enumerate(entered()) if one is names)
    del entered()[last]


def settle() -> None:
    """A device ends: read what digests of its memory have copied, for all traces of this thread."""
    for trace in active():
        trace._settle()


def active() -> list[Trace]:
    """The traces that record this thread."""
    return _here.traces
