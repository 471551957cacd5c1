"""Sums of arrays that lie on a device, made there (N14): terms travel from device to device to their owners, each owner
folds them in one launch, and the sums travel back. The host sends headers alone, and waits for no device.

Everything of this rank is queued on one stream, the caller's current one of the device: the arrays are ready on it, and
so is the sum. What an engine queues elsewhere, it orders with that stream (`engine.Engine`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np

from fanin import _core
from fanin._interop.classes import has_memory, is_torch
from fanin._interop.streams import LEGACY, library_stream
from fanin.streams import stream as on_stream

from .counters import sent_to
from .engine import pieces
from .group import Call, Group, Header
from .layout import Layout, Leaf
from .options import Into, Options
from .plans import Agreed

__tracebackhide__ = True  # no frames of ours in reports of pytest


def device_of(x: Any) -> str | None:
    """The device with streams that an array lies on, if it is one that may be summed there."""
    if type(x) is _core.Array:
        return None if x.device == "cpu" else x.device
    if getattr(x, "is_cuda", False) and is_torch(x) and has_memory(x) and str(x.layout) == "torch.strided":
        return f"cuda:{x.device.index}"
    return None


def stream_of(x: Any, device: str) -> _core.Stream | None:
    """The current stream of an array's device; None for a tensor if torch's is another one, or is captured."""
    pushed = _core.stream_pushed(device)
    if type(x) is _core.Array:
        return pushed or _core.current_stream(device)
    now = _core.Stream(device, library_stream(x, x.device.index) or LEGACY)
    if pushed not in (None, now) or sys.modules["torch"].cuda.is_current_stream_capturing():
        return None
    return now


def is_gap_free(x: Any) -> bool:
    """Whether an array of fanin's lies in C order without gaps."""
    step = x.itemsize
    for n, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


class Where:
    """Where the arrays of this rank lie, and the stream that they are ready on. alike: what all ranks must have alike
    to sum them there.
    """

    def __init__(self, like: Any, stream: _core.Stream, alike: str) -> None:
        self.like, self.stream, self.alike = like, stream, alike
        self.is_tensor = type(like) is not _core.Array

    @property
    def header(self) -> Header:
        """What this rank says of it: `only`, if its arrays have no other way."""
        return {"on": self.alike, "only": not self.is_tensor}

    def current(self) -> AbstractContextManager[object]:
        """Inside, the core queues on that stream."""
        return on_stream(self.stream)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = None) -> Any:
        """An array there, not written yet, of the dtype of the arrays or another of their library."""
        dtype = dtype or self.like.dtype
        if self.is_tensor:
            return sys.modules["torch"].empty(shape, dtype=dtype, device=self.like.device)
        return _core.device_array(self.like.device, np.empty(shape, dtype), True)

    def flat(self, x: Any) -> Any:
        """An array as a flat one without gaps, copied only if it has to be."""
        if self.is_tensor:
            x = x.detach()
            self.mark(x)
            plain = x.is_contiguous() and not (x.is_conj() or x.is_neg())
        else:
            plain = is_gap_free(x)
        if plain:
            return x.reshape(-1)
        made = self.empty(tuple(x.shape))
        _core.add_n([x], out=made)
        return made.reshape(-1)

    def mark(self, x: Any) -> None:
        """Keep a tensor's memory, which may be of another stream, until work that is queued on this one has run (S19).
        The core does so for its own arrays.
        """
        x.record_stream(sys.modules["torch"].cuda.current_stream(self.like.device.index))

    def folded(self, terms: Sequence[Any], dtype: str, how: dict[str, Any]) -> Any:
        """The left fold of flat terms in a dtype."""
        made = self.like.dtype
        if _core.dtype_name(made) != dtype:
            made = getattr(sys.modules["torch"], dtype) if self.is_tensor else np.dtype(dtype)
        total = self.empty(len(terms[0]), made)
        if len(total):
            _core.add_n(terms, out=total, **how)
        return total


def where(group: Group, arrays: Sequence[Any]) -> Where | None:
    """Where this rank's arrays may be summed, as far as it knows alone; None: on the host."""
    carries = getattr(group._engine, "carries", None)
    if carries is None or not arrays or len(group._levels) > 1:
        return None
    device = device_of(arrays[0])
    if device is None:
        return None
    if any(type(x) is not type(arrays[0]) or device_of(x) != device for x in arrays):
        return None
    alike, stream = carries(arrays[0], device), stream_of(arrays[0], device)
    return None if alike is None or stream is None else Where(arrays[0], stream, alike)


def agreed(call: Call, headers: Sequence[Header]) -> bool:
    """Whether all ranks bring arrays that may be summed where they are; an error on every rank if they do not, and
    those of one have no other way.
    """
    places = [h.get("on") for h in headers]
    if None not in places and len(set(places)) == 1:
        return True
    for rank, h in enumerate(headers):
        if h.get("only"):
            other = next(r for r, place in enumerate(places) if place != places[rank])
            raise call.refuse(
                f"rank {rank} brings arrays of {places[rank]}, and rank {other} none that are summed there: give"
                " x.numpy()",
                other,
            )
    return False


class Trip:
    """The way of terms to their owners, and of sums back. sizes: the elements that each rank owns."""

    def __init__(self, call: Call, place: Where, bounds: Sequence[int], into: Into) -> None:
        self.call, self.place, self.into = call, place, into
        self.rank, self.size = call.group.rank, call.group.size
        self.sizes = [b - a for a, b in pairwise(bounds)]
        self.none = [0] * self.size

    def travel(self, operation: str, step: str, sends: Sequence[int], each: int, *args: Any) -> None:
        """Queue an operation of the engine that sends pieces of so many elements, each of some bytes."""
        sent = sent_to([n * each for n in sends], self.rank, self.call.group._nodes)
        self.call.start(operation, *args, self.place.stream, step=step, sent=sent)

    def to_owners(self, terms: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        """What this rank owns of the terms of all ranks, of which each brings so many: those of rank 0 first. Each
        exchange has one term of each rank.
        """
        if self.size == 1:
            return list(terms)
        came = []
        for k in range(max(counts)):
            send, sends = (terms[k], self.sizes) if k < len(terms) else (terms[0][:0], self.none)
            receives = [self.sizes[self.rank] if k < n else 0 for n in counts]
            receive = self.place.empty(sum(receives), send.dtype)
            self.travel("device_all_to_all", "to owners", sends, send.itemsize, send, sends, receive, receives)
            came.append(pieces(receive, receives))
        return [came[k][r] for r, n in enumerate(counts) for k in range(n)]

    def memory(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Memory for what this rank gets, None if that is nothing; and for the sum that it makes, flat."""
        gets = self.into in ("all", self.rank)
        if self.into == "all" or (gets and self.size == 1):
            whole = self.place.empty(shape)
            return whole, pieces(whole.reshape(-1), self.sizes)[self.rank]
        own = self.place.empty(self.sizes[self.rank])
        if self.into == "shard":
            return own, own
        return self.place.empty(shape) if gets else None, own

    def back(self, whole: Any, own: Any) -> None:
        """Send sums to the ranks that get them."""
        mine, into = self.sizes[self.rank], self.into
        if self.size == 1 or into == "shard":
            return
        if into == "all":
            flat = whole.reshape(-1)
            self.travel("device_all_gather", "back", [mine] * self.size, own.itemsize, flat, self.sizes)
            return
        sends = [mine if r == into else 0 for r in range(self.size)]
        receive, receives = (own[:0], self.none) if whole is None else (whole.reshape(-1), self.sizes)
        self.travel("device_all_to_all", "back", sends, own.itemsize, own, sends, receive, receives)


class DevicePlan(Agreed):
    """A sum on a device, of one array of each rank, that ended well: the next one sends a head alone."""

    def __init__(self, group: Group, leaf: Leaf, options: Options, place: Where) -> None:
        super().__init__(("add_n", place.alike, leaf, options.text, group.size, group._nodes_text))
        self.layout, self.options = Layout([leaf], group.size), options
