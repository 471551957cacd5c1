"""The geometry and the bytes of several arrays, recorded to compare later ones with (csrc/py/analysis/analysis.c)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, final

from .. import _core

__tracebackhide__ = True  # no frames of ours in reports of pytest

Difference = Literal[
    "dtype", "device", "shape", "strides", "read-only", "writable", "apart", "offset", "overlap"
]  # fmt: skip


@final
class Layout:
    """The geometry of several arrays: dtypes, shapes, strides, and which share memory where.

    It keeps numbers, not arrays. Strides along axes of extent 1 are not compared.

    Attributes
    ----------
    components : tuple of int
        For each array the number of its component, by first members; an array that shares no memory has its own.
    offsets : tuple of int
        For each array the bytes from the first byte of its component to its element [0, 0, ..].
    """

    __slots__ = ("_layout", "components", "offsets")

    def __init__(self, arrays: Iterable[object], /, *, budget: float | None = None) -> None:
        self._layout, self.components, self.offsets = _core.layout(arrays, budget)

    def __len__(self) -> int:
        return len(self.components)

    def check(self, arrays: Iterable[object], /) -> tuple[int, Difference, int | None] | None:
        """None if the arrays lie as the recorded ones; else the first difference as (index, what, other index or None).

        "apart": shares no memory any more with its component, in which `other` is. "offset": at another place relative
        to `other`. "overlap": shares memory with `other`, and did not. ValueError for another number of arrays.
        """
        return _core.layout_check(self._layout, arrays)


@final
class Snapshot:
    """A copy of the bytes of several arrays on the host, to compare with later and to restore.

    It holds the arrays and assumes that their memory stays in place; a caller who moves an array's memory must not
    compare it.
    """

    __slots__ = ("_arrays", "_bytes")

    def __init__(self, arrays: Iterable[object], /) -> None:
        self._bytes, self._arrays = _core.snapshot(arrays)

    def changed(self, which: Sequence[int] | None, /) -> list[int]:
        """The positions, among `which` (None: all), of arrays with a changed byte; the memory must still exist."""
        return _core.snapshot_changed(self._bytes, which)

    def elsewhere(self) -> list[int]:
        """The positions of arrays that are now at another place, or have another shape, strides or dtype."""
        return _core.snapshot_elsewhere(self._bytes, self._arrays)

    def restore(self, i: int, data: int | None = None, /) -> None:
        """Write back the bytes of array i that differ, at their old place, or for an array of the same geometry whose
        first element is at `data`.
        """
        _core.snapshot_restore(self._bytes, i, data)

    def data(self, i: int, /) -> int:
        """Where the first element of array i was."""
        return _core.snapshot_data(self._bytes, i)
