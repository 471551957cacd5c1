"""`fanin bench`: how long a sum takes, beside peers, in one run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fanin

from .screen import Screen

HELP = """Time sums beside those of NumPy, and of torch where it is installed, in one run.

Variants take turns, so that whatever slows the machine down slows all of them; each is reported by its minimum and its
median. Compare ratios within one run, not times between runs.

examples:
  fanin bench --quick
  fanin bench --json bench.json"""

Work = dict[str, Callable[[], object]]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small arrays and few rounds: seconds instead of a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures, with machine, versions, date and command")


def run(options: argparse.Namespace) -> int:
    screen = Screen()
    small, large = small_add(quick=options.quick), large_sum(quick=options.quick)
    for result in (small, large):
        show(screen, result)
    if options.json:
        write(options.json, [small, large])
        screen.say(f"written: {options.json}")
    return 0


# What is timed


def small_add(*, quick: bool = False) -> dict[str, Any]:
    """Two contributions of 16 floats and their sum; nanoseconds for each add."""
    a, b, out = (np.ones(16, "f4") for _ in range(3))
    many = 64
    work: Work = {
        "np.add(a, b, out=out)": lambda: repeat(many, np.add, a, b, out),
        "np.add(a, b)": lambda: repeat(many, np.add, a, b),
    }
    buf = fanin.InputBuffer([a], budget=float("inf"))

    def adds() -> None:
        add = buf.add
        for _ in range(many):
            add(0, a)

    def life() -> None:
        for _ in range(many):
            one = fanin.InputBuffer(1)
            one.add(0, a)
            one.add(0, b)
            one.take()

    def two_and_take() -> None:
        for _ in range(many):
            buf.add(0, a)
            buf.add(0, b)
            buf.take()

    # What a round leaves behind is cleared outside its time.
    work["buf.add(0, a)"] = adds
    work["buf.add twice, buf.take"] = two_and_take
    work["InputBuffer, add twice, take"] = life
    torch = peer("torch")
    if torch is not None:
        x, y = torch.ones(16), torch.ones(16)
        work["torch x.add_(y)"] = lambda: repeat(many, x.add_, y)
        work["torch x + y"] = lambda: repeat(many, torch.add, x, y)
    times = turns(work, rounds=200 if quick else 2000, after=buf.clear)
    return result("small add: 16 float32", "ns", {k: [t / many for t in v] for k, v in times.items()}, "np.add(a, b, out=out)")


def large_sum(*, quick: bool = False, contributions: int = 8, megabytes: int = 128) -> dict[str, Any]:
    """Eight large contributions and their sum; milliseconds."""
    megabytes = 4 if quick else megabytes
    n = (megabytes << 20) // 4
    arrays = [np.full(n, i + 0.5, "f4") for i in range(contributions)]
    out = np.zeros(n, "f4")

    def chain() -> None:
        np.add(arrays[0], arrays[1], out=out)
        for x in arrays[2:]:
            np.add(out, x, out=out)

    def fresh() -> Any:
        total = arrays[0] + arrays[1]
        for x in arrays[2:]:
            total += x
        return total

    buf = fanin.InputBuffer([arrays[0]], budget=float("inf"))

    def buffer() -> None:
        for x in arrays:
            buf.add(0, x)
        buf.take(out=[out])

    work: Work = {
        "np.add(out=) chain": chain,
        "a + b, then +=": fresh,
        "fanin.add_n(out=)": lambda: fanin.add_n(arrays, out=out),
        "fanin.add_n": lambda: fanin.add_n(arrays),
        "InputBuffer, take(out=)": buffer,
    }
    torch = peer("torch")
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in arrays]
        total = torch.zeros(n)

        def torch_chain() -> None:
            torch.add(tensors[0], tensors[1], out=total)
            for x in tensors[2:]:
                total.add_(x)

        work["torch add_ chain"] = torch_chain
    times = turns(work, rounds=5 if quick else 9)
    ms = {k: [t / 1e6 for t in v] for k, v in times.items()}
    return result(f"large sum: {contributions} x {megabytes} MB float32", "ms", ms, "np.add(out=) chain")


# How it is timed and told


def repeat(times: int, fn: Callable[..., object], *args: Any) -> None:
    for _ in range(times):
        fn(*args)


def peer(name: str) -> Any:
    """A library that may be here."""
    try:
        return __import__(name)
    except ImportError:
        return None


def turns(work: Work, rounds: int, after: Callable[[], object] = lambda: None) -> dict[str, list[int]]:
    """Nanoseconds of each call; the variants take turns, and each begins in a round."""
    times: dict[str, list[int]] = {name: [] for name in work}
    names = list(work)
    for name in names:
        work[name]()
        after()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = time.perf_counter_ns()
            work[name]()
            times[name].append(time.perf_counter_ns() - began)
            after()
    return times


def result(title: str, unit: str, times: dict[str, list[float]], base: str) -> dict[str, Any]:
    best = {name: min(t) for name, t in times.items()}
    middle = {name: statistics.median(t) for name, t in times.items()}
    rows = {
        name: {
            "min": best[name],
            "median": middle[name],
            "ratio": middle[base] / middle[name],
            "ratio_of_minima": best[base] / best[name],
        }
        for name in times
    }
    return {"title": title, "unit": unit, "base": base, "rounds": len(times[base]), "rows": rows}


def show(screen: Screen, one: dict[str, Any]) -> None:
    screen.say(f"{one['title']}, {one['rounds']} rounds; times as fast: against {one['base']}, by the median and the minimum")
    rows = [(name, f"{r['min']:.1f}", f"{r['median']:.1f}", f"{r['ratio']:.2f}", f"{r['ratio_of_minima']:.2f}") for name, r in one["rows"].items()]
    screen.table(rows, (one["unit"], "min", "median", "times as fast", "by min"))
    screen.say()


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    versions = {name: getattr(sys.modules[name], "__version__", "?") for name in ("fanin", "numpy", "torch") if name in sys.modules}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "build": fanin.info().get("build"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def write(file: Path, results: list[dict[str, Any]]) -> None:
    """Figures as JSON, with machine, versions, date and command."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**machine(), "results": results}, indent=1) + "\n")
