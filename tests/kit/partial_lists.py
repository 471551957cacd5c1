"""Lists of partial, dense and sparse gradients, drawn; and what they sum to, by an oracle that adds one number after
the other: each element is the left fold of the terms that reach it.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

import fanin
from fanin import Diagonal, Partial
from kit.recipes import values
from kit.values import DTYPES, stored
from reference.numbers import accumulation, plus, promotion, rounded

Array = np.ndarray[Any, Any]
NAMES = [d.name for d in DTYPES]
BUDGETS = (0, 24, None, math.inf)


# ---------------------------------------------------------------- The oracle


def touches(term: Any, shape: tuple[int, ...]) -> list[tuple[int, Any]]:
    """(place in C order, number) of what a term brings, in its order."""
    places = np.arange(math.prod(shape)).reshape(shape)
    if isinstance(term, fanin.Sparse):
        return [(int(places[at]), x) for at, x in stored(term)]
    if isinstance(term, Partial):
        at = term.at
        where = np.diagonal(places, at.offset, at.axis1, at.axis2) if isinstance(at, Diagonal) else places[at]
        own = np.asarray(term.values)
        assert np.asarray(where).shape == own.shape
        return list(zip(np.asarray(where).reshape(-1).tolist(), own.reshape(-1), strict=True))
    return list(zip(places.reshape(-1).tolist(), np.asarray(term).reshape(-1), strict=True))


def dtype_of(term: Any) -> np.dtype[Any]:
    return np.asarray(term.values if isinstance(term, Partial) else getattr(term, "parts", (term,))[-1]).dtype


def fold(terms: list[Any], shape: tuple[int, ...], wish: Any = None, weights: list[Any] | None = None) -> Array:
    """Each element by itself; each prefix in its own dtype (D3), in which a term is multiplied by its weight (W1)."""
    seen: set[str] = set()
    found: dict[int, Array] = {}
    for i, term in enumerate(terms):
        seen.add(dtype_of(term).name)
        acc = accumulation(promotion(seen), wish)
        found = {at: rounded(x, acc) for at, x in found.items()}
        for at, x in touches(term, shape):
            one = rounded(np.asarray(x).reshape(1), acc)
            if weights and weights[i] is not None:
                one = one * rounded(np.asarray(weights[i]), acc)
            found[at] = plus(found[at], one) if at in found else one
    dtype = promotion(seen)
    total = np.zeros(math.prod(shape), dtype)
    for at, x in found.items():
        total[at : at + 1] = rounded(x, dtype)
    return total.reshape(shape)


# ---------------------------------------------------------------- Drawn


def an_index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    if len(shape) > 1 and draw.random() < 0.15:
        axes = draw.sample(range(len(shape)), 2)
        return Diagonal(draw.randrange(-2, 3), *axes)
    entries: list[Any] = []
    for n in shape[: draw.randrange(len(shape) + 1)]:
        kind = draw.random()
        if kind < 0.25 and n:
            entries.append(draw.randrange(-n, n))
        elif kind < 0.85:
            ends: list[Any] = [None, *range(-n - 1, n + 2)]
            entries.append(slice(draw.choice(ends), draw.choice(ends), draw.choice([None, 1, 2, 3, -1, -2])))
        else:
            entries.append(slice(None))
    if draw.random() < 0.3:
        entries.insert(draw.randrange(len(entries) + 1), None)
    if draw.random() < 0.3:
        entries.append(Ellipsis)
    return entries[0] if len(entries) == 1 and draw.random() < 0.5 else tuple(entries)


def numbers(draw: random.Random, shape: tuple[int, ...], name: str) -> Array:
    if draw.random() < 0.4:
        return values(shape, NAMES.index(name), draw)
    with np.errstate(all="ignore"):
        some = [draw.choice([0.0, -0.0, 1, 3, 100, 0.1]) for _ in range(math.prod(shape))]
        return np.array(some).astype(np.dtype(name)).reshape(shape)


def a_partial(draw: random.Random, shape: tuple[int, ...], name: str) -> Partial:
    at = an_index(draw, shape)
    whole = np.zeros(shape)
    own = np.diagonal(whole, at.offset, at.axis1, at.axis2) if isinstance(at, Diagonal) else whole[at]
    x = numbers(draw, np.shape(own), name)
    return Partial(x, at, shape)


def a_sparse(draw: random.Random, shape: tuple[int, ...], name: str) -> fanin.Sparse:
    n = draw.randrange(4) if math.prod(shape) else 0
    index = np.array([[draw.randrange(k) for _ in range(n)] for k in shape], np.int64).reshape(len(shape), n)
    return fanin.Sparse("coo", (index, numbers(draw, (n,), name)), shape)


def a_list(draw: random.Random) -> tuple[tuple[int, ...], list[Any]]:
    shape = draw.choice([(4,), (1,), (3, 4), (2, 3, 2), (0, 3), (5, 1)])
    names = [draw.choice(NAMES)] if draw.random() < 0.6 else draw.sample([n for n in NAMES if "float8" not in n], 2)
    terms: list[Any] = []
    kinds = draw.choice([["partial"], ["partial"], ["partial", "dense"], ["partial", "sparse"],
                         ["partial", "partial", "dense", "sparse"]])  # fmt: skip
    for _ in range(draw.randrange(1, 7)):
        kind, name = draw.choice(kinds), draw.choice(names)
        if kind == "partial":
            terms.append(a_partial(draw, shape, name))
        elif kind == "sparse":
            terms.append(a_sparse(draw, shape, name))
        else:
            terms.append(numbers(draw, shape, name))
    return shape, terms
