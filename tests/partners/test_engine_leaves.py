"""Leaves whose gradients are arrays of other libraries."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
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


def test_a_wide_sum_has_no_place_in_a_tensor_that_keeps_its_own_grad() -> None:
    torch = pytest.importorskip("torch")
    p = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match=r"is its own \.grad, .*: give x\.detach\(\)"):
        fanin.Leaf(p, accumulate="float32")  # gradients were lost: they were in neither .grad
    leaf = fanin.Leaf(p.detach(), accumulate="float32")
    arrive(leaf, torch.ones(2).bfloat16())
    assert leaf.grad.tolist() == [1, 1] and p.grad is None


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


def coo(torch: Any, indices: Any = None, values: Any = None) -> Any:
    indices = torch.tensor([[0, 2]]) if indices is None else indices
    values = torch.tensor([1.0, 2.0]) if values is None else values
    return torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False)


def parts(g: Any) -> list[int]:
    return [g._indices().data_ptr(), g._values().data_ptr()]


# What is done with a fresh sparse gradient on its way, and whether its parts are the leaf's then.
WAYS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "nobody": (lambda torch, g: None, True),
    "nobody any more": (lambda torch, g: [g.detach(), g._values()[1:]].clear(), True),
    "the object": (lambda torch, g: g, False),
    "a weak reference": (lambda torch, g: weakref.ref(g), False),
    "detach": (lambda torch, g: g.detach(), False),
    "values": (lambda torch, g: g._values(), False),
    "indices": (lambda torch, g: g._indices(), False),
    "a view of the values": (lambda torch, g: g._values()[1:], False),
    "the storage": (lambda torch, g: g._values().untyped_storage(), False),
    "an ndarray": (lambda torch, g: g._values().numpy(), False),
    "a capsule": (lambda torch, g: torch.utils.dlpack.to_dlpack(g._indices()), False),
    "other processes": (lambda torch, g: g._values().share_memory_() is None, False),
    "another tensor of its parts": (lambda torch, g: coo(torch, g._indices(), g._values()), False),
}


@pytest.mark.rule("L3", "L7")
@pytest.mark.parametrize("own", [True, False], ids=["in .grad", "in leaf.grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sparse_gradient_of_torchs_becomes_grad_if_its_parts_have_no_other_reference(way: str, own: bool) -> None:
    torch = pytest.importorskip("torch")
    leaf, keep, where = fanin.Leaf(torch.zeros(3, requires_grad=own)), [], []
    look, taken = WAYS[way]

    def fn(_: Any) -> Any:
        made = coo(torch)
        where.extend(parts(made))
        keep.append(look(torch, made))
        return made

    fanin.backward([(fanin.Node(fn, edges=[(leaf, 0)]), 0, 1.0)])
    assert leaf.grad.to_dense().tolist() == [1, 0, 2]
    assert [a == b for a, b in zip(parts(leaf.grad), where, strict=True)] == [taken, taken]


@pytest.mark.rule("L3", "L8")
@pytest.mark.parametrize("whose", ["of an ndarray", "expanded"])
def test_a_sparse_gradient_of_torchs_whose_memory_is_lent_or_lies_upon_itself_is_copied(whose: str) -> None:
    torch = pytest.importorskip("torch")
    leaf, memory = fanin.Leaf(torch.zeros(3)), np.ones(2, np.float32)

    def fn(_: Any) -> Any:
        return coo(torch, values=torch.ones(1).expand(2) if whose == "expanded" else torch.from_numpy(memory))

    fanin.backward([(fanin.Node(fn, edges=[(leaf, 0)]), 0, 1.0)])
    leaf.grad._values().mul_(3)
    assert memory.tolist() == [1, 1] and leaf.grad.to_dense().tolist() == [3, 0, 3]


@pytest.mark.rule("L3")
def test_a_sum_of_sparse_gradients_of_torchs_becomes_grad() -> None:
    torch = pytest.importorskip("torch")
    leaf, where, held = fanin.Leaf(torch.zeros(3)), [], coo(torch)
    leaf.register_hook(lambda g: where.extend(parts(g)))
    arrive(leaf, held, held)
    assert parts(leaf.grad) == where and leaf.grad.to_dense().tolist() == [2, 0, 4]
    leaf.grad._values().mul_(3)
    leaf.grad._indices().zero_()
    assert held.to_dense().tolist() == [1, 0, 2]


@pytest.mark.rule("L4", "L5")
def test_arrays_that_never_change_are_replaced() -> None:
    jnp = pytest.importorskip("jax.numpy")
    leaf, g = fanin.Leaf(jnp.zeros(3)), jnp.ones(3)
    arrive(leaf, g)
    arrive(leaf, g, g)
    assert leaf.grad.tolist() == [3, 3, 3] and g.tolist() == [1, 1, 1]
