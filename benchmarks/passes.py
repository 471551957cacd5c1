"""Passes backward over nodes in Python, on fanin's engine and on others': a chain, a fan-in, a graph that is made.

    python benchmarks/passes.py [--quick] [--json FILE]


All figures are for each node (of a fan-in: each producer). The functions return what they got, so that what is timed is
the engine; "the calls alone" is a loop that calls them, one after the other. Functions in C multiply (tests/c/nodes.c).
torch's "Python functions" are `torch.autograd.Function`s; its own multiply is C++.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import c_nodes, main

import fanin
from fanin.cli.timing import Result, at_least, at_most, measure, peer, pinned

OURS, ALONE, IN_C = "fanin.grad", "the calls alone", "fanin.grad, functions in C"
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
    """What n calls cost, whoever makes them."""
    functions = [passed_on] * n

    def run() -> None:
        x = g
        for fn in functions:
            x = fn(x)

    return run


def chain_in_c(c: Any, n: int, w: Any, g: Any) -> Callable[[], Any]:
    """n multiplications in C, one after the other."""
    top = c.module().many(n, w, c.SCALE, 1.0, True)
    return lambda: fanin.grad([(top, 0, g)], [w], keep_graph=True)


def fan_in_in_c(c: Any, n: int, w: Any, g: Any) -> Callable[[], Any]:
    """n multiplications in C, whose gradients meet."""
    m = c.module()
    mid = m.node(m.function(c.PASS, 1, 1), ((w, 0),))
    roots = [(one, 0, g) for one in m.many(n, mid, c.SCALE, 1.0, False)]
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
        IN_C: (in_c := c_nodes()) and chain_in_c(in_c, n, w, g),
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
        IN_C: (in_c := c_nodes()) and fan_in_in_c(in_c, n, w, g),
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


def torch_model(torch: Any, name: str) -> tuple[Any, Any]:
    """A model of torch's, and its loss."""
    nn = torch.nn
    torch.manual_seed(0)
    if name == "a residual network":

        class Block(nn.Module):  # type: ignore[misc]
            def __init__(self, n: int) -> None:
                super().__init__()
                self.layers = nn.Sequential(
                    nn.Conv2d(n, n, 3, 1, 1), nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, n, 3, 1, 1), nn.BatchNorm2d(n)
                )

            def forward(self, x: Any) -> Any:
                return torch.relu(x + self.layers(x))

        layers = [nn.Conv2d(3, 32, 3, 1, 1), *[Block(32) for _ in range(4)], nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model, x = nn.Sequential(*layers, nn.Linear(32, 10)), torch.randn(16, 3, 32, 32)
    else:
        width, batch, length = (256, 8, 64) if name == "a transformer encoder" else (16, 2, 4)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(batch, length, width)
    return model, model(x).square().mean()


def torch_graphs(name: str, most: float, where: str, rounds: int) -> Result | None:
    """torch's own graph of a model, by its engine and on ours; gradients are added to those that are there."""
    torch = peer("torch")
    if torch is None:
        return None
    import fanin.torch

    _model, loss = torch_model(torch, name)
    return measure(
        f"torch's graph of {name}, core {where}",
        {
            "loss.backward()": lambda: loss.backward(retain_graph=True),
            "fanin.torch.backward": lambda: fanin.torch.backward(loss),
        },
        base="loss.backward()", unit="us", rounds=rounds,
        targets=[at_most(most, "fanin.torch.backward", "loss.backward()")],
    )  # fmt: skip


#: What one node takes: this much of Python, each in a process of its own.
MEMORY = {
    "fanin.Node": "import fanin; e = fanin.Leaf(np.zeros(16, 'f4'))\ndef more(e): return fanin.Node(same, 1, [(e, 0)])",
    TORCH_OWN: "import torch; e = torch.ones(16, requires_grad=True); more = lambda e: e * 1.0",
    HIPS: (
        "from autograd.core import VJPNode; from autograd.tracer import new_box, trace_stack; import autograd.numpy\n"
        "e = new_box(np.ones(16), 0, VJPNode.new_root()); more = lambda e: e * 1.0"
    ),
}
RESIDENT = """
import sys
import numpy as np
def same(g): return g
def resident():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS:"))
{setup}
e = more(e)
before = resident()
for _ in range({n}):
    e = more(e)
print((resident() - before) / {n})
"""


def memory(n: int) -> Result | None:
    """Resident bytes of a chain for each node, and the values that it keeps; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    rows: dict[str, Any] = {}
    for name, setup in MEMORY.items():
        if not peer({TORCH_OWN: "torch", HIPS: "autograd"}.get(name, "fanin")):
            continue
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT.format(setup=setup, n=n)], capture_output=True, text=True, check=True
        )
        size = float(done.stdout)
        rows[name] = {"min": size, "median": size, "rounds": 1}
    mine = rows["fanin.Node"]["median"]
    for row in rows.values():
        row["ratio"] = row["ratio_of_minima"] = mine / row["median"]
    return {
        "title": f"memory of a chain of {n} nodes, for each node", "unit": "bytes", "base": "fanin.Node", "rounds": 1,
        "rows": rows, "absent": [name for name in MEMORY if name not in rows], "targets": [],
    }  # fmt: skip


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


def results(quick: bool) -> Iterator[Result]:
    """All of them."""
    long, wide, few = (300, 100, 2) if quick else (100_000, 10_000, 9)
    with pinned() as where:
        yield chains(long, where, few)
        if not quick:
            yield chains(2000, where, 25)
        yield fan_ins(wide, where, few if quick else 15)
        yield made(long // 5, where, few)
        n = long // 50
        for title, function, count in (
            (f"a chain of {n}", times(n), n),
            (f"a fan-in of {n}, under additions", side_by_side(n), 2 * n),
        ):
            one = hips(title, function, count, where, few if quick else 25)
            if one is not None:
                yield one
        models = {"a transformer encoder": 1.3, "a residual network": 1.3, "a transformer encoder of width 16": 2.5}
        for name, most in list(models.items())[2 if quick else 0 :]:
            one = torch_graphs(name, most, where, few if quick else 15)
            if one is not None:
                yield one
    size = memory(2000 if quick else 200_000)
    if size is not None:
        yield size


if __name__ == "__main__":
    main(results)
