"""All kinds, in their order."""

from __future__ import annotations

from .base import (
    PLACES,
    AOTInput,
    AOTOutput,
)
from .inputs import (
    BackwardTokenAOTInput,
    BufferAOTInput,
    DummyAOTInput,
    ForwardTokenAOTInput,
    OpaqueRefAOTInput,
    ParamAOTInput,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxForwardSeedAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from .outputs import (
    BackwardTokenAOTOutput,
    DummyAOTOutput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    PhiloxUpdatedBackwardOffsetAOTOutput,
    PhiloxUpdatedForwardOffsetAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTOutput,
)

INPUTS: tuple[type[AOTInput], ...] = (
    ParamAOTInput,
    BufferAOTInput,
    PlainAOTInput,
    DummyAOTInput,
    SubclassGetAttrAOTInput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    ViewBaseAOTInput,
    SyntheticBaseAOTInput,
    PhiloxForwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxBackwardBaseOffsetAOTInput,
    ForwardTokenAOTInput,
    BackwardTokenAOTInput,
    OpaqueRefAOTInput,
    TangentAOTInput,
)
"""All kinds of inputs, in their order."""

OUTPUTS: tuple[type[AOTOutput], ...] = (
    PlainAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    GradAOTOutput,
    PhiloxUpdatedForwardOffsetAOTOutput,
    PhiloxUpdatedBackwardOffsetAOTOutput,
    ForwardTokenAOTOutput,
    BackwardTokenAOTOutput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTOutput,
    DummyAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
"""All kinds of outputs, in their order."""

PLACES.update((kind, place) for kinds in (INPUTS, OUTPUTS) for place, kind in enumerate(kinds))
