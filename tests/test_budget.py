"""The budget: how much is parked, what a fold moves, and that no bit depends on any of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core

pytestmark = pytest.mark.core

MIB = 1 << 20


@pytest.mark.parametrize("arrays", [1, 3, 7])
def test_what_is_parked_stays_within_the_budget_and_one_array(arrays: int) -> None:
    buf = fanin.InputBuffer(1, budget=arrays * MIB)
    for k in range(30):
        buf.add(0, np.full(MIB // 4, k, np.float32), key=k)
    assert buf.counters.peak_parked_bytes <= (arrays + 1) * MIB
    assert buf.take()[0][0] == sum(range(30))


def test_a_fold_of_k_moves_k_and_two_words_for_each_element() -> None:
    size = 5000
    buf = fanin.InputBuffer(1, budget=4 * size * 4)
    before = buf.counters
    seen = 0
    for k in range(26):
        buf.add(0, np.ones(size, np.float32), key=k)
        now = buf.counters
        if now.folds == before.folds:
            continue
        assert now.folds == before.folds + 1
        moved = (now.bytes_read + now.bytes_written - before.bytes_read - before.bytes_written) // (4 * size)
        assert moved == (5 + 1 if seen == 0 else 5 + 2)
        before, seen = now, seen + 1
    assert seen == 5
    assert buf.take()[0].tolist() == [26.0] * size


def test_what_lies_beyond_a_gap_is_parked() -> None:
    buf = fanin.InputBuffer(1, budget=2 * MIB)
    for k in range(1, 9):
        buf.add(0, np.ones(MIB // 4, np.float32), key=k)
    assert buf.counters.folds == 0 and buf.counters.peak_parked_bytes == 8 * MIB
    buf.add(0, np.ones(MIB // 4, np.float32), key=0)
    assert buf.counters.folds == 1 and buf.take()[0][0] == 9


def test_the_default_is_64_mib() -> None:
    buf = fanin.InputBuffer(1)
    for _ in range(70):
        buf.add(0, np.zeros(MIB, np.uint8))
    assert 64 * MIB < buf.counters.peak_parked_bytes <= 65 * MIB
    buf.take()


def isas() -> list[str]:
    names = []
    for name in ("plain", "sse2", "avx2", "avx512"):
        try:
            with fanin.set_options(isa=name):
                names.append(name)
        except ValueError:
            continue
    return names


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "complex64"])
def test_one_hash_for_every_way_to_the_sum(dtype: str) -> None:
    rng = np.random.default_rng(11)
    size = 3000
    parts = [(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)).astype(dtype) for _ in range(5)]
    nbytes = parts[0].nbytes
    hashes = set()

    def note(x: Any) -> None:
        hashes.add(hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest())

    assert isas(), "none of the sets is here"
    for isa, threads in itertools.product(isas(), (1, 2)):
        with fanin.set_options(isa=isa, threads=threads):
            orders = list(itertools.permutations(range(5)))
            for i, order in enumerate(orders if isa == isas()[-1] and threads == 1 else orders[::17]):
                for budget in (0, nbytes, 3 * nbytes, math.inf):
                    buf = fanin.InputBuffer(1, budget=budget)
                    for k in order:
                        buf.add(0, parts[k].copy() if i % 2 else parts[k], key=k)
                    note(buf.take()[0])
            note(fanin.add_n(parts))
    if dtype != "float16":
        note(functools.reduce(np.add, parts))
    else:
        note(functools.reduce(np.add, [p.astype(np.float32) for p in parts]).astype(np.float16))
    assert len(hashes) == 1


@pytest.mark.parametrize("bad", [-1, 1.5, math.nan, -math.inf, "1", None])
def test_a_budget_that_makes_no_sense(bad: Any) -> None:
    if bad is None:
        fanin.InputBuffer(1, budget=bad)
        return
    with pytest.raises((ValueError, TypeError)):
        fanin.InputBuffer(1, budget=bad)
    with pytest.raises((ValueError, TypeError)):
        fanin.set_options(budget=bad)


def test_memory_that_is_wanting_in_the_middle_of_a_fold_loses_nothing() -> None:
    for n in range(60):
        buf = fanin.InputBuffer(1)
        for k in range(4):
            buf.add(0, np.full(200_000, float(k)), key=k)
        _core._test_fail_at(n, 1)
        try:
            buf.take()
            done = True
        except MemoryError:
            done = False
        finally:
            _core._test_fail_at(-1)
        if done:
            assert n > 3
            return
        assert buf[0][0] == 6.0
        assert buf.take()[0][0] == 6.0
    raise AssertionError("it never succeeded")
