"""bfloat16 and float16: time beside torch's chain, and the error against the exact sum.

The error is the root mean square of (sum - exact) / (root mean square of the exact sums), for N from 2 to 256 normal
contributions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .common import FLOOR, TORCH, array, effort, read_all, size_text
from .timing import Result, at_least, measure, peer, pinned

CAST = "torch, cast to float32 first"


def times(name: str, size: int, n: int, where: str, quick: bool) -> Result:
    """n x size bytes: the sum, and torch's chains."""
    dtype = dtype_of(name)
    count = size // 2
    arrays = [array(count, "u2", 1088 * k) for k in range(n)]
    for k, x in enumerate(arrays):
        x[:] = np.full(1, k + 0.5).astype(dtype).view("u2")
    out = array(count, "u2")
    typed = [x.view(dtype) for x in arrays]
    target = out.view(dtype)
    ours = "fanin.add_n(out=)"

    def floor() -> None:
        for x in arrays:
            read_all(x)

    work: dict[str, Any] = {ours: lambda: fanin.add_n(typed, out=target), FLOOR: floor, TORCH: None, CAST: None}
    torch = peer("torch")
    if torch is not None:
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

        work |= {TORCH: chain, CAST: upcast}
    targets = (
        [at_least(3.5, ours, TORCH)] if size >= 1 << 20 and name == "bfloat16" else [at_least(1, ours, TORCH, CAST)]
    )
    return measure(
        f"{n} x {size_text(size)} {name}, core {where}",
        work,
        base=ours,
        targets=targets,
        **effort((n + 1) * size, quick),
    )


def dtype_of(name: str) -> np.dtype:
    """bfloat16 is no dtype of NumPy's own."""
    if name == "float16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


def errors(name: str) -> Result:
    """Errors by N: as "min" that of one rounding, as "median" that of one for each add."""
    dtype = dtype_of(name)
    rng = np.random.default_rng(1)
    rows = {}
    for n in (2, 8, 32, 256):
        arrays = [rng.standard_normal(4096).astype(dtype) for _ in range(n)]
        exact = np.sum([x.astype("f8") for x in arrays], axis=0)
        pairwise = arrays[0]
        for x in arrays[1:]:
            pairwise = pairwise + x
        scale = np.sqrt(np.mean(exact**2))
        once, each = (
            float(np.sqrt(np.mean((x.astype("f8") - exact) ** 2)) / scale) for x in (fanin.add_n(arrays), pairwise)
        )
        rows[f"N = {n}"] = {
            "min": once * 1e4,
            "median": max(once, each) * 1e4,
            "ratio": each / once,
            "ratio_of_minima": each / once,
            "rounds": 1,
        }
    title = f"{name}: error in 1e-4 (min: fanin.add_n, median: a rounding for each add)"
    return {"title": title, "unit": "1e-4", "base": "N = 2", "rounds": 1, "rows": rows, "absent": [], "targets": []}


def results(quick: bool) -> Iterator[Result]:
    """All rows."""
    if peer("ml_dtypes") is None:
        return
    with pinned() as where:
        for name in ("bfloat16", "float16"):
            for size in [16 << 10, 256 << 10] + ([] if quick else [64 << 20]):
                yield times(name, size, 8, where, quick)
            yield errors(name)
