"""What the kernels compute, on the fake driver: the CPU's values, bit by bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from kit.prepared import run_prepared
from kit.support import conformance_words
from kit.values import LOW, PLAIN, bits
from reference.numbers import rounded, sum_to

pytestmark = pytest.mark.core
SEED = 11


def some(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Any bits at all, most of them of moderate size."""
    wide = np.zeros(shape, "c16" if dtype.kind == "c" else "f8")
    wide[...] = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)
    if dtype.kind == "c":
        wide.imag[...] = rng.standard_normal(shape)
    with np.errstate(all="ignore"):
        made = (wide * (16 if dtype.kind in "iu" else 1)).astype(dtype)
        if dtype.kind in "fV" or dtype in LOW:
            flat = made.reshape(-1)
            flat[rng.random(flat.size) < 0.05] = np.array(rng.choice([np.inf, -np.inf, np.nan, -0.0]), dtype)
    return made


def several(rng: np.random.Generator, dtype: np.dtype[Any], n: int, shape: tuple[int, ...]) -> list[Any]:
    """n of them, drawn in two halves."""
    halves = [some(rng, dtype, (half, *shape)) for half in (n // 2, n - n // 2)]
    return [x.copy() for half in halves for x in half]


def layouts(rng: np.random.Generator, x: Any) -> Any:
    """x, perhaps lying otherwise."""
    how = rng.integers(4)
    if how == 1:
        return np.asfortranarray(x)
    if how == 2:
        big = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        big[..., ::2] = x
        return big[..., ::2]
    if how == 3:
        return x[::-1].copy()[::-1]
    return x


def on_device(driver: FakeDriver, x: Any) -> Any:
    """x on the device with x's own layout: gaps and negative steps too."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    whole = driver.array(base)
    if base is x:
        return whole
    if x.shape == base.shape:
        return whole[::-1] if x.strides[0] < 0 else whole
    return whole[..., ::2]


def pairs() -> list[tuple[np.dtype[Any], np.dtype[Any]]]:
    every = PLAIN + LOW
    return [(a, b) for a, b in itertools.product(every, every) if _core_promotes(a, b)]


def _core_promotes(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    try:
        fanin.add_n([np.zeros(1, a), np.zeros(1, b)])
    except ValueError:
        return False
    return True


def test_every_pair_of_dtypes_gives_the_cpus_bits(driver: FakeDriver) -> None:
    rng = np.random.default_rng(5)
    s = driver.stream()
    done = 0
    for a, b in pairs():
        xs = [some(rng, d, (5, 7)) for d in (a, b, a)]
        with np.errstate(all="ignore"):
            want = fanin.add_n(xs)
        buf = fanin.InputBuffer(1, stream=s)
        for x in xs:
            buf.add(0, driver.array(x), stream=s)
        with fanin.stream(s):
            got = buf.take()[0].numpy()
        assert got.dtype == want.dtype and bits(got) == bits(want), (a, b)
        done += 1
    assert done > 200, done


@pytest.mark.parametrize("dtype", PLAIN + LOW, ids=str)
def test_sums_of_any_layout_number_and_size_give_the_cpus_bits(driver: FakeDriver, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(dtype.num)
    s = driver.stream()
    folds = 0
    for n, shape in (
        (1, (3,)),
        (2, (1000,)),
        (3, (17, 33)),
        (5, (2, 3, 4)),
        (40, (6, 5)),
        (170, (3, 2)),
        (500, (3,)),
        (7, (1, 1)),
        (3, (0, 4)),
    ):
        xs = several(rng, dtype, n, shape)
        if len(shape) > 1 and 0 not in shape:
            xs = [layouts(rng, x) for x in xs]
        scale = float(rng.choice([2.0, 0.37])) if dtype.kind in "fc" or dtype in LOW else 3
        for how in ({}, {"scale": scale})[n >= 170 :]:  # as many in one launch as in several
            with np.errstate(all="ignore"):
                want = fanin.InputBuffer(1)
                for x in xs:
                    want.add(0, x)
                [expected] = want.take(**how)
            buf = fanin.InputBuffer(1, stream=s)
            for x in xs:
                buf.add(0, on_device(driver, x), stream=s)
            with fanin.stream(s):
                got = buf.take(**how)[0].numpy()
            assert got.dtype == expected.dtype and bits(got) == bits(expected), (n, shape, how)
            folds += 1
    assert folds == 16


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_low_number_becomes_the_cpus_float32_and_comes_back(driver: FakeDriver, dtype: np.dtype[Any]) -> None:
    """All of them, at each place of 16 bytes, aligned and not."""
    n = 2 ** (8 * dtype.itemsize)
    every = np.arange(n + 16, dtype=np.int64).astype(f"u{dtype.itemsize}").view(dtype)
    zero, s = np.full(n, -0.0, "f4"), driver.stream()
    for shift in range(0, 16, 3):
        x = driver.array(every)[shift : shift + n]
        buf = fanin.InputBuffer([fanin.Slot(dtype="float32")], stream=s, budget=0)
        for y in (driver.array(zero), x):
            buf.add(0, y, stream=s)
        with fanin.stream(s), np.errstate(all="ignore"):
            assert bits(buf.take()[0].numpy()) == bits(every[shift : shift + n].astype("f4")), shift
    high = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF):
        wide = (high | np.uint32(low)).view("f4")
        with np.errstate(all="ignore"):
            want = wide.astype(dtype)
        with fanin.stream(s):
            got = fanin.add_n([driver.array(wide)], out=driver.array(np.zeros(wide.size, dtype))).numpy()
        assert bits(got) == bits(want), low


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "off 16 bytes"])
def test_a_fold_into_a_running_sum_of_the_accumulation_dtype_is_a_kernel_of_its_own(
    driver: FakeDriver, shift: int
) -> None:
    rng = np.random.default_rng(SEED)
    s = driver.stream()
    for dtype in LOW:
        kernel = dtype.name.removeprefix("float8_")
        for size in (5, 4096 + 7, 3 * 8192):
            xs = [some(rng, dtype, (size,)) for _ in range(7)]
            before = driver.calls(f"fan_fold_{kernel}"), driver.calls("fan_any")
            results = []
            for where in (None, s):
                buf = fanin.InputBuffer(1, stream=where, budget=0)
                for x in xs:
                    y = x if where is None else driver.array(np.concatenate([x[:shift], x]))[shift:]
                    buf.add(0, y, **({} if where is None else {"stream": s}))
                with fanin.stream(s), np.errstate(all="ignore"):
                    got = buf.take()[0]
                    results.append(got if where is None else got.numpy())
            assert bits(results[0]) == bits(results[1]), (dtype, size)
            assert driver.calls(f"fan_fold_{kernel}") - before[0] == 7, "six folds, and the sum rounded at the end"
            assert driver.calls("fan_any") == before[1]


@pytest.mark.parametrize("accumulate", ["slot", "exact", "float64"])
def test_other_accumulation_dtypes_give_the_cpus_bits(driver: FakeDriver, accumulate: str) -> None:
    rng = np.random.default_rng(8)
    s = driver.stream()
    for dtype in [*LOW, np.dtype("f4")]:
        wish = dtype.name if accumulate == "slot" else accumulate
        xs = [some(rng, dtype, (9, 4)) for _ in range(6)]
        try:
            buffers = [
                fanin.InputBuffer([fanin.Slot(dtype=dtype)], accumulate=wish, stream=where) for where in (None, s)
            ]
            for x in xs:
                buffers[0].add(0, x)
        except (ValueError, TypeError):
            continue
        for x in xs:
            buffers[1].add(0, driver.array(x), stream=s)
        with fanin.stream(s):
            assert bits(buffers[1].take()[0].numpy()) == bits(buffers[0].take()[0]), dtype


def test_gradients_are_reduced_to_a_declared_shape_as_on_the_cpu(driver: FakeDriver) -> None:
    rng = np.random.default_rng(9)
    s = driver.stream()
    for dtype in (*PLAIN, *LOW):
        if dtype.kind == "b":
            continue
        for shape, declared in (((4, 3, 5), (3, 1)), ((70, 3), (3,)), ((2, 3), ()), ((0, 3), (3,))):
            xs = [some(rng, dtype, shape) for _ in range(2)]
            results = []
            for where in (None, s):
                buf = fanin.InputBuffer([fanin.Slot(shape=declared)], stream=where)
                for x in xs:
                    buf.add(0, x if where is None else driver.array(x), **({} if where is None else {"stream": s}))
                with fanin.stream(s):
                    got = buf.take()[0]
                    results.append(np.asarray(got if where is None else got.numpy()))
            assert bits(results[0]) == bits(results[1]), (dtype, shape)


#: shape, declared, launches that sum what the first one left
DEALT = (
    ((256,), (), 0),
    ((257,), (), 1),
    ((8193,), (), 2),
    ((300, 3), (3,), 1),
    ((2, 9000), (2, 1), 2),
    ((3, 130, 3, 140), (130, 1, 1), 1),
    ((300, 2, 3, 2, 3, 2, 3), (1, 2, 1, 2, 1, 2, 1), 1),
)


def summed_to(x: Any, declared: tuple[int, ...], stream: Any = None) -> Any:
    buf = fanin.InputBuffer([fanin.Slot(shape=declared)], stream=stream)
    if stream is None:
        buf.add(0, x)
        return np.asarray(buf.take()[0])
    buf.add(0, x, stream=stream)
    with fanin.stream(stream):
        return buf.take()[0].numpy()


def test_many_terms_of_one_element_are_dealt_out_in_one_order_on_every_device(driver: FakeDriver) -> None:
    """D7: the shape decides the order, and many threads share the work: no launch has one that adds all of them."""
    rng = np.random.default_rng(SEED)
    s = driver.stream()
    apart = 0
    for dtype in map(np.dtype, ("f8", "c16", "f4", "i1", "?")):
        for shape, declared, later in DEALT:
            x = np.asarray(rng.standard_normal(shape) * 99).astype(dtype)
            expected = rounded(sum_to(x, declared), dtype)
            axes = tuple(i for i in range(x.ndim) if not declared or (1, *declared)[i - x.ndim] == 1)
            apart += dtype.kind in "fc" and bits(expected) != bits(x.sum(axes or None).astype(dtype))
            assert bits(summed_to(layouts(rng, x), declared)) == bits(expected), (dtype, shape)
            given, before = driver.array(x), [driver.calls(f"fan_reduce_{k}") for k in ("single", "twice")]
            assert bits(summed_to(given, declared, s)) == bits(expected), (dtype, shape)
            if dtype == np.dtype("f4"):
                after = [driver.calls(f"fan_reduce_{k}") for k in ("single", "twice")]
                assert [b - a for a, b in zip(before, after, strict=True)] == [1, later], shape
    assert apart > 5  # NumPy's order gives other bits


def test_where_the_result_has_many_elements_a_thread_makes_all_lanes_of_one(driver: FakeDriver) -> None:
    x = np.random.default_rng(SEED).integers(-9, 9, (257, 66000), "i1")
    given, before = driver.array(x), driver.calls("fan_reduce_bits8")
    assert bits(summed_to(given, (66000,), driver.stream())) == bits(x.sum(0, "i1"))
    assert driver.calls("fan_reduce_bits8") == before + 1


def test_the_sums_of_more_groups_than_a_run_are_summed_by_runs_again(driver: FakeDriver) -> None:
    x = np.random.default_rng(SEED).standard_normal(8192 * 257)
    assert bits(summed_to(driver.array(x), (), driver.stream())) == bits(summed_to(x, ()))


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_sparse_gradients_are_scattered_as_on_the_cpu(driver: FakeDriver, index: str) -> None:
    rng = np.random.default_rng(10)
    s = driver.stream()
    tried = 0
    for dtype in (np.dtype("f4"), np.dtype("f8"), np.dtype("c8"), np.dtype("i4"), np.dtype("f2")):
        rows = rng.integers(0, 6, 40)
        parts: dict[str, tuple[Any, ...]] = {"coo": (rows[None].astype(index), some(rng, dtype, (40, 3)))}
        columns = np.concatenate([np.sort(rng.integers(0, 3, 2)) for _ in range(6)])
        parts["csr"] = (np.arange(0, 13, 2).astype(index), columns.astype(index), some(rng, dtype, (12,)))
        parts["csc"] = (
            np.array([0, 4, 6, 12]).astype(index),
            rng.integers(0, 6, 12).astype(index),
            some(rng, dtype, (12,)),
        )
        parts["bsr"] = (
            np.array([0, 1, 2, 2]).astype(index),
            np.array([0, 0]).astype(index),
            some(rng, dtype, (2, 2, 3)),
        )
        for form, arrays in parts.items():
            dense = some(rng, dtype, (6, 3))
            results = []
            for where in (None, s):
                put = (lambda x: x) if where is None else driver.array
                buf = fanin.InputBuffer(1, stream=where)
                how = {} if where is None else {"stream": s}
                buf.add(0, put(dense), **how)
                buf.add(0, fanin.Sparse(form, tuple(put(a) for a in arrays), (6, 3)), **how)
                with fanin.stream(s):
                    got = buf.take()[0]
                    results.append(np.asarray(got if where is None else got.numpy()))
            assert bits(results[0]) == bits(results[1]), (dtype, form)
            tried += 1
    assert tried == 20


@pytest.mark.parametrize("form", ["coo", "csr", "csc", "bsr"])
def test_an_index_outside_the_shape_is_skipped_before_it_is_used(driver: FakeDriver, form: str) -> None:
    """However large: its product with a stride fits no int64, which the undefined-behaviour sanitizer finds."""
    s = driver.stream()
    most = 1 << 62
    values = np.array([1.0, 10.0, 100.0, 1000.0, 10000.0], "f4")
    column = np.array([0, 3, -1, most + 1, -most])
    if form == "coo":
        parts = (np.stack([np.zeros(5, int), column]), values)
    else:
        parts = (np.array([0, 5, 5, 5]), column, values.reshape(5, 1, 1) if form == "bsr" else values)
    gradient = fanin.Sparse(form, tuple(map(driver.array, parts)), (3, 3))
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, driver.array(np.zeros((3, 3), "f4")), stream=s)
    buf.add(0, gradient, stream=s)
    with fanin.stream(s):
        got = buf.take()[0].numpy()
    assert got.ravel().tolist() == [1.0] + [0.0] * 8


def test_the_conformance_suite_holds_on_a_device() -> None:
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = run_prepared(code, *conformance_words("kit.cuda_buffer:CudaBuffer"))
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 40
