"""Metadata of functions on torch CPU tensors: the function runs once, on copies, and every operation that it calls is
watched.

The steps:

1. The arguments are copied storage by storage, so that the copies share memory, have bases and require gradients as the
   arguments do.
2. A dispatch mode records each operation: which tensors it writes (and whether under no_grad), and what is a view
   of what. Memory is compared afterwards: bytes that changed without such a write (through `x.numpy()`) were hidden
   from autograd.
3. Inputs are classified by the recorded writes and by their geometry, outputs by the first case that holds
   (`ObservedTensors.kind_of`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _core
from . import trees
from .caller_arrays import Lost
from .caller_tensors import SavedTensor, Tensor, torch, undo_all
from .calls import Call, array_kinds
from .descriptors import PlainAOTOutput
from .hidden import check_result, may_hold
from .records import (
    InputAliasInfo,
    MemoryFormatMeta,
    MetadataKey,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    TangentMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
)


@dataclass
class Write:
    """One operation wrote this tensor, whose geometry then was that of `where`."""

    where: Tensor
    unseen: bool  # under no_grad, or in inference mode


@dataclass
class Origin:
    """What a view is a view of: the tensor where the chain of views begins, and the names of the operations on
    the way.
    """

    root: Tensor
    path: tuple[str, ...] = ()
    of_several: bool = False  # one of them made several views at once, as unbind does


@dataclass(frozen=True)
class Effects:
    """What an operation does to its arguments, whatever they are."""

    name: str
    arguments: tuple[tuple[int, str, bool], ...]  # those that it views or writes: position, name, whether it writes
    moves: bool  # what it writes is geometry, not data
    makes_views: bool
    several: bool  # more than one view at once


@functools.cache
def effects_of(func: Any) -> Effects:
    """Read from its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Effects("", (), False, False, False)
    arguments = tuple(
        (i, a.name, a.alias_info.is_write) for i, a in enumerate(schema.arguments) if a.alias_info is not None
    )
    views = [r for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    moves = any(str(tag).endswith("inplace_view") for tag in func.tags)
    several = any("List" in str(r.type) for r in views)
    return Effects(func.overloadpacket.__name__, arguments, moves, bool(views), several)


#: What operations write without a word of it in their schemas: positions and names.
UNDECLARED: dict[str, tuple[tuple[int, str], ...]] = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ((3, "running_mean"), (4, "running_var"))
)


class ObservedTensors(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
    """What a run on tensors showed; itself the mode that watches the run's operations.

    The arguments are never written: the function runs on copies of their memory, and the random state is put back.
    With `undo_others`, what it does to tensors that it was not given is undone.
    """

    def __init__(self, call: Call, given: trees.Arguments, undo_others: bool = False) -> None:
        super().__init__()
        self.call, self.undo_others = call, undo_others
        self.copies: list[Any] = Copier(call.leaves).copies
        #: the arguments of the run, and the distinct tensors among them
        self.tree = call.copied(given, self.copies)
        self.tensors: list[Tensor] = [self.copies[i] for i in call.first]
        self.left: bool | None = None  # the grad mode after the function, if it changed it
        self.outputs: list[Any] = []
        self.writes: list[Write] = []
        self.hidden: set[int] = set()  # inputs that changed and that no operation wrote
        self.origins: MutableMapping[Tensor, Origin] = torch.utils.weak.WeakTensorKeyDictionary()
        #: the last, of duplicates
        self.position = {id(x): i for i, x in enumerate(self.copies) if isinstance(x, torch.Tensor)}
        # Where each input was at first: a detached tensor that no operation can move.
        self.before: list[Any] = [x.detach() if isinstance(x, torch.Tensor) else None for x in self.copies]
        self.storages = {x.untyped_storage()._cdata for x in self.before if x is not None}
        self.touched: list[list[Write]] = [[] for _ in self.copies]
        self.made: set[int] = set()  # storages that an operation gave
        #: tensors that were there before, are no arguments, and are written, by identity; the bytes of their storages
        self.others: dict[int, SavedTensor] = {}
        self.bytes: dict[int, tuple[Any, Any]] = {}
        #: leaves that were there before and that gradients may reach, by identity, and their gradients
        self.grads: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.strided: set[int] = set()  # storages that as_strided was given a place in
        #: intermediates that are returned on behalf of an output, and the output's position
        self.saved: list[tuple[Tensor, int]] = []

    def run(self, fn: Callable[..., object]) -> object:
        """Run the function, once. An error of its own is raised as it is. RuntimeError where it leaves autocast
        changed; TypeError for a result that keeps memory of an argument out of sight.
        """
        grad, autocast = torch.is_grad_enabled(), autocast_state()
        try:
            with torch.random.fork_rng(devices=[]), self:
                args, kwargs = self.tree
                value = fn(*args, **kwargs)
            self.left = torch.is_grad_enabled() if torch.is_grad_enabled() != grad else None
        finally:
            torch.set_grad_enabled(grad)
            lost = undo_all([((0, "a tensor"), saved) for saved in self.others.values()], self._undo_bytes)
            for t, its in self.grads.values():
                if t.grad is not its:
                    t.grad = its
        if autocast_state() != autocast:
            raise RuntimeError(
                "collect_metadata: the function leaves autocast as it was not before: expected it to be put back within"
            )
        if lost.found:
            raise RuntimeError(
                "collect_metadata: what the function does to a tensor that it was not given cannot be undone:"
                f" {lost.found[0][1]}; expected a function of its arguments alone"
            )
        trees.flatten(value, self.outputs)
        mine = storages(self.tensors)
        for j, o in enumerate(self.outputs):
            if may_hold(type(o)):
                check_result(
                    o,
                    f"collect_metadata: {PlainAOTOutput(j).expr()}",
                    array_kinds(),
                    lambda a: not isinstance(a, np.ndarray) and not storages([a]).isdisjoint(mine),
                )
        for i, x in enumerate(self.before):
            if x is not None:
                self.touched[i] = [write for write in self.writes if _core.overlap(x, write.where)]
                if not self.touched[i] and not same_bytes(self.call.leaves[i], x):
                    self.hidden.add(i)
        return value

    def _undo_bytes(self, _: Lost) -> None:
        for storage, before in self.bytes.values():
            if storage.nbytes() == before.nbytes():
                storage.copy_(before)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        effects, kwargs = effects_of(func), kwargs or {}

        def given(place: int, name: str) -> Any:
            return args[place] if place < len(args) else kwargs.get(name)

        if self.undo_others:
            written = [(place, name) for place, name, writes in effects.arguments if writes]
            written += UNDECLARED.get(getattr(func, "_opname", ""), ())
            for t in tensors([*args, *kwargs.values()]):
                if t.requires_grad and id(t) not in self.position and is_leaf(t):
                    self.grads.setdefault(id(t), (t, t.grad))
            for t in in_memories([given(place, name) for place, name in written]):
                storage = t.untyped_storage()
                if storage._cdata in self.storages | self.made:
                    continue
                if storage._cdata not in self.bytes:
                    self.bytes[storage._cdata] = storage, storage.clone()
                for one in (t, t._base):
                    if one is not None and id(one) not in self.others:
                        with above_autograd():
                            self.others[id(one)] = SavedTensor(one)
            place = 4 if "scatter" in str(func) else 3  # a scatter has a source more
            if str(func).startswith("aten.as_strided") and given(place, "storage_offset") is not None:
                self.strided |= {t.untyped_storage()._cdata for t in in_memories(args[0])}
        result = func(*args, **kwargs)
        if self.undo_others and not effects.makes_views:
            self.made |= {t.untyped_storage()._cdata for t in in_memories(result)}
        viewed = []
        for place, name, writes in effects.arguments:
            for t in tensors(given(place, name)):
                if not writes:
                    viewed.append(t)
                elif not effects.moves and in_memory(t) and t.untyped_storage()._cdata in self.storages:
                    unseen = not torch.is_grad_enabled() or torch.is_inference_mode_enabled()
                    self.writes.append(Write(t if t.is_inference() else t.detach(), unseen))
        if effects.makes_views and len(viewed) == 1:
            origin = self.origin(viewed[0])
            made = Origin(origin.root, (*origin.path, effects.name), origin.of_several or effects.several)
            for t in tensors(result):
                if t is not viewed[0]:
                    self.origins[t] = made
        return result

    def origin(self, t: Tensor) -> Origin:
        """The origin of a tensor: itself, unless it is a recorded view."""
        return self.origins.get(t) or Origin(t)

    def input_info(self, i: int, keep_input_mutations: bool) -> InputAliasInfo:
        x, new, before = self.call.leaves[i], self.copies[i], self.before[i]
        if before is None:
            return InputAliasInfo(is_leaf=False, keep_input_mutations=keep_input_mutations)
        elsewhere = new.untyped_storage()._cdata != before.untyped_storage()._cdata
        moved = elsewhere or MetadataKey.make(new) != MetadataKey.make(x) or new.dtype != x.dtype
        written = bool(self.touched[i]) or i in self.hidden
        return InputAliasInfo(
            is_leaf=x.is_leaf,
            mutates_data=written and not elsewhere,
            mutates_metadata=moved,
            mutations_hidden_from_autograd=not self.touched[i],
            mutations_under_no_grad_or_inference_mode=written
            and i not in self.hidden
            and all(w.unseen for w in self.touched[i]),
            mutates_storage_metadata=elsewhere,
            requires_grad=new.requires_grad,
            keep_input_mutations=keep_input_mutations,
        )

    # What outputs are

    def output_infos(self, inputs: Sequence[InputAliasInfo]) -> list[OutputAliasInfo]:
        self.at = {id(o): i for i, o in enumerate(self.outputs)}
        real = [o for o in self.outputs if in_memory(o)]
        #: the memory of an output: an input's, by position, or a storage of its own, by number
        self.memory: dict[int, tuple[bool, int]] = {}
        for o in real:
            i = self.input_of(o)
            self.memory[id(o)] = (False, o.untyped_storage()._cdata) if i is None else (True, i)
        self.shared = Counter(self.memory[id(o)] for o in real)
        self.plain_views = Counter(self.memory[id(o)] for o in real if not self.origin(o).of_several)
        return [self._output_info(i, o, inputs) for i, o in enumerate(self.outputs)]

    def input_of(self, o: Tensor) -> int | None:
        """The input that it is, or is a view of; None where it lies in other memory."""
        storage = o.untyped_storage()._cdata
        beside = [
            i for i, x in enumerate(self.copies) if self.before[i] is not None and x.untyped_storage()._cdata == storage
        ]
        for seen in (o, o._base):
            root = None if seen is None else self.position.get(id(self.origin(seen).root))
            if root in beside:  # else the input was given other memory since
                return root
        # No operation made it of an input, and yet it may lie in the memory of one: as x.data does.
        touching = [i for i in beside if _core.overlap(self.copies[i].detach(), o.detach())]
        return max(touching or beside, default=None)

    def _output_info(self, i: int, o: Any, inputs: Sequence[InputAliasInfo]) -> OutputAliasInfo:
        if not isinstance(o, torch.Tensor):
            return OutputAliasInfo(OutputType.non_alias, type(o))
        if not in_memory(o):
            return OutputAliasInfo(OutputType.non_alias, type(o), None, frozenset(), o.requires_grad, o.requires_grad)
        kind, base = self.kind_of(i, o)
        from_input = kind is OutputType.alias_of_input and base is not None and not inputs[base].mutates_metadata
        known = from_input or kind.name.startswith("alias_of_intermediate")
        way = ViewMetaSequence(MetadataKey.make(o), o.dtype, self.origin(o).path) if known else None
        backward = o.requires_grad and (o._base is None or history(o) is not None)
        return OutputAliasInfo(kind, type(o), base, frozenset(), o.requires_grad, backward, way)

    def kind_of(self, i: int, o: Tensor) -> tuple[OutputType, int | None]:
        """The first case that holds."""
        input_, is_input, base, made = self.input_of(o), self.position.get(id(o)), o._base, history(o)
        lies = self.memory[id(o)]
        custom = isinstance(made, torch.autograd.function.BackwardCFunction) or type(made).__name__ == "CppFunction"
        if input_ is not None and custom:
            return OutputType.custom_function_view, None
        if is_input is not None:
            return OutputType.is_input, is_input
        if input_ is not None:
            if self.plain_views[lies] == 0 and made is not None:
                return OutputType.non_alias, None
            return OutputType.alias_of_input, input_
        if base is not None and o.requires_grad and base.requires_grad:
            if self.shared[lies] == 1 or self.plain_views[lies] <= 1:
                return OutputType.unsafe_view_alias, None
            if id(base) in self.at:
                return OutputType.alias_of_intermediate_base_is_user_output, self.at[id(base)]
            for place, (known, _) in enumerate(self.saved):
                if known is base:
                    return OutputType.alias_of_intermediate, place
            self.saved.append((base, i))
            return OutputType.alias_of_intermediate_save_as_output, len(self.saved) - 1
        if not o.requires_grad and self.shared[lies] > 1:
            # Another output, with a gradient, that shows the same elements in the same way: as y for y.detach().
            key = MetadataKey.make(o)
            for other in self.outputs:
                alike = in_memory(other) and self.memory[id(other)] == lies and MetadataKey.make(other) == key
                if alike and other.requires_grad:
                    return OutputType.alias_of_intermediate_base_is_user_output, self.at[id(other)]
        return OutputType.non_alias, None

    # What the collector needs of it

    def new_value(self, leaf: int) -> TangentMeta:
        return TangentMeta.of(self.copies[leaf])

    def result(self, output: int) -> TangentMeta:
        return TangentMeta.of(self.outputs[output])

    def finished(self, meta: ViewAndMutationMeta) -> ViewAndMutationMeta:
        return dataclasses.replace(
            meta,
            subclass_inp_meta=tuple(PlainTensorMeta(i) for i in range(len(self.call.leaves))),
            subclass_fw_graph_out_meta=tuple(PlainTensorMeta(i) for i in range(meta.num_forward_returns)),
            subclass_tangent_meta=tuple(
                PlainTensorMeta(i, None if t.stride is None else MemoryFormatMeta(t.shape, t.stride))
                for i, t in enumerate(meta.traced_tangents)
                if isinstance(t, TangentMeta)
            ),
            grad_enabled_mutation=self.left,
        )


def storages(tensors: Iterable[Any]) -> set[int]:
    """Where the memory of tensors begins."""
    return {
        t.untyped_storage().data_ptr() for t in tensors if str(t.layout) == "torch.strided" and t.device.type == "cpu"
    }


def leaves(x: object) -> Iterator[object]:
    """What a nest of lists, tuples and dicts holds, in order."""
    if isinstance(x, (list, tuple)) and type(x).__name__ != "Size":
        for y in x:
            yield from leaves(y)
    elif isinstance(x, dict):
        yield from leaves(list(x.values()))
    else:
        yield x


def autocast_state() -> tuple[object, ...]:
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())


def above_autograd() -> AbstractContextManager[object]:
    """Within a dispatch mode, which runs below autograd: let autograd record operations."""
    core = torch._C
    keys = core.DispatchKeySet(core.DispatchKey.AutogradFunctionality)
    keys |= core.DispatchKeySet(core.DispatchKey.ADInplaceOrView)
    exclude = core._dispatch_tls_local_exclude_set() - keys
    guard: AbstractContextManager[object] = core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), exclude)
    return guard


def tensors(x: object) -> Iterator[Tensor]:
    """The tensors of an argument or a result: one, or a list of them."""
    for y in leaves(x):
        if isinstance(y, torch.Tensor):
            yield y


def is_leaf(t: Tensor) -> bool:
    """Whether a tensor is a leaf; False where autograd raises, as it does for some views."""
    try:
        return bool(t.is_leaf)
    except RuntimeError:
        return False


def in_memory(x: object) -> bool:
    """Whether it is a tensor with one storage of its own kind: a sparse one has several parts."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def in_memories(x: object) -> Iterator[Tensor]:
    """The tensors of a nest that have memory."""
    return (t for t in tensors(x) if in_memory(t))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one geometry hold the same bytes. Nothing of them is computed with, so that NaN is NaN."""
    return bool(torch.equal(as_bytes(x), as_bytes(y)))


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of each element, as one more axis."""
    size = x.element_size()
    raw: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(x.untyped_storage())
    return raw.as_strided((*x.shape, size), (*(s * size for s in x.stride()), 1), x.storage_offset() * size)


def history(o: Tensor) -> Any:
    """Its grad_fn; None also where autograd raises: for a view made under no_grad whose base was
    written since.
    """
    try:
        return o.grad_fn
    except RuntimeError:
        return None


class Copier:
    """Copies of tensors that are to each other what the tensors are: the same object, views of one base, views of one
    storage.
    """

    def __init__(self, args: Sequence[object]) -> None:
        self.storages = copied_storages([x for x in args if isinstance(x, torch.Tensor)])
        self.made: dict[int, Tensor] = {}
        with torch.inference_mode(False), torch.enable_grad():
            self.copies = [self.copy(x) if isinstance(x, torch.Tensor) else x for x in args]

    def copy(self, x: Tensor) -> Tensor:
        if id(x) not in self.made:
            base = x._base
            new = None if base is None else self.view(x, base, self.copy(base))
            self.made[id(x)] = new = self.fresh(x) if new is None else new
            if x.is_leaf and x.grad is not None:
                new.grad = self.copy(x.grad)
        return self.made[id(x)]

    def fresh(self, x: Tensor) -> Tensor:
        """A tensor without a base, on the copy of the storage of x."""
        made = torch.empty(0, dtype=x.dtype, device="cpu")
        made.set_(self.storages[x.untyped_storage()._cdata], x.storage_offset(), tuple(x.shape), x.stride())
        new = self.marked(x, made)
        if x.is_leaf:
            if isinstance(x, torch.nn.Parameter):
                new = torch.nn.Parameter(new, x.requires_grad)
            return new.requires_grad_(x.requires_grad)
        # It has a history, of which one step does: then its memory is put under it.
        with_history: Tensor = torch.empty_like(new, requires_grad=True).clone()
        with_history.data = new
        return with_history

    def view(self, x: Tensor, its: Tensor, base: Tensor) -> Tensor | None:
        """A view of `base`, the copy of `its`, the base of x; None where the dtype forbids it."""
        with torch.set_grad_enabled(x.requires_grad or not base.requires_grad):
            if x.dtype != its.dtype:
                if x.is_complex() or its.is_complex() or x.requires_grad:
                    return None
                flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
                try:
                    new = flat.view(x.dtype).as_strided(tuple(x.shape), x.stride(), x.storage_offset())
                except RuntimeError:
                    return None
            else:
                new = base.as_strided(tuple(x.shape), x.stride(), x.storage_offset())
        if x.requires_grad and not new.requires_grad:
            new.requires_grad_()
        return self.marked(x, new)

    def marked(self, x: Tensor, new: Tensor) -> Tensor:
        """With the conjugate and negative bits of x."""
        new = new.conj() if x.is_conj() else new
        return torch._neg_view(new) if x.is_neg() else new


def copied_storages(args: Sequence[Tensor]) -> dict[int, Any]:
    """A copy of each storage of some tensors, their bases and gradients, by the storage's number. Storages whose memory
    meets (two that torch.from_numpy made of one array) have copies whose memory meets in the same way.
    """
    every: dict[int, Any] = {}
    rest = list(args)
    while rest:
        x = rest.pop()
        every[x.untyped_storage()._cdata] = x.untyped_storage()
        rest += [y for y in (x._base, x.grad if x.is_leaf else None) if y is not None]
    copies: dict[int, Any] = {}
    groups: list[list[tuple[int, Any]]] = []
    end = 0
    for number, storage in sorted(every.items(), key=lambda item: item[1].data_ptr()):
        if storage.nbytes() == 0:
            copies[number] = storage.clone()
            continue
        start = storage.data_ptr()
        if start < end:
            groups[-1].append((number, storage))
        else:
            groups.append([(number, storage)])
        end = max(end, start + storage.nbytes())
    for group in groups:
        if len(group) == 1:
            copies[group[0][0]] = group[0][1].clone()
            continue
        first = group[0][1].data_ptr()
        whole = np.empty(max(s.data_ptr() + s.nbytes() for _, s in group) - first, np.uint8)
        for number, storage in group:
            at = storage.data_ptr() - first
            part = torch.frombuffer(whole, dtype=torch.uint8, count=storage.nbytes(), offset=at)
            part.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
            copies[number] = part.untyped_storage()
    return copies
