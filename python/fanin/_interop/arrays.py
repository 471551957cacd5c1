"""The one way in and out for what the C core does not know by itself: torch, JAX, SciPy, DLPack, objects of the user's
own.

In: `describe` says what a gradient is, in a tuple that the core takes apart:

    ("dense", origin, object, source)                    source: an ndarray, an array of fanin's devices,
                                                         (capsule, device type, its number, may it be written) for
                                                         DLPack, or (address, dtype, shape, strides or None, may it be
                                                         written, CUDA device)
    ("sparse", origin, object, format, shape, indices, pointers or None, values, coalesced)     the parts are sources
    ("object", parts)                                    what sums by `combine` or its own + (A8); parts: the memory it
    says it holds ("refuse", exception class, text)                    the core adds for which buffer, slot and key

Out: `origin` numbers the kinds below, and a sum comes back as the kind of its first contribution (D15).

No library is imported here: what the caller has not imported cannot be what the caller gives.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from .. import _core
from ..slots import Slot, Sparse, Zero

Described = tuple[Any, ...]
Shape = tuple[int, ...]

CPU, CUDA_HOST = 1, 3  # DLPack's device types whose memory the host reads
CUDA, CUDA_MANAGED = 2, 13  # and those that a CUDA device reads
NO_SYNC, LEGACY = -1, 1  # streams as integers, in __dlpack__(stream=)
TABLE = "__dlpack_c_exchange_api__"
INTERFACE = "__cuda_array_interface__"

raw_addresses = False  # may addresses be believed that nothing can check (fanin.set_options)?
AS_IT_SAYS, NEVER, ALWAYS = 0, 1, 2  # may the memory be written?

SCALARS = (bool, int, float, complex)
CONTAINERS = (list, tuple, dict, str, bytes, bytearray, set, frozenset)


class Refusal(Exception):
    """Why something is no gradient: the class of the exception, and its text."""

    def __init__(self, kind: type[Exception], text: str) -> None:
        super().__init__(text)
        self.kind = kind


def refuse(kind: type[Exception], text: str) -> Never:
    raise Refusal(kind, text)


def named(x: Any) -> str:
    """The class of x, for messages: "a torch.Tensor"."""
    t = type(x)
    name = t.__qualname__ if t.__module__ == "builtins" else f"{t.__module__.partition('.')[0]}.{t.__qualname__}"
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


# ---------------------------------------------------------------- what is it?


def overrides(x: Any) -> bool:
    """Does this ndarray have a `+` of its own meaning?"""
    t = type(x)
    return isinstance(x, np.ma.MaskedArray | np.matrix) or t.__array_ufunc__ is not np.ndarray.__array_ufunc__


def is_torch(x: Any) -> bool:
    """A torch.Tensor or Parameter exactly; subclasses are objects."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return type(x) is getattr(torch, "Tensor", None) or type(x) is getattr(
        getattr(torch, "nn", None), "Parameter", None
    )


def has_memory(x: Any) -> bool:
    """Of a torch.Tensor: not meta, nested, functional or wrapped by a transform."""
    torch: Any = sys.modules["torch"]
    known: bool = x.is_nested or x.device.type == "meta" or torch._is_functional_tensor(x)
    return not known and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_jax(x: Any) -> bool:
    """A jax.Array with a value: no tracer."""
    jax = sys.modules.get("jax")
    array, core = getattr(jax, "Array", None), getattr(jax, "core", None)
    return array is not None and isinstance(x, array) and not isinstance(x, getattr(core, "Tracer", ()))


def is_scipy(x: Any) -> bool:
    scipy = sys.modules.get("scipy.sparse")
    return scipy is not None and bool(scipy.issparse(x))


def is_plain(x: Any) -> bool:
    """An array or a number that we know, so that its `+` is what it seems."""
    if isinstance(x, np.ndarray):
        return not x.dtype.hasobject and not overrides(x) and is_summed(x)
    if is_torch(x):
        return has_memory(x)
    return (
        type(x) in SCALARS
        or (isinstance(x, np.generic) and is_summed(x))
        or isinstance(x, Sparse)
        or is_jax(x)
        or is_scipy(x)
    )


def is_summed(x: Any) -> bool:
    """Does the core sum the dtype of this ndarray or NumPy scalar? Where not, it is an object (Slot(combine=))."""
    try:
        return _core.dtype_name(x.dtype) is not None
    except ValueError:
        return False


def is_sparse(x: Any) -> bool:
    return isinstance(x, Sparse) or is_scipy(x) or (is_torch(x) and str(x.layout) != "torch.strided")


def is_bare(x: Any) -> bool:
    """One array, where a sequence of them was expected?"""
    return isinstance(x, np.ndarray | np.generic | Slot | Sparse | Zero | _core.Array | memoryview) or (
        type(x) in SCALARS or is_scipy(x) or hasattr(type(x), "__dlpack__")
    )


# ---------------------------------------------------------------- in


def describe(x: Any, recording: bool, has_combine: bool, ready: _core.Stream | None = None) -> Described:
    """What the gradient x is. `recording`: everything is an object (A1). `has_combine`: containers are objects, too.
    `ready`: the stream on which the caller says that x is ready.
    """
    try:
        if recording and is_plain(x):
            return ("object", None if type(x) in SCALARS or isinstance(x, np.generic) else (x,))
        return (None if recording else known(x, ready)) or object_of(x, has_combine)
    except Refusal as e:
        return ("refuse", e.kind, str(e))


def known(x: Any, ready: _core.Stream | None = None) -> Described | None:
    """The arrays we know; None for an object."""
    if isinstance(x, np.ndarray):
        return None if x.dtype == np.object_ or overrides(x) else ("dense", _core.FROM_NDARRAY, x, x.view(np.ndarray))
    if isinstance(x, Sparse):
        return sparse_of(x, ready)
    if is_torch(x):
        return torch_of(x, ready)
    if is_jax(x):
        if not hasattr(type(x), "__dlpack__"):
            refuse(TypeError, f"{named(x)} of dtype {x.dtype} has no sum; expected numbers")
        if x.is_deleted():
            refuse(BufferError, "the jax.Array has been deleted; expected one that still has its memory")
        return ("dense", JAX, x, capsule_of(x, NEVER, ready))
    if is_scipy(x):
        return scipy_of(x)
    if isinstance(x, CONTAINERS) or hasattr(type(x), "__fanin_parts__") or is_subclass_of_known(x):
        return None
    if hasattr(type(x), "__dlpack__"):
        return ("dense", kind_of_library(x), x, capsule_of(x, AS_IT_SAYS, ready))
    if raw_addresses and hasattr(type(x), INTERFACE):
        return ("dense", kind_of_library(x), x, interface_of(x, ready))
    return buffer_of(x)


def is_subclass_of_known(x: Any) -> bool:
    """Fake tensors, tracers and the like: of a known library's class, and not what we can read."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    classes = (getattr(torch, "Tensor", None), getattr(jax, "Array", None))
    return any(c is not None and isinstance(x, c) for c in classes)


def object_of(x: Any, has_combine: bool) -> Described:
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
    parts = getattr(type(x), "__fanin_parts__", None)
    if parts is not None:
        return ("object", parts(x))
    if hasattr(type(x), INTERFACE) and not is_subclass_of_known(x):
        refuse(
            TypeError,
            f"{named(x)} tells where its memory lies by {INTERFACE} alone: an address that nothing can check. Where its"
            " library is to be believed, say fanin.set_options(raw_addresses=True)",
        )
    ask = getattr(type(x), "__dlpack_device__", None)
    if ask is not None and not is_subclass_of_known(x) and device_of(x)[0] not in (CPU, CUDA_HOST):
        refuse(
            TypeError,
            f"{named(x)} is an object on a device, and what memory it holds is not known; give it __fanin_parts__()",
        )
    return ("object", None)


def device_of(x: Any) -> tuple[int, int]:
    """What `__dlpack_device__` says, as two ints."""
    said = x.__dlpack_device__()
    try:
        kind, index = said
        return operator.index(kind), operator.index(index)
    except (TypeError, ValueError):
        refuse(TypeError, f"{named(x)}: __dlpack_device__() gave {said!r:.80}; expected (device type, device id)")


DEVICES = {
    2: "CUDA",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    10: "ROCm",
    13: "CUDA managed",
    14: "oneAPI",
    18: "Trainium",
}


def capsule_of(x: Any, writes: int, ready: _core.Stream | None = None) -> Described:
    """x by DLPack: its device is asked first, then its memory."""
    kind, index = -1, 0
    how: dict[str, Any] = {}
    if hasattr(type(x), "__dlpack_device__"):
        kind, index = device_of(x)
        if kind in (CUDA, CUDA_MANAGED):
            handle = ready_on(x, index, ready)
            table = table_of(type(x))
            if table is not None:
                return (_core.table_take(table, x), kind, index, writes)
            how["stream"] = handle
        elif kind not in (CPU, CUDA_HOST):
            where = f"{DEVICES[kind]} device {index}" if kind in DEVICES else f"device ({kind}, {index})"
            refuse(BufferError, f"{named(x)} is on {where}; expected memory of the host or of a CUDA device")
    try:
        capsule = x.__dlpack__(max_version=(1, 3), **how)
    except TypeError as e:
        # Older producers do not know the keyword. A TypeError from within is theirs.
        if e.__traceback__ is not None and e.__traceback__.tb_next is not None:
            raise
        capsule = x.__dlpack__(**how)
    return (capsule, kind, index if kind in (CUDA, CUDA_MANAGED) else 0, writes)


# ---------------------------------------------------------------- streams of the libraries that own arrays (S4)

tables: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()


def table_of(t: type) -> Any:
    """The exchange table of a type, None where it has none that we know. Its functions order nothing: who reads sees to
    that.
    """
    if t not in tables:
        table = getattr(t, TABLE, None)
        tables[t] = table if table is not None and _core.table_known(table, -1) else None
    return tables[t]


def library_stream(x: Any, index: int) -> int | None:
    """The handle of the current stream, on a CUDA device, of the library that owns x; None where it tells none."""
    if isinstance(x, Sparse):
        x = x.parts[-1]
    table = table_of(type(x))
    if table is not None:
        return _core.table_stream(table, index)
    package = type(x).__module__.partition(".")[0]
    if is_torch(x) or package == "cupy":
        library: Any = sys.modules["torch" if is_torch(x) else "cupy"]
        if package == "cupy":
            with library.cuda.Device(index):
                return int(library.cuda.get_current_stream().ptr)
        return int(library.cuda.current_stream(index).cuda_stream)
    if hasattr(type(x), INTERFACE) and not hasattr(type(x), "__dlpack__"):
        try:
            return fields_of(x).stream
        except Refusal as e:  # the core asks, too
            raise e.kind(str(e)) from None
    return None


def device_here(x: Any, index: int) -> str:
    """The name of a CUDA device that is there; BufferError where it is not."""
    name = f"cuda:{index}"
    try:
        if not 0 <= index < 4096:
            raise ValueError("no machine has so many")
        _core.stream_pushed(name)
    except (ValueError, RuntimeError) as e:
        refuse(BufferError, f"{named(x)} is on CUDA device {index}, which cannot be used: {e}")
    return name


def ready_on(x: Any, index: int, ready: _core.Stream | None) -> int:
    """The stream on which x is to be ready, as DLPack has it: 1 or a handle; -1 where it is ready on another device's
    stream.
    """
    name = device_here(x, index)
    if ready is None:
        ready = _core.stream_pushed(name)
    if ready is not None:
        return ready.handle if ready.device == name else NO_SYNC
    return library_stream(x, index) or LEGACY


def wait_for(x: Any, index: int, ready: _core.Stream | None, other: int | None) -> None:
    """Where x is to be ready, what was queued on the stream `other` of its device is waited for."""
    name = device_here(x, index)
    ready = ready or _core.stream_pushed(name)
    if ready is not None and other is not None:
        ready.wait(_core.Stream(name, other))


# ---------------------------------------------------------------- __cuda_array_interface__


@dataclass(frozen=True)
class Fields:
    """What an array says by `__cuda_array_interface__`, checked as far as it can be."""

    address: int
    read_only: bool
    dtype: np.dtype[Any]
    shape: Shape
    strides: Shape | None  # in bytes
    stream: int | None


def whole(x: Any, what: str, value: Any, least: int) -> int:
    """An exact integer of an interface, from `least` on, that fits 64 bits."""
    if type(value) is bool or not hasattr(type(value), "__index__"):
        refuse(TypeError, f"{named(x)}: {INTERFACE} has {what} {value!r:.80}; expected an integer")
    n = operator.index(value)
    if not least <= n < 2**64:
        refuse(ValueError, f"{named(x)}: {INTERFACE} has {what} {n}; expected {least} or more, in 64 bits")
    return n


def fields_of(x: Any) -> Fields:
    """`x.__cuda_array_interface__`, version 3 and those before, which lack fields. TypeError, ValueError,
    BufferError.
    """
    said = getattr(x, INTERFACE)
    who = f"{named(x)}: {INTERFACE}"
    if not isinstance(said, dict) or not {"shape", "typestr", "data", "version"} <= said.keys():
        refuse(TypeError, f"{who} is {said!r:.80}; expected a dict with shape, typestr, data and version")
    if said.get("mask") is not None:
        refuse(BufferError, f"{who} has a mask, which would be lost; expected an array without one")
    data, shape, strides, stream = said["data"], said["shape"], said.get("strides"), said.get("stream")
    if not isinstance(data, tuple) or len(data) != 2:
        refuse(TypeError, f"{who} has data {data!r:.80}; expected (address, read-only)")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple | None):
        refuse(TypeError, f"{who} has shape {shape!r:.80} and strides {strides!r:.80}; expected tuples of integers")
    if strides is not None and len(strides) != len(shape):
        refuse(ValueError, f"{who} has {len(shape)} axes and {len(strides)} strides")
    if stream is not None and whole(x, "stream", stream, -(2**63)) <= 0:
        refuse(
            ValueError,
            f"{who} has stream {stream}; expected None, 1 (legacy default), 2 (per-thread default) or a handle",
        )
    dtype = None
    if isinstance(said["typestr"], str):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # what np.dtype says of words that name none
            dtype = np.dtype(said["typestr"])
    if dtype is None:
        refuse(TypeError, f"{who} has typestr {said['typestr']!r:.80}; expected one like '<f4'")
    if not dtype.isnative:
        refuse(BufferError, f"{who} has typestr {said['typestr']!r:.80} of foreign byte order; convert it first")
    if dtype.char in "gG":
        refuse(BufferError, f"{who} has typestr {said['typestr']!r:.80}, a {dtype.type.__name__}, which is not summed")
    return Fields(
        whole(x, "address", data[0] or 0, 0),
        bool(data[1]),
        dtype,
        tuple(whole(x, "extent", n, 0) for n in shape),
        None if strides is None else tuple(whole(x, "stride", n, -(2**63)) for n in strides),
        None if stream is None else operator.index(stream),
    )


def interface_of(x: Any, ready: _core.Stream | None) -> Described:
    """x by its raw address: the driver says whose memory that is, and the stream that x names is waited for."""
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
    return (f.address, f.dtype, f.shape, f.strides, not f.read_only, index)


def source_of(x: Any, ready: _core.Stream | None = None) -> Any:
    """The memory of one dense array: a part of a sparse one."""
    if isinstance(x, np.ndarray):
        if overrides(x):
            refuse(TypeError, f"{named(x)} overrides NumPy's operators; expected plain arrays as the parts of a Sparse")
        return x
    if isinstance(x, _core.Array):
        return x
    described = None if isinstance(x, Sparse) else known(x, ready)
    if described is None or described[0] != "dense":
        refuse(TypeError, f"{named(x)} is no dense array; expected arrays as the parts of a Sparse")
    return described[3]


def sparse_of(x: Sparse, ready: _core.Stream | None) -> Described:
    *indices, values = x.parts
    pointers, plain = (None, indices[0]) if x.format == "coo" else (indices[0], indices[1])
    origin = TORCH_PARTS if is_torch(values) else _core.FROM_SPARSE
    return (
        "sparse",
        origin,
        x,
        x.format,
        x.shape,
        source_of(plain, ready),
        None if pointers is None else source_of(pointers, ready),
        source_of(values, ready),
        False,
    )


SCIPY_PARTS = {"coo": ("data",), "dia": ("data", "offsets"), "lil": ("data", "rows")} | dict.fromkeys(
    ("csr", "csc", "bsr"), ("data", "indices", "indptr")
)


def scipy_part(x: Any, name: str) -> Any:
    """A part of one of SciPy's sparse arrays, which anybody may have replaced: an ndarray."""
    part = getattr(x, name, None)
    if not isinstance(part, np.ndarray) or overrides(part):
        what = "None" if part is None else named(part)
        refuse(TypeError, f"{named(x)} has {what} as its {name}; expected an ndarray")
    return part


def scipy_index(x: Any, part: Any) -> Any:
    """The indices of a COO array along one axis, as int64."""
    index = np.asarray(part)
    if index.dtype.kind not in "iu" and index.size:
        refuse(TypeError, f"{named(x)} has indices of dtype {index.dtype}; expected integers")
    return index.astype(np.int64, casting="unsafe", copy=False)


def scipy_whole(x: Any) -> None:
    """What SciPy's own conversions of "dia" and "lil" read without a look: ValueError where it would end in a crash."""
    if x.format == "dia":
        data, offsets = x.data, x.offsets
        most = 2**31 - 1 - max(x.shape)
        if data.ndim != 2 or offsets.shape != data.shape[:1] or offsets.dtype.kind not in "iu":
            refuse(
                ValueError,
                f"{named(x)} has data of shape {data.shape} and offsets of shape {offsets.shape}, {offsets.dtype}",
            )
        if offsets.size and (int(offsets.max()) > most or int(offsets.min()) < -most):
            refuse(ValueError, f"{named(x)} has offsets beyond its shape {x.shape}")
    elif x.format == "lil":
        data, rows = x.data, x.rows
        lists = data.dtype == rows.dtype == np.object_ and data.shape == rows.shape == x.shape[:1]
        if not lists or any(
            type(r) is not list or type(d) is not list or len(r) != len(d) for r, d in zip(rows, data, strict=True)
        ):
            refuse(ValueError, f"{named(x)} has rows and data that are no lists of one length for each row")


def scipy_of(x: Any) -> Described:
    """SciPy's sparse arrays and matrices; the formats that only build or slice go through COO."""
    try:
        return scipy_described(x)
    except (Refusal, MemoryError):
        raise
    except Exception as e:  # whatever SciPy says of parts that do not belong together
        kind = TypeError if isinstance(e, TypeError | AttributeError) else ValueError
        refuse(kind, f"{named(x)} cannot be read, its parts do not belong together: {type(e).__name__}: {e}")


def scipy_described(x: Any) -> Described:
    origin = SCIPY_MATRIX if type(x).__name__.endswith("_matrix") else SCIPY_ARRAY
    whole = x
    for name in SCIPY_PARTS.get(x.format, ()):
        scipy_part(x, name)
    scipy_whole(x)
    if x.format not in ("coo", "csr", "csc", "bsr") or (x.format != "coo" and len(x.shape) != 2):
        x = x.tocoo()
    values = scipy_part(x, "data")
    if x.format == "coo":
        coords = x.coords if hasattr(x, "coords") else (x.row, x.col)
        indices = np.stack([scipy_index(x, c) for c in coords])
        return ("sparse", origin, whole, "coo", tuple(x.shape), indices, None, values, False)
    indices, pointers = scipy_part(x, "indices"), scipy_part(x, "indptr")
    return ("sparse", origin, whole, x.format, tuple(x.shape), indices, pointers, values, False)


@functools.cache
def quicken() -> None:
    """Tensors are read through torch's exchange table where it has one: torch 2.10 and later."""
    torch: Any = sys.modules["torch"]
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is not None:
        _core.quick_tensors(torch.Tensor, table, torch.Tensor.is_neg, torch._C.TensorBase.requires_grad, TORCH)
        _core.table_known(table, TORCH)


def torch_of(x: Any, ready: _core.Stream | None = None) -> Described | None:
    """A tensor whose memory does not hold its value is never read as if it did."""
    quicken()
    if not has_memory(x):
        return None
    if x.is_quantized:
        refuse(BufferError, "a quantized torch.Tensor has no sum; expected x.dequantize()")
    if x.device.type not in ("cpu", "cuda"):
        refuse(BufferError, f"the torch.Tensor is on {x.device}; expected memory of the host or of a CUDA device")
    x = x.detach() if x.requires_grad else x
    layout = str(x.layout).removeprefix("torch.")
    if layout == "strided":
        return ("dense", TORCH, x, torch_source(x, ready))
    if layout == "sparse_coo":
        return (
            "sparse",
            TORCH,
            x,
            "coo",
            tuple(x.shape),
            torch_source(x._indices(), ready),
            None,
            torch_source(x._values(), ready),
            x.is_coalesced(),
        )
    format = layout.removeprefix("sparse_")
    if format not in ("csr", "csc", "bsr", "bsc"):
        refuse(BufferError, f"the torch.Tensor has layout {layout}; expected strided or sparse")
    rows = format in ("csr", "bsr")
    if x.values().ndim != (3 if format in ("bsr", "bsc") else 1):
        refuse(BufferError, f"the torch.Tensor is a batch of {format} matrices or has dense axes; expected one matrix")
    pointers = x.crow_indices() if rows else x.ccol_indices()
    indices = x.col_indices() if rows else x.row_indices()
    sources = [torch_source(t, ready) for t in (indices, pointers, x.values())]
    return ("sparse", TORCH, x, format, tuple(x.shape), *sources, False)


def torch_source(x: Any, ready: _core.Stream | None = None) -> Described:
    """The memory of a strided tensor, or of a copy where its memory is not its value: then it is not written. On a CUDA
    device such a copy is torch's work, on torch's current stream; nothing else is waited for: a gradient is ready where
    its giver says.
    """
    torch: Any = sys.modules["torch"]
    writes = ALWAYS
    if x._is_zerotensor():
        x, writes = torch.zeros(x.shape, dtype=x.dtype, device=x.device), NEVER
    elif x.is_conj() or x.is_neg():
        x, writes = x.resolve_conj().resolve_neg(), NEVER
    if x.device.type == "cpu":
        if x.numel():
            last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            if x.untyped_storage().nbytes() < (last + 1) * x.element_size():
                refuse(BufferError, f"the storage of the torch.Tensor was resized: it ends before element {last}")
        return (torch.utils.dlpack.to_dlpack(x.detach()), -1, 0, writes)
    index = x.device.index
    wait_for(x, index, ready, library_stream(x, index) if writes == NEVER else None)
    table = table_of(type(x))
    capsule = torch.utils.dlpack.to_dlpack(x.detach()) if table is None else _core.table_take(table, x.detach())
    return (capsule, CUDA, index, writes)


def buffer_of(x: Any) -> Described | None:
    """What exports its memory by Python's buffer protocol, as array.array and memoryview do: an ndarray comes back."""
    try:
        view = memoryview(x)
    except TypeError:
        return None
    return ("dense", _core.FROM_NDARRAY, x, np.asarray(view))


# ---------------------------------------------------------------- out


Part = _core._Exporter | _core.Array  # an array of the core's on its way out, of the host or of a device


@dataclass(frozen=True)
class Kind:
    """How sums come back as what went in."""

    name: str
    dense: Callable[[Part], Any]
    sparse: Callable[[str, Shape, Any, Any, Any, bool], Any]


def ndarray_of(part: Any) -> Any:
    """A part of a sparse sum: an ndarray, or the array of a device as it is."""
    return part.numpy() if isinstance(part, _core._Exporter) else part


def sparse_out(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Sparse:
    parts = (indices, values) if pointers is None else (pointers, indices, values)
    return Sparse(format, tuple(ndarray_of(p) for p in parts), shape)


def torch_out(part: Part) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.utils.dlpack.from_dlpack(offered(part))


def offered(part: Part) -> Any:
    """A capsule over a sum. On a device nothing waits: `take` has seen to it that the consumer's stream does. Of what
    must not be written, as the indices that a gradient came with may be, the host gets a copy: torch's tensors can be
    written.
    """
    if isinstance(part, _core.Array):
        return part.__dlpack__(stream=NO_SYNC)
    try:
        return part.__dlpack__()
    except BufferError:
        return part.__dlpack__(copy=True)


def torch_sparse_out(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Any:
    torch: Any = sys.modules["torch"]
    if format == "coo":
        made = torch.sparse_coo_tensor(torch_out(indices), torch_out(values), shape, check_invariants=False)
        return made._coalesced_(True) if coalesced else made
    layout = getattr(torch, f"sparse_{format}")
    parts = (torch_out(pointers), torch_out(indices), torch_out(values))
    return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=False)


def torch_parts_out(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Sparse:
    parts = (indices, values) if pointers is None else (pointers, indices, values)
    return Sparse(format, tuple(torch_out(p) for p in parts), shape)


def jax_out(part: Part) -> Any:
    jax: Any = sys.modules["jax"]
    if isinstance(part, _core.Array):
        return jax.dlpack.from_dlpack(part)
    values = part.numpy()
    made = jax.numpy.asarray(values)
    if made.dtype == values.dtype:
        return made
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        return jax.numpy.asarray(values)  # a sum with NumPy's doubles: JAX would make floats of it


def no_sparse(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Any:
    return sparse_out(format, shape, indices, pointers, values, coalesced)


SCIPY_DTYPES = "?bBhHiIlLqQfdFD"  # what SciPy has of what is summed: no float16, no low floats


def scipy_out(family: str) -> Callable[[str, Shape, Any, Any, Any, bool], Any]:
    def out(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Any:
        make = getattr(sys.modules["scipy.sparse"], f"{format}_{family}", None)
        index, data = indices.numpy(), values.numpy()
        if make is None or data.dtype.char not in SCIPY_DTYPES:
            return sparse_out(format, shape, indices, pointers, values, coalesced)
        if format != "coo":
            return make((data, index, pointers.numpy()), shape=shape)
        made = make((data, tuple(index)), shape=shape)
        made.has_canonical_format = coalesced
        return made

    return out


KINDS = [
    Kind("torch.Tensor", torch_out, torch_sparse_out),
    Kind("jax.Array", jax_out, no_sparse),
    Kind("SciPy's sparse array", ndarray_of, scipy_out("array")),
    Kind("SciPy's sparse matrix", ndarray_of, scipy_out("matrix")),
    Kind("fanin.Sparse of torch.Tensor", torch_out, torch_parts_out),
]
TORCH, JAX, SCIPY_ARRAY, SCIPY_MATRIX, TORCH_PARTS = range(_core.FROM_FOREIGN, _core.FROM_FOREIGN + 5)
LAST = 255  # an origin is a byte

#: Array API namespaces seen, by id, with themselves (two libraries may have one name), and by an array's type and the
#: name, for libraries that make a new object each time: origins.
namespaces: dict[Any, tuple[Any, int]] = {}


def kind_of_namespace(x: Any) -> int:
    """The origin of arrays of a library we do not know, which says itself how to make them (the array API standard);
    else NumPy's.
    """
    ask = getattr(type(x), "__array_namespace__", None)
    space = ask(x) if ask is not None else None
    name, make = getattr(space, "__name__", None), getattr(space, "from_dlpack", None)
    if not isinstance(name, str) or make is None:
        return _core.FROM_NDARRAY
    by_type = (type(x), name)
    known = namespaces.get(id(space)) or namespaces.get(by_type)
    if known is None:
        if _core.FROM_FOREIGN + len(KINDS) > LAST:
            return _core.FROM_NDARRAY
        known = namespaces[id(space)] = namespaces[by_type] = (space, _core.FROM_FOREIGN + len(KINDS))
        KINDS.append(Kind(name, make, no_sparse))
    return known[1]


kinds: weakref.WeakKeyDictionary[type, int] = (
    weakref.WeakKeyDictionary()
)  # types with a table, or of CuPy and Numba: their origins


def kind_of_library(x: Any) -> int:
    """The origin of an array that offers itself: by its type's exchange table, as CuPy's or Numba's, or by its array
    API namespace.
    """
    t = type(x)
    if t not in kinds:
        kinds[t] = new_kind(x)
    return kinds[t]


def new_kind(x: Any) -> int:
    t = type(x)
    table = table_of(t)
    package = t.__module__.partition(".")[0]
    library: Any = sys.modules.get(package)
    origin = _core.FROM_FOREIGN + len(KINDS)
    if origin > LAST or (table is None and package not in ("cupy", "numba")):
        return kind_of_namespace(x)
    if table is not None:
        KINDS.append(Kind(t.__qualname__, functools.partial(given_by, table), no_sparse))
        _core.table_known(table, origin)
    elif package == "cupy":
        KINDS.append(Kind("cupy.ndarray", lambda part: library.from_dlpack(part), no_sparse))
    else:
        KINDS.append(Kind("Numba's device array", lambda part: library.cuda.as_cuda_array(part), no_sparse))
    return origin


def given_by(table: Any, part: Part) -> Any:
    """A sum as an array of the library that an exchange table is of."""
    how: Any = {"stream": NO_SYNC} if isinstance(part, _core.Array) else {}
    return _core.table_give(table, part.__dlpack__(max_version=(1, 3), **how))


def export_device(origin: int, part: _core.Array) -> Any:
    """A sum on a CUDA device as what went in; fanin's own array, which any library reads by DLPack, where its library
    does not take it.
    """
    try:
        return KINDS[origin - _core.FROM_FOREIGN].dense(part)
    except Exception:  # whatever a library says: the sum must not be lost
        return part


def memory_of(x: Any) -> Any:
    """What keeps the memory of x alive, and not x itself; None where nothing is known that does."""
    package = type(x).__module__.partition(".")[0]
    if package == "cupy":
        return x.data.mem
    if package == "numba":
        return x.gpu_data
    if not hasattr(type(x), "__dlpack__"):
        return None
    before = sys.getrefcount(x)
    capsule = x.__dlpack__(stream=NO_SYNC)
    return capsule if sys.getrefcount(x) == before else None


def leaving(x: Any, index: int, streams: list[_core.Stream]) -> None:
    """x, which was used on these streams, leaves us: its memory may be used again only when they have passed
    (docs/rules.md, Lifetime). torch's allocator is told; of other libraries' memory a second hold is kept, which goes
    when x does.
    """
    if isinstance(x, Sparse):
        for part in x.parts:
            if not isinstance(part, np.ndarray | _core.Array):
                leaving(part, index, streams)
        return
    parts = getattr(type(x), "__fanin_parts__", None)
    if parts is not None:
        for part in parts(x):
            if not isinstance(part, np.ndarray | _core.Array):
                leaving(part, index, streams)
        return
    if is_torch(x):
        for tensor in dense_parts(x):
            for s in streams:
                tensor.record_stream(torch_stream(s))
        return
    owner = memory_of(x)
    if owner is not None:
        weakref.finalize(x, list, [_core.hold_for(owner, streams)]).atexit = False


def dense_parts(x: Any) -> list[Any]:
    """The strided tensors of a torch tensor."""
    layout = str(x.layout).removeprefix("torch.")
    if layout == "strided":
        return [x]
    if layout == "sparse_coo":
        return [x._indices(), x._values()]
    rows = layout in ("sparse_csr", "sparse_bsr")
    return [x.crow_indices(), x.col_indices(), x.values()] if rows else [x.ccol_indices(), x.row_indices(), x.values()]


def torch_stream(s: _core.Stream) -> Any:
    """torch's stream of a handle. Its legacy default has a number of its own in torch."""
    torch: Any = sys.modules["torch"]
    device = int(s.device.rpartition(":")[2])
    return (
        torch.cuda.default_stream(device) if s.handle == LEGACY else torch.cuda.ExternalStream(s.handle, device=device)
    )


def export_dense(origin: int, part: _core._Exporter) -> Any:
    return KINDS[origin - _core.FROM_FOREIGN].dense(part)


def export_sparse(
    origin: int, format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool
) -> Any:
    out = KINDS[origin - _core.FROM_FOREIGN].sparse if origin >= _core.FROM_FOREIGN else sparse_out
    try:
        return out(format, shape, indices, pointers, values, coalesced)
    except Exception:
        if not isinstance(values, _core.Array):
            raise
        return sparse_out(format, shape, indices, pointers, values, coalesced)  # as export_device


def wrote(x: Any) -> None:
    """The core wrote into x (`out=`): torch counts writes, so that a backward pass that needs the old value says so."""
    if is_torch(x):
        torch: Any = sys.modules["torch"]
        torch.autograd.graph.increment_version(x)


# ---------------------------------------------------------------- sums by operators (A1, A8)


def combine(function: Callable[[Any, Any], Any] | None, old: Any, new: Any) -> Any:
    """The sum of two of which one is an object, or of two arrays in a pass that records itself."""
    if is_plain(old) and is_plain(new):
        shapes = tuple(getattr(old, "shape", ())), tuple(getattr(new, "shape", ()))
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected a gradient of shape {shapes[0]} as those before, got {shapes[1]} (A9)")
        result = new + old if is_sparse(old) and not is_sparse(new) else old + new
    elif function is not None:
        result = function(old, new)
    else:
        result = plus(new, old) if is_sparse(old) else plus(old, new)
    if result is None:
        by = "combine" if function is not None else "+"
        raise TypeError(f"the sum of {named(old)} and {named(new)} by {by} is None; expected the sum")
    return result


def plus(first: Any, second: Any) -> Any:
    """first + second. The object's own operator is called where the other is a plain array, which would else broadcast
    over it.
    """
    if is_plain(second):
        result = operate(first, "__add__", second)
    elif is_plain(first):
        result = operate(second, "__radd__", first)
    else:
        return first + second
    if result is NotImplemented:
        raise TypeError(
            f"{named(first)} and {named(second)} have no sum: neither knows the other; give combine=, as"
            " Slot(combine=f)"
        )
    return result


def operate(x: Any, name: str, other: Any) -> Any:
    method = getattr(type(x), name, None)
    return NotImplemented if method is None else method(x, other)


def conform(x: Any, shape: Shape | None, dtype: str | None) -> tuple[str, Any]:
    """A9, A10 in a pass that records itself: x summed to the declared shape and cast to the declared dtype, by its own
    operators.
    """
    if x is None or not (is_plain(x) or isinstance(x, Zero)):
        return ("is", x)
    if type(x) in SCALARS:
        x = np.asarray(x)
    has = tuple(x.shape)
    if shape is not None and has != shape:
        lead = len(has) - len(shape)
        if lead < 0 or any(n not in (1, has[lead + i]) for i, n in enumerate(shape)):
            return ("refuse", f"expected a gradient of shape {shape} (or one that it broadcasts to), got {has} (A9)")
        if isinstance(x, Zero):
            return ("is", Zero(shape, x.dtype))
        if is_sparse(x):
            return (
                "refuse",
                f"expected a gradient of shape {shape}, got a sparse one of shape {has}; sum it yourself (A9)",
            )
        axes = tuple(i for i in range(len(has)) if i < lead or shape[i - lead] != has[i])
        x = x.sum(axes, dtype=x.dtype).reshape(shape)
    if dtype is not None and not isinstance(x, Zero | Sparse) and _core.dtype_name(x.dtype) != dtype:
        if not _core.can_cast(x.dtype, dtype):
            return ("refuse", f"expected dtype {dtype}, got {_core.dtype_name(x.dtype)}; convert it yourself (A10)")
        x = x.to(getattr(sys.modules["torch"], dtype)) if is_torch(x) else x.astype(dtype)
    return ("is", x)
