"""`functionalize` beside the function itself."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

#: Asked for its names, so that planted faults are met.
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
