"""Operations of the tape beside torch's: values, gradients and errors, also at ties, infinities and of nothing."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.tape import Var
from kit import sample

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners
F = torch.nn.functional

Pair = tuple[str, Callable[..., Var], Callable[..., Any], list[Any], float]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Small numbers with ties and zeros, seldom an infinity."""
    x = rng.integers(-2, 3, shape) / 2
    if rng.random() < 0.5:
        x = x + rng.normal(size=shape)
    return np.asarray(x).astype(dtype)


def pair(rng: np.random.Generator) -> Pair:
    dtype = str(rng.choice(["float32", "float64"]))
    n, m, k = (int(i) for i in rng.integers(0, 4, 3))
    a = values(rng, (n, m), dtype)
    b = values(rng, [(n, m), (m,), (1, m), (n, 1), (1, 1)][rng.integers(5)], str(rng.choice(["float32", "float64"])))
    square = values(rng, (m, k), dtype)
    rows = rng.integers(0, n, int(rng.integers(0, 5))) if n else np.zeros(0, int)
    labels = rng.integers(0, max(m, 1), n)
    logits = values(rng, (n, m + 1), dtype)
    if rng.random() < 0.3 and n and m:  # rule out one of several classes
        logits[rng.integers(n), (labels[0] + 1) % (m + 1)] = -np.inf
    axis = int(rng.integers(-2, 2))
    factor = float(rng.integers(-2, 3))
    cases: list[Pair] = [
        ("add", lambda a, b: a + b, lambda a, b: a + b, [a, b], 1e-6),
        ("sub", lambda a, b: b - a, lambda a, b: b - a, [a, b], 1e-6),
        ("mul", lambda a, b: a * b, lambda a, b: a * b, [a, b], 1e-5),
        ("a number", lambda a: factor * a - factor, lambda a: factor * a - factor, [a], 1e-6),
        ("matmul", lambda a, b: a @ b, lambda a, b: a @ b, [a, square], 1e-5),
        ("tanh", tape.tanh, torch.tanh, [a], 1e-5),
        ("relu", tape.relu, torch.relu, [a], 0),
        ("sum", lambda a: a.sum(axis), lambda a: a.sum(axis), [a], 1e-5),
        ("mean", lambda a: a.mean(axis), lambda a: a.mean(axis), [a], 1e-5),
        ("mean of all", lambda a: a.mean(), lambda a: a.mean(), [a], 1e-5),
        ("transpose", lambda a: tape.transpose(a, (-1, 0)), lambda a: a.permute(-1, 0), [a], 0),
        ("reshape", lambda a: a.reshape(m, n), lambda a: a.reshape(m, n), [a], 0),
        ("embedding", lambda a: tape.embedding(a, rows), lambda a: a[torch.tensor(rows)], [a], 1e-6),
        ("gathered", lambda a: tape.gathered(a, rows), lambda a: a[torch.tensor(rows)], [a], 1e-6),
        ("softmax", tape.softmax, lambda a: torch.softmax(a, 1), [logits], 1e-5),
        ("cross entropy", lambda a: tape.cross_entropy(a, labels),
         lambda a: F.cross_entropy(a, torch.tensor(labels)), [logits], 1e-5),
        ("two uses", lambda a: tape.tanh(a) * a + a, lambda a: torch.tanh(a) * a + a, [a], 1e-5),
    ]  # fmt: skip
    return cases[rng.integers(len(cases))]


def dense(g: Any) -> Any:
    if not isinstance(g, fanin.Sparse):
        return g
    made = np.zeros(g.shape, g.parts[1].dtype)
    np.add.at(made, tuple(g.parts[0]), g.parts[1])
    return made


@pytest.mark.parametrize("count", sample.sizes(250, 20_000))
def test_random_operations_have_torchs_values_and_gradients(count: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(count):
        rng = np.random.default_rng([23, seed])
        name, ours, theirs, given, tolerance = pair(rng)
        mine = [tape.parameter(x) for x in given]
        other = [torch.tensor(x, requires_grad=True) for x in given]
        where = f"seed {seed}: {name} of {given}"
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            y = ours(*mine)
        wanted = theirs(*other)
        assert str(wanted.dtype) == f"torch.{y.dtype}", where
        assert np.allclose(y.numpy(), wanted.detach().numpy(), tolerance, tolerance, equal_nan=True), where
        g = rng.normal(size=y.shape)
        tape.backward(y, [g])
        wanted.backward(torch.tensor(g).to(wanted.dtype))
        for p, q in zip(mine, other, strict=True):
            assert dense(p.grad).dtype == p.dtype, where
            assert np.allclose(dense(p.grad), q.grad.numpy(), tolerance, tolerance, equal_nan=True), where
            found["nothing" if not p.grad.shape or math.prod(p.grad.shape) == 0 else "gradients"] += 1
        found[name] += 1
    print(dict(found))
    assert found["nothing"] > count / 20
    assert found["gradients"] > count / 2
    assert all(found[name] for name in ("relu", "mean", "embedding", "cross entropy", "transpose"))


WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mul": (lambda w: w * w, lambda w: w * w),
    "matmul": (lambda w: w @ w, lambda w: w @ w),
    "relu": (lambda w: tape.relu(w) * 2, lambda w: torch.relu(w) * 2),
    "tanh": (tape.tanh, torch.tanh),
    "softmax": (tape.softmax, lambda w: torch.softmax(w, 1)),
    "cross entropy": (
        lambda w: tape.cross_entropy(w, [0, 1]), lambda w: F.cross_entropy(w, torch.tensor([0, 1]))),
    "add": (lambda w: w + w, lambda w: w + w),
    "mean": (lambda w: w.mean(), lambda w: w.mean()),
    "embedding": (lambda w: tape.gathered(w, [0, 0]), lambda w: w[torch.tensor([0, 0])]),
}  # fmt: skip


@pytest.mark.parametrize("written", ["the input", "the result"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_forward_and_backward_is_an_error_or_without_effect_as_in_torch(
    name: str, written: str
) -> None:
    """Right or refused here and there. torch saves the results of softmax and relu, the tape their inputs."""
    start = np.array([[1.0, -2.0], [0.5, 3.0]])
    ours, theirs = WRITES[name]
    w = tape.parameter(start)
    y = ours(w)
    expected = tape.grad(y, [w])[0]
    tape.update(lambda v: np.add(v, 10, out=v), [], [w if written == "the input" else y])
    try:
        mine: Any = tape.grad(y, [w])[0]
    except RuntimeError as e:
        assert "has changed" in str(e)
        mine = "refused"
    p = torch.tensor(start, requires_grad=True)
    q = theirs(p)
    with torch.no_grad():
        (p if written == "the input" else q).add_(10)
    try:
        q.sum().backward()
        other: Any = p.grad.numpy()
    except RuntimeError as e:
        assert "modified by an inplace operation" in str(e)
        other = "refused"
    for got in (mine, other):
        assert isinstance(got, str) or np.allclose(got, expected)
    if name not in ("relu", "softmax", "cross entropy"):
        assert isinstance(mine, str) == isinstance(other, str)
