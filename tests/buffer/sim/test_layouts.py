"""The axis order of sums (D16), and sums of expanded gradients (A13): no budget changes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit.values import bits

BUDGETS = [0, 20, None, 10**9]
ROW = np.broadcast_to(np.ones((1, 3)), (2, 3))
COLUMN = np.broadcast_to(np.ones((2, 1)), (2, 3))
NUMBER = np.broadcast_to(np.ones((1, 1)), (2, 3))
PLAIN, FORTRAN = np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))
TERMS = {"row": ROW, "column": COLUMN, "number": NUMBER, "plain": PLAIN, "fortran": FORTRAN}


def layout(terms: Any, budget: Any, *, writable: bool = False, **slot: Any) -> tuple[int, ...]:
    buf = fanin.InputBuffer(1, budget=budget, **slot)
    for x in terms:
        buf.add(0, x)
    total = buf.take(writable=writable)[0]
    assert (total == len(terms)).all()
    return tuple(total.strides)


def expected(terms: list[Any], writable: bool) -> tuple[int, ...]:
    """Of axes along which all are expanded 0; else those of the first, or of C order where it is expanded."""
    expanded = [{i for i in (0, 1) if x.strides[i] == 0} for x in terms]
    axes = set() if writable else set.intersection(*expanded)
    base = np.empty([1 if i in axes else n for i, n in enumerate((2, 3))], order="F" if terms[0] is FORTRAN else "C")
    return np.broadcast_to(base, (2, 3)).strides


@pytest.mark.rule("A13")
@pytest.mark.parametrize("n", [2, 3])
def test_the_strides_of_a_sum_are_those_of_the_first_under_every_budget(n: int) -> None:
    met = set()
    for names in itertools.product(TERMS, repeat=n):
        terms = [TERMS[name] for name in names]
        for writable in (False, True):
            found = {budget: layout(terms, budget, writable=writable) for budget in BUDGETS}
            assert set(found.values()) == {expected(terms, writable)}, (names, writable, found)
            met |= set(found.values())
    assert met == {(24, 8), (8, 16), (0, 8), (8, 0), (0, 0)}


@pytest.mark.rule("A11", "A13")
@pytest.mark.parametrize("n", [2, 3])
def test_the_strides_of_an_exact_sum_are_those_of_the_first_under_every_budget(n: int) -> None:
    met = set()
    for names in itertools.product(TERMS, repeat=n):
        terms = [TERMS[name] for name in names]
        for writable in (False, True):
            found = {budget: layout(terms, budget, writable=writable, accumulate="exact") for budget in BUDGETS}
            assert set(found.values()) == {expected(terms, writable)}, (names, writable, found)
            met |= set(found.values())
    assert met == {(24, 8), (8, 16), (0, 8), (8, 0), (0, 0)}


@pytest.mark.rule("A11", "A13")
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_exact_sum_of_gradients_expanded_along_the_same_axes_sums_each_number_once(budget: Any) -> None:
    buf = fanin.InputBuffer(1, budget=budget, accumulate="exact", stats=True)
    x = np.broadcast_to(np.array([[1], [2]], "f2"), (2, 1 << 12))
    for _ in range(3):
        buf.add(0, x)
    total = buf.take()[0]
    assert total.strides == (2, 0) and total[:, 7].tolist() == [3, 6]
    assert buf.counters["bytes_written"] == 4
    assert (buf.stats(0).absmax, buf.stats(0).sumsq) == (6, 45 << 12)


def exact_sum(terms: list[Any], budget: Any, **take: Any) -> tuple[Any, Any, int]:
    buf = fanin.InputBuffer([fanin.Slot(accumulate="exact")], budget=budget, stats=True)
    for k, x in enumerate(terms):
        buf.add(0, x, key=k)
    folds = buf.counters["folds"]
    return buf.take(**take)[0], buf.stats(0).first_bad_key, folds


@pytest.mark.rule("A11", "A13")
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "f2"])
def test_a_budget_changes_no_exact_sum_of_expanded_gradients(dtype: str) -> None:
    seed = 1
    r = np.random.default_rng(seed)
    expanded = folded = bad = 0
    for example in range(60):
        shape = tuple(int(x) for x in r.integers(1, 24, r.integers(1, 4)))
        terms = []
        widths = int(r.choice([3, 40, 250]))
        usual = r.random(len(shape)) < 0.5
        for _ in range(r.integers(2, 7)):
            axes = usual if r.random() < 0.7 else r.random(len(shape)) < 0.5
            small = [1 if cut else n for cut, n in zip(axes, shape, strict=True)]
            with np.errstate(all="ignore"):
                x = np.ldexp(r.standard_normal(small), r.integers(-widths, widths, small))
                x[r.random(small) < 0.1] = -0.0
                x[r.random(small) < 0.02] = r.choice([np.inf, -np.inf, np.nan])
                x = x * (1 + 2j) if dtype == "c16" and example % 2 else x
                terms.append(np.broadcast_to(x.astype(dtype), shape))
        take = {"scale": 3.0} if example % 5 == 0 else {}
        whole, first, _ = exact_sum([np.array(x) for x in terms], 10**9, **take)
        for budget in (0, 64, 10**9):
            total, key, folds = exact_sum(terms, budget, **take)
            assert bits(total) == bits(whole), (seed, example, budget)
            assert key == first, (seed, example, budget)
            folded += folds > 0
            expanded += 0 in total.strides
        bad += first is not None
    assert min(folded, expanded, bad) > 10, (folded, expanded, bad)


@pytest.mark.rule("A11", "A13")
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_exact_sum_that_is_expanded_no_more_keeps_each_number(dtype: str, axis: int) -> None:
    """Numbers of all exponents, inf, NaN and -0.0 in blocks of their own."""
    n = 900
    seed = 3
    r = np.random.default_rng(seed)
    exponents = np.repeat([0, -10, 3, 60, -90, 14, 0, -14, 0], 100)
    for special in (1.0, np.inf, np.nan):
        for spread in (1, 0):
            x = np.ldexp(r.standard_normal(n), exponents * spread)
            x[::7] = -0.0
            x[850] *= special
            with np.errstate(all="ignore"):
                row = np.expand_dims(x.astype(dtype), axis)
            shape = (3, n) if axis == 0 else (n, 3)
            terms = [np.broadcast_to(row, shape)] * 4 + [np.full(shape, -0.0, dtype)] * 9
            whole, _, none = exact_sum([np.array(x) for x in terms], 10**9)
            total, _, folds = exact_sum(terms, 0)
            assert (none, folds > 0) == (0, True)
            assert bits(total) == bits(whole), (seed, special, spread)


@pytest.mark.rule("A11")
def test_a_contribution_summed_to_the_shape_does_not_change_how_others_are_converted() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    low = ml_dtypes.float8_e4m3fn
    for hundred in (
        np.full(2, 100, "u8"),
        np.full((1, 2), 100, "i8"),
        fanin.Sparse("coo", (np.array([[0, 1]]), np.full(2, 100)), (2,)),
    ):
        for zeros in ([], [np.zeros((3, 2), low)]):
            buf = fanin.InputBuffer([fanin.Slot(shape=(2,))], accumulate="exact")
            for x in (hundred, *zeros, np.ones(2, low)):
                buf.add(0, x)
            total = buf.take()[0]
            assert total.dtype == low and total.astype(float).tolist() == [96, 96]


@pytest.mark.rule("A13")
@pytest.mark.parametrize("where", ["cpu", "sim"])
@pytest.mark.parametrize("accumulate", [None, "exact"])
@pytest.mark.parametrize("options", [{"copy": True}, {"scale": 3}, {"zero": True}], ids=str)
def test_one_expanded_gradient_that_is_copied_or_scaled_stays_expanded(
    a_world: Callable[..., Any], where: str, accumulate: Any, options: dict[str, Any]
) -> None:
    w = a_world(where)
    x = np.ones((1, 2), "f4")
    buf = fanin.InputBuffer([fanin.Slot(device=w.place(), accumulate=accumulate)])
    buf.add(0, w.array(x).broadcast_to(5, 2) if where == "sim" else np.broadcast_to(x, (5, 2)), copy="copy" in options)
    if "zero" in options:
        buf.add(0, fanin.Zero((5, 2), "f8"))
    total = buf.take(scale=options.get("scale"))[0]
    assert total.strides == (0, total.dtype.itemsize)
    assert buf.counters["bytes_written"] == 2 * total.dtype.itemsize
