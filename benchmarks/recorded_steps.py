"""A training step of many small kernels, recorded and replayed (tape.compiled), beside itself as it is, and beside
torch.compile and jax.jit.

A chain of tanh(y * p) over 16 float32, its pass backward, and an update of p: about seven kernels for each link. The
others compile the same step, and fuse it; the time to compile is not in the figures. Then where a replay pays: the same
operations beside NumPy's calls, on small and large arrays, and a call of a step that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fanin import tape

from .timing import Result, at_least, measure, peer, pinned

AS_IT_IS, REPLAYED, TORCH, TORCH_COMPILE, JAX = "tape, as it is", "tape.compiled", "torch", "torch.compile", "jax.jit"
START = np.linspace(0.1, 0.9, 16, dtype="f4")


def descend(g: Any, w: Any) -> None:
    np.subtract(w, 0.01 * g, out=w)


def replaying(step: Callable[[Any], Any], x: Any, static: list[Any]) -> Callable[[], Any]:
    """The step, warmed up and recorded."""
    compiled = tape.compiled(step, static=static)
    for _ in range(2):
        compiled(x)
    return lambda: compiled(x)


def ours(links: int, recorded: bool) -> Callable[[], Any]:
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

    return replaying(step, x, [p]) if recorded else lambda: step(x)


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
    work: dict[str, Any] = {
        AS_IT_IS: ours(links, False),
        REPLAYED: ours(links, True),
        TORCH: torch and torchs(links, torch, False),
        TORCH_COMPILE: (torch and slow and torchs(links, torch, True)) or None,
        JAX: jax and jaxs(links, jax),
    }
    return measure(
        f"a step of {7 * links + 5} kernels over 16 float32, core {where}",
        work, base=AS_IT_IS, rounds=rounds, targets=[at_least(3, REPLAYED, AS_IT_IS)], longest=10.0,
    )  # fmt: skip


def beside_numpy(title: str, x: Any, do: Callable[[Any, Any], Any], n: int, rounds: int, where: str) -> Result:
    """n operations by NumPy, each into a new array, by tape's operations as they are, and replayed."""
    w = tape.array(x)  # no parameter: nothing is kept for a pass backward, as by NumPy

    def step(x: Any) -> Any:
        y = tape.array(x)
        for _ in range(n):
            y = do(y, w)
        return y

    def numpy() -> Any:
        y = x.copy()
        for _ in range(n):
            y = do(y, x)
        return y

    work = {"NumPy": numpy, AS_IT_IS: lambda: step(x), REPLAYED: replaying(step, x, [w])}
    return measure(f"{title}, core {where}", work, base="NumPy", rounds=rounds, longest=10.0)


def empty(where: str, rounds: int) -> Result:
    """What a call costs around its kernels: staging an argument, finding the recording."""
    step = replaying(lambda x: None, np.ones(16), [])
    title = f"a call with one array of a step without kernels, core {where}"
    return measure(title, {REPLAYED: step}, base=REPLAYED, rounds=rounds, longest=10.0)


def results(quick: bool) -> Iterator[Result]:
    with pinned() as where:
        for links in (14, 142):
            yield steps(links, where, 3 if quick else 15, not quick)
        rounds = 3 if quick else 15
        for n in (16, 30_000):
            x = np.linspace(0.1, 1.0, n)
            yield beside_numpy(f"300 additions of {n:,} float64", x, lambda y, w: y + w, 300, rounds, where)
        x = np.eye(200)
        yield beside_numpy("10 products of matrices of 200 x 200", x, lambda y, w: y @ w, 10, rounds, where)
        yield empty(where, rounds)
