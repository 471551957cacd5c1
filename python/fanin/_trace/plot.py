"""The picture of a trace: what waits for what, to be read in ten seconds.

A lane is a stream, a worker or a rank; a bar is work, as wide as its name; an arrow leads from work to what waits for
it. Bars lie in the order that lanes and waits enforce, and not to scale: `trace.save` has the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .._svg import (
    GREY,
    INK,
    MARGIN,
    RED,
    WHITE,
    Canvas,
    Svg,
    shortened,
    text_width,
    wrapped,
)
from .._words import counted, printable
from .line import HOST
from .part import NUMBERS, Chooser, Follows, Part, follows_of
from .passes import amount, critical_paths
from .picture import Lane, Names, Neighbours, Picture, Slice

__tracebackhide__ = True  # no frames of ours in reports of pytest

# In pixels
WIDTH = 720  # narrow, so that letters are legible where a page shows the picture at half its size
NAME, NOTE, MESSAGE = 15, 13, 18  # sizes of letters
LABEL, BAR, UNDER = 24, 30, 12  # the parts of a lane: its name, its bars, and the room for arrows below them
TRACK = 6  # from arrow to arrow in that room
FIRST = MARGIN + 26  # where bars begin: before them an ellipsis stands for earlier work
LAST = WIDTH - MARGIN - 8
BETWEEN, ARROW = 5, 22  # the gaps between the bars of a lane, and before work that waits for another lane
WAITS = 70  # the least room for the word "waits" before the sum for which streams meet
LONGEST = 150  # of the name in a bar

MEETING, SUM, BUCKET = "#0072b2", "#b3d4e8", "#f4d9b8"  # sums: of the message, others, those over ranks
GROUND, FAINT = "#f3f3f3", "#666666"
REST = 'trace.save("pass.json")'


class Bar(NamedTuple):
    """A slice as it is drawn."""

    slice: Slice
    row: int
    x: float
    width: float
    name: str

    @property
    def right(self) -> float:
        return self.x + self.width


class Wire(NamedTuple):
    """An arrow as it is drawn: from a bar to the place x of another one, straight if no bar lies in between, else by a
    track in the room below lane `gap`.
    """

    source: Bar
    target: Bar
    gap: int
    track: int | None
    x: float


def bar_name(work: Slice) -> str:
    """The name in a bar: of a sum without the slot if that is the first one."""
    name = work.name.removesuffix("[0]") if work.buffer else work.name
    return shortened(printable(name), LONGEST, NAME)


def placed(
    rows: Mapping[Lane, Sequence[Slice]], follows: Sequence[Follows], focus: Slice | None = None
) -> dict[int, Bar]:
    """The bars: each as far left as the work before it in its lane, and what it waits for, allow."""
    row = {lane: i for i, lane in enumerate(rows)}
    waits: dict[int, list[Slice]] = {}
    for f in follows:
        if f.is_wait:
            waits.setdefault(id(f.target), []).append(f.source)
    ends = dict.fromkeys(rows, FIRST - float(BETWEEN))
    bars: dict[int, Bar] = {}
    for work in sorted((bar for bars in rows.values() for bar in bars), key=lambda s: (s.start, s.end)):
        awaited = [bars[id(source)].right + ARROW for source in waits.get(id(work), []) if id(source) in bars]
        name = bar_name(work)
        x = max([ends[work.lane] + (WAITS if work is focus else BETWEEN), *awaited])
        bar = bars[id(work)] = Bar(work, row[work.lane], x, text_width(name, NAME) + 16, name)
        ends[work.lane] = bar.right
    return bars


class Sheet:
    """What is drawn, with its places."""

    def __init__(self, picture: Picture, names: Names) -> None:
        names = picture.called(names)
        follows = follows_of(picture)

        def has_room(rows: Mapping[Lane, Sequence[Slice]]) -> bool:
            return all(bar.right <= LAST for bar in placed(rows, follows, meeting).values())

        self.picture = picture
        meeting = None
        chooser = Chooser(picture, names, has_room)
        if chooser.meeting is not None:
            meeting = chooser.meeting.work
        self.part: Part = chooser.choose()
        self.lanes = list(self.part.rows)
        self.called = lane_names(self.part.rows, names)
        self.bars = placed(self.part.rows, follows, self.part.focus)
        self.focus = self.bars[id(self.part.focus)] if self.part.focus else None
        self.wires = self.make_wires([f for f in follows if id(f.source) in self.bars and id(f.target) in self.bars])
        self.top: list[float] = []  # of each lane

    def make_wires(self, follows: Sequence[Follows]) -> list[Wire]:
        """Each arrow has a track of its own, and a place of its own at the work that it leads to."""
        tracks = [0 for _ in self.lanes]
        ends: dict[int, int] = {}
        made = []
        for f in sorted(follows, key=lambda f: (self.bars[id(f.target)].x, self.bars[id(f.source)].row)):
            source, target = self.bars[id(f.source)], self.bars[id(f.target)]
            gap = target.row - 1 if source.row < target.row else target.row
            count = ends[id(f.target)] = ends.get(id(f.target), 0) + 1
            x = min(target.x + 12 * count, target.right - 6)
            if self.is_clear(source, target, x):
                made.append(Wire(source, target, gap, None, x))
                continue
            made.append(Wire(source, target, gap, tracks[gap], x))
            tracks[gap] += 1
        self.tracks = tracks
        return made

    def is_clear(self, source: Bar, target: Bar, x: float) -> bool:
        """Whether a line from the end of a bar to x, and then across the lanes, meets no bar."""
        low, high = sorted((source.row, target.row))
        for bar in self.bars.values():
            beside = bar.row == source.row and source.x < bar.x < x + BETWEEN
            between = low < bar.row < high and bar.x - BETWEEN < x < bar.right + BETWEEN
            if beside or between:
                return False
        return x > source.right

    def place_lanes(self, y: float) -> float:
        """Place the lanes below each other, further apart where arrows need it; returns the y below them."""
        for tracks in self.tracks:
            self.top.append(y)
            y += LABEL + BAR + UNDER + max(0, tracks - 1) * TRACK + 4
        return y

    def bar_top(self, row: int) -> float:
        return self.top[row] + LABEL


def lane_names(rows: Mapping[Lane, Sequence[Slice]], names: Names) -> list[str]:
    """What each lane is called: by its name; a stream without one by its first sum or work."""
    devices = {lane.device for lane in rows}
    plain = [of_lane(lane, bars, names) for lane, bars in rows.items()]
    made = []
    for lane, text in zip(rows, plain, strict=True):
        if lane.device == HOST:
            made.append(text)
            continue
        whole = f"device {lane.device}, {text}" if len(devices) > 1 else text
        made.append(f"{whole} ({lane.stream})" if plain.count(text) > 1 and lane[:2] not in names else whole)
    return made


def of_lane(lane: Lane, bars: Sequence[Slice], names: Names) -> str:
    if lane[:2] in names:
        name = names[lane[:2]]
        return name if "stream" in name or lane.device == HOST else f"{name} stream"
    if lane.device == HOST:
        return lane.name
    if lane.stream <= 1:
        return "default stream"
    sums = [bar.buffer for bar in bars if bar.buffer]
    return f"stream of {sums[0] if sums else bars[0].name}"


def draw(picture: Picture, *, title: str | None = None, names: Names | None = None, rest: str = REST) -> Svg:
    """Draw a picture. `names`: of streams; `rest`: where the reader finds what is left out."""
    sheet, canvas = Sheet(picture, names or {}), Canvas()
    y = float(MARGIN)
    if title:
        canvas.label(MARGIN, y + NAME, title, WIDTH - 2 * MARGIN, NAME)
        y += NAME + 15
    y = sheet.place_lanes(y)
    draw_lanes(canvas, sheet, y)
    draw_wires(canvas, sheet)
    draw_bars(canvas, sheet)
    draw_heads(canvas, sheet)
    said = message(sheet)
    y = draw_message(canvas, sheet, said, y + 6) if said else y
    y = draw_races(canvas, sheet, y)
    with canvas.group(kind="fanin-notes", font_size=NOTE, fill=FAINT):
        for line in wrapped(notes(sheet, rest), WIDTH - 2 * MARGIN, NOTE, 4) if sheet.bars else []:
            canvas.text(MARGIN, y + 16, line)
            y += 18
    return canvas.finish(WIDTH, y + MARGIN, said or f"A trace: {counted(len(sheet.lanes), 'lane')}")


def draw_lanes(canvas: Canvas, sheet: Sheet, bottom: float) -> None:
    """Draw the ground and the name of each lane, and an ellipsis for earlier work."""
    edges = [*sheet.top, bottom]
    for i in range(len(sheet.lanes)):
        height = edges[i + 1] - edges[i] - 4
        canvas.rect(MARGIN, edges[i], WIDTH - 2 * MARGIN, height, fill=GROUND, rx=4)
    with canvas.group(kind="fanin-lanes", font_size=NOTE + 1):
        for top, name in zip(sheet.top, sheet.called, strict=True):
            canvas.label(MARGIN + 8, top + 17, name, WIDTH - 2 * MARGIN - 16, NOTE + 1)
    for lane, row in zip(sheet.lanes, range(len(sheet.lanes)), strict=True):
        if lane in sheet.part.cut:
            canvas.text(MARGIN + 8, sheet.bar_top(row) + 19, "…", NAME, fill=FAINT)


def draw_bars(canvas: Canvas, sheet: Sheet) -> None:
    """Draw the bars with their names, and the time that the sum for which streams meet waits."""
    focus = sheet.focus
    if focus is not None:
        before = [bar.right for bar in sheet.bars.values() if bar.row == focus.row and bar.right < focus.x]
        left, y = max(before, default=float(FIRST)) + BETWEEN, sheet.bar_top(focus.row)
        width = focus.x - BETWEEN - left
        canvas.rect(left, y, width, BAR, fill="none", stroke=FAINT, stroke_dasharray="4 4", rx=4)
        canvas.text(left + width / 2, y + 20, "waits", NAME, fill=FAINT, text_anchor="middle")
    with canvas.group(kind="fanin-bars"):
        for bar in sheet.bars.values():
            work = bar.slice
            tip = work.name
            if not sheet.picture.clock.startswith("logical"):
                tip = f"{tip}: {amount(work.end - work.start)}"
            fill = MEETING if bar is focus else colour(work)
            canvas.rect(bar.x, sheet.bar_top(bar.row), bar.width, BAR, tip, fill=fill, rx=4)
    with canvas.group(kind="fanin-words", font_size=NAME, text_anchor="middle"):
        for bar in sheet.bars.values():
            y = sheet.bar_top(bar.row) + 20
            canvas.text(bar.x + bar.width / 2, y, bar.name, fill=WHITE if bar is focus else INK)


def colour(work: Slice) -> str:
    if work.buffer:
        return SUM
    return BUCKET if work.bucket else GREY


def wire_ends(sheet: Sheet, wire: Wire) -> tuple[float, float]:
    """Where an arrow begins and ends: at the rims of bars."""
    begin = sheet.bar_top(wire.source.row) + (BAR if wire.source.row <= wire.gap else 0)
    end = sheet.bar_top(wire.target.row) + (0 if wire.target.row > wire.gap else BAR)
    return begin, end


def wire_colour(sheet: Sheet, wire: Wire) -> str:
    return MEETING if wire.target is sheet.focus else FAINT


def draw_wires(canvas: Canvas, sheet: Sheet) -> None:
    """Draw the arrows: from the rim of a bar to the room between two lanes, along it, and to the rim of the other."""
    with canvas.group(kind="fanin-wires", fill="none", stroke_linejoin="round", stroke_width=2):
        for wire in sheet.wires:
            begin, end = wire_ends(sheet, wire)
            if wire.track is None:
                middle = sheet.bar_top(wire.source.row) + BAR / 2
                points = [(wire.source.right, middle), (wire.x, middle), (wire.x, end)]
            else:
                track = sheet.bar_top(wire.gap) + BAR + 6 + wire.track * TRACK
                x = max(wire.source.right - (wire.x - wire.target.x), wire.source.x + 4)  # apart, as at the other end
                points = [(x, begin), (x, track), (wire.x, track), (wire.x, end)]
            canvas.line(*points, stroke=wire_colour(sheet, wire))


def draw_heads(canvas: Canvas, sheet: Sheet) -> None:
    """Draw the heads of arrows, above the bars."""
    with canvas.group(kind="fanin-heads"):
        for wire in sheet.wires:
            down = wire.target.row > wire.gap
            canvas.head(wire.x, wire_ends(sheet, wire)[1], down, fill=wire_colour(sheet, wire))


def message(sheet: Sheet) -> str:
    """The one thing that the picture says: where streams meet, else what a pass took as long as."""
    count = sheet.part.producers
    if sheet.focus is not None:
        many = NUMBERS[count] if count < len(NUMBERS) else str(count)
        return f"{many.capitalize()} streams meet here: the sum waits for {'both' if count == 2 else 'all of them'}."
    if not sheet.bars:
        return "No work was recorded."
    paths = [] if sheet.picture.races else critical_paths(sheet.picture)
    return str(paths[0]) if paths else ""


def draw_message(canvas: Canvas, sheet: Sheet, text: str, y: float) -> float:
    """Draw the message, below the sum that it is about; returns the y below it."""
    if sheet.focus is None:
        for line in wrapped(text, WIDTH - 2 * MARGIN, NAME, 3):
            canvas.text(MARGIN, y + 16, line, NAME, kind="fanin-message")
            y += 20
        return y + 6
    middle, width = sheet.focus.x + sheet.focus.width / 2, text_width(text, MESSAGE)
    left = min(max(middle - width / 2, MARGIN), WIDTH - MARGIN - width)
    foot = sheet.bar_top(sheet.focus.row) + BAR
    with canvas.group(kind="fanin-message", fill=MEETING):
        canvas.line((middle, y + 4), (middle, foot + 4), stroke=MEETING, stroke_width=2)
        canvas.head(middle, foot, False)
        canvas.text(left, y + 22, text, MESSAGE, font_weight="bold")
    return y + 34


def notes(sheet: Sheet, rest: str) -> str:
    """How to read the picture, and where to find what it leaves out."""
    lanes, bars = sheet.part.left_out
    text = "Bars are in the order that must hold, and not to scale; an arrow leads to the work that waits."
    primes = [bar.name for bar in sheet.bars.values() if bar.name.endswith("'")]
    if primes:
        text += f" A prime, as in {primes[0]}, marks the backward step of an operation."
    if bars:
        missing = [counted(lanes, "lane")] * bool(lanes) + [counted(bars, "bar")]
        return f"{text} Left out: {' and '.join(missing)}. {rest} has all of it, for https://ui.perfetto.dev."
    return f"{text} {rest} has the times, for https://ui.perfetto.dev."


def draw_races(canvas: Canvas, sheet: Sheet, y: float) -> float:
    """Draw a red rim around the later work of each race, and the messages at the bottom; returns the y below them."""
    neighbours = Neighbours(sheet.picture)
    with canvas.group(kind="fanin-races"):
        for race in sheet.picture.races:
            work = neighbours.before(race.lane, race.time)
            bar = sheet.bars.get(id(work))
            if bar is not None:
                top = sheet.bar_top(bar.row)
                canvas.rect(bar.x, top, bar.width, BAR, race.text, fill="none", stroke=RED, stroke_width=3, rx=4)
            for line in wrapped(race.text, WIDTH - 2 * MARGIN, NOTE, 5):
                canvas.text(MARGIN, y + 18, line, NOTE, fill=RED)
                y += 17
        return y + 6 if sheet.picture.races else y
