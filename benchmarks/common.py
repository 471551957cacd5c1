"""What the rows share: arrays at chosen places, the peers of a large sum, nodes in C.

Each row is `results(quick)` in a file of its own. timing.py takes time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fanin

from . import timing

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


@functools.cache
def memchr() -> Any:
    """The C library's memchr, which reads a byte once and does nothing else."""
    found = ctypes.CDLL(None).memchr
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    return found


def read_all(x: Any) -> None:
    """Read every byte of an array once, and nothing else: the floor under any sum. None of them may be 0xEE."""
    if memchr()(x.ctypes.data, 0xEE, x.nbytes) is not None:
        raise ValueError("the floor is not what it should be: the array has a byte 0xEE, where reading ends")


HERE = Path(__file__).resolve().parent


def c_nodes() -> Any:
    """The extension of examples/15_c_nodes.c, whose `times(a)` is a node's function in C; None without a compiler."""
    return extension("c_nodes", HERE.parent / "examples" / "15_c_nodes.c")


@functools.cache
def extension(name: str, source: Path | None = None) -> Any:
    """An extension of one file in C, by default the one of this folder with its name; None without a compiler."""
    cc = os.environ.get("CC", "cc").split()
    if not shutil.which(cc[0]):
        return None
    source = source or HERE / f"{name}.c"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
        include = [f"-I{sysconfig.get_path('include')}", f"-I{fanin.get_include()}"]
        subprocess.run([*cc, "-O2", "-shared", "-fPIC", *include, str(source), "-o", str(out)], check=True)
        spec = importlib.util.spec_from_file_location(name, out)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


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
            read_all(x)

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
