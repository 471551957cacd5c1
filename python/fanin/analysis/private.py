"""Private memory in which a function runs in the caller's stead.

Arrays that share bytes form a *group*. Each group gets memory of its own, of the same extent and the same alignment, in which every array is
rebuilt at its own place, with its own strides, dtype and flags: whoever writes one sees it in the others, as the caller would. An array that owns
its memory is rebuilt as one that does. Only bytes that some array shows are read and written; what lies between them is nobody's.

    caller      |--- x ---|          |- z -|
                     |--- y ---|
    private     |--- x' --|          |- z'-|      groups (x, y) and (z)
                     |--- y' --|

After the run the private bytes are compared with the caller's, which nobody has touched: what differs was written, by whatever route. Bits are
compared, not values: NaNs, signs of zero and padding count.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Name = Callable[[int], str]

UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}

#: Private memory begins where the caller's does modulo this.
LINE = 64

#: What a base array that is met in a chain of bases may be, and still be known.
CHAIN = 64


# Where an array lies


@dataclass(frozen=True)
class Geometry:
    """How an array's elements lie from its first one on; strides are in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(array: Array) -> Geometry:
        return Geometry(array.shape, array.strides, array.dtype)

    def reach(self) -> tuple[int, int]:
        """The bytes before the first element that belong to it, as a number from 0 down, and those from it on; (0, 0) where there are none."""
        if 0 in self.shape or self.dtype.itemsize == 0:
            return 0, 0
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + self.dtype.itemsize

    @property
    def gapless(self) -> bool:
        """Whether the elements fill the bytes from the first to the last, each once, and all strides go up."""
        expected = self.dtype.itemsize
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= n
        return True


def address(array: Array) -> int:
    """Where the first element lies."""
    return int(array.ctypes.data)


def root_of(array: Any) -> Any:
    """The array at the end of the chain of bases."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@functools.cache
def raw(itemsize: int) -> np.dtype[Any]:
    """A dtype of so many bytes that can be looked at one by one."""
    return np.dtype([("bytes", "u1", (itemsize,))])


def words(array: Array) -> Array:
    """The bits of an array as unsigned integers, whatever its strides: an axis more where no integer is as wide as its items."""
    size = array.dtype.itemsize
    if size in UNSIGNED:
        return array.view(UNSIGNED[size])
    if size == 0:
        return np.empty(0, "u1")
    return array.view(raw(size))["bytes"]


def flat_bytes(array: Array) -> Array:
    """The memory of a gapless array as one axis of bytes, from its lowest address on."""
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return array.transpose(order).reshape(-1).view("u1")


def can_be_thawed(array: Array) -> bool:
    """Whether NumPy would let an array that is read-only be made writable."""
    if array.flags.writeable or array.flags.owndata:
        return True
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:
        return False
    return True


def opened(window: Array) -> Array:
    """The same window, writable, on memory that can be made writable."""
    if window.flags.writeable:
        return window
    return np.asarray(Lent(address(window), Geometry.of(window), False, window)).view(window.dtype)


class Lent:
    """Memory at an address, of an owner that is kept alive."""

    def __init__(self, start: int, geometry: Geometry, readonly: bool, owner: Any) -> None:
        self.owner = owner
        size = geometry.dtype.itemsize
        self.__array_interface__ = {
            "data": (start, readonly), "shape": geometry.shape, "strides": geometry.strides, "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def view_at(start: int, geometry: Geometry, writeable: bool, source: Array) -> Array:
    """A view of a geometry whose first element lies at `start`, in the memory that `source` is a view of.

    Its base is the one that a slice of `source` would have, wherever that can be had.
    """
    down, up = geometry.reach()
    for whole in (root_of(source), source):
        if writeable and not whole.flags.writeable or not Geometry.of(whole).gapless:
            continue
        low = address(whole)
        if start + down < low or start + up > low + whole.nbytes:
            continue
        view = built(np.ndarray, flat_bytes(plain(whole)), start - low, geometry)
        if not writeable:
            view.flags.writeable = False
        return view  # type: ignore[no-any-return]
    held = np.asarray(Lent(start, geometry, not writeable, source))
    return held.view(geometry.dtype)


def built(kind: type, memory: Array, offset: int, geometry: Geometry) -> Any:
    """An array of a class over bytes."""
    if geometry.dtype.itemsize == 0 or memory.nbytes == 0:  # there is nothing to lie within
        return np.asarray(Lent(address(memory), geometry, False, memory)).view(geometry.dtype).view(kind)
    offset = 0 if 0 in geometry.shape else offset  # no byte is touched
    return np.ndarray.__new__(
        kind, geometry.shape, geometry.dtype, buffer=memory, offset=offset, strides=geometry.strides
    )


# Groups


@dataclass(frozen=True)
class Member:
    """One array of a group: its number among the distinct arrays, the bytes from the group's lowest address to its first element."""

    number: int
    offset: int
    geometry: Geometry
    writeable: bool
    low: int  #: its own lowest byte, from the group's
    high: int  #: the end of its bytes


@dataclass(frozen=True)
class Group:
    """Arrays that share bytes, directly or through others; most groups have one member."""

    members: tuple[Member, ...]
    size: int  #: from the lowest byte to the end of the highest
    align: int  #: the lowest address modulo LINE
    owner: int | None  #: which member owns the memory, all of it
    frozen: bool  #: nobody can write it, not even after asking for it
    cover: tuple[int, ...]  #: members that together show every byte that some member shows

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        return tuple(m.number for m in self.members)

    def nearest(self, low: int, high: int) -> Member:
        """The smallest member that has the bytes from `low` to `high`; where none has them all, the first that has some, else the first."""
        fits = [m for m in self.members if m.low <= low and high <= m.high]
        if fits:
            return min(fits, key=lambda m: m.high - m.low)
        meets = [m for m in self.members if m.low < high and low < m.high]
        return (meets or self.members)[0]


@dataclass(frozen=True)
class Plan:
    """How private memory is laid out for arrays of one layout."""

    groups: tuple[Group, ...]
    where: tuple[tuple[int, int], ...]  #: for each array its group and its place there


def plan(arrays: Sequence[Array], components: Iterable[Sequence[int]]) -> Plan:
    """The plan for distinct arrays; `components` are the sets of those that share bytes."""
    groups, where = [], [(0, 0)] * len(arrays)
    for number, indices in enumerate(components):
        group = group_of([(i, arrays[i]) for i in indices])
        groups.append(group)
        for place, member in enumerate(group.members):
            where[member.number] = (number, place)
    return Plan(tuple(groups), tuple(where))


def group_of(arrays: Sequence[tuple[int, Array]]) -> Group:
    """One group of numbered arrays."""
    found = []
    for number, array in arrays:
        geometry, start = Geometry.of(array), address(array)
        down, up = geometry.reach()
        found.append((number, array, geometry, start, start + down, start + up))
    low, high = min(f[4] for f in found), max(f[5] for f in found)
    members = tuple(Member(n, s - low, g, a.flags.writeable, lo - low, hi - low) for n, a, g, s, lo, hi in found)
    size = high - low
    whole = [k for k, m in enumerate(members) if m.geometry.gapless and m.high - m.low == size]
    owner = next((k for k in whole if owns(found[k][1])), None)
    cover = tuple(whole[:1]) if whole else tuple(range(len(members)))
    frozen = not any(m.writeable or can_be_thawed(f[1]) for m, f in zip(members, found, strict=True))
    return Group(members, size, low % LINE, owner, frozen, cover)


def owns(array: Array) -> bool:
    """Whether an array owns its memory and can be made anew as one that does."""
    if not array.flags.owndata:
        return False
    if array.size and array.dtype.itemsize:
        return all(s > 0 for n, s in zip(array.shape, array.strides, strict=True) if n != 1)
    return np.empty(array.shape, array.dtype).strides == array.strides


# A run in private memory


class World:
    """Private copies of distinct arrays, for one run; see the top of this file.

    `arrays`: the caller's. `private`: the copies, each an instance of `kind`. Groups in `lent` are not copied: their arrays are the caller's own.
    """

    def __init__(
        self, plan: Plan, arrays: Sequence[Array], kind: type = np.ndarray, lent: frozenset[int] = frozenset()
    ) -> None:
        self.plan, self.arrays, self.lent = plan, arrays, lent
        self.private: list[Any] = [None] * len(arrays)
        self.windows: list[tuple[Array, Array] | None] = [None] * len(arrays)  #: of each array its (private, caller's) bits
        self.lows: list[int] = []  #: where each group's private memory begins
        self.roots: dict[int, int] = {}  #: whose root belongs to which group
        for number, group in enumerate(plan.groups):
            if number in lent:
                self._lend(group)
            else:
                self._copy(number, group, kind)
        self.flags = [p.flags.writeable for p in self.private]

    def _lend(self, group: Group) -> None:
        for m in group.members:
            self.private[m.number] = self.arrays[m.number]
        self.lows.append(-1)

    def _copy(self, number: int, group: Group, kind: type) -> None:
        root, memory = memory_for(group, kind)
        for place, m in enumerate(group.members):
            self.private[m.number] = root if place == group.owner else built(kind, memory, m.offset, m.geometry)
            self.windows[m.number] = words(plain(self.private[m.number])), words(self.arrays[m.number])
        for mine, its in self.covering(group):
            mine[...] = its
        for m in group.members:
            if not m.writeable:
                self.private[m.number].flags.writeable = False
        if group.frozen:
            root.flags.writeable = memory.flags.writeable = False
        self.roots[id(root)] = number
        first = group.members[0]
        self.lows.append(address(self.private[first.number]) - first.offset)

    def span(self, number: int) -> tuple[int, int]:
        """Where a group's private memory begins and ends."""
        return self.lows[number], self.lows[number] + max(self.plan.groups[number].size, 1)

    # What came of it

    def resized(self, number: int) -> bool:
        """Whether a group's owner was given other memory: `x.resize`."""
        group = self.plan.groups[number]
        if group.owner is None or number in self.lent:
            return False
        array = self.private[group.members[group.owner].number]
        return bool(array.nbytes != group.size or address(array) != self.lows[number])

    def covering(self, group: Group) -> Iterable[tuple[Array, Array]]:
        """(private, caller's) bits of members that together show all."""
        found = (self.windows[group.members[place].number] for place in group.cover)
        return (pair for pair in found if pair is not None)

    def written(self, number: int) -> bool:
        """Whether a byte of a group differs from the caller's."""
        return any(not same(mine, its) for mine, its in self.covering(self.plan.groups[number]))

    def member_written(self, index: int) -> bool:
        """Whether a byte of one array differs from the caller's."""
        pair = self.windows[index]
        return pair is not None and not same(*pair)

    def as_it_was(self, index: int) -> Array:
        """A private array in the geometry that it had before the run, whatever it has now."""
        pair, (group, place) = self.windows[index], self.plan.where[index]
        geometry = self.plan.groups[group].members[place].geometry
        if pair is None or geometry.dtype.itemsize == 0:
            return plain(self.private[index])
        view = pair[0].view(geometry.dtype)
        return view if view.ndim == len(geometry.shape) else view[..., 0]

    def group_at(self, array: Array) -> int | None:
        """The group in whose memory an array lies, if it does."""
        link: Any = array
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
        for number, (low, high) in enumerate(map(self.span, range(len(self.lows)))):
            if low <= start < high and number not in self.lent:
                return number
        return None

    # Going home

    def home(self, number: int, array: Array) -> Array:
        """The view of the caller's memory that is to the caller what `array` is to the private memory of a group."""
        group = self.plan.groups[number]
        geometry = Geometry.of(array)
        if self.resized(number):
            mine, its = (s[group.members[0].number] for s in (self.private, self.arrays))
            start, source = address(its) + address(array) - address(mine), its
        else:
            offset = address(array) - self.lows[number]
            down, up = geometry.reach()
            m = group.nearest(offset + down, offset + up)
            source = self.arrays[m.number]
            start = address(source) - m.offset + offset
        return view_at(start, geometry, array.flags.writeable, source)

    def destinations(self, number: int, name: Name) -> list[tuple[Array, Array]]:
        """(private bits, the caller's bits, which can be written) of a group that was written. ValueError where it is memory that nobody may write."""
        group = self.plan.groups[number]
        if group.frozen:
            at = name(group.members[0].number)
            raise ValueError(f"{at} was written, but its memory is read-only: expected a function that does not, or pass a copy")
        return [(mine, opened(its)) for mine, its in self.covering(group)]


def memory_for(group: Group, kind: type) -> tuple[Any, Array]:
    """(the array at the root of a group's private memory, its bytes from the group's lowest on)."""
    if group.owner is not None:
        g = group.members[group.owner].geometry
        root = np.ndarray.__new__(kind, g.shape, g.dtype, strides=g.strides if 0 not in g.shape else None)
        if len(group.members) == 1:
            return root, root
        return root, flat_bytes(plain(root))
    size = max(group.size, 1)
    memory = np.empty(size + LINE, "u1")
    start = (group.align - address(memory)) % LINE
    return memory, memory[start : start + size]


def plain(array: Any) -> Array:
    """The array as NumPy's own class."""
    result: Array = array if type(array) is np.ndarray else array.view(np.ndarray)
    return result


#: Larger windows are compared piece by piece: the first piece that differs ends it.
PIECE = 1 << 16


def same(mine: Array, its: Array) -> bool:
    """Whether two windows show the same bits."""
    if mine.size <= PIECE or not (mine.flags.c_contiguous and its.flags.c_contiguous):
        return not (mine != its).any()
    mine, its = mine.reshape(-1), its.reshape(-1)
    pieces = range(0, mine.size, PIECE)
    return not any((mine[i : i + PIECE] != its[i : i + PIECE]).any() for i in pieces)


def take_geometry(array: Array, wanted: Geometry) -> bool:
    """Give an array another shape, dtype and strides over the memory that it has; False where no order of assignments leads there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        first = Geometry.of(array)
        for steps in (("dtype", "shape", "strides"), ("flat", "dtype", "shape", "strides"), ("shape", "strides", "dtype", "shape", "strides")):
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
