"""Exchange with GPU libraries while driver calls and allocations fail; planted faults show what each guard is for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin._interop import arrays, streams
from kit import hooks
from kit.exchange_cuda import torch_like
from kit.sample import sizes
from kit.standins import DLArray, InterfaceArray, Library, adopt, table_array

pytestmark = pytest.mark.core


# Every driver call, and every host allocation, fails once


def a_pass(library: Library, make: type[Any], streams: list[fanin.Stream]) -> Iterator[str]:
    """Arrays in by DLPack and by an exchange table, a sum in the library's memory, one that is handed through, and our
    own array out and back: a step at a time.
    """
    c, p, q = streams
    xs = [make(library, (4,)).fill(p, value) for value in (1, 2)]
    ys = [DLArray(library, (4,)).fill(q, value) for value in (3, 4)]
    yield "made"
    buf = fanin.InputBuffer(3, stream=c)
    for x in xs:
        buf.add(0, x, stream=p)
    for y in ys:
        buf.add(1, y, stream=q)
    yield "added"
    buf.add(2, xs[0], stream=p)
    sums = buf.take()
    yield "taken"
    back = adopt(library, DLArray, sums[1].__dlpack__(stream=q.handle, max_version=(1, 3)))
    assert sums[1].__cuda_array_interface__["version"] == 3
    yield "offered"
    copy = adopt(library, DLArray, sums[1].__dlpack__(stream=p.handle, copy=True))
    yield "copied"
    del back, copy, sums, buf


def one_pass(library: Library, make: type[Any], prepare: Callable[[FakeDriver], None], undo: Callable[[], None]) -> str:
    """How far a pass came; afterwards every deleter has been called once."""
    driver = library.driver = FakeDriver(1)
    with use_driver(driver), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "sys.unraisablehook", lambda what: None
        )  # what must not be lost is handed out, and the failure shown
        streams = [driver.stream() for _ in range(3)]
        steps = a_pass(library, make, streams)
        came = next(steps)
        prepare(driver)
        try:
            while (step := next(steps, "done")) != "done":
                came = step
            came = "done"
        except (fanin.DeviceError, MemoryError, BufferError):
            pass
        finally:
            undo()
            driver.fail(-1, 0)
        steps.close()
        del steps
        gc.collect()
        for _ in range(2):  # what could not be recorded is tried again
            driver.synchronize()
            driver.array(np.ones(1))  # polls
        gc.collect()
        assert driver.races == 0, driver.race
        assert not library.held, f"{len(library.held)} tensors were not given back"
    return came


@pytest.mark.parametrize(("code", "first"), [(701, 0), (2, 5)], ids=["rejected", "no memory"])
@pytest.mark.parametrize("step", sizes(9, 1))
def test_every_driver_call_of_an_exchange_failed_once_deletes_every_tensor_once(
    code: int, first: int, step: int
) -> None:
    """In the sample every ninth call fails, other ones for each code."""
    outcomes: dict[str, int] = {}
    library = Library(FakeDriver(1))
    make = table_array(library)
    made: list[int] = []
    assert (
        one_pass(library, make, lambda driver: made.append(driver.calls()), lambda: made.append(library.driver.calls()))
        == "done"
    )
    for at in range(first % step, made[1] - made[0], step):
        came = one_pass(library, make, lambda driver, at=at: driver.fail(at, code), lambda: None)
        outcomes[came] = outcomes.get(came, 0) + 1
    print(f"driver calls failed once each: {sum(outcomes.values())} of {made[1] - made[0]}: {outcomes}")
    assert (sum(outcomes.values()) + 1) * step > 300 and min(
        outcomes.get(k, 0) for k in ("made", "added", "taken", "offered", "done")
    ) > 0, outcomes


def test_every_host_allocation_of_an_exchange_failed_once_deletes_every_tensor_once() -> None:
    outcomes: dict[str, int] = {}
    gc.collect()
    baseline = hooks.memory()[0]
    tries = quiet = 0
    library = Library(FakeDriver(1))
    make = table_array(library)
    while quiet < 30 and tries < 400:  # a released tensor is kept if its event cannot be made, without an error
        came = one_pass(library, make, lambda driver, at=tries: hooks.fail_at(at, 1), lambda: hooks.fail_at(-1, 0))
        outcomes[came] = outcomes.get(came, 0) + 1
        quiet = quiet + 1 if came == "done" else 0
        tries += 1
    gc.collect()
    print(f"host allocations failed once each: {tries - quiet}: {outcomes}")
    assert hooks.memory()[0] == baseline
    assert (
        quiet == 30
        and outcomes["done"] < tries
        and min(outcomes.get(k, 0) for k in ("made", "added", "taken", "offered")) > 0
    ), outcomes


# Planted faults: what each guard is for


def an_interface_ready_elsewhere(library: Library) -> None:
    p, c = library.driver.stream(), library.driver.stream()
    buf = fanin.InputBuffer(1, stream=c)
    with fanin.set_options(raw_addresses=True):
        for _ in range(2):
            x = InterfaceArray(library, (3,)).fill(p, 1)
            x.ready = p.handle
            buf.add(0, x, stream=c)
    buf.take()


def a_gradient_on_its_librarys_stream(library: Library) -> None:
    p, c = library.driver.stream(), library.driver.stream()
    buf = fanin.InputBuffer(1, stream=c)
    with torch_like(library, table=False) as make, library.on(p):
        for _ in range(2):
            buf.add(0, make(library, (3,)).fill(p, 1))
    buf.take()


def a_gradient_that_its_producer_orders(library: Library) -> None:
    p, c = library.driver.stream(), library.driver.stream()
    buf = fanin.InputBuffer(1, stream=c)
    with library.on(p):
        for _ in range(2):
            buf.add(0, DLArray(library, (3,)).fill(p, 1), stream=c)
    buf.take()


def our_array_at_a_consumers(library: Library) -> None:
    p, q = library.driver.stream(), library.driver.stream()
    x = library.driver.empty((3,), np.float32)
    library.driver.launch(p, lambda v: v.fill(3), writes=[x])
    y = adopt(library, DLArray, x.__dlpack__(stream=q.handle))
    library.driver.launch(q, lambda v: None, reads=[y])


def an_object_that_leaves(library: Library) -> None:
    p, c = library.driver.stream(), library.driver.stream()
    x = DLArray(library, (3,)).fill(p, 5)
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, x, stream=p)
    buf.take()
    library.driver.synchronize()
    library.driver.array(np.ones(1))  # polls: the buffer's memory is freed
    library.driver.launch(c, lambda v: None, reads=[x])
    del x
    gc.collect()
    if library.freed:
        raise AssertionError("freed before its consumer has run")


SCENARIOS: list[Any] = [
    (an_interface_ready_elsewhere, "wait_for", lambda *args: None),
    (a_gradient_on_its_librarys_stream, "library_stream", lambda *args: None),
    (a_gradient_that_its_producer_orders, "ready_on", lambda *args: -1),
    (our_array_at_a_consumers, None, None),
    (an_object_that_leaves, "leaving", lambda *args: None),
]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(("scenario", "name", "fault"), SCENARIOS, ids=[s[0].__name__ for s in SCENARIOS])
def test_an_omitted_guard_is_found(scenario: Any, name: str | None, fault: Any, planted: bool) -> None:
    driver = FakeDriver(1)
    found = False
    with use_driver(driver), pytest.MonkeyPatch.context() as patch:
        if planted and name is not None:
            for module in (arrays, streams):  # in each module that has the name
                if hasattr(module, name):
                    patch.setattr(module, name, fault)
        if planted and name is None:
            hooks.fault("CUDA_NO_WAIT")
        try:
            scenario(Library(driver))
        except AssertionError:
            found = True
        finally:
            if hooks.DEVELOPMENT:
                hooks.fault(None)
        driver.synchronize()
        found = found or driver.races > 0
    assert found == planted
