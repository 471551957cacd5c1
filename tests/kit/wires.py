"""Rounding to the dtypes as which elements travel, in plain NumPy; and sums over ranks beside those of one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fanin
from fanin import dist
from kit.values import bits

MICRO = 8  # contributions

Dealing = Callable[[int, int], int]  #: the rank of contribution k, of so many ranks


class Format(NamedTuple):
    digits: int
    low: int  #: the exponent of the smallest normal number
    largest: float
    beyond: float  #: what inf, and what rounds above the largest number, becomes
    top: int | None = None  #: the exponent of the largest number of a block, if there are blocks


FORMATS = {
    "bfloat16": Format(8, -126, (2 - 2**-7) * 2.0**127, np.inf),
    "float16": Format(11, -14, 65504, np.inf),
    "float8_e4m3fn": Format(4, -6, 448, np.nan, 7),
    "float8_e5m2": Format(3, -14, 57344, np.inf, 14),
}


def to_format(x: Any, form: Format) -> Any:
    """The numbers of a format that are nearest to those of float64, even ones of two."""
    finite = np.isfinite(x)
    exponents = np.maximum(np.frexp(np.where(finite, x, 0))[1] - 1, form.low)
    steps = np.ldexp(1.0, exponents - (form.digits - 1))
    y = np.where(finite, np.rint(x / steps) * steps, x)
    y = np.where(np.isfinite(y) & (np.abs(y) > form.largest), np.copysign(np.inf, x), y)
    y = np.where(np.isinf(y), np.copysign(form.beyond, x), y)
    return np.copysign(y, x)


def in_blocks(x: Any, size: int, form: Format) -> Any:
    """Numbers in blocks of a size, rounded."""
    assert form.top is not None
    blocks = np.zeros((-(-len(x) // size), size))
    blocks.reshape(-1)[: len(x)] = x
    largest = np.where(np.isfinite(blocks), np.abs(blocks), 0).max(1, initial=2.0**-300)
    unbounded = form._replace(low=-300, largest=np.inf)
    exponents = np.clip(np.frexp(to_format(largest, unbounded))[1] - 1, -127, 128)[:, None]
    narrow = to_format(np.ldexp(blocks, form.top - exponents), form)
    return np.ldexp(narrow, exponents - form.top).reshape(-1)[: len(x)]


def rounded(x: Any, wire: str) -> Any:
    """An array as its owners get it. Both parts of a complex number are in one block."""
    form, flat = FORMATS[wire], np.array(x).reshape(-1)
    parts = 2 if np.iscomplexobj(flat) else 1
    numbers = flat.view(flat.real.dtype) if parts == 2 else flat
    with np.errstate(all="ignore"):
        wide = numbers.astype("f8")
        narrow = to_format(wide, form) if form.top is None else in_blocks(wide, 256 * parts, form)
        return narrow.astype(numbers.dtype).view(flat.dtype).reshape(np.shape(x))


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def drawn(shape: Any, dtype: str, seed: int = 0) -> list[Any]:
    """Contributions whose magnitudes differ within a block, and by more from one block to the next."""
    rng = np.random.default_rng(seed)
    span = 4 if dtype == "float16" else 12
    made = []
    for _ in range(MICRO):
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-span, span, shape)
        blocks = np.arange(x.size).reshape(x.shape) // 200
        x = x * 2.0 ** (blocks % 7 - 3 if dtype == "float16" else 5 * (blocks % 7) - 15)
        if dtype.startswith("complex"):
            x = x + 1j * rng.standard_normal(shape)
        made.append(np.asarray(x).astype(dtype_of(dtype)))
    return made


def in_runs(k: int, ranks: int) -> int:
    return k * ranks // MICRO


def round_robin(k: int, ranks: int) -> int:
    return (ranks - 1 - k) % ranks


def uneven(k: int, ranks: int) -> int:
    """The last rank has most, and of three or more the first one nothing."""
    return min(ranks - 1, 1 if k == 0 else ranks - 1)


DEALINGS: tuple[Dealing, ...] = (in_runs, round_robin, uneven)


def summed(group: dist.Group, arrays: Sequence[Any], order: Any, owner: Dealing, **options: Any) -> Any:
    """The sum of arrays of which each rank has those that it owns."""
    mine = [k for k in range(len(arrays)) if owner(k, group.size) == group.rank]
    if order == "key":
        options["keys"] = mine
    if (weights := options.pop("weights", None)) is not None:
        options["weights"] = [weights[k] for k in mine]
    return dist.add_n([arrays[k] for k in mine], group, order, **options)


def alone(arrays: Sequence[Any], order: str, wire: str, wire_out: str | None = None, **options: Any) -> Any:
    """The sum of one process: of all contributions, rounded first."""
    arrays = [rounded(x, wire) for x in arrays]
    total = np.empty(arrays[0].shape, arrays[0].dtype)
    real = not np.iscomplexobj(total)
    if wire_out is not None and FORMATS[wire_out].top is None and real:  # it is rounded once
        options["out"] = np.empty(total.shape, dtype_of(wire_out))
    if order == "exact":
        options["accumulate"] = "exact"
    elif real:
        options["accumulate"] = "float32" if total.dtype.itemsize < 4 else total.dtype
    total[...] = fanin.add_n(arrays, **options)
    return total if wire_out is None else rounded(total, wire_out)


WEIGHTS = [3.0, 0.5, -1.25, 7.0, 1 / 3, 1e-3, 2.0, 0.0]

#: The options of a sum, but for `wire`.
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"wire_out": "wire"}, {"scale": 1 / 3, "weights": WEIGHTS, "mean": True})


def options_of(variant: int, wire: str) -> dict[str, Any]:
    """The options of a variant; sums travel as their terms, where `wire_out` is given."""
    options = dict(VARIANTS[variant])
    if "wire_out" in options:
        options["wire_out"] = wire
    return options


@functools.cache
def expected(wire: str, dtype: str, shape: Any, order: str, variant: int) -> Any:
    return alone(drawn(shape, dtype), order, wire, **options_of(variant, wire))


def wrongs(group: dist.Group, wire: str, dtype: str, shape: Any, orders: Sequence[str] = ("key", "exact")) -> list[str]:
    """The sums of this rank that have other bits than those of one process."""
    wrong, arrays = [], drawn(shape, dtype)
    for order, owner, variant in itertools.product(orders, DEALINGS, range(len(VARIANTS))):
        one = expected(wire, dtype, shape, order, variant)
        got = summed(group, arrays, order, owner, wire=wire, **options_of(variant, wire))
        if bits(np.asarray(got)) != bits(one) or got.dtype != one.dtype:
            wrong.append(f"{wire} {dtype} {shape} {order} {owner.__name__} {VARIANTS[variant]}")
    return wrong
