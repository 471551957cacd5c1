"""Means over a divisor that the caller counts (`_core._take_over`, `_core.add_n_over`): as of weights with that sum."""

from __future__ import annotations

import collections
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import sample, weighted

pytestmark = pytest.mark.core

DIVISORS = [(3.0,), (0.1,), (2.0**53, 1.0), (-7.0,), (1.0,)]


def terms_of(dtype: str, shape: Any, n: int) -> list[Any]:
    rng = np.random.default_rng(n)
    return [rng.standard_normal(shape).astype(weighted.dtype_of(dtype)) for _ in range(n)]


@pytest.mark.rule("W3")
@pytest.mark.parametrize("budget", [0, 100, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_every_way_to_take_divides_once(dtype: str, budget: Any) -> None:
    """Small plain sums, one slot and several, with and without `out`, donated, large ones and gapped ones."""
    wide = "float64" if dtype == "float64" else "float32"
    ways = itertools.product([5, (4, 6), (130, 140)], [1, 2, 5], [1, 3], [False, True], DIVISORS[:3])
    for shape, count, slots, donate, divisor in ways:
        terms = terms_of(dtype, shape, count)
        expected = weighted.folded(terms, [1] * count, sum(map(Fraction, divisor)), wide, dtype)
        for how in ("all", "one", "out", "gaps"):
            buf = fanin.InputBuffer([fanin.Slot(shape=shape, dtype=dtype)] * slots, budget=budget)
            for i, x in itertools.product(range(slots), terms):
                gapped = np.repeat(x, 2, axis=-1)[..., ::2]
                buf.add(i, gapped if how == "gaps" else x.copy(), donate=donate and how != "gaps")
            if how == "one":
                sums = [_core._take_over(buf, i, None, divisor) for i in range(slots)]
            elif how == "out":
                outs = [np.empty_like(expected) for _ in range(slots)]
                sums = _core._take_over(buf, None, outs, divisor)
                assert all(a is b for a, b in zip(sums, outs, strict=True))
            else:
                sums = _core._take_over(buf, None, None, divisor)
            for got in sums:
                assert got.tobytes() == expected.tobytes(), (shape, count, slots, donate, divisor, how)
            assert buf.take() == [None] * slots


@pytest.mark.rule("W2", "W3")
@pytest.mark.parametrize("divisor", DIVISORS)
def test_an_exact_mean_over_a_divisor_is_rounded_once(divisor: Any) -> None:
    terms = terms_of("float32", 40, 4)
    total = sum(map(Fraction, divisor))
    expected = weighted.exact(terms, [1] * 4, total)
    buf = fanin.InputBuffer([fanin.Slot(shape=40, dtype="float32", accumulate="exact")], budget=0)
    for x in terms:
        buf.add(0, x)
    assert np.array_equal(_core._take_over(buf, 0, None, divisor), expected)
    out = np.empty(40, "f4")
    assert _core.add_n_over(terms, out, "exact", None, None, divisor) is out and np.array_equal(out, expected)
    weights = [3, None, 0.1, 2]
    each = [1 if w is None else w for w in weights]
    _core.add_n_over(terms, out, "exact", None, weights, divisor)
    assert np.array_equal(out, weighted.exact(terms, each, total))


@pytest.mark.rule("W3")
@pytest.mark.parametrize("divisor", [1e-42, 1e-50, 1e300])
def test_a_divisor_that_the_dtype_of_the_sum_does_not_hold_divides_in_float64(divisor: float) -> None:
    terms = [np.full(4, 1e-44, "f4"), np.full(4, 2e-44, "f4")]
    expected = ((terms[0] + terms[1]).astype("f8") / divisor).astype("f4")
    for budget in (0, math.inf):
        buf = fanin.InputBuffer([fanin.Slot(dtype="float32")], budget=budget)
        for x in terms:
            buf.add(0, x)
        assert _core._take_over(buf, 0, None, (divisor,)).tobytes() == expected.tobytes()


#: Of a slot its dtype, that of its sums, and that of their parts.
SLOTS = [
    ("float16", None, "float32"),
    ("float16", "float16", "float16"),
    ("bfloat16", None, "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("float32", None, "float32"),
    ("float32", "float64", "float64"),
    ("float64", None, "float64"),
    ("complex64", None, "float32"),
    ("complex64", "complex128", "float64"),
    ("complex128", None, "float64"),
]
PARTS = {"complex64": "float32", "complex128": "float64"}
#: Where formats end, and what lies beside.
ENDS = [1e-42, 1e-50, 1e38, 2.0**-126, 2.0**-127, 2.0**-14, 2.0**-15, 2.0**128, 65504.0, 65520.0, 5e-324, 1e-310, 1e308]
ENDS += [float(np.finfo("f4").max), float(np.finfo("f4").max) * (1 + 2.0**-26), 1.0]


def divisor_at_an_end(rng: np.random.Generator) -> tuple[float, ...]:
    """The parts of a divisor, the largest first."""
    first = float(rng.choice(ENDS)) * float(rng.choice([1, -1, 1 + 2.0**-52, 1 - 2.0**-53]))
    if rng.random() < 0.3:
        first = math.ldexp(rng.uniform(1, 2), int(rng.integers(-1074, 1023)))
    second = math.ldexp(first, -int(rng.integers(53, 120)))
    return (first, second) if second and rng.random() < 0.3 else (first,)


def number_at_an_end(rng: np.random.Generator, dtype: str) -> float:
    least = weighted.FORMATS[dtype][1]
    exponent = rng.integers(least, weighted.ABOVE[dtype]) if rng.random() < 0.6 else rng.integers(-12, 6)
    return float(rng.choice([-1, 1])) * weighted.nearest(Fraction(math.ldexp(rng.uniform(1, 2), int(exponent))), dtype)


def parts_as_floats(x: Any, own: str) -> Any:
    """The parts of the numbers of an array as float64."""
    return x.view(weighted.dtype_of(own)).astype("f8")


@pytest.mark.rule("W3")
@pytest.mark.parametrize("lists", sample.sizes(1000, 10_000))
def test_quotients_at_the_ends_of_each_format_are_those_of_fractions(lists: int) -> None:
    """Every dtype of a slot and of its sums; divisors and sums over the whole range."""
    rng = np.random.default_rng(40)
    seen: collections.Counter[str] = collections.Counter()
    for k in range(lists):
        dtype, accumulate, part = SLOTS[k % len(SLOTS)]
        own = PARTS.get(dtype, dtype)
        lanes = 1 + (own != dtype)
        numbers = np.array([[number_at_an_end(rng, own) for _ in range(3 * lanes)] for _ in range(2)])
        terms = [x.astype(weighted.dtype_of(own)) for x in numbers]
        divisor = divisor_at_an_end(rng)
        exact = sum(map(Fraction, divisor), Fraction(0))
        with np.errstate(all="ignore"):
            wide = weighted.dtype_of(part)
            total = (terms[0].astype(wide) + terms[1].astype(wide)).astype("f8")
            made = np.array([weighted.quotient(float(x), exact, part, own) for x in total])
            expected = parts_as_floats(made.astype(weighted.dtype_of(own)), own)
        slots = int(rng.integers(1, 4))
        budget = (0, 100, math.inf)[k % 3]
        buf = fanin.InputBuffer([fanin.Slot(dtype=dtype, accumulate=accumulate)] * slots, budget=budget)
        for slot, x in itertools.product(range(slots), terms):
            buf.add(slot, x.copy().view(weighted.dtype_of(dtype)))
        only = 0 if slots == 1 else None
        sums = _core._take_over(buf, only, None, divisor)
        for one in [sums] if slots == 1 else sums:
            got = parts_as_floats(one, own)
            assert np.array_equal(got, expected, equal_nan=True), (k, dtype, accumulate, terms, divisor)
            signed = ~np.isnan(expected)
            assert np.array_equal(np.signbit(got[signed]), np.signbit(expected[signed])), (k, dtype, terms, divisor)
        seen["inf"] += int(np.isinf(expected).sum())
        seen["zero"] += int((expected == 0).sum())
        seen["finite"] += int(np.isfinite(expected).sum())
    assert min(seen["inf"], seen["zero"]) > lists / 10 and seen["finite"] > 2 * lists, seen


def test_what_a_caller_holds_is_not_divided() -> None:
    for donate in (False, True):
        x = np.full(4, 8.0)
        buf = fanin.InputBuffer([fanin.Slot(shape=4, dtype="float64")])
        buf.add(0, x, donate=donate)
        assert _core._take_over(buf, None, None, (2.0,))[0].tolist() == [4] * 4
        assert donate or x.tolist() == [8] * 4


def test_a_divisor_of_zero_or_too_many_parts_leaves_the_sum() -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=2, dtype="float32")])
    buf.add(0, np.ones(2, "f4"))
    for divisor, kind in (((), ZeroDivisionError), ((1.0, -1.0), ZeroDivisionError), ((1.0,) * 41, ValueError)):
        with pytest.raises(kind):
            _core._take_over(buf, None, None, divisor)
    assert _core._take_over(buf, None, None, (2.0,))[0].tolist() == [0.5, 0.5]
