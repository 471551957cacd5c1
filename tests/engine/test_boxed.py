"""`Node(fn, boxed=True)`: the function owns the list of its sums, and what it pops is freed at once (H1)."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from kit import graphs
from kit.graphs import Built, draw
from kit.values import show

pytestmark = [pytest.mark.core, pytest.mark.rule("H1")]

N = 1 << 12
Slots = 4


class Bytes:
    """The bytes of the arrays that it has made or seen and that are alive, and the most at one time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def seen(self, x: Any) -> Any:
        self.now += x.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(x, self.gone, x.nbytes)
        return x

    def gone(self, n: int) -> None:
        self.now -= n


def fan(fn: Any, *, boxed: bool, count: Bytes, terms: int = 2) -> tuple[Any, Any]:
    """A node of four slots, each the sum of large gradients, above a leaf; and its root."""
    w = fanin.Leaf(np.zeros(1), name="w")
    node = fanin.Node(fn, Slots, edges=[(w, 0)], name="low", boxed=boxed)
    edges = [(node, slot) for slot in range(Slots)] * terms
    top = fanin.Node(lambda g: [count.seen(np.full(N, float(i))) for i in range(len(edges))], edges=edges, name="top")
    return w, [(top, 0, np.ones(1))]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"keep_graph": True}, {"detect": True}, {"budget": 0}])
def test_a_sum_that_is_popped_and_dropped_is_freed_at_once(terms: int, how: dict[str, Any]) -> None:
    count, gone = Bytes(), []

    def fn(sums: list[Any]) -> Any:
        assert type(sums) is list and len(sums) == Slots
        for _ in range(Slots):
            one = sums.pop()
            alive = weakref.ref(one)
            value = one[0]
            del one
            gone.append(alive() is None)
        return np.full(1, value)

    w, roots = fan(fn, boxed=True, count=count, terms=terms)
    fanin.backward(roots, **how)
    assert gone == [True] * Slots
    assert w.grad.tolist() == [0.0 if terms == 1 else 4.0]


def test_the_peak_of_a_chain_is_lower_by_the_sums_that_were_dropped() -> None:
    """Of each node all four sums live beside what it makes, without boxed; with it, one at a time."""

    def peak(boxed: bool) -> int:
        count = Bytes()

        def fn(*given: Any) -> Any:
            sums = given[0] if boxed else list(given)
            made = []
            while sums:
                g = sums.pop()
                made.append(count.seen(g * 2.0))
                del g
            return made[::-1]

        w = [fanin.Leaf(np.zeros(N), name=f"w{i}") for i in range(Slots)]
        below: Any = [(x, 0) for x in w]
        for k in range(5):
            node = fanin.Node(fn, Slots, edges=below, name=f"n{k}", boxed=boxed)
            below = [(node, i) for i in range(Slots)]
        fanin.backward([(node, i, np.ones(N)) for i in range(Slots)])
        return count.most // (8 * N)

    assert peak(False) == 2 * Slots
    assert peak(True) == Slots + 1


def test_boxed_nodes_give_the_bits_and_calls_of_others() -> None:
    seen = 0
    for seed in range(200):
        r = random.Random(seed)
        spec = draw(r, r.choice(graphs.KINDS))
        if any(n.post_hook for n in spec.nodes):
            continue
        plain, boxed = Built(spec, fanin), Built(spec, Boxing)
        assert plain.outcome() == boxed.outcome(), f"seed {seed}: {spec}"
        assert not boxed.changed()
        seen += 1
    assert seen > 100


class Boxing:
    """The engine, whose nodes are boxed."""

    Leaf, backward, grad = fanin.Leaf, fanin.backward, fanin.grad

    @staticmethod
    def Node(fn: Any, *args: Any, **named: Any) -> Any:
        return fanin.Node(lambda sums: fn(*sums), *args, boxed=True, **named)


def test_what_other_code_holds_stays_guarded() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")
    g = np.ones(2)

    def fn(sums: list[Any]) -> Any:
        with pytest.raises(ValueError, match="read-only"):
            sums[0] *= 2
        return sums.pop()

    fanin.backward([(fanin.Node(fn, edges=[(w, 0)], boxed=True), 0, g)])
    assert g.flags.writeable and g.tolist() == w.grad.tolist() == [1, 1]


def test_the_last_other_reference_may_go_while_the_function_runs() -> None:
    held = [np.ones(N)]
    w = fanin.Leaf(np.zeros(1), name="w")

    def fn(sums: list[Any]) -> Any:
        held.clear()
        sums.clear()
        gc.collect()
        return np.ones(1)

    root = (fanin.Node(fn, edges=[(w, 0)], boxed=True), 0, held[0])
    fanin.backward([root])
    del root
    assert w.grad.tolist() == [1]


def test_a_function_may_keep_or_change_its_list() -> None:
    kept: list[Any] = []
    w = fanin.Leaf(np.zeros(2), name="w")

    def fn(sums: list[Any]) -> Any:
        kept.append(sums)
        sums.append("more")
        sums.extend(range(50))
        return sums[0]

    fanin.backward([(fanin.Node(fn, edges=[(w, 0)], boxed=True), 0, np.ones(2))])
    assert kept[0][0].tolist() == [1, 1] and w.grad.tolist() == [1, 1]


def test_an_undefined_sum_is_none_in_the_list() -> None:
    seen: list[Any] = []
    w = fanin.Leaf(np.zeros(2), name="w")
    low = fanin.Node(lambda sums: seen.append(list(sums)), 2, edges=[(w, 0)], boxed=True)
    top = fanin.Node(lambda g: (g, None), edges=[(low, 0), (low, 1)])
    fanin.backward([(top, 0, np.ones(2))])
    assert [x is None for x in seen[0]] == [False, True]


def test_hooks_before_the_node_get_the_sums_and_may_replace_them() -> None:
    log: list[Any] = []
    w = fanin.Leaf(np.zeros(2), name="w")
    node = fanin.Node(lambda sums: sums.pop(), edges=[(w, 0)], name="node", boxed=True)
    node.register_hook(lambda g: log.append(("slot", show(g))))
    node.register_prehook(lambda sums: (sums[0] * 3,))
    fanin.backward([(node, 0, np.ones(2))])
    assert len(log) == 1 and w.grad.tolist() == [3, 3]


def test_what_retain_grad_and_grad_keep_is_theirs() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")
    node = fanin.Node(lambda sums: sums.pop() * 2, edges=[(w, 0)], name="node", boxed=True)
    node.retain_grad()
    g, of_w = fanin.grad([(node, 0, np.ones(2))], [node, w])
    assert g.tolist() == [1, 1] and of_w.tolist() == [2, 2] and node.grad.tolist() == [1, 1]


def test_a_walk_gives_the_list_to_its_caller_alone() -> None:
    count = Bytes()
    w, roots = fan(lambda sums: np.full(1, sums.pop()[0]), boxed=True, count=count)
    for node, sums in (walk := fanin.walk(roots)):
        if not node.boxed:
            walk.give(node.fn(*sums))
            continue
        assert type(sums) is list
        one = weakref.ref(sums[0])
        del sums[0]
        assert one() is None
        walk.give(node.fn(sums))
        del sums
    assert w.grad.tolist() == [10.0]


def test_a_walk_that_ends_early_over_a_boxed_node() -> None:
    w, roots = fan(lambda sums: np.ones(1), boxed=True, count=Bytes())
    walk = fanin.walk(roots)
    node, sums = next(walk)
    walk.give(node.fn(*sums))
    node, sums = next(walk)
    sums.clear()
    with pytest.raises(ValueError, match=r"low returned an invalid number of gradients"):
        walk.give((1, 2, 3))
    assert w.grad is None


def test_an_error_in_the_function_ends_the_pass_and_nothing_is_lost() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")

    def fn(sums: list[Any]) -> Any:
        sums.pop()
        raise KeyError("here")

    with pytest.raises(KeyError) as e:
        fanin.backward([(fanin.Node(fn, edges=[(w, 0)], name="node", boxed=True), 0, np.ones(2))])
    assert any("in node" in note for note in e.value.__notes__) and w.grad is None


def test_what_cannot_be_boxed_is_refused_by_name() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")
    node = fanin.Node(lambda sums: sums.pop(), edges=[(w, 0)], name="node", boxed=True)
    assert node.boxed and not fanin.Node(lambda g: g).boxed
    with pytest.raises(ValueError, match=r"node: register_posthook: .*give boxed=False, or register_prehook"):
        node.register_posthook(lambda sums, gradients: None)
    with pytest.raises(TypeError, match="boxed"):
        fanin.Node(lambda g: g, boxed=1)  # type: ignore[arg-type]

    class Early(fanin.Node):
        def __new__(cls) -> Any:
            made = super().__new__(cls)
            made.register_posthook(lambda sums, gradients: None)
            return made

        def __init__(self) -> None:
            super().__init__(lambda sums: sums.pop(), edges=[(w, 0)], name="early", boxed=True)

    with pytest.raises(ValueError, match="early: boxed: a hook after the node gets its sums"):
        Early()


def test_a_subclass_may_be_boxed() -> None:
    class Double(fanin.Node):
        def __init__(self, to: Any) -> None:
            super().__init__(self.gradients, edges=[(to, 0)], boxed=True)

        def gradients(self, sums: list[Any]) -> Any:
            return 2 * sums.pop()

    w = fanin.Leaf(np.zeros(2), name="w")
    fanin.backward([(Double(w), 0, np.ones(2))])
    assert w.grad.tolist() == [2, 2]
