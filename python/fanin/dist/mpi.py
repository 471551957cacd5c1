"""MPI by mpi4py."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from fanin._interop.protocols import NDArray

_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
}
#: Above this many bytes MPI before version 4 has no count.
_LARGE = 2**31 - 1


class _Request:
    """Operations in progress; `keep`: their buffers, until they are complete."""

    def __init__(self, requests: list[Any], result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        self.requests, self.result, self.keep = requests, result, keep

    def wait(self, timeout: float) -> Any:
        begin = time.monotonic()
        while not MPI.Request.Testall(self.requests):
            spent = time.monotonic() - begin
            if spent > timeout:
                raise TimeoutError("no answer of a rank")
            if spent > 1:  # before, as MPI's own waits do: MPI makes progress in Test alone, and a yield costs a slice
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
                " on a thread of their own (mpi4py.rc.thread_level)"
            )
        self.rank, self.size, self.name = comm.Get_rank(), comm.Get_size(), comm.Get_name() or "an MPI communicator"
        self._owner, self._ended = comm, False
        self._comm = comm.Dup()

    def _alive(self) -> Any:
        if self._ended or MPI.Is_finalized():
            raise RuntimeError("the engine was closed")
        if self._owner == MPI.COMM_NULL:
            raise RuntimeError(f"the communicator {self.name} was freed")
        return self._comm

    def _swap(self, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> _Request:
        """Send each rank its array; messages of 0 bytes are left out.

        Point to point, as MPI's own collectives copy a rank's own part, and some their buffers.
        """
        comm, requests = self._alive(), []
        largest = max(map(len, (*sends, *receives)))
        if largest > _LARGE and MPI.Get_version() < (4, 0):
            raise OverflowError(
                f"{largest} bytes in one message: MPI {MPI.Get_version()} has counts up to 2**31 - 1; use smaller"
                " buckets, or MPI 4"
            )
        for step in range(1, self.size):
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(receives[origin]):
                requests.append(comm.Irecv([receives[origin], MPI.BYTE], origin))
            if len(sends[to]):
                requests.append(comm.Isend([sends[to], MPI.BYTE], to))
        return _Request(requests, lambda: None, (sends, receives))

    def exchange(self, data: bytes) -> _Request:
        comm, n = self._alive(), len(data)
        send, receive = np.frombuffer(data, np.uint8), np.empty(n * self.size, np.uint8)
        request = comm.Iallgather([send, MPI.BYTE], [receive, MPI.BYTE])
        return _Request(
            [request], lambda: [receive[r * n : (r + 1) * n].tobytes() for r in range(self.size)], (data, send, receive)
        )

    def all_to_all(
        self, send: NDArray, send_counts: Sequence[int], receive: NDArray, receive_counts: Sequence[int]
    ) -> _Request:
        return self._swap(_parts(send, send_counts), _parts(receive, receive_counts))

    def all_gather(self, whole: NDArray, counts: Sequence[int]) -> _Request:
        parts = _parts(whole, counts)
        return self._swap([parts[self.rank]] * self.size, parts)

    def abort(self, reason: str) -> None:
        self._ended = True  # MPI cannot cancel collective operations: the other ranks' time limit ends them

    def close(self) -> None:
        # Freeing a communicator is collective, and the other ranks may never come: it is left to MPI_Finalize.
        self._ended = True
