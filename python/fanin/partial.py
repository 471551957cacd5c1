"""Gradients of a part of an array: of a slice, a row, one element, a diagonal (`Partial`), and of rows (`add_rows`)."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from . import _core
from ._checks import integer
from ._interop.protocols import DTypeLike
from ._interop.protocols import Shape as Extents
from ._words import type_of
from .slots import Shape, Sparse, Zero, shape_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Diagonal", "Partial", "add_rows"]

#: One entry of a basic index.
Index = SupportsIndex | slice | EllipsisType | None

ROWS = "for rows by their numbers call fanin.add_rows(ids, rows, n)"


@dataclass(frozen=True, slots=True, repr=False)
class Diagonal:
    """The place of a diagonal, as `numpy.diagonal(x, offset, axis1, axis2)` reads it: the last axis of the values goes
    along it.

    >>> fanin.Partial(np.ones(3), fanin.Diagonal(), (3, 3)).dense().sum()
    np.float64(3.0)
    """

    offset: int = 0
    axis1: int = 0
    axis2: int = 1

    def __post_init__(self) -> None:
        for name in ("offset", "axis1", "axis2"):
            object.__setattr__(self, name, integer(f"Diagonal: {name}", getattr(self, name)))

    def __repr__(self) -> str:
        return f"fanin.Diagonal({self.offset}, {self.axis1}, {self.axis2})"


#: Where a patch lies (`csrc/array/patch.h`): for each axis of the whole its start, its step, and the axis of the
#: values that it goes along, -1 for none; then the shape of the values.
Place = tuple[Extents, Extents, Extents, Extents]


def _of_diagonal(at: Diagonal, shape: Extents) -> Place:
    n = len(shape)
    one, two = (axis + n if axis < 0 else axis for axis in (at.axis1, at.axis2))
    if not (0 <= one < n and 0 <= two < n) or one == two:
        raise ValueError(f"Partial: at: {at!r}: expected two axes of an array of shape {shape}")
    begin = max(0, -at.offset), max(0, at.offset)
    length = max(0, min(shape[one] - begin[0], shape[two] - begin[1]))
    others = [k for k in range(n) if k not in (one, two)]
    start, step, along = [0] * n, [1] * n, [0] * n
    for v, k in enumerate(others):
        along[k] = v
    for k, first in zip((one, two), begin, strict=True):
        start[k], along[k] = first, len(others)
    return tuple(start), tuple(step), tuple(along), (*(shape[k] for k in others), length)


def _one(i: object, k: int, shape: Extents) -> int:
    """An integer of an index, along axis k."""
    if isinstance(i, (bool, np.bool_)):
        raise TypeError(f"Partial: at: {i!r} is a mask; expected integers, slices, None and ... ({ROWS})")
    if not isinstance(i, SupportsIndex) or (hasattr(i, "ndim") and i.ndim):
        what = "an array" if hasattr(i, "shape") or isinstance(i, (list, tuple)) else type_of(i)
        raise TypeError(f"Partial: at: {what} is no basic index; expected integers, slices, None and ... ({ROWS})")
    n, at = shape[k], operator.index(i)
    if not -n <= at < n:
        raise IndexError(f"Partial: at: {at} is out of range along axis {k} of an array of shape {shape}")
    return at + n if at < 0 else at


@functools.cache
def _whole(n: int) -> tuple[Extents, Extents, Extents]:
    """Start, step and axis of n axes that are there as a whole, behind one more."""
    return (0,) * n, (1,) * n, tuple(range(n + 1))


def _of_slice(at: slice, shape: Extents) -> Place:
    """As _of_index, of one slice along the first axis."""
    begin, end, stride = at.indices(shape[0])
    n = len(range(begin, end, stride))
    starts, steps, along = _whole(len(shape) - 1)
    return (begin if n else 0, *starts), (stride if n > 1 else 1, *steps), along, (n, *shape[1:])


def _of_index(at: Any, shape: Extents) -> Place:
    simple = type(at) is slice and shape
    if simple and type(at.start) is int and type(at.stop) is int and at.step is None:
        return _of_slice(at, shape)
    entries = at if type(at) is tuple else (at,)
    used = sum(1 for i in entries if i is not None and i is not Ellipsis)
    if used > len(shape):
        raise IndexError(f"Partial: at: {used} indices for an array of shape {shape}")
    dots = sum(1 for i in entries if i is Ellipsis)
    if dots > 1:
        raise IndexError("Partial: at: an index has one ... at most")
    if not dots:
        entries = (*entries, Ellipsis)
    start: list[int] = []
    step: list[int] = []
    along: list[int] = []
    extents: list[int] = []
    for i in entries:
        k = len(start)
        if i is None:
            extents.append(1)
        elif i is Ellipsis:
            for n in shape[k : k + len(shape) - used]:
                start.append(0)
                step.append(1)
                along.append(len(extents))
                extents.append(n)
        elif isinstance(i, slice):
            try:
                begin, end, stride = i.indices(shape[k])
            except TypeError:
                raise TypeError(f"Partial: at: expected a slice of integers, got {i!r}") from None
            except ValueError:
                raise ValueError(f"Partial: at: the step of {i!r} is 0") from None
            n = len(range(begin, end, stride))
            start.append(begin if n else 0)
            step.append(stride if n > 1 else 1)
            along.append(len(extents))
            extents.append(n)
        else:
            start.append(_one(i, k, shape))
            step.append(0)
            along.append(-1)
    return tuple(start), tuple(step), tuple(along), tuple(extents)


class Partial:
    """The gradient of a part of an array: `values` where `at` points, and zero in the rest of `shape`. Its attributes
    cannot be changed.

    A slot adds it in its place: nothing of the size of `shape` is made or read for it, but the sum itself, once. An
    element of the sum is the left fold of the contributions that reach it, and +0 where none does (rules P).

    Parameters
    ----------
    values : array
        Of the shape that `x[at]` has for an `x` of `shape`.
    at : basic index or Diagonal
        Integers, slices (of any step), None and `...`, or a tuple of these; or a `fanin.Diagonal`.
    shape : tuple of int
        The shape of the array of which it is a part.

    Raises
    ------
    TypeError
        `at` has a mask or an array of integers; `values` is no array.
    IndexError
        An integer is out of range, or there are more indices than axes.
    ValueError
        The values have another shape than `x[at]`.

    Examples
    --------
    >>> buf = fanin.InputBuffer(1)
    >>> buf.add(0, fanin.Partial(np.array([1.0, 2.0]), np.s_[:2], 4))
    >>> buf.add(0, fanin.Partial(np.array([10.0, 20.0]), np.s_[1:3], 4))
    >>> buf.take()
    [array([ 1., 12., 20.,  0.])]
    """

    __slots__ = ("__weakref__", "_place", "at", "shape", "values")

    values: Any  #: of any library
    at: Any
    shape: tuple[int, ...]
    _place: Place

    def __init__(self, values: object, at: Index | tuple[Index, ...] | Diagonal, shape: Shape) -> None:
        whole = shape_of(shape, "Partial")
        place = _of_diagonal(at, whole) if isinstance(at, Diagonal) else _of_index(at, whole)
        own = getattr(values, "shape", None)
        if own is None or isinstance(values, Partial | Sparse | Zero):
            raise TypeError(f"Partial: values: expected an array of shape {place[3]}, got {type_of(values)}")
        if tuple(own) != place[3]:
            raise ValueError(
                f"Partial: values: expected an array of shape {place[3]}, as x[at] of an array of shape {whole} has,"
                f" got one of shape {tuple(own)}"
            )
        _put_values(self, values)
        _put_at(self, at)
        _put_shape(self, whole)
        _put_place(self, place)

    @classmethod
    def _made(cls, values: object, place: Place, shape: Extents) -> Partial:
        """Of the core: values in a place that was checked before."""
        self = cls.__new__(cls)
        _put_values(self, values)
        _put_at(self, _index_of(place, shape))
        _put_shape(self, shape)
        _put_place(self, place)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"Partial: {name}: a partial gradient cannot be changed: make another, fanin.Partial(values, at, shape)"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Partial: {name}: a partial gradient cannot be changed")

    def __reduce__(self) -> tuple[type[Partial], tuple[object, ...]]:
        return Partial, (self.values, self.at, self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def dense(self) -> Any:
        """Return it as an array of `shape`, +0 where it has no values.

        >>> fanin.Partial(np.float32([5]), np.s_[-1:], 3).dense()
        array([0., 0., 5.], dtype=float32)
        """
        return _core.add_n([self])

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuse what NumPy would make of it: an array of one object."""
        raise TypeError(
            f"{self!r} is no array: dense() makes one (unless a slot has partial=True, a node's function gets it dense)"
        )

    def __repr__(self) -> str:
        return f"<fanin.Partial at {self.at!r} of shape {self.shape}: {tuple(self.values.shape)}, {self.values.dtype}>"


#: What writes an attribute of a new one.
_put_values, _put_at, _put_shape, _put_place = (
    vars(Partial)[name].__set__ for name in ("values", "at", "shape", "_place")
)


def _index_of(place: Place, shape: Extents) -> object:
    """An index that names a place."""
    starts, steps, alongs, extents = place
    axes = [k for k in range(len(shape)) if alongs[k] >= 0 and alongs.count(alongs[k]) > 1]
    if axes:
        one, two = axes
        return Diagonal(starts[two] - starts[one], one, two)
    index: list[Index] = []
    v = 0
    for start, step, along, n in zip(starts, steps, alongs, shape, strict=True):
        if along < 0:
            index.append(start)
            continue
        index += [None] * (along - v)
        v = along + 1
        stop = start + extents[along] * step
        index.append(slice(start, stop if 0 <= stop <= n else None, step))
    return tuple(index + [None] * (len(extents) - v))


def add_rows(ids: object, rows: Any, n: int, *, accumulate: DTypeLike | None = None) -> Any:
    """Sum rows by their numbers: the gradient of an embedding table, whose row i is the sum of all `rows[k]` with
    `ids[k] == i`.

    Each row of the result is the left fold of its rows in their order, summed in a float twice as wide and rounded
    once: a lone row stays as it is, to the sign of its zeros, and +0 where there is none. `numpy.add.at` and torch's
    `index_add_` round at each step.

    Parameters
    ----------
    ids : array of integers
        From 0 to n - 1, in any shape.
    rows : array
        Of the shape of `ids`, and after it that of a row. An array of the host, of any library; the result is of its
        kind.
    n : int
        The number of rows of the table.
    accumulate : dtype or "exact", optional
        The dtype in which the sum runs, or the exact sum, rounded once. Default: float64 for float32, float32 for
        lower floats, complex128 for complex64, else the dtype itself.

    Raises
    ------
    TypeError
        `ids` has no integers, or is a mask; `rows` is no dense array of the host.
    IndexError
        A number below 0, or above n - 1.
    ValueError
        `rows` has another shape.

    Examples
    --------
    >>> fanin.add_rows([2, 0, 2], np.float32([[1, 2], [3, 4], [10, 20]]), 3)
    array([[ 3.,  4.],
           [ 0.,  0.],
           [11., 22.]], dtype=float32)
    """
    integer("add_rows: n", n, least=0)
    numbers = np.asarray(ids)
    if numbers.dtype.kind not in "iu" and numbers.size:
        what = "a mask" if numbers.dtype == bool else f"dtype {numbers.dtype}"
        raise TypeError(f"add_rows: ids: expected integers, got {what}")
    shape = getattr(rows, "shape", None)
    if shape is None:
        raise TypeError(f"add_rows: rows: expected an array, got {type_of(rows)}")
    if tuple(shape[: numbers.ndim]) != numbers.shape or not numbers.ndim:
        raise ValueError(
            f"add_rows: rows: expected a shape that begins with that of ids, {numbers.shape}, got {tuple(shape)}"
        )
    flat = numbers.ravel() if numbers.ndim > 1 else numbers
    one = rows.reshape(flat.size, *shape[numbers.ndim :]) if numbers.ndim > 1 else rows
    return _core.add_rows(np.ascontiguousarray(flat, np.int64), one, n, accumulate)
