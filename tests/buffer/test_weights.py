"""Weights of contributions, and means over them (rules W1 to W7), by hand and beside fractions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from kit import c_api, hooks, weighted
from reference.numbers import nearest

pytestmark = pytest.mark.core

BUDGETS = (0, 24, "auto", math.inf)
f32 = np.float32


def fold(terms: list[Any], weights: list[Any], dtype: Any) -> Any:
    """The left fold of products, each rounded."""
    total = None
    for x, w in zip(terms, weights, strict=True):
        term = x.astype(dtype) if w is None else x.astype(dtype) * dtype(w)
        total = term if total is None else total + term
    return total


# W1


@pytest.mark.rule("W1")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("dtype", "acc"), [("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i4", "i4"), ("u1", "u1")])
def test_a_term_is_the_rounded_product(budget: Any, dtype: str, acc: str) -> None:
    """Of every length about the widths of vector units, in and out of the order of keys."""
    rng = np.random.default_rng(3)
    whole = dtype[0] in "iu"
    for n, size in itertools.product((1, 2, 3, 9, 20, 70), (1, 2, 7, 8, 33, 260)):
        terms = [(rng.standard_normal(size) * 20).astype(dtype) for _ in range(n)]
        weights = [float(w) if whole else w for w in (rng.integers(0, 4, n) if whole else rng.standard_normal(n))]
        weights = [None if rng.random() < 0.2 else w for w in weights]
        buf = fanin.InputBuffer(1, budget=budget)
        for i in rng.permutation(n).tolist():
            buf.add(0, terms[i], key=i, weight=weights[i])
        with np.errstate(over="ignore"):
            want = fold(terms, weights, np.dtype(acc).type).astype(dtype)
        assert buf.take()[0].tobytes() == want.tobytes(), (n, size)


@pytest.mark.rule("W1")
def test_a_product_is_not_fused_with_the_addition() -> None:
    """1 + 2**-27 squared loses its last bit when it is rounded, and then cancels."""
    x = f32(1 + 2**-12)
    y = -(x * x)  # rounded
    for size in (1, 5, 16, 100, 5000):
        buf = fanin.InputBuffer(1)
        buf.add(0, np.full(size, y))
        buf.add(0, np.full(size, x), weight=float(x))
        assert not buf.take()[0].any()


@pytest.mark.rule("W1")
def test_a_weight_widens_nothing() -> None:
    for dtype in ("f2", "f4", "c8", "i2", ml_dtypes.bfloat16):
        x = np.ones(3, dtype)
        for w in (2, 3.0):
            buf = fanin.InputBuffer(1)
            buf.add(0, x, weight=w)
            assert buf.take()[0].dtype == x.dtype


@pytest.mark.rule("W1")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("weight", [None, 1, 1.0, np.float64(1)])
def test_a_lone_contribution_of_weight_one_is_handed_through(weight: Any, budget: Any) -> None:
    x = np.ones(3, f32)
    for key in (None, 0):
        buf = fanin.InputBuffer(1, budget=budget)
        buf.add(0, x, key=key, weight=weight)
        assert buf.take()[0] is x


@pytest.mark.rule("W1")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_lone_contribution_with_a_weight_is_not_written(budget: Any) -> None:
    x = np.ones(3, f32)
    buf = fanin.InputBuffer(1, budget=budget)
    buf.add(0, x, weight=2)
    (y,) = buf.take()
    assert y.tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


@pytest.mark.rule("W1")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_running_sum_is_not_multiplied_again(budget: Any) -> None:
    """What comes later, by add or into a target, is added to the products."""
    buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="f4")], budget=budget)
    buf.add(0, np.full(2, 3, f32), weight=2)
    with buf.target(0) as out:
        out += 10
    buf.add(0, np.ones(2, f32))
    buf.add(0, np.ones(2, f32), weight=-1)
    assert buf[0].tolist() == [16, 16]
    assert buf.take()[0].tolist() == [16, 16]


@pytest.mark.rule("W1")
def test_a_real_weight_multiplies_both_parts() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, np.array([complex(math.inf, 1)]), weight=2.0)
    assert buf.take()[0].tolist() == [complex(math.inf, 2)]
    buf.add(0, np.array([1 + 2j]), weight=1j)
    assert buf.take()[0].tolist() == [-2 + 1j]


# W2


def drawn(draw: random.Random, dtype: Any) -> float:
    """A number of a dtype, anywhere in its range."""
    info = ml_dtypes.finfo(dtype)
    most = math.log2(float(info.max)) - 0.1
    least = info.minexp - info.nmant
    exponent = draw.uniform(-3, 3) if draw.random() < 0.5 else draw.uniform(least, most)
    number = 0.0 if draw.random() < 0.08 else math.ldexp(draw.uniform(0.5, 1), math.floor(exponent))
    return float(dtype(draw.choice([-1, 1]) * number))


def drawn_weight(draw: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: draw.randrange(5000),
        lambda: draw.uniform(-2, 2),
        lambda: draw.choice([-1, 1]) * math.ldexp(draw.uniform(0.5, 1), draw.randrange(-1073, 1020)),
        lambda: None,
    ]
    return draw.choice(kinds)()


def exact_means(seeds: range) -> None:
    formats = {np.float64: "float64", np.float32: "float32", np.float16: "float16", ml_dtypes.bfloat16: "bfloat16"}
    checked = 0
    for seed in seeds:
        draw = random.Random(seed)
        dtype = draw.choice(list(formats))
        n = draw.randrange(1, 9)
        numbers, weights = [drawn(draw, dtype) for _ in range(n)], [drawn_weight(draw) for _ in range(n)]
        mean, scale = draw.random() < 0.7, draw.choice([None, None, 0.3, -2.0])
        buf = fanin.InputBuffer(1, accumulate="exact", budget=draw.choice(BUDGETS))
        for i in draw.sample(range(n), n):
            buf.add(0, np.full(3, numbers[i], dtype), weight=weights[i])
        exact = [Fraction(1 if w is None else w) for w in weights]
        divisor = sum(exact, Fraction(0))
        if mean and not divisor:
            with pytest.raises(ZeroDivisionError):
                buf.take(mean=True)
            continue
        if mean and abs(divisor) >= 2**1023:
            continue
        total = sum((w * Fraction(x) for w, x in zip(exact, numbers, strict=True)), Fraction(0))
        total = (total / divisor if mean else total) * Fraction(1 if scale is None else scale)
        got = buf.take(mean=mean, scale=scale)[0]
        assert got.tolist() == [nearest(total, formats[dtype])] * 3, seed
        checked += 1
    assert checked > 0.8 * len(seeds)


@pytest.mark.rule("W2", "W3")
def test_an_exact_weighted_mean_is_the_fraction_rounded_once() -> None:
    exact_means(range(700))


def test_a_divisor_that_is_rounded_early_is_found() -> None:
    hooks.fault("DIVISOR_ROUNDED_EARLY")
    try:
        with pytest.raises(AssertionError):
            exact_means(range(100))
    finally:
        hooks.fault(None)


@pytest.mark.slow
@pytest.mark.rule("W2", "W3")
def test_ten_thousand_exact_weighted_means_are_the_fractions_rounded_once() -> None:
    exact_means(range(1000, 11_000))


def real_and_imaginary(x: Any) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(float(z.real)), Fraction(float(z.imag))) for z in x.tolist()]


@pytest.mark.rule("W2", "W3")
@pytest.mark.parametrize(("dtype", "part"), [("complex64", "float32"), ("complex128", "float64")])
@pytest.mark.parametrize("scale", [None, 0.1, -3.0, 2.5 - 0.75j])
def test_an_exact_complex_sum_with_complex_weights_is_that_of_fractions(dtype: str, part: str, scale: Any) -> None:
    """A complex scale multiplies the sum as float64 has it; a real one is exact, too. 150 numbers are several tiles."""
    rng = np.random.default_rng(7)
    for n, mean in itertools.product((1, 3, 5), (False, True)):
        size = 150 if n == 3 else 3
        terms, weights = [], []
        for k in range(n):
            numbers = rng.standard_normal(2 * size) * 10.0 ** rng.integers(-12, 12, 2 * size)
            terms.append(numbers.astype(part).view(dtype))
            weights.append(complex(rng.uniform(-2, 2), rng.uniform(-2, 2) if k % 2 == 0 else 0.0))
        if mean:  # their sum is real
            weights[0] = complex(weights[0].real, -sum(w.imag for w in weights[1:]))
        divisor = sum((Fraction(w.real) for w in weights), Fraction(0)) if mean else Fraction(1)
        assert not mean or sum((Fraction(w.imag) for w in weights), Fraction(0)) == 0
        buf = fanin.InputBuffer([fanin.Slot(shape=size, dtype=dtype, accumulate="exact")])
        for x, w in zip(terms, weights, strict=True):
            buf.add(0, x, weight=w)
        [got] = buf.take(mean=mean, scale=scale)
        each = [real_and_imaginary(x) for x in terms]
        expected = []
        for i in range(size):
            re = im = Fraction(0)
            for numbers_of, w in zip(each, weights, strict=True):
                x, y = numbers_of[i]
                u, v = Fraction(w.real), Fraction(w.imag)
                re, im = re + x * u - y * v, im + x * v + y * u
            re, im = re / divisor, im / divisor
            if isinstance(scale, complex):
                a, b = weighted.nearest(re, "float64"), weighted.nearest(im, "float64")
                turned = (a * scale.real - b * scale.imag, a * scale.imag + b * scale.real)
                expected += [weighted.nearest(Fraction(z), part) for z in turned]
            else:
                by = Fraction(1 if scale is None else scale)
                expected += [weighted.nearest(z * by, part) for z in (re, im)]
        assert got.view(part).astype("f8").tolist() == expected, (n, mean, weights)


@pytest.mark.rule("W4")
@pytest.mark.parametrize(("number", "words"), [(1e39, "not finite in float32"), (1e-42, "below the smallest normal")])
def test_a_weight_of_a_python_number_must_fit_the_dtype_that_arrays_give_the_sum(number: float, words: str) -> None:
    """The number alone sums in float64, in which the weight fits."""
    buf = fanin.InputBuffer(1, budget=math.inf)
    buf.add(0, 2.0, weight=number)
    assert buf.take() == [2.0 * number]
    buf.add(0, 2.0, key=1, weight=number)
    buf.add(0, np.ones((), f32), key=0)
    with pytest.raises(ValueError, match=rf"key 1: weight=\S+ is {words}"):
        buf.take()
    buf.clear()


@pytest.mark.rule("W1", "W4")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("number", [1e39, -1e39, 1e-42])
def test_a_weight_of_a_python_number_has_one_answer_whatever_the_order_of_arrival(number: float, budget: Any) -> None:
    """First by key, its product is made in float64, and is rounded where float32 comes; later it is refused."""

    def answer(arrival: tuple[int, ...], first: int, way: str) -> str:
        terms: list[tuple[Any, float | None]] = [(np.ones((), f32), None), (np.full((), 3, f32), 2.0)]
        terms.insert(first, (2.0, number))
        given = [terms[k] for k in arrival]
        buf = fanin.InputBuffer(1, budget=budget)
        try:
            if way == "add":
                for k, (x, w) in zip(arrival, given, strict=True):
                    buf.add(0, x, key=k, weight=w)
            else:
                buf.add_many([0] * 3, [x for x, _ in given], keys=list(arrival), weights=[w for _, w in given])
            return repr(buf.take())
        except ValueError as e:
            assert "key 1: weight=" in str(e) and "(W4)" in str(e)
            return "refused"
        finally:
            buf.clear()

    arrivals = list(itertools.permutations(range(3)))
    for way, first in itertools.product(("add", "add_many"), (0, 1)):
        with np.errstate(over="ignore", under="ignore"):
            found = {answer(one, first, way) for one in arrivals}
        assert len(found) == 1 and (found == {"refused"}) == (first == 1), (way, first, found)


@pytest.mark.rule("W2", "W3")
def test_an_exact_mean_keeps_the_lowest_bit_of_a_product() -> None:
    """The product of the two smallest numbers, over one of them."""
    least = 5e-324
    buf = fanin.InputBuffer(1, accumulate="exact")
    for numbers, weights, expected in (
        ([least], [least], least),
        ([3 * least, -least], [least, least], least),
        ([1e308, least], [1e308, least], 1e308),
    ):
        for x, w in zip(numbers, weights, strict=True):
            buf.add(0, np.array([x]), weight=w)
        assert buf.take(mean=True)[0].tolist() == [expected]


@pytest.mark.rule("W2")
@pytest.mark.parametrize("budget", [0, math.inf])
def test_an_exact_product_beside_a_sparse_gradient_is_not_rounded(budget: Any) -> None:
    """1e200 * w + 1e200, where the rounded product gives another sum."""
    x, w = np.array([1e200]), 1 / 3
    expected = float(Fraction(1e200) * Fraction(w) + Fraction(1e200))
    assert expected != 1e200 * w + 1e200
    none = fanin.Sparse("coo", (np.zeros((1, 0), np.int64), np.zeros(0)), (1,))
    for order in itertools.permutations([(x, w), (x, None), (none, None)]):
        buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
        for g, weight in order:
            buf.add(0, g, weight=weight)
        assert buf.take()[0].tolist() == [expected]


@pytest.mark.rule("W2")
def test_an_exact_product_with_a_scale_rounds_halves_to_even() -> None:
    for tie, expected in ((1 + Fraction(1, 2**24), 1.0), (1 + Fraction(3, 2**24), 1 + 2.0**-22)):
        buf = fanin.InputBuffer([fanin.Slot(shape=1, dtype="float32", accumulate="exact")])
        rest = float(tie - 1)
        for factor, weight in ((0.5, 2), (0.25, 4), (2.0, 0.5)):
            buf.add(0, np.float32([1]), weight=weight)
            buf.add(0, np.float32([rest]), weight=weight)
            assert buf.take(scale=factor)[0].tolist() == [expected], (factor, weight)


@pytest.mark.rule("W2")
def test_an_exact_sum_has_infinities_and_zeros_of_its_products() -> None:
    def taken(*pairs: tuple[float, Any], mean: bool = False) -> float:
        buf = fanin.InputBuffer(1, accumulate="exact")
        for x, w in pairs:
            buf.add(0, np.array([x]), weight=w)
        return float(buf.take(mean=mean)[0][0])

    assert math.isnan(taken((math.inf, 0), (1, 2)))
    assert taken((math.inf, -2), (1, 2)) == -math.inf
    assert math.isnan(taken((math.inf, 1), (math.inf, -1)))
    assert taken((math.inf, 2), (1, -3), mean=True) == -math.inf
    assert math.copysign(1, taken((-0.0, 2), (0.0, -1))) == -1
    assert math.copysign(1, taken((-0.0, 2), (0.0, 1))) == 1
    assert math.copysign(1, taken((-0.0, 2), mean=True)) == -1


@pytest.mark.rule("W2")
def test_an_exact_mean_does_not_depend_on_how_it_is_cut() -> None:
    """Micro-batches of any sizes and in any order: the mean over their tokens has one value."""
    rng = np.random.default_rng(5)
    tokens = (rng.standard_normal((40, 6)) * 10.0 ** rng.integers(-9, 9, (40, 6))).astype(f32)
    whole = fanin.add_n(list(tokens), accumulate="exact", mean=True)
    buf = fanin.InputBuffer([fanin.Slot(accumulate="exact")])
    for row in rng.permutation(40):
        buf.add(0, tokens[row] * f32(0.5), weight=2)
        buf.add(0, None, weight=-1)
    assert buf.take(mean=True)[0].tobytes() == whole.tobytes()


# W3


@pytest.mark.rule("W3")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_divisor_counts_every_contribution(budget: Any) -> None:
    """Undefined ones, symbolic zeros, and those without a weight."""
    for keyed in (False, True):
        buf = fanin.InputBuffer(1, budget=budget)
        given = [(np.full(2, 6.0), 2), (None, 3), (fanin.Zero((2,), "f8"), 4), (np.full(2, 8.0), None), (None, None)]
        for i, (x, w) in enumerate(given):
            buf.add(0, x, key=i if keyed else None, weight=w)
        assert buf.take(mean=True)[0].tolist() == [20 / 11, 20 / 11]


@pytest.mark.rule("W3")
def test_the_divisor_is_exact_and_rounded_once() -> None:
    """Two float64 whose sum float64 rounds to a tie of float32, which the exact sum is above of."""
    weights = [1 + 2**-24, 2**-60]
    buf = fanin.InputBuffer(1)
    for w in weights:
        buf.add(0, f32([0]), weight=w)
    buf.add(0, f32([1]), weight=1)
    divisor = nearest(sum(map(Fraction, weights), Fraction(1)), "float32")
    assert buf.take(mean=True)[0].tolist() == [f32(1) / f32(divisor)]


@pytest.mark.rule("W3")
def test_a_divisor_that_the_dtype_does_not_hold_is_divided_by_in_float64() -> None:
    """With accumulate="f2", 100,000 tokens are more than float16 has."""
    buf = fanin.InputBuffer(1, accumulate="f2")
    for _ in range(2):
        buf.add(0, np.float16([30000]), weight=1)
    buf.add(0, None, weight=100_000)
    assert buf.take(mean=True)[0].tolist() == [np.float16(np.float64(60000) / 100_002)]


@pytest.mark.rule("W3")
def test_a_mean_is_divided_before_it_is_scaled_and_rounded() -> None:
    buf = fanin.InputBuffer(1)
    for x in (60000, 60000):
        buf.add(0, np.float16([x]), weight=3)
    assert buf.take(mean=True, scale=0.5)[0].tolist() == [np.float16(30000)]


@pytest.mark.rule("W3")
@pytest.mark.parametrize("exact", [None, "exact"])
def test_a_divisor_of_zero_loses_nothing(exact: Any) -> None:
    buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot(name="w1", accumulate=exact)])
    buf.add(0, np.ones(2))
    buf.add(1, np.ones(2), weight=2)
    buf.add(1, np.ones(2), weight=-2.0)
    with pytest.raises(ZeroDivisionError, match=r"slot 1 \(w1\)"):
        buf.take(mean=True)
    assert [x.tolist() for x in buf.take()] == [[1, 1], [0, 0]]


@pytest.mark.rule("W3")
def test_what_is_undefined_has_no_mean_and_a_zero_stays_one() -> None:
    buf = fanin.InputBuffer(3)
    buf.add(1, None, weight=0)
    buf.add(2, fanin.Zero((2,), "f4"), weight=2)
    none, undefined, zero = buf.take(mean=True)
    assert none is None and undefined is None and isinstance(zero, fanin.Zero)


@pytest.mark.rule("W3")
def test_the_next_pass_has_weights_of_its_own() -> None:
    buf = fanin.InputBuffer(1)
    for end in (buf.take, buf.clear, lambda: buf.take(mean=True)):
        buf.add(0, np.ones(2), weight=5)
        buf.add(0, np.ones(2), weight=3)
        end()  # type: ignore[operator]
        buf.add(0, np.full(2, 7.0))
        buf.add(0, np.full(2, 9.0))
        assert buf.take(mean=True)[0].tolist() == [8, 8]


@pytest.mark.rule("W3")
def test_an_add_that_fails_leaves_no_weight() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, np.full(2, 3.0), key=0, weight=2)
    for bad in (lambda: buf.add(0, np.ones(3), key=1, weight=9), lambda: buf.add(0, np.ones(2), key=0, weight=9)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(ValueError):
        buf.add_many([0, 0], [np.ones(2), np.ones(3)], keys=[1, 2], weights=[4, 5])
    assert buf.take(mean=True)[0].tolist() == [3, 3]


# W4


@pytest.mark.rule("W4")
@pytest.mark.parametrize(
    ("weight", "error", "word"),
    [
        (math.nan, ValueError, "finite"),
        (math.inf, ValueError, "finite"),
        (complex(0, math.inf), ValueError, "finite"),
        (True, ValueError, "bool"),
        (np.True_, ValueError, "bool"),
        (2**53 + 1, ValueError, "exactly"),
        (np.int64(2**53 + 1), ValueError, "exactly"),
        (np.uint64(2**64 - 1), ValueError, "exactly"),
        (10**400, ValueError, "more than a float"),
        (1e39, ValueError, "not finite in float32"),
        (1e-42, ValueError, "weight=1e-42 is below the smallest normal number of float32"),
        (-1e-50, ValueError, "weight=-1e-50 is below the smallest normal number of float32"),
        (1j, ValueError, "real weight"),
        ("2", TypeError, "expected a number"),
        (np.ones(2), TypeError, "expected a number"),
        (np.ones(()), TypeError, "expected a number"),
        (Fraction(1, 2), TypeError, "expected a number"),
    ],
)
def test_weights_that_are_refused(weight: Any, error: type[Exception], word: str) -> None:
    buf = fanin.InputBuffer(1, name="grads")
    x = np.ones(2, f32)
    calls: list[Callable[[], Any]] = [
        lambda: buf.add(0, x, weight=weight),
        lambda: buf.add_many([0], [x], weights=[weight]),
        lambda: fanin.add_n([x], weights=[weight]),
    ]
    for call in calls:
        with pytest.raises(error, match=word):
            call()
    with pytest.raises(error, match=r"grads: slot 0"):
        calls[0]()
    assert buf.take() == [None]


@pytest.mark.rule("W4")
def test_integers_take_integers() -> None:
    buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot(dtype="f4")])
    for x in (np.ones(2, "i4"), np.ones(2, bool)):
        for w in (0.5, 2.0**70):
            with pytest.raises(ValueError, match="takes an integer"):
                buf.add(0, x, weight=w)
    for x in (3, True):
        with pytest.raises(TypeError, match="takes no weight"):
            buf.add(0, x, weight=2)
    buf.add(0, np.full(2, 100, "i1"), weight=3)  # it wraps, as the sum does
    buf.add(1, 3, weight=0.5)  # of a slot of floats
    wrapped, number = buf.take()
    assert wrapped.tolist() == [44, 44] and number == 1.5
    buf.add(0, np.ones(2, "i4"))
    with pytest.raises(ValueError, match="mean of dtype int32"):
        buf.take(mean=True)
    assert buf.take()[0].tolist() == [1, 1]


@pytest.mark.rule("W4")
def test_a_weight_of_zero_is_a_weight() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, np.array([math.inf, 1]), weight=0)
    got = buf.take()[0].tolist()
    assert math.isnan(got[0]) and got[1] == 0


@pytest.mark.rule("W4")
def test_an_exact_slot_takes_weights_of_dense_gradients() -> None:
    buf = fanin.InputBuffer(1, accumulate="exact")
    with pytest.raises(TypeError, match="dense gradients alone"):
        buf.add(0, sp.csr_array(np.eye(2)), weight=2)
    buf.add(0, sp.csr_array(np.eye(2)))
    buf.add(0, np.ones((2, 2)), weight=0.5)
    with pytest.raises(TypeError, match="dense gradients alone"):
        buf.take(mean=True)
    assert buf.take()[0].tolist() == [[1.5, 0.5], [0.5, 1.5]]


@pytest.mark.rule("W4")
def test_a_mean_needs_a_real_divisor() -> None:
    buf = fanin.InputBuffer(1)
    buf.add(0, np.array([1j]), weight=1j)
    with pytest.raises(ValueError, match="imaginary part"):
        buf.take(mean=True)
    buf.add(0, np.array([1j]), weight=2 - 1j)
    assert buf.take(mean=True)[0].tolist() == [complex(0, 1)]


# W5


@pytest.mark.rule("W5")
@pytest.mark.parametrize("mean", [False, True])
def test_late_weights_give_what_early_ones_give(mean: bool) -> None:
    rng = np.random.default_rng(8)
    for n in (1, 2, 5):
        terms = [rng.standard_normal(5).astype(f32) for _ in range(n)]
        weights = rng.uniform(0.1, 2, n).tolist()
        early, late, unkeyed = (fanin.InputBuffer(1, budget=math.inf) for _ in range(3))
        for i in rng.permutation(n).tolist():
            early.add(0, terms[i], key=i, weight=weights[i])
            late.add(0, terms[i], key=i)
        for x in terms:
            unkeyed.add(0, x)
        want = early.take(mean=mean)[0].tobytes()
        assert late.take(mean=mean, weights=dict(enumerate(weights)))[0].tobytes() == want
        assert unkeyed.take(mean=mean, weights=weights, slot=0).tobytes() == want


@pytest.mark.rule("W5")
def test_what_late_weights_lack_is_named() -> None:
    def buffer(budget: Any = math.inf) -> fanin.InputBuffer:
        buf = fanin.InputBuffer(1, budget=budget, name="grads")
        for key in range(3):
            buf.add(0, np.ones(2), key=key)
        return buf

    wrong: list[tuple[Any, dict[Any, Any], str]] = [
        (math.inf, {0: 1, 1: 1}, "no weight for key 2"),
        (math.inf, {0: 1, 1: 1, 2: 1, 7: 1}, "has key 7, with which nothing was added"),
        (0, {0: 1, 1: 1, 2: 1}, r"key 0 was summed already: make the buffer with budget=math.inf"),
        (math.inf, {0: 1, 1: True, 2: 1}, "bool"),
        (math.inf, {-1: 1}, "key"),
    ]
    for budget, weights, word in wrong:
        buf = buffer(budget)
        with pytest.raises(ValueError, match=word):
            buf.take(weights=weights)
        assert buf.take()[0].tolist() == [3, 3], "nothing is lost"
    with pytest.raises(TypeError, match="a dict from keys"):
        buffer().take(weights=3)  # type: ignore[call-overload]
    buf = buffer()
    buf.add(0, np.ones(2), key=3, weight=4)
    with pytest.raises(ValueError, match="key 3 has a weight in weights=, and came with one"):
        buf.take(weights=dict.fromkeys(range(4), 1))
    assert buf.take(weights={0: 1, 1: 2, 2: 3})[0].tolist() == [10, 10]


@pytest.mark.rule("W5")
def test_late_weights_count_a_none_with_a_key_and_refuse_one_without() -> None:
    buf = fanin.InputBuffer(1, budget=math.inf)
    buf.add(0, np.full(2, 6.0), key=0)
    buf.add(0, None, key=1)
    assert buf.take(weights={0: 1, 1: 2}, mean=True)[0].tolist() == [2, 2]
    buf.add(0, None)
    buf.add(0, np.ones(2))
    with pytest.raises(ValueError, match="None came without a key"):
        buf.take(weights=[1, 1])


@pytest.mark.rule("W5")
def test_a_list_of_late_weights_is_for_slots_without_keys() -> None:
    """By place of arrival, a list could be meant for other contributions than those that the keys name."""
    buf = fanin.InputBuffer(1, budget=math.inf)
    for key, x in ((1, 1.0), (0, 5.0)):
        buf.add(0, np.array([x]), key=key)
    for weights in ([3, 1], (3, 1), []):
        with pytest.raises(ValueError, match="a list, and the contributions have keys: give a dict"):
            buf.take(weights=weights, mean=True)
    assert buf.take(weights={1: 3, 0: 1}, mean=True)[0].tolist() == [2]
    for x in (1.0, 5.0):
        buf.add(0, np.array([x]))
    with pytest.raises(ValueError, match="has 3 weights, and nothing was added at place 2"):
        buf.take(weights=[3, 1, 2])
    assert buf.take(weights=[3, 1], mean=True)[0].tolist() == [2]


@pytest.mark.rule("W5")
def test_a_take_that_fails_leaves_late_weights_to_the_next() -> None:
    """The sum of a slot is not kept with weights when another slot fails."""
    buf = fanin.InputBuffer(2, budget=math.inf)
    for slot, key in itertools.product(range(2), range(2)):
        buf.add(slot, np.ones(2, "i4" if slot else "f8"), key=key, donate=True)
    with pytest.raises(ValueError):
        buf.take(weights={0: 2, 1: 0.5})
    first, second = buf.take(weights={0: 2, 1: 3})
    assert first.tolist() == [5, 5] and second.tolist() == [5, 5]


# W6


@pytest.mark.rule("W6")
@pytest.mark.parametrize("budget", BUDGETS)
def test_statistics_are_of_the_products(budget: Any) -> None:
    buf = fanin.InputBuffer(1, stats=True, budget=budget)
    buf.add(0, f32([3, 0]), key=0, weight=2)
    buf.add(0, f32([0, 3e38]), key=1, weight=4)  # more than float32 has
    buf.add(0, f32([0, 1]), key=2)
    buf.take()
    stats = buf.stats(0)
    assert stats is not None
    assert (stats.absmax, stats.nonfinite, stats.first_bad_key) == (6, 1, 1)
    buf.add(0, f32([3, 4]), weight=2)
    assert fanin.add_n([f32([3, 4])], weights=[2], stats=True)[1].norm == 10  # type: ignore[index]


# W7


class Thing:
    """An object with operators of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Thing) -> Thing:
        return Thing(f"({self.text} + {other.text})")

    def __mul__(self, weight: object) -> Thing:
        return Thing(f"{self.text} * {weight!r}")

    def __truediv__(self, divisor: object) -> Thing:
        return Thing(f"{self.text} / {divisor!r}")


@pytest.mark.rule("W7")
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_object_is_multiplied_by_its_own_operator(budget: Any) -> None:
    buf = fanin.InputBuffer(1, budget=budget)
    buf.add(0, Thing("a"), weight=2)
    buf.add(0, Thing("b"))
    buf.add(0, Thing("c"), weight=0.5)
    assert buf.take(mean=True)[0].text == "((a * 2 + b) + c * 0.5) / 3.5"
    buf.add(0, Thing("a"), weight=2.0)
    assert buf.take()[0].text == "a * 2.0"


@pytest.mark.rule("W7")
def test_a_product_that_raises_loses_nothing() -> None:
    class Raises(Thing):
        def __mul__(self, weight: object) -> Thing:
            raise OSError("no product")

    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, Thing("a"), key=0)
    with pytest.raises(OSError, match="no product"):
        buf.add(0, Raises("b"), key=1, weight=2)
    assert buf.take()[0].text == "a"
    buf = fanin.InputBuffer(1, budget=math.inf)
    buf.add(0, Thing("a"), key=0)
    buf.add(0, Raises("b"), key=1, weight=2)
    for _ in range(2):
        with pytest.raises(OSError, match="no product"):
            buf.take()
    assert "2 contributions" in repr(buf) or buf.explain(0)


@pytest.mark.rule("W7")
def test_a_pass_that_records_itself_multiplies_by_the_arrays_own_operator() -> None:
    buf = fanin.InputBuffer(1, create_graph=True)
    buf.add(0, np.ones(2), weight=3)
    buf.add(0, np.ones(2))
    assert buf.take(mean=True)[0].tolist() == [1, 1]
    buf.add(0, fanin.Sparse("coo", (np.array([[0]]), np.ones(1)), (2,)), weight=3)
    with pytest.raises(TypeError, match=r"fanin.Sparse has none"):
        buf.take()


@pytest.mark.rule("W7")
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr"])
def test_a_sparse_gradient_is_multiplied_in_its_numbers(format: str) -> None:
    x = sp.random_array((4, 6), density=0.4, format=format, rng=np.random.default_rng(4), dtype=f32)
    buf = fanin.InputBuffer(1)
    buf.add(0, x, weight=2)
    y = buf.take()[0]
    assert y.format == format and (y.toarray() == 2 * x.toarray()).all()
    buf.add(0, x, weight=2)
    buf.add(0, x)
    assert np.allclose(buf.take(mean=True)[0].toarray(), x.toarray())
    buf.add(0, x, weight=2)
    buf.add(0, np.ones((4, 6), f32), weight=3)
    assert (buf.take()[0] == 2 * x.toarray() + f32(3)).all()


@pytest.mark.rule("W7")
def test_donated_memory_is_written_by_the_product() -> None:
    x = np.ones(100_000)
    buf = fanin.InputBuffer(1, budget=0)
    at = x.ctypes.data
    buf.add(0, x, weight=2, donate=True)
    buf.add(0, np.ones(100_000), weight=3)
    (y,) = buf.take()
    assert y.ctypes.data == at and (y == 5).all()


@pytest.mark.rule("W7")
def test_an_expanded_gradient_stays_expanded() -> None:
    buf = fanin.InputBuffer(1)
    for w in (2, 3):
        buf.add(0, np.broadcast_to(np.ones((3, 1)), (3, 4000)), weight=w)
    (y,) = buf.take()
    assert y.strides[1] == 0 and (y == 5).all()


# The C API


@pytest.mark.rule("W1", "W3", "W5")
def test_c_has_weights_and_means() -> None:
    x = [np.full(3, k + 1.0) for k in range(3)]
    buf = c_api.Buffer(1, budget=c_api.FUSED)
    for key in range(3):
        buf.add(0, x[key], key=key, weight=[2, 3, 5][key])
    assert buf.take(mean=True)[0].tolist() == [2.3] * 3
    buf.add_many([0] * 3, x, keys=[0, 1, 2])
    assert buf.take(mean=True, weights={2: 5, 0: 2, 1: 3})[0].tolist() == [2.3] * 3
    buf.add(0, x[0], weight=-1)
    buf.add(0, x[0])
    for how, status in (({"mean": True}, c_api.ZERO_DIVISION), ({"weights": {0: 1, 1: 1}}, c_api.VALUE)):
        with pytest.raises(c_api.Failed) as e:
            buf.take(**how)
        assert e.value.status == status
    with pytest.raises(c_api.Failed, match="finite"):
        buf.add(0, x[0], weight=math.nan)
    assert buf.take()[0].tolist() == [0, 0, 0]


@pytest.mark.rule("W1")
def test_structs_of_c_without_weights_are_taken() -> None:
    """As an extension has them that was built before there were any."""
    buf = c_api.Buffer(1)
    o = c_api.AddOptions(struct_size=32, flags=c_api.KEY, key=0)
    c_api.call("buffer_add", buf.at, 0, c_api.ct.byref(c_api.view(np.ones(2))), c_api.ct.byref(o))
    take = c_api.TakeOptions(struct_size=48)
    sums = (c_api.Value * 1)()
    c_api.call("buffer_take", buf.at, c_api.ct.byref(take), sums, 1)
    assert c_api.dropped(sums[0]).tolist() == [1, 1]


# A target with a weight


@pytest.mark.rule("W1", "W7")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_added_into_a_target_is_a_term_with_its_weight(dtype: str, budget: Any) -> None:
    rng = np.random.default_rng(21)
    terms = [rng.standard_normal(5).astype(dtype) for _ in range(4)]
    weights = [3, None, 0.1, -2.5]
    buf = fanin.InputBuffer([fanin.Slot(shape=5, dtype=dtype)], budget=budget)
    for k, (x, w) in enumerate(zip(terms, weights, strict=True)):
        if k == 3:
            buf.add(0, x, weight=w)
            continue
        with buf.target(0, weight=w) as out:
            assert out.dtype == f32
            out += x.astype(f32)
    assert np.array_equal(buf.take(slot=0), fold(terms, weights, f32).astype(dtype))


@pytest.mark.rule("W2", "W3")
def test_targets_with_weights_have_exact_sums_and_means() -> None:
    x, weights = f32(0.1), [1 / 3, 0.7, 2.0]
    buf = fanin.InputBuffer([fanin.Slot(shape=1, dtype="float32", accumulate="exact")])
    for w in weights:
        with buf.target(0, weight=w) as out:
            out += x
    exact = sum(Fraction(w) * Fraction(float(x)) for w in weights) / sum(map(Fraction, weights))
    assert buf.take(slot=0, mean=True)[0] == f32(float(exact)) == x


@pytest.mark.rule("W4")
@pytest.mark.parametrize(
    ("dtype", "accumulate", "number", "fits"),
    [
        ("float32", None, 2.0**-126, True),
        ("float32", None, 2.0**-149, True),
        ("float32", None, 3 * 2.0**-149, True),
        ("float32", None, 2.0**-150, False),
        ("float32", None, 2.0**-126 * (1 - 2.0**-24), False),
        ("float32", None, -(2.0**-127) * (1 + 2.0**-23), False),
        ("float32", "float64", 1e-42, True),
        ("float32", "exact", 5e-324, True),
        ("float64", None, 5e-324, True),
        ("float16", None, 1e-6, True),
        ("float16", "float16", 1e-6, False),
        ("float16", "float16", 2.0**-24, True),
        ("bfloat16", "bfloat16", 1e-39, False),
        ("bfloat16", "bfloat16", 1e-3, True),
        ("complex64", None, 1e-42, False),
        ("complex64", None, 1 + 1e-42j, False),
        ("complex64", None, 1e-42 + 1j, False),
        ("complex128", None, 1 + 1e-42j, True),
    ],
)
def test_a_weight_keeps_its_digits_or_is_refused(dtype: str, accumulate: Any, number: complex, fits: bool) -> None:
    """By each way in: a small gradient, a large one, a batch, add_n, and weights at the take."""
    made = weighted.dtype_of(dtype)
    message = r"weight=-?\d\S* is below the smallest normal number of \w+, in which the slot sums"
    for size, late in itertools.product((1, 40_000), (False, True)):
        g = np.ones(size, "f4").astype(made)
        buf = fanin.InputBuffer([fanin.Slot(shape=size, dtype=dtype, accumulate=accumulate)], budget=math.inf)
        ways: list[Any] = [
            lambda g=g, buf=buf: buf.add(0, g, weight=number),
            lambda g=g, buf=buf: buf.add_many([0], [g], weights=[number]),
            lambda g=g: fanin.add_n([g], weights=[number], accumulate=accumulate),
        ]
        if late:
            buf.add(0, g)
            ways = [lambda buf=buf: buf.take(weights=[number])]
        for way in ways:
            if fits:
                way()
            else:
                with pytest.raises(ValueError, match=message):
                    way()
        if not fits:
            assert buf.take(slot=0) is None if not late else buf.take(slot=0) is g


@pytest.mark.rule("W4")
def test_a_target_takes_the_weights_that_add_takes_and_a_body_that_raises_counts_nothing() -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=2, dtype="float32")], budget=0)
    buf.add(0, np.ones(2, f32))
    for bad, kind in (
        (math.nan, ValueError),
        (True, ValueError),
        ("3", TypeError),
        (1j, ValueError),
        (1e39, ValueError),
        (1e-42, ValueError),
    ):
        with pytest.raises(kind), buf.target(0, weight=bad) as out:
            out += 1
    with pytest.raises(ArithmeticError), buf.target(0, weight=3) as out:
        out += 1
        raise ArithmeticError
    with buf.target(0, weight=3) as out:
        out += 5
    assert buf.take(slot=0, mean=True).tolist() == [4, 4]
