"""The arrays of one run: detects what the function changed, and restores it.

`functionalize` passes the caller's own arrays to the function, so writes and results are those of a plain call. Where
the function raises, or differs from the record, the undo restores bytes from a snapshot, geometry, flags, sizes, and
the contents of lists and dicts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _core
from .._core import address
from .._words import type_of
from . import trees
from .memory import Snapshot
from .private_copies import REMADE, UNSIGNED, Array, Geometry, GroupMember, Plan, plain, root_of, take_geometry, view_at

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
        """Add a note to the function's error for each failed step."""
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
        """Where in the snapshot each array is."""
        return {u: k for k, u in enumerate(self.numbers)}

    # What came of it

    @functools.cached_property
    def elsewhere(self) -> list[int]:
        """The numbers of arrays that begin elsewhere, or have another geometry."""
        return [self.numbers[k] for k in self.snapshot.elsewhere()]

    @functools.cached_property
    def moved(self) -> list[int]:
        """Arrays whose geometry is not what it was."""
        return [u for u in self.elsewhere if not self._member(u).geometry.fits(self.arrays[u])]

    @functools.cached_property
    def flags_changed(self) -> list[int]:
        """Arrays that could be written and no longer can, or the other way round."""
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
        """The address of an array's first element."""
        return address(o)

    def is_array(self, o: object) -> bool:
        """Whether an output is an array."""
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
        """Groups with a changed byte."""
        return sorted({self.plan.where[u].group for u in self.changed})

    @functools.cached_property
    def lows(self) -> dict[int, int]:
        """Where the memory of each group begins."""
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
        """Where a group's memory begins and ends."""
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
        """Leave the arrays as they were."""
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
        """Restore the contents of each."""
        for held, items in self.lists:
            if not trees.same_items(held, items):
                held[:] = items
        for named, values in self.dicts:
            if not trees.same_items(named, values):
                named.clear()
                named.update(values)
