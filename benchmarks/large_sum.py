"""Sums of N arrays from 16 KB to 128 MB beside their peers and the read floor: python benchmarks/large_sum.py [--quick].

The floor is every input read once and nothing done; no algorithm is faster on arrays that no cache holds. Results go into
memory that was written before, but in the rows "cold", where each round makes its own. Offsets of the inputs relative to each other
are swept, as processors mind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import CORES, OFFSETS, QUICK, array, finish, pin, size_text, timed

import fanin
from fanin import _core
from fanin.cli import bench


def peers(arrays: list[Any], out: Any) -> bench.Work:
    """The ways to the same sum."""
    sources = tuple(arrays)

    def chain() -> None:
        np.add(arrays[0], arrays[1], out=out)
        for x in arrays[2:]:
            np.add(out, x, out=out)

    def floor() -> None:
        for x in arrays:
            _core._test_read(x)

    work: bench.Work = {
        "np.add(out=) chain": chain,
        "read floor": floor,
        "fanin.add_n(out=)": lambda: fanin.add_n(arrays, out=out),
        "the fold alone": lambda: _core._test_sum(out, sources, "float32", False),
    }
    torch = bench.peer("torch")
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in arrays]
        total = torch.from_numpy(out)

        def torch_chain() -> None:
            torch.add(tensors[0], tensors[1], out=total)
            for x in tensors[2:]:
                total.add_(x)

        work["torch add_ chain"] = torch_chain
    return work


def cold(arrays: list[Any]) -> bench.Work:
    """The same into memory made for it."""

    def fresh() -> Any:
        total = arrays[0] + arrays[1]
        for x in arrays[2:]:
            total += x
        return total

    return {"a + b, then +=": fresh, "fanin.add_n": lambda: fanin.add_n(arrays)}


def compiled(arrays: list[Any], work: bench.Work) -> None:
    """jax.jit of the whole sum, where it is installed."""
    jax = bench.peer("jax")
    if jax is None:
        return
    given = [jax.numpy.asarray(x) for x in arrays]

    @jax.jit
    def total(xs: Any) -> Any:
        sum_ = xs[0]
        for x in xs[1:]:
            sum_ = sum_ + x
        return sum_

    work["jax.jit"] = lambda: total(given).block_until_ready()


def results() -> Iterator[dict[str, Any]]:
    """All rows."""
    torch = bench.peer("torch")
    sizes = [16 << 10, 256 << 10, 4 << 20] + ([] if QUICK else [128 << 20])
    for threads in range(1, min(2, len(CORES)) + 1):
        where = pin(threads)
        if torch is not None:
            torch.set_num_threads(threads)
        fanin.set_options(threads=threads)
        for size in sizes:
            for n in (2, 8) if QUICK else (2, 4, 8, 16):
                for name, offset in OFFSETS.items():
                    arrays = [array(size // 4, "f4", offset(k)) for k in range(n)]
                    for k, x in enumerate(arrays):
                        x[:] = k + 0.5
                    out = array(size // 4)
                    title = f"{n} x {size_text(size)} float32, offsets {name}, cores {where}"
                    work = peers(arrays, out)
                    if name == "0" and threads == 1 and not QUICK:
                        compiled(arrays, work)
                    yield timed(title, work, "np.add(out=) chain", (n + 1) * size)
                    if name == "0":
                        yield timed(title + ", cold", cold(arrays), "a + b, then +=", (n + 1) * size)


if __name__ == "__main__":
    finish("large_sum", results())
