"""`trace.memory()`: the bytes that a pass holds over time, and who holds the most at its peak (H2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin._trace import memory as memory_of

pytestmark = [pytest.mark.core, pytest.mark.rule("H2")]

N = 1 << 10  # float64: 8 KiB
B = 8 * N


def traced(roots: Any, **how: Any) -> Any:
    with fanin.trace() as t:
        fanin.backward(roots, **how)
    return t.memory()


def leaves(n: int) -> list[Any]:
    return [fanin.Leaf(np.zeros(N), name=f"w{i}") for i in range(n)]


def test_a_gradient_is_held_from_its_delivery_to_the_end_of_its_node() -> None:
    (w,) = leaves(1)
    low = fanin.Node(lambda g: g * 2, edges=[(w, 0)], name="low")
    top = fanin.Node(lambda g: g * 3, edges=[(low, 0)], name="top")
    found = traced([(top, 0, np.ones(N))])
    # that of low beside that of w, which is delivered while low is at work
    assert [p.bytes for p in found.curve] == [B, 2 * B, B, 0]
    assert [p.node for p in found.curve] == ["top", "low", "low", "w0"]
    assert (found.peak, found.node, found.unknown) == (2 * B, "low", 0)
    assert [str(h) for h in found.holders] == [
        "slot 0 of node low holds 8 KiB for key 0",
        "slot 0 of node w0 holds 8 KiB for key 0",
    ]


def test_the_holders_at_the_peak_are_named_the_largest_first() -> None:
    (w,) = leaves(1)
    low = fanin.Node(lambda *g: g[3] * 0 + 1, 4, edges=[(w, 0)], name="low")
    small = [fanin.Node(lambda g: np.ones(8), edges=[(low, 0)], name=f"small{i}") for i in range(3)]
    large = fanin.Node(lambda g: np.ones(N), edges=[(low, 3)], name="large")
    top = fanin.Node(lambda g: [np.ones(2)] * 4, edges=[(n, 0) for n in (*small, large)], name="top")
    found = traced([(top, 0, np.ones(1))], budget=float("inf"))
    assert str(found).splitlines()[1] == "slot 3 of node low holds 8 KiB for key 0"
    assert found.holders[0].bytes == B and found.holders[0].slot == 3


@pytest.mark.parametrize(("budget", "expected"), [(float("inf"), 5), (0, 2)])
def test_parked_gradients_count_and_a_running_sum_replaces_them(budget: float, expected: int) -> None:
    """Four gradients of one slot wait, and beside them the sum is made; with budget 0 the sum runs in place."""
    (w,) = leaves(1)
    many = [fanin.Node(lambda g, k=k: np.full(N, float(k)), edges=[(w, 0)], name=f"n{k}") for k in range(4)]
    top = fanin.Node(lambda g: [g[:1]] * 4, edges=[(n, 0) for n in many], name="top")
    found = traced([(top, 0, np.ones(1))], budget=budget)
    assert round(found.peak / B) in (expected, expected - 1), found
    assert w.grad[0] == 6 and found.curve[-1].bytes == 0


def test_memory_that_two_slots_share_counts_once() -> None:
    a, b = leaves(2)
    top = fanin.Node(lambda g: [np.ones(N)] * 2, edges=[(a, 0), (b, 0)], name="top")
    found = traced([(top, 0, np.ones(1))])
    assert found.peak == B and len(found.holders) in (1, 2)


def test_the_peak_of_a_chain_before_and_after_boxed() -> None:
    def peak(boxed: bool) -> int:
        def fn(*given: Any) -> Any:
            sums = given[0] if boxed else list(given)
            del given
            return [small(sums.pop()) for _ in range(4)][::-1]

        def small(g: Any) -> Any:
            return g[:1] * np.ones(N)

        below: Any = [(w, 0) for w in leaves(4)]
        for k in range(5):
            node = fanin.Node(fn, 4, edges=below, name=f"n{k}", boxed=boxed)
            below = [(node, i) for i in range(4)]
        found = traced([(node, i, np.ones(N)) for i in range(4)])
        return found.peak // B

    assert (peak(False), peak(True)) == (8, 4)


def test_a_trace_of_a_boxed_node_changes_neither_bits_nor_what_is_written_in_place() -> None:
    def one(trace: bool) -> list[Any]:
        (w,) = leaves(1)
        node = fanin.Node(lambda sums: sums.pop(), edges=[(w, 0)], boxed=True)
        top = fanin.Node(lambda g: np.full(N, 2.0), edges=[(node, 0)])
        if not trace:
            fanin.backward([(top, 0, np.ones(1))])
        else:
            traced([(top, 0, np.ones(1))])
        return [w.grad.tolist(), w.grad.base is None, w.grad.flags.owndata]

    assert one(True) == one(False)


def test_objects_are_counted_as_unknown() -> None:
    class Word:
        def __add__(self, other: Any) -> Any:
            return self

    sink = fanin.Node(lambda g: None, name="sink")
    top = fanin.Node(lambda g: Word(), edges=[(sink, 0)], name="top")
    assert traced([(top, 0, np.ones(1))]).unknown == 1


def test_a_trace_without_a_pass_says_so() -> None:
    with fanin.trace() as t:
        fanin.add_n([np.ones(2)] * 3)
    assert str(t.memory()) == "no pass backward was recorded" and t.memory().peak == 0


def test_workers_and_nested_passes_end_with_nothing_held() -> None:
    def inner(g: Any) -> Any:
        (w,) = leaves(1)
        fanin.backward([(fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="inside"), 0, np.ones(N))])
        return g * w.grad[0]

    (w,) = leaves(1)
    many = [fanin.Node(inner, edges=[(w, 0)], name=f"n{k}") for k in range(4)]
    top = fanin.Node(lambda g: [g * 2] * 4, edges=[(n, 0) for n in many], name="top")
    for workers in (1, 3):
        found = traced([(top, 0, np.ones(N))], workers=workers, keep_graph=True)
        assert found.curve[-1].bytes == 0 and found.peak >= 4 * B
        w.grad = None


def test_many_gradients_of_one_slot_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = memory_of._Held.count

    def counting(held: Any, item: Any, by: int) -> None:
        counted.append(by)
        count(held, item, by)

    monkeypatch.setattr(memory_of._Held, "count", counting)
    w = fanin.Leaf(np.zeros(1))
    nodes = [fanin.Node(lambda g: g * 2, edges=[(w, 0)]) for _ in range(300)]
    found = traced([(node, 0, np.ones(1)) for node in nodes], budget=1 << 30)
    assert found.peak >= 300 * 8
    assert len(counted) < 4 * 300 + 20  # to and fro, on the way and for the holders at the peak


def test_a_trace_that_lost_lines_has_no_figures() -> None:
    at: Any = leaves(1)[0]
    for _ in range(9):
        at = fanin.Node(lambda g: g * 2, edges=[(at, 0)])
    with fanin.trace(capacity=3) as t:
        fanin.backward([(at, 0, np.ones(N))])
    assert t.dropped
    with pytest.raises(ValueError, match=r"^trace\.memory: \d+ lines? did not fit and are lost: .* larger capacity="):
        t.memory()
