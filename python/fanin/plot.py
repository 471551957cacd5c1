"""The picture of a trace. matplotlib is imported when a picture is drawn, not before."""

from __future__ import annotations

import textwrap
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tracing import Picture

GREY = "#c9c9c9"
INK = "#333333"
COLOURS = ("#3b76af", "#ef8636", "#519e3e", "#8d69b8", "#85584e", "#d57dbe", "#5abbcc", "#bcbd45")


def draw(picture: Picture, out: IO[bytes], *, format: str = "svg", title: str | None = None) -> None:
    """Draw a picture into an open file. ImportError where matplotlib is missing, ValueError for a format that it does not know."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, Patch
    except ImportError as e:
        raise ImportError("trace.plot draws with matplotlib, which is not installed: pip install matplotlib") from e

    lanes = picture.lanes
    row = {lane: i for i, lane in enumerate(lanes)}
    end = max([s.end for s in picture.slices] + [a.to[1] for a in picture.arrows] + [1e-9])
    figure = Figure(figsize=(13, 1.7 + 0.62 * max(len(lanes), 2)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if format not in canvas.get_supported_filetypes():
        known = ", ".join(sorted(canvas.get_supported_filetypes()))
        raise ValueError(f"trace.plot: no picture of the kind {format!r}: {known}")
    axes: Any = figure.add_subplot()

    buffers = list(dict.fromkeys(s.buffer for s in picture.slices if s.buffer))
    colour = {buffer: COLOURS[i % len(COLOURS)] for i, buffer in enumerate(buffers)}
    for i in range(0, len(lanes), 2):
        axes.axhspan(i - 0.5, i + 0.5, color="#f6f6f6", zorder=0)
    for s in picture.slices:
        y, width = row[s.lane], max(s.end - s.start, end / 2000)
        face = colour.get(s.buffer, GREY)
        axes.broken_barh([(s.start, width)], (y - 0.32, 0.64), facecolors=face, edgecolors="white", linewidth=0.6, zorder=2)
        room = int(width / end * 135)
        if room >= 3:
            text = s.name if len(s.name) <= room else s.name[: room - 1] + "…"
            white = bool(s.buffer)
            axes.text(
                s.start + width / 2, y, text, ha="center", va="center", fontsize=7.5, zorder=3, clip_on=True,
                color="white" if white else INK,
            )
    for a in picture.arrows:
        (from_lane, start), (to_lane, stop) = a.at, a.to
        down = row[to_lane] > row[from_lane]
        axes.add_patch(
            FancyArrowPatch(
                (start, row[from_lane] + (0.32 if down else -0.32)),
                (stop, row[to_lane] - (0.34 if down else -0.34)),
                arrowstyle="-|>", mutation_scale=8, linewidth=0.8, color=INK, alpha=0.75, zorder=4,
                shrinkA=0, shrinkB=0, connectionstyle="arc3,rad=0.08",
            )
        )
    for race in picture.races:
        y = row.get(race.lane, 0)
        axes.plot([race.time], [y], marker="X", markersize=11, color="#d00000", markeredgecolor="white", zorder=6)
        axes.annotate(
            textwrap.fill(race.text, 60, max_lines=5), (race.time, y), xytext=(8, -14), textcoords="offset points",
            fontsize=7, color="#d00000", va="top", zorder=6,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#d00000", "linewidth": 0.6},
        )

    axes.set_ylim(len(lanes) - 0.4 if lanes else 1, -0.6)
    axes.set_xlim(-0.01 * end, 1.01 * end)
    axes.set_yticks(range(len(lanes)), [lane.name for lane in lanes], fontsize=9)
    simulated = picture.clock.startswith("simulated")
    axes.set_xlabel(f"µs, {picture.clock}" if simulated else picture.clock, fontsize=9)
    if not simulated:
        axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    key = [Patch(facecolor=colour[b], label=f"sum {b}") for b in buffers[:10]]
    if len(buffers) > 10:
        key.append(Patch(facecolor="white", label=f"and {len(buffers) - 10} more"))
    key.append(Patch(facecolor=GREY, label="producers and others"))
    figure.legend(handles=key, loc="outside upper right", ncols=min(len(key), 6), fontsize=8, frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(out, format=format, dpi=150)
