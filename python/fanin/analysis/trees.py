"""Arguments and results as trees: lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts, whose leaves are
everything else.

A tree is flattened in the order in which it is read; the leaves are what descriptors count (`args[0]` is the first
leaf). Other objects are leaves themselves; hidden.py checks what they hold. Nothing here calls itself, so
trees may be as deep as they like.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from .._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: A leaf's place in a tree's form.
LEAF: Final = "*"


#: Containers that are taken apart and made anew; named tuples are, too.
DICTS = (dict, OrderedDict, defaultdict)
KINDS = frozenset({list, tuple, *DICTS})


@dataclass(frozen=True)
class Defaulting:
    """The kind of a defaultdict, in a form."""

    factory: Callable[[], object] | None


def kind_of(node: object) -> type | None:
    """list, tuple, dict, OrderedDict, defaultdict for what is exactly that, a named tuple's own type, None for
    a leaf.
    """
    kind = type(node)
    if kind in KINDS:
        return kind
    if not issubclass(kind, tuple):
        return None
    if hasattr(kind, "_make") and hasattr(kind, "_fields"):
        return kind
    fields = getattr(kind, "n_sequence_fields", None)  # a named tuple of C, as torch.max returns
    return kind if fields is not None and fields == getattr(kind, "n_fields", None) else None


def items_of(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    assert isinstance(node, (list, tuple)), "kind_of returns no others"
    return list(node)


class Form:
    """A container in the form of a tree: its kind, its keys (None: it has none) and the forms of what it holds. Equal
    where all that is equal.
    """

    __slots__ = ("_hash", "_tokens", "inner", "keys", "kind", "leaves", "nodes")

    def __init__(self, kind: type | Defaulting, keys: tuple[object, ...] | None, inner: tuple[Spec, ...]) -> None:
        self.kind, self.keys, self.inner = kind, keys, inner
        self._tokens: tuple[object, ...] | None = None
        deeper: list[Form] = [one for one in inner if isinstance(one, Form)]
        self.leaves: int = len(inner) - len(deeper) + sum(one.leaves for one in deeper)
        self.nodes: int = 1 + sum(one.nodes for one in deeper)  #: containers, itself among them

    @property
    def tokens(self) -> tuple[object, ...]:
        """All of it in one row."""
        if self._tokens is None:
            row: list[object] = []
            left: list[Spec] = [self]
            while left:
                one = left.pop()
                if isinstance(one, Form):
                    row.append((one.kind, one.keys, len(one.inner)))
                    left.extend(reversed(one.inner))
                else:
                    row.append(LEAF)
            self._tokens = tuple(row)
        return self._tokens

    def of_call(self) -> tuple[tuple[Spec, ...], dict[str, Spec]]:
        """Of the form of (args, kwargs): the forms of the arguments by position, and by name."""
        args, kwargs = self.inner
        assert isinstance(args, Form) and isinstance(kwargs, Form) and kwargs.keys is not None, "no form of a call"
        return args.inner, {str(name): one for name, one in zip(kwargs.keys, kwargs.inner, strict=True)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (self is other or self.tokens == other.tokens)

    def __hash__(self) -> int:
        return hash(self.tokens)


#: The form of anything.
Spec = Form | Literal["*"]
#: The arguments of a call, by position and by name.
Arguments = tuple[tuple[object, ...], dict[str, object]]


def flatten(tree: object, leaves: list[object]) -> Spec:
    """Append the leaves of a tree to `leaves` and return its form, which can be compared, and hashed where its keys
    can. RecursionError for one that contains itself.
    """
    top: list[Spec] = []
    stack: list[tuple[object, Iterator[object], list[Spec]]] = [(None, iter((tree,)), top)]
    above: set[int] = set()
    while stack:
        node, items, done = stack[-1]
        for item in items:
            if kind_of(item) is None:
                leaves.append(item)
                done.append(LEAF)
                continue
            if id(item) in above:
                raise RecursionError(f"{type_of(item)} contains itself: expected a tree")
            above.add(id(item))
            stack.append((item, iter(items_of(item)), []))
            break
        else:
            stack.pop()
            if stack:
                above.discard(id(node))
                kind = Defaulting(node.default_factory) if isinstance(node, defaultdict) else type(node)
                stack[-1][2].append(Form(kind, tuple(node) if isinstance(node, dict) else None, tuple(done)))
    return top[0]


def flatten_call(args: tuple[object, ...], kwargs: Mapping[str, object], leaves: list[object]) -> Form:
    """`flatten` of a call's arguments, those by name in the order of their names: the form of (args, kwargs)."""
    form = flatten((args, {k: kwargs[k] for k in sorted(kwargs)}), leaves)
    assert isinstance(form, Form), "a tuple is no leaf"
    return form


def containers(tree: object) -> list[object]:
    """The containers of a tree, in the order in which they are met."""
    found: list[object] = []
    left = [tree]
    while left:
        node = left.pop()
        if kind_of(node) is not None:
            found.append(node)
            left.extend(reversed(items_of(node)))
    return found


def unflatten(
    form: Spec,
    leaves: Iterator[object],
    given: Mapping[int, object] | None = None,
    same: Mapping[int, int] = MappingProxyType({}),
) -> object:
    """A new tree of a form, from its leaves. `given`: containers that are taken as they are, by their place among
    `containers`; `same`: places of containers that are an earlier one again. Their leaves are passed over.
    """
    top: list[object] = []
    stack: list[tuple[Form | None, Iterator[Spec], list[object], int]] = [(None, iter((form,)), top, -1)]
    place, known = 0, dict(given or {})
    while stack:
        node, inner, done, at = stack[-1]
        for one in inner:
            if not isinstance(one, Form):
                done.append(next(leaves))
            elif (known_at := same.get(place, place)) in known:
                done.append(known[known_at])
                place += one.nodes
                for _ in range(one.leaves):
                    next(leaves)
            else:
                stack.append((one, iter(one.inner), [], place))
                place += 1
                break
        else:
            stack.pop()
            if node is not None:
                known[at] = made(node.kind, done, node.keys)
                stack[-1][2].append(known[at])
    return top[0]


def made(kind: type | Defaulting, items: list[object], keys: Sequence[object] | None) -> object:
    if isinstance(kind, Defaulting):
        return defaultdict(kind.factory, zip(keys or (), items, strict=True))
    if kind in DICTS:
        return (OrderedDict if kind is OrderedDict else dict)(zip(keys or (), items, strict=True))
    if kind is list:
        return list(items)
    if kind is tuple:
        return tuple(items)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def paths(form: Spec, at: str) -> list[str]:
    """How each leaf of a tree called `at` is reached, as "args[1]['w']"."""
    found: list[str] = []
    left = [(form, at)]
    while left:
        one, path = left.pop()
        if not isinstance(one, Form):
            found.append(path)
            continue
        names = one.keys if one.keys is not None else range(len(one.inner))
        left.extend(reversed([(x, f"{path}[{name!r}]") for name, x in zip(names, one.inner, strict=True)]))
    return found


def copied(tree: object, form: Spec, leaves: Iterator[object]) -> object:
    """A copy of a tree of a form, with other leaves; a container that is met twice is one copy."""
    every, first = containers(tree), dict[int, int]()
    same = {k: j for k, node in enumerate(every) if (j := first.setdefault(id(node), k)) != k}
    copy = unflatten(form, leaves, same=same)
    for node, new in zip(every, containers(copy), strict=True):
        if getattr(node, "__dict__", None):
            new.__dict__.update(node.__dict__)
    return copy


def same_items(one: object, other: object) -> bool:
    """Whether two lists or two dicts hold the very same objects, in the same order."""
    if isinstance(one, dict) and isinstance(other, dict):
        return len(one) == len(other) and all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))
    assert isinstance(one, list) and isinstance(other, list), "both are lists, or both are dicts"
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
