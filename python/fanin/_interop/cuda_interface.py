"""`__cuda_array_interface__`: an address, with nothing that keeps it alive or checks it."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass

import numpy as np

from .._core import DTypeError
from .classes import is_index, named
from .protocols import Shape
from .records import refuse

INTERFACE = "__cuda_array_interface__"

raw_addresses = False  # may addresses be believed that nothing can check (fanin.set_options)?


@dataclass(frozen=True)
class Fields:
    """The fields of an array's `__cuda_array_interface__`, checked as far as possible."""

    address: int
    read_only: bool
    dtype: np.dtype[np.generic]
    shape: Shape
    strides: Shape | None  # in bytes
    stream: int | None


def whole(x: object, what: str, value: object, least: int) -> int:
    """An exact integer of an interface, from `least` on, that fits 64 bits."""
    if not is_index(value):
        refuse(TypeError, f"{named(x)}: {INTERFACE} has {what} {value!r:.80}; expected an integer")
    n = operator.index(value)
    if not least <= n < 2**64:
        refuse(ValueError, f"{named(x)}: {INTERFACE} has {what} {n}; expected {least} or more, in 64 bits")
    return n


def dtype_of(where: str, typestr: object) -> np.dtype[np.generic]:
    dtype = None
    if isinstance(typestr, str):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # np.dtype's errors for unknown names
            dtype = np.dtype(typestr)
    if dtype is None:
        refuse(TypeError, f"{where} has typestr {typestr!r:.80}; expected one like '<f4'")
    if not dtype.isnative:
        refuse(DTypeError, f"{where} has typestr {typestr!r:.80} of foreign byte order; convert it first")
    if dtype.char in "gG":
        refuse(DTypeError, f"{where} has typestr {typestr!r:.80}, a {dtype.type.__name__}, which is not summed")
    return dtype


def fields_of(x: object) -> Fields:
    """`x.__cuda_array_interface__`, version 3 and those before, which lack fields. TypeError, ValueError,
    BufferError.
    """
    said = getattr(x, INTERFACE)
    where = f"{named(x)}: {INTERFACE}"
    if not isinstance(said, dict) or not {"shape", "typestr", "data", "version"} <= said.keys():
        refuse(TypeError, f"{where} is {said!r:.80}; expected a dict with shape, typestr, data and version")
    if said.get("mask") is not None:
        refuse(BufferError, f"{where} has a mask, which would be lost; expected an array without one")
    data, shape, strides, stream = said["data"], said["shape"], said.get("strides"), said.get("stream")
    if not isinstance(data, tuple) or len(data) != 2:
        refuse(TypeError, f"{where} has data {data!r:.80}; expected (address, read-only)")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple | None):
        refuse(TypeError, f"{where} has shape {shape!r:.80} and strides {strides!r:.80}; expected tuples of integers")
    if strides is not None and len(strides) != len(shape):
        refuse(ValueError, f"{where} has {len(shape)} axes and {len(strides)} strides")
    if stream is not None and whole(x, "stream", stream, -(2**63)) <= 0:
        refuse(
            ValueError,
            f"{where} has stream {stream}; expected None, 1 (legacy default), 2 (per-thread default) or a handle",
        )
    dtype = dtype_of(where, said["typestr"])
    return Fields(
        whole(x, "address", data[0] or 0, 0),
        bool(data[1]),
        dtype,
        tuple(whole(x, "extent", n, 0) for n in shape),
        None if strides is None else tuple(whole(x, "stride", n, -(2**63)) for n in strides),
        None if stream is None else operator.index(stream),
    )
