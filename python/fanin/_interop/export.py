"""Out: sums as what went in (D15). An origin numbers a kind of `KINDS`."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .. import _core
from .classes import package_of
from .origins import LAST
from .protocols import Shape
from .scipy import scipy_out
from .sparse import Part, SparseOut, ndarray_of, sparse_out
from .streams import NO_SYNC
from .tables import table_of
from .torch import torch_out, torch_parts_out, torch_sparse_out


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
    if t not in kinds:
        kinds[t] = new_kind(x)
    return kinds[t]


def new_kind(x: object) -> int:
    table, package = table_of(type(x)), package_of(x)
    origin = _core.FROM_FOREIGN + len(KINDS)
    if origin > LAST or (table is None and package not in ("cupy", "numba")):
        return kind_of_namespace(x)
    if table is not None:
        KINDS.append(Kind(type(x).__qualname__, functools.partial(given_by, table), sparse_out))
        _core.table_known(table, origin)
        _core.read_by_table(type(x), origin, False)
        return origin
    library = sys.modules[package]
    if package == "cupy":
        KINDS.append(Kind("cupy.ndarray", lambda part: library.from_dlpack(part), sparse_out))
    else:
        KINDS.append(Kind("Numba's device array", lambda part: library.cuda.as_cuda_array(part), sparse_out))
    return origin


def given_by(table: object, part: Part) -> object:
    """A sum as an array of the library that an exchange table is of."""
    if isinstance(part, _core.Array):
        return _core.table_give(table, part.__dlpack__(max_version=(1, 3), stream=NO_SYNC))
    return _core.table_give(table, part.__dlpack__(max_version=(1, 3)))


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
