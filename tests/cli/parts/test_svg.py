"""The SVG writer: valid XML of any text, texts with room, places that keep their order; and graphs in layers."""

from __future__ import annotations

import itertools
import random
import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from fanin import _layers, _svg
from fanin._layers import Arrow, Box
from fanin._svg import Canvas, Svg, number, shortened, svg_path, text_width, wrapped
from fanin._trace import plot
from fanin._words import printable
from kit.pictures import Read, left_and_right, outside
from kit.prepared import NUMPY, run_prepared
from kit.sample import sizes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b & c > \"d\" 'e'", "a < b & c > \"d\" 'e'"),
        ("]]> <!-- </text>", "]]> <!-- </text>"),
        ("\x00\x07\t\n\x7f\x85", "\\x00\\x07\\t\\n\\x7f\\x85"),
        ("\ud800 \ufffe \u2028 \u202e", "\\ud800 \\ufffe \\u2028 \\u202e"),
        ("größe 重み 👩\u200d🔬 e\u0301", "größe 重み 👩\u200d🔬 e\u0301"),
    ],
)
def test_any_text_is_valid_xml(text: str, shown: str) -> None:
    canvas = Canvas()
    canvas.text(5, 20, text, 12, text, kind=text)
    canvas.rect(0, 0, 5, 5, text, fill=text)
    made = canvas.finish(99, 30, text)
    assert made.encode("utf-8")
    root = ElementTree.fromstring(made)
    (words,) = root.iter("{http://www.w3.org/2000/svg}text")
    assert words.text == words[0].text == words.attrib["class"] == shown
    assert root[0].text == shown and root[3].attrib["fill"] == shown


def test_each_character_is_written_so_that_xml_can_hold_it() -> None:
    kept = 0
    for code in [*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFDC0, 0x10010), *range(0x1F600, 0x1F650)]:
        text = ElementTree.fromstring(f'<a b="{_svg.escaped(chr(code))}">{_svg.escaped(chr(code))}</a>')
        assert text.text == text.attrib["b"] == printable(chr(code))
        kept += printable(chr(code)) == chr(code)
    assert 10_000 < kept < 0x3000 + 0x820 + 0x250


def test_numbers_are_short_and_equal_ones_are_written_alike() -> None:
    assert [number(x) for x in (1, 1.0, 0.5, 1 / 3, -0.001, 1e6, 100)] == [
        "1",
        "1",
        "0.5",
        "0.33",
        "0",
        "1000000",
        "100",
    ]


def test_a_picture_has_a_ground_and_is_no_wider_than_its_page() -> None:
    made = Canvas().finish(10.2, 5, "nothing")
    picture = Read(made)
    assert (picture.width, picture.height) == (11, 5)
    assert picture.root[1].attrib == {"width": "11", "height": "5", "fill": "#ffffff"}
    assert picture.root.attrib["style"] == "max-width: 100%; height: auto"
    assert picture.root.attrib["viewBox"] == "0 0 11 5" and made._repr_svg_() == made
    assert isinstance(made, Svg) and str(made) == made


def brightness(colour: str) -> float:
    """The relative luminance of sRGB, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((brightness(one), brightness(other)))
    return (bright + 0.05) / (dark + 0.05)


def test_letters_are_legible_on_light_and_on_dark_pages() -> None:
    """WCAG 2 requires a contrast of 4.5."""
    pairs = [(_svg.INK, plot.GROUND), (_svg.INK, _svg.GREY), (_svg.INK, plot.SUM), (_svg.INK, plot.BUCKET)]
    pairs += [(plot.FAINT, plot.GROUND), (plot.FAINT, _svg.WHITE), (plot.MEETING, _svg.WHITE), (_svg.RED, _svg.WHITE)]
    for letters, ground in pairs:
        assert contrast(letters, ground) >= 4.5, (letters, ground)
        dark = contrast(_svg.in_the_dark(letters), _svg.in_the_dark(ground))
        assert dark >= 4.5, (letters, ground, dark)
    assert contrast("#777777", "#999999") < 4.5


def test_on_a_dark_page_each_colour_of_a_picture_is_replaced_and_of_no_other_picture() -> None:
    canvas = Canvas()
    canvas.rect(0, 0, 5, 5, fill="#0072b2", stroke="#ff0000")
    style = Read(canvas.finish(9, 9, "")).root.findtext("{http://www.w3.org/2000/svg}style") or ""
    assert style.startswith("@media (prefers-color-scheme:dark){.fanin{fill:")
    rules = re.findall(r"\.fanin \[(\w+)=\"(#\w+)\"\]\{\1:(#\w+)\}", style)
    assert [rule[:2] for rule in rules] == [("fill", "#0072b2"), ("stroke", "#ff0000"), ("fill", "#ffffff")]
    assert brightness(_svg.in_the_dark("#ffffff")) < 0.02 and brightness(_svg.in_the_dark("#000000")) > 0.7


def test_a_group_of_nothing_is_left_out() -> None:
    canvas = Canvas()
    with canvas.group(fill="red"):
        pass
    with canvas.group(stroke_width=2, kind="a"):
        canvas.circle(1, 1, 1)
    assert canvas.parts == ['<g stroke-width="2" class="a">', '<circle cx="1" cy="1" r="1"/>', "</g>"]


def test_a_text_that_has_no_room_keeps_its_beginning_and_its_end() -> None:
    draw = random.Random(8)
    cut = whole = 0
    for _ in range(500):
        text = "".join(draw.choice("abcilmW.[]09 \n日e\u0301") for _ in range(draw.randrange(40)))
        width = draw.uniform(10, 300)
        made = shortened(text, width, 12)
        assert text_width(made, 12) <= width
        if made == printable(text):
            whole += 1
            continue
        head, _, tail = made.partition("…")
        assert printable(text).startswith(head) and printable(text).endswith(tail)
        cut += 1
    assert cut > 100 and whole > 100, "seed 8"


def test_lines_fit_and_lose_words_only_after_an_ellipsis() -> None:
    draw = random.Random(9)
    cut = whole = 0
    for _ in range(500):
        words = ["x" * draw.choice([1, 3, 9, 60]) for _ in range(draw.randrange(20))]
        width, most = draw.uniform(30, 400), draw.randrange(1, 9)
        lines = wrapped(" ".join(words), width, 12, most)
        assert len(lines) <= most and all(text_width(line, 12) <= width for line in lines)
        if lines[-1].endswith("…"):
            assert "".join(words).startswith("".join(lines).replace(" ", "").removesuffix("…"))
            cut += 1
        else:
            assert "".join(lines).replace(" ", "") == "".join(words)
            whole += 1
    assert cut > 100 and whole > 100, "seed 9"


@pytest.mark.parametrize("most", [1e-9, 0.37, 1, 7.9, 8, 99, 123456.7, 3e12])
def test_an_axis_has_a_few_round_ticks_within_it(most: float) -> None:
    canvas = Canvas()
    _svg.axis(canvas, 100, 900, 10, most)
    picture = Read(canvas.finish(1000, 40, "an axis"))
    ticks = [float(text) for text in picture.texts("axis")]
    assert ticks[0] == 0 and 4 <= len(ticks) <= 12 and ticks[-1] <= most * (1 + 1e-9)
    assert outside(picture) == []


def test_an_axis_of_bytes_has_whole_numbers() -> None:
    canvas = Canvas()
    _svg.axis(canvas, 100, 900, 10, 3, whole=True)
    assert Read(canvas.finish(1000, 40, "an axis")).texts("axis") == ["0", "1", "2", "3"]


@pytest.mark.parametrize("path", ["a.png", "a.b.pdf", ".svg.x"])
def test_another_ending_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"^f: expected a file name that ends in \.svg, got '.*' -o picture\.|^f: .*"):
        svg_path(path, "f")
    assert [svg_path(good, "f") for good in ("a.svg", "a.SVG", "a", ".svg")] == ["a.svg", "a.SVG", "a", ".svg"]


def test_pictures_import_nothing_but_the_standard_library() -> None:
    code = "import sys, numpy; before = set(sys.modules); import fanin._layers, fanin._trace.plot, fanin.graph.picture"
    new = run_prepared(f"{code}; print(*(set(sys.modules) - before))", imports=NUMPY).stdout.split()
    assert "fanin._svg" in new
    assert {name.partition(".")[0] for name in new} <= sys.stdlib_module_names | {"fanin", "numpy"}


# Graphs


def layered(boxes: int, arrows: list[Arrow]) -> Read:
    made = _layers.draw([Box(f"box {i}", is_leaf=i % 2 == 0) for i in range(boxes)], arrows)
    assert made == _layers.draw([Box(f"box {i}", is_leaf=i % 2 == 0) for i in range(boxes)], arrows)
    return Read(made)


@pytest.mark.parametrize("graphs", sizes(30, 60))
def test_in_any_graph_arrows_lead_down_and_boxes_do_not_meet(graphs: int) -> None:
    draw = random.Random(10)
    passed = 0
    for _ in range(graphs):
        count = draw.randrange(1, 30)
        pairs = [tuple(sorted(draw.sample(range(count), 2))) for _ in range(draw.randrange(40) if count > 1 else 0)]
        arrows = [Arrow(a, b, str(k) if k % 3 == 0 else "") for k, (a, b) in enumerate(pairs)]
        layers = _layers.layers_of(count, arrows)
        assert all(layers[a.source] < layers[a.target] for a in arrows) and min(layers) >= 0
        passed += sum(layers[a.target] - layers[a.source] - 1 for a in arrows)
        picture = layered(count, arrows)
        assert outside(picture) == []
        boxes = picture.shapes("node") + picture.shapes("leaf")
        assert len(boxes) == count and len(picture.shapes("arrows", "path")) == len(arrows)
        rows: dict[str, list[Any]] = {}
        for box in boxes:
            rows.setdefault(box.attrib["y"], []).append(left_and_right(box))
        for row in rows.values():
            row.sort()
            assert all(a[1] < b[0] for a, b in itertools.pairwise(row))
    assert passed > 100, "seed 10"


@pytest.mark.parametrize("n", sizes(600, 3000))
def test_a_graph_of_thousands_of_nodes_is_drawn(n: int) -> None:
    """A chain to each of whose nodes a leaf leads: with as many arrows over all layers, these are drawn straight."""
    arrows = [Arrow(i, i + 1) for i in range(n - 1)] + [Arrow(i, n) for i in range(n)]
    picture = layered(n + 1, arrows)
    assert len(picture.shapes("arrows", "path")) == len(arrows)
    assert not _layers.few(_layers.layers_of(n + 1, arrows), arrows)
