"""Gradients by recipe, for two buffers that are compared.

A recipe is a few plain values. Each of the two buffers lives in a world of its own, where the same recipe makes the
same thing in memory of its own; so what one buffer does to memory the other cannot see, and is compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import scipy.sparse as sp

import fanin
from kit.values import BFLOAT16, DTYPES, E4M3, E5M2, bits

Array = np.ndarray[Any, Any]

SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 2), (2, 4), (1, 3), (4, 1), (2, 1, 2)]
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1 / 3, 0.1, 255.0, 2049.0, 2.0**24, -(2.0**24), 2.0**-130, 65504.0, 1e30]
REALS += [-1e30, 2.0**53, np.inf, -np.inf, np.nan]
REALS += [1 + 2.0**-n + 2.0**-40 for n in (3, 4, 8, 11)] * 2  # just above a tie: to be rounded once
WHOLE = [0, 1, -1, 2, 100, 127, -128, 255, 2**15, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63)]
LAYOUTS = [
    "C",
    "C",
    "C",
    "F",
    "reversed",
    "gapped",
    "expanded",
    "expanded",
    "read-only",
    "unaligned",
    "subclass",
    "view",
]
SCIPY = [d for d in DTYPES if d not in (np.float16, BFLOAT16, E4M3, E5M2)]


class Sub(np.ndarray[Any, Any]):
    """A subclass that sums as ndarray does."""


@dataclass(frozen=True)
class Word:
    """An object of a user's own: its sum is a text of what was summed, and in which order."""

    text: str

    def __add__(self, other: Any) -> Word:
        return Word(f"({self.text} + {text_of(other)})")

    def __radd__(self, other: Any) -> Word:
        return Word(f"({text_of(other)} + {self.text})")

    def __mul__(self, weight: Any) -> Word:
        return Word(f"({self.text} * {weight!r})")

    def __truediv__(self, divisor: Any) -> Word:
        return Word(f"({self.text} / {divisor!r})")


def text_of(x: Any) -> str:
    if isinstance(x, Word):
        return x.text
    if isinstance(x, bool | int | float | complex | np.generic | np.ndarray) and np.ndim(x) == 0:
        return str(complex(x))  # for every kind of number that it is viewed as
    if isinstance(x, np.ndarray | np.generic) and x.dtype in DTYPES:
        return f"{x.dtype} {bits(x).hex()}"
    return type(x).__name__


def joined(old: Any, new: Any) -> Word:
    """A slot's combine."""
    return Word(f"<{text_of(old)} {text_of(new)}>")


@dataclass(frozen=True)
class Recipe:
    kind: str
    dtype: int = 0
    shape: tuple[int, ...] = ()
    layout: str = "C"
    seed: int = 0


#: kinds, the likelier the oftener
KINDS = ["dense"] * 20 + ["sparse"] * 6 + ["again"] * 3 + ["zero", "zero", "none", "none"]
KINDS += ["python", "object", "fraction", "wrong shape", "nonsense"]
SCALARS = ["dense"] * 4 + ["python"] * 8 + ["numpy"] * 8 + ["again", "zero", "none", "object", "nonsense"]


def recipe(kinds: list[str], dtypes: list[int], shapes: list[tuple[int, ...]], draw: random.Random) -> Recipe:
    seed = draw.randrange(10**6)
    return Recipe(draw.choice(kinds), draw.choice(dtypes), draw.choice(shapes), draw.choice(LAYOUTS), seed)


@dataclass
class Given:
    """The arguments of one of the two buffers, and their memory."""

    things: list[Any] = field(default_factory=list)  # in the order in which they were made
    memory: list[Array] = field(default_factory=list)  # that must stay the same in both worlds
    donated: set[int] = field(default_factory=set)  # which things were

    def make(self, r: Recipe, donate: bool) -> Any:
        draw = random.Random(r.seed)
        free = [i for i, x in enumerate(self.things) if isinstance(x, np.ndarray) and i not in self.donated]
        if r.kind == "again" and free:
            x = self.things[draw.choice(free)]
            return x[::-1][::-1] if x.ndim and draw.random() < 0.3 else x
        x = getattr(self, "_" + r.kind.replace(" ", "_"), self._dense)(r, draw)
        self.things.append(x)
        if donate:
            self.donated.add(len(self.things) - 1)
        else:
            self.memory += [y for y in parts_of(x) if isinstance(y, np.ndarray)]
        return x

    def which(self, x: Any) -> int | None:
        """Which of the things x is, if it is one that can be told from another."""
        numbers = bool | int | float | complex | np.generic
        return next((i for i, y in enumerate(self.things) if y is x and not isinstance(x, numbers)), None)

    def image(self) -> list[bytes]:
        """What is in the memory, every NaN the same: a sum may have been written there by out=."""
        return [bits(x) if x.dtype in DTYPES else x.tobytes() for x in self.memory]

    # What recipes make

    def _dense(self, r: Recipe, draw: random.Random) -> Any:
        x = values(r.shape, r.dtype, draw)
        if r.layout == "F":
            return x.copy(order="F")
        if r.layout == "reversed":
            return x[::-1].copy()[::-1] if x.ndim else x
        if r.layout == "gapped":
            wide = np.zeros((*x.shape, 2), x.dtype)
            wide[..., 0] = x
            return wide[..., 0]
        if r.layout == "expanded" and x.ndim:
            return np.broadcast_to(x[:1], x.shape)
        if r.layout == "read-only":
            x.flags.writeable = False
        if r.layout == "unaligned":
            raw = np.zeros(x.nbytes + 1, np.uint8)
            y = raw[1:].view(x.dtype).reshape(x.shape) if x.nbytes else x
            y[...] = x
            return y
        if r.layout == "subclass":
            return x.view(Sub)
        if r.layout == "view" and x.ndim:
            return np.concatenate([x, x])[: len(x)]
        return x

    def _wrong_shape(self, r: Recipe, draw: random.Random) -> Any:
        shapes = [(*r.shape, 1), (5, 7), (1, *r.shape), ()]
        return values(draw.choice(shapes), r.dtype, draw)

    def _sparse(self, r: Recipe, draw: random.Random) -> Any:
        shape = r.shape or (3,)
        count = draw.randrange(6) if 0 not in shape else 0
        kinds = ["ours", "hybrid"] if len(shape) > 1 else ["ours"]
        if len(shape) == 2:
            kinds += ["coo", "csr", "csc", "bsr", "dia", "our csr", "our bsc", "matrix"]
        kind = draw.choice(kinds)
        if kind in ("coo", "csr", "csc", "bsr", "dia", "matrix"):
            index = np.array([[draw.randrange(n) for _ in range(count)] for n in shape], np.int64).reshape(2, count)
            dtype = DTYPES[r.dtype] if DTYPES[r.dtype] in SCIPY else np.dtype(np.float32)
            entries = values((count,), DTYPES.index(dtype), draw)
            if kind in ("coo", "matrix"):
                return (sp.coo_array if kind == "coo" else sp.coo_matrix)((entries, tuple(index)), shape=shape)
            if kind in ("csr", "csc"):
                pointers, minor, order = compressed(index if kind == "csr" else index[::-1], shape[kind == "csc"])
                return (sp.csr_array if kind == "csr" else sp.csc_array)((entries[order], minor, pointers), shape=shape)
            dense = np.zeros(shape, dtype)
            dense[tuple(index)] = entries
            return (
                sp.dia_array(dense) if kind == "dia" else sp.bsr_array(dense, blocksize=(1 if shape[0] % 2 else 2, 1))
            )
        if kind in ("ours", "hybrid"):
            sparse_dim = 1 if kind == "hybrid" else len(shape)
            index = np.array([[draw.randrange(n) for _ in range(count)] for n in shape[:sparse_dim]], np.int64)
            parts: tuple[Array, ...] = (
                index.reshape(sparse_dim, count),
                values((count, *shape[sparse_dim:]), r.dtype, draw),
            )
            return fanin.Sparse("coo", parts, shape)
        index = np.array([[draw.randrange(n) for _ in range(count)] for n in shape], np.int64).reshape(2, count)
        if kind == "our csr":
            pointers, minor, order = compressed(index, shape[0])
            return fanin.Sparse("csr", (pointers, minor, values((count,), r.dtype, draw)[order]), shape)
        block = (1, shape[1])  # BSC of whole rows: one column of blocks
        minor = np.array([draw.randrange(shape[0]) for _ in range(count)], np.int64)
        return fanin.Sparse("bsc", (np.array([0, count]), minor, values((count, *block), r.dtype, draw)), shape)

    def _zero(self, r: Recipe, draw: random.Random) -> Any:
        return fanin.Zero(r.shape, DTYPES[r.dtype])

    def _none(self, r: Recipe, draw: random.Random) -> Any:
        return None

    def _python(self, r: Recipe, draw: random.Random) -> Any:
        x = draw.choice([True, False, 0, 1, -1, 100, 300, 2**62, 2**63, 0.5, -0.0, 0.1, np.inf, 1j, 1 + 0.1j])
        return x if type(x) in (bool, int, float, complex) else float(x)

    def _numpy(self, r: Recipe, draw: random.Random) -> Any:
        return values((1,), r.dtype, draw)[0]

    def _object(self, r: Recipe, draw: random.Random) -> Any:
        return Word(draw.choice("abc"))

    def _fraction(self, r: Recipe, draw: random.Random) -> Any:
        return Fraction(draw.randrange(9), 7)

    def _nonsense(self, r: Recipe, draw: random.Random) -> Any:
        strings = np.array(["a", "b", "c"])
        return draw.choice([[1.0], (), {}, "x", strings, np.zeros(3, ">f4"), np.zeros(3, np.longdouble), object, {1}])


def values(shape: tuple[int, ...], dtype: int, draw: random.Random) -> Array:
    """An array of numbers that are likely to go wrong."""
    d, n = DTYPES[dtype], int(np.prod(shape))
    if d.kind in "bui":
        return np.array([draw.choice(WHOLE) for _ in range(n)], np.int64).astype(d).reshape(shape)
    some = REALS[:6] if draw.random() < 0.3 else REALS
    real = np.array([draw.choice(some) for _ in range(n)], np.float64)
    with np.errstate(all="ignore"):
        if d.kind == "c":
            x = np.empty(n, d)
            x.real, x.imag = real, [draw.choice(some) for _ in range(n)]
            return x.reshape(shape)
        return real.astype(d).reshape(shape)


def compressed(index: Array, lines: int) -> tuple[Array, Array, Array]:
    """(pointers, minor indices, order) of entries at index."""
    order = np.argsort(index[0], kind="stable")
    pointers = np.concatenate([[0], np.cumsum(np.bincount(index[0], minlength=lines))]).astype(np.int64)
    return pointers, index[1][order], order


def parts_of(x: Any) -> list[Any]:
    """The memory of x: for a view, the memory of its base, as numbers of its dtype."""
    if isinstance(x, np.generic):
        return []
    if isinstance(x, np.ndarray):
        while isinstance(x.base, np.ndarray) and x.base.dtype == x.dtype:
            x = x.base
        return [x]
    return [*getattr(x, "parts", ()), *(getattr(x, n, None) for n in ("data", "indices", "indptr", "row", "col"))]
