"""Streams of other libraries: recognition, the current stream of the library that owns an array (S4), and DLPack's
stream arguments.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from .. import _core
from .._core import DTypeError
from ..slots import Sparse
from .classes import TORCH, is_index, is_torch, named, package_of, table_of
from .protocols import Shape
from .records import Refusal, refuse

__tracebackhide__ = True  # no frames of ours in reports of pytest

# ---- `__cuda_array_interface__`: an address, with nothing that keeps it alive or checks it.

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


def interface_int(x: object, what: str, value: object, least: int) -> int:
    """An exact integer of an interface, from `least` on, that fits 64 bits."""
    if not is_index(value):
        refuse(TypeError, f"{named(x)}: {INTERFACE} has {what} {value!r:.80}; expected an integer")
    n = operator.index(value)
    if not least <= n < 2**64:
        refuse(ValueError, f"{named(x)}: {INTERFACE} has {what} {n}; expected {least} or more, in 64 bits")
    return n


def fields_of(x: object) -> Fields:
    """`x.__cuda_array_interface__`, version 3 and those before, which lack fields. TypeError, ValueError,
    BufferError.
    """
    got = getattr(x, INTERFACE)
    where = f"{named(x)}: {INTERFACE}"
    if not isinstance(got, dict) or not {"shape", "typestr", "data", "version"} <= got.keys():
        refuse(TypeError, f"{where} is {got!r:.80}; expected a dict with shape, typestr, data and version")
    if got.get("mask") is not None:
        refuse(BufferError, f"{where} has a mask, which would be lost; expected an array without one")
    data, shape, strides, stream = got["data"], got["shape"], got.get("strides"), got.get("stream")
    if not isinstance(data, tuple) or len(data) != 2:
        refuse(TypeError, f"{where} has data {data!r:.80}; expected (address, read-only)")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple | None):
        refuse(TypeError, f"{where} has shape {shape!r:.80} and strides {strides!r:.80}; expected tuples of integers")
    if strides is not None and len(strides) != len(shape):
        refuse(ValueError, f"{where} has {len(shape)} axes and {len(strides)} strides")
    if stream is not None and interface_int(x, "stream", stream, -(2**63)) <= 0:
        refuse(
            ValueError,
            f"{where} has stream {stream}; expected None, 1 (legacy default), 2 (per-thread default) or a handle",
        )
    typestr, dtype = got["typestr"], None
    if isinstance(typestr, str):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # np.dtype's errors for unknown names
            dtype = np.dtype(typestr)
    if dtype is None:
        refuse(TypeError, f"{where} has typestr {typestr!r:.80}; expected one like '<f4'")
    if not dtype.isnative:
        refuse(DTypeError, f"{where} has typestr {typestr!r:.80} of foreign byte order; convert it first")
    if dtype.char in "gG":
        refuse(DTypeError, f"{where} has typestr {typestr!r:.80}, a {dtype.type.__name__}, which is not summed")
    return Fields(
        interface_int(x, "address", data[0] or 0, 0),
        bool(data[1]),
        dtype,
        tuple(interface_int(x, "extent", n, 0) for n in shape),
        None if strides is None else tuple(interface_int(x, "stride", n, -(2**63)) for n in strides),
        None if stream is None else operator.index(stream),
    )


NO_SYNC, LEGACY = -1, 1  # streams as integers, in __dlpack__(stream=)
#: Streams that torch made: it destroys none, so their handles stay theirs. By device and handle.
of_torch: set[tuple[str, int]] = set()


# Streams from callers


def whole(owner: str, what: str, value: object) -> int:
    """A handle, or a device's number, of another library's stream."""
    if not is_index(value):
        raise TypeError(f"{owner} has {what} {value!r:.80}; expected an integer")
    return operator.index(value)


def device_of(s: object, owner: str) -> int | None:
    """The number of the device that another library's stream names; None without one."""
    for holder, name in (
        (s, "device_index"),
        (s, "device_id"),
        (getattr(s, "device", None), "index"),
        (getattr(s, "device", None), "device_id"),
    ):
        got = getattr(holder, name, None)
        if got is not None and not callable(got):
            index = whole(owner, name, got)
            return index if index >= 0 else None  # CuPy's -1: whichever is current
    return None


def foreign(s: object) -> _core.Stream:
    """Another library's stream as a `fanin.Stream`. The caller keeps it alive.

    Its device is the one that it names. Otherwise the driver gives the device of a handle, and the default streams (0,
    1, 2) are those of the device whose context is current. TypeError for an object that is no stream; ValueError for a
    stream of another device than it names; DeviceError without CUDA, or if the driver does not accept the handle.
    """
    name = type(s).__qualname__
    owner = name if type(s).__module__ == "builtins" else f"{package_of(s)}.{name}"
    protocol = getattr(type(s), "__cuda_stream__", None)
    attribute = {"torch": "cuda_stream", "cupy": "ptr"}.get(package_of(s), "")
    if protocol is not None:
        got = protocol(s)
        if not isinstance(got, tuple) or len(got) != 2:
            raise TypeError(f"{owner}: __cuda_stream__(): expected (version, handle), got {got!r:.80}")
        if whole(owner, "version", got[0]) != 0:
            raise TypeError(f"{owner}: __cuda_stream__() has version {got[0]}; expected 0")
        handle = whole(owner, "handle", got[1])
    elif attribute and hasattr(s, attribute):
        handle = whole(owner, attribute, getattr(s, attribute))
    elif isinstance(s, int):
        hint = f'pass fanin.Stream(device, {s}), as in fanin.Stream("cuda:0", {s})'
        raise TypeError(f"expected a stream, got the number {s}: {hint}")
    else:
        known = "a fanin.Stream, torch's or CuPy's, anything with __cuda_stream__, or None"
        raise TypeError(f"expected a stream ({known}), got {owner}")
    if not 0 <= handle < 2**64:
        raise ValueError(f"{owner} has handle {handle}; expected a non-negative number that fits 64 bits")
    index = device_of(s, owner)
    if index is None and handle <= 2:
        index = max(_core.cuda_here(), 0)
    if index is not None:
        found = _core.Stream(f"cuda:{index}", handle)
        if made_by_torch(s):
            of_torch.add((found.device, handle))
        return found
    refused: Exception = ValueError(f"{owner}: handle {handle:#x} is of no device: there is none")
    devices = range(len(_core.cuda_info().get("devices", ())))
    active = [i for i in devices if _core.cuda_active(i)]  # a query would initialize the others
    for one in active or [0]:
        try:
            return _core.Stream(f"cuda:{one}", handle)
        except ValueError as e:
            refused = e
    raise refused


def made_by_torch(s: object) -> bool:
    """Whether a stream is of torch's pool, not an external one: external streams have their handle as id, and handles
    are even.
    """
    return package_of(s) == "torch" and bool(int(getattr(s, "stream_id", 0)) & 1)


def torch_keeps(s: _core.Stream) -> bool:
    """Whether a stream can be passed to a tensor's record_stream: torch uses the stream when the tensor is freed, on
    any thread, so not a thread's own stream (2), which is another one there, nor one that its library may have
    destroyed by then.
    """
    if s.handle <= 2 or (s.device, s.handle) in of_torch:
        return s.handle != 2
    now = sys.modules["torch"].cuda.current_stream(int(s.device.rpartition(":")[2]))
    if int(now.cuda_stream) != s.handle or not made_by_torch(now):
        return False
    of_torch.add((s.device, s.handle))
    return True


def allocator_on(origin: int, s: _core.Stream) -> AbstractContextManager[object] | None:
    """A context that makes s the current stream of an origin's allocator; None if that must not be: the allocator keeps
    memory for that stream, and the stream must outlive it.
    """
    if origin != TORCH or not torch_keeps(s):
        return None
    scope: AbstractContextManager[object] = sys.modules["torch"].cuda.stream(torch_stream(s))
    return scope


# The stream of an array


def library_stream(x: object, index: int) -> int | None:
    """The handle of the current stream, on a CUDA device, of the library that owns x; None if it has none."""
    if isinstance(x, Sparse):
        x = x.parts[-1]
    table = table_of(type(x))
    if table is not None:
        return _core.table_stream(table, index)
    if is_torch(x):
        return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)
    if package_of(x) == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            return int(cupy.cuda.get_current_stream().ptr)
    if hasattr(type(x), INTERFACE) and not hasattr(type(x), "__dlpack__"):
        try:
            return fields_of(x).stream
        except Refusal as e:  # the core checks, too
            raise e.kind(str(e)) from None
    return None


def device_here(x: object, index: int) -> str:
    """The name of a CUDA device that is there; BufferError where it is not."""
    name = f"cuda:{index}"
    try:
        if not 0 <= index < 4096:
            raise ValueError("no machine has so many")
        _core.stream_pushed(name)
    except (ValueError, RuntimeError) as e:
        refuse(BufferError, f"{named(x)} is on CUDA device {index}, which cannot be used: {e}")
    return name


def ready_on(x: object, index: int, ready: _core.Stream | None) -> int:
    """The stream on which x is to be ready, as DLPack has it: 1 or a handle; -1 where it is ready on another device's
    stream.
    """
    name = device_here(x, index)
    if ready is None:
        ready = _core.stream_pushed(name)
    if ready is not None:
        return ready.handle if ready.device == name else NO_SYNC
    return library_stream(x, index) or LEGACY


def wait_for(x: object, index: int, ready: _core.Stream | None, other: int | None) -> None:
    """Where x is to be ready, what was queued on the stream `other` of its device is waited for."""
    name = device_here(x, index)
    ready = ready or _core.stream_pushed(name)
    if ready is not None and other is not None:
        ready.wait(_core.Stream(name, other))


def torch_stream(s: _core.Stream) -> object:
    """torch's stream of a handle. Its legacy default has a number of its own in torch."""
    torch = sys.modules["torch"]
    device = int(s.device.rpartition(":")[2])
    return (
        torch.cuda.default_stream(device) if s.handle == LEGACY else torch.cuda.ExternalStream(s.handle, device=device)
    )
