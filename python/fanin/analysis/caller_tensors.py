"""A call on torch tensors: the caller's own are handed to the function, and put back where it raises.

A tensor's autograd state (its node, hooks, the graphs that saved it) cannot be moved to another tensor. So the function
runs on the caller's tensors. Kept to restore them: the bytes that they and their gradients show, versions, geometry,
storage, `requires_grad`, attributes and hooks; of a tensor with a history a second end of it (`SavedTensor`).
"""

from __future__ import annotations

import functools
import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._words import type_of
from . import trees
from .caller_arrays import Lost, RunArrays, check_reach
from .memory import Snapshot
from .private_copies import UNSIGNED, Array, Geometry, MemoryAt, Plan

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
    """Whether a transform of torch.func wraps a tensor."""
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


def layout_of(t: Tensor) -> str:
    return layout_name(t.layout)


@functools.cache
def layout_name(layout: object) -> str:
    """The name of a layout of torch's."""
    return str(layout).removeprefix("torch.")


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
        """Put back the sizes of its storages."""
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
            elif retains:
                self._renew()

    def _renew(self) -> None:
        """Give a tensor without a history, which would retain gradients for ever, a body that does not."""
        torch._C._swap_tensor_impl(self.t, self.alias.detach())

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
        """Groups of which a storage is another one, or elsewhere."""
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
        """Tensors whose geometry is not what it was."""
        return self.elsewhere

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        """None: tensors have no such flag."""
        return []

    @functools.cached_property
    def lows(self) -> dict[int, int]:
        """The address of each group's memory."""
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
        """Leave the tensors as they were."""
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
    """The tangent of a tensor in forward mode, where there is one."""
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
