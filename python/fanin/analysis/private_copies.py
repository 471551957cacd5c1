"""Private memory in which a function runs in the caller's stead.

Arrays that share bytes form a *group*. Each group gets memory of its own, of the same extent and the same alignment, in
which every array is rebuilt at its own place, with its own strides, dtype and flags: whoever writes one sees it in the
others, as the caller would. An array that owns its memory is rebuilt as one that does. Only bytes that some array shows
are read and written; what lies between them is nobody's.

    caller      |--- x ---|          |- z -|
                     |--- y ---|
    private     |--- x' --|          |- z'-|      groups (x, y) and (z)
                     |--- y' --|

After the run the private bytes are compared with the caller's, which nobody has touched: what differs was written, by
whatever route. Bits are compared, not values: NaNs, signs of zero and padding count.
"""

from __future__ import annotations

import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._core import address
from .._interop.protocols import DType, NDArray

Array = NDArray

UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}

#: Private memory begins where the caller's does modulo this.
LINE = 64

#: Classes of which a view is made anew by `view`.
REMADE = (np.matrix, np.recarray)

#: So many bases of an array are looked at, to find whose memory it shows.
CHAIN = 64


# Where an array lies


@dataclass(frozen=True)
class Geometry:
    """How an array's elements lie from its first one on; strides are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @staticmethod
    def of(array: Array) -> Geometry:
        return Geometry(array.shape, array.strides, array.dtype)

    def reach(self) -> tuple[int, int]:
        """The bytes before the first element that belong to it, as a number from 0 down, and those from it on; (0, 0)
        where there are none.
        """
        if 0 in self.shape or self.dtype.itemsize == 0:
            return 0, 0
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + self.dtype.itemsize

    @property
    def crowded(self) -> bool:
        """Whether there are more elements than bytes."""
        down, up = self.reach()
        return math.prod(self.shape) * self.dtype.itemsize > up - down

    def fits(self, array: Array) -> bool:
        """Whether an array has this geometry."""
        return bool(array.shape == self.shape and array.strides == self.strides and array.dtype == self.dtype)

    @property
    def gapless(self) -> bool:
        """Whether the elements fill the bytes from the first to the last, each once, and all strides go up."""
        expected = self.dtype.itemsize
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= n
        return True


def root_of(array: Array) -> Array:
    """The array at the end of the chain of bases."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@functools.cache
def word(dtype: DType) -> DType | None:
    """The unsigned integer as wide as a dtype; bytes one by one where there is none; None where there are no bits."""
    size = dtype.itemsize
    if size in UNSIGNED:
        return UNSIGNED[size]
    return np.dtype([("bytes", "u1", (size,))]) if size else None


def words(array: Array) -> Array:
    """The bits of an array as unsigned integers, whatever its strides: an axis more where no integer is as wide as its
    items.
    """
    unsigned = word(array.dtype)
    if unsigned is None:
        return np.empty(0, "u1")
    view = array.view(unsigned)
    return view if unsigned.names is None else view["bytes"]


def window(array: Array) -> Array:
    """A view that keeps its geometry whatever happens to the array's, and in which an assignment copies all bits: of
    records the words.
    """
    return words(array) if array.dtype.kind == "V" else array.view()


def each_byte_once(array: Array) -> Array:
    """The array, or where it has more elements than bytes, as broadcast ones have, a view of the same bytes that shows
    each about once.
    """
    down, up = Geometry.of(array).reach()
    if array.size * array.itemsize <= up - down or up == 0:
        return array
    axes: list[list[int]] = []
    for stride, n in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1 and s):
        if axes and stride % axes[-1][0] == 0 and stride // axes[-1][0] <= axes[-1][1]:
            axes[-1][1] += stride // axes[-1][0] * (n - 1)
        else:
            axes.append([stride, n])
    once = Geometry(tuple(n for _, n in axes), tuple(s for s, _ in axes), array.dtype)
    held = MemoryAt(address(array) + down, once, not array.flags.writeable, array)
    return np.asarray(held).view(array.dtype)


def flat_bytes(array: Array) -> Array:
    """The memory of a gapless array as one axis of bytes, from its lowest address on."""
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return array.transpose(order).reshape(-1).view("u1")


def can_be_made_writeable(array: Array) -> bool:
    """Whether NumPy would let an array that is read-only be made writable."""
    if array.flags.writeable or array.flags.owndata:
        return True
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:
        return False
    return True


def freeze(array: object) -> None:
    """Make an array and all arrays that it is a view of read-only: NumPy lets a view be made writable where any of them
    is writable.
    """
    while isinstance(array, np.ndarray):
        array.flags.writeable = False
        array = array.base


def writeable_window(window: Array) -> Array:
    """The same window, writable, on memory that can be made writable."""
    if window.flags.writeable:
        return window
    return np.asarray(MemoryAt(address(window), Geometry.of(window), False, window)).view(window.dtype)


class MemoryAt:
    """Memory at an address, of an owner that is kept alive."""

    def __init__(self, start: int, geometry: Geometry, readonly: bool, owner: object) -> None:
        self.owner = owner
        size = geometry.dtype.itemsize
        self.__array_interface__ = {
            "data": (start, readonly),
            "shape": geometry.shape,
            "strides": geometry.strides,
            "typestr": f"|V{size}",
            "version": 3,
        }


def view_at(start: int, geometry: Geometry, writeable: bool, source: Array) -> Array:
    """A view of a geometry whose first element lies at `start`, in the memory that `source` is a view of.

    Its base is the one that a slice of `source` would have, wherever that can be had.
    """
    down, up = geometry.reach()
    for whole in (root_of(source), source):
        if (writeable and not whole.flags.writeable) or not Geometry.of(whole).gapless:
            continue
        low = address(whole)
        if start + down < low or start + up > low + whole.nbytes:
            continue
        view = built(np.ndarray, flat_bytes(plain(whole)), start - low, geometry)
        if not writeable:
            view.flags.writeable = False
        return view
    held = np.asarray(MemoryAt(start, geometry, not writeable, source))
    return held.view(geometry.dtype)


def built(kind: type, memory: Array, offset: int, geometry: Geometry) -> Array:
    """An array of a class over bytes."""
    if geometry.dtype.itemsize == 0 or memory.nbytes == 0:  # there is nothing to lie within
        return np.asarray(MemoryAt(address(memory), geometry, False, memory)).view(geometry.dtype).view(kind)
    offset = 0 if 0 in geometry.shape else offset  # no byte is touched
    return np.ndarray.__new__(
        kind, geometry.shape, geometry.dtype, buffer=memory, offset=offset, strides=geometry.strides
    )


# Groups


@dataclass(frozen=True)
class GroupMember:
    """One array of a group: its number among the distinct arrays, the bytes from the group's lowest address to its
    first element.
    """

    number: int
    offset: int
    geometry: Geometry
    writeable: bool
    low: int  #: its own lowest byte, from the group's
    high: int  #: the end of its bytes


@dataclass(frozen=True)
class GroupFlags:
    """What of a group is no part of its layout, and is looked at in each call."""

    low: int  #: the lowest address
    owner: int | None  #: which member owns the memory
    frozen: bool  #: nobody can write it, not even after asking for it


@dataclass(frozen=True)
class Group:
    """Arrays that share bytes, directly or through others; most groups have one member."""

    members: tuple[GroupMember, ...]
    size: int  #: from the lowest byte to the end of the highest
    cover: tuple[int, ...]  #: members that together show every byte that some member shows
    whole: tuple[int, ...]  #: members that can be rebuilt as arrays that own the memory, all of it
    writeable: bool  #: all members can be written
    simple: bool  #: one member, which can be written, and whose copy, where it owns its memory, lies as it does
    seen: GroupFlags  #: what was so at the call that was planned for

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(m.number for m in self.members)

    def nearest(self, low: int, high: int) -> GroupMember:
        """The smallest member that has the bytes from `low` to `high`; where none has them all, the first that has
        some, else the first.
        """
        fits = [m for m in self.members if m.low <= low and high <= m.high]
        if fits:
            return min(fits, key=lambda m: m.high - m.low)
        meets = [m for m in self.members if m.low < high and low < m.high]
        return (meets or self.members)[0]


class Position(NamedTuple):
    """Where an array of a plan is: the number of its group, and its place among the members."""

    group: int
    place: int


@dataclass(frozen=True)
class Plan:
    """How private memory is laid out for arrays of one layout."""

    groups: tuple[Group, ...]
    where: tuple[Position, ...]  #: of each array

    @functools.cached_property
    def loose(self) -> tuple[int, ...]:
        """The arrays with strides that mean nothing, so that those of another call may be others."""
        members = (self.groups[g].members[place] for g, place in self.where)
        return tuple(m.number for m in members if any(n <= 1 for n in m.geometry.shape))


def plan(arrays: Sequence[Array], components: Iterable[Sequence[int]]) -> Plan:
    """The plan for distinct arrays; `components` are the sets of those that share bytes."""
    groups, where = [], [Position(0, 0)] * len(arrays)
    for number, indices in enumerate(components):
        group = group_of([(i, arrays[i]) for i in indices])
        groups.append(group)
        for place, member in enumerate(group.members):
            where[member.number] = Position(number, place)
    return Plan(tuple(groups), tuple(where))


def group_of(arrays: Sequence[tuple[int, Array]]) -> Group:
    """One group of numbered arrays."""
    found = []
    for number, array in arrays:
        geometry, start = Geometry.of(array), address(array)
        down, up = geometry.reach()
        found.append((number, array, geometry, start, start + down, start + up))
    low, high = min(f[4] for f in found), max(f[5] for f in found)
    members = tuple(GroupMember(n, s - low, g, a.flags.writeable, lo - low, hi - low) for n, a, g, s, lo, hi in found)
    size = high - low
    full = [k for k, m in enumerate(members) if m.geometry.gapless and m.high - m.low == size]
    whole = tuple(k for k in full if reproducible(members[k].geometry))
    first = found[0][1]
    simple = (
        len(members) == 1
        and whole == (0,)
        and first.flags.writeable
        and first.dtype.kind != "V"
        and first.copy("K").strides == first.strides
    )
    cover = tuple(full[:1]) if full else tuple(range(len(members)))
    writeable = all(m.writeable for m in members)
    flags = GroupFlags(low, owner_of(members, whole, dict(arrays)), frozen(members, dict(arrays)))
    return Group(members, size, cover, whole, writeable, simple, flags)


def reproducible(geometry: Geometry) -> bool:
    """Whether an array that owns its memory can be made with this geometry, which is gapless."""
    if 0 not in geometry.shape and geometry.dtype.itemsize:
        return all(s > 0 for n, s in zip(geometry.shape, geometry.strides, strict=True) if n != 1)
    return np.empty(geometry.shape, geometry.dtype).strides == geometry.strides


Arrays = Sequence[Array] | dict[int, Array]


def owner_of(members: Sequence[GroupMember], whole: Sequence[int], arrays: Arrays) -> int | None:
    """Which member owns the memory."""
    return next((k for k in whole if arrays[members[k].number].flags.owndata), None)


def frozen(members: Sequence[GroupMember], arrays: Arrays) -> bool:
    """Whether no member can be written, not even after asking for it."""
    return not any(can_be_made_writeable(arrays[m.number]) for m in members)


# The arrays of a run


class RunArrays(ABC):
    """The arrays that a function is given in one run, and what came of them.

    `plan`: how they lie. `arrays`: the caller's. `private`: those that the function gets, by the same numbers.
    `copied`: the groups of which something is known.
    """

    plan: Plan
    arrays: Sequence[Any]
    private: list[Any]
    copied: Sequence[int]

    @property
    @abstractmethod
    def resized(self) -> frozenset[int]:
        """Groups whose memory was given up for other memory."""

    @property
    @abstractmethod
    def written(self) -> list[int]:
        """Groups of which a byte is another one."""

    @property
    @abstractmethod
    def moved(self) -> list[int]:
        """Arrays whose geometry is not what it was."""

    @property
    @abstractmethod
    def lows(self) -> dict[int, int]:
        """Where the memory of each group begins."""

    @abstractmethod
    def span(self, number: int) -> tuple[int, int]:
        """Where a group's memory begins and ends."""

    @abstractmethod
    def member_written(self, index: int) -> bool:
        """Whether a byte of one array is another one."""

    @abstractmethod
    def group_at(self, array: Any) -> int | None:
        """The group in whose memory an array lies, if it does."""

    def members(self) -> Iterable[GroupMember]:
        """The places of all arrays of which something is known."""
        return (m for number in self.copied for m in self.plan.groups[number].members)

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        """Arrays that could be written and no longer can, or the other way round."""
        return [m.number for m in self.members() if self.private[m.number].flags.writeable != m.writeable]

    # What the parts of other libraries say otherwise

    def geometry(self, o: Any) -> Geometry:
        """An array's geometry."""
        return Geometry.of(o)

    def begin(self, o: Any) -> int:
        """Where an array's first element lies."""
        return address(o)

    def is_array(self, o: object) -> bool:
        """Whether an output is an array."""
        return isinstance(o, np.ndarray)

    def remakeable(self, o: object) -> bool:
        """Whether an output is all in its memory and geometry."""
        return type(o) is np.ndarray or type(o) in REMADE


@dataclass(frozen=True)
class Bits:
    """The bits of an array that was copied: the private ones, and the caller's."""

    mine: Array
    its: Array


class PrivateCopies(RunArrays):
    """Private copies of distinct arrays, for one run; see the top of this file.

    The copies are instances of `kind`. Only the groups in `copied` are copied; the other arrays are the caller's own.
    """

    def __init__(
        self, plan: Plan, arrays: Sequence[object], kind: type = np.ndarray, copied: Sequence[int] | None = None
    ) -> None:
        self.plan, self.arrays = plan, arrays
        self.copied: Sequence[int] = range(len(plan.groups)) if copied is None else copied
        self.private: list[Any] = list(arrays)
        self.windows: dict[int, Bits] = {}  #: of each array that was copied
        #: of those that have more elements than bytes the private ones' bits, element by element
        self.whole: dict[int, Array] = {}
        self.starts: dict[int, int] = {}  #: where each group's private memory begins
        self.owners: dict[int, int] = {}  #: which member of a group owns its memory, where one does
        self.roots: dict[int, int] = {}  #: whose root belongs to which group
        for number in self.copied:
            self._copy(number, plan.groups[number], kind)

    @property
    def lows(self) -> dict[int, int]:
        """Where each group's private memory begins."""
        return self.starts

    def _flags(self, group: Group) -> GroupFlags:
        """What is so in this call."""
        first = group.members[0]
        return GroupFlags(
            address(self.arrays[first.number]) - first.offset,
            owner_of(group.members, group.whole, self.arrays),
            not group.writeable and frozen(group.members, self.arrays),
        )

    def _copy(self, number: int, group: Group, kind: type) -> None:
        members, private = group.members, self.private
        if group.simple and kind is np.ndarray and self._copy_simply(number, members[0]):
            return
        flags = self._flags(group)
        if flags.owner is not None:
            g = members[flags.owner].geometry
            root: Array = np.ndarray.__new__(kind, g.shape, g.dtype, strides=g.strides if 0 not in g.shape else None)
            start = address(root)
            memory = flat_bytes(plain(root)).view(kind) if len(members) > 1 else root
            self.owners[number] = flags.owner
        else:
            size = max(group.size, 1)
            root = np.empty(size + LINE, "u1")
            start = address(root)
            shift = (flags.low - start) % LINE
            start += shift
            # Of the private class: what NumPy strips of it keeps the private array for its base, and is told from a
            # view of it.
            memory = root[shift : shift + size].view(kind)
        for place, m in enumerate(members):
            mine = root if place == flags.owner else built(kind, memory, m.offset, m.geometry)
            private[m.number] = mine
            self.windows[m.number] = Bits(
                window(each_byte_once(plain(mine))), window(each_byte_once(self.arrays[m.number]))
            )
            if m.geometry.crowded:
                self.whole[m.number] = window(plain(mine))
        for bits in self.covering(group):
            bits.mine[...] = bits.its
        if not group.writeable:
            for m in members:
                if not m.writeable:
                    private[m.number].flags.writeable = False
        if flags.frozen:
            freeze(memory)
        self.roots[id(root)] = number
        self.starts[number] = start

    def _copy_simply(self, number: int, m: GroupMember) -> bool:
        """The short way for an array by itself, which owns its memory; False where it does not."""
        its = self.arrays[m.number]
        if not its.flags.owndata:
            return False
        root = its.copy("K")
        if root.strides != m.geometry.strides:
            return False
        self.private[m.number] = root
        self.windows[m.number] = Bits(root.view(), its)
        self.roots[id(root)], self.starts[number], self.owners[number] = number, address(root), 0
        return True

    def span(self, number: int) -> tuple[int, int]:
        """Where a group's private memory begins and ends."""
        return self.lows[number], self.lows[number] + max(self.plan.groups[number].size, 1)

    # What came of it

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        """Groups whose owner was given other memory: `x.resize`. What is known of the old memory must not be touched
        any more.
        """
        found = []
        for number, owner in self.owners.items():
            group = self.plan.groups[number]
            array = self.private[group.members[owner].number]
            if address(array) != self.lows[number] or array.nbytes != group.size:
                found.append(number)
        return frozenset(found)

    @functools.cached_property
    def written(self) -> list[int]:
        """Groups of which a byte differs from the caller's."""
        resized = self.resized
        return [n for n in self.copied if n not in resized and not self._unchanged(self.plan.groups[n])]

    @functools.cached_property
    def moved(self) -> list[int]:
        """Arrays whose geometry is not what it was."""
        return [m.number for m in self.members() if not m.geometry.fits(self.private[m.number])]

    def _unchanged(self, group: Group) -> bool:
        return all(same(bits.mine, bits.its) for bits in self.covering(group))

    def covering(self, group: Group) -> list[Bits]:
        """The bits of members that together show all."""
        return [self.windows[group.members[place].number] for place in group.cover]

    def member_written(self, index: int) -> bool:
        """Whether a byte of one array differs from the caller's."""
        bits = self.windows.get(index)
        return bits is not None and not same(bits.mine, bits.its)

    def as_it_was(self, index: int) -> Array:
        """A private array in the geometry that it had before the run, whatever it has now."""
        bits, (group, place) = self.windows.get(index), self.plan.where[index]
        geometry = self.plan.groups[group].members[place].geometry
        if geometry.dtype.itemsize == 0:
            return np.empty(geometry.shape, geometry.dtype)  # without a byte one is like another
        if bits is None:
            return plain(self.private[index])
        view = self.whole.get(index, bits.mine)
        if view.dtype != geometry.dtype:
            view = view.view(geometry.dtype)
        return view if view.ndim == len(geometry.shape) else view[..., 0]

    def group_at(self, array: Array) -> int | None:
        """The group in whose memory an array lies, if it does."""
        link: Array = array
        for _ in range(CHAIN):
            number = self.roots.get(id(link))
            if number is not None:
                return number
            if not isinstance(link.base, np.ndarray):
                break
            link = link.base
        if link.flags.owndata:
            return None
        start = address(array)  # by a memoryview, or another library
        for number in self.copied:
            low, high = self.span(number)
            if low <= start < high:
                return number
        return None


class RecordedCopies(PrivateCopies):
    """A run whose arrays may lie anywhere: alignment, ownership and what can be written are those of the call that
    was planned for.
    """

    def _flags(self, group: Group) -> GroupFlags:
        return group.seen

    def _copy_simply(self, number: int, m: GroupMember) -> bool:
        return False


def read_only(name: str) -> ValueError:
    """The error for a write that cannot be carried out."""
    return ValueError(
        f"{name} was written, but its memory is read-only: expected a function that does not, or pass a copy"
    )


def plain(array: Any) -> Array:
    """The array as NumPy's own class."""
    result: Array = array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)
    return result


#: Up to so many bytes two windows are compared as strings of bytes.
SMALL = 2048

#: Larger windows are compared piece by piece: the first piece that differs ends it.
PIECE = 1 << 16


def same(mine: Array, its: Array) -> bool:
    """Whether two windows show the same bits."""
    if mine.nbytes <= SMALL:
        return mine.tobytes() == its.tobytes()
    mine, its = words(mine), words(its)
    if mine.size <= PIECE or not (mine.flags.c_contiguous and its.flags.c_contiguous):
        return not np.not_equal(mine, its).any()
    mine, its = mine.reshape(-1), its.reshape(-1)
    pieces = range(0, mine.size, PIECE)
    return not any(np.not_equal(mine[i : i + PIECE], its[i : i + PIECE]).any() for i in pieces)


def take_geometry(array: Array, wanted: Geometry) -> bool:
    """Give an array another shape, dtype and strides over the memory that it has; False where no order of assignments
    leads there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        first = Geometry.of(array)
        for steps in (
            ("dtype", "shape", "strides"),
            ("flat", "dtype", "shape", "strides"),
            ("shape", "strides", "dtype", "shape", "strides"),
        ):
            try:
                for step in steps:
                    assign(array, step, wanted)
            except (ValueError, TypeError, AttributeError):
                pass
            if Geometry.of(array) == wanted:
                return True
            restore(array, first)
    return False


def assign(array: Array, step: str, wanted: Geometry) -> None:
    """One assignment to an array's geometry, where it is not as wanted already."""
    if step == "flat":
        array.shape = (array.size,)
    elif getattr(array, step) != getattr(wanted, step):
        setattr(array, step, getattr(wanted, step))


def restore(array: Array, first: Geometry) -> None:
    """Undo what an order of assignments that led nowhere has done."""
    for step in ("dtype", "shape", "strides", "dtype"):
        try:
            assign(array, step, first)
        except (ValueError, TypeError, AttributeError):
            continue
