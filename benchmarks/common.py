"""What the rows share: arrays at chosen places, the peers of a large sum, how a row is run by itself.

Each row is `results(quick)` in a file of its own; `python benchmarks/NAME.py [--quick] [--json FILE]` runs one, `fanin
bench` runs all. How time is taken stands in fanin/cli/timing.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fanin
from fanin.cli import timing
from fanin.cli.screen import Screen
from fanin.cli.timing import Result

PAGE = 4096

#: Where array k begins behind the start of a page: the offsets of the streams relative to each other change what a
#: machine does.
OFFSETS = {
    "0": lambda k: 0,
    "64 k": lambda k: 64 * k,
    "1088 k": lambda k: 1088 * k,
    "random": lambda k: (k * 2654435761 >> 8) % (PAGE // 64) * 64 + (k * 40503 >> 4) % 16 * PAGE,
}

#: The peers that every large sum is beside; what is not here is absent.
FLOOR, CHAIN, FRESH, TORCH, JAX = "read floor", "np.add(out=) chain", "a + b, then +=", "torch add_ chain", "jax.jit"


def inside() -> Any:
    """Single functions of the core, in the library that tests build of them (tests/kit/inside.py)."""
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from kit.inside import inside

    return inside("-O3", "-DNDEBUG")


def c_nodes() -> Any:
    """Nodes whose functions are in C (tests/kit/c_nodes.py); None without a compiler."""
    tests = str(Path(__file__).resolve().parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)
    from kit import c_nodes as made
    from kit.support import compiler

    return made if compiler() else None


def main(results: Callable[[bool], Iterator[Result]]) -> None:
    """Run one row by itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept = []
    for one in results(options.quick):
        timing.show(Screen(), one)
        kept.append(one)
    if options.json:
        timing.write(options.json, kept)


def array(size: int, dtype: Any = "f4", offset: int = 0) -> Any:
    """`size` elements, already faulted in, `offset` bytes behind the start of a page."""
    dtype = np.dtype(dtype)
    raw = np.empty(size * dtype.itemsize + offset + PAGE, "u1")
    raw[:] = 0
    start = -raw.ctypes.data % PAGE + offset
    return raw[start : start + size * dtype.itemsize].view(dtype)


def arrays(n: int, size: int, offset: str = "0") -> list[Any]:
    """n float32 arrays of `size` bytes each, whose sums are exact."""
    made = [array(size // 4, "f4", OFFSETS[offset](k)) for k in range(n)]
    for k, x in enumerate(made):
        x[:] = k + 0.5
    return made


def size_text(size: int) -> str:
    """16 KB, 4 MB."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB" if size >= 1 << 10 else f"{size} B"


def effort(size: int, quick: bool) -> dict[str, Any]:
    """For work on so many bytes: unit, rounds, calls in each round."""
    calls = max(1, min(1000, (1 << 21) // size))
    return {
        "unit": "ms" if size > 1 << 24 else "us",
        "rounds": 2 if quick else 7 if size > 1 << 28 else 25,
        "calls": 1 if quick else calls,
    }


def sums(inputs: list[Any], out: Any) -> dict[str, Any]:
    """The ways to one sum in memory that was written before."""

    def chain() -> None:
        np.add(inputs[0], inputs[1], out=out)
        for x in inputs[2:]:
            np.add(out, x, out=out)

    def floor() -> None:
        for x in inputs:
            inside().read_all(x)

    work: dict[str, Any] = {
        CHAIN: chain,
        FLOOR: floor,
        "fanin.add_n(out=)": lambda: fanin.add_n(inputs, out=out),
        TORCH: None,
    }
    torch = timing.peer("torch")
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in inputs]
        total = torch.from_numpy(out)

        def torch_chain() -> None:
            torch.add(tensors[0], tensors[1], out=total)
            for x in tensors[2:]:
                total.add_(x)

        work[TORCH] = torch_chain
    return work


def fresh(inputs: list[Any]) -> Callable[[], Any]:
    """NumPy's sum in memory of its own."""

    def total() -> Any:
        sum_ = inputs[0] + inputs[1]
        for x in inputs[2:]:
            sum_ += x
        return sum_

    return total


def compiled(inputs: list[Any]) -> Callable[[], Any] | None:
    """jax.jit of the whole sum."""
    jax = timing.peer("jax")
    if jax is None:
        return None
    given = [jax.numpy.asarray(x) for x in inputs]

    @jax.jit
    def total(xs: Any) -> Any:
        sum_ = xs[0]
        for x in xs[1:]:
            sum_ = sum_ + x
        return sum_

    return lambda: total(given).block_until_ready()


def engine(inputs: list[Any]) -> Callable[[], Any] | None:
    """torch's own engine: one node with as many producers as there are gradients, each of which passes its
    gradient on.
    """
    torch = timing.peer("torch")
    if torch is None:
        return None
    gradients = [torch.from_numpy(x) for x in inputs]
    leaf = torch.zeros(inputs[0].shape, requires_grad=True)
    node = leaf.view_as(leaf)
    outputs = [node.view_as(node) for _ in inputs]
    return lambda: torch.autograd.grad(outputs, leaf, gradients, retain_graph=True)
