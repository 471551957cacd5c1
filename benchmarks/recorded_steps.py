"""A training step of many small kernels, recorded and replayed (tape.compiled), beside itself as it is, and beside
torch.compile and jax.jit.

    python benchmarks/recorded_steps.py [--quick] [--json FILE]


A chain of tanh(y * p) over 16 float32, its pass backward, and an update of p: about seven kernels for each link. The
others compile the same step, and fuse it; the time to compile is not in the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import main

from fanin import tape
from fanin.cli.timing import Result, at_least, measure, peer, pinned

AS_IT_IS, REPLAYED, TORCH, TORCH_COMPILE, JAX = "tape, as it is", "tape.compiled", "torch", "torch.compile", "jax.jit"
START = np.linspace(0.1, 0.9, 16, dtype="f4")


def descend(g: Any, w: Any) -> None:
    np.subtract(w, 0.01 * g, out=w)


def ours(links: int, recorded: bool) -> tuple[Callable[[], Any], int]:
    """The step, and of how many kernels it is."""
    p, x = tape.parameter(START), np.ones(16, "f4")

    def step(x: Any) -> Any:
        y = tape.array(x)
        for _ in range(links):
            y = tape.tanh(y * p)
        loss = y.sum()
        tape.backward(loss)
        tape.update(descend, [p.grad], [p])
        p.grad = None
        return loss

    if not recorded:
        return lambda: step(x), 0
    compiled = tape.compiled(step, static=[p])
    compiled(x)
    return lambda: compiled(x), compiled.stats.kernels


def torchs(links: int, torch: Any, compiled: bool) -> Callable[[], Any]:
    p, x = torch.tensor(START, requires_grad=True), torch.ones(16)

    def loss_of(p: Any, x: Any) -> Any:
        y = x
        for _ in range(links):
            y = torch.tanh(y * p)
        return y.sum()

    fn = torch.compile(loss_of) if compiled else loss_of

    def step() -> Any:
        loss = fn(p, x)
        loss.backward()
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.01)
        p.grad = None
        return loss

    step()
    return step


def jaxs(links: int, jax: Any) -> Callable[[], Any]:
    def loss_of(p: Any, x: Any) -> Any:
        y = x
        for _ in range(links):
            y = jax.numpy.tanh(y * p)
        return y.sum()

    @jax.jit
    def update(p: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(loss_of)(p, x)
        return loss, p - 0.01 * g

    state, x = [jax.numpy.asarray(START)], jax.numpy.ones(16, "float32")

    def step() -> Any:
        loss, state[0] = update(state[0], x)
        return loss.block_until_ready()

    step()
    return step


def steps(links: int, where: str, rounds: int, slow: bool) -> Result:
    torch, jax = peer("torch"), peer("jax")
    replayed, kernels = ours(links, True)
    work: dict[str, Any] = {
        AS_IT_IS: ours(links, False)[0],
        REPLAYED: replayed,
        TORCH: torch and torchs(links, torch, False),
        TORCH_COMPILE: (torch and slow and torchs(links, torch, True)) or None,
        JAX: jax and jaxs(links, jax),
    }
    return measure(
        f"a step of {kernels} kernels over 16 float32, core {where}",
        work, base=AS_IT_IS, rounds=rounds, targets=[at_least(3, REPLAYED, AS_IT_IS)], longest=10.0,
    )  # fmt: skip


def results(quick: bool) -> Iterator[Result]:
    with pinned() as where:
        for links in (14, 142):
            yield steps(links, where, 3 if quick else 15, not quick)


if __name__ == "__main__":
    main(results)
