"""A call on torch tensors: the caller's own are handed to the function, and put back where it raises.

What autograd knows of a tensor (its node, hooks, who saved it) cannot be given to another one afterwards. So the
function runs on the tensors themselves, gradients and all, and nothing has to be carried home. What is kept to put them
back: the bytes that they and their gradients show, versions, geometry, storage, whether they ask for a gradient, their
attributes and hooks; of a tensor with a history a second end of it (`Held`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._core import Snapshot
from .calls import torch
from .kept import Kept
from .private import UNSIGNED, Array, Geometry, Lent, Plan


def check_tensor(t: Any, name: Callable[[], str]) -> None:
    """TypeError, ValueError for a tensor that cannot be put back from its bytes."""
    library = torch()
    if type(t) not in (library.Tensor, library.nn.Parameter):
        raise TypeError(
            f"{name()}: expected a plain torch.Tensor or a Parameter, got {type(t).__name__}: pass the tensor that it"
            " holds"
        )
    if is_transformed(t):
        raise TypeError(
            f"{name()}: expected a tensor with memory of its own, got one that torch.func (vmap, grad, functionalize)"
            " wraps: transform the inner function instead"
        )
    check_place(t, name)


def check_place(t: Any, name: Callable[[], str]) -> None:
    """ValueError for a tensor that is not all in one piece of the host's memory."""
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


def is_transformed(t: Any) -> bool:
    """Whether a transform of torch.func wraps a tensor."""
    library = torch()
    return bool(library._C._functorch.is_functorch_wrapped_tensor(t)) or bool(library._is_functional_tensor(t))


def check_again(tensors: Sequence[Any], name: Callable[[int], str]) -> None:
    """The same at a later call: types, dtypes and devices are those of the layout, but transforms are none of it."""
    if torch()._C._functorch.maybe_current_level():
        for u, t in enumerate(tensors):
            check_tensor(t, lambda u=u: name(u))  # type: ignore[misc]


def geometry_of(t: Any) -> Geometry:
    """A tensor's geometry, in bytes, of words as wide as its elements."""
    size = t.element_size()
    return Geometry(tuple(t.shape), tuple(s * size for s in t.stride()), UNSIGNED.get(size) or np.dtype(f"V{size}"))


def start_of(t: Any) -> int:
    """Where a tensor's first element lies, or would: of an empty one torch tells no address."""
    return int(t.untyped_storage().data_ptr() + t.storage_offset() * t.element_size())


def twin(t: Any) -> Array:
    """An ndarray on the same bytes."""
    geometry = geometry_of(t)
    if 0 in geometry.shape:
        return np.empty(geometry.shape, geometry.dtype)
    return np.asarray(Lent(t.data_ptr(), geometry, False, t)).view(geometry.dtype)


def twins(tensors: Sequence[Any]) -> list[Array]:
    """The twins of several."""
    return [twin(t) for t in tensors]


class Held:
    """What of one tensor can be put back, beside its bytes: of an argument, or of the base of one."""

    __slots__ = (
        "attributes",
        "grad",
        "history",
        "hooks",
        "offset",
        "requires_grad",
        "shape",
        "size",
        "start",
        "storage",
        "stride",
        "t",
        "version",
    )

    hooks: tuple[tuple[str, dict[Any, Any] | None], ...]
    version: int | None
    attributes: dict[str, Any] | None

    def __init__(self, t: Any) -> None:
        self.t, self.storage = t, t.untyped_storage()
        self.start, self.size = self.storage.data_ptr(), self.storage.nbytes()
        self.offset, self.shape, self.stride = t.storage_offset(), t.shape, t.stride()
        self.version = None if t.is_inference() else t._version
        self.requires_grad = t.requires_grad
        self.attributes = dict(t.__dict__) if t.__dict__ else None
        self.history: Any = None
        self.hooks = ()
        if not self.requires_grad:
            self.grad = t.grad
            return
        self.grad = t.grad if t.is_leaf else None
        self.hooks = tuple((name, None if (hooks := getattr(t, name, None)) is None else dict(hooks)) for name in HOOKS)
        if not t.is_leaf and t._base is None:  # a view has the history of its base
            self.history = t.grad_fn, parts().Ends.apply(t)

    @staticmethod
    def light(t: Any, storage: Any, version: int, offset: int, size: int | None, shape: Any, stride: Any) -> Held:
        """The same of one that had no base, asked for no gradient and had none, and kept no attributes."""
        held = object.__new__(Held)
        held.t, held.storage, held.version, held.offset, held.size = t, storage, version, offset, size
        held.shape, held.stride, held.start = shape, stride, 0
        held.requires_grad, held.attributes, held.grad, held.history, held.hooks = False, None, None, None, ()
        return held

    def undo(self) -> None:
        """Put back all but the bytes and the version."""
        t, library = self.t, torch()
        where = self.offset, self.shape, self.stride
        if t.untyped_storage()._cdata != self.storage._cdata or where != (t.storage_offset(), t.shape, t.stride()):
            with library.no_grad():
                t.data = library.empty(0, dtype=t.dtype, device="cpu").set_(self.storage, *where)
        if self.history is not None:
            if t.grad_fn is not self.history[0]:
                with library.enable_grad():
                    parts().Back.apply(t, self.history[1])
        elif t.grad_fn is not None and not t._is_view():
            t.detach_()
        if t.is_leaf:
            if t.requires_grad != self.requires_grad:
                t.requires_grad_(self.requires_grad)
            if t.grad is not self.grad:
                t.grad = self.grad
        if (self.attributes or {}) != t.__dict__ and not same_items(self.attributes or {}, t.__dict__):
            t.__dict__.clear()
            t.__dict__.update(self.attributes or {})
        for name, before in self.hooks:
            now: dict[Any, Any] = getattr(t, name, None) or {}
            for key in list(now):
                if key not in (before or {}):
                    del now[key]

    def count(self) -> None:
        """Put back the version: whoever saved the tensor will find what was saved."""
        if self.version is not None and self.t._version != self.version:
            torch()._C._autograd._unsafe_set_version_counter((self.t,), (self.version,))


#: Where a tensor keeps its hooks.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same objects."""
    return one.keys() == other.keys() and all(one[k] is other[k] for k in one)


class KeptTensors(Kept):
    """The caller's tensors, and what is needed to put them back."""

    def __init__(self, plan: Plan, arrays: Sequence[Any], copied: Sequence[int] | None = None) -> None:
        super().__init__(plan, arrays, copied)
        self.full: dict[int, Held] = {}
        grads = []
        tensors = arrays if copied is None else [arrays[u] for u in self.numbers]
        #: of each tensor of which there is little to know: storage, version, offset, strides
        self.little: list[Any]
        try:
            self.little = [
                (
                    None
                    if t.requires_grad or t._base is not None or t.__dict__ or t.grad is not None
                    else (t.untyped_storage(), t._version, t.storage_offset(), t.stride())
                )
                for t in tensors
            ]
        except RuntimeError:  # one of inference mode has no version
            self.little = [None] * len(tensors)
        self.sizes = [None if one is None else one[0].nbytes() for one in self.little]
        for t in [arrays[u] for u, little in zip(self.numbers, self.little, strict=True) if little is None]:
            self.full[id(t)] = held = Held(t)
            if held.grad is not None and str(held.grad.layout) == "torch.strided":
                grads.append(held.grad)
            base = t._base
            if base is not None and id(base) not in self.full:
                self.full[id(base)] = Held(base)
        tangents: list[Any] = []
        if torch().autograd.forward_ad._current_level >= 0:
            tangents = [x for u in self.numbers if (x := tangent_of(arrays[u])) is not None]
        self.beside = Snapshot([*grads, *tangents]) if grads or tangents else None
        self.counters = [(g, g._version) for g in grads if not g.is_inference()]

    @functools.cached_property
    def held(self) -> dict[int, Held]:
        """What is known of each tensor, and of the bases of those that are views, by identity."""
        held = dict(self.full)
        for u, little, size in zip(self.numbers, self.little, self.sizes, strict=True):
            if little is not None and id(self.arrays[u]) not in held:
                storage, version, offset, stride = little
                geometry = self._member(u).geometry
                item = geometry.dtype.itemsize
                known = Held.light(self.arrays[u], storage, version, offset, size, geometry.shape, stride)
                known.start = (
                    self.snapshot.data(self.at[u]) - offset * item if self.arrays[u].numel() else storage.data_ptr()
                )
                held[id(self.arrays[u])] = known
        return held

    # What came of it

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        """Groups of which a storage is another one, or elsewhere."""
        return frozenset(self.plan.where[u][0] for u in self.elsewhere if self._is_lost(u))

    def _is_lost(self, u: int) -> bool:
        held, storage = self.held[id(self.arrays[u])], self.arrays[u].untyped_storage()
        return bool(storage._cdata != held.storage._cdata or storage.data_ptr() != held.start)

    @functools.cached_property
    def moved(self) -> list[int]:
        """Tensors whose geometry is not what it was."""
        return self.elsewhere

    @functools.cached_property
    def flagged(self) -> list[int]:
        """None: tensors have no such flag."""
        return []

    @functools.cached_property
    def owners(self) -> dict[int, int]:  # type: ignore[override]
        """None: a storage may be many tensors'."""
        return {}

    @functools.cached_property
    def lows(self) -> dict[int, int]:  # type: ignore[override]
        """Where the memory of each group begins."""
        found = {}
        for g in self.copied:
            first = self.plan.groups[g].members[0]
            held = self.held[id(self.arrays[first.number])]
            found[g] = held.storage.data_ptr() + held.offset * self.arrays[first.number].element_size() - first.offset
        return found

    def span(self, number: int) -> tuple[int, int]:
        """Where a group's memory begins and ends."""
        return self.lows[number], self.lows[number] + max(self.plan.groups[number].size, 1)

    def geometry(self, o: Any) -> Geometry:
        """An array's geometry."""
        return Geometry.of(o) if isinstance(o, np.ndarray) else geometry_of(o)

    def begin(self, o: Any) -> int:
        """Where an array's first element lies."""
        return super().begin(o) if isinstance(o, np.ndarray) else start_of(o)

    def is_array(self, o: Any) -> bool:
        """Whether an output is an array."""
        return isinstance(o, (torch().Tensor, np.ndarray))

    def remakeable(self, o: Any) -> bool:
        """Whether an output is all in its memory and geometry."""
        return type(o) in (torch().Tensor, np.ndarray)

    def group_at(self, array: Any) -> int | None:
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
            for h in self.held.values():
                if h.storage.nbytes() != h.size:
                    h.storage.resize_(h.size)
            for h in self.held.values():  # bases come behind their views, which are whole only when these are
                h.undo()
        for u in self.numbers:
            held = self.held[id(self.arrays[u])]
            begin = held.storage.data_ptr() + held.offset * self.arrays[u].element_size()
            self.snapshot.restore(self.at[u], begin if held.storage.data_ptr() else None)
        if self.beside is not None:
            for k in range(len(self.beside)):
                self.beside.restore(k)
        for h in self.held.values():
            h.count()
        for g, version in self.counters:
            if g._version != version:
                library._C._autograd._unsafe_set_version_counter((g,), (version,))
        for u in self.numbers:
            self._forget_history(self.arrays[u])

    def _forget_history(self, t: Any) -> None:
        """Have a view ask its base anew where it comes from, or not at all where that asks for no gradient any more."""
        if t._base is None or t.is_inference():
            return
        if t.requires_grad and not self.held[id(t)].requires_grad and not t._base.requires_grad:
            library = torch()
            view = library._C._autograd
            made = view._get_creation_meta(t)
            fresh = t._base.as_strided(t.shape, t.stride(), t.storage_offset())
            view._set_creation_meta(fresh, made)
            try:
                library.utils.swap_tensors(t, fresh)
            except RuntimeError:
                return  # others have it in C: it keeps an end that leads nowhere
        elif t.requires_grad:
            _ = t.grad_fn


def tangent_of(t: Any) -> Any:
    """The tangent of a tensor in forward mode, where there is one."""
    forward = torch().autograd.forward_ad
    if forward._current_level < 0:
        return None
    tangent = forward.unpack_dual(t).tangent
    return tangent if tangent is not None and str(tangent.layout) == "torch.strided" else None


@functools.cache
def parts() -> Any:
    """Two functions of autograd's; made when there is a torch."""
    function: Any = torch().autograd.Function

    class Ends(function):  # type: ignore[misc]
        """A second end of a tensor's history: whoever takes it on has what the tensor had."""

        @staticmethod
        def forward(ctx: Any, t: Any) -> Any:
            return t.new_empty(()).expand(t.shape)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    class Back(function):  # type: ignore[misc]
        """Gives a tensor the history of another one; its bytes are put back by others."""

        @staticmethod
        def forward(ctx: Any, t: Any, end: Any) -> Any:
            ctx.mark_dirty(t)
            return t

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return None, g

    class Parts:
        pass

    made: Any = Parts()
    made.Ends, made.Back = Ends, Back
    return made


def view_of(source: Any, like: Any, start: int) -> Any:
    """A view of the memory of `source` with the dtype and geometry of `like`, whose first element lies at `start`."""
    library = torch()
    places = (start - source.untyped_storage().data_ptr()) // like.element_size()
    shape, stride = tuple(like.shape), tuple(like.stride())
    if like.dtype == source.dtype:
        view = source.as_strided(shape, stride, places)
    else:
        view = retyped(source, like.dtype).as_strided(shape, stride, places)
    if like.is_conj():
        view = view.conj()
    return library._neg_view(view) if like.is_neg() else view


def retyped(source: Any, dtype: Any) -> Any:
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
        start, half = library.view_as_real(start), start.real.dtype
        return start if half == dtype else start.view(dtype)
    if dtype.is_complex and source.is_floating_point() and other == 2 * own:
        pairs = library.view_as_complex(start.view(count // 2, 2))
        return pairs if pairs.dtype == dtype else pairs.view(dtype)
    return start.view(dtype)
