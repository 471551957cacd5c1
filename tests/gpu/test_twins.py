"""What runs on one device runs on another to the bit: logs of operations recorded on the simulated device, and, where
there is a GPU, the tests of the fake driver's values and the conformance suite once more on it, and all of it under
CUDA's own checkers.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from buffer.sim import test_stats_devices
from device import test_cuda_sparse, test_cuda_values
from fanin.sim import Machine
from kit.sample import every, sizes
from kit.support import ROOT, TESTS, conformance

GPU = pytest.mark.gpu
DTYPES = (np.dtype("f2"), np.dtype(ml_dtypes.bfloat16), np.dtype("f4"), np.dtype("f8"), np.dtype("c8"), np.dtype("i4"))


# Logs of operations


@dataclass(frozen=True)
class Log:
    """One run of a buffer: how it is made, and ("add", slot, key, stream, dtype, seed), ("wait", waiting, for),
    ("take",), ("clear",).
    """

    slots: int
    streams: int
    how: dict[str, Any]
    operations: list[tuple[Any, ...]] = field(default_factory=list)


def recorded(seed: int) -> tuple[Log, list[bytes]]:
    """A log, made while it runs on the simulated device, and the bits of what was taken there."""
    rng = np.random.default_rng(seed)
    log = Log(
        slots=int(rng.integers(1, 4)),
        streams=int(rng.integers(1, 5)),
        how={"budget": [0, 64, None, float("inf")][rng.integers(4)], "accumulate": [None, "float64"][rng.integers(2)]},
    )
    dtypes = (
        [DTYPES[i] for i in rng.integers(0, 4, log.slots)]
        if log.how["accumulate"]
        else [DTYPES[i] for i in rng.integers(0, len(DTYPES), log.slots)]
    )
    key = 0
    for _ in range(int(rng.integers(10, 40))):
        what = rng.random()
        if what < 0.75:
            slot = int(rng.integers(log.slots))
            log.operations.append(
                ("add", slot, key, int(rng.integers(log.streams)), dtypes[slot].name, int(rng.integers(1 << 30)))
            )
            key += 1
        elif what < 0.9:
            log.operations.append(("wait", int(rng.integers(log.streams)), int(rng.integers(log.streams))))
        else:
            log.operations.append(("take",) if what < 0.97 else ("clear",))
    log.operations.append(("take",))
    with Machine(1, seed=seed) as m:
        bits = played(log, m)
        m.synchronize()
        assert m.races == 0
    return log, bits


def played(log: Log, m: Any) -> list[bytes]:
    """What a device makes of a log: dtype and bits of each slot that was taken."""
    c, streams = m.stream(), [m.stream() for _ in range(log.streams)]
    buf = fanin.InputBuffer(log.slots, stream=c, **log.how)
    seen = []
    for operation in log.operations:
        match operation:
            case ("add", slot, key, stream, dtype, seed):
                rng = np.random.default_rng(seed)
                x = (rng.standard_normal((7, 33)) * 2.0 ** rng.integers(-8, 8, (7, 33))).astype(np.dtype(dtype))
                buf.add(slot, m.array(x), key=key, stream=streams[stream])
            case ("wait", waiting, other):
                streams[waiting].wait(streams[other].record())
            case ("clear",):
                buf.clear()
            case ("take",):
                for x in buf.take():
                    with fanin.stream(c):
                        seen.append(b"" if x is None else x.dtype.name.encode() + x.numpy().tobytes())
    return seen


@pytest.fixture(params=["fake", pytest.param("gpu", marks=GPU)])
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    return a_world(request.param, 1, seed=1)


@pytest.mark.core
@pytest.mark.parametrize("count", sizes(20, 60))
def test_a_log_of_the_simulated_device_gives_the_same_bits(m: Any, count: int) -> None:
    taken = 0
    for seed in range(count):
        log, bits = recorded(seed)
        assert played(log, m) == bits, (seed, log)
        taken += sum(map(bool, bits))
    assert taken > 3 * count // 2, taken


def test_a_log_with_one_key_changed_gives_other_bits() -> None:
    """The control: the order of floats is in the bits."""
    other = 0
    for seed in range(20):
        log, bits = recorded(seed)
        keys = [-1 - o[2] if o[0] == "add" else 0 for o in log.operations]
        turned = [
            (*o[:2], k + 10_000, *o[3:]) if o[0] == "add" else o for o, k in zip(log.operations, keys, strict=True)
        ]
        with Machine(1, seed=seed) as m:
            other += played(Log(log.slots, log.streams, log.how, turned), m) != bits
    assert 0 < other <= 20, other


# Sums that leave the first grid


def pattern(dtype: np.dtype[Any], n: int, k: int) -> Any:
    """Small numbers, another one at each place for long, which every dtype holds exactly, and so their sums."""
    return ((np.arange(n) * (2 * k + 3) + k) % 5 % (2 if dtype.kind == "b" else 5)).astype(dtype)


EVERY = [np.dtype(c) for c in ("?", "u1", "i2", "i4", "i8", "f4", "f8", "c8", "c16", "f2")] + [
    np.dtype(c) for c in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]


@pytest.mark.parametrize("dtype", every(3, EVERY), ids=str)
def test_a_sum_of_more_than_one_grid_gives_the_cpus_bits(m: Any, dtype: np.dtype[Any]) -> None:
    """16 blocks of 256 threads of 16 bytes for each of at most 256 processors: 32 MiB on a GPU, 64 KiB on the fake
    driver's one. Aligned and off 16 bytes, with a tail, with and without statistics.
    """
    n = ((40 << 20) if m.real else (100 << 10)) // dtype.itemsize + 7
    for off, stats in ((0, False), (1, False), (0, True)):
        xs = [pattern(dtype, n, k) for k in range(3)]
        near, far = fanin.InputBuffer(1, stats=stats), fanin.InputBuffer(1, stats=stats)
        for x in xs:
            near.add(0, x[off:])
            far.add(0, m.array(x)[off:])
        [want], [got] = near.take(), far.take()
        assert np.array_equal(got.numpy().view("u1"), want.view("u1")), (off, stats)
        if stats:
            a, b = near.stats(0), far.stats(0)
            assert a is not None and b is not None
            assert (a.count, a.absmax, a.nonfinite) == (b.count, b.absmax, b.nonfinite)
            assert a.sumsq == pytest.approx(b.sumsq, rel=1e-12)


@pytest.mark.parametrize("dtype", every(3, EVERY[::-1]), ids=str)
def test_more_tiles_than_warps_give_the_cpus_bits(m: Any, dtype: np.dtype[Any]) -> None:
    """Many slots in one launch: its warps take tile after tile, of sums of several tiles and of less than one."""
    slots = 2000 if m.real else 60
    sizes = [(1, 100, 1024, 40_000)[i % 4] // dtype.itemsize + 1 for i in range(slots)]
    s = m.stream()
    near, far = fanin.InputBuffer(slots, budget=0), fanin.InputBuffer(slots, stream=s, budget=0)
    for k in range(2):
        xs = [pattern(dtype, size, k + i) for i, size in enumerate(sizes)]
        near.add_many(range(slots), xs)
        far.add_many(range(slots), [m.array(x) for x in xs], stream=s)
    with fanin.stream(s):
        for want, got in zip(near.take(), far.take(), strict=True):
            assert np.array_equal(got.numpy().view("u1"), want.view("u1"))


@GPU
def test_a_sum_of_more_than_two_to_the_31_numbers_reaches_its_end(driver: Any) -> None:
    n = (1 << 31) + 70_001
    try:
        xs = [driver.empty(n, "u1") for _ in range(2)]
        out = driver.empty(n, "u1")
    except fanin.DeviceOutOfMemoryError as e:
        pytest.skip(f"no room for three arrays of 2 GiB: {e}")
    s = driver.stream()
    for x in (*xs, out):
        x.record_stream(s)
    for k, x in enumerate(xs):
        size, at = ctypes.c_size_t(n), ctypes.c_uint64(x.address)
        with driver.context():
            driver.call("cuMemsetD8Async", at, ctypes.c_ubyte(k + 1), size, ctypes.c_void_p(s.handle))
    s.synchronize()
    fanin.add_n(xs, out=out)
    for at in (0, (1 << 31) - 3, 1 << 31, n - 5):
        assert out[at : at + 5].numpy().tolist() == [3] * 5, at


# The fake driver's tests of values and of statistics, on a GPU


@pytest.fixture
def w(a_world: Callable[..., Any]) -> Any:
    return a_world("gpu", 1)


@pytest.fixture
def driver(a_world: Callable[..., Any]) -> Any:
    return a_world("gpu").driver


for _from, _name in (
    (test_cuda_values, "test_every_pair_of_dtypes_gives_the_cpus_bits"),
    (test_cuda_values, "test_sums_of_any_layout_number_and_size_give_the_cpus_bits"),
    (test_cuda_values, "test_every_low_number_becomes_the_cpus_float32_and_comes_back"),
    (test_cuda_values, "test_other_accumulation_dtypes_give_the_cpus_bits"),
    (test_cuda_values, "test_gradients_are_reduced_to_a_declared_shape_as_on_the_cpu"),
    (test_cuda_values, "test_the_sums_of_more_groups_than_a_run_are_summed_by_runs_again"),
    (test_cuda_values, "test_sparse_gradients_are_scattered_as_on_the_cpu"),
    (test_cuda_sparse, "test_lists_of_many_tiles_and_rows_of_several_digits_are_sums_in_order"),
    # these and the sort of COO data have barriers: without them racecheck and synccheck would check nothing
    (test_stats_devices, "test_figures_are_those_of_the_cpu"),
    (test_stats_devices, "test_figures_of_mixed_dtypes_and_wider_accumulation_are_those_of_the_cpu"),
    (test_stats_devices, "test_figures_of_several_launches_name_the_first_key_of_all"),
    (test_stats_devices, "test_figures_of_every_kind_of_sum_are_those_of_the_cpu"),
    (test_stats_devices, "test_figures_of_reduced_broadcast_and_copied_sums_are_those_of_the_cpu"),
    (test_stats_devices, "test_out_may_be_one_of_the_gradients"),
):
    _test = getattr(_from, _name)

    def _on_gpu(*args: Any, _test: Any = _test, **given: Any) -> None:
        _test(*args, **given)

    _on_gpu.__signature__ = inspect.signature(_test)  # type: ignore[attr-defined]
    _on_gpu.pytestmark = [*getattr(_test, "pytestmark", []), GPU]  # type: ignore[attr-defined]
    globals()[_name + "_on_a_gpu"] = _on_gpu


def python(*words: str) -> subprocess.CompletedProcess[str]:
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(list(words), capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})


@GPU
def test_the_conformance_suite_holds_on_a_gpu(driver: Any) -> None:
    done = conformance("kit.cuda_buffer:GpuBuffer")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 40


@pytest.mark.checkers
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_cudas_own_checkers_find_nothing(driver: Any, tool: str) -> None:
    """Not marked gpu: `-m gpu` ends in minutes. A call that the driver refuses is no fault of memory: the backend
    queries whether the legacy stream may be used (906), and tries the PTX where machine code is refused.
    """
    checker = shutil.which("compute-sanitizer") or str(
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/compute-sanitizer")
    )
    if not Path(checker).exists():
        pytest.skip("compute-sanitizer is not installed")
    words = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all", "--report-api-errors", "no"]
    words = words if tool == "memcheck" else words[:-2]  # only it counts calls
    done = python(
        checker,
        *words,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
        "-m",
        "gpu and not slow and not full and not outlasts",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
