"""Norms of a Reducer: rounded once, in the whole range of float64, also of a leaf that keeps a sparse gradient."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist.norms import Squares, merged, root

pytestmark = pytest.mark.core

LARGEST = float(np.finfo(np.float64).max)


def exact_norm(values: list[float]) -> float:
    """Compute the norm with integers alone: every float64 is a multiple of 2**-1074."""
    total = sum(((n << 1074) // d) ** 2 for n, d in (float(x).as_integer_ratio() for x in values))
    whole = math.isqrt(total << 140)
    whole |= whole * whole != total << 140
    try:
        return whole / (1 << 1144)
    except OverflowError:
        return math.inf


def test_a_norm_is_rounded_once_wherever_its_numbers_lie() -> None:
    rng = np.random.default_rng(20261129)
    print("seed 20261129")
    ends = {"inf": 0, "subnormal": 0, "between": 0}
    for _ in range(400):
        exponent = np.clip(rng.integers(-1090, 1030) + rng.integers(-40, 40, 7), -1074, 1023)
        values = np.ldexp(1 + rng.random(7), exponent)
        squares = Squares()
        squares.add(values)
        norm = root([squares.total()])
        assert norm == exact_norm(values.tolist())
        ends["inf" if norm == math.inf else "subnormal" if norm < sys.float_info.min else "between"] += 1
    assert min(ends.values()) > 0, ends


def after_a_pass(grads: list[Any], read: Any) -> list[Any]:
    """Return `read(reducer, leaves)` of two ranks, each of which brought half of every gradient."""

    def rank(group: dist.Group) -> Any:
        leaves = [fanin.Leaf(np.zeros_like(g), name=f"w{i}") for i, g in enumerate(grads)]
        reducer = dist.Reducer(leaves, group)
        fanin.backward([(w, 0, g / 2) for w, g in zip(leaves, grads, strict=True)], reducer=reducer)
        return read(reducer, leaves)

    return dist.threads(2, rank, timeout=None)


def test_a_norm_beyond_float64_is_inf_and_nothing_is_clipped() -> None:
    grads = [np.full(2, LARGEST), np.full(2, -LARGEST)]

    def read(reducer: dist.Reducer, leaves: list[Any]) -> Any:
        return reducer.norm(), reducer.stats(), dist.clip_norm(reducer, 1.0), [w.grad for w in leaves]

    for norm, stats, clipped, kept in after_a_pass(grads, read):
        assert norm == stats.norm == clipped == math.inf
        assert (stats.absmax, stats.nonfinite) == (LARGEST, 0)
        assert all(np.array_equal(a, b) for a, b in zip(kept, grads, strict=True))


@pytest.mark.parametrize(("dtype", "value", "to"), [("f4", 3.4e38, 1e-10), ("f8", 3.2e300, 1e-10)])
def test_a_factor_that_is_subnormal_loses_nothing(dtype: str, value: float, to: float) -> None:
    def read(reducer: dist.Reducer, leaves: list[Any]) -> Any:
        return dist.clip_norm(reducer, to), leaves[0].grad

    for norm, grad in after_a_pass([np.full(4, value, dtype)], read):
        assert norm == pytest.approx(2 * value, rel=1e-6)
        assert grad.tolist() == pytest.approx([to / 2] * 4, rel=1e-15 if dtype == "f8" else 1e-7)


def sparse_kinds() -> list[Any]:
    """The same vector three ways: [0, 3, 4 (as 1 + 3), 0], and its square root of a sum of squares, 5."""
    index, values = np.array([[1, 2, 2]]), np.array([3.0, 1.0, 3.0])
    found: list[Any] = [pytest.param(lambda: fanin.Sparse("coo", (index.copy(), values.copy()), (4,)), id="fanin")]

    def scipy_coo() -> Any:
        sparse = pytest.importorskip("scipy.sparse")
        return sparse.coo_array((values.copy(), (index[0].copy(),)), shape=(4,))

    def scipy_csr() -> Any:
        sparse = pytest.importorskip("scipy.sparse")
        return sparse.csr_array((values.copy(), index[0].copy(), np.array([0, 3])), shape=(1, 4))

    return [*found, pytest.param(scipy_coo, id="SciPy, coo"), pytest.param(scipy_csr, id="SciPy, csr")]


@pytest.mark.parametrize("sparse", sparse_kinds())
@pytest.mark.parametrize("into", ["all", 0])
def test_the_norm_of_a_leaf_that_keeps_a_sparse_gradient(sparse: Any, into: Any) -> None:
    def rank(group: dist.Group) -> Any:
        kept = sparse()
        leaf, other = fanin.Leaf(np.zeros(kept.shape), name="w"), fanin.Leaf(np.zeros(2), name="v")
        reducer = dist.Reducer([leaf, other], group, into=into, missing="skip")
        fanin.backward([(other, 0, np.array([6.0, 0.0]))], reducer=reducer)
        leaf.grad = kept
        norm, stats = reducer.norm(), reducer.stats()
        dist.clip_norm(reducer, 1.3)
        return norm, stats.norm, stats.absmax, reducer.norm()

    for norm, same, absmax, after in dist.threads(2, rank, timeout=None):
        assert norm == same == 13.0 and absmax == 12.0
        assert after == pytest.approx(1.3, rel=1e-15)


def test_repeated_indices_are_added_up() -> None:
    x = fanin.Sparse("coo", (np.array([[1, 1, 0]]), np.array([1.0, -1.0, 2.0])), (3,))
    assert sorted(np.asarray(merged(x)).tolist()) == [0.0, 2.0]
    dense = np.ones(3)
    assert merged(dense) is dense


@pytest.mark.parametrize("n", [1, 2])
def test_a_clip_that_is_refused_has_scaled_nothing(n: int) -> None:
    def rank(group: dist.Group) -> Any:
        first, second = fanin.Leaf(np.zeros(3), name="first"), fanin.Leaf(np.zeros(2), name="second")
        reducer = dist.Reducer([first, second], group, missing="skip")
        fanin.backward([(first, 0, np.full(3, 2.0))], reducer=reducer)
        kept = np.ones(2)
        second.grad = kept
        kept.flags.writeable = False
        with pytest.raises(BufferError, match="clip_norm: the sum of second: out: expected an array that can be writt"):
            dist.clip_norm(reducer, 1.0)
        refused = first.grad.tolist()
        second.grad = np.ones(2)
        dist.clip_norm(reducer, 1.0)
        return refused, reducer.norm()

    for refused, norm in dist.threads(n, rank, timeout=None):
        assert refused == [2.0 * n] * 3 and norm == pytest.approx(1, rel=1e-15)
