"""torch's switch for subnormal numbers, and norms of torch's sparse gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.partners, pytest.mark.rule("A15")]


@pytest.fixture
def flushed() -> Iterator[None]:
    """This thread flushes subnormal numbers, as torch lets a user ask for it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["NumPy", "torch"])
@pytest.mark.parametrize("n", [1000, 2_000_000])
def test_subnormal_sums_are_whole_though_the_thread_flushes_them(flushed: None, make: Any, n: int) -> None:
    x = np.full(n, 71362, "u4").view("f4")  # 1e-40, which a conversion would flush
    assert not (x + x).any(), "NumPy's sums are flushed"
    for threads in (1, 2, 4):
        with fanin.set_options(threads=threads):
            found = np.asarray(fanin.add_n([make(x), make(x)]))
            assert np.count_nonzero(found.view("u4")) == n


def test_a_function_of_a_pass_flushes_on_every_worker(flushed: None) -> None:
    small = np.full(8, 1e-310)
    leaf = fanin.Leaf(np.zeros(8))
    nodes = [fanin.Node(lambda g: small + small, edges=[(leaf, 0)]) for _ in range(8)]
    for workers in (1, 2, 4):
        leaf.grad = None
        fanin.backward([(node, 0, np.ones(1)) for node in nodes], workers=workers, keep_graph=True)
        assert not leaf.grad.view("u8").any()


def sparse() -> Any:
    index, values = torch.tensor([[0, 0, 0], [1, 2, 2]]), torch.tensor([3.0, 1.0, 3.0], dtype=torch.float64)
    return torch.sparse_coo_tensor(index, values, (1, 4), check_invariants=True)


def test_the_norm_of_a_parameter_that_keeps_a_sparse_gradient() -> None:
    def rank(group: dist.Group) -> Any:
        kept = torch.zeros((1, 4), dtype=torch.float64, requires_grad=True)
        other = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        reducer = dist.Reducer([kept, other], group, missing="skip")
        fanin.torch.backward([(other * torch.tensor([6.0, 0.0])).sum()], reducer=reducer)
        kept.grad = sparse()
        norm, stats = reducer.norm(), reducer.stats()
        dist.clip_norm(reducer, 1.3)
        return norm, stats.norm, reducer.norm(), kept.grad.to_dense().tolist()

    for norm, same, after, dense in dist.threads(2, rank, timeout=None):
        assert norm == same == 13.0
        assert after == pytest.approx(1.3, rel=1e-15)
        assert dense == [pytest.approx([0.0, 0.3, 0.4, 0.0])], dense


def test_a_norm_of_each_dtype_of_torch() -> None:
    def rank(group: dist.Group) -> Any:
        found = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
            leaf = torch.zeros(2, dtype=dtype, requires_grad=True)
            reducer = dist.Reducer([leaf], group, missing="skip")
            leaf.grad = torch.tensor([3.0, 4.0], dtype=dtype)
            found.append(reducer.norm())
        return found

    assert dist.threads(2, rank, timeout=None) == [[5.0] * 5] * 2
