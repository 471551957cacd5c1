"""The pure function of a layout: it takes distinct arguments and bases, writes none of them, and returns what was
written as new values.

    inputs     [a base for each group of two or more arrays of which one is written]
               + [all other leaves, each array once]
    outputs    [the new value of each input that was written or whose geometry changed]
               + [the function's outputs]
               + [each array of a base whose geometry changed]
               + [bases that several outputs share]

The new value of an input has the shape that it had before; geometry that changes is fixed by the layout, and changed by
the wrapper. A base is one axis of bytes, from the lowest byte of its group to the highest; so members of different
dtypes need nothing special. The new value of a base is a new base. Descriptors (`input_descs`, `output_descs`) name
each slot.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from .._core import address
from .._interop.protocols import DType
from .._words import counted, type_of
from . import trees
from .arrays import (
    Array,
    CallerContainers,
    Geometry,
    Group,
    GroupFlags,
    Plan,
    Position,
    RunArrays,
    Step,
    built,
    can_be_made_writeable,
    each_byte_once,
    geometry_steps,
    private_copies,
    quiet_shapes,
    read_only,
    run_steps,
    view_at,
    words,
    writeable_window,
)
from .calls import Behaviour, Outcome, Place, behaviour_of, check_hidden, deviation, outcome_of
from .descriptors import (
    AOTInput,
    AOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SyntheticBaseAOTInput,
)
from .guards import Guard
from .records import BaseInfo, GraphNames, ViewAndMutationMeta, create_synthetic_base_metadata, remove_dupe_metadata

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass(frozen=True)
class Source:
    """Where an array is found among the inner arguments: by itself at a position, or in the base there, at a place of
    its group.
    """

    position: int
    place: int | None = None


def crowded(array: Array, geometry: Geometry, name: str) -> Array:
    """The values of an array in a geometry in which several elements are one. ValueError where those differ."""
    down, up = geometry.reach()
    memory = np.zeros(up - down, "u1")
    made = np.ndarray(geometry.shape, geometry.dtype, memory, -down, geometry.strides)
    made[...] = array
    if made.tobytes() != array.tobytes():
        raise ValueError(
            f"pure: {name}: expected an array whose elements are equal where they were one at the recorded call, of"
            f" strides {geometry.strides}; got other values in one of strides {array.strides}"
        )
    return made


class Pure:
    """A pure function of flat arguments; see the top of the module `fanin.analysis.pure` and `functionalize`.

    `meta`: the metadata of the function it was made of, which counts *its* leaves. `input_descs`, `output_descs`: what
    each slot is.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        plan: Plan,
        guard: Guard,
        order: Sequence[str],
        meta: ViewAndMutationMeta,
        outcome: Outcome,
        touched: frozenset[int],
    ) -> None:
        self.fn, self.plan, self.index, self.form, self.first = fn, plan, guard.index, guard.form, guard.first
        #: what the recorded call did, and which arrays it or another call wrote
        self.meta, self.outcome, self.touched = meta, outcome, touched
        #: the arguments by name, in the order of the call: the function may read it
        self.order = order
        self.moved = dict(outcome.geometry)
        groups = self.plan.groups
        written = {self.plan.where[u].group for u in self.touched}
        self.bases = [g for g, group in enumerate(groups) if len(group.members) > 1 and g in written]
        self.bases.sort(key=lambda g: min(self.first[u] for u in groups[g].numbers))
        in_base = {u: Source(k, place) for k, g in enumerate(self.bases) for place, u in enumerate(groups[g].numbers)}
        #: the leaves that are passed as they are
        self.rest = [i for i, u in enumerate(self.index) if u is None or (u not in in_base and self.first[u] == i)]
        self.positions = {i: len(self.bases) + k for k, i in enumerate(self.rest)}
        numbers = range(len(self.first))
        self.sources = [in_base[u] if u in in_base else Source(self.positions[self.first[u]]) for u in numbers]
        #: inputs with new values
        self.changed = [u for u in numbers if u not in in_base and (u in self.touched or u in self.moved)]
        #: arrays of bases whose geometry changed
        self.late = [u for u in numbers if u in in_base and u in self.moved]
        #: arrays of which a run may change bytes
        self.may_write = self.touched.union(in_base)
        self.split = split(self.plan, set(self.bases))

    def __repr__(self) -> str:
        takes, gives = (", ".join(d.expr() for d in some) for some in (self.input_descs, self.output_descs))
        return f"<pure {getattr(self.fn, '__name__', self.fn)}: ({takes}) -> ({gives})>"

    @functools.cached_property
    def input_descs(self) -> tuple[AOTInput, ...]:
        """What each argument is."""
        named = [min(self.first[u] for u in self.plan.groups[g].numbers) for g in self.bases]
        bases = [SyntheticBaseAOTInput(PlainAOTInput(i)) for i in named]
        return (*bases, *(PlainAOTInput(i) for i in self.rest))

    @functools.cached_property
    def output_descs(self) -> tuple[AOTOutput, ...]:
        """What each returned value is."""
        late = [MetadataMutationAOTOutput(k) for k in range(len(self.late))]
        shared = [
            next(j for j, p in enumerate(self.outcome.places) if p.kind == "shared" and p.base == k)
            for k in range(self.num_bases)
        ]
        return (
            *(InputMutationAOTOutput(d) for d in self.input_descs[: len(self.bases)]),
            *(InputMutationAOTOutput(PlainAOTInput(self.first[u])) for u in self.changed),
            *(PlainAOTOutput(j) for j in range(len(self.outcome.places))),
            *late,
            *(IntermediateBaseAOTOutput(PlainAOTOutput(j)) for j in shared),
        )

    @functools.cached_property
    def names(self) -> GraphNames:
        """The names of the slots for `create_graph_signature`: `expr()` of each descriptor."""
        return GraphNames(tuple(d.expr() for d in self.input_descs), tuple(d.expr() for d in self.output_descs))

    @functools.cached_property
    def inner_meta(self) -> ViewAndMutationMeta:
        """The metadata of the pure function: without duplicates, with bases in the place of views
        (`remove_dupe_metadata`, `create_synthetic_base_metadata`).
        """
        if not self.index:
            return self.meta
        mask = [u is None or self.first[u] == i for i, u in enumerate(self.index)]
        kept = [i for i, keep in enumerate(mask) if keep]
        at = {i: k for k, i in enumerate(kept)}
        thin = remove_dupe_metadata(
            self.meta, mask, [at[i if u is None else self.first[u]] for i, u in enumerate(self.index)]
        )
        outer = [None if self.index[i] is None else self._stand_in(self.index[i]) for i in kept]
        inner: list[object] = [self._base_stand_in(g) for g in self.bases] + [outer[at[i]] for i in self.rest]
        info: list[BaseInfo] = []
        for i, array in zip(kept, outer, strict=True):
            u = self.index[i]
            source = Source(self.positions[i]) if u is None else self.sources[u]
            info.append(source.position if source.place is None else (source.position, array))
        return create_synthetic_base_metadata(thin, info, outer, inner, self.input_descs)[0]

    def _stand_in(self, number: int | None) -> Array:
        """An array of the shape and dtype of one of the arguments: nothing else of it is read."""
        group, place = self.plan.where[number or 0]
        geometry = self.plan.groups[group].members[place].geometry
        return np.empty(geometry.shape, geometry.dtype)

    def _base_stand_in(self, group: int) -> object:
        """The same of a base."""
        return np.empty(self.plan.groups[group].size, "u1")

    @property
    def num_bases(self) -> int:
        """How many bases of shared outputs are returned at the end."""
        return 1 + max((p.base for p in self.outcome.places if p.kind == "shared"), default=-1)

    # The wrapper's way in

    def inner(self, leaves: Sequence[object], arrays: Sequence[Array]) -> list[object]:
        """The inner arguments for the caller's own, without a copy: bases are read-only views."""
        return [*(base_of(self.plan.groups[g], arrays) for g in self.bases), *(leaves[i] for i in self.rest)]

    # The pure function

    def __call__(self, *inner: Any) -> list[Any]:
        """Run the function on copies. ValueError: more or fewer arguments, of other shapes or dtypes, than those of
        `input_descs`, or a function that does otherwise than at the recorded call.
        """
        arrays = self._arrays(inner)
        run = RunArrays(self.split, private_copies(self.split, arrays, recorded=True))
        it = iter([inner[self.positions[i]] if u is None else run.arrays[u] for i, u in enumerate(self.index)])
        args, kwargs = given = cast(trees.Arguments, trees.unflatten(self.form, it))
        containers = CallerContainers(given)
        result = self.fn(*args, **{k: kwargs[k] for k in self.order})
        if containers.changed():
            raise ValueError(
                "pure: the function changed a list or dict among its arguments: a pure function cannot; return what it"
                " should hold"
            )
        outputs: list[object] = []
        extra: list[Array] = []
        outcome = outcome_of(run, result, outputs, extra)
        check_hidden(run, outputs, "pure")
        self._hold(run, outcome)
        values = [new_base(self.plan.groups[g], inner[k], run) for k, g in enumerate(self.bases)]
        values += [run.as_it_was(u) if u in self.touched else run.arrays[u] for u in self.changed]
        return [*values, *outputs, *(run.arrays[u] for u in self.late), *extra]

    def _arrays(self, inner: Sequence[object]) -> list[Array]:
        """The arrays as the outer function has them: views of bases, and those that were passed as they are."""
        descs = self.input_descs
        if len(inner) != len(descs):
            raise ValueError(
                f"pure: expected {counted(len(descs), 'argument')}, {', '.join(d.expr() for d in descs)}; got"
                f" {len(inner)}"
            )
        found = []
        for u, source in enumerate(self.sources):
            array, place = inner[source.position], source.place
            group, member = self.plan.where[u]
            expected = self.plan.groups[group].members[member].geometry
            shape, dtype = (
                (expected.shape, expected.dtype) if place is None else ((self.plan.groups[group].size,), np.dtype("u1"))
            )
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
                got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type_of(array)
                raise ValueError(
                    f"pure: {descs[source.position].expr()}: expected an array of {dtype}, shape {shape}; got {got}"
                )
            if place is not None:
                array = member_at(self.plan.groups[group], place, array)
            elif expected.crowded and array.strides != expected.strides:
                array = crowded(array, expected, descs[source.position].expr())
            found.append(array)
        return found

    def _hold(self, run: RunArrays, outcome: Outcome) -> None:
        """ValueError where a run differs from the record."""
        roles = [role_of(p, self.plan, self.plan) for p in self.outcome.places]
        was = behaviour_of(self.outcome, self.may_write, roles)
        now = behaviour_of(outcome, run.changed, [role_of(p, self.plan, self.split) for p in outcome.places])
        self._compare(was, now)

    def _compare(self, was: Behaviour, now: Behaviour) -> None:
        found = deviation(was, now, self.first)
        if found is not None:
            raise ValueError(f"pure: {found[0]}")

    # The wrapper's way out

    def to_caller(
        self,
        arrays: Sequence[Array],
        values: object,
        given: Mapping[int, object] | None = None,
    ) -> object:
        """Apply the values of a pure run to the caller's arrays: writes, geometry, views.
        Returns the function's result, in which containers that were handed through, `given` by their places, are the
        caller's own.
        """
        if self.outcome.resized:
            raise ValueError(
                f"functionalize: {PlainAOTInput(self.first[self.outcome.resized[0]]).expr()} is resized: a compiled"
                " function cannot do that"
            )
        count = len(self.output_descs)
        expected = (
            f"functionalize: expected {counted(count, 'value')} of the compiled function,"
            f" {', '.join(d.expr() for d in self.output_descs)}"
        )
        if not isinstance(values, Sequence):
            raise TypeError(f"{expected}, as a list; got {type_of(values)}")
        if len(values) != count:
            raise ValueError(f"{expected}; got {len(values)}")
        values = list(values)  # a deque has no slices
        first = len(self.bases) + len(self.changed)
        end = first + len(self.outcome.places)
        news, outputs, bases = values[:first], values[first:end], values[end + len(self.late) :]
        moves = self._moves(arrays, news)
        outputs, bases = self._shared(outputs, bases)
        return trees.unflatten(self.outcome.form, iter(self._finish(arrays, moves, outputs, bases)), given)

    def _finish(
        self,
        arrays: Sequence[Array],
        moves: Sequence[tuple[Array, Array]],
        outputs: Sequence[object],
        bases: Sequence[Array],
    ) -> list[Any]:
        """Write new values, all of which were checked, give arrays the geometry and flags that they have afterwards,
        and return the outputs. An interrupt comes before all writes or after them.
        """
        steps: list[Step] = [functools.partial(operator.setitem, its, ..., mine) for mine, its in moves]
        for u, geometry in self.moved.items():
            steps += geometry_steps(arrays[u], geometry)
        for u, writeable in self.outcome.flags:
            steps.append(functools.partial(setattr, arrays[u].flags, "writeable", writeable))
        made = self._outputs(arrays, outputs, bases)
        with quiet_shapes() if self.moved else contextlib.nullcontext():
            run_steps(steps)
        return made

    def _moves(self, arrays: Sequence[Array], news: Sequence[object]) -> list[tuple[Array, Array]]:
        """(new bits, the caller's bits, which can be written) of everything that was written."""
        moves = []
        for k, g in enumerate(self.bases):
            group, name = self.plan.groups[g], self.output_descs[k].expr()
            if not group.writeable and not any(can_be_made_writeable(arrays[u]) for u in group.numbers):
                raise read_only(self.input_descs[k].expr())
            base = checked(news[k], (group.size,), np.dtype("u1"), name)
            for place in group.cover:
                its = words(each_byte_once(arrays[group.members[place].number]))
                moves.append((words(each_byte_once(member_at(group, place, base))), writeable_window(its)))
        for k, u in enumerate(self.changed, len(self.bases)):
            if u in self.touched:
                if not can_be_made_writeable(arrays[u]):
                    raise read_only(PlainAOTInput(self.first[u]).expr())
                group_number, place = self.plan.where[u]
                old = self.plan.groups[group_number].members[place].geometry
                value = checked(news[k], old.shape, old.dtype, self.output_descs[k].expr())
                moves.append((words(value), writeable_window(words(arrays[u]))))
        return moves

    def _shared(self, outputs: Sequence[object], bases: Sequence[object]) -> tuple[list[object], list[Array]]:
        """Outputs and extra bases of which views will be made, laid out as at the recorded call."""
        names = [d.expr() for d in self.output_descs]
        start = len(names) - len(bases)
        laid = list(outputs)
        for j in {p.base for p in self.outcome.places if p.kind == "output"}:
            geometry = self.outcome.places[j].geometry
            assert geometry is not None
            laid[j] = laid_out(outputs[j], geometry, names[len(self.bases) + len(self.changed) + j])
        return laid, [
            laid_out(b, g, names[start + k]) for k, (b, g) in enumerate(zip(bases, self.outcome.bases, strict=True))
        ]

    def _outputs(self, arrays: Sequence[Array], outputs: Sequence[object], bases: Sequence[Any]) -> list[Any]:
        """Each output: passed on, the caller's own array, or a view made anew."""
        made: list[Any] = list(outputs)
        roots: dict[int, Any] = {}  # what several views are of, and was made for them
        order = sorted(range(len(made)), key=lambda j: self.outcome.places[j].kind == "output")  # bases first
        for j in order:
            p = self.outcome.places[j]
            if p.same_as is not None and p.same_as < j:
                made[j] = made[p.same_as]
            elif p.kind == "input":
                made[j] = arrays[p.base]
            elif p.kind == "view":
                made[j] = self._view(arrays, j, made[j], roots)
            elif p.kind in ("output", "shared"):
                base: Array = made[p.base] if p.kind == "output" else bases[p.base]
                assert p.geometry is not None
                start = address(base) + Geometry.of(base).reach()[0]
                made[j] = view_at(start + p.offset, p.geometry, p.writeable, base)
            if p.cls is not None and type(made[j]) is not p.cls:
                made[j] = made[j].view(p.cls)
        return made

    def _view(self, arrays: Sequence[Array], output: int, value: object, roots: dict[int, Any]) -> object:
        """An output that is a view of an argument, of the caller's own array; `value`: what the run returned."""
        p = self.outcome.places[output]
        assert p.geometry is not None
        group, place = self.plan.where[p.base]
        m = self.plan.groups[group].members[place]
        return view_at(address(arrays[p.base]) - m.offset + p.offset, p.geometry, p.writeable, arrays[p.base])


def checked(value: object, shape: tuple[int, ...], dtype: DType, name: str) -> Array:
    """A value that a compiled function returned, as an ndarray; ValueError for another shape or dtype."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"functionalize: {name}: expected {dtype}, shape {shape}; the compiled function returned {array.dtype},"
            f" shape {array.shape}"
        )
    return array


def laid_out(value: object, geometry: Geometry, name: str) -> Array:
    """The same in a geometry: a copy, where it has another one."""
    array = checked(value, geometry.shape, geometry.dtype, name)
    if array.strides == geometry.strides:
        return array
    down, up = geometry.reach()
    copy: Array = built(np.ndarray, np.empty(up - down, "u1"), -down, geometry)
    words(copy)[...] = words(array)
    return copy


def role_of(p: Place, plan: Plan, run: Plan | None = None) -> Place:
    """What of a place is compared between two runs (`Behaviour`). `run`: the plan of the run, where places and geometry
    within the memory are compared, too.
    """
    base = plan.groups[plan.where[p.base].group].numbers[0] if p.kind in ("input", "view") else p.base
    if run is None:
        return Place(p.kind, p.base if p.kind == "input" else base, same_as=p.same_as)
    if p.kind == "plain":
        return Place(p.kind, array=p.array)
    offset = p.offset
    if p.kind == "view" and len(run.groups[run.where[p.base].group].members) == 1:
        group, place = plan.where[p.base]
        offset += plan.groups[group].members[place].low if run is not plan else 0
    base = p.base if p.kind == "input" else base
    return Place(p.kind, base, offset, p.geometry, p.writeable, same_as=p.same_as)


def split(plan: Plan, merged: set[int]) -> Plan:
    """A plan in which only some groups stay together: arrays of the others are passed one by one, and may lie
    anywhere.
    """
    groups: list[Group] = []
    where = list(plan.where)
    for g, group in enumerate(plan.groups):
        if g in merged or len(group.members) == 1:
            for place, m in enumerate(group.members):
                where[m.number] = Position(len(groups), place)
            groups.append(group)
            continue
        for place, m in enumerate(group.members):
            low = m.low
            alone = type(m)(m.number, m.offset - low, m.geometry, m.writeable, 0, m.high - low)
            where[m.number] = Position(len(groups), 0)
            flags = GroupFlags(group.flags.low + low, 0 if place == group.flags.owner else None, group.flags.frozen)
            groups.append(Group((alone,), m.high - low, (0,), (0,) if flags.owner == 0 else (), m.writeable, flags))
    return Plan(tuple(groups), tuple(where))


def base_of(group: Group, arrays: Sequence[Array]) -> Array:
    """The caller's memory of a group as one axis of bytes, read-only."""
    m = group.members[0]
    source = arrays[m.number]
    return view_at(address(source) - m.offset, Geometry((group.size,), (1,), np.dtype("u1")), False, source)


def member_at(group: Group, place: int, base: Array) -> Array:
    """One array of a group, as a view of its base."""
    m = group.members[place]
    memory = base if base.flags.c_contiguous else np.ascontiguousarray(base)
    return built(np.ndarray, memory, m.offset, m.geometry)


def new_base(group: Group, base: Array, run: RunArrays) -> Array:
    """A base's new value: what its arrays show, and elsewhere what was there."""
    value = np.array(base, "u1")
    for place in group.cover:
        mine = run.as_it_was(group.members[place].number)
        words(each_byte_once(member_at(group, place, value)))[...] = words(each_byte_once(mine))
    return value
