"""The slots of a graph by what they mean: which gradient belongs to which input, where the parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .kinds import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    Descriptor,
    DifferentiableAOTInput,
    DifferentiableAOTOutput,
    DummyAOTInput,
    DummyAOTOutput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)

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
