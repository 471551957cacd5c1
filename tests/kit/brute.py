"""A model of streams, events, graphs and host threads without clocks: every order in which a small program's
steps can happen, one after the other.

A program is a list of calls in the order in which the host makes them, each by one of a few host threads. A call is
some steps, host's and device's, each with the steps that come before it. Two accesses to a common byte race if one
order has them this way and another that way. `Model(without=...)` leaves one rule out, or bends it: such a model is
wrong, and a test that passes with it tests nothing.

    launch s reads writes     what s does next                 record e s, wait s e     e is what s has been given so
    far sync s, sync_event e      the host goes on behind it       read s view              a copy on s for which the
    host waits capture g a b works       a graph of work on a, and on b between a fork and a join graph g s
    that graph, on s                 drop z, record_stream z s    z goes once those it is marked with have passed see t
    the host goes on behind what thread t has done
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Stream 0 is the legacy default one, 1 and 2 are blocking, 3 and 4 are not.
STREAMS = 5
LEGACY, BLOCKING = 0, (1, 2)
SIZE = 12  # bytes of an array

Call = tuple[Any, ...]  # (thread, name, arguments ..)

#: Rules that a model may leave out or bend; the last words of each comment name it.
BENT = (
    "fifo: a stream's steps come in any order",
    "queueing: work may run before it was queued",
    "event: a wait is none",
    "newest: a wait is for the event's first record",
    "sync: the host does not wait for a stream",
    "sync_event: the host does not wait for an event",
    "sync teaches: who synchronizes a stream knows what others knew who did",
    "legacy: the default stream is one like the others",
    "legacy wait: a wait of the default stream is no barrier",
    "read: a host read is on no stream",
    "bytes: a strided view is all from its first byte to its last",
    "reads: two reads conflict",
    "marks: memory is asked for whoever it is marked with",
    "others: who lets go of memory knows what he knows himself",
    "graph entry: a graph does not wait for its stream",
    "graph exit: its stream does not wait for a graph",
    "graph fork: a graph is one queue",
    "graph again: two launches of one graph have nothing to do with each other",
    "graph keeps: memory is asked for its graphs",
    "see: what another thread did is not known",
)


def view_of(view: tuple[Any, ...], x: Any) -> Any:
    """One of a few views of an array of SIZE bytes: (array, first, end, step) or (array, "corner")."""
    return x.reshape(3, 4)[:2, 1:3] if view[1] == "corner" else x[view[1] : view[2] : view[3]]


@dataclass
class Access:
    step: int
    array: str
    bytes: frozenset[int]
    write: bool
    kept: bool = False  # another reference keeps the memory until it has run
    release: bool = False


class Model:
    def __init__(self, threads: int, without: str = "") -> None:
        self.without = without.partition(":")[0]
        self.before: list[int] = []  # of each step: those that come before it, directly
        self.accesses: list[Access] = []
        self.calls: list[int] = []  # of each call: how many accesses follow it
        self.host: list[int | None] = [None] * threads
        self.stream: list[int | None] = [None] * STREAMS
        self.event: dict[int, int] = {}
        self.graph: dict[int, tuple[int, int | None, list[Any]]] = {}
        self.member: dict[tuple[int, int], int] = {}
        self.users: dict[str, set[int]] = {"x": set(), "z": {3}}

    def step(self, *before: int | None) -> int:
        self.before.append(sum(1 << b for b in {b for b in before if b is not None}))
        return len(self.before) - 1

    def host_step(self, thread: int, *before: int | None) -> int:
        self.host[thread] = self.step(self.host[thread], *before)
        return self.host[thread]  # type: ignore[return-value]

    def stream_step(self, s: int, *before: int | None, barrier: bool = True) -> int:
        around: tuple[int | None, ...] = ()
        if barrier and self.without != "legacy":
            around = (
                tuple(self.stream[b] for b in BLOCKING)
                if s == LEGACY
                else (self.stream[LEGACY],)
                if s in BLOCKING
                else ()
            )
        mine = None if self.without == "fifo" else self.stream[s]
        self.stream[s] = self.step(mine, *around, *before)
        return self.stream[s]  # type: ignore[return-value]

    def queued(self, h: int) -> int | None:
        return None if self.without == "queueing" else h

    def access(self, step: int, views: list[Any], write: bool, kept: bool = False) -> None:
        for view in views:
            found = view_of(view, np.arange(SIZE)).ravel()
            touched = range(found.min(), found.max() + 1) if self.without == "bytes" else found.tolist()
            self.accesses.append(Access(step, view[0], frozenset(touched), write, kept))

    def work(self, step: int, reads: list[Any], writes: list[Any], kept: bool = False) -> None:
        self.access(step, reads, False, kept)
        self.access(step, writes, True, kept)

    def mark(self, s: int, views: list[Any]) -> None:
        for view in views:
            if view[0] == "x":  # the user's own array is marked by each launch
                self.users["x"].add(s)

    def call(self, thread: int, name: str, *args: Any) -> None:
        getattr(self, "on_" + name)(thread, *args)
        self.calls.append(len(self.accesses))

    def on_launch(self, t: int, s: int, reads: list[Any], writes: list[Any]) -> None:
        self.mark(s, reads + writes)
        self.work(self.stream_step(s, self.queued(self.host_step(t))), reads, writes)

    def on_record(self, t: int, e: int, s: int) -> None:
        step = self.stream_step(s, self.queued(self.host_step(t)))
        if self.without != "newest" or e not in self.event:
            self.event[e] = step

    def on_wait(self, t: int, s: int, e: int) -> None:
        if e in self.event:
            self.stream_step(
                s,
                None if self.without == "event" else self.event[e],
                barrier=not (self.without == "legacy wait" and s == LEGACY),
            )

    def on_sync(self, t: int, s: int) -> None:
        passed = self.stream_step(s, self.host[t] if self.without == "sync teaches" else None)
        self.host_step(t, None if self.without == "sync" else passed)

    def on_sync_event(self, t: int, e: int) -> None:
        self.host_step(t, None if self.without == "sync_event" else self.event.get(e))

    def on_read(self, t: int, s: int, view: Any) -> None:
        if self.without == "read":
            step = self.host_step(t, self.stream_step(s))
        else:
            step = self.stream_step(s, self.queued(self.host_step(t)))
            self.host_step(t, step)
        self.access(step, [view], False, kept=True)

    def on_capture(self, t: int, g: int, a: int, b: int | None, works: list[Any]) -> None:
        self.host_step(t)
        self.graph[g] = a, b, works
        for where, reads, writes in works:
            self.mark(b if where else a, reads + writes)  # type: ignore[arg-type]

    def on_graph(self, t: int, g: int, s: int) -> None:
        _, b, works = self.graph[g]
        entry = self.stream_step(s, self.queued(self.host_step(t)))
        entry = None if self.without == "graph entry" else entry  # type: ignore[assignment]
        again = {} if self.without == "graph again" else self.member
        last: list[int] = [self.step(entry, again.get((g, k))) for k in range(1 if b is None else 2)]
        for stage in range(3):  # before the fork on a; then on b, and on a beside it; after the join on a
            if stage == 1 and b is not None:
                last[1] = self.step(last[0], last[1])
            for where, reads, writes in works[stage::3]:
                k = 0 if self.without == "graph fork" else where
                last[k] = self.step(last[k])
                self.work(last[k], reads, writes, kept=True)
            if stage == 1 and b is not None:
                last[0] = self.step(*last)
        for k, step in enumerate(last):
            self.member[g, k] = step
        self.stream_step(s, *([] if self.without == "graph exit" else last))

    def on_record_stream(self, t: int, array: str, s: int) -> None:
        self.host_step(t)
        self.users[array].add(s)

    def on_drop(self, t: int, array: str) -> None:
        users = [] if self.without == "marks" else [self.stream[s] for s in self.users[array]]
        others = [] if self.without == "others" else self.host
        kept = [] if self.without == "graph keeps" else [a.step for a in self.accesses if a.kept and a.array == array]
        release = self.step(self.host_step(t), *users, *others, *kept)
        self.accesses.append(Access(release, array, frozenset(range(SIZE)), True, release=True))

    def on_see(self, t: int, other: int) -> None:
        self.host_step(t, None if self.without == "see" else self.host[other])

    def orders(self) -> list[int]:
        """Of each step: those that come after it in some order. Every set of steps that can be all that has happened is
        met once.
        """
        every = (1 << len(self.before)) - 1
        after, met, front = [0] * len(self.before), {0}, [0]
        while front:
            done = front.pop()
            for i, before in enumerate(self.before):
                if done >> i & 1:
                    after[i] |= every & ~done
                elif before & ~done == 0 and done | 1 << i not in met:
                    met.add(done | 1 << i)
                    front.append(done | 1 << i)
        return after

    def first_race(self) -> int | None:
        """The first call that races with an earlier one; None: none does."""
        after, at = self.orders(), 0
        for i, new in enumerate(self.accesses):
            while i >= self.calls[at]:
                at += 1
            for old in self.accesses[:i]:
                if (
                    old.array != new.array
                    or not old.bytes & new.bytes
                    or not (old.write or new.write or self.without == "reads")
                ):
                    continue
                if old.release or old.step == new.step:
                    continue  # accesses after a release are a graph's, which keeps the memory
                if after[old.step] >> new.step & 1 and after[new.step] >> old.step & 1:
                    return at
        return None
