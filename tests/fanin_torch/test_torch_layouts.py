"""`.grad` and `.main_grad` are laid out like their parameter, as torch's own pass makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fanin import dist

torch = pytest.importorskip("torch")
ft = pytest.importorskip("fanin.torch")

pytestmark = pytest.mark.partners

SHAPE = (4, 3, 2, 2)

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, ::2],
    "a piece": lambda x: torch.cat([x, x])[: x.shape[0]],
}


def parameter(layout: str, dtype: Any = torch.float32) -> Any:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.nn.Parameter(LAYOUTS[layout](x))


def data(step: int = 0) -> Any:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(100 + step))


def loss_of(p: Any, step: int = 0) -> Any:
    return torch.nn.functional.conv2d(data(step).to(p.dtype), p).square().sum()


def strides_by_torch(layout: str) -> tuple[int, ...]:
    p = parameter(layout)
    loss_of(p).backward()
    return p.grad.stride()


Way = Callable[[Any], None]


def over_ranks(p: Any) -> None:
    def rank(group: Any) -> None:
        with dist.Reducer([p], group):
            torch.autograd.backward(loss_of(p))

    dist.threads(1, rank, timeout=None)


def block_over_ranks(p: Any) -> None:
    def rank(group: Any) -> None:
        with ft.accumulate([p], group=group):
            loss_of(p).backward()

    dist.threads(1, rank, timeout=None)


def block(p: Any) -> None:
    with ft.accumulate([p]):
        loss_of(p).backward()


def block_of_three(p: Any) -> None:
    with ft.accumulate([p], dtype="exact"):
        for _ in range(3):
            loss_of(p).backward()


def expanded(p: Any) -> None:
    with ft.accumulate([p]):
        p.sum().backward()


def other_strides(p: Any) -> None:
    """The gradient that torch makes is in C order."""

    class Back(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            return torch.ones(SHAPE)

    with ft.accumulate([p]):
        Back.apply(p).backward()


WAYS = [over_ranks, block_over_ranks, block, block_of_three, expanded, other_strides]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_fanin_makes_has_the_strides_that_torch_gives_it(way: Way, layout: str) -> None:
    p = parameter(layout)
    way(p)
    assert p.grad.stride() == strides_by_torch(layout)
    if way in (over_ranks, block_over_ranks, block):
        q = parameter(layout)
        loss_of(q).backward()
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_main_grad_that_a_block_makes_has_them_too(layout: str, dtype: str) -> None:
    p = parameter(layout, getattr(torch, dtype))
    with ft.accumulate([p], into="main_grad"):
        loss_of(p).backward()
    assert p.main_grad.stride() == strides_by_torch(layout)
    assert p.main_grad.dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_earlier_gradient_keeps_its_own_strides(layout: str) -> None:
    p = parameter(layout)
    first = p.grad = torch.ones(SHAPE)
    block(p)
    assert p.grad is first and first.stride() == torch.ones(SHAPE).stride()


def train(layout: str, make: Callable[[Any], Any], reduced: Callable[[Any], Any] | None) -> Any:
    p = parameter(layout)
    optimizer = make(p)
    for step in range(3):
        if reduced is None:
            loss_of(p, step).backward()
        else:
            reduced(p)(loss_of(p, step))
        optimizer.step()
        optimizer.zero_grad()
    return p.detach()


def with_block(p: Any) -> Any:
    def run(loss: Any) -> None:
        with ft.accumulate([p]):
            loss.backward()

    return run


def with_ranks(p: Any) -> Any:
    def rank(group: Any, loss: Any) -> None:
        with dist.Reducer([p], group):
            loss.backward()

    return lambda loss: dist.threads(1, lambda group: rank(group, loss), timeout=None)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted"])
@pytest.mark.parametrize("reduced", [with_block, with_ranks])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_a_fused_optimizer_updates_the_same_elements(name: str, reduced: Any, layout: str) -> None:
    def make(p: Any) -> Any:
        return getattr(torch.optim, name)([p], lr=0.01, fused=True)

    assert torch.equal(train(layout, make, reduced), train(layout, make, None))


@pytest.mark.parametrize("shape", [(8, 4, 1, 1), (6, 1, 3, 3), (1, 5, 1, 1)])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_strides_of_axes_of_one_element_are_the_parameters_too(shape: Any, passes: int, into: str) -> None:
    """torch's fused steps and DDP compare strides by number, also where they make no difference."""
    p = torch.nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))
    x = torch.randn(2, shape[1], 4, 4)
    q = torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format))
    with ft.accumulate([p], into=into):
        for _ in range(passes):
            torch.nn.functional.conv2d(x, p).square().sum().backward()
    for _ in range(passes):
        torch.nn.functional.conv2d(x, q).square().sum().backward()
    sum_ = getattr(p, into)
    assert p.stride() == q.grad.stride() == sum_.stride()
    assert torch.equal(sum_, q.grad)
    assert not sum_._is_view()
