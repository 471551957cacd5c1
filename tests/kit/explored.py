"""Random scenarios of a few threads on one buffer, as data: `explore` must find the same outcomes with its reduction
as without.

A program is a tuple of threads, a thread a tuple of steps, a step a word and its arguments; `scenario` makes a function
of a Machine of it, whose value is everything that a thread can observe.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

import fanin
from fanin.sim import Machine, Report, explore
from fanin.sim.search import bits_of
from kit.values import BFLOAT16

Step = tuple[Any, ...]
Program = tuple[tuple[Step, ...], ...]

VALUES = (1e8, -1e8, 1.0, 3.0)
KINDS = ("small", "strided", "rows", "large", "huge", "scalar", "numpy scalar", "sparse", "object", "zero", "none")
SHAPES = {
    "small": (2,),
    "strided": (2,),
    "rows": (2,),
    "sparse": (2,),
    "zero": (2,),
    "large": (20_000,),
    "huge": (1 << 18,),
}


def gradient(m: Machine, kind: str, value: float) -> Any:
    if kind == "torch":
        import torch

        return torch.full((2,), value)
    if kind in ("sim", "sim wide"):
        s = m.stream()
        x = m.empty(2, "float32" if kind == "sim" else "bfloat16")
        m.launch(s, lambda v: v.fill(value), writes=[x], name=f"make {value:g}")
        return s, x
    return {
        "small": lambda: np.full(2, value, np.float32),
        "strided": lambda: np.full(2, value, np.float32)[::-1],
        "rows": lambda: np.full(4, value, np.float32)[::2],
        "large": lambda: np.full(20_000, value, np.float32),
        "huge": lambda: np.full(1 << 18, value, np.float32),
        "wide": lambda: np.full(2, value, BFLOAT16),
        "scalar": lambda: value,
        "numpy scalar": lambda: np.float32(value),
        "sparse": lambda: fanin.Sparse("coo", (np.zeros((1, 1), np.int64), np.float32([value])), (2,)),
        "object": lambda: Fraction(int(value), 3),
        "zero": lambda: fanin.Zero((2,), "float32"),
        "none": lambda: None,
    }[kind]()


class Buffers:
    """What the threads of one run share."""

    def __init__(self, m: Machine, kind: str, slots: int, budget: float, stats: bool) -> None:
        self.m, self.kind = m, kind
        self.out = [np.zeros(2, np.float32) for _ in range(slots)]
        declared: Any = slots
        if kind == "declared":
            declared = [np.zeros(2, np.float32) for _ in range(slots)]
        if kind.endswith("wide"):
            declared = [fanin.Slot(shape=(2,), dtype="bfloat16", accumulate="float32") for _ in range(slots)]
        self.stream = m.stream() if kind.startswith("sim") else None
        self.buf = fanin.InputBuffer(declared, budget=budget, stats=stats, stream=self.stream)

    def do(self, step: Step) -> Any:
        """One step of a thread; returns what the thread observed."""
        word, *rest = step
        buf = self.buf
        if word == "add":
            slot, kind, value, key = rest
            g, stream = gradient(self.m, kind, value), None
            if kind.startswith("sim"):
                stream, g = g
            return buf.add(slot, g, key=key, stream=stream)
        if word == "add_many":
            kind, value, slots = rest
            return buf.add_many(list(slots), [gradient(self.m, kind, value + i) for i in range(len(slots))])
        if word == "take":
            taken = buf.take(**rest[0])
            return [None if x is None else self.seen(x) for x in taken]
        if word == "take out":
            return self.seen(buf.take(out=self.out)[0])
        if word == "snapshot":
            return self.seen(buf[rest[0]])
        if word == "expect":
            return buf.expect(*rest)
        if word == "target":
            with buf.target(rest[0]) as out:
                out += np.float32(rest[1])
            return None
        if word == "counters":
            n = buf.counters
            return n.adds, n.folds, n.peak_parked_bytes
        if word == "stats":
            return repr(buf.stats(rest[0]))
        if word == "explain":  # which number a stream has is the order in which threads made theirs: not compared
            return re.sub(r"\bstream \d+", "stream n", buf.explain(rest[0]))
        if word == "ready":
            return buf.ready(rest[0])
        assert word == "clear", word
        return buf.clear()

    def value(self, seen: list[list[Any]]) -> str:
        """Everything observable, and what is left."""
        last = outcome(lambda: [None if x is None else self.seen(x) for x in self.buf.take()])
        return repr((seen, last, [o.tobytes() for o in self.out]))

    def seen(self, x: Any) -> Any:
        if isinstance(x, fanin.sim.Array):
            with fanin.stream(self.stream):
                return x.numpy()
        return x.copy() if isinstance(x, np.ndarray) else repr(x) if isinstance(x, Fraction) else x


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return bits_of(call())
    except (ValueError, TypeError, RuntimeError, BufferError, MemoryError) as e:
        return type(e).__name__, str(e)


def scenario(program: Program, options: dict[str, Any]) -> Callable[[Machine], Any]:
    def run(m: Machine) -> Any:
        shared = Buffers(m, **options)
        seen: list[list[Any]] = [[] for _ in program]

        def actor(i: int) -> None:
            for step in program[i]:
                seen[i].append(outcome(lambda step=step: shared.do(step)))

        for i in range(len(program)):
            m.spawn(actor, i)
        m.join()
        return shared.value(seen)

    return run


def draw_step(r: random.Random, kind: str, slots: int, key: int | None, stats: bool) -> Step:
    slot = r.randrange(slots)
    word = r.choice(
        (
            "add",
            "add",
            "add",
            "add",
            "add_many",
            "take",
            "take out",
            "snapshot",
            "ready",
            "expect",
            "clear",
            "target",
            "counters",
            "explain",
            "stats",
        )
    )
    value = r.choice(VALUES)
    if word == "add":
        own = (
            kind
            if kind not in ("mixed", "declared")
            else r.choice(KINDS if kind == "mixed" else ("small", "small", "strided", "rows"))
        )
        return "add", slot, own, value, key
    if word == "add_many" and kind in ("small", "declared", "strided", "rows", "object", "large", "huge", "wide"):
        return (
            "add_many",
            "small" if kind == "declared" else kind,
            value,
            tuple(r.randrange(slots) for _ in range(r.randint(1, 2))),
        )
    if word == "take":
        return "take", r.choice(({}, {}, {"scale": 2.0}, {"writable": True}) if kind != "object" else ({},))
    if word == "take out" and kind in ("small", "declared", "strided", "rows", "wide"):
        return ("take out",)
    if word == "expect":
        return "expect", slot, r.randint(1, 2)
    if word == "target" and kind == "declared":
        return "target", slot, value
    if word in ("snapshot", "ready", "explain"):
        return word, slot
    if word == "stats" and stats:
        return word, slot
    if word in ("clear", "counters"):
        return (word,)
    return "take", {}


def draw(seed: int, kinds: tuple[str, ...]) -> tuple[Program, dict[str, Any]]:
    r = random.Random(seed)
    kind = kinds[seed % len(kinds)]
    slots, threads = r.randint(1, 2), r.choice((2, 2, 3)) if kind in ("small", "declared") else 2
    both = [1] * threads
    both[r.randrange(threads)] += r.random() < 0.6
    keyed, stats = r.random() < 0.3, r.random() < 0.15 and kind not in ("object", "mixed")
    keys = iter(range(100))
    program = tuple(
        tuple(draw_step(r, kind, slots, next(keys) if keyed else None, stats) for _ in range(n)) for n in both
    )
    return program, {
        "kind": kind,
        "slots": slots,
        "budget": r.choice((0, 12, float("inf"), float("inf"))),
        "stats": stats,
    }


def merges(lengths: list[int]) -> Iterator[tuple[int, ...]]:
    """Every order in which threads of so many steps can make them, as the number of the thread for each step."""
    if not any(lengths):
        yield ()
    for i, n in enumerate(lengths):
        if n:
            for rest in merges([*lengths[:i], n - 1, *lengths[i + 1 :]]):
                yield (i, *rest)


def in_turn(program: Program, options: dict[str, Any]) -> set[Any]:
    """What comes of the calls where each is made as a whole, one behind the other on one thread, in every order: no
    search, no turns.
    """
    found = set()
    for order in merges([len(steps) for steps in program]):
        with Machine() as m:
            shared = Buffers(m, **options)
            seen: list[list[Any]] = [[] for _ in program]
            for i in order:
                seen[i].append(outcome(functools.partial(shared.do, program[i][len(seen[i])])))
            found.add(shared.value(seen))
    return found


def differs(program: Program, options: dict[str, Any], limit: int) -> tuple[str, Report, Report]:
    """What the two searches of a program differ in, and whole calls in turn, "" where nothing."""
    return searched(scenario(program, options), limit, lambda: in_turn(program, options))


def searched(
    run: Callable[[Machine], Any], limit: int, known: Callable[[], set[Any]] = set, reduced_limit: int = 400
) -> tuple[str, Report, Report]:
    """What the two searches differ in, "" where nothing. What the whole search has seen, all or some, and what is
    `known`, must be among what the other one saw, if that came to its end.
    """
    reduced = explore(run, limit=reduced_limit, samples=0)
    whole = explore(run, limit=limit, samples=limit, reduce=False)
    words = (
        []
        if reduced.complete or not whole.complete
        else ["the reduced search did not come to its end, and the whole one did"]
    )
    if not (reduced.repeats and whole.repeats):
        words.append("it does not repeat itself")
    if reduced.complete and (missing := set(whole.results) - set(reduced.results)):
        words.append(f"missed: {sorted(missing)[0]}")
    if reduced.complete and (missing := known() - set(reduced.results)):
        words.append(f"missed, though whole calls in turn give it: {sorted(missing)[0]}")
    if whole.complete and (more := set(reduced.results) - set(whole.results)):
        words.append(f"invented: {sorted(more)[0]}")
    for what in ("races", "deadlocks", "errors"):
        if getattr(whole, what) and not getattr(reduced, what):
            words.append(f"missed {what}: {whole.error!r}")
    return "; ".join(words), reduced, whole
