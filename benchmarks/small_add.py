"""One add of 16 floats, by arrival and by key, beside NumPy, HIPS autograd, torch and JAX."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

import fanin

from .timing import Result, at_least, at_most, measure, peer, pinned


def results(quick: bool) -> Iterator[Result]:
    """ns for each add; 64 adds to one slot are a round, what they leave is cleared outside the time."""
    with pinned() as where:  # before JAX starts its threads
        yield one(where, quick)


def one(where: str, quick: bool) -> Result:
    """All ways to add."""
    torch, jax, autograd = peer("torch"), peer("jax"), peer("autograd")
    a, b, out = (np.ones(16, "f4") for _ in range(3))
    buf = fanin.InputBuffer(1, budget=float("inf"))
    sums = {0: np.ones(16, "f4")}

    def acc(slot: int, g: np.ndarray) -> None:
        """What one writes by hand."""
        if slot in sums:
            sums[slot] += g
        else:
            sums[slot] = g.copy()

    names = {"add": buf.add, "np_add": np.add, "iadd": operator.iadd, "acc": acc, "a": a, "b": b, "out": out}
    work = {
        "np.add(a, b, out=out)": "np_add(a, b, out=out)",
        "np.add(a, b, out)": "np_add(a, b, out)",
        "a += b": "iadd(a, b)",
        "a dict and +=, by hand": "acc(0, b)",
        "buf.add(0, b)": "add(0, b)",
        "buf.add(0, b, key=k)": "add(0, b, key=k)",
        "buf.add(0, b, weight=3.0)": "add(0, b, weight=3.0)",
        "HIPS autograd": None,
        "torch x.add_(y)": None,
        "jax.jit": None,
        "the loop alone": "pass",
    }
    if autograd is not None:
        from autograd.core import add_outgrads

        names |= {"add_outgrads": add_outgrads, "prev": (np.ones(16, "f4"), True)}
        work["HIPS autograd"] = "add_outgrads(prev, b)"
    if torch is not None:
        names |= {"add_": torch.ones(16).add_, "y": torch.ones(16)}
        work["torch x.add_(y)"] = "add_(y)"
    if jax is not None:
        names |= {"jit_add": jax.jit(lambda x, y: x + y), "jx": jax.numpy.ones(16), "jy": jax.numpy.ones(16)}
        work["jax.jit"] = "jit_add(jx, jy)"
    targets = [
        at_least(6, "buf.add(0, b)", "np.add(a, b, out=out)", "np.add(a, b, out)"),
        at_least(12, "buf.add(0, b)", "torch x.add_(y)"),
        at_most(1.3, "buf.add(0, b, weight=3.0)", "buf.add(0, b, key=k)"),
    ]
    return measure(
        f"one add of 16 float32, core {where}",
        work,
        base="np.add(a, b, out=out)",
        targets=targets,
        names=names,
        after=buf.clear,
        rounds=5 if quick else 4000,
        calls=64,
    )
