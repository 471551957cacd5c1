"""Traces of all ranks, gathered on one of them, on one clock."""

from __future__ import annotations

import json
import time
import zlib

import numpy as np

from fanin._interop.protocols import NDArray
from fanin._trace.ranks import RanksTrace, packed, unpacked
from fanin._trace.recording import Trace
from fanin._words import type_of

from .group import Group, TimeLimit
from .group import group as group_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

ROUNDS = 32  #: exchanges by which clocks are compared, at a time ..
TIMES = 8  #: .. so many times, unless the error is small before
SMALL = 50_000  #: ns


def offsets(times: NDArray, into: int) -> tuple[list[int], list[int]]:
    """By how many ns each rank's clock is ahead of that of rank `into`, and the most by which that may be wrong.

    No rank ends an exchange before every rank has begun it. So with an offset o, and [begin, end] of the two ranks,
    begin_into <= end - o and begin - o <= end_into in each one: o lies between begin - end_into and end - begin_into.

    Parameters
    ----------
    times : array
        [rank, exchange, 2]: the begin and end of each exchange, on the clock of each rank, in ns.
    """
    begin, end = times[..., 0], times[..., 1]
    low, high = (begin - end[into]).max(axis=1), (end - begin[into]).min(axis=1)
    middle, error = (low + high) // 2, (high - low + 1) // 2
    middle[into] = error[into] = 0
    return middle.tolist(), error.tolist()


def gather_trace(
    trace: Trace, group: object = None, *, into: int = 0, timeout: TimeLimit = "group"
) -> RanksTrace | None:
    """Gather the traces of all ranks on rank `into`, on one clock. Every rank of the group calls it.

    Clocks are compared when it is called, by messages to all ranks and back; the result has the offset of each rank's
    clock and the most by which it may be wrong.

    Parameters
    ----------
    trace : Trace
        This rank's, of `fanin.trace()`, after its block. Of work on the CPU.
    group : optional
        A group, or what `fanin.dist.group` accepts.
    into : int
        The rank that gets the result.
    timeout : float or "group", optional
        Seconds after which a rank no longer waits for another. None: it waits without a limit. Default: the group's.

    Returns
    -------
    RanksTrace or None
        On rank `into`: `save(path)` writes a file for ui.perfetto.dev with a process for each rank and an arrow for
        each message of a bucket; `plot(path)` draws it; `summary()` has each rank's passes.

    Raises
    ------
    TypeError, ValueError
        On this rank, for something else than such a trace, or for no rank; the others get a PeerError.
    fanin.PeerError
        On every rank, if a rank failed.

    >>> def train(group):
    ...     w = fanin.Leaf(np.zeros(2), name="w")
    ...     reducer = fanin.dist.Reducer([w], group)
    ...     with fanin.trace() as t:
    ...         fanin.backward([(w, 0, np.ones(2))], reducer=reducer)
    ...     return fanin.dist.gather_trace(t, group)
    >>> ranks = fanin.dist.threads(2, train)[0]
    >>> [message.bytes for message in ranks.picture().messages]
    [16, 16]
    """
    ranks = group if isinstance(group, Group) else group_of(group)
    with ranks.call("gather_trace", timeout) as call:
        if not isinstance(trace, Trace):
            raise TypeError(f"gather_trace: expected a trace by fanin.trace(), got {type_of(trace)}")
        if trace._depth:
            raise ValueError("gather_trace: this trace is recording: expected it after its block")
        if isinstance(into, bool) or not isinstance(into, int) or not 0 <= into < ranks.size:
            raise ValueError(f"gather_trace: expected into= as a rank from 0 to {ranks.size - 1}, got {into!r}")
        text = json.dumps([ranks._number, packed(trace.lines)], separators=(",", ":"))
        data = np.frombuffer(zlib.compress(text.encode(), 1), np.uint8)
        headers = call.meet({"bytes": len(data)}, digest=str(into))
        call.compare(headers, [["", f"into={into}"]])
        times: list[NDArray] = []
        errors = [SMALL + 1]
        while max(errors) > SMALL and len(times) < TIMES:  # all ranks have the same numbers
            own = []
            for _ in range(ROUNDS):
                begin = time.monotonic_ns()
                call.start("exchange", bytes(8), step="clocks")
                own.append((begin, time.monotonic_ns()))
            frames = call.start("exchange", np.array(own, "<i8").tobytes(), step="clocks")
            times.append(np.array([np.frombuffer(f, "<i8").reshape(ROUNDS, 2) for f in frames]))
            found, errors = offsets(np.concatenate(times, axis=1), into)
        mine, nothing = ranks.rank == into, data[:0]
        sends = [data if r == into and not mine else nothing for r in range(ranks.size)]
        got = [np.empty(h["bytes"] if mine and r != into else 0, np.uint8) for r, h in enumerate(headers)]
        call.start("all_to_all", sends, got, step="traces")
    if not mine:
        return None
    got[into] = data
    every = [json.loads(zlib.decompress(x.tobytes())) for x in got]
    return RanksTrace([unpacked(rows) for _, rows in every], [number for number, _ in every], found, errors)
