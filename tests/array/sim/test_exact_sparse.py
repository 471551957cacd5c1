"""Exact sums of sparse gradients: every stored number counts once, exactly, and the sum is rounded once, for every
order, keys and budget.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin
from kit.values import BFLOAT16, COMPLEX, E4M3, E5M2, FLOATS, bits, stored

SHAPE = (4, 6)
FORMATS = ["coo", "hybrid", "csr", "csc", "bsr", "bsc", "our csr"]


def numbers(n: int, dtype: Any, draw: random.Random) -> Any:
    """Numbers whose sums round: of very different sizes, both signs."""
    top = {BFLOAT16: 100, E4M3: 8, E5M2: 14, np.dtype(np.float16): 14}.get(np.dtype(dtype), 40)
    low = {E4M3: -8, E5M2: -14, np.dtype(np.float16): -20}.get(np.dtype(dtype), -40)
    real = [draw.choice([1, -1]) * draw.randint(1, 7) * 2.0 ** draw.randint(low, top - 4) for _ in range(2 * n)]
    if np.dtype(dtype).kind == "c":
        return (np.array(real[:n]) + 1j * np.array(real[n:])).astype(dtype)
    return np.array(real[:n]).astype(dtype)


def made(kind: str, dtype: Any, draw: random.Random) -> Any:
    n = draw.randint(0, 9)
    index = np.array([[draw.randrange(e) for _ in range(n)] for e in SHAPE], np.int64).reshape(2, n)
    if kind == "hybrid":
        return fanin.Sparse("coo", (index[:1], numbers(n * 6, dtype, draw).reshape(n, 6)), SHAPE)
    if kind == "coo":
        return fanin.Sparse("coo", (index, numbers(n, dtype, draw)), SHAPE)
    if kind in ("bsr", "bsc"):
        lines = across = 2
        block = (SHAPE[0] // 2, SHAPE[1] // 2)
        count = [draw.randint(0, 2) for _ in range(lines)]
        minor = [k for c in count for k in [draw.randrange(across) for _ in range(c)]]
        parts = (
            np.array([0, *np.cumsum(count)]),
            np.array(minor, np.int64),
            numbers(sum(count) * 6, dtype, draw).reshape(-1, *block),
        )
        return fanin.Sparse(kind, parts, SHAPE)
    lines, across = SHAPE if kind != "csc" else SHAPE[::-1]
    count = [draw.randint(0, 3) for _ in range(lines)]
    minor = np.array([draw.randrange(across) for _ in range(sum(count))], np.int32)
    pointers, values = np.array([0, *np.cumsum(count)], np.int32), numbers(sum(count), dtype, draw)
    if kind == "our csr" or np.dtype(dtype) not in map(np.dtype, ("f4", "f8", "c8", "c16")):
        return fanin.Sparse("csr" if kind == "our csr" else kind, (pointers, minor, values), SHAPE)
    return (sp.csr_array if kind == "csr" else sp.csc_array)((values, minor, pointers), shape=SHAPE)


def exactly(terms: list[Any], dtype: Any, scale: Any = None) -> dict[tuple[int, ...], Any]:
    """The sums of all stored numbers, as fractions, rounded once."""
    sums: dict[tuple[int, ...], list[Fraction]] = defaultdict(lambda: [Fraction(0), Fraction(0)])
    for t in terms:
        pairs = stored(t) if not isinstance(t, np.ndarray) else np.ndenumerate(t)
        for index, x in pairs:
            z = complex(x)
            sums[index][0] += Fraction(z.real)
            sums[index][1] += Fraction(z.imag)
    by = Fraction(1 if scale is None else scale)

    def rounded(f: Fraction) -> float:
        """To float64, or, where that is rounded once more, to odd: then the second rounding is as if it were
        the first.
        """
        x = float(f)
        if Fraction(x) == f or dtype in (np.float64, np.complex128):
            return x
        x = math.nextafter(x, 0.0) if abs(Fraction(x)) > abs(f) else x
        word = np.array(x).view(np.uint64) | np.uint64(1)
        return float(word.view(np.float64))

    out = {}
    for index, (re, im) in sums.items():
        x = complex(rounded(re * by), rounded(im * by)) if np.dtype(dtype).kind == "c" else rounded(re * by)
        out[index] = np.array(x).astype(dtype)
    return out


def entries(x: Any) -> dict[tuple[int, ...], Any]:
    found: dict[tuple[int, ...], Any] = {}
    for index, value in stored(x):
        assert index not in found, "no place is there twice"
        found[index] = value
    return found


def same(got: Any, want: dict[tuple[int, ...], Any]) -> None:
    have = dict(np.ndenumerate(got)) if isinstance(got, np.ndarray) else entries(got)
    assert set(have) >= set(want)
    for index, x in have.items():
        if index in want:
            assert complex(x) == complex(want[index]), (index, x, want[index])
        else:
            assert x == 0


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=lambda d: d.name)
def test_every_format_sums_exactly_in_every_order_under_every_budget(dtype: Any) -> None:
    seen = {"sparse": 0, "dense": 0, "keys": 0}
    for seed in range(14):
        draw = random.Random(f"{dtype.name} {seed}")
        kinds = [draw.choice(FORMATS)] * 3 if seed % 2 else draw.sample(FORMATS, 3)
        terms = [made(k, dtype, draw) for k in kinds]
        if draw.random() < 0.4:
            terms.append(numbers(24, dtype, draw).reshape(SHAPE))
        scale = draw.choice([None, None, 2, 0.5])
        with np.errstate(all="ignore"):
            want = exactly(terms, dtype, scale)
        shown = None
        for order in itertools.islice(itertools.permutations(range(len(terms))), 6):
            budget, keyed = draw.choice([0, 1, None, math.inf]), draw.random() < 0.5
            buf = fanin.InputBuffer([fanin.Slot(accumulate="exact")], budget=budget)
            for k in order:
                buf.add(0, terms[k], key=k if keyed else None)
            got = buf.take(scale=scale)[0]
            seen["keys"] += keyed
            seen["dense" if isinstance(got, np.ndarray) else "sparse"] += 1
            same(got, want)
            now = bits(got) if isinstance(got, np.ndarray) else {i: bits(x) for i, x in entries(got).items()}
            assert shown in (None, now), "the order changes no bit"
            shown = now
    assert min(seen.values()) > 5, seen


def test_an_exact_sum_keeps_what_a_left_fold_loses() -> None:
    def one(x: float) -> Any:
        return sp.csr_array(np.array([[x, 0.0]]))

    terms = [one(1e100), one(1.0), one(-1e100)]
    assert fanin.add_n(terms).toarray().tolist() == [[0, 0]]
    exact = fanin.add_n(terms, accumulate="exact")
    assert type(exact) is sp.csr_array and exact.toarray().tolist() == [[1, 0]] and exact.nnz == 1
    dense = fanin.add_n([*terms, np.array([[0.0, 2.0]])], accumulate="exact")
    assert isinstance(dense, np.ndarray) and dense.tolist() == [[1, 2]]
    twice = fanin.Sparse("coo", (np.zeros((2, 3), np.int64), np.array([1e100, 1.0, -1e100])), (1, 2))
    assert fanin.add_n([twice, one(0.0)], accumulate="exact", scale=3).parts[1].tolist() == [3.0]


def test_out_stats_snapshots_and_undeclared_dtypes() -> None:
    terms = [
        sp.csr_array(np.array([[1e8, 0, 1]], np.float32)),
        sp.csr_array(np.array([[1, 0, 0]], np.float32)),
        sp.csr_array(np.array([[-1e8, 0, 2]], np.float32)),
    ]
    buf = fanin.InputBuffer(1, accumulate="exact", stats=True, budget=0)
    for k, t in enumerate(terms):
        buf.add(0, t, key=k)
    assert buf[0].toarray().tolist() == [[1, 0, 3]]
    out = np.full((1, 3), 9.0)
    assert buf.take(out=[out])[0] is out and out.tolist() == [[1, 0, 3]] and buf.stats(0).sumsq == 10
    for t in terms:
        buf.add(0, t)
    buf.add(0, np.array([[2.0**-40, 0, 0]]))
    assert buf.take()[0].tolist() == [[1 + 2.0**-40, 0, 3]] and buf.stats(0).count == 3
    bad = sp.csr_array(np.array([[np.inf, 0, 0]], np.float32))
    buf.add(0, terms[0], key=4)
    buf.add(0, bad, key=7)
    assert buf.take()[0].toarray()[0, 0] == np.inf and buf.stats(0).first_bad_key == 7
    alone = terms[0]
    buf.add(0, alone)
    assert buf.take()[0] is alone


def test_under_a_budget_dense_ones_become_a_state_and_sparse_ones_join_it() -> None:
    x = np.array([1e16, 1.0])
    s = fanin.Sparse("coo", (np.array([[0, 1, 0]]), np.array([1.0, 1e16, 1.0])), (2,))
    for budget in (0, math.inf):
        buf = fanin.InputBuffer(1, accumulate="exact", budget=budget)
        for _ in range(50):
            buf.add(0, x)
        buf.add(0, s)
        buf.add(0, -50 * x)
        assert buf.take()[0].tolist() == [2.0, 1e16]


def test_a_sum_that_cannot_be_exact_is_refused() -> None:
    with pytest.raises(TypeError, match=r"an exact sum takes arrays, and no objects \(A11\)"):
        fanin.add_n([Fraction(1), Fraction(2)], accumulate="exact")
    huge = fanin.Sparse("coo", (np.zeros((2, 1), np.int64), np.ones(1)), (2**40, 2**40))
    buf = fanin.InputBuffer(1, accumulate="exact")
    buf.add(0, huge)
    buf.add(0, huge)
    with pytest.raises(ValueError, match="2\\*\\*63 elements"):
        buf.take()
    assert bool(buf.explain(0)) and buf.counters.adds == 2


@pytest.mark.parametrize("form", ["coo", "csr"])
def test_on_a_device_an_exact_sum_of_sparse_gradients_is_refused_by_name(form: str) -> None:
    with fanin.sim.Machine(devices=1) as m:
        g = m.array(sp.coo_array(np.eye(3, dtype=np.float32)).asformat(form))
        buf = fanin.InputBuffer([fanin.Slot(name="w")], accumulate="exact", name="grads")
        with pytest.raises(
            TypeError, match=r"grads: slot 0 \(w\): an exact sum on a device .* takes dense gradients \(A11\)"
        ):
            buf.add(0, g)
        assert buf.take() == [None]
