"""Pictures of components: graphs of arrays that overlap, and runs of their bytes."""

from __future__ import annotations

import io
import random
import re

import numpy as np
import pytest

from fanin import analysis
from fanin.analysis import picture


def test_pictures_of_components() -> None:
    pytest.importorskip("matplotlib")
    w = np.zeros((4, 6))
    arrays = [w[:, 0], w[:2, :1], w[:, 3], np.zeros(0), np.zeros(())]
    text = analysis.alias_dot(arrays, ["a", 'b"', "c", "d", "e"])
    assert re.findall(r"n\d -- n\d", text) == ["n0 -- n1"] and text.count("subgraph") == 4
    assert 'n1 [label="b\\""]' in text and '{ label="152 bytes"; n0' in text
    for format, magic in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        out = io.BytesIO()
        analysis.alias_plot([*arrays, np.zeros((99, 99))[::2, ::2]], out, format=format)
        assert out.getvalue().startswith(magic)
    with pytest.raises(ValueError, match="no picture of the kind 'doc'"):
        analysis.alias_plot(arrays, io.BytesIO(), format="doc")
    with pytest.raises(ValueError, match="a name for each of 5 arrays, got 1"):
        analysis.alias_dot(arrays, ["a"])
    with pytest.raises(TypeError, match=r"args\[1\]: expected an ndarray, got an int"):
        analysis.alias_dot([w, 3])


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
        seen = {i for a, b in picture.runs(x) or [] for i in range(a - low, b - low)}
        assert seen == set(np.flatnonzero(memory).tolist())
        several += len(picture.runs(x) or []) > 1
    assert 50 < several < 250
