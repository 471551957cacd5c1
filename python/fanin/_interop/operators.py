"""Sums by operators: of objects, and in a pass that records itself (A1, A8)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import cast

import numpy as np

from .. import _core
from ..slots import Sparse, Zero
from .classes import SCALARS, is_plain, is_sparse, is_torch, named
from .protocols import Computed, Shape
from .records import Conformed, Refusal, Refused, refuse
from .torch import convert


def combine(function: Callable[[object, object], object] | None, old: object, new: object) -> object:
    """The sum of two of which one is an object, or of two arrays in a pass that records itself."""
    result: object
    if is_plain(old) and is_plain(new):
        shapes = tuple(getattr(old, "shape", ())), tuple(getattr(new, "shape", ()))
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected a gradient of shape {shapes[0]} as those before, got {shapes[1]} (A9)")
        if isinstance(old, Sparse) or isinstance(new, Sparse):
            raise TypeError(
                f"{named(old)} and {named(new)}: a pass that records itself sums by the arrays' own +, and a"
                " fanin.Sparse has none: expected dense gradients, or sparse ones of SciPy's or torch's (A1)"
            )
        result = operator.add(new, old) if is_sparse(old) and not is_sparse(new) else operator.add(old, new)
    elif function is not None:
        result = function(old, new)
    else:
        result = plus(new, old) if is_sparse(old) else plus(old, new)
    if result is None:
        by = "combine" if function is not None else "+"
        raise TypeError(f"the sum of {named(old)} and {named(new)} by {by} is None; expected the sum")
    return result


def plus(first: object, second: object) -> object:
    """first + second. The object's own operator is called where the other is a plain array, which would else broadcast
    over it.
    """
    result: object
    if is_plain(second):
        result = operate(first, "__add__", second)
    elif is_plain(first):
        result = operate(second, "__radd__", first)
    else:
        result = operator.add(first, second)
    if result is NotImplemented:
        raise TypeError(
            f"{named(first)} and {named(second)} have no sum: neither class adds the other; give combine=, as"
            " Slot(combine=f)"
        )
    return result


def operate(x: object, name: str, other: object) -> object:
    method = getattr(type(x), name, None)
    return NotImplemented if method is None else method(x, other)


def conform(x: object, shape: Shape | None, dtype: str | None) -> Conformed | Refused:
    """A9, A10 in a pass that records itself: x summed to the declared shape and cast to the declared dtype, by its own
    operators.
    """
    if x is None or not (is_plain(x) or isinstance(x, Zero)):
        return Conformed(x)
    array = cast(Computed, np.asarray(x) if type(x) in SCALARS else x)
    try:
        if shape is not None:
            array = summed_to(array, shape)
        if dtype is not None:
            array = cast_to(array, dtype)
    except Refusal as e:
        return e.as_record()
    return Conformed(array)


def summed_to(x: Computed, shape: Shape) -> Computed:
    """A9."""
    has = tuple(x.shape)
    if has == shape:
        return x
    lead = len(has) - len(shape)
    if lead < 0 or any(n not in (1, has[lead + i]) for i, n in enumerate(shape)):
        refuse(ValueError, f"expected a gradient of shape {shape} (or one that it broadcasts to), got {has} (A9)")
    if isinstance(x, Zero):
        return cast(Computed, Zero(shape, x.dtype))
    if is_sparse(x):
        refuse(
            ValueError, f"expected a gradient of shape {shape}, got a sparse one of shape {has}; sum it yourself (A9)"
        )
    axes = tuple(i for i in range(len(has)) if i < lead or shape[i - lead] != has[i])
    return x.sum(axes, dtype=x.dtype).reshape(shape)


def cast_to(x: Computed, dtype: str) -> Computed:
    """A10."""
    if isinstance(x, Zero | Sparse) or _core.dtype_name(x.dtype) == dtype:
        return x
    if not _core.can_cast(x.dtype, dtype):
        refuse(ValueError, f"expected dtype {dtype}, got {_core.dtype_name(x.dtype)}; convert it yourself (A10)")
    return cast(Computed, convert(x, dtype)) if is_torch(x) else x.astype(dtype)
