"""What the benchmarks share: a pinned core, arrays at chosen places, one way to show and to write figures.

Each benchmark is run as `python benchmarks/NAME.py [--quick]`; the figures go to benchmarks/results/, but for --quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fanin.cli import bench
from fanin.cli.screen import Screen

QUICK = "--quick" in sys.argv
PAGE = 4096

#: Where array k begins behind the start of a page: the offsets of the streams relative to each other change what a machine does.
OFFSETS = {
    "0": lambda k: 0,
    "64 k": lambda k: 64 * k,
    "1088 k": lambda k: 1088 * k,
    "random": lambda k: (k * 2654435761 >> 8) % (PAGE // 64) * 64 + (k * 40503 >> 4) % 16 * PAGE,
}


def pin(threads: int = 1) -> str:
    """Keep this process on the last `threads` cores it may use; which."""
    may = sorted(CORES)[-threads:]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, may)
    return ", ".join(map(str, may))


CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def array(size: int, dtype: Any = "f4", offset: int = 0) -> Any:
    """`size` elements, already faulted in, `offset` bytes behind the start of a page."""
    dtype = np.dtype(dtype)
    raw = np.empty(size * dtype.itemsize + offset + PAGE, "u1")
    raw[:] = 0
    start = -raw.ctypes.data % PAGE + offset
    return raw[start : start + size * dtype.itemsize].view(dtype)


def finish(name: str, results: Iterable[dict[str, Any]]) -> None:
    """Show each result as it comes, and write all."""
    kept = []
    for one in results:
        bench.show(Screen(), one)
        kept.append(one)
    if not QUICK:
        bench.write(Path(__file__).parent / "results" / f"{name}.json", kept)


def size_text(size: int) -> str:
    """16 KB, 4 MB."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def rounds(size: int) -> tuple[int, int]:
    """For work on so many bytes: how many rounds, and how many calls in each."""
    calls = max(1, min(1000, (1 << 21) // size))
    return (3 if QUICK else 9 if size > 1 << 27 else 25), calls


def timed(title: str, work: bench.Work, base: str, size: int, least: int = 0) -> dict[str, Any]:
    """Figures in milliseconds or microseconds for each call; `size`: the bytes that one call touches."""
    times, calls = rounds(size)
    inner = {name: (lambda fn=fn: bench.repeat(calls, fn)) for name, fn in work.items()}
    taken = bench.turns(inner, rounds=max(times, least))
    unit, factor = ("ms", 1e6) if size > 1 << 24 else ("us", 1e3)
    return bench.result(title, unit, {k: [t / calls / factor for t in v] for k, v in taken.items()}, base)
