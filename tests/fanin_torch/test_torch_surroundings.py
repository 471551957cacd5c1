"""fanin.torch in a forked child, under torch.compile, with hooks that raise, and one call within another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.support import run_python

pytestmark = pytest.mark.partners

torch = pytest.importorskip("torch", reason="torch is not installed")
ft = pytest.importorskip("fanin.torch")

FACTORS = (1.0, 1.0, 256.0)  # their sum in bfloat16 is 258, and 256 if it is rounded after each


def weight() -> Any:
    return torch.ones(2, dtype=torch.bfloat16, requires_grad=True)


def loss_of(w: Any) -> Any:
    return sum((w * x).sum() for x in FACTORS)


# A forked child


#: torch refuses a pass in a child of a process that has had a thread for passes, as other tests may have.
FORKS = """
import torch
import fanin.torch as ft
from kit.child import in_child
"""


def test_a_block_that_is_open_at_a_fork_goes_on_in_both_processes() -> None:
    done = run_python(f"""{FORKS}
w = torch.ones(2, requires_grad=True)
def child():
    (w * 5).sum().backward()
    block.__exit__(None, None, None)
    assert w.grad.tolist() == [7.0, 7.0]
block = ft.accumulate([w])
with block:
    (w * 2).sum().backward()
    assert in_child(child) == 0
    (w * 3).sum().backward()
print(w.grad.tolist())
""")
    assert done.stdout.split("\n") == ["[5.0, 5.0]", ""]


def test_a_child_that_is_forked_in_a_pass_has_passes_of_its_own() -> None:
    done = run_python(f"""{FORKS}
def weight():
    return torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
def loss_of(w):
    return sum((w * x).sum() for x in (256.0, 1.0, 1.0))
def child():
    other = weight()
    with torch.enable_grad():
        ft.backward(loss_of(other))
    assert other.grad.tolist() == [258.0, 258.0]
w, codes = weight(), []
y = w * 1
y.register_hook(lambda _: codes.append(in_child(child)))
ft.backward(loss_of(y))
print(codes, w.grad.tolist())
""")
    assert done.stdout.split("\n") == ["[0] [258.0, 258.0]", ""]


# torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable[[Any], Any]]:
    yield lambda f: torch.compile(f, backend="eager")
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ["accumulate", "backward"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_a_loop_that_is_compiled_has_the_bits_of_the_loop(call: str, inside: bool, compiled: Any) -> None:
    """inside: what is compiled calls fanin."""

    def losses(w: Any) -> list[Any]:
        return [(w * x).sum() for x in FACTORS]

    def loop(w: Any, each: Callable[[Any], list[Any]]) -> None:
        if call == "backward":
            ft.backward(sum(each(w)))
            return
        with ft.accumulate([w]):
            for loss in each(w):
                loss.backward()

    w = weight()
    if inside:
        compiled(lambda: loop(w, losses))()
    else:
        loop(w, compiled(losses))
    assert w.grad.tolist() == [258.0, 258.0]


# Hooks that raise, and calls within calls


def test_a_hook_that_raises_in_a_block_leaves_the_gradients_of_the_other_passes() -> None:
    p, q = (torch.ones(2, requires_grad=True) for _ in range(2))
    with ft.accumulate([p, q]):
        (p * 2 + q).sum().backward()
        hook = p.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (p * 3).sum().backward()
        hook.remove()
        (p * 5 + q).sum().backward()
    assert p.grad.tolist() == [7.0, 7.0] and q.grad.tolist() == [2.0, 2.0]


def test_a_hook_that_raises_in_a_pass_leaves_grad_as_it_was() -> None:
    w = weight()
    w.grad = torch.ones_like(w)
    hook = w.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ft.backward(loss_of(w))
    assert w.grad.tolist() == [1.0, 1.0]
    hook.remove()
    w.grad = None
    ft.backward(loss_of(w))
    assert w.grad.tolist() == [258.0, 258.0]


def test_a_pass_within_a_block_within_an_audit_is_right() -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], 1.0)
    with ft.audit([("w", w)], optimizer, every=1) as audit:
        with ft.accumulate([w]):
            for _ in range(2):
                ft.backward(loss_of(w))
        optimizer.step()
    assert w.grad.tolist() == [516.0, 516.0]
    assert [row.verdict for row in audit.rows if row.parameter == "w"] == ["right"], str(audit)


def test_a_dtype_that_changes_in_a_block_is_named_and_the_others_have_their_sums() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    named = r"^accumulate: there is no \.grad for the sum of p: "
    with pytest.raises(RuntimeError, match=named), ft.accumulate([("p", p), ("q", q)]):
        (p + q).sum().backward()
        p.data = p.data.bfloat16()
        (q * 2).sum().backward()
    assert p.grad is None and q.grad.tolist() == [3.0, 3.0]


def test_a_module_whose_parameter_is_replaced_in_a_block_has_torchs_gradient_in_the_new_one() -> None:
    """As in torch: `load_state_dict(assign=True)` makes parameters that no one has seen before."""
    layer = torch.nn.Linear(2, 1, bias=False)
    old = layer.weight
    with ft.accumulate(layer.parameters()):
        layer(torch.ones(1, 2)).sum().backward()
        layer.load_state_dict({"weight": torch.zeros(1, 2)}, assign=True)
        layer(2 * torch.ones(1, 2)).sum().backward()
    assert old.grad.tolist() == [[1.0, 1.0]] and layer.weight is not old
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]


def test_a_parameter_that_is_frozen_for_a_pass_of_a_block_lacks_that_pass_alone() -> None:
    p, q = (torch.ones(2, requires_grad=True) for _ in range(2))
    with ft.accumulate([p, q]):
        (p + q).sum().backward()
        p.requires_grad_(False)
        (p * 8 + q).sum().backward()
        p.requires_grad_()
        (p * 2 + q).sum().backward()
    assert p.grad.tolist() == [3.0, 3.0] and q.grad.tolist() == [3.0, 3.0]


# Functions that write their gradients into memory that they keep, as `torch.cuda.make_graphed_callables` makes them


class Static(torch.autograd.Function):  # type: ignore[misc]
    """A product, whose gradients have one memory for all passes."""

    @staticmethod
    def forward(ctx: Any, w: Any, factor: float, memory: Any) -> Any:
        ctx.factor, ctx.memory = factor, memory
        return w * factor

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        ctx.memory.copy_(g * ctx.factor)
        return ctx.memory.detach(), None, None


DOUBLING = (1.0, 2.0, 4.0)  # a .grad that shares the memory ends with 8


@pytest.mark.parametrize("n", [2, 70_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_one_memory_are_summed_where_torch_sums_the_last_one_twice(n: int, dtype: str) -> None:
    w = torch.ones(n, dtype=getattr(torch, dtype), requires_grad=True)
    memory = torch.empty_like(w)

    def passes() -> list[float]:
        w.grad = None
        for factor in DOUBLING:
            Static.apply(w, factor, memory).sum().backward()
        return w.grad.unique().tolist()

    assert passes() == [8.0]
    w.grad = None
    with ft.accumulate([w]):
        for factor in DOUBLING:
            Static.apply(w, factor, memory).sum().backward()
    assert w.grad.unique().tolist() == [7.0]


def test_an_audit_names_a_sum_that_shares_its_memory_with_the_gradients() -> None:
    w = torch.ones(300, requires_grad=True)
    memory = torch.empty_like(w)
    optimizer = torch.optim.SGD([w], 1.0)
    with ft.audit([("w", w)], optimizer, every=1) as audit:
        for factor in DOUBLING:
            Static.apply(w, factor, memory).sum().backward()
        optimizer.step()
    [row] = [row for row in audit.rows if row.parameter == "w"]
    assert row.verdict == "fault" and row.happened.startswith("arrival 1 counts twice (after arrival 1)"), str(audit)


# One tensor at several places of a Function, and optimizers that step in the pass


class Twice(torch.autograd.Function):  # type: ignore[misc]
    """A sum, whose gradients differ: one of them is undefined."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any) -> Any:
        return a + b + c

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g, None, g * 256


@pytest.mark.parametrize("call", ["backward", "at", "accumulate"])
def test_each_place_of_a_function_that_takes_one_tensor_counts(call: str) -> None:
    w = weight()
    loss = Twice.apply(w, w, w).sum() + w.sum()
    if call == "accumulate":
        with ft.accumulate([w], dtype=torch.float32):
            loss.backward()
    else:
        ft.backward(loss, at=[w] if call == "at" else [])
    assert w.grad.tolist() == [258.0, 258.0]


def test_an_optimizer_that_steps_in_each_pass_steps_once_for_a_block() -> None:
    w = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([w], 1.0)
    steps = []

    def step(_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()
        steps.append(w.tolist())

    hook = w.register_post_accumulate_grad_hook(step)
    with ft.accumulate([w]):
        for _ in range(4):
            (w.sum() / 4).backward()
    assert steps == [[-1.0, -1.0]]
    hook.remove()
    with (
        pytest.raises(RuntimeError, match=r"^accumulate: SGD\.step\(\) within the block steps nothing of w, "),
        ft.accumulate([("w", w)]),
    ):
        w.register_post_accumulate_grad_hook(step)  # too late: it runs in the pass
        w.sum().backward()
