"""Which elements travel where: leaves side by side in one flat array for each dtype, dealt out to ranks in blocks."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from fanin import _core
from fanin._interop.classes import attribute, is_tensor, is_torch
from fanin._interop.protocols import NDArray
from fanin._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

BLOCK = 256  #: elements; ranks own runs of whole blocks (N1)

_SIZES = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_LOW = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


class Leaf(NamedTuple):
    """What all ranks must agree on of one leaf."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def leaf_of(x: Any, name: str, on_device: bool = False) -> Leaf:
    """The shape and dtype of an array; TypeError or ValueError if it is not one that is summed: on the host, or on the
    device where it is.
    """
    if getattr(x, "shape", None) is None or getattr(x, "dtype", None) is None:
        raise TypeError(f"{name}: expected an array, got {type_of(x)}")
    if not on_device and type(x) is _core.Array and x.device != "cpu":
        raise TypeError(f"{name}: arrays of {x.device} do not travel between ranks in this call: give x.numpy()")
    dtype = _core.dtype_name(x.dtype)
    if dtype is None:
        raise TypeError(f"{name}: expected an array with a dtype, got None")
    return Leaf(name, tuple(int(n) for n in x.shape), dtype)


def itemsize(dtype: str) -> int:
    """The bytes of an element."""
    return _SIZES.get(dtype) or np.dtype(dtype).itemsize


def is_inexact(dtype: str) -> bool:
    """Whether sums of the dtype can be exact: real and complex floats."""
    return "float" in dtype or dtype.startswith("complex")


def accumulation(dtype: str) -> str:
    """The dtype in which sums run (A11)."""
    return "float32" if dtype in _LOW else dtype


def typed(raw: NDArray, dtype: str) -> Any:
    """Bytes as an array of a dtype: an ndarray, or a tensor if torch is here and ml_dtypes is not."""
    if dtype not in _SIZES or dtype == "bool":
        return raw.view(dtype)
    try:
        import ml_dtypes
    except ImportError:
        if attribute("torch", dtype) is None:
            raise TypeError(f"{dtype}: NumPy has it through ml_dtypes alone: pip install ml_dtypes") from None
        return as_tensor(raw, dtype)
    return raw.view(getattr(ml_dtypes, dtype))


def as_tensor(raw: NDArray, dtype: str, shape: tuple[int, ...] | None = None) -> Any:
    """Bytes as a tensor, flat or of a shape. It is no view of another and its storage has these bytes alone, so that
    `pickle`, `torch.save` and `copy.deepcopy` of a gradient write no whole bucket, and `detach_()` works.
    """
    torch = sys.modules["torch"]
    if not len(raw):
        return torch.empty((0,) if shape is None else shape, dtype=getattr(torch, dtype))
    if dtype not in _SIZES:
        elements = raw.view(dtype)
        return torch.from_numpy(elements if shape is None else elements.reshape(shape))
    made = torch.frombuffer(raw, dtype=getattr(torch, dtype))
    return made if shape is None or len(shape) == 1 else made.resize_(shape)


def flat_bytes(x: Any) -> NDArray | None:
    """The memory of an array on the CPU without gaps in C order, as bytes; None if a copy is needed."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.dtype.isnative:
        return x.reshape(-1).view(np.uint8)
    if is_torch(x) and str(x.layout) == "torch.strided":
        plain = x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg())
        flat: Any = x.detach()
        if not plain:
            return None
        if x.numel() < 2:  # its strides may be any
            flat = flat.as_strided((x.numel(),), (1,))
        raw: NDArray = flat.view(-1).view(sys.modules["torch"].uint8).numpy()
        return raw
    return None


def placed(x: Any, like: Any) -> Any:
    """The array on the device of another."""
    return x.to(like.device) if getattr(like, "is_cuda", False) else x


def host(x: Any) -> Any:
    """The array on the CPU: a copy of one on a CUDA device."""
    return x.detach().cpu() if getattr(x, "is_cuda", False) else x


class Place(NamedTuple):
    """Where a leaf lies in its segment, in elements."""

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """The leaves of one dtype, side by side."""

    dtype: str
    places: tuple[Place, ...]
    bounds: tuple[int, ...]  #: rank r owns elements [bounds[r], bounds[r + 1])
    wire: str | None = None  #: the narrower dtype as which contributions travel; None: as they are (wire.py)
    wire_out: str | None = None  #: .. and sums
    #: Where blocks of leaves begin, and the last one ends, if elements travel in blocks.
    starts: NDArray | None = field(default=None, compare=False)

    @cached_property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @cached_property
    def viewed(self) -> Any:
        """The dtype of ndarrays of its elements; None: they are in tensors."""
        example = typed(np.empty(0, np.uint8), self.dtype)
        return example.dtype if isinstance(example, np.ndarray) else None

    def elements(self, raw: NDArray) -> Any:
        """Bytes as a flat array of its dtype."""
        return typed(raw, self.dtype) if self.viewed is None else raw.view(self.viewed)

    @property
    def size(self) -> int:
        return self.bounds[-1]

    def counts(self, dtype: str | None = None) -> list[int]:
        """The bytes of each rank's shard in its dtype or another."""
        each = itemsize(dtype) if dtype else self.itemsize
        return [each * (b - a) for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    def empty(self) -> tuple[NDArray, Any]:
        """A flat array as bytes and as elements, not written yet."""
        raw = _core.message_new(self.size * self.itemsize)
        return raw, self.elements(raw)

    def leave_out(self, elements: Any) -> None:
        """Fill elements of a flat array with the term that changes no sum: -0.0, 0, False."""
        fill = elements.fill if isinstance(elements, np.ndarray) else elements.fill_
        fill(complex(-0.0, -0.0) if self.dtype.startswith("complex") else -0.0 if is_inexact(self.dtype) else 0)


def deal(size: int, ranks: int) -> tuple[int, ...]:
    """The bounds of each rank's run of whole blocks."""
    blocks = -(-size // BLOCK)
    return tuple(min(size, BLOCK * (blocks * r // ranks)) for r in range(ranks)) + (size,)


class Level(NamedTuple):
    """A step of shards on their way to their owners: the ranks among which terms of this rank travel, and for each of
    these ranks the owners whose shards it gets. The sums of the shards travel back the same way.
    """

    team: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]

    def owners(self, rank: int) -> tuple[int, ...]:
        """The owners whose shards a rank of the team gets."""
        return self.shards[self.team.index(rank)]


def levels_of(rank: int, nodes: Sequence[int]) -> tuple[Level, ...]:
    """One level, in which every rank sends to every owner; or two, if there are several nodes of equally many ranks,
    and of more than one: the ranks of a node first sum their terms, each the shards of the owners at its place in every
    node; then the ranks of each place in all nodes sum their shards. `nodes`: the number of each rank's node.
    """
    members: dict[int, list[int]] = {}
    for r, node in enumerate(nodes):
        members.setdefault(node, []).append(r)
    sizes = set(map(len, members.values()))
    if len(members) == 1 or len(sizes) > 1 or sizes == {1}:
        ranks = tuple(range(len(nodes)))
        return (Level(ranks, tuple((r,) for r in ranks)),)
    mine, places = members[nodes[rank]], tuple(zip(*members.values(), strict=True))
    across = places[mine.index(rank)]
    return Level(tuple(mine), places), Level(across, tuple((r,) for r in across))


class Runs(dict[int, slice]):
    """Where each owner's shard lies in an array of bytes that has some shards side by side."""

    def __init__(self, owners: Iterable[int], sizes: Sequence[int]) -> None:
        at = 0
        for owner in owners:
            self[owner] = slice(at, at + sizes[owner])
            at += sizes[owner]

    def run(self, raw: NDArray, owners: Sequence[int]) -> NDArray | None:
        """The shards of these owners, in this order, as a view of `raw`; None if they do not lie side by side."""
        if any(self[a].stop != self[b].start for a, b in pairwise(owners)):
            return None
        return raw[self[owners[0]].start : self[owners[-1]].stop]

    def take(self, raw: NDArray, owners: Sequence[int]) -> NDArray:
        """The shards of these owners side by side, copied only if they have to be."""
        view = self.run(raw, owners)
        return np.concatenate([raw[self[o]] for o in owners]) if view is None else view


class Layout:
    """The leaves of one bucket."""

    def __init__(self, leaves: Sequence[Leaf], ranks: int) -> None:
        self.leaves = tuple(leaves)
        places: dict[str, list[Place]] = {}
        for i, leaf in enumerate(self.leaves):
            mine = places.setdefault(leaf.dtype, [])
            start = mine[-1].stop if mine else 0
            mine.append(Place(i, start, start + leaf.size))
        self.segments = tuple(Segment(dtype, tuple(mine), deal(mine[-1].stop, ranks)) for dtype, mine in places.items())

    @cached_property
    def parts(self) -> list[list[str]]:
        """[name, shape and dtype] of each leaf, for messages and digests."""
        return [[leaf.name, f"{leaf.dtype} of shape {leaf.shape}"] for leaf in self.leaves]

    def flatten(self, arrays: Sequence[Any]) -> list[NDArray]:
        """The arrays (None: absent) in one flat array of bytes for each segment, copied only if they have to be."""
        made = []
        for segment in self.segments:
            raw = None
            if len(segment.places) == 1:
                x = arrays[segment.places[0].leaf]
                raw = None if x is None else flat_bytes(x)
            if raw is None:
                raw, elements = segment.empty()
                for leaf, start, stop in segment.places:
                    if arrays[leaf] is None:
                        segment.leave_out(elements[start:stop])
                    elif stop > start:
                        place = elements[start:stop].reshape(self.leaves[leaf].shape)
                        _core.add_n([host(arrays[leaf])], out=place)
            made.append(raw)
        return made

    def unflatten(self, flats: Sequence[NDArray], like: Sequence[Any]) -> list[Any]:
        """The leaves of flat arrays, each of the library of `like`."""
        made: list[Any] = [None] * len(self.leaves)
        for segment, raw in zip(self.segments, flats, strict=True):
            whole: dict[type, Any] = {}  # by the type of what it is like
            size = segment.itemsize
            for leaf, start, stop in segment.places:
                x, shape = like[leaf], self.leaves[leaf].shape
                if is_tensor(x):
                    made[leaf] = placed(as_tensor(raw[start * size : stop * size], segment.dtype, shape), x)
                    continue
                if type(x) not in whole:
                    whole[type(x)] = wrapped(raw, segment.dtype, x)
                piece = whole[type(x)][start:stop]
                made[leaf] = placed(piece if len(shape) == 1 else piece.reshape(shape), x)
        return made

    def arrays(self, flats: Sequence[NDArray]) -> list[Any]:
        """.. each an ndarray, or a tensor of a dtype that no ndarray has."""
        if len(self.leaves) == 1:
            return [self.segments[0].elements(flats[0]).reshape(self.leaves[0].shape)]
        made: list[Any] = [None] * len(self.leaves)
        for segment, raw in zip(self.segments, flats, strict=True):
            flat = segment.elements(raw)
            for leaf, start, stop in segment.places:
                made[leaf] = flat[start:stop].reshape(self.leaves[leaf].shape)
        return made

    def shards(self, flats: Sequence[NDArray], rank: int, like: Sequence[Any]) -> list[Any]:
        """Of each leaf the elements that a rank owns, with one axis."""
        made: list[Any] = [None] * len(self.leaves)
        for segment, raw in zip(self.segments, flats, strict=True):
            low, high = segment.bounds[rank], segment.bounds[rank + 1]
            for leaf, start, stop in segment.places:
                a, b = (min(max(x, low), high) - low for x in (start, stop))
                piece = wrapped(raw[a * segment.itemsize : b * segment.itemsize], segment.dtype, like[leaf])
                made[leaf] = placed(piece, like[leaf])
        return made


def wrapped(raw: NDArray, dtype: str, like: Any) -> Any:
    """Bytes as a flat array on the CPU of the library that `like` is of: a tensor, or an ndarray."""
    if is_tensor(like):
        return as_tensor(raw, dtype)
    return typed(raw, dtype)


def like_of(x: object) -> Literal["tensor", "ndarray"]:
    """What sums of an array come back as, for a header."""
    return "tensor" if is_tensor(x) else "ndarray"


def example_of(like: Literal["tensor", "ndarray"]) -> Any:
    """An array that sums come back like, on a rank that brings none; an ndarray where torch is not imported."""
    empty = attribute("torch", "empty") if like == "tensor" else None
    return None if empty is None else empty(0)


def digest(*facts: object) -> str:
    """A short text that differs if the facts do."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
