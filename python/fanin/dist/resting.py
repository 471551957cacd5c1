"""The reducers of blocks over ranks that have ended: the next block with the same parameters and options takes the
thread and the buckets of the last one.

A reducer at rest keeps neither its parameters nor its group alive, and ends with either.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any

import torch

from .group import Group
from .group import group as group_of
from .reducer import Reducer

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: How many reducers rest for each group, as for models that are trained in turn.
KEPT = 4

_numbers = itertools.count()


class Resting:
    """A reducer, the options that it was made of, and its parameters."""

    def __init__(self, reducer: Reducer, options: str, parameters: list[torch.Tensor], end: Any) -> None:
        self.reducer, self.options = reducer, options
        # With the first of them all of a model end.
        self.parameters = [weakref.ref(p, end if i == 0 else None) for i, p in enumerate(parameters)]

    def fits(self, options: str, parameters: list[torch.Tensor]) -> bool:
        """Whether it was made of the same options and parameters, which have not changed since."""
        if options != self.options or len(parameters) != len(self.parameters):
            return False
        same = all(known() is p for known, p in zip(self.parameters, parameters, strict=True))
        return same and self.reducer._fits(parameters)


_resting: weakref.WeakKeyDictionary[Group, dict[int, Resting]] = weakref.WeakKeyDictionary()


def awake(named: list[tuple[str, torch.Tensor]], group: object, options: dict[str, Any]) -> Reducer:
    """A reducer of the parameters: one that rests, or a new one."""
    ranks = group if isinstance(group, Group) else group_of(group)
    parameters = [p for _, p in named]
    there = _resting.get(ranks, {})
    wanted = text_of(named, options)
    for number, one in [*there.items()]:
        if one.fits(wanted, parameters) and there.pop(number, None) is not None:
            one.reducer._wake(ranks, parameters)
            return one.reducer
    return Reducer(named, ranks, **options)


def rest(reducer: Reducer, named: list[tuple[str, torch.Tensor]], options: dict[str, Any]) -> None:
    """Let a reducer rest that no block uses any more."""
    ranks = reducer.group
    reducer._rest()
    there = _resting.setdefault(ranks, {})
    number = next(_numbers)
    end = partial(there.pop, number)  # no code of Python, which Ctrl-C could end; the weak reference is its default
    there[number] = Resting(reducer, text_of(named, options), [p for _, p in named], end)
    for oldest in [*there][:-KEPT]:
        there.pop(oldest, None)


def text_of(named: list[tuple[str, torch.Tensor]], options: dict[str, Any]) -> str:
    return repr(([name for name, _ in named], options))
