"""The methods of `fanin.sim.Array` that need no C: views, operators, conversions. They are put on `_core.Array`.

Views are computed from addresses, shapes and strides; no element is read.
"""

from __future__ import annotations

import importlib
import math
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from . import _core

__tracebackhide__ = True  # no frames of ours in reports of pytest

NDArray = npt.NDArray[np.generic]


def ints(o: SupportsIndex | Iterable[SupportsIndex], what: str = "") -> tuple[int, ...]:
    """The integers of a shape or of axes: of a sequence, or one. what: begins the messages, "empty: shape: "."""
    is_one = hasattr(type(o), "__index__") and not (isinstance(o, np.ndarray) and o.ndim)
    try:
        items = (o,) if is_one else tuple(cast(Iterable[object], o))
    except TypeError:
        raise TypeError(f"{what}expected an integer or a sequence of integers, got {type(o).__name__}") from None
    if len(items) > 64:
        raise ValueError(f"{what}at most 64 dimensions are supported, not {len(items)}")
    for i in items:
        if isinstance(i, bool) or not hasattr(type(i), "__index__"):
            raise TypeError(f"{what}expected an integer, got {type(i).__name__}")
        if abs(operator.index(cast(SupportsIndex, i))) >= 1 << 63:
            raise ValueError(f"{what}cannot fit {i!r} into 64 bits")
        if what and operator.index(cast(SupportsIndex, i)) < 0:
            raise ValueError(f"{what}expected non-negative extents, got {i!r}")
    return tuple(operator.index(cast(SupportsIndex, i)) for i in items)


def strides_of(x: _core.Array, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a view of x with `shape`, which has as many elements; None if it needs a copy.

    Runs of axes with as many elements on both sides are matched; inside a run the old axes must be contiguous.
    """
    old = [(n, step) for n, step in zip(x.shape, x.strides, strict=True) if n != 1]
    strides, i, k = [x.itemsize] * len(shape), 0, 0
    while i < len(old) and k < len(shape):
        have, want, i_end, k_end = old[i][0], shape[k], i + 1, k + 1
        while have != want:
            if want < have:
                want, k_end = want * shape[k_end], k_end + 1
            else:
                have, i_end = have * old[i_end][0], i_end + 1
        if any(old[d][1] != old[d + 1][1] * old[d + 1][0] for d in range(i, i_end - 1)):
            return None
        step = old[i_end - 1][1]
        for d in reversed(range(k, k_end)):
            strides[d], step = step, step * shape[d]
        i, k = i_end, k_end
    return tuple(strides)


def on_cpu(x: object) -> bool:
    return isinstance(x, _core.Array) and x.device == "cpu"


def check_on_cpu(x: _core.Array, what: str) -> None:
    if not on_cpu(x):
        raise TypeError(
            f"{what} an array on a device is work for a stream: queue it with Machine.launch, or read the values with "
            "x.numpy()"
        )


def cpu_arrays() -> Any:
    """fanin.graph.cpu_arrays, which computes with arrays on the CPU."""
    return importlib.import_module("fanin.graph.cpu_arrays")


def recorder(x: _core.Array) -> Any:
    """The same, for an array on the CPU."""
    check_on_cpu(x, "computing with")
    return cpu_arrays()


def by_ufunc(name: str, *operands: object) -> Any:
    return getattr(np, name)(*operands) if any(map(on_cpu, operands)) else NotImplemented


def values(x: _core.Array, what: str) -> NDArray:
    """The values, to convert them to a Python number.

    A function of a graph tree computes with arrays alone: a number would be baked into its recording.
    """
    check_on_cpu(x, what)
    if _core.cpu_wants_handles():
        raise TypeError(
            f"{x!r} is not made a Python number: what is read while a function is recorded is decided once; compute "
            "with the array itself (np.where can be recorded), or read x.numpy().item() outside of functions, as a "
            "pipeline does between two of them (tree.pipeline)"
        )
    return x.numpy()


Core: Any = object  # whose attributes are those of _core.Array


class Array(Core):  # type: ignore[misc]
    """The methods; core.pyi has their types."""

    # Views

    def __getitem__(self, key: Any, /) -> Any:
        keys: list[object] = [*key] if isinstance(key, tuple) else [key]
        for at, k in enumerate(keys):
            if k is None or k is Ellipsis or isinstance(k, slice):
                continue
            if isinstance(k, bool) or not hasattr(type(k), "__index__") or np.ndim(cast(Any, k)):
                name = "numpy.ndarray" if isinstance(k, np.ndarray) else type(k).__name__
                where, instead = "on a device", "queue a kernel with Machine.launch, or index x.numpy()"
                if on_cpu(self):
                    where, instead = "of a graph tree", "np.take(x, places, axis) and np.where can be recorded"
                    instead += ", or index x.numpy() outside of functions"
                raise TypeError(
                    f"an array {where} is indexed by integers, slices, ... and None, which give views, not by {name}; "
                    f"{instead}"
                )
            keys[at] = operator.index(cast(SupportsIndex, k))  # an ndarray as an index would make NumPy read elements
        if Ellipsis not in keys:
            keys.append(Ellipsis)  # NumPy then returns a view even of one element
        like = {
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
            "version": 3,
        }
        part: Any = cast(Any, np.asarray(types.SimpleNamespace(__array_interface__=like)))[tuple(keys)]
        return self._view(part.__array_interface__["data"][0], part.shape, part.strides)

    def __len__(self) -> Any:
        if not self.ndim:
            raise TypeError("len() of an array of no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[_core.Array]:
        return map(self.__getitem__, range(len(self)))

    def transpose(self, *axes: Any) -> Any:
        """A view with the axes in another order; reversed without `axes`."""
        given = axes[0] if len(axes) == 1 else axes
        order = tuple(range(self.ndim))[::-1]
        if axes and given is not None:
            order = tuple(k + self.ndim * (k < 0) for k in ints(given))
            if sorted(order) != list(range(self.ndim)):
                raise ValueError(f"transpose: {given!r} does not name each of {self.ndim} axes once")
        shape, strides = self.shape, self.strides
        return self._view(self.address, tuple(shape[k] for k in order), tuple(strides[k] for k in order))

    @property
    def T(self) -> Any:
        """A view with the axes reversed."""
        return self.transpose()

    def reshape(self, *shape: Any) -> Any:
        """A view of another shape; ValueError if that needs a copy."""
        given = shape[0] if len(shape) == 1 else shape
        new = list(ints(given))
        fixed = [n for n in new if n != -1]
        size, no_view = math.prod(fixed), f"reshape: {self.shape} has no view of shape {given!r}"
        if min(fixed, default=0) < 0 or len(new) - len(fixed) > 1 or size >= 1 << 63:
            raise ValueError(no_view)
        if len(fixed) < len(new) and size and self.size % size == 0:
            new[new.index(-1)] = self.size // size
        elif len(fixed) < len(new) or size != self.size:
            raise ValueError(f"{no_view}: it has {self.size} elements")
        strides = strides_of(self, tuple(new)) if self.size else (0,) * len(new)  # the core sets those of no elements
        if strides is not None:
            return self._view(self.address, tuple(new), strides)
        if on_cpu(self):
            return self.copy().reshape(given)
        raise ValueError(
            f"reshape: {self.shape} with these strides has no view of shape {given!r} without a copy, and a copy is "
            "work for a stream: use Machine.empty and Machine.launch"
        )

    def broadcast_to(self, *shape: Any) -> Any:
        """A read-only view that repeats elements."""
        return self._broadcast(ints(shape[0] if len(shape) == 1 else shape))

    # NumPy's functions: on the CPU, in fanin.graph.cpu_arrays

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        if not on_cpu(self):
            raise TypeError(
                "an array on a device is not converted to NumPy silently: x.numpy() waits for the device's current "
                "stream and copies"
            )
        if copy is False:
            raise ValueError(
                f"__array__: copy=False, but the values of {self!r} can only be copied, because its memory ends with "
                "its step: x.numpy(), or np.asarray(x) without copy="
            )
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> object:
        return recorder(self).of_ufunc(*args, **kwargs)

    def __array_function__(self, *args: Any, **kwargs: Any) -> object:
        return recorder(self).of_function(*args, **kwargs)

    def __setitem__(self, key: Any, value: object, /) -> None:
        if not on_cpu(self):
            del self[key]
        recorder(self).assign(self[key], value)

    def __delitem__(self, key: Any, /) -> NoReturn:
        raise TypeError("an array on a device is written by a kernel: queue it with Machine.launch")

    # Operators

    def __pow__(self, other: object, mod: None = None, /) -> Any:
        # ndarray.__pow__ calls these for a common exponent; the bits of np.power differ before NumPy 2.3
        usual = {2: "square", 0.5: "sqrt", -1: "reciprocal"}
        if type(other) in (int, float, complex) and self.dtype.kind in "bc" and on_cpu(self):
            return recorder(self).raised(self, other)
        name = usual.get(other) if type(other) in (int, float) and self.dtype.char in "efd" else None  # type: ignore[call-overload]
        return by_ufunc(name, self) if name else by_ufunc("power", self, other)

    def __ipow__(self, other: object, mod: None = None, /) -> Any:
        made = self**other
        if not np.can_cast(made.dtype, self.dtype, "same_kind"):
            raise TypeError(f"x **= y: the result has dtype {made.dtype}, which does not fit into {self.dtype}")
        recorder(self).assign(self, made)
        return self

    def __rpow__(self, other: object, mod: None = None, /) -> Any:
        return by_ufunc("power", other, self)

    def __bool__(self) -> bool:
        return bool(values(self, "testing"))

    def __float__(self) -> float:
        return float(values(self, "converting"))

    def __int__(self) -> int:
        return int(values(self, "converting"))

    def __complex__(self) -> complex:
        return complex(values(self, "converting"))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {self!r}: it is memory of a device of this process; x.numpy() is its values"
        )


#: Operators of two operands, and NumPy's functions.
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift",
    "rshift": "right_shift", "matmul": "matmul", "divmod": "divmod",
}  # fmt: skip
UNARY = {"invert": "invert", "neg": "negative", "pos": "positive", "abs": "absolute"}
COMPARISONS = {
    "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal", "gt": "greater", "ge": "greater_equal"
}  # fmt: skip


def refusing(ufunc: str, what: str) -> tuple[Any, Any]:
    """The methods of an operator of one operand and of a comparison; on a device they raise."""

    def of_one(self: _core.Array) -> object:
        check_on_cpu(self, what)
        return getattr(np, ufunc)(self)

    def of_two(self: _core.Array, other: object, /) -> object:
        check_on_cpu(self, what)
        return getattr(np, ufunc)(self, other)

    return of_one, of_two


def binary(ufunc: str) -> tuple[Any, Any, Any]:
    """The methods x + y, y + x and x += y."""
    return (
        lambda self, other, /: by_ufunc(ufunc, self, other),
        lambda self, other, /: by_ufunc(ufunc, other, self),
        lambda self, other, /: by_ufunc(ufunc, self, other, self),
    )


def install() -> None:
    methods = {name: f for name, f in vars(Array).items() if callable(f) or isinstance(f, property)}
    for name, ufunc in BINARY.items():
        kinds = ("", "r") if name in ("matmul", "divmod") else ("", "r", "i")
        methods |= {f"__{kind}{name}__": method for kind, method in zip(kinds, binary(ufunc), strict=False)}
    methods |= {f"__{name}__": refusing(ufunc, "computing with")[0] for name, ufunc in UNARY.items()}
    methods |= {f"__{name}__": refusing(ufunc, "comparing")[1] for name, ufunc in COMPARISONS.items()}
    for name, method in methods.items():
        setattr(_core.Array, name, method)


install()
