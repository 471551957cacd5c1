"""An ndarray that records writes to it, and the input that it is a view of.

It records what memory does not show: a write that left every byte as it was (`x *= 1`), whether it was made under
no_grad, which of several overlapping inputs an output is a view of. Memory shows what this class misses: writes by
`np.asarray(x)`, a memoryview or C code. So it never has the last word on whether something was written; it only adds to
it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .. import _core
from .._core import address
from .._interop.protocols import NDArray
from .caller_arrays import RunArrays
from .private_copies import plain


class Log:
    """Which arrays were written through tracked views, while there is a `run`.

    `writes`: (number of the array whose view was written, whether gradients were on). `met`: the numbers of all arrays
    that share a byte with what was written.
    """

    def __init__(self, grad_enabled: Callable[[], bool] | None) -> None:
        self.grad_enabled = grad_enabled
        self.writes: set[tuple[int, bool]] = set()
        self.met: set[int] = set()
        self.run: RunArrays | None = None
        self._seen: set[object] = set()

    def note(self, array: Tracked) -> None:
        """A write through `array`, if that is a view of an input, has an element, and can be written: some functions
        accept another one, and leave it alone.
        """
        origin, run = array.fanin_origin, self.run
        if origin is None or run is None or array.size == 0 or not array.flags.writeable:
            return
        number = run.plan.where[origin].group
        if not 0 <= address(array) - run.began(number) < max(run.plan.groups[number].size, 1):
            return
        self.writes.add((origin, self.grad_enabled is None or bool(self.grad_enabled())))
        self.met.add(origin)
        others = run.plan.groups[number].numbers
        key = (address(array), array.shape, array.strides, array.dtype.itemsize)
        if len(others) == 1 or key in self._seen:
            return
        self._seen.add(key)
        mine = plain(array)
        self.met.update(u for u in others if u not in self.met and _core.overlap(mine, run.as_it_was(u)))


class Tracked(NDArray):
    """See the top of this file. What is computed from tracked arrays is plain; views of them are tracked."""

    fanin_log: Log | None
    fanin_origin: int | None

    def __array_finalize__(self, other: object) -> None:
        self.fanin_log = getattr(other, "fanin_log", None)
        self.fanin_origin = getattr(other, "fanin_origin", None)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, out: tuple[object, ...] | None = None, **kwargs: object
    ) -> object:
        call: Callable[..., object] = ufunc if method == "__call__" else getattr(ufunc, method)
        given = [plain(x) if type(x) is Tracked else x for x in inputs]
        if out is None:
            result = call(*given, **kwargs)
            if method == "at":
                written(inputs[0])
            return result
        result = call(*given, out=tuple([plain(x) if type(x) is Tracked else x for x in out]), **kwargs)
        for o in out:
            written(o)
        if isinstance(result, tuple):
            return tuple([o if o is not None else made for o, made in zip(out, result, strict=True)])
        return out[0]

    def __array_function__(
        self, func: Callable[..., object], types: object, args: Iterable[object], kwargs: Mapping[str, object]
    ) -> object:
        result = func(*stripped(args), **stripped(kwargs))
        names = parameters(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if names and writes_first(func, given, given.get(names[0])):
            written(given[names[0]])
        out = given.get("out")
        for o in out if isinstance(out, tuple) else (out,):
            written(o)
        return out if isinstance(out, Tracked) else result

    def __getitem__(self, key: Any) -> Any:
        if not basic(key):
            result = plain(self)[stripped(key)]
            if not isinstance(result, np.ndarray) or result.base is None:
                return result
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: object) -> None:
        super().__setitem__(key, value)
        written(self)

    def view(self, *args: object, **kwargs: object) -> Any:
        """A view that stays tracked where an ndarray is requested."""
        kind = kwargs.get("type", args[-1] if args else None)
        if kind is not np.ndarray:
            return super().view(*args, **kwargs)
        rest = [a for a in args if a is not np.ndarray]
        return super().view(*rest, **{k: v for k, v in kwargs.items() if k != "type"})

    def __array__(self, *args: object, **kwargs: Any) -> Any:
        return plain(self).__array__(*args, **kwargs)


#: What an index may consist of that gives a view.
BASIC = (int, slice, type(None), type(...), str, np.integer)


def basic(key: object) -> bool:
    """Whether an index gives a view, or an element."""
    return all(isinstance(k, BASIC) for k in key) if type(key) is tuple else isinstance(key, BASIC)


def stripped(x: Any) -> Any:
    """Arguments without tracked arrays; containers other than list, tuple and dict are not entered."""
    if type(x) is Tracked:
        return plain(x)
    if type(x) in (list, tuple):
        return type(x)(stripped(item) for item in x)
    return {k: stripped(v) for k, v in x.items()} if type(x) is dict else x


def written(x: object) -> None:
    """Record a write, if there is a log."""
    if type(x) is Tracked and x.fanin_log is not None:
        x.fanin_log.note(x)


#: Functions that write their first argument.
WRITERS = frozenset({np.copyto, np.place, np.put, np.put_along_axis, np.putmask, np.fill_diagonal})


def writes_first(func: object, given: dict[str, object], first: object) -> bool:
    """Whether a function writes its first argument."""
    if func is np.nan_to_num:
        return not given.get("copy", True) and isinstance(first, np.ndarray) and first.dtype.kind in "fc"
    return func in WRITERS or bool(given.get("overwrite_input"))


#: Parameters of functions that may be written in C, without a signature.
NAMES: dict[object, tuple[str, ...]] = {
    np.concatenate: ("arrays", "axis", "out"),
    np.dot: ("a", "b", "out"),
    np.copyto: ("dst", "src", "casting", "where"),
    np.putmask: ("a", "mask", "values"),
}


@functools.cache
def parameters(func: Callable[..., object]) -> tuple[str, ...]:
    """The names of a function's parameters that can be given by position."""
    if func in NAMES:
        return NAMES[func]
    try:
        every = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


#: Methods of ndarray that write it.
IN_PLACE = ("fill", "sort", "partition", "put", "setfield", "resize")

#: Which argument of a method is `out`, counted from 0.
OUT_AT = {
    **dict.fromkeys(("argmax", "argmin", "choose", "dot", "round", "min", "max", "all", "any"), 1),
    **dict.fromkeys(("mean", "sum", "prod", "std", "var", "cumsum", "cumprod", "take", "compress", "clip"), 2),
    "trace": 4,
}

#: Methods that make an array of their own, and would make it a tracked one.
FRESH = (
    *OUT_AT, "argpartition", "argsort", "astype", "byteswap", "conj", "conjugate", "copy", "flatten", "nonzero",
    "repeat", "searchsorted", "ptp", "__copy__", "__deepcopy__",
)  # fmt: skip


def writing(name: str) -> Callable[..., object]:
    """A method that notes the write and does it."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: object, **kwargs: object) -> object:
        result = whole(self, *args, **kwargs)
        written(self)
        return result

    method.__name__ = name
    return method


def making(name: str) -> Callable[..., object]:
    """A method whose result is plain; `out=` and an in-place byteswap are writes."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: object, **kwargs: object) -> object:
        at = OUT_AT.get(name, len(args))
        out = args[at] if at < len(args) else kwargs.get("out")
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


def assigned(name: str) -> property:
    """An attribute whose assignment writes elements."""
    whole = getattr(np.ndarray, name)

    def assign(self: Tracked, value: object) -> None:
        whole.__set__(self, value)
        written(self)

    return property(whole.__get__, assign)


for _name in ("real", "imag", "flat"):
    setattr(Tracked, _name, assigned(_name))


def tracked(run: RunArrays, log: Log) -> None:
    """Begin to track the private arrays of a run, whose numbers are their places."""
    for number, array in enumerate(run.arrays):
        array.fanin_log, array.fanin_origin = log, number
    log.run = run
