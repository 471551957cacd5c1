"""Random graphs that run twice, once with a difference planted, for the tests of digests and of `fanin.compare`.

Each node multiplies its sum by numbers of its own, one for each edge, so a gradient that differs in one bit makes
everything after it differ. `PLANTS` are what can be planted in a pass on the CPU.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fanin

PLANTS = ("value", "dtype", "order", "hook", "missing")


@dataclass(frozen=True)
class Plant:
    """What is planted, and at which node; for "order" that of the sum."""

    kind: str
    at: str


@dataclass(frozen=True)
class Net:
    """A graph: of each node its edges (to, factor), from the first layer of nodes to the last."""

    leaves: tuple[str, ...]
    nodes: dict[str, tuple[tuple[str, float], ...]]
    exact: bool

    @property
    def fans(self) -> dict[str, list[str]]:
        """Of each node and leaf the nodes that give to it, in the order of their keys."""
        found: dict[str, list[str]] = {}
        for name, edges in reversed(self.nodes.items()):
            for to, _ in edges:
                found.setdefault(to, []).append(name)
        return found

    def sum_at(self, at: str, order: Callable[[list[str]], list[str]] = list) -> bytes:
        """The sum of a slot, plainly; `order` puts those that give to it in another order."""
        given: dict[str, list[Any]] = {"top": [GRADIENT]}
        names = list(self.nodes)
        for name in reversed(names):
            total = functools.reduce(np.add, given[name])
            for to, c in self.nodes[name]:
                given.setdefault(to, []).append(total * c)
        fan = self.fans[at]
        place = {id(g): i for i, g in enumerate(given[at])}
        of = dict(zip(place, fan, strict=True))
        turn = {name: i for i, name in enumerate(order(list(dict.fromkeys(fan))))}
        ordered = sorted(given[at], key=lambda g: (turn[of[id(g)]], place[id(g)]))
        return bytes(functools.reduce(np.add, ordered).tobytes())

    def swappable(self, nodes: bool = False) -> list[str]:
        """The sums that another order changes (of nodes alone: those of leaves are never exact)."""
        return [
            at
            for at in self.fans
            if at not in (self.leaves if nodes else ()) and self.sum_at(at) != self.sum_at(at, swapped)
        ]


GRADIENT = np.linspace(0.1, 1.3, 5)


def swapped(names: list[str]) -> list[str]:
    """The first and the last change places."""
    return [names[-1], *names[1:-1], names[0]] if len(names) > 1 else names


def drawn(seed: int, exact: bool = False) -> Net:
    """A random graph in which everything is reached from the last node."""
    r = random.Random(seed)
    leaves = tuple(f"w{i}" for i in range(r.randint(1, 3)))
    below = list(leaves)
    nodes: dict[str, tuple[tuple[str, float], ...]] = {}
    for layer in range(r.randint(1, 3)):
        names = [f"n{layer}.{i}" for i in range(r.randint(3, 5))]
        for name in names:
            some = [r.choice(below) for _ in range(r.randint(1, 3))] + [below[0]]
            nodes[name] = tuple((to, r.choice((1, -1)) * 10 ** r.uniform(-6, 6)) for to in some)
        below = names
    nodes["top"] = tuple((to, r.uniform(0.5, 2.0)) for to in below)
    reached = {"top"}
    for name in reversed(nodes):
        reached |= {to for to, _ in nodes[name]} if name in reached else set()
    kept = {name: edges for name, edges in nodes.items() if name in reached}
    return Net(tuple(w for w in leaves if w in reached), kept, exact)


def run(
    net: Net, plant: Plant | None = None, *, change: Callable[[Any], Any] | None = None, **how: Any
) -> fanin._trace.recording.Trace:
    """The trace of a pass; `change`: what a planted value becomes."""
    kind, at = (plant.kind, plant.at) if plant else ("", "")
    made: dict[str, Any] = {}
    slots = [fanin.Slot(accumulate="exact")] if net.exact else None
    for name in net.leaves:
        made[name] = fanin.Leaf(np.zeros(5), name=name, accumulate=None)
    order = list(net.nodes)
    if kind == "order":  # two that give to the sum are made the other way round
        first, *_, last = dict.fromkeys(net.fans[at])
        i, j = order.index(first), order.index(last)
        order[i], order[j] = order[j], order[i]
    for name in order:
        made[name] = fanin.Node(function(net.nodes[name], kind * (name == at), change), name=name, slots=slots)
    for name, edges in net.nodes.items():
        for to, _ in edges:
            made[name].edges.append((made[to], 0))
    if kind == "hook":
        made[at].register_hook(nudged)
    with fanin.trace(digests=True) as t:
        fanin.backward([(made["top"], 0, GRADIENT)], **how)
    return t


def function(edges: tuple[tuple[str, float], ...], kind: str, change: Callable[[Any], Any] | None) -> Any:
    def fn(g: Any) -> Any:
        made = [None if g is None else g * c for _, c in edges]
        if made[-1] is None:
            return tuple(made)
        if kind == "value":
            made[-1] = (change or nudged)(made[-1])
        elif kind == "dtype":
            made[-1] = made[-1].astype(np.float32)
        elif kind == "missing":
            made[-1] = None
        return tuple(made)

    return fn


def nudged(g: Any) -> Any:
    """The same but for the last bit of one element."""
    g = g.copy()
    g[1] = np.nextafter(g[1], np.inf)
    return g
