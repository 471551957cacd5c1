"""E11: which node made the first inf or NaN. E17: why a node has not run, and what is lost when a pass ends early."""

from __future__ import annotations

import gc
import re
import sys
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks

inf, nan = np.inf, np.nan


def graph(made: Any = nan) -> dict[str, Any]:
    """top gives to low and to Div, which gives to v, and to low one that is not finite."""
    w, v = (fanin.Leaf(np.zeros(3), name=name) for name in "wv")
    low = fanin.Node(lambda g: g, edges=[(w, 0)], name="low")
    bad = np.array([1.0, made, 2.0])
    div = fanin.Node(lambda g: (g, bad), edges=[(v, 0), (low, 0)], name="Div")
    top = fanin.Node(lambda g: (g, g), edges=[(low, 0), (div, 0)], name="top")
    return {"w": w, "v": v, "low": low, "Div": div, "top": top}


# E11


@pytest.mark.rule("E11")
@pytest.mark.parametrize("made", [nan, inf, -inf])
def test_the_first_gradient_that_is_not_finite_ends_the_pass_with_the_node_that_made_it(made: float) -> None:
    g = graph(made)
    with pytest.raises(FloatingPointError) as caught:
        fanin.backward([(g["top"], 0, np.ones(3))], detect=True)
    assert str(caught.value).startswith(
        "Div returned a gradient that is not finite at index 1: an inf or NaN in 1 of 3 elements of the sum in slot 0"
        " of low; "
    )
    assert g["w"].grad is None, "what is not finite went no further"
    assert g["v"].grad.tolist() == [1, 1, 1], "a whole gradient, or none"


@pytest.mark.rule("E9", "E11")
def test_a_gradient_that_a_post_hook_made_not_finite_is_attributed_to_the_hook() -> None:
    for hook, whose in [
        (lambda sums, gradients: (gradients[0], gradients[1] * inf), "a post-hook of Mul"),
        (lambda sums, gradients: (gradients[0] * 1, gradients[1]), "Mul"),
    ]:
        w = fanin.Leaf(np.zeros(2))
        node = fanin.Node(
            lambda g, whose=whose: (g, g * inf if whose == "Mul" else g), edges=[(w, 0), (w, 0)], name="Mul"
        )
        node.register_posthook(hook)
        with pytest.raises(FloatingPointError, match=rf"^{whose} returned a gradient that is not finite at index 1: "):
            fanin.backward([(node, 0, np.ones(2))], detect=True)


@pytest.mark.rule("E11")
def test_a_gradient_alone_in_its_slot_is_checked_and_a_leafs_too() -> None:
    w = fanin.Leaf(np.zeros(2))
    node = fanin.Node(lambda g: g * inf, edges=[(w, 0)], name="Mul")
    with pytest.raises(FloatingPointError, match=r"^Mul returned a gradient that is not finite at index 0: .*of leaf"):
        fanin.backward([(node, 0, np.ones(2))], detect=True)
    assert w.grad is None


@pytest.mark.rule("E11")
def test_detect_distinguishes_a_roots_gradient_an_overflowing_sum_and_a_node() -> None:
    node = fanin.Node(lambda g: g, edges=[(fanin.Leaf(np.zeros(2)), 0)], name="Mul")
    with pytest.raises(
        FloatingPointError, match=r"^grad was given a gradient that is not finite at index 1: .* 2 of 2"
    ):
        fanin.grad([(node, 0, np.ones(2)), (node, 0, np.full(2, nan))], [node], detect=True)
    big = [(node, 0, np.full(2, 1e308))] * 2
    with pytest.raises(FloatingPointError, match=r"^Mul: the sum in slot 0 .*all of its gradients are: it overflows"):
        fanin.backward(big, detect=True)
    fanin.backward([(node, 0, np.ones(2))], detect=True)


@pytest.mark.rule("E11")
def test_where_a_node_was_made_is_kept_only_under_the_option_and_then_all_passes_detect() -> None:
    silent = graph()
    assert fanin._core.get_options()["detect"] is False
    with fanin.set_options(detect=True):
        g = graph()
        with pytest.raises(FloatingPointError, match=r"it was made at test_detect_and_explain\.py:\d+\n") as caught:
            fanin.backward([(g["top"], 0, np.ones(3))])
        assert re.fullmatch(
            r"in low \(node \d+, made at test_detect_and_explain\.py:\d+\): 3 of 5 nodes had run",
            caught.value.__notes__[0],
        )
        fanin.backward([(graph()["top"], 0, np.ones(3))], detect=False)
    with pytest.raises(FloatingPointError, match=r"recorded for nodes made under fanin\.set_options\(detect=True\)\n"):
        fanin.backward([(silent["top"], 0, np.ones(3))], detect=True)
    fanin.backward([(graph()["top"], 0, np.ones(3))])


@pytest.mark.rule("E11")
def test_detecting_changes_no_bit_and_adds_no_pass_over_what_is_summed() -> None:
    rng = np.random.default_rng(5)
    parts = [rng.normal(size=100) for _ in range(6)]
    sums, passes = [], []
    for detect in (False, True):
        w = fanin.Leaf(np.zeros(100))
        before = fanin.counters()
        fanin.backward([(w, 0, g) for g in parts], detect=detect)
        sums.append(w.grad.tobytes())
        passes.append(fanin.counters().bytes_read - before.bytes_read)
    assert sums[0] == sums[1]
    assert passes[0] == passes[1] > 0


def test_an_object_that_sums_by_its_own_plus_is_not_checked() -> None:
    got: list[Any] = []
    node = fanin.Node(lambda g: got.append(g) or (), edges=[])
    fanin.backward([(node, 0, np.array([nan], object)), (node, 0, np.array([1.0], object))], detect=True)
    assert len(got) == 1


# E17


@pytest.mark.rule("E17")
def test_a_walk_explains_why_a_node_has_not_run_and_what_its_slots_hold() -> None:
    g = graph()
    names = {key: f"{key} ({'leaf' if key in 'wv' else 'node'} {node.sequence_nr})" for key, node in g.items()}
    p = fanin.walk([(g["top"], 0, np.ones(3))])
    assert p.explain(g["top"]) == f"{names['top']} has not run: slot 0 waits for root 0"
    node, sums = next(p)
    assert p.explain(node=g["top"]) == f"{names['top']} is at work"
    p.give(node.fn(*sums))
    assert p.explain(g["top"]) == f"{names['top']} has run"
    lines = [
        f"{names['Div']} is ready: slot 0 holds edge 1 of {names['top']}",
        f"{names['low']} has not run: slot 0 waits for edge 1 of {names['Div']}; slot 0 holds edge 0 of {names['top']}",
        f"{names['v']} has not run: slot 0 waits for edge 0 of {names['Div']}",
        f"{names['w']} has not run: slot 0 waits for edge 0 of {names['low']}",
    ]
    assert p.explain() == "\n".join(lines)
    assert p.explain(fanin.Leaf(np.zeros(1), name="x")).endswith("is not in this pass")
    p.close()
    assert p.explain() == "\n".join(lines), "of a pass that ended early, what it said then"
    with pytest.raises(TypeError, match=r"expected a fanin\.Node"):
        p.explain("low")


@pytest.mark.rule("E17")
def test_explain_distinguishes_a_slot_with_the_first_root_alone_from_an_empty_one() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")
    low = fanin.Node(lambda g: g, edges=[(w, 0)], name="low")
    top = fanin.Node(lambda g: g, edges=[(low, 0)], name="top")
    p = fanin.walk([(low, 0, np.ones(2)), (top, 0, np.ones(2))])
    next(p)
    waits = f"slot 0 waits for edge 0 of top (node {top.sequence_nr})"
    assert p.explain(low) == f"low (node {low.sequence_nr}) has not run: {waits}; slot 0 holds root 0"
    p.close()


@pytest.mark.rule("E17")
def test_explain_distinguishes_none_from_a_gradient_and_shortens_long_lists() -> None:
    low = fanin.Node(lambda g: (), inputs=2, name="low")
    many = [fanin.Node(lambda g: None, edges=[(low, 1)], name=f"n{i}") for i in range(12)]
    p = fanin.walk([(n, 0, 1.0) for n in many])
    node, _ = next(p)
    p.give(None)
    text = p.explain(low)
    assert f"slot 1 got None by edge 0 of n11 (node {node.sequence_nr})" in text
    assert text.count("waits for") == 8 and ", and 3 more" in text
    p.close()
    wide = fanin.walk([(fanin.Node(lambda g: (), name=f"m{i}"), 0, 1.0) for i in range(40)])
    assert wide.explain().splitlines()[-1] == "and 24 more"


@pytest.mark.rule("E17")
def test_a_pass_that_is_done_has_nothing_to_explain() -> None:
    w = fanin.Leaf(np.zeros(1))
    p = fanin.walk([(fanin.Node(lambda g: g, edges=[(w, 0)]), 0, np.ones(1))])
    for node, sums in p:
        p.give(node.fn(*sums))
    assert p.explain() == ""


@pytest.mark.rule("E14", "E17")
def test_an_error_names_the_gradients_that_are_lost_by_their_producer() -> None:
    def fail(grad: Any) -> Any:
        raise ZeroDivisionError

    g = graph()
    fails = fanin.Node(fail, edges=[(g["v"], 0), (g["low"], 0)], name="Fails")
    top = fanin.Node(lambda g: (g, g, None), edges=[(g["low"], 0), (fails, 0), (g["Div"], 0)], name="top")
    with pytest.raises(ZeroDivisionError) as caught:
        fanin.backward([(top, 0, np.ones(3))], keep_graph=True)
    lost = f"lost with the pass: edge 0 of top (node {top.sequence_nr}) to low (node {g['low'].sequence_nr})"
    assert caught.value.__notes__[1:] == [lost], "not what Fails had taken, nor the None for Div"
    with pytest.raises(ValueError, match="invalid number of gradients") as other:
        for node, _ in (p := fanin.walk([(top, 0, np.ones(3))], keep_graph=True)):
            p.give((np.ones(3), np.ones(3), None) if node is top else ())
    assert other.value.__notes__[1:] == [lost]
    assert p.explain(top).splitlines()[0].startswith(f"Fails (node {fails.sequence_nr}) is at work")


@pytest.mark.rule("E14", "E17")
def test_an_error_that_loses_no_gradient_mentions_none() -> None:
    node = fanin.Node(lambda g: 1 / 0, edges=[(fanin.Leaf(np.zeros(1)), 0)])
    with pytest.raises(ZeroDivisionError) as caught:
        fanin.backward([(node, 0, np.ones(1))])
    assert len(caught.value.__notes__) == 1


# Errors of leaves that the engine raised before


@pytest.mark.core
def test_setting_a_wide_leafs_grad_keeps_the_old_sum_where_memory_ends() -> None:
    kept = set_ = 0
    for n in range(40):
        w = fanin.Leaf(np.zeros(4, "f2"), accumulate="float32")
        fanin.backward([(w, 0, np.full(4, 3, "f2"))])
        new = np.full(4, 5, "f2")
        hooks.fail_at(n)
        try:
            w.grad = new
        except MemoryError:
            kept += 1
            wanted = 3
        else:
            set_ += 1
            wanted = 5
        finally:
            hooks.fail_at(-1)
        assert w.grad.tolist() == [wanted] * 4, n
        fanin.backward([(w, 0, np.ones(4, "f2"))])
        assert w.grad.tolist() == [wanted + 1] * 4, n
    assert kept and set_


def test_no_half_made_leaf_can_be_reached() -> None:
    class Name:
        def __str__(self) -> str:
            found.append([o for o in gc.get_objects() if type(o) is fanin.Leaf and o not in before])
            return "w"

    found: list[Any] = []
    before = [o for o in gc.get_objects() if type(o) is fanin.Leaf]
    w = fanin.Leaf(np.zeros(1), name=Name())
    assert found == [[]]
    assert any(o is w for o in gc.get_objects())


def test_the_error_for_an_array_of_objects_names_the_conversion_to_numbers() -> None:
    w = fanin.Leaf(np.zeros(2), name="w")
    with pytest.raises(TypeError, match=r"^w: grad: .*got a numpy.ndarray of objects: set x\.astype\(float\)$"):
        w.grad = np.ones(2, object)


@pytest.mark.rule("E7")
def test_walks_count_towards_the_depth_of_passes() -> None:
    deepest = 0

    def deeper(depth: int) -> None:
        nonlocal deepest
        deepest = max(deepest, depth)
        node = fanin.Node(lambda g: (), name="Mul")
        node.register_hook(lambda g: deeper(depth + 1))
        list(fanin.walk([(node, 0, 1.0)]))

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        with pytest.raises(RuntimeError, match="1000 deep"):
            deeper(0)
    finally:
        sys.setrecursionlimit(before)
    assert deepest == 1000
