"""Graphs of kit.graphs on the streams of two devices, and all small shapes of graphs.

Every node and leaf is on a stream that is drawn; a node's gradients lie on the device of their consumer, and are
made by kernels on the stream that is current while it runs. So a wait that the stream rules omit is a race.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

import fanin
from kit import graphs
from kit.graphs import LOOK, NodeSpec, Spec

N = 3  # elements of each gradient


def current(streams: list[Any]) -> ExitStack:
    """A context in which all of them are."""
    stack = ExitStack()
    for s in streams:
        stack.enter_context(fanin.stream(s))
    return stack


class OnStreams(graphs.Built):
    """A graph on devices. `callers`: the streams that are current where passes begin: of one device, or of both."""

    def __init__(self, spec: Spec, w: Any, r: random.Random, *, streams: int = 2) -> None:
        self.w = w
        self.all = [[w.stream(d) for _ in range(streams)] for d in range(2)]
        self.home = [r.randrange(2) for _ in spec.nodes]  # where gradients for it lie
        self.on = [r.choice(self.all[self.home[i] if n.leaf else r.randrange(2)]) for i, n in enumerate(spec.nodes)]
        self.callers = [r.choice([*self.all[d], w.stream(d)]) for d in r.choice(((0,), (1,), (0, 1)))]
        self.ran: list[int] = []
        self.here_now = threading.local()  # which streams this thread's nodes are on
        super().__init__(spec, fanin)

    def here(self) -> ExitStack:
        """The callers' streams are current."""
        return current(self.callers)

    def kernel(self, fn: Callable[..., Any], reads: list[Any], device: int) -> Any:
        """An array on a device, made on what is current: on its own device, or on that of what it is made of."""
        made = self.w.empty(N, np.float64, device=device)
        by = int(reads[0].device[-1]) if reads else device
        self.w.launch(self.stream_now(by), fn, reads=reads, writes=[made])
        return made

    def stream_now(self, device: int) -> Any:
        """Where a function queues: its node's stream, on which what it gives is ready (P)."""
        running = getattr(self.here_now, "running", None)
        return running[-1] if running else self.w.current_stream(device)

    def leaf(self, i: int) -> Any:
        leaf = fanin.Leaf(self.w.array(np.zeros(N), self.home[i]), stream=self.on[i], name=f"leaf{i}")
        leaf.register_hook(lambda g: self.log.append(("leaf", i)))
        leaf.register_post_accumulate_grad_hook(lambda x: self.log.append(("after", i)))
        return leaf

    def node(self, i: int, n: NodeSpec) -> Any:
        edges = [None if e is None else (self.nodes[e[0]], e[1]) for e in n.edges]
        node = fanin.Node(self.function(i, n), n.inputs, edges, stream=self.on[i], name=f"n{i}")
        if n.slot_hook is not None:
            node.register_hook(self.scaling_hook(i, n.slot_hook), slot=0)
        if n.pre_hook:
            node.register_prehook(lambda sums: self.log.append(("pre", i)))
        return node

    def scaling_hook(self, i: int, c: float) -> Callable[[Any], Any]:
        def hook(g: Any) -> Any:
            self.log.append(("hook", i))
            return self.on_stream(i, lambda: self.times(g, c, self.home[i])) if c else None

        return hook

    def on_stream(self, i: int, call: Callable[[], Any]) -> Any:
        assert self.w.current_stream(int(self.on[i].device[-1])) == self.on[i], "E4"
        self.here_now.running = [*getattr(self.here_now, "running", []), self.on[i]]
        try:
            return call()
        finally:
            self.here_now.running.pop()

    def times(self, g: Any, c: float, device: int) -> Any:
        return self.kernel(lambda v, to: np.multiply(v, c, out=to), [g], device)

    def function(self, i: int, n: NodeSpec) -> Callable[..., Any]:
        def fn(*sums: Any) -> Any:
            self.ran.append(i)
            if n.throws:
                raise graphs.Boom(f"in {i}")
            if n.nested:
                self.on_stream(i, lambda: self.inner(i, n.nested))
            made = self.on_stream(i, lambda: [self.given(sums, *x) for x in zip(n.edges, n.makes, strict=True)])
            return made[0] if len(made) == 1 else made

        return fn

    def given(self, sums: tuple[Any, ...], edge: Any, makes: tuple[int, str, float]) -> Any:
        slot, kind, c = makes
        g, device = sums[slot], self.home[edge[0]] if edge else 0
        if g is None or kind == graphs.NOTHING:
            return None
        if kind == graphs.SAME and g.device == self.w.place(device):
            return g
        return self.times(g, 1.0 if kind == graphs.SAME else c, device)

    def inner(self, i: int, steps: int) -> None:
        """A pass inside the node: what its leaf gets is read on the node's stream."""
        device = int(self.on[i].device[-1])
        leaf = fanin.Leaf(self.w.array(np.zeros(N), device), stream=self.all[device][0])
        node: Any = leaf
        for _ in range(steps):
            node = fanin.Node(lambda g: g, edges=[(node, 0)], stream=self.all[device][1])
        fanin.backward([(node, 0, self.w.array(np.ones(N), device))])
        self.kernel(lambda v, to: np.copyto(to, v), [leaf.grad], device)

    def roots(self) -> list[Any]:
        made = []
        for i, slot, c in self.spec.roots:
            x = self.w.empty(N, np.float64, device=self.home[i])
            self.w.fill(self.w.current_stream(self.home[i]), x, c)
            made.append((self.nodes[i], slot, x))
        return made

    def run(self, keep: bool, **how: Any) -> Any:
        """One pass, on the callers' streams: of `grad`, what it gave, as read there."""
        with self.here():
            self.use_gradients()
            inputs = None if self.spec.inputs is None else [self.input(*place) for place in self.spec.inputs]
            try:
                if not self.spec.capture:
                    return fanin.backward(self.roots(), inputs, keep_graph=keep, **how)
                return [None if x is None else x.numpy().tolist() for x in
                        fanin.grad(self.roots(), inputs, keep_graph=keep, **how)]  # fmt: skip
            except graphs.Boom as e:
                return type(e).__name__

    def use_gradients(self) -> None:
        """The callers' streams work on what there is of the leaves, as an optimizer does."""
        for i in self.spec.leaves:
            if (g := self.nodes[i].grad) is not None:
                self.w.launch(self.w.current_stream(self.home[i]), lambda v: np.multiply(v, 1, out=v), writes=[g])

    def values(self) -> dict[int, list[float] | None]:
        """The leaves as the callers' streams read them."""
        with self.here():
            grads = {i: self.nodes[i].grad for i in self.spec.leaves}
            return {i: None if g is None else g.numpy().tolist() for i, g in grads.items()}


def plainly(r: random.Random, spec: Spec) -> Spec:
    """A drawn graph, without what is no matter of streams: what is refused, hooks that replace all sums."""
    for n in spec.nodes:
        n.makes = [(slot, graphs.TIMES if kind == graphs.WRONG else kind, c) for slot, kind, c in n.makes]
        n.pre_hook = LOOK if n.pre_hook else None
        n.post_hook, n.declared = None, False
        n.throws = r.random() < 0.01
    spec.keep, spec.made = r.random() < 0.3, None
    return spec


# ---------------------------------------------------------------- shapes


def shapes(n: int) -> Iterator[Spec]:
    """All graphs of n nodes up to isomorphism in which the last leads to each other: those without edges are leaves."""
    seen = set()
    pairs = [(i, j) for i in range(n) for j in range(i)]
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        edges = [p for p, is_there in zip(pairs, chosen, strict=True) if is_there]
        if all(any(j == k for _, j in edges) for k in range(n - 1)) and (key := canonical(n, edges)) not in seen:
            seen.add(key)
            yield shape(n, edges)


def canonical(n: int, edges: list[tuple[int, int]]) -> Any:
    """The same for isomorphic graphs alone: of all numberings that the nodes' colours leave, the least."""
    colour: list[Any] = [0] * n
    for _ in range(3):
        behind = [sorted(colour[j] for i, j in edges if i == v) for v in range(n)]
        before = [sorted(colour[i] for i, j in edges if j == v) for v in range(n)]
        seen = [repr(x) for x in zip(colour, behind, before, strict=True)]
        colour = [sorted(set(seen)).index(x) for x in seen]
    groups = [[v for v in range(n) if colour[v] == c] for c in sorted(set(colour))]
    best = None
    for order in itertools.product(*(itertools.permutations(g) for g in groups)):
        at = {v: k for k, v in enumerate(itertools.chain(*order))}
        key = sorted((at[i], at[j]) for i, j in edges)
        best = key if best is None or key < best else best
    return n, tuple(best or ())


def shape(n: int, edges: list[tuple[int, int]]) -> Spec:
    nodes = []
    for i in range(n):
        to: list[graphs.Place | None] = [(j, 0) for k, j in edges if k == i]
        makes = [(0, graphs.SAME if (i + k) % 3 == 2 else graphs.TIMES, COEFFICIENTS[(i + k) % 4])
                 for k in range(len(to))]  # fmt: skip
        nodes.append(NodeSpec(edges=to, makes=makes, leaf=not to and n > 1))
    return Spec("wide arrays", nodes, [(n - 1, 0, 1.0)])


COEFFICIENTS = (0.1, 1.7, -3.3, 1e8)  #: whose sums depend on their order
