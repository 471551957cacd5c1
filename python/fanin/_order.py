"""The order in which a pass runs its nodes, before it runs (rules E2, G1)."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

from ._core import Leaf, Node, order_steps
from ._words import counted, names_nearest, type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

SHOWN = 12  #: nodes that a repr lists
EXPLAINED = 100  #: sentences of `explain()`


class Order(Sequence[Node | Leaf]):
    """The result of `fanin.order`: a sequence of nodes and leaves."""

    def __init__(self, steps: Sequence[tuple[Node | Leaf, int, bool]], /) -> None:
        self._nodes = tuple(node for node, _, _ in steps)
        self._after = tuple(after for _, after, _ in steps)
        self._runs = tuple(runs for _, _, runs in steps)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Node | Leaf: ...
    @overload
    def __getitem__(self, index: slice, /) -> tuple[Node | Leaf, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Node | Leaf | tuple[Node | Leaf, ...]:
        return self._nodes[index]

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        names = [label(node) for node in self._nodes[:SHOWN]]
        if len(self) > SHOWN:
            names.append(f".. {len(self) - SHOWN} more")
        return f"<fanin.Order: {' > '.join(names) or 'no nodes'}>"

    def explain(self, node: Node | Leaf | None = None) -> str:
        """Why each node has its place, a line for each; for one node its line alone.

        A line says which node gives the last gradient that the node waits for, how many other nodes are ready then,
        and what decides among them: leaves go first, then the node that was made last (the larger `sequence_nr`).
        Without a node, the first 100 lines.

        Parameters
        ----------
        node : Node or Leaf, optional
            A node of this order. ValueError for another one.

        >>> w = fanin.Leaf(np.zeros(2), name="w")
        >>> left = fanin.Node(lambda g: g, edges=[(w, 0)], name="left")
        >>> right = fanin.Node(lambda g: g, edges=[(w, 0)], name="right")
        >>> top = fanin.Node(lambda g: (g, g), edges=[(left, 0), (right, 0)], name="top")
        >>> print(fanin.order([top]).explain(right))  # doctest: +ELLIPSIS
        2. right (node ...): ready after top; of 2 ready nodes it was made last (... > ... of left)
        """
        if node is None:
            lines = [line for _, line in zip(range(EXPLAINED), self._lines(), strict=False)]
            if len(self) > EXPLAINED:
                lines.append(f".. and {len(self) - EXPLAINED} more: explain(node)")
            return "\n".join(lines) or "The pass runs no node."
        if not isinstance(node, Node | Leaf):
            raise TypeError(f"explain: expected a fanin.Node, a fanin.Leaf or None, got {type_of(node)}")
        for one, line in zip(self._nodes, self._lines(), strict=True):
            if one is node:
                return line
        raise ValueError(f"explain: {label(node)} is not in this order: the roots do not reach it, or inputs= do not")

    def _lines(self) -> Iterator[str]:
        ready_after: defaultdict[int, list[int]] = defaultdict(list)
        for i, after in enumerate(self._after):
            ready_after[after].append(i)
        waiting: list[tuple[int, int]] = []  # of nodes, not leaves: (-sequence_nr, step)
        for i, node in enumerate(self._nodes):
            for j in ready_after[i - 1]:
                if not isinstance(self._nodes[j], Leaf):
                    heapq.heappush(waiting, (-self._nodes[j].sequence_nr, j))
            if not isinstance(node, Leaf):
                heapq.heappop(waiting)
            yield f"{i + 1}. {numbered(node)}: {self._reason(i, waiting)}"

    def _reason(self, i: int, waiting: Sequence[tuple[int, int]]) -> str:
        node, after = self._nodes[i], self._after[i]
        ready = "ready at the beginning" if after < 0 else f"ready after {label(self._nodes[after])}"
        captured = "" if self._runs[i] else "; its sum is a result, its function does not run (E8)"
        if isinstance(node, Leaf):
            return f"{ready}; leaves go before all nodes (E2){captured}"
        if not waiting:
            return f"{ready}; no other node is ready{captured}"
        rival = self._nodes[waiting[0][1]]
        made = f"made last ({node.sequence_nr} > {rival.sequence_nr} of {label(rival)})"
        return f"{ready}; of {counted(len(waiting) + 1, 'ready node')} it was {made}{captured}"


def label(node: Node | Leaf) -> str:
    """The name of a node, as messages have it."""
    return node.name or f"{kind(node)} {node.sequence_nr}"


def numbered(node: Node | Leaf) -> str:
    """The same with its number."""
    return f"{node.name} ({kind(node)} {node.sequence_nr})" if node.name else label(node)


def kind(node: Node | Leaf) -> str:
    if isinstance(node, Leaf):
        return "leaf"
    return "node" if type(node) is Node else type(node).__name__


@names_nearest
def order(roots: Iterable[Any], inputs: Iterable[Leaf | Node | tuple[Leaf | Node, int]] | None = None) -> Order:
    """Return the nodes and leaves that a pass will run, in that order, without running anything.

    `backward`, `grad` and `walk` with the same roots and inputs run exactly this order, if nothing adds an edge or
    frees a node before, and no `schedule=` picks another node. With `workers=` each worker takes the first node of
    this order that is ready when it is free: the first node is the same, each node runs after all nodes that give it
    a gradient, and the rest depends on how long functions take; the bits do not.

    A pass that a function starts inside itself has an order of its own, and changes nothing in this one.

    Parameters
    ----------
    roots : iterable
        As for `backward`; gradients may be left out, and are not read.
    inputs : iterable, optional
        Leaves, nodes (their slot 0) and (node, slot), as for `grad`.

    Returns
    -------
    Order
        A sequence; `explain()` says why each node has its place.

    Raises
    ------
    TypeError, ValueError, IndexError
        For roots or inputs that a pass refuses.
    RuntimeError
        If an earlier pass freed a node that is to run.

    >>> w = fanin.Leaf(np.zeros(2), name="w")
    >>> low = fanin.Node(lambda g: g, edges=[(w, 0)], name="low")
    >>> top = fanin.Node(lambda g: (g, g), edges=[(low, 0), (w, 0)], name="top")
    >>> fanin.order([top])
    <fanin.Order: top > low > w>
    """
    return Order(order_steps(roots, inputs))
