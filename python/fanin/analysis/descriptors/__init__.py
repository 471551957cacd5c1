"""The meaning of the inputs and outputs of a graph, as small immutable trees.

A graph made of a flat function takes and returns more than the function: gradients of outputs, bases of views, new
values of written inputs. A descriptor gives the meaning of one such slot: for an input the path from the function's
arguments to it, for an output the path from the function's result to it.

>>> from fanin import descriptors as d
>>> x = d.PlainAOTInput(0)
>>> print(d.GradAOTOutput(x))
__grad(args[0])
>>> d.GradAOTOutput(x)
GradAOTOutput(grad_of=PlainAOTInput(idx=0))
>>> d.parse("__grad(args[0])") == d.GradAOTOutput(x)
True

The classes have PyTorch's names, and their fields PyTorch's names and order. They are frozen, hashable and equal by
value. `str` and `expr()` give the short form, `repr` the exact one: `expr()` may be ambiguous (see `candidates`),
`repr` never is.

Allowed nesting, level by level (a dummy replaces anything of level 1 that needs no gradient):

| level | inputs | outputs | may contain |
|---|---|---|---|
| 1 | Plain, Param, Buffer, Dummy | Plain, Dummy | nothing |
| 2 | ViewBase, SyntheticBase | InputMutation, IntermediateBase, MetadataMutation | level 1 or 2 |
| 3 | Tangent (of an output) | Grad (of an input) | differentiable ones of level 1 or 2 |
| 4 | SubclassGetAttr, SubclassSize, SubclassStride | the same | level 1 to 3, or a SubclassGetAttr |
| – | tokens, random state, opaque objects | tokens, random state, saved values | nothing; never nested |

Anything else is a `NestingError`. The order of descriptors is total: inputs before outputs, then by kind in the order
of `INPUTS` and `OUTPUTS`, then field by field from the left; its only purpose is output that does not change from run
to run.
"""

from __future__ import annotations

from .groups import (
    buffers,
    check_unique,
    inputs_and_grads,
    named_buffers,
    named_params,
    outputs_and_tangents,
    params,
    params_and_grads,
    plain_inputs_and_grads,
    plain_outputs_and_tangents,
)
from .kinds import (
    INPUTS,
    OUTPUTS,
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    BufferAOTInput,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    DummyAOTInput,
    DummyAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    NestingError,
    OpaqueRefAOTInput,
    ParamAOTInput,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PhiloxForwardBaseOffsetAOTInput,
    PhiloxForwardSeedAOTInput,
    PhiloxUpdatedBackwardOffsetAOTOutput,
    PhiloxUpdatedForwardOffsetAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTInput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTInput,
    SubclassStrideAOTOutput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from .read import candidates, parse

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "AOTInput",
    "AOTOutput",
    "BackwardTokenAOTInput",
    "BackwardTokenAOTOutput",
    "BufferAOTInput",
    "DifferentiableAOTInput",
    "DifferentiableAOTOutput",
    "DummyAOTInput",
    "DummyAOTOutput",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "IntermediateBaseAOTOutput",
    "MetadataMutationAOTOutput",
    "NestingError",
    "OpaqueRefAOTInput",
    "ParamAOTInput",
    "PhiloxBackwardBaseOffsetAOTInput",
    "PhiloxBackwardSeedAOTInput",
    "PhiloxForwardBaseOffsetAOTInput",
    "PhiloxForwardSeedAOTInput",
    "PhiloxUpdatedBackwardOffsetAOTOutput",
    "PhiloxUpdatedForwardOffsetAOTOutput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "SavedForBackwardsAOTOutput",
    "SavedForBackwardsNoVcCheckAOTOutput",
    "SubclassGetAttrAOTInput",
    "SubclassGetAttrAOTOutput",
    "SubclassSizeAOTInput",
    "SubclassSizeAOTOutput",
    "SubclassStrideAOTInput",
    "SubclassStrideAOTOutput",
    "SyntheticBaseAOTInput",
    "TangentAOTInput",
    "ViewBaseAOTInput",
    "buffers",
    "candidates",
    "check_unique",
    "inputs_and_grads",
    "named_buffers",
    "named_params",
    "outputs_and_tangents",
    "params",
    "params_and_grads",
    "parse",
    "plain_inputs_and_grads",
    "plain_outputs_and_tangents",
]

for _name in __all__:  # pickles, reprs and documentation name the package, wherever in it a name was made
    if _name not in ("INPUTS", "OUTPUTS"):
        globals()[_name].__module__ = "fanin.descriptors"
