"""torch.distributed: Gloo, and NCCL for messages on a CUDA device (written, and not yet tried on a GPU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fanin._interop.protocols import NDArray

#: Seconds after which a wait for the other ranks lets Python handle signals.
_SLICE = 0.1


class _Works:
    """Operations in progress; `keep`: their buffers, until they are complete."""

    def __init__(self, works: Sequence[Any], result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        self.works, self.result, self.keep = works, result, keep

    def wait(self, timeout: float) -> Any:
        for work in self.works:
            self.one(work, timeout)
        return self.result()

    def one(self, work: Any, timeout: float) -> None:
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as e:
            if "timed out" in str(e).lower() or "timeout" in str(e).lower():
                raise TimeoutError("no answer of a rank") from e
            raise


class _Header(_Works):
    """A collective operation of Gloo, in which ranks wait for late ones: Ctrl-C ends it. (A wait of point-to-point
    operations that times out closes the connection, so those wait in one piece.)
    """

    def __init__(self, engine: TorchEngine, work: Any, result: Callable[[], Any], keep: tuple[Any, ...]) -> None:
        super().__init__([work], result, keep)
        self.engine = engine

    def one(self, work: Any, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            try:
                return super().one(work, max(min(left, _SLICE), 1e-3))
            except TimeoutError:
                if left <= _SLICE:
                    raise
                self.engine._alive()


def _pieces(x: Any, counts: Sequence[int]) -> list[Any]:
    return list(torch.split(x, list(counts)))


class TorchEngine:
    """An engine over a process group with the same ranks, so that its messages mix with no others.

    Gloo sends from host memory. NCCL sends from device memory: messages are copied there and back.
    """

    def __init__(self, pg: Any) -> None:
        try:
            ranks, backend = dist.get_process_group_ranks(pg), dist.get_backend(pg)
        except (KeyError, RuntimeError, ValueError):
            raise ValueError("group: the process group was destroyed: expected one that is alive") from None
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self.name = f"torch.distributed ({backend})"
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._ended = False
        self._pg = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        self._ranks = ranks

    def _alive(self) -> Any:
        if self._ended or not dist.is_initialized():
            raise RuntimeError("the engine was closed" if self._ended else "the process group was destroyed")
        return self._pg

    def _tensor(self, raw: NDArray) -> Any:
        writable = raw if raw.flags.writeable else raw.copy()  # torch has no read-only tensors
        return torch.from_numpy(writable).to(self.device)

    def exchange(self, data: bytes) -> _Works:
        send = self._tensor(np.frombuffer(data, np.uint8))
        receive = [torch.empty_like(send) for _ in range(self.size)]
        work = dist.all_gather(receive, send, group=self._alive(), async_op=True)
        keep = (send, receive)
        if self.device.type != "cpu":
            return _Works([work], lambda: [bytes(x.cpu().numpy()) for x in receive], keep)
        return _Header(self, work, lambda: [bytes(x.numpy()) for x in receive], keep)

    def all_to_all(
        self, send: NDArray, send_counts: Sequence[int], receive: NDArray, receive_counts: Sequence[int]
    ) -> _Works:
        pg, out, got = self._alive(), self._tensor(send), self._tensor(receive)
        works: list[Any] = []

        def done() -> None:
            if self.device.type != "cpu":
                receive[:] = got.cpu().numpy()

        if self.device.type != "cpu":
            work = dist.all_to_all_single(got, out, list(receive_counts), list(send_counts), group=pg, async_op=True)
            return _Works([work], done, (out, got))
        sent, received = _pieces(out, send_counts), _pieces(got, receive_counts)
        for step in range(1, self.size):  # Gloo's own all-to-all takes longer than these
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(received[origin]):
                works.append(dist.irecv(received[origin], self._ranks[origin], group=pg))
            if len(sent[to]):
                works.append(dist.isend(sent[to], self._ranks[to], group=pg))
        return _Works(works, done, (out, got, sent, received))

    def all_gather(self, whole: NDArray, counts: Sequence[int]) -> _Works:
        pg, all_parts = self._alive(), self._tensor(whole)
        parts = _pieces(all_parts, counts)
        works: list[Any] = []

        def done() -> None:
            if self.device.type != "cpu":
                whole[:] = all_parts.cpu().numpy()

        for step in range(self.size) if self.device.type != "cpu" else ():
            if len(parts[step]):
                works.append(dist.broadcast(parts[step], self._ranks[step], group=pg, async_op=True))
        for step in range(1, self.size) if self.device.type == "cpu" else ():
            to, origin = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(parts[origin]):
                works.append(dist.irecv(parts[origin], self._ranks[origin], group=pg))
            if len(parts[self.rank]):
                works.append(dist.isend(parts[self.rank], self._ranks[to], group=pg))
        return _Works(works, done, (all_parts, parts))

    def abort(self, reason: str) -> None:
        self._ended = True  # the other ranks' time limit ends what they wait for

    def close(self) -> None:
        self._ended = True  # destroying a process group is collective: it is left to destroy_process_group
