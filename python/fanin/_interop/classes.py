"""The library of an object, and whether it is an array. A caller cannot pass objects of a library that is not imported,
so no library is imported here.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, SupportsIndex, TypeGuard

import numpy as np

from .. import _core
from ..slots import Slot, Sparse, Zero
from .protocols import Exporter, HasParts, JaxArray, NDArray, ScipySparse, Tensor

__tracebackhide__ = True  # no frames of ours in reports of pytest

# ---- The exchange tables of types: functions in C that give and take arrays without a call of Python's.

TABLE = "__dlpack_c_exchange_api__"

tables: weakref.WeakKeyDictionary[type, object] = weakref.WeakKeyDictionary()


def table_of(t: type) -> object:
    """The exchange table of a type; None without a known one. Its functions order nothing: the caller orders the
    streams.
    """
    if t not in tables:
        table = getattr(t, TABLE, None)
        tables[t] = table if table is not None and _core.table_known(table, -1) else None
    return tables[t]


# ---- Numbers of the kinds of arrays that the core cannot read itself, in the order of `export.KINDS`.

TORCH, JAX, SCIPY_ARRAY, SCIPY_MATRIX, TORCH_PARTS = range(_core.FROM_FOREIGN, _core.FROM_FOREIGN + 5)
LAST = 255  # an origin is a byte


SCALARS = (bool, int, float, complex)
CONTAINERS = (list, tuple, dict, str, bytes, bytearray, set, frozenset)


def named(x: object) -> str:
    """The class of x, for messages: "a torch.Tensor"."""
    t = type(x)
    name = t.__qualname__ if t.__module__ == "builtins" else f"{t.__module__.partition('.')[0]}.{t.__qualname__}"
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def package_of(x: object) -> str:
    """The library that the class of x is of."""
    return type(x).__module__.partition(".")[0]


def is_index(x: object) -> TypeGuard[SupportsIndex]:
    """An integer, and no bool."""
    return type(x) is not bool and hasattr(type(x), "__index__")


def overrides(x: NDArray) -> bool:
    """Does this ndarray have a `+` of its own meaning?"""
    t = type(x)
    return isinstance(x, np.ma.MaskedArray | np.matrix) or t.__array_ufunc__ is not np.ndarray.__array_ufunc__


def attribute(module: str, *names: str) -> Any:
    """attribute("torch", "nn", "Parameter"): that attribute of an imported library, or None.

    A module is in `sys.modules` before its names are in the module: another thread may import it at this moment. Then
    the attribute is None, as where the library is not imported: no caller has an object of it.
    """
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found


def is_torch(x: object) -> TypeGuard[Tensor]:
    """A torch.Tensor or Parameter exactly; subclasses are objects."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return type(x) is getattr(torch, "Tensor", None) or type(x) is attribute("torch", "nn", "Parameter")


def is_tensor(x: object) -> TypeGuard[Any]:
    """A torch.Tensor of any class."""
    tensor = attribute("torch", "Tensor")
    return tensor is not None and isinstance(x, tensor)


def has_memory(x: Tensor) -> bool:
    """Of a torch.Tensor: not meta, nested, functional or wrapped by a transform."""
    torch = sys.modules["torch"]
    known: bool = x.is_nested or x.device.type == "meta" or torch._is_functional_tensor(x)
    return not known and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_jax(x: object) -> TypeGuard[JaxArray]:
    """A jax.Array with a value: no tracer."""
    array = attribute("jax", "Array")
    return array is not None and isinstance(x, array) and not isinstance(x, attribute("jax", "core", "Tracer") or ())


def is_scipy(x: object) -> TypeGuard[ScipySparse]:
    issparse = attribute("scipy.sparse", "issparse")
    return issparse is not None and bool(issparse(x))


def is_plain(x: object) -> bool:
    """Whether it is an array or number of a known class, whose `+` is the ordinary one."""
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


def is_summed(x: NDArray | np.generic) -> bool:
    """Does the core sum the dtype of this ndarray or NumPy scalar? Where not, it is an object (Slot(combine=))."""
    try:
        return _core.dtype_name(x.dtype) is not None
    except ValueError:
        return False


def is_sparse(x: object) -> bool:
    return isinstance(x, Sparse) or is_scipy(x) or (is_torch(x) and str(x.layout) != "torch.strided")


def is_bare(x: object) -> bool:
    """One array, where a sequence of them was expected?"""
    return isinstance(x, np.ndarray | np.generic | Slot | Sparse | Zero | _core.Array | memoryview) or (
        type(x) in SCALARS or is_scipy(x) or exports(x)
    )


def is_subclass_of_known(x: object) -> bool:
    """Whether it is of a subclass of a known library's class (fake tensors, tracers), which cannot be read."""
    return is_tensor(x) or isinstance(x, attribute("jax", "Array") or ())


def exports(x: object) -> TypeGuard[Exporter]:
    """Whether it offers its memory by DLPack."""
    return hasattr(type(x), "__dlpack__")


def has_parts(x: object) -> TypeGuard[HasParts]:
    """Whether it is a user's object that lists its memory."""
    return hasattr(type(x), "__fanin_parts__")
