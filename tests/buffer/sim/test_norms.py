"""Norms over the whole range of float64: at most 4 units in the last place off the correctly rounded norm."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from fanin.slots import scale_factors
from kit.sample import sizes

pytestmark = pytest.mark.core

SEED = 20261129
ULPS = 4
LARGEST, LEAST = np.finfo(np.float64).max, 5e-324
SIZES = [1, 2, 15, 16, 17, 511, 512, 513, 1000, (1 << 15) - 1, 1 << 15, (1 << 15) + 1]


def numbers_of(arrays: Iterable[Any]) -> list[float]:
    """All numbers of arrays, two of each complex one."""
    out: list[float] = []
    for x in arrays:
        flat = np.asarray(x).reshape(-1)
        out += [*flat.real.tolist(), *(flat.imag.tolist() if flat.dtype.kind == "c" else [])]
    return out


def exact_norm(arrays: Iterable[Any]) -> float:
    """The norm, rounded once, by whole numbers alone: every float64 is a multiple of 2**-1074."""
    total = 0
    for x, times in Counter(numbers_of(arrays)).items():
        n, d = x.as_integer_ratio()
        total += times * ((n << 1074) // d) ** 2
    # The root of 2**140 times the squares has 70 more bits than it needs; the last one represents the dropped ones.
    root = math.isqrt(total << 140)
    root |= root * root != total << 140
    try:
        return root / (1 << 1144)
    except OverflowError:
        return math.inf


def near(got: float, arrays: Iterable[Any]) -> None:
    right = exact_norm(arrays)
    if math.isinf(right):
        assert got > LARGEST * (1 - 2**-50)  # the norm rounds to inf, or to one of the last numbers before it
    else:
        assert abs(got - right) <= ULPS * math.ulp(right), (got, right)


def anywhere(rng: np.random.Generator, n: int, dtype: str) -> Any:
    """Numbers of one size, of a few, or of all, anywhere in the range of float64."""
    centre, spread = rng.integers(-1074, 1024), rng.choice([1, 40, 600, 2100])
    exponent = np.clip(centre + rng.integers(-spread, spread + 1, (n, 2)), -1074, 1023)
    x = np.ldexp(rng.choice([-1.0, 1.0], (n, 2)) * (1 + rng.random((n, 2)) / 2), exponent)
    x[rng.random((n, 2)) < rng.choice([0, 0.3])] = 0
    return np.ascontiguousarray(x[:, 0]) if dtype == "float64" else x.view(np.complex128)[:, 0]


def measured(*terms: Any, **options: Any) -> Any:
    """Of one slot: its sum, and its statistics."""
    buf = fanin.InputBuffer(1, stats=True, **options)
    for x in terms:
        buf.add(0, x)
    [total] = buf.take()
    return total, buf.stats(0)


@pytest.mark.parametrize("turns", sizes(60, 150))
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_norm_is_right_wherever_its_numbers_lie(dtype: str, turns: int) -> None:
    rng = np.random.default_rng(SEED)
    print("seed", SEED)
    scaled = plain = 0
    for turn in range(turns):
        x = anywhere(rng, int(rng.choice(SIZES[:9])), dtype)
        total, stats = measured(x)
        near(stats.norm, [x])
        scaled += stats.sumsq in (0, math.inf)
        plain += 1e-200 < stats.sumsq < 1e200
        terms = [x * 0.5, x * 0.25, x * 0.25] if turn % 2 else [x, np.zeros_like(x)]
        with np.errstate(all="ignore"):
            total, stats = measured(*terms, budget=(0, None)[turn % 3 > 0])
        near(stats.norm, [total])
    assert scaled > turns // 5 and plain > turns // 30


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e-200 / 3, 1e200 / 3, 1e-310 / 3])
def test_many_equal_numbers_lose_no_more_than_few(size: int, value: float) -> None:
    x = np.full(size, value)
    for terms in ([x], [x, np.zeros(size)]):
        near(measured(*terms)[1].norm, [x])


def bits_of(x: Any, isa: str | None, threads: int, budget: float | None, terms: int) -> tuple[float, float, float]:
    with fanin.set_options(threads=threads) if isa is None else fanin.set_options(threads=threads, isa=isa):
        _, stats = measured(x, *[np.zeros_like(x) for _ in range(terms - 1)], budget=budget)
    return stats.norm, stats.sumsq, stats.absmax


def isas() -> list[str | None]:
    found: list[str | None] = [None]
    for name in ("sse2", "avx2", "avx512", "plain"):
        try:
            with fanin.set_options(isa=name):
                found.append(name)
        except ValueError:
            continue
    return found


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *itertools.product([0.1, 1e200, 1e-200], ["float64", "complex128"]),
        *itertools.product([1.0], ["float32", "float16", "complex64"]),
    ],
)
def test_its_bits_depend_on_nothing_but_the_numbers(dtype: str, size: float) -> None:
    rng = np.random.default_rng(SEED)
    for n in (700, 300_001):
        x = (rng.standard_normal(n) * size + (1j * rng.random(n) * size if dtype[0] == "c" else 0)).astype(dtype)
        ways = itertools.product(isas(), (1, 2, 3, 4), (0, None), (1, 2))
        assert len({bits_of(x, *way) for way in ways}) == 1
        odd = np.empty(n + 1, dtype)[1:]  # not at the begin of a line of the cache
        odd[:] = x
        assert len({measured(y, np.zeros_like(y))[1].norm for y in (x, odd, x[::-1][::-1])}) == 1


def test_of_arrays_in_any_layout() -> None:
    rng = np.random.default_rng(SEED)
    for size in (1e200, 1e-200, 1e-320):
        x = rng.standard_normal((30, 40)) * size
        wide = np.broadcast_to(x[0], (50, 40))
        row = fanin.Sparse("coo", (np.array([[3, 1, 3]]), x[0, :3].copy()), (9,))
        for view in (x, x.T, x[::-1, ::-2], x[:, 3], np.asfortranarray(x)):
            near(measured(view)[1].norm, [view])
            near(measured(view, view)[1].norm, [view + view])
        near(measured(wide)[1].norm, [wide])
        near(measured(wide, wide)[1].norm, [2 * wide])
        total, stats = measured(row, row)
        near(stats.norm, [total.parts[-1]])
        out = np.empty((30, 40))
        buf = fanin.InputBuffer(1, stats=True)
        buf.add(0, x)
        buf.take(out=[out], scale=0.5)
        stats = buf.stats(0)
        assert stats is not None
        near(stats.norm, [out])


def test_it_is_inf_only_where_the_norm_is() -> None:
    for x, norm in (
        ([1e200, 1e200], 1.414213562373095e200),
        ([1e-200, 1e-200], 1.414213562373095e-200),
        ([LARGEST], LARGEST),
        ([LARGEST, LARGEST], math.inf),
        ([complex(LARGEST, LARGEST)], math.inf),
        ([LEAST], LEAST),
        ([LEAST] * 4, 2 * LEAST),
        ([0.0], 0.0),
        ([], 0.0),
        ([math.nan, 3.0, -math.inf, 4.0], 5.0),
        ([1e300, math.inf], 1e300),
        ([3 + 4j, complex(math.inf, 1)], 5.0),
    ):
        array = np.array(x)
        with np.errstate(all="ignore"):
            _, stats = measured(array)
        assert stats.norm == pytest.approx(norm, rel=1e-15, abs=0), x
        buf = fanin.InputBuffer(1, stats=True)
        buf.add(0, array)
        buf.take()
        assert fanin.global_norm(buf) == (math.inf if stats.nonfinite else stats.norm)


def clipped(*arrays: Any, to: float) -> tuple[float, list[Any]]:
    buf = fanin.InputBuffer(len(arrays), stats=True)
    for i, x in enumerate(arrays):
        buf.add(i, x)
    sums = buf.take()
    return fanin.clip_norm(buf, sums, to), sums


def test_the_norms_of_slots_are_combined_in_the_whole_range() -> None:
    rng = np.random.default_rng(SEED)
    huge = inside = 0
    for _ in range(60):
        with np.errstate(all="ignore"):
            arrays = [
                anywhere(rng, int(rng.integers(1, 30)), str(rng.choice(["float64", "complex128"]))) for _ in range(5)
            ]
        norm, sums = clipped(*arrays, to=1.0)
        near(norm, arrays)
        right = exact_norm(arrays)
        huge += right > 1e155 or right < 1e-155
        if 1 < right < math.inf:
            inside += 1
            assert exact_norm(sums) == pytest.approx(1, rel=1e-14)
    assert huge > 10 and inside > 10
    assert clipped(np.array([1e154]), np.array([1e154]), to=1.0)[0] == pytest.approx(math.sqrt(2) * 1e154, rel=1e-15)


@pytest.mark.parametrize(
    ("dtype", "value", "to"),
    [
        ("float32", 3.4e38, 1e-10),
        ("float32", 3.4e38, 1e-37),
        ("complex64", 3e38, 1e-12),
        ("bfloat16", 3e38, 1e-10),
        ("float64", 1.6e300, 1e-10),
        ("float64", 6e307, 1e-300),
        ("complex128", 1.6e300, 1e-100),
    ],
)
def test_a_factor_that_is_subnormal_loses_nothing(dtype: str, value: float, to: float) -> None:
    import ml_dtypes

    array = np.array([value, value / 3, -value / 7, value], getattr(ml_dtypes, dtype, dtype))
    for norm, out in (clipped(array, to=to), clipped(array, array, to=to)):
        digits = {"float64": 1e-15, "complex128": 1e-15, "bfloat16": 1e-2}.get(dtype, 3e-7)
        for x in out:
            factor = Fraction(to) / Fraction(norm)
            want = [float(Fraction(complex(v).real) * factor) for v in array.tolist()]
            assert np.allclose(x.astype(np.complex128), want, rtol=digits, atol=0)


def test_the_factors_of_a_clip_are_one_if_one_is_normal() -> None:
    assert scale_factors("float32", 1.0, 3.0) == [1 / 3]
    assert scale_factors("float64", 0.0, 1e300) == [0.0]
    assert scale_factors("float64", 1e-299, 1e8) == [1e-299 / 1e8]
    assert [len(scale_factors(d, 1e-10, 6.8e38)) for d in ("float32", "float64")] == [2, 1]
    assert len(scale_factors("float64", 1e-300, LARGEST)) == 3


@pytest.mark.parametrize("turns", sizes(20, 40))
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_on_a_simulated_device(dtype: str, turns: int) -> None:
    rng = np.random.default_rng(SEED)
    with Machine() as m:
        on_devices(rng, m.stream, m.array, dtype, turns)


@pytest.mark.parametrize("turns", sizes(20, 40))
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_by_the_kernels_of_a_gpu(driver: Any, dtype: str, turns: int) -> None:
    on_devices(np.random.default_rng(SEED), driver.stream, driver.array, dtype, turns)


def on_devices(
    rng: np.random.Generator, stream: Callable[[], Any], array: Callable[[Any], Any], dtype: str, turns: int
) -> None:
    scaled = 0
    for turn in range(turns):
        x = anywhere(rng, int(rng.integers(1, 3000)), dtype)
        s = stream()
        buf = fanin.InputBuffer(1, stats=True, stream=s)
        for part in ([x], [x, np.zeros_like(x)])[turn % 2]:
            there = array(part)[::2] if turn % 3 == 0 else array(part)
            buf.add(0, there, stream=s)
        buf.take()
        stats = buf.stats(0)
        assert stats is not None
        near(stats.norm, [x[::2] if turn % 3 == 0 else x])
        scaled += stats.sumsq in (0, math.inf)
    assert turns // 8 < scaled < turns
