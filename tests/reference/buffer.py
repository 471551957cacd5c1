"""The whole input buffer in plain NumPy, to be read from top to bottom.

It is an executable description, and the oracle for the C core, bit by bit. It takes host data only: NumPy arrays and
scalars, Python scalars, SciPy's sparse arrays and `Sparse`, symbolic zeros, objects of users. Promotion, rounding and
entries of sparse arrays are in ``numbers.py``. Rule numbers (A5) are those of ``docs/rules.md``, decisions (D3) those
of ``docs/decisions.md``.

1. Two gradients meet: the decision.
2. A gradient, as it was added.
3. A running sum, and one gradient more.
4. The buffer: park, fold, take.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import takewhile
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np

from fanin._core import DTypeError
from fanin._interop.protocols import DType
from fanin._words import counted, type_of
from fanin.slots import Slot, Sparse, Zero
from reference.numbers import (
    NAMES,
    ORDER,
    WEAK,
    Array,
    Entries,
    Reached,
    Shape,
    accumulation,
    compact,
    divided,
    divisor_dtype,
    dtype_of,
    each,
    entries_of,
    entries_to,
    expanded,
    kind,
    name_of,
    need,
    part_of,
    partial_of,
    plus,
    promotion,
    reached_by,
    rounded,
    scale_dtype,
    scaled,
    smallest_normal,
    sum_to,
    weighed,
)

__all__ = ["InputBuffer", "Slot", "Sparse", "Zero"]

# ---------------------------------------------------------------- 1. Two gradients meet: the decision.


class Side(NamedTuple):
    form: str  # undefined, zero, dense, sparse, object
    format: str = ""  # of a sparse one
    reusable: bool = False  # of a dense one: no other code can reach its memory, no other stream uses it


class AccumPlan(NamedTuple):
    action: str  # skip, hand, into old, into new, fresh, merge, merge coo, object
    result: str  # the form of what the slot then holds
    rules: frozenset[str]


def accum(old: Side, new: Side, recording: bool = False) -> AccumPlan:
    """The decision when the slot holds `old` and `new` arrives (A1-A8). The sums below use it; memory is the core's
    matter.
    """

    def plan(action: str, result: str, *rules: str) -> AccumPlan:
        return AccumPlan(action, result, frozenset(rules))

    if new.form == "undefined":
        return plan("skip", old.form, "S2")
    if old.form == "undefined":
        return plan("hand", new.form)
    if new.form == "zero":
        return plan("skip", old.form, "A2")
    if old.form == "zero":
        return plan("hand", new.form, "A2")
    if recording:
        return plan("object", "object", "A1")
    if "object" in (old.form, new.form):
        return plan("object", "object", "A8")
    if old.form == "sparse" and new.form == "sparse":
        return plan("merge", "sparse", "A5") if old.format == new.format else plan("merge coo", "sparse", "A7")
    if old.form == "sparse":
        return plan("into new", "dense", "A3") if new.reusable else plan("fresh", "dense", "A4")
    return plan("into old", "dense", "A6") if old.reusable else plan("fresh", "dense", "A7")


# ---------------------------------------------------------------- 2. A gradient, as it was added


@dataclass(frozen=True, eq=False)
class Gradient:
    source: object  # the added object: returned if it stays alone and unchanged (A14)
    form: str  # undefined, zero, dense, sparse, partial, object
    shape: Shape = ()
    type: str = ""  # its part in the promotion: the name of a dtype; or int, float, complex
    value: object = None  # an array, Entries, the object
    scalar: str = ""  # "python", "numpy"
    intact: bool = True  # not converted
    donated: bool = False
    unshared: bool = False  # donated, or a copy of ours
    weight: Any = None  # W1; None: none was given
    product: object = None  # of a term in a sum: what it added, where a weight multiplies it

    @property
    def array(self) -> Array:
        return array_in(self.value)

    @property
    def weighty(self) -> bool:
        """Whether a weight changes it."""
        return self.weight is not None and self.weight != 1

    def term(self, acc: DType) -> Any:
        """W1: what it adds to a sum that runs in this dtype."""
        value = self.cast(acc)
        if not self.weighty:
            return value
        return value.map(weighed, self.weight) if isinstance(value, Entries | Reached) else weighed(value, self.weight)

    @property
    def format(self) -> str:
        return entries_in(self.value).kind if self.form == "sparse" else ""

    def cast(self, dtype: DType) -> Any:
        """The value in another dtype."""
        return (
            self.value.map(rounded, dtype) if isinstance(self.value, Entries | Reached) else rounded(self.array, dtype)
        )

    @property
    def memory(self) -> list[Array]:
        names = ("data", "indices", "indptr", "row", "col") if self.form == "sparse" else ()
        parts = [
            self.value,
            getattr(self.source, "values", None),
            *getattr(self.source, "parts", ()),
            *(getattr(self.source, n, None) for n in names),
        ]
        return [x for x in parts if isinstance(x, np.ndarray)]


def array_in(value: object) -> Array:
    assert isinstance(value, np.ndarray), "what is dense has an array"
    return value


def entries_in(value: object) -> Entries:
    assert isinstance(value, Entries), "what is sparse has entries"
    return value


def importable(dtype: DType) -> str:
    """The name of an array's dtype."""
    need(name_of(dtype) in NAMES and dtype.isnative, DTypeError, f"arrays of {dtype.str} are not summed")
    return name_of(dtype)


def is_array(x: object) -> bool:
    """NumPy's, and not of a class or dtype that sums in its own way (D14)."""
    if not isinstance(x, np.ndarray | np.generic) or x.dtype == np.object_:
        return False
    own = isinstance(x, np.ndarray) and type(x).__array_ufunc__ is not np.ndarray.__array_ufunc__
    return not own and not isinstance(x, np.ma.MaskedArray | np.matrix)


def read(x: Any, anything: bool = False) -> Gradient:
    """x as a Gradient. TypeError if it is none; with `anything` (for a combine) every object is one."""
    if x is None:
        return Gradient(None, "undefined")
    if type(x) in (bool, int, float, complex):
        weak = type(x).__name__
        need(weak != "int" or -(2**63) <= x < 2**63, OverflowError, f"the integer {x} does not fit int64")
        return Gradient(x, "dense", (), weak, np.array(x, WEAK.get(weak, weak)), "python")
    if is_array(x) and not (anything and not (name_of(x.dtype) in NAMES and x.dtype.isnative)):
        scalar = not isinstance(x, np.ndarray)
        value = np.array(x) if scalar else x.view(np.ndarray)
        return Gradient(x, "dense", value.shape, importable(value.dtype), value, "numpy" if scalar else "")
    if hasattr(x, "format") and (hasattr(x, "parts") or hasattr(x, "tocoo")):
        entries = entries_of(x)
        return Gradient(x, "sparse", tuple(x.shape), importable(entries.values.dtype), entries)
    if type(x).__name__ == "Partial":
        part = partial_of(x)
        return Gradient(x, "partial", tuple(x.shape), importable(part.whole.dtype), part)
    if isinstance(x, Zero):
        return Gradient(x, "zero", tuple(x.shape), dtype_of(x.dtype).name)
    sums = hasattr(x, "__add__") or hasattr(x, "__radd__")
    sums = sums and not isinstance(x, list | tuple | dict | str | bytes | bytearray | set)
    need(
        sums or anything,
        TypeError,
        f"a {type(x).__name__} is no array: pass np.asarray(x); for objects of your own give combine=",
    )
    return Gradient(x, "object", value=x)


def copy_of(x: Any, whole: bool = False) -> Any:
    """Memory of our own, without what an expanded array merely repeats, unless it is to be `whole`."""
    if isinstance(x, np.ndarray):
        return np.array(x, order="C" if expanded(x) else "K", subok=False) if whole else each(np.array, x)
    if hasattr(x, "parts"):
        return type(x)(x.format, tuple(map(np.array, x.parts)), x.shape)
    if hasattr(x, "tocoo"):
        return x.copy() if x.format in ("coo", "csr", "csc", "bsr") else x.tocoo(copy=True)
    return x


def check_weight(g: Gradient, slot: Slot, exact: bool) -> None:
    """W4: whether a contribution takes its weight."""
    if not g.weighty or g.form not in ("dense", "sparse", "partial"):
        return
    dtype = dtype_of(WEAK.get(g.type, g.type))
    floats = kind(dtype) in "fc"
    need(floats or g.scalar != "python", TypeError, "a Python int or bool takes no weight")
    need(not exact or g.form != "sparse", TypeError, "an exact sum takes a weight with dense gradients alone")
    weight = complex(g.weight)
    need(kind(dtype) == "c" or not weight.imag, ValueError, f"expected a real weight, got {g.weight}")
    whole = weight.real == int(weight.real) and -(2**63) <= weight.real < 2**63
    need(floats or whole, ValueError, f"expected an integer as weight, got {g.weight}")
    if floats and not exact:
        acc = part_of(accumulation(dtype, slot.accumulate))
        parts = np.array([weight.real, weight.imag])
        with np.errstate(all="ignore"):
            held = rounded(parts, acc).astype(float)
        need(np.isfinite(held).all(), ValueError, f"the weight {g.weight} is not finite in {acc.name}")
        small = np.abs(parts) < smallest_normal(acc)
        need((~small | (held == parts)).all(), ValueError, f"the weight {g.weight} loses digits in {acc.name}")


def fitted(g: Gradient, slot: Slot, shape: Shape | None) -> Gradient:
    """A9, A10: g summed to the declared shape, cast to the declared dtype. `shape`: the declared, or the first's."""
    if g.form in ("undefined", "object"):
        objects = type(g.source) is np.ndarray and slot.combine is None
        need(not objects or (slot.shape is None and slot.dtype is None), TypeError,
             "expected an array of numbers, as the slot declares its shape or dtype, got one of objects")  # fmt: skip
        return g
    old = dtype_of(WEAK.get(g.type, g.type))
    new = slot.dtype or old
    cast = ORDER.index(kind(old)) <= ORDER.index(kind(new))
    if isinstance(g.source, int) and g.type == "int" and kind(new) in "ui":
        cast = np.iinfo(new).min <= g.source <= np.iinfo(new).max
    need(cast, ValueError, f"expected dtype {name_of(new)}, got {g.type} {g.source if g.scalar else ''}")
    if shape is not None and g.shape != shape:
        fits = slot.shape is not None and len(shape) <= len(g.shape)
        fits = fits and all(a in (1, b) for a, b in zip(shape[::-1], g.shape[::-1], strict=False))
        need(fits, ValueError, f"expected shape {shape}, got {g.shape}")
        if g.form == "zero":
            return replace(g, shape=shape, type=name_of(new), intact=False)
        acc = accumulation(new, None)
        value = g.cast(new)
        value = value.dense() if isinstance(value, Reached) else value  # P5
        total = entries_to(value, g.shape, shape) if isinstance(value, Entries) else sum_to(value, shape)
        value = rounded(np.asarray(total, order="C"), acc)  # D16
        return replace(g, form="dense", shape=shape, type=name_of(new), value=value, intact=False)
    if slot.dtype is None or g.form == "zero" or new == old:
        return g if slot.dtype is None else replace(g, type=name_of(new), intact=new == old)
    return replace(g, type=name_of(new), value=g.cast(new), intact=False)


# ---------------------------------------------------------------- 3. A running sum, and one gradient more


@dataclass(frozen=True, eq=False)
class Sum:
    """The left fold of gradients of a slot, in key order, in the accumulation dtype (D1-D3)."""

    slot: Slot
    recording: bool
    form: str = "undefined"
    value: object = None  # an array or Entries in the accumulation dtype; an object
    stored: int = 0  # of a sparse one: entries after the last coalesce (A5)
    terms: tuple[Gradient, ...] = ()  # the defined terms of the sum
    starts: DType | None = None  # of one term: the dtype that it is rounded to when there is another (D3)
    ahead: tuple[Gradient, ...] = ()  # later ones whose dtypes count already, because a Python int needs them (D5)

    @property
    def dtype(self) -> DType:
        return self.slot.dtype or promotion({g.type for g in (*self.terms, *self.ahead) if g.type})

    @property
    def main(self) -> tuple[Gradient, ...]:
        """The part that is not zero, if there is one."""
        return tuple(g for g in self.terms if g.form != "zero") or self.terms

    @property
    def side(self) -> Side:
        return Side(self.form, entries_in(self.value).kind if self.form == "sparse" else "")

    def plus(self, g: Gradient, ahead: tuple[Gradient, ...] = ()) -> Sum:
        """This sum + g."""
        if "partial" in (self.form, g.form) and {self.form, g.form} <= {"dense", "sparse", "partial"}:
            return self.placed(g, ahead)
        plan = accum(self.side, Side(g.form, g.format), self.recording)
        if g.form == "undefined" or (g.form == "zero" and self.form == "object"):
            return self
        me = replace(self, terms=(*self.terms, g), ahead=ahead, form=plan.result)
        if plan.action == "object":
            return replace(me, value=self.combined(g))
        if g.form == "object":
            return replace(me, value=g.source * g.weight if g.weighty else g.source)
        if self.recording:
            return replace(me, value=g.value if plan.action == "hand" else self.value)
        if g.form == "zero":
            return me  # its dtype counts for what follows, and at the end
        acc = self.slot.accumulate or accumulation(me.dtype, None)
        if plan.action == "hand":
            own = accumulation(dtype_of(WEAK.get(g.type, g.type)), None)
            new = g.term(acc) if g.weighty else g.cast(self.slot.accumulate or np.promote_types(own, acc))
            if g.weighty:
                me = replace(me, terms=(*self.terms, replace(g, product=new)))
            return replace(me, value=new, stored=len(new.values) if isinstance(new, Entries) else 0, starts=acc)
        old, stored = self.started().widened(acc)
        me, new = replace(me, starts=None), g.term(acc)
        if g.weighty:
            me = replace(me, terms=(*self.terms, replace(g, product=new)))
        if isinstance(old, Entries) and isinstance(new, Entries):
            if plan.action == "merge coo":
                old, new = old.as_coo(), new.as_coo()
                stored = len(old.values)
            value = old.then(new)
            if value.format != "coo" or len(value.values) > 2 * stored:  # A5
                value = value.coalesced()
                stored = len(value.values)
            return replace(me, value=value, stored=stored)
        if isinstance(old, Entries):
            return replace(me, value=old.before(array_in(new)))
        return replace(me, value=new.after(array_in(old)) if isinstance(new, Entries) else plus(array_in(old), new))

    def placed(self, g: Gradient, ahead: tuple[Gradient, ...]) -> Sum:
        """P1, P4: this sum + g, of which one is partial: dense once a term reaches every element."""
        me = replace(self, terms=(*self.terms, g), ahead=ahead, starts=None)
        acc = self.slot.accumulate or accumulation(me.dtype, None)
        old, _ = self.started().widened(acc)
        first: Reached = reached_by(old, g.shape)  # type: ignore[arg-type]
        new = g.term(acc)
        if g.weighty:
            me = replace(me, terms=(*self.terms, replace(g, product=new)))
        total = first.then(new) if isinstance(new, Entries) else first.plus(reached_by(new, g.shape))
        if "dense" in (self.form, g.form):
            return replace(me, form="dense", value=total.whole)
        return replace(me, form="partial", value=total)

    def started(self) -> Sum:
        """With a first term that is rounded to the dtype of the sum as it came."""
        if self.starts is None:
            return self
        value = self.value.map(rounded, self.starts) if isinstance(self.value, Entries | Reached) else self.value
        return replace(self, value=rounded(value, self.starts) if isinstance(value, np.ndarray) else value)

    def widened(self, acc: DType) -> tuple[object, int]:
        """The value in another accumulation dtype, and how many entries a sparse one has after its last coalesce."""
        if isinstance(self.value, np.ndarray):
            return rounded(self.value, acc), self.stored  # D3: it continues in another dtype ..
        if isinstance(self.value, Reached):
            return self.value.map(rounded, acc), self.stored
        if isinstance(self.value, Entries) and self.value.values.dtype != acc:
            old = self.value.coalesced().map(rounded, acc)  # .. but sparse entries are added up in theirs first
            return old, len(old.values)
        return self.value, self.stored

    def combined(self, g: Gradient) -> object:
        """A1, A8: this sum + g, by the slot's combine or the objects' own operators."""
        as_it_came = g.intact and g.form != "partial"
        old, new = self.result(), g.source if as_it_came else Sum(self.slot, False).plus(g).result()
        if g.weighty:
            new = new * g.weight
        plain = [read(x, anything=True).form != "object" for x in (old, new)]
        if all(plain):
            shapes = [getattr(x, "shape", ()) for x in (old, new)]
            need(shapes[0] == shapes[1], ValueError, f"expected shape {shapes[0]}, got {shapes[1]}")
            total = operator.add(new, old) if self.form == "sparse" else operator.add(old, new)
        elif self.slot.combine is not None:
            total = self.slot.combine(old, new)
        elif self.form == "sparse" or plain[1]:  # beside an array the object's own method is called, not NumPy's
            first, second = (new, old) if self.form == "sparse" else (old, new)
            total = getattr(type(first), "__add__", lambda *_: NotImplemented)(first, second)
        else:
            radd = getattr(type(new), "__radd__", lambda *_: NotImplemented)
            total = radd(new, old) if plain[0] else operator.add(old, new)
        lost = total is None or total is NotImplemented
        need(not lost, TypeError, f"a {type(old).__name__} and a {type(new).__name__} have no sum; give combine=")
        return total

    def leaves(self, scale: Any = None) -> bool:
        """D5: is the sum of the Python ints that come first more than their dtype holds, and are they all, or what
        follows no integer?
        """
        weak = [g.scalar == "python" and g.form == "dense" and kind(g.array.dtype) in "bui" for g in self.main]
        n = weak.index(False) if False in weak else len(weak)
        follows = self.main[n] if n < len(weak) else None
        if n == 0 or (
            follows and follows.form != "object" and kind(dtype_of(WEAK.get(follows.type, follows.type))) in "bui"
        ):
            return False
        last = (
            len(self.terms)
            if follows is None
            else self.terms.index(follows if follows.form == "object" else self.main[n - 1]) + 1
        )
        while last < len(self.terms) and not ints_fit(self.terms[:last], self.slot):
            last += 1  # an int that does not fit has a later dtype
        dtype = self.slot.dtype or promotion({g.type for g in self.terms[:last] if g.type})
        if kind(dtype) not in "ui":
            return False
        total, ints = 0, False
        for g in self.main[:n]:
            ints = ints or kind(g.array.dtype) != "b"
            total = total + int(g.array) if ints else int(total or g.array)
        if not ints:
            return False
        if scale is not None and follows is None:
            total *= int(scale)
        return not np.iinfo(dtype).min <= total <= np.iinfo(dtype).max

    def check(self, scale: object = None) -> None:
        fits = self.recording or self.form == "object" or not self.leaves(scale)
        need(
            fits,
            OverflowError,
            "the sum of its Python ints does not fit; add floats, or object arrays, whose + has no limit",
        )

    def finished(
        self, scale: Any = None, into: Array | None = None, divisor: Fraction | None = None
    ) -> Array | Entries:
        """Scaled and rounded once (A11, D9, D10), to the sum's dtype or that of `out`; for that it is dense."""
        dtype = self.dtype if into is None else into.dtype
        if self.form == "zero":
            return np.zeros(self.terms[0].shape, dtype)
        self.check(scale)
        acc = self.slot.accumulate or accumulation(self.dtype, None)
        last = acc if scale is None else scale_dtype(scale, acc)
        last = last if divisor is None else np.promote_types(last, divisor_dtype(divisor, acc))
        numbers = all(g.scalar == "python" for g in self.main)  # with symbolic zeros: they keep their value
        value, _ = self.widened(last if numbers else acc)
        if not isinstance(value, Entries):
            dense = value.dense() if isinstance(value, Reached) else array_in(value)
            if divisor is not None:
                dense = divided(rounded(dense, last), divisor)
            return rounded(dense if scale is None else scaled(dense, scale), dtype)
        if divisor is not None:
            value = value.coalesced().map(rounded, last).map(divided, divisor)
        if scale is not None or into is not None or (len(self.main) > 1 and value.values.dtype != dtype):
            value = value.coalesced()
        value = (value if scale is None else value.map(scaled, scale)).map(rounded, dtype)
        return value if into is None else value.after(np.zeros(self.main[0].shape, dtype))

    def result(self, scale: Any = None, own: bool = False, divisor: Fraction | None = None) -> object:
        """The result, of the kind of the first contribution (D15); `own`: in memory of its own."""
        if self.form == "object" and divisor is not None:
            return self.value / float(divisor)  # type: ignore[operator]
        if self.form in ("undefined", "object"):
            return self.value
        self.check(scale)
        g, one, dtype = self.main[0], len(self.main) == 1, self.dtype
        plain = g.intact and g.form != "partial" and not g.weighty and divisor is None
        if one and plain and (scale is None or self.form == "zero") and dtype.name == WEAK.get(g.type, g.type):
            return copy_of(g.source, whole=True) if own and not self.recording else g.source  # A14
        if isinstance(g.source, Zero):
            if one and g.intact and dtype.name == g.type:
                return g.source
            return type(g.source)(g.shape, dtype)
        value = self.finished(scale, divisor=divisor)
        if isinstance(value, Entries):
            return value.like(g.source, g.shape)
        if all(g.scalar for g in self.main):
            return value.item() if all(g.scalar == "python" for g in self.main) else value[()]
        dense = next((g.array for g in self.main if g.form == "dense"), np.empty(value.shape, value.dtype))
        return laid_out(value, dense, set() if own else expanded(value))

    def place(self) -> Array | None:
        """The memory of a donated first gradient, where it is reusable: the sum is written there."""
        if self.form != "dense" or len(self.main) < 2:
            return None
        g, *others = self.main
        if g.form != "dense":
            return None
        fits = g.donated and g.intact and isinstance(g.source, np.ndarray) and gapless(g.array)
        fits = fits and g.array.dtype == array_in(self.value).dtype == self.dtype
        shared = any(np.shares_memory(x, y) for o in others for x in o.memory for y in g.memory)  # D43
        return g.array if fits and not shared else None


def laid_out(value: Array, first: Array, axes: set[int]) -> Array:
    """D16: value in fresh memory, with the axis order of `first`; expanded along `axes` (A13)."""
    base, like = compact(value, axes), compact(first, axes)
    fresh = np.empty_like(like, value.dtype, order="C" if expanded(like) else "K")
    fresh[...] = base
    return np.broadcast_to(fresh, value.shape) if axes else fresh


def before_objects(gradients: Sequence[Gradient]) -> list[Gradient]:
    return list(takewhile(lambda g: g.form != "object", gradients))


def ints_fit(gradients: Sequence[Gradient], slot: Slot) -> bool:
    """D5: does the dtype of these hold each Python int among them?"""
    some = before_objects(gradients)
    types = {g.type for g in some if g.type}
    dtype = slot.dtype or (promotion(types) if types else np.dtype(float))
    ints = [g.source for g in some if isinstance(g.source, int) and g.type == "int"]
    return kind(dtype) not in "ui" or all(np.iinfo(dtype).min <= n <= np.iinfo(dtype).max for n in ints)


def sum_of(total: Sum, gradients: Sequence[Gradient]) -> Sum:
    """total + each of these; a Python int that does not fit the dtype so far has that of the first later gradient with
    which it does (D5).
    """
    for i, g in enumerate(gradients):
        later = before_objects(gradients[i + 1 :])
        known = (*total.terms, g)
        held = next((n for n in range(len(later)) if ints_fit((*known, *later[:n]), total.slot)), len(later))
        objects = total.form == "object" or g.form == "object"
        total = total.plus(g, () if objects or total.recording else tuple(later[:held]))
    return replace(total, ahead=())


def meets(some: Sequence[Array], others: Sequence[Array]) -> bool:
    return any(np.may_share_memory(x, y) for x in some for y in others)


def gapless(x: Array) -> bool:
    """Writable, and any permutation of a dense layout."""
    axes = sorted((s, n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1)
    steps = [x.itemsize * math.prod(n for _, n in axes[:i]) for i in range(len(axes))]
    return x.flags.writeable and [s for s, _ in axes] == steps


# ---------------------------------------------------------------- 4. The buffer: park, fold, take


@dataclass
class Pass:
    """One slot during one pass."""

    total: Sum  # of the keys below `due`
    came: dict[int, Gradient] = field(default_factory=dict)  # A16: by key, in the order of arrival
    keyed: bool = False
    due: int = 0

    def parked(self) -> list[Gradient]:
        return [self.came[k] for k in sorted(self.came) if k >= self.due]

    def whole(self) -> Sum:
        """The sum of all that came, gaps skipped."""
        came = [*self.total.terms, *self.parked()]
        fit = self.total.recording or self.total.form == "object" or ints_fit(came, self.total.slot)
        need(fit, ValueError, "a Python int among its contributions does not fit the dtype of the sum")
        return sum_of(self.total, self.parked())

    def shape(self) -> Shape | None:
        return next((g.shape for g in self.came.values() if g.form not in ("undefined", "object")), None)

    def types(self) -> set[str]:
        return {g.type for g in self.came.values() if g.type}


class InputBuffer:
    """Gradients are added to slots in any order; their sums, left folds in key order, are taken."""

    def __init__(self, slots: object, *, budget: float | Literal["auto"] | None = None, accumulate: object = None,
                 stream: object = None, leaf: bool = False, create_graph: bool = False,
                 name: object = None) -> None:  # fmt: skip
        self.name, self.stream, self.leaf, self.create_graph = str(name or "InputBuffer"), stream, leaf, create_graph
        self.budget = 64 << 20 if budget is None or budget == "auto" else budget  # D23; references are not counted here
        need(self.budget >= 0, ValueError, f"budget: expected a number of bytes >= 0, got {budget}")
        self.slots = slots_of(slots, accumulate)
        self.expected: list[int | None] = [None] * len(self.slots)
        self.busy = [""] * len(self.slots)  # the call of each slot that runs foreign code
        self.passes: list[Pass] = []
        self._empty(range(len(self.slots)))

    def _empty(self, slots: Sequence[int]) -> None:
        fresh = [Pass(Sum(slot, self.create_graph)) for slot in self.slots]
        self.passes = [fresh[i] if i in slots else old for i, old in enumerate(self.passes or fresh)]

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slot: int, gradient: object, *, key: int | None = None, stream: object = None, donate: bool = False,
            copy: bool = False, weight: Any = None, exact: bool = False) -> None:  # fmt: skip
        """Park one gradient; fold what is ready when the parked bytes pass the budget."""
        i, where = self._at(slot)
        need(
            not (donate and copy),
            ValueError,
            f"{self.name}: donate=True gives the array away, copy=True keeps it yours",
        )
        need(self.busy[i] != "take", RuntimeError, f"{where}: add from within a take of the same slot")
        me, declared = self.passes[i], self.slots[i]
        try:
            g = read(gradient, declared.combine is not None)
            g = fitted(g, declared, me.shape() if declared.shape is None else declared.shape)
            g = replace(g, weight=weight)
            if g.type and not self.create_graph:
                accumulation(dtype_of(WEAK.get(g.type, g.type)), declared.accumulate)
                promotion(me.types() | {g.type})
            check_weight(g, declared, exact)
            number = self._number(i, key)
        except (TypeError, ValueError, BufferError, OverflowError) as e:
            raise type(e)(f"{where}, key {key}: {e}") from None
        if copy and g.intact and g.form in ("dense", "sparse"):
            g = replace(read(copy_of(gradient)), type=g.type, unshared=True, weight=weight)
        me.keyed, me.came[number] = key is not None, replace(g, donated=donate, unshared=donate or g.unshared)
        parked = sum(x.nbytes for p in self.passes for g in p.parked() for x in g.memory)
        if parked > self.budget and not self.busy[i]:
            try:
                self._fold(i)
            except BaseException:  # of an object's own +
                del me.came[number]
                raise

    def expect(self, slot: int, n: int) -> None:
        """From now on n contributions are due in each pass."""
        i, where = self._at(slot)
        came, n = len(self.passes[i].came), operator.index(n)
        need(n >= came, ValueError, f"{where}: expected a count of at least the {came} that came, got {n}")
        self.expected[i] = n

    def ready(self, slot: int) -> bool:
        i, where = self._at(slot)
        need(self.expected[i] is not None, ValueError, f"{where}: ready needs expect(slot, n)")
        return len(self.passes[i].came) == self.expected[i]

    def __getitem__(self, slot: int) -> object:
        """The sum so far, in memory of its own (D17)."""
        i, _ = self._at(slot)
        with self._doing("snapshot", [i]):
            return self.passes[i].whole().result(own=True)

    def take(
        self,
        stream: object = None,
        *,
        slot: int | None = None,
        out: object = None,
        scale: object = None,
        writable: bool = False,
    ) -> Any:
        """All sums, and the buffer is empty afterwards; or that of one slot, and it is."""
        if slot is None:
            return self._take(list(range(len(self))), out, scale, writable)
        need(not isinstance(out, list | tuple), TypeError, "out: with slot= give the array itself")
        return self._take([self._at(slot)[0]], [out], scale, writable)[0]

    def _take(self, slots: list[int], out: object, scale: object, writable: bool) -> list[object]:
        outs = self._checked(slots, out, scale)
        results: list[object] = []
        writes: list[tuple[Array, Array]] = []
        with self._doing("take", slots):
            for total, target in zip([self.passes[i].whole() for i in slots], outs, strict=True):
                first = total.main[:1]
                memory = [x for g in first for x in g.memory]
                private = all(g.unshared for g in first) and all(map(gapless, memory))
                own = (writable and not private) or meets(memory, [x for x in outs if x is not None])
                place = total.place() if target is None else target
                if total.form == "undefined" or place is None:
                    results.append(total.result(scale, own))
                else:
                    writes.append((place, array_in(total.finished(scale, place))))
                    results.append(first[0].source if target is None else target)
        for place, value in writes:
            place[...] = value
        self._empty(slots)
        return results

    def clear(self) -> None:
        with self._doing("clear", range(len(self))):
            self._empty(range(len(self)))

    # How it is done

    def _at(self, slot: SupportsIndex) -> tuple[int, str]:
        need(not isinstance(slot, bool | np.bool_), TypeError, f"{self.name}: expected a slot number, got a bool")
        i = operator.index(slot)
        need(0 <= i < len(self), IndexError, f"{self.name}: slot {i} of {len(self)}")  # S1
        return i, f"{self.name}: slot {i}" + (f" ({self.slots[i].name})" if self.slots[i].name else "")

    def _number(self, i: int, key: SupportsIndex | None) -> int:
        """A15, A16: the key, or the place in the order of arrival."""
        me, n = self.passes[i], self.expected[i]
        need(not isinstance(key, bool | np.bool_), TypeError, "expected an integer as key, got a bool")
        need(not me.came or me.keyed == (key is not None), ValueError, "keyed and unkeyed contributions in one slot")
        number = len(me.came) if key is None else operator.index(key)
        need(0 <= number < 2**63, ValueError, "expected a key >= 0")
        need(number not in me.came, ValueError, "this key has contributed already")
        need(n is None or len(me.came) < n, ValueError, f"expected {counted(n or 0, 'contribution')}, got one more")
        return number

    def _fold(self, i: int) -> None:
        """The ready prefix goes into the running sum."""
        me = self.passes[i]
        due = me.due
        while due in me.came:
            due += 1
        with self._doing("fold", [i]):
            total = me.total
            some = [me.came[k] for k in range(me.due, due)]
            if not total.recording and total.form != "object" and not ints_fit((*total.terms, *some), total.slot):
                return  # a later contribution may widen it
            first = len(before_objects(some))
            if first < len(some) and total.form != "object":
                before = sum_of(total, some[:first])
                if before.terms and before.leaves():
                    return  # reported by the call that needs the sum
            total = sum_of(total, some)
            if total.form not in ("undefined", "object", "zero") and total.leaves():
                return  # a later contribution may bring it back into range
        me.total, me.due = total, due

    @contextmanager
    def _doing(self, what: str, slots: Sequence[int]) -> Iterator[None]:
        """D22: a callback that returns to this slot finds it busy."""
        for i in slots:
            need(not self.busy[i], RuntimeError, f"{self._at(i)[1]}: {what} from within a {self.busy[i]} of its own")
        for i in slots:
            self.busy[i] = what
        try:
            yield
        finally:
            for i in slots:
                self.busy[i] = ""

    def _checked(self, slots: list[int], out: object, scale: object) -> list[Array | None]:
        """Check take's arguments against each slot before anything is done (A16, D10, D11)."""
        given = [None] * len(slots) if out is None else out
        if not isinstance(given, list | tuple):
            raise TypeError(f"out: expected a list of arrays, got {type_of(out)}")
        need(len(given) == len(slots), ValueError, f"out: expected {len(slots)} entries, got {len(given)}")
        outs: list[Array | None] = [None] * len(slots)
        for at, (i, x) in enumerate(zip(slots, given, strict=True)):
            if x is not None:
                where = f"{self._at(i)[1]}: out"
                if not isinstance(x, np.ndarray):
                    raise TypeError(f"{where}: expected an array, got {type_of(x)}")
                outs[at] = x
                need(x.flags.writeable and not expanded(x), BufferError, f"{where}: read-only, or overlaps itself")
                importable(x.dtype)
        number = isinstance(scale, bool | int | float | complex | np.number)
        need(scale is None or number, TypeError, f"scale: expected a number, got {type_of(scale)}")
        for i, x in zip(slots, outs, strict=True):
            me = self.passes[i]
            n, where, forms = self.expected[i], self._at(i)[1], {g.form for g in me.came.values()} - {"undefined"}
            need(
                n in (None, len(me.came)),
                ValueError,
                f"{where}: expected {counted(n or 0, 'contribution')}, got {len(me.came)}",
            )
            if "object" in forms or (forms and self.create_graph):
                need(x is None and scale is None, TypeError, f"{where}: sums objects: out and scale need arrays")
            elif forms:
                self._check_take(me, self.slots[i].dtype or promotion(me.types()), x, scale, where)
        apart = not any(
            meets([x], [y]) for i, x in enumerate(outs) for y in outs[:i] if x is not None and y is not None
        )
        need(apart, ValueError, "out: two of the arrays may share memory")
        return outs

    def _check_take(self, me: Pass, dtype: DType, x: Array | None, scale: Any, where: str) -> None:
        fits = not isinstance(scale, complex | np.complexfloating) or kind(dtype) == "c"
        if scale is not None and fits and kind(dtype) in "bui":
            fits = -(2**63) <= scale < 2**63 and scale == int(scale)
        need(fits, ValueError, f"{where}: the sum is {dtype.name}, which cannot be scaled by {scale}")
        if x is not None:
            need(x.shape == me.shape(), ValueError, f"{where}: out: expected shape {me.shape()}, got {x.shape}")
            cast = ORDER.index(kind(dtype)) <= ORDER.index(kind(x.dtype))
            need(cast, ValueError, f"{where}: out: expected dtype {dtype.name}, got {x.dtype.name}")


def slots_of(slots: Any, accumulate: object) -> list[Slot]:
    """A count, or a sequence of example arrays and Slots."""
    if isinstance(slots, int | np.integer) and not isinstance(slots, bool):
        need(slots >= 0, ValueError, f"slots: expected a count >= 0, got {slots}")
        slots = [Slot()] * int(slots)
    sequence = isinstance(slots, list | tuple) and not hasattr(slots, "parts")
    need(sequence, TypeError, f"slots: expected a count or a sequence, got {type_of(slots)}; one array: [array]")
    result = []
    for s in slots:
        if not isinstance(s, Slot):
            need(
                not isinstance(s, bool | int | float | complex | np.integer | np.bool_)
                or isinstance(s, np.floating | np.complexfloating),
                TypeError,
                f"slots: a number, {s!r}, is no example array",
            )
            g = read(s)
            need(g.form not in ("undefined", "object"), TypeError, f"slots: no array, no Slot: a {type(s).__name__}")
            s = Slot(g.shape, WEAK.get(g.type, g.type))
        need(str(s.device or "cpu") == "cpu", ValueError, f"slots: expected the device cpu, got {s.device}")
        dtype = None if s.dtype is None else dtype_of(s.dtype)
        wish = accumulate if s.accumulate is None else s.accumulate
        wish = None if wish is None else dtype_of(wish)
        if dtype is not None:
            accumulation(dtype, wish)
        result.append(replace(s, dtype=dtype, accumulate=wish))
    return result
