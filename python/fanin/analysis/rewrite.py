"""Metadata after the inputs have changed: without duplicates, and with bases in the place of views.

A wrapper that is called with one array twice, or with written arrays that share memory, runs a function of fewer
inputs inside. These two functions derive its metadata from that of the function itself.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from .._words import type_of
from .descriptors import AOTInput, InputMutationAOTOutput, TangentAOTInput
from .records import (
    INPUT_ALIAS_TYPES,
    InputAliasInfo,
    MemoryFormatMeta,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    TangentMeta,
    ViewAndMutationMeta,
)

T = TypeVar("T")
BaseInfo = int | tuple[int, object]


def remove_dupe_metadata(
    m: ViewAndMutationMeta, keep_arg_mask: Sequence[bool], add_dupe_map: Sequence[int]
) -> ViewAndMutationMeta:
    """The metadata of the function that takes each array once.

    keep_arg_mask: for each input, whether it is kept; the first of each group of duplicates is. add_dupe_map: for each
    input, its position among the kept ones. `f(a, b, a, c)` has the mask [True, True, False, True] and the map [0, 1,
    0, 2].

    Inputs, their tangents and the inputs that stay where they are go with the mask; positions of inputs are renumbered,
    positions of outputs and of intermediate bases are not. ValueError: mask or map do not fit the inputs or each other,
    or a duplicate is described otherwise than what it duplicates.

    >>> from fanin.analysis import InputAliasInfo, ViewAndMutationMeta, remove_dupe_metadata
    >>> w, r = InputAliasInfo(mutates_data=True), InputAliasInfo()
    >>> meta = ViewAndMutationMeta([r, w, r, w], [])
    >>> remove_dupe_metadata(meta, [True, True, False, False], [0, 1, 0, 1]).mutated_inp_runtime_indices
    (1,)
    """
    api = "remove_dupe_metadata"
    check_meta(m, api)
    n = len(m.input_info)
    if len(keep_arg_mask) != n or len(add_dupe_map) != n:
        raise ValueError(
            f"{api}: expected an entry of keep_arg_mask and of add_dupe_map for each of {n} inputs, "
            f"got {len(keep_arg_mask)} and {len(add_dupe_map)}"
        )
    if n == 0 or not keep_arg_mask[0]:
        raise ValueError(f"{api}: the first input duplicates nothing: expected keep_arg_mask[0] to be True")
    kept: list[int] = []
    for i, (keep, to) in enumerate(zip(keep_arg_mask, add_dupe_map, strict=True)):
        if keep:
            kept.append(i)
        if not 0 <= to < len(kept) or (keep and to != len(kept) - 1):
            want = f"{len(kept) - 1}" if keep else f"a kept input before it, 0 to {len(kept) - 1}"
            raise ValueError(f"{api}: add_dupe_map[{i}] must be {want}, got {to}")
        if m.input_info[i] != m.input_info[kept[to]]:
            raise ValueError(
                f"{api}: input {i} should be input {kept[to]}, but is described otherwise: "
                f"expected {m.input_info[kept[to]]}, got {m.input_info[i]}"
            )
    head = [keep_arg_mask[i] for i in tangent_inputs(m)]
    return dataclasses.replace(
        m,
        input_info=tuple(m.input_info[i] for i in kept),
        output_info=tuple(
            dataclasses.replace(o, base_idx=add_dupe_map[input_of(m, o)]) if o.output_type in INPUT_ALIAS_TYPES else o
            for o in m.output_info
        ),
        traced_tangents=masked(m.traced_tangents, head),
        traced_tangents_descs=masked(m.traced_tangents_descs, head),
        subclass_inp_meta=(),
        subclass_fw_graph_out_meta=(),
        subclass_tangent_meta=renumbered(masked(m.subclass_tangent_meta, head)),
        static_input_indices=tuple(dict.fromkeys(add_dupe_map[i] for i in m.static_input_indices)),
    )


def check_meta(m: object, api: str) -> None:
    """TypeError for what is no metadata."""
    if not isinstance(m, ViewAndMutationMeta):
        raise TypeError(f"{api}: expected a ViewAndMutationMeta, as collect_metadata gives, got {type_of(m)}")


def tangent_inputs(m: ViewAndMutationMeta) -> list[int]:
    """The inputs that the first of `traced_tangents` belong to, in their order."""
    found = [i for i, info in enumerate(m.input_info) if info.has_mutation_tangent]
    if len(found) > len(m.traced_tangents):
        raise ValueError(
            f"expected a tangent for each of the {len(found)} written inputs that need one, got"
            f" {len(m.traced_tangents)} in all"
        )
    return found


def input_of(m: ViewAndMutationMeta, o: OutputAliasInfo) -> int:
    """The input that an output of one of INPUT_ALIAS_TYPES is, or is a view of."""
    if o.base_idx is None or o.base_idx >= len(m.input_info):
        raise ValueError(f"an output is a view of input {o.base_idx}, but there are {len(m.input_info)} inputs")
    return o.base_idx


def masked(every: tuple[T, ...], head: Sequence[bool]) -> tuple[T, ...]:
    """What is kept of the first ones, and all that follow."""
    return (*(x for x, kept in zip(every, head, strict=False) if kept), *every[len(head) :])


def renumbered(metas: tuple[T, ...]) -> tuple[T, ...]:
    """Plain arrays, of which each has its own position."""
    return tuple(
        dataclasses.replace(x, unwrapped_idx=i) if isinstance(x, PlainTensorMeta) else x for i, x in enumerate(metas)
    )


def create_synthetic_base_metadata(
    m: ViewAndMutationMeta,
    synthetic_base_info: Sequence[BaseInfo],
    outer_args: Sequence[object],
    inner_args: Sequence[Any],
    inner_args_desc: Sequence[AOTInput],
) -> tuple[ViewAndMutationMeta, list[int]]:
    """The metadata of the function that takes bases in the place of views, and the inputs whose changed geometry it
    returns as extra outputs.

    synthetic_base_info: for each outer input its inner position, or (position of the base, the view). outer_args,
    inner_args: the arrays themselves; inner_args_desc describes the inner ones.

    A base of several views counts as written; a change of geometry of such a view is none of the base, but one more
    output: a view of the base, in the order of the second result, after all others. An output that was such a view
    becomes a view of the base, unless the view is the base itself. ValueError: lengths and positions that do not fit,
    an inner input that nothing became, views of one base of which some are leaves and some are not.

    >>> from fanin.analysis import InputAliasInfo, ViewAndMutationMeta, create_synthetic_base_metadata
    >>> from fanin.descriptors import PlainAOTInput, SyntheticBaseAOTInput
    >>> base = np.zeros(4); a, b, c = base[:3], base[1:], np.zeros(2)
    >>> meta = ViewAndMutationMeta([InputAliasInfo(mutates_data=True), InputAliasInfo(), InputAliasInfo()], [])
    >>> inner, extra = create_synthetic_base_metadata(
    ...     meta, [(0, a), (0, b), 1], [a, b, c], [base, c],
    ...     [SyntheticBaseAOTInput(PlainAOTInput(0)), PlainAOTInput(2)])
    >>> [info.mutates_data for info in inner.input_info], extra
    ([True, False], [])
    """
    api = "create_synthetic_base_metadata"
    check_meta(m, api)
    merged = [isinstance(x, (tuple, list)) for x in synthetic_base_info]
    position = [operator.index(x[0] if isinstance(x, (tuple, list)) else x) for x in synthetic_base_info]
    if not len(m.input_info) == len(position) == len(outer_args):
        raise ValueError(
            f"{api}: expected an entry of synthetic_base_info and an outer argument for each of {len(m.input_info)}"
            f" inputs, got {len(position)} and {len(outer_args)}"
        )
    if len(inner_args) != len(inner_args_desc):
        raise ValueError(
            f"{api}: expected a descriptor for each of {len(inner_args)} inner arguments, got {len(inner_args_desc)}"
        )
    members: list[list[int]] = [[] for _ in inner_args]
    for outer, at in enumerate(position):
        if not 0 <= at < len(inner_args):
            raise ValueError(f"{api}: input {outer} goes to {at}, but there are {len(inner_args)} inner arguments")
        members[at].append(outer)
    inputs = []
    for inner, of in enumerate(members):
        if not of:
            raise ValueError(f"{api}: no input became inner argument {inner}, {inner_args_desc[inner]}")
        if len(of) > 1 and not all(merged[i] for i in of):
            raise ValueError(
                f"{api}: inputs {', '.join(map(str, of))} became inner argument {inner}: expected (position, view) for"
                " each of several"
            )
        infos = [m.input_info[i] for i in of]
        if len({x.is_leaf for x in infos}) > 1:
            raise ValueError(
                f"{api}: of inputs {', '.join(map(str, of))}, which became {inner_args_desc[inner]}, some are leaves"
                " and some are not"
            )
        one = dataclasses.replace(infos[0], keep_input_mutations=m.keep_input_mutations)
        if len(of) > 1:
            one = InputAliasInfo(
                is_leaf=one.is_leaf,
                mutates_data=True,  # there is a base only because one of its views was written
                mutations_hidden_from_autograd=all(x.mutations_hidden_from_autograd for x in infos),
                mutations_under_no_grad_or_inference_mode=all(
                    x.mutations_under_no_grad_or_inference_mode for x in infos
                ),
                mutation_inductor_storage_resize=all(x.mutation_inductor_storage_resize for x in infos),
                requires_grad=any(x.requires_grad for x in infos),
                keep_input_mutations=m.keep_input_mutations,
            )
        inputs.append(one)
    outputs = []
    for o in m.output_info:
        if o.output_type in INPUT_ALIAS_TYPES:  # positions of outputs and of intermediate bases stay as they are
            i = input_of(m, o)
            o = dataclasses.replace(o, base_idx=position[i])
            if merged[i] and inner_args[position[i]] is not outer_args[i]:
                # How the view was made of its input is not how it is made of the base; what came out is the same.
                way = o.view_meta_sequence and dataclasses.replace(o.view_meta_sequence, sequence=("as_strided",))
                o = dataclasses.replace(o, output_type=OutputType.alias_of_input, view_meta_sequence=way)
        outputs.append(o)
    extra = [i for i, info in enumerate(m.input_info) if info.mutates_metadata and merged[i]]
    for i in extra:
        grad = bool(getattr(outer_args[i], "requires_grad", False))
        kind = type(outer_args[i])
        outputs.append(OutputAliasInfo(OutputType.alias_of_input, kind, position[i], frozenset(), grad, grad))
    written = [i for i, info in enumerate(inputs) if info.has_mutation_tangent]
    rest = len(tangent_inputs(m))
    tail = m.subclass_tangent_meta[rest:]
    examples = [TangentMeta.of(inner_args[i]) for i in written]
    fresh = [PlainTensorMeta(0, MemoryFormatMeta(t.shape, t.stride)) for t in examples]
    return (
        dataclasses.replace(
            m,
            input_info=tuple(inputs),
            output_info=tuple(outputs),
            traced_tangents=(*examples, *m.traced_tangents[rest:]),
            traced_tangents_descs=(
                *(TangentAOTInput(InputMutationAOTOutput(inner_args_desc[i])) for i in written),
                *m.traced_tangents_descs[rest:],
            ),
            subclass_inp_meta=(),
            subclass_fw_graph_out_meta=(),
            subclass_tangent_meta=renumbered((*fresh, *tail)),
            static_input_indices=tuple(position[i] for i in m.static_input_indices if not merged[i]),
        ),
        extra,
    )
