"""What a function does to its inputs and what its outputs are, from one run on private, tracked arrays."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from .._core import Layout
from ..descriptors import (
    AOTInput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)
from . import trees
from .calls import (
    Call,
    Outcome,
    Place,
    array_kinds,
    call_of,
    check_array,
    check_arrays,
    check_given,
    check_hidden,
    check_signature,
    outcome_of,
)
from .guards import components_of
from .hidden import check_argument, check_function, check_result, may_hold
from .private_copies import Array, Geometry, Plan, PrivateCopies, RunArrays, plain, plan
from .records import (
    PLAIN_TYPES,
    InputAliasInfo,
    MetadataKey,
    OutputAliasInfo,
    OutputType,
    TangentMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
)
from .torch_collect import Watch, collect_torch
from .tracked import Log, Tracked, tracked

KINDS = {
    "input": OutputType.is_input,
    "view": OutputType.alias_of_input,
    "output": OutputType.alias_of_intermediate_base_is_user_output,
}


def collect_metadata(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, object] | None = None,
    *,
    keep_input_mutations: bool = False,
    requires_grad: Sequence[bool] | None = None,
    grad_enabled: Callable[[], bool] | None = None,
    static_input_indices: Sequence[int] = (),
    args_descs: Sequence[AOTInput] | None = None,
) -> ViewAndMutationMeta:
    """Run a function once, on private copies of its arguments, and say of each input what was done to it and of each
    output what it is.

    `args`, `kwargs`: the function's arguments; lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts among
    them are flattened, and `input_info` has one record for each leaf, in order, keyword arguments last by their names;
    generators, and containers and dataclasses of other classes that hold arrays, are refused. Arrays are NumPy's (all
    of them), or torch tensors on the CPU (all of them). The caller's arrays are as they were afterwards, whatever the
    function does, also where it raises.

    An input counts as written where one of its bytes changed, by whatever route, or where NumPy was seen to write it
    though no byte changed. So of two inputs that overlap, both are written where their common bytes are.
    `mutations_hidden_from_autograd`: nothing but memory told of the writes (they went by `np.asarray`, a memoryview,
    C). `keep_input_mutations`, `requires_grad` (for each leaf; of tensors, they say it themselves) and `grad_enabled`
    (asked at each write that is seen) fill the columns that speak of autograd; NumPy has none of its own.
    `static_input_indices`: leaves that stay where they are from call to call, for the record. `args_descs`: what each
    leaf is (default: PlainAOTInput by position); tangents and messages name it so.

    TypeError: arguments that the function does not take, or arrays that are not all in their memory (object dtype,
    subclasses); named by descriptor.

    >>> from fanin.analysis import collect_metadata
    >>> def step(w, g):
    ...     w -= g
    ...     return w[1:], w.sum()
    >>> meta = collect_metadata(step, [np.ones(3), np.ones(3)])
    >>> [info.mutates_data for info in meta.input_info]
    [True, False]
    >>> [(info.output_type.name, info.base_idx) for info in meta.output_info]
    [('alias_of_input', 0), ('non_alias', None)]
    """
    args, kwargs = check_given(args, "args", "collect_metadata"), dict(kwargs or {})
    check_function(fn, "collect_metadata")
    call = call_of(args, kwargs, "collect_metadata")
    check_signature(fn, args, kwargs, "collect_metadata")
    requires_grad = None if requires_grad is None else tuple(map(bool, requires_grad))
    check_flags(call, requires_grad, "collect_metadata")
    static = check_static(call, static_input_indices)
    if args_descs is not None:
        args_descs = tuple(args_descs)
        check_descs(call, args_descs)
        call = dataclasses.replace(call, descs=args_descs)
    if call.tensors:
        return of_tensors(
            fn, call, keep_input_mutations=keep_input_mutations, static_input_indices=static, args_descs=args_descs
        )
    check_arrays(call, check_array, "collect_metadata")
    layout = plan(call.arrays, components_of(Layout(call.arrays)))
    options: Flags = {"keep_input_mutations": keep_input_mutations, "requires_grad": requires_grad}
    meta = collect(fn, call, args, kwargs, layout, grad_enabled=grad_enabled, **options)[0]
    return dataclasses.replace(meta, static_input_indices=static) if static else meta


class Flags(TypedDict, total=False):
    """What is said of arrays, which do not say it themselves."""

    keep_input_mutations: bool
    requires_grad: Sequence[bool] | None


class TensorFlags(TypedDict, total=False):
    """What is said of tensors."""

    keep_input_mutations: bool
    static_input_indices: Sequence[int]
    args_descs: Sequence[AOTInput] | None


def check_static(call: Call, static: Sequence[int]) -> tuple[int, ...]:
    """The positions of leaves that stay where they are. IndexError for one that is not there."""
    found = tuple(operator.index(i) for i in static)
    for i in found:
        if not 0 <= i < len(call.leaves):
            raise IndexError(
                f"collect_metadata: static_input_indices: there is no input {i}: there are {len(call.leaves)}, from"
                " 0 on"
            )
    return found


def check_descs(call: Call, descs: Sequence[AOTInput]) -> None:
    """ValueError unless there is a descriptor for each leaf; TypeError for what is none."""
    if len(descs) != len(call.leaves):
        raise ValueError(
            f"collect_metadata: args_descs: expected a descriptor for each of the {len(call.leaves)} inputs, got"
            f" {len(descs)}"
        )
    for i, desc in enumerate(descs):
        if not isinstance(desc, AOTInput):
            raise TypeError(f"collect_metadata: args_descs[{i}]: expected a descriptor of an input, got {desc!r:.80}")


def check_flags(call: Call, requires_grad: Sequence[bool] | None, who: str) -> None:
    """ValueError unless there is a flag for each leaf."""
    if requires_grad is not None and len(requires_grad) != len(call.leaves):
        raise ValueError(
            f"{who}: requires_grad: expected a flag for each of the {len(call.leaves)} inputs, got {len(requires_grad)}"
        )


def of_tensors(
    fn: Callable[..., object],
    call: Call,
    look: Callable[[list[object], object], Callable[[object], None]] | None = None,
    after: Callable[[Watch], None] | None = None,
    **options: Unpack[TensorFlags],
) -> ViewAndMutationMeta:
    """The same of a function on torch tensors, whose flags say who requires a gradient. `look` is called before with
    the copies and with the arguments that they are in; what it gives is called after, with the result. `after` is
    called with what was seen: then what the function does to tensors that it was not given is undone.
    """
    args, kwargs = call.form.of_call()

    kinds = array_kinds()
    for i, (leaf, u) in enumerate(zip(call.leaves, call.index, strict=True)):
        if u is None:
            check_argument(leaf, lambda i=i: f"collect_metadata: {call.leaf_name(i)}", kinds)  # type: ignore[misc]

    def flat(*leaves: object) -> object:
        it = iter(leaves)
        given = tuple([trees.unflatten(one, it) for one in args])
        named = {k: trees.unflatten(one, it) for k, one in kwargs.items()}
        seen = look(list(leaves), (given, named)) if look is not None else None
        result = fn(*given, **named)
        mine = storages(leaf for leaf, u in zip(leaves, call.index, strict=True) if u is not None)
        if seen is not None:
            seen(result)
        outputs: list[object] = []
        trees.flatten(result, outputs)
        for j, o in enumerate(outputs):
            if not may_hold(type(o)):
                continue
            check_result(
                o,
                lambda j=j: f"collect_metadata: {PlainAOTOutput(j).expr()}",  # type: ignore[misc]
                kinds,
                lambda a: not isinstance(a, np.ndarray) and not storages([a]).isdisjoint(mine),
            )
        return result

    return collect_torch(flat, call.leaves, _after=after, **options)


def storages(tensors: Iterable[Any]) -> set[int]:
    """Where the memory of tensors begins."""
    return {
        t.untyped_storage().data_ptr() for t in tensors if str(t.layout) == "torch.strided" and t.device.type == "cpu"
    }


def collect(
    fn: Callable[..., object],
    call: Call,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    layout: Plan,
    *,
    grad_enabled: Callable[[], bool] | None = None,
    **options: Unpack[Flags],
) -> tuple[ViewAndMutationMeta, Outcome, trees.Copies, object]:
    """One run on tracked arrays: the metadata, the outcome that it was made of, the containers that the function was
    given, and its result.
    """
    log = Log(grad_enabled)
    run = PrivateCopies(layout, call.arrays, Tracked)
    tracked(run, log)
    known = {id(leaf): run.private[u] for leaf, u in zip(call.leaves, call.index, strict=True) if u is not None}
    copies = trees.Copies(lambda leaf: known.get(id(leaf), leaf))
    result = fn(*[copies.of(a) for a in args], **{k: copies.of(v) for k, v in kwargs.items()})
    log.close()
    outputs: list[object] = []
    bases: list[Array] = []
    outcome = outcome_of(run, result, outputs, bases)
    check_hidden(run, outputs, "collect_metadata")
    return meta_of(call, run, outcome, outputs, bases, frozenset(), log, **options), outcome, copies, result


def meta_of(
    call: Call,
    run: RunArrays,
    outcome: Outcome,
    outputs: Sequence[object],
    bases: Sequence[Array],
    earlier: frozenset[int],
    log: Log | None,
    *,
    keep_input_mutations: bool = False,
    requires_grad: Sequence[bool] | None = None,
) -> ViewAndMutationMeta:
    """The records of a run. `earlier`: arrays that count as written whatever is seen; `log`: what tracked arrays saw,
    if there were any.
    """
    wanted = list(requires_grad) if requires_grad is not None else [False] * len(call.leaves)
    inputs = [
        (
            InputAliasInfo(
                requires_grad=bool(grad), keep_input_mutations=keep_input_mutations, mutations_hidden_from_autograd=True
            )
            if u is None
            else input_info(run, outcome, u, u in earlier, log, bool(grad), keep_input_mutations)
        )
        for u, grad in zip(call.index, wanted, strict=True)
    ]
    moved = {u for u, _ in outcome.geometry}
    infos = [output_info(call, o, p, outcome, any(wanted), moved) for o, p in zip(outputs, outcome.places, strict=True)]
    tangents, descs = tangents_of(call, outcome, inputs, infos, outputs, bases)
    return ViewAndMutationMeta(
        tuple(inputs),
        tuple(infos),
        len(bases),
        keep_input_mutations,
        traced_tangents=tuple(tangents),
        traced_tangents_descs=tuple(descs),
    )


def input_info(
    run: RunArrays,
    outcome: Outcome,
    u: int,
    earlier: bool,
    log: Log | None,
    requires_grad: bool,
    keep_input_mutations: bool,
) -> InputAliasInfo:
    """The record of one input."""
    resized = u in outcome.resized
    near = set(run.plan.groups[run.plan.where[u].group].numbers)
    # A write by another that shares the bytes is seen, too.
    seen = {enabled for origin, enabled in log.writes if origin in near} if log else set()
    itself = log is not None and u in log.met
    data = not resized and (earlier or itself or run.member_written(u))
    return InputAliasInfo(
        mutates_data=data,
        mutates_metadata=resized or any(u == v for v, _ in outcome.geometry),
        mutations_hidden_from_autograd=not seen if log else not data,
        mutations_under_no_grad_or_inference_mode=data and seen == {False},
        mutates_storage_metadata=resized,
        requires_grad=requires_grad,
        keep_input_mutations=keep_input_mutations,
    )


def output_info(call: Call, o: Any, place: Place, outcome: Outcome, grad: bool, moved: set[int]) -> OutputAliasInfo:
    """The record of one output."""
    if not place.array:
        return OutputAliasInfo(OutputType.non_alias, type(o))
    base: int | None = None
    if place.kind in KINDS:
        kind = KINDS[place.kind]
        base = place.base if place.kind == "output" else call.first[place.base]
    elif place.kind == "shared":
        first = next(p for p in outcome.places if p.kind == "shared" and p.base == place.base)
        kind = OutputType.alias_of_intermediate_save_as_output if first is place else OutputType.alias_of_intermediate
        base = place.base
    else:
        kind = OutputType.non_alias if place.own else OutputType.unsafe_view_alias
    needs = grad and np.issubdtype(o.dtype, np.inexact)
    recipe = None
    if base is not None and kind is not OutputType.is_input and not (place.kind == "view" and place.base in moved):
        recipe = ViewMetaSequence(MetadataKey(o.shape, "strided", False, o.strides, place.offset), o.dtype)
    raw = np.ndarray if isinstance(o, Tracked) else type(o)
    return OutputAliasInfo(kind, raw, base, frozenset(), needs, needs, recipe)


def tangents_of(
    call: Call,
    outcome: Outcome,
    inputs: Sequence[InputAliasInfo],
    infos: Sequence[OutputAliasInfo],
    outputs: Sequence[object],
    bases: Sequence[Array],
) -> tuple[list[TangentMeta], list[TangentAOTInput]]:
    """What has a tangent, in order, and the descriptors of the tangents: new values of inputs, outputs that pass
    through, bases.
    """
    moved = dict(outcome.geometry)
    found: list[tuple[TangentMeta, TangentAOTInput]] = []
    for i, info in enumerate(inputs):
        u = call.index[i]
        if info.has_mutation_tangent and u is not None:
            now = moved.get(u, Geometry.of(call.arrays[u]))
            found.append(
                (
                    TangentMeta(np.ndarray, now.shape, now.dtype, now.strides),
                    TangentAOTInput(InputMutationAOTOutput(call.desc(i))),
                )
            )
    for j, out in enumerate(infos):
        if out.output_type in PLAIN_TYPES and out.requires_grad_for_backward:
            found.append((TangentMeta.of(plain(outputs[j])), TangentAOTInput(PlainAOTOutput(j))))
    for j, out in enumerate(infos):
        if out.output_type is OutputType.alias_of_intermediate_save_as_output and out.requires_grad_for_backward:
            base = plain(bases[out.base_idx or 0])
            found.append((TangentMeta.of(base), TangentAOTInput(IntermediateBaseAOTOutput(PlainAOTOutput(j)))))
    return [t for t, _ in found], [d for _, d in found]
