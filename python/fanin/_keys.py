"""Which values a recording may take for equal: `exactly`, for graph trees and for recorded steps of `fanin.tape`."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

__tracebackhide__ = True  # no frames of ours in reports of pytest

PLAIN = frozenset({int, bool, str, bytes, type(None)})
DEEPEST = 30  # levels of values in values that are taken apart


class ArrayInside(TypeError):
    """The value is an array, or has one in it, whose elements may change. Its text is the name of the array's type."""


class _Itself:
    """An object that no description of its parts stands for: equal to itself alone, while its hash stays."""

    __slots__ = ("code", "it")

    def __init__(self, it: object) -> None:
        self.it, self.code = it, hash(it)

    def __hash__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.it is self.it and other.code == self.code


def exactly(x: object) -> tuple[object, ...]:
    """A key that is equal only for values of the same type and bits, at every depth: 1, 1.0 and True are equal, and so
    are 0.0 and -0.0, Decimal("1.0") and Decimal("1.00"). TypeError for what is not hashable, `ArrayInside` for arrays.
    """
    key = _key(x)
    hash(x)
    return key


def _refuse_arrays(kind: type) -> None:
    if hasattr(kind, "__dlpack__") and not issubclass(kind, np.generic):
        raise ArrayInside(kind.__name__)


def _key(x: object, depth: int = 0) -> tuple[object, ...]:
    kind = type(x)
    if kind in PLAIN:
        return kind, x
    if isinstance(x, float | complex) and kind in (float, complex):
        return kind, struct.pack("dd", x.real, x.imag)
    if isinstance(x, np.generic):
        return kind, x.tobytes(), x.dtype
    if depth > DEEPEST:  # it may contain itself
        return kind, _Itself(x)
    if isinstance(x, tuple | list | frozenset | set) and kind in (tuple, list, frozenset, set):
        return kind, _keys(x, depth)  # of a set in the order in which functions see it
    if isinstance(x, dict) and kind is dict:
        return kind, _keys(x, depth), _keys(x.values(), depth)
    _refuse_arrays(kind)
    if kind.__eq__ is object.__eq__:  # equal to itself alone
        return kind, x
    try:
        fn, args, state, items, pairs = (*x.__reduce_ex__(2), None, None, None)[:5]  # as pickle takes it apart
        lists = [part if part is None else tuple(part) for part in (items, pairs)]
        return kind, fn, _keys((args, state, *lists), depth)
    except Exception:  # it cannot be taken apart, or has arrays
        return kind, _Itself(x)


def _keys(xs: Iterable[object], depth: int) -> tuple[object, ...]:
    return tuple([_key(x, depth + 1) for x in xs])
