"""Mistakes that are easy to make. The core calls these functions for arguments that are unusual, or wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ._checks import sequence
from ._interop.classes import is_torch
from ._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

EXPECTED = {
    "root": "(node, slot, gradient), with a fanin.Node or fanin.Leaf",
    "input": "a fanin.Leaf, a fanin.Node or (node, slot)",
}
#: Of fanin.order, whose roots bring no gradients.
ORDERED = "a fanin.Node, a fanin.Leaf or (node, slot)"
OF_TORCH = ": fanin.torch.backward(tensors) runs the graph of torch tensors"


def _expected(call: str, what: str) -> str:
    """What a root or an input of a call is."""
    return ORDERED if call == "order" and what == "root" else EXPECTED[what]


def _advice(what: str, item: object) -> str:
    """What to give instead of a root or an input."""
    first = item[0] if isinstance(item, tuple | list) and item else item
    if is_torch(first):
        return OF_TORCH
    if isinstance(item, list):
        return ": give a tuple"
    if what == "input" and hasattr(item, "dtype"):
        return ": a gradient stands beside its root, (node, slot, gradient)"
    return ""


def no_node(call: str, what: str, index: int, item: object, got: str) -> NoReturn:
    """Refuse a root or an input of a pass (`what`) that has no node."""
    raise TypeError(f"{call}: {what} {index}: expected {_expected(call, what)}, got {got}{_advice(what, item)}")


def roots_or_inputs(call: str, what: str, given: object, node: object) -> tuple[Any, ...]:
    """Return the roots or inputs of a pass (`what`, in the plural) as a tuple: of a dict of inputs the values.

    `node`: the node, if `given` is a single root or input.
    """
    if node is not None:
        root = "[node]" if call == "order" else "[(node, slot, gradient)]"
        one = f"root: give {root}" if what == "roots" else "input: give [leaf]"
        raise TypeError(f"{call}: {what}: expected a sequence, got one {one}")
    of = _expected(call, what[:-1])
    if isinstance(given, np.ndarray) or hasattr(type(given), "__dlpack__"):
        advice = OF_TORCH if is_torch(given) else ""
        raise TypeError(f"{call}: {what}: expected a sequence of {of}, got {type_of(given)}{advice}")
    if type(given) is dict and what == "inputs" and call != "grad":
        return tuple(given.values())
    return tuple(sequence(f"{call}: {what}", given, of))


_warned: set[tuple[str, int, str]] = set()


def warn_undefined(fn: Callable[..., object], name: str) -> None:
    """Warn, once for each function, that it returned no gradient though every one is needed."""
    code = getattr(fn, "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("", 0)
    place = (file, line, getattr(fn, "__qualname__", type(fn).__qualname__))
    if place in _warned:
        return
    _warned.add(place)
    text = f"{name}: its function returned None for every gradient, and all are needed: does it lack a return?"
    if code:
        warnings.warn_explicit(text, RuntimeWarning, file, line, getattr(fn, "__module__", None))
    else:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
