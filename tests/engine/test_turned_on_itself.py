"""Functions, hooks and objects that change the pass or the graph that calls them: a clear error, no crash."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Leaf, Node
from kit import hooks

pytestmark = pytest.mark.core


def ones() -> Any:
    return np.ones(2)


def leaf(name: str = "w") -> Any:
    return Leaf(np.zeros(2), name=name)


def passed_on(g: Any) -> Any:
    return g


def half() -> Callable[[Any], Any]:
    """A function to which only its node has a reference."""
    memory = bytearray(100)
    return lambda g: g * (len(memory) / 200)


# A pass over the node that is running


@pytest.mark.rule("E7", "E10")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("where", ["register_hook", "register_prehook"])
def test_a_hook_whose_own_pass_frees_the_node_ends_the_pass_before_the_function(where: str, by_hand: bool) -> None:
    w = leaf()
    node = Node(half(), edges=[(w, 0)], name="Mul")
    kept = []

    def hook(_: Any) -> None:
        handle.remove()
        fanin.backward([(node, 0, ones())])
        kept.extend(half() for _ in range(50))  # what was freed is written over

    handle = getattr(node, where)(hook)
    with pytest.raises(RuntimeError, match=r"^Mul was freed by pass \d+") as caught:
        if by_hand:
            next(fanin.walk([(node, 0, ones())]))
        else:
            fanin.backward([(node, 0, ones())])
    assert caught.value.__notes__[0].startswith("in Mul (node") and len(kept) == 50
    assert w.grad.tolist() == [0.5, 0.5]  # of the inner one, whole


@pytest.mark.rule("E7", "E10")
@pytest.mark.parametrize("where", ["register_hook", "register_prehook"])
def test_a_hook_whose_own_pass_keeps_the_graph_lets_the_node_run(where: str) -> None:
    w = leaf()
    node = Node(half(), edges=[(w, 0)], name="Mul")

    def hook(_: Any) -> None:
        handle.remove()
        fanin.backward([(node, 0, ones())], keep_graph=True)

    handle = getattr(node, where)(hook)
    fanin.backward([(node, 0, ones())])
    assert w.grad.tolist() == [1, 1] and node.freed


# Passes by hand


@pytest.mark.rule("E16")
def test_a_walk_references_its_schedule() -> None:
    w = leaf()
    top = Node(passed_on, edges=[(w, 0)])

    def schedule() -> Callable[[Any], Any]:
        last = [1]
        return lambda ready: ready[-len(last)]

    p = fanin.walk([(top, 0, ones())], schedule=schedule())
    kept = [bytearray(136) for _ in range(100)] + [schedule() for _ in range(100)]
    for node, sums in p:
        p.give(node.fn(*sums))
    assert w.grad.tolist() == [1, 1] and len(kept) == 200


@pytest.mark.rule("E16")
def test_a_schedule_that_holds_its_own_pass_is_collected() -> None:
    class Schedule:
        def __call__(self, ready: Any) -> Any:
            return ready[0]

        def __del__(self) -> None:
            gone.append(1)

    gone: list[int] = []
    schedule: Any = Schedule()
    schedule.own = fanin.walk([(Node(passed_on, edges=[(leaf(), 0)]), 0, ones())], schedule=schedule)
    del schedule
    gc.collect()
    assert gone == [1]


@pytest.mark.rule("E16")
def test_an_object_freed_with_a_walk_finds_it_ended() -> None:
    said: list[str] = []

    class Dies:
        def __add__(self, other: Any) -> Any:
            return other

        def __del__(self) -> None:
            try:
                p.give(None)
            except RuntimeError as error:
                said.append(str(error))
            said.append(next(p, "ended"))

    low, high = Node(lambda g: None, name="low"), Node(lambda g: None, name="high")
    p = fanin.walk([(low, 0, Dies()), (high, 0, 1.0)])
    node, _ = next(p)
    assert node is high  # low's gradient waits
    p.close()
    assert said == ["walk: no node waits for gradients: call next() first", "ended"]


# Which pass decides whether a gradient is needed


@pytest.mark.rule("E8", "E15", "E16")
@pytest.mark.threads
def test_a_walk_on_another_thread_does_not_decide_which_gradients_this_one_needs() -> None:
    a, b = leaf("a"), leaf("b")
    inside, go = threading.Event(), threading.Event()

    def fn(g: Any) -> Any:
        inside.set()
        go.wait()
        return tuple(g if node.needs(i) else None for i in range(2))

    node = Node(fn, edges=[(a, 0), (b, 0)])
    t = threading.Thread(target=lambda: fanin.backward([(node, 0, ones())], keep_graph=True))
    t.start()
    inside.wait()
    p = fanin.walk([(node, 0, ones())], inputs=[a], keep_graph=True)
    next(p)
    assert [node.needs(i) for i in range(2)] == [True, False]  # here it is the one at work
    go.set()
    t.join()
    assert a.grad.tolist() == b.grad.tolist() == [1, 1]


@pytest.mark.rule("E8", "E16")
def test_an_unfinished_walk_does_not_decide_which_gradients_a_function_needs() -> None:
    a, b = leaf("a"), leaf("b")
    kept = []

    def fn(g: Any) -> Any:
        kept.append(fanin.walk([(node, 0, ones())], inputs=[a], keep_graph=True))
        next(kept[0])
        return tuple(g if node.needs(i) else None for i in range(2))

    node = Node(fn, edges=[(a, 0), (b, 0)])
    fanin.backward([(node, 0, ones())], keep_graph=True)
    assert a.grad.tolist() == b.grad.tolist() == [1, 1]
    assert [node.needs(i) for i in range(2)] == [True, False]
    kept[0].close()
    assert [node.needs(i) for i in range(2)] == [True, True]


@pytest.mark.rule("E8", "E9", "E16")
def test_hooks_of_a_walk_inside_another_get_the_needed_gradients_of_their_own_walk() -> None:
    a, b = leaf("a"), leaf("b")
    seen: dict[str, list[bool]] = {}

    def record_needs(name: str) -> None:
        seen[name] = [node.needs(i) for i in range(2)]

    def fn(g: Any) -> Any:
        handles = [
            node.register_hook(lambda _: record_needs("slot")),
            node.register_prehook(lambda _: record_needs("before")),
            node.register_posthook(lambda *_: record_needs("behind")),
        ]
        p = fanin.walk([(node, 0, ones())], inputs=[a], keep_graph=True)
        for _, sums in p:
            record_needs("between")
            p.give((sums[0], None))
        for handle in handles:
            handle.remove()
        record_needs("function")
        return g, g

    node = Node(fn, edges=[(a, 0), (b, 0)])
    fanin.backward([(node, 0, ones())], keep_graph=True)
    assert {name for name, needs in seen.items() if needs == [True, False]} == {"slot", "before", "behind"}
    assert seen["between"] == seen["function"] == [True, True]  # the function's own pass


# Nodes in the making, edges that come late


class RunsCode:
    """A slot index that runs code when it is converted."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def __index__(self) -> int:
        self.do()
        return 0


def test_a_node_under_construction_cannot_be_found() -> None:
    w = leaf()

    def append() -> None:
        for o in gc.get_objects():
            if type(o) is Node and o.sequence_nr > w.sequence_nr:
                found.append(o)
                o.edges.append((w, 0))

    found: list[Any] = []
    node = Node(passed_on, edges=[(w, RunsCode(append)), (w, 0), (w, 0)])
    assert found == [] and len(node.edges) == 3
    assert gc.is_tracked(node)


def test_a_node_is_later_than_the_targets_of_its_edges() -> None:
    w = leaf()
    node = Node(lambda g: (g, g), edges=((Node(passed_on, edges=[(w, 0)]), 0) for _ in range(2)))
    below = [edge[0] for edge in node.edges]
    assert node.sequence_nr > max(n.sequence_nr for n in below)
    with pytest.raises(ValueError, match="closes a cycle"):
        below[1].edges.append((node, 0))
    fanin.backward([(node, 0, ones())])
    assert w.grad.tolist() == [2, 2]


def test_a_cycle_is_refused_on_every_path_that_closes_it() -> None:
    """Edges to later nodes, and then each edge that would close a circle with them, from old and from new nodes."""
    n = [Node(passed_on, name=f"n{i}") for i in range(8)]
    for i, k in ((1, 4), (4, 2), (2, 6), (6, 0)):
        n[i].edges.append((n[k], 0))
    new = Node(passed_on, edges=[(n[1], 0)])
    allowed = {(i, k) for i in range(8) for k in range(8) if not reaches(n[k], n[i])}
    n[6].edges.append((n[5], 0))
    assert allowed and len(allowed) < 64
    for i in range(8):
        for k in range(8):
            if reaches(n[k], n[i]):
                with pytest.raises(ValueError, match=f"^n{i}: an edge to n{k} closes a cycle"):
                    n[i].edges.append((n[k], 0))
    with pytest.raises(ValueError, match="closes a cycle"):
        n[5].edges.append((new, 0))
    new.edges.append((n[7], 0))
    n[0].edges.append((n[7], 0))


def test_an_edge_from_a_node_above_all_cycles_is_added_without_a_search() -> None:
    """A search allocates memory, and the allocation fails."""
    a, b = Node(passed_on), Node(passed_on)
    a.edges.append((b, 0))
    c = Node(passed_on, edges=[(a, 0)])
    chain = [Node(passed_on) for _ in range(10)]
    hooks.fail_at(0, -1)
    try:
        chain[0].edges.append((c, 0))
        for i in range(1, 10):
            chain[i].edges.append((chain[i - 1], 0))
        with pytest.raises(MemoryError):
            b.edges.append((c, 0))
    finally:
        hooks.fail_at(-1, 0)
    with pytest.raises(ValueError, match="closes a cycle"):
        b.edges.append((chain[9], 0))


def reaches(one: Any, two: Any) -> bool:
    return one is two or any(reaches(edge[0], two) for edge in one.edges)


# Where a pass ended


@pytest.mark.rule("E14", "E16")
def test_an_error_of_a_schedule_is_between_two_nodes() -> None:
    top: Any = leaf()
    for i in range(5):
        top = Node(passed_on, edges=[(top, 0)], name=f"n{i}")
    picks = iter([0] * 3)
    with pytest.raises(StopIteration) as caught:
        fanin.backward([(top, 0, ones())], schedule=lambda ready: ready[next(picks)])
    assert caught.value.__notes__[0] == "between nodes: 3 of 6 nodes had run"


@pytest.mark.rule("E14")
def test_ctrl_c_between_two_nodes_is_in_no_node() -> None:
    low = Node(passed_on, edges=[(leaf(), 0)], name="low")
    top = Node(passed_on, edges=[(low, 0)], name="top")
    last = Node(passed_on, edges=[(top, 0)], name="last", release=_Interrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        fanin.backward([(last, 0, ones())])
    assert caught.value.__notes__[0] == "between nodes: 1 of 4 nodes had run"


def _Interrupt() -> Callable[[], Any]:
    """Ctrl-C that the interpreter has not noticed yet when it returns: no line of Python is in between."""
    import _thread

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return _thread.interrupt_main


@pytest.mark.rule("E14")
def test_an_error_in_the_roots_is_in_the_roots() -> None:
    top = Node(passed_on, edges=[(leaf(), 0)], slots=[np.zeros(2)], name="top")
    with pytest.raises(ValueError) as caught:
        fanin.backward([(top, 0, np.ones(3))])
    assert caught.value.__notes__ == ["in the roots: 0 of 2 nodes had run"]


# Names


@pytest.mark.parametrize(
    "name", ["é" * 100, "a" + "é" * 100, "€" * 60, "🜁" * 40, "x" * 200], ids=["2", "1 2", "3", "4", "1"]
)
def test_a_long_name_is_cut_between_two_characters(name: str) -> None:
    w = leaf()
    node = Node(passed_on, edges=[(w, 0)], name=name)
    with fanin.trace():
        fanin.backward([(node, 0, ones()), (node, 0, ones())])
    assert w.grad.tolist() == [2, 2]
    said = repr(node).split(",")[0].removeprefix("<fanin.Node ")
    assert name.startswith(said) and 120 <= len(said.encode()) <= 127
    with pytest.raises(RuntimeError) as caught:
        fanin.backward([(node, 0, ones())])
    assert str(caught.value).startswith(f"{said} was freed")
