"""PyTorch's ViewAndMutationMeta (2.13, 2.14) as fanin's, for example 08 and the tests that compare the two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsInt

import torch

from fanin.analysis import (
    InputAliasInfo,
    MemoryFormatMeta,
    MetadataKey,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    TangentMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
)
from fanin.analysis.records import PLAIN_TYPES
from fanin.descriptors import parse


def from_torch(meta: Any) -> ViewAndMutationMeta:
    """PyTorch's ViewAndMutationMeta (2.13, 2.14) as fanin's.

    Types of functional and fake tensors become torch.Tensor; outputs that pass through lose a `base_idx` that means
    nothing. Sequences of views keep their geometry and the names of their operations. ValueError where a field that
    PyTorch has since 2.14, and fanin has not, says something.
    """
    plain = torch.Tensor
    return ViewAndMutationMeta(
        input_info=tuple(InputAliasInfo(**vars_of(i)) for i in meta.input_info),
        output_info=tuple(output_from_torch(plain, o) for o in meta.output_info),
        num_intermediate_bases=meta.num_intermediate_bases,
        keep_input_mutations=meta.keep_input_mutations,
        traced_tangents=tuple(
            TangentMeta(plain, tuple(t.shape), t.dtype, tuple(t.stride())) for t in meta.traced_tangents
        ),
        traced_tangents_descs=tuple(parse(repr(desc)) for desc in meta.traced_tangents_descs),
        subclass_inp_meta=tuple(map(layout_from_torch, meta.subclass_inp_meta)),
        subclass_fw_graph_out_meta=tuple(map(layout_from_torch, meta.subclass_fw_graph_out_meta)),
        subclass_tangent_meta=tuple(map(layout_from_torch, meta.subclass_tangent_meta)),
        grad_enabled_mutation=meta.grad_enabled_mutation,
        static_input_indices=tuple(meta.static_input_indices),
        tokens=meta.tokens,
        num_backward_tokens=meta.num_backward_tokens,
        is_rng_op_functionalized=meta.is_rng_op_functionalized,
    )


def output_from_torch(plain: type, o: Any) -> OutputAliasInfo:
    """PyTorch's OutputAliasInfo as fanin's."""
    kind, way = OutputType[o.output_type.name], o.view_meta_sequence
    return OutputAliasInfo(
        kind,
        plain if issubclass(o.raw_type, plain) else o.raw_type,
        None if kind in PLAIN_TYPES else o.base_idx,
        None if o.dynamic_dims is None else frozenset(o.dynamic_dims),
        o.requires_grad,
        o.requires_grad_for_backward,
        way and way_from_torch(way),
    )


def way_from_torch(way: Any) -> ViewMetaSequence:
    """PyTorch's ViewMetaSequence as fanin's, of which only the operations' names can be read."""
    key = way.metadata
    offset = None if key.storage_offset is None else numbers([key.storage_offset])[0]
    ours = MetadataKey(
        numbers(key.size),
        key.layout,
        key.is_sparse,
        key.stride and numbers(key.stride),
        offset,
        key.is_conj,
        key.is_neg,
    )
    names = repr(way)[len("ViewMetaSequence(") : -1].split(", ") if way.sequence else ()
    return ViewMetaSequence(ours, None, tuple(names))


def layout_from_torch(x: Any) -> PlainTensorMeta:
    """PyTorch's PlainTensorMeta as fanin's."""
    for name in ("size_symbol_placeholders", "stride_symbol_placeholders"):  # since 2.14
        if any(getattr(x, name, ())):
            raise ValueError(f"PlainTensorMeta: fanin's record has no {name}")
    f = x.memory_format
    if f is None:
        return PlainTensorMeta(x.unwrapped_idx)
    form = None if f.memory_format is None else str(f.memory_format).removeprefix("torch.")
    return PlainTensorMeta(x.unwrapped_idx, MemoryFormatMeta(f.size, f.stride, form))


def vars_of(info: object) -> dict[str, Any]:
    """The fields of PyTorch's InputAliasInfo."""
    if getattr(info, "mutation_is_shallow_copy_data", False):  # since 2.14
        raise ValueError("InputAliasInfo: fanin's record has no mutation_is_shallow_copy_data")
    return {name: getattr(info, name) for name in InputAliasInfo.__dataclass_fields__}


def numbers(every: Iterable[SupportsInt]) -> tuple[int, ...]:
    """Plain numbers of those that PyTorch wraps to compare them by expression."""
    return tuple(int(getattr(x, "val", x)) for x in every)
