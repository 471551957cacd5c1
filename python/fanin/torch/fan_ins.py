"""Fan-ins of a pass of torch's own engine that fanin sums: `fanin.torch.backward`.

torch's engine runs the pass and adds gradients two by two, in their dtype. Where that loses bits, hooks of the nodes
that produce the gradients keep them in an input buffer. In the order of this file: which fan-ins a graph has, which of
them fanin sums, the hooks of one pass, and the call.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

import fanin
from fanin import _core

from .._checks import flag, sequence
from .._interop.classes import attribute
from .._interop.protocols import DTypeLike
from .._words import names_nearest, type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: A node of torch's graph.
Node: TypeAlias = Any
#: A node, and the index of one of the gradients that it takes; or of one of its edges, by which it makes one.
Place: TypeAlias = tuple[Node, int]
#: The gradients that a node makes, one for each edge.
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]

TENSORS = torch.Tensor, GradientEdge
SEVERAL = 3  # the sum of fewer gradients has the same bits in a wider dtype
NARROW = 4  # bytes of an element, below which sums are wider than the gradient
HOST = torch.device("cpu")
TORCHS = -1
NO_PASS = -1  # torch counts its passes from 0
BAND = 8000  # nodes that torch may free one within the other: each takes some 200 bytes of the stack
HOLDS = "fanin: nodes that are freed after this one"  # an item of a node's `metadata`

_task: Callable[[], int] = torch._C._current_graph_task_id


@names_nearest
def backward(
    tensors: torch.Tensor | GradientEdge | Sequence[torch.Tensor | GradientEdge],
    gradients: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    inputs: torch.Tensor
    | GradientEdge
    | Sequence[torch.Tensor | GradientEdge]
    | dict[Any, torch.Tensor | GradientEdge]
    | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    accumulate: DTypeLike | None = None,
    at: torch.Tensor | GradientEdge | Sequence[torch.Tensor | GradientEdge] = (),
) -> None:
    """Run `torch.autograd.backward`, with one rounding where many gradients meet.

    torch's engine runs the pass: all hooks, checkpoints, replicas, compiled models and errors are torch's own. Where a
    tensor of 16 bits or fewer is used three times or more, torch rounds each partial sum; here such gradients are
    summed in float32, in the order in which torch's engine makes them on one thread, and rounded once. Hooks of the
    tensor, and `retain_grad`, receive that sum. Sums of wider gradients stay torch's, which rounds them alike, unless
    `accumulate` or `at` is given.

    Parameters
    ----------
    tensors : torch.Tensor, or sequence of torch.Tensor or GradientEdge
        As for torch. In a pass from a GradientEdge every sum is torch's own.
    gradients : torch.Tensor, or sequence of torch.Tensor or None
        As for torch (`grad_tensors`).
    inputs : torch.Tensor, or sequence or dict of torch.Tensor or GradientEdge
        As for torch. Of a dict its values.
    retain_graph, create_graph : bool
        As for torch. With `create_graph` every sum is torch's own, and can be differentiated.
    accumulate : DTypeLike or "exact"
        The dtype of the sums (rule A11): every floating-point or complex tensor that is used three times or more is
        summed so.
    at : torch.Tensor, or sequence of torch.Tensor or GradientEdge
        Leaves or others whose gradient fanin sums from two contributions on, whatever its dtype.

    Raises
    ------
    TypeError
        Not a tensor in `tensors`, `inputs` or `at`.
    ValueError
        `accumulate` or `at` with `create_graph`; a dtype in which the sum of a gradient cannot run.
    RuntimeError
        Whatever torch raises. A tensor in `at` that is not in the graph. Inside a functorch transform or under compiled
        autograd; where `accumulate` or `at` names
        a sum that is torch's: that of a tensor that is sparse, nested, of a dtype that fanin does not sum (complex32),
        or on another device than the CPU and CUDA, one in a pass from a GradientEdge, or the sum of a gradient that
        comes in another layout or dtype. On CUDA: the last of the gradients of a tensor is undefined, or the first of a
        layout that only torch adds is not the first of all.

    Notes
    -----
    A sum is left to torch if it is sparse or nested, of a dtype that fanin does not sum (complex32, some of float8),
    or on a device other than the CPU and CUDA; if a `torch.autograd.Function` may add into it by
    `ctx.input_grad_buffers`; on the CPU from the first gradient on that has another layout than strided, or is of a
    subclass; and in passes from a tensor that is sparse or nested.

    Source: hooks of nodes (`torch.autograd.graph.Node.register_hook`).

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)  # doctest: +SKIP
    >>> fanin.torch.backward(sum((w * x).sum() for x in (256.0, 1.0, 1.0)))  # doctest: +SKIP
    >>> w.grad  # doctest: +SKIP
    tensor([258., 258., 258.], dtype=torch.bfloat16)
    """
    create_graph = flag("backward: create_graph", create_graph)
    if retain_graph is not None:
        retain_graph = flag("backward: retain_graph", retain_graph)
    named = []
    if type(at) is not tuple or at:  # to find an empty one by `_several` takes 7 us
        named = [_place(f"backward: at: item {i}", t) for i, t in enumerate(_several("at", at))]
    wanted = "accumulate" if accumulate is not None else "at" if named else None
    if accumulate is not None:
        _check_dtype(accumulate)
    if create_graph and wanted is not None:
        raise ValueError(f"backward: {wanted}= with create_graph=True: sums that are recorded are torch's own")
    _check_surroundings()
    roots = _several("tensors", tensors)
    if gradients is not None:
        gradients = _several("gradients", gradients, undefined=True)
    if inputs is not None:
        inputs = _several("inputs", inputs)
    sums = None
    if not create_graph and _are_dense(roots, wanted):
        chosen, producers = _chosen(_fan_ins([*map(_place_of_root, roots)], inputs, named), accumulate, {*named})
        if chosen:
            roots = _aliases(roots)
            begin = [t.grad_fn for t in roots]
            nodes, layout = _core._in_order(producers, begin)
            sums = _sums_of(chosen, accumulate, layout)
    if sums is None:
        torch.autograd.backward(roots, gradients, retain_graph, create_graph, inputs=inputs)
        return
    with _Hooks(sums, begin, nodes):
        torch.autograd.backward(roots, gradients, retain_graph, create_graph, inputs=inputs)
    sums.check()
    _keep(sums)


def _aliases(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """An alias of each root, so that a gradient to begin with comes from a node of this pass alone, as others come from
    theirs. The node of an alias passes on a gradient of any layout.
    """
    is_recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    is_own = not torch._C._len_torch_function_stack() and all(type(t) is torch.Tensor for t in roots)
    if is_recorded and is_own:  # without the contexts below it takes a tenth of the time
        return [t[...] for t in roots]
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        return [torch.ops.aten.alias(t) for t in roots]


def _check_dtype(accumulate: DTypeLike) -> None:
    """TypeError or ValueError if it is no dtype of sums."""
    if isinstance(accumulate, str) and accumulate == "exact":
        return
    try:
        _core.dtype_name(accumulate)
    except (TypeError, ValueError) as e:
        raise type(e)(f"backward: accumulate: {e}") from None


def _check_surroundings() -> None:
    """RuntimeError where torch's engine does not run the nodes of the graph."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "backward: called inside a functorch transform: use torch.func.grad or torch.func.vjp instead"
        )
    if attribute("torch._dynamo.compiled_autograd", "compiled_autograd_enabled"):
        raise RuntimeError("backward: compiled autograd is enabled, which makes every sum itself: disable it here")


def _are_dense(roots: list[Any], wanted: str | None) -> bool:
    """Whether fanin can sum in a pass from these. RuntimeError if it cannot, but was to."""
    if not all(isinstance(t, GradientEdge) or t.requires_grad for t in roots):
        return False  # torch raises
    for t in roots:
        if isinstance(t, GradientEdge) or t.layout != torch.strided or t.is_nested:
            if wanted is not None:
                raise RuntimeError(
                    f"backward: {wanted}= with a GradientEdge or a sparse or nested tensor, whose pass is torch's alone"
                )
            return False
    return True


# ---- the fan-ins of a graph


def _several(name: str, given: Any, undefined: bool = False) -> list[Any]:
    """The tensors and edges that an argument has. undefined: None may be among them."""
    if isinstance(given, TENSORS):
        return [given]
    if name == "inputs" and type(given) is dict:
        given = given.values()
    values = sequence(f"backward: {name}", given, "tensors")
    for i, x in enumerate(values):
        if not isinstance(x, TENSORS) and not (undefined and x is None):
            raise TypeError(f"backward: {name}: item {i}: expected a tensor, got {type_of(x)}")
    return values


def _place(what: str, x: torch.Tensor | GradientEdge) -> Place:
    """Where the gradient of a tensor arrives."""
    if isinstance(x, GradientEdge):
        return x.node, x.output_nr
    if not x.requires_grad:
        raise RuntimeError(f"{what}: expected a tensor that requires a gradient")
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
        edge = get_gradient_edge(x)
    return edge.node, edge.output_nr


def _place_of_root(t: torch.Tensor) -> Place:
    node = t.grad_fn if type(t) is torch.Tensor else None
    if node is None:
        return _place("backward: tensors", t)
    return node, t.output_nr


def _fan_ins(roots: list[Place], inputs: list[Any] | None, named: Iterable[Place]) -> dict[Place, list[Place]]:
    """Of each place at which several gradients arrive: the nodes and edges that they come from. The gradient that the
    pass begins with at a root comes from None, and the number of the root. RuntimeError if the graph lacks a place that
    `at` names.
    """
    named = [*named]
    is_asked = bool(named) or inputs is not None
    nodes, several = _core._fan_ins(roots, 2 if named else SEVERAL, 0 if is_asked else BAND)
    if nodes is None:
        return several
    for i, (node, _) in enumerate(named):
        if node not in nodes:
            raise RuntimeError(
                f"backward: at: item {i}: its gradient ({node.name()}) is not in the graph of the pass: expected a"
                " tensor that was used for one of the tensors"
            )
    if len(nodes) > BAND:
        _part(nodes, [node for node, _ in roots])
    if inputs is None:
        return several
    targets = {_place("backward: inputs", x)[0] for x in inputs}
    runs = _leading(nodes, targets)
    reached = runs | targets
    return {
        place: [p for p in from_ if p[0] is None or p[0] in runs]
        for place, from_ in several.items()
        if place[0] in reached
    }


def _part(nodes: Iterable[Node], roots: Iterable[Node]) -> None:
    """Part a deep graph into bands, which torch frees one after the other.

    torch 2.13 frees a node that Python has read within the node before it, so a long chain overflows the stack. A node
    has the band of its depth, the length of the longest path to it. The first nodes of each band are held by `metadata`
    of those of the band before, which torch drops after the edges of its node.
    """
    before: defaultdict[Node, int] = defaultdict(int)
    for node in nodes:
        for to, _ in node.next_functions:
            before[to] += 1
    depth: defaultdict[Node, int] = defaultdict(int)
    ready = [node for node in dict.fromkeys(roots) if not before[node]]
    while ready:
        node = ready.pop()
        for to, _ in node.next_functions:
            depth[to] = max(depth[to], depth[node] + 1)
            before[to] -= 1
            if not before[to] and to is not None:
                ready.append(to)
    first: defaultdict[int, dict[Node, None]] = defaultdict(dict)
    for node in nodes:
        for to, _ in node.next_functions:
            if to is not None and depth[to] // BAND > depth[node] // BAND:
                first[depth[to] // BAND][to] = None
    held: list[Node] = []
    for band in sorted(first, reverse=True):
        for node in first[band]:
            node.metadata[HOLDS] = held
        held = [*first[band]]
    for node in roots:
        node.metadata[HOLDS] = held


def _leading(nodes: Iterable[Node], targets: set[Node]) -> set[Node]:
    """The nodes from which one of the targets is reached: torch's engine runs these alone."""
    before: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for to, _ in node.next_functions:
            before[to].append(node)
    leading: set[Node] = set()
    waiting = [*targets]
    while waiting:
        for node in before[waiting.pop()]:
            if node not in leading:
                leading.add(node)
                waiting.append(node)
    return leading


# ---- which of them fanin sums


class _FanIn(NamedTuple):
    """Gradients that fanin sums."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    asked: bool  # by `accumulate` or `at`: it is not left to torch in silence
    producers: int  # how many gradients come, some of which may be undefined


def _chosen(
    fan_ins: dict[Place, list[Place]], accumulate: DTypeLike | None, named: set[Place]
) -> tuple[list[_FanIn], list[list[Place]]]:
    """What fanin sums, and of each the nodes and edges that its gradients come from."""
    chosen, producers_of = [], []
    places: dict[Node, Any] = {}  # what torch knows of each place of a node: read once, as it is a new list each time
    for place, producers in fan_ins.items():
        node, index = place
        asked = place in named or accumulate is not None
        if len(producers) < (2 if place in named else SEVERAL):
            continue
        if node not in places:
            places[node] = node._input_metadata
        what = places[node][index]
        dtype = what.dtype
        if not (dtype.is_floating_point or dtype.is_complex) or not (asked or dtype.itemsize < NARROW):
            continue
        device = what.device
        on_host = device == HOST
        why = None
        if what.is_nested_tensor:
            why = "is nested"
        elif not on_host and device.type != "cuda":
            why = f"is on {device.type}"
        elif BUFFERS and any(
            isinstance(producer, torch.autograd.function.BackwardCFunction) for producer, _ in producers
        ):
            why = "is made by a torch.autograd.Function, which may add into it"
        elif not _is_summed(dtype):
            why = f"has {dtype}"
        elif accumulate is not None:
            _check_sum(node, dtype, accumulate)
        if why is None:
            chosen.append(_FanIn(node.name(), tuple(what.shape), dtype, on_host, asked, len(producers)))
            producers_of.append(producers)
        elif asked:
            raise RuntimeError(
                f"backward: the gradient of {node.name()} {why}: only torch sums it: leave accumulate= and at= out"
            )
    return chosen, producers_of


@functools.cache
def _is_summed(dtype: torch.dtype) -> bool:
    try:
        _core.dtype_name(dtype)
    except TypeError:
        return False
    return True


def _check_sum(node: Node, dtype: torch.dtype, accumulate: DTypeLike) -> None:
    """ValueError if the sum of gradients of a dtype cannot run in another."""
    try:
        fanin.add_n([torch.empty(0, dtype=dtype)], accumulate=accumulate)
    except ValueError:
        raise ValueError(
            f"backward: accumulate={accumulate}: the gradients of {node.name()} have {dtype}, whose sum cannot run in"
            " it (A11): expected a wider dtype of the same kind"
        ) from None


#: Whether a Function may add into the place of a sum itself.
BUFFERS = hasattr(torch.autograd.function.FunctionCtx, "input_grad_buffers")


# ---- the hooks of a pass


class _Sums:
    """The sums of a pass, and the hooks that make them.

    The hooks are the last of their nodes, so that others receive what the node made.
    On the CPU the first gradient of a sum becomes a place for the sum, which torch keeps, and the later ones undefined;
    when all have come, defined or not, the sum is written there. On CUDA, where torch has recorded an event when it got
    the place, the last gradient becomes the sum, and the others undefined.
    """

    def __init__(self, fan_ins: list[_FanIn], accumulate: DTypeLike | None, layout: bytes, checked: bool) -> None:
        self.fan_ins, self.form = fan_ins, (*fan_ins, layout, checked)
        self.is_kept = accumulate is None and all(f.on_host for f in fan_ins)
        slots = [fanin.Slot(f.shape, f.dtype, accumulate=accumulate, name=f.name) for f in fan_ins]
        self.buffer = fanin.InputBuffer(slots, name="backward")
        self.coming = [f.producers for f in fan_ins]
        self.kept = [0] * len(fan_ins)  # how many gradients each slot of the buffer has; TORCHS: torch sums the others
        self.places: dict[int, torch.Tensor] = {}  # by slot: where the sum goes
        self.task = [NO_PASS]  # other passes may run the same nodes
        edges: defaultdict[int, list[tuple[int, int, int, object]]] = defaultdict(list)
        numbers = iter(memoryview(layout).cast("i").tolist())
        for node, i, slot, key in zip(numbers, numbers, numbers, numbers, strict=True):
            f = fan_ins[slot]
            edges[node].append((i, slot, key, f.dtype if f.on_host and not checked else None))
        lock = threading.Lock()  # nodes of several devices run on several threads
        self.hooks = _core._producers(
            self.buffer, self.task, _task, self.coming, self.kept, self.places,
            _empty_like if checked else torch.empty_like, self.buffer.add,
            self.buffer.take, lock.acquire, lock.release, self.arrive, [*map(tuple, edges.values())],
        )  # fmt: skip

    def begin(self) -> None:
        """Count anew."""
        self.coming[:] = [f.producers for f in self.fan_ins]
        self.kept[:] = [0] * len(self.fan_ins)

    def end(self) -> None:
        """Drop what an error has left."""
        self.task[0] = NO_PASS
        self.places.clear()
        self.buffer.clear()

    def enter(self, _: Gradients) -> None:
        self.task[0] = _task()

    def arrive(self, slot: int, key: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """What goes on to torch in the place of a gradient."""
        self.coming[slot] -= 1
        last = not self.coming[slot]
        if self.kept[slot] == TORCHS:
            return gradient
        if gradient is None:
            return self.summed(slot) if last else None
        if _is_anomaly(gradient):
            return gradient  # torch raises, and names the node
        if not self.fits(slot, gradient):
            return self.leave_to_torch(slot, gradient)
        if last and not self.kept[slot]:
            return gradient
        self.buffer.add(slot, gradient, key=key)
        self.kept[slot] += 1
        if last:
            return self.summed(slot, gradient)
        if self.kept[slot] == 1 and self.fan_ins[slot].on_host:
            place = self.places[slot] = _empty_like(gradient)
            return place
        return None

    def fits(self, slot: int, gradient: torch.Tensor) -> bool:
        same_dtype = gradient.dtype == self.fan_ins[slot].dtype
        return type(gradient) is torch.Tensor and gradient.layout == torch.strided and same_dtype

    def summed(self, slot: int, last: torch.Tensor | None = None) -> torch.Tensor | None:
        """All gradients have come."""
        if not self.kept[slot]:
            return None
        place = self.places.pop(slot, None)
        if place is not None:
            self.buffer.take(slot=slot, out=place)
            return None
        if last is None:
            raise RuntimeError(
                f"backward: the last of the gradients of {self.fan_ins[slot].name} is undefined, in whose place the sum"
                " of the others would go: use torch's own backward()"
            )
        total: torch.Tensor = self.buffer.take(slot=slot)
        return total

    def leave_to_torch(self, slot: int, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of a slot is torch's from this gradient on."""
        f = self.fan_ins[slot]
        if f.asked or (self.kept[slot] and slot not in self.places):
            raise RuntimeError(
                f"backward: the sum of the gradients of {f.name}: expected {f.dtype} in the layout torch.strided, got"
                f" {gradient.dtype} in {gradient.layout} ({type_of(gradient)}), which torch alone sums: leave"
                " accumulate= and at= out, or use torch's own backward()"
            )
        if self.kept[slot]:
            self.buffer.take(slot=slot, out=self.places.pop(slot))
        self.kept[slot] = TORCHS
        return gradient

    def check(self) -> None:
        """After a pass: RuntimeError if not every gradient came that the graph had."""
        for f, coming in zip(self.fan_ins, self.coming, strict=True):
            if coming and coming < f.producers:
                raise RuntimeError(
                    f"backward: {f.producers - coming} of {f.producers} gradients of {f.name} came: the graph changed"
                    " while the pass ran, and its sum is wrong"
                )


class _Hooks(_core.Block):
    """A block in which the hooks of some sums are there. roots, nodes: those that begin the pass, and the producers."""

    def __init__(self, sums: _Sums, roots: list[Node], nodes: list[Node]) -> None:
        self.sums, self.roots, self.nodes = sums, roots, nodes
        self.handles: list[Any] = []

    def _begin(self) -> None:
        """Register the hooks. Between a hook and its place in the list no Python runs, which Ctrl-C could end."""
        self.sums.begin()
        register = [node.register_hook for node in self.nodes]
        self.handles.extend(node.register_prehook(self.sums.enter) for node in self.roots)
        self.handles.extend(map(operator.call, register, self.sums.hooks))

    def _end(self, _: BaseException | None) -> None:
        """Remove the hooks. May be repeated."""
        self.sums.end()
        _core._remove_hooks(self.handles)


KEPT = 16
#: Sums that passes have left, by the form of their fan-ins.
_kept: dict[Any, _Sums] = {}
os.register_at_fork(after_in_child=_kept.clear)


def _sums_of(fan_ins: list[_FanIn], accumulate: DTypeLike | None, layout: bytes) -> _Sums:
    """Sums for a pass: those of an earlier one, where its fan-ins had the same form."""
    checked = torch.is_anomaly_enabled()  # `arrive` checks every gradient
    if accumulate is None:
        kept = _kept.pop((*fan_ins, layout, checked), None)
        if kept is not None:
            return kept
    return _Sums(fan_ins, accumulate, layout, checked)


def _keep(sums: _Sums) -> None:
    """Keep the sums of a pass that went well for the next one."""
    if not sums.is_kept:
        sums.hooks.clear()  # which refer to them
        return
    if len(_kept) >= KEPT:
        _kept.clear()
    _kept[sums.form] = sums


def _empty_like(gradient: torch.Tensor) -> torch.Tensor:
    """Memory for a sum. In anomaly mode torch refuses NaN, which memory that is not set may have."""
    return torch.zeros_like(gradient) if torch.is_anomaly_enabled() else torch.empty_like(gradient)


def _is_anomaly(gradient: torch.Tensor) -> bool:
    """Whether anomaly mode refuses a gradient."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() and bool(gradient.isnan().any())
