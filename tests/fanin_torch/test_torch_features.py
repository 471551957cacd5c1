"""`fanin.torch.backward` beside torch's own: for each feature of torch's graphs the same, or a refusal by name."""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.torch_group import group_alone

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")
fanin_torch = pytest.importorskip("fanin.torch")

functorch: Any = pytest.importorskip("torch._functorch.config")
nn = torch.nn
checkpointed = torch.utils.checkpoint


def torch_own(loss: Any, **how: Any) -> None:
    torch.autograd.backward(loss, **how)


def summed(loss: Any, **how: Any) -> None:
    """Every sum of three float32 gradients or more is fanin's; its bits are torch's."""
    fanin_torch.backward(loss, **how, **({} if how.get("create_graph") else {"accumulate": torch.float32}))


PASSES = [torch_own, fanin_torch.backward, summed]


def same(make: Callable[[Callable[..., None]], list[Any]]) -> None:
    """What a function makes of torch's pass and of ours: gradients bit by bit, everything else by `==`."""
    own, *others = (make(backward) for backward in PASSES)
    for ours in others:
        assert len(own) == len(ours)
        for a, b in zip(own, ours, strict=True):
            if isinstance(a, torch.Tensor):
                assert isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
            else:
                assert a == b


# Replicas and shards


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of this process."""
    with group_alone(tmp_path):
        yield


@pytest.mark.parametrize(
    "how", [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
def test_the_communication_hook_of_a_replica_is_called(alone: None, how: Any) -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5, **how)
        seen: list[int] = []

        def hook(_: Any, bucket: Any) -> Any:
            seen.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer() * 10)
            return future

        hook.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        replica.register_comm_hook(None, hook)
        for step in range(3):
            backward(replica(torch.randn(5, 3)).square().sum())
            if step == 1:
                model.zero_grad()
        with replica.no_sync():
            backward(replica(torch.randn(5, 3)).square().sum())
        assert seen
        return [len(seen), *[p.grad for p in model.parameters()]]

    same(run)


def replica_of(rank: int, port: int, ours: bool, out: Any) -> None:
    """One process of two, in the tests that start some."""
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(rank + 1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = replica(torch.randn(5, 3)).square().sum()
        if ours:
            summed(loss)
        else:
            loss.backward()
        optimizer.step()
    out.put((rank, [p.detach().tolist() for p in model.parameters()]))
    dist.barrier()  # no rank leaves the group while the other one uses it
    out.close()
    out.join_thread()
    os._exit(0)  # a thread of Gloo that outlives Python may abort the process, also after torch's own pass


def test_replicas_in_two_processes_stay_equal() -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    context = torch.multiprocessing.get_context("spawn")
    states = []
    for ours in (False, True):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        out = context.Queue()
        processes = [context.Process(target=replica_of, args=(r, port, ours, out)) for r in range(2)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()  # a few numbers fit into the queue's pipe
            assert p.exitcode == 0
        got = dict(out.get() for _ in processes)
        assert got[0] == got[1]
        states.append(got[0])
    assert states[0] == states[1]


@pytest.mark.parametrize("nested", [False, True])
def test_the_gradients_of_shards_are_those_of_torch(alone: None, nested: bool) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.bfloat16)
        x = torch.randn(5, 3).to(torch.bfloat16)
        if nested:
            fsdp.fully_shard(model[0], mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        for _ in range(2):
            backward(model(x).float().square().sum())
        return [p.grad.to_local() for p in model.parameters()]

    same(run)


def test_the_gradients_of_a_flat_shard_are_those_of_torch(alone: None) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        flat = fsdp.FullyShardedDataParallel(nn.Linear(3, 4), device_id=torch.device("cpu"))
        backward(flat(torch.ones(5, 3)).sum())
        return [p.grad for p in flat.parameters()]

    same(run)


def test_the_sum_of_distributed_tensors_is_torchs(alone: None) -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))

    def leaf_of() -> Any:
        torch.manual_seed(0)
        return nn.Parameter(tensor.distribute_tensor(torch.randn(4).to(torch.bfloat16), mesh))

    def loss_of(leaf: Any) -> Any:
        return sum((leaf * float(i)).to_local().float().sum() for i in range(1, 6))

    ours, own = leaf_of(), leaf_of()
    fanin_torch.backward(loss_of(ours))
    loss_of(own).backward()
    assert isinstance(ours.grad, tensor.DTensor)
    assert torch.equal(ours.grad.to_local(), own.grad.to_local())
    with pytest.raises(RuntimeError, match=r"the sum of the gradients of .*DTensor.*torch alone sums"):
        fanin_torch.backward(loss_of(ours), at=[ours])


# Leaves


@pytest.mark.parametrize(
    "gives",
    [lambda g: g.double(), lambda g: g[:1], lambda g: 3, lambda g: g.to_sparse(), lambda g: None, lambda g: g * 2],
    ids=["dtype", "shape", "number", "layout", "None", "twice"],
)
def test_what_a_hook_of_a_leaf_returns_is_checked_as_torch_checks_it(gives: Any) -> None:
    outcomes = []
    for backward in PASSES:
        w = torch.ones(3, requires_grad=True)
        w.register_hook(gives)
        try:
            backward((w * torch.arange(3.0) + w + w).sum())
            outcomes.append((None, "", w.grad.tolist()))
        except (RuntimeError, TypeError) as e:
            outcomes.append((type(e), str(e), w.grad))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_hooks_of_the_node_that_accumulates_run() -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        w = torch.ones(3, requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(w).node
        seen: list[Any] = []
        node.register_prehook(lambda given: seen.append(given[0].tolist()))
        node.register_hook(lambda *_: seen.append(w.grad.tolist()))
        w.register_hook(lambda g: g * 2)
        backward((w * w + w).sum())
        assert len(seen) == 2
        return [*seen, w.grad]

    same(run)


@pytest.mark.parametrize("wanted", [torch.float32, torch.float64, torch.bfloat16, None])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32])
def test_a_leaf_has_its_gradient_in_the_dtype_that_it_wants(wanted: Any, own: Any) -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(1)
        w = torch.ones(64, dtype=own, requires_grad=True)
        if not hasattr(w, "grad_dtype"):
            pytest.skip("this torch has no grad_dtype")
        w.grad_dtype = wanted
        backward((w.float() * torch.randn(64)).sum())
        once = w.grad.clone()
        backward((w.double() * torch.randn(64, dtype=torch.float64)).sum() + (w * 3).sum())
        return [once, w.grad]

    same(run)


def test_a_bfloat16_leaf_keeps_the_digits_of_a_float32_gradient() -> None:
    w = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    w.grad_dtype = torch.float32
    parts = [torch.randn(64, dtype=torch.bfloat16) for _ in range(50)]
    fanin_torch.backward(sum((w * p).sum().float() for p in parts))
    expected = torch.stack([p.double() for p in parts]).sum(0)
    assert w.grad.dtype == torch.float32
    assert torch.allclose(w.grad.double(), expected, rtol=1e-6, atol=1e-6)


# Hooks


class Log:
    """The arguments of hooks, in order of their calls; each hook changes them, or does not."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, name: str, *what: Any) -> None:
        self.seen.append((name, [None if g is None else g.detach().clone().tolist() for g in what]))

    def tensor(self, name: str, factor: float | None) -> Callable[[Any], Any]:
        def hook(g: Any) -> Any:
            self.note(name, g)
            return None if factor is None or g is None else g * factor

        return hook

    def before(self, name: str, factor: float | None) -> Callable[[Any], Any]:
        def hook(gs: Any) -> Any:
            self.note(name, *gs)
            return None if factor is None else tuple(None if g is None else g * factor for g in gs)

        return hook

    def after(self, name: str, factor: float | None) -> Callable[[Any, Any], Any]:
        def hook(made: Any, gs: Any) -> Any:
            self.note(name, *made, *gs)
            return None if factor is None else tuple(None if g is None else g * factor for g in made)

        return hook


class Halves(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """Two results, of which one may be left unused."""

    @staticmethod
    def forward(ctx: Any, x: Any, materialize: bool) -> Any:
        ctx.set_materialize_grads(materialize)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return sum((g * n for g, n in ((a, 2), (b, 3)) if g is not None), torch.zeros(2)), None


def with_hooks(seed: int, backward: Callable[..., None], **how: Any) -> list[Any]:
    """A random graph with hooks of all kinds everywhere: what they saw, and all gradients."""
    r, log = random.Random(seed), Log()
    leaves = [torch.full((2,), float(i + 1), requires_grad=True) for i in range(3)]
    values = list(leaves)
    for _ in range(r.randint(2, 9)):
        a, b = r.choice(values), r.choice(values)
        kind = r.randrange(5)
        if kind == 0:
            made = list(Halves.apply(a, r.random() < 0.5))
        elif kind == 1:
            made = list(torch.stack([a, b]).unbind())
        else:
            made = [a * b] if kind == 2 else [a + b] if kind == 3 else [a.exp()]
        values += made
    for i, v in enumerate(values):
        factor = r.choice([None, 2.0, 0.5])
        if r.random() < 0.3:
            v.register_hook(log.tensor(f"tensor {i}", factor))
        if v.grad_fn is not None and r.random() < 0.3:
            v.retain_grad()
        node = torch.autograd.graph.get_gradient_edge(v).node
        if r.random() < 0.2:
            node.register_prehook(log.before(f"before {i}", factor))
        if r.random() < 0.2:
            node.register_hook(log.after(f"after {i}", factor if v.grad_fn is not None else None))
    backward([v.sum() for v in r.sample(values, min(3, len(values)))], **how)
    return [log.seen, *[v.grad for v in values]]


@pytest.mark.parametrize("rounds", [400, pytest.param(8_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("create", [False, True])
def test_hooks_of_all_kinds_run_as_torch_runs_them(rounds: int, create: bool) -> None:
    seen = 0
    for seed in range(rounds):
        own, *others = (with_hooks(seed, backward, create_graph=create) for backward in PASSES)
        seen += len(own[0])
        for ours in others:
            assert repr(own[0]) == repr(ours[0]), f"seed {seed}"  # NaN, too
            for a, b in zip(own[1:], ours[1:], strict=True):
                assert (a is None) == (b is None), f"seed {seed}"
                assert a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), f"seed {seed}"
    assert seen > rounds


def test_what_a_hook_does_to_a_function_of_two_results_is_recorded() -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        w, factor = (torch.full((2,), x, requires_grad=True) for x in (3.0, 5.0))
        y, _ = Halves.apply(w * w, True)
        y.register_hook(lambda g: g * factor * factor)
        backward(y.sum(), create_graph=True)
        return [w.grad.detach(), *torch.autograd.grad(w.grad.sum(), [w, factor])]

    same(run)


def test_hooks_of_modules_run() -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), Log()
        for i, module in enumerate([*model, model]):
            module.register_full_backward_pre_hook(lambda m, given, i=i: log.note(f"before {i}", *given))
            module.register_full_backward_hook(lambda m, made, given, i=i: (log.note(f"{i}", *made, *given), None)[1])
        model[0].register_full_backward_pre_hook(lambda m, given: (given[0] * 2,))
        x = torch.randn(5, 3, requires_grad=True)
        backward(model(x).square().sum())
        assert log.seen
        return [log.seen, x.grad, *[p.grad for p in model.parameters()]]

    same(run)


@pytest.mark.parametrize(
    ("add", "error"),
    [
        (lambda y: y.register_hook(lambda g: g[:1]), RuntimeError),
        (lambda y: y.register_hook(lambda g: 3), TypeError),
        (lambda y: y.grad_fn.register_prehook(lambda gs: gs * 2), RuntimeError),
        (lambda y: y.grad_fn.register_prehook(lambda gs: (3,)), TypeError),
        (lambda y: y.grad_fn.register_hook(lambda made, gs: made * 2), RuntimeError),
        (lambda y: y.grad_fn.register_hook(lambda made, gs: ("g", None)), TypeError),
        (lambda y: y.grad_fn.register_hook(lambda made, gs: (made[0], made[0])), (RuntimeError, TypeError)),
    ],
)
def test_what_a_hook_in_between_returns_is_checked(add: Callable[[Any], Any], error: Any) -> None:
    for backward in PASSES:
        w = torch.ones(3, requires_grad=True)
        y = w * 2.0
        add(y)
        with pytest.raises(error):
            backward(y.sum())
        assert w.grad is None


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_that_query_the_pass_run(mode: Any) -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        w = torch.ones(3, requires_grad=True)
        a, b = w * 2, w * 3
        seen: list[Any] = []
        torch.autograd.graph.register_multi_grad_hook((a, b, w), lambda gs: seen.append(repr(gs)), mode=mode)
        backward((a + b + w).sum())
        assert len(seen) == 1
        return [*seen, w.grad]

    same(run)


def test_a_callback_that_a_hook_queues_runs_at_the_end_of_the_pass() -> None:
    def run(backward: Callable[..., None]) -> list[Any]:
        w, seen = torch.ones(3, requires_grad=True), []
        engine = torch.autograd.Variable._execution_engine
        after = w.register_post_accumulate_grad_hook(lambda p: engine.queue_callback(lambda: seen.append("queued")))
        backward((w * w + w).sum())
        after.remove()
        assert seen == ["queued"]
        return [*seen, w.grad]

    same(run)


# Functions of the user's own


class Passes(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """It hands its gradients through, or returns none."""

    @staticmethod
    def forward(ctx: Any, materialize: bool, drops: bool, *xs: Any) -> Any:
        ctx.set_materialize_grads(materialize)
        ctx.drops = drops
        return tuple(x * 1 for x in xs) if len(xs) > 1 else xs[0] * 1

    @staticmethod
    def backward(ctx: Any, *gs: Any) -> Any:
        return (None, None, *(None if ctx.drops else g for g in gs))


def test_a_function_of_one_result_is_given_none_where_it_wants_no_zeros() -> None:
    for materialize in (True, False):

        def run(backward: Callable[..., None], materialize: bool = materialize) -> list[Any]:
            w = torch.ones(3, requires_grad=True)
            backward(Passes.apply(True, True, Passes.apply(materialize, False, w)).sum())
            return [w.grad]

        same(run)


def drawn(r: random.Random, leaves: list[Any]) -> Any:
    """A graph with functions of one and two results, some of which return no gradient."""
    values = list(leaves)
    for _ in range(r.randint(2, 9)):
        xs = [r.choice(values) for _ in range(r.choice([1, 1, 2]))]
        kind = r.random()
        if kind < 0.6:
            made = Passes.apply(r.random() < 0.5, r.random() < 0.3, *xs)
            values += list(made) if isinstance(made, tuple) else [made]
        else:
            values.append(xs[0] * r.randint(1, 3) if kind < 0.8 else xs[0] + r.choice(values))
    return sum(v.sum() for v in r.sample(values, min(3, len(values))))


@pytest.mark.parametrize("rounds", [400, pytest.param(16_000, marks=pytest.mark.slow)])
def test_random_graphs_of_functions_that_return_none(rounds: int) -> None:
    nones = 0
    for seed in range(rounds):

        def run(backward: Callable[..., None], seed: int = seed) -> list[Any]:
            r = random.Random(seed)
            leaves = [torch.full((2,), float(i + 1), requires_grad=True) for i in range(3)]
            backward(drawn(r, leaves))
            return [w.grad for w in leaves]

        own, *others = (run(backward) for backward in PASSES)
        for ours in others:
            for a, b in zip(own, ours, strict=True):
                nones += a is None
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), f"seed {seed}"
    assert nones > rounds // 10


# Anomalies


class Spoils(torch.autograd.Function):  # type: ignore[misc,name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any, how: str) -> Any:
        ctx.how = how
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if ctx.how == "raise":
            raise ValueError("spoiled")
        return g * float(ctx.how), None


@pytest.mark.parametrize("how", ["nan", "inf", "raise", "1"])
@pytest.mark.parametrize("check", [True, False])
def test_detect_anomaly(how: str, check: bool) -> None:
    outcomes: list[Any] = []
    for backward in PASSES:
        w = torch.ones(3, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=check):
            loss = (Spoils.apply(w, how) + w + w).sum()
            try:
                backward(loss)
                outcomes.append(w.grad.isnan().any().item())
            except (RuntimeError, ValueError) as e:
                outcomes.append((type(e), str(e)))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert isinstance(outcomes[0], tuple) == (how == "raise" or (how == "nan" and check))


# Compiled models and checkpoints


def compiled(fn: Any, donated: bool = True) -> Any:
    aot = pytest.importorskip("functorch.compile")

    def graph(module: Any, _: Any) -> Any:
        return aot.make_boxed_func(module.forward)

    return aot.aot_function(fn, fw_compiler=graph, bw_compiler=graph)


def donates() -> Any:
    """A compiled function whose backward may use the memory of what it saved."""
    return compiled(lambda x: torch.sin(torch.cos(x * 2) * torch.exp(x)))


@pytest.mark.parametrize("first", PASSES)
@pytest.mark.parametrize("second", PASSES)
def test_a_compiled_model_runs_whoever_ran_the_first_backward(first: Any, second: Any) -> None:
    with functorch.patch(donated_buffer=True):
        f = donates()
        grads = []
        for backward in (first, second, fanin_torch.backward, torch_own):
            x = torch.linspace(0, 1, 5).requires_grad_()
            backward(f(x).sum())
            grads.append(x.grad)
        assert all(torch.equal(grads[0], g) for g in grads)


def test_a_compiled_node_with_donated_buffers_in_a_graph_that_is_retained_is_as_in_torch() -> None:
    with functorch.patch(donated_buffer=True):
        outcomes = []
        for backward in PASSES:
            x = torch.linspace(0, 1, 5).requires_grad_()
            try:
                backward(donates()(x).sum(), retain_graph=True)
                outcomes.append(repr(x.grad))
            except RuntimeError as e:
                outcomes.append(str(e))
        assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("policy", [None, "MUST_SAVE", "PREFER_RECOMPUTE"])
def test_a_checkpoint_without_reentrance_computes_a_segment_anew_once(policy: Any) -> None:
    how: dict[str, Any] = {"use_reentrant": False}
    if policy:
        choice = getattr(checkpointed.CheckpointPolicy, policy)
        how["context_fn"] = functools.partial(
            checkpointed.create_selective_checkpoint_contexts,
            lambda ctx, op, *a, **k: (
                choice if op == torch.ops.aten.addmm.default else checkpointed.CheckpointPolicy.PREFER_RECOMPUTE
            ),
        )

    def run(backward: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        lin, times = nn.Linear(4, 4), 0

        def segment(x: Any) -> Any:
            nonlocal times
            times += 1
            return torch.tanh(lin(torch.sin(x)))

        x = torch.randn(2, 4, requires_grad=True)
        for _ in range(2):
            y = checkpointed.checkpoint(segment, x, **how)
            backward(checkpointed.checkpoint(segment, y, **how).sum())
        return [times, x.grad, *[p.grad for p in lin.parameters()]]

    same(run)
    with pytest.raises(AssertionError):
        same(lambda backward: [backward is torch_own])


def test_an_error_is_raised_as_it_is() -> None:
    class Stop(BaseException):
        pass

    def stop(g: Any) -> None:
        raise Stop

    w = torch.ones(3, requires_grad=True)
    w.register_hook(stop)
    for backward in PASSES[1:]:
        with pytest.raises(Stop):
            backward((w * 2 + w + w).sum())
        assert w.grad is None
        assert torch._C._current_graph_task_id() == -1
