"""Metadata as records: what follows from them, how they change with the inputs, the signature of a graph; and overlap
sets of ndarrays.
"""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import itertools
import random
import types
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import analysis
from fanin import descriptors as d
from kit.sample import sizes

# ---------------------------------------------------------------- the records

IN_FIELDS = [
    "is_leaf",
    "mutates_data",
    "mutates_metadata",
    "mutations_hidden_from_autograd",
    "mutations_under_no_grad_or_inference_mode",
    "mutation_inductor_storage_resize",
    "mutates_storage_metadata",
    "requires_grad",
    "keep_input_mutations",
]


def test_records_have_the_names_and_orders_of_pytorch() -> None:
    def names(kind: type) -> list[str]:
        return [f.name for f in dataclasses.fields(kind)]

    assert names(analysis.InputAliasInfo) == IN_FIELDS
    assert names(analysis.OutputAliasInfo) == [
        "output_type",
        "raw_type",
        "base_idx",
        "dynamic_dims",
        "requires_grad",
        "requires_grad_for_backward",
        "view_meta_sequence",
    ]
    assert names(analysis.ViewAndMutationMeta)[:9] == [
        "input_info",
        "output_info",
        "num_intermediate_bases",
        "keep_input_mutations",
        "traced_tangents",
        "traced_tangents_descs",
        "subclass_inp_meta",
        "subclass_fw_graph_out_meta",
        "subclass_tangent_meta",
    ]
    assert names(analysis.PlainTensorMeta) == ["unwrapped_idx", "memory_format"]
    assert names(analysis.MemoryFormatMeta) == ["size", "stride", "memory_format"]
    assert names(analysis.MetadataKey) == [
        "size",
        "layout",
        "is_sparse",
        "stride",
        "storage_offset",
        "is_conj",
        "is_neg",
    ]
    assert [(k.name, k.value) for k in analysis.OutputType] == [
        ("non_alias", 1),
        ("alias_of_input", 2),
        ("is_input", 3),
        ("alias_of_intermediate_save_as_output", 4),
        ("alias_of_intermediate", 5),
        ("alias_of_intermediate_base_is_user_output", 6),
        ("unsafe_view_alias", 7),
        ("custom_function_view", 8),
    ]
    assert [(k.name, k.value) for k in analysis.MutationType] == [
        ("NOT_MUTATED", 1),
        ("MUTATED_IN_GRAPH", 2),
        ("MUTATED_OUT_GRAPH", 3),
    ]
    assert {k.name for k in analysis.INPUT_ALIAS_TYPES} == {"alias_of_input", "is_input"}


def test_the_mutation_type_is_computed_for_every_combination() -> None:
    """The table, as one formula, over all 2^8 records that may be."""
    counts: Counter[str] = Counter()
    for bits in itertools.product((False, True), repeat=8):
        fields = dict(zip(IN_FIELDS[1:], bits, strict=True))
        if fields["mutates_storage_metadata"] and not fields["mutates_metadata"]:
            with pytest.raises(ValueError, match="expected mutates_metadata=True with it"):
                analysis.InputAliasInfo(**fields)
            continue
        data, geometry, hidden, no_grad, resized, storage, grad, keep = bits
        info = analysis.InputAliasInfo(**fields)
        if not (data or geometry or resized):
            want = "NOT_MUTATED"
        elif keep and (data or storage or resized) and ((not geometry and not grad) or hidden or no_grad):
            want = "MUTATED_IN_GRAPH"
        else:
            want = "MUTATED_OUT_GRAPH"
        assert info.mutation_type.name == want
        assert info.has_mutation_tangent == (want == "MUTATED_OUT_GRAPH" and data and grad)
        counts[want] += 1
    assert len(counts) == 3 and min(counts.values()) >= 16


def out(kind: str, base: int | None = None, grad: bool = False, **more: Any) -> Any:
    return analysis.OutputAliasInfo(analysis.OutputType[kind], np.ndarray, base, frozenset(), grad, grad, **more)


def test_an_output_has_a_base_where_its_kind_needs_one_and_nowhere_else() -> None:
    for kind in analysis.OutputType:
        plain = kind.name in ("non_alias", "unsafe_view_alias", "custom_function_view")
        if plain:
            assert out(kind.name).base_idx is None
            with pytest.raises(ValueError, match=f"{kind.name} is a view of nothing: expected base_idx=None, got 0"):
                out(kind.name, 0)
        else:
            assert out(kind.name, 2).base_idx == 2
            for bad in (None, -1):
                with pytest.raises(
                    ValueError, match=rf"{kind.name} needs base_idx, the position of an? \w+( base)?; got {bad}"
                ):
                    out(kind.name, bad)
    with pytest.raises(TypeError, match="expected an OutputType"):
        analysis.OutputAliasInfo("is_input", np.ndarray, 0)  # type: ignore[arg-type]


def test_how_a_view_was_made_counts_by_what_came_out() -> None:
    a = np.zeros((4, 3))
    key = analysis.MetadataKey.make
    one = analysis.ViewMetaSequence(key(a[1:]), a.dtype, ("slice",))
    same = analysis.ViewMetaSequence(key(a[1:4]), a.dtype, ("as_strided", "view"))
    other = analysis.ViewMetaSequence(key(a[:3]), a.dtype, ("slice",))
    assert one == same and one != other and repr(same) == "ViewMetaSequence(as_strided, view)"
    assert out("alias_of_input", 0, view_meta_sequence=one) == out("alias_of_input", 0, view_meta_sequence=None)
    assert out("alias_of_input", 0, view_meta_sequence=None) == out("alias_of_input", 0, view_meta_sequence=other)
    assert out("alias_of_input", 0, view_meta_sequence=one) != out("alias_of_input", 0, view_meta_sequence=other)
    assert hash(out("alias_of_input", 0, view_meta_sequence=one)) == hash(out("alias_of_input", 0))
    assert one != 3


def test_the_key_of_an_array_is_its_geometry_in_its_memory() -> None:
    a = np.zeros((4, 3))
    key = analysis.MetadataKey.make
    assert key(a) == key(a[:]) == key(a.view()) and key(a) != key(a.T)
    assert key(a[1:, ::-1]) == analysis.MetadataKey((3, 3), "strided", False, (24, -8), 40)
    assert key(a[1:][1:]).storage_offset == 48 and key(a[1:].T[1:]).storage_offset == 32
    with pytest.raises(TypeError, match="MetadataKey: expected an ndarray or a torch tensor, got a list"):
        key([1])


def test_the_layout_of_a_tangent_is_that_of_the_array_unless_it_is_expanded() -> None:
    layout = analysis.MemoryFormatMeta.from_tensor
    a = np.zeros((2, 3, 4, 5))
    assert layout(a) == analysis.MemoryFormatMeta(a.shape, a.strides)
    assert layout(np.broadcast_to(np.zeros(3), (2, 3))) == analysis.MemoryFormatMeta(memory_format="contiguous_format")
    assert layout(np.broadcast_to(np.zeros(3), (1, 3))).stride is not None  # one row: nothing comes twice
    assert layout(np.broadcast_to(np.zeros(3), (0, 3))).stride is not None
    last = np.zeros((2, 4, 5, 3)).transpose(0, 3, 1, 2)
    assert layout(last, force_use_memory_format=True).memory_format == "channels_last"
    assert layout(a, force_use_memory_format=True).memory_format == "contiguous_format"
    assert layout(np.zeros((2, 4, 5, 6, 3)).transpose(0, 4, 1, 2, 3), True).memory_format == "channels_last_3d"
    assert layout(np.zeros((7, 3, 1, 1)), True).memory_format == "contiguous_format"
    assert layout(np.zeros((7, 1, 1, 1)), True).memory_format == "contiguous_format"
    of = analysis.TangentMeta.of
    assert of(a).stride == a.strides and of(np.broadcast_to(np.zeros(3), (2, 3))).stride == (24, 8)
    assert of(np.broadcast_to(last[:1], last.shape)).stride == a.strides
    assert layout(np.zeros((0, 3, 4, 5)), True).memory_format == "contiguous_format"
    assert layout(np.zeros((4, 3)), True).memory_format == "contiguous_format"
    for bad in (
        {},
        {"size": (1,)},
        {"size": (1,), "stride": (1,), "memory_format": "channels_last"},
        {"memory_format": "odd"},
    ):
        with pytest.raises(ValueError, match="MemoryFormatMeta: expected"):
            analysis.MemoryFormatMeta(**bad)


def info(words: str = "", keep: bool = False) -> Any:
    """An input's record: "data", "geometry", "grad", "hidden", "no_grad", "leafless"."""
    w = set(words.split())
    assert w <= {"data", "geometry", "grad", "hidden", "no_grad", "leafless"}
    return analysis.InputAliasInfo(
        is_leaf="leafless" not in w,
        mutates_data="data" in w,
        mutates_metadata="geometry" in w,
        mutations_hidden_from_autograd="hidden" in w,
        mutations_under_no_grad_or_inference_mode="no_grad" in w,
        requires_grad="grad" in w,
        keep_input_mutations=keep,
    )


def tangent_of(i: int) -> Any:
    return d.TangentAOTInput(d.InputMutationAOTOutput(d.PlainAOTInput(i)))


def kind(*shape: int, dtype: Any = "float64") -> Any:
    return analysis.TangentMeta(np.ndarray, shape, np.dtype(dtype))


def example() -> Any:
    """Two inputs with tangents, one written in the graph, one untouched; outputs of each kind."""
    keep = True
    inputs = [
        info("data grad", keep),
        info("data", keep),
        info("", keep),
        info("data grad hidden", keep),
        info("geometry", keep),
        info("data grad", keep),
    ]
    outputs = [
        out("non_alias", grad=True),
        out("is_input", 2),
        out("alias_of_input", 1),
        out("unsafe_view_alias"),
        out("alias_of_intermediate_save_as_output", 0),
        out("alias_of_intermediate", 0),
        out("alias_of_intermediate_base_is_user_output", 0),
        out("custom_function_view"),
    ]
    tangents = [kind(2), kind(3), kind(4), kind(5)]
    descs = [
        tangent_of(0),
        tangent_of(5),
        d.TangentAOTInput(d.PlainAOTOutput(0)),
        d.TangentAOTInput(d.IntermediateBaseAOTOutput(d.PlainAOTOutput(4))),
    ]
    plain = [analysis.PlainTensorMeta(i, analysis.MemoryFormatMeta((i + 2,), (8,))) for i in range(4)]
    return analysis.ViewAndMutationMeta(
        inputs,
        outputs,
        1,
        keep,
        tangents,
        descs,
        subclass_tangent_meta=plain,
        grad_enabled_mutation=False,
        static_input_indices=[2, 5],
        tokens={"e": 1},
    )


def test_counts_and_indices_follow_from_the_records() -> None:
    m = example()
    assert m.mutated_inp_runtime_indices == (0, 4, 5) and m.num_mutated_inp_runtime_indices == 3
    assert m.mutated_graph_handled_indices == (1, 3) and m.num_mutated_graph_handled_indices == 2
    assert (
        m.mutated_graph_handled_indices_seen_by_autograd == (1,)
        and m.num_mutated_graph_handled_indices_seen_by_autograd == 1
    )
    assert m.num_input_tangents == 2
    assert m.aliased_out_indices == (1, 2, 4, 5, 6) and m.unsafe_view_out_indices == (3,)
    assert (m.num_outputs, m.num_outputs_non_aliased, m.num_outputs_aliased_to_inputs) == (8, 3, 2)
    assert (m.num_unsafe_view_outputs, m.num_outputs_aliased_to_intermediates, m.num_outputs_aliased) == (1, 3, 5)
    assert (m.num_forward_returns, m.num_outputs_rng_offset, m.num_forward) == (3 + 8 + 1, 0, 12)
    assert replace(m, is_rng_op_functionalized=True).num_forward == 13
    assert (
        not m.dynamic_outputs and replace(m, output_info=[replace(m.output_info[0], dynamic_dims={1})]).dynamic_outputs
    )
    assert m.output_types == (np.ndarray,) * 4


def test_metadata_is_equal_where_what_counts_is() -> None:
    m = example()
    assert m == example()
    same = [
        {"traced_tangents": [kind(2), kind(3), kind(4), analysis.TangentMeta(np.ndarray, (5,), np.dtype("f8"), (1,))]},
        {"traced_tangents_descs": [d.TangentAOTInput(d.PlainAOTOutput(i)) for i in range(4)]},
        {"static_input_indices": ()},
        {"subclass_tangent_meta": ()},
        {"grad_enabled_mutation": None},
    ]
    other = [
        {"input_info": m.input_info[:-1]},
        {"output_info": m.output_info[::-1]},
        {"num_intermediate_bases": 0},
        {"keep_input_mutations": False},
        {"traced_tangents": [kind(2), kind(3), kind(4), kind(6)]},
        {"traced_tangents": [kind(2), kind(3), kind(4), kind(5, dtype="f4")]},
        {"traced_tangents": [kind(2)], "traced_tangents_descs": [tangent_of(0)]},
        {"num_backward_tokens": 1},
        {"is_rng_op_functionalized": True},
    ]
    for change in same:
        assert replace(m, **change) == m
    for change in other:
        assert replace(m, **change) != m, change
    assert m != 3
    with pytest.raises(TypeError):
        hash(m)
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.input_info = ()
    with pytest.raises(ValueError, match="a descriptor for each of 4 tangents, got 1"):
        replace(m, traced_tangents_descs=[tangent_of(0)])


# ---------------------------------------------------------------- without duplicates


def test_without_duplicates_inputs_tangents_and_positions_of_inputs_follow() -> None:
    """f(a, b, a, c, c, d): a and c come twice. a and d have tangents; positions of outputs and of bases stay."""
    a, b, c, e = info("data grad"), info("data"), info("geometry"), info("data grad")
    m = analysis.ViewAndMutationMeta(
        [a, b, a, c, c, e],
        [
            out("is_input", 2),
            out("alias_of_input", 4),
            out("alias_of_intermediate_base_is_user_output", 5),
            out("alias_of_intermediate_save_as_output", 3),
            out("non_alias"),
        ],
        4,
        False,
        [kind(2), kind(2), kind(3), kind(7)],
        [tangent_of(0), tangent_of(2), tangent_of(5), d.TangentAOTInput(d.PlainAOTOutput(4))],
        subclass_tangent_meta=[analysis.PlainTensorMeta(i, analysis.MemoryFormatMeta((i,), (8,))) for i in range(4)],
        static_input_indices=[2, 3, 4],
        grad_enabled_mutation=True,
        tokens={"e": 0},
        num_backward_tokens=2,
    )
    got = analysis.remove_dupe_metadata(m, [True, True, False, True, False, True], [0, 1, 0, 2, 2, 3])
    assert got.input_info == (a, b, c, e)
    assert [o.base_idx for o in got.output_info] == [0, 2, 5, 3, None]
    assert [o.output_type for o in got.output_info] == [o.output_type for o in m.output_info]
    assert got.traced_tangents == (kind(2), kind(3), kind(7))
    assert got.traced_tangents_descs == (tangent_of(0), tangent_of(5), d.TangentAOTInput(d.PlainAOTOutput(4)))
    assert [(p.unwrapped_idx, p.memory_format.size) for p in got.subclass_tangent_meta] == [
        (0, (0,)),
        (1, (2,)),
        (2, (3,)),
    ]
    assert got.static_input_indices == (0, 2)
    assert (got.grad_enabled_mutation, dict(got.tokens), got.num_backward_tokens, got.num_intermediate_bases) == (
        True,
        {"e": 0},
        2,
        4,
    )
    assert got.subclass_inp_meta == got.subclass_fw_graph_out_meta == ()


def test_a_written_duplicate_without_a_gradient_takes_no_tangent_of_an_output() -> None:
    """As many inputs are written as there are tangents, and none of the tangents is of an input."""
    w = info("data")
    tangents = [d.TangentAOTInput(d.PlainAOTOutput(i)) for i in range(2)]
    m = analysis.ViewAndMutationMeta([w, w], [out("non_alias", grad=True)] * 2, 0, False, [kind(1), kind(2)], tangents)
    got = analysis.remove_dupe_metadata(m, [True, False], [0, 0])
    assert got.traced_tangents == (kind(1), kind(2)) and list(got.traced_tangents_descs) == tangents


def test_masks_and_maps_that_do_not_fit_are_refused() -> None:
    m = analysis.ViewAndMutationMeta([info(), info("data"), info()], [])
    rows: list[tuple[list[bool], list[int], str]] = [
        ([True, True], [0, 1], "for each of 3 inputs, got 2 and 2"),
        ([True, True, True], [0, 1], "got 3 and 2"),
        ([False, True, True], [0, 0, 1], r"expected keep_arg_mask\[0\] to be True"),
        ([True, True, True], [0, 1, 1], r"add_dupe_map\[2\] must be 2, got 1"),
        ([True, True, False], [0, 1, 2], r"add_dupe_map\[2\] must be a kept input before it, 0 to 1, got 2"),
        ([True, True, False], [0, 1, -1], "got -1"),
        ([True, False, True], [0, 0, 1], "input 1 should be input 0, but is described otherwise"),
    ]
    for mask, positions, said in rows:
        with pytest.raises(ValueError, match=said):
            analysis.remove_dupe_metadata(m, mask, positions)
    with pytest.raises(ValueError, match="the first input"):
        analysis.remove_dupe_metadata(analysis.ViewAndMutationMeta([], []), [], [])
    with pytest.raises(ValueError, match="an output is a view of input 3, but there are 3 inputs"):
        analysis.remove_dupe_metadata(replace(m, output_info=[out("is_input", 3)]), [True, True, False], [0, 1, 0])
    short = analysis.ViewAndMutationMeta([info("data grad")] * 2, [])
    with pytest.raises(ValueError, match="a tangent for each of the 2 written inputs that need one, got 0"):
        analysis.remove_dupe_metadata(short, [True, False], [0, 0])


# ---------------------------------------------------------------- with bases


class Wanting(np.ndarray):
    """An array that requires a gradient."""

    requires_grad = True


def bases_example() -> tuple[Any, ...]:
    """f(a, x, b, c): a and b are views of one base, x and c share nothing. The inner order is (base, x, c)."""
    base = np.zeros(8)
    a, x, b, c = base[:5].view(Wanting), np.zeros(3), base[3:].view(Wanting), np.zeros(2)
    key = analysis.ViewMetaSequence(analysis.MetadataKey.make(base[1:4]), base.dtype, ("slice",))
    m = analysis.ViewAndMutationMeta(
        [info("data grad leafless"), info("data"), info("data geometry grad leafless"), info("geometry data grad")],
        [
            out("is_input", 0),
            out("alias_of_input", 2, view_meta_sequence=key),
            out("is_input", 3),
            out("alias_of_intermediate", 2),
            out("alias_of_intermediate_base_is_user_output", 1),
            out("non_alias", grad=True),
            out("is_input", 1),
        ],
        3,
        False,
        [kind(5), kind(5), kind(2), kind(9)],
        [tangent_of(0), tangent_of(2), tangent_of(3), d.TangentAOTInput(d.PlainAOTOutput(5))],
        subclass_tangent_meta=[analysis.PlainTensorMeta(i, analysis.MemoryFormatMeta((i,), (8,))) for i in range(4)],
        static_input_indices=[1, 2, 3],
        grad_enabled_mutation=True,
    )
    descs = [d.SyntheticBaseAOTInput(d.PlainAOTInput(0)), d.PlainAOTInput(1), d.PlainAOTInput(3)]
    return m, [(0, a), 1, (0, b), 2], [a, x, b, c], [base, x, c], descs


def test_a_base_replaces_its_views() -> None:
    m, where, outer, inner, descs = bases_example()
    got, extra = analysis.create_synthetic_base_metadata(m, where, outer, inner, descs)
    assert extra == [2]
    assert got.input_info == (info("data grad leafless"), m.input_info[1], m.input_info[3])
    kinds = [(o.output_type.name, o.base_idx) for o in got.output_info]
    assert kinds == [
        ("alias_of_input", 0), ("alias_of_input", 0), ("is_input", 2), ("alias_of_intermediate", 2),
        ("alias_of_intermediate_base_is_user_output", 1), ("non_alias", None), ("is_input", 1), ("alias_of_input", 0),
    ]  # fmt: skip
    assert got.output_info[1].view_meta_sequence == m.output_info[1].view_meta_sequence
    assert got.output_info[1].view_meta_sequence.sequence == ("as_strided",)
    last = got.output_info[-1]
    assert last.requires_grad and last.requires_grad_for_backward and last.raw_type is Wanting
    assert [t.shape for t in got.traced_tangents] == [(8,), (2,), (9,)]
    assert [t.expr() for t in got.traced_tangents_descs] == [
        "__output_tangent(__input_mutation(__make_synthetic_base(args[0])))",
        "__output_tangent(__input_mutation(args[3]))",
        "__output_tangent(output[5])",
    ]
    assert [(p.unwrapped_idx, p.memory_format.size) for p in got.subclass_tangent_meta] == [
        (0, (8,)),
        (1, (2,)),
        (2, (3,)),
    ]
    assert got.static_input_indices == (1, 2) and got.grad_enabled_mutation is True and got.num_intermediate_bases == 3


def test_the_fields_of_a_base_are_those_of_the_table() -> None:
    base = np.zeros(4)
    views = [base[:3], base[1:]]
    descs = [d.SyntheticBaseAOTInput(d.PlainAOTInput(0))]
    rows = [
        (("data", ""), "data"),
        (("", ""), "data"),
        (("data grad", "leafless"), None),
        (("data grad", "geometry"), "data grad"),
        (("data hidden", "hidden"), "data hidden"),
        (("data hidden", ""), "data"),
        (("data no_grad", "data no_grad"), "data no_grad"),
        (("data no_grad", "data"), "data"),
        (("data leafless", "leafless"), "data leafless"),
        (("data", "grad"), "data grad"),
    ]
    for words, want in rows:
        m = analysis.ViewAndMutationMeta(
            [info(w) for w in words], [], 0, False, [kind(3)] * 2, [tangent_of(0), tangent_of(1)]
        )

        def call(m: Any = m) -> Any:
            return analysis.create_synthetic_base_metadata(m, [(0, views[0]), (0, views[1])], views, [base], descs)

        if want is None:
            with pytest.raises(ValueError, match="some are leaves and some are not"):
                call()
        else:
            assert call()[0].input_info == (info(want),), words
    with_keep = analysis.ViewAndMutationMeta([info("data no_grad"), info("data no_grad")], [], 0, True)
    got, _ = analysis.create_synthetic_base_metadata(with_keep, [(0, views[0]), (0, views[1])], views, [base], descs)
    assert got.mutated_graph_handled_indices == (0,)


def test_a_view_that_is_the_base_itself_stays_what_it_is() -> None:
    base = np.zeros(4)
    other = base[1:]
    m = analysis.ViewAndMutationMeta([info("data"), info()], [out("is_input", 0), out("is_input", 1)])
    got, _ = analysis.create_synthetic_base_metadata(
        m, [(0, base), (0, other)], [base, other], [base], [d.ViewBaseAOTInput(d.PlainAOTInput(1))]
    )  # fmt: skip
    assert [o.output_type.name for o in got.output_info] == ["is_input", "alias_of_input"]


def test_bases_that_do_not_fit_are_refused() -> None:
    m, where, outer, inner, descs = bases_example()
    make = analysis.create_synthetic_base_metadata
    rows: list[tuple[tuple[Any, ...], str]] = [
        ((m, where[:-1], outer, inner, descs), "for each of 4 inputs, got 3 and 4"),
        ((m, where, outer[:-1], inner, descs), "got 4 and 3"),
        ((m, where, outer, inner, descs[:-1]), "a descriptor for each of 3 inner arguments, got 2"),
        ((m, [*where[:-1], 3], outer, inner, descs), "input 3 goes to 3, but there are 3 inner arguments"),
        (
            (m, [*where[:-1], 1], outer, inner, descs),
            r"expected \(position, view\) for each of several|no input became",
        ),
        (
            (m, where, outer, [*inner, inner[0]], [*descs, d.PlainAOTInput(9)]),
            r"no input became inner argument 3, args\[9\]",
        ),
        ((m, [0, 1, 0, 2], outer, inner, descs), r"inputs 0, 2 became inner argument 0: expected \(position, view\)"),
    ]
    for arguments, said in rows:
        with pytest.raises(ValueError, match=said):
            make(*arguments)


# ---------------------------------------------------------------- overlap sets


def test_overlap_sets_of_ndarrays_are_exact_and_pytorchs_mistakes_have_their_rule() -> None:
    m = np.zeros((8, 9))
    nothing = m[3:3]
    rows: list[tuple[list[Any], set[int], set[int], list[str]]] = [
        ([m[0:4, 0:4], m[2:6, 0:4]], {0, 1}, set(), ["6c"]),
        ([m[:, 0], m[:, 1]], set(), {0, 1}, ["7"]),
        ([m.ravel()[::2], m.ravel()[1::2]], set(), {0, 1}, ["7"]),
        ([m.ravel()[:10], m.ravel()[10:]], set(), set(), []),
        ([m.ravel()[:11], m.ravel()[10:]], {0, 1}, {0, 1}, []),
        ([m[:, :4], m[:, 4:]], set(), set(), []),
        ([m[0:4, 0:4], m[0:4, 2:6]], {0, 1}, {0, 1}, []),
        ([m[0:2], m[4:6], m[1:3]], {0, 2}, {0, 2}, []),
        ([m[::-1][:4], m[4:]], {0, 1}, {0, 1}, []),
        ([m[3::-1], m[4:]], set(), set(), []),
        ([m[0, 0:0], m], set(), set(), []),
        ([np.lib.stride_tricks.as_strided(m, (3, 4), (0, 8)), m[0:2, 2:6]], {0, 1}, {0, 1}, []),
        ([np.zeros(3), np.zeros(3)], set(), set(), []),
        ([m[:, 0], m[3:3]], set(), set(), []),
        ([nothing, nothing], set(), {0, 1}, ["1"]),
        ([m.ravel()[0:9:4], m.ravel()[8:12]], {0, 1}, {0, 1}, []),
        ([m[0, 0:8], m.view(np.int8)[0, 8:72]], {0, 1}, set(), ["units"]),
        ([m.ravel()[0:1], m.view(np.int8).ravel()[1:8]], {0, 1}, set(), ["units"]),
        ([m.ravel()[2:4], m.view(np.int8).ravel()[2:9]], set(), {0, 1}, ["units"]),
        ([m[2, 3], m[2:3, 3]], set(), set(), []),  # the first is a scalar, of its own
    ]  # fmt: skip
    for arrays, exact, torchs, rules in rows:
        arrays = [np.asarray(a) for a in arrays]
        assert analysis.compute_overlapping_inputs(arrays) == exact
        found = analysis.explain_overlap_differences(arrays)
        assert [x.rule for x in found] == rules, found
        if len(arrays) == 2 or not rules:
            assert analysis.compute_overlapping_inputs(arrays, compat="torch") == torchs, (exact, torchs)
        for x in found:
            assert str(x).startswith("arrays 0 and 1: torch: ") and str(x).endswith(f"; it is {x.exact}")


@pytest.mark.parametrize("sets", sizes(150, 400))
def test_random_sets_of_ndarrays_are_those_of_their_bytes(sets: int) -> None:
    seed = 3
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(sets):
        base = np.zeros((5, 6, 4), np.int16)
        views = []
        for _ in range(rng.randint(2, 5)):
            v = base[tuple(slice(*sorted(rng.sample(range(n + 1), 2)), rng.choice((1, 1, 2))) for n in base.shape)]
            v = v[:, ::-1] if rng.random() < 0.3 else v
            v = v.transpose(rng.sample(range(3), 3))
            views.append(v.view(np.int8) if rng.random() < 0.2 and v.strides[-1] == 2 else v)
        marks = [np.zeros(base.nbytes, bool) for _ in views]
        for v, mark in zip(views, marks, strict=True):
            start = v.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            for at in np.ndindex(*v.shape):
                first = start + sum(i * s for i, s in zip(at, v.strides, strict=True))
                mark[first : first + v.itemsize] = True
        pairs = [(i, j) for i, j in itertools.combinations(range(len(views)), 2) if (marks[i] & marks[j]).any()]
        assert analysis.compute_overlapping_inputs(views) == {i for p in pairs for i in p}
        said = {x.pair: x for x in analysis.explain_overlap_differences(views)}
        torchs = analysis.compute_overlapping_inputs(views, compat="torch")
        called = {p for p in itertools.combinations(range(len(views)), 2) if (p in pairs) != (p in said)}
        assert torchs == {
            i for p in called for i in p
        }  # the truth, with what is explained turned round, is PyTorch's answer
        counts["overlap"] += len(pairs)
        counts["explained"] += len(said)
    assert counts["overlap"] > 100 and counts["explained"] > 100, (seed, counts)


def test_an_invalid_request_is_refused_by_its_position() -> None:
    a = np.zeros(4)
    with pytest.raises(TypeError, match="got a list at 1"):
        analysis.compute_overlapping_inputs([a, [1]])
    with pytest.raises(TypeError, match="got a list at 1"):
        analysis.compute_overlapping_inputs([a, [1]], compat="torch")
    assert analysis.compute_overlapping_inputs([a, [1], a], [0, 2]) == {0, 2}
    assert analysis.compute_overlapping_inputs([a, a[2:], a[:2]], [1, 2]) == set()
    for bad in (3, -1):
        with pytest.raises(IndexError, match=f"no array {bad}; there are 1"):
            analysis.compute_overlapping_inputs([a], [bad])
    with pytest.raises(ValueError, match='compat must be None or "torch"'):
        analysis.compute_overlapping_inputs([a], compat="numpy")
    odd = np.zeros(4, [("a", "i1"), ("b", "f8")])
    assert analysis.compute_overlapping_inputs([odd["a"], odd["b"]]) == set()
    assert analysis.compute_overlapping_inputs([odd["b"], odd]) == {0, 1}
    with pytest.raises(ValueError, match="array 1 has a stride of 9 bytes and items of 8: no torch tensor is like it"):
        analysis.compute_overlapping_inputs([odd["a"], odd["b"]], compat="torch")
    assert analysis.compute_overlapping_inputs([], compat="torch") == analysis.compute_overlapping_inputs([]) == set()


# ---------------------------------------------------------------- signatures


class Param:
    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad


def joint_graph() -> tuple[Any, Any, dict[str, Any]]:
    """A token; parameters w, v; buffers m (written, wants a gradient) and n; arguments x (written) and y (wants
    one).
    """
    names = analysis.GraphNames(
        ["tok", "w", "v", "m", "n", "x", "y"],
        ["tok_out", "new_m", "new_x", "u0", "loss", None, "g_w", "g_m", "g_y"],
    )
    meta = analysis.ViewAndMutationMeta(
        [info("grad"), info(), info("data grad"), info(), info("geometry"), info("grad")],
        [],
        traced_tangents=[kind(1)],
        traced_tangents_descs=[tangent_of(2)],
        tokens={"e": 0},
    )
    how: dict[str, Any] = {
        "user_args_flat": [Param(False), Param()],
        "params_and_buffers_flat": [Param(), Param(False), Param(), Param(False)],
        "param_names": ["fc.w", "fc.v"],
        "buffer_names": ["bn.m", "bn.n"],
        "trace_joint": True,
        "num_user_fw_outs": 3,
        "loss_index": 1,
    }
    return names, meta, how


def test_a_signature_names_what_each_slot_is() -> None:
    names, meta, how = joint_graph()
    s = analysis.create_graph_signature(names, meta, "in", "out", **how)
    assert (s.input_tokens, s.output_tokens, s.in_spec, s.out_spec) == (("tok",), ("tok_out",), "in", "out")
    assert (s.parameters, s.buffers, s.user_inputs) == (("fc.w", "fc.v"), ("bn.m", "bn.n"), ("x", "y"))
    assert s.inputs_to_parameters == {"w": "fc.w", "v": "fc.v"} and s.inputs_to_buffers == {"m": "bn.m", "n": "bn.n"}
    assert (s.buffers_to_mutate, s.parameters_to_mutate, s.user_inputs_to_mutate) == (
        {"new_m": "bn.m"},
        {},
        {"new_x": "x"},
    )
    assert s.user_outputs == ("u0", "loss", None)
    b = s.backward_signature
    assert b == analysis.BackwardSignature({"g_w": "fc.w"}, {"g_y": "y"}, "loss", {"g_m": "bn.m"})


def test_a_signature_of_a_graph_that_is_only_forward() -> None:
    names, meta, how = joint_graph()
    forward = analysis.GraphNames(names.placeholders, names.outputs[:6])
    s = analysis.create_graph_signature(forward, meta, param_names=how["param_names"], buffer_names=how["buffer_names"])
    assert s.user_outputs == ("u0", "loss", None) and s.backward_signature is None
    written = replace(meta, input_info=(info("data"), *meta.input_info[1:]))
    outputs = ("tok_out", "new_w", *names.outputs[1:6])
    s = analysis.create_graph_signature(
        analysis.GraphNames(names.placeholders, outputs),
        written,
        param_names=how["param_names"],
        buffer_names=how["buffer_names"],
    )
    assert s.parameters_to_mutate == {"new_w": "fc.w"} and s.user_outputs == ("u0", "loss", None)


def test_a_signature_uses_positions_if_names_are_equal() -> None:
    """A parameter is called as an argument is in the graph."""
    meta = analysis.ViewAndMutationMeta([info("data"), info()], [])
    s = analysis.create_graph_signature(analysis.GraphNames(["p", "x"], ["new", "y"]), meta, param_names=["x"])
    assert s.parameters_to_mutate == {"new": "x"} and s.user_inputs_to_mutate == {}


def test_writes_in_the_graph_are_no_outputs_of_it() -> None:
    meta = analysis.ViewAndMutationMeta(
        [info("data", keep=True), info("geometry data grad", keep=True)], [], 0, True, [kind(1)], [tangent_of(1)]
    )
    s = analysis.create_graph_signature(analysis.GraphNames(["a", "b"], ["new_b", "y"]), meta)
    assert s.user_inputs_to_mutate == {"new_b": "b"} and s.user_outputs == ("y",)


def test_signatures_that_do_not_add_up_are_refused() -> None:
    names, meta, how = joint_graph()
    few = analysis.GraphNames(names.placeholders[:3], names.outputs)
    written = replace(meta, input_info=(info("data"), *meta.input_info[1:]))
    rows: list[tuple[Any, Any, dict[str, Any], str]] = [
        (few, meta, {}, "expected 1 token, 2 parameters and 2 buffers among the inputs, but there are 3: tok, w, v"),
        (names, meta, {"num_user_fw_outs": None}, "trace_joint needs num_user_fw_outs and loss_index"),
        (names, meta, {"loss_index": None}, "trace_joint needs"),
        (names, meta, {"loss_index": None, "user_args_flat": []}, "trace_joint needs"),
        (names, meta, {"loss_index": 3}, "loss_index counts the user's 3 outputs from 0 on, got 3"),
        (names, meta, {"loss_index": -1}, "got -1"),
        (names, meta, {"num_user_fw_outs": 4}, r"expected 4 outputs and 3 gradients \(fc.w, bn.m, y\), got 6 in all"),
        (
            analysis.GraphNames(names.placeholders, [*names.outputs, "more"]),
            meta,
            {},
            "expected 3 outputs and 3 gradients .* got 7 in all",
        ),
        (names, meta, {"user_args_flat": []}, "expected 2 user_args_flat, x, y; got 0"),
        (names, meta, {"params_and_buffers_flat": [Param()]}, "expected 4 params_and_buffers_flat"),
        (names, written, {}, "a graph with gradients cannot write parameters, but fc.w is written"),
        (
            analysis.GraphNames(names.placeholders, ["tok_out"]),
            meta,
            {},
            "expected 1 token and 2 new values, got 1 output",
        ),
        (
            analysis.GraphNames(names.placeholders[:5], names.outputs),
            meta,
            {},
            "input 4 is written, but there are 4 inputs",
        ),
    ]
    for graph, m, change, said in rows:
        with pytest.raises(ValueError, match=said):
            analysis.create_graph_signature(graph, m, **{**how, **change})
    with pytest.raises(TypeError, match=r"expected GraphNames or a torch.fx graph, got an int"):
        analysis.create_graph_signature(3, meta)


def test_a_signature_without_gradients_is_checked_against_its_arguments() -> None:
    meta = analysis.ViewAndMutationMeta(
        [info("data"), info(), info()], [analysis.OutputAliasInfo(analysis.OutputType.non_alias, np.ndarray)] * 2
    )
    names = analysis.GraphNames(["p", "x", "y"], ["new_p", "a", "b"])
    how: dict[str, Any] = {"param_names": ["w"]}
    good = analysis.create_graph_signature(names, meta, **how, user_args_flat=[1, 2], params_and_buffers_flat=[3])
    assert good.user_outputs == ("a", "b") and good == analysis.create_graph_signature(names, meta, **how)
    for change, said in [
        ({"user_args_flat": [1]}, "expected 2 user_args_flat, x, y; got 1"),
        ({"params_and_buffers_flat": [1, 2]}, "expected 1 params_and_buffers_flat, w; got 2"),
    ]:
        with pytest.raises(ValueError, match=said):
            analysis.create_graph_signature(names, meta, **how, **change)
    for outputs in (["new_p", "a"], ["new_p", "a", "b", "c"]):
        with pytest.raises(
            ValueError, match=r"expected 2 outputs after the new values, 2 of the function and 0 bases, got \d: a"
        ):
            analysis.create_graph_signature(analysis.GraphNames(names.placeholders, outputs), meta, **how)


def test_positions_of_bases_may_be_integers_of_numpy() -> None:
    base = np.zeros(4)
    a, b, c = base[:3], base[1:], np.zeros(2)
    meta = analysis.ViewAndMutationMeta([info("data"), info(), info()], [])
    descs = [d.SyntheticBaseAOTInput(d.PlainAOTInput(0)), d.PlainAOTInput(2)]
    found = [
        analysis.create_synthetic_base_metadata(meta, [(of(0), a), (of(0), b), of(1)], [a, b, c], [base, c], descs)
        for of in (int, np.int64)
    ]
    assert found[0] == found[1]
    with pytest.raises(TypeError):
        analysis.create_synthetic_base_metadata(meta, [(0, a), (0, b), 1.0], [a, b, c], [base, c], descs)


def test_names_are_read_from_objects_like_a_graph() -> None:
    node = types.SimpleNamespace
    x, y = node(op="placeholder", name="x"), node(op="call_function", name="y")
    end = node(op="output", name="output", args=([y, 3, x],))
    graph = node(nodes=[x, y, end])
    for g in (graph, node(graph=graph)):
        assert analysis.GraphNames.of(g) == analysis.GraphNames(["x"], ["y", None, "x"])
    for bad in (
        [],
        [x],
        [x, node(op="output", name="o", args=(y,))],
        [x, node(op="output", name="o", args=([y], [y]))],
    ):
        with pytest.raises(ValueError, match="whose last node is the output and returns one list"):
            analysis.GraphNames.of(node(nodes=bad))


# ---------------------------------------------------------------- public names are documented


MODULES = (analysis.records, analysis.overlapping, d)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_public_names_have_a_sentence_and_their_examples_run(module: Any) -> None:
    names = module.__all__ if module is d else [k for k in analysis.__all__ if getattr(module, k, None)]
    assert len(names) >= 2
    for name in names:
        o = getattr(module, name)
        if not isinstance(o, (frozenset, tuple)):
            first = (inspect.getdoc(o) or "").partition("\n\n")[0].strip()
            assert first.endswith((".", ":")) and not first.startswith(f"{name}("), f"{name} has no sentence: {first!r}"
    said: list[str] = []
    for test in doctest.DocTestFinder().find(module, module.__name__, extraglobs={"np": np, "fanin": fanin}):
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)


def test_the_package_has_what_its_modules_show_and_is_imported_late() -> None:
    from kit.prepared import NUMPY, run_prepared

    assert set(analysis.__all__) >= {
        "InputAliasInfo",
        "remove_dupe_metadata",
        "create_synthetic_base_metadata",
        "compute_overlapping_inputs",
        "create_graph_signature",
    }
    assert all(hasattr(analysis, name) for name in analysis.__all__)
    code = (
        "import sys, fanin; print('fanin.analysis' in sys.modules, 'fanin.descriptors' in sys.modules,"
        " fanin.analysis.__name__, fanin.descriptors.__name__, 'torch' in sys.modules)"
    )
    assert run_prepared(code, imports=NUMPY).stdout.split() == [
        "False",
        "False",
        "fanin.analysis",
        "fanin.descriptors",
        "False",
    ]


def test_the_joint_function_of_arrays_that_require_gradients() -> None:
    """Flags select the inputs that require a gradient: NumPy has no gradients of its own."""

    def step(w: Any, x: Any, n: int) -> Any:
        w -= x
        y = w * x
        return y[:1], y[1:], n

    meta = analysis.collect_metadata(step, [np.ones(3), np.ones(3), 2], requires_grad=[True, False, False])
    joint = analysis.create_joint_signature(meta, [True, False, False])
    assert [str(x) for x in joint.inputs] == [
        "args[0]",
        "args[1]",
        "args[2]",
        "__output_tangent(__input_mutation(args[0]))",
        "__output_tangent(__intermediate_base(output[0]))",
    ]
    assert [str(x) for x in joint.returned] == [
        "__input_mutation(args[0])",
        "output[0]",
        "output[1]",
        "output[2]",
        "__intermediate_base(output[0])",
        "__grad(args[0])",
        "None",
        "None",
    ]
    forward = analysis.create_joint_signature(meta, [False] * 3)
    assert forward.tangents == forward.gradients == () and forward.outputs == joint.outputs
    with pytest.raises(ValueError, match="requires_grad: expected a flag for each of the 3 inputs, got 1"):
        analysis.create_joint_signature(meta, [True])
    with pytest.raises(ValueError, match="args_descs: expected a descriptor for each of the 3 inputs, got 0"):
        analysis.create_joint_signature(meta, [True] * 3, [])
