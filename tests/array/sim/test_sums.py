"""Sums of NumPy arrays called from Python: the same bits with every instruction set and number of threads."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from fanin import _core
from kit import hooks
from kit.isa import isas
from kit.support import run_python

pytestmark = pytest.mark.core

#: Those that are their own accumulation dtype.
DTYPES = ["bool", *(k + b for k in ("int", "uint") for b in ("8", "16", "32", "64"))]
DTYPES += ["float32", "float64", "complex64", "complex128"]


ISAS = isas()


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Any bits but NaNs of several kinds: floats with subnormals, signed zeros and infinities, integers that wrap."""
    d = np.dtype(dtype)
    if d.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if d.kind in "iu":
        return rng.integers(0, 256, (*shape, d.itemsize), dtype="u1").view(d).reshape(shape)
    parts = 2 if d.kind == "c" else 1
    real = np.dtype(f"f{d.itemsize // parts}")
    x = rng.standard_normal((*shape, parts)) * 2.0 ** rng.integers(-30, 30, (*shape, parts))
    x = x.astype(real)
    odd = rng.random(x.shape)
    for value, below in ((np.finfo(real).smallest_subnormal, 0.02), (-0.0, 0.01), (0.0, 0.005), (np.inf, 0.001)):
        x[odd < below] = value
    return x.view(d).reshape(shape)


def layouts(a: Any) -> list[Any]:
    """The same elements in several layouts."""
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)
    wide[..., ::2] = a
    raw = np.zeros(a.nbytes + 1, "u1")
    skew = np.ndarray(a.shape, a.dtype, raw, 1)
    skew[...] = a
    return [a, np.asfortranarray(a), wide[..., ::2], a[..., ::-1].copy()[..., ::-1], skew]


def digest(a: Any) -> str:
    """Of its elements; all NaNs are one."""
    a = np.ascontiguousarray(a)
    if a.dtype.kind in "fc":
        real = a.view(f"f{a.dtype.itemsize // (2 if a.dtype.kind == 'c' else 1)}").copy()
        real[np.isnan(real)] = np.nan
        a = real
    return hashlib.sha256(a.tobytes()).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_the_left_fold_on_every_instruction_set(dtype: str) -> None:
    rng = np.random.default_rng(DTYPES.index(dtype))
    met = 0
    for n, shape in itertools.product([*range(1, 18), 64], [(7,), (3, 43), (2, 5, 131)]):
        arrays = [numbers(rng, dtype, shape) for _ in range(n)]
        with np.errstate(all="ignore"):
            want = digest(functools.reduce(np.add, arrays))
        mixed = [layouts(a)[rng.integers(5)] for a in arrays]
        for isa in ISAS:
            with fanin.set_options(isa=isa):
                got = fanin.add_n(arrays if n % 2 else mixed)
            assert digest(got) == want, (dtype, n, shape, isa)
            met += 1
    assert met == 18 * 3 * len(ISAS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_low_float_is_rounded_once_on_every_instruction_set(dtype: str) -> None:
    ml = pytest.importorskip("ml_dtypes")
    d = np.dtype(dtype if dtype == "float16" else getattr(ml, dtype))
    rng = np.random.default_rng(7)
    for n, size in itertools.product((2, 3, 8, 17, 64), (5, 16, 1000)):
        arrays = [rng.standard_normal(size).astype("f4").astype(d) for _ in range(n)]
        want = functools.reduce(np.add, [a.astype("f4") for a in arrays]).astype(d)
        for isa in ISAS:
            with fanin.set_options(isa=isa):
                np.testing.assert_array_equal(fanin.add_n(arrays).view(f"u{d.itemsize}"), want.view(f"u{d.itemsize}"))


@pytest.mark.parametrize("offset", [0, 16, 64, 1088])
def test_a_large_sum_has_one_hash(offset: int) -> None:
    rng = np.random.default_rng(offset)
    size, n = 600_011, 5
    raw = [np.zeros(4 * size + 8192, "u1") for _ in range(n)]
    arrays = [r[offset * k : offset * k + 4 * size].view("f4") for k, r in enumerate(raw)]
    for a in arrays:
        a[...] = rng.standard_normal(size)
    want = digest(functools.reduce(np.add, arrays))
    for isa, threads in itertools.product(ISAS, (1, 2, 3)):
        with fanin.set_options(isa=isa, threads=threads):
            assert digest(fanin.add_n(arrays)) == want, (isa, threads)
            out = np.empty(size, "f4")
            fanin.add_n(arrays, out=out)
            assert digest(out) == want, (isa, threads)


def test_one_changed_element_changes_the_hash() -> None:
    a = np.arange(1000.0)
    before = digest(a)
    a[500] = np.nextafter(a[500], np.inf)
    assert digest(a) != before


@pytest.mark.parametrize("isa", ["", "SSE2", "avx1024", b"sse2", 2])
def test_the_error_for_a_missing_instruction_set_names_the_available_ones(isa: Any) -> None:
    before = _core.get_options()
    with pytest.raises(ValueError, match=f"isa=.*this machine has '{ISAS[0]}'"):
        fanin.set_options(isa=isa, budget=1)
    assert _core.get_options() == before


@pytest.mark.parametrize("threads", [0, -1, True, False, 2.0, 1025, 1 << 80, "2"])
def test_a_nonsensical_number_of_threads_is_a_value_error(threads: Any) -> None:
    with pytest.raises(ValueError, match=r"threads=.*expected a number of threads from 1 to 1024"):
        fanin.set_options(threads=threads)


def test_options_are_restored_after_the_block() -> None:
    before = _core.get_options()
    with fanin.set_options(isa=ISAS[0], threads=3):
        assert fanin.info()["sums"] == {"isa": ISAS[0], "threads": 3}
    assert _core.get_options() == before


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="helpers are counted in development builds alone: FANIN_DEV=1")
def test_threads_are_started_by_the_first_large_sum_and_end_with_the_process() -> None:
    code = """
import os, numpy as np, fanin
from fanin import _core
alive = lambda want: _core._test_helpers() == want
fanin.set_options(threads=3)
fanin.add_n([np.ones(100), np.ones(100)])
assert alive(0)
a = np.ones(2_000_000)
assert fanin.add_n([a, a])[-1] == 2 and alive(2)
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
else:
    assert alive(0)
    assert fanin.add_n([a, a, a])[-1] == 3 and alive(2)
    os._exit(0)
with fanin.set_options(threads=1):
    assert alive(0)
    fanin.add_n([a, a])
    assert alive(0)
fanin.add_n([a, a])
assert alive(2)
print(2)
"""
    assert run_python(code).stdout.split() == ["2"]


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="helpers are counted in development builds alone: FANIN_DEV=1")
def test_the_simulated_device_sums_alone() -> None:
    code = """
import numpy as np, fanin
from fanin import _core
fanin.set_options(threads=2)
with fanin.sim.Machine() as m:
    a = m.array(np.ones(2_000_000))
    b = m.array(np.ones(2_000_000))
    buf = fanin.InputBuffer(1)
    buf.add(0, a)
    buf.add(0, b)
    total, = buf.take()
    m.synchronize()
assert _core._test_helpers() == 0
"""
    run_python(code)


@pytest.mark.threads
def test_large_sums_of_several_threads_are_right() -> None:
    import threading

    a = np.arange(700_000, dtype="f8")
    wrong: list[object] = []

    def work(k: int) -> None:
        for _ in range(5):
            got = fanin.add_n([a, a, np.full_like(a, k)])
            if not np.array_equal(got, 2 * a + k):
                wrong.append(k)

    with fanin.set_options(threads=2):
        team = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for t in team:
            t.start()
        for t in team:
            t.join()
    assert not wrong


LARGE = 33 << 20  # bytes of a sum beyond half of every last cache that is believed: it is written around the caches


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8", "int16"])
def test_large_sums_of_narrow_elements_are_the_same_bits_by_every_instruction_set(dtype: str) -> None:
    """Written around the caches, a few bytes at a time: compared with the same sum of a small part, of which the large
    one is many copies.
    """
    d = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(25)
    n, rows = 4096, LARGE // (4096 * d.itemsize)
    parts = [rng.integers(-8, 9, n).astype(np.float32).astype(d) for _ in range(3)]
    large = [np.tile(p, rows) for p in parts]
    want = fanin.add_n(parts).view(f"u{d.itemsize}")
    assert len(np.unique(want)) > 1
    for isa in ISAS:
        with fanin.set_options(isa=isa, threads=1):
            got = fanin.add_n(large).view(f"u{d.itemsize}").reshape(rows, n)
        assert np.array_equal(got, np.broadcast_to(want, got.shape)), isa


@pytest.mark.parametrize("one", ["12", b"12", {0: np.ones(2), 1: np.ones(2)}])
def test_an_iterator_is_no_sequence_of_arrays_and_is_refused(one: Any) -> None:
    with pytest.raises(TypeError, match=f"expected a sequence of arrays, got one {type(one).__name__}"):
        fanin.add_n(one)
