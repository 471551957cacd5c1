"""Oracles of weighted sums and means: the left fold of rounded products in NumPy, and sums of fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kit.values import BFLOAT16

#: The digits of a number, and the exponent of its smallest step.
FORMATS = {"float64": (53, -1074), "float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}
#: The power of two above the largest number.
ABOVE = {"float64": 1024, "float32": 128, "float16": 16, "bfloat16": 128}


def nearest(q: Fraction, dtype: str) -> float:
    """A fraction rounded once, to the nearest number of the dtype; of two the even one; inf beyond the largest."""
    digits, least = FORMATS[dtype]
    if q == 0:
        return 0.0
    exponent = abs(q.numerator).bit_length() - q.denominator.bit_length()
    if abs(q) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - digits + 1, least)
    rounded = round(q / step) * step
    if abs(rounded) >= Fraction(2) ** ABOVE[dtype]:
        return math.inf if q > 0 else -math.inf
    return float(rounded)


def quotient(total: float, divisor: Fraction, wide: str, dtype: str) -> float:
    """W3: a sum of the dtype `wide` over a divisor, which that dtype may not hold, rounded to `dtype`."""
    digits, least = FORMATS[wide]
    by = nearest(divisor, wide)
    if math.isinf(by) or abs(divisor) < Fraction(2) ** (least + digits - 1):
        wide = "float64"
        by = nearest(divisor, wide)
    sign = math.copysign(1, total) * math.copysign(1, by)
    if math.isinf(total) or math.isnan(total):
        return total * math.copysign(1, by)
    first = nearest(Fraction(total) / Fraction(by), wide)
    if math.isinf(first):
        return first
    return math.copysign(nearest(Fraction(first), dtype), sign)


def dtype_of(name: str) -> Any:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def folded(
    terms: Sequence[Any], weights: Sequence[Any], divisor: Any = None, wide: str = "float32", dtype: str | None = None
) -> Any:
    """W1, W3: products rounded in the accumulation dtype `wide`, their left fold, its quotient, rounded once."""
    number = np.dtype(wide).type
    total: Any = None
    for g, w in zip(terms, weights, strict=True):
        wider = np.asarray(g).astype(wide)
        product = wider if w == 1 else wider * number(float(w))
        total = product if total is None else total + product
    if divisor is not None:
        total = total / number(float(Fraction(divisor)))
    return total.astype(dtype_of(dtype or wide))


def exact(terms: Sequence[Any], weights: Sequence[Any], divisor: Any = 1, dtype: str = "float32") -> Any:
    """W2: the quotient of the exact sums, rounded once."""
    first = np.asarray(terms[0])
    flat = [np.asarray(g).astype("float64").ravel() for g in terms]
    made = []
    for i in range(first.size):
        each = (Fraction(w) * Fraction(float(g[i])) for w, g in zip(weights, flat, strict=True))
        made.append(nearest(sum(each, Fraction(0)) / Fraction(divisor), dtype))
    return np.array(made).reshape(first.shape).astype(dtype_of(dtype))


def ulps(a: Any, b: Any) -> float:
    """The largest difference of two float64 arrays, in units of the last place of the larger magnitude."""
    a, b = np.asarray(a, "f8"), np.asarray(b, "f8")
    step = np.spacing(np.maximum(np.abs(a), np.abs(b)))
    return float(np.max(np.abs(a - b) / step)) if a.size else math.nan
