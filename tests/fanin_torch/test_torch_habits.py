"""What loops do beside their passes: hooks that replace gradients, copies, frozen parameters, workspaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import fanin

pytestmark = pytest.mark.partners

torch = pytest.importorskip("torch", reason="torch is not installed")

BF16 = torch.bfloat16


def parameter(*values: float, dtype: Any = BF16) -> Any:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def replaced_at(where: str, other: Any, uses: int, backward: Callable[[Any], None]) -> Any:
    """The gradient of a weight, of which a hook has replaced a part by a tensor that requires a gradient."""
    w = parameter(1.0, 2.0)
    terms = [w * x for x in range(1, uses + 1)]

    def hook(made: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        with torch.enable_grad():
            return (other * 2, *made[1:])

    if where == "leaf":
        w.register_hook(lambda _: other)
    if where == "value":
        terms[0].register_hook(lambda _: other)
    for node in {"first": terms[:1], "last": terms[-1:], "every": terms}.get(where, ()):
        node.grad_fn.register_hook(hook)
    backward(sum(t.sum() for t in terms))
    return w.grad


@pytest.mark.parametrize("where", ["leaf", "value", "first", "last", "every"])
@pytest.mark.parametrize("uses", [2, 3, 5])
def test_a_hook_that_returns_a_gradient_that_requires_one_is_as_in_torch(where: str, uses: int) -> None:
    other = torch.tensor([3.0, 5.0], dtype=BF16, requires_grad=True)
    expected = replaced_at(where, other, uses, lambda loss: loss.backward())
    for how in ({}, {"accumulate": torch.float32}):
        got = replaced_at(where, other, uses, lambda loss, how=how: fanin.torch.backward(loss, **how))
        assert torch.equal(got, expected)
        assert not got.requires_grad and got.grad_fn is None
    assert other.grad is None and other.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("where", ["leaf", "first"])
def test_a_block_refuses_it_by_name(where: str) -> None:
    other = torch.tensor([3.0, 5.0], dtype=BF16, requires_grad=True)
    w = parameter(1.0, 2.0)
    with (
        pytest.raises(RuntimeError, match=r"^accumulate: the gradient of w records a graph .* return x\.detach\(\)"),
        fanin.torch.accumulate([("w", w)]),
    ):
        y = w * 2
        if where == "leaf":
            w.register_hook(lambda _: other)
        else:
            y.grad_fn.register_hook(lambda made, _: (other, *made[1:]))
        y.sum().backward()


@pytest.mark.parametrize("n", [4, 100_000])
@pytest.mark.parametrize("how", [{}, {"dtype": "exact"}, {"budget": 1e9}, {"into": "main_grad"}])
def test_a_workspace_that_a_function_returns_in_each_pass_is_copied(n: int, how: dict[str, Any]) -> None:
    workspace = torch.zeros(n, dtype=BF16)

    class Reused(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, w: Any, k: float) -> Any:
            ctx.k = k
            return w.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return workspace.fill_(ctx.k), None

    w = torch.nn.Parameter(torch.zeros(n, dtype=BF16))
    with fanin.torch.accumulate([w], **how):
        for k in (1.0, 2.0, 3.0):
            Reused.apply(w, k).sum().backward()
    total = w.main_grad if "into" in how else w.grad
    assert total.unique().tolist() == [6.0]
    assert workspace.unique().tolist() == [3.0]


def test_a_model_that_is_copied_within_a_block_has_gradients_of_its_own() -> None:
    model = torch.nn.Linear(2, 2)
    with fanin.torch.accumulate(model.parameters()):
        model(torch.ones(1, 2)).sum().backward()
        average = copy.deepcopy(model)
        average(torch.ones(1, 2)).sum().backward()
        assert average.bias.grad.tolist() == [1.0, 1.0]
        model(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad.tolist() == [2.0, 2.0] and average.bias.grad.tolist() == [1.0, 1.0]


def test_parameters_that_are_frozen_for_some_passes_have_the_sums_of_the_others() -> None:
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0)
    with fanin.torch.accumulate([p, q]):
        for _ in range(3):
            q.requires_grad_(False)
            (p + q).sum().backward()
            q.requires_grad_(True)
            (p.detach() + q * 2).sum().backward()
        q.requires_grad_(False)
    assert p.grad.tolist() == [3.0, 3.0] and q.grad.tolist() == [6.0, 6.0]


def test_an_overflow_in_one_micro_batch_skips_the_step_of_a_scaler() -> None:
    w = parameter(1.0, 1.0, dtype=torch.float32)
    optimizer = torch.optim.SGD([w], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factors, expected in [((1.0, float("inf"), 1.0), [1.0, 1.0]), ((1.0, 1.0, 1.0), [-2.0, -2.0])]:
        with fanin.torch.accumulate([w]):
            for x in factors:
                scaler.scale((w * x).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert w.tolist() == expected
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_weight_that_checkpoints_share_is_summed_once_and_stepped_once_or_refused(reentrant: bool) -> None:
    layer = torch.nn.Linear(4, 4)
    seen: list[Any] = []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    x = torch.ones(2, 4, requires_grad=True)

    def loss() -> Any:
        y = x
        for _ in range(3):
            y = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=reentrant)
        return layer(y).sum()

    loss().backward()
    expected, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
    assert len(seen) == (4 if reentrant else 1)
    seen.clear()
    with fanin.torch.accumulate(layer.parameters()):
        loss().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    assert seen == [layer.weight]
    layer.zero_grad()
    block = fanin.torch.accumulate(layer.named_parameters())
    if not reentrant:
        with block, block.last(lambda _: None):
            loss().backward()
        return
    second = pytest.raises(RuntimeError, match=r"a second gradient of .* of reentrant checkpoints that share it")
    with second, block, block.last(lambda _: None):
        loss().backward()


def test_a_hook_runs_once_for_a_sum_that_a_kernel_adds_to() -> None:
    seen: list[bool] = []

    class Product(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            ctx.w = w
            return x @ w

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            x, w = ctx.saved_tensors
            with block.target(ctx.w) as total:
                total.addmm_(x.t().float(), g[0].float())
            return g[0] @ w.t(), None

    w = torch.nn.Parameter(torch.ones(3, 3, dtype=BF16))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    with fanin.torch.accumulate([w]) as block:
        for _ in range(3):
            Product.apply(torch.ones(2, 3, dtype=BF16, requires_grad=True), w).sum().backward()
    assert seen == [True] and w.grad.unique().tolist() == [6.0]
