"""The kinds of descriptors: their base (a short form, a total order, checked fields), inputs, outputs."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, TypeVar, dataclass_transform

from ..._words import type_of

#: Checks or converts one field of a new descriptor.
Rule = Callable[["Descriptor", str], None]


class NestingError(TypeError, AssertionError):
    """A descriptor was given what it cannot hold.

    It is an AssertionError too, which is what PyTorch raises for a tangent or gradient of the wrong thing.
    """


@functools.total_ordering
@dataclass(frozen=True)
class Descriptor:
    """The base of inputs and outputs: a short form and a place in the total order."""

    __slots__ = ()

    #: The short form, as a format of the fields.
    _form: ClassVar[str] = ""
    #: What checks or converts a field, by its name.
    _rules: ClassVar[Mapping[str, Rule]] = MappingProxyType({})
    #: The level (the table of the package) at which another one may contain it; 0: none may. What others define
    #: is of level 1 if it is differentiable.
    _level: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name, rule in self._rules.items():
            rule(self, name)

    def expr(self) -> str:
        """The short form, for people: an expression for this value."""
        if not self._form:
            raise NotImplementedError(f"{type(self).__name__} has no expr()")
        return self._form.format_map(vars(self))

    def __str__(self) -> str:
        return self.expr()

    def __lt__(self, other: object) -> bool:
        return order(self) < order(other) if isinstance(other, Descriptor) else NotImplemented


#: Our own kinds, with their place among the inputs or outputs.
PLACES: dict[type[Descriptor], int] = {}


def order(d: Descriptor) -> tuple[object, ...]:
    """The key by which descriptors are sorted; equal for equal ones alone."""
    kind: object = type(d)
    values = (getattr(d, name) for name in compared(kind))
    return (*rank(kind), *(order(v) if isinstance(v, Descriptor) else v for v in values))


@functools.cache
def compared(kind: type[Descriptor]) -> tuple[str, ...]:
    """The names of the fields that count for equality."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


@functools.cache
def rank(kind: type[Descriptor]) -> tuple[int, int, str]:
    """Where a kind comes in the order; kinds that others defined come after ours, by name."""
    ours = kind in PLACES
    return (
        int(not issubclass(kind, AOTInput)),
        PLACES[kind] if ours else len(PLACES),
        "" if ours else f"{kind.__module__}.{kind.__qualname__}",
    )


@dataclass(frozen=True)
class AOTInput(Descriptor):
    """Where an input of a graph comes from; the base of all descriptors of inputs."""

    def is_param(self) -> bool:
        """Whether it is a parameter, or a piece of one. False for a base that a parameter was folded into."""
        return False

    def is_buffer(self) -> bool:
        """Whether it is a buffer, or a piece of one."""
        return False

    def is_tangent(self) -> bool:
        """Whether it is the gradient of an output, or a piece of one."""
        return False


@dataclass(frozen=True)
class DifferentiableAOTInput(AOTInput):
    """An input that may have a gradient: `GradAOTOutput` holds nothing else."""

    _level: ClassVar[int] = 1


@dataclass(frozen=True)
class AOTOutput(Descriptor):
    """Where an output of a graph goes; the base of all descriptors of outputs."""

    def is_grad(self) -> bool:
        """Whether it is the gradient of an input, or a piece of one."""
        return False


@dataclass(frozen=True)
class DifferentiableAOTOutput(AOTOutput):
    """An output that may have a tangent: `TangentAOTInput` holds nothing else."""

    _level: ClassVar[int] = 1


# Allowed nesting


def holds(base: type[Descriptor], levels: tuple[int, ...], why: str) -> Rule:
    """The rule of a field that holds a `base` of one of these levels; NestingError for anything else."""

    def check(outer: Descriptor, name: str) -> None:
        inner = getattr(outer, name)
        if isinstance(inner, base) and inner._level in levels:
            return
        known = inner is None or isinstance(inner, Descriptor)
        got = repr(inner) if known else f"{type_of(inner)}, {inner!r:.60}"
        raise NestingError(f"{type(outer).__name__}: {name} must be {why}; got {got}")

    return check


def as_index(d: Descriptor, name: str) -> None:
    """The rule of a number: convert it to a plain non-negative int."""
    value = getattr(d, name)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{type(d).__name__}: {name} must be an int, got {value!r:.60}")
    if operator.index(value) < 0:
        raise ValueError(f"{type(d).__name__}: {name}: expected a non-negative integer, got {value!r}")
    object.__setattr__(d, name, operator.index(value))


def as_name(d: Descriptor, name: str) -> None:
    """The rule of a name: convert it to a plain str."""
    value = getattr(d, name)
    if not isinstance(value, str):
        raise TypeError(f"{type(d).__name__}: {name} must be a str, got {value!r:.60}")
    object.__setattr__(d, name, str(value))


def as_attribute(d: Descriptor, name: str) -> None:
    """The rule of the name of an attribute."""
    as_name(d, name)
    attr = getattr(d, name)
    if not attr.isidentifier():
        raise ValueError(f"{type(d).__name__}: {name} must be the name of an attribute, got {attr!r:.60}")


#: The rules of fields by their names, in all kinds.
RULES: dict[str, Rule] = {"idx": as_index, "target": as_name, "attr": as_attribute}
D = TypeVar("D", bound=Descriptor)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def described(form: str, level: int | None = None, **rules: Rule) -> Callable[[type[D]], type[D]]:
    """Makes a class one of our kinds: a frozen dataclass with a short form, a level and the rules of its fields."""

    def made(kind: type[D]) -> type[D]:
        kind = dataclass(frozen=True)(kind)
        kind._form, kind._level = form, kind._level if level is None else level
        every = {**RULES, **rules}
        kind._rules = MappingProxyType({f.name: every[f.name] for f in dataclasses.fields(kind) if f.name in every})
        return kind

    return made


OF_INPUT = "an input that came in as it is, a base, or a dummy (Plain, Param, Buffer, Dummy, ViewBase, SyntheticBase)"
OF_OUTPUT = "an output before gradients (Plain, Dummy, InputMutation, IntermediateBase, MetadataMutation)"
OF_GRAD = "a differentiable input before gradients (Plain, Param, Buffer, ViewBase, SyntheticBase)"
OF_TANGENT = "a differentiable output before gradients (Plain, InputMutation, IntermediateBase, MetadataMutation)"
PIECE_OF_INPUT = f"{OF_INPUT}, a Tangent, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
PIECE_OF_OUTPUT = f"{OF_OUTPUT}, a Grad, or a SubclassGetAttr: pieces are of whole arrays or of pieces"


# Inputs


@described("self.get_parameter({target!r})")
class ParamAOTInput(DifferentiableAOTInput):
    """A parameter, by its full name."""

    target: str

    def is_param(self) -> bool:
        return True


@described("self.get_buffer({target!r})")
class BufferAOTInput(DifferentiableAOTInput):
    """A buffer of a module, by its full name."""

    target: str

    def is_buffer(self) -> bool:
        return True


@described("args[{idx}]")
class PlainAOTInput(DifferentiableAOTInput):
    """The flat argument of this position, as it came in."""

    idx: int


@described("__dummy{idx}", level=1)
class DummyAOTInput(AOTInput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    idx: int


@described("{base}.{attr}", level=4, base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT))
class SubclassGetAttrAOTInput(AOTInput):
    """One inner array of an input that wraps several; it is a parameter, buffer or tangent where the whole is."""

    base: AOTInput
    attr: str

    def is_param(self) -> bool:
        return self.base.is_param()

    def is_buffer(self) -> bool:
        return self.base.is_buffer()

    def is_tangent(self) -> bool:
        return self.base.is_tangent()


@described("{base}.size({idx})", base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT))
class SubclassSizeAOTInput(AOTInput):
    """The outer extent, along one axis, of an input that wraps several arrays."""

    base: AOTInput
    idx: int


@described("{base}.stride({idx})", base=holds(AOTInput, (1, 2, 3, 4), PIECE_OF_INPUT))
class SubclassStrideAOTInput(AOTInput):
    """The outer stride, along one axis, of an input that wraps several arrays."""

    base: AOTInput
    idx: int


@described("{base_of}._base", level=2, base_of=holds(AOTInput, (1, 2), OF_INPUT))
class ViewBaseAOTInput(DifferentiableAOTInput):
    """The array that a group of inputs are views of, in their place; it names one of them."""

    base_of: AOTInput


@described("__make_synthetic_base({base_of})", level=2, base_of=holds(AOTInput, (1, 2), OF_INPUT))
class SyntheticBaseAOTInput(DifferentiableAOTInput):
    """A base made up for a group of inputs that share memory and have none, in their place; it names one of them."""

    base_of: AOTInput


@described("__philox_forward_seed")
class PhiloxForwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the forward graph."""


@described("__philox_forward_base_offset")
class PhiloxForwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the forward graph begin."""


@described("__philox_backward_seed")
class PhiloxBackwardSeedAOTInput(AOTInput):
    """The seed of the random numbers of the backward graph."""


@described("__philox_backward_base_offset")
class PhiloxBackwardBaseOffsetAOTInput(AOTInput):
    """Where the random numbers of the backward graph begin."""


@described("__forward_token{idx}")
class ForwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the forward graph in order."""

    idx: int


@described("__backward_token{idx}")
class BackwardTokenAOTInput(AOTInput):
    """A token that keeps side effects of the backward graph in order."""

    idx: int


@described("__opaque_ref{idx}")
class OpaqueRefAOTInput(AOTInput):
    """An object that is no array, found while the backward graph was made. `ref`, the object, counts neither for
    equality nor for `repr`.
    """

    idx: int
    ref: object = field(default=None, compare=False, repr=False)


@described("__output_tangent({output})", level=3, output=holds(DifferentiableAOTOutput, (1, 2), OF_TANGENT))
class TangentAOTInput(DifferentiableAOTInput):
    """The gradient that comes in for an output."""

    output: DifferentiableAOTOutput

    def is_tangent(self) -> bool:
        return True


# Outputs


@described("output[{idx}]")
class PlainAOTOutput(DifferentiableAOTOutput):
    """The function's output of this position, array or not."""

    idx: int


@described("__input_mutation({mutated_input})", level=2, mutated_input=holds(AOTInput, (1, 2), OF_INPUT))
class InputMutationAOTOutput(DifferentiableAOTOutput):
    """The new value of an input that the function wrote, to be written back outside of the graph."""

    mutated_input: AOTInput


@described("__intermediate_base({base_of})", level=2, base_of=holds(AOTOutput, (1, 2), OF_OUTPUT))
class IntermediateBaseAOTOutput(DifferentiableAOTOutput):
    """The array that several outputs are views of; it names one of them."""

    base_of: AOTOutput


@described("__aliased_arg_with_metadata_mutation{idx}", level=2)
class MetadataMutationAOTOutput(DifferentiableAOTOutput):
    """The new geometry of a merged input that the function changed. `idx` counts such inputs, not arguments."""

    idx: int


@described("__grad({grad_of})", level=3, grad_of=holds(DifferentiableAOTInput, (1, 2), OF_GRAD))
class GradAOTOutput(DifferentiableAOTOutput):
    """The gradient of an input."""

    grad_of: DifferentiableAOTInput

    def is_grad(self) -> bool:
        return True


@described("__philox_updated_forward_offset")
class PhiloxUpdatedForwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the forward graph ended."""


@described("__philox_updated_backward_offset")
class PhiloxUpdatedBackwardOffsetAOTOutput(AOTOutput):
    """Where the random numbers of the backward graph ended."""


@described("__forward_token{idx}")
class ForwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the forward graph in order, on its way out."""

    idx: int


@described("__backward_token{idx}")
class BackwardTokenAOTOutput(AOTOutput):
    """A token that keeps side effects of the backward graph in order, on its way out."""

    idx: int


@described("{base}.{attr}", level=4, base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT))
class SubclassGetAttrAOTOutput(AOTOutput):
    """One inner array of an output that wraps several; it is a gradient where the whole is."""

    base: AOTOutput
    attr: str

    def is_grad(self) -> bool:
        return self.base.is_grad()


@described("{base}.size({idx})", base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT))
class SubclassSizeAOTOutput(AOTOutput):
    """The outer extent, along one axis, of an output that wraps several arrays."""

    base: AOTOutput
    idx: int


@described("{base}.stride({idx})", base=holds(AOTOutput, (1, 2, 3, 4), PIECE_OF_OUTPUT))
class SubclassStrideAOTOutput(AOTOutput):
    """The outer stride, along one axis, of an output that wraps several arrays."""

    base: AOTOutput
    idx: int


@described("__dummy{idx}", level=1)
class DummyAOTOutput(AOTOutput):
    """A placeholder for an unused descriptor; never in a finished graph."""

    idx: int


@described("__saved_for_backwards_{idx}")
class SavedForBackwardsAOTOutput(AOTOutput):
    """A value that the forward graph keeps for the backward graph."""

    idx: int


@described("__saved_for_backwards_no_vc_check_{idx}")
class SavedForBackwardsNoVcCheckAOTOutput(AOTOutput):
    """The same, without a check that it was not written meanwhile."""

    idx: int


INPUTS: tuple[type[AOTInput], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, AOTInput) and kind._form
)
"""All kinds of inputs, in the order in which they are defined."""

OUTPUTS: tuple[type[AOTOutput], ...] = tuple(
    kind for kind in vars().values() if isinstance(kind, type) and issubclass(kind, AOTOutput) and kind._form
)
"""All kinds of outputs, in the order in which they are defined."""

PLACES.update((kind, place) for kinds in (INPUTS, OUTPUTS) for place, kind in enumerate(kinds))
