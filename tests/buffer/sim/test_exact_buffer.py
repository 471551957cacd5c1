"""accumulate="exact" in a buffer: sums of real numbers, rounded once, for every order, budget and choice of keys."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine

pytestmark = pytest.mark.core


def rounded(terms: list[float], dtype: Any) -> Any:
    """The sum of real numbers to nearest even in float32 or float16: found among the neighbours of a first guess."""
    real = sum((Fraction(float(t)) for t in terms), Fraction(0))
    guess = np.dtype(dtype).type(float(real))
    around = [
        np.nextafter(guess, np.dtype(dtype).type(-np.inf)),
        guess,
        np.nextafter(guess, np.dtype(dtype).type(np.inf)),
    ]
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return min(
        (a for a in around if np.isfinite(a)),
        key=lambda a: (abs(Fraction(float(a)) - real), int(np.array(a).view(bits)) & 1),
    )


def hostile(rng: Any, n: int, size: int, dtype: str) -> list[Any]:
    top = {"float16": 12, "float32": 60}[dtype]
    return [(rng.standard_normal(size) * 2.0 ** rng.integers(-top, top, size)).astype(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("budget", [0, 1000, None])
def test_the_sum_is_that_of_real_numbers_in_every_order(dtype: str, budget: Any) -> None:
    parts = hostile(np.random.default_rng(3), 5, 40, dtype)
    whole = [rounded([p[i] for p in parts], dtype) for i in range(40)]
    for order in itertools.islice(itertools.permutations(range(5)), 0, None, 7):
        for keyed in (False, True):
            buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
            for k in order:
                buf.add(0, parts[k], key=k if keyed else None)
            assert buf[0].tolist() == whole
            assert buf.take()[0].tolist() == whole
    assert fanin.add_n(parts, accumulate="exact").tolist() == whole


@pytest.mark.parametrize("size", [4, 4000])
def test_a_budget_is_held_by_a_state_where_that_is_smaller(size: int) -> None:
    n = 60
    rng = np.random.default_rng(4)
    parts = hostile(rng, n, size, "float32")
    buf = fanin.InputBuffer(1, accumulate="exact", budget=size * 4)
    for p in parts:
        buf.add(0, p.copy())
    assert buf.counters.folds > 3 and buf.counters.peak_parked_bytes < n * size * 4 / 3
    (sum_,) = buf.take()
    for i in range(0, size, max(1, size // 40)):
        assert sum_[i] == rounded([p[i] for p in parts], "float32")


def test_nothing_is_lost_on_the_way() -> None:
    big = np.float32([3e38, 1e30, -0.0, np.inf, np.nan, np.inf])
    small = np.float32([1, 1, -0.0, 1, 1, -np.inf])
    for budget in (0, None):
        buf = fanin.InputBuffer([np.empty(6, np.float32)], accumulate="exact", budget=budget)
        for g in (big, small, big, -big):
            buf.add(0, g)
        first = buf[0]
        buf.add(0, -big)
        buf.add(0, small)
        (sum_,) = buf.take()
        assert first[0] == np.float32(3e38) and sum_[:2].tolist() == [2, 2]
        assert np.isnan(sum_[4:]).all()


def test_slots_wishes_dtypes_and_scales() -> None:
    h = [np.float16([2048, 1]), np.float16([1, 2]), np.float16([1, 3])]
    buf = fanin.InputBuffer(
        [fanin.Slot(accumulate="exact"), fanin.Slot(dtype="float16", shape=(2,)), fanin.Slot(accumulate="float16")]
    )
    for i in range(3):
        for g in h:
            buf.add(i, g)
    assert [x.tolist() for x in buf.take()] == [[2050, 6], [2050, 6], [2048, 6]]
    buf = fanin.InputBuffer(
        [fanin.Slot(dtype="float16", shape=(2,)), fanin.Slot(accumulate="float64")], accumulate="exact", budget=0
    )
    for g in h:
        buf.add(0, np.stack([g, -g, g]))  # summed to the declared shape first
        buf.add(1, g)
    out = np.zeros(2, np.float32)
    sums = buf.take(scale=0.5, out=[out, None])
    assert sums[0] is out and out.tolist() == [1025, 3] and sums[1].tolist() == [1025, 3]
    for gradients, sum_ in [
        ([1, 2, 3], 6),
        ([np.int32([1]), np.int32([2])], [3]),
        ([1.5], 1.5),
        ([np.float32([1]), np.float64([2**-30])], [1 + 2**-30]),
        ([None], None),
        ([1j, 2.0], 2 + 1j),
        ([fanin.Zero((1,), "float32"), np.float32([2])], [2]),
    ]:
        buf = fanin.InputBuffer(1, accumulate="exact", budget=0)
        for g in gradients:
            buf.add(0, g)
        (got,) = buf.take()
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == sum_


def test_what_cannot_be_exact_is_refused() -> None:
    buf = fanin.InputBuffer(1, accumulate="exact", name="g")
    with pytest.raises(TypeError, match=r"g: slot 0.*an exact sum takes arrays, and no objects"):
        buf.add(0, np.ma.masked_array([1.0]))
    for bad in ("exactly", "Exact", b"exact", 3):
        for make in (lambda bad=bad: fanin.InputBuffer(1, accumulate=bad), lambda bad=bad: fanin.Slot(accumulate=bad)):
            with pytest.raises(ValueError if isinstance(bad, str) else TypeError, match=r"expected a dtype .*, got "):
                make()
    assert buf.take() == [None]


def test_targets_donated_and_unshared_ones() -> None:
    buf = fanin.InputBuffer([np.empty(2, np.float16)], accumulate="exact")
    mine = np.float16([2048, 1])
    buf.add(0, mine, donate=True)
    buf.add(0, np.float16([1, 1]))
    with buf.target(0) as out:
        assert out.dtype == np.float32
        out += 1
    assert buf.take()[0].tolist() == [2050, 3]
    buf.add(0, mine)
    assert buf.take()[0] is mine


@pytest.mark.parametrize("seed", range(3))
def test_on_streams(seed: int) -> None:
    parts = hostile(np.random.default_rng(8), 4, 9, "float32")
    whole = [rounded([p[i] for p in parts], "float32") for i in range(9)]
    with Machine(2, seed=seed) as m:
        c = m.stream()
        buf = fanin.InputBuffer(1, stream=c, accumulate="exact", budget=0)
        for p in parts:
            s = m.stream()
            g = m.empty(9, np.float32)
            m.launch(s, lambda v, p=p: np.copyto(v, p), writes=[g], name="produce")
            buf.add(0, g, stream=s)
        (sum_,) = buf.take()
        m.synchronize()
        assert sum_.numpy().tolist() == whole


def test_integers_among_low_floats_do_not_let_the_budget_show() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    xs = [
        np.ones(3, ml_dtypes.float8_e4m3fn),
        np.full(3, 33, np.int32),
        np.full(3, 33, np.int32),
        np.ones(3, np.float32),
    ]
    found = set()
    for budget in (0, 1, 50, 100, None):
        buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
        for x in xs:
            buf.add(0, x)
        found.add(buf.take()[0].tobytes())
    assert found == {np.full(3, 68.0).tobytes()}


def test_the_first_bad_key_under_a_budget() -> None:
    for budget in (0, None):
        buf = fanin.InputBuffer(1, accumulate="exact", stats=True, budget=budget)
        for k in range(30):
            buf.add(0, np.full(3, np.inf if k == 7 else 1.0, np.float32), key=k)
        buf.take()
        assert buf.stats(0).first_bad_key == 7


def test_statistics_too() -> None:
    buf = fanin.InputBuffer(1, accumulate="exact", stats=True, budget=0)
    for k, g in enumerate(([3, 4], [0, np.inf], [0, 0])):
        buf.add(0, np.float32(g), key=k)
    buf.take()
    assert buf.stats(0) == fanin.Stats(2, 9, 3, 1, 1)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_complex_scale_turns_a_sum_that_was_kept_in_a_state(dtype: str) -> None:
    """Under a budget the sum is folded into an exact state, without one it is summed at once: both are turned alike."""
    terms = [np.array([k + 1 - 2j, 3j * k, 0.0, -1.0], dtype) for k in range(70)]
    for scale in (1j, 2 - 3j, -1j, 0.5 + 0.25j):
        found = []
        for budget in (0, math.inf):
            buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
            for t in terms:
                buf.add(0, t)
            found.append(buf.take(scale=scale)[0])
        want = np.sum(np.array(terms, "complex128"), axis=0) * scale
        assert found[0].tobytes() == found[1].tobytes() and np.array_equal(found[0], want.astype(dtype)), (
            scale,
            found,
            want,
        )


@pytest.mark.parametrize("bad", [None, 0, 1, 199, 200, 399])
def test_the_first_bad_key_of_a_state_is_that_of_any_term_the_first_and_the_last_too(bad: int | None) -> None:
    buf = fanin.InputBuffer(1, stats=True, accumulate="exact", budget=0)
    for key in [*range(399, 199, -1), *range(200)]:  # the last add lets the state absorb 200 at once
        buf.add(0, np.full(3, math.inf if key == bad else 1.0), key=key)
    assert buf.counters.folds > 0, "terms were absorbed into a state"
    buf.take()
    stats = buf.stats(0)
    assert stats is not None and (stats.nonfinite, stats.first_bad_key) == ((0, None) if bad is None else (3, bad))


@pytest.mark.rule("A2", "A14")
@pytest.mark.parametrize("budget", [0, 10, None])
def test_a_single_gradient_among_zeros_is_handed_through_under_every_budget(budget: Any) -> None:
    x = np.ones(3)
    for terms in (
        [x, fanin.Zero((3,), "f8")],
        [fanin.Zero((3,), "f8"), x, None, fanin.Zero((3,), "f4")],
        [None, x, None],
    ):
        buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
        for k, term in enumerate(terms):
            buf.add(0, term, key=k)
        assert buf.take()[0] is x
