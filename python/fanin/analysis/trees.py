"""Arguments and results as trees: lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts, whose leaves are everything else.

A tree is flattened in the order in which it is read; the leaves are what descriptors count (`args[0]` is the first leaf). Other objects are leaves themselves; what
they hold is looked for in hidden.py.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: A leaf's place in a tree's form.
LEAF = "*"

Leaf = Callable[[Any], Any]


#: Containers that are taken apart and made anew; named tuples are, too.
DICTS = (dict, OrderedDict, defaultdict)
KINDS = frozenset({list, tuple, *DICTS})


@dataclass(frozen=True)
class Defaulting:
    """The kind of a defaultdict, in a form."""

    factory: Callable[[], Any] | None


def kind_of(node: Any) -> type | None:
    """list, tuple, dict, OrderedDict, defaultdict for what is exactly that, a named tuple's own type, None for a leaf."""
    kind = type(node)
    if kind in KINDS:
        return kind
    if not issubclass(kind, tuple):
        return None
    if hasattr(kind, "_make") and hasattr(kind, "_fields"):
        return kind
    fields = getattr(kind, "n_sequence_fields", None)  # a named tuple of C, as torch.max returns
    return kind if fields is not None and fields == getattr(kind, "n_fields", None) else None


def items_of(node: Any, kind: type) -> list[Any]:
    """What a container holds, in order."""
    return list(node.values()) if kind in DICTS else list(node)


def mark_of(node: Any, kind: type) -> type | Defaulting:
    """What a form says of a container, apart from its keys."""
    return Defaulting(node.default_factory) if kind is defaultdict else kind


def flatten(tree: Any, leaves: list[Any]) -> Any:
    """Append the leaves of a tree to `leaves` and return its form, which can be compared and hashed where its keys can."""
    kind = kind_of(tree)
    if kind is None:
        leaves.append(tree)
        return LEAF
    keys = tuple(tree) if kind in DICTS else None
    return (mark_of(tree, kind), keys, tuple([flatten(item, leaves) for item in items_of(tree, kind)]))


def unflatten(form: Any, leaves: Iterator[Any]) -> Any:
    """A new tree of a form, from its leaves."""
    if form is LEAF:
        return next(leaves)
    kind, keys, inner = form
    items = [unflatten(one, leaves) for one in inner]
    return made(kind, items, keys)


def made(kind: type | Defaulting, items: list[Any], keys: Sequence[Any] | None) -> Any:
    """A container of a kind."""
    if isinstance(kind, Defaulting):
        return defaultdict(kind.factory, zip(keys or (), items, strict=True))
    if kind in DICTS:
        return (OrderedDict if kind is OrderedDict else dict)(zip(keys or (), items, strict=True))
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def paths(form: Any, at: str) -> list[str]:
    """How each leaf of a tree called `at` is reached, as "args[1]['w']"."""
    if form is LEAF:
        return [at]
    _, keys, inner = form
    names = keys if keys is not None else range(len(inner))
    return [path for name, one in zip(names, inner, strict=True) for path in paths(one, f"{at}[{name!r}]")]


class Copies:
    """Copies of trees in which leaves are replaced, each container once: one that is met twice is one copy.

    `pairs` has (original, copy, what the copy held at first) of each list and dict, so that what a function does to a container can be told; `tuples` has
    (original, copy) of each tuple.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.pairs: list[tuple[Any, Any, Any]] = []
        self.tuples: list[tuple[Any, Any]] = []
        self._known: dict[int, Any] = {}

    def of(self, tree: Any) -> Any:
        """The copy of a tree."""
        kind = kind_of(tree)
        if kind is None:
            return self.leaf(tree)
        if id(tree) in self._known:
            return self._known[id(tree)]
        if kind in DICTS:
            copy: Any = made(mark_of(tree, kind), [], ())
            self._known[id(tree)] = copy
            copy.update((key, self.of(item)) for key, item in tree.items())
            self.pairs.append((tree, copy, dict(copy)))
        elif kind is list:
            copy = []
            self._known[id(tree)] = copy
            copy.extend(self.of(item) for item in tree)
            self.pairs.append((tree, copy, list(copy)))
        else:
            self._known[id(tree)] = copy = made(kind, [self.of(item) for item in tree], None)
            self.tuples.append((tree, copy))
        return copy

    def changed(self) -> list[tuple[Any, Any]]:
        """(original, copy) of the containers whose copy holds other things than at first, or in another order."""
        return [(original, copy) for original, copy, first in self.pairs if not same_items(copy, first)]


def same_items(one: Any, other: Any) -> bool:
    """Whether two lists or two dicts hold the very same objects, in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))
    return all(a is b for a, b in zip(one, other, strict=True))


class Homeward:
    """Takes a function's result home: `leaf` says what each leaf becomes, `containers` which container was whose copy.

    Containers that the function made are kept, and filled anew where something in them changes; tuples are made anew then.
    """

    def __init__(self, leaf: Leaf, copies: Copies) -> None:
        self.leaf = leaf
        self._known: dict[int, Any] = {id(copy): original for original, copy, *_ in (*copies.pairs, *copies.tuples)}
        self._alive: list[Any] = []

    def of(self, tree: Any) -> Any:
        """What the caller gets for a tree."""
        kind = kind_of(tree)
        if kind is None:
            return self.leaf(tree)
        if id(tree) in self._known:
            return self._known[id(tree)]
        self._alive.append(tree)
        if kind is list or kind in DICTS:
            self._known[id(tree)] = tree
            self.fill(tree, tree)
            return tree
        items = [self.of(item) for item in tree]
        result = tree if all(a is b for a, b in zip(items, tree, strict=True)) else made(kind, items, None)
        self._known[id(tree)] = result
        return result

    def fill(self, target: Any, source: Any) -> None:
        """Make a list or dict hold what another one holds, taken home."""
        if isinstance(source, dict):
            new = {key: self.of(item) for key, item in source.items()}
            if not same_items(target, new):
                target.clear()
                target.update(new)
        else:
            target[:] = [self.of(item) for item in source]
