"""The pure function of a layout of torch tensors: of torch's operations alone, so that it can be traced, compiled and
differentiated.

Its slots are those of `Pure`; a base is one axis of elements of the dtype that all its members have. It copies what it
takes by operations that gradients follow, calls the function, and returns what became of the copies; so whatever runs
it, gradients of new values and outputs are those of the function. The wrapper's part writes new values back by `copy_`,
under no_grad where the function did.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .._words import type_of
from . import trees
from .caller_tensors import HOOKS, Tensor, bits_error, layout_of, retyped, start_of, torch
from .calls import Behaviour, Place
from .descriptors import PlainAOTInput, PlainAOTOutput
from .private_copies import Array
from .pure import Pure
from .torch_collect import ObservedTensors, same_bytes

if TYPE_CHECKING:
    from .wrapper import Record


@dataclass(frozen=True)
class Shown:
    """How a tensor shows its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    offset: int
    conj: bool
    neg: bool
    requires_grad: bool

    @staticmethod
    def given(t: Tensor) -> Shown:
        """That of an argument, which is a strided tensor."""
        return Shown(
            tuple(t.shape), tuple(t.stride()), t.dtype, t.storage_offset(), t.is_conj(), t.is_neg(), t.requires_grad
        )

    @staticmethod
    def of(x: object) -> Shown | None:
        """That of anything; None for what is no strided tensor."""
        return Shown.given(x) if isinstance(x, torch.Tensor) and layout_of(x) == "strided" else None


@dataclass(frozen=True)
class OutputViews:
    """How tensors showed their memory in a recorded call: arguments before it, those that it moved after, results."""

    given: Sequence[Shown]
    ends: Mapping[int, Shown]
    outputs: Sequence[Shown | None]
    quiet: frozenset[int]
    """Those whose histories a write left as they were."""


class Reads(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """What a function reads of tensors that a copy of an argument answers otherwise: whether it is a leaf, its
    gradient, and where it lies in its storage.
    """

    named: ClassVar = {
        torch.Tensor.is_leaf.__get__: "is_leaf is read",
        torch.Tensor.grad.__get__: ".grad is read",
        torch.Tensor.grad.__set__: ".grad is set",
        torch.Tensor.grad.__delete__: ".grad is set",
    }
    #: and whether it depends on all of the storage
    places: ClassVar = {
        torch.Tensor.storage_offset: False,
        torch.Tensor.untyped_storage: True,
        torch.Tensor.storage: True,
    }

    def __init__(self) -> None:
        super().__init__()
        #: copies of which the function reads such a thing, by identity, and what
        self.found: dict[int, str] = {}
        #: storages in which it reads a place: whether it reads of all of it, too
        self.storages: dict[int, bool] = {}

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func in self.named:
            self.found.setdefault(id(args[0]), self.named[func])
        elif func in self.places and layout_of(args[0]) == "strided":
            with torch._C.DisableTorchFunctionSubclass():
                storage = args[0].untyped_storage()._cdata
                self.storages[storage] = self.places[func] or self.storages.get(storage, False)
        return func(*args, **(kwargs or {}))


class Move(NamedTuple):
    """A new value, the caller's tensor that it is written to, and the numbers of the tensors that show it."""

    new: Tensor
    its: Tensor
    numbers: Sequence[int]


class TensorPure(Pure):
    """A pure function of flat arguments, for tensors; see the top of this file and `Pure`."""

    def __init__(self, views: OutputViews, *known: Any) -> None:
        super().__init__(*known)
        self.given, self.ends, self.shown, self.quiet = views.given, views.ends, views.outputs, views.quiet
        plan, given = self.plan, self.given
        for g in self.bases:
            dtypes = {given[u].dtype for u in plan.groups[g].numbers}
            if len(dtypes) > 1:
                raise ValueError(
                    f"pure: {self._shown(g)} share memory, are written, and have different dtypes,"
                    f" {', '.join(sorted(map(str, dtypes)))}: a base of tensors has one; expected views of one dtype,"
                    " or no compiler"
                )
        for u in self.changed:
            if plan.groups[plan.where[u].group].members[plan.where[u].place].geometry.crowded:
                raise ValueError(
                    f"pure: {PlainAOTInput(self.first[u]).expr()} is written, and several of its elements are one:"
                    " expected a tensor that is not expanded, or no compiler"
                )
        # Worked out now, and plain: what a tracer meets in a call must be nothing but tuples and lists.
        groups = [plan.groups[g] for g in self.bases]
        #: how many elements each base has
        self.sizes = [group.size // given[group.numbers[0]].dtype.itemsize for group in groups]
        by_position, by_name = self.form.of_call()
        self.by_position, self.by_name = by_position, list(by_name.items())
        self.input_names = [d.expr() for d in self.input_descs]
        #: per tensor, whether a copy of it has gaps
        self.roomy = [needs_room(one.shape, one.stride) for one in given]
        #: per tensor: (inner position, offset in the base or None)
        members = [plan.groups[group].members[place] for group, place in plan.where]
        self.places = [
            (one.position, None if one.place is None else m.offset // shown.dtype.itemsize)
            for one, m, shown in zip(self.sources, members, given, strict=True)
        ]
        #: outputs that are views of arguments, without the gradients that others have. AOTAutograd replays such an
        #: alias on another output, and may crash; so the call returns clones. `_view` needs their shapes alone.
        grows = any(one is not None and one.requires_grad for one in (*given, *self.shown))
        self.cut = [
            j
            for j, (p, one) in enumerate(zip(self.outcome.places, self.shown, strict=True))
            if grows and p.kind == "view" and one is not None and not one.requires_grad
        ]

    def _shown(self, group: int) -> str:
        return ", ".join(PlainAOTInput(self.first[u]).expr() for u in self.plan.groups[group].numbers)

    def _stand_in(self, number: int | None) -> Tensor:
        one = self.given[number or 0]
        made: Tensor = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        return made.requires_grad_(one.requires_grad)

    def _base_stand_in(self, group: int) -> Tensor:
        numbers = self.plan.groups[group].numbers
        size = self.sizes[self.bases.index(group)]
        base: Tensor = torch.empty(size, dtype=self.given[numbers[0]].dtype, device="meta")
        return base.requires_grad_(any(self.given[u].requires_grad for u in numbers))

    # The pure function

    def __call__(self, *inner: Any) -> list[Any]:
        """Run the function on copies. ValueError: more or fewer arguments, or of other shapes or dtypes, than
        those of `input_descs`, or another number of results.
        """
        self._fit(inner)
        bases = [inner[k].clone() for k in range(len(self.bases))]
        tensors = []
        for u, (position, offset) in enumerate(self.places):
            one = self.given[u]
            if offset is not None:
                tensors.append(bases[position].as_strided(one.shape, one.stride, offset))
            else:
                tensors.append(copied(inner[position], one, self.roomy[u]))
        leaves = [inner[self.positions[i]] if u is None else tensors[u] for i, u in enumerate(self.index)]
        it = iter(leaves)
        given = [filled(one, it) for one in self.by_position]
        named = {k: filled(one, it) for k, one in self.by_name}
        outputs: list[Any] = []
        eager = not torch.compiler.is_compiling()  # a tracer has neither versions nor storages
        before = [(t._version, t.shape, t.stride()) for t in tensors] if eager else []
        result = self.fn(*given, **{k: named[k] for k in self.order})
        gather(result, outputs)
        if len(outputs) != len(self.shown):
            raise ValueError(f"pure: expected {len(self.shown)} results, as at the recorded call, got {len(outputs)}")
        if eager:
            self._hold_run(inner, tensors, before, result, outputs)
        changed = [
            tensors[u].as_strided(self.given[u].shape, self.given[u].stride, 0) if u in self.moved else tensors[u]
            for u in self.changed
        ]
        for j in self.cut:
            if isinstance(outputs[j], torch.Tensor):
                outputs[j] = outputs[j].clone()
        return bases + changed + outputs + [tensors[u] for u in self.late]

    def _hold_run(
        self,
        inner: Sequence[Tensor],
        tensors: Sequence[Tensor],
        before: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]],
        result: object,
        outputs: Sequence[object],
    ) -> None:
        """ValueError where a run did otherwise than was recorded. Strides are not compared of a copy that has not those
        of the recorded argument.
        """
        written: set[int] = set()
        was: dict[int, object] = {u: (end.shape, end.stride) for u, end in self.ends.items()}
        now: dict[int, object] = {}
        for u, (t, (version, *lay)) in enumerate(zip(tensors, before, strict=True)):
            if [t.shape, t.stride()] != lay:
                now[u] = tuple(t.shape), tuple(t.stride())
            if u in was and tuple(lay[1]) != self.given[u].stride:
                now[u] = was[u]
            if t._version == version or u in self.may_write or u in was or u in now or has_no_storage(t):
                continue
            if type(t) is torch.Tensor and not same_bytes(inner[self.places[u][0]], t):
                written.add(u)
        storages = {u: t.untyped_storage()._cdata for u, t in enumerate(tensors) if not has_no_storage(t)}
        roles = [self._roles(j, o, tensors, storages) for j, o in enumerate(outputs)]
        form = trees.flatten(result, [])
        self._compare(
            Behaviour(self.may_write, was, self.outcome.form, [one for one, _ in roles]),
            Behaviour(written, now, form, [other for _, other in roles]),
        )

    def _roles(
        self, j: int, o: Any, tensors: Sequence[Tensor], storages: Mapping[int, int]
    ) -> tuple[Place | None, Place | None]:
        """What an output was at the recorded call, and is. Transforms of torch.func hide storages: nothing is compared
        then.
        """
        p, shown = self.outcome.places[j], self.shown[j]
        plain = Place("plain")
        was = Place(p.kind, p.base) if p.kind in ("input", "view") else plain
        if p.kind == "input" and o is tensors[p.base]:
            return was, was
        if not isinstance(o, torch.Tensor):
            return was, plain
        if layout_of(o) != "strided" or has_no_storage(o):
            return (was, plain) if p.kind == "input" else (None, None)
        storage, base = o.untyped_storage()._cdata, p.base
        if storages.get(base) != storage:
            base = next((u for u, other in storages.items() if other == storage), -1)
        # Of arguments that share memory and are not written each has a copy; the recorded base is any of them.
        if was is plain or base < 0 or self.plan.where[base].group != self.plan.where[p.base].group:
            return was, Place("view", base) if base >= 0 and o.numel() else plain
        if p.kind == "input":
            return was, Place("view", base)
        if shown is None or not self.ends.keys().isdisjoint({base, p.base}):
            return None, None
        t, (group, place) = tensors[base], self.plan.where[base]
        expected: Any = (shown.shape, shown.dtype)
        found: Any = (tuple(o.shape), o.dtype)
        if tuple(t.stride()) == self.given[base].stride:
            expected += shown.stride, p.offset - self.plan.groups[group].members[place].offset
            ahead = o.storage_offset() * o.element_size() - t.storage_offset() * t.element_size()
            found += tuple(o.stride()), ahead
        return dataclasses.replace(was, geometry=expected), dataclasses.replace(was, geometry=found)

    def _fit(self, inner: Sequence[object]) -> None:
        names = self.input_names
        if len(inner) != len(names):
            raise ValueError(f"pure: expected {len(names)} arguments, {', '.join(names)}; got {len(inner)}")
        wanted = [((n,), self.given[self.plan.groups[g].numbers[0]].dtype) for g, n in zip(self.bases, self.sizes)]  # noqa: B905  (traced)
        for u, (position, offset) in enumerate(self.places):
            if offset is None:
                check_shape(inner[position], self.given[u].shape, self.given[u].dtype, f"pure: {names[position]}")
        for k, (shape, dtype) in enumerate(wanted):
            check_shape(inner[k], shape, dtype, f"pure: {names[k]}")

    # The wrapper's way in

    def inner(self, leaves: Sequence[object], arrays: Sequence[Tensor]) -> list[object]:
        """The inner arguments for the caller's own, without a copy: bases are views that gradients follow. ValueError
        for a tensor with a conjugate or negative bit: a base has none.
        """
        for u, t in enumerate(arrays):
            if t.is_conj() or t.is_neg():
                raise bits_error(t, PlainAOTInput(self.first[u]).expr())
        regions = [self.region(g, arrays) for g in self.bases]
        rest = [leaves[i] for i in self.rest]
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arrays):
            # What is written back must not be what a compiled function has saved for its own backward.
            regions = [one.clone() for one in regions]
            written = {self.first[u] for u in self.touched}
            rest = [
                x.clone() if i in written and isinstance(x, torch.Tensor) else x
                for i, x in zip(self.rest, rest, strict=True)
            ]
        return [*regions, *rest]

    def region(self, group: int, arrays: Sequence[Tensor]) -> Tensor:
        """The caller's memory of a group as one axis of elements. ValueError where no such tensor has the gradients of
        all.
        """
        members = self.plan.groups[group].members
        mine = [arrays[m.number] for m in members]
        size = self.sizes[self.bases.index(group)]
        begin = (start_of(mine[0]) - mine[0].untyped_storage().data_ptr() - members[0].offset) // mine[0].element_size()
        if len({t.untyped_storage()._cdata for t in mine}) > 1:
            raise ValueError(
                f"functionalize: {self._shown(group)} share memory through several storages, and are written: expected"
                " views of one, or no compiler"
            )
        roots = {id(t if t._base is None else t._base): t if t._base is None else t._base for t in mine}
        if len(roots) == 1:
            root = next(iter(roots.values()))
            if root.dtype == mine[0].dtype:
                return root.as_strided((size,), (1,), begin)
        if any(t.requires_grad for t in mine):
            raise ValueError(
                f"functionalize: {self._shown(group)} share memory that is written, but no history, and require"
                " gradients: expected views of one tensor, or no compiler"
            )
        with torch.no_grad():
            empty = torch.empty(0, dtype=mine[0].dtype, device="cpu")
            region: Tensor = empty.set_(mine[0].untyped_storage(), begin, (size,), (1,))
            return region

    # The wrapper's way out

    def _moves(self, arrays: Sequence[Tensor], news: Sequence[Tensor]) -> list[Move]:  # type: ignore[override]
        """New values and the caller's tensors that they are written to."""
        moves = []
        for k, g in enumerate(self.bases):
            numbers = self.plan.groups[g].numbers
            check_shape(news[k], (self.sizes[k],), self.given[numbers[0]].dtype, self._said(k))
            moves.append(Move(news[k], self.region(g, arrays), numbers))
        for k, u in enumerate(self.changed, len(self.bases)):
            if u in self.touched:
                check_shape(news[k], self.given[u].shape, self.given[u].dtype, self._said(k))
                moves.append(Move(news[k], arrays[u], (u,)))
        return moves

    def _shared(  # type: ignore[override]
        self, outputs: Sequence[object], bases: Sequence[Array]
    ) -> tuple[list[object], list[Array]]:
        """Outputs of which views will be made; where they share memory made inside, they share it already."""
        for j, p in enumerate(self.outcome.places):
            if p.kind == "view" and (shown := self.shown[j]) is not None:
                check_shape(outputs[j], shown.shape, shown.dtype, f"functionalize: {PlainAOTOutput(j).expr()}")
        return list(outputs), list(bases)

    def _write(self, arrays: Sequence[Tensor], moves: Sequence[Move]) -> None:  # type: ignore[override]
        """Check that torch permits every write, then write new values and set the geometry after the call."""
        quiet = [torch.no_grad() if u in self.quiet else contextlib.nullcontext() for u in self.ends]
        for move in moves:
            with self._mode(move.numbers):
                check_may_write(move.its, move.new.requires_grad, self._called(move.numbers[0]))
        for u, mode in zip(self.ends, quiet, strict=True):
            with mode:
                check_may_write(arrays[u], False, self._called(u))
        for move in moves:
            with self._mode(move.numbers):
                move.its.copy_(move.new)
        for (u, end), mode in zip(self.ends.items(), quiet, strict=True):
            t = arrays[u]
            with mode:
                t.as_strided_(end.shape, end.stride, t.storage_offset() + end.offset - self.given[u].offset)

    def _called(self, u: int) -> str:
        return f"functionalize: {PlainAOTInput(self.first[u]).expr()}"

    def _said(self, slot: int) -> str:
        return f"functionalize: {self.output_descs[slot].expr()}"

    def _mode(self, numbers: Sequence[int]) -> contextlib.AbstractContextManager[object]:
        """no_grad where the function wrote under it, or in ways hidden from autograd."""
        infos = [self.meta.input_info[self.first[u]] for u in numbers if u in self.touched]
        quiet = all(i.mutations_under_no_grad_or_inference_mode or i.mutations_hidden_from_autograd for i in infos)
        quiet = quiet or self.quiet.issuperset(u for u in numbers if u in self.touched)
        return torch.no_grad() if quiet else contextlib.nullcontext()

    def _view(self, arrays: Sequence[Tensor], output: int, value: object) -> object:
        """The caller's view that is to the caller's tensor what an output was to the copy of it."""
        p, one = self.outcome.places[output], self.shown[output]
        if one is None:
            return value
        source = arrays[p.base]
        group, place = self.plan.where[p.base]
        held = self.given[p.base].offset * self.given[p.base].dtype.itemsize
        start = held - self.plan.groups[group].members[place].offset + p.offset
        start += source.storage_offset() * source.element_size() - self._now(p.base)
        view = source if one.dtype == source.dtype else retyped(source, one.dtype)
        view = view.as_strided(one.shape, one.stride, start // one.dtype.itemsize)
        view = view.conj() if one.conj else view
        view = torch._neg_view(view) if one.neg else view
        return view.detach() if view.requires_grad and not one.requires_grad else view

    def _now(self, u: int) -> int:
        """Where a tensor began at the recorded call, when it had ended, in bytes."""
        one = self.ends.get(u, self.given[u])
        return int(one.offset * one.dtype.itemsize)


def copied(x: Tensor, one: Shown, roomy: bool) -> Tensor:
    """A copy of the same strides, wherever one can have them. An expanded one that requires a gradient has dense
    ones, so that each of its elements gets its own.
    """
    wide = [d for d, (n, s) in enumerate(zip(one.shape, one.stride, strict=True)) if s == 0 and n > 1]
    if wide and not one.requires_grad and all(x.stride()[d] == 0 for d in wide):
        for d in wide:
            x = x.narrow(d, 0, 1)
        return x.clone().expand(one.shape)
    if not roomy:
        return x.clone()
    return x.new_empty_strided(one.shape, one.stride).copy_(x)


def has_no_storage(t: Tensor) -> bool:
    """Whether a transform of torch.func wraps a tensor, so that it has no storage to compare."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(t))


def needs_room(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a clone has other strides, and a copy can have the same: there are gaps, and no two elements are one."""
    reach, dense = 1, 1
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s < reach:
            return False
        dense = dense * n if s == dense else 0
        reach = s * (n - 1) + reach
    return dense == 0


def filled(form: trees.Spec, leaves: Iterator[object]) -> object:
    """A tree of a form, in code that can be traced."""
    if not isinstance(form, trees.Form):
        return next(leaves)
    items = [filled(one, leaves) for one in form.inner]
    return trees.made(form.kind, items, form.keys)


def gather(tree: object, leaves: list[object]) -> None:
    """The leaves of a tree, in code that can be traced."""
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        for item in tree:
            gather(item, leaves)
    elif isinstance(tree, dict):
        for item in tree.values():
            gather(item, leaves)
    else:
        leaves.append(tree)


def check_may_write(t: Tensor, grows: bool, name: str) -> None:
    """RuntimeError where torch refuses a write in place: called for all tensors before the first is written. `grows`:
    the new value has a history.
    """
    root = t if t._base is None else t._base
    if t.is_inference() and not torch.is_inference_mode_enabled():
        why = "is an inference tensor: write it within torch.inference_mode()"
    elif not torch.is_grad_enabled() or not (grows or t.requires_grad):
        return
    elif root.is_leaf and root.requires_grad:
        why = "is a leaf that requires grad, or a view of one: write it under torch.no_grad()"
    elif t._base is not None and torch._C._autograd._get_creation_meta(t) != torch._C._autograd.CreationMeta.DEFAULT:
        why = "is a view that autograd refuses to write (one of several, or made under no_grad): pass a clone of it"
    else:
        return
    raise RuntimeError(f"{name} is written in place, and {why}; nothing was written")


def check_shape(x: object, shape: tuple[int, ...], dtype: object, name: str) -> None:
    """ValueError for another shape or dtype; TypeError for what is no strided tensor on the CPU."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor of {dtype}, shape {shape}; got {type_of(x)}")
    if layout_of(x) != "strided" or x.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a strided tensor on the CPU, got one on {x.device} with layout {layout_of(x)}"
        )
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(f"{name}: expected a tensor of {dtype}, shape {shape}; got {x.dtype}, shape {tuple(x.shape)}")


# Whether a function can be replaced by a pure one


def state_of(t: Tensor) -> tuple[object, ...]:
    """What of a tensor a compiled function cannot change: version, attributes, gradient, hooks; class, whether it
    retains its gradient; whether it requires one, and has a history; its shape and strides.
    """
    hooks = sum(len(getattr(t, name) or ()) for name in HOOKS)
    attributes = {name: id(x) for name, x in t.__dict__.items()}
    grad = id(t.grad) if t.is_leaf and t.grad is not None else None
    own = type(t), t.retains_grad
    return t._version, attributes, grad, hooks, own, t.requires_grad, t.grad_fn is not None, (t.shape, t.stride())


def unlike_copies(
    record: Record, run: ObservedTensors, before: Sequence[tuple[object, ...]], reads: Reads
) -> list[Exception]:
    """Why a pure function cannot replace this one: it reads what differs on copies, or sets what no result
    carries. `before`: `state_of` each.
    """
    call, tensors = run.call, run.tensors
    places = dict.fromkeys(run.strided, False) | reads.storages
    found: list[Exception] = []
    for u, (given, t, was) in enumerate(zip(call.arrays, tensors, before, strict=True)):
        now, name = state_of(t), record.name(u)
        version, attributes, grad, hooks, own, requires_grad, grown, lay = (
            a == b for a, b in zip(was, now, strict=True)
        )
        leaf = given.is_leaf and given.requires_grad
        what = (
            "attributes are set" if not attributes
            else "it has attributes, which a copy has not" if given.__dict__
            else ".grad is set" if not grad
            else "a hook is added" if not hooks
            else "its class is set, or its gradient retained" if not own
            else "requires_grad is set" if not requires_grad and (version or was[5])
            else "its history is cut (detach_)" if was[6] and not grown
            else "it is a leaf that requires a gradient, and its strides change" if was[5] and not was[6] and not lay
            else reads.found[id(t)] if id(t) in reads.found and (leaf or (given.is_leaf and given.grad is not None))
            else None
        )  # fmt: skip
        if what is not None:
            found.append(uncompiled(f"{name}: {what}"))
        if given.is_conj() or given.is_neg():
            found.append(bits_error(given, name))
        whole = places.get(run.before[record.first[u]].untyped_storage()._cdata)
        if whole is not None:
            record.counted_from[u] = whole
            if is_part(given, whole):
                found.append(
                    uncompiled(
                        f"{name}: its place in its storage is read, or counted from (storage_offset, untyped_storage,"
                        f" as_strided with a storage_offset), and it begins at element {given.storage_offset()} of"
                        f" {given.untyped_storage().nbytes() // max(given.element_size(), 1)}: pass x.clone()"
                    )
                )
    storages = {t.untyped_storage()._cdata for t in tensors}
    for j, o in enumerate(run.outputs):
        if not isinstance(o, torch.Tensor) or not o.requires_grad or not o.is_leaf or any(o is t for t in tensors):
            continue
        if layout_of(o) == "strided" and o.untyped_storage()._cdata in storages:
            found.append(uncompiled(f"{PlainAOTOutput(j).expr()} is a leaf of its own on the memory of an argument"))
    return found


def is_part(t: Tensor, whole: bool) -> bool:
    """Whether a tensor begins after its storage's first element, which a copy never does; with `whole`, whether it
    shows less than all of its storage.
    """
    return bool(t.storage_offset() or (whole and t.untyped_storage().nbytes() != t.numel() * t.element_size()))


def uncompiled(what: str) -> ValueError:
    """The error for what a compiled function cannot do."""
    return ValueError(f"functionalize: {what}: a compiled function cannot do that; expected no compiler")


def history_of(t: Tensor) -> tuple[object, bool]:
    """The node of a tensor, of the base of one that is a view; and whether it requires a gradient."""
    own = t if t._base is None else t._base
    return own.grad_fn, t.requires_grad


def grad_state(tensors: Sequence[Any]) -> object:
    """Which tensors require a gradient, are leaves, have attributes; and whether gradients are on."""
    return torch.is_grad_enabled(), [(t.requires_grad, t.is_leaf, bool(t.__dict__)) for t in tensors]
