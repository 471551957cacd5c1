"""Process-wide options and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from . import _core
from ._checks import flag
from ._interop import streams
from ._words import names_nearest

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Counters", "counters", "set_options"]


@dataclass(frozen=True, slots=True)
class Counters(Mapping[str, int]):
    """The work of a buffer, or of all buffers; fields can be read as attributes or by name, as from a dict, and
    `print` shows a table.
    """

    adds: int  #: contributions added, undefined ones included
    copies: int  #: contributions or results that were copied or converted
    in_place: int  #: terms summed into an operand's memory
    folds: int  #: sums run
    passes: int  #: passes over memory
    bytes_read: int
    bytes_written: int
    events: int  #: events recorded
    waits: int  #: waits queued
    waits_elided: int  #: waits left out because they already held
    mismatches: int  #: leaf consumers on another stream than the producer's (S6)
    peak_parked_bytes: int  #: the most bytes that were parked at once

    def __getitem__(self, name: str) -> int:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        value: int = getattr(self, name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __str__(self) -> str:
        return "\n".join(f"{name:17} {value:>15,}" for name, value in self.items())


@dataclass(frozen=True, slots=True)
class ProcessCounters(Counters):
    """The work of all buffers of the process, and the reuse of memory for their large results."""

    pool_bytes: int  #: bytes kept now for later large results
    pool_peak_bytes: int  #: the most bytes kept
    pool_hits: int  #: large results made in kept memory
    pool_misses: int  #: large results made in fresh memory


def counters() -> ProcessCounters:
    """Return the work of all buffers of this process so far.

    Besides the fields of `Counters`, four describe the memory pool for large results: `pool_bytes` (kept now),
    `pool_peak_bytes` (the most kept), `pool_hits` (results made in kept memory) and `pool_misses` (in fresh memory).

    >>> before = fanin.counters().adds
    >>> _ = fanin.add_n([1.0, 2.0])
    >>> fanin.counters().adds - before
    2
    """
    return _core.counters()


#: Whether `set_options(debug=True)` is in force: read for each operation of fanin.tape.
debugging = False


def _set(given: Sequence[Any]) -> Mapping[str, Any]:
    """Set the options of the core, where `given` is not None; return those of before."""
    global debugging
    before: Mapping[str, Any] = _core.set_options(*given)
    if given[0] is not None:
        debugging = bool(given[0])
    return before


class Restore:
    """The result of `set_options`: as a context manager it restores the options at the end of the block."""

    def __init__(self, before: Sequence[Any], raw: bool | None) -> None:
        self._before, self._raw = before, raw  # None: not changed

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _set(self._before)
        if self._raw is not None:
            streams.raw_addresses = self._raw


@names_nearest
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

    No option changes a bit of a sum. None leaves an option as it is.

    Parameters
    ----------
    debug : bool
        Hash each array when it is added and again when it is summed; a change between them is a RuntimeError that names
        the contribution. `fanin.tape` does so with what its derivatives read. Memory that is kept for later results is
        filled with a pattern, and a write to it ends the process. A function of a node that returns None for every
        gradient, though all are needed, gets a RuntimeWarning, once: it may lack a `return`. Default: False.
    budget : int, float or "auto"
        Bytes that may wait in a buffer without a budget of its own, for buffers made from now on (see
        `fanin.InputBuffer`). Default: "auto".
    pool_bytes : int or math.inf
        Bytes of freed large results (1 MiB and more) that are kept for later ones, and of each CUDA device's memory
        that are kept at a synchronize; 0 keeps none, `fanin.trim` frees them. Default: an eighth of the machine's
        memory, at most 1 GiB.
    warn_stream_mismatch : bool
        Give a `StreamMismatchWarning`, once, if a leaf accumulates on another stream than its gradient was made on
        (rule S6). Default: True.
    capture_redirect : bool
        Replace a consumer's stream that is in no capture by the captured stream that it would have to wait for (rule
        S7): the sum is then ready on the captured stream, and nothing outside joins the graph. Default: False.
    isa : str
        The instruction set of sums: "sse2", "avx2" or "avx512", or "plain" on other processors. A ValueError lists
        those of this machine. Default: the widest.
    threads : int
        The number of threads that share a large sum on the CPU, from 1 to 1024. Default: as many as the process may
        use, at most 8.
    raw_addresses : bool
        Accept arrays with `__cuda_array_interface__` and without DLPack (Numba's device arrays). Their address, extent
        and stream are believed, and a wrong extent ends the process. Default: False.
    detect : bool
        Make passes with `detect=None` end at the first gradient with an inf or NaN (`fanin.backward`), and record file
        and line of each new `fanin.Node` for errors of passes. Default: False.

    Returns
    -------
    Restore
        A context manager that restores the previous options.

    Examples
    --------
    >>> with fanin.set_options(debug=True):
    ...     fanin.add_n([np.ones(2), np.ones(2)])
    array([2., 2.])
    """
    if type(threads) is int and threads == 0:
        raise ValueError(f"threads={threads!r}: expected a number of threads from 1 to 1024")
    if raw_addresses is not None:
        raw_addresses = flag("set_options: raw_addresses", raw_addresses)
    given: dict[str, Any] = {
        "debug": debug,
        "warn_stream_mismatch": warn_stream_mismatch,
        "budget": budget,
        "isa": isa,
        "threads": threads,
        "pool_bytes": pool_bytes,
        "capture_redirect": capture_redirect,
        "detect": detect,
    }
    old = _set(list(given.values()))
    raw = streams.raw_addresses  # in the same step of a thread of `Machine.spawn`
    if raw_addresses is not None:
        streams.raw_addresses = raw_addresses
    before = [None if x is None else old[name] for name, x in given.items()]
    return Restore(before, None if raw_addresses is None else raw)
