"""The picture of a graph without cycles: boxes in layers, arrows downwards.

1. The layers: a box is below all boxes that lead to it.
2. The order in a layer, and the places across: near the neighbours above and below.
3. The drawing. An arrow over several layers passes each of them at a place of its own, between boxes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ._svg import (
    INK,
    MARGIN,
    PALE,
    SMALL,
    TEXT,
    WHITE,
    Canvas,
    Point,
    Svg,
    apart,
    number,
    shortened,
    text_width,
)

__tracebackhide__ = True  # no frames of ours in reports of pytest

# In pixels
LABEL, HEIGHT, LAYER, GAP = 240, 28, 76, 22  # a label at most; of a box; from layer to layer; between boxes
PASSING = 14  # the room of an arrow that passes a layer
MOST_PASSING = 20_000  # beyond, arrows over several layers are drawn across boxes
SWEEPS = 4  # down and up, of the order and of the places


class Box(NamedTuple):
    label: str
    is_leaf: bool = False
    is_grey: bool = False


class Arrow(NamedTuple):
    source: int
    target: int
    label: str = ""


@dataclass
class Place:
    """A box, or the place at which an arrow passes a layer."""

    layer: int
    width: float
    x: float = 0.0
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)


def draw(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> Svg:
    """Draw a graph; arrows name boxes by their indices."""
    words = [shortened(box.label, LABEL, TEXT) for box in boxes]
    layers = layers_of(len(boxes), arrows)
    places = [Place(layer, text_width(text, TEXT) + 24) for layer, text in zip(layers, words, strict=True)]
    roads = [through_layers(places, arrow) for arrow in arrows] if few(layers, arrows) else [[] for _ in arrows]
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for i, place in enumerate(places):
        rows[place.layer].append(i)
    put_in_order(places, rows)
    put_across(places, rows)
    left = min([place.x - place.width / 2 for place in places], default=0.0)
    for place in places:
        place.x += MARGIN - left
    canvas = Canvas()
    draw_arrows(canvas, places, arrows, roads)
    for box, place in zip(boxes, places, strict=False):
        draw_box(canvas, box, place)
    width = max([place.x + place.width / 2 for place in places], default=0.0)
    bottom = LAYER * max(len(rows) - 1, 0) + HEIGHT
    return canvas.finish(width + MARGIN, bottom + 2 * MARGIN, f"A graph of {len(boxes)} nodes and leaves")


# The layers


def layers_of(count: int, arrows: Sequence[Arrow]) -> list[int]:
    """The layer of each box: the next one below all that lead to it; of one to which none leads, the last one above
    all that it leads to.
    """
    out: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target, _ in arrows:
        out[source].append(target)
        missing[target] += 1
    layers = [0] * count
    first = [i for i in range(count) if not missing[i]]
    ready = list(first)
    for i in ready:  # it grows
        for target in out[i]:
            layers[target] = max(layers[target], layers[i] + 1)
            missing[target] -= 1
            if not missing[target]:
                ready.append(target)
    for i in first:
        layers[i] = min([layers[target] for target in out[i]], default=1) - 1
    return layers


def few(layers: Sequence[int], arrows: Sequence[Arrow]) -> bool:
    """Whether arrows pass few enough layers to be led around boxes."""
    return sum(layers[target] - layers[source] - 1 for source, target, _ in arrows) <= MOST_PASSING


def through_layers(places: list[Place], arrow: Arrow) -> list[int]:
    """Add the places at which an arrow passes layers; return their indices."""
    source, target, _ = arrow
    road = []
    last = source
    for layer in range(places[source].layer + 1, places[target].layer):
        places.append(Place(layer, PASSING, above=[last]))
        road.append(len(places) - 1)
        places[last].below.append(road[-1])
        last = road[-1]
    places[last].below.append(target)
    places[target].above.append(last)
    return road


# Order and places


def put_in_order(places: Sequence[Place], rows: Sequence[list[int]]) -> None:
    """Sort each layer by the mean place of its neighbours above, then below, a few times."""
    at = {i: float(k) for row in rows for k, i in enumerate(row)}
    for sweep in range(2 * SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            wanted = {i: mean(at, neighbours(places[i], downwards), at[i]) for i in row}
            row.sort(key=lambda i: wanted[i])
            at.update({i: float(k) for k, i in enumerate(row)})


def put_across(places: Sequence[Place], rows: Sequence[Sequence[int]]) -> None:
    """Move each box to the mean of its neighbours above, then below, as far as its layer has room."""
    gaps = []
    for row in rows:
        widths = [places[i].width for i in row]
        gaps.append([(a + b) / 2 + GAP for a, b in itertools.pairwise(widths)])
    at = dict.fromkeys(range(len(places)), 0.0)
    for sweep in range(2 * SWEEPS + 1):
        downwards = sweep % 2 == 0
        order = range(len(rows)) if downwards else reversed(range(len(rows)))
        for k in order:
            wanted = [mean(at, neighbours(places[i], downwards), at[i]) for i in rows[k]]
            at.update(zip(rows[k], apart(wanted, gaps[k]), strict=True))
    for i, x in at.items():
        places[i].x = x


def neighbours(place: Place, above: bool) -> list[int]:
    return place.above if above else place.below


def mean(at: dict[int, float], among: Sequence[int], otherwise: float) -> float:
    return sum(at[i] for i in among) / len(among) if among else otherwise


# The drawing


def draw_box(canvas: Canvas, box: Box, place: Place) -> None:
    """Draw a leaf as a box with corners, a node with round ends."""
    y = MARGIN + LAYER * place.layer
    round_ends = 3 if box.is_leaf else HEIGHT / 2
    fill = "#d3d3d3" if box.is_grey else WHITE
    kind = "fanin-leaf" if box.is_leaf else "fanin-node"
    left = place.x - place.width / 2
    canvas.rect(left, y, place.width, HEIGHT, kind=kind, rx=round_ends, fill=fill, stroke=INK)
    canvas.label(place.x, y + HEIGHT / 2 + 4.5, box.label, LABEL, text_anchor="middle")


def draw_arrows(canvas: Canvas, places: Sequence[Place], arrows: Sequence[Arrow], roads: Sequence[list[int]]) -> None:
    """Draw each arrow from the lower rim of a box to the upper rim of another; several leave and reach a box side by
    side.
    """
    leaving, reaching = [], []
    for arrow, road in zip(arrows, roads, strict=True):
        stops = [arrow.source, *road, arrow.target]
        leaving.append((arrow.source, places[stops[1]].x))
        reaching.append((arrow.target, places[stops[-2]].x))
    begins, ends = side_by_side(places, leaving), side_by_side(places, reaching)
    with canvas.group(kind="fanin-arrows", fill="none", stroke=PALE):
        for arrow, road, begin, end in zip(arrows, roads, begins, ends, strict=True):
            points = [(begin, MARGIN + LAYER * places[arrow.source].layer + HEIGHT)]
            for i in road:
                y = MARGIN + LAYER * places[i].layer
                points += [(places[i].x, y), (places[i].x, y + HEIGHT)]
            points.append((end, MARGIN + LAYER * places[arrow.target].layer))
            canvas.shape("path", "", d=curve(points))
    with canvas.group(kind="fanin-heads", fill=INK):
        for arrow, end in zip(arrows, ends, strict=True):
            y = MARGIN + LAYER * places[arrow.target].layer
            canvas.head(end, y, down=True)
            if arrow.label:
                canvas.text(end + 5, y - 5, arrow.label, SMALL)


def side_by_side(places: Sequence[Place], joints: Sequence[tuple[int, float]]) -> list[float]:
    """Where arrows meet boxes: `joints` has the box of each, and the x from which it comes or to which it goes."""
    of_box: dict[int, list[int]] = {}
    for k, (box, _) in enumerate(joints):
        of_box.setdefault(box, []).append(k)
    made = [0.0] * len(joints)
    for box, mine in of_box.items():
        room = max(places[box].width - HEIGHT, 0)
        step = min(20.0, room / max(len(mine) - 1, 1))
        for i, k in enumerate(sorted(mine, key=lambda k: joints[k][1])):
            made[k] = places[box].x + (i - (len(mine) - 1) / 2) * step
    return made


def curve(points: Sequence[Point]) -> str:
    """The data of a path that leaves and reaches each point from above to below."""
    (x, y), *rest = points
    made = [f"M{number(x)} {number(y)}"]
    for to_x, to_y in rest:
        middle = number((y + to_y) / 2)
        if number(x) == number(to_x):
            made.append(f"V{number(to_y)}")
        else:
            made.append(f"C{number(x)} {middle} {number(to_x)} {middle} {number(to_x)} {number(to_y)}")
        x, y = to_x, to_y
    return "".join(made)
