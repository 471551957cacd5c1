"""The kinds of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import (
    OF_INPUT,
    OF_OUTPUT,
    PIECE_OF_OUTPUT,
    AOTInput,
    AOTOutput,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    as_attribute,
    as_index,
    holds,
)


@dataclass(frozen=True)
class PlainAOTOutput(DifferentiableAOTOutput):
    """The function's output of this position, array or not."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"output[{self.idx}]"


@dataclass(frozen=True)
class InputMutationAOTOutput(DifferentiableAOTOutput):
    """The new value of an input that the function wrote, to be written back outside of the graph."""

    _level: ClassVar[int] = 2
    mutated_input: AOTInput

    def __post_init__(self) -> None:
        holds(self, "mutated_input", self.mutated_input, AOTInput, (1, 2), OF_INPUT)

    def expr(self) -> str:
        return f"__input_mutation({self.mutated_input.expr()})"


@dataclass(frozen=True)
class IntermediateBaseAOTOutput(DifferentiableAOTOutput):
    """The array that several outputs are views of; it names one of them."""

    _level: ClassVar[int] = 2
    base_of: AOTOutput

    def __post_init__(self) -> None:
        holds(self, "base_of", self.base_of, AOTOutput, (1, 2), OF_OUTPUT)

    def expr(self) -> str:
        return f"__intermediate_base({self.base_of.expr()})"


@dataclass(frozen=True)
class MetadataMutationAOTOutput(DifferentiableAOTOutput):
    """The new geometry of a merged input that the function changed. `idx` counts such inputs, not arguments."""

    _level: ClassVar[int] = 2
    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__aliased_arg_with_metadata_mutation{self.idx}"


@dataclass(frozen=True)
class GradAOTOutput(DifferentiableAOTOutput):
    """The gradient of an input."""

    _level: ClassVar[int] = 3
    grad_of: DifferentiableAOTInput

    def __post_init__(self) -> None:
        why = "a differentiable input before gradients (Plain, Param, Buffer, ViewBase, SyntheticBase)"
        holds(self, "grad_of", self.grad_of, DifferentiableAOTInput, (1, 2), why)

    def expr(self) -> str:
        return f"__grad({self.grad_of.expr()})"

    def is_grad(self) -> bool:
        return True


@dataclass(frozen=True)
class PhiloxUpdatedForwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the forward graph ended."""

    def expr(self) -> str:
        return "__philox_updated_forward_offset"


@dataclass(frozen=True)
class PhiloxUpdatedBackwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the backward graph ended."""

    def expr(self) -> str:
        return "__philox_updated_backward_offset"


@dataclass(frozen=True)
class ForwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the forward graph in order, on its way out."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__forward_token{self.idx}"


@dataclass(frozen=True)
class BackwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the backward graph in order, on its way out."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__backward_token{self.idx}"


@dataclass(frozen=True)
class SubclassGetAttrAOTOutput(AOTOutput):
    """One inner array of an output that wraps several; it is a gradient where the whole is."""

    _level: ClassVar[int] = 4
    base: AOTOutput
    attr: str

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT)
        as_attribute(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.{self.attr}"

    def is_grad(self) -> bool:
        return self.base.is_grad()


@dataclass(frozen=True)
class SubclassSizeAOTOutput(AOTOutput):
    """The outer extent, along one axis, of an output that wraps several arrays."""

    base: AOTOutput
    idx: int

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT)
        as_index(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.size({self.idx})"


@dataclass(frozen=True)
class SubclassStrideAOTOutput(AOTOutput):
    """The outer stride, along one axis, of an output that wraps several arrays."""

    base: AOTOutput
    idx: int

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT)
        as_index(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.stride({self.idx})"


@dataclass(frozen=True)
class DummyAOTOutput(AOTOutput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    _level: ClassVar[int] = 1
    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__dummy{self.idx}"


@dataclass(frozen=True)
class SavedForBackwardsAOTOutput(AOTOutput):
    """A value that the forward graph keeps for the backward graph."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__saved_for_backwards_{self.idx}"


@dataclass(frozen=True)
class SavedForBackwardsNoVcCheckAOTOutput(AOTOutput):
    """The same, without a check that it was not written meanwhile."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__saved_for_backwards_no_vc_check_{self.idx}"
