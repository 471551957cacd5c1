"""torch's switch for subnormal numbers, and norms of torch's sparse gradients."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.partners, pytest.mark.rule("A15")]


#: C's four rounding modes.
ROUNDINGS = [n << (22 if platform.machine() == "aarch64" else 10) for n in range(4)]


class Brought(torch.autograd.Function):
    """A loss whose gradient is given."""

    @staticmethod
    def forward(ctx: Any, w: Any, gradient: Any) -> Any:
        ctx.gradient = gradient
        return w.detach().sum().real

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.gradient, None


@pytest.fixture
def flushed() -> Iterator[None]:
    """This thread flushes subnormal numbers to zero: `torch.set_flush_denormal`."""
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
        with reducer:
            torch.autograd.backward([(other * torch.tensor([6.0, 0.0])).sum()])
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


@pytest.mark.parametrize("layout", ["strided", "transposed", "sparse"])
def test_a_sum_over_ranks_is_added_to_grad_alike_on_a_rank_that_flushes(layout: str) -> None:
    """1e-38 is normal; what is added to it, and the right sum, are not."""
    shape = (64, 600)  # torch's own addition runs on several threads

    def rank(group: dist.Group) -> Any:
        w = torch.zeros(shape, requires_grad=True)
        earlier = torch.full(shape, 1e-38)
        if layout == "transposed":
            earlier = torch.full(shape[::-1], 1e-38).t()
        w.grad = earlier.to_sparse() if layout == "sparse" else earlier
        kept, version = w.grad, w.grad._version
        reducer = dist.Reducer([w], group)
        brought = torch.full(shape, -9e-39 if group.rank else 1e-45)
        loss = Brought.apply(w, brought)
        if group.rank and not torch.set_flush_denormal(True):
            pytest.skip("this processor has no such mode")
        try:
            with reducer:
                torch.autograd.backward(loss)
        finally:
            torch.set_flush_denormal(False)
        if layout != "sparse":
            assert w.grad is kept and w.grad._version == version + 1
        return w.grad.contiguous().numpy()

    exact = np.float32(1e-38) + (np.float32(-9e-39) + np.float32(1e-45))
    for found in dist.threads(2, rank, timeout=None):
        assert (found == exact).all() and found.shape == shape


@pytest.mark.parametrize("kind", ["conjugate", "negative", "expanded", "complex sum"])
def test_a_sum_over_ranks_is_added_to_a_view_as_torch_adds_it_or_refused(kind: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    grads = {
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "expanded": torch.ones(1).expand(2),
        "complex sum": torch.ones(2, dtype=torch.complex128),
    }

    def rank(group: dist.Group) -> Any:
        earlier = grads[kind].clone() if kind == "complex sum" else grads[kind]
        w = torch.zeros(2, dtype=earlier.dtype, requires_grad=True)
        w.grad = earlier
        expected = None if kind == "expanded" else earlier + 3
        reducer = dist.Reducer([w], group)
        loss = Brought.apply(w, torch.full((2,), 3, dtype=w.dtype))
        if expected is None:
            with pytest.raises(RuntimeError, match="refers to a single memory location"), reducer:
                torch.autograd.backward(loss)
            return True
        with reducer:
            torch.autograd.backward(loss)
        return w.grad is earlier and torch.equal(w.grad, expected)

    assert dist.threads(1, rank, timeout=None) == [True]


def test_a_mean_over_ranks_has_one_factor_in_every_mode() -> None:
    torch_ranks = pytest.importorskip("fanin.dist.torch_ranks")
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    before = libm.fegetround()

    def rank(group: dist.Group) -> tuple[list[float], float]:
        found = []
        for mode in ROUNDINGS:
            assert libm.fesetround(mode) == 0
            try:
                found += [torch_ranks.mean_factor(group), 1 / group.size]
            finally:
                libm.fesetround(before)
        return found[::2], len({*found[1::2]})

    [(factors, ways), *_] = dist.threads(3, rank, timeout=None)
    assert factors == [1 / 3] * len(ROUNDINGS) and ways == 2


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_kept_gradient_with_a_bit_of_torch_is_measured_and_clipped(kind: str) -> None:
    def rank(group: dist.Group) -> Any:
        z = torch.tensor([3 + 3j, 4 - 4j], dtype=torch.complex128)
        kept = z.conj() if kind == "conjugate" else z.conj().imag
        w = torch.zeros(2, dtype=kept.dtype, requires_grad=True)
        reducer = dist.Reducer([w], group, missing="skip")
        w.grad = kept
        expected = kept / 5
        norm, stats = reducer.norm(), reducer.stats()
        assert dist.clip_norm(reducer, norm / 5) == norm == stats.norm
        assert w.grad is kept and torch.allclose(w.grad, expected, rtol=1e-15)
        return norm

    expected = 50**0.5 if kind == "conjugate" else 5.0
    assert dist.threads(2, rank, timeout=None) == [expected] * 2
