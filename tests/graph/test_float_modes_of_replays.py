"""Replays: sums of ours are made in the default floating-point modes (A15), functions of a user in those of the thread
that replays, whichever were in force when the function was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from kit import float_modes, hooks
from kit.float_modes import MODES, current, modes, same_bits, terms

pytestmark = [
    pytest.mark.core,
    pytest.mark.rule("A15"),
    pytest.mark.skipif(not float_modes.KNOWN, reason="the modes are set through glibc's fenv_t on x86-64"),
]

N = 300


def buffered(*xs: Any) -> Any:
    buf = fanin.InputBuffer([fanin.Slot(shape=(N,), dtype="float32")])
    for x in xs:
        buf.add(0, x)
    return buf.take(scale=1 / 3)[0]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add_n": lambda *xs: fanin.add_n(list(xs)),
    "add_n, scaled": lambda *xs: fanin.add_n(list(xs), scale=1 / 3),
    "a buffer": buffered,
}


def replayed(fn: Callable[..., Any], xs: list[Any], recorded_in: str | None, replayed_in: str) -> Any:
    """The result of a replay on the CPU, and the modes after it."""
    with fanin.GraphTree("cpu", memory=1 << 16) as tree:
        f = tree.function(fn)
        for _ in range(3):
            if recorded_in is None:
                with tree.step():
                    f(*xs)
            else:
                with modes(recorded_in), tree.step():
                    f(*xs)
        with modes(replayed_in) as mine, tree.step():
            found = np.array(f(*xs))
            kept = current() == mine
        assert f.last.did == "replayed"
    assert kept
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "name"), [("f4", "a buffer"), *((d, n) for d in ("f4", "f8", "c8") for n in ("add_n", "add_n, scaled"))]
)
def test_no_mode_changes_a_bit_of_a_replayed_sum(dtype: str, name: str, mode: str) -> None:
    xs = terms(np.dtype(dtype), N)
    want = FUNCTIONS[name](*xs)
    assert same_bits(replayed(FUNCTIONS[name], xs, None, mode), want)
    assert same_bits(replayed(FUNCTIONS[name], xs, mode, mode), want)


@pytest.mark.skipif(not hooks.DEVELOPMENT, reason="faults are planted in test builds alone: FANIN_DEV=1")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_in_the_modes_of_its_thread_is_found(name: str) -> None:
    xs = terms(np.dtype("f4"), N)
    want = FUNCTIONS[name](*xs)
    hooks.fault("FLOAT_MODE_OF_CALLER")
    try:
        found = replayed(FUNCTIONS[name], xs, None, "both")
    finally:
        hooks.fault(None)
    assert not same_bits(found, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_function_of_numpy_is_replayed_in_the_modes_of_the_thread_that_replays(mode: str) -> None:
    xs = terms(np.dtype("f4"), N)[:2]
    with modes(mode):
        want = xs[0] + xs[1]
    assert not same_bits(want, xs[0] + xs[1])
    assert same_bits(replayed(lambda x, y: np.add(x, y), xs, None, mode), want)


def trained(run_in: str | None, steps: int, compiled: bool) -> Any:
    """Parameters after steps whose gradients meet in sums."""
    data = terms(np.dtype("f4"), 12, 4)
    number = 0.25 if tape.NUMPY_1 else 0.3  # for NumPy 1 it is converted once, when the step is recorded
    p = [tape.parameter(x.reshape(3, 4) * 2.0**-20) for x in data[:2]]

    def step(x: Any) -> Any:
        v = tape.array(x)
        loss = ((p[0] + v) * p[1] + p[0] * p[1] + p[0] * number).sum()
        tape.backward(loss)
        for q in p:
            tape.update(lambda g, w: np.subtract(w, 0.01 * g, out=w), [q.grad], [q])
            q.grad = None
        return loss

    run = tape.compiled(step, static=p) if compiled else step
    x = data[2].reshape(3, 4) * 2.0**-20
    for k in range(steps):
        if run_in is None or k < 3:
            run(x)
        else:
            with modes(run_in) as mine:
                run(x)
                assert current() == mine
    return [q.data.copy() for q in p]


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_recorded_step_has_in_each_mode_the_bits_of_the_step_that_is_not_recorded(mode: str | None) -> None:
    assert same_bits(trained(mode, 6, compiled=True), trained(mode, 6, compiled=False))


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_changes_a_bit_of_a_sum_in_a_graph_of_a_device(mode: str) -> None:
    xs = terms(np.dtype("f4"), N)
    want = fanin.add_n(xs)
    seen: list[int] = []
    with fanin.sim.Machine() as m:
        s = m.stream()
        gradients = [m.array(x) for x in xs]
        with fanin.stream(s):
            m.begin_capture(s)
            buf = fanin.InputBuffer(1, stream=s)
            for g in gradients:
                buf.add(0, g, stream=s)
            total = buf.take()[0]
            m.launch(s, lambda out: seen.append(current()), writes=[total], name="note")
            graph = m.end_capture(s)
            with modes(mode) as mine:
                m.launch_graph(graph, s)
                m.synchronize()
                kept = current() == mine
            found = total.numpy()
    assert kept and same_bits(found, want)
    assert seen == [mine]
