"""kit.world finds what it is for: each of its checks has a planted fault, on both kinds of device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from kit import hooks
from kit.world import world

pytestmark = pytest.mark.tools

LEFT: list[Any] = []  # what a planted leak leaves
DESTROYED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda ctx: None)  # alive for as long as the driver may call it


def nothing(w: Any) -> None:
    """What a sound test does: two producers, a sum, a reader."""
    p, c = w.stream(), w.stream()
    buf = fanin.InputBuffer(1, stream=c)
    for k in (1, 2):
        g = w.empty(4)
        w.launch(p, lambda v, k=k: v.fill(k), writes=[g])
        buf.add(0, g, stream=p)
    (total,) = buf.take()
    with fanin.stream(c):
        assert total.numpy().tolist() == [3] * 4


def a_race(w: Any) -> None:
    s, t, x = w.stream(), w.stream(), w.empty(4)
    try:
        w.launch(s, lambda v: v.fill(1), writes=[x])
        w.launch(t, lambda v: v.fill(2), writes=[x])
        w.synchronize()
    except fanin.RaceError:
        pass  # the machine raises at once, and the test ignores it


def a_wait_that_was_needed(w: Any) -> None:
    w.unsound = lambda: 2


def memory(w: Any) -> None:
    LEFT.append(w.array(np.ones(4)))


def an_event(w: Any) -> None:
    LEFT.append(w.stream().record())


def a_stream(w: Any) -> None:
    LEFT.append(w.stream())


def a_buffer(w: Any) -> None:
    LEFT.append(fanin.InputBuffer(3))


def an_option(w: Any) -> None:
    LEFT.append(_core.get_options()["capture_redirect"])
    fanin.set_options(capture_redirect=True)


def memory_of_the_driver(w: Any) -> None:
    at = ctypes.c_uint64()
    w.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(64))


def an_event_of_the_driver(w: Any) -> None:
    w.call("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 2)


def a_stream_of_the_driver(w: Any) -> None:
    w.call("cuStreamCreate", ctypes.byref(ctypes.c_void_p()), 1)


def a_module(w: Any) -> None:
    w.call("cuModuleLoadData", ctypes.byref(ctypes.c_void_p()), b".target sm_75 .entry fan_any")


def an_object_of_the_driver(w: Any) -> None:
    made = ctypes.c_void_p()
    w.call("cuUserObjectCreate", ctypes.byref(made), None, DESTROYED, 1, 1)


def a_context(w: Any) -> None:
    w.driver.call("cuInit", 0)
    w.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 0)


def a_context_on_the_stack(w: Any) -> None:
    LEFT.append(w.driver.context())
    LEFT[-1].__enter__()


def a_mode_of_the_thread(w: Any) -> None:
    w.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(2)))


def an_error_that_stays(w: Any) -> None:
    w.keep.stream = w.stream()
    w.driver.fail(0, 700, call="EventCreate", sticky=True)
    with pytest.raises(fanin.DeviceError):
        fanin.Event("cuda:0")


BOTH = [
    (a_race, "race"),
    (memory, "blocks of the core left behind"),
    (an_event, "blocks of the core left behind"),
    (a_stream, "blocks of the core left behind"),
    (a_buffer, r"blocks of the core left behind: .*InputBuffer"),
    (an_option, "options were"),
]
OF_THE_FAKE = [
    (memory, "1 memory left behind"),
    (an_event, r"\d events left behind"),
    (memory_of_the_driver, "1 memory left behind"),
    (an_event_of_the_driver, "1 events left behind"),
    (a_stream_of_the_driver, "1 streams left behind"),
    (a_module, "1 modules left behind"),
    (an_object_of_the_driver, "1 objects left behind"),
    (a_context, "1 contexts left behind"),
    (a_context_on_the_stack, "1 contexts on the stack left behind"),
    (a_mode_of_the_thread, "2 capture mode left behind"),
    (an_error_that_stays, r"device 0 is in an error: .*700"),
]


@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_a_sound_test_passes_again_and_again(kind: str) -> None:
    for seed in range(3):
        with world(kind, 1, seed) as w:
            nothing(w)


@pytest.mark.parametrize(
    ("kind", "plant", "words"),
    [
        ("sim", a_wait_that_was_needed, "2 waits were left out whose order did not hold"),
        *((kind, *row) for kind in ("sim", "fake") for row in BOTH),
        *(("fake", *row) for row in OF_THE_FAKE),
    ],
)
def test_a_planted_fault_is_found_at_the_end(kind: str, plant: Callable[[Any], None], words: str) -> None:
    if "blocks" in words and not hooks.DEVELOPMENT:
        pytest.skip("the core counts its blocks in development builds alone: FANIN_DEV=1")
    try:
        with pytest.raises(AssertionError, match=words), world(kind, 1) as w:
            nothing(w)
            plant(w)
    finally:
        LEFT.clear()
        fanin.set_options(capture_redirect=False)
        undo(w, plant)
    with world(kind, 1) as w:  # and the next world is none the worse
        nothing(w)


def undo(w: Any, plant: Callable[[Any], None]) -> None:
    """What a planted fault leaves on the thread."""
    if plant is a_mode_of_the_thread:
        w._counts.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(0)))


@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_a_race_that_is_planted_must_be_there(kind: str) -> None:
    with world(kind, 1) as w:
        w.races_are_planted()
        a_race(w)
    with pytest.raises(AssertionError, match="no race was found, and one was planted"), world(kind, 1) as w:
        w.races_are_planted()
        nothing(w)


def test_only_the_named_fault_is_forgiven() -> None:
    with world("fake", 1) as w:
        w.forgive("modules")
        a_module(w)
    with pytest.raises(AssertionError, match="1 streams left behind") as caught, world("fake", 1) as w:
        w.forgive("modules", "events")
        a_module(w)
        a_stream_of_the_driver(w)
    assert "modules" not in str(caught.value)
    with pytest.raises(AssertionError, match="1 modules left behind"), world("fake", 1) as w:  # it is of one world
        a_module(w)
    with pytest.raises(AssertionError, match="nothing of the kind"), world("fake", 1) as w:
        w.forgive("nothing of the kind")


def test_an_error_that_is_planted_must_be_there() -> None:
    with world("fake", 1) as w:
        w.device_is_lost()
        an_error_that_stays(w)
    with pytest.raises(AssertionError, match="no device was lost, and one was to be"), world("fake", 1) as w:
        w.device_is_lost()
        nothing(w)


@pytest.mark.parametrize("kind", ["sim", "fake"])
def test_errors_of_a_kernel_and_of_a_test_are_raised(kind: str) -> None:
    def wrong(v: Any) -> None:
        raise ZeroDivisionError("in a kernel")

    with pytest.raises(ZeroDivisionError, match="in a kernel"), world(kind, 1) as w:
        w.launch(w.stream(), wrong, writes=[w.empty(2)])
    with pytest.raises(KeyError), world(kind, 1) as w:
        a_race(w)
        raise KeyError("of the test")
