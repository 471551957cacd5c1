"""How long one small add takes, beside NumPy's and torch's: python benchmarks/small_add.py [--quick].

The figures are written to benchmarks/results/, but for --quick.
"""

import sys
from pathlib import Path

from fanin.cli import bench
from fanin.cli.screen import Screen

result = bench.small_add(quick="--quick" in sys.argv)
bench.show(Screen(), result)
if "--quick" not in sys.argv:
    bench.write(Path(__file__).parent / "results" / "small_add.json", [result])
