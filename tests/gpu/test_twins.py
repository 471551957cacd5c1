"""What runs on one device runs on another to the bit: logs of operations recorded on the simulated device, and, where
there is a GPU, the tests of the fake driver's values and the conformance suite once more on it, and all of it under
CUDA's own checkers.
"""

from __future__ import annotations

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
from device import test_cuda_values
from fanin.sim import Machine
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
def test_a_log_of_the_simulated_device_gives_the_same_bits(m: Any) -> None:
    taken = 0
    for seed in range(60):
        log, bits = recorded(seed)
        assert played(log, m) == bits, (seed, log)
        taken += sum(map(bool, bits))
    assert taken > 100, taken


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


# The fake driver's tests of values, on a GPU


@pytest.fixture
def driver(a_world: Callable[..., Any]) -> Any:
    return a_world("gpu").driver


for _name in (
    "test_every_pair_of_dtypes_gives_the_cpus_bits",
    "test_sums_of_any_layout_number_and_size_give_the_cpus_bits",
    "test_other_accumulation_dtypes_give_the_cpus_bits",
    "test_gradients_are_reduced_to_a_declared_shape_as_on_the_cpu",
    "test_sparse_gradients_are_scattered_as_on_the_cpu",
):
    _test = getattr(test_cuda_values, _name)

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


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_cudas_own_checkers_find_nothing(driver: Any, tool: str) -> None:
    checker = shutil.which("compute-sanitizer") or str(
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/compute-sanitizer")
    )
    if not Path(checker).exists():
        pytest.skip("compute-sanitizer is not installed")
    words = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
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
        "gpu and not slow",
        "-k",
        "not leaves_out and not early and not little",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
