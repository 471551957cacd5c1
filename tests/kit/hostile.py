"""A producer of DLPack tensors, built by ctypes, whose every field can lie; and a counter on its deleter."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

import numpy as np


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("ctx", c_void_p), ("deleter", c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


READ_ONLY, IS_COPIED = 1, 2

Deleter = ctypes.CFUNCTYPE(None, c_void_p)

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = py_object
new_capsule.argtypes = [c_void_p, c_char_p, c_void_p]

set_name = ctypes.pythonapi.PyCapsule_SetName
set_name.argtypes = [py_object, c_char_p]

get_name = ctypes.pythonapi.PyCapsule_GetName
get_name.argtypes = [py_object]
get_name.restype = c_char_p

get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
get_pointer.argtypes = [py_object, c_char_p]
get_pointer.restype = c_void_p

#: Capsules keep a pointer to their name: these bytes live as long as the process.
NAMES: dict[str, bytes] = {}


def c_array(values: Sequence[int] | None) -> Any:
    return None if values is None else (c_int64 * max(1, len(values)))(*values)


class Producer:
    """An array with `__dlpack__` and `__dlpack_device__`; by default an honest one over `array`.

    Every other argument replaces an honest answer. `deleted` counts calls of the deleter.
    """

    def __init__(
        self,
        array: Any = None,
        *,
        versioned: bool = True,
        version: tuple[int, int] = (1, 3),
        flags: int = 0,
        name: str | None = "",
        device: tuple[int, int] = (1, 0),
        said: Any = (1, 0),
        ndim: int | None = None,
        shape: Any = "",
        strides: Any = "",
        dtype: tuple[int, int, int] | None = None,
        data: Any = "",
        offset: int = 0,
        deleter: Any = "",
    ) -> None:
        self.array = np.array([1.0, 2.0, 3.0]) if array is None else np.asarray(array)
        self.said = said
        self.deleted = 0
        self.requests: list[dict[str, Any]] = []
        a = self.array
        kinds = {"f": 2, "i": 0, "u": 1, "c": 5, "b": 6}
        code, bits, lanes = dtype or (kinds[a.dtype.kind], 8 * a.itemsize, 1)
        self.shape = c_array(a.shape if shape == "" else shape)
        self.strides = c_array([s // a.itemsize for s in a.strides] if strides == "" else strides)
        self.callback = Deleter(self._count)
        address = a.ctypes.data if data == "" else data
        self.tensor = Tensor(
            address,
            *device,
            a.ndim if ndim is None else ndim,
            code,
            bits,
            lanes,
            ctypes.cast(self.shape, c_void_p) if self.shape is not None else None,
            ctypes.cast(self.strides, c_void_p) if self.strides is not None else None,
            offset,
        )
        calls = ctypes.cast(self.callback, c_void_p) if deleter == "" else deleter
        if versioned:
            self.managed: Any = Versioned(*version, None, calls, flags, self.tensor)
        else:
            self.managed = Legacy(self.tensor, None, calls)
        self.name = ("dltensor_versioned" if versioned else "dltensor") if name == "" else name
        self.capsule: Any = None

    def _count(self, pointer: int | None) -> None:
        self.deleted += 1

    def make(self) -> Any:
        """A new capsule over the one tensor."""
        name = None if self.name is None else NAMES.setdefault(self.name, self.name.encode())
        return new_capsule(ctypes.addressof(self.managed), name, None)

    def __dlpack_device__(self) -> Any:
        return self.said

    def __dlpack__(self, **how: Any) -> Any:
        self.requests.append(how)
        self.capsule = self.make()
        return self.capsule


@contextmanager
def once(*producers: Any) -> Iterator[None]:
    """At the end of the block each deleter has been called exactly once, and no sooner than the block's last
    use of it.
    """
    yield
    gc.collect()
    for p in producers:
        assert p.deleted == 1, f"the deleter was called {p.deleted} times"


@contextmanager
def never(*producers: Any) -> Iterator[None]:
    """Nothing was taken: no deleter is called."""
    yield
    gc.collect()
    for p in producers:
        assert p.deleted == 0, f"the deleter was called {p.deleted} times, and the capsule was not taken"
