"""Numbers and rules as words, for messages."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__tracebackhide__ = True  # no frames of ours in reports of pytest

P = ParamSpec("P")
R = TypeVar("R")

#: Arguments of other libraries, and ours of the same meaning.
ELSEWHERE = {"retain_graph": "keep_graph"}
_OF_PASSES = "weigh each pass, backward(.., weight=w), and divide .grad by the sum of the weights"
#: What divides, for the calls that people give `mean=`.
MEANS = {"Leaf": _OF_PASSES, "backward": _OF_PASSES, "add": "give it to take", "add_many": "give it to take"}
S_RULES = 22  # the first bits of a set of rules are S, the rest A


def counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def type_of(x: object) -> str:
    """The type of an object for messages: "an int", "a list", "None"."""
    if x is None:
        return "None"
    name = type(x).__name__
    article = "an" if name[:1] in "AEIOaeio" or name == "ndarray" else "a"
    return f"{article} {name}"


def note(e: BaseException, text: str) -> None:
    """Add a note to an exception, which may be one that is raised again and has it already."""
    if text not in getattr(e, "__notes__", ()):
        e.add_note(text)


def ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def rule_names(bits: int) -> tuple[str, ...]:
    """The rules of a set of bits, as ("S9", "A6")."""
    numbers = (i for i in range(64) if bits >> i & 1)
    return tuple(f"S{i + 1}" if i < S_RULES else f"A{i + 1 - S_RULES}" for i in numbers)


def rules_of(bits: int) -> str:
    """The same as text: "S9, A6"."""
    return ", ".join(rule_names(bits))


def size(n: float) -> str:
    """A number of bytes as text: "512 KiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.4g} {name}"
    return f"{n:.0f} B"


def changes(a: str, b: str) -> int:
    """How many letters must be changed, added or removed to make b of a."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(above[j - 1] if x == y else 1 + min(above[j - 1], above[j], row[-1]))
    return row[-1]


def unknown_argument(call: str, names: tuple[str, ...], by_place: int, name: str) -> str:
    """The message for an argument that a call of the core does not have, with a name near it."""
    if name == "mean" and call in MEANS:
        return f"{call}() has no argument 'mean': {MEANS[call]}"
    near = ELSEWHERE.get(name)
    if near not in names:
        least, near = min(((changes(name, one), one) for one in names), key=lambda pair: pair[0], default=(99, ""))
        if not name or len(name) > 31 or least >= (2 if len(name) < 4 else 3):
            near = None
    return f"{call}() has no argument '{name}'" + (f": did you mean '{near}'?" if near else "")


def too_many_arguments(call: str, names: tuple[str, ...], by_place: int, given: int) -> str:
    """The message for more arguments by position than a call of the core takes."""
    if not by_place:
        return f"{call}() takes {'arguments by name only' if names else 'no arguments'}, got {given} by position"
    if names[0] == "arrays" and by_place == 1:
        return f"{call}() takes its arrays as one sequence, got {given} arguments by position: {call}([a, b])"
    first = " and ".join(filter(None, [", ".join(names[: by_place - 1]), names[by_place - 1]]))
    rest = ", and the rest by name" if len(names) > by_place else ""
    return f"{call}() takes {first} by position{rest}; got {given} by position"


def names_nearest(f: Callable[P, R]) -> Callable[P, R]:
    """Name the nearest parameter in the error for an argument that `f` does not have, as calls of the core do.

    For functions with options that are called once a pass, or less often.
    """
    code = f.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = frozenset(names[code.co_posonlyargcount :])
    call = f.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

    @wraps(f)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in known:
                raise TypeError(unknown_argument(call, tuple(sorted(known - {"self", "cls"})), 0, name))
        return f(*args, **named)

    return checked


def printable(text: str) -> str:
    """The text on one line: each character that XML cannot hold, that ends a line or that steers a terminal as Python
    writes it: \\n, \\x1b.
    """
    if text.isprintable():
        return text
    return "".join(letter if is_shown(letter) else letter.encode("unicode_escape").decode() for letter in text)


def is_shown(letter: str) -> bool:
    if letter in "\u200c\u200d":  # they join or part the letters beside them
        return True
    return unicodedata.category(letter) not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp")
