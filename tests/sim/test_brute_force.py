"""The checker of races against a model without clocks (kit/brute.py) that goes through every order: the same verdict
at the same call, over random programs.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, replay
from kit.brute import BENT, BLOCKING, SIZE, STREAMS, Call, Model, view_of
from kit.sample import sizes

pytestmark = pytest.mark.core


def random_view(rng: random.Random, array: str, widths: tuple[int, ...]) -> tuple[Any, ...]:
    if rng.random() < 0.1:
        return array, "corner"
    first = rng.randrange(SIZE - 3)
    return array, first, first + rng.choice(widths), rng.choice((1, 1, 2, 3))


#: The calls of a program, by weight; with several threads also those by which they wait for each other.
KINDS = ["launch"] * 8 + ["record", "wait"] + ["order"] * 5
KINDS += ["sync", "sync_event", "tell", "read", "capture", "graph", "graph", "record_stream", "drop", "keep", "barrier"]
BETWEEN_THREADS = ["see", "sync", "pass", "pass", "both", "both"]


class Draw:
    """Random calls of a program of so many threads, and what of its arrays and graphs is left."""

    def __init__(self, rng: random.Random, threads: int) -> None:
        self.rng, self.threads = rng, threads
        self.arrays, self.graphs, self.events = "xz", 0, 2
        self.widths = rng.choice(((1, 2), (1, 2, 4), (4, 8), (12,)))  # so that some race soon, and some late
        self.streams = rng.sample(range(STREAMS), rng.choice((2, 2, 3)))

    def view(self, touched: str) -> tuple[Any, ...]:
        return random_view(self.rng, self.rng.choice(touched), self.widths)

    def work(self, touched: str = "") -> tuple[list[Any], list[Any]]:
        touched = touched or self.arrays
        reads = [self.view(touched) for _ in range(self.rng.choice((0, 1, 1)))]
        return reads, [self.view(touched) for _ in range(self.rng.choice((0, 1)) if reads else 1)]

    def calls(self) -> list[Call]:
        rng = self.rng
        t, s, e = rng.randrange(self.threads), rng.choice(self.streams), rng.randrange(self.events)
        kind = rng.choice(KINDS + BETWEEN_THREADS * (self.threads > 1))
        match kind:
            case "launch":
                return [(t, "launch", s, *self.work())]
            case "record" | "sync_event" | "sync":
                return [(t, kind, *{"record": (e, s), "sync_event": (e,), "sync": (s,)}[kind])]
            case "wait":
                return [(t, "wait", s, e)]
            case "order":
                return [(t, "record", e, s), (t, "wait", rng.choice(self.streams), e)]
            case "tell":
                return [(t, "record", e, s), (t, "sync_event", e)]
            case "barrier":  # of two blocking streams, by an event of neither
                one, other = rng.sample(BLOCKING, 2)
                first = [(t, "record", e, 3), (t, "launch", one, *self.work())]
                return [*first, (t, "wait", 0, e), (t, "launch", other, *self.work())]
            case "see" | "pass" | "both":
                return self.between(kind, t, s)
            case _:
                return self.kept(kind, t, s)

    def between(self, kind: str, t: int, s: int) -> list[Call]:
        """The order that one thread gets from another."""
        other = self.rng.randrange(self.threads)
        if kind == "see":
            return [(t, "see", other)]
        if kind == "pass":  # what t waited for orders another thread
            return [(t, "sync", s), (other, "see", t), (other, "launch", self.rng.choice(self.streams), *self.work())]
        b = self.rng.choice(BLOCKING)  # both: what t waited for orders no other thread, though they wait for the same
        launch = (other, "launch", self.rng.choice(self.streams), *self.work())
        return [(t, "sync", s), (t, "sync", b), (other, "sync", b), launch]

    def kept(self, kind: str, t: int, s: int) -> list[Call]:
        """Of arrays and graphs, as far as there are any."""
        rng = self.rng
        match kind:
            case "read":
                return [(t, "read", s, self.view(self.arrays))]
            case "capture" if self.graphs < 2:
                a, b = rng.sample(range(1, STREAMS), 2)
                works = [(w, *self.work()) for w in (0, rng.choice((0, 1)), 0, 0, 1)[: rng.choice((1, 2, 5))]]
                self.graphs += 1
                return [(t, "capture", self.graphs - 1, a, b if any(w for w, *_ in works) else None, works)]
            case "keep" if self.graphs < 2 and "z" in self.arrays:  # a graph's memory
                on, works = rng.randrange(1, STREAMS), [(0, *self.work("z"))]
                self.arrays, self.graphs = "x", self.graphs + 1
                n = self.graphs - 1
                return [(t, "capture", n, on, None, works), (t, "graph", n, s), (t, "drop", "z")]
            case "graph" if self.graphs:
                return [(t, "graph", rng.randrange(self.graphs), s)]
            case "record_stream" if "z" in self.arrays:
                return [(t, "record_stream", "z", s)]
            case "drop" if "z" in self.arrays:
                self.arrays = "x"
                return [(t, "drop", "z")]
        return []


def random_program(rng: random.Random, threads: int, calls: int) -> list[Call]:
    program: list[Call] = []
    draw = Draw(rng, threads)
    while len(program) < calls:
        program += draw.calls()
    return program


class Runner:
    """The same calls on a simulated machine."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.streams = [fanin.Stream("sim:0", 1), *(m.stream(blocking=i in BLOCKING) for i in range(1, STREAMS))]
        self.events = [m.event(), m.event()]
        self.arrays: dict[str, Any] = {"x": m.array(np.zeros(SIZE, np.uint8))}
        with fanin.stream(self.streams[3]):
            buf = fanin.InputBuffer(1)
            for _ in range(2):
                buf.add(0, m.array(np.zeros(SIZE, np.uint8)))
            (self.arrays["z"],) = buf.take()
        m.synchronize()
        self.graphs: dict[int, Any] = {}

    def views(self, views: list[Any]) -> list[Any]:
        return [view_of(v, self.arrays[v[0]]) for v in views]

    def call(self, name: str, *args: Any) -> None:
        getattr(self, "on_" + name)(*args)

    def on_launch(self, s: int, reads: list[Any], writes: list[Any]) -> None:
        self.m.launch(self.streams[s], lambda *v: None, self.views(reads), self.views(writes))

    def on_record(self, e: int, s: int) -> None:
        self.events[e].record(self.streams[s])

    def on_wait(self, s: int, e: int) -> None:
        if self.events[e].stream is not None:
            self.streams[s].wait(self.events[e])

    def on_sync(self, s: int) -> None:
        self.streams[s].synchronize()

    def on_sync_event(self, e: int) -> None:
        self.events[e].synchronize()

    def on_read(self, s: int, view: Any) -> None:
        with fanin.stream(self.streams[s]):
            view_of(view, self.arrays[view[0]]).numpy()

    def on_capture(self, g: int, a: int, b: int | None, works: list[Any]) -> None:
        first = self.streams[a]
        self.m.begin_capture(first)
        for stage in range(3):
            if stage == 1 and b is not None:
                self.streams[b].wait(first)
            for where, reads, writes in works[stage::3]:
                self.on_launch(b if where else a, reads, writes)  # type: ignore[arg-type]
            if stage == 1 and b is not None:
                first.wait(self.streams[b])
        self.graphs[g] = self.m.end_capture(first)

    def on_graph(self, g: int, s: int) -> None:
        self.m.launch_graph(self.graphs[g], self.streams[s])

    def on_record_stream(self, array: str, s: int) -> None:
        self.arrays[array].record_stream(self.streams[s])

    def on_drop(self, array: str) -> None:
        del self.arrays[array]

    def on_see(self, other: int) -> None:
        pass  # the order between threads is the caller's


def checked(program: list[Call], threads: int) -> int | None:
    """The call at which the machine finds its first race."""
    found: list[int] = []

    def step(run: Runner, i: int, call: Call, *known: Any) -> None:
        for thread in known:
            thread.result
        if found:
            return
        try:
            run.call(*call[1:])
        except fanin.RaceError:
            pass
        if run.m.races:
            found.append(i)

    def alone(m: Machine) -> None:
        run = Runner(m)
        for i, call in enumerate(program):
            step(run, i, call)
        m._check(False)  # what is left of the arrays is no call

    def together(m: Machine) -> None:
        """Each call is a thread, which comes after the previous call of its thread."""
        run, last = Runner(m), {}  # type: ignore[var-annotated]
        for i, call in enumerate(program):
            known = [last[t] for t in {call[0], call[2] if call[1] == "see" else call[0]} if t in last]
            last[call[0]] = m.spawn(step, run, i, call, *known)
        m.join()
        m._check(False)

    try:
        replay(together if threads > 1 else alone, "")
    except fanin.RaceError:
        assert found
    return found[0] if found else None


def modelled(program: list[Call], threads: int, without: str = "") -> int | None:
    model = Model(threads, without)
    for call in program:
        model.call(*call)
    return model.first_race()


def programs(seed: int, n: int, threads: int, calls: int) -> list[list[Call]]:
    rng = random.Random(f"{seed} {threads}")
    return [random_program(rng, threads, rng.randrange(3, calls + 1)) for _ in range(n)]


def agree(seed: int, n: int, threads: int, calls: int) -> tuple[int, int]:
    """How many programs race, and how many do not."""
    counts = [0, 0]
    for program in programs(seed, n, threads, calls):
        said, true = checked(program, threads), modelled(program, threads)
        assert said == true, f"seed {seed}: the checker says {said}, the model {true}:\n" + "\n".join(
            map(repr, program)
        )
        counts[true is None] += 1
    return counts[0], counts[1]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", sizes(40, 300))
def test_the_checker_agrees_with_every_order(threads: int, count: int) -> None:
    racy, clean = agree(0, count, threads, 9)
    print(f"seed 0, {threads} host threads: {racy} programs race, {clean} do not")
    assert min(racy, clean) > count / 10


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_checker_agrees_with_every_order_for_many_programs(threads: int) -> None:
    racy, clean = agree(1, 20_000 if threads == 1 else 6_000, threads, 11 if threads == 1 else 9)
    print(f"seed 1, {threads} host threads: {racy} programs race, {clean} do not")
    assert racy > 1000 and clean > 1000


#: The first seed whose programs find a wrong model, if it is not 0.
FIRST = {"event": 2, "newest": 3, "sync": 1, "sync_event": 1, "sync teaches": 1, "read": 2, "marks": 2, "others": 5} | {
    "graph fork": 10,
    "see": 1,
}


@pytest.mark.parametrize("bent", BENT, ids=lambda bent: bent.partition(":")[0])
def test_a_wrong_model_is_found(bent: str) -> None:
    """By programs for which it and the right model differ, while the checker agrees with the right one."""
    tried = 0
    for seed in range(FIRST.get(bent.partition(":")[0], 0), 40):
        threads = 1 + seed % 3
        for program in programs(100 + seed, 60, threads, 10):
            tried += 1
            true = modelled(program, threads)
            if modelled(program, threads, bent) != true:
                assert checked(program, threads) == true
                return
    pytest.fail(f"{tried} programs say nothing of it: {bent}")
