"""The capture table with a tree around it: a function of a tree does what a capture allows, or what it forbids, and
either lets the error pass or swallows it. Code by code on the simulated device and on the CUDA backend over the fake
driver: the tree is as before, nothing stays captured, and the function is recorded the next time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda.driver import DriverError
from graph.test_capture import code_of, fork, from_thread

pytestmark = pytest.mark.core

Act = Callable[[Any, Any, SimpleNamespace], Any]


def ended_elsewhere(w: Any, s: Any, o: SimpleNamespace) -> None:
    fork(w, s, o.side)
    w.end_capture(o.side)


def ended_on_another_thread(w: Any, s: Any, o: SimpleNamespace) -> None:
    if error := from_thread(lambda: w.end_capture(s)):
        raise error


def calls_with_an_event(what: str) -> Act:
    def act(w: Any, s: Any, o: SimpleNamespace) -> None:
        w.record(o.event, s)
        getattr(w, what)(o.event)

    return act


def waits_for_another_capture(w: Any, s: Any, o: SimpleNamespace) -> None:
    w.begin_capture(o.side, "relaxed")
    o.began.append(o.side)
    w.record(o.event, o.side)
    w.wait(s, o.event)


def pulls_the_legacy_stream_in(w: Any, s: Any, o: SimpleNamespace) -> None:
    w.record(o.event, s)
    w.wait(w.legacy(), o.event)


def unsafe_on_another_thread(w: Any, s: Any, o: SimpleNamespace) -> None:
    if error := from_thread(w.unsafe):
        raise error


#: What is done, CUDA's code for it (0: it is allowed), and whether the capture is broken then: on a driver, and on the
#: simulated device, where fanin refuses some of it before any call of the device.
ROWS: dict[str, tuple[Act, int, bool, bool]] = {
    "a capture on the same stream": (lambda w, s, o: w.begin_capture(s), 1, False, False),
    "a capture on the legacy stream": (lambda w, s, o: w.begin_capture(w.legacy()), 900, False, False),
    "the end on a stream that was forked": (ended_elsewhere, 903, True, True),
    "the end on another thread": (ended_on_another_thread, 908, False, False),
    "a query of an event": (calls_with_an_event("query"), 907, True, True),
    "an event waited for by the host": (calls_with_an_event("sync_event"), 907, True, True),
    "a wait for an event of outside": (lambda w, s, o: w.wait(s, o.outside), 905, True, False),
    "a wait for an event of another capture": (waits_for_another_capture, 902, True, False),
    "the legacy stream pulled in": (pulls_the_legacy_stream_in, 906, True, False),
    "the stream waited for": (lambda w, s, o: w.sync(s), 900, True, True),
    "the device waited for": (lambda w, s, o: w.device_sync(), 900, True, True),
    "an unsafe call": (lambda w, s, o: w.unsafe(), 900, True, True),
    "an unsafe call on another thread": (unsafe_on_another_thread, 0, False, False),
    "a stream forked and joined": (lambda w, s, o: (fork(w, s, o.side), fork(w, o.side, s)), 0, False, False),
    "nothing": (lambda w, s, o: None, 0, False, False),
}


def about(w: Any) -> SimpleNamespace:
    """What the acts need, made before the capture."""
    o = SimpleNamespace(side=w.stream(), event=w.event(), outside=w.event(), began=[])
    free = w.stream()
    w.launch(free, lambda: None)
    w.record(o.outside, free)
    return o


@pytest.mark.parametrize("swallow", [False, True], ids=["passed on", "swallowed"])
@pytest.mark.parametrize("row", ROWS)
def test_a_function_that_breaks_its_capture_gets_an_error_and_is_recorded_the_next_time(
    w: Any, row: str, swallow: bool
) -> None:
    act, code, on_driver, on_sim = ROWS[row]
    broken = on_sim if w.kind == "sim" else on_driver
    o, x = about(w), w.array(np.ones(4))
    tree = fanin.GraphTree(w.place(), memory=1 << 14)
    acting, codes, states = [False], [], []

    def f(x: Any) -> Any:
        y = fanin.add_n([x, x])
        if acting[0]:
            s = w.current_stream()
            try:
                act(w, s, o)
                codes.append(0)
            except (fanin.CaptureError, DriverError) as e:
                codes.append(code_of(e))
                if not swallow:
                    raise
            finally:
                states.append(w.state(s))
        return y

    g = tree.function(f)
    with tree.step():
        g(x)
    acting[0] = True
    fails = broken or (bool(code) and not swallow)
    with tree.step():
        if fails:
            with pytest.raises((fanin.CaptureError, DriverError)) as caught:
                g(x)
            if swallow:
                said = str(caught.value)
                assert said.startswith("f cannot be recorded: ") and "901" in said
            assert tree._recordings() == [] and tree.stats.in_use == 0
            del caught
        else:
            assert g(x).numpy().tolist() == [2.0] * 4
    assert codes == [code] and states == [2 if broken else 1]
    for s in o.began:
        with pytest.raises((fanin.CaptureError, DriverError)) if broken else pytest.MonkeyPatch.context():
            w.end_capture(s)
    acting[0] = False
    for _ in range(2):
        with tree.step():
            assert g(x).numpy().tolist() == [2.0] * 4
    assert g.last.did == "replayed" and tree.stats.nodes == 1
    assert w.state(o.side) == 0
    tree.close()


def test_a_stream_that_is_not_joined_is_an_error_at_the_end(w: Any) -> None:
    tree, side, x = fanin.GraphTree(w.place(), memory=1 << 14), w.stream(), w.array(np.ones(4))
    joins = [True]

    def f(x: Any) -> Any:
        here = w.current_stream()
        side.wait(here)
        with fanin.stream(side):
            y = fanin.add_n([x, x])
        if joins[0]:
            here.wait(side)
        return y

    g = tree.function(f)
    with tree.step():
        g(x)
    joins[0] = False
    with tree.step(), pytest.raises(fanin.CaptureError, match=r"f cannot be recorded: .*not joined") as caught:
        g(x)
    assert "904" in str(caught.value) and w.state(side) == 0
    handle = f"{side.handle}" if w.kind == "sim" else f"{side.handle:#x}"
    assert re.search(rf"stream {handle}\b", str(caught.value).rpartition("join")[2]), caught.value
    joins[0] = True
    for _ in range(2):
        with tree.step():
            assert g(x).numpy().tolist() == [2.0] * 4
    assert g.last.did == "replayed"
    tree.close()


def test_a_function_that_ends_the_capture_gets_an_error(w: Any) -> None:
    tree, x = fanin.GraphTree(w.place(), memory=1 << 14), w.array(np.ones(4))
    ends, graphs = [False], []

    def f(x: Any) -> Any:
        y = fanin.add_n([x, x])
        if ends[0]:
            graphs.append(w.end_capture(w.current_stream()))
        return y

    g = tree.function(f)
    with tree.step():
        g(x)
    ends[0] = True
    with tree.step(), pytest.raises(fanin.CaptureError, match="f cannot be recorded"):
        g(x)
    ends[0] = False
    for _ in range(2):
        with tree.step():
            assert g(x).numpy().tolist() == [2.0] * 4
    assert g.last.did == "replayed"
    graphs.clear()
    tree.close()


def test_a_call_within_a_callers_capture_adds_the_function_to_the_callers_graph(w: Any) -> None:
    tree, s, x = fanin.GraphTree(w.place(), memory=1 << 14), w.stream(), w.array(np.ones(4))
    out = w.array(np.zeros(4))
    g = tree.function(lambda x, out: fanin.add_n([x, x], out=out), roles="static")
    with fanin.stream(s):
        for _ in range(3):
            with tree.step():
                g(x, out)
        assert g.last.did == "replayed"
        w.begin_capture(s)
        with tree.step():
            g(x, out)
        assert (g.last.did, g.last.reason) == ("raw", "the caller's current stream is captured")
        graph = w.end_capture(s)
        w.launch_graph(graph, s)
        assert out.numpy().tolist() == [2.0] * 4
    tree.close()
