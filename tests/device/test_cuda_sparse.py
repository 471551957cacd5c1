"""COO data into dense arrays on the fake driver: the CPU's bits, however entries lie, and how many bytes that takes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from kit import hooks
from kit.sample import sizes
from kit.values import BFLOAT16, DTYPES, E4M3, LOW, bits

pytestmark = pytest.mark.core
SEED = 15
F4 = np.dtype("f4")
#: Where the rows of entries lie: name -> rows of n entries among `most`.
ORDERS = {
    "any": lambda rng, n, most: rng.integers(0, most, n),
    "sorted": lambda rng, n, most: np.sort(rng.integers(0, most, n)),
    "falling": lambda rng, n, most: np.sort(rng.integers(0, most, n))[::-1],
    "one": lambda rng, n, most: np.full(n, most - 1),
    "two runs": lambda rng, n, most: np.concatenate([np.sort(rng.integers(0, most, k)) for k in (n // 2, n - n // 2)]),
    "last falls": lambda rng, n, most: np.concatenate([np.arange(n - 1) * most // n, [0]]),
}


def numbers(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Of sizes whose sums are rounded; some infinite, some NaN."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
    with np.errstate(all="ignore"):
        made = np.asarray((x * (20 if dtype.kind in "iu" else 1)).astype(dtype))
        if dtype in LOW or dtype.kind == "f":
            made.reshape(-1)[rng.random(made.size) < 0.01] = np.array(rng.choice([np.inf, np.nan, -0.0]), dtype)
    return made


def lying(rng: np.random.Generator, x: Any, put: Any) -> Any:
    """x, put somewhere, perhaps with gaps between its numbers or its rows."""
    how = rng.integers(3) if x.ndim else 0
    if how == 0 or not x.size:
        return put(x)
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]) if how == 1 else (2 * x.shape[0], *x.shape[1:]), x.dtype)
    if how == 1:
        wide[..., ::2] = x
        return put(wide)[..., ::2]
    wide[::2] = x
    return put(wide)[::2]


def total(dense: Any, gradient: fanin.Sparse, stream: Any, accumulate: str | None) -> Any:
    slot = fanin.Slot(shape=dense.shape, dtype=dense.dtype, accumulate=accumulate) if accumulate else 1
    buf = fanin.InputBuffer([slot] if accumulate else 1, stream=stream, budget=0)
    how = {} if stream is None else {"stream": stream}
    buf.add(0, dense, **how)
    buf.add(0, gradient, **how)
    if stream is None:
        return np.asarray(buf.take()[0])
    with fanin.stream(stream):
        return buf.take()[0].numpy()


def cases(
    rng: np.random.Generator,
) -> Iterator[tuple[Any, str, str, int, tuple[int, ...], tuple[int, ...], str | None]]:
    for dtype, (order, index) in itertools.product(DTYPES, zip(ORDERS, itertools.cycle(["int32", "int64"]))):
        n = int(rng.choice([1, 2, 40, 300]))
        sparse = [(7,), (3, 5), (600,)][rng.integers(3)]
        dense = [(), (3,), (16,), (2, 8), (64,)][rng.integers(5)]
        wide = {np.dtype("f4"): "float64"}.get(dtype, "float32" if dtype in LOW else None)
        yield dtype, order, index, n, sparse, dense, wide if rng.integers(2) else None


@pytest.mark.parametrize("step", sizes(5, 1))
def test_coo_entries_are_added_in_their_order_in_every_layout(driver: FakeDriver, step: int) -> None:
    """The sample has each order with two or three dtypes."""
    rng = np.random.default_rng(SEED)
    s = driver.stream()
    done = 0
    for dtype, order, index, n, sparse, dense, wide in itertools.islice(cases(rng), 0, None, step):
        rows = np.stack(np.unravel_index(ORDERS[order](rng, n, int(np.prod(sparse))), sparse)).astype(index)
        if rng.integers(2):
            rows[0, rng.random(n) < 0.1] = rng.choice([-1, sparse[0], np.iinfo(index).max, np.iinfo(index).min])
        values, into = numbers(rng, dtype, (n, *dense)), numbers(rng, dtype, (*sparse, *dense))
        inside = ((rows >= 0) & (rows < np.array(sparse)[:, None])).all(0)
        here = fanin.Sparse("coo", (rows[:, inside], values[inside]), (*sparse, *dense))
        there = fanin.Sparse(
            "coo", (lying(rng, rows, driver.array), lying(rng, values, driver.array)), (*sparse, *dense)
        )
        got = total(lying(rng, into, driver.array), there, s, wide)
        assert bits(got) == bits(total(into, here, None, wide)), (dtype, order, index, n, sparse, dense, wide)
        done += 1
    assert done >= len(DTYPES) * len(ORDERS) // step
    tried = {k for k in ("single", "bfloat16", "e4m3fn", "doubled", "truth", "any") if driver.calls(f"fan_scatter_{k}")}
    assert len(tried) == 6 or step > 1, tried


FEW_ORDERS = [("any", 500), ("falling", 500), ("last falls", 500), ("any", 300_000)]


@pytest.mark.parametrize(
    ("order", "most"),
    [
        *FEW_ORDERS,
        *(
            pytest.param(order, most, marks=pytest.mark.full)
            for order, most in itertools.product(ORDERS, (3, 500, 70_000, 300_000))
            if (order, most) not in FEW_ORDERS
        ),
    ],
)
def test_lists_of_many_tiles_and_rows_of_several_digits_are_sums_in_order(
    driver: FakeDriver, order: str, most: int
) -> None:
    rng = np.random.default_rng(SEED)
    rows = ORDERS[order](rng, 9000, most)
    values, into = numbers(rng, np.dtype("f4"), (9000,)), numbers(rng, np.dtype("f4"), (most,))
    gradient = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (most,))
    got = total(driver.array(into), gradient, driver.stream(), None)
    with np.errstate(invalid="ignore"):
        np.add.at(into, rows, values)
    assert bits(got) == bits(into)


@pytest.mark.parametrize(
    ("most", "dtype"),
    [
        (250, np.dtype("u1")),
        (500, F4),
        (1000, np.dtype("u1")),
        (200_000, np.dtype("u1")),
        (300_000, F4),
        (1000, np.dtype("f2")),
        (1000, np.dtype("f8")),
        *(
            pytest.param(most, np.dtype(dtype), marks=pytest.mark.full)
            for most, dtype in (
                *((250, "f4"), (500, "u1"), (1000, "f4")),
                *((200_000, "f4"), (300_000, "u1"), (2**25 + 3, "u1")),
            )
        ),
    ],
    ids=str,
)
def test_rows_are_kept_in_as_few_bytes_as_hold_them_and_small_values_go_with_them(
    driver: FakeDriver, most: int, dtype: Any
) -> None:
    """Rows of 1, 2, 1 + 1, 2 + 2, 1 + 2 and 4 bytes, whose low digits do not distinguish them."""
    rng = np.random.default_rng(SEED)
    some = rng.integers(0, most, 50)
    some = np.concatenate([some, some ^ 256, some >> 9 << 9, [most - 1, 0]])
    rows = rng.choice(some[some < most], 5000)
    values, into = numbers(rng, dtype, (5000,)), np.zeros(most, dtype)
    here = fanin.Sparse("coo", (rows[None], values), (most,))
    there = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (most,))
    assert bits(total(driver.array(into), there, driver.stream(), None)) == bits(total(into, here, None, None))


@pytest.mark.parametrize("lie", ["apart", "backwards", "one for all"])
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4"])
def test_small_values_move_with_their_rows_in_every_layout(driver: FakeDriver, dtype: str, lie: str) -> None:
    rng = np.random.default_rng(SEED)
    rows, into = rng.integers(0, 700, 5000), numbers(rng, np.dtype(dtype), (700,))
    values = numbers(rng, np.dtype(dtype), (5000,))
    if lie == "apart":
        there_values = driver.array(np.repeat(values, 3))[::3]
    elif lie == "backwards":
        there_values = driver.array(values[::-1].copy())[::-1]
    else:
        there_values = driver.array(values[:1]).broadcast_to(5000)
        values = np.broadcast_to(values[:1], 5000)
    here = fanin.Sparse("coo", (rows[None], values.copy()), (700,))
    there = fanin.Sparse("coo", (driver.array(rows[None]), there_values), (700,))
    assert bits(total(driver.array(into), there, driver.stream(), None)) == bits(total(into, here, None, None))


def traffic(driver: FakeDriver, call: Any) -> tuple[int, int]:
    """Bytes that the kernels of a call read and write."""
    read, written = ctypes.c_uint64(), ctypes.c_uint64()
    assert driver._lib.fanFakeTraffic(1, ctypes.byref(read), ctypes.byref(written)) == 0
    call()
    assert driver._lib.fanFakeTraffic(0, ctypes.byref(read), ctypes.byref(written)) == 0
    return read.value, written.value


KERNELS = {
    F4: "fan_scatter_single", BFLOAT16: "fan_scatter_bfloat16", np.dtype("f2"): "fan_scatter_float16",
    E4M3: "fan_scatter_e4m3fn", np.dtype("u1"): "fan_scatter_bits8", np.dtype("f8"): "fan_scatter_twice",
}  # fmt: skip


def scattered(driver: FakeDriver, rows: Any, values: Any, most: int) -> float:
    """Bytes read and written by a sum in place, as a multiple of what a copy moves that reads all indices, all values
    and what they are added to (in its accumulation dtype), and writes that.
    """
    s = driver.stream()
    buf = fanin.InputBuffer(1, stream=s, budget=0)
    gradient = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (most, *values.shape[1:]))
    for _ in range(2):
        buf.add(0, driver.array(np.zeros((most, *values.shape[1:]), values.dtype)), stream=s)
    s.synchronize()
    kernel = KERNELS[values.dtype]
    before = driver.calls(kernel)
    moved = traffic(driver, lambda: (buf.add(0, gradient, stream=s), s.synchronize()))
    assert driver.calls(kernel) == before + 1
    buf.clear()
    sums = values.size * (4 if values.dtype in LOW else values.itemsize)
    return sum(moved) / (rows.nbytes + values.nbytes + 2 * sums)


def test_the_bytes_of_a_copy_are_those_that_it_moves(driver: FakeDriver) -> None:
    s = driver.stream()
    xs = [driver.array(np.ones(100_003, "f4")) for _ in range(3)]
    with fanin.stream(s):
        moved = traffic(driver, lambda: (fanin.add_n(xs), s.synchronize()))
    assert moved == (12 * 100_003, 4 * 100_003)


#: Entries, rows, numbers of an entry, their dtype, whether they are sorted; the most bytes, beside a copy's. Of entries
#: of one float32 a copy moves 20 bytes. A sort by two digits reads the indices twice (16) and the value (4), writes,
#: reads and writes rows of 3 bytes with their values (7 + 7 + 7), reads the high digit (1), and is read for the sum
#: (7), which reads and adds 4 bytes at, here, 0.63 rows for each entry (5): 54, and 4 for what is counted.
MOVED = [
    (100_000, 100_000, 1, F4, False, 3.0),
    (20_000, 50, 64, F4, False, 0.5),
]
MOVED_TOO = [
    (100_000, 100_000, 2, F4, False, 2.2),
    (100_000, 1_000, 1, F4, False, 2.4),
    (100_000, 100_000, 1, E4M3, False, 2.6),
    (100_000, 100_000, 1, F4, True, 1.4),
    (100_000, 250, 1, F4, False, 1.7),
    (100_000, 200_000, 1, F4, False, 3.35),
    (20_000, 50_000, 64, F4, False, 1.0),
    (20_000, 50_000, 64, F4, True, 1.0),
    (100_000, 100_000, 1, BFLOAT16, False, 2.75),
    (100_000, 1_000, 1, E4M3, False, 1.9),
    (100_000, 100_000, 1, np.dtype("u1"), False, 3.6),
]


@pytest.mark.parametrize(
    ("n", "most", "each", "dtype", "ordered", "bound"),
    [*MOVED, *(pytest.param(*case, marks=pytest.mark.full) for case in MOVED_TOO)],
)
def test_a_scatter_moves_at_most_three_times_what_a_copy_moves(
    driver: FakeDriver, n: int, most: int, each: int, dtype: Any, ordered: bool, bound: float
) -> None:
    """But for rows of more than 17 bits, and of one byte added to one byte."""
    rows = np.random.default_rng(SEED).integers(0, most, n)
    values = np.ones((n, each) if each > 1 else n, dtype)
    assert scattered(driver, np.sort(rows) if ordered else rows, values, most) <= bound


@pytest.mark.slow
def test_a_scatter_of_a_million_rows_moves_at_most_three_times_what_a_copy_moves(driver: FakeDriver) -> None:
    rows = np.random.default_rng(SEED).integers(0, 50_000, 1_000_000)
    assert scattered(driver, rows, np.ones((1_000_000, 64), "f4"), 50_000) <= 1.2


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="FANIN_DEV=1 sets bounds")
def test_a_long_list_is_so_many_lists_and_many_rows_are_taken_in_turns(driver: FakeDriver) -> None:
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, 1000, 7000)
    rows[rng.random(7000) < 0.01] = 1000  # beyond
    values = numbers(rng, np.dtype("f4"), (7000, 3))
    gradient = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (1000, 3))
    into = numbers(rng, np.dtype("f4"), (1000, 3))
    hooks.sort_bounds(2999, 300)
    before = driver.calls("fan_scatter_single")
    got = total(driver.array(into), gradient, driver.stream(), None)
    assert driver.calls("fan_scatter_single") == before + 3 * 4
    with np.errstate(invalid="ignore"):
        np.add.at(into, rows[rows < 1000], values[rows < 1000])
    assert bits(got) == bits(into)


def test_barriers_that_do_not_block_show_in_a_scatter(driver: FakeDriver) -> None:
    """The sort needs each of them: otherwise no test here would find a missing one."""
    rng = np.random.default_rng(SEED)
    rows, values = rng.integers(0, 700, 5000), rng.integers(0, 9, 5000)
    gradient = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (700,))
    driver._lib.fanFakeBarriers(0)
    try:
        got = total(driver.array(np.zeros(700, int)), gradient, driver.stream(), None)
    finally:
        driver._lib.fanFakeBarriers(1)
    assert got.tolist() != np.bincount(rows, values, 700).tolist()


STICKY = 719
SORT = ("fan_sort_count", "fan_sort_scan", "fan_sort_move", "MemsetD8Async")


class Scattering:
    """A sum in place of a list that needs a sort of two tiles and two digits."""

    def __init__(self, driver: FakeDriver) -> None:
        rng = np.random.default_rng(SEED)
        rows = rng.integers(0, 600, 4100)
        values, self.before = numbers(rng, F4, (4100, 2)), rng.standard_normal((600, 2)).astype(F4)
        self.after = self.before.copy()
        with np.errstate(invalid="ignore"):
            np.add.at(self.after, rows, values)
        self.driver, self.stream = driver, driver.stream()
        self.dense = driver.array(self.before)
        self.gradient = fanin.Sparse("coo", (driver.array(rows[None]), driver.array(values)), (600, 2))
        self.live = self.alive()
        self.buf = fanin.InputBuffer(1, stream=self.stream, budget=0)
        self.buf.add(0, self.dense, stream=self.stream)

    def alive(self) -> dict[str, int]:
        """Memory that was allocated and not freed, except that in the pool."""
        self.driver.synchronize()
        fanin.trim()
        self.driver.synchronize()  # memory is freed after the work on it
        return {kind: self.driver.live(kind) for kind in ("memory", "modules", "streams", "objects", "graphs")}

    def add_and_take(self) -> Any:
        self.buf.add(0, self.gradient, stream=self.stream)
        with fanin.stream(self.stream):
            return self.buf.take()[0]

    def judged(self, sums: list[Any]) -> str:
        """The outcome; `sums`: the taken sums, empty if an error reported a failed call."""
        failed = not sums
        try:
            with fanin.stream(self.stream):
                got = (sums.pop() if sums else self.buf.take()[0]).numpy()
        except RuntimeError as e:
            if "was lost" in str(e) or "device is lost" in str(e):
                return "lost"
            assert failed and "poisoned until clear" in str(e), e
            return "poisoned"
        assert bits(got) == bits(self.after) or (failed and bits(got) == bits(self.before))
        return "summed" if bits(got) == bits(self.after) else "as before"


def scattering(call: int, code: int) -> str:
    """What becomes of it where driver call `call` of an add and a take fails."""
    with use_driver(FakeDriver(devices=1)) as driver:
        assert driver
        it = Scattering(driver)
        sums: list[Any] = []
        driver.fail(call, code, sticky=code == STICKY)
        try:
            sums.append(it.add_and_take())
        except fanin.DeviceError as e:
            assert e.code == code and "cuda:0" in str(e)
        finally:
            driver.fail(-1, 0)
        end = it.judged(sums)
        it.buf.clear()
        assert code == STICKY or it.alive() == it.live, (call, code, end)
        assert driver.races == 0, (call, code, driver.race)
    return end


@pytest.mark.parametrize(("code", "ends"), [(2, {"summed"}), (999, {"summed", "poisoned"}), (719, {"lost"})])
@pytest.mark.parametrize("step", sizes(4, 1))
def test_each_driver_call_of_a_sort_of_several_tiles_may_fail(step: int, code: int, ends: set[str]) -> None:
    """Nothing is lost, leaked or doubled: the next try makes the sum, or the slot is poisoned."""
    with use_driver(FakeDriver(devices=1)) as driver:
        assert driver
        whole = Scattering(driver)
        before = {name: driver.calls(name) for name in ("", *SORT)}
        taken = whole.add_and_take()
        calls = {name: driver.calls(name) - n for name, n in before.items()}
        assert whole.judged([taken]) == "summed"
    assert calls.items() >= {"fan_sort_count": 2, "fan_sort_scan": 2, "fan_sort_move": 2, "MemsetD8Async": 1}.items()
    assert {scattering(call, code) for call in range(0, calls[""], 2 * step if code == STICKY else step)} == ends
