"""Sums over ranks beside MPI_Allreduce and Gloo: what each order costs, for how many ranks.

Ranks are processes under mpiexec, or processes that meet at a file (Gloo), each with one thread; rank 0 reports. A
variant ends when all ranks have it. The model computes the time of an all-reduce from the latency and bandwidth of
messages inside a node and between nodes; it is checked against what was measured here.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fanin
from fanin import _core
from fanin.dist import layout
from fanin.dist.chain import PIECE, PIECES
from fanin.dist.frames import PARTS
from fanin.dist.layout import Layout, Leaf
from fanin.dist.sums import ExactSum

from .common import size_text
from .timing import Result, at_most, cores, measure, peer, pinned

ALLREDUCE = "MPI_Allreduce"
KEY, EXACT, RANK = (f'fanin.dist.add_n, order="{order}"' for order in ("key", "exact", "rank"))
LOW = "fanin.dist.add_n of bfloat16, summed in float32"
WIRE, BOTH_WAYS, BLOCKS = (
    f'fanin.dist.add_n, order="key", {how}'
    for how in ('wire="bfloat16"', 'wire=wire_out="bfloat16"', 'wire=wire_out="float8_e4m3fn"')
)
REDUCER = "a pass with fanin.dist.Reducer"

NAMES = {"key": KEY, "exact": EXACT, "rank": RANK}
ROOT = Path(__file__).resolve().parent.parent


# ---- ranks that are processes


def on_processes(kind: str, ranks: int, quick: bool) -> list[Result]:
    """What the function PROGRAMS[kind] gives on rank 0 of so many processes; nothing without MPI, or torch."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.ranks", kind, str(int(quick))]
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if peer("torch") is None if kind == "gloo" else mpiexec is None or peer("mpi4py") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        if kind == "mpi":
            commands = [[mpiexec, "-n", str(ranks), *command]]
        else:
            commands = [[*command, str(Path(folder, "meet")), str(r), str(ranks)] for r in range(ranks)]
        made = [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for c in commands]
        outputs = [p.communicate() for p in made]
    for p, (_, errors) in zip(made, outputs, strict=True):
        assert p.returncode == 0, errors.decode()
    return list(json.loads(outputs[0][0]))


def in_step(barrier: Callable[[], object], work: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Work that ends when all ranks have ended it."""

    def whole(fn: Callable[[], object]) -> None:
        fn()
        barrier()

    return {name: partial(whole, fn) for name, fn in work.items()}


def gradient(n: int, rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(n, dtype="f4")


def reduced(size: int, group: fanin.dist.Group) -> Callable[[], None]:
    """A pass of a reducer with one leaf of so many bytes, whose gradient nothing else has: the mean of the pass before.
    So as in training no leaf has a gradient before, and no time is the model's.
    """
    leaf = fanin.Leaf(np.zeros(size // 4, "f4"))
    made = [gradient(size // 4, group.rank)]
    root = [(fanin.Node(lambda g: made.pop(), 1, [(leaf, 0)]), 0, np.ones(1, "f4"))]
    reducer = fanin.dist.Reducer([leaf], group, scale=1 / group.size)

    def run() -> None:
        fanin.backward(root, reducer=reducer, keep_graph=True)
        made.append(leaf.grad)
        leaf.grad = None

    return run


#: Bytes of sums, and by how much longer than MPI_Allreduce they may take on two and on four ranks.
ASKED = {
    64: (3, 2.5),
    1 << 10: (3, 2.5),
    1 << 16: (1.6, 2),
    1 << 18: (1.1, 1.1),
    1 << 20: (0.9, 0.9),
    1 << 23: (0.8, 0.8),
    1 << 26: (0.5, 0.6),
}
SIZES = tuple(ASKED)


def asked(size: int, ranks: int) -> float | None:
    """The target of a sum of so many bytes."""
    return dict(zip((2, 4), ASKED[size], strict=True)).get(ranks)


def by_mpi(quick: bool, args: Sequence[str]) -> list[Result]:
    """MPI_Allreduce of float32 beside the orders of fanin.dist."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    known = re.search(r"(MPICH|Open MPI)\D*([\d.]+)", MPI.Get_library_version())
    library = " ".join(known.groups()) if known else "MPI"
    group = fanin.dist.group(Counted(fanin.dist.group(comm)._engine))
    made = []
    for size in (1 << 18,) if quick else SIZES:
        x, out = gradient(size // 4, comm.rank), np.zeros(size // 4, "f4")
        work = {
            ALLREDUCE: lambda x=x, out=out: comm.Allreduce(x, out),
            KEY: lambda x=x: fanin.dist.add_n([x], group, order="key"),
            EXACT: lambda x=x: fanin.dist.add_n([x], group, order="exact"),
            RANK: lambda x=x: fanin.dist.add_n([x], group, order="rank"),
            REDUCER: reduced(size, group),
        }
        ml_dtypes = peer("ml_dtypes")
        if ml_dtypes is not None:
            low = x.astype(ml_dtypes.bfloat16)
            work[LOW] = lambda low=low: fanin.dist.add_n([low], group, order="key")
            for name, wire, wire_out in (
                (WIRE, "bfloat16", None),
                (BOTH_WAYS, "bfloat16", "bfloat16"),
                (BLOCKS, "float8_e4m3fn", "float8_e4m3fn"),
            ):
                how = {"order": "key", "wire": wire, "wire_out": wire_out}
                work[name] = partial(fanin.dist.add_n, [x], group, **how)
        sent = {ALLREDUCE: 2 * size * (comm.size - 1) // comm.size}
        for name in list(work)[1:]:
            before = group._engine.sent
            work[name]()
            sent[name] = group._engine.sent - before
        few = asked(size, comm.size)
        targets = [] if few is None or quick else [at_most(few, KEY, ALLREDUCE), at_most(few, EXACT, ALLREDUCE)]
        if size in (64, 64 << 20) and not quick:
            targets.append(at_most(4 if size == 64 else 0.7, REDUCER, ALLREDUCE))

        made.append(
            measure(
                f"{size_text(size)} of float32 on {comm.size} ranks, {library}",
                in_step(comm.Barrier, work),
                base=ALLREDUCE,
                unit="ms",
                rounds=2 if quick else 7,
                calls=max(1, min(200, (1 << 20) // size)),
                targets=targets,
                more={"bytes_sent": sent, "size": size, "ranks": comm.size},
                after=comm.Barrier,
                longest=math.inf,
            )
        )
    return made


PLAIN, BLOCK, BLOCK_EXACT = (
    "torch, and one all_reduce",
    "fanin.torch.accumulate(group=)",
    'fanin.torch.accumulate(group=, order="exact")',
)


def models(quick: bool) -> Iterator[tuple[Any, Any, int]]:
    """Models of six layers, two inputs of each, and how many parameters it has."""
    import torch

    for width, batch in ((64, 32),) if quick else ((64, 32), (512, 64), (1024, 64)):
        torch.manual_seed(0)
        layers = [m for _ in range(6) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers)
        yield model, torch.randn(2, batch, width), sum(p.numel() for p in model.parameters())


def blocks(model: Any, inputs: Any) -> dict[str, Callable[[], object]]:
    """A step's gradients, summed over ranks: by torch, with one all_reduce of all of them; and by blocks."""
    import torch
    import torch.distributed as td

    parameters = list(model.parameters())

    def passes() -> None:
        for x in inputs:
            model(x).square().mean().backward()

    def plain() -> None:
        model.zero_grad()
        passes()
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        td.all_reduce(flat)
        for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(total.view_as(p))

    def block(order: Any) -> None:
        model.zero_grad()
        with fanin.torch.accumulate(parameters, group=td.group.WORLD, order=order):
            passes()

    return {PLAIN: plain, BLOCK: partial(block, None), BLOCK_EXACT: partial(block, "exact")}


def by_gloo(quick: bool, args: Sequence[str]) -> list[Result]:
    """A step of DistributedDataParallel with and without fanin's hook, and Gloo's all-reduce beside fanin's sums."""
    import torch
    import torch.distributed as td

    meet, rank, ranks = args[0], int(args[1]), int(args[2])
    torch.set_num_threads(1)
    td.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)

    def step(width: int, batch: int, order: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        x = torch.randn(batch, width)
        layers = [m for _ in range(6) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=8)
        if order is not None:
            model.register_comm_hook(None, fanin.torch.ddp_hook(order=order))

        def run() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        return run

    key, exact = 'with ddp_hook(order="key")', 'with ddp_hook(order="exact")'
    how: Any = {"unit": "ms", "after": td.barrier, "longest": math.inf}
    made = [
        measure(
            f"two micro-batches of {size_text(4 * n)} of parameters on {ranks} ranks, Gloo",
            in_step(td.barrier, blocks(one, inputs)),
            base=PLAIN,
            rounds=2 if quick else 7,
            targets=[] if quick else [at_most(1.1, BLOCK, PLAIN)],
            **how,
        )
        for one, inputs, n in models(quick)
    ]
    for width, batch in ((64, 8),) if quick else ((64, 32), (512, 64), (1024, 256)):
        most = (1.15, 1.15) if width == 64 else (1.05, 1.15)
        targets = [at_most(n, name, "DDP alone") for n, name in zip(most, (key, exact), strict=True)]
        orders = {"DDP alone": None, key: "key", exact: "exact"}
        made.append(
            measure(
                f"a step of DDP, 6 x Linear({width}), batch {batch}, on {ranks} ranks, Gloo",
                in_step(td.barrier, {name: step(width, batch, order) for name, order in orders.items()}),
                base="DDP alone",
                rounds=2 if quick else 7,
                **how,
                targets=[] if quick else targets,
            )
        )
    for size in (1 << 18,) if quick else SIZES:
        mine = gradient(size // 4, rank)
        out = torch.from_numpy(mine.copy())
        work = {
            "all_reduce": lambda out=out: td.all_reduce(out.zero_()),
            KEY: lambda mine=mine: fanin.dist.add_n([mine], order="key"),
            EXACT: lambda mine=mine: fanin.dist.add_n([mine], order="exact"),
            REDUCER: reduced(size, fanin.dist.group()),
        }
        small = size < 1 << 16 and not quick
        targets = [at_most(1.5, name, "all_reduce") for name in (KEY, EXACT, REDUCER)] if small else []
        made.append(
            measure(
                f"{size_text(size)} of float32 on {ranks} ranks, Gloo",
                in_step(td.barrier, work),
                base="all_reduce",
                rounds=2 if quick else 5,
                calls=max(1, min(50, (1 << 18) // size)),
                targets=targets,
                **how,
            )
        )
    return made


PROGRAMS = {"mpi": by_mpi, "gloo": by_gloo}


# ---- engines that count, or take their time


class Counted:
    """An engine that counts the bytes that this rank sends to others, but by `exchange`, and whose data takes `delay`
    seconds.
    """

    def __init__(self, engine: Any, delay: float = 0) -> None:
        self.engine, self.delay, self.sent = engine, delay, 0
        self.rank, self.size, self.name = engine.rank, engine.size, engine.name
        self.exchange, self.abort, self.close = engine.exchange, engine.abort, engine.close
        self.alike, self.largest = getattr(engine, "alike", False), getattr(engine, "largest", None)

    def share(self, sends: Any, receives: Any, again: bool) -> Any:
        self.sent += sum(map(len, sends)) - len(sends[self.rank])
        return self.engine.share(sends, receives, again)

    def __fanin_group__(self) -> Counted:
        return self

    def all_to_all(self, sends: Any, receives: Any) -> Any:
        self.sent += sum(map(len, sends))
        return Late(self.engine.all_to_all(sends, receives), self.delay)


class Late:
    """An operation that takes so many seconds more."""

    def __init__(self, pending: Any, delay: float) -> None:
        self.pending, self.delay = pending, delay

    def wait(self, timeout: float | None) -> Any:
        result = self.pending.wait(timeout)
        if self.delay:  # Python 3.11 sleeps for 0 seconds some 60 us long
            time.sleep(self.delay)
        return result


def hidden(quick: bool) -> Result:
    """Two ranks, a pass of sleeping nodes, a transport that takes as long: how much of it the pass hides."""
    buckets, pause = 16, 1e-3 if quick else 2e-2
    found: list[Result] = []

    def rank(inner: fanin.dist.Group) -> None:
        group = fanin.dist.Group(Counted(inner._engine, pause / 2))  # two operations for a bucket
        leaves = [fanin.Leaf(np.zeros(256)) for _ in range(buckets)]

        def chain(seconds: float) -> Any:
            def fn(g: Any) -> Any:
                time.sleep(seconds)
                return g, g

            node: Any = None
            for leaf in leaves:
                edges = [(leaf, 0)] if node is None else [(leaf, 0), (node, 0)]
                node = fanin.Node(fn if len(edges) == 2 else lambda g: fn(g)[0], 1, edges)
            return node

        reducer = fanin.dist.Reducer(leaves, group, bucket_bytes=2048)
        slow, fast, one = chain(pause), chain(0), np.ones(256)
        work = {
            "a pass alone": lambda: fanin.backward([(slow, 0, one)], keep_graph=True),
            "sending alone": lambda: fanin.backward([(fast, 0, one)], reducer=reducer, keep_graph=True),
            "a pass that sends": lambda: fanin.backward([(slow, 0, one)], reducer=reducer, keep_graph=True),
        }
        one_result = measure(
            f"{buckets} buckets, each as long on its way as a pass makes the next, two ranks that are threads",
            work,
            base="a pass alone",
            unit="ms",
            rounds=2 if quick else 5,
            after=group.barrier,
            longest=math.inf,
            targets=[] if quick else [at_most(1.2, "a pass that sends", "a pass alone")],
        )
        if inner.rank == 0:
            found.append(one_result)

    fanin.dist.threads(2, rank)
    (one,) = found
    middle = {name: row["median"] for name, row in one["rows"].items()}
    share = (middle["a pass alone"] + middle["sending alone"] - middle["a pass that sends"]) / middle["sending alone"]
    return {**one, "hidden_share": share}


def layers(n: int) -> tuple[list[Any], Any, Any]:
    """The pass of n layers, 64 x 64 float32 each, over a batch of 256: leaves, the root, its gradient."""
    x, w = gradient(256 * 64, 0).reshape(256, 64), gradient(64 * 64, 1).reshape(64, 64) / 8
    leaves = [fanin.Leaf(np.zeros((64, 64), "f4")) for _ in range(n)]
    node = fanin.Node(lambda g: x.T @ g, 1, [(leaves[0], 0)])
    for leaf in leaves[1:]:
        node = fanin.Node(lambda g: (x.T @ g, g @ w), 1, [(leaf, 0), (node, 0)])
    return leaves, node, x


def handed_through(n: int) -> tuple[list[Any], Any, Any]:
    """One node with n leaves of 16 float32, whose function returns what it has."""
    leaves, one = [fanin.Leaf(np.zeros(16, "f4")) for _ in range(n)], np.ones(16, "f4")
    gradients = tuple(np.full(16, k, "f4") for k in range(n))
    return leaves, fanin.Node(lambda g: gradients, 1, [(leaf, 0) for leaf in leaves]), one


def on_one_rank(title: str, n: int, graph: tuple[list[Any], Any, Any], target: float | None, quick: bool) -> Result:
    """A pass with a reducer of one rank, and without one; as in training no leaf has a gradient before."""
    leaves, root, one = graph
    alone, reduced = "without a reducer", "with one"
    found: list[Result] = []

    def rank(group: fanin.dist.Group) -> None:
        reducer = fanin.dist.Reducer(leaves, group)

        def one_pass(**options: Any) -> None:
            for leaf in leaves:
                leaf.grad = None
            fanin.backward([(root, 0, one)], keep_graph=True, **options)

        work = {alone: one_pass, reduced: partial(one_pass, reducer=reducer)}
        targets = [] if quick or target is None else [at_most(target, reduced, alone)]
        how: Any = {"rounds": 2 if quick else 15, "timer": time.process_time_ns}  # of all threads
        found.append(measure(title, work, base=alone, unit="us", targets=targets, **how))

    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        fanin.dist.threads(1, rank)
    rows = found[0]["rows"]
    return {**found[0], "us_a_leaf": (rows[reduced]["median"] - rows[alone]["median"]) / n}


def a_term(quick: bool, where: str) -> Result:
    """One more term in an exact running sum, beside one in a running sum of float32."""
    size = 1 << 16 if quick else 1 << 26
    x = gradient(size // 4, 0)
    plain, exact = fanin.InputBuffer(1, budget=0), fanin.InputBuffer(1, budget=0, accumulate="exact")
    for buf in (plain, exact, plain, exact):
        buf.add(0, x)
    left, window = "a term of a float32 left fold", "a term of an exact sum"
    return measure(  # two calls: the buffer keeps a gradient until it can add two
        f"{left} and of an exact one, {size_text(size)}, core {where}",
        {left: lambda: plain.add(0, x), window: lambda: exact.add(0, x)},
        base=left,
        unit="ms",
        rounds=2 if quick else 9,
        calls=2,
        longest=math.inf,
        targets=[] if quick else [at_most(2.5, window, left)],
    )


# ---- narrow dtypes on their way


def trained_gradients(quick: bool) -> list[list[Any]]:
    """The gradients of eight micro-batches of a network that has been trained for some steps; of each, all leaves."""
    from fanin import tape

    rng = np.random.default_rng(0)
    width, steps, micro = (32, 3, 8) if quick else (256, 200, 8)
    shapes = [(64, width), (width,), (width, width), (width,), (width, 10)]
    w = [tape.parameter(rng.standard_normal(s).astype("f4") / np.float32(np.sqrt(s[0]))) for s in shapes]
    teacher = rng.standard_normal((64, 10)).astype("f4")

    def gradients_of_a_batch() -> list[Any]:
        x = rng.standard_normal((32, 64)).astype("f4")
        h = tape.tanh(tape.array(x) @ w[0] + w[1])
        error = tape.tanh(h @ w[2] + w[3]) @ w[4] - tape.array(np.tanh(x @ teacher))
        return list(tape.grad((error * error).mean(), w))

    for _ in range(steps):
        for parameter, g in zip(w, gradients_of_a_batch(), strict=True):
            parameter.data[...] -= np.float32(0.1) * g
    return [gradients_of_a_batch() for _ in range(micro)]


def travelling(quick: bool) -> Result:
    """Four ranks that are threads, each with one or two micro-batches: for each narrow dtype and order the bytes of an
    element that a rank sends, in units of (R - 1) / R, and the error of the sum, relative to its norm.
    """
    ranks, found = 4, list[Result]()
    grads = trained_gradients(quick)
    flat = [np.concatenate([g.reshape(-1) for g in each]) for each in grads]
    names = (None, "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    cases = [(None, None), *((name, back) for name in names[1:] for back in (None, name))]

    def rank(group: fanin.dist.Group) -> None:
        facts: dict[str, Any] = {}
        work: dict[str, Callable[[], object]] = {}
        orders = ((1, "key"), (1, "exact"), (2, "key"), (2, "exact"), (2, "rank"))
        for (each, order), (wire, back) in itertools.product(orders, cases):
            exact = np.sum([x.astype("f8") for x in flat[: ranks * each]], axis=0)
            mine = range(group.rank * each, (group.rank + 1) * each)
            leaves = [fanin.Leaf(np.zeros(g.shape, "f4")) for g in grads[0]]
            reducer = fanin.dist.Reducer(leaves, group, order=order, wire=wire, wire_out=back)

            def summed(mine: Any = mine, leaves: Any = leaves, reducer: Any = reducer) -> None:
                for leaf in leaves:
                    leaf.grad = None
                for k in mine[:-1]:
                    with reducer.accumulate(k):
                        fanin.backward([(leaf, 0, g) for leaf, g in zip(leaves, grads[k], strict=True)])
                last = [(leaf, 0, g) for leaf, g in zip(leaves, grads[mine[-1]], strict=True)]
                fanin.backward(last, reducer=reducer.at(mine[-1]))

            before = group.counters.bytes_sent
            summed()
            sent = (group.counters.bytes_sent - before) * ranks / (ranks - 1) / len(exact)
            total = np.concatenate([leaf.grad.reshape(-1) for leaf in leaves])
            error = np.linalg.norm(total - exact) / np.linalg.norm(exact)
            name = f"{order}, {each} a rank, {wire or 'float32'} to owners, {back or 'float32'} back"
            facts[name] = {"bytes": sent, "error": float(error)}
            work[name] = summed
        one = measure(
            f"gradients of a network, {len(flat[0])} elements of float32, on {ranks} ranks that are threads",
            in_step(group.barrier, work),
            base=next(iter(work)),
            unit="ms",
            rounds=2 if quick else 5,
            after=group.barrier,
            longest=math.inf,
            more={"travelling": facts},
        )
        if group.rank == 0:
            found.append(one)

    fanin.dist.threads(ranks, rank)
    return found[0]


# ---- the model


class Level(NamedTuple):
    """How messages travel between some ranks: seconds a message, and a byte."""

    message: float
    byte: float


#: Eight ranks a node, 10 GB/s each by shared memory; a link of 200 Gbit/s that the node's ranks share.
NODE, INSIDE, BETWEEN = 8, Level(5e-7, 1e-10), Level(2e-6, 8 / 25e9)
#: Bytes of the head of a sum with a plan (fanin.dist.frames); seconds to read one of many that are alike.
HEADER, READ = 64, 2e-7
#: Bytes that travel for a byte of float32 to its owner: one contribution, or the exact sum of several.
ONE, SEVERAL = 1.0, 1.5


class Sum(NamedTuple):
    """What one rank does for an all-reduce, or a part of one: messages, bytes sent, bytes of gradients summed, headers
    read; the share of its messages and bytes that travels to other nodes; and how it sums.
    """

    messages: float
    sent: float
    summed: float
    headers: float
    far: float = 0.0
    work: str = "key"

    @property
    def level(self) -> Level:
        """How its messages travel."""
        return Level(*(self.far * b + (1 - self.far) * a for a, b in zip(INSIDE, BETWEEN, strict=True)))


def flat(
    size: float, ranks: int, to_owner: float = ONE, summed: float = 1.0, node: int = NODE, work: str = "key"
) -> Sum:
    """Every rank sends to every rank: a header, its part, the sum. `summed`: passes over the gradients."""
    part = size * (ranks - 1) / ranks
    far = max(0, ranks - node) / (ranks - 1)
    return Sum(3 * (ranks - 1), (to_owner + 1) * part + HEADER * (ranks - 1), summed * size, ranks, far, work)


def two_levels(size: float, ranks: int, to_owner: float = ONE, node: int = NODE, several: float = SEVERAL) -> list[Sum]:
    """Headers travel as in one level. The ranks of a node make a sum first, then those of one place in all nodes, which
    send each other the sizes of their messages, too; the sum comes back the same way. `several`: bytes between nodes
    for a byte of the node's exact sum.
    """
    headers = flat(0, ranks, node=node)
    nodes, share = ranks // node, size / node
    between = (several + 1) * share * (nodes - 1) / nodes + 8 * (nodes - 1)
    return [
        headers._replace(messages=headers.messages / 3),
        Sum(2 * (node - 1), (to_owner + 1) * (size - share), size, 0, work="pack" if to_owner == ONE else "merge"),
        Sum(3 * (nodes - 1), between, share, 0, 1.0, "merge"),
    ]


def chain(size: float, ranks: int, each: int = 1, node: int = NODE) -> list[Sum]:
    """A left fold that runs from node to node, of `each` terms a rank: the steps for which the last node waits, and its
    messages to owners; then the sum comes back as in two levels.
    """
    headers = flat(0, ranks, node=node)
    nodes, share = ranks // node, size / node
    piece = min(share, max(PIECE, share / (PIECES * nodes)))
    steps = math.ceil(share / piece) + nodes - 2
    between = 2 * share * (nodes - 1) / nodes
    return [
        headers._replace(messages=headers.messages / 3),
        Sum(2 * (node - 1), (each + 1) * (size - share), each * size, 0),
        Sum(steps, steps * piece, 0, 0, 1.0),
        Sum(2 * (nodes - 1), between, 0, 0, 1.0),
    ]


def sums(order: str, size: int, ranks: int, each: int) -> dict[str, list[Sum]]:
    """The parts of an all-reduce to which a rank brings `each` contributions, in one level and in two."""
    if order == "key":
        made = {"flat": [flat(size, ranks, each, each)]}
        return {**made, "two levels": chain(size, ranks, each)} if ranks > NODE else made
    several = order == "exact" and each > 1
    to_owner = SEVERAL if several else ONE
    own = [Sum(0, 0, each * size, 0, work="pack" if several else "rank")] if each > 1 else []
    made = {"flat": [*own, flat(size, ranks, to_owner, work="merge" if several else order)]}
    if ranks > NODE:
        made["two levels"] = [*own, *(two_levels(size, ranks, to_owner) if order == "exact" else chain(size, ranks))]
    return made


def model(size: int, ranks: int, work: dict[str, float], each: int = 1) -> Result:
    """Milliseconds of an all-reduce of so many bytes of float32; `work`: seconds to sum a byte, in each way."""
    # One rank of each node uses its link.
    ring = 2 * (ranks - 1) * BETWEEN.message + 2 * size * BETWEEN.byte / NODE + each * size * work["rank"]
    rows: dict[str, Any] = {"a ring": {"min": 1e3 * ring, "median": 1e3 * ring}}
    messages = {"a ring": 2 * (ranks - 1)}
    for order in NAMES:
        for path, parts in sums(order, size, ranks, each).items():
            seconds = sum(
                s.messages * s.level.message + s.sent * s.level.byte + s.summed * work[s.work] + s.headers * READ
                for s in parts
            )
            rows[f"{order}, {path}"] = {"min": 1e3 * seconds, "median": 1e3 * seconds}
            messages[f"{order}, {path}"] = sum(s.messages for s in parts)
    base = rows["a ring"]["median"]
    for row in rows.values():
        row |= {"ratio": base / row["median"], "ratio_of_minima": base / row["median"], "rounds": 0}
    return {
        "title": f"model of {size_text(size)} of float32 on {ranks} ranks, {NODE} a node, {each} contributions a rank",
        "unit": "ms", "rounds": 0,
        "base": "a ring", "rows": rows, "absent": [], "targets": [], "messages": messages,
    }  # fmt: skip


def summing(quick: bool, where: str) -> tuple[Result, dict[str, float]]:
    """The sums of one process that ranks make, and from them the seconds to sum a byte in each way."""
    size = 1 << 16 if quick else 1 << 24
    terms, out = [gradient(size // 4, k) for k in range(4)], np.empty(size // 4, "f4")
    segment = Layout([Leaf("", (size // 4,), "float32")], 1).segments[0]
    other = layout.Level(team=(1,), shards=((0,),))  # of another rank, which owns all elements
    fold, exact = "fanin.add_n", 'fanin.add_n, accumulate="exact"'
    pack, merge = "an exact partial sum, packed", "packed sums, added and rounded"

    def packed() -> Any:
        return ExactSum(segment, [(x.view(np.uint8), None) for x in terms]).pack(other, 0)[0]

    message = packed()

    def merged() -> None:
        partial = ExactSum(segment)
        partial.packed = [message] * len(terms)
        for start, stop, window in partial.windows(0):
            _core.window_round(window, out[start:stop], None)

    made = measure(
        f"sums of 4 x {size_text(size)} of float32, core {where}",
        {
            fold: lambda: fanin.add_n(terms, out=out),
            exact: lambda: fanin.add_n(terms, out=out, accumulate="exact"),
            pack: packed,
            merge: merged,
        },
        base=fold,
        unit="ms",
        rounds=2 if quick else 9,
        longest=math.inf,
    )
    each = {name: row["min"] / 1e3 / (len(terms) * size) for name, row in made["rows"].items()}
    return made, {"key": each[fold], "exact": each[exact], "rank": each[fold], "pack": each[pack], "merge": each[merge]}


def fitted(measured: list[Result], work: dict[str, float]) -> tuple[list[float], dict[str, float]]:
    """Seconds of a message and of a byte that is sent, from the points of up to 4 ranks; the deviation of each point,
    in percent. `work`: seconds to sum a byte, for each order.

    All ranks share the processor's cores, so a rank's work takes ranks / cores as long.
    """
    facts, rest, names, few = [], [], [], []
    measured = [one for one in measured if one["size"] > PARTS]  # smaller ones have fewer messages
    for one in measured:
        for order, name in NAMES.items():
            part = flat(one["size"], one["ranks"])
            crowd = max(1, one["ranks"] / len(cores()))
            t = one["rows"][name]["median"] / 1e3
            facts.append([part.messages * crowd / t, part.sent * crowd / t])
            rest.append(1 - part.summed * work[order] * crowd / t)
            names.append(f"{order}, {size_text(one['size'])}, {one['ranks']} ranks")
            few.append(one["ranks"] <= 4)
    if len(measured) < 4:
        return [0.0, 0.0], {}
    a, right, used = np.array(facts), np.array(rest), np.array(few)
    x = np.linalg.lstsq(a[used], right[used], rcond=None)[0]
    return x.tolist(), {name: 100 * value for name, value in zip(names, a @ x - right, strict=True)}


def results(quick: bool) -> Iterator[Result]:
    """All rows; those by MPI and Gloo where these are installed."""
    measured: list[Result] = []
    for ranks in (2,) if quick else (2, 4, 8):
        measured += on_processes("mpi", ranks, quick)
    yield from measured
    yield from on_processes("gloo", 2, quick)
    with pinned() as where:
        yield a_term(quick, where)
        n, many = (20, 20) if quick else (1000, 10_000)
        yield on_one_rank(
            f"a pass of {n} layers, one rank, of the processor's time, core {where}", n, layers(n), 1.03, quick
        )
        yield on_one_rank(
            f"{many} leaves of 64 B, one rank, of the processor's time, core {where}",
            many,
            handed_through(many),
            None,
            quick,
        )
    yield hidden(quick)
    yield travelling(quick)
    with pinned() as where, fanin.set_options(threads=1):
        one, work = summing(quick, where)
    yield one
    costs, deviations = fitted(measured, work)
    for each, ranks in itertools.product((1, 8), (8, 65_536) if quick else (8, 64, 512, 4096, 65_536)):
        yield {**model(1 << 26, ranks, work, each), "work": work, "costs": costs, "deviations": deviations}


if __name__ == "__main__":
    kind, quick_, *rest = sys.argv[1:]
    with fanin.set_options(threads=1):
        made_here = PROGRAMS[kind](bool(int(quick_)), rest)
    rank_ = int(rest[1]) if rest else fanin.dist.group().rank
    if rank_ == 0:
        print(json.dumps(made_here), flush=True)
    if kind == "gloo":
        os._exit(0)  # a thread of a replica's process group can abort the end of Python (docs/ranks.md)
