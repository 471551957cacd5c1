"""What analysis costs beside the function itself: guard, collect_metadata, wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fanin.analysis import collect_metadata, functionalize
from fanin.analysis.calls import call_of
from fanin.analysis.guards import Guard

from .common import size_text
from .timing import Result, at_most, measure, pinned

ARRAYS = 100
OPS = 100


def hundred_ops(x: Any, y: Any) -> Any:
    """100 operations, of which a fifth write, and views between them."""
    t = x * 2
    for _ in range(OPS // 5 - 1):
        t = t + y
        t *= 0.5
        x += t
        v = x[1:]
        t = np.maximum(t, y)
        v[0] = 1.0
    return x, t[::2]


def step(*args: Any) -> None:
    """Parameters, then gradients: each parameter is written."""
    half = len(args) // 2
    for w, g in zip(args[:half], args[half:], strict=True):
        w -= 0.01 * g


def bounded(one: Result, row: str, name: str, bound: float) -> Result:
    """A result with one more row, a time that is no measurement, that `row` is held against."""
    times = {row: [one["rows"][row][k] for k in ("min", "median", "median")], name: [bound]}
    base = one["rows"][one["base"]]
    one["rows"][name] = {
        "min": bound,
        "median": bound,
        "ratio": base["median"] / bound,
        "ratio_of_minima": base["min"] / bound,
        "rounds": 1,
    }
    one["targets"].append(at_most(1.0, row, name).outcome(times))
    return one


def guard(quick: bool) -> Result:
    """The guard of a call with 100 arrays, a part of which overlap."""
    flat = np.zeros(64 * ARRAYS)
    args = tuple(flat[64 * i : 64 * i + (96 if i % 10 == 0 else 64)] for i in range(ARRAYS - 1)) + (np.zeros(64),)
    names = {"guard": Guard(call_of(args, {}, "bench")), "args": args}
    work = {
        "the guard": "guard.arrays(args, {})",
        "dtype, shape, strides alone": "[(a.dtype, a.shape, a.strides) for a in args]",
    }
    one = measure(
        f"guard of {ARRAYS} arrays",
        work,
        base="dtype, shape, strides alone",
        unit="us",
        names=names,
        rounds=5 if quick else 300,
        calls=20,
    )
    return bounded(one, "the guard", "20 us", 20.0)


def metadata(size: int, quick: bool) -> Result:
    """collect_metadata of a function of 100 operations."""
    x, y = np.ones(size // 8), np.ones(size // 8)
    work = {
        "the function itself": lambda: hundred_ops(x, y),
        "collect_metadata": lambda: collect_metadata(hundred_ops, [x, y]),
    }
    one = measure(
        f"metadata of {OPS} operations on {size_text(size)}",
        work,
        base="the function itself",
        unit="us",
        rounds=3 if quick else 60,
        calls=1 if quick else 5,
    )
    itself = one["rows"]["the function itself"]["median"]
    return bounded(one, "collect_metadata", "3 x itself and 1 ms", 3 * itself + 1000)


def overhead(count: int, size: int, quick: bool) -> Result:
    """An optimizer's step by the wrapper, with and without copies of what is only read."""
    args = [np.ones(size // 8) for _ in range(count)]
    plain, lending = functionalize(step), functionalize(step, lend=True)
    for f in (plain, lending):
        f(*args)
    work = {
        "the function itself": lambda: step(*args),
        "functionalize": lambda: plain(*args),
        "functionalize, lend=True": lambda: lending(*args),
    }
    return measure(
        f"step on {count} arrays of {size_text(size)}",
        work,
        base="the function itself",
        unit="us",
        rounds=3 if quick else 60,
        calls=1 if quick else 5,
    )


def empty(quick: bool) -> Iterator[Result]:
    """A call that does nothing: what guard and snapshot cost. Tensors are held against ndarrays, where torch is."""
    try:
        import torch
    except ImportError:
        return
    arrays, tensors = [np.ones(8) for _ in range(ARRAYS)], [torch.ones(8) for _ in range(ARRAYS)]
    f = functionalize(lambda *args: None)
    yield measure(
        f"an empty call of {ARRAYS}",
        {"ndarrays": lambda: f(*arrays), "torch tensors": lambda: f(*tensors)},
        base="ndarrays",
        unit="us",
        targets=[at_most(4.0, "torch tensors", "ndarrays")],
        rounds=5 if quick else 300,
        calls=20,
    )


def results(quick: bool) -> Iterator[Result]:
    """us for each call."""
    with pinned():
        yield guard(quick)
        yield from empty(quick)
        for size in (512, 1 << 14) if quick else (512, 1 << 16, 1 << 20):
            yield metadata(size, quick)
        for count, size in (
            ((2, 512), (ARRAYS, 512)) if quick else ((2, 512), (ARRAYS, 512), (ARRAYS, 1 << 16), (4, 1 << 23))
        ):
            yield overhead(count, size, quick)
