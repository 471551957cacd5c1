"""A contribution is cast, then summed, then widened, then scaled, then rounded: in this order on every device, for
every form of it, and for every order of arrival.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit.prepared import run_prepared
from kit.values import bits

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.core

Z = fanin.Zero


def coo(values: Any, dtype: Any, index: Any = None, extent: int = 2) -> fanin.Sparse:
    """All numbers at index 0, unless `index` has their places."""
    rows = np.zeros(len(values), np.int64) if index is None else np.array(index, np.int64)
    return fanin.Sparse("coo", (rows[None], np.array(values).astype(dtype)), (extent,))


def on(w: Any, g: fanin.Sparse) -> fanin.Sparse:
    return fanin.Sparse(g.format, tuple(w.array(p) for p in g.parts), g.shape)


def host(x: Any) -> Any:
    return x.numpy() if hasattr(x, "numpy") else x


def numbers(x: Any) -> Any:
    """The parts of a sparse sum, or the elements of a dense one, on the host."""
    return [host(p) for p in x.parts] if isinstance(x, fanin.Sparse) else host(x)


def dense(x: fanin.Sparse) -> Any:
    """The dense array on the host; numbers of one index are added one after the other, in their own dtype."""
    parts = [host(p) for p in x.parts]
    total = np.zeros(x.shape, parts[-1].dtype)
    with np.errstate(all="ignore"):
        if x.format == "coo":
            np.add.at(total, tuple(parts[0]), parts[1])
            return total
        major = np.repeat(np.arange(len(parts[0]) - 1), np.diff(parts[0]))
        h, w = parts[2].shape[1:] or (1, 1)
        for m, i, block in zip(major, parts[1], parts[2].reshape(-1, h, w), strict=True):
            row, column = (i, m) if x.format in ("csc", "bsc") else (m, i)
            total[row * h : row * h + h, column * w : column * w + w] += block
    return total


# ---------------------------------------------------------------- cast, then coalesced

ROWS = [
    ([1] * 4099, "f2", "f4", 4099),
    ([1] * 70_000, "f2", "f4", 70_000),
    ([60_000] * 2, "f2", "f4", 120_000),
    ([1] * 300, ml_dtypes.bfloat16, "f4", 300),
    ([1] * 300, "i1", "i4", 300),
    ([2**31 - 1] * 2, "i4", "i8", 2**32 - 2),
    ([True] * 300, "?", "i4", 300),
    ([3e38] * 2, "f4", "f8", 2 * float(np.float32(3e38))),
    ([0.1] * 3, "f4", "f8", float(np.float32(0.1)) * 2 + float(np.float32(0.1))),
]


@pytest.mark.rule("A10")
@pytest.mark.parametrize("where", ["cpu", "sim", "fake"])
@pytest.mark.parametrize(
    "values, given, declared, total", ROWS, ids=[f"{len(v)} of {np.dtype(d).name}" for v, d, _, _ in ROWS]
)
def test_repeated_indices_are_added_in_the_declared_dtype(
    a_world: Callable[..., Any], where: str, values: Any, given: Any, declared: str, total: Any
) -> None:
    g = coo(values, given)
    if where != "cpu":
        w = a_world(where)
        g = on(w, g)
    for shape in (None, (1,)):
        slot = fanin.Slot(dtype=declared) if shape is None else fanin.Slot(dtype=declared, shape=shape)
        for others in ([], [coo([0], declared)]):
            if others and where != "cpu":
                others = [on(w, others[0])]
            buf = fanin.InputBuffer([slot])
            for x in (g, *others):
                buf.add(0, x)
            (made,) = buf.take()
            if where != "cpu":
                w.synchronize()
            if isinstance(made, fanin.Sparse):
                assert host(made.parts[1]).sum(dtype=np.float64 if np.dtype(declared).kind == "f" else None) == total
            else:
                assert host(made)[0] == total


def formats(rng: np.random.Generator, dtype: Any) -> list[fanin.Sparse]:
    """Gradients of shape (4, 6) with repeated indices, of each format."""
    made = [fanin.Sparse("coo", (rng.integers(0, (4, 6), (30, 2)).T.copy(), rng.standard_normal(30)), (4, 6))]
    made.append(fanin.Sparse("coo", (rng.integers(0, 4, (1, 20)), rng.standard_normal((20, 6))), (4, 6)))
    for name, lines, others in (("csr", 4, 6), ("csc", 6, 4)):
        counts = rng.integers(0, 9, lines)
        minor = rng.integers(0, others, counts.sum())
        made.append(fanin.Sparse(name, (np.cumsum([0, *counts]), minor, rng.standard_normal(len(minor))), (4, 6)))
    for name, lines, others in (("bsr", 2, 2), ("bsc", 2, 2)):
        counts = rng.integers(0, 5, lines)
        minor = rng.integers(0, others, counts.sum())
        values = rng.standard_normal((len(minor), 2, 3))
        made.append(fanin.Sparse(name, (np.cumsum([0, *counts]), minor, values), (4, 6)))
    return [fanin.Sparse(g.format, (*g.parts[:-1], g.parts[-1].astype(dtype)), g.shape) for g in made]


@pytest.mark.parametrize("where", ["sim", "fake"])
@pytest.mark.parametrize("shape", [None, (6,), (4, 1), ()])
def test_each_format_has_the_cpus_bits_on_a_device(a_world: Callable[..., Any], where: str, shape: Any) -> None:
    rng = np.random.default_rng(7)
    w = a_world(where)
    for given, declared in (("f2", "f4"), ("f4", "f8"), ("f8", "f4"), (ml_dtypes.bfloat16, "f4"), ("f4", "c8")):
        slot = fanin.Slot(dtype=declared) if shape is None else fanin.Slot(dtype=declared, shape=shape)
        for g in formats(rng, given):
            sums = []
            for x in (g, on(w, g)):
                buf = fanin.InputBuffer([slot])
                buf.add(0, x)
                sums.append(buf.take()[0])
            w.synchronize()
            here, there = map(numbers, sums)
            if shape is None:
                assert [bits(x) for x in here] == [bits(x) for x in there], g
            else:
                assert bits(here) == bits(there), g


def test_a_cast_sparse_gradient_that_was_copied_shares_nothing_with_its_source() -> None:
    for option in ("copy", "donate", None):
        g = coo([1, 2], "f4", [0, 1])
        buf = fanin.InputBuffer([fanin.Slot(dtype="f8")])
        buf.add(0, g, **({option: True} if option else {}))
        if option:
            g.parts[0][:] = 1
        (made,) = buf.take(writable=True)
        assert dense(made).tolist() == [1, 2]
        assert not np.shares_memory(made.parts[0], g.parts[0])  # also where writable=True copies


# ---------------------------------------------------------------- widened, then scaled

WIDENED = [
    ([np.array([1, 2, 3], "i4")], "f8", 2.5, [2.5, 5, 7.5]),
    ([np.array([1, 2, 3], "i4")] * 2, "f8", 2.5, [5, 10, 15]),
    ([np.float32([1])], "c8", 0.5 + 1j, [0.5 + 1j]),
    ([np.array([True])], "f8", 3, [3]),
    ([np.float32([1 / 3])], "f8", 0.1, [float(np.float32(1 / 3)) * 0.1]),
    ([np.float32([1 / 3]), np.float32([1])], "f8", 0.1, [float(np.float32(1 / 3) + np.float32(1)) * 0.1]),
    ([np.broadcast_to(np.int32(3), (4,))], "f8", 0.5, [1.5] * 4),
    ([np.broadcast_to(np.int32(3), (4,))] * 2, "f8", 0.5, [3] * 4),
    ([np.array([100], "i1"), np.array([100], "i1")], "f8", 0.5, [-28]),  # wraps where it is summed (D3)
    ([np.float16([1 / 3])] * 2, "f4", 3.0, [float(np.float16(1 / 3)) * 2 * 3]),
    ([np.int32(7)], "f8", 0.5, 3.5),
    ([7], "f8", 0.5, 3.5),
]


def takes(terms: list[Any], shape: Any, dtype: str, scale: Any) -> list[Any]:
    """The scaled sum of terms and a zero that widens them, by each way."""
    zero = Z(shape, dtype)
    made = [fanin.add_n([*terms, zero], scale=scale), fanin.add_n([*terms, zero], scale=scale, stats=True)[0]]
    if len(terms) == 1:
        made.append(fanin.add_n([zero, *terms], scale=scale))
    for budget, how in itertools.product((0, None), ({}, {"writable": True}, {"out": True})):
        buf = fanin.InputBuffer(1, budget=budget)
        for x in (*terms, zero):
            buf.add(0, x)
        options: Any = {"out": [np.empty(shape, dtype)]} if "out" in how else how
        made += [buf.take(scale=scale, **options)[0]]
    return made


@pytest.mark.rule("A2", "A10")
@pytest.mark.parametrize("terms, dtype, scale, want", WIDENED)
def test_a_zero_that_widens_the_sum_comes_before_the_scale(terms: Any, dtype: str, scale: Any, want: Any) -> None:
    for made in takes(terms, np.shape(terms[0]), dtype, scale):
        assert np.asarray(made).dtype == dtype and np.array_equal(made, np.array(want, dtype)), made


@pytest.mark.parametrize("where", ["sim", "fake"])
def test_a_zero_that_widens_the_sum_comes_before_the_scale_on_a_device(a_world: Callable[..., Any], where: str) -> None:
    w = a_world(where)
    for terms, dtype, scale, want in WIDENED[:6]:
        there = [w.array(x) for x in terms]
        for budget in (0, None):
            buf = fanin.InputBuffer(2, budget=budget)
            for slot in (0, 1):
                for x in (*there, Z(terms[0].shape, dtype)):
                    buf.add(slot, x)
            made = buf.take(scale=scale)
            w.synchronize()
            assert all(np.array_equal(host(x), np.array(want, dtype)) for x in made)


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_sparse_terms_are_widened_before_the_scale_and_coalesced_before_they_are_widened(
    a_world: Callable[..., Any], where: str
) -> None:
    third = float(np.float32(0.1) + np.float32(0.2))
    put: Callable[[fanin.Sparse], fanin.Sparse] = lambda g: g  # noqa: E731
    if where == "sim":
        w = a_world(where)
        put = lambda g: on(w, g)  # noqa: E731
    for terms in ([coo([0.1, 0.2], "f4")], [coo([0.1], "f4"), coo([0.2], "f4")]):
        for budget, scale in itertools.product((0, None), (None, 0.1)):
            for later in ([], [coo([1e-3], "f8")]):
                buf = fanin.InputBuffer(1, budget=budget)
                for x in (*map(put, terms), Z((2,), "f8"), *map(put, later)):
                    buf.add(0, x)
                want = (third + (1e-3 if later else 0)) * (scale or 1)
                assert dense(buf.take(scale=scale)[0])[0] == want, (budget, scale, later)


@pytest.mark.parametrize("budget", [0, None])
def test_the_first_bad_key_is_found_in_a_sum_that_is_widened_apart(budget: Any) -> None:
    buf = fanin.InputBuffer(1, budget=budget, stats=True)
    for key, x in enumerate([np.float32([1, 2]), np.float32([np.inf, 2]), Z((2,), "f8")]):
        buf.add(0, x, key=key)
    buf.take(scale=0.1)
    stats = buf.stats(0)
    assert (stats.count, stats.nonfinite, stats.first_bad_key) == (2, 1, 1)
    assert stats.sumsq == 0.4**2


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_an_expanded_sum_that_is_widened_apart_has_each_element_in_its_statistics_once(
    a_world: Callable[..., Any], where: str
) -> None:
    x = np.broadcast_to(np.int8([1, 2]), (3, 2))
    w = a_world(where) if where != "cpu" else None
    for terms in ([x], [x, x]):
        for budget in (0, None):
            buf = fanin.InputBuffer(1, budget=budget, stats=True)
            for g in (*terms, Z((3, 2), "f8")):
                buf.add(0, w.array(g) if w and not isinstance(g, Z) else g)
            buf.take(scale=0.5)
            stats = buf.stats(0)
            assert (stats.count, stats.sumsq) == (6, 15 * len(terms) ** 2 / 4), (budget, stats)


# ---------------------------------------------------------------- scaled in a dtype that has the factor (D10)


@pytest.mark.parametrize("terms", [1, 2, 70])
@pytest.mark.parametrize("budget", [0, None])
def test_a_finite_scale_beyond_float32_is_finite(terms: int, budget: Any) -> None:
    rows: Any = [
        (np.zeros(2, "f4"), 1e39, 0.0),
        (np.float32([1e38 / terms]), 1e-46, 1e-8),
        (np.float32([1e38 / terms]), 1e-44, 1e-6),
        (np.float32([1e-38 / terms]), 1e39, 10.0),
        (np.complex64([1e-38j / terms]), 1e39, 10j),
        (np.float16([6e-5 / terms]), 1e39, np.inf),
    ]
    for x, scale, want in rows:
        buf = fanin.InputBuffer(1, budget=budget)
        for _ in range(terms):
            buf.add(0, x)
        (made,) = buf.take(scale=scale)
        assert made.dtype == x.dtype
        np.testing.assert_allclose(made, np.full(len(x), want, made.dtype), rtol=1e-5)
    big = np.float32([3e38, 3e38, 3e38, 3e38])
    buf = fanin.InputBuffer(1, stats=True)
    buf.add(0, big)
    sums = buf.take()
    fanin.clip_norm(buf, sums, 1e-6)
    assert np.linalg.norm(np.float64(sums[0])) == pytest.approx(1e-6)


# ---------------------------------------------------------------- reduced by the piece; expanded arrays stay so (A13)

CASTS = [("f2", "f4"), ("f4", "f2"), ("f8", "f4"), ("i8", "f4"), ("i1", "i8"), ("f4", "c8"), ("c16", "c8"), ("?", "i4")]


@pytest.mark.rule("A9", "A10")
@pytest.mark.parametrize("where", ["cpu", "sim", "fake"])
@pytest.mark.parametrize("given, declared", CASTS)
def test_each_element_is_rounded_before_it_is_reduced(
    a_world: Callable[..., Any], where: str, given: str, declared: str
) -> None:
    rng = np.random.default_rng(11)
    w = a_world(where) if where != "cpu" else None
    for shape, to in [((300, 5), (5,)), ((5, 9000), (5, 1)), ((40, 3, 50), (3, 1)), ((7,), ())]:
        x = (rng.standard_normal(shape) * 100).astype(given)
        for g in (x, np.broadcast_to(x[:1], x.shape), np.broadcast_to(x.ravel()[0], x.shape)):
            with np.errstate(all="ignore"):
                rounded = np.ascontiguousarray(g).astype(declared)
            sums = []
            for dtype, value in ((declared, g), (None, rounded)):
                slot = fanin.Slot(shape=to) if dtype is None else fanin.Slot(shape=to, dtype=dtype)
                buf = fanin.InputBuffer([slot])
                buf.add(0, w.array(value) if w else value)
                sums.append(host(buf.take()[0]))
            if w:
                w.synchronize()
            assert bits(sums[0]) == bits(sums[1]), (shape, to)


@pytest.mark.rule("A13")
@pytest.mark.parametrize("slot", [{"dtype": "f4"}, {"dtype": "f4", "shape": (1_000_000, 1)}, {"dtype": "c8"}])
def test_a_lone_expanded_gradient_is_cast_and_stays_expanded(slot: Any) -> None:
    x = np.broadcast_to(np.float16(3), (1_000_000, 1))
    for accumulate in ({}, {"accumulate": "exact"}):
        buf = fanin.InputBuffer([fanin.Slot(**slot, **accumulate)])
        tracemalloc.start()
        buf.add(0, x)
        (made,) = buf.take()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert made.dtype == slot["dtype"] and made.strides[0] == 0 and made[5, 0] == 3
        assert peak < 100_000
        assert buf.counters["bytes_written"] < 100
    row = np.broadcast_to(np.arange(3, dtype="f2"), (4, 3))
    buf = fanin.InputBuffer([fanin.Slot(dtype="f4")])
    buf.add(0, row)
    assert np.array_equal(buf.take()[0], row)
    buf.add(0, row)
    (own,) = buf.take(writable=True)
    own += 1  # memory of its own, each element once
    assert np.array_equal(own, row + 1)


IN_LITTLE_MEMORY = """
import resource, numpy as np, fanin
n = 1 << 24
plain = np.zeros((n, 1), np.int8)
plain[:5] = 1
fanin.add_n([np.ones(3)])
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (12 << 20), resource.RLIM_INFINITY))
for x in (plain, np.broadcast_to(np.int8(1), (n, 1))):
    for dtype in ("i8", "f8", "c16"):
        b = fanin.InputBuffer([fanin.Slot(shape=(1,), dtype=dtype)])
        b.add(0, x)
        print(int(b.take()[0].real[0]))
"""


def test_the_memory_of_a_reduction_is_the_result_and_a_bounded_piece() -> None:
    """Neither the gradient in the declared dtype, nor an expanded one written out, fits the limit."""
    out = run_prepared(IN_LITTLE_MEMORY).stdout
    assert out.split() == ["5"] * 3 + [str(1 << 24)] * 3


def test_a_device_gradient_is_reduced_on_the_host_where_the_slot_is_declared_there(
    a_world: Callable[..., Any],
) -> None:
    w = a_world("sim")
    x = np.arange(12, dtype="f4").reshape(3, 4)
    for declared in ({}, {"dtype": "f8"}):
        buf = fanin.InputBuffer([fanin.Slot(shape=(4,), device="cpu", **declared)])
        buf.add(0, w.array(x))
        assert np.array_equal(buf.take()[0], x.sum(0))
