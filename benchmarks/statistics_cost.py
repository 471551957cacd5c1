"""What norm, largest element and non-finite count cost beside the sum itself: python benchmarks/statistics_cost.py [--quick]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import QUICK, array, finish, pin, size_text, timed

import fanin
from fanin import _core
from fanin.cli import bench


def results() -> Iterator[dict[str, Any]]:
    """All rows."""
    print(f"core {pin()}")
    fanin.set_options(threads=1)
    for size in [256 << 10, 4 << 20] + ([] if QUICK else [128 << 20]):
        for n in (2, 4, 8):
            arrays = [array(size // 4, "f4", 1088 * k) for k in range(n)]
            for k, x in enumerate(arrays):
                x[:] = k + 0.5
            out = array(size // 4)
            sources = tuple(arrays)
            in_place = (out, *arrays[1:])

            def apart(out: Any = out, sources: Any = sources) -> None:
                _core._test_sum(out, sources, "float32", False)
                np.dot(out, out)
                np.isfinite(out).all()

            work: bench.Work = {
                "sum": lambda: _core._test_sum(out, sources, "float32", False),
                "sum and statistics": lambda: _core._test_sum(out, sources, "float32", True),
                "sum, then np.dot, np.isfinite": apart,
                "in place": lambda: _core._test_sum(out, in_place, "float32", False),
                "in place and statistics": lambda: _core._test_sum(out, in_place, "float32", True),
            }
            torch = bench.peer("torch")
            if torch is not None:
                torch.set_num_threads(1)
                total = torch.from_numpy(out)

                def clip(sources: Any = sources, total: Any = total, out: Any = out) -> None:
                    _core._test_sum(out, sources, "float32", False)
                    torch.linalg.vector_norm(total)

                work["sum, then torch's norm"] = clip
            yield timed(f"{n} x {size_text(size)} float32", work, "sum", (n + 1) * size)


if __name__ == "__main__":
    finish("statistics_cost", results())
