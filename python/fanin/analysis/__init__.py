"""Who shares memory, who is changed, what is what: the views and writes of a function, as records (docs/analysis.md)."""

from __future__ import annotations

from .records import (
    INPUT_ALIAS_TYPES,
    InputAliasInfo,
    MemoryFormatMeta,
    MetadataKey,
    MutationType,
    OutputAliasInfo,
    OutputType,
    PlainTensorMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
)

__all__ = [
    "INPUT_ALIAS_TYPES",
    "InputAliasInfo",
    "MemoryFormatMeta",
    "MetadataKey",
    "MutationType",
    "OutputAliasInfo",
    "OutputType",
    "PlainTensorMeta",
    "ViewAndMutationMeta",
    "ViewMetaSequence",
]
