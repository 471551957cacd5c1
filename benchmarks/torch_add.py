"""One add of a torch CPU tensor of 16 floats beside torch's add_."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .timing import Result, at_least, measure, peer, pinned


def results(quick: bool) -> Iterator[Result]:
    """ns for each add, 64 of them in a round; then a pass: two adds and the take."""
    torch = peer("torch")
    buf = fanin.InputBuffer(1, budget=float("inf"))
    names: dict[str, Any] = {
        "buf": buf,
        "add": buf.add,
        "np_add": np.add,
        "a": np.ones(16, "f4"),
        "b": np.ones(16, "f4"),
    }
    adds: dict[str, Any] = {
        "np.add(a, b, out=a)": "np_add(a, b, out=a)",
        "torch x.add_(y)": None,
        "buf.add(0, tensor)": None,
    }
    takes: dict[str, Any] = {"np.add(a, b)": "np_add(a, b)", "torch x + y": None, "add, add, take of tensors": None}
    if torch is not None:
        x, y = torch.ones(16), torch.ones(16)
        names |= {"x": x, "y": y, "add_": x.add_}
        adds |= {"torch x.add_(y)": "add_(y)", "buf.add(0, tensor)": "add(0, y)"}
        takes |= {"torch x + y": "x + y", "add, add, take of tensors": "add(0, x)\nadd(0, y)\nbuf.take()"}
    rounds = 5 if quick else 3000
    with pinned() as where:
        yield measure(
            f"one add of a torch tensor of 16 float32, core {where}",
            adds,
            base="np.add(a, b, out=a)",
            names=names,
            rounds=rounds,
            calls=64,
            after=buf.clear,
            targets=[at_least(6, "buf.add(0, tensor)", "torch x.add_(y)")],
        )
        yield measure(
            f"two adds of torch tensors and the take, core {where}",
            takes,
            base="np.add(a, b)",
            names=names,
            rounds=rounds,
            calls=64,
        )
