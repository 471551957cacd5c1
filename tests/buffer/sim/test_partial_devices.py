"""Partial gradients on devices with streams: the simulated machine, and the CUDA backend on the fake driver."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Partial
from kit.law import place
from kit.partial_lists import BUDGETS, a_list, dtype_of, fold
from kit.values import bits

Array = np.ndarray[Any, Any]


def moved(there: Any, x: Any, stream: Any) -> Any:
    """A term on the device, written by a kernel on this stream."""
    if isinstance(x, Partial):
        return Partial(there.made(np.array(x.values), stream), x.at, x.shape)
    return there.contribution(x, stream)


def summed(there: Any, kind: str, terms: list[Any], draw: random.Random) -> Any:
    """The sum of terms that kernels of three streams write, as the host reads it."""
    slot = fanin.Slot(device="sim:0" if kind == "sim" else "cuda:0")
    buf = fanin.InputBuffer([slot], budget=draw.choice(BUDGETS), stream=there.streams[0])
    for i, x in enumerate(terms):
        s = there.streams[i % 3]
        buf.add(0, moved(there, x, s), stream=s, donate=draw.random() < 0.3)
    with fanin.stream(there.streams[0]):
        [got] = buf.take()
    there.streams[0].synchronize()
    return got.numpy().copy()


@pytest.mark.rule("P1", "P2", "P4", "P5")
@pytest.mark.parametrize("kind", ["sim", "fake"])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_gives_the_bits_of_the_host(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    found = 0
    with place(kind) as there:
        for _ in range(40):
            shape, terms = a_list(draw)
            kinds = {dtype_of(x).kind for x in terms}
            refused = any(isinstance(x, fanin.Sparse) for x in terms) and len(kinds) > 1
            if refused or not any(isinstance(x, Partial) for x in terms):
                continue
            with np.errstate(all="ignore"):
                expected = fold(terms, shape)
            got = summed(there, kind, terms, draw)
            found += 1
            assert bits(got) == bits(expected), (seed, shape, terms, got, expected)
    assert found > 10
