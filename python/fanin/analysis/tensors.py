"""What is special about torch tensors: the caller's own in a run, a watched run on copies, the pure function.

It is imported where a call has tensors. A tensor's autograd state (its node, hooks, the graphs that saved it) cannot be
moved to another tensor; so `functionalize` runs the function on the caller's tensors. Kept to restore them
(`RunTensors`): the bytes that they and their gradients show, versions, geometry, storage, `requires_grad`, attributes
and hooks; of a tensor with a history a second end of it (`SavedTensor`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._interop.torch import layout_of
from .._words import type_of
from . import trees
from .admitted import Reads, Tie, hides, in_function, storage_of, tie_of, uncompiled, unlisted_writes, version_of
from .arrays import UNSIGNED, Array, Geometry, Lost, MemoryAt, Plan, RunArrays, Step, check_reach, run_steps
from .calls import Behaviour, Call, Place, array_kinds, check_result, may_hold
from .descriptors import PlainAOTInput, PlainAOTOutput
from .memory import Snapshot
from .pure import Pure
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

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Without its types: mypy may run where it is not installed.
torch: Any = importlib.import_module("torch")
Tensor = Any


def bits_error(t: Tensor, name: str) -> ValueError:
    """The error for a tensor whose bytes are to be conjugated or negated: a base of others has no such bit."""
    bit, remedy = ("conjugate", "x.resolve_conj()") if t.is_conj() else ("negative", "x.resolve_neg()")
    return ValueError(
        f"functionalize: {name}: expected a tensor whose bytes are its values, got one with its {bit} bit set: pass"
        f" {remedy}, or no compiler"
    )


def is_transformed(t: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t)) or bool(torch._is_functional_tensor(t))


def geometry_of(t: Tensor) -> Geometry:
    """A tensor's geometry, in bytes, of words as wide as its elements."""
    size = t.element_size()
    return Geometry(tuple(t.shape), tuple(s * size for s in t.stride()), UNSIGNED.get(size) or np.dtype(f"V{size}"))


def start_of(t: Tensor) -> int:
    """The address of a tensor's first element, or where it would be: torch gives none for an empty tensor."""
    return int(t.untyped_storage().data_ptr() + t.storage_offset() * t.element_size())


def numpy_view(t: Tensor) -> Array:
    """An ndarray on the same bytes."""
    geometry = geometry_of(t)
    if 0 in geometry.shape:
        return np.empty(geometry.shape, geometry.dtype)
    return np.asarray(MemoryAt(t.data_ptr(), geometry, False, t)).view(geometry.dtype)


#: Where a tensor keeps its hooks.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def pieces_of(t: Tensor) -> list[Tensor]:
    """The strided tensors on the host that hold a tensor's bytes: itself, or what a sparse one is made of."""
    if not t.is_cpu:
        return []
    if layout_of(t) == "strided":
        return [t]
    return [t._indices(), t._values()] if layout_of(t) == "sparse_coo" else []


def shown_by(t: Tensor) -> tuple[object, ...]:
    """The storages of a tensor, and what of them it shows and how."""
    places = [
        (p.untyped_storage()._cdata, p.storage_offset(), p.shape, p.stride(), p.is_conj(), p.is_neg())
        for p in pieces_of(t)
    ]
    return (t.layout, t.device, t.dtype, t.shape, *places)


class History(NamedTuple):
    """The node of a tensor that is no leaf, a second end of its history, and the dict of its hooks."""

    node: Any
    end: Tensor
    hooks: dict[object, object]

    @staticmethod
    def of(t: Tensor) -> History:
        """Call it with gradients enabled. `unsafe_split_with_sizes` is the cheapest operation whose result is no view:
        the node of a view changes with its base.
        """
        node = t.grad_fn
        assert node is not None
        hooks = t._backward_hooks
        if hooks is None:  # the node keeps this dict, whatever becomes of the tensor
            t._backward_hooks = hooks = OrderedDict()
            node._register_hook_dict(t)
        if isinstance(node, Back._backward_cls):
            end = node.end  # an undo made this node
        elif layout_of(t) != "strided":
            end = Ends.apply(t)
        elif t.shape:
            end = t.unsafe_split_with_sizes(t.shape[:1])[0]
        else:
            end = torch.ops.aten._unsafe_view.default(t, ())
        return History(node, end, hooks)


class Hooks(NamedTuple):
    """The hooks of a tensor: which, the dict that has them, and what was in it."""

    name: str
    held: dict[object, object] | None
    before: dict[object, object]


#: Those of a tensor that has none.
NO_HOOKS = [Hooks(name, None, {}) for name in HOOKS]


class SavedTensor:
    """The state of one tensor, except its bytes: an argument, the base of one, or a gradient.

    `alias`: a second tensor on its storage, of the geometry, dtype and layout that it had.
    """

    __slots__ = (
        "alias", "attributes", "grad", "history", "hooks", "kind", "pieces", "requires_grad", "retained", "sizes", "t",
        "version",
    )  # fmt: skip

    def __init__(self, t: Tensor) -> None:
        self.t, self.kind, self.alias = t, type(t), t.detach()
        self.version: int | None = None if t.is_inference() else t._version
        self.requires_grad: bool = t.requires_grad
        self.attributes: dict[str, object] = dict(t.__dict__)
        self.grad: Tensor | None = t.grad if t.is_leaf or t.retains_grad else None
        self.history: History | None = None
        self.hooks: list[Hooks] = NO_HOOKS
        self.retained = False
        if self.requires_grad:
            self.retained = t.retains_grad
            if not t.is_leaf and t._base is None:  # a view has the history of its base
                with torch.enable_grad():
                    self.history = History.of(t)
            self.hooks = [Hooks(k, hooks := getattr(t, k), dict(hooks or {})) for k in HOOKS]
        self._hold()

    @staticmethod
    def of_plain(
        alias: Tensor,
        t: Tensor,
        kind: type,
        version: int,
        size: int,
        requires_grad: bool,
        grad: Tensor | None,
        history: History | None,
    ) -> SavedTensor:
        """The same of one that `are_plain` finds so."""
        saved = object.__new__(SavedTensor)
        saved.t, saved.kind, saved.alias, saved.version, saved.requires_grad = t, kind, alias, version, requires_grad
        saved.attributes, saved.grad, saved.history, saved.retained = {}, grad, history, False
        saved.hooks = NO_HOOKS if history is None else [Hooks(HOOKS[0], history.hooks, {}), NO_HOOKS[1]]
        saved.pieces, saved.sizes = [alias], [size]
        return saved

    def _hold(self) -> None:
        self.pieces = pieces_of(self.alias)
        self.sizes = [p.untyped_storage().nbytes() for p in self.pieces]

    def undo_storage(self) -> None:
        for p, size in zip(self.pieces, self.sizes, strict=True):
            storage = p.untyped_storage()
            if storage.nbytes() != size:
                storage.resize_(size)

    def undo_bytes(self, piece: int, restore: Callable[[int], None]) -> None:
        """Write the bytes of a piece at its current place; never beyond its storage."""
        p = self.pieces[piece]
        storage = p.untyped_storage()
        if storage.nbytes() != self.sizes[piece]:
            raise RuntimeError(f"its storage has {storage.nbytes()} bytes and had {self.sizes[piece]}")
        if p.numel():
            restore(p.data_ptr())

    def undo_place(self) -> None:
        """Put back its class, place and history."""
        t = self.t
        if type(t) is not self.kind:
            t.__class__ = self.kind
        if shown_by(t) != shown_by(self.alias):
            with torch.no_grad():
                t.data = self.alias
        if t._base is None:
            self._undo_history()

    def undo_rest(self) -> None:
        """Put back the rest, after the versions: autograd raises for one of several views before that."""
        t = self.t
        if t.is_leaf and t.requires_grad != self.requires_grad:
            t.requires_grad_(self.requires_grad)
        if (t.is_leaf or t.retains_grad) and t.grad is not self.grad:
            t.grad = self.grad
        if not trees.same_items(self.attributes, t.__dict__):
            t.__dict__.clear()
            t.__dict__.update(self.attributes)
        for hooks in self.hooks:
            for held in (hooks.held or {}, getattr(t, hooks.name) or {}):
                for key in [key for key in held if key not in hooks.before]:
                    held.pop(key)
        if t.retains_grad and not self.retained:
            raise RuntimeError("it retains its gradient from now on")

    def _undo_history(self) -> None:
        """Restore the history of a tensor that is no view, without an edge to nodes that the function made. One edge
        stays if it retains its gradient: torch cannot undo that.
        """
        t, history = self.t, self.history
        if t.grad_fn is (history and history.node):
            return
        retains = t.retains_grad
        with torch.enable_grad():
            if history is None or not retains:
                t.detach_()
            if history is not None:
                history.end.data = history.end.new_empty(()).expand(t.shape)  # it keeps no memory alive
                Back.apply(t, history.end)
            elif retains:  # without a history it would retain gradients for ever: a body that does not
                torch._C._swap_tensor_impl(t, self.alias.detach())

    def count(self) -> None:
        """Put back the version: a graph that saved the tensor accepts it again."""
        if self.version is not None and self.t._version != self.version:
            torch._C._autograd._unsafe_set_version_counter((self.t,), (self.version,))


def undo_all(saved: list[tuple[tuple[int, str], SavedTensor]], undo_bytes: Callable[[Lost], None]) -> Lost:
    """Restore tensors, named as in `Lost.unless`: bases before views, versions after bytes."""
    lost = Lost()
    saved.sort(key=lambda one: one[1].t._base is not None)
    with torch.inference_mode(False):
        for step in (SavedTensor.undo_storage, SavedTensor.undo_place):
            for name, one in saved:
                lost.unless(name, step, one)
        undo_bytes(lost)
        for step in (SavedTensor.count, SavedTensor.undo_rest):
            for name, one in saved:
                lost.unless(name, step, one)
    return lost


def versions_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """The version of each; None where one has none, as those of inference mode."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return None


def are_plain(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each is without a base, hooks, attributes and a gradient that it retains."""
    without = [t._base is None and not t.__dict__ for t in tensors]
    if not torch._C._any_requires_grad(*tensors):
        return without
    return [
        one and not t._backward_hooks and not t._post_accumulate_grad_hooks and not t.retains_grad
        for one, t in zip(without, tensors, strict=True)
    ]


def are_alone(tensors: Sequence[Tensor]) -> bool:
    """Whether all are strided, on the host, and have no gradient of their own."""
    kind = torch._C.TensorBase
    return (
        all(map(kind.is_cpu.__get__, tensors))
        and {torch.strided}.issuperset(map(kind.layout.__get__, tensors))
        and not any(t.is_leaf and t.grad is not None for t in tensors)
    )


class RunTensors(RunArrays):
    """The caller's tensors, and what is needed to put them back."""

    @staticmethod
    def check(t: Any, name: Callable[[], str]) -> None:
        """TypeError, ValueError for a tensor that cannot be put back from its bytes."""
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name()}: expected a plain torch.Tensor or a Parameter, got {type_of(t)}: pass the tensor that it"
                " holds"
            )
        if is_transformed(t):
            raise TypeError(
                f"{name()}: expected a tensor with memory of its own, got one that torch.func (vmap, grad,"
                " functionalize) wraps: transform the inner function instead"
            )
        if t.is_nested:
            raise TypeError(f"{name()}: expected one tensor, got a nested one: pass its parts, x.unbind()")
        if t.device.type != "cpu" or layout_of(t) != "strided":
            raise ValueError(
                f"{name()}: expected a strided tensor on the CPU, got one on {t.device} with layout {layout_of(t)}"
            )
        if t.is_quantized:
            raise ValueError(
                f"{name()}: expected a tensor whose bytes are its values, got a quantized one: pass x.int_repr(), or"
                " x.dequantize()"
            )
        check_reach(geometry_of(t), name)

    @staticmethod
    def check_again(arrays: Sequence[Tensor], name: Callable[[int], str]) -> None:
        """Types, dtypes and devices are those of the layout, but transforms are none of it."""
        if torch._C._functorch.maybe_current_level():
            for u, t in enumerate(arrays):
                RunTensors.check(t, lambda u=u: name(u))  # type: ignore[misc]

    def __init__(self, plan: Plan, arrays: Sequence[Tensor], copied: Sequence[int] | None = None) -> None:
        super().__init__(plan, arrays, copied)
        self.full: dict[int, SavedTensor] = {}
        #: of what is no argument, by identity: the number of one that it belongs to, and what it is to that; an undo
        #: completes this and `beside`
        self.names: dict[int, tuple[int, str]] = {}
        #: pieces of gradients and tangents with kept bytes: the tensor's identity, and which piece
        self.beside: list[tuple[int, int]] = []
        pieces: list[Tensor] = []
        tensors = list(arrays) if copied is None else [arrays[u] for u in self.numbers]
        known = versions_of(tensors) is not None and torch.autograd.forward_ad._current_level < 0
        plain = are_plain(tensors) if known else [False] * len(tensors)
        numbers = self.numbers
        if not all(plain):
            for u, t, one in zip(self.numbers, tensors, plain, strict=True):
                if not one:
                    pieces += self._save(u, t)
            numbers = [u for u, one in zip(self.numbers, plain, strict=True) if one]
            tensors = [arrays[u] for u in numbers]
        #: the numbers of plain tensors; their facts, and those of their plain gradients, are in the lists below
        self.of_plain = numbers
        self.grads = [t.grad if t.is_leaf else None for t in tensors]
        if any(grad is not None for grad in self.grads):
            tensors += self._save_grads(pieces)
        self.plain = tensors
        kind = torch._C.TensorBase
        self.storages = list(map(kind.untyped_storage, tensors))
        self.sizes = list(map(torch.UntypedStorage.nbytes, self.storages))
        self.offsets = list(map(kind.storage_offset, tensors))
        self.dtypes = [t.dtype for t in tensors]
        self.requires_grad = [t.requires_grad for t in tensors]
        self.histories: Sequence[History | None] = [None] * len(tensors)
        if any(self.requires_grad) and not all(t.is_leaf for t in tensors):
            with torch.enable_grad():
                self.histories = [None if t.is_leaf else History.of(t) for t in tensors]
        self.bits: list[tuple[bool, bool]] = []
        if any(map(kind.is_conj, tensors)) or any(map(kind.is_neg, tensors)):
            self.bits = [(t.is_conj(), t.is_neg()) for t in tensors]
        self.kinds = list(map(type, tensors))
        self.versions = versions_of(tensors) or []
        self.strides = {u: arrays[u].stride() for u in set(plan.loose) & set(numbers)}
        #: of the gradients in these lists
        grads = tensors[len(numbers) :]
        self.lies = list(zip([g.shape for g in grads], map(kind.stride, grads), strict=True))
        self.beside_bytes = Snapshot(pieces) if pieces else None

    def _save(self, u: int, t: Tensor) -> list[Tensor]:
        """Keep one tensor, its base, gradient and tangent; returns the pieces of those two."""
        self.full[id(t)] = saved = SavedTensor(t)
        if t._base is not None and id(t._base) not in self.full:
            self.names[id(t._base)] = u, "the base of {}"
            self.full[id(t._base)] = SavedTensor(t._base)
        return self._save_beside(u, saved.grad, "{}.grad") + self._save_beside(u, tangent_of(t), "the tangent of {}")

    def _save_beside(self, u: int, t: Tensor | None, name: str) -> list[Tensor]:
        if t is None or id(t) in self.full:
            return []
        self.names[id(t)] = u, name
        self.full[id(t)] = saved = SavedTensor(t)
        self.beside += [(id(t), k) for k in range(len(saved.pieces))]
        return saved.pieces

    def _save_grads(self, pieces: list[Tensor]) -> list[Tensor]:
        """Keep the gradients of plain tensors; returns them where all are plain themselves."""
        known = {*map(id, self.arrays), *self.names}
        grads = list({id(g): g for g in self.grads if g is not None and id(g) not in known}.values())
        if all(are_plain(grads)) and versions_of(grads) is not None and are_alone(grads):
            pieces += grads
            return grads
        for u, g in zip(self.of_plain, self.grads, strict=True):
            pieces += self._save_beside(u, None if id(g) in known else g, "{}.grad")
        return []

    def _keep_owners(self) -> None:
        """A storage is held, and has no names."""
        self.roots, self.names_of_fields = {}, []

    @functools.cached_property
    def saved(self) -> dict[int, SavedTensor]:
        """Each tensor, gradient and base of a view, by identity."""
        saved = dict(self.full)
        for k, t in enumerate(self.plain):
            if id(t) in saved:
                continue  # the base of another one
            if k < len(self.of_plain):
                u, grad = self.of_plain[k], self.grads[k]
                geometry = self._member(u).geometry
                shape = geometry.shape
                stride = self.strides.get(u) or tuple(s // geometry.dtype.itemsize for s in geometry.strides)
            else:
                (shape, stride), grad = self.lies[k - len(self.of_plain)], None
            with torch.no_grad():
                alias = torch.empty(0, dtype=self.dtypes[k], device="cpu")
                alias.set_(self.storages[k], self.offsets[k], shape, stride)
                conj, neg = self.bits[k] if self.bits else (False, False)
                alias = alias.conj() if conj else alias
                alias = torch._neg_view(alias) if neg else alias
            known = self.kinds[k], self.versions[k], self.sizes[k], self.requires_grad[k], grad, self.histories[k]
            saved[id(t)] = SavedTensor.of_plain(alias, t, *known)
        return saved

    def _saved(self, u: int) -> SavedTensor:
        return self.saved[id(self.arrays[u])]

    # Changes

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        return frozenset(self.plan.where[u].group for u in self.elsewhere if self._is_lost(u))

    def _is_lost(self, u: int) -> bool:
        was, t = self._saved(u), self.arrays[u]
        if layout_of(t) != "strided" or t.untyped_storage()._cdata != was.alias.untyped_storage()._cdata:
            return True
        if not was.alias.numel():
            return bool(was.alias.untyped_storage().nbytes() != was.sizes[0])
        return bool(was.alias.data_ptr() != self.snapshot.data(self.at[u]))

    @functools.cached_property
    def moved(self) -> list[int]:
        return self.elsewhere

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        return []

    @functools.cached_property
    def lows(self) -> dict[int, int]:
        found = {}
        for g in self.copied:
            first = self.plan.groups[g].members[0]
            found[g] = start_of(self._saved(first.number).alias) - first.offset
        return found

    def span(self, number: int) -> tuple[int, int]:
        return self.lows[number], self.lows[number] + max(self.plan.groups[number].size, 1)

    def geometry(self, o: Array | Tensor) -> Geometry:
        return Geometry.of(o) if isinstance(o, np.ndarray) else geometry_of(o)

    def begin(self, o: Array | Tensor) -> int:
        return super().begin(o) if isinstance(o, np.ndarray) else start_of(o)

    def is_array(self, o: object) -> bool:
        return isinstance(o, (torch.Tensor, np.ndarray))

    def remakeable(self, o: object) -> bool:
        return type(o) in (torch.Tensor, np.ndarray)

    def group_at(self, array: Array | Tensor) -> int | None:
        """The group in whose memory a tensor lies, or an ndarray (by `x.numpy()`)."""
        if not isinstance(array, np.ndarray) and (
            array.device.type != "cpu" or str(array.layout) != "torch.strided" or is_transformed(array)
        ):
            return None
        return super().group_at(array)

    # Putting back

    def undo(self) -> Lost:
        self.beside += [(id(g), 0) for g in self.plain[len(self.of_plain) :]]
        self.names |= {id(self.arrays[u]): (u, "{}") for u in self.numbers}
        self.names = {id(g): (u, "{}.grad") for u, g in zip(self.of_plain, self.grads, strict=True)} | self.names
        lost = undo_all([(self.names[i], h) for i, h in self.saved.items()], self._undo_bytes)
        with torch.inference_mode(False):
            for u in self.numbers:
                lost.unless((u, "{}"), self._forget_history, self.arrays[u])
        return lost

    def _undo_bytes(self, lost: Lost) -> None:
        for u in self.numbers:
            lost.unless((u, "{}"), self._saved(u).undo_bytes, 0, functools.partial(self.snapshot.restore, self.at[u]))
        for k, (i, piece) in enumerate(self.beside):
            assert self.beside_bytes is not None
            restore = functools.partial(self.beside_bytes.restore, k)
            lost.unless(self.names[i], self.saved[i].undo_bytes, piece, restore)

    def _forget_history(self, t: Tensor) -> None:
        """Have a view take its history from its base again, or none if the base requires no gradient any more."""
        if t._base is None or t.is_inference():
            return
        if t.requires_grad and not self.saved[id(t)].requires_grad and not t._base.requires_grad:
            view = torch._C._autograd
            made = view._get_creation_meta(t)
            fresh = t._base.as_strided(t.shape, t.stride(), t.storage_offset())
            view._set_creation_meta(fresh, made)
            try:
                # Not by torch.utils.swap_tensors: it refuses a tensor that a graph saved. Such a graph keeps
                # the other one, on the same bytes, with the same version.
                torch._C._swap_tensor_impl(t, fresh)
            except RuntimeError:
                return  # C code has a weak reference to it: it keeps an end that leads nowhere
        elif t.requires_grad:
            _ = t.grad_fn


def tangent_of(t: Tensor) -> Tensor | None:
    forward = torch.autograd.forward_ad
    if forward._current_level < 0:
        return None
    tangent: Tensor | None = forward.unpack_dual(t).tangent
    return tangent


class Ends(torch.autograd.Function):  # type: ignore[misc]
    """A second end of a tensor's history."""

    @staticmethod
    def forward(ctx: object, t: Tensor) -> Tensor:
        return t.new_empty(()).expand(t.shape)

    @staticmethod
    def backward(ctx: object, g: object) -> object:
        return g


class Back(torch.autograd.Function):  # type: ignore[misc]
    """Gives a tensor the history of another one. It writes no bytes."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, end: object) -> Tensor:
        ctx.mark_dirty(t)
        ctx.end = end
        return t

    @staticmethod
    def backward(ctx: object, g: object) -> object:
        return None, g


def retyped(source: Tensor, dtype: Any) -> Tensor:
    """A view of a tensor's storage as another dtype, of which `as_strided` makes any other.

    It is derived from the tensor, so that writes to either are counted together; parts of complex numbers by the views
    that gradients follow.
    """
    own, other = source.element_size(), dtype.itemsize
    count = source.untyped_storage().nbytes() // max(own, other) * max(own, other) // own  # whole elements of both
    start = source.as_strided((count,), (1,), 0)
    if source.is_complex() and not dtype.is_complex and 2 * other == own:
        parts: Tensor = torch.view_as_real(start)
        return parts if start.real.dtype == dtype else parts.view(dtype)
    if dtype.is_complex and source.is_floating_point() and other == 2 * own:
        pairs: Tensor = torch.view_as_complex(start.view(count // 2, 2))
        return pairs if pairs.dtype == dtype else pairs.view(dtype)
    return start.view(dtype)


# A watched run. The arguments are copied storage by storage, so that the copies share memory, have bases and require
# gradients as the arguments do. Bytes that changed without a recorded write (through `x.numpy()`) were hidden from
# autograd.


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
        self.spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (x.untyped_storage() for x in self.tensors)]
        self.in_functions: set[int] = set()  # storages of arguments that a torch.autograd.Function wrote
        self.grew = False  # an operation ran with gradients enabled
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

    def _is_mine(self, storage: Any) -> bool:
        """Whether a storage lies in the memory of an argument's."""
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return any(low < end and start < high for low, high in self.spans)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        effects, kwargs = effects_of(func), kwargs or {}
        self.grew = self.grew or torch.is_grad_enabled()

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
                if storage._cdata in self.storages | self.made or self._is_mine(storage):
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
                    if unseen and self.undo_others and in_function():
                        self.in_functions.add(storage_of(t))
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


# The pure function: of torch's operations alone, so that it can be traced, compiled and differentiated. A base is one
# axis of elements of the dtype that all its members have. It copies what it takes by operations that gradients follow,
# calls the function, and returns what became of the copies; so whatever runs it, gradients of new values and outputs
# are those of the function. New values are written back by `copy_`, under no_grad where the function did.


@dataclass(frozen=True)
class Shown:
    """How a tensor shows its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int
    conj: bool
    neg: bool
    requires_grad: bool

    @staticmethod
    def given(t: Tensor) -> Shown:
        """That of an argument, which is a strided tensor."""
        return Shown(
            tuple(t.shape), tuple(t.stride()), t.dtype, t.storage_offset(), t.is_conj(), t.is_neg(), t.requires_grad
        )

    @staticmethod
    def of(x: object) -> Shown | None:
        """That of anything; None for what is no strided tensor."""
        return Shown.given(x) if isinstance(x, torch.Tensor) and layout_of(x) == "strided" else None


@dataclass(frozen=True)
class OutputViews:
    """How tensors showed their memory in a recorded call: arguments before it, those that it moved after, results."""

    given: Sequence[Shown]
    ends: Mapping[int, Shown]
    outputs: Sequence[Shown | None]
    quiet: frozenset[int]
    """Those whose histories a write left as they were."""
    counted: frozenset[int]
    """Those whose versions a write changed."""
    ties: Sequence[Tie | None]
    """How each output is a view of an argument, if it is one."""
    detached: Sequence[tuple[Shown, int]]
    """The detached tensors that outputs are views of, and where they begin in their group."""
    leaves: frozenset[int]
    """Those that are leaves with a gradient, which copies are not."""
    inside: str
    """The mode in which copies are made: "" for that of the call."""


class Move(NamedTuple):
    """A new value, the caller's tensor that it is written to, and the numbers of the tensors that show it."""

    new: Tensor
    its: Tensor
    numbers: Sequence[int]


class TensorPure(Pure):
    """A pure function of flat arguments, for tensors; see the top of this file and `Pure`."""

    def __init__(self, views: OutputViews, *known: Any) -> None:
        super().__init__(*known)
        self.given, self.ends, self.shown, self.quiet = views.given, views.ends, views.outputs, views.quiet
        self.counted, self.ties = views.counted, views.ties
        self.detached, self.inside, self.leaves = views.detached, views.inside, views.leaves
        plan, given = self.plan, self.given
        for g in self.bases:
            dtypes = {given[u].dtype for u in plan.groups[g].numbers}
            if len(dtypes) > 1:
                raise ValueError(
                    f"pure: {self._shown(g)} share memory, are written, and have different dtypes,"
                    f" {', '.join(sorted(map(str, dtypes)))}: a base of tensors has one; expected views of one dtype,"
                    " or no compiler"
                )
        for u in self.changed:
            if plan.groups[plan.where[u].group].members[plan.where[u].place].geometry.crowded:
                raise ValueError(
                    f"pure: {PlainAOTInput(self.first[u]).expr()} is written, and several of its elements are one:"
                    " expected a tensor that is not expanded, or no compiler"
                )
        # Worked out now, and plain: what a tracer meets in a call must be nothing but tuples and lists.
        groups = [plan.groups[g] for g in self.bases]
        #: how many elements each base has
        self.sizes = [group.size // given[group.numbers[0]].dtype.itemsize for group in groups]
        by_position, by_name = self.form.of_call()
        self.by_position, self.by_name = by_position, list(by_name.items())
        self.input_names = [d.expr() for d in self.input_descs]
        #: per tensor, whether a copy of it has gaps
        self.roomy = [needs_room(one.shape, one.stride) for one in given]
        #: per tensor: (inner position, offset in the base or None)
        members = [plan.groups[group].members[place] for group, place in plan.where]
        self.places = [
            (one.position, None if one.place is None else m.offset // shown.dtype.itemsize)
            for one, m, shown in zip(self.sources, members, given, strict=True)
        ]
        #: outputs that are views of arguments, without the gradients that others have. AOTAutograd replays such an
        #: alias on another output, and may crash; so the call returns clones. `_view` needs their shapes alone.
        grows = any(one is not None and one.requires_grad for one in (*given, *self.shown))
        self.cut = [
            j
            for j, (p, one) in enumerate(zip(self.outcome.places, self.shown, strict=True))
            if grows and p.kind == "view" and one is not None and not one.requires_grad
        ]

    def _shown(self, group: int) -> str:
        return ", ".join(PlainAOTInput(self.first[u]).expr() for u in self.plan.groups[group].numbers)

    def _stand_in(self, number: int | None) -> Tensor:
        one = self.given[number or 0]
        made: Tensor = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        return made.requires_grad_(one.requires_grad)

    def _base_stand_in(self, group: int) -> Tensor:
        numbers = self.plan.groups[group].numbers
        size = self.sizes[self.bases.index(group)]
        base: Tensor = torch.empty(size, dtype=self.given[numbers[0]].dtype, device="meta")
        return base.requires_grad_(any(self.given[u].requires_grad for u in numbers))

    # The pure function

    def __call__(self, *inner: Any) -> list[Any]:
        """Run the function on copies. ValueError: more or fewer arguments, or of other shapes or dtypes, than
        those of `input_descs`, or another number of results.
        """
        names = self.input_names
        if len(inner) != len(names):
            raise ValueError(f"pure: expected {len(names)} arguments, {', '.join(names)}; got {len(inner)}")
        wanted = [((n,), self.given[self.plan.groups[g].numbers[0]].dtype) for g, n in zip(self.bases, self.sizes)]  # noqa: B905  (traced)
        for u, (position, offset) in enumerate(self.places):
            if offset is None:
                check_shape(inner[position], self.given[u].shape, self.given[u].dtype, f"pure: {names[position]}")
        for k, (shape, dtype) in enumerate(wanted):
            check_shape(inner[k], shape, dtype, f"pure: {names[k]}")
        with mode_of(self.inside):
            bases = [inner[k].clone() for k in range(len(self.bases))]
            tensors = []
            for u, (position, offset) in enumerate(self.places):
                one = self.given[u]
                if offset is not None:
                    tensors.append(bases[position].as_strided(one.shape, one.stride, offset))
                else:
                    tensors.append(copied(inner[position], one, self.roomy[u]))
        leaves = [inner[self.positions[i]] if u is None else tensors[u] for i, u in enumerate(self.index)]
        it = iter(leaves)
        given = [filled(one, it) for one in self.by_position]
        named = {k: filled(one, it) for k, one in self.by_name}
        outputs: list[Any] = []
        eager = not torch.compiler.is_compiling()  # a tracer has neither versions nor storages
        if eager:
            before, reads, enabled = [Before.of(t) for t in tensors], Reads(), torch.is_grad_enabled()
            with reads:
                result = self.fn(*given, **{k: named[k] for k in self.order})
        else:
            result = self.fn(*given, **{k: named[k] for k in self.order})
        gather(result, outputs)
        if len(outputs) != len(self.shown):
            raise ValueError(f"pure: expected {len(self.shown)} results, as at the recorded call, got {len(outputs)}")
        if eager:
            self._hold_run(inner, tensors, before, result, outputs)
            self._hold_list(inner, tensors, before, reads, enabled, outputs)
        changed = [
            tensors[u].as_strided(self.given[u].shape, self.given[u].stride, 0) if u in self.moved else tensors[u]
            for u in self.changed
        ]
        for j in self.cut:
            if isinstance(outputs[j], torch.Tensor):
                outputs[j] = outputs[j].clone()
        return bases + changed + outputs + [tensors[u] for u in self.late]

    def _hold_run(
        self,
        inner: Sequence[Tensor],
        tensors: Sequence[Tensor],
        before: Sequence[Before],
        result: object,
        outputs: Sequence[object],
    ) -> None:
        """ValueError where a run did otherwise than was recorded. Strides are not compared of a copy that has not those
        of the recorded argument. Bytes are compared whatever the version says: `.data` and NumPy write without one.
        """
        written: set[int] = set()
        was: dict[int, object] = {u: (end.shape, end.stride) for u, end in self.ends.items()}
        now: dict[int, object] = {}
        for u, (t, then) in enumerate(zip(tensors, before, strict=True)):
            if (t.shape, t.stride()) != then.lies:
                now[u] = tuple(t.shape), tuple(t.stride())
            if u in was and tuple(then.lies[1]) != self.given[u].stride:
                now[u] = was[u]
            if has_no_storage(t):
                continue
            if storage_of(t) != then.storage:
                now[u] = "other storage"
            if u in self.may_write or u in was or u in now or type(t) is not torch.Tensor:
                continue
            if not alike(inner[self.places[u][0]], t):
                written.add(u)
        storages = {u: t.untyped_storage()._cdata for u, t in enumerate(tensors) if not has_no_storage(t)}
        roles = [self._roles(j, o, tensors, storages) for j, o in enumerate(outputs)]
        form = trees.flatten(result, [])
        self._compare(
            Behaviour(self.may_write, was, self.outcome.form, [one for one, _ in roles]),
            Behaviour(written, now, form, [other for _, other in roles]),
        )

    def _hold_list(
        self,
        inner: Sequence[Tensor],
        tensors: Sequence[Tensor],
        before: Sequence[Before],
        reads: Reads,
        enabled: bool,
        outputs: Sequence[object],
    ) -> None:
        """ValueError where a run did what is not on the list (the module `admitted`), or is another row of it than at
        the recorded call. Of what a tracer passes nothing is compared: it has no storage, or requires no gradient.
        """
        if torch.is_grad_enabled() != enabled:
            torch.set_grad_enabled(enabled)
            raise uncompiled("whether gradients are enabled is changed")
        plan, plain = self.plan, [type(t) is torch.Tensor and not has_no_storage(t) for t in tensors]
        if not all(plain) or any(
            t.requires_grad < one.requires_grad for t, one in zip(tensors, self.given, strict=True)
        ):
            return
        for u, (t, then) in enumerate(zip(tensors, before, strict=True)):
            name = PlainAOTInput(self.first[u]).expr()
            if (what := reads.hooks.get(storage_of(t))) is not None:
                raise uncompiled(f"{name}: {what}")
            if u in self.leaves and id(t) in reads.found:
                raise uncompiled(f"{name}: {reads.found[id(t)]}")
            position, offset = self.places[u]
            whole_storage = reads.storages.get(storage_of(t))
            if whole_storage is not None and (offset is not None or is_part(inner[position], whole_storage)):
                raise uncompiled(f"{name}: its place in its storage is read")
            if u in self.touched and storage_of(t) == then.storage:
                counts = self._counts(plan.groups[plan.where[u].group].numbers)
                whole, counted = t if offset is None else t._base, version_of(t) != then.version
                if counts != counted and not alike(inner[position], whole):
                    how = "without a version" if counts else "so that a version counts it"
                    raise uncompiled(f"{name} is written {how}, and was not by the recorded call")
            in_place = u in self.touched and u not in self.moved
            if in_place and u in self.quiet and history_of(t) != then.history:
                raise uncompiled(f"{name} gets a history by this call, and did not by the recorded one")
        detached: list[Tensor] = []
        arrays = list(map(numpy_view, tensors))
        for j, (o, tie) in enumerate(zip(outputs, self.ties, strict=True)):
            if hides(o, arrays):
                raise out_of_sight(j, o)
            if tie is None or type(o) is not torch.Tensor:
                continue
            now = tie_of(o, tensors, range(len(tensors)), detached)
            if not isinstance(now, Tie):
                raise uncompiled(f"{PlainAOTOutput(j).expr()} {now}")
            if not now.like(tie):
                raise uncompiled(
                    f"{PlainAOTOutput(j).expr()} is another view of {PlainAOTInput(self.first[tie.source]).expr()} to"
                    " autograd than at the recorded call"
                )

    def _roles(
        self, j: int, o: Any, tensors: Sequence[Tensor], storages: Mapping[int, int]
    ) -> tuple[Place | None, Place | None]:
        """What an output was at the recorded call, and is. Transforms of torch.func hide storages: nothing is compared
        then.
        """
        p, shown = self.outcome.places[j], self.shown[j]
        plain = Place("plain")
        was = Place(p.kind, p.base) if p.kind in ("input", "view") else plain
        if p.kind == "input" and o is tensors[p.base]:
            return was, was
        if not isinstance(o, torch.Tensor):
            return was, plain
        if layout_of(o) != "strided" or has_no_storage(o):
            return (was, plain) if p.kind == "input" else (None, None)
        storage, base = o.untyped_storage()._cdata, p.base
        if storages.get(base) != storage:
            base = next((u for u, other in storages.items() if other == storage), -1)
        # Of arguments that share memory and are not written each has a copy; the recorded base is any of them.
        if was is plain or base < 0 or self.plan.where[base].group != self.plan.where[p.base].group:
            return was, Place("view", base) if base >= 0 and o.numel() else plain
        if p.kind == "input":
            return was, Place("view", base)
        if shown is None or not self.ends.keys().isdisjoint({base, p.base}):
            return None, None
        t, (group, place) = tensors[base], self.plan.where[base]
        expected: Any = (shown.shape, shown.dtype)
        found: Any = (tuple(o.shape), o.dtype)
        if tuple(t.stride()) == self.given[base].stride:
            expected += shown.stride, p.offset - self.plan.groups[group].members[place].offset
            ahead = o.storage_offset() * o.element_size() - t.storage_offset() * t.element_size()
            found += tuple(o.stride()), ahead
        return dataclasses.replace(was, geometry=expected), dataclasses.replace(was, geometry=found)

    # The wrapper's way in

    def inner(self, leaves: Sequence[object], arrays: Sequence[Tensor]) -> list[object]:
        """The inner arguments for the caller's own, without a copy: bases are views that gradients follow. ValueError
        for a tensor with a conjugate or negative bit: a base has none.
        """
        for u, t in enumerate(arrays):
            if t.is_conj() or t.is_neg():
                raise bits_error(t, PlainAOTInput(self.first[u]).expr())
        with self._enabled():
            regions = [self.region(g, arrays) for g in self.bases]
            rest = [leaves[i] for i in self.rest]
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*arrays):
                # What is written back must not be what a compiled function has saved for its own backward.
                regions = [one.clone() for one in regions]
                written = {self.first[u] for u in self.touched}
                rest = [
                    x.clone() if i in written and isinstance(x, torch.Tensor) else x
                    for i, x in zip(self.rest, rest, strict=True)
                ]
            return [*regions, *rest]

    def region(self, group: int, arrays: Sequence[Tensor]) -> Tensor:
        """The caller's memory of a group as one axis of elements. ValueError where no such tensor has the gradients of
        all.
        """
        members = self.plan.groups[group].members
        mine = [arrays[m.number] for m in members]
        size = self.sizes[self.bases.index(group)]
        begin = (start_of(mine[0]) - mine[0].untyped_storage().data_ptr() - members[0].offset) // mine[0].element_size()
        if len({t.untyped_storage()._cdata for t in mine}) > 1:
            raise ValueError(
                f"functionalize: {self._shown(group)} share memory through several storages, and are written: expected"
                " views of one, or no compiler"
            )
        roots = {id(t if t._base is None else t._base): t if t._base is None else t._base for t in mine}
        if len(roots) == 1:
            root = next(iter(roots.values()))
            if root.dtype == mine[0].dtype:
                return root.as_strided((size,), (1,), begin)
        grown = [m.number for m in members if m.number in self.touched and m.number not in self.quiet]
        if grown or any(t.requires_grad for t in mine):
            raise ValueError(
                f"functionalize: {self._shown(group)} share memory that is written, but no history, and require"
                " gradients: expected views of one tensor, or no compiler"
            )
        with torch.no_grad():
            empty = torch.empty(0, dtype=mine[0].dtype, device="cpu")
            region: Tensor = empty.set_(mine[0].untyped_storage(), begin, (size,), (1,))
            return region

    # The wrapper's way out

    def _moves(self, arrays: Sequence[Tensor], news: Sequence[Tensor]) -> list[Move]:  # type: ignore[override]
        """New values and the caller's tensors that they are written to."""
        moves = []
        for k, g in enumerate(self.bases):
            numbers = self.plan.groups[g].numbers
            check_shape(news[k], (self.sizes[k],), self.given[numbers[0]].dtype, self._said(k))
            moves.append(Move(news[k], self.region(g, arrays), numbers))
        for k, u in enumerate(self.changed, len(self.bases)):
            if u in self.touched:
                check_shape(news[k], self.given[u].shape, self.given[u].dtype, self._said(k))
                moves.append(Move(news[k], arrays[u], (u,)))
        return moves

    def _shared(  # type: ignore[override]
        self, outputs: Sequence[object], bases: Sequence[Array]
    ) -> tuple[list[object], list[Array]]:
        """Outputs of which views will be made; where they share memory made inside, they share it already."""
        for j, p in enumerate(self.outcome.places):
            name, shown = f"functionalize: {PlainAOTOutput(j).expr()}", self.shown[j]
            if p.kind == "view" and shown is not None:
                check_shape(outputs[j], shown.shape, shown.dtype, name)
        if self.inside == "enable_grad":
            self._check_grown(outputs)
        return list(outputs), list(bases)

    def _check_grown(self, outputs: Sequence[object]) -> None:
        """ValueError for a value without the history that the function gave it within no_grad."""
        for j, (o, shown) in enumerate(zip(outputs, self.shown, strict=True)):
            wanted = shown is not None and shown.requires_grad and self.outcome.places[j].kind == "plain"
            if wanted and not (isinstance(o, torch.Tensor) and o.requires_grad):
                raise ValueError(
                    f"functionalize: {PlainAOTOutput(j).expr()}: expected a tensor with a history, as the function"
                    " gives it by torch.enable_grad(); the compiled function returned one without"
                )

    def _finish(  # type: ignore[override]
        self, arrays: Sequence[Tensor], moves: Sequence[Move], outputs: Sequence[object], bases: Sequence[Array]
    ) -> list[Any]:
        """Check that torch permits every write; then write new values and set the geometry after the call, and return
        the outputs, whose histories the writes make. An interrupt comes before all writes or after them.
        """
        enabled = torch.is_grad_enabled()
        steps: list[Step] = []
        for move in moves:
            counts, mode = self._counts(move.numbers), self._mode(move.numbers)
            if counts:
                check_may_write(move.its, mode, move.new.requires_grad, self._called(move.numbers[0]))
            its = move.its if counts else move.its.data
            steps += [functools.partial(set_grad, mode), functools.partial(write, its, move.new)]
        for u, end in self.ends.items():
            t, mode = arrays[u], enabled and u not in self.quiet
            check_may_write(t, mode, False, self._called(u))
            offset = t.storage_offset() + end.offset - self.given[u].offset
            steps += [functools.partial(set_grad, mode), functools.partial(move_to, t, end.shape, end.stride, offset)]
        versions = {u: version_of(arrays[u]) for u in self.counted}
        try:
            run_steps(steps)
        finally:
            torch.set_grad_enabled(enabled)
        for u, version in versions.items():
            if version is not None and arrays[u]._version == version:  # it shares memory, but no version, with others
                torch._C._autograd._unsafe_set_version_counter((arrays[u],), (version + 1,))
        return self._outputs(arrays, outputs, bases)

    def _called(self, u: int) -> str:
        return f"functionalize: {PlainAOTInput(self.first[u]).expr()}"

    def _said(self, slot: int) -> str:
        return f"functionalize: {self.output_descs[slot].expr()}"

    def _enabled(self) -> contextlib.AbstractContextManager[object]:
        """The mode of a call, with gradients where the function enabled them within no_grad."""
        return torch.enable_grad() if self.inside == "enable_grad" else contextlib.nullcontext()

    def _counts(self, numbers: Sequence[int]) -> bool:
        """Whether a version counts the writes to these tensors."""
        return not self.counted.isdisjoint(numbers)

    def _mode(self, numbers: Sequence[int]) -> bool:
        """Whether gradients are enabled for the write: not where the function wrote under no_grad, or in ways hidden
        from autograd.
        """
        infos = [self.meta.input_info[self.first[u]] for u in numbers if u in self.touched]
        quiet = all(i.mutations_under_no_grad_or_inference_mode or i.mutations_hidden_from_autograd for i in infos)
        quiet = quiet or self.quiet.issuperset(u for u in numbers if u in self.touched)
        return not quiet and (torch.is_grad_enabled() or self.inside == "enable_grad")

    def _view(self, arrays: Sequence[Tensor], output: int, value: object, roots: dict[int, Tensor]) -> object:
        """The caller's view that is to the caller's tensor what an output was to the copy of it."""
        p, one, tie = self.outcome.places[output], self.shown[output], self.ties[output]
        if one is None or tie is None:
            return value
        source = arrays[tie.source]
        if tie.base is None:
            with torch.enable_grad() if tie.grown else torch.no_grad():
                view = self._at(source, tie.source, p.offset, one)
        else:
            whole = roots.get(tie.base)
            if whole is None:
                root, (shown, offset) = source.detach() if tie.counted else source.data, self.detached[tie.base]
                roots[tie.base] = whole = self._at(root, tie.source, offset, shown).detach()
            view = whole if tie.is_base else self._at(source, tie.source, p.offset, one, whole)
        if tie.creation is not None and view._is_view():
            autograd, creation = torch._C._autograd, tie.creation
            if tie.base is None and creation == autograd.CreationMeta.DEFAULT and source._base is not None:
                creation = autograd._get_creation_meta(source)  # a view has that of the view that it is of
            autograd._set_creation_meta(view, creation)
        return view

    def _at(self, source: Tensor, number: int, offset: int, one: Shown, of: Tensor | None = None) -> Tensor:
        """A view of an argument, or of `of` on its memory, that begins at a byte of its group."""
        group, place = self.plan.where[number]
        held = self.given[number].offset * self.given[number].dtype.itemsize
        start = held - self.plan.groups[group].members[place].offset + offset
        now = self.ends.get(number, self.given[number])  # where it began at the recorded call, when that had ended
        start += source.storage_offset() * source.element_size() - now.offset * now.dtype.itemsize
        of = source if of is None else of
        view = of if of.dtype == one.dtype else retyped(of, one.dtype)
        view = view.as_strided(one.shape, one.stride, start // one.dtype.itemsize)
        view = view.conj() if one.conj else view
        return torch._neg_view(view) if one.neg else view


def keeping_modes(call: Callable[[], object]) -> object:
    """Call a function that enters modes of torch. Where it raises, all are left: an interrupt may come after a mode is
    entered and before Python knows that it must be left. It comes once, so one of the two handlers runs whole.
    """
    torch_c = torch._C
    enabled = torch.is_grad_enabled()
    functions, dispatches = torch_c._len_torch_function_stack(), torch_c._len_torch_dispatch_stack()

    def leave() -> None:
        while torch_c._len_torch_function_stack() > functions:
            torch_c._pop_torch_function_stack()
        while torch_c._len_torch_dispatch_stack() > dispatches:
            torch.utils._python_dispatch._pop_mode()
        torch.set_grad_enabled(enabled)

    try:
        try:
            return call()
        except BaseException:
            leave()
            raise
    except BaseException:
        leave()
        raise


class Before(NamedTuple):
    """Of a copy before the function runs."""

    version: int | None
    lies: tuple[Any, Any]
    storage: int | None
    history: object

    @staticmethod
    def of(t: Tensor) -> Before:
        if has_no_storage(t):
            return Before(None, (t.shape, t.stride()), None, None)
        return Before(version_of(t), (t.shape, t.stride()), storage_of(t), history_of(t))


def mode_of(inside: str) -> contextlib.AbstractContextManager[object]:
    """The mode in which copies are made: a function may enable gradients within no_grad; and tensors of inference mode
    have no versions.
    """
    if inside == "inference":
        mode: contextlib.AbstractContextManager[object] = torch.inference_mode(False)
        return mode
    return torch.enable_grad() if inside else contextlib.nullcontext()


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors show the same bytes. No operation of torch runs: a tracer would record it."""
    with torch._C.DisableTorchFunctionSubclass():
        return np.array_equal(numpy_view(x), numpy_view(y))


#: The steps of a write: functions of C, so that no Python runs between them.
set_grad = torch._C._set_grad_enabled
write = torch._C.TensorBase.copy_
move_to = torch._C.TensorBase.as_strided_


def copied(x: Tensor, one: Shown, roomy: bool) -> Tensor:
    """A copy of the same strides, wherever one can have them. An expanded one that requires a gradient has dense
    ones, so that each of its elements gets its own.
    """
    wide = [d for d, (n, s) in enumerate(zip(one.shape, one.stride, strict=True)) if s == 0 and n > 1]
    if wide and not one.requires_grad and all(x.stride()[d] == 0 for d in wide):
        for d in wide:
            x = x.narrow(d, 0, 1)
        return x.clone().expand(one.shape)
    if not roomy:
        return x.clone()
    return x.new_empty_strided(one.shape, one.stride).copy_(x)


def has_no_storage(t: Tensor) -> bool:
    """Whether a transform of torch.func wraps a tensor, so that it has no storage to compare."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))


def needs_room(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a clone has other strides, and a copy can have the same: there are gaps, and no two elements are one."""
    reach, dense = 1, 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s < reach:
            return False
        dense = dense * n if s == dense else 0
        reach = s * (n - 1) + reach
    return dense == 0


def filled(form: trees.Spec, leaves: Iterator[object]) -> object:
    """A tree of a form, in code that can be traced."""
    if not isinstance(form, trees.Form):
        return next(leaves)
    items = [filled(one, leaves) for one in form.inner]
    return trees.made(form.kind, items, form.keys)


def gather(tree: object, leaves: list[object]) -> None:
    """The leaves of a tree, in code that can be traced."""
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for item in tree:
            gather(item, leaves)
    elif isinstance(tree, dict):
        for item in tree.values():
            gather(item, leaves)
    else:
        leaves.append(tree)


def check_may_write(t: Tensor, enabled: bool, grows: bool, name: str) -> None:
    """RuntimeError where torch refuses a write in place: called for all tensors before the first is written.
    `enabled`: gradients are, for the write. `grows`: the new value has a history.
    """
    root = t if t._base is None else t._base
    if t.is_inference() and not torch.is_inference_mode_enabled():
        why = "is an inference tensor: write it within torch.inference_mode()"
    elif not enabled or not (grows or t.requires_grad):
        return
    elif root.is_leaf and root.requires_grad:
        why = "is a leaf that requires grad, or a view of one: write it under torch.no_grad()"
    elif t._base is not None and torch._C._autograd._get_creation_meta(t) != torch._C._autograd.CreationMeta.DEFAULT:
        why = "is a view that autograd refuses to write (one of several, or made under no_grad): pass a clone of it"
    else:
        return
    raise RuntimeError(f"{name} is written in place, and {why}; nothing was written")


def check_shape(x: object, shape: tuple[int, ...], dtype: object, name: str) -> None:
    """ValueError for another shape or dtype; TypeError for what is no strided tensor on the CPU."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor of {dtype}, shape {shape}; got {type_of(x)}")
    if layout_of(x) != "strided" or x.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a strided tensor on the CPU, got one on {x.device} with layout {layout_of(x)}"
        )
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(f"{name}: expected a tensor of {dtype}, shape {shape}; got {x.dtype}, shape {tuple(x.shape)}")


# Whether a function can be replaced by a pure one


def state_of(t: Tensor) -> tuple[object, ...]:
    """What of a tensor a compiled function cannot change: version, attributes, gradient, hooks; class, whether it
    retains its gradient; whether it requires one, and has a history; its shape and strides.
    """
    hooks = sum(len(getattr(t, name) or ()) for name in HOOKS)
    attributes = {name: id(x) for name, x in t.__dict__.items()}
    grad = id(t.grad) if t.is_leaf and t.grad is not None else None
    own = type(t), t.retains_grad
    return t._version, attributes, grad, hooks, own, t.requires_grad, t.grad_fn is not None, (t.shape, t.stride())


def unlike_copy(given: Tensor, t: Tensor, was: Sequence[object], reads: Reads) -> str | None:
    """What of one input differs on a copy, or is set and no result carries; None: nothing. `was`: `state_of` it before
    the function ran.
    """
    same = (a == b for a, b in zip(was, state_of(t), strict=True))
    version, attributes, grad, hooks, own, requires_grad, grown, lay = same
    required, had_history = was[5], was[6]
    if not attributes:
        return "attributes are set"
    if given.__dict__:
        return "it has attributes, which a copy has not"
    if not grad:
        return ".grad is set"
    if not hooks:
        return "a hook is added"
    if not own:
        return "its class is set, or its gradient retained"
    if not requires_grad and (version or required):
        return "requires_grad is set"
    if had_history and not grown:
        return "its history is cut (detach_)"
    if required and not had_history and not lay:
        return "it is a leaf that requires a gradient, and its strides change"
    if id(t) not in reads.found or not given.is_leaf:
        return None
    if given.requires_grad or given.grad is not None:
        return reads.found[id(t)]
    return None


def unlike_copies(
    record: Any, run: ObservedTensors, before: Sequence[tuple[object, ...]], reads: Reads
) -> list[Exception]:
    """Why a pure function cannot replace this one: it reads what differs on copies, or sets what no result
    carries. `record`: the wrapper's. `before`: `state_of` each.
    """
    call, tensors = run.call, run.tensors
    places = dict.fromkeys(run.strided, False) | reads.storages
    found: list[Exception] = []
    for u, (given, t, was) in enumerate(zip(call.arrays, tensors, before, strict=True)):
        name = record.name(u)
        what = unlike_copy(given, t, was, reads)
        if what is not None:
            found.append(uncompiled(f"{name}: {what}"))
        if given.is_conj() or given.is_neg():
            found.append(bits_error(given, name))
        whole = places.get(run.before[record.first[u]].untyped_storage()._cdata)
        if whole is not None:
            record.counted_from[u] = whole
            if is_part(given, whole):
                found.append(
                    uncompiled(
                        f"{name}: its place in its storage is read, or counted from (storage_offset, untyped_storage,"
                        f" as_strided with a storage_offset), and it begins at element {given.storage_offset()} of"
                        f" {given.untyped_storage().nbytes() // max(given.element_size(), 1)}: pass x.clone()"
                    )
                )
    return found


def is_part(t: Tensor, whole: bool) -> bool:
    """Whether a tensor begins after its storage's first element, which a copy never does; with `whole`, whether it
    shows less than all of its storage.
    """
    return bool(t.storage_offset() or (whole and t.untyped_storage().nbytes() != t.numel() * t.element_size()))


def history_of(t: Tensor) -> tuple[object, bool]:
    """The node of a tensor, of the base of one that is a view; and whether it requires a gradient."""
    own = t if t._base is None else t._base
    return own.grad_fn, t.requires_grad


def grad_state(tensors: Sequence[Any]) -> object:
    """Which tensors require a gradient, are leaves, have attributes, are of inference mode; and which modes are on."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, [(t.requires_grad, t.is_leaf, bool(t.__dict__), t.is_inference()) for t in tensors]


def out_of_sight(j: int, o: object) -> ValueError:
    return uncompiled(f"{PlainAOTOutput(j).expr()} is {type_of(o)} on the memory of an argument")


def admitted_views(
    record: Any, run: ObservedTensors, caller: RunTensors, before: Sequence[tuple[Any, Any]], reads: Reads
) -> tuple[OutputViews, list[Exception]]:
    """What a record holds of a run: how results are views of arguments, and in which ways arguments are written; and
    why some of it is not on the list (the module `admitted`).
    """
    problems: list[Exception] = []
    tensors, outputs = run.tensors, run.outputs
    for u, t in enumerate(tensors):
        if (what := reads.hooks.get(storage_of(t))) is not None:
            problems.append(uncompiled(f"{record.name(u)}: {what}"))
    if run.left is not None:
        problems.append(uncompiled("whether gradients are enabled is changed"))
    quiet = frozenset(u for u, t in enumerate(tensors) if history_of(t) == before[u][0])
    touched = {u for i, u in enumerate(record.index) if u is not None and (run.touched[i] or i in run.hidden)}
    seen = {storage_of(w.where) for w in run.writes if not w.unseen}
    for u, what in unlisted_writes(tensors, sorted(touched - quiet), seen, run.in_functions).items():
        problems.append(uncompiled(f"{record.name(u)}: {what}"))
    ties: list[Tie | None] = []
    detached: list[Tensor] = []
    starts: list[tuple[Shown, int]] = []
    arrays = list(map(numpy_view, tensors))
    for j, (o, p) in enumerate(zip(outputs, record.outcome.places, strict=True)):
        tie = None
        if hides(o, arrays):
            problems.append(out_of_sight(j, o))
        elif p.kind == "view" and isinstance(o, torch.Tensor):
            members = record.plan.groups[record.plan.where[p.base].group].numbers
            found = tie_of(o, tensors, [p.base, *members], detached)
            tie = found if isinstance(found, Tie) else None
            if tie is None:
                problems.append(uncompiled(f"{PlainAOTOutput(j).expr()} {found}"))
            if len(detached) > len(starts):
                low = caller.lows[record.plan.where[p.base].group]
                starts.append((Shown.given(detached[-1]), start_of(detached[-1]) - low))
        ties.append(tie)
    inside = ""
    if torch.is_inference_mode_enabled():
        inside = "inference"
    elif run.grew and not torch.is_grad_enabled():
        inside = "enable_grad"
    views = OutputViews(
        given=[Shown.given(t) for t in run.call.arrays],
        ends={u: Shown.given(tensors[u]) for u in caller.moved},
        outputs=[Shown.of(o) for o in outputs],
        quiet=quiet,
        counted=frozenset(u for u in touched if version_of(tensors[u]) != before[u][1][0]),
        ties=ties,
        detached=starts,
        leaves=frozenset(u for u, t in enumerate(run.call.arrays) if t.is_leaf and t.requires_grad),
        inside=inside,
    )
    return views, problems
