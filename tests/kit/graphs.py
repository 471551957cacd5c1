"""Random graphs for backward passes: described as data, built from any engine's classes, evaluated plainly.

A graph's functions are linear: the gradient of an edge is a number times the sum of one slot, or that very sum, or
undefined. So the sum that gets to a slot is, for each way that leads there, the product of its numbers; and what a pass
must give follows in float64 from a few lines that use no engine (`plain`).

    spec = draw(random.Random(7), "arrays")
    built = Built(spec, fanin)                      # or reference.engine
    outcome = built.backward()
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import scipy.sparse as sp

import fanin
from kit.values import show

Place = tuple[int, int]  # node, slot

#: What an edge's gradient is of the sum that it is made of.
TIMES, SAME, NOTHING, SPARSE, WRONG = "times", "same", "nothing", "sparse", "wrong"


#: What a hook before or after a node does: LOOK only reads, HALVE halves all; the engine refuses the others.
LOOK, HALVE, A_LIST, FORGETS, MAKES_UP, A_KIND = "look", "halve", "a list", "forgets", "makes up", "a kind"


class Boom(Exception):
    """What a node throws."""


class Word:
    """An object of the user's own: a sum of numbers, exact."""

    def __init__(self, value: Fraction) -> None:
        self.value = value

    def __add__(self, other: Word) -> Word:
        return Word(self.value + other.value)

    def __mul__(self, c: float) -> Word:
        return Word(self.value * Fraction(c))

    def __repr__(self) -> str:
        return f"Word({self.value})"


@dataclass
class NodeSpec:
    """A node, or a leaf. `edges[i]` leads to an earlier one; `makes[i]` has the slot, the form and the factor."""

    inputs: int = 1
    edges: list[Place | None] = field(default_factory=list)
    makes: list[tuple[int, str, float]] = field(default_factory=list)
    leaf: bool = False
    declared: bool = False
    throws: bool = False
    nested: int = 0  # a pass of so many steps inside it
    slot_hook: float | None = None  # replaces the sum by its multiple; 0: only reads it
    pre_hook: str | None = None
    post_hook: str | None = None


@dataclass
class Spec:
    """A graph, and the passes over it."""

    values: str
    nodes: list[NodeSpec]
    roots: list[tuple[int, int, float]]
    inputs: list[Place] | None = None
    capture: bool = False  # grad instead of backward
    keep: bool = False  # twice, the second time for good
    made: list[int] | None = None  # the order in which the nodes are made, and get their edges afterwards

    @property
    def leaves(self) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if n.leaf]


KINDS = ("arrays", "wide arrays", "mixed arrays", "scalars", "numpy scalars", "objects", "sparse")
#: Gradients that are no arrays end in nodes without edges.
WITHOUT_LEAVES = ("scalars", "numpy scalars", "objects")


def number(values: str, c: float) -> Any:
    """A gradient, all of whose elements are c."""
    if values == "scalars":
        return c
    if values == "numpy scalars":
        return np.float32(c)
    if values == "objects":
        return Word(Fraction(c))
    wide = values == "wide arrays"
    return np.full((1, 3), c, np.float64 if wide else np.float32)


def times(g: Any, c: float) -> Any:
    """c times g, as the kind of thing that g is."""
    return g * (c if isinstance(g, float | Word) else np.asarray(c, g.dtype)[()])


def notes(e: BaseException) -> list[str]:
    """The errors that name a place."""
    return [note for note in getattr(e, "__notes__", []) if not note.startswith(("lost with", "beside it"))]


def halved(gradients: Any) -> Any:
    return tuple(None if g is None else times(g, 0.5) for g in gradients)


def other_kind(g: Any) -> Any:
    """As large as g, but sparse where g is dense, dense where it is sparse."""
    if sp.issparse(g):
        return g.toarray()
    return sp.coo_array(g) if isinstance(g, np.ndarray) and g.ndim else np.ones((2, 2))


def inside(engine: Any, steps: int) -> Any:
    """A pass of its own over a chain: what its leaf gets."""
    leaf = engine.Leaf(np.zeros(2), name="inner")
    node = leaf
    for _ in range(steps):
        node = engine.Node(lambda g: g * 2.0, edges=[(node, 0)], name="inner")
    engine.backward([(node, 0, np.ones(2))])
    return show(leaf.grad)


def draw(r: random.Random, values: str, *, most: int = 10) -> Spec:
    """A graph of up to `most` nodes."""
    nodes = [NodeSpec(leaf=True) for _ in range(r.randint(1, 3))]
    for _ in range(r.randint(2, most)):
        if r.random() < 0.08:
            nodes.append(NodeSpec(leaf=True))
            continue
        nodes.append(draw_node(r, values, nodes))
    tops = [i for i, n in enumerate(nodes) if not n.leaf] or [0]
    roots: list[tuple[int, int, float]] = []
    for k in range(r.choice((1, 1, 1, 2, 3))):
        i = r.choice(tops) if k else tops[-1]
        roots.append((i, r.randrange(nodes[i].inputs), coefficient(r, values)))
    if r.random() < 0.05:
        roots.append((r.choice([i for i, n in enumerate(nodes) if n.leaf]), 0, coefficient(r, values)))
    spec = Spec(values, nodes, roots, keep=r.random() < 0.2)
    spec.capture = r.random() < 0.3
    limited = r.random() < 0.2 and values not in WITHOUT_LEAVES  # `backward` takes leaves alone as inputs
    if r.random() < 0.15:
        spec.made = r.sample(range(len(nodes)), len(nodes))
    if spec.capture or limited:
        places = [(i, s) for i, n in enumerate(nodes) if n.leaf or spec.capture for s in range(n.inputs)]
        spec.inputs = r.sample(places, min(len(places), r.randint(1, 3)))
    return spec


def draw_node(r: random.Random, values: str, before: Sequence[NodeSpec]) -> NodeSpec:
    node = NodeSpec(inputs=r.choice((1, 1, 1, 1, 2, 3)), declared=r.random() < 0.3 and values != "objects")
    for _ in range(r.choice((0, 1, 1, 2, 2, 2, 2, 3, 3, 4))):
        if r.random() < 0.08:
            node.edges.append(None)
        elif node.edges and node.edges[-1] and r.random() < 0.15:
            node.edges.append(node.edges[-1])  # the same edge twice
        else:
            i = max(r.randrange(len(before)), r.randrange(len(before)))
            node.edges.append((i, r.randrange(before[i].inputs)))
        kind = r.choices((TIMES, SAME, NOTHING, SPARSE if values == "sparse" else TIMES), (12, 5, 1, 4))[0]
        if r.random() < 0.002:
            kind = WRONG
        node.makes.append((r.randrange(node.inputs), kind, coefficient(r, values)))
    node.throws = r.random() < 0.008
    node.nested = r.randint(1, 3) if r.random() < 0.03 else 0
    node.slot_hook = r.choice((0.0, 0.5, 3.0)) if r.random() < 0.1 else None
    if r.random() < 0.05:
        hooks = (LOOK, HALVE, A_LIST, FORGETS, MAKES_UP, A_KIND)
        node.pre_hook = r.choices(hooks, (8, 8, 1, 1, 1, 1))[0]
    if r.random() < 0.05:
        node.post_hook = r.choice((LOOK, HALVE))
    return node


def coefficient(r: random.Random, values: str) -> float:
    """Of sparse arrays sums are exact: when what is stored twice is added up is left open (D12)."""
    return r.choice((1.0, -0.5, 2.0, 0.25, -1.5) if values == "sparse" else (1.0, -0.5, 0.1, 1.7, -3.3))


class Built:
    """A graph of an engine's own nodes. Each function that runs adds a line to `log`."""

    def __init__(self, spec: Spec, engine: Any, value: Callable[[float], Any] | None = None) -> None:
        self.spec, self.engine, self.log = spec, engine, []  # type: tuple[Spec, Any, list[Any]]
        self.value = value or (lambda c: number(spec.values, c))
        self.held: list[tuple[Any, Any]] = []  # gradients that hooks received, and copies of them
        self.nodes: dict[int, Any] = {}
        for i in spec.made or range(len(spec.nodes)):
            n = spec.nodes[i]
            self.nodes[i] = self.leaf(i) if n.leaf else self.node(i, n)
        for i in spec.made or ():
            for edge in spec.nodes[i].edges:
                self.nodes[i].edges.append(edge and (self.nodes[edge[0]], edge[1]))

    def leaf(self, i: int) -> Any:
        if self.spec.values in WITHOUT_LEAVES:
            return self.engine.Node(lambda g: self.log.append(("sink", i, show(g))), name=f"sink{i}")
        leaf = self.engine.Leaf(np.zeros_like(self.value(0.0)), name=f"leaf{i}")
        leaf.register_hook(lambda g: self.log.append(("leaf", i)))
        leaf.register_post_accumulate_grad_hook(lambda x: self.log.append(("after", i)))
        return leaf

    def node(self, i: int, n: NodeSpec) -> Any:
        slots = None
        if n.declared:
            like = np.asarray(self.value(1.0))
            slots = [fanin.Slot(shape=like.shape, dtype="float64" if like.dtype == float else None)] * n.inputs
        edges = [] if self.spec.made else [None if e is None else (self.nodes[e[0]], e[1]) for e in n.edges]
        node = self.engine.Node(self.function(i, n), n.inputs, edges, slots=slots, name=f"n{i}",
                                release=lambda: self.log.append(("release", i)))  # fmt: skip
        if n.slot_hook is not None:
            node.register_hook(self.slot_hook(i, n.slot_hook), slot=0)
        if n.pre_hook:
            node.register_prehook(self.pre_hook(i, n.pre_hook))
        if n.post_hook:
            node.register_posthook(self.post_hook(i, n.post_hook))
        return node

    def slot_hook(self, i: int, c: float) -> Callable[[Any], Any]:
        def hook(g: Any) -> Any:
            self.log.append(("hook", i))
            return times(g, c) if c else None

        return hook

    def pre_hook(self, i: int, what: str) -> Callable[[Any], Any]:
        def hook(sums: Any) -> Any:
            self.log.append(("pre", i))
            if what == A_LIST:
                return list(sums)
            if what == FORGETS:
                return (None,) * len(sums)
            if what == MAKES_UP:
                return tuple(self.value(1.0) if s is None else s for s in sums)
            if what == A_KIND:
                return tuple(None if s is None else other_kind(s) for s in sums)
            return halved(sums) if what == HALVE else None

        return hook

    def post_hook(self, i: int, what: str) -> Callable[[Any, Any], Any]:
        def hook(sums: Any, gradients: Any) -> Any:
            self.log.append(("post", i, len(sums), len(gradients)))
            return halved(gradients) if what == HALVE else None

        return hook

    def function(self, i: int, n: NodeSpec) -> Callable[..., Any]:
        def fn(*sums: Any) -> Any:
            self.log.append(("call", i, tuple(s is None for s in sums)))
            self.held += [(s, show(s)) for s in sums if isinstance(s, np.ndarray)]
            if n.throws:
                raise Boom(f"in {i}")
            if n.nested:
                self.log.append(("nested", inside(self.engine, n.nested)))
            made = [self.made(sums[slot], kind, c) for slot, kind, c in n.makes]
            return made[0] if len(made) == 1 else made

        return fn

    def made(self, g: Any, kind: str, c: float) -> Any:
        if g is None or kind == NOTHING:
            return None
        if kind == WRONG:
            return np.zeros((7, 7))
        if kind == SPARSE:
            return sp.coo_array(np.atleast_2d(g.toarray() if sp.issparse(g) else g) * c)
        return g if kind == SAME else times(g, c)

    def roots(self) -> list[Any]:
        return [(self.nodes[i], slot, self.value(c)) for i, slot, c in self.spec.roots]

    def run(self, keep: bool, **how: Any) -> Any:
        """One pass: what it returned or the kind of its error."""
        inputs = None if self.spec.inputs is None else [self.input(*place) for place in self.spec.inputs]
        try:
            if self.spec.capture:
                return [show(x) for x in self.engine.grad(self.roots(), inputs, keep_graph=keep, **how)]
            return self.engine.backward(self.roots(), inputs, keep_graph=keep, **how)
        except Exception as e:
            where = [re.findall(r"in (\w+).*: (\d+ of \d+) node", note) for note in notes(e)]
            self.log += [("note", *found) for found in where if found]  # the other errors name what was lost (E17)
            return type(e).__name__

    def input(self, i: int, slot: int) -> Any:
        return self.nodes[i] if self.spec.nodes[i].leaf else (self.nodes[i], slot)

    def outcome(self, **how: Any) -> list[Any]:
        """Everything observable about the passes: results, errors, leaves, and the order in which functions ran."""
        seen = [self.run(keep, **how) for keep in ((True, False, False) if self.spec.keep else (False,))]
        return [seen, self.grads(), self.log]

    def grads(self) -> list[Any]:
        return [show(self.nodes[i].grad) for i in self.spec.leaves if self.spec.values not in WITHOUT_LEAVES]

    @property
    def whole(self) -> bool:
        """Whether nothing throws, so that all runs in any order."""
        hooks = (None, LOOK, HALVE)
        wrong = (any(kind == WRONG for _, kind, _ in n.makes) or n.pre_hook not in hooks for n in self.spec.nodes)
        return not any(n.throws for n in self.spec.nodes) and not any(wrong)

    def changed(self) -> list[Any]:
        """Gradients with other references that were written (A6, L7)."""
        return [x for x, was in self.held if show(x) != was]


def plain(spec: Spec) -> dict[int, tuple[float, float]]:
    """The gradient that one pass gives to each leaf, and the size of its terms; NaN for an undefined one.

    Float64, by the definition: from late nodes to early ones, each forwards its sum. Calls no engine.
    """
    total: dict[Place, float] = {}
    size: dict[Place, float] = {}

    def arrives(place: Place, value: float, magnitude: float) -> None:
        total[place] = total.get(place, 0.0) + value
        size[place] = size.get(place, 0.0) + magnitude

    for i, slot, c in spec.roots:
        arrives((i, slot), c, abs(c))
    for i in reversed(range(len(spec.nodes))):
        n = spec.nodes[i]
        if n.slot_hook and (i, 0) in total:
            total[i, 0] *= n.slot_hook
            size[i, 0] *= n.slot_hook
        scale = 0.5 ** ((n.pre_hook == HALVE) + (n.post_hook == HALVE))
        for edge, (slot, kind, c) in zip(n.edges, n.makes, strict=True):
            if edge is not None and kind != NOTHING and (i, slot) in total:
                factor = scale * (1.0 if kind == SAME else c)
                arrives(edge, total[i, slot] * factor, size[i, slot] * abs(factor))
    return {i: (total.get((i, 0), float("nan")), size.get((i, 0), 0.0)) for i in spec.leaves}
