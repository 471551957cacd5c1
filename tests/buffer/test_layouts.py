"""The axis order of sums (D16), and sums of expanded gradients (A13): no budget changes them."""

from __future__ import annotations

import itertools
from typing import Any

import fanin
import numpy as np
import pytest

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
def test_the_strides_of_a_sum_are_those_of_the_first_whatever_the_budget(n: int) -> None:
    met = set()
    for names in itertools.product(TERMS, repeat=n):
        terms = [TERMS[name] for name in names]
        for writable in (False, True):
            found = {budget: layout(terms, budget, writable=writable) for budget in BUDGETS}
            assert set(found.values()) == {expected(terms, writable)}, (names, writable, found)
            met |= set(found.values())
    assert met == {(24, 8), (8, 16), (0, 8), (8, 0), (0, 0)}
