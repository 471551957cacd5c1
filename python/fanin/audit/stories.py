"""Stories: what could have become of a few gradients, so that their sum is the one that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .rounding import Factor, Vector, added

__tracebackhide__ = True  # no frames of ours in reports of pytest


@dataclass(slots=True)
class Puzzle:
    """A change of the sum to describe later, when the factors of other parameters are known."""

    now: Vector
    last: Vector
    kept: list[Vector]
    anchor: Vector | None
    arrivals: int
    where: str
    factor: Factor | None = None


def told(
    kept: list[Vector], anchor: Vector | None, arrivals: int, step: str, is_now: Callable[[Vector], bool]
) -> list[str]:
    """The stories whose sums are the one that is there; none if the right sum is, too.

    Parameters
    ----------
    kept : list of array
        Some elements of the last gradients.
    anchor : array or None
        Those of the sum before them.
    arrivals : int
        The number of the last one.
    step : str
        The dtype in which sums are rounded at each addition.
    is_now : callable
        Whether a sum is the one that is there.
    """
    found: dict[str, list[int]] = {}
    n, first = len(kept), arrivals - len(kept) + 1
    alone = anchor is None or not anchor.any()
    for kind, number, terms in [("", 0, [-1, *range(n)]), *ways(n, alone)]:
        total: Vector | None = None
        for i in terms:
            term = anchor if i < 0 else kept[i]
            total = total if term is None else added(total, term, step)
        if total is not None and is_now(total):
            found.setdefault(kind, []).append(number)
            if not kind:
                return []  # other elements differ
    stories = []
    for kind, numbers in found.items():
        named = [first + i for i in numbers]
        which = f"arrival {named[0]}" if len(named) == 1 else f"one of arrivals {named[0]} .. {named[-1]}"
        stories.append(kind.format(which, n=arrivals))
    return stories


def ways(n: int, alone: bool) -> Iterator[tuple[str, int, list[int]]]:
    """Kinds of faults of n gradients, -1 for the sum before them: (what, of which one, what is summed).

    `alone`: there is no sum before them.
    """
    every = [-1, *range(n)]
    for i in range(n):
        if n > 2 or not alone:
            yield "{} is lost", i, [j for j in every if j != i]
        if n > 1 or not alone:
            yield "only {} of {n} counts", i, [i]
        yield "{} counts twice", i, [*every, i]
    for i in range(1, n - 1):
        if alone and i > 1:
            yield "only the first arrivals count, up to {}", i - 1, list(range(i))
        if not alone:
            yield "the last arrivals are lost, from {} on", i, [-1, *range(i)]
        if i > 1 or not alone:
            yield "only the last arrivals count, from {} on", i, list(range(i, n))
    if not alone and n:
        yield "the sum before {} is lost", 0, list(range(n))
        if n > 1:
            yield "the last arrivals are lost, from {} on", 0, [-1]
