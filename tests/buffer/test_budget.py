"""The budget: how much is parked, what a fold moves, and that no bit depends on any of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from kit import hooks
from kit.sample import sizes

pytestmark = pytest.mark.core

MIB = 1 << 20


@pytest.mark.parametrize("arrays", [1, 3, 7])
def test_parked_gradients_stay_within_the_budget_and_one_array(arrays: int) -> None:
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


def test_gradients_beyond_a_gap_are_parked() -> None:
    buf = fanin.InputBuffer(1, budget=2 * MIB)
    for k in range(1, 9):
        buf.add(0, np.ones(MIB // 4, np.float32), key=k)
    assert buf.counters.folds == 0 and buf.counters.peak_parked_bytes == 8 * MIB
    buf.add(0, np.ones(MIB // 4, np.float32), key=0)
    assert buf.counters.folds == 1 and buf.take()[0][0] == 9


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

    def record_hash(x: Any) -> None:
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
                    record_hash(buf.take()[0])
            record_hash(fanin.add_n(parts))
    if dtype != "float16":
        record_hash(functools.reduce(np.add, parts))
    else:
        record_hash(functools.reduce(np.add, [p.astype(np.float32) for p in parts]).astype(np.float16))
    assert len(hashes) == 1


@pytest.mark.parametrize("bad", [-1, 1.5, math.nan, -math.inf, "1"])
def test_an_invalid_budget_is_refused(bad: Any) -> None:
    for call in (lambda: fanin.InputBuffer(1, budget=bad), lambda: fanin.set_options(budget=bad)):
        with pytest.raises(ValueError, match="budget: expected "):
            call()


def test_a_failed_allocation_in_the_middle_of_a_fold_loses_nothing() -> None:
    for n in range(60):
        buf = fanin.InputBuffer(1, budget=math.inf)
        for k in range(4):
            buf.add(0, np.full(200_000, float(k)), key=k)
        hooks.fail_at(n, 1)
        try:
            buf.take()
            done = True
        except MemoryError:
            done = False
        finally:
            hooks.fail_at(-1)
        if done:
            assert n > 3
            return
        assert buf[0][0] == 6.0
        assert buf.take()[0][0] == 6.0
    raise AssertionError("it never succeeded")


# What is due at once goes straight into the slot's own sum


def outcomes(operations: list[tuple[Any, ...]], slots: int, how: dict[str, Any], *, watched: bool) -> list[Any]:
    """The results of a buffer for a script. With a trace, every gradient takes the general path."""
    buf = fanin.InputBuffer(slots, **how)
    said: list[Any] = []
    kept: list[Any] = []
    with fanin.trace() if watched else contextlib.nullcontext():
        for name, *rest in operations:
            try:
                if name == "add":
                    slot, x, key = rest
                    buf.add(slot, x, **({} if key is None else {"key": key}))
                elif name == "many":
                    places, xs, keys = rest
                    buf.add_many(places, xs, **({} if keys is None else {"keys": keys}))
                elif name == "expect":
                    buf.expect(*rest)
                elif name == "look":
                    kept.append(buf[rest[0]])
                else:
                    said.append(
                        [None if x is None else (str(x.dtype), x.shape, x.strides, x.tobytes()) for x in buf.take()]
                    )
            except (ValueError, TypeError, RuntimeError) as e:
                said.append((name, type(e).__name__, str(e)))
    said.append([None if x is None else x.tobytes() for x in kept])
    said.append(
        {f: getattr(buf.counters, f) for f in ("adds", "folds", "passes", "in_place", "bytes_read", "bytes_written")}
    )
    return said


def script(rng: np.random.Generator, slots: int) -> list[tuple[Any, ...]]:
    """Adds of mostly one kind, mostly in the order of their keys, with other calls in between."""
    shape, dtype, keyed = (3, 2), np.dtype(["f4", "f8", "i4", "f2"][rng.integers(4)]), rng.random() < 0.5
    next_key = [0] * slots
    operations: list[tuple[Any, ...]] = []

    def gradient() -> Any:
        odd = rng.random()
        other = np.dtype("f8") if odd < 0.02 else dtype
        x = (rng.standard_normal((2, 2) if 0.02 < odd < 0.04 else shape) * 8).astype(other)
        return np.asfortranarray(x) if 0.04 < odd < 0.1 else x

    def key(slot: int) -> int | None:
        if not keyed:
            return None if rng.random() < 0.98 else 0
        if rng.random() < 0.02:
            return None
        next_key[slot] += 1
        return next_key[slot] - 1 + (0 if rng.random() < 0.95 else int(rng.integers(-1, 2)))

    for _ in range(40):
        what = rng.random()
        if what < 0.6:
            slot = int(rng.integers(slots))
            operations.append(("add", slot, gradient(), key(slot)))
        elif what < 0.85:
            places = [int(s) for s in (range(slots) if rng.random() < 0.7 else rng.integers(0, slots, slots))]
            operations.append(
                ("many", places, [gradient() for _ in places], [key(s) or 0 for s in places] if keyed else None)
            )
        elif what < 0.87:
            operations.append(("expect", int(rng.integers(slots)), int(rng.integers(3, 9))))
        elif what < 0.93:
            operations.append(("look", int(rng.integers(slots))))
        else:
            operations.append(("take",))
            next_key = [0] * slots
    return [*operations, ("take",)]


@pytest.mark.parametrize("seeds", sizes(80, 250))
def test_adding_at_once_is_parking_and_folding(seeds: int) -> None:
    """The fast path and the general one give the same bits, strides, errors and snapshots; with no budget also the same
    counters.
    """
    refused = in_place = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        slots = int(rng.integers(1, 5))
        how = {"budget": [0, 30, 100][rng.integers(3)], "accumulate": [None, None, "float64"][rng.integers(3)]}
        operations = script(rng, slots)
        short, long = (outcomes(operations, slots, how, watched=watched) for watched in (False, True))
        if how["budget"]:  # there the places of folds are not guaranteed
            assert short[:-1] == long[:-1], (seed, how)
        else:
            assert short == long, (seed, how)
        refused += sum(isinstance(s, tuple) for s in short)
        in_place += short[-1]["in_place"]
    assert refused > seeds // 5 and in_place > seeds * 4, (refused, in_place)


WIDER = [
    ("float16", None),
    ("bfloat16", None),
    ("float8_e5m2", None),
    ("float32", "float64"),
    ("complex64", "complex128"),
]


@pytest.mark.rule("A11", "A15")
@pytest.mark.parametrize("dtype, wish", WIDER)
def test_a_sum_that_is_wider_than_its_contributions_grows_in_place_and_is_rounded_once(
    dtype: str, wish: str | None
) -> None:
    """Every order of arrival and every split into folds gives the bits of the sum of all at once."""
    rng, of = np.random.default_rng(3), np.dtype(getattr(ml_dtypes, dtype, dtype))
    rounded_later = 0
    for n in (2, 3, 8, 70, 150):
        gradients = [(rng.normal(size=33) * 10.0 ** rng.integers(-2, 3)).astype(of) for _ in range(n)]
        slot = fanin.Slot(dtype=dtype, accumulate=wish)
        parked, at_once, bounded = (fanin.InputBuffer([slot], budget=b) for b in (None, 0, 40 * of.itemsize * 33))
        for k, g in enumerate(gradients):
            at_once.add(0, g, key=k)
            parked.add(0, g, key=k)
        for k in rng.permutation(n):
            bounded.add(0, gradients[k], key=int(k))
        assert at_once.counters.in_place == n - 2  # the first two make the wider memory
        assert at_once[0].tobytes() == parked[0].tobytes()
        each_time = functools.reduce(lambda a, b: (a + b).astype(of), gradients)
        wanted = parked.take()[0]
        rounded_later += wanted.tobytes() != each_time.tobytes()
        assert wanted.dtype == of
        for buf in (at_once, bounded):
            assert buf.take()[0].tobytes() == wanted.tobytes(), n
    assert rounded_later >= 3


def test_a_wider_sum_of_large_gradients_that_runs_without_the_interpreter_is_the_sum_of_all() -> None:
    gradients = [np.full(200_000, k + 1, np.float16) for k in range(4)]  # 400 kB: two of them leave the interpreter
    parked, at_once = (fanin.InputBuffer(1, budget=b) for b in (None, 0))
    for g in gradients:
        parked.add(0, g)
        at_once.add(0, g)
    assert at_once.counters.folds == 3
    total = at_once.take()[0]
    assert total.tolist() == [10] * 200_000 and total.tobytes() == parked.take()[0].tobytes()


@pytest.mark.parametrize("dtype, wish", WIDER)
def test_a_wider_sum_of_very_many_at_once_is_the_sum_of_all(dtype: str, wish: str | None) -> None:
    """The first comes last, and all are folded then; or one is missing until the take, and all later ones wait."""
    rng, of = np.random.default_rng(4), np.dtype(getattr(ml_dtypes, dtype, dtype))
    gradients = [rng.normal(size=33).astype(of) for _ in range(200)]
    slot = fanin.Slot(dtype=dtype, accumulate=wish)
    for order in (range(199, -1, -1), [0, 1, 2, *range(4, 200)]):
        parked, at_once = fanin.InputBuffer([slot]), fanin.InputBuffer([slot], budget=0)
        for k in order:
            at_once.add(0, gradients[k], key=k)
        for k in sorted(order):
            parked.add(0, gradients[k], key=k)
        assert at_once.counters.folds
        assert at_once.take()[0].tobytes() == parked.take()[0].tobytes()


def test_a_wider_sum_grows_without_memory_of_its_own_for_each_contribution() -> None:
    buf, g = fanin.InputBuffer(1, budget=0), np.full(16, 0.5, np.float16)
    for _ in range(3):
        buf.add(0, g)
    before = hooks.memory()[1]
    for _ in range(20):
        buf.add(0, g, copy=True)
    assert hooks.memory()[1] == before
    assert buf.take(scale=2)[0].tolist() == [23.0] * 16


@pytest.mark.parametrize("read", [False, True])
def test_a_result_of_a_wider_sum_never_shares_its_memory(read: bool) -> None:
    buf, g = fanin.InputBuffer([fanin.Slot((4,), "float16")] * 2, budget=0), np.full(4, 0.5, np.float16)
    for how in ({}, {"writable": True}, {"slot": 0}, {"out": [np.zeros(4, np.float16), None]}, {"scale": 1}):
        for _ in range(3):
            buf.add(0, g)
        shown = buf[0] if read else np.full(4, 1.5)
        taken: Any = buf.take(**how)  # type: ignore[arg-type]
        x = taken if "slot" in how else taken[0]
        assert x.dtype == np.float16 and x.tolist() == shown.tolist() == [1.5] * 4
        x[:] = 9
        assert shown.tolist() == [1.5] * 4
    for _ in range(3):
        buf.add(0, g)
    with buf.target(0) as t:
        t += 1
    buf.add(0, g)
    assert buf.take(slot=0).tolist() == [3.0] * 4


def test_a_snapshot_is_not_changed_by_what_is_added_at_once() -> None:
    buf, g = fanin.InputBuffer(1, budget=0), np.ones(3)
    for _ in range(4):
        buf.add(0, g)
    before = buf[0]
    for _ in range(4):
        buf.add(0, g)
    assert before.tolist() == [4] * 3 and buf[0].tolist() == [8] * 3


def test_a_batch_of_which_one_is_refused_adds_nothing_at_once() -> None:
    buf, g = fanin.InputBuffer(3, budget=0), np.ones(2)
    for _ in range(3):
        buf.add_many(range(3), [g] * 3)
    with pytest.raises(ValueError, match="slot 2"):
        buf.add_many(range(3), [g, g, np.ones(5)])
    assert [x.tolist() for x in buf.take()] == [[3, 3]] * 3


def test_expect_limits_gradients_that_are_added_at_once() -> None:
    buf, g = fanin.InputBuffer(1, budget=0), np.ones(2)
    buf.expect(0, 4)
    for _ in range(4):
        buf.add(0, g)
    with pytest.raises(ValueError, match="4"):
        buf.add(0, g)
    assert buf.take()[0].tolist() == [4, 4]


def strided(value: float) -> np.ndarray:
    return np.full((2, 2), value, np.float32)[:, 0]


def test_a_first_contribution_over_the_budget_is_the_sum_and_still_its_maker_s(seed: int = 11) -> None:
    """budget=0 on the fast path: nothing waits; an array with other references is not written, a donated one is, for
    every kind of next gradient: keys or none, arrays with gaps, batches, copies.
    """
    print("seed", seed)
    random = np.random.default_rng(seed)
    in_place = fresh = 0
    for _ in range(300):
        keyed, donate, copy = random.random() < 0.5, random.random() < 0.4, random.random() < 0.2
        first = np.full(2, 1, np.float32)
        buf = fanin.InputBuffer(2, budget=0)
        buf.add(0, first, key=0 if keyed else None, donate=donate and not copy, copy=copy)
        assert repr(buf) == "<fanin.InputBuffer: 2 slots, 1 sum begun>" and buf.counters.folds == 0
        expected, kept = 1.0, []
        for k in range(1, int(random.integers(1, 6))):
            key = k if keyed else None
            g = strided(k) if random.random() < 0.2 else np.full(2, k, np.float32)
            kept.append((g, k))
            expected += k
            if random.random() < 0.3:
                buf.add_many([0], [g], keys=None if key is None else [key])
            else:
                buf.add(0, g, key=key)
            assert repr(buf) == "<fanin.InputBuffer: 2 slots, 1 sum begun>"
        if keyed:
            with pytest.raises(ValueError, match="key"):
                buf.add(0, np.ones(2, np.float32), key=0)
        out, nothing = buf.take()
        assert nothing is None and out.tolist() == [expected, expected]
        assert all(g.tolist() == [k, k] for g, k in kept), "what was lent was written"
        if not donate and not copy and kept:
            assert first.tolist() == [1, 1] and not np.shares_memory(first, out)
        in_place += np.shares_memory(first, out) and bool(kept)
        fresh += not np.shares_memory(first, out)
    assert in_place > 20 and fresh > 20, (in_place, fresh)


def test_a_first_contribution_that_is_the_sum_is_counted_expected_and_handed_through() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    buf.expect(0, 2)
    one = np.ones(2)
    buf.add(0, one)
    assert not buf.ready(0)
    buf.add(0, one)
    assert buf.ready(0)
    with pytest.raises(ValueError, match="2 contributions"):
        buf.add(0, one)
    assert buf.take()[0].tolist() == [2, 2] and one.tolist() == [1, 1]
    buf.expect(0, 1)
    buf.add(0, one)
    assert buf.take()[0] is one
    buf.add(0, one)
    assert buf.take(writable=True)[0] is not one
    buf.add(0, one)
    buf.clear()
    assert not buf.ready(0)


def test_a_sum_in_place_adds_no_folds_memory() -> None:
    """Under budget=0 each further one is added at once, into the buffer's own memory."""
    buf, g = fanin.InputBuffer(1, budget=0), np.ones(4)
    for _ in range(5):
        buf.add(0, g)
    counted = buf.counters
    assert (counted.folds, counted.passes, counted.in_place) == (4, 4, 3)
    assert buf.take()[0].tolist() == [5.0] * 4
