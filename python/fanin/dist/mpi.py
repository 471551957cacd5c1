"""MPI by mpi4py."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from fanin import _core
from fanin._core import requests_run
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
PREPARED = 64  #: messages that come again, whose requests are kept
_PROBE = 1e-3  #: seconds between two looks for such a message, and at the time limit


class _Request:
    """Operations in progress, each with the rank at its other end; `keep`: their buffers.

    The engine holds it until it is complete: after an error, too, as MPI may still write to the buffers, until
    MPI_Finalize, which comes after Python's end.
    """

    def __init__(self, engine: MPIEngine, result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        self.engine, self.result, self.keep = engine, result, keep
        self.requests: list[Any] = []
        self.peers: list[int] = []
        engine.open.append(self)

    def wait(self, timeout: float | None) -> Any:
        begin = probed = time.monotonic()
        end = end_of(timeout)
        for k, one in enumerate(self.requests):
            while not self.is_over(k, one):
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

    def is_over(self, k: int, one: Any) -> bool:
        """Whether the k-th operation is complete."""
        return bool(one.Test())

    def check(self, over: bool) -> None:
        """Raise if a rank that has not answered has left, or if the time limit is over.

        A rank that left after it answered is no error: the others may still be on their way.
        """
        gone = self.engine.gone()
        pairs = enumerate(zip(self.peers, self.requests, strict=True))
        late = sorted({peer for k, (peer, one) in pairs if not self.is_over(k, one)})
        for rank in late:
            if rank in gone:
                raise blamed(gone[rank], rank)
        if over and late:
            raise Late(late)


class _Shared(_Request):
    """One message to each other rank and one from each, by persistent requests, which may be started again."""

    def __init__(self, engine: MPIEngine, sends: Sequence[NDArray], receives: Sequence[NDArray], again: bool) -> None:
        self.engine, self.keep, self.again = engine, (sends, receives), again
        self.result = self.received
        comm, rank, size = engine._comm, engine.rank, engine.size
        origins = [r for r in range(size) if r != rank]
        targets = [(rank + step) % size for step in range(1, size)]
        self.peers = [*origins, *targets]
        self.requests = [comm.Recv_init([receives[r], MPI.BYTE], r, _DATA) for r in origins]
        self.requests += [comm.Send_init([sends[r], MPI.BYTE], r, _DATA) for r in targets]
        self.own = len(sends[rank])
        #: For `requests_run`. The last words: which requests are not complete, and the bytes that came.
        self.state = np.array(
            [*_functions(), len(self.peers), len(origins), *map(MPI._addressof, self.requests)]
            + [0] * (len(self.peers) + len(origins)),
            np.int64,
        )
        ends = np.cumsum([_WORDS, len(self.peers), len(self.peers)])
        self.left, self.sizes = self.state[ends[1] : ends[2]], self.state[ends[2] :]
        self.status = MPI.Status()
        _alive.add(self)

    def start(self) -> None:
        self.engine.open.append(self)
        self.over = self.run(True)  # often no rank is late

    def run(self, begin: bool) -> bool:
        """Start the requests, or look at them; whether all are complete."""
        code = requests_run(self.state, begin)
        if code > 0:
            raise MPI.Exception(code)
        return code == 0

    def wait(self, timeout: float | None) -> Any:
        if not self.over:
            return super().wait(timeout)
        self.engine.open.remove(self)
        return self.received()

    def is_over(self, k: int, one: Any) -> bool:
        return not self.left[k] or self.run(False) or not self.left[k]

    def received(self) -> list[int]:
        """The bytes that each rank sent."""
        sizes: list[int] = self.sizes.tolist()
        sizes.insert(self.engine.rank, self.own)
        if not self.again:
            self.free()
        return sizes

    def free(self) -> None:
        _alive.discard(self)
        for one in self.requests:
            one.Free()


_WORDS = 7  #: of the state of `requests_run`, before those of requests


@functools.cache
def _functions() -> list[int]:
    """What `requests_run` needs of the MPI library that mpi4py has loaded."""
    library = ctypes.CDLL(MPI.__file__)
    functions = library.MPI_Start, library.MPI_Test, library.MPI_Get_count
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in functions]
    return [*addresses, MPI._handleof(MPI.BYTE), MPI._sizeof(MPI.Datatype)]


#: Messages whose requests were not freed.
_alive: set[_Shared] = set()


def _free_all(*_: object) -> None:
    """Free the requests before MPI ends, but those in progress, and those of the process that has forked this one."""
    for one in list(_alive):
        ours = one.engine._process == os.getpid() and not MPI.Is_finalized()
        if ours and one not in one.engine.open:
            one.free()


@functools.cache
def _free_at_finalize() -> None:
    """MPI_Finalize first deletes what belongs to MPI_COMM_SELF; at the end of Python it comes too late to call this."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_free_all), None)
    atexit.register(_free_all)


class MPIEngine:
    """An engine over a duplicate of an mpi4py communicator, so that its messages mix with no others."""

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
        self._prepared: dict[int, _Shared] = {}  #: those that come again, the least recently used one first
        _free_at_finalize()
        self.open: list[_Request] = []  #: operations that are not complete
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
    ) -> _Request:
        """Point to point: a rank that does not come has a name, and waits are as few as they can be. MPI's own
        collectives wait in several steps, each a change of processes where cores are fewer than ranks.
        """
        comm, made = self._alive(), _Request(self, result, (sends, receives))
        for step in range(1, self.size):
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(receives[origin]):
                made.requests.append(comm.Irecv([receives[origin], MPI.BYTE], origin, _DATA))
                made.peers.append(origin)
            if len(sends[to]):
                made.requests.append(comm.Isend([sends[to], MPI.BYTE], to, _DATA))
                made.peers.append(to)
        return made

    def share(self, sends: Sequence[NDArray], receives: Sequence[NDArray], again: bool) -> _Shared:
        """Point to point, where a message may be shorter than the array that it is received into."""
        self._alive()
        number = id(sends)
        one = self._prepared.pop(number, None)
        if one is None:
            one = _Shared(self, sends, receives, again)
        if again:
            self._prepared[number] = one
            if len(self._prepared) > PREPARED:
                self._prepared.pop(next(iter(self._prepared))).free()
        one.start()
        return one

    def exchange(self, data: bytes) -> _Request:
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
