"""Exact sums against Python's whole numbers and fractions: one rounding, for every order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from kit.inside import inside, view
from kit.sample import sizes

pytestmark = pytest.mark.core

#: (digits of the mantissa with the first one, exponent of the smallest step, the largest finite number)
FORMATS = {
    "float16": (11, -24, Fraction(65504)),
    "float32": (24, -149, Fraction(float(np.finfo(np.float32).max))),
    "float64": (53, -1074, Fraction(float(np.finfo(np.float64).max))),
    "bfloat16": (8, -133, Fraction(255, 128) * Fraction(2) ** 127),
}


def rounded(x: Fraction, name: str) -> Fraction | float:
    """`x` to nearest even in a dtype: a Fraction, or an infinity."""
    digits, least, largest = FORMATS[name]
    if x == 0:
        return x
    size = abs(x)
    top = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** top > size:
        top -= 1
    step = Fraction(2) ** max(top - digits + 1, least)
    out = round(size / step) * step  # Python rounds halves to even
    if out > largest:
        out = math.inf
    return out if x > 0 else -out


def model(column: Sequence[float], name: str) -> float:
    """The exact sum of numbers, rounded once; as a float, which holds every result of ours."""
    if any(math.isnan(v) for v in column) or {math.inf, -math.inf} <= set(column):
        return math.nan
    for v in (math.inf, -math.inf):
        if v in column:
            return v
    total = sum((Fraction(v) for v in column), Fraction(0))
    if total == 0:
        return -0.0 if all(v == 0 and math.copysign(1, v) < 0 for v in column) else 0.0
    out = float(rounded(total, name))
    return abs(out) if total > 0 else -abs(out)


def exact(arrays: Sequence[np.ndarray], dtype: object = None, **how: int) -> np.ndarray:
    out = np.empty(arrays[0].shape, arrays[0].dtype if dtype is None else dtype)
    inside().exact(view(out), tuple(map(view, arrays)), False, 1, how.get("step", 0), how.get("isa", -1))
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit by bit, but that a NaN is a NaN."""
    nan = np.isnan(a) & np.isnan(b)
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return bool(((a.view(bits) == b.view(bits)) | nan).all())


def hostile(rng: np.random.Generator, n: int, size: int, dtype: np.dtype) -> np.ndarray:
    """n x size numbers: any bits, close exponents, pairs that cancel, ties, subnormals, signed zeros, the largest."""
    bits = np.dtype(f"u{dtype.itemsize}")
    info = np.finfo(dtype)
    x = rng.integers(0, np.iinfo(bits).max, (n, size), dtype=bits, endpoint=True).view(dtype)
    way = rng.integers(0, 7, size)
    with np.errstate(all="ignore"):
        x[:, way == 1] = rng.standard_normal((n, (way == 1).sum())).astype(dtype)
        for k in range(1, n, 2):
            x[k, way == 2] = -x[k - 1, way == 2]
        tie = way == 3
        if n > 2 and dtype.itemsize > 2:
            x[0, tie] = rng.integers(1, 2 ** (info.nmant), tie.sum()).astype(dtype) * 2 + 2 ** (info.nmant + 1)
            x[1, tie] = 1
            x[2:, tie] = (rng.standard_normal((n - 2, tie.sum())) * 10.0 ** -rng.integers(5, 30)).astype(dtype)
        x[:, way == 4] = (rng.integers(-9, 10, (n, (way == 4).sum())) * float(info.smallest_subnormal)).astype(dtype)
        x[:, way == 5] = np.copysign(0, rng.integers(0, 5, (n, (way == 5).sum())) - 1).astype(dtype)
        x[:, way == 6] = (info.max * np.sign(rng.standard_normal((n, (way == 6).sum())))).astype(dtype)
    x[np.isnan(x)] = np.nan  # quiet ones
    rare = rng.random((n, size)) > 0.1
    x[~np.isfinite(x) & rare] = 1
    return x


@pytest.mark.parametrize("name", ["float32", "float16", "float64"])
@pytest.mark.parametrize("part", sizes(4, 1))
def test_hostile_sums_are_rounded_once(name: str, part: int) -> None:
    rng = np.random.default_rng(11)
    dtype = np.dtype(name)
    checked = special = 0
    for n, size in [(1, 300), (2, 3000), (3, 6000), (5, 6000), (8, 3000), (9, 2000), (40, 300), (4096, 8)]:
        size //= part
        x = hostile(rng, n, size, dtype)
        want = np.array([model(x[:, i].astype(float).tolist(), name) for i in range(size)])
        with np.errstate(all="ignore"):
            want = want.astype(dtype)
        for isa in (0, 1, 2):
            assert same(exact(list(x), isa=isa), want), f"{n} terms, vector unit {isa}"
        assert same(exact(list(x[rng.permutation(n)])), want), f"{n} terms in another order"
        assert same(exact(list(x), step=max(1, n // 3)), want), f"{n} terms in several folds"
        checked += size
        special += int((~np.isfinite(want)).sum())
    assert checked > 20_000 / part
    assert special > 100 / part


@pytest.mark.parametrize(
    ("name", "into"), [("float32", "float64"), ("float16", "float32"), ("float64", "float32"), ("float32", "float16")]
)
def test_a_result_of_another_width_is_rounded_to_that_alone(name: str, into: str) -> None:
    x = hostile(np.random.default_rng(3), 4, 4000, np.dtype(name))
    want = np.array([model(x[:, i].astype(float).tolist(), into) for i in range(x.shape[1])])
    with np.errstate(all="ignore"):
        assert same(exact(list(x), into), want.astype(into))


def test_bfloat16_and_float8_are_exact_as_well() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(8)
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn):
        x = (rng.standard_normal((7, 3000)) * 2.0 ** rng.integers(-8, 5, (7, 3000))).astype(dtype)
        # below 2^53 steps, so that float64 holds the sum; and no tie of two roundings: through a float32 that is exact
        # too
        total = x.astype(np.float64).sum(axis=0)
        plain = np.abs(total.astype(np.float32) - total) == 0
        assert plain.mean() > 0.9
        assert (exact(list(x))[plain] == total.astype(np.float32).astype(dtype)[plain]).all()
        assert (exact(list(x), np.float32)[plain] == total[plain]).all()


def test_all_orders_of_five_terms_have_one_hash() -> None:
    x = hostile(np.random.default_rng(2), 5, 500, np.dtype(np.float32))
    x[:, ~np.isfinite(x).all(axis=0)] = 1  # a NaN has no one pattern
    hashes = {exact([x[k] for k in order]).tobytes() for order in itertools.permutations(range(5))}
    assert len(hashes) == 1
    with np.errstate(all="ignore"):
        assert len({sum(x[list(order)]).tobytes() for order in itertools.permutations(range(5))}) > 1


def test_fsum_agrees_where_it_does_not_round_twice() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((50, 2000)) * 10.0 ** rng.integers(-200, 200, (50, 2000))
    assert exact(list(x)).tolist() == [math.fsum(x[:, i]) for i in range(2000)]


def test_a_sum_that_overflows_only_on_the_way_is_exact() -> None:
    big = np.finfo(np.float32).max
    for dtype, top in (
        (np.float32, big),
        (np.float64, np.finfo(np.float64).max),
        (np.float16, np.finfo(np.float16).max),
    ):
        a = [np.array([v], dtype) for v in (top, top, -top)]
        for step in (0, 1):
            assert exact(a, step=step)[0] == top
            assert exact(a[:2], step=step)[0] == math.inf
    assert exact([np.array([big], np.float32)] * 2, np.float64)[0] == 2 * float(big)


def test_complex_sums_are_exact_part_by_part() -> None:
    rng = np.random.default_rng(6)
    parts = hostile(rng, 5, 1000, np.dtype(np.float32))
    z = [p.reshape(-1, 2).copy().view(np.complex64).reshape(-1) for p in parts]
    for step in (0, 2):
        assert same(exact(z, step=step).view(np.float32), exact(list(parts)))


def mild(rng: np.random.Generator, n: int, size: int, dtype: np.dtype) -> np.ndarray:
    """n x size numbers of few digits and close exponents, whose products with a factor often lie near a tie."""
    digits = min(np.finfo(dtype).nmant, 23)
    return (rng.integers(-(2**digits), 2**digits, (n, size)) * 2.0 ** -rng.integers(0, 9, (n, size))).astype(dtype)


def products(x: np.ndarray, factor: float, isa: int = -1, step: int = 0) -> np.ndarray:
    out = np.empty(x.shape[1], x.dtype)
    inside().exact(view(out), tuple(map(view, x)), True, factor, step, isa)
    return out


def slow_ones(x: np.ndarray, factor: float) -> int:
    """How many elements so far were summed in integers, as the fast way proved nothing of them."""
    out = np.empty_like(x[0])
    return inside().exact(view(out), tuple(map(view, x)), True, factor)


@pytest.mark.parametrize("n", [2, 3, 8, 9])
@pytest.mark.parametrize("factor", [0.125, 0.5, 1 / 3, 0.1, -3.0, 1e-40, 2.0**-140, 2.0**-900, 2.0**100, 1e300])
@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_a_factor_is_applied_before_the_one_rounding(name: str, factor: float, n: int) -> None:
    rng = np.random.default_rng(7)
    x = np.concatenate([make(rng, n, 600, np.dtype(name)) for make in (hostile, mild)], axis=1)
    x = np.nan_to_num(x, posinf=1, neginf=2)
    want = []
    for column in x.T.astype(float).tolist():
        total = sum((Fraction(v) for v in column), Fraction(0)) * Fraction(factor)
        want.append(float(rounded(total, name)) if total else 0.0)
    for part in (slice(None), slice(600, None)):  # alone, mild sums go straight to the result
        for isa, step in itertools.product((0, 1, 2), (0, 2)):
            assert (products(x[:, part], factor, isa, step).astype(float) == np.array(want)[part]).all()


@pytest.mark.parametrize("factor", [0.5, 1 / 3, -0.1, 2.0**-130, 2.0**127])
def test_a_factor_of_bfloat16_is_applied_before_the_one_rounding(factor: float) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = mild(np.random.default_rng(8), 3, 2000, np.dtype(np.float32)).astype(bfloat16)
    for isa in (0, 1, 2):
        got = products(x, factor, isa).astype(float).tolist()
        for column, value in zip(x.T.astype(float).tolist(), got, strict=True):
            total = sum((Fraction(v) for v in column), Fraction(0)) * Fraction(factor)
            assert value == (float(rounded(total, "bfloat16")) if total else 0.0)


@pytest.mark.parametrize("n", [2, 9])
def test_a_product_that_is_rounded_to_nearest_on_its_way_is_found(n: int) -> None:
    x = mild(np.random.default_rng(9), n, 2000, np.dtype(np.float32))
    right = products(x, 1 / 3)
    try:
        inside().fault("EXACT_NO_ODD")
        wrong = products(x, 1 / 3)
    finally:
        inside().fault(None)
    assert not same(right, wrong)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("factor", [0.5, 1 / 3])
def test_mild_sums_with_a_factor_take_no_integers(factor: float, n: int) -> None:
    x = mild(np.random.default_rng(10), n, 4000, np.dtype(np.float32))
    before = slow_ones(x, factor)
    assert slow_ones(x, factor) == before
    assert slow_ones(hostile(np.random.default_rng(11), 5, 1500, np.dtype(np.float32)), factor) > before


@pytest.mark.parametrize("fault", ["EXACT_NO_INTEGER_PATH", "EXACT_NO_ODD", "EXACT_NO_RANGE"])
def test_a_planted_fault_is_found(fault: str) -> None:
    x = hostile(np.random.default_rng(11), 5, 1500, np.dtype(np.float32))
    x[:, :3] = np.array(
        [[1, 1 + 2**-23, 1], [2**-24] * 3, [2**-120, -(2**-120), 2**-77], [0, 0, 0], [0, 0, 0]], np.float32
    )
    right = exact(list(x))
    try:
        inside().fault(fault)
        wrong = exact(list(x))
    finally:
        inside().fault(None)
    assert not same(right, wrong)
    assert same(exact(list(x)), right)


def test_a_window_that_is_widened_too_late_is_found() -> None:
    rng = np.random.default_rng(12)
    x = [((1 + rng.random(256)) * 2.0 ** -rng.integers(0, 45, 256)).astype(np.float32) for _ in range(3)]
    right = exact(x)
    assert same(exact(x, step=1), right)
    try:
        inside().fault("WINDOW_NOT_WIDENED")
        wrong = exact(x, step=1)
    finally:
        inside().fault(None)
    assert not same(right, wrong)
