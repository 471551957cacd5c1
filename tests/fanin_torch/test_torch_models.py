"""Models of torch's in `fanin.torch.backward`: the gradients of each are those of `loss.backward()`, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
fanin_torch: Any = pytest.importorskip("fanin.torch")
nn, functional = torch.nn, torch.nn.functional
norms = torch.nn.utils.parametrizations
checkpoint = torch.utils.checkpoint.checkpoint


class Model(nn.Module):  # type: ignore[misc]
    """Modules, and how a loss is made of them and a batch."""

    def __init__(self, run: Callable[[Any, Any], Any], **modules: Any) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def plain(*modules: Any) -> Model:
    return Model(lambda m, x: m.all(x), all=nn.Sequential(*modules))


def first(module: Any, *further: Any) -> Model:
    """Of a module that returns several things, the first."""
    return Model(lambda m, x: m.module(x, *further)[0], module=module)


def dense(m: Any, x: Any) -> Any:
    for layer in m.layers:
        x = torch.cat([x, torch.relu(layer(x))], 1)
    return x


def unet(m: Any, x: Any) -> Any:
    down = torch.relu(m.down(x))
    inner = torch.relu(m.inner(functional.max_pool2d(down, 2)))
    return m.up(torch.cat([down, functional.interpolate(inner, scale_factor=2)], 1))


def excite(m: Any, x: Any) -> Any:
    y = m.conv(x)
    return y * torch.sigmoid(m.gate(y.mean((2, 3))))[:, :, None, None] + x


def experts(m: Any, x: Any) -> Any:
    weight, which = m.gate(x).softmax(-1).topk(2, dim=-1)
    made = torch.stack([expert(x) for expert in m.experts], 1)
    return (weight[..., None] * made.gather(1, which[..., None].expand(-1, -1, made.shape[-1]))).sum(1)


def message_passing(m: Any, x: Any) -> Any:
    source, target = torch.tensor([0, 1, 2, 3, 3, 1]), torch.tensor([1, 2, 3, 0, 1, 1])
    for layer in m.layers:
        x = x + torch.zeros_like(x).index_add(0, target, torch.tanh(layer(x[source])))
    return x


def ode(m: Any, x: Any) -> Any:
    for _ in range(8):
        x = x + 0.1 * torch.tanh(m.f(x))
    return x


def variational(m: Any, x: Any) -> Any:
    mean, log = m.encode(x).chunk(2, -1)
    z = mean + torch.exp(log / 2) * torch.randn_like(mean)
    return torch.cat([m.decode(z), (mean.square() + log.exp() - log)], -1)


def siamese(m: Any, x: Any) -> Any:
    a, b = m.net(x), m.net(x.flip(0))
    return functional.cosine_similarity(a, b) + (a - b).norm(dim=-1)


def tied(m: Any, x: Any) -> Any:
    return functional.linear(m.embed(x).mean(1), m.embed.weight)


def fourier(m: Any, x: Any) -> Any:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.lin.weight.reshape(-1, 2)[:5]), n=8) + m.lin(x)


def covariance(m: Any, x: Any) -> Any:
    w = m.lin.weight
    spd = w @ w.T + torch.eye(8)
    return torch.linalg.solve(spd, x.T).T + torch.logdet(spd) + torch.linalg.cholesky(spd).sum()


def checkpointed(m: Any, x: Any, reentrant: bool) -> Any:
    for layer in m.layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def alignment(m: Any, x: Any) -> Any:
    scores = m.lin(x).log_softmax(-1)[:, None]
    return functional.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))


def in_place(m: Any, x: Any) -> Any:
    y = m.lin(x)
    y[:, 0].mul_(2)
    y[1].add_(y[2])
    return y.relu_()


def lists(n: int, make: Callable[[int], Any]) -> Any:
    return nn.ModuleList(make(i) for i in range(n))


WORDS = torch.arange(12).reshape(4, 3) % 7
IMAGE = (2, 4, 8, 8)

#: name -> (the model, the shape of the batch, or the batch)
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "perceptron": (lambda: plain(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)), (4, 8)),
    "activations": (
        lambda: plain(nn.Linear(8, 8), nn.SiLU(), nn.Softplus(), nn.ELU(), nn.Hardtanh(), nn.Softmax(-1), nn.GLU(-1)),
        (4, 8),
    ),
    "prelu": (lambda: plain(nn.Linear(8, 8), nn.PReLU(8), nn.LeakyReLU()), (4, 8)),
    "conv1d": (lambda: plain(nn.Conv1d(4, 6, 3), nn.AvgPool1d(2)), (2, 4, 10)),
    "conv2d": (lambda: plain(nn.Conv2d(4, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)), IMAGE),
    "conv3d": (lambda: plain(nn.Conv3d(2, 3, 2), nn.AdaptiveAvgPool3d(1)), (2, 2, 4, 4, 4)),
    "transposed convolution": (lambda: plain(nn.ConvTranspose2d(4, 2, 3, stride=2)), IMAGE),
    "grouped and dilated": (lambda: plain(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 4, 2, dilation=2)), IMAGE),
    "pixel shuffle": (lambda: plain(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)), IMAGE),
    "batch norm": (lambda: plain(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), IMAGE),
    "group and instance norm": (lambda: plain(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "layer and rms norm": (lambda: plain(nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)), (4, 8)),
    "weight norm": (lambda: plain(norms.weight_norm(nn.Linear(8, 8)), nn.Tanh()), (4, 8)),
    "spectral norm": (lambda: plain(norms.spectral_norm(nn.Linear(8, 8)), nn.Tanh()), (4, 8)),
    "orthogonal": (lambda: plain(norms.orthogonal(nn.Linear(8, 8)), nn.Tanh()), (4, 8)),
    "residual": (lambda: Model(excite, conv=nn.Conv2d(4, 4, 3, padding=1), gate=nn.Linear(4, 4)), IMAGE),
    "dense": (lambda: Model(dense, layers=lists(3, lambda i: nn.Linear(8 + 4 * i, 4))), (4, 8)),
    "unet": (
        lambda: Model(
            unet,
            down=nn.Conv2d(4, 4, 3, padding=1),
            inner=nn.Conv2d(4, 4, 3, padding=1),
            up=nn.Conv2d(8, 2, 3, padding=1),
        ),
        IMAGE,
    ),
    "rnn": (lambda: first(nn.RNN(8, 6, 2)), (5, 3, 8)),
    "lstm": (lambda: first(nn.LSTM(8, 6, bidirectional=True, batch_first=True)), (3, 5, 8)),
    "gru": (lambda: first(nn.GRU(8, 6, 2)), (5, 3, 8)),
    "attention": (
        lambda: Model(lambda m, x: m.attend(x, x, x)[0], attend=nn.MultiheadAttention(8, 2, batch_first=True)),
        (3, 5, 8),
    ),
    "encoder": (
        lambda: plain(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)),
        (3, 5, 8),
    ),
    "decoder": (
        lambda: Model(lambda m, x: m.layer(x, x.flip(1)), layer=nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)),
        (3, 5, 8),
    ),
    "embedding": (lambda: plain(nn.Embedding(7, 8), nn.Linear(8, 4)), WORDS),
    "sparse embedding": (lambda: plain(nn.Embedding(7, 8, sparse=True), nn.Linear(8, 4)), WORDS),
    "embedding bag": (lambda: plain(nn.EmbeddingBag(7, 8), nn.Linear(8, 4)), WORDS),
    "tied weights": (lambda: Model(tied, embed=nn.Embedding(7, 8)), WORDS),
    "bilinear": (lambda: Model(lambda m, x: m.pair(x, x.flip(0)), pair=nn.Bilinear(8, 8, 3)), (4, 8)),
    "mixture of experts": (
        lambda: Model(experts, gate=nn.Linear(8, 4), experts=lists(4, lambda i: nn.Linear(8, 8))),
        (4, 8),
    ),
    "message passing": (lambda: Model(message_passing, layers=lists(3, lambda i: nn.Linear(8, 8))), (4, 8)),
    "differential equation": (lambda: Model(ode, f=nn.Linear(8, 8)), (4, 8)),
    "variational": (lambda: Model(variational, encode=nn.Linear(8, 6), decode=nn.Linear(3, 8)), (4, 8)),
    "siamese": (lambda: Model(siamese, net=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))), (4, 8)),
    "fourier": (lambda: Model(fourier, lin=nn.Linear(8, 8)), (4, 8)),
    "linear algebra": (lambda: Model(covariance, lin=nn.Linear(8, 8)), (4, 8)),
    "ctc": (lambda: Model(alignment, lin=nn.Linear(8, 5)), (4, 8)),
    "dropout": (lambda: plain(nn.Linear(8, 8), nn.Dropout(), nn.AlphaDropout()), (4, 8)),
    "written in place": (lambda: Model(in_place, lin=nn.Linear(8, 8)), (4, 8)),
    "checkpoint, reentrant": (
        lambda: Model(functools.partial(checkpointed, reentrant=True), layers=lists(3, lambda i: nn.Linear(8, 8))),
        (4, 8),
    ),
    "checkpoint, not reentrant": (
        lambda: Model(functools.partial(checkpointed, reentrant=False), layers=lists(3, lambda i: nn.Linear(8, 8))),
        (4, 8),
    ),
}


def trained(name: str, backward: Callable[[Any], None]) -> list[Any]:
    """Gradients and parameters after three steps, the second of which adds to what the first left."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    x = batch if isinstance(batch, torch.Tensor) else torch.randn(batch, requires_grad=True)
    sparse = any(isinstance(m, nn.Embedding) and m.sparse for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0 if sparse else 0.9)
    seen = []
    for step in range(3):
        if step != 1:
            optimizer.zero_grad()
        backward(model(x).square().mean())
        seen += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*seen, *(p.detach() for p in model.parameters()), x.grad if x.is_floating_point() else x]


def every_sum(loss: Any) -> None:
    fanin_torch.backward(loss, accumulate=torch.float32)


@pytest.mark.parametrize("backward", [fanin_torch.backward, every_sum])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_as_torch_trains_it(name: str, backward: Callable[[Any], None]) -> None:
    own = trained(name, lambda loss: loss.backward())
    ours = trained(name, backward)
    assert len(own) == len(ours) > 3
    for i, (a, b) in enumerate(zip(own, ours, strict=True)):
        assert a.dtype == b.dtype, i
        assert torch.equal(a, b), i
