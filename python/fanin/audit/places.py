"""Which elements of a gradient an audit looks at."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

__tracebackhide__ = True  # no frames of ours in reports of pytest

SAMPLES = 256
TRIED = 4 * SAMPLES  # places at random, before the whole gradient is searched for elements that are not zero

Indices = np.ndarray[Any, np.dtype[np.integer[Any]]]


def chosen(
    name: str,
    n: int,
    look: Callable[[Indices], np.ndarray[Any, Any]],
    search: Callable[[], Indices],
    again: int = 0,
) -> Indices:
    """Choose places among n, of elements that are not zero where there are enough.

    Parameters
    ----------
    name : str
        Seeds the choice, so that each run has the same.
    n : int
        How many elements there are: more than `SAMPLES`.
    look : callable
        Returns the elements at some places.
    search : callable
        Returns the places of all elements that are not zero.
    again : int
        How often places have been chosen before.
    """
    rng = np.random.default_rng([zlib.crc32(name.encode()), n, again])
    places = rng.integers(0, n, TRIED)
    found = np.unique(places[look(places) != 0])
    if len(found) < SAMPLES:
        found = search()
    if len(found) > SAMPLES:
        found = rng.choice(found, SAMPLES, replace=False)
    elif len(found) < SAMPLES:
        rest = rng.integers(0, n, SAMPLES - len(found))
        return np.concatenate([rng.permutation(found), rest]).astype(_kind(n))
    return rng.permutation(found).astype(_kind(n))


def spread(name: str, n: int) -> Indices:
    """Choose places by name and size alone, so that all ranks have the same."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), n])
    return rng.integers(0, n, SAMPLES).astype(_kind(n))


def _kind(n: int) -> type[np.integer[Any]]:
    return np.int32 if n <= np.iinfo(np.int32).max else np.int64
