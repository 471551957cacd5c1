"""NumPy's functions on fanin's arrays on the CPU, which are memory of a graph tree.

Outside of a tree's functions they read values and return ndarrays. Inside, they make a new array in the tree's memory
and launch a kernel that fills it, now or in each replay; NumPy computes its shape and dtype from arrays of ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from .. import _core
from .._core import Array
from ..errors import CaptureError

__tracebackhide__ = True  # no frames of ours in reports of pytest

NDArray = npt.NDArray[np.generic]
Kernel = Callable[..., object]
Order = Literal["C", "F", "A", "K"]
Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]

#: NumPy functions, besides ufuncs, whose result's shape follows from the operands' shapes.
FUNCTIONS = frozenset[object]({
    np.sum, np.prod, np.mean, np.var, np.std, np.max, np.min, np.argmax, np.argmin, np.cumsum, np.cumprod, np.all,
    np.any, np.where, np.clip, np.dot, np.inner, np.outer, np.tensordot, np.einsum, np.concatenate, np.stack, np.take,
    np.diff, np.flip, np.roll, np.sort, np.argsort, np.tile, np.repeat, np.round, np.trace, np.linalg.norm, np.pad,
    np.vstack, np.hstack, np.dstack, np.column_stack, np.triu, np.tril, np.diagonal, np.rot90, np.flipud, np.fliplr,
    np.median, np.percentile, np.quantile, np.average, np.ptp, np.nansum, np.nanprod, np.nanmean, np.nanvar, np.nanstd,
    np.nanmax, np.nanmin, np.nan_to_num, np.count_nonzero, np.isclose, np.select, np.choose, np.take_along_axis,
    np.searchsorted, np.interp, np.partition, np.argpartition, np.kron, np.vdot, np.cross, np.convolve, np.correlate,
    *([np.astype] if hasattr(np, "astype") else []),
})  # fmt: skip

#: Which of their arguments is `out`.
OUT_AT: dict[object, int] = {
    np.sum: 3, np.prod: 3, np.mean: 3, np.var: 3, np.std: 3, np.max: 2, np.min: 2, np.argmax: 2, np.argmin: 2,
    np.cumsum: 3, np.cumprod: 3, np.all: 2, np.any: 2, np.clip: 3, np.dot: 2, np.outer: 2, np.concatenate: 2,
    np.stack: 2, np.take: 3, np.trace: 5, np.round: 2, np.median: 2, np.percentile: 3, np.quantile: 3, np.ptp: 2,
    np.nansum: 3, np.nanprod: 3, np.nanmean: 3, np.nanvar: 3, np.nanstd: 3, np.nanmax: 2, np.nanmin: 2, np.choose: 2,
}  # fmt: skip

#: .. the second of which decides the result's shape.
SHAPED = {np.tile: "reps", np.repeat: "repeats", np.pad: "pad_width"}

FILLED: dict[object, int | None] = {np.empty_like: None, np.zeros_like: 0, np.ones_like: 1}


@dataclass(frozen=True)
class Place:
    """The index of an array among those that a kernel reads."""

    at: int


def mapped(x: object, fn: Callable[[object], object]) -> object:
    """`fn` of all that is no list or tuple in it."""
    return type(x)(mapped(y, fn) for y in cast(Iterable[object], x)) if isinstance(x, list | tuple) else fn(x)


def has_place(x: object) -> bool:
    """Whether it contains a Place, also in a list."""
    return any(map(has_place, cast(Iterable[object], x))) if isinstance(x, list | tuple) else isinstance(x, Place)


def order_of(x: Array | NDArray) -> list[int]:
    """Its axes, as NumPy goes through memory: the one with the widest steps first."""
    return sorted(range(x.ndim), key=lambda k: -abs(x.strides[k]))


def laid(x: Array, whole: int = 0) -> NDArray:
    """Of the same shape and dtype, its axes in the same order: of ones, and of integers `whole`; zeros are places in
    anything.
    """
    order, steps = order_of(x), x.strides
    full = np.full([x.shape[k] if steps[k] else 1 for k in order], whole if x.dtype.kind in "iu" else 1, x.dtype)
    return np.broadcast_to(full.transpose(np.argsort(order)), x.shape)


def shown(xs: Sequence[object], by_steps: bool = False, whole: int = 0) -> list[object]:
    """Arguments for NumPy in the place of arrays, of ones, and of integers `whole`; if all have their axes in order,
    without memory and so without strides.
    """
    arrays = [x for x in xs if isinstance(x, Array)]
    plain = not by_steps and all(order_of(x) == list(range(x.ndim)) for x in arrays)
    kinds = {x.dtype: np.full((), whole if x.dtype.kind in "iu" else 1, x.dtype) for x in arrays}

    def ones(x: object) -> object:
        if not isinstance(x, Array):
            return x
        return np.broadcast_to(kinds[x.dtype], x.shape) if plain else laid(x, whole)

    return [ones(x) for x in xs]


def read(x: object) -> object:
    """The current values, in a read-only copy, so that NumPy refuses to write into it as if it were the array."""
    if not isinstance(x, Array):
        return x
    values = x.numpy()
    values.flags.writeable = False
    return values


def own(x: object) -> object:
    """A result of NumPy on values that were read: a view of them is copied for the caller."""
    return x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x


def copied(x: object, out: NDArray) -> None:
    """A kernel."""
    out[...] = cast(NDArray, x)


def fill_recorded(op: str, out: NDArray, result: object) -> None:
    """Copy a kernel's result to where the recording has it. A result of another shape or dtype is a CaptureError."""
    made = np.asarray(result)
    if made.shape != out.shape or made.dtype != out.dtype:
        raise CaptureError(
            f"{op}: the result had shape and dtype {out.shape} {out.dtype} when it was recorded, and now {made.shape} "
            f"{made.dtype}: a replay cannot change them; pass what decides them as an operand that is no array, which "
            "is part of the key, or as key="
        )
    out[...] = made


def new(like: object) -> Array:
    """A new array of the shape and dtype of what NumPy gave, its axes in the same order: sums go by that."""
    array = np.asarray(like)
    order = order_of(array)
    made = _core.cpu_empty(tuple(array.shape[k] for k in order), array.dtype)
    return made if order == list(range(array.ndim)) else made.transpose(*np.argsort(order).tolist())


def like(f: Kernel, xs: Sequence[object]) -> Array:
    """A new array for the result of a function without side effects, as it is for arrays of ones."""
    with np.errstate(all="ignore"):
        return new(f(*shown(xs, by_steps=True)))


def of_ufunc(f: np.ufunc, method: str, *inputs: object, out: Sequence[object] = (), **how: object) -> object:
    """A ufunc, or a method of one."""
    handles = bool(_core.cpu_wants_handles())
    if method == "at" or any(isinstance(x, Array) or (handles and isinstance(x, np.ndarray)) for x in how.values()):
        raise TypeError(
            f"np.{f.__name__}: f.at and where= are not for arrays of a graph tree; np.where can be recorded"
        )
    call: Callable[..., object] = getattr(f, method)
    if not out and not handles:
        return call(*[read(x) for x in inputs], **how)  # of an iterator that raises CPython 3.11 leaks `how`
    with np.errstate(all="ignore"):
        result = call(*shown(inputs), **{k: x for k, x in how.items() if k != "where"})
    results = result if isinstance(result, tuple) else (result,)
    given = out or [None] * len(results)
    outs = tuple(new(r) if o is None else o for o, r in zip(given, results, strict=True))
    n = len(inputs)

    def kernel(*arrays: NDArray) -> None:
        call(*arrays[:n], out=arrays[n:], **how)

    _core.cpu_launch(f if method == "__call__" and not how else kernel, f.__name__, inputs, outs)
    return outs[0] if len(outs) == 1 else outs


def of_function(f: Kernel, types: object, args: tuple[object, ...], how: dict[str, object]) -> object:
    """Another function of NumPy's."""
    if f is np.copyto and len(args) == 2 and not how:
        assign(*args)
        return None
    out_at = OUT_AT.get(f, len(args))
    outs = [x for x in (how.get("out"), *args[out_at : out_at + 1]) if x is not None]
    if not _core.cpu_wants_handles():
        if any(isinstance(x, Array) for x in outs):  # NumPy 1 would write some into the copy of the values
            raise ValueError(
                f"np.{f.__name__}: out= is read-only, a copy of the values; write out[...] = np.{f.__name__}(..)"
            )
        result = f(*[mapped(x, read) for x in args], **{k: mapped(x, read) for k, x in how.items()})
        return mapped(result, own) if type(result) in (list, tuple) else own(result)
    if f in VIEWS:
        return VIEWS[f](*args, **how)
    if outs:
        raise TypeError(
            f"np.{f.__name__}: with out= ufuncs alone can be recorded; write out[...] = np.{f.__name__}(..) without it"
        )
    if f in FILLED:
        out, value = new(f(*shown(args[:1]), *args[1:], **how)), FILLED[f]
        if value is not None:
            assign(out, value)
        return out
    if f is np.full_like:
        return full_like(*args, **how)
    if f not in FUNCTIONS or (f is np.where and len(args) < 3):
        names = ", ".join(sorted(cast(Kernel, g).__name__ for g in FUNCTIONS))
        raise TypeError(f"np.{f.__name__}: of arrays of a graph tree ufuncs can be recorded, with out=, and {names}")
    return of_known(f, args, how)


def of_known(f: Kernel, args: tuple[object, ...], how: dict[str, object]) -> Array:
    found: list[object] = []

    def place(x: object) -> object:
        if not isinstance(x, Array | np.ndarray):
            return x
        found.append(x)
        return Place(len(found) - 1)

    at = cast(tuple[object, ...], mapped(args, place))
    at_how, names = mapped(list(how.values()), place), list(how)  # the kernel may hold no array of the function's
    if f in SHAPED and has_place([*at[1:2], *cast(list[object], at_how)]):
        raise TypeError(
            f"np.{f.__name__}: {SHAPED[f]} decides the shape of what is recorded, and is numbers, not an array: where "
            "they change, pass them as operands, which are part of the key"
        )

    def call(arrays: Sequence[object]) -> object:
        there = [mapped(x, lambda y: arrays[y.at] if isinstance(y, Place) else y) for x in (at, at_how)]
        return f(*cast(list[object], there[0]), **dict(zip(names, cast(list[object], there[1]), strict=True)))

    def kernel(*arrays: NDArray) -> None:
        fill_recorded(f"np.{f.__name__}", arrays[-1], call(arrays))

    with np.errstate(all="ignore"):
        try:
            like = call(shown(found, by_steps=f is np.einsum))
        except ZeroDivisionError:  # it divides by integers, or by their sum
            like = call(shown(found, whole=1))
    if isinstance(like, list | tuple):
        raise TypeError(
            f"np.{f.__name__}: it gives several results, a {type(like).__name__}, and one array can be recorded"
        )
    out = new(like)
    _core.cpu_launch(kernel, f.__name__, tuple(found), (out,))
    return out


to_the_power = cast(Callable[[NDArray, complex], NDArray], operator.pow)


def raised(x: Array, exponent: complex) -> Array | NDArray:
    """`x ** exponent` as the operator of ndarrays has it, which is np.power for some types and numbers alone."""
    if not _core.cpu_wants_handles():
        return to_the_power(x.numpy(), exponent)

    def kernel(a: NDArray, out: NDArray) -> None:
        fill_recorded("power", out, to_the_power(a, exponent))

    with np.errstate(all="ignore"):
        out = new(to_the_power(laid(x), exponent))
    _core.cpu_launch(kernel, "power", (x,), (out,))
    return out


def full_like(a: object, fill_value: object, *args: object, **how: object) -> Array:
    [like] = shown([a])
    out = new(np.empty_like(cast(NDArray, like), *args, **how))  # type: ignore[call-overload]
    assign(out, fill_value)
    return out


def assign(out: object, x: object) -> None:
    """out[...] = x"""
    _core.cpu_launch(copied, "copy", (x,), (out,))


# An ndarray's methods; outside of functions they work on the values.


def conj(x: Array) -> Array | NDArray:
    """As `x.conj()` of an ndarray: what is not complex is itself."""
    return cast(Array, np.conjugate(x)) if x.dtype.kind == "c" else x


def remade(x: Array, f: Callable[[NDArray], NDArray]) -> Array:
    """A new array with the values of x, of the shape, dtype and order of axes that `f` gives."""
    out = new(f(laid(x)))
    assign(out, x)
    return out


def copy(x: Array, order: Order = "C") -> Array | NDArray:
    """In the order of its axes, as `x.copy()` of an ndarray."""
    return remade(x, lambda y: y.copy(order)) if _core.cpu_wants_handles() else x.numpy().copy(order)


def copy_as_it_lies(x: Array, order: Order = "K", subok: bool = False) -> Array:
    return remade(x, lambda y: y.copy(order))


def astype(
    x: Array,
    dtype: npt.DTypeLike,
    order: Order = "K",
    casting: Casting = "unsafe",
    subok: bool = True,
    copy: bool = True,
) -> Array | NDArray:
    if not _core.cpu_wants_handles():
        return x.numpy().astype(dtype, order, casting)
    if not copy and np.dtype(dtype) == x.dtype and order in ("K", "A"):
        return x
    return remade(x, lambda y: y.astype(dtype, order, casting))


def axes_first(x: Array, order: Order) -> list[int]:
    """The axes in the order in which NumPy goes through them, the last one fastest. ValueError for no order."""
    forward = list(range(x.ndim))
    if order not in ("C", "F", "A", "K"):
        raise ValueError(f"order must be one of 'C', 'F', 'A', or 'K' (got {order!r})")
    if order == "K":
        return order_of(x)
    return forward[::-1] if order == "F" or (order == "A" and lies_backwards(x)) else forward


def lies_backwards(x: Array) -> bool:
    """Whether it lies without gaps in Fortran's order, and not in C's."""
    wide = [k for k in range(x.ndim) if x.shape[k] != 1]
    steps = np.cumprod([x.itemsize, *(x.shape[k] for k in wide)])[:-1].tolist()
    return len(wide) > 1 and steps == [x.strides[k] for k in wide]


def ravel(x: Array, order: Order = "C") -> Array:
    return x.transpose(*axes_first(x, order)).reshape(-1)


def reshape(x: Array, shape: SupportsIndex | Sequence[SupportsIndex], order: Order = "C") -> Array:
    if order not in ("C", "F", "A"):
        raise ValueError(f"order must be one of 'C', 'F', or 'A' (got {order!r})")
    if order == "C" or (order == "A" and not lies_backwards(x)):
        return x.reshape(shape)
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    return x.T.reshape(shape[::-1]).T


def flatten(x: Array, order: Order = "C") -> Array | NDArray:
    made = copy(x, order)
    return ravel(made, order) if isinstance(made, Array) else made.ravel(order)


def broadcast_to(x: Array, shape: SupportsIndex | Iterable[SupportsIndex], subok: bool = False) -> Array:
    return x.broadcast_to(shape)


def squeeze(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    shape = np.squeeze(laid(x), axis).shape
    return x.reshape(shape)


def expand_dims(a: Array, axis: int | tuple[int, ...]) -> Array:
    shape = np.expand_dims(laid(a), axis).shape
    return a.reshape(shape)


def moved_axes(f: Callable[..., NDArray], x: Array, *args: object, **how: object) -> Array:
    """A view with its axes in NumPy's order: computed from an array whose extents are its axes' numbers."""
    numbered = f(np.empty(range(x.ndim), bool), *args, **how)
    return x.transpose(*numbered.shape)


def at_least(ndim: int, *arrays: Array) -> Array | tuple[Array, ...]:
    f = (np.atleast_1d, np.atleast_2d, np.atleast_3d)[ndim - 1]
    seen = [x.reshape(f(laid(x)).shape) if x.ndim < ndim else x for x in arrays]
    return seen[0] if len(seen) == 1 else tuple(seen)


def swapaxes(x: Array, axis1: int, axis2: int) -> Array:
    axes = list(range(x.ndim))
    axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
    return x.transpose(*axes)


def split(f: Callable[..., list[NDArray]], x: Array, places: object, axis: int = 0) -> list[Array]:
    """Views, cut as `f` cuts the numbers of the axis."""
    before = (slice(None),) * (axis % x.ndim)
    parts = [numbers.tolist() for numbers in f(np.arange(x.shape[axis]), places)]
    return [x[(*before, slice(part[0], part[-1] + 1) if part else slice(0, 0))] for part in parts]


def sort(
    x: Array, axis: int = -1, kind: str | None = None, order: object = None, *, stable: bool | None = None
) -> None:
    """In place."""
    how = {} if stable is None else {"stable": stable}  # which NumPy has since 2.0
    assign(x, cast(Kernel, np.sort)(x, axis, kind, order, **how))


#: Functions that give views, or copies.
VIEWS: dict[object, Callable[..., object]] = {
    np.transpose: lambda x, axes=None: x.transpose(axes),
    np.reshape: reshape,
    np.ravel: ravel,
    np.squeeze: squeeze,
    np.swapaxes: swapaxes,
    np.broadcast_to: broadcast_to,
    np.copy: copy_as_it_lies,
    np.expand_dims: expand_dims,
    np.moveaxis: functools.partial(moved_axes, np.moveaxis),
    np.rollaxis: functools.partial(moved_axes, np.rollaxis),
    np.split: functools.partial(split, np.split),
    np.array_split: functools.partial(split, np.array_split),
    **{f: functools.partial(at_least, k) for k, f in enumerate((np.atleast_1d, np.atleast_2d, np.atleast_3d), 1)},
}

METHODS: dict[str, Callable[..., object]] = {
    **{name: getattr(np, name) for name in (
        "sum", "prod", "mean", "var", "std", "max", "min", "argmax", "argmin", "cumsum", "cumprod", "all", "any",
        "clip", "dot", "take", "trace", "argsort", "round", "repeat", "squeeze", "swapaxes", "ravel",
    )},
    "conj": conj, "conjugate": conj,
    "astype": astype, "copy": copy, "fill": assign, "sort": sort,
    "flatten": flatten, "item": lambda x, *at: x.numpy().item(*at),
    "tolist": lambda x: x.numpy().tolist(),
}  # fmt: skip


def method(x: Array, name: str) -> Callable[..., object]:
    """A method that ndarrays have, and fanin.sim.Array has not."""
    if name in METHODS:
        return functools.partial(METHODS[name], x)
    words = f"'fanin.sim.Array' object has no attribute '{name}'"
    if hasattr(np.ndarray, name):
        words += (
            ": of an ndarray's methods an array of a graph tree has what can be recorded "
            f"({', '.join(sorted(METHODS))}); outside of the tree's functions x.numpy() is an ndarray"
        )
    raise AttributeError(words, name=name, obj=x)
