"""Outcomes of calls, options and keys of functions, and figures of graph trees."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import CodeType, MethodType, ModuleType
from typing import cast

import numpy as np

from .._checks import integer, sequence
from .._keys import ArrayInside, exactly
from ..errors import CaptureError

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call of a tree's function, and the reason.

    `did` is "warmed", "recorded", "replayed" or "raw" (not recorded); `reason` a sentence, None for a replay; `node`
    the number of the recording, if there is one; `rules` the rules of docs/graph-trees.md that decided.
    """

    did: str
    reason: str | None
    node: int | None
    rules: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphStats:
    """Figures of a tree: its recordings, the bytes of its memory (in all, in use, the most ever used), its calls, and
    the bytes that the device's driver took for the recordings, beside the tree's memory."""

    nodes: int
    bytes: int
    in_use: int
    high_water: int
    warmed: int
    recorded: int
    replayed: int
    raw: int
    restored: int
    driver_bytes: int = 0


@dataclass(frozen=True)
class FunctionStats:
    """Figures of one function of a tree: its calls by their outcome, and its recordings."""

    warmed: int
    recorded: int
    replayed: int
    raw: int
    nodes: int


@dataclass(frozen=True)
class Recording:
    """A recording of a tree.

    `parent` is the number of the recording before it on its path, None at the root; `owns` the bytes of its outputs;
    `reaches` the end of the memory that it uses; `kernels` how many kernels, copies and fills a replay runs; `current`
    whether it is on the path; `memory` the pieces (from, to, as an output) of the tree's memory that it uses.
    """

    node: int
    parent: int | None
    function: str
    owns: int
    reaches: int
    replays: int
    kernels: int
    current: bool
    memory: tuple[tuple[int, int, bool], ...]

    def to_dict(self) -> dict[str, object]:
        """The same as a dict of numbers, texts and lists, for JSON."""
        made = asdict(self)
        made["memory"] = [list(piece) for piece in self.memory]
        return made


def recordings(
    rows: Iterable[tuple[int, int, str, int, int, int, bool, int]], memory: Iterable[tuple[int, int, int, bool]]
) -> list[Recording]:
    """GraphTree.recordings."""
    pieces: dict[int, list[tuple[int, int, bool]]] = {}
    for node, low, high, owned in memory:
        pieces.setdefault(node, []).append((low, high, owned))
    return [
        Recording(
            node=node,
            parent=None if parent < 0 else parent,
            function=function,
            owns=owns,
            reaches=reaches,
            replays=replays,
            kernels=kernels,
            current=current,
            memory=tuple(pieces.get(node, ())),
        )
        for node, parent, function, owns, reaches, replays, current, kernels in rows
    ]


# ---- functions

ROLES = ("auto", "copy", "static", "accumulate")
#: In the order of fan_tree_outcome.
DID = {
    "warmed": "was warmed up", "recorded": "was recorded", "replayed": "was replayed",
    "raw": "ran without a recording", "failed": "failed",
}  # fmt: skip


def outcome(did: int, reason: str | None, node: int, rules: int) -> Outcome:
    """GraphFunction.last. `rules`: a bit for each."""
    names = tuple([f"T{i + 1}" for i in range(rules.bit_length()) if rules >> i & 1])
    return Outcome(list(DID)[did], reason, None if node < 0 else node, names)


def explained(name: str, last: Outcome | None) -> str:
    """GraphFunction.explain."""
    if last is None:
        return f"{name} has not been called yet"
    return f"{name} {DID[last.did]}{f': {last.reason}' if last.reason else ''} [{', '.join(last.rules)}]"


def options(roles: object, keep: object, only: object) -> tuple[bytes, bool, bytes | None, bytes, bool]:
    """The numbers of roles, whether each operand has one, which outputs are kept (None: all), the sizes, and whether
    held outputs are copied.
    """
    one = isinstance(roles, str)
    try:
        words = (roles,) if one else tuple(cast(Iterable[object], roles))
    except TypeError:
        raise TypeError(f"roles= is one word for all operands, or one for each, not {roles!r}") from None
    for word in words:
        if not isinstance(word, str) or word not in ROLES:
            raise ValueError(f'roles are "auto", "copy", "static" and "accumulate", not {word!r}')
    held = keep == "held" if isinstance(keep, str) else False
    which = kept_outputs(False if held else keep)
    numbers = bytes(ROLES.index(cast(str, word)) for word in words)
    return numbers, not one, which, sizes(only), held


def kept_outputs(keep: object) -> bytes | None:
    """keep= as a bool for each output, none of them where it is False; None: all are kept."""
    if keep is True:
        return None
    if keep is False:
        return b""
    kept = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else list(keep)
    if any(type(k) is not bool for k in kept):
        raise TypeError(f'keep= is True, False, or one of them for each output, or "held", not {keep!r}')
    return bytes(cast(list[bool], kept))


def sizes(only: object) -> bytes:
    """only= as an array of int64."""
    if only is None:
        return b""
    if isinstance(only, int | np.integer):
        raise TypeError(f"function: only= is a list of sizes, not a number: only=[{only}]")
    given = [integer(f"function: only[{i}]", x, 0) for i, x in enumerate(sequence("function: only", only, "sizes"))]
    if not given:
        raise ValueError("function: only= names no size: nothing would ever be recorded")
    if max(given) >= 1 << 63:
        raise ValueError(f"function: only: expected sizes below 2**63, got {max(given)}")
    return np.array(given, np.int64).tobytes()


def refused_write(name: str, error: ValueError) -> Exception:
    """The error for NumPy's write into an operand that only kernels may write; any other error as it is."""
    text = str(error)
    if "read-only" not in text or "writes[" in text:  # of an operand that nobody may write
        return error
    refused = CaptureError(
        f"{name}: {error}: no replay repeats what NumPy alone writes into an operand that stays in place: write into "
        "the array that the function gets, or in a kernel (tape.update(fn, reads, writes)), and only where it is "
        "writable"
    )
    refused.__cause__ = error
    return refused


class Keys:
    """Numbers of the values, besides arrays, that select a function's recording. The least recently used of 64 goes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: dict[object, int] = {}  # the one used last at the end
        self.count = itertools.count(1)

    def __call__(self, given: object, others: list[tuple[int, object]] | None) -> int:
        """`given`: by key=; `others`: operands that are no arrays, each with its place."""
        key = self.distinct(given), *[(i, self.distinct(x)) for i, x in others or ()]
        number = self.numbers.get(key)
        if number is None or len(self.numbers) > 32:
            self.numbers[key] = number = self.numbers.pop(key, None) or next(self.count)  # moves to the end
        if len(self.numbers) > 64:
            self.numbers.pop(next(iter(tuple(self.numbers))), None)
        return number

    def distinct(self, x: object) -> tuple[object, ...]:
        """A key that is equal only for values of the same type and bits."""
        try:
            return exactly(x)
        except ArrayInside as e:
            raise TypeError(
                f"{self.name}: arguments that are no operands select the recording by value, got a {e}, whose values"
                " may change: pass an array on the tree's device, or numbers"
            ) from None
        except Exception:
            raise TypeError(
                f"{self.name}: arguments that are no arrays, and the result of key=, select the recording, so they must"
                f" be hashable, got {x!r}"
            ) from None


# ---- verify=: what a function finds outside of its operands


def outside(fn: object) -> dict[str, str]:
    """The values that a function finds in its closure, its globals and its object, by name: as texts.

    Of random generators and arrays, which are long, the text is a digest of their state.
    """
    texts: dict[str, str] = {}
    for name, value in _found(getattr(fn, "__wrapped__", fn)):
        one = text_of(value)
        if one is not None:
            texts[name] = one
        elif not callable(value):  # an object: one level of its attributes
            for attribute, inner in getattr(value, "__dict__", {}).items():
                if (one := text_of(inner)) is not None:
                    texts[f"{name}.{attribute}"] = one
    return texts


def changed(fn: object, before: dict[str, str]) -> str:
    """The values that differ from those at the recording, as a clause; "" if none do."""
    now = outside(fn)
    names = [name for name in before if now.get(name, before[name]) != before[name]]
    names.sort(key=lambda name: before[name].startswith(_DIGESTS))  # numbers first: arrays may change for other reasons
    return ", ".join(_change(name, before[name], now[name]) for name in names[:3])


_RANDOM, _ARRAY = "random:", "array:"
_DIGESTS = (_RANDOM, _ARRAY)


def _change(name: str, was: str, is_now: str) -> str:
    if was.startswith(_RANDOM):
        return f"{name} has drawn random numbers since then"
    if was.startswith(_ARRAY):
        return f"the ndarray {name} has other values now"
    return f"{name} was {was[:60]} when it was recorded and is {is_now[:60]} now"


def _found(fn: object) -> Iterator[tuple[str, object]]:
    """Names and values: of the closure, and the globals that its code names, of functions in it too."""
    if isinstance(fn, MethodType):
        yield "self", fn.__self__
        fn = fn.__func__
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    if not isinstance(code, CodeType):
        yield from ((name, value) for name, value in vars(fn).items()) if hasattr(fn, "__dict__") else ()
        return
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty yet
            continue
    names = set(_names(code))
    for name in sorted(names & fn.__globals__.keys()):  # type: ignore[attr-defined]
        value = fn.__globals__[name]  # type: ignore[attr-defined]
        if not isinstance(value, ModuleType):
            yield name, value
            continue
        for inner in sorted(names & vars(value).keys()):
            if inner == "random" and value in (np, random):
                state: Callable[[], object] = np.random.get_state if value is np else random.getstate
                yield f"{name}.random" if value is np else name, _State(state())
            elif not isinstance(vars(value)[inner], ModuleType):
                yield f"{name}.{inner}", vars(value)[inner]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


@dataclass(frozen=True)
class _State:
    """Of a random generator."""

    state: object


def text_of(value: object) -> str | None:
    """A text that is another one where the value is; None for what is not made of numbers, texts and None."""
    if isinstance(value, np.random.Generator):
        value = _State(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        value = _State(value.get_state())
    elif isinstance(value, random.Random):
        value = _State(value.getstate())
    if isinstance(value, _State):
        return _RANDOM + hashlib.sha256(repr(value.state).encode()).hexdigest()
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else _ARRAY + hashlib.sha256(value.tobytes()).hexdigest()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return repr(value)
    if isinstance(value, list | tuple | dict) and len(value) <= 100:
        items = value.values() if isinstance(value, dict) else value
        return None if any(text_of(x) is None for x in items) else repr(value)
    return None
