"""A function of 1 to 1,000 kernels, replayed by a graph tree, beside its launches one by one and its graph launched by
hand, on the simulated device.

What the device does for each kernel is in all of them; what a call does of its own is the difference to the graph
launched by hand: its stream waits for the caller's, it is launched, and the caller's waits for it, as a tree does it.
The title has the tree's own part of the call, by the medians, where there is one kernel (of many the difference is lost
in what they take), and what the clock of the simulated host counts.

On the CPU: a chain of additions of 16 elements by NumPy, as nodes of a pass, and replayed; and where a replay pays:
many operations on small and large arrays, and matrix products, by NumPy and replayed. A step of three pieces with host
parts between them, as a pipeline, beside three functions that are called by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fanin
from fanin import sim

from .timing import Result, measure, pinned

DIRECT, BY_HAND = "launches one by one", "its graph, launched by hand"
REPLAYED, STEP = "GraphTree: the call", "GraphTree: a step with the call"
NUMPY, ENGINE = "NumPy", "a pass of the engine"
SHAPES = ((1, 1), (1, 8), (1, 32), (10, 1), (100, 1), (1000, 1))


def on_the_clock(m: Any, work: Callable[[], Any]) -> float:
    """Microseconds of the simulated host."""
    before = m.host_us
    work()
    return float(m.host_us - before)


def body_of(m: Any, here: str, kernels: int) -> Callable[..., Any]:
    def body(*arrays: Any) -> Any:
        stream = fanin.current_stream(here)
        for _ in range(kernels):
            m.launch(stream, lambda *_: None, reads=[], writes=[arrays[0]])
        return arrays[0]

    return body


def title_of(result: Result, where: str, kernels: int, operands: int, core: object, less: float = 0) -> None:
    rows = result["rows"]
    own = rows[REPLAYED]["median"] - (rows[BY_HAND]["median"] - less)
    result["title"] = f"{where}: {kernels} kernels, {operands} operands, core {core}"
    if kernels == 1:
        result["title"] += f"; of the call the tree's own: {own:.0f} ns"
        result["own_ns"] = own


class Replays:
    """A tree with one function, which is replayed from now on."""

    def __init__(self, m: Any, here: str, kernels: int, operands: int) -> None:
        self.xs = [m.array(np.ones(16, np.float32)) for _ in range(operands)]
        self.body = body_of(m, here, kernels)
        self.open: Any = None
        self.tree = fanin.GraphTree(here, memory=1 << 16)
        self.f = self.tree.function(self.body, roles="static")
        for _ in range(3):
            with self.tree.step():
                self.f(*self.xs)
        assert self.f.last is not None and self.f.last.did == "replayed"

    def step(self) -> None:
        with self.tree.step():
            self.f(*self.xs)

    def call(self) -> None:
        """Within a step that `begin` begins."""
        self.f(*self.xs)

    def begin(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = self.tree.step()
        self.open.__enter__()

    def end(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.open = None


def works(one: Replays, by_hand: Callable[[], None]) -> dict[str, Callable[[], None]]:
    return {DIRECT: lambda: one.body(*one.xs), BY_HAND: by_hand, REPLAYED: one.call, STEP: one.step}


def measured(m: Any, one: Replays, work: dict[str, Callable[[], None]], rounds: int, more: dict[str, Any]) -> Result:
    def fresh() -> None:
        one.end()
        m.synchronize()

    def within() -> None:
        m.synchronize()
        one.begin()

    before = {name: within if name == REPLAYED else fresh for name in work}
    result = measure("", work, base=BY_HAND, rounds=rounds, longest=5.0, before=before, more=more)
    one.end()
    return result


def simulated(m: Any, kernels: int, operands: int, core: object, rounds: int) -> Result:
    s, t = m.stream(), m.stream()
    with fanin.stream(s):
        one = Replays(m, "sim:0", kernels, operands)

    m.begin_capture(s)
    with fanin.stream(s):
        one.body(*one.xs)
    graph = m.end_capture(s)

    def by_hand() -> None:
        t.wait(s)
        m.launch_graph(graph, t)
        s.wait(t)

    with fanin.stream(s):
        work = works(one, by_hand)
        clock = {name: on_the_clock(m, w) for name, w in work.items() if name != REPLAYED}
        result = measured(m, one, work, rounds, {"host_us": clock})
    title_of(result, "sim", kernels, operands, core)
    result["title"] += "; simulated host us: " + ", ".join(f"{us:.1f}" for us in clock.values())
    return result


def on_the_cpu(kernels: int, operands: int, where: object, rounds: int) -> Result:
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
    work = {NUMPY: lambda: chain(*xs), ENGINE: engine, STEP: replayed}
    title = f"CPU: {kernels} additions, {operands} operands, core {where}"
    return measure(title, work, base=ENGINE, rounds=rounds, longest=5.0)


def additions(x: Any, w: Any) -> Any:
    y = x
    for _ in range(150):
        y = y + w + x
    return y


def operations(x: Any, w: Any) -> Any:
    """Three for each of 100 rounds: NumPy's calls cost what they cost, whatever the arrays hold."""
    y = x * 1.0
    for _ in range(100):
        y = np.tanh(y * w + x)
    return y


def in_place(x: Any, w: Any) -> Any:
    """The same by out=, as code that counts its allocations writes it."""
    y = x * 1.0
    for _ in range(100):
        np.multiply(y, w, out=y)
        np.add(y, x, out=y)
        np.tanh(y, out=y)
    return y


def products(x: Any, w: Any) -> Any:
    y = x
    for _ in range(20):
        y = y @ w
    return y


#: Where a replay pays: a function, its operands' shapes, as a table of docs/graph-trees.md has them.
WORTH: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...]]] = {
    "300 additions of 16 doubles": (additions, (16,)),
    "300 additions of 1,000 doubles": (additions, (1000,)),
    "300 additions of 30,000 doubles": (additions, (30_000,)),
    "100 times *, + and tanh of 16 doubles": (operations, (16,)),
    "100 times *, + and tanh of 1,000 doubles": (operations, (1000,)),
    "100 times *, + and tanh of 30,000 doubles": (operations, (30_000,)),
    "100 times *, + and tanh of 16 doubles, out=": (in_place, (16,)),
    "100 times *, + and tanh of 30,000 doubles, out=": (in_place, (30_000,)),
    "20 products of 8 by 8": (products, (8, 8)),
    "20 products of 256 by 256": (products, (256, 256)),
}


def worth(name: str, where: object, rounds: int) -> Result:
    fn, shape = WORTH[name]
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape) / shape[0] for _ in range(2))
    tree = fanin.GraphTree("cpu")
    f = tree.function(fn, roles=("copy", "static"))

    def replayed() -> None:
        with tree.step():
            f(x, w)

    for _ in range(3):
        replayed()
    assert f.last is not None and f.last.did == "replayed"
    title = f"CPU: {name}, core {where}"
    return measure(title, {NUMPY: lambda: fn(x, w), STEP: replayed}, base=STEP, rounds=rounds, longest=5.0)


EAGER = "NumPy, without a tree"
THREE, GENERATOR, LIST = "three functions in a step", "a pipeline, a generator function", "a pipeline, a list"
HELD, NOT_HELD = "a step with the call, keep='held', nothing held", "a step with the call"


def three_pieces(kernels: int, where: object, rounds: int) -> Result:
    """A number is read on the host after two of the pieces; without a tree, as ordinary Python."""
    tree, x, w = fanin.GraphTree("cpu"), np.ones(16), np.ones(16)

    def chain(x: Any, w: Any) -> Any:
        for _ in range(kernels):
            x = x + w
        return x

    first, second, third = (tree.function(chain, roles=("auto", "static")) for _ in range(3))

    def by_hand() -> None:
        with tree.step():
            y = first(x, w)
            if np.isnan(y.numpy()[0]):
                return
            y = second(y, w)
            if np.isnan(y.numpy()[0]):
                return
            third(y, w)

    def body(x: Any, w: Any) -> Any:
        y = first(x, w)
        if np.isnan((yield y)[0]):
            return
        y = second(y, w)
        if np.isnan((yield y)[0]):
            return
        third(y, w)

    def host(y: Any) -> Any:
        return fanin.graph.Stop() if np.isnan(y.numpy()[0]) else (y, w)

    def eager() -> None:
        y = chain(x, w)
        if np.isnan(y[0]):
            return
        y = chain(y, w)
        if np.isnan(y[0]):
            return
        chain(y, w)

    pipeline, parts = tree.pipeline(body), tree.pipeline([first, host, second, host, third, lambda y: None])
    work = {THREE: by_hand, GENERATOR: lambda: pipeline(x, w), LIST: lambda: parts(x, w), EAGER: eager}
    for _ in range(3):
        for one in work.values():
            one()
    assert {did for _, did in pipeline.last + parts.last} == {"replayed"}
    title = f"CPU: three pieces of {kernels} kernels, core {where}"
    return measure(title, work, base=THREE, rounds=rounds, longest=5.0)


def held(where: object, rounds: int) -> Result:
    tree, x = fanin.GraphTree("cpu"), np.ones(16)
    work = {}
    for name, keep in ((NOT_HELD, False), (HELD, "held")):
        f = tree.function(additions, roles=("copy", "static"), keep=keep)  # type: ignore[arg-type]

        def step(f: Any = f) -> None:
            with tree.step():
                f(x, x)

        for _ in range(3):
            step()
        work[name] = step
    return measure(f"CPU: 300 additions, core {where}", work, base=NOT_HELD, rounds=rounds, longest=5.0)


def rounds_of(kernels: int, quick: bool) -> int:
    return 3 if quick else max(30, 1000 // kernels)


def results(quick: bool) -> Iterator[Result]:
    with pinned() as core:
        with sim.Machine() as m:
            for kernels, operands in SHAPES:
                yield simulated(m, kernels, operands, core, rounds_of(kernels, quick))
        for kernels, operands in SHAPES:
            yield on_the_cpu(kernels, operands, core, 3 if quick else 30)
        for name in WORTH:
            yield worth(name, core, 3 if quick else 30)
        for kernels in (1, 2, 3, 5, 10, 100):
            yield three_pieces(kernels, core, 3 if quick else 300)
        yield held(core, 3 if quick else 300)
