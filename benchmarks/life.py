"""A buffer's whole life: made, two adds of 16 floats, taken from, dropped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import fanin

from .timing import Result, at_most, measure, peer, pinned

LIFE = """\
buf = InputBuffer(1)
buf.add(0, a)
buf.add(0, b)
buf.take()
del buf"""


def results(quick: bool) -> Iterator[Result]:
    """ns for each life."""
    torch = peer("torch")
    names = {"InputBuffer": fanin.InputBuffer, "a": np.ones(16, "f4"), "b": np.ones(16, "f4")}
    work = {
        "a + b": "a + b",
        "make, add, add, take, drop": LIFE,
        "make, drop": "InputBuffer(1)",
        "torch x + y": None,
        "the loop alone": "pass",
    }
    if torch is not None:
        names |= {"x": torch.ones(16), "y": torch.ones(16)}
        work["torch x + y"] = "x + y"
    with pinned() as where:
        yield measure(
            f"a whole life, two adds of 16 float32, core {where}", work, base="a + b", names=names,
            targets=[at_most(1.0, "make, add, add, take, drop", "a + b")], rounds=5 if quick else 3000, calls=64,
        )  # fmt: skip
