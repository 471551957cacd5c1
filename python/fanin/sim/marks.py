"""Functions that are marked as scenarios, for `fanin check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar, overload

from .._words import type_of
from .explore import Scenario, explore

F = TypeVar("F", bound=Callable[..., object])


@overload
def scenario(fn: F, /) -> F: ...


@overload
def scenario(**options: object) -> Callable[[F], F]: ...


def scenario(fn: F | None = None, /, **options: object) -> F | Callable[[F], F]:
    """Mark a function of a Machine as a scenario, which `fanin check FILE.py` explores.

    `@scenario` alone, or with options of `explore`: `@scenario(limit=100)`.
    """

    unknown = sorted(options.keys() - (explore.__kwdefaults__ or {}).keys())
    if unknown:
        raise TypeError(
            f"scenario: explore has no option {unknown[0]!r}; it has {', '.join(explore.__kwdefaults__ or {})}"
        )

    def mark(f: F) -> F:
        if not callable(f) or not hasattr(f, "__dict__"):
            raise TypeError(f"scenario: expected a function of a Machine, got {type_of(f)}")
        f.__fanin_scenario__ = options  # type: ignore[attr-defined]
        return f

    return mark if fn is None else mark(fn)


def scenarios(module: ModuleType) -> Iterator[tuple[str, Scenario, dict[str, Any]]]:
    """(name, function, options) of each scenario that a module marks, in the order of its lines."""
    for name, value in list(vars(module).items()):
        options = getattr(value, "__fanin_scenario__", None)
        if isinstance(options, dict) and callable(value):
            yield name, value, options
