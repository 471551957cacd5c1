"""Descriptors: what they print, what may hold what, their order, back from text, and as labels of slots."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fanin
from fanin import descriptors as d
from fanin._trace.line import LABEL
from fanin.sim import Machine
from kit.pictures import Read
from kit.pymutants import Mutant, notices, survivors
from kit.sample import sizes
from kit.support import CSRC

# ---------------------------------------------------------------- one of each, and what it prints


Row = tuple[Any, str, str]  #: an instance, its expr(), its repr


def inputs(x: Any, y: Any) -> list[Row]:
    return [
        (d.ParamAOTInput("w.x"), "self.get_parameter('w.x')", "ParamAOTInput(target='w.x')"),
        (d.BufferAOTInput("bn.mean"), "self.get_buffer('bn.mean')", "BufferAOTInput(target='bn.mean')"),
        (x, "args[0]", "PlainAOTInput(idx=0)"),
        (d.DummyAOTInput(2), "__dummy2", "DummyAOTInput(idx=2)"),
        (
            d.SubclassGetAttrAOTInput(x, "a"),
            "args[0].a",
            "SubclassGetAttrAOTInput(base=PlainAOTInput(idx=0), attr='a')",
        ),
        (d.SubclassSizeAOTInput(x, 1), "args[0].size(1)", "SubclassSizeAOTInput(base=PlainAOTInput(idx=0), idx=1)"),
        (
            d.SubclassStrideAOTInput(x, 1),
            "args[0].stride(1)",
            "SubclassStrideAOTInput(base=PlainAOTInput(idx=0), idx=1)",
        ),
        (d.ViewBaseAOTInput(x), "args[0]._base", "ViewBaseAOTInput(base_of=PlainAOTInput(idx=0))"),
        (
            d.SyntheticBaseAOTInput(x),
            "__make_synthetic_base(args[0])",
            "SyntheticBaseAOTInput(base_of=PlainAOTInput(idx=0))",
        ),
        (d.PhiloxForwardSeedAOTInput(), "__philox_forward_seed", "PhiloxForwardSeedAOTInput()"),
        (d.PhiloxForwardBaseOffsetAOTInput(), "__philox_forward_base_offset", "PhiloxForwardBaseOffsetAOTInput()"),
        (d.PhiloxBackwardSeedAOTInput(), "__philox_backward_seed", "PhiloxBackwardSeedAOTInput()"),
        (d.PhiloxBackwardBaseOffsetAOTInput(), "__philox_backward_base_offset", "PhiloxBackwardBaseOffsetAOTInput()"),
        (d.ForwardTokenAOTInput(4), "__forward_token4", "ForwardTokenAOTInput(idx=4)"),
        (d.BackwardTokenAOTInput(5), "__backward_token5", "BackwardTokenAOTInput(idx=5)"),
        (d.OpaqueRefAOTInput(6, object()), "__opaque_ref6", "OpaqueRefAOTInput(idx=6)"),
        (d.TangentAOTInput(y), "__output_tangent(output[3])", "TangentAOTInput(output=PlainAOTOutput(idx=3))"),
    ]


def outputs(x: Any, y: Any) -> list[Row]:
    return [
        (y, "output[3]", "PlainAOTOutput(idx=3)"),
        (
            d.InputMutationAOTOutput(x),
            "__input_mutation(args[0])",
            "InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=0))",
        ),
        (
            d.IntermediateBaseAOTOutput(y),
            "__intermediate_base(output[3])",
            "IntermediateBaseAOTOutput(base_of=PlainAOTOutput(idx=3))",
        ),
        (d.MetadataMutationAOTOutput(7), "__aliased_arg_with_metadata_mutation7", "MetadataMutationAOTOutput(idx=7)"),
        (d.GradAOTOutput(x), "__grad(args[0])", "GradAOTOutput(grad_of=PlainAOTInput(idx=0))"),
        (
            d.PhiloxUpdatedForwardOffsetAOTOutput(),
            "__philox_updated_forward_offset",
            "PhiloxUpdatedForwardOffsetAOTOutput()",
        ),
        (
            d.PhiloxUpdatedBackwardOffsetAOTOutput(),
            "__philox_updated_backward_offset",
            "PhiloxUpdatedBackwardOffsetAOTOutput()",
        ),
        (d.ForwardTokenAOTOutput(4), "__forward_token4", "ForwardTokenAOTOutput(idx=4)"),
        (d.BackwardTokenAOTOutput(5), "__backward_token5", "BackwardTokenAOTOutput(idx=5)"),
        (
            d.SubclassGetAttrAOTOutput(y, "a"),
            "output[3].a",
            "SubclassGetAttrAOTOutput(base=PlainAOTOutput(idx=3), attr='a')",
        ),
        (
            d.SubclassSizeAOTOutput(y, 1),
            "output[3].size(1)",
            "SubclassSizeAOTOutput(base=PlainAOTOutput(idx=3), idx=1)",
        ),
        (
            d.SubclassStrideAOTOutput(y, 1),
            "output[3].stride(1)",
            "SubclassStrideAOTOutput(base=PlainAOTOutput(idx=3), idx=1)",
        ),
        (d.DummyAOTOutput(2), "__dummy2", "DummyAOTOutput(idx=2)"),
        (d.SavedForBackwardsAOTOutput(8), "__saved_for_backwards_8", "SavedForBackwardsAOTOutput(idx=8)"),
        (
            d.SavedForBackwardsNoVcCheckAOTOutput(9),
            "__saved_for_backwards_no_vc_check_9",
            "SavedForBackwardsNoVcCheckAOTOutput(idx=9)",
        ),
    ]


def one_of_each() -> dict[str, Row]:
    """By class: one of each, and what it prints."""
    x, y = d.PlainAOTInput(0), d.PlainAOTOutput(3)
    return {type(o).__name__: (o, expr, text) for o, expr, text in [*inputs(x, y), *outputs(x, y)]}


def test_there_are_17_kinds_of_inputs_and_15_of_outputs_each_in_the_table() -> None:
    assert len(d.INPUTS) == len(set(d.INPUTS)) == 17
    assert len(d.OUTPUTS) == len(set(d.OUTPUTS)) == 15
    assert set(one_of_each()) == {k.__name__ for k in (*d.INPUTS, *d.OUTPUTS)}


def test_each_descriptor_prints_the_text_of_the_table() -> None:
    for o, expr, text in one_of_each().values():
        assert o.expr() == str(o) == f"{o}" == expr
        assert repr(o) == text


def test_the_markers_list_the_differentiable_kinds() -> None:
    inputs = {"Param", "Buffer", "Plain", "ViewBase", "SyntheticBase", "Tangent"}
    outputs = {"Plain", "InputMutation", "IntermediateBase", "MetadataMutation", "Grad"}
    for o, *_ in one_of_each().values():
        name = type(o).__name__
        assert isinstance(o, d.AOTInput) == name.endswith("AOTInput") != isinstance(o, d.AOTOutput)
        assert isinstance(o, d.DifferentiableAOTInput) == (name.removesuffix("AOTInput") in inputs)
        assert isinstance(o, d.DifferentiableAOTOutput) == (name.removesuffix("AOTOutput") in outputs)


def test_the_bases_have_no_expr() -> None:
    for kind in (d.AOTInput, d.AOTOutput, d.DifferentiableAOTInput, d.DifferentiableAOTOutput):
        with pytest.raises(NotImplementedError, match=kind.__name__):
            kind().expr()


def test_predicates_are_forwarded_by_pieces_and_by_nothing_else() -> None:
    w, b, t = d.ParamAOTInput("w"), d.BufferAOTInput("b"), d.TangentAOTInput(d.PlainAOTOutput(0))
    g = d.GradAOTOutput(w)
    for o, *_ in one_of_each().values():
        if isinstance(o, d.AOTInput):
            assert o.is_param() == isinstance(o, d.ParamAOTInput)
            assert o.is_buffer() == isinstance(o, d.BufferAOTInput)
            assert o.is_tangent() == isinstance(o, d.TangentAOTInput)
        else:
            assert o.is_grad() == isinstance(o, d.GradAOTOutput)
    piece = d.SubclassGetAttrAOTInput
    assert piece(w, "a").is_param() and piece(piece(w, "a"), "b").is_param() and not piece(w, "a").is_buffer()
    assert piece(b, "a").is_buffer() and not piece(b, "a").is_param()
    assert piece(t, "a").is_tangent() and not piece(w, "a").is_tangent()
    out = d.SubclassGetAttrAOTOutput
    assert out(g, "a").is_grad() and out(out(g, "a"), "b").is_grad()
    assert not out(d.PlainAOTOutput(0), "a").is_grad()
    for base in (
        d.ViewBaseAOTInput(w),
        d.SyntheticBaseAOTInput(w),
        d.SubclassSizeAOTInput(w, 0),
        d.SubclassStrideAOTInput(w, 0),
    ):
        assert not base.is_param()
    assert not d.SubclassSizeAOTOutput(g, 0).is_grad() and not d.SubclassStrideAOTOutput(g, 0).is_grad()


def test_descriptors_are_frozen_hashable_equal_by_value_and_can_be_copied() -> None:
    again = one_of_each()
    for name, (o, *_) in one_of_each().items():
        for other, (p, *_) in again.items():
            assert (o == p) == (name == other), (o, p)
        assert hash(o) == hash(again[name][0])
        for fields in vars(o):
            with pytest.raises(AttributeError):
                setattr(o, fields, 1)
        if name != "OpaqueRefAOTInput":  # an object() can be pickled, but is another then
            assert pickle.loads(pickle.dumps(o)) == o
        assert copy.deepcopy(o) == o
    assert d.PlainAOTInput(0) != d.PlainAOTInput(1)
    assert len({d.PlainAOTInput(0), d.DummyAOTInput(0), d.ForwardTokenAOTInput(0), d.PlainAOTInput(0)}) == 3


def test_the_object_of_an_opaque_reference_is_not_compared() -> None:
    a, b = d.OpaqueRefAOTInput(0, [1]), d.OpaqueRefAOTInput(0, {"two"})
    assert a == b and hash(a) == hash(b) and a.ref == [1] and not a < b
    assert d.OpaqueRefAOTInput(1) != a


def test_fields_must_be_what_they_are_called() -> None:
    assert d.PlainAOTInput(np.int64(3)) == d.PlainAOTInput(3) and type(d.PlainAOTInput(np.int64(3)).idx) is int
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="PlainAOTInput: idx must be an int"):
            d.PlainAOTInput(bad)
    with pytest.raises(ValueError, match="PlainAOTOutput: idx: expected a non-negative integer, got -1"):
        d.PlainAOTOutput(-1)
    with pytest.raises(TypeError, match="ParamAOTInput: target must be a str"):
        d.ParamAOTInput(3)
    x = d.PlainAOTInput(0)
    for bad in ("a.b", "", "1a", "a b", "size(0)"):
        with pytest.raises(ValueError, match="SubclassGetAttrAOTInput: attr must be the name of an attribute"):
            d.SubclassGetAttrAOTInput(x, bad)
    with pytest.raises(ValueError, match="SubclassSizeAOTInput: idx: expected a non-negative integer"):
        d.SubclassSizeAOTInput(x, -1)
    for kind in (*d.INPUTS, *d.OUTPUTS):  # each checks the fields of its own
        names = [f for f in kind.__dataclass_fields__ if f != "ref"]
        for name in names:
            o = one_of_each()[kind.__name__][0]
            fields = {n: getattr(o, n) for n in names}
            with pytest.raises((TypeError, ValueError)):
                kind(**{**fields, name: -1})


# ---------------------------------------------------------------- what may hold what


def legal(outer: type, inner: Any) -> bool:
    """The table of the module, written down once more."""
    first_in = ("ParamAOTInput", "BufferAOTInput", "PlainAOTInput", "ViewBaseAOTInput", "SyntheticBaseAOTInput")
    first_out = ("PlainAOTOutput", "InputMutationAOTOutput", "IntermediateBaseAOTOutput", "MetadataMutationAOTOutput")
    name, inside = outer.__name__, type(inner).__name__
    if name == "TangentAOTInput":
        return inside in first_out
    if name == "GradAOTOutput":
        return inside in first_in
    if name in ("ViewBaseAOTInput", "SyntheticBaseAOTInput", "InputMutationAOTOutput"):
        return inside in (*first_in, "DummyAOTInput")
    if name == "IntermediateBaseAOTOutput":
        return inside in (*first_out, "DummyAOTOutput")
    if name.startswith("Subclass") and name.endswith("AOTInput"):
        return inside in (*first_in, "DummyAOTInput", "TangentAOTInput", "SubclassGetAttrAOTInput")
    assert name.startswith("Subclass")
    return inside in (*first_out, "DummyAOTOutput", "GradAOTOutput", "SubclassGetAttrAOTOutput")


HOLDERS = {
    "SubclassGetAttrAOTInput": ("a",),
    "SubclassSizeAOTInput": (0,),
    "SubclassStrideAOTInput": (0,),
    "ViewBaseAOTInput": (),
    "SyntheticBaseAOTInput": (),
    "TangentAOTInput": (),
    "InputMutationAOTOutput": (),
    "IntermediateBaseAOTOutput": (),
    "GradAOTOutput": (),
    "SubclassGetAttrAOTOutput": ("a",),
    "SubclassSizeAOTOutput": (0,),
    "SubclassStrideAOTOutput": (0,),
}


def test_each_kind_may_contain_only_the_kinds_of_the_table() -> None:
    seen: Counter[bool] = Counter()
    for name, more in HOLDERS.items():
        outer = getattr(d, name)
        for inner, *_ in one_of_each().values():
            seen[legal(outer, inner)] += 1
            if legal(outer, inner):
                assert inner in vars(outer(inner, *more)).values()
            else:
                with pytest.raises(d.NestingError, match=f"{name}: .* must be "):
                    outer(inner, *more)
        for inner in (None, "args[0]", 0, d.PlainAOTInput):
            with pytest.raises(d.NestingError, match=f"{name}: .* must be "):
                outer(inner, *more)
    assert seen[True] == 77 and seen[False] == 307, seen


def test_usual_trees_are_legal_and_senseless_ones_are_not() -> None:
    x, w, y = d.PlainAOTInput(0), d.ParamAOTInput("w"), d.PlainAOTOutput(0)
    d.SubclassGetAttrAOTInput(d.TangentAOTInput(y), "a")
    d.SubclassGetAttrAOTOutput(d.GradAOTOutput(x), "a")
    tangent = d.TangentAOTInput(d.InputMutationAOTOutput(d.SyntheticBaseAOTInput(x)))
    assert tangent.expr() == "__output_tangent(__input_mutation(__make_synthetic_base(args[0])))"
    assert d.GradAOTOutput(d.ViewBaseAOTInput(w)).expr() == "__grad(self.get_parameter('w')._base)"
    with pytest.raises(
        d.NestingError,
        match=r"TangentAOTInput: output must be a differentiable output before gradients.*got SubclassGetAttr",
    ):
        d.TangentAOTInput(d.SubclassGetAttrAOTOutput(y, "a"))
    with pytest.raises(
        d.NestingError,
        match=r"GradAOTOutput: grad_of must be a differentiable input before gradients.*got SubclassGetAttr",
    ):
        d.GradAOTOutput(d.SubclassGetAttrAOTInput(x, "a"))
    with pytest.raises(d.NestingError, match="GradAOTOutput"):
        d.GradAOTOutput(d.TangentAOTInput(y))
    with pytest.raises(d.NestingError, match="TangentAOTInput"):
        d.TangentAOTInput(d.GradAOTOutput(x))


def test_a_wrong_nest_is_a_type_error_and_an_assertion_error() -> None:
    for kind in (TypeError, AssertionError):
        with pytest.raises(kind):
            d.GradAOTOutput(d.DummyAOTInput(0))


def test_kinds_of_others_take_part() -> None:
    """Derived kinds: differentiable ones are of level 1, no descriptor may contain the others; they come last in the
    order.
    """
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Mine(d.DifferentiableAOTInput):
        idx: int

        def expr(self) -> str:
            return f"mine[{self.idx}]"

    @dataclasses.dataclass(frozen=True)
    class Token(d.AOTInput):
        pass

    assert d.GradAOTOutput(Mine(1)).expr() == "__grad(mine[1])"
    with pytest.raises(d.NestingError):
        d.ViewBaseAOTInput(Token())
    assert sorted([Mine(1), d.TangentAOTInput(d.PlainAOTOutput(0)), Mine(0)])[1:] == [Mine(0), Mine(1)]
    assert Mine(0) < d.PlainAOTOutput(0)


# ---------------------------------------------------------------- order


def test_the_order_is_total_by_side_kind_and_fields() -> None:
    every = [o for o, *_ in one_of_each().values()]
    assert [type(o) for o in every] == [*d.INPUTS, *d.OUTPUTS]  # the table above is in order
    assert sorted(random.Random(0).sample(every, len(every))) == every
    for a, b in itertools.combinations(every, 2):
        assert a < b and b > a and a <= b and b >= a and not b < a and not a > b and not b <= a and not a >= b
    for a in every:
        assert a <= a and a >= a and not a < a and not a > a
    assert d.PlainAOTInput(2) < d.PlainAOTInput(10)
    assert d.ParamAOTInput("a") < d.ParamAOTInput("b")
    x, y = d.PlainAOTInput(0), d.PlainAOTInput(1)
    assert d.GradAOTOutput(x) < d.GradAOTOutput(y) and d.GradAOTOutput(d.ParamAOTInput("z")) < d.GradAOTOutput(x)
    assert d.SubclassGetAttrAOTInput(x, "b") < d.SubclassGetAttrAOTInput(y, "a")
    assert d.SubclassGetAttrAOTInput(x, "a") < d.SubclassGetAttrAOTInput(x, "b") and not d.SubclassSizeAOTInput(
        x, 1
    ) < d.SubclassSizeAOTInput(x, 0)
    with pytest.raises(TypeError):
        assert x < 3


# ---------------------------------------------------------------- from text

NAMES = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["fc.weight", "a'b", 'a"b', "'\"", "\\", "\n", ")", "\ud800"]
)
ATTRS = st.sampled_from(["a", "_base", "inner", "size", "stride", "self", "args", "é", "__dummy0", "_x1"])
INTS = st.integers(0, 12) | st.integers(0, 10**30)


def legal_trees() -> st.SearchStrategy[Any]:
    """Every legal tree, by level."""
    plain_in = st.builds(d.PlainAOTInput, INTS) | st.builds(d.ParamAOTInput, NAMES) | st.builds(d.BufferAOTInput, NAMES)
    plain_out = st.builds(d.PlainAOTOutput, INTS)

    def wrapped_in(inner: Any) -> Any:
        return st.builds(d.ViewBaseAOTInput, inner) | st.builds(d.SyntheticBaseAOTInput, inner)

    dummy_in, dummy_out = st.builds(d.DummyAOTInput, INTS), st.builds(d.DummyAOTOutput, INTS)
    diff_in = plain_in | wrapped_in(st.recursive(plain_in | dummy_in, wrapped_in, max_leaves=3))
    before_out = (
        plain_out
        | st.builds(d.InputMutationAOTOutput, diff_in | dummy_in)
        | st.builds(d.MetadataMutationAOTOutput, INTS)
    )
    diff_out = before_out | st.builds(d.IntermediateBaseAOTOutput, before_out | dummy_out)
    whole_in = diff_in | dummy_in | st.builds(d.TangentAOTInput, diff_out)
    whole_out = diff_out | dummy_out | st.builds(d.GradAOTOutput, diff_in)
    piece_in = st.recursive(whole_in, lambda inner: st.builds(d.SubclassGetAttrAOTInput, inner, ATTRS), max_leaves=3)
    piece_out = st.recursive(whole_out, lambda inner: st.builds(d.SubclassGetAttrAOTOutput, inner, ATTRS), max_leaves=3)
    leaves = st.one_of(
        *(
            st.builds(k, INTS)
            for k in (
                d.ForwardTokenAOTInput,
                d.BackwardTokenAOTInput,
                d.OpaqueRefAOTInput,
                d.ForwardTokenAOTOutput,
                d.BackwardTokenAOTOutput,
                d.SavedForBackwardsAOTOutput,
                d.SavedForBackwardsNoVcCheckAOTOutput,
            )
        )
    )
    philox = st.sampled_from([k() for k in (*d.INPUTS, *d.OUTPUTS) if "Philox" in k.__name__])
    sizes = st.builds(d.SubclassSizeAOTInput, piece_in, INTS) | st.builds(d.SubclassStrideAOTInput, piece_in, INTS)
    sizes |= st.builds(d.SubclassSizeAOTOutput, piece_out, INTS) | st.builds(d.SubclassStrideAOTOutput, piece_out, INTS)
    return piece_in | piece_out | leaves | philox | sizes


@pytest.mark.parametrize("examples", sizes(40, 600))
def test_every_legal_tree_comes_back_from_its_repr_and_is_among_those_of_its_expr(examples: int) -> None:
    settings(max_examples=examples, deadline=None, database=None)(given(legal_trees())(comes_back))()


def comes_back(tree: Any) -> None:
    assert d.parse(repr(tree)) == tree
    every = d.candidates(tree.expr())
    assert tree in every
    assert len(set(every)) == len(every)
    assert all(other.expr() == tree.expr() for other in every)
    one_side = [o for o in every if isinstance(o, d.AOTInput) == isinstance(tree, d.AOTInput)]
    side = "input" if isinstance(tree, d.AOTInput) else "output"
    for kind, fitting in (
        (None, list(every)),
        (side, one_side),
        (type(tree), [o for o in every if type(o) is type(tree)]),
    ):
        if len(fitting) == 1:
            assert d.parse(tree.expr(), kind=kind) == tree
        else:
            with pytest.raises(ValueError, match="may be") as e:
                d.parse(tree.expr(), kind=kind)
            assert all(repr(o) in str(e.value) for o in fitting)


def test_both_outcomes_of_ambiguity_occur() -> None:
    """How many meanings the expr() of each kind has: two for what is called alike on both sides and for a base, else
    one.
    """
    counts = {name: len(d.candidates(expr)) for name, (_, expr, _) in one_of_each().items()}
    twice = {
        "DummyAOTInput",
        "DummyAOTOutput",
        "ForwardTokenAOTInput",
        "ForwardTokenAOTOutput",
        "BackwardTokenAOTInput",
        "BackwardTokenAOTOutput",
        "ViewBaseAOTInput",
    }
    assert {name for name, n in counts.items() if n == 2} == twice
    assert set(counts.values()) == {1, 2}
    for name, (o, expr, text) in one_of_each().items():
        assert d.parse(expr, kind=type(o)) == o == d.parse(text) == d.parse(f"  {text}\n")
        if name not in twice:
            assert d.parse(expr) == o


def test_an_ambiguous_expr_names_its_candidates_and_a_kind_decides() -> None:
    x = d.PlainAOTInput(0)
    base, piece = d.ViewBaseAOTInput(x), d.SubclassGetAttrAOTInput(x, "_base")
    assert d.candidates("args[0]._base") == (base, piece)
    with pytest.raises(ValueError, match=r"may be ViewBaseAOTInput.* or SubclassGetAttrAOTInput.*kind=<class>"):
        d.parse("args[0]._base", kind="input")
    assert d.parse("args[0]._base", kind=d.ViewBaseAOTInput) == base
    assert d.parse("args[0]._base", kind=d.DifferentiableAOTInput) == base
    assert d.parse("args[0]._base", kind=d.SubclassGetAttrAOTInput) == piece
    assert d.parse("__grad(args[0]._base)") == d.GradAOTOutput(base)  # a gradient is of a base, never of a piece
    assert d.parse("__input_mutation(__dummy1)") == d.InputMutationAOTOutput(d.DummyAOTInput(1))
    assert len(d.candidates("args[0]._base._base.a")) == 3
    assert d.parse("__dummy0", kind="input") == d.DummyAOTInput(0)
    with pytest.raises(ValueError, match=r"'args\[0\]' is no output: it is PlainAOTInput\(idx=0\)"):
        d.parse("args[0]", kind="output")
    with pytest.raises(ValueError, match="kind must be"):
        d.parse("args[0]", kind="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be"):
        d.parse("args[0]", kind=int)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "said"), [
    ("", "at 0 expected"),
    ("foo", "at 0 expected a word that descriptors print, found 'foo'"),
    ("args[-1]", "at 5 expected a position"),
    ("args[01]", r"at 6 expected '\]'"),
    ("args[0", r"at 6 expected '\]', found 'the end'"),
    ("args[0]]", "at 7 expected the end"),
    ("args[0].", "the name of an attribute"),
    ("args[0].size(x)", "expected an axis"),
    ("args[0].1", "the name of an attribute"),
    ("__grad(args[0]", r"expected '\)'"),
    ("__grad()", "at 7 expected"),
    ("__grad(args[0].a)", "breaks a rule: GradAOTOutput: grad_of must be"),
    ("__output_tangent(args[0])", "breaks a rule: TangentAOTInput: output must be"),
    ("args[0].size(1).a", "breaks a rule: SubclassGetAttrAOTInput: base must be"),
    ("self.get_parameter(w)", "a name in quotes"),
    ("self.get_parameter('w)", "a name in quotes"),
    ("self.get_thing('w')", "a word that descriptors print"),
    ("__import__('os').getcwd()", "a word that descriptors print"),
    ("TangntAOTInput(output=PlainAOTOutput(idx=0))", "no descriptor is called TangntAOTInput: is it TangentAOTInput"),
    ("AOTInput()", "no descriptor is called AOTInput"),
    ("PlainAOTInput(0)", "at 14 expected idx="),
    ("PlainAOTInput(idx='0')", "expected a number"),
    ("PlainAOTInput(idx=0, x=1)", r"expected '\)'"),
    ("GradAOTOutput(grad_of=DummyAOTInput(idx=0))", "breaks a rule: GradAOTOutput"),
    ("GradAOTOutput(grad_of=print(1))", "no descriptor is called print"),
    ("__grad(" * 1100, "nested deeper than 100"),
    ("args[0]" + "._base" * 1100, "nested deeper than 100"),
    ("ViewBaseAOTInput(base_of=" * 1100, "nested deeper than 100"),
    ("args[" + "9" * 5000 + "]", r"expected '\]'"),
])  # fmt: skip
def test_text_that_no_descriptor_prints_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        d.parse(text)


def test_text_is_text() -> None:
    for bad in (None, 3, b"args[0]", d.PlainAOTInput(0)):
        with pytest.raises(TypeError, match="parse: expected the text of a descriptor"):
            d.parse(bad)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, database=None)
@given(st.text("args[]0_.()'\"\\=, selfgtprmbuidOTIn", max_size=30))
def test_any_text_is_a_descriptor_or_a_value_error(text: str) -> None:
    try:
        for o in d.candidates(text):
            assert o.expr() == text.strip() or repr(o) == text.strip() or "=" in text
    except ValueError:
        pass


# ---------------------------------------------------------------- groups


def joint() -> tuple[list[Any], list[Any]]:
    """The slots of a graph forward and backward: w and b are parameters, m a buffer that is written, x an argument
    without a gradient.
    """
    w, b, m, x = d.ParamAOTInput("w"), d.ParamAOTInput("b"), d.BufferAOTInput("m"), d.PlainAOTInput(0)
    y, z, new = d.PlainAOTOutput(0), d.PlainAOTOutput(1), d.InputMutationAOTOutput(m)
    inputs = [d.ForwardTokenAOTInput(0), w, b, m, x, d.TangentAOTInput(new), d.TangentAOTInput(z)]
    outputs = [d.ForwardTokenAOTOutput(0), new, y, z, d.GradAOTOutput(w), d.GradAOTOutput(b), None, d.GradAOTOutput(m)]
    return inputs, outputs


def test_gradients_are_found_by_input_and_tangents_by_output() -> None:
    inputs, outputs = joint()
    _, w, b, m, x, t_new, t_z = inputs
    _, new, y, z, g_w, g_b, _, g_m = outputs
    assert d.inputs_and_grads(inputs, outputs) == {
        w: (1, 4),
        b: (2, 5),
        m: (3, 7),
        x: (4, None),
        t_new: (5, None),
        t_z: (6, None),
    }
    assert d.outputs_and_tangents(inputs, outputs) == {
        new: (1, 5), y: (2, None), z: (3, 6), g_w: (4, None), g_b: (5, None), g_m: (7, None),
    }  # fmt: skip
    assert d.params_and_grads(inputs, outputs) == {w: (1, 4), b: (2, 5)}
    assert d.plain_inputs_and_grads(inputs, outputs) == {x: (4, None)}
    assert d.plain_outputs_and_tangents(inputs, outputs) == {y: (2, None), z: (3, 6)}
    assert d.named_params(inputs) == {"w": 1, "b": 2} and d.params(inputs) == [1, 2]
    assert d.named_buffers(inputs) == {"m": 3} and d.buffers(inputs) == [3]


def test_groups_refuse_what_cannot_be_grouped() -> None:
    inputs, outputs = joint()
    stranger = d.GradAOTOutput(d.PlainAOTInput(9))
    with pytest.raises(ValueError, match=r"output 8 is the gradient of args\[9\], which is no input"):
        d.inputs_and_grads(inputs, [*outputs, stranger])
    with pytest.raises(ValueError, match=r"input 7 is the tangent of output\[9\], which is no output"):
        d.outputs_and_tangents([*inputs, d.TangentAOTInput(d.PlainAOTOutput(9))], outputs)
    piece = d.SubclassGetAttrAOTInput(d.PlainAOTInput(5), "a")
    for group in (d.named_params, d.named_buffers, d.params, d.buffers):
        with pytest.raises(ValueError, match=r"input 7 is args\[5\].a, a piece"):
            group([*inputs, piece])
        with pytest.raises(ValueError, match=r"inputs 1 and 7 are both self.get_parameter"):
            group([*inputs, inputs[1]])
    pairs = (
        d.inputs_and_grads,
        d.outputs_and_tangents,
        d.params_and_grads,
        d.plain_inputs_and_grads,
        d.plain_outputs_and_tangents,
    )
    for pair in pairs:
        with pytest.raises(ValueError, match=r"input 7 is args\[5\].a, a piece"):
            pair([*inputs, piece], outputs)
        with pytest.raises(ValueError, match=r"output 8 is output\[5\].a, a piece"):
            pair(inputs, [*outputs, d.SubclassGetAttrAOTOutput(d.PlainAOTOutput(5), "a")])
        with pytest.raises(ValueError, match=r"outputs 4 and 8 are both __grad"):
            pair(inputs, [*outputs, outputs[4]])


def test_the_descriptors_of_a_finished_graph_are_unique() -> None:
    inputs, outputs = joint()
    d.check_unique(inputs, outputs)
    d.check_unique([None, None], [None, None])
    with pytest.raises(ValueError, match=r"inputs 0 and 2 are both args\[0\]"):
        d.check_unique([d.PlainAOTInput(0), None, d.PlainAOTInput(0)])
    with pytest.raises(ValueError, match="input 7 is a dummy, __dummy0"):
        d.check_unique([*inputs, d.DummyAOTInput(0)])
    with pytest.raises(ValueError, match="output 0 is a dummy"):
        d.check_unique([], [d.DummyAOTOutput(0)])
    with pytest.raises(TypeError, match="input 0: expected a descriptor of an input"):
        d.check_unique([d.PlainAOTOutput(0)])
    with pytest.raises(TypeError, match="output 0: expected a descriptor of an output"):
        d.check_unique([], [d.PlainAOTInput(0)])


# ---------------------------------------------------------------- as labels of slots

LABELLED = d.TangentAOTInput(
    d.InputMutationAOTOutput(d.SyntheticBaseAOTInput(d.ParamAOTInput("layers.10.attention.weight")))
)
WEIGHT = d.GradAOTOutput(d.ParamAOTInput("fc.weight"))


def test_a_descriptor_labels_a_slot_in_errors() -> None:
    buf = fanin.InputBuffer([fanin.Slot(shape=3, name=WEIGHT), fanin.Slot(name=LABELLED)], name=d.PlainAOTOutput(0))
    label = "__grad(self.get_parameter('fc.weight'))"
    assert buf.name == "output[0]" and d.parse(buf.name) == d.PlainAOTOutput(0)
    with pytest.raises(ValueError) as e:
        buf.add(0, np.zeros(4), key=2)
    assert str(e.value).startswith(f"output[0]: slot 0 ({label}), key 2: ")
    buf.expect(1, 2)
    buf.add(1, np.zeros(2))
    with pytest.raises(ValueError) as e:
        buf.take()
    assert f"slot 1 ({LABELLED.expr()})" in str(e.value)
    assert fanin.Slot(name=WEIGHT).name is WEIGHT


def test_messages_of_every_call_name_the_slot() -> None:
    def buffer(**how: Any) -> Any:
        return fanin.InputBuffer([fanin.Slot(name=WEIGHT, **how)], name="grads", stats=True)

    full, objects = buffer(), fanin.InputBuffer([fanin.Slot(name=WEIGHT, combine=max)], name="grads")
    full.add(0, np.ones(3, int))
    objects.add(0, "a")
    calls = [
        lambda: full.expect(0, -1),
        lambda: full.expect(0, 0),
        lambda: buffer().ready(0),
        lambda: buffer().stats(0),
        lambda: buffer().target(0).__enter__(),
        lambda: full.take(scale=1j),
        lambda: full.take(scale=0.5),
        lambda: full.take(out=[np.zeros(4, int)]),
        lambda: full.take(out=[np.zeros(3, bool)]),
        lambda: objects.take(out=[np.zeros(3)]),
        lambda: objects.take(scale=2.0),
    ]
    for i, call in enumerate(calls):
        with pytest.raises((ValueError, TypeError)) as e:
            call()
        assert str(e.value).startswith("grads: slot 0 (__grad(self.get_parameter('fc.weight')))"), (i, str(e.value))


def test_a_descriptor_labels_a_slot_in_explain() -> None:
    buf = fanin.InputBuffer([fanin.Slot(name=WEIGHT)], name="grads")
    assert buf.explain(0) == "grads: slot 0 (__grad(self.get_parameter('fc.weight'))): nothing has come yet."


def labelled_pass() -> fanin._trace.recording.Trace:
    with fanin.trace() as t, Machine(1) as m:
        for name in (WEIGHT, LABELLED):
            buf = fanin.InputBuffer([fanin.Slot(name=name)], stream=m.stream())
            for _ in range(2):
                g = m.empty(256, "float32", device=0)
                m.launch(m.streams[-1], lambda v: v.fill(1), writes=[g], name="backward", us=20)
                buf.add(0, g, stream=m.streams[-1])
            buf.take()
    return t


def test_a_descriptor_labels_a_slot_in_a_trace_its_file_its_graph_and_its_picture(tmp_path: Path) -> None:
    t = labelled_pass()
    assert {line.label for line in t.lines if line.kind == "add"} == {WEIGHT.expr(), LABELLED.expr()}
    assert [d.parse(line.label) for line in t.lines if line.kind == "take"] == [WEIGHT, LABELLED]
    assert {s.buffer for s in t.picture().slices if s.name.startswith("sum")} == {WEIGHT.expr(), LABELLED.expr()}
    t.save(tmp_path / "pass.json")
    events = json.loads((tmp_path / "pass.json").read_text())["traceEvents"]
    sums = {e["args"]["buffer"] for e in events if e.get("cat") == "accumulate"}
    assert sums == {WEIGHT.expr(), LABELLED.expr()}
    assert f'label="sum {WEIGHT.expr()}"' in t.dot() and f'label="sum {LABELLED.expr()}"' in t.dot()
    t.plot(tmp_path / "pass.svg")
    bars = Read((tmp_path / "pass.svg").read_bytes()).tips("bars")
    for name in (WEIGHT, LABELLED):
        assert any(tip.startswith(f"sum {name.expr()}: ") for tip in bars)  # no bar has room for all of it


def test_a_label_that_is_too_long_is_cut_and_its_sums_are_still_found() -> None:
    assert f"#define FAN_TRACE_LABEL {LABEL + 1} " in (CSRC / "base" / "trace.h").read_text()
    long = d.GradAOTOutput(d.ParamAOTInput("x" * 200))
    shortened = long.expr()[:LABEL]
    for names, begins, owner in (
        ([long], "sum __grad", shortened),
        (["short"], "sum short", "short"),
        ([long, "short"], "2 slots: sum __grad", shortened),
        (["short", long], "2 slots: sum short, sum __grad", "short"),
        (["a, b", "c"], "2 slots: sum a, b, sum c", "a, b"),
    ):
        with fanin.trace() as t, Machine(1) as m:
            buf = fanin.InputBuffer([fanin.Slot(name=name) for name in names], stream=m.stream())
            for slot in range(2 * len(names)):
                g = m.empty(256, "float32", device=0)
                m.launch(m.streams[-1], lambda v: v.fill(1), writes=[g], name="backward", us=20)
                buf.add(slot // 2, g, stream=m.streams[-1])
            buf.take()
        assert [line.label for line in t.lines if line.kind == "take"] == [
            shortened if name is long else name for name in names
        ]
        (kernel,) = [s for s in t.picture().slices if "sum" in s.name]
        assert kernel.name.startswith(begins) and len(kernel.name) <= LABEL and kernel.buffer == owner


# ---------------------------------------------------------------- planted faults


def fault(old: str, new: str) -> Mutant:
    return Mutant("fanin.analysis.descriptors", old, new, ("fanin.descriptors",))


MUTANTS = [
    fault('"self.get_parameter({target!r})"', '"self.get_parameter({target})"'),
    fault('"self.get_buffer({target!r})"', '"self.get_param({target!r})"'),
    fault('"args[{idx}]"', '"arg[{idx}]"'),
    fault(
        '"__aliased_arg_with_metadata_mutation{idx}"',
        '"__aliased_arg_with_metadata_mutation_{idx}"',
    ),
    fault(
        '"__saved_for_backwards_no_vc_check_{idx}"',
        '"__saved_for_backwards_{idx}"',
    ),
    fault(
        "def __str__(self) -> str:\n        return self.expr()",
        "def __str__(self) -> str:\n        return repr(self)",
    ),
    fault("return order(self) < order(other)", "return order(self) <= order(other)"),
    fault("@functools.total_ordering\n", ""),
    fault("int(not issubclass(kind, AOTInput)),", "int(issubclass(kind, AOTInput)),"),
    fault("PLACES[kind] if ours else len(PLACES)", "-PLACES[kind] if ours else len(PLACES)"),
    fault("for f in dataclasses.fields(kind) if f.compare", "for f in dataclasses.fields(kind)[:1] if f.compare"),
    fault("class NestingError(TypeError, AssertionError)", "class NestingError(TypeError)"),
    fault("class TangentAOTInput(DifferentiableAOTInput)", "class TangentAOTInput(AOTInput)"),
    fault(
        "class MetadataMutationAOTOutput(DifferentiableAOTOutput)",
        "class MetadataMutationAOTOutput(AOTOutput)",
    ),
    fault(
        "holds(DifferentiableAOTOutput, (1, 2), OF_TANGENT)",
        "holds(DifferentiableAOTOutput.__mro__[1], (1, 2), OF_TANGENT)",
    ),
    fault(
        "holds(DifferentiableAOTOutput, (1, 2), OF_TANGENT)",
        "holds(DifferentiableAOTOutput, (1, 2, 3), OF_TANGENT)",
    ),
    fault(
        "holds(DifferentiableAOTInput, (1, 2), OF_GRAD)",
        "holds(DifferentiableAOTInput, (1, 2, 3), OF_GRAD)",
    ),
    fault(
        "mutated_input=holds(AOTInput, (1, 2), OF_INPUT)",
        "mutated_input=holds(AOTInput, (1, 2, 4), OF_INPUT)",
    ),
    fault(
        "holds(AOTOutput, (1, 2), OF_OUTPUT)",
        "holds(AOTOutput, (1, 2, 3), OF_OUTPUT)",
    ),
    fault("inner._level in levels:", "inner._level in (*levels, 0):"),
    fault("inner._level in levels:", "inner._level in levels and inner._level != 4:"),
    fault("    _level: ClassVar[int] = 0\n", "    _level: ClassVar[int] = 1\n"),
    fault(
        '`TangentAOTInput` holds nothing else."""\n\n    _level: ClassVar[int] = 1',
        '`TangentAOTInput` holds nothing else."""\n\n    _level: ClassVar[int] = 0',
    ),
    fault(
        '`GradAOTOutput` holds nothing else."""\n\n    _level: ClassVar[int] = 1',
        '`GradAOTOutput` holds nothing else."""\n\n    _level: ClassVar[int] = 0',
    ),
    fault(
        "ref: object = field(default=None, compare=False, repr=False)",
        "ref: object = field(default=None, compare=True, repr=False)",
    ),
    fault(
        "ref: object = field(default=None, compare=False, repr=False)",
        "ref: object = field(default=None, compare=False)",
    ),
    fault(
        "def is_param(self) -> bool:\n        return self.base.is_param()",
        "def is_param(self) -> bool:\n        return False",
    ),
    fault(
        "def is_buffer(self) -> bool:\n        return self.base.is_buffer()",
        "def is_buffer(self) -> bool:\n        return False",
    ),
    fault(
        "def is_tangent(self) -> bool:\n        return self.base.is_tangent()",
        "def is_tangent(self) -> bool:\n        return False",
    ),
    fault(
        "def is_grad(self) -> bool:\n        return self.base.is_grad()",
        "def is_grad(self) -> bool:\n        return False",
    ),
    fault('if isinstance(value, bool) or not hasattr(value, "__index__"):', 'if not hasattr(value, "__index__"):'),
    fault("if operator.index(value) < 0:", "if operator.index(value) < -1:"),
    fault("if not attr.isidentifier():", "if not attr:"),
    fault('if word == "_base" else []', 'if word == "_base_" else []'),
    fault("for _kind in (*INPUTS, *OUTPUTS):\n    if _word", "for _kind in (*INPUTS, *OUTPUTS[:1]):\n    if _word"),
    fault('"input": AOTInput', '"input": Descriptor'),
    fault("if self.depth > DEEPEST:", "if self.depth > DEEPEST * 100:"),
    fault("if self.at != len(self.text):", "if self.at > len(self.text):"),
    fault("grads.pop(d, None)) for i", "grads.get(d, None)) for i"),
    fault(
        "for i, d in enumerate(outputs) if isinstance(d, GradAOTOutput)",
        "for i, d in enumerate(outputs, 1) if isinstance(d, GradAOTOutput)",
    ),
    fault(
        "for i, d in enumerate(inputs) if isinstance(d, TangentAOTInput)",
        "for i, d in enumerate(inputs, 1) if isinstance(d, TangentAOTInput)",
    ),
    fault(
        "if isinstance(d, (DummyAOTInput, DummyAOTOutput)):\n                raise",
        "if isinstance(d, DummyAOTInput):\n                raise",
    ),
    fault("            if d in seen:", "            if i in seen:"),
    fault("            if not isinstance(d, base):", "            if False:"),
    fault(
        "if isinstance(d, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):",
        "if isinstance(d, SubclassGetAttrAOTInput):",
    ),
    fault(
        "level=1)\nclass DummyAOTInput",
        "level=0)\nclass DummyAOTInput",
    ),
    fault(
        '"__grad({grad_of})", level=3',
        '"__grad({grad_of})", level=2',
    ),
]

CHECKS = [
    test_there_are_17_kinds_of_inputs_and_15_of_outputs_each_in_the_table,
    test_each_descriptor_prints_the_text_of_the_table,
    test_the_markers_list_the_differentiable_kinds,
    test_predicates_are_forwarded_by_pieces_and_by_nothing_else,
    test_the_object_of_an_opaque_reference_is_not_compared,
    test_fields_must_be_what_they_are_called,
    test_each_kind_may_contain_only_the_kinds_of_the_table,
    test_a_wrong_nest_is_a_type_error_and_an_assertion_error,
    test_kinds_of_others_take_part,
    test_the_order_is_total_by_side_kind_and_fields,
    test_both_outcomes_of_ambiguity_occur,
    test_an_ambiguous_expr_names_its_candidates_and_a_kind_decides,
    test_gradients_are_found_by_input_and_tangents_by_output,
    test_groups_refuse_what_cannot_be_grouped,
    test_the_descriptors_of_a_finished_graph_are_unique,
    lambda: test_text_that_no_descriptor_prints_is_refused_with_its_place("args[0]]", "at 7 expected the end"),
    lambda: test_text_that_no_descriptor_prints_is_refused_with_its_place("__grad(" * 102, "nested deeper than 100"),
]


def test_planted_faults_are_noticed_a_sample() -> None:
    assert survivors(random.Random(1).sample(MUTANTS, 3), CHECKS) == []


def test_a_change_that_changes_nothing_is_not_noticed() -> None:
    harmless = fault("DEEPEST = 100\n", "DEEPEST = 50 + 50\n")
    assert notices(harmless, CHECKS) is None
    with pytest.raises(ValueError, match="stands there 0 times"):
        notices(fault("no such text", ""), CHECKS)
    assert d.PlainAOTInput is type(d.PlainAOTInput(0))


@pytest.mark.slow
def test_every_planted_fault_is_noticed() -> None:
    assert survivors(MUTANTS, CHECKS) == []


@pytest.mark.parametrize(
    "text",
    [
        r"self.get_parameter('\u')",
        r"self.get_parameter('\x')",
        "self.get_parameter('a\nb')",
        r"self.get_parameter('\N{no such}')",
        'self.get_parameter("a")',
        r"self.get_parameter('\x61')",
        r"self.get_buffer('\777')",
        "PlainAOTInput(idx =0)",
        r"ParamAOTInput(target='\u')",
    ],
)
def test_a_text_that_nothing_prints_is_a_value_error(text: str) -> None:
    for read in (d.parse, d.candidates):
        with pytest.raises(ValueError, match=r"^parse: .* is the expr\(\) or repr of no descriptor"):
            read(text)
    for name in ("a", "it's", "\n", "\u20ac", "\\", "\x7f"):
        assert d.parse(d.ParamAOTInput(name).expr()) == d.parse(repr(d.ParamAOTInput(name))) == d.ParamAOTInput(name)
