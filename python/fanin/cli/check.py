"""`fanin check FILE.py`: explores the scenarios of a file."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fanin
from fanin.sim.search import ScheduleError

from .screen import Screen, natural, positive

HELP = """Explore the scenarios of a file: every order in which their host threads may act.

A scenario is a function of a simulated machine, marked with @fanin.sim.scenario. Faults are races, deadlocks, errors,
and results that differ between orders. Exit status: 0 no fault in any order, 1 a fault, 2 the file could not be used,
3 no fault, but orders are missing (incomplete) or results cannot be compared.

examples:
  fanin check examples/06_check_me.py
  fanin check my_engine.py --scenario two_producers --limit 100
  fanin check my_engine.py --scenario two_producers --schedule 0110"""


#: The form of `--schedule`.
SCHEDULE = (
    "it has one character for each step, the number of the host thread that takes it (0-9, then a-v), and Y or N for"
    " each answer to a query, as in --schedule 0110"
)


class Unusable(Exception):
    """The request cannot be carried out: exit status 2."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE.py", type=Path, help="a Python file with scenarios")
    add("--scenario", metavar="NAME", action="append", default=[], help="only this one (may be repeated)")
    most = "try at most N orders to their end, then samples (default: 2000)"
    add("--limit", metavar="N", type=positive, help=most)
    add("--samples", metavar="N", type=natural, help="beyond the limit, try N orders at random (default: 200)")
    add("--seed", metavar="N", type=int, help="of the machine and of the samples (default: 0)")
    shared = "also try orders that differ by independent steps: for scenarios that share data beyond fanin"
    add("--no-reduce", action="store_true", help=shared)
    stuck = "a thread that does not come back for so long is stuck (default: 60)"
    add("--stuck-after", metavar="SECONDS", type=seconds, help=stuck)
    order = (
        "replay one order, as a failure prints it: the number of a host thread for each step, as 0110, and Y or N for"
        " each answer to a query; needs one --scenario"
    )
    add("--schedule", metavar="ORDER", help=order)


def seconds(word: str) -> float:
    """The value of a time option."""
    number = float(word)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"a time is more than 0 seconds, not {word}")
    return number


def run(options: argparse.Namespace) -> int:
    try:
        return checked(Screen(), options)
    except Unusable as e:
        print(f"fanin check: {e}", file=sys.stderr)
        return 2


def checked(screen: Screen, options: argparse.Namespace) -> int:
    if options.schedule is not None and not re.fullmatch("[0-9a-vNY]*", options.schedule):
        raise Unusable(f"--schedule {options.schedule!r} is no schedule: {SCHEDULE}")
    file = options.file
    if not file.is_file():
        raise Unusable(f"there is no file {file}")
    try:
        sys.path.insert(0, str(file.resolve().parent))  # its folder can be imported from
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(file.stem, module)
        spec.loader.exec_module(module)
        every = list(fanin.sim.scenarios(module))
    except (Exception, SystemExit):
        traceback.print_exc()
        raise Unusable(f"{file} could not be imported") from None
    names = [name for name, *_ in every]
    unknown = [name for name in options.scenario if name not in names]
    if unknown:
        raise Unusable(f"{file} has no scenario {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    chosen = [one for one in every if not options.scenario or one[0] in options.scenario]
    if not chosen:
        raise Unusable(f"{file} has no scenarios: mark functions of a machine with @fanin.sim.scenario")
    words = ("limit", "samples", "seed", "stuck_after")
    given = {word: x for word in words if (x := getattr(options, word)) is not None}
    if options.no_reduce:
        given["reduce"] = False
    if options.schedule is not None and len(chosen) != 1:
        raise Unusable(f"--schedule replays one scenario: add --scenario, one of {', '.join(names)}")
    if options.schedule is not None:
        return replay(screen, chosen[0], options.schedule, given)
    return explore(screen, file, chosen, given)


Chosen = tuple[str, Callable[[fanin.sim.Machine], object], dict[str, Any]]  # name, scenario, its options


def explore(screen: Screen, file: Path, chosen: list[Chosen], given: dict[str, object]) -> int:
    rows, failed, unsure = [], [], []
    for name, scenario, own in chosen:
        try:
            report = fanin.sim.explore(scenario, **{**own, **given})
        except (TypeError, ValueError) as e:  # exceptions of the scenario are in the report: this is about its options
            raise Unusable(f"{name}: {e}") from e
        orders = f"{report.runs}, {'all' if report.complete else f'{report.sampled} at random'}"
        found = [report.races, report.deadlocks, report.errors, len(report.results)]
        rows.append((name, orders, *map(str, found), "FAILED" if report.failed else report.outcome))
        if not report.failed and not report.ok:
            unsure.append((name, report.advice))
        if report.failed:
            seed = {**own, **given}.get("seed", 0)
            failed.append((name, report, f" --seed {seed}" if seed else ""))
    screen.table(rows, ("scenario", "orders", "races", "deadlocks", "errors", "results", ""))
    for name, report, seed in failed:
        screen.say()
        results = " or ".join(map(repr, report.results[:3]))
        why = f"the result depends on the order: {results}"
        if report.error is not None:
            why = f"{type(report.error).__name__}: {report.error}"
        screen.say(f"{name}: {why}", style="red")
        again = f"--scenario {name}{seed} --schedule {report.schedule!r}"
        screen.say(f"again: fanin check {shlex.quote(str(file))} {again}")
    for name, why in unsure:
        screen.say(f"\n{name}: {why}", style="yellow")
    if failed:
        return 1
    return 3 if unsure else 0


def replay(screen: Screen, chosen: Chosen, schedule: str, given: dict[str, object]) -> int:
    name, scenario, own = chosen
    both = {**own, **given}
    how = {word: both[word] for word in ("seed", "devices", "machine", "steps", "stuck_after") if word in both}
    try:
        result = fanin.sim.replay(scenario, schedule, **how)
    except Exception as e:
        if isinstance(e, ScheduleError):
            raise Unusable(f"{e.reason}; {SCHEDULE}") from None
        screen.say(f"{name}, order {schedule!r}: {type(e).__name__}: {e}", style="red")
        return 1
    screen.say(f"{name}, order {schedule!r}: {result!r}")
    return 0
