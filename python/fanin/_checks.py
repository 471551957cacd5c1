"""Checks of arguments of calls that happen once a pass or less often. Each raises with `what`, "call: argument"."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any, SupportsIndex, cast

import numpy as np

from ._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest


def integer(what: str, x: object, least: int | None = None) -> int:
    """Return an integer, of at least `least`. A bool and an array are none."""
    if isinstance(x, bool | np.bool_ | np.ndarray) or not hasattr(type(x), "__index__"):
        raise TypeError(f"{what}: expected an integer, got {type_of(x)}")
    n = operator.index(cast(SupportsIndex, x))
    if least is not None and n < least:
        raise ValueError(f"{what}: expected an integer of at least {least}, got {n}")
    return n


def number(what: str, x: object) -> float:
    """Return a real number as a float. A string and an array are none."""
    if isinstance(x, str | bytes | np.ndarray) or not (hasattr(type(x), "__float__") or hasattr(type(x), "__index__")):
        raise TypeError(f"{what}: expected a number, got {type_of(x)}")
    return float(cast(float, x))


def positive(what: str, x: object) -> float:
    """Return a number above 0; inf is one."""
    n = number(what, x)
    if math.isnan(n) or n <= 0:
        raise ValueError(f"{what}: expected a number above 0, got {n}")
    return n


def flag(what: str, x: object) -> bool:
    """Return a bool, NumPy's too."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{what}: expected a bool, got {type_of(x)}")
    return bool(x)


def function(what: str, x: object) -> None:
    """Check that an object can be called."""
    if not callable(x):
        raise TypeError(f"{what}: expected a function, got {type_of(x)}")


def sequence(what: str, x: object, of: str) -> list[Any]:
    """Return the items of a sequence; `of` says of what. A string, a dict, a set, an array without axes and a scalar of
    NumPy are none.
    """
    no_axes = isinstance(x, np.generic) or (isinstance(x, np.ndarray) and not x.ndim)
    if not no_axes and not isinstance(x, str | bytes | Mapping | Set):
        try:
            return list(cast(Iterable[Any], x))
        except TypeError:
            if hasattr(type(x), "__iter__"):
                raise  # of an iterator of the user's
    raise TypeError(f"{what}: expected a sequence of {of}, got {type_of(x)}")
