"""The rules E and V, on the core's engine and on the reference: what a pass runs, when, with what, and how it ends.

What is the core's alone (passes by hand, schedules, threads, depth) is in the second half.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import fanin

pytestmark = pytest.mark.core


def ones(n: int = 2) -> Any:
    return np.ones(n, np.float32)


def leaf(e: Any, name: str = "w", n: int = 2) -> Any:
    return e.Leaf(np.zeros(n, np.float32), name=name)


# E1: counted once, per edge


@pytest.mark.rule("E1")
def test_a_repeated_edge_counts_twice(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low"), edges=[(w, 0)])
    top = e.Node(log.node("top", lambda g: (g, 2 * g)), edges=[(low, 0), (low, 0)])
    e.backward([(top, 0, ones())])
    assert log == ["top", "low"] and w.grad.tolist() == [3, 3]


@pytest.mark.rule("E1")
def test_a_node_waits_for_the_longest_path_to_it(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low"), edges=[(w, 0)], name="low")
    way = low
    for i in range(5):
        way = e.Node(log.node(f"way {i}"), edges=[(way, 0)])
    top = e.Node(log.node("top", lambda g: (g, g)), edges=[(low, 0), (way, 0)])
    e.backward([(top, 0, ones())])
    assert log == ["top", "way 4", "way 3", "way 2", "way 1", "way 0", "low"] and w.grad.tolist() == [2, 2]


@pytest.mark.rule("E1")
def test_a_node_runs_if_all_its_gradients_are_undefined(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low", lambda g: log.append(g)), edges=[(w, 0)])
    top = e.Node(lambda g: (None, None), edges=[(low, 0), (low, 0)])
    e.backward([(top, 0, ones())])
    assert log == ["low", None] and w.grad is None


@pytest.mark.rule("E1")
def test_a_slot_to_which_no_edge_leads_is_undefined(e: Any, log: Any) -> None:
    w = leaf(e)
    split = e.Node(log.node("split", lambda a, b, c: log.append((a is None, b is None, c is None)) or b), 3, [(w, 0)])
    e.backward([(split, 1, ones())])
    assert log == ["split", (True, False, True)] and w.grad.tolist() == [1, 1]


@pytest.mark.rule("E1")
def test_roots_are_edges_too(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low"), edges=[(w, 0)])
    top = e.Node(log.node("top"), edges=[(low, 0)])
    e.backward([(low, 0, ones()), (top, 0, 2 * ones()), (low, 0, 4 * ones()), (w, 0, 8 * ones())])
    assert log == ["top", "low"] and w.grad.tolist() == [15, 15]


@pytest.mark.rule("E1")
def test_a_none_edge_accepts_every_gradient(e: Any) -> None:
    w = leaf(e)
    top = e.Node(lambda g: ("anything", g, None), edges=[None, (w, 0), None])
    e.backward([(top, 0, ones())])
    assert w.grad.tolist() == [1, 1]
    assert [top.needs(i) for i in range(3)] == [False, True, False]


# E2: which node runs first


@pytest.mark.rule("E2")
def test_of_ready_nodes_the_latest_made_runs_first(e: Any, log: Any) -> None:
    a, b, c = (e.Node(log.node(x, lambda g: ()), name=x) for x in "abc")
    top = e.Node(lambda g: (g, g, g), edges=[(b, 0), (c, 0), (a, 0)])
    e.backward([(top, 0, ones())])
    assert log == ["c", "b", "a"]


@pytest.mark.rule("E2")
def test_ready_leaves_run_before_nodes_in_the_order_in_which_they_became_ready(e: Any, log: Any) -> None:
    w = [leaf(e, f"w{i}") for i in range(3)]
    for x in w:
        x.register_hook(log.hook(x.name))
    late = [e.Node(log.node(f"n{i}", lambda g: g), edges=[(w[2], 0)]) for i in range(2)]
    top = e.Node(log.node("top", lambda g: (g, g, g, g)), edges=[(w[1], 0), (late[0], 0), (late[1], 0), (w[0], 0)])
    e.backward([(top, 0, ones())])
    assert log == ["top", "w1", "w0", "n1", "n0", "w2"]


@pytest.mark.rule("E3")
def test_cpu_nodes_run_on_the_callers_thread(e: Any) -> None:
    w, seen = leaf(e), []
    top = e.Node(lambda g: seen.append(threading.get_ident()) or g, edges=[(w, 0)])
    w.register_hook(lambda g: seen.append(threading.get_ident()))
    e.backward([(top, 0, ones())])
    assert seen == [threading.get_ident()] * 2


# A15, A14: bits and identity


@pytest.mark.rule("A15", "E2")
def test_the_order_of_a_sum_is_the_graphs_not_that_of_arrival(e: Any) -> None:
    """1e8 + 1 - 1e8 in float32 shows which term was added first: roots, then producers from late to early."""
    w = leaf(e, n=1)
    big = np.array([1e8], np.float32)
    first, second, third = (e.Node(lambda g, k=k: k, edges=[(w, 0)]) for k in (-big, np.ones(1, np.float32), big))
    chain = e.Node(lambda g: g, edges=[(third, 0)])  # the third one made becomes ready later than the others
    for roots in ([first, second, chain], [chain, second, first], [second, chain, first]):
        got = e.grad([(x, 0, np.ones(1, np.float32)) for x in roots], [w], keep_graph=True)
        assert got[0].tolist() == [0.0]  # (1e8 + 1) - 1e8
    e.backward([(w, 0, -big), (first, 0, big), (second, 0, big), (third, 0, big)])
    assert w.grad.tolist() == [(np.float32(-1e8) + np.float32(1e8) + np.float32(1) - np.float32(1e8)).item()]


@pytest.mark.rule("A15", "E2")
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_gradients_of_roots_for_one_slot_are_added_in_the_callers_order(e: Any, log: Any, names: str) -> None:
    """Whether the roots begin with the latest node or with the earliest one."""
    w = {x: leaf(e, x, n=1) for x in "ab"}
    nodes = {x: e.Node(log.node(x), edges=[(w[x], 0)], name=x) for x in "ab"}
    times = {"a": 1, "b": 2}
    e.backward([(nodes[x], 0, np.full(1, times[x] * g, np.float32)) for g in (1e8, -1e8, 1.0) for x in names])
    assert log == ["b", "a"]
    assert [w[x].grad.tolist() for x in "ab"] == [[1.0], [2.0]]  # (1e8 - 1e8) + 1; the other way round it is 0


@pytest.mark.rule("A14", "E4")
def test_a_gradient_with_one_producer_is_handed_through(e: Any) -> None:
    seen: list[Any] = []
    low = e.Node(lambda g: seen.append(g) or ())
    top = e.Node(lambda g: g, edges=[(low, 0)])
    g = ones()
    e.backward([(top, 0, g)])
    assert seen[0] is g


@pytest.mark.rule("A6", "A8")
def test_a_gradient_for_two_slots_is_written_by_neither(e: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    low = e.Node(lambda g: (g, g), edges=[(w, 0), (v, 0)])
    top = e.Node(lambda g: (g, g, g), edges=[(low, 0), (low, 0), (w, 0)])
    g = ones()
    e.backward([(top, 0, g)])
    assert g.tolist() == [1, 1] and w.grad.tolist() == [3, 3] and v.grad.tolist() == [2, 2]
    e.backward([(w, 0, ones())])
    assert v.grad.tolist() == [2, 2]


# E4, E9: hooks


@pytest.mark.rule("E4", "E9", "L9")
def test_hooks_run_in_their_order_around_the_function(e: Any, log: Any) -> None:
    w = leaf(e)
    w.register_hook(log.hook("leaf"))
    w.register_post_accumulate_grad_hook(lambda x: log.append(("after", x is w, w.grad.tolist())))
    node = e.Node(log.node("fn"), edges=[(w, 0)], release=log.hook("release"))
    node.register_posthook(lambda sums, gradients: log.append(("post", len(sums), len(gradients))))
    node.register_prehook(log.hook("pre"))
    node.register_hook(log.hook("slot, first"))
    node.register_hook(log.hook("slot, second"))
    e.backward([(node, 0, ones())])
    assert log == [
        "slot, first", "slot, second", "pre", "fn", ("post", 1, 1), "release", "leaf", ("after", True, [1, 1])
    ]  # fmt: skip


@pytest.mark.rule("E4", "E9")
def test_a_hook_gets_the_finished_sum_once(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low"), edges=[(w, 0)])
    low.register_hook(lambda g: log.append(g.tolist()))
    top = e.Node(lambda g: (g, g, None), edges=[(low, 0)] * 3)
    e.backward([(top, 0, ones())])
    assert log == [[2, 2], "low"]


@pytest.mark.rule("E9")
def test_each_kind_of_hook_may_replace(e: Any) -> None:
    w = leaf(e)
    node = e.Node(lambda a, b: a if b is None else a + b, 2, [(w, 0)])
    node.register_hook(lambda g: g * 2)
    node.register_prehook(lambda sums: (sums[0] + 1, sums[1]))
    node.register_posthook(lambda sums, gradients: (gradients[0] * 10,))
    w.register_hook(lambda g: g + 5)
    e.backward([(node, 0, ones())])
    assert w.grad.tolist() == [35, 35]  # ((1 * 2) + 1) * 10 + 5


@pytest.mark.rule("E9")
def test_a_slot_hook_runs_for_its_slot_unless_the_gradient_is_undefined(e: Any, log: Any) -> None:
    node = e.Node(log.node("fn", lambda a, b: ()), 2)
    node.register_hook(log.hook("slot 0"), slot=0)
    node.register_hook(log.hook("slot 1"), slot=1)
    e.backward([(node, 1, ones())])
    assert log == ["slot 1", "fn"]


@pytest.mark.rule("E9")
@pytest.mark.parametrize("new", [np.ones(3, np.float32), np.ones(2, np.float64)], ids=["shape", "dtype"])
def test_a_hook_must_return_the_kind_that_it_received(e: Any, new: Any) -> None:
    w = leaf(e)
    node = e.Node(lambda g: g, edges=[(w, 0)], name="Mul")
    node.register_hook(lambda g: new)
    with pytest.raises((ValueError, TypeError), match=r"a hook of .*Mul returned an invalid gradient: expected"):
        e.backward([(node, 0, ones())])
    assert w.grad is None


@pytest.mark.rule("E9")
@pytest.mark.parametrize(
    ("new", "kind"),
    [
        ((None, None), ValueError),
        ((ones(), ones()), ValueError),
        ([ones(), None], TypeError),
        ((ones(),), TypeError),
        ((sp.coo_array(ones()), None), ValueError),
    ],
    ids=["forgets", "makes up", "a list", "too few", "sparse for dense"],
)
def test_a_pre_hook_must_return_each_sum_in_its_kind(e: Any, log: Any, new: Any, kind: Any) -> None:
    node = e.Node(log.node("fn"), 2, name="Mul")
    node.register_prehook(lambda sums: new)
    with pytest.raises(kind, match=r"hook of Mul returned") as caught:
        e.backward([(node, 0, ones())])
    assert log == [] and "0 of 1 node" in caught.value.__notes__[0]
    as_it_was = e.Node(lambda *sums: log.append([s is None for s in sums]), 2, name="Mul")
    as_it_was.register_prehook(lambda sums: (ones() * 2, None))
    e.backward([(as_it_was, 0, ones())])
    assert log == [[False, True]]


@pytest.mark.rule("E9")
def test_a_slot_hook_keeps_dense_dense_and_sparse_sparse(e: Any) -> None:
    for was, new in ((ones(), sp.coo_array(ones())), (sp.coo_array(ones()), ones())):
        node = e.Node(lambda g: None, name="Mul")
        node.register_hook(lambda g, new=new: new)
        with pytest.raises(ValueError, match=r"hook of .*Mul returned an invalid gradient: expected"):
            e.backward([(node, 0, was)])


@pytest.mark.rule("E14", "V2")
def test_a_node_whose_gradients_are_refused_counts_as_run(e: Any) -> None:
    node = e.Node(lambda g: np.ones(7), edges=[(leaf(e), 0)], name="Mul")
    with pytest.raises(ValueError, match=r"^Mul returned an invalid gradient at index 0") as caught:
        e.backward([(node, 0, ones())])
    assert caught.value.__notes__[0].endswith("1 of 2 nodes had run")


@pytest.mark.rule("E9")
def test_a_removed_hook_does_not_run(e: Any, log: Any) -> None:
    w = leaf(e)
    handles = [
        w.register_hook(log.hook("a")),
        w.register_hook(log.hook("b")),
        w.register_post_accumulate_grad_hook(log.hook("c")),
    ]
    for handle in (handles[0], handles[2], handles[0]):
        handle.remove()
    e.backward([(w, 0, ones())])
    assert log == ["b"]


@pytest.mark.rule("E9")
def test_a_hook_that_changes_the_list_counts_from_the_next_pass_on(e: Any, log: Any) -> None:
    w, handles = leaf(e), []

    def first(g: Any) -> None:
        log.append("first")
        handles.pop().remove()
        w.register_hook(log.hook("third"))

    w.register_hook(first)
    handles.append(w.register_hook(log.hook("second")))
    e.backward([(w, 0, ones())])
    assert log == ["first", "second"]
    handles.append(w.register_hook(log.hook("fourth")))
    log.clear()
    e.backward([(w, 0, ones())])
    assert log == ["first", "third", "fourth"]


# E6, E14: errors


class Boom(Exception):
    pass


def throws(*_: Any) -> Any:
    raise Boom("thrown")


@pytest.mark.rule("E6", "E14")
def test_the_same_exception_reaches_the_caller_with_a_note_of_the_nodes_name(e: Any) -> None:
    w, error = leaf(e), Boom("thrown")

    def fn(g: Any) -> Any:
        raise error

    bad = e.Node(fn, edges=[(w, 0)], name="Bad")
    top = e.Node(lambda g: g, edges=[(bad, 0)])
    with pytest.raises(Boom) as caught:
        e.backward([(top, 0, ones())])
    assert caught.value is error
    [note] = error.__notes__
    assert note == f"in Bad (node {bad.sequence_nr}): 1 of 3 nodes had run"


THROWERS: dict[str, Callable[[Any, Any], None]] = {
    "slot hook": lambda node, w: node.register_hook(throws),
    "pre-hook": lambda node, w: node.register_prehook(throws),
    "post-hook": lambda node, w: node.register_posthook(throws),
    "leaf hook": lambda node, w: w.register_hook(throws),
}


@pytest.mark.rule("E6", "E14")
@pytest.mark.parametrize("where", [*THROWERS, "function", "release"])
def test_a_leaf_has_its_whole_gradient_or_none_of_it(e: Any, where: str, log: Any) -> None:
    """Of two leaves the first is reached before the error, the second would be after it, with one of two gradients."""
    early, late = leaf(e, "early"), leaf(e, "late")
    bad = e.Node(
        throws if where == "function" else log.node("bad"),
        edges=[(late, 0)],
        release=throws if where == "release" else None,
    )
    if where in THROWERS:
        THROWERS[where](bad, late)
    top = e.Node(lambda g: (g, g, g), edges=[(early, 0), (late, 0), (bad, 0)])
    with pytest.raises(Boom):
        e.backward([(top, 0, ones())], keep_graph=where != "release")
    assert early.grad.tolist() == [1, 1] and late.grad is None


@pytest.mark.rule("E6", "L9")
def test_an_error_after_the_accumulate_leaves_it_accumulated(e: Any) -> None:
    w = leaf(e)
    w.register_post_accumulate_grad_hook(throws)
    with pytest.raises(Boom):
        e.backward([(w, 0, ones())])
    assert w.grad.tolist() == [1, 1]


@pytest.mark.rule("E6")
def test_after_an_error_the_graph_can_be_walked_again(e: Any) -> None:
    w, fail = leaf(e), [True]

    def fn(g: Any) -> Any:
        if fail.pop():
            throws()
        return g

    node = e.Node(fn, edges=[(w, 0)])
    top = e.Node(lambda g: (g, g), edges=[(node, 0), (node, 0)])
    with pytest.raises(Boom):
        e.backward([(top, 0, ones())], keep_graph=True)
    assert w.grad is None
    fail.append(False)
    e.backward([(top, 0, ones())], keep_graph=True)
    assert w.grad.tolist() == [2, 2]


@pytest.mark.rule("E14")
def test_ctrl_c_in_a_function_ends_the_pass(e: Any, log: Any) -> None:
    w = leaf(e)
    low = e.Node(log.node("low"), edges=[(w, 0)])

    def fn(g: Any) -> Any:
        raise KeyboardInterrupt

    top = e.Node(fn, edges=[(low, 0)], name="top")
    with pytest.raises(KeyboardInterrupt) as caught:
        e.backward([(top, 0, ones())])
    assert log == [] and w.grad is None and "in top" in caught.value.__notes__[0]


# E7: passes inside passes


@pytest.mark.rule("E7")
def test_a_pass_inside_a_node_has_its_own_counts(e: Any, log: Any) -> None:
    w = leaf(e)
    shared = e.Node(log.node("shared"), edges=[(w, 0)])

    def fn(g: Any) -> Any:
        log.append("begin")
        e.backward([(shared, 0, 10 * ones())], keep_graph=True)
        log.append(w.grad.tolist())
        return g

    top = e.Node(fn, edges=[(shared, 0)])
    other = e.Node(log.node("other"), edges=[(shared, 0)])
    e.backward([(top, 0, ones()), (other, 0, ones())])
    assert log == ["other", "begin", "shared", [10, 10], "shared"] and w.grad.tolist() == [12, 12]


@pytest.mark.rule("E7", "E6")
def test_an_error_in_a_pass_inside_ends_both_and_names_both(e: Any) -> None:
    inner = e.Node(throws, name="inner")
    outer = e.Node(lambda g: e.backward([(inner, 0, g)]), name="outer")
    with pytest.raises(Boom) as caught:
        e.backward([(outer, 0, ones())])
    assert [note.partition(" (")[0] for note in caught.value.__notes__] == ["in inner", "in outer"]


# E8: inputs=


@pytest.mark.rule("E8")
def test_inputs_limit_the_pass_to_what_they_need(e: Any, log: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    to_w = e.Node(log.node("to w"), edges=[(w, 0)])
    to_v = e.Node(log.node("to v"), edges=[(v, 0)])
    needs: list[bool] = []
    top = e.Node(
        lambda g: needs.extend([top.needs(0), top.needs(1), top.needs(2)]) or (g, g, g),
        edges=[(to_w, 0), (to_v, 0), None],
    )
    e.backward([(top, 0, ones())], [w], keep_graph=True)
    assert log == ["to w"] and needs == [True, False, False] and w.grad.tolist() == [1, 1] and v.grad is None
    assert [top.needs(i) for i in range(3)] == [True, True, False]
    e.backward([(top, 0, ones())], keep_graph=True)
    assert log == ["to w", "to v", "to w"] and v.grad.tolist() == [1, 1]


@pytest.mark.rule("E8")
def test_gradients_that_no_input_needs_are_not_checked(e: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    top = e.Node(lambda g: (g, "nonsense"), edges=[(w, 0), (v, 0)])
    e.backward([(top, 0, ones())], [w])
    assert w.grad.tolist() == [1, 1] and v.grad is None


@pytest.mark.rule("E8")
def test_the_gradient_of_a_root_without_a_wanted_leaf_is_dropped_before_a_node_runs() -> None:
    w, v, one = leaf(fanin), leaf(fanin, "v"), [ones()]
    gone, alive = weakref.ref(one[0]), []
    to_w = fanin.Node(lambda g: alive.append(gone() is not None) or g, edges=[(w, 0)])
    to_v = fanin.Node(lambda g: g, edges=[(v, 0)])
    fanin.backward(((n, 0, one.pop() if n is to_v else ones()) for n in (to_w, to_v)), [w])
    assert alive == [False] and w.grad.tolist() == [1, 1] and v.grad is None


@pytest.mark.rule("E8")
def test_needed_nodes_are_found_through_edges_to_later_nodes(e: Any, log: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    early = e.Node(log.node("early", lambda g: (2 * g, g)), edges=[(v, 0)])
    late = e.Node(log.node("late", lambda g: 3 * g), edges=[(w, 0)])
    early.edges.append((late, 0))
    top = e.Node(log.node("top"), edges=[(early, 0)])
    [got] = e.grad([(top, 0, ones())], [w], keep_graph=True)
    assert log == ["top", "early", "late"] and got.tolist() == [3, 3] and w.grad is v.grad is None
    log.clear()
    [got] = e.grad([(top, 0, ones())], [v])
    assert log == ["top", "early"] and got.tolist() == [2, 2]


@pytest.mark.rule("E8")
def test_grad_gives_the_sums_in_order_and_changes_no_leaf(e: Any, log: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    mid = e.Node(log.node("mid", lambda a, b: (a, a)), 2, [(w, 0), (w, 0)])
    top = e.Node(log.node("top", lambda g: (g, 3 * g)), edges=[(mid, 0), (v, 0)])
    w.register_post_accumulate_grad_hook(throws)
    got = e.grad([(top, 0, ones())], [v, (mid, 0), w, (mid, 1), w])
    assert [None if g is None else g.tolist() for g in got] == [[3, 3], [1, 1], [2, 2], None, [2, 2]]
    assert w.grad is None and v.grad is None


@pytest.mark.rule("E8")
def test_a_captured_sum_is_the_one_that_its_hooks_receive_and_its_function_need_not_run(e: Any, log: Any) -> None:
    w = leaf(e)
    mid = e.Node(log.node("mid"), edges=[(w, 0)])
    mid.register_hook(log.hook("hook", lambda g: g * 7))
    mid.register_prehook(log.hook("pre"))
    top = e.Node(log.node("top"), edges=[(mid, 0)])
    [got] = e.grad([(top, 0, ones())], [(mid, 0)], keep_graph=True)
    assert got.tolist() == [7, 7] and log == ["top", "hook"]
    log.clear()
    both = e.grad([(top, 0, ones())], [mid, w], keep_graph=True)
    assert [g.tolist() for g in both] == [[7, 7], [7, 7]] and log == ["top", "hook", "pre", "mid"]


@pytest.mark.rule("E8")
def test_an_input_that_the_roots_do_not_reach_is_none(e: Any, log: Any) -> None:
    w, v = leaf(e), leaf(e, "v")
    top = e.Node(log.node("top"), edges=[(w, 0)])
    assert e.grad([(top, 0, ones())], [v], keep_graph=True) == [None]
    assert log == []
    e.backward([(top, 0, ones())], [v], keep_graph=True)
    assert log == [] and v.grad is None and w.grad is None


# E10: freed graphs


class Token:
    """What a closure holds."""


@pytest.mark.rule("E10")
def test_a_node_that_has_run_drops_its_function(e: Any, log: Any) -> None:
    w, token = leaf(e), Token()
    gone = weakref.ref(token)
    low = e.Node(lambda g: log.append(gone() is None) or g, edges=[(w, 0)])
    top = e.Node(lambda g, token=token: g, edges=[(low, 0)], release=log.hook("release"))
    del token
    e.backward([(top, 0, ones())])
    gc.collect()
    assert gone() is None and log[0] == "release" and top.fn is None
    assert list(top.edges) and next(iter(top.edges))[0] is low


@pytest.mark.rule("E10")
def test_a_second_pass_over_a_freed_graph_names_the_node_before_anything_runs(e: Any, log: Any) -> None:
    w = leaf(e)
    freed = e.Node(log.node("freed"), edges=[(w, 0)], name="Mul")
    e.backward([(freed, 0, ones())])
    top = e.Node(log.node("top"), edges=[(freed, 0)])
    with pytest.raises(RuntimeError, match=r"Mul was freed by pass \d+: .*keep_graph=True"):
        e.backward([(top, 0, ones())])
    assert log == ["freed"] and w.grad.tolist() == [1, 1]
    assert e.grad([(top, 0, ones())], [freed])[0].tolist() == [1, 1]  # its function is not called


@pytest.mark.rule("E10")
def test_a_kept_graph_gives_the_same_result_again(e: Any, log: Any) -> None:
    w = leaf(e)
    top = e.Node(log.node("top"), edges=[(w, 0)], release=log.hook("release"))
    for i in range(3):
        e.backward([(top, 0, ones())], keep_graph=True)
        assert w.grad.tolist() == [i + 1] * 2
    assert log == ["top"] * 3
    e.backward([(top, 0, ones())])
    assert log == ["top"] * 4 + ["release"]


@pytest.mark.rule("E10")
def test_a_node_that_failed_is_not_freed(e: Any) -> None:
    w = leaf(e)
    bad = e.Node(throws, edges=[(w, 0)])
    top = e.Node(lambda g: g, edges=[(bad, 0)], name="top")
    with pytest.raises(Boom):
        e.backward([(top, 0, ones())])
    assert bad.fn is throws and top.fn is None


# V


@pytest.mark.rule("V1", "V3")
@pytest.mark.parametrize("gives", [(), (1, 2, 3)], ids=["too few", "too many"])
def test_as_many_gradients_as_edges(e: Any, gives: tuple[Any, ...]) -> None:
    w = leaf(e)
    node = e.Node(lambda g: [ones()] * len(gives), edges=[(w, 0), (w, 0)], name="Mul")
    text = rf"^Mul returned an invalid number of gradients: expected 2, got {len(gives)}"
    with pytest.raises(ValueError, match=text):
        e.backward([(node, 0, ones())])
    assert w.grad is None


@pytest.mark.rule("V1", "V3")
def test_a_bare_gradient_is_for_one_edge(e: Any) -> None:
    w = leaf(e)
    node = e.Node(lambda g: g, edges=[(w, 0), None], name="Mul")
    with pytest.raises(TypeError, match=r"^Mul returned an invalid number of gradients: expected"):
        e.backward([(node, 0, ones())])


@pytest.mark.rule("V2", "V3", "A9", "A10")
@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (np.ones((4, 3), np.float32), ValueError),
        (np.ones((3, 4), np.complex64), ValueError),
        ("text", TypeError),
        (np.ones((3, 4), "U3"), TypeError),
    ],
    ids=["shape", "dtype", "no array", "no numbers"],
)
def test_the_error_for_a_declared_slot_has_the_nodes_name_and_the_index(e: Any, bad: Any, kind: Any) -> None:
    w = leaf(e, n=2)
    low = e.Node(lambda g: g, slots=[fanin.Slot(shape=(3, 4), dtype="float32")], name="low")
    node = e.Node(lambda g: (ones(), bad), edges=[(w, 0), (low, 0)], name="Mul")
    with pytest.raises(kind, match=r"^Mul returned an invalid gradient at index 1: "):
        e.backward([(node, 0, ones())], keep_graph=True)
    assert w.grad is None  # all are checked before the first is added


@pytest.mark.rule("V2", "A9", "A10")
def test_a_gradient_of_broadcast_shape_is_summed_and_cast_for_its_slot(e: Any) -> None:
    seen: list[Any] = []
    low = e.Node(lambda g: seen.append(g) or (), slots=[fanin.Slot(shape=(2,), dtype="float32")])
    top = e.Node(lambda g: g, edges=[(low, 0)])
    e.backward([(top, 0, np.ones((5, 2)))])
    assert seen[0].dtype == np.float32 and seen[0].tolist() == [5, 5]


@pytest.mark.rule("V2", "V3")
def test_a_roots_gradient_is_checked_like_any_other(e: Any) -> None:
    w = leaf(e)
    with pytest.raises(ValueError, match=r"^backward was given an invalid gradient at index 1: "):
        e.backward([(w, 0, ones()), (w, 0, ones(5))])
    assert w.grad is None


@pytest.mark.rule("V2")
def test_a_root_of_one_element_begins_with_one(e: Any) -> None:
    w = leaf(e, n=1)
    top = e.Node(lambda g: np.asarray(g).reshape(1), slots=[fanin.Slot(shape=(), dtype="float32")], edges=[(w, 0)])
    e.backward([top])
    assert w.grad.tolist() == [1]
    with pytest.raises(ValueError, match=r"^backward: root 0 \(big, slot 0\): "):
        e.backward([e.Node(lambda g: (), slots=[fanin.Slot(shape=(3,))], name="big")])


# The core's alone


def diamond(log: Any, width: int = 6) -> tuple[Any, Any]:
    """A leaf, under so many nodes, under one: sums whose bits show their order."""
    w = fanin.Leaf(np.zeros(3, np.float32), name="w")
    mid = [
        fanin.Node(log.node(i, lambda g, i=i: g * np.float32(1.1**i)), edges=[(w, 0)], name=f"mid {i}")
        for i in range(width)
    ]
    top = fanin.Node(lambda g: [g * np.float32(0.7)] * width, edges=[(m, 0) for m in mid], name="top")
    return top, w


@pytest.mark.rule("E16", "A15")
def test_any_schedule_gives_the_same_bits(log: Any) -> None:
    top, w = diamond(log)
    g = np.array([1, 2.3, -7.7], np.float32)
    [want] = fanin.grad([(top, 0, g)], [w], keep_graph=True)
    orders = {tuple(log)}
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r = random.Random(seed)
    for _ in range(20):
        log.clear()
        [got] = fanin.grad([(top, 0, g)], [w], keep_graph=True, schedule=lambda ready: r.choice(ready))
        assert got.tobytes() == want.tobytes()
        orders.add(tuple(log))
    assert len(orders) > 5


@pytest.mark.rule("E16", "E2")
def test_a_schedule_gets_the_ready_nodes_in_the_order_of_the_pass(log: Any) -> None:
    top, _ = diamond(log, 3)
    seen: list[list[str]] = []
    fanin.backward([(top, 0, ones(3))], schedule=lambda ready: seen.append([n.name for n in ready]) or ready[0])
    assert log == [2, 1, 0]
    assert ["mid 2", "mid 1", "mid 0"] in seen and all(s == sorted(s, reverse=True) for s in seen if len(s) > 1)


@pytest.mark.rule("E16")
@pytest.mark.parametrize("bad", [None, 7, "other"])
def test_a_schedule_that_returns_nonsense_is_an_error(bad: Any, log: Any) -> None:
    top, w = diamond(log, 2)
    other = fanin.Node(lambda g: ())
    with pytest.raises((TypeError, ValueError), match="schedule"):
        fanin.backward([(top, 0, ones(3))], schedule=lambda ready: other if bad == "other" else bad)
    assert w.grad is None


@pytest.mark.rule("E16")
def test_a_walk_gives_the_results_of_a_pass(log: Any) -> None:
    top, w = diamond(log)
    g = np.array([1, 2.3, -7.7], np.float32)
    [want] = fanin.grad([(top, 0, g)], [w], keep_graph=True)
    p = fanin.walk([(top, 0, g)], keep_graph=True)
    names = []
    for node, sums in p:
        names.append(node.name)
        p.give(node.fn(*sums))
    assert names == ["top", *(f"mid {i}" for i in range(5, -1, -1))]
    assert w.grad.tobytes() == want.tobytes()


@pytest.mark.rule("E16")
def test_next_before_the_gradients_of_the_last_node_were_given_is_an_error(log: Any) -> None:
    top, _ = diamond(log)
    p = fanin.walk([(top, 0, ones(3))])
    next(p)
    with pytest.raises(RuntimeError, match="give"):
        next(p)
    q = fanin.walk([(top, 0, ones(3))])
    with pytest.raises(RuntimeError):
        q.give(None)  # nothing was yielded yet


@pytest.mark.rule("E16", "E14")
def test_a_walk_may_be_left_unfinished(log: Any) -> None:
    top, w = diamond(log)
    p = fanin.walk([(top, 0, ones(3))], keep_graph=True)
    node, sums = next(p)
    p.give(node.fn(*sums))
    p.close()
    assert list(p) == []
    q = fanin.walk([(top, 0, ones(3))], keep_graph=True)
    next(q)
    del q, p, node, sums
    gc.collect()
    fanin.backward([(top, 0, ones(3))])
    assert w.grad is not None


@pytest.mark.rule("E15", "E5")
@pytest.mark.threads
def test_several_threads_walk_one_graph() -> None:
    n, threads = 30, 4
    w = fanin.Leaf(np.zeros(5))
    node: Any = w
    calls: list[int] = []
    for _ in range(n):
        node = fanin.Node(lambda g: calls.append(1) or (g * 0.5, g * 0.5), edges=[(node, 0), (node, 0)])
    errors: list[BaseException] = []
    start = threading.Barrier(threads)

    def walk() -> None:
        try:
            start.wait()
            for _ in range(10):
                [g] = fanin.grad([(node, 0, np.ones(5))], [w], keep_graph=True)
                assert g.tolist() == [1] * 5
                fanin.backward([(node, 0, np.ones(5))], keep_graph=True)
        except BaseException as error:
            errors.append(error)

    several = [threading.Thread(target=walk) for _ in range(threads)]
    for t in several:
        t.start()
    for t in several:
        t.join()
    assert not errors
    assert len(calls) == 2 * threads * 10 * n and w.grad.tolist() == [threads * 10] * 5


@pytest.mark.rule("E13", "E7")
def test_passes_inside_passes_end_at_a_thousand() -> None:
    depth = [0]

    def fn(g: Any) -> Any:
        depth[0] += 1
        fanin.backward([(fanin.Node(fn), 0, g)])
        return ()

    with recursion(100_000), pytest.raises(RuntimeError, match=r"1,?000"):
        fanin.backward([(fanin.Node(fn), 0, 1.0)])
    assert depth == [1000]


@contextlib.contextmanager
def recursion(limit: int) -> Iterator[None]:
    import sys

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.rule("E16")
def test_a_walk_shows_the_sum_of_each_slot() -> None:
    w = fanin.Leaf(np.zeros(1))
    top = fanin.Node(lambda *sums: sums[0], slots=[None] * 3, edges=[(w, 0)], name="top")
    for node, sums in (p := fanin.walk([(top, 0, np.ones(1)), (top, 2, np.full(1, 3.0))])):
        assert node is top and [None if s is None else s.tolist() for s in sums] == [[1.0], None, [3.0]]
        p.give(sums[0] + sums[2])
    assert w.grad.tolist() == [4.0]


@pytest.mark.rule("E9")
def test_an_object_that_a_hook_wrongly_returned_is_dropped_with_the_error() -> None:
    made = []

    def hook(sums: Any) -> Any:
        one = np.ones(1)
        made.append(weakref.ref(one))
        return (sums[0], one)

    top = fanin.Node(lambda *sums: None, slots=[None] * 2, edges=[None])
    top.register_prehook(hook)
    with pytest.raises(ValueError, match="None, as there is no sum"):
        fanin.backward([(top, 0, np.ones(1))])
    gc.collect()
    assert made[0]() is None
