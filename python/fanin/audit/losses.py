"""The weights of micro-batches: the gradient of each loss is the number that the loop multiplied it by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .rows import Row, Verdict

__tracebackhide__ = True  # no frames of ours in reports of pytest

Expect = Literal["mean", "sum"]
LOSS = "the loss"


@dataclass(slots=True)
class Loss:
    """A loss of a micro-batch, and the gradients that it received."""

    batch: int
    weights: list[tuple[int, float]] = field(default_factory=list)  # (pass, gradient)
    tolerance: float = 0.0
    unlike: str = ""  # why its gradient is no weight


class Losses:
    """The losses of a step.

    Parameters
    ----------
    expect : str
        "mean": the weights of K micro-batches are 1/K, or their share of `weights`; "sum": 1, or their `weights`.
    weights : sequence of float, optional
        One for each micro-batch of a step, such as its number of tokens.
    """

    def __init__(self, expect: Expect, weights: Sequence[float] | None) -> None:
        self.expect, self.weights = expect, weights
        self.start()

    def start(self) -> None:
        self.losses: list[Loss] = []
        self.given: dict[int, float] = {}  # weights given with a loss, by micro-batch
        self.arrived: set[int] = set()  # passes whose gradients arrived
        self.batch = 0
        self.within = False  # whether the loop marks its micro-batches
        self.over_ranks: float | None = None  # what the weights sum to, where other ranks have some
        self.ran = False  # whether a pass has run since the micro-batch began

    def begin(self) -> None:
        """A micro-batch begins that the loop marks."""
        if self.losses or self.ran:
            self.batch += 1
        self.within, self.ran = True, False

    def end(self) -> None:
        """It ends."""
        self.within, self.ran = False, True

    def add(self, weight: float | None) -> Loss:
        """Count a loss; it begins a micro-batch if a pass has run since the last one began."""
        if not self.within and self.ran:
            self.batch += 1
            self.ran = False
        if weight is not None:
            self.given[self.batch] = float(weight)
        loss = Loss(self.batch)
        self.losses.append(loss)
        return loss

    def pass_runs(self, number: int) -> None:
        """A gradient of a pass arrives."""
        self.ran = True
        self.arrived.add(number)

    def total(self) -> float:
        """What the weights of this step sum to; of micro-batches without, their number."""
        batches = {loss.batch for loss in self.losses if loss.weights}
        if self.given:
            return math.fsum(self.given.get(batch, 0.0) for batch in batches)
        return float(len(batches)) if self.weights is None else math.fsum(self.weights)

    def judge(self, low: float, high: float) -> Row | None:
        """What the weights of the step are, times a factor of all gradients, which lies between two numbers; None where
        no weight is known.
        """
        known = []
        for loss in self.losses:
            if loss.unlike:
                return Row(LOSS, "not judged", loss.unlike)
            weights = [w for p, w in loss.weights if p in self.arrived] or [w for _, w in loss.weights]
            if weights:
                known.append((loss.batch, math.fsum(weights), loss.tolerance))
        if not known:
            return None
        batches = sorted({batch for batch, _, _ in known})
        place = {batch: i for i, batch in enumerate(batches)}
        expected = self._expected(batches)
        if isinstance(expected, str):
            return Row(LOSS, "not judged", expected)
        middle = (low + high) / 2
        got = [(place[batch], w * middle, expected[place[batch]]) for batch, w, _ in known]
        slack = [t * abs(e) for (_, _, t), (_, _, e) in zip(known, got, strict=True)]
        least = [min(w * low, w * high) - t for (_, w, _), t in zip(known, slack, strict=True)]
        most = [max(w * low, w * high) + t for (_, w, _), t in zip(known, slack, strict=True)]
        wrong = [one for one, a, b in zip(got, least, most, strict=True) if not a <= one[2] <= b]
        if not wrong:
            return Row(LOSS, "right", f"weights of {_batches(len(batches))}: as expected")
        return Row(LOSS, "fault", self._words(wrong, got, expected))

    def _expected(self, batches: list[int]) -> list[float] | str:
        """The weight of each micro-batch, or why there is none."""
        n = len(batches)
        weights: list[float] = [1.0] * n
        if self.given:
            missing = [batch for batch in batches if batch not in self.given]
            if missing:
                return f"audit.loss has a weight for some micro-batches, and none for number {missing[0] + 1}"
            weights = [self.given[batch] for batch in batches]
        elif self.weights is not None:
            if len(self.weights) != n:
                return f"weights= has {len(self.weights)} for {_batches(n)}"
            weights = [float(w) for w in self.weights]
        if self.expect == "sum":
            return weights
        total = math.fsum(weights) if self.over_ranks is None else self.over_ranks
        return [w / total for w in weights] if total else "the weights sum to 0"

    def _words(
        self,
        wrong: list[tuple[int, float, float]],
        got: list[tuple[int, float, float]],
        expected: list[float],
    ) -> str:
        """What is wrong with the weights."""
        n = len(expected)
        i, w, e = wrong[0]
        ratios = [one / want for _, one, want in got if want]
        alike = len(ratios) == len(got) and max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0])
        text = f"micro-batch {i + 1} counts {w:.4g}, expected {e:.4g}"
        if alike and n > 1:
            text = f"each micro-batch counts {w:.4g}, expected {e:.4g}"
            if abs(ratios[0] - n) <= 1e-3 * n:
                return f"{text}: the loop forgets to divide by {n}"
            if abs(ratios[0] * n - 1) <= 1e-3:
                return f"{text}: the loop divides by {n} twice, or the mean is not expected"
            return text
        for j, other in enumerate(expected):
            if j != i and abs(w - other) <= 1e-3 * abs(other):
                return f"micro-batch {i + 1} has the weight of micro-batch {j + 1}: {w:.4g}, expected {e:.4g}"
        return text


def not_judged(expect: Expect) -> Row:
    """The row of a step without `audit.loss`."""
    verdict: Verdict = "not judged"
    return Row(LOSS, verdict, f"whether the sum is the {expect}: give each loss to audit.loss")


def _batches(n: int) -> str:
    return f"{n} micro-batch{'' if n == 1 else 'es'}"
