"""Rows summed by their numbers (`fanin.add_rows`, P4), beside fractions, and folds one number after the other."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from kit.isa import isas
from kit.recipes import values
from kit.values import DTYPES, bits
from kit.weighted import nearest
from reference.numbers import accumulation, plus, rounded

NAMES = [d.name for d in DTYPES]
WIDE = {"float32": "float64", "complex64": "complex128"}


def folded(ids: Any, rows: Any, n: int, wish: str | None = None) -> Any:
    out = np.zeros((n, *rows.shape[1:]), rows.dtype)
    acc = np.dtype(wish or WIDE.get(rows.dtype.name, accumulation(rows.dtype, None)))
    for i in range(n):
        mine = [rounded(rows[k], acc) for k in range(len(ids)) if ids[k] == i]
        for k, x in enumerate(mine):
            mine[0] = x if k == 0 else plus(mine[0], x)
        if mine:
            out[i] = rounded(mine[0], rows.dtype)
    return out


@pytest.mark.rule("P4")
@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_the_left_fold_of_its_rows_rounded_once(name: str) -> None:
    draw = random.Random(name)
    for _ in range(30):
        n, m, width = draw.randrange(1, 6), draw.randrange(0, 20), draw.choice([(), (1,), (3,), (2, 2), (0,)])
        ids = np.array([draw.randrange(n) for _ in range(m)], draw.choice(["int32", "int64", "uint8"]))
        rows = values((m, *width), NAMES.index(name), draw)
        if draw.random() < 0.3:
            rows = np.asfortranarray(rows)[::-1]
        wish = draw.choice([None, None, name]) if name not in ("bool",) else None
        with np.errstate(all="ignore"):
            expected = folded(ids, rows, n, wish)
        got = fanin.add_rows(ids, rows, n, accumulate=wish)
        assert got.dtype == rows.dtype and bits(got) == bits(expected), (ids, rows, wish)


@pytest.mark.rule("P4")
def test_an_exact_sum_is_that_of_the_fractions_rounded_once() -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 5, 200)
    rows = (draw.standard_normal((200, 3)) * 10.0 ** draw.integers(-20, 20, (200, 3))).astype(np.float32)
    got = fanin.add_rows(ids, rows, 6, accumulate="exact")
    for i in range(6):
        for k in range(3):
            total = sum((Fraction(float(x)) for x in rows[ids == i, k]), Fraction(0))
            near = got[i, k]
            beside = [np.nextafter(near, np.float32(d)) for d in (-np.inf, np.inf)]
            error = abs(Fraction(float(near)) - total)
            assert all(error <= abs(Fraction(float(x)) - total) for x in beside), (i, k)


def test_wide_accumulation_keeps_what_a_rounding_at_each_step_loses() -> None:
    rows = np.float32([[2**24], [1], [1]])
    assert fanin.add_rows([0, 0, 0], rows, 1).tolist() == [[2**24 + 2]]
    assert fanin.add_rows([0, 0, 0], rows, 1, accumulate="float32").tolist() == [[2**24]]
    low = np.array([256, 1, 1], ml_dtypes.bfloat16)
    assert fanin.add_rows([0, 0, 0], low, 1).tolist() == [258]


def test_a_lone_row_stays_as_it_is_and_a_missing_one_is_zero() -> None:
    got = fanin.add_rows(np.array([[2, 0]]), np.float32([[[-0.0, 1], [3, -0.0]]]), 3)
    assert bits(got) == bits(np.float32([[3, -0.0], [0, 0], [-0.0, 1]]))


@pytest.mark.parametrize(
    ("ids", "rows", "error", "words"),
    [
        ([0, 3], np.ones((2, 2)), IndexError, r"ids\[1\] is 3; expected numbers from 0 to 2"),
        ([0, -1], np.ones((2, 2)), IndexError, r"ids\[1\] is -1"),
        ([True, False], np.ones((2, 2)), TypeError, "ids: expected integers, got a mask"),
        ([0.0, 1.0], np.ones((2, 2)), TypeError, "ids: expected integers"),
        ([0, 1, 2], np.ones((2, 2)), ValueError, r"begins with that of ids, \(3,\), got \(2, 2\)"),
        (0, np.ones(2), ValueError, "begins with that of ids"),
        ([0, 1], [[1.0], [2.0]], TypeError, "rows: expected an array, got a list"),
        ([0, 1], np.array([object(), object()]), TypeError, "add_rows: "),
        ([0, 1], fanin.Zero((2, 2), "float32"), TypeError, "dense array of the host"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(ids: Any, rows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fanin.add_rows(ids, rows, 3)
    with pytest.raises(ValueError, match="accumulate=int8 cannot hold rows of dtype float64"):
        fanin.add_rows([0], np.ones((1, 2)), 1, accumulate="int8")


@pytest.mark.rule("P4")
@pytest.mark.parametrize("width", [1, 7, 8, 9, 15, 16, 20])
def test_exact_sums_of_each_width_are_those_of_the_fractions(width: int) -> None:
    """Rows that float64 adds without an error, and rows with one number that it does not."""
    draw = np.random.default_rng(width)
    for far in (False, True):
        ids = draw.integers(0, 4, 40)
        rows = draw.standard_normal((40, width)).astype(np.float32)
        if far:
            rows[draw.integers(0, 40, 6), draw.integers(0, width, 6)] = np.float32(
                [1e-30, 3e38, -1e-45, 1e20, -0.0, 7e-20]
            )
        expected = np.zeros((4, width), np.float32)
        for i, k in np.ndindex(4, width):
            total = sum((Fraction(float(x)) for x in rows[ids == i, k]), Fraction(0))
            expected[i, k] = nearest(total, "float32")
        for isa in isas():
            with fanin.set_options(isa=isa):
                got = fanin.add_rows(ids, rows, 4, accumulate="exact")
            assert bits(got + 0) == bits(expected), (far, isa)


@pytest.mark.rule("P4")
@pytest.mark.parametrize("width", [3, 8, 19])
def test_exact_sums_keep_infinities_nans_and_signs_of_zeros(width: int) -> None:
    ids = np.repeat(np.arange(5), 2)
    pairs = [(math.inf, 1.0), (math.inf, -math.inf), (math.nan, 1.0), (-0.0, -0.0), (1.0, -1.0)]
    numbers = np.float32(pairs).reshape(10)
    for place in range(width):
        rows = np.ones((10, width), np.float32)
        rows[:, place] = numbers
        got = fanin.add_rows(ids, rows, 5, accumulate="exact")
        rest = np.delete(got, place, 1)
        assert (rest == 2).all(), place
        assert str(got[:, place].tolist()) == "[inf, nan, nan, -0.0, 0.0]", place
