"""The law of ranks with models as trainers have them: steps leave the same weights for any number of ranks, each order,
narrow dtypes on the way, one level and two, dense tables and rows of sparse ones, and steps that a rank skips.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fanin
from dist.test_gloo import on_processes
from fanin import dist
from fanin.dist import sparse
from fanin.dist.group import Group

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.partners

MICRO, STEPS, RATE = 8, 2, 1.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of torch's own gradients depend on how many threads make them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def resnet() -> Any:
    """Convolutions with norms over the batch, and an addition around them."""
    n = torch.nn

    class Block(n.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = n.Sequential(
                n.Conv2d(6, 6, 3, padding=1, bias=False), n.BatchNorm2d(6), n.ReLU(), n.Conv2d(6, 6, 3, padding=1)
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.inner(x))

    return n.Sequential(n.Conv2d(3, 6, 3), Block(), Block(), n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(6, 4))


def transformer() -> Any:
    """The table of words is that of the scores, too."""
    n = torch.nn

    class Tied(n.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = n.Embedding(40, 16)
            self.layer = n.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
            self.scores = n.Linear(16, 40, bias=False)
            self.scores.weight = self.words.weight

        def forward(self, x: Any) -> Any:
            return self.scores(self.layer(self.words(x)))

    return Tied()


def lstm() -> Any:
    """Layers that no pass uses, and one that every second micro-batch uses."""
    n = torch.nn

    class Some(n.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = n.LSTM(5, 7, batch_first=True), n.Linear(7, 3)
            self.never, self.sometimes = n.Linear(7, 3), n.Linear(7, 3)

        def forward(self, x: Any) -> Any:
            h = self.cell(x)[0]
            return self.out(h) + self.sometimes(h) if x[0, 0, 0] > 0 else self.out(h)

    return Some()


def embedding() -> Any:
    """A table with sparse gradients, large enough that its rows travel."""
    n = torch.nn
    return n.Sequential(n.EmbeddingBag(2000, 12, sparse=True, mode="sum"), n.Tanh(), n.Linear(12, 3))


def mixed() -> Any:
    """Two layers of bfloat16 between two of float32."""
    n = torch.nn

    class Low(n.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = n.Linear(6, 20), n.Linear(20, 3)
            self.low = n.Sequential(n.Linear(20, 20), n.GELU(), n.Linear(20, 20)).to(torch.bfloat16)

        def forward(self, x: Any) -> Any:
            return self.last(self.low(torch.tanh(self.first(x)).to(torch.bfloat16)).float())

    return Low()


def images(g: Any) -> Any:
    return torch.randn(4, 3, 8, 8, generator=g)


def words(g: Any) -> Any:
    return torch.randint(0, 40, (3, 6), generator=g)


def series(g: Any) -> Any:
    return torch.randn(3, 4, 5, generator=g)


def numbers(g: Any) -> Any:
    return torch.randint(0, 2000, (4, 5), generator=g)


def plain(g: Any) -> Any:
    return torch.randn(5, 6, generator=g)


MODELS: dict[str, tuple[Any, Any]] = {
    "resnet": (resnet, images),
    "transformer": (transformer, words),
    "lstm": (lstm, series),
    "embedding": (embedding, numbers),
    "mixed": (mixed, plain),
}


@functools.cache
def model_of(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name][0]()


def loss_of(name: str, model: Any, step: int, k: int) -> Any:
    x = MODELS[name][1](torch.Generator().manual_seed(100 * step + k))
    return model(x).float().square().mean()


def update(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= (RATE * p.grad.float()).to(p.dtype)
            p.grad = None


def digest_of(model: Any) -> str:
    made = hashlib.sha256()
    for p in model.parameters():
        made.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def dealt(rank: int, size: int, dealing: str) -> list[int]:
    return [k for k in range(MICRO) if (k % size if dealing == "turns" else k * size // MICRO) == rank]


def train(group: Group, name: str, dealing: str = "runs", skips: Any = None, **options: Any) -> str:
    """The digest of this rank's weights. skips: a rank, and the step in which it has nothing."""
    torch.set_num_threads(1)
    model = copy.deepcopy(model_of(name))
    reducer = dist.Reducer(
        model.named_parameters(), group, missing="skip", scale=1 / MICRO, bucket_bytes=2000, **options
    )
    by_key = options.get("order") == "key"
    for group.step in range(STEPS):
        if skips == (group.rank, group.step):
            group.skip(reducers=reducer)
            update(model)
            continue
        mine = dealt(group.rank, group.size, dealing)
        for k in mine[:-1]:
            with reducer.accumulate(k if by_key else None):
                loss_of(name, model, group.step, k).backward()
        with reducer.at(mine[-1] if by_key else None):
            loss_of(name, model, group.step, mine[-1]).backward()
        update(model)
    return digest_of(model)


def alone(name: str, order: str, size: int, dealing: str = "runs", skips: Any = None) -> str:
    """The digest of one process's weights, whose sums are fanin.add_n of all gradients."""
    torch.set_num_threads(1)
    model = copy.deepcopy(model_of(name))
    parameters = list(model.parameters())
    for step in range(STEPS):
        of_ranks: list[list[Any]] = []
        for rank in range(size):
            grads = []
            for k in () if skips == (rank, step) else dealt(rank, size, dealing):
                made = torch.autograd.grad(loss_of(name, model, step, k), parameters, allow_unused=True)
                grads.append((k, [None if g is None else g.to_dense() for g in made]))
            of_ranks.append(grads)
        for i, p in enumerate(parameters):
            p.grad = total_of([[(k, g[i]) for k, g in grads if g[i] is not None] for grads in of_ranks], order)
        update(model)
    return digest_of(model)


def total_of(of_ranks: list[list[tuple[int, Any]]], order: str) -> Any:
    """The sum of a leaf's gradients on each rank, which have the number of their micro-batch."""
    every = sorted(itertools.chain.from_iterable(of_ranks), key=lambda one: one[0])
    if not every:
        return None
    terms = [g for _, g in every]
    out = torch.empty_like(terms[0])
    if order == "rank":
        terms = []
        for mine in filter(None, of_ranks):
            terms.append(torch.empty(out.shape, dtype=torch.float32))
            fanin.add_n([g for _, g in mine], out=terms[-1])
    fanin.add_n(terms, out=out, scale=1 / MICRO, accumulate="exact" if order == "exact" else None)
    return out


def on_ranks(n: int, name: str, nodes: Any = 1, **options: Any) -> list[str]:
    model_of(name)  # once, for all threads
    return dist.threads(n, lambda group: train(group, name, **options), nodes=nodes, timeout=None)


ORDERS = ("key", "exact", "rank")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_weights_of_one_process(name: str) -> None:
    """A sample: the numbers of ranks, levels and dealings of each order that differ most."""
    for order, (n, nodes, dealing) in itertools.product(ORDERS, ((2, 1, "turns"), (4, 2, "runs"))):
        assert on_ranks(n, name, nodes, order=order, dealing=dealing) == [alone(name, order, n, dealing)] * n
    narrow = {"order": "key", "wire": "bfloat16", "wire_out": "bfloat16"}
    assert on_ranks(4, name, 2, **narrow) == on_ranks(1, name, **narrow) * 4
    assert on_ranks(3, name, order="exact", skips=(1, 1)) == [alone(name, "exact", 3, skips=(1, 1))] * 3


def test_rows_of_the_sparse_model_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    chosen = sparse.chosen
    monkeypatch.setattr(sparse, "chosen", lambda *args: found.append(len(chosen(*args))) or chosen(*args))
    on_ranks(2, "embedding", order="key")
    assert sum(found) == 2 * STEPS, "the table, on each rank, in each step"


def test_the_law_of_models_finds_another_order() -> None:
    assert on_ranks(2, "mixed", order="rank")[0] != alone("mixed", "key", 2)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_weights_of_one_process_in_every_way(name: str, order: str) -> None:
    layouts = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, [0, 1, 0, 1]))
    for (n, nodes), dealing in itertools.product(layouts, ("turns", "runs")):
        expected = alone(name, order, n, dealing)
        assert on_ranks(n, name, nodes, order=order, dealing=dealing) == [expected] * n, (n, nodes, dealing)
        for skips in ((0, 0), (n - 1, 1)) if n > 1 else ():
            expected = alone(name, order, n, dealing, skips)
            got = on_ranks(n, name, nodes, order=order, dealing=dealing, skips=skips)
            assert got == [expected] * n, (n, nodes, dealing, skips)
    for wire, wire_out in itertools.product((None, "bfloat16", "float16", "float8_e4m3fn"), repeat=2):
        narrow = {"order": order, "wire": wire, "wire_out": wire_out}
        for n, dealing in itertools.product((1, 2, 3, 4) if order != "rank" else (4,), ("turns", "runs")):
            expected = on_ranks(1 if order != "rank" else n, name, dealing=dealing, **narrow)[0]
            assert on_ranks(n, name, 2 if n == 4 else 1, dealing=dealing, **narrow) == [expected] * n, (n, narrow)


def over_gloo(group: Group) -> dict[tuple[str, str], str]:
    found = {(name, order): train(group, name, order=order) for name in MODELS for order in ORDERS}
    if group.size == 4:
        dist.group(group, nodes=2)
    again = {(name, order): train(group, name, order=order) for name in MODELS for order in ORDERS}
    assert again == found
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
def test_models_have_the_weights_of_one_process_over_gloo(n: int, tmp_path: Path) -> None:
    expected = {(name, order): alone(name, order, n) for name in MODELS for order in ORDERS}
    assert on_processes(n, over_gloo, tmp_path) == [expected] * n
