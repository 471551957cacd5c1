"""Groups end: they leave nothing with atexit, and an engine learns whether that was an error."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from fanin import dist
from fanin.dist.group import Group
from kit.prepared import run_prepared

pytestmark = pytest.mark.core


class Alone:
    """An engine of one rank that lists what a group calls at its end."""

    rank, size, name = 0, 1, "alone"

    def __init__(self) -> None:
        self.ends: list[str] = []

    def abort(self, reason: str) -> None:
        self.ends.append(f"abort: {reason}")

    def close(self) -> None:
        self.ends.append("close")


class Retires(Alone):
    def retire(self, reason: str) -> None:
        self.ends.append(f"retire: {reason}")


def entry(group: Group) -> Any:
    """A weak reference to what atexit has of a group."""
    found = group._no_exit.peek()
    assert found is not None
    return weakref.ref(found[2][0])


def test_groups_leave_no_entry_with_atexit() -> None:
    entries = dist.threads(2, entry, timeout=None)
    closed, lost = Group(Alone(), timeout=None), Group(Alone(), timeout=None)  # type: ignore[arg-type]
    entries += [entry(closed), entry(lost)]
    assert entries[-1]() is not None, "atexit has it"
    closed.close()
    del lost
    gc.collect()
    assert [one() for one in entries] == [None] * 4


@pytest.mark.parametrize("engine", [Alone, Retires])
def test_an_engine_is_aborted_at_an_error_and_retires_without_one(engine: Any) -> None:
    with Group(engine(), timeout=None) as closed:
        pass
    failed = Group(engine(), timeout=None)
    with pytest.raises(ValueError, match="spilt"), failed:
        raise ValueError("spilt")
    word = "retire" if engine is Retires else "abort"
    assert closed._engine.ends == [f"{word}: rank 0 closed its group before a pass", "close"]  # type: ignore[attr-defined]
    told = "abort: rank 0 failed: ValueError: spilt before a pass"
    assert failed._engine.ends == [told, "close"]  # type: ignore[attr-defined]


AT_EXIT = """
from dist.test_ends_of_groups import Group, Retires
class Prints(Retires):
    def retire(self, reason):
        print("retire:", reason)
    def abort(self, reason):
        print("abort:", reason)
group = Group(Prints(), timeout=None)
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [("", "retire: rank 0 ended before a pass"), ("1 / 0", "abort: rank 0 ended before a pass: ZeroDivisionError")],
)
def test_the_end_of_python_tells_the_engine_of_an_open_group(end: str, told: str) -> None:
    done = run_prepared(AT_EXIT + end, check=False)
    assert done.stdout.startswith(told) and bool(done.returncode) == bool(end), done
