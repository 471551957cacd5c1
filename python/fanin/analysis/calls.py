"""A call as flat lists: its leaves, the distinct arrays among them, their names, and what a run did to them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np

from .. import _core
from .._core import address
from .._interop.classes import attribute, is_tensor
from .._interop.protocols import NDArray
from .._words import counted, type_of
from . import trees
from .arrays import REMADE, Array, Geometry, RunArrays, root_of
from .descriptors import AOTInput, AOTOutput, PlainAOTInput, PlainAOTOutput

__tracebackhide__ = True  # no frames of ours in reports of pytest

# Arrays that trees do not show: in dataclasses, sets, deques, subclasses of list and dict, memoryviews, iterators. They
# cannot be exchanged for private memory and back: a write would reach the caller's array at once, or a result would
# stay in private memory. So they are refused where the object can be read. Attributes of other objects are not read.


EMPTY: tuple[Any, ...] = ([], (), set(), {}, {}.values(), {}.items(), collections.deque(), np.empty(0))

#: Iterators over possible arrays: they run after the function returned, or are used up once read.
LATER: tuple[type, ...] = (
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    map,
    zip,
    filter,
    enumerate,
    reversed,
    np.nditer,
    *(type(x) for x in EMPTY[4:6]),
    *(type(iter(x)) for x in EMPTY),
    *(type(reversed(x)) for x in EMPTY[3:7]),
    type(reversed([])),
    type(iter(int, 0)),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)

#: Containers by class, and what shows one array.
BOXES = (list, tuple, dict, set, frozenset, collections.deque, Mapping, collections.UserList)
VIEWS = (memoryview, np.flatiter, np.void)

#: Classes that hold no arrays.
PLAIN = frozenset({np.ndarray, np.float64, int, float, bool, str, type(None)})

#: Depth to which containers within containers are read.
DEEPEST = 8

NO_GENERATORS = (
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.iscoroutinefunction, "a coroutine function"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
)


def check_function(fn: Callable[..., object], api: str) -> None:
    """TypeError for a non-function, and for a function whose body does not run when it is called."""
    if not callable(fn):
        raise TypeError(f"{api}: expected a function, got {fn!r:.80}")
    for is_one, words in NO_GENERATORS:
        if is_one(fn) or is_one(getattr(type(fn), "__call__", None)):  # noqa: B004
            raise TypeError(
                f"{api}: expected a function that has done its work when it returns, got {words}: later writes to"
                " the arguments would be missed; pass one that runs it to its end and returns a list"
            )


def may_hold(kind: type) -> bool:
    if kind in PLAIN:
        return False
    return issubclass(kind, BOXES + VIEWS + LATER) or dataclasses.is_dataclass(kind) or kind is functools.partial


def held(x: object, kinds: tuple[type, ...], depth: int = 0) -> Iterator[object]:
    if is_boxed(x):
        for item in x.flat:
            yield from held(item, kinds, depth + 1)
    elif isinstance(x, kinds):
        yield x
    elif isinstance(x, VIEWS):
        yield from shown(x)
    elif depth < DEEPEST and may_hold(type(x)) and not isinstance(x, LATER):
        for item in items_of(x):
            yield from held(item, kinds, depth + 1)


def is_boxed(x: object) -> TypeGuard[NDArray]:
    return isinstance(x, np.ndarray) and x.dtype.hasobject


#: Classes that show no memory of others.
QUIET: tuple[type, ...] = (int, float, complex, str, bytes, type(None), np.ndarray, np.generic, *BOXES, *LATER)


def shows(x: Any) -> bool:
    """Whether an object, no array of this library, exports memory: a bytearray, an
    array.array, a ctypes array, a tensor beside ndarrays.
    """
    if isinstance(x, VIEWS) or is_tensor(x):
        return True
    if isinstance(x, QUIET):
        return False
    if hasattr(type(x), "__dlpack__"):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


def meet(x: object, array: object) -> bool:
    """Whether an object that shows memory shows a byte of an array; False if that cannot be decided."""
    try:
        one = next(shown(x), None) if isinstance(x, VIEWS) else x
        return one is not None and bool(_core.overlap(one, array))
    except (TypeError, ValueError, BufferError):
        return False


def shown(x: object) -> Iterator[object]:
    """The array that a memoryview or `a.flat` shows."""
    try:
        base = x.base if isinstance(x, (np.flatiter, np.void)) else np.asarray(x)
        if base is not None:
            yield base
    except (ValueError, TypeError):
        return  # released, or of a format that NumPy does not support


def items_of(x: object) -> Iterable[object]:
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    attributes = list(vars(x).values()) if hasattr(x, "__dict__") else []
    if dataclasses.is_dataclass(x):
        attributes += [getattr(x, f.name, None) for f in dataclasses.fields(x)]
    if isinstance(x, Mapping):
        attributes += list(x.values())
    elif isinstance(x, BOXES):
        attributes += list(x)
    return attributes


def check_argument(x: object, name: Callable[[], str], kinds: tuple[type, ...]) -> None:
    """TypeError for an argument of a class of `may_hold` that holds an array; a memoryview is a buffer of its
    own kind, and passed on.
    """
    if isinstance(x, VIEWS):
        return
    if isinstance(x, LATER):
        raise TypeError(f"{name()}: expected arrays in lists, tuples and dicts, got {type_of(x)}: pass list(x)")
    if (array := next(held(x, kinds), None)) is not None:
        raise TypeError(
            f"{name()}: expected arrays in lists, tuples, named tuples and dicts, got {type_of(x)} that holds"
            f" {type_of(array)}: pass the arrays themselves, and make the other of them inside"
        )


def check_result(x: object, name: str, kinds: tuple[type, ...], is_private: Callable[[object], bool]) -> None:
    """TypeError for a part of a result, no array itself, that holds memory of an input, or runs later."""
    if isinstance(x, LATER):
        raise TypeError(
            f"{name} is {type_of(x)}: expected a result that is there when the function returns; return a list of it"
        )
    if any(is_private(array) for array in held(x, kinds)):
        raise TypeError(
            f"{name} is {type_of(x)} that holds memory of an input: expected arrays in lists, tuples, named"
            " tuples and dicts; return the arrays, and make the other of them outside"
        )


# Calls


def array_kinds() -> tuple[type, ...]:
    """The classes of which an argument is an array."""
    tensor = attribute("torch", "Tensor")  # where torch is not imported, there is no tensor
    return (np.ndarray,) if tensor is None else (np.ndarray, tensor)


@dataclass(frozen=True)
class Call:
    """A call's arguments, flattened.

    `leaves`: all of them, in the order in which they are read, those of keyword arguments by their names at the end.
    `form`: the tree that they were in. `index`: for each leaf the number of its array among `arrays`, or None where it
    is no array. `first`: for each array its first leaf.
    """

    leaves: list[Any]
    form: trees.Form
    index: list[int | None]
    arrays: list[Any]
    first: list[int]
    order: tuple[str, ...]  #: the arguments by name, as they were given
    tensors: bool = False  #: the arrays are torch's
    descs: tuple[AOTInput, ...] | None = None  #: what each leaf is, where the caller gave it

    def desc(self, leaf: int) -> AOTInput:
        return PlainAOTInput(leaf) if self.descs is None else self.descs[leaf]

    def name(self, array: int) -> str:
        """An array's name in messages: the descriptor of its first leaf, and its path if that differs."""
        return self.leaf_name(self.first[array])

    def leaf_name(self, leaf: int) -> str:
        short = self.desc(leaf).expr()
        path = self.paths[leaf]
        return short if short == path else f"{short} (at {path})"

    def copied(self, given: trees.Arguments, leaves: Sequence[object]) -> trees.Arguments:
        """The arguments that were given, with other leaves."""
        args, named = given
        tree = args, {k: named[k] for k in sorted(named)}
        args, kwargs = cast(trees.Arguments, trees.copied(tree, self.form, iter(leaves)))
        return args, {k: kwargs[k] for k in self.order}

    @functools.cached_property
    def paths(self) -> list[str]:
        args, kwargs = self.form.inner
        return trees.paths(args, "args") + trees.paths(kwargs, "kwargs")


def call_of(args: tuple[object, ...], kwargs: dict[str, object], api: str) -> Call:
    """Flatten a call. TypeError for arrays of more than one library."""
    leaves: list[object] = []
    form = trees.flatten_call(args, kwargs, leaves)
    index: list[int | None] = []
    arrays: list[object] = []
    first: list[int] = []
    known: dict[int, int] = {}
    kinds, tensors = array_kinds(), 0
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, kinds):
            index.append(None)
            continue
        number = known.setdefault(id(leaf), len(arrays))
        if number == len(arrays):
            arrays.append(leaf)
            first.append(i)
            tensors += not isinstance(leaf, np.ndarray)
        index.append(number)
    call = Call(leaves, form, index, arrays, first, tuple(kwargs), tensors > 0)
    if tensors not in (0, len(arrays)):
        other = next(u for u, a in enumerate(arrays) if isinstance(a, np.ndarray) != isinstance(arrays[0], np.ndarray))
        words = [f"{call.name(u)} is {type_of(arrays[u])}" for u in (0, other)]
        raise TypeError(f"{api}: expected arrays of one library, but {words[0]} and {words[1]}")
    return call


def check_given(given: object, what: str, api: str) -> tuple[object, ...]:
    """The arguments that were given as a sequence. TypeError for what is none: a bare array, a number, a dict."""
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            f"{api}: {what}: expected a list or tuple of the function's arguments, got {type_of(given)}: one"
            " argument is [x]"
        )
    return tuple(given)


def check_keywords(given: object, what: str, api: str) -> dict[str, object]:
    """The arguments by name that were given as a dict, or None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{api}: {what}: expected a dict of the function's arguments, got {type_of(given)}")
    return dict(given)


def check_arrays(call: Call, check: Callable[[Any, Callable[[], str]], None], api: str, alone: bool = True) -> None:
    """What `check` raises for an array that cannot be rebuilt from its bytes, named by descriptor; TypeError for a leaf
    that holds arrays out of sight, or, with `alone`, shows memory of one.
    """
    kinds = array_kinds()
    for i, (leaf, u) in enumerate(zip(call.leaves, call.index, strict=True)):
        if u is None:
            if may_hold(type(leaf)):
                check_argument(leaf, lambda i=i: f"{api}: {call.leaf_name(i)}", kinds)  # type: ignore[misc]
            for number, array in enumerate(call.arrays if alone and shows(leaf) else ()):
                if meet(leaf, array):
                    raise TypeError(
                        f"{api}: {call.leaf_name(i)} shares memory with {call.name(number)}, and is a"
                        f" {type(leaf).__name__}: writes to it would take effect at once; pass an array that shows it"
                    )
    for number, array in enumerate(call.arrays):
        check(array, lambda number=number: f"{api}: {call.name(number)}")  # type: ignore[misc]


def check_signature(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], api: str) -> None:
    """TypeError for arguments that the function does not take, naming the first by descriptor; before anything
    has run.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # a C function without a signature raises its own error
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        takes = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
        called = getattr(fn, "__name__", repr(fn))
        if len(args) > len(takes) and not rest:
            leaves: list[object] = []
            trees.flatten(args[: len(takes)], leaves)
            extra = PlainAOTInput(len(leaves)).expr()
            raise TypeError(
                f"{api}: {called}{signature} takes {counted(len(takes), 'positional argument')}, got {len(args)}:"
                f" {extra} is the first without a parameter"
            ) from None
        raise TypeError(f"{api}: {called}{signature}: {e}") from None


# What a run did


@dataclass(frozen=True)
class Place:
    """Where one output lies after a run.

    `kind`: "plain" for what is no array or has memory of its own that no other output shows; "input" for the very
    object that came in; "view" for a view of the memory of an input, whose number is `base`; "output" and "shared" for
    a view of memory of its own that is output `base` or the extra base number `base`. `offset`: bytes from the base's
    lowest byte (for "view", from that of its group) to the first element. `same_as`: an earlier output that is the very
    same object.
    """

    kind: str = "plain"
    base: int = -1
    offset: int = 0
    geometry: Geometry | None = None
    writeable: bool = True
    own: bool = True  #: a plain array that owns its memory, or no array
    same_as: int | None = None
    array: bool = False
    cls: type | None = None  #: the class of a view that is no plain ndarray


@dataclass(frozen=True)
class Outcome:
    """What a run did: which groups it wrote, whose geometry it changed, where its outputs lie, in which form
    they came.
    """

    written: frozenset[int]
    geometry: tuple[tuple[int, Geometry], ...]
    resized: tuple[int, ...]
    flags: tuple[tuple[int, bool], ...]  #: which arrays may be written now and could not before, or the other way round
    form: trees.Spec
    places: tuple[Place, ...]
    bases: tuple[Geometry, ...]  #: of the extra bases


def outcome_of(run: RunArrays, result: object, outputs: list[object], bases: list[Array]) -> Outcome:
    """Collect everything that a run touched. `outputs` is filled with the result's leaves, `bases` with the extra bases
    that several outputs share.
    """
    form = trees.flatten(result, outputs)
    resized = tuple(u for g in sorted(run.resized) for u in run.plan.groups[g].numbers)
    geometry = tuple((u, run.geometry(run.arrays[u])) for u in run.moved)
    flags = tuple((u, run.arrays[u].flags.writeable) for u in run.flags_changed)
    places = tuple(places_of(run, outputs, bases))
    shared = tuple(Geometry.of(b) for b in bases)
    return Outcome(frozenset(run.written), geometry, resized, flags, form, places, shared)


def places_of(run: RunArrays, outputs: Sequence[object], bases: list[Array]) -> list[Place]:
    inputs = {id(p): u for u, p in enumerate(run.arrays)}
    first_seen: dict[int, int] = {}
    places: list[Place | None] = []
    own: dict[int, list[int]] = {}  # outputs by their memory
    for j, o in enumerate(outputs):
        itself = o.base if is_stripped(o) and id(o.base) in inputs else o
        same_as = first_seen.setdefault(id(itself), j) if run.is_array(o) else j
        twin = None if same_as == j else same_as
        if not run.is_array(o):
            places.append(Place())
        elif id(itself) in inputs:
            places.append(Place("input", inputs[id(itself)], array=True, same_as=twin))
        else:
            number = run.group_at(o)
            if number is not None:
                group, geometry = run.plan.groups[number], run.geometry(o)
                offset = run.begin(o) - run.lows[number]
                down, up = geometry.reach()
                base = getattr(o, "fanin_origin", None)  # the input that it was made from, where tracking recorded that
                if base not in group.numbers:
                    base = group.nearest(offset + down, offset + up).number
                writeable = o.flags.writeable if isinstance(o, np.ndarray) else True
                places.append(Place("view", base, offset, geometry, writeable, False, twin, True))
            elif isinstance(o, np.ndarray):
                link: object = o  # views of the same memory have one end of their chains of bases
                while isinstance(link, np.ndarray) and link.base is not None:
                    link = link.base
                while isinstance(link, memoryview) and link.obj is not None:
                    link = link.obj
                own.setdefault(id(link), []).append(j)
                places.append(None)
            else:
                places.append(Place(array=True))
    for shared in own.values():
        share(outputs, shared, places, bases)
    return [
        p if type(o) not in REMADE or p.kind in ("plain", "input") else dataclasses.replace(p, cls=type(o))
        for o, p in zip(outputs, places, strict=True)
        if p is not None
    ]


def is_stripped(o: object) -> TypeGuard[Array]:
    """Whether an output is an array of a private class without its class: NumPy makes it of that where it would have
    handed on the array itself.
    """
    return (
        type(o) is np.ndarray
        and isinstance(o.base, np.ndarray)
        and type(o.base) is not np.ndarray
        and (address(o) == address(o.base) and Geometry.of(o).fits(o.base))
    )


def share(outputs: Sequence[object], shared: list[int], places: list[Place | None], bases: list[Array]) -> None:
    """The places of outputs in one piece of memory that is no input's."""
    lying = {j: o for j in shared if isinstance(o := outputs[j], np.ndarray)}  # all of them
    distinct: dict[int, int] = {}
    for j, o in lying.items():
        distinct.setdefault(id(o), j)
    root = root_of(lying[shared[0]])
    kind, base, at = "plain", -1, root
    if len(distinct) > 1 or len(shared) > 1:
        if id(root) in distinct:
            kind, base = "output", distinct[id(root)]
        elif len(distinct) == 1:
            kind, base, at = "output", shared[0], lying[shared[0]]
        else:
            kind, base = "shared", len(bases)
            bases.append(root)
    start = address(at) + Geometry.of(at).reach()[0]
    for j, o in lying.items():
        first = distinct[id(o)]
        twin = None if first == j else first
        if kind == "plain" or (j == base and kind == "output"):
            places[j] = Place(own=o.base is None, geometry=Geometry.of(o), writeable=o.flags.writeable, array=True)
        else:
            places[j] = Place(kind, base, address(o) - start, Geometry.of(o), o.flags.writeable, False, twin, True)


# Two runs compared


@dataclass(frozen=True)
class Behaviour:
    """What of a run is compared with the recorded one.

    `written`: arrays of which a byte changed; of the recorded run, all that may be written. `after`: geometry, and what
    else changed, by array. `roles`: for each output what of its place is compared, other fields have their defaults;
    the base of a view is the first array of its group; None: not compared.
    """

    written: Set[int]
    after: Mapping[int, object]
    form: trees.Spec
    roles: Sequence[Place | None]


def behaviour_of(outcome: Outcome, written: Set[int], roles: Sequence[Place | None]) -> Behaviour:
    """Make the compared part of an outcome, with `written` and `roles`."""
    geometry, flags = dict(outcome.geometry), dict(outcome.flags)
    numbers = {*geometry, *flags, *outcome.resized}
    after = {u: (geometry.get(u), flags.get(u), u in outcome.resized) for u in numbers}
    return Behaviour(written, after, outcome.form, roles)


def deviation(
    recorded: Behaviour, now: Behaviour, first: Sequence[int]
) -> tuple[str, AOTInput | AOTOutput | None] | None:
    """The first difference of a run from the recorded one, in words, and the slot, where it is one slot's. `first`: the
    first leaf of each array.
    """
    for u in sorted(now.written - recorded.written):
        slot = PlainAOTInput(first[u])
        return f"{slot.expr()} is written by this call, and was not by the recorded one", slot
    for u in sorted({*recorded.after, *now.after}):
        if recorded.after.get(u) != now.after.get(u):
            slot = PlainAOTInput(first[u])
            return f"{slot.expr()} has another geometry after this call than after the recorded one", slot
    if recorded.form != now.form:
        return "the result is another tree than at the recorded call", None
    for j, (was, role) in enumerate(zip(recorded.roles, now.roles, strict=True)):
        if was is not None and role is not None and was != role:
            output, expected, found = PlainAOTOutput(j), role_words(was, first), role_words(role, first)
            found = found if found != expected else f"another {found.removeprefix('a ')}"
            return f"{output.expr()} is {found}, otherwise than at the recorded call ({expected})", output
    return None


def role_words(role: Place, first: Sequence[int]) -> str:
    if role.kind in ("input", "view"):
        name = PlainAOTInput(first[role.base]).expr()
        return name if role.kind == "input" else f"a view of {name}"
    if role.kind == "output":
        return f"a view of {PlainAOTOutput(role.base).expr()}"
    return "a view that shares its memory with other outputs" if role.kind == "shared" else "a value of its own"


# Back to the caller


def check_outputs(run: RunArrays, outputs: Sequence[object], api: str) -> None:
    """TypeError for an output on an input's memory that cannot be made anew there."""
    for j, o in enumerate(outputs):
        if run.is_array(o) and not run.remakeable(o) and run.group_at(o) is not None:
            raise TypeError(
                f"{api}: {PlainAOTOutput(j).expr()} is {type_of(o)} on the memory of an input: expected a plain"
                " array there; return the array, and make the other of it outside"
            )


def check_hidden(run: RunArrays, outputs: Sequence[object], api: str) -> None:
    """TypeError for a leaf of a result that hides memory of an input."""
    kinds = array_kinds()
    for j, o in enumerate(outputs):
        if shows(o) and any(meet(o, a) for a in run.arrays):
            raise TypeError(
                f"{api}: {PlainAOTOutput(j).expr()} is {type_of(o)} that holds memory of an input:"
                " expected arrays of the library that the arguments are of"
            )
        if not may_hold(type(o)) and not is_boxed(o):
            continue
        check_result(
            o,
            f"{api}: {PlainAOTOutput(j).expr()}",
            kinds,
            lambda array: run.group_at(array) is not None,
        )
