"""How long exact sums take, beside plain ones: python benchmarks/exact_sums.py [--quick].

"wide" has exponents over 80 powers of two, "any bits" every float32 there is: what needs the slow way. The figures are written to
benchmarks/results/, but for --quick.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fanin
from fanin import _core
from fanin.cli import bench
from fanin.cli.screen import Screen

QUICK = "--quick" in sys.argv
MEGABYTES = 16 if QUICK else 128


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n, np.float32)


def wide(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.ldexp(rng.standard_normal(n, np.float32), rng.integers(-40, 41, n, np.int32))


def any_bits(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.integers(0, 2**32, n, np.uint32).view(np.float32)
    x[~np.isfinite(x)] = 1
    return x


def half(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n * 2, np.float32).astype(np.float16)


def double(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n // 2)


def exact(title: str, make: Callable[[np.random.Generator, int], np.ndarray], contributions: int) -> dict:
    rng = np.random.default_rng(0)
    arrays = [make(rng, MEGABYTES << 18) for _ in range(contributions)]
    out = np.zeros_like(arrays[0])
    units = {"baseline": 0, "AVX2": 1, "AVX-512": 2}
    work: bench.Work = {"plain": lambda: fanin.add_n(arrays, out=out)}
    for name, isa in units.items():
        work[f"exact, {name} at most"] = lambda isa=isa: _core._test_exact(out, arrays, False, 1, 0, isa)
    before = _core._test_exact(out, arrays)
    share = (_core._test_exact(out, arrays) - before) / out.size
    times = bench.turns(work, rounds=5 if QUICK else 9)
    ms = {k: [t / 1e6 for t in v] for k, v in times.items()}
    return bench.result(f"exact sums: {contributions} x {MEGABYTES} MB {title}, {share:.2e} slow", "ms", ms, "plain")


results = [
    exact(title, make, n)
    for title, make, n in [
        ("float32", normal, 8),
        ("float32", normal, 2),
        ("float32, wide", wide, 8),
        ("float32, any bits", any_bits, 8),
        ("float16", half, 8),
        ("float64", double, 8),
    ]
]
for result in results:
    bench.show(Screen(), result)
if not QUICK:
    bench.write(Path(__file__).parent / "results" / "exact_sums.json", results)
