"""The statistics of a sparse sum are those of the elements that it stands for, whether or not an index is stored twice,
and its structure and statistics do not depend on when it was summed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from buffer.sim.test_order_of_steps import coo, dense, formats, host, on
from kit.sample import sizes

pytestmark = pytest.mark.core


def agree(stats: Any, elements: Any) -> None:
    """`elements`: dense; places that are not stored are zeros, which add nothing."""
    x = np.asarray(elements).ravel().astype(np.float64)
    good = x[np.isfinite(x)]
    assert stats.sumsq == pytest.approx(math.fsum(good * good), rel=1e-12)
    assert stats.absmax == np.abs(good).max(initial=0)
    assert stats.nonfinite == x.size - good.size


def seen(buf: fanin.InputBuffer) -> tuple[Any, ...]:
    s = buf.stats(0)
    return s.count, s.sumsq, s.absmax, s.nonfinite, s.first_bad_key


@pytest.mark.parametrize("step", sizes(5, 1))  # each value of each option meets each format
@pytest.mark.parametrize("where", ["cpu", "sim", "fake"])
def test_a_lone_gradient_counts_with_its_merged_elements(a_world: Callable[..., Any], where: str, step: int) -> None:
    rng = np.random.default_rng(3)
    w = a_world(where) if where != "cpu" else None
    zero, wide = fanin.Zero((4, 6), "f4"), fanin.Zero((4, 6), "f8")
    for g in formats(rng, "f4"):
        there = on(w, g) if w else g
        rows: Any = itertools.product(
            ([], [None], [zero], [wide]), ({}, {"dtype": "f8"}, {"shape": (4, 6)}), ({}, {"writable": True})
        )
        for (others, declared, options), budget in [*itertools.product(rows, (0, None))][::step]:
            buf = fanin.InputBuffer([fanin.Slot(**declared)], budget=budget, stats=True)
            for x in (there, *others):
                buf.add(0, x)
            (made,) = buf.take(**options)
            stats = buf.stats(0)
            if w:
                w.synchronize()
            agree(stats, dense(made))
            assert stats.count <= len(host(made.parts[-1]).ravel())
            if wide not in others and not declared:
                assert len(host(made.parts[-1])) == len(g.parts[-1])  # its structure is as it was added (A14)
                norm = fanin.global_norm(buf)
                assert norm == pytest.approx(np.linalg.norm(np.float64(dense(g))), rel=1e-12)


@pytest.mark.parametrize("how", [{"copy": True}, {"donate": True}, {}])
@pytest.mark.parametrize("accumulate", [{}, {"accumulate": "exact"}, {"accumulate": "float64"}])
def test_clipped_to_one_the_norm_is_one(how: Any, accumulate: Any) -> None:
    for g in formats(np.random.default_rng(4), "f4"):
        buf = fanin.InputBuffer([fanin.Slot(**accumulate)], stats=True)
        buf.add(0, g, **how)
        sums = buf.take()
        before = np.linalg.norm(dense(g))
        assert fanin.clip_norm(buf, sums, 1.0) == pytest.approx(before, rel=1e-6)
        assert np.linalg.norm(dense(sums[0])) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("where", ["cpu", "sim", "fake"])
def test_a_dense_out_has_the_statistics_of_all_its_elements(a_world: Callable[..., Any], where: str) -> None:
    w = a_world(where) if where != "cpu" else None
    for g in formats(np.random.default_rng(5), "f4"):
        for terms in ([g], [g, g]):
            out: Any = w.empty((4, 6), "f4") if w else np.empty((4, 6), "f4")
            buf = fanin.InputBuffer(1, stats=True)
            for x in terms:
                buf.add(0, on(w, x) if w else x)
            buf.take(out=[out])
            stats = buf.stats(0)
            if w:
                w.synchronize()
            agree(stats, host(out))
            assert stats.count == 24


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_an_overflow_between_two_numbers_of_one_index_is_found(a_world: Callable[..., Any], where: str) -> None:
    g = coo([60_000, 60_000, 1], "f2", [0, 0, 1])
    if where == "sim":
        g = on(a_world(where), g)
    buf = fanin.InputBuffer(1, stats=True)
    buf.add(0, g, key=4)
    buf.take()
    assert seen(buf) == (2, 1.0, 1.0, 1, 4)
    assert fanin.global_norm(buf) == math.inf


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_which_contribution_is_named_does_not_depend_on_the_budget(a_world: Callable[..., Any], where: str) -> None:
    """One that stores an inf or NaN; a sum that overflows names none."""
    w = a_world(where) if where != "cpu" else None
    big = coo([60_000, 60_000, 1], "f2", [0, 0, 1])
    inf = coo([np.inf, 1], "f2", [0, 1])
    one = np.ones(2, "f2")
    rows: list[tuple[list[Any], int | None]] = [
        ([big, one], None),
        ([one, big], None),
        ([big, big], None),
        ([big, inf, one], 1),
        ([big, one, inf], 2),
        ([inf, big], 0),
        ([big, np.array([np.nan, 1], "f4")], 1),
        ([np.full(2, 60_000, "f2")] * 2, None),
    ]
    for terms, want in rows:
        for budget in (0, 10, 10**9):
            buf = fanin.InputBuffer(1, budget=budget, stats=True)
            for key, x in enumerate(terms):
                far = w and (on(w, x) if isinstance(x, fanin.Sparse) else w.array(x))
                buf.add(0, far if w else x, key=key)
            buf.take()
            stats = buf.stats(0)
            assert (stats.nonfinite > 0, stats.first_bad_key) == (True, want), (terms, budget)


@pytest.mark.rule("E11")
def test_detect_finds_an_overflow_of_a_sparse_gradient() -> None:
    g = coo([60_000, 60_000], "f2")
    leaf = fanin.Leaf(np.zeros(2, "f2"))
    node = fanin.Node(lambda _: g, edges=[(leaf, 0)])
    with pytest.raises(Exception, match="inf"):
        fanin.backward([(node, 0, np.ones(1))], detect=True)


@pytest.mark.rule("A5")
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_structure_and_statistics_do_not_depend_on_the_budget(a_world: Callable[..., Any], where: str) -> None:
    r = random.Random(6)
    w = a_world(where) if where != "cpu" else None
    counted: Counter[str] = Counter()
    print("seed 6")
    for _ in range(150 if where == "cpu" else 40):
        dtype = r.choice(["f4", "f8", "c8", "f2", "i4"])
        lengths = [r.randint(0, 6) for _ in range(r.randint(2, 4))]
        terms = [
            coo([r.randint(1, 9) for _ in range(n)], dtype, [r.randrange(5) for _ in range(n)], 5) for n in lengths
        ]
        results = []
        for budget in (10**9, 0, 100):
            buf = fanin.InputBuffer(1, budget=budget, stats=True)
            for key, x in enumerate(terms):
                buf.add(0, on(w, x) if w else x, key=key)
            snapshot = buf[0]
            (made,) = buf.take()
            figures = seen(buf)
            if w:
                w.synchronize()
            parts = [host(p).tolist() for x in (made, snapshot) for p in x.parts]
            results.append((parts, figures))
        counted["unsorted"] += any(np.any(np.diff(x.parts[0][0]) <= 0) for x in terms)
        counted["sorted"] += all(np.all(np.diff(x.parts[0][0]) > 0) for x in terms)
        assert results[0] == results[1] == results[2], terms
        assert np.all(np.diff(results[0][0][0][0]) > 0)
    assert min(counted["sorted"], counted["unsorted"]) > 0, counted


def test_sorted_entries_and_others_have_the_same_figures() -> None:
    """The sums of squares of random sparse arrays, sorted or not, are NumPy's."""
    rng = np.random.default_rng(8)
    print("seed 8")
    for _ in range(60):
        for g in formats(rng, "f8"):
            keep = rng.integers(0, 3)
            if keep == 0 and g.format == "coo":
                order = np.lexsort(g.parts[0][::-1])
                g = fanin.Sparse("coo", (g.parts[0][:, order], g.parts[1][order]), g.shape)
            buf = fanin.InputBuffer(1, stats=True)
            buf.add(0, g)
            buf.take()
            agree(buf.stats(0), dense(g))
