"""How a sum over ranks is made: the options, which are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fanin import _core
from fanin._words import type_of

from .layout import Layout, Leaf, is_inexact, typed
from .wire import layout_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

Order = Literal["key", "exact", "rank"]
Into = Literal["all", "shard"] | int
ORDERS = ("key", "exact", "rank")


@dataclass
class Options:
    """How a sum is made; the same on every rank."""

    order: Order | None
    scale: complex | None = None
    into: Into = "all"
    accumulate: str | None = None  #: the dtype in which owners fold, or "exact"; None: that of rule A11
    mean: bool = False  #: the sum is divided by that of all weights
    wire: str | None = None  #: the dtype as which contributions travel, if it is narrower (wire.py)
    wire_out: str | None = None  #: .. and sums

    def check(self, call: str, size: int) -> None:
        """Raise ValueError or TypeError for an option that does not exist."""
        if self.order is not None and not (isinstance(self.order, str) and self.order in ORDERS):
            raise ValueError(f'{call}: expected order="key", "exact" or "rank", got {self.order!r}')
        scale: object = self.scale
        if isinstance(scale, np.ndarray) and scale.ndim:
            raise TypeError(f"{call}: scale: expected a number, got {type_of(scale)}")
        if isinstance(self.into, str) and self.into in ("all", "shard"):
            return
        if isinstance(self.into, bool) or not isinstance(self.into, int):
            raise TypeError(f'{call}: expected into="all", "shard" or a rank, got {type_of(self.into)}')
        if not 0 <= self.into < size:
            raise ValueError(f"{call}: into={self.into}: there are ranks 0 to {size - 1}")

    def check_dtypes(self, layout: Layout, call: str = "add_n") -> None:
        """Raise if an option does not fit a dtype: before headers, so that no rank waits for data."""
        for segment in layout.segments if self.mean else ():
            if not is_inexact(segment.dtype):
                raise TypeError(
                    f"{call}: mean: expected floats, got {segment.dtype}: give mean=False, or x.astype(float)"
                )
        for segment in layout.segments if (self.scale, self.accumulate) != (None, None) else ():
            one = typed(np.zeros(segment.itemsize, np.uint8), segment.dtype)
            try:
                _core.add_n([one], out=one, scale=self.scale, accumulate=self.accumulate)
            except (TypeError, ValueError) as e:
                raise type(e)(f"{call}: {str(e).removeprefix('add_n: ').removeprefix('slot 0: ')}") from None

    @property
    def text(self) -> str:
        scale = number_of(self.scale)
        sums = "" if self.accumulate is None else f", accumulate={self.accumulate!r}"
        mean = ", mean=True" if self.mean else ""
        sent = "" if self.wire is None else f", wire={self.wire!r}"
        back = "" if self.wire_out is None else f", wire_out={self.wire_out!r}"
        return f"order={self.order!r}, scale={scale!r}, into={self.into!r}{sums}{mean}{sent}{back}"

    def layout(self, leaves: Sequence[Leaf], ranks: int) -> Layout:
        """The layout of leaves that travel so."""
        return layout_of(leaves, ranks, self.wire, self.wire_out)


def number_of(scale: Any) -> Any:
    """A scale as a number of Python, with all its digits: an ndarray shows some of them, and another object none."""
    if isinstance(scale, np.generic | np.ndarray):
        scale = scale.item()
    if scale is None or isinstance(scale, int | float | complex):
        return scale
    number = complex(scale)
    return number if number.imag else number.real
