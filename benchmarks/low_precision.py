"""bfloat16 and float16: time beside torch's chain, and the error against the exact sum: python benchmarks/low_precision.py [--quick].

The error is the root mean square of (sum - exact) / (root mean square of the exact sums), for N from 2 to 256 normal contributions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import QUICK, array, finish, pin, timed

import fanin
from fanin import _core
from fanin.cli import bench


def times(name: str, size: int, n: int) -> dict[str, Any]:
    """n x size bytes: the fold, and torch's chain."""
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)
    count = size // 2
    arrays = [array(count, "u2", 1088 * k) for k in range(n)]
    for k, x in enumerate(arrays):
        x[:] = np.full(1, k + 0.5).astype(dtype).view("u2")
    out = array(count, "u2")
    sources = tuple(arrays)
    typed = [x.view(dtype) for x in arrays]
    target = out.view(dtype)
    work: bench.Work = {
        "the fold alone": lambda: _core._test_sum(out, sources, name, False),
        "fanin.add_n(out=)": lambda: fanin.add_n(typed, out=target),
    }
    base = "the fold alone"
    torch = bench.peer("torch")
    if torch is not None:
        torch.set_num_threads(1)
        kind = getattr(torch, name)
        tensors = [torch.from_numpy(x).view(kind) for x in arrays]
        total = torch.from_numpy(out).view(kind)

        def chain() -> None:
            torch.add(tensors[0], tensors[1], out=total)
            for x in tensors[2:]:
                total.add_(x)

        def upcast() -> None:
            wide = tensors[0].float()
            for x in tensors[1:]:
                wide.add_(x)
            total.copy_(wide)

        work["torch add_ chain"] = chain
        work["torch, cast to float32 first"] = upcast
        base = "torch add_ chain"
    return timed(f"{n} x {size >> 10} KB {name}", work, base, (n + 1) * size)


def errors(name: str) -> dict[str, Any]:
    """Relative errors by N, of one rounding and of one for each add."""
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)
    rng = np.random.default_rng(1)
    rows = {}
    for n in (2, 8, 32, 256):
        arrays = [rng.standard_normal(4096).astype(dtype) for _ in range(n)]
        exact = np.sum([x.astype("f8") for x in arrays], axis=0)
        pairwise = arrays[0]
        for x in arrays[1:]:
            pairwise = pairwise + x
        scale = np.sqrt(np.mean(exact**2))
        once = np.sqrt(np.mean((fanin.add_n(arrays).astype("f8") - exact) ** 2)) / scale
        each = np.sqrt(np.mean((pairwise.astype("f8") - exact) ** 2)) / scale
        rows[f"N = {n}"] = {
            "min": once * 1e4,
            "median": each * 1e4,
            "ratio": each / once,
            "ratio_of_minima": each / once,
        }
    return {
        "title": f"{name}: error in 1e-4; min: fanin.add_n, median: one rounding for each add",
        "unit": "1e-4",
        "base": "one rounding for each add",
        "rounds": 1,
        "rows": rows,
    }


def results() -> Iterator[dict[str, Any]]:
    """All rows."""
    print(f"core {pin()}")
    fanin.set_options(threads=1)
    for name in ("bfloat16", "float16"):
        for size in [16 << 10, 256 << 10] + ([] if QUICK else [64 << 20]):
            yield times(name, size, 8)
        yield errors(name)


if __name__ == "__main__":
    finish("low_precision", results())
