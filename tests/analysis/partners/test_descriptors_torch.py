"""Descriptors beside PyTorch's own, class by class: their text, equality, markers, and what
they may contain.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from fanin import descriptors as d

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__ < (2, 13):
    pytest.skip(f"compared with torch 2.13 and newer, this is {torch.__version__}", allow_module_level=True)

from torch._functorch._aot_autograd import descriptors as upstream  # noqa: E402
from torch._functorch._aot_autograd import fx_utils  # noqa: E402

NEWER = {"OpaqueRefAOTInput"}  # PyTorch has it since 2.14


def theirs(o: Any) -> Any:
    """The same descriptor, of PyTorch's classes."""
    if not isinstance(o, (d.AOTInput, d.AOTOutput)):
        return o
    return getattr(upstream, type(o).__name__)(*(theirs(getattr(o, f.name)) for f in dataclasses.fields(o)))


def grown(depth: int) -> list[Any]:
    """All legal trees of a few leaves, of at most this depth."""
    every: list[Any] = []
    for kind in (*d.INPUTS, *d.OUTPUTS):
        names = [f.name for f in dataclasses.fields(kind)]
        if names == ["idx"]:
            every += [kind(0), kind(1)]
        elif names == ["target"]:
            every += [kind("w.x"), kind("it's")]
        elif not names:
            every.append(kind())
    for _ in range(depth):
        for kind in (*d.INPUTS, *d.OUTPUTS):
            more = {"attr": "a", "idx": 1}
            names = [f.name for f in dataclasses.fields(kind)]
            if len(names) and names[0] not in ("idx", "target"):
                for inner in list(every):
                    try:
                        every.append(kind(inner, *(more[n] for n in names[1:])))
                    except d.NestingError:
                        pass
        every = list(dict.fromkeys(every))
    return every


def test_the_classes_are_pytorchs_with_their_fields_and_bases() -> None:
    def concrete(module: Any, base: type) -> dict[str, Any]:
        return {
            name: kind
            for name, kind in vars(module).items()
            if isinstance(kind, type)
            and issubclass(kind, base)
            and name not in ("AOTInput", "AOTOutput", "DifferentiableAOTInput", "DifferentiableAOTOutput")
        }

    for base in ("AOTInput", "AOTOutput"):
        ours, upstreams = concrete(d, getattr(d, base)), concrete(upstream, getattr(upstream, base))
        assert set(ours) - NEWER == set(upstreams)
        for name, kind in upstreams.items():
            assert [f.name for f in dataclasses.fields(ours[name])] == [f.name for f in dataclasses.fields(kind)], name
            marks = ("DifferentiableAOTInput", "DifferentiableAOTOutput")
            assert [issubclass(ours[name], getattr(d, m)) for m in marks] == [
                issubclass(kind, getattr(upstream, m)) for m in marks
            ], name
            assert kind.__dataclass_params__.frozen and ours[name].__dataclass_params__.frozen


def test_expr_repr_and_predicates_are_pytorchs() -> None:
    every = [o for o in grown(3) if not isinstance(o, d.OpaqueRefAOTInput)]
    assert len(every) > 1000
    for o in every:
        t = theirs(o)
        assert (o.expr(), repr(o)) == (t.expr(), repr(t))
        names = ("is_param", "is_buffer", "is_tangent") if isinstance(o, d.AOTInput) else ("is_grad",)
        assert [getattr(o, n)() for n in names] == [getattr(t, n)() for n in names], o
        assert d.parse(repr(t)) == o and o in d.candidates(t.expr())
    print(f"{len(every)} trees")


def test_equal_descriptors_of_pytorch_are_equal_here() -> None:
    every = [o for o in grown(1) if not isinstance(o, d.OpaqueRefAOTInput)]
    pairs = [(o, theirs(o)) for o in every]
    counts: Counter[bool] = Counter()
    for (a, ta), (b, tb) in itertools.product(pairs, repeat=2):
        assert (a == b) == (ta == tb)
        counts[a == b] += 1
        if ta == tb:
            assert hash(a) == hash(b) and hash(ta) == hash(tb)
    assert counts[True] == len(every) and counts[False] > 1000


def test_all_that_pytorch_refuses_is_refused_with_an_assertion_error_and_more_is() -> None:
    counts: Counter[str] = Counter()
    leaves = [o for o in grown(1) if not isinstance(o, d.OpaqueRefAOTInput)]
    for kind in (
        d.TangentAOTInput,
        d.GradAOTOutput,
        d.ViewBaseAOTInput,
        d.SyntheticBaseAOTInput,
        d.InputMutationAOTOutput,
        d.IntermediateBaseAOTOutput,
    ):
        for inner in leaves:
            try:
                kind(inner)
                ours = True
            except AssertionError:
                ours = False
            try:
                getattr(upstream, kind.__name__)(theirs(inner))
                upstreams = True
            except AssertionError:
                upstreams = False
            assert upstreams or not ours, (kind, inner)
            counts["both" if ours else "ours alone refuses" if upstreams else "neither"] += 1
    print(dict(counts))
    assert min(counts.values()) > 10 and len(counts) == 3


def test_groups_are_pytorchs_groups() -> None:
    w, m, x, y = d.ParamAOTInput("w"), d.BufferAOTInput("m"), d.PlainAOTInput(0), d.PlainAOTOutput(0)
    new = d.InputMutationAOTOutput(m)
    inputs = [w, m, x, d.TangentAOTInput(y), d.TangentAOTInput(new)]
    outputs = [new, y, d.GradAOTOutput(w), None, d.GradAOTOutput(x)]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"in{i}") for i in range(len(inputs))]
    for node, desc in zip(nodes, inputs, strict=True):
        node.meta["desc"] = theirs(desc)
    results = [graph.call_function(torch.neg, (nodes[0],)) for _ in outputs]
    end = graph.output(results)
    end.meta["desc"] = [theirs(o) for o in outputs]

    def by_description(found: dict[Any, Any], own: list[Any], other: list[Any]) -> dict[str, Any]:
        return {repr(k): (own.index(a), None if b is None else other.index(b)) for k, (a, b) in found.items()}

    def ours(found: dict[Any, Any]) -> dict[str, Any]:
        return {repr(k): v for k, v in found.items()}

    assert ours(d.inputs_and_grads(inputs, outputs)) == by_description(
        fx_utils.get_all_input_and_grad_nodes(graph), nodes, results
    )
    assert ours(d.outputs_and_tangents(inputs, outputs)) == by_description(
        fx_utils.get_all_output_and_tangent_nodes(graph), results, nodes
    )
    assert ours(d.params_and_grads(inputs, outputs)) == by_description(
        fx_utils.get_param_and_grad_nodes(graph), nodes, results
    )
    assert ours(d.plain_inputs_and_grads(inputs, outputs)) == by_description(
        fx_utils.get_plain_input_and_grad_nodes(graph), nodes, results
    )
    assert ours(d.plain_outputs_and_tangents(inputs, outputs)) == by_description(
        fx_utils.get_plain_output_and_tangent_nodes(graph), results, nodes
    )
    assert d.named_params(inputs) == {k: nodes.index(n) for k, n in fx_utils.get_named_param_nodes(graph).items()}
    assert d.named_buffers(inputs) == {k: nodes.index(n) for k, n in fx_utils.get_named_buffer_nodes(graph).items()}
    assert d.params(inputs) == [nodes.index(n) for n in fx_utils.get_param_nodes(graph)]
    assert d.buffers(inputs) == [nodes.index(n) for n in fx_utils.get_buffer_nodes(graph)]


def test_pieces_of_wrapped_arrays_are_refused_where_pytorch_passes_over_them() -> None:
    """Its check comes after another one that passes nothing that it could find."""
    inputs, outputs = [d.PlainAOTInput(0), d.SubclassGetAttrAOTInput(d.PlainAOTInput(1), "a")], [d.PlainAOTOutput(0)]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"in{i}") for i in range(2)]
    for node, desc in zip(nodes, inputs, strict=True):
        node.meta["desc"] = theirs(desc)
    graph.output([nodes[0]]).meta["desc"] = [theirs(o) for o in outputs]
    assert [repr(k) for k in fx_utils.get_all_input_and_grad_nodes(graph)] == ["PlainAOTInput(idx=0)"]
    with pytest.raises(ValueError, match=r"input 1 is args\[1\].a, a piece"):
        d.inputs_and_grads(inputs, outputs)
