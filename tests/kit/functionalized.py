"""`functionalize` beside the function itself."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

#: Names are read from the module at each use, so that a planted fault takes effect.
F = importlib.import_module("fanin.analysis.wrapper")


def itself(pure: Any) -> Any:
    return pure


def both(
    fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], calls: int = 2, **options: Any
) -> list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]]:
    """(result of fn, result of the wrapper, arguments of fn, arguments of the wrapper) of each of some calls."""
    wrapped = F.functionalize(fn, **options)
    found = []
    for _ in range(calls):
        one, two = make(), make()
        found.append((fn(*one), wrapped(*two), one, two))
    return found


@dataclasses.dataclass
class Held:
    array: Any


def checks_of(names: dict[str, Any]) -> list[Callable[[], None]]:
    """The rules that a file of tests states: its functions check_.., by name; pymutants runs them, too."""
    return [c for name, c in sorted(names.items()) if name.startswith("check_")]


def rule_of(check: Callable[[], None]) -> str:
    return check.__name__.removeprefix("check_")


#: The folder of the package.
PACKAGE = str(F.__file__).rpartition("wrapper")[0]


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Whether a call was interrupted at the instruction `at` of those that it runs in the package: Python runs signal
    handlers between instructions. False where it ran fewer.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        if count == at:
            count += 1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupts(
    fn: Callable[..., Any], make: Callable[[], list[Any]], facts: Callable[[Any], Any], points: Sequence[int]
) -> Counter[str]:
    """What the arguments of a compiled call are after an interrupt at each of some points."""
    f = F.functionalize(fn, compiler=itself)
    for _ in range(2):
        f(*make())
    before, args = list(map(facts, make())), make()
    fn(*args)
    after, seen = list(map(facts, args)), Counter[str]()
    for at in points:
        args = make()
        if not interrupted(functools.partial(f, *args), at):
            seen["ended"] += 1
            break
        now = list(map(facts, args))
        assert now in (before, after), (at, before, now, after)
        seen["untouched" if now == before else "whole"] += 1
    return seen
