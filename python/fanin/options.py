"""Process-wide options, and what has been counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Literal

from . import _core
from ._interop import cuda_interface

__all__ = ["Counters", "counters", "set_options"]


@dataclass(frozen=True, slots=True)
class Counters(Mapping[str, int]):
    """What a buffer, or all of them, have done. Fields are read by name, as attributes or as of a dict."""

    adds: int  #: contributions added, undefined ones too
    copies: int  #: contributions or results that were copied or converted
    in_place: int  #: terms summed into an operand's memory
    folds: int  #: sums run
    passes: int  #: passes over memory
    bytes_read: int
    bytes_written: int
    events: int  #: events recorded
    waits: int  #: waits queued
    waits_elided: int  #: waits left out because they were known to hold
    mismatches: int  #: leaf consumers on another stream than the producer's (S6)
    peak_parked_bytes: int  #: the most that waited to be summed, in bytes

    def __getitem__(self, name: str) -> int:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        value: int = getattr(self, name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True, slots=True)
class ProcessCounters(Counters):
    """What all buffers of the process have done, and how the memory of their large results was recycled."""

    pool_bytes: int  #: bytes kept now for the next large results
    pool_peak_bytes: int  #: the most that was kept
    pool_hits: int  #: large results, so far, that were made in memory used before
    pool_misses: int  #: those that needed fresh memory


def counters() -> ProcessCounters:
    """What all buffers of this process have done so far: `Counters`, and four of the pool of memory.

    `pool_bytes` is what is kept now of large results that are gone, `pool_peak_bytes` the most that was; `pool_hits`
    results were made in such memory, `pool_misses` in fresh memory.

    >>> before = fanin.counters().adds
    >>> _ = fanin.add_n([1.0, 2.0])
    >>> fanin.counters().adds - before
    2
    """
    return _core.counters()


class Restore:
    """What `set_options` gives back: as a context manager it restores what was set before."""

    def __init__(
        self,
        before: tuple[
            bool | None,
            bool | None,
            float | Literal["auto"] | None,
            str | None,
            int | None,
            float | None,
            bool | None,
            bool | None,
        ],
        raw: bool | None,
    ) -> None:
        self._before = before
        self._raw = raw

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _core.set_options(*self._before)
        if self._raw is not None:
            cuda_interface.raw_addresses = self._raw


def set_options(
    *,
    debug: bool | None = None,
    budget: float | Literal["auto"] | None = None,
    pool_bytes: float | None = None,
    warn_stream_mismatch: bool | None = None,
    capture_redirect: bool | None = None,
    isa: str | None = None,
    threads: int | None = None,
    raw_addresses: bool | None = None,
    detect: bool | None = None,
) -> Restore:
    """Set process-wide options; in a `with` statement, for its block.

    debug: each array is hashed when it is added, and again when it is summed: a caller who changes one meanwhile gets a
    RuntimeError that names the contribution; memory that is kept for another result is filled with a pattern meanwhile,
    and the process ends where somebody wrote to it. budget: bytes that may wait in a buffer that was given no budget of
    its own (buffers made from now on); at first "auto" (`fanin.InputBuffer`). pool_bytes: bytes that may be kept of
    large results (1 MiB and more) that are gone, for the next ones, and of each CUDA device's memory while somebody
    synchronizes (at first an eighth of the machine's memory, 1 GiB at most; 0: none are; `trim` gives them back).
    warn_stream_mismatch: whether a leaf that consumes on another stream than its gradient was made on gets a
    `StreamMismatchWarning`, once (rule S6). capture_redirect: whether a consumer's stream that is in no capture gives
    way to the captured stream that it would have to wait for (rule S7): the sum is ready on that one then, and nothing
    outside is pulled into the graph; at first False. isa: the instruction set of sums, "sse2", "avx2" or "avx512"
    ("plain" where the processor is no x86); a ValueError names those that this machine has; the widest is taken
    unasked. threads: how many threads share a large sum on the CPU, from 1 to 1024; unasked as many as the process may
    use, at most 8. Neither changes a bit of a result. raw_addresses: whether what has `__cuda_array_interface__` and no
    DLPack (Numba's device arrays) is an array: what it says of its address, its extent and its stream is believed, and
    a wrong extent ends the process; at first False. detect: passes that do not say end at the first gradient with an
    inf or NaN (`fanin.backward(detect=True)`), and each `fanin.Node` that is made remembers file and line, which errors
    of passes name. None leaves an option as it is.

    >>> with fanin.set_options(debug=True):
    ...     fanin.add_n([np.ones(2), np.ones(2)])
    array([2., 2.])
    """
    if threads == 0:
        raise ValueError(f"threads={threads!r}: expected a number of threads from 1 to 1024")
    old = _core.set_options(debug, warn_stream_mismatch, budget, isa, threads, pool_bytes, capture_redirect, detect)
    raw = cuda_interface.raw_addresses  # the same turn of a thread of `Machine.spawn`
    if raw_addresses is not None:
        cuda_interface.raw_addresses = bool(raw_addresses)
    return Restore(
        (
            None if debug is None else old["debug"],
            None if warn_stream_mismatch is None else old["warn_stream_mismatch"],
            None if budget is None else old["budget"],
            None if isa is None else old["isa"],
            None if threads is None else old["threads"],  # 0: unasked
            None if pool_bytes is None else old["pool_bytes"],
            None if capture_redirect is None else old["capture_redirect"],
            None if detect is None else old["detect"],
        ),
        None if raw_addresses is None else raw,
    )
