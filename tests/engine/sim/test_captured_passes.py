"""A whole pass captured into a graph (K): what is replayed, what a node may not do, and how long memory lives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from kit.world import world

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def as_here() -> Iterator[None]:
    with fanin.set_options(warn_stream_mismatch=False, capture_redirect=True):
        yield


def times(w: Any, c: float, edges: int = 1) -> Callable[[Any], Any]:
    """A node's function: c times its sum, into arrays that outlive the graph, which does not track user kernels."""
    made = [w.empty(4) for _ in range(edges)]
    w.keep.__dict__.setdefault("arrays", []).extend(made)

    def fn(g: Any) -> Any:
        for x in made:
            w.launch(w.current_stream(), lambda v, to: np.multiply(v, c, out=to), reads=[g], writes=[x])
        return made[0] if edges == 1 else made

    return fn


class Step:
    """Two branches on streams of their own to a leaf that was made before any stream was, and to one of the second's.

    After a first pass `.grad` is there; then one that zeroes it, and goes backward, is captured on `c`.
    """

    def __init__(self, w: Any) -> None:
        self.w = w
        self.c, self.s, self.t = (w.stream() for _ in range(3))
        self.x = fanin.Leaf(w.array(np.zeros(4)), name="x")
        self.y = fanin.Leaf(w.array(np.zeros(4)), stream=self.t, name="y")
        a = fanin.Node(times(w, 2.0), edges=[(self.x, 0)], stream=self.s, name="a")
        b = fanin.Node(times(w, 3.0, 2), edges=[(self.x, 0), (self.y, 0)], stream=self.t, name="b")
        self.top = fanin.Node(times(w, 1.0, 2), edges=[(a, 0), (b, 0)], name="top")  # on its replacement (S7)
        self.g = w.array(np.ones(4))

    def backward(self) -> None:
        with fanin.stream(self.c):
            fanin.backward([(self.top, 0, self.g)], keep_graph=True)

    def capture(self) -> Any:
        self.w.begin_capture(self.c)
        for x in (self.x, self.y):
            self.w.fill(self.c, x.grad, 0.0)
        self.backward()
        return self.w.end_capture(self.c)

    def read(self, x: Any) -> float:
        with fanin.stream(self.c):
            seen: float = x.numpy()[0]
            return seen


@pytest.mark.rule("K1", "K4", "S7", "S20")
def test_a_pass_over_three_streams_is_captured_and_replayed(w: Any) -> None:
    step = Step(w)
    step.backward()
    kept = step.x.grad, step.y.grad
    graph = step.capture()
    assert w.state(step.s) == w.state(step.t) == 0
    for k in (2.0, 3.0, 4.0):
        w.fill(step.c, step.g, k)
        w.launch_graph(graph, step.c)
        assert (step.read(step.x.grad), step.read(step.y.grad)) == (5 * k, 3 * k)
    assert (step.x.grad, step.y.grad) == kept
    w.synchronize()
    w.destroy_graph(graph)


@pytest.mark.rule("K1", "S7")
@pytest.mark.parametrize("first", [True, False])
def test_an_uncaptured_current_stream_of_another_device_changes_nothing(first: bool) -> None:
    def passes(w: Any) -> None:
        step, other = Step(w), w.stream(1)
        step.backward()
        w.begin_capture(step.c)
        outer, inner = (other, step.c) if first else (step.c, other)
        with fanin.stream(outer), fanin.stream(inner):
            fanin.backward([(step.top, 0, step.g)], keep_graph=True)
        graph = w.end_capture(step.c)
        w.launch_graph(graph, step.c)
        assert (step.read(step.x.grad), step.read(step.y.grad)) == (10.0, 6.0)
        w.synchronize()
        w.destroy_graph(graph)

    with world("sim", 2) as w:
        passes(w)


@pytest.mark.rule("K3")
def test_memory_that_a_captured_pass_uses_lives_as_long_as_the_graph(w: Any) -> None:
    step = Step(w)
    step.backward()
    graph = step.capture()
    c, g, x, y = step.c, step.g, step.x.grad, step.y.grad
    del step
    gc.collect()
    others = [w.array(np.full(4, 7.0)) for _ in range(8)]  # freed memory would be reused
    for _ in range(2):
        w.launch_graph(graph, c)
    with fanin.stream(c):
        assert (x.numpy()[0], y.numpy()[0], g.numpy()[0]) == (5.0, 3.0, 1.0)
        assert [o.numpy()[0] for o in others] == [7.0] * 8
    w.synchronize()
    w.destroy_graph(graph)
    del graph, x, y, g, others


@pytest.mark.rule("K1")
def test_the_first_gradient_of_a_leaf_may_be_made_in_a_capture(w: Any) -> None:
    step = Step(w)
    w.begin_capture(step.c)
    step.backward()
    graph = w.end_capture(step.c)
    for k in (2.0, 3.0):
        w.fill(step.c, step.g, k)
        w.launch_graph(graph, step.c)
        assert (step.read(step.x.grad), step.read(step.y.grad)) == (5 * k, 3 * k)
    w.synchronize()
    w.destroy_graph(graph)


@pytest.mark.rule("K1", "S20")
def test_a_node_of_another_stream_without_gradients_joins_the_capture(w: Any) -> None:
    c, s = w.stream(), w.stream()
    x = w.array(np.zeros(4))
    low = fanin.Node(
        lambda g: w.launch(w.current_stream(), lambda v: np.add(v, 1, out=v), writes=[x]), stream=s, edges=[None]
    )
    top = fanin.Node(lambda g: None, edges=[(low, 0)], stream=s)
    w.begin_capture(c)
    with fanin.stream(c):
        fanin.backward([(top, 0, w.array(np.ones(4)))])
    graph = w.end_capture(c)
    w.synchronize()
    for _ in range(2):
        w.launch_graph(graph, c)
    with fanin.stream(c):
        assert x.numpy().tolist() == [2] * 4
    w.synchronize()
    w.destroy_graph(graph)


@pytest.mark.rule("K2")
@pytest.mark.parametrize("what", ["query", "synchronize", "read"])
def test_a_node_that_queries_the_device_in_a_capture_is_refused_by_name(w: Any, what: str) -> None:
    c, s = w.stream(), w.stream()

    def asks(g: Any) -> Any:
        with fanin.stream(s):
            {"query": lambda: s.record().query(), "synchronize": s.synchronize, "read": g.numpy}[what]()
        return g

    node = fanin.Node(asks, edges=[None], stream=s, name="Mul")
    w.begin_capture(c)
    with fanin.stream(c), pytest.raises(fanin.CaptureError) as caught:
        fanin.backward([(node, 0, w.array(np.ones(4)))])
    assert caught.value.__notes__ == [f"in Mul (node {node.sequence_nr}): 0 of 1 nodes had run"]
    if w.kind == "sim":
        with pytest.raises(fanin.CaptureError, match="an earlier violation"):  # as the device has it
            w.end_capture(c)
    else:
        w.end_capture(c)  # refused before any call of the device; and s was joined


@pytest.mark.rule("S7", "K4")
def test_without_the_redirection_a_node_of_the_legacy_stream_is_refused_by_name(w: Any) -> None:
    c = w.stream()
    x = fanin.Leaf(w.array(np.zeros(4)), name="x")
    g = w.array(np.ones(4))
    w.begin_capture(c)
    with (
        fanin.set_options(capture_redirect=False),
        fanin.stream(c),
        pytest.raises(fanin.CaptureError, match=r"x: slot 0.*legacy default stream") as caught,
    ):
        fanin.backward([(x, 0, g)])
    assert caught.value.__notes__ == [f"in x (leaf {x.sequence_nr}): 0 of 1 nodes had run"]
    assert x.grad is None
    w.end_capture(c)


@pytest.mark.rule("S7")
def test_a_pass_that_begins_outside_of_a_capture_of_its_nodes_is_refused(w: Any) -> None:
    """The caller's stream is not captured and a node's is: a wait across the capture's edge."""
    c, s = w.stream(), w.stream()
    low = fanin.Node(lambda g: None, stream=s, name="low")
    top = fanin.Node(lambda g: g, edges=[(low, 0)], stream=c, name="top")
    g = w.array(np.ones(4))
    w.begin_capture(s)
    with fanin.stream(c), pytest.raises(fanin.CaptureError) as caught:
        fanin.backward([(top, 0, g)])
    assert caught.value.__notes__[0].startswith("in low (node")
    w.end_capture(s)


@pytest.mark.rule("K1", "E6")
def test_a_captured_pass_that_fails_is_joined_so_that_the_capture_can_end(w: Any) -> None:
    c, s = w.stream(), w.stream()
    x = w.array(np.zeros(4))

    def fails(g: Any) -> None:
        w.launch(w.current_stream(), lambda v: np.add(v, 1, out=v), writes=[x])
        raise KeyError("boom")

    node = fanin.Node(fails, edges=[None], stream=s)
    w.begin_capture(c)
    with fanin.stream(c), pytest.raises(KeyError):
        fanin.backward([(node, 0, w.array(np.ones(4)))])
    graph = w.end_capture(c)
    w.launch_graph(graph, c)
    with fanin.stream(c):
        assert x.numpy().tolist() == [1] * 4
    w.synchronize()
    w.destroy_graph(graph)


@pytest.mark.rule("K1")
def test_a_node_of_another_backend_is_no_part_of_the_capture(driver: FakeDriver) -> None:
    """A machine's stream is captured; a node that runs on the driver's runs beside it, once."""
    with fanin.sim.Machine() as m:
        s, t = m.stream(), driver.stream()
        x, y = fanin.Leaf(m.array(np.zeros(4)), stream=s), fanin.Leaf(driver.array(np.zeros(4)), stream=t)
        inside = fanin.Node(lambda g: g, edges=[(x, 0)], stream=s)
        beside = fanin.Node(lambda g: g, edges=[(y, 0)], stream=t, name="beside")
        m.begin_capture(s)
        with fanin.stream(s):
            fanin.backward([(inside, 0, m.array(np.ones(4))), (beside, 0, driver.array(np.full(4, 3.0)))])
        m.launch_graph(m.end_capture(s), s)
        for leaf, on, value in ((x, s, 1), (y, t, 3)):
            with fanin.stream(on):
                assert leaf.grad.numpy().tolist() == [value] * 4
