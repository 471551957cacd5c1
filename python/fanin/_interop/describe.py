"""Import: a gradient of any library as a record."""

from __future__ import annotations

from typing import cast

import numpy as np

from .. import _core
from ..slots import Sparse
from . import cuda_interface
from .classes import (
    CONTAINERS,
    SCALARS,
    exports,
    has_parts,
    is_jax,
    is_plain,
    is_scipy,
    is_subclass_of_known,
    is_torch,
    named,
    overrides,
)
from .cuda_interface import INTERFACE, fields_of
from .dlpack import capsule_of, device_of, is_host
from .export import kind_of_library
from .origins import JAX, TORCH_PARTS
from .protocols import Exporter, JaxArray
from .records import AS_IT_SAYS, NEVER, Address, Dense, Description, Object, Refusal, Source, Stored, refuse
from .scipy import scipy_of
from .streams import wait_for
from .torch import torch_of


def describe(x: object, recording: bool, has_combine: bool, ready: _core.Stream | None = None) -> Description:
    """Describe the gradient x as a record.

    `recording`: everything is an object (A1). `has_combine`: containers are objects, too. `ready`: the stream on which
    the caller made x.
    """
    try:
        if recording and is_plain(x):
            return Object(None if type(x) in SCALARS or isinstance(x, np.generic) else (x,))
        return (None if recording else known(x, ready)) or object_of(x, has_combine)
    except Refusal as e:
        return e.as_record()


def known(x: object, ready: _core.Stream | None = None) -> Dense | Stored | None:
    """The record of an array of a known class; None for an object."""
    if isinstance(x, np.ndarray):
        return None if x.dtype == np.object_ or overrides(x) else Dense(_core.FROM_NDARRAY, x, x.view(np.ndarray))
    if isinstance(x, Sparse):
        return sparse_of(x, ready)
    if is_torch(x):
        return torch_of(x, ready)
    if is_jax(x):
        return jax_of(x, ready)
    if is_scipy(x):
        return scipy_of(x)
    if isinstance(x, CONTAINERS) or has_parts(x) or is_subclass_of_known(x):
        return None
    if exports(x):
        return Dense(kind_of_library(x), x, capsule_of(x, AS_IT_SAYS, ready))
    if cuda_interface.raw_addresses and hasattr(type(x), INTERFACE):
        return Dense(kind_of_library(x), x, address_of(x, ready))
    return buffer_of(x)


def jax_of(x: JaxArray, ready: _core.Stream | None) -> Dense:
    if not hasattr(type(x), "__dlpack__"):
        refuse(_core.DTypeError, f"{named(x)} of dtype {x.dtype} has no sum; expected numbers")
    if x.is_deleted():
        refuse(BufferError, "the jax.Array has been deleted; expected one that still has its memory")
    return Dense(JAX, x, capsule_of(x, NEVER, ready))


def address_of(x: object, ready: _core.Stream | None) -> Address:
    """x by its raw address: the driver gives the owner of that memory, and the stream that x names is waited for."""
    f = fields_of(x)
    index = 0
    if f.address and 0 not in f.shape:
        try:
            index = _core.cuda_holding(f.address)
        except RuntimeError as e:
            refuse(BufferError, f"{named(x)} is an array of a CUDA device, and there is none to be used: {e}")
        if index < 0:
            refuse(BufferError, f"{named(x)}: {INTERFACE} has address {f.address:#x}, where no CUDA device has memory")
    wait_for(x, index, ready, f.stream)
    return Address(f.address, f.dtype, f.shape, f.strides, not f.read_only, index)


def buffer_of(x: object) -> Dense | None:
    """An ndarray over an object with Python's buffer protocol, such as array.array and memoryview."""
    try:
        view = memoryview(x)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None
    return Dense(_core.FROM_NDARRAY, x, np.asarray(view))


def sparse_of(x: Sparse, ready: _core.Stream | None) -> Stored:
    *indices, values = x.parts
    pointers, plain = (None, indices[0]) if x.format == "coo" else (indices[0], indices[1])
    return Stored(
        TORCH_PARTS if is_torch(values) else _core.FROM_SPARSE,
        x,
        x.format,
        x.shape,
        source_of(plain, ready),
        None if pointers is None else source_of(pointers, ready),
        source_of(values, ready),
        False,
    )


def source_of(x: object, ready: _core.Stream | None = None) -> Source:
    """The memory of one dense array: a part of a sparse one."""
    if isinstance(x, np.ndarray):
        if overrides(x):
            refuse(TypeError, f"{named(x)} overrides NumPy's operators; expected plain arrays as the parts of a Sparse")
        return x
    if isinstance(x, _core.Array):
        return x
    described = None if isinstance(x, Sparse) else known(x, ready)
    if not isinstance(described, Dense):
        refuse(TypeError, f"{named(x)} is no dense array; expected arrays as the parts of a Sparse")
    return described.source


def object_of(x: object, has_combine: bool) -> Object:
    """A8, D14: what sums by the slot's `combine` or by a `+` of its own."""
    if not has_combine:
        if isinstance(x, CONTAINERS):
            refuse(
                TypeError,
                f"{named(x)} is no array, and its + would not mean a sum: pass np.asarray(x); for objects of your own"
                " give combine=, as Slot(combine=f)",
            )
        if not hasattr(type(x), "__add__") and not hasattr(type(x), "__radd__"):
            refuse(
                TypeError,
                f"{named(x)} is no array and has no +: pass np.asarray(x); for objects of your own give combine=, as"
                " Slot(combine=f)",
            )
    if has_parts(x):
        return Object(type(x).__fanin_parts__(x))
    check_on_host(x)
    return Object(None)


def check_on_host(x: object) -> None:
    """Refuse an object whose memory is on a device or cannot be checked."""
    by_address, by_dlpack = hasattr(type(x), INTERFACE), hasattr(type(x), "__dlpack_device__")
    if not (by_address or by_dlpack) or is_subclass_of_known(x):
        return
    if by_address:
        refuse(
            TypeError,
            f"{named(x)} gives its memory by {INTERFACE} alone, an address that cannot be checked. To accept"
            " it, call fanin.set_options(raw_addresses=True)",
        )
    if by_dlpack and not is_host(device_of(cast(Exporter, x))[0]):
        refuse(
            TypeError,
            f"{named(x)} is an object on a device whose memory is unknown: implement __fanin_parts__()",
        )
