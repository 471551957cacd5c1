"""Weights of torch's passes over ranks: `accumulate(group=, mean=True)`, `with reducer:`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fanin
from dist.test_gloo import on_processes
from fanin import dist
from kit import weighted

torch = pytest.importorskip("torch")
pytest.importorskip("fanin.dist.torch_ranks")

pytestmark = pytest.mark.partners

MICRO = 6
TOKENS = (3, 17, 1, 8, 0, 11)


def net(dtype: str) -> Any:
    made = torch.nn.Sequential(torch.nn.Linear(12, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return made.to(getattr(torch, dtype))


def loss_of(model: Any, k: int) -> Any:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(k)).to(next(model.parameters()).dtype)
    return model(x).float().square().mean()


def numpy_of(x: Any) -> Any:
    return x.detach().double().numpy()


def alone(dtype: str, order: str) -> list[Any]:
    """The means of one process, by oracles."""
    model = net(dtype)
    grads = [torch.autograd.grad(loss_of(model, k), list(model.parameters())) for k in range(MICRO)]
    made = []
    for gs in zip(*grads, strict=True):
        terms = [numpy_of(g) for g in gs]
        if order == "exact":
            made.append(weighted.exact(terms, TOKENS, sum(TOKENS), dtype))
        else:
            made.append(weighted.folded(terms, TOKENS, sum(TOKENS), dtype=dtype))
    return made


def equal(grads: list[Any], expected: list[Any]) -> bool:
    return all((numpy_of(g) == e.astype("f8")).all() for g, e in zip(grads, expected, strict=True))


def in_runs(k: int, n: int) -> int:
    return k * n // MICRO


def round_robin(k: int, n: int) -> int:
    return n - 1 - k % n


def by_weight(group: Any, model: Any, order: str, mine: list[int], keys: bool) -> None:
    with fanin.torch.accumulate(model.parameters(), group=group, order=order, mean=True) as block:
        for k in mine:
            if keys:
                block.at(k)
            with block.weight(TOKENS[k]):
                loss_of(model, k).backward()


def by_key(group: Any, model: Any, order: str, mine: list[int], keys: bool) -> None:
    with fanin.torch.accumulate(model.parameters(), group=group, order=order, mean=True) as block:
        for k in mine:
            if keys:
                block.at(k, weight=TOKENS[k])
                loss_of(model, k).backward()
            else:
                with block.weight(TOKENS[k]):
                    loss_of(model, k).backward()


def in_last(group: Any, model: Any, order: str, mine: list[int], keys: bool) -> None:
    """The sums travel in the last pass."""
    with fanin.torch.accumulate(model.parameters(), group=group, order=order, mean=True) as block:
        for k in mine[:-1]:
            with block.at(k).weight(TOKENS[k]) if keys else block.weight(TOKENS[k]):
                loss_of(model, k).backward()
        if keys:
            block.at(mine[-1])
        if group.rank % 2:
            with block.weight(TOKENS[mine[-1]]), block.last():
                loss_of(model, mine[-1]).backward()
        else:
            with block.last(), block.weight(TOKENS[mine[-1]]):
                loss_of(model, mine[-1]).backward()


def by_reducer(group: Any, model: Any, order: str, mine: list[int], keys: bool) -> None:
    options: Any = {"order": order, "mean": True, "bucket_bytes": 1000}
    reducer = dist.Reducer(model.parameters(), group, **options)
    for k in mine[:-1]:
        with reducer.accumulate(k if keys else None, weight=TOKENS[k]):
            torch.autograd.backward(loss_of(model, k))
    with reducer.at(mine[-1] if keys else None, weight=TOKENS[mine[-1]]):
        torch.autograd.backward(loss_of(model, mine[-1]))


LAWS: list[tuple[str, Callable[[int, int], int], bool]] = [
    ("exact", in_runs, False),
    ("exact", round_robin, False),
    ("key", in_runs, False),
    ("key", round_robin, True),
]


def law(group: Any, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> list[str]:
    """Which ways make other gradients than one process."""
    wrong = []
    for dtype in dtypes:
        expected = {order: alone(dtype, order) for order in ("exact", "key")}
        for order, owner, keys in LAWS:
            mine = [k for k in range(MICRO) if owner(k, group.size) == group.rank]
            for way in (by_weight, by_key, in_last, by_reducer):
                model = net(dtype)
                way(group, model, order, mine, keys)
                if not equal([p.grad for p in model.parameters()], expected[order]):
                    wrong.append(f"{dtype} {order} {owner.__name__} {way.__name__}")
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3])
def test_means_over_tokens_are_those_of_one_process_on_ranks_that_are_threads(n: int) -> None:
    assert dist.threads(n, law, timeout=None) == [[]] * n


def test_means_over_tokens_are_those_of_one_process_on_gloo(tmp_path: Path) -> None:
    assert on_processes(2, functools.partial(law, dtypes=("bfloat16",)), tmp_path) == [[]] * 2


def on_ranks(fn: Callable[[Any], Any], n: int = 2) -> list[Any]:
    return dist.threads(n, fn, timeout=None)


def test_the_situation_of_ranks_with_unequal_tokens_is_right_with_weights() -> None:
    """The mean of the ranks' means would be 5.5."""

    def rank(group: Any) -> Any:
        w = torch.ones(2, requires_grad=True)
        tokens, mean = ((90, 1.0), (10, 10.0))[group.rank]
        with fanin.torch.accumulate([w], group=group, mean=True) as block, block.weight(tokens):
            (w * mean).sum().backward()
        return w.grad.tolist()

    expected = float(torch.tensor(190.0) / 100)
    assert on_ranks(rank) == [[expected] * 2] * 2


def test_passes_of_threads_have_their_own_weights_in_one_rank() -> None:
    def rank(group: Any) -> Any:
        a, b = (torch.ones(2, requires_grad=True) for _ in range(2))

        def run(block: Any, n: int) -> None:
            with block.weight(n):
                (a * n + b).sum().backward()

        with fanin.torch.accumulate([a, b], group=group, order="exact", mean=True) as block:
            threads = [threading.Thread(target=run, args=(block, n)) for n in (1, 2, 5)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        return a.grad.tolist(), b.grad.tolist()

    assert on_ranks(rank) == [([(1 + 4 + 25) / 8] * 2, [1, 1])] * 2


def test_passes_without_weights_count_one_on_every_rank() -> None:
    def rank(group: Any) -> Any:
        a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
        with fanin.torch.accumulate([a, b], group=group, order="exact", mean=True, missing="skip") as block:
            for _ in range(1 + group.rank):
                (a * 6).sum().backward()
            if group.rank:
                with block.weight(5):
                    (b * 16).sum().backward()
        return a.grad.tolist(), b.grad.tolist()

    assert on_ranks(rank) == [([18 / 8] * 2, [80 / 8] * 2)] * 2


def ends(group: Any, run: Callable[[Any, Any, Any], None], options: dict[str, Any]) -> Any:
    """How a block ends on this rank, the earlier gradient, and the mean of the next block."""
    named = [(f"w{i}", torch.ones(2, requires_grad=True)) for i in range(2)]
    for _, w in named:
        w.grad = torch.full((2,), 7.0)
    end = None
    try:
        with fanin.torch.accumulate(named, group=group, **options) as block:
            run(group, block, named)
    except Exception as e:
        end = type(e).__name__, str(e)
    kept = [w.grad.tolist() for _, w in named]
    for _, w in named:
        w.grad = None
    with fanin.torch.accumulate(named, group=group, mean=True) as block, block.weight(group.rank + 1):
        (named[0][1] * 6 + named[1][1] * 3).sum().backward()
    assert [w.grad.tolist() for _, w in named] == [[6, 6], [3, 3]]
    assert kept == [[7, 7]] * 2, kept
    return end


def loss(named: Any, factor: float = 1.0) -> Any:
    return sum((w * factor).sum() for _, w in named)


def test_a_divisor_of_zero_changes_no_gradient_on_any_rank() -> None:
    def run(group: Any, block: Any, named: Any) -> None:
        with block.weight(2 - 4 * group.rank):
            loss(named).backward()

    for found in on_ranks(lambda group: ends(group, run, {"mean": True})):
        assert found[0] == "ZeroDivisionError" and "weights of all ranks sum to 0" in found[1]


def test_a_mean_on_one_rank_is_an_error_on_all() -> None:
    def run(group: Any, block: Any, named: Any) -> None:
        with block.weight(2):
            loss(named).backward()

    found = on_ranks(lambda group: ends(group, run, {"mean": group.rank == 1}))
    assert all(kind == "PeerError" and "mean=True" in text for kind, text in found)


def test_a_weight_whose_pass_raises_ends_the_block_of_every_rank() -> None:
    def run(group: Any, block: Any, named: Any) -> None:
        with block.weight(3):
            loss(named).backward()
        with block.weight(3):
            if group.rank:
                raise ArithmeticError("planted")
            loss(named).backward()

    first, second = on_ranks(lambda group: ends(group, run, {"mean": True}))
    assert second == ("ArithmeticError", "planted") and first[0] == "PeerError" and "planted" in first[1]


def test_a_weight_in_the_wrong_place_of_a_block_over_ranks_is_refused_by_name() -> None:
    def rank(group: Any) -> Any:
        named = [(f"w{i}", torch.ones(2, requires_grad=True)) for i in range(2)]
        with fanin.torch.accumulate(named, group=group, mean=True) as block:
            with pytest.raises(ValueError, match="finite"):
                block.at(0, weight=float("nan"))
            with block.weight(2):
                with pytest.raises(RuntimeError, match=r"at\(key, weight=\) within weight\(w\)"):
                    block.at(0, weight=2)
                loss(named, 2.0).backward()
            block.at(2 * group.rank + 1, weight=3)
            with pytest.raises(RuntimeError, match=r"weight\(w\) within at\(key, weight=\)"), block.weight(3):
                pass
            block.at(2 * group.rank + 1)
            with block.last():
                with block.weight(3):
                    (named[0][1] * 4).sum().backward()
                late = pytest.raises(RuntimeError, match=r"a weight begins after a gradient came in last\(\)")
                with late, block.weight(3):
                    pass
                with pytest.raises(RuntimeError, match=r"a pass begins after a gradient came in last\(\)"):
                    (named[1][1] * 4).sum().backward()
        return [w.grad.tolist() for _, w in named]

    assert on_ranks(rank, 1) == [[[2, 2], [0.5, 0.5]]]  # (2 * 2 + 3 * 4) / (2 + 3 + 3), (2 * 2) / 8


def test_a_weight_after_last_is_refused_by_name() -> None:
    def rank(group: Any) -> Any:
        named = [("w", torch.ones(2, requires_grad=True))]
        with fanin.torch.accumulate(named, group=group, mean=True) as block:
            with block.weight(2), block.last():
                loss(named, 2.0).backward()
            with pytest.raises(RuntimeError, match=r"weight\(w\) after last\(\)"):
                block.weight(2)
        return named[0][1].grad.tolist()

    assert on_ranks(rank) == [[2, 2]] * 2


def test_two_weights_in_one_contribution_of_a_reducer_are_an_error() -> None:
    def rank(group: Any) -> Any:
        w = torch.ones(2, requires_grad=True)
        with fanin.torch.accumulate([("w", w)], group=group, order="key", mean=True) as block:
            block.at(group.rank)
            with block.weight(2):
                (w * 3).sum().backward()
            with pytest.raises(ValueError, match=r"second gradient|one weight"), block.weight(3):
                (w * 3).sum().backward()
        return None

    assert on_ranks(rank, 1) == [None]
