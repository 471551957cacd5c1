"""Streams, events and devices as Python has them."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from fanin.sim import Machine

pytestmark = pytest.mark.core


# Names


def test_devices_are_named_inside_a_machine() -> None:
    assert fanin.devices() == ["cpu"]
    with Machine(3):
        assert fanin.devices() == ["cpu", "sim:0", "sim:1", "sim:2"]
        with Machine(1):
            assert fanin.devices() == ["cpu", "sim:0"]
        assert len(fanin.devices()) == 4
    assert fanin.devices() == ["cpu"]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("sim:0", ValueError, "no simulated machine is entered"),
        ("sim", ValueError, "unknown device"),
        ("sim:-1", ValueError, "unknown device"),
        ("sim:0x", ValueError, "unknown device"),
        ("gpu", ValueError, "unknown device"),
        ("cuda:0", fanin.DeviceError, "no CUDA driver: .*Everything else works without it"),
        ("cuda:x", ValueError, "unknown device"),
        (0, TypeError, "a device's name"),
        (b"cpu", TypeError, "a device's name"),
    ],
)
def test_the_error_for_a_missing_device_names_the_existing_ones(name: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fanin.current_stream(name)


def test_a_device_beyond_the_machine_names_the_remedy() -> None:
    with Machine(2), pytest.raises(ValueError, match=r"2 devices; use fanin.sim.Machine\(devices=3\)"):
        fanin.current_stream("sim:2")


def test_machines_are_named_on_the_thread_that_entered_them() -> None:
    seen: list[Any] = []
    with Machine():
        other = threading.Thread(target=lambda: seen.append(fanin.devices()))
        other.start()
        other.join()
    assert seen == [["cpu"]]


def test_spawned_threads_inherit_the_machine() -> None:
    with Machine(2) as m:
        thread = m.spawn(fanin.devices)
        m.join()
        assert thread.result == ["cpu", "sim:0", "sim:1"]


def test_info_lists_what_is_available_and_why_something_is_missing() -> None:
    found = fanin.info()
    assert found["fanin"] == fanin.__version__
    assert found["numpy"] == np.__version__
    assert set(found["backends"]) == {"cpu", "sim", "cuda"}
    assert "no CUDA driver" in found["backends"]["cuda"]["why"]
    lines = [line for line in str(found).splitlines() if line[0] != " "]
    assert [line.split()[0] for line in lines] == [key for key in found if key != "implementation"]


def test_info_is_data_that_json_brings_back() -> None:
    found = fanin.info()
    assert json.loads(json.dumps(found)) == found
    assert found["devices"] == fanin.devices()
    assert found["sums"]["threads"] >= 1 and found["sums"]["isa"] in str(found)
    assert found["pool"].keys() == {"bytes", "limit"} and all(type(n) is int for n in found["pool"].values())
    with fanin.set_options(pool_bytes=math.inf):
        assert fanin.info()["pool"]["limit"] is None and "Infinity" not in json.dumps(fanin.info())
    assert found["backends"]["cpu"] == found["backends"]["sim"] == {"available": True}
    assert found["backends"]["cuda"]["available"] is False
    assert (found["kernels"]["nvcc"] is None) == (found["kernels"]["machine_code"] == [])


# Streams


def test_streams_are_equal_when_they_are_the_same_queue() -> None:
    with Machine(2) as m:
        a, b = m.stream(), m.stream()
        assert a != b and a == fanin.Stream("sim:0", a.handle) and hash(a) == hash(fanin.Stream("sim:0", a.handle))
        assert {a: 1, fanin.Stream("sim:0", a.handle): 2} == {a: 2}
        assert a != a.handle and a != "sim:0"
        assert a.device == "sim:0" and m.stream(1).device == "sim:1"
        assert repr(a) == f'fanin.Stream("sim:0", {a.handle})'
        assert m.streams[:2] == (a, b)


def test_the_legacy_stream_has_the_handle_1_and_0_means_it() -> None:
    with Machine(2):
        legacy = fanin.current_stream("sim:1")
        assert legacy is not None and legacy.handle == 1
        assert fanin.Stream("sim:1", 0) == fanin.Stream("sim:1", 1) == legacy
        assert fanin.Stream("sim:0", 1) != legacy


@pytest.mark.parametrize(
    ("handle", "error", "words"),
    [(77, ValueError, "has the handle 77"), (-1, ValueError, "handle -1"), (1 << 70, ValueError, "handle"),
     (True, TypeError, "integer"), ("2", TypeError, "integer"), (None, TypeError, "integer")],
)  # fmt: skip
def test_a_handle_that_is_none_is_refused(handle: Any, error: type[Exception], words: str) -> None:
    with Machine(), pytest.raises(error, match=words):
        fanin.Stream("sim:0", handle)


def test_the_cpu_has_no_streams() -> None:
    with pytest.raises(ValueError, match="no streams"):
        fanin.Stream("cpu", 1)
    with pytest.raises(ValueError, match="no streams"):
        fanin.Event("cpu")
    assert fanin.current_stream("cpu") is None


def test_the_innermost_with_makes_the_current_stream_of_its_device() -> None:
    with Machine(2) as m:
        a, b, other = m.stream(), m.stream(), m.stream(1)
        with fanin.stream(a) as s:
            assert s is a and fanin.current_stream("sim:0") == a
            with fanin.stream(other), fanin.stream(b):
                assert fanin.current_stream("sim:0") == b
                assert fanin.current_stream("sim:1") == other
            assert fanin.current_stream("sim:0") == a
            assert fanin.current_stream("sim:1").handle == 1
        assert fanin.current_stream("sim:0").handle == 1
        with pytest.raises(KeyError), fanin.stream(a):
            raise KeyError
        assert fanin.current_stream("sim:0").handle == 1


def test_the_current_stream_belongs_to_its_thread() -> None:
    seen: list[Any] = []
    with Machine() as m:

        def look() -> None:
            with m:
                seen.append(fanin.current_stream("sim:0").handle)

        with fanin.stream(m.stream()):
            other = threading.Thread(target=look)
            other.start()
            other.join()
    assert seen == [1]


class CudaStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (3, TypeError, r"fanin.Stream\(device, 3\)"),
        ("sim:0", TypeError, "expected a stream"),
        (object(), TypeError, "expected a stream"),
        (CudaStream(), fanin.DeviceError, "no CUDA driver"),
    ],
)
def test_the_error_for_an_object_that_is_no_stream_names_the_valid_ones(
    what: Any, error: type[Exception], words: str
) -> None:
    with Machine() as m:
        x = m.empty(2)
        with pytest.raises(error, match=words):
            m.launch(what, lambda x: None, reads=[x])
        with pytest.raises(error, match=words):
            fanin.InputBuffer(1).add(0, x, stream=what)
        with pytest.raises(error, match=words), fanin.stream(what):
            pass


@pytest.mark.parametrize("make", [lambda m: m.stream(), lambda m: m.event(), lambda m: m.empty(2), lambda m: m])
def test_objects_of_this_process_are_neither_pickled_nor_copied(make: Any) -> None:
    with Machine() as m:
        thing = make(m)
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot pickle or copy"):
                refused(thing)


# Events


def test_an_event_is_a_point_in_a_queue() -> None:
    with Machine() as m:
        s, t = m.stream(), m.stream()
        x = m.empty(1)
        e = m.event()
        assert e.query() and e.stream is None and "never recorded" in repr(e)
        m.launch(s, lambda x: x.fill(1), writes=[x])
        e.record(s)
        assert e.stream == s and not e.query()
        m.launch(s, lambda x: x.fill(2), writes=[x])
        e.synchronize()
        assert e.query()
        t.wait(e)
        assert repr(e) == f"<fanin.Event on sim:0, recorded on stream {s.handle}>"


def test_recording_again_moves_the_point_for_later_waits_only() -> None:
    with Machine(1) as m:
        a, b, c = m.stream(), m.stream(), m.stream()
        x, y = m.empty(1), m.empty(1)
        e = m.event()
        m.launch(a, lambda x: x.fill(1), writes=[x])
        e.record(a)
        b.wait(e)
        m.launch(a, lambda y: y.fill(1), writes=[y])
        e.record(a)
        c.wait(e)
        m.launch(c, lambda x, y: None, reads=[x, y])
        m.launch(b, lambda x: None, reads=[x])
        with pytest.raises(fanin.RaceError):
            m.launch(b, lambda y: None, reads=[y], name="too early")
        m.synchronize()


def test_waiting_for_an_event_never_recorded_warns_and_does_nothing() -> None:
    with Machine() as m:
        s, e = m.stream(), m.event()
        with pytest.warns(RuntimeWarning, match="never recorded"):
            s.wait(e)
        with pytest.raises(RuntimeWarning):
            s.wait(e)  # warnings are errors here
        e.synchronize()


def test_a_stream_waits_for_events_and_streams_alone() -> None:
    with Machine() as m:
        for wrong in (None, 1, m, "sim:0"):
            with pytest.raises(TypeError, match="Event or a Stream"):
                m.stream().wait(wrong)


def test_an_event_is_recorded_on_its_own_device() -> None:
    with Machine(2) as m:
        with pytest.raises(ValueError, match=r"sim:0.*sim:1"):
            m.event(0).record(m.stream(1))
        e = fanin.Event("sim:1")
        e.record(m.stream(1))
        m.stream(0).wait(e)  # waits cross devices
        with pytest.raises(ValueError, match="numbered from 0"):
            m.event(2)


def test_a_record_without_a_stream_is_on_the_current_one() -> None:
    with Machine() as m, fanin.stream(m.stream()) as s:
        e = m.event()
        e.record(None)
        assert e.stream == s


def test_streams_of_two_machines_do_not_meet() -> None:
    with Machine() as m, Machine() as other:
        x = m.empty(2)
        with pytest.raises(ValueError, match="expected a stream of this machine, got"):
            m.launch(other.stream(), lambda x: None, reads=[x])
        with pytest.raises(ValueError, match="another machine"):
            other.launch(other.stream(), lambda x: None, reads=[x])


def test_the_core_refuses_nonsense_without_harm() -> None:
    for wrong in (None, 3, object()):
        with pytest.raises(TypeError):
            _core.stream_push(wrong)
        with pytest.raises(TypeError):
            _core.stream_pop(wrong)
    with Machine() as m:
        _core.stream_pop(m.stream())  # never pushed: nothing happens


def test_a_block_of_a_stream_may_end_after_that_of_its_machine() -> None:
    with Machine() as m:
        block = fanin.stream(m.stream())
        block.__enter__()
    block.__exit__(None, None, None)
    with Machine():
        assert _core.stream_pushed("sim:0") is None
