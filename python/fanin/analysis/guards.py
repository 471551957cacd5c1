"""Checks whether a call's arguments are laid out as those of an earlier call, and returns the first that differs.

Compared with the record: the tree of arguments, the type of each leaf, which arrays are one object, and of each
array dtype, shape, strides, whether it can be written, and how its memory lies to that of the others it shares bytes
with. Addresses themselves and values are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core import address
from . import trees
from .arrays import Array
from .calls import Call, may_hold
from .memory import Layout

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass(frozen=True)
class Change:
    """The first thing in which a call differs from the record: the leaf (None: the whole tree), what, and the two sides
    in words.
    """

    leaf: int | None
    what: str
    expected: str
    found: str


class Guard:
    """The layout of one call; `components` has the numbers of its arrays that share bytes, set by set."""

    def __init__(self, call: Call) -> None:
        self.form, self.index, self.first = call.form, call.index, call.first
        args, kwargs = call.form.of_call()
        self.flat = args == (trees.LEAF,) * len(call.leaves) and not kwargs
        self.names = set(kwargs)
        self.types = tuple(map(type, call.leaves))
        self.all_arrays = len(call.arrays) == len(call.leaves)
        self.repeats = [(i, self.first[u]) for i, u in enumerate(self.index) if u is not None and self.first[u] != i]
        #: leaves that may hide arrays
        self.boxes = [i for i, u in enumerate(self.index) if u is None and may_hold(self.types[i])]
        self.layout = Layout(call.arrays)
        self.components = components_of(self.layout)
        self.facts = [facts_of(a) for a in call.arrays]
        #: leaves that are distinct arrays of one geometry on the same memory, which could as well be one object
        self.apart: list[tuple[int, int]] = []
        for group in self.components:
            seen: dict[object, int] = {}
            for u in group:
                j = seen.setdefault((begin(call.arrays[u]), *self.facts[u]), call.first[u])
                if j != call.first[u]:
                    self.apart.append((call.first[u], j))
        #: leaves without a byte, of which memory does not show whether two are one object
        self.empty = [call.first[u] for u, a in enumerate(call.arrays) if 0 in a.shape or a.dtype.itemsize == 0]

    def arrays(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Sequence[object], Sequence[Array]] | None:
        """(leaves, distinct arrays) of a call of the same layout; None for another one."""
        leaves = self._leaves(args, kwargs)
        if leaves is None:
            return None
        for i, j in self.repeats:
            if leaves[i] is not leaves[j]:
                return None
        for i, j in self.apart:
            if leaves[i] is leaves[j]:
                return None
        if len(self.empty) > 1 and len({id(leaves[i]) for i in self.empty}) < len(self.empty):
            return None
        arrays = leaves if self.all_arrays else [leaves[i] for i in self.first]
        try:
            return (leaves, arrays) if self.layout.check(arrays) is None else None
        except TypeError:
            return None  # an array without known memory: recording the layout refuses it by name

    def _leaves(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[Any] | None:
        if self.flat and not kwargs:
            return args if tuple(map(type, args)) == self.types else None
        if self.flat or kwargs.keys() != self.names:
            return None
        leaves: list[object] = []
        form = trees.flatten_call(args, kwargs, leaves)
        return leaves if form == self.form and tuple(map(type, leaves)) == self.types else None

    def change(self, call: Call) -> Change | None:
        """The first difference of a call, in words; None where there is none."""
        if call.form != self.form:
            return Change(None, "the tree of arguments", form_text(self.form), form_text(call.form))
        for i, (leaf, kind) in enumerate(zip(call.leaves, self.types, strict=True)):
            if type(leaf) is not kind:
                return Change(i, "type", kind.__name__, type(leaf).__name__)
        for i, j in self.repeats:
            if call.leaves[i] is not call.leaves[j]:
                return Change(i, "identity", f"the very array that is {call.leaf_name(j)}", "another array")
        for u, before in enumerate(self.facts):
            now = facts_of(call.leaves[self.first[u]])
            for what, one, other in zip(WORDS, before, now, strict=True):
                if one != other:
                    return Change(self.first[u], what, in_words(what, one), in_words(what, other))
        apart = [(i, j, ", on the same memory") for i, j in self.apart]
        apart += [(i, j, "") for k, i in enumerate(self.empty) for j in self.empty[:k]]
        for i, j, where in apart:
            if call.leaves[i] is call.leaves[j]:
                return Change(i, "identity", f"another array than {call.leaf_name(j)}{where}", "the same array")
        found = self.layout.check([call.leaves[i] for i in self.first])
        if found is None:
            return None
        number, what, other = found
        partner = "another" if other is None else call.leaf_name(self.first[other])
        words = {
            "overlap": (f"no byte shared with {partner}", "a shared one"),
            "apart": (f"bytes shared with {partner}", "none"),
            "offset": (f"the same place relative to {partner}", "another one"),
        }
        expected, actual = words.get(what, ("what was recorded", "something else"))
        return Change(self.first[number], what, expected, actual)


def components_of(layout: Layout) -> list[list[int]]:
    """The numbers of arrays that share bytes, directly or through others; each array is in one set."""
    sets: dict[int, list[int]] = {}
    for u, component in enumerate(layout.components):
        sets.setdefault(component, []).append(u)
    return list(sets.values())


def facts_of(a: Any) -> tuple[object, ...]:
    """The compared facts of one array or tensor, in the order of WORDS. Strides that mean nothing are 0."""
    strides = a.strides if isinstance(a, np.ndarray) else a.stride()
    shape = tuple(a.shape)
    strides = tuple(s if n > 1 and 0 not in shape else 0 for n, s in zip(shape, strides, strict=True))
    return a.dtype, shape, strides, a.flags.writeable if isinstance(a, np.ndarray) else True


WORDS = ("dtype", "shape", "strides", "writeable")


def in_words(what: str, value: object) -> str:
    if what == "writeable":
        return "an array that can be written" if value else "an array that is read-only"
    return str(value)


def begin(a: Any) -> int:
    return address(a) if isinstance(a, np.ndarray) else int(a.data_ptr())


def form_text(form: trees.Form) -> str:
    """A tree of arguments in words: f(*, [*, *], {'a': *})."""
    args, kwargs = form.of_call()
    words = [drawn(one) for one in args]
    words += [f"{k}={drawn(one)}" for k, one in kwargs.items()]
    return f"f({', '.join(words)})"


#: Forms are drawn so deep.
DRAWN = 8


def drawn(form: trees.Spec, depth: int = 0) -> str:
    """A form in words; what is nested deeper than DRAWN is left out."""
    if not isinstance(form, trees.Form):
        return "*"
    inner = ["..."] if depth == DRAWN else [drawn(one, depth + 1) for one in form.inner]
    if form.keys is not None:
        return "{" + ", ".join(f"{k!r}: {one}" for k, one in zip(form.keys, inner, strict=False)) + "}"
    return f"[{', '.join(inner)}]" if form.kind is list else f"({', '.join(inner)})"
