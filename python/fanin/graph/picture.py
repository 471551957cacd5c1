"""The picture of a graph tree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .._svg import (
    COLOURS,
    MARGIN,
    PALE,
    TEXT,
    TITLE,
    Canvas,
    Svg,
    legend,
    paragraph,
    save,
    shortened,
    svg_path,
    text_width,
)
from .._words import counted, printable

if TYPE_CHECKING:
    from .._core import GraphTree

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: In pixels: of the picture at least, from row to row, the height of a row's memory, how wide a depth is at most.
WIDTH, ROW, BAR, DEPTH = 900, 58, 24, 400
ON_PATH, OWNS, USES = COLOURS[0], "#8c8c8c", "#ebebeb"


def plot(tree: GraphTree, path: str | os.PathLike[str] | None = None) -> Svg:
    """A picture of a tree: a row for each recording, below and to the right of its predecessor, with the tree's memory
    from its first byte on: the recording's outputs, its other memory, and, hatched, memory that other recordings
    also use. Recordings on the path are blue. ValueError for a file name with another ending than .svg.
    """
    target = svg_path(path, "GraphTree.plot") if path is not None else None
    made = draw(tree)
    if target is not None:
        save(made, target)
    return made


def shown(tree: GraphTree) -> str | None:
    """The picture for a notebook; none of a closed tree."""
    return None if tree.closed else draw(tree)._repr_svg_()


def draw(tree: GraphTree) -> Svg:
    recordings, memory, stats = tree._recordings(), tree._memory(), tree.stats
    shared = shared_memory(memory)
    depth = {-1: -1}
    for node, parent, *_ in recordings:
        depth[node] = depth[parent] + 1
    most = max([1, *(hi for _, _, hi, _ in memory)])
    deepest = max([0, *depth.values()])
    wide = max(40, min(DEPTH, (WIDTH - 2 * MARGIN) / (deepest + 1)))
    canvas, right = Canvas(), float(WIDTH - MARGIN)
    title = f"{counted(stats.nodes, 'recording')}, {stats.replayed} replays, {stats.high_water} of {stats.bytes} B"
    canvas.text(MARGIN, MARGIN + TITLE, title, TITLE)
    entries = [(ON_PATH, "owns (on the path)"), (OWNS, "owns"), (USES, "uses"), ("", "hatched: shares")]
    top = legend(canvas, entries, MARGIN, WIDTH - MARGIN, MARGIN + 30) + 10
    rows: dict[int, float] = {}
    for row, (node, parent, function, owns, _reaches, replays, current, _) in enumerate(recordings):
        y, left = top + ROW * row + 20, MARGIN + wide * depth[node]
        rows[node] = y
        if parent >= 0:
            at = left - min(12, wide / 3)
            canvas.line((at, rows[parent] + BAR), (at, y + BAR / 2), (left, y + BAR / 2), stroke=PALE, fill="none")
        colour = ON_PATH if current else OWNS
        pieces = [(lo, hi, owned) for one, lo, hi, owned in memory if one == node]
        for lo, hi, owned in sorted(pieces, key=lambda piece: piece[2]):
            place = (left + wide * lo / most, y, wide * (hi - lo) / most, BAR)
            if owned:
                canvas.rect(*place, fill=colour, kind="fanin-owns")
            else:
                canvas.rect(*place, fill=USES, stroke=colour, kind="fanin-uses")
        with canvas.group(kind=f"fanin-shared-{node}", stroke="#000000"):
            for lo, hi in shared.get(node, []):
                hatch(canvas, left + wide * lo / most, y, wide * (hi - lo) / most, BAR)
        shares = sum(hi - lo for lo, hi in shared.get(node, []))
        name = shortened(function, 300, TEXT)
        text = f"{node}: {name}, owns {owns} B, shares {shares} B, replayed {replays} times"
        canvas.text(left, y - 5, text, TEXT, "" if name == printable(function) else function)
        right = max(right, left + wide, left + text_width(text, TEXT))
    y = top + ROW * len(recordings) + 6
    note = f"A row is the tree's memory, {most} B long; it begins at the depth of its recording."
    y = paragraph(canvas, note, MARGIN, y, WIDTH - 2 * MARGIN, most=2)
    return canvas.finish(right + MARGIN, y + MARGIN, title)


def hatch(canvas: Canvas, x: float, y: float, width: float, height: float) -> None:
    """Draw a frame filled with slanted lines."""
    canvas.rect(x, y, width, height, fill="none")
    for i in range(1, int((width + height) / 7) + 1):
        across = 7 * i  # where the line would leave the upper edge
        begin, end = max(0, across - height), min(width, across)
        canvas.line((x + begin, y + across - begin), (x + end, y + across - end))


def shared_memory(memory: list[tuple[int, int, int, bool]]) -> dict[int, list[tuple[int, int]]]:
    """For each recording the pieces of its memory that others use too, without overlap."""
    shared: dict[int, list[tuple[int, int]]] = {}
    for node, lo, hi, _ in memory:
        meet = sorted((max(lo, x), min(hi, y)) for other, x, y, _ in memory if other != node and x < hi and lo < y)
        shared.setdefault(node, []).extend(meet)
    return {node: union(pieces) for node, pieces in shared.items()}


def union(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for lo, hi in sorted(pieces):
        if made and lo <= made[-1][1]:
            made[-1] = made[-1][0], max(hi, made[-1][1])
        else:
            made.append((lo, hi))
    return made
