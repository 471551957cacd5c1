"""`progress=`: reports to the caller how far a long pass is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin

pytestmark = pytest.mark.core


def fan(n: int, fn: Callable[[Any], Any] = lambda g: g) -> tuple[list[Any], fanin.Leaf]:
    leaf = fanin.Leaf(np.zeros(1), name="w")
    nodes = [fanin.Node(fn, edges=[(leaf, 0)], name=f"n{i}") for i in range(n)]
    top = fanin.Node(lambda g: [g] * n, edges=[(node, 0) for node in nodes], name="top")
    return [(top, 0, np.ones(1))], leaf


def by_hand(roots: list[Any], progress: Any) -> None:
    for node, sums in (p := fanin.walk(roots, progress=progress)):
        p.give(node.fn(*sums))


WAYS: dict[str, Callable[[list[Any], fanin.Leaf, Any], Any]] = {
    "backward": lambda roots, leaf, progress: fanin.backward(roots, progress=progress),
    "grad": lambda roots, leaf, progress: fanin.grad(roots, [leaf], progress=progress),
    "walk": lambda roots, leaf, progress: by_hand(roots, progress),
}


@pytest.mark.parametrize("way", WAYS)
def test_progress_is_called_for_each_node_and_leaf_from_none_to_all(way: str) -> None:
    roots, leaf = fan(4)
    heard: list[tuple[int, int]] = []
    WAYS[way](roots, leaf, lambda *how: heard.append(how))
    assert heard == [(ran, 6) for ran in range(7)]


@pytest.mark.rule("E12")
@pytest.mark.parametrize("workers", [2, 4])
def test_on_several_workers_progress_rises_never_runs_twice_at_once_and_ends_with_all(workers: int) -> None:
    barrier = threading.Barrier(2)
    roots, leaf = fan(40, lambda g: (barrier.wait(), g)[1])
    heard: list[tuple[int, int]] = []
    inside = 0

    def progress(ran: int, known: int) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        heard.append((ran, known))
        np.sort(np.random.default_rng(0).random(20_000))  # lets others in
        inside -= 1

    fanin.backward(roots, workers=workers, progress=progress)
    numbers = [ran for ran, _ in heard]
    assert numbers == sorted(set(numbers)) and (numbers[0], heard[-1]) == (0, (42, 42))
    assert leaf.grad[0] == 40


@pytest.mark.rule("E12")
def test_ready_nodes_begin_on_other_workers_while_progress_runs() -> None:
    """Of two nodes that are ready once the top has run, a helper begins one: so `progress` may wait for it."""
    begun, heard = threading.Event(), []

    def fn(g: Any) -> Any:
        begun.set()
        return g

    def progress(ran: int, known: int) -> None:
        heard.append(ran)
        if ran == 1:
            begun.wait()

    roots, leaf = fan(2, fn)
    fanin.backward(roots, workers=2, progress=progress)
    assert heard[-1] == 4 and leaf.grad[0] == 2


@pytest.mark.rule("E12")
def test_with_progress_a_chain_stays_on_the_thread_of_its_caller_too() -> None:
    leaf, here = fanin.Leaf(np.zeros(1)), set()
    node: Any = leaf
    for _ in range(20):
        node = fanin.Node(lambda g: (here.add(threading.get_ident()), g)[1], edges=[(node, 0)])
    fanin.backward([(node, 0, np.ones(1))], workers=4, progress=lambda ran, known: None)
    assert here == {threading.get_ident()}


@pytest.mark.rule("E14")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 3])
def test_an_error_of_progress_ends_the_pass_between_nodes(way: str, at: int) -> None:
    roots, leaf = fan(4)

    def progress(ran: int, known: int) -> None:
        if ran == at:
            raise ArithmeticError("enough")

    with pytest.raises(ArithmeticError, match="enough") as e:
        WAYS[way](roots, leaf, progress)
    assert f"between nodes: {at} of 6 nodes had run" in e.value.__notes__[0]
    assert leaf.grad is None


@pytest.mark.rule("E12", "E14")
def test_an_error_of_progress_ends_a_pass_of_several_workers() -> None:
    barrier = threading.Barrier(2)
    roots, _ = fan(40, lambda g: (barrier.wait(), g)[1])
    calls = 0

    def progress(ran: int, known: int) -> None:
        nonlocal calls
        calls += 1
        if ran >= 41:  # all nodes, and no leaf
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fanin.backward(roots, workers=2, progress=progress)
    assert calls > 1


def test_progress_may_start_a_pass_with_a_progress_of_its_own() -> None:
    roots, _ = fan(2)
    inner: list[tuple[int, int]] = []

    def progress(ran: int, known: int) -> None:
        if ran == 2:
            fanin.backward(fan(1)[0], progress=lambda *how: inner.append(how))

    fanin.backward(roots, progress=progress)
    assert inner == [(ran, 3) for ran in range(4)]


def test_progress_is_a_function_or_none() -> None:
    roots, _ = fan(1)
    fanin.backward(roots, progress=None, keep_graph=True)
    with pytest.raises(TypeError, match="progress: expected a function, got an int"):
        fanin.backward(roots, progress=3)  # type: ignore[arg-type]


def test_a_walk_references_its_progress_and_the_collector_traverses_it() -> None:
    import gc
    import weakref

    class Told:
        walk: Any = None

        def __call__(self, ran: int, known: int) -> None: ...

    heard = Told()
    heard.walk = fanin.walk(fan(2)[0], progress=heard)
    next(heard.walk)
    gone = weakref.ref(heard)
    del heard
    gc.collect()
    assert gone() is None
