"""Sums over ranks: the bits of one process's sum, for any number of ranks.

>>> def brings_two(group):
...     return fanin.dist.add_n([np.float32([0.1, 1e8]), np.float32([0.2, -1e8])], group, order="exact")
>>> fanin.dist.threads(3, brings_two)[0]
array([0.90000004, 0.        ], dtype=float32)

MPI (mpi4py) or torch.distributed carries the messages; `threads` runs ranks as threads of one process. docs/ranks.md
says what each order of summation promises and costs, and how to write another engine.
"""

from __future__ import annotations

from fanin._trace.ranks import RanksTrace

from .counters import BadTerm, GroupCounters, SumStats
from .engine import Engine, Pending
from .group import Group, group
from .reducer import Reducer, clip_norm
from .skip import skip as _skip  # noqa: F401  (Group.skip calls it)
from .sums import add_n
from .threads import threads
from .traces import gather_trace

__all__ = [
    "BadTerm",
    "Engine",
    "Group",
    "GroupCounters",
    "Pending",
    "RanksTrace",
    "Reducer",
    "SumStats",
    "add_n",
    "clip_norm",
    "gather_trace",
    "group",
    "threads",
]
