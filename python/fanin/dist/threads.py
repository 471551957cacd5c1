"""Ranks as threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fanin import _core
from fanin._checks import function
from fanin._interop.protocols import NDArray
from fanin._threads import here
from fanin._words import names_nearest, note
from fanin.errors import PeerError
from fanin.streams import stream as on_stream

from .engine import Late, blamed, end_of, pieces
from .group import Group, get_default, nodes_of, seconds, set_default

__tracebackhide__ = True  # no frames of ours in reports of pytest

T = TypeVar("T")

LOOK = 0.05  #: seconds after which a rank that waits looks for ranks that have left


class World:
    """State that ranks share. Each number grows by one rank's doing alone, so waits are all that orders ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: What each rank brought to its operations that are not over.
        self.outbox: list[dict[int, Any]] = [{} for _ in range(size)]
        #: How many operations each rank has begun ..
        self.begun = [_core.EventCount() for _ in range(size)]
        #: .. and how many of rank r's messages rank s has copied: copied[r][s].
        self.copied = [[_core.EventCount() for _ in range(size)] for _ in range(size)]
        self.gone: dict[int, str] = {}  #: why ranks have left, in their order
        self.ended: dict[int, bool] = {}  #: those of them that call nothing more
        self.texts: dict[str, str] = {}  #: what survivors agree on
        self.changes = _core.EventCount()  #: of both
        self.next: dict[int, World] = {}  #: of the survivors, by attempt

    def end(self, rank: int) -> None:
        self.ended[rank] = True
        self.changes.advance()

    def leave(self, rank: int, reason: str) -> None:
        self.gone.setdefault(rank, reason)
        self.begun[rank].end()
        for mine in self.copied:
            mine[rank].end()

    def until(self, rank: int, waits: Sequence[tuple[int, _core.EventCount]], n: int, end: float) -> None:
        """Let a rank wait until the number of each other one is `n`; PeerError if one has left before, or the rank
        itself by another of its threads; TimeoutError at `end`.
        """
        for other, count in waits:
            while not count.wait(n, min(LOOK, end - time.monotonic())):
                late = [r for r, c in waits if c.value < n]
                for left, reason in list(self.gone.items()):
                    if left in late or left == rank:
                        raise blamed(reason, left)
                if other in late and time.monotonic() >= end:
                    raise Late(late)


class _Operation:
    """One rank's part of an operation; `read` copies from what all ranks have brought."""

    def __init__(self, engine: ThreadEngine, value: Any, read: Callable[[list[Any]], Any]) -> None:
        self.world, self.rank, self.read = engine.world, engine.rank, read
        self.number, engine.started = engine.started, engine.started + 1
        self.world.outbox[self.rank][self.number] = value
        self.world.begun[self.rank].advance()

    def wait(self, timeout: float | None) -> Any:
        world, mine, number = self.world, self.rank, self.number
        end = end_of(timeout)
        world.until(mine, list(enumerate(world.begun)), number + 1, end)
        result = self.read([box[number] for box in world.outbox])
        others = [r for r in range(world.size) if r != mine]
        for r in others:
            world.copied[r][mine].advance()
        # A sender may write into its message once all ranks have copied it.
        world.until(mine, [(r, world.copied[mine][r]) for r in others], number + 1, end)
        del world.outbox[mine][number]
        return result


class _Message:
    """What a rank sends on a device: pieces of an array, one for each rank."""

    def __init__(self, pieces: Sequence[Any], ready: _core.Event) -> None:
        self.pieces, self.ready = pieces, ready
        self.copied: dict[int, _core.Event] = {}  #: recorded by ranks after the copies of their pieces


class _Queued:
    """What one rank queues for an operation on a device, and the waits that order it. stream: the caller's."""

    def __init__(self, rank: int, stream: _core.Stream, queue: _core.Stream, sends: Sequence[Any]) -> None:
        self.rank, self.stream, self.queue = rank, stream, queue
        self.message = _Message(sends, stream.record())

    def copy(self, receives: Sequence[Any], posted: Sequence[_Message]) -> None:
        """Queue the copies of the pieces of all ranks for this one."""
        self.queue_for_caller()
        for message, place in zip(posted, receives, strict=True):
            if len(place):
                self.queue_for_sender(message)
                self.put(message.pieces[self.rank], place)
                message.copied[self.rank] = self.queue.record()
        self.caller_for_queue()

    def put(self, piece: Any, place: Any) -> None:
        with on_stream(self.queue):
            _core.add_n([piece], out=place)

    def queue_for_caller(self) -> None:
        self.queue.wait(self.message.ready)

    def queue_for_sender(self, message: _Message) -> None:
        self.queue.wait(message.ready)

    def caller_for_queue(self) -> None:
        self.stream.wait(self.queue.record())

    def caller_for_receivers(self) -> None:
        for rank in sorted(self.message.copied):
            self.stream.wait(self.message.copied[rank])


class _OnDevice(_Operation):
    """One rank's part of an operation on a device, of which all ranks queue their copies at its wait."""

    def __init__(self, engine: ThreadEngine, queued: _Queued, receives: Sequence[Any]) -> None:
        super().__init__(engine, queued.message, partial(queued.copy, receives))
        self.queued = queued

    def wait(self, timeout: float | None) -> None:
        try:
            super().wait(timeout)
        finally:  # after an error, too, as other ranks may still copy
            self.queued.caller_for_receivers()


class _ThreadBoard:
    """The texts of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.seen = world, 0

    def put(self, name: str, text: str) -> None:
        self.world.texts[name] = text
        self.world.changes.advance()

    def get(self, name: str) -> str | None:
        return self.world.texts.get(name)

    def first(self, name: str, text: str) -> str:
        found = self.world.texts.setdefault(name, text)
        self.world.changes.advance()
        return found

    def pause(self, seconds: float) -> None:
        if self.world.changes.wait(self.seen + 1, seconds):
            self.seen = self.world.changes.value

    def left(self) -> list[int]:
        return list(self.world.ended)


class ThreadEngine:
    """An engine whose ranks are threads (fanin.dist.threads)."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size, self.name = world, rank, world.size, f"{world.size} threads"
        self.started = 0

    def exchange(self, data: bytes) -> _Operation:
        return _Operation(self, data, list)

    def all_to_all(self, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> _Operation:
        def read(posted: list[Sequence[NDArray]]) -> None:
            for sent, place in zip(posted, receives, strict=True):
                place[:] = sent[self.rank]

        return _Operation(self, sends, read)

    def share(self, sends: Sequence[NDArray], receives: Sequence[NDArray], again: bool) -> _Operation:
        def read(posted: list[Sequence[NDArray]]) -> list[int]:
            mine = [sent[self.rank] for sent in posted]
            for one, place in zip(mine, receives, strict=True):
                place[: len(one)] = one
            return [len(one) for one in mine]

        return _Operation(self, sends, read)

    def carries(self, x: Any, device: str) -> str:
        """What all ranks must have alike: they use the memory of one device."""
        return device

    def queue(self, stream: _core.Stream) -> _core.Stream:
        """The stream on which this rank copies what others send on a device."""
        return stream

    def device_all_to_all(
        self, send: Any, sends: Sequence[int], receive: Any, receives: Sequence[int], stream: _core.Stream
    ) -> _OnDevice:
        queued = _Queued(self.rank, stream, self.queue(stream), pieces(send, sends))
        return _OnDevice(self, queued, pieces(receive, receives))

    def device_all_gather(self, whole: Any, sizes: Sequence[int], stream: _core.Stream) -> _OnDevice:
        places = pieces(whole, sizes)
        mine, places[self.rank] = places[self.rank], whole[:0]
        return _OnDevice(self, _Queued(self.rank, stream, self.queue(stream), [mine] * self.size), places)

    def abort(self, reason: str) -> None:
        self.world.leave(self.rank, reason)

    def close(self) -> None:
        self.world.leave(self.rank, f"rank {self.rank} closed its group")
        self.world.end(self.rank)

    def board(self) -> _ThreadBoard:
        return _ThreadBoard(self.world)

    def suspects(self) -> list[int]:
        return []

    def remade(self, members: Sequence[int], attempt: int, timeout: float | None) -> ThreadEngine:
        world = self.world.next.setdefault(attempt, World(len(members)))
        return ThreadEngine(world, members.index(self.rank))


class _Last:
    """At its end the group of this thread is closed, which may be one of survivors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        last = get_default()
        if last is not None:
            last.__exit__(kind, error, where)


@names_nearest
def threads(
    n: int, fn: Callable[[Group], T], *, nodes: int | Sequence[int] | None = None, timeout: float | None = 300.0
) -> list[T]:
    """Call `fn(group)` on `n` ranks, each a thread of this process, and return what each rank returned.

    Inside, `fanin.dist.group()` is the rank's group. In a thread of a `fanin.sim.Machine` the ranks are threads of that
    machine, so that `fanin.sim.explore` orders what they do; they then share no arrays but by messages.

    Parameters
    ----------
    n : int
        The number of ranks.
    fn : callable
        Called once on each rank.
    nodes : int or sequence of int, optional
        The nodes that the ranks are divided into, as for `fanin.dist.group`: for tests of sums in two levels.
    timeout : float, optional
        Seconds after which a rank no longer waits for another. None: it waits without a limit.

    Raises
    ------
    TypeError, ValueError
        If `n` or `timeout` is not positive, or `nodes` does not fit.
    Exception
        The exception of the first rank that failed by itself; the others then have `fanin.PeerError`.

    >>> fanin.dist.threads(4, lambda group: group.rank)
    [0, 1, 2, 3]
    """
    function("threads: fn", fn)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"threads: expected a positive number of ranks, got {n!r}")
    seconds("threads", timeout)
    placed = None if nodes is None else nodes_of("threads", nodes, n)
    world = World(n)
    results: list[Any] = [None] * n
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        reason = f"rank {rank} has returned"
        try:
            with Group(ThreadEngine(world, rank), nodes=placed, timeout=timeout) as group:
                set_default(group)
                with _Last():
                    results[rank] = fn(group)
        except BaseException as e:
            errors[rank] = e
            reason = f"rank {rank} failed: {type(e).__name__}: {e}"
        world.leave(rank, reason)
        over.advance()

    over = _core.EventCount()
    names = [f"rank {r}" for r in range(n)]
    try:
        if here.spawn is not None:
            for r in range(n):
                here.spawn(partial(run, r), name=names[r], apart=r + 1)
        else:
            for r in range(n):
                threading.Thread(target=run, args=(r,), name=names[r], daemon=True).start()
        over.wait(n)
    except BaseException as e:
        for rank in range(n):
            world.leave(rank, f"rank {rank} was ended: {type(e).__name__}")
        raise
    if errors:
        first = min(errors, key=lambda rank: (isinstance(errors[rank], PeerError), rank))
        note(errors[first], f"on rank {first} of {n}")
        raise errors[first]
    return results
