"""SciPy's sparse arrays and matrices, in bulk: their sums are SciPy's."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.partners

sp = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")

FORMATS = ("coo", "csr", "csc", "bsr", "dia", "lil", "dok")
DTYPES = ("bool", "int8", "int64", "float32", "float64", "complex128")


def some(format: str, family: str, dtype: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    dense = (rng.integers(1, 5, (6, 8)) * (rng.random((6, 8)) < 0.3)).astype(dtype)
    return getattr(sp, f"{format}_{family}")(dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["array", "matrix"])
def test_every_pair_of_formats_has_scipys_sum(family: str, dtype: str) -> None:
    for one, two in itertools.product(FORMATS, repeat=2):
        x, y = some(one, family, dtype, 1), some(two, family, dtype, 2)
        before = x.toarray(), y.toarray()
        result = fanin.add_n([x, y])
        assert sp.issparse(result)
        assert isinstance(result, sp.sparray) == (family == "array")
        assert result.dtype == dtype
        assert np.array_equal(result.toarray(), np.add(*before))
        assert np.array_equal(x.toarray(), before[0])
        assert np.array_equal(y.toarray(), before[1])


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr"])
def test_empty_ones(format: str) -> None:
    x = getattr(sp, f"{format}_array")((4, 4), dtype="f8")
    assert fanin.add_n([x, x]).nnz == 0
    assert fanin.add_n([x, np.ones((4, 4))]).tolist() == np.ones((4, 4)).tolist()


def test_int32_and_int64_indices() -> None:
    x = some("csr", "array", "float64", 1)
    for kind in ("int32", "int64"):
        x.indices, x.indptr = x.indices.astype(kind), x.indptr.astype(kind)
        assert np.array_equal(fanin.add_n([x, x]).toarray(), 2 * x.toarray())


def test_a_change_of_an_added_gradient_causes_no_crash() -> None:
    for format, attribute in itertools.product(("csr", "csc", "bsr"), ("indices", "indptr")):
        for budget in (0, None):
            x = some(format, "array", "float64", 3)
            if format == "bsr":
                x = sp.bsr_array(x.toarray(), blocksize=(2, 2))
            buf = fanin.InputBuffer(1, budget=budget)
            buf.add(0, x)
            getattr(x, attribute)[:] = 2**30
            try:
                buf.add(0, np.ones((6, 8)))
                buf.take()
            except (ValueError, RuntimeError):
                pass


PARTS = {
    "coo": ("data", "row", "col", "coords"),
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "bsr": ("data", "indices", "indptr"),
    "dia": ("data", "offsets"),
    "lil": ("data", "rows"),
    "dok": ("_dict",),
}
GONE = object()
WRONG = {
    "None": None,
    "gone": GONE,
    "list": [1, 2, 3],
    "tuple": (None, None),
    "str": "x",
    "objects": np.array([object()] * 3),
    "0-d": np.array(1.0),
    "floats": np.ones(3),
    "2-d": np.ones((3, 3)),
    "short": np.zeros(1, np.int32),
    "masked": np.ma.ones(3),
    "matrix": np.ones((1, 3)).view(np.matrix),
    "int8": np.zeros(3, np.int8),
    "negative": np.full(4, -1, np.int32),
    "big": np.full(4, 2**31 - 1, np.int32),
    "foreign": np.zeros(3, ">i4"),
    "void": np.zeros(3, "V4"),
    "long double": np.zeros(3, "g"),
}


@pytest.mark.parametrize("family", ["array", "matrix"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_replaced_part_is_a_type_or_a_value_error(format: str, family: str) -> None:
    refused = 0
    for name, wrong in itertools.product(PARTS[format], WRONG.values()):
        x = getattr(sp, f"{format}_{family}")(np.eye(3))
        try:
            delattr(x, name) if wrong is GONE else setattr(x, name, wrong)
        except Exception:  # SciPy itself refuses
            continue
        buf = fanin.InputBuffer(1, name="grads")
        try:
            buf.add(0, x)
            buf.add(0, np.ones((3, 3)))
            buf.take()
        except (TypeError, ValueError, BufferError) as e:
            assert str(e).startswith("grads: slot 0: "), e
            if wrong is None:
                assert type(e) is TypeError
            refused += 1
        del x
    assert refused > 10


@pytest.mark.parametrize("shape", [None, (3,), (3, 3, 3), "ab", (-1, 3), (2**70, 3), (1, 1), (100, 100)])
def test_a_replaced_shape_is_a_type_or_a_value_error(shape: Any) -> None:
    for format in ("coo", "csr", "csc", "bsr", "dia"):
        x = getattr(sp, f"{format}_array")(np.eye(3))
        x._shape = shape
        buf = fanin.InputBuffer(1)
        with pytest.raises((TypeError, ValueError, BufferError)):
            buf.add(0, x)
            buf.add(0, np.ones((3, 3)))


def test_a_part_that_another_thread_replaces_during_the_add_is_an_error_or_added() -> None:
    """The parts are read once: the checked parts are the summed ones."""
    import sys
    import threading

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for format, name in (
            ("csr", "indices"),
            ("csr", "indptr"),
            ("csr", "data"),
            ("bsr", "indptr"),
            ("coo", "data"),
        ):
            x = getattr(sp, f"{format}_array")(np.eye(64))
            good, stop = getattr(x, name), threading.Event()

            def replace(x: Any = x, name: str = name, good: Any = good, stop: threading.Event = stop) -> None:
                for value in itertools.cycle((None, good[:1], good)):
                    setattr(x, name, value)
                    if stop.is_set():
                        return

            thread = threading.Thread(target=replace)
            thread.start()
            added = refused = 0
            for _ in range(300):
                buf = fanin.InputBuffer(1)
                try:
                    buf.add(0, x)
                    buf.add(0, np.zeros((64, 64)))
                    buf.take()
                    added += 1
                except (TypeError, ValueError):
                    refused += 1
            stop.set()
            thread.join()
            assert added + refused == 300
    finally:
        sys.setswitchinterval(before)


def test_an_export_that_scipy_refuses_loses_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for format in ("coo", "csr", "csc", "bsr"):
        for how in ({}, {"scale": 2.0}, {"writable": True}):
            x = some(format, "array", "float64", 1)
            buf = fanin.InputBuffer(2)
            for _ in range(2):
                buf.add(0, np.ones(3))
                buf.add(1, x)
            with monkeypatch.context() as m:
                m.setattr(sp, f"{format}_array", fail)
                with pytest.raises(KeyboardInterrupt):
                    buf.take(**how)
            dense, sparse = buf.take(**how)
            by = how.get("scale", 1.0)
            assert dense.tolist() == [2 * by] * 3
            assert np.array_equal(sparse.toarray(), 2 * by * x.toarray())
