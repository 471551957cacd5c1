"""Sparse arrays as their parts, which a simulated device can hold."""

from __future__ import annotations

import numpy as np

from .._interop.classes import is_scipy
from ..slots import Sparse


def sparse_parts(value: object) -> tuple[str, tuple[object, ...], tuple[int, ...]] | None:
    """(format, parts, shape) of a `fanin.Sparse` or of a SciPy sparse array; None for anything else."""
    if isinstance(value, Sparse):
        return value.format, value.parts, value.shape
    if not is_scipy(value):
        return None
    kind, shape = value.format, value.shape
    if kind == "coo":
        coords = getattr(value, "coords", None) or (getattr(value, "row", None), getattr(value, "col", None))
        return kind, (np.stack([np.asarray(c, np.int64) for c in coords]), getattr(value, "data", None)), shape
    if kind in ("csr", "csc", "bsr"):
        return kind, tuple(getattr(value, name) for name in ("indptr", "indices", "data")), shape
    raise TypeError(f"Machine.array: SciPy's {kind!r} has no parts for a device: pass x.tocoo() or x.tocsr()")
