"""Ranks as threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fanin._interop.protocols import NDArray
from fanin.errors import PeerError

from .group import Group, seconds, set_default

T = TypeVar("T")


@dataclass
class _Meeting:
    """One operation: what each rank brought, and how many ranks have read all of it."""

    posted: dict[int, Any] = field(default_factory=dict)
    done: int = 0


class _World:
    """State that the ranks share: the operations in progress, by number, and the ranks that have ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}
        self.gone: dict[int, str] = {}

    def leave(self, rank: int, reason: str) -> None:
        with self.changed:
            self.gone.setdefault(rank, reason)
            self.changed.notify_all()

    def until(self, rank: int, holds: Callable[[], bool], missing: Callable[[], list[int]], timeout: float) -> None:
        """Let a rank wait until `holds()`, under the lock. `missing()`: the ranks on which that depends."""
        end = time.monotonic() + timeout
        while not holds():
            late = missing()
            for r in (*late, rank):  # another thread of this rank may have ended it
                if r in self.gone:
                    raise PeerError(f"rank {r} {self.gone[r]}", r)
            if not self.changed.wait(min(end - time.monotonic(), threading.TIMEOUT_MAX)) and not holds():
                ranks = ", ".join(map(str, late))
                raise TimeoutError(f"rank {ranks} did not answer" if len(late) == 1 else f"no answer of ranks {ranks}")


class _Operation:
    """One rank's part of an operation; `read` copies from what all ranks have posted."""

    def __init__(self, engine: ThreadEngine, value: Any, read: Callable[[dict[int, Any]], Any]) -> None:
        self.world, self.rank, self.read = engine.world, engine.rank, read
        self.number, engine.started = engine.started, engine.started + 1
        with self.world.changed:
            self.meeting = self.world.meetings.setdefault(self.number, _Meeting())
            self.meeting.posted[engine.rank] = value
            self.world.changed.notify_all()

    def wait(self, timeout: float) -> Any:
        world, posted = self.world, self.meeting.posted
        with world.changed:
            everyone = range(world.size)
            absent = lambda: [r for r in everyone if r not in posted]  # noqa: E731
            world.until(self.rank, lambda: len(posted) == world.size, absent, timeout)
        result = self.read(posted)
        with world.changed:
            self.meeting.done += 1
            world.changed.notify_all()
            # A sender may write into its message once all ranks have copied it.
            world.until(self.rank, lambda: self.meeting.done == world.size, lambda: list(world.gone), timeout)
            world.meetings.pop(self.number, None)
        return result


def _offsets(counts: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(np.asarray(counts, np.int64)).tolist()]


class ThreadEngine:
    """An engine whose ranks are threads (fanin.dist.threads)."""

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.size, self.name = world, rank, world.size, f"{world.size} threads"
        self.started = 0

    def exchange(self, data: bytes) -> _Operation:
        return _Operation(self, data, lambda posted: [posted[r] for r in range(self.size)])

    def all_to_all(
        self, send: NDArray, send_counts: Sequence[int], receive: NDArray, receive_counts: Sequence[int]
    ) -> _Operation:
        def read(posted: dict[int, tuple[NDArray, list[int]]]) -> None:
            at = _offsets(receive_counts)
            for rank in range(self.size):
                if rank != self.rank:
                    sent, offsets = posted[rank]
                    receive[at[rank] : at[rank + 1]] = sent[offsets[self.rank] : offsets[self.rank + 1]]

        return _Operation(self, (send, _offsets(send_counts)), read)

    def all_gather(self, whole: NDArray, counts: Sequence[int]) -> _Operation:
        at = _offsets(counts)

        def read(posted: dict[int, NDArray]) -> None:
            for rank in range(self.size):
                if rank != self.rank:
                    whole[at[rank] : at[rank + 1]] = posted[rank][at[rank] : at[rank + 1]]

        return _Operation(self, whole, read)

    def abort(self, reason: str) -> None:
        self.world.leave(self.rank, reason.removeprefix(f"rank {self.rank} "))

    def close(self) -> None:
        self.world.leave(self.rank, "closed its group")


def threads(n: int, fn: Callable[[Group], T], *, timeout: float = 300.0) -> list[T]:
    """Call `fn(group)` on `n` ranks, each a thread of this process, and return what each rank returned.

    Inside, `fanin.dist.group()` is the rank's group.

    Parameters
    ----------
    n : int
        The number of ranks.
    fn : callable
        Called once on each rank.
    timeout : float
        Seconds after which a rank no longer waits for another.

    Raises
    ------
    TypeError, ValueError
        If `n` or `timeout` is not positive.
    Exception
        The exception of the first rank that failed by itself; the others then have `fanin.PeerError`.

    >>> fanin.dist.threads(4, lambda group: group.rank)
    [0, 1, 2, 3]
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"threads: expected a positive number of ranks, got {n!r}")
    seconds("threads", timeout)
    world = _World(n)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        reason = "has returned"
        try:
            with Group(ThreadEngine(world, rank), timeout=timeout) as group:
                set_default(group)
                results[rank] = fn(group)
        except BaseException as e:
            errors[rank] = e
            reason = f"failed: {type(e).__name__}: {e}"
        world.leave(rank, reason)

    ranks = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(n)]
    try:
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    except BaseException as e:
        for rank in range(n):
            world.leave(rank, f"was ended: {type(e).__name__}")
        raise
    if errors:
        first = min(errors, key=lambda rank: (isinstance(errors[rank], PeerError), rank))
        errors[first].add_note(f"on rank {first} of {n}")
        raise errors[first]
    return results
