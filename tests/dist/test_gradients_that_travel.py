"""A large leaf alone in its bucket: a gradient that nothing else has travels from its own memory, any other is copied,
and `.grad` takes the sum without a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import reducer as reducer_module
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer
from kit.messages import Messages
from kit.values import bits

pytestmark = pytest.mark.core

SIZE = 1 << 16  #: elements of float32: 256 KiB


def value(k: int) -> Any:
    return np.random.default_rng(k).standard_normal(SIZE, "f4")


def leaf_with(make: Any) -> tuple[fanin.Leaf, Any]:
    """A leaf, and a root whose node makes its gradient."""
    w = fanin.Leaf(np.zeros(SIZE, "f4"), name="w")
    return w, [(fanin.Node(make, edges=[(w, 0)]), 0, np.ones(1, "f4"))]


@pytest.mark.parametrize("weight", [None, 0.3])
@pytest.mark.parametrize("order", [None, "key", "rank", "exact"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_of_gradients_that_travel_have_the_bits_of_others(order: Any, n: int, weight: float | None) -> None:
    def rank(group: Group) -> bool:
        def at_once(count: int) -> Any:
            weights = None if weight is None else [weight] * count
            return dist.add_n([value(group.rank)] * count, group, order, weights=weights)

        w, roots = leaf_with(lambda g: value(group.rank))
        reducer = Reducer([w], group, order=order)
        for _ in range(2):
            w.grad = None
            fanin.backward(roots, reducer=reducer, keep_graph=True, weight=weight)
            once = bits(w.grad) == bits(at_once(1))
        w.grad = None
        for _ in range(3):
            with reducer.accumulate(weight=weight):
                fanin.backward(roots, keep_graph=True)
        fanin.backward(roots, reducer=reducer, keep_graph=True, weight=weight)
        return once and bits(w.grad) == bits(at_once(4))

    assert dist.threads(n, rank, timeout=None) == [True] * n


@pytest.mark.parametrize("shape", [(SIZE,), (256, 256), (1, SIZE)])
def test_grad_is_the_array_in_which_the_sum_was_made(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Messages(monkeypatch)

    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros(shape, "f4"), name="w")
        roots = [(fanin.Node(lambda g: np.full(shape, 2.0, "f4"), edges=[(w, 0)]), 0, np.ones(1, "f4"))]
        reducer = Reducer([w], group)
        fanin.backward(roots, reducer=reducer, keep_graph=True)
        return w.grad.base is None and w.grad.flags.owndata, w.grad.shape, float(w.grad.sum())

    assert dist.threads(2, rank, timeout=None) == [(True, shape, 4.0 * SIZE)] * 2
    assert messages.most <= 2 * 4 * SIZE // 2  # each rank receives half of a gradient, and copies none


def test_a_gradient_whose_memory_another_object_has_is_copied() -> None:
    def rank(group: Group) -> Any:
        scratch = np.empty(SIZE, "f4")
        made: list[Any] = []

        def reused(g: Any) -> Any:
            scratch.fill(len(made) + 1)
            made.append(1)
            return scratch

        w, roots = leaf_with(reused)
        reducer = Reducer([w], group, order="rank")
        for _ in range(3):
            with reducer.accumulate():
                fanin.backward(roots, keep_graph=True)
            scratch.fill(100)
        fanin.backward(roots, reducer=reducer, keep_graph=True)
        return float(w.grad[0]), float(scratch[0])

    assert dist.threads(2, rank, timeout=None) == [(20.0, 4.0)] * 2


def test_a_gradient_in_another_layout_is_copied() -> None:
    def rank(group: Group) -> Any:
        w = fanin.Leaf(np.zeros((2, SIZE // 2), "f4"), name="w")
        made = np.arange(SIZE, dtype="f4")
        node = fanin.Node(lambda g: np.asfortranarray(made.reshape(2, -1) * 1), edges=[(w, 0)])
        fanin.backward([(node, 0, np.ones(1, "f4"))], reducer=Reducer([w], group))
        return bits(w.grad) == bits(2 * made)

    assert dist.threads(2, rank, timeout=None) == [True] * 2


def test_after_a_pass_that_raises_behind_a_gradient_that_travels_the_next_one_is_right() -> None:
    def rank(group: Group) -> Any:
        made, bad = fanin.Leaf(np.zeros(SIZE, "f4"), name="made"), fanin.Leaf(np.zeros(SIZE, "f4"), name="bad")
        fails = [group.rank == 1]
        good = fanin.Node(lambda g: np.full(SIZE, 2.0, "f4"), edges=[(made, 0)])
        may = fanin.Node(lambda g: 1 / 0 if fails[0] else np.ones(SIZE, "f4"), edges=[(bad, 0)])
        one = np.ones(1, "f4")
        reducer = Reducer([bad, made], group, bucket_bytes=4 * SIZE)
        with pytest.raises(ZeroDivisionError if group.rank else fanin.PeerError):
            fanin.backward([(may, 0, one), (good, 0, one)], reducer=reducer, keep_graph=True)
        assert made.grad is bad.grad is None
        fails[0] = False
        fanin.backward([(may, 0, one), (good, 0, one)], reducer=reducer)
        return float(made.grad[0]), float(bad.grad[0])

    assert dist.threads(2, rank, timeout=None) == [(4.0, 2.0)] * 2


# ---------------------------------------------------------------- torch


def torch_sums(group: Group, keep: bool) -> Any:
    """Whether sums of torch's gradients are right, if a hook that keeps each writes to it after its pass."""
    torch = pytest.importorskip("torch")
    wrong = []
    for order in (None, "key", "rank", "exact"):
        p = torch.nn.Parameter(torch.zeros(SIZE))
        kept: list[Any] = []
        if keep:
            p.register_hook(kept.append)
        reducer = Reducer([("p", p)], group, order=order)
        terms = [torch.from_numpy(value(group.rank + k)) for k in range(3)]
        for k, term in enumerate(terms):
            with reducer if k == 2 else reducer.accumulate():
                torch.autograd.backward((p * term).sum())
                for one in kept:
                    one.detach().fill_(100)
        if bits(p.grad.numpy()) != bits(dist.add_n([value(group.rank + k) for k in range(3)], group, order)):
            wrong.append(order)
    return wrong


@pytest.mark.partners
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_torch_travel_or_are_copied(keep: bool, n: int) -> None:
    assert dist.threads(n, lambda group: torch_sums(group, keep), timeout=None) == [[]] * n


@pytest.mark.partners
def test_a_gradient_of_torch_travels_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    messages = Messages(monkeypatch)

    def rank(group: Group) -> Any:
        p = torch.nn.Parameter(torch.zeros(SIZE))
        with Reducer([("p", p)], group):
            torch.autograd.backward((p * 2).sum())
        return float(p.grad.sum())

    assert dist.threads(2, rank, timeout=None) == [4.0 * SIZE] * 2
    assert messages.most <= 2 * (4 * SIZE + 4 * SIZE // 2)  # the sum, and half of a gradient that is received


@pytest.mark.partners
def test_a_large_parameter_whose_shape_has_changed_is_named_with_both_shapes() -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.ones(SIZE))
        reducer = Reducer([("w", w)], group)
        w.data = torch.ones(SIZE // 2)
        with pytest.raises(ValueError, match=r"w: expected float32 of shape \(65536,\), got"), reducer:
            torch.autograd.backward((w * 2).sum())

    dist.threads(1, rank, timeout=None)


@pytest.mark.partners
def test_a_gradient_that_is_not_copied_although_a_hook_has_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = pytest.importorskip("fanin._interop.torch_leaves")

    class Everything:
        def __contains__(self, counts: object) -> bool:
            return True

    monkeypatch.setattr(leaves, "counts_alone", Everything)
    wrong = dist.threads(2, lambda group: torch_sums(group, True), timeout=None)
    assert all("key" in one for one in wrong)


def test_the_bytes_of_a_gradient_that_cannot_be_written_are_not_kept() -> None:
    x = np.ones(SIZE, "f4")
    leaf = reducer_module.Leaf("w", (SIZE,), "float32")
    assert reducer_module.bytes_of(x, leaf) is not None
    x.flags.writeable = False
    assert reducer_module.bytes_of(x, leaf) is None
    assert reducer_module.bytes_of(x.astype("f8"), leaf) is None
