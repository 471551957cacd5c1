"""SciPy's sparse arrays and matrices, in bulk: what they sum to is what SciPy says."""

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
def test_every_pair_of_formats_sums_to_what_scipy_says(family: str, dtype: str) -> None:
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


def test_what_is_changed_after_it_was_added_never_crashes() -> None:
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
