"""`fanin.order` names the nodes of a pass, before it runs, in the order in which it then runs them (G1)."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit import graphs
from kit.graphs import Built, draw
from kit.sample import sizes

pytestmark = [pytest.mark.core, pytest.mark.rule("G1")]

One = np.ones(2)
Guess = Callable[[list[Any], Any], list[int]]


def inputs_of(built: Built) -> list[Any] | None:
    return None if built.spec.inputs is None else [built.input(*place) for place in built.spec.inputs]


def ran(call: Callable[[], Any]) -> list[int]:
    """The numbers of the nodes and leaves of the outermost pass of a call, in the order in which they ran."""
    with fanin.trace() as trace:
        call()
    nodes = [line for line in trace.lines if line.kind == "node"]
    outermost = min((line.pass_number for line in nodes), default=0)
    return [line.node for line in nodes if line.pass_number == outermost]


def as_engine(roots: list[Any], inputs: Any) -> list[int]:
    return [node.sequence_nr for node in fanin.order(roots, inputs)]


def by_number(roots: list[Any], inputs: Any) -> list[int]:
    """A planted fault: whatever is made later runs first, leaves too."""
    return sorted(as_engine(roots, inputs), reverse=True)


def after_the_first(roots: list[Any], inputs: Any) -> list[int]:
    """A planted fault: a leaf runs after the first of its gradients, not after the last."""
    found = fanin.order(roots, inputs)
    leaves = {node for node in found if isinstance(node, fanin.Leaf)}
    made: list[Any] = []
    for root in roots:
        made += [root[0]] if root[0] in leaves else []
    for node in found:
        if node not in leaves:
            made += [node, *(edge[0] for edge in node.edges if edge and edge[0] in leaves)]
    return [node.sequence_nr for node in dict.fromkeys(made)]


def differs(seed: int, guess: Guess, seen: Counter[str]) -> bool:
    """Whether a guess of the order is wrong for this graph."""
    r = random.Random(seed)
    built = Built(draw(r, r.choice(graphs.KINDS)), fanin)
    if not built.whole:
        return False
    expected = guess([root[:2] for root in built.roots()], inputs_of(built))
    got = ran(lambda: built.run(False))
    seen["graphs"] += 1
    seen["inputs"] += built.spec.inputs is not None
    seen["nested"] += any(kind == "nested" for kind, *_ in built.log)
    seen["several"] += len(got) > 3
    return got != expected


@pytest.mark.parametrize("count", sizes(300, 5000))
def test_random_passes_run_in_the_order_that_was_said(count: int) -> None:
    first = int(os.environ.get("FANIN_SEED", 0)) or random.randrange(2**32)
    print(f"FANIN_SEED={first}")
    seen: Counter[str] = Counter()
    wrong = [seed for seed in range(first, first + count) if differs(seed, as_engine, seen)]
    assert not wrong, wrong
    assert seen["inputs"] and seen["nested"] and seen["several"] > count // 4, seen


@pytest.mark.parametrize("guess", [by_number, after_the_first])
def test_a_planted_order_is_found(guess: Guess) -> None:
    seen: Counter[str] = Counter()
    assert any(differs(seed, guess, seen) for seed in range(300))


def diamond() -> tuple[Any, ...]:
    w = fanin.Leaf(np.zeros(2), name="w")
    left = fanin.Node(lambda g: g, edges=[(w, 0)], name="left")
    right = fanin.Node(lambda g: g, edges=[(w, 0)], name="right")
    top = fanin.Node(lambda g: (g, g), edges=[(left, 0), (right, 0)], name="top")
    return w, left, right, top


def test_nothing_runs_and_nothing_is_freed() -> None:
    w, left, right, top = diamond()
    assert list(fanin.order([top])) == [top, right, left, w]
    assert w.grad is None and not top.freed
    fanin.backward([(top, 0, One)])
    assert w.grad.tolist() == [2, 2]


def test_a_walk_and_an_order_agree() -> None:
    top = diamond()[-1]
    found = fanin.order([(top, 0)])
    walk = fanin.walk([(top, 0, One)])
    walked = []
    for node, sums in walk:
        walked.append(node)
        walk.give(node.fn(*sums))
    assert walked == [node for node in found if isinstance(node, fanin.Node)]


def test_inputs_limit_the_order_as_they_limit_the_pass() -> None:
    _, left, _, top = diamond()
    found = fanin.order([top], [left])
    assert list(found) == [top, left]
    assert found.explain(left).endswith("its sum is a result, its function does not run (E8)")


def test_an_order_explains_itself() -> None:
    w, left, right, top = diamond()
    n = [x.sequence_nr for x in (w, left, right, top)]
    assert fanin.order([top]).explain() == (
        f"1. top (node {n[3]}): ready at the beginning; no other node is ready\n"
        f"2. right (node {n[2]}): ready after top; of 2 ready nodes it was made last ({n[2]} > {n[1]} of left)\n"
        f"3. left (node {n[1]}): ready after top; no other node is ready\n"
        f"4. w (leaf {n[0]}): ready after left; leaves go before all nodes (E2)"
    )
    assert fanin.order([top]).explain(w).startswith("4. w (leaf")
    assert repr(fanin.order([top])) == "<fanin.Order: top > right > left > w>"


def test_an_explanation_of_a_long_order_is_short() -> None:
    node: Any = fanin.Leaf(np.zeros(2))
    for _ in range(300):
        node = fanin.Node(lambda g: g, edges=[(node, 0)])
    found = fanin.order([node])
    assert len(found) == 301 and found[0] is node
    assert found.explain().splitlines()[-1] == ".. and 201 more: explain(node)"
    assert repr(found).endswith(".. 289 more>")


def test_on_several_workers_each_node_runs_after_those_that_give_to_it() -> None:
    for seed in range(40):
        r = random.Random(seed)
        built = Built(draw(r, "arrays"), fanin)
        if not built.whole:
            continue
        found = fanin.order(built.roots(), inputs_of(built))
        roots, inputs = built.roots(), inputs_of(built)
        call = fanin.grad if built.spec.capture else fanin.backward
        got = ran(lambda: call(roots, inputs, keep_graph=True, workers=3))  # noqa: B023
        assert sorted(got) == sorted(node.sequence_nr for node in found), seed
        place = {number: i for i, number in enumerate(got)}
        starts: dict[int, int] = {}
        for node in found:
            if node.sequence_nr in starts:
                assert place[node.sequence_nr] > starts[node.sequence_nr], seed
            if isinstance(node, fanin.Node) and "does not run" not in found.explain(node):
                for edge in node.edges:
                    if edge and edge[0].sequence_nr in place:
                        at = starts.get(edge[0].sequence_nr, -1)
                        starts[edge[0].sequence_nr] = max(at, place[node.sequence_nr])


def test_wrong_arguments_are_those_of_a_pass() -> None:
    _, left, right, top = diamond()
    with pytest.raises(TypeError, match=r"order: roots: expected a sequence, got one root: give \[node\]"):
        fanin.order(top)
    with pytest.raises(TypeError, match=r"order: root 0: expected a fanin\.Node, a fanin\.Leaf or \(node, slot\), got"):
        fanin.order([np.ones(2)])  # type: ignore[list-item]
    with pytest.raises(IndexError, match="order: root 0: expected a slot from 0 to 0 of top, got 3"):
        fanin.order([(top, 3)])
    with pytest.raises(TypeError, match=r"order: input 0: expected a fanin\.Leaf"):
        fanin.order([top], [3])
    with pytest.raises(ValueError, match="order: inputs: expected at least one"):
        fanin.order([top], [])
    with pytest.raises(ValueError, match=r"explain: left is not in this order"):
        fanin.order([right]).explain(left)
    with pytest.raises(TypeError, match=r"explain: expected a fanin\.Node, a fanin.Leaf or None, got an int"):
        fanin.order([right]).explain(3)  # type: ignore[arg-type]
    fanin.free([top])
    with pytest.raises(RuntimeError, match=r"top.* freed"):
        fanin.order([top])
    assert list(fanin.order([])) == [] and fanin.order([]).explain() == "The pass runs no node."
