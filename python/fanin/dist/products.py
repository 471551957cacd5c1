"""Terms times their weights in exact sums that travel: as numbers of float64 whose sum is each product exactly (W2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fanin import _core
from fanin._interop.protocols import NDArray
from fanin._weights import Weight

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Floats with so few digits that a weight's first 29 digits times one of them are a number of float64.
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64")

#: The exponents of factors whose products have all digits in float64: of weights of narrow terms, of float64.
NARROW_RANGE, WIDE_RANGE = (-850, 890), (-958, 990)


def weighing_of(weights: Sequence[Weight | None]) -> dict[str, Any]:
    """The option of the core's `add_n` for weights."""
    if all(w is None for w in weights):
        return {}
    return {"weights": [1 if w is None else w for w in weights]}


def wide_dtype(dtype: str) -> str:
    """The dtype in which products are summed."""
    return "complex128" if dtype.startswith("complex") else "float64"


def split(weight: float, digits: int) -> list[float]:
    """Numbers of a weight's sign, of so many digits, whose sum it is."""
    parts: list[float] = []
    while weight:
        mantissa, exponent = math.frexp(weight)
        parts.append(math.ldexp(math.trunc(math.ldexp(mantissa, digits)), exponent - digits))
        weight -= parts[-1]
    return parts


def check_products(call: str, term: Any, weight: Weight, dtype: str) -> None:
    """ValueError for a product that has digits below or above those of float64."""
    if not weight:
        return
    exponent = math.frexp(weight)[1]
    low, high = NARROW_RANGE if dtype in NARROW else WIDE_RANGE
    least = most = 0
    if dtype not in NARROW:
        sizes = np.abs(np.asarray(term).view("f8"))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if not len(sizes):
            return
        least, most = math.frexp(float(sizes.min()))[1], math.frexp(float(sizes.max()))[1]
    if min(exponent, least, least + exponent) < low or max(exponent, most, most + exponent) > high:
        raise ValueError(
            f"{call}: weight={weight!r}: an exact sum of products that a rank sends has numbers from 2**{low} to"
            f' 2**{high}: scale the weights or the gradients, or give order="key"'
        )


def products(term: Any, weight: Weight, dtype: str) -> Iterator[NDArray]:
    """Arrays whose sum is the term times the weight, exactly."""
    wide: NDArray = np.empty(len(term), wide_dtype(dtype))
    _core.add_n([term], out=wide, accumulate=wide_dtype(dtype))
    numbers, factor = wide.view("f8"), float(weight)
    for part in _core.in_default_modes(lambda: _parts(numbers, factor, dtype in NARROW)):
        yield part.view(wide.dtype)


def _parts(numbers: NDArray, factor: float, narrow: bool) -> list[NDArray]:
    with np.errstate(invalid="ignore"):
        factors = split(factor, 29 if narrow else 26) or [factor]
        if narrow:
            return [numbers * f for f in factors]
        high = np.where(np.isfinite(numbers), (numbers.view("u8") & _FIRST_26).view("f8"), numbers)
        low = np.where(np.isfinite(numbers), np.copysign(numbers - high, numbers), np.copysign(0.0, numbers))
        return [x * f for f in factors for x in (high, low)]


#: Keeps the first 26 digits of a float64.
_FIRST_26 = np.uint64((1 << 64) - (1 << 27))


def window_parts(window: object, size: int, dtype: str) -> list[NDArray]:
    """Arrays of float64, or complex128, whose exact sum is that of a window; its sum is lost."""
    parts: list[NDArray] = []
    left = True
    while left:
        part: NDArray = np.empty(size, wide_dtype(dtype))
        _core.window_round(window, part, None)
        numbers = part.view("f8")
        finite = np.isfinite(numbers)
        away = np.where(finite, -numbers, -0.0)
        left = bool(np.any(finite & (numbers != 0)))
        if parts:
            numbers[~finite | (numbers == 0)] = -0.0
        if left or not parts:
            parts.append(part)
        _core.window_add(window, (away.view(part.dtype),))
    return parts
