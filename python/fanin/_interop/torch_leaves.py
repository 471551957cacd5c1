"""torch's parameters as leaves: their gradients are taken before they reach `.grad`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node

from .. import _core
from .._checks import sequence
from .._words import type_of
from .protocols import DTypeLike
from .sharing import memory_counts

__tracebackhide__ = True  # no frames of ours in reports of pytest

R = TypeVar("R")

#: The name of each parameter; a number: its index among those given, if it has no name.
Names = list[str | int]

#: A hook of `AccumulateGrad`: the gradient in, what goes on to .grad out.
Collector = Callable[[tuple[torch.Tensor | None]], object]


def word(name: str | int) -> str:
    return name if isinstance(name, str) else f"parameters[{name}]"


_lock = threading.Lock()  # held while a taking begins
#: Those that take gradients now. Each holds its parameters, so no other object has their ids.
_takings: list[weakref.ref[Taking]] = []


class Taking:
    """From `begin` to `end` the gradients of parameters go to collectors, and hooks after accumulation do not run."""

    def __init__(self, call: str, parameters: list[torch.Tensor], names: Names) -> None:
        refuse_sharded(call, parameters, names)
        self.call, self.parameters, self.names = call, parameters, names
        self.weighs: list[object] = []  # not empty: gradients have weights, or a mean is made
        self._slots = {id(p): slot for slot, p in enumerate(parameters)}
        self._reference = weakref.ref(self)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._nodes: list[Node] = []  # the nodes that have the hooks, which live as long as references to them
        self._later: list[torch.Tensor] = []  # those whose hooks after accumulation are replaced
        self.grads: list[torch.Tensor | None] = []  # .grad at the beginning

    def take(self, parameters: list[torch.Tensor]) -> None:
        """Have the same parameters again, after a reducer has let them go."""
        refuse_sharded(self.call, parameters, self.names)
        self.parameters = parameters

    def begin(self, collectors: Sequence[Collector]) -> None:
        """Install a collector for each parameter; ValueError if another takes the gradient of one."""
        for p, name in zip(self.parameters, self.names, strict=True):
            if not p.requires_grad:
                raise RuntimeError(
                    f"{self.call}: {word(name)} required a gradient when it was given, and requires none now: make the"
                    f" {'block' if self.call == 'accumulate' else 'reducer'} anew"
                )
        with _lock:
            for reference in [*_takings]:
                other = reference()
                if other is None:  # dropped without its end
                    _takings.remove(reference)
                    continue
                shared = self._slots.keys() & other._slots.keys()
                if shared:
                    slot = min(self._slots[one] for one in shared)
                    there = other._slots[id(self.parameters[slot])]
                    raise ValueError(
                        f"{self.call}: the gradient of {word(self.names[slot])} is collected by another"
                        f" {'block' if other.call == 'accumulate' else other.call} already, as"
                        f" {word(other.names[there])}"
                    )
            _takings.append(self._reference)
        try:
            self.grads = [p.grad for p in self.parameters]
            self._nodes = accumulators(self.call, self.parameters, self.names)
            for p in have_after_hooks(self.parameters):
                self._later.append(p)
                for key, after in after_hooks(p).items():
                    after_hooks(p)[key] = Later(after, self)
            assert len(collectors) == len(self._nodes)
            if self._nodes:
                # Only C code runs between a registration and the list: Ctrl-C between two bytecodes would leave a hook
                # that nothing can remove.
                register = type(self._nodes[0]).register_prehook
                self._hooks.extend(map(register, self._nodes, collectors))
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Let gradients reach .grad again. May be repeated. Takes no lock, because Ctrl-C would leave it locked."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
        for p in self._later:
            for key, after in after_hooks(p).items():
                if isinstance(after, Later) and after.taking is self:
                    after_hooks(p)[key] = after.hook
        self._later.clear()
        if self._reference in _takings:
            _takings.remove(self._reference)

    def slot_of(self, p: torch.Tensor) -> int | None:
        """The slot of a parameter: the object itself."""
        return self._slots.get(id(p))

    def is_replaced(self, slot: int) -> bool:
        """Before `end`: whether the node of a parameter is another one than at the beginning."""
        p = self.parameters[slot]
        if not p.requires_grad:
            return False
        with contextlib.suppress(RuntimeError):
            return accumulators(self.call, [p], [self.names[slot]]) != [self._nodes[slot]]
        return True

    def check(self) -> None:
        """After `end`: RuntimeError if a .grad was set meanwhile."""
        grads, self.grads = self.grads, []
        was_set = [
            word(name)
            for p, name, grad in zip(self.parameters, self.names, grads, strict=True)
            if p.grad is not None and p.grad is not grad
        ]
        if was_set:
            raise RuntimeError(
                f"{self.call}: .grad of {', '.join(was_set)} was set meanwhile, by an assignment or by"
                " DistributedDataParallel outside of no_sync(): what was set is no sum over ranks"
            )


def taker(p: torch.Tensor) -> str | None:
    """What takes the gradients of a parameter now, "accumulate" or "Reducer"; None if they reach .grad."""
    for reference in _takings:
        taking = reference()
        if taking is not None and id(p) in taking._slots:
            return taking.call
    return None


def is_weighed(p: torch.Tensor) -> bool:
    """Whether what takes the gradients of a parameter multiplies them by weights, or makes their mean."""
    takings = [reference() for reference in _takings]
    return any(taking is not None and id(p) in taking._slots and taking.weighs for taking in takings)


def recorded(name: str | int) -> str:
    """Of a gradient that requires a gradient."""
    return (
        f"the gradient of {word(name)} records a graph (requires_grad is True), as of backward(create_graph=True) or of"
        " a hook that returns a tensor with requires_grad: the sum cannot be differentiated; let the hook return"
        " x.detach(), or call that backward() elsewhere"
    )


class Later:
    """Replaces a hook until a taking ends: torch runs the hook in each pass, even if no gradient reaches .grad."""

    def __init__(self, hook: Callable[[torch.Tensor], None], taking: Taking) -> None:
        self.hook, self.taking = hook, taking

    def __call__(self, p: torch.Tensor) -> None:
        pass


def after_hooks(p: torch.Tensor) -> dict[int, Callable[[torch.Tensor], None]]:
    """The hooks of `register_post_accumulate_grad_hook`."""
    return p._post_accumulate_grad_hooks or {}


def have_after_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (p for p in parameters if p._post_accumulate_grad_hooks)


def accumulators(call: str, parameters: list[torch.Tensor], names: Names) -> list[Node]:
    """The node that accumulates into each parameter, as of `get_gradient_edge`, at a fifth of its cost.

    A class with `__torch_function__` puts a node of its own before that node: its function is left out here.
    RuntimeError for a parameter without such a node.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # to enter both takes as long as 30 parameters
        with torch.inference_mode(False), torch.enable_grad():
            return accumulators(call, parameters, names)
    nodes = []
    with torch._C.DisableTorchFunctionSubclass():
        for p, name in zip(parameters, names, strict=True):
            node = accumulator(p)
            if node is None:
                raise RuntimeError(
                    f"{call}: {word(name)} ({type_of(p)}) has no AccumulateGrad node, through which torch adds to"
                    " .grad: expected a torch.Tensor or torch.nn.Parameter"
                )
            nodes.append(node)
    return nodes


def accumulator(leaf: torch.Tensor) -> Node | None:
    """The node that accumulates into a leaf; None where another node, or none, is found in its place."""
    reader = (chosen_from(leaf) if leaf.is_inference() else leaf.view_as(leaf)).grad_fn
    if reader is None:
        return None
    node = reader.next_functions[0][0]
    return node if getattr(node, "variable", None) is leaf else None


def chosen_from(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor that an operation makes of an inference tensor: a view of it has no node, nor has what is made of
    inference tensors alone. It has no elements, or one.
    """
    if leaf.ndim:
        return leaf.index_select(0, torch.empty(0, dtype=torch.int64, device=leaf.device))
    return torch.where(torch.zeros((), dtype=torch.bool, device=leaf.device), leaf, 0)


def counts_of(gradient: torch.Tensor, references: int) -> tuple[int, ...]:
    """The references that Python and torch count to a tensor, to the tensor that it is a view of, and to its memory."""
    base = gradient._base
    held: Any = gradient
    return (
        references,
        weakref.getweakrefcount(gradient),
        gradient._use_count(),  # type: ignore[attr-defined, unused-ignore]
        0 if base is None else base._use_count(),  # type: ignore[attr-defined, unused-ignore]
        0 if base is None else sys.getrefcount(base),  # torch counts all of Python's as one
        *memory_counts(held),
    )


@functools.cache
def counts_alone() -> set[tuple[int, ...]]:
    """What `counts_of` returns in a hook of `_core._collectors` for new gradients, to which only the pass refers. Empty
    where torch does not count, or no thread can start, as when Python ends: then every gradient is copied.
    """
    seen: set[tuple[int, ...]] = set()

    def collect(slot: int, gradient: torch.Tensor, references: int, error: Exception | None, weight: object) -> None:
        seen.add(counts_of(gradient, references))

    def measure() -> None:
        p = torch.zeros(2, 2, requires_grad=True)
        [collector] = hooks(1, collect)
        [node] = accumulators("accumulate", [p], [0])
        node.register_prehook(collector)
        torch.autograd.backward((p * 2).sum())
        torch.autograd.backward(torch.nn.functional.linear(torch.ones(1, 2), p).sum())  # a view of a new tensor

    with contextlib.suppress(AttributeError, RuntimeError):
        on_new_thread(measure)
    return seen


def hooks(n: int, collect: Callable[..., None]) -> Sequence[Collector]:
    """Hooks of `AccumulateGrad` that call `collect(i, gradient, references, None, None)`, where only C code has counted
    the references.
    """
    return _core._collectors(_core.InputBuffer(n), [False] * n, bytearray(n + 1), collect, [], int, lambda *_: None)


def on_new_thread(measure: Callable[[], R]) -> R:
    """Call a function where torch has no modes and Python no trace function, which would refer to its objects."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def gradient_dtype(call: str, p: torch.Tensor, name: str | int, into: str = "grad") -> torch.dtype:
    """The dtype of a gradient in .grad. Refuses a parameter whose gradients cannot be summed into `into`."""
    dtype: torch.dtype | None = getattr(p, "grad_dtype", p.dtype)
    if into == "main_grad" and not has_memory(p):
        raise TypeError(
            f"{call}: {word(name)}: a main_grad lies in memory, and the elements of {type_of(p)} on {p.device} do not:"
            " leave into= out, or give the tensors inside of it"
        )
    if dtype is None and into == "grad":
        beside = ', or give into="main_grad"' if call == "accumulate" else ""
        raise ValueError(
            f"{call}: the grad_dtype of {word(name)} is None, so that its gradients may be of any dtype: set it to"
            f" that of the sum{beside}"
        )
    try:
        _core.dtype_name(dtype or p.dtype)
    except TypeError as e:
        raise type(e)(f"{call}: {word(name)}: {e}") from None
    return dtype or p.dtype


def check_sum(call: str, p: torch.Tensor, name: str | int, own: torch.dtype, total: DTypeLike) -> None:
    """TypeError for a parameter whose gradients are no arrays, so that their own `+` would sum them, in their dtype,
    where the sum is to run in another or exactly.
    """
    if total != own and not has_memory(p) and p.untyped_storage().device.type != "meta":
        raise TypeError(
            f"{call}: {word(name)}: a sum in {total} is of gradients whose elements lie in memory, and those of"
            f" {type_of(p)} do not: give dtype={own}, for torch's own sums, or the tensors inside of it"
        )


def gradient_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient, as torch's own pass makes it: the parameter's, if its elements lie without
    gaps and overlaps, else those of C order. Fused optimizers read both by the same strides.
    """
    strides: tuple[int, ...] = p.stride()
    if p.is_contiguous():
        return strides
    axes = sorted((stride, n) for stride, n in zip(p.stride(), p.shape, strict=True) if n > 1)
    expected = 1
    for stride, n in axes:
        if stride != expected:
            strides = torch.empty(p.shape, device="meta").stride()
            break
        expected *= n
    return strides


def laid_out(total: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A sum with the strides of the parameter's gradient: itself, or a copy."""
    if total.layout != torch.strided or total.shape != p.shape:
        return total
    strides = gradient_strides(p)
    if total.stride() == strides:
        return total
    if total.is_contiguous() and p.is_contiguous():  # only strides of axes of one element differ
        if type(total) is not torch.Tensor or total.is_inference():
            return total
        with torch.no_grad():
            return total.as_strided_(p.shape, strides)
    with torch.no_grad():
        return torch.empty_strided(p.shape, strides, dtype=total.dtype, device=total.device).copy_(total)


def add_into(grad: torch.Tensor, total: torch.Tensor) -> None:
    """Add a sum to a strided .grad in place, with the same bits in every floating-point mode.

    What the core does not write, such as an object or a view with torch's conjugate bit, torch adds to or refuses.
    """
    with torch.no_grad():
        if grad.device.type == "cpu" and not grad.is_inference():
            place = grad.detach()
            with contextlib.suppress(BufferError, TypeError, ValueError):  # raised before the first write
                _core.add_n([place, total], out=place)
                return
        _core.in_default_modes(lambda: grad.add_(total))


def dense_sum(total: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The sum of a dense and a sparse tensor, with the same bits in every floating-point mode."""
    if grad.device.type == "cpu":
        with contextlib.suppress(BufferError, TypeError, ValueError):
            return _core.add_n([total, grad])
    return _core.in_default_modes(lambda: total + grad)


def has_memory(p: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory of its own: not those of a wrapper subclass, nor of device "meta", nor
    of a FakeTensor, whose storage is on that device, and whose address torch warns of.
    """
    try:
        storage = p.untyped_storage()
        return not p.numel() or (storage.device.type != "meta" and storage.data_ptr() != 0)
    except RuntimeError:
        return False


def check_leaf(call: str, p: torch.Tensor, name: str | int) -> None:
    """TypeError for a tensor whose gradients cannot be summed into .grad."""
    if not p.is_leaf:
        raise TypeError(
            f"{call}: {word(name)} is no leaf: what an operation made has no .grad; expected the tensor that it was"
            " made of"
        )
    if torch.nn.parameter.is_lazy(p):
        raise TypeError(
            f"{call}: {word(name)} is {type_of(p)}, which has no shape yet: expected a parameter that a forward of its"
            " module has initialized"
        )
    if p.is_nested:
        raise TypeError(f"{call}: {word(name)} is a nested tensor, which has no one shape: expected a strided tensor")
    if p.layout != torch.strided:
        raise TypeError(
            f"{call}: {word(name)} has the layout {p.layout}: expected a strided tensor (its gradients may be sparse)"
        )


def leaves_of(
    call: str, parameters: Iterable[torch.Tensor | tuple[str, torch.Tensor]]
) -> tuple[list[torch.Tensor], Names]:
    """Each tensor once, and its name."""
    if isinstance(parameters, torch.Tensor):
        raise TypeError(f"{call}: expected several tensors, got one: give [tensor]")
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(f"{call}: expected tensors, got {type_of(parameters)}: give model.parameters()")
    tensors: dict[int, torch.Tensor] = {}
    names: Names = []
    i = -1
    for i, one in enumerate(sequence(f"{call}: parameters", parameters, "tensors")):
        name, p = (i, one) if not isinstance(one, tuple) or len(one) != 2 else (str(one[0]), one[1])
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{call}: expected tensors, or (name, tensor) pairs, got {type_of(p)} as {word(name)}")
        if not p.requires_grad or id(p) in tensors:
            continue
        check_leaf(call, p, name)
        tensors[id(p)] = p
        names.append(name)
    if i < 0:
        used = isinstance(parameters, Iterator)
        raise ValueError(
            f"{call}: expected parameters, got none"
            + (
                "; an iterator, as model.parameters() gives one, is empty once it has been used: call it again"
                if used
                else ""
            )
        )
    return list(tensors.values()), names


def sharded(leaves: list[torch.Tensor]) -> Iterator[tuple[int, str]]:
    """Which leaves FSDP or DTensor shards."""
    gathered = set()  # the parameters that FSDP (`fully_shard`) has put together for a forward
    modules = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for reference in list(modules.values()):
        state = reference()
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            gathered |= {id(getattr(one, "_unsharded_param", None)) for one in getattr(group, "fsdp_params", ())}
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    for i, leaf in enumerate(leaves):
        if dtensor is not None and isinstance(leaf, dtensor):
            yield i, "DTensor"
        elif id(leaf) in gathered or getattr(leaf, "_fsdp_flattened", False):
            yield i, "FSDP"


def refuse_sharded(call: str, leaves: list[torch.Tensor], names: Names) -> None:
    """RuntimeError for a leaf that FSDP or DTensor shards."""
    for slot, what in sharded(leaves):
        raise RuntimeError(
            f"{call}: {word(names[slot])} is sharded by {what}, which sums gradients itself and sets .grad: use its own"
            " accumulation, as set_requires_gradient_sync(False)"
        )


def facts_of(p: torch.Tensor) -> tuple[object, ...]:
    """What a leaf was made of: of another one it is made anew."""
    return p.shape, p.dtype, getattr(p, "grad_dtype", p.dtype), p.device, p.layout, p.requires_grad, p.is_leaf, type(p)


def give(
    name: str,
    put: Callable[[Any], None],
    own: Callable[[Any], None],
    alone: set[tuple[int, ...]],
    slot: int,
    gradient: torch.Tensor,
    references: int,
    error: Exception | None,
    weight: object,
) -> None:
    """Call `own` with a gradient to which only the pass refers, else `put`."""
    if gradient.requires_grad:
        raise RuntimeError(f"Reducer: {recorded(name)}")
    if gradient.layout == torch.strided and counts_of(gradient, references) in alone:
        own(gradient.detach())  # the tensor itself ends with the hook
    else:
        put(gradient)


class TorchLeaf:
    """A parameter, as a leaf of `fanin.dist.Reducer`."""

    def __init__(self, p: torch.Tensor, name: str | int) -> None:
        self.tensor, self.name = p, word(name)
        check_leaf("Reducer", p, name)
        if not has_memory(p):
            refuse_sharded("Reducer", [p], [name])
            raise TypeError(
                f"Reducer: {word(name)}: expected a tensor whose elements lie in memory, got {type_of(p)} on"
                f" {p.device} without: make the reducer of the tensors inside of it, or after it was materialized"
            )
        self.facts = facts_of(p)
        self.dtype = gradient_dtype("Reducer", p, name)
        self.array = self.example()

    def example(self) -> torch.Tensor:
        """What the gradient is like."""
        p = self.tensor
        return p if self.dtype is p.dtype else torch.empty(p.shape, dtype=self.dtype, device=p.device)

    def rest(self) -> None:
        """Let the parameter go, until `wake`."""
        del self.tensor, self.array

    def wake(self, p: torch.Tensor) -> None:
        """Take the same parameter again, which has the same `facts`."""
        self.tensor = p
        self.array = self.example()

    @property
    def grad(self) -> torch.Tensor | None:
        return self.tensor.grad

    def collector(
        self, put: Callable[[Any], None], own: Callable[[Any], None] | None, gate: list[Any], place: int
    ) -> Collector:
        """A hook that calls `put` with each gradient, or `own`, if there is one, with a gradient that nothing else has;
        or copies it, if the gate of its bucket is open, where it has this place. It lets nothing go on to .grad.
        """
        if own is not None:
            [hook] = hooks(1, functools.partial(give, self.name, put, own, counts_alone()))
            return hook

        def collect(gradients: tuple[torch.Tensor | None]) -> tuple[None]:
            [g] = gradients
            if g is not None and g.requires_grad:
                raise RuntimeError(f"Reducer: {recorded(self.name)}")
            if g is not None:
                put(g)
            return (None,)

        return _core.gate_hook(gate, place, collect)

    def accumulate(self, total: torch.Tensor) -> None:
        """Add a sum to .grad, and run the hooks after accumulation."""
        p = self.tensor
        if p.grad is None:
            p.grad = laid_out(total, p)
        elif p.grad.layout == torch.strided:
            add_into(p.grad, total)
        else:
            p.grad = laid_out(dense_sum(total, p.grad), p)  # torch adds no dense tensor to a sparse one
        for after in [*after_hooks(p).values()]:
            after(p)
