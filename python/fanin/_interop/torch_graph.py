"""torch's own graph on fanin's engine: `fanin.torch.backward`.

torch's nodes are callable from Python, and say what they lead to (`next_functions`), what they take (`_input_metadata`)
and when they were made (`_sequence_nr`). Each becomes a `fanin.Node`; where a gradient of a parameter ends, torch's
own `AccumulateGrad` is called, which knows how to make and add to `.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

import fanin

from .._words import counted
from .protocols import DTypeLike


def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    gradients: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    accumulate: DTypeLike | None = None,
    schedule: Callable[[tuple[fanin.Node, ...]], fanin.Node] | None = None,
) -> None:
    """`torch.autograd.backward` on fanin's engine: hooks of tensors in between and of nodes do NOT run (they cannot be
    seen from Python; `retain_grad` on such a tensor leaves its `.grad` as it was), the graph keeps its saved tensors
    until it is dropped, CPU tensors alone, no `create_graph`.

    Hooks of leaves (`register_hook`, `register_post_accumulate_grad_hook`) run. What can be seen to be missed is a
    RuntimeError: a hook or `retain_grad` of one of `tensors`, full backward hooks of modules, tensors that are not on
    the CPU. A segment of `torch.utils.checkpoint` without reentrance is computed anew for each tensor that it saved:
    right, and slow; with `use_reentrant=True` it is computed once.

    Every fan-in is an input buffer: the gradients of a bfloat16 tensor that is used many times are summed in float32
    and rounded once, the order of a sum is the graph's. `accumulate` names the dtype of the sums (rule A11).

    tensors, gradients: as for torch; a gradient may be left out for a tensor of one element. inputs: leaves to which
    the pass is limited. schedule: as for `fanin.backward`.

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
    graph = _Graph([node for node, _ in ends], accumulate)
    wanted = None if leaves is None else [graph.made[x] for x in leaves if x in graph.made]
    if wanted == []:
        return
    with torch.no_grad():
        fanin.backward(
            [(graph.made[node], slot, g) for (node, slot), g in zip(ends, firsts, strict=True)],
            wanted,
            schedule=schedule,
        )


def _gradients(roots: list[torch.Tensor], given: Any) -> list[torch.Tensor]:
    """One to begin with for each root."""
    gradients = [given] if isinstance(given, torch.Tensor) else [None] * len(roots) if given is None else list(given)
    if len(gradients) != len(roots):
        raise ValueError(f"backward: expected {counted(len(roots), 'gradient')} to begin with, got {len(gradients)}")
    for i, (t, g) in enumerate(zip(roots, gradients, strict=True)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"backward: tensor {i}: expected a tensor, got a {type(t).__name__}")
        if g is None and t.numel() != 1:
            raise ValueError(
                f"backward: tensor {i} has {t.numel()} elements and no gradient to begin with: give gradients="
            )
        if g is not None and not isinstance(g, torch.Tensor):
            raise TypeError(f"backward: gradient {i}: expected a tensor, got a {type(g).__name__}")
        if g is not None and g.shape != t.shape:
            raise ValueError(f"backward: gradient {i}: expected shape {tuple(t.shape)}, got {tuple(g.shape)}")
    return [torch.ones_like(t) if g is None else g for t, g in zip(roots, gradients, strict=True)]


def _end(i: int, t: torch.Tensor) -> tuple[Any, int]:
    """The node and the slot of a root."""
    if not t.requires_grad:
        raise RuntimeError(f"backward: tensor {i} does not require a gradient: nothing leads from it to a leaf")
    if t.grad_fn is not None and (t.retains_grad or t._backward_hooks):
        raise RuntimeError(
            f"backward: tensor {i} has {'retain_grad' if t.retains_grad else 'a hook'}, which this pass cannot serve:"
            " use torch's own backward(), or take it away"
        )
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def _leaves(inputs: list[torch.Tensor]) -> list[Any]:
    """The nodes where the gradients of leaves end."""
    for i, t in enumerate(inputs):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"backward: input {i}: expected a tensor, got a {type(t).__name__}")
        if not (t.is_leaf and t.requires_grad):
            raise ValueError(
                f"backward: input {i} is no leaf that requires a gradient: torch.autograd.grad gives those of others"
            )
    return [get_gradient_edge(t).node for t in inputs]


Takes = tuple[torch.Size, torch.dtype]


@functools.lru_cache(maxsize=4096)
def _slot(shape: torch.Size, dtype: torch.dtype, accumulate: Any) -> fanin.Slot:
    """Slots are the same for all nodes that take the same."""
    return fanin.Slot(shape=tuple(shape), dtype=dtype, accumulate=accumulate)


class _Graph:
    """A `fanin.Node`, or a leaf, for each of torch's nodes that some of them lead to: `made[node]`."""

    def __init__(self, ends: list[Any], accumulate: DTypeLike | None) -> None:
        self.accumulate: Any = accumulate
        self.made: dict[Any, Any] = {}
        self.takes: dict[Any, list[Takes]] = {}  # what each node takes, slot by slot
        for node in _in_order(ends):
            variable = getattr(node, "variable", None)
            self.made[node] = self.node(node) if variable is None else self.leaf(node, variable)

    def slots(self, node: Any) -> list[fanin.Slot]:
        """What torch says of each gradient that a node takes."""
        takes, slots = [], []
        for meta in node._input_metadata:
            if meta.device.type != "cpu":
                raise RuntimeError(
                    f"backward: {node.name()} takes gradients on {meta.device}: this pass knows CPU tensors alone; use"
                    " torch's own backward()"
                )
            shape, dtype = torch.Size(meta.shape), meta.dtype
            takes.append((shape, dtype))
            slots.append(_slot(shape, dtype, self.accumulate))
        self.takes[node] = takes
        return slots

    def leaf(self, node: Any, variable: torch.Tensor) -> Any:
        def accumulate(g: torch.Tensor) -> None:
            for hook in list((variable._backward_hooks or {}).values()):  # what else runs is in AccumulateGrad
                changed = hook(g)
                g = g if changed is None else changed
            node(g)

        [slot] = self.slots(node)
        return fanin.Leaf(like=(slot.shape, slot.dtype, "cpu"), accumulate=accumulate, name=node.name())

    def node(self, node: Any) -> Any:
        if node.name().startswith("BackwardHookFunction"):
            raise RuntimeError(
                "backward: a module has full backward hooks, which this pass would not call: use torch's own backward()"
            )
        edges = [None if to is None else (self.made[to], slot) for to, slot in node.next_functions]
        takes = [None if to is None else self.takes[to][slot] for to, slot in node.next_functions]
        call = node if hasattr(node, "__call__") else _custom(node)  # noqa: B004 - of torch's classes not all have it

        def fn(*sums: torch.Tensor | None) -> Any:
            made = call(*sums)
            gradients = made if isinstance(made, tuple) else (made,)
            for g, take in zip(gradients, takes, strict=False):
                if g is not None and take is not None and (g.shape != take[0] or g.dtype != take[1]):
                    return tuple(map(_fitted, gradients, takes))
            return gradients

        return fanin.Node(fn, edges=edges, slots=self.slots(node), name=node.name())


def _fitted(g: torch.Tensor | None, take: Takes | None) -> torch.Tensor | None:
    """What the next node takes, by torch's own operators, so that the bits are torch's: the sum over what was
    broadcast, the real part for a real tensor, its dtype. What does not fit stays as it is, and is refused (V2).
    """
    if g is None or take is None:
        return g
    shape, dtype = take
    if g.shape != shape and g.layout == torch.strided and _broadcasts(shape, g.shape):
        g = g.sum_to_size(shape)
    if g.is_complex() and not dtype.is_complex:
        g = g.real
    return g.to(dtype) if g.dtype != dtype else g


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of a shape can be expanded to another."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def _custom(node: Any) -> Callable[..., Any]:
    """The node of a `torch.autograd.Function`: its `backward` gives a gradient for each argument of its `forward`, the
    edges are those of the arguments that are tensors.
    """
    needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
    places = [i for i, (to, _) in enumerate(node.next_functions) if to is not None]
    metas = node._input_metadata

    def call(*sums: torch.Tensor | None) -> Any:
        if getattr(node, "materialize_grads", True):
            sums = tuple(
                torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device) if g is None else g
                for g, meta in zip(sums, metas, strict=True)
            )
        made = node.apply(*sums)
        made = made if isinstance(made, tuple) else (made,)
        if needed and len(made) <= needed[-1]:
            raise RuntimeError(
                f"{node.name()} returned an incorrect number of gradients: expected {len(node.needs_input_grad)}, got"
                f" {len(made)}"
            )
        gradients: list[torch.Tensor | None] = [None] * len(node.next_functions)
        for place, i in zip(places, needed, strict=True):
            gradients[place] = made[i]
        return tuple(gradients)

    return call


def _in_order(ends: list[Any]) -> list[Any]:
    """All nodes that the ends lead to, each after those that it leads to; where it can be, in the order in which torch
    made them, which is that in which it runs them.
    """
    after: dict[Any, None] = {}
    waiting = [(node, False) for node in reversed(ends)]
    while waiting:
        node, left = waiting.pop()
        if left:
            after[node] = None
        elif node not in after:
            waiting.append((node, True))
            waiting += [(to, False) for to, _ in node.next_functions if to is not None and to not in after]
    by_age = sorted(after, key=lambda node: (not hasattr(node, "variable"), node._sequence_nr()))
    place = {node: i for i, node in enumerate(by_age)}
    ordered = all(place[to] < place[node] for node in by_age for to, _ in node.next_functions if to is not None)
    return by_age if ordered else list(after)
