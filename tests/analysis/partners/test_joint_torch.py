"""The joint function beside PyTorch's own: the inputs and outputs of a function together with its backward, slot by
slot; where the two differ, the tests have the reasons, and count them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fanin import analysis
from fanin.analysis import JointSignature, ViewAndMutationMeta, records
from fanin.descriptors import PlainAOTInput, parse

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.__version__ < (2, 13):
    pytest.skip(f"compared with torch 2.13 and newer, this is {torch.__version__}", allow_module_level=True)

from torch._functorch.aot_autograd import aot_export_joint_with_descriptors, aot_export_module  # noqa: E402

from fanin.analysis import tensors  # noqa: E402
from kit.programs_torch import GEOMETRY, Program, base_program, dedupe, program  # noqa: E402
from kit.pymutants import Mutant, survivors  # noqa: E402
from kit.support import ROOT  # noqa: E402

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


class Module(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


@dataclass(frozen=True)
class Upstream:
    """What PyTorch makes of a function: names of slots as `repr` of descriptors, geometry of tangents."""

    inputs: list[str]
    returned: list[str]
    tangents: list[tuple[tuple[int, ...], Any]]


def upstream_joint(fn: Callable[..., Any], args: list[Any]) -> Upstream:
    """PyTorch's joint graph of a function."""
    with contextlib.ExitStack() as stack:
        made = aot_export_joint_with_descriptors(stack, Module(fn), tuple(args))
        nodes = list(made.graph_module.graph.nodes)
        taken = [n for n in nodes if n.op == "placeholder"]
        tangents = [n.meta["val"] for n in taken if type(n.meta["desc"]).__name__ == "TangentAOTInput"]
        return Upstream(
            [repr(n.meta["desc"]) for n in taken],
            [repr(x) for x in nodes[-1].meta["desc"]],
            [(tuple(t.shape), t.dtype) for t in tangents],
        )


def flags_of(args: list[Any]) -> list[bool]:
    return [isinstance(x, torch.Tensor) and x.requires_grad for x in args]


def our_joint(fn: Callable[..., Any], args: list[Any]) -> tuple[ViewAndMutationMeta, JointSignature]:
    """Ours. Where an array is given twice and written, PyTorch takes it once; where it is not written, twice."""
    flags = flags_of(args)
    meta, kept, _ = without_duplicates(fn, args)
    descs = [PlainAOTInput(i) for i in kept]
    return meta, records.create_joint_signature(meta, [flags[i] for i in kept], descs)


def without_duplicates(fn: Callable[..., Any], args: list[Any]) -> tuple[ViewAndMutationMeta, list[int], list[int]]:
    """Metadata, the arguments that are kept, and for each argument its position among these."""
    meta = analysis.collect_metadata(fn, args)
    mask, places = dedupe(args)
    twice = [info for info, kept in zip(meta.input_info, mask, strict=True) if not kept]
    if not any(info.mutates_data or info.mutates_metadata for info in twice):
        everything = list(range(len(args)))
        return meta, everything, everything
    kept = [i for i, keep in enumerate(mask) if keep]
    return analysis.remove_dupe_metadata(meta, mask, places), kept, places


def joint_differences(theirs: Upstream, ours: JointSignature, meta: ViewAndMutationMeta) -> list[str]:
    """The fields that differ."""
    tangents = [(t.shape, t.dtype) for t in meta.traced_tangents] if ours.tangents else []
    pairs = {
        "inputs": (theirs.inputs, [repr(x) for x in ours.inputs]),
        "returned": (theirs.returned, [repr(x) for x in ours.returned]),
        "tangents": (theirs.tangents, tangents),
    }
    return [name for name, (one, other) in pairs.items() if one != other]


RAISES = "the function itself raises, and PyTorch's joint of it does not, or raises something else"
BACKWARD = "the function's own backward raises as PyTorch's joint does"
DUPLICATE = "PyTorch fails on the metadata of a function of which a written argument is given twice"
STAND_IN = "PyTorch's stand-in of an input that a function moves in place has a geometry that the input never has"


def natively(p: Program) -> Exception | None:
    """What the function, or its backward, raises by itself."""
    args = p.args()
    try:
        outs = [o for o in tensors.leaves(p.fn(*args)) if isinstance(o, torch.Tensor)]
        ends = [t for t in (*outs, *[x for x in args if isinstance(x, torch.Tensor)]) if t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except Exception as e:
        return e
    return None


def reason_of(p: Program, their_error: Exception | None, our_error: Exception | None) -> str:
    """Why one of the two raises, or both do."""
    if our_error is not None:
        with pytest.raises(type(our_error)) as plain:
            p.fn(*p.args())
        assert str(plain.value) == str(our_error)  # nothing but the function's own
        return "both" if str(their_error) == str(our_error) else RAISES
    if natively(p) is not None:
        return BACKWARD
    if isinstance(their_error, (IndexError, AssertionError)):
        assert "again" in p.kinds, (p, their_error)
        return DUPLICATE
    assert any(step.removeprefix("no_grad ") in GEOMETRY for step, *_ in p.steps), (p, their_error)
    return STAND_IN


def compare_joints(seeds: range) -> Counter[str]:
    """Counts of what was compared, and of why something raised."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        p = program(random.Random(seed), gradients=True)
        theirs: Any = None
        ours: Any = None
        their_error: Exception | None = None
        our_error: Exception | None = None
        try:
            theirs = upstream_joint(p.fn, p.args())
        except Exception as e:
            their_error = e
        try:
            meta, ours = our_joint(p.fn, p.args())
        except Exception as e:
            our_error = e
        counts["programs"] += 1
        if their_error is not None or our_error is not None:
            counts[reason_of(p, their_error, our_error)] += 1
            continue
        found = joint_differences(theirs, ours, meta)
        assert not found, (seed, p, found, theirs, ours)
        counts["compared"] += 1
        counts["slots"] += len(ours.inputs) + len(ours.returned)
        counts["with a backward"] += bool(ours.gradients)
        counts["tangents of new values"] += sum("InputMutation" in repr(t) for t in ours.tangents)
        counts["tangents of bases"] += sum("IntermediateBase" in repr(t) for t in ours.tangents)
        counts["tangents of outputs"] += sum("output=PlainAOTOutput" in repr(t) for t in ours.tangents)
        counts["primals without a gradient"] += sum(g is None for g in ours.gradients)
    return counts


def test_the_joint_function_takes_and_returns_what_pytorchs_does() -> None:
    counts = compare_joints(range(250))
    print(f"seeds 0 to 249: {dict(counts)}")
    assert counts["compared"] > 180 and counts["with a backward"] > 100
    for what in ("new values", "bases", "outputs"):
        assert counts[f"tangents of {what}"] > 10, what
    assert counts["primals without a gradient"] > 10


@pytest.mark.slow
def test_the_joint_function_of_many_programs_is_pytorchs() -> None:
    counts = compare_joints(range(20_000, 24_000))
    print(f"seeds 20000 to 23999: {dict(counts)}")
    assert counts["compared"] > 3000 and counts["with a backward"] > 1500


# Bases in the place of views

TAIL = (
    "PyTorch fails: it keeps the tangents behind as many as the inner function has of inputs, not behind as many as the"
    " outer one has"
)
SPLIT = "PyTorch fails: it loses the tangent of an output where a written duplicate goes"
GONE = "PyTorch, for the second reason, has a tangent of a duplicate that is gone in the place of an output's"


@dataclass(frozen=True)
class Based:
    """What runs inside: a function of bases, its arguments, what they are, and its metadata, made of the outer one."""

    fn: Callable[..., Any]
    args: list[Any]
    descs: list[Any]
    meta: ViewAndMutationMeta
    #: whether PyTorch's rewriting of the outer metadata keeps other tangents
    duplicate: bool
    fewer_tangents: bool


def with_bases(fn: Callable[..., Any], args: list[Any]) -> Based | None:
    """Without duplicates that are written, and with the bases that PyTorch makes; None: it makes none."""
    import torch._dynamo as _  # before the next, which it imports  # noqa: F401
    from torch._functorch._aot_autograd import descriptors as upstream
    from torch._functorch._aot_autograd.runtime_wrappers import merge_view_inputs

    meta, kept, places = without_duplicates(fn, args)
    given = [args[i] for i in kept]
    config = type("Config", (), {"aot_autograd_arg_pos_to_source": None})()
    names = [upstream.PlainAOTInput(i) for i in kept]
    inner, descs, info = merge_view_inputs(config, given, names, meta.input_info, is_inference=False)
    if info is None:
        return None

    def inside(*xs: Any) -> Any:
        views = [
            xs[i] if isinstance(i, int) else xs[i[0]].as_strided(i[1].shape, i[1].stride(), i[1].storage_offset())
            for i in info
        ]
        return fn(*(views[i] for i in places))

    ours = [parse(repr(x)) for x in descs]
    based, extra = analysis.create_synthetic_base_metadata(meta, info, given, inner, ours)
    assert extra == []
    fewer = based.num_input_tangents != meta.num_input_tangents
    return Based(inside, inner, ours, based, len(kept) < len(args), fewer)


def named(joint: Upstream, descs: list[Any]) -> Upstream:
    """The joint of an inner function, with its inputs called what they are."""

    def rename(text: str) -> str:
        return re.sub(r"PlainAOTInput\(idx=(\d+)\)", lambda m: repr(descs[int(m[1])]), text)

    return Upstream([rename(x) for x in joint.inputs], [rename(x) for x in joint.returned], joint.tangents)


def with_duplicate(rng: random.Random) -> tuple[Callable[..., Any], list[Any]]:
    """A function of views of one base, with one of its arguments given twice in half of the programs."""
    fn, args = base_program(rng)
    if rng.random() < 0.5:
        return fn, args
    again, writes = rng.randrange(len(args)), rng.random() < 0.5

    def twice(*xs: Any) -> Any:
        if writes:
            xs[-1].add_(1)
        return [*fn(*xs[:-1]), xs[-1] * 2]

    return twice, [*args, args[again]]


def compare_bases(seeds: range) -> Counter[str]:
    """The joint of what runs inside, by the metadata that was made of the outer one, is PyTorch's joint of what runs
    inside; and PyTorch's joint of the outer function, where it has one.
    """
    counts: Counter[str] = Counter()
    for seed in seeds:
        based = with_bases(*with_duplicate(random.Random(seed)))
        if based is None:
            counts["nothing merged"] += 1
            continue
        ours = records.create_joint_signature(based.meta, flags_of(based.args), based.descs)
        theirs = named(upstream_joint(based.fn, based.args), based.descs)
        assert joint_differences(theirs, ours, based.meta) == [], (seed, theirs, ours)
        counts["compared"] += 1
        counts["slots"] += len(ours.inputs) + len(ours.returned)
        counts["with a backward"] += bool(ours.gradients)
        counts["a duplicate less"] += based.duplicate
        counts["tangents of bases"] += sum("ViewBaseAOTInput" in repr(t) for t in ours.tangents)
        counts["gradients of bases"] += sum("ViewBaseAOTInput" in repr(g) for g in ours.gradients)
        try:
            whole = upstream_joint(*with_duplicate(random.Random(seed)))
        except (AssertionError, IndexError, RuntimeError) as e:
            assert based.fewer_tangents or based.duplicate, (seed, e)
            counts[TAIL if based.fewer_tangents else SPLIT] += 1
            continue
        if joint_differences(whole, ours, based.meta):
            assert based.duplicate, (seed, whole, ours)
            assert whole.returned == theirs.returned and set(whole.inputs) - set(theirs.inputs), (seed, whole, theirs)
            counts[GONE] += 1
            continue
        counts["compared with the outer function's"] += 1
    return counts


def test_the_joint_function_of_bases_is_pytorchs() -> None:
    counts = compare_bases(range(25))
    print(f"seeds 0 to 24: {dict(counts)}")
    assert counts["compared"] > 20 and counts["with a backward"] > 15 and counts["a duplicate less"] > 3
    assert counts["compared with the outer function's"] > 5 and counts[TAIL] > 3
    assert counts["tangents of bases"] > 8 and counts["gradients of bases"] > 8


@pytest.mark.slow
def test_the_joint_function_of_bases_of_many_programs_is_pytorchs() -> None:
    counts = compare_bases(range(1000, 1600))
    print(f"seeds 1000 to 1599: {dict(counts)}")
    assert counts["compared"] > 500 and counts["with a backward"] > 300


def leaf() -> Any:
    return torch.ones(3, requires_grad=True)


def grown() -> Any:
    return leaf() * 1


def plain() -> Any:
    return torch.ones(3)


def quiet_write(x: Any) -> Any:
    with torch.no_grad():
        return x.mul_(2)


CASES: dict[str, tuple[Callable[..., Any], list[Callable[[], Any]]]] = {
    "requires_grad_": (lambda x, w: [x.requires_grad_() * w], [plain, leaf]),
    "requires_grad_, nobody else asks": (lambda x: [x.requires_grad_() * 2], [plain]),
    "requires_grad_ of what was written": (lambda x, w: [x.mul_(2).requires_grad_() * w], [plain, leaf]),
    "requires_grad_ of what was moved": (lambda x, w: [x.unsqueeze_(0).requires_grad_() * w], [plain, leaf]),
    "plain, written by a leaf": (lambda x, w: [x.mul_(w)], [plain, leaf]),
    "nothing is returned": (lambda x, w: [x.mul_(w)][1:], [plain, leaf]),
    "written under no_grad, nothing is returned": (lambda x, w: [quiet_write(x)][1:], [grown, leaf]),
    "written under no_grad": (lambda x, w: [quiet_write(x) * w], [grown, leaf]),
    "written through detach": (lambda x: [x.detach().mul_(2)][1:], [grown]),
    "a detached output": (lambda x: [x.detach()], [leaf]),
    "a view alone": (lambda x: [x[1:]], [leaf]),
    "a view and a new value": (lambda x, w: [x[1:], w.detach() * 2], [leaf, leaf]),
    "moved alone": (lambda x: [x.unsqueeze_(0)], [grown]),
    "moved and read": (lambda x: [x.unsqueeze_(0) * 2], [grown]),
    "outputs of all sorts": (lambda x: [x * 2, x > 0, 5, None], [leaf]),
    "integers": (lambda x, i: [x * i, i + 1], [leaf, lambda: torch.arange(3)]),
    "an argument that is not read": (lambda x, w: [x * 2], [leaf, leaf]),
    "pieces of one": (lambda x: list((x * 2).unbind()), [leaf]),
    "complex numbers": (
        lambda x: [torch.view_as_real(x * 2)],
        [lambda: torch.ones(3, dtype=torch.complex64, requires_grad=True)],
    ),
    "a twin": (lambda x: [y := x * 2, y.detach()], [leaf]),
    "expanded": (lambda x: [(x * 2).expand(4, 3)], [leaf]),
    "no gradient asked for": (lambda x: [x + 1], [plain]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_joint_function_of_a_case_is_pytorchs(name: str) -> None:
    fn, make = CASES[name]
    theirs = upstream_joint(fn, [m() for m in make])
    meta, ours = our_joint(fn, [m() for m in make])
    assert joint_differences(theirs, ours, meta) == []


def test_an_input_that_is_read_and_then_detached_in_place_has_a_gradient() -> None:
    """PyTorch checks it after the run, and loses the gradient that the function itself gives."""

    def fn(x: Any, w: Any) -> Any:
        y = x * 2 + w
        x.detach_()
        return [y]

    x, w = leaf(), leaf()
    assert [g.tolist() for g in torch.autograd.grad(fn(x * 1, w)[0].sum(), (x, w))] == [[2] * 3, [1] * 3]
    theirs, (_, ours) = upstream_joint(fn, [grown(), leaf()]), our_joint(fn, [grown(), leaf()])
    assert theirs.inputs == [repr(d) for d in ours.inputs]
    assert [str(g) for g in ours.gradients] == ["__grad(args[0])", "__grad(args[1])"]
    assert theirs.returned[1:] == ["None", repr(ours.gradients[1])]


def test_the_comparison_finds_a_planted_difference() -> None:
    fn, make = CASES["plain, written by a leaf"]
    theirs = upstream_joint(fn, [m() for m in make])
    meta, ours = our_joint(fn, [m() for m in make])
    assert "inputs" in joint_differences(theirs, dataclasses.replace(ours, tangents=()), meta)
    assert "returned" in joint_differences(theirs, dataclasses.replace(ours, gradients=ours.gradients[::-1]), meta)
    assert "returned" in joint_differences(theirs, dataclasses.replace(ours, outputs=ours.outputs[1:]), meta)
    other = dataclasses.replace(meta.traced_tangents[0], shape=(4,))
    changed = dataclasses.replace(meta, traced_tangents=(other, *meta.traced_tangents[1:]))
    assert joint_differences(theirs, ours, changed) == ["tangents"]


# Signatures of exported joint graphs


class ProgramModule(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A program of which the leaves are parameters, some of the other arguments buffers; its loss, and all that it
    returns, detached.
    """

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.p, self.user, self.places = p, [], []
        for n, (kind, x) in enumerate(zip(p.kinds, p.args(), strict=True)):
            if kind == "leaf":
                self.register_parameter(f"w{n}", torch.nn.Parameter(x.detach()))
            elif kind == "plain" and n % 2:
                self.register_buffer(f"b{n}", x)
            else:
                self.places.append(n)
                self.user.append(x)

    def forward(self, *user: Any) -> list[Any]:
        given = dict(zip(self.places, user, strict=True))
        stored = {int(name[1:]): x for name, x in (*self.named_parameters(), *self.named_buffers())}
        outs = tensors.leaves(self.p.fn(*[x for _, x in sorted({**stored, **given}.items())]))
        found = [o for o in outs if isinstance(o, torch.Tensor)]
        ends = [o.double().sum() for o in found if o.requires_grad]
        return [sum(ends, torch.zeros((), dtype=torch.float64)), *[o.detach() + 0 for o in found]]


def compare_exported(seeds: range) -> Counter[str]:
    """Field by field the signatures of joint graphs that PyTorch exports, made of its graph and our metadata."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        p = program(rng, gradients=True)
        p = dataclasses.replace(p, kinds=("leaf", *[k for k in p.kinds[1:] if k not in ("again", "number")]))
        m = ProgramModule(p)
        counts["programs"] += 1
        try:
            graph, theirs = aot_export_module(m, m.user, trace_joint=True, output_loss_index=0)
        except Exception:
            counts["refused"] += 1  # written parameters, moved inputs, parameters without a gradient, no loss
            continue
        stored = {**dict(m.named_parameters()), **dict(m.named_buffers())}

        def fn(*xs: Any, m: Any = m, stored: Any = stored) -> Any:
            return torch.func.functional_call(m, dict(zip(stored, xs, strict=False)), xs[len(stored) :])

        meta = analysis.collect_metadata(fn, [*stored.values(), *m.user])
        ours = analysis.create_graph_signature(
            graph,
            meta,
            user_args_flat=m.user,
            params_and_buffers_flat=list(stored.values()),
            param_names=[name for name, _ in m.named_parameters()],
            buffer_names=[name for name, _ in m.named_buffers()],
            trace_joint=True,
            num_user_fw_outs=meta.num_outputs,
            loss_index=0,
        )
        counts["compared"] += 1
        for field in dataclasses.fields(theirs):
            one, other = getattr(theirs, field.name), getattr(ours, field.name)
            if field.name in ("in_spec", "out_spec"):
                continue
            counts["fields"] += 1
            if field.name != "backward_signature":
                assert (tuple(one) if isinstance(one, list) else one) == other, (seed, field.name, one, other)
                continue
            assert one.gradients_to_parameters == other.gradients_to_parameters, seed
            assert one.gradients_to_user_inputs == other.gradients_to_user_inputs, seed
            counts["gradients"] += len(one.gradients_to_parameters) + len(one.gradients_to_user_inputs)
            if one.loss_output != other.loss_output:  # PyTorch adds no offset: it takes a new value for the loss
                assert ours.buffers_to_mutate or ours.user_inputs_to_mutate, seed
                assert other.loss_output == theirs.user_outputs[0]
                counts["losses behind new values"] += 1
    return counts


def test_signatures_of_exported_joint_graphs_are_pytorchs_field_by_field() -> None:
    counts = compare_exported(range(90))
    print(f"seeds 0 to 89: {dict(counts)}")
    assert counts["compared"] > 25 and counts["losses behind new values"] and counts["gradients"] > 30


def test_the_example_of_the_page_prints_its_output() -> None:
    page = (ROOT / "docs" / "analysis.md").read_text().partition("`create_joint_signature(meta, requires_grad)`")[2]
    code, printed = page.partition("```python\n")[2].split("```\n")[:3:2]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue() == printed


# Planted faults


def fault(old: str, new: str) -> Mutant:
    return Mutant("fanin.analysis.records", old, new, ("fanin.analysis.collect", "fanin.analysis.tensors"))


MUTANTS = [
    fault("    if not any(requires_grad) or not has_backward(meta):", "    if not has_backward(meta):"),
    fault("    if not any(requires_grad) or not has_backward(meta):", "    if not any(requires_grad):"),
    fault("before or (info.requires_grad and", "(info.requires_grad and"),
    fault("info.mutation_type is MutationType.NOT_MUTATED)", "True)"),
    fault("before or (info.requires_grad and info.mutation_type is MutationType.NOT_MUTATED)", "before"),
    fault("        and not info.mutations_under_no_grad_or_inference_mode\n", ""),
    fault("o.output_type in INPUT_ALIAS_TYPES and o.base_idx is not None and requiring[o.base_idx]", "False"),
    fault("if o.output_type is OutputType.alias_of_intermediate_save_as_output", "if False"),
]


def every_case() -> None:
    for name in CASES:
        test_the_joint_function_of_a_case_is_pytorchs(name)


def programs() -> None:
    compare_joints(range(30))


def bases() -> None:
    compare_bases(range(15))


CHECKS = [every_case, programs, bases]


def test_planted_faults_are_noticed_a_sample() -> None:
    assert survivors([MUTANTS[1]], CHECKS) == []


@pytest.mark.slow
def test_every_planted_fault_is_noticed() -> None:
    assert survivors(MUTANTS, CHECKS) == []
