"""Pictures of arrays that share memory: a bar for each run of bytes that an array shows, a panel for each component."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import cast

import numpy as np

from .._checks import sequence
from .._core import address
from .._svg import (
    COLOURS,
    MARGIN,
    SMALL,
    TEXT,
    TITLE,
    Canvas,
    Svg,
    Writable,
    axis,
    save,
    svg_path,
    text_width,
)
from .._trace.graphviz import quoted
from .._words import printable, type_of
from ..sharing import Overlaps, overlaps
from .arrays import Array, Geometry

__tracebackhide__ = True  # no frames of ours in reports of pytest

WIDTH, LABELS, LANE = 900, 200, 26  #: In pixels: of the picture, of names at most, from lane to lane
#: More bars than this in one lane are drawn as one that is paler.
RUNS = 400


def alias_dot(arrays: Sequence[Array], names: Sequence[str] | None = None) -> str:
    """Which arrays share bytes, as a graph in the language of Graphviz: a cluster for each component, an edge for each
    pair that shares a byte.

    arrays: ndarrays. names: what they are called (default: args[0], args[1], ..).

    >>> from fanin.analysis import alias_dot
    >>> w = np.zeros(6)
    >>> print(alias_dot([w[:4], w[2:], np.zeros(2)]))
    graph memory {
      subgraph cluster_0 { label="48 bytes"; n0 [label="args[0]"]; n1 [label="args[1]"]; }
      subgraph cluster_1 { label="16 bytes"; n2 [label="args[2]"]; }
      n0 -- n1;
    }
    """
    called = named("alias_dot", arrays, names)
    found = overlaps(arrays)
    lines = ["graph memory {"]
    for k, indices in enumerate(found_components(found, len(arrays))):
        low, high = extent([arrays[i] for i in indices])
        nodes = " ".join(f"n{i} [label={quoted(called[i])}];" for i in indices)
        lines.append(f'  subgraph cluster_{k} {{ label="{high - low} bytes"; {nodes} }}')
    lines += [f"  n{i} -- n{j};" for i, j in found.pairs]
    return "\n".join([*lines, "}"])


def alias_plot(
    arrays: Sequence[Array],
    file: str | PathLike[str] | Writable | None = None,
    names: Sequence[str] | None = None,
    *,
    format: str = "svg",
    title: str | None = None,
) -> Svg:
    """Draw which bytes arrays show, component by component, and which of them are shown by several.

    arrays: ndarrays. file: a path, or an open binary file; None: the picture is only returned, as SVG text that a
    notebook shows. Each lane is an array, its bars are runs of bytes, from the lowest address of the component on; a
    pale bar stands for more runs than can be drawn. ValueError for another format than "svg" or a file name with
    another ending.

    >>> from fanin.analysis import alias_plot
    >>> w = np.zeros((4, 6))
    >>> picture = alias_plot([w[:, :4], w[1:3, 2:]], title="two blocks")
    """
    if not isinstance(format, str) or format != "svg":
        raise ValueError(
            f"alias_plot: format: expected 'svg', got {format!r}: pictures are SVG; convert one by"
            " `rsvg-convert picture.svg -o picture.png`"
        )
    path = svg_path(file, "alias_plot") if isinstance(file, str | PathLike) else None
    made = drawn(arrays, named("alias_plot", arrays, names), title)
    if path is not None:
        save(made, path)
    elif file is not None:
        cast("Writable", file).write(made.encode())
    return made


def drawn(arrays: Sequence[Array], called: Sequence[str], title: str | None) -> Svg:
    canvas, y = Canvas(), float(MARGIN)
    if title:
        canvas.label(MARGIN, y + TITLE, title, WIDTH - 2 * MARGIN, TITLE)
        y += 30
    widest = max([text_width(printable(name), TEXT) for name in called], default=0.0)
    left = MARGIN + 10 + min(LABELS, widest)
    for k, indices in enumerate(found_components(overlaps(arrays), len(arrays))):
        colour = COLOURS[k % len(COLOURS)]
        y = draw_panel(canvas, [arrays[i] for i in indices], [called[i] for i in indices], left, y, colour)
    return canvas.finish(WIDTH, y + MARGIN, title or "Arrays and the bytes that they show")


def draw_panel(
    canvas: Canvas, arrays: Sequence[Array], names: Sequence[str], left: float, y: float, colour: str
) -> float:
    """Draw the arrays of a component above an axis of its bytes; returns the y below it."""
    low, high = extent(arrays)
    right, most = WIDTH - MARGIN - 10, max(high - low, 1)
    pixels = (right - left) / most
    for array, name in zip(arrays, names, strict=True):
        found = runs(array)
        opacity = {} if found is not None else {"fill_opacity": 0.35}
        canvas.label(left - 8, y + 17, name, LABELS, text_anchor="end")
        with canvas.group(kind="fanin-runs", fill=colour, **opacity):
            for a, b in found if found is not None else [span(array)]:
                canvas.rect(left + (a - low) * pixels, y + 3, max((b - a) * pixels, 0.5), LANE - 6)
        y += LANE
    axis(canvas, left, right, y + 2, most, whole=True)
    canvas.text(left - 8, y + 18, "bytes", SMALL, text_anchor="end")
    return y + 34


def named(call: str, arrays: Sequence[Array], names: Sequence[str] | None) -> list[str]:
    """What each array is called. TypeError, ValueError for what cannot be drawn."""
    for i, array in enumerate(sequence(f"{call}: arrays", arrays, "arrays")):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{call}: args[{i}]: expected an ndarray, got {type_of(array)}")
    if names is None:
        return [f"args[{i}]" for i in range(len(arrays))]
    called = sequence(f"{call}: names", names, "strings")
    if len(called) != len(arrays):
        raise ValueError(f"{call}: names: expected a name for each of {len(arrays)} arrays, got {len(called)}")
    for name in called:
        if not isinstance(name, str):
            raise TypeError(f"{call}: names: expected strings, got {type_of(name)}")
    return called


def found_components(found: Overlaps, count: int) -> list[tuple[int, ...]]:
    """All components, those of one array too, by their first members."""
    several = list(found.components)
    inside = {i for group in several for i in group}
    return sorted([*several, *((i,) for i in range(count) if i not in inside)])


def span(array: Array) -> tuple[int, int]:
    down, up = Geometry.of(array).reach()
    return address(array) + down, address(array) + up


def extent(arrays: Sequence[Array]) -> tuple[int, int]:
    spans = [span(a) for a in arrays]
    return min(a for a, _ in spans), max(b for _, b in spans)


def runs(array: Array) -> list[tuple[int, int]] | None:
    """The bytes that an array shows, as sorted runs [from, to) without gaps between them; None where they are too many
    to be drawn.
    """
    if array.size == 0 or array.itemsize == 0:
        return []
    width, outer = array.itemsize, []
    for n, s in sorted(zip(array.shape, array.strides, strict=True), key=lambda x: abs(x[1])):
        if 0 < abs(s) <= width:
            width += (n - 1) * abs(s)
        elif n > 1 and s:
            outer.append((n, abs(s)))
    if int(np.prod([n for n, _ in outer])) > RUNS:
        return None
    starts = np.zeros(1, np.int64)
    for n, s in outer:
        starts = np.unique(np.add.outer(starts, np.arange(n) * s))
    low, joined = span(array)[0], list[tuple[int, int]]()
    for start in starts.tolist():
        if joined and low + start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], low + start + width))
        else:
            joined.append((low + start, low + start + width))
    return joined
