"""Passes backward over nodes in Python, on fanin's engine and on others': a chain, a fan-in, a graph that is made.

A graph of a million nodes, each engine's in a process of its own; branches of products of matrices on one worker and on
two. All other figures are for each node (of a fan-in: each producer). The functions return what they got, so that what
is timed is the engine; "the calls alone" is a loop that calls them, one after the other. Functions in C multiply
16 float64 (examples/15_c_nodes.c). torch's "Python functions" are `torch.autograd.Function`s; its own multiply is C++.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import fanin

from .common import c_nodes
from .fresh import peak
from .timing import Result, at_least, at_most, measure, peer, pinned

OURS, ALONE, IN_C = "fanin.grad", "the calls alone", "fanin.grad, functions in C"
TORCH_ENGINE = "torch's engine"
TORCH, TORCH_OWN, HIPS = "torch, Python functions", "torch, its own multiply", "HIPS autograd"


def passed_on(g: Any) -> Any:
    return g


def each(n: int, one: Result) -> Result:
    """The figures of a result, for each of n nodes."""
    for row in one["rows"].values():
        for word in ("min", "median"):
            row[word] /= n
    return one


def chain(n: int, end: Any) -> Any:
    node = end
    for _ in range(n):
        node = fanin.Node(passed_on, 1, [(node, 0)])
    return node


def calls_alone(n: int, g: Any) -> Callable[[], None]:
    """The cost of n calls, by any function."""
    functions = [passed_on] * n

    def run() -> None:
        x = g
        for fn in functions:
            x = fn(x)

    return run


def chain_in_c(c: Any, n: int) -> Callable[[], Any]:
    """n multiplications in C, one after the other."""
    w = top = fanin.Leaf(np.zeros(16))
    for _ in range(n):
        top = fanin.Node(c.times(np.ones(16)), 1, [(top, 0)])
    return lambda: fanin.grad([(top, 0, np.ones(16))], [w], keep_graph=True)


def fan_in_in_c(c: Any, n: int) -> Callable[[], Any]:
    """n multiplications in C, whose gradients meet in a node."""
    w = fanin.Leaf(np.zeros(16))
    mid = fanin.Node(c.times(np.ones(16)), 1, [(w, 0)])
    roots = [(fanin.Node(c.times(np.ones(16)), 1, [(mid, 0)]), 0, np.ones(16)) for _ in range(n)]
    return lambda: fanin.grad(roots, [w], keep_graph=True)


def torch_function(torch: Any) -> Any:
    """A function in Python that returns what it got."""

    class Same(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    return Same.apply


def torch_chain(n: int, apply: Callable[[Any], Any], torch: Any) -> Callable[[], Any]:
    leaf = torch.ones(16, requires_grad=True)
    end = leaf
    for _ in range(n):
        end = apply(end)
    g = torch.ones(16)
    return lambda: torch.autograd.grad(end, leaf, g, retain_graph=True)


def torch_fan_in(n: int, apply: Callable[[Any], Any], torch: Any) -> Callable[[], Any]:
    leaf = torch.ones(16, requires_grad=True)
    mid = leaf.view_as(leaf)
    ends = [apply(mid) for _ in range(n)]
    g = [torch.ones(16)] * n
    return lambda: torch.autograd.grad(ends, leaf, g, retain_graph=True)


def chains(n: int, where: str, rounds: int) -> Result:
    """A chain of nodes over 16 floats."""
    torch = peer("torch")
    g, w = np.ones(16, "f4"), fanin.Leaf(np.zeros(16, "f4"))
    top = chain(n, w)
    work: dict[str, Any] = {
        OURS: lambda: fanin.grad([(top, 0, g)], [w], keep_graph=True),
        IN_C: (in_c := c_nodes()) and chain_in_c(in_c, n),
        ALONE: calls_alone(n, g),
        TORCH: torch and torch_chain(n, torch_function(torch), torch),
        TORCH_OWN: torch and torch_chain(n, lambda x: x * 1.0, torch),
    }
    return each(
        n,
        measure(
            f"a chain of {n} nodes of 16 float32, for each node, core {where}",
            work, base=TORCH if torch else ALONE, rounds=rounds, longest=10.0,
            targets=[at_least(6, OURS, TORCH), at_least(6, IN_C, TORCH_OWN)],
        ),
    )  # fmt: skip


def fan_ins(n: int, where: str, rounds: int) -> Result:
    """One node with n producers of 16 floats."""
    torch = peer("torch")
    g, w = np.ones(16, "f4"), fanin.Leaf(np.zeros(16, "f4"))
    mid = fanin.Node(passed_on, 1, [(w, 0)])
    roots = [(fanin.Node(passed_on, 1, [(mid, 0)]), 0, g) for _ in range(n)]
    work: dict[str, Any] = {
        OURS: lambda: fanin.grad(roots, [w], keep_graph=True),
        IN_C: (in_c := c_nodes()) and fan_in_in_c(in_c, n),
        ALONE: calls_alone(n, g),
        TORCH: torch and torch_fan_in(n, torch_function(torch), torch),
        TORCH_OWN: torch and torch_fan_in(n, lambda x: x * 1.0, torch),
    }
    return each(
        n,
        measure(
            f"a fan-in of {n} producers of 16 float32, for each producer, core {where}",
            work, base=TORCH if torch else ALONE, rounds=rounds,
            targets=[at_least(8, OURS, TORCH), at_least(8, OURS, TORCH_OWN)], longest=10.0,
        ),
    )  # fmt: skip


def made(n: int, where: str, rounds: int) -> Result:
    """A chain that is made and dropped; the others trace what they compute."""
    torch, autograd = peer("torch"), peer("autograd")
    w = fanin.Leaf(np.zeros(16, "f4"))
    work: dict[str, Any] = {"fanin.Node": lambda: chain(n, w), TORCH: None, TORCH_OWN: None, HIPS: None}
    if torch:
        apply, leaf = torch_function(torch), torch.ones(16, requires_grad=True)

        def traced(apply: Callable[[Any], Any]) -> None:
            x = leaf
            for _ in range(n):
                x = apply(x)

        work[TORCH] = lambda: traced(apply)
        work[TORCH_OWN] = lambda: traced(lambda x: x * 1.0)
    if autograd:
        from autograd.core import VJPNode
        from autograd.tracer import trace

        def multiplied(x: Any) -> Any:
            for _ in range(n):
                x = x * 1.0
            return x

        g = np.ones(16)
        work[HIPS] = lambda: trace(VJPNode.new_root(), multiplied, g)
    return each(
        n,
        measure(
            f"a graph of {n} nodes, made and dropped, for each node, core {where}",
            work, base=TORCH if torch else "fanin.Node", rounds=rounds, longest=10.0,
        ),
    )  # fmt: skip


def hips(title: str, function: Callable[[Any], Any], n: int, where: str, rounds: int) -> Result | None:
    """HIPS autograd's graph, its derivatives unchanged: its own pass beside ours; None without it."""
    if peer("autograd") is None:
        return None
    from autograd.core import VJPNode, backward_pass
    from autograd.tracer import toposort, trace

    x = np.ones(16)
    value, end = trace(VJPNode.new_root(), function, x)
    first = np.ones_like(value)

    def nodes() -> tuple[Any, Any]:
        nodes: dict[Any, Any] = {}
        for node in reversed(list(toposort(end))):
            nodes[node] = fanin.Node(
                lambda g, vjp=node.vjp: tuple(vjp(g)), 1, [(nodes[parent], 0) for parent in node.parents]
            )
        return nodes[end], next(iter(nodes.values()))

    top, root = nodes()

    def both() -> Any:
        top, root = nodes()
        return fanin.grad([(top, 0, first)], [root])[0]

    def ours() -> Any:
        return fanin.grad([(top, 0, first)], [root], keep_graph=True)[0]

    assert np.allclose(backward_pass(first, end), ours()) and np.allclose(ours(), both())
    work = {"its own pass": lambda: backward_pass(first, end), "fanin.grad": ours, "fanin.Node and fanin.grad": both}
    return each(
        n,
        measure(
            f"HIPS autograd's functions: {title}, for each node, core {where}",
            work, base="its own pass", rounds=rounds, targets=[at_least(1, "fanin.grad", "its own pass")],
        ),
    )  # fmt: skip


#: A chain, each in a process of its own: how one node more is made, and how the pass is run, which keeps the graph.
CHAINS = {
    "fanin.Node": (
        "import fanin\n"
        "def same(g): return g\n"
        "w = e = fanin.Leaf(np.zeros(16, 'f4'))\n"
        "def more(e): return fanin.Node(same, 1, [(e, 0)])\n"
        "def run(e): return fanin.grad([(e, 0, g)], [w], keep_graph=True)"
    ),
    TORCH_OWN: (
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "w = e = torch.ones(16, requires_grad=True)\n"
        "def more(e): return e * 1.0\n"
        "def run(e): return torch.autograd.grad(e, w, torch.ones(16), retain_graph=True)"
    ),
    HIPS: (
        "from autograd.core import VJPNode, backward_pass\n"
        "from autograd.tracer import new_box, trace_stack\n"
        "import autograd.numpy\n"
        "w = e = new_box(np.ones(16), 0, VJPNode.new_root())\n"
        "def more(e): return e * 1.0\n"
        "def run(e): return backward_pass(np.ones(16), e._node)"
    ),
}
LIFE = """
import gc, time
import numpy as np
def resident(what="VmRSS"):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(what + ":"))
g = np.ones(16, "f4")
{setup}
run(more(e))
gc.collect()
before, begin = resident(), time.process_time()
for _ in range({n}):
    e = more(e)
made, made_at = resident(), time.process_time()
run(e)
peak, ran_at = resident("VmHWM"), time.process_time()
del e
left, freed_at = resident(), time.process_time()
print(*(x / {n} for x in (made - before, peak - before, left - before)))
print(*(t / {n} * 1e9 for t in (made_at - begin, ran_at - made_at, freed_at - ran_at)))
"""
LIVES = (("made", "at the peak of a pass", "after its end"), ("made", "one pass", "dropped"))


def lives(n: int, times: int) -> Iterator[Result]:
    """Bytes and ns of the processor's time of a chain, for each node, with the values that it keeps: made, run,
    dropped; nothing if the system does not report it.
    """
    if not sys.platform.startswith("linux"):
        return
    here = [name for name in CHAINS if peer({TORCH_OWN: "torch", HIPS: "autograd"}.get(name, "fanin"))]
    lines: dict[str, list[list[list[float]]]] = {name: [] for name in here}
    for _ in range(times):
        for name in here:
            code = LIFE.format(setup=CHAINS[name], n=n)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            lines[name].append([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    of = {"bytes": "", "ns": ", of the processor's time"}
    for which, (unit, steps) in enumerate(zip(("bytes", "ns"), LIVES, strict=True)):
        for step, what in enumerate(steps):
            seen = {name: sorted(one[which][step] for one in lines[name]) for name in here}
            middles = {name: statistics.median(all_) for name, all_ in seen.items()}
            rows = {
                name: {
                    "min": all_[0],
                    "median": middles[name],
                    "ratio": middles[here[0]] / (middles[name] or 1),
                    "ratio_of_minima": seen[here[0]][0] / (all_[0] or 1),
                    "rounds": times,
                }
                for name, all_ in seen.items()
            }
            yield {
                "title": f"a chain of {n} nodes in a process of its own: {what}, for each node{of[unit]}",
                "unit": unit, "base": here[0], "rounds": times, "rows": rows,
                "absent": [name for name in CHAINS if name not in here], "targets": [],
            }  # fmt: skip


def branches(n: int, where: str, rounds: int) -> Result:
    """Eight branches of two products of matrices, which release the GIL: on one worker, and on two."""
    torch = peer("torch")
    r = np.random.default_rng(0)
    factors = [[r.standard_normal((n, n)).astype("f4") / np.float32(n**0.5) for _ in range(2)] for _ in range(8)]
    g, x = r.standard_normal((n, n)).astype("f4"), fanin.Leaf(np.zeros((n, n), "f4"))
    h = fanin.Node(passed_on, 1, [(x, 0)])
    roots = []
    for a, b in factors:
        low = fanin.Node(lambda g, a=a: g @ a.T, 1, [(h, 0)])
        roots.append((fanin.Node(lambda g, b=b: g @ b.T, 1, [(low, 0)]), 0, g))

    def ours(workers: int) -> Any:
        return fanin.grad(roots, [x], keep_graph=True, workers=workers)[0]

    def alone() -> None:
        def half(k: int) -> None:
            for a, b in factors[k::2]:
                g @ b.T @ a.T

        other = threading.Thread(target=half, args=(1,))
        other.start()
        half(0)
        other.join()

    one, two = "fanin.grad, workers=1", "fanin.grad, workers=2"
    work: dict[str, Any] = {
        one: lambda: ours(1),
        two: lambda: ours(2),
        "the products alone, on two threads": alone,
        TORCH_ENGINE: None,
    }
    with threadpool_limits(1):
        bits = ours(1).tobytes()
        assert all(ours(2).tobytes() == bits for _ in range(5)), "the bits are those of one worker"
        if torch is not None:
            torch.set_num_threads(1)
            leaf, tg = torch.zeros(n, n, requires_grad=True), torch.from_numpy(g)
            mid = leaf.view_as(leaf)
            ends = [mid @ torch.from_numpy(a) @ torch.from_numpy(b) for a, b in factors]
            work[TORCH_ENGINE] = lambda: torch.autograd.grad(ends, leaf, [tg] * 8, retain_graph=True)
            assert np.allclose(work[TORCH_ENGINE]()[0].numpy(), ours(2), rtol=1e-3, atol=1e-3)
        return measure(
            f"eight branches of two products of {n} x {n} float32, cores {where}, BLAS on one thread",
            work, base=one, unit="ms", rounds=rounds, longest=10.0,
            targets=[at_least(1.7, two, one), at_least(1.7, two, TORCH_ENGINE)],
        )  # fmt: skip


def times(n: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(n):
            x = x * 1.0001
        return x

    return run


def side_by_side(n: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        h = x * 1.0
        total = h * 2.0
        for _ in range(n - 1):
            total = total + h * 2.0
        return total

    return run


SLOTS, PLAIN, BOXED = 4, "fn(*sums)", "fn(sums), boxed=True"
UNTRACED, TRACED, DIGESTS = "no trace", "a trace", "a trace with digests"


def layers(size: int, boxed: bool) -> Callable[[], Any]:
    """A chain of nodes that turn four gradients into four, each after the one before it was used."""

    def fn(*given: Any) -> Any:
        sums = given[0] if boxed else list(given)
        del given
        return [sums.pop() * 2.0 for _ in range(SLOTS)][::-1]

    def run() -> None:
        edges: Any = [(fanin.Leaf(np.zeros(1)), 0)]
        node = fanin.Node(lambda *sums: sum(g[:1] for g in sums), SLOTS, edges)
        for _ in range(6):
            node = fanin.Node(fn, SLOTS, [(node, i) for i in range(SLOTS)], boxed=boxed)
        first = fanin.Node(lambda g: [np.ones(size) for _ in range(SLOTS)], 1, [(node, i) for i in range(SLOTS)])
        fanin.backward([(first, 0, np.ones(1))])

    return run


def dropped_sums(size: int, where: str, few: int) -> Result:
    """Time and peak of memory where a function drops its sums one by one."""
    work = {PLAIN: layers(size, False), BOXED: layers(size, True)}
    fanin.trim()
    return measure(
        f"a chain of 6 nodes of {SLOTS} gradients of {size * 8 / 1e6:g} MB, core {where}",
        work,
        base=PLAIN,
        unit="ms",
        rounds=few,
        calls=1,
        more={"peaks": {name: peak(f) for name, f in work.items()}},
    )


def with_digests(size: int, where: str, few: int) -> Result:
    """A fan-in of 16 products, traced and with digests."""
    w = fanin.Leaf(np.zeros(size))
    low = [fanin.Node(lambda g, m=m: g @ m, 1, [(w, 0)]) for m in [np.eye(size) for _ in range(16)]]
    top = fanin.Node(lambda g: [g] * 16, 1, [(node, 0) for node in low])

    def run(**how: Any) -> Callable[[], None]:
        def traced() -> None:
            w.grad = None
            with fanin.trace(capacity=1 << 10, **how):
                fanin.backward([(top, 0, g)], keep_graph=True)

        return traced

    def plain() -> None:
        w.grad = None
        fanin.backward([(top, 0, g)], keep_graph=True)

    g = np.ones(size)
    return measure(
        f"a fan-in of 16 products with {size} x {size} matrices, core {where}",
        {UNTRACED: plain, TRACED: run(), DIGESTS: run(digests=True)},
        base=TRACED,
        unit="us",
        rounds=few,
        targets=[at_most(1.1, DIGESTS, TRACED)],
    )


def results(quick: bool) -> Iterator[Result]:
    """All of them."""
    long, wide, few = (300, 100, 2) if quick else (100_000, 10_000, 9)
    with pinned() as where:
        yield chains(long, where, few)
        if not quick:
            yield chains(2000, where, 25)
            yield chains(1000, where, 50)
        yield fan_ins(wide, where, few if quick else 15)
        if not quick:
            yield fan_ins(1000, where, 50)
        yield made(long // 5, where, few)
        n = long // 50
        for title, function, count in (
            (f"a chain of {n}", times(n), n),
            (f"a fan-in of {n}, under additions", side_by_side(n), 2 * n),
        ):
            one = hips(title, function, count, where, few if quick else 25)
            if one is not None:
                yield one
    with pinned() as where:
        yield dropped_sums(10_000 if quick else 2_000_000, where, few)
        yield with_digests(64 if quick else 512, where, few if quick else 25)
    with pinned(2) as where:
        yield branches(64 if quick else 512, where, few if quick else 25)
    yield from lives(2000 if quick else 1_000_000, 1 if quick else 2)
