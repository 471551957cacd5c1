"""A call on torch tensors: the caller's own are handed to the function, and put back where it raises.

What autograd knows of a tensor (its node, hooks, who saved it) cannot be given to another one afterwards. So the
function runs on the tensors themselves, gradients and all, and nothing has to be carried back. What is kept to put them
back: the bytes that they and their gradients show, versions, geometry, storage, whether they ask for a gradient, their
attributes and hooks; of a tensor with a history a second end of it (`SavedTensor`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .._core import Snapshot
from .._words import type_of
from . import trees
from .caller_arrays import CallerArrays
from .calls import check_reach, torch
from .private_copies import UNSIGNED, Array, Geometry, MemoryAt, Plan
from .protocols import DType, Node, Storage, Tensor


def check_tensor(t: Tensor, name: Callable[[], str]) -> None:
    """TypeError, ValueError for a tensor that cannot be put back from its bytes."""
    library = torch()
    if type(t) not in (library.Tensor, library.nn.Parameter):
        raise TypeError(
            f"{name()}: expected a plain torch.Tensor or a Parameter, got {type_of(t)}: pass the tensor that it holds"
        )
    if is_transformed(t):
        raise TypeError(
            f"{name()}: expected a tensor with memory of its own, got one that torch.func (vmap, grad, functionalize)"
            " wraps: transform the inner function instead"
        )
    check_place(t, name)


def check_place(t: Tensor, name: Callable[[], str]) -> None:
    """ValueError for a tensor that is not all in one piece of the host's memory."""
    if t.is_nested:
        raise TypeError(f"{name()}: expected one tensor, got a nested one: pass its parts, x.unbind()")
    if t.device.type != "cpu" or str(t.layout) != "torch.strided":
        raise ValueError(
            f"{name()}: expected a strided tensor on the CPU, got one on {t.device} with layout"
            f" {str(t.layout).removeprefix('torch.')}"
        )
    if t.is_quantized:
        raise ValueError(
            f"{name()}: expected a tensor whose bytes are its values, got a quantized one: pass x.int_repr(), or"
            " x.dequantize()"
        )
    check_reach(geometry_of(t), name)


def is_transformed(t: Tensor) -> bool:
    """Whether a transform of torch.func wraps a tensor."""
    library = torch()
    return bool(library._C._functorch.is_functorch_wrapped_tensor(t)) or bool(library._is_functional_tensor(t))


def check_again(tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
    """The same at a later call: types, dtypes and devices are those of the layout, but transforms are none of it."""
    if torch()._C._functorch.maybe_current_level():
        for u, t in enumerate(tensors):
            check_tensor(t, lambda u=u: name(u))  # type: ignore[misc]


def geometry_of(t: Tensor) -> Geometry:
    """A tensor's geometry, in bytes, of words as wide as its elements."""
    size = t.element_size()
    return Geometry(tuple(t.shape), tuple(s * size for s in t.stride()), UNSIGNED.get(size) or np.dtype(f"V{size}"))


def start_of(t: Tensor) -> int:
    """Where a tensor's first element lies, or would: of an empty one torch tells no address."""
    return int(t.untyped_storage().data_ptr() + t.storage_offset() * t.element_size())


def twin(t: Tensor) -> Array:
    """An ndarray on the same bytes."""
    geometry = geometry_of(t)
    if 0 in geometry.shape:
        return np.empty(geometry.shape, geometry.dtype)
    return np.asarray(MemoryAt(t.data_ptr(), geometry, False, t)).view(geometry.dtype)


def twins(tensors: Sequence[Tensor]) -> list[Array]:
    """The twins of several."""
    return [twin(t) for t in tensors]


@dataclass(frozen=True)
class StoragePlace:
    """Where a tensor lay: its storage, where that began, how many bytes it had, and what of it the tensor showed."""

    storage: Storage
    start: int
    size: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> StoragePlace:
        storage = t.untyped_storage()
        return StoragePlace(storage, storage.data_ptr(), storage.nbytes(), t.storage_offset(), t.shape, t.stride())

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor lies there."""
        shown = t.storage_offset(), t.shape, t.stride()
        return bool(
            t.untyped_storage()._cdata == self.storage._cdata and shown == (self.offset, self.shape, self.stride)
        )


#: Where a tensor keeps its hooks.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class History:
    """The node of a tensor that is no leaf, and a second end of its history."""

    node: Node | None
    end: Tensor


class SavedTensor:
    """What of one tensor can be put back, beside its bytes: of an argument, or of the base of one."""

    __slots__ = ("attributes", "grad", "history", "hooks", "requires_grad", "t", "version", "where")

    def __init__(self, t: Tensor) -> None:
        self.t, self.where = t, StoragePlace.of(t)
        self.version: int | None = None if t.is_inference() else t._version
        self.requires_grad: bool = t.requires_grad
        self.attributes: dict[str, object] = dict(t.__dict__)
        self.grad: Tensor | None = t.grad if t.is_leaf or not self.requires_grad else None
        self.history: History | None = None
        self.hooks: dict[str, dict[object, object] | None] = {}
        if self.requires_grad:
            self.hooks = {k: None if (hooks := getattr(t, k, None)) is None else dict(hooks) for k in HOOKS}
            if not t.is_leaf and t._base is None:  # a view has the history of its base
                self.history = History(t.grad_fn, parts().Ends.apply(t))

    @staticmethod
    def of_stateless(t: Tensor, where: StoragePlace, version: int) -> SavedTensor:
        """The same of one that `are_stateless` finds so."""
        saved = object.__new__(SavedTensor)
        saved.t, saved.where, saved.version, saved.requires_grad = t, where, version, False
        saved.attributes, saved.grad, saved.history, saved.hooks = {}, None, None, {}
        return saved

    def undo(self) -> None:
        """Put back all but the bytes and the version."""
        t, library, where = self.t, torch(), self.where
        if not where.holds(t):
            with library.no_grad():
                empty = library.empty(0, dtype=t.dtype, device="cpu")
                t.data = empty.set_(where.storage, where.offset, where.shape, where.stride)
        if self.history is not None:
            if t.grad_fn is not self.history.node:
                with library.enable_grad():
                    parts().Back.apply(t, self.history.end)
        elif t.grad_fn is not None and not t._is_view():
            t.detach_()
        if t.is_leaf:
            if t.requires_grad != self.requires_grad:
                t.requires_grad_(self.requires_grad)
            if t.grad is not self.grad:
                t.grad = self.grad
        if not trees.same_items(self.attributes, t.__dict__):
            t.__dict__.clear()
            t.__dict__.update(self.attributes)
        for name, before in self.hooks.items():
            now: dict[object, object] = getattr(t, name, None) or {}
            for key in list(now):
                if key not in (before or {}):
                    del now[key]

    def count(self) -> None:
        """Put back the version: whoever saved the tensor will find what was saved."""
        if self.version is not None and self.t._version != self.version:
            torch()._C._autograd._unsafe_set_version_counter((self.t,), (self.version,))


def versions_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """The version of each; None where one has none, as those of inference mode."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return None


def are_stateless(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each has no base, asks for no gradient and has none, and keeps no attributes."""
    without = [t._base is None and t.grad is None and not t.__dict__ for t in tensors]
    if not torch()._C._any_requires_grad(*tensors):
        return without
    return [one and not t.requires_grad for one, t in zip(without, tensors, strict=True)]


class CallerTensors(CallerArrays):
    """The caller's tensors, and what is needed to put them back."""

    def __init__(self, plan: Plan, arrays: Sequence[Tensor], copied: Sequence[int] | None = None) -> None:
        super().__init__(plan, arrays, copied)
        self.full: dict[int, SavedTensor] = {}
        grads: list[Tensor] = []
        tensors = arrays if copied is None else [arrays[u] for u in self.numbers]
        versions = versions_of(tensors)
        stateless = are_stateless(tensors) if versions else [False] * len(tensors)
        #: the numbers of tensors of which there is little to know, and that little
        self.stateless = self.numbers
        if not all(stateless):
            self.stateless = [u for u, one in zip(self.numbers, stateless, strict=True) if one]
            for t in [t for t, one in zip(tensors, stateless, strict=True) if not one]:
                self.full[id(t)] = saved = SavedTensor(t)
                if saved.grad is not None and str(saved.grad.layout) == "torch.strided":
                    grads.append(saved.grad)
                base = t._base
                if base is not None and id(base) not in self.full:
                    self.full[id(base)] = SavedTensor(base)
            tensors = [arrays[u] for u in self.stateless]
            versions = versions_of(tensors)
        kind = torch()._C.TensorBase
        self.storages = list(map(kind.untyped_storage, tensors))
        self.sizes = list(map(torch().UntypedStorage.nbytes, self.storages))
        self.offsets = list(map(kind.storage_offset, tensors))
        self.versions = versions or []
        self.strides = {u: arrays[u].stride() for u in set(plan.loose) & set(self.stateless)}
        tangents: list[Tensor] = []
        if torch().autograd.forward_ad._current_level >= 0:
            tangents = [x for u in self.numbers if (x := tangent_of(arrays[u])) is not None]
        self.beside = Snapshot([*grads, *tangents]) if grads or tangents else None
        self.counters = [(g, g._version) for g in grads if not g.is_inference()]

    @functools.cached_property
    def saved(self) -> dict[int, SavedTensor]:
        """What is known of each tensor, and of the bases of those that are views, by identity."""
        saved = dict(self.full)
        for k, u in enumerate(self.stateless):
            if id(self.arrays[u]) in saved:
                continue  # the base of another one
            storage, offset, geometry = self.storages[k], self.offsets[k], self._member(u).geometry
            item = geometry.dtype.itemsize
            stride = self.strides.get(u) or tuple(s // item for s in geometry.strides)
            start = self.snapshot.data(self.at[u]) - offset * item if 0 not in geometry.shape else storage.data_ptr()
            where = StoragePlace(storage, start, self.sizes[k], offset, geometry.shape, stride)
            saved[id(self.arrays[u])] = SavedTensor.of_stateless(self.arrays[u], where, self.versions[k])
        return saved

    # What came of it

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        """Groups of which a storage is another one, or elsewhere."""
        return frozenset(self.plan.where[u].group for u in self.elsewhere if self._is_lost(u))

    def _is_lost(self, u: int) -> bool:
        was, storage = self.saved[id(self.arrays[u])].where, self.arrays[u].untyped_storage()
        return bool(storage._cdata != was.storage._cdata or storage.data_ptr() != was.start)

    @functools.cached_property
    def moved(self) -> list[int]:
        """Tensors whose geometry is not what it was."""
        return self.elsewhere

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        """None: tensors have no such flag."""
        return []

    @functools.cached_property
    def owners(self) -> dict[int, int]:
        """None: a storage may be many tensors'."""
        return {}

    @functools.cached_property
    def lows(self) -> dict[int, int]:
        """Where the memory of each group begins."""
        found = {}
        for g in self.copied:
            first = self.plan.groups[g].members[0]
            was = self.saved[id(self.arrays[first.number])].where
            found[g] = was.storage.data_ptr() + was.offset * self.arrays[first.number].element_size() - first.offset
        return found

    def span(self, number: int) -> tuple[int, int]:
        """Where a group's memory begins and ends."""
        return self.lows[number], self.lows[number] + max(self.plan.groups[number].size, 1)

    def geometry(self, o: Array | Tensor) -> Geometry:
        """An array's geometry."""
        return Geometry.of(o) if isinstance(o, np.ndarray) else geometry_of(o)

    def begin(self, o: Array | Tensor) -> int:
        """Where an array's first element lies."""
        return super().begin(o) if isinstance(o, np.ndarray) else start_of(o)

    def is_array(self, o: object) -> bool:
        """Whether an output is an array."""
        return isinstance(o, (torch().Tensor, np.ndarray))

    def remakeable(self, o: object) -> bool:
        """Whether an output is all in its memory and geometry."""
        return type(o) in (torch().Tensor, np.ndarray)

    def group_at(self, array: Array | Tensor) -> int | None:
        """The group in whose memory a tensor lies, or an ndarray (by `x.numpy()`)."""
        if not isinstance(array, np.ndarray) and (
            array.device.type != "cpu" or str(array.layout) != "torch.strided" or is_transformed(array)
        ):
            return None
        return super().group_at(array)

    # Putting back

    def undo(self) -> None:
        """Leave the tensors as they were."""
        library = torch()
        with library.inference_mode(False):
            for h in self.saved.values():
                if h.where.storage.nbytes() != h.where.size:
                    h.where.storage.resize_(h.where.size)
            for h in self.saved.values():  # bases come behind their views, which are whole only when these are
                h.undo()
        for u in self.numbers:
            was = self.saved[id(self.arrays[u])].where
            begin = was.storage.data_ptr() + was.offset * self.arrays[u].element_size()
            self.snapshot.restore(self.at[u], begin if was.storage.data_ptr() else None)
        if self.beside is not None:
            for k in range(len(self.beside)):
                self.beside.restore(k)
        for h in self.saved.values():
            h.count()
        for g, version in self.counters:
            if g._version != version:
                library._C._autograd._unsafe_set_version_counter((g,), (version,))
        for u in self.numbers:
            self._forget_history(self.arrays[u])

    def _forget_history(self, t: Tensor) -> None:
        """Have a view ask its base anew where it comes from, or not at all where that asks for no gradient any more."""
        if t._base is None or t.is_inference():
            return
        if t.requires_grad and not self.saved[id(t)].requires_grad and not t._base.requires_grad:
            library = torch()
            view = library._C._autograd
            made = view._get_creation_meta(t)
            fresh = t._base.as_strided(t.shape, t.stride(), t.storage_offset())
            view._set_creation_meta(fresh, made)
            try:
                # Not by torch.utils.swap_tensors: that refuses what a graph has saved. Who has saved the tensor keeps
                # the other one, on the same bytes, with the same version.
                library._C._swap_tensor_impl(t, fresh)
            except RuntimeError:
                return  # somebody has a weak reference to it in C: it keeps an end that leads nowhere
        elif t.requires_grad:
            _ = t.grad_fn


def tangent_of(t: Tensor) -> Tensor | None:
    """The tangent of a tensor in forward mode, where there is one."""
    forward = torch().autograd.forward_ad
    if forward._current_level < 0:
        return None
    tangent = forward.unpack_dual(t).tangent
    return tangent if tangent is not None and str(tangent.layout) == "torch.strided" else None


class Context(Protocol):
    """What a function of autograd's is given to say what it did."""

    def mark_dirty(self, *args: object) -> None: ...


class Function(Protocol):
    """A function of autograd's."""

    def apply(self, *args: object) -> Tensor: ...


class Parts(NamedTuple):
    Ends: Function
    Back: Function


@functools.cache
def parts() -> Parts:
    """Two functions of autograd's; made when there is a torch."""
    function: Any = torch().autograd.Function

    class Ends(function):  # type: ignore[misc]
        """A second end of a tensor's history: whoever takes it on has what the tensor had."""

        @staticmethod
        def forward(ctx: object, t: Tensor) -> Tensor:
            return t.new_empty(()).expand(t.shape)

        @staticmethod
        def backward(ctx: object, g: object) -> object:
            return g

    class Back(function):  # type: ignore[misc]
        """Gives a tensor the history of another one; its bytes are put back by others."""

        @staticmethod
        def forward(ctx: Context, t: Tensor, end: object) -> Tensor:
            ctx.mark_dirty(t)
            return t

        @staticmethod
        def backward(ctx: object, g: object) -> object:
            return None, g

    return Parts(Ends, Back)


def retyped(source: Tensor, dtype: DType) -> Tensor:
    """A view of the start of a tensor's storage as another dtype, of which `as_strided` makes any other.

    It is derived from the tensor, so that writes to either are counted together; parts of complex numbers by the views
    that gradients follow.
    """
    library = torch()
    own, other = source.element_size(), dtype.itemsize
    count = max(1, other // own)
    if count * own > source.untyped_storage().nbytes():
        count = 0
    start = source.as_strided((count,), (1,), 0)
    if source.is_complex() and not dtype.is_complex and 2 * other == own:
        parts: Tensor = library.view_as_real(start)
        return parts if start.real.dtype == dtype else parts.view(dtype)
    if dtype.is_complex and source.is_floating_point() and other == 2 * own:
        pairs: Tensor = library.view_as_complex(start.view(count // 2, 2))
        return pairs if pairs.dtype == dtype else pairs.view(dtype)
    return start.view(dtype)
