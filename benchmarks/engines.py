"""Engines that others wrote, or could have, with an InputBuffer in each node of their passes.

A scalar engine of a few lines, which adds Python floats; and HIPS autograd's pass, over a chain without any fan-in and
over two fan-ins; a whole pass with one fan-in of N producers, beside torch's engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import fanin
from fanin import tape

from .timing import Result, at_least, at_most, measure, peer, pinned

TORCH, HIPS, HAND, DICT = "torch's engine", "HIPS autograd", "InputBuffer, by hand", "a dict and +=, by hand"


class Scalar:
    """A number with references to the numbers that it was made of, and its derivatives."""

    __slots__ = ("grad", "incoming", "made_of", "value")

    def __init__(self, value: float, made_of: tuple[tuple[Scalar, float], ...] = ()) -> None:
        self.value, self.made_of, self.grad, self.incoming = value, made_of, 0.0, None

    def __add__(self, other: Scalar) -> Scalar:
        return Scalar(self.value + other.value, ((self, 1.0), (other, 1.0)))

    def __mul__(self, other: Scalar) -> Scalar:
        return Scalar(self.value * other.value, ((self, other.value), (other, self.value)))

    def relu(self) -> Scalar:
        return Scalar(max(self.value, 0.0), ((self, 1.0 if self.value > 0 else 0.0),))


def in_order(end: Scalar) -> list[Scalar]:
    """Each before what it was made of."""
    done: list[Scalar] = []
    met: set[int] = set()
    waiting: list[tuple[Scalar, bool]] = [(end, False)]
    while waiting:
        node, left = waiting.pop()
        if left:
            done.append(node)
        elif id(node) not in met:
            met.add(id(node))
            waiting.append((node, True))
            waiting.extend((of, False) for of, _ in node.made_of)
    return done[::-1]


def by_adding(order: list[Scalar]) -> None:
    for node in order:
        node.grad = 0.0
    order[0].grad = 1.0
    for node in order:
        g = node.grad
        for of, slope in node.made_of:
            of.grad += g * slope


def by_buffers(order: list[Scalar], new: Callable[[int], Any] = fanin.InputBuffer) -> None:
    order[0].incoming = new(1)
    order[0].incoming.add(0, 1.0)
    for node in order:
        (node.grad,) = node.incoming.take()
        node.incoming, g = None, node.grad
        for of, slope in node.made_of:
            if of.incoming is None:
                of.incoming = new(1)
            of.incoming.add(0, g * slope)


def network(width: int, samples: int) -> Scalar:
    """The loss of two hidden layers on a few points."""
    r = random.Random(0)
    sizes = [2, width, width, 1]
    weights = [[[Scalar(r.uniform(-1, 1)) for _ in range(a)] for _ in range(b)] for a, b in pairwise(sizes)]
    total = Scalar(0.0)
    for _ in range(samples):
        values = [Scalar(r.uniform(-1, 1)) for _ in range(2)]
        for layer in weights:
            sums = []
            for row in layer:
                s = row[0] * values[0]
                for w, v in zip(row[1:], values[1:], strict=True):
                    s = s + w * v
                sums.append(s.relu())
            values = sums
        total = total + values[0] * values[0]
    return total


def scalars(quick: bool, where: str) -> Iterator[Result]:
    """The pass backward of a network of numbers; each finds its order anew, as such engines do."""
    end = network(4 if quick else 16, 1 if quick else 3)
    order = in_order(end)
    names = {"end": end, "in_order": in_order, "by_adding": by_adding, "by_buffers": by_buffers}
    by_adding(order)
    grads = [n.grad for n in order]
    by_buffers(order)
    assert grads == [n.grad for n in order]
    yield measure(
        f"a scalar engine: {len(order)} nodes, core {where}",
        {"grad += ..": "by_adding(in_order(end))", "a buffer for each node": "by_buffers(in_order(end))"},
        base="grad += ..",
        unit="us",
        names=names,
        targets=[at_most(2.1, "a buffer for each node", "grad += ..")],
        rounds=3 if quick else 60,
    )


def hips(title: str, function: Callable[[Any], Any], x: Any, most: float, quick: bool, where: str) -> Result | None:
    """One pass by HIPS autograd's own loop, and by the same with a buffer for each node; None without it."""
    if peer("autograd") is None:
        return None
    from autograd.core import VJPNode, backward_pass
    from autograd.tracer import toposort, trace

    value, end = trace(VJPNode.new_root(), function, x)
    first = np.ones_like(value)

    def own() -> Any:
        return backward_pass(first, end)

    def buffers(new: Callable[[int], Any] = fanin.InputBuffer) -> Any:
        held = {end: new(1)}
        held[end].add(0, first)
        for node in toposort(end):
            (gradient,) = held.pop(node).take()
            for parent, more in zip(node.parents, node.vjp(gradient), strict=True):
                buf = held.get(parent)
                if buf is None:
                    buf = held[parent] = new(1)
                buf.add(0, more)
        return gradient

    assert np.allclose(own(), buffers())
    rows = {"its own pass": own, "a buffer for each node": buffers}
    return measure(
        f"HIPS autograd: {title}, core {where}", rows, base="its own pass", unit="us", rounds=3 if quick else 40,
        targets=[at_most(most, "a buffer for each node", "its own pass")],
    )  # fmt: skip


def chain(n: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(n):
            x = x * 1.0001
        return x

    return run


def fan_in(n: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        total = x
        for i in range(n):
            total = total + x * (i + 0.5)
        return total

    return run


def one_fan_in(n: int, where: str, quick: bool) -> Result:
    """us for each pass over h = 1 * x, then n times y = c * h: all gradients meet at h. "InputBuffer, by hand" is the
    loop that an engine would run: multiply, add, and at the end take.
    """
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
        work[HIPS] = hips_fan_in(n, g)
    return measure(
        f"backward of one node with {n} producers of 16 float32, core {where}",
        work,
        base=TORCH if torch else DICT,
        unit="us",
        targets=[at_least(1, HAND, TORCH), at_least(1, "fanin.tape", HIPS)],
        rounds=2 if quick else 25 if n <= 1000 else 7,
    )


def hips_fan_in(n: int, g: Any) -> Any:
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
    """All of them."""
    few = 10 if quick else 1
    with pinned() as where:
        yield from scalars(quick, where)
        passes = [
            hips(f"a chain of {1000 // few} nodes without fan-in", chain(1000 // few), np.ones(16), 1.24, quick, where),
            hips(f"{200 // few} x 10^4", fan_in(200 // few), np.ones(10_000), 1.0, quick, where),
            hips(f"{1000 // few} x 16", fan_in(1000 // few), np.ones(16), 1.0, quick, where),
        ]
        yield from (one for one in passes if one is not None)
        for n in (10,) if quick else (1000, 10_000, 100_000):
            yield one_fan_in(n, where, quick)
