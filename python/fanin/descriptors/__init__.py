"""What the inputs and outputs of a graph mean, as small immutable trees.

A graph that was made of a flat function takes and returns more than the function did: gradients of outputs, bases of
views, new values of what was written. A descriptor says of one such slot what it is. That of an input is the way from
the function's arguments to it; that of an output is the way from the function's result to it.

>>> from fanin import descriptors as d
>>> x = d.PlainAOTInput(0)
>>> print(d.GradAOTOutput(x))
__grad(args[0])
>>> d.GradAOTOutput(x)
GradAOTOutput(grad_of=PlainAOTInput(idx=0))
>>> d.parse("__grad(args[0])") == d.GradAOTOutput(x)
True

The classes bear the names, and their fields the names and the order, that people know from PyTorch. They are frozen,
hashable and equal by value. `str` and `expr()` give the short form, `repr` the exact one: `expr()` may mean several
things (see `candidates`), `repr` never does.

What may hold what (level by level; a dummy stands for anything of level 1 that needs no gradient):

| level | inputs | outputs | holds |
|---|---|---|---|
| 1 | Plain, Param, Buffer, Dummy | Plain, Dummy | nothing |
| 2 | ViewBase, SyntheticBase | InputMutation, IntermediateBase, MetadataMutation | level 1 or 2 |
| 3 | Tangent (of an output) | Grad (of an input) | what is differentiable of level 1 or 2 |
| 4 | SubclassGetAttr, SubclassSize, SubclassStride | the same | level 1 to 3, or a SubclassGetAttr |
| – | tokens, random state, opaque objects | tokens, random state, saved values | nothing, and nothing holds them |

Anything else is a `NestingError`. The order of descriptors is total: inputs before outputs, then by kind in the order
of `INPUTS` and `OUTPUTS`, then field by field from the left; it has no meaning beyond that, and is there for output
that does not change from run to run.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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


class NestingError(TypeError, AssertionError):
    """A descriptor was given what it cannot hold.

    It is an AssertionError too, which is what PyTorch raises for a tangent or gradient of the wrong thing.
    """


# ---------------------------------------------------------------- what all have


class Descriptor:
    """What inputs and outputs have in common: a short form and a place in the total order."""

    __slots__ = ()

    def expr(self) -> str:
        """The short form, for people: what an expression for this value would look like."""
        raise NotImplementedError(f"{type(self).__name__} has no expr()")

    def __str__(self) -> str:
        return self.expr()

    def __lt__(self, other: object) -> bool:
        return order(self) < order(other) if isinstance(other, Descriptor) else NotImplemented

    def __le__(self, other: object) -> bool:
        return order(self) <= order(other) if isinstance(other, Descriptor) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return order(self) > order(other) if isinstance(other, Descriptor) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return order(self) >= order(other) if isinstance(other, Descriptor) else NotImplemented


def order(d: Descriptor) -> tuple[Any, ...]:
    """The key by which descriptors are sorted; equal for equal ones alone."""
    kind: Any = type(d)
    values = (getattr(d, name) for name in compared(kind))
    return (*rank(kind), *(order(v) if isinstance(v, Descriptor) else v for v in values))


@functools.cache
def compared(kind: Any) -> tuple[str, ...]:
    """The names of the fields that count for equality."""
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


@functools.cache
def rank(kind: Any) -> tuple[int, int, str]:
    """Where a kind comes in the order; kinds that others defined come after those of this module, by name."""
    kinds = INPUTS if issubclass(kind, AOTInput) else OUTPUTS
    ours = kind in kinds
    return (
        int(not issubclass(kind, AOTInput)),
        kinds.index(kind) if ours else len(kinds),
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


@dataclass(frozen=True)
class AOTOutput(Descriptor):
    """Where an output of a graph goes; the base of all descriptors of outputs."""

    def is_grad(self) -> bool:
        """Whether it is the gradient of an input, or a piece of one."""
        return False


@dataclass(frozen=True)
class DifferentiableAOTOutput(AOTOutput):
    """An output that may have a tangent: `TangentAOTInput` holds nothing else."""


# ---------------------------------------------------------------- what may hold what


def holds(outer: Descriptor, name: str, inner: object, base: type, levels: tuple[int, ...], why: str) -> None:
    """NestingError unless `inner`, the value of the field `name`, is a `base` of one of these levels, or a
    SubclassGetAttr where level 4 is among them.
    """
    if isinstance(inner, base):
        level = level_of(inner)
        if level in levels and (level != 4 or isinstance(inner, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput))):
            return
    got = repr(inner) if isinstance(inner, Descriptor) else f"a {type(inner).__name__}, {inner!r:.60}"
    raise NestingError(f"{type(outer).__name__}: {name} must be {why}; got {got}")


def level_of(d: object) -> int:
    """1 to 4 as in the table of the module; 0 for what nothing may hold. What others defined is of level 1 if it is
    differentiable.
    """
    for level, kinds in LEVELS.items():
        if isinstance(d, kinds):
            return level
    return int(type(d) not in KINDS and isinstance(d, (DifferentiableAOTInput, DifferentiableAOTOutput)))


def as_index(d: Descriptor, *names: str) -> None:
    """The fields of these names become plain ints from 0 on."""
    for name in names or ("idx",):
        value = getattr(d, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{type(d).__name__}: {name} must be an int, got {value!r:.60}")
        if operator.index(value) < 0:
            raise ValueError(f"{type(d).__name__}: {name} counts from 0 on, got {value!r}")
        object.__setattr__(d, name, operator.index(value))


def as_name(d: Descriptor, name: str) -> None:
    """The field of this name is a plain str."""
    value = getattr(d, name)
    if not isinstance(value, str):
        raise TypeError(f"{type(d).__name__}: {name} must be a str, got {value!r:.60}")
    object.__setattr__(d, name, str(value))


def as_attribute(d: Descriptor) -> None:
    """The field `attr` is the name of an attribute."""
    as_name(d, "attr")
    if not d.attr.isidentifier():  # type: ignore[attr-defined]
        raise ValueError(f"{type(d).__name__}: attr must be the name of an attribute, got {d.attr!r:.60}")  # type: ignore[attr-defined]


OF_INPUT = "an input that came in as it is, a base, or a dummy (Plain, Param, Buffer, Dummy, ViewBase, SyntheticBase)"
OF_OUTPUT = "an output before gradients (Plain, Dummy, InputMutation, IntermediateBase, MetadataMutation)"
PIECE_OF_INPUT = f"{OF_INPUT}, a Tangent, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
PIECE_OF_OUTPUT = f"{OF_OUTPUT}, a Grad, or a SubclassGetAttr: pieces are of whole arrays or of pieces"


# ---------------------------------------------------------------- inputs


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
    """A filler where code wants some descriptor and nobody reads it; never in a finished graph."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__dummy{self.idx}"


@dataclass(frozen=True)
class SubclassGetAttrAOTInput(AOTInput):
    """One inner array of an input that wraps several; it is a parameter, buffer or tangent where the whole is."""

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

    base_of: AOTInput

    def __post_init__(self) -> None:
        holds(self, "base_of", self.base_of, AOTInput, (1, 2), OF_INPUT)

    def expr(self) -> str:
        return f"{self.base_of.expr()}._base"


@dataclass(frozen=True)
class SyntheticBaseAOTInput(DifferentiableAOTInput):
    """A base made up for a group of inputs that share memory and have none, in their place; it names one of them."""

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

    output: DifferentiableAOTOutput

    def __post_init__(self) -> None:
        why = "a differentiable output before gradients (Plain, InputMutation, IntermediateBase, MetadataMutation)"
        holds(self, "output", self.output, DifferentiableAOTOutput, (1, 2), why)

    def expr(self) -> str:
        return f"__output_tangent({self.output.expr()})"

    def is_tangent(self) -> bool:
        return True


# ---------------------------------------------------------------- outputs


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

    mutated_input: AOTInput

    def __post_init__(self) -> None:
        holds(self, "mutated_input", self.mutated_input, AOTInput, (1, 2), OF_INPUT)

    def expr(self) -> str:
        return f"__input_mutation({self.mutated_input.expr()})"


@dataclass(frozen=True)
class IntermediateBaseAOTOutput(DifferentiableAOTOutput):
    """The array that several outputs are views of; it names one of them."""

    base_of: AOTOutput

    def __post_init__(self) -> None:
        holds(self, "base_of", self.base_of, AOTOutput, (1, 2), OF_OUTPUT)

    def expr(self) -> str:
        return f"__intermediate_base({self.base_of.expr()})"


@dataclass(frozen=True)
class MetadataMutationAOTOutput(DifferentiableAOTOutput):
    """The new geometry of a merged input whose geometry the function changed. `idx` counts such inputs, not
    arguments.
    """

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__aliased_arg_with_metadata_mutation{self.idx}"


@dataclass(frozen=True)
class GradAOTOutput(DifferentiableAOTOutput):
    """The gradient of an input."""

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
    """A filler where code wants some descriptor and nobody reads it; never in a finished graph."""

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
    """The same, where nobody checks that it was not written meanwhile."""

    idx: int

    def __post_init__(self) -> None:
        as_index(self)

    def expr(self) -> str:
        return f"__saved_for_backwards_no_vc_check_{self.idx}"


# ---------------------------------------------------------------- the kinds, in order

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

KINDS: frozenset[type] = frozenset({*INPUTS, *OUTPUTS})

LEVELS: dict[int, tuple[type, ...]] = {
    1: (PlainAOTInput, ParamAOTInput, BufferAOTInput, DummyAOTInput, PlainAOTOutput, DummyAOTOutput),
    2: (
        ViewBaseAOTInput,
        SyntheticBaseAOTInput,
        InputMutationAOTOutput,
        IntermediateBaseAOTOutput,
        MetadataMutationAOTOutput,
    ),
    3: (TangentAOTInput, GradAOTOutput),
    4: (
        SubclassGetAttrAOTInput,
        SubclassSizeAOTInput,
        SubclassStrideAOTInput,
        SubclassGetAttrAOTOutput,
        SubclassSizeAOTOutput,
        SubclassStrideAOTOutput,
    ),
}


# ---------------------------------------------------------------- from text

Sides = tuple[type[AOTInput], type[AOTOutput]]
Kind = Literal["input", "output"] | type[Descriptor] | None

DEEPEST = 100
"""How deep the text of a descriptor may be nested."""

INT = r"(0|[1-9][0-9]{0,999})"
STR = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""

NAMED: dict[str, type[Descriptor]] = {"self.get_parameter": ParamAOTInput, "self.get_buffer": BufferAOTInput}
HOLDERS: dict[str, type[Descriptor]] = {
    "__make_synthetic_base": SyntheticBaseAOTInput,
    "__output_tangent": TangentAOTInput,
    "__input_mutation": InputMutationAOTOutput,
    "__intermediate_base": IntermediateBaseAOTOutput,
    "__grad": GradAOTOutput,
}
INDEXED: dict[str, tuple[type[Descriptor], ...]] = {"args": (PlainAOTInput,), "output": (PlainAOTOutput,)}
NUMBERED: dict[str, tuple[type[Descriptor], ...]] = {
    "__dummy": (DummyAOTInput, DummyAOTOutput),
    "__forward_token": (ForwardTokenAOTInput, ForwardTokenAOTOutput),
    "__backward_token": (BackwardTokenAOTInput, BackwardTokenAOTOutput),
    "__opaque_ref": (OpaqueRefAOTInput,),
    "__aliased_arg_with_metadata_mutation": (MetadataMutationAOTOutput,),
    "__saved_for_backwards_": (SavedForBackwardsAOTOutput,),
    "__saved_for_backwards_no_vc_check_": (SavedForBackwardsNoVcCheckAOTOutput,),
}
ALONE: dict[str, type[Descriptor]] = {
    "__philox_forward_seed": PhiloxForwardSeedAOTInput,
    "__philox_forward_base_offset": PhiloxForwardBaseOffsetAOTInput,
    "__philox_backward_seed": PhiloxBackwardSeedAOTInput,
    "__philox_backward_base_offset": PhiloxBackwardBaseOffsetAOTInput,
    "__philox_updated_forward_offset": PhiloxUpdatedForwardOffsetAOTOutput,
    "__philox_updated_backward_offset": PhiloxUpdatedBackwardOffsetAOTOutput,
}
ATTRIBUTES: Sides = (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)
PIECES: dict[str, Sides] = {
    "size": (SubclassSizeAOTInput, SubclassSizeAOTOutput),
    "stride": (SubclassStrideAOTInput, SubclassStrideAOTOutput),
}
BY_NAME: dict[str, type[Descriptor]] = {kind.__name__: kind for kind in (*INPUTS, *OUTPUTS)}


def parse(text: str, kind: Kind = None) -> AOTInput | AOTOutput:
    """The descriptor whose `expr()` or `repr` the text is.

    kind: "input", "output", or a class that it must be an instance of. `expr()` is not always enough: tokens and
    dummies are called alike on both sides, and `args[0]._base` is a base or an attribute of that name. Then `kind`
    decides, or a `repr` does, which is never ambiguous.

    ValueError: text that no descriptor prints, or that several print (they are listed; `candidates` gives them).
    TypeError: what is no text.

    >>> from fanin import descriptors as d
    >>> d.parse("__output_tangent(output[1])")
    TangentAOTInput(output=PlainAOTOutput(idx=1))
    >>> d.parse("__forward_token0", kind="output")
    ForwardTokenAOTOutput(idx=0)
    >>> d.parse("args[0]._base")
    Traceback (most recent call last):
    ValueError: parse: 'args[0]._base' may be ViewBaseAOTInput(...) or SubclassGetAttrAOTInput(...): say which by ...
    >>> d.parse("args[0]._base", kind=d.ViewBaseAOTInput).base_of
    PlainAOTInput(idx=0)
    """
    fits = filter_of(kind)
    every = candidates(text)
    found = [d for d in every if fits(d)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"parse: {text!r:.200} is no {wanted(kind)}: it is {' or '.join(map(repr, every))}")
    ways = 'kind="input", kind="output", or kind=<class>'
    raise ValueError(
        f"parse: {text!r:.200} may be {' or '.join(map(repr, found))}: say which by {ways}, or give its repr"
    )


def wanted(kind: Kind) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def filter_of(kind: Kind) -> Callable[[Descriptor], bool]:
    base: type
    if kind is None:
        base = Descriptor
    elif kind in ("input", "output"):
        base = AOTInput if kind == "input" else AOTOutput
    elif isinstance(kind, type) and issubclass(kind, Descriptor):
        base = kind
    else:
        raise ValueError(f'parse: kind must be "input", "output", None or a class of descriptors, got {kind!r}')
    return lambda d: isinstance(d, base)


def candidates(text: str) -> tuple[AOTInput | AOTOutput, ...]:
    """All descriptors whose `expr()` or `repr` the text is: at least one, inputs first.

    ValueError: text that no descriptor prints; it says where it stopped making sense. TypeError: what is no text.

    >>> from fanin import descriptors as d
    >>> [type(x).__name__ for x in d.candidates("__dummy3")]
    ['DummyAOTInput', 'DummyAOTOutput']
    """
    if not isinstance(text, str):
        raise TypeError(f"parse: expected the text of a descriptor, got a {type(text).__name__}")
    text = text.strip()
    every = Reader(text).whole()
    found = [d for d in every if text in (d.expr(), repr(d))]
    if not found:
        ways = " or ".join(dict.fromkeys(x for d in every for x in (d.expr(), repr(d))))
        raise ValueError(
            f"parse: {text!r:.200} is the expr() or repr of no descriptor: what it means is printed as {ways:.400}"
        )
    return tuple(sorted(found, key=lambda d: (isinstance(d, AOTOutput), isinstance(d, SubclassGetAttrAOTInput), d)))  # type: ignore[arg-type]


def sided(kinds: Sides, d: Descriptor) -> type[Descriptor]:
    """Of a pair of kinds the one on the side of `d`."""
    return kinds[0] if isinstance(d, AOTInput) else kinds[1]


class Reader:
    """Reads one text from left to right. What it has read so far stands for several descriptors, until all but one are
    ruled out.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.refusal: NestingError | None = None  # why the last one was ruled out

    def whole(self) -> list[Descriptor]:
        found = self.written() if re.match(r"\w*AOT(Input|Output)\b", self.text) else self.short()
        if self.at != len(self.text):
            raise self.stopped("the end")
        if not found:
            raise ValueError(f"parse: {self.text!r:.200} breaks a rule: {self.refusal}") from None
        return found

    def stopped(self, wanted: str) -> ValueError:
        found = self.text[self.at : self.at + 20] or "the end"
        return ValueError(
            f"parse: {self.text!r:.200} is the expr() or repr of no descriptor: at {self.at} expected {wanted}, found"
            f" {found!r}"
        )

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def need(self, pattern: str, wanted: str) -> str:
        found = self.take(pattern)
        if not found:
            raise self.stopped(wanted)
        return found[found.re.groups and 1]

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"parse: {self.text[:40]!r}.. is nested deeper than {DEEPEST}")

    def make(self, kinds: Iterable[type[Descriptor]], *fields: Any) -> list[Descriptor]:
        """What these kinds are with these fields, as far as they may be."""
        made = []
        for kind in kinds:
            try:
                made.append(kind(*fields))
            except NestingError as e:
                self.refusal = e
        return made

    # expr()

    def short(self) -> list[Descriptor]:
        found = self.atom()
        while self.take(r"\."):
            self.deeper()
            word = self.need(r"([^\W\d]\w*)", "the name of an attribute, size(..) or stride(..)")
            if word in PIECES and self.take(r"\("):
                axis = int(self.need(INT, "an axis"))
                self.need(r"\)", "')'")
                found = [new for d in found for new in self.make((sided(PIECES[word], d),), d, axis)]
            else:
                bases = [new for d in found for new in self.make((ViewBaseAOTInput,), d)] if word == "_base" else []
                found = bases + [new for d in found for new in self.make((sided(ATTRIBUTES, d),), d, word)]
        return found

    def atom(self) -> list[Descriptor]:
        start = self.at
        word = self.need(
            r"(self\.\w+|[a-z_]+)", "args[..], output[..], self.get_parameter(..), or a word that begins with __"
        )
        if word in NAMED:
            self.need(r"\(", "'('")
            target = self.name()
            self.need(r"\)", "')'")
            return self.make((NAMED[word],), target)
        if word in HOLDERS:
            self.deeper()
            self.need(r"\(", "'('")
            inner = self.short()
            self.need(r"\)", "')'")
            return [new for d in inner for new in self.make((HOLDERS[word],), d)]
        if word in INDEXED:
            self.need(r"\[", "'['")
            idx = int(self.need(INT, "a position"))
            self.need(r"\]", "']'")
            return self.make(INDEXED[word], idx)
        if word in NUMBERED:
            return self.make(NUMBERED[word], int(self.need(INT, "a number")))
        if word in ALONE:
            return self.make((ALONE[word],))
        self.at = start
        raise self.stopped("a word that descriptors print")

    # repr

    def written(self) -> list[Descriptor]:
        self.deeper()
        name = self.need(r"(\w+)", "a class")
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, 1)
            raise ValueError(f"parse: no descriptor is called {name}" + (f": is it {near[0]}?" if near else ""))
        kind = BY_NAME[name]
        self.need(r"\(", "'('")
        values: list[Any] = []
        for i, f in enumerate(f for f in dataclasses.fields(kind) if f.repr):  # type: ignore[arg-type]
            self.need(rf"{', *' if i else ''}{f.name} *= *", f"{', ' if i else ''}{f.name}=")
            values.append(self.value(f.name))
        self.need(r"\)", "')'")
        self.depth -= 1
        return [] if [] in values else self.make((kind,), *(v[0] if isinstance(v, list) else v for v in values))

    def value(self, name: str) -> Any:
        if name == "idx":
            return int(self.need(INT, "a number"))
        if name in ("target", "attr"):
            return self.name()
        return self.written()

    def name(self) -> str:
        """A name in quotes."""
        start = self.at
        quoted = self.need(STR, "a name in quotes")
        try:
            return str(ast.literal_eval(quoted))
        except (SyntaxError, ValueError):
            self.at = start
            raise self.stopped("a name in quotes as repr() gives it") from None


# ---------------------------------------------------------------- the slots of a graph, by what they mean

Positions = tuple[int, int | None]


def check_unique(inputs: Iterable[AOTInput | None], outputs: Iterable[AOTOutput | None] = ()) -> None:
    """Whether the descriptors of a finished graph are such as they must be: no two inputs alike, no two outputs alike,
    no dummy.

    None stands for a slot without a descriptor (the gradient of an input that needs none). ValueError names both
    positions. TypeError: an output among the inputs, or the reverse.

    >>> from fanin import descriptors as d
    >>> d.check_unique([d.PlainAOTInput(0), d.PlainAOTInput(1), d.PlainAOTInput(0)])
    Traceback (most recent call last):
    ValueError: inputs 0 and 2 are both args[0]: expected a descriptor of its own for each
    """
    sides: tuple[tuple[str, type[Descriptor], Iterable[Descriptor | None]], ...] = (
        ("input", AOTInput, inputs),
        ("output", AOTOutput, outputs),
    )
    for side, base, every in sides:
        seen: dict[Descriptor, int] = {}
        for i, d in enumerate(every):
            if d is None:
                continue
            if not isinstance(d, base):
                raise TypeError(f"{side} {i}: expected a descriptor of an {side}, got {d!r:.200}")
            if isinstance(d, (DummyAOTInput, DummyAOTOutput)):
                raise ValueError(f"{side} {i} is a dummy, {d}: a finished graph has none")
            if d in seen:
                raise ValueError(f"{side}s {seen[d]} and {i} are both {d}: expected a descriptor of its own for each")
            seen[d] = i


def no_pieces(side: str, every: Sequence[Descriptor | None]) -> None:
    """ValueError for pieces of wrapped arrays: what belongs to what is then not one to one."""
    for i, d in enumerate(every):
        if isinstance(d, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
            raise ValueError(
                f"{side} {i} is {d}, a piece of an array that wraps several: a piece has no gradient or tangent of its"
                " own; group the pieces by their `base` first"
            )


def inputs_and_grads(
    inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None]
) -> dict[DifferentiableAOTInput, Positions]:
    """For each input that may have a gradient: its position, and that of its gradient among the outputs (None: it has
    none).

    Tangents are inputs, too, and have no gradient. ValueError: descriptors that are not unique, pieces of wrapped
    arrays, a gradient of what is no input.

    >>> from fanin import descriptors as d
    >>> w, x = d.ParamAOTInput("w"), d.PlainAOTInput(0)
    >>> d.inputs_and_grads([w, x], [d.PlainAOTOutput(0), d.GradAOTOutput(w)])
    {ParamAOTInput(target='w'): (0, 1), PlainAOTInput(idx=0): (1, None)}
    """
    check_unique(inputs, outputs)
    no_pieces("input", inputs)
    no_pieces("output", outputs)
    grads = {d.grad_of: i for i, d in enumerate(outputs) if isinstance(d, GradAOTOutput)}
    found = {d: (i, grads.pop(d, None)) for i, d in enumerate(inputs) if isinstance(d, DifferentiableAOTInput)}
    for d, i in grads.items():
        raise ValueError(f"output {i} is the gradient of {d}, which is no input of this graph")
    return found


def outputs_and_tangents(
    inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None]
) -> dict[DifferentiableAOTOutput, Positions]:
    """For each output that may have a tangent: its position, and that of its tangent among the inputs (None: it has
    none).

    Gradients are outputs, too, and have no tangent. ValueError: as for `inputs_and_grads`.

    >>> from fanin import descriptors as d
    >>> y = d.PlainAOTOutput(0)
    >>> d.outputs_and_tangents([d.PlainAOTInput(0), d.TangentAOTInput(y)], [y])
    {PlainAOTOutput(idx=0): (0, 1)}
    """
    check_unique(inputs, outputs)
    no_pieces("input", inputs)
    no_pieces("output", outputs)
    tangents = {d.output: i for i, d in enumerate(inputs) if isinstance(d, TangentAOTInput)}
    found = {d: (i, tangents.pop(d, None)) for i, d in enumerate(outputs) if isinstance(d, DifferentiableAOTOutput)}
    for d, i in tangents.items():
        raise ValueError(f"input {i} is the tangent of {d}, which is no output of this graph")
    return found


def params_and_grads(
    inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None]
) -> dict[ParamAOTInput, Positions]:
    """`inputs_and_grads` of the parameters alone: the gradients by parameter."""
    return {d: at for d, at in inputs_and_grads(inputs, outputs).items() if isinstance(d, ParamAOTInput)}


def plain_inputs_and_grads(
    inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None]
) -> dict[PlainAOTInput, Positions]:
    """`inputs_and_grads` of the plain arguments alone."""
    return {d: at for d, at in inputs_and_grads(inputs, outputs).items() if isinstance(d, PlainAOTInput)}


def plain_outputs_and_tangents(
    inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None]
) -> dict[PlainAOTOutput, Positions]:
    """`outputs_and_tangents` of the function's own outputs alone: the tangents by output."""
    return {d: at for d, at in outputs_and_tangents(inputs, outputs).items() if isinstance(d, PlainAOTOutput)}


def named_params(inputs: Sequence[AOTInput | None]) -> dict[str, int]:
    """The position of each parameter, by its full name. ValueError: descriptors that are not unique, pieces of wrapped
    arrays.

    >>> from fanin import descriptors as d
    >>> d.named_params([d.ParamAOTInput("fc.weight"), d.PlainAOTInput(0), d.ParamAOTInput("fc.bias")])
    {'fc.weight': 0, 'fc.bias': 2}
    """
    check_unique(inputs)
    no_pieces("input", inputs)
    return {d.target: i for i, d in enumerate(inputs) if isinstance(d, ParamAOTInput)}


def named_buffers(inputs: Sequence[AOTInput | None]) -> dict[str, int]:
    """The position of each buffer, by its full name. ValueError: as for `named_params`."""
    check_unique(inputs)
    no_pieces("input", inputs)
    return {d.target: i for i, d in enumerate(inputs) if isinstance(d, BufferAOTInput)}


def params(inputs: Sequence[AOTInput | None]) -> list[int]:
    """The positions of the parameters, in order."""
    return list(named_params(inputs).values())


def buffers(inputs: Sequence[AOTInput | None]) -> list[int]:
    """The positions of the buffers, in order."""
    return list(named_buffers(inputs).values())
