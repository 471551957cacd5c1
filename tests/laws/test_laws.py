"""Laws, by name: each holds for every sum of every kind. Gradients are drawn by recipe (kit/recipes.py)."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from kit.recipes import KINDS, SCALARS, SHAPES, Given, Sub, parts_of, recipe
from kit.sample import sizes
from kit.values import DTYPES, FLOATS, LOW, added_up, show, stored
from reference import buffer as reference

pytestmark = pytest.mark.core
SEED = 4
BUDGETS = (0, 1, 50, None, math.inf)


@pytest.fixture(params=["reference", "C"])
def buffer(request: pytest.FixtureRequest) -> Any:
    """InputBuffer."""
    return reference.InputBuffer if request.param == "reference" else fanin.InputBuffer


@pytest.fixture(params=sizes(60, 150))
def count(request: pytest.FixtureRequest) -> int:
    """The number of cases by which a law is checked."""
    drawn: int = request.param
    return drawn


def cases(count: int, kinds: list[str] | None = None) -> Iterator[tuple[random.Random, list[Any]]]:
    """(a source of choices, gradients that have a sum)."""
    print(f"seed {SEED}")
    summed = 0
    for n in itertools.count():
        draw = random.Random(f"{SEED} {n}")
        shape = draw.choice(SHAPES)
        dtypes = draw.sample(range(len(DTYPES)), draw.choice([1, 2, 3]))
        some = kinds or [k for k in (KINDS if shape else SCALARS) if k not in ("wrong shape", "nonsense", "fraction")]
        world = Given()
        terms = [world.make(recipe(some, dtypes, [shape], draw), False) for _ in range(draw.randint(1, 6))]
        if any(type(x) is int and not 0 <= x < 128 for x in terms):
            continue  # each add checks whether it fits the sum so far
        try:
            whole = reference.InputBuffer(1)
            for x in terms:
                whole.add(0, x)
        except ValueError:
            continue  # two kinds of float8
        yield draw, terms
        summed += 1
        if summed == count:
            return


def summed(make: Any, terms: list[Any], keys: Any = None, slot: Any = None, take: Any = None, **how: Any) -> Any:
    b = make(1 if slot is None else [slot], **how)
    for i, x in enumerate(terms):
        b.add(0, x, key=None if keys is None else keys[i])
    return b.take(**(take or {}))[0]


@pytest.mark.rule("A15")
def test_the_order_of_producers_does_not_matter_to_a_keyed_sum(buffer: Any, count: int) -> None:
    kinds: Counter[str] = Counter()
    for draw, terms in cases(count):
        expected = show(summed(buffer, terms))
        keys = list(range(len(terms)))
        if draw.random() < 0.5:
            keys = sorted(draw.sample(range(20), len(terms)))
        pairs = list(zip(keys, terms, strict=True))
        for _ in range(3):
            draw.shuffle(pairs)
            order, shuffled = zip(*pairs, strict=True)
            assert show(summed(buffer, list(shuffled), order, budget=draw.choice(BUDGETS))) == expected
        kinds[expected[0]] += 1
    assert min(kinds[k] for k in ("array", "sparse", "zero", "object", "undefined")) > 0, kinds


@pytest.mark.rule("A15")
def test_the_budget_never_changes_a_bit(buffer: Any, count: int) -> None:
    for draw, terms in cases(count):
        floats = {reference.read(x).type for x in terms} <= {"", "float", *(d.name for d in FLOATS)}
        wish = np.float64 if floats and draw.random() < 0.5 else None
        one = show(summed(buffer, terms, budget=0, accumulate=wish))
        assert all(show(summed(buffer, terms, budget=b, accumulate=wish)) == one for b in BUDGETS)


@pytest.mark.rule("A6", "A7")
def test_a_gradient_with_other_references_is_never_written(buffer: Any, count: int) -> None:
    written = 0
    for draw, terms in cases(count):
        world = Given(memory=[y for x in terms for y in parts_of(x) if isinstance(y, np.ndarray)])
        before = world.image()
        take = draw.choice([{}, {"writable": True}, {"scale": 1}])
        if not (take and any(type(x).__name__ == "Word" for x in terms)):
            result = summed(buffer, terms, take=take, budget=draw.choice(BUDGETS))
            assert world.image() == before
            if isinstance(result, np.ndarray) and result.flags.writeable and not any(result is x for x in terms):
                result[...] = 0
                written += result.size > 0
                assert world.image() == before, "and the result is not in its memory"
    assert written > count // 8


@pytest.mark.rule("A16")
def test_a_taken_slot_is_empty(buffer: Any, count: int) -> None:
    for draw, terms in cases(count // 2):
        b = buffer(2, budget=draw.choice(BUDGETS))
        for x in terms:
            b.add(0, x, key=None)
            b.add(1, x, key=None)
        b.take()
        assert b.take() == [None, None]
        assert b[0] is None
        b.add(0, np.ones((7, 9), bool), key=3)  # of another shape and dtype, and keyed
        assert b.take()[0].shape == (7, 9)


@pytest.mark.rule("A3", "A4", "A6", "A7")
def test_sparse_then_dense_equals_dense_then_sparse(buffer: Any, count: int) -> None:
    mixed = 0
    for draw, terms in cases(count // 2, ["sparse"]):
        dense = np.array([draw.choice([0.0, -0.0, 1.0, 1 / 3, 2.0**24]) for _ in range(math.prod(terms[0].shape))])
        with np.errstate(all="ignore"):
            dense = dense.reshape(terms[0].shape).astype(draw.choice(FLOATS))
        sparse = summed(buffer, terms[:1] * 2)  # without duplicates
        if reference.kind(np.asarray(getattr(sparse, "parts", [getattr(sparse, "data", None)])[-1]).dtype) not in "fc":
            continue
        try:
            one = summed(buffer, [sparse, dense], budget=draw.choice(BUDGETS))
        except ValueError:
            continue  # two kinds of float8
        if has_duplicates(sparse):
            continue
        assert show(one) == show(summed(buffer, [dense, sparse], budget=draw.choice(BUDGETS)))
        mixed += 1
    assert mixed > count // 10, mixed


def has_duplicates(x: Any) -> bool:
    return len(list(stored(x))) != len(added_up(x))


@pytest.mark.rule("S2", "A2")
def test_undefined_gradients_change_nothing_and_zeros_only_the_dtype(buffer: Any, count: int) -> None:
    for draw, terms in cases(count):
        expected = summed(buffer, terms)
        more = list(terms)
        for _ in range(3):
            more.insert(draw.randint(0, len(more)), None)
        assert show(summed(buffer, more, budget=draw.choice(BUDGETS))) == show(expected)
        if isinstance(expected, np.ndarray) and not isinstance(expected, np.ma.MaskedArray):
            more.insert(draw.randint(0, len(more)), fanin.Zero(expected.shape, bool))
            assert show(summed(buffer, more, budget=draw.choice(BUDGETS))) == show(expected)


@pytest.mark.rule("A14")
def test_reads_change_nothing(buffer: Any, count: int) -> None:
    for draw, terms in cases(count):
        b = buffer(1, budget=draw.choice(BUDGETS))
        for i, x in enumerate(terms):
            b.add(0, x)
            alone = summed(buffer, terms[: i + 1])
            if isinstance(alone, Sub):
                alone = alone.view(np.ndarray)  # a copy is an ndarray
            elif getattr(alone, "format", "") == "dia":
                alone = alone.tocoo()  # and of SciPy's further formats COO
            assert show(b[0]) == show(alone)
        assert show(b.take()[0]) == show(summed(buffer, terms))


@pytest.mark.rule("A14")
def test_a_scale_of_one_and_an_out_change_nothing(buffer: Any, count: int) -> None:
    arrays = 0
    for draw, terms in cases(count, ["dense", "none", "zero"]):
        plain = summed(buffer, terms)
        if isinstance(plain, np.ndarray) and plain.dtype.kind != "c":
            scaled = summed(buffer, terms, take={"scale": 1}, budget=draw.choice(BUDGETS))
            out = np.zeros(plain.shape, plain.dtype)
            assert summed(buffer, terms, take={"out": [out]}, budget=draw.choice(BUDGETS)) is out
            assert show(scaled)[2:] == show(np.asarray(plain))[2:] == show(out)[2:]
            arrays += 1
    assert arrays > count // 3


@pytest.mark.rule("A15")
def test_slots_are_independent(buffer: Any, count: int) -> None:
    many = [terms for _, terms in cases(count // 4)]
    b = buffer(len(many), budget=100)
    steps = [(slot, x) for slot, terms in enumerate(many) for x in terms]
    random.Random(SEED).shuffle(steps)
    left = [iter(terms) for terms in many]
    for slot, _ in steps:
        b.add(slot, next(left[slot]))
    assert [show(x) for x in b.take()] == [show(summed(buffer, terms)) for terms in many]


@pytest.mark.rule("A11")
def test_a_low_float_sum_is_the_float32_sum_rounded_once(buffer: Any, count: int) -> None:
    draw = random.Random(SEED)
    for dtype in LOW:
        for _ in range(count // 4):
            terms = [np.array([draw.uniform(-4, 4) for _ in range(9)]).astype(dtype) for _ in range(draw.randint(2, 9))]
            total = terms[0].astype(np.float32)
            for x in terms[1:]:
                total = total + x.astype(np.float32)
            assert show(summed(buffer, terms)) == show(total.astype(dtype))


@pytest.mark.rule("A15")
def test_a_float64_sum_is_near_the_exact_one(buffer: Any, count: int) -> None:
    draw = random.Random(SEED)
    for _ in range(count * 2 // 3):
        terms = [np.array([draw.uniform(-1, 1) * 10 ** draw.randint(-5, 5)]) for _ in range(draw.randint(2, 30))]
        exact = math.fsum(float(x[0]) for x in terms)
        bound = len(terms) * 2.0**-53 * math.fsum(abs(float(x[0])) for x in terms)
        assert abs(float(summed(buffer, terms)[0]) - exact) <= bound
