"""Weights of micro-batches in `fanin.torch.accumulate`, and means whose divisor is known late."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import fanin
from kit import weighted
from kit.ctrl_c import stopped

torch = pytest.importorskip("torch", reason="torch is not installed")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
HERE = pytest.importorskip("fanin.torch.weights").HERE

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]

VOCABULARY, IGNORED = 11, -100
#: The tokens of micro-batches: none has as many as another.
TOKENS = (3, 17, 1, 8)


def model_of(dtype: Any = None) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 6), torch.nn.Linear(6, VOCABULARY)).to(
        dtype or torch.float32
    )


def texts(tokens: Sequence[int] = TOKENS) -> list[tuple[Any, Any]]:
    """Micro-batches of 20 places, of which so many are trained on."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for n in tokens:
        x, y = (torch.randint(0, VOCABULARY, (20,), generator=generator) for _ in range(2))
        y[n:] = IGNORED
        made.append((x, y))
    return made


def loss_of(model: Any, batch: tuple[Any, Any], reduction: str = "mean") -> Any:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED, reduction=reduction)


def trained(y: Any) -> int:
    return int((y != IGNORED).sum().item())


def grads(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


def numpy_of(x: Any) -> Any:
    return x.detach().to_dense().to(torch.float64).numpy()


def passes_alone(model: Any, batches: Sequence[tuple[Any, Any]]) -> list[list[Any]]:
    """For each parameter its gradient in each micro-batch."""
    each = [torch.autograd.grad(loss_of(model, one), list(model.parameters())) for one in batches]
    return [list(of_one) for of_one in zip(*each, strict=True)]


def whole(model: Any, batches: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The gradients of the mean over all tokens, of one large batch, in float64."""
    double = model_of(torch.float64)
    double.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss_of(double, (x, y)).backward()
    return [p.grad.numpy() for p in double.parameters()]


def weighed(model: Any, batches: Sequence[tuple[Any, Any]], **options: Any) -> list[Any]:
    with fanin.torch.accumulate(model.parameters(), mean=True, **options) as block:
        for one in batches:
            with block.weight(trained(one[1])):
                loss_of(model, one).backward()
    return grads(model)


# ---------------------------------------------------------------- the mean over tokens


def test_token_means_of_unequal_micro_batches_make_the_gradient_of_the_one_large_batch() -> None:
    model, batches = model_of(torch.float64), texts()
    ours = weighed(model, batches)
    for g, expected in zip(ours, whole(model, batches), strict=True):
        np.testing.assert_allclose(g.numpy(), expected, rtol=1e-13, atol=1e-16)
    model.zero_grad()
    for one in batches:
        (loss_of(model, one) / len(batches)).backward()
    wrong = max(np.abs(numpy_of(g) - e).max() for g, e in zip(grads(model), whole(model, batches), strict=True))
    assert wrong > 0.01  # the mean of the means is another one


@pytest.mark.rule("W8")
@pytest.mark.parametrize("budget", [None, 0, math.inf])
@pytest.mark.parametrize(("dtype", "sums"), [("float32", None), ("bfloat16", None), ("float64", None)])
def test_a_mean_is_the_fold_of_rounded_products_over_the_exact_sum_of_weights(
    dtype: str, sums: Any, budget: Any
) -> None:
    model, batches = model_of(getattr(torch, dtype)), texts()
    alone = passes_alone(model, batches)
    ours = weighed(model, batches, **({} if budget is None else {"budget": budget}))
    wide = "float64" if dtype == "float64" else "float32"
    for g, terms in zip(ours, alone, strict=True):
        assert g.dtype == getattr(torch, dtype)
        expected = weighted.folded([numpy_of(t) for t in terms], TOKENS, sum(TOKENS), wide, dtype)
        assert np.array_equal(numpy_of(g), expected.astype("f8"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_mean_is_the_quotient_of_the_exact_sums_rounded_once(dtype: str) -> None:
    model, batches = model_of(getattr(torch, dtype)), texts()
    weights: list[Any] = [3, 0.1, 1, 2.5e-3]
    alone = passes_alone(model, batches)
    with fanin.torch.accumulate(model.parameters(), dtype="exact", mean=True) as block:
        for w, one in zip(weights, batches, strict=True):
            with block.weight(w):
                loss_of(model, one).backward()
    divisor = sum(map(Fraction, weights))
    for g, terms in zip(grads(model), alone, strict=True):
        assert np.array_equal(
            numpy_of(g), weighted.exact([numpy_of(t) for t in terms], weights, divisor, dtype).astype("f8")
        )


def test_without_mean_a_weight_multiplies_and_nothing_divides() -> None:
    model, batches = model_of(), texts()
    alone = passes_alone(model, batches)
    with fanin.torch.accumulate(model.parameters()) as block:
        for k, one in enumerate(batches):
            with block.weight(k - 1.5) if k else contextlib.nullcontext():
                loss_of(model, one).backward()
    weights = [1, -0.5, 0.5, 1.5]
    for g, terms in zip(grads(model), alone, strict=True):
        assert np.array_equal(numpy_of(g), weighted.folded([numpy_of(t) for t in terms], weights).astype("f8"))


def test_a_pass_outside_of_weight_weighs_one() -> None:
    model, batches = model_of(), texts()
    alone = passes_alone(model, batches)
    with fanin.torch.accumulate(model.parameters(), mean=True) as block:
        loss_of(model, batches[0]).backward()
        with block.weight(2.5):
            loss_of(model, batches[1]).backward()
        loss_of(model, batches[2]).backward()
        loss_of(model, batches[3]).backward()
    for g, terms in zip(grads(model), alone, strict=True):
        expected = weighted.folded([numpy_of(t) for t in terms], [1, 2.5, 1, 1], 5.5)
        assert np.array_equal(numpy_of(g), expected.astype("f8"))


def test_a_weight_counts_once_however_many_passes_it_holds() -> None:
    w = torch.ones(3, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        with block.weight(6):
            (w * 3).sum().backward()
            (w * 5).sum().backward()
        with block.weight(2):
            (w * 8).sum().backward()
    assert w.grad.tolist() == [(6 * 3 + 6 * 5 + 2 * 8) / 8] * 3


def test_a_micro_batch_counts_for_parameters_that_it_does_not_reach() -> None:
    """As of experts that get no token: else the mean of a rare one would be too large."""
    rare, often, never = (torch.ones(2, requires_grad=True) for _ in range(3))
    with fanin.torch.accumulate([rare, often, never], mean=True) as block:
        for k in range(4):
            with block.weight(k + 1):
                ((rare if k == 2 else often) * 10).sum().backward()
        with block.weight(6):
            pass  # all of its tokens are padding
    assert rare.grad.tolist() == [3 * 10 / 16] * 2
    assert often.grad.tolist() == [(1 + 2 + 4) * 10 / 16] * 2
    assert never.grad is None


def test_passes_outside_of_weight_count_for_parameters_that_they_do_not_reach() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    with fanin.torch.accumulate([a, b], mean=True):
        (a * 8 + b * 8).sum().backward()
        for _ in range(3):
            (a * 4).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([5, 5], [2, 2])


def test_weights_are_exact_in_the_divisor() -> None:
    """In float32 each of these sums would lose the ones."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    weights = [2**53, 1, 1, -(2**53)]
    with fanin.torch.accumulate([w], mean=True) as block:
        for n in weights:
            with block.weight(n):
                (w * 0.5).sum().backward()
    terms = [np.array([0.5])] * 4
    assert w.grad.numpy() == weighted.folded(terms, weights, 2, "float64")


def test_small_gradients_with_weights_are_added_without_python() -> None:
    """As those without are: `collect` is the way of all others."""
    model, batches = model_of(), texts()
    ours: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("fanin.torch"):
            ours.append(frame.f_code.co_name)

    with fanin.torch.accumulate(model.parameters(), mean=True) as block:
        for one, n in zip(batches, TOKENS, strict=True):
            loss = loss_of(model, one)
            with block.weight(n):
                sys.setprofile(note)
                loss.backward()
                sys.setprofile(None)
    assert "weigh" in ours and "collect" not in ours


def test_weights_work_for_sums_in_main_grad() -> None:
    model, batches = model_of(torch.bfloat16), texts()
    alone = passes_alone(model, batches)
    weighed(model, batches, into="main_grad")
    for p, terms in zip(model.parameters(), alone, strict=True):
        assert p.grad is None and p.main_grad.dtype == torch.float32
        expected = weighted.folded([numpy_of(t) for t in terms], TOKENS, sum(TOKENS))
        assert np.array_equal(p.main_grad.numpy(), expected)


def test_sparse_gradients_are_weighed() -> None:
    table = torch.nn.Embedding(8, 2, sparse=True)
    with fanin.torch.accumulate(table.parameters(), mean=True) as block:
        for n, rows in ((2, [1, 1, 3]), (6, [3])):
            with block.weight(n):
                table(torch.tensor(rows)).sum().backward()
    expected = torch.zeros(8, 2)
    expected[1], expected[3] = 2 * 2 / 8, (2 + 6) / 8
    assert torch.equal(table.weight.grad.to_dense(), expected)


# ---------------------------------------------------------------- an earlier gradient, a divisor of 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_mean_is_added_to_an_earlier_gradient_which_keeps_its_memory(dtype: str, into: str) -> None:
    w = torch.ones(40_000, dtype=getattr(torch, dtype), requires_grad=True)
    earlier = torch.full((40_000,), 8.0, dtype=torch.float32 if into == "main_grad" else w.dtype)
    setattr(w, into, earlier)
    with fanin.torch.accumulate([w], into=into, mean=True) as block:
        for n in (1, 3):
            with block.weight(n):
                (w * n).sum().backward()
    assert getattr(w, into) is earlier
    assert set(earlier.tolist()) == {8 + (1 * 1 + 3 * 3) / 4}


def test_a_sparse_earlier_gradient_gets_the_mean() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with fanin.torch.accumulate(table.parameters(), mean=True) as block, block.weight(4):
        table(torch.tensor([2, 2])).sum().backward()
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [1, 1], [2, 2], [0, 0]]


@pytest.mark.parametrize("weights", [[0, 0], [2.5, -2.5]])
def test_a_divisor_of_zero_is_an_error_by_name_and_the_sums_are_there(weights: list[float]) -> None:
    w, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    named = [("w", w), ("unused", unused)]
    refused = pytest.raises(ZeroDivisionError, match=r"w .* divisor of 0, .* 2 passes: \.grad has the sum, not divided")
    with refused, fanin.torch.accumulate(named, mean=True) as block:
        for k, n in enumerate(weights):
            with block.weight(n):
                (w * (k + 1)).sum().backward()
    assert w.grad.tolist() == [weights[0] + 2 * weights[1]] * 2
    assert unused.grad is None
    w.grad = None
    with fanin.torch.accumulate([("w", w)], mean=True) as block, block.weight(2):  # nothing of it is left
        (w * 3).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_block_without_gradients_divides_nothing() -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block, block.weight(0):
        pass
    assert w.grad is None


# ---------------------------------------------------------------- which passes a weight is of


def test_threads_have_weights_of_their_own() -> None:
    w = torch.ones(2, requires_grad=True)
    both, inside = threading.Barrier(3), []

    def run(block: Any, n: int | None) -> None:
        with contextlib.nullcontext() if n is None else block.weight(n):
            both.wait()
            (w * 10).sum().backward()
            both.wait()
        inside.append(n)

    with fanin.torch.accumulate([w], dtype="exact", mean=True) as block:
        threads = [threading.Thread(target=run, args=(block, n)) for n in (2, 5, None)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(inside) == 3 and w.grad.tolist() == [10, 10]
    w.grad = None
    with fanin.torch.accumulate([w]) as block:
        threads = [threading.Thread(target=run, args=(block, n)) for n in (2, 5, None)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert w.grad.tolist() == [80, 80]


class Nested(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A pass within a pass, so many deep."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, depth: int) -> Any:
        ctx.w, ctx.depth = w, depth
        return x.sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        with torch.enable_grad():
            if ctx.depth:
                Nested.apply(torch.ones(1, requires_grad=True), ctx.w, ctx.depth - 1).backward()
            else:
                (ctx.w * 3).sum().backward()
        return g.expand(1), None, None


@pytest.mark.parametrize("depth", [0, 3, 70])
def test_passes_within_a_pass_have_its_weight(depth: int) -> None:
    """torch runs deep ones on other threads."""
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block, block.weight(5):
        Nested.apply(torch.ones(1, requires_grad=True), w, depth).backward()
        (w * 1).sum().backward()
    assert w.grad.tolist() == [4, 4]


@pytest.mark.parametrize("depth", [0, 3, 70])
def test_a_mean_refuses_passes_within_a_pass_whose_number_is_not_known(depth: int) -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True):
        (w * 8).sum().backward()
        with pytest.raises(RuntimeError, match=r"pass within a pass.* `with block.weight\(1\):`"):
            Nested.apply(torch.ones(1, requires_grad=True), w, depth).backward()
        (w * 4).sum().backward()
    assert w.grad.tolist() == [6, 6]


def test_reentrant_checkpoints_are_one_pass_within_a_weight() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    x = torch.randn(4, 3, requires_grad=True)

    def run(reentrant: bool) -> None:
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.square().mean().backward()

    seen = []
    for reentrant in (False, True):
        model.zero_grad()
        with fanin.torch.accumulate(model.parameters(), mean=True) as block:
            for n in (2, 6):
                with block.weight(n):
                    run(reentrant)
        seen.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *seen))


def test_a_hook_that_runs_a_pass_is_within_a_pass() -> None:
    w = torch.ones(2, requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(torch.enable_grad()(lambda g: (w * 3).sum().backward()))
    with fanin.torch.accumulate([w], mean=True) as block:
        with pytest.raises(RuntimeError, match="pass within a pass"):
            (x * 2).sum().backward()
        with block.weight(2):
            (x * 2).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_the_weights_of_two_blocks_do_not_meet() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    with fanin.torch.accumulate([a], mean=True) as first, fanin.torch.accumulate([b], mean=True) as second:
        with first.weight(2), second.weight(3):
            (a * 5 + b * 7).sum().backward()
        with second.weight(1), first.weight(6):
            (a * 1 + b * 3).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([2, 2], [6, 6])


def test_a_gradient_of_a_pass_whose_weight_has_ended_is_an_error() -> None:
    w = torch.ones(2, requires_grad=True)
    begun, ended = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            begun.set()
            ended.wait()
            return g

    def run(block: Any, kept: list[Any]) -> None:
        kept.append(block.weight(2))
        kept[0].__enter__()
        try:
            Waits.apply(w).sum().backward()
        except RuntimeError as e:
            kept.append(e)

    kept: list[Any] = []
    with fanin.torch.accumulate([w], mean=True) as block:
        thread = threading.Thread(target=run, args=(block, kept))
        thread.start()
        begun.wait()
        kept[0].__exit__(None, None, None)
        ended.set()
        thread.join()
        assert "after the end of its weight(w)" in str(kept[1])
        with block.weight(3):
            (w * 5).sum().backward()
    assert w.grad.tolist() == [3, 3]  # the weight of 2 counts: its `with` ended as usual


# ---------------------------------------------------------------- errors


def failing(x: Any, when: str) -> Any:
    """A loss whose pass raises before or after the gradient of x has come."""
    y = torch.ones(2, requires_grad=True)

    def fail(g: Any) -> None:
        raise ArithmeticError("planted")

    if when == "before":
        z = x * 100
        z.register_hook(fail)
        return z.sum()
    z = y * 1
    z.register_hook(fail)
    return z.sum() + (x * 100).sum() if when == "after" else None


def test_a_weight_whose_pass_raises_counts_only_if_a_gradient_has_come() -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        with block.weight(2):
            (w * 4).sum().backward()
        with contextlib.suppress(ArithmeticError), block.weight(1000):
            failing(w, "before").backward()
        with contextlib.suppress(ArithmeticError), block.weight(1000):
            raise ArithmeticError("in the forward")
        with contextlib.suppress(ArithmeticError), block.weight(6):
            (w * 8).sum().backward()
            raise ArithmeticError("after the pass")
    assert w.grad.tolist() == [(2 * 4 + 6 * 8) / 8] * 2


def test_a_block_that_raises_leaves_the_mean_of_what_came() -> None:
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ArithmeticError, match="planted"), fanin.torch.accumulate([w], mean=True) as block:
        for n in (1, 3):
            with block.weight(n):
                (w * n).sum().backward()
        raise ArithmeticError("planted")
    assert w.grad.tolist() == [10 / 4] * 2


BAD: list[tuple[Any, type[Exception], str]] = [
    (math.nan, ValueError, "finite"),
    (math.inf, ValueError, "finite"),
    (-math.inf, ValueError, "finite"),
    (1e39, ValueError, "finite number in float32"),
    (1e-42, ValueError, "below the smallest normal number of float32"),
    (10**400, ValueError, "finite"),
    (True, ValueError, "got the bool True"),
    (np.True_, ValueError, "got the bool"),
    (2**53 + 1, ValueError, "would be rounded"),
    (np.int64(2**53 + 1), ValueError, "would be rounded"),
    ("3", TypeError, "got a str"),
    (None, TypeError, "got None"),
    (1j, TypeError, "got a complex"),
    (np.array(3.0), TypeError, r"got an ndarray: give x\.item\(\)"),
    (np.ones(2), TypeError, "got an ndarray"),
    ([3], TypeError, "got a list"),
]


@pytest.mark.parametrize(("bad", "kind", "match"), BAD, ids=[str(one[0]) for one in BAD])
def test_what_is_no_weight_is_refused_and_changes_nothing(bad: Any, kind: type[Exception], match: str) -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        with pytest.raises(kind, match=f"weight.*{match}"):
            block.weight(bad)
        with block.weight(2):
            (w * 3).sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_tensor_is_no_weight_and_the_error_says_what_is() -> None:
    w = torch.ones(2, requires_grad=True)
    refused = pytest.raises(TypeError, match=r"got a Tensor: give x\.item\(\)")
    with fanin.torch.accumulate([w], mean=True) as block, refused:
        block.weight((w != 0).sum())


@pytest.mark.parametrize("good", [3, 3.0, np.int64(3), np.float32(3), np.float16(3), np.uint8(3)])
def test_numbers_of_python_and_numpy_are_weights(good: Any) -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w]) as block, block.weight(good):
        w.sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_weight_belongs_into_the_block_and_not_into_another_weight() -> None:
    w = torch.ones(2, requires_grad=True)
    block = fanin.torch.accumulate([w], mean=True)
    with pytest.raises(RuntimeError, match=r"weight\(w\) outside of the block"):
        block.weight(2)
    with pytest.raises(RuntimeError, match=r"weight\(9\) was called and never entered"), block:
        one = block.weight(2)
        with one:
            with pytest.raises(RuntimeError, match=r"within weight\(w\): a pass has one weight"), block.weight(3):
                pass
            with pytest.raises(RuntimeError, match="entered once"), one:
                pass
            (w * 3).sum().backward()
        with pytest.raises(RuntimeError, match="entered once"), one:
            pass
        late = block.weight(9)
    with pytest.raises(RuntimeError, match="outside of the block"), late:
        pass
    with pytest.raises(RuntimeError, match="outside of the block"):
        block.weight(2)
    with pytest.raises(RuntimeError, match="__exit__ of weight"):
        late.__exit__(None, None, None)
    assert w.grad.tolist() == [3, 3]


@pytest.mark.parametrize("mean", [True, False])
def test_a_pass_after_a_weight_without_a_with_is_refused_and_names_the_call(mean: bool) -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=mean) as block:
        with block.weight(2):
            (w * 3).sum().backward()
        made = block.weight(5)
        with pytest.raises(RuntimeError, match=r"weight\(5\), which was not entered: use `with block.weight\(5\):`"):
            (w * 7).sum().backward()
        with made:  # called before its pass, and entered: right
            (w * 4).sum().backward()
        (w * 2).sum().backward()
    total = 2 * 3 + 5 * 4 + 2
    assert w.grad.tolist() == [total / 8 if mean else total] * 2


@pytest.mark.parametrize("mean", [True, False])
def test_a_weight_after_its_pass_and_a_last_without_a_with_are_errors_at_the_end_of_the_block(mean: bool) -> None:
    for call, words in (("weight", "weighed no pass"), ("last", "stepped no parameter")):
        w = torch.ones(2, requires_grad=True)
        refused = pytest.raises(RuntimeError, match=f"was called and never entered, so it {words}")
        with refused, fanin.torch.accumulate([w], mean=mean) as block:
            (w * 3).sum().backward()
            getattr(block, call)(8 if call == "weight" else print)
        assert w.grad.tolist() == [3, 3], "the sum is there"


def test_a_weight_that_one_thread_is_about_to_enter_stops_no_pass_of_another() -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        made = block.weight(3)
        other = threading.Thread(target=lambda: (w * 5).sum().backward())
        other.start()
        other.join()
        with made:
            w.sum().backward()
    assert w.grad.tolist() == [2, 2]


def test_over_ranks_a_weight_that_is_not_entered_is_an_error_of_its_rank_and_no_rank_gets_a_mean() -> None:
    ended: dict[int, BaseException] = {}

    def train(group: Any) -> None:
        w = torch.ones(2, requires_grad=True)
        try:
            with fanin.torch.accumulate([w], group=group, mean=True) as block:
                with block.weight(3) if group.rank else contextlib.nullcontext():
                    w.sum().backward()
                if not group.rank:
                    block.weight(4)
        except RuntimeError as e:
            ended[group.rank] = e
        assert w.grad is None

    fanin.dist.threads(2, train)
    assert "weight(4) was called and never entered" in str(ended[0])
    assert isinstance(ended[1], fanin.PeerError) and ended[1].rank == 0


def test_mean_is_a_bool() -> None:
    with pytest.raises(TypeError, match="accumulate: mean: expected a bool, got a str"):
        fanin.torch.accumulate([torch.ones(1, requires_grad=True)], mean="yes")


def test_a_dropped_block_ends_although_a_weight_is_open() -> None:
    w = torch.ones(2, requires_grad=True)
    block = fanin.torch.accumulate([w], mean=True)
    block.__enter__()
    inside = block.weight(4)
    inside.__enter__()
    (w * 3).sum().backward()
    gone = weakref.ref(block)
    with pytest.warns(ResourceWarning, match="dropped without its exit"):
        del block, inside
        gc.collect()
    assert gone() is None and w.grad.tolist() == [3, 3]
    w.grad = None
    with fanin.torch.accumulate([w], mean=True):
        (w * 5).sum().backward()
    assert w.grad.tolist() == [5, 5]


@pytest.mark.parametrize(("mean", "weight"), [(True, None), (True, 3), (False, 3)])
def test_an_audit_does_not_judge_what_a_block_weighs(mean: bool, weight: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fanin.torch.audit(model.named_parameters(), optimizer, every=1) as audit:
        for _ in range(2):
            with fanin.torch.accumulate(model.parameters(), mean=mean) as block:
                for _ in range(3):
                    with contextlib.nullcontext() if weight is None else block.weight(weight):
                        model(torch.randn(5, 20)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    verdicts = {row.parameter: row.verdict for row in audit.rows}
    assert set(verdicts.values()) == {"not judged"}, verdicts


# ---------------------------------------------------------------- beside target and last


class Matmul(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, block: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.w, ctx.block = w, block
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        with ctx.block.target(ctx.w) as acc:
            acc.addmm_(x.t().to(acc.dtype), g.to(acc.dtype))
        return g @ w.t(), None, None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sums", [None, "exact"])
def test_what_a_kernel_adds_is_weighed(dtype: str, sums: Any) -> None:
    own = getattr(torch, dtype)
    w = torch.ones(3, 2, dtype=own, requires_grad=True)
    weights: list[Any] = [None, 3, 0.5, None]
    generator = torch.Generator().manual_seed(7)
    xs = [torch.randint(-4, 5, (5, 3), generator=generator).to(own) for _ in weights]
    with fanin.torch.accumulate([w], dtype=sums, mean=True) as block:
        for n, x in zip(weights, xs, strict=True):
            with contextlib.nullcontext() if n is None else block.weight(n):
                Matmul.apply(x, w, block).sum().backward()
    terms = [numpy_of(x).T @ np.ones((5, 2)) for x in xs]
    each = [1 if n is None else n for n in weights]
    assert np.array_equal(numpy_of(w.grad), weighted.exact(terms, each, Fraction(11, 2), dtype).astype("f8"))


def test_a_kernel_and_a_gradient_of_one_pass_are_one_micro_batch() -> None:
    w = torch.ones(3, 2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        for n in (None, 3):
            with contextlib.nullcontext() if n is None else block.weight(n):
                (Matmul.apply(torch.ones(5, 3), w, block).sum() + (w * 7).sum()).backward()
    assert set(w.grad.flatten().tolist()) == {12.0}


def test_a_target_outside_of_a_pass_needs_a_weight_in_a_mean() -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block, torch.no_grad():
        refused = pytest.raises(RuntimeError, match=r"outside of a backward pass: use `with block.weight\(1\):`")
        with refused, block.target(w):
            pass
        with block.weight(4), block.target(w) as acc:
            acc.add_(6)
        with block.weight(2), block.target(w) as acc:
            acc.add_(3)
    assert w.grad.tolist() == [5, 5]


@pytest.mark.parametrize("outside", [True, False])
def test_last_steps_with_the_mean_of_all_passes_of_its_batch(outside: bool) -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    seen: list[list[float]] = []

    def last(block: Any, n: int, step: Any) -> Any:
        stack = contextlib.ExitStack()
        for one in (block.weight(n), block.last(step)) if outside else (block.last(step), block.weight(n)):
            stack.enter_context(one)
        return stack

    names = {id(a): "a", id(b): "b", id(c): "c"}
    with fanin.torch.accumulate([a, b, c], mean=True) as block:
        for factor in (1, 10):
            with block.weight(2):
                (a * 3 * factor + c).sum().backward()
            with last(block, 6, lambda p: seen.append([names[id(p)], *p.grad.tolist()])):
                (a * 5 * factor + b * 8 * factor).sum().backward()
    each = [[name, x, x] for name, x in (("a", 36 / 8), ("b", 48 / 8), ("c", 2 / 8))]
    ten = [["a", 45.0, 45.0], ["b", 60.0, 60.0], ["c", 0.25, 0.25]]
    assert sorted(seen[:3]) == each and sorted(seen[3:]) == ten
    assert a.grad is b.grad is c.grad is None


def test_last_counts_passes_without_weights() -> None:
    w = torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    with fanin.torch.accumulate([w], mean=True) as block:
        for k in (1, 2):
            for _ in range(3):
                (w * 4 * k).sum().backward()
            with block.last(lambda p: seen.append(p.grad.tolist())):
                (w * 8 * k).sum().backward()
        (w * 7).sum().backward()
    assert seen == [[5, 5], [10, 10]] and w.grad.tolist() == [7, 7]


def test_a_weight_after_a_step_is_refused_where_the_mean_would_lack_it() -> None:
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    with fanin.torch.accumulate([a, b], mean=True) as block:
        with block.last(lambda p: None):
            with block.weight(2):
                (a * 3).sum().backward()
            with pytest.raises(RuntimeError, match="a weight begins after a parameter was stepped"), block.weight(4):
                pass
            with pytest.raises(RuntimeError, match="a pass begins after a parameter was stepped"):
                (b * 3).sum().backward()
        with block.weight(2):
            (b * 5).sum().backward()
    assert b.grad.tolist() == [5 * 2 / 4] * 2  # its divisor: both weights of 2


def test_a_pass_after_last_in_the_same_weight_is_refused() -> None:
    w = torch.ones(2, requires_grad=True)
    with fanin.torch.accumulate([w], mean=True) as block:
        with block.weight(2):
            with block.last(lambda p: None):
                (w * 3).sum().backward()
            with pytest.raises(RuntimeError, match=r"after last\(step\), in the same weight"):
                (w * 3).sum().backward()
        with block.weight(2):
            (w * 4).sum().backward()
    assert w.grad.tolist() == [4, 4]


def test_a_step_whose_divisor_is_zero_is_not_made_and_the_sum_is_kept() -> None:
    w = torch.ones(2, requires_grad=True)
    refused = pytest.raises(ZeroDivisionError, match=r"w: it is not stepped|divisor of 0")
    with refused, fanin.torch.accumulate([("w", w)], mean=True) as block:
        with block.weight(2):
            (w * 3).sum().backward()
        with block.weight(-2), block.last(lambda p: pytest.fail("stepped")):
            (w * 1).sum().backward()
    assert w.grad.tolist() == [4, 4]


# ---------------------------------------------------------------- Ctrl-C


def interrupted(at: int) -> tuple[bool, Any, Any]:
    """Stop a block at a bytecode; whether there are so many, the gradient, and the weights that counted."""
    w = torch.ones(2, requires_grad=True)
    counted: list[Any] = []
    kept: list[Any] = []  # so that its end is not what is stopped

    def run() -> None:
        kept.append(fanin.torch.accumulate([w], mean=True))
        with kept[0] as block:
            for n, factor in ((3, 1.0), (5, 9.0)):
                kept.append(block.weight(n))
                with kept[-1]:
                    (w * factor).sum().backward()
                    counted.append(n)

    there = False
    with contextlib.suppress(BaseException):
        there = True
        there = stopped(at, run, str(Path(fanin.torch.__file__).parent))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        kept.clear()  # before the first step of its exit, it is a block that is dropped
        gc.collect()
    return there, w, counted


@pytest.mark.core
def test_ctrl_c_at_a_bytecode_leaves_a_mean_of_passes_that_came_and_no_weight_open() -> None:
    from fanin.torch.weights import entries

    # Of both weights, of either, and of the second one whose gradient had come and was not added yet.
    means = {(3, 5): 6.0, (3,): 1.0, (5,): 9.0, (3, 0): 3 / 8}
    seen: set[Any] = set()
    for at in range(1, 4000, 13):
        there, w, counted = interrupted(at)
        assert not entries()
        grad = None if w.grad is None else w.grad.tolist()
        if grad is not None:
            assert grad[0] in means.values(), (at, grad, counted)
        seen.add((tuple(counted), None if grad is None else grad[0]))
        w.grad = None
        with fanin.torch.accumulate([w], mean=True) as block, block.weight(2):
            (w * 3).sum().backward()
        assert w.grad.tolist() == [3, 3]
        if not there:
            break
    assert len(seen) >= 3


# ---------------------------------------------------------------- situations that people have reported


def steps_by(run: Callable[[Any, list[Any]], None], batches: list[Any]) -> list[Any]:
    model = model_of(torch.float64)
    run(model, batches)
    return [g.numpy() for g in grads(model)]


def ours(model: Any, batches: list[Any]) -> None:
    weighed(model, batches)


def divided_by_the_number_of_micro_batches(model: Any, batches: list[Any]) -> None:
    """A mean of means: short micro-batches count too much."""
    for one in batches:
        (loss_of(model, one) / len(batches)).backward()


def divided_by_a_configured_number(model: Any, batches: list[Any]) -> None:
    """The last group of an epoch has fewer micro-batches than the configured four."""
    for one in batches:
        (loss_of(model, one, "sum") / trained(one[1]) / 4).backward()


def divided_twice(model: Any, batches: list[Any]) -> None:
    """By all tokens, and by the number of micro-batches once more."""
    every = sum(trained(y) for _, y in batches)
    for one in batches:
        (loss_of(model, one, "sum") / every / len(batches)).backward()


def divided_by_the_last_count(model: Any, batches: list[Any]) -> None:
    """The sum of losses, divided after the loop by the tokens of the last micro-batch alone."""
    for one in batches:
        loss_of(model, one, "sum").backward()
    for p in model.parameters():
        p.grad /= trained(batches[-1][1])


def averaged_over_ranks(model: Any, batches: list[Any]) -> None:
    """Two ranks, each with the mean over its own tokens, and the mean of both."""
    for mine in (batches[::2], batches[1::2]):
        tokens = sum(trained(y) for _, y in mine)
        for one in mine:
            (loss_of(model, one, "sum") / tokens / 2).backward()


SITUATIONS: list[tuple[Callable[..., None], list[int]]] = [
    (divided_by_the_number_of_micro_batches, [2, 19, 7, 4]),
    (divided_by_a_configured_number, [9, 9]),
    (divided_twice, [6, 6, 6]),
    (divided_by_the_last_count, [5, 12, 2]),
    (averaged_over_ranks, [20, 1, 18, 2]),
]


@pytest.mark.parametrize(("wrong", "tokens"), SITUATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_mean_that_people_have_trained_with_is_right_with_weights(
    wrong: Callable[..., None], tokens: list[int]
) -> None:
    batches = texts(tokens)
    expected = whole(model_of(torch.float64), batches)
    for g, e in zip(steps_by(ours, batches), expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-13, atol=1e-16)
    off = [np.linalg.norm(g - e) / np.linalg.norm(e) for g, e in zip(steps_by(wrong, batches), expected, strict=True)]
    assert min(off) > 0.1


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch removes nothing")
@pytest.mark.parametrize("ends", ["the weight", "the block"])
def test_a_thread_keeps_nothing_of_weights_that_torch_would_drop_at_its_end(ends: str) -> None:
    p = torch.zeros(3, requires_grad=True)
    with fanin.torch.accumulate([p]) as block:
        weight = block.weight(2)
        weight.__enter__()
        p.sum().backward()
        assert torch._C._is_key_in_tls(HERE)
        if ends == "the weight":
            weight.__exit__(None, None, None)
            assert not torch._C._is_key_in_tls(HERE)
    assert not torch._C._is_key_in_tls(HERE)
    assert p.grad.tolist() == [2, 2, 2]
