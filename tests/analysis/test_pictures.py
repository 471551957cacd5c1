"""Pictures of components: graphs of arrays that overlap, and runs of their bytes."""

from __future__ import annotations

import io
import random
import re
from pathlib import Path

import numpy as np
import pytest

from fanin import analysis
from fanin.analysis import picture as picture_
from kit.pictures import Read, outside

W = np.zeros((4, 6))
ARRAYS = [W[:, 0], W[:2, :1], W[:, 3], np.zeros(0), np.zeros(())]


def test_the_graph_of_components_has_a_cluster_for_each_and_an_edge_for_each_overlap() -> None:
    text = analysis.alias_dot(ARRAYS, ["a", 'b"', "c", "d", "e"])
    assert re.findall(r"n\d -- n\d", text) == ["n0 -- n1"] and text.count("subgraph") == 4
    assert 'n1 [label="b\\""]' in text and '{ label="152 bytes"; n0' in text
    with pytest.raises(ValueError, match="a name for each of 5 arrays, got 1"):
        analysis.alias_dot(ARRAYS, ["a"])
    with pytest.raises(TypeError, match=r"args\[1\]: expected an ndarray, got an int"):
        analysis.alias_dot([W, 3])


def test_the_picture_of_components_has_a_bar_for_each_run_of_bytes(tmp_path: Path) -> None:
    many = np.zeros((99, 99))[::2, ::2]  # more runs than can be drawn: one pale bar
    names = ["a", "<b & 'c'>", "c" * 99, "é", "日本\n", "many"]
    made = analysis.alias_plot([*ARRAYS, many], tmp_path / "a.svg", names, title="six arrays")
    picture = Read(made)
    assert (
        (tmp_path / "a.svg").read_text(encoding="utf-8")
        == made
        == analysis.alias_plot([*ARRAYS, many], None, names, title="six arrays")
    )
    shown = [text for text in picture.texts() if text in ("a", "<b & 'c'>", "é", "日本\\n", "many", "six arrays")]
    assert len(shown) == 6 and sum("ccc…" in text for text in picture.texts()) == 1
    runs = [1 if found is None else len(found) for found in map(picture_.runs, [*ARRAYS, many])]
    assert len(picture.shapes("runs")) == sum(runs) == 4 + 2 + 4 + 0 + 1 + 1
    assert made.count('fill-opacity="0.35"') == 1
    assert outside(picture) == [] and outside(Read(analysis.alias_plot([]))) == []
    assert "max-width: 100%" in made._repr_svg_()
    out = io.BytesIO()
    analysis.alias_plot([W], out)
    assert Read(out.getvalue()).texts()[0] == "args[0]"


def test_a_picture_of_another_kind_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"alias_plot: format: expected 'svg', got 'png'.*rsvg-convert"):
        analysis.alias_plot(ARRAYS, io.BytesIO(), format="png")
    with pytest.raises(ValueError, match=r"alias_plot: expected a file name that ends in \.svg, got .*rsvg-convert"):
        analysis.alias_plot(ARRAYS, tmp_path / "a.pdf")
    assert list(tmp_path.iterdir()) == []


def test_runs_of_bytes_are_those_that_an_array_shows() -> None:
    memory = np.zeros(160, "u1")
    low = memory.ctypes.data
    draw = random.Random(20261121)
    several = 0
    for _ in range(300):
        shape = [draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 2, 3]))]
        strides = [draw.choice([-6, -2, -1, 0, 1, 2, 3, 5, 8]) for _ in shape]
        x = np.ndarray(shape, draw.choice(["u1", "u2", "u4"]), buffer=memory, offset=80, strides=strides)
        memory[:] = 0
        x[...] = np.iinfo(x.dtype).max
        seen = {i for a, b in picture_.runs(x) or [] for i in range(a - low, b - low)}
        assert seen == set(np.flatnonzero(memory).tolist())
        several += len(picture_.runs(x) or []) > 1
    assert 50 < several < 250
