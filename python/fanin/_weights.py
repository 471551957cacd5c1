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

#: The largest finite number of the dtypes in which sums run, in which a weight must be finite.
_LARGEST = {"float32": float(np.finfo(np.float32).max), "complex64": float(np.finfo(np.float32).max)}


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
        A bool, NaN, inf, a number that is no float exactly, or one that a dtype rounds to inf.
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
    exact = made if isinstance(made, int) else given  # NumPy compares its integers with a float as two floats
    if float(made) != exact:
        raise ValueError(f"{call}: weight: {given!r} is no float exactly, and would be rounded: give float(w) (W4)")
    return made


def _is_finite(weight: Weight, dtype: str) -> bool:
    try:
        as_float = float(weight)
    except OverflowError:
        return False
    if not math.isfinite(as_float):
        return False
    if dtype in _LARGEST and abs(as_float) > _LARGEST[dtype]:
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float32(as_float)))
    return True


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
