"""What a slot is declared to be, and two kinds of gradient that NumPy has no class for."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _core
from ._explain import counted

__all__ = ["Slot", "Sparse", "Stats", "Zero", "clip_norm", "global_norm"]

FORMATS = ("coo", "csr", "csc", "bsr", "bsc")


def shape_of(shape: Any, who: str) -> tuple[int, ...]:
    """A shape as a tuple of ints; an int is the shape of one axis, as in NumPy."""
    try:
        result = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(operator.index(n) for n in shape)
    except TypeError:
        raise TypeError(f"{who}: expected a shape, a tuple of ints, got {shape!r}") from None
    if any(n < 0 for n in result):
        raise ValueError(f"{who}: expected a shape of extents from 0 on, got {result}")
    return result


@dataclass(frozen=True)
class Slot:
    """What is declared of one slot of an `InputBuffer`; whatever is None is fixed by the first gradient of each pass.

    With a shape, a gradient that it broadcasts to is summed to it; anything else is an error. With a dtype, gradients are cast to it where that
    loses no kind of value (as NumPy casts: a wider integer that does not fit wraps, a float that is too large becomes inf). `device` is a name, as "cpu" or "sim:0". `accumulate` is the dtype in which the sum runs, or "exact".
    `combine(old, new)` sums objects that are no arrays. `name` is for messages and pictures: a str, or a descriptor (`fanin.descriptors`), whose
    `expr()` is shown.

    >>> buf = fanin.InputBuffer([fanin.Slot(shape=3, name="bias"), fanin.Slot(combine=lambda a, b: a | b)])
    >>> buf.add(1, {1}); buf.add(1, {2}); buf.take()
    [None, {1, 2}]
    """

    shape: tuple[int, ...] | None = None
    dtype: Any = None
    device: str | None = None
    accumulate: Any = None
    combine: Callable[[Any, Any], Any] | None = None
    name: Any = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", shape_of(self.shape, "Slot"))
        if self.device is not None and not isinstance(self.device, str):
            raise TypeError(f"Slot: expected a device's name, as 'cpu' or 'sim:0', got {self.device!r}")
        if self.combine is not None and not callable(self.combine):
            raise TypeError(f"Slot: expected combine(old, new), got {self.combine!r}")
        for name in ("dtype", "accumulate"):
            if name == "accumulate" and isinstance(self.accumulate, str) and self.accumulate == "exact":
                continue
            try:
                _core.dtype_name(getattr(self, name))
            except (TypeError, ValueError) as e:
                raise type(e)(f"Slot: {name}: {e}") from None


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse gradient as its parts, which are arrays of any library.

    format "coo": parts = (indices, values) with indices of shape (sparse axes, n) and values of shape (n, *dense axes). "csr", "csc":
    parts = (pointers, indices, values), pointers by row or by column. "bsr", "bsc": the same of blocks, values of shape (blocks, height, width).
    An index may come twice; its values add up. `shape` is that of the dense array.

    >>> row = fanin.Sparse("coo", (np.array([[2]]), np.array([[1.0, 1.0]])), (4, 2))
    >>> fanin.add_n([row, np.zeros((4, 2))])[2]
    array([1., 1.])
    """

    format: str
    parts: tuple[Any, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"Sparse: expected a format among {', '.join(FORMATS)}, got {self.format!r}")
        if not isinstance(self.parts, Sequence):
            raise TypeError(f"Sparse: expected the parts as a tuple, got a {type(self.parts).__name__}")
        names = ("indices", "values") if self.format == "coo" else ("pointers", "indices", "values")
        if len(self.parts) != len(names):
            raise ValueError(
                f"Sparse: {self.format} has {len(names)} parts, ({', '.join(names)}); got {len(self.parts)}"
            )
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "shape", shape_of(self.shape, "Sparse"))

    def __repr__(self) -> str:
        stored = getattr(self.parts[-1], "shape", ("?",))
        return f"<fanin.Sparse {self.format} of shape {self.shape}, values of shape {tuple(stored)}>"


@dataclass(frozen=True)
class Zero:
    """A symbolic zero: a gradient whose every element is 0, without memory (rule A2). It adds its dtype to the sum, nothing else.

    >>> fanin.add_n([fanin.Zero((2,), "float64"), np.float32([1, 2])])
    array([1., 2.])
    """

    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.shape, "Zero"))
        try:
            name = _core.dtype_name(self.dtype)
        except (TypeError, ValueError) as e:
            raise type(e)(f"Zero: {e}") from None
        if name is None:
            raise TypeError("Zero: expected a dtype, got None")


@dataclass(frozen=True, slots=True)
class Stats:
    """What is known of a sum beside its value (`InputBuffer.stats`), gathered as it was rounded.

    The same figures whatever the device is, but for the last places of `sumsq`.
    """

    count: int  #: its elements; of a sparse sum, those that are stored
    sumsq: float  #: the sum of the squares of the finite elements, in float64; |z|^2 for complex ones
    absmax: float  #: the largest magnitude of a finite element
    nonfinite: int  #: how many elements are inf or NaN
    first_bad_key: int | None  #: the first key that brought an inf or NaN to a sum that has one; None where nobody did, or it had no key


def global_norm(buf: _core.InputBuffer) -> float:
    """The 2-norm of all sums that were last taken of a buffer made with stats=True, together; inf or NaN elements make it inf.

    On a device with streams it waits for the streams that summed, as `InputBuffer.stats` does.

    >>> buf = fanin.InputBuffer(2, stats=True)
    >>> buf.add(0, np.array([3.0])); buf.add(1, np.array([4.0])); _ = buf.take()
    >>> fanin.global_norm(buf)
    5.0
    """
    known = [s for s in map(buf.stats, range(len(buf))) if s is not None]
    if any(s.nonfinite for s in known):
        return math.inf
    return math.sqrt(math.fsum(s.sumsq for s in known))


def clip_norm(buf: _core.InputBuffer, sums: Sequence[Any], max_norm: float) -> float:
    """Scale the sums that were just taken of a buffer with stats=True so that their global norm is at most `max_norm`; returns what it was.

    sums: what `take` gave, arrays that may be written (`take(writable=True)`). Each is read and written once, and only where the norm is too
    large; a norm that is not finite leaves them as they are. On a device with streams it waits for the norm, and scales on the current stream:
    call it in `with fanin.stream(s)`, s being the stream that the sums were taken for. CaptureError while that is captured. ValueError: a `max_norm` that is no number from 0 on, or sums of another buffer.

    >>> buf = fanin.InputBuffer(2, stats=True)
    >>> buf.add(0, np.array([3.0])); buf.add(1, np.array([4.0]))
    >>> sums = buf.take(writable=True)
    >>> fanin.clip_norm(buf, sums, 1.0), sums
    (5.0, [array([0.6]), array([0.8])])
    """
    if not (isinstance(max_norm, (int, float, np.floating, np.integer)) and max_norm >= 0):
        raise ValueError(f"clip_norm: expected max_norm from 0 on, got {max_norm!r}")
    if len(sums) != len(buf):
        raise ValueError(f"clip_norm: expected the {counted(len(buf), 'sum')} of {buf.name}, got {len(sums)}")
    norm = global_norm(buf)
    if math.isfinite(norm) and norm > max_norm:
        apart = list({id(x): x for x in sums if x is not None}.values())
        for x in apart:
            if not hasattr(x, "dtype") or ("float" not in str(x.dtype) and "complex" not in str(x.dtype)):
                raise ValueError(f"clip_norm: expected arrays of floats, got {x!r:.80}")
            _core.add_n([x], out=x)  # it can be written, and is not changed by this
        for x in apart:
            _core.add_n([x], out=x, scale=float(max_norm) / norm)
    return norm
