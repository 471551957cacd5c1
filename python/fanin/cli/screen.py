"""Output of the commands: a progress bar and colours on a terminal, else plain lines."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: Styles as a terminal switches them on.
STYLES = {"bold": "\x1b[1m", "red": "\x1b[31m", "yellow": "\x1b[33m"}
PLAIN = "\x1b[0m"


def is_terminal() -> bool:
    """Whether standard output shows colours and moves its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ


class Screen:
    """Standard output."""

    def __init__(self) -> None:
        self.styled = is_terminal()

    def say(self, text: str = "", style: str = "") -> None:
        """Print text, in a style where there are any."""
        print(f"{STYLES[style]}{text}{PLAIN}" if style and self.styled else text, flush=True)

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
        made = Progress(what, total, moves=self.styled)
        try:
            yield made
        finally:
            if self.styled:
                print(flush=True)


class Progress:
    """`moves`: a bar is drawn anew in its line; else a line is printed for each tenth of the way."""

    def __init__(self, what: str, total: int, moves: bool = False) -> None:
        self.what, self.total, self.moves = what, total, moves
        self.done, self.printed, self.tenths = 0, 0, -1
        self.note = ""
        self.began = time.monotonic()

    def within(self, ran: int, known: int) -> None:
        """How far a pass is in the step at hand (`progress=`): the bar moves by tenths of a step."""
        tenths = ran * 10 // known
        if self.moves and tenths != self.tenths:
            self.draw(self.done + tenths / 10)
        self.tenths = tenths

    def step(self, note: str) -> None:
        self.done, self.note = self.done + 1, note
        if self.moves:
            self.draw(self.done)
        elif self.done * 10 // self.total > self.printed:
            self.printed = self.done * 10 // self.total
            print(self.words(), flush=True)

    def words(self) -> str:
        return f"{self.what} {self.done}/{self.total}  {self.note}  {time.monotonic() - self.began:.0f} s"

    def draw(self, place: float) -> None:
        """Draw the bar with its words, in a line of the terminal."""
        columns = shutil.get_terminal_size().columns - 1
        words = self.words()
        width = min(30, columns - len(words) - 2)
        full = round(width * place / self.total)
        bar = f"{'#' * full}{'-' * (width - full)}  " if width >= 5 else ""
        print(f"\r{(bar + words)[:columns]}\x1b[K", end="", flush=True)


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
