"""The only import and export of objects that the C core cannot read itself: torch, JAX, SciPy, DLPack, objects of
users.

The core (csrc/py) calls the names of this module:

| | |
|---|---|
| `describe` | import: a gradient as a record (`records`) |
| `export_dense`, `export_sparse`, `export_device` | export: a sum as the kind of its gradients |
| `leaving` | how long memory lives |
| `combine`, `conform` | sums by `combine` or by an object's own + |

Other modules: `classes` (the library of an object), `protocols` (the attributes that are used of it), `torch`, `sparse`
(fanin's and SciPy's sparse arrays), `streams` (and `__cuda_array_interface__`), `sharing` (addresses, for `overlap`).
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .. import _core
from ..slots import Sparse, Zero
from . import streams
from .classes import (
    CONTAINERS,
    JAX,
    LAST,
    SCALARS,
    TORCH_PARTS,
    exports,
    has_parts,
    is_bare,
    is_index,
    is_jax,
    is_plain,
    is_scipy,
    is_sparse,
    is_subclass_of_known,
    is_torch,
    named,
    overrides,
    package_of,
    table_of,
)
from .protocols import Computed, Exporter, Shape
from .records import (
    READ_ONLY,
    WRITABLE_IF_FLAGGED,
    Address,
    Capsule,
    Conformed,
    Dense,
    Description,
    Object,
    Refusal,
    Refused,
    Source,
    SparseArray,
    refuse,
)
from .sparse import Part, SparseOut, ndarray_of, scipy_of, scipy_out, sparse_out
from .streams import (
    INTERFACE,
    NO_SYNC,
    allocator_on,
    fields_of,
    library_stream,
    ready_on,
    torch_keeps,
    torch_stream,
    wait_for,
)
from .torch import convert, strided_parts, torch_of, torch_out, torch_parts_out, torch_sparse_out, wrote

__tracebackhide__ = True  # no frames of ours in reports of pytest

# ---- Memory by DLPack: first an object's device, then its memory.

#: Names of DLPack device types that no backend reads, for messages.
DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 14: "oneAPI", 18: "Trainium"}


def is_host(kind: int) -> bool:
    """Whether the host reads memory of a DLPack device type."""
    return _core.backend_of_dlpack(kind) == "cpu"


def device_of(x: Exporter) -> tuple[int, int]:
    """The result of `__dlpack_device__` as two ints."""
    got = x.__dlpack_device__()
    try:
        kind, index = got
        return operator.index(kind), operator.index(index)
    except (TypeError, ValueError):
        refuse(TypeError, f"{named(x)}: __dlpack_device__(): expected (device type, device id), got {got!r:.80}")


def capsule_of(x: Exporter, writes: int, ready: _core.Stream | None = None) -> Capsule:
    """A DLPack capsule of x: first its device, then its memory."""
    kind, index = -1, 0
    backend: str | None = "cpu"
    how: dict[str, object] = {}
    if hasattr(type(x), "__dlpack_device__"):
        kind, index = device_of(x)
        backend = _core.backend_of_dlpack(kind)
        if backend is None:
            where = f"{DEVICES[kind]} device {index}" if kind in DEVICES else f"device ({kind}, {index})"
            refuse(BufferError, f"{named(x)} is on {where}; expected memory of the host or of a CUDA device")
        if backend != "cpu":
            handle = ready_on(x, index, ready)
            table = table_of(type(x))
            if table is not None:
                return Capsule(_core.table_take(table, x), kind, index, writes)
            how["stream"] = handle
    try:
        capsule = x.__dlpack__(max_version=(1, 3), **how)
    except TypeError as e:
        # Older producers lack the keyword. A TypeError from inside the call is theirs.
        if e.__traceback__ is not None and e.__traceback__.tb_next is not None:
            raise
        capsule = x.__dlpack__(**how)
    return Capsule(capsule, kind, index if backend != "cpu" else 0, writes)


# ---- Out: sums as what went in (D15). An origin numbers a kind of `KINDS`.


@dataclass(frozen=True)
class Kind:
    """How sums come back as what went in."""

    name: str
    dense: Callable[[Part], object]
    sparse: SparseOut


def jax_out(part: Part) -> object:
    jax = sys.modules["jax"]
    if isinstance(part, _core.Array):
        return jax.dlpack.from_dlpack(part)
    values = part.numpy()
    made: object = jax.numpy.asarray(values)
    if getattr(made, "dtype", None) == values.dtype:
        return made
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        return jax.numpy.asarray(values)  # a sum with NumPy's doubles: JAX would make floats of it


KINDS = [
    Kind("torch.Tensor", torch_out, torch_sparse_out),
    Kind("jax.Array", jax_out, sparse_out),
    Kind("SciPy's sparse array", ndarray_of, scipy_out("array")),
    Kind("SciPy's sparse matrix", ndarray_of, scipy_out("matrix")),
    Kind("fanin.Sparse of torch.Tensor", torch_out, torch_parts_out),
]

# Kinds that are met later

#: Array API namespaces seen, by id, with themselves (two libraries may have one name), and by an array's type and the
#: name, for libraries that make a new object each time: origins.
namespaces: dict[int | tuple[type, str], tuple[object, int]] = {}

kinds: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
"""Types with a table, or of CuPy and Numba: their origins."""


def kind_of_namespace(x: object) -> int:
    """The origin of arrays of an unknown library that implements the array API standard; else NumPy's."""
    protocol = getattr(type(x), "__array_namespace__", None)
    space = protocol(x) if protocol is not None else None
    name, make = getattr(space, "__name__", None), getattr(space, "from_dlpack", None)
    if not isinstance(name, str) or make is None:
        return _core.FROM_NDARRAY
    by_type = (type(x), name)
    known = namespaces.get(id(space)) or namespaces.get(by_type)
    if known is None:
        if _core.FROM_FOREIGN + len(KINDS) > LAST:
            return _core.FROM_NDARRAY
        known = namespaces[id(space)] = namespaces[by_type] = (space, _core.FROM_FOREIGN + len(KINDS))
        KINDS.append(Kind(name, make, sparse_out))
    return known[1]


def kind_of_library(x: object) -> int:
    """The origin of an array that offers itself: by its type's exchange table, as CuPy's or Numba's, or by its array
    API namespace.
    """
    t = type(x)
    if t in kinds:
        return kinds[t]
    table, package, origin = table_of(t), package_of(x), _core.FROM_FOREIGN + len(KINDS)
    if origin > LAST or (table is None and package not in ("cupy", "numba")):
        origin = kind_of_namespace(x)
    elif table is not None:

        def give(part: Part) -> object:
            if isinstance(part, _core.Array):
                return _core.table_give(table, part.__dlpack__(max_version=(1, 3), stream=NO_SYNC))
            return _core.table_give(table, part.__dlpack__(max_version=(1, 3)))

        KINDS.append(Kind(t.__qualname__, give, sparse_out))
        _core.table_known(table, origin)
        _core.read_by_table(t, origin, False)
    elif package == "cupy":
        library = sys.modules[package]
        KINDS.append(Kind("cupy.ndarray", lambda part: library.from_dlpack(part), sparse_out))
    else:
        library = sys.modules[package]
        KINDS.append(Kind("Numba's device array", lambda part: library.cuda.as_cuda_array(part), sparse_out))
    kinds[t] = origin
    return origin


# Called by the core


def export_dense(origin: int, part: _core._Exporter) -> object:
    return KINDS[origin - _core.FROM_FOREIGN].dense(part)


def export_device(origin: int, part: _core.Array) -> object:
    """A sum on a CUDA device as what went in; fanin's own array, which any library reads by DLPack, where its library
    does not take it.
    """
    try:
        return KINDS[origin - _core.FROM_FOREIGN].dense(part)
    except Exception:  # any error of a library: the sum must not be lost
        return part


def export_sparse(
    origin: int, format: str, shape: Shape, indices: Part, pointers: Part | None, values: Part, coalesced: bool
) -> object:
    out = KINDS[origin - _core.FROM_FOREIGN].sparse if origin >= _core.FROM_FOREIGN else sparse_out
    try:
        return out(format, shape, indices, pointers, values, coalesced)
    except Exception:
        if not isinstance(values, _core.Array):
            raise
        return sparse_out(format, shape, indices, pointers, values, coalesced)  # as export_device


# ---- Import: a gradient of any library as a record.


def describe(x: object, recording: bool, has_combine: bool, ready: _core.Stream | None = None) -> Description:
    """Describe the gradient x as a record.

    The core recognizes exact ndarrays, numbers, NumPy's scalars and its own arrays itself
    (`csrc/py/arrays/facts.h`), and calls this for all else: `known` finds the library.

    `recording`: everything is an object (A1). `has_combine`: containers are objects, too. `ready`: the stream on which
    the caller made x.
    """
    try:
        if recording and is_plain(x):
            return Object(None if type(x) in SCALARS or isinstance(x, np.generic) else (x,))
        return (None if recording else known(x, ready)) or object_of(x, has_combine)
    except Refusal as e:
        return e.as_record()


def known(x: object, ready: _core.Stream | None = None) -> Dense | SparseArray | None:
    """The record of an array of a known class; None for an object."""
    if isinstance(x, np.ndarray):
        return None if x.dtype == np.object_ or overrides(x) else Dense(_core.FROM_NDARRAY, x, x.view(np.ndarray))
    if isinstance(x, Sparse):
        return sparse_of(x, ready)
    if is_torch(x):
        return torch_of(x, ready)
    if is_jax(x):
        if not hasattr(type(x), "__dlpack__"):
            refuse(_core.DTypeError, f"{named(x)} of dtype {x.dtype} has no sum; expected numbers")
        if x.is_deleted():
            refuse(BufferError, "the jax.Array has been deleted; expected one that still has its memory")
        return Dense(JAX, x, capsule_of(x, READ_ONLY, ready))
    if is_scipy(x):
        return scipy_of(x)
    if isinstance(x, CONTAINERS) or has_parts(x) or is_subclass_of_known(x):
        return None
    if exports(x):
        return Dense(kind_of_library(x), x, capsule_of(x, WRITABLE_IF_FLAGGED, ready))
    if streams.raw_addresses and hasattr(type(x), INTERFACE):
        return Dense(kind_of_library(x), x, address_of(x, ready))
    try:
        view = memoryview(x)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None
    return Dense(_core.FROM_NDARRAY, x, np.asarray(view))


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


def sparse_of(x: Sparse, ready: _core.Stream | None) -> SparseArray:
    *indices, values = x.parts
    pointers, plain = (None, indices[0]) if x.format == "coo" else (indices[0], indices[1])
    return SparseArray(
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
    by_address, by_dlpack = hasattr(type(x), INTERFACE), hasattr(type(x), "__dlpack_device__")
    if is_subclass_of_known(x):
        return Object(None)
    if by_address:
        refuse(
            TypeError,
            f"{named(x)} gives its memory by {INTERFACE} alone, an address that cannot be checked. To accept"
            " it, call fanin.set_options(raw_addresses=True)",
        )
    if by_dlpack and not is_host(device_of(cast(Exporter, x))[0]):
        refuse(TypeError, f"{named(x)} is an object on a device whose memory is unknown: implement __fanin_parts__()")
    return Object(None)


def object_text(x: object) -> str | None:
    """What an object is that sums by its own + (A8), for messages; None of an array."""
    if is_plain(x) or isinstance(x, _core.Array):
        return None
    if is_torch(x):
        return f"{named(x)} without memory of its own"
    is_subclass = isinstance(x, np.ndarray) or is_subclass_of_known(x)
    if exports(x) and not is_subclass:
        return None
    if not isinstance(describe(x, False, True), Object):
        return None
    return f"{named(x)}, which sums by its own +: give np.asarray(x)"


# ---- Sums by operators: of objects, and in a pass that records itself (A1, A8).


def combine(function: Callable[[object, object], object] | None, old: object, new: object) -> Conformed | Refused:
    """The sum of two of which one is an object, or of two arrays in a pass that records itself."""
    try:
        return Conformed(combined(function, old, new))
    except Refusal as e:
        return e.as_record()


def weigh(value: object, weight: complex, divide: bool) -> Conformed | Refused:
    """An object, or an array in a pass that records itself, times a weight, or over the divisor of a mean (W7)."""
    try:
        return Conformed(weighed(value, weight, divide))
    except Refusal as e:
        return e.as_record()


def weighed(value: Any, weight: complex, divide: bool) -> object:
    if isinstance(value, Sparse):
        refuse(
            TypeError,
            f"{named(value)}: a pass that records itself multiplies by the arrays' own *, and a fanin.Sparse has none:"
            " expected dense gradients, or sparse ones of SciPy's or torch's (W7)",
        )
    result: object = operator.truediv(value, weight) if divide else operator.mul(value, weight)
    if result is None:
        refuse(TypeError, f"{named(value)} {'/' if divide else '*'} {weight!r} is None; expected the product (W7)")
    return result


def combined(function: Callable[[object, object], object] | None, old: object, new: object) -> object:
    result: object
    if is_plain(old) and is_plain(new):
        shapes = tuple(getattr(old, "shape", ())), tuple(getattr(new, "shape", ()))
        if shapes[0] != shapes[1]:
            refuse(ValueError, f"expected a gradient of shape {shapes[0]} as those before, got {shapes[1]} (A9)")
        if isinstance(old, Sparse) or isinstance(new, Sparse):
            refuse(
                TypeError,
                f"{named(old)} and {named(new)}: a pass that records itself sums by the arrays' own +, and a"
                " fanin.Sparse has none: expected dense gradients, or sparse ones of SciPy's or torch's (A1)",
            )
        result = operator.add(new, old) if is_sparse(old) and not is_sparse(new) else operator.add(old, new)
    elif function is not None:
        result = function(old, new)
    else:
        check_shapes(old, new)
        result = plus(new, old) if is_sparse(old) else plus(old, new)
    if result is None:
        by = "combine" if function is not None else "+"
        refuse(TypeError, f"the sum of {named(old)} and {named(new)} by {by} is None; expected the sum")
    return result


def check_shapes(old: object, new: object) -> None:
    """Refuse two objects whose shapes differ: their `+` may broadcast, and the sum then is of another shape."""
    if is_plain(old) or is_plain(new):
        return
    before, now = shape_of(old), shape_of(new)
    if before is not None and now is not None and before != now:
        refuse(
            ValueError, f"expected a gradient of shape {before} as those before, got {named(new)} of shape {now} (A9)"
        )


def plus(first: object, second: object) -> object:
    """first + second. The object's own operator is called where the other is a plain array, which would else broadcast
    over it.
    """
    result: object = NotImplemented
    if is_plain(second):
        if (method := getattr(type(first), "__add__", None)) is not None:
            result = method(first, second)
    elif is_plain(first):
        if (method := getattr(type(second), "__radd__", None)) is not None:
            result = method(second, first)
    else:
        result = operator.add(first, second)
    if result is NotImplemented:
        refuse(
            TypeError,
            f"{named(first)} and {named(second)} have no sum: neither class adds the other; give combine=, as"
            " Slot(combine=f)",
        )
    return result


def conform(x: object, shape: Shape | None, dtype: str | None) -> Conformed | Refused:
    """A9, A10 in a pass that records itself: x summed to the declared shape and cast to the declared dtype, by its own
    operators.
    """
    if x is None:
        return Conformed(x)
    if not (is_plain(x) or isinstance(x, Zero)):
        return conform_object(x, shape)
    array = cast(Computed, np.asarray(x) if type(x) in SCALARS else x)
    try:
        if shape is not None:
            array = summed_to(array, shape)
        if dtype is not None:
            has = None if isinstance(array, Zero | Sparse) else _core.dtype_name(array.dtype)
            if has not in (None, dtype):
                if not _core.can_cast(array.dtype, dtype):
                    refuse(ValueError, f"expected dtype {dtype}, got {has}; convert it yourself (A10)")
                array = cast(Computed, convert(array, dtype)) if is_torch(array) else array.astype(dtype)
    except Refusal as e:
        return e.as_record()
    return Conformed(array)


def shape_of(x: object) -> Shape | None:
    """The shape of an object with a `+` of its own; None if it has none, or one that is no tuple of integers."""
    try:
        shape = getattr(x, "shape", None)
    except Exception:  # as of torch's nested tensors
        return None
    if isinstance(shape, tuple) and all(map(is_index, shape)):
        return shape
    return None


def conform_object(x: object, shape: Shape | None) -> Conformed | Refused:
    """A9 of an object that has a shape: summed to the declared one by its own `sum`. Objects without a shape pass."""
    has = shape_of(x)
    if shape is None or has is None or has == shape:
        return Conformed(x)
    try:
        axes = axes_to(has, shape)
        if not callable(getattr(x, "sum", None)):
            refuse(
                ValueError, f"expected a gradient of shape {shape}, got {named(x)} of shape {has} without sum() (A9)"
            )
        total = cast(Any, x).sum(axes)
        if shape_of(total) != shape and hasattr(total, "reshape"):
            total = total.reshape(shape)
        if shape_of(total) != shape:
            refuse(
                ValueError,
                f"expected a gradient of shape {shape}, got {named(x)} of shape {has}, whose sum({axes}) has shape"
                f" {shape_of(total)} (A9)",
            )
    except Refusal as e:
        return e.as_record()
    return Conformed(total)


def axes_to(has: Shape, shape: Shape) -> tuple[int, ...]:
    """The axes over which an array of shape `has` is summed to `shape`; refused where `shape` does not broadcast."""
    lead = len(has) - len(shape)
    if lead < 0 or any(n not in (1, has[lead + i]) for i, n in enumerate(shape)):
        wanted = f"a gradient of shape {shape} (or of a shape that is broadcast from it)"
        refuse(ValueError, f"expected {wanted}, got {has} (A9)")
    return tuple(i for i in range(len(has)) if i < lead or shape[i - lead] != has[i])


def summed_to(x: Computed, shape: Shape) -> Computed:
    """A9."""
    has = tuple(x.shape)
    if has == shape:
        return x
    axes = axes_to(has, shape)
    if isinstance(x, Zero):
        return cast(Computed, Zero(shape, x.dtype))
    if is_sparse(x):
        refuse(
            ValueError, f"expected a gradient of shape {shape}, got a sparse one of shape {has}; sum it yourself (A9)"
        )
    return x.sum(axes, dtype=x.dtype).reshape(shape)


# ---- How long the memory of a gradient lives: until the streams that used it have passed (docs/rules.md, Lifetime).


def memory_of(x: object) -> object:
    """An object that keeps the memory of x alive without x itself; None if none is known."""
    package = package_of(x)
    if package == "cupy":
        return x.data.mem  # type: ignore[attr-defined]  # as all of CuPy's arrays have it
    if package == "numba":
        return x.gpu_data  # type: ignore[attr-defined]
    export = getattr(x, "__dlpack__", None)
    if not hasattr(type(x), "__dlpack__") or export is None:
        return None
    before = sys.getrefcount(x)
    capsule = export(stream=NO_SYNC)
    return capsule if sys.getrefcount(x) == before else None


def leaving(x: object, index: int, streams: list[_core.Stream]) -> None:
    """Protect the memory of x, which these streams used, when x returns to the caller: it may be reused only after
    them. torch's allocator gets torch's own streams; for others a second reference to the memory is kept until x is
    gone.
    """
    if isinstance(x, Sparse) or has_parts(x):
        for part in x.parts if isinstance(x, Sparse) else type(x).__fanin_parts__(x):
            if not isinstance(part, np.ndarray | _core.Array):
                leaving(part, index, streams)
        return
    owners: list[object]
    if is_torch(x):
        others = [s for s in streams if not torch_keeps(s)]
        for tensor in strided_parts(x):
            for s in streams:
                if s not in others:
                    tensor.record_stream(torch_stream(s))
        owners, streams = [t.detach() for t in strided_parts(x)] if others else [], others
    else:
        owners = [owner for owner in [memory_of(x)] if owner is not None]
    if owners:
        weakref.finalize(x, list, [_core.hold_for(owner, streams) for owner in owners]).atexit = False


__all__ = [
    "allocator_on",
    "combine",
    "conform",
    "describe",
    "export_dense",
    "export_device",
    "export_sparse",
    "is_bare",
    "leaving",
    "library_stream",
    "wrote",
]
