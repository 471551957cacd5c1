"""Parameters of tensor subclasses, and parameters whose gradients cannot be summed into .grad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fanin import dist

torch = pytest.importorskip("torch")
ft = pytest.importorskip("fanin.torch")
torch_leaves = pytest.importorskip("fanin._interop.torch_leaves")

from kit.torch_classes import Disabled, Plain, Wrapped  # noqa: E402

pytestmark = pytest.mark.partners


CLASSES: dict[str, Callable[[Any], Any]] = {
    "a Parameter of a subclass": lambda x: torch.nn.Parameter(x.as_subclass(Plain)),
    "a tensor of a subclass": lambda x: x.as_subclass(Plain).requires_grad_(),
    "a subclass of Parameter": Wrapped,
    "a subclass without the function": Disabled,
    "a Parameter": torch.nn.Parameter,
}


@pytest.fixture(params=CLASSES)
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return CLASSES[request.param]


def pair(make: Callable[[Any], Any]) -> tuple[Any, Any]:
    return torch.nn.Parameter(torch.ones(2)), make(torch.ones(2))


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("order", ["key", "exact", "rank"])
def test_a_reducer_sums_the_gradients_of_every_class_over_ranks(
    make: Callable[[Any], Any], order: Any, zeros: bool
) -> None:
    def rank(group: Any) -> tuple[list[float], list[float], float]:
        a, b = pair(make)
        for p in (a, b):
            p.grad = torch.zeros(2) if zeros else None
        reducer = dist.Reducer([("a", a), ("b", b)], group, order=order)
        with reducer:
            torch.autograd.backward((a + b).sum() * (group.rank + 1))
        return a.grad.tolist(), b.grad.tolist(), reducer.norm()

    assert dist.threads(2, rank, timeout=None) == [([3, 3], [3, 3], 6.0)] * 2


def test_a_block_over_ranks_sums_them(make: Callable[[Any], Any]) -> None:
    def rank(group: Any) -> tuple[list[float], list[float]]:
        a, b = pair(make)
        with ft.accumulate([a, b], group=group, order="exact"):
            for _ in range(2):
                ((a + b).sum() * (group.rank + 1)).backward()
        return a.grad.tolist(), b.grad.tolist()

    assert dist.threads(2, rank, timeout=None) == [([6, 6], [6, 6])] * 2


def test_a_block_without_ranks_sums_them(make: Callable[[Any], Any]) -> None:
    a, b = pair(make)
    with ft.accumulate([a, b]):
        for _ in range(3):
            (a + 2 * b).sum().backward()
    assert a.grad.tolist() == [3, 3] and b.grad.tolist() == [6, 6]


@pytest.mark.parametrize("both", [False, True])
def test_inputs_of_every_class_get_their_gradients(make: Callable[[Any], Any], both: bool) -> None:
    a, b = pair(make)
    torch.autograd.backward((b * 2 + a).sum(), inputs=[b, a] if both else [b])
    expected = [None if x.grad is None else x.grad.tolist() for x in (a, b)]
    a, b = pair(make)
    ft.backward((b * 2 + a).sum(), inputs=[b, a] if both else [b])
    assert [None if x.grad is None else x.grad.tolist() for x in (a, b)] == expected


def test_a_leaf_of_a_subclass_may_be_a_root(make: Callable[[Any], Any]) -> None:
    _, b = pair(make)
    ft.backward(b, torch.ones(2))
    assert b.grad.tolist() == [1, 1]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "coo": (lambda: torch.sparse_coo_tensor([[0]], [1.0], (3,)).requires_grad_(), TypeError, "layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(2).to_sparse_csr().requires_grad_(), TypeError, "layout torch.sparse_csr"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn().requires_grad_(), TypeError, "layout torch._mkldnn"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_that_cannot_be_summed_are_refused_by_name(kind: str) -> None:
    parameter, error, words = REFUSED[kind]

    def over_ranks(group: Any) -> None:
        w = torch.ones(2, requires_grad=True)
        with dist.Reducer([("w", w), ("odd", parameter())], group):
            w.sum().backward()

    with pytest.raises(error, match=f"accumulate: odd .*{words}"), ft.accumulate([("odd", parameter())]):
        pass
    with pytest.raises(error, match=f"Reducer: odd .*{words}"):
        dist.threads(1, over_ranks, timeout=None)


def test_a_block_that_cannot_begin_leaves_its_parameters_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    p, odd = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    own = torch_leaves.accumulator
    monkeypatch.setattr(torch_leaves, "accumulator", lambda leaf: None if leaf is odd else own(leaf))
    with pytest.raises(RuntimeError, match=r"odd .* has no AccumulateGrad node"), ft.accumulate([p, ("odd", odd)]):
        pass
    with ft.accumulate([p]):
        p.sum().backward()
    assert p.grad.tolist() == [1, 1]
