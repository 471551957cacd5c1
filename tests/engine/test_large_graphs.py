"""Graphs of 30,000 and 10^6 nodes: made, run and freed without recursion, in little memory (E13)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit import hooks
from kit.support import run_python

pytestmark = pytest.mark.core

N = 30_000


def passed_on(g: Any) -> Any:
    return g


def both(g: Any) -> Any:
    return g, g


def chain(n: int, w: Any) -> Any:
    node = w
    for _ in range(n):
        node = Node(passed_on, 1, [(node, 0)])
    return node


def ladder(n: int, w: Any) -> Any:
    """Each node has two edges to the next: 2^n ways to the leaf, n nodes."""
    node, half = w, lambda g: (g * 0.5, g * 0.5)
    for _ in range(n):
        node = Node(half, 1, [(node, 0), (node, 0)])
    return node


def comb(n: int, w: Any) -> Any:
    """A chain, each of whose nodes leads to the leaf as well."""
    node = Node(passed_on, 1, [(w, 0)])
    for _ in range(n - 1):
        node = Node(both, 1, [(node, 0), (w, 0)])
    return node


def fan(n: int, w: Any) -> Any:
    """n nodes side by side under one."""
    mid = Node(passed_on, 1, [(w, 0)])
    sides = [Node(passed_on, 1, [(mid, 0)]) for _ in range(n)]
    return Node(lambda g: [g] * n, 1, [(node, 0) for node in sides])


SHAPES: dict[str, tuple[Callable[[int, Any], Any], float]] = {
    "chain": (chain, 1.0),
    "ladder": (ladder, 1.0),
    "comb": (comb, float(N)),
    "fan": (fan, float(N)),
}


def in_a_small_stack(work: Callable[[], None]) -> None:
    """Runs it on a thread whose stack would not hold a frame for each node."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.rule("E13")
@pytest.mark.parametrize("shape", SHAPES)
def test_long_graphs_cause_no_recursion(shape: str) -> None:
    """In 256 KiB of stack: 8.7 bytes for each node."""
    make, value = SHAPES[shape]
    gc.collect()
    before = hooks.blocks()

    def work() -> None:
        w = Leaf(np.zeros(2, np.float64))
        top = make(N, w)
        fanin.backward([(top, 0, np.ones(2))], keep_graph=True)
        assert w.grad.tolist() == [value, value]
        [g] = fanin.grad([(top, 0, np.ones(2))], [w])
        assert g.tolist() == [value, value]
        with pytest.raises(RuntimeError, match="was freed by pass"):
            fanin.backward([(top, 0, np.ones(2))])
        del top
        gc.collect()

    in_a_small_stack(work)
    gc.collect()
    assert hooks.blocks() == before


@pytest.mark.rule("E13")
def test_a_graph_that_was_never_run_is_freed_in_a_loop() -> None:
    def work() -> None:
        top = chain(N, Leaf(np.zeros(2)))
        del top

    in_a_small_stack(work)


@pytest.mark.rule("E13", "E6")
def test_an_error_at_the_end_of_a_long_chain_drops_all_gradients() -> None:
    def throws(g: Any) -> Any:
        raise ZeroDivisionError

    def work() -> None:
        top = chain(N, Node(throws, name="end"))
        with pytest.raises(ZeroDivisionError) as caught:
            fanin.backward([(top, 0, 1.0)])
        assert f": {N} of {N + 1} nodes had run" in caught.value.__notes__[0]

    in_a_small_stack(work)


@pytest.mark.rule("E13")
def test_an_edge_below_a_long_chain_is_checked_in_a_loop() -> None:
    """Whether an edge closes a cycle is found without recursion."""

    def work() -> None:
        low = Node(passed_on, name="low")
        top = chain(N, low)
        with pytest.raises(ValueError, match="closes a cycle"):
            low.edges.append((top, 0))

    in_a_small_stack(work)


#: Run by itself, so that no other test uses its memory: resident memory for each node, made and at the peak of a pass.
MEASURED = """
import gc, os, sys
import numpy as np
import fanin

def resident(what="VmRSS"):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(what + ":"))

def passed_on(g):
    return g

n = int(sys.argv[1])
fanin.backward([(fanin.Node(passed_on, 1, [(fanin.Leaf(np.zeros(2)), 0)]), 0, np.ones(2))])
gc.collect()
before = resident()
w = node = fanin.Leaf(np.zeros(2))
for _ in range(n):
    node = fanin.Node(passed_on, 1, [(node, 0)])
made = resident()
fanin.backward([(node, 0, np.ones(2))])
assert w.grad.tolist() == [1, 1]
peak = resident("VmHWM")
del node
gc.collect()
print((made - before) / n, (peak - before) / n, (resident() - before) / n)
"""


@pytest.mark.slow
@pytest.mark.rule("E13")
def test_a_million_nodes_are_made_run_and_freed_in_200_bytes_each() -> None:
    """Besides its edges (a tuple of Python's for each, until it is read) and closures."""
    made, peak, after = map(float, run_python(["-c", MEASURED, "1000000"]).stdout.split())
    print(f"{made:.0f} bytes for each node when made, {peak:.0f} at the peak of the pass, {after:.0f} after it")
    assert made <= 200 and peak <= 300
    assert after <= 40, "memory of nodes that are gone is kept"
