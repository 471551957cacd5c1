"""Running sums that are wider than what is added to them, on the simulated device and on the fake driver: random
programs of several streams and slots give the CPU's bits, in every order of events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.sample import sizes
from kit.values import BFLOAT16, E4M3, E5M2, bits
from kit.world import world

pytestmark = pytest.mark.core

#: What is added, and what it is summed in; None: as it is.
PAIRS = [
    (np.dtype("f2"), "float32"),
    (BFLOAT16, "float32"),
    (E4M3, "float32"),
    (E5M2, "float32"),
    (np.dtype("f4"), "float64"),
    (np.dtype("f4"), None),
]
STREAMS = 3
Program = tuple[dict[str, Any], list[tuple[Any, ...]]]


def draw(seed: int) -> Program:
    """Slots, and what is done: adds alone and of several slots at once, each ready on some stream, and takes."""
    r = random.Random(seed)
    slots = [r.choice(PAIRS) for _ in range(r.randint(1, 4))]
    steps: list[tuple[Any, ...]] = []
    for _ in range(r.randint(1, 3)):
        for key in range(r.randint(1, 6)):
            some = sorted(r.sample(range(len(slots)), r.randint(1, len(slots))))
            steps.append(("add", some, key, r.randrange(1 << 30), r.randrange(STREAMS), r.random() < 0.5))
        steps.append(("take", r.random() < 0.4))
    size = r.choice([1, 17, 64, 300])
    return {"slots": slots, "size": size, "budget": r.choice([0, 0, 200, math.inf])}, steps


def gradient(size: int, dtype: np.dtype[Any], seed: int) -> Any:
    """Of sizes whose sum in the narrow dtype is another one."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-4, 4, size)).astype(dtype)


class Side:
    """A program on the host, or in a world, where a kernel makes each gradient on its stream."""

    def __init__(self, program: Program, w: Any = None) -> None:
        self.w, (self.how, self.steps) = w, program
        self.streams = [w.stream() if w else None for _ in range(STREAMS)]
        size = self.how["size"]
        self.buf = fanin.InputBuffer(
            [fanin.Slot(shape=(size,), dtype=str(d), accumulate=wide) for d, wide in self.how["slots"]],
            stream=self.streams[0],
            budget=self.how["budget"],
        )

    def made(self, slot: int, seed: int, stream: Any) -> Any:
        x = gradient(self.how["size"], self.how["slots"][slot][0], seed + slot)
        if self.w is None:
            return x
        there = self.w.empty(x.shape, str(x.dtype))
        self.w.launch(stream, lambda v: v.view(np.uint8).__setitem__(slice(None), x.view(np.uint8)), writes=[there])
        return there

    def outs(self) -> list[Any]:
        wide = [accumulate or str(d) for d, accumulate in self.how["slots"]]
        make = self.w.empty if self.w else np.empty
        return [make((self.how["size"],), d) for d in wide]

    def read(self, x: Any) -> bytes | None:
        if x is None or self.w is None:
            return None if x is None else bits(x)
        with fanin.stream(self.streams[0]):
            return bits(x.numpy())

    def run(self) -> list[Any]:
        seen: list[Any] = []
        for word, *rest in self.steps:
            if word == "add":
                some, key, seed, stream, together = rest
                s = self.streams[stream]
                how = {} if s is None else {"stream": s}
                xs = [self.made(i, seed, s) for i in some]
                if together:
                    self.buf.add_many(some, xs, keys=[key] * len(some), **how)
                else:
                    for i, x in zip(some, xs, strict=True):
                        self.buf.add(i, x, key=key, **how)
            else:
                sums = self.buf.take(out=self.outs()) if rest[0] else self.buf.take()
                if self.w:  # used on other streams, and dropped while that is still to run
                    for i, s in enumerate(self.streams):
                        s.wait(self.streams[0])
                        with fanin.stream(s):
                            for x in filter(lambda x: x is not None, sums[i::2]):
                                fanin.add_n([x, x])
                seen += [self.read(x) for x in sums]
        return seen


def check(kind: str, seed: int) -> None:
    program = draw(seed)
    expected = Side(program).run()
    with world(kind, 1, seed) as w:
        found = Side(program, w).run()
        w.synchronize()
        assert w.races == 0, (seed, w.race)
    assert found == expected, (seed, program)


#: Finds CUDA_NARROW_SUM by the sixth and SHARE_ANY_EVENT by the last of these seeds.
SAMPLE = (*range(8), 14)


@pytest.mark.parametrize("kind", ["sim", "fake"])
@pytest.mark.parametrize("seeds", sizes((SAMPLE,), (range(40),)))
def test_sums_that_are_wider_than_their_terms_are_the_cpus(kind: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_many_sums_that_are_wider_than_their_terms_are_the_cpus(kind: str) -> None:
    for seed in range(1000, 2000):
        check(kind, seed)


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", ["CUDA_NARROW_SUM", "SHARE_ANY_EVENT"])
def test_a_planted_fault_of_wider_sums_is_found(name: str) -> None:
    """Among the programs above: the one sums something else, the other frees what a stream still reads."""
    hooks.fault(name)
    try:
        with pytest.raises(AssertionError):
            for seed in SAMPLE:
                check("fake", seed)
    finally:
        hooks.fault(None)
