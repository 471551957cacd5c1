"""The base of all descriptors: a short form, a total order, checked fields."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import ClassVar

from ..._words import type_of


class NestingError(TypeError, AssertionError):
    """A descriptor was given what it cannot hold.

    It is an AssertionError too, which is what PyTorch raises for a tangent or gradient of the wrong thing.
    """


@dataclass(frozen=True)
class Descriptor:
    """The base of inputs and outputs: a short form and a place in the total order."""

    __slots__ = ()

    #: The level (the table of the package) at which another one may contain it; 0: none may. What others define
    #: is of level 1 if it is differentiable.
    _level: ClassVar[int] = 0

    def expr(self) -> str:
        """The short form, for people: an expression for this value."""
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


#: Our own kinds, with their place among the inputs or outputs (`kinds`).
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


def holds(
    outer: Descriptor, name: str, inner: object, base: type[Descriptor], levels: tuple[int, ...], why: str
) -> None:
    """NestingError unless `inner`, the value of the field `name`, is a `base` of one of these levels."""
    if isinstance(inner, base) and inner._level in levels:
        return
    got = (
        repr(inner)
        if isinstance(inner, Descriptor)
        else f"{type_of(inner)}, {inner!r:.60}"
        if inner is not None
        else "None"
    )
    raise NestingError(f"{type(outer).__name__}: {name} must be {why}; got {got}")


def as_index(d: Descriptor, *names: str) -> None:
    """Convert the fields of these names to plain non-negative ints."""
    for name in names or ("idx",):
        value = getattr(d, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{type(d).__name__}: {name} must be an int, got {value!r:.60}")
        if operator.index(value) < 0:
            raise ValueError(f"{type(d).__name__}: {name}: expected a non-negative integer, got {value!r}")
        object.__setattr__(d, name, operator.index(value))


def as_name(d: Descriptor, name: str) -> str:
    """The field of this name is a plain str."""
    value = getattr(d, name)
    if not isinstance(value, str):
        raise TypeError(f"{type(d).__name__}: {name} must be a str, got {value!r:.60}")
    object.__setattr__(d, name, str(value))
    return str(value)


def as_attribute(d: Descriptor) -> None:
    """The field `attr` is the name of an attribute."""
    attr = as_name(d, "attr")
    if not attr.isidentifier():
        raise ValueError(f"{type(d).__name__}: attr must be the name of an attribute, got {attr!r:.60}")


OF_INPUT = "an input that came in as it is, a base, or a dummy (Plain, Param, Buffer, Dummy, ViewBase, SyntheticBase)"
OF_OUTPUT = "an output before gradients (Plain, Dummy, InputMutation, IntermediateBase, MetadataMutation)"
PIECE_OF_INPUT = f"{OF_INPUT}, a Tangent, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
PIECE_OF_OUTPUT = f"{OF_OUTPUT}, a Grad, or a SubclassGetAttr: pieces are of whole arrays or of pieces"
