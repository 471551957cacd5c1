"""Leaves whose gradients are arrays of other libraries."""

from __future__ import annotations

from typing import Any

import pytest

import fanin

pytestmark = pytest.mark.partners


def arrive(leaf: fanin.Leaf, *gradients: Any) -> None:
    """One pass that brings all these gradients."""
    nodes = [fanin.Node(lambda g, x=x: x, edges=[(leaf, 0)]) for x in gradients]
    top = fanin.Node(lambda g: [g] * len(nodes), edges=[(n, 0) for n in nodes])
    fanin.backward([(top, 0, 1.0)])


@pytest.mark.rule("L4", "L5")
def test_a_torch_parameters_gradient_is_its_own_grad_and_stays_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    p = torch.nn.Parameter(torch.zeros(3))
    leaf, held = fanin.Leaf(p), torch.ones(3)
    arrive(leaf, held)
    first, where = p.grad, p.grad.data_ptr()
    assert leaf.grad is first and where != held.data_ptr()
    arrive(leaf, held, held)
    assert p.grad is first and first.data_ptr() == where
    assert first.tolist() == [3, 3, 3] and held.tolist() == [1, 1, 1]
    leaf.grad = None
    assert p.grad is None


@pytest.mark.rule("L5")
def test_a_wide_sum_of_torchs_is_rounded_into_one_grad() -> None:
    torch = pytest.importorskip("torch")
    leaf, one = fanin.Leaf(torch.zeros(2, dtype=torch.bfloat16), accumulate="float32"), torch.ones(2).bfloat16()
    for _ in range(300):
        arrive(leaf, one)
    grad = leaf.grad
    assert grad.dtype == torch.bfloat16 and grad.tolist() == [300, 300]  # 256 if each pass rounded
    for _ in range(4):
        arrive(leaf, one)
    assert leaf.grad is grad and grad.tolist() == [304, 304]


@pytest.mark.rule("L3", "L5")
def test_torchs_sparse_gradients() -> None:
    torch = pytest.importorskip("torch")
    leaf = fanin.Leaf(torch.zeros(3))
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True)
    arrive(leaf, sparse)
    arrive(leaf, sparse)
    assert leaf.grad.is_sparse and leaf.grad.to_dense().tolist() == [2, 0, 4]
    assert sparse.to_dense().tolist() == [1, 0, 2]
    arrive(leaf, torch.ones(3))
    assert not leaf.grad.is_sparse and leaf.grad.tolist() == [3, 1, 5]


@pytest.mark.rule("L4", "L5")
def test_arrays_that_never_change_are_replaced() -> None:
    jnp = pytest.importorskip("jax.numpy")
    leaf, g = fanin.Leaf(jnp.zeros(3)), jnp.ones(3)
    arrive(leaf, g)
    arrive(leaf, g, g)
    assert leaf.grad.tolist() == [3, 3, 3] and g.tolist() == [1, 1, 1]
