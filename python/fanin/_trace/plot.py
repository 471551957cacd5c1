"""The picture of a trace.

Each stream has a lane with its work as bars, grey or in the colour of its sum. A bar too narrow for its name has a
number in it or above it. Arrows run below the bars: down (or up) from the awaited work, along a track between two
lanes, to the waiting work; arrows with one end share a track.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .._svg import (
    COLOURS,
    GREY,
    INK,
    MARGIN,
    PALE,
    RED,
    SMALL,
    TEXT,
    TITLE,
    WHITE,
    Canvas,
    Point,
    Svg,
    apart,
    axis,
    legend,
    paragraph,
    printable,
    shortened,
    text_width,
    wrapped,
)
from .._words import counted
from .line import HOST
from .passes import amount, critical_paths
from .picture import Lane, Names, Neighbours, Picture, Race, Slice, by_stream

__tracebackhide__ = True  # no frames of ours in reports of pytest

# In pixels
WIDTH, LABELS = 1100, 200  # of the picture, and of the names of lanes at most
PITCH = 54  # from lane to lane, where few arrows lie between them
TOP, BOTTOM = -12, 14  # of a bar, from the middle of its lane
NUMBERS = -20  # the middle of numbers above bars
UNDER = 17.5  # the lines below the work of a node
TRACKS, TRACK = 21, 3  # the first track of arrows below a lane, and from track to track
MOST_TRACKS = 30  # in one gap; further arrows share them
THIN, HAIR = 3, 0.7  # the least width of a sum, and of other work
NARROW = 15  # a bar with less has its number above it, not inside

MOST_NUMBERS = 60  # names that are listed below the picture
LISTED = 200  # pixels of such a name
MOST_LINES = 20  # of a paragraph


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

    @property
    def has_room(self) -> bool:
        """Whether the bar is wide enough for its name; if not, it has a number."""
        return text_width(printable(self.name), SMALL) + 4 <= self.width


class Wire(NamedTuple):
    """An arrow as it is drawn: from (x, row) to (end, to), by a track in the gap below row `gap`; bold on the critical
    path.
    """

    x: float
    row: int
    end: float
    to: int
    gap: int
    colour: str
    bold: bool = False


class Bus(NamedTuple):
    """Arrows that share their end and their track."""

    track: int
    wires: list[Wire]


class Sheet:
    """What is drawn, with its places across; `rows` adds those down."""

    def __init__(self, picture: Picture, lanes: Sequence[Lane], names: Names) -> None:
        self.picture, self.lanes = picture, lanes
        self.row = {lane: i for i, lane in enumerate(lanes)}
        self.called = [lane_words(lane, names) for lane in lanes]
        words = [line for lines in self.called for line in lines]
        self.left = MARGIN + 10 + min(LABELS, max([text_width(printable(line), TEXT) for line in words], default=0.0))
        self.right = float(WIDTH - MARGIN)
        nodes = [n for n in picture.nodes if n.lane.device == HOST]
        self.slices: list[Slice] = [*nodes, *picture.slices]
        self.shown = {id(s) for s in self.slices}
        self.begin = min([s.start for s in self.slices] + [a.at[1] for a in picture.arrows], default=0.0)
        end = max([s.end for s in self.slices] + [a.to[1] for a in picture.arrows] + [self.begin + 1e-9])
        self.whole = end - self.begin
        self.milliseconds = picture.measured and self.whole > 10_000
        self.buffers = list(dict.fromkeys(s.buffer for s in picture.slices if s.buffer))
        self.buckets = sorted({s.bucket for s in picture.slices if s.bucket}, key=lambda name: (len(name), name))
        self.paths = critical_paths(picture)
        paths = [[id(step.work) for step in found.steps] for found in self.paths]
        self.critical = set(itertools.chain(*paths))
        self.follows = {pair for one in paths for pair in itertools.pairwise(one)}
        many = enumerate([*self.buffers, *self.buckets])
        self.colour = {buffer: COLOURS[i % len(COLOURS)] for i, buffer in many}
        self.neighbours = Neighbours(picture)
        self.bars = self.make_bars()
        self.sent = {self.wire(a.lane, a.start, b.lane, b.end, self.colour[a.bucket]) for a, b, _ in picture.messages}
        self.given = self.make_gradients(nodes)
        self.numbers = self.make_numbers()
        self.above = [self.make_above(i) for i in range(len(lanes))]
        self.buses = self.make_buses()
        self.middle = [0.0 for _ in lanes]

    def x(self, time: float) -> float:
        return self.left + (time - self.begin) / self.whole * (self.right - self.left)

    def make_bars(self) -> list[Bar]:
        """A lane after the other, each in the order of time."""
        indexed = {s.buffer for s in self.picture.slices if s.buffer and not s.name.endswith(f"{s.buffer}[0]")}
        made = []
        for s in sorted(self.slices, key=lambda s: (self.row[s.lane], s.start)):
            x = self.x(s.start)
            width = max(self.x(s.end) - x, THIN if s.buffer else HAIR)
            name = s.name if s.buffer in indexed else s.name.removesuffix("[0]")
            name = name.removeprefix(f"{s.bucket}: ") if s.bucket else name
            colour = self.colour.get(s.buffer or s.bucket, GREY)
            made.append(Bar(s, self.row[s.lane], x, width, colour, name))
        return made

    def make_gradients(self, nodes: Sequence[Slice]) -> set[Wire]:
        """Gradients between nodes of workers; none from a node to the very next of its worker."""
        rows: dict[Lane, list[Slice]] = {}
        for n in nodes:
            rows.setdefault(n.lane, []).append(n)
        next_ = {id(a): b for row in rows.values() for a, b in itertools.pairwise(row)}
        made = set()
        for a, b, _ in self.picture.gradients:
            if next_.get(id(a)) is not b and id(a) in self.shown and id(b) in self.shown:
                bold = (id(a), id(b)) in self.follows
                made.add(self.wire(a.lane, a.end, b.lane, self.entry(b), INK if bold else PALE, bold))
        return made

    def make_above(self, row: int) -> list[list[Bar]]:
        """The bars of a lane whose numbers are above them: neighbours of one name have one number. Where numbers have
        no room the shortest work has none.
        """
        groups: list[list[Bar]] = []
        for bar in self.bars:
            if bar.row != row or bar.width >= NARROW or bar.name not in self.numbers or bar.has_room:
                continue
            last = groups[-1] if groups else []
            if last and last[0].name == bar.name and bar.x - last[-1].x < 4 * NARROW:
                last.append(bar)
            else:
                groups.append([bar])
        room = int((self.right - self.left) / (text_width("88", SMALL) + 5))
        if len(groups) > room:
            kept = sorted(groups, key=lambda group: -sum(bar.slice.end - bar.slice.start for bar in group))[:room]
            groups = sorted(kept, key=lambda group: group[0].x)
        return groups

    def make_numbers(self) -> dict[str, int]:
        """The numbers of names that have no room: of sums, then of others in their order; of too many those of the
        longest work.
        """
        time: dict[str, float] = {}
        for bar in self.bars:
            if not bar.has_room:
                time[bar.name] = time.get(bar.name, 0.0) + bar.slice.end - bar.slice.start
        sums = [f"sum {b}" for b in self.buffers if f"sum {b}" in time]
        longest = sorted(time, key=lambda name: (name not in sums, -time[name]))[:MOST_NUMBERS]
        self.without = len(time) - len(longest)
        kept = set(longest)
        return {name: i for i, name in enumerate([name for name in dict.fromkeys([*sums, *time]) if name in kept], 1)}

    def wire(self, a: Lane, start: float, b: Lane, end: float, colour: str, bold: bool = False) -> Wire:
        """An arrow from one lane to another, by the gap beside the latter."""
        row, to = self.row[a], self.row[b]
        return Wire(self.x(start), row, self.x(end), to, to - 1 if row < to else to, colour, bold)

    def entry(self, work: Slice) -> float:
        """The time at which an arrow reaches work: a little after its beginning."""
        pixel = self.whole / (self.right - self.left)
        return work.start + min(work.end - work.start, 2 * pixel) / 2

    def make_buses(self) -> list[Bus]:
        """All arrows, on tracks."""
        wires = self.given | self.sent
        for arrow in self.picture.arrows:  # from the work that is waited for to the work that waits
            (from_lane, start), (to_lane, stop) = arrow.at, arrow.to
            work, held = self.neighbours.before(from_lane, start), self.neighbours.after(to_lane, stop)
            colour = self.colour[held.buffer] if held and held.buffer else INK
            stop = self.entry(held) if held else stop
            wires.add(self.wire(from_lane, work.end if work else start, to_lane, stop, colour))
        together: dict[tuple[int, int, float, str], list[Wire]] = {}
        for w in sorted(wires):
            together.setdefault((w.gap, w.to, w.end, w.colour), []).append(w)
        spans = []
        for bus in together.values():
            places = [bus[0].end, *(w.x for w in bus)]
            spans.append((bus[0].gap, min(places), max(places), bus))
        ends: dict[int, list[float]] = {}  # of each gap: where each track is free again
        made = []
        for gap, low, high, bus in sorted(spans, key=lambda span: span[:3]):
            tracks = ends.setdefault(gap, [])
            free = next((i for i, end in enumerate(tracks) if end < low), len(tracks))
            if free == MOST_TRACKS:
                free = tracks.index(min(tracks))
            tracks[free : free + 1] = [high + 5]
            made.append(Bus(free, bus))
        return made

    def rows(self, top: float) -> float:
        """Place the lanes below each other, further apart where arrows need it; returns the y below them."""
        tracks = [0 for _ in self.lanes]
        for bus in self.buses:
            gap = max(bus.wires[0].gap, 0)
            tracks[gap] = max(tracks[gap], bus.track + 1)
        y = top
        for i, used in enumerate(tracks):
            self.middle[i] = y - NUMBERS + 8
            y += PITCH + max(0, used - 3) * TRACK
        return y


def lane_words(lane: Lane, names: Names) -> list[str]:
    """The name of a lane, in one line or two."""
    if lane[:2] not in names:
        return [lane.name]
    device, _, stream = lane.name.partition(", ")
    return [f"{device}, {names[lane[:2]]}", *([stream] if stream else [])]


def draw(picture: Picture, *, title: str | None = None, names: Names | None = None) -> Svg:
    """Draw a picture. `names`: the names of lanes."""
    names = by_stream(names or {})
    sheet, canvas = Sheet(picture, picture.in_order(names), names), Canvas()
    y = float(MARGIN)
    if title:
        canvas.label(MARGIN, y + TITLE, title, WIDTH - 2 * MARGIN, TITLE)
        y += 30
    top = legend(canvas, colours(sheet), MARGIN, WIDTH - MARGIN, y) + 6
    bottom = sheet.rows(top)
    draw_lanes(canvas, sheet, top, bottom)
    draw_wires(canvas, sheet)
    draw_bars(canvas, sheet)
    draw_ends(canvas, sheet)
    draw_numbers(canvas, sheet)
    y = bottom + 8
    if not picture.clock.startswith("logical"):
        axis(canvas, sheet.left, sheet.right, y, sheet.whole / (1000 if sheet.milliseconds else 1))
        y += 28
    with canvas.group(kind="fanin-notes"):
        for line in explained(sheet):
            y = paragraph(canvas, line, MARGIN, y, WIDTH - 2 * MARGIN, MOST_LINES)
    draw_races(canvas, sheet, top)
    return canvas.finish(WIDTH, y + MARGIN, title or f"A trace: {counted(len(sheet.lanes), 'lane')}")


def draw_lanes(canvas: Canvas, sheet: Sheet, top: float, bottom: float) -> None:
    """Draw the ground and the name of each lane, and a line between devices."""
    edges = [middle + NUMBERS - 8 for middle in sheet.middle] + [bottom]
    for i, lane in enumerate(sheet.lanes):
        if i % 2 == 0:
            canvas.rect(sheet.left, edges[i], sheet.right - sheet.left, edges[i + 1] - edges[i], fill="#f6f6f6")
        if i and (lane.rank, lane.device) != (sheet.lanes[i - 1].rank, sheet.lanes[i - 1].device):
            canvas.line((MARGIN, edges[i]), (sheet.right, edges[i]), stroke=INK, stroke_width=0.8)
    with canvas.group(kind="fanin-lanes", text_anchor="end"):
        for middle, words in zip(sheet.middle, sheet.called, strict=True):
            y = middle + 5 - 8 * (len(words) - 1)
            for line in words:
                canvas.label(sheet.left - 8, y, line, LABELS)
                y += 16


def draw_bars(canvas: Canvas, sheet: Sheet) -> None:
    """Draw all bars, those of sums and of the critical path above the others, with the names or numbers that have room
    in them; and on streams a line below what a node queued there.
    """
    pale = [bar for bar in sheet.bars if not bar.slice.buffer and id(bar.slice) not in sheet.critical]
    bold = [bar for bar in sheet.bars if bar.slice.buffer or id(bar.slice) in sheet.critical]
    with canvas.group(kind="fanin-bars"):
        for bar in [*pale, *bold]:
            draw_bar(canvas, sheet, bar)
    with canvas.group(kind="fanin-words", font_size=SMALL, text_anchor="middle"):
        for bar in sheet.bars:
            text = bar.name if bar.has_room else str(sheet.numbers.get(bar.name, ""))
            if text and (bar.has_room or bar.width >= NARROW):
                colour = {"fill": WHITE} if bar.colour != GREY else {}
                canvas.text(bar.middle, sheet.middle[bar.row] + (TOP + BOTTOM) / 2 + 3.5, text, **colour)
    with canvas.group(kind="fanin-nodes", stroke=PALE, stroke_width=2):
        for n in sheet.picture.nodes:
            if id(n) not in sheet.shown and n.end > n.start:
                left, right = sheet.x(n.start), sheet.x(n.end)
                rim = min(0.8, (right - left) / 4)
                y = sheet.middle[sheet.row[n.lane]] + UNDER
                canvas.line((left + rim, y), (right - rim, y))


def draw_bar(canvas: Canvas, sheet: Sheet, bar: Bar) -> None:
    """Draw a bar. A white rim parts neighbours, and would hide what is no wider than itself; that of the critical path
    is dark.
    """
    wide = bar.width > 4
    rim: dict[str, float | str] = {}
    if id(bar.slice) in sheet.critical:
        rim = {"stroke": INK, "stroke_width": 1.6 if wide else 0.6}
    elif wide:
        rim = {"stroke": WHITE, "stroke_width": 0.8}
    tip = bar.slice.name
    if not sheet.picture.clock.startswith("logical"):
        tip = f"{tip}: {amount(bar.slice.end - bar.slice.start)}"
    canvas.rect(bar.x, sheet.middle[bar.row] + TOP, bar.width, BOTTOM - TOP, tip, fill=bar.colour, **rim)


def draw_numbers(canvas: Canvas, sheet: Sheet) -> None:
    """Above the bars that are too narrow draw their numbers, moved apart where they would meet."""
    with canvas.group(kind="fanin-numbers", font_size=SMALL, text_anchor="middle"):
        for groups in sheet.above:
            texts = [str(sheet.numbers[group[0].name]) for group in groups]
            widths = [text_width(text, SMALL) + 4 for text in texts]
            gaps = [(a + b) / 2 + 1 for a, b in itertools.pairwise(widths)]
            places = [(group[0].middle + group[-1].middle) / 2 for group in groups]
            for group, text, width, x in zip(
                groups, texts, widths, apart(places, gaps, sheet.left + 6, sheet.right - 6), strict=True
            ):
                bar = group[0]
                y = sheet.middle[bar.row] + NUMBERS
                for one in group:
                    foot: Point = (one.middle, sheet.middle[bar.row] + TOP)
                    canvas.line(foot, (x, y), stroke=bar.colour)
                grey = bar.colour == GREY
                canvas.rect(x - width / 2, y - 6, width, 12, fill="#e6e6e6" if grey else bar.colour, rx=2)
                canvas.text(x, y + 3.5, text, fill=INK if grey else WHITE)


def wire_ends(sheet: Sheet, wire: Wire) -> tuple[float, float]:
    """Where an arrow begins and ends: at the rims of bars."""
    begin = sheet.middle[wire.row] + (BOTTOM if wire.row <= wire.gap else TOP)
    end = sheet.middle[wire.to] + (TOP if wire.to > wire.gap else BOTTOM)
    return begin, end


def draw_wires(canvas: Canvas, sheet: Sheet) -> None:
    """Draw waits, gradients and messages: from the rim of a bar to a track, along it, and to the rim of the other."""
    with canvas.group(kind="fanin-wires", fill="none", stroke_linejoin="round", opacity=0.85):
        for bus in sheet.buses:
            for w in bus.wires:
                track = sheet.middle[max(w.gap, 0)] + TRACKS + bus.track * TRACK
                begin, end = wire_ends(sheet, w)
                width = {"stroke_width": 2} if w.bold else {}
                canvas.line((w.x, begin), (w.x, track), (w.end, track), (w.end, end), stroke=w.colour, **width)


def draw_ends(canvas: Canvas, sheet: Sheet) -> None:
    """Draw the dots at which arrows begin, and their heads, above the bars."""
    with canvas.group(kind="fanin-dots"):
        for w in sorted({w for bus in sheet.buses for w in bus.wires}):
            canvas.circle(w.x, wire_ends(sheet, w)[0], 1.8, fill=w.colour)
    with canvas.group(kind="fanin-heads", stroke=WHITE, stroke_width=0.5):
        for bus in sheet.buses:
            w = bus.wires[0]
            canvas.head(w.end, wire_ends(sheet, w)[1], down=w.to > w.gap, fill=w.colour)


def draw_races(canvas: Canvas, sheet: Sheet, top: float) -> None:
    """Draw a red rim around the later operation of each race, a cross, and the message."""
    with canvas.group(kind="fanin-races"):
        below = top
        for race in sheet.picture.races:
            below = draw_race(canvas, sheet, race, below)


def draw_race(canvas: Canvas, sheet: Sheet, race: Race, top: float) -> float:
    """Draw one race, its message not above `top`; returns the y below the message."""
    x, y = min(max(sheet.x(race.time), sheet.left), sheet.right), sheet.middle[sheet.row[race.lane]]
    work = sheet.neighbours.before(race.lane, race.time)
    if work:
        left = sheet.x(work.start)
        width = max(sheet.x(work.end) - left, THIN)
        canvas.rect(left, y + TOP, width, BOTTOM - TOP, fill="none", stroke=RED, stroke_width=2.5)
    for colour, thick in ((WHITE, 6), (RED, 3.5)):
        for one, other in ((-5, 5), (5, -5)):
            canvas.line((x - 5, y + one), (x + 5, y + other), stroke=colour, stroke_width=thick)
    lines = wrapped(race.text, 480, SMALL, 5)
    width, height = max(text_width(line, SMALL) for line in lines) + 12, 13 * len(lines) + 8
    middle = (sheet.left + sheet.right) / 2
    left = x - 12 - width if x > middle else x + 12
    left = min(max(left, sheet.left), sheet.right - width)
    y = max(y - 14 - height, top)
    canvas.rect(left, y, width, height, race.text, fill=WHITE, fill_opacity=0.95, stroke=RED, rx=4)
    for i, line in enumerate(lines):
        canvas.text(left + 6, y + 14 + 13 * i, line, SMALL, fill=RED)
    return y + height + 2


def colours(sheet: Sheet) -> list[tuple[str, str]]:
    """The legend: each colour with its sum, and what is grey."""
    every = [*sheet.buffers, *sheet.buckets]
    made = []
    for name in every[: len(COLOURS)]:
        words = name if name in sheet.buckets else f"{sheet.numbers.get(f'sum {name}', '')} sum {name}".strip()
        made.append((sheet.colour[name], words))
    if len(every) > len(COLOURS):
        made.append(("", f"and {len(every) - len(COLOURS)} more"))
    return [*made, (GREY, "nodes" if sheet.picture.measured else "producers and others")]


def explained(sheet: Sheet) -> list[str]:
    """What everything in the picture is, a paragraph each."""
    picture = sheet.picture
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
    lines += [f"Framed: the {found}." for found in sheet.paths]
    in_legend = {f"sum {b}" for b in [*sheet.buffers, *sheet.buckets][: len(COLOURS)]}
    listed = [(n, name) for name, n in sheet.numbers.items() if name not in in_legend]
    if listed:
        replaced = ", ".join(f"{n} {shortened(name, LISTED, TEXT)}" for n, name in listed)
        lines.append(f"A number replaces a name that does not fit: {replaced}.")
    if sheet.without:
        lines.append(f"{counted(sheet.without, 'more name')}: in a browser, under the pointer.")
    unit = "ms" if sheet.milliseconds else "us"
    clock = picture.clock if picture.clock.startswith("logical") else f"{unit}, {picture.clock}"
    return [clock, *lines]
