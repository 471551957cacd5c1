"""What the core is told of an object: small records. They are tuples, each of so many fields as no other has where it
may stand: that is how the core tells them apart (`csrc/py`).
"""

from __future__ import annotations

from typing import NamedTuple, Never

import numpy as np

from .. import _core
from .protocols import NDArray, Shape


class Capsule(NamedTuple):
    """Memory by DLPack."""

    capsule: object
    device_type: int
    device_index: int
    writes: int
    """May it be written: AS_IT_SAYS, NEVER, ALWAYS."""


class Address(NamedTuple):
    """Memory by `__cuda_array_interface__`."""

    address: int
    dtype: np.dtype[np.generic]
    shape: Shape
    strides: Shape | None
    """In bytes; None: without gaps."""
    writable: bool
    device_index: int


Source = NDArray | _core.Array | Capsule | Address


class Dense(NamedTuple):
    """An array. `origin` numbers the kinds of `export`: a sum comes back as its first contribution's kind (D15)."""

    origin: int
    object: object
    source: Source


class Stored(NamedTuple):
    """A sparse array, by what it stores."""

    origin: int
    object: object
    format: str
    shape: Shape
    indices: Source
    pointers: Source | None
    values: Source
    coalesced: bool


class Object(NamedTuple):
    """What sums by `combine` or by its own + (A8)."""

    parts: object
    """The memory that it says it holds; None: it says nothing."""


class Refused(NamedTuple):
    """What is no gradient, or none that can be had. The core adds for which buffer, slot and key."""

    kind: type[Exception]
    text: str


class Conformed(NamedTuple):
    """A gradient as its slot declares it (A9, A10)."""

    gradient: object


class Lent(NamedTuple):
    """Memory to be looked at, not read: a DLPack capsule, which the core gives back."""

    capsule: object


class Region(NamedTuple):
    """Memory to be looked at, not read."""

    address: int
    shape: Shape
    strides: Shape
    """In bytes."""
    itemsize: int
    dtype: str
    writable: bool
    device_type: int
    """DLPack's."""
    device_index: int


Description = Dense | Stored | Object | Refused
Memory = Region | Lent | Refused

AS_IT_SAYS, NEVER, ALWAYS = 0, 1, 2


class Refusal(Exception):
    """Why something is no gradient: the class of the exception, and its text."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind

    def as_record(self) -> Refused:
        return Refused(self.kind, str(self))


def refuse(kind: type[Exception], text: str) -> Never:
    raise Refusal(kind, text)
