"""Weights of passes, outside of the buffer: which numbers are weights, and their exact sum, the divisor of a mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import numpy as np

from ._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

Weight: TypeAlias = int | float

#: Of several weights: no weight was given, all are integers, or some are floats.
Kind = Literal["none", "integer", "float"]

#: The dtypes in which sums run that hold fewer numbers than float64.
_NARROW = ("float32", "complex64")
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def weight_of(call: str, given: Any, accumulate: Iterable[str] = ()) -> Weight:
    """A weight as an int or a float.

    Parameters
    ----------
    call : str
        For messages.
    given : number
        A finite real number: of Python, or a scalar of NumPy.
    accumulate : iterable of str
        The dtypes in which sums of it run.

    Raises
    ------
    TypeError
        Not a number, or an array or a complex number.
    ValueError
        A bool, NaN, inf, a number that is no float exactly, or one that a dtype rounds to inf, or to a number with
        fewer digits because it is below the smallest normal one.
    """
    if isinstance(given, bool | np.bool_):
        raise ValueError(f"{call}: weight: expected a number, got the bool {given!r} (W4)")
    if not isinstance(given, int | float | np.integer | np.floating):
        hint = ": give x.item()" if hasattr(given, "item") and not isinstance(given, np.generic) else ""
        raise TypeError(f"{call}: weight: expected a real number, as of tokens, got {type_of(given)}{hint} (W4)")
    made: Weight = int(given) if isinstance(given, int | np.integer) else float(given)
    for dtype in ("float64", *accumulate):
        if not _is_finite(made, dtype):
            place = "" if dtype == "float64" and isinstance(made, float) else f" in {dtype}, in which the sum runs"
            raise ValueError(f"{call}: weight: expected a finite number{place}, got {given!r} (W4)")
        if not _has_its_digits(made, dtype):
            raise ValueError(
                f"{call}: weight: {given!r} is below the smallest normal number of {dtype}, in which the sum runs, and"
                " would lose digits: multiply all weights by one number, which a mean does not change (W4)"
            )
    exact = made if isinstance(made, int) else given  # NumPy compares its integers with a float as two floats
    if float(made) != exact:
        raise ValueError(f"{call}: weight: {given!r} is no float exactly, and would be rounded: give float(w) (W4)")
    return made


def _is_finite(weight: Weight, dtype: str) -> bool:
    try:
        as_float = float(weight)
    except OverflowError:
        return False
    return math.isfinite(as_float if dtype not in _NARROW else _in_float32(as_float))


def _has_its_digits(weight: Weight, dtype: str) -> bool:
    """Whether a number below the smallest normal one of the dtype is a number of it."""
    if dtype not in _NARROW or abs(weight) >= _SMALLEST_NORMAL:
        return True
    return _in_float32(float(weight)) == weight


def _in_float32(number: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))


def kind_of(weights: Iterable[Weight]) -> Kind:
    """Whether all are integers."""
    kinds = {isinstance(one, int) for one in weights}
    if not kinds:
        return "none"
    return "integer" if kinds == {True} else "float"


def exact_sum(weights: Iterable[Weight]) -> Fraction:
    """The sum without any rounding."""
    total = Fraction(0)
    for one in weights:
        total += Fraction(one)
    return total


def parts_of(total: Fraction) -> tuple[float, ...]:
    """Floats whose exact sum is a sum of weights, the largest first."""
    parts: list[float] = []
    while total:
        parts.append(float(total))
        total -= Fraction(parts[-1])
    return tuple(parts)
