"""Metadata beside PyTorch's own: collected from random functions, rewritten, and of overlaps; where the two differ, the
tests have the reasons, and count them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fanin import analysis
from fanin import descriptors as d
from fanin.analysis import MutationType, OutputType, records
from fanin.analysis import collect as collector

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__ < (2, 13):
    pytest.skip(f"compared with torch 2.13 and newer, this is {torch.__version__}", allow_module_level=True)

import logging  # noqa: E402

from examples.upstream import from_torch, layout_from_torch, vars_of  # noqa: E402
from torch._functorch._aot_autograd import descriptors as upstream  # noqa: E402
from torch._functorch._aot_autograd import input_output_analysis as ioa  # noqa: E402
from torch._functorch._aot_autograd import schemas  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from fanin.analysis import tensors  # noqa: E402
from kit.programs_torch import GEOMETRY, Program, base_program, dedupe, program  # noqa: E402
from kit.upstream_torch import faked, upstream_meta  # noqa: E402

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as e:
        return None, e


# ---------------------------------------------------------------- records


#: Fields that a record of PyTorch's has and fanin's has not: in 2.13, and since 2.14.
ALONE: dict[str, tuple[set[str], set[str]]] = {
    "InputAliasInfo": (set(), {"mutation_is_shallow_copy_data"}),
    "OutputAliasInfo": (set(), set()),
    "MemoryFormatMeta": (set(), set()),
    "PlainTensorMeta": (set(), {"size_symbol_placeholders", "stride_symbol_placeholders"}),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_fields_that_pytorchs_record_has_alone_are_known(name: str) -> None:
    theirs = [f.name for f in dataclasses.fields(getattr(schemas, name))]
    ours = [f.name for f in dataclasses.fields(getattr(records, name))]
    assert [f for f in theirs if f in ours] == ours
    assert {*theirs} - {*ours} == ALONE[name][torch.__version__ >= (2, 14)]


def test_a_record_that_says_more_than_fanins_is_refused() -> None:
    known = {f.name: False for f in dataclasses.fields(records.InputAliasInfo)}
    assert vars_of(SimpleNamespace(**known)) == known
    assert vars_of(SimpleNamespace(**known, mutation_is_shallow_copy_data=False)) == known
    with pytest.raises(ValueError, match="mutation_is_shallow_copy_data"):
        vars_of(SimpleNamespace(**known, mutation_is_shallow_copy_data=True))
    plain = SimpleNamespace(unwrapped_idx=3, memory_format=None)
    assert layout_from_torch(plain) == records.PlainTensorMeta(3)
    plain.size_symbol_placeholders = (True,)
    with pytest.raises(ValueError, match="size_symbol_placeholders"):
        layout_from_torch(plain)


# ---------------------------------------------------------------- collected


META_FIELDS = [
    f.name
    for f in dataclasses.fields(records.ViewAndMutationMeta)
    if f.name not in ("input_info", "output_info", "traced_tangents", "tokens")
]


def differences(theirs: Any, ours: Any) -> Iterator[tuple[str, int, str]]:
    """(what, its position, the field) for each field that differs. None of a view's way counts as a value here."""
    for what in ("input_info", "output_info"):
        left, right = getattr(theirs, what), getattr(ours, what)
        assert len(left) == len(right)
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            for f in dataclasses.fields(x):
                u, v = getattr(x, f.name), getattr(y, f.name)
                if (u is None) != (v is None) or u != v:
                    yield what, i, f.name
    for name in META_FIELDS:
        if getattr(theirs, name) != getattr(ours, name):
            yield "meta", 0, name
    if records.kinds(theirs.traced_tangents) != records.kinds(ours.traced_tangents):
        yield "meta", 0, "traced_tangents"


def fields_of(meta: Any) -> int:
    return len(meta.input_info) * 9 + len(meta.output_info) * 7 + len(META_FIELDS) + 1


MOVED = (
    "after a write PyTorch's stand-in of an input has a geometry that the input does not have; ours is that of the"
    " tensors themselves"
)
EMPTY = "PyTorch counts a write to a view without elements; ours does not"
RAISES = "the function itself raises, and PyTorch's run of it does not, or raises something else"
REFUSES = (
    "PyTorch refuses a write to what has a view that a custom function, no_grad or a function of several views made;"
    " the function itself does not write that view"
)
REFUSES_MOVED = (
    "so it does where a tensor is moved in place: its stand-in has another geometry, or is a view that may not"
)


def explained(p: Program, found: list[tuple[str, int, str]], theirs: Any, ours: Any) -> list[str]:
    """A reason for each difference, or the difference itself if it has none. Each claim about fanin's side is
    compared with a plain run.
    """
    args = p.args()
    shown = [records.MetadataKey.make(x) if isinstance(x, torch.Tensor) else None for x in args]
    outs = list(tensors.leaves(p.fn(*args)))
    after = [records.MetadataKey.make(x) if isinstance(x, torch.Tensor) else None for x in args]
    written = any(i.mutates_data for i in ours.input_info) or any(
        "_" in step[0].removeprefix("no_grad ") or "setitem" in step[0] for step in p.steps
    )
    moved = {i for what, i, name in found if (what, name) == ("input_info", "mutates_metadata") and written}
    unwritten = {
        i
        for what, i, name in found
        if (what, name) == ("input_info", "mutates_data") and not ours.input_info[i].mutates_data
    }
    if unwritten:
        again = p.args()
        assert all(x.numel() for x in again if isinstance(x, torch.Tensor)) and any(
            x.numel() == 0 for x in p.pool(*again)
        )
        for i in unwritten:
            assert torch.equal(
                p.args()[i], again[i].as_strided(p.args()[i].shape, p.args()[i].stride(), p.args()[i].storage_offset())
            )
    follows = ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta", "subclass_fw_graph_out_meta")
    writes = ("mutates_data", "mutations_hidden_from_autograd", "mutations_under_no_grad_or_inference_mode")
    reasons = []
    for what, i, name in found:
        truth = False
        if (what == "input_info" and i in unwritten and name in writes) or (
            what == "meta" and unwritten and name in follows
        ):
            reasons.append(EMPTY)
            continue
        if what == "input_info" and name in writes and any(x.numel() == 0 for x in p.pool(*p.args())):
            q = dataclasses.replace(p, no_empty_writes=True)
            fresh = from_torch(upstream_meta(q.fn, q.args(), q.keep)).input_info[i]
            if getattr(fresh, name) == getattr(ours.input_info[i], name):
                reasons.append(EMPTY)
                continue
        if (what, name) == ("output_info", "view_meta_sequence"):
            way = ours.output_info[i].view_meta_sequence
            if way is None or theirs.output_info[i].view_meta_sequence is None:
                truth = ours.output_info[i].base_idx in moved
            else:
                truth = written and way.metadata == records.MetadataKey.make(outs[i])
        elif (what, name) == ("input_info", "mutates_metadata"):
            truth = written and ours.input_info[i].mutates_metadata == (shown[i] != after[i])
        elif what == "meta" and name == "subclass_tangent_meta":
            of = [(t, desc.output) for t, desc in zip(ours.traced_tangents, ours.traced_tangents_descs, strict=True)]
            plain = [(t, outs[o.idx]) for t, o in of if isinstance(o, d.PlainAOTOutput)]
            truth = written and all(t.stride == analysis.TangentMeta.of(o).stride for t, o in plain)
        elif what == "meta" and name == "subclass_fw_graph_out_meta":
            truth = bool(moved)
        reasons.append(MOVED if truth else f"{what}[{i}].{name}")
    return reasons


def compare_programs(seeds: range, gradients: bool = False) -> tuple[Counter[str], Counter[str]]:
    """(counts, reasons of differences); `gradients`: most arguments require one."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in seeds:
        p = program(random.Random(seed), gradients)
        theirs, their_error = attempt(lambda p=p: from_torch(upstream_meta(p.fn, p.args(), p.keep)))
        ours, our_error = attempt(lambda p=p: collector.collect_metadata(p.fn, p.args(), keep_input_mutations=p.keep))
        counts["programs"] += 1
        if our_error is not None or their_error is not None:
            _, plain = attempt(lambda p=p: p.fn(*p.args()))
            # What ours raises is what the function raises, and it raises nothing else.
            assert (type(our_error), str(our_error)) == (type(plain), str(plain)), (seed, p, our_error, plain)
            counts["raised"] += 1
            if plain is None:
                moves = any(step.removeprefix("no_grad ") in GEOMETRY for step, *_ in p.steps)
                assert moves or "base or another view of its base has been modified inplace" in str(their_error), seed
                reasons[REFUSES_MOVED if moves else REFUSES] += 1
            elif str(plain) != str(their_error):
                reasons[RAISES] += 1
            continue
        counts["compared"] += 1
        counts["fields"] += fields_of(ours)
        counts["tangents"] += len(ours.traced_tangents)
        counts["tangents of new values"] += ours.num_input_tangents
        for i in ours.input_info:
            counts["inputs that ask for a gradient"] += i.requires_grad
            counts[f"input {i.mutation_type.name}"] += 1
            counts["input geometry"] += i.mutates_metadata
            counts["input under no_grad"] += i.mutations_under_no_grad_or_inference_mode
        for o in ours.output_info:
            counts[f"output {o.output_type.name}"] += 1
        found = list(differences(theirs, ours))
        counts["fields that differ"] += len(found)
        for reason in explained(p, found, theirs, ours) if found else []:
            assert reason in (MOVED, EMPTY), (seed, p, reason, theirs, ours)
            reasons[reason] += 1
        assert found or theirs == ours
    return counts, reasons


def test_metadata_is_what_pytorch_collects_field_by_field() -> None:
    counts, reasons = compare_programs(range(500))
    print(f"seeds 0 to 499: {dict(counts)}; {dict(reasons)}")
    assert counts["compared"] > 400 and counts["raised"] > 5
    for kind in OutputType:
        assert counts[f"output {kind.name}"] > 0, f"no output was {kind.name}"
    for kind in MutationType:
        assert counts[f"input {kind.name}"] > 0, f"no input was {kind.name}"
    assert counts["input geometry"] and counts["input under no_grad"]
    assert counts["fields that differ"] < counts["fields"] / 1000


def test_metadata_of_functions_with_gradients_is_pytorchs() -> None:
    counts, reasons = compare_programs(range(300), gradients=True)
    print(f"seeds 0 to 299: {dict(counts)}; {dict(reasons)}")
    assert counts["compared"] > 200 and counts["inputs that ask for a gradient"] > 200
    assert counts["tangents"] > 200 and counts["tangents of new values"] > 50
    assert counts["fields that differ"] < counts["fields"] / 500 and set(reasons) <= {
        MOVED,
        RAISES,
        REFUSES_MOVED,
        REFUSES,
    }


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_metadata_is_what_pytorch_collects_in_many_programs(gradients: bool) -> None:
    counts, reasons = compare_programs(range(10_000, 16_000), gradients)
    print(f"seeds 10000 to 15999: {dict(counts)}; {dict(reasons)}")
    assert counts["compared"] > 4000 and set(reasons) <= {MOVED, EMPTY, RAISES, REFUSES, REFUSES_MOVED}


def test_the_comparison_finds_a_planted_difference() -> None:
    p = next(
        p
        for p in map(program, map(random.Random, itertools.count()))
        if p.fn(*[torch.ones(4, 3) for _ in p.kinds]) and "again" not in p.kinds
    )
    ours = collector.collect_metadata(lambda x: [x.mul_(2)], [torch.ones(3)])
    for name in ("mutates_data", "requires_grad", "is_leaf"):
        info = dataclasses.replace(ours.input_info[0], **{name: not getattr(ours.input_info[0], name)})
        assert ("input_info", 0, name) in differences(ours, dataclasses.replace(ours, input_info=(info,)))
    other = dataclasses.replace(ours.output_info[0], output_type=OutputType.alias_of_input)
    assert ("output_info", 0, "output_type") in differences(ours, dataclasses.replace(ours, output_info=(other,)))
    assert explained(p, [("input_info", 0, "is_leaf")], ours, ours) == ["input_info[0].is_leaf"]


# ---------------------------------------------------------------- what inputs are


def collect(fn: Callable[..., Any], *args: Any, **how: Any) -> Any:
    return collector.collect_metadata(fn, list(args), **how)


def tensors_of(*args: Any) -> list[tuple[Any, ...]]:
    """Everything observable of tensors: values, geometry, version, history."""
    return [
        (x.tolist(), x.stride(), x.storage_offset(), x.untyped_storage()._cdata, x._version, x.requires_grad, x.grad_fn)
        for x in args
        if isinstance(x, torch.Tensor)
    ]


def test_the_arguments_are_as_they_were_also_where_the_function_raises() -> None:
    def bad(x: Any, y: Any) -> Any:
        x.mul_(0)
        y.t_()
        x.numpy()[:] = 9
        raise KeyError("as it is")

    base = torch.arange(12.0).reshape(4, 3)
    args = [base[1:], base[:2]]
    before = tensors_of(base, *args)
    with pytest.raises(KeyError, match="as it is"):
        collect(bad, *args)
    assert tensors_of(base, *args) == before
    for seed in range(60):
        p = program(random.Random(seed))
        args = p.args()
        before = tensors_of(*args)
        state = torch.get_rng_state()
        attempt(lambda p=p, args=args: collect(lambda *a: [torch.rand(2), *p.fn(*a)], *args))
        assert tensors_of(*args) == before, p
        assert torch.equal(torch.get_rng_state(), state)


def test_inputs_that_share_memory_share_it_in_the_run() -> None:
    base = torch.zeros(6)
    seen = []

    def fn(a: Any, b: Any, c: Any) -> Any:
        a.fill_(5)
        seen.append((b.tolist(), c.tolist(), a is c, a._base is b._base))
        return []

    a, b = base[:4], base[2:]
    meta = collect(fn, a, b, a)
    assert seen == [([5.0, 5.0, 0.0, 0.0], [5.0] * 4, True, True)]
    assert base.tolist() == [0.0] * 6
    assert [i.mutates_data for i in meta.input_info] == [True, True, True]


def test_inputs_of_several_storages_on_one_memory_share_it_in_the_run() -> None:
    memory = np.arange(8.0)
    a, b, c = torch.from_numpy(memory[:5]), torch.from_numpy(memory[3:]), torch.from_numpy(memory[6:])
    nothing = torch.from_numpy(memory[2:2])
    seen = []

    def fn(a: Any, b: Any, c: Any) -> Any:
        a.fill_(9)
        seen.append((a.tolist(), b.tolist(), c.tolist()))
        return [b[1:]]

    meta = collect(lambda a, b, c, *_: fn(a, b, c), a, b, c, nothing)
    assert seen == [([9.0] * 5, [9.0, 9.0, 5.0, 6.0, 7.0], [6.0, 7.0])]
    assert memory.tolist() == list(range(8))
    assert [i.mutates_data for i in meta.input_info] == [True, True, False, False]
    assert (meta.output_info[0].output_type, meta.output_info[0].base_idx) == (OutputType.alias_of_input, 1)


def test_sparse_outputs_are_arrays_of_their_own() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    meta = collect(lambda x: [x.to_sparse(), (x * 2).to_sparse(), x], x)
    assert [o.output_type.name for o in meta.output_info] == ["non_alias", "non_alias", "is_input"]
    assert [t.stride for t in meta.traced_tangents] == [None, None] and meta.subclass_tangent_meta[
        0
    ].memory_format is None


def test_of_overlapping_inputs_each_with_a_written_byte_is_written() -> None:
    """PyTorch runs them apart and finds the write only in the written one; their base gets the same metadata."""
    base = torch.zeros(8)
    a, b, c = base[:4], base[2:6], base[6:]

    def fn(a: Any, b: Any, c: Any) -> Any:
        a.add_(1)
        return [b.view(-1)]

    ours, theirs = collect(fn, a, b, c), from_torch(upstream_meta(fn, [a, b, c]))
    assert [i.mutates_data for i in ours.input_info] == [True, True, False]
    assert [i.mutates_data for i in theirs.input_info] == [True, False, False]
    assert ours.output_info == theirs.output_info  # and the view is one of b, not of a


def test_writes_outside_of_operations_are_found_and_hidden_from_autograd() -> None:
    def through_numpy(x: Any) -> Any:
        x.numpy()[1] = 7
        return []

    def nan(x: Any) -> Any:
        x.numpy()[0] = np.float32("nan")
        return []

    for fn in (through_numpy, nan):
        (info,) = collect(fn, torch.zeros(3)).input_info
        assert info.mutates_data and info.mutations_hidden_from_autograd
        assert not info.mutations_under_no_grad_or_inference_mode
    (info,) = collect(lambda x: [x.numpy().sum()], torch.full((3,), float("nan"))).input_info
    assert not info.mutates_data and info.mutations_hidden_from_autograd  # vacuously, as PyTorch has it
    (info,) = collect(through_numpy, torch.zeros(3), keep_input_mutations=True).input_info
    assert info.mutation_type is MutationType.MUTATED_IN_GRAPH


def test_who_writes_follows_the_table() -> None:
    """C.2's situations: without and with keep_input_mutations."""
    leaf = torch.ones(3, requires_grad=True)

    def no_grad(x: Any) -> Any:
        with torch.no_grad():
            x.mul_(2)
        return []

    def both(x: Any) -> Any:
        with torch.no_grad():
            x.mul_(2)
        x.mul_(2)
        return []

    def ordinary(x: Any) -> Any:
        x.mul_(2)
        return []

    def detached(x: Any) -> Any:
        x.detach().mul_(2)
        return []

    def geometry(x: Any) -> Any:
        x.unsqueeze_(0)
        return []

    def there_and_back(x: Any) -> Any:
        x.unsqueeze_(0)
        x.squeeze_(0)
        return []

    out, inside, no = MutationType.MUTATED_OUT_GRAPH, MutationType.MUTATED_IN_GRAPH, MutationType.NOT_MUTATED
    rows = [
        (ordinary, torch.ones(3), out, inside),
        (ordinary, leaf * 1, out, out),
        (no_grad, leaf, out, inside),
        (no_grad, leaf * 1, out, inside),
        (both, leaf * 1, out, out),
        (detached, leaf, out, out),
        (geometry, torch.ones(3), out, out),
        (lambda x: [*geometry(x), *ordinary(x)], torch.ones(3), out, out),
        (lambda x: [*geometry(x), *no_grad(x)], torch.ones(3), out, inside),
        (there_and_back, torch.ones(3), no, no),
        (lambda x: [], torch.ones(3), no, no),
        (lambda x: [x.requires_grad_()], torch.ones(3), no, no),
        (lambda x: [*ordinary(x), x.requires_grad_()][1:], torch.ones(3), out, out),
    ]
    for fn, x, without, with_keep in rows:
        for keep, want in ((False, without), (True, with_keep)):
            (info,) = collect(fn, x, keep_input_mutations=keep).input_info
            (theirs,) = from_torch(upstream_meta(fn, [x], keep)).input_info
            assert info == theirs and info.mutation_type is want, (fn, keep, info, theirs)


def test_a_changed_storage_is_reported_where_pytorch_raises() -> None:
    def set_(x: Any) -> Any:
        with torch.no_grad():
            x.set_(torch.zeros(5))
        return [x]

    def data(x: Any) -> Any:
        x.data = torch.zeros(5)
        return [x]

    def written_before(x: Any) -> Any:
        x.mul_(2)
        x.data = torch.zeros(3)  # as large as it was
        return [x]

    for fn in (set_, data, written_before):
        meta = collect(fn, torch.ones(3))
        (info,), (out,) = meta.input_info, meta.output_info
        assert info.mutates_storage_metadata and info.mutates_metadata and not info.mutates_data
        assert info.mutation_type is MutationType.MUTATED_OUT_GRAPH
        assert out.output_type is OutputType.is_input and out.base_idx == 0
    with pytest.raises(AssertionError, match="Encountered a set_ on a graph input"):
        upstream_meta(set_, [torch.ones(3)])

    def there_and_back(x: Any) -> Any:
        with torch.no_grad():
            old = x.untyped_storage()
            x.set_(torch.zeros(5))
            x.set_(old, 0, (3,), (1,))
        return []

    (info,) = collect(there_and_back, torch.ones(3)).input_info
    assert info.mutation_type is MutationType.NOT_MUTATED


def test_outputs_keep_their_places_if_an_input_moves() -> None:
    k = OutputType

    def of(fn: Any, *args: Any) -> Any:
        return [(o.output_type, o.base_idx) for o in collect(fn, *args).output_info]

    def brought_in(x: Any) -> Any:
        y = torch.empty(0)
        y.set_(x.untyped_storage(), 1, (2,), (1,))
        return [y, y[:1]]

    def moved_away(x: Any) -> Any:
        view = x[1:]
        x.set_(torch.zeros(5))
        return [view, x[1:], x]

    def onto_another(x: Any, y: Any) -> Any:
        x.set_(y)
        return [x[1:], y[1:], x, x.data]

    assert of(brought_in, torch.ones(3)) == [(k.alias_of_input, 0)] * 2
    base = torch.ones(6)
    assert (
        of(lambda a, b: brought_in(a), base[:3], base[3:]) == [(k.alias_of_input, 0)] * 2
    )  # a's elements, though b lies in that storage, too
    assert of(moved_away, torch.ones(3)) == [(k.non_alias, None), (k.alias_of_input, 0), (k.is_input, 0)]
    assert of(onto_another, torch.ones(3), torch.ones(4)) == [
        (k.alias_of_input, 0),
        (k.alias_of_input, 1),
        (k.is_input, 0),
        (k.alias_of_input, 0),
    ]
    assert of(lambda a, b: [a.data, b.data[:1]], torch.ones(4)[:2], torch.ones(3)) == [
        (k.alias_of_input, 0),
        (k.alias_of_input, 1),
    ]


def test_a_changed_grad_mode_is_recorded_and_restored() -> None:
    def leaves_off(x: Any) -> Any:
        torch.set_grad_enabled(False)
        return [x + 1]

    assert collect(leaves_off, torch.ones(3)).grad_enabled_mutation is False
    assert torch.is_grad_enabled()
    assert upstream_meta(leaves_off, [torch.ones(3)]).grad_enabled_mutation is False
    assert torch.is_grad_enabled()
    assert collect(lambda x: [x + 1], torch.ones(3)).grad_enabled_mutation is None

    def raises(x: Any) -> Any:
        torch.set_grad_enabled(False)
        raise ValueError

    with pytest.raises(ValueError):
        collect(raises, torch.ones(3))
    assert torch.is_grad_enabled()

    def leaves_autocast(x: Any) -> Any:
        torch.set_autocast_enabled("cpu", True)
        return []

    try:
        with pytest.raises(RuntimeError, match="leaves autocast"):
            collect(leaves_autocast, torch.ones(3))
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_an_object_that_is_no_plain_tensor_is_refused_by_its_descriptor() -> None:
    with pytest.raises(TypeError, match=r"collect_metadata: args\[1\]: expected a plain torch.Tensor or a Parameter"):
        collect(lambda *a: [], torch.ones(2), FakeTensorMode().from_tensor(torch.ones(3)))
    for bad in (torch.ones(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match=r"collect_metadata: args\[1\]: expected a strided tensor on the CPU"):
            collect(lambda *a: [], torch.ones(2), bad)
    with pytest.raises(ValueError, match=r"self.get_parameter\('w'\)"):
        collect(lambda *a: [], torch.ones(3, device="meta"), args_descs=[d.ParamAOTInput("w")])
    with pytest.raises(ValueError, match="a descriptor for each of the 1 inputs, got 2"):
        collect(lambda *a: [], torch.ones(2), args_descs=[d.PlainAOTInput(0)] * 2)


def test_arguments_of_any_dtype_lazy_bits_and_views_of_other_dtypes() -> None:
    c = torch.ones(3, dtype=torch.complex64)
    for x in (
        c.conj(),
        c.conj().imag,
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(4).view(torch.int32),
        torch.view_as_real(c),
        torch.tensor(3),
        torch.ones(0, 3),
    ):
        got = []
        meta = collect(
            lambda x, got=got: got.append((x.tolist(), x.is_conj(), x.is_neg(), x.stride(), x.dtype)) or [x], x
        )
        assert got == [(x.tolist(), x.is_conj(), x.is_neg(), x.stride(), x.dtype)]
        assert meta.output_info[0].output_type is OutputType.is_input
    for x in (c.conj(), c.conj().imag):
        (info,) = collect(lambda x: [x.mul_(2)][1:], x).input_info
        assert info.mutates_data and not info.mutations_hidden_from_autograd
    assert c.tolist() == [1, 1, 1]
    base = torch.zeros(8)
    a, b = base[:4], base.view(torch.int8)[8:20]
    meta = collect(lambda a, b: [a.fill_(1)], a, b)
    assert [i.mutates_data for i in meta.input_info] == [True, True]
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 3.0)

    def step(p: Any) -> Any:
        with torch.no_grad():
            p -= p.grad
            p.grad.zero_()
        return [p.tolist()]

    meta = collect(step, p)
    assert meta.input_info[0].mutates_data and meta.input_info[0].mutations_under_no_grad_or_inference_mode
    assert (p.tolist(), p.grad.tolist()) == ([1.0, 1.0], [3.0, 3.0])
    with torch.inference_mode():
        x = torch.ones(3)
        (info,) = collect(lambda x: [x.mul_(2)], x).input_info
        assert info.mutates_data and info.mutations_under_no_grad_or_inference_mode and x.tolist() == [1.0] * 3
    assert (
        collect(lambda p: [isinstance(p, torch.nn.Parameter) and p], p).output_info[0].output_type
        is OutputType.is_input
    )


# ---------------------------------------------------------------- what outputs are


def test_outputs_of_each_kind() -> None:
    x = torch.ones(4, 3, requires_grad=True) * 1

    def fn(x: Any) -> Any:
        y, z, lone = x * 2, x * 3, x * 4
        return {
            "plain": x + 1, "no array": 5, "input": x, "view": x[1:], "base": y, "view of base": y[0],
            "kept": z[0], "again": z[1], "lone": lone[1:], "twin": y.detach(), "custom": Viewed_apply(x),
        }  # fmt: skip

    from kit.programs_torch import Viewed

    Viewed_apply = Viewed.apply
    meta = collect(fn, x)
    k = OutputType
    assert [(o.output_type, o.base_idx) for o in meta.output_info] == [
        (k.non_alias, None),
        (k.non_alias, None),
        (k.is_input, 0),
        (k.alias_of_input, 0),
        (k.non_alias, None),
        (k.alias_of_intermediate_base_is_user_output, 4),
        (k.alias_of_intermediate_save_as_output, 0),
        (k.alias_of_intermediate, 0),
        (k.unsafe_view_alias, None),
        (k.alias_of_intermediate_base_is_user_output, 4),
        (k.custom_function_view, None),
    ]
    assert meta.num_intermediate_bases == 1
    assert [t.expr() for t in meta.traced_tangents_descs] == [
        "__output_tangent(output[0])",
        "__output_tangent(output[4])",
        "__output_tangent(output[8])",
        "__output_tangent(output[10])",
        "__output_tangent(__intermediate_base(output[6]))",
    ]
    assert meta.output_info[3].view_meta_sequence.sequence == ("slice",)
    theirs = from_torch(upstream_meta(lambda x: list(fn(x).values()), [x]))
    assert list(differences(theirs, meta)) == []


def kinds_of(fn: Any, *args: Any) -> Any:
    """Kind and base of each output, which are PyTorch's."""
    meta, theirs = collect(fn, *args), from_torch(upstream_meta(fn, list(args)))
    assert list(differences(theirs, meta)) == []
    return [(o.output_type, o.base_idx) for o in meta.output_info]


def test_outputs_of_the_rarer_kinds() -> None:
    """Pieces of an input, alone and with another view of it; aliases; two views of an array that is not returned."""
    k, of = OutputType, kinds_of
    x = torch.ones(4, 3, requires_grad=True) * 1
    y = torch.ones(4, 3)
    assert of(lambda x: list(x.unbind(0)), x) == [(k.non_alias, None)] * 4
    assert of(lambda x: list(x.unbind(0)), y) == [(k.alias_of_input, 0)] * 4
    assert of(lambda x: [v.view(-1) for v in x.split(2)], x) == [(k.non_alias, None)] * 2
    assert of(lambda x: [x[0], *x.unbind(0)], x) == [(k.alias_of_input, 0)] * 5
    assert of(lambda x: [x, *x.unbind(0)], x)[0] == (k.is_input, 0)
    assert of(lambda y, x: [x, y, x], y, x) == [(k.is_input, 1), (k.is_input, 0), (k.is_input, 1)]
    assert of(lambda a, b: [a[0], b], y, y) == [(k.alias_of_input, 1), (k.is_input, 1)]  # the last of the duplicates

    def pieces(x: Any) -> Any:
        z = x * 2
        return [*z.unbind(0), z]

    assert of(pieces, x) == [(k.unsafe_view_alias, None)] * 4 + [(k.non_alias, None)]

    def two_and_pieces(x: Any) -> Any:
        z = x * 2
        return [z[0], z[1], *z.split(2)]

    assert of(two_and_pieces, x) == [(k.alias_of_intermediate_save_as_output, 0)] + [(k.alias_of_intermediate, 0)] * 3

    def detached_outputs(x: Any) -> Any:
        z = x * 2
        return [z, z.detach(), z.detach()[0], z[0].detach()]

    assert of(detached_outputs, x) == [
        (k.non_alias, None),
        (k.alias_of_intermediate_base_is_user_output, 0),
        (k.non_alias, None),
        (k.non_alias, None),
    ]

    def moved(y: Any) -> Any:
        y.t_()
        return [y[0]]

    meta = collect(moved, torch.ones(2, 3))
    assert meta.output_info[0].view_meta_sequence is None and meta.input_info[0].mutates_metadata


def test_outputs_that_are_views_under_no_grad() -> None:
    k, of = OutputType, kinds_of
    x = torch.ones(4, 3, requires_grad=True) * 1

    def under_no_grad(x: Any) -> Any:
        z = x * 2
        with torch.no_grad():
            return [z[0], z[1:]]

    assert of(under_no_grad, x) == [(k.alias_of_intermediate_save_as_output, 0), (k.alias_of_intermediate, 0)]
    assert [o.requires_grad_for_backward for o in collect(under_no_grad, x).output_info] == [False, False]

    def one_under_no_grad(x: Any) -> Any:
        z = x * 2
        with torch.no_grad():
            return [z[0], x + 1]

    assert of(one_under_no_grad, x) == [(k.unsafe_view_alias, None), (k.non_alias, None)]
    assert collect(one_under_no_grad, x).traced_tangents == ()


# ---------------------------------------------------------------- rewritten


def renamed(meta: Any, names: list[int]) -> Any:
    """The metadata of an inner function, with the descriptors of the outer one: input i there is input names[i]."""

    def desc(t: Any) -> Any:
        written = isinstance(t.output, d.InputMutationAOTOutput)
        return (
            d.TangentAOTInput(d.InputMutationAOTOutput(d.PlainAOTInput(names[t.output.mutated_input.idx])))
            if written
            else t
        )

    return dataclasses.replace(
        meta,
        traced_tangents_descs=tuple(map(desc, meta.traced_tangents_descs)),
        subclass_inp_meta=(),
        subclass_fw_graph_out_meta=(),
    )


SPLIT = (
    "PyTorch takes the first tangents for those of the inputs whose data was written, in the order of all that changed;"
    " they are of those that need one"
)
SPACE = "PyTorch renumbers positions of outputs and of intermediate bases as if they were positions of inputs"
FORMAT = "PyTorch forgets the layouts of the tangents of written inputs, and numbers the others as before"
CRASH = "PyTorch fails with an IndexError, for one of the first two reasons"


def misaligned(m: Any) -> bool:
    """Whether PyTorch's list of changed inputs does not begin with those that have a tangent, or its count of them is
    another.
    """
    real = [i for i, x in enumerate(from_torch(m).input_info) if x.has_mutation_tangent]
    taken = sum(x.mutates_data for x in m.input_info)
    return taken != len(real) or list(m.mutated_inp_runtime_indices[:taken]) != real


def test_metadata_without_duplicates_is_that_of_the_function_without_duplicates() -> None:
    """Compared with PyTorch's own metadata of the inner function, and with PyTorch's rewrite of the metadata of the
    outer one, with a reason for each difference.
    """
    counts: Counter[str] = Counter()
    for seed in range(3000):
        rng = random.Random(seed)
        p = program(rng)
        if p.kinds[0] in ("number", "expanded"):
            continue
        p = dataclasses.replace(
            p, kinds=(p.kinds[0], *p.kinds[1:], *rng.choice((("again",), ("plain", "again"), ("again", "grown"))))
        )
        args = p.args()
        if attempt(lambda p=p: p.fn(*p.args()))[1] is not None:
            continue
        mask, positions = dedupe(args)
        _, fake = faked(args)
        outer, e = attempt(lambda p=p, fake=fake: upstream_meta(p.fn, fake, p.keep))
        if e is not None:
            continue
        kept = [x for x, k in zip(fake, mask, strict=True) if k]

        def again(*a: Any, p: Program = p, positions: list[int] = positions) -> Any:
            return p.fn(*(a[i] for i in positions))

        inner = from_torch(upstream_meta(again, kept, p.keep))
        ours = analysis.remove_dupe_metadata(from_torch(outer), mask, positions)
        names = [i for i, k in enumerate(mask) if k]
        found = list(differences(renamed(inner, names), ours))
        assert found == [], (seed, p, found)
        counts["programs"] += 1
        counts["with a tangent of an input"] += inner.num_input_tangents > 0
        theirs, e = attempt(
            lambda outer=outer, mask=mask, positions=positions: ioa.remove_dupe_metadata(outer, mask, positions)
        )
        if e is not None:
            space = any(o.output_type.name.startswith("alias_of_intermediate") for o in outer.output_info)
            assert isinstance(e, IndexError) and (space or misaligned(outer)), (seed, e)
            counts[CRASH] += 1
            continue
        for what, i, name in differences(from_torch(theirs), ours):
            o = ours.output_info[i] if what == "output_info" else None
            if name == "base_idx" and o.output_type not in analysis.INPUT_ALIAS_TYPES:
                reason = SPACE
            elif name in ("traced_tangents", "traced_tangents_descs") and misaligned(outer):
                reason = SPLIT
            elif name == "subclass_tangent_meta":
                reason = FORMAT
            else:
                raise AssertionError((seed, p, what, i, name))
            counts[reason] += 1
        if counts["programs"] == 250:
            break
    print(f"{dict(counts)}")
    assert counts["with a tangent of an input"] > 20
    assert counts[SPLIT] and counts[SPACE] + counts[CRASH] and counts[FORMAT], counts


# ---------------------------------------------------------------- bases


TAIL = (
    "PyTorch keeps the tangents behind as many as the inner function has of inputs, not behind as many as the outer"
    " one has"
)
MOVED_INPUT = "PyTorch, up to 2.13, calls an input that only moved a view of itself"
BASES = (
    "PyTorch renumbers positions of outputs and of intermediate bases as if they were positions of inputs, or fails"
    " there"
)


def check_against_the_truth(seed: int, truth: Any, ours: Any, inner_args: Any, fake: Any) -> None:
    """Geometry is compared by value if both have it."""
    skip = {"subclass_inp_meta", "subclass_fw_graph_out_meta", "view_meta_sequence"}
    for what, i, name in differences(truth, ours):
        if name in skip:
            continue
        if name != "output_type" or truth.output_info[i].output_type is not OutputType.alias_of_input:
            raise AssertionError((seed, what, i, name, truth, ours))
        found = ours.output_info[i]
        assert found.output_type is OutputType.is_input and inner_args[found.base_idx] in fake


def check_against_theirs(seed: int, theirs: Any, ours: Any, outer: Any, counts: Counter[str]) -> None:
    """They differ only where PyTorch is wrong (docs/analysis.md)."""
    outs = outer.output_info
    for what, i, name in differences(theirs, ours):
        if name in ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta"):
            before = from_torch(outer).num_input_tangents
            assert before != ours.num_input_tangents or name == "subclass_tangent_meta", (seed, name)
            counts[TAIL] += name == "traced_tangents_descs"
        elif name == "base_idx":
            assert outs[i].output_type.name not in ("is_input", "alias_of_input"), (seed, what, i)
            counts[BASES] += 1
        elif name == "output_type":
            assert outs[i].output_type.name == "is_input" and ours.output_info[i].output_type is OutputType.is_input
            counts[MOVED_INPUT] += 1
        elif name != "view_meta_sequence":
            raise AssertionError((seed, what, i, name))


def test_metadata_with_bases_is_that_of_the_function_of_bases() -> None:
    """The bases are those that PyTorch makes; the truth is its own metadata of the function that takes them and
    rebuilds the views.
    """
    import torch._dynamo as _  # before the next, which it imports  # noqa: F401
    from torch._functorch._aot_autograd.runtime_wrappers import merge_view_inputs

    counts: Counter[str] = Counter()
    for seed in range(120):
        fn, args = base_program(random.Random(seed))
        mode, fake = faked(args)
        outer = upstream_meta(fn, fake)
        descs = [upstream.PlainAOTInput(i) for i in range(len(args))]
        config = type("Config", (), {"aot_autograd_arg_pos_to_source": None})()
        with mode:
            merged, e = attempt(
                functools.partial(merge_view_inputs, config, fake, descs, outer.input_info, is_inference=False)
            )
        if e is not None or merged[2] is None:
            counts["not merged"] += 1
            continue
        inner_args, inner_descs, info = merged

        def inside(*xs: Any, fn: Any = fn, info: Any = info) -> Any:
            return fn(
                *(
                    (
                        xs[i]
                        if isinstance(i, int)
                        else xs[i[0]].as_strided(i[1].shape, i[1].stride(), i[1].storage_offset())
                    )
                    for i in info
                )
            )

        truth = from_torch(upstream_meta(inside, inner_args, descs=inner_descs))
        ours, extra = analysis.create_synthetic_base_metadata(
            from_torch(outer), info, fake, inner_args, [d.parse(repr(x)) for x in inner_descs]
        )
        assert extra == []
        check_against_the_truth(seed, truth, ours, inner_args, fake)
        counts["programs"] += 1
        theirs, e = attempt(
            functools.partial(ioa.create_synthetic_base_metadata, outer, info, fake, inner_args, inner_descs)
        )
        if e is not None:
            counts[BASES] += 1
            continue
        check_against_theirs(seed, from_torch(theirs[0]), ours, outer, counts)
    print(f"seeds 0 to 119: {dict(counts)}")
    assert counts["programs"] > 100 and counts[TAIL] and counts[BASES], counts
    assert bool(counts[MOVED_INPUT]) == (torch.__version__ < (2, 14)), counts


# ---------------------------------------------------------------- holes


#: What the example prints: for each hole how torch's answer and ours begin.
HOLES = {
    "m[0:4, 0:4] and m[2:6, 0:4]": ("set()", "{0, 1}"),
    "a float32 and an int8 view": ("set()", "{0, 1}"),
    "two columns share nothing": ("{0, 1}", "set()"),
    "pairs of blocks of one matrix": ("168 of 464", "0"),
    "a written duplicate without a gradient": (
        "['__output_tangent(output[0])']",
        "['__output_tangent(output[0])', '__output_tangent(output[1])']",
    ),
    "the same before views of two intermediates": ("[0, 0, 0, 0]", "[0, 0, 1, 1]"),
    "two views of one base are written": (
        "['__output_tangent(__input_mutation(args[0]._base))', '__output_tangent(__input_mutation(args[1]))'",
        "['__output_tangent(__input_mutation(args[0]._base))', '__output_tangent(output[0])'",
    ),
    "and what its outputs are": (
        "[('alias_of_intermediate_save_as_output', 0), ('alias_of_intermediate', 0), "
        + ("('alias_of_input', 1)]" if torch.__version__ < (2, 14) else "('is_input', 1)]"),
        "[('alias_of_intermediate_save_as_output', 0), ('alias_of_intermediate', 0), ('is_input', 1)]",
    ),
    "ta[0] of a merged input": ("1.0", "2.0"),
    "guards for f(a, a, b, b)": ("AttributeError: 'list' object has no attribute 'guards_context'", "a layout: None"),
    "with that mended": ("[('a', 'a again'), ('a again', 'b again')]", "[('a', 'a again'), ('b', 'b again')]"),
    "called with another fourth argument": ("AssertionError: At compilation time", "(3, 'apart', 2)"),
    "the gradient of a buffer": ("IndexError", "{'exp': 'm'}"),
    "the loss is the user's output 0": ("neg", "sum_1"),
    "an input that the graph writes by itself": (
        "AssertionError: len(mutations) (1) != num_mutated_inp_runtime_indices (0)",
        "{}",
    ),
    "an input whose geometry alone changed": (
        "AssertionError: len(mutations) (0) != num_mutated_inp_runtime_indices (1)",
        "{'neg': 'arg'}",
    ),
    "squeeze_ that changes nothing": ("True", "False"),
    "a write to a view without elements": ("True", "False"),
    "an input that is read, and then detached in place": ("RuntimeError", "[2.0, 2.0]"),
    "pieces of wrapped arrays": ("no error, and ['args[0]']", "ValueError: input 1 is args[1].a, a piece"),
}


def test_each_hole_of_the_page_is_shown_by_the_example() -> None:
    from kit.support import ROOT, run_python

    done = run_python([str(ROOT / "examples" / "08_upstream_holes.py")])
    first, *lines = done.stdout.splitlines()
    assert first == "torch's answer beside ours" and len(lines) == 3 * len(HOLES)
    for (title, (torchs, ours)), (said, left, right) in zip(
        HOLES.items(), zip(*[iter(lines)] * 3, strict=True), strict=True
    ):
        assert said.startswith(title), (said, title)
        assert left.startswith(f"    torch: {torchs}") and right.startswith(f"    fanin: {ours}"), (left, right)
    page = (ROOT / "docs" / "analysis.md").read_text()
    assert page.count("| confirmed |") == len(HOLES)


def fields_of_programs() -> None:
    compare_programs(range(260))


def kept_grad_mode() -> None:
    try:
        test_a_changed_grad_mode_is_recorded_and_restored()
    finally:
        torch.set_grad_enabled(True)
