"""Finds arrays that trees do not show: in dataclasses, sets, deques, subclasses of list and dict, memoryviews,
iterators.

Arrays in such an object cannot be exchanged for private memory and back: a write would reach the caller's array at
once, or a result would stay in private memory. So they are refused where the object can be read. Attributes of objects
of other classes are not read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np

from .. import _core
from .._interop.protocols import NDArray
from .._words import type_of

EMPTY: tuple[Any, ...] = ([], (), set(), {}, {}.values(), {}.items(), collections.deque(), np.empty(0))

#: Iterators over possible arrays: they run after the function returned, or are used up once read.
LATER: tuple[type, ...] = (
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    map,
    zip,
    filter,
    enumerate,
    reversed,
    np.nditer,
    *(type(x) for x in EMPTY[4:6]),
    *(type(iter(x)) for x in EMPTY),
    *(type(reversed(x)) for x in EMPTY[3:7]),
    type(reversed([])),
    type(iter(int, 0)),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)

#: Containers by class, and what shows one array.
BOXES = (list, tuple, dict, set, frozenset, collections.deque, Mapping, collections.UserList)
VIEWS = (memoryview, np.flatiter, np.void)

#: Classes that hold no arrays.
PLAIN = frozenset({np.ndarray, np.float64, int, float, bool, str, type(None)})

#: Depth to which containers within containers are read.
DEEPEST = 8

NO_GENERATORS = (
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.iscoroutinefunction, "a coroutine function"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
)


def check_function(fn: Callable[..., object], api: str) -> None:
    """TypeError for a non-function, and for a function whose body does not run when it is called."""
    if not callable(fn):
        raise TypeError(f"{api}: expected a function, got {fn!r:.80}")
    for is_one, words in NO_GENERATORS:
        if is_one(fn) or is_one(getattr(type(fn), "__call__", None)):  # noqa: B004
            raise TypeError(
                f"{api}: expected a function that has done its work when it returns, got {words}: later writes to"
                " the arguments would be missed; pass one that runs it to its end and returns a list"
            )


def may_hold(kind: type) -> bool:
    """Whether objects of a class are read for arrays."""
    if kind in PLAIN:
        return False
    return issubclass(kind, BOXES + VIEWS + LATER) or dataclasses.is_dataclass(kind) or kind is functools.partial


def held(x: object, kinds: tuple[type, ...], depth: int = 0) -> Iterator[object]:
    """The arrays in an object."""
    if is_boxed(x):
        for item in x.flat:
            yield from held(item, kinds, depth + 1)
    elif isinstance(x, kinds):
        yield x
    elif isinstance(x, VIEWS):
        yield from shown(x)
    elif depth < DEEPEST and may_hold(type(x)) and not isinstance(x, LATER):
        for item in items_of(x):
            yield from held(item, kinds, depth + 1)


def is_boxed(x: object) -> TypeGuard[NDArray]:
    """Whether it is an array of objects."""
    return isinstance(x, np.ndarray) and x.dtype.hasobject


#: Classes that show no memory of others.
QUIET: tuple[type, ...] = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, *BOXES, *LATER)


def shows(x: Any) -> bool:
    """Whether an object, no array of this library, exports memory: a bytearray, an
    array.array, a ctypes array, a tensor beside ndarrays.
    """
    library = sys.modules.get("torch")
    if isinstance(x, VIEWS) or (library is not None and isinstance(x, library.Tensor)):
        return True
    if isinstance(x, QUIET):
        return False
    if hasattr(type(x), "__dlpack__"):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


def meet(x: object, array: object) -> bool:
    """Whether an object that shows memory shows a byte of an array; False if that cannot be decided."""
    try:
        one = next(shown(x), None) if isinstance(x, VIEWS) else x
        return one is not None and bool(_core.overlap(one, array))
    except (TypeError, ValueError, BufferError):
        return False


def shown(x: object) -> Iterator[object]:
    """The array that a memoryview or `a.flat` shows."""
    try:
        base = x.base if isinstance(x, (np.flatiter, np.void)) else np.asarray(x)
        if base is not None:
            yield base
    except (ValueError, TypeError):
        return  # released, or of a format that NumPy does not support


def items_of(x: object) -> Iterable[object]:
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    attributes = list(vars(x).values()) if hasattr(x, "__dict__") else []
    if dataclasses.is_dataclass(x):
        attributes += [getattr(x, f.name, None) for f in dataclasses.fields(x)]
    if isinstance(x, Mapping):
        attributes += list(x.values())
    elif isinstance(x, BOXES):
        attributes += list(x)
    return attributes


def check_argument(x: object, name: Callable[[], str], kinds: tuple[type, ...]) -> None:
    """TypeError for an argument of a class of `may_hold` that holds an array; a memoryview is a buffer of its
    own kind, and passed on.
    """
    if isinstance(x, VIEWS):
        return
    if isinstance(x, LATER):
        raise TypeError(f"{name()}: expected arrays in lists, tuples and dicts, got {type_of(x)}: pass list(x)")
    if (array := next(held(x, kinds), None)) is not None:
        raise TypeError(
            f"{name()}: expected arrays in lists, tuples, named tuples and dicts, got {type_of(x)} that holds"
            f" {type_of(array)}: pass the arrays themselves, and make the other of them inside"
        )


def check_result(x: object, name: str, kinds: tuple[type, ...], is_private: Callable[[object], bool]) -> None:
    """TypeError for a part of a result, no array itself, that holds memory of an input, or runs later."""
    if isinstance(x, LATER):
        raise TypeError(
            f"{name} is {type_of(x)}: expected a result that is there when the function returns; return a list of it"
        )
    if any(is_private(array) for array in held(x, kinds)):
        raise TypeError(
            f"{name} is {type_of(x)} that holds memory of an input: expected arrays in lists, tuples, named"
            " tuples and dicts; return the arrays, and make the other of them outside"
        )
