"""The parts of the engine that need no C: edges as a sequence, handles of hooks, what leaves declare."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Self, SupportsIndex, final, overload
from weakref import ReferenceType

from ._core import InputBuffer
from ._interop.protocols import DTypeLike
from ._words import type_of
from .slots import Slot

if TYPE_CHECKING:
    from ._core import Edge, Leaf, Node, Stream

__tracebackhide__ = True  # no frames of ours in reports of pytest


@final
class Edges:
    """The edges of a Node, as a sequence of (node, slot) and None."""

    __slots__ = ("_node",)

    def __init__(self, node: Node, /) -> None:
        self._node = node

    def append(self, edge: Edge, /) -> None:
        """Add (node, slot), or None; it counts from the next pass on.

        Raises ValueError where it would close a cycle, TypeError and IndexError as Node does.
        """
        self._node._append_edge(edge)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Edge: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Edge]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Edge | list[Edge]:
        edges = self._node._edges()
        if isinstance(index, slice):
            return edges[index]
        if not hasattr(type(index), "__index__"):
            raise TypeError(f"edge: expected an integer or a slice, got {type_of(index)}")
        try:
            return edges[operator.index(index)]
        except IndexError:
            raise IndexError(f"expected an edge below {len(edges)}, got {index}") from None

    def __iter__(self) -> Iterator[Edge]:
        return iter(self._node._edges())

    def __len__(self) -> int:
        return len(self._node._edges())

    def __repr__(self) -> str:
        return repr(self._node._edges())


@final
class HookHandle:
    """A registered hook: `remove()`, or the end of a `with`, removes it."""

    __slots__ = ("__weakref__", "_hook", "_node")

    def __init__(self, node: ReferenceType[Node | Leaf], hook: object, /) -> None:
        self._node, self._hook = node, hook

    def remove(self) -> None:
        """Remove the hook. Calling it again does nothing."""
        node = self._node()
        if node is not None:
            node._remove_hook(self._hook)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.remove()
        return False


def slot_like(like: object) -> Slot:
    """What Leaf(like=) declares."""
    if type(like) is Slot:
        return like
    if isinstance(like, tuple) and len(like) == 3:
        return Slot(*like)
    raise TypeError(f"like: expected a tuple (shape, dtype, device) or a fanin.Slot, got {like!r}")


def wide(
    shape: tuple[int, ...], dtype: str, device: str, accumulate: DTypeLike, stream: Stream | None
) -> tuple[InputBuffer, list[Slot]]:
    """The buffer of Leaf(accumulate=dtype), which sums over passes, and its declarations."""
    slots = [Slot(shape, dtype, device, accumulate)]
    return InputBuffer(slots, stream=stream), slots
