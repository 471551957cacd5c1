"""Partial gradients of torch tensors, and rows of them, beside torch's own gradients of slices and `index_add_`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Diagonal, Partial

pytestmark = pytest.mark.partners
torch: Any = pytest.importorskip("torch")

PARTS: list[tuple[Any, Any]] = [
    (np.s_[1], lambda x: x[1]),
    (np.s_[2:, 1:3], lambda x: x[2:, 1:3]),
    (np.s_[..., 0], lambda x: x[..., 0]),
    (np.s_[:, None, ::2], lambda x: x[:, None, ::2]),
    (Diagonal(1), lambda x: torch.diagonal(x, 1)),
    (Diagonal(-1, 1, 0), lambda x: torch.diagonal(x, -1, 1, 0)),
]


@pytest.mark.rule("P1")
def test_the_sum_of_parts_is_torchs_gradient() -> None:
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn_like(read(x)) for _, read in PARTS]
    sum((read(x) * w).sum() for (_, read), w in zip(PARTS, weights, strict=True)).backward()
    buf = fanin.InputBuffer(1)
    for (at, _), w in zip(PARTS, weights, strict=True):
        buf.add(0, Partial(w, at, (4, 5)))
    [got] = buf.take()
    assert isinstance(got, torch.Tensor) and torch.allclose(got, x.grad, rtol=1e-13)


@pytest.mark.rule("P3")
def test_a_tensor_stays_one_where_a_partial_gradient_is_handed_on() -> None:
    buf = fanin.InputBuffer([fanin.Slot(partial=True)])
    one = Partial(torch.ones(2, dtype=torch.bfloat16), np.s_[1:3], 4)
    buf.add(0, one, copy=True)
    [got] = buf.take()
    assert isinstance(got, Partial) and isinstance(got.values, torch.Tensor) and got.values is not one.values
    assert got.dense().tolist() == [0, 1, 1, 0] and got.dense().dtype == torch.bfloat16


def test_rows_are_those_of_index_add_where_no_step_rounds() -> None:
    ids = torch.randint(0, 7, (50,))
    rows = torch.randint(-8, 8, (50, 3)).to(torch.float32)
    got = fanin.add_rows(ids, rows, 8)
    assert isinstance(got, torch.Tensor) and torch.equal(got, torch.zeros(8, 3).index_add_(0, ids, rows))


@pytest.mark.rule("P5")
def test_values_that_require_a_gradient_are_refused_in_a_pass_that_records_itself() -> None:
    """Their sum would lack its grad_fn, and a second derivative a term."""
    v = torch.ones(2, requires_grad=True)
    buf = fanin.InputBuffer(1, create_graph=True)
    with pytest.raises(NotImplementedError, match="Partial of a Tensor that requires a gradient"):
        buf.add(0, fanin.Partial(v * 2, np.s_[:2], 3))
    buf.add(0, fanin.Partial(v.detach() * 2, np.s_[:2], 3))
    buf.add(0, torch.cat([v, v[:1]]))
    total = buf.take(slot=0)
    assert total.tolist() == [3, 3, 1]
    assert torch.autograd.grad(total.sum(), v)[0].tolist() == [2, 1]
    leaf = fanin.Leaf(torch.zeros(3))
    node = fanin.Node(lambda g: fanin.Partial(g * v, np.s_[:2], 3), edges=[(leaf, 0)])
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        fanin.backward([(node, 0, torch.ones(2))], create_graph=True)
    fanin.backward([(node, 0, torch.ones(2))])
    assert leaf.grad.tolist() == [1, 1, 0]
