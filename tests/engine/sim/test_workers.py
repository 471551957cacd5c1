"""E12: the nodes of one pass on several threads: the same bits, each node once, an error stops all."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.world import world

pytestmark = [pytest.mark.core, pytest.mark.threads]


def fan_out(functions: list[Callable[[Any], Any]], **how: Any) -> tuple[fanin.Node, fanin.Leaf]:
    """A node that gives its sum to one node for each function, and these to one leaf."""
    leaf = fanin.Leaf(np.zeros(1), name="leaf")
    nodes = [fanin.Node(fn, edges=[(leaf, 0)], name=f"n{i}", **how) for i, fn in enumerate(functions)]
    return fanin.Node(lambda g: [g] * len(nodes), edges=[(n, 0) for n in nodes], name="top"), leaf


def one(top: fanin.Node) -> list[Any]:
    return [(top, 0, np.ones(1))]


def meeting(parties: int, then: Callable[[int], Any] = lambda place: None) -> list[Callable[[Any], Any]]:
    """Functions that wait for one another."""
    barrier = threading.Barrier(parties)

    def wait(place: int) -> Callable[[Any], Any]:
        def fn(g: Any) -> Any:
            barrier.wait()
            then(place)
            return g

        return fn

    return [wait(place) for place in range(parties)]


@pytest.mark.rule("E12")
@pytest.mark.parametrize("k", [2, 3, 5])
def test_as_many_workers_as_requested_run_at_once(k: int) -> None:
    top, leaf = fan_out(meeting(k))
    fanin.backward(one(top), workers=k)
    assert leaf.grad[0] == k


@pytest.mark.rule("E12", "A15")
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_bits_are_the_same_for_every_number_of_workers(workers: int) -> None:
    factors = np.random.default_rng(5).standard_normal(40) * 10.0 ** np.arange(-20, 20)
    top, leaf = fan_out([lambda g, c=c: g * c for c in factors])
    fanin.backward(one(top), workers=workers)
    expected = 0.0
    for c in reversed(factors):  # keys: the latest producer first
        expected += c
    assert leaf.grad.tobytes() == np.array([expected]).tobytes()


@pytest.mark.rule("E12")
def test_grad_takes_workers_too() -> None:
    top, leaf = fan_out(meeting(2))
    [sum_] = fanin.grad(one(top), [leaf], workers=2)
    assert sum_[0] == 2.0 and leaf.grad is None


@pytest.mark.rule("E12")
def test_a_chain_never_leaves_the_thread_of_its_caller() -> None:
    seen = set()

    def fn(g: Any) -> Any:
        seen.add(threading.get_ident())
        return g

    node: Any = fanin.Leaf(np.zeros(1))
    for _ in range(200):
        node = fanin.Node(fn, edges=[(node, 0)])
    fanin.backward(one(node), workers=8)
    assert seen == {threading.get_ident()}


@pytest.mark.rule("E12")
@pytest.mark.parametrize("group", ["a text", object()], ids=["text", "object"])
def test_of_a_group_one_node_runs_at_a_time(group: object) -> None:
    at_work, most, met = 0, 0, threading.Barrier(2)

    def member(g: Any) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        np.sort(np.random.default_rng(0).random(200_000))  # lets others in
        at_work -= 1
        return g

    def other(g: Any) -> Any:
        met.wait()
        return g

    leaf = fanin.Leaf(np.zeros(1))
    same = [group if not isinstance(group, str) else "".join(group) for _ in range(6)]
    nodes = [fanin.Node(member, edges=[(leaf, 0)], group=g) for g in same]
    nodes += [fanin.Node(other, edges=[(leaf, 0)]) for _ in range(2)]  # they meet, so there are two workers
    top = fanin.Node(lambda g: [g] * 8, edges=[(n, 0) for n in nodes])
    fanin.backward(one(top), workers=4)
    assert most == 1 and leaf.grad[0] == 8 and nodes[0].group == group and nodes[-1].group is None


def test_a_group_that_is_no_string_or_shared_object_is_refused() -> None:
    with pytest.raises(TypeError, match=r"group must be a str or an object shared by the nodes .*, got an int"):
        fanin.Node(lambda g: g, group=1000)


@pytest.mark.rule("E3", "E12", "S20")
def test_nodes_of_one_device_run_on_the_callers_thread() -> None:
    seen: dict[str, set[int]] = {"cpu": set(), "device": set()}
    with fanin.sim.Machine() as m, fanin.set_options(warn_stream_mismatch=False):
        streams = [m.stream() for _ in range(2)]
        leaf, here = fanin.Leaf(m.array(np.zeros(1)), stream=streams[0]), fanin.Leaf(np.zeros(1))
        leaf.register_hook(lambda g: seen["device"].add(threading.get_ident()))

        def kernel(stream: fanin.Stream) -> Callable[[Any], Any]:
            def fn(g: Any) -> Any:
                seen["device"].add(threading.get_ident())
                out = m.empty(1)
                m.launch(stream, lambda y: np.copyto(y, 2.0), writes=[out])
                return out

            return fn

        def wait(g: Any) -> Any:
            seen["cpu"].add(threading.get_ident())
            met.wait()
            return g

        met = threading.Barrier(2)
        nodes = [fanin.Node(kernel(s), edges=[(leaf, 0)], stream=s) for s in streams * 3]
        nodes += [fanin.Node(wait, edges=[(here, 0)]) for _ in range(2)]
        top = fanin.Node(lambda g: [None] * 6 + [g] * 2, edges=[(n, 0) for n in nodes], name="top")
        fanin.backward(one(top), workers=3)
        assert leaf.grad.numpy()[0] == 12.0 and here.grad[0] == 2.0 and m.races == 0
    assert seen["device"] == {threading.get_ident()} and len(seen["cpu"]) == 2


@pytest.mark.rule("E3", "E12", "S20")
@pytest.mark.parametrize("kind", ["sim", "fake"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_several_devices_have_one_worker_each_as_far_as_there_are_workers(kind: str, workers: int) -> None:
    seen: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def passes(w: Any) -> None:
        streams = [w.stream(d) for d in range(3) for _ in range(2)]
        leaves = [fanin.Leaf(w.array(np.zeros(1), d), stream=streams[2 * d], name=f"on{d}") for d in range(3)]
        for d, x in enumerate(leaves):
            x.register_hook(lambda g, d=d: seen[d].add(threading.get_ident()))

        def node(k: int) -> fanin.Node:
            def fn(g: Any) -> Any:
                seen[k // 2].add(threading.get_ident())
                out = w.empty(1, np.float64, device=k // 2)
                w.fill(streams[k], out, 2.0)
                return out

            return fanin.Node(fn, edges=[(leaves[k // 2], 0)], stream=streams[k])

        nodes = [node(k % 6) for k in range(18)]
        top = fanin.Node(lambda g: [g] * 18, edges=[(n, 0) for n in nodes], device="cpu")
        fanin.backward(one(top), workers=workers)
        assert [x.grad.numpy().tolist() for x in leaves] == [[12.0]] * 3

    with world(kind, 3) as w, fanin.set_options(warn_stream_mismatch=False):
        passes(w)
    assert [len(t) for t in seen.values()] == [1, 1, 1]
    assert len(set().union(*seen.values())) == min(workers, 3)
    assert any(threading.get_ident() in t for t in seen.values())


@pytest.mark.rule("E14")
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_on_any_worker_is_raised_with_its_node(place: int) -> None:
    def then(i: int) -> None:
        if i == place:
            raise ValueError(f"of {i}")

    top, leaf = fan_out(meeting(2, then))
    with pytest.raises(ValueError, match=f"of {place}") as e:
        fanin.backward(one(top), workers=2)
    note, *lost = e.value.__notes__
    assert "of top" not in "".join(lost), "both nodes had taken what they were given"
    assert note.startswith(f"in n{place} (node ") and note.endswith("of 4 nodes had run")
    assert leaf.grad is None


@pytest.mark.rule("E14")
def test_of_two_concurrent_errors_one_is_raised_and_names_the_other() -> None:
    met = threading.Barrier(2)

    def bad(g: Any) -> Any:
        met.wait()
        raise ValueError("bad")

    top, _ = fan_out([bad, bad])
    with pytest.raises(ValueError, match="bad") as e:
        fanin.backward(one(top), workers=2)
    own, *others = e.value.__notes__
    [other] = [n for n in others if not n.startswith("lost with the pass: ")]
    assert own.startswith("in n") and other.startswith("beside it: ValueError('bad'), ['in n")
    assert own[:5] not in other


@pytest.mark.rule("E14")
@pytest.mark.parametrize("place", [0, 1])
def test_ctrl_c_is_raised_before_a_concurrent_error(place: int) -> None:
    def then(i: int) -> None:
        raise KeyboardInterrupt if i == place else ValueError("bad")

    top, _ = fan_out(meeting(2, then))
    with pytest.raises(KeyboardInterrupt) as e:
        fanin.backward(one(top), workers=2)
    assert any("ValueError('bad')" in note for note in e.value.__notes__)


@pytest.mark.rule("E14")
def test_ctrl_c_interrupts_a_caller_that_waits_for_a_worker() -> None:
    """The helper sends it once the caller has nothing to do, and continues when the caller received it."""
    main, met, heard = threading.get_ident(), threading.Barrier(2), threading.Event()
    later: list[Any] = []
    here = sys._getframe().f_code

    def fn(g: Any) -> Any:
        met.wait()
        if threading.get_ident() != main:
            while sys._current_frames()[main].f_code is not here:  # the caller is in its own node still
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait()
        return g

    def handler(*_: Any) -> None:
        heard.set()
        raise KeyboardInterrupt

    top, leaf = fan_out([fn, fn])
    leaf.register_hook(lambda g: later.append(g))
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt) as e:
            fanin.backward(one(top), workers=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert e.value.__notes__[0].startswith("between nodes: ") and not later and leaf.grad is None


@pytest.mark.rule("E14", "E6")
def test_after_an_error_no_node_begins_and_leaves_are_whole_or_untouched() -> None:
    ran: list[int] = []
    leaves = [fanin.Leaf(np.zeros(1)) for _ in range(50)]

    def fn(g: Any, i: int) -> Any:
        ran.append(i)
        if i == 25:
            raise ValueError("bad")
        return g, g * 2.0

    nodes = [fanin.Node(lambda g, i=i: fn(g, i), edges=[(x, 0), (x, 0)]) for i, x in enumerate(leaves)]
    top = fanin.Node(lambda g: [g] * 50, edges=[(n, 0) for n in nodes])
    with pytest.raises(ValueError, match="bad"):
        fanin.backward(one(top), workers=3, keep_graph=True)
    assert len(ran) == len(set(ran)) < 50
    assert {None if x.grad is None else float(x.grad[0]) for x in leaves} <= {None, 3.0}


@pytest.mark.rule("E7", "E12")
def test_passes_inside_passes_have_workers_of_their_own() -> None:
    def inside(depth: int) -> Callable[[Any], Any]:
        def fn(g: Any) -> Any:
            if depth == 0:
                return g
            top, leaf = fan_out([inside(depth - 1)] * 2)
            fanin.backward([(top, 0, g)], workers=2)
            return leaf.grad

        return fn

    assert inside(6)(np.ones(1))[0] == 64.0


@pytest.mark.rule("E15")
def test_passes_of_several_threads_may_have_several_workers_over_one_graph() -> None:
    top, leaf = fan_out([lambda g, c=c: g * c for c in range(20)])
    threads = [
        threading.Thread(target=fanin.backward, args=(one(top),), kwargs={"workers": 3, "keep_graph": True})
        for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert leaf.grad[0] == 4 * 190


@pytest.mark.rule("E12")
def test_workers_run_in_a_copy_of_the_callers_context() -> None:
    var = contextvars.ContextVar("var", default=0)
    var.set(7)
    seen: list[Any] = []

    def then(place: int) -> None:
        seen.append((var.get(), np.geterr()["divide"]))
        var.set(place)

    top, _ = fan_out(meeting(3, then))
    with np.errstate(divide="raise"):
        fanin.backward(one(top), workers=3)
    assert [value for value, _ in seen] == [7] * 3
    if np.__version__ >= "2":  # before, it belongs to the thread, not to the context
        assert [handling for _, handling in seen] == ["raise"] * 3


@pytest.mark.rule("E9", "E12")
def test_hooks_run_once_on_the_worker_of_their_node() -> None:
    seen: Counter[str] = Counter()
    threads: dict[int, set[int]] = {0: set(), 1: set()}
    functions = meeting(2, lambda place: threads[place].add(threading.get_ident()))
    leaf = fanin.Leaf(np.zeros(1))
    nodes = [fanin.Node(fn, edges=[(leaf, 0)]) for fn in functions]
    for place, n in enumerate(nodes):

        def record(what: str, place: int = place) -> None:
            seen[what] += 1
            threads[place].add(threading.get_ident())

        n.register_hook(lambda g, record=record: record("slot"))
        n.register_prehook(lambda sums, record=record: record("pre"))
        n.register_posthook(lambda sums, gradients, record=record: record("post"))
    leaf.register_post_accumulate_grad_hook(lambda x: seen.update(["after"]))
    fanin.backward(one(fanin.Node(lambda g: (g, g), edges=[(n, 0) for n in nodes])), workers=2)
    assert seen == {"slot": 2, "pre": 2, "post": 2, "after": 1}
    assert len(threads[0]) == len(threads[1]) == 1 and threads[0] != threads[1]


@pytest.mark.parametrize("call", [fanin.backward, fanin.grad])
@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-1, ValueError), (1025, ValueError), ("2", TypeError)])
def test_a_number_of_workers_that_is_none_is_refused(call: Any, bad: Any, error: type[Exception]) -> None:
    top, leaf = fan_out([lambda g: g])
    with pytest.raises(error, match="workers"):
        call(one(top), [leaf], workers=bad)


@pytest.mark.rule("E16")
def test_a_schedule_is_for_one_worker_and_a_walk_too() -> None:
    top, _ = fan_out([lambda g: g])
    with pytest.raises(ValueError, match="backward: schedule= picks the next node of one worker"):
        fanin.backward(one(top), workers=2, schedule=lambda ready: ready[0])
    with pytest.raises(ValueError, match="create_graph=True numbers the new nodes"):
        fanin.backward(one(top), workers=2, create_graph=True)
    with pytest.raises(TypeError, match="workers"):
        fanin.walk(one(top), workers=2)  # type: ignore[call-arg]
    fanin.backward(one(top), workers=1, schedule=lambda ready: ready[0])


@pytest.mark.rule("E14")
def test_a_pass_of_several_workers_leaks_nothing() -> None:
    def passes() -> None:
        top, leaf = fan_out([lambda g: g] * 6)
        for workers in (2, 3):
            fanin.backward(one(top), workers=workers, keep_graph=True)
        leaf.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fanin.backward(one(top), workers=3)

    def alive() -> tuple[int, int]:
        gc.collect()
        fanin.trim()
        return hooks.blocks(), sum(type(x) in (fanin.Node, fanin.Leaf) for x in gc.get_objects())

    passes()
    before = alive()
    for _ in range(20):
        passes()
    assert alive() == before


@pytest.mark.rule("E14")
def test_any_failed_allocation_ends_the_pass_with_an_error_or_has_no_effect() -> None:
    outcomes: Counter[str] = Counter()
    for attempt in hooks.attempts(well=20, limit=400):
        top, leaf = fan_out([lambda g, c=c: g * c for c in range(4)])
        with attempt:
            fanin.backward(one(top), workers=3)
        outcomes["MemoryError" if attempt.failed else "well"] += 1
        assert leaf.grad[0] == 6.0 if leaf.grad is not None else attempt.failed
    assert min(outcomes["well"], outcomes["MemoryError"]) >= 5, outcomes


@pytest.mark.rule("E12")
def test_each_device_of_a_pass_has_a_worker_of_its_own(a_world: Any) -> None:
    w = a_world("fake")
    s, t = w.stream(0), w.stream(1)
    threads: dict[str, int] = {}

    def says(name: str) -> Callable[[Any], Any]:
        def fn(g: Any) -> Any:
            threads[name] = threading.get_ident()
            return None

        return fn

    low = fanin.Node(says("low"), edges=[None], stream=t, name="low")
    top = fanin.Node(says("top"), edges=[None], stream=s, name="top")
    ones = [w.array(np.ones(1), 0), w.array(np.ones(1), 1)]
    fanin.backward([(top, 0, ones[0]), (low, 0, ones[1])], workers=2)
    assert threads["top"] == threading.get_ident() != threads["low"]
