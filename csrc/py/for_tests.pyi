"""Functions of a development build for tests/kit/hooks.py (py/module/for_tests.c, py/sim/machine_tests.c).

A release has none of them.
"""

from collections.abc import Sequence

from fanin import Stream

# for_tests.c
def _test_auto_budget(alone: int | None = None, held: int | None = None, /) -> tuple[int, int]:
    """Set other limits than those of budget="auto", of buffers made from now on; without arguments the usual ones.
    Returns the limits.
    """

def _test_fail_at(skip: int, count: int = 1, /) -> None:
    """Let `skip` allocations pass and fail the `count` after them (-1: all); skip -1: off."""

def _test_memory() -> tuple[int, int, int]:
    """Blocks alive, allocations ever, allocations refused."""

def _test_tensor_throws() -> int:
    """Tensors for which the exchange table threw."""

def _test_helpers() -> int:
    """The number of helper threads for large sums."""

def _test_fault(name: str | None, /) -> None:
    """Plant the fault of that name (base/fault.h); None: none."""

def _test_sort_bounds(entries: int, rows: int, /) -> None:
    """Let the driver in use sort at most so many entries of COO data at a time, of so many rows."""

def _test_pass_end(caller: Stream, streams: Sequence[Stream], values: Sequence[object], /) -> None:  # step
    """The end of a pass (S20): `caller` waits for each of `streams`, and `values` are used on it."""

# machine_tests.c
def _test_unsound(machine: object, /) -> int:  # step
    """Waits left out whose order did not hold: must be 0."""

def _test_unsafe(machine: object, /) -> None:  # step
    """Make a call that CUDA forbids beside a capture."""

def _test_fail_call(machine: object, index: int, memory: bool = False, /) -> None:
    """Fail the backend's call number `index` from now, once; below 0: none."""

def _test_capture_state(stream: Stream, /) -> int:  # step
    """0: not captured, 1: captured, 2: the capture is broken."""
