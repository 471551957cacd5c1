"""Random programs of calls, branches, drops, keeps, steps and errors against an eager oracle: the same values, no
poison read, no race. Each planted fault of the trees is found by them, or by a script beside. On the simulated device,
on the CUDA backend over the fake driver, and on the CPU.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.sample import sizes
from kit.world import world

POISON = np.frombuffer(b"\xa5" * 8, np.float64)[0]
KINDS = pytest.mark.parametrize("kind", ["sim", "fake", "cpu"])


class Oops(Exception):
    pass


class Program:
    """One world, one tree, and what each array must hold."""

    def __init__(self, kind: str, seed: int, memory: int = 1 << 14) -> None:
        self.rng = random.Random(seed)
        self.m = world(kind, 1, seed=seed)
        self.debug = self.rng.random() < 0.5  # then memory of a driver is poisoned, too
        self.counts: Counter[str] = Counter()
        self.failing, self.memory = False, memory

    def body(self, factor: float, temporaries: int, streams: int, outputs: int, adds: bool) -> Any:
        m, side = self.m, [self.m.stream() for _ in range(streams)] if self.m.kind != "cpu" else []

        def f(*operands: Any) -> Any:
            here = m.current_stream()
            xs, g = (operands[:-1], operands[-1]) if adds else (operands, None)
            made = []
            for i in range(outputs):
                s = side[i % streams] if side else here
                if s is not here:
                    s.wait(here)
                y = m.empty(xs[0].shape, np.float64)
                for _ in range(temporaries):
                    t = m.empty(xs[0].shape, np.float64)
                    m.launch(s, lambda a, b: np.multiply(a, 3, out=b), reads=[xs[0]], writes=[t])
                    del t
                m.launch(
                    s,
                    lambda *a, i=i: np.add(sum(x for x in a[:-1]) * factor, i, out=a[-1]),
                    reads=list(xs),
                    writes=[y],
                )
                if s is not here:
                    here.wait(s)
                made.append(y)
            if self.failing:
                raise Oops
            if g is not None:
                m.launch(here, lambda a, b, out: np.add(a, b, out=out), reads=[made[0], g], writes=[g])
            return made[0] if outputs == 1 else tuple(made)

        f.__name__ = f"f{factor:g}"
        return f

    def run(self, steps: int) -> None:
        with self.m, fanin.set_options(debug=self.debug):
            self.all_steps(steps)

    def all_steps(self, steps: int) -> None:
        rng, m = self.rng, self.m
        tree = fanin.GraphTree(m.place(), memory=self.memory, limit=2)
        functions = []
        for k in range(3):
            n, outputs, adds = rng.randint(1, 2), rng.randint(1, 2), rng.random() < 0.4
            roles = tuple(rng.choice(["auto", "auto", "copy", "static"]) for _ in range(n))
            keep = rng.choice([False, False, True, (True, *(False,) * (outputs - 1))])
            body = self.body(k + 2.0, rng.randint(0, 2), rng.randint(0, 2), outputs, adds)
            f = tree.function(body, roles=roles + ("accumulate",) * adds, keep=keep)
            functions.append((f, k + 2.0, n, outputs, adds, keep))
        sums = [m.array(np.zeros(4)) for _ in functions]
        want_sums = [np.zeros(4) for _ in functions]
        weights = [(m.array(np.full(4, float(i))), np.full(4, float(i))) for i in range(3)]
        kept: list[tuple[Any, Any]] = []
        streams = [m.current_stream(), m.stream()]
        for _ in range(steps):
            ended = []
            with on_one_of(rng, streams), tree.step():
                live: list[tuple[Any, Any]] = []
                raw: list[tuple[Any, Any]] = []
                for _ in range(rng.randint(1, 4)):
                    self.call(rng.choice(functions), functions, live, weights, kept, ended, raw, sums, want_sums)
                    if live and rng.random() < 0.4:
                        live.pop(rng.randrange(len(live)))
                        self.counts["dropped"] += 1
                    for array, want in live:
                        assert array.numpy().tolist() == want.tolist()
                    for array, want in raw:
                        assert array.numpy().tolist() == want.tolist()
                ended += [a for a, _ in live]
            for array, want in raw:  # where there was no room, an output may lie in the tree's memory, or beyond it
                try:
                    assert array.numpy().tolist() == want.tolist()
                except RuntimeError as e:
                    assert "output of f" in str(e)
            for array in ended:
                if rng.random() < 0.5:
                    with pytest.raises(RuntimeError, match="output of f"):
                        array.numpy()
                    self.counts["stale"] += 1
        m.synchronize()
        for array, want in kept + list(zip(sums, want_sums, strict=True)):
            assert array.numpy().tolist() == want.tolist()
        tree.close()

    def call(
        self,
        which: Any,
        functions: list[Any],
        live: list[Any],
        weights: list[Any],
        kept: list[Any],
        ended: list[Any],
        raw: list[Any],
        sums: list[Any],
        want_sums: list[Any],
    ) -> None:
        rng, m = self.rng, self.m
        f, factor, n, outputs, adds, keep = which
        operands = []
        for _ in range(n):
            if live and rng.random() < 0.6:
                operands.append(rng.choice(live))
            elif rng.random() < 0.6:
                operands.append(rng.choice(weights))
            else:
                value = np.full(4, float(rng.randint(0, 9)))
                operands.append((m.array(value), value))
        if rng.random() < 0.3:  # work of the caller before the call
            array, value = rng.choice(weights)
            m.launch(m.current_stream(), lambda a, out: np.add(a, 1, out=out), reads=[array], writes=[array])
            value += 1
            self.counts["updated"] += 1
        at = functions.index(which)
        args = [a for a, _ in operands] + [sums[at]] * adds
        self.failing = rng.random() < 0.05
        ran = True
        try:
            got = f(*args)
        except Oops:
            self.counts["failed"] += 1
            return
        finally:
            ran = not self.failing
            self.failing = False
        self.counts[f.last.did] += 1
        assert ran or f.last.did == "replayed"
        values = [sum(v for _, v in operands) * factor + i for i in range(outputs)]
        if adds:
            want_sums[at] = values[0] + want_sums[at]
        for i, y in enumerate((got,) if outputs == 1 else got):
            if f.last.did == "raw":
                raw.append((y, values[i]))
                continue
            outlives = keep is True or (keep and i < len(keep) and keep[i])
            (kept if outlives else live).append((y, values[i]))
            self.counts["kept" if outlives else "given"] += 1


def on_one_of(rng: random.Random, streams: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """One of two streams that wait for each other is current; the CPU has none."""
    if streams[0] is None:
        return contextlib.nullcontext()
    streams[0].wait(streams[1])
    streams[1].wait(streams[0])
    return fanin.stream(rng.choice(streams))


def programs(kind: str, seeds: Sequence[int], steps: int = 8, memories: Sequence[int] = (1 << 14,)) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        program = Program(kind, seed, memories[seed % len(memories)])
        try:
            program.run(steps)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise
        counts += program.counts
    return counts


#: Finds each planted fault: TREE_ALIVE_FITS on the CPU by its last seed but one, on the others by its last, the other
#: faults by the first four.
SAMPLE = (*range(12), 52, 128)


def all_met(counts: Counter[str]) -> None:
    print(counts)
    for word in ("warmed", "recorded", "replayed", "dropped", "updated", "stale", "failed", "kept", "given"):
        assert counts[word] > 0, word


@pytest.mark.filterwarnings("ignore:f[0-9.]+ (runs|copies) :RuntimeWarning")
@KINDS
@pytest.mark.parametrize("seeds", sizes((SAMPLE,), (range(140),)))
def test_random_programs_give_the_results_of_an_eager_run(kind: str, seeds: Sequence[int]) -> None:
    all_met(programs(kind, seeds))


#: from room for one array on
SMALL = {
    "cpu": (256, 320, 384, 512, 768),
    "sim": (512, 1024, 1536, 2048, 3072),
    "fake": (512, 1024, 1536, 2048, 3072),
}


@pytest.mark.filterwarnings("ignore:f[0-9.]+ (runs|copies) :RuntimeWarning")
@KINDS
@pytest.mark.parametrize("n", sizes(12, 140))
def test_random_programs_with_little_memory_give_the_results_of_an_eager_run(kind: str, n: int) -> None:
    counts = programs(kind, range(n), memories=SMALL[kind])
    print(counts)
    assert counts["raw"] > n // 2 and counts["replayed"] > n // 7 and counts["recorded"] > n // 7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:f[0-9.]+ (runs|copies) :RuntimeWarning")
@KINDS
def test_ten_thousand_random_programs_with_little_memory_give_the_results_of_an_eager_run(kind: str) -> None:
    counts = programs(kind, range(20000, 23400), memories=SMALL[kind])
    print(counts)
    assert counts["raw"] > 1000 and counts["replayed"] > 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:f[0-9.]+ (runs|copies) :RuntimeWarning")
@KINDS
def test_ten_thousand_random_programs_give_the_results_of_an_eager_run(kind: str) -> None:
    all_met(programs(kind, range(1000, 11000)))


FAULTS = ["TREE_DEAD_BIT", "TREE_ALIVE_FITS", "TREE_NO_RESTORE", "TREE_GENERATION_STAYS"]


@pytest.mark.filterwarnings("ignore:f[0-9.]+ (runs|copies) :RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("sim", "fake") for name in [*FAULTS, "TREE_NO_JOIN"]]
    + [("cpu", name) for name in [*FAULTS, "KERNEL_NOT_REPLAYED"]],
)
def test_a_planted_fault_is_found(kind: str, name: str) -> None:
    hooks.fault(name)
    try:
        for seed in SAMPLE:
            try:
                programs(kind, [seed])
            except (AssertionError, fanin.RaceError, RuntimeError, pytest.fail.Exception):
                return
    finally:
        hooks.fault(None)
    pytest.fail(f"{name} was not found by the sample")
