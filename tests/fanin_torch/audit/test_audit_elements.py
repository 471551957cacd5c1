"""What an audit reads in C: elements of a tensor are those that torch reads, and a sum that adds up is one by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fanin import _core  # noqa: E402
from fanin._interop.torch import quicken  # noqa: E402
from fanin.audit.rounding import added, carrier, rounded, same  # noqa: E402

pytestmark = pytest.mark.partners

N = 300
READ = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SUMS = ["float64", "float32", "float16", "bfloat16"]


@pytest.fixture(autouse=True)
def _quick() -> None:
    quicken()


def special(dtype: Any) -> Any:
    """Numbers of every kind, subnormal ones of the dtype among them."""
    torch.manual_seed(0)
    x = torch.randn(20, 30).to(dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0]).to(dtype)
    x[1] *= torch.finfo(dtype).tiny / 8
    return x


def bits(x: Any) -> bytes:
    return (x if x.dtype == torch.float64 else x.float()).numpy().tobytes()


@pytest.mark.parametrize("dtype", READ)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_elements_are_those_that_torch_reads(dtype: Any, requires_grad: bool) -> None:
    x = special(dtype)
    places = np.random.default_rng(0).integers(0, x.numel(), 256).astype(np.int32)
    some = x.view(-1).index_select(0, torch.from_numpy(places))
    x.requires_grad_(requires_grad)
    found, whole = _core._elements(x, places), _core._elements(x, None)
    assert found is not None and found.tobytes() == bits(some)
    assert whole is not None and whole.tobytes() == bits(x.detach())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 5).t(),
        lambda: torch.ones(8)[::2],
        lambda: torch._neg_view(torch.ones(4)),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.ones(4, dtype=torch.complex64),
        lambda: torch.ones(4, dtype=torch.int32),
        lambda: torch.nn.Parameter(torch.ones(4)),
        lambda: np.ones(4, np.float32),
    ],
    ids=["transposed", "gaps", "negative", "sparse", "meta", "complex", "integer", "parameter", "ndarray"],
)
def test_other_tensors_are_left_to_torch(make: Any) -> None:
    assert _core._elements(make(), None) is None


def test_places_of_another_dtype_are_left_to_torch_and_those_beyond_the_end_are_an_error() -> None:
    x = torch.arange(4.0)
    assert _core._elements(x, np.array([1, 3])) is None
    assert _core._elements(x, np.array([3, 1, 1], np.int32)).tolist() == [3.0, 1.0, 1.0]
    for place in (4, -1):
        with pytest.raises(IndexError, match="place"):
            _core._elements(x, np.array([0, place], np.int32))


def terms(dtype: str, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    wide = carrier(dtype)
    sizes = np.exp2(rng.integers(-30, 14, (2, N)))
    with np.errstate(all="ignore"):
        return [rounded((rng.normal(size=N) * size).astype(wide), dtype) for size in sizes]


@pytest.mark.parametrize("dtype", SUMS)
def test_a_right_sum_adds_up_and_one_with_another_bit_does_not(dtype: str) -> None:
    for seed in range(20):
        before, gradient = terms(dtype, seed)
        after = added(before, gradient, dtype)
        assert _core._adds_up(before, gradient, after, dtype)
        wrong = after.copy()
        wrong[seed] = np.nextafter(wrong[seed], np.inf, dtype=wrong.dtype)
        assert not _core._adds_up(before, gradient, wrong, dtype)
        assert not same(wrong, after, dtype)


@pytest.mark.parametrize("dtype", SUMS)
def test_what_adds_up_is_a_right_sum_whatever_the_numbers(dtype: str) -> None:
    wide = carrier(dtype)
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 65504.0, 1e-42, -1e-7]
    numbers = rounded(np.array(some, wide), dtype)
    verdicts = set()
    for before in numbers:
        for gradient in numbers:
            for after in numbers:
                one = [np.array([x], wide) for x in (before, gradient, after)]
                quickly = _core._adds_up(*one, dtype)
                right = same(one[2], added(one[0], one[1], dtype), dtype)
                assert right or not quickly
                verdicts.add((quickly, right))
    assert {(True, True), (False, False)} <= verdicts


def test_arrays_that_are_unlike_do_not_add_up() -> None:
    x = np.ones(4, np.float32)
    assert _core._adds_up(x, x, x + x, "float32")
    assert not _core._adds_up(x, x, (x + x)[:3], "float32")
    assert not _core._adds_up(x, x, (x + x).astype(np.float64), "float32")
    assert not _core._adds_up(x, x, x + x, "float64")
    assert not _core._adds_up(x.astype(float), x.astype(float), 2 * x.astype(float), "rows")
