"""Which of some arrays share memory with another one: exactly, or as PyTorch answers it, and why the two answers
differ.

PyTorch (2.13) compares two views of one storage by a list of rules, the first that applies decides. They are numbered
as follows; sizes and offsets are in elements.

| rule | condition | answer |
|---|---|---|
| 1 | the same object | overlap |
| 2 | one of them is empty | disjoint |
| 4 | both are contiguous | disjoint if the first ends where the second begins, or before |
| 5 | the last element of the first lies before the second | disjoint |
| 6a | both are blocks of rows of equal stride s; the second begins within the first row of the first | overlap |
| 6b | so, and the second begins after the last row | disjoint |
| 6c | so, and the second's row, from where it begins modulo s, ends within s | disjoint |
| 6d | so, and it does not | overlap |
| 7 | anything else | overlap |

Rule 3 only swaps the two, so that the first begins first. 6c is wrong: it does not check whether the second begins,
modulo s, after the first's row. 7 is a guess. And elements of different size are counted as if they were of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from .. import _core
from .._checks import integer, sequence
from .._core import address
from .._words import type_of
from ..sharing import overlaps
from .arrays import Geometry, MemoryAt

__tracebackhide__ = True  # no frames of ours in reports of pytest


def compute_overlapping_inputs(
    arrays: Sequence[object], indices: Sequence[int] | None = None, *, compat: str | None = None
) -> set[int]:
    """The positions, among `indices`, of arrays that share memory with another one of them.

    arrays: what `fanin.sharing.overlaps` takes, ndarrays and torch tensors above all; also fake tensors and those on
    the device "meta", which are compared within their storage. indices: positions in `arrays`; None for all. An index
    that is given twice is two inputs.

    compat: None for the exact answer, in bytes. "torch" for PyTorch's answer, bit for bit, with its mistakes; the
    requested arrays must be ndarrays or tensors, views of one storage. An ndarray is taken as a tensor of the same
    elements would be (a negative stride as the same elements in the other order); ValueError where there is no such
    tensor, for a stride that is no multiple of the itemsize.

    IndexError: a position that is not there. TypeError: what is no array. ValueError: an unknown `compat`.

    >>> from fanin.analysis import compute_overlapping_inputs
    >>> m = np.zeros((8, 9))
    >>> x, y = m[0:4, 0:4], m[2:6, 0:4]  # rows 2 and 3 are in both
    >>> compute_overlapping_inputs([x, y]), compute_overlapping_inputs([x, y], compat="torch")
    ({0, 1}, set())
    """
    if compat is not None and not (isinstance(compat, str) and compat == "torch"):
        raise ValueError(f'compute_overlapping_inputs: compat must be None or "torch", got {compat!r}')
    chosen = chosen_of(arrays, indices)
    if compat is None:
        return exact(arrays, chosen)
    views = elements(arrays, chosen)
    found: set[int] = set()
    for i, j in itertools.combinations(chosen, 2):
        if not torch_ruling(views[i], views[j], arrays[i] is arrays[j])[0]:
            found |= {i, j}
    return found


def chosen_of(arrays: Sequence[object], indices: Sequence[int] | None) -> Sequence[int]:
    """The requested positions. TypeError: no sequence of arrays."""
    if type(arrays) not in (list, tuple) and (
        isinstance(arrays, (np.ndarray, str, bytes))
        or is_tensor(arrays)
        or not (hasattr(arrays, "__len__") and hasattr(arrays, "__getitem__"))
    ):
        raise TypeError(
            f"compute_overlapping_inputs: expected a sequence of arrays, got {type_of(arrays)}; one array is [array]"
        )
    every = range(len(arrays))
    if indices is None:
        return every
    chosen = sequence("compute_overlapping_inputs: indices", indices, "integers")
    if len(chosen) == len(every) and chosen == list(every):
        return every  # as they mostly are
    chosen = [integer("compute_overlapping_inputs: indices", i) for i in chosen]
    for i in chosen:
        if not 0 <= i < len(arrays):
            raise IndexError(f"compute_overlapping_inputs: no array {i}; there are {len(arrays)}")
    return chosen


# The exact answer


def exact(arrays: Sequence[object], chosen: Sequence[int]) -> set[int]:
    """What shares a byte with another one: within the process's memory, and within each storage that is none."""
    every = isinstance(chosen, range)
    try:
        found = overlaps(arrays if every else [arrays[i] for i in chosen]).indices
    except (TypeError, ValueError):
        pass  # tensors without memory, or no arrays: checked one by one below
    else:
        return set(found) if every else {chosen[k] for k in found}
    spaces: dict[object, list[tuple[int, object]]] = {}
    for i in chosen:
        space, array = stand_in(arrays[i], i)
        spaces.setdefault(space, []).append((i, array))
    return {group[k][0] for group in spaces.values() for k in overlaps([array for _, array in group]).indices}


def shares(x: object, y: object) -> bool:
    """Whether two arrays share a byte; "unknown" is taken for yes."""
    (space, one), (other_space, other) = stand_in(x, 0), stand_in(y, 1)
    return space == other_space and bool(_core.overlap(one, other))


FIRST = 1 << 32
"""The address used for the first byte of a storage without memory."""


def stand_in(array: object, index: int) -> tuple[object, object]:
    """(space, an array that can be compared with others of the same space): (None, the array itself) where it lies in
    the process's memory; of a tensor that does not (its storage, an array at the same place).
    """
    try:
        overlaps([array])
    except (TypeError, ValueError) as why:
        if not is_tensor(array) or array.is_nested:
            raise not_an_array(array, index) from why
    else:
        return None, array
    size = array.element_size()
    start, strides = FIRST + array.storage_offset() * size, tuple(s * size for s in array.stride())
    placed = MemoryAt(start, Geometry(tuple(array.shape), strides, np.dtype(f"V{size}")), False, None)
    return array.untyped_storage()._cdata, np.asarray(placed)


def not_an_array(x: object, index: int) -> TypeError:
    return TypeError(
        f"compute_overlapping_inputs: expected ndarrays or strided torch tensors, got {type_of(x)} at {index}"
    )


def is_tensor(x: object) -> TypeGuard[Any]:
    """Whether it is a strided torch tensor."""
    return hasattr(x, "untyped_storage") and str(getattr(x, "layout", "")) == "torch.strided"


# PyTorch's answer


@dataclass(frozen=True)
class Elements:
    """Where an array lies, for PyTorch's rules: offset and strides count elements of its own size."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def contiguous(self) -> bool:
        expected = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != expected:
                return self.size == 0
            expected *= n
        return True


def elements(arrays: Sequence[object], chosen: Sequence[int]) -> dict[int, Elements]:
    """Each array for PyTorch's rules. Offsets of ndarrays are from the byte that lies lowest."""
    lowest = {i: address(x) + Geometry.of(x).reach()[0] for i in chosen if isinstance(x := arrays[i], np.ndarray)}
    origin = min(lowest.values(), default=0)
    found = {}
    for i in chosen:
        x = arrays[i]
        if is_tensor(x):
            found[i] = Elements(x.storage_offset(), tuple(x.shape), tuple(x.stride()))
            continue
        if not isinstance(x, np.ndarray):
            raise not_an_array(x, i)
        uneven = [s for s, n in zip(x.strides, x.shape, strict=True) if n > 1 and x.itemsize and s % x.itemsize]
        if uneven or not x.itemsize:
            raise ValueError(
                f"compute_overlapping_inputs: array {i} has a stride of {uneven[0] if uneven else 0} bytes and items of"
                f" {x.itemsize}: no torch tensor is like it; compat=None compares bytes"
            )
        found[i] = Elements((lowest[i] - origin) // x.itemsize, x.shape, tuple(abs(s) // x.itemsize for s in x.strides))
    return found


def torch_ruling(x: Elements, y: Elements, same: bool) -> tuple[bool, str]:
    """Whether PyTorch calls two arrays disjoint, and the number of the rule that decides."""
    if same:
        return False, "1"
    if x.size == 0 or y.size == 0:
        return True, "2"
    if x.offset > y.offset:
        x, y = y, x
    d = y.offset - x.offset
    if x.contiguous and y.contiguous:
        return x.size <= d, "4"
    if x.last < y.offset:
        return True, "5"
    if len(x.shape) == len(y.shape) == 2 and x.stride[1] == y.stride[1] == 1 and x.stride[0] == y.stride[0]:
        s, (height, width) = x.stride[0], x.shape
        if d < width:
            return False, "6a"
        if d >= s * (height - 1) + width:
            return True, "6b"
        fits = d % s + y.shape[1] <= s
        return fits, "6c" if fits else "6d"
    return False, "7"


# Why they differ


@dataclass(frozen=True)
class OverlapDifference:
    """A pair that PyTorch judges otherwise than is right: `torch` and `exact` are "disjoint" or "overlap".

    rule: "units" where elements of different size were counted as if they were of one; else the number of the rule that
    decided.
    """

    pair: tuple[int, int]
    torch: str
    exact: str
    rule: str

    def __str__(self) -> str:
        return f"arrays {self.pair[0]} and {self.pair[1]}: torch: {self.torch} by {WHY[self.rule]}; it is {self.exact}"


WHY = {
    "units": "comparing offsets that count elements of different sizes",
    "1": "rule 1 (the same object overlaps itself, even if it is empty)",
    "6c": (
        "rule 6c (the second's row fits after its beginning, modulo the stride; where the first's row ends is not"
        " checked)"
    ),
    "7": "rule 7 (anything but blocks of equal rows is an overlap)",
}


def explain_overlap_differences(
    arrays: Sequence[object], indices: Sequence[int] | None = None
) -> list[OverlapDifference]:
    """Each pair for which compat="torch" and the exact answer differ, with the rule that is to blame.

    Arguments and errors are those of `compute_overlapping_inputs`.

    >>> from fanin.analysis import explain_overlap_differences
    >>> m = np.zeros((8, 9))
    >>> [(x.torch, x.exact, x.rule) for x in explain_overlap_differences([m[0:4, 0:4], m[2:6, 0:4]])]
    [('disjoint', 'overlap', '6c')]
    """
    chosen = chosen_of(arrays, indices)
    views = elements(arrays, chosen)
    words = {True: "disjoint", False: "overlap"}
    found = []
    for i, j in itertools.combinations(chosen, 2):
        disjoint, rule = torch_ruling(views[i], views[j], arrays[i] is arrays[j])
        really = not shares(arrays[i], arrays[j])
        if disjoint != really:
            sizes = {x.element_size() if is_tensor(x) else np.asarray(x).itemsize for x in (arrays[i], arrays[j])}
            blamed = "units" if len(sizes) > 1 else rule
            found.append(OverlapDifference((i, j), words[disjoint], words[really], blamed))
    return found
