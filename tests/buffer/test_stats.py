"""stats=True: the statistics of a sum; norms, and clipping by them."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

import fanin
from kit.sample import every

pytestmark = pytest.mark.core


def stats_of(sum_: Any) -> tuple[int, float, float, int]:
    """A plain model: of the elements as they were rounded."""
    wide = np.asarray(sum_).astype(np.complex128 if np.iscomplexobj(sum_) else np.float64).ravel()
    good = wide[np.isfinite(wide)]
    return wide.size, math.fsum(np.abs(good) ** 2), float(np.abs(good).max(initial=0)), int(wide.size - good.size)


def holds(stats: Any, sum_: Any) -> None:
    count, sumsq, absmax, nonfinite = stats_of(sum_)
    assert (stats.count, stats.nonfinite) == (count, nonfinite)
    assert stats.absmax == pytest.approx(absmax, rel=1e-15)
    assert stats.sumsq == pytest.approx(sumsq, rel=1e-12)


@pytest.mark.parametrize("budget", [0, 100, None])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (40_000,), (0,)])
def test_statistics_are_those_of_the_taken_sum(budget: Any, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    for n in (1, 2, 5):
        buf = fanin.InputBuffer(1, budget=budget, stats=True)
        for k in range(n):
            g = rng.standard_normal(shape) * 7
            buf.add(0, np.array(g + 1j * g if dtype == "complex64" else g).astype(dtype), key=n - 1 - k)
        (sum_,) = buf.take()
        holds(buf.stats(0), sum_)
        assert buf.stats(0).first_bad_key is None


def test_statistics_of_every_other_kind_of_sum() -> None:
    x = np.array([3.0, -4.0])
    row = fanin.Sparse("coo", (np.array([[0, 1, 0]]), np.array([1.0, 2.0, 3.0])), (4,))

    def of(*gradients: Any, **options: Any) -> Any:
        buf = fanin.InputBuffer(1, stats=True)
        for g in gradients:
            buf.add(0, g)
        out = options.get("out")
        sums = buf.take(**options)
        return buf.stats(0), out[0] if out else sums[0]

    assert of(x, x, scale=0.5)[0].sumsq == 25
    assert of(x, scale=2.0)[0].absmax == 8
    stats, out = of(x, x, out=[np.empty(2, np.float32)])
    holds(stats, out)
    assert astuple(of(row, row)[0])[:3] == (2, 64 + 16, 8)  # of a sparse sum: what is stored
    stats, sum_ = of(row, np.ones(4), row)
    holds(stats, sum_)
    assert astuple(of(fanin.Zero((3,), "float32"))[0])[:4] == (3, 0, 0, 0)
    assert of(2.0, 3)[0].sumsq == 25
    assert of(None)[0] is None
    assert of(np.ma.masked_array([1.0, 2.0]), np.ma.masked_array([1.0, 2.0]))[0] is None
    stats, sum_ = of(np.broadcast_to(x, (3, 2)), np.broadcast_to(x, (3, 2)))
    holds(stats, sum_)


@pytest.mark.parametrize("budget", [0, None])
def test_the_first_key_that_spoiled_it_is_named(budget: Any) -> None:
    good, inf, nan = np.ones(50), np.ones(50), np.ones(50)
    inf[7], nan[9] = np.inf, np.nan
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        buf = fanin.InputBuffer(1, budget=budget, stats=True)
        for k in order:
            buf.add(0, [good, good, nan, inf][k], key=k)
        buf.take()
        assert buf.stats(0).first_bad_key == 2 and buf.stats(0).nonfinite == 2
    for lone in ([inf], [inf, good], [good, inf]):
        buf = fanin.InputBuffer(1, budget=budget, stats=True)
        for k, g in enumerate(lone):
            buf.add(0, g, key=k + 5 if budget is None else k)
        buf.take()
        assert buf.stats(0).first_bad_key == next(i for i, g in enumerate(lone) if g is inf) + (
            5 if budget is None else 0
        )
    buf = fanin.InputBuffer(1, budget=budget, stats=True)
    buf.add(0, inf)
    buf.add(0, good)
    buf.take()
    assert astuple(buf.stats(0))[3:5] == (1, None)  # it came without a key
    buf = fanin.InputBuffer(1, budget=budget, stats=True)
    for k in range(3):
        buf.add(0, np.float16([60000, 1]), key=k)
    buf.take()
    assert astuple(buf.stats(0))[3:5] == (1, None)  # no gradient: the sum overflowed


def test_statistics_last_until_the_next_add() -> None:
    buf = fanin.InputBuffer(2, stats=True, name="g")
    with pytest.raises(ValueError, match="g: slot 0: no sum was taken"):
        buf.stats(0)
    buf.add(0, np.ones(3))
    buf.take()
    assert buf.stats(0).count == 3 and buf.stats(1) is None
    buf.take()
    assert buf.stats(0) is None
    buf.add(0, np.ones(3))
    with pytest.raises(ValueError, match="no sum was taken"):
        buf.stats(0)
    assert buf.stats(1) is None
    with pytest.raises(IndexError):
        buf.stats(2)
    with pytest.raises(ValueError, match="stats=True"):
        fanin.InputBuffer(1).stats(0)


def test_a_sum_needs_no_second_pass() -> None:
    counts = []
    for stats in (False, True):
        buf = fanin.InputBuffer(1, stats=stats)
        for _ in range(4):
            buf.add(0, np.ones(1000), copy=True)
        buf.take()
        counts.append((buf.counters.passes, buf.counters.bytes_read))
    assert counts[0] == counts[1]


def test_add_n_gives_a_pair() -> None:
    sum_, stats = fanin.add_n([np.float32([1, 2]), np.float32([2, 2])], stats=True)
    assert sum_.tolist() == [3, 4] and stats.sumsq == 25 and isinstance(stats, fanin.Stats)
    assert fanin.add_n([np.float32([1, 2])], stats=False).tolist() == [1, 2]


def test_norms_and_clipping() -> None:
    buf = fanin.InputBuffer(3, stats=True, name="g")
    x, y = np.array([3.0, 0.0]), np.float32([[4.0]])
    buf.add(0, x)
    buf.add(2, y)
    sums = buf.take(writable=True)
    assert fanin.global_norm(buf) == 5
    assert fanin.clip_norm(buf, sums, 10) == 5 and sums[0].tolist() == [3, 0]
    assert fanin.clip_norm(buf, sums, 2.5) == 5
    assert sums[0].tolist() == [1.5, 0] and sums[2].tolist() == [[2.0]] and sums[1] is None
    assert x.tolist() == [3, 0] and y.tolist() == [[4]]
    buf.add(0, np.array([np.nan, 1]))
    sums = buf.take()
    assert fanin.clip_norm(buf, sums, 0.5) == math.inf and sums[0][1] == 1
    for bad in (-1, math.nan, "1", None):
        with pytest.raises(ValueError, match="max_norm"):
            fanin.clip_norm(buf, sums, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 sums of g"):
        fanin.clip_norm(buf, sums[:1], 1)


def clipped(*gradients: Any) -> tuple[fanin.InputBuffer, list[Any]]:
    buf = fanin.InputBuffer(len(gradients), stats=True, name="g")
    for i, g in enumerate(gradients):
        buf.add(i, g)
    return buf, buf.take()


def test_clipping_writes_nothing_that_was_added() -> None:
    x, y = np.array([3.0, 0.0]), np.float32([4.0])
    for gradients in ([x, y], [x[::-1], y], [x, y, x[:1]], [x, x, y]):
        before = [g.copy() for g in gradients]
        buf, sums = clipped(*gradients)
        assert all(s is g for s, g in zip(sums, gradients, strict=True)), "handed through (A14)"
        norm = fanin.clip_norm(buf, sums, 1.0)
        assert all((g == b).all() for g, b in zip(gradients, before, strict=True))
        for s, g, b in zip(sums, gradients, before, strict=True):
            assert not any(np.shares_memory(s, h) for h in gradients) and s.dtype == g.dtype
            np.testing.assert_allclose(s, b / norm, rtol=1e-6)
    buf, sums = clipped(x, x)
    fanin.clip_norm(buf, sums, 1.0)
    assert sums[0] is sums[1], "one array stays one"


def test_clipping_writes_only_to_out() -> None:
    x, y = np.array([3.0, 0.0]), np.float32([4.0])
    for most, factor in ((1.0, 0.2), (10.0, 1.0)):
        buf, sums = clipped(x, None, y)
        out: list[Any] = [np.full(2, 7.0), None, np.full(1, 7, np.float32)]
        assert fanin.clip_norm(buf, sums, most, out=out) == 5
        assert sums[0] is x and sums[2] is y and x.tolist() == [3, 0] and y.tolist() == [4]
        np.testing.assert_allclose(out[0], x * factor)
        np.testing.assert_allclose(out[2], y * np.float32(factor))
        assert fanin.clip_norm(buf, tuple(sums), most, out=[None, None, None]) == 5  # type: ignore[arg-type]
    buf, sums = clipped(x.copy(), y.copy())
    same = list(sums)
    assert fanin.clip_norm(buf, sums, 1.0, out=sums) == 5 and all(a is b for a, b in zip(sums, same, strict=True))
    np.testing.assert_allclose(sums[0], [0.6, 0])
    buf.add(0, np.array([np.inf]))
    buf.take()
    infinite = np.zeros(1)
    assert (
        fanin.clip_norm(buf, [np.array([np.inf]), None], 1.0, out=[infinite, None]) == math.inf
        and infinite[0] == np.inf
    )


def test_norms_refuse_objects_that_are_no_input_buffer() -> None:
    for bad in (None, [], fanin.Node(lambda g: g).edges):
        with pytest.raises(TypeError, match=r"global_norm: expected a fanin\.InputBuffer, got"):
            fanin.global_norm(bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"clip_norm: expected a fanin\.InputBuffer, got"):
            fanin.clip_norm(bad, [], 1.0)  # type: ignore[arg-type]


def test_clipping_refuses_what_it_cannot_do_and_changes_nothing() -> None:
    x, y = np.array([3.0, 0.0]), np.array([4.0, 0.0])
    buf, sums = clipped(x, y)
    frozen, wide = np.zeros(2), np.zeros(3)
    frozen.flags.writeable = False
    bad: list[tuple[Any, type[Exception], str]] = [
        ([x], ValueError, "2 arrays"),
        (x, ValueError, "2 arrays"),
        ([np.zeros(3), None], ValueError, r"out\[0\]: expected an array of shape \(2,\)"),
        ([None, np.zeros(2, np.float32)], ValueError, r"out\[1\].*float64"),
        ([None, frozen], BufferError, "read-only"),
        ([wide[:2], wide[1:]], ValueError, "share memory"),
        ([wide[:2]] * 2, ValueError, "twice"),
        ([3.0, None], ValueError, r"out\[0\]"),
    ]
    for out, error, words in bad:
        with pytest.raises(error, match=words):
            fanin.clip_norm(buf, sums, 1.0, out=out)
    with pytest.raises(TypeError, match="the list that take"):
        fanin.clip_norm(buf, tuple(sums), 1.0)  # type: ignore[arg-type]
    assert sums[0] is x and x.tolist() == [3, 0] and y.tolist() == [4, 0] and wide.tolist() == [0, 0, 0]
    buf, sums = clipped(np.array([3, 4]), np.array([1.0]))
    with pytest.raises(ValueError, match="arrays of floats"):
        fanin.clip_norm(buf, sums, 1.0)
    assert sums[1].tolist() == [1.0]


def test_numbers_and_zeros_are_clipped_too() -> None:
    buf, sums = clipped(3.0, np.float32(4), fanin.Zero((2,), "float32"))
    assert fanin.clip_norm(buf, sums, 1.0) == 5
    assert sums[:2] == [0.6000000000000001, np.float32(0.8)] and isinstance(sums[2], fanin.Zero)


@pytest.mark.parametrize("dtype", every(3, ["f4", "f8", "f2"]))
def test_large_results_are_counted_alike_wherever_they_lie(dtype: str) -> None:
    """Written around the caches, line by line: what lies before the first whole line is counted, too, and in the same
    order.
    """
    n = (33 << 20) // np.dtype(dtype).itemsize  # more than half of the largest cache that the core reckons with
    rng = np.random.default_rng(7)
    x, y = (np.resize(rng.standard_normal(1 << 16), n).astype(dtype) for _ in range(2))
    nonfinite_x = x.copy()
    nonfinite_x[[2, 5, 70, n // 2, n - 1]] = [np.nan, np.inf, -np.inf, np.nan, np.inf]
    store = np.empty(n * x.itemsize + 192, np.uint8)
    start = -store.ctypes.data % 64
    for a, bad, places in ((x, 0, (x.itemsize,)), (nonfinite_x, 5, (0, 48, 3 * x.itemsize))):
        want, found = a + y if dtype != "f2" else (a.astype("f4") + y).astype("f2"), set()
        finite = want[np.isfinite(want)].astype("f8")
        absmax, sumsq = np.abs(finite).max(), np.square(finite).sum()
        for at in places:
            out = store[start + at : start + at + n * x.itemsize].view(dtype)
            total, stats = fanin.add_n([a, y], out=out, stats=True)
            assert total is out
            assert np.array_equal(out, want, equal_nan=True)
            assert stats.nonfinite == bad
            assert stats.absmax == absmax
            assert stats.sumsq == pytest.approx(sumsq, rel=1e-12)
            found.add(stats.sumsq)
        assert len(found) == 1, "the order does not depend on the place"


def test_a_sum_that_its_first_key_spoiled_names_the_key_0() -> None:
    buf = fanin.InputBuffer(1, stats=True)
    buf.add(0, np.array([1.0, np.inf]), key=0)
    buf.add(0, np.ones(2), key=1)
    buf.take()
    assert (buf.stats(0).nonfinite, buf.stats(0).first_bad_key) == (1, 0)


@pytest.mark.parametrize("accumulate", [None, "exact"])
def test_of_zeros_and_of_sums_in_an_out_the_count_is_the_slots_size(accumulate: Any) -> None:
    for gradients, want in (
        ([fanin.Zero((3,), "float64")], (3, 0.0, 0.0, 0, None)),
        ([np.full(3, 2.0)], (3, 12.0, 2.0, 0, None)),
        ([np.full(3, 2.0), np.full(3, 3.0)], (3, 75.0, 5.0, 0, None)),
    ):
        for budget in (0, math.inf):
            slot = fanin.Slot((3,), "float64")
            buf = fanin.InputBuffer([slot], stats=True, accumulate=accumulate, budget=budget)
            for g in gradients:
                buf.add(0, g)
            buf.take(out=[np.full(3, 7.0)])
            stats = buf.stats(0)
            assert stats is not None and astuple(stats)[:5] == want, (gradients, budget)
    buf.add(0, None)
    assert buf.take() == [None] and buf.stats(0) is None


def test_of_a_targets_sum_in_an_out_the_statistics_are_those_of_the_sum() -> None:
    buf = fanin.InputBuffer([fanin.Slot((3,), "float64")], stats=True)
    with buf.target(0) as out:
        out += 2
    buf.take(out=[np.zeros(3)])
    assert buf.stats(0) == fanin.Stats(3, 12.0, 2.0, 0, None)


@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [None, "exact"])
@pytest.mark.parametrize("budget", [0, math.inf])
def test_of_a_sum_that_is_copied_into_an_out_which_another_slot_still_reads(
    many: int, accumulate: Any, budget: float
) -> None:
    buf = fanin.InputBuffer([fanin.Slot((3,), "float64")] * 3, stats=True, accumulate=accumulate, budget=budget)
    read = np.full(3, 5.0)
    for k in range(many):
        buf.add(0, np.full(3, k + 1.0))
    buf.add(1, fanin.Zero((3,), "float64"))
    buf.add(2, read)
    buf.add(2, np.ones(3))
    total, first = many * (many + 1) / 2, np.zeros(3)
    sums = buf.take(out=[read, first, None])
    assert [list(x) for x in sums] == [[total] * 3, [0.0] * 3, [6.0] * 3]
    known = [buf.stats(slot) for slot in range(3)]
    assert [s and (s.count, s.sumsq, s.absmax) for s in known] == [(3, 3 * x * x, x) for x in (total, 0.0, 6.0)]


def given_twice(numbers: list[float], dtype: str, format: str) -> fanin.Sparse:
    """A sparse gradient with all numbers at one place of three, and a 7 at another."""
    values = np.array([*numbers, 7], dtype)
    at = np.array([*(0 for _ in numbers), 2])
    if format == "coo":
        return fanin.Sparse("coo", (at[None], values), (3,))
    return fanin.Sparse("csr", (np.array([0, len(at)]), at, values), (1, 3))


@pytest.mark.rule("A11", "A14")
@pytest.mark.parametrize("format", ["coo", "csr"])
@pytest.mark.parametrize(
    ("numbers", "dtype", "number"),
    [
        ([1, 2.0**60, -(2.0**60)], "float64", 1.0),
        ([2.0**60, 1, 1, -(2.0**60)], "float64", 2.0),
        ([1, 2.0**30, -(2.0**30)], "float32", 1.0),
        ([1, 2.0**60, -(2.0**60)], "complex128", 1.0),
        ([1.5e308, 1.5e308, -1.5e308], "float64", 1.5e308),
    ],
)
def test_of_one_sparse_gradient_in_an_exact_slot_they_are_those_of_the_exact_sum(
    format: str, numbers: list[float], dtype: str, number: float
) -> None:
    """A take hands it through with its entries as they are; its left fold would round, or overflow."""
    absmax = float(np.abs(np.dtype(dtype).type(number)))
    for take in ({}, {"writable": True}, {"scale": 1}):
        for budget in (0, None):
            buf = fanin.InputBuffer([fanin.Slot(accumulate="exact")], budget=budget, stats=True)
            buf.add(0, None, key=0)
            buf.add(0, given_twice(numbers, dtype, format), key=1)
            buf.take(**take)
            stats = buf.stats(0)
            assert (stats.count, stats.absmax) == (2, max(absmax, 7)), (take, budget)
            assert (stats.nonfinite, stats.first_bad_key) == (0, None)
            assert stats.norm == pytest.approx(math.hypot(absmax, 7), rel=1e-15)


@pytest.mark.rule("A11")
def test_one_sparse_gradient_whose_exact_sum_overflows_is_named() -> None:
    """Half of the last place of the largest number, in two parts: each is lost in a left fold."""
    largest = float(np.finfo("float32").max)
    buf = fanin.InputBuffer([fanin.Slot(accumulate="exact"), fanin.Slot()], stats=True)
    for slot in (0, 1):
        buf.add(slot, given_twice([largest, 2.0**102, 2.0**102], "float32", "coo"), key=5)
    buf.take()
    assert (buf.stats(0).nonfinite, buf.stats(0).first_bad_key) == (1, 5)
    assert (buf.stats(1).nonfinite, buf.stats(1).first_bad_key) == (0, None)


@pytest.mark.rule("A11")
def test_an_exact_sum_without_a_place_for_each_element_has_no_statistics() -> None:
    """Of one gradient with repeated indices as of two: places are numbers below 2**63."""
    at = np.array([[0, 0, 5], [1, 1, 2]])
    g = fanin.Sparse("coo", (at, np.ones(3)), (2**40, 2**40))
    buf = fanin.InputBuffer([fanin.Slot(accumulate="exact")], stats=True)
    for _ in range(2):
        buf.add(0, g)
        with pytest.raises(ValueError, match="2\\*\\*63 elements or more"):
            buf.take()
    plain = fanin.InputBuffer([fanin.Slot(accumulate="exact")])
    plain.add(0, g)
    assert plain.take()[0] is g
