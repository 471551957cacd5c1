"""Which arrays share memory, and the views and writes of a function, as records (docs/analysis.md)."""

from __future__ import annotations

from .collect import collect_metadata
from .overlapping import OverlapDifference, compute_overlapping_inputs, explain_overlap_differences
from .picture import alias_dot, alias_plot
from .pure import Pure
from .records import (
    INPUT_ALIAS_TYPES,
    BackwardSignature,
    GraphNames,
    GraphSignature,
    InputAliasInfo,
    JointSignature,
    MemoryFormatMeta,
    MetadataKey,
    MutationType,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    TangentMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
    create_graph_signature,
    create_joint_signature,
    create_synthetic_base_metadata,
    remove_dupe_metadata,
)
from .wrapper import BehaviourChangedError, Functionalized, LayoutChangedError, functionalize

__all__ = [
    "INPUT_ALIAS_TYPES",
    "BackwardSignature",
    "BehaviourChangedError",
    "Functionalized",
    "GraphNames",
    "GraphSignature",
    "InputAliasInfo",
    "JointSignature",
    "LayoutChangedError",
    "MemoryFormatMeta",
    "MetadataKey",
    "MutationType",
    "OutputAliasInfo",
    "OutputType",
    "OverlapDifference",
    "PlainTensorMeta",
    "Pure",
    "TangentMeta",
    "ViewAndMutationMeta",
    "ViewMetaSequence",
    "alias_dot",
    "alias_plot",
    "collect_metadata",
    "compute_overlapping_inputs",
    "create_graph_signature",
    "create_joint_signature",
    "create_synthetic_base_metadata",
    "explain_overlap_differences",
    "functionalize",
    "remove_dupe_metadata",
]
