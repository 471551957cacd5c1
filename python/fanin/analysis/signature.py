"""The signature of a graph: which of its inputs and outputs, by name, is a parameter, a buffer, a new value, a
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .._words import counted, type_of
from .descriptors import (
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
)
from .records import INPUT_ALIAS_TYPES, MutationType, OutputType, ViewAndMutationMeta

API = "create_graph_signature"


@dataclass(frozen=True)
class GraphNames:
    """The names of a graph: those of its placeholders and outputs, in order. An output that is no array
    has the name None.
    """

    placeholders: tuple[str, ...]
    outputs: tuple[str | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placeholders", tuple(self.placeholders))
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @staticmethod
    def of(graph: object) -> GraphNames:
        """The names of a graph: of GraphNames, or of a torch.fx GraphModule or Graph. TypeError for
        anything else, ValueError for a graph whose last node returns no list.
        """
        if isinstance(graph, GraphNames):
            return graph
        nodes = getattr(getattr(graph, "graph", graph), "nodes", None)
        if nodes is None:
            raise TypeError(f"{API}: expected GraphNames or a torch.fx graph, got {type_of(graph)}")
        every = list(nodes)
        if (
            not every
            or every[-1].op != "output"
            or len(every[-1].args) != 1
            or not isinstance(every[-1].args[0], (list, tuple))
        ):
            raise ValueError(f"{API}: expected a graph whose last node is the output and returns one list")
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
    in_spec: object
    out_spec: object
    backward_signature: BackwardSignature | None
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str | None, ...]


def create_graph_signature(
    fx_g: object,
    fw_metadata: ViewAndMutationMeta,
    in_spec: object = None,
    out_spec: object = None,
    *,
    user_args_flat: Sequence[object] = (),
    params_and_buffers_flat: Sequence[object] = (),
    param_names: Sequence[str] = (),
    buffer_names: Sequence[str] = (),
    trace_joint: bool = False,
    num_user_fw_outs: int | None = None,
    loss_index: int | None = None,
) -> GraphSignature:
    """The signature of a graph whose inputs are (tokens, parameters, buffers, user's inputs) and whose outputs are
    (tokens, new values, user's outputs, gradients).

    fx_g: `GraphNames`, or a torch.fx GraphModule. fw_metadata: what the function does, for the inputs
    (parameters, buffers, user's inputs); new values are those of `mutated_inp_runtime_indices`, and outputs, where it
    has any, those of a graph without gradients. user_args_flat, params_and_buffers_flat: read for `requires_grad`
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
    graph, parameters, buffers = GraphNames.of(fx_g), tuple(param_names), tuple(buffer_names)
    full, tokens, params = (*parameters, *buffers), len(fw_metadata.tokens), len(parameters)
    stored, arguments = graph.placeholders[tokens : tokens + len(full)], graph.placeholders[tokens + len(full) :]
    if tokens + len(full) > len(graph.placeholders):
        raise ValueError(
            f"{API}: expected {counted(tokens, 'token')}, {counted(params, 'parameter')} and"
            f" {counted(len(buffers), 'buffer')} among the inputs, but there are {len(graph.placeholders)}:"
            f" {', '.join(graph.placeholders)}"
        )
    written = fw_metadata.mutated_inp_runtime_indices
    if written and written[-1] >= len(full) + len(arguments):
        raise ValueError(f"{API}: input {written[-1]} is written, but there are {len(full) + len(arguments)} inputs")
    first = tokens + len(written)
    if first > len(graph.outputs):
        raise ValueError(
            f"{API}: expected {counted(tokens, 'token')} and {counted(len(written), 'new value')}, got"
            f" {counted(len(graph.outputs), 'output')}"
        )
    requiring = []
    for given, named, what in (
        (params_and_buffers_flat, full, "params_and_buffers_flat"),
        (user_args_flat, arguments, "user_args_flat"),
    ):
        if (trace_joint or len(given)) and len(given) != len(named):
            raise ValueError(f"{API}: expected {len(named)} {what}, {', '.join(named)}; got {len(given)}")
        requiring.append([i for i, x in enumerate(given) if getattr(x, "requires_grad", False)])
    backward, outputs = None, graph.outputs[first:]
    if trace_joint:
        if num_user_fw_outs is None or loss_index is None:
            raise ValueError(f"{API}: trace_joint needs num_user_fw_outs and loss_index")
        of_stored, of_given = requiring
        wrong = [full[i] for i in written if i < params]
        if wrong:
            raise ValueError(
                f"{API}: a graph with gradients cannot write parameters, but {', '.join(wrong)} is written"
            )
        if not 0 <= loss_index < num_user_fw_outs:
            raise ValueError(
                f"{API}: loss_index counts the user's {num_user_fw_outs} outputs from 0 on, got {loss_index}"
            )
        expected = [*(full[i] for i in of_stored), *(arguments[i] for i in of_given)]
        gradients = outputs[num_user_fw_outs:]
        if len(outputs) < num_user_fw_outs or len(gradients) != len(expected):
            raise ValueError(
                f"{API}: expected {counted(num_user_fw_outs, 'output')} and {counted(len(expected), 'gradient')}"
                f" ({', '.join(expected)}), got {len(outputs)} in all"
            )
        grads = dict(zip(gradients, of_stored, strict=False))
        backward = BackwardSignature(
            gradients_to_parameters={g: full[i] for g, i in grads.items() if i < params},
            gradients_to_user_inputs=dict(zip(gradients[len(of_stored) :], expected[len(of_stored) :], strict=True)),
            loss_output=outputs[loss_index],
            gradients_to_buffers={g: full[i] for g, i in grads.items() if i >= params},
        )
        outputs = outputs[:num_user_fw_outs]
    elif fw_metadata.output_info and len(outputs) != fw_metadata.num_outputs + fw_metadata.num_intermediate_bases:
        own, bases = fw_metadata.num_outputs, fw_metadata.num_intermediate_bases
        raise ValueError(
            f"{API}: expected {counted(own + bases, 'output')} after the new values, {own} of the function and"
            f" {counted(bases, 'base')}, got {len(outputs)}: {', '.join(map(str, outputs))}"
        )
    new = dict(zip(written, graph.outputs[tokens:first], strict=True))
    return GraphSignature(
        parameters=parameters,
        buffers=buffers,
        user_inputs=arguments,
        user_outputs=outputs,
        inputs_to_parameters=dict(zip(stored[:params], parameters, strict=True)),
        inputs_to_buffers=dict(zip(stored[params:], buffers, strict=True)),
        buffers_to_mutate={name: full[i] for i, name in new.items() if params <= i < len(full)},
        parameters_to_mutate={name: full[i] for i, name in new.items() if i < params},
        user_inputs_to_mutate={name: arguments[i - len(full)] for i, name in new.items() if i >= len(full)},
        in_spec=in_spec,
        out_spec=out_spec,
        backward_signature=backward,
        input_tokens=graph.placeholders[:tokens],
        output_tokens=graph.outputs[:tokens],
    )


# The joint function


@dataclass(frozen=True)
class JointSignature:
    """What the function that goes forward and backward takes and returns, slot by slot.

    `primals`: its inputs. `tangents`: what comes with them, the gradients of what it returns that has one. `outputs`:
    new values of inputs, the function's outputs, intermediate bases. `gradients`: for each primal its gradient, or None
    where it requires none. Without a backward, tangents and gradients are empty.
    """

    primals: tuple[AOTInput, ...]
    tangents: tuple[AOTInput, ...]
    outputs: tuple[AOTOutput, ...]
    gradients: tuple[GradAOTOutput | None, ...]

    @property
    def inputs(self) -> tuple[AOTInput, ...]:
        """All that it takes, in order."""
        return (*self.primals, *self.tangents)

    @property
    def returned(self) -> tuple[AOTOutput | None, ...]:
        """All that it returns, in order."""
        return (*self.outputs, *self.gradients)


def create_joint_signature(
    meta: ViewAndMutationMeta, requires_grad: Sequence[bool], args_descs: Sequence[AOTInput] | None = None
) -> JointSignature:
    """The signature of the joint function: of the function of `meta` together with its backward.

    requires_grad: for each input, whether it requires a gradient before the call; the metadata has it after the call.
    An input that requires one has a gradient, also if the function set that itself, and does not write it. args_descs:
    what each input is (default: PlainAOTInput by position). There is a backward where an input requires a gradient and
    something has a history that is returned, other than a view of an input that requires one, or is written where
    gradients are on.

    ValueError: more or fewer flags or descriptors than inputs.

    >>> from fanin.analysis import collect_metadata, create_joint_signature
    >>> meta = collect_metadata(lambda w, x: w * x, [np.ones(2), np.ones(2)], requires_grad=[True, False])
    >>> joint = create_joint_signature(meta, [True, False])
    >>> [str(x) for x in joint.inputs]
    ['args[0]', 'args[1]', '__output_tangent(output[0])']
    >>> [str(x) for x in joint.returned]
    ['output[0]', '__grad(args[0])', 'None']
    """
    n, api = len(meta.input_info), "create_joint_signature"
    descs = tuple(args_descs) if args_descs is not None else tuple(PlainAOTInput(i) for i in range(n))
    for given, what in (
        (requires_grad, "requires_grad: expected a flag"),
        (descs, "args_descs: expected a descriptor"),
    ):
        if len(given) != n:
            raise ValueError(f"{api}: {what} for each of the {counted(n, 'input')}, got {len(given)}")
    saved = (
        IntermediateBaseAOTOutput(PlainAOTOutput(j))
        for j, o in enumerate(meta.output_info)
        if o.output_type is OutputType.alias_of_intermediate_save_as_output
    )
    outputs: tuple[AOTOutput, ...] = (
        *(InputMutationAOTOutput(descs[i]) for i in meta.mutated_inp_runtime_indices),
        *(PlainAOTOutput(j) for j in range(meta.num_outputs)),
        *saved,
    )
    if not any(requires_grad) or not has_backward(meta):
        return JointSignature(descs, (), outputs, ())
    grads = [
        before or (info.requires_grad and info.mutation_type is MutationType.NOT_MUTATED)
        for before, info in zip(requires_grad, meta.input_info, strict=True)
    ]
    gradients = tuple(
        GradAOTOutput(d) if has_grad else None  # type: ignore[arg-type]  # it raises for an input without a gradient
        for d, has_grad in zip(descs, grads, strict=True)
    )
    return JointSignature(descs, meta.traced_tangents_descs, outputs, gradients)


def has_backward(meta: ViewAndMutationMeta) -> bool:
    """Whether anything that is returned or written has a history that is not an input's own."""
    requiring = [info.requires_grad for info in meta.input_info]
    returned = any(
        o.requires_grad
        and not (o.output_type in INPUT_ALIAS_TYPES and o.base_idx is not None and requiring[o.base_idx])
        for o in meta.output_info
    )
    return returned or any(
        info.requires_grad
        and info.mutates_data
        and not info.mutations_under_no_grad_or_inference_mode
        and not info.mutations_hidden_from_autograd
        for info in meta.input_info
    )
