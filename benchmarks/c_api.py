"""One add of 16 floats through the table of fanin.h, and what a call through a table costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .common import extension
from .passes import each
from .timing import Result, at_least, measure, pinned

CALLS = 64
PYTHON = "buf.add(0, x), from Python"


def python_adds(buf: fanin.InputBuffer) -> Any:
    x, add = np.ones(16, "f4"), buf.add

    def adds() -> None:
        for _ in range(CALLS):
            add(0, x)

    return adds


def results(quick: bool) -> Iterator[Result]:
    """ns for each call; 64 are a round, what they park is cleared outside the time."""
    c = extension("c_api")
    if c is None:
        return
    rounds = 5 if quick else 4000
    buf = fanin.InputBuffer(1, budget=float("inf"))

    def clear() -> None:
        buf.clear()
        c.clear()

    work: dict[str, Any] = {
        PYTHON: python_adds(buf),
        "buffer_add, a view": c.add_view,
        "buffer_add, a view with a key": c.add_view_key,
        "buffer_add_value": c.add_value,
        "buffer_add into the sum, in place": c.add_in_place,
    }
    with pinned() as where:
        adds = measure(
            f"one add of 16 float32 through the table, core {where}",
            work,
            base=PYTHON,
            targets=[at_least(1, name, PYTHON) for name in list(work)[1:4]],
            after=clear,
            rounds=rounds,
            calls=1,
        )
        calls = measure(
            f"a call through a table, core {where}",
            {"direct": c.call_direct, "through the table": c.call_table},
            base="direct",
            rounds=rounds,
            calls=16,
        )
    yield from (each(CALLS, adds), each(CALLS, calls))
