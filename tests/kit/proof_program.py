"""Runs the proof program (tests/c/proof.c), and reads the numbers that it prints."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kit.support import build_c, run_c

SOURCES = ("proof.c", "proof_config.c", "proof_run.c", "proof_split.c", "proof_values.c")

#: The program intercepts every job that the buffer queues to the device.
FLAGS = ("-Wl,--wrap=fan_device_run",)


@dataclass(frozen=True)
class Line:
    """One line of results: its first word, the words after it, and its numbers by name."""

    kind: str
    words: tuple[str, ...]
    numbers: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]


def lines_of(output: str) -> Iterator[Line]:
    """The lines of results; sentences (indented) and the last line are no results."""
    for text in output.splitlines():
        if not text or text.startswith((" ", "ok ", "FAILED ")):
            continue
        words, numbers = [], {}
        for word in text.split():
            name, equals, value = word.partition("=")
            if equals and re.fullmatch(r"\d+(\.\d+)?", value):
                numbers[name] = float(value)
            else:
                words.append(word)
        yield Line(words[0], tuple(words[1:]), numbers) if words else Line(text.partition("=")[0], (), numbers)


def proof(*args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the program, built if need be; prints its output. With `check`, its own checks must hold."""
    done = run_c(build_c(SOURCES, *FLAGS), *args, check=check)
    print(done.stdout)
    if check:
        assert re.search(r"^ok [1-9]\d* checks$", done.stdout.rstrip().splitlines()[-1]), done.stdout[-2000:]
    return done


def results(*args: str) -> list[Line]:
    """The results of one run."""
    return list(lines_of(proof(*args).stdout))


def side_by_side(runs: Iterable[tuple[str, ...]]) -> list[Line]:
    """The results of several runs, as many at a time as there are processors."""
    build_c(SOURCES, *FLAGS)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = list(pool.map(lambda args: results(*args), runs))
    return [line for lines in found for line in lines]


def added(lines: Iterable[Line], name: str) -> int:
    """The sum of one number over lines."""
    return int(sum(line[name] for line in lines if name in line.numbers))
