"""The kinds of inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .base import (
    OF_INPUT,
    OF_TANGENT,
    PIECE_OF_INPUT,
    PLACES,
    AOTInput,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    as_attribute,
    as_index,
    as_name,
    holds,
    rules,
)


@dataclass(frozen=True)
class ParamAOTInput(DifferentiableAOTInput):
    """A parameter, by its full name."""

    _form = "self.get_parameter({target!r})"
    _rules = rules(target=as_name)
    target: str

    def is_param(self) -> bool:
        return True


@dataclass(frozen=True)
class BufferAOTInput(DifferentiableAOTInput):
    """A buffer of a module, by its full name."""

    _form = "self.get_buffer({target!r})"
    _rules = rules(target=as_name)
    target: str

    def is_buffer(self) -> bool:
        return True


@dataclass(frozen=True)
class PlainAOTInput(DifferentiableAOTInput):
    """The flat argument of this position, as it came in."""

    _form = "args[{idx}]"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class DummyAOTInput(AOTInput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    _level = 1
    _form = "__dummy{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class SubclassGetAttrAOTInput(AOTInput):
    """One inner array of an input that wraps several; it is a parameter, buffer or tangent where the whole is."""

    _level = 4
    _form = "{base}.{attr}"
    _rules = rules(base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT), attr=as_attribute)
    base: AOTInput
    attr: str

    def is_param(self) -> bool:
        return self.base.is_param()

    def is_buffer(self) -> bool:
        return self.base.is_buffer()

    def is_tangent(self) -> bool:
        return self.base.is_tangent()


@dataclass(frozen=True)
class SubclassSizeAOTInput(AOTInput):
    """The outer extent, along one axis, of an input that wraps several arrays."""

    _form = "{base}.size({idx})"
    _rules = rules(base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT), idx=as_index)
    base: AOTInput
    idx: int


@dataclass(frozen=True)
class SubclassStrideAOTInput(AOTInput):
    """The outer stride, along one axis, of an input that wraps several arrays."""

    _form = "{base}.stride({idx})"
    _rules = rules(base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT), idx=as_index)
    base: AOTInput
    idx: int


@dataclass(frozen=True)
class ViewBaseAOTInput(DifferentiableAOTInput):
    """The array that a group of inputs are views of, in their place; it names one of them."""

    _level = 2
    _form = "{base_of}._base"
    _rules = rules(base_of=holds(AOTInput, (1, 2), OF_INPUT))
    base_of: AOTInput


@dataclass(frozen=True)
class SyntheticBaseAOTInput(DifferentiableAOTInput):
    """A base made up for a group of inputs that share memory and have none, in their place; it names one of them."""

    _level = 2
    _form = "__make_synthetic_base({base_of})"
    _rules = rules(base_of=holds(AOTInput, (1, 2), OF_INPUT))
    base_of: AOTInput


@dataclass(frozen=True)
class PhiloxForwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the forward graph."""

    _form = "__philox_forward_seed"


@dataclass(frozen=True)
class PhiloxForwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the forward graph begin."""

    _form = "__philox_forward_base_offset"


@dataclass(frozen=True)
class PhiloxBackwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the backward graph."""

    _form = "__philox_backward_seed"


@dataclass(frozen=True)
class PhiloxBackwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the backward graph begin."""

    _form = "__philox_backward_base_offset"


@dataclass(frozen=True)
class ForwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the forward graph in order."""

    _form = "__forward_token{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class BackwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the backward graph in order."""

    _form = "__backward_token{idx}"
    _rules = rules(idx=as_index)
    idx: int


@dataclass(frozen=True)
class OpaqueRefAOTInput(AOTInput):
    """An object that is no array, found while the backward graph was made. `ref`, the object, counts neither for
    equality nor for `repr`.
    """

    _form = "__opaque_ref{idx}"
    _rules = rules(idx=as_index)
    idx: int
    ref: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class TangentAOTInput(DifferentiableAOTInput):
    """The gradient that comes in for an output."""

    _level = 3
    _form = "__output_tangent({output})"
    _rules = rules(output=holds(DifferentiableAOTOutput, (1, 2), OF_TANGENT))
    output: DifferentiableAOTOutput

    def is_tangent(self) -> bool:
        return True


INPUTS: tuple[type[AOTInput], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and kind.__module__ == __name__
)
"""All kinds of inputs, in the order in which they are defined."""

PLACES.update((kind, place) for place, kind in enumerate(INPUTS))
