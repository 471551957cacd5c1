"""Passes over several streams and devices: where a node runs, and which stream waits for which.

On the simulated machine and on the fake driver: the checker of happens-before judges each test at its end, which also
checks for leaks.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.sim import Machine
from kit import hooks

pytestmark = pytest.mark.core

planted = pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")


@pytest.fixture(autouse=True)
def meant() -> Iterator[None]:
    """Leaves on other streams than their producers' are meant here (S6); nothing stays planted."""
    with fanin.set_options(warn_stream_mismatch=False):
        yield
    hooks.fault(None)


def times(w: Any, c: float, device: int = 0, edges: int = 1) -> Callable[[Any], Any]:
    """A node's function: c times its sum, made on the stream that is current, once for each edge."""

    def fn(g: Any) -> Any:
        made = []
        for _ in range(edges):
            made.append(w.empty(4, device=device))
            w.launch(w.current_stream(device), lambda v, to: np.multiply(v, c, out=to), reads=[g], writes=made[-1:])
        return made[0] if edges == 1 else made

    return fn


def ones(w: Any, stream: Any = None, device: int = 0, value: float = 1.0) -> Any:
    """An array of ones; made late, on a stream."""
    if stream is None:
        return w.array(np.full(4, value), device)
    x = w.empty(4, device=device)
    w.fill(stream, x, value)
    return x


def read(w: Any, stream: Any, x: Any) -> np.ndarray:
    """The content of an array as work on a stream reads it."""
    seen: list[np.ndarray] = []
    w.launch(stream, lambda v: seen.append(v.copy()), reads=[x])
    w.synchronize()
    return seen[0]


def leaf(w: Any, stream: Any, device: int = 0, name: str = "w") -> Any:
    return fanin.Leaf(ones(w, None, device, 0.0), stream=stream, name=name)


def costs(call: Callable[[], Any]) -> tuple[int, int]:
    """How many events a call records, how many waits it queues."""
    with fanin.trace() as t:
        call()
    kinds = Counter(line.kind for line in t.lines)
    return kinds["record"], kinds["wait"]


# Where a node is


@pytest.mark.rule("E4")
def test_a_node_is_on_the_stream_that_was_current_where_it_was_made(w: Any) -> None:
    s, t = w.stream(0), w.stream(1)
    with fanin.stream(t), fanin.stream(s):
        node = fanin.Node(lambda g: g)
        there = fanin.Node(lambda g: g, device=w.place(1))
        declared = fanin.Node(lambda g: g, slots=[None, ones(w, None, 1)])
        host = fanin.Node(lambda g: g, slots=[np.zeros(2)])
        cpu = fanin.Node(lambda g: g, device="cpu")
        of_array = leaf(w, None, 1)
    nowhere = fanin.Node(lambda g: g)
    given = fanin.Node(lambda g: g, stream=t)
    assert (node.stream, node.device) == (s, w.place(0))
    for x in (there, declared, given):
        assert (x.stream, x.device) == (t, w.place(1))
    for x in (host, cpu, nowhere):
        assert (x.stream, x.device) == (None, "cpu")
    assert of_array.stream == t and leaf(w, None, 1).stream == w.legacy(1) and leaf(w, s).stream == s
    assert fanin.Leaf(np.zeros(2)).stream is None
    assert fanin.Node(lambda g: g, device=w.place(1)).stream == w.legacy(1)


@pytest.mark.rule("E4")
def test_while_a_node_runs_the_streams_of_its_forward_are_current(w: Any) -> None:
    s, t, c, seen = w.stream(0), w.stream(1), w.stream(0), []

    def look(*_: Any) -> None:
        seen.append((w.current_stream(0), w.current_stream(1)))

    with fanin.stream(t), fanin.stream(s):
        node = fanin.Node(look, release=look, edges=[None])
        x = fanin.Leaf(np.zeros(1))
        outside = fanin.Node(lambda g: g, edges=[(x, 0)])
    node.register_hook(look)
    node.register_prehook(look)
    node.register_posthook(look)
    x.register_hook(look)
    x.register_post_accumulate_grad_hook(look)
    bare = fanin.Node(look, edges=[None])
    with fanin.stream(c):
        fanin.backward([(node, 0, 1.0), (outside, 0, np.ones(1))])
        assert seen == [(s, t)] * 7
        fanin.backward([(bare, 0, 1.0)])
        assert seen[7:] == [(w.legacy(0), w.legacy(1))]
        assert w.current_stream(0) == c and w.current_stream(1) == w.legacy(1)


@pytest.mark.rule("E4")
def test_a_stream_that_a_function_leaves_current_is_reset_after_it(w: Any) -> None:
    s, t, c, kept = w.stream(), w.stream(), w.stream(), []

    def leaves_one(g: Any) -> Any:
        kept.append(fanin.stream(t))
        kept[0].__enter__()
        return g

    with fanin.stream(s):
        low = fanin.Node(lambda g: kept.append(w.current_stream()))
        top = fanin.Node(leaves_one, edges=[(low, 0)])
    with fanin.stream(c):
        fanin.backward([(top, 0, 1.0)])
        assert kept[1:] == [s] and w.current_stream() == c
        kept[0].__exit__(None, None, None)
        assert w.current_stream() == c


@pytest.mark.rule("E4")
def test_a_stream_that_ends_before_the_one_nested_in_it_is_no_longer_current(w: Any) -> None:
    s, t = w.stream(), w.stream(1)
    outer, inner = fanin.stream(s), fanin.stream(t)
    outer.__enter__()
    inner.__enter__()
    seen: list[Any] = []
    both = fanin.Node(lambda g: seen.append((w.current_stream(0), w.current_stream(1))))
    outer.__exit__(None, None, None)
    one = fanin.Node(lambda g: seen.append((w.current_stream(0), w.current_stream(1))))
    inner.__exit__(None, None, None)
    fanin.backward([(one, 0, 1.0), (both, 0, 1.0)])
    assert seen == [(w.legacy(0), t), (s, t)] and both.stream == one.stream == t


# Which stream waits for which


@pytest.mark.rule("S8", "S18", "S20")
def test_a_pass_on_the_callers_stream_costs_no_event_and_no_wait(w: Any) -> None:
    s = w.stream()
    with fanin.stream(s):
        x = leaf(w, None)
        low = [fanin.Node(times(w, c), edges=[(x, 0)]) for c in (2.0, 3.0)]
        top = fanin.Node(times(w, 1.0, edges=2), edges=[(n, 0) for n in low])
        g = ones(w, s)
        assert costs(lambda: fanin.backward([(top, 0, g)])) == (0, 0)
    assert read(w, s, x.grad).tolist() == [5] * 4


@pytest.mark.rule("S9", "S18", "S19", "S20")
def test_a_pass_on_another_stream_costs_three_events_and_three_waits(w: Any) -> None:
    """The root's gradient for it, the caller's stream for its leaf, and it for the caller's stream."""
    s, c = w.stream(), w.stream()
    with fanin.stream(s):
        x = leaf(w, None)
        top = fanin.Node(times(w, 2.0), edges=[(fanin.Node(times(w, 3.0), edges=[(x, 0)]), 0)])
    g = ones(w, c)
    with fanin.stream(c):
        assert costs(lambda: fanin.backward([(top, 0, g)])) == (3, 3)
    assert s in g.users
    assert read(w, c, x.grad).tolist() == [6] * 4


@pytest.mark.rule("S12", "S13", "S20")
def test_two_producers_on_two_streams_cost_a_wait_each(w: Any) -> None:
    s, t, c = w.stream(), w.stream(), w.stream()
    x = leaf(w, c)
    low = [fanin.Node(times(w, k), edges=[(x, 0)], stream=on) for k, on in ((2.0, s), (3.0, t))]
    top = fanin.Node(times(w, 1.0, edges=2), edges=[(n, 0) for n in low], stream=c)
    g = ones(w, c)
    with fanin.stream(c):
        assert costs(lambda: fanin.backward([(top, 0, g)])) == (4, 4)
    assert read(w, c, x.grad).tolist() == [5] * 4


@pytest.mark.rule("S9", "S18", "A14")
def test_a_single_gradient_is_handed_through_as_it_is_with_one_wait(w: Any) -> None:
    s, t, seen = w.stream(), w.stream(), []
    low = fanin.Node(lambda g: seen.append(g), stream=t)
    top = fanin.Node(lambda g: g, edges=[(low, 0)], stream=s)
    g = ones(w, s)
    with fanin.stream(s):
        assert costs(lambda: fanin.backward([(top, 0, g)])) == (2, 2)  # t for s, and s for t at the end
    assert seen[0] is g and t in g.users


@pytest.mark.rule("S10")
def test_a_node_of_another_device_gets_its_gradient_on_that_device(w: Any) -> None:
    """A copy: its stream is of the device that it reads on; what it gives is ready there (P)."""
    s, t, c = w.stream(0), w.stream(1), w.stream(0)

    def copy(g: Any) -> Any:
        to = w.empty(4, device=1)
        w.launch(w.current_stream(0), lambda v, out: np.copyto(out, v), reads=[g], writes=[to])
        return to

    x = leaf(w, t, 1)
    node = fanin.Node(copy, edges=[(x, 0)], stream=s)
    with fanin.stream(c):
        fanin.backward([(node, 0, ones(w, c))])
    assert read(w, w.legacy(1), x.grad).tolist() == [1] * 4  # the caller's stream of that device


@pytest.mark.rule("S20")
def test_leaves_of_one_stream_are_waited_for_once(w: Any) -> None:
    s, c = w.stream(), w.stream()
    leaves = [leaf(w, s) for _ in range(5)]
    top = fanin.Node(times(w, 2.0, edges=5), edges=[(x, 0) for x in leaves], stream=s)
    g = ones(w, c)
    with fanin.stream(c):
        assert costs(lambda: fanin.backward([(top, 0, g)])) == (3, 3)
    for x in leaves:
        assert read(w, c, x.grad).tolist() == [2] * 4


@pytest.mark.rule("S20", "L5")
def test_a_leaf_is_written_after_the_callers_work_on_it(w: Any) -> None:
    s, c = w.stream(), w.stream()
    x = leaf(w, s)
    x.grad = w.empty(4)
    top = fanin.Node(times(w, 2.0), edges=[(x, 0)], stream=s)
    for _ in range(2):
        kept = x.grad
        w.fill(c, kept, 1.0)
        with fanin.stream(c):
            fanin.backward([(top, 0, ones(w, c))], keep_graph=True)
        assert x.grad is kept and read(w, c, kept).tolist() == [3] * 4


@pytest.mark.rule("S20")
def test_gradients_that_grad_returns_are_ready_on_the_callers_stream(w: Any) -> None:
    s, t, c = w.stream(), w.stream(), w.stream()
    x = leaf(w, t)
    low = fanin.Node(times(w, 3.0), edges=[(x, 0)], stream=s)
    top = fanin.Node(times(w, 2.0), edges=[(low, 0)], stream=s)
    with fanin.stream(c):
        of_low, of_x = fanin.grad([(top, 0, ones(w, c))], [low, x])
    assert x.grad is None
    assert read(w, c, of_low).tolist() == [2] * 4 and read(w, c, of_x).tolist() == [6] * 4
    assert c in of_low.users and c in of_x.users


@pytest.mark.rule("S20")
@pytest.mark.parametrize("own", [True, False])
def test_the_pass_waits_for_a_node_that_returns_no_gradient(w: Any, own: bool) -> None:
    s, c, kept = w.stream(), w.stream(), w.empty(4)

    def into(g: Any) -> None:
        w.launch(w.current_stream(), lambda v, to: np.copyto(to, v), reads=[g], writes=[kept])

    sink = fanin.Node(into, stream=s if own else None)
    with fanin.stream(c):
        fanin.backward([(sink, 0, ones(w, c))])
    assert read(w, c, kept).tolist() == [1] * 4


@pytest.mark.rule("S20", "E6")
def test_the_callers_stream_waits_for_a_failed_pass_too(w: Any) -> None:
    s, c = w.stream(), w.stream()
    x = leaf(w, s)

    def fail(g: Any) -> None:
        raise KeyError("boom")

    late = fanin.Node(fail, name="late")
    top = fanin.Node(times(w, 2.0, edges=2), edges=[(x, 0), (late, 0)], stream=s)
    with fanin.stream(c), pytest.raises(KeyError):
        fanin.backward([(top, 0, ones(w, c))])
    assert read(w, c, x.grad).tolist() == [2] * 4


@pytest.mark.rule("E7", "S20")
def test_a_pass_inside_a_node_ends_on_the_nodes_stream(w: Any) -> None:
    s, t, c = w.stream(), w.stream(), w.stream()
    inner = leaf(w, t, name="inner")
    x = leaf(w, c)

    def nested(g: Any) -> Any:
        fanin.backward([(fanin.Node(times(w, 2.0), edges=[(inner, 0)], stream=t), 0, g)])
        return times(w, 3.0)(inner.grad)

    node = fanin.Node(nested, edges=[(x, 0)], stream=s)
    with fanin.stream(c):
        fanin.backward([(node, 0, ones(w, c))])
    assert read(w, c, x.grad).tolist() == [6] * 4


@pytest.mark.rule("E16")
@pytest.mark.parametrize("whole", [True, False])
def test_a_pass_by_hand_is_ordered_alike(w: Any, whole: bool) -> None:
    s, c = w.stream(), w.stream()
    x = leaf(w, s)
    low = fanin.Node(times(w, 3.0), edges=[(x, 0)], stream=s)
    top = fanin.Node(times(w, 2.0, edges=2), edges=[(x, 0) if not whole else (low, 0), (low, 0)], stream=s)
    with fanin.stream(c):
        p = fanin.walk([(top, 0, ones(w, c))])
    for node, sums in p:
        with fanin.stream(node.stream):
            made = node.fn(*sums)
        p.give(made)
        if not whole:
            break
    p.close()
    if whole:
        assert read(w, c, x.grad).tolist() == [12] * 4


@pytest.mark.rule("L5", "S18")
def test_a_wider_leaf_on_another_stream_is_read_on_any(w: Any) -> None:
    s, c = w.stream(), w.stream()
    x = fanin.Leaf(w.array(np.zeros(4, np.float32)), accumulate="float64", stream=s, name="wide")
    top = fanin.Node(lambda g: g, edges=[(x, 0)], stream=s)
    for k in (1.0, 2.0):
        with fanin.stream(c):
            g = w.empty(4, np.float32)
            w.fill(c, g, k)
            fanin.backward([(top, 0, g)], keep_graph=True)
            got = x.grad
        assert got.dtype == np.float32 and read(w, c, got).tolist() == [k * (k + 1) / 2] * 4


# S6


@pytest.mark.rule("S6")
def test_a_leaf_on_another_stream_than_its_producer_is_warned_about(a_world: Any) -> None:
    w = a_world("sim")
    s, t = w.stream(), w.stream()
    x = leaf(w, s, name="weight")
    top = fanin.Node(times(w, 2.0), edges=[(x, 0)], stream=t)
    warns = pytest.warns(fanin.StreamMismatchWarning, match="weight: slot 0: .*stream")
    with fanin.set_options(warn_stream_mismatch=True), warns:
        fanin.backward([(top, 0, ones(w))])
    w.synchronize()


# What bad input gets


def test_a_stream_of_another_device_is_refused(w: Any) -> None:
    s, t = w.stream(0), w.stream(1)
    x, y = ones(w), ones(w, None, 1)
    a, b = w.place(0), w.place(1)
    with pytest.raises(ValueError, match=rf"Mul: stream: expected one of {b}, its device, got stream \d+ of"):
        fanin.Node(lambda g: g, stream=s, device=b, name="Mul")
    with pytest.raises(ValueError, match=rf"Mul: stream: expected one of {b}, the device of slot 0, got stream \d+ of"):
        fanin.Node(lambda g, h: g, slots=[y, y], stream=s, name="Mul")
    with pytest.raises(ValueError, match=rf"w: stream: expected one of {a}, the device of slot 0, got stream \d+"):
        fanin.Leaf(x, stream=t, name="w")
    with pytest.raises(ValueError, match="w: stream: expected one of cpu, the device of slot 0"):
        fanin.Leaf(np.zeros(2), stream=t, name="w")
    with pytest.raises(TypeError, match="Mul: "):
        fanin.Node(lambda g: g, stream="s", name="Mul")
    with pytest.raises(TypeError, match=r"Mul: .*device's name"):
        fanin.Node(lambda g: g, device=1, name="Mul")
    assert fanin.Node(lambda g, h: g, slots=[x, y], stream=t).stream == t


def test_a_gradient_on_another_device_than_its_slot_declares_is_refused_by_name(w: Any) -> None:
    low = fanin.Node(lambda g: g, slots=[ones(w, None, 1)], name="Low")
    top = fanin.Node(lambda g: (None, g), edges=[None, (low, 0)], name="Mul")
    said = rf"Mul returned an invalid gradient at index 1: expected a gradient on {w.place(1)}, got one on {w.place(0)}"
    with pytest.raises(ValueError, match=said):
        fanin.backward([(top, 0, ones(w))])


@pytest.mark.rule("A12", "A14", "S18")
@pytest.mark.parametrize("says", ["stream", "device"])
def test_the_stream_of_a_node_does_not_decide_where_its_gradients_lie(w: Any, says: str) -> None:
    """The node of a copy from device 0 to device 1, or to the host, runs on 0 and gets what lies elsewhere; its stream
    waits for it.
    """
    s, t = w.stream(0), w.stream(1)
    seen: list[Any] = []

    def fn(g: Any) -> Any:
        if g is not host:
            w.launch(s, lambda v: seen.append(v.copy()), reads=[g])
        return ()

    host = np.ones(4)
    for g in (host, ones(w, t, 1)):
        with fanin.stream(s):
            low = fanin.Node(fn, **{says: s if says == "stream" else w.place(0)})
        with fanin.stream(t):
            top = fanin.Node(lambda _, g=g: g, edges=[(low, 0)])
        assert low.device == w.place(0) and fanin.grad([(top, 0, 1.0)], [low])[0] is g
        fanin.backward([(low, 0, g)])
    w.synchronize()
    assert [x.tolist() for x in seen] == [[1] * 4]


@pytest.mark.rule("A12", "V2", "V3")
def test_gradients_on_two_devices_are_no_sum_and_the_error_names_node_and_index(w: Any) -> None:
    """If no slot declares a device, the first gradient decides it; of two devices the error names the second."""
    here, there, host = ones(w), ones(w, None, 1), np.ones(4)
    places = {id(here): w.place(0), id(there): w.place(1), id(host): "cpu"}
    for first, second in [(here, there), (there, here), (host, here), (there, host)]:
        low = fanin.Node(lambda g: (), device=w.place(0), name="Low")
        for late in (True, False):  # whether what comes second is a node's, or a root's gradient
            mul = fanin.Node(lambda _, g=second: (None, g), edges=[None, (low, 0)], name="Mul")
            roots = [(low, 0, first), (mul, 0, 1.0)] if late else [(low, 0, first), (low, 0, second)]
            who = "Mul returned" if late else "backward was given"
            said = f"expected a gradient on {places[id(first)]}, got one on {places[id(second)]}"
            with pytest.raises(ValueError, match=rf"^{who} an invalid gradient at index 1: {said} \(A12\)"):
                fanin.backward(roots)


def test_a_stream_of_another_machine_is_refused_by_name(a_world: Any) -> None:
    w, other = a_world("sim"), a_world("sim")
    s, x = w.stream(), other.array(np.ones(4))
    with pytest.raises(ValueError, match=r"Mul: stream: expected one of sim:0, .* of another machine"):
        fanin.Node(lambda g: g, slots=[x], stream=s, name="Mul")
    low = fanin.Node(lambda g: g, edges=[None])
    top = fanin.Node(lambda g: (None, x), edges=[None, (low, 0)], stream=s, name="Mul")
    with pytest.raises(
        TypeError, match=r"Mul returned an invalid gradient at index 1: the producer's stream is on sim"
    ):
        fanin.backward([(top, 0, 1.0)])
    low = fanin.Node(lambda g: g, edges=[None], stream=s)
    top = fanin.Node(lambda g: (None, x), edges=[None, (low, 0)], name="Mul")
    with pytest.raises(
        TypeError, match=r"Mul returned an invalid gradient at index 1: the consumer's stream is on sim"
    ):
        fanin.backward([(top, 0, 1.0)])


def test_a_stream_that_was_destroyed_is_named_with_its_node(a_world: Any) -> None:
    w = a_world("fake")
    w.judges_itself("a stream is destroyed that is still used")
    s, c = w.stream(), w.stream()
    low = fanin.Node(lambda g: g, stream=s, edges=[None], name="Low")
    top = fanin.Node(lambda g: g, edges=[(low, 0)], stream=c, name="Mul")
    w.call("cuStreamDestroy_v2", ctypes.c_void_p(s.handle))
    with fanin.stream(c), pytest.raises(fanin.DeviceError, match="Was a stream destroyed that is still used") as caught:
        fanin.backward([(top, 0, ones(w))])
    assert caught.value.__notes__ == [f"in Low (node {low.sequence_nr}): 1 of 2 nodes had run"]


# Planted faults


def late_end(w: Any) -> None:
    s, c = w.stream(), w.stream()
    x = leaf(w, s)
    top = fanin.Node(times(w, 2.0), edges=[(x, 0)], stream=s)
    with fanin.stream(c):
        fanin.backward([(top, 0, ones(w, c))])
    w.launch(c, lambda v: None, reads=[x.grad])


def early_write(w: Any) -> None:
    s, c = w.stream(), w.stream()
    x = leaf(w, s)
    x.grad = w.empty(4)
    g = ones(w, s)
    top = fanin.Node(lambda _: g, edges=[(x, 0)], stream=s)
    w.fill(c, x.grad, 1.0)
    with fanin.stream(c):
        fanin.backward([(top, 0, 1.0)])


def hooked(w: Any) -> None:
    s, c = w.stream(), w.stream()
    node = fanin.Node(times(w, 3.0), edges=[None], stream=s)
    node.register_hook(times(w, 2.0))
    top = fanin.Node(times(w, 2.0), edges=[(node, 0)], stream=s)
    with fanin.stream(c):
        fanin.backward([(top, 0, ones(w, c))])


def consumed(w: Any) -> None:
    s, t = w.stream(), w.stream()
    node = fanin.Node(times(w, 3.0), edges=[None], stream=s)
    top = fanin.Node(times(w, 2.0, edges=2), edges=[(node, 0), (node, 0)], stream=t)
    with fanin.stream(t):
        fanin.backward([(top, 0, ones(w, t))])


def forwarded(w: Any) -> None:
    s, t = w.stream(), w.stream()
    node = fanin.Node(times(w, 3.0), edges=[None], stream=s)
    top = fanin.Node(times(w, 2.0), edges=[(node, 0)], stream=t)
    with fanin.stream(t):
        fanin.backward([(top, 0, ones(w, t))])


def found(w: Any, fault: str, scene: Callable[[Any], None]) -> None:
    """Without the fault there is no race; with it there is one."""
    scene(w)
    w.synchronize()
    assert not w.races
    hooks.fault(fault)
    for call in (lambda: scene(w), w.synchronize, w.synchronize):
        with contextlib.suppress(fanin.RaceError):  # one that is found when memory goes is raised by the next call
            call()
    hooks.fault(None)
    w.races_are_planted()


@planted
@pytest.mark.rule("S20")
def test_an_end_without_its_waits_is_found(w: Any) -> None:
    found(w, "END_WITHOUT_WAIT", late_end)


@planted
@pytest.mark.rule("S20")
def test_a_leaf_that_writes_before_the_callers_work_is_found(w: Any) -> None:
    found(w, "LEAF_WITHOUT_WAIT", early_write)


@planted
@pytest.mark.rule("E4", "S18")
def test_hooks_that_run_on_the_callers_stream_are_found(w: Any) -> None:
    found(w, "HOOK_ON_CALLER", hooked)


@planted
@pytest.mark.rule("S14", "S18")
def test_a_sum_for_the_producers_stream_is_found(w: Any) -> None:
    found(w, "SUM_FOR_PRODUCER", consumed)


@planted
@pytest.mark.rule("A14", "S18")
def test_a_gradient_handed_through_without_a_wait_is_found(w: Any) -> None:
    found(w, "HAND_WITHOUT_WAIT", forwarded)


def test_no_slot_of_a_node_declares_another_machine_than_its_streams() -> None:
    with Machine() as one, Machine() as other:
        x, y = one.array(np.ones(3)), one.array(np.ones(3), 1)
        for slots in ([x], [fanin.Slot(), x], [y, fanin.Slot()]):
            with pytest.raises(ValueError, match=r"the device of slot \d, got stream \d+ of sim:0 of another machine"):
                fanin.Node(lambda *g: None, len(slots), slots=slots, stream=other.stream())
        fanin.Node(lambda *g: None, 2, slots=[y, fanin.Slot()], stream=one.stream())
