"""The base of all descriptors: a short form, a total order, checked fields."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from ..._words import type_of

#: Checks or converts one field of a new descriptor.
Rule = Callable[["Descriptor", str], None]


class NestingError(TypeError, AssertionError):
    """A descriptor was given what it cannot hold.

    It is an AssertionError too, which is what PyTorch raises for a tangent or gradient of the wrong thing.
    """


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

    def __le__(self, other: object) -> bool:
        return order(self) <= order(other) if isinstance(other, Descriptor) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return order(self) > order(other) if isinstance(other, Descriptor) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return order(self) >= order(other) if isinstance(other, Descriptor) else NotImplemented


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


def rules(**by_field: Rule) -> Mapping[str, Rule]:
    """The rules of a kind's fields, by their names."""
    return MappingProxyType(by_field)


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


OF_INPUT = "an input that came in as it is, a base, or a dummy (Plain, Param, Buffer, Dummy, ViewBase, SyntheticBase)"
OF_OUTPUT = "an output before gradients (Plain, Dummy, InputMutation, IntermediateBase, MetadataMutation)"
OF_GRAD = "a differentiable input before gradients (Plain, Param, Buffer, ViewBase, SyntheticBase)"
OF_TANGENT = "a differentiable output before gradients (Plain, InputMutation, IntermediateBase, MetadataMutation)"
PIECE_OF_INPUT = f"{OF_INPUT}, a Tangent, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
PIECE_OF_OUTPUT = f"{OF_OUTPUT}, a Grad, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
