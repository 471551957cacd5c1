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

import ast
import dataclasses
import difflib
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, TypeVar, dataclass_transform

from .._checks import sequence
from .._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

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


# The slots of a graph by what they mean

Positions = tuple[int, int | None]


def check_unique(inputs: Iterable[AOTInput | None], outputs: Iterable[AOTOutput | None] = ()) -> None:
    """Check the descriptors of a finished graph: no two equal inputs, no two equal outputs, no dummy.

    None is a slot without a descriptor (the gradient of an input that needs none). ValueError names both positions.
    TypeError: an output among the inputs, or the reverse.

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
        for i, d in enumerate(sequence(f"{side}s", every, "descriptors")):
            if d is None:
                continue
            if not isinstance(d, base):
                raise TypeError(f"{side} {i}: expected a descriptor of an {side}, got {d!r:.200}")
            if isinstance(d, (DummyAOTInput, DummyAOTOutput)):
                raise ValueError(f"{side} {i} is a dummy, {d}: a finished graph has none")
            if d in seen:
                raise ValueError(f"{side}s {seen[d]} and {i} are both {d}: expected a descriptor of its own for each")
            seen[d] = i


def check_whole(inputs: Sequence[AOTInput | None], outputs: Sequence[AOTOutput | None] = ()) -> None:
    """`check_unique`, and ValueError for pieces of wrapped arrays: what belongs to what is then not one to one."""
    check_unique(inputs, outputs)
    for side, every in (("input", inputs), ("output", outputs)):
        for i, d in enumerate(every):
            if isinstance(d, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
                raise ValueError(
                    f"{side} {i} is {d}, a piece of an array that wraps several: a piece has no gradient or tangent of"
                    " its own; group the pieces by their `base` first"
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
    check_whole(inputs, outputs)
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
    check_whole(inputs, outputs)
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
    check_whole(inputs)
    return {d.target: i for i, d in enumerate(inputs) if isinstance(d, ParamAOTInput)}


def named_buffers(inputs: Sequence[AOTInput | None]) -> dict[str, int]:
    """The position of each buffer, by its full name. ValueError: as for `named_params`."""
    check_whole(inputs)
    return {d.target: i for i, d in enumerate(inputs) if isinstance(d, BufferAOTInput)}


def params(inputs: Sequence[AOTInput | None]) -> list[int]:
    """The positions of the parameters, in order."""
    return list(named_params(inputs).values())


def buffers(inputs: Sequence[AOTInput | None]) -> list[int]:
    """The positions of the buffers, in order."""
    return list(named_buffers(inputs).values())


# Descriptors from their text

Sides = tuple[type[AOTInput], type[AOTOutput]]
Kind = Literal["input", "output"] | type[Descriptor] | None

SIDES: dict[str | None, type[Descriptor]] = {None: Descriptor, "input": AOTInput, "output": AOTOutput}

DEEPEST = 100
"""How deep the text of a descriptor may be nested."""

INT = r"(0|[1-9][0-9]{0,999})"
STR = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""

#: The kinds whose short form begins with a word, by that word; the rest of the form is the same for all of these.
BY_WORD: dict[str, list[type[Descriptor]]] = {}
for _kind in (*INPUTS, *OUTPUTS):
    if _word := re.match(r"self\.\w+|\w+", _kind._form):
        BY_WORD.setdefault(_word[0], []).append(_kind)

ATTRIBUTES: Sides = (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)
PIECES: dict[str, Sides] = {
    "size": (SubclassSizeAOTInput, SubclassSizeAOTOutput),
    "stride": (SubclassStrideAOTInput, SubclassStrideAOTOutput),
}
BY_NAME: dict[str, type[Descriptor]] = {kind.__name__: kind for kind in (*INPUTS, *OUTPUTS)}


def parse(text: str, kind: Kind = None) -> AOTInput | AOTOutput:
    """Return the descriptor whose `expr()` or `repr` the text is.

    `expr()` may be ambiguous: tokens and dummies have one name on both sides, and `args[0]._base` is a base or an
    attribute of that name. Then use `kind`, or a `repr`.

    Parameters
    ----------
    text : str
        An `expr()` or a `repr`.
    kind : "input", "output", or a class
        The descriptor must be of this side, or an instance of this class.

    Raises
    ------
    ValueError
        No descriptor prints the text, or several do (they are listed; `candidates` returns them).
    TypeError
        The text is no str.

    Examples
    --------
    >>> from fanin import descriptors as d
    >>> d.parse("__output_tangent(output[1])")
    TangentAOTInput(output=PlainAOTOutput(idx=1))
    >>> d.parse("__forward_token0", kind="output")
    ForwardTokenAOTOutput(idx=0)
    >>> d.parse("args[0]._base")
    Traceback (most recent call last):
    ValueError: parse: 'args[0]._base' may be ViewBaseAOTInput(...) or SubclassGetAttrAOTInput(...): choose one by ...
    >>> d.parse("args[0]._base", kind=d.ViewBaseAOTInput).base_of
    PlainAOTInput(idx=0)
    """
    base = SIDES.get(kind) if kind is None or isinstance(kind, str) else kind
    if not (isinstance(base, type) and issubclass(base, Descriptor)):
        raise ValueError(f'parse: kind must be "input", "output", None or a class of descriptors, got {kind!r}')
    every = candidates(text)
    found = [d for d in every if isinstance(d, base)]
    if len(found) == 1:
        return found[0]
    if not found:
        wanted = kind.__name__ if isinstance(kind, type) else kind
        raise ValueError(f"parse: {text!r:.200} is no {wanted}: it is {' or '.join(map(repr, every))}")
    ways = 'kind="input", kind="output", or kind=<class>'
    raise ValueError(
        f"parse: {text!r:.200} may be {' or '.join(map(repr, found))}: choose one by {ways}, or pass its repr"
    )


def candidates(text: str) -> tuple[AOTInput | AOTOutput, ...]:
    """Return all descriptors whose `expr()` or `repr` the text is: at least one, inputs first.

    ValueError, with the position of the first invalid character, if no descriptor prints the text; TypeError if it is
    no str.

    >>> from fanin import descriptors as d
    >>> [type(x).__name__ for x in d.candidates("__dummy3")]
    ['DummyAOTInput', 'DummyAOTOutput']
    """
    if not isinstance(text, str):
        raise TypeError(f"parse: expected the text of a descriptor, got {type_of(text)}")
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
    """Reads a text from left to right, with several candidate descriptors until all but one are ruled out."""

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

    def make(self, kinds: Iterable[type[Descriptor]], *fields: object) -> list[Descriptor]:
        """The descriptors of these kinds with these fields that are valid."""
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
        kinds = BY_WORD.get(word)
        if kinds is None:
            self.at = start
            raise self.stopped("a word that descriptors print")
        fields: list[object] = [None]  # of each candidate: the field, where the kind has one
        for part in re.findall(r"\{.*?\}|[^{}]", kinds[0]._form.removeprefix(word)):
            if part == "{idx}":
                fields = [int(self.need(INT, "a position" if word in ("args", "output") else "a number"))]
            elif part == "{target!r}":
                fields = [self.name()]
            elif part[0] == "{":
                self.deeper()
                fields = [*self.short()]
            else:
                self.need(re.escape(part), repr(part))
        return [new for x in fields for new in self.make(kinds, *(() if x is None else (x,)))]

    # repr

    def written(self) -> list[Descriptor]:
        self.deeper()
        name = self.need(r"(\w+)", "a class")
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, 1)
            raise ValueError(f"parse: no descriptor is called {name}" + (f": is it {near[0]}?" if near else ""))
        kind = BY_NAME[name]
        self.need(r"\(", "'('")
        values: list[object] = []
        for i, f in enumerate(f for f in dataclasses.fields(kind) if f.repr):
            self.need(rf"{', *' if i else ''}{f.name} *= *", f"{', ' if i else ''}{f.name}=")
            values.append(self.value(f.name))
        self.need(r"\)", "')'")
        self.depth -= 1
        if [] in values:
            return []
        return self.make((kind,), *(v[0] if isinstance(v, list) else v for v in values))

    def value(self, name: str) -> object:
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


for _name in __all__:  # pickles, reprs and documentation name the package, wherever in it a name was made
    if _name not in ("INPUTS", "OUTPUTS"):
        globals()[_name].__module__ = "fanin.descriptors"
