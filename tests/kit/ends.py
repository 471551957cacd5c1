"""A rank that ends at one message of sums over ranks, whichever it is; and what every rank then has seen."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import fanin
from fanin import dist
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer

ENDING = 1  #: the rank that ends

#: Does the sums of a scene, and yields whether each is right.
Scene = Callable[[Group], Iterator[bool]]


def of_all(group: Group) -> float:
    return sum(range(1, group.size + 1))


def summed(group: Group, size: int, each: int = 1, order: Any = None) -> bool:
    total = dist.add_n([np.full(size, 1.0 + group.rank)] * each, group, order)
    return bool((total == each * of_all(group)).all())


def arrays_with_plans(group: Group) -> Iterator[bool]:
    """Terms that travel to all with the head, to owners with the head, and after it."""
    for size in (100, 20_000, 40_000) * 2:
        yield summed(group, size)


def forgotten_plan(group: Group) -> Iterator[bool]:
    """Rank 0 has no plan of the third sum any more, so that all ranks send their headers after their heads."""
    for turn in range(4):
        if turn == 2 and group.rank == 0:
            group._plans.clear()
        yield summed(group, 100)


def long_headers(group: Group) -> Iterator[bool]:
    """Keys of which a header is longer than the first message."""
    many = 9000 // group.size
    keys = range(many * group.rank, many * (group.rank + 1))
    total = dist.add_n([np.full(2, 1.0 + group.rank)] * many, group, "key", keys=[k << 40 for k in keys])
    yield bool((total == many * of_all(group)).all())


def buckets_with_plans(group: Group) -> Iterator[bool]:
    """Passes of two buckets, whose end has a message, too."""
    leaves = [fanin.Leaf(np.zeros(n), name=f"w{n}") for n in (100, 40_000)]
    reducer = Reducer(leaves, group, bucket_bytes=1)
    for turn in range(3):
        fanin.backward([(w, 0, np.full(w.array.shape, 1.0 + group.rank)) for w in leaves], reducer=reducer)
        yield all((w.grad == (turn + 1) * of_all(group)).all() for w in leaves)


def fold_over_nodes(group: Group) -> Iterator[bool]:
    for _ in range(2):
        yield summed(group, 20_000, 2, "key")


def exact_sum_over_nodes(group: Group) -> Iterator[bool]:
    for _ in range(2):
        yield summed(group, 3000, 2, "exact")


def sparse_rows(group: Group) -> Iterator[bool]:
    rows, columns = (x.ravel() for x in np.meshgrid([0, 5 + group.rank], range(32), indexing="ij"))
    right = np.zeros((600, 32))
    right[0] = of_all(group)
    for rank in range(group.size):
        right[5 + rank] = 1.0 + rank
    table = fanin.Leaf(np.zeros((600, 32)), name="table")
    reducer = Reducer([table], group)
    for _ in range(2):
        table.grad = None
        values = np.full(len(rows), 1.0 + group.rank)
        fanin.backward(
            [(table, 0, fanin.Sparse("coo", (np.stack([rows, columns]), values), (600, 32)))], reducer=reducer
        )
        yield bool((table.grad == right).all())


def skipped_step(group: Group) -> Iterator[bool]:
    """The last rank has nothing in the second step."""
    for group.step in range(3):
        if (group.rank, group.step) == (group.size - 1, 1):
            totals = group.skip()
        else:
            totals = [dist.add_n([np.full(100, 1.0 + group.rank)], group)]
        left_out = group.size if group.step == 1 else 0
        yield len(totals) == 1 and bool((totals[0] == of_all(group) - left_out).all())


IN_ONE_LEVEL: list[Scene] = [
    arrays_with_plans,
    forgotten_plan,
    long_headers,
    buckets_with_plans,
    sparse_rows,
    skipped_step,
]
IN_TWO_LEVELS: list[Scene] = [fold_over_nodes, exact_sum_over_nodes, buckets_with_plans]


class Seen(NamedTuple):
    """What a rank has seen of a scene."""

    right: list[bool]  #: for each sum that it got whether it is right
    error: str  #: empty: none
    blamed: int | None  #: the rank of a PeerError
    closed: str | None
    operations: int  #: of the engine, that the rank has started


def fails() -> None:
    raise OSError("planted")


def leaves() -> None:
    raise SystemExit("planted")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_told(told: threading.Event) -> Callable[[], None]:
    def is_late() -> None:
        told.wait()

    return is_late


def seen(group: Group, scene: Scene, at: int | None, act: Callable[[], None]) -> Seen:
    """Run a scene in which rank ENDING does `act` before it starts the engine's operation number `at`."""
    engine: Any = group._engine
    started = itertools.count()
    right: list[bool] = []
    error, blamed = "", None

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any) -> Any:
            if next(started) == at and group.rank == ENDING:
                act()
            return real(*args)

        return operation

    for name in ("share", "exchange", "all_to_all"):
        setattr(engine, name, counted(getattr(engine, name)))
    try:
        right.extend(scene(group))
        group.barrier()  # a rank whose sums need nothing of the one that ended learns of it here
    except fanin.PeerError as e:
        error, blamed = f"PeerError: {e}", e.rank
    except (OSError, SystemExit) as e:
        error = f"{type(e).__name__}: {e}"
    for name in ("share", "exchange", "all_to_all"):
        delattr(engine, name)
    return Seen(right, error, blamed, group.closed, next(started))


def wrong(every: list[Seen], blames: bool = True, words: str = "") -> list[Any]:
    """What is wrong of the ranks of a scene in which rank ENDING ended; blames: the others must name it."""
    found: list[Any] = []
    for rank, one in enumerate(every):
        if not all(one.right):
            found.append((rank, "wrong sums", one.right))
        if rank == ENDING:
            continue
        if not one.error.startswith("PeerError") or not one.closed or words not in one.error:
            found.append((rank, one.error, one.closed))
        if blames and one.blamed != ENDING:
            found.append((rank, "blames", one.blamed, one.error))
    counts = [len(one.right) for one in every]
    if max(counts) > min(counts) + 1:
        found.append(("sums", counts))
    return found
