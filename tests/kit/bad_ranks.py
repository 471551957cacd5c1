"""What one rank may do wrong, for every engine: each is an error on all ranks that names it, and the next sum works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import fanin
from fanin import dist
from fanin.dist.group import Group

BAD = 1  # the rank that does it


def leaves(shapes: list[Any]) -> list[fanin.Leaf]:
    return [fanin.Leaf(np.zeros(s, "f4"), name=f"w{i}") for i, s in enumerate(shapes)]


def roots(ws: list[fanin.Leaf], skip: tuple[int, ...] = ()) -> list[Any]:
    return [(w, 0, np.ones(w.array.shape, "f4")) for i, w in enumerate(ws) if i not in skip]


def order(group: Group) -> Any:
    """Exact, so in two levels, where ranks are on several nodes."""
    return "exact" if len(set(group.nodes)) > 1 else None


def one(group: Group, dtype: str = "f8", shape: Any = 3, **options: Any) -> Any:
    return dist.add_n([np.ones(shape, dtype)], group, **{"order": order(group), **options})


def reducer_of(group: Group, ws: list[fanin.Leaf], **options: Any) -> dist.Reducer:
    return dist.Reducer(ws, group, order=order(group), **options)


def reduced(group: Group, ws: list[fanin.Leaf], skip: tuple[int, ...] = (), **options: Any) -> None:
    fanin.backward(roots(ws, skip), reducer=reducer_of(group, ws, **options))


def raises(error: BaseException) -> Callable[[Any], Any]:
    def fn(g: Any) -> Any:
        raise error

    return fn


def node_raises(group: Group, error: BaseException | None) -> None:
    ws = leaves([3, 3])
    fn = raises(error) if error else lambda g: g
    node = fanin.Node(fn, edges=[(ws[0], 0)], name="Mul")
    fanin.backward([(node, 0, np.ones(3, "f4")), *roots(ws, (0,))], reducer=reducer_of(group, ws, bucket_bytes=1))


def accumulate_raises(group: Group, error: BaseException | None) -> None:
    ws = leaves([3])
    reducer = reducer_of(group, ws)
    with reducer.accumulate():
        fanin.backward(roots(ws))
        if error:
            raise error
    fanin.backward(roots(ws), reducer=reducer)


def nan(group: Group, bad: bool) -> None:
    ws = leaves([3, 3])
    fanin.backward(
        [(ws[0], 0, np.ones(3, "f4")), (ws[1], 0, np.full(3, np.nan if bad else 1, "f4"))],
        reducer=reducer_of(group, ws, detect=True),
    )


def accumulate_without_with(group: Group, bad: bool) -> None:
    ws = leaves([3])
    reducer = reducer_of(group, ws)
    if bad:
        reducer.accumulate(weight=2.0)
        fanin.backward(roots(ws))
    else:
        with reducer.accumulate(weight=2.0):
            fanin.backward(roots(ws))
    fanin.backward(roots(ws), reducer=reducer)


def weighed(group: Group, weight: float) -> None:
    ws = leaves([3])
    reducer = reducer_of(group, ws, mean=True)
    with reducer.accumulate(weight=2.0):
        fanin.backward(roots(ws))
    fanin.backward(roots(ws), reducer=reducer, weight=weight)


def swapped(bad: bool) -> list[fanin.Leaf]:
    return leaves([3, 4])[:: -1 if bad else 1]


#: The call of each rank, given whether it is the bad one; words of the error of the others; what the bad rank raises.
CASES: list[tuple[str, Callable[[Group, bool], Any], str, type[BaseException]]] = [
    ("shape", lambda g, bad: one(g, shape=4 if bad else 3), "rank 1 brings float64 of shape (4,)", fanin.PeerError),
    ("dtype", lambda g, bad: one(g, "f4" if bad else "f8"), "rank 1 brings float32", fanin.PeerError),
    ("options", lambda g, bad: one(g, scale=2 if bad else 3), ", scale=2", fanin.PeerError),
    ("mean", lambda g, bad: one(g, mean=bad), "rank 1 has order=", fanin.PeerError),
    (
        "floats as weights",
        lambda g, bad: one(g, weights=[2.0 if bad else 2], mean=True),
        "rank 1 gives floats as weights and rank 0 integers",
        fanin.PeerError,
    ),
    ("no weight", lambda g, bad: one(g, weights=[np.nan if bad else 2.0]), "rank 1 failed: ValueError", ValueError),
    (
        "a pass's weight",
        lambda g, bad: weighed(g, np.nan if bad else 2.0),
        "rank 1 failed: ValueError",
        ValueError,
    ),
    ("another call", lambda g, bad: g.barrier() if bad else one(g), "rank 1 is at call barrier", fanin.PeerError),
    ("no array", lambda g, bad: dist.add_n([object()], g) if bad else one(g), "rank 1 failed: TypeError", TypeError),
    ("array alone", lambda g, bad: dist.add_n(np.ones(3), g) if bad else one(g), "expected several arrays", TypeError),
    ("no with", accumulate_without_with, "called and never entered", RuntimeError),
    ("time limit", lambda g, bad: one(g, timeout=-1 if bad else None), "rank 1 failed: ValueError: add_n", ValueError),
    ("a leaf's shape", lambda g, bad: reduced(g, leaves([3, 4 if bad else 3])), "rank 1 has w1: ", fanin.PeerError),
    ("order of leaves", lambda g, bad: reduced(g, swapped(bad)), "rank 1 has w0: ", fanin.PeerError),
    ("more leaves", lambda g, bad: reduced(g, leaves([3] * (3 if bad else 2))), "rank 1 has w2: ", fanin.PeerError),
    ("fewer leaves", lambda g, bad: reduced(g, leaves([3] * (1 if bad else 2))), "rank 1 has ", fanin.PeerError),
    ("buckets", lambda g, bad: reduced(g, leaves([3, 3]), bucket_bytes=1 if bad else 99), "2 buckets", fanin.PeerError),
    (
        "a pass more",
        lambda g, bad: reduced(g, leaves([3])) if bad else one(g),
        "rank 1 is at call backward",
        fanin.PeerError,
    ),
    (
        "a node raises",
        lambda g, bad: node_raises(g, ValueError("x") if bad else None),
        "rank 1 failed (in Mul",
        ValueError,
    ),
    (
        "Ctrl-C in a node",
        lambda g, bad: node_raises(g, KeyboardInterrupt() if bad else None),
        "rank 1 failed",
        KeyboardInterrupt,
    ),
    (
        "a micro-batch raises",
        lambda g, bad: accumulate_raises(g, ValueError("x") if bad else None),
        "rank 1 failed: ValueError: x",
        ValueError,
    ),
    (
        "Ctrl-C in a micro-batch",
        lambda g, bad: accumulate_raises(g, KeyboardInterrupt() if bad else None),
        "rank 1 failed: KeyboardInterrupt",
        KeyboardInterrupt,
    ),
    ("NaN", nan, "w1: 3 elements inf or NaN", FloatingPointError),
    (
        "no gradient",
        lambda g, bad: reduced(g, leaves([3, 3]), (1,) if bad else ()),
        " and none on ranks [1]",
        fanin.PeerError,
    ),
]


def second_thread(group: Group) -> str:
    """The error of a thread that uses the group while a pass does."""
    ws = leaves([3])
    found: list[str] = []

    def other() -> None:
        try:
            one(group)
        except RuntimeError as e:
            found.append(str(e))

    def fn(g: Any) -> Any:
        worker = threading.Thread(target=other)
        worker.start()
        worker.join()
        return g

    node = fanin.Node(fn, edges=[(ws[0], 0)])
    fanin.backward([(node, 0, np.ones(3, "f4"))], reducer=reducer_of(group, ws))
    return found[0]


def wrongs(group: Group) -> list[str]:
    """What went wrong on this rank."""
    wrong = []
    good = [float(group.size)] * 3
    for name, call, words, kind in CASES:
        bad = group.rank == BAD
        try:
            call(group, bad)
            wrong.append(f"{name}: no error")
        except BaseException as e:
            if not isinstance(e, kind if bad else fanin.PeerError) or (not bad and words not in str(e)):
                wrong.append(f"{name}: {type(e).__name__}: {e}")
            if not bad and getattr(e, "rank", None) != BAD:
                wrong.append(f"{name}: rank {getattr(e, 'rank', None)} is named")
        if group.closed is not None or one(group).tolist() != good:
            wrong.append(f"{name}: the next sum failed")
            break
    if "another thread uses the group" not in second_thread(group):
        wrong.append("a second thread was not refused")
    if group.rank == BAD:
        x = np.full(3, np.nan)
    else:
        x = np.ones(3)
    for order in ("key", "exact", "rank"):
        if not np.isnan(dist.add_n([x], group, order)).all():  # type: ignore[arg-type]
            wrong.append(f"NaN is lost in order={order}")
    return wrong
