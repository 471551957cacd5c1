"""The signature of a graph: which of its inputs and outputs, by name, is a parameter, a buffer, a new value, a
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .._words import counted
from .records import ViewAndMutationMeta

__all__ = ["BackwardSignature", "GraphNames", "GraphSignature", "create_graph_signature"]

WHO = "create_graph_signature"


@dataclass(frozen=True)
class GraphNames:
    """What must be known of a graph: the names of its placeholders and outputs, in order. An output that is no array
    has the name None.
    """

    placeholders: tuple[str, ...]
    outputs: tuple[str | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placeholders", tuple(self.placeholders))
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @staticmethod
    def of(graph: Any) -> GraphNames:
        """The names of a graph: of GraphNames, or of what looks like a torch.fx GraphModule or Graph. TypeError for
        anything else, ValueError for a graph whose last node returns no list.
        """
        if isinstance(graph, GraphNames):
            return graph
        nodes = getattr(getattr(graph, "graph", graph), "nodes", None)
        if nodes is None:
            raise TypeError(f"{WHO}: expected GraphNames or a torch.fx graph, got a {type(graph).__name__}")
        every = list(nodes)
        if (
            not every
            or every[-1].op != "output"
            or len(every[-1].args) != 1
            or not isinstance(every[-1].args[0], (list, tuple))
        ):
            raise ValueError(f"{WHO}: expected a graph whose last node is the output and returns one list")
        return GraphNames(
            tuple(n.name for n in every if n.op == "placeholder"),
            tuple(getattr(x, "name", None) for x in every[-1].args[0]),
        )


@dataclass(frozen=True)
class BackwardSignature:
    """Of a graph forward and backward: what each gradient is of, and which output is the loss. Keys are names of
    outputs.
    """

    gradients_to_parameters: dict[str | None, str]
    gradients_to_user_inputs: dict[str | None, str]
    loss_output: str | None
    gradients_to_buffers: dict[str | None, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphSignature:
    """What each input and output of a graph is, by name.

    `parameters`, `buffers`: full names. `user_inputs`, `user_outputs`, `input_tokens`, `output_tokens`: names in the
    graph. `inputs_to_parameters`, `inputs_to_buffers`: names in the graph to full names. `buffers_to_mutate`,
    `parameters_to_mutate`, `user_inputs_to_mutate`: the output that is the new value, to the full name or the name of
    the input. `backward_signature`: None for a graph that is only forward.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    user_inputs: tuple[str, ...]
    user_outputs: tuple[str | None, ...]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str | None, str]
    parameters_to_mutate: dict[str | None, str]
    user_inputs_to_mutate: dict[str | None, str]
    in_spec: Any
    out_spec: Any
    backward_signature: BackwardSignature | None
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str | None, ...]


def create_graph_signature(
    fx_g: Any,
    fw_metadata: ViewAndMutationMeta,
    in_spec: Any = None,
    out_spec: Any = None,
    *,
    user_args_flat: Sequence[Any] = (),
    params_and_buffers_flat: Sequence[Any] = (),
    param_names: Sequence[str] = (),
    buffer_names: Sequence[str] = (),
    trace_joint: bool = False,
    num_user_fw_outs: int | None = None,
    loss_index: int | None = None,
) -> GraphSignature:
    """The signature of a graph whose inputs are (tokens, parameters, buffers, user's inputs) and whose outputs are
    (tokens, new values, user's outputs, gradients).

    fx_g: `GraphNames`, or what looks like a torch.fx GraphModule. fw_metadata: what the function does, for the inputs
    (parameters, buffers, user's inputs); new values are those of `mutated_inp_runtime_indices`, and outputs, where it
    tells of any, those of a graph without gradients. user_args_flat, params_and_buffers_flat: asked for `requires_grad`
    alone, and needed only with `trace_joint`; without it their number is checked where they are given.
    num_user_fw_outs: how many outputs the user's function has; needed with `trace_joint`. loss_index: which of them is
    the loss.

    Gradients come in the order parameters, buffers, user's inputs, one for each that requires one. ValueError: names
    and numbers that do not add up, with what was expected; a parameter that a graph with gradients writes.

    >>> from fanin.analysis import GraphNames, InputAliasInfo, ViewAndMutationMeta, create_graph_signature
    >>> meta = ViewAndMutationMeta([InputAliasInfo(), InputAliasInfo(mutates_data=True), InputAliasInfo()], [])
    >>> names = GraphNames(["p", "b", "x"], ["new_b", "y"])
    >>> create_graph_signature(names, meta, param_names=["fc.weight"], buffer_names=["bn.mean"]).buffers_to_mutate
    {'new_b': 'bn.mean'}
    """
    graph = GraphNames.of(fx_g)
    full = (*param_names, *buffer_names)
    tokens, params = len(fw_metadata.tokens), len(param_names)
    arguments = graph.placeholders[tokens + len(full) :]
    if tokens + len(full) + len(arguments) != len(graph.placeholders):
        raise ValueError(
            f"{WHO}: expected {counted(tokens, 'token')}, {counted(params, 'parameter')} and"
            f" {counted(len(buffer_names), 'buffer')} among the inputs, but there are {len(graph.placeholders)}:"
            f" {', '.join(graph.placeholders)}"
        )
    written = fw_metadata.mutated_inp_runtime_indices
    if written and written[-1] >= len(full) + len(arguments):
        raise ValueError(f"{WHO}: input {written[-1]} is written, but there are {len(full) + len(arguments)} inputs")
    first = tokens + len(written)
    rest = len(graph.outputs) - first
    if rest < 0:
        raise ValueError(
            f"{WHO}: expected {counted(tokens, 'token')} and {counted(len(written), 'new value')}, got"
            f" {counted(len(graph.outputs), 'output')}"
        )
    backward = None
    if trace_joint:
        wrong = [full[i] for i in written if i < params]
        if wrong:
            raise ValueError(
                f"{WHO}: a graph with gradients cannot write parameters, but {', '.join(wrong)} is written"
            )
        if num_user_fw_outs is None or loss_index is None:
            raise ValueError(f"{WHO}: trace_joint needs num_user_fw_outs and loss_index")
        backward = backward_of(
            graph.outputs[first:],
            num_user_fw_outs,
            loss_index,
            wants(params_and_buffers_flat, full, "params_and_buffers_flat"),
            wants(user_args_flat, arguments, "user_args_flat"),
            params,
        )
        rest = num_user_fw_outs
    else:
        check_forward(fw_metadata, graph.outputs[first:])
        for given, named, what in (
            (params_and_buffers_flat, full, "params_and_buffers_flat"),
            (user_args_flat, arguments, "user_args_flat"),
        ):
            if len(given):
                wants(given, named, what)
    new = dict(zip(written, graph.outputs[tokens:first], strict=True))
    return GraphSignature(
        parameters=tuple(param_names),
        buffers=tuple(buffer_names),
        user_inputs=arguments,
        user_outputs=graph.outputs[first : first + rest],
        inputs_to_parameters=dict(zip(graph.placeholders[tokens : tokens + params], param_names, strict=True)),
        inputs_to_buffers=dict(
            zip(graph.placeholders[tokens + params : tokens + len(full)], buffer_names, strict=True)
        ),
        buffers_to_mutate={name: full[i] for i, name in new.items() if params <= i < len(full)},
        parameters_to_mutate={name: full[i] for i, name in new.items() if i < params},
        user_inputs_to_mutate={name: arguments[i - len(full)] for i, name in new.items() if i >= len(full)},
        in_spec=in_spec,
        out_spec=out_spec,
        backward_signature=backward,
        input_tokens=graph.placeholders[:tokens],
        output_tokens=graph.outputs[:tokens],
    )


def check_forward(meta: ViewAndMutationMeta, outputs: Sequence[str | None]) -> None:
    """ValueError where the metadata tells of outputs, and the graph, which has no gradients, has more or fewer."""
    count = meta.num_outputs + meta.num_intermediate_bases
    if meta.output_info and len(outputs) != count:
        raise ValueError(
            f"{WHO}: expected {counted(count, 'output')} after the new values, {meta.num_outputs} of the function and"
            f" {counted(meta.num_intermediate_bases, 'base')}, got {len(outputs)}: {', '.join(map(str, outputs))}"
        )


def wants(arrays: Sequence[Any], names: Sequence[str], what: str) -> list[tuple[int, str]]:
    """Position and name of those that require a gradient."""
    if len(arrays) != len(names):
        raise ValueError(f"{WHO}: expected {len(names)} {what}, {', '.join(names)}; got {len(arrays)}")
    return [
        (i, name) for i, (x, name) in enumerate(zip(arrays, names, strict=True)) if getattr(x, "requires_grad", False)
    ]


def backward_of(
    outputs: Sequence[str | None],
    num_user_outs: int,
    loss_index: int,
    stored: list[tuple[int, str]],
    given: list[tuple[int, str]],
    params: int,
) -> BackwardSignature:
    """outputs: the user's, then the gradients. stored, given: the parameters and buffers, and the user's inputs, that
    require one.
    """
    if not 0 <= loss_index < num_user_outs:
        raise ValueError(f"{WHO}: loss_index counts the user's {num_user_outs} outputs from 0 on, got {loss_index}")
    gradients = outputs[num_user_outs:]
    if len(outputs) < num_user_outs or len(gradients) != len(stored) + len(given):
        needed = ", ".join(name for _, name in (*stored, *given))
        raise ValueError(
            f"{WHO}: expected {counted(num_user_outs, 'output')} and {counted(len(stored) + len(given), 'gradient')}"
            f" ({needed}), got {len(outputs)} in all"
        )
    named = list(zip(gradients, (*stored, *given), strict=True))
    return BackwardSignature(
        gradients_to_parameters={g: name for g, (i, name) in named[: len(stored)] if i < params},
        gradients_to_user_inputs={g: name for g, (_, name) in named[len(stored) :]},
        loss_output=outputs[loss_index],
        gradients_to_buffers={g: name for g, (i, name) in named[: len(stored)] if i >= params},
    )
