"""Records of a function's inputs and outputs: which are written, which are views of which.

The records bear the names, and their fields the names and the order, of PyTorch's AOTAutograd
(2.13). They hold for functions on NumPy arrays and on anything else that lies in strided memory: the columns
about autograd have defaults that are right where there is none. All of them are frozen; lists become tuples, sets
frozensets.

Geometry is kept in the units of the array's library: bytes for an ndarray (`a.strides`), elements for a torch
tensor (`t.stride()`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np

from .._core import address
from .._words import type_of
from .descriptors import AOTInput
from .private_copies import root_of


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
            output = kind is OutputType.alias_of_intermediate_base_is_user_output
            of = "an input" if kind in INPUT_ALIAS_TYPES else "an output" if output else "an intermediate base"
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
        if force_use_memory_format or expanded:
            return MemoryFormatMeta(memory_format=memory_format_of(size, stride))
        return MemoryFormatMeta(size, stride)


def memory_format_of(size: Sequence[int], stride: Sequence[int]) -> str:
    """channels_last where the second axis lies innermost, then the last ones, then the first; the units of the strides
    do not matter.
    """
    if len(size) not in (4, 5) or 0 in size or stride[1] <= 0:
        return "contiguous_format"
    order = (1, *range(len(size) - 1, 1, -1), 0)
    reach = [size[d] * stride[d] for d in order]
    nested = all(stride[d] >= inner for d, inner in zip(order[1:], reach, strict=False))
    if not nested or reach[-2] == stride[1]:  # the latter: one element but for the first axis, so that any layout fits
        return "contiguous_format"
    return "channels_last" if len(size) == 4 else "channels_last_3d"


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
            and kinds(self) == kinds(other)
            and self.num_backward_tokens == other.num_backward_tokens
        )

    __hash__ = None  # type: ignore[assignment]  # equal ones may differ in what does not count

    def _inputs(self, kind: MutationType) -> tuple[int, ...]:
        return tuple(i for i, info in enumerate(self.input_info) if info.mutation_type is kind)


def kinds(meta: Any) -> list[tuple[tuple[int, ...], object]]:
    """Shape and dtype of each tangent."""
    return [(tuple(t.shape), t.dtype) for t in meta.traced_tangents]
