"""E12: two workers of one pass as threads of a simulated machine: every order, every shape of a small graph, faults;
and what a fork does to them.

A shape is a graph of n nodes, numbered so that edges lead from larger to smaller ones, in which all are reached from
the last one; nodes without edges are leaves. Shapes that differ by the numbers alone are explored once.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine, Report, explore
from kit import hooks
from kit.prepared import run_prepared
from kit.sample import sizes

pytestmark = [pytest.mark.core]

Shape = tuple[tuple[int, ...], ...]  # of each node: the targets of its edges

#: Orders of a sample: the first ones of the search, and some at random. Each planted fault is found in these.
FEW = {"limit": 12, "samples": 20}
#: Of scenarios that have too many orders for a search of all.
MANY = {"limit": 300, "samples": 200}
#: More than all orders of the other scenarios.
ALL = {"limit": 6000}

needs_faults = pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")


@pytest.fixture(autouse=True)
def nothing_stays_planted() -> Iterator[None]:
    yield
    hooks.fault(None) if hooks.DEVELOPMENT else None


def canonical(shape: Shape) -> Shape:
    """The smallest of all that differ by numbers alone; the last node stays the last."""
    n = len(shape)
    same = []
    for order in itertools.permutations(range(n - 1)):
        number = (*order, n - 1)
        if all(number[j] < number[i] for i in range(n) for j in shape[i]):
            edges: list[tuple[int, ...]] = [()] * n
            for i in range(n):
                edges[number[i]] = tuple(sorted(number[j] for j in shape[i]))
            same.append(tuple(edges))
    return min(same)


def reached(shape: Shape) -> bool:
    seen, todo = {len(shape) - 1}, [len(shape) - 1]
    while todo:
        new = set(shape[todo.pop()]) - seen
        seen |= new
        todo += new
    return len(seen) == len(shape)


def shapes(n: int) -> list[Shape]:
    """All of n nodes, up to isomorphism."""
    below = [[c for k in range(i + 1) for c in itertools.combinations(range(i), k)] for i in range(n)]
    return sorted({canonical(s) for s in itertools.product(*below) if reached(s)})


def drawn(r: random.Random, n: int) -> Shape:
    """One of them, at random."""
    while True:
        shape = tuple(tuple(j for j in range(i) if r.random() < 0.5) for i in range(n))
        if reached(shape):
            return shape


def run(shape: Shape, workers: int, seen: list[int], **how: Any) -> tuple[bytes, ...]:
    """A pass over it: the bits of its leaves. Sums are such that their order shows."""
    nodes: list[Any] = []
    for i, to in enumerate(shape):

        def fn(g: Any, i: int = i, n: int = len(to)) -> Any:
            seen.append(i)
            return [g * np.float32(c) for c in (1.1, 1e8, -1.3e8, 3.7, 0.3)[:n]]

        edges = [(nodes[j], 0) for j in to]
        nodes.append(fanin.Node(fn, edges=edges) if to else fanin.Leaf(np.zeros(1, np.float32)))
    fanin.backward([(nodes[-1], 0, np.full(1, 1.7, np.float32))], workers=workers, **how)
    return tuple(x.grad.tobytes() for x in nodes if isinstance(x, fanin.Leaf))


def explored(shape: Shape, **how: Any) -> Any:
    """Its orders: the same bits as one worker's, each node once."""
    expected = run(shape, 1, [])
    inner = [i for i, to in enumerate(shape) if to]

    def scenario(m: Machine) -> tuple[bytes, ...]:
        seen: list[int] = []
        thread = m.spawn(run, shape, 2, seen)
        m.join()
        assert sorted(seen) == inner, seen
        return thread.result

    report = explore(scenario, **how)
    return report, not report.failed and report.results == (expected,)


def test_shapes_are_counted() -> None:
    """Those of 1, 2, 3 and 4 nodes; drawn by hand up to 3: a node, a chain, a chain, a fork and a triangle."""
    assert [len(shapes(n)) for n in (1, 2, 3, 4)] == [1, 1, 3, 16]


@pytest.mark.rule("E12", "E1", "A15")
@pytest.mark.parametrize("how", sizes({"limit": 6, "samples": 5}, ALL))
def test_every_shape_of_up_to_four_nodes_gives_the_same_in_every_order(how: dict[str, int]) -> None:
    runs = 0
    for shape in [s for n in (2, 3, 4) for s in shapes(n)]:
        report, good = explored(shape, **how)
        assert good and (report.complete or how is not ALL), (shape, report)
        runs += report.runs
    print(f"{runs} orders")
    assert runs > (200 if how is ALL else 60)


@pytest.mark.rule("E12", "E1", "A15")
@pytest.mark.parametrize("count", sizes(3, 10))
def test_shapes_of_five_and_six_nodes_give_the_same_in_orders_drawn_at_random(count: int) -> None:
    seed = int(os.environ.get("FANIN_SEED", 0)) or random.randrange(2**32)
    print(f"FANIN_SEED={seed}")
    r = random.Random(seed)
    for shape in (drawn(r, n) for n in (5, 6) for _ in range(count)):
        report, good = explored(shape, limit=10, samples=10, seed=seed)
        assert good, (shape, report)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 6])
def test_every_shape_of_five_and_six_nodes_gives_the_same(n: int) -> None:
    """Of five nodes every order, up to a limit that is printed where it was met; of six a part of them."""
    found: Counter[str] = Counter()
    for shape in shapes(n):
        report, good = explored(shape, limit=4000 if n == 5 else 60, samples=60)
        assert good, (shape, report)
        found["orders"] += report.runs
        found["whole" if report.complete else "in part"] += 1
    print(dict(found))


FORK: Shape = ((), (0,), (0,), (0,), (1, 2, 3))


@pytest.mark.rule("E12")
@pytest.mark.parametrize("how", sizes(FEW, ALL))
def test_a_fan_in_of_three_gives_the_same_in_every_order(how: dict[str, int]) -> None:
    report, good = explored(FORK, **how)
    assert good and (report.complete or how is FEW) and report.runs > 20, report


@needs_faults
@pytest.mark.rule("E1", "E12")
@pytest.mark.parametrize(
    "fault", ["COUNT_BEFORE_ADD", "NODE_TAKEN_TWICE", "BUFFER_TWICE", "WORKER_LEAVES", "KEY_BY_ARRIVAL"]
)
def test_a_fault_of_several_workers_is_found(fault: str) -> None:
    hooks.fault(fault)
    report, good = explored(FORK, **FEW, stop_at_first=True)
    assert not good, report


def two_of_a_group(m: Machine, groups: tuple[Any, Any], roots: bool = False) -> int:
    """How many of two nodes, which are roots or lie below one, were at work at once."""
    at_work, most = [0], [0]
    leaf = fanin.Leaf(np.zeros(1))

    def fn(g: Any) -> Any:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        _ = leaf.grad  # a step of its own: others may act
        nodes[0].needs(0)  # and here
        at_work[0] -= 1
        return g

    nodes = [fanin.Node(fn, edges=[(leaf, 0)], group=group) for group in groups]
    top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])
    m.spawn(lambda: fanin.backward([(n, 0, np.ones(1)) for n in (nodes if roots else [top])], workers=2))
    m.join()
    assert leaf.grad[0] == 2.0
    return most[0]


@pytest.mark.rule("E12")
@pytest.mark.parametrize("roots", [False, True], ids=["below one", "roots"])
@pytest.mark.parametrize("how", sizes(FEW, ALL))
def test_of_a_group_one_node_runs_at_a_time_in_every_order(roots: bool, how: dict[str, int]) -> None:
    report = explore(lambda m: two_of_a_group(m, ("g", "g"), roots), **how)
    assert not report.failed and (report.complete or how is FEW) and report.results == (1,), report
    apart = explore(lambda m: two_of_a_group(m, ("g", "h"), roots), **how)
    assert set(apart.results) == {1, 2}, apart


@needs_faults
@pytest.mark.rule("E12")
def test_a_group_that_is_entered_twice_is_found() -> None:
    hooks.fault("GROUP_TWICE")
    report = explore(lambda m: two_of_a_group(m, ("g", "g")), **FEW, stop_at_first=True)
    assert 2 in report.results, report


def on_two_devices(m: Machine, workers: int) -> tuple[Any, ...]:
    """A pass of nodes on two devices that give to each other: its leaves' bits, and how many threads ran it."""
    threads: dict[int, set[int]] = {0: set(), 1: set()}
    streams = [m.stream(0), m.stream(1), m.stream(1)]

    def times(c: float, by: int, to: tuple[int, ...]) -> Any:
        def fn(g: Any) -> Any:
            threads[int(streams[by].device[-1])].add(threading.get_ident())
            made = [m.empty(1, "float32", device=d) for d in to]
            for k, out in enumerate(made):
                m.launch(streams[by], lambda x, y, k=k: np.copyto(y, x * np.float32(c + k)), reads=[g], writes=[out])
            return made

        return fn

    leaves = [fanin.Leaf(m.array(np.zeros(1, "f4"), d), stream=streams[d]) for d in (0, 1)]
    low = fanin.Node(times(1.3, 0, (0,)), edges=[(leaves[0], 0)], stream=streams[0])
    sides = [
        fanin.Node(times(c, by, (0, 1)), edges=[(low, 0), (leaves[1], 0)], stream=streams[by])
        for c, by in ((1e8, 0), (3.7, 1), (-1.1e8, 2))
    ]
    top = fanin.Node(times(1.7, 0, (0, 1, 1)), edges=[(s, 0) for s in sides], stream=streams[0])
    start = m.array(np.ones(1, "f4"))

    def backward() -> None:
        with m:
            fanin.backward([(top, 0, start)], workers=workers)

    m.spawn(backward)
    m.join()
    m.synchronize()
    assert m.races == 0
    assert [len(t) for t in threads.values()] == [1, 1], "each device has one worker"
    return (*(x.grad.numpy().tobytes() for x in leaves), len(threads[0] | threads[1]))


def explored_on_two_devices(workers: int, **how: Any) -> Report:
    """The option is set for all orders: a thread of one that is given up restores nothing."""
    with fanin.set_options(warn_stream_mismatch=False):
        return explore(lambda m: on_two_devices(m, workers), devices=2, **how)


@pytest.mark.rule("E3", "E12", "S18", "S20")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_two_devices_have_a_worker_each_and_the_same_bits_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    one = explored_on_two_devices(1, limit=1)
    [(a, b, threads)] = one.results
    assert threads == 1
    report = explored_on_two_devices(2, **how)
    assert not report.failed and report.results == ((a, b, 2),), report


@needs_faults
@pytest.mark.rule("E3")
def test_a_device_that_has_two_workers_is_found() -> None:
    hooks.fault("DEVICE_ON_ANY")
    report = explored_on_two_devices(2, **FEW, stop_at_first=True)
    assert report.failed and "each device has one worker" in str(report), report


@pytest.mark.rule("E6", "E14")
@pytest.mark.parametrize("how", sizes(FEW, ALL))
def test_an_error_ends_the_pass_on_both_workers_in_every_order(how: dict[str, int]) -> None:
    def scenario(m: Machine) -> bool:
        leaves = [fanin.Leaf(np.zeros(1)) for _ in range(2)]

        def bad(g: Any) -> Any:
            raise ValueError("bad")

        nodes = [fanin.Node(lambda g: (g, g), edges=[(leaves[0], 0)] * 2), fanin.Node(bad, edges=[(leaves[1], 0)])]
        top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])

        def backward() -> str:
            try:
                fanin.backward([(top, 0, np.ones(1))], workers=2)
            except ValueError as e:
                return str(e)
            return "nothing"

        thread = m.spawn(backward)
        m.join()
        assert thread.result == "bad" and leaves[1].grad is None
        assert leaves[0].grad is None or leaves[0].grad[0] == 2.0
        return True

    report = explore(scenario, **how)
    assert not report.failed and (report.complete or how is FEW) and report.runs > 20, report


@pytest.mark.rule("E12")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_progress_rises_to_all_and_changes_no_bit_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    def scenario(m: Machine) -> float:
        leaf, heard = fanin.Leaf(np.zeros(1)), list[tuple[int, int]]()
        nodes = [fanin.Node(lambda g, c=c: g * c, edges=[(leaf, 0)]) for c in (1.0, 2.0)]
        top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])

        def progress(ran: int, known: int) -> None:
            heard.append((ran, known))

        m.spawn(lambda: fanin.backward([(top, 0, np.ones(1))], workers=2, progress=progress))
        m.join()
        numbers = [ran for ran, _ in heard]
        assert numbers == sorted(set(numbers)) and heard[0] == (0, 4) and heard[-1] == (4, 4), heard
        return float(leaf.grad[0])

    report = explore(scenario, **how)
    assert not report.failed and report.results == (3.0,), (report, report.error)


@pytest.mark.rule("E15", "E12")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_two_passes_of_two_workers_meet_at_a_leaf_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    def scenario(m: Machine) -> float:
        leaf = fanin.Leaf(np.zeros(1))
        nodes = [fanin.Node(lambda g, c=c: g * c, edges=[(leaf, 0)]) for c in (1.0, 2.0)]
        top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])
        for _ in range(2):
            m.spawn(lambda: fanin.backward([(top, 0, np.ones(1))], workers=2, keep_graph=True))
        m.join()
        return float(leaf.grad[0])

    report = explore(scenario, **how)
    assert not report.failed and report.results == (6.0,), report


@pytest.mark.rule("E15", "E16")
@pytest.mark.parametrize("how", sizes(FEW, MANY))
def test_a_walk_beside_a_pass_of_two_workers_gives_the_same_in_orders_drawn_at_random(how: dict[str, int]) -> None:
    def scenario(m: Machine) -> float:
        leaf = fanin.Leaf(np.zeros(1))
        nodes = [fanin.Node(lambda g, c=c: g * c, edges=[(leaf, 0)]) for c in (1.0, 2.0)]
        top = fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])

        def by_hand() -> None:
            walk = fanin.walk([(top, 0, np.ones(1))], keep_graph=True)
            for node, sums in walk:
                walk.give(node.fn(*sums))

        m.spawn(by_hand)
        m.spawn(lambda: fanin.backward([(top, 0, np.ones(1))], workers=2, keep_graph=True))
        m.join()
        return float(leaf.grad[0])

    report = explore(scenario, **how)
    assert not report.failed and report.results == (6.0,), report


def test_a_process_with_idle_workers_ends_and_a_forked_child_has_its_own() -> None:
    code = """
import os, sys, threading, warnings
import numpy as np, fanin
warnings.simplefilter("ignore", DeprecationWarning)
def go(meet):
    met = threading.Barrier(2)
    w = fanin.Leaf(np.zeros(1))
    def fn(g):
        met.wait()
        return meet(g)
    ns = [fanin.Node(fn, edges=[(w, 0)]) for _ in range(2)]
    fanin.backward([(fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in ns]), 0, np.ones(1))], workers=2)
    return float(w.grad[0])
assert go(lambda g: g) == 2.0
pid = os.fork()
if pid == 0:
    os._exit(0 if go(lambda g: g) == 2.0 else 1)
assert os.waitpid(pid, 0)[1] == 0
main, children = threading.get_ident(), []
def forks(g):
    if threading.get_ident() == main and not children:
        children.append(os.fork())
    return g
try:
    total = go(forks)
except RuntimeError as e:
    os._exit(0 if children == [0] and "a fork inside of a pass" in str(e) else 3)
assert children[0] > 0 and total == 2.0
assert os.waitpid(children[0], 0)[1] == 0
print("well")
"""
    assert run_prepared(code).stdout.strip() == "well"


#: What the child of a fork on a worker does next, each in a pass of its own of one process.
FORKS = """
import os, sys, threading, warnings
import numpy as np, fanin
warnings.simplefilter("ignore", DeprecationWarning)
main = threading.get_ident()
inner = fanin.Node(lambda g: (g, g), edges=[(fanin.Node(lambda g: None), 0), (fanin.Node(lambda g: None), 0)])

def returns(g):
    return g

def raises(g):
    raise ValueError("mine")

def goes_on(g):
    fanin.backward([(inner, 0, g)], workers=2)
    raise OSError("back from the pass inside")

def go(end):
    met, children, w = threading.Barrier(2), [], fanin.Leaf(np.zeros(1))
    def forks(g):
        met.wait()
        if threading.get_ident() != main:
            child = os.fork()
            if child == 0:
                return end(g)
            children.append(child)
        return g
    ns = [fanin.Node(forks, edges=[(w, 0)], name=f"forks {i}") for i in range(2)]
    fanin.backward([(fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in ns]), 0, np.ones(1))], workers=2)
    return os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), w.grad[0]

for end in (returns, raises, goes_on):
    print(*go(end))
"""


@functools.cache
def forked_on_a_worker() -> dict[str, tuple[str, str]]:
    """The status of each child as its parent got it, and the child's output."""
    done = run_prepared(FORKS)
    seen, said = done.stdout.splitlines(), done.stderr.splitlines()
    return dict(zip(("returns", "raises", "goes on"), zip(seen, said, strict=True), strict=True))


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("returns", "RuntimeError: a fork inside of a pass"),
        ("raises", "ValueError: mine"),
        ("goes on", "OSError: back"),
    ],
    ids=["returns", "raises", "goes on"],
)
def test_a_child_of_a_fork_on_a_worker_ends_with_status_1_and_a_reason(ends: str, why: str) -> None:
    """The thread of its caller is not in the child: no thread could receive an error."""
    seen, said = forked_on_a_worker()[ends]
    assert seen == "1 2.0"
    assert said.startswith("fanin: a fork on a worker of a pass: the pass cannot continue in this child process")
    assert why in said
