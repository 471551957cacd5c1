"""Test hooks of a development build of the core: count its memory, make allocations fail, plant faults.

A release has no hooks: it skips the tests that need them, with that reason. `.ci/run development` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

import fanin
from fanin import _core

if TYPE_CHECKING:
    from fanin.sim import Machine

#: Whether the library under test is a development build (FANIN_DEV=1, or sanitized).
DEVELOPMENT = hasattr(_core, "_test_fault")


def _hook(name: str) -> Any:
    if not DEVELOPMENT:
        pytest.skip(f"{name}: in development builds alone: FANIN_DEV=1")
    return getattr(_core, f"_test_{name}")


def memory() -> tuple[int, int, int]:
    """Blocks of the core's memory that are alive, allocations ever, allocations refused."""
    return _hook("memory")()  # type: ignore[no-any-return]


def blocks() -> int:
    """Blocks of the core's memory that are alive; 0 in a release, which does not count them."""
    return memory()[0] if DEVELOPMENT else 0


def fail_at(skip: int, count: int = 1) -> None:
    """Lets `skip` allocations pass and fails the `count` after them (-1: all); skip -1: off."""
    _hook("fail_at")(skip, count)


def tensor_throws() -> int:
    """torch tensors for which torch's exchange table threw, which takes milliseconds."""
    return _hook("tensor_throws")()  # type: ignore[no-any-return]


class Attempt:
    """`with attempt:` runs its block while one allocation fails; a MemoryError ends the block and is recorded."""

    def __init__(self, n: int) -> None:
        self.n, self.failed = n, False

    def __enter__(self) -> None:
        fail_at(self.n)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        fail_at(-1)
        self.failed = kind is not None and issubclass(kind, MemoryError)
        return self.failed


def attempts(well: int = 1, limit: int = 4000) -> Iterator[Attempt]:
    """The first allocation fails, the second ..: until so many attempts went well."""
    for n in range(limit):
        attempt = Attempt(n)
        yield attempt
        well -= not attempt.failed
        if not well:
            return
    raise AssertionError(f"after {limit} attempts allocations still fail")


def auto_budget(*limits: int) -> tuple[int, int]:
    """Other limits than those of budget="auto", alone and held, for buffers made from now on; none: those again.

    Gives the limits.
    """
    return _hook("auto_budget")(*limits)  # type: ignore[no-any-return]


def fault(name: str | None) -> None:
    """Plants a fault of base/fault.h; None takes it away."""
    if name is not None or DEVELOPMENT:
        _hook("fault")(name)


# The simulated machine


def unsound(machine: Machine) -> int:
    """Omitted waits whose order did not hold: must be 0; always 0 in a release, which does not count them."""
    return int(_hook("unsound")(machine)) if DEVELOPMENT else 0


def fail_call(machine: Machine, index: int, memory: bool = False) -> None:
    """The device's call number `index` from now fails, once, of a device or for want of its memory; below 0: none."""
    _hook("fail_call")(machine, index, memory)


def sort_bounds(entries: int, rows: int) -> None:
    """The CUDA driver in use sorts at most so many entries of COO data at a time, of so many rows."""
    _hook("sort_bounds")(entries, rows)


def unsafe(machine: Machine) -> None:
    """A call that CUDA forbids beside a capture."""
    _hook("unsafe")(machine)


def pass_end(caller: fanin.Stream, streams: Sequence[fanin.Stream], values: Sequence[object]) -> None:
    """The end of a pass (S20), by itself: `caller` waits for each of `streams`, and `values` are used on it."""
    _hook("pass_end")(caller, streams, values)


def capture_state(stream: fanin.Stream) -> int:
    """0: not captured; 1: captured; 2: in a capture that is broken."""
    return int(_hook("capture_state")(stream))
