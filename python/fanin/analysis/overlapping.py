"""Which of some arrays share memory with another one: exactly, or as PyTorch answers it, and why the two answers differ.

PyTorch (2.13) compares two views of one storage by a list of rules, the first that applies decides. They are numbered as follows; sizes and offsets are in elements.

| rule | condition | answer |
|---|---|---|
| 1 | the same object | overlap |
| 2 | one of them is empty | disjoint |
| 4 | both are contiguous | disjoint if the first ends where the second begins, or before |
| 5 | the last element of the first lies before the second | disjoint |
| 6a | both are blocks of rows of equal stride s; the second begins within the first row of the first | overlap |
| 6b | so, and the second begins behind the last row | disjoint |
| 6c | so, and the second's row, from where it begins modulo s, ends within s | disjoint |
| 6d | so, and it does not | overlap |
| 7 | anything else | overlap |

Rule 3 only swaps the two, so that the first begins first. 6c is wrong: it does not ask whether the second begins, modulo s, behind the first's row. 7 is a
guess. And elements of different size are counted as if they were of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["OverlapDifference", "compute_overlapping_inputs", "explain_overlap_differences"]


@dataclass(frozen=True)
class Place:
    """Where an array lies. `start` is the byte of the element that lies lowest, strides are in bytes and not negative."""

    space: Any  # two places can be compared only within one; the process's memory is None
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def compute_overlapping_inputs(
    arrays: Sequence[Any], indices: Sequence[int] | None = None, *, compat: str | None = None
) -> set[int]:
    """The positions, among `indices`, of arrays that share memory with another one of them.

    arrays: ndarrays, or torch tensors (also those without memory, as on the device "meta": they are compared within their storage). indices: positions in
    `arrays`; None for all. An index that is given twice is two inputs.

    compat: None for the exact answer, in bytes. "torch" for PyTorch's answer, bit for bit, with its mistakes; what is asked then must be views of one storage.
    ndarrays are taken as a tensor of the same elements would be (a negative stride as the same elements in the other order); ValueError where there is no such
    tensor, for a stride that is no multiple of the itemsize.

    IndexError: a position that is not there. TypeError: what is no array. ValueError: an unknown `compat`.

    >>> from fanin.analysis import compute_overlapping_inputs
    >>> m = np.zeros((8, 9))
    >>> x, y = m[0:4, 0:4], m[2:6, 0:4]  # rows 2 and 3 are in both
    >>> compute_overlapping_inputs([x, y]), compute_overlapping_inputs([x, y], compat="torch")
    ({0, 1}, set())
    """
    if compat not in (None, "torch"):
        raise ValueError(f'compute_overlapping_inputs: compat must be None or "torch", got {compat!r}')
    chosen = chosen_of(arrays, indices)
    places = {i: place_of(arrays[i], i) for i in chosen}
    found: set[int] = set()
    if compat is None:
        for i, j in exact_pairs(chosen, places):
            found |= {i, j}
        return found
    views = {i: elements_of(places[i], i, min(p.start for p in places.values())) for i in chosen}
    for i, j in itertools.combinations(chosen, 2):
        if not torch_disjoint(views[i], views[j], arrays[i] is arrays[j])[0]:
            found |= {i, j}
    return found


def chosen_of(arrays: Sequence[Any], indices: Sequence[int] | None) -> list[int]:
    chosen = list(range(len(arrays)) if indices is None else indices)
    for i in chosen:
        if not 0 <= i < len(arrays):
            raise IndexError(f"compute_overlapping_inputs: no array {i}; there are {len(arrays)}")
    return chosen


def place_of(array: Any, index: int) -> Place:
    """Where an array lies; TypeError for what is none, with its index."""
    space: Any = None
    if isinstance(array, np.ndarray):
        start, strides, itemsize = int(array.__array_interface__["data"][0]), array.strides, array.itemsize
    elif hasattr(array, "untyped_storage") and str(array.layout) == "torch.strided":
        itemsize = array.element_size()
        strides = tuple(s * itemsize for s in array.stride())
        if array.device.type == "cpu" and type(array).__module__ != "torch._subclasses.fake_tensor":
            start = array.data_ptr()
            if array.numel() == 0:  # torch gives no address then
                start = array.untyped_storage().data_ptr() + array.storage_offset() * itemsize
        else:
            space, start = array.untyped_storage()._cdata, array.storage_offset() * itemsize
    else:
        raise TypeError(
            f"compute_overlapping_inputs: expected ndarrays or strided torch tensors, got a {type(array).__name__} at {index}"
        )
    shape = tuple(array.shape)
    if 0 not in shape:
        start += sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    return Place(space, start, shape, tuple(map(abs, strides)), itemsize)


# The exact answer


def exact_pairs(chosen: Sequence[int], places: dict[int, Place]) -> list[tuple[int, int]]:
    """The pairs that share a byte."""
    return [(i, j) for i, j in itertools.combinations(chosen, 2) if shares(places[i], places[j])]


class Somewhere:
    """An array of nothing at a place: it is asked where it lies, and never read."""

    def __init__(self, place: Place, base: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": place.shape,
            "strides": place.strides,
            "typestr": f"|V{place.itemsize}",
            "data": (place.start + base, False),
        }


def shares(x: Place, y: Place) -> bool:
    if x.space != y.space or 0 in (x.size, y.size, x.itemsize, y.itemsize):
        return False
    base = 0 if x.space is None else 1 << 32  # within a storage the first byte is number 0, which is no address
    return np.shares_memory(np.asarray(Somewhere(x, base)), np.asarray(Somewhere(y, base)))


# PyTorch's answer


@dataclass(frozen=True)
class Elements:
    """A place as PyTorch sees it: offset and strides count elements of its own size."""

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


def elements_of(place: Place, index: int, origin: int) -> Elements:
    """ValueError where no tensor is like it."""
    uneven = [s for s, n in zip(place.strides, place.shape, strict=True) if n > 1 and s % place.itemsize]
    if uneven:
        raise ValueError(
            f"compute_overlapping_inputs: array {index} has a stride of {uneven[0]} bytes, no multiple of its itemsize {place.itemsize}: "
            "no torch tensor is like it; compat=None compares bytes"
        )
    first = place.start if place.space is not None else place.start - origin
    return Elements(first // place.itemsize, place.shape, tuple(s // place.itemsize for s in place.strides))


def torch_disjoint(x: Elements, y: Elements, same: bool) -> tuple[bool, str]:
    """Whether PyTorch calls them disjoint, and the number of the rule that says so."""
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

    rule: "units" where elements of different size were counted as if they were of one; else the number of the rule that decided.
    """

    pair: tuple[int, int]
    torch: str
    exact: str
    rule: str

    def __str__(self) -> str:
        return (
            f"arrays {self.pair[0]} and {self.pair[1]}: torch says {self.torch} by {WHY[self.rule]}; it is {self.exact}"
        )


WHY = {
    "units": "comparing offsets that count elements of different sizes",
    "1": "rule 1 (the same object overlaps itself, even if it is empty)",
    "6c": "rule 6c (the second's row fits behind its beginning, modulo the stride; where the first's row ends is not asked)",
    "7": "rule 7 (of anything but blocks of equal rows it says overlap unasked)",
}


def explain_overlap_differences(arrays: Sequence[Any], indices: Sequence[int] | None = None) -> list[OverlapDifference]:
    """Each pair for which compat="torch" and the exact answer differ, with the rule that is to blame.

    Arguments and errors are those of `compute_overlapping_inputs`.

    >>> from fanin.analysis import explain_overlap_differences
    >>> m = np.zeros((8, 9))
    >>> [(x.torch, x.exact, x.rule) for x in explain_overlap_differences([m[0:4, 0:4], m[2:6, 0:4]])]
    [('disjoint', 'overlap', '6c')]
    """
    chosen = chosen_of(arrays, indices)
    places = {i: place_of(arrays[i], i) for i in chosen}
    views = {i: elements_of(places[i], i, min(p.start for p in places.values())) for i in chosen}
    words = {True: "disjoint", False: "overlap"}
    found = []
    for i, j in itertools.combinations(chosen, 2):
        disjoint, rule = torch_disjoint(views[i], views[j], arrays[i] is arrays[j])
        really = not shares(places[i], places[j])
        if disjoint != really:
            blamed = "units" if places[i].itemsize != places[j].itemsize else rule
            found.append(OverlapDifference((i, j), words[disjoint], words[really], blamed))
    return found
