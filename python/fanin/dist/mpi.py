"""MPI by mpi4py."""

from __future__ import annotations

import atexit
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from fanin._interop.protocols import NDArray
from fanin.errors import PeerError

_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
}
#: A rank that ends the operations of all sends them its reason with this tag, in as many bytes.
_TAG, _REASON = 7, 512
_DATA = 6  #: the tag of all else that goes point to point
_PROBE = 1e-3  #: seconds between two looks for such a message


class _Request:
    """Operations in progress; `keep`: their buffers, until they are complete."""

    def __init__(
        self, engine: MPIEngine, requests: list[Any], result: Callable[[], Any], keep: tuple[Any, ...]
    ) -> None:
        self.engine, self.requests, self.result, self.keep = engine, requests, result, keep

    def wait(self, timeout: float) -> Any:
        begin = probed = time.monotonic()
        while not MPI.Request.Testall(self.requests):
            now = time.monotonic()
            if now - probed > _PROBE:
                self.engine.check()
                probed = now
            if now - begin > timeout:
                raise TimeoutError("no answer of a rank")
            if now - begin > 1:  # before, as MPI's own waits do: MPI makes progress in Test alone
                time.sleep(1e-3)
        return self.result()


def _parts(raw: NDArray, counts: Sequence[int]) -> list[NDArray]:
    ends = [0, *itertools.accumulate(counts)]
    return [raw[a:b] for a, b in itertools.pairwise(ends)]


class MPIEngine:
    """An engine over a duplicate of an mpi4py communicator, so that its messages mix with no others."""

    def __init__(self, comm: Any) -> None:
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
        self._owner, self._ended = comm, False
        self._comm = comm.Dup()
        self._sent: list[Any] = []
        atexit.register(self._at_exit)

    def _alive(self) -> Any:
        if self._ended or MPI.Is_finalized():
            raise RuntimeError("the engine was closed")
        if self._owner == MPI.COMM_NULL:
            raise RuntimeError(f"the communicator {self.name} was freed")
        return self._comm

    def check(self) -> None:
        """Raise if a rank, or this one on another thread, has ended the operations of all."""
        status = MPI.Status()
        if self._alive().Iprobe(MPI.ANY_SOURCE, _TAG, status):
            reason = np.zeros(_REASON, np.uint8)
            self._comm.Recv([reason, MPI.BYTE], status.Get_source(), _TAG)
            raise PeerError(reason.tobytes().rstrip(b"\0").decode(errors="replace"), status.Get_source())

    def _swap(self, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> _Request:
        """Send each rank its array; messages of 0 bytes are left out.

        Point to point, as MPI's own collectives copy a rank's own part, and some their buffers.
        """
        comm, requests = self._alive(), []
        for step in range(1, self.size):
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(receives[origin]):
                requests.append(comm.Irecv([receives[origin], MPI.BYTE], origin, _DATA))
            if len(sends[to]):
                requests.append(comm.Isend([sends[to], MPI.BYTE], to, _DATA))
        return _Request(self, requests, lambda: None, (sends, receives))

    def exchange(self, data: bytes) -> _Request:
        comm, n = self._alive(), len(data)
        send, receive = np.frombuffer(data, np.uint8), np.empty(n * self.size, np.uint8)
        request = comm.Iallgather([send, MPI.BYTE], [receive, MPI.BYTE])
        parts = range(0, n * self.size, n)
        return _Request(self, [request], lambda: [receive[i : i + n].tobytes() for i in parts], (data, send, receive))

    def all_to_all(
        self, send: NDArray, send_counts: Sequence[int], receive: NDArray, receive_counts: Sequence[int]
    ) -> _Request:
        return self._swap(_parts(send, send_counts), _parts(receive, receive_counts))

    def all_gather(self, whole: NDArray, counts: Sequence[int]) -> _Request:
        parts = _parts(whole, counts)
        return self._swap([parts[self.rank]] * self.size, parts)

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
        error = getattr(sys, "last_value", None)
        if error is not None:  # MPI_Finalize waits for the other ranks, which may wait for this one
            self.abort(f"rank {self.rank} ended: {type(error).__name__}: {error}")
