"""fanin.torch: sums of micro-batches beside torch's own accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fanin

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]

torch = pytest.importorskip("torch", reason="torch is not installed")

Run = Callable[[Any], None]


def network(dtype: Any = None) -> Any:
    torch.manual_seed(3)
    parts = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*parts).to(dtype or torch.bfloat16)


def passes(model: Any, n: int = 48) -> list[Run]:
    """n backward passes, one micro-batch each."""
    torch.manual_seed(4)
    dtype = next(model.parameters()).dtype

    def one(x: Any) -> Run:
        return lambda model: model(x).square().mean().backward()

    return [one(torch.randn(4, 6).to(dtype)) for _ in range(n)]


def each(model: Any, runs: list[Run]) -> list[list[Any]]:
    """The gradients of every pass by itself, a list for each parameter."""
    got: list[list[Any]] = [[] for _ in model.parameters()]
    for run in runs:
        model.zero_grad()
        run(model)
        for k, p in enumerate(model.parameters()):
            got[k].append(p.grad)
    model.zero_grad()
    return got


@pytest.mark.parametrize("budget", [0, 100, None])
@pytest.mark.parametrize("dtype", [None, "float32", "float64", "exact"])
def test_the_sum_is_rounded_once_where_torch_rounds_every_time(dtype: Any, budget: Any) -> None:
    model = network()
    runs = passes(model)
    alone = each(model, runs)
    accumulate = getattr(torch, dtype) if dtype in ("float32", "float64") else dtype
    with fanin.torch.accumulate(model.parameters(), dtype=accumulate, budget=budget):
        for run in runs:
            run(model)
            assert all(p.grad is None for p in model.parameters())
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    worse = 0
    for grads, p, sum_ in zip(alone, model.parameters(), ours, strict=True):
        true = torch.stack(grads).double().sum(0)
        assert sum_.dtype == torch.bfloat16
        if dtype in ("float64", "exact"):
            assert torch.equal(sum_, true.bfloat16())
        else:
            assert (sum_.double() - true).abs().max() <= 2**-8 * true.abs().max()
        worse += int((p.grad.double() - true).norm() > 2 * (sum_.double() - true).norm())
    assert worse == len(ours), "torch's own is worse, or there was nothing to mend"


def test_float32_sums_are_those_of_torch_bit_by_bit() -> None:
    model = network(torch.float32)
    runs = passes(model, 5)
    with fanin.torch.accumulate(model.parameters()):
        for run in runs:
            run(model)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_a_gradient_that_is_there_is_the_first_term_and_an_optimizer_goes_on_from_the_sum() -> None:
    model = network(torch.float64)
    runs = passes(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs[0](model)
    kept = [p.grad for p in model.parameters()]
    values = [g.clone() for g in kept]
    collected = fanin.torch.accumulate(model.parameters())
    with collected:
        for run in runs[1:]:
            run(model)
    ours = [p.grad.clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True)), "what others hold is not written"
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))
    optimizer.step()
    model.zero_grad()
    with collected:  # once more
        runs[0](model)
    assert all(p.grad is not None for p in model.parameters())
    runs[0](model)  # the hooks are gone
    assert all(p.grad is not None for p in model.parameters())


def test_what_came_before_an_error_is_left_and_the_error_goes_on() -> None:
    model = network(torch.float32)
    runs = passes(model, 2)
    with pytest.raises(ZeroDivisionError), fanin.torch.accumulate(model.parameters()):
        for run in runs:
            run(model)
        1 / 0
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_what_gets_no_gradient_keeps_none_and_frozen_ones_are_passed_over() -> None:
    model = network(torch.float32)
    model[0].weight.requires_grad_(False)
    other = torch.nn.Parameter(torch.ones(2))
    with fanin.torch.accumulate([*model.parameters(), other, other]):
        passes(model, 1)[0](model)
    assert other.grad is None
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("there", [False, True])
def test_main_grad_keeps_the_dtype_of_the_sum(there: bool) -> None:
    model = network()
    runs = passes(model)
    alone = each(model, runs)
    before = [torch.full(p.shape, 0.5) for p in model.parameters()]
    for p, b in zip(model.parameters(), before, strict=True):
        if there:
            p.main_grad = b
    with fanin.torch.accumulate(model.named_parameters(), dtype=torch.float32, into="main_grad"):
        for run in runs:
            run(model)
    for p, b, grads in zip(model.parameters(), before, alone, strict=True):
        start = torch.full(p.shape, 0.5) if there else -torch.zeros(p.shape)
        want = torch.zeros(0)
        for g in [start, *grads] if there else grads:
            want = g.float() if want.numel() == 0 else want + g.float()
        assert p.grad is None
        assert p.main_grad.dtype == torch.float32
        assert torch.equal(p.main_grad, want)
        assert (p.main_grad is b) == there


def test_sparse_gradients_stay_sparse() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    rows = [torch.tensor([1, 4]), torch.tensor([4, 7])]
    with fanin.torch.accumulate(table.parameters()):
        for r in rows:
            table(r).sum().backward()
    assert table.weight.grad.is_sparse
    want = torch.zeros(10, 3)
    want[[1, 7]] = 1
    want[4] = 2
    assert torch.equal(table.weight.grad.to_dense(), want)


def test_nonsense_is_refused_and_says_what_is_expected() -> None:
    model = network(torch.float32)
    weight = model[0].weight
    with pytest.raises(TypeError, match=r"expected several tensors, got one: give \[tensor\]"):
        fanin.torch.accumulate(weight)
    with pytest.raises(TypeError, match=r"got a int as parameters\[1\]"):
        fanin.torch.accumulate([weight, 3])
    with pytest.raises(TypeError, match=r"parameters\[0\] is no leaf"):
        fanin.torch.accumulate([weight * 2])
    with pytest.raises(ValueError, match="into is"):
        fanin.torch.accumulate([weight], into="grads")
    with fanin.torch.accumulate(model.named_parameters()):
        with pytest.raises(ValueError, match=r"the gradient of parameters\[0\] is collected by another block already, as 0.weight"):
            fanin.torch.accumulate([weight]).__enter__()
        passes(model, 1)[0](model)
    assert weight.grad is not None
    weight.grad = None
    weight.main_grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"accumulate: slot 0 \(w\).*expected"), fanin.torch.accumulate([("w", weight)], into="main_grad"):
        pass
    with fanin.torch.accumulate([weight]):  # and it is free again
        pass


def test_a_block_that_cannot_begin_leaves_every_gradient_there() -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    for k, p in enumerate((first, second, third)):
        p.grad = torch.full((2,), float(k))

    def refuse(hook: Any) -> None:
        raise RuntimeError("no hooks today")

    second.register_post_accumulate_grad_hook = refuse
    with pytest.raises(RuntimeError, match="no hooks today"):
        fanin.torch.accumulate([first, second, third]).__enter__()
    assert [p.grad.tolist() for p in (first, second, third)] == [[0, 0], [1, 1], [2, 2]]
