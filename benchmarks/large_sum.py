"""How long the sum of 8 x 128 MB takes, beside NumPy's and torch's: python benchmarks/large_sum.py [--quick].

The figures are written to benchmarks/results/, but for --quick.
"""

import sys
from pathlib import Path

from fanin.cli import bench
from fanin.cli.screen import Screen

result = bench.large_sum(quick="--quick" in sys.argv)
bench.show(Screen(), result)
if "--quick" not in sys.argv:
    bench.write(Path(__file__).parent / "results" / "large_sum.json", [result])
