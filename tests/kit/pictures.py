"""SVG as tests read it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG = "{http://www.w3.org/2000/svg}"


class Read:
    """A picture, parsed. Groups and shapes are found by their class, without its "fanin-"."""

    def __init__(self, text: str | bytes) -> None:
        self.root = ElementTree.fromstring(text)
        assert self.root.tag == f"{SVG}svg"
        self.width, self.height = (float(self.root.attrib[name]) for name in ("width", "height"))

    def of(self, kind: str) -> Iterator[Element]:
        """The shapes and texts of a class, or inside of groups of that class."""
        for found in self.root.iter():
            if found.attrib.get("class") == f"fanin-{kind}":
                yield from (e for e in found.iter() if e.tag not in (f"{SVG}g", f"{SVG}title"))

    def shapes(self, kind: str, tag: str = "rect") -> list[Element]:
        return [e for e in self.of(kind) if e.tag == SVG + tag]

    def texts(self, kind: str = "") -> list[str]:
        found = self.of(kind) if kind else self.root.iter()
        return [e.text or "" for e in found if e.tag == f"{SVG}text"]

    def tips(self, kind: str) -> list[str]:
        """What a browser shows under the pointer."""
        return [e.findtext(f"{SVG}title") or "" for e in self.of(kind)]

    def notes(self) -> str:
        """The text below a trace."""
        return " ".join(self.texts("notes"))

    def at(self, kind: str) -> int:
        """How far down in the file the first group of a class is: what comes later lies above."""
        kinds = [e.attrib.get("class") for e in self.root.iter()]
        return kinds.index(f"fanin-{kind}")


def left_and_right(rect: Element) -> tuple[float, float]:
    x = float(rect.attrib["x"])
    return x, x + float(rect.attrib["width"])


def outside(picture: Read) -> list[str]:
    """The shapes and texts that do not lie within their picture, as sentences."""
    wrong = []
    for e in picture.root.iter():
        xs, ys = [], []
        if e.tag == f"{SVG}rect" and "x" in e.attrib:
            xs, ys = [*left_and_right(e)], [float(e.attrib["y"]), float(e.attrib["y"]) + float(e.attrib["height"])]
        elif e.tag in (f"{SVG}text", f"{SVG}circle"):
            keys = ("x", "y") if e.tag == f"{SVG}text" else ("cx", "cy")
            xs, ys = [float(e.attrib[keys[0]])], [float(e.attrib[keys[1]])]
        elif e.tag == f"{SVG}path":
            numbers = [float(x) for x in re.findall(r"[ML](-?[\d.]+)", e.attrib["d"])]
            xs = [*numbers, *(float(x) for x in re.findall(r"H(-?[\d.]+)", e.attrib["d"]))]
            ys = [float(y) for y in re.findall(r"(?:V|[ML]-?[\d.]+ )(-?[\d.]+)", e.attrib["d"])]
        if any(not -1 <= x <= picture.width + 1 for x in xs) or any(not -1 <= y <= picture.height + 1 for y in ys):
            wrong.append(f"{e.tag.removeprefix(SVG)} at {xs} {ys} is outside of {picture.width} x {picture.height}")
    return wrong
