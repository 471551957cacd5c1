"""Instructions of small adds, takes and lives, by function, as valgrind's callgrind counts them.

    python -m benchmarks.callgrind [FILE]

One Python runs under callgrind; between two marks it does the same thing 1000 times. Numbers are instructions for each
time, those of the interpreter's loop among them. They do not depend on the machine's load, only on the builds of
Python, NumPy and fanin.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fanin
from fanin import _core

from .timing import machine

TIMES = 1000
LEAST = 0.01  # of all instructions: functions with fewer are told together


def lives() -> dict[str, Callable[[], None]]:
    """What is counted."""
    a, b = np.ones(16, "f4"), np.ones(16, "f4")
    buf = fanin.InputBuffer(1, budget=float("inf"))
    add, take = buf.add, buf.take
    times = range(TIMES)

    def loop() -> None:
        for _ in times:
            pass

    def one_add() -> None:
        for _ in times:
            add(0, a)

    def one_keyed_add() -> None:
        for k in times:
            add(0, a, key=k)

    def two_adds_and_take() -> None:
        for _ in times:
            add(0, a)
            add(0, b)
            take()

    def life() -> None:
        make = fanin.InputBuffer
        for _ in times:
            one = make(1)
            one.add(0, a)
            one.add(0, b)
            one.take()

    def numpy_add() -> None:
        add = np.add
        for _ in times:
            add(a, b, out=b)

    def numpy_fresh() -> None:
        for _ in times:
            a + b

    def clear() -> None:
        buf.clear()

    return {
        "an empty loop": loop,
        "buf.add(0, a)": one_add,
        "(clear)": clear,
        "buf.add(0, a, key=k)": one_keyed_add,
        "(clear again)": clear,
        "buf.add twice, buf.take()": two_adds_and_take,
        "InputBuffer(1), add twice, take, drop": life,
        "np.add(a, b, out=b)": numpy_add,
        "a + b": numpy_fresh,
    }


def inner() -> None:
    """Under callgrind: everything once to be warm, then each between two marks."""
    mark, all_ = _core.build_info, lives()
    for work in all_.values():
        work()
    for work in all_.values():
        mark()
        work()
    mark()


def costs(dump: Path) -> Counter[str]:
    """Instructions by function, itself alone, of one dump."""
    names: dict[str, str] = {}
    found: Counter[str] = Counter()
    function, of_callee, library = "", False, ""
    for line in dump.read_text().splitlines():
        if match := re.match(r"(c?)(fn|ob)=(\(\d+\))(?: (.*))?$", line):
            callee, kind, number, name = match.groups()
            if name:
                names[kind + number] = Path(name).name if kind == "ob" else name
            if callee:
                continue
            if kind == "ob":
                library = names[kind + number]
            else:
                function = f"{names[kind + number]} ({library.partition('.')[0]})"
        elif line.startswith("calls="):
            of_callee = True
        elif re.match(r"[+*\-\d]\S* \d+$", line):
            if not of_callee:
                found[function] += int(line.split()[1])
            of_callee = False
    return found


def table(name: str, cost: Counter[str], loop: float) -> list[str]:
    """The functions of one piece of work."""
    whole = sum(cost.values())
    lines = [
        f"{name}: {whole / TIMES - loop:.0f} instructions" + (f", and {loop:.0f} of the empty loop" if loop else "")
    ]
    rest = whole
    for function, n in cost.most_common():
        if n < LEAST * whole:
            break
        lines.append(f"  {n / TIMES:8.1f}  {n / whole:5.1%}  {function}")
        rest -= n
    return [*lines, f"  {rest / TIMES:8.1f}  {rest / whole:5.1%}  all others", ""]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        words = [
            "valgrind",
            "--tool=callgrind",
            "--dump-before=build_info",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-m",
            "benchmarks.callgrind",
            "--inner",
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        # Dump n ends at mark n; what comes before the first mark is warming up.
        dumps = [Path(f"{out}.{k + 2}") for k in range(len(lives()))]
        counted = {name: costs(dump) for name, dump in zip(lives(), dumps, strict=True)}
    here = machine()
    lines = [
        "Instructions, by callgrind, of each time; by function, itself alone (in brackets: the library).",
        (
            f"{here['date'][:10]}, {here['cpu']} (under valgrind: no AVX-512), Python {here['python']}, NumPy"
            f" {here['versions']['numpy']},"
        ),
        f"fanin {here['versions']['fanin']}, {here['build']} build. Made by: python -m benchmarks.callgrind FILE",
        "",
    ]
    loop = sum(counted["an empty loop"].values()) / TIMES
    for name, cost in counted.items():
        if not name.startswith("("):
            lines += table(name, cost, 0 if name == "an empty loop" else loop)
    text = "\n".join(lines)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    inner() if "--inner" in sys.argv else main()
