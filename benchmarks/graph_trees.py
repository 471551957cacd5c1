"""A function of 1 to 1,000 kernels on the simulated device, replayed by a graph tree, beside its launches
one by one and its graph launched by hand.

    python benchmarks/graph_trees.py [--quick] [--json FILE]

The same on the CPU: a chain of additions of 16 elements by NumPy, as nodes of a pass, and replayed.

What the simulation itself does for each kernel is in all of them; what a tree does of its own is the difference between
the last two. The title says what the clock of the simulated host counts for a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import main

import fanin
from fanin import sim
from fanin.cli.timing import Result, measure, pinned

DIRECT, BY_HAND, REPLAYED = "launches one by one", "its graph, launched by hand", "GraphTree, replayed"


def on_the_clock(m: Any, work: Callable[[], Any]) -> float:
    """Microseconds of the simulated host."""
    before = m.host_us
    work()
    return float(m.host_us - before)


def calls(m: Any, kernels: int, operands: int, where: str, rounds: int) -> Result:
    xs = [m.array(np.ones(16, np.float32)) for _ in range(operands)]
    s = m.stream()

    def body(*arrays: Any) -> Any:
        here = fanin.current_stream("sim:0")
        for _ in range(kernels):
            m.launch(here, lambda *_: None, reads=[], writes=[arrays[0]])
        return arrays[0]

    def direct() -> None:
        with fanin.stream(s):
            body(*xs)

    m.begin_capture(s)
    direct()
    graph = m.end_capture(s)
    tree = fanin.GraphTree("sim:0", memory=1 << 16)
    f = tree.function(body, roles="static")

    def replayed() -> None:
        with tree.step():
            f(*xs)

    with fanin.stream(s):
        for _ in range(3):
            replayed()
    assert f.last is not None and f.last.did == "replayed"

    def by_hand() -> None:
        m.launch_graph(graph, s)

    def by_tree() -> None:
        with fanin.stream(s):
            replayed()

    clock = ", ".join(f"{on_the_clock(m, w):.1f}" for w in (direct, by_hand, by_tree))
    work = {DIRECT: direct, BY_HAND: by_hand, REPLAYED: by_tree}
    return measure(
        f"{kernels} kernels, {operands} operands, core {where}; simulated host us: {clock}",
        work,
        base=BY_HAND,
        rounds=rounds,
        longest=5.0,
        before=dict.fromkeys(work, m.synchronize),
    )


NUMPY, ENGINE = "NumPy", "a pass of the engine"


def on_the_cpu(kernels: int, operands: int, where: str, rounds: int) -> Result:
    xs = [np.ones(16, np.float32) for _ in range(operands)]
    tree = fanin.GraphTree("cpu", memory=1 << 16)

    def chain(x: Any, *others: Any) -> Any:
        for _ in range(kernels):
            x = np.add(x, 1.0)
        return x

    def engine() -> None:
        edge: Any = (fanin.Leaf(np.zeros(16, np.float32)), 0)
        for _ in range(kernels):
            edge = (fanin.Node(lambda g: np.add(g, 1.0), edges=[edge]), 0)
        fanin.backward([(*edge, xs[0])])

    f = tree.function(chain, roles="static")

    def replayed() -> None:
        with tree.step():
            f(*xs)

    for _ in range(3):
        replayed()
    assert f.last is not None and f.last.did == "replayed"
    work = {NUMPY: lambda: chain(*xs), ENGINE: engine, REPLAYED: replayed}
    title = f"CPU: {kernels} additions, {operands} operands, core {where}"
    return measure(title, work, base=ENGINE, rounds=rounds, longest=5.0)


def results(quick: bool) -> Iterator[Result]:
    with pinned() as where, sim.Machine() as m:
        for kernels, operands in ((1, 1), (1, 32), (10, 1), (100, 1), (1000, 1)):
            yield calls(m, kernels, operands, where, 3 if quick else 30)
            yield on_the_cpu(kernels, operands, where, 3 if quick else 30)


if __name__ == "__main__":
    main(results)
