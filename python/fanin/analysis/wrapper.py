"""Wraps a function that writes its arguments as one that does not, and calls it with the same effect as the function
itself.

    wrapper    guard -> snapshot -> the function, on the caller's own arrays -> what was written; put back if it raises
    compiled   guard -> a run of the pure function -> write back, geometry, views of the caller's own arrays
    pure       (distinct arguments, a base for each group of written arrays) -> (new values, outputs, bases of outputs)

The wrapper does not depend on its record: the function gets the caller's own arrays, and where it raises they are
restored (`RunArrays`). The record of a layout describes what the pure function takes and returns, and is compared
with later calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._checks import flag, integer, sequence
from .._interop.torch import skip_frames
from .._words import counted, names_nearest, type_of
from . import trees
from .arrays import CallerContainers, RunArrays, plan
from .calls import (
    Call,
    Outcome,
    array_kinds,
    behaviour_of,
    call_of,
    check_argument,
    check_arrays,
    check_function,
    check_given,
    check_hidden,
    check_keywords,
    check_outputs,
    check_signature,
    deviation,
    outcome_of,
)
from .collect import ObservedArrays, check_flags, metadata, observe_arrays
from .descriptors import AOTInput, AOTOutput, PlainAOTInput
from .guards import Change, Guard
from .pure import Pure, role_of
from .records import ViewAndMutationMeta

if TYPE_CHECKING:
    from .tensors import OutputViews

__tracebackhide__ = True  # no frames of ours in reports of pytest

GUARDS = ("specialise", "error")
Compiler = Callable[["Pure"], Callable[..., Sequence[object]]]


class LayoutChangedError(ValueError):
    """A call whose arguments are laid out otherwise than those that were recorded, where `guard="error"`. `descriptor`
    is the first that differs, if it is one.
    """

    def __init__(self, message: str, descriptor: AOTInput | None = None) -> None:
        super().__init__(message)
        self.descriptor = descriptor


class BehaviourChangedError(ValueError):
    """A call that wrote, or returned views, otherwise than was recorded. `descriptor` is the first input or output that
    differs.
    """

    def __init__(self, message: str, descriptor: AOTInput | AOTOutput | None = None) -> None:
        super().__init__(message)
        self.descriptor = descriptor


@dataclass(frozen=True)
class Arguments:
    """What a call of the wrapper was given, and as leaves and distinct arrays."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    leaves: Sequence[object]
    arrays: Sequence[Any]

    @property
    def tree(self) -> trees.Arguments:
        return self.args, {k: self.kwargs[k] for k in sorted(self.kwargs)}


class Record:
    """The record of one layout of arguments: the guard, the private memory's plan, the metadata, the pure
    function.
    """

    def __init__(self, owner: Functionalized, call: Call) -> None:
        #: what is made of tensors; None where the arrays are NumPy's
        self.tensors: Any = None
        self.caller, arrays = RunArrays, call.arrays
        if call.tensors:
            from . import tensors

            self.tensors, self.caller = tensors, tensors.RunTensors
        check_arrays(call, self.caller.check, "functionalize", alone=owner.compiles)
        if call.tensors:
            arrays = list(map(self.tensors.numpy_view, arrays))
        self.guard = Guard(call)
        #: of tensors that are compiled for: what else was given, but for floats, which change from step to step
        self.fixed: list[tuple[int, object]] = []
        if call.tensors and owner.compiles:
            others = ((i, x) for i, (x, u) in enumerate(zip(call.leaves, call.index, strict=True)) if u is None)
            self.fixed = [(i, x) for i, x in others if isinstance(x, (int, str, bytes, slice, tuple, type(None)))]
        self.plan = plan(arrays, self.guard.components)
        self.index, self.form, self.first = call.index, call.form, call.first
        self.owner = owner
        self.order = call.order
        self.meta: ViewAndMutationMeta | None = None
        self.outcome: Outcome | None = None
        self.touched: frozenset[int] = frozenset()  #: arrays that were written
        self.compiled: Callable[..., Sequence[object]] | None = None  #: the compiled pure function
        self.grad_state: object = None  #: of tensors, which require a gradient
        self.views: OutputViews | None = None  #: of tensors, how arguments and results show their memory
        #: tensors of which the function reads where they lie in their storage, and whether it reads of all of that
        self.counted_from: dict[int, bool] = {}
        self.problem: Exception | None = None  #: why there is no pure function
        self.own: dict[int, int] = {}  #: which containers of the result are which of the arguments', by their places

    @functools.cached_property
    def written(self) -> frozenset[int]:
        return frozenset(self.plan.where[u].group for u in self.touched)

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

    def fits(self, order: Sequence[str], leaves: Sequence[object], arrays: Sequence[Any]) -> bool:
        """Whether what a compiled function was made for is so: the order of arguments by name, numbers and texts among
        them, which tensors require a gradient, and whether gradients are on.
        """
        if self.compiled is None or self.order != order:
            return self.compiled is None
        if self.tensors is None:
            return True
        if any(self.tensors.is_part(arrays[u], whole) for u, whole in self.counted_from.items()):
            return False
        same = all(type(leaves[i]) is type(x) and leaves[i] == x for i, x in self.fixed)
        return same and bool(self.grad_state == self.tensors.grad_state(arrays))

    @functools.cached_property
    def pure(self) -> Pure:
        assert self.meta is not None and self.outcome is not None
        known = self.owner.fn, self.plan, self.guard, self.order, self.meta, self.outcome, self.touched
        if self.tensors is None:
            return Pure(*known)
        made: Pure = self.tensors.TensorPure(self.views, *known)
        return made

    def name(self, array: int) -> str:
        return PlainAOTInput(self.first[array]).expr()


@dataclass(eq=False)
class Turn:
    """A layout that is being recorded: what fits it, and how many threads record it or wait."""

    guard: Guard | None
    lock: threading.RLock
    threads: int = 0


class Functionalized:
    """What `functionalize` gives: call it as the function itself.

    `fn`: the function. `meta`: its `ViewAndMutationMeta` at the layout of the latest call. `pure`: the pure function at
    that layout (`Pure`). `layouts`: how many layouts are recorded. AttributeError for `meta` and `pure` before anything
    was recorded.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        guard: str,
        lend: bool,
        keep: int,
        requires_grad: Sequence[bool] | None,
        compiler: Compiler | None,
    ) -> None:
        self.fn = fn
        self._guard, self._lend, self._keep = guard, lend, keep
        self._requires_grad, self._compiler = requires_grad, compiler
        self._records: list[Record] = []
        self._lock = threading.Lock()  # of the two lists
        self._turns: list[Turn] = []
        skip_frames(Functionalized.__call__.__code__)
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"<functionalize({getattr(self.fn, '__name__', self.fn)}), {counted(self.layouts, 'layout')}>"

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
                "functionalize: .meta of a function on tensors is recorded by functionalize(fn, example_args); or call"
                " collect_metadata"
            )
        return meta

    @property
    def pure(self) -> Pure:
        """The pure function at the layout of the latest call."""
        record = self._latest("pure")
        if record.meta is None:
            raise AttributeError(
                "functionalize: .pure of a function on tensors is recorded by functionalize(fn, example_args), or with"
                " compiler="
            )
        if record.problem is not None:
            raise record.problem
        return record.pure

    @property
    def compiles(self) -> bool:
        """Whether something else than the function runs."""
        return self._compiler is not None

    def _latest(self, what: str) -> Record:
        if not self._records:
            raise AttributeError(
                f"functionalize: .{what} is recorded by the first call: call it, or pass functionalize(fn,"
                " example_args)"
            )
        return self._records[0]

    # Calls

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind a method, as a function does: the object is the first argument, a leaf."""
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        for place, record in enumerate(self._records):
            found = record.guard.arrays(args, kwargs)
            if found is not None and record.fits(tuple(kwargs), *found):
                if place:
                    self._remember(record)
                return self._again(record, Arguments(args, kwargs, *found))
        if self._compiler is None and self._guard != "error":
            return self._first(args, kwargs)  # the function runs in any case, and one of its records is kept
        with self._recording(args, kwargs):
            recorded = ((r, r.guard.arrays(args, kwargs)) for r in self._records)
            if not any(found and r.fits(tuple(kwargs), *found) for r, found in recorded):
                return self._first(args, kwargs)
        return self(*args, **kwargs)

    @contextlib.contextmanager
    def _recording(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[None]:
        """One thread records a layout, the others wait. With `guard="error"` there is one layout."""
        with self._lock:
            fits = (t for t in self._turns if t.guard is None or t.guard.arrays(args, kwargs) is not None)
            turn = next(fits, None)
            if turn is None:
                guard = None if self._guard == "error" else Guard(call_of(args, kwargs, "functionalize"))
                turn = Turn(guard, threading.RLock())
                self._turns.append(turn)
            turn.threads += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.threads -= 1
                if not turn.threads:
                    self._turns.remove(turn)

    def _first(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        call = call_of(args, kwargs, "functionalize")
        if call.tensors:
            skip_frames(Functionalized.__call__.__code__)
        given = Arguments(args, kwargs, call.leaves, call.arrays)
        if self._guard == "error" and self._records:
            change = self._records[0].guard.change(call) or Change(
                None, "", "the numbers, texts and order of arguments by name that were compiled for", "others"
            )
            leaf, words = change.leaf, f"expected arguments {change.expected}, got {change.found}"
            if leaf is not None:
                words = f"{call.leaf_name(leaf)}: {change.what}: expected {change.expected}, found {change.found}"
            remedy = 'functionalize(fn, guard="specialise") records each layout by itself'
            named = None if leaf is None else PlainAOTInput(leaf)
            raise LayoutChangedError(f"functionalize: {words}; {remedy}", named)
        check_signature(self.fn, args, kwargs, "functionalize")
        check_flags(call, self._requires_grad, "functionalize")
        record = Record(self, call)
        earlier = self._earlier(record)
        if call.tensors and self._compiler is not None:
            record.tensors.keeping_modes(lambda: self._learn_from(record, call, given))
            self._remember(record)
            return self._compiled(record, given)
        caller, containers = record.caller(record.plan, call.arrays), CallerContainers(args, kwargs)
        try:
            result = self.fn(*args, **kwargs)
            if self._compiler is not None and containers.changed():
                raise changed_containers()
            # It called itself, or another thread did.
            earlier = earlier.union(*(r.touched for r in self._records if r.guard.arrays(args, kwargs) is not None))
            self._learn(record, caller, call, given, result, earlier)
        except BaseException as e:
            undo(record, e, caller, containers)
            raise
        self._remember(record, given)
        return result

    def _earlier(self, record: Record) -> frozenset[int]:
        """Which arrays count as written because the latest layout's were, leaf for leaf. Leaves that shared
        memory are left out: the write may have been through another one.
        """
        if not self._records or self._records[0].form != record.form:
            return frozenset()
        latest, found = self._records[0], set()
        for i, (old, new) in enumerate(zip(latest.index, record.index, strict=True)):
            if old is None or new is None or old not in latest.touched:
                continue
            alone = len(latest.plan.groups[latest.plan.where[old].group].members) == 1
            if alone and latest.index.count(old) == 1:
                found.add(record.index[i])
        return frozenset(u for u in found if u is not None)

    def _again(self, record: Record, given: Arguments) -> object:
        for i in record.guard.boxes:
            check_argument(given.leaves[i], lambda i=i: f"functionalize: {PlainAOTInput(i).expr()}", array_kinds())  # type: ignore[misc]
        record.caller.check_again(given.arrays, lambda u: f"functionalize: {record.name(u)}")
        if self._compiler is not None:
            return self._compiled(record, given)
        caller = record.caller(record.plan, given.arrays, record.to_copy if self._lend else None)
        containers = None if record.guard.flat else CallerContainers(given.args, given.kwargs)
        try:
            result = self.fn(*given.args, **given.kwargs)
            if self._guard == "error":
                self._hold(record, caller, result)
        except BaseException as e:
            undo(record, e, caller, containers)
            raise
        needed = self._lend or record.meta is not None  # else no caller reads which were written
        if needed and not record.touched.issuperset(more := caller.changed):
            record.touched |= more
            record.forget()
            if record.meta is not None:
                infos = [
                    dataclasses.replace(info, mutates_data=True, mutations_hidden_from_autograd=False)
                    if u in more
                    else info
                    for info, u in zip(record.meta.input_info, record.index, strict=True)
                ]
                record.meta = dataclasses.replace(record.meta, input_info=tuple(infos))
        return result

    # Records

    def _record(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record the layout of a call that is not made: the function runs on copies."""
        call = call_of(args, kwargs, "functionalize")
        check_signature(self.fn, args, kwargs, "functionalize")
        check_flags(call, self._requires_grad, "functionalize")
        record = Record(self, call)
        self._learn_from(record, call, Arguments(args, kwargs, call.leaves, call.arrays))
        self._remember(record)

    def _learn(
        self, record: Record, caller: RunArrays, call: Call, given: Arguments, result: object, earlier: frozenset[int]
    ) -> None:
        """Take in what the first run of a layout did."""
        if record.tensors:
            if self._guard == "error":
                record.outcome = outcome_of(caller, result, [], [])
            record.touched = earlier | caller.changed
            return
        observed = ObservedArrays(call, caller, result, None, earlier, self._requires_grad)
        if self._compiler is not None:
            check_hidden(caller, observed.outputs, "functionalize")
            check_outputs(caller, observed.outputs, "functionalize")
            record.own = own_of(result, given.tree)
        record.learn(metadata(observed, call), observed.outcome)
        self._compile(record)

    def _compile(self, record: Record) -> None:
        if self._compiler is None:
            return
        made = self._compiler(record.pure)
        if not callable(made):
            raise TypeError(f"functionalize: compiler: expected it to return a function, got {type_of(made)}")
        record.compiled = made

    def _learn_from(self, record: Record, call: Call, given: Arguments) -> None:
        """Have a layout recorded by a run on tracked copies. ValueError where there is a compiler, and a pure function
        cannot do what this one does; without one `.pure` of tensors raises it.
        """
        source, part = (given.args, given.kwargs), record.tensors
        if part is None:
            observed = observe_arrays(self.fn, call, source, record.plan, requires_grad=self._requires_grad)
            if self._compiler is not None and observed.containers.changed():
                raise changed_containers()
            record.learn(metadata(observed, call), observed.outcome)
            record.own = own_of(observed.value, observed.tree)
            self._compile(record)
            return
        reads = part.Reads()
        run = part.ObservedTensors(call, source, undo_others=True)
        caller, containers = record.caller(record.plan, run.tensors), CallerContainers(run.tree)
        before = [(part.history_of(t), part.state_of(t)) for t in run.tensors]

        def watched(*args: object, **kwargs: object) -> object:
            with reads:
                return self.fn(*args, **kwargs)

        result = run.run(watched)
        outputs: list[object] = []
        record.outcome = outcome_of(caller, result, outputs, [])
        problems = [changed_containers()] if containers.changed() else []
        if caller.resized:
            name = record.name(record.plan.groups[min(caller.resized)].numbers[0])
            problems.append(
                ValueError(
                    f"functionalize: {name} is given other storage (resize_, set_, .data): a compiled function cannot"
                    " do that"
                )
            )
        problems += part.unlike_copies(record, run, [state for _, state in before], reads)
        record.views, unlisted = part.admitted_views(record, run, caller, before, reads)
        problems += unlisted
        if problems:
            record.problem = problems[0]
            if self._compiler is not None:
                raise record.problem
        record.meta = metadata(run, call)
        record.touched = frozenset(
            u for i, u in enumerate(record.index) if u is not None and record.meta.input_info[i].mutates_data
        )
        record.grad_state = part.grad_state(call.arrays)
        record.own = own_of(result, run.tree)
        self._compile(record)

    def _remember(self, record: Record, instead: Arguments | None = None) -> None:
        """Put a record first; the list is made anew, for other threads may be reading it. `instead`: of all that fit
        these arguments.
        """
        with self._lock:
            others = [r for r in self._records if r is not record]
            if instead is not None:
                same = record.order
                others = [r for r in others if r.order != same or not r.guard.arrays(instead.args, instead.kwargs)]
            self._records = [record, *others][: self._keep]

    def _hold(self, record: Record, caller: RunArrays, result: object) -> None:
        """BehaviourChangedError where a run differs from the record."""
        assert record.outcome is not None
        outcome = outcome_of(caller, result, [], [])
        allowed = {u for g in record.written for u in record.plan.groups[g].numbers}
        was = behaviour_of(record.outcome, allowed, [role_of(p, record.plan) for p in record.outcome.places])
        now = behaviour_of(outcome, caller.changed, [role_of(p, record.plan) for p in outcome.places])
        found = deviation(was, now, record.first)
        if found is not None:
            raise BehaviourChangedError(f"functionalize: {found[0]}; the caller's arrays are as they were", found[1])

    def _compiled(self, record: Record, given: Arguments) -> object:
        """A call in which the compiled pure function runs."""
        assert record.compiled is not None
        own = None
        if record.own:
            every = trees.containers(given.tree)
            own = {k: every[i] for k, i in record.own.items()}
        pure, compiled = record.pure, record.compiled

        def run() -> object:
            return pure.to_caller(given.arrays, compiled(*pure.inner(given.leaves, given.arrays)), own)

        return run() if record.tensors is None else record.tensors.keeping_modes(run)


# Dynamo calls the wrapper without tracing it or its callees: a graph break. `skip_frames` does the same for the frame.
Functionalized.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def undo(record: Record, error: BaseException, caller: RunArrays, containers: CallerContainers | None) -> None:
    """Leave the caller's arrays as they were; what could not be put back is a note of the error."""
    if containers is not None:
        containers.undo()
    caller.undo().note(error, record.name)


def own_of(result: object, given: trees.Arguments) -> dict[int, int]:
    """Which containers of a result are which of the arguments', by their places, those by name in the order of their
    names.
    """
    args, kwargs = given
    places: dict[int, int] = {}
    for i, node in enumerate(trees.containers((args, {k: kwargs[k] for k in sorted(kwargs)}))):
        if node != ():  # there is one empty tuple
            places.setdefault(id(node), i)
    found = {k: places.get(id(node)) for k, node in enumerate(trees.containers(result))}
    return {k: i for k, i in found.items() if i is not None}


def changed_containers() -> ValueError:
    return ValueError(
        "functionalize: the function changes a list or dict among its arguments: a compiled function cannot; "
        "expected one that returns what it should hold, or no compiler"
    )


@names_nearest
def functionalize(
    fn: Callable[..., object],
    example_args: Sequence[object] | None = None,
    example_kwargs: dict[str, object] | None = None,
    *,
    guard: str = "specialise",
    lend: bool = False,
    compiler: Compiler | None = None,
    requires_grad: Sequence[bool] | None = None,
    layouts: int = 64,
) -> Functionalized:
    """A wrapper around a function that writes its arguments or returns views of them, and the pure function inside.

    Calling the wrapper leaves every caller's array, every output, and all that they share, exactly as calling `fn`
    itself would; where `fn` raises, the caller's arrays are as they were before. `fn` runs on the caller's own arrays,
    so that whatever it does to them and returns of them is done; a snapshot of their bytes, geometry and flags puts
    them back. Arrays are NumPy's, of any strides, dtypes without objects, or torch tensors on the CPU, gradients and
    all, in lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts. Containers of other classes, dataclasses
    and iterators that hold arrays are a TypeError among the arguments: what is done to those could not be put back.

    The first call with a new layout (tree of arguments, dtypes, shapes, strides, which share which bytes) is recorded
    in `.meta` and `.pure`. `example_args` record it at once, by one run of `fn` on copies that also detects writes
    that change no byte.

    `guard`: "specialise" records each layout by itself; "error" raises LayoutChangedError for a second one, and
    BehaviourChangedError for a call that writes, or returns views, otherwise than was recorded; the caller's arrays are
    as they were then. `lend`: make no snapshot of arrays that no call has written; then a first write to one stays
    where `fn` raises. `compiler`: called with `.pure` for each layout, gives what is run in its place, of arrays from
    the second call on, of tensors from the first (`fn` is recorded on copies then); it takes and returns what
    `.pure.input_descs` and `.pure.output_descs` name. `requires_grad`: for each leaf, for `.meta`. `layouts`: how many
    are kept.

    TypeError: no function, a generator or coroutine function, arguments that it does not take, arrays whose bytes are
    not all (object dtype, subclasses). ValueError: unknown options, options that exclude each other. Messages name
    arguments by descriptor. Limits, and what is meant by a view: docs/analysis.md.

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
    check_function(fn, "functionalize")
    if not isinstance(guard, str) or guard not in GUARDS:
        raise ValueError(f"functionalize: expected guard among {', '.join(GUARDS)}; got {guard!r}")
    if flag("functionalize: lend", lend) and (guard == "error" or compiler is not None):
        raise ValueError(
            'functionalize: lend=True hands out arrays themselves: writes to them are not detected, as guard="error"'
            " needs, and no pure function is run, as compiler= needs"
        )
    if compiler is not None and not callable(compiler):
        raise TypeError(f"functionalize: compiler: expected a function that takes .pure, got {type_of(compiler)}")
    layouts = integer("functionalize: layouts", layouts, 1)
    flags = None
    if requires_grad is not None:
        flags = tuple(map(bool, sequence("functionalize: requires_grad", requires_grad, "bools")))
    keywords = check_keywords(example_kwargs, "example_kwargs", "functionalize")
    made = Functionalized(fn, guard, lend, layouts, flags, compiler)
    if example_args is not None or keywords:
        made._record(check_given(example_args, "example_args", "functionalize"), keywords)
    return made
