"""Timing and reports: variants that take turns on a pinned core, their ratios, and the targets these are held
against.

All benchmarks use the one loop here, `turns`. A variant is a function without arguments or the text of a statement
(which costs no call, as what is timed may be shorter than one); None stands for a peer that is absent.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from timeit import Timer
from typing import Any

import fanin
from fanin import _files
from fanin._words import counted
from fanin.cli.screen import Screen

Work = Mapping[str, Callable[[], object] | str | None]
Result = dict[str, Any]

UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6}
PEERS = ("numpy", "torch", "jax", "autograd", "numexpr", "ml_dtypes")


@dataclass(frozen=True)
class Target:
    """What `row` should reach beside the fastest of `against`: to be `ratio` times as fast (">="), or to take at most
    `ratio` times as long ("<=").
    """

    row: str
    against: tuple[str, ...]
    must: str
    ratio: float

    def outcome(self, times: Mapping[str, list[float]]) -> Result:
        """The target and what was seen, by medians and by minima; met is None where a side is absent."""
        peers = [times[name] for name in self.against if name in times]
        one: Result = {**asdict(self), "against": list(self.against), "seen": None, "seen_by_min": None, "met": None}
        if peers and self.row in times:
            mine = times[self.row]
            for word, faster in (
                ("seen", min(map(statistics.median, peers)) / statistics.median(mine)),
                ("seen_by_min", min(map(min, peers)) / min(mine)),
            ):
                one[word] = faster if self.must == ">=" else 1 / faster
            one["met"] = one["seen"] >= self.ratio if self.must == ">=" else one["seen"] <= self.ratio
        return one


def at_least(ratio: float, row: str, *against: str) -> Target:
    """`row` is to be so many times as fast as the fastest of the others."""
    return Target(row, against, ">=", ratio)


def at_most(ratio: float, row: str, *against: str) -> Target:
    """`row` is to take so many times as long, at most, as the fastest of the others."""
    return Target(row, against, "<=", ratio)


# The one loop


def turns(
    work: Work,
    *,
    rounds: int,
    calls: int = 1,
    names: Mapping[str, object] | None = None,
    before: Mapping[str, Callable[[], object]] | None = None,
    after: Callable[[], object] = lambda: None,
    longest: float = 2.0,
    timer: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, list[float]]:
    """Nanoseconds of each call, a number for each round.

    The variants take turns, and each begins in a round, so that whatever slows the machine slows all. Statements see
    `names` and `k`, the number of the call in its round. `before[variant]` and `after` are run outside the time. All
    run once unheard; a variant that takes more than `longest` seconds for that is not run again.
    """
    scope: dict[str, object] = {**(names or {}), "calls_": list(range(calls))}
    timers = {}
    for name, one in work.items():
        if one is not None:
            text = one if isinstance(one, str) else "fn_()"
            own = {**scope, "fn_": one}
            timers[name] = Timer("for k in calls_:\n" + textwrap.indent(text, "    "), timer=timer, globals=own)

    def once(name: str) -> float:
        (before or {}).get(name, after)()
        taken = timers[name].timeit(1) / calls
        after()
        return taken

    times = {name: [once(name)] for name in timers}
    running = [name for name in timers if times[name][0] * calls <= longest * 1e9]
    for name in running:
        times[name].clear()
    for i in range(rounds):
        start = i % max(1, len(running))
        for name in running[start:] + running[:start]:
            times[name].append(once(name))
    return times


def measure(
    title: str,
    work: Work,
    *,
    base: str,
    unit: str = "ns",
    targets: Iterable[Target] = (),
    more: Mapping[str, object] | None = None,
    **how: Any,
) -> Result:
    """One result: how long each variant takes, in `unit`, and how fast that is beside `base` and the targets. `how`
    goes to `turns`.
    """
    taken = turns(work, **how)
    times = {name: [t / UNITS[unit] for t in all_] for name, all_ in taken.items()}
    best = {name: min(t) for name, t in times.items()}
    middle = {name: statistics.median(t) for name, t in times.items()}
    rows = {
        name: {
            "min": best[name],
            "median": middle[name],
            "ratio": middle[base] / middle[name],
            "ratio_of_minima": best[base] / best[name],
            "rounds": len(times[name]),
        }
        for name in times
    }
    return {
        "title": title,
        "unit": unit,
        "base": base,
        "rounds": max(map(len, times.values())),
        "rows": rows,
        "absent": [name for name, one in work.items() if one is None],
        "targets": [t.outcome(times) for t in targets],
        **(more or {}),
    }


# Where


def peer(name: str) -> Any:
    """A library that may be here."""
    try:
        return __import__(name)
    except ImportError:
        return None


def cores() -> list[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def pinned(threads: int = 1) -> Iterator[str]:
    """Keep this process, and the threads of fanin and of torch, to the last `threads` processors that it may use, and
    return them.
    """
    all_ = cores()
    mine = all_[-threads:]
    torch = sys.modules.get("torch")
    was = torch.get_num_threads() if torch else 0
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine)
    if torch:
        torch.set_num_threads(len(mine))
    try:
        with fanin.set_options(threads=len(mine)):
            yield ", ".join(map(str, mine))
    finally:
        if torch:
            torch.set_num_threads(was)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, all_)


# Reports


def show(screen: Screen, one: Result) -> None:
    """A result as a table."""
    screen.say(f"{one['title']}; {counted(one['rounds'], 'round')}", style="bold")
    by_events = ["device"] if any("device" in r for r in one["rows"].values()) else []
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{r['min']:.4g}",
            f"{r['median']:.4g}",
            ratio_text(r["ratio"]),
            ratio_text(r["ratio_of_minima"]),
            *(f"{r[word]:.4g}" for word in by_events),
        )
        for name, r in one["rows"].items()
    ]
    rows += [(name, "absent", "", "", "", *("" for _ in by_events)) for name in one["absent"]]
    screen.table(rows, (one["unit"], "min", "median", "times as fast", "by min", *by_events))
    if "peaks" in one:
        screen.say("  peak memory, MB: " + ", ".join(f"{name} {n / 1e6:.3g}" for name, n in one["peaks"].items()))
    for t in one["targets"]:
        screen.say("  " + target_text(t), style="" if t["met"] is not False else "red")
    screen.say()


def target_text(t: Result) -> str:
    """A target in a line."""
    if t["met"] is None:
        return f"target {t['must']} {t['ratio']}: {t['row']}: nothing to compare with"
    word = "met" if t["met"] else "missed"
    how = "times as fast as" if t["must"] == ">=" else "times as long as"
    most = "" if len(t["against"]) == 1 else "the best of "
    return (
        f"target {t['must']} {t['ratio']}: {t['row']} is {ratio_text(t['seen'])} (by min"
        f" {ratio_text(t['seen_by_min'])}) {how} {most}{', '.join(t['against'])}: {word}"
    )


def ratio_text(x: float) -> str:
    """Two places, or one digit of what is smaller than they show."""
    return f"{x:.2f}" if x >= 0.05 else f"{x:.1g}"


def machine() -> Result:
    """Where figures come from."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "caches": caches(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "versions": {"fanin": fanin.__version__, **{name: version(name) for name in PEERS}},
        "build": fanin.info().get("build"),
        "gpus": list(fanin._core.cuda_info().get("devices", ())),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def command() -> str:
    """The command line, without the path of the program."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def version(name: str) -> str | None:
    """Of a peer that is installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def caches() -> dict[str, str]:
    """Sizes by level, as one core has them: {"L1d": "32K"}."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((folder / word).read_text().strip() for word in ("level", "type", "size"))
        except OSError:
            continue
        found[f"L{level}{'' if kind == 'Unified' else kind[0].lower()}"] = size
    return found


def rounded(x: Any) -> Any:
    """Numbers rounded to five digits, because more are noise."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def kept(one: Result) -> Result:
    """A result as it is written: of each variant its minimum and its median."""
    rows = {name: [row["min"], row["median"]] for name, row in one["rows"].items()}
    return {**one, "rows": rows, "targets": [{**t} for t in one["targets"]]}


def write(file: Path, results: Iterable[Result]) -> None:
    """Figures as JSON, a line for each result, with machine, versions, date and command."""
    lines = [json.dumps(rounded(kept(one))) for one in results]
    head = json.dumps(machine(), indent=1).removesuffix("\n}")
    _files.write(file, head + ',\n "results": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
