"""What an audit found: a row for each parameter, and the table that is printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .._words import counted

__tracebackhide__ = True  # no frames of ours in reports of pytest

Verdict = Literal["fault", "undecided", "warning", "not judged", "note", "right"]
#: The verdicts, the worst first.
VERDICTS: tuple[Verdict, ...] = ("fault", "undecided", "warning", "not judged", "note", "right")


class AuditError(RuntimeError):
    """A strict audit found a fault; the message has a line for each."""


@dataclass(frozen=True)
class Row:
    """What an audit found of one parameter, or of the losses, in one step.

    Attributes
    ----------
    parameter : str
        Its name, or "the loss".
    verdict : str
        "right"; "note", "warning" (an optimizer reads something else than the sum, perhaps by intent); "fault" (the
        sum is wrong); "undecided" (several faults would look the same); "not judged" (the audit could not see).
    happened : str
        What happened, in words; empty for "right".
    arrivals : str
        One mark for each arrival and change, in order: "+" is a gradient that was added as it should be.
    step : int
        The step, from 0.
    """

    parameter: str
    verdict: Verdict
    happened: str
    arrivals: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"{self.parameter}: {self.verdict}" + (f": {self.happened}" if self.happened else "")


def worst(rows: Iterable[Row]) -> list[Row]:
    """The rows sorted by verdict, the worst first, and else as they came."""
    return sorted(rows, key=lambda row: VERDICTS.index(row.verdict))


def table(rows: list[Row], steps: int) -> str:
    """The table that `print(audit)` shows: equal rows of several parameters are one line."""
    if not rows:
        return f"audit: {counted(steps, 'step')} read, nothing to show"
    groups: dict[tuple[Verdict, str, str], list[Row]] = {}
    for row in worst(rows):
        groups.setdefault((row.verdict, row.happened, row.arrivals), []).append(row)
    lines = [("parameter", "verdict", "what happened")]
    for (verdict, happened, arrivals), members in groups.items():
        names = list(dict.fromkeys(row.parameter for row in members))
        name = names[0] if len(names) == 1 else f"{names[0]} and {counted(len(names) - 1, 'other')}"
        at = sorted({row.step for row in members})
        where = f"step {at[0]}" if len(at) == 1 else f"steps {at[0]} .. {at[-1]}"
        seen = f"  [{arrivals}]" if arrivals else ""
        lines.append((name, verdict, f"{happened or 'as it should be'}, {where}{seen}"))
    widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
    return "\n".join(f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in lines)


def check(rows: Iterable[Row]) -> None:
    """AuditError if a row is a fault or undecided."""
    wrong = [row for row in worst(rows) if row.verdict in ("fault", "undecided")]
    if wrong:
        raise AuditError("\n".join([f"audit: {counted(len(wrong), 'fault')}:", *map(str, wrong)]))
