"""Collects what a function does to its inputs and what its outputs are, in one run on copies.

One collector (`metadata`) makes the records from an adapter's observations: `ObservedArrays` here compares memory and
reads the log of tracked ndarrays; `torch_collect.ObservedTensors` reads the operations on tensors.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import trees
from .caller_arrays import CallerContainers, RunArrays
from .calls import (
    Call,
    call_of,
    check_arrays,
    check_given,
    check_hidden,
    check_signature,
    outcome_of,
)
from .descriptors import (
    AOTInput,
    DifferentiableAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)
from .guards import components_of
from .hidden import check_function
from .memory import Layout
from .private_copies import Array, Geometry, Plan, plain, plan, private_copies
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
from .tracked import Log, Tracked, tracked

if TYPE_CHECKING:
    from .torch_collect import ObservedTensors

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
    """Run a function once, on private copies of its arguments, and return what it did to each input and what each
    output is.

    `args`, `kwargs`: the function's arguments; lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts among
    them are flattened, and `input_info` has one record for each leaf, in order, keyword arguments last by their names;
    generators, and containers and dataclasses of other classes that hold arrays, are refused. Arrays are NumPy's (all
    of them), or torch tensors on the CPU (all of them). The caller's arrays are as they were afterwards, whatever the
    function does, also where it raises.

    An input counts as written where one of its bytes changed, by whatever route, or where NumPy wrote it by a tracked
    call though no byte changed. So of two inputs that overlap, both are written where their common bytes are.
    `mutations_hidden_from_autograd`: only memory shows the writes (they went by `np.asarray`, a memoryview, C).
    `keep_input_mutations`, `requires_grad` (for each leaf; not for tensors, which have it) and `grad_enabled` (called
    at each tracked write) fill the columns about autograd; NumPy has none of its own. `static_input_indices`: leaves
    that stay where they are from call to call, for the record. `args_descs`: what each leaf is (default: PlainAOTInput
    by position); tangents and messages name it so.

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
    count, static = len(call.leaves), tuple(operator.index(i) for i in static_input_indices)
    for i in static:
        if not 0 <= i < count:
            raise IndexError(
                f"collect_metadata: static_input_indices: there is no input {i}: there are {count}, from 0 on"
            )
    if args_descs is not None:
        args_descs = tuple(args_descs)
        if len(args_descs) != count:
            raise ValueError(
                f"collect_metadata: args_descs: expected a descriptor for each of the {count} inputs, got"
                f" {len(args_descs)}"
            )
        for i, desc in enumerate(args_descs):
            if not isinstance(desc, AOTInput):
                raise TypeError(
                    f"collect_metadata: args_descs[{i}]: expected a descriptor of an input, got {desc!r:.80}"
                )
        call = dataclasses.replace(call, descs=args_descs)
    observed: ObservedArrays | ObservedTensors
    if call.tensors:
        from .caller_tensors import RunTensors
        from .torch_collect import ObservedTensors

        check_arrays(call, RunTensors.check, "collect_metadata")
        observed = ObservedTensors(call, (args, kwargs))
        observed.run(fn)
    else:
        check_arrays(call, RunArrays.check, "collect_metadata")
        layout = plan(call.arrays, components_of(Layout(call.arrays)))
        observed = observe_arrays(fn, call, (args, kwargs), layout, grad_enabled, requires_grad)
    return metadata(observed, call, keep_input_mutations, static)


def metadata(
    observed: ObservedArrays | ObservedTensors,
    call: Call,
    keep_input_mutations: bool = False,
    static_input_indices: Sequence[int] = (),
) -> ViewAndMutationMeta:
    """The records of a run. Tangents are, in this order, those of new values of inputs, of outputs that pass through,
    of intermediate bases.
    """
    inputs = [observed.input_info(i, keep_input_mutations) for i in range(len(call.leaves))]
    outputs = observed.output_infos(inputs)
    tangents: list[tuple[TangentMeta, DifferentiableAOTOutput]] = [
        (observed.new_value(i), InputMutationAOTOutput(call.desc(i)))
        for i, info in enumerate(inputs)
        if info.has_mutation_tangent
    ]
    tangents += [
        (observed.result(j), PlainAOTOutput(j))
        for j, info in enumerate(outputs)
        if info.output_type in PLAIN_TYPES and info.requires_grad_for_backward
    ]
    tangents += [
        (TangentMeta.of(base), IntermediateBaseAOTOutput(PlainAOTOutput(j)))
        for base, j in observed.saved
        if outputs[j].requires_grad
    ]
    return observed.finished(
        ViewAndMutationMeta(
            tuple(inputs),
            tuple(outputs),
            len(observed.saved),
            keep_input_mutations,
            traced_tangents=tuple(meta for meta, _ in tangents),
            traced_tangents_descs=tuple(TangentAOTInput(of) for _, of in tangents),
            static_input_indices=tuple(static_input_indices),
        )
    )


def check_flags(call: Call, requires_grad: Sequence[bool] | None, api: str) -> None:
    """ValueError unless there is a flag for each leaf."""
    if requires_grad is not None and len(requires_grad) != len(call.leaves):
        raise ValueError(
            f"{api}: requires_grad: expected a flag for each of the {len(call.leaves)} inputs, got {len(requires_grad)}"
        )


def observe_arrays(
    fn: Callable[..., object],
    call: Call,
    given: trees.Arguments,
    layout: Plan,
    grad_enabled: Callable[[], bool] | None = None,
    requires_grad: Sequence[bool] | None = None,
) -> ObservedArrays:
    """One run on tracked copies. TypeError for a result that hides memory of an input."""
    log = Log(grad_enabled)
    run = RunArrays(layout, private_copies(layout, call.arrays, Tracked))
    tracked(run, log)
    leaves = [leaf if u is None else run.arrays[u] for leaf, u in zip(call.leaves, call.index, strict=True)]
    args, kwargs = tree = call.copied(given, leaves)
    containers = CallerContainers(tree)
    value = fn(*args, **kwargs)
    log.run = None
    observed = ObservedArrays(call, run, value, log, requires_grad=requires_grad)
    observed.tree, observed.containers = tree, containers
    check_hidden(run, observed.outputs, "collect_metadata")
    return observed


class ObservedArrays:
    """The observations of a run on ndarrays. `log`: the writes of tracked arrays, if any. `earlier`: arrays that count
    as written in any case. `requires_grad`: for each leaf.
    """

    tree: trees.Arguments  #: of a run on copies: these, and what its lists and dicts held
    containers: CallerContainers

    def __init__(
        self,
        call: Call,
        run: RunArrays,
        value: object,
        log: Log | None,
        earlier: frozenset[int] = frozenset(),
        requires_grad: Sequence[bool] | None = None,
    ) -> None:
        self.requires_grad = requires_grad
        self.call, self.run, self.value, self.log, self.earlier = call, run, value, log, earlier
        self.outputs: list[Any] = []
        self.bases: list[Array] = []
        self.saved: list[tuple[Array, int]] = []  #: intermediates that are returned on behalf of an output, and which
        self.outcome = outcome_of(run, value, self.outputs, self.bases)
        self.moved = dict(self.outcome.geometry)

    def input_info(self, leaf: int, keep_input_mutations: bool) -> InputAliasInfo:
        u, log = self.call.index[leaf], self.log
        requires_grad = bool(self.requires_grad and self.requires_grad[leaf])
        if u is None:
            return InputAliasInfo(
                requires_grad=requires_grad,
                keep_input_mutations=keep_input_mutations,
                mutations_hidden_from_autograd=True,
            )
        resized = u in self.outcome.resized
        near = set(self.run.plan.groups[self.run.plan.where[u].group].numbers)
        # Includes writes by arrays that share the bytes.
        seen = {enabled for origin, enabled in log.writes if origin in near} if log else set()
        itself = log is not None and u in log.met
        data = not resized and (u in self.earlier or itself or u in self.run.changed)
        return InputAliasInfo(
            mutates_data=data,
            mutates_metadata=resized or u in self.moved,
            mutations_hidden_from_autograd=not seen if log else not data,
            mutations_under_no_grad_or_inference_mode=data and seen == {False},
            mutates_storage_metadata=resized,
            requires_grad=requires_grad,
            keep_input_mutations=keep_input_mutations,
        )

    def output_infos(self, inputs: Sequence[InputAliasInfo]) -> list[OutputAliasInfo]:
        infos, shared = [], set[int]()
        for j, (o, place) in enumerate(zip(self.outputs, self.outcome.places, strict=True)):
            if not place.array:
                infos.append(OutputAliasInfo(OutputType.non_alias, type(o)))
                continue
            requires_grad = any(self.requires_grad or ()) and bool(np.issubdtype(o.dtype, np.inexact))
            base: int | None = place.base
            if place.kind in KINDS:
                kind = KINDS[place.kind]
                base = place.base if place.kind == "output" else self.call.first[place.base]
            elif place.kind == "shared":
                kind = OutputType.alias_of_intermediate
                if place.base not in shared:
                    shared.add(place.base)
                    kind = OutputType.alias_of_intermediate_save_as_output
                    self.saved.append((plain(self.bases[place.base]), j))
            else:
                kind, base = OutputType.non_alias if place.own else OutputType.unsafe_view_alias, None
            recipe = None
            moved = place.kind == "view" and place.base in self.moved
            if base is not None and kind is not OutputType.is_input and not moved:
                recipe = ViewMetaSequence(MetadataKey(o.shape, "strided", False, o.strides, place.offset), o.dtype)
            raw = np.ndarray if isinstance(o, Tracked) else type(o)
            infos.append(OutputAliasInfo(kind, raw, base, frozenset(), requires_grad, requires_grad, recipe))
        return infos

    def new_value(self, leaf: int) -> TangentMeta:
        """The tangent of the new value of an input."""
        u = self.call.index[leaf]
        assert u is not None
        now = self.moved.get(u) or Geometry.of(self.call.arrays[u])
        return TangentMeta(np.ndarray, now.shape, now.dtype, now.strides)

    def result(self, output: int) -> TangentMeta:
        """The tangent of an output."""
        return TangentMeta.of(plain(self.outputs[output]))

    def finished(self, meta: ViewAndMutationMeta) -> ViewAndMutationMeta:
        """The records with the fields of this library alone."""
        return meta
