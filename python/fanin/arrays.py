"""The one way in and out for what the C core does not know by itself: torch, JAX, SciPy, DLPack, objects of the user's own.

In: `describe` says what a gradient is, in a tuple that the core takes apart:

    ("dense", origin, object, source)                    source: an ndarray, an array of fanin's devices, or
                                                         (capsule, device type, may it be written) for DLPack
    ("sparse", origin, object, format, shape, indices, pointers or None, values, coalesced)     the parts are sources
    ("object", parts)                                    what sums by `combine` or its own + (A8); parts: the memory it says it holds
    ("refuse", exception class, text)                    the core adds for which buffer, slot and key

Out: `origin` numbers the kinds below, and a sum comes back as the kind of its first contribution (D15).

No library is imported here: what the caller has not imported cannot be what the caller gives.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import numpy as np

from . import _core
from .slots import Slot, Sparse, Zero

Described = tuple[Any, ...]
Shape = tuple[int, ...]

CPU, CUDA_HOST = 1, 3  # DLPack's device types whose memory the host reads
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
    return type(x) is getattr(torch, "Tensor", None) or type(x) is getattr(getattr(torch, "nn", None), "Parameter", None)


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
        return not x.dtype.hasobject and not overrides(x)
    if is_torch(x):
        return has_memory(x)
    return type(x) in SCALARS or isinstance(x, np.generic | Sparse) or is_jax(x) or is_scipy(x)


def is_sparse(x: Any) -> bool:
    return isinstance(x, Sparse) or is_scipy(x) or (is_torch(x) and str(x.layout) != "torch.strided")


def is_bare(x: Any) -> bool:
    """One array, where a sequence of them was expected?"""
    return isinstance(x, np.ndarray | np.generic | Slot | Sparse | Zero | _core.Array | memoryview) or (
        type(x) in SCALARS or is_scipy(x) or hasattr(type(x), "__dlpack__")
    )


# ---------------------------------------------------------------- in


def describe(x: Any, recording: bool, has_combine: bool) -> Described:
    """What the gradient x is. `recording`: everything is an object (A1). `has_combine`: containers are objects, too."""
    try:
        if recording and is_plain(x):
            return ("object", None if type(x) in SCALARS or isinstance(x, np.generic) else (x,))
        return (None if recording else known(x)) or object_of(x, has_combine)
    except Refusal as e:
        return ("refuse", e.kind, str(e))


def known(x: Any) -> Described | None:
    """The arrays we know; None for an object."""
    if isinstance(x, np.ndarray):
        return None if x.dtype == np.object_ or overrides(x) else ("dense", _core.FROM_NDARRAY, x, x.view(np.ndarray))
    if isinstance(x, Sparse):
        return sparse_of(x)
    if is_torch(x):
        return torch_of(x)
    if is_jax(x):
        if x.is_deleted():
            refuse(BufferError, "the jax.Array has been deleted; expected one that still has its memory")
        return ("dense", JAX, x, capsule_of(x, NEVER))
    if is_scipy(x):
        return scipy_of(x)
    if isinstance(x, CONTAINERS) or hasattr(type(x), "__fanin_parts__") or is_subclass_of_known(x):
        return None
    if hasattr(type(x), "__dlpack__"):
        return ("dense", kind_of_namespace(x), x, capsule_of(x, AS_IT_SAYS))
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
            refuse(TypeError, f"{named(x)} is no array, and its + would not mean a sum; give the slot a combine: Slot(combine=f)")
        if not hasattr(type(x), "__add__") and not hasattr(type(x), "__radd__"):
            refuse(TypeError, f"{named(x)} is no array and has no +; expected an array, a number, or a slot with Slot(combine=f)")
    parts = getattr(type(x), "__fanin_parts__", None)
    if parts is not None:
        return ("object", parts(x))
    ask = getattr(type(x), "__dlpack_device__", None)
    if ask is not None and not is_subclass_of_known(x) and device_of(x)[0] not in (CPU, CUDA_HOST):
        refuse(TypeError, f"{named(x)} is an object on a device, and what memory it holds is not known; give it __fanin_parts__()")
    return ("object", None)


def device_of(x: Any) -> tuple[int, int]:
    """What `__dlpack_device__` says, as two ints."""
    said = x.__dlpack_device__()
    try:
        kind, index = said
        return operator.index(kind), operator.index(index)
    except (TypeError, ValueError):
        refuse(TypeError, f"{named(x)}: __dlpack_device__() gave {said!r:.80}; expected (device type, device id)")


DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI", 18: "Trainium"}


def capsule_of(x: Any, writes: int) -> Described:
    """x by DLPack: its device is asked first, then its memory."""
    kind = -1
    if hasattr(type(x), "__dlpack_device__"):
        kind, index = device_of(x)
        if kind not in (CPU, CUDA_HOST):
            where = f"{DEVICES[kind]} device {index}" if kind in DEVICES else f"device ({kind}, {index})"
            refuse(BufferError, f"{named(x)} is on {where}; expected host memory")
    try:
        capsule = x.__dlpack__(max_version=(1, 3))
    except TypeError as e:
        # Older producers do not know the keyword. A TypeError from within is theirs.
        if e.__traceback__ is not None and e.__traceback__.tb_next is not None:
            raise
        capsule = x.__dlpack__()
    return (capsule, kind, writes)


def source_of(x: Any) -> Any:
    """The memory of one dense array: a part of a sparse one."""
    if isinstance(x, np.ndarray):
        if overrides(x):
            refuse(TypeError, f"{named(x)} overrides NumPy's operators; expected plain arrays as the parts of a Sparse")
        return x
    if isinstance(x, _core.Array):
        return x
    described = None if isinstance(x, Sparse) else known(x)
    if described is None or described[0] != "dense":
        refuse(TypeError, f"{named(x)} is no dense array; expected arrays as the parts of a Sparse")
    return described[3]


def sparse_of(x: Sparse) -> Described:
    *indices, values = x.parts
    pointers, plain = (None, indices[0]) if x.format == "coo" else (indices[0], indices[1])
    origin = TORCH_PARTS if is_torch(values) else _core.FROM_SPARSE
    return (
        "sparse",
        origin,
        x,
        x.format,
        x.shape,
        source_of(plain),
        None if pointers is None else source_of(pointers),
        source_of(values),
        False,
    )


def scipy_of(x: Any) -> Described:
    """SciPy's sparse arrays and matrices; the formats that only build or slice go through COO."""
    origin = SCIPY_MATRIX if type(x).__name__.endswith("_matrix") else SCIPY_ARRAY
    whole = x
    if x.format not in ("coo", "csr", "csc", "bsr") or (x.format != "coo" and len(x.shape) != 2):
        x = x.tocoo()
    if x.format == "coo":
        coords = x.coords if hasattr(x, "coords") else (x.row, x.col)
        indices = np.stack([np.asarray(c, np.int64) for c in coords])
        return ("sparse", origin, whole, "coo", tuple(x.shape), indices, None, np.asarray(x.data), False)
    return ("sparse", origin, whole, x.format, tuple(x.shape), x.indices, x.indptr, x.data, False)


@functools.cache
def quicken() -> None:
    """Tensors are read through torch's exchange table where it has one: torch 2.10 and later."""
    torch: Any = sys.modules["torch"]
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is not None:
        _core.quick_tensors(torch.Tensor, table, torch.Tensor.is_neg, torch._C.TensorBase.requires_grad, TORCH)


def torch_of(x: Any) -> Described | None:
    """A tensor whose memory does not hold its value is never read as if it did."""
    quicken()
    if not has_memory(x):
        return None
    if x.is_quantized:
        refuse(TypeError, "a quantized torch.Tensor has no sum; expected x.dequantize()")
    if x.device.type != "cpu":
        refuse(BufferError, f"the torch.Tensor is on {x.device}; expected host memory")
    x = x.detach() if x.requires_grad else x
    layout = str(x.layout).removeprefix("torch.")
    if layout == "strided":
        return ("dense", TORCH, x, torch_source(x))
    if layout == "sparse_coo":
        return ("sparse", TORCH, x, "coo", tuple(x.shape), torch_source(x._indices()), None, torch_source(x._values()), x.is_coalesced())
    format = layout.removeprefix("sparse_")
    if format not in ("csr", "csc", "bsr", "bsc"):
        refuse(BufferError, f"the torch.Tensor has layout {layout}; expected strided or sparse")
    rows = format in ("csr", "bsr")
    if x.values().ndim != (3 if format in ("bsr", "bsc") else 1):
        refuse(BufferError, f"the torch.Tensor is a batch of {format} matrices or has dense axes; expected one matrix")
    pointers = x.crow_indices() if rows else x.ccol_indices()
    indices = x.col_indices() if rows else x.row_indices()
    sources = [torch_source(t) for t in (indices, pointers, x.values())]
    return ("sparse", TORCH, x, format, tuple(x.shape), *sources, False)


def torch_source(x: Any) -> Described:
    """The memory of a strided CPU tensor, or of a copy where its memory is not its value: then it is not written."""
    torch: Any = sys.modules["torch"]
    writes = ALWAYS
    if x._is_zerotensor():
        x, writes = torch.zeros(x.shape, dtype=x.dtype), NEVER
    elif x.is_conj() or x.is_neg():
        x, writes = x.resolve_conj().resolve_neg(), NEVER
    return (torch.utils.dlpack.to_dlpack(x.detach()), -1, writes)


def buffer_of(x: Any) -> Described | None:
    """What exports its memory by Python's buffer protocol, as array.array and memoryview do: an ndarray comes back."""
    try:
        view = memoryview(x)
    except TypeError:
        return None
    return ("dense", _core.FROM_NDARRAY, x, np.asarray(view))


# ---------------------------------------------------------------- out


@dataclass(frozen=True)
class Kind:
    """How sums come back as what went in."""

    name: str
    dense: Callable[[_core._Exporter], Any]
    sparse: Callable[[str, Shape, Any, Any, Any, bool], Any]


def ndarray_of(part: Any) -> Any:
    """A part of a sparse sum: an ndarray, or the array of a device as it is."""
    return part.numpy() if isinstance(part, _core._Exporter) else part


def sparse_out(format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Sparse:
    parts = (indices, values) if pointers is None else (pointers, indices, values)
    return Sparse(format, tuple(ndarray_of(p) for p in parts), shape)


def torch_out(part: _core._Exporter) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.utils.dlpack.from_dlpack(part.__dlpack__())


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


def jax_out(part: _core._Exporter) -> Any:
    jax: Any = sys.modules["jax"]
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

namespaces: dict[str, int] = {}  # array API namespaces seen, by name: their origins


def kind_of_namespace(x: Any) -> int:
    """The origin of arrays of a library we do not know, which says itself how to make them (the array API standard); else NumPy's."""
    ask = getattr(type(x), "__array_namespace__", None)
    space = ask(x) if ask is not None else None
    name, make = getattr(space, "__name__", None), getattr(space, "from_dlpack", None)
    if not isinstance(name, str) or make is None:
        return _core.FROM_NDARRAY
    if name not in namespaces:
        if _core.FROM_FOREIGN + len(KINDS) > LAST:
            return _core.FROM_NDARRAY
        namespaces[name] = _core.FROM_FOREIGN + len(KINDS)
        KINDS.append(Kind(name, make, no_sparse))
    return namespaces[name]


def export_dense(origin: int, part: _core._Exporter) -> Any:
    return KINDS[origin - _core.FROM_FOREIGN].dense(part)


def export_sparse(origin: int, format: str, shape: Shape, indices: Any, pointers: Any, values: Any, coalesced: bool) -> Any:
    out = KINDS[origin - _core.FROM_FOREIGN].sparse if origin >= _core.FROM_FOREIGN else sparse_out
    return out(format, shape, indices, pointers, values, coalesced)


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
    """first + second. The object's own operator is called where the other is a plain array, which would else broadcast over it."""
    if is_plain(second):
        result = operate(first, "__add__", second)
    elif is_plain(first):
        result = operate(second, "__radd__", first)
    else:
        return first + second
    if result is NotImplemented:
        raise TypeError(f"{named(first)} and {named(second)} have no sum: neither knows the other; give the slot a combine")
    return result


def operate(x: Any, name: str, other: Any) -> Any:
    method = getattr(type(x), name, None)
    return NotImplemented if method is None else method(x, other)


def conform(x: Any, shape: Shape | None, dtype: str | None) -> tuple[str, Any]:
    """A9, A10 in a pass that records itself: x summed to the declared shape and cast to the declared dtype, by its own operators."""
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
            return ("refuse", f"expected a gradient of shape {shape}, got a sparse one of shape {has}; sum it yourself (A9)")
        axes = tuple(i for i in range(len(has)) if i < lead or shape[i - lead] != has[i])
        x = x.sum(axes, dtype=x.dtype).reshape(shape)
    if dtype is not None and not isinstance(x, Zero | Sparse) and _core.dtype_name(x.dtype) != dtype:
        if not _core.can_cast(x.dtype, dtype):
            return ("refuse", f"expected dtype {dtype}, got {_core.dtype_name(x.dtype)}; convert it yourself (A10)")
        x = x.to(getattr(sys.modules["torch"], dtype)) if is_torch(x) else x.astype(dtype)
    return ("is", x)
