"""What torch has since 2.13: each feature with fanin as with torch alone, where the torch that is installed has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fanin import dist

torch: Any = pytest.importorskip("torch")
ft = pytest.importorskip("fanin.torch")

pytestmark = pytest.mark.partners

#: The pass of fanin.
BACKWARD = ft.backward
PASSES = [torch.autograd.backward, BACKWARD]

CONTEXT = torch.autograd.function.FunctionCtx
BF16 = torch.bfloat16


def ones(dtype: Any = None) -> Any:
    return torch.ones(2, dtype=dtype, requires_grad=True)


def used(x: Any) -> Any:
    """A tensor's gradients meet four at a time, and rounding each sum to bfloat16 changes the result."""
    return sum((x * c).sum().float() for c in (1.0, 1.0, 1.0, 256.0))


# ---------------------------------------------------------------- the dtype of a Function's gradients


class InFloat32(torch.autograd.Function):  # type: ignore[misc]
    """Its backward takes a float32 gradient of a bfloat16 output."""

    @staticmethod
    def forward(ctx: Any, x: Any, seen: list[Any]) -> Any:
        ctx.set_output_grad_dtype(torch.float32)
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        ctx.seen.append((g[0].dtype, g[0].tolist()))
        return g[0].to(BF16), None


class Constant(torch.autograd.Function):  # type: ignore[misc]
    """Its gradient is float32."""

    @staticmethod
    def forward(ctx: Any, x: Any, c: float) -> Any:
        ctx.c = c
        return (x * c).sum().float()

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return torch.full((2,), ctx.c), None


def declares_a_dtype(backward: Callable[..., None], **options: Any) -> Any:
    seen: list[Any] = []
    x = ones(BF16)
    y = InFloat32.apply(x, seen)
    named = {"at": [y]} if options.pop("at", False) else {}
    backward(sum(Constant.apply(y, c) for c in (256.0, 1.0, 1.25)), **named, **options)
    return seen, x.grad.tolist()


@pytest.mark.skipif(not hasattr(CONTEXT, "set_output_grad_dtype"), reason="torch has it since 2.14")
def test_a_function_gets_gradients_in_the_dtype_that_it_declared() -> None:
    theirs, ours = map(declares_a_dtype, PASSES)
    assert ours == theirs
    [(dtype, values)] = ours[0]
    assert dtype == torch.float32 and values == [258.25, 258.25]  # bfloat16 has no such number
    for asked in ({"accumulate": "float32"}, {"at": True}):
        with pytest.raises(RuntimeError, match=r"expected torch\.bfloat16 .*, got torch\.float32"):
            declares_a_dtype(BACKWARD, **asked)


@pytest.mark.skipif(not hasattr(CONTEXT, "set_output_grad_dtype"), reason="torch has it since 2.14")
def test_a_block_sums_the_gradients_of_such_a_function() -> None:
    x, seen = ones(BF16), list[Any]()
    with ft.accumulate([x]):
        for c in (256.0, 1.0, 1.0):
            Constant.apply(InFloat32.apply(x, seen), c).backward()
    assert x.grad.dtype == BF16 and x.grad.tolist() == [258.0, 258.0]
    assert [dtype for dtype, _ in seen] == [torch.float32] * 3


# ---------------------------------------------------------------- layouts


def strides(backward: Callable[..., None], times: int, dtype: Any) -> Any:
    p = torch.ones(3, 2, dtype=dtype).t().requires_grad_()
    factor = torch.arange(6.0).reshape(2, 3).to(dtype)
    with torch.autograd.enforce_grad_layout_policy(False):
        backward(sum((p * factor).sum() for _ in range(times)))
    return p.grad.stride(), p.grad.tolist()


@pytest.mark.skipif(not hasattr(torch.autograd, "enforce_grad_layout_policy"), reason="this torch lacks it")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_pass_without_the_layout_policy_leaves_gradients_as_torch_does(times: int, dtype: Any) -> None:
    theirs, ours = (strides(backward, times, dtype) for backward in PASSES)
    assert ours == theirs
    assert ours[0] == (3, 1)  # the parameter has (1, 2)


@pytest.mark.skipif(not hasattr(torch.autograd, "enforce_grad_layout_policy"), reason="this torch lacks it")
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_block_has_the_layout_of_the_parameter_without_the_policy_too(into: Any) -> None:
    p = torch.ones(3, 2).t().requires_grad_()
    with torch.autograd.enforce_grad_layout_policy(False), ft.accumulate([p], into=into):
        (p * torch.arange(6.0).reshape(2, 3)).sum().backward()
    assert getattr(p, into).stride() == p.stride()
    assert getattr(p, into).tolist() == [[0, 1, 2], [3, 4, 5]]


# ---------------------------------------------------------------- inputs by name


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("kind", [dict, iter, tuple])
def test_inputs_may_be_a_dict_as_in_torch(kind: Any, times: int) -> None:
    found = []
    for backward in PASSES:
        p, q = ones(BF16), ones(BF16)
        inputs = {"p": p} if kind is dict else kind([p])
        backward(sum((p * q * c).sum().float() for c in (256.0, 1.0, 1.0)[:times]), inputs=inputs)
        assert q.grad is None
        found.append(p.grad.tolist())
    assert found[0] == found[1]


# ---------------------------------------------------------------- boxed gradients


class Boxed(torch.autograd.Function):  # type: ignore[misc]
    """Its backward takes its gradients as one list, which it empties."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, seen: list[Any]) -> Any:
        ctx.seen = seen
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *boxed: Any) -> Any:
        [grads] = boxed
        ctx.seen.append((type(grads).__name__, [g.tolist() for g in grads]))
        a, b = grads
        grads.clear()
        return a * 2, b * 3, None


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_boxed_function_gets_a_list_of_the_sums(dtype: Any) -> None:
    found = []
    for backward in PASSES:
        seen: list[Any] = []
        x, y = ones(dtype), ones(dtype)
        u, v = Boxed.apply(x, y, seen)
        w, _ = Boxed.apply(x, x, seen)
        backward(sum((u * c).sum().float() for c in (256.0, 2.0, 2.0)) + v.sum() + w.sum())
        found.append((seen, x.grad.tolist(), y.grad.tolist()))
    assert found[0] == found[1]
    assert [kind for kind, _ in found[1][0]] == ["list"] * 2


def test_blocks_sum_what_a_boxed_function_returns() -> None:
    def passes(p: Any, run: Callable[[Any], None]) -> None:
        for c in (256.0, 1.0, 1.0):
            u, v = Boxed.apply(p, p, [])
            run((u * c).sum() + v.sum())

    p = ones()
    passes(p, lambda loss: loss.backward())
    q = ones()
    with ft.accumulate([q]):
        passes(q, lambda loss: loss.backward())
    assert q.grad.tolist() == p.grad.tolist()

    def rank(group: Any) -> Any:
        r = ones()
        with ft.accumulate([r], group=group):
            u, v = Boxed.apply(r, r, [])
            (u.sum() + v.sum()).backward()
        return r.grad.tolist()

    assert dist.threads(2, rank, timeout=None) == [[10.0, 10.0]] * 2


# ---------------------------------------------------------------- hooks of node creation


def created(run: Callable[[], Any]) -> tuple[list[str], Any]:
    """The nodes that torch makes in a call, by name."""
    names: list[str] = []
    with torch.autograd.graph.node_creation_hook(lambda node: names.append(node.name())):
        made = run()
    return names, made


HOOKED = pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="torch has it since 2.14")


@HOOKED
def test_hooks_of_node_creation_see_the_nodes_of_the_forward_as_in_torch() -> None:
    def run(backward: Callable[..., None]) -> Any:
        x = ones(BF16)
        backward(used(x))
        return x.grad.tolist()

    (theirs, torchs), (ours, grad) = (created(lambda b=backward: run(b)) for backward in PASSES)
    # Where fanin sums, the pass begins with an alias of each root.
    assert ours == [*theirs, "AliasBackward0"]
    assert torchs == [256.0, 256.0]  # torch's engine begins with the last use, and rounds each partial sum
    assert grad == [260.0, 260.0]  # 259 to bfloat16


@HOOKED
def test_hooks_of_node_creation_see_that_a_block_looks_for_the_nodes_of_its_parameters() -> None:
    def run() -> Any:
        p = ones()
        with ft.accumulate([p]):
            (p * 2).sum().backward()
        return p.grad.tolist()

    names, grad = created(run)
    # As torch.autograd.graph.get_gradient_edge does.
    assert names == ["torch::autograd::AccumulateGrad", "ViewBackward0", "MulBackward0", "SumBackward0"]
    assert grad == [2.0, 2.0]


@HOOKED
def test_a_hook_of_node_creation_that_raises_leaves_the_block_closed() -> None:
    p = ones()
    first = p.grad = torch.ones(2)

    def refuse(node: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), torch.autograd.graph.node_creation_hook(refuse), ft.accumulate([p]):
        pass
    assert p.grad is first and first.tolist() == [1, 1]
    with ft.accumulate([p]):
        p.sum().backward()
    assert p.grad is first and first.tolist() == [2, 2]


# ---------------------------------------------------------------- sums that a Function adds to


class Adds(torch.autograd.Function):  # type: ignore[misc]
    """Adds its gradient to the place of the sum, if torch gives it one."""

    @staticmethod
    def forward(ctx: Any, x: Any, c: float) -> Any:
        ctx.c = c
        return (x * c).sum().float()

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        made = torch.full((2,), ctx.c, dtype=BF16)
        [place, *_] = ctx.input_grad_buffers
        if place is None:
            return made, None
        place.add_(made)
        return None, None


@pytest.mark.skipif(not hasattr(CONTEXT, "input_grad_buffers"), reason="torch has it since 2.15")
def test_a_function_that_adds_to_the_place_of_a_sum_has_torchs_sum() -> None:
    found = []
    for backward in PASSES:
        x = ones(BF16)
        y = x * 1
        backward(sum(Adds.apply(y, c) for c in (256.0, 1.0, 1.0, 1.0)))
        found.append(x.grad.tolist())
    assert found[0] == found[1]
