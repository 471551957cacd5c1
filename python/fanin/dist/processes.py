"""torch.distributed: Gloo, and NCCL between CUDA devices (written, and not yet tried on a GPU)."""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fanin._interop.protocols import NDArray
from fanin.errors import PeerError

from .engine import Late, blamed, end_of, end_reason, pieces

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Seconds after which a wait for the other ranks lets Python handle signals, and reads notes.
_SLICE = 0.1
#: The seconds that a wait without a limit gives to torch, which has no such wait: 30 years.
_NO_LIMIT = 1e9
#: Seconds in which ranks that wait answer a roll call.
_ANSWER = 0.5
#: .. after a connection was lost: the ranks that are left hear of it one after the other.
_ANSWER_LOST = 10.0


def said(error: RuntimeError) -> str:
    """What Gloo says in an error: without the place in its sources before it, and the advice after it."""
    text = re.sub(r"^\[\S+?:\d+\] ", "", str(error))
    return text.partition(". ")[0]


class _Works:
    """Operations in progress, and the rank at the other end of each if it has one; `keep`: their buffers."""

    def __init__(
        self,
        engine: TorchEngine,
        works: Sequence[Any],
        result: Callable[[], Any],
        keep: tuple[Any, ...],
        peers: Sequence[int] = (),
    ) -> None:
        self.engine, self.works, self.result, self.keep, self.peers = engine, works, result, keep, peers

    def wait(self, timeout: float | None) -> Any:
        end = end_of(timeout)
        for i, work in enumerate(self.works):
            try:
                left = min(end - time.monotonic(), _NO_LIMIT)
                came = self.one(work, max(left, 1e-3))
            except RuntimeError as e:
                if not self.peers:
                    raise
                e.with_traceback(None)  # its frames hold operations, and these the connections that `abort` ends
                del work
                self.works = []
                raise self.engine.unreachable(self.peers[i], e) from e
            if not came:
                raise Late(self.peers[i : i + 1])
        return self.result()

    def one(self, work: Any, timeout: float) -> bool:
        """Whether it is complete within the time limit."""
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as e:
            if "timed out" in str(e).lower() or "timeout" in str(e).lower():
                return False
            raise
        return True


class _Header(_Works):
    """A collective operation of Gloo, in which ranks wait for late ones; Ctrl-C and the end of another rank end it. (A
    wait of point-to-point operations that times out closes the connection, so those wait in one piece.)
    """

    def wait(self, timeout: float | None) -> Any:
        engine = self.engine
        try:
            result = super().wait(timeout)
        except PeerError:
            raise
        except RuntimeError as e:
            if re.search(r"[Cc]onnection|[Pp]ipe|by peer", str(e)) is None:
                raise
            e.with_traceback(None)  # as above
            self.works = []
            engine._in_header = False
            raise engine.lost(e) from e
        engine._in_header = False
        if time.monotonic() - engine.since > _SLICE:  # this rank may be late: then the others have ended
            engine.check()
        engine.met += 1
        engine.since = time.monotonic()
        return result

    def one(self, work: Any, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not super().one(work, max(min(end - time.monotonic(), _SLICE), 1e-3)):
            self.engine.check()
            if time.monotonic() >= end:
                late = self.engine.roll_call(_ANSWER, self.engine.size)
                if super().one(work, 1e-3):  # they came meanwhile
                    return True
                raise Late(late)
        return True


class _Queued:
    """Operations of NCCL: torch's current stream, on which they were started, waits for them, and the host does not.
    keep: their memory.
    """

    def __init__(self, works: Sequence[Any], keep: object) -> None:
        self.works, self.keep = works, keep

    def wait(self, timeout: float | None) -> None:
        for work in self.works:
            work.wait()


class _Store:
    """The store of a process group, until a call of it fails: each later call would print torch's backtrace again."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.error: RuntimeError | None = None

    def call(self, operation: str, *args: Any) -> Any:
        if self.error is not None:
            raise self.error
        try:
            return getattr(self.store, operation)(*args)
        except RuntimeError as e:
            self.error = e
            raise


class _Notes:
    """What ranks write to the process group's store, and all others read: only where something goes wrong. name: of
    their group, as torchrun's store keeps what was written by ranks that it has started again.
    """

    def __init__(self, store: _Store, name: str) -> None:
        self.store, self.name, self.read = store, f"fanin {name}", 0

    def write(self, *note: Any) -> None:
        number = self.store.call("add", self.name, 1)
        self.store.call("set", f"{self.name} {number}", json.dumps(note))

    def new(self) -> Iterator[list[Any]]:
        """The notes since the last call."""
        while self.store.call("check", [f"{self.name} {self.read + 1}"]):
            self.read += 1
            yield json.loads(self.store.call("get", f"{self.name} {self.read}"))


class _StoreBoard:
    """The board of survivors, in the store of a process group. name: as of notes."""

    def __init__(self, store: _Store, size: int, name: str) -> None:
        self.store, self.size, self.name = store, size, f"fanin {name} survivors"

    def call(self, operation: str, *args: Any) -> Any:
        """A call of the store; PeerError if it cannot be reached."""
        try:
            return self.store.call(operation, *args)
        except RuntimeError as e:
            raise PeerError(
                "survivors: the store of torch.distributed is gone: the rank that held it, rank 0 but under torchrun,"
                f" has ended: start the ranks again, from a checkpoint ({said(e)[:200]})"
            ) from e

    def put(self, name: str, text: str) -> None:
        self.call("set", f"{self.name} {name}", text)

    def get(self, name: str) -> str | None:
        key = f"{self.name} {name}"
        return self.call("get", key).decode() if self.call("check", [key]) else None

    def first(self, name: str, text: str) -> str:
        found: str = self.call("compare_set", f"{self.name} {name}", "", text).decode()
        return found

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def left(self) -> list[int]:
        return [rank for rank in range(self.size) if self.get(f"left {rank}") is not None]


class _Shared:
    """The memory of first messages, as tensors and as arrays."""

    def __init__(self, size: int) -> None:
        self.ours, self.theirs = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        self.sent, self.received = torch.from_numpy(self.ours), torch.from_numpy(self.theirs)


_engines: weakref.WeakSet[TorchEngine] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_engines.clear)  # a child has none of their threads


@atexit.register
def _at_exit() -> None:
    """Tell the other ranks, which may wait for this one. Then drop process groups, so that their threads end before
    Python: a thread of Gloo drops the tensors of an operation after the wait for it has returned, and aborts the
    process if Python ends meanwhile.
    """
    why = end_reason()
    for engine in list(_engines):
        engine.abort(f"rank {engine.rank} ended{why}")
        engine.leave()
        engine._drop()


class TorchEngine:
    """An engine over a process group with the same ranks, so that its messages mix with no others.

    Messages of the host go over Gloo. Where the process group has NCCL, a second one of NCCL carries CUDA tensors.
    """

    def __init__(self, pg: Any) -> None:
        try:
            ranks, backend = dist.get_process_group_ranks(pg), dist.get_backend(pg)
        except (KeyError, RuntimeError, ValueError):
            raise ValueError("group: the process group was destroyed: expected one that is alive") from None
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.name = f"torch.distributed ({backend})"
        has_nccl = "nccl" in dist.get_backend_config(pg)
        self._pg = dist.new_group(ranks, backend="gloo" if has_nccl else backend, use_local_synchronization=True)
        made: list[Any] = [None] * self.size
        first: dict[str, int] = {}
        mine = socket.gethostname(), os.urandom(8).hex(), has_nccl and torch.cuda.is_available()
        dist.all_gather_object(made, mine, group=self._pg)
        #: For each rank the node that it runs on, as the first rank with the same host name.
        self.nodes = [first.setdefault(host, r) for r, (host, *_) in enumerate(made)]
        self._unique: str = made[0][1]  #: a name that no other group has
        self._nccl: Any = None
        if all(has_gpu for *_, has_gpu in made):
            self._nccl = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._start()

    def _start(self) -> None:
        self._ended = False
        self._in_header = False  #: a header is on its way: a process group that is dropped would wait for it
        self._failed = False  #: a connection was lost
        self._shared: _Shared | None = None
        self._suspects: set[int] = set()  #: to these ranks
        store = _Store(self._pg.get_group_store())
        self._notes = _Notes(store, self._unique)
        self._board = _StoreBoard(store, self.size, self._unique)
        self.met, self.since = 0, 0.0  #: headers that all ranks have sent, and the time of the last one
        self._gone: dict[int, tuple[int, str]] = {}  #: how many headers ranks had met as they ended, and why
        self._here: set[int] = set()  #: ranks that wait, as they have answered a roll call
        _engines.add(self)

    def check(self) -> None:
        """Raise if this rank has ended its operations, or another has before it sent the next header; answer calls."""
        self._alive()
        for kind, rank, met, reason in self._notes.new():
            if kind == "call" and rank != self.rank:
                self._notes.write("here", self.rank, self.met, "")
            if kind == "end":
                self._gone[rank] = met, reason
            else:
                self._here.add(rank)
        for rank, (met, reason) in self._gone.items():
            if met <= self.met:  # else it has sent the header that this rank waits for
                raise blamed(reason, rank)

    def lost(self, error: RuntimeError) -> PeerError:
        """The error of an operation that Gloo ended because a rank is gone: it names the ranks that answer no more."""
        self._failed = True
        self._alive()  # else this rank itself has ended its operations
        try:
            late = self.roll_call(_ANSWER_LOST, self.size - 1)
        except PeerError as e:  # a rank has written why it ended
            return e
        except RuntimeError:
            return PeerError(f"the store of torch.distributed cannot be reached: {said(error)}")
        self._suspects |= set(late)
        if len(late) == 1:
            return PeerError(f"rank {late[0]} cannot be reached: {said(error)}", late[0])
        ranks = f"ranks {', '.join(map(str, late))}" if late else "a rank"
        return PeerError(f"{ranks} cannot be reached: {said(error)}")

    def unreachable(self, rank: int, error: RuntimeError) -> PeerError:
        """The error of a message to or from a rank: it names that which this one blames, if it has ended for that."""
        self._failed = True
        try:
            self.check()
        except PeerError as e:
            return e
        except RuntimeError:
            pass  # the store cannot be reached
        self._suspects.add(rank)
        return PeerError(f"rank {rank} cannot be reached: {said(error)}", rank)

    def roll_call(self, seconds: float, enough: int) -> list[int]:
        """The ranks that do not wait for others now: after so many seconds, or when so many ranks have answered."""
        self._here = {self.rank}
        self._notes.write("call", self.rank, self.met, "")
        end = time.monotonic() + seconds
        while len(self._here) < enough and time.monotonic() < end:
            time.sleep(_SLICE / 10)
            self.check()
        return [rank for rank in range(self.size) if rank not in self._here]

    def _alive(self) -> Any:
        if self._ended or not dist.is_initialized():
            raise RuntimeError("the engine was closed" if self._ended else "the process group was destroyed")
        return self._pg

    def _tensor(self, raw: NDArray) -> Any:
        writable = raw if raw.flags.writeable else raw.copy()  # torch has no read-only tensors
        return torch.from_numpy(writable)

    def exchange(self, data: bytes) -> _Works:
        send = self._tensor(np.frombuffer(data, np.uint8))
        receive = [torch.empty_like(send) for _ in range(self.size)]
        work = self._alive().allgather([receive], [send])
        keep = (send, receive)
        self._in_header = True
        return _Header(self, [work], lambda: [bytes(x.numpy()) for x in receive], keep)

    padded = True  #: `share` has messages of one size

    def share(self, sends: Sequence[NDArray], receives: Sequence[NDArray], again: bool) -> _Works:
        """A collective operation, in messages of one size: waits for it can be ended, unlike those point to point."""
        each = len(receives[0])
        if self._shared is None or len(self._shared.ours) != each * self.size:
            self._shared = _Shared(each * self.size)
        shared = self._shared
        for r, send in enumerate(sends):
            shared.ours[each * r : each * r + len(send)] = send
        work = self._alive().alltoall_base(shared.received, shared.sent, [], [])

        def done() -> list[int]:
            for r, receive in enumerate(receives):
                receive[:] = shared.theirs[each * r : each * (r + 1)]
            return [each] * self.size

        self._in_header = True
        return _Header(self, [work], done, (shared.sent, shared.received))

    def all_to_all(self, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> _Works:
        pg = self._alive()
        tensors = {id(x): self._tensor(x) for x in sends}  # one array may go to several ranks
        sent, received = [tensors[id(x)] for x in sends], [self._tensor(x) for x in receives]
        works: list[Any] = []
        peers: list[int] = []
        for step in range(1, self.size):  # Gloo's own all-to-all takes longer than these
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(receives[origin]):
                works.append(pg.recv([received[origin]], origin, 0))
                peers.append(origin)
            if len(sends[to]):
                works.append(pg.send([sent[to]], to, 0))
                peers.append(to)
        return _Works(self, works, lambda: None, (sent, received), peers)

    def carries(self, x: Any, device: str) -> str | None:
        """NCCL carries tensors on this rank's device; each rank has another one."""
        mine = self._nccl is not None and isinstance(x, torch.Tensor) and x.device == self.device
        return "CUDA tensors" if mine else None

    def device_all_to_all(
        self, send: Any, sends: Sequence[int], receive: Any, receives: Sequence[int], stream: object
    ) -> _Queued:
        each = send.itemsize
        sizes = [each * n for n in receives], [each * n for n in sends]
        raw = receive.view(torch.uint8), send.view(torch.uint8)
        return _Queued([dist.all_to_all_single(*raw, *sizes, group=self._nccl, async_op=True)], raw)

    def device_all_gather(self, whole: Any, sizes: Sequence[int], stream: object) -> _Queued:
        raw = whole.view(torch.uint8)
        parts = pieces(raw, [whole.itemsize * n for n in sizes])
        if len(set(sizes)) == 1:
            made = [dist.all_gather_into_tensor(raw, parts[self.rank], group=self._nccl, async_op=True)]
        else:  # NCCL gathers parts of one size alone
            made = [
                dist.broadcast(part, dist.get_global_rank(self._nccl, r), group=self._nccl, async_op=True)
                for r, part in enumerate(parts)
                if len(part)
            ]
        return _Queued(made, raw)

    def abort(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        with suppress(RuntimeError):  # the store may be gone; then the other ranks' time limit ends their waits
            self._notes.write("end", self.rank, self.met, reason)
        if self._failed and not self._in_header:
            self._drop()  # ends the others' waits for data of this rank

    def _drop(self) -> None:
        """Drop the process group, and so its connections."""
        pg, self._pg = self._pg, None
        if pg is not None and dist.is_initialized():
            with suppress(Exception):  # it was destroyed before, or is one of survivors
                dist.destroy_process_group(pg)

    def leave(self) -> None:
        """This rank takes part in nothing more."""
        with suppress(PeerError):
            self._board.put(f"left {self.rank}", "")

    def close(self) -> None:
        # Destroying a process group is collective: it is left to destroy_process_group.
        self.abort(f"rank {self.rank} closed its group")
        self.leave()

    def board(self) -> _StoreBoard:
        return self._board

    def suspects(self) -> set[int]:
        return self._suspects

    def remade(self, members: Sequence[int], attempt: int, timeout: float | None) -> TorchEngine:
        if self._nccl is not None:
            raise RuntimeError("a process group of NCCL is made by torch: make a new one, and fanin.dist.group of it")
        rank, size = members.index(self.rank), len(members)
        store = PrefixStore(f"{self._board.name} {attempt}", self._board.store.store)
        limit = timedelta(seconds=_NO_LIMIT if timeout is None else timeout)
        backend = dist.ProcessGroupGloo(store, rank, size, limit)
        pg = dist.ProcessGroup(store, rank, size)
        pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        made = object.__new__(TorchEngine)
        made._pg, made._nccl, made.rank, made.size, made.name = pg, None, rank, size, self.name
        made.nodes = [self.nodes[r] for r in members]
        made._unique = self._unique
        made._start()
        return made
