"""Makes private memory in which a function runs instead of in the caller's.

Arrays that share bytes form a *group*. Each group gets memory of its own, of the same extent and the same alignment, in
which every array is rebuilt at its own place, with its own strides, dtype and flags: a write to one shows in the
others, as in the caller's. An array that owns its memory is rebuilt as one that does. Only bytes that some array shows
are read and written; bytes between them are not.

    caller      |--- x ---|          |- z -|
                     |--- y ---|
    private     |--- x' --|          |- z'-|      groups (x, y) and (z)
                     |--- y' --|

After the run the private bytes are compared with a snapshot: bytes that differ were written, by whatever route. Bits
are compared, not values: NaNs, signs of zero and padding count.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._core import address, restride
from .._interop.protocols import DType, NDArray
from .._words import type_of
from . import trees
from .memory import Snapshot

__tracebackhide__ = True  # no frames of ours in reports of pytest

Array = NDArray

UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}

#: Private memory begins where the caller's does modulo this.
LINE = 64

#: Classes of which a view is made anew by `view`.
REMADE = (np.matrix, np.recarray)


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
    """Facts of a group that are no part of its layout, and are read in each call."""

    low: int  #: the lowest address
    owner: int | None  #: which member owns the memory
    frozen: bool  #: read-only, and cannot be made writable


@dataclass(frozen=True)
class Group:
    """Arrays that share bytes, directly or through others; most groups have one member."""

    members: tuple[GroupMember, ...]
    size: int  #: from the lowest byte to the end of the highest
    cover: tuple[int, ...]  #: members that together show every byte that some member shows
    whole: tuple[int, ...]  #: members that can be rebuilt as arrays that own the memory, all of it
    writeable: bool  #: all members can be written
    flags: GroupFlags  #: of the planned call

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
    cover = tuple(full[:1]) if full else tuple(range(len(members)))
    writeable = all(m.writeable for m in members)
    flags = GroupFlags(low, owner_of(members, whole, dict(arrays)), frozen(members, dict(arrays)))
    return Group(members, size, cover, whole, writeable, flags)


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
    """Whether no member can be written, not even after it is made writable."""
    return not any(can_be_made_writeable(arrays[m.number]) for m in members)


# Private copies


def private_copies(plan: Plan, arrays: Sequence[Array], kind: type = np.ndarray, recorded: bool = False) -> list[Array]:
    """Private copies of distinct arrays, instances of `kind`; see the top of this file.

    `recorded`: the arrays may be anywhere; alignment, ownership and what can be written are those of the planned call.
    """
    private = list(arrays)
    around = Surroundings(plan, arrays) if recorded and kind is np.ndarray else None
    for group in plan.groups:
        flags, members = group.flags, group.members
        if not recorded:
            flags = GroupFlags(
                address(arrays[members[0].number]) - members[0].offset,
                owner_of(members, group.whole, arrays),
                not group.writeable and frozen(members, arrays),
            )
        if flags.owner is not None:
            g = members[flags.owner].geometry
            root: Array = np.ndarray.__new__(kind, g.shape, g.dtype, strides=g.strides if 0 not in g.shape else None)
            memory = flat_bytes(plain(root)).view(kind) if len(members) > 1 else root
        elif around is not None and not flags.frozen and (found := around.memory(group)) is not None:
            root = memory = found
        else:
            size = max(group.size, 1)
            root = np.empty(size + LINE, "u1")
            shift = (flags.low - address(root)) % LINE
            # Of the private class: NumPy keeps a private array as the base of what it strips of that class.
            memory = root[shift : shift + size].view(kind)
        for place, m in enumerate(members):
            private[m.number] = root if place == flags.owner else built(kind, memory, m.offset, m.geometry)
        for place in group.cover:
            number = members[place].number
            words(each_byte_once(plain(private[number])))[...] = words(each_byte_once(arrays[number]))
        for m in members:
            if not m.writeable:
                private[m.number].flags.writeable = False
        link: object = memory
        while flags.frozen and isinstance(link, np.ndarray):
            # NumPy lets a view be made writable where any of the arrays that it is a view of is writable.
            link.flags.writeable = False
            link = link.base
    return private


#: The array around arguments is copied where it has at most so many bytes, or four times those of the arguments.
NEAR = 1 << 20


class Surroundings:
    """Copies of the arrays that arguments are views of: a function may read there (`x.base`, `as_strided`)."""

    def __init__(self, plan: Plan, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self.roots = [owner_of_view(a) for a in arrays]
        self.sizes: Counter[int] = Counter()  # bytes of the arguments on each root, by identity
        for group in plan.groups:
            self.sizes[id(self.roots[group.numbers[0]])] += group.size
        self.copies: dict[int, Array] = {}

    def memory(self, group: Group) -> Array | None:
        """Bytes for a group within the copy of its root; None where it is all of that, or the root is far larger."""
        root, member = self.roots[group.numbers[0]], group.members[0]
        if any(self.roots[u] is not root for u in group.numbers) or group.size == root.nbytes:
            return None
        start = address(self.arrays[member.number]) - member.offset - address(root)
        geometry, copied = Geometry.of(root), root.nbytes <= max(NEAR, 4 * self.sizes[id(root)])
        if not copied or start < 0 or start + group.size > root.nbytes or not group.size:
            return None
        if root.dtype.hasobject or not geometry.gapless or not reproducible(geometry):
            return None
        if id(root) not in self.copies:
            copy: Array = np.ndarray.__new__(np.ndarray, geometry.shape, geometry.dtype, strides=geometry.strides)
            flat_bytes(copy)[...] = flat_bytes(plain(root))
            self.copies[id(root)] = copy
        return flat_bytes(self.copies[id(root)])[start : start + group.size]


def owner_of_view(array: Array) -> Array:
    """The array that a view is of, also through a view that `view_at` made."""
    found, link = array, array.base
    while isinstance(link, (np.ndarray, MemoryAt)):
        if isinstance(link, np.ndarray):
            found = link
        link = link.base if isinstance(link, np.ndarray) else link.owner
    return found


def read_only(name: str) -> ValueError:
    return ValueError(
        f"{name} was written, but its memory is read-only: expected a function that does not, or pass a copy"
    )


def plain(array: Any) -> Array:
    """The array as NumPy's own class."""
    result: Array = array if type(array) is np.ndarray else np.ndarray.view(array, np.ndarray)
    return result


Step = Callable[[], object]


def run_steps(steps: Iterable[Step]) -> None:
    """Call functions of C, one after the other, in one call of C. Python runs signal handlers between its own
    instructions only; so an interrupt comes before the first step or after the last.
    """
    deque(map(operator.call, steps), maxlen=0)


def geometry_steps(array: Array, wanted: Geometry) -> list[Step]:
    """The steps that give an array another shape, dtype and strides over the memory that it has. It is made contiguous
    before: strides of 0, for example, hide memory from assignments.
    """
    of_c = [array.itemsize * math.prod(max(n, 1) for n in array.shape[d + 1 :]) for d in range(array.ndim)]
    steps: list[Step] = [
        functools.partial(restride, array, tuple(of_c)),
        functools.partial(setattr, array, "shape", (array.size,)),
    ]
    if array.dtype != wanted.dtype:
        steps.append(functools.partial(setattr, array, "dtype", wanted.dtype))
    return [
        *steps,
        functools.partial(setattr, array, "shape", wanted.shape),
        functools.partial(restride, array, wanted.strides),
    ]


def take_geometry(array: Array, wanted: Geometry) -> None:
    """Give an array a geometry over the memory that it has."""
    with quiet_shapes():
        run_steps(geometry_steps(array, wanted))


@contextlib.contextmanager
def quiet_shapes() -> Iterator[None]:
    """Without NumPy's warning of an assignment to `.shape`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


# The arrays of one run: what the function changed, and what restores it. `functionalize` passes the caller's own arrays
# to the function, so writes and results are those of a plain call. Where the function raises, or differs from the
# record, the undo restores bytes from a snapshot, geometry, flags, sizes, and the contents of lists and dicts.


#: No array reaches farther, in bytes: addresses have fewer bits.
FARTHEST = 1 << 57


def check_reach(geometry: Geometry, name: Callable[[], str]) -> None:
    """ValueError for an array that reaches farther than there can be memory."""
    down, up = geometry.reach()
    if up - down > FARTHEST:
        raise ValueError(
            f"{name()}: expected an array within memory, got strides {geometry.strides} that reach {up - down} bytes"
        )


class Lost:
    """Collects the errors of an undo, which continues where a step fails."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple[int, str], Exception]] = []

    def unless(self, name: tuple[int, str], step: Callable[..., object], *args: object) -> None:
        """Run one step. `name`: the array's number, and a format of the part that the step restores."""
        try:
            step(*args)
        except Exception as e:
            self.found.append((name, e))

    def note(self, error: BaseException, named: Callable[[int], str]) -> None:
        for (u, what), e in self.found:
            error.add_note(f"functionalize: {what.format(named(u))} could not be put back: {type(e).__name__}: {e}")


class RunArrays:
    """The arrays that a function is given in one run, what became of them, and what puts them back.

    `plan`: how they lie. `arrays`: the caller's own, or private copies. `copied`: the groups that are kept (None: all).
    """

    @staticmethod
    def check(array: Array, name: Callable[[], str]) -> None:
        """TypeError for an array that cannot be rebuilt from its bytes."""
        if type(array) is not np.ndarray:
            raise TypeError(
                f"{name()}: expected a plain ndarray, got {type_of(array)}, whose class may keep more than its"
                " memory: pass np.asarray(x)"
            )
        if array.dtype.hasobject:
            raise TypeError(
                f"{name()}: expected an array of numbers, strings, dates, or records of them, got dtype {array.dtype}:"
                " its elements live outside of it"
            )
        check_reach(Geometry.of(array), name)

    @staticmethod
    def check_again(arrays: Sequence[Any], name: Callable[[int], str]) -> None:
        """Check what a layout does not have, at a later call."""

    def __init__(self, plan: Plan, arrays: Sequence[Any], copied: Sequence[int] | None = None) -> None:
        self.plan, self.arrays = plan, arrays
        self.copied: Sequence[int] = range(len(plan.groups)) if copied is None else copied
        #: the arrays that are kept, by number, in the order of the snapshot
        self.numbers: Sequence[int] = (
            range(len(arrays)) if copied is None else [u for g in copied for u in plan.groups[g].numbers]
        )
        self.snapshot = Snapshot(arrays if copied is None else [arrays[u] for u in self.numbers])
        self._keep_owners()

    def _keep_owners(self) -> None:
        """Keep the owner of each view's memory, and the names of fields."""
        #: by the number of a view: the array that owns its memory, where that lay, and its size
        self.roots: dict[int, tuple[Array, int, int]] = {}
        #: the dtypes with fields, which are objects that can be written, and the names of their fields
        self.names_of_fields: list[tuple[np.dtype, tuple[str, ...]]] = []
        for u in self.numbers:
            array = self.arrays[u]
            if array.base is not None and (root := root_of(array)).flags.owndata:
                self.roots[u] = root, address(root), root.nbytes
            if array.dtype.names is not None:
                self.names_of_fields += fields_of(array.dtype)

    @functools.cached_property
    def at(self) -> dict[int, int]:
        return {u: k for k, u in enumerate(self.numbers)}

    # What came of it

    @functools.cached_property
    def elsewhere(self) -> list[int]:
        return [self.numbers[k] for k in self.snapshot.elsewhere()]

    @functools.cached_property
    def moved(self) -> list[int]:
        """Arrays whose geometry is not what it was."""
        return [u for u in self.elsewhere if not self._member(u).geometry.fits(self.arrays[u])]

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        return [u for u in self.numbers if self.arrays[u].flags.writeable != self._member(u).writeable]

    def as_it_was(self, u: int) -> Array:
        """An array that is no caller's, in the geometry that it had."""
        array, geometry = self.arrays[u], self._member(u).geometry
        if geometry.fits(array):
            return plain(array)
        if not geometry.dtype.itemsize:
            return np.empty(geometry.shape, geometry.dtype)  # without a byte one is like another
        return view_at(self.snapshot.data(self.at[u]), geometry, array.flags.writeable, plain(array))

    # What tensors do otherwise

    def geometry(self, o: Any) -> Geometry:
        return Geometry.of(o)

    def begin(self, o: Any) -> int:
        return address(o)

    def is_array(self, o: object) -> bool:
        return isinstance(o, np.ndarray)

    def remakeable(self, o: object) -> bool:
        """Whether an output is all in its memory and geometry."""
        return type(o) is np.ndarray or type(o) in REMADE

    def _member(self, u: int) -> GroupMember:
        group, place = self.plan.where[u]
        return self.plan.groups[group].members[place]

    @functools.cached_property
    def resized(self) -> frozenset[int]:
        """Groups whose memory was reallocated (`x.resize`)."""
        return frozenset(self.owners)

    def _owner(self, number: int) -> GroupMember | None:
        """The member of a group that was resized."""
        group = self.plan.groups[number]
        for place in group.whole:
            m = group.members[place]
            array = self.arrays[m.number]
            if array.flags.owndata and (
                address(array) != self.snapshot.data(self.at[m.number]) or array.nbytes != group.size
            ):
                return m
        return None

    @functools.cached_property
    def owners(self) -> dict[int, GroupMember]:
        """Of each group that was resized the member that owns its memory."""
        near = {self.plan.where[u].group for u in self.elsewhere}
        return {g: m for g in near if (m := self._owner(g)) is not None}

    @functools.cached_property
    def gone(self) -> frozenset[int]:
        """Views whose owner, no argument itself, was resized: their memory must not be read."""
        gone = [u for u, (root, data, size) in self.roots.items() if address(root) != data or root.nbytes != size]
        return frozenset(u for u in gone if self.plan.where[u].group not in self.resized)

    @functools.cached_property
    def changed(self) -> frozenset[int]:
        """Arrays with a changed or freed byte."""
        lost = {u for g in self.resized for u in self.plan.groups[g].numbers} | self.gone
        which = [k for u, k in self.at.items() if u not in lost] if lost else None
        return self.gone.union(self.numbers[k] for k in self.snapshot.changed(which))

    @functools.cached_property
    def written(self) -> list[int]:
        return sorted({self.plan.where[u].group for u in self.changed})

    @functools.cached_property
    def lows(self) -> dict[int, int]:
        found = {}
        for g in self.copied:
            owner = self.owners.get(g)
            found[g] = self.began(g) if owner is None else self.begin(self.arrays[owner.number])
        return found

    def began(self, number: int) -> int:
        """Where a group's memory began before the run."""
        first = self.plan.groups[number].members[0]
        return self.snapshot.data(self.at[first.number]) - first.offset

    def span(self, number: int) -> tuple[int, int]:
        size = self.plan.groups[number].size
        if number in self.resized:
            size = self.arrays[self.owners[number].number].nbytes
        return self.lows[number], self.lows[number] + max(size, 1)

    def group_at(self, array: Any) -> int | None:
        """The group in whose memory an array lies, if it does."""
        start, geometry = self.begin(array), self.geometry(array)
        down, up = geometry.reach()
        near = [g for g in self.copied if self.span(g)[0] <= start < self.span(g)[1]]
        if up == 0:  # no byte: where it would lie is all there is
            return near[0] if near else None
        near = [g for g in self.copied if start + down < self.span(g)[1] and self.span(g)[0] < start + up]
        plain = (
            array.view(type=np.ndarray)
            if type(array) not in (np.ndarray, *REMADE) and isinstance(array, np.ndarray)
            else array
        )
        for g in near:
            if g in self.resized or any(_core.overlap(plain, self.arrays[u]) for u in self.plan.groups[g].numbers):
                return g
        return None

    # Putting back

    def undo(self) -> Lost:
        lost = Lost()
        for descr, names in self.names_of_fields:
            if descr.names != names:
                descr.names = names
        for m in self.owners.values():
            lost.unless((m.number, "{}"), self._shrink, m)
        for g in self.copied:
            for m in self.plan.groups[g].members:
                lost.unless((m.number, "{}"), self._undo_one, m, self.owners.get(g))
        return lost

    def _shrink(self, m: GroupMember) -> None:
        """Give an array that was resized memory of the size that it had."""
        array = self.arrays[m.number]
        take_geometry(array, Geometry((array.nbytes,), (1,), UNSIGNED[1]))
        array.resize(math.prod(m.geometry.shape) * m.geometry.dtype.itemsize, refcheck=False)

    def _undo_one(self, m: GroupMember, owner: GroupMember | None) -> None:
        """Put back one array; `owner`: the one that owns its memory, where that was resized."""
        array = self.arrays[m.number]
        if m.number in self.gone:
            raise RuntimeError("the function resized the array that owns its memory, which is gone")
        if not m.geometry.fits(array):
            take_geometry(array, m.geometry)
        if owner is None or m is owner:
            where = None if owner is None else address(array)
            self.snapshot.restore(self.at[m.number], where)
        if array.flags.writeable != m.writeable:
            array.flags.writeable = m.writeable


def fields_of(descr: np.dtype) -> list[tuple[np.dtype, tuple[str, ...]]]:
    """A dtype with fields and those inside it, and the names of their fields."""
    inner = [part for name in descr.names or () for part in fields_of(descr[name].base)]
    return [(descr, descr.names), *inner] if descr.names is not None else inner


class CallerContainers:
    """The contents of the lists and dicts among some arguments, to restore them."""

    def __init__(self, *given: object) -> None:
        every = {id(node): node for node in trees.containers(given)}.values()
        self.lists = [(node, list(node)) for node in every if isinstance(node, list)]
        self.dicts = [(node, dict(node)) for node in every if isinstance(node, dict)]

    def changed(self) -> bool:
        """Whether one of them holds other things than at first, or in another order."""
        return any(not trees.same_items(node, first) for node, first in (*self.lists, *self.dicts))

    def undo(self) -> None:
        for held, items in self.lists:
            if not trees.same_items(held, items):
                held[:] = items
        for named, values in self.dicts:
            if not trees.same_items(named, values):
                named.clear()
                named.update(values)
