"""The kind of a sum is that of the lowest key (D15), for every budget and every choice of donated memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

torch = pytest.importorskip("torch", reason="torch is not installed")
sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")

FULL = np.arange(1.0, 7.0).reshape(2, 3)
MAKERS: dict[str, Callable[[], Any]] = {
    "ndarray": FULL.copy,
    "tensor": lambda: torch.from_numpy(FULL.copy()),
    "torch coo": lambda: torch.from_numpy(FULL.copy()).to_sparse_coo(),
    "torch csr": lambda: torch.from_numpy(FULL.copy()).to_sparse_csr(),
    "scipy csr": lambda: sparse.csr_array(FULL),
    "Sparse": lambda: fanin.Sparse("coo", (np.array(np.nonzero(FULL)), FULL.ravel().copy()), (2, 3)),
}
NUMBERS: dict[str, Callable[[], Any]] = {
    "0-d": lambda: np.array(1.0),
    "0-d tensor": lambda: torch.tensor(1.0, dtype=torch.float64),
    "NumPy": lambda: np.float64(1),
    "Python": lambda: 1.0,
}
IS_SPARSE = {"torch coo", "torch csr", "scipy csr", "Sparse"}


def kind_of(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"torch {x.layout}"
    return type(x).__name__


def elements(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to_dense().numpy()
    if isinstance(x, fanin.Sparse):
        return sparse.coo_array((x.parts[1], tuple(x.parts[0])), shape=x.shape).toarray()
    return x.toarray() if sparse.issparse(x) else np.asarray(x)


def kinds(names: tuple[str, ...], makers: dict[str, Callable[[], Any]], **options: Any) -> Counter[str]:
    """The kinds of the sum of these, by budget and by donated gradients."""
    found: Counter[str] = Counter()
    for budget, give in itertools.product((0, 10**9), ("keep", "temporary", "donate")):
        buf = fanin.InputBuffer(1, budget=budget, **options)
        kept = []
        for key, name in enumerate(names):
            if give == "temporary":
                buf.add(0, makers[name]())
                continue
            kept.append(makers[name]())
            how: Any = {"donate": True, "key": key} if give == "donate" else {}
            buf.add(0, kept[-1], **how)
        (made,) = buf.take()
        assert np.array_equal(elements(made), sum(elements(makers[n]()) for n in names)), (names, budget, give)
        found[kind_of(made)] += 1
    return found


@pytest.mark.parametrize("accumulate", [None, "exact"])
@pytest.mark.parametrize("first", MAKERS)
def test_a_sum_of_several_libraries_is_of_the_kind_of_the_first(first: str, accumulate: Any) -> None:
    for others in [*itertools.product(MAKERS, repeat=1), *itertools.product(MAKERS, repeat=2)]:
        names = (first, *others)
        found = kinds(names, MAKERS, accumulate=accumulate)
        assert len(found) == 1, (names, found)
        (kind,) = found
        if any(n not in IS_SPARSE for n in names):
            assert kind == ("torch torch.strided" if "t" in first[:5] and first != "ndarray" else "ndarray"), names
        else:
            assert kind.startswith("torch") == first.startswith("torch"), (names, kind)


@pytest.mark.parametrize("accumulate", [None, "exact"])
def test_a_sum_of_numbers_and_0d_arrays_is_of_the_kind_of_the_first_array(accumulate: Any) -> None:
    for names in itertools.product(NUMBERS, repeat=3):
        found = kinds(names, NUMBERS, accumulate=accumulate)
        arrays = [n for n in names if n.startswith("0-d")]
        want = {"0-d": "ndarray", "0-d tensor": "torch torch.strided"}[arrays[0]] if arrays else None
        want = want or ("float64" if "NumPy" in names else "float")
        assert list(found) == [want], (names, found)


def test_donated_memory_of_another_kind_becomes_the_sum() -> None:
    """A sum may lie in the memory of a later array; it is nevertheless of the kind of the first one."""
    coo = MAKERS["torch coo"]
    given = MAKERS["ndarray"]()
    buf = fanin.InputBuffer(1)
    buf.add(0, coo().coalesce())
    buf.add(0, given, donate=True)
    (made,) = buf.take()
    assert isinstance(made, torch.Tensor)
    if np.shares_memory(made.numpy(), given):
        assert np.array_equal(given, 2 * FULL)
    made += 1
    del given
    assert np.array_equal(made.numpy(), 2 * FULL + 1)
