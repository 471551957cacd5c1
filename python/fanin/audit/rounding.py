"""Sums and factors up to rounding: what a dtype makes of an addition, and whether one number explains a change.

Values are float32 arrays, or float64 ones for float64 gradients; a narrower dtype is a name, whose roundings are
replayed in float32. A float32 holds the sum of two float16 or two bfloat16 numbers well enough that rounding it once
more gives the same bits as one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__tracebackhide__ = True  # no frames of ours in reports of pytest

Vector = np.ndarray[Any, np.dtype[np.floating[Any]]]

#: Half a unit in the last place of 1, for each dtype whose sums are replayed.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "rows": 2.0**-18}
#: The smallest normal number; of float16, which is never flushed to zero, the smallest number.
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126, "rows": 2.0**-126}
#: A sketch of a sparse gradient, in float64: each of its numbers is a sum over many elements, so that no bits are
#: compared but all numbers up to this fraction of the largest.
ROWS = "rows"
WIDE = ("float64", ROWS)
#: Fewer different numbers than these do not decide that a change is one factor.
ENOUGH = 8


def carrier(dtype: str) -> type[np.floating[Any]]:
    """The dtype of the arrays that hold values of a dtype."""
    return np.float64 if dtype in WIDE else np.float32


def exact(dtype: str) -> str:
    """The dtype in which the sum is made that roundings are compared with."""
    return "float64" if dtype in WIDE else "float32"


def floor(dtype: str, *vectors: Vector) -> float:
    """What an element may differ by, however small it is."""
    if dtype != ROWS:
        return TINY[dtype]
    return ROUNDOFF[ROWS] * max((float(abs(x).max(initial=0.0)) for x in vectors), default=0.0)


def rounded(x: Vector, dtype: str) -> Vector:
    """Round values to the nearest of a dtype, ties to even."""
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        nearest = bits >> np.uint32(16)
        nearest &= np.uint32(1)
        nearest += np.uint32(0x7FFF)
        nearest += bits
        nearest &= np.uint32(0xFFFF0000)
        found: Vector = nearest.view(np.float32)
        if x.size and np.isnan(x.max()):
            return np.where(np.isnan(x), x, found)
        return found
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    return x


def added(a: Vector | None, b: Vector, dtype: str) -> Vector:
    """The sum of two terms, rounded to a dtype; None is an empty sum."""
    if a is None:
        return b
    with np.errstate(all="ignore"):
        return rounded(a + b, dtype)


def times(f: float, x: Vector, dtype: str) -> Vector:
    """A product, rounded to a dtype."""
    with np.errstate(all="ignore"):
        return rounded((x * x.dtype.type(f)), dtype)


def same(a: Vector, b: Vector, dtype: str) -> bool:
    """Whether two sums are equal: NaNs are equal, and so are subnormal numbers, which a thread may flush to zero."""
    if a.tobytes() == b.tobytes():  # a tenth of the time of a comparison by numbers
        return True
    if dtype == ROWS:
        return bool((abs(a - b) <= floor(dtype, a, b)).all())
    with np.errstate(all="ignore"):
        flushed = (abs(a) < TINY[dtype]) & (abs(b) < TINY[dtype])
        return bool(((a == b) | (np.isnan(a) & np.isnan(b)) | flushed).all())


def empty(x: Vector | None) -> bool:
    """Whether a sum is absent or zero."""
    return x is None or not x.any()


@dataclass(frozen=True, slots=True)
class Factor:
    """The numbers f for which y is f x, up to some roundings, in every element.

    Attributes
    ----------
    low, high : float
        The ends of their interval.
    decided : bool
        Whether 8 different numbers have this factor. Of equal elements, clipping by value has a factor as well.
    """

    low: float
    high: float
    decided: bool

    @property
    def value(self) -> float:
        """An integer in the interval, or the reciprocal of one, if there is one; else its middle."""
        middle = (self.low + self.high) / 2
        nearest = float(round(middle)) if abs(middle) >= 1 else 0.0
        if not nearest and abs(middle) > 1e-300:
            nearest = 1 / round(1 / middle)
        return nearest if self.low <= nearest <= self.high else middle

    def times(self, low: float, high: float) -> tuple[float, float]:
        """The ends of the products with the numbers of another interval."""
        ends = [self.low * low, self.low * high, self.high * low, self.high * high]
        return min(ends), max(ends)

    def has(self, f: float, slack: float = 0.0) -> bool:
        """Whether f is one of them, up to a fraction of it."""
        return self.low - slack * abs(f) <= f <= self.high + slack * abs(f)


def factor(x: Vector, y: Vector, dtype: str, roundings: int = 4) -> Factor | None:
    """The factor that explains a change, if there is one: each element allows an interval, and all of them meet."""
    with np.errstate(all="ignore"):
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        if not (np.isfinite(wide_x).all() and np.isfinite(wide_y).all()):
            return None
        least = floor(dtype, x, y)
        used = abs(wide_x) > least
        if not used.any() or abs(wide_y[~used]).max(initial=0.0) > 2 * least:
            return None
        wide_x, wide_y = wide_x[used], wide_y[used]
        slack = roundings * ROUNDOFF[dtype] * abs(wide_y) + least
        ends = np.sort([(wide_y - slack) / wide_x, (wide_y + slack) / wide_x], axis=0)
    low, high = float(ends[0].max()), float(ends[1].min())
    return Factor(low, high, len(np.unique(abs(wide_x))) >= ENOUGH) if low <= high else None


def clipped(x: Vector, y: Vector, dtype: str) -> tuple[float, bool] | None:
    """The number c if y is x clipped to -c .. c, and something was clipped; and whether enough elements say so."""
    sizes = abs(y)
    c = float(sizes.max(initial=0.0))
    above = abs(x) > c
    if not 0 < c < np.inf or not above.any() or not same(np.clip(x, -c, c), y, dtype):
        return None
    return c, bool(len(np.unique(abs(x))) >= ENOUGH and len(np.unique(abs(x[above]))) > 1)


def within(y: Vector, total: Vector, dtype: str, terms: int, size: float, wide: bool) -> bool:
    """Whether y is a sum of some terms in an order that is not known.

    Parameters
    ----------
    y, total : array
        What was found, and the sum of the terms in the dtype that carries them.
    dtype : str
        The dtype of y.
    terms : int
        How many terms there are.
    size : float
        The sum over the terms of their largest absolute values.
    wide : bool
        Whether the terms are summed in float32 (float64 for float64) and rounded once, or at each addition.
    """
    own, in_sum = ROUNDOFF[dtype], ROUNDOFF[exact(dtype)]
    with np.errstate(all="ignore"):
        allowed = 2 * (terms + 1) * (in_sum if wide else own) * size + 1.01 * own * abs(y) + floor(dtype, y, total)
        near = abs(y.astype(np.float64) - total) <= allowed
        return bool((near | (np.isnan(y) & np.isnan(total)) | (y == total)).all())


def lost(y: Vector, total: Vector) -> float:
    """How far a sum is from the one with fewer roundings, as a fraction of it (root of mean squares)."""
    with np.errstate(all="ignore"):
        wide = total.astype(np.float64)
        size = float(np.sqrt((wide * wide).sum()))
        off = float(np.sqrt(((y - wide) ** 2).sum()))
    return off / size if 0 < size < np.inf and off < np.inf else 0.0
