"""E18: a trace of a pass: a slice for each node on its worker or stream, an arrow for each gradient, and the critical
path.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin._trace.chrome import chrome
from fanin._trace.line import HOST, Line
from fanin._trace.passes import CriticalPath, add_passes, critical_paths, summary
from fanin._trace.picture import Node, Picture, place
from fanin._trace.recording import Trace
from fanin.sim import Machine
from kit.pictures import Read, outside

pytestmark = pytest.mark.core


def diamond(left: Any = lambda g: g, right: Any = lambda g: g, **how: Any) -> tuple[list[Any], fanin.Leaf]:
    """top gives to left and right, these to low, that to a leaf."""
    leaf = fanin.Leaf(np.zeros(1), name="w")
    low = fanin.Node(lambda g: g, edges=[(leaf, 0)], name="low")
    sides = [fanin.Node(fn, edges=[(low, 0)], name=name) for name, fn in (("left", left), ("right", right))]
    top = fanin.Node(lambda g: [g, g], edges=[(n, 0) for n in sides], name="top")
    return [(top, 0, np.ones(1))], leaf


def meeting() -> list[Any]:
    """Two functions that wait for each other, so that there are two workers."""
    barrier = threading.Barrier(2)

    def fn(g: Any) -> Any:
        barrier.wait()
        return g

    return [fn, fn]


def two_workers() -> Trace:
    roots, _ = diamond(*meeting())
    with fanin.trace() as t:
        fanin.backward(roots, workers=2)
    return t


def given(picture: Picture) -> list[tuple[str, str]]:
    return sorted((g.source.name, g.target.name) for g in picture.gradients)


ALL = [("left", "low"), ("low", "w"), ("right", "low"), ("top", "left"), ("top", "right")]


@pytest.mark.rule("E18")
@pytest.mark.parametrize("workers", [1, 2])
def test_each_node_and_leaf_is_a_slice_and_each_gradient_an_arrow(workers: int) -> None:
    roots, _ = diamond(*(meeting() if workers == 2 else []))
    with fanin.trace() as t:
        fanin.backward(roots, workers=workers)
    p = t.picture()
    assert sorted(n.name for n in p.nodes) == ["left", "low", "right", "top", "w"]
    assert given(p) == ALL and p.clock == "measured: the host's clock"
    assert all(0 <= n.start <= n.end for n in p.nodes)
    assert all(g.source.end <= g.target.start for g in p.gradients)
    assert {n.lane.device for n in p.nodes} == {HOST}


@pytest.mark.rule("E18")
def test_each_worker_has_a_lane_and_what_runs_at_once_lies_in_two() -> None:
    p = two_workers().picture()
    assert [lane.name for lane in p.lanes] == ["cpu", "cpu, worker 1"]
    left, right = (next(n for n in p.nodes if n.name == name) for name in ("left", "right"))
    assert left.lane != right.lane and left.start < right.end and right.start < left.end  # they met


@pytest.mark.rule("E18")
def test_no_gradient_no_arrow_and_without_a_trace_nothing_is_kept() -> None:
    roots, _ = diamond(lambda g: None)
    with fanin.trace() as t:
        fanin.backward(roots, keep_graph=True)
    before = len(t)
    fanin.backward(roots)
    assert given(t.picture()) == [pair for pair in ALL if pair != ("left", "low")] and len(t) == before


@pytest.mark.rule("E18")
def test_a_pass_by_hand_is_recorded_from_the_sums_to_the_gradients() -> None:
    roots, _ = diamond()
    with fanin.trace() as t:
        for node, sums in (p := fanin.walk(roots)):
            fanin.add_n([np.ones(2), np.ones(2)])  # work of the node's, on this thread
            p.give(node.fn(*sums))
        fanin.add_n([np.ones(2), np.ones(2)])  # work of no node
    assert given(t.picture()) == ALL
    numbers = {n.name: n.number for n in t.picture().nodes}
    by = {line.node for line in t.lines if line.kind == "kernel" and line.label.startswith("sum") and line.pass_number}
    assert {numbers[n] for n in ("top", "left", "right", "low")} <= by
    assert t.lines[-1].pass_number == 0


@pytest.mark.rule("E18")
def test_a_walk_that_is_dropped_ends_its_node_there() -> None:
    roots, _ = diamond()
    with fanin.trace() as t:
        p = fanin.walk(roots)
        next(p)
        del p
        fanin.add_n([np.ones(2), np.ones(2)])
    assert [n.name for n in t.picture().nodes] == ["top"] and t.lines[-1].pass_number == 0


@pytest.mark.rule("E18", "E14")
def test_a_node_that_fails_has_a_slice_to_its_end() -> None:
    def fails(g: Any) -> Any:
        raise ArithmeticError("here")

    roots, _ = diamond(fails)
    with fanin.trace() as t, pytest.raises(ArithmeticError):
        fanin.backward(roots)
    fanin.add_n([np.ones(2), np.ones(2)])
    assert [n.name for n in t.picture().nodes] == ["top", "right", "left"]


@pytest.mark.rule("E18", "E7")
def test_a_pass_inside_a_node_lies_within_its_slice() -> None:
    inner, _ = diamond()

    def passes(g: Any) -> Any:
        fanin.backward(inner)
        return g

    outer, _ = diamond(passes)
    with fanin.trace() as t:
        fanin.backward(outer)
    p = t.picture()
    one, two = sorted({n.pass_number for n in p.nodes})
    left = next(n for n in p.nodes if n.name == "left" and n.pass_number == one)
    within = [n for n in p.nodes if n.pass_number == two]
    assert len(within) == 5 and all(left.start <= n.start <= n.end <= left.end for n in within)
    assert [found.pass_number for found in critical_paths(p)] == [one, two]


# The critical path


def timed(name: str, number: int, begin: int, end: int, thread: int = 1) -> Line:
    return Line("node", "", False, -1, -1, 0, 0, -1, (), 0, 0, 0, 0, end * 1000, -1, -1, name, 1, number, thread - 1, 0,
                begin * 1000, thread)  # fmt: skip


def arrow(source: int, target: int, at: int) -> Line:
    return Line("gradient", "", False, -1, 0, 0, 0, 0, (), 0, 0, 0, 0, at * 1000, -1, -1, "", 1, source, 0, target)


def path_of(*lines: Line) -> CriticalPath:
    every = sorted(lines, key=lambda line: line.host_ns)
    [found] = critical_paths(add_passes(place(every), every))
    return found


@pytest.mark.rule("E18")
def test_the_critical_path_follows_the_slice_that_ended_last_before_each_node() -> None:
    lines = [
        timed("top", 3, 100, 110),
        timed("a", 2, 111, 150),
        timed("b", 1, 113, 120, 2),
        timed("low", 0, 152, 160, 2),
    ]
    gradients = [arrow(3, 2, 109), arrow(3, 1, 109), arrow(2, 0, 149), arrow(1, 0, 119)]
    found = path_of(*lines, *gradients)
    assert found.names == ["top", "a", "low"] and found.took == 60 and found.waited == 3
    assert str(found) == "critical path: 60.0 us, 3.0 us of them waits: top > a > low"


@pytest.mark.rule("E18")
def test_a_node_that_waits_for_its_worker_follows_the_previous_node_of_that_worker() -> None:
    lines = [timed("top", 3, 0, 10), timed("a", 2, 10, 50), timed("b", 1, 50, 90), timed("low", 0, 90, 91)]
    found = path_of(*lines, arrow(3, 2, 9), arrow(3, 1, 9), arrow(2, 0, 49), arrow(1, 0, 89))
    assert found.names == ["top", "a", "b", "low"] and found.waited == 0


@pytest.mark.rule("E18")
def test_a_long_path_is_shortened_and_equal_names_in_a_row_are_merged() -> None:
    lines = [timed(f"n{i // 2}", 40 - i, i, i + 1) for i in range(40)]
    text = str(path_of(*lines))
    assert "n0 x 2 > n1 x 2" in text and ".. 8 more .." in text and text.endswith("n19 x 2")


@pytest.mark.rule("E18")
def test_the_path_of_a_real_pass_has_no_holes() -> None:
    t = two_workers()
    [found] = critical_paths(t.picture())
    works = [step.work for step in found.steps]
    assert works[0].name == "top" and works[-1].name == "w"
    for (_, _), (b, wait) in itertools.pairwise(found.steps):
        assert wait >= 0 and isinstance(b, Node)
    assert found.took == pytest.approx(sum(w.end - w.start for w in works) + found.waited)
    assert t.summary().splitlines()[0].endswith("5 nodes and leaves on 2 workers, 5 gradients between them")
    assert summary(fanin.trace().picture()) == "no pass backward was recorded"


def on_streams(slow: float) -> Trace:
    """The diamond on streams of a simulated device, one side slower than the other."""
    with Machine() as m, fanin.set_options(warn_stream_mismatch=False):
        a, b, c = (m.stream() for _ in range(3))

        def kernel(name: str, stream: fanin.Stream, us: float) -> Any:
            def fn(g: Any) -> Any:
                made = [m.empty(4, "float64") for _ in range(2)]
                for out in made:
                    m.launch(stream, lambda x, y: np.copyto(y, x), reads=[g], writes=[out], name=f"{name}'", us=us)
                return made if name == "top" else made[0]

            return fn

        leaf = fanin.Leaf(m.array(np.zeros(4)), stream=c, name="w")
        low = fanin.Node(kernel("low", c, 5), edges=[(leaf, 0)], stream=c, name="low")
        left = fanin.Node(kernel("left", a, 10), edges=[(low, 0)], stream=a, name="left")
        right = fanin.Node(kernel("right", b, slow), edges=[(low, 0)], stream=b, name="right")
        top = fanin.Node(kernel("top", c, 5), edges=[(left, 0), (right, 0)], stream=c, name="top")
        with fanin.trace() as t:
            fanin.backward([(top, 0, m.array(np.ones(4)))])
        m.synchronize()
    return t


@pytest.mark.rule("E18")
def test_on_streams_a_node_lies_around_its_kernels_and_not_around_sums() -> None:
    p = on_streams(20).picture()
    assert p.clock.startswith("simulated") and given(p) == ALL
    for name in ("top", "left", "right", "low"):
        node = next(n for n in p.nodes if n.name == name)
        mine = [s for s in p.slices if s.name == f"{name}'"]
        assert len(mine) == 2 and {s.lane for s in mine} == {node.lane}
        assert (node.start, node.end) == (mine[0].start, mine[1].end)


@pytest.mark.rule("E18")
@pytest.mark.parametrize(("slow", "side"), [(40, "right"), (1, "left")])
def test_on_streams_the_critical_path_goes_by_the_slower_branch(slow: float, side: str) -> None:
    t = on_streams(slow)
    [found] = critical_paths(t.picture())
    assert [name.split(" x ")[0] for name in found.names] == [
        "top",
        side,
        "sum low[0]",
        "low",
        "finish w[0]",
    ]
    assert "on 3 streams" in t.summary()


# Files and pictures


@pytest.mark.rule("E18")
def test_in_chromes_format_each_gradient_is_a_flow_between_slices_that_enclose_its_ends() -> None:
    for t in (two_workers(), on_streams(20)):
        events: Any = chrome(t.picture())["traceEvents"]
        slices = [e for e in events if e["ph"] == "X" and e["cat"] == "node"]
        starts = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "gradient"}
        ends = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] == "gradient"}
        assert len(slices) == 5 and len(starts) == len(ends) == 5 and starts.keys() == ends.keys()
        for e in [*starts.values(), *ends.values()]:
            around = [s for s in slices if (s["pid"], s["tid"]) == (e["pid"], e["tid"])]
            assert any(s["ts"] - 0.002 <= e["ts"] <= s["ts"] + s["dur"] + 0.002 for s in around), e
        assert any(s["args"]["critical"] for s in slices) or "simulated" in t.picture().clock
        assert len({e["id"] for e in events if e["ph"] == "s"}) == sum(e["ph"] == "s" for e in events)


@pytest.mark.rule("E18")
def test_the_picture_of_two_workers_has_their_lanes_the_arrows_between_them_and_the_path(tmp_path: Path) -> None:
    from fanin._trace.plot import Sheet, draw

    nodes = [timed("top", 3, 0, 10), timed("a", 2, 11, 20), timed("b", 1, 12, 50, 2), timed("low", 0, 60, 70)]
    lines = sorted([*nodes, arrow(3, 2, 9), arrow(3, 1, 9), arrow(2, 0, 19), arrow(1, 0, 49)], key=lambda x: x.host_ns)
    p = add_passes(place(lines), lines)
    sheet = Sheet(p, {})
    assert [[work.name for work in bars] for bars in sheet.part.rows.values()] == [["top", "a", "low"], ["b"]]
    assert sorted((w.source.name, w.target.name) for w in sheet.wires) == [("b", "low"), ("top", "b")], "between lanes"
    on_workers, on_devices = Read(draw(two_workers().picture())), Read(draw(on_streams(20).picture()))
    assert on_workers.texts("lanes") == ["cpu", "cpu, worker 1"]
    assert " ".join(on_workers.texts("message")).startswith("critical path: ")
    assert on_devices.texts("message") == ["Two streams meet here: the sum waits for both."]
    assert outside(on_workers) == outside(on_devices) == []


@pytest.mark.rule("E18")
def test_dot_has_the_nodes_of_workers_and_their_gradients() -> None:
    text = two_workers().dot()
    assert text.count("shape=ellipse") == 5 and text.count("->") >= 5 and "cpu, worker 1: nodes" in text


def test_the_line_of_a_node_has_neither_a_slot_nor_a_key() -> None:
    roots, _ = diamond()
    with fanin.trace() as t:
        fanin.backward(roots)
    lines = [line for line in t.lines if line.kind == "node"]
    assert len(lines) >= 4 and {(line.slot, line.key) for line in lines} == {(-1, -1)}
