"""The SVG writer of every picture: shapes, text as text, the width of a text, colours, an axis.

It needs no library. A picture of the same data has the same bytes, lies on a ground of its own, and opens in any
browser: white with dark letters, dark with light ones where the reader prefers that, and never wider than its page.
"""

from __future__ import annotations

import colorsys
import functools
import itertools
import math
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ._files import path_text, write_whole
from ._words import printable

__tracebackhide__ = True  # no frames of ours in reports of pytest

INK = "#333333"
PALE = "#888888"
GREY = "#c9c9c9"
RED = "#d00000"
WHITE = "#ffffff"
COLOURS = (
    "#3b76af", "#ef8636", "#519e3e", "#8d69b8", "#85584e", "#d57dbe", "#2aa5b8", "#9a9b1d", "#1b4f72", "#a04000",
    "#7d3c98", "#117864",
)  # fmt: skip

TITLE, TEXT, SMALL = 15, 12, 10  #: Sizes of letters, in pixels
MARGIN = 14  #: Around a picture

Point = tuple[float, float]


class Svg(str):
    """A picture as SVG text, which a notebook shows."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


# Files


class Writable(Protocol):
    """A binary file that is open."""

    def write(self, data: bytes, /) -> object: ...


def svg_path(path: object, call: str) -> str:
    """The path as text. ValueError if it has the ending of another kind of picture."""
    text = path_text(path, call)  # type: ignore[arg-type]
    ending = os.path.splitext(text)[1]
    if ending.lower() not in ("", ".svg"):
        raise ValueError(
            f"{call}: expected a file name that ends in .svg, got {text!r}: pictures are SVG; convert one by"
            f" `rsvg-convert picture.svg -o picture{ending}`"
        )
    return text


def save(picture: Svg, path: str) -> None:
    """Write a picture whole or not at all."""
    write_whole(path, lambda out: out.write(picture.encode()))


# Text


@functools.cache
def letter_width(letter: str) -> float:
    """In parts of the font's size: at least that of common sans-serif fonts."""
    if letter in " .,:;'`|!()[]{}/\\\"-ijltfrI":
        return 0.4
    if letter in "mwMW@%":
        return 1.0
    if letter in "&+<=>~OQ":
        return 0.84
    if unicodedata.combining(letter):
        return 0.0
    if unicodedata.east_asian_width(letter) in ("W", "F"):
        return 1.05
    return 0.62 if letter.islower() else 0.68


def text_width(text: str, size: float) -> float:
    """How many pixels a line of text needs."""
    return size * sum(map(letter_width, text))


def shortened(text: str, width: float, size: float) -> str:
    """The text, or its beginning and end around an ellipsis, in at most `width` pixels."""
    text = printable(text)
    if text_width(text, size) <= width:
        return text
    room = (width - text_width("…", size)) / 2
    head = fitting(text, room, size)
    tail = fitting(text[::-1], room, size)
    return text[:head] + "…" + text[len(text) - tail :]


def fitting(text: str, width: float, size: float) -> int:
    """How many of the first letters have room."""
    ends = itertools.accumulate(size * letter_width(letter) for letter in text)
    return sum(1 for _ in itertools.takewhile(lambda end: end <= width, ends))


def wrapped(text: str, width: float, size: float, most: int) -> list[str]:
    """The text in lines of at most `width` pixels, broken at spaces, and within a word that has no room; at most `most`
    lines, with an ellipsis where the rest is missing.
    """
    lines = [""]
    for word in printable(text).split():
        joined = f"{lines[-1]} {word}".strip()
        if text_width(joined, size) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while text_width(word, size) > width and len(lines) <= most:
            letters = max(1, fitting(word, width, size))
            lines[-1], word = word[:letters], word[letters:]
            lines.append("")
        lines[-1] = word
        if len(lines) > most:
            break
    if len(lines) > most:
        last = lines[most - 1]
        room = fitting(last, width - text_width(" …", size), size)
        lines[most - 1 :] = [last[:room].rstrip() + " …"]
    return lines


def escaped(text: str) -> str:
    """The text as XML has it, in an element or an attribute."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace(">", "&gt;").replace('"', "&quot;")


# Shapes


def number(x: float) -> str:
    """At most two decimals: less than an eye finds."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def written(attributes: dict[str, float | str]) -> str:
    """Attributes as XML: `stroke_width` is stroke-width, `kind` is class."""
    made = []
    for name, value in attributes.items():
        key = "class" if name == "kind" else name.replace("_", "-")
        text = escaped(value) if isinstance(value, str) else number(value)
        made.append(f' {key}="{text}"')
    return "".join(made)


def through(points: Sequence[Point]) -> str:
    """The data of a path from point to point."""
    (x, y), *rest = points
    made = [f"M{number(x)} {number(y)}"]
    for to_x, to_y in rest:
        if number(to_x) == number(x):
            made.append(f"V{number(to_y)}")
        elif number(to_y) == number(y):
            made.append(f"H{number(to_x)}")
        else:
            made.append(f"L{number(to_x)} {number(to_y)}")
        x, y = to_x, to_y
    return "".join(made)


class Canvas:
    """A picture while it is drawn: what is drawn later lies above.

    Attributes are SVG's, with underscores; a group passes its own on to what is in it. `tip` is the text that a browser
    shows under the pointer.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []

    def shape(self, tag: str, tip: str = "", /, **attributes: float | str) -> None:
        inside = f"<title>{escaped(tip)}</title>" if tip else ""
        end = f">{inside}</{tag}>" if inside else "/>"
        self.parts.append(f"<{tag}{written(attributes)}{end}")

    def rect(
        self, x: float, y: float, width: float, height: float, tip: str = "", /, **attributes: float | str
    ) -> None:
        self.shape("rect", tip, x=x, y=y, width=width, height=height, **attributes)

    def circle(self, x: float, y: float, radius: float, **attributes: float | str) -> None:
        self.shape("circle", "", cx=x, cy=y, r=radius, **attributes)

    def line(self, *points: Point, **attributes: float | str) -> None:
        """A line from point to point; its group says `fill="none"` where there are more than two."""
        self.shape("path", "", d=through(points), **attributes)

    def head(self, x: float, y: float, down: bool, **attributes: float | str) -> None:
        """The head of an arrow, whose point is at (x, y)."""
        back = -6 if down else 6
        self.shape("path", "", d=through([(x, y), (x - 3, y + back), (x + 3, y + back)]) + "z", **attributes)

    def text(
        self, x: float, y: float, text: str, size: float = TEXT, tip: str = "", /, **attributes: float | str
    ) -> None:
        """A line of text; y is its base line, x its beginning unless `text_anchor` says otherwise."""
        own: dict[str, float | str] = {"x": x, "y": y}
        if size != TEXT:
            own["font_size"] = size
        inside = f"<title>{escaped(tip)}</title>" if tip else ""
        self.parts.append(f"<text{written(own | attributes)}>{escaped(text)}{inside}</text>")

    def label(
        self, x: float, y: float, text: str, width: float, size: float = TEXT, /, **attributes: float | str
    ) -> None:
        """A line of text in at most `width` pixels: if it is shortened, its tip is all of it."""
        shown = shortened(text, width, size)
        tip = "" if shown == printable(text) else text
        self.text(x, y, shown, size, tip, **attributes)

    @contextmanager
    def group(self, **attributes: float | str) -> Iterator[None]:
        """What is drawn inside has these attributes; a group of nothing is left out."""
        at = len(self.parts)
        yield
        if len(self.parts) > at:
            self.parts.insert(at, f"<g{written(attributes)}>")
            self.parts.append("</g>")

    def finish(self, width: float, height: float, title: str) -> Svg:
        """The whole picture. `title` is for readers that show no picture."""
        width, height = math.ceil(width), math.ceil(height)
        head: dict[str, float | str] = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
        head |= {"style": "max-width: 100%; height: auto", "kind": "fanin"}
        font: dict[str, float | str] = {"font-family": "sans-serif", "font-size": TEXT, "fill": INK, "role": "img"}
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg"{written(head | font)}>',
            f"<title>{escaped(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
            *self.parts,
            dark_style(self.parts),
            "</svg>\n",
        ]
        return Svg("\n".join(lines))


def dark_style(parts: Sequence[str]) -> str:
    """The style of a picture where the reader prefers dark pages: each of its colours is replaced."""
    used = re.findall(r' (fill|stroke)="(#[0-9a-f]{6})"', "".join([*parts, f' fill="{WHITE}"']))
    rules = [f'.fanin [{how}="{colour}"]{{{how}:{in_the_dark(colour)}}}' for how, colour in dict.fromkeys(used)]
    return f"<style>@media (prefers-color-scheme:dark){{.fanin{{fill:{in_the_dark(INK)}}}{''.join(rules)}}}</style>"


def in_the_dark(colour: str) -> str:
    """The colour of the same hue on a dark page: what is light becomes dark, and the reverse."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    made = colorsys.hls_to_rgb(hue, 0.09 + 0.82 * (1 - light), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in made)


# Parts of pictures


def legend(canvas: Canvas, entries: Sequence[tuple[str, str]], left: float, right: float, y: float) -> float:
    """Swatches of colours with what they mean, in rows; returns the y below them. An empty colour has no swatch."""
    x = left
    with canvas.group(kind="fanin-legend"):
        for colour, words in entries:
            width = 18 + text_width(shortened(words, 300, TEXT), TEXT)
            if x > left and x + width > right:
                x, y = left, y + 18
            if colour:
                canvas.rect(x, y, 12, 12, fill=colour)
            canvas.label(x + 18, y + 10.5, words, 300)
            x += width + 16
    return y + 18 if entries else y


def paragraph(canvas: Canvas, text: str, x: float, y: float, width: float, most: int) -> float:
    """Text in lines; returns the y below them."""
    for line in wrapped(text, width, TEXT, most):
        canvas.text(x, y + 12, line)
        y += 17
    return y


def axis(canvas: Canvas, left: float, right: float, y: float, most: float, whole: bool = False) -> None:
    """A scale from 0 to `most`; `whole`: in whole numbers."""
    step = 10.0 ** math.floor(math.log10(most / 8))
    step *= next((k for k in (1, 2, 5) if most / (step * k) <= 10), 10)
    step = max(step, 1) if whole else step
    with canvas.group(stroke=PALE, kind="fanin-axis"):
        canvas.line((left, y), (right, y))
        with canvas.group(stroke="none", text_anchor="middle"):
            for i in range(math.floor(most / step * (1 + 1e-9)) + 1):
                x = left + (right - left) * i * step / most
                canvas.line((x, y), (x, y + 4), stroke=PALE)
                canvas.text(x, y + 16, f"{i * step:.15g}", SMALL)


def apart(
    places: Sequence[float], gaps: Sequence[float], least: float = -math.inf, most: float = math.inf
) -> list[float]:
    """The places, in their order, moved as little as can be so that each is its gap or more from the one before, and
    all lie between least and most.

    `gaps` has one entry less than `places`.
    """
    reach = [0.0, *itertools.accumulate(gaps)]
    groups: list[tuple[float, int]] = []  # neighbours that move as one: (their mean without gaps, how many)
    for place, offset in zip(places, reach, strict=False):
        mean, count = place - offset, 1
        while groups and groups[-1][0] > mean:
            other, more = groups.pop()
            mean = (mean * count + other * more) / (count + more)
            count += more
        groups.append((mean, count))
    means = [max(least, min(mean, most - reach[-1])) for mean, count in groups for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, reach, strict=False)]
