"""Host threads of the simulated machine: turns, joins, deadlocks, Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin.sim import Machine
from kit.prepared import run_prepared

pytestmark = pytest.mark.core


def test_threads_run_at_join_one_at_a_time() -> None:
    with Machine() as m:
        assert m.host_schedule == ""
        seen: list[Any] = []
        threads = [m.spawn(lambda i=i: (seen.append(i), i * 10)[1], name=f"t{i}") for i in range(4)]
        assert not seen and "not ended" in repr(threads[0])
        with pytest.raises(RuntimeError, match="join"):
            threads[0].result
        m.join()
        assert sorted(seen) == [0, 1, 2, 3]
        assert [t.result for t in threads] == [0, 10, 20, 30]
        assert repr(threads[1]) == "<fanin.sim.Thread 't1', ended>"


def test_an_error_in_a_thread_is_raised_by_join() -> None:
    with Machine() as m:
        good = m.spawn(lambda: 1)
        bad = m.spawn(lambda: 1 // 0, name="bad")
        with pytest.raises(ZeroDivisionError) as caught:
            m.join()
        assert any("'bad'" in note for note in caught.value.__notes__)
        assert good.result == 1
        with pytest.raises(ZeroDivisionError):
            bad.result
        m.join()  # once


def test_a_thread_may_spawn_another() -> None:
    with Machine() as m:
        inner: list[Any] = []
        m.spawn(lambda: inner.append(m.spawn(lambda: 5)))
        m.join()
        assert inner[0].result == 5


def test_a_thread_cannot_join_itself() -> None:
    with Machine() as m:
        m.spawn(m.join)
        with pytest.raises(RuntimeError, match="is one of those"):
            m.join()


def test_threads_share_one_buffer() -> None:
    for seed in range(10):
        with Machine(2, seed) as m:
            c = m.stream()
            buf = fanin.InputBuffer(1, stream=c)

            def producer(key: int, m: Machine = m, buf: Any = buf) -> None:
                s = m.stream(key % 2)
                g = m.empty(8, device=0)
                m.launch(s, lambda v: v.fill(2.0**key), writes=[g])
                buf.add(0, g, key=key, stream=s)

            for key in range(4):
                m.spawn(producer, key)
            m.join()
            (total,) = buf.take()
            with fanin.stream(c):
                assert total.numpy().tolist() == [15.0] * 8
            assert len(m.host_schedule) > 4


def test_threads_make_streams_at_once() -> None:
    for seed in range(5):
        with Machine(2, seed) as m:
            all_threads = []
            for turn in range(2):
                threads = [m.spawn(lambda i=i: m.stream(i % 2)) for i in range(32)]
                all_threads += threads
                m.join()
                assert len(m.streams) == 32 * (turn + 1)
                assert {t.result for t in threads} <= set(m.streams)
                assert len({(s.device, s.handle) for s in m.streams}) == len(m.streams)
            for _ in range(32):
                m.spawn(lambda: None)
            with pytest.raises(ValueError, match="at most 32"):
                m.spawn(lambda: None)


def test_ctrl_c_interrupts_running_threads() -> None:
    code = """
import fanin, os, signal

def spin():
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass

try:
    with fanin.sim.Machine() as m:
        m.spawn(spin)
        m.join()
except KeyboardInterrupt:
    print("heard", flush=True)
    os._exit(0)  # the one that spins is not waited for
"""
    assert run_prepared(code).stdout.strip() == "heard"


def test_ctrl_c_interrupts_running_kernels() -> None:
    code = """
import fanin, os, signal

def spin(v):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass

try:
    with fanin.sim.Machine() as m:
        m.launch(m.stream(), spin, writes=[m.empty(1)])
        m.synchronize()
except KeyboardInterrupt:
    print("heard", flush=True)
    os._exit(0)  # the one that spins is not waited for
"""
    assert run_prepared(code).stdout.strip() == "heard"


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (lambda m, x: m.synchronize(), fanin.sim.DeadlockError),
        (lambda m, x: x.numpy(), (fanin.RaceError, fanin.sim.DeadlockError)),
        (lambda m, x: m.step(), None),
        (lambda m, x: m.spawn(len, "a"), None),
        (lambda m, x: m.stream().record(), None),
    ],
    ids=["synchronize", "numpy", "step", "spawn", "record"],
)
def test_a_kernel_may_query_the_machine(kernel: Any, error: Any) -> None:
    m = Machine()
    x = m.empty(2)
    m.launch(m.stream(), lambda v: kernel(m, x), writes=[x])
    m.launch(m.stream(), lambda v: None, writes=[m.empty(1)])
    if error is None:
        m.synchronize()
    else:
        with pytest.raises(error):
            m.synchronize()
    m.synchronize()


class Shrinking:
    """An index that takes the list apart while it is read."""

    def __init__(self, victim: list[Any]) -> None:
        self.victim = victim

    def __index__(self) -> int:
        self.victim.clear()
        return 1


def test_lists_that_change_while_they_are_read_cause_no_crash() -> None:
    with Machine() as m:
        shape: list[Any] = []
        shape += [Shrinking(shape), 2, 3]
        assert m.empty(shape).shape == (1, 2, 3)
        axes: list[Any] = []
        axes += [Shrinking(axes), 0]
        with pytest.raises(ValueError):
            m.empty((2, 3)).transpose(axes + [0])
        assert m.empty((2, 3)).transpose([Shrinking([]), 0]).shape == (3, 2)


def test_deadlocks_name_the_stuck_threads_and_streams() -> None:
    """Two threads that wait for each other's sums, through a combine that takes the other buffer."""
    with Machine() as m:
        one, other = (fanin.InputBuffer([fanin.Slot(combine=lambda a, b, i=i: hold(i, a, b))]) for i in range(2))
        buffers = [one, other]

        def hold(i: int, a: Any, b: Any) -> Any:
            buffers[1 - i].take()
            return a

        for i, buf in enumerate(buffers):
            buf.add(0, {"n": i})
            buf.add(0, {"n": i})
        for buf in buffers:
            m.spawn(buf.take)
        with pytest.raises(fanin.sim.DeadlockError, match=r"host thread 0 .*waits for.*host thread 1 .*waits for"):
            m.join()


def test_other_threads_may_use_a_machine_too() -> None:
    with Machine() as m:
        out: list[Any] = []

        def work(i: int) -> None:
            s = m.stream()
            x = m.empty(4)
            for k in range(20):
                m.launch(s, lambda v, k=k: v.fill(k), writes=[x])
            s.synchronize()
            with fanin.stream(s):
                out.append(x.numpy().tolist())

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert out == [[19.0] * 4] * 4


def test_a_thread_of_a_machine_may_use_arrays_of_other_devices(driver: FakeDriver) -> None:
    x, s = driver.array(np.zeros(4)), driver.stream()
    with Machine() as m, Machine() as other:
        y, t = other.array(np.zeros(4)), other.stream()

        def use() -> None:
            x.record_stream(s)
            y.record_stream(t)

        m.spawn(use)
        m.join()
    assert x.numpy().tolist() == [0.0] * 4


@pytest.mark.parametrize("end", [lambda m: m.join(), lambda m: m.synchronize()])
def test_a_spawn_that_raises_leaves_no_thread_that_join_would_wait_for(
    end: Callable[[Machine], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Machine() as m:
        with pytest.raises(TypeError, match=r"spawn: name: expected a str, got an ndarray"):
            m.spawn(lambda: 1, name=np.ones(2))  # type: ignore[arg-type]
        with monkeypatch.context() as p:
            p.setattr(threading.Thread, "__init__", lambda *_, **__: 1 / 0)
            for _ in range(40):  # there may be 32
                with pytest.raises(ZeroDivisionError):
                    m.spawn(lambda: 1)
        thread = m.spawn(lambda: 2)
        end(m)
        assert thread.result == 2
