"""torch's own graph on fanin's engine: `fanin.torch.backward`.

torch's nodes are callable from Python and have their edges (`next_functions`), the metadata of their gradients
(`_input_metadata`) and the order in which they were made (`_sequence_nr`). Each becomes a `fanin.Node`. At a parameter
torch's own engine runs its `AccumulateGrad`, with all its hooks. The whole pass runs inside a node of a pass of
torch's, so that code that queries torch's engine for the current pass finds one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

import fanin
from fanin import _core

from .._checks import flag, integer, sequence
from .._interop.classes import attribute
from .._interop.protocols import DTypeLike
from .._interop.sharing import parts_alone
from .._interop.torch_leaves import sharded
from .._words import counted, names_nearest, note, type_of
from .accumulation import on_new_thread

if TYPE_CHECKING:
    from ..dist.reducer import Reducer

__tracebackhide__ = True  # no frames of ours in reports of pytest


@names_nearest
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
    reducer: Reducer | None = None,
) -> None:
    """Run `torch.autograd.backward` on fanin's engine, for dense and sparse CPU tensors.

    Every fan-in is an input buffer: the gradients of a bfloat16 tensor that is used many times are summed in float32
    and rounded once, in the order of the graph. With `create_graph=True` the pass is recorded: torch's own `+` makes
    the sums, and `.grad` can be differentiated. The graph keeps its saved tensors until it is dropped, whatever
    `retain_graph` is: only torch's engine can free them.

    Hooks run: those of tensors, leaves and in between, `retain_grad`, those of nodes and of modules; so replicas of
    `DistributedDataParallel` are synchronised, with one rounding by `ddp_hook`. `torch.utils.checkpoint` without
    reentrance computes a segment again once (with several workers: once for each tensor that it saved). A compiled
    model (`torch.compile`, AOTAutograd) may reuse the memory of its saved tensors, unless `retain_graph` is True: a
    second pass over it is then refused. In `torch.autograd.detect_anomaly()` a node that returns NaN is a RuntimeError,
    and errors have a note of where the node was made.

    Parameters
    ----------
    tensors : torch.Tensor, or sequence of torch.Tensor
        As for torch.
    gradients : torch.Tensor, or sequence of torch.Tensor or None
        As for torch. May be left out for a tensor of one element.
    inputs : torch.Tensor, or sequence of torch.Tensor
        The leaves to which the pass is limited. Default: all.
    retain_graph : bool
        Whether compiled models keep their saved tensors. Default: `create_graph`.
    create_graph : bool
        Whether the pass is recorded, so that it can be differentiated.
    accumulate : DTypeLike
        The dtype of the sums (rule A11). A ValueError with `create_graph`: sums in another dtype are not recorded.
    schedule : callable
        As for `fanin.backward`.
    reducer : fanin.dist.Reducer
        The gradients of its parameters are summed over ranks; their sums travel while the pass runs, and are added to
        `.grad` at its end. Excludes `create_graph`.
    workers : int
        The number of threads on which nodes run, with the same bits for every number; without `schedule` and
        `create_graph`. Threads have the caller's autocast, and no other setting that torch keeps for each thread. Hooks
        of leaves run on any of them. Nodes of `torch.autograd.Function`s, `checkpoint(use_reentrant=True)` among them,
        run one at a time. Checkpoints without reentrance and compiled models need 1: two nodes may compute a segment
        again at once, and on another thread torch reports to a compiled node that the graph is retained.

    Raises
    ------
    TypeError
        Not a tensor, or not a `fanin.dist.Reducer`.
    ValueError
        A missing gradient, a shape, `inputs` that are no leaves, or `create_graph` with `reducer`.
    fanin.PeerError
        With `reducer`: another rank failed, is gone, or brings something else.
    RuntimeError
        A tensor without a graph; hooks that need a pass of torch's engine (`register_multi_grad_hook`,
        `queue_callback`); leaves that FSDP or DTensor shards; checkpoints with reentrance together with `inputs` (as in
        torch); tensors that are not on the CPU; nested tensors; a call inside a functorch transform or under compiled
        autograd. An exception of a node is raised with a note that names
        the node. After an error each `.grad` has its whole gradient or none of it.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> w = torch.ones(3, requires_grad=True)  # doctest: +SKIP
    >>> fanin.torch.backward((w * w).sum())  # doctest: +SKIP
    >>> w.grad  # doctest: +SKIP
    tensor([2., 2., 2.])
    """
    if reducer is not None:
        from ..dist.reducer import Reducer

        if not isinstance(reducer, Reducer):
            raise TypeError(f"backward: reducer: expected a fanin.dist.Reducer, got {type_of(reducer)}")
        with reducer._reduced(block=True):  # if the pass raises, the passes of all ranks end
            if create_graph:
                raise ValueError("backward: a pass with reducer= cannot record itself (create_graph=True)")
            backward(
                tensors,
                gradients,
                inputs,
                retain_graph=retain_graph,
                accumulate=accumulate,
                schedule=schedule,
                workers=workers,
            )
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "backward: called inside a functorch transform: use torch.func.grad or torch.func.vjp instead"
        )
    if attribute("torch._dynamo.compiled_autograd", "compiled_autograd_enabled"):
        raise RuntimeError("backward: compiled autograd is enabled, which compiles torch's own passes: disable it here")
    create_graph = flag("backward: create_graph", create_graph)
    if retain_graph is not None:
        retain_graph = flag("backward: retain_graph", retain_graph)
    integer("backward: workers", workers)
    if accumulate is not None and not isinstance(accumulate, str):
        _core.dtype_name(accumulate)  # refuses what is none
    roots: list[Any] = [tensors]
    if not isinstance(tensors, torch.Tensor | GradientEdge):
        roots = sequence("backward: tensors", tensors, "tensors")
    firsts = _gradients(roots, gradients)
    ends = [_end(i, t) for i, t in enumerate(roots)]
    leaves = None
    if inputs is not None:
        several = [inputs] if isinstance(inputs, torch.Tensor) else sequence("backward: inputs", inputs, "tensors")
        leaves = _leaves(several)
    if leaves == []:
        raise ValueError("backward: inputs is empty: leave it out for all leaves")
    if create_graph and accumulate is not None:
        raise ValueError("backward: accumulate= with create_graph=True: sums that are recorded are torch's own")
    retain = create_graph if retain_graph is None else retain_graph
    graph = _Graph(ends, accumulate, create_graph, _as_here if workers > 1 else None, retain)
    wanted = None if leaves is None else [graph.leaves[x] for x in leaves if x in graph.leaves]
    if wanted == []:
        return
    reached = [node.variable for node in (graph.leaves if leaves is None else leaves)]
    for leaf in reached:
        for hook in [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]:
            code = getattr(hook, "__code__", None)
            if code is not None and not PASS_QUERIES.isdisjoint(code.co_names):
                raise RuntimeError(f"backward: a hook of a leaf of shape {tuple(leaf.shape)} {NO_PASS}")
    for i, what in sharded(
        reached
    ):  # FSDP gathers and scatters in hooks of C++; the gradients of DTensors are DTensors
        raise RuntimeError(
            f"backward: leaf {i} of {len(reached)}, of shape {tuple(reached[i].shape)}, is sharded by {what}, whose"
            " gradients this pass would leave in pieces that are not summed: use torch's own backward(); FSDP2 sums"
            " them with one rounding by set_custom_reduce_scatter(fanin.torch.ReduceScatter())"
        )
    if leaves is not None:
        _refuse_checkpoints(graph, leaves)

    def run() -> None:
        with torch.set_grad_enabled(create_graph):
            fitted = _fitted("backward was given", firsts, [graph.takes[node][slot] for node, slot in ends])
            fanin.backward(
                [(graph.made[node], slot, g) for (node, slot), g in zip(ends, fitted, strict=True)],
                wanted,
                create_graph=create_graph,
                schedule=schedule,
                workers=workers,
            )

    try:
        _inside(run, retain)
    except RuntimeError as e:
        if workers > 1 and "checkpoint" in str(e):
            note(
                e,
                f"backward: workers={workers}: a checkpoint without reentrance computes its segment for one thread:"
                " use workers=1",
            )
        raise


def _gradients(
    roots: list[torch.Tensor], given: torch.Tensor | Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor]:
    """One to begin with for each root."""
    gradients: list[Any] = [None] * len(roots)
    if isinstance(given, torch.Tensor):
        gradients = [given]
    elif given is not None:
        gradients = sequence("backward: gradients", given, "tensors")
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
    edge = _edge_of(t)
    return edge.node, edge.output_nr


def _edge_of(t: torch.Tensor) -> GradientEdge:
    """`get_gradient_edge`, without the node that a class with `__torch_function__` puts before a leaf's."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(t)


def _leaves(inputs: list[torch.Tensor]) -> list[_Node]:
    """The nodes where the gradients of leaves end."""
    for i, t in enumerate(inputs):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"backward: input {i}: expected a tensor, got {type_of(t)}")
        if not (t.is_leaf and t.requires_grad):
            raise ValueError(
                f"backward: input {i} is no leaf that requires a gradient: torch.autograd.grad gives those of others"
            )
    nodes = [_edge_of(t).node for t in inputs]
    for i, (t, node) in enumerate(zip(inputs, nodes, strict=True)):
        if getattr(node, "variable", None) is not t:
            raise RuntimeError(
                f"backward: input {i} ({type_of(t)}) has no AccumulateGrad node, through which torch adds to .grad:"
                " expected a torch.Tensor or torch.nn.Parameter"
            )
    return nodes


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
                " use_reentrant=True does, and cannot be limited to inputs: leave that out, or checkpoint with"
                " use_reentrant=False"
            )


P = ParamSpec("P")
R = TypeVar("R")
Around = Callable[[], contextlib.AbstractContextManager[None]]

FUNCTIONS = "torch.autograd.Function"  # the group of nodes whose functions are the user's: torch runs them one by one

LARGE = 1 << 20  # bytes from which on to hand over costs less than a copy

ENGINE = torch.autograd.Variable._execution_engine

NO_PASS = (
    "queries torch's engine for its pass, as torch.autograd.graph.register_multi_grad_hook does, but this pass is not"
    " torch's: use torch's own backward(), or remove the hook"
)

#: Functions of torch that read the pass of its engine, as hooks of `register_multi_grad_hook` do.
PASS_QUERIES = {"_current_graph_task_id", "_will_engine_execute_node", "queue_callback"}

CPU = torch.device("cpu")
Takes: TypeAlias = "tuple[tuple[int, ...], torch.dtype | None]"  # no dtype: it is taken as it comes
Gradients: TypeAlias = "torch.Tensor | tuple[torch.Tensor | None, ...] | None"


#: A node of torch's graph. That of a `torch.autograd.Function` is also its `ctx`, and cannot be called. `variable` is
#: an attribute of an `AccumulateGrad` alone.
_Node: TypeAlias = Any
Edges = tuple[tuple[_Node | None, int], ...]


@functools.lru_cache(maxsize=4096)
def _slot(shape: tuple[int, ...], dtype: torch.dtype | None, accumulate: Any) -> fanin.Slot:
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
        retain: bool = True,
    ) -> None:
        self.accumulate: object = accumulate
        self.recording = create_graph
        self.retain = retain
        self.anomaly = torch.is_anomaly_enabled()
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
            first = g.is_sparse and variable.grad is None and not variable._backward_hooks and not recording
            if first and sys.getrefcount(g) == _references(around):
                indices, values = parts_alone(g)
                # The indices of an Embedding are the user's own tensor.
                if values and (indices or g._values().nbytes >= LARGE):
                    at, once = g._indices() if indices else g._indices().clone(), g.is_coalesced()
                    made = [
                        torch.sparse_coo_tensor(at, g._values(), g.shape, is_coalesced=once, check_invariants=False)
                    ]
                    _hand_over(variable, made)
                    return
            _run(variable, g, False, recording)

        [(shape, dtype)] = self.takes[node]
        slot = fanin.Slot() if recording else _slot(shape, dtype, None)
        self.leaves[node] = leaf = fanin.Leaf(like=slot, accumulate=self.anywhere(accumulate), name=node.name())
        if self.accumulate is None:
            return leaf
        slots = self.slots(node) if node in self.with_sums else None
        return fanin.Node(lambda g: g, 1, [(leaf, 0)], slots=slots, name=node.name())

    def node(self, node: _Node, inputs: int) -> fanin.Node:
        name = node.name()
        edges: list[tuple[fanin.Node | fanin.Leaf, int] | None] = []
        takes: list[Takes | None] = []
        for to, slot in self.next[node]:
            edges.append(None if to is None else (self.made[to], slot))
            takes.append(None if to is None else self.takes[to][slot])
        # Of torch's classes not all have it.
        custom = None if hasattr(node, "__call__") else _Custom(node, self.retain)  # noqa: B004
        call = node if custom is None else custom
        hooks, recording, anomaly = _Hooks(node, inputs), self.recording, self.anomaly

        def fn(*sums: torch.Tensor | None) -> Gradients:
            given = [g for g in sums if g is not None]
            if custom is not None and len(given) < inputs:
                sums, taken = custom.materialized(sums, hooks, recording)
            else:
                sums = taken = hooks.arrive(sums, given, recording)
            made = call(*taken) if not anomaly else _checked(node, call, taken)
            gradients = made if isinstance(made, tuple) else (made,)
            if hooks.after:
                gradients = made = hooks.leave(gradients, sums)
            for g, take in zip(gradients, takes, strict=False):
                if g is not None and take is not None and (g.shape != take[0] or g.dtype is not take[1]):
                    return _fitted(f"{name} returned", gradients, takes)
            return made

        if self.around is None and node not in self.with_sums:
            return fanin.Node(fn, inputs, edges, name=name)
        slots = self.slots(node) if node in self.with_sums else None
        group = FUNCTIONS if custom is not None and self.around else None
        return fanin.Node(self.anywhere(fn), inputs, edges, slots=slots, name=name, group=group)

    def anywhere(self, fn: Callable[P, R]) -> Callable[P, R]:
        """The function for several workers: it runs under the torch settings of the caller of the pass."""
        around = self.around
        if around is None:
            return fn

        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with around():
                return fn(*args, **kwargs)

        return called


@functools.cache
def _references(around: bool) -> int:
    """The references to a gradient in the function of a leaf, where only the pass refers to it: counted of a new one.
    No Python function is called to count them, which would add one where Dynamo evaluates frames.
    """
    counts: list[int] = []
    wrapped = _Graph([], None, False, _as_here if around else None).anywhere
    leaf = fanin.Leaf(like=fanin.Slot(), accumulate=wrapped(lambda g: counts.append(sys.getrefcount(g))))
    root = fanin.Node(lambda g: torch.zeros(()), edges=[(leaf, 0)])
    on_new_thread(lambda: fanin.backward([(root, 0, 1.0)]))
    return counts[0]


def _forward(ctx: Any, variable: torch.Tensor, function: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    ctx.function = function
    return variable.new_zeros(())


def _backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
    return ctx.function(), None


#: A node of torch's whose gradient is what a function returns. new_class: torch is a mock where the site is built.
_Calls: Any = types.new_class(
    "Calls",
    (torch.autograd.Function,),
    exec_body=lambda names: names.update(forward=staticmethod(_forward), backward=staticmethod(_backward)),
)


def _run(end: torch.Tensor, gradient: torch.Tensor, retain: bool, create: bool) -> None:
    """A pass of torch's engine."""
    ENGINE.run_backward((end,), (gradient,), retain, create, (), allow_unreachable=True, accumulate_grad=True)


def _hand_over(variable: torch.Tensor, gradient: list[torch.Tensor]) -> None:
    """Accumulate the gradient, which is taken out of the list, into a leaf. `AccumulateGrad` takes over a gradient to
    which only the engine refers (L3); it copies one that it is called with.
    """
    with torch.enable_grad():
        end = _Calls.apply(variable, gradient.pop)
    _run(end, end.detach(), False, False)


class _Passes(threading.local):
    """Of this thread: what the node that holds a pass is to run; whether hooks of tensors run."""

    waiting: Callable[[], None] | None = None
    hooks = False


_passes = _Passes()


def _pass() -> None:
    run, _passes.waiting = _passes.waiting, None
    if run is not None:
        run()


@functools.cache
def _holder() -> Any:
    """The end of the graph of that node."""
    with torch.enable_grad(), torch.inference_mode(False):
        return _Calls.apply(torch.zeros((), requires_grad=True), _pass)


class _Guard:
    """While passes run, refuses hooks of intermediate tensors that query torch's engine for its pass: they would get
    another pass for each tensor.
    """

    def __init__(self) -> None:
        self.lock, self.passes = threading.Lock(), 0
        self.own: dict[str, Callable[..., object]] = {}

    def __enter__(self) -> None:
        with self.lock:
            self.passes += 1
            if self.passes == 1:
                self.own = {name: getattr(torch._C, name) for name in PASS_QUERIES if hasattr(torch._C, name)}
                for name, own in self.own.items():

                    def query(*args: object, own: Callable[..., object] = own) -> object:
                        if _passes.hooks:
                            raise RuntimeError(f"backward: a hook of a tensor {NO_PASS}")
                        return own(*args)

                    setattr(torch._C, name, query)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.passes -= 1
            if self.passes == 0:
                for name, own in self.own.items():
                    setattr(torch._C, name, own)


_guard = _Guard()


def _inside(run: Callable[[], None], retain: bool) -> None:
    """Run a pass inside a pass of torch's, by which checkpoints group their segments, and compiled nodes read whether
    the graph is retained.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            run()
        except BaseException as e:  # raised below: torch would attribute it to its own node
            errors.append(e)

    _passes.waiting = call
    end = _holder()
    with _guard:
        _run(end, end.detach(), retain, False)
    if errors:
        raise errors.pop()


def _as_here() -> Around:
    """What makes a thread's settings those of this one: no gradients are recorded, and its autocast."""
    cpu, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=cpu):
            yield

    return around


def _takes(node: _Node) -> list[Takes]:
    """The shape and dtype of each gradient that a node takes."""
    takes = []
    for meta in node._input_metadata:
        if meta.device != CPU and meta.device.type != "cpu":
            raise RuntimeError(
                f"backward: {node.name()} takes gradients on {meta.device}: this pass takes only CPU tensors; use"
                " torch's own backward()"
            )
        if meta.is_nested_tensor:
            raise RuntimeError(
                f"backward: {node.name()} takes a gradient that is a nested tensor, which has no one shape: use torch's"
                " own backward()"
            )
        # A leaf may want its gradient in another dtype than its own, or, by None, in any.
        leaf = getattr(node, "variable", None)
        takes.append((tuple(meta.shape), meta.dtype if leaf is None else getattr(leaf, "grad_dtype", meta.dtype)))
    return takes


def _fitted(
    source: str, gradients: Sequence[torch.Tensor | None], takes: Sequence[Takes | None]
) -> tuple[torch.Tensor | None, ...]:
    """Convert gradients to what the next nodes take, by torch's own operators, so that the bits are torch's: sum over
    broadcast axes, take the real part for a real tensor, convert the dtype (V2).
    """
    fitted = []
    for i, (g, take) in enumerate(zip(gradients, takes, strict=True)):
        if g is not None and take is not None:
            shape, dtype = take
            if g.shape != shape:
                broadcasts = all(a in (1, b) for a, b in zip(shape[::-1], g.shape[::-1], strict=False))
                if len(shape) > len(g.shape) or not broadcasts:
                    raise ValueError(
                        f"{source} an invalid gradient at index {i}: expected {tuple(shape)}, got {tuple(g.shape)}"
                    )
                g = g.sum_to_size(shape)
            if dtype is not None:
                g = g.real if g.is_complex() and not dtype.is_complex else g
                g = g.to(dtype)
        fitted.append(g)
    return tuple(fitted)


def _checked(node: _Node, call: Callable[..., Gradients], sums: tuple[torch.Tensor | None, ...]) -> Gradients:
    """What a node returns under `torch.autograd.detect_anomaly()`."""
    try:
        made = call(*sums)
        for i, g in enumerate(made if isinstance(made, tuple) else (made,)):
            if g is not None and torch.is_anomaly_check_nan_enabled() and g.isnan().any():
                raise RuntimeError(f"Function '{node.name()}' returned nan values in its {i}th output.")
        return made
    except BaseException as e:
        where = node.metadata.get("traceback_")
        if where:
            note(e, f"backward: {node.name()} was made at\n{''.join(where)}")
        raise


def _hooked(
    ends: tuple[GradientEdge, ...], gradients: tuple[torch.Tensor, ...], create: bool, inputs: tuple[GradientEdge, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs, after the hooks of the tensors between."""
    _passes.hooks = True
    try:
        made = ENGINE.run_backward(ends, gradients, True, create, inputs, allow_unreachable=True, accumulate_grad=False)
    finally:
        _passes.hooks = False
    return cast("tuple[torch.Tensor | None, ...]", made)


class _Hooks:
    """The hooks of a node, and those of the tensors that its operation made (`register_hook`, `retain_grad`)."""

    def __init__(self, node: _Node, inputs: int) -> None:
        self.node = node
        self.edges = tuple(_edge(node, i) for i in range(inputs))
        # A node's hooks can be read only through the handle of a new hook.
        handles = node.register_prehook(bool), node.register_hook(bool)
        self.before, self.after = (handle.hooks_dict_ref() for handle in handles)
        for handle in handles:
            handle.remove()

    def arrive(
        self, sums: tuple[torch.Tensor | None, ...], given: list[torch.Tensor], create: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """The sums after the hooks. torch's engine runs the hooks of tensors when it returns gradients that it was
        given; the node itself does not run.
        """
        if given:
            ends = self.edges
            if len(given) < len(ends):
                ends = tuple(end for end, g in zip(ends, sums, strict=True) if g is not None)
            sums = _hooked(ends, tuple(given), create, self.edges)
        for hook in [*self.before.values()]:
            sums = self.replaced(hook(sums), sums)
        return sums

    def leave(
        self, gradients: tuple[torch.Tensor | None, ...], sums: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        for hook in [*self.after.values()]:
            gradients = self.replaced(hook(gradients, sums), gradients)
        return gradients

    def replaced(self, by: object, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """What a hook returned: None, or what takes the place of the gradients."""
        if by is None:
            return gradients
        new = by if isinstance(by, tuple) else (by,)
        if len(new) != len(gradients):
            raise RuntimeError(
                f"{self.node.name()}: a hook returned an incorrect number of gradients: expected {len(gradients)}, got"
                f" {len(new)}"
            )
        for i, (g, old) in enumerate(zip(new, gradients, strict=True)):
            if not (g is None or (isinstance(g, torch.Tensor) and old is not None)):
                expected = "None" if old is None else "a tensor or None"
                raise TypeError(
                    f"{self.node.name()}: a hook returned an invalid gradient at index {i}: expected {expected}, got"
                    f" {type_of(g)}"
                )
        return cast("tuple[torch.Tensor | None, ...]", new)


def _edge(node: _Node, slot: int) -> GradientEdge:
    return GradientEdge(cast("torch.autograd.graph.Node", node), slot)


class _Custom:
    """The node of a `torch.autograd.Function`: its `backward` gives a gradient for each argument of its `forward`, the
    edges are those of the arguments that are tensors.
    """

    def __init__(self, node: _Node, retain: bool) -> None:
        self.node, self.retain = node, retain
        self.needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
        self.places = [i for i, (to, _) in enumerate(node.next_functions) if to is not None]
        self.compiled = hasattr(getattr(node, "_forward_cls", None), "_aot_id")

    def __call__(self, *sums: torch.Tensor | None) -> Gradients:
        node, needed = self.node, self.needed
        if self.compiled:
            if getattr(node, SPENT, False):
                raise RuntimeError(
                    f"{node.name()} has run already, in a pass without retain_graph=True: what it saved may be"
                    " overwritten; give retain_graph=True to all passes but the last"
                )
            setattr(node, SPENT, not self.retain)
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
        for place, i in zip(self.places, needed, strict=True):
            gradients[place] = made[i]
        return tuple(gradients)

    def materialized(
        self, sums: tuple[torch.Tensor | None, ...], hooks: _Hooks, create: bool
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
        """The sums after hooks, and what a Function gets of them where some are undefined: zeros if it wants them
        (`ctx.set_materialize_grads`), which torch lets nothing else read: so its engine calls the node, with its hooks,
        up to the user's `backward`.
        """
        node = self.node
        hooked: tuple[torch.Tensor | None, ...] = ()
        got: list[torch.Tensor | None] = []

        def last(gradients: tuple[torch.Tensor | None, ...]) -> None:
            nonlocal hooked
            hooked = gradients

        def stop(ctx: object, *gradients: torch.Tensor | None) -> object:
            got.extend(gradients)
            raise _Stopped

        given = [(edge, g) for edge, g in zip(hooks.edges, sums, strict=True) if g is not None]
        nothing = not given
        if nothing:  # a pass must begin with something, which a hook takes away
            meta = node._input_metadata[0]
            given = [(hooks.edges[0], torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device))]
        further = next(_edge(to, slot) for to, slot in node.next_functions if to is not None)
        handle = node.register_prehook(lambda zeros: (None,) * len(zeros) if nothing else None)
        hooks.before.move_to_end(handle.id, last=False)
        at_last = node.register_prehook(last)
        # Of this object alone, before that of its class.
        node._forward_cls = type("Stops", (torch.autograd.Function,), {"backward": staticmethod(stop)})
        try:
            _hooked(tuple(end for end, _ in given), tuple(g for _, g in given), create, (further,))
        except _Stopped:
            pass
        finally:
            handle.remove()
            at_last.remove()
            del node._forward_cls
        return hooked, tuple(got)


SPENT = "_fanin_spent"  # an attribute of compiled nodes: what they saved may be overwritten


class _Stopped(Exception):
    """Ends a pass of torch's that only runs hooks."""


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
    before: set[_Node | None] = {None}
    for node in leaves + others:
        if any(to not in before for to, _ in after[node]):
            break
        before.add(node)
    else:
        return leaves + others, after
    done: dict[_Node, None] = {}  # several threads have made them, so that their numbers are no order
    stack = [(node, False) for node in reversed(ends)]
    while stack:
        node, left = stack.pop()
        if left:
            done[node] = None
        elif node not in done:
            stack.append((node, True))
            stack += [(to, False) for to, _ in after[node] if to is not None and to not in done]
    return list(done), after
