"""Sparse sums on their way out, as `fanin.Sparse`."""

from __future__ import annotations

from collections.abc import Callable

from .. import _core
from ..slots import Sparse
from .protocols import NDArray, Shape

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
