"""The kinds of outputs."""

from __future__ import annotations

from dataclasses import dataclass

from .base import (
    OF_GRAD,
    OF_INPUT,
    OF_OUTPUT,
    PIECE_OF_OUTPUT,
    PLACES,
    AOTInput,
    AOTOutput,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    as_attribute,
    as_index,
    holds,
    rules,
)


@dataclass(frozen=True)
class PlainAOTOutput(DifferentiableAOTOutput):
    """The function's output of this position, array or not."""

    _form = "output[{idx}]"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class InputMutationAOTOutput(DifferentiableAOTOutput):
    """The new value of an input that the function wrote, to be written back outside of the graph."""

    _level = 2
    _form = "__input_mutation({mutated_input})"
    _rules = rules(mutated_input=holds(AOTInput, (1, 2), OF_INPUT))
    mutated_input: AOTInput


@dataclass(frozen=True)
class IntermediateBaseAOTOutput(DifferentiableAOTOutput):
    """The array that several outputs are views of; it names one of them."""

    _level = 2
    _form = "__intermediate_base({base_of})"
    _rules = rules(base_of=holds(AOTOutput, (1, 2), OF_OUTPUT))
    base_of: AOTOutput


@dataclass(frozen=True)
class MetadataMutationAOTOutput(DifferentiableAOTOutput):
    """The new geometry of a merged input that the function changed. `idx` counts such inputs, not arguments."""

    _level = 2
    _form = "__aliased_arg_with_metadata_mutation{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class GradAOTOutput(DifferentiableAOTOutput):
    """The gradient of an input."""

    _level = 3
    _form = "__grad({grad_of})"
    _rules = rules(grad_of=holds(DifferentiableAOTInput, (1, 2), OF_GRAD))
    grad_of: DifferentiableAOTInput

    def is_grad(self) -> bool:
        return True


@dataclass(frozen=True)
class PhiloxUpdatedForwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the forward graph ended."""

    _form = "__philox_updated_forward_offset"


@dataclass(frozen=True)
class PhiloxUpdatedBackwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the backward graph ended."""

    _form = "__philox_updated_backward_offset"


@dataclass(frozen=True)
class ForwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the forward graph in order, on its way out."""

    _form = "__forward_token{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class BackwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the backward graph in order, on its way out."""

    _form = "__backward_token{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class SubclassGetAttrAOTOutput(AOTOutput):
    """One inner array of an output that wraps several; it is a gradient where the whole is."""

    _level = 4
    _form = "{base}.{attr}"
    _rules = rules(base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT), attr=as_attribute)
    base: AOTOutput
    attr: str

    def is_grad(self) -> bool:
        return self.base.is_grad()


@dataclass(frozen=True)
class SubclassSizeAOTOutput(AOTOutput):
    """The outer extent, along one axis, of an output that wraps several arrays."""

    _form = "{base}.size({idx})"
    _rules = rules(base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT), idx=as_index)
    base: AOTOutput
    idx: int


@dataclass(frozen=True)
class SubclassStrideAOTOutput(AOTOutput):
    """The outer stride, along one axis, of an output that wraps several arrays."""

    _form = "{base}.stride({idx})"
    _rules = rules(base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT), idx=as_index)
    base: AOTOutput
    idx: int


@dataclass(frozen=True)
class DummyAOTOutput(AOTOutput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    _level = 1
    _form = "__dummy{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class SavedForBackwardsAOTOutput(AOTOutput):
    """A value that the forward graph keeps for the backward graph."""

    _form = "__saved_for_backwards_{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class SavedForBackwardsNoVcCheckAOTOutput(AOTOutput):
    """The same, without a check that it was not written meanwhile."""

    _form = "__saved_for_backwards_no_vc_check_{idx}"
    _rules = rules(idx=as_index)
    idx: int


OUTPUTS: tuple[type[AOTOutput], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and kind.__module__ == __name__
)
"""All kinds of outputs, in the order in which they are defined."""

PLACES.update((kind, place) for place, kind in enumerate(OUTPUTS))
