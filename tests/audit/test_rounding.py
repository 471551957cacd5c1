"""Roundings and factors of `fanin.audit`, compared with NumPy and ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from fanin.audit import rounding
from fanin.audit.places import SAMPLES, chosen
from fanin.audit.stories import told

rng = np.random.default_rng(0)


def numbers(n: int, dtype: str) -> rounding.Vector:
    """Numbers of a dtype, over many orders of magnitude."""
    x = rng.normal(size=n) * np.exp2(rng.integers(-20, 10, n))
    return rounding.rounded(x.astype(rounding.carrier(dtype)), dtype)


def test_bfloat16_is_rounded_as_ml_dtypes_rounds_it() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    found = rounding.rounded(x, "bfloat16")
    assert ((found == expected) | (np.isnan(found) & np.isnan(expected))).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_factor_is_found_in_every_dtype_and_is_the_number_that_was_meant(dtype: str) -> None:
    found = 0
    for f in [1 / 3, 0.25, 2.0, 0.7310585, 1 / 64, 12.0]:
        x = numbers(256, dtype)
        y = rounding.times(f, x, dtype)
        one = rounding.factor(x, y, dtype)
        assert one is not None and one.decided and one.has(f, 1e-6), (f, one)
        found += abs(one.value - f) <= 1e-6 * f
    assert found >= 4  # a narrow dtype leaves some room


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_is_no_factor_is_none(dtype: str) -> None:
    x = numbers(256, dtype)
    assert rounding.factor(x, rounding.added(x, numbers(256, dtype), dtype), dtype) is None
    y = rounding.times(0.5, x, dtype)
    y[7] = x[7] * 4
    assert rounding.factor(x, y, dtype) is None
    assert rounding.factor(np.zeros_like(x), x, dtype) is None
    assert rounding.factor(np.where(x > 0, np.inf, x), x, dtype) is None


def test_a_factor_of_equal_numbers_is_not_decided() -> None:
    x = np.full(256, 0.3, np.float32)
    one = rounding.factor(x, np.float32(0.5) * x, "float32")
    assert one is not None and not one.decided


def test_clipping_by_value_is_seen_only_where_several_numbers_say_so() -> None:
    x = numbers(256, "float32")
    c = float(np.sort(abs(x))[-50])
    found = rounding.clipped(x, np.clip(x, -c, c), "float32")
    assert found is not None and found[1] and np.isclose(found[0], c)
    assert rounding.clipped(x, x * np.float32(0.5), "float32") is None
    one = np.array([3.0], np.float32)
    assert rounding.clipped(one, one / 2, "float32") == (1.5, False)


def test_a_sum_in_another_order_is_within_its_bound_and_one_that_lacks_a_term_is_not() -> None:
    right = wrong = 0
    for dtype in ("float32", "bfloat16", "float64"):
        terms = [numbers(256, dtype) for _ in range(8)]
        total = sum(t.astype(np.float64) for t in terms)
        size = sum(float(abs(t).max()) for t in terms)
        y = np.zeros_like(terms[0])
        for i in rng.permutation(8):
            y = y + terms[i]
        right += rounding.within(rounding.rounded(y, dtype), total, dtype, 8, size, wide=True)
        wrong += rounding.within(rounding.rounded(y - terms[3], dtype), total, dtype, 8, size, wide=True)
    assert (right, wrong) == (3, 0)


def test_equal_is_up_to_nan_and_numbers_that_are_flushed_to_zero() -> None:
    a = np.array([1.0, np.nan, 1e-40, -0.0], np.float32)
    assert rounding.same(a, np.array([1.0, np.nan, 0.0, 0.0], np.float32), "float32")
    assert not rounding.same(a, np.array([1.0, 2.0, 0.0, 0.0], np.float32), "float32")
    assert not rounding.same(a, np.array([1.0, np.nan, 1e-30, 0.0], np.float32), "float32")


def test_places_are_among_the_elements_that_are_not_zero() -> None:
    for n, filled in [(300, 300), (10**6, 40), (10**6, 5000), (10**6, 10**6)]:
        x = np.zeros(n)
        x[rng.choice(n, filled, replace=False)] = 1
        at = chosen("w", n, lambda at, x=x: x[at], lambda x=x: np.flatnonzero(x))
        assert len(at) == SAMPLES and at.dtype == np.int32
        assert np.count_nonzero(x[np.unique(at)]) == min(filled, SAMPLES), (n, filled)
        again = chosen("w", n, lambda at, x=x: x[at], lambda x=x: np.flatnonzero(x))
        assert (at == again).all()


def test_stories_name_each_fault_of_a_few_gradients() -> None:
    g = [numbers(8, "float32") for _ in range(4)]
    stories = {
        "arrival 2 is lost": [0, 2, 3],
        "only arrival 3 of 4 counts": [2],
        "arrival 1 counts twice": [0, 1, 2, 3, 0],
        "only the first arrivals count, up to arrival 2": [0, 1],
        "only the last arrivals count, from arrival 3 on": [2, 3],
    }
    for text, terms in stories.items():
        y = np.zeros(8, np.float32)
        for i in terms:
            y = y + g[i]
        assert told(g, None, 4, "float32", lambda total, y=y: bool((total == y).all())) == [text]
    whole = ((g[0] + g[1]) + g[2]) + g[3]
    assert told(g, None, 4, "float32", lambda total: bool((total == whole).all())) == []
