"""The exact norm of arrays: the same on every rank, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fanin import _core
from fanin._interop.classes import is_scipy, is_sparse, is_torch
from fanin._interop.protocols import NDArray
from fanin._interop.sparse import part_of
from fanin._interop.torch import strided_parts
from fanin.slots import Sparse

__tracebackhide__ = True  # no frames of ours in reports of pytest

_CHUNK = 1 << 16  # elements that are squared at once
_SMALL, _LARGE = 2.0**-400, 2.0**500  # squares of float64 between these are exact as two float64


def _integer(values: NDArray) -> tuple[int, int]:
    """The exact sum of finite float64 as (n, e): n * 2**e."""
    m, e = np.frexp(values)
    digits, low = (m * 2.0**53).astype(np.int64).tolist(), int(e.min(initial=0))
    return sum(d << (k - low) for d, k in zip(digits, e.tolist(), strict=True)), low - 53


def values_of(x: Any) -> Any:
    """The array of the stored elements of a sparse array of SciPy, of torch or of fanin; another array as it is.

    Of a view with torch's conjugate or negative bit it is the memory: a real factor scales both alike, and magnitudes
    are the same.
    """
    if isinstance(x, Sparse):
        x = x.parts[-1]
    if is_scipy(x):
        return part_of(x, "data")
    if not is_torch(x):
        return x
    values: Any = strided_parts(x.detach())[-1]
    if values.is_conj():
        values = values.conj()
    return values._neg_view() if values.is_neg() else values


def merged(x: Any) -> Any:
    """The stored elements of an array; of a sparse one those of a repeated index are added up."""
    return values_of(_core.add_n([x], scale=1) if is_sparse(x) else x)


def _wide(x: Any) -> NDArray:
    """The elements of an array, which float64 holds, as float64: two of each complex one."""
    if not isinstance(x, np.ndarray):
        x = x.detach().cpu()
        if x.is_floating_point() and x.itemsize < 4:  # NumPy has not all of these; no arithmetic
            x = x.float()
        x = x.numpy()
    flat = np.ascontiguousarray(x).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    return flat.astype(np.float64)


class Squares:
    """The exact sum of squares, as an integer times a power of two."""

    def __init__(self) -> None:
        self._window = _core.window_new("float64", 256)
        self._far: list[tuple[int, int]] = []
        self.finite = True

    def _terms(self, values: NDArray) -> None:
        whole = np.zeros(-(-len(values) // 256) * 256)
        whole[: len(values)] = values
        _core.window_add(self._window, tuple(whole.reshape(-1, 256)))

    def add(self, x: Any) -> None:
        """Add the squares of the elements of an array; |z|^2 for complex ones."""
        _core.in_default_modes(lambda: self._add(x))

    def _add(self, x: Any) -> None:
        wide = str(x.dtype).rpartition(".")[2] in ("float64", "complex128")
        flat = _wide(x)
        self.finite = self.finite and bool(np.isfinite(flat).all())
        for at in range(0, len(flat) if self.finite else 0, _CHUNK):
            v = flat[at : at + _CHUNK]
            if wide:
                size = np.abs(v)
                far = (size != 0) & ((size < _SMALL) | (size > _LARGE))
                for d in v[far].tolist():
                    n, e = _integer(np.array([d]))
                    self._far.append((n * n, 2 * e))
                v = np.where(far, 0.0, v)
                c = 134217729.0 * v  # two halves of 26 bits, whose products are exact
                high = c - (c - v)
                low = v - high
                self._terms(low * low)
                self._terms(2 * high * low)
                v = high
            self._terms(v * v)

    def total(self) -> tuple[int, int]:
        """The sum so far as (n, e): n * 2**e."""
        return _core.in_default_modes(self._total)

    def _total(self) -> tuple[int, int]:
        parts = list(self._far)
        out = np.empty(256)
        while True:  # each turn takes 53 bits of each number off
            _core.window_round(self._window, out, None)
            if not out.any():
                break
            parts.append(_integer(out))
            _core.window_add(self._window, (-out,))
        low = min((e for _, e in parts), default=0)
        return sum(n << (e - low) for n, e in parts), low


def root(parts: Iterable[tuple[int, int]]) -> float:
    """The square root of a sum of n * 2**e, rounded once; inf where it exceeds float64."""
    known = [(n, e) for n, e in parts if n]
    if not known:
        return 0.0
    low = min(e for _, e in known)
    n = sum(k << (e - low) for k, e in known)
    up = 130 - n.bit_length()
    up += (low - up) % 2
    n = n << up if up > 0 else n >> -up | 1  # the last bit is set: it replaces the dropped ones
    whole = math.isqrt(n)
    whole |= whole * whole != n
    exponent = (low - up) // 2
    try:  # a quotient of integers is rounded once, also to a subnormal number
        return _core.in_default_modes(lambda: (whole << max(exponent, 0)) / (1 << max(-exponent, 0)))
    except OverflowError:
        return math.inf
