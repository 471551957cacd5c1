"""Elements that travel between ranks as a narrower dtype (`wire=`, `wire_out=`, N11).

    dtype                         what travels of a rank's shard
    float16, bfloat16             its elements, rounded to nearest even
    float8_e4m3fn, float8_e5m2    its elements, each times a power of two of its block, rounded to nearest even; then a
                                  byte for each block

A block is 256 elements of a leaf, counted from its first one, so the rounding of a contribution depends on that
contribution alone: not on ranks, nor on the leaves beside it in a bucket. Owners own whole blocks. Let 2^E <= m <
2^(E + 1) for m, the largest finite magnitude of a block rounded to the digits of the dtype (4 or 3), and E at least
-127 and at most 128. The elements are multiplied by 2^(7 - E) for float8_e4m3fn and 2^(14 - E) for float8_e5m2, before
they are rounded, and the byte is E + 127. So no finite element of a block overflows, and rounding twice is rounding
once. inf of float8_e4m3fn, which has none, is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from fanin import _core
from fanin._interop.protocols import DTypeLike, NDArray
from fanin._words import type_of
from fanin.errors import DTypeError

from .layout import BLOCK, Layout, Leaf, Runs, Segment, accumulation, flat_bytes, is_inexact, itemsize, typed

__tracebackhide__ = True  # no frames of ours in reports of pytest

WIRES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


class Blocks(NamedTuple):
    """How the blocks of a dtype are scaled."""

    digits: int  #: of the dtype
    top: int  #: the exponent that a block's largest magnitude gets


BLOCKED = {"float8_e4m3fn": Blocks(4, 7), "float8_e5m2": Blocks(3, 14)}

LOWEST, HIGHEST = -127, 128  #: exponents of blocks, so that one is a byte

CHUNK = 256  #: blocks that are converted at once: their numbers as float64 stay near the core


def names_of(call: str, wire: DTypeLike | None, wire_out: DTypeLike | None) -> tuple[str | None, str | None]:
    """The names of the dtypes as which contributions and sums travel; ValueError or TypeError for others."""
    return _name_of(call, "wire", wire), _name_of(call, "wire_out", wire_out)


def _name_of(call: str, option: str, dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    expected = f"{call}: {option}: expected {', '.join(map(repr, WIRES[:-1]))} or {WIRES[-1]!r}"
    try:
        name = _core.dtype_name(dtype)
    except DTypeError:  # one that is not summed
        name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    except ValueError:
        name = repr(dtype)
    except TypeError:
        raise TypeError(f"{expected}, got {type_of(dtype)}") from None
    if name not in WIRES:
        raise ValueError(f"{expected}, got {name}")
    try:
        typed(np.empty(0, np.uint8), name)
    except TypeError as e:  # neither NumPy nor torch has it
        raise TypeError(f"{call}: {option}: {e}") from None
    return name


def narrows(dtype: str, wire: str | None) -> bool:
    """Whether elements of a dtype travel as `wire`: floats, and the parts of complex numbers, that have more bytes."""
    return wire is not None and is_inexact(dtype) and itemsize(real_dtype(dtype)) > itemsize(wire)


def real_dtype(dtype: str) -> str:
    """The dtype of the parts of complex numbers; another dtype as it is."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def starts_of(sizes: Sequence[int]) -> NDArray:
    """The first elements of the blocks of leaves of these sizes, side by side, and the number of all elements."""
    ends = list(itertools.accumulate(sizes, initial=0))
    runs = [np.arange(a, b, BLOCK) for a, b in itertools.pairwise(ends)]
    return np.concatenate([*runs, np.array([ends[-1]])])


def on_wire(segment: Segment, wire: str | None, wire_out: str | None, sizes: Sequence[int] | None = None) -> Segment:
    """The segment whose contributions travel as `wire`, and whose sums as `wire_out`, where they are narrower. sizes:
    those of its leaves, if it has them as one.
    """
    sent = wire if narrows(segment.dtype, wire) else None
    back = wire_out if narrows(segment.dtype, wire_out) else None
    if sent not in BLOCKED and back not in BLOCKED:
        return replace(segment, wire=sent, wire_out=back)
    starts = starts_of([p.stop - p.start for p in segment.places] if sizes is None else sizes)
    ranks = len(segment.bounds) - 1
    nearest = [int(starts[np.searchsorted(starts, segment.size * r // ranks, "right") - 1]) for r in range(ranks)]
    return replace(segment, wire=sent, wire_out=back, bounds=(*nearest, segment.size), starts=starts)


def layout_of(leaves: Sequence[Leaf], ranks: int, wire: str | None, wire_out: str | None) -> Layout:
    """The layout of a bucket whose elements travel so."""
    made = Layout(leaves, ranks)
    made.segments = tuple(on_wire(segment, wire, wire_out) for segment in made.segments)
    return made


class Codec:
    """Rounds the elements of a segment to the dtype that they travel as, and widens them again."""

    def __init__(self, segment: Segment, dtype: str) -> None:
        self.segment, self.dtype = segment, dtype
        self.blocks = BLOCKED.get(dtype)
        self.parts = 2 if segment.dtype.startswith("complex") else 1  #: numbers of an element
        #: A shard as it travels is an array of the dtype.
        self.is_array = self.blocks is None and self.parts == 1

    @cached_property
    def counts(self) -> list[int]:
        """The bytes of each rank's shard as they travel."""
        numbers = [self.parts * n for n in self.segment.counts("uint8")]
        if self.blocks is None:
            return [itemsize(self.dtype) * n for n in numbers]
        places = np.searchsorted(self._starts, self.segment.bounds).tolist()
        return [n + b - a for n, (a, b) in zip(numbers, itertools.pairwise(places), strict=True)]

    @property
    def _starts(self) -> NDArray:
        assert self.segment.starts is not None
        return self.segment.starts

    def _edges(self, owner: int) -> NDArray:
        """Where the blocks of a shard begin, and the last one ends, in numbers of the shard."""
        low, high = self.segment.bounds[owner : owner + 2]
        first, last = np.searchsorted(self._starts, (low, high))
        return self.parts * (self._starts[first : last + 1] - low)

    def encoded(self, raw: NDArray, dtype: str) -> NDArray:
        """A flat array of the segment in a dtype, both as bytes, rounded: the shards of all owners side by side."""
        made = _core.message_new(sum(self.counts))
        bounds, size = self.segment.bounds, itemsize(dtype)
        for owner, place in Runs(range(len(self.counts)), self.counts).items():
            self.encode(raw[size * bounds[owner] : size * bounds[owner + 1]], dtype, owner, made[place])
        return made

    def encode(self, raw: NDArray, dtype: str, owner: int, out: NDArray) -> None:
        """Write an owner's shard, rounded."""
        numbers = typed(raw, real_dtype(dtype))
        if self.blocks is not None:
            edges = self._edges(owner)
            _core.in_default_modes(partial(_round_blocks, numbers, real_dtype(dtype), edges, self.dtype, out))
        elif len(raw):
            _core.add_n([numbers], out=typed(out, self.dtype))

    def decode(self, raw: NDArray, owner: int, dtype: str, out: NDArray) -> None:
        """Widen an owner's shard into `out`, as bytes of a dtype."""
        numbers = typed(out, real_dtype(dtype))
        if self.blocks is not None:
            edges = self._edges(owner)
            _core.in_default_modes(partial(_widen_blocks, raw, edges, self.dtype, real_dtype(dtype), numbers))
        elif len(raw):
            _core.add_n([typed(raw, self.dtype)], out=numbers)

    def shard(self, raw: NDArray, owner: int, dtype: str) -> NDArray:
        """An owner's shard in a dtype, as bytes."""
        low, high = self.segment.bounds[owner : owner + 2]
        out = _core.message_new(itemsize(dtype) * (high - low))
        self.decode(raw, owner, dtype, out)
        return out

    def term(self, raw: NDArray, owner: int, dtype: str) -> Any:
        """An owner's shard as an array for a sum in a dtype: of that one, or as it came."""
        return typed(raw, self.dtype) if self.is_array else typed(self.shard(raw, owner, dtype), dtype)

    def widened(self, raw: NDArray, owners: Sequence[int], dtype: str) -> NDArray:
        """The shards of owners, side by side, in a dtype."""
        sizes = self.segment.counts(dtype)
        came, there = Runs(owners, self.counts), Runs(owners, sizes)
        made = _core.message_new(sum(sizes[o] for o in owners))
        for owner in owners:
            self.decode(raw[came[owner]], owner, dtype, made[there[owner]])
        return made

    def rounded(self, raw: NDArray, dtype: str) -> NDArray:
        """A flat array of the segment in a dtype, with the elements that owners get of it."""
        return self.widened(self.encoded(raw, dtype), range(len(self.counts)), dtype)


def sent_codec(segment: Segment) -> Codec | None:
    """How contributions travel; None: as they are."""
    return None if segment.wire is None else Codec(segment, segment.wire)


def returned_codec(segment: Segment) -> Codec | None:
    """How sums travel; None: as they are."""
    return None if segment.wire_out is None else Codec(segment, segment.wire_out)


def shard_sizes(segment: Segment, codec: Codec | None, dtype: str | None = None) -> list[int]:
    """The bytes of each rank's shard as it travels: by the codec, or in a dtype; None: the segment's."""
    return segment.counts(dtype) if codec is None else codec.counts


def rounded(x: Any, leaf: Leaf, wire: str | None) -> Any:
    """An array without gaps with the elements that owners get of it, flat; itself where it travels as it is."""
    if not narrows(leaf.dtype, wire):
        return x
    raw = flat_bytes(x)
    assert raw is not None
    codec = sent_codec(layout_of([leaf], 1, wire, None).segments[0])
    assert codec is not None
    return typed(codec.rounded(raw, leaf.dtype), leaf.dtype)


def sum_dtype(codec: Codec | None, dtype: str, accumulate: str | None) -> str | None:
    """The dtype in which terms are summed: that of a gradient, where they come as narrower ones."""
    if accumulate is None and codec is not None and codec.is_array:
        return accumulation(dtype)
    return accumulate


def _chunks(edges: NDArray) -> list[tuple[slice, NDArray]]:
    """Runs of blocks, each as their numbers and its edges."""
    firsts = range(0, len(edges) - 1, CHUNK)
    return [(slice(k, min(k + CHUNK, len(edges) - 1)), edges[k : k + CHUNK + 1]) for k in firsts]


def _held(numbers: Any, dtype: str) -> NDArray:
    """Numbers as an ndarray of float32, or of float64 if they are: themselves, or a copy."""
    held = "float64" if dtype == "float64" else "float32"
    if dtype == held:
        return np.asarray(numbers)
    made: NDArray = np.empty(len(numbers), held)
    _core.add_n([numbers], out=made)
    return made


def _exponents(numbers: NDArray, edges: NDArray, digits: int, sizes: NDArray) -> NDArray:
    """The exponent of each block; `sizes` is written."""
    np.abs(numbers, out=sizes)
    firsts = edges[:-1] - edges[0]
    largest = np.maximum.reduceat(sizes, firsts)
    if not np.isfinite(largest).all():
        sizes[~np.isfinite(sizes)] = 0.0
        largest = np.maximum.reduceat(sizes, firsts)
    fractions, exponents = np.frexp(largest)  # 0.5 <= fraction < 1
    carries = fractions >= 1 - 2.0 ** -(digits + 1)  # the largest is rounded to the next power of two
    clipped: NDArray = np.clip(exponents - 1 + carries, LOWEST, HIGHEST)
    return clipped


def _scaled(numbers: NDArray, exponents: NDArray, edges: NDArray, out: NDArray) -> None:
    """Write numbers times 2 to the exponent of their block."""
    factors = np.ldexp(numbers.dtype.type(1), exponents)
    sizes = np.diff(edges)
    if (sizes == sizes[0]).all():  # then no factor is copied
        np.multiply(numbers.reshape(len(sizes), -1), factors[:, None], out=out.reshape(len(sizes), -1))
    else:
        np.multiply(numbers, np.repeat(factors, sizes), out=out)


def _round_blocks(numbers: Any, dtype: str, edges: NDArray, wire: str, out: NDArray) -> None:
    """Write numbers of blocks, rounded, and after them the byte of each block."""
    digits, top = BLOCKED[wire]
    codes, scales = out[: len(numbers)], out[len(numbers) :]
    chunks = _chunks(edges)
    longest = max((within[-1] - within[0] for _, within in chunks), default=0)
    room: NDArray = np.empty(longest, "float64" if dtype == "float64" else "float32")
    with np.errstate(all="ignore"):
        for blocks, within in chunks:
            place = slice(within[0], within[-1])
            held, scaled = _held(numbers[place], dtype), room[: within[-1] - within[0]]
            exponents = _exponents(held, within, digits, scaled)
            scales[blocks] = exponents - LOWEST
            if (top - exponents > np.finfo(np.float32).maxexp - 1).any():  # the factor is no float32
                held = held.astype(np.float64)
                scaled = np.empty_like(held)
            _scaled(held, top - exponents, within, scaled)  # exact, or far below the smallest number of the dtype
            _core.add_n([scaled], out=typed(codes[place], wire))


def _widen_blocks(raw: NDArray, edges: NDArray, wire: str, dtype: str, out: Any) -> None:
    """Write the numbers of blocks that `_round_blocks` has written."""
    codes, scales = raw[: len(out)], raw[len(out) :]
    held = "float64" if dtype == "float64" else "float32"
    with np.errstate(all="ignore"):
        for blocks, within in _chunks(edges):
            place = slice(within[0], within[-1])
            wide: NDArray = np.asarray(out[place]) if dtype == held else np.empty(within[-1] - within[0], held)
            _core.add_n([typed(codes[place], wire)], out=wide)
            exponents = scales[blocks].astype(np.int32) + (LOWEST - BLOCKED[wire].top)
            _scaled(wide, exponents, within, wide)  # exact, or above the largest number of the dtype
            if dtype != held:
                _core.add_n([wide], out=out[place])
