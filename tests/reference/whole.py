"""What one list of contributions sums to: a description of the sum as a whole, without a buffer's history.

No order of arrival, no budget and no way of bringing contributions in occurs here: a list in key order, a declaration
and the options of one take give one `Expected`. Values are those of `reference.buffer`'s left fold; exact sums are
fractions, rounded once.

1. A sum as it comes back.
2. Exact sums.
3. Statistics.
4. Errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from fanin._interop.protocols import DType
from fanin.slots import Slot
from reference.buffer import Gradient, InputBuffer, Sum, array_in, entries_in
from reference.numbers import (
    LOW,
    Array,
    Entries,
    Reached,
    accumulation,
    each,
    kind,
    nearest,
    need,
    promotion,
    rounded,
    scaled,
)

# ---------------------------------------------------------------- 1. A sum as it comes back


@dataclass(frozen=True)
class Figures:
    """The statistics of a sum."""

    count: tuple[int, ...]  # elements; of a sparse sum its stored entries, duplicates merged or not
    sumsq: float
    absmax: float
    nonfinite: int
    norm: float
    #: the place in the list of the first contribution that stores an inf or NaN; None: there is none (D35)
    first_bad: int | None


@dataclass(frozen=True)
class Expected:
    """A sum: `value` is what comes back, up to the memory that it is in."""

    value: Any  # an array, a scalar, a sparse gradient, a Zero, an object, None
    same: int | None = None  # the place of the contribution that comes back as itself (A14)
    dtype: DType | None = None
    figures: Figures | None = None
    merged: Any = None  # of a sparse one whose entries are not in order: what it is as a copy that is (D12)
    strides: tuple[int, ...] | None = None  # of a dense one: 0 along expanded axes (A13), else of fresh memory (D16)


def expected(
    terms: Sequence[Any],
    slot: Slot,
    *,
    scale: Any = None,
    writable: bool = False,
    out: Array | None = None,
    weights: Sequence[Any] | None = None,
    mean: bool = False,
) -> Expected:
    """The sum of `terms` in their order, or their mean; raises what adding or taking it raises."""
    total = total_of(terms, slot, scale, out, weights, mean)
    if total.form == "undefined":
        return Expected(None)
    divisor = divisor_of(len(terms), weights) if mean else None
    anew = writable or scale is not None or out is not None or (mean and total.form != "zero")
    same = None if anew else place_of(total.result(), terms)
    exact = slot.accumulate == "exact" and total.form != "object" and kind(total.dtype) in "fc"
    if total.form == "object":
        return Expected(total.result(divisor=divisor), place_of(total.value, terms) if divisor is None else None)
    dtype = total.dtype if out is None else out.dtype
    if total.form == "zero" and out is None:
        zero: Any = total.result()
        return Expected(
            zero, place_of(zero, terms), dtype, figures_of(np.zeros(math.prod(zero.shape), dtype), total, terms)
        )
    total.check(scale)
    value = total.finished(scale, out, divisor)
    one = len(total.main) == 1 and scale is None and out is None and not mean and not total.main[0].weighty
    if exact and total.form != "zero" and not one:
        value = exactly(total, scale, out, divisor)
    if isinstance(value, Entries):
        first = total.main[0]
        merged = entries_in(exactly(total, scale, None)) if exact else merged_of(total, scale, dtype, divisor)
        alone = len(total.main) == 1 and scale is None and not mean  # a product has the entries of its term
        plain = value if one or alone else value.coalesced()
        sparse = terms[same] if same is not None else plain.like(first.source, first.shape)
        figures = figures_of(merged.values, total, terms, (value.values.size,), exact)
        return Expected(sparse, same, dtype, figures, merged=merged.like(first.source, first.shape))
    figures = figures_of(array_in(value), total, terms, exact=exact)
    if isinstance(total.value, Entries):
        entries = running(total)
        figures = replace(figures, count=(*figures.count, entries.values.size, entries.coalesced().values.size))
    if same is not None:
        return Expected(terms[same], same, dtype, figures, strides=np.asarray(terms[same]).strides)
    if out is None and all(g.scalar for g in total.main):
        python = all(g.scalar == "python" for g in total.main)
        return Expected(value.item() if python else value[()], None, dtype, figures)
    strides = None if out is not None else np.asarray(total.result(scale, writable, divisor)).strides
    if strides is not None:  # D16: a partial one is a dense one in C order
        kind_of_first = next((g.form for g in total.main if g.form in ("dense", "partial")), "")
        strides = np.empty(np.shape(value), dtype).strides if kind_of_first == "partial" else strides
    return Expected(value, None, dtype, figures, strides=strides)


def running(total: Sum) -> Entries:
    """The entries of a sparse sum in its accumulation dtype."""
    return entries_in(total.widened(total.slot.accumulate or accumulation(total.dtype, None))[0])


def merged_of(total: Sum, scale: Any, dtype: DType, divisor: Fraction | None) -> Entries:
    if divisor is not None:
        return entries_in(total.finished(scale, None, divisor))
    value = running(total).coalesced()
    return (value if scale is None else value.map(scaled, scale)).map(rounded, dtype)


def divisor_of(n: int, weights: Sequence[Any] | None) -> Fraction:
    """W3: the sum of the weights of n contributions."""
    each = [parts_of(1 if w is None else w) for w in weights or [None] * n]
    divisor = sum((Fraction(re) for re, _ in each), Fraction(0))
    need(not sum((Fraction(im) for _, im in each), Fraction(0)), ValueError, "the weights have a sum that is not real")
    if not divisor:
        raise ZeroDivisionError("the weights sum to 0")
    return divisor


def total_of(
    terms: Sequence[Any],
    slot: Slot,
    scale: Any,
    out: Array | None,
    weights: Sequence[Any] | None = None,
    mean: bool = False,
) -> Sum:
    """The left fold of the list, in the accumulation dtype; raises what adding and taking the list raises, an error of
    an add with the place of its contribution.
    """
    exact = slot.accumulate == "exact"
    buffer = InputBuffer([replace(slot, accumulate=None) if exact else slot])
    for i, x in enumerate(terms):
        try:
            buffer.add(0, x, weight=weights[i] if weights else None, exact=exact)
        except Exception as e:
            e.place = i  # type: ignore[attr-defined]
            raise
    if mean:
        check_mean(buffer, exact, len(terms), weights)
    buffer._checked([0], [out], scale)
    return buffer.passes[0].whole()


def check_mean(buffer: InputBuffer, exact: bool, n: int, weights: Sequence[Any] | None) -> None:
    """W3, W4: whether the mean can be taken."""
    came = buffer.passes[0]
    forms = {g.form for g in came.came.values()} - {"undefined"}
    if not forms:
        return
    if came.types():
        dtype = buffer.slots[0].dtype or promotion(came.types())
        need(kind(dtype) in "fc", ValueError, f"a mean of {dtype.name}")
        need(not exact or "sparse" not in forms, TypeError, "an exact mean takes dense gradients alone")
    divisor_of(n, weights)


def place_of(x: object, terms: Sequence[object]) -> int | None:
    return next((i for i, term in enumerate(terms) if term is x and x is not None), None)


# ---------------------------------------------------------------- 2. Exact sums


def exact_sum(
    numbers: Sequence[float],
    scale: Fraction,
    name: str,
    weights: Sequence[Any] | None = None,
    divisor: Fraction | None = None,
) -> float:
    """The sum of real numbers times their weights, over a divisor, times a factor, rounded once (D25, W2)."""
    by = [1.0 if w is None else float(w) for w in weights or [None] * len(numbers)]
    pairs = list(zip(numbers, by, strict=True))
    over = 1.0 if divisor is None or divisor > 0 else -1.0
    infinite = {math.copysign(1, x) * w * math.inf for x, w in pairs if math.isinf(x)}  # of 0 * inf NaN
    if any(map(math.isnan, (*numbers, *infinite))) or len(infinite) == 2:
        return math.nan
    if infinite:
        return infinite.pop() * over * float(scale)
    total = weighted_total(numbers, by) * scale
    if total:
        return nearest(total if divisor is None else total / divisor, name)
    negative = bool(pairs) and all(not (x and w) and math.copysign(1, x) * math.copysign(1, w) < 0 for x, w in pairs)
    return (-0.0 if negative else 0.0) * over * float(scale)


def parts_of(x: Any) -> tuple[float, float]:
    number = complex(x)
    return number.real, number.imag


def exactly(total: Sum, scale: Any, out: Array | None, divisor: Fraction | None = None) -> Array | Entries:
    """The exact sum of an exact slot."""
    dtype, into = total.dtype, total.dtype if out is None else out.dtype
    cast = [converted(g, dtype) for g in total.main]
    shape = total.main[0].shape
    found: dict[tuple[int, ...], list[Any]] = {}
    rule = (into, 1 if scale is None else scale, kind(dtype) != "c")
    entries = [x for x in cast if isinstance(x, Entries)]
    if not entries:
        weights = [g.weight for g in total.main]
        return each(lambda *arrays: exact_elements(arrays, *rule, weights, divisor), *map(array_in, cast))
    by: dict[tuple[int, ...], list[Any]] = {}
    for g, x in zip(total.main, cast, strict=True):
        if isinstance(x, Entries):
            whole = x if out is None and len(entries) == len(cast) and one_kind(entries) else x.as_coo()
            for n in range(len(whole.values)):
                found.setdefault(tuple(whole.index[:, n]), []).append(whole.values[n])
                by.setdefault(tuple(whole.index[:, n]), []).append(g.weight)
        else:
            for index in np.ndindex(shape):
                found.setdefault(index, []).append(x[index])
                by.setdefault(index, []).append(g.weight)
    if len(entries) < len(cast) or out is not None:
        total_array = np.zeros(shape, into)
        for index, some in found.items():
            total_array[index] = exact_element(some, *rule, by[index], divisor)
        return total_array + 0 if len(entries) == len(cast) else total_array  # sparse ones add to a zero
    whole = entries[0] if one_kind(entries) else entries[0].as_coo()
    by_column = whole.format in ("csc", "bsc")
    order = sorted(found, key=lambda at: at[::-1] if by_column else at)
    values = np.zeros((len(order), *whole.values.shape[1:]), into)
    for n, at in enumerate(order):
        for inside in np.ndindex(values.shape[1:]):
            values[(n, *inside)] = exact_element([np.asarray(x)[inside] for x in found[at]], *rule)
    places = np.array(order, np.int64).reshape(len(order), len(whole.index)).T
    return Entries(whole.format, places, values)


def one_kind(entries: list[Entries]) -> bool:
    return len({x.kind for x in entries}) == 1


def converted(g: Gradient, dtype: DType) -> Array | Entries:
    """In the sum's dtype, but for a Python float, and a low float that was summed to a shape (D7): these are as they
    are.
    """
    if g.scalar == "python" and kind(g.array.dtype) in "fc":
        return g.array
    reduced = isinstance(g.value, np.ndarray) and shape_of(g) != g.shape
    if reduced and g.type in LOW:
        return rounded(g.array, accumulation(dtype, None))
    value: Array | Entries | Reached = g.cast(dtype)
    return value.dense() if isinstance(value, Reached) else value  # P5


def shape_of(g: Gradient) -> tuple[int, ...]:
    """That of the contribution as it came."""
    return tuple(getattr(g.source, "shape", ()))


def exact_elements(arrays: Sequence[Array], *rule: Any) -> Array:
    total = np.zeros(arrays[0].shape, rule[0])
    for index in np.ndindex(total.shape):
        total[index] = exact_element([x[index] for x in arrays], *rule)
    return total


def exact_element(
    some: Sequence[Any],
    into: DType,
    scale: Any,
    real_sum: bool,
    weights: Sequence[Any] | None = None,
    divisor: Fraction | None = None,
) -> Any:
    factor = [Fraction(float(part)) for part in parts_of(scale)]
    more = (weights, divisor)
    if into.kind != "c":
        return into.type(exact_sum([float(x) for x in some], factor[0], into.name, *more))
    name = "float32" if into.name == "complex64" else "float64"
    if real_sum:
        return into.type(exact_sum([float(x) for x in some], factor[0], name, *more))
    (real, by_real), (imaginary, by_imaginary) = products_of(some, weights)
    if not factor[1]:
        one_part = exact_sum(real, factor[0], name, by_real, divisor)
        return into.type(complex(one_part, exact_sum(imaginary, factor[0], name, by_imaginary, divisor)))
    if not np.isfinite([*real, *imaginary]).all():
        one = Fraction(1)
        x, y = exact_sum(real, one, name, by_real, divisor), exact_sum(imaginary, one, name, by_imaginary, divisor)
        re, im = map(float, factor)
        return into.type(complex(x * re - y * im, x * im + y * re))
    over = 1 if divisor is None else divisor
    a, b = weighted_total(real, by_real) / over, weighted_total(imaginary, by_imaginary) / over
    c, d = factor
    return into.type(complex(nearest(a * c - b * d, name), nearest(a * d + b * c, name)))


#: Real numbers, and the real weights by which they are multiplied.
Products = tuple[list[float], list[float]]


def products_of(some: Sequence[Any], weights: Sequence[Any] | None) -> tuple[Products, Products]:
    """What the real parts, and the imaginary ones, of products with complex weights are sums of."""
    real: Products = [], []
    imaginary: Products = [], []
    for z, w in zip(some, weights or [None] * len(some), strict=True):
        (x, y), (u, v) = parts_of(z), parts_of(1 if w is None else w)
        terms = [(real, x, u), (imaginary, y, u)]
        if v:
            terms += [(real, y, -v), (imaginary, x, v)]
        for (numbers, by), number, weight in terms:
            numbers.append(number)
            by.append(weight)
    return real, imaginary


def weighted_total(numbers: Sequence[float], by: Sequence[float]) -> Fraction:
    return sum((Fraction(x) * Fraction(w) for x, w in zip(numbers, by, strict=True)), Fraction(0))


# ---------------------------------------------------------------- 3. Statistics


def figures_of(
    value: Array, total: Sum, terms: Sequence[Any], stored: tuple[int, ...] = (), exact: bool = False
) -> Figures:
    """Of the elements of a sum as it was rounded; of a sparse one those of its merged entries."""
    dense = np.asarray(value)
    size = np.abs(dense.astype(np.complex128 if dense.dtype.kind == "c" else np.float64)).reshape(-1)
    finite = size[np.isfinite(size)]
    absmax, nonfinite = float(max(finite, default=0)), len(size) - len(finite)
    with np.errstate(all="ignore"):
        squares = math.fsum(x * x for x in map(float, finite)) if absmax < 1e150 else math.inf
    norm = math.hypot(*map(float, finite))
    one = len(total.main) == 1  # which is measured as the sum is
    if one and exact and isinstance(total.main[0].value, Entries):
        found = total.main if not_finite_exactly(total) else ()
    else:
        found = tuple(g for g in total.main if not_finite(g, one))
    bad = found[0].source if found and nonfinite else None
    return Figures((dense.size, *stored), squares, absmax, nonfinite, norm, place_of(bad, terms))


def not_finite_exactly(total: Sum) -> bool:
    """Whether the only contribution to an exact sum, a sparse one, has an inf or a NaN among its elements."""
    elements = entries_in(exactly(replace(total, terms=total.main), None, None)).values
    return not np.isfinite(elements.astype(np.complex128)).all()


def not_finite(g: Gradient, merged: bool) -> bool:
    """Whether a contribution has an inf or a NaN among its elements, or, not `merged`, its stored numbers."""
    if isinstance(g.product, Reached):
        return not np.isfinite(g.product.whole.astype(np.complex128)).all()
    if g.product is not None:  # W6
        value = g.product.coalesced().values if merged and isinstance(g.product, Entries) else g.product
        value = value.values if isinstance(value, Entries) else value
        return not np.isfinite(array_in(value).astype(np.complex128)).all()
    if isinstance(g.value, Reached):
        return not np.isfinite(g.value.whole.astype(np.complex128)).all()
    if not isinstance(g.value, Entries):
        return g.form == "dense" and not np.isfinite(g.array.astype(np.complex128)).all()
    dtype = g.value.values.dtype
    values = g.value
    if merged:
        values = values.map(rounded, accumulation(dtype, None)).coalesced().map(rounded, dtype)
    return not np.isfinite(values.values.astype(np.complex128)).all()


# ---------------------------------------------------------------- 4. Errors


def refused(
    terms: Sequence[Any],
    slot: Slot,
    kind: type[BaseException],
    named: Iterable[int],
    weights: Sequence[Any] | None = None,
) -> bool:
    """Whether an error of this type may name one of the contributions at these places: one that is refused alone or
    beside one other. Which of two comes last is the way's own affair.
    """
    for chosen in beside(len(terms), named):
        try:
            some = [weights[i] for i in chosen] if weights else None
            total_of([terms[i] for i in chosen], slot, None, None, some)
        except Exception as e:
            if type(e) is kind:
                return True
    return False


def beside(n: int, places: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Each place alone, and with each other one, in both orders."""
    some = list(places)
    yield from ((i,) for i in some)
    for i in some:
        for j in range(n):
            if i != j:
                yield i, j
                yield j, i
