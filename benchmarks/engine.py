"""A whole backward pass with one fan-in of N producers, beside torch's engine and HIPS autograd.

    python benchmarks/engine.py [--quick] [--json FILE]


The graph: h = 1 * x, then N times y = c * h, 16 floats each. A producer is one multiplication; all gradients meet at h.
"InputBuffer, by hand" is the loop that an engine would run: multiply, add, and at the end take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import main

import fanin
from fanin import tape
from fanin.cli.timing import Result, at_least, measure, peer, pinned

TORCH, HIPS, HAND, DICT = "torch's engine", "HIPS autograd", "InputBuffer, by hand", "a dict and +=, by hand"


def one(n: int, where: str, quick: bool) -> Result:
    """us for each pass."""
    torch, autograd = peer("torch"), peer("autograd")
    c, g = np.float32(2), np.ones(16, "f4")
    buf = fanin.InputBuffer(1, budget=float("inf"))

    def hand() -> None:
        add, multiply = buf.add, np.multiply
        for _ in range(n):
            add(0, multiply(g, c))
        np.multiply(buf.take()[0], c)

    def by_dict() -> None:
        sums: dict[int, Any] = {}
        multiply = np.multiply
        for _ in range(n):
            gradient = multiply(g, c)
            if 0 in sums:
                sums[0] += gradient
            else:
                sums[0] = gradient
        multiply(sums[0], c)

    x = tape.parameter(g)
    h = x * 1.0
    outputs = [h * 2.0 for _ in range(n)]
    ones = [np.ones(16, "f4") for _ in range(n)]
    work: dict[str, Any] = {
        DICT: by_dict,
        HAND: hand,
        "fanin.tape": lambda: tape.grad(outputs, [x], ones),
        TORCH: None,
        HIPS: None,
    }
    if torch is not None:
        leaf = torch.ones(16, requires_grad=True)
        node = leaf * 1
        ends = [node * 2 for _ in range(n)]
        tones = [torch.ones(16) for _ in range(n)]
        work[TORCH] = lambda: torch.autograd.grad(ends, leaf, tones, retain_graph=True)
    if autograd is not None:
        work[HIPS] = hips(n, g)
    return measure(
        f"backward of one node with {n} producers of 16 float32, core {where}",
        work,
        base=TORCH if torch else DICT,
        unit="us",
        targets=[at_least(1, HAND, TORCH), at_least(1, "fanin.tape", HIPS)],
        rounds=2 if quick else 25 if n <= 1000 else 7,
    )


def hips(n: int, g: Any) -> Any:
    """The backward pass alone, of a graph made once."""
    from autograd.core import make_vjp

    def function(x: Any) -> Any:
        h = x * np.float32(1)
        total = h * np.float32(2)
        for _ in range(n - 1):
            total = total + h * np.float32(2)
        return total

    vjp, _ = make_vjp(function, g)
    return lambda: vjp(g)


def results(quick: bool) -> Iterator[Result]:
    """Fan-ins that grow: the time of each producer must not."""
    with pinned() as where:
        for n in (10,) if quick else (1000, 10_000, 100_000):
            yield one(n, where, quick)


if __name__ == "__main__":
    main(results)
