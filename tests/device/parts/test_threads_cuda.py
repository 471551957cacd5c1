"""The CUDA backend, the exchange of arrays and the fake driver, used by several threads at once, for the thread
sanitizer.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fanin
from c.test_c import checks_made
from fake_cuda import FakeDriver, fake_library, use_driver
from kit.standins import DLArray, LegacyArray, Library, adopt, table_array

pytestmark = [pytest.mark.core, pytest.mark.threads]

TURNS = 6


def together(*workers: Callable[[], None]) -> None:
    """Each on a thread of its own, from one moment on; what one raises is raised here."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(workers))

    def run(worker: Callable[[], None]) -> None:
        try:
            start.wait()
            worker()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(w,)) for w in workers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in failed:
        raise e


def read(x: Any, s: fanin.Stream) -> Any:
    with fanin.stream(s):
        return x.numpy().tolist()


def test_threads_with_no_lock_between_them_race_for_nothing(c_program: Callable[..., Callable[..., Any]]) -> None:
    """In C: an interpreter's lock would order most of what its threads do."""
    done = c_program("threads_cuda.c", flags=("-Wl,--wrap=fan__cuda_capture",))(str(fake_library()))
    assert checks_made(done.stdout) > 100


@pytest.mark.parametrize("mode", ["global", "thread-local", "relaxed"])
def test_one_thread_captures_while_others_add_take_and_drop(driver: FakeDriver, mode: str) -> None:
    s, t, p, q, c, d, *others = (driver.stream() for _ in range(9))  # none can be made in mode "global"

    def capture() -> None:
        g = [driver.array(np.full(8, v)) for v in (1, 10)]
        for turn in range(TURNS):
            driver.begin_capture(s, mode)
            t.wait(s)
            buf = fanin.InputBuffer(1, stream=s, budget=0 if turn % 2 else None)
            buf.add(0, g[0], stream=s)
            buf.add(0, g[1], stream=t)
            (total,) = buf.take()
            graph = driver.end_capture(s)
            driver.launch_graph(graph, s)
            assert read(total, s) == [11] * 8
            driver.destroy_graph(graph)

    def add(p: fanin.Stream, c: fanin.Stream) -> None:
        for turn in range(TURNS):
            buf = fanin.InputBuffer(2, stream=c, budget=0 if turn % 2 else None)
            for k in range(4):
                buf.add(k % 2, driver.array(np.full(8, 2.0**k)), stream=p)
            assert [read(x, c) for x in buf.take()] == [[5] * 8, [10] * 8]

    def let_go() -> None:
        for turn in range(TURNS):
            cycle: list[Any] = [driver.array(np.ones(16)) for _ in range(3)]
            for x in cycle:
                x.record_stream(others[turn % 3])
            cycle.append(cycle)  # so that the collector ends it
            del cycle, x
            gc.collect(0)
            e = others[0].record()
            others[1].wait(e)
            assert e.query() in (True, False)

    together(capture, lambda: add(p, c), lambda: add(q, d), let_go)


@pytest.mark.parametrize("name", ["dlpack", "legacy", "table"])
def test_arrays_go_in_and_out_on_several_threads(driver: FakeDriver, name: str) -> None:
    library = Library(driver)
    make = {"dlpack": DLArray, "legacy": LegacyArray, "table": table_array(library)}[name]
    values = [driver.array(np.full(8, v, "f4")) for v in (1, 10)]
    memory = [SimpleNamespace(address=v.address) for v in values]  # a library's, which stays

    def work() -> None:
        p, c = driver.stream(), driver.stream()
        for turn in range(TURNS):
            buf = fanin.InputBuffer(1, stream=c, budget=0 if turn % 2 else None)
            for m in memory:
                buf.add(0, make(library, (8,), memory=m), stream=p)
            (total,) = buf.take()
            ours = fanin.add_n([values[0], values[1]])
            theirs = adopt(library, DLArray, ours.__dlpack__(stream=c.handle))
            buf.add(0, theirs, stream=c)
            buf.add(0, values[0], stream=c)
            (again,) = buf.take()
            if isinstance(again, fanin.sim.Array):
                assert read(again, c) == [12] * 8
            del total, ours, theirs, again

    together(*[work] * 3)
    driver.synchronize()
    gc.collect()
    for device in range(2):
        driver.array(np.ones(1), device)  # polls
    gc.collect()
    assert not library.held


def test_streams_without_a_device_are_queried_while_devices_are_initialised() -> None:
    class Default:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 1)

    for _ in range(3):
        driver = FakeDriver(devices=2)
        with use_driver(driver):

            def first(driver: FakeDriver = driver) -> None:
                with driver.context(0):
                    for _ in range(TURNS):
                        try:
                            assert fanin.InputBuffer(1, stream=Default()) is not None
                        except (ValueError, TypeError) as e:
                            assert "current" in str(e), e  # as long as no device is in use

            together(
                first, first, lambda: fanin.Stream("cuda:0", 1) and None, lambda: fanin.Stream("cuda:1", 1) and None
            )
        gc.collect()
