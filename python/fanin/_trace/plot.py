"""The picture of a trace. matplotlib is imported only when a picture is drawn.

Each stream has a lane with its work as bars, grey or in the colour of its sum. A bar too narrow for its name has a
number above it. Arrows run below the bars: down (or up) from the awaited work, along a track between two lanes, to the
waiting work; arrows with one end share a track.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from .._words import counted
from .line import HOST
from .passes import critical_paths
from .picture import Lane, Names, Neighbours, Picture, Race, Slice, by_stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#c9c9c9"
INK = "#333333"
PALE = "#888888"
RED = "#d00000"
COLOURS = (
    "#3b76af", "#ef8636", "#519e3e", "#8d69b8", "#85584e", "#d57dbe", "#2aa5b8", "#9a9b1d", "#1b4f72", "#a04000",
    "#7d3c98", "#117864",
)  # fmt: skip

WIDTH, PITCH = 11.0, 0.72  # inches: of the picture, and from lane to lane
POINTS = 660.0  # about how wide the lanes are
TOP, BOTTOM = -0.2, 0.28  # of a bar, from the middle of its lane
NUMBERS = -0.32  # where numbers are drawn
UNDER = 0.315  # .. and the lines below the work of a node
TRACKS = 0.36, 0.52  # of arrows, between two lanes
NARROW, THIN, LETTER = (10.0, 3.0, 4.2)  # points: too narrow for a number; the least visible width of a sum; a letter


class Bar(NamedTuple):
    """A slice as it is drawn: from x on, `width` wide."""

    slice: Slice
    row: int
    x: float
    width: float
    colour: str
    name: str

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


class Sheet:
    """The axes, and the mapping of times to places."""

    def __init__(self, axes: Axes, picture: Picture, lanes: Sequence[Lane]) -> None:
        self.axes, self.picture, self.lanes = axes, picture, lanes
        self.row = {lane: i for i, lane in enumerate(lanes)}
        nodes = [n for n in picture.nodes if n.lane.device == HOST]
        self.slices: list[Slice] = [*nodes, *picture.slices]
        self.shown = {id(s) for s in self.slices}
        self.begin = min([s.start for s in self.slices] + [a.at[1] for a in picture.arrows], default=0.0)
        end = max([s.end for s in self.slices] + [a.to[1] for a in picture.arrows] + [self.begin + 1e-9])
        self.whole = end - self.begin
        self.point = self.whole / POINTS
        self.milliseconds = picture.measured and self.whole > 10_000
        self.buffers = list(dict.fromkeys(s.buffer for s in picture.slices if s.buffer))
        self.buckets = sorted({s.bucket for s in picture.slices if s.bucket}, key=lambda name: (len(name), name))
        paths = [[id(step.work) for step in found.steps] for found in critical_paths(picture)]
        self.critical = set(itertools.chain(*paths))
        self.follows = {pair for one in paths for pair in itertools.pairwise(one)}
        many = enumerate([*self.buffers, *self.buckets])
        self.colour = {buffer: COLOURS[i % len(COLOURS)] for i, buffer in many}
        self.neighbours = Neighbours(picture)
        indexed = {s.buffer for s in picture.slices if s.buffer and not s.name.endswith(f"{s.buffer}[0]")}
        self.bars: list[Bar] = []  # a lane after the other, each in the order of time
        for s in sorted(self.slices, key=lambda s: (self.row[s.lane], s.start)):
            width = max(s.end - s.start, self.point * (THIN if s.buffer else 0.5))
            name = s.name if s.buffer in indexed else s.name.removesuffix("[0]")
            name = name.removeprefix(f"{s.bucket}: ") if s.bucket else name
            colour = self.colour.get(s.buffer or s.bucket, GREY)
            self.bars.append(Bar(s, self.row[s.lane], s.start - self.begin, width, colour, name))
        self.sent = {self.wire(a.lane, a.start, b.lane, b.end, self.colour[a.bucket]) for a, b, _ in picture.messages}
        # Gradients between nodes of workers; none from a node to the very next of its worker.
        rows: dict[Lane, list[Slice]] = {}
        for n in nodes:
            rows.setdefault(n.lane, []).append(n)
        next_ = {id(a): b for row in rows.values() for a, b in itertools.pairwise(row)}
        self.given: set[Wire] = set()
        for a, b, _ in picture.gradients:
            if next_.get(id(a)) is not b and id(a) in self.shown and id(b) in self.shown:
                bold = (id(a), id(b)) in self.follows
                end = b.start + min(b.end - b.start, 2 * self.point) / 2
                self.given.add(self.wire(a.lane, a.end, b.lane, end, INK if bold else PALE, bold))
        short = list(dict.fromkeys(bar.name for bar in self.bars if not self.fits(bar)))
        sums = [f"sum {b}" for b in self.buffers]
        self.numbers = {
            name: i
            for i, name in enumerate([*(s for s in sums if s in short), *(n for n in short if n not in sums)], 1)
        }

    def wire(self, a: Lane, start: float, b: Lane, end: float, colour: str, bold: bool = False) -> Wire:
        """An arrow from one lane to another, by the gap beside the latter."""
        row, to = self.row[a], self.row[b]
        return Wire(start - self.begin, row, end - self.begin, to, to - 1 if row < to else to, colour, bold)

    def fits(self, bar: Bar) -> bool:
        """Whether a bar has room for its name; if not, it bears a number."""
        return bar.width >= max(NARROW, (len(bar.name) + 1) * LETTER) * self.point


def draw(
    picture: Picture, out: IO[bytes], *, format: str = "svg", title: str | None = None, names: Names | None = None
) -> None:
    """Draw a picture into an open file. `names`: the names of lanes. ImportError without matplotlib, ValueError for an
    unknown format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("trace.plot draws with matplotlib, which is not installed: pip install matplotlib") from e

    names = by_stream(names or {})
    lanes = picture.in_order(names)
    figure = Figure(figsize=(WIDTH, 2.1 + PITCH * max(len(lanes), 2)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if format not in canvas.get_supported_filetypes():
        known = ", ".join(sorted(canvas.get_supported_filetypes()))
        raise ValueError(f"trace.plot: unknown format {format!r}: {known}")
    sheet = Sheet(figure.add_subplot(), picture, lanes)
    frame(sheet, names, title)
    for i in range(len(lanes)):
        row = [bar for bar in sheet.bars if bar.row == i]
        for bar in row:  # a white rim parts neighbours, and would hide what is no wider than itself
            wide, critical = bar.width > 4 * sheet.point, id(bar.slice) in sheet.critical
            sheet.axes.broken_barh(
                [(bar.x, bar.width)],
                (bar.row + TOP, BOTTOM - TOP),
                facecolors=bar.colour,
                edgecolors=INK if critical else "white",
                linewidth=(1.4 if wide else 0.5) if critical else 0.6 if wide else 0,
                zorder=4 if bar.slice.buffer or critical else 3,
            )
            if bar.width >= NARROW * sheet.point:
                text = bar.name if sheet.fits(bar) else str(sheet.numbers[bar.name])
                label(sheet, bar.middle, bar.row + (TOP + BOTTOM) / 2, text, bar, "none")
        draw_numbers(sheet, [bar for bar in row if bar.width < NARROW * sheet.point])
    for n in picture.nodes:  # on streams: a line below what a node queued there
        if id(n) not in sheet.shown and n.end > n.start:
            rim = min(0.6 * sheet.point, (n.end - n.start) / 4)
            ends, y = [n.start - sheet.begin + rim, n.end - sheet.begin - rim], sheet.row[n.lane] + UNDER
            sheet.axes.plot(ends, [y, y], color=PALE, linewidth=2, solid_capstyle="butt")
    draw_arrows(sheet)
    for race in picture.races:
        draw_race(sheet, race)
    explain(sheet, figure)
    if format == "svg":
        save_svg(figure, out)
    else:
        figure.savefig(out, format=format, dpi=150)


#: What save_svg replaces: decimals beyond what a screen shows, fonts beyond the first, turns by nothing, lines within a
#: path, indentation, paths of one point, names of groups, groups of nothing or one element.
SHORTER = (
    (rb"(\d\d\.\d|\d\.\d\d)\d+", rb"\1"),
    (rb"'Bitstream Vera Sans'[^;]*, sans-serif", rb"sans-serif"),
    (rb' transform="rotate\(-?0 [^)]*\)"', rb""),
    (rb' ?\n([A-Zz"])', rb" \1"),
    (rb"\n +<", rb"\n<"),
    (rb'<path d="M [\d.]+ [\d.]+ "[^>]*/>\n', rb""),
    (rb'<g id="\w+[.\d]*"(/?)>', rb"<g\1>"),
    (rb"<g/>\n|<g>\n</g>\n", rb""),
    (rb"<g>\n(<(?!g\b|/)[^\n]*)\n</g>", rb"\1"),
)


def save_svg(figure: Figure, out: IO[bytes]) -> None:
    """Text stays text, each style is written once, and numbers are short: a third of the bytes."""
    from matplotlib import rc_context

    made = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fanin"}):
        figure.savefig(made, format="svg", metadata={"Date": None})
    text = made.getvalue()
    for pattern, short in SHORTER:
        text = re.sub(pattern, short, text)
    head, style, body = text.partition(b"</style>")
    classes: dict[bytes, bytes] = {}

    def named(m: re.Match[bytes]) -> bytes:
        rules = (b"clip-path:" + m[1] + b";" if m[1] else b"") + m[2].replace(b"; ", b";").replace(b": ", b":")
        return b'class="%s"' % classes.setdefault(rules, b"s%d" % len(classes))

    body = re.sub(rb'(?:clip-path="([^"]*)" )?style="([^"]*)"', named, body)
    out.write(head + b"".join(b"\n.%s{%s}" % (name, rules) for rules, name in classes.items()) + style + body)


def frame(sheet: Sheet, names: Names, title: str | None) -> None:
    """Lanes, their names, the axis of time."""
    axes, lanes = sheet.axes, sheet.lanes
    for i, lane in enumerate(lanes):
        if i % 2 == 0:
            axes.axhspan(i - 0.5, i + 0.5, color="#f6f6f6", zorder=0)
        if i and (lane.rank, lane.device) != (lanes[i - 1].rank, lanes[i - 1].device):
            axes.axhline(i - 0.5, color=INK, linewidth=0.8, zorder=1)
    axes.set_ylim(len(lanes) - 0.35 if lanes else 1, -0.6)
    axes.set_xlim(-0.01 * sheet.whole, 1.012 * sheet.whole)
    called = []
    for lane in lanes:
        device, _, stream = lane.name.partition(", ")
        called.append(f"{device}, {names[lane[:2]]}\n{stream}" if lane[:2] in names else lane.name)
    axes.set_yticks(range(len(lanes)), called, fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    if sheet.picture.clock.startswith("logical"):
        axes.set_xticks([])
    if sheet.milliseconds:
        axes.xaxis.set_major_formatter(lambda us, place: f"{us / 1000:g}")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)


def label(sheet: Sheet, x: float, y: float, text: str, bar: Bar, ground: str) -> None:
    box = {"boxstyle": "round,pad=0.18", "facecolor": ground, "edgecolor": "none"} if ground != "none" else None
    colour = "white" if bar.colour != GREY else INK
    sheet.axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=colour, zorder=7, clip_on=True, bbox=box)


def draw_numbers(sheet: Sheet, bars: Sequence[Bar]) -> None:
    """Above the bars that are too narrow, their numbers: one for neighbours of one name, moved apart where they would
    meet.
    """
    groups: list[list[Bar]] = []
    for bar in bars:
        last = groups[-1] if groups else []
        if last and last[0].name == bar.name and bar.x - last[-1].x < 4 * NARROW * sheet.point:
            last.append(bar)
        else:
            groups.append([bar])
    at = [(group[0].middle + group[-1].middle) / 2 for group in groups]
    edge = 6 * sheet.point
    for group, x in zip(groups, apart(at, 12.5 * sheet.point, edge, sheet.whole - edge), strict=True):
        bar = group[0]
        for one in group:
            sheet.axes.plot(
                [one.middle, x], [bar.row + TOP, bar.row + NUMBERS], color=bar.colour, linewidth=0.7, zorder=6
            )
        ground = bar.colour if bar.colour != GREY else "#e6e6e6"
        label(sheet, x, bar.row + NUMBERS, str(sheet.numbers[bar.name]), bar, ground)


def apart(places: Iterable[float], gap: float, least: float, most: float) -> list[float]:
    """The places, in their order, moved as little as can be so that neighbours are `gap` apart and all lie between
    least and most.
    """
    groups: list[tuple[float, int]] = []  # (where the first would be, how many)
    for x in places:
        first, n = x, 1
        while groups and first < groups[-1][0] + groups[-1][1] * gap:
            before, m = groups.pop()
            first, n = (before * m + (first - m * gap) * n) / (m + n), m + n
        groups.append((first, n))
    made = [first + i * gap for first, n in groups for i in range(n)]
    for i, x in enumerate(made):
        made[i] = max(x, least if i == 0 else made[i - 1] + gap)
    for i in reversed(range(len(made))):
        made[i] = min(made[i], most if i == len(made) - 1 else made[i + 1] - gap)
    return made


class Wire(NamedTuple):
    """An arrow as it is drawn: from (x, row) to (end, to), by the track in the gap below row `gap`; bold on the
    critical path.
    """

    x: float
    row: int
    end: float
    to: int
    gap: int
    colour: str
    bold: bool = False


def draw_arrows(sheet: Sheet) -> None:
    """Draw waits below the bars that they cross, with their heads and starting dots above the bars."""
    wires = sheet.given | sheet.sent
    for arrow in sheet.picture.arrows:  # from the work that is waited for to the work that waits
        (from_lane, start), (to_lane, stop) = arrow.at, arrow.to
        work, held = sheet.neighbours.before(from_lane, start), sheet.neighbours.after(to_lane, stop)
        if held:
            stop = held.start + min(held.end - held.start, 2 * sheet.point) / 2
        colour = sheet.colour[held.buffer] if held and held.buffer else INK
        wires.add(sheet.wire(from_lane, work.end if work else start, to_lane, stop, colour))
    buses: dict[tuple[int, int, float, str], list[Wire]] = {}
    for w in sorted(wires):
        buses.setdefault((w.gap, w.to, w.end, w.colour), []).append(w)
    used: dict[int, list[list[tuple[float, float]]]] = {}
    tracks: list[tuple[int, list[Wire]]] = []
    for (gap, _, stop, _), bus in buses.items():
        span = min(stop, *(w.x for w in bus)), max(stop, *(w.x for w in bus))
        rows = used.setdefault(gap, [])
        free = next((i for i, row in enumerate(rows) if all(span[0] > b or span[1] < a for a, b in row)), len(rows))
        rows[free:free] = [[]] if free == len(rows) else []
        rows[free].append((span[0] - 4 * sheet.point, span[1] + 4 * sheet.point))
        tracks.append((free, bus))
    for i, bus in tracks:
        gap = bus[0].gap
        step = (TRACKS[1] - TRACKS[0]) / max(len(used[gap]) - 1, 1)
        track = gap + TRACKS[0] + i * step
        for w in bus:  # from the rim of a bar to the track, along it, and to the rim of the other
            begin = w.row + (BOTTOM if w.row <= gap else TOP)
            end = w.to + (TOP if w.to > gap else BOTTOM)
            line: dict[str, Any] = {"color": w.colour, "linewidth": 1.8 if w.bold else 0.8, "alpha": 0.85, "zorder": 2}
            sheet.axes.plot([w.x, w.x, w.end, w.end], [begin, track, track, end], solid_joinstyle="round", **line)
            sheet.axes.plot([w.x], [begin], marker="o", markersize=2.4, color=w.colour, zorder=6)
            head: dict[str, Any] = {
                "markersize": 4.5,
                "color": w.colour,
                "markeredgecolor": "white",
                "markeredgewidth": 0.4,
            }
            sheet.axes.plot([w.end], [end], marker="v" if w.to > gap else "^", zorder=6, **head)


def draw_race(sheet: Sheet, race: Race) -> None:
    """Draw a red rim around the later operation of a race, a cross, and the message."""
    axes, y, x = sheet.axes, sheet.row.get(race.lane, 0), race.time - sheet.begin
    right = x > sheet.whole / 2
    work = sheet.neighbours.before(race.lane, race.time)
    if work:
        place = [(work.start - sheet.begin, work.end - work.start)]
        axes.broken_barh(place, (y + TOP, BOTTOM - TOP), facecolors="none", edgecolors=RED, linewidth=2, zorder=8)
    axes.plot([x], [y], marker="X", markersize=11, color=RED, markeredgecolor="white", zorder=9)
    axes.annotate(
        textwrap.fill(race.text, 70, max_lines=5),
        (x, y),
        xytext=(-10 if right else 10, 12),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=7.5,
        color=RED,
        zorder=10,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": RED, "linewidth": 0.8, "alpha": 0.95},
    )


def explain(sheet: Sheet, figure: Figure) -> None:
    """The colours above, and below what everything is."""
    from matplotlib.patches import Patch

    picture, every = sheet.picture, [*sheet.buffers, *sheet.buckets]
    numbers, shown = dict(sheet.numbers), every[: len(COLOURS)]
    words = [b if b in sheet.buckets else f"{numbers.pop(f'sum {b}', '')} sum {b}".strip() for b in shown]
    key = [Patch(facecolor=sheet.colour[b], label=text) for b, text in zip(shown, words, strict=True)]
    if len(every) > len(shown):
        key.append(Patch(facecolor="white", label=f"and {len(every) - len(shown)} more"))
    key.append(Patch(facecolor=GREY, label="nodes" if picture.measured else "producers and others"))
    figure.legend(handles=key, loc="outside upper right", ncols=min(len(key), 6), fontsize=8.5, frameon=False)
    primes = [s.name for s in picture.slices if s.name.endswith("'")]
    primed = f" (a prime, as in {primes[0]}, marks the backward step of an operation)" if primes else ""
    lines = [f"Grey: the work of producers{primed}. A colour: one sum; sums of one name share it."]
    if picture.measured:
        lines = ["Grey: nodes of the pass, a lane for each worker. A colour: a sum, made within a node."]
    if sheet.buckets:
        lines[0] += " Or the steps of a bucket's sum over ranks."
    if sheet.sent:
        lines.append("An arrow in a bucket's colour: a message, from a rank's terms to their owner, or the sum back.")
    if picture.arrows:
        lines.append(
            "An arrow: waits for. The work at its head waits for the work at its dot; a coloured one is a sum that"
            " waits for what it adds."
        )
    if any(id(n) not in sheet.shown for n in picture.nodes):
        lines[0] += " A line below: the work of one node."
    if sheet.given:
        lines.append(
            "An arrow: a gradient, from the node at its dot to that at its head; none to the next of a worker."
        )
    if not picture.measured:
        lines.append(
            f"{counted(len(picture.arrows), 'wait')}, {picture.elided} left out (they already held),"
            f" {counted(len(picture.races), 'race')}."
        )
    lines += [f"Framed: the {found}." for found in critical_paths(picture)]
    if numbers:
        replaced = ", ".join(f"{n} {name}" for name, n in numbers.items())
        lines.append(f"A number replaces a name that does not fit: {replaced}.")
    clock = picture.clock
    if not clock.startswith("logical"):
        clock = f"{'ms' if sheet.milliseconds else 'us'}, {clock}"
    text = [clock, *(row for line in lines for row in textwrap.wrap(line, 150, max_lines=8))]
    sheet.axes.set_xlabel("\n".join(text), fontsize=8.5, loc="left", linespacing=1.4)
