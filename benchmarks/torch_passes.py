"""`fanin.torch.backward` beside `loss.backward()`: the passes backward of twelve models in float32 and bfloat16.

Each pass runs over a graph that a forward has just made, outside of the time, with no gradient in `.grad`. The chains
are of the smallest operations, where the walk that finds fan-ins shows most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from .timing import Result, at_most, measure, peer, pinned

OWN, OURS = "loss.backward()", "fanin.torch.backward"
USES = 64  # of the weight whose error is measured

#: A model, and what makes its loss.
Made: TypeAlias = tuple[Any, Callable[[], Any]]


def of_module(torch: Any, dtype: Any, module: Any, *shape: int) -> Made:
    model, x = module.to(dtype), torch.randn(*shape).to(dtype)
    return model, lambda: model(x).square().mean()


def perceptron(torch: Any, dtype: Any) -> Made:
    nn = torch.nn
    layers = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)]
    return of_module(torch, dtype, nn.Sequential(*layers), 64, 256)


def residual(torch: Any, dtype: Any) -> Made:
    nn = torch.nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1)
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.layers(x))

    blocks = [Block() for _ in range(4)]
    return of_module(torch, dtype, nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *blocks), 4, 3, 16, 16)


def unet(torch: Any, dtype: Any) -> Made:
    nn, functional = torch.nn, torch.nn.functional
    down, inner = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    up = nn.Conv2d(16, 2, 3, padding=1)
    model, x = nn.ModuleList([down, inner, up]).to(dtype), torch.randn(4, 4, 16, 16).to(dtype)

    def loss() -> Any:
        high = torch.relu(down(x))
        low = torch.relu(inner(functional.max_pool2d(high, 2)))
        return up(torch.cat([high, functional.interpolate(low, scale_factor=2)], 1)).square().mean()

    return model, loss


def encoder_of(torch: Any, dtype: Any, width: int, batch: int, length: int) -> Made:
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return of_module(torch, dtype, module, batch, length, width)


def encoder(torch: Any, dtype: Any) -> Made:
    return encoder_of(torch, dtype, 128, 4, 32)


def small_encoder(torch: Any, dtype: Any) -> Made:
    return encoder_of(torch, dtype, 16, 2, 4)


def lstm(torch: Any, dtype: Any) -> Made:
    model, x = torch.nn.LSTM(32, 64, num_layers=2).to(dtype), torch.randn(24, 8, 32).to(dtype)
    return model, lambda: model(x)[0].square().mean()


def cell(torch: Any, dtype: Any) -> Made:
    """Each weight is used in each of 48 steps."""
    model, xs = torch.nn.GRUCell(32, 64).to(dtype), torch.randn(48, 8, 32).to(dtype)

    def loss() -> Any:
        h = xs.new_zeros(8, 64)
        for x in xs:
            h = model(x, h)
        return h.square().mean()

    return model, loss


def ode(torch: Any, dtype: Any) -> Made:
    model, start = torch.nn.Linear(64, 64).to(dtype), torch.randn(16, 64).to(dtype)

    def loss() -> Any:
        x = start
        for _ in range(32):
            x = x + 0.1 * torch.tanh(model(x))
        return x.square().mean()

    return model, loss


def tied(torch: Any, dtype: Any) -> Made:
    table = torch.nn.Embedding(500, 64).to(dtype)
    words = torch.arange(256).reshape(8, 32) % 500

    def loss() -> Any:
        scores = torch.nn.functional.linear(table(words).mean(1), table.weight)
        return scores.logsumexp(-1).mean()

    return table, loss


def experts(torch: Any, dtype: Any) -> Made:
    nn = torch.nn
    gate, each = nn.Linear(32, 4), [nn.Linear(32, 32) for _ in range(4)]
    model, x = nn.ModuleList([gate, *each]).to(dtype), torch.randn(64, 32).to(dtype)

    def loss() -> Any:
        weights = gate(x).softmax(-1)
        return sum(weights[:, i : i + 1] * torch.tanh(e(x)) for i, e in enumerate(each)).square().mean()

    return model, loss


def messages(torch: Any, dtype: Any) -> Made:
    model = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)]).to(dtype)
    start = torch.randn(100, 32).to(dtype)
    source, target = torch.randint(0, 100, (400,)), torch.randint(0, 100, (400,))

    def loss() -> Any:
        x = start
        for layer in model:
            x = x + torch.zeros_like(x).index_add(0, target, torch.tanh(layer(x[source])))
        return x.square().mean()

    return model, loss


def siamese(torch: Any, dtype: Any) -> Made:
    nn = torch.nn
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)
    xs = torch.randn(6, 16, 64).to(dtype)

    def loss() -> Any:
        first, *others = [model(x) for x in xs]
        return sum((first - one).square().mean() for one in others)

    return model, loss


#: By the words of the table in docs/torch.md.
MODELS: dict[str, Callable[[Any, Any], Made]] = {
    "an MLP of 256-512-512-10": perceptron,
    "four residual blocks": residual,
    "a U-Net of three convolutions": unet,
    "a transformer encoder of width 128": encoder,
    ".. of width 16": small_encoder,
    "an LSTM of two layers": lstm,
    "a GRU cell, 48 steps": cell,
    "a layer in 32 steps of a differential equation": ode,
    "an embedding tied to the output": tied,
    "four experts": experts,
    "message passing": messages,
    "one network on six inputs": siamese,
}
CHAINS = {"-x": lambda x: -x, "x + 1": lambda x: x + 1, "relu": lambda x: x.relu()}


def chain(torch: Any, one: Callable[[Any], Any]) -> Made:
    """2,000 operations on four numbers, each used once."""
    start = torch.ones(4, requires_grad=True)

    def loss() -> Any:
        x = start
        for _ in range(2000):
            x = one(x)
        return x.sum()

    return start, loss


def compared(title: str, made: Made, most: float, rounds: int, **more: Any) -> Result:
    """The two passes, over graphs of one model."""
    import fanin.torch

    model, make = made
    parameters = [*model.parameters()] if hasattr(model, "parameters") else [model]
    held: list[Any] = []

    def forward() -> None:
        for p in parameters:
            p.grad = None
        held[:] = [make()]

    return measure(
        title,
        {OWN: lambda: held[0].backward(), OURS: lambda: fanin.torch.backward(held[0])},
        base=OWN, unit="us", rounds=rounds, before={OWN: forward, OURS: forward},
        targets=[at_most(most, OURS, OWN)], more=more,
    )  # fmt: skip


def error_of(torch: Any, backward: Callable[[Any], None]) -> float:
    """The relative error of the gradient of a bfloat16 weight that is used often."""
    torch.manual_seed(0)
    w = torch.randn(4096).bfloat16().requires_grad_()
    factors = torch.randn(USES, 4096).bfloat16()
    backward(sum((w * f).float().sum() for f in factors))
    exact = factors.double().sum(0)
    return float((w.grad.double() - exact).norm() / exact.norm())


def ratio_of(one: Result) -> str:
    """How many times as long as torch, by medians."""
    return f"{1 / one['rows'][OURS]['ratio']:.2f}"


def own_time(one: Result) -> str:
    return f"{one['rows'][OWN]['median'] / 1e3:.2f} ms"


def results(quick: bool) -> Iterator[Result]:
    """us for each pass backward. At the end the rows of the table in docs/torch.md are printed."""
    torch = peer("torch")
    if torch is None:
        return
    import fanin.torch

    threads, rounds = torch.get_num_threads(), 3 if quick else 60
    table: list[tuple[str, ...]] = []
    try:
        torch.set_num_threads(1)
        with pinned() as where:
            for words, model in MODELS.items():
                pair = []
                for dtype in (torch.float32, torch.bfloat16):
                    torch.manual_seed(0)
                    name = f"{model.__name__.replace('_', ' ')}, {str(dtype).removeprefix('torch.')}"
                    one = compared(f"a pass of torch's: {name}, core {where}", model(torch, dtype), 1.25, rounds)
                    pair.append(one)
                    yield one
                table.append((words, *map(ratio_of, pair), own_time(pair[-1])))
            for name, operation in CHAINS.items():
                one = compared(f"a chain of 2,000 x {name}, core {where}", chain(torch, operation), 1.6, rounds)
                table.append((f"a chain of 2,000 `{name}`", ratio_of(one), "", ""))
                yield one
            w = torch.randn(4096).bfloat16().requires_grad_()
            factors = torch.randn(USES, 4096).bfloat16()
            one = compared(
                f"a bfloat16 weight of 4,096 numbers, used {USES} times, core {where}",
                (w, lambda: sum((w * f).float().sum() for f in factors)), 1.25, rounds,
                error={OWN: error_of(torch, torch.Tensor.backward), OURS: error_of(torch, fanin.torch.backward)},
            )  # fmt: skip
            table.append((f"a weight of 4,096 numbers that is used {USES} times", "", ratio_of(one), own_time(one)))
            yield one
    finally:
        torch.set_num_threads(threads)
    print(*(f"| {' | '.join(row)} |" for row in table), sep="\n")
