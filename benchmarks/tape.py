"""fanin.tape beside HIPS autograd: operations forward and backward, as a step of training does them.

A chain and a fan-in of small operations, for each operation; and a step of the network of `fanin demo`, on the CPU: 32
digits, forward, backward, and every parameter down its gradient, BLAS on one thread. HIPS autograd's network is written
in its own operations, a convolution as a sum over shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fanin import tape
from fanin.cli import demo

from .timing import Result, at_least, measure, peer, pinned

OURS, HIPS = "fanin.tape", "HIPS autograd"


def chain(n: int, multiply: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(n):
            x = x * multiply
        return x

    return run


def fan_in(n: int, multiply: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        total = x
        for _ in range(n // 2):
            total = total + x * multiply
        return total

    return run


def small(title: str, n: int, graph: Callable[[int, Any], Callable[[Any], Any]], where: str, rounds: int) -> Result:
    """Forward and backward of n operations on 16 floats, for each of them."""
    g = np.ones(16, "f4")
    w = tape.parameter(g)
    ours, theirs = graph(n, 1.0001), graph(n, np.float32(1.0001))

    def hips() -> Any:
        from autograd.core import make_vjp

        return make_vjp(theirs, g)[0](g)

    result = measure(
        f"{title} of {n} operations on 16 float32, forward and backward, for each operation, core {where}",
        {OURS: lambda: tape.grad(ours(w), [w], [g]), HIPS: hips if peer("autograd") else None},
        base=HIPS if peer("autograd") else OURS, rounds=rounds, targets=[at_least(1.5, OURS, HIPS)],
    )  # fmt: skip
    for row in result["rows"].values():
        for word in ("min", "median"):
            row[word] /= n
    return result


def network(p: dict[str, tape.Var], digits: tape.Var, labels: tape.Var) -> tape.Var:
    """The demo's, on one device."""
    n = len(digits.data)
    x = tape.embedding(p["intensity"], digits) + p["position"]
    branch = tape.tanh(x.reshape(n, 256) @ p["side"])
    h = tape.tanh(tape.conv2d(x, p["conv"]))
    for _ in range(demo.BLOCKS):
        h = tape.tanh(tape.conv2d(h, p["block"])) + h
    joined = tape.pool(h, 2).reshape(n, 128) + branch
    return tape.cross_entropy(joined @ p["out"] + p["bias"], labels)


def network_of_hips(anp: Any) -> Callable[..., Any]:
    """The same in HIPS autograd's operations."""

    def conv(x: Any, kernel: Any) -> Any:
        h, w = x.shape[1:3]
        padded = anp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), "constant")
        return sum(anp.matmul(padded[:, i : i + h, j : j + w], kernel[i, j]) for i in range(3) for j in range(3))

    def loss(intensity: Any, position: Any, k: Any, block: Any, side: Any, out: Any, bias: Any,
             digits: Any, labels: Any) -> Any:  # fmt: skip
        n = len(digits)
        x = intensity[digits] + position
        branch = anp.tanh(anp.dot(anp.reshape(x, (n, 256)), side))
        h = anp.tanh(conv(x, k))
        for _ in range(demo.BLOCKS):
            h = anp.tanh(conv(h, block)) + h
        pooled = anp.mean(anp.reshape(h, (n, 4, 2, 4, 2, 8)), (2, 4))
        z = anp.dot(anp.reshape(pooled, (n, 128)) + branch, out) + bias
        z = z - anp.max(z, 1, keepdims=True)
        z = z - anp.log(anp.sum(anp.exp(z), 1, keepdims=True))
        return -anp.sum(z[np.arange(n), labels]) / n

    return loss


def training(where: str, rounds: int) -> Result:
    """A step, with 32 digits."""
    rng = np.random.default_rng(0)
    start = demo.initial(rng)
    digits, labels = rng.integers(0, 17, (32, 8, 8)), rng.integers(0, 10, 32)
    ours = {name: tape.parameter(value, name=name) for name, value in start.items()}
    there, wanted = tape.array(digits), tape.array(labels)
    work: dict[str, Any] = {HIPS: None}

    def step() -> None:
        tape.backward(network(ours, there, wanted))
        for p in ours.values():
            g = p.grad
            if isinstance(g, np.ndarray):
                p.data -= 0.0 * g
            else:
                np.add.at(p.data, g.parts[0][0], -0.0 * g.parts[1])
            p.grad = None

    work[OURS] = step
    if peer("autograd"):
        import autograd
        import autograd.numpy as anp

        theirs = [value.copy() for value in start.values()]
        gradients = autograd.value_and_grad(network_of_hips(anp), tuple(range(7)))

        def hips() -> None:
            _, gs = gradients(*theirs, digits, labels)
            for p, g in zip(theirs, gs, strict=True):
                p -= 0.0 * g

        tape.backward(network(ours, there, wanted))
        for name, g in zip(start, gradients(*theirs, digits, labels)[1], strict=True):
            assert np.allclose(demo.host(ours[name].grad), g, rtol=1e-3, atol=1e-6), name
            ours[name].grad = None
        work[HIPS] = hips
    return measure(
        f"a step of the demo's network, 32 digits, core {where}",
        work, base=HIPS if peer("autograd") else OURS, unit="us", rounds=rounds, targets=[at_least(1.5, OURS, HIPS)],
    )  # fmt: skip


def results(quick: bool) -> Iterator[Result]:
    """All of them."""
    with pinned() as where:
        yield small("a chain", 100 if quick else 2000, chain, where, 3 if quick else 25)
        yield small("a fan-in", 100 if quick else 2000, fan_in, where, 3 if quick else 25)
        with threadpool_limits(1):
            yield training(where, 2 if quick else 40)
