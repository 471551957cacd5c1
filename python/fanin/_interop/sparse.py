"""Sparse sums on their way out, as `fanin.Sparse`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from .. import _core
from ..slots import Sparse
from .classes import SCIPY_ARRAY, SCIPY_MATRIX, named, overrides
from .protocols import NDArray, ScipySparse, Shape
from .records import Refusal, SparseArray, refuse

__tracebackhide__ = True  # no frames of ours in reports of pytest

Part = _core._Exporter | _core.Array  # an array of the core's on its way out, of the host or of a device
SparseOut = Callable[[str, Shape, Part, Part | None, Part, bool], object]
"""Of (format, shape, indices, pointers, values, coalesced)."""


def ndarray_of(part: Part) -> NDArray | _core.Array:
    """A part of a sparse sum: an ndarray, or the array of a device as it is."""
    return part.numpy() if isinstance(part, _core._Exporter) else part


def sparse_out(
    format: str, shape: Shape, indices: Part, pointers: Part | None, values: Part, coalesced: bool
) -> Sparse:
    parts = (indices, values) if pointers is None else (pointers, indices, values)
    return Sparse(format, tuple(ndarray_of(p) for p in parts), shape)


# ---- SciPy's sparse arrays and matrices, in and out.

SCIPY_PARTS = {"coo": ("data",), "dia": ("data", "offsets"), "lil": ("data", "rows")} | dict.fromkeys(
    ("csr", "csc", "bsr"), ("data", "indices", "indptr")
)


def part_of(x: ScipySparse, name: str) -> NDArray:
    """A part of one of SciPy's sparse arrays, which may have been replaced, as an ndarray."""
    part = getattr(x, name, None)
    if not isinstance(part, np.ndarray) or overrides(part):
        what = "None" if part is None else named(part)
        refuse(TypeError, f"{named(x)} has {what} as its {name}; expected an ndarray")
    return part


def check_whole(x: ScipySparse) -> None:
    """Check the parts that SciPy's conversions of "dia" and "lil" read unchecked: ValueError instead of a crash."""
    if x.format == "dia":
        data, offsets = part_of(x, "data"), part_of(x, "offsets")
        most = 2**31 - 1 - max(x.shape)
        if data.ndim != 2 or offsets.shape != data.shape[:1] or offsets.dtype.kind not in "iu":
            refuse(
                ValueError,
                f"{named(x)} has data of shape {data.shape} and offsets of shape {offsets.shape}, {offsets.dtype}",
            )
        if offsets.size and (int(offsets.max()) > most or int(offsets.min()) < -most):
            refuse(ValueError, f"{named(x)} has offsets beyond its shape {x.shape}")
    elif x.format == "lil":
        data, rows = part_of(x, "data"), part_of(x, "rows")
        lists = data.dtype == rows.dtype == np.object_ and data.shape == rows.shape == x.shape[:1]
        if not lists or any(
            type(r) is not list or type(d) is not list or len(r) != len(d) for r, d in zip(rows, data, strict=True)
        ):
            refuse(ValueError, f"{named(x)} has rows and data that are no lists of one length for each row")


def scipy_of(x: ScipySparse) -> SparseArray:
    """SciPy's sparse arrays and matrices; the formats that only build or slice go through COO."""
    try:
        return stored(x)
    except (Refusal, MemoryError):
        raise
    except Exception as e:  # any error of SciPy about inconsistent parts
        kind = TypeError if isinstance(e, TypeError | AttributeError) else ValueError
        refuse(kind, f"{named(x)} cannot be read, its parts do not belong together: {type(e).__name__}: {e}")


def stored(x: ScipySparse) -> SparseArray:
    origin = SCIPY_MATRIX if type(x).__name__.endswith("_matrix") else SCIPY_ARRAY
    given = x
    for name in SCIPY_PARTS.get(x.format, ()):
        part_of(x, name)
    check_whole(x)
    if x.format not in ("coo", "csr", "csc", "bsr") or (x.format != "coo" and len(x.shape) != 2):
        x = x.tocoo()
    values = part_of(x, "data")
    if x.format == "coo":
        coords = x.coords if hasattr(x, "coords") else (part_of(x, "row"), part_of(x, "col"))
        axes = [np.asarray(c) for c in coords]
        for index in axes:
            if index.dtype.kind not in "iu" and index.size:
                refuse(TypeError, f"{named(x)} has indices of dtype {index.dtype}; expected integers")
        indices = np.stack([index.astype(np.int64, casting="unsafe", copy=False) for index in axes])
        return SparseArray(origin, given, "coo", tuple(x.shape), indices, None, values, False)
    indices, pointers = part_of(x, "indices"), part_of(x, "indptr")
    return SparseArray(origin, given, x.format, tuple(x.shape), indices, pointers, values, False)


SCIPY_DTYPES = "?bBhHiIlLqQfdFD"  # the dtypes that both SciPy and fanin sum: no float16, no low floats


def scipy_out(family: str) -> SparseOut:
    """How a sparse sum becomes one of SciPy's arrays, or one of its matrices."""

    def out(format: str, shape: Shape, indices: Part, pointers: Part | None, values: Part, coalesced: bool) -> object:
        make = getattr(sys.modules["scipy.sparse"], f"{format}_{family}", None)
        index, data = indices.numpy(), values.numpy()
        if make is None or data.dtype.char not in SCIPY_DTYPES:
            return sparse_out(format, shape, indices, pointers, values, coalesced)
        if pointers is not None:
            return make((data, index, pointers.numpy()), shape=shape)
        made = make((data, tuple(index)), shape=shape)
        made.has_canonical_format = coalesced
        return made

    return out
