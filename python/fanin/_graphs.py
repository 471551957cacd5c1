"""Functions on a whole graph of nodes: free it without a pass, draw it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ._checks import sequence
from ._core import Leaf, Node
from ._words import note

if TYPE_CHECKING:  # pictures are imported when one is drawn
    from ._layers import Arrow, Box
    from ._svg import Svg

__tracebackhide__ = True  # no frames of ours in reports of pytest


def reached(call: str, roots: Iterable[object]) -> list[Node | Leaf]:
    """The nodes and leaves that the roots reach, each once, producers before consumers where edges allow it."""
    if isinstance(roots, (Node, Leaf)):
        raise TypeError(f"{call}: roots: expected a sequence, got a single one: pass [root]")
    waiting: list[Node | Leaf] = []
    for i, root in enumerate(sequence(f"{call}: roots", roots, "nodes")):
        node = root[0] if isinstance(root, tuple) and root else root
        if not isinstance(node, Node | Leaf):
            raise TypeError(f"{call}: root {i}: expected a fanin.Node, a fanin.Leaf or (node, slot), got {node!r}")
        waiting.append(node)
    found: dict[Node | Leaf, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [edge[0] for edge in reversed(getattr(node, "edges", ())) if edge is not None]
    return list(found)


def free(roots: Iterable[object]) -> None:
    """Free the graph that the roots reach without running it, as a pass without keep_graph does.

    Each node drops its function and calls its `release`; leaves stay as they are. A later pass over such a node is a
    RuntimeError. All nodes are freed even if a `release` raises; the first such error is then raised, with the number
    of further ones.

    Parameters
    ----------
    roots : iterable
        As for `fanin.backward`.

    Examples
    --------
    >>> w = fanin.Leaf(np.ones(2))
    >>> node = fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="double")
    >>> fanin.free([node])
    >>> node.freed
    True
    """
    errors = []
    for node in reached("free", roots):
        if isinstance(node, Node):
            try:
                node._free()
            except Exception as e:
                note(e, f"raised by the release of {node!r}")
                errors.append(e)
    if len(errors) > 1:
        errors[0].add_note(f"{len(errors) - 1} more of these nodes' releases raised")
    if errors:
        raise errors[0]


class Drawing(str):
    """Graphviz text of a graph. A notebook shows it as a picture."""

    __slots__ = ("_arrows", "_boxes")
    _boxes: Sequence[Box]
    _arrows: Sequence[Arrow]

    def svg(self) -> Svg:
        """Return the picture as SVG text."""
        from ._layers import draw

        return draw(self._boxes, self._arrows)

    def _repr_svg_(self) -> str | None:
        return self.svg()._repr_svg_() if self._boxes else None


def draw(roots: Iterable[object]) -> Drawing:
    """Return the graph that the roots reach, before or after a pass, as Graphviz text; `.svg()` makes a picture.

    Ellipses are nodes (grey: freed), boxes leaves; an arrow is an edge, with its slot if there are several.

    Parameters
    ----------
    roots : iterable
        As for `fanin.backward`.

    Examples
    --------
    >>> w = fanin.Leaf(np.ones(2), name="w")
    >>> print(fanin.draw([fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="double")]))
    digraph fanin {
      node [fontsize=10];
      n0 [label="double", shape=ellipse];
      n1 [label="w (2,)", shape=box];
      n0 -> n1;
    }
    """
    from ._layers import Arrow
    from ._trace.graphviz import quoted

    found = reached("draw", roots)
    number = {node: i for i, node in enumerate(found)}
    out = ["digraph fanin {", "  node [fontsize=10];"]
    boxes, arrows = [], []
    for node, i in number.items():
        boxes.append(box_of(node))
        if isinstance(node, Leaf):
            out.append(f"  n{i} [label={quoted(boxes[i].label)}, shape=box];")
            continue
        grey = ", style=filled, fillcolor=grey" if node.freed else ""
        out.append(f"  n{i} [label={quoted(boxes[i].label)}, shape=ellipse{grey}];")
        for to, slot in (edge for edge in node.edges if edge is not None):
            several = isinstance(to, Node) and to.inputs > 1
            arrows.append(Arrow(i, number[to], str(slot) if several else ""))
    for arrow in arrows:
        label = f' [label="{arrow.label}"]' if arrow.label else ""
        out.append(f"  n{arrow.source} -> n{arrow.target}{label};")
    made = Drawing("\n".join([*out, "}"]))
    made._boxes, made._arrows = boxes, arrows
    return made


def box_of(node: Node | Leaf) -> Box:
    """The name of a node or leaf, and what it is."""
    from ._layers import Box

    if isinstance(node, Node):
        kind = "node" if type(node) is Node else type(node).__name__
        return Box(node.name or f"{kind} {node.sequence_nr}", is_grey=node.freed)
    label = node.name or f"leaf {node.sequence_nr}"
    shape = getattr(node.array, "shape", None)
    return Box(label if shape is None else f"{label} {tuple(shape)}", is_leaf=True)
