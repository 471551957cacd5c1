"""A new group of the ranks that are left (`Group.survivors`).

The ranks agree on a board that all of them read and write: the store of torch.distributed, or a dict that threads
share. Its `first` keeps the first value that any rank gives for a name, and returns that to all of them; so a decision
is made once, whichever rank makes it. An attempt has two decisions:

    members   the ranks that called `survivors`: when every rank did that is not known to be gone, or at a time limit
    outcome   "made" if each of them has made the new group, else why it was not

A rank returns the group that "made" names, or raises; no two ranks of an attempt differ. A rank that comes when an
attempt has failed takes part in the next one; one that comes after a group was made without it is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from fanin.errors import PeerError

from .engine import Engine, end_of

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Board(Protocol):
    """Names and texts that all ranks of a group read and write, also when a rank is gone."""

    def put(self, name: str, text: str) -> None:
        """Set the text of a name."""
        ...

    def get(self, name: str) -> str | None:
        """The text of a name; None: it has none."""
        ...

    def first(self, name: str, text: str) -> str:
        """Set the text of a name if it has none, and return the one that it has."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait for a change, at most so long."""
        ...

    def left(self) -> Collection[int]:
        """The ranks that have closed their group or ended, as they have said."""
        ...


class Remade(Protocol):
    """An engine of which survivors make another one."""

    def board(self) -> Board:
        """The ranks' board. Raises PeerError if it is gone."""
        ...

    def suspects(self) -> Collection[int]:
        """The ranks whose connection was lost."""
        ...

    def remade(self, members: Sequence[int], attempt: int, timeout: float | None) -> Engine:
        """The engine of the ranks `members` of this one, which all of them call."""
        ...


#: Seconds for which a rank is waited for whose connection was lost: its process may live.
GRACE = 3.0
#: Seconds between two looks at a board that tells of no changes.
LOOK = 0.05

MADE = "made"
_SILENT = "did not come"


def agreed(engine: Remade, rank: int, size: int, timeout: float | None) -> tuple[Engine, list[int]]:
    """The new engine, and its ranks as those of this one; the same on all of them, or PeerError."""
    board = engine.board()
    gone = set(engine.suspects())
    attempt = 1
    while (outcome := board.get(f"{attempt} outcome")) not in (None, MADE):
        attempt += 1
        if outcome.endswith(_SILENT):
            gone.add(rank_of(outcome))
    members = _members(board, gone - {rank}, rank, size, attempt, timeout)
    if rank not in members:
        names = ", ".join(map(str, members))
        raise PeerError(f"survivors: ranks {names} went on without rank {rank}, which came late: end this rank", rank)
    made: Engine | None = None
    why = MADE
    try:
        made = engine.remade(members, attempt, timeout)
    except Exception as e:
        why = f"rank {rank} failed: {type(e).__name__}: {e}"
    board.put(f"{attempt} made {rank}", why)
    outcome = _outcome(board, members, attempt, timeout)
    if outcome != MADE or made is None:
        raise PeerError(f"survivors: {outcome}; call it again", rank_of(outcome))
    return made, members


def rank_of(outcome: str) -> int:
    """The rank for which no group was made."""
    return int(outcome.split()[1])


def _members(
    board: Board, suspects: Collection[int], rank: int, size: int, attempt: int, timeout: float | None
) -> list[int]:
    """The ranks of the new group: decided once."""
    board.put(f"{attempt} here {rank}", json.dumps(sorted(suspects)))

    patience = end_of(GRACE)

    def decide(over: bool) -> str | None:
        said = {r: text for r in range(size) if (text := board.get(f"{attempt} here {r}")) is not None}
        left = set(board.left())
        missing = set(range(size)) - set(said) - left
        if time.monotonic() >= patience:
            missing = missing.difference(*map(json.loads, said.values()))
        return None if missing and not over else json.dumps(sorted(set(said) - left))

    members: list[int] = json.loads(_decided(board, f"{attempt} members", decide, timeout))
    return members


def _outcome(board: Board, members: Sequence[int], attempt: int, timeout: float | None) -> str:
    """Whether all members have made the group: decided once."""

    def decide(over: bool) -> str | None:
        said = {r: text for r in members if (text := board.get(f"{attempt} made {r}")) is not None}
        failed = next((text for text in said.values() if text != MADE), None)
        ended = next((r for r in members if r in board.left() and r not in said), None)
        late = [r for r in members if r not in said]
        if failed is not None:
            return failed
        if ended is not None:
            return f"rank {ended} ended meanwhile"
        if late and over:
            return f"rank {late[0]} {_SILENT}"
        return None if late else MADE

    return _decided(board, f"{attempt} outcome", decide, timeout)


def _decided(board: Board, name: str, decide: Callable[[bool], str | None], timeout: float | None) -> str:
    """The text of a name that the first rank has set for which `decide(time limit is over)` had one."""
    end = end_of(timeout)
    while (found := board.get(name)) is None:
        mine = decide(time.monotonic() >= end)
        if mine is not None:
            return board.first(name, mine)
        board.pause(max(min(LOOK, end - time.monotonic()), 0))
    return found
