"""torch's own graph on fanin's engine: `fanin.torch.backward`.

torch's nodes are callable from Python, and say what they lead to (`next_functions`), what they take (`_input_metadata`)
and when they were made (`_sequence_nr`). Each becomes a `fanin.Node`; where a gradient of a parameter ends, torch's
own `AccumulateGrad` is called, which knows how to make and add to `.grad`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

import fanin

from .._words import counted, type_of
from .protocols import DTypeLike
from .sharing import parts_alone


def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    gradients: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    accumulate: DTypeLike | None = None,
    schedule: Callable[[tuple[fanin.Node, ...]], fanin.Node] | None = None,
    workers: int = 1,
) -> None:
    """`torch.autograd.backward` on fanin's engine: hooks of tensors in between and of nodes do NOT run (they cannot be
    seen from Python; `retain_grad` on such a tensor leaves its `.grad` as it was), the graph keeps its saved tensors
    until it is dropped (whatever `retain_graph` says: torch lets nobody else free them), CPU tensors alone, no nested
    ones.

    Hooks of leaves (`register_hook`, `register_post_accumulate_grad_hook`) run; those of their `AccumulateGrad` nodes
    do only where a first, sparse gradient that nobody else has is handed over. What can be seen to be missed is a
    RuntimeError: a hook or `retain_grad` of one of `tensors`, full backward hooks of modules, hooks of leaves that ask
    torch's engine for its pass (`register_multi_grad_hook`), checkpoints with reentrance where `inputs` is given (as in
    torch), tensors that are not on the CPU, nested ones. A segment of `torch.utils.checkpoint` without reentrance is
    computed anew for each tensor that it saved: right, and slow; with `use_reentrant=True` it is computed once. A
    `torch.autograd.Function` of several results, of which one is not used, is asked by torch's own engine whether it
    wants zeros there (`ctx.set_materialize_grads`): hooks of that node run then, once, with zeros.

    Every fan-in is an input buffer: the gradients of a bfloat16 tensor that is used many times are summed in float32
    and rounded once, the order of a sum is the graph's. `accumulate` names the dtype of the sums (rule A11). With
    `create_graph=True` what the nodes do is recorded, sums are made by torch's own `+`, and `.grad` can be
    differentiated; there `accumulate` is a ValueError, as sums in another dtype would not be recorded.

    tensors, gradients: as for torch; a gradient may be left out for a tensor of one element. inputs: leaves to which
    the pass is limited. schedule: as for `fanin.backward`. workers: on up to so many threads nodes run at once, with
    the same bits for every number, without `schedule` and `create_graph`. They have the caller's autocast, and no other
    setting that torch keeps for each thread; hooks of leaves run on any of them; nodes of `torch.autograd.Function`s,
    `checkpoint(use_reentrant=True)` among them, run one at a time. Checkpoints without reentrance want `workers=1`:
    they compute a segment anew inside whatever node first asks for what it saved, which two nodes may do at once.

    Raises TypeError (no tensor), ValueError (no gradient, a shape, `inputs` that are no leaves), RuntimeError (a tensor
    without a graph, what is said above); and what a node throws, with a note that names it. Then each `.grad` has its
    whole gradient or none of it.

    >>> import torch  # doctest: +SKIP
    >>> w = torch.ones(3, requires_grad=True)  # doctest: +SKIP
    >>> fanin.torch.backward((w * w).sum())  # doctest: +SKIP
    >>> w.grad  # doctest: +SKIP
    tensor([2., 2., 2.])
    """
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    firsts = _gradients(roots, gradients)
    ends = [_end(i, t) for i, t in enumerate(roots)]
    leaves = None if inputs is None else _leaves([inputs] if isinstance(inputs, torch.Tensor) else list(inputs))
    if leaves == []:
        raise ValueError("backward: inputs is empty: leave it out for all leaves")
    if create_graph and accumulate is not None:
        raise ValueError("backward: accumulate= with create_graph=True: sums that are recorded are torch's own")
    graph = _Graph(ends, accumulate, create_graph, _as_here if workers > 1 else None)
    wanted = None if leaves is None else [graph.leaves[x] for x in leaves if x in graph.leaves]
    if wanted == []:
        return
    for node in graph.leaves if leaves is None else leaves:
        _refuse_hooks(node.variable)
    if leaves is not None:
        _refuse_checkpoints(graph, leaves)
    with torch.set_grad_enabled(create_graph):
        fitted = _fitted("backward was given", firsts, [graph.takes[node][slot] for node, slot in ends])
        fanin.backward(
            [(graph.made[node], slot, g) for (node, slot), g in zip(ends, fitted, strict=True)],
            wanted,
            create_graph=create_graph,
            schedule=schedule,
            workers=workers,
        )


def _gradients(
    roots: list[torch.Tensor], given: torch.Tensor | Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor]:
    """One to begin with for each root."""
    gradients = [given] if isinstance(given, torch.Tensor) else [None] * len(roots) if given is None else list(given)
    if len(gradients) != len(roots):
        raise ValueError(f"backward: expected {counted(len(roots), 'gradient')} to begin with, got {len(gradients)}")
    for i, (t, g) in enumerate(zip(roots, gradients, strict=True)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"backward: tensor {i}: expected a tensor, got {type_of(t)}")
        if g is None and t.numel() != 1:
            raise ValueError(
                f"backward: tensor {i} has {t.numel()} elements and no gradient to begin with: give gradients="
            )
        if g is None and t.is_complex():
            raise ValueError(f"backward: tensor {i} is complex and has no gradient to begin with: give gradients=")
        if g is not None and not isinstance(g, torch.Tensor):
            raise TypeError(f"backward: gradient {i}: expected a tensor, got {type_of(g)}")
        if g is not None and g.shape != t.shape:
            raise ValueError(f"backward: gradient {i}: expected shape {tuple(t.shape)}, got {tuple(g.shape)}")
    return [torch.ones_like(t) if g is None else g for t, g in zip(roots, gradients, strict=True)]


def _end(i: int, t: torch.Tensor) -> tuple[_Node, int]:
    """The node and the slot of a root."""
    if not t.requires_grad:
        raise RuntimeError(f"backward: tensor {i} does not require a gradient: nothing leads from it to a leaf")
    if t.grad_fn is not None and (t.retains_grad or t._backward_hooks):
        raise RuntimeError(
            f"backward: tensor {i} has {'retain_grad' if t.retains_grad else 'a hook'}, which this pass cannot serve:"
            " use torch's own backward(), or take it away"
        )
    edge = get_gradient_edge(t)
    return cast("_Node", edge.node), edge.output_nr


def _leaves(inputs: list[torch.Tensor]) -> list[_Node]:
    """The nodes where the gradients of leaves end."""
    for i, t in enumerate(inputs):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"backward: input {i}: expected a tensor, got {type_of(t)}")
        if not (t.is_leaf and t.requires_grad):
            raise ValueError(
                f"backward: input {i} is no leaf that requires a gradient: torch.autograd.grad gives those of others"
            )
    return [cast("_Node", get_gradient_edge(t).node) for t in inputs]


def _refuse_hooks(leaf: torch.Tensor) -> None:
    """A hook of a leaf that asks torch's engine for its pass cannot run in this one."""
    for hook in [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]:
        code = getattr(hook, "__code__", None)
        if code is not None and not ASKS.isdisjoint(code.co_names):
            raise RuntimeError(
                f"backward: a hook of a leaf of shape {tuple(leaf.shape)} asks torch's engine for its pass, as those of"
                " torch.autograd.graph.register_multi_grad_hook do, and this is none of torch's: use torch's own"
                " backward(), or take the hook away"
            )


def _refuse_checkpoints(graph: _Graph, leaves: list[_Node]) -> None:
    """A node that computes a segment anew and goes backward over it reaches leaves beyond `inputs`."""
    leads = set(leaves)
    for node in graph.made:  # after those that it leads to
        if leads.isdisjoint(to for to, _ in graph.next[node]):
            continue
        leads.add(node)
        code = getattr(getattr(getattr(node, "_forward_cls", None), "backward", None), "__code__", None)
        if code is not None and "_is_checkpoint_valid" in code.co_names:
            raise RuntimeError(
                f"backward: {node.name()} goes backward over a segment of its own, as torch.utils.checkpoint with"
                " use_reentrant=True does, and knows nothing of inputs: leave that out, or checkpoint with"
                " use_reentrant=False"
            )


P = ParamSpec("P")
R = TypeVar("R")
Around = Callable[[], contextlib.AbstractContextManager[None]]

FUNCTIONS = "torch.autograd.Function"  # the group of nodes whose functions are the user's: torch runs them one by one

LARGE = 1 << 20  # bytes from which on to hand over costs less than a copy

#: Functions of torch's by which a hook asks for its engine's pass, as those of `register_multi_grad_hook` do.
ASKS = {"_current_graph_task_id", "_will_engine_execute_node", "queue_callback"}

CPU = torch.device("cpu")
Takes = tuple[tuple[int, ...], torch.dtype]
Gradients: TypeAlias = "torch.Tensor | tuple[torch.Tensor | None, ...] | None"


class _Meta(Protocol):
    """What torch says of a gradient that a node takes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    is_nested_tensor: bool


class _Node(Protocol):
    """A node of torch's graph. That of a `torch.autograd.Function` is its `ctx`, too, and has what stands last, where
    the others can be called.
    """

    @property
    def next_functions(self) -> Edges: ...
    @property
    def _input_metadata(self) -> Sequence[_Meta]: ...
    def name(self) -> str: ...
    def _sequence_nr(self) -> int: ...
    def __call__(self, *gradients: torch.Tensor | None) -> Gradients: ...

    variable: torch.Tensor  # of an `AccumulateGrad` alone
    needs_input_grad: tuple[bool, ...]

    def apply(self, *gradients: torch.Tensor | None) -> Gradients: ...


Edges = tuple[tuple[_Node | None, int], ...]


@functools.lru_cache(maxsize=4096)
def _slot(shape: tuple[int, ...], dtype: torch.dtype, accumulate: Any) -> fanin.Slot:
    """Slots are the same for all nodes that take the same."""
    return fanin.Slot(shape=tuple(shape), dtype=dtype, accumulate=accumulate)


class _Graph:
    """A `fanin.Node`, or a leaf, for each of torch's nodes that some of them lead to: `made[node]`."""

    def __init__(
        self,
        ends: list[tuple[_Node, int]],
        accumulate: DTypeLike | None,
        create_graph: bool,
        around: Callable[[], Around] | None = None,
    ) -> None:
        self.accumulate: object = accumulate
        self.recording = create_graph
        self.around = around() if around else None  # what each call of a node has around it, on whatever thread
        self.made: dict[_Node, fanin.Node | fanin.Leaf] = {}
        self.leaves: dict[_Node, fanin.Leaf] = {}
        self.takes: dict[_Node, list[Takes]] = {}  # what each node takes, slot by slot
        order, self.next = _in_order([node for node, _ in ends])
        producers: Counter[tuple[_Node | None, int]] = Counter(itertools.chain(ends, *self.next.values()))
        self.sums = {(node, i) for (node, i), count in producers.items() if count > 1}  # slots where several come
        self.with_sums = {node for node, _ in self.sums}
        for node in order:
            self.takes[node] = takes = _takes(node)
            variable = getattr(node, "variable", None)
            self.made[node] = self.node(node, len(takes)) if variable is None else self.leaf(node, variable)

    def slots(self, node: _Node) -> list[fanin.Slot | None]:
        """Of each gradient that a node takes: where several come, what their sum is. One alone is fitted by `fn`."""
        return [
            _slot(shape, dtype, self.accumulate) if (node, i) in self.sums else None
            for i, (shape, dtype) in enumerate(self.takes[node])
        ]

    def leaf(self, node: _Node, variable: torch.Tensor) -> fanin.Node | fanin.Leaf:
        recording, around = self.recording, self.around is not None  # `self` has the leaf: it would be a circle

        def accumulate(g: torch.Tensor) -> None:
            hooks = variable._backward_hooks
            for hook in list(hooks.values()) if hooks else ():  # what else runs is in AccumulateGrad
                changed = hook(g)
                g = g if changed is None else changed
            first = g.is_sparse and variable.grad is None and not hooks and not recording
            if first and _count(g) == _references(around):
                indices, values = parts_alone(g)
                # The indices of an Embedding are the user's own tensor.
                if values and (indices or g._values().nbytes >= LARGE):
                    _hand_over(variable, [_same_parts(g, copied=not indices)])
                    return
            node(g)

        [(shape, dtype)] = self.takes[node]
        slot = fanin.Slot() if recording else _slot(shape, dtype, None)
        self.leaves[node] = leaf = fanin.Leaf(like=slot, accumulate=self.anywhere(accumulate), name=node.name())
        if self.accumulate is None:
            return leaf
        slots = self.slots(node) if node in self.with_sums else None
        return fanin.Node(lambda g: g, 1, [(leaf, 0)], slots=slots, name=node.name())

    def node(self, node: _Node, inputs: int) -> fanin.Node:
        name = node.name()
        if name.startswith("BackwardHookFunction"):
            raise RuntimeError(
                "backward: a module has full backward hooks, which this pass would not call: use torch's own backward()"
            )
        edges: list[tuple[fanin.Node | fanin.Leaf, int] | None] = []
        takes: list[Takes | None] = []
        for to, slot in self.next[node]:
            edges.append(None if to is None else (self.made[to], slot))
            takes.append(None if to is None else self.takes[to][slot])
        call = node if hasattr(node, "__call__") else _custom(node)  # noqa: B004 - of torch's classes not all have it

        def fn(*sums: torch.Tensor | None) -> Gradients:
            made = call(*sums)
            gradients = made if isinstance(made, tuple) else (made,)
            for g, take in zip(gradients, takes, strict=False):
                if g is not None and take is not None and (g.shape != take[0] or g.dtype is not take[1]):
                    return _fitted(f"{name} returned", gradients, takes)
            return made

        if self.around is None and node not in self.with_sums:
            return fanin.Node(fn, inputs, edges, name=name)
        slots = self.slots(node) if node in self.with_sums else None
        group = FUNCTIONS if call is not node and self.around else None
        return fanin.Node(self.anywhere(fn), inputs, edges, slots=slots, name=name, group=group)

    def anywhere(self, fn: Callable[P, R]) -> Callable[P, R]:
        """The same function, for several workers: as torch's settings are where the pass was asked for."""
        around = self.around
        if around is None:
            return fn

        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with around():
                return fn(*args, **kwargs)

        return called


@functools.cache
def _references(around: bool) -> int:
    """How many references the function of a leaf counts of a gradient that nobody else has: asked of one."""
    counts: list[int] = []
    asks = _Graph([], None, False, _as_here if around else None).anywhere
    leaf = fanin.Leaf(like=fanin.Slot(), accumulate=asks(lambda g: counts.append(_count(g))))
    fanin.backward([(fanin.Node(lambda g: torch.zeros(()), edges=[(leaf, 0)]), 0, 1.0)])
    return counts[0]


def _count(g: torch.Tensor) -> int:
    return sys.getrefcount(g)


def _same_parts(g: torch.Tensor, copied: bool) -> torch.Tensor:
    """A sparse tensor of the same values and indices (L3), or of a copy of these."""
    indices = g._indices().clone() if copied else g._indices()
    return torch.sparse_coo_tensor(indices, g._values(), g.shape, is_coalesced=g.is_coalesced(), check_invariants=False)


class _Function(Protocol):
    def apply(self, *args: object) -> torch.Tensor: ...


class _Holder(Protocol):
    gradient: list[torch.Tensor]


def _forward(ctx: _Holder, variable: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
    ctx.gradient = gradient
    return variable.new_empty(())


def _backward(ctx: _Holder, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
    return ctx.gradient.pop(), None


# A node whose gradient nobody has beside it: torch's own engine lets `AccumulateGrad` take that over (L3), where it
# copies what it is called with.
_HandOver = cast(
    "_Function",
    types.new_class(
        "HandOver",
        (torch.autograd.Function,),
        exec_body=lambda names: names.update(forward=staticmethod(_forward), backward=staticmethod(_backward)),
    ),
)


def _hand_over(variable: torch.Tensor, gradient: list[torch.Tensor]) -> None:
    """The gradient, taken out of the list, is accumulated into a leaf."""
    with torch.enable_grad():
        end = _HandOver.apply(variable, gradient)
    torch.autograd.backward(end, torch.empty_like(end))


def _as_here() -> Around:
    """What makes a thread's settings those of this one: no gradients are recorded, and its autocast."""
    cpu, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=cpu):
            yield

    return around


def _takes(node: _Node) -> list[Takes]:
    """What torch says of each gradient that a node takes."""
    takes = []
    for meta in node._input_metadata:
        if meta.device != CPU and meta.device.type != "cpu":
            raise RuntimeError(
                f"backward: {node.name()} takes gradients on {meta.device}: this pass knows CPU tensors alone; use"
                " torch's own backward()"
            )
        if meta.is_nested_tensor:
            raise RuntimeError(
                f"backward: {node.name()} takes a gradient that is a nested tensor, which has no one shape: use torch's"
                " own backward()"
            )
        takes.append((tuple(meta.shape), meta.dtype))
    return takes


def _fitted(
    who: str, gradients: Sequence[torch.Tensor | None], takes: Sequence[Takes | None]
) -> tuple[torch.Tensor | None, ...]:
    """What the next nodes take, by torch's own operators, so that the bits are torch's: the sum over what was
    broadcast, the real part for a real tensor, its dtype (V2).
    """
    fitted = []
    for i, (g, take) in enumerate(zip(gradients, takes, strict=True)):
        if g is not None and take is not None:
            shape, dtype = take
            if g.shape != shape:
                if not _broadcasts(shape, g.shape):
                    raise ValueError(
                        f"{who} an invalid gradient at index {i}: expected {tuple(shape)}, got {tuple(g.shape)}"
                    )
                g = g.sum_to_size(shape)
            if g.is_complex() and not dtype.is_complex:
                g = g.real
            g = g.to(dtype)
        fitted.append(g)
    return tuple(fitted)


def _broadcasts(shape: tuple[int, ...], to: torch.Size) -> bool:
    """Whether a tensor of a shape can be expanded to another."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def _custom(node: _Node) -> Callable[..., Gradients]:
    """The node of a `torch.autograd.Function`: its `backward` gives a gradient for each argument of its `forward`, the
    edges are those of the arguments that are tensors.
    """
    needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
    places = [i for i, (to, _) in enumerate(node.next_functions) if to is not None]
    metas = node._input_metadata

    def call(*sums: torch.Tensor | None) -> Gradients:
        if any(g is None for g in sums) and _materializes(node):
            sums = tuple(
                torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device) if g is None else g
                for g, meta in zip(sums, metas, strict=True)
            )
        made = node.apply(*sums)
        made = made if isinstance(made, tuple) else (made,)
        expected = len(node.needs_input_grad)
        if (needed and len(made) <= needed[-1]) or any(g is not None for g in made[expected:]):
            raise RuntimeError(
                f"{node.name()} returned an incorrect number of gradients: expected {expected}, got {len(made)}"
            )
        for i in needed:
            if not (made[i] is None or isinstance(made[i], torch.Tensor)):
                raise TypeError(
                    f"{node.name()} returned an invalid gradient at index {i}: expected a tensor or None, got"
                    f" {type_of(made[i])}"
                )
        gradients: list[torch.Tensor | None] = [None] * len(node.next_functions)
        for place, i in zip(places, needed, strict=True):
            gradients[place] = made[i]
        return tuple(gradients)

    return call


class _Asked(Exception):
    """Ends a pass of torch's that only asked."""


def _materializes(node: Any) -> bool:
    """Whether a Function wants zeros for gradients that are undefined (`ctx.set_materialize_grads`): torch lets nobody
    read that, so its engine is had call the node, up to the `backward` of the user's.
    """
    got: list[torch.Tensor | None] = []

    def asks(ctx: object, *gradients: torch.Tensor | None) -> object:
        got.extend(gradients)
        raise _Asked

    meta = node._input_metadata[0]
    zeros = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
    further = next(GradientEdge(to, slot) for to, slot in node.next_functions if to is not None)
    # Of this object alone, before that of its class.
    node._forward_cls = type("Asks", (torch.autograd.Function,), {"backward": staticmethod(asks)})
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [further], [zeros], allow_unused=True)
    except _Asked:
        pass
    finally:
        del node._forward_cls
    return all(g is not None for g in got)


def _in_order(ends: list[_Node]) -> tuple[list[_Node], dict[_Node, Edges]]:
    """All nodes that the ends lead to, each after those that it leads to; where it can be, in the order in which torch
    made them, which is that in which it runs them. And what each leads to.
    """
    after: dict[_Node, Edges] = {}
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in after:
            after[node] = edges = node.next_functions
            for to, _ in edges:
                if to is not None:
                    waiting.append(to)
    leaves = [node for node in after if hasattr(node, "variable")]
    others = [node for node in after if not hasattr(node, "variable")]
    others.sort(key=operator.methodcaller("_sequence_nr"))
    by_age = leaves + others
    return by_age if _leads_back(by_age, after) else _by_depth(ends, after), after


def _leads_back(order: list[_Node], after: dict[_Node, Edges]) -> bool:
    """Whether each node comes after those that it leads to."""
    before: set[_Node | None] = {None}
    for node in order:
        for to, _ in after[node]:
            if to not in before:
                return False
        before.add(node)
    return True


def _by_depth(ends: list[_Node], after: dict[_Node, Edges]) -> list[_Node]:
    """Each after those that it leads to, whatever torch says of their age: of nodes that several threads have made."""
    done: dict[_Node, None] = {}
    waiting = [(node, False) for node in reversed(ends)]
    while waiting:
        node, left = waiting.pop()
        if left:
            done[node] = None
        elif node not in done:
            waiting.append((node, True))
            waiting += [(to, False) for to, _ in after[node] if to is not None and to not in done]
    return list(done)
