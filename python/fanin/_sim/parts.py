"""Sparse arrays as their parts, which a simulated device can hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..slots import Sparse


def sparse_parts(value: Any) -> tuple[str, tuple[Any, ...], tuple[int, ...]] | None:
    """(format, parts, shape) of a `fanin.Sparse` or of a SciPy sparse array; None for anything else."""
    if isinstance(value, Sparse):
        return value.format, value.parts, value.shape
    if not type(value).__module__.startswith("scipy.sparse"):
        return None
    kind, shape = value.format, value.shape
    if kind == "coo":
        coords = getattr(value, "coords", None) or (value.row, value.col)
        return kind, (np.stack([np.asarray(c, np.int64) for c in coords]), value.data), shape
    if kind in ("csr", "csc", "bsr"):
        return kind, (value.indptr, value.indices, value.data), shape
    raise TypeError(
        f"Machine.array: SciPy's {kind!r} has no parts that a device could hold: say x.tocoo() or x.tocsr()"
    )
