"""A backward pass in plain Python, to be read from top to bottom: rules E, V and L on one thread of the CPU.

It is the oracle for the engine's core: the same graph, built of these classes, gives the same sums bit by bit, calls
the same functions in the same order, and refuses the same input. It has no devices but the CPU, no threads, and no
ownership: a leaf's gradient is always a copy (L2, L3 and L7 are the core's). It computes the waits between streams.
Rule numbers are those of ``docs/rules.md``.

1. Nodes, and leaves, where gradients end.
2. The waits of nodes on streams.
3. A pass: collect, seed, run, end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from fanin._interop.protocols import DTypeLike, NDArray
from fanin._words import counted, type_of
from reference.buffer import InputBuffer, Slot, copy_of, fitted, read, slots_of
from reference.numbers import need

__all__ = ["Leaf", "Node", "backward", "grad"]

# ---------------------------------------------------------------- 1. Nodes, and leaves

Hook = Callable[..., Any]
H = TypeVar("H")
made = itertools.count()
ANY = Slot()


class Handle:
    """A hook that was added, to be taken away again."""

    numbers = itertools.count()

    def __init__(self, hooks: dict[int, H], hook: H) -> None:
        self.hooks, self.number = hooks, next(Handle.numbers)
        hooks[self.number] = hook

    def remove(self) -> None:
        self.hooks.pop(self.number, None)


class Node:
    """An operation that was done. `fn(*sums)` takes the gradients of what it made, one for each slot, and gives one for
    each edge: what it was made of.
    """

    def __init__(self, fn: Callable[..., object], inputs: int = 1, edges: Sequence[Edge] = (), *,
                 slots: Sequence[Slot | None] | None = None, release: Callable[[], object] | None = None,
                 name: str | None = None) -> None:  # fmt: skip
        self.sequence_nr = next(made)  # the larger, the later
        self.fn: Callable[..., object] | None = fn
        self.slots = [ANY] * inputs if slots is None else slots_of([s or ANY for s in slots], None)
        self.inputs = len(self.slots)
        self.edges = list(edges)
        self.name = f"node {self.sequence_nr}" if name is None else name
        self.release = release
        self.freed_by: int | None = None  # the pass that did
        self.slot_hooks: dict[int, tuple[int, Hook]] = {}
        self.prehooks: dict[int, Hook] = {}
        self.posthooks: dict[int, Hook] = {}
        self.stream, self.place = Stream(""), ""  # its own; the device on which gradients for it lie; "": the CPU
        self.running: set[int] | None = None  # while it runs: its needed edges

    def register_hook(self, hook: Hook, slot: int = 0) -> Handle:
        return Handle(self.slot_hooks, (slot, hook))

    def register_prehook(self, hook: Hook) -> Handle:
        return Handle(self.prehooks, hook)

    def register_posthook(self, hook: Hook) -> Handle:
        return Handle(self.posthooks, hook)

    def needs(self, edge: int) -> bool:
        """Whether the gradient of an edge is needed; while the node runs, in that pass."""
        return self.edges[edge] is not None and (self.running is None or edge in self.running)

    def __repr__(self) -> str:
        return f"{self.name} (node {self.sequence_nr})"


class Leaf(Node):
    """Where the gradients of an array end: in `grad` (rules L). With `accumulate` they are summed in that dtype over
    all passes, and rounded when `grad` is read.
    """

    def __init__(self, array: NDArray, *, accumulate: DTypeLike | None = None, name: str | None = None) -> None:
        need(array.dtype.kind not in "iub", ValueError, f"Leaf(): expected a gradient of floats, got {array.dtype}")
        slot = Slot(shape=array.shape, dtype=array.dtype)
        super().__init__(lambda *_: (), slots=[slot], name=name)
        self.wide = None if accumulate is None else InputBuffer([replace(slot, accumulate=accumulate)])
        self.kept: object = None
        self.after: dict[int, Hook] = {}

    @property
    def grad(self) -> object:
        return self.kept if self.wide is None else self.wide[0]

    def register_post_accumulate_grad_hook(self, hook: Hook) -> Handle:
        return Handle(self.after, hook)

    def accumulate(self, g: object) -> None:
        """`.grad += g`; the new sum is there before anything of the old one changes (E6)."""
        if self.wide is not None:
            self.wide.add(0, g, copy=True)
            return
        if self.kept is None:
            self.kept = copy_of(g)  # L4
            return
        total = InputBuffer(self.slots, name=f"{self.name}.grad")
        total.add(0, self.kept)
        total.add(0, g)
        [value] = total.take()
        if isinstance(self.kept, np.ndarray) and isinstance(value, np.ndarray):
            self.kept[...] = value  # L5
        else:
            self.kept = value  # L5: a sparse one is replaced


Edge = tuple[Node, int] | None

# ---------------------------------------------------------------- 2. The waits of nodes on streams


@dataclass(frozen=True)
class Stream:
    """A queue of a device; number 1 is its default stream."""

    device: str
    number: int = 1


Wait = tuple[Stream, Stream]  # (waiting stream, awaited stream)


def sum_waits(producers: Sequence[Stream], consumer: Stream, place: str) -> list[Wait]:
    """Of a slot that is summed when it is taken (S8 to S18): its gradients lie on `place`, in the order of arrival."""
    if not producers:
        return []
    first = producers[0]
    if len(producers) == 1:
        return [(consumer, first)] if consumer != first else []  # A14: handed through
    near = [s for s in (consumer, first) if s.device == place]
    accum = near[0] if near else Stream(place)  # S8 and S9, S10, S11
    waits = [(accum, p) for p in dict.fromkeys(producers) if p != accum]  # S12, S13: once for each stream
    return waits + [(consumer, accum)] * (consumer != accum)  # S18


class Waits(list[Wait]):
    """All waits of a pass. `callers`: the streams that are current where it begins; elsewhere the default streams."""

    def __init__(self, *callers: Stream) -> None:
        super().__init__()
        self.callers = {s.device: s for s in callers}
        self.parked: dict[tuple[Node, int], list[Stream]] = {}
        self.written: set[Stream] = set()
        self.tails: dict[Stream, dict[Stream, None]] = {}

    def caller(self, device: str) -> Stream:
        return self.callers.get(device, Stream(device))

    def given(self, source: Node | None, node: Node, slot: int) -> None:
        """A gradient is ready on its producer's stream, a root's on the caller's."""
        self.parked.setdefault((node, slot), []).append(source.stream if source else self.caller(node.place))

    def taken(self, node: Node) -> None:
        for slot in range(node.inputs):
            self += sum_waits(self.parked.pop((node, slot), []), node.stream, node.place)

    def writes(self, leaf: Node) -> None:
        """S20: before its first write a leaf's stream waits for the caller's."""
        if leaf.stream not in self.written and leaf.stream != self.caller(leaf.place):
            self.append((leaf.stream, self.caller(leaf.place)))
        self.written.add(leaf.stream)
        self.left(leaf.stream, leaf.place)

    def left(self, stream: Stream, device: str) -> None:
        self.tails.setdefault(self.caller(device), {})[stream] = None

    def end(self) -> None:
        """S20."""
        self += [(caller, s) for caller, streams in self.tails.items() for s in streams if s != caller]


# ---------------------------------------------------------------- 3. A pass

passes = itertools.count(1)


def backward(roots: Sequence[object], inputs: Sequence[Leaf] | None = None, *, keep_graph: bool = False,
             waits: Waits | None = None) -> None:  # fmt: skip
    """Into the leaves; with `inputs`, into those alone."""
    for x in inputs or ():
        need(isinstance(x, Leaf), TypeError, f"backward: inputs are leaves; grad(roots, inputs) gives that of {x!r}")
    Pass(roots, None if inputs is None else [(leaf, 0) for leaf in inputs], keep_graph, None, waits).run()


def grad(roots: Sequence[object], inputs: Sequence[Node | tuple[Node, int]], *, keep_graph: bool = False,
         waits: Waits | None = None) -> list[object]:  # fmt: skip
    """Of the inputs, (node, slot) or nodes or leaves, in their order; no leaf changes."""
    wanted = [(x, 0) if isinstance(x, Node) else x for x in inputs]
    captured: dict[tuple[Node, int], object] = {}
    Pass(roots, wanted, keep_graph, captured, waits).run()
    return [captured.get(x) for x in wanted]


class Pass:
    """A buffer for each node that waits for gradients, and a queue of the nodes that are ready."""

    def __init__(self, roots: Sequence[Any], wanted: Sequence[tuple[Node, int]] | None, keep_graph: bool,
                 captured: dict[tuple[Node, int], object] | None, waits: Waits | None) -> None:  # fmt: skip
        self.waits = Waits() if waits is None else waits
        self.number, self.keep_graph, self.captured = next(passes), keep_graph, captured
        parts = [(root, 0, None) if isinstance(root, Node) else (*root, None)[:3] for root in roots]
        self.roots = [((node, slot), g) for node, slot, g in parts]
        self.wanted = None if wanted is None else set(wanted)
        self.buffers: dict[Node, InputBuffer] = {}
        self.ready: list[tuple[bool, int, int, Node]] = []
        self.arrivals = itertools.count()
        self.ran = 0
        self.collect()

    # Collect

    def collect(self) -> None:
        """The nodes of the pass, the number of edges that lead to each (E1), and the key of each edge: its place among
        those that lead to the same slot, the roots first, then the producers from late to early, each by its edges
        (A15).
        """
        nodes = self.reachable()
        self.needed = set(nodes)
        if self.wanted is not None:  # E8
            self.needed = {node for node, _ in self.wanted} & self.needed
            for node in nodes:  # each after all that it leads to
                if any(e is not None and e[0] in self.needed for e in node.edges):
                    self.needed.add(node)
        for node in self.needed:
            need(node.freed_by is None or not self.runs(node), RuntimeError,
                 f"{node.name} was freed by pass {node.freed_by}: keep_graph=True keeps it")  # fmt: skip
        self.due: Counter[Node] = Counter()
        self.expected: Counter[tuple[Node, int]] = Counter()
        self.keys: dict[tuple[Node | None, int], int] = {}
        for i, (to, _) in enumerate(self.roots):
            self.count(None, i, to)
        for node in sorted(self.needed, key=lambda n: -n.sequence_nr):
            for i, edge in enumerate(node.edges):
                self.count(node, i, edge)

    def count(self, source: Node | None, i: int, edge: Edge) -> None:
        if edge is not None and edge[0] in self.needed:
            self.keys[source, i] = self.expected[edge]
            self.expected[edge] += 1
            self.due[edge[0]] += 1

    def reachable(self) -> list[Node]:
        """All nodes that the roots lead to, each after all that it leads to itself; in a loop, however deep (E13)."""
        done: dict[Node, None] = {}
        todo = [(node, False) for (node, _), _ in self.roots]
        while todo:
            node, left = todo.pop()
            if left:
                done[node] = None
            elif node not in done:
                todo.append((node, True))
                todo += [(e[0], False) for e in node.edges if e is not None and e[0] not in done]
        return list(done)

    def runs(self, node: Node) -> bool:
        """Whether its function runs: not where the pass is limited and only its own sum is wanted."""
        return self.wanted is None or any(e is not None and e[0] in self.needed for e in node.edges)

    # Seed, run, end

    def run(self) -> None:
        seeds = [self.seed(i, *root) for i, root in enumerate(self.roots)]
        self.check("backward was given", seeds, [edge for edge, _ in self.roots])
        for i, ((edge, _), g) in enumerate(zip(self.roots, seeds, strict=True)):
            self.give(None, i, edge, g)
        while self.ready:
            self.step(heapq.heappop(self.ready)[-1])
        self.waits.end()

    @staticmethod
    def seed(i: int, edge: tuple[Node, int], g: object) -> object:
        node, slot = edge
        shape = node.slots[slot].shape
        one = g is not None or (shape is not None and math.prod(shape) == 1)
        need(one, ValueError, f"backward: root {i} ({node.name}, slot {slot}): needs a gradient to begin with")
        return g if g is not None else np.ones(shape or (), node.slots[slot].dtype)

    @staticmethod
    def check(where: str, gradients: Sequence[object], edges: Sequence[Edge]) -> None:
        """V2: each gradient by what its slot declares, all before the first is added."""
        for i, (edge, g) in enumerate(zip(edges, gradients, strict=True)):
            if edge is not None:
                slot = edge[0].slots[edge[1]]
                try:
                    fits = fitted(read(g, slot.combine is not None), slot, slot.shape)
                    need(fits.form != "object" or not isinstance(edge[0], Leaf), TypeError,
                         f"expected an array to add to .grad, got {type_of(g)}")  # fmt: skip
                except (TypeError, ValueError, BufferError) as e:
                    raise type(e)(f"{where} an invalid gradient at index {i}: {e}") from None  # V3

    def give(self, source: Node | None, i: int, edge: Edge, g: object) -> None:
        """One gradient arrives; then, and only then, the count falls (E1)."""
        if edge is None or (source, i) not in self.keys:
            return
        node, slot = edge
        if node not in self.buffers:
            self.buffers[node] = InputBuffer(node.slots, name=node.name)
        self.buffers[node].add(slot, g, key=self.keys[source, i])
        if g is not None:
            self.waits.given(source, node, slot)
        self.due[node] -= 1
        if self.due[node] == 0:
            later = not isinstance(node, Leaf)
            heapq.heappush(self.ready, (later, -node.sequence_nr * later, next(self.arrivals), node))  # E2

    def step(self, node: Node) -> None:
        """A node that is ready: its sums, the hooks, the function, the gradients on their way (E4, E9)."""
        try:
            sums = self.buffers.pop(node).take()
            self.waits.taken(node)
            for slot, hook in list(node.slot_hooks.values()):
                if sums[slot] is not None:
                    new = hook(sums[slot])
                    [sums[slot]] = [sums[slot]] if new is None else replaced(node, [sums[slot]], new)
            for slot, value in enumerate(sums):
                if self.captured is not None and (node, slot) in (self.wanted or ()):
                    self.captured[node, slot] = value
                    if value is not None:
                        self.waits.left(node.stream, node.place)
            if isinstance(node, Leaf):
                self.finish(node, sums[0])
            gradients = self.apply(node, sums) if not isinstance(node, Leaf) and self.runs(node) else None
            self.ran += 1
            if gradients is not None:
                self.send(node, gradients)
        except BaseException as e:
            e.add_note(f"in {node!r}: {self.ran} of {counted(len(self.needed), 'node')} had run")  # E14
            raise

    def finish(self, leaf: Leaf, g: object) -> None:
        if g is None or self.captured is not None:
            return  # L1, E8
        self.waits.writes(leaf)
        leaf.accumulate(g)
        for hook in list(leaf.after.values()):
            hook(leaf)  # L9

    def apply(self, node: Node, sums: list[object]) -> list[object]:
        for hook in list(node.prehooks.values()):
            new = hook(tuple(sums))
            if new is not None:
                need(isinstance(new, tuple) and len(new) == node.inputs, TypeError,
                     f"a pre-hook of {node.name} returned no tuple of {counted(node.inputs, 'sum')}")  # fmt: skip
                sums = replaced(node, sums, *new)
        assert node.fn is not None
        node.running = {i for i, e in enumerate(node.edges) if e is not None and e[0] in self.needed}
        try:
            gradients = self.counted(node, node.fn(*sums))
        finally:
            node.running = None
        for hook in list(node.posthooks.values()):
            new = hook(tuple(sums), tuple(gradients))
            gradients = gradients if new is None else self.counted(node, new)
        if not self.keep_graph:
            self.free(node)
        return gradients

    def send(self, node: Node, gradients: list[object]) -> None:
        """V2, E1."""
        if all(g is None or (node, i) not in self.keys for i, g in enumerate(gradients)):
            self.waits.left(node.stream, node.stream.device)
        wanted = [e if (node, i) in self.keys else None for i, e in enumerate(node.edges)]
        self.check(f"{node.name} returned", gradients, wanted)
        for i, (edge, g) in enumerate(zip(wanted, gradients, strict=True)):
            self.give(node, i, edge, g)

    @staticmethod
    def counted(node: Node, returned: object) -> list[object]:
        """V1."""
        n = len(node.edges)
        if isinstance(returned, tuple | list):
            gradients = list(returned)
        else:
            gradients = [] if returned is None and n == 0 else [returned]
        need(len(gradients) == n, ValueError if isinstance(returned, tuple | list) else TypeError,
             f"{node.name} returned an invalid number of gradients: expected {n}, got {len(gradients)}")  # fmt: skip
        return gradients

    def free(self, node: Node) -> None:
        """E10: drop its references; a second pass over it is refused."""
        node.fn, node.freed_by = None, self.number
        release, node.release = node.release, None
        if release is not None:
            release()


def replaced(node: Node, old: Sequence[object], *new: object) -> list[object]:
    """E9: a hook may give other sums, each of the shape and dtype of the one before; None is for None."""
    result = []
    for before, after in zip(old, new, strict=False):
        need((after is None) == (before is None), ValueError,
             f"a hook of {node.name} returned an invalid gradient: None is for the undefined")  # fmt: skip
        if after is not None:
            a, b = read(before, anything=True), read(after, anything=True)
            need(a.form == b.form and a.shape == b.shape and a.type == b.type, ValueError,
                 f"a hook of {node.name} returned an invalid gradient: expected {a.shape}, got {b.shape}")  # fmt: skip
        result.append(after)
    return result
