"""Records that describe an object to the core. They are tuples; those that may occur in one place have different
lengths, by which the core distinguishes them (`csrc/py`).
"""

from __future__ import annotations

from typing import NamedTuple, Never

import numpy as np

from .. import _core
from .protocols import NDArray, Shape

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Capsule(NamedTuple):
    """Memory by DLPack."""

    capsule: object
    device_type: int
    device_index: int
    writes: int  #: May it be written: WRITABLE_IF_FLAGGED, READ_ONLY, WRITABLE


class Address(NamedTuple):
    """Memory by `__cuda_array_interface__`."""

    address: int
    dtype: np.dtype[np.generic]
    shape: Shape
    strides: Shape | None  #: In bytes; None: without gaps
    writable: bool
    device_index: int


Source = NDArray | _core.Array | Capsule | Address


class Dense(NamedTuple):
    """An array. `origin` numbers the kinds of `export`: a sum comes back as its first contribution's kind (D15)."""

    origin: int
    object: object
    source: Source


class SparseArray(NamedTuple):
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
    """An object that sums by `combine` or by its own + (A8)."""

    parts: object  #: The memory that it lists; None: it has no list


class Refused(NamedTuple):
    """The reason why an object is no gradient. The core adds buffer, slot and key."""

    kind: type[Exception]
    text: str


class Conformed(NamedTuple):
    """A gradient as its slot declares it (A9, A10), or the sum of two."""

    gradient: object


class BorrowedCapsule(NamedTuple):
    """Memory whose layout is read, not its values: a DLPack capsule, which the core releases."""

    capsule: object


class Region(NamedTuple):
    """Memory whose layout is read, not its values."""

    address: int
    shape: Shape
    strides: Shape  #: In bytes
    itemsize: int
    dtype: str
    writable: bool
    device_type: int  #: DLPack's
    device_index: int


Description = Dense | SparseArray | Object | Refused
Memory = Region | BorrowedCapsule | Refused

WRITABLE_IF_FLAGGED, READ_ONLY, WRITABLE = 0, 1, 2


class Refusal(Exception):
    """Why something is no gradient: the class of the exception, and its text."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind

    def as_record(self) -> Refused:
        return Refused(self.kind, str(self))


def refuse(kind: type[Exception], text: str) -> Never:
    raise Refusal(kind, text)
