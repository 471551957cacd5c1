"""A function that writes its arguments, as one that does not, and a wrapper that leaves the caller with what the function itself would have left.

    wrapper    guard -> private copies -> the function -> compare -> write back, replay geometry, make views of the caller's own arrays
    pure       (distinct arguments, a base for each group of written arrays) -> (new values, outputs, bases of shared outputs)

The wrapper is right by construction, not by its record: the function runs on private memory in which all arrays lie to each other as the caller's do
(private.py), and what differs afterwards is what was written. The record of a layout says what the pure function takes and returns, and what is
held against a later call.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

from ..descriptors import AOTInput, AOTOutput, PlainAOTInput, PlainAOTOutput
from . import trees
from .calls import (
    Call,
    Outcome,
    Place,
    array_kinds,
    call_of,
    check_array,
    check_arrays,
    check_hidden,
    check_outputs,
    check_signature,
    leaf_home,
    outcome_of,
)
from .collect import check_flags, collect, meta_of, of_tensors
from .guards import Change, Guard
from .hidden import check_argument, check_function
from .private import Array, World, plan
from .pure import Pure
from .records import ViewAndMutationMeta

GUARDS = ("specialise", "error")
Compiler = Callable[["Pure"], Callable[..., Sequence[Any]]]


class LayoutChangedError(ValueError):
    """A call whose arguments are laid out otherwise than those that were recorded, where `guard="error"`. `descriptor` is the first that differs, if it is one."""

    def __init__(self, message: str, descriptor: AOTInput | None = None) -> None:
        super().__init__(message)
        self.descriptor = descriptor


class BehaviourChangedError(ValueError):
    """A call that wrote, or returned views, otherwise than was recorded. `descriptor` is the first input or output that differs."""

    def __init__(self, message: str, descriptor: AOTInput | AOTOutput | None = None) -> None:
        super().__init__(message)
        self.descriptor = descriptor


class Record:
    """What is known of one layout of arguments: the guard, the private memory's plan, the metadata, the pure function."""

    def __init__(self, owner: Functionalized, call: Call) -> None:
        check_arrays(call, torch_part().check_tensor if call.tensors else check_array, "functionalize")
        self.guard = Guard(call)
        self.tensors = call.tensors
        self.plan = plan(call.arrays if not call.tensors else torch_part().twins(call.arrays), self.guard.components)
        self.world: type[World] = torch_part().TorchWorld if call.tensors else World
        self.index, self.form, self.first, self.flat = call.index, call.form, call.first, self.guard.flat
        self.owner = owner
        self.meta: ViewAndMutationMeta | None = None
        self.outcome: Outcome | None = None
        self.touched: frozenset[int] = frozenset()  #: arrays that were written
        self.run: Callable[..., Sequence[Any]] | None = None  #: the compiled pure function

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Groups that were written."""
        return frozenset(self.plan.where[u][0] for u in self.touched)

    @functools.cached_property
    def to_copy(self) -> list[int]:
        """The same, where all others are lent."""
        return sorted(self.written)

    def forget(self) -> None:
        """Have what follows from `touched` worked out anew."""
        for name in ("written", "to_copy", "pure"):
            self.__dict__.pop(name, None)

    def learn(self, meta: ViewAndMutationMeta, outcome: Outcome) -> None:
        """Take in what a run did; what was written once counts as written from then on."""
        self.meta, self.outcome = meta, outcome
        self.touched |= {u for i, u in enumerate(self.index) if u is not None and meta.input_info[i].mutates_data}
        self.forget()

    @functools.cached_property
    def pure(self) -> Pure:
        assert self.meta is not None and self.outcome is not None
        return Pure(self.owner.fn, self.plan, self.index, self.form, self.first, self.meta, self.outcome, self.touched)

    def named(self, leaf: int, before: str = "") -> str:
        return before + PlainAOTInput(leaf).expr()


class Functionalized:
    """What `functionalize` gives: call it as the function itself.

    `fn`: the function. `meta`: its `ViewAndMutationMeta` at the layout of the latest call. `pure`: the pure function at that layout (`Pure`). `layouts`: how many layouts
    are recorded. AttributeError for `meta` and `pure` before anything was recorded.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        guard: str,
        lend: bool,
        keep: int,
        options: dict[str, Any],
        compiler: Compiler | None,
    ) -> None:
        self.fn = fn
        self._guard, self._lend, self._keep, self._options, self._compiler = guard, lend, keep, options, compiler
        self._records: list[Record] = []
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"<functionalize({called(self.fn)}), {self.layouts} layouts>"

    @property
    def layouts(self) -> int:
        """How many layouts are recorded."""
        return len(self._records)

    @property
    def meta(self) -> ViewAndMutationMeta:
        """What the function does to its inputs and what its outputs are, at the layout of the latest call."""
        meta = self._latest("meta").meta
        if meta is None:
            raise AttributeError(
                "functionalize: .meta of a function on tensors is known with functionalize(fn, example_args); or call collect_metadata"
            )
        return meta

    @property
    def pure(self) -> Pure:
        """The pure function at the layout of the latest call."""
        record = self._latest("pure")
        if record.tensors:
            raise AttributeError(
                "functionalize: .pure is for functions on NumPy arrays: a function on tensors has torch.func.functionalize"
            )
        return record.pure

    def _latest(self, what: str) -> Record:
        if not self._records:
            raise AttributeError(
                f"functionalize: .{what} is known from the first call on: call it, or say functionalize(fn, example_args)"
            )
        return self._records[0]

    # Calls

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind a method, as a function does: the object is the first argument, a leaf."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        for place, record in enumerate(self._records):
            found = record.guard.arrays(args, kwargs)
            if found is not None:
                if place:
                    self._remember(record)
                return self._again(record, found[0], found[1], args, kwargs)
        return self._first(args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a layout that was not seen before."""
        call = call_of(args, kwargs, "functionalize")
        if self._guard == "error" and self._records:
            self._refuse(self._records[0], call)
        check_signature(self.fn, args, kwargs, "functionalize")
        check_flags(call, self._options["requires_grad"], "functionalize")
        record = Record(self, call)
        earlier = self._records[0].touched if self._records and self._records[0].form == record.form else frozenset()
        if call.tensors and self._compiler is not None:
            raise TypeError(
                "functionalize: compiler= is for functions on NumPy arrays: a function on tensors has torch.compile"
            )
        world = record.world(record.plan, call.arrays)
        result, copies = self._run(record, world, call.leaves, args, kwargs)
        if self._compiler is not None and copies.changed():
            raise changed_containers()
        inner = [r for r in self._records if r.guard.arrays(args, kwargs) is not None]  # it called itself
        earlier = earlier.union(*(r.touched for r in inner))
        self._records = [r for r in self._records if r not in inner]
        self._learn(record, world, call, result, earlier)
        self._remember(record)
        return self._home(record, world, result, copies)

    def _again(
        self,
        record: Record,
        leaves: Sequence[Any],
        arrays: Sequence[Array],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of a layout that is recorded."""
        for i in record.guard.boxes:
            check_argument(leaves[i], lambda i=i: f"functionalize: {record.named(i)}", array_kinds())  # type: ignore[misc]
        if self._compiler is not None:
            return self._compiled(record, leaves, arrays)
        if record.tensors:
            for u, t in enumerate(arrays):
                torch_part().check_tensor(t, lambda u=u: f"functionalize: {record.named(record.first[u])}")
        world = record.world(record.plan, arrays, copied=record.to_copy if self._lend else None)
        result, copies = self._run(record, world, leaves, args, kwargs)
        if self._guard == "error":
            self._hold(record, world, leaves, result)
        return self._home(record, world, result, copies)

    def _run(
        self, record: Record, world: World, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, trees.Copies]:
        private, index = world.private, record.index
        if record.flat and not kwargs:
            copies = trees.Copies(lambda leaf: leaf)
            given = [leaf if u is None else private[u] for leaf, u in zip(leaves, index, strict=True)]
            return self.fn(*given), copies
        known = {id(leaf): private[u] for leaf, u in zip(leaves, index, strict=True) if u is not None}
        copies = trees.Copies(lambda leaf: known.get(id(leaf), leaf))
        given = [copies.of(a) for a in args]
        named = {k: copies.of(v) for k, v in kwargs.items()}
        return self.fn(*given, **named), copies

    def _home(self, record: Record, world: World, result: Any, copies: trees.Copies) -> Any:
        """Decide everything, then write: what the function did to its private arrays happens to the caller's."""
        outputs: list[Any] = []
        trees.flatten(result, outputs)
        check_outputs(world, outputs, "functionalize")
        check_hidden(world, outputs, "functionalize")
        changed = copies.changed()
        for _, copy in changed:
            inside: list[Any] = []
            trees.flatten(copy, inside)
            check_hidden(world, inside, "functionalize", "what was put in a list or dict among the arguments")
        if not record.written.issuperset(world.written):
            self._widen(record, world)
        world.replay(lambda u: record.named(record.first[u]))
        home = trees.Homeward(leaf_home(world), copies)
        for original, copy in changed:
            home.fill(original, copy)
        mapped = home.of(result)
        world.replay_flags()
        return mapped

    # Records

    def _learn(self, record: Record, world: World, call: Call, result: Any, earlier: frozenset[int]) -> None:
        outputs: list[Any] = []
        bases: list[Any] = []
        outcome = outcome_of(world, result, outputs, bases)
        if record.tensors:
            touched = {u for u in range(len(call.arrays)) if world.member_written(u)}
            record.outcome, record.touched = outcome, earlier | frozenset(touched)
            return
        record.learn(meta_of(call, world, outcome, outputs, bases, earlier, None, **self._options), outcome)
        if self._compiler is not None:
            record.run = self._compiler(record.pure)

    def _learn_from(self, record: Record, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have a layout recorded by a run on tracked copies."""
        if not record.tensors:
            meta, outcome, copies = collect(self.fn, call, args, kwargs, record.plan, **self._options)
            if self._compiler is not None and copies.changed():
                raise changed_containers()
            record.learn(meta, outcome)
            if self._compiler is not None:
                record.run = self._compiler(record.pure)
            return
        world = record.world(record.plan, call.arrays)
        result, _ = self._run(record, world, call.leaves, args, kwargs)
        self._learn(record, world, call, result, frozenset())
        record.meta = of_tensors(self.fn, call)

    def _remember(self, record: Record) -> None:
        """Put a record first; the list is made anew, for other threads may be reading it."""
        self._records = [record, *(r for r in self._records if r is not record)][: self._keep]

    def _widen(self, record: Record, world: World) -> None:
        """A group was written that was not when the layout was recorded."""
        more = {
            m.number for g in world.written for m in record.plan.groups[g].members if world.member_written(m.number)
        }
        record.touched |= more
        record.forget()
        if record.meta is None:
            return
        infos = [
            dataclasses.replace(info, mutates_data=True, mutations_hidden_from_autograd=False) if u in more else info
            for info, u in zip(record.meta.input_info, record.index, strict=True)
        ]
        record.meta = dataclasses.replace(record.meta, input_info=tuple(infos))

    def _refuse(self, record: Record, call: Call) -> None:
        change = record.guard.change(call)
        assert change is not None
        raise layout_error(change, call)

    def _hold(self, record: Record, world: World, leaves: Sequence[Any], result: Any) -> None:
        """BehaviourChangedError where a run did what the record does not say."""
        outcome = outcome_of(world, result, [], [])
        assert record.outcome is not None
        message, descriptor = deviation(record, outcome, world)
        if message:
            raise BehaviourChangedError(f"functionalize: {message}; the caller's arrays are as they were", descriptor)

    def _compiled(self, record: Record, leaves: Sequence[Any], arrays: Sequence[Array]) -> Any:
        assert record.run is not None
        return record.pure.finish(arrays, leaves, record.run(*record.pure.inner(leaves, arrays)))


def torch_part() -> Any:
    """What is needed for tensors; imported when there are any."""
    from . import private_torch

    return private_torch


def changed_containers() -> ValueError:
    """The error for a function that a compiled one cannot stand for."""
    return ValueError(
        "functionalize: the function changes a list or dict among its arguments: a compiled function cannot; "
        "expected one that returns what it should hold, or no compiler"
    )


def called(fn: Callable[..., Any]) -> str:
    """A function's name."""
    return str(getattr(fn, "__name__", fn))


def layout_error(change: Change, call: Call) -> LayoutChangedError:
    """The error for a call that does not fit."""
    remedy = 'functionalize(fn, guard="specialise") records each layout by itself'
    if change.leaf is None:
        return LayoutChangedError(f"functionalize: expected arguments {change.expected}, got {change.found}; {remedy}")
    name = call.leaf_name(change.leaf)
    return LayoutChangedError(
        f"functionalize: {name}: {change.what}: expected {change.expected}, found {change.found}; {remedy}",
        PlainAOTInput(change.leaf),
    )


def deviation(record: Record, outcome: Outcome, world: World) -> tuple[str, AOTInput | AOTOutput | None]:
    """What a run did that the record does not say, and whose descriptor that is; ("", None) where there is nothing."""
    before = record.outcome
    assert before is not None
    for g in sorted(outcome.written - record.written):
        members = record.plan.groups[g].members
        u = next((m.number for m in members if world.member_written(m.number)), members[0].number)
        leaf = record.first[u]
        return f"{record.named(leaf)} is written by this call, and was not by the recorded one", PlainAOTInput(leaf)
    known, now = dict(before.geometry), dict(outcome.geometry)
    for u in sorted({*known, *now}):
        if known.get(u) != now.get(u):
            leaf = record.first[u]
            return (
                f"{record.named(leaf)}: its geometry after this call is {now.get(u, 'unchanged')}, expected {known.get(u, 'unchanged')}",
                PlainAOTInput(leaf),
            )
    if before.form != outcome.form:
        return "the result is another tree than at the recorded call", None
    for j, (a, b) in enumerate(zip(before.places, outcome.places, strict=True)):
        if role(a, record) != role(b, record):
            return (
                f"{PlainAOTOutput(j).expr()} is {words(b, record)}, and was {words(a, record)} at the recorded call",
                PlainAOTOutput(j),
            )
    return "", None


def role(place: Place, record: Record) -> tuple[str, int, int | None]:
    """What an output is, whatever its extent."""
    base = record.plan.where[place.base][0] if place.kind == "view" else place.base
    return place.kind, base, place.same_as


def words(place: Place, record: Record) -> str:
    """What an output is, in words."""
    if place.kind in ("input", "view"):
        name = record.named(record.first[place.base])
        return name if place.kind == "input" else f"a view of {name}"
    if place.kind == "output":
        return f"a view of {PlainAOTOutput(place.base).expr()}"
    return "a view that shares its memory with other outputs" if place.kind == "shared" else "a value of its own"


def functionalize(
    fn: Callable[..., Any],
    example_args: Sequence[Any] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    guard: str = "specialise",
    lend: bool = False,
    compiler: Compiler | None = None,
    requires_grad: Sequence[bool] | None = None,
    layouts: int = 64,
) -> Functionalized:
    """A wrapper around a function that writes its arguments or returns views of them, and the pure function inside.

    Calling the wrapper leaves every caller's array, every output, and all that they share, exactly as calling `fn` itself would; where `fn` raises, the caller's arrays
    are as they were before. Inside, `fn` runs on private copies that lie to each other as the caller's arrays do, and what differs afterwards is written back: so it is right by
    construction, whatever `fn` does with its arguments. Arrays are NumPy's, of any strides, dtypes without objects, in lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts. What other objects hold is not exchanged: containers of other classes and dataclasses that hold arrays
    are a TypeError, among the arguments and, where they hold memory of an input, in the result; what objects of any other class keep in attributes is out of sight.

    The first call with a new layout (tree of arguments, dtypes, shapes, strides, who shares which bytes) is recorded: `.meta` and `.pure` tell of it. `example_args` have it recorded
    at once, by one run of `fn` on copies that also sees writes that change no byte.

    `guard`: "specialise" records each layout by itself; "error" raises LayoutChangedError for a second one, and BehaviourChangedError for a call that writes, or returns views, otherwise than
    was recorded; the caller's arrays are as they were then.
    `lend`: hand arrays that no call has written to `fn` themselves, without a copy; then a first write to one happens at once, and stays where `fn` raises.
    `compiler`: called with `.pure` for each layout, gives what is run in its place from the second call on; it takes and returns what `.pure.input_descs` and `.pure.output_descs` say.
    `requires_grad`: for each leaf, for `.meta`. `layouts`: how many are kept.

    TypeError: no function, a generator or coroutine function, arguments that it does not take, arrays whose bytes are not all (object dtype, subclasses). ValueError: unknown options, options that exclude each other.
    Messages name arguments by descriptor. Limits, and what is meant by a view: docs/analysis.md.

    >>> from fanin.analysis import functionalize
    >>> def step(w, g):
    ...     w -= 0.5 * g
    ...     return w[::-1]
    >>> f = functionalize(step)
    >>> flat = np.ones(4)
    >>> out = f(flat[1:], flat[:3])
    >>> flat, np.shares_memory(out, flat)
    (array([1. , 0.5, 0.5, 0.5]), True)
    >>> f.pure
    <pure step: (__make_synthetic_base(args[0])) -> (__input_mutation(__make_synthetic_base(args[0])), output[0])>
    """
    if not callable(fn):
        raise TypeError(f"functionalize: expected a function, got {fn!r:.80}")
    check_function(fn, "functionalize")
    if guard not in GUARDS:
        raise ValueError(f"functionalize: expected guard among {', '.join(GUARDS)}; got {guard!r}")
    if lend and (guard == "error" or compiler is not None):
        raise ValueError(
            'functionalize: lend=True hands out arrays themselves: what is done to them is not seen, as guard="error" needs, and no pure function is run, as compiler= needs'
        )
    if operator.index(layouts) < 1:
        raise ValueError(f"functionalize: layouts: expected an integer from 1 on, got {layouts}")
    options: dict[str, Any] = {"requires_grad": None if requires_grad is None else tuple(map(bool, requires_grad))}
    made = Functionalized(fn, guard, lend, layouts, options, compiler)
    if example_args is not None or example_kwargs:
        args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
        call = call_of(args, kwargs, "functionalize")
        check_signature(fn, args, kwargs, "functionalize")
        check_flags(call, options["requires_grad"], "functionalize")
        record = Record(made, call)
        made._learn_from(record, call, args, kwargs)
        made._remember(record)
    return made
