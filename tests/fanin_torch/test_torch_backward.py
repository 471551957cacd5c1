"""`fanin.torch.backward` beside `loss.backward()` and float64: models, programs, random graphs, errors."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import fanin

pytestmark = pytest.mark.partners

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
fanin_torch: Any = pytest.importorskip("fanin.torch")
nn, functional = torch.nn, torch.nn.functional


# Models: each a module, and its loss


def mlp() -> Any:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)), (8, 12)


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(b), nn.BatchNorm2d(b)])
        self.short = nn.Conv2d(a, b, 1, stride) if stride != 1 or a != b else nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.norms[0](self.first(x)).relu_()
        y = self.norms[1](self.second(y))
        y += self.short(x)
        return y.relu_()


def resnet() -> Any:
    layers = [nn.Conv2d(1, 4, 3, 1, 1), Residual(4, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5)), (4, 1, 8, 8)


def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (3, 7, 16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        y, (h, _) = self.cells(x)
        return self.head(y) + h[-1].sum()


def lstm() -> Any:
    return Recurrent(), (4, 9, 6)


class Shared(nn.Module):
    """One weight in three places, one of them as its transpose; a view; a norm of it in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) * 0.3)
        self.b = nn.Parameter(torch.randn(8))

    def forward(self, x: Any) -> Any:
        y = torch.tanh(x @ self.w + self.b)
        y = torch.tanh(y @ self.w.t() + self.b[None])
        return y @ self.w + 0.01 * (self.w**2).sum() + self.w[:, :1].sum()


def shared() -> Any:
    return Shared(), (5, 8)


MODELS = {f.__name__: f for f in (mlp, resnet, transformer, lstm, shared)}


def gradients(make: Callable[[], Any], backward: Callable[[Any], None], dtype: Any = torch.float32) -> dict[str, Any]:
    """Of all parameters and of the input, after one pass."""
    torch.manual_seed(0)
    model, shape = make()
    x = torch.randn(shape)
    model, x = model.to(dtype), x.to(dtype).requires_grad_()
    backward(model(x).square().mean())
    return {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}


def torch_own(loss: Any) -> None:
    loss.backward()


def summed(loss: Any) -> None:
    """Every sum of three float32 gradients or more is fanin's; its bits are torch's."""
    fanin_torch.backward(loss, accumulate=torch.float32)


@pytest.mark.parametrize("backward", [fanin_torch.backward, summed])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_gradients_that_torch_gives(name: str, backward: Callable[[Any], None]) -> None:
    """Bit for bit: the order of the keys is that in which torch's engine runs the nodes."""
    ours, own = gradients(MODELS[name], backward), gradients(MODELS[name], torch_own)
    exact = gradients(MODELS[name], torch_own, torch.float64)
    assert ours.keys() == own.keys()
    same = 0
    for key, g in ours.items():
        assert (g is None) == (own[key] is None), key
        if g is not None:
            assert g.dtype == own[key].dtype and g.shape == own[key].shape
            torch.testing.assert_close(g, own[key], rtol=1e-4, atol=1e-6, msg=key)
            torch.testing.assert_close(g.double(), exact[key], rtol=1e-3, atol=1e-5, msg=key)
            same += torch.equal(g, own[key])
    print(f"{name}: {same} of {len(ours)} gradients are torch's bit for bit")
    assert same == len(ours)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_bfloat16_is_at_least_as_close_to_float64(name: str) -> None:
    """Each fan-in is rounded once: over all parameters the distance to float64 does not grow."""
    if name == "resnet":
        pytest.skip("the norms of a batch in bfloat16 are far from float64 by themselves")
    ours = gradients(MODELS[name], fanin_torch.backward, torch.bfloat16)
    own = gradients(MODELS[name], torch_own, torch.bfloat16)

    def exact(make: Callable[[], Any]) -> Any:
        """In float64, of the very parameters that bfloat16 has."""
        model, shape = make()
        return model.to(torch.bfloat16).double(), shape

    want = gradients(lambda: exact(MODELS[name]), torch_own, torch.float64)
    far = {engine: sum(float((g[k].double() - want[k]).square().sum()) for k in want) for engine, g in
           {"ours": ours, "torch": own}.items()}  # fmt: skip
    print(name, far)
    assert far["ours"] <= far["torch"] * 1.05


def test_a_fan_in_of_bfloat16_is_rounded_once() -> None:
    w = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)

    def loss() -> Any:
        h = w * 1
        return sum((h * (1 + k / 128)).sum() for k in range(200))

    loss().backward()
    own, w.grad = w.grad, None
    fanin_torch.backward(loss())
    want = torch.tensor(sum(float(torch.tensor(1 + k / 128).bfloat16()) for k in range(200)))
    assert w.grad[0] == want.bfloat16() and own[0] != w.grad[0]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_wider_dtype_of_the_sums(leaf: bool) -> None:
    """1e8 + 1 - 1e8 in float32 is 0, in float64 1: of a parameter that is used often, and of a tensor in between."""
    for accumulate, want in ((None, 0.0), (torch.float64, 1.0)):
        w = torch.ones(1, requires_grad=True)
        h = w if leaf else w * 1.0
        fanin_torch.backward((h * -1e8 + h * 1.0) + h * 1e8, accumulate=accumulate)
        assert w.grad.item() == want


def test_a_function_whose_gradient_has_the_wrong_shape_is_named() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return torch.ones(7)

    x = torch.ones(2, requires_grad=True)
    for backward in (fanin_torch.backward, summed):
        with pytest.raises(RuntimeError, match=r"WrongBackward returned an invalid gradient at index 0 - got \[7\]"):
            backward((Wrong.apply(x) + x + x * 3).sum())
        assert x.grad is None


def test_embeddings_with_sparse_gradients() -> None:
    def run(backward: Callable[[Any], None]) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(20, 4, sparse=True)
        index = torch.tensor([[1, 2, 2], [5, 1, 19]])
        for _ in range(2):  # the second is added to the first
            loss = table(index).square().sum() + table(torch.tensor([2, 3])).sum()
            backward(loss)
        return table.weight.grad

    ours, own = run(fanin_torch.backward), run(torch_own)
    assert ours.is_sparse and own.is_sparse
    torch.testing.assert_close(ours.to_dense(), own.to_dense())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def run(backward: Callable[[Any], None]) -> list[Any]:
        torch.manual_seed(0)
        model, shape = mlp()
        x = torch.randn(shape).requires_grad_()
        y = checkpoint(model[:3], x, use_reentrant=reentrant)
        backward(checkpoint(model[3:], y, use_reentrant=reentrant).square().mean())
        return [p.grad for p in model.parameters()] + [x.grad]

    for ours in (fanin_torch.backward, summed):
        for a, b in zip(run(ours), run(torch_own), strict=True):
            assert torch.equal(a, b)


class Two(torch.autograd.Function):
    """Takes a number between its tensors, gives two results, one of which may be left unused."""

    @staticmethod
    def forward(ctx: Any, x: Any, n: float, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        ctx.n = n
        return x * y * n, x + y

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        x, y = ctx.saved_tensors
        return g * y * ctx.n + h, None, (g * x * ctx.n + h if ctx.needs_input_grad[2] else None)


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("second", [True, False])
def test_functions_of_the_users_own(used: tuple[bool, bool], second: bool) -> None:
    def run(backward: Callable[[Any], None]) -> list[Any]:
        torch.manual_seed(0)
        x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=second)
        results = Two.apply(x, 2.5, y)
        backward(sum(r.sum() for r, u in zip(results, used, strict=True) if u))
        return [x.grad, y.grad]

    for a, b in zip(run(fanin_torch.backward), run(torch_own), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Undefined(torch.autograd.Function):
    """Returns two results, and sets whether torch passes zeros for one that is not used."""

    @staticmethod
    def forward(ctx: Any, x: Any, zeros: bool) -> Any:
        ctx.set_materialize_grads(zeros)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any) -> Any:
        return (2 * a if b is None else 2 * a + 3 * b + 1), None


@pytest.mark.parametrize("zeros", [True, False])
def test_a_function_is_given_zeros_where_it_wants_them(zeros: bool) -> None:
    def run(backward: Callable[[Any], None]) -> Any:
        x = torch.ones(3, requires_grad=True)
        backward(Undefined.apply(x, zeros)[0].sum())
        return x.grad

    assert torch.equal(run(fanin_torch.backward), run(torch_own))
    assert run(fanin_torch.backward).tolist() == [2 + zeros] * 3


class Gives(torch.autograd.Function):
    """Its backward returns what a callable returns."""

    @staticmethod
    def forward(ctx: Any, x: Any, gives: Any) -> Any:
        ctx.gives = gives
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.gives(g)


@pytest.mark.parametrize(
    "gives",
    [lambda g: (g, None, g), lambda g: (), lambda g: (5, None)],
    ids=["too many", "too few", "a number"],
)
def test_what_a_function_returns_is_checked_by_torch(gives: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    errors = []
    for backward in (torch_own, fanin_torch.backward, summed):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            backward((Gives.apply(x, gives) + x + x * 3).sum())
        errors.append((caught.type, str(caught.value)))
        assert x.grad is None
    assert errors[0] == errors[1] == errors[2]
    fanin_torch.backward(Gives.apply(x, lambda g: (g, None, None)).sum())  # what is None may be too many
    assert x.grad.tolist() == [1, 1, 1]


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "unused outputs": lambda x: x.unbind(1)[0].sum() + torch.svd(x)[1].sum(),
    "split and joined": lambda x: torch.cat([x[:1] * 2, x[1:].flip(0)]).cumsum(0).prod(),
    "in place": lambda x: (x * 1).mul_(3).add_(x).exp_().sum(),
    "in place on a view": lambda x: (lambda y: (y[0].mul_(2), y.sum())[1])(x.clone()),
    "complex in between": lambda x: torch.view_as_real(torch.fft.fft(x) * (1 + 2j)).square().sum(),
    "real and complex": lambda x: ((x * torch.tensor(1 + 2j)) ** 2).abs().sum(),
    "dtypes": lambda x: (x.double() * x.half() + x).sum().float(),
    "expanded": lambda x: (x[:, :1].expand(4, 5) * x.mean()).sum(),
    "a scalar many times": lambda x: sum((x.sum() * k).tanh() for k in range(30)),
    "a leaf as the result": lambda x: x.sum() * 0 + x[0, 0],
    "a loop": lambda x: torch.stack([x * k for k in range(50)]).logsumexp(0).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    def run(backward: Callable[[Any], None]) -> Any:
        torch.manual_seed(0)
        x = torch.randn(4, 4, requires_grad=True)
        backward(PROGRAMS[name](x))
        return x.grad

    assert torch.equal(run(fanin_torch.backward), run(torch_own))
    ours = run(lambda loss: fanin_torch.backward(loss, accumulate="exact"))
    torch.testing.assert_close(ours, run(torch_own), rtol=1e-5, atol=1e-6)


def test_several_tensors_with_gradients_to_begin_with() -> None:
    def run(backward: Callable[..., None]) -> Any:
        w = torch.arange(3.0, requires_grad=True)
        y, z = w * 2, w.exp()
        backward([y, z, w, y], [torch.ones(3), torch.full((3,), 0.5), torch.ones(3), torch.ones(3)])
        return w.grad

    assert torch.equal(run(fanin_torch.backward), run(torch.autograd.backward))


def test_a_gradient_is_added_to_what_is_there_in_place() -> None:
    w = torch.ones(3, requires_grad=True)
    fanin_torch.backward((w * 2).sum())
    held = w.grad
    fanin_torch.backward((w * 3).sum())
    assert w.grad is held and held.tolist() == [5, 5, 5]


def test_inputs_limit_the_pass() -> None:
    model, shape = mlp()
    x = torch.randn(shape)
    fanin_torch.backward(model(x).square().mean(), inputs=[model[2].weight, model[4].bias])
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["2.weight", "4.bias"]
    own = copy.deepcopy(model)
    own.zero_grad()
    own(x).square().mean().backward()
    assert torch.equal(own[2].weight.grad, model[2].weight.grad)
    stranger = torch.ones(2, requires_grad=True)
    fanin_torch.backward(model(x).sum(), inputs=stranger)
    assert stranger.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_reaches_no_leaf_beyond_inputs(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x, inside, beside = (torch.ones(2, requires_grad=True) for _ in range(3))
    loss = (checkpoint(lambda x: x * inside, x, use_reentrant=reentrant) * beside).sum()
    fanin_torch.backward(loss, inputs=[beside], retain_graph=True)  # the checkpoint does not lead there
    assert (x.grad, inside.grad, beside.grad.tolist()) == (None, None, [1.0, 1.0])
    if reentrant:  # it would give `inside` a gradient, too; torch's own engine refuses it as well
        with pytest.raises(RuntimeError, match=r"use_reentrant"):
            fanin_torch.backward(loss, inputs=[x, beside])
    else:
        fanin_torch.backward(loss, inputs=[x])
        assert beside.grad.tolist() == [1.0, 1.0]
    assert (x.grad is None) == reentrant
    assert inside.grad is None


def test_hooks_of_leaves_run_and_may_replace() -> None:
    w, log = torch.ones(3, requires_grad=True), []
    w.register_hook(lambda g: log.append(g.tolist()))
    w.register_hook(lambda g: g * 10)
    w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.tolist()))
    fanin_torch.backward((w + w).sum())
    assert log == [[2, 2, 2], [20, 20, 20]]


def test_parameters_are_stepped_in_the_middle_of_the_pass() -> None:
    model, shape = mlp()
    steps = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: steps.append(name) or setattr(p, "grad", None))
    fanin_torch.backward(model(torch.randn(shape)).sum())
    assert len(steps) == 6 and steps[0].startswith("4.") and steps[-1].startswith("0.")
    assert all(p.grad is None for p in model.parameters())


def test_micro_batches_are_collected() -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    with fanin_torch.accumulate(model.parameters()):
        for x in torch.randn(8, 3, 4, dtype=torch.bfloat16):
            fanin_torch.backward(model(x).sum())
    assert model.weight.grad.dtype == torch.bfloat16


def test_the_order_is_torchs() -> None:
    """Nodes run from late to early."""

    class Said(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, name: str, log: list[str]) -> Any:
            ctx.said = name, log
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            name, log = ctx.said
            log.append(name)
            return g * 2, None, None

    def run(backward: Callable[[Any], None]) -> list[str]:
        log: list[str] = []
        x = torch.ones(2, requires_grad=True)
        a = Said.apply(x, "a", log)
        b, c = Said.apply(a, "b", log), Said.apply(a, "c", log)
        d = Said.apply(b + c, "d", log)
        backward((d + Said.apply(a, "e", log)).sum())
        return log

    assert run(fanin_torch.backward) == run(summed) == run(torch_own)


# Random graphs


def drawn(r: random.Random, leaves: list[Any]) -> Any:
    """A loss: operations on whatever is there already, used again and again; some of it in vain."""
    made = list(leaves)

    def any_of() -> Any:
        return r.choice(made[-6:] if r.random() < 0.7 else made)

    operations: list[Callable[[], Any]] = [
        lambda: any_of() + any_of(),
        lambda: any_of() * any_of(),
        lambda: torch.tanh(any_of()),
        lambda: any_of() @ any_of(),
        lambda: any_of().t(),
        lambda: torch.cat([any_of()[:2], any_of()[2:]]),  # of each some
        lambda: any_of().sum(0, keepdim=True) + any_of() * 0.1,  # is broadcast
        lambda: any_of().contiguous().view(2, 8).reshape(4, 4),
        lambda: any_of().unbind()[0] * any_of(),  # several results, of which one is used
        lambda: any_of().index_select(0, torch.tensor([0, 0, 1, 3])),
        lambda: Undefined.apply(any_of(), r.random() < 0.5)[0] + any_of(),
        lambda: any_of().detach() * any_of(),
        lambda: any_of().double().float() if r.random() < 0.5 else any_of().to(torch.bfloat16).float(),
    ]
    for _ in range(r.randrange(3, 40)):
        x = r.choice(operations)()
        made.append(x if x.requires_grad else x * leaves[0])
    return sum((x / 4).tanh().sum() for x in made[-r.randrange(1, 4) :])


@pytest.mark.rule("A15")
def test_random_graphs_have_the_gradients_that_torch_gives() -> None:
    seed = int(os.environ.get("FANIN_SEED", 0)) or random.randrange(2**32)
    print(f"FANIN_SEED={seed}")
    seen: Counter[str] = Counter()

    def after(backward: Callable[[Any], None], k: int) -> list[Any]:
        torch.manual_seed(k)
        leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        backward(drawn(random.Random(seed + k), leaves))
        return [x.grad for x in leaves]

    for k in range(120):
        own = after(torch_own, k)
        ours = after(fanin_torch.backward, k)
        every = after(summed, k)
        for a, b, c in zip(own, ours, every, strict=True):
            assert (a is None) == (b is None) == (c is None), seed + k
            seen["undefined" if a is None else "defined"] += 1
            if a is not None:
                torch.testing.assert_close(b, a, rtol=2e-3, atol=1e-4, msg=lambda text, k=k: f"{seed + k}: {text}")
                seen["torch's bits" if torch.equal(a, b) else "other bits"] += 1
                seen["torch's bits where all sums are ours"] += torch.equal(a, c)
    print(dict(seen))
    assert seen["defined"] > 100
    assert seen["undefined"]
    assert seen["torch's bits"]
    assert seen["torch's bits where all sums are ours"] > seen["defined"] // 2


def test_a_deep_graph() -> None:
    x = y = torch.ones(2, requires_grad=True)
    for _ in range(20_000):
        y = y * 1.0
    fanin_torch.backward(y.sum())
    assert x.grad.tolist() == [1, 1]


def test_a_graph_that_several_threads_have_made() -> None:
    """torch numbers the nodes of each thread by themselves: those that were made last have small numbers here."""
    x = torch.ones(2, requires_grad=True)
    middle = (x * 3.0).exp() * x
    ends: list[Any] = []
    other = threading.Thread(target=lambda: ends.append((middle * middle).sum()))
    other.start()
    other.join()
    assert ends[0].grad_fn._sequence_nr() < middle.grad_fn._sequence_nr(), "a fresh thread begins with 0"
    [expected] = torch.autograd.grad(ends[0], x, retain_graph=True)
    for options in ({}, {"accumulate": torch.float32}):
        x.grad = None
        fanin_torch.backward(ends[0], retain_graph=True, **options)
        assert torch.equal(x.grad, expected)


# What is refused


def nested() -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch warns that it is a prototype
        x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    return x * 2


def one(n: int = 1, **how: Any) -> Any:
    return torch.ones(n, requires_grad=True, **how)


BACKWARD = fanin_torch.backward


def inside(x: Any) -> Any:
    y = (x * one()).sum()
    BACKWARD(y)
    return y


def compiled_pass(y: Any) -> None:
    compiled = pytest.importorskip("torch._dynamo.compiled_autograd")
    with compiled._enable(lambda graph: graph):
        BACKWARD(y)


class Passes(torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **kwargs or {})


def same(x: Any) -> Any:
    return x


#: What is around the forward, and around the pass.
AROUND: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "saved_tensors_hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(same, same), contextlib.nullcontext),
    "save_on_cpu": (lambda: torch.autograd.graph.save_on_cpu(), contextlib.nullcontext),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext),
    "no_grad": (contextlib.nullcontext, lambda: torch.no_grad()),
    "inference_mode": (contextlib.nullcontext, lambda: torch.inference_mode()),
    "a mode of __torch_function__": (contextlib.nullcontext, Passes),
    "a profiler": (contextlib.nullcontext, lambda: torch.autograd.profiler.profile()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", AROUND)
def test_gradients_are_those_of_torch_inside_of_what_torch_has(name: str) -> None:
    forward, around = AROUND[name]
    torch.manual_seed(0)
    made, shape = mlp()
    x = torch.randn(shape)
    grads = []
    for backward in (torch_own, BACKWARD):
        model = copy.deepcopy(made)
        with forward():
            loss = model(x).square().mean()
        with around():
            backward(loss)
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b) and a.is_inference() == b.is_inference()


LEAVES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "vmap": lambda: (p := one(3), torch.func.vmap(lambda row: (row * p).sum())(torch.ones(4, 3)).sum()),
    "func.grad": lambda: (p := one(3), torch.func.grad(lambda q: (q * p).pow(2).sum())(torch.ones(3)).sum()),
    "complex": lambda: (p := one(3, dtype=torch.complex64), (p * p.conj()).real.sum()),
    "CSR": lambda: (p := torch.eye(3).to_sparse_csr().requires_grad_(), (p @ torch.ones(3, 2)).sum()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEAVES)
def test_gradients_of_transforms_and_unusual_leaves_are_those_of_torch(name: str) -> None:
    (a, loss), (b, other) = LEAVES[name](), LEAVES[name]()
    torch_own(loss)
    BACKWARD(other)
    assert a.grad.dtype == b.grad.dtype and a.grad.layout == b.grad.layout
    assert torch.equal(a.grad.to_dense(), b.grad.to_dense())


REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: BACKWARD(torch.ones(1)), RuntimeError, "does not require grad"),
    (lambda: BACKWARD(7), TypeError, "backward: tensors: expected a sequence of tensors, got an int"),
    (lambda: BACKWARD([7]), TypeError, "backward: tensors: item 0: expected a tensor, got an int"),
    (lambda: BACKWARD(torch.ones(2, requires_grad=True) * 1), RuntimeError, "only for scalar outputs"),
    (lambda: BACKWARD(torch.autograd.graph.get_gradient_edge(many()), at=one()), RuntimeError, "with a GradientEdge"),
    (lambda: torch.func.grad(inside)(torch.ones(3)), RuntimeError, "inside a functorch transform"),
    (lambda: torch.func.vmap(inside)(torch.ones(2, 3)), RuntimeError, "inside a functorch transform"),
    (lambda: compiled_pass(one() * 2), RuntimeError, "compiled autograd is enabled"),
    (lambda: BACKWARD(one(), torch.ones(7, 2)), RuntimeError, "Mismatch in shape"),
    (lambda: BACKWARD(one(), inputs=[]), RuntimeError, "`inputs` argument to .* cannot be empty"),
    (lambda: BACKWARD(one(), inputs=[3]), TypeError, "backward: inputs: item 0: expected a tensor, got an int"),
    (lambda: BACKWARD(one(dtype=torch.complex64) * 2), RuntimeError, "only for real scalar outputs"),
    (lambda: BACKWARD(one() * 2, retain_graph=True, create_graph=3), TypeError, "create_graph"),
    (lambda: BACKWARD(many(device="meta"), accumulate="exact"), RuntimeError, "is on meta: only torch sums it"),
    (lambda: BACKWARD(nested(), torch.ones(2), at=[one()]), RuntimeError, "sparse or nested"),
    (lambda: BACKWARD(many(), accumulate="int8"), ValueError, "int8"),
]


def many(**how: Any) -> Any:
    w = one(**how)
    return (w * w * w * w).sum()


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED)
def test_what_is_refused(call: Callable[[], Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("backward", [fanin_torch.backward, summed])
def test_an_error_in_a_node_leaves_each_grad_whole(backward: Callable[[Any], None]) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise ZeroDivisionError("in backward")

    early, late = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ZeroDivisionError, match="in backward"):
        backward((Bad.apply(late) * late * late * early).sum())
    assert early.grad.tolist() == [2, 2]
    assert late.grad is None


def test_a_graph_that_torch_has_freed_is_torchs_error() -> None:
    w = torch.ones(2, requires_grad=True)
    loss = (w * w).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        fanin_torch.backward(loss)
    assert w.grad.tolist() == [2, 2]


@pytest.mark.parametrize("backward", [fanin_torch.backward, summed])
def test_nothing_of_the_graph_is_kept(backward: Callable[[Any], None]) -> None:
    """Nor does it wait for the garbage collector."""
    import gc
    import weakref

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    loss = (Two.apply(x, 2.0, y)[0] * x * x).sum()
    product = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    kept = weakref.ref(product.next_functions[0][0])
    del product
    gc.collect()
    gc.disable()
    try:
        backward(loss)
        assert kept() is not None
        del loss
        assert kept() is None
        assert x.grad.tolist() == [6, 6, 6]
    finally:
        gc.enable()


# create_graph, retain_graph


@pytest.mark.parametrize("name", ["mlp", "shared", "lstm"])
def test_create_graph_gives_gradients_that_can_be_differentiated(name: str) -> None:
    def second(backward: Callable[[Any], None]) -> list[Any]:
        torch.manual_seed(5)
        module, shape = MODELS[name]()
        x = torch.randn(shape)
        parameters = list(module.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the circle of .grad and its graph
            backward(module(x).square().mean())
            firsts = [p.grad for p in parameters]
            seconds = torch.autograd.grad(sum((g * g).sum() for g in firsts), parameters, allow_unused=True)
            for p in parameters:
                p.grad = None
        return [*(g.detach() for g in firsts), *seconds]

    mine = second(lambda loss: fanin_torch.backward(loss, create_graph=True))
    theirs = second(lambda loss: loss.backward(create_graph=True))
    assert len(mine) == len(theirs) and any(g is not None for g in theirs[len(mine) // 2 :])
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_create_graph_sums_onto_a_grad_that_is_there_out_of_place() -> None:
    w = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fanin_torch.backward((w * w * w).sum(), create_graph=True)
        first = w.grad
        fanin_torch.backward((w * w).sum(), create_graph=True)
    assert first.tolist() == [3, 3, 3] and w.grad.tolist() == [5, 5, 5] and w.grad.requires_grad
    (again,) = torch.autograd.grad(w.grad.sum(), w)
    assert again.tolist() == [8, 8, 8]
    w.grad = None
    with pytest.raises(ValueError, match=r"accumulate= with create_graph=True"):
        fanin_torch.backward((w * w).sum(), create_graph=True, accumulate="float64")


@pytest.mark.parametrize("retain", [None, True, False])
def test_without_retain_graph_the_graph_is_freed(retain: bool | None) -> None:
    w = torch.ones(3, requires_grad=True)
    loss = (w * w * w).sum()
    summed_and_kept = fanin_torch.backward(loss, retain_graph=retain, accumulate=torch.float32)
    assert summed_and_kept is None
    if retain:
        fanin_torch.backward(loss)
        assert w.grad.tolist() == [6, 6, 6]
        return
    with pytest.raises(RuntimeError, match="second time"):
        fanin_torch.backward(loss, accumulate=torch.float32)
    assert w.grad.tolist() == [3, 3, 3]


def test_a_tensor_of_any_layout_is_handed_through() -> None:
    seen: list[Any] = []
    leaf = fanin.Leaf(like=fanin.Slot((3, 2), torch.float32), accumulate=seen.append)
    for g in (torch.randn(2, 3).t(), torch.randn(3, 4)[:, ::2], torch.ones(1).expand(3, 2)):
        fanin.backward([(leaf, 0, g)])
        assert seen.pop() is g
    odd = torch.randn(3, 2, dtype=torch.complex64).conj().imag  # its negative bit is set
    assert odd.is_neg()
    fanin.backward([(leaf, 0, odd)])
    assert torch.equal(seen[0], odd.resolve_neg())
    with pytest.raises(ValueError, match="expected"):
        fanin.backward([(leaf, 0, torch.randn(2, 3))])
