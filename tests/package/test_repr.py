"""The repr of an object shows its state; and an object with a length can be iterated."""

from __future__ import annotations

import numpy as np
import pytest

import fanin
from fanin import InputBuffer, Slot
from fanin.sim import Machine
from kit import hooks

pytestmark = pytest.mark.core


def test_a_buffer_shows_how_much_is_in_it() -> None:
    buf = InputBuffer(2, name="fc", budget=10**6)
    assert repr(buf) == "<fanin.InputBuffer 'fc': 2 slots, empty>"
    for slot in (0, 0, 1):
        buf.add(slot, np.ones(1))
    assert repr(buf) == "<fanin.InputBuffer 'fc': 2 slots, 3 parked, 24 B>"
    buf.take()
    assert repr(buf) == "<fanin.InputBuffer 'fc': 2 slots, empty>"
    assert repr(InputBuffer(1)) == "<fanin.InputBuffer: 1 slot, empty>"
    assert repr(InputBuffer(1, name="n" * 200)) == f"<fanin.InputBuffer '{'n' * 58}': 1 slot, empty>"


@pytest.mark.parametrize("strided", [False, True], ids=["fast path", "general path"])
def test_a_buffer_shows_the_sums_that_have_begun(strided: bool) -> None:
    buf = InputBuffer(2, budget=0)
    for _ in range(3):
        buf.add(0, np.ones(4)[::-1] if strided else np.ones(4))
    assert repr(buf) == "<fanin.InputBuffer: 2 slots, 1 sum begun>"
    keyed = InputBuffer(1, budget=0)
    for key in (0, 1, 5):
        keyed.add(0, np.ones(4)[::-1] if strided else np.ones(4), key=key)
    assert repr(keyed) == "<fanin.InputBuffer: 1 slot, 1 parked, 32 B, 1 sum begun>"


def test_a_buffer_shows_which_slots_are_poisoned() -> None:
    seen = 0
    for fail in range(40):
        with Machine(1) as m:
            buf = InputBuffer([Slot(dtype="float32"), Slot()], budget=0, name="p")
            streams = [m.stream(), m.stream()]
            given = [m.array(np.full(4, k, np.float32)) for k in (1, 2)]
            hooks.fail_call(m, fail)
            try:
                for x, s in zip(given, streams, strict=True):
                    buf.add(0, x, stream=s)
                buf.take()
            except fanin.DeviceError:
                pass
            finally:
                hooks.fail_call(m, -1)
            poisoned = "poisoned" in buf.explain(0)
            assert repr(buf).endswith(", 1 poisoned>") == poisoned
            seen += poisoned
            buf.clear()
            assert repr(buf) == "<fanin.InputBuffer 'p': 2 slots, empty>"
    assert 0 < seen < 40


def test_to_print_a_buffer_changes_nothing() -> None:
    def passes(look: bool) -> list[bytes]:
        buf = InputBuffer([Slot(), Slot(accumulate="exact"), Slot(combine=lambda a, b: a + b)], budget=64)
        for i in range(6):
            for slot, x in enumerate((np.full(3, 0.1 * i), np.full(3, 0.1 * i), 7)):
                buf.add(slot, x, key=i)
                if look:
                    repr(buf)
        return [np.asarray(x).tobytes() for x in buf.take()]

    assert passes(True) == passes(False)


def test_machines_streams_events_and_arrays_show_their_state() -> None:
    with Machine(1, seed=4) as m:
        assert repr(m) == "<fanin.sim.Machine: 1 device, 0 streams, 0 races, seed 4, seeded>"
        s, e = m.stream(), m.event()
        assert repr(m) == "<fanin.sim.Machine: 1 device, 1 stream, 0 races, seed 4, seeded>"
        assert repr(s) == f'fanin.Stream("sim:0", {s.handle})' and eval(repr(s)) == s
        assert repr(e) == "<fanin.Event on sim:0, never recorded>"
        e.record(s)
        assert repr(e) == f"<fanin.Event on sim:0, recorded on stream {s.handle}>"
        assert repr(m.empty((2, 3), np.float32)) == "<fanin.sim.Array (2, 3) float32 on sim:0, 24 B>"
    sparse = fanin.Sparse("coo", (np.array([[2, 1]]), np.ones((2, 3), "f4")), (4, 3))
    assert repr(sparse) == "<fanin.Sparse coo of shape (4, 3): 2 stored, float32>"


def test_a_report_shows_what_was_found() -> None:
    def one(m: Machine) -> int:
        return 0

    assert (
        repr(fanin.sim.explore(one))
        == "<fanin.sim.Report 'one': 1 order, 0 races, 0 deadlocks, 0 errors, 1 result, ok>"
    )

    def differs(m: Machine) -> list[float]:
        buf = InputBuffer(1)
        buf.add(0, 1e16)
        for value in (1.0, -1e16):
            m.spawn(buf.add, 0, value)
        m.join()
        return buf.take()

    found = repr(fanin.sim.explore(differs))
    assert found.startswith("<fanin.sim.Report 'differs': ") and "2 results, failed>" in found


def test_a_buffer_is_iterated_slot_by_slot() -> None:
    buf = InputBuffer(3)
    buf.add(0, np.ones(2))
    buf.add(2, np.full(2, 2.0))
    sums = list(buf)
    assert len(sums) == len(buf) and sums[1] is None
    assert sums[0].tolist() == [1, 1] and sums[2].tolist() == [2, 2]
    assert repr(buf).endswith("2 parked, 32 B>"), "as it was"
    assert None in InputBuffer(1)
    with pytest.raises(IndexError, match="expected a slot from 0 to 2"):
        buf[3]
    with pytest.raises(IndexError):
        buf[-1]
    assert list(InputBuffer(0)) == []


def test_an_array_of_a_device_is_iterated_over_its_first_axis() -> None:
    with Machine(1) as m:
        x = m.array(np.arange(6).reshape(3, 2))
        rows = list(x)
        assert [row.numpy().tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
        assert x[-1].numpy().tolist() == [4, 5] and [row.address for row in rows] == [x[i].address for i in range(3)]
        with pytest.raises(TypeError, match="no dimensions"):
            iter(m.array(np.float64(1)))
        with pytest.raises(TypeError, match="comparing an array on a device"):
            3 in x  # noqa: B015
        with pytest.raises(IndexError):
            x[3]
        for call in (
            lambda: fanin.add_n(x),
            lambda: InputBuffer(x),
            lambda: fanin.sharing.overlaps(x),
            lambda: m.launch(m.stream(), len, reads=x),
        ):
            with pytest.raises(TypeError, match="sequence"):
                call()  # one array where several are expected is a mistake, as with NumPy's


def test_a_trace_is_iterated_line_by_line() -> None:
    with fanin.trace() as t:
        fanin.add_n([np.ones(3), np.ones(3)])
    assert tuple(t) == t.lines and len(t) == len(t.lines) > 0
    assert t.lines[0] in t
