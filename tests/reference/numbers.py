"""Arithmetic of sums, for `reference.buffer`.

1. Dtypes: that of a sum (A10), that in which it runs (A11).
2. Arrays: rounding, adding, summing to a shape.
3. Sparse gradients: entries in their order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from fanin._core import DTypeError
from fanin._interop.protocols import DType, NDArray
from fanin.slots import Sparse

Array = NDArray

Shape = tuple[int, ...]


def need(fact: object, error: type[Exception], text: str) -> None:
    if not fact:
        raise error(text)


# ---------------------------------------------------------------- 1. Dtypes

LOW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")  # but for the first, these are ml_dtypes's
NAMES = {"bool", *LOW, *(f"{k}{n}" for k in ("int", "uint") for n in (8, 16, 32, 64))}
NAMES |= {"float32", "float64", "complex64", "complex128"}
WEAK = {"int": "int64", "float": "float64", "complex": "complex128"}  # Python scalars: what they are alone (D5)
ORDER = "buifc"  # D6: casts go to the right, or stay


def dtype_of(name: Any) -> DType:
    """The dtype of a name, a NumPy or a torch dtype; DTypeError for those without sums, ValueError for no dtype."""
    if isinstance(name, str | np.dtype) and name in SUMMED:
        return SUMMED[name]
    text = str(name).removeprefix("torch.")
    if text in LOW[1:]:
        need("ml_dtypes" in sys.modules, ValueError, f"dtype {text} is ml_dtypes's, which is not imported")
        name = getattr(sys.modules["ml_dtypes"], text)
    try:
        dtype: DType = np.dtype(name if text in LOW[1:] or text not in NAMES else text)
    except TypeError as e:
        raise ValueError(f"unknown dtype {name!r}") from e
    need(dtype.name in NAMES and dtype.isnative, DTypeError, f"arrays of dtype {dtype} are not summed")
    return dtype


SUMMED: dict[Any, DType] = {}
SUMMED |= {name: dtype_of(name) for name in NAMES}
SUMMED |= {dtype: dtype for dtype in SUMMED.values()}


@cache
def name_of(dtype: DType) -> str:
    """Its name, which NumPy makes anew each time."""
    return dtype.name


def kind(dtype: DType) -> str:
    return "f" if name_of(dtype) in LOW else dtype.kind


def promotion(types: Collection[str]) -> DType:
    """A10, D4, D5: the dtype of a sum of all of these at once; "int", "float", "complex" are Python scalars."""
    return promoted(frozenset(types))


@cache
def promoted(types: frozenset[str]) -> DType:
    strong, weak = {t for t in types if t not in WEAK}, [t for t in WEAK if t in types]
    need(not strong >= set(LOW[2:]), ValueError, "two kinds of float8 have no common dtype")
    if strong >= {"float16", "bfloat16"}:
        strong.add("float32")
    plain = [np.dtype(t) for t in strong if t not in LOW[1:]]
    low = [t for t in LOW[1:] if t in strong]  # they vanish beside other floats, integers vanish beside them
    if plain and (not low or any(d.kind in "fc" for d in plain)):
        dtype: DType = np.result_type(*plain)
    else:
        dtype = dtype_of((low or [WEAK[t] for t in weak])[0])
    for t in weak:
        if kind(dtype) in {"int": "b", "float": "bui", "complex": "buif"}[t]:
            single = t == "complex" and name_of(dtype) in (*LOW, "float32")
            dtype = np.dtype("complex64" if single else WEAK[t])
    return dtype


def accumulation(dtype: DType, wish: DType | None) -> DType:
    """A11, D2: the dtype in which a sum of `dtype` runs; one that is wished for must hold it, and be of its kind."""
    if wish is None:
        return np.dtype(np.float32) if name_of(dtype) in LOW else dtype
    kin = kind(dtype).replace("u", "i") == kind(wish).replace("u", "i")
    holds = kin and promotion({name_of(dtype), name_of(wish)}) == wish
    need(holds, ValueError, f"a sum of {dtype.name} cannot be accumulated in {wish.name}")
    return wish


# ---------------------------------------------------------------- 2. Arrays


def expanded(x: Array) -> set[int]:
    return {i for i in range(x.ndim) if x.strides[i] == 0 and x.shape[i] > 1}


def compact(x: Array, axes: set[int]) -> Array:
    return x[tuple(slice(0, 1) if i in axes else slice(None) for i in range(x.ndim))]


def each(f: Callable[..., object], *arrays: Array) -> Array:
    """f of arrays of one shape. Along axes where each merely repeats itself, so does the result (A13)."""
    axes = set.intersection(*map(expanded, arrays))
    with np.errstate(all="ignore"):
        result = np.asarray(f(*(compact(x, axes) for x in arrays)))
    return np.broadcast_to(result, arrays[0].shape) if axes else result


def to_odd(x: Array) -> Array:
    """float32 whose last bit is set if it is not exact: rounding it further rounds x once."""
    wide = x.astype(np.longdouble)
    near = wide.astype(np.float32)
    near = np.where(abs(near) > abs(wide), np.nextafter(near, np.float32(0)), near)
    return np.asarray(near.view(np.uint32) | ((near != wide) & np.isfinite(wide))).view(np.float32)


def rounded(x: Array, dtype: DType) -> Array:
    """x in `dtype`, to nearest even where it does not fit (D9); integers wrap."""

    def convert(x: Array) -> Array:
        if x.dtype == np.bool_:
            x = x.view(np.uint8) != 0  # for every byte
        if name_of(x.dtype) in LOW:
            x = x.astype(np.float32)
        if name_of(dtype) in LOW[1:] and x.dtype != np.float32:
            x = to_odd(x)
        return x.astype(dtype)

    return x if x.dtype == dtype != np.bool_ else each(convert, x)


def plus(a: Array, b: Array) -> Array:
    return each(np.logical_or if a.dtype == np.bool_ else np.add, a, b)


def put_plus(into: Array, index: Array | tuple[Array, ...], values: Array) -> None:
    """into[index] += values, one entry after the other, also where an index comes twice (D12)."""
    with np.errstate(all="ignore"):
        (np.logical_or if into.dtype == np.bool_ else np.add).at(into, index, values)


def smallest_normal(dtype: DType) -> float:
    """The smallest number of a float dtype that has all of its digits."""
    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


def scale_dtype(scale: Any, dtype: DType) -> DType:
    """D10: the dtype in which a sum is multiplied: its own, unless that has no such factor, or not all of its bits."""
    if kind(dtype) not in "fc" or name_of(dtype) in ("float64", "complex128"):
        return dtype
    one: DType = np.dtype(np.float32) if dtype.kind == "c" else dtype
    parts = [float(x) for x in (scale.real, scale.imag)] if dtype.kind == "c" else [float(scale)]
    with np.errstate(all="ignore"):
        large = any(math.isfinite(x) and not np.isfinite(rounded(np.asarray(x), one).astype(float)) for x in parts)
    small = any(0 < abs(x) < smallest_normal(one) for x in parts)
    if not (large or small):
        return dtype
    return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)


def scaled(x: Array, scale: Any) -> Array:
    """D10: x times scale, in x's dtype, or in a wider one that has the factor."""
    if x.dtype.kind == "b":
        return each(np.logical_and, x, np.broadcast_to(bool(scale), x.shape))
    x = rounded(x, scale_dtype(scale, x.dtype))
    if x.dtype.kind != "c":
        return each(np.multiply, x, np.broadcast_to(rounded(np.asarray(scale), x.dtype), x.shape))
    c, d = (x.real.dtype.type(s) for s in (scale.real, scale.imag))

    def turned(x: Array) -> Array:
        product = np.empty_like(x)
        product.real, product.imag = x.real * c - x.imag * d, x.real * d + x.imag * c
        return product

    return each(turned, x)


def part_of(dtype: DType) -> DType:
    """The dtype of the parts of complex numbers."""
    return np.dtype({"complex64": "float32", "complex128": "float64"}.get(name_of(dtype), dtype))


def weighed(x: Array, weight: Any) -> Array:
    """W1: a term times its weight: both rounded to x's dtype, and the product, too."""
    if weight is None:
        return x
    if x.dtype.kind == "b":
        return each(np.logical_and, x, np.broadcast_to(bool(weight), x.shape))
    if kind(x.dtype) in "ui":
        return each(np.multiply, x, np.broadcast_to(np.asarray(int(weight)).astype(x.dtype), x.shape))
    if complex(weight).imag:
        return scaled(x, complex(weight))
    by = rounded(np.asarray(complex(weight).real), part_of(x.dtype))
    return in_parts(np.multiply, x, by)


def in_parts(f: Callable[..., Array], x: Array, by: Array) -> Array:
    """f of the parts of each number, and a real number."""
    if x.dtype.kind != "c":
        return each(f, x, np.broadcast_to(by, x.shape))

    def both(x: Array) -> Array:
        made = np.empty_like(x)
        made.real, made.imag = f(x.real, by), f(x.imag, by)
        return made

    return each(both, x)


def divisor_dtype(divisor: Fraction, dtype: DType) -> DType:
    """D10, W3: the dtype in which a mean is divided."""
    return scale_dtype(complex(float(divisor)) if dtype.kind == "c" else float(divisor), dtype)


def divided(x: Array, divisor: Fraction) -> Array:
    """W3: over the divisor, which is rounded once."""
    x = rounded(x, divisor_dtype(divisor, x.dtype))
    part = part_of(x.dtype)
    by = np.asarray(nearest(divisor, name_of(part))).astype(part)
    return in_parts(np.divide, x, by)


#: Bits of a number of each float dtype, its smallest exponent, its largest number.
FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float8_e4m3fn": (4, -6, 448.0),
    "float8_e5m2": (3, -14, 57344.0),
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
    "float64": (53, -1022, float.fromhex("0x1.fffffffffffffp1023")),
}


def nearest(x: Fraction, name: str) -> float:
    """The number of a dtype that is nearest to x, of two the even one."""
    bits, least, largest = FORMATS[name]
    if not x:
        return 0.0
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, least) - bits + 1)
    near = round(x / step) * step
    if abs(near) > Fraction(largest):
        return math.nan if name == "float8_e4m3fn" else math.inf if x > 0 else -math.inf
    return float(near) if near else math.copysign(0.0, 1 if x > 0 else -1)


def reduction(dtype: DType) -> DType:
    """D7: the dtype in which arrays are summed to a shape."""
    return np.dtype({"f": "float64", "c": "complex128"}.get(kind(dtype), dtype))


def sum_to(x: Array, shape: Shape) -> Array:
    """A9, D7: x summed to a shape that broadcasts to its own."""
    lead = x.ndim - len(shape)
    axes = [i for i in range(x.ndim) if i < lead or x.shape[i] != shape[i - lead]]
    terms = np.moveaxis(x, axes, range(len(axes)))
    terms = terms.reshape(math.prod(terms.shape[: len(axes)]), *terms.shape[len(axes) :])
    terms = rounded(terms, reduction(x.dtype))
    return dealt(terms).reshape(shape) if len(terms) else np.zeros(shape, terms.dtype)


def fold(terms: Array | list[Array]) -> Array:
    """One after the other."""
    many = np.asarray(terms)
    with np.errstate(all="ignore"):
        whole = (np.logical_or if many.dtype == np.bool_ else np.add).accumulate(many, axis=0)
    return np.asarray(whole[-1])


def entries_to(x: Entries, outer: Shape, shape: Shape) -> Array:
    """A9, D7: the stored entries of an array of shape `outer`, summed to a shape in their order."""
    lead = len(outer) - len(shape)
    index = x.as_coo().index[lead:] * (np.array(shape, int) != 1).reshape(-1, 1)
    total = np.zeros(shape, reduction(x.values.dtype))
    put_plus(total, tuple(index), rounded(x.as_coo().values, total.dtype))
    return total


def dealt(terms: Array) -> Array:
    """D7: up to 256 one after the other; more are dealt to 32 lanes, 8192 at a time; then runs of 256 sums."""
    if len(terms) <= 256:
        return fold(terms)
    groups = [terms[k : k + 8192] for k in range(0, len(terms), 8192)]
    sums = [fold([fold(g[lane::32]) for lane in range(min(32, len(g)))]) for g in groups]
    while len(sums) > 1:
        sums = [fold(sums[k : k + 256]) for k in range(0, len(sums), 256)]
    return sums[0]


# ---------------------------------------------------------------- 3. Sparse gradients


@dataclass(frozen=True)
class Entries:
    """The stored entries, in order: entry i, a number or a dense block values[i], is at index[:, i]."""

    format: str
    index: Array
    values: Array

    @property
    def kind(self) -> str:
        return f"{self.format} {len(self.index)} {self.values.shape[1:]}"

    def map(self, f: Callable[..., Array], *args: object) -> Entries:
        return replace(self, values=f(self.values, *args))

    def cells(self, dense: Array) -> Array:
        """A view of a dense array in which index[:, i] is the place of entry i."""
        if self.format not in ("bsr", "bsc"):
            return dense
        (h, w), (rows, columns) = self.values.shape[1:], dense.shape
        return dense.reshape(rows // h, h, columns // w, w).swapaxes(1, 2)

    def as_coo(self) -> Entries:
        """One entry for each number."""
        block = self.values.shape[1:]
        inside = np.indices(block).reshape(len(block), math.prod(block))
        index, inside = np.repeat(self.index, inside.shape[1], axis=1), np.tile(inside, self.index.shape[1])
        blocks = self.format in ("bsr", "bsc")
        index = index * np.array(block)[:, None] + inside if blocks else np.concatenate([index, inside])
        return Entries("coo", index, self.values.reshape(-1))

    def then(self, other: Entries) -> Entries:
        index = np.concatenate([self.index, other.index], axis=1)
        return Entries(self.format, index, np.concatenate([self.values, other.values]))

    def coalesced(self) -> Entries:
        """Sorted, each index once; what came twice is added in the order in which it came (A5)."""
        order = np.lexsort(self.index if self.format in ("csc", "bsc") else self.index[::-1])  # stable
        index, values = self.index[:, order], self.values[order]
        new = np.ones(len(order), bool)
        new[1:] = (index[:, 1:] != index[:, :-1]).any(axis=0)
        total = values[new]
        put_plus(total, np.cumsum(new)[~new] - 1, values[~new])
        return Entries(self.format, index[:, new], total)

    def before(self, dense: Array) -> Array:
        """The sum of these and then `dense`: where nothing is stored, dense as it is (D12)."""
        me, total = self.coalesced(), np.array(dense, order="C")
        cells, where = me.cells(total), tuple(me.index)
        cells[where] = plus(me.values, cells[where])
        return total

    def after(self, dense: Array) -> Array:
        """The sum of `dense` and then these, one by one."""
        total = np.array(dense, order="C")
        put_plus(self.cells(total), tuple(self.index), self.values)
        return total

    def filled(self, shape: Shape) -> Array:
        return self.coalesced().after(np.zeros(shape, self.values.dtype))

    def placed(self, shape: Shape) -> Array:
        """In an array of zeros, to none of which they are added."""
        me, total = self.coalesced(), np.zeros(shape, self.values.dtype)
        me.cells(total)[tuple(me.index)] = me.values
        return total

    def like(self, source: object, shape: Shape) -> object:
        """As a gradient of the source's family: SciPy's arrays or matrices, or `Sparse`."""
        parts: tuple[Array, ...] = (self.index, self.values)
        if self.format != "coo":
            by_column = self.format in ("csc", "bsc")
            major, minor = self.index[::-1] if by_column else self.index
            lines = shape[by_column] // (self.values.shape[1:] or (1, 1))[by_column]
            parts = (np.cumsum([0, *np.bincount(major, minlength=lines)]), minor, self.values)
        if isinstance(source, Sparse):
            return type(source)(self.format, parts, shape)
        if name_of(self.values.dtype) in LOW:
            return Sparse(self.format, parts, shape)  # which SciPy does not have
        family = "matrix" if type(source).__name__.endswith("_matrix") else "array"
        make = getattr(sys.modules["scipy.sparse"], f"{self.format}_{family}")
        return make((parts[1], tuple(parts[0])) if self.format == "coo" else parts[::-1], shape=shape)


def entries_of(x: Any) -> Entries:
    """The stored entries of the sparse x; ValueError if it contradicts itself."""
    ours = hasattr(x, "parts")
    if not ours and x.format != "coo" and (x.format not in ("csr", "csc", "bsr") or x.ndim != 2):
        x = x.tocoo()  # SciPy's other formats
    if x.format == "coo":
        index, values = x.parts if ours else (np.stack(x.coords), x.data)
        sizes, fits = np.array(x.shape[: len(index)], np.int64), True
    else:
        pointers, minor, values = x.parts if ours else (x.indptr, x.indices, x.data)
        by_column = x.format in ("csc", "bsc")
        sizes, over = np.divmod(x.shape, values.shape[1:] or (1, 1))
        fits = len(pointers) == sizes[int(by_column)] + 1 and pointers[0] == 0 and pointers[-1] == len(minor)
        need(fits and (np.diff(pointers) >= 0).all(), ValueError, f"{x.format}: pointers {pointers} for {x.shape}")
        major = np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))
        index = np.stack([minor, major] if by_column else [major, minor])
        fits = not over.any()
    index, values = np.asarray(index, np.int64), np.asarray(values)
    inside = fits and index.shape[1] == len(values) and (index >= 0).all() and (index < sizes[:, None]).all()
    need(inside, ValueError, f"{x.format}: what is stored does not fit the shape {x.shape}")
    return Entries(x.format, index, values)


# ---------------------------------------------------------------- 4. Partial gradients


@dataclass(frozen=True)
class Reached:
    """An array of which some elements were reached by a term (P1)."""

    whole: Array
    reached: Array  # of bools

    def map(self, f: Callable[..., Array], *args: object) -> Reached:
        return replace(self, whole=f(self.whole, *args))

    def plus(self, other: Reached) -> Reached:
        """Elements that only one has are as they are."""
        both = plus(self.whole, other.whole)
        one = np.where(self.reached, self.whole, other.whole)
        return Reached(np.where(self.reached & other.reached, both, one), self.reached | other.reached)

    def then(self, entries: Entries) -> Reached:
        """Entries one by one; -0 + x is x, so that the first one that reaches an element is stored."""
        nothing = {"f": -0.0, "c": complex(-0.0, -0.0)}.get(kind(self.whole.dtype), 0)
        start = np.where(self.reached, self.whole, np.array(nothing).astype(self.whole.dtype))
        marks = replace(entries, values=np.ones(entries.values.shape, bool)).filled(self.whole.shape)
        return Reached(entries.after(start), self.reached | marks)

    def dense(self) -> Array:
        return np.where(self.reached, self.whole, np.zeros((), self.whole.dtype))


def partial_of(x: Any) -> Reached:
    """What a Partial stands for."""
    values = np.asarray(x.values)
    whole, reached = np.zeros(x.shape, values.dtype), np.zeros(x.shape, bool)
    places = np.arange(whole.size).reshape(x.shape)
    at = x.at
    where = np.diagonal(places, at.offset, at.axis1, at.axis2) if hasattr(at, "offset") else places[at]
    whole.reshape(-1)[where], reached.reshape(-1)[where] = values, True
    return Reached(whole, reached)


def reached_by(x: Array | Entries | Reached, shape: Shape) -> Reached:
    """A term of any form."""
    if isinstance(x, Reached):
        return x
    if isinstance(x, Entries):
        marks = replace(x, values=np.ones(x.values.shape, bool)).filled(shape)
        return Reached(x.placed(shape), marks)
    return Reached(x, np.ones(x.shape, bool))
