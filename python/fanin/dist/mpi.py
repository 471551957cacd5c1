"""MPI by mpi4py."""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from fanin import _core
from fanin._core import requests_new, requests_run
from fanin._interop.classes import named
from fanin._interop.protocols import NDArray

from .engine import Late, blamed, end_of, end_reason

__tracebackhide__ = True  # no frames of ours in reports of pytest

_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
}
#: A rank that ends the operations of all sends them its reason with this tag, in as many bytes.
_TAG, _REASON = 7, 512
_DATA = 6  #: the tag of all else that goes point to point
KEPT = 64  #: first messages that come again, whose state is kept
_PROBE = 1e-3  #: seconds between two looks for such a message, and at the time limit


class _Operation:
    """Messages in progress, and what their wait returns; `keep`: their memory.

    The engine holds it until it is complete: after an error, too, as MPI may still write to the memory, until
    MPI_Finalize, which comes after Python's end.
    """

    def __init__(self, engine: MPIEngine, result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        self.engine, self.result, self.keep = engine, result, keep
        engine.open.append(self)

    def look(self) -> bool:
        """Whether all messages are complete."""
        raise NotImplementedError

    def late(self) -> set[int]:
        """The ranks whose messages were not complete at the last look."""
        raise NotImplementedError

    def wait(self, timeout: float | None) -> Any:
        begin = probed = time.monotonic()
        end = end_of(timeout)
        while not self.look():
            now = time.monotonic()
            if now - probed > _PROBE:
                self.check(now > end)
                probed = now
            if now - begin > 1:
                time.sleep(1e-3)
            else:  # MPI makes progress in Test alone, and another rank may need this core to answer
                _core.yield_thread()
        self.engine.open.remove(self)
        return self.result()

    def check(self, over: bool) -> None:
        """Raise if a rank that has not answered has left, or if the time limit is over.

        A rank that left after it answered is no error: the others may still be on their way.
        """
        gone = self.engine.gone()
        if self.look():
            return
        late = sorted(self.late())
        for rank in late:
            if rank in gone:
                raise blamed(gone[rank], rank)
        if over:
            raise Late(late)


class _Messages(_Operation):
    """Messages that one call of the core starts and looks at; they may be started again."""

    def __init__(self, engine: MPIEngine, state: NDArray, result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        self.engine, self.result, self.keep, self.state = engine, result, keep, state

    def start(self) -> Self:
        self.engine.open.append(self)
        code = requests_run(self.state, True)
        self.over = code == 0  # often no rank is late
        if code > 0:
            raise MPI.Exception(code)
        return self

    def wait(self, timeout: float | None) -> Any:
        if not self.over:
            return super().wait(timeout)
        self.engine.open.remove(self)
        return self.result()

    def look(self) -> bool:
        code = requests_run(self.state, False)
        if code > 0:
            raise MPI.Exception(code)
        return code == 0

    def late(self) -> set[int]:
        messages = self.state[_FIRST:].reshape(-1, _WORDS)[: self.state[_MESSAGES]].tolist()
        return {one[_PEER] for one in messages if not one[_OVER]}


class _Shared(_Messages):
    """First messages; the wait returns the bytes that each rank sent."""

    def __init__(self, engine: MPIEngine, state: NDArray, own: int, keep: tuple[Any, ...]) -> None:
        super().__init__(engine, state, self.sizes, keep)
        others = engine.size - 1
        self.own, self.after = own, others - engine.rank
        self.came = state[_FIRST:].reshape(-1, _WORDS)[:others, _CAME]

    def sizes(self) -> list[int]:
        came: list[int] = self.came.tolist()  # those of the ranks after this one, then of those before it
        return [*came[self.after :], self.own, *came[: self.after]]


class _LargeMessages(_Operation):
    """Messages of more bytes than an int counts."""

    def __init__(self, engine: MPIEngine, receives: Sequence[NDArray], sends: Sequence[NDArray], *rest: Any) -> None:
        super().__init__(engine, *rest)
        self.left: list[tuple[int, Any]] = []
        for arrays, start in ((receives, engine._comm.Irecv), (sends, engine._comm.Isend)):
            for rank, array in enumerate(arrays):
                if rank != engine.rank and len(array):
                    self.left.append((rank, start([array, MPI.BYTE], rank, _DATA)))

    def look(self) -> bool:
        self.left = [(rank, one) for rank, one in self.left if not one.Test()]
        return not self.left

    def late(self) -> set[int]:
        return {rank for rank, _ in self.left}


#: Words of the state of messages, as the core's requests.c has them, and of each message.
_MESSAGES, _FIRST = 9, 11
_PEER, _OVER, _CAME, _WORDS = 2, 4, 5, 6


def _library(comm: Any, rank: int) -> NDArray:
    """What `requests_new` needs of the MPI library that mpi4py has loaded."""
    library = ctypes.CDLL(MPI.__file__)
    functions = library.MPI_Isend, library.MPI_Irecv, library.MPI_Test, library.MPI_Get_count
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
    byte = MPI._handleof(MPI.BYTE), MPI._sizeof(MPI.Datatype)
    words = [*addresses, *byte, MPI._handleof(comm), rank, _DATA]
    return np.array(words, np.uint64).view(np.int64)  # a handle that is a negative int has all its upper bits


class MPIEngine:
    """An engine over a duplicate of an mpi4py communicator, so that its messages mix with no others."""

    alike = True  #: larger terms travel from their own memory, which takes no longer than a copy beside the head

    def __init__(self, comm: Any) -> None:
        if not isinstance(comm, MPI.Comm):
            made = ": give MPI.COMM_WORLD.Create_group(x)" if isinstance(comm, MPI.Group) else ""
            raise TypeError(f"group: expected an mpi4py communicator, got {named(comm)}{made}")
        if not MPI.Is_initialized() or MPI.Is_finalized():  # where most calls abort the process
            when = "is not initialised yet" if not MPI.Is_initialized() else "was finalized"
            raise RuntimeError(f"group: MPI {when}: expected a call between MPI.Init() and MPI.Finalize()")
        if comm == MPI.COMM_NULL:
            raise ValueError("group: the communicator was freed: expected one that is alive")
        if comm.Is_inter():
            raise ValueError("group: expected a communicator of one group of ranks, got an intercommunicator")
        level = MPI.Query_thread()
        if level < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                f"group: MPI was initialised with {_LEVELS[level]}: expected MPI_THREAD_MULTIPLE, as buckets travel"
                " on a thread of their own: set mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported, with"
                " an MPI that has it"
            )
        self.rank, self.size, self.name = comm.Get_rank(), comm.Get_size(), comm.Get_name() or "an MPI communicator"
        #: The bytes of a message: before version 4 MPI's counts are ints.
        self.largest = None if MPI.Get_version() >= (4, 0) else 2**31 - 1
        self._owner, self._ended, self._process = comm, False, os.getpid()
        self._comm = comm.Dup()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        #: For each rank the node that it runs on, as the first rank there.
        self.nodes: list[int] = comm.allgather(node.bcast(self.rank))
        node.Free()
        self.no_survivors = "mpiexec ends all ranks where one is killed: start them again, from a checkpoint"
        self._sent: list[Any] = []
        self._kept: dict[int, _Shared] = {}  #: those that come again, the least recently used one first
        self._library = _library(self._comm, self.rank)
        self.open: list[_Operation] = []  #: operations that are not complete
        self._gone: dict[int, str] = {}
        atexit.register(self._at_exit)

    def _alive(self) -> Any:
        if self._ended or MPI.Is_finalized():
            raise RuntimeError("the engine was closed")
        if self._owner == MPI.COMM_NULL:
            raise RuntimeError(f"the communicator {self.name} was freed")
        return self._comm

    def gone(self) -> dict[int, str]:
        """Why ranks have ended their operations; raise if this one has, on another thread."""
        status = MPI.Status()
        while self._alive().Iprobe(MPI.ANY_SOURCE, _TAG, status):
            reason = np.zeros(_REASON, np.uint8)
            self._comm.Recv([reason, MPI.BYTE], status.Get_source(), _TAG)
            self._gone[status.Get_source()] = reason.tobytes().rstrip(b"\0").decode(errors="replace")
        return self._gone

    def all_to_all(
        self, sends: Sequence[NDArray], receives: Sequence[NDArray], result: Callable[[], Any] = lambda: None
    ) -> _Operation:
        """Point to point: a rank that does not come has a name, and waits are as few as they can be. MPI's own
        collectives wait in several steps, each a change of processes where cores are fewer than ranks.
        """
        self._alive()
        state = requests_new(self._library, list(receives), list(sends))
        if state is None:
            return _LargeMessages(self, receives, sends, result, (sends, receives))
        return _Messages(self, state, result, (sends, receives)).start()

    def share(self, sends: Sequence[NDArray], receives: Sequence[NDArray], again: bool) -> _Shared:
        """Point to point, where a message may be shorter than the array that it is received into."""
        self._alive()
        number = id(sends)
        one = self._kept.pop(number, None)
        if one is None:
            state = requests_new(self._library, list(receives), list(sends))
            assert state is not None, "first messages are small"
            one = _Shared(self, state, len(sends[self.rank]), (sends, receives))
        if again:
            self._kept[number] = one
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return one.start()

    def exchange(self, data: bytes) -> _Operation:
        send = np.frombuffer(data, np.uint8)
        receives = list(np.empty((self.size, len(data)), np.uint8))
        receives[self.rank] = send
        return self.all_to_all([send] * self.size, receives, lambda: [x.tobytes() for x in receives])

    def abort(self, reason: str) -> None:
        """Send the reason to all ranks: MPI cannot cancel collective operations."""
        if self._ended or MPI.Is_finalized():
            return
        self._ended = True
        text = np.frombuffer(reason.encode()[:_REASON].ljust(_REASON, b"\0"), np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                self._sent.append((self._comm.Isend([text, MPI.BYTE], rank, _TAG), text))

    def close(self) -> None:
        # Freeing a communicator is collective, and the other ranks may never come: it is left to MPI_Finalize.
        self.abort(f"rank {self.rank} closed its group")

    def _at_exit(self) -> None:
        if os.getpid() != self._process:  # a child of fork()
            return
        # MPI_Finalize waits for the other ranks, which may wait for this one.
        self.abort(f"rank {self.rank} ended{end_reason()}")
        if self.open or self._sent:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # nothing frees their buffers any more
