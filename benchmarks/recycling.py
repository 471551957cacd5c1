"""What fresh pages cost: sums into recycled and into fresh memory, beside NumPy's: python benchmarks/recycling.py [--quick].

"fresh" means that every page of the result has to be given by the system first. The figures are written to benchmarks/results/, but for --quick.
"""

import sys
from pathlib import Path

import numpy as np

import fanin
from fanin.cli import bench
from fanin.cli.screen import Screen

QUICK = "--quick" in sys.argv


def recycling(contributions: int, megabytes: int) -> dict:
    arrays = [np.full(megabytes << 18, i + 0.5, "f4") for i in range(contributions)]
    out = np.zeros(megabytes << 18, "f4")

    def numpy_fresh() -> np.ndarray:
        total = arrays[0] + arrays[1]
        for x in arrays[2:]:
            total += x
        return total

    def numpy_reused() -> None:
        np.add(arrays[0], arrays[1], out=out)
        for x in arrays[2:]:
            np.add(out, x, out=out)

    def fresh() -> None:
        with fanin.set_options(pool_bytes=0):
            fanin.add_n(arrays)

    def recycled() -> np.ndarray:
        return fanin.add_n(arrays)

    # "fresh" empties the pool, so a result goes before "recycled" that is not counted; each round is one turn in this order
    work = {
        "NumPy, fresh": numpy_fresh,
        "NumPy, reused out": numpy_reused,
        "fanin, fresh": fresh,
        "fanin, to fill the pool": recycled,
        "fanin, recycled": recycled,
        "fanin, out=": lambda: fanin.add_n(arrays, out=out),
    }
    times: dict[str, list[int]] = {}
    with fanin.set_options(pool_bytes=1 << 30):
        for _ in range(5 if QUICK else 9):
            for name, t in bench.turns(work, rounds=1).items():
                times.setdefault(name, []).extend(t)
    del times["fanin, to fill the pool"]
    ms = {k: [t / 1e6 for t in v] for k, v in times.items()}
    return bench.result(f"recycling: {contributions} x {megabytes} MB float32", "ms", ms, "NumPy, fresh")


results = [recycling(n, 32 if QUICK else 128) for n in ((8,) if QUICK else (2, 8))]
for result in results:
    bench.show(Screen(), result)
if not QUICK:
    bench.write(Path(__file__).parent / "results" / "recycling.json", results)
