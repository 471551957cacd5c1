"""Pictures of arrays that share memory: a bar for each run of bytes that an array shows, a panel for each component."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import IO, TYPE_CHECKING

import numpy as np

from .._core import address
from .._overlap import Overlaps, overlaps
from .._trace import plot
from .._trace.graphviz import quoted
from .._words import type_of
from .arrays import Array, Geometry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    called = named(arrays, names)
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
    file: str | PathLike[str] | IO[bytes],
    names: Sequence[str] | None = None,
    *,
    format: str = "svg",
    title: str | None = None,
) -> None:
    """Draw which bytes arrays show, component by component, and which of them are shown by several.

    arrays: ndarrays. file: a path, or an open binary file. Each lane is an array, its bars are runs of bytes, from the
    lowest address of the component on. ImportError where matplotlib is missing, ValueError for an unknown
    format.

    >>> import io
    >>> from fanin.analysis import alias_plot
    >>> w = np.zeros((4, 6))
    >>> alias_plot([w[:, :4], w[1:3, 2:]], io.BytesIO(), title="two blocks")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("alias_plot draws with matplotlib, which is not installed: pip install matplotlib") from e
    called = named(arrays, names)
    groups = found_components(overlaps(arrays), len(arrays))
    heights = [len(g) for g in groups] or [1]
    figure = Figure(figsize=(9, 0.6 + 0.5 * len(heights) + 0.32 * sum(heights)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if format not in canvas.get_supported_filetypes():
        raise ValueError(
            f"alias_plot: no picture of the kind {format!r}: {', '.join(sorted(canvas.get_supported_filetypes()))}"
        )
    panels = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": [h + 0.8 for h in heights]})
    for k, indices in enumerate(groups):
        panel(panels[k][0], [arrays[i] for i in indices], [called[i] for i in indices], k)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(file, format=format, dpi=150)


def panel(axes: Axes, arrays: Sequence[Array], names: Sequence[str], number: int) -> None:
    low, high = extent(arrays)
    for lane, array in enumerate(arrays):
        found = runs(array)
        pale = 1.0 if found is not None else 0.35
        bars = found if found is not None else [span(array)]
        axes.broken_barh(
            [(a - low, b - a) for a, b in bars],
            (lane - 0.36, 0.72),
            facecolors=plot.COLOURS[number % len(plot.COLOURS)],
            alpha=pale,
            linewidth=0,
        )
    axes.set_xlim(0, max(high - low, 1))
    axes.set_ylim(len(arrays) - 0.5, -0.5)
    axes.set_yticks(range(len(arrays)), names, fontsize=8)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("bytes", fontsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def named(arrays: Sequence[Array], names: Sequence[str] | None) -> list[str]:
    """What each array is called. TypeError, ValueError for what cannot be drawn."""
    for i, array in enumerate(arrays):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"args[{i}]: expected an ndarray, got {type_of(array)}")
    if names is not None and len(names) != len(arrays):
        raise ValueError(f"expected a name for each of {len(arrays)} arrays, got {len(names)}")
    return list(names) if names is not None else [f"args[{i}]" for i in range(len(arrays))]


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
