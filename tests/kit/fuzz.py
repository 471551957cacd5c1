"""A fuzzer of the public interface: every entry point that the stubs name, with valid and invalid arguments.

    python tests/kit/fuzz.py --seed 1 --calls 20000        programs of 250 calls; each prints its seed
    python tests/kit/fuzz.py --seed 17 --calls 250 -v      replays the program of seed 17 and prints each call

The entry points and their parameters come from python/fanin/_core.pyi and from the signatures of the public Python
functions and classes. A program draws its arguments from a pool of things: two simulated machines, one that is closed
and what it left, streams, arrays, buffers, nodes, passes, graph trees, and what earlier calls returned. Two threads
make the calls, one after the other or two at once (a replay may have another order of these); a context manager stays
entered while a few more calls run.

A call may return, or raise an exception of a type that the documentation names for it. Where it takes things of two
machines it must raise. At its end a program drops everything, and kit.world checks that nothing is left.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import faulthandler
import functools
import inspect
import itertools
import json
import queue
import random
import re
import sys
import tempfile
import threading
import typing
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import fanin
from fanin import _core
from fanin.sim.machine import Abandoned
from kit import world
from kit.core_names import BUILT
from kit.core_names import public as PUBLIC

MODULES: tuple[ModuleType, ...] = (fanin, fanin.sharing, fanin.sim)
#: Programs of so many calls, so many things of a type in a pool.
PROGRAM, KEPT = 250, 8


# The entry points


PROPERTIES = (property, functools.cached_property)


@dataclass(frozen=True)
class Entry:
    """A function, a method or a property: where it is, and the kinds and annotations of its parameters."""

    owner: type | ModuleType
    name: str
    kind: str  # "function", "method", "property"
    parameters: tuple[tuple[str, str, str, bool], ...]  # name, "place", "name" or "all", annotation, has a default
    doc: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def _from_stub(owner: Any, f: ast.FunctionDef, method: bool) -> Entry:
    a = f.args
    places = [*a.posonlyargs, *a.args][int(method) :]
    required = len(places) - len(a.defaults)
    found = [
        (x.arg, "place", ast.unparse(x.annotation or ast.Constant("")), i >= required) for i, x in enumerate(places)
    ]
    found += [
        (x.arg, "name", ast.unparse(x.annotation or ast.Constant("")), d is not None)
        for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.vararg:
        found.append((a.vararg.arg, "all", ast.unparse(a.vararg.annotation or ast.Constant("")), True))
    is_property = any(ast.unparse(d) == "property" for d in f.decorator_list)
    kind = "property" if is_property else "method" if method else "function"
    return Entry(owner, f.name, kind, tuple(found), inspect.getdoc(getattr(owner, f.name, None)) or "")


def _from_signature(owner: Any, name: str, f: Any, method: bool) -> Entry:
    if isinstance(f, PROPERTIES):
        return Entry(owner, name, "property", (), inspect.getdoc(f) or "")
    found = []
    for p in [*inspect.signature(f).parameters.values()][int(method) :]:
        kind = {p.VAR_POSITIONAL: "all", p.KEYWORD_ONLY: "name"}.get(p.kind, "place")
        if p.kind is not p.VAR_KEYWORD:
            found.append((p.name, kind, str(p.annotation), p.default is not p.empty or kind == "all"))
    return Entry(owner, name, "method" if method else "function", tuple(found), inspect.getdoc(f) or "")


#: Special methods of Python classes that count as entry points; those of the core are in the stub.
PROTOCOLS = ("__enter__", "__exit__", "__len__", "__iter__", "__getitem__", "__repr__", "__str__", "__eq__", "__hash__")
#: Their instances come from other calls alone: the constructor is not public.
MADE_ELSEWHERE = ("Thread", "Restore", "Info", "Drawing", "Counters", "ProcessCounters")


def entries() -> dict[str, Entry]:
    """Every public entry point, by name."""
    found: dict[str, Entry] = {}

    def add(e: Entry) -> None:
        found.setdefault(str(e), e)

    classes = []
    for module in MODULES:
        for name in module.__all__:
            x = getattr(module, name)
            if inspect.isfunction(x):
                add(_from_signature(module, name, x, False))
                made = typing.get_type_hints(x).get("return")
                classes += [made] if isinstance(made, type) else []
            elif isinstance(x, type) and not issubclass(x, BaseException):
                classes.append(x)
    for c in dict.fromkeys(classes):
        if not c.__module__.startswith("fanin") or getattr(_core, c.__name__, None) is c:
            continue
        if c.__name__ not in MADE_ELSEWHERE:
            add(_from_signature(c, "__init__", c, False))
        for name, f in vars(c).items():
            if (inspect.isfunction(f) or isinstance(f, PROPERTIES)) and (not name.startswith("_") or name in PROTOCOLS):
                add(_from_signature(c, name, f, True))
    for node in ast.parse(BUILT.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in PUBLIC():
            add(_from_stub(fanin, node, False))
        elif isinstance(node, ast.ClassDef) and node.name in PUBLIC() | {"_OfNumPy"}:
            owner = getattr(_core, node.name.replace("_OfNumPy", "Array"))
            for f in node.body:
                if isinstance(f, ast.FunctionDef) and (not f.name.startswith("_") or f.name.startswith("__")):
                    name = "__init__" if f.name == "__new__" else f.name
                    if not issubclass(owner, BaseException) and not (owner is _core.Machine and name == "__init__"):
                        e = _from_stub(owner, f, True)
                        add(dataclasses.replace(e, name=name, kind="function" if name == "__init__" else e.kind))
    return found


# What may come of a call

#: Types that the documentation names for every call, and by the name of an entry.
EVERYWHERE = (TypeError, ValueError, RuntimeError, OverflowError, IndexError, BufferError, MemoryError)
ALSO: dict[str, tuple[type[BaseException], ...]] = {
    "Array": (AttributeError,),  # a method that arrays of the CPU alone have
    "Walk.__next__": (StopIteration,),
    "Walk.__iter__": (StopIteration,),
    "Counters.__getitem__": (KeyError,),
    "Machine": (Abandoned,),  # of one whose run a search has ended
    "Leaf.grad": (AttributeError,),  # of a leaf whose gradients go to a function
}

#: Types whose instances belong to a machine.
OF_A_MACHINE = ("Machine", "Stream", "Event", "Array", "Graph", "Thread")
#: The options of _core.set_options, in its order.
OPTIONS = [*inspect.signature(_core.set_options).parameters]
#: Calls that may take things of two machines: they compare, call back, or keep each thing apart.
MAY_MIX = re.compile(
    r"Stream\.__|Machine\.(spawn|__exit__)|InputBuffer\.(__init__|add_many|take)|Node\.__init__|Verdict"
    r"|(Report|Sparse|Partial|Slot|Stats|Clock|Zero)\.__|fanin\.(free|draw|backward|grad|walk|order|clip_norm)"
)


def documented(e: Entry) -> tuple[type[BaseException], ...]:
    """The exceptions that the entry point may raise."""
    named = (
        getattr(fanin, n, None) or getattr(fanin.sim, n, None) or getattr(__import__("builtins"), n, None)
        for n in re.findall(r"\b[A-Z]\w+(?:Error|Iteration|Warning)\b", e.doc + (e.owner.__doc__ or ""))
    )
    return (
        *EVERYWHERE,
        *ALSO.get(e.owner.__name__, ()),
        *ALSO.get(str(e), ()),
        *(x for x in named if isinstance(x, type)),
    )


class UsersError(Exception):
    """Raised by functions of the user's: any call may pass it on."""


class Found(AssertionError):
    """A call that broke a rule, with the seed of its program."""


# Arguments

#: Invalid almost everywhere.
JUNK: tuple[Any, ...] = (
    None, -1, 0, 1, 2, 3, 7, 2**62, 2**63 - 1, 2**63, -(2**63), 2**100, True, 0.0, -1.5, float("nan"), float("inf"), 1j,
    "", "a", "a\0b", "\ud800", "sim:0", "sim:9", "cpu", "cuda:0", b"x", (), [], [None], (1, 2, 3), {}, {"a": 1}, int,
    object(), np.float32(3), np.ones(0), np.ones((2, 0), "float32"), np.array(1.5), np.array([object()]), np.array("s"),
    np.ones(2, ">f4"), np.ma.ones(2), np.ones(6)[::-2], np.broadcast_to(np.ones(1), (2,)), slice(None), ...,
)  # fmt: skip
DTYPES = (
    "float32",
    "float64",
    "float16",
    "int64",
    "complex64",
    "bool",
    "exact",
    ">f8",
    np.dtype("f4"),
    float,
    "U3",
    "no",
)
TEXTS = {
    "schedule": ("seeded", "fifo", "lifo", "starve", "round robin", "0110"),
    "device": ("sim:0", "sim:1", "cpu"),
    "roles": ("auto", "copy", "static", "accumulate"),
    "mode": ("global", "thread-local", "relaxed"),
    "words": ("S12", "S12.wait", "S9"),
    "format": ("coo", "csr", "csc"),
    "isa": ("auto", "base", "avx2"),
    "order": ("C", "F", "K"),
}
#: What to give a parameter, by the first of these that is found in "NAME: ANNOTATION".
KINDS: tuple[tuple[str, Callable[[Program], Any]], ...] = (
    (r"^edge: Edge", lambda p: p.edge()),
    (r"^edges:", lambda p: p.several(p.edge)),
    (r"^roots:", lambda p: p.several(p.root, 1)),
    (r"^inputs: Iterable", lambda p: p.several(lambda: p.one("Leaf", "Node"), 1)),
    (r"^slots: (int|Iterable)", lambda p: p.rng.choice([1, 2, p.several(lambda: p.one("Slot", "Array"), 1)])),
    (r"^(slots|keys): Sequence|^keys:", lambda p: p.several(p.small, 2)),
    (r"^(gradients|arrays|reads|writes|sums|parts|keep): (Seq|It|list|tuple)", lambda p: p.several(p.array, 2)),
    (r"^weights:", lambda p: p.rng.choice([None, {0: 2, 1: 0.5}, {0: 3}, [2, None], [1.5], p.several(p.small, 2)])),
    (r"^out:", lambda p: p.rng.choice([None, p.array(), p.several(p.array, 1)])),
    (r"^at:", lambda p: p.rng.choice([(), (), slice(None), ..., 0, slice(1), (0, None), fanin.Diagonal()])),
    (r"^values:", lambda p: p.rng.choice([np.ones(3), np.ones(3), np.ones((2, 3)), p.array()])),
    (r"^ids:", lambda p: p.rng.choice([np.zeros(3, int), [0, 0, 0], np.arange(3), np.ones(3), []])),
    (r"^rows:", lambda p: p.rng.choice([np.ones(3), np.ones((3, 2), "float32"), p.array()])),
    (r"^like:", lambda p: p.rng.choice([p.one("Slot"), ((3,), "float64", "cpu"), ((3,), "float32", "sim:0")])),
    (r"Callable|Hook|Schedule|Scenario|^fn:|^combine:|^run:", lambda p: p.function()),
    (r"Stream", lambda p: p.one("Stream", "Stream", "Stream", "Event")),
    (r"^other:", lambda p: p.one("Stream", "Verdict", "ndarray", "Clock", "Slot", "Stats", "Report")),
    (r"^buf:", lambda p: p.one("InputBuffer")),
    (r"^graph:", lambda p: p.one("Graph")),
    (r"^module:", lambda p: sys.modules[__name__]),
    (r"^node:", lambda p: p.one("Node", "Leaf")),
    (r"^path:", lambda p: p.rng.choice([None, "x.svg", "x.json", "x", "no/x.svg"])),
    (r"DTypeLike", lambda p: p.rng.choice(DTYPES)),
    (r"^shape:|^axes:", lambda p: p.rng.choice([(), (3,), (2, 3), 3, (1, 3), (-1,), (2**62, 4)])),
    (r"^index:|_Index", lambda p: p.rng.choice([0, -1, slice(1), slice(None, None, -1), ..., None, (0, ...), 5])),
    (r"BaseException|Traceback", lambda p: None),
    (r"bool", lambda p: p.rng.random() < 0.5),
    (r"\bint\b|SupportsIndex|_Axis", lambda p: p.small()),
    (r"float|complex", lambda p: p.rng.choice([0, 0.5, 2.0, 1e-3, float("inf"), "auto", -1, 100])),
    (r"\bstr\b|^name:", lambda p: p.rng.choice(["x", "a name", "\u00e9"])),
    (r"object|args", lambda p: p.array()),
)  # fmt: skip

#: How often an entry is drawn, 1 otherwise.
WEIGHTS = (
    (r"Array\.(__|[a-z])", 0.3),
    (r"plot|svg|info|explore|scenarios|trim|devices|Trace.*(picture|dot|summary)", 0.1),
)


@dataclass
class Call:
    """A call that is drawn, what it takes, and the machines that this belongs to."""

    entry: Entry
    self: Any
    args: list[Any]
    named: dict[str, Any]
    machines: set[int]

    def __str__(self) -> str:
        given = [*map(shown, self.args), *(f"{k}={shown(v)}" for k, v in self.named.items())]
        return f"{self.entry} of {shown(self.self)} with ({', '.join(given)})"

    def run(self) -> Any:
        e = self.entry
        if e.kind == "property":
            if self.args and hasattr(getattr(e.owner, e.name), "__set__") and e.name == "grad":
                return setattr(self.self, e.name, self.args[0])
            return getattr(self.self, e.name)
        if e.kind == "function":
            result = (e.owner if e.name == "__init__" else getattr(e.owner, e.name))(*self.args, **self.named)
        else:
            result = getattr(self.self, e.name)(*self.args, **self.named) if e.name != "__iter__" else iter(self.self)
        if result is NotImplemented:  # of an operator
            raise TypeError("not implemented")
        return [*itertools.islice(result, 5)] if e.name == "__iter__" else result


def shown(x: Any) -> str:
    try:
        return repr(x)[:200]
    except Exception as e:
        return f"<{type(x).__name__}, whose repr raises {e!r}>"


class Program:
    """The calls of one seed: its pool of things, and the two threads that make them."""

    def __init__(self, seed: int, found: dict[str, Entry], seen: Counter[tuple[str, str]], say: bool = False) -> None:
        self.seed, self.found, self.seen, self.say = seed, found, seen, say
        self.entries = [*found.values()]
        self.rng = random.Random(seed)
        self.of_type: dict[str, list[Entry]] = {}
        for e in self.entries:
            self.of_type.setdefault(e.owner.__name__, []).append(e)
        self.weights = [next((w for x, w in WEIGHTS if re.match(x, str(e))), 1.0) for e in self.entries]
        self.pool: dict[str, list[tuple[Any, int | None]]] = {}
        self.made, self.depth, self.turn = 0, 0, 0
        self.operand: Any = None  # of the function of a graph tree that is at work

    # Things

    def keep(self, x: Any, of: int | None = None) -> Any:
        """Keeps a thing; `of` is the number of its machine."""
        things = self.pool.setdefault(type(x).__name__, [])
        if not any(x is y for y, _ in things):
            things.insert(self.rng.randrange(len(things) + 1), (x, of))
            del things[KEPT:]
        return x

    def stock(self, machines: list[fanin.sim.Machine]) -> None:
        """One thing of each type at least; the last machine is closed, and left these."""
        for of, m in enumerate(machines):
            with m:
                self.keep(m, of)
                for device in range(2):
                    s = self.keep(m.stream(device), of)
                    self.keep(s.record(), of)
                    self.keep(m.array(np.ones(3), device), of)
                    self.keep(m.array(np.ones((2, 3), "float32"), device), of)
                m.begin_capture(s)
                self.keep(m.end_capture(s), of)
                self.keep(m.spawn(lambda: 1), of)
                m.join()
                tree = self.keep(fanin.GraphTree("sim:0", memory=1 << 16))
                self.keep(tree.step())
                self.keep(tree.function(lambda x: x))
            tree = self.keep(fanin.GraphTree("cpu", memory=1 << 16))
            self.keep(tree.function(self.again))
            self.keep(tree.step())
        for x in (np.ones(3), np.ones(3, "float32"), np.ones((2, 3)), np.arange(3)):
            self.keep(x)
        taken, buf = (
            self.keep(fanin.InputBuffer(2, stats=True)),
            self.keep(fanin.InputBuffer([fanin.Slot((3,), "float64")])),
        )
        taken.add(0, np.ones(3))
        taken.take()
        self.keep(buf.target(0))
        leaf = self.keep(fanin.Leaf(np.ones(3)))
        node = self.keep(fanin.Node(lambda g: g, edges=[(leaf, 0)]))
        self.keep(node.edges)
        self.keep(node.register_hook(lambda g: None))
        self.keep(fanin.walk([(node, 0, np.ones(3))]))
        self.keep(fanin.order([node]))
        with fanin.trace(digests=True) as digests:
            fanin.grad([(node, 0, np.ones(3))], [leaf], keep_graph=True)
        self.keep(digests)
        self.keep(fanin.overlap(np.ones(3), np.ones(3)))
        self.keep(fanin.sharing.overlaps([np.ones(3)] * 2))
        self.keep(fanin.sim.explore(lambda m: 1))
        for x in (
            fanin.Slot((3,), "float64"),
            fanin.Zero((3,), "float64"),
            fanin.trace(),
            fanin.set_options(),
            fanin.info(),
        ):
            self.keep(x)
        self.keep(fanin.Sparse("coo", (np.zeros((2, 1), int), np.ones(1)), (3, 3)))
        self.keep(fanin.Partial(np.ones(2), np.s_[1:], (3,))), self.keep(fanin.Diagonal())
        self.keep(buf.counters), self.keep(fanin.counters()), self.keep(machines[0].clock())
        self.keep(fanin.draw([node])), self.keep(fanin.Stats(1, 1.0, 1.0, 0, None))

    def one(self, *names: str) -> Any:
        """A thing of one of these types."""
        things = self.pool.get(self.rng.choice(names))
        return self.rng.choice(things)[0] if things else None

    def machines(self, given: list[Any]) -> set[int]:
        """The numbers of the machines that these belong to, and what is in lists and tuples among them."""
        for _ in range(2):
            given += [y for x in given if type(x) in (list, tuple) for y in x]
        of = {id(x): of for things in self.pool.values() for x, of in things if of is not None}
        return {of[id(x)] for x in given if id(x) in of}

    def small(self) -> int:
        return self.rng.choice((0, 0, 0, 1, 1, 2, 3, -1))

    def several(self, make: Callable[[], Any], least: int = 0) -> list[Any]:
        return [make() for _ in range(self.rng.choice((least, least, least + 1)))]

    def array(self) -> Any:
        return (
            self.one("Array", "Array", "ndarray", "ndarray", "Sparse", "Zero", "Partial")
            if self.rng.random() < 0.9
            else 1.5
        )

    def edge(self) -> Any:
        return (self.one("Node", "Leaf"), self.rng.choice((0, 0, 0, 1))) if self.rng.random() < 0.9 else None

    def root(self) -> Any:
        return (self.one("Node", "Node", "Leaf"), 0, self.array())

    def function(self) -> Callable[..., Any]:
        def fails(*args: Any) -> Any:
            raise UsersError("a function of the user's")

        return self.rng.choice((
            self.again, self.again, fails, lambda *a: a[0] if a else None, lambda *a: None, lambda *a: a, lambda *a: 5,
        ))  # fmt: skip

    def again(self, *args: Any) -> Any:
        """A function of the user's that makes calls itself, where only one thread is at work."""
        result = args[0] if args else None
        if self.depth < 2 and self.turn == threading.get_ident():
            self.depth += 1
            if args and isinstance(args[0], _core.Array):
                self.operand = args[0]
            try:
                for x in args:
                    self.keep(x)
                for _ in range(3):
                    if (c := self.call(args[0] if self.operand is not None else result)).entry.name != "__enter__":
                        result = self.judged(c)
            finally:
                self.depth, self.operand = self.depth - 1, None
        return result

    def argument(self, name: str, note: str) -> Any:
        if self.rng.random() < 0.06:
            return self.rng.choice(JUNK)
        if self.rng.random() < 0.06:
            return self.rng.choice(self.rng.choice([*self.pool.values()]))[0]
        if self.operand is not None and "object" in note and self.rng.random() < 0.8:
            return self.operand
        if name in TEXTS and re.search("str|_Role", note):
            return self.rng.choice(TEXTS[name])
        return next((make(self) for kind, make in KINDS if re.search(kind, f"{name}: {note}")), None)

    # Calls

    def call(self, on: Any = None) -> Call:
        """Draws a call: its entry point, what it is called on (`on`, if that has any), what it is given. One in five
        has all its arrays and streams, and little else: those may be of two machines.
        """
        e = self.rng.choices(self.entries, self.weights)[0]
        if own := self.of_type.get(type(on).__name__):
            e = self.rng.choice(own)
        owner, mixed = None, self.rng.random() < 0.2
        if e.kind != "function":
            owner = on if own else self.one(e.owner.__name__)
        args, named, given = [], {}, [owner]
        for name, kind, note, optional in e.parameters:
            thing = name not in ("group", "name") and re.search(
                "Stream|Event|Array|Graph|object|Sequence|Iterable", note
            )
            if optional and self.rng.random() < (0.6 if not mixed else 0.1 if thing else 0.95):
                continue
            x = self.argument(name, note)
            if thing:
                given.append(x)
            if kind == "name" or (optional and kind != "all"):
                named[name] = x
            else:
                args.append(x)
        if e.kind == "property" and e.name == "grad" and self.rng.random() < 0.5:
            args.append(self.rng.choice([None, self.array()]))
        return Call(e, owner, args, named, self.machines(given))

    def judged(self, c: Call) -> Any:
        """Makes the call; raises Found where what comes of it is not documented. Returns what the call returned."""
        self.made += 1
        if self.say:
            print(f"{self.made} on thread {threading.get_ident() % 1000}: {c}", flush=True)
        try:
            result = c.run()
        except Found:
            raise
        except (*documented(c.entry), UsersError) as e:
            self.seen[str(c.entry), "raised"] += 1
            if self.say:
                print(f"    {type(e).__name__}: {e}", flush=True)
            return None
        except BaseException as e:
            raise Found(f"seed {self.seed}, call {self.made}: {c} raised {e!r}, which is not documented") from e
        self.seen[str(c.entry), "returned"] += 1
        if len(c.machines) > 1 and not MAY_MIX.match(str(c.entry)):
            raise Found(f"seed {self.seed}, call {self.made}: {c} took things of two machines")
        for x in result if type(result) in (list, tuple) else [result]:
            if type(x).__module__.startswith(("fanin", "contextlib")) or type(x) is np.ndarray:
                self.keep(x, min(c.machines) if len(c.machines) == 1 and type(x).__name__ in OF_A_MACHINE else None)
        return result

    def step(self, threads: list[Worker]) -> None:
        """A call, two at once on two threads, or a few inside a context manager."""
        one, other = self.rng.sample(threads, 2)
        r = self.rng.random()
        if r < 0.1:
            self.turn = one.ident
            kinds = [n for n, things in self.pool.items() if things and hasattr(type(things[0][0]), "__enter__")]
            kind = self.rng.choice(kinds)
            one.do(functools.partial(self.within, self.one(kind)))
            if kind == "_GeneratorContextManager":  # which may be entered once
                del self.pool[kind]
            one.done()
            return
        if r < 0.12:
            self.turn = one.ident
            one.do(self.recorded)
            one.done()
            return
        calls = [self.call()] if r < 0.8 else [self.call(), self.call()]
        calls = [c for c in calls if c.entry.name != "__enter__"]  # see within
        self.turn = one.ident if len(calls) == 1 else 0
        for thread, c in zip((one, other), calls, strict=False):
            thread.do(functools.partial(self.judged, c))
        for thread, _ in zip((one, other), calls, strict=False):
            thread.done()

    def within(self, context: Any) -> None:
        """Enters a context manager, makes some calls and leaves it, on one thread while the other makes none: it could
        wait for the end of the block.
        """
        entry = self.found.get(f"{type(context).__name__}.__enter__")
        allowed = (*(documented(entry) if entry else EVERYWHERE), UsersError)
        try:
            with context as x:
                if isinstance(x, np.ndarray):
                    x += 1
                for _ in range(self.rng.randrange(4)):
                    if (c := self.call()).entry.name != "__enter__":
                        self.judged(c)
        except Found:
            raise
        except allowed:
            self.seen[str(entry or "contextlib"), "raised"] += 1
        except BaseException as e:
            raise Found(f"seed {self.seed}, call {self.made}: with {shown(context)}: {e!r}, not documented") from e
        else:
            self.seen[str(entry or "contextlib"), "returned"] += 1

    def recorded(self) -> None:
        """A function of a graph tree on the CPU is called in a step: there arrays have NumPy's operators."""
        with contextlib.suppress(*EVERYWHERE, UsersError), fanin.GraphTree("cpu", memory=1 << 16) as tree, tree.step():
            f = self.keep(tree.function(self.again))
            for x in (np.ones((2, 3)), np.ones((2, 3)), np.arange(3)):
                self.judged(Call(self.found["GraphFunction.__call__"], f, [x], {}, set()))

    def run(self, calls: int) -> None:
        with Machines(seed=self.seed) as w:
            threads: list[Worker] = []
            try:
                self.stock([w.machine, w.other, w.closed])
                threads += [Worker(w.machine), Worker(w.other)]
                while self.made < calls:
                    self.step(threads)
            finally:
                for thread in threads:
                    thread.end()
                self.pool.clear()


class Worker(threading.Thread):
    """A thread on which calls are made, inside of a machine."""

    def __init__(self, machine: fanin.sim.Machine) -> None:
        super().__init__(daemon=True)
        self.machine, self.jobs, self.answers = machine, queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(Exception), self.machine:
            while (call := self.jobs.get()) is not None:
                try:
                    call()
                except BaseException as e:
                    self.answers.put(e)
                else:
                    self.answers.put(None)
                del call
            raise UsersError  # so that leaving the machine runs nothing

    def do(self, call: Callable[[], Any]) -> None:
        self.jobs.put(call)

    def done(self) -> None:
        """Waits for the call, and raises what was found."""
        e = self.answers.get()
        if e is not None:
            raise e

    def end(self) -> None:
        self.jobs.put(None)
        self.join()
        del self.machine


class Machines(world.Sim):
    """Two machines, and one that is closed. Programs race and fail as they like: only what they leave is judged."""

    def __init__(self, seed: int) -> None:
        super().__init__(2, seed)

    def open(self, devices: int, seed: int, options: dict[str, Any]) -> None:
        self.on, self.other, self.closed = (fanin.sim.Machine(devices, seed + i, memory=1 << 22) for i in range(3))
        for m in (self.on, self.other):
            m.__enter__()

    def run_out(self) -> list[str]:
        return []

    def close(self, bad: bool) -> None:
        for m in (self.other, self.on):
            with contextlib.suppress(Exception):
                m.__exit__(UsersError, None, None)
        _core.set_options(*(self._options[name] for name in OPTIONS))
        del self.other, self.closed


def run(seed: int, calls: int, found: dict[str, Entry], say: bool = False) -> Counter[tuple[str, str]]:
    """Programs from this seed on, until so many calls are made: how often each entry point returned and raised."""
    seen: Counter[tuple[str, str]] = Counter()
    while seen.total() < calls:
        Program(seed, found, seen, say).run(min(PROGRAM, calls - seen.total()))
        seed += 1
    return seen


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--calls", type=int, default=20_000)
    parse.add_argument("-v", "--verbose", action="store_true", help="print each call before it is made")
    how = parse.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        seen: Counter[tuple[str, str]] = Counter()
        seed, found = how.seed, entries()
        while seen.total() < how.calls:
            print(f"seed {seed}", flush=True)
            seen += run(seed, min(PROGRAM, how.calls - seen.total()), found, how.verbose)
            seed += 1
    print(f"{seen.total()} calls")
    print(json.dumps([[*entry, n] for entry, n in sorted(seen.items())]))


if __name__ == "__main__":
    main()
