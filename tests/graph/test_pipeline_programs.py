"""Random pipelines of 2 to 6 pieces beside eager runs: host reads, branches, held and dropped outputs, little memory,
errors, early ends. On the simulated device, on the CUDA backend over the fake driver, and on the CPU.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.graph import Stop
from kit import hooks
from kit.graph_trees import launch
from kit.sample import sizes
from kit.world import world

KINDS = pytest.mark.parametrize("kind", ["sim", "fake", "cpu"])
QUIET = pytest.mark.filterwarnings("ignore:f[0-9]+ (runs|copies) :RuntimeWarning")
N = 4  # elements of an array


class Oops(Exception):
    pass


class Pieces:
    """A world, its tree, and functions of it, each with the same function in NumPy."""

    def __init__(self, kind: str, seed: int, memory: int) -> None:
        self.rng, self.m = random.Random(seed), world(kind, 1, seed=seed)
        self.memory = memory
        self.counts: Counter[str] = Counter()
        self.failing: int | None = None  # the piece that raises in its body

    def open(self) -> None:
        rng, m = self.rng, self.m
        self.tree = fanin.GraphTree(m.place(), memory=self.memory, limit=2)
        self.weights = [(m.array(np.full(N, i + 1.0)), np.full(N, i + 1.0)) for i in range(2)]
        self.sum, self.want_sum = m.array(np.zeros(N)), np.zeros(N)
        self.pieces: list[Any] = []
        self.held: list[tuple[Any, Any]] = []  # outputs that outlive their steps: keep="held"
        for i in range(rng.randint(2, 6)):
            way = rng.choice(["times", "times", "weight", "adds", "writes"])
            roles = {"times": "auto", "weight": ("auto", "static"), "adds": ("auto", "accumulate")}.get(
                way, ("auto", "static")
            )
            roles = rng.choice([roles, "copy"]) if way == "times" else roles
            few, keep = rng.choice([0, 0, 0, 2]), rng.choice([False, False, "held"])
            f = self.tree.function(self.body(i, way), roles=roles, min_kernels=few, keep=keep)
            self.pieces.append((f, way, i + 2.0, keep == "held"))

    def body(self, i: int, way: str) -> Callable[..., Any]:
        m, temporaries, factor = self.m, self.rng.randint(0, 2), i + 2.0

        def f(x: Any, other: Any = None) -> Any:
            y = m.empty(x.shape, np.float64)
            for _ in range(temporaries):
                t = m.empty(x.shape, np.float64)
                launch(m, lambda a, out: np.multiply(a, 3, out=out), [x], [t])
                del t
            if way == "weight":
                launch(m, lambda a, b, out: np.add(a * factor, b, out=out), [x, other], [y])
            else:
                launch(m, lambda a, out: np.multiply(a, factor, out=out), [x], [y])
            if self.failing == i:
                raise Oops(f"piece {i}")
            if way in ("adds", "writes"):
                launch(m, lambda a, b, out: np.add(a, b, out=out), [x, other], [other])
            return y

        f.__name__ = f"f{i}"
        return f

    def call(self, which: int, x: Any, want: Any) -> tuple[Any, Any]:
        """A piece, and what it must give."""
        f, way, factor, outlives = self.pieces[which]
        args: tuple[Any, ...] = (x,)
        if way in ("weight", "writes"):
            w, w_want = self.weights[which % 2]
            args = (x, w)
        elif way == "adds":
            args = (x, self.sum)
        try:
            y = f(*args)
        finally:
            failed = self.failing == which
            self.failing = None if failed else self.failing
        result = want * factor
        if way == "weight":
            result = result + w_want
        elif way == "adds":
            self.want_sum = want + self.want_sum
        elif way == "writes":
            w_want += want
        self.counts[f.last.did] += 1
        if outlives and self.rng.random() < 0.3:
            self.held.append((y, result))
            self.counts["held"] += 1
        return y, result

    def generator(self) -> Callable[..., Any]:
        """A pipeline whose choices are drawn in each call."""

        def body(x: Any, want: Any, plan: random.Random) -> Any:
            held: list[tuple[Any, Any]] = []
            last = x, want
            for which in self.order(plan):
                if held and plan.random() < 0.4:
                    last = plan.choice(held)
                last = self.call(which, *last)
                held.append(last)
                if plan.random() < 0.5:
                    held.pop(plan.randrange(len(held)))
                    self.counts["dropped"] += 1
                if plan.random() < 0.6:
                    value = yield last[0]
                    assert value.tolist() == last[1].tolist()
                    self.counts["read"] += 1
                    if plan.random() < 0.08:
                        raise Oops("host")
                    if plan.random() < 0.1:
                        self.counts["early"] += 1
                        break
                    if plan.random() < 0.1:
                        try:
                            yield 5
                        except TypeError:
                            self.counts["refused"] += 1
                if held:
                    values = yield tuple(y for y, _ in held)
                    assert [v.tolist() for v in values] == [w.tolist() for _, w in held]
            return [last[0], *(y for y, _ in held)], [last[1], *(w for _, w in held)]

        return body

    def order(self, plan: random.Random) -> list[int]:
        """The pieces of a step: mostly all in turn; sometimes fewer, or a branch."""
        order = list(range(len(self.pieces)))
        if plan.random() < 0.3:
            order = order[: plan.randint(1, len(order))]
        if plan.random() < 0.2:
            plan.shuffle(order)
        return order

    def run(self, steps: int) -> None:
        with self.m:
            try:
                self.open()
                self.all_steps(steps)
                self.m.synchronize()
                for array, want in [*self.weights, (self.sum, self.want_sum), *self.held]:
                    assert array.numpy().tolist() == want.tolist()
                del array
                self.tree.close()
            finally:
                del self.tree, self.pieces, self.weights, self.sum, self.held

    def all_steps(self, steps: int) -> None:
        rng, m = self.rng, self.m
        pipeline = self.tree.pipeline(self.generator())
        kept: list[tuple[Any, Any]] = []
        stale: list[tuple[Any, Any]] = []
        plans = [rng.random() for _ in range(3)]  # the same choices come again, so that recordings are replayed
        for _ in range(steps):
            value = np.full(N, float(rng.randint(0, 3)))
            plan = random.Random(rng.choice(plans) if rng.random() < 0.8 else rng.random())
            self.failing = rng.randrange(len(self.pieces)) if rng.random() < 0.1 else None
            inside = rng.random() < 0.2
            try:
                if inside:
                    with self.tree.step():
                        got, want = pipeline(m.array(value), value, plan)
                        for y, w in zip(got, want, strict=True):
                            assert y.numpy().tolist() == w.tolist()
                    stale += zip(got, want, strict=True)
                else:
                    got, want = pipeline(m.array(value), value, plan)
                    kept += zip(got, want, strict=True)
            except Oops as e:
                assert any("of the pipeline body" in note for note in e.__notes__)
                self.counts["failed"] += 1
            finally:
                self.failing = None
                got = want = None
        for y, w in stale:  # an output of a raw call, or one that was held, may still be read
            try:
                assert y.numpy().tolist() == w.tolist()
            except RuntimeError as e:
                assert "output of f" in str(e)
                self.counts["stale"] += 1
        for y, w in kept:
            assert y.numpy().tolist() == w.tolist()
            self.counts["kept"] += 1


class Lists(Pieces):
    """The same pieces in a list, with host parts between them that pass on, branch by a value, and end early."""

    def open(self) -> None:
        super().open()
        self.pieces = [p for p in self.pieces if p[1] == "times"] or self.pieces[:1]
        if self.pieces[0][1] != "times":
            self.pieces = [(self.tree.function(self.body(0, "times")), "times", 2.0, False)]

    def all_steps(self, steps: int) -> None:
        rng, m = self.rng, self.m
        parts: list[Any] = []
        now: dict[str, Any] = {}
        for i, (f, _, factor, _) in enumerate(self.pieces):
            parts += [f, self.host(i, factor, now)]
        pipeline = self.tree.pipeline(parts)
        kept = []
        for _ in range(steps):
            value = np.full(N, float(rng.randint(0, 3)))
            now |= {"want": value, **{k: rng.randrange(20) for k in ("fails", "stops", "replaces")}}
            try:
                y = pipeline(m.array(value))
            except Oops:
                self.counts["failed"] += 1
                continue
            kept.append((y, now["want"]))
            self.counts.update(did for _, did in pipeline.last)
        for y, w in kept:
            got = y if isinstance(y, np.ndarray) else y.numpy()
            assert got.tolist() == w.tolist()
        self.counts["kept"] += len(kept)

    def host(self, i: int, factor: float, now: dict[str, Any]) -> Callable[..., Any]:
        def part(y: Any) -> Any:
            now["want"] = now["want"] * factor
            assert y.numpy().tolist() == now["want"].tolist()
            self.counts["read"] += 1
            if now["fails"] == i:
                raise Oops("host")
            if now["stops"] == i:
                self.counts["early"] += 1
                return Stop(y)
            if now["replaces"] == i:
                now["want"] = np.full(N, 2.0)
                return np.full(N, 2.0)
            return y

        return part


MEMORIES = (1 << 14, 256, 512, 1024)


def programs(kind: str, seeds: Sequence[int], steps: int = 14, which: Sequence[type[Pieces]] = (Pieces, Lists)) -> Any:
    counts: Counter[str] = Counter()
    for seed in seeds:
        for one in which:
            program = one(kind, seed, MEMORIES[seed % 5 if seed % 5 < 4 else 0])
            try:
                program.run(steps)
            except BaseException as e:
                e.add_note(f"{one.__name__}, seed {seed}")
                raise
            counts += program.counts
    return counts


WORDS = (
    *("warmed", "recorded", "replayed", "raw", "dropped", "read", "early"),
    *("refused", "failed", "stale", "kept", "held"),
)


@QUIET
@KINDS
@pytest.mark.parametrize("n", sizes(25, 300))
def test_random_pipelines_give_the_numbers_of_an_eager_run(kind: str, n: int) -> None:
    counts = programs(kind, range(n))
    print(counts)
    assert all(counts[word] > 0 for word in WORDS), counts


@pytest.mark.slow
@QUIET
@KINDS
def test_ten_thousand_random_pipelines_give_the_numbers_of_an_eager_run(kind: str) -> None:
    counts = programs(kind, range(1000, 6000))
    print(counts)
    assert all(counts[word] > 100 for word in WORDS), counts


FAULTS = ["TREE_DEAD_BIT", "TREE_NO_RESTORE", "TREE_GENERATION_STAYS"]


@QUIET
@KINDS
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(kind: str, name: str) -> None:
    hooks.fault(name)
    try:
        for seed in range(60):
            try:
                programs(kind, [seed], which=[Pieces])
            except (AssertionError, fanin.RaceError, RuntimeError, pytest.fail.Exception):
                return
    finally:
        hooks.fault(None)
    pytest.fail(f"{name} was not found by the sample")
