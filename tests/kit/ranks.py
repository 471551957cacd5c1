"""The law of ranks: a small network whose micro-batches are dealt out to ranks; its weights, as bytes. Programs under
mpiexec.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fanin
from fanin import dist, tape
from kit.support import ROOT

MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
NO_MPI = importlib.util.find_spec("mpi4py") is None or MPIEXEC is None


def under_mpiexec(ranks: int, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python on several ranks; `words` are its arguments, `options` those of mpiexec."""
    return subprocess.run(
        [str(MPIEXEC), *options, "-n", str(ranks), sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'tests'}"},
    )


MICRO = 8  # micro-batches a step


def data() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(5)
    return [(rng.standard_normal((6, 12)).astype("f4"), rng.standard_normal((6, 3)).astype("f4")) for _ in range(MICRO)]


def network() -> list[Any]:
    rng = np.random.default_rng(6)
    shapes = [(12, 40), (40,), (40, 9), (9,), (9, 3)]
    return [tape.parameter(rng.standard_normal(s).astype("f4") / 3) for s in shapes]


def loss_of(w: list[Any], x: Any, y: Any) -> Any:
    h = tape.tanh(tape.array(x) @ w[0] + w[1])
    h = tape.tanh(h @ w[2] + w[3])
    d = h @ w[4] - tape.array(y)
    return (d * d).mean()


def step(w: list[Any], sums: list[Any]) -> None:
    for x, g in zip(w, sums, strict=True):
        x.data[...] -= np.float32(0.5) * g


def alone(order: str, steps: int) -> bytes:
    """The weights of one process, whose sums are fanin.add_n of all micro-batches."""
    w = network()
    for _ in range(steps):
        grads = [tape.grad(loss_of(w, x, y), w) for x, y in data()]
        accumulate = "exact" if order == "exact" else None
        step(w, [fanin.add_n(g, scale=1 / MICRO, accumulate=accumulate) for g in zip(*grads, strict=True)])
    return b"".join(x.data.tobytes() for x in w)


def train(group: dist.Group, order: Any, bucket_bytes: int, owner: Callable[[int], int], steps: int) -> bytes:
    """The weights of this rank, which has the micro-batches k with owner(k) == its rank."""
    w = network()
    mine = [k for k in range(MICRO) if owner(k) == group.rank]
    reducer = dist.Reducer(w, group, order=order, bucket_bytes=bucket_bytes, scale=1 / MICRO)
    for _ in range(steps):
        for x in w:
            x.grad = None
        for k in mine:
            key = k if order == "key" else None
            if k != mine[-1]:
                with reducer.accumulate(key):
                    tape.backward(loss_of(w, *data()[k]))
            else:
                tape.backward(loss_of(w, *data()[k]), reducer=reducer.at(key))
        step(w, [x.grad for x in w])
    return b"".join(x.data.tobytes() for x in w)


def gathered(group: dist.Group) -> Any:
    """The traces of a pass over two buckets, of 600 and 700 elements, on all ranks; on rank 0."""
    leaves = [fanin.Leaf(np.zeros(n, "f4"), name=f"w{i}") for i, n in enumerate((700, 600))]
    reducer = dist.Reducer(leaves, group, bucket_bytes=1)
    roots = [(fanin.Node(lambda g: g, edges=[(w, 0)], name="Id"), 0, np.ones(w.array.shape, "f4")) for w in leaves]
    with fanin.trace() as t:
        fanin.backward(roots, reducer=reducer)
    return dist.gather_trace(t, group)


def check_messages(whole: Any, ranks: int) -> None:
    """Each bucket has an arrow from each sender to each owner and back, which arrives after it was sent."""
    messages = whole.picture().messages
    pairs = list(itertools.permutations(range(ranks), 2))
    owners = [r for r in range(ranks) if ranks < 4 or r > 0]  # each bucket is three blocks: of four ranks three own one
    assert sorted((m.source.name, m.source.lane.rank, m.target.lane.rank) for m in messages) == sorted(
        [(f"bucket {b}: to owners", s, r) for b in (0, 1) for s, r in pairs if r in owners]
        + [(f"bucket {b}: back", s, r) for b in (0, 1) for s, r in pairs if s in owners]
    )
    shards = {1: set(), 2: {256, 344}, 3: {256, 88}, 4: {256, 88}}[ranks]
    assert {m.bytes // 4 for m in messages if m.source.name == "bucket 0: to owners"} == shards
    for m in messages:
        assert m.source.name == m.target.name and m.source.lane.stream == m.target.lane.stream == 1000
        assert m.source.start < m.target.end + sum(whole.errors_ns) / 1000
    assert whole.offsets_ns[0] == whole.errors_ns[0] == 0 and len(whole.lines) == ranks
