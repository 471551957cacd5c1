"""Which arrays share memory: `overlap` of two arrays, `overlaps` of many, `overlaps_itself` of one.

>>> x = np.zeros(10)
>>> bool(fanin.sharing.overlap(x[:4], x[2:6]))
True

`fanin.overlap` is the same function as `fanin.sharing.overlap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, final

from . import _core
from ._words import counted

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__ = ["Overlaps", "Verdict", "overlap", "overlaps", "overlaps_itself"]

Witness = tuple[tuple[int, ...], tuple[int, ...]]
Pairs = tuple[tuple[int, int], ...]


@final
class Verdict:
    """Whether two arrays share a byte of memory: "disjoint", "overlap", or "unknown" with the reason.

    True in a condition unless they are surely disjoint: `if fanin.overlap(a, b): copy`. Verdicts are immutable,
    hashable, and compare by value.

    >>> x = np.zeros((3, 4))
    >>> v = fanin.overlap(x[1:], x[:, 2])
    >>> v.kind, v.witness
    ('overlap', ((1, 2), (2,)))
    """

    __slots__ = ("_found",)

    def __init__(self, found: Witness | str | None) -> None:
        self._found = found  # as _core.overlap returns it: None for "disjoint", a witness, or the reason

    @property
    def kind(self) -> Literal["disjoint", "overlap", "unknown"]:
        """One of "disjoint", "overlap", "unknown"."""
        if self._found is None:
            return "disjoint"
        return "unknown" if self.reason else "overlap"

    @property
    def witness(self) -> Witness | None:
        """For an overlap: an index into each array, two tuples of non-negative ints, whose elements share a byte."""
        return self._found if isinstance(self._found, tuple) else None

    @property
    def reason(self) -> str | None:
        """The reason for "unknown"; else None."""
        return self._found if isinstance(self._found, str) else None

    def __bool__(self) -> bool:
        return self._found is not None

    def __eq__(self, other: object) -> bool:
        return self._found == other._found if isinstance(other, Verdict) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._found)

    def __repr__(self) -> str:
        more = ""
        if self.reason:
            more = f": {self.reason}"
        elif self.witness:
            more = ", at {} and {}".format(*self.witness)
        return f"<fanin.sharing.Verdict: {self.kind}{more}>"


DISJOINT = Verdict(None)


def verdict(found: Witness | str | None) -> Verdict:
    """The verdict of what the core returned."""
    return DISJOINT if found is None else Verdict(found)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Overlaps:
    """Which of several arrays share memory, as `fanin.sharing.overlaps` found it.

    It keeps addresses, shapes and strides, and no array. An undecided pair counts as an overlap. Its length is the
    number of arrays; iteration yields `pairs`.

    Attributes
    ----------
    exact : bool
        Whether each component is exact. False: the budget ended first, and `components` and `indices` may join arrays
        that share no byte, but none that do is missing. A larger `budget`, or `float('inf')`, decides the rest.

    Examples
    --------
    >>> x = np.zeros(10)
    >>> found = fanin.sharing.overlaps([x[:4], x[2:6], x[6:], x[5:7]])
    >>> found.pairs
    ((0, 1), (1, 3), (2, 3))
    >>> found.components, found.indices
    (((0, 1, 2, 3),), (0, 1, 2, 3))
    """

    exact: bool
    _found: object
    _labels: tuple[int, ...]
    _count: int
    _budget: float | None
    _easy: bool

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The components: a tuple of tuples of indices, each of two or more, ascending.

        Two arrays are in one component if a chain of overlaps leads from one to the other. An array without overlaps
        is in none.
        """
        if self._count == len(self._labels):
            return ()
        members: list[list[int]] = [[] for _ in range(self._count)]
        for i, label in enumerate(self._labels):
            members[label].append(i)
        return tuple(sorted(tuple(m) for m in members if len(m) > 1))

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The indices of all arrays that share memory with another one, ascending."""
        return tuple(sorted(chain.from_iterable(self.components)))

    def _pairs(self) -> tuple[Pairs, Pairs]:
        """All pairs and the undecided ones. Threads that are here at once get the same two: the first that is stored.

        A cached_property has no lock since Python 3.12.
        """
        made: tuple[Pairs, Pairs] | None = self.__dict__.get("_made")
        if made is None:
            pairs, unknown = _core.overlaps_pairs(self._found, self._budget)
            made = self.__dict__.setdefault("_made", (tuple(pairs), tuple(unknown)))
        return made

    @property
    def pairs(self) -> Pairs:
        """All pairs (i, j), i < j, of arrays that are not surely disjoint, ascending.

        Made at the first use: there may be n * (n - 1) / 2.
        """
        return self._pairs()[0]

    @property
    def unknown(self) -> Pairs:
        """The undecided pairs.

        Where two or more strides occur among the arrays, all pairs are looked at for it, as `pairs` does.
        """
        return () if self._easy else self._pairs()[1]

    def verdict(self, i: int, j: int, /) -> Verdict:
        """The Verdict on arrays i and j, with its witness."""
        return verdict(_core.overlaps_verdict(self._found, i, j, self._budget))

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __repr__(self) -> str:
        shared = f"{'' if self.exact else 'at most '}{len(self.indices)} share memory"
        parts = counted(len(self.components), "component")
        return f"<fanin.sharing.Overlaps of {counted(len(self), 'array')}: {shared}, in {parts}>"


def overlap(a: object, b: object, /, *, budget: float | None = None) -> Verdict:
    """Whether arrays a and b share a byte of memory: exactly, for any shapes, strides and dtypes.

    Only addresses, shapes and strides are compared; a file that is mapped twice at different addresses counts as
    disjoint. Most pairs are decided in a fraction of a microsecond.

    Parameters
    ----------
    a, b : array
        An ndarray, a torch or JAX tensor, an array on a device of fanin, or any object with a buffer or DLPack.
    budget : int or math.inf
        Bytes of a table that a few hard pairs need; beyond it the verdict is "unknown". Default: 256 MiB.

    Returns
    -------
    Verdict
        With a witness if they overlap.

    Raises
    ------
    TypeError
        An object that is no single array in memory (sparse, masked, a tracer).
    ValueError
        Arrays of different devices.

    Examples
    --------
    >>> m = np.zeros((6, 9))
    >>> fanin.overlap(m[0:4, 0:4], m[2:6, 0:4])
    <fanin.sharing.Verdict: overlap, at (2, 0) and (0, 0)>
    >>> bool(fanin.overlap(m[:, 0], m[:, 1]))
    False
    """
    return verdict(_core.overlap(a, b, budget))


def overlaps(arrays: Iterable[object], /, *, budget: float | None = None) -> Overlaps:
    """Which of several arrays share memory: the pairs, their components, the indices of all that take part.

    Near-linear in the number of arrays for pieces, columns, blocks, step slices and heads of common arrays; only
    `pairs`, which is made at its first use, takes as long as there are pairs. Raises the errors of `overlap`, with the
    name of the array.

    Parameters
    ----------
    arrays : sequence of arrays
        As for `overlap`.
    budget : int or math.inf
        For each pair, as for `overlap`.

    Examples
    --------
    >>> flat = np.zeros(100)
    >>> w, b = flat[:90].reshape(9, 10), flat[90:]
    >>> fanin.sharing.overlaps([w, b, flat[85:95], np.zeros(3)]).components
    ((0, 1, 2),)
    >>> fanin.sharing.overlaps([w[:, i] for i in range(10)]).pairs
    ()
    """
    found, labels, count, exact, easy = _core.overlaps(arrays, budget)
    return Overlaps(exact, found, labels, count, budget, easy)


def overlaps_itself(a: object, /, *, budget: float | None = None) -> Verdict:
    """Whether two different elements of array a share a byte of memory, so that writing one changes the other.

    Exact like `overlap`, with the same parameters and errors; the witness is the two indices.

    >>> fanin.sharing.overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3)))
    <fanin.sharing.Verdict: overlap, at (1, 0) and (0, 0)>
    >>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)
    >>> fanin.sharing.overlaps_itself(windows).kind
    'overlap'
    """
    return verdict(_core.overlaps_itself(a, budget))
