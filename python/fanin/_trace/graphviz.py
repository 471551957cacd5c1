"""A trace as Graphviz text: what happens before what."""

from __future__ import annotations

import itertools

from .line import HOST
from .picture import Neighbours, Picture

__tracebackhide__ = True  # no frames of ours in reports of pytest


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def dot(picture: Picture) -> str:
    """Graphviz text. Boxes are pieces of work, bold and dashed edges their order; ellipses are the nodes of passes on
    the CPU, thin edges their gradients.
    """

    out = ["digraph fanin {", "  rankdir=LR;", "  node [shape=box, fontsize=10];"]
    host = [n for n in picture.nodes if n.lane.device == HOST]
    number = {id(s): i for i, s in enumerate([*picture.slices, *host])}
    for k, lane in enumerate(picture.lanes):
        mine = [s for s in picture.slices if s.lane == lane]
        out += [f"  subgraph cluster_{k} {{", f"    label={quoted(lane.name)};"]
        for s in mine:
            style = ', style=filled, fillcolor="#cfe2f3"' if s.buffer else ""
            out.append(f"    n{number[id(s)]} [label={quoted(s.name)}{style}];")
        out.append("  }")
        out += [f"  n{number[id(a)]} -> n{number[id(b)]} [style=bold];" for a, b in itertools.pairwise(mine)]
    for k, lane in enumerate(sorted({n.lane for n in host})):
        out += [f"  subgraph cluster_nodes_{k} {{", f"    label={quoted(f'{lane.name}: nodes')};"]
        out += [f"    n{number[id(n)]} [label={quoted(n.name)}, shape=ellipse];" for n in host if n.lane == lane]
        out.append("  }")
    for g in picture.gradients:
        if id(g.source) in number and id(g.target) in number:
            out.append(f"  n{number[id(g.source)]} -> n{number[id(g.target)]};")
    neighbours = Neighbours(picture)
    for arrow in picture.arrows:
        a, b = neighbours.before(*arrow.at), neighbours.after(*arrow.to)
        if a and b:
            out.append(f"  n{number[id(a)]} -> n{number[id(b)]} [style=dashed, label={quoted(arrow.name)}];")
    for i, race in enumerate(picture.races):
        out.append(f"  race{i} [label={quoted(race.text)}, color=red, fontcolor=red];")
    return "\n".join([*out, "}"]) + "\n"
