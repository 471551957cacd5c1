"""What a development build of the core lets tests do to it: count its memory, let allocations fail, plant faults.

A release has nothing of it: a test that asks is skipped there, and says so. `.ci/run development` runs them all.
"""

from __future__ import annotations

from typing import Any

import pytest

from fanin import _core

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


def auto_budget(*limits: int) -> None:
    """Other limits than those of budget="auto", alone and held, for buffers made from now on; none: those again."""
    _hook("auto_budget")(*limits)


def fault(name: str | None) -> None:
    """Plants a fault of base/fault.h; None takes it away."""
    _hook("fault")(name)
