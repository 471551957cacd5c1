"""Declarations of slots, sparse gradients, symbolic zeros, and statistics of sums."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np

from . import _core
from ._interop.protocols import DTypeLike
from ._words import counted, type_of
from .sharing import overlaps

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Slot", "Sparse", "Stats", "Zero", "clip_norm", "global_norm"]

#: Accepted as a shape: a tuple of ints, or an int, as in NumPy.
Shape = SupportsIndex | Iterable[SupportsIndex]

FORMATS = ("coo", "csr", "csc", "bsr", "bsc")


def shape_of(shape: object, where: str) -> tuple[int, ...]:
    """A shape as a tuple of ints; an int is the shape of one axis, as in NumPy."""
    if type(shape) is tuple:
        for n in shape:
            if type(n) is not int or n < 0:
                break
        else:  # mostly
            return shape
    try:
        if hasattr(type(shape), "__index__"):  # isinstance(.., SupportsIndex) takes twenty times as long
            result: tuple[int, ...] = (operator.index(cast(SupportsIndex, shape)),)
        else:
            result = tuple(map(operator.index, cast(Iterable[SupportsIndex], shape)))
    except TypeError:
        raise TypeError(f"{where}: expected a shape, a tuple of ints, got {shape!r}") from None
    if result and min(result) < 0:
        raise ValueError(f"{where}: expected a shape of non-negative extents, got {result}")
    return result


@dataclass(frozen=True, init=False)
class Slot:
    """The declaration of one slot of an `InputBuffer`; the first gradient of each pass fixes the fields that are None.

    Parameters
    ----------
    shape : tuple of int, or int
        A gradient that broadcasts from it is summed to it; any other shape is an error.
    dtype : dtype
        Gradients are cast to it by NumPy's `same_kind` rule; a wider integer that does not fit wraps, a float that is
        too large becomes inf.
    device : str
        A device's name, as "cpu" or "sim:0".
    accumulate : dtype or "exact"
        The dtype in which the sum runs.
    combine : callable
        `combine(old, new)` sums objects that are no arrays, and arrays of dtypes without a sum (float128, foreign byte
        order).
    name : str or descriptor
        For messages and pictures; of a descriptor (`fanin.descriptors`) its `expr()`.
    partial : bool
        A lone `fanin.Partial` is taken as it is. Otherwise, and of several, the sum is a dense array (P3).

    Examples
    --------
    >>> buf = fanin.InputBuffer([fanin.Slot(shape=3, name="bias"), fanin.Slot(combine=lambda a, b: a | b)])
    >>> buf.add(1, {1}); buf.add(1, {2}); buf.take()
    [None, {1, 2}]
    """

    shape: tuple[int, ...] | None = None
    dtype: Any = None
    device: str | None = None
    accumulate: Any = None
    combine: Callable[[Any, Any], Any] | None = None
    name: object = None
    partial: bool = False

    def __init__(
        self,
        shape: Shape | None = None,
        dtype: DTypeLike | None = None,
        device: str | None = None,
        accumulate: DTypeLike | None = None,
        combine: Callable[[Any, Any], Any] | None = None,
        name: object = None,
        partial: bool = False,
    ) -> None:
        # The class has the default None; the instance is frozen.
        if shape is not None:
            self.__dict__["shape"] = shape_of(shape, "Slot")
        if dtype is not None:
            if type(dtype) is not str or dtype not in _NAMES:
                _check_dtype("Slot: dtype", dtype)
            self.__dict__["dtype"] = dtype
        if device is not None:
            if not isinstance(device, str):
                raise TypeError(f"Slot: expected a device's name, as 'cpu' or 'sim:0', got {device!r}")
            self.__dict__["device"] = device
        if accumulate is not None:
            if not (isinstance(accumulate, str) and accumulate == "exact"):
                _check_dtype("Slot: accumulate", accumulate)
            self.__dict__["accumulate"] = accumulate
        if combine is not None:
            if not callable(combine):
                raise TypeError(f"Slot: expected combine(old, new), got {combine!r}")
            self.__dict__["combine"] = combine
        if name is not None:
            if isinstance(name, str) and "\0" in name:
                raise ValueError(f"Slot: name: expected text without a NUL character, got {name!r}")
            if isinstance(name, str) and any("\ud800" <= c <= "\udfff" for c in name):
                raise ValueError(f"Slot: name: expected text without surrogates, got {name!r}: UTF-8 cannot hold it")
            self.__dict__["name"] = name
        if partial is not False:
            if not isinstance(partial, bool):
                raise TypeError(f"Slot: partial: expected True or False, got {type_of(partial)}")
            self.__dict__["partial"] = partial


#: Names of dtypes that were given to a Slot before, as the core spells them: checked already.
_NAMES: set[str] = set()


def _check_dtype(where: str, dtype: object) -> str | None:
    try:
        known = _core.dtype_name(dtype)
    except (TypeError, ValueError) as e:
        raise type(e)(f"{where}: {e}") from None
    if type(dtype) is str and dtype == known:
        _NAMES.add(dtype)
    return known


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse gradient as its parts, which are arrays of any library.

    Parameters
    ----------
    format : str
        "coo", "csr", "csc", "bsr" or "bsc".
    parts : sequence of arrays
        For "coo" (indices, values), of shapes (sparse axes, n) and (n, dense axes). For "csr" and "csc" (pointers,
        indices, values), with pointers by row or by column. For "bsr" and "bsc" the same of blocks, with values of
        shape (blocks, height, width). Values of a repeated index add up.
    shape : tuple of int
        The shape of the dense array.

    Examples
    --------
    >>> row = fanin.Sparse("coo", (np.array([[2]]), np.array([[1.0, 1.0]])), (4, 2))
    >>> fanin.add_n([row, np.zeros((4, 2))])[2]
    array([1., 1.])
    """

    format: str
    parts: tuple[Any, ...]  # of any library
    shape: tuple[int, ...]

    if TYPE_CHECKING:

        def __init__(self, format: str, parts: Sequence[object], shape: Shape) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ValueError(f"Sparse: expected a format among {', '.join(FORMATS)}, got {self.format!r}")
        if not isinstance(self.parts, Sequence):
            raise TypeError(f"Sparse: expected the parts as a tuple, got {type_of(self.parts)}")
        names = ("indices", "values") if self.format == "coo" else ("pointers", "indices", "values")
        if len(self.parts) != len(names):
            raise ValueError(
                f"Sparse: {self.format} has {len(names)} parts, ({', '.join(names)}); got {len(self.parts)}"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "shape", shape_of(self.shape, "Sparse"))

    def __repr__(self) -> str:
        values = self.parts[-1]
        stored = tuple(getattr(values, "shape", ("?",)))
        return (
            f"<fanin.Sparse {self.format} of shape {self.shape}: {stored[0] if stored else '?'} stored,"
            f" {getattr(values, 'dtype', '?')}>"
        )


@dataclass(frozen=True)
class Zero:
    """A symbolic zero: a gradient whose elements are all 0, without memory (rule A2). It adds only its dtype to the
    sum.

    >>> fanin.add_n([fanin.Zero((2,), "float64"), np.float32([1, 2])])
    array([1., 2.])
    """

    shape: tuple[int, ...]
    dtype: Any

    if TYPE_CHECKING:

        def __init__(self, shape: Shape, dtype: DTypeLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.shape, "Zero"))
        if _check_dtype("Zero", self.dtype) is None:
            raise TypeError("Zero: expected a dtype, got None")


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a sum, as it was rounded (`InputBuffer.stats`).

    They are the same on every device, except for the last places of `sumsq` and `norm`.
    """

    #: elements; of a sparse sum the stored ones, an index that is stored several times once; with a dense `out=`, all
    count: int
    #: the sum of the squares of the finite elements, in float64, which may be too small for it: 0, or inf; |z|^2 for
    #: complex ones
    sumsq: float
    absmax: float  #: the largest magnitude of a finite element
    nonfinite: int  #: the number of elements that are inf or NaN
    #: the key of the first contribution with an inf or NaN, if the sum has one; None without one or without a key
    first_bad_key: int | None
    #: the 2-norm of the finite elements, also where `sumsq` is 0 or inf; inf only if the norm itself exceeds float64
    norm: float = field(default=math.nan, compare=False)


def _buffer(call: str, buf: object) -> _core.InputBuffer:
    if not isinstance(buf, _core.InputBuffer):
        raise TypeError(f"{call}: expected a fanin.InputBuffer, got {type_of(buf)}")
    return buf


def global_norm(buf: _core.InputBuffer) -> float:
    """Return the 2-norm of all sums last taken of a buffer made with stats=True; inf if an element is inf or NaN, or if
    the norm exceeds float64.

    It is at most 4 units in the last place off the correctly rounded norm, however large or small the elements are.

    On a device with streams it waits for the streams that summed, like `InputBuffer.stats`.

    >>> buf = fanin.InputBuffer(2, stats=True)
    >>> buf.add(0, np.array([3.0])); buf.add(1, np.array([4.0])); _ = buf.take()
    >>> fanin.global_norm(buf)
    5.0
    """
    known = [s for s in map(_buffer("global_norm", buf).stats, range(len(buf))) if s is not None]
    if any(s.nonfinite for s in known):
        return math.inf
    return _core.in_default_modes(lambda: math.hypot(*(s.norm for s in known)))


def scale_factors(dtype: str, max_norm: float, norm: float) -> list[float]:
    """The factors that one after the other scale a sum of a dtype from `norm` to `max_norm`.

    Mostly it is one, `max_norm / norm`. A quotient below the normal numbers of the dtype that multiplies has lost its
    last places, or is 0: powers of two, which change no digit of an element, then come first.
    """
    wide = dtype in ("float64", "complex128")
    step, lowest = (-900, -1021) if wide else (-100, -125)  # of normal numbers, as math.frexp has exponents
    digits, exponent = math.frexp(max_norm)
    below, less = math.frexp(norm)
    digits, exponent = digits / below, exponent - less
    factors = []
    while digits and exponent < lowest:
        factors.append(math.ldexp(1.0, step))
        exponent -= step
    return [*factors, math.ldexp(digits, exponent)]


def scaled(x: object, out: object, max_norm: float, norm: float) -> object:
    """x * (max_norm / norm), written to `out` or, if that is None, to a fresh array."""
    dtype = str(getattr(x, "dtype", "")).rpartition(".")[2]  # of torch's dtypes, too
    for factor in _core.in_default_modes(lambda: scale_factors(dtype, max_norm, norm)):
        x = _core.add_n([x], out=out, scale=factor)
    return x


def _outs(sums: Sequence[object], out: object) -> Sequence[object]:
    """Check `out` of clip_norm: one array for each sum, of its shape and dtype, writable, disjoint from others."""
    if not isinstance(out, list | tuple) or len(out) != len(sums):
        raise ValueError(
            f"clip_norm: expected out= as a list of {len(sums)} arrays (or None), one for each sum; got {out!r:.80}"
        )
    pairs = {
        id(o): (i, x, o) for i, (x, o) in enumerate(zip(sums, out, strict=True)) if x is not None and o is not None
    }
    for i, (x, o) in enumerate(zip(sums, out, strict=True)):
        if x is None or o is None:
            continue
        like = (tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", "")))
        if (tuple(getattr(o, "shape", ())), str(getattr(o, "dtype", ""))) != like:
            raise ValueError(
                f"clip_norm: out[{i}]: expected an array of shape {like[0]} and dtype {like[1]}, as the sum has, got"
                f" {o!r:.80}"
            )
        if pairs[id(o)][1] is not x:
            raise ValueError(f"clip_norm: out[{i}] occurs twice, for two sums")
        _core.add_n([o], out=o)  # checks that it can be written; does not change it
    known = [o for _, _, o in pairs.values() if not isinstance(o, _core.Array)]
    shared = overlaps(known).pairs if len(known) > 1 else []
    if shared:
        raise ValueError("clip_norm: two arrays of out= may share memory")
    return out


def clip_norm(
    buf: _core.InputBuffer, sums: list[object], max_norm: float, *, out: Sequence[object] | None = None
) -> float:
    """Scale sums so that their global norm is at most `max_norm`, and return the norm before.

    If the norm is larger than `max_norm` and finite, each entry of `sums` is replaced by a fresh scaled sum; the arrays
    themselves are not written, because a sum may be the very array that was added. On a device with streams the call
    waits for the norm and scales on the current stream: call it in `with fanin.stream(s)`, where s is the stream of the
    take.

    Parameters
    ----------
    buf : InputBuffer
        A buffer made with stats=True.
    sums : list
        The list that `take` just returned.
    max_norm : float
        A non-negative number.
    out : sequence of arrays or None
        Arrays for the scaled sums, of their shapes and dtypes; they are always written, and `sums` stays as it is.
        `out=sums` scales in place, which is safe after `take(writable=True)`.

    Raises
    ------
    ValueError
        A negative `max_norm`, sums of another buffer, `out` of other shapes or dtypes.
    TypeError
        `sums` is no list, without `out`.
    CaptureError
        The stream is captured.

    Examples
    --------
    >>> buf = fanin.InputBuffer(2, stats=True)
    >>> buf.add(0, np.array([3.0])); buf.add(1, np.array([4.0]))
    >>> sums = buf.take()
    >>> fanin.clip_norm(buf, sums, 1.0), sums
    (5.0, [array([0.6]), array([0.8])])
    """
    _buffer("clip_norm", buf)
    if not (isinstance(max_norm, (int, float, np.floating, np.integer)) and max_norm >= 0):
        raise ValueError(f"clip_norm: expected a non-negative max_norm, got {max_norm!r}")
    if not hasattr(type(sums), "__len__"):
        raise TypeError(f"clip_norm: sums: expected the list that take() returned, got {type_of(sums)}")
    if len(sums) != len(buf):
        raise ValueError(f"clip_norm: expected the {counted(len(buf), 'sum')} of {buf.name}, got {len(sums)}")
    if out is None and not isinstance(sums, list):
        raise TypeError(
            f"clip_norm: expected the list that take() returned, whose entries are replaced, got {type_of(sums)}; or"
            " pass out="
        )
    outs = None if out is None else _outs(sums, out)
    norm = global_norm(buf)
    clips = math.isfinite(norm) and norm > max_norm
    for x in sums if clips else ():
        dtype = str(getattr(x.parts[-1] if isinstance(x, Sparse) else x, "dtype", ""))
        if x is not None and not (isinstance(x, Zero | float | complex) or "float" in dtype or "complex" in dtype):
            raise ValueError(f"clip_norm: expected arrays of floats, got {x!r:.80}")
    done: dict[int, object] = {}  # one array in two slots is scaled once
    for x, o in zip(sums, outs or [None] * len(sums), strict=True):
        if x is None or id(o if outs else x) in done or (outs and (o is None or (o is x and not clips))):
            continue
        if clips:
            done[id(o if outs else x)] = scaled(x, o, float(max_norm), norm)
        else:
            done[id(o if outs else x)] = _core.add_n([x], out=o) if outs else x
    if outs is None and clips:
        sums[:] = [None if x is None else done[id(x)] for x in sums]
    return norm
