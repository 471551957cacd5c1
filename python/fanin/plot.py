"""The picture of a trace. matplotlib is imported when a picture is drawn, not before."""

from __future__ import annotations

import textwrap
from typing import IO, TYPE_CHECKING, Any

from .tracing import Neighbours

if TYPE_CHECKING:
    from .tracing import Lane, Names, Picture

GREY = "#c9c9c9"
INK = "#333333"
RED = "#d00000"
COLOURS = (
    "#3b76af", "#ef8636", "#519e3e", "#8d69b8", "#85584e", "#d57dbe", "#5abbcc", "#bcbd45", "#1b4f72", "#a04000", "#7d3c98", "#117864",
)  # fmt: skip


def draw(
    picture: Picture,
    out: IO[bytes],
    *,
    format: str = "svg",
    title: str | None = None,
    names: Names | None = None,
) -> None:
    """Draw a picture into an open file. `names`: what lanes are called. ImportError where matplotlib is missing, ValueError for a format that it does not know."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, Patch
    except ImportError as e:
        raise ImportError("trace.plot draws with matplotlib, which is not installed: pip install matplotlib") from e

    lanes = picture.lanes
    row = {lane: i for i, lane in enumerate(lanes)}
    end = max([s.end for s in picture.slices] + [a.to[1] for a in picture.arrows] + [1e-9])
    begin = min([s.start for s in picture.slices], default=0.0)
    whole = max(end - begin, 1e-9)
    figure = Figure(figsize=(14, 1.7 + 0.62 * max(len(lanes), 2)), layout="constrained")
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
        # A sum is seen, however short it is; a white rim parts neighbours, and would hide what is no wider than itself.
        y, width = row[s.lane], max(s.end - s.start, whole / (500 if s.buffer else 2000))
        axes.broken_barh(
            [(s.start - begin, width)],
            (y - 0.32, 0.64),
            facecolors=colour.get(s.buffer, GREY),
            edgecolors="white",
            linewidth=0.6 if width > whole / 250 else 0,
            zorder=3 if s.buffer else 2,
        )
        room = int(width / whole * 150)
        if room >= 4:
            text = s.name if len(s.name) <= room else s.name[: room - 1] + "…"
            white = bool(s.buffer)
            axes.text(
                s.start - begin + width / 2,
                y,
                text,
                ha="center",
                va="center",
                fontsize=6.5,
                zorder=4,
                clip_on=True,
                color="white" if white else INK,
            )
    neighbours = Neighbours(picture)
    for a in picture.arrows:
        (from_lane, start), (to_lane, stop) = a.at, a.to
        work, held = neighbours.before(from_lane, start), neighbours.after(to_lane, stop)
        start, stop = (work.end if work else start), (held.start if held else stop)
        down = 1 if row[to_lane] > row[from_lane] else -1 if row[to_lane] < row[from_lane] else 0
        axes.add_patch(
            FancyArrowPatch(
                (start - begin, row[from_lane] + 0.32 * down),
                (stop - begin, row[to_lane] - 0.34 * down),
                arrowstyle="-|>",
                mutation_scale=8,
                linewidth=0.7,
                color=INK,
                alpha=0.6,
                zorder=5,
                shrinkA=0,
                shrinkB=0,
                connectionstyle="arc3,rad=0.08",
            )
        )
    for race in picture.races:
        y = row.get(race.lane, 0)
        right = race.time > begin + whole / 2
        work = neighbours.before(race.lane, race.time)
        if work:
            axes.broken_barh(
                [(work.start - begin, work.end - work.start)],
                (y - 0.32, 0.64),
                facecolors="none",
                edgecolors=RED,
                linewidth=2,
                zorder=6,
            )
        axes.plot([race.time - begin], [y], marker="X", markersize=11, color=RED, markeredgecolor="white", zorder=7)
        axes.annotate(
            textwrap.fill(race.text, 70, max_lines=5),
            (race.time - begin, y),
            xytext=(-10 if right else 10, 12),
            textcoords="offset points",
            ha="right" if right else "left",
            va="bottom",
            fontsize=7.5,
            color=RED,
            zorder=8,
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": RED, "linewidth": 0.8, "alpha": 0.95},
        )

    axes.set_ylim(len(lanes) - 0.4 if lanes else 1, -0.6)
    axes.set_xlim(-0.01 * whole, 1.01 * whole)
    axes.set_yticks(range(len(lanes)), [called(lane, names or {}) for lane in lanes], fontsize=9)
    simulated = picture.clock.startswith("simulated")
    axes.set_xlabel(f"µs, {picture.clock}" if simulated else picture.clock, fontsize=9)
    if not simulated:
        axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    key = [Patch(facecolor=colour[b], label=f"sum {b}") for b in buffers[: len(COLOURS)]]
    if len(buffers) > len(COLOURS):
        key.append(Patch(facecolor="white", label=f"and {len(buffers) - len(COLOURS)} more"))
    key.append(Patch(facecolor=GREY, label="producers and others"))
    figure.legend(handles=key, loc="outside upper right", ncols=min(len(key), 6), fontsize=8, frameon=False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(out, format=format, dpi=150)


def called(lane: Lane, names: Names) -> str:
    """A lane's name, with what the caller calls it."""
    return f"{lane.name}\n{names[lane]}" if lane in names else lane.name
