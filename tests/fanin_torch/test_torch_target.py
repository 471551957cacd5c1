"""fanin.torch.accumulate: a sum that is lent to a kernel, and an optimizer that steps leaf by leaf in the last pass."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fanin
from kit.ctrl_c import stopped
from kit.torch_group import group_alone

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]

torch = pytest.importorskip("torch", reason="torch is not installed")
fanin_torch: Any = pytest.importorskip("fanin.torch")

Kernel = Callable[[Any, Any, Any], object]


def addmm(acc: Any, x: Any, g: Any) -> None:
    """Adds as a fused kernel does, with beta = 1, on the CPU."""
    acc.addmm_(x.mH.to(acc.dtype), g.to(acc.dtype), beta=1)


class Fused(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """x @ w, whose gradient of w a kernel adds to the block's sum."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, block: Any, kernel: Kernel) -> Any:
        ctx.save_for_backward(x, w)
        ctx.w, ctx.block, ctx.kernel = w, block, kernel
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        with ctx.block.target(ctx.w) as acc:
            ctx.kernel(acc, x, g)
        return g @ w.mH, None, None, None


def whole(*shape: int, dtype: Any = None) -> Any:
    """Small whole numbers, whose products and sums have no roundings in any order."""
    return torch.randint(-3, 4, shape).to(dtype or torch.float32)


def parameter(*shape: int, dtype: Any = None) -> Any:
    return torch.nn.Parameter(whole(*shape, dtype=dtype))


def batches(n: int, dtype: Any = None) -> list[Any]:
    torch.manual_seed(n)
    return [whole(5, 4, dtype=dtype) for _ in range(n)]


def real(y: Any) -> Any:
    """A sum that can be differentiated."""
    return (y.real if y.is_complex() else y).sum()


def plain(w: Any, xs: list[Any], uses: int = 1) -> Any:
    """The gradient that torch sums, beside what .grad has."""
    x: Any
    for x in xs:
        sum(real(x @ w) for _ in range(uses)).backward()
    sum_, w.grad = w.grad, None
    return sum_


# The sum is lent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("sums", [None, "exact", "own", "float64"])
@pytest.mark.parametrize("budget", [None, 0, 100, "auto"])
def test_what_a_kernel_adds_is_in_the_sum_in_its_dtype(dtype: Any, sums: Any, budget: Any) -> None:
    accumulate = dtype if sums == "own" else torch.complex128 if sums == "float64" and dtype.is_complex else sums
    w = parameter(4, 3, dtype=dtype)
    xs = batches(6, dtype)
    seen = set()

    def kernel(acc: Any, x: Any, g: Any) -> None:
        seen.add(acc.dtype)
        assert acc.shape == w.shape and not acc.requires_grad
        addmm(acc, x, g)

    with fanin_torch.accumulate([w], dtype=accumulate, budget=budget) as block:
        for x in xs:
            real(Fused.apply(x, w, block, kernel)).backward()
            assert w.grad is None
        assert block._buffer.counters.adds == 6, "one contribution each"
    ours = w.grad
    w.grad = None
    assert ours.dtype == dtype and torch.equal(ours, plain(w, xs))
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    [one] = seen
    assert one == {"own": dtype, "float64": torch.complex128 if dtype.is_complex else torch.float64}.get(sums, wide)


def test_the_running_sum_itself_is_lent_and_no_gradient_is_made() -> None:
    w, addresses = parameter(4, 3), []

    def kernel(acc: Any, x: Any, g: Any) -> None:
        addresses.append(acc.data_ptr())
        addmm(acc, x, g)

    with fanin_torch.accumulate([w]) as block:
        for x in batches(5):
            Fused.apply(x, w, block, kernel).sum().backward()
    assert len(set(addresses)) == 1 and w.grad.data_ptr() == addresses[0]


@pytest.mark.parametrize("into", ["grad", "main_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_earlier_gradient_in_the_dtype_of_the_sum_is_what_is_lent(into: str, dtype: Any) -> None:
    w, addresses = parameter(4, 3, dtype=dtype), set()
    first = whole(4, 3, dtype=torch.float32 if into == "main_grad" else dtype)
    start = first.clone()
    setattr(w, into, first)
    xs = batches(4, dtype)

    def kernel(acc: Any, x: Any, g: Any) -> None:
        addresses.add(acc.data_ptr())
        addmm(acc, x, g)

    with fanin_torch.accumulate([w], into=into) as block:
        for x in xs:
            Fused.apply(x, w, block, kernel).sum().backward()
    assert getattr(w, into) is first
    w.grad = None
    assert torch.equal(first, start + plain(w, xs))
    assert (addresses == {first.data_ptr()}) == (first.dtype == torch.float32)


@pytest.mark.parametrize("budget", [None, "auto"])
def test_kernels_and_gradients_of_a_tied_weight_add_up(budget: Any) -> None:
    w = parameter(4, 4)
    xs = batches(6)
    with fanin_torch.accumulate([w], budget=budget) as block:
        for k, x in enumerate(xs):
            y = Fused.apply(x, w, block, addmm).sum() if k % 3 else (x @ w).sum()
            if k % 2:
                (y + (x @ w).sum()).backward()
            else:
                (y + Fused.apply(x, w, block, addmm).sum()).backward()
    ours = w.grad
    w.grad = None
    assert torch.equal(ours, plain(w, xs, uses=2))


def test_sums_beside_a_sparse_gradient_are_dense() -> None:
    w = parameter(4, 3)
    rows, x = torch.tensor([1, 1, 3]), batches(1)[0]
    with fanin_torch.accumulate([w]) as block:
        torch.nn.functional.embedding(rows, w, sparse=True).sum().backward()
        Fused.apply(x, w, block, addmm).sum().backward()
    want = plain(w, [x]) if (ours := w.grad) is None else None
    w.grad = None
    want = plain(w, [x])
    want[1] += 2
    want[3] += 1
    assert torch.equal(ours, want)


@pytest.mark.parametrize("make", ["transposed", "channels", "gaps", "expanded"])
def test_a_parameter_of_any_layout_gets_a_sum_of_torchs_layout(make: str) -> None:
    base = whole(4, 6, 2, 3)
    data = {
        "transposed": base.permute(3, 1, 0, 2),
        "channels": base.to(memory_format=torch.channels_last),
        "gaps": base[:, ::2],
        "expanded": base[:1].expand(4, 6, 2, 3),
    }[make]
    w = data.detach().requires_grad_()
    factor = whole(*w.shape)

    class Scaled(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, w: Any) -> Any:
            ctx.save_for_backward(w)
            return w * factor

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            [w] = ctx.saved_tensors
            with block.target(w) as acc:
                assert acc.shape == w.shape
                acc.addcmul_(g, factor)
            return None

    for early in (False, True):  # an ordinary gradient is the first term
        w.grad = None
        with fanin_torch.accumulate([w]) as block:
            if early:
                (w * factor).sum().backward()
            for _ in range(3 - early):
                Scaled.apply(w).sum().backward()
        ours, w.grad = w.grad, None
        for _ in range(3):
            (w * factor).sum().backward()
        assert torch.equal(ours, w.grad) and ours.stride() == w.grad.stride()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0)])
def test_shapes_at_the_edge_are_lent(shape: tuple[int, ...]) -> None:
    w = torch.nn.Parameter(torch.ones(shape))
    with fanin_torch.accumulate([w]) as block, torch.no_grad():
        for _ in range(3):
            with block.target(w) as acc:
                assert acc.shape == shape
                acc += 2
    assert torch.equal(w.grad, torch.full(shape, 6.0))


def test_hooks_after_accumulation_run_once_at_the_end() -> None:
    w, seen = parameter(4, 3), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    xs = batches(3)
    with fanin_torch.accumulate([w]) as block:
        for x in xs:
            Fused.apply(x, w, block, addmm).sum().backward()
        assert not seen
    [one] = seen
    assert torch.equal(one, w.grad)


def test_passes_of_fanins_engine_reach_targets() -> None:
    w, v = parameter(4, 3), parameter(3)
    xs = batches(3)
    with fanin_torch.accumulate([w, v]) as block:
        for x in xs:
            fanin_torch.backward((Fused.apply(x, w, block, addmm) * v).sum())
    ours = w.grad, v.grad
    w.grad = v.grad = None
    for x in xs:
        ((x @ w) * v).sum().backward()
    assert torch.equal(ours[0], w.grad) and torch.equal(ours[1], v.grad)


def test_checkpoints_reach_targets() -> None:
    from torch.utils.checkpoint import checkpoint

    w = parameter(4, 3)
    xs = batches(3)
    for reentrant in (False, True):
        w.grad = None
        with fanin_torch.accumulate([w]) as block:
            for x in xs:
                x = x.clone().requires_grad_()
                checkpoint(lambda x: Fused.apply(x, w, block, addmm), x, use_reentrant=reentrant).sum().backward()
        ours, w.grad = w.grad, None
        assert torch.equal(ours, plain(w, xs)), reentrant


def test_a_replica_within_no_sync_lends_its_sums(tmp_path: Any) -> None:
    with group_alone(tmp_path):

        class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.w, self.block = parameter(4, 3), None

            def forward(self, x: Any) -> Any:
                return Fused.apply(x, self.w, self.block, addmm) if self.block is not None else x @ self.w

        model = Model()
        replica = torch.nn.parallel.DistributedDataParallel(model)
        xs = batches(3)
        with fanin_torch.accumulate(model.parameters()) as block, replica.no_sync():
            model.block = block
            for x in xs:
                replica(x).sum().backward()
        ours, model.w.grad = model.w.grad, None
        assert torch.equal(ours, plain(model.w, xs))


@pytest.mark.parametrize("rounds", [50, pytest.param(1_000, marks=pytest.mark.slow)])
def test_kernels_of_several_threads_lose_nothing(rounds: int) -> None:
    w = parameter(4, 4)
    xs = batches(4)
    with fanin_torch.accumulate([w]) as block:

        def work(x: Any, fused: bool) -> None:
            for k in range(rounds):
                (Fused.apply(x, w, block, addmm) if fused or k % 2 else x @ w).sum().backward()

        threads = [threading.Thread(target=work, args=(x, k % 2 == 0)) for k, x in enumerate(xs)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    ours, w.grad = w.grad, None
    assert torch.equal(ours, rounds * plain(w, xs))


def test_a_thread_that_finds_the_sum_lent_gets_zeros() -> None:
    w = parameter(4, 3)
    inside, go = threading.Event(), threading.Event()
    addresses = []

    def other() -> None:
        inside.wait()
        with torch.no_grad(), block.target(w) as acc:
            addresses.append(acc.data_ptr())
            assert not acc.any()
            acc += 10
        go.set()

    thread = threading.Thread(target=other)
    thread.start()
    with fanin_torch.accumulate([w]) as block, torch.no_grad():
        with block.target(w) as acc:
            acc += 1
        with block.target(w) as acc:
            addresses.append(acc.data_ptr())
            inside.set()
            go.wait()
            acc += 1
        thread.join()
    assert w.grad.eq(12).all() and len(set(addresses)) == 2


def test_a_target_within_a_target_of_the_parameter_holds_zeros() -> None:
    w = parameter(4, 3)
    with fanin_torch.accumulate([w]) as block, torch.no_grad():
        for _ in range(2):
            with block.target(w) as outer:
                outer += 1
                with block.target(w) as inner:
                    assert not inner.any()
                    inner += 10
                with torch.enable_grad():
                    (w * 100).sum().backward()
                outer += 1000
    assert w.grad.eq(2222).all()


# What goes wrong


@pytest.mark.parametrize("dtype", ["exact", None])
def test_a_body_that_raises_drops_zeros(dtype: Any) -> None:
    """The first target of a parameter, and each of an exact sum, holds zeros."""
    w, v = parameter(4, 3), parameter(2)
    with fanin_torch.accumulate([("w", w), ("v", v)], dtype=dtype) as block, torch.no_grad():
        with pytest.raises(ZeroDivisionError), block.target(w) as acc:
            acc += 7
            1 / 0
        with block.target(w) as acc:
            acc += 1
        if dtype == "exact":
            with pytest.raises(ZeroDivisionError), block.target(w) as acc:
                acc += 7
                1 / 0
        with torch.enable_grad():
            v.sum().backward()
    assert w.grad.eq(1).all() and v.grad.eq(1).all()


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_body_that_raises_with_the_running_sum_poisons_it_by_name(earlier: bool, error: Any) -> None:
    w, v = parameter(4, 3), parameter(2)
    if earlier:
        w.grad = torch.ones(4, 3)
    first = w.grad

    def failing(acc: Any, x: Any, g: Any) -> None:
        acc += 100
        raise error("no kernel today")

    x = batches(1)[0]
    with (
        pytest.raises(RuntimeError, match=r"no \.grad for the sum of w: .*body of target\(\) failed"),
        fanin_torch.accumulate([("w", w), ("v", v)]) as block,
    ):
        if not earlier:
            Fused.apply(x, w, block, addmm).sum().backward()
        v.sum().backward()
        with pytest.raises(error, match="no kernel today"):
            Fused.apply(x, w, block, failing).sum().backward()
        with pytest.raises(RuntimeError, match=r"w: .*body of target\(\) failed"):
            Fused.apply(x, w, block, addmm).sum().backward()
    assert w.grad is first and v.grad.eq(1).all(), "the others have their sums"
    w.grad = None
    with fanin_torch.accumulate([w]) as block:  # and the next block is sound
        Fused.apply(x, w, block, addmm).sum().backward()
    ours, w.grad = w.grad, None
    assert torch.equal(ours, plain(w, [x]))


def test_targets_that_cannot_be_lent_are_refused_by_name_and_the_sum_stays() -> None:
    w, other = parameter(4, 3), parameter(4, 3)
    block = fanin_torch.accumulate([("w", w)])
    with pytest.raises(RuntimeError, match=r"target\(p\) outside of the block"):
        block.target(w)
    with block, torch.no_grad():
        with block.target(w) as acc:
            acc += 1
        with pytest.raises(ValueError, match=r"target\(p\): the block does not collect this tensor of shape \(4, 3\)"):
            block.target(other)
        with pytest.raises(ValueError, match="not a view or a copy"):
            block.target(w[1:])
        with pytest.raises(ValueError, match="not a view or a copy"):
            block.target(torch.nn.Parameter(w.detach()))  # another parameter of the same memory
        with pytest.raises(TypeError, match="expected a parameter of the block, got a str"):
            block.target("w")
        with (
            torch.enable_grad(),
            pytest.raises(RuntimeError, match=r"target of w: gradients are enabled, .*create_graph"),
            block.target(w),
        ):
            pass
        hook = w.register_hook(lambda g: g * 2)
        with pytest.raises(RuntimeError, match=r"target of w: it has hooks of register_hook"), block.target(w):
            pass
        hook.remove()
        once = block.target(w)
        with once as acc:
            acc += 1
        with pytest.raises(RuntimeError, match="a target is entered once"), once:
            pass
        twice = block.target(w)
        with twice as acc:
            with pytest.raises(RuntimeError, match="a target is entered once"), twice:
                pass
            acc += 1
        with pytest.raises(RuntimeError, match="without __enter__"):
            block.target(w).__exit__(None, None, None)
        early = block.target(w)
        kept = w.data
        w.data = torch.ones(2)
        with pytest.raises(ValueError, match=r"target of w: its shape was \(4, 3\) .* and is \(2,\) now"), early:
            pass
        w.data = kept
    assert w.grad.eq(3).all()
    with pytest.raises(RuntimeError, match=r"target\(p\) outside of the block"):
        block.target(w)
    w.grad = None
    late = contextlib.ExitStack()
    with block:
        later = block.target(w)
    with pytest.raises(RuntimeError, match=r"target\(p\) outside of the block"), torch.no_grad(), late:
        late.enter_context(later)
    assert w.grad is None


def test_parameters_without_memory_are_refused_by_name() -> None:
    w = torch.nn.Parameter(torch.empty(2, device="meta"))
    with (
        torch.no_grad(),
        fanin_torch.accumulate([("w", w)]) as block,
        pytest.raises(TypeError, match=r"target of w: expected a tensor with memory of its own .* on meta"),
        block.target(w),
    ):
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_over_ranks_refuse_targets_and_last_by_name(ranks: int) -> None:
    dist: Any = pytest.importorskip("fanin.dist")

    def rank(group: Any) -> bool:
        w = torch.nn.Parameter(torch.ones(2))
        with fanin_torch.accumulate([w], group=group) as block:
            with pytest.raises(RuntimeError, match=r"target\(p\) is for a block without ranks"):
                block.target(w)
            with pytest.raises(RuntimeError, match=r"last\(step\) is for a block without ranks"), block.last(print):
                pass
            w.sum().backward()
        return bool(w.grad.eq(ranks).all())

    assert dist.threads(ranks, rank, timeout=None) == [True] * ranks


def test_a_pass_that_records_a_graph_is_refused_and_the_sum_stays() -> None:
    w = parameter(4, 3)
    xs = batches(2)
    with fanin_torch.accumulate([w]) as block:
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"target of .* acc records a graph"),
            block.target(w) as acc,  # zeros: they are dropped
            torch.enable_grad(),
        ):
            acc += w.detach().clone().requires_grad_()
        Fused.apply(xs[0], w, block, addmm).sum().backward()
        x = xs[1].requires_grad_()
        with pytest.raises(RuntimeError, match="gradients are enabled"):
            Fused.apply(x, w, block, addmm).square().sum().backward(create_graph=True)
    ours, w.grad = w.grad, None
    assert torch.equal(ours, plain(w, xs[:1]))


@pytest.mark.parametrize("change", ["set_", "resize_", "data", "transpose_"])
def test_a_tensor_whose_memory_was_exchanged_is_refused_by_name(change: str) -> None:
    w = parameter(4, 3)
    with fanin_torch.accumulate([("w", w)]) as block, torch.no_grad():
        with pytest.raises(RuntimeError, match="target of w: acc has other memory"), block.target(w) as acc:
            if change == "set_":
                acc.set_(torch.ones(4, 3))
            elif change == "resize_":
                acc.resize_(1, 2)
            elif change == "data":
                acc.data = torch.ones(4, 3)
            else:
                acc.transpose_(0, 1)
        with block.target(w) as acc:
            acc += 1
    assert w.grad.eq(1).all()


def test_the_tensor_is_empty_after_its_with_and_a_write_to_it_meets_no_sum() -> None:
    w, kept = parameter(4, 3), []
    with fanin_torch.accumulate([w]) as block, torch.no_grad():
        for _ in range(3):
            with block.target(w) as acc:
                acc += 1
                kept.append(acc)
            assert acc.shape == (0,)
            acc += 100
            with pytest.raises(RuntimeError):
                acc += torch.ones(4, 3)
    for acc in kept:
        acc.fill_(9)
    assert w.grad.eq(3).all()


@pytest.mark.parametrize("then", ["end", "target", "last"])
def test_a_view_that_is_written_after_the_with_is_named(then: str) -> None:
    w, v = parameter(4, 3), parameter(2)
    stepped: list[Any] = []
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"a view of what target\(\) lent was written after its `with`: the sum of w"),
        fanin_torch.accumulate([("w", w), ("v", v)]) as block,
    ):
        with torch.enable_grad():
            v.sum().backward()
        with block.target(w) as acc:
            acc += 1
            view = acc[1:]
        view += 1
        if then == "target":
            with block.target(w) as acc:
                acc += 1
        if then == "last":
            with block.last(stepped.append):
                pass
    assert not stepped
    assert v.grad.eq(1).all()


def test_views_that_are_kept_and_not_written_are_no_error() -> None:
    w = parameter(4, 3)
    with fanin_torch.accumulate([w]) as block, torch.no_grad():
        for _ in range(3):
            with block.target(w) as acc:
                acc += 1
                view = acc.view(-1)
        assert view.shape == (12,)
    assert w.grad.eq(3).all()


def test_a_target_that_is_open_when_the_block_ends_is_named_and_what_it_added_counts() -> None:
    w = parameter(4, 3)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match="a target of w was open when the block ended"),
        fanin_torch.accumulate([("w", w)]) as block,
    ):
        for _ in range(2):
            with block.target(w) as acc:
                acc += 1
        target = block.target(w)
        acc = target.__enter__()
        acc += 1
    assert w.grad.eq(3).all() and acc.shape == (0,)
    with pytest.raises(RuntimeError, match="target of w: the block ended first"):
        target.__exit__(None, None, None)
    assert w.grad.eq(3).all()


def test_a_target_of_another_thread_ends_before_the_block_or_is_an_error_there() -> None:
    w = parameter(4, 3)
    inside, ended = threading.Event(), threading.Event()
    errors: list[str] = []

    def other() -> None:
        try:
            with torch.no_grad(), block.target(w), block.target(w) as acc:  # zeros
                acc += 7
                inside.set()
                ended.wait()
        except RuntimeError as e:
            errors.append(str(e))

    thread = threading.Thread(target=other)
    with fanin_torch.accumulate([("w", w)]) as block:
        thread.start()
        inside.wait()
        w.sum().backward()
    ended.set()
    thread.join()
    assert w.grad.eq(1).all()
    assert len(errors) == 1 and "target of w: the block ended first" in errors[0]
    w.grad = None
    with block:
        w.sum().backward()
    assert w.grad.eq(1).all(), "nothing is left over for the next block"


def test_a_target_that_is_dropped_poisons_the_sum_by_name() -> None:
    w = parameter(4, 3)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"no \.grad for the sum of w: .*body of target\(\) failed"),
        fanin_torch.accumulate([("w", w)]) as block,
    ):
        with block.target(w) as acc:
            acc += 1
        target = block.target(w)
        target.__enter__()
        del target
        gc.collect()
    assert w.grad is None


def test_targets_work_in_inference_mode() -> None:
    w = parameter(4, 3)
    with fanin_torch.accumulate([w]) as block:
        for _ in range(3):
            with torch.inference_mode(), block.target(w) as acc:
                acc += 1
    assert w.grad.eq(3).all() and not w.grad.is_inference()


# An optimizer in the last pass


def chain(n: int = 4) -> list[Any]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(n)]


def loss(ws: list[Any], x: Any) -> Any:
    for w in ws:
        x = torch.tanh(x @ w)
    return x.square().mean()


def inputs(n: int) -> list[Any]:
    torch.manual_seed(2)
    return [torch.randn(5, 4) for _ in range(n)]


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("one_block", [False, True])
def test_a_training_loop_has_the_parameters_of_torchs_loop(
    optimizer: str, clears: bool, micro: int, one_block: bool
) -> None:
    make = {"SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "Adam": lambda ps: torch.optim.Adam(ps)}
    ours, theirs = chain(), chain()
    each = {p: make[optimizer]([p]) for p in ours}
    every = make[optimizer](theirs)
    xs = inputs(micro)

    def step(p: Any) -> None:
        each[p].step()
        if clears:
            each[p].zero_grad()

    collected = fanin_torch.accumulate(ours)

    def steps(block: Any, times: int) -> None:
        for _ in range(times):
            for x in xs[:-1]:
                loss(ours, x).backward()
            with block.last(step):
                loss(ours, xs[-1]).backward()

    if one_block:
        with collected as block:
            steps(block, 3)
    else:
        for _ in range(3):
            with collected as block:
                steps(block, 1)
    for _ in range(3):
        for x in xs:
            loss(theirs, x).backward()
        every.step()
        every.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(p.grad is None for p in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sum_is_whole_alone_and_freed_before_the_next(dtype: Any) -> None:
    ws = [torch.nn.Parameter(p.detach().to(dtype)) for p in chain()]
    xs = [x.to(dtype) for x in inputs(3)]
    with fanin_torch.accumulate(ws):
        for x in xs:
            loss(ws, x).backward()
    want = {w: w.grad for w in ws}
    for w in ws:
        w.grad = None
    order: list[Any] = []
    sums: list[Any] = []

    def step(p: Any) -> None:
        assert all(reference() is None for reference in sums), "an earlier sum is alive"
        assert [q for q in ws if q.grad is not None] == [p]
        assert torch.equal(p.grad, want[p]) and not torch.is_grad_enabled()
        sums.append(weakref.ref(p.grad.untyped_storage()))
        sums.append(weakref.ref(p.grad))
        order.append(p)

    with fanin_torch.accumulate(ws) as block:
        for x in xs[:-1]:
            loss(ws, x).backward()
        with block.last(step):
            loss(ws, xs[-1]).backward()
            assert len(order) == 4, "within the pass"
        assert [id(p) for p in order] == [id(p) for p in reversed(ws)]
    assert all(w.grad is None for w in ws)


def test_parameters_that_the_pass_does_not_reach_are_stepped_at_the_end() -> None:
    ws, idle = chain(3), parameter(2)
    early = parameter(2)
    early.grad = torch.full((2,), 5.0)
    stepped: list[Any] = []
    with fanin_torch.accumulate([idle, early, *ws]) as block:
        loss(ws, inputs(1)[0]).backward()
        with block.last(stepped.append):
            loss(ws[2:], inputs(1)[0]).backward()
            assert [id(p) for p in stepped] == [id(ws[2])]
    assert [id(p) for p in stepped] == [id(p) for p in (ws[2], early, ws[0], ws[1])]
    assert idle.grad is None and early.grad.tolist() == [5.0, 5.0], "an earlier .grad stays as step leaves it"


def test_gradients_of_several_uses_in_a_pass_are_one() -> None:
    w, seen = parameter(4, 4), []
    x = batches(1)[0]
    with fanin_torch.accumulate([w]) as block, block.last(lambda p: seen.append(p.grad.clone())):
        ((x @ w).sum() + (x @ w).sum() + Fused.apply(x, w, block, addmm).sum()).backward()
        assert len(seen) == 1
    assert torch.equal(seen[0], plain(w, [x], uses=3))


def test_a_parameter_whose_kernel_returns_no_gradient_is_stepped_in_the_pass() -> None:
    ws, stepped = [parameter(4, 4) for _ in range(3)], []
    xs = batches(3)

    def net(x: Any) -> Any:
        for w in ws:
            x = Fused.apply(x, w, block, addmm)
        return x.sum()

    with fanin_torch.accumulate(ws) as block:
        for x in xs[:-1]:
            net(x).backward()
        with block.last(lambda p: stepped.append(p.grad.clone())):
            net(xs[-1]).backward()
            assert len(stepped) == 3
    for x in xs:
        (x @ ws[0] @ ws[1] @ ws[2]).sum().backward()
    assert all(torch.equal(a, w.grad) for a, w in zip(stepped, reversed(ws), strict=True))


def test_a_second_gradient_after_a_step_is_refused_by_name_and_kept() -> None:
    p, q = parameter(3), parameter(3)
    stepped: list[Any] = []
    with fanin_torch.accumulate([("p", p), ("q", q)]) as block:
        (p * 2 + q).sum().backward()
        with (
            pytest.raises(RuntimeError, match=r"last\(step\): a second gradient of p came after its step"),
            block.last(stepped.append),
        ):
            (p * 3).sum().backward()
            (p * 4).sum().backward()
    assert [id(one) for one in stepped] == [id(p)], "q is not stepped after an error"
    assert p.grad.tolist() == [4.0] * 3 and q.grad.tolist() == [1.0] * 3


def test_two_passes_that_reach_different_parameters_step_each_once() -> None:
    p, q = parameter(3), parameter(3)
    seen: list[Any] = []
    with fanin_torch.accumulate([p, q]) as block:
        (p + q).sum().backward()
        with block.last(lambda one: seen.append((one, one.grad.tolist()))):
            (p * 2).sum().backward()
            (q * 3).sum().backward()
    assert [(id(one), grad) for one, grad in seen] == [(id(p), [3.0] * 3), (id(q), [4.0] * 3)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["in the pass", "at the end"])
def test_a_step_that_raises_names_the_parameter_and_all_sums_stay(error: Any, when: str) -> None:
    ws = chain()
    named = [(f"w{k}", w) for k, w in enumerate(ws)]
    xs = inputs(2)
    loss(ws, xs[0]).backward()
    first = [w.grad.clone() for w in ws]
    loss(ws, xs[1]).backward()
    want = [w.grad for w in ws]
    if when == "in the pass":  # it ends before it reaches the first two
        want[:2] = first[:2]
    for w in ws:
        w.grad = None
    stepped: list[Any] = []

    def step(p: Any) -> None:
        if p is ws[2]:
            raise error("no step today")
        stepped.append(p)

    with pytest.raises(error, match="no step today") as raised, fanin_torch.accumulate(named) as block:
        for x in xs if when == "at the end" else xs[:1]:
            loss(ws, x).backward()
        with block.last(step):
            if when == "in the pass":
                loss(ws, xs[1]).backward()
    assert any("the step of w2" in note for note in raised.value.__notes__)
    done = [3] if when == "in the pass" else [0, 1]
    assert [id(p) for p in stepped] == [id(ws[k]) for k in done]
    for k, (w, sum_) in enumerate(zip(ws, want, strict=True)):
        assert w.grad is None if k in done else torch.equal(w.grad, sum_)


def test_an_earlier_gradient_keeps_its_tensor_and_is_cleared_by_the_step_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        first = w.grad = torch.full((3,), 10.0, dtype=dtype)
        seen = []

        def step(p: Any, seen: list[Any] = seen, first: Any = first) -> None:
            assert p.grad is first
            seen.append(p.grad.tolist())
            p.grad.zero_()

        with fanin_torch.accumulate([w]) as block:
            for _ in range(2):
                (w * 2).sum().backward()
                with block.last(step):
                    (w * 3).sum().backward()
            w.sum().backward()
        assert seen == [[15.0] * 3, [5.0] * 3]
        assert w.grad is first and first.tolist() == [1.0] * 3


@pytest.mark.parametrize("there", [False, True])
def test_sums_in_main_grad_are_stepped(there: bool) -> None:
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    if there:
        w.main_grad = torch.zeros(3)
    first, seen = getattr(w, "main_grad", None), []
    with fanin_torch.accumulate([w], into="main_grad") as block:
        for _ in range(2):
            (w * 2).sum().backward()
            with block.last(lambda p: seen.append((p.main_grad.dtype, p.main_grad.tolist(), p.main_grad.zero_()))):
                (w * 3).sum().backward()
    assert [one[:2] for one in seen] == [(torch.float32, [5.0] * 3)] * 2
    assert w.main_grad is first and w.grad is None


def test_hooks_after_accumulation_run_before_the_step_and_once() -> None:
    w, seen = parameter(3), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(("hook", p.grad.tolist())))
    with fanin_torch.accumulate([w]) as block:
        w.sum().backward()
        with block.last(lambda p: seen.append(("step", p.grad.tolist()))):
            w.sum().backward()
    assert seen == [("hook", [2.0] * 3), ("step", [2.0] * 3)]


def test_passes_of_fanins_engine_step_in_the_pass() -> None:
    ours, theirs = chain(), chain()
    xs = inputs(3)
    stepped: list[Any] = []

    def step(p: Any) -> None:
        stepped.append(p)
        p -= p.grad

    with fanin_torch.accumulate(ours) as block:
        for x in xs[:-1]:
            fanin_torch.backward(loss(ours, x))
        with block.last(step):
            fanin_torch.backward(loss(ours, xs[-1]))
            assert len(stepped) == 4
    for x in xs:
        loss(theirs, x).backward()
    with torch.no_grad():
        for p in theirs:
            p -= p.grad
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_threads_step_the_parameters_of_their_passes() -> None:
    ws, seen = [parameter(64, 64) for _ in range(4)], {}

    def work(w: Any) -> None:
        (w * 2).sum().backward()

    with fanin_torch.accumulate(ws) as block:
        for w in ws:
            w.sum().backward()
        with block.last(lambda p: seen.setdefault(p, p.grad.clone())):
            threads = [threading.Thread(target=work, args=(w,)) for w in ws]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(seen) == 4
    assert all(seen[w].eq(3).all() and w.grad is None for w in ws)


def test_last_is_refused_where_it_cannot_be_right() -> None:
    w = parameter(3)
    block = fanin_torch.accumulate([("w", w)])
    with pytest.raises(TypeError, match=r"last\(step\): expected a function of a parameter, got"):
        block.last(torch.optim.SGD([w], lr=0.1))
    early = block.last(print)
    with pytest.raises(RuntimeError, match=r"last\(step\) outside of the block"), early:
        pass
    with pytest.raises(RuntimeError, match="without __enter__"):
        block.last(print).__exit__(None, None, None)
    with block:
        with block.last(lambda p: None) as outer:
            assert outer is None
            with pytest.raises(RuntimeError, match=r"last\(step\) within last\(step\)"), block.last(print):
                pass
            w.sum().backward()
        again = block.last(lambda p: None)
        with again:
            pass
        with pytest.raises(RuntimeError, match="is entered once"), again:
            pass
    open_ = block.last(print)
    with block:
        open_.__enter__()
        w.sum().backward()
    w.grad = None
    with pytest.raises(RuntimeError, match="the block ended before its last"):
        open_.__exit__(None, None, None)
    w.sum().backward()
    assert w.grad.eq(1).all(), "the hooks are gone"


def test_a_tensor_that_was_replaced_is_refused_by_name() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    with (
        pytest.raises(RuntimeError, match="the tensor of w was replaced within the block"),
        fanin_torch.accumulate([("w", w)]) as block,
        torch.no_grad(),
    ):
        w.set_(torch.ones(4))
        with block.last(print):
            pass


def test_a_block_that_is_dropped_within_last_ends() -> None:
    w = parameter(3)
    block: Any = fanin_torch.accumulate([w])
    block.__enter__()
    (w * 2).sum().backward()
    last = block.last(lambda p: None)
    last.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del block, last
        gc.collect()
    assert w.grad.tolist() == [2.0] * 3
    w.grad = None
    w.sum().backward()
    assert w.grad.tolist() == [1.0] * 3


# Ctrl-C


HERE = str(Path(fanin.__file__).parent)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("earlier", [False, True])
def test_what_stops_a_last_pass_anywhere_takes_no_sum_along(step: int, earlier: bool) -> None:
    """Each parameter was stepped, and its sum freed; or its sum is in .grad."""
    at, stops, steps = 1, 0, 0
    while True:
        a, b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        first = torch.full((3,), 10.0) if earlier else None
        b.grad = first
        seen: list[tuple[int, list[float]]] = []

        def act(p: Any, seen: list[Any] = seen) -> None:
            seen.append((id(p), p.grad.tolist()))
            p.grad.zero_()

        met = False
        try:
            with fanin_torch.accumulate([a, b]) as block:
                (a * 2 + b * 3).sum().backward()

                def run(block: Any = block, a: Any = a, b: Any = b, act: Any = act) -> None:
                    with block.last(act):
                        (a * 2).sum().backward()
                        (b * 3).sum().backward()

                met = stopped(at, run, HERE)
        except RuntimeError as e:  # it was stopped between the call of last() and its `with`
            assert "never entered" in str(e) and not seen
        if not met:
            break
        for p, sum_ in ((a, 4.0), (b, 16.0 if earlier else 6.0)):
            acted = [grad for one, grad in seen if one == id(p)]
            assert acted in ([], [[sum_] * 3]), (at, acted)
            if acted:
                assert p.grad is None or p.grad.eq(0).all(), (at, p.grad)
            else:
                # The pass that was stopped may have brought its gradient or not.
                had = sum_ - (2.0 if p is a else 3.0)
                assert p.grad.tolist() in ([sum_] * 3, [had] * 3), (at, p.grad)
            steps += len(acted)
        if earlier:
            assert b.grad is first
        at += step
        stops += 1
    assert stops > 500 // step and steps > 100 // step


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_what_stops_a_target_anywhere_loses_no_sum_in_silence(step: int) -> None:
    """Each sum has all that was added, or the end of the block names its parameter."""
    at, stops, named = 1, 0, 0
    while True:
        w, v = parameter(3), torch.nn.Parameter(torch.ones(2))
        met, why = False, ""
        body: list[str] = []
        try:
            with fanin_torch.accumulate([("w", w), ("v", v)]) as block, torch.no_grad():
                with block.target(w) as acc:
                    acc += 1
                with torch.enable_grad():
                    v.sum().backward()

                def run(block: Any = block, w: Any = w, body: list[str] = body) -> None:
                    with block.target(w) as acc:
                        acc += 10
                        body.append("ran")

                met = stopped(at, run, HERE)
        except RuntimeError as e:
            why = str(e)
            assert "for the sum of w" in why, (at, why)
            named += 1
        if not met:
            break
        assert v.grad.tolist() == [1.0, 1.0], at
        if why:
            assert w.grad is None, at
        else:
            assert w.grad.tolist() == ([11.0] if body else [1.0]) * 3, (at, body)
        at += step
        stops += 1
    assert stops > 100 // step and named < stops // 2
