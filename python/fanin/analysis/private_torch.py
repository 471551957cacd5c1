"""Private memory for torch tensors on the CPU: the same plan as for ndarrays, by a twin of each tensor, an ndarray on the same bytes.

A tensor is planned, copied, compared and written back as its twin. Private tensors are views of a byte storage at the place of the caller's; a tensor that comes
back from there becomes a view of the caller's own by `as_strided`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._core import address
from .calls import torch
from .private import LINE, UNSIGNED, Array, Geometry, Group, Lent, Name, Plan, World, view_at


def check_tensor(t: Any, name: Callable[[], str]) -> None:
    """TypeError, ValueError for a tensor that cannot be rebuilt from its bytes."""
    library = torch()
    if type(t) is not library.Tensor:
        raise TypeError(f"{name()}: expected a plain torch.Tensor, got {type(t).__name__}: pass x.detach()")
    if t.device.type != "cpu" or str(t.layout) != "torch.strided":
        raise ValueError(
            f"{name()}: expected a strided tensor on the CPU, got one on {t.device} with layout {str(t.layout).removeprefix('torch.')}"
        )
    if t.requires_grad:
        raise ValueError(
            f"{name()}: expected a tensor that asks for no gradient: what runs on private memory is not seen by autograd; pass x.detach(), or make an autograd.Function of the wrapper"
        )
    if t.is_conj() or t.is_neg():
        raise ValueError(
            f"{name()}: expected a tensor whose memory holds its values, got a conjugate or negative view: pass x.resolve_conj().resolve_neg()"
        )


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


class TorchWorld(World):
    """Private copies of distinct tensors, for one run. The parts of `World` that speak of resizing and of flags have nothing to do here."""

    def __init__(
        self, plan: Plan, arrays: Sequence[Any], kind: type = np.ndarray, copied: Sequence[int] | None = None
    ) -> None:
        self.twins = twins(arrays)
        self.storages: dict[int, int] = {}  #: where which group's private storage begins
        self.before: dict[int, tuple[Any, ...]] = {}  #: how each private tensor lies
        self.versions: dict[int, int] = {}  #: how often each was written
        super().__init__(plan, arrays, kind, copied)

    def _copy(self, number: int, group: Group, kind: type) -> None:
        library = torch()
        memory = library.empty(max(group.size, 1) + LINE, dtype=library.uint8)
        start = memory.data_ptr()
        first = group.members[0]
        shift = (start_of(self.arrays[first.number]) - first.offset - start) % LINE
        for m in group.members:
            t = self.arrays[m.number]
            at = shift + m.offset
            if at % t.element_size():
                raise ValueError("functionalize: expected tensors whose memory is aligned to their elements")
            # Detached: as_strided would make views of `memory`, whose versions count together.
            mine = library.empty(0, dtype=t.dtype).set_(
                memory.untyped_storage(), at // t.element_size(), t.shape, t.stride()
            )
            self.private[m.number] = mine
            self.windows[m.number] = twin(mine), self.twins[m.number]
            self.before[m.number] = lies(mine)
            self.versions[m.number] = version_of(mine)
        for mine, its in self.covering(group):
            mine[...] = its
        self.storages[start] = number
        self.lows[number] = start + shift

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        """No group is: other storage is a ValueError."""
        return frozenset()

    @functools.cached_property
    def moved(self) -> list[int]:
        """Tensors whose geometry is not what it was."""
        return [u for u, before in self.before.items() if lies(self.private[u]) != before]

    @functools.cached_property
    def flagged(self) -> list[int]:
        """None: tensors have no such flag."""
        return []

    def geometry(self, o: Any) -> Geometry:
        """An array's geometry."""
        return Geometry.of(o) if isinstance(o, np.ndarray) else geometry_of(o)

    def begin(self, o: Any) -> int:
        """Where an array's first element lies."""
        return address(o) if isinstance(o, np.ndarray) else start_of(o)

    def is_array(self, o: Any) -> bool:
        """Whether an output is an array."""
        return isinstance(o, (torch().Tensor, np.ndarray))

    def remakeable(self, o: Any) -> bool:
        """Whether an output is all in its memory and geometry."""
        return type(o) in (torch().Tensor, np.ndarray)

    def group_at(self, o: Any) -> int | None:
        """The group in whose memory a tensor lies, or an ndarray (by `x.numpy()`)."""
        if isinstance(o, np.ndarray):
            return super().group_at(o)
        if o.device.type != "cpu" or str(o.layout) != "torch.strided":
            return None
        return self.storages.get(o.untyped_storage().data_ptr())

    def home(self, number: int, o: Any) -> Any:
        """The view of the caller's memory that is to the caller what `o` is to the private memory of a group."""
        group, library = self.plan.groups[number], torch()
        is_tensor = not isinstance(o, np.ndarray)
        geometry, begin = (geometry_of(o), start_of(o)) if is_tensor else (Geometry.of(o), address(o))
        offset = begin - self.lows[number]
        down, up = geometry.reach()
        m = group.nearest(offset + down, offset + up)
        source = self.arrays[m.number]
        start = start_of(source) - m.offset + offset
        if not is_tensor:
            return view_at(start, geometry, o.flags.writeable, self.twins[m.number])
        places = (start - source.untyped_storage().data_ptr()) // o.element_size()
        shape, stride = tuple(o.shape), tuple(o.stride())
        if o.dtype == source.dtype:
            view = source.as_strided(shape, stride, places)
        else:
            view = retyped(source, o.dtype).as_strided(shape, stride, places)
        if o.is_conj():
            view = view.conj()
        return library._neg_view(view) if o.is_neg() else view

    def replay(self, name: Name) -> None:
        """Carry out on the caller's tensors what the run did to the private ones. ValueError before anything changes: other storage, gradients that are asked for."""
        for u in self.before:
            t = self.private[u]
            if t.requires_grad:
                raise ValueError(
                    f"{name(u)} was made to ask for a gradient: expected a function that asks for none of its arguments"
                )
            if lies(t)[-1] != self.before[u][-1] or t.dtype != self.arrays[u].dtype:
                raise ValueError(
                    f"{name(u)} was given other storage (set_, resize_, .data): expected a function that writes what is there"
                )
        for g in self.written:
            for mine, its in self.covering(self.plan.groups[g]):
                its[...] = mine
        self.count_writes()
        for u in self.moved:
            t, mine = self.arrays[u], self.private[u]
            places = t.storage_offset() + mine.storage_offset() - self.before[u][2]
            t.as_strided_(tuple(mine.shape), tuple(mine.stride()), places)

    def count_writes(self) -> None:
        """Count up the versions of the caller's tensors that were written, also where no byte changed: whoever saved one for a backward is told."""
        seen = {self.plan.where[u][0] for u, before in self.versions.items() if version_of(self.private[u]) != before}
        for g in sorted(seen.union(self.written)):
            tensors = [self.arrays[m.number] for m in self.plan.groups[g].members]
            torch().autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def version_of(t: Any) -> int:
    """How often a tensor was written, as torch counts; 0 where it does not."""
    return 0 if t.is_inference() else int(t._version)


def retyped(source: Any, dtype: Any) -> Any:
    """A view of the start of a tensor's storage as another dtype, of which `as_strided` makes any other.

    It is derived from the tensor, so that writes to either are counted together; parts of complex numbers by the views that gradients follow.
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


def lies(t: Any) -> tuple[Any, ...]:
    """Shape, stride, offset, and which storage."""
    storage = t.untyped_storage()
    return tuple(t.shape), tuple(t.stride()), t.storage_offset(), (storage.data_ptr(), storage.nbytes())
