"""An ndarray that notes when it is written, and of which input it is a view.

What memory cannot tell: a write that left every byte as it was (`x *= 1`), whether it was made under no_grad, which of several overlapping inputs an output is a
view of. What this class cannot tell, memory does: writes by `np.asarray(x)`, a memoryview or C code. So it never has the last word on whether something was
written; it only adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._core import address
from .private import Array, plain


class Log:
    """Which arrays were written through tracked views: (number of the array, whether gradients were on). Quiet until `spans` is set."""

    def __init__(self, grad_enabled: Callable[[], bool] | None) -> None:
        self.grad_enabled = grad_enabled
        self.writes: set[tuple[int, bool]] = set()
        self.spans: list[
            tuple[int, int]
        ] = []  #: of each array the group's private memory, from its first byte to its end

    def note(self, array: Any) -> None:
        """A write through `array`, if that is a view of an input."""
        origin = array.fanin_origin
        if origin is None or origin >= len(self.spans):
            return
        low, high = self.spans[origin]
        if low <= address(array) < high:
            self.writes.add((origin, self.grad_enabled is None or bool(self.grad_enabled())))


class Tracked(np.ndarray[Any, Any]):
    """See the top of this file. What is computed from tracked arrays is plain; views of them are tracked."""

    fanin_log: Log | None
    fanin_origin: int | None

    def __array_finalize__(self, other: Any) -> None:
        self.fanin_log = getattr(other, "fanin_log", None)
        self.fanin_origin = getattr(other, "fanin_origin", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        call = ufunc if method == "__call__" else getattr(ufunc, method)
        given = [x.view(np.ndarray) if type(x) is Tracked else x for x in inputs]
        if out is None:
            result = call(*given, **kwargs)
            if method == "at":
                written(inputs[0])
            return result
        result = call(*given, out=tuple([x.view(np.ndarray) if type(x) is Tracked else x for x in out]), **kwargs)
        for o in out:
            written(o)
        if isinstance(result, tuple):
            return tuple([o if o is not None else made for o, made in zip(out, result, strict=True)])
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = kwargs.get("out")
        result = func(*stripped(args), **stripped(kwargs))
        if func in WRITERS and args:
            written(args[0])
        for o in out if isinstance(out, tuple) else (out,):
            written(o)
        return out if isinstance(out, Tracked) else result

    def __getitem__(self, key: Any) -> Any:
        if not basic(key):
            result = plain(self)[stripped(key)]
            if not isinstance(result, np.ndarray) or result.base is None:
                return result
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        written(self)


#: What an index may consist of that gives a view.
BASIC = (int, slice, type(None), type(...), str, np.integer)


def basic(key: Any) -> bool:
    """Whether an index gives a view, or an element."""
    return all(isinstance(k, BASIC) for k in key) if type(key) is tuple else isinstance(key, BASIC)


def stripped(x: Any) -> Any:
    """Arguments without tracked arrays; what is neither a list, tuple nor dict is looked at only itself."""
    if type(x) is Tracked:
        return x.view(np.ndarray)
    if type(x) in (list, tuple):
        return type(x)(stripped(item) for item in x)
    return {k: stripped(v) for k, v in x.items()} if type(x) is dict else x


def written(x: Any) -> None:
    """Note a write, if anybody is to be told."""
    if type(x) is Tracked and x.fanin_log is not None:
        x.fanin_log.note(x)


#: Functions that write their first argument.
WRITERS = frozenset({np.copyto, np.place, np.put, np.put_along_axis, np.putmask, np.fill_diagonal})

#: Methods of ndarray that write it.
IN_PLACE = ("fill", "sort", "partition", "put", "setfield", "resize")

#: Methods that make an array of their own, and would make it a tracked one.
FRESH = (
    "argmax", "argmin", "argpartition", "argsort", "astype", "byteswap", "choose", "clip", "compress", "conj", "conjugate", "copy", "cumprod",
    "cumsum", "dot", "flatten", "mean", "nonzero", "prod", "repeat", "round", "searchsorted", "std", "sum", "take", "trace", "var",
    "min", "max", "all", "any", "ptp", "__copy__", "__deepcopy__",
)  # fmt: skip


def writing(name: str) -> Callable[..., Any]:
    """A method that notes the write and does it."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        result = whole(self, *args, **kwargs)
        written(self)
        return result

    method.__name__ = name
    return method


def making(name: str) -> Callable[..., Any]:
    """A method whose result is plain; `out=` and an in-place byteswap are writes."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if name == "byteswap" and (args or kwargs):
            result = whole(self, *args, **kwargs)
            written(self)
            return result
        result = whole(plain(self), *stripped(args), **stripped(kwargs))
        written(out)
        return out if isinstance(out, Tracked) else result

    method.__name__ = name
    return method


for _name in IN_PLACE:
    setattr(Tracked, _name, writing(_name))
for _name in FRESH:
    if hasattr(np.ndarray, _name):
        setattr(Tracked, _name, making(_name))


def tracked(arrays: list[Any], spans: list[tuple[int, int]], log: Log) -> None:
    """Begin to track private arrays, whose numbers are their places."""
    for number, array in enumerate(arrays):
        array.fanin_log, array.fanin_origin = log, number
    log.spans = spans


__all__ = ["Array", "Log", "Tracked", "tracked"]
