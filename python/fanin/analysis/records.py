"""Records of a function's inputs and outputs: which are written, which are views of which.

The records bear the names, and their fields the names and the order, of PyTorch's AOTAutograd
(2.13). They hold for functions on NumPy arrays and on anything else that lies in strided memory: the columns
about autograd have defaults that are right where there is none. All of them are frozen; lists become tuples, sets
frozensets.

Geometry is kept in the units of the array's library: bytes for an ndarray (`a.strides`), elements for a torch
tensor (`t.stride()`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from .._core import address
from .._words import counted, type_of
from .arrays import root_of
from .descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

__tracebackhide__ = True  # no frames of ours in reports of pytest


class OutputType(Enum):
    """What an output is to the inputs, to the other outputs, and to what was made on the way."""

    non_alias = 1
    """An array of its own, or no array at all."""
    alias_of_input = 2
    """A view of an input's memory: `base_idx` is the input's position."""
    is_input = 3
    """The very object that came in: `base_idx` is the input's position."""
    alias_of_intermediate_save_as_output = 4
    """A view of an intermediate, which is returned as an extra output on its behalf: `base_idx` counts the extra
    outputs.
    """
    alias_of_intermediate = 5
    """A view of an intermediate that another output has had returned already: `base_idx` counts the extra outputs."""
    alias_of_intermediate_base_is_user_output = 6
    """A view of another output: `base_idx` is that output's position."""
    unsafe_view_alias = 7
    """The only view of an intermediate: nothing is lost if it counts as an array of its own.
    """
    custom_function_view = 8
    """A view of an input made by a function with a backward of its own, which cannot be replayed."""


INPUT_ALIAS_TYPES = frozenset({OutputType.alias_of_input, OutputType.is_input})
"""The only kinds of output whose `base_idx` counts inputs; all others count outputs or intermediate bases."""

PLAIN_TYPES = frozenset({OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view})
"""The kinds of output that pass through as they are: they have no `base_idx`."""


class MutationType(Enum):
    """Where a write happens: nowhere, in the graph, or in the wrapper after the graph has run."""

    NOT_MUTATED = 1
    MUTATED_IN_GRAPH = 2
    MUTATED_OUT_GRAPH = 3


@dataclass(frozen=True)
class InputAliasInfo:
    """What a function did to one of its inputs. With no argument: an array that was not touched.

    `mutates_data`: its elements were written. `mutates_metadata`: its shape, strides or offset are others than before
    (changes that cancel do not count). `mutates_storage_metadata`: it lies in other memory than before, which implies
    `mutates_metadata`; then `mutates_data` is False, for the new memory brings its values along.
    `mutations_hidden_from_autograd`: autograd could observe none of the writes (also where there was none).
    `mutations_under_no_grad_or_inference_mode`: it was written, and each write was under no_grad.
    `keep_input_mutations`: whether the graph may write.

    ValueError: `mutates_storage_metadata` without `mutates_metadata`.

    >>> from fanin.analysis import InputAliasInfo
    >>> InputAliasInfo(mutates_data=True).mutation_type.name
    'MUTATED_OUT_GRAPH'
    >>> InputAliasInfo(mutates_data=True, keep_input_mutations=True).mutation_type.name
    'MUTATED_IN_GRAPH'
    """

    is_leaf: bool = True
    mutates_data: bool = False
    mutates_metadata: bool = False
    mutations_hidden_from_autograd: bool = False
    mutations_under_no_grad_or_inference_mode: bool = False
    mutation_inductor_storage_resize: bool = False
    mutates_storage_metadata: bool = False
    requires_grad: bool = False
    keep_input_mutations: bool = False

    def __post_init__(self) -> None:
        if self.mutates_storage_metadata and not self.mutates_metadata:
            raise ValueError(
                "InputAliasInfo: mutates_storage_metadata means that the input lies in other memory than before, "
                "which changes its geometry: expected mutates_metadata=True with it"
            )

    @functools.cached_property
    def mutation_type(self) -> MutationType:
        """Where the write happens: see `MutationType`.

        The graph may, with `keep_input_mutations`, write data and storage where autograd need not observe it: no
        geometry changes and no gradient is required, or every write was hidden from it, or every write was under
        no_grad. All other writes are the wrapper's. Where PyTorch raises for storage that changed and cannot be written
        in the graph, this is MUTATED_OUT_GRAPH.
        """
        if not (self.mutates_data or self.mutates_metadata or self.mutation_inductor_storage_resize):
            return MutationType.NOT_MUTATED
        written = self.mutates_data or self.mutates_storage_metadata or self.mutation_inductor_storage_resize
        unseen = (
            (not self.mutates_metadata and not self.requires_grad)
            or self.mutations_hidden_from_autograd
            or self.mutations_under_no_grad_or_inference_mode
        )
        if self.keep_input_mutations and written and unseen:
            return MutationType.MUTATED_IN_GRAPH
        return MutationType.MUTATED_OUT_GRAPH

    @property
    def has_mutation_tangent(self) -> bool:
        """Whether the input's new value has a tangent: it is data, written outside of the graph, and it requires a
        gradient.
        """
        return self.mutation_type is MutationType.MUTATED_OUT_GRAPH and self.mutates_data and self.requires_grad


@dataclass(frozen=True)
class MetadataKey:
    """The geometry of an array; equal for two arrays of one storage that show the same elements in the same way.

    `storage_offset` is from the start of the memory that the array is a view of. Sparse arrays have neither stride nor
    offset.

    >>> from fanin.analysis import MetadataKey
    >>> a = np.zeros((4, 3))
    >>> MetadataKey.make(a[1:]).storage_offset, MetadataKey.make(a[1:]) == MetadataKey.make(a[:3])
    (24, False)
    """

    size: tuple[int, ...]
    layout: object
    is_sparse: bool
    stride: tuple[int, ...] | None
    storage_offset: int | None
    is_conj: bool = False
    is_neg: bool = False

    @staticmethod
    def make(array: Any) -> MetadataKey:
        """The key of an ndarray (in bytes) or of a torch tensor (in elements)."""
        if isinstance(array, np.ndarray):
            offset = address(array) - address(root_of(array))
            return MetadataKey(array.shape, "strided", False, array.strides, offset)
        if not hasattr(array, "storage_offset"):
            raise TypeError(f"MetadataKey: expected an ndarray or a torch tensor, got {type_of(array)}")
        sparse = str(array.layout) != "torch.strided"
        return MetadataKey(
            tuple(array.shape),
            array.layout,
            sparse,
            None if sparse else tuple(array.stride()),
            None if sparse else array.storage_offset(),
            array.is_conj(),
            array.is_neg(),
        )


@dataclass(frozen=True, eq=False)
class ViewMetaSequence:
    """How a view was made of its base: what came out, and the names of the operations where they were recorded.

    Two of them are equal where what came out is: the way does not count. None equals each of them, for it means "not
    recorded".
    """

    metadata: MetadataKey
    dtype: object = None
    sequence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence", tuple(self.sequence))

    def __repr__(self) -> str:
        return f"ViewMetaSequence({', '.join(self.sequence)})"

    def __eq__(self, other: object) -> bool:
        if other is None:
            return True
        if not isinstance(other, ViewMetaSequence):
            return NotImplemented
        return self.metadata == other.metadata

    __hash__ = None  # type: ignore[assignment]  # equal to None, which has a hash of its own


@dataclass(frozen=True)
class OutputAliasInfo:
    """What one output is: see `OutputType`.

    `base_idx` counts inputs (alias_of_input, is_input), outputs (alias_of_intermediate_base_is_user_output) or
    intermediate bases (the other two kinds of alias); it is None for the kinds that pass through. `dynamic_dims`: the
    axes whose extent is not a plain number; None for what is no array. `requires_grad_for_backward`: whether it has a
    tangent. `view_meta_sequence`: how the view was made, where that was recorded.

    TypeError, ValueError: a `base_idx` that the kind cannot have.

    >>> from fanin.analysis import OutputAliasInfo, OutputType
    >>> OutputAliasInfo(OutputType.alias_of_input, np.ndarray)
    Traceback (most recent call last):
    ValueError: OutputAliasInfo: alias_of_input needs base_idx, the position of an input; got None
    """

    output_type: OutputType
    raw_type: type
    base_idx: int | None = None
    dynamic_dims: frozenset[int] | None = None
    requires_grad: bool = False
    requires_grad_for_backward: bool = False
    view_meta_sequence: ViewMetaSequence | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.output_type, OutputType):
            raise TypeError(f"OutputAliasInfo: expected an OutputType, got {self.output_type!r}")
        if self.dynamic_dims is not None:
            object.__setattr__(self, "dynamic_dims", frozenset(self.dynamic_dims))
        kind = self.output_type
        if kind in PLAIN_TYPES:
            if self.base_idx is not None:
                raise ValueError(
                    f"OutputAliasInfo: {kind.name} is a view of nothing: expected base_idx=None, got {self.base_idx!r}"
                )
            return
        if self.base_idx is None or operator.index(self.base_idx) < 0:
            of = "an intermediate base"
            if kind in INPUT_ALIAS_TYPES:
                of = "an input"
            elif kind is OutputType.alias_of_intermediate_base_is_user_output:
                of = "an output"
            raise ValueError(
                f"OutputAliasInfo: {kind.name} needs base_idx, the position of {of}; got {self.base_idx!r}"
            )


MEMORY_FORMATS = ("contiguous_format", "channels_last", "channels_last_3d")


@dataclass(frozen=True)
class MemoryFormatMeta:
    """The layout in which a tangent is expected: either exactly (size and stride), or only in kind (`memory_format`).

    `memory_format` is "contiguous_format", "channels_last" or "channels_last_3d".
    """

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    memory_format: str | None = None

    def __post_init__(self) -> None:
        for name in ("size", "stride"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        exact = self.size is not None and self.stride is not None
        if exact == (self.memory_format is not None) or (self.size is None) != (self.stride is None):
            raise ValueError(f"MemoryFormatMeta: expected size and stride, or memory_format; got {self!r}")
        if self.memory_format is not None and self.memory_format not in MEMORY_FORMATS:
            raise ValueError(
                f"MemoryFormatMeta: expected a memory_format among {', '.join(MEMORY_FORMATS)}, got"
                f" {self.memory_format!r}"
            )

    @staticmethod
    def from_tensor(array: Any, force_use_memory_format: bool = False) -> MemoryFormatMeta:
        """The layout to expect of the tangent of an array: its own, unless it is expanded (a stride of 0), whose layout
        no gradient can have.
        """
        size = tuple(array.shape)
        stride = tuple(array.strides if isinstance(array, np.ndarray) else array.stride())
        expanded = 0 not in size and any(n > 1 and s == 0 for n, s in zip(size, stride, strict=True))
        if not (force_use_memory_format or expanded):
            return MemoryFormatMeta(size, stride)
        # channels_last where the second axis lies innermost, then the last ones, then the first; the units of the
        # strides do not matter.
        kind = "contiguous_format"
        if len(size) in (4, 5) and 0 not in size and stride[1] > 0:
            order = (1, *range(len(size) - 1, 1, -1), 0)
            reach = [size[d] * stride[d] for d in order]
            nested = all(stride[d] >= inner for d, inner in zip(order[1:], reach, strict=False))
            if nested and reach[-2] != stride[1]:  # else one element but for the first axis, so that any layout fits
                kind = "channels_last" if len(size) == 4 else "channels_last_3d"
        return MemoryFormatMeta(memory_format=kind)


@dataclass(frozen=True)
class PlainTensorMeta:
    """An array that is no wrapper around others: its position in the flat graph, and the layout expected of it."""

    unwrapped_idx: int
    memory_format: MemoryFormatMeta | None = None


@dataclass(frozen=True)
class TangentMeta:
    """What a tangent will be: the gradient of an array of this type, shape, dtype and stride (None: any)."""

    raw_type: type
    shape: tuple[int, ...]
    dtype: object
    stride: tuple[int, ...] | None = None

    @staticmethod
    def of(array: Any) -> TangentMeta:
        """The tangent of an ndarray or a torch tensor: laid out as the array is, or contiguously where that is
        expanded.
        """
        size = tuple(array.shape)
        if str(getattr(array, "layout", "torch.strided")) != "torch.strided":
            return TangentMeta(type(array), size, array.dtype)
        stride = MemoryFormatMeta.from_tensor(array).stride
        if stride is None:  # an expanded array is of no other kind than contiguous
            item = array.itemsize if isinstance(array, np.ndarray) else 1
            stride = tuple(item * math.prod(size[axis + 1 :]) for axis in range(len(size)))
        return TangentMeta(type(array), size, array.dtype, stride)


NO_TOKENS: Mapping[object, object] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class ViewAndMutationMeta:
    """The views and writes of a function.

    `input_info`, `output_info`: one record for each flat input and output. `num_intermediate_bases`: how many bases are
    returned after the outputs. `traced_tangents`: for each tangent something that has its `shape` and `dtype` (as a
    `TangentMeta`), in the order: new values of inputs (`has_mutation_tangent`), outputs that pass through and need a
    backward, intermediate bases; `traced_tangents_descs` describes them one by one. `subclass_inp_meta`,
    `subclass_fw_graph_out_meta`, `subclass_tangent_meta`: records of wrapped arrays. `grad_enabled_mutation`: the grad
    mode after the function, if it changed it. `static_input_indices`: inputs that stay where they are from
    call to call. `tokens`: effect tokens.

    Everything else follows from these. Two are equal where inputs, outputs, the number of bases,
    `keep_input_mutations`, random state, backward tokens, and shape and dtype of the tangents are; descriptors and
    strides of tangents do not count. ValueError: more or fewer descriptors than tangents.

    >>> from fanin.analysis import InputAliasInfo, ViewAndMutationMeta
    >>> meta = ViewAndMutationMeta([InputAliasInfo(), InputAliasInfo(mutates_data=True)], [])
    >>> meta.mutated_inp_runtime_indices, meta.num_forward_returns
    ((1,), 1)
    """

    input_info: tuple[InputAliasInfo, ...]
    output_info: tuple[OutputAliasInfo, ...]
    num_intermediate_bases: int = 0
    keep_input_mutations: bool = False
    traced_tangents: tuple[object, ...] = ()
    traced_tangents_descs: tuple[AOTInput, ...] = ()
    subclass_inp_meta: tuple[object, ...] = ()
    subclass_fw_graph_out_meta: tuple[object, ...] = ()
    subclass_tangent_meta: tuple[object, ...] = ()
    grad_enabled_mutation: bool | None = None
    static_input_indices: tuple[int, ...] = ()
    tokens: Mapping[object, object] = field(default_factory=lambda: NO_TOKENS)
    num_backward_tokens: int = 0
    is_rng_op_functionalized: bool = False

    def __post_init__(self) -> None:
        for name in (
            "input_info",
            "output_info",
            "traced_tangents",
            "traced_tangents_descs",
            "subclass_inp_meta",
            "subclass_fw_graph_out_meta",
            "subclass_tangent_meta",
            "static_input_indices",
        ):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "tokens", MappingProxyType(dict(self.tokens)))
        if len(self.traced_tangents) != len(self.traced_tangents_descs):
            raise ValueError(
                f"ViewAndMutationMeta: expected a descriptor for each of {len(self.traced_tangents)} tangents, "
                f"got {len(self.traced_tangents_descs)}"
            )

    # Of the inputs

    @functools.cached_property
    def mutated_inp_runtime_indices(self) -> tuple[int, ...]:
        """The inputs that are written back after the graph has run, in order."""
        return self._inputs(MutationType.MUTATED_OUT_GRAPH)

    @functools.cached_property
    def mutated_graph_handled_indices(self) -> tuple[int, ...]:
        """The inputs that the graph itself writes."""
        return self._inputs(MutationType.MUTATED_IN_GRAPH)

    @functools.cached_property
    def mutated_graph_handled_indices_seen_by_autograd(self) -> tuple[int, ...]:
        """Those of them whose writes autograd could observe."""
        hidden = [info.mutations_hidden_from_autograd for info in self.input_info]
        return tuple(i for i in self.mutated_graph_handled_indices if not hidden[i])

    @property
    def num_mutated_inp_runtime_indices(self) -> int:
        """How many inputs are written back after the graph has run."""
        return len(self.mutated_inp_runtime_indices)

    @property
    def num_mutated_graph_handled_indices(self) -> int:
        """How many inputs the graph itself writes."""
        return len(self.mutated_graph_handled_indices)

    @property
    def num_mutated_graph_handled_indices_seen_by_autograd(self) -> int:
        """How many of them autograd could observe."""
        return len(self.mutated_graph_handled_indices_seen_by_autograd)

    @functools.cached_property
    def num_input_tangents(self) -> int:
        """How many of `traced_tangents`, from the first on, are of new values of inputs."""
        return sum(info.has_mutation_tangent for info in self.input_info)

    # Of the outputs

    @functools.cached_property
    def aliased_out_indices(self) -> tuple[int, ...]:
        """The outputs that are regenerated as views: of an input, of an intermediate, of another output."""
        return tuple(i for i, info in enumerate(self.output_info) if info.output_type not in PLAIN_TYPES)

    @functools.cached_property
    def unsafe_view_out_indices(self) -> tuple[int, ...]:
        """The outputs that are the only view of an intermediate."""
        return tuple(i for i, info in enumerate(self.output_info) if info.output_type is OutputType.unsafe_view_alias)

    @property
    def num_outputs(self) -> int:
        """How many outputs the function has, arrays or not."""
        return len(self.output_info)

    @functools.cached_property
    def num_outputs_non_aliased(self) -> int:
        """How many outputs pass through as they are."""
        return sum(info.output_type in PLAIN_TYPES for info in self.output_info)

    @functools.cached_property
    def num_outputs_aliased_to_inputs(self) -> int:
        """How many outputs are inputs or views of them."""
        return sum(info.output_type in INPUT_ALIAS_TYPES for info in self.output_info)

    @property
    def num_unsafe_view_outputs(self) -> int:
        """How many outputs are the only view of an intermediate."""
        return len(self.unsafe_view_out_indices)

    @property
    def num_outputs_aliased_to_intermediates(self) -> int:
        """How many outputs are views of intermediates, or of other outputs."""
        return self.num_outputs_aliased - self.num_outputs_aliased_to_inputs

    @property
    def num_outputs_aliased(self) -> int:
        """How many outputs are regenerated as views."""
        return len(self.aliased_out_indices)

    @functools.cached_property
    def dynamic_outputs(self) -> bool:
        """Whether an output has an axis whose extent is not a plain number."""
        return any(info.dynamic_dims for info in self.output_info)

    @functools.cached_property
    def output_types(self) -> tuple[type, ...]:
        """The type of each tangent."""
        return tuple(getattr(t, "raw_type", type(t)) for t in self.traced_tangents)

    # What the graph returns

    @property
    def num_outputs_rng_offset(self) -> int:
        """1 where random numbers are functionalized, for the offset that comes back; else 0."""
        return int(self.is_rng_op_functionalized)

    @property
    def num_forward_returns(self) -> int:
        """Values that the forward graph returns: new values of inputs, outputs, intermediate bases."""
        return self.num_mutated_inp_runtime_indices + self.num_outputs + self.num_intermediate_bases

    @property
    def num_forward(self) -> int:
        """`num_forward_returns` and the offset of the random numbers."""
        return self.num_forward_returns + self.num_outputs_rng_offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ViewAndMutationMeta):
            return NotImplemented
        return (
            self.input_info == other.input_info
            and self.output_info == other.output_info
            and self.num_intermediate_bases == other.num_intermediate_bases
            and self.keep_input_mutations == other.keep_input_mutations
            and self.is_rng_op_functionalized == other.is_rng_op_functionalized
            and kinds(self.traced_tangents) == kinds(other.traced_tangents)
            and self.num_backward_tokens == other.num_backward_tokens
        )

    __hash__ = None  # type: ignore[assignment]  # equal ones may differ in what does not count

    def _inputs(self, kind: MutationType) -> tuple[int, ...]:
        return tuple(i for i, info in enumerate(self.input_info) if info.mutation_type is kind)


def kinds(tangents: Iterable[Any]) -> list[tuple[tuple[int, ...], object]]:
    """Shape and dtype of each tangent."""
    return [(tuple(t.shape), t.dtype) for t in tangents]


# Metadata of a function whose inputs are others: without duplicates, with bases in the place of views


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


# The signature of a graph: which of its inputs and outputs, by name, is a parameter, a buffer, a new value, a gradient


API = "create_graph_signature"


@dataclass(frozen=True)
class GraphNames:
    """The names of a graph: those of its placeholders and outputs, in order. An output that is no array
    has the name None.
    """

    placeholders: tuple[str, ...]
    outputs: tuple[str | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placeholders", tuple(self.placeholders))
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @staticmethod
    def of(graph: object) -> GraphNames:
        """The names of a graph: of GraphNames, or of a torch.fx GraphModule or Graph. TypeError for
        anything else, ValueError for a graph whose last node returns no list.
        """
        if isinstance(graph, GraphNames):
            return graph
        nodes = getattr(getattr(graph, "graph", graph), "nodes", None)
        if nodes is None:
            raise TypeError(f"{API}: expected GraphNames or a torch.fx graph, got {type_of(graph)}")
        every = list(nodes)
        if (
            not every
            or every[-1].op != "output"
            or len(every[-1].args) != 1
            or not isinstance(every[-1].args[0], (list, tuple))
        ):
            raise ValueError(f"{API}: expected a graph whose last node is the output and returns one list")
        return GraphNames(
            tuple(n.name for n in every if n.op == "placeholder"),
            tuple(getattr(x, "name", None) for x in every[-1].args[0]),
        )


@dataclass(frozen=True)
class BackwardSignature:
    """Of a graph forward and backward: what each gradient is of, and which output is the loss. Keys are names of
    outputs.
    """

    gradients_to_parameters: dict[str | None, str]
    gradients_to_user_inputs: dict[str | None, str]
    loss_output: str | None
    gradients_to_buffers: dict[str | None, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphSignature:
    """What each input and output of a graph is, by name.

    `parameters`, `buffers`: full names. `user_inputs`, `user_outputs`, `input_tokens`, `output_tokens`: names in the
    graph. `inputs_to_parameters`, `inputs_to_buffers`: names in the graph to full names. `buffers_to_mutate`,
    `parameters_to_mutate`, `user_inputs_to_mutate`: the output that is the new value, to the full name or the name of
    the input. `backward_signature`: None for a graph that is only forward.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    user_inputs: tuple[str, ...]
    user_outputs: tuple[str | None, ...]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str | None, str]
    parameters_to_mutate: dict[str | None, str]
    user_inputs_to_mutate: dict[str | None, str]
    in_spec: object
    out_spec: object
    backward_signature: BackwardSignature | None
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str | None, ...]


def create_graph_signature(
    fx_g: object,
    fw_metadata: ViewAndMutationMeta,
    in_spec: object = None,
    out_spec: object = None,
    *,
    user_args_flat: Sequence[object] = (),
    params_and_buffers_flat: Sequence[object] = (),
    param_names: Sequence[str] = (),
    buffer_names: Sequence[str] = (),
    trace_joint: bool = False,
    num_user_fw_outs: int | None = None,
    loss_index: int | None = None,
) -> GraphSignature:
    """The signature of a graph whose inputs are (tokens, parameters, buffers, user's inputs) and whose outputs are
    (tokens, new values, user's outputs, gradients).

    fx_g: `GraphNames`, or a torch.fx GraphModule. fw_metadata: what the function does, for the inputs
    (parameters, buffers, user's inputs); new values are those of `mutated_inp_runtime_indices`, and outputs, where it
    has any, those of a graph without gradients. user_args_flat, params_and_buffers_flat: read for `requires_grad`
    alone, and needed only with `trace_joint`; without it their number is checked where they are given.
    num_user_fw_outs: how many outputs the user's function has; needed with `trace_joint`. loss_index: which of them is
    the loss.

    Gradients come in the order parameters, buffers, user's inputs, one for each that requires one. ValueError: names
    and numbers that do not add up, with what was expected; a parameter that a graph with gradients writes.

    >>> from fanin.analysis import GraphNames, InputAliasInfo, ViewAndMutationMeta, create_graph_signature
    >>> meta = ViewAndMutationMeta([InputAliasInfo(), InputAliasInfo(mutates_data=True), InputAliasInfo()], [])
    >>> names = GraphNames(["p", "b", "x"], ["new_b", "y"])
    >>> create_graph_signature(names, meta, param_names=["fc.weight"], buffer_names=["bn.mean"]).buffers_to_mutate
    {'new_b': 'bn.mean'}
    """
    graph, parameters, buffers = GraphNames.of(fx_g), tuple(param_names), tuple(buffer_names)
    full, tokens, params = (*parameters, *buffers), len(fw_metadata.tokens), len(parameters)
    stored, arguments = graph.placeholders[tokens : tokens + len(full)], graph.placeholders[tokens + len(full) :]
    if tokens + len(full) > len(graph.placeholders):
        raise ValueError(
            f"{API}: expected {counted(tokens, 'token')}, {counted(params, 'parameter')} and"
            f" {counted(len(buffers), 'buffer')} among the inputs, but there are {len(graph.placeholders)}:"
            f" {', '.join(graph.placeholders)}"
        )
    written = fw_metadata.mutated_inp_runtime_indices
    if written and written[-1] >= len(full) + len(arguments):
        raise ValueError(f"{API}: input {written[-1]} is written, but there are {len(full) + len(arguments)} inputs")
    first = tokens + len(written)
    if first > len(graph.outputs):
        raise ValueError(
            f"{API}: expected {counted(tokens, 'token')} and {counted(len(written), 'new value')}, got"
            f" {counted(len(graph.outputs), 'output')}"
        )
    backward, outputs = None, graph.outputs[first:]
    own, bases = fw_metadata.num_outputs, fw_metadata.num_intermediate_bases
    if trace_joint and (num_user_fw_outs is None or loss_index is None):
        raise ValueError(f"{API}: trace_joint needs num_user_fw_outs and loss_index")
    if not trace_joint and fw_metadata.output_info and len(outputs) != own + bases:
        raise ValueError(
            f"{API}: expected {counted(own + bases, 'output')} after the new values, {own} of the function and"
            f" {counted(bases, 'base')}, got {len(outputs)}: {', '.join(map(str, outputs))}"
        )
    requiring = []
    for given, named, what in (
        (params_and_buffers_flat, full, "params_and_buffers_flat"),
        (user_args_flat, arguments, "user_args_flat"),
    ):
        if (trace_joint or len(given)) and len(given) != len(named):
            raise ValueError(f"{API}: expected {len(named)} {what}, {', '.join(named)}; got {len(given)}")
        requiring.append([i for i, x in enumerate(given) if getattr(x, "requires_grad", False)])
    if num_user_fw_outs is not None and loss_index is not None and trace_joint:
        of_stored, of_given = requiring
        wrong = [full[i] for i in written if i < params]
        if wrong:
            raise ValueError(
                f"{API}: a graph with gradients cannot write parameters, but {', '.join(wrong)} is written"
            )
        if not 0 <= loss_index < num_user_fw_outs:
            raise ValueError(
                f"{API}: loss_index counts the user's {num_user_fw_outs} outputs from 0 on, got {loss_index}"
            )
        expected = [*(full[i] for i in of_stored), *(arguments[i] for i in of_given)]
        gradients = outputs[num_user_fw_outs:]
        if len(outputs) < num_user_fw_outs or len(gradients) != len(expected):
            raise ValueError(
                f"{API}: expected {counted(num_user_fw_outs, 'output')} and {counted(len(expected), 'gradient')}"
                f" ({', '.join(expected)}), got {len(outputs)} in all"
            )
        grads = dict(zip(gradients, of_stored, strict=False))
        backward = BackwardSignature(
            gradients_to_parameters={g: full[i] for g, i in grads.items() if i < params},
            gradients_to_user_inputs=dict(zip(gradients[len(of_stored) :], expected[len(of_stored) :], strict=True)),
            loss_output=outputs[loss_index],
            gradients_to_buffers={g: full[i] for g, i in grads.items() if i >= params},
        )
        outputs = outputs[:num_user_fw_outs]
    new = dict(zip(written, graph.outputs[tokens:first], strict=True))
    return GraphSignature(
        parameters=parameters,
        buffers=buffers,
        user_inputs=arguments,
        user_outputs=outputs,
        inputs_to_parameters=dict(zip(stored[:params], parameters, strict=True)),
        inputs_to_buffers=dict(zip(stored[params:], buffers, strict=True)),
        buffers_to_mutate={name: full[i] for i, name in new.items() if params <= i < len(full)},
        parameters_to_mutate={name: full[i] for i, name in new.items() if i < params},
        user_inputs_to_mutate={name: arguments[i - len(full)] for i, name in new.items() if i >= len(full)},
        in_spec=in_spec,
        out_spec=out_spec,
        backward_signature=backward,
        input_tokens=graph.placeholders[:tokens],
        output_tokens=graph.outputs[:tokens],
    )


# The joint function


@dataclass(frozen=True)
class JointSignature:
    """What the function that goes forward and backward takes and returns, slot by slot.

    `primals`: its inputs. `tangents`: what comes with them, the gradients of what it returns that has one. `outputs`:
    new values of inputs, the function's outputs, intermediate bases. `gradients`: for each primal its gradient, or None
    where it requires none. Without a backward, tangents and gradients are empty.
    """

    primals: tuple[AOTInput, ...]
    tangents: tuple[AOTInput, ...]
    outputs: tuple[AOTOutput, ...]
    gradients: tuple[GradAOTOutput | None, ...]

    @property
    def inputs(self) -> tuple[AOTInput, ...]:
        """All that it takes, in order."""
        return (*self.primals, *self.tangents)

    @property
    def returned(self) -> tuple[AOTOutput | None, ...]:
        """All that it returns, in order."""
        return (*self.outputs, *self.gradients)


def create_joint_signature(
    meta: ViewAndMutationMeta, requires_grad: Sequence[bool], args_descs: Sequence[AOTInput] | None = None
) -> JointSignature:
    """The signature of the joint function: of the function of `meta` together with its backward.

    requires_grad: for each input, whether it requires a gradient before the call; the metadata has it after the call.
    An input that requires one has a gradient, also if the function set that itself, and does not write it. args_descs:
    what each input is (default: PlainAOTInput by position). There is a backward where an input requires a gradient and
    something has a history that is returned, other than a view of an input that requires one, or is written where
    gradients are on.

    ValueError: more or fewer flags or descriptors than inputs.

    >>> from fanin.analysis import collect_metadata, create_joint_signature
    >>> meta = collect_metadata(lambda w, x: w * x, [np.ones(2), np.ones(2)], requires_grad=[True, False])
    >>> joint = create_joint_signature(meta, [True, False])
    >>> [str(x) for x in joint.inputs]
    ['args[0]', 'args[1]', '__output_tangent(output[0])']
    >>> [str(x) for x in joint.returned]
    ['output[0]', '__grad(args[0])', 'None']
    """
    n, api = len(meta.input_info), "create_joint_signature"
    descs = tuple(args_descs) if args_descs is not None else tuple(PlainAOTInput(i) for i in range(n))
    for given, what in (
        (requires_grad, "requires_grad: expected a flag"),
        (descs, "args_descs: expected a descriptor"),
    ):
        if len(given) != n:
            raise ValueError(f"{api}: {what} for each of the {counted(n, 'input')}, got {len(given)}")
    saved = (
        IntermediateBaseAOTOutput(PlainAOTOutput(j))
        for j, o in enumerate(meta.output_info)
        if o.output_type is OutputType.alias_of_intermediate_save_as_output
    )
    outputs: tuple[AOTOutput, ...] = (
        *(InputMutationAOTOutput(descs[i]) for i in meta.mutated_inp_runtime_indices),
        *(PlainAOTOutput(j) for j in range(meta.num_outputs)),
        *saved,
    )
    if not any(requires_grad) or not has_backward(meta):
        return JointSignature(descs, (), outputs, ())
    grads = [
        before or (info.requires_grad and info.mutation_type is MutationType.NOT_MUTATED)
        for before, info in zip(requires_grad, meta.input_info, strict=True)
    ]
    gradients = tuple(
        GradAOTOutput(d) if has_grad else None  # type: ignore[arg-type]  # it raises for an input without a gradient
        for d, has_grad in zip(descs, grads, strict=True)
    )
    return JointSignature(descs, meta.traced_tangents_descs, outputs, gradients)


def has_backward(meta: ViewAndMutationMeta) -> bool:
    """Whether anything that is returned or written has a history that is not an input's own."""
    requiring = [info.requires_grad for info in meta.input_info]
    returned = any(
        o.requires_grad
        and not (o.output_type in INPUT_ALIAS_TYPES and o.base_idx is not None and requiring[o.base_idx])
        for o in meta.output_info
    )
    return returned or any(
        info.requires_grad
        and info.mutates_data
        and not info.mutations_under_no_grad_or_inference_mode
        and not info.mutations_hidden_from_autograd
        for info in meta.input_info
    )
