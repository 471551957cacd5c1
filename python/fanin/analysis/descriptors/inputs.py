"""The kinds of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .base import (
    OF_INPUT,
    PIECE_OF_INPUT,
    AOTInput,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    as_attribute,
    as_index,
    as_name,
    holds,
)


@dataclass(frozen=True)
class ParamAOTInput(DifferentiableAOTInput):
    """A parameter, by its full name."""

    target: str

    def __post_init__(self) -> None:
        as_name(self, "target")

    def expr(self) -> str:
        return f"self.get_parameter({self.target!r})"

    def is_param(self) -> bool:
        return True


@dataclass(frozen=True)
class BufferAOTInput(DifferentiableAOTInput):
    """A buffer of a module, by its full name."""

    target: str

    def __post_init__(self) -> None:
        as_name(self, "target")

    def expr(self) -> str:
        return f"self.get_buffer({self.target!r})"

    def is_buffer(self) -> bool:
        return True


@dataclass(frozen=True)
class PlainAOTInput(DifferentiableAOTInput):
    """The flat argument of this position, as it came in."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"args[{self.idx}]"


@dataclass(frozen=True)
class DummyAOTInput(AOTInput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    _level: ClassVar[int] = 1
    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__dummy{self.idx}"


@dataclass(frozen=True)
class SubclassGetAttrAOTInput(AOTInput):
    """One inner array of an input that wraps several; it is a parameter, buffer or tangent where the whole is."""

    _level: ClassVar[int] = 4
    base: AOTInput
    attr: str

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT)
        as_attribute(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.{self.attr}"

    def is_param(self) -> bool:
        return self.base.is_param()

    def is_buffer(self) -> bool:
        return self.base.is_buffer()

    def is_tangent(self) -> bool:
        return self.base.is_tangent()


@dataclass(frozen=True)
class SubclassSizeAOTInput(AOTInput):
    """The outer extent, along one axis, of an input that wraps several arrays."""

    base: AOTInput
    idx: int

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT)
        as_index(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.size({self.idx})"


@dataclass(frozen=True)
class SubclassStrideAOTInput(AOTInput):
    """The outer stride, along one axis, of an input that wraps several arrays."""

    base: AOTInput
    idx: int

    def __post_init__(self) -> None:
        holds(self, "base", self.base, AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT)
        as_index(self)

    def expr(self) -> str:
        return f"{self.base.expr()}.stride({self.idx})"


@dataclass(frozen=True)
class ViewBaseAOTInput(DifferentiableAOTInput):
    """The array that a group of inputs are views of, in their place; it names one of them."""

    _level: ClassVar[int] = 2
    base_of: AOTInput

    def __post_init__(self) -> None:
        holds(self, "base_of", self.base_of, AOTInput, (1, 2), OF_INPUT)

    def expr(self) -> str:
        return f"{self.base_of.expr()}._base"


@dataclass(frozen=True)
class SyntheticBaseAOTInput(DifferentiableAOTInput):
    """A base made up for a group of inputs that share memory and have none, in their place; it names one of them."""

    _level: ClassVar[int] = 2
    base_of: AOTInput

    def __post_init__(self) -> None:
        holds(self, "base_of", self.base_of, AOTInput, (1, 2), OF_INPUT)

    def expr(self) -> str:
        return f"__make_synthetic_base({self.base_of.expr()})"


@dataclass(frozen=True)
class PhiloxForwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the forward graph."""

    def expr(self) -> str:
        return "__philox_forward_seed"


@dataclass(frozen=True)
class PhiloxForwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the forward graph begin."""

    def expr(self) -> str:
        return "__philox_forward_base_offset"


@dataclass(frozen=True)
class PhiloxBackwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the backward graph."""

    def expr(self) -> str:
        return "__philox_backward_seed"


@dataclass(frozen=True)
class PhiloxBackwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the backward graph begin."""

    def expr(self) -> str:
        return "__philox_backward_base_offset"


@dataclass(frozen=True)
class ForwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the forward graph in order."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__forward_token{self.idx}"


@dataclass(frozen=True)
class BackwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the backward graph in order."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__backward_token{self.idx}"


@dataclass(frozen=True)
class OpaqueRefAOTInput(AOTInput):
    """An object that is no array, found while the backward graph was made. `ref`, the object, counts neither for
    equality nor for `repr`.
    """

    idx: int
    ref: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__opaque_ref{self.idx}"


@dataclass(frozen=True)
class TangentAOTInput(DifferentiableAOTInput):
    """The gradient that comes in for an output."""

    _level: ClassVar[int] = 3
    output: DifferentiableAOTOutput

    def __post_init__(self) -> None:
        why = "a differentiable output before gradients (Plain, InputMutation, IntermediateBase, MetadataMutation)"
        holds(self, "output", self.output, DifferentiableAOTOutput, (1, 2), why)

    def expr(self) -> str:
        return f"__output_tangent({self.output.expr()})"

    def is_tangent(self) -> bool:
        return True
