"""Gradients that are no arrays: objects with a `+` of their own, dicts with a `combine`, symbolic zeros, sparse
rows.
"""

from dataclasses import dataclass

import numpy as np

import fanin


@dataclass(frozen=True)
class Interval:
    """All that a gradient may be."""

    low: float
    high: float

    def __add__(self, other):
        return Interval(self.low + other.low, self.high + other.high)


def merge(old, new):
    return {name: old.get(name, 0) + new.get(name, 0) for name in sorted({*old, *new})}


buf = fanin.InputBuffer([fanin.Slot(), fanin.Slot(combine=merge), fanin.Slot(shape=(4, 2)), fanin.Slot()])

buf.add(0, Interval(-1.0, 1.0))
buf.add(0, Interval(2.0, 3.0))

buf.add(1, {"w": 1.0})
buf.add(1, {"w": 0.5, "b": 2.0})

rows = fanin.Sparse("coo", (np.array([[0, 3]]), np.ones((2, 2))), (4, 2))  # rows 0 and 3 of an embedding
buf.add(2, rows)
buf.add(2, np.full((4, 2), 0.25))

buf.add(3, fanin.Zero((1000, 1000), "float32"))  # no memory is spent on it

for result in buf.take():
    print(result.tolist() if isinstance(result, np.ndarray) else result)
