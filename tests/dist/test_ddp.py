"""torch's DDP and FSDP2 with fanin's sums, on processes that Gloo connects."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fanin
from dist.test_gloo import on_processes
from kit.support import run_python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners

if torch.distributed.is_available():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 5
RATE = (
    0.125  # a power of two: torch's SGD rounds the product of another rate in some elements of a bfloat16 tensor only
)


def net(dtype: str = "float32") -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n = torch.nn
    made = n.Sequential(n.Linear(12, 40), n.Tanh(), n.Linear(40, 30), n.Tanh(), n.Linear(30, 3))
    return made.to(getattr(torch, dtype))


def batch(step: int, rank: int, dtype: str = "float32") -> Any:
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.to(getattr(torch, dtype))


def loss_of(y: Any) -> Any:
    return y.float().square().mean()


def torch_backward(loss: Any) -> None:
    loss.backward()


def weights(model: Any) -> list[Any]:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in full]


def train(model: Any, rank: int, dtype: str, backward: Callable[[Any], None] = torch_backward) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model(batch(step, rank, dtype))))
        optimizer.step()
    return weights(model)


def alone(size: int, dtype: str, accumulate: Any, scale: float | None = None) -> list[Any]:
    """The weights that one process has, which sums the gradients of all ranks' batches."""
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        grads = [
            torch.autograd.grad(loss_of(model(batch(step, rank, dtype))), list(model.parameters()))
            for rank in range(size)
        ]
        for p, *gs in zip(model.parameters(), *grads, strict=True):
            p.grad = fanin.add_n(gs, accumulate=accumulate, scale=1 / size if scale is None else scale)
        optimizer.step()
    return weights(model)


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: list[Any], b: list[Any], tolerance: float) -> bool:
    return all(torch.allclose(x.float(), y.float(), rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


def attempt(call: Callable[[], Any]) -> Any:
    """(the type and the text of its exception), or "good"."""
    try:
        call()
    except Exception as e:
        return type(e).__name__, str(e)
    return "good"


#: order=, accumulate=, and what one process gives as accumulate=
SUMS = [("key", None, None), ("rank", None, None), ("exact", None, "exact"), ("key", "float64", "float64")]


# ---------------------------------------------------------------- DDP


def replicas(group: Any) -> list[Any]:
    wrong = []
    size = group.size
    modes: list[dict[str, Any]] = [
        {"bucket_cap_mb": 1e-4},
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ]
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2e-2)):
        theirs = train(DDP(net(dtype)), group.rank, dtype)
        for order, accumulate, one in SUMS:
            expected = alone(size, dtype, one)
            if not close(theirs, expected, tolerance):
                wrong.append(f"{dtype} {order}: DDP alone")
            for mode in modes if order in ("key", "exact") else modes[:1]:
                model = DDP(net(dtype), **mode)
                model.register_comm_hook(None, fanin.torch.ddp_hook(order, accumulate))
                if not equal(train(model, group.rank, dtype), expected):
                    wrong.append(f"{dtype} {order} {accumulate} {mode}")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_a_replica_has_the_bits_of_one_process_for_any_bucket(size: int, tmp_path: Path) -> None:
    assert on_processes(size, replicas, tmp_path) == [[]] * size


def variants(group: Any) -> dict[str, bool]:
    made = {}
    expected = alone(2, "float32", "exact")

    def replica(state: Any = None, **options: Any) -> Any:
        model = DDP(net(), bucket_cap_mb=1e-3)
        model.register_comm_hook(state, fanin.torch.ddp_hook("exact", **options))
        return model

    for state in (group, torch.distributed.group.WORLD, torch.distributed.new_group([0, 1])):
        made[f"state: {type(state).__name__}"] = equal(train(replica(state), group.rank, "float32"), expected)
    made["scale"] = equal(train(replica(scale=0.3), group.rank, "float32"), alone(2, "float32", "exact", 0.3))
    made["fanin.torch.backward"] = equal(train(replica(), group.rank, "float32", fanin.torch.backward), expected)
    model = replica()
    with model.no_sync():
        loss_of(model(batch(0, group.rank))).backward()
    loss_of(model(batch(1, group.rank))).backward()
    grads = []
    for rank in range(2):
        one = net()
        for step in range(2):
            loss_of(one(batch(step, rank))).backward()
        grads.append([p.grad for p in one.parameters()])
    made["no_sync"] = equal(
        [p.grad for p in model.parameters()],
        [fanin.add_n(gs, accumulate="exact", scale=0.5) for gs in zip(*grads, strict=True)],
    )
    model = replica()
    with model.join():
        for step in range(1 + 2 * group.rank):
            model.zero_grad()
            loss_of(model(batch(step, group.rank))).backward()
    one = net()
    loss_of(one(batch(2, 1))).backward()
    made["join"] = group.rank == 0 or equal(
        [p.grad for p in model.parameters()], [p.grad * 0.5 for p in one.parameters()]
    )
    return made


def test_the_group_the_scale_the_engine_micro_batches_and_uneven_inputs_are_as_ddp_has_them(tmp_path: Path) -> None:
    for found in on_processes(2, variants, tmp_path):
        assert found == dict.fromkeys(found, True)


def good_replica(
    group: Any, dtype: str = "float32", init_sync: bool = True, bucket_cap_mb: float = 1e-4, **options: Any
) -> Any:
    model = DDP(net(dtype), bucket_cap_mb=bucket_cap_mb, init_sync=init_sync)
    model.register_comm_hook(None, fanin.torch.ddp_hook(**options))
    return model


def one_pass(model: Any, rank: int, dtype: str = "float32") -> Any:
    model.zero_grad()
    return attempt(lambda: loss_of(model(batch(0, rank, dtype))).backward())


class Raises(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        raise ValueError("planted")


class Two(torch.nn.Module):
    """Two outputs, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.a(x), self.b(x)


def faults(group: Any) -> dict[str, Any]:
    rank, made = group.rank, {}

    dtype = "bfloat16" if rank == 1 else "float32"
    model = DDP(net(dtype), bucket_cap_mb=1e-4, init_sync=False)
    model.register_comm_hook(None, fanin.torch.ddp_hook())
    made["dtype"] = one_pass(model, rank, dtype)

    model = good_replica(group, order="exact" if rank == 1 else "key")
    made["options"] = one_pass(model, rank)
    made["options, again"] = one_pass(model, rank)

    two = Two()
    model = DDP(two, bucket_cap_mb=1e-4)
    model.register_comm_hook(None, fanin.torch.ddp_hook())
    for name in ("parts", "a part differs"):
        model.zero_grad()
        one, other = model(batch(0, rank)[:, :4])
        one.sum().backward(retain_graph=True)
        made[name] = attempt(other.sum().backward)
        if name == "parts":
            made["sum of parts"] = two.a.weight.grad[0].tolist()
            model = DDP(two, bucket_cap_mb=1e-4)
            model.register_comm_hook(None, fanin.torch.ddp_hook("exact" if rank == 1 else "key"))

    model = good_replica(group, accumulate="float16" if rank == 1 else None)
    made["accumulate"] = one_pass(model, rank)

    model = good_replica(group)
    made["first"] = one_pass(model, rank)  # all parameters in one bucket: DDP divides them before the second pass
    if rank == 1:
        model.module[1].register_forward_hook(lambda module, args, y: Raises.apply(y))
    made["raises"] = one_pass(model, rank)

    sparse = DDP(torch.nn.Embedding(10, 4, sparse=True))
    sparse.register_comm_hook(None, fanin.torch.ddp_hook())
    made["sparse"] = attempt(lambda: sparse(torch.tensor([1, 2])).sum().backward())

    made["next"] = one_pass(good_replica(group), rank)
    made["closed"] = group.closed
    return made


def test_what_differs_or_raises_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(on_processes(2, faults, tmp_path)):
        kind, text = found["dtype"]
        assert kind == "PeerError" and "rank 1 has parameter" in text and "bfloat16" in text and "float32" in text
        for again in ("options", "options, again"):
            kind, text = found[again]
            assert kind == "PeerError" and "rank 1 has order='exact'" in text
        assert found["parts"] == "good" and found["a part differs"][0] == "PeerError"
        mean = sum(batch(0, r)[:, :4].sum(0) for r in range(2)) / 2
        assert torch.allclose(torch.tensor(found["sum of parts"]), mean)
        kind, text = found["accumulate"]
        assert kind == ("PeerError", "ValueError")[rank] and "float16" in text
        kind, text = found["raises"]
        assert found["first"] == "good"
        assert (kind, text) == ("ValueError", "planted") if rank else kind == "PeerError" and "rank 1 failed" in text
        kind, text = found["sparse"]
        assert kind == "TypeError" and "sparse gradient" in text
        assert found["next"] == "good" and found["closed"] is None


def plans(group: Any) -> dict[str, Any]:
    """Sums with a plan in the passes of hooks, and what follows them."""
    rank, made = group.rank, {}

    def planned_of(model: Any) -> list[tuple[int, int]]:
        found = []
        for _ in range(4):
            before = group.counters
            assert one_pass(model, rank) == "good"
            after = group.counters
            found.append((after.planned - before.planned, after.sums - before.sums))
        return found

    for name, options in {"key": {}, "exact": {"order": "exact"}, "wire": {"wire": "bfloat16"}}.items():
        made[name] = planned_of(good_replica(group, **options))
    made["one bucket"] = planned_of(good_replica(group, bucket_cap_mb=25.0, order="rank"))
    model = good_replica(group)
    planned_of(model)
    dtype = "bfloat16" if rank else "float32"
    made["another dtype"] = one_pass(good_replica(group, dtype=dtype, init_sync=False), rank, dtype)
    made["another order"] = one_pass(good_replica(group, order="exact" if rank else "key"), rank)
    made["after errors"] = planned_of(model)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    made["shards"] = planned_of(sharded("float32", mesh, fanin.torch.ReduceScatter()))
    return made


def test_buckets_have_plans_from_their_second_sum_on(tmp_path: Path) -> None:
    for found in on_processes(2, plans, tmp_path):
        for name in ("key", "exact", "wire"):
            passes = found[name]
            assert [sums for _, sums in passes] == [1, 5, 5, 5], "DDP divides the buckets before the second pass"
            assert passes[2:] == [(5, 5)] * 2
        assert found["one bucket"][2:] == [(1, 1)] * 2
        assert all("PeerError" in found[name] for name in ("another dtype", "another order"))
        assert "bfloat16" in found["another dtype"][1] and "order='exact'" in found["another order"][1]
        assert found["after errors"] == [(5, 5)] * 4
        assert found["shards"][1:] == [(3, 3)] * 3


class OfDtype(torch.nn.Module):
    """A parameter of a dtype, of the same shape for any."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(300, 2, dtype=dtype))

    def forward(self, factor: Any) -> Any:
        return (self.w * factor).real


def real_and_complex(group: Any) -> dict[str, bool]:
    """Of a shape that both have, whether the mean of the gradients is right, by the wire."""
    made = {}
    factor = torch.arange(600).reshape(300, 2) % 7 * (1.0 + group.rank)
    for wire in (None, "bfloat16", "float8_e4m3fn"):
        for dtype in (torch.float32, torch.complex64, torch.float32):
            model = DDP(OfDtype(dtype))
            model.register_comm_hook(None, fanin.torch.ddp_hook(wire=wire))
            for _ in range(3):
                model.zero_grad()
                model(factor).sum().backward()
                mean = torch.arange(600).reshape(300, 2) % 7 * 1.5
                good = torch.equal(torch.view_as_real(model.module.w.grad + 0j)[..., 0], mean)
                made[f"{dtype}, {wire}"] = made.get(f"{dtype}, {wire}", True) and good
    return made


def test_a_complex_parameter_of_the_shape_of_a_real_one_has_a_plan_of_its_own(tmp_path: Path) -> None:
    for found in on_processes(2, real_and_complex, tmp_path):
        assert found == dict.fromkeys(found, True)


class AllReduced(torch.autograd.Function):
    """Sums its gradient over ranks in a process group of its own, as SyncBatchNorm does with two numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        total = g.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class Skips(torch.nn.Module):
    """Its first layer, which may be left out, is before a sum over ranks in the pass forward, and after it backward."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.top = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.between = torch.distributed.new_group()

    def forward(self, x: Any, skip: bool) -> Any:
        return self.top(AllReduced.apply(x if skip else self.low(x), self.between))


def skipping(group: Any) -> Any:
    model = DDP(Skips(), find_unused_parameters=True)
    model.register_comm_hook(None, fanin.torch.ddp_hook())
    found = []
    for skip in (False, True, True, False):
        model.zero_grad()
        x = torch.ones(2, 4, requires_grad=True)
        found.append(attempt(model(x, skip and group.rank == 0).sum().backward))
    return found


def test_a_rank_whose_gradients_are_complete_goes_on_with_its_pass(tmp_path: Path) -> None:
    """Rank 0 has all its gradients, in one bucket, before it sums over ranks within its pass; rank 1 needs that sum."""
    assert on_processes(2, skipping, tmp_path) == [["good"] * 4] * 2


def late(group: Any) -> Any:
    model, reduce_scatter = good_replica(group, timeout=0.5), fanin.torch.ReduceScatter()

    def reduce() -> None:
        world = torch.distributed.group.WORLD
        reduce_scatter(torch.empty(1), torch.ones(2), world, torch.distributed.ReduceOp.SUM)

    reduce()
    if group.rank == 1:
        return None
    return one_pass(model, 0), attempt(reduce), group.closed


def test_a_rank_without_a_backward_pass_is_an_error_within_the_time_limit(tmp_path: Path) -> None:
    first, then, closed = on_processes(2, late, tmp_path)[0]
    assert first[0] == "PeerError" and "within 0.5 s" in first[1] and closed
    assert then[0] == "RuntimeError" and "is closed" in then[1]


def killed(group: Any) -> Any:
    model, passes = good_replica(group, timeout=None), 0
    if group.rank == 1:
        first = next(model.module.parameters())  # its gradient comes last: buckets have travelled
        first.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL) if passes == 3 else None)
    while True:
        made = one_pass(model, group.rank)
        if made != "good":
            return passes, made, group.closed
        passes += 1


def test_a_rank_that_is_killed_in_a_pass_is_an_error_on_the_others(tmp_path: Path) -> None:
    [(passes, (kind, text), closed)] = on_processes(2, killed, tmp_path, alive=1)
    assert passes == 3 and kind == "PeerError" and "is closed" in text and closed


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"order": "ring"}, ValueError, "expected order="),
        ({"order": "exact", "accumulate": "float64"}, ValueError, 'order="exact" sums exactly'),
        ({"accumulate": "float33"}, ValueError, "expected a dtype .* got .float33"),
        ({"scale": "2"}, TypeError, "scale: expected a number, got "),
    ],
)
def test_options_that_do_not_fit_are_refused_when_a_hook_is_made(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        fanin.torch.ddp_hook(**options)


#: A pass that ends while the sum of its bucket waits for another rank, which never comes; then the program ends.
LEFT_BEHIND = """
import threading, torch, fanin
from fanin.dist.group import Group

class Engine:
    rank, size, name = 0, 2, "an engine whose other rank never comes"
    def exchange(self, data):
        sends.set()
        return self
    def wait(self, timeout):
        threading.Event().wait()
    def abort(self, reason): pass
    def close(self): pass

class Bucket:
    def __init__(self, x): self.x = x
    def buffer(self): return self.x
    def parameters(self): return [self.x]
    def index(self): return 0
    def is_last(self): return True

sends, group = threading.Event(), Group(Engine(), timeout=None)
hook = fanin.torch.ddp_hook()
p = torch.zeros(3, requires_grad=True)
p.register_hook(lambda g: futures.append(hook(group, Bucket(g))))
futures = []
p.sum().backward()
sends.wait()
assert not futures[0].done()
print("the program ends")
"""


def test_a_sum_that_waits_for_ever_keeps_no_process_from_its_end() -> None:
    assert run_python(LEFT_BEHIND).stdout == "the program ends\n"


def test_a_thread_that_cannot_start_is_the_error_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failing = threading.Thread.start, [True, True]

    def no_start(thread: threading.Thread) -> None:
        if thread.name == "fanin.torch" and threading.current_thread().name == "rank 0" and failing:
            failing.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    class Bucket:
        def __init__(self, x: Any) -> None:
            self.buffer, self.parameters = lambda: x, lambda: [x]
            self.index, self.is_last = lambda: 0, lambda: True

    def rank(group: Any) -> Any:
        hook = fanin.torch.ddp_hook(scale=1)
        p = torch.zeros(3, requires_grad=True)
        made: list[Any] = []

        def as_ddp(g: Any) -> None:
            """At the end of its pass DDP waits for its buckets."""
            made.append(hook(group, Bucket(g.clone())))
            torch.autograd.Variable._execution_engine.queue_callback(made[-1].wait)

        p.register_hook(as_ddp)
        with pytest.raises(RuntimeError) as e:
            p.sum().backward()
        p.sum().backward()
        return e.value, made[-1].wait().tolist()

    monkeypatch.setattr(threading.Thread, "start", no_start)
    (own, first), (others, second) = fanin.dist.threads(2, rank, timeout=None)
    assert failing == [] and first == second == [2, 2, 2]
    assert str(own) == "can't start new thread"
    assert isinstance(others, fanin.PeerError) and others.rank == 0 and "backward pass raised" in str(others)


def test_a_hook_needs_a_process_group_and_nccl_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td = torch.distributed
    out, reduce_scatter = torch.empty(2), fanin.torch.ReduceScatter()
    with pytest.raises(RuntimeError, match=r"expected torch\.distributed to be initialised"):
        reduce_scatter(out, torch.ones(2), None, None)
    td.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        for op, value in ((td.ReduceOp.SUM, 1), (td.ReduceOp.AVG, 1), (td.ReduceOp.PREMUL_SUM(0.25), 0.25)):
            reduce_scatter(out, torch.ones(2), td.group.WORLD, op)
            assert out.tolist() == [value] * 2
        with pytest.raises(ValueError, match=r"expected a sum or a mean, got .*MAX"):
            reduce_scatter(out, torch.ones(2), td.group.WORLD, td.ReduceOp.MAX)
        with pytest.raises(ValueError, match="expected async_op=False"):
            reduce_scatter(out, torch.ones(2), td.group.WORLD, td.ReduceOp.SUM, async_op=True)
        with pytest.raises(ValueError, match=r"expected 1 \* 2 elements of torch.float32, got 3"):
            reduce_scatter(out, torch.ones(3), td.group.WORLD, td.ReduceOp.SUM)
        monkeypatch.setattr(td, "get_backend", lambda group: "nccl")
        model = DDP(net())
        model.register_comm_hook(None, fanin.torch.ddp_hook())
        with pytest.raises(RuntimeError, match="ddp_hook: the process group is of NCCL, and there is no GPU"):
            loss_of(model(batch(0, 0))).backward()
        with pytest.raises(RuntimeError, match="ReduceScatter: the process group is of NCCL"):
            fanin.torch.ReduceScatter()(out, torch.ones(2), td.group.WORLD, td.ReduceOp.SUM)
    finally:
        td.destroy_process_group()


# ---------------------------------------------------------------- FSDP2


def sharded(dtype: str, mesh: Any, comm: Any = None, factor: float | None = None, **options: Any) -> Any:
    model = net(dtype)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, **options)
        if comm is not None:
            module.set_custom_reduce_scatter(comm)
        if factor is not None:
            module.set_gradient_divide_factor(factor)
    return model


def shards(group: Any) -> list[str]:
    wrong, size = [], group.size
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2e-2)):
        theirs = train(sharded(dtype, mesh), group.rank, dtype)
        for order, accumulate, one in SUMS:
            expected = alone(size, dtype, one)
            if not close(theirs, expected, tolerance):
                wrong.append(f"{dtype} {order}: FSDP2 alone")
            comm = fanin.torch.ReduceScatter(order, accumulate)
            if not equal(train(sharded(dtype, mesh, comm), group.rank, dtype), expected):
                wrong.append(f"{dtype} {order} {accumulate}")
    comm = fanin.torch.ReduceScatter("exact")
    if not equal(
        train(sharded("float32", mesh, comm, 0.7), group.rank, "float32"), alone(size, "float32", "exact", 1 / 0.7)
    ):
        wrong.append("a factor")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_shards_have_the_bits_of_one_process(size: int, tmp_path: Path) -> None:
    assert on_processes(size, shards, tmp_path) == [[]] * size


def shard_faults(group: Any) -> dict[str, Any]:
    rank, made = group.rank, {}
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if rank == 1 else torch.float32)
    made["dtype"] = one_pass(sharded("float32", mesh, fanin.torch.ReduceScatter(), mp_policy=policy), rank)
    comm = fanin.torch.ReduceScatter("exact" if rank == 1 else "key")
    made["options"] = one_pass(sharded("float32", mesh, comm), rank)
    made["next"] = one_pass(sharded("float32", mesh, fanin.torch.ReduceScatter()), rank)
    model = net()  # one module that stays whole after its forward: nothing but the reduce-scatter travels
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_custom_reduce_scatter(fanin.torch.ReduceScatter(timeout=0.5))
    loss = loss_of(model(batch(0, rank)))
    if rank == 0:
        made["late"] = attempt(loss.backward)
    return made


def test_shards_that_differ_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(on_processes(2, shard_faults, tmp_path)):
        kind, text = found["dtype"]
        assert kind == "PeerError" and "rank 1 has the gradients of a module: bfloat16" in text
        kind, text = found["options"]
        assert kind == "PeerError" and "rank 1 has order='exact'" in text
        assert found["next"] == "good"
        if rank == 0:
            kind, text = found["late"]
            assert kind == "PeerError" and "within 0.5 s" in text
