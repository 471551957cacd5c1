"""Wrong arguments for every public call, and what is wrong with the errors that they get.

Each call of `CALLS` is made once as it should be, and then with too many arguments, with an unknown name, and with each
thing of `JUNK` in the place of each parameter. `faults` returns a sentence for each error that is not ours: of another
type, with the text of NumPy or Python, with an internal name, without the name of the call or of the argument; and for
each call that takes what its annotation does not allow.
"""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fanin
from fanin import analysis, descriptors, dist, tape
from fanin.dist.group import Group
from fanin.dist.threads import ThreadEngine, World
from fanin.sim import Machine
from kit import fuzz

G = np.ones(2)

#: What is wrong nearly everywhere, and the words of an annotation that allow it.
JUNK: tuple[tuple[str, Any, str], ...] = (
    ("None", None, r"None|object|Any\b|Edge\b|DTypeLike|TimeLimit"),
    ("a string", "no", r"\bstr\b|object|Any\b|DTypeLike|PathLike|Hashable"),
    ("an object", object(), r"object|Any\b"),
    ("nan", float("nan"), r"float|complex|object|Any\b|_A\b|ArrayLike|Axis"),
    ("-1", -1, r"\bint\b|SupportsIndex|float|complex|object|Any\b|_A\b|ArrayLike|Axis"),
    ("an array of objects", np.array([object(), None]), r"object|Any\b"),
)
LAWFUL = (TypeError, ValueError, IndexError, OverflowError, BufferError, RuntimeError, KeyError)
#: Texts of NumPy, and texts of Python about a kind or a value, which name neither the call nor what it expects.
OF_NUMPY = re.compile(
    r"only integer scalar arrays|only integers, slices|only length-1 arrays|truth value of an array|ufunc"
    r"|data type .* not understood"
    r"|[Cc]annot interpret|could not be broadcast|could not broadcast|inhomogeneous|setting an array element"
    r"|could not convert|Cannot cast|too small depth|unhashable type: 'numpy|iteration over a 0-d|zero-dimensional"
)
OF_PYTHON = re.compile(
    r"object is not (iterable|callable|subscriptable|reversible)|has no attribute|has no len\(\)|not supported between"
    r"|unsupported operand|must be real number|argument of type|cannot be interpreted as an integer|unhashable type"
    r"|is not a mapping|must be (str|an integer)|expected str, bytes|cannot unpack|not enough values|too many values"
    r"|cannot convert float NaN|bad operand type|invalid literal|cannot create weak reference|object cannot be"
)
#: A name with an underscore before it, but special methods; a name of the C core.
INTERNAL = re.compile(r"(?<![\w.])_(?!_)\w+|\b_core\b|\bfan__?[a-z]\w*|\._[a-z]\w*")
#: Python's text for a wrong number of arguments or an unknown name.
NUMBER = re.compile(r"takes|unexpected keyword|has no argument|missing \d|needs '|got .* by position|multiple values")


@dataclass(frozen=True)
class Call:
    """A call as it should be. annotations: of its parameters; optional: parameters that may be left out."""

    name: str
    fn: Callable[..., Any]
    valid: Mapping[str, Any]
    annotations: Mapping[str, str]
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict)

    def arguments(self, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        named = {}
        for name, value in given.items():
            kind = self.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                args += [value]
            elif kind is inspect.Parameter.POSITIONAL_ONLY or (
                any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in self.parameters.values())
                and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            ):
                args.append(value)
            else:
                named[name] = value
        return args, named


def annotations_of(entries: Mapping[str, fuzz.Entry]) -> dict[str, dict[str, str]]:
    """The annotations of every call of the core, as core.pyi has them, by "Class.method" or "fanin.function"."""
    return {name: {p[0]: p[2] for p in entry.parameters} for name, entry in entries.items()}


def call_of(name: str, fn: Callable[..., Any], valid: Mapping[str, Any], known: Mapping[str, dict[str, str]]) -> Call:
    signature = inspect.signature(fn)
    parameters = {p.name: p for p in signature.parameters.values() if p.name != "self"}
    said = {n: str(p.annotation) for n, p in parameters.items() if p.annotation is not p.empty}
    stub = known.get(name) or known.get(f"{name}.__init__") or known.get(f"fanin.{name}") or {}
    return Call(name, fn, valid, {**stub, **said}, parameters)


class Checked:
    """Judges the errors of one call."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.words = [w for w in re.split(r"\W+", call.name) if w]

    def of_error(self, what: str, e: BaseException, number: bool) -> Iterator[str]:
        text = str(e)
        where = f"{self.call.name}: {what}: {type(e).__name__}: {text}"
        if isinstance(e, FileNotFoundError) and self.call.name == "compare" and "'no'" in text:
            return  # a text is the path of a file
        if not isinstance(e, (*LAWFUL, fanin.PeerError)) or isinstance(e, NotImplementedError):
            yield f"{where}: of no lawful type"
            return
        last = traceback.extract_tb(e.__traceback__)[-1].filename
        if "/numpy/" in last or OF_NUMPY.search(text):
            yield f"{where}: NumPy's text"
        elif INTERNAL.search(text):
            yield f"{where}: an internal name"
        elif number and not (NUMBER.search(text) and any(w in text for w in self.words)):
            yield f"{where}: does not say which call has too many or unknown arguments"
        elif not number and (OF_PYTHON.search(text) or not self.names(text)):
            yield f"{where}: Python's text, or it names neither the call nor an argument"

    def names(self, text: str) -> bool:
        """Whether a text names the call, its class or an argument."""
        known = [*self.words, *self.call.parameters]
        return any(re.search(rf"\b{re.escape(w.removesuffix('s'))}(s|es)?\b", text) for w in known)


def attempts(call: Call) -> Iterator[tuple[str, str | None, list[Any], dict[str, Any], bool]]:
    """What, the words of an annotation that allow it (None: nothing does), arguments, and whether it is about their
    number or names.
    """
    args, named = call.arguments(call.valid)
    if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in call.parameters.values()):
        yield "too many", None, [*args, *[None] * (len(call.parameters) + 2 - len(args))], {}, True
        yield "an unknown name", None, args, {**named, "no_such_name": 1}, True
    for name, p in call.parameters.items():
        if p.kind is p.VAR_KEYWORD:
            continue
        for word, junk, allowed in JUNK:
            if p.default is None and junk is None:
                continue
            given = {n: call.valid[n] for n in call.parameters if n in call.valid and n != name}
            ordered = {n: (junk if n == name else given[n]) for n in call.parameters if n == name or n in given}
            yield f"{word} as {name}", allowed, *call.arguments(ordered), False


def faults(make: Callable[[], Call]) -> list[str]:
    """A sentence for each error of a call that is not as it should be."""
    found: list[str] = []
    call = make()
    args, named = call.arguments(call.valid)
    call.fn(*args, **named)
    for i, _ in enumerate(list(attempts(make()))):
        call = make()
        what, allowed, args, named, number = list(attempts(call))[i]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = call.fn(*args, **named)
                if inspect.isgenerator(result) or type(result).__name__ == "_GeneratorContextManager":
                    with result:
                        pass
        except Exception as e:
            found += Checked(call).of_error(what, e, number)
        else:
            annotation = call.annotations.get(what.rpartition(" as ")[2], "object") if allowed else ""
            if not allowed or not re.search(allowed, annotation):
                found.append(f"{call.name}: {what} is taken, though the annotation is {annotation}: {result!r:.60}")
    return found


def calls(m: Machine, torch: bool = False) -> dict[str, Callable[[], Call]]:
    """Each public call with arguments as they should be, made anew by each function.

    m: a machine that is entered. torch: those of fanin.torch alone.
    """
    known = annotations_of(fuzz.entries())
    s, x = m.stream(), m.array(G)
    made: dict[str, Callable[[], Call]] = {}

    def add(called: str, get: Callable[[], Callable[..., Any]], /, **valid: Any) -> None:
        made[called] = lambda: call_of(
            called, get(), {n: v() if inspect.isfunction(v) else v for n, v in valid.items()}, known
        )

    if torch:
        add_of_torch(add)
        return made

    def leaf() -> Any:
        return fanin.Leaf(np.zeros(2), name="w")

    def node() -> Any:
        return fanin.Node(lambda g: g, edges=[(leaf(), 0)], name="mul")

    def buffer(**how: Any) -> Any:
        return fanin.InputBuffer(1, **how)

    def full() -> Any:
        buf = buffer(stats=True)
        buf.add(0, G)
        return buf

    def taken() -> Any:
        buf = full()
        buf.take()
        return buf

    def roots() -> Any:
        return [(node(), 0, G)]

    def fn() -> Any:
        return lambda *x: None

    def compared() -> Any:
        with fanin.trace(digests=True) as t:
            fanin.add_n([G, G])
        return t

    add("add_n", lambda: fanin.add_n, arrays=lambda: [G, G])
    add("add_rows", lambda: fanin.add_rows, ids=lambda: [0, 1], rows=G, n=3)
    add("Partial", lambda: fanin.Partial, values=G, at=lambda: slice(2), shape=4)
    add("Diagonal", lambda: fanin.Diagonal)
    add("backward", lambda: fanin.backward, roots=roots)
    add("grad", lambda: fanin.grad, roots=roots, inputs=lambda: [leaf()])
    add("walk", lambda: fanin.walk, roots=roots)
    add("order", lambda: fanin.order, roots=roots)
    add("compare", lambda: fanin.compare, a=compared, b=compared)
    add("free", lambda: fanin.free, roots=lambda: [node()])
    add("draw", lambda: fanin.draw, roots=lambda: [node()])
    add("global_norm", lambda: fanin.global_norm, buf=taken)
    add("clip_norm", lambda: fanin.clip_norm, buf=taken, sums=lambda: [G], max_norm=1.0)
    add("current_stream", lambda: fanin.current_stream, device="cpu")
    add("stream", lambda: fanin.stream, s=s)
    add("set_options", lambda: fanin.set_options)
    add("trace", lambda: fanin.trace)
    add("InputBuffer", lambda: fanin.InputBuffer, slots=2)
    add("InputBuffer.add", lambda: buffer().add, slot=0, gradient=G)
    add("InputBuffer.add_many", lambda: buffer().add_many, slots=lambda: [0], gradients=lambda: [G])
    add("InputBuffer.expect", lambda: buffer().expect, slot=0, n=1)
    add("InputBuffer.explain", lambda: full().explain, slot=0)
    add("InputBuffer.ready", lambda: (b := buffer(), b.expect(0, 1))[0].ready, slot=0)
    add("InputBuffer.stats", lambda: taken().stats, slot=0)
    add("InputBuffer.take", lambda: full().take)
    add("InputBuffer.target", lambda: buffer().target, slot=0)
    add("Leaf", lambda: fanin.Leaf, array=G)
    add("Leaf.register_hook", lambda: leaf().register_hook, hook=fn)
    add("Leaf.register_post_accumulate_grad_hook", lambda: leaf().register_post_accumulate_grad_hook, hook=fn)
    add("Node", lambda: fanin.Node, fn=fn)
    add("Node.needs", lambda: node().needs, edge=0)
    for when in ("register_hook", "register_posthook", "register_prehook"):
        add(f"Node.{when}", lambda when=when: getattr(node(), when), hook=fn)
    add("Node.retain_grad", lambda: node().retain_grad)
    add("Edges.append", lambda: node().edges.append, edge=lambda: (leaf(), 0))
    add("Slot", lambda: fanin.Slot, shape=(2,))
    add("Sparse", lambda: fanin.Sparse, format="coo", parts=lambda: (np.zeros((1, 1), int), np.ones(1)), shape=(2,))
    add("Zero", lambda: fanin.Zero, shape=(2,), dtype="float32")
    add("Stream", lambda: fanin.Stream, device="sim:0", handle=s.handle)
    add("Stream.wait", lambda: s.wait, other=s)
    add("Event", lambda: fanin.Event, device="sim:0")
    add("Event.record", lambda: m.event().record, stream=s)
    add("sharing.overlap", lambda: fanin.sharing.overlap, a=G, b=G)
    add("sharing.overlaps", lambda: fanin.sharing.overlaps, arrays=lambda: [G, G])
    add("sharing.overlaps_itself", lambda: fanin.sharing.overlaps_itself, a=G)
    add("Overlaps.verdict", lambda: fanin.sharing.overlaps([G, G]).verdict, i=0, j=1)
    add("Machine", lambda: Machine)
    add("Machine.array", lambda: m.array, value=G)
    add("Machine.empty", lambda: m.empty, shape=(2,))
    add("Machine.stream", lambda: m.stream)
    add("Machine.event", lambda: m.event)
    add("Machine.launch", lambda: m.launch, stream=s, fn=fn)
    add("Machine.leave_out", lambda: Machine().leave_out)
    add("Array.record_stream", lambda: x.record_stream, stream=s)
    add("sim.explore", lambda: fanin.sim.explore, scenario=lambda: lambda m: None)
    add("sim.replay", lambda: fanin.sim.replay, scenario=lambda: lambda m: None, schedule="")
    add("GraphTree", lambda: fanin.GraphTree, device="cpu")
    add("GraphTree.function", lambda: fanin.GraphTree("cpu").function, fn=lambda: lambda x: x)
    add("GraphTree.pipeline", lambda: fanin.GraphTree("cpu").pipeline, parts=lambda: [lambda x: x])
    add_of_ranks(add)
    add_of_the_tape(add)
    add_of_analysis(add)
    return made


def add_of_ranks(add: Callable[..., None]) -> None:
    """Those of fanin.dist, on a group of this thread alone, which needs no MPI."""
    ranks = Group(ThreadEngine(World(1), 0), timeout=None)

    def reducer(**how: Any) -> Any:
        return dist.Reducer([fanin.Leaf(np.zeros(2))], ranks, **how)

    def passed() -> Any:
        leaf: Any = fanin.Leaf(np.zeros(2))
        made = dist.Reducer([leaf], ranks, stats=True)
        fanin.backward([(leaf, 0, G)], reducer=made)
        return made

    add("dist.add_n", lambda: dist.add_n, arrays=lambda: [G, G], group=ranks)
    add("dist.threads", lambda: dist.threads, n=1, fn=lambda: lambda group: None)
    add("dist.group", lambda: dist.group, x=ranks)
    add("dist.clip_norm", lambda: dist.clip_norm, reducer=passed, max_norm=1.0)
    add("Reducer", lambda: dist.Reducer, leaves=lambda: [fanin.Leaf(np.zeros(2))], group=ranks)
    add("Reducer.at", lambda: reducer(order="key").at, key=0)
    add("Reducer.accumulate", lambda: reducer().accumulate)
    add("Reducer.explain", lambda: passed().explain, which=0)
    add("Group.barrier", lambda: ranks.barrier)


def add_of_the_tape(add: Callable[..., None]) -> None:
    """Those of fanin.tape."""

    def matrix() -> Any:
        return tape.parameter(np.ones((2, 2)))

    def total() -> Any:
        return (x := matrix(), (x * x).sum())[1]

    add("tape.array", lambda: tape.array, value=G)
    add("tape.parameter", lambda: tape.parameter, value=G)
    add("tape.matmul", lambda: tape.matmul, a=matrix, b=matrix)
    for name in ("tanh", "relu", "softmax"):
        add(f"tape.{name}", lambda name=name: getattr(tape, name), args=matrix)
    add("tape.transpose", lambda: tape.transpose, a=matrix)
    add("tape.split", lambda: tape.split, a=matrix, parts=2)
    add("tape.total (sum)", lambda: tape.total, a=matrix)
    add("tape.embedding", lambda: tape.embedding, table=matrix, index=lambda: np.array([0]))
    add("tape.gathered", lambda: tape.gathered, table=matrix, index=lambda: np.array([0]))
    add("tape.cross_entropy", lambda: tape.cross_entropy, logits=matrix, labels=lambda: np.array([0, 1]))
    add("tape.backward", lambda: tape.backward, losses=total)
    add("tape.compiled", lambda: tape.compiled, step=lambda: lambda x: x)
    add("Var.reshape", lambda: matrix().reshape, shape=4)
    add("Var.register_hook", lambda: matrix().register_hook, fn=lambda: lambda g: g)


def add_of_analysis(add: Callable[..., None]) -> None:
    """Those of fanin.analysis and fanin.descriptors."""
    first = descriptors.PlainAOTInput(0)

    def f() -> Any:
        return lambda x: x * 2

    add("analysis.functionalize", lambda: analysis.functionalize, fn=f, example_args=lambda: [G.copy()])
    add("analysis.collect_metadata", lambda: analysis.collect_metadata, fn=f, args=lambda: (G.copy(),))
    for name in ("alias_dot", "compute_overlapping_inputs", "explain_overlap_differences"):
        add(f"analysis.{name}", lambda name=name: getattr(analysis, name), arrays=lambda: [G, G])
    add("descriptors.parse", lambda: descriptors.parse, text=first.expr())
    for name in ("buffers", "params", "named_params", "named_buffers", "check_unique"):
        add(f"descriptors.{name}", lambda name=name: getattr(descriptors, name), inputs=lambda: [first])
    for name in ("inputs_and_grads", "plain_inputs_and_grads", "params_and_grads"):
        add(f"descriptors.{name}", lambda name=name: getattr(descriptors, name), inputs=lambda: [first], outputs=())


def add_of_torch(add: Callable[..., None]) -> None:
    """Those of fanin.torch, where torch is there."""
    import torch

    import fanin.torch as ft

    def weight() -> Any:
        return torch.ones(2, requires_grad=True)

    add("torch.backward", lambda: ft.backward, tensors=lambda: (weight() * 2).sum())
    add("torch.accumulate", lambda: ft.accumulate, parameters=lambda: [weight()])
    add("torch.ReduceScatter", lambda: ft.ReduceScatter)
