"""Sums over ranks of torch's gradients: fanin.torch.accumulate(group=) and `with reducer:`."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from dist.test_gloo import on_processes
from fanin import _core, dist

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
torch_ranks = pytest.importorskip("fanin.dist.torch_ranks")

pytestmark = pytest.mark.partners

MICRO, STEPS, RATE = 8, 2, 0.125
Owner = Callable[[int, int], int]


def net(dtype: str = "float32") -> Any:
    n = torch.nn
    generator = torch.Generator().manual_seed(0)
    made = n.Sequential(n.Linear(12, 40), n.Tanh(), n.Linear(40, 30), n.Tanh(), n.Linear(30, 3))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return made.to(getattr(torch, dtype))


def batch(k: int, dtype: str = "float32") -> Any:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(k))
    return x.to(getattr(torch, dtype))


def loss_of(model: Any, k: int) -> Any:
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return model(batch(k, dtype)).float().square().mean()


def step(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= RATE * p.grad
            p.grad = None


def weights(model: Any) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def alone(dtype: str, order: str) -> list[Any]:
    """The weights of one process that sums the gradients of all micro-batches."""
    model = net(dtype)
    for _ in range(STEPS):
        grads = [torch.autograd.grad(loss_of(model, k), list(model.parameters())) for k in range(MICRO)]
        accumulate = "exact" if order == "exact" else None
        for p, *gs in zip(model.parameters(), *grads, strict=True):
            p.grad = fanin.add_n(gs, accumulate=accumulate, scale=1 / MICRO)
        step(model)
    return weights(model)


def torch_backward(loss: Any) -> None:
    loss.backward()


def by_block(group: Any, model: Any, order: str, mine: list[int], keys: bool, backward: Any) -> list[Any]:
    for _ in range(STEPS):
        with fanin.torch.accumulate(model.parameters(), group=group, order=order, scale=1 / MICRO) as block:
            for k in mine:
                if keys:
                    block.at(k)
                backward(loss_of(model, k))
        step(model)
    return weights(model)


def by_reducer(group: Any, model: Any, order: str, mine: list[int], keys: bool, backward: Any) -> list[Any]:
    options: Any = {"order": order, "scale": 1 / MICRO, "bucket_bytes": 1000}
    reducer = dist.Reducer(model.parameters(), group, **options)
    for _ in range(STEPS):
        for k in mine[:-1]:
            with reducer.accumulate(k if keys else None):
                backward(loss_of(model, k))
        with reducer.at(mine[-1] if keys else None):
            backward(loss_of(model, mine[-1]))
        step(model)
    return weights(model)


def in_runs(k: int, n: int) -> int:
    return k * n // MICRO


def round_robin(k: int, n: int) -> int:
    return n - 1 - k % n


#: order=, the dealing of micro-batches, whether passes have keys
LAWS: list[tuple[str, Owner, bool]] = [
    ("exact", in_runs, False),
    ("exact", round_robin, False),
    ("key", in_runs, False),
    ("key", round_robin, True),
]


def law(group: Any, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> list[str]:
    """Which ways to train give other weights than one process."""
    wrong = []
    for dtype in dtypes:
        expected = {order: alone(dtype, order) for order in ("exact", "key")}
        for order, owner, keys in LAWS:
            mine = [k for k in range(MICRO) if owner(k, group.size) == group.rank]
            for way in (by_block, by_reducer):
                for backward in (torch_backward, fanin.torch.backward):
                    if not equal(way(group, net(dtype), order, mine, keys, backward), expected[order]):
                        wrong.append(f"{dtype} {order} {owner.__name__} {way.__name__} {backward.__name__}")
    return wrong


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_weights_are_those_of_one_process_on_ranks_that_are_threads(n: int) -> None:
    assert dist.threads(n, law, timeout=None) == [[]] * n


def test_the_weights_are_those_of_one_process_on_gloo(tmp_path: Path) -> None:
    assert on_processes(2, functools.partial(law, dtypes=("bfloat16",)), tmp_path) == [[]] * 2


def test_the_law_finds_another_order() -> None:
    def other(group: Any) -> bool:
        mine = [k for k in range(MICRO) if k % 2 == group.rank]
        return equal(by_block(group, net("float32"), "rank", mine, False, torch_backward), alone("float32", "key"))

    assert dist.threads(2, other, timeout=None) == [False, False]


# ---------------------------------------------------------------- one block, one pass


def on_ranks(fn: Callable[[Any], Any], n: int = 2) -> list[Any]:
    return dist.threads(n, fn, timeout=None)


def parameters(n: int = 2) -> list[tuple[str, Any]]:
    return [(f"w{i}", torch.ones(3, requires_grad=True)) for i in range(n)]


def total(named: list[tuple[str, Any]], factor: float = 1.0) -> Any:
    return sum((factor * w).sum() for _, w in named)


def test_micro_batches_on_several_threads_of_a_rank_are_summed() -> None:
    def rank(group: Any) -> Any:
        model = net()
        with fanin.torch.accumulate(model.parameters(), group=group, order="exact"):
            workers = [
                threading.Thread(target=lambda k=k: loss_of(model, k).backward())
                for k in range(MICRO)
                if k % 2 == group.rank
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        grads = [torch.autograd.grad(loss_of(model, k), list(model.parameters())) for k in range(MICRO)]
        return equal(
            [p.grad for p in model.parameters()],
            [fanin.add_n(gs, accumulate="exact") for gs in zip(*grads, strict=True)],
        )

    assert on_ranks(rank) == [True, True]


def test_an_earlier_gradient_stays_and_the_sum_is_added_in_place() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        first = named[0][1].grad = torch.full((3,), 10.0)
        with fanin.torch.accumulate(named, group=group):
            total(named).backward()
            assert named[0][1].grad is first and named[1][1].grad is None
        return first.tolist(), named[0][1].grad is first, named[1][1].grad.tolist()

    assert on_ranks(rank) == [([12.0] * 3, True, [2.0] * 3)] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_gradient_of_an_earlier_pass_is_not_written_by_the_next_one(n: int) -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        reducer = dist.Reducer(named, group)
        with reducer:
            torch.autograd.backward(total(named))
        first = [p.grad for _, p in named]
        was = [g.clone() for g in first]
        for _, p in named:
            p.grad = None
        with reducer:
            torch.autograd.backward(total(named, 10.0))
        assert equal(first, was)
        with reducer:
            torch.autograd.backward(total(named, 100.0))
        return all(torch.equal(p.grad, 110 * g) for (_, p), g in zip(named, was, strict=True))

    assert on_ranks(rank, n) == [True] * n


@pytest.mark.parametrize("way", ["block", "reducer"])
def test_hooks_of_a_tensor_see_this_ranks_gradient_and_hooks_after_accumulation_the_sum_once(way: str) -> None:
    def rank(group: Any) -> Any:
        seen: list[Any] = []
        named = parameters(1)
        [(_, w)] = named
        w.register_hook(lambda g: seen.append(g.tolist()))
        w.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.tolist())))
        if way == "block":
            with fanin.torch.accumulate(named, group=group):
                total(named, 1.0 + group.rank).backward()
        else:
            with dist.Reducer(named, group):
                torch.autograd.backward(total(named, 1.0 + group.rank))
        return seen

    assert on_ranks(rank) == [[[1.0 + r] * 3, ("after", [3.0] * 3)] for r in range(2)]


def test_a_sparse_gradient_is_summed_as_a_dense_one() -> None:
    def rank(group: Any) -> Any:
        table = torch.nn.Embedding(4, 2, sparse=True)
        made = []
        for _ in range(2):
            table.weight.grad = None
            with fanin.torch.accumulate(table.parameters(), group=group, order="exact"):
                table(torch.tensor([1, 1, group.rank])).sum().backward()
            made.append(table.weight.grad[:, 0].tolist())
        return made

    assert on_ranks(rank) == [[[1.0, 5.0, 0.0, 0.0]] * 2] * 2


def test_a_sum_is_added_to_a_sparse_gradient_of_before() -> None:
    def rank(group: Any) -> Any:
        table = torch.nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        with dist.Reducer(table.parameters(), group):
            torch.autograd.backward(table(torch.tensor([1, 2])).sum())
        return table.weight.grad[:, 0].tolist()

    assert on_ranks(rank) == [[0.0, 3.0, 2.0, 0.0]] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_gradient_is_pickled_and_copied_without_the_other_leaves_of_its_bucket(n: int, dtype: str) -> None:
    def rank(group: Any) -> Any:
        made = [torch.zeros(s, dtype=getattr(torch, dtype), requires_grad=True) for s in ((3,), (2, 2), (), (9000,))]
        reducer = dist.Reducer(made, group)
        with reducer:
            torch.autograd.backward(sum((p.abs() ** 2 + p.real).sum() for p in made))
        for p in made:
            file = io.BytesIO()
            torch.save(p.grad, file)
            own = p.numel() * p.element_size()
            assert len(pickle.dumps(p.grad)) < own + 1000 and file.tell() < own + 2000
            assert copy.deepcopy(p.grad).untyped_storage().nbytes() == own and p.grad.shape == p.shape
            p.grad.detach_()
            p.grad.zero_()
        return reducer.norm()

    assert on_ranks(rank, n) == [0.0] * n


@pytest.mark.parametrize("order", ["exact", "key", "rank"])
@pytest.mark.parametrize("own", ["bfloat16", "float32"])
def test_a_parameter_that_only_the_last_micro_batch_reaches_has_the_dtype_of_the_others(order: Any, own: str) -> None:
    """Beside one that no micro-batch reaches."""

    def rank(group: Any) -> Any:
        always, late, never = (torch.ones(3, dtype=getattr(torch, own), requires_grad=True) for _ in range(3))
        for p in (always, late, never):
            p.grad_dtype = torch.float32
        reducer = dist.Reducer([always, late, never], group, order=order, missing="skip")
        with reducer.accumulate():
            (always.float() * 2).sum().backward()
        with reducer:
            torch.autograd.backward((always + late).float().sum())
        assert never.grad is None
        return [(p.grad.dtype == torch.float32, p.grad.tolist()) for p in (always, late)]

    assert on_ranks(rank) == [[(True, [6, 6, 6]), (True, [2, 2, 2])]] * 2


def test_what_has_no_memory_and_subclasses_are_refused_by_name() -> None:
    class Sub(torch.Tensor):
        pass

    for x, words in (
        (torch.ones(2, device="meta"), r"arrays\[0\]: expected an array, got a torch.Tensor without memory of its own"),
        (torch.ones(2).as_subclass(Sub), r"Sub, which sums by its own \+"),
    ):
        with pytest.raises(TypeError, match=words):
            on_ranks(lambda group, x=x: dist.add_n([x], group), 1)


@pytest.mark.parametrize("into", ["all", "shard"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensors", [True, False])
def test_a_rank_without_arrays_gets_a_sum_of_the_other_ranks_library(tensors: bool, dtype: str, into: Any) -> None:
    def rank(group: Any) -> Any:
        x = torch.ones(600, dtype=getattr(torch, dtype))
        one = x if tensors else x.float().numpy()
        made = dist.add_n([one] if group.rank else [], group, into=into)
        return type(made).__name__, str(made.dtype), float(made[0])

    name = f"torch.{dtype}" if tensors else "float32"
    assert on_ranks(rank, 2) == [("Tensor" if tensors else "ndarray", name, 1.0)] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_a_tensor_of_one_element_or_none_may_have_any_strides(n: int) -> None:
    column = torch.full((1, 5), 3.0)[:, 1]
    nothing = torch.zeros(4).as_strided((0,), (2,))
    assert column.stride() == (5,) and nothing.stride() == (2,)

    def train(group: Any) -> Any:
        return [dist.add_n([x], group).tolist() for x in (column, nothing, column, nothing)]

    assert dist.threads(n, train, timeout=None) == [[[3.0 * n], []] * 2] * n


@pytest.mark.parametrize("order", ["exact", "key", "rank"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_of_a_parameter_without_elements_has_its_shape(order: Any, dtype: str) -> None:
    def rank(group: Any) -> Any:
        w = torch.empty(0, 3, dtype=getattr(torch, dtype), requires_grad=True)
        reducer = dist.Reducer([w], group, order=order)
        with reducer:
            torch.autograd.backward(w.float().sum())
        return w.grad.shape, w.grad.dtype == w.dtype, reducer.norm()

    assert on_ranks(rank) == [((0, 3), True, 0.0)] * 2


@pytest.mark.parametrize(("before", "words"), [(True, "w1 required a gradient"), (False, "w1 required no gradient")])
def test_a_parameter_that_is_frozen_or_unfrozen_later_is_named_on_every_rank(before: bool, words: str) -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        named[1][1].requires_grad_(before)
        reducer = dist.Reducer(named, group)
        bad = group.rank == 1
        named[1][1].requires_grad_(before != bad)
        with pytest.raises(RuntimeError if bad else fanin.PeerError, match=words), reducer:
            torch.autograd.backward(total(named))
        named[1][1].requires_grad_(before)
        with reducer:
            torch.autograd.backward(total(named))
        return named[0][1].grad.tolist(), None if before else named[1][1].grad

    assert on_ranks(rank) == [([2.0] * 3, None)] * 2


def test_a_parameter_whose_shape_has_changed_is_named_with_both_shapes() -> None:
    def rank(group: Any) -> None:
        w = torch.ones(3, requires_grad=True)
        reducer = dist.Reducer([("w", w)], group)
        w.data = torch.ones(4)
        with (
            pytest.raises(ValueError, match=r"w: expected float32 of shape \(3,\), got float32 of shape \(4,\)"),
            reducer,
        ):
            torch.autograd.backward(w.sum())

    on_ranks(rank, 1)


def test_a_rank_without_a_pass_takes_part_where_gradients_may_be_missing() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        for order in ("exact", "key", "rank", None):
            with fanin.torch.accumulate(named, group=group, order=order, missing="skip"):  # type: ignore[arg-type]
                for _ in range(2 * group.rank):
                    total(named).backward()
        return [w.grad.tolist() for _, w in named]

    assert on_ranks(rank) == [[[8.0] * 3] * 2] * 2


def test_a_pass_limited_to_inputs_that_it_does_not_reach_takes_part_in_the_sum() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        inputs = [named[1][1]] if group.rank else None
        reducer = dist.Reducer(named, group, missing="skip")
        with reducer:
            torch.autograd.backward(total(named[:1]), inputs=inputs)
        return named[0][1].grad.tolist()

    assert on_ranks(rank) == [[1.0] * 3] * 2


def test_buckets_travel_while_the_pass_goes_on() -> None:
    def rank(group: Any) -> Any:
        (_, first), (_, last) = named = parameters()
        sent = threading.Event()

        class Tells(dist.Reducer):
            def _sum(self, call: Any, bucket: Any) -> None:
                super()._sum(call, bucket)
                sent.set()

        reducer = Tells(named, group, bucket_bytes=1)
        waited: list[bool] = []
        early = first * 1  # torch runs the newest operation first: `last` has its gradient before this hook
        early.register_hook(lambda g: waited.append(sent.wait()))
        with reducer:
            torch.autograd.backward((early + last * 1).sum())
        return waited, first.grad.tolist()

    assert on_ranks(rank) == [([True], [2.0] * 3)] * 2


# ---------------------------------------------------------------- leaves of both kinds


def leaf_pass(leaf: fanin.Leaf, **options: Any) -> None:
    fanin.backward([(leaf, 0, np.ones(3, "f4"))], **options)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_tensor_that_a_pass_of_fanins_engine_does_not_reach_is_named(mixed: bool, n: int) -> None:
    def rank(group: Any) -> Any:
        [(name, w)], leaf = parameters(1), fanin.Leaf(np.zeros(3, "f4"), name="v")
        mine: list[Any] = [(name, w), leaf]
        reducer = dist.Reducer(mine if mixed else mine[:1], group)
        with pytest.raises(ValueError, match="w0 of the reducer is a tensor"):
            leaf_pass(leaf, reducer=reducer)
        return [(w if leaf is not x else x).grad for x in reducer.leaves]

    assert on_ranks(rank, n) == [[None] * (1 + mixed)] * n


@pytest.mark.parametrize("n", [1, 2])
def test_passes_of_both_engines_in_one_block_reach_leaves_of_both_kinds(n: int) -> None:
    def rank(group: Any) -> Any:
        [(_, w)], leaf = parameters(1), fanin.Leaf(np.zeros(3, "f4"), name="v")
        reducer = dist.Reducer([w, leaf], group)
        with reducer:
            w.sum().backward()
        alone = w.grad.tolist(), leaf.grad
        with reducer as same:
            assert same is reducer
            leaf_pass(leaf)
            w.sum().backward()
            assert leaf.grad is None
        return *alone, w.grad.tolist(), leaf.grad.tolist()

    assert on_ranks(rank, n) == [([1.0 * n] * 3, None, [2.0 * n] * 3, [1.0 * n] * 3)] * n


@pytest.mark.parametrize("n", [1, 2])
def test_leaves_of_both_kinds_are_summed_if_passes_in_accumulate_bring_those_of_one(n: int) -> None:
    def rank(group: Any) -> Any:
        [(_, w)], leaf = parameters(1), fanin.Leaf(np.zeros(3, "f4"), name="v")
        reducer = dist.Reducer([w, leaf], group)
        for last in ("tensors", "leaves"):
            with reducer.accumulate():
                if last == "leaves":
                    w.sum().backward()
                else:
                    leaf_pass(leaf)
            if last == "leaves":
                leaf_pass(leaf, reducer=reducer)
            else:
                with reducer:
                    torch.autograd.backward(w.sum())
        return w.grad.tolist(), leaf.grad.tolist()

    assert on_ranks(rank, n) == [([2.0 * n] * 3, [2.0 * n] * 3)] * n


def test_a_rank_whose_pass_does_not_reach_its_tensors_is_named_on_every_rank() -> None:
    def rank(group: Any) -> Any:
        [(_, w)], leaf = parameters(1), fanin.Leaf(np.zeros(3, "f4"), name="v")
        reducer = dist.Reducer([("w0", w), leaf], group)
        kind = ValueError if group.rank else fanin.PeerError
        with pytest.raises(kind, match="w0 of the reducer is a tensor") as e:
            if group.rank:
                leaf_pass(leaf, reducer=reducer)
            else:
                with reducer:
                    leaf_pass(leaf)
                    torch.autograd.backward(w.sum())
        return group.rank or e.value.rank, w.grad, leaf.grad  # type: ignore[attr-defined]

    assert on_ranks(rank) == [(1, None, None)] * 2


# ---------------------------------------------------------------- the last pass of a block


@pytest.mark.parametrize("order", ["key", "exact", "rank"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_that_travel_in_the_last_pass_are_those_of_the_end_of_the_block(n: int, order: Any) -> None:
    def sums(group: Any, last: bool) -> Any:
        model = net("bfloat16")
        with fanin.torch.accumulate(model.parameters(), group=group, order=order) as block:
            for k in range(3):
                key = 3 * group.rank + k
                if order == "key":
                    block.at(key)
                with block.last() if last and k == 2 else contextlib.nullcontext():
                    loss_of(model, key).backward()
            at_the_end = [p.grad for p in model.parameters()]
        return [p.grad for p in model.parameters()], at_the_end

    def rank(group: Any) -> bool:
        expected, none = sums(group, False)
        ours, early = sums(group, True)
        assert all(g is None for g in none)
        assert all(g is p for g, p in zip(early, ours, strict=True))
        return all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    assert on_ranks(rank, n) == [True] * n


def test_the_key_of_the_last_pass_is_set_before_it() -> None:
    def rank(group: Any) -> Any:
        [(_, w)] = named = parameters(1)
        with fanin.torch.accumulate(named, group=group, order="key") as block:
            for k in range(2):
                block.at(2 * k + group.rank)
                (w * [1e8, 1.0, -1e8, 3.0][2 * k + group.rank]).sum().backward()
            block.at(4 + group.rank)
            with block.last():
                w.sum().backward()
        return w.grad.tolist()

    # ((((1e8 + 1) - 1e8) + 3) + 1) + 1 in float32
    assert on_ranks(rank) == [[5.0] * 3] * 2


def test_buckets_travel_while_the_last_pass_of_a_block_runs() -> None:
    def rank(group: Any) -> Any:
        named = parameters(2)
        (_, first), (_, last) = named
        sent = threading.Event()
        block = fanin.torch.accumulate(named, group=group, order="rank")

        class Tells(dist.Reducer):
            def _sum(self, call: Any, bucket: Any) -> None:
                super()._sum(call, bucket)
                if watched and bucket is watched[0]:
                    sent.set()

        watched: list[Any] = []
        reducer = block._reducer = Tells(named, group, order="rank", bucket_bytes=1)
        with block:
            total(named).backward()
            h = first * 1
            # The gradient of `last` comes first; the pass goes on when its bucket has been summed.
            h.register_hook(lambda g: None if sent.wait() else g)
            watched += [b for b in reducer._buckets if 1 in b.indices]
            with block.last():
                (h + last).sum().backward()
        return first.grad.tolist(), last.grad.tolist()

    assert on_ranks(rank) == [([4.0] * 3, [4.0] * 3)] * 2


def test_after_the_last_pass_of_a_block_another_one_is_refused() -> None:
    def rank(group: Any) -> Any:
        named = parameters(1)
        w = named[0][1]
        with fanin.torch.accumulate(named, group=group) as block:
            w.sum().backward()
            with block.last():
                w.sum().backward()
            with pytest.raises(RuntimeError, match=r"w0 got a gradient after last\(\)"):
                w.sum().backward()
            with pytest.raises(RuntimeError, match=r"last\(\) a second time"), block.last():
                pass
        once = w.grad.tolist()
        with fanin.torch.accumulate(named, group=group) as block:
            w.sum().backward()
        return once, w.grad.tolist()

    assert on_ranks(rank) == [([4.0] * 3, [6.0] * 3)] * 2


@pytest.mark.parametrize("where", ["in", "after", "twice", "grad set"])
def test_an_error_in_or_after_the_last_pass_of_a_block(where: str) -> None:
    def rank(group: Any) -> Any:
        named = parameters(1)
        w = named[0][1]
        bad = group.rank == 1
        error = {"in": ArithmeticError, "after": ArithmeticError, "twice": ValueError, "grad set": RuntimeError}[where]
        kind = error if bad or where == "after" else fanin.PeerError
        with pytest.raises(kind), fanin.torch.accumulate(named, group=group) as block:
            w.sum().backward()
            if bad and where == "grad set":
                w.grad = torch.ones(3)
            with block.last():
                w.sum().backward()
                if bad and where == "twice":
                    w.sum().backward()
                if bad and where == "in":
                    raise ArithmeticError("planted")
            if where == "after":
                raise ArithmeticError("planted")
        found = None if w.grad is None else w.grad.tolist()
        w.grad = None
        with fanin.torch.accumulate(named, group=group) as block:
            w.sum().backward()
        return found, w.grad.tolist()

    after = [4.0] * 3 if where == "after" else None
    first, second = on_ranks(rank)
    assert first == (after, [2.0] * 3)
    assert second == ([1.0] * 3 if where == "grad set" else after, [2.0] * 3)


def test_a_last_pass_is_in_the_block_and_has_no_step_over_ranks() -> None:
    def rank(group: Any) -> Any:
        named = parameters(1)
        block = fanin.torch.accumulate(named, group=group)
        with pytest.raises(RuntimeError, match=r"last\(\) outside of the block"):
            block.last()
        with block:
            with pytest.raises(RuntimeError, match="without ranks"), block.last(lambda p: None):
                pass
            total(named).backward()
        with pytest.raises(TypeError, match="expected a function of a parameter, got None"):
            fanin.torch.accumulate(named).last()
        return named[0][1].grad.tolist()

    assert on_ranks(rank, 1) == [[1.0] * 3]


# ---------------------------------------------------------------- the block of a reducer


def test_a_block_inside_of_another_is_refused_and_the_outer_one_goes_on() -> None:
    def rank(group: Any) -> Any:
        named = parameters(1)
        reducer, other = dist.Reducer(named, group), dist.Reducer(parameters(1), group)
        with reducer:
            with pytest.raises(RuntimeError, match="inside a pass of the same reducer"), reducer:
                pass
            with pytest.raises(RuntimeError, match="inside a pass of the same group"), other:
                pass
            with pytest.raises(RuntimeError, match="inside a pass of the same group"), reducer.accumulate():
                pass
            total(named).backward()
        with reducer.accumulate():
            with pytest.raises(RuntimeError, match="inside a pass of the same group"), reducer:
                pass
            total(named).backward()
        with reducer:
            total(named).backward()
        return named[0][1].grad.tolist()

    assert on_ranks(rank) == [[6.0] * 3] * 2


def test_an_exit_without_a_beginning_is_an_error() -> None:
    def rank(group: Any) -> None:
        with pytest.raises(RuntimeError, match="__exit__ without __enter__"):
            dist.Reducer(parameters(1), group).__exit__(None, None, None)

    on_ranks(rank, 1)


def test_a_block_that_another_thread_begins_meanwhile_is_refused() -> None:
    def rank(group: Any) -> Any:
        named, errors = parameters(1), list[str]()
        reducer = dist.Reducer(named, group)

        def other() -> None:
            with pytest.raises(RuntimeError) as e, reducer:
                pass
            errors.append(str(e.value))

        with reducer:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            total(named).backward()
        return errors, named[0][1].grad.tolist()

    [(errors, grad)] = on_ranks(rank, 1)
    assert "another thread uses the group" in errors[0]
    assert grad == [1.0] * 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_block_that_raises_changes_no_grad_on_any_rank(n: int) -> None:
    def rank(group: Any) -> Any:
        named = parameters(2)
        earlier = named[0][1].grad = torch.full((3,), 7.0)
        reducer = dist.Reducer(named, group)
        kind = ArithmeticError if group.rank == n - 1 else fanin.PeerError
        with pytest.raises(kind, match="planted"), reducer:
            total(named).backward()
            if group.rank == n - 1:
                raise ArithmeticError("planted")
        kept = named[0][1].grad is earlier, earlier.tolist(), named[1][1].grad
        with reducer:
            total(named).backward()
        return *kept, named[0][1].grad.tolist()

    assert on_ranks(rank, n) == [(True, [7.0] * 3, None, [7.0 + n] * 3)] * n


def test_a_second_pass_over_a_leaf_in_one_block_is_an_error() -> None:
    def rank(group: Any) -> Any:
        named = parameters(1)
        with pytest.raises(ValueError, match="w0 got a second gradient"), dist.Reducer(named, group):
            total(named).backward()
            total(named).backward()
        return named[0][1].grad

    assert on_ranks(rank, 1) == [None]


def test_a_pass_that_reaches_no_leaf_of_the_reducer_is_an_error_unless_gradients_may_be_missing() -> None:
    def rank(group: Any) -> Any:
        named, others = parameters(), parameters()
        with (
            pytest.raises(ValueError, match="no leaf of the reducer has a gradient"),
            dist.Reducer(named, group),
        ):
            torch.autograd.backward(total(others))
        with dist.Reducer(named, group, missing="skip"):
            torch.autograd.backward(total(others))
        return [w.grad for _, w in named]

    assert on_ranks(rank) == [[None, None]] * 2


# ---------------------------------------------------------------- hooks that raise


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("way", ["block", "reducer", "leaves"])
def test_a_hook_after_accumulation_that_raises_keeps_no_leaf_from_its_sum(way: str, n: int) -> None:
    """On rank 0; the pass of the other rank ends well, and so does the next one of both."""

    def rank(group: Any) -> Any:
        def hook(text: str) -> Callable[[Any], None]:
            def raises(_: Any) -> None:
                raise ArithmeticError(text)

            return raises

        leaves = [fanin.Leaf(np.zeros(3, "f4"), name=f"w{i}") for i in range(3)]
        named: list[Any] = [(w.name, w) for w in leaves] if way == "leaves" else parameters(3)
        reducer = dist.Reducer(leaves if way == "leaves" else named, group)

        def run() -> None:
            if way == "block":
                with fanin.torch.accumulate(named, group=group):
                    total(named).backward()
            elif way == "reducer":
                with reducer:
                    torch.autograd.backward(total(named))
            else:
                fanin.backward([(w, 0, np.ones(3, "f4")) for w in leaves], reducer=reducer)

        texts = ["first", "second"] if group.rank == 0 else []
        handles = [named[i][1].register_post_accumulate_grad_hook(hook(text)) for i, text in enumerate(texts)]
        with pytest.raises(ArithmeticError, match="first") if texts else contextlib.nullcontext() as e:
            run()
        if e is not None:
            assert any("w0 was accumulated" in note for note in e.value.__notes__)
            assert any("w1 was accumulated: ArithmeticError: second" in note for note in e.value.__notes__)
        for handle in handles:
            handle.remove()
        run()
        return [w.grad.tolist() for _, w in named]

    assert on_ranks(rank, n) == [[[2.0 * n] * 3] * 3] * n


# ---------------------------------------------------------------- what does not fit


class Raises(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise ValueError("planted")


@pytest.mark.parametrize("way", ["block", "reducer", "user", "before"])
def test_a_rank_that_raises_ends_the_sum_of_all_and_the_next_one_works(way: str) -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        named[0][1].grad = torch.zeros(3)
        bad = group.rank == 1
        reducer = dist.Reducer(named, group)
        kind: Any = fanin.PeerError if not bad else RuntimeError if way == "before" else ValueError
        with pytest.raises(kind, match="does not require" if way == "before" else "planted") as e:
            if way == "reducer":
                with reducer:
                    torch.autograd.backward(Raises.apply(total(named)) if bad else total(named))
            elif way == "before":
                with reducer:
                    torch.autograd.backward(torch.ones(()) if bad else total(named))
            else:
                with fanin.torch.accumulate(named, group=group):
                    total(named).backward()
                    if bad and way == "user":
                        raise ValueError("planted")
                    (Raises.apply(total(named)) if bad else total(named)).backward()
        assert bad or (e.value.rank == 1 and "rank 1 failed" in str(e.value))  # type: ignore[attr-defined]
        assert named[0][1].grad.tolist() == [0.0] * 3 and named[1][1].grad is None
        with fanin.torch.accumulate(named, group=group):
            total(named).backward()
        return [w.grad.tolist() for _, w in named]

    assert on_ranks(rank, 3) == [[[3.0] * 3] * 2] * 3


def test_parameters_that_differ_are_named_with_their_rank() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        if group.rank == 1:
            named[1] = ("w1", torch.ones(2, requires_grad=True))
        with (
            pytest.raises(fanin.PeerError, match=r"rank 1 has w1: float32 of shape \(2,\); rank 0 has w1") as e,
            fanin.torch.accumulate(named, group=group),
        ):
            total(named).backward()
        return e.value.rank, e.value.leaf

    assert on_ranks(rank) == [(1, "w1")] * 2


def test_a_parameter_without_a_gradient_on_one_rank_is_named() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        with (
            pytest.raises(fanin.PeerError, match=r"w1 has a gradient on ranks \[0\] and none on ranks \[1\]") as e,
            fanin.torch.accumulate(named, group=group),
        ):
            total(named[: 2 - group.rank]).backward()
        return e.value.rank, e.value.leaf

    assert on_ranks(rank) == [(1, "w1")] * 2


def test_a_nan_on_one_rank_is_named_on_every_rank() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        reducer = dist.Reducer(named, group, detect=True)
        bad = group.rank == 1
        with (
            pytest.raises(FloatingPointError if bad else fanin.PeerError, match="w1: 3 elements inf or NaN") as e,
            reducer,
        ):
            torch.autograd.backward(total(named[:1]) + total(named[1:], float("nan") if bad else 1.0))
        return bad or (e.value.rank, e.value.leaf) == (1, "w1")  # type: ignore[attr-defined]

    assert on_ranks(rank) == [True, True]


def test_two_passes_with_one_key_are_refused() -> None:
    def rank(group: Any) -> None:
        named = parameters()
        with (
            pytest.raises(ValueError, match=r"w[01] got a second gradient"),
            fanin.torch.accumulate(named, group=group, order="key") as block,
        ):
            block.at(0)
            total(named).backward()
            total(named).backward()

    on_ranks(rank, 1)


def test_a_checkpoint_with_reentrance_is_told_what_to_set_and_one_without_is_summed() -> None:
    def rank(group: Any) -> Any:
        w, x = (torch.ones(3, requires_grad=True) for _ in range(2))

        def twice(reentrant: bool) -> Any:
            once = checkpoint(lambda x: x * w, x, use_reentrant=reentrant)
            return checkpoint(lambda x: x * w, once, use_reentrant=reentrant).sum()

        reducer = dist.Reducer([("w", w)], group)
        with pytest.raises(ValueError, match=r"w got a second gradient: .* needs use_reentrant=False"), reducer:
            torch.autograd.backward(twice(True))
        with reducer:
            torch.autograd.backward(twice(False))
        return w.grad.tolist()

    assert on_ranks(rank) == [[4.0] * 3] * 2


def test_a_gradient_that_is_set_in_the_block_is_an_error_on_every_rank() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        bad = group.rank == 0
        with (
            pytest.raises(RuntimeError if bad else fanin.PeerError, match=r"\.grad of w1 was set"),
            fanin.torch.accumulate(named, group=group),
        ):
            total(named).backward()
            if bad:
                named[1][1].grad = torch.ones(3)
        return named[0][1].grad is None

    assert on_ranks(rank) == [True, True]


def test_a_parameter_has_one_collector_and_both_are_named() -> None:
    def rank(group: Any) -> None:
        named = parameters()
        over = fanin.torch.accumulate(named, group=group)
        with fanin.torch.accumulate(named[1:]), pytest.raises(ValueError, match="w1 is collected by another block"):
            over.__enter__()
        with over:
            with pytest.raises(ValueError, match="w0 is collected by another block"):
                fanin.torch.accumulate(named).__enter__()
            with (
                pytest.raises(ValueError, match="Reducer: the gradient of w0 is collected by another block"),
                dist.Reducer(named, group),
            ):
                torch.autograd.backward(total(named))
            total(named).backward()
        assert named[0][1].grad.tolist() == [1.0] * 3

    on_ranks(rank, 1)


@pytest.mark.parametrize("way", ["block", "reducer"])
def test_a_collector_of_one_rank_that_another_block_has_is_an_error_on_all_ranks(way: str) -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        bad = group.rank == 1
        with (
            fanin.torch.accumulate(named) if bad else contextlib.nullcontext(),
            pytest.raises(ValueError if bad else fanin.PeerError, match="w0 is collected by another block") as e,
        ):
            if way == "block":
                with fanin.torch.accumulate(named, group=group):
                    total(named).backward()
            else:
                with dist.Reducer(named, group):
                    torch.autograd.backward(total(named))
        with fanin.torch.accumulate(named, group=group):
            total(named).backward()
        return bad or e.value.rank == 1, named[0][1].grad.tolist()  # type: ignore[attr-defined]

    assert on_ranks(rank) == [(True, [2.0] * 3)] * 2


@pytest.mark.parametrize("backward", [torch.autograd.backward, fanin.torch.backward])
def test_a_pass_of_another_thread_over_other_tensors_during_the_pass_is_refused(backward: Any) -> None:
    def rank(group: Any) -> Any:
        named = parameters(3)
        tensors = [w for _, w in named]
        errors: list[BaseException] = []

        def other() -> None:
            with pytest.raises(RuntimeError) as e:
                backward((tensors[2] * 8).sum())
            errors.append(e.value)

        def meanwhile(g: Any) -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        h = tensors[0] * 1
        h.register_hook(meanwhile)
        reducer = dist.Reducer(named, group, missing="skip")
        with reducer:
            backward((h + tensors[1]).sum())
        [error] = errors
        text = "w2 got a gradient during the reducer's pass, of a pass in another thread: join the thread before"
        assert text in str(error)
        found = [None if w.grad is None else float(w.grad[0]) for w in tensors]
        backward((tensors[2] * 8).sum())
        return found, float(tensors[2].grad[0])

    assert on_ranks(rank) == [([2.0, 2.0, None], 8.0)] * 2


def test_a_gradient_that_comes_after_the_end_of_the_block_is_an_error() -> None:
    def rank(group: Any) -> None:
        named = parameters(1)
        block = fanin.torch.accumulate(named, group=group)
        with block:
            total(named).backward()
        with pytest.raises(RuntimeError, match="w0 got a gradient after the end, of a pass in another thread"):
            block._reducer._put(block._reducer._buckets[0], 0, torch.ones(3))  # as a hook that had begun

    on_ranks(rank, 1)


def test_a_block_takes_gradients_once_and_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from fanin._interop.torch_leaves import Taking

    begins: list[object] = []
    begin = Taking.begin
    monkeypatch.setattr(Taking, "begin", lambda self, *args: (begins.append(self), begin(self, *args))[1])

    def rank(group: Any) -> Any:
        named = parameters()
        for _ in range(3):
            with fanin.torch.accumulate(named, group=group):
                total(named).backward()
        total(named).backward()
        return named[0][1].grad.tolist()

    assert on_ranks(rank, 2) == [[7.0] * 3] * 2
    assert len(begins) == 2 * 3


def test_a_block_whose_sum_is_refused_lets_gradients_reach_grad_again() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        with pytest.raises(RuntimeError, match="is closed"), fanin.torch.accumulate(named, group=group):
            total(named).backward()
            group.close()
        total(named).backward()
        return named[0][1].grad.tolist()

    assert on_ranks(rank, 1) == [[1.0] * 3]


def test_a_block_that_is_dropped_lets_gradients_reach_grad_again() -> None:
    def rank(group: Any) -> Any:
        named = parameters()
        after: list[Any] = []
        named[0][1].register_post_accumulate_grad_hook(after.append)
        block = fanin.torch.accumulate(named, group=group).__enter__()
        total(named).backward()
        with pytest.warns(ResourceWarning, match="dropped without its exit"):
            del block
            gc.collect()
        total(named).backward()
        return named[0][1].grad.tolist(), len(after)

    assert on_ranks(rank, 1) == [([1.0] * 3, 1)]


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda g: fanin.torch.accumulate(parameters(), order="exact"), ValueError, "order= is for sums over ranks"),
    (lambda g: fanin.torch.accumulate(parameters(), missing="skip"), ValueError, "missing= is for sums over ranks"),
    (
        lambda g: fanin.torch.accumulate(parameters(), torch.float32, group=g),
        ValueError,
        "dtype= is for sums without ranks",
    ),
    (lambda g: fanin.torch.accumulate(parameters(), into="main_grad", group=g), ValueError, "into= is for"),
    (lambda g: fanin.torch.accumulate(parameters(), budget=0, group=g), ValueError, "budget= is for"),
    (lambda g: fanin.torch.accumulate(parameters(), group=3), TypeError, "expected an mpi4py communicator"),
    (lambda g: fanin.torch.accumulate(parameters()).at(3), RuntimeError, r"at\(key\) is for a block over ranks"),
    (lambda g: fanin.torch.accumulate(parameters(), group=g).at(3), RuntimeError, "call it in the block"),
    (lambda g: dist.Reducer([torch.ones(2, requires_grad=True) * 2], g), TypeError, "is no leaf"),
    (lambda g: dist.Reducer([torch.ones(2)], g), ValueError, "none that requires a gradient"),
    (lambda g: dist.Reducer(torch.nn.Linear(2, 2), g), TypeError, r"got a Linear: give model\.parameters\(\)"),
    (lambda g: dist.Reducer(torch.ones(2, requires_grad=True), g), TypeError, r"got a Tensor: give \[leaf\]"),
    (lambda g: dist.Reducer([torch.ones(2, requires_grad=True)] * 1 + [3], g), TypeError, r"leaves\[1\]"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(call: Any, kind: type[Exception], words: str) -> None:
    def rank(group: Any) -> None:
        with pytest.raises(kind, match=words):
            call(group)

    on_ranks(rank, 1)


def test_a_hook_keeps_the_group_of_a_communicator_that_has_no_hash_and_takes_no_reference() -> None:
    class Plain:
        __slots__ = ("group",)  # and no __weakref__
        __hash__ = None  # type: ignore[assignment]

        def __fanin_group__(self) -> Any:
            return self.group

    def program(group: Any) -> None:
        one, known = Plain(), {}  # type: ignore[var-annotated]
        one.group = group
        assert torch_ranks._group("ddp_hook", one, known) is torch_ranks._group("ddp_hook", one, known) is group
        assert len(known) == 1

    dist.threads(2, program, timeout=None)


def test_a_graph_of_gradients_is_refused_in_the_block() -> None:
    def rank(group: Any) -> None:
        named = parameters(1)
        with (
            pytest.raises(RuntimeError, match="w0 records a graph"),
            fanin.torch.accumulate(named, group=group),
        ):
            (named[0][1] ** 2).sum().backward(create_graph=True)

    on_ranks(rank, 1)


def replica(group: Any) -> Any:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    named = list(model.named_parameters())
    made = []
    for synced in (True, False):
        try:
            with fanin.torch.accumulate(named, group=group):
                if synced:
                    model(torch.ones(1, 3)).sum().backward()
                else:
                    with model.no_sync():
                        model(torch.ones(1, 3)).sum().backward()
            made.append(named[0][1].grad.tolist())
        except RuntimeError as e:
            made.append(str(e))
            model.zero_grad()
    return made


def test_a_replica_of_ddp_is_refused_outside_of_no_sync(tmp_path: Path) -> None:
    for synced, alone_ in on_processes(2, replica, tmp_path):
        assert "was set meanwhile" in synced and "DistributedDataParallel" in synced
        assert alone_ == [[2.0] * 3] * 2


class Wrapper(torch.Tensor):
    """A tensor around another one, without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        made = fn(*map(inner, args), **{key: inner(x) for key, x in (kwargs or {}).items()})
        return Wrapper(made) if isinstance(made, torch.Tensor) else made


@pytest.mark.parametrize("make", [lambda: Wrapper(torch.ones(2)), lambda: torch.ones(2, device="meta")])
def test_a_parameter_without_memory_is_refused_by_name(make: Callable[[], Any]) -> None:
    p = make().requires_grad_()
    with pytest.raises(TypeError, match="Reducer: weight: expected a tensor whose elements lie in memory, got a"):
        dist.threads(1, lambda group: dist.Reducer([("weight", p)], group), timeout=None)


def test_a_gradient_without_memory_is_refused_by_the_name_of_its_parameter() -> None:
    def rank(group: Any) -> Any:
        p = torch.ones(2, requires_grad=True)
        reducer = dist.Reducer([("weight", p)], group)
        handle = p.register_hook(Wrapper)
        refused = pytest.raises(TypeError, match=r"Reducer: weight: cannot copy its gradient, a (\w+\.)*Wrapper: ")
        with refused, reducer.accumulate():
            (p * 2).sum().backward()
        assert p.grad is None
        handle.remove()
        with reducer:
            torch.autograd.backward((p * 2).sum())
        return p.grad.tolist()

    assert dist.threads(2, rank, timeout=None) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize(
    "call",
    [lambda r: r.norm(), lambda r: r.stats(), lambda r: dist.clip_norm(r, 1.0)],
    ids=["norm", "stats", "clip_norm"],
)
def test_norms_of_a_block_that_has_not_ended_are_refused(call: Callable[[Any], Any]) -> None:
    """The sums are made at its end: before, `.grad` has those of the pass before."""

    def train(group: Any) -> None:
        w = torch.ones(3, requires_grad=True)
        w.grad = torch.full((3,), 100.0)
        reducer = dist.Reducer([w], group, order="exact")
        with reducer:
            (w * 2).sum().backward()
            with pytest.raises(RuntimeError, match="inside a pass of the reducer, whose sums are made at its end"):
                call(reducer)
        assert w.grad.tolist() == [104.0] * 3
        call(reducer)

    dist.threads(2, train, timeout=None)


def test_blocks_of_one_model_share_a_reducer_and_a_thread_that_end_with_the_model() -> None:
    """Without a collection of cycles."""

    def rank(group: Any) -> tuple[bool, list[Any]]:
        model, used = net(), []
        for k in range(3):
            with fanin.torch.accumulate(model.parameters(), group=group) as block:
                loss_of(model, 2 * k).backward()
                loss_of(model, 2 * k + 1).backward()
            used.append(weakref.ref(block._reducer))
            del block
            step(model)
        shared = len({id(one()) for one in used}) == 1 and used[0]() is not None
        del model
        return shared, [one() for one in used]

    before = set(threading.enumerate())
    gc.disable()
    try:
        assert dist.threads(2, rank, timeout=None) == [(True, [None] * 3)] * 2
    finally:
        gc.enable()
    for thread in set(threading.enumerate()) - before:
        thread.join()


# ---------------------------------------------------------------- gradients that the core copies


def opened(has: bytes, now: list[Any]) -> tuple[Any, list[Any], Any, list[Any]]:
    """A hook of the second of two places of an open gate, the gate, the second place, and what the hook passed on."""
    fanin.add_n([torch.zeros(1)])  # the core knows torch from its first tensor on
    passed: list[Any] = []
    places = [np.zeros(3, "f4"), np.zeros((2, 3), "f4")]
    gate: list[Any] = [bytearray(has), places, now]

    def otherwise(gradients: tuple[Any]) -> tuple[None]:
        passed.append(gradients[0])
        return (None,)

    return _core.gate_hook(gate, 1, otherwise), gate, places[1], passed


def test_a_plain_gradient_is_copied_through_an_open_gate_once() -> None:
    hook, gate, place, passed = opened(b"\0\0", [])
    gradient = torch.arange(6.0).reshape(2, 3)
    assert hook((gradient,)) == (None,)
    assert (place.tolist(), gate[0], passed) == (gradient.tolist(), b"\0\1", [])
    assert hook((gradient + 1,)) == (None,)
    assert len(passed) == 1 and place.tolist() == gradient.tolist()


@pytest.mark.parametrize(
    "gradient",
    [
        None,
        torch.zeros(3),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(3, 2).T,
        torch.zeros(1, 1).expand(2, 3),
        torch.zeros(2, 3, requires_grad=True),
        torch.imag(torch.zeros(2, 3, dtype=torch.complex64).conj()),
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, device="meta"),
        torch.nn.Parameter(torch.zeros(2, 3)),
        np.zeros((2, 3), "f4"),
    ],
)
def test_what_is_no_plain_gradient_is_passed_on(gradient: Any) -> None:
    hook, gate, place, passed = opened(b"\0\0", [])
    place[:] = 7
    assert hook((gradient,)) == (None,)
    assert len(passed) == 1 and passed[0] is gradient
    assert gate[0] == b"\0\0" and (place == 7).all()


@pytest.mark.parametrize("why", ["closed", "weights", "has one"])
def test_nothing_is_copied_through_a_gate_that_is_closed(why: str) -> None:
    hook, gate, place, passed = opened(b"\0\1" if why == "has one" else b"\0\0", [-1, None] if why == "weights" else [])
    if why == "closed":
        gate.clear()
    hook((torch.ones(2, 3),))
    assert len(passed) == 1 and not place.any()


def test_a_gate_is_open_between_gradients_and_closed_while_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes through an open gate while another gradient of the same leaf is copied would be lost."""

    def rank(group: Any) -> tuple[list[int], list[int], float]:
        p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        with fanin.torch.accumulate([p, q], group=group) as block:
            [bucket] = block._reducer._buckets
            copy, within, after = _core.copy_plain, [], []

            def watched(gradient: Any, place: Any) -> bool:
                within.append(len(bucket.gate))
                return bool(copy(gradient, place))

            monkeypatch.setattr(_core, "copy_plain", watched)
            for _ in range(3):
                (p.sum() + q.sum()).backward()
                after.append(len(bucket.gate))
        return within, after, p.grad[0].item()

    within, after, total = dist.threads(1, rank, timeout=None)[0]
    assert (set(within), after, total) == ({0}, [3, 3, 3], 3.0)


def test_a_reducer_that_takes_no_more_closes_its_gates() -> None:
    def rank(group: Any) -> None:
        p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        with fanin.torch.accumulate([p, q], group=group) as block:
            p.sum().backward()
            block._reducer._takes_no_more()
            (2 * q).sum().backward()

    with pytest.raises(RuntimeError, match="got a gradient after the end"):
        dist.threads(1, rank, timeout=None)


def test_no_gate_is_open_outside_of_a_block() -> None:
    def rank(group: Any) -> list[int]:
        p = torch.nn.Parameter(torch.zeros(3))
        found = []
        for last in (False, True):
            with fanin.torch.accumulate([p], group=group) as block:
                [bucket] = block._reducer._buckets
                p.sum().backward()
                found.append(len(bucket.gate))
                if last:
                    with block.last():
                        found.append(len(bucket.gate))
                        p.sum().backward()
                        found.append(len(bucket.gate))
            found.append(len(bucket.gate))
        return found

    assert dist.threads(2, rank, timeout=None) == [[3, 0, 3, 0, 0, 0]] * 2
