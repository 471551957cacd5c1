"""Output of the commands: a progress bar and colours on a terminal with rich installed, else plain lines."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self.console: Console | None = None
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ:
            try:
                from rich import console
            except ImportError:
                return
            self.console = console.Console(highlight=False)

    def say(self, text: str = "", style: str = "") -> None:
        """Print text, in a style where there are any."""
        if self.console is not None:
            self.console.print(text, style=style or None, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def table(self, rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> None:
        """Print rows of words: the first column to the left, the others to the right."""
        every = [list(head), *map(list, rows)] if head else [list(r) for r in rows]
        width = [max(len(r[i]) for r in every) for i in range(len(every[0]))]
        for k, row in enumerate(every):
            cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True))]
            self.say("  " + "  ".join(cells).rstrip(), style="bold" if head and k == 0 else "")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Progress]:
        """A bar that moves as `step` and `within` are called; without a terminal, ten lines over the whole way."""
        if self.console is None:
            yield Progress(what, total)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        with Bar(*columns, console=self.console) as bar:
            yield Progress(what, total, bar)


class Progress:
    def __init__(self, what: str, total: int, bar: Bar | None = None) -> None:
        self.what, self.total, self.bar, self.done, self.said = what, total, bar, 0, 0
        self.tenths = -1
        self.began = time.monotonic()
        self.task = bar.add_task(what, total=total, note="") if bar else None

    def within(self, ran: int, known: int) -> None:
        """How far a pass is in the step at hand (`progress=`): the bar moves by tenths of a step."""
        tenths = ran * 10 // known
        if self.bar and self.task is not None and tenths != self.tenths:
            self.bar.update(self.task, completed=self.done + tenths / 10)
        self.tenths = tenths

    def step(self, note: str) -> None:
        self.done += 1
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=self.done, note=note)
        elif self.done * 10 // self.total > self.said:
            self.said = self.done * 10 // self.total
            print(f"{self.what} {self.done}/{self.total}  {note}  {time.monotonic() - self.began:.0f} s", flush=True)


# Types of options; argparse names them in its messages


def positive(text: str) -> int:
    return integer(text, 1)


def natural(text: str) -> int:
    return integer(text, 0)


def integer(text: str, least: int) -> int:
    try:
        n = int(text)
    except ValueError:
        n = least - 1
    if n < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return n
