"""Rounding to the dtypes as which elements travel, in plain NumPy; and sums over ranks beside those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fanin
from fanin import dist
from kit.values import bits

MICRO = 8  # contributions


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


def of_block(x: Any, form: Format) -> Any:
    """The numbers of one block, rounded."""
    assert form.top is not None
    largest = np.abs(x[np.isfinite(x)]).max(initial=0.0)
    unbounded = form._replace(low=-5000, largest=np.inf)
    exponent = int(np.frexp(to_format(np.float64(largest), unbounded))[1]) - 1 if largest else -127
    exponent = min(max(exponent, -127), 128)
    return np.ldexp(to_format(np.ldexp(x, form.top - exponent), form), exponent - form.top)


def rounded(x: Any, wire: str) -> Any:
    """An array as its owners get it."""
    if np.iscomplexobj(x):
        return x.astype(x.dtype, copy=True) if wire is None else _complex(x, wire)
    form, flat = FORMATS[wire], np.asarray(x).reshape(-1).astype("f8")
    with np.errstate(all="ignore"):
        if form.top is None:
            flat = to_format(flat, form)
        else:
            blocks = [of_block(flat[k : k + 256], form) for k in range(0, len(flat), 256)]
            flat = np.concatenate([np.empty(0), *blocks])
        return flat.astype(x.dtype).reshape(x.shape)


def _complex(x: Any, wire: str) -> Any:
    """Both parts of an element are in one block, so a block has 512 numbers."""
    flat = np.ascontiguousarray(x).reshape(-1)
    numbers, form = flat.view(flat.real.dtype), FORMATS[wire]
    with np.errstate(all="ignore"):
        step = len(numbers) if form.top is None else 512
        runs = [numbers[k : k + step].astype("f8") for k in range(0, len(numbers), step or 1)]
        done = [to_format(run, form) if form.top is None else of_block(run, form) for run in runs]
        return np.concatenate([np.empty(0), *done]).astype(numbers.dtype).view(x.dtype).reshape(x.shape)


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


DEALINGS: tuple[Callable[[int, int], int], ...] = (in_runs, round_robin, uneven)


def summed(group: dist.Group, arrays: Sequence[Any], order: Any, owner: Callable[[int, int], int], **options: Any) -> Any:
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


def wrongs(group: dist.Group, wire: str, dtype: str, shape: Any, orders: Sequence[str] = ("key", "exact")) -> list[str]:
    """The sums of this rank that have other bits than those of one process."""
    wrong = []
    arrays = drawn(shape, dtype)
    for order, owner in itertools.product(orders, DEALINGS):
        for options in ({}, {"wire_out": wire}, {"scale": 1 / 3, "weights": WEIGHTS, "mean": True}):
            expected = alone(arrays, order, wire, **options)
            got = summed(group, arrays, order, owner, wire=wire, **options)
            if bits(np.asarray(got)) != bits(expected) or got.dtype != expected.dtype:
                wrong.append(f"{wire} {dtype} {shape} {order} {owner.__name__} {options}")
    return wrong


WEIGHTS = [3.0, 0.5, -1.25, 7.0, 1 / 3, 1e-3, 2.0, 0.0]
