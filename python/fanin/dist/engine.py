"""What a group needs of MPI, torch.distributed or another library that carries messages."""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from fanin._interop.protocols import NDArray
from fanin.errors import PeerError

__tracebackhide__ = True  # no frames of ours in reports of pytest

T_co = TypeVar("T_co", covariant=True)


def end_of(timeout: float | None) -> float:
    """The time by `time.monotonic()` at which a wait of so many seconds is over; infinity for None."""
    return math.inf if timeout is None else time.monotonic() + timeout


def end_reason() -> str:
    """Why Python ends, for the other ranks: empty for a normal end."""
    error = getattr(sys, "last_value", None)  # sys.exit() sets none
    return "" if error is None else f": {type(error).__name__}: {error}"


class Late(TimeoutError):
    """Ranks that did not come within the time limit."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.rank = ranks[0] if ranks else None
        names = ", ".join(map(str, ranks))
        super().__init__(
            f"rank {names} did not answer" if len(ranks) == 1 else f"no answer of ranks {names}" if ranks else ""
        )


def blamed(reason: str, rank: int) -> PeerError:
    """The error of ranks that read the reason of `abort` on `rank`; it names the rank that the reason begins with, as
    ranks pass on what others sent them.
    """
    first = re.match(r"rank (\d+) ", reason)
    return PeerError(reason, int(first[1])) if first else PeerError(f"rank {rank} ended: {reason}", rank)


def pieces(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """The pieces of a flat array that lie side by side in it, of so many elements."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [flat[a:b] for a, b in itertools.pairwise(ends)]


class Pending(Protocol[T_co]):
    """An operation that was started."""

    def wait(self, timeout: float | None) -> T_co:
        """Return its result when it is complete; raise TimeoutError after `timeout` seconds, whose text may name the
        ranks that did not come. None: wait without a limit.
        """
        ...


class Engine(Protocol):
    """The operations of one rank. Every rank starts the same operations in the same order, from one thread at a time.

    Messages are contiguous arrays of uint8, which stay alive and unchanged until `wait` returns. An operation that can
    no longer succeed raises any exception, at its start or in `wait`. An engine may have `largest`, the bytes of its
    largest message, and `nodes`, for each rank the number of the machine that it runs on; both are the same on every
    rank.

    An engine may have an operation `share(sends, receives, again)`, with which sums begin instead of `exchange`: as
    `all_to_all`, but a message may be shorter than the array of `receives` that it comes into, and each rank sends each
    other one a message; the result is how many bytes each rank sent, or more. again: this rank gives the same two lists
    of arrays often. With `alike`, True, all arrays of `sends` are the same one. With `padded`, True, all arrays of
    `receives` have one size, the same on every rank, and those of `sends` at most that one; the result is not read.

    An engine that carries arrays of a device has `carries(x, device)`, which is None for an array that it does not
    carry, else a text that all ranks must have alike, and two operations. Their arrays are flat, of one dtype and of
    the kind of `x`, and without gaps; `stream` is the caller's current one of the device. They queue: what is queued on
    the stream after their `wait`, which does not wait for the device, comes after the messages, both ways; what they
    read and write comes after all that is queued on the stream before.

    - `device_all_to_all(send, sends, receive, receives, stream)`: send each rank its piece of `send`, and fill the
      pieces of `receive`, one from each rank; pieces lie side by side, `sends` and `receives` are the elements of each,
      those of this rank itself included.
    - `device_all_gather(whole, sizes, stream)`: send all ranks this rank's piece of `whole`, and fill theirs.

    An engine whose `abort` does more than to end waits, as `MPI_Abort` does, may have `retire(reason)`: it is called
    instead where a rank closes its group, or Python ends, without an error.
    """

    rank: int  #: from 0 to size - 1
    size: int  #: the number of ranks
    name: str  #: for messages: "MPI_COMM_WORLD"

    def exchange(self, data: bytes) -> Pending[Sequence[bytes]]:
        """Send the same few bytes to all ranks; the result is what each rank sent. All ranks send as many bytes."""
        ...

    def all_to_all(self, sends: Sequence[NDArray], receives: Sequence[NDArray]) -> Pending[Any]:
        """Send each rank its array of `sends`, and fill each array of `receives` from its rank.

        Both ends of a message have the same size; an array of 0 bytes is no message. Those of this rank itself are
        empty. One array may go to several ranks.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the operations of all ranks as far as the library can; this rank starts no more."""
        ...

    def close(self) -> None:
        """Free what the engine holds. May be called twice."""
        ...
