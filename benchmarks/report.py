"""The targets of a file of results as a table for docs/performance.md: python -m benchmarks.report FILE.

Results that differ in nothing but the offsets of their inputs are one line, and the worst of them counts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from .timing import ratio_text


def shortened(title: str) -> str:
    """A title without offsets and cores; two cores are named."""
    text = re.sub(r", offsets [^,]*", "", title)
    text = re.sub(r", cores? \d+, \d+$", ", two cores", text)
    return re.sub(r", cores? \d+$", "", text)


def peers(names: list[str]) -> str:
    """The peer, in short."""
    return names[0] if len(names) == 1 else "the best peer"


def lines(results: list[dict[str, Any]]) -> list[str]:
    """A row for each target."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in results:
        for t in one["targets"]:
            key = (one["row"], shortened(one["title"]), t["row"], t["must"], str(t["ratio"]), peers(t["against"]))
            found.setdefault(key, []).append(t)
    lines = ["| row | work | beside | target | seen | by minima | |", "|---|---|---|---|---|---|---|"]
    for (row, title, mine, must, ratio, beside), all_ in found.items():
        seen = [t["seen"] for t in all_ if t["seen"] is not None]
        by_min = [t["seen_by_min"] for t in all_ if t["seen"] is not None]
        word = "absent" if not seen else "met" if all(t["met"] for t in all_) else "**missed**"
        text = {"<=": "at most {} x its time", ">=": "at least {} x as fast"}[must].format(ratio)
        lines.append(f"| {row} | {title}: `{mine}` | {beside} | {text} | {span(seen)} | {span(by_min)} | {word} |")
    return lines


def span(numbers: list[float]) -> str:
    """From the least to the most."""
    if not numbers:
        return ""
    low, high = ratio_text(min(numbers)), ratio_text(max(numbers))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text())["results"])))
