"""Where PyTorch's own input and output analysis is wrong, each shown beside ours. Needs torch 2.13 or newer."""

# ruff: noqa: E402
import functools
import types
import warnings

warnings.simplefilter("ignore")  # torch's own
try:
    import torch
except ImportError:
    torch = None
if torch is None or torch.__version__ < (2, 13):
    print(f"torch 2.13 is needed, {'none' if torch is None else torch.__version__} is here: nothing to compare with")
    raise SystemExit(0)

from torch._functorch._aot_autograd import descriptors as up
from torch._functorch._aot_autograd import fx_utils
from torch._functorch._aot_autograd import input_output_analysis as ioa
from torch._functorch._aot_autograd.collect_metadata_analysis import run_functionalized_fw_and_collect_metadata
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from upstream import from_torch

from fanin import analysis
from fanin import descriptors as d
from fanin.analysis.memory import Layout


def say(hole, torchs, ours):
    print(f"{hole}\n    torch: {torchs}\n    fanin: {ours}")


def attempt(call):
    try:
        return call()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e) else ''}"


def fake(args):
    mode = FakeTensorMode()
    return mode, [mode.from_tensor(x) for x in args]


def collect(fn, args, keep=False):
    """PyTorch's metadata of a function, and the fake arguments that it was made with."""
    mode, args = fake(args)
    names = [up.PlainAOTInput(i) for i in range(len(args))]
    with mode:
        return run_functionalized_fw_and_collect_metadata(fn, flat_args_descs=names, keep_input_mutations=keep)(
            *args
        ), args


def tangents(meta):
    return [x.expr() for x in meta.traced_tangents_descs] if not isinstance(meta, str) else meta


def overlap_sets():
    def both(*views):
        return torch._C._dynamo.guards.compute_overlapping_tensors(
            list(views), symbolic=False
        ), analysis.compute_overlapping_inputs(views)

    m = torch.zeros(8, 9)
    say("m[0:4, 0:4] and m[2:6, 0:4] of a 9-wide matrix share 8 elements (rule 6c)", *both(m[0:4, 0:4], m[2:6, 0:4]))
    base = torch.zeros(10)
    say("a float32 and an int8 view share bytes 8 to 32 (units)", *both(base[0:8], base.view(torch.int8)[8:40]))
    say("two columns share nothing (rule 7)", *both(m[:, 0], m[:, 1]))
    counts = {"overlap": [0, 0], "disjoint": [0, 0]}
    blocks = [m[i : i + h, j : j + w] for i in range(0, 8, 2) for j in range(0, 9, 2) for h in (1, 3) for w in (2, 4)]
    for k, x in enumerate(blocks):
        for y in blocks[:k]:
            torchs, ours = both(x, y)
            counts["overlap" if ours else "disjoint"][bool(torchs) == bool(ours)] += 1
    (wrong, right), _ = counts.values()
    say("pairs of blocks of one matrix that overlap, and are called disjoint", f"{wrong} of {wrong + right}", "0")


def duplicates():
    w, x = torch.ones(2), torch.ones(3, requires_grad=True)

    def fn(a, b, x):
        a.mul_(2)
        return [x * 2, x * 3]

    meta, _ = collect(fn, [w, w, x])
    how = [True, False, True], [0, 0, 1]
    theirs = attempt(lambda: tangents(ioa.remove_dupe_metadata(meta, *how)))
    say(
        "a written duplicate without a gradient: which tangents remain of those of two outputs",
        theirs,
        tangents(analysis.remove_dupe_metadata(from_torch(meta), *how)),
    )

    def views(a, b, x):
        a.mul_(2)
        y, z = x * 2, x * 3
        return [y[:1], y[1:], z[:1], z[1:]]

    meta, _ = collect(views, [w, w, x])
    theirs = attempt(lambda: [o.base_idx for o in ioa.remove_dupe_metadata(meta, *how).output_info])
    say(
        "the same before views of two intermediates: which of them each output is a view of",
        theirs,
        [o.base_idx for o in analysis.remove_dupe_metadata(from_torch(meta), *how).output_info],
    )


def bases():
    base = torch.arange(6.0, requires_grad=True) * 1
    a, b, x = base[:4], base[2:], torch.ones(3, requires_grad=True) * 1

    def fn(a, b, x):
        a.mul_(2)
        b.mul_(3)
        y = x * 2
        return [x + 1, y[:1], y[1:], x]

    meta, (a, b, x) = collect(fn, [a, b, x])
    inner, where = [a._base, x], [(0, a), (0, b), 1]
    names = [up.ViewBaseAOTInput(up.PlainAOTInput(0)), up.PlainAOTInput(2)]
    theirs = attempt(lambda: ioa.create_synthetic_base_metadata(meta, where, [a, b, x], inner, names)[0])
    ours = analysis.create_synthetic_base_metadata(
        from_torch(meta), where, [a, b, x], inner, [d.parse(repr(n)) for n in names]
    )[0]
    say("two views of one base are written: the tangents of the function of the base", tangents(theirs), tangents(ours))

    def words(meta):
        return meta if isinstance(meta, str) else [(o.output_type.name, o.base_idx) for o in meta.output_info[1:]]

    say("and what its outputs are: views of an intermediate, and an input that only moved", words(theirs), words(ours))


def regenerated():
    from torch._functorch.aot_autograd import aot_function

    def fn(t0, ta):
        t0.add_(1)
        return ta[0]

    base = torch.arange(4.0)
    args = base[0:3], base[1:4]
    got = attempt(lambda: aot_function(fn, fw_compiler=lambda g, _: g)(*args).item())
    meta, fakes = collect(lambda *x: [fn(*x)], [base[0:3], base[1:4]])
    inner, new = [fakes[0]._base], torch.arange(4.0)
    new[0:3] += 1  # the graph's write into the base
    ours, _ = analysis.create_synthetic_base_metadata(
        from_torch(meta), [(0, fakes[0]), (0, fakes[1])], fakes, inner, [d.ViewBaseAOTInput(d.PlainAOTInput(0))]
    )
    way = ours.output_info[0].view_meta_sequence
    say(
        "ta[0] of a merged input, which is element 1 of the base, now 2.0",
        got,
        new.as_strided(way.metadata.size, way.metadata.stride, way.metadata.storage_offset).item(),
    )


class Names(list):
    """Names of arguments, which bear what PyTorch takes them for: so that it gets one line further."""

    def __init__(self, every):
        super().__init__(every)
        self.guards_context = types.SimpleNamespace(aotautograd_guards=[])


def guards():
    import torch._dynamo  # before the next, which it imports
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDedupeWrapper
    from torch._functorch.aot_autograd import aot_function
    from torch._guards import Source, TracingContext, tracing

    def fn(a, b, c, e):
        a.mul_(2)
        c.mul_(3)
        return [a + c]

    class Named(Source):
        def __init__(self, name):
            object.__setattr__(self, "word", name)

        __eq__, __hash__ = object.__eq__, object.__hash__

    a, b = torch.ones(2), torch.ones(2)
    meta, fakes = collect(fn, [a, a, b, b])
    words = ["a", "a again", "b", "b again"]

    def specialise(sources):
        config = types.SimpleNamespace(is_export=False, aot_autograd_arg_pos_to_source=sources, static_input_indices=[])
        wrapper = AOTDedupeWrapper()
        with tracing(TracingContext(fakes[0].fake_mode)):
            wrapper.pre_compile(fn, fakes, [up.PlainAOTInput(i) for i in range(4)], config, fw_metadata=meta)
        return wrapper

    layout = Layout([a, a, b, b])
    said = f"a layout: {layout.check([a, a, b, b])} for the same arguments"
    say("guards for f(a, a, b, b), traced with names of its arguments", attempt(lambda: specialise(words)), said)
    names = Names(map(Named, words))
    wrapper = specialise(names)
    theirs = [(g.input_source_a.word, g.input_source_b.word) for g in names.guards_context.aotautograd_guards]
    kept = [i for i, keep in enumerate(wrapper.keep_arg_mask) if keep]
    ours = [(words[kept[to]], words[i]) for i, to in enumerate(wrapper.add_dupe_map) if i not in kept]
    say("with that mended: the pairs that are guarded to be one", theirs, ours)
    compiled = aot_function(lambda *x: fn(*x), fw_compiler=lambda g, _: g)
    compiled(a, a, b, b)
    said = attempt(lambda: compiled(a, a, b, torch.zeros(2)))
    say(
        "called with another fourth argument: what it should have duplicated",
        said,
        layout.check([a, a, b, torch.zeros(2)]),
    )


def signature(graph, meta, upstream=False, **how):
    asked = {
        "user_args_flat": [],
        "params_and_buffers_flat": [],
        "param_names": [],
        "buffer_names": [],
        "trace_joint": False,
    }
    asked |= {"num_user_fw_outs": None, "loss_index": None, **how}
    if upstream:
        return attempt(functools.partial(ioa.create_graph_signature, graph, meta, None, None, **asked))
    return analysis.create_graph_signature(graph, from_torch(meta), **asked)


def graph_of(names, operations):
    """A graph that takes these and returns these operations on the first."""
    graph = torch.fx.Graph()
    first, *_ = [graph.placeholder(name) for name in names]
    graph.output([graph.call_function(op, (first,)) for op in operations])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def signatures():
    def fn(w, m, arg):
        arg.mul_(2)
        return [(w * m).sum()]

    graph = graph_of(("w", "m", "arg"), (torch.neg, torch.sum, torch.abs, torch.exp))
    args = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)]
    meta, _ = collect(fn, args)
    how = {"user_args_flat": args[2:], "params_and_buffers_flat": args[:2], "trace_joint": True}
    how |= {"num_user_fw_outs": 1, "loss_index": 0}
    one, two = {"param_names": ["w"], "buffer_names": ["m"]}, {"param_names": ["w", "m"]}
    say(
        "the gradient of a buffer",
        signature(graph, meta, True, **how, **one),
        signature(graph, meta, **how, **one).backward_signature.gradients_to_buffers,
    )
    said = [signature(graph, meta, of, **how, **two).backward_signature.loss_output for of in (True, False)]
    say("the loss is the user's output 0, behind one new value", *said)
    meta, _ = collect(lambda a: [a.mul_(2)], [torch.ones(2, 3)], keep=True)
    graph = graph_of(("arg",), (torch.neg,))
    say(
        "an input that the graph writes by itself is no output",
        signature(graph, meta, True),
        signature(graph, meta).user_inputs_to_mutate,
    )
    meta, _ = collect(lambda a: [a.t_()], [torch.ones(2, 3)])
    graph = graph_of(("arg",), (torch.neg, torch.abs))
    say(
        "an input whose geometry alone changed is an output",
        signature(graph, meta, True),
        signature(graph, meta).user_inputs_to_mutate,
    )


def geometry():
    def fn(x):
        x.mul_(2)
        x.squeeze_()
        return []

    x = torch.ones(4, 3)[1:]  # it begins at offset 3, and has no axis to squeeze
    theirs, _ = collect(fn, [x])
    say(
        "squeeze_ that changes nothing, after a write: whether the geometry changed",
        theirs.input_info[0].mutates_metadata,
        analysis.collect_metadata(fn, [x]).input_info[0].mutates_metadata,
    )

    def empty(x):
        x[3:].mul_(2)
        return []

    theirs, _ = collect(empty, [torch.ones(3)])
    say(
        "a write to a view without elements: whether data was written",
        theirs.input_info[0].mutates_data,
        analysis.collect_metadata(empty, [torch.ones(3)]).input_info[0].mutates_data,
    )


def detached():
    def fn(x):
        y = x * 2
        x.detach_()
        return [y]

    def gradient(run):
        x = torch.ones(2, requires_grad=True)
        return attempt(lambda: torch.autograd.grad(run(x * 1)[0].sum(), x)[0].tolist())

    say(
        "an input that is read, and then detached in place: its gradient",
        gradient(aot_function(fn, fw_compiler=lambda graph, _: graph)),
        gradient(analysis.functionalize(fn)),
    )


def pieces():
    inputs = [d.PlainAOTInput(0), d.SubclassGetAttrAOTInput(d.PlainAOTInput(1), "a")]
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["desc"], y.meta["desc"] = up.PlainAOTInput(0), up.SubclassGetAttrAOTInput(up.PlainAOTInput(1), "a")
    graph.output([x]).meta["desc"] = [up.PlainAOTOutput(0)]
    theirs = [k.expr() for k in fx_utils.get_all_input_and_grad_nodes(graph)]
    ours = attempt(lambda: d.inputs_and_grads(inputs, [d.PlainAOTOutput(0)]))
    say("pieces of wrapped arrays are to be refused where gradients are looked for", f"no error, and {theirs}", ours)


print("torch's answer beside ours")
for demonstrate in (overlap_sets, duplicates, bases, regenerated, guards, signatures, geometry, detached, pieces):
    demonstrate()
