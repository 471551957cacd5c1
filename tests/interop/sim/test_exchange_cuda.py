"""Arrays and streams of GPU libraries, in and out, on the fake driver: stand-ins that follow the libraries'
specifications (kit/standins.py). The numbers are rows of the table of faults that the exchange was built
against; test_exchange_dlpack.py has the rows for the host.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin.sim import Machine
from fanin.sim.machine import SCHEDULES
from kit import standins
from kit.exchange_cuda import like, ready_on, torch_like, values
from kit.standins import DLArray, Library, ProtocolStream, table_array

pytestmark = pytest.mark.core


EVERY = ["dlpack", "legacy", "table", "torch", "torch without a table", "cupy", "numba"]


#: Libraries with a current stream.
CURRENT = ["table", "torch", "torch without a table", "cupy", "numba"]


# Streams of others, in


def test_anything_with_the_stream_protocol_is_a_stream(driver: FakeDriver) -> None:
    s, t = driver.stream(), driver.stream(1)
    with fanin.stream(ProtocolStream((0, s.handle))) as ours:
        assert ours == s == fanin.current_stream("cuda:0")
    with fanin.stream(ProtocolStream((0, t.handle))) as ours:  # it names no device: its handle decides
        assert ours == t
    x = driver.array(np.ones(3))
    buf = fanin.InputBuffer(1, stream=ProtocolStream((0, s.handle)))
    buf.add(0, x, stream=ProtocolStream((0, s.handle)))
    buf.add(0, x, stream=s)
    waits = driver.calls("StreamWaitEvent")
    [total] = buf.take(ProtocolStream((0, s.handle)))
    assert driver.calls("StreamWaitEvent") == waits  # one stream all along
    assert values(total, s) == [2, 2, 2]


def test_the_streams_of_torch_and_cupy_are_streams(library: Library) -> None:
    s = library.driver.stream(1)
    torch, cupy = standins.torch(library), standins.cupy(library)
    with fanin.stream(torch.cuda.ExternalStream(s.handle, 1)) as ours:
        assert ours == s
    with fanin.stream(cupy.cuda.Stream(s.handle)) as ours:  # of device -1: whichever it is
        assert ours == s
    with fanin.stream(torch.cuda.default_stream(1)) as ours:
        assert ours == fanin.Stream("cuda:1", 1)


def test_a_default_stream_without_a_device_is_that_of_the_current_context(driver: FakeDriver) -> None:
    for index in range(2):
        fanin.Stream(f"cuda:{index}", 1)  # both are in use
    for handle, number in ((0, 1), (1, 1), (2, 2)):
        with fanin.stream(ProtocolStream((0, handle))) as ours:
            assert ours == fanin.Stream("cuda:0", number)
        with driver.context(1), fanin.stream(ProtocolStream((0, handle))) as ours:
            assert ours == fanin.Stream("cuda:1", number)


def test_row_45_a_stream_of_another_device_than_it_names_is_refused(driver: FakeDriver) -> None:
    other = ProtocolStream((0, driver.stream(1).handle))
    other.device_id = 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not of cuda:0's primary context"), fanin.stream(other):
        pass


def test_row_45_a_destroyed_stream_is_refused_by_the_driver(driver: FakeDriver) -> None:
    with (
        pytest.raises(fanin.DeviceError, match="CUDA_ERROR_INVALID_HANDLE"),
        fanin.stream(ProtocolStream((0, 0x1234560))),
    ):
        pass


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (ProtocolStream(7), TypeError, r"__cuda_stream__\(\): expected \(version, handle\), got 7"),
        (ProtocolStream((0,)), TypeError, r"expected \(version, handle\)"),
        (ProtocolStream((1, 7)), TypeError, "has version 1; expected 0"),
        (ProtocolStream((0, "7")), TypeError, "has handle '7'; expected an integer"),
        (ProtocolStream((0, True)), TypeError, "has handle True; expected an integer"),
        (ProtocolStream((0, -1)), ValueError, "has handle -1"),
        (ProtocolStream((0, 2**64)), ValueError, "fits 64 bits"),
        (7, TypeError, r"the number 7: pass fanin.Stream\(device, 7\)"),
        ("cuda:0", TypeError, "anything with __cuda_stream__, or None"),
        (np.ones(2), TypeError, "got a?n? ?numpy.ndarray"),
    ],
)
def test_an_object_that_is_no_stream_is_a_type_error_that_names_the_valid_ones(
    driver: FakeDriver, what: Any, error: type[Exception], words: str
) -> None:
    buf = fanin.InputBuffer(1)
    for act in (
        lambda: buf.add(0, driver.array(np.ones(2)), stream=what),
        lambda: buf.take(what),
        lambda: fanin.InputBuffer(1, stream=what),
        lambda: fanin.Event("cuda:0").record(what),
    ):
        with pytest.raises(error, match=words):
            act()


def test_an_error_of_a_stream_object_reaches_the_caller(driver: FakeDriver) -> None:
    class Angry:
        def __cuda_stream__(self) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fanin.InputBuffer(1).take(Angry())


def test_a_stream_waits_for_anothers_stream(driver: FakeDriver) -> None:
    s, t = driver.stream(), driver.stream()
    order: list[int] = []
    driver.launch(s, lambda: order.append(0))
    t.wait(ProtocolStream((0, s.handle)))
    driver.launch(t, lambda: order.append(1))
    driver.synchronize()
    assert order == [0, 1]


def test_streams_of_fanin_implement_the_protocol(driver: FakeDriver) -> None:
    s = driver.stream()
    assert s.__cuda_stream__() == (0, s.handle)
    assert fanin.Stream("cuda:0", 0).__cuda_stream__() == (0, 1)
    with Machine() as m, pytest.raises(TypeError, match="sim:0"):
        m.stream().__cuda_stream__()


# Arrays in, by every way


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EVERY)
def test_arrays_of_a_library_are_summed_on_their_streams(a_world: Any, name: str, schedule: str) -> None:
    driver = a_world("fake", 1, 3, schedule=schedule, starve=2).driver
    library = Library(driver)
    with like(name, library) as make:
        c, p, q = (driver.stream() for _ in range(3))
        buf = fanin.InputBuffer(1, stream=c)
        for s, value in ((p, 1), (q, 2), (c, 4)):
            buf.add(0, make(library, (2, 3)).fill(s, value), stream=s)
        gc.collect()
        assert not library.freed
        assert values(buf.take()[0], c) == [[7, 7, 7]] * 2
        assert driver.races == 0, driver.race


@pytest.mark.parametrize("name", CURRENT)
def test_without_a_stream_a_gradient_is_ready_on_its_librarys_current_one(name: str, library: Library) -> None:
    driver = library.driver
    p, q, c = (driver.stream() for _ in range(3))
    with like(name, library) as make:
        for batch in (False, True):
            buf = fanin.InputBuffer(1, stream=c)
            for s in (p, q):
                x = make(library, (3,)).fill(s, 1)
                ready_on(x, s)
                with library.on(s):
                    buf.add_many([0], [x]) if batch else buf.add(0, x)
            assert values(buf.take()[0], c) == [2, 2, 2]


def test_a_batch_that_fails_while_it_is_read_ends_no_block_of_another_one(library: Library) -> None:
    """Only what `add_many` made current is current no more."""
    driver = library.driver
    s = driver.stream()
    with like("cupy", library) as make, contextlib.ExitStack() as blocks:

        class Fails(DLArray):
            def __dlpack__(self, **how: Any) -> Any:
                blocks.enter_context(fanin.stream(s))
                raise RuntimeError("no memory")

        x, bad = make(library, (3,)).fill(s, 1), Fails(library, (3,))
        with library.on(s):
            with pytest.raises(RuntimeError, match="no memory"):
                fanin.InputBuffer(2, stream=s).add_many([0, 1], [x, bad])
            assert fanin.current_stream("cuda:0") == s
            blocks.close()
            assert fanin.current_stream("cuda:0") != s


def entries(act: Callable[[], object]) -> list[str]:
    """How often C and fanin's Python call each other while `act` runs."""
    home, seen = str(Path(fanin.__file__).parent), list[str]()

    def profile(frame: Any, event: str, arg: Any) -> None:
        here, back = frame.f_code.co_filename.startswith(home), frame.f_back
        if event == "call" and here and not (back and back.f_code.co_filename.startswith(home)):
            seen.append(f"C calls {frame.f_code.co_name}")
        elif event == "c_call" and here and getattr(arg, "__module__", None) == "fanin._core":
            seen.append(f"{frame.f_code.co_name} calls {arg.__name__}")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(("name", "most"), [("torch", 0), ("table", 0), ("torch without a table", 6)])
def test_an_add_of_an_array_with_an_exchange_table_does_not_leave_c(name: str, most: int, library: Library) -> None:
    s = library.driver.stream()
    with like(name, library) as make, library.on(s):
        x, y = make(library, (3,)).fill(s, 1), make(library, (3,)).fill(s, 2)
        buf = fanin.InputBuffer(1)
        buf.add(0, x)  # its type is met
        seen = entries(lambda: buf.add(0, y))
        assert len(seen) <= most and bool(seen) == bool(most), seen
        assert values(buf.take()[0], s) == [3, 3, 3]


@pytest.mark.parametrize(("name", "said"), [("requires_grad", True), ("is_neg", lambda x: True)])
def test_a_lazily_conjugated_or_negated_tensor_is_not_read_by_its_table(
    name: str, said: object, library: Library
) -> None:
    s = library.driver.stream()
    with torch_like(library, table=True) as make, library.on(s):
        x = make(library, (3,)).fill(s, 1)
        fanin.InputBuffer(1).add(0, x)
        buf = fanin.InputBuffer(1)
        make.resolve_conj = lambda x: x
        setattr(make, name, said)
        assert "C calls describe" in entries(lambda: buf.add(0, x))


@pytest.mark.parametrize("name", CURRENT)
def test_the_stream_that_was_made_the_current_one_comes_before_the_librarys(name: str, library: Library) -> None:
    p, q = library.driver.stream(), library.driver.stream()
    with like(name, library) as make:
        buf = fanin.InputBuffer(1)
        x = make(library, (3,)).fill(p, 1)
        with library.on(q), fanin.stream(p):
            buf.add(0, x)
            buf.add(0, x)
        waits = library.driver.calls("StreamWaitEvent")
        [total] = buf.take()  # S5: the consumer's stream is p
        # p waits for the allocator's current stream, or CuPy's and Numba's current stream for p
        assert library.driver.calls("StreamWaitEvent") - waits == (0 if name == "torch without a table" else 1)
        assert values(total, p) == [2, 2, 2]


@pytest.mark.parametrize("name", CURRENT)
def test_of_a_library_alone_the_sum_is_on_its_current_stream(name: str, library: Library) -> None:
    s = library.driver.stream()
    with like(name, library) as make, library.on(s):
        x, y = make(library, (3,)).fill(s, 1), make(library, (3,)).fill(s, 2)
        ready_on(x, s)
        ready_on(y, s)
        waits = library.driver.calls("StreamWaitEvent")
        with fanin.stream(s) if name in ("numba",) else contextlib.nullcontext():  # Numba reads a sum on ours
            total = fanin.add_n([x, y])
        assert library.driver.calls("StreamWaitEvent") == waits
        assert values(total, s) == [3, 3, 3]


def test_a_gradient_declared_ready_on_the_wrong_stream_is_a_race_that_is_found(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.world.races_are_planted()
    library = Library(driver)
    make = table_array(library)
    p, c = driver.stream(), driver.stream()
    buf = fanin.InputBuffer(1, stream=c)
    for _ in range(2):
        buf.add(0, make(library, (3,)).fill(p, 1))  # p is not the current one
    buf.take()
    driver.synchronize()
    assert driver.races > 0


def test_row_46_a_producer_that_ignores_the_requested_stream_is_a_race_that_is_found(a_world: Any) -> None:
    driver = a_world("fake", 1).driver
    driver.world.races_are_planted()
    library = Library(driver)
    p, c = driver.stream(), driver.stream()

    class Deaf(DLArray):
        def __dlpack__(self, **how: Any) -> Any:
            return super().__dlpack__(**{**how, "stream": -1})

    for make, races in ((DLArray, False), (Deaf, True)):
        with library.on(p):
            buf = fanin.InputBuffer(1, stream=c)
            for _ in range(2):
                buf.add(0, make(library, (3,)).fill(p, 1), stream=c)
            buf.take()
        driver.synchronize()
        assert (driver.races > 0) == races


@pytest.mark.parametrize(
    ("given", "said"),
    [("none", 1), ("legacy", 1), ("per-thread", 2), ("own", None), ("pushed", None), ("other device", -1)],
)
def test_row_44_dlpack_is_called_with_the_integer_of_the_stream(library: Library, given: str, said: int | None) -> None:
    driver = library.driver
    s, t = driver.stream(), driver.stream(1)
    stream = {
        "none": None,
        "legacy": fanin.Stream("cuda:0", 0),
        "per-thread": fanin.Stream("cuda:0", 2),
        "own": s,
        "pushed": None,
        "other device": t,
    }[given]
    buf = fanin.InputBuffer(1)
    x = DLArray(library, (3,))
    with fanin.stream(s) if given == "pushed" else contextlib.nullcontext():
        buf.add(0, x, stream=stream)
    assert library.requests == [{"max_version": (1, 3), "stream": s.handle if said is None else said}]
    assert buf.take()[0] is x


def test_row_5_a_producer_before_dlpack_1_is_called_without_a_version_and_with_the_stream(library: Library) -> None:
    s = library.driver.stream()
    buf = fanin.InputBuffer(1)
    x = standins.LegacyArray(library, (3,))
    buf.add(0, x, stream=s)
    assert library.requests == [{"stream": s.handle}] and buf.take()[0] is x


# Lifetime


@pytest.mark.parametrize("name", EVERY)
def test_memory_of_a_library_is_released_only_after_all_work_that_used_it(name: str, library: Library) -> None:
    driver = library.driver
    c, p = driver.stream(), driver.stream()
    with like(name, library) as make:
        buf = fanin.InputBuffer(1, stream=c)
        addresses = []
        for _ in range(2):
            x = make(library, (3,)).fill(p, 1)
            addresses.append(x.address)
            buf.add(0, x, stream=p)
        del x
        [total] = buf.take()
        gc.collect()
        assert not set(addresses) & set(library.freed)  # c has not run
        driver.synchronize()
        driver.array(np.ones(1))  # polls
        gc.collect()
        assert set(addresses) <= set(library.freed)
        assert values(total, c) == [2, 2, 2]


def is_kept_until_its_consumer_has_used_it(x: Any, library: Library, p: fanin.Stream, c: fanin.Stream) -> None:
    """x itself comes back, no stream is recorded with its library, and its memory is freed after c's work on it."""
    driver = library.driver
    x.fill(p, 5)
    address = x.address
    given = [x]
    del x
    buf = fanin.InputBuffer(1, stream=c)
    buf.add(0, given[0], stream=p)
    [same] = buf.take()
    assert same is given.pop() and library.recorded == []
    driver.synchronize()
    driver.array(np.ones(1))  # polls: the buffer's memory is freed
    seen: list[Any] = []
    driver.launch(c, lambda v: seen.append(v.tolist()), reads=[same])
    del same
    gc.collect()
    assert address not in library.freed
    driver.synchronize()
    driver.array(np.ones(1))  # polls
    gc.collect()
    assert seen == [[5, 5, 5]] and library.freed == [address]


@pytest.mark.parametrize("name", ["dlpack", "table", "cupy", "numba"])
def test_a_handed_through_gradient_keeps_its_memory_until_its_consumer_has_used_it(name: str, library: Library) -> None:
    """A14: the same object comes back, and its library does not track the consumer's stream: a second reference is
    kept.
    """
    driver = library.driver
    c, p = driver.stream(), driver.stream()
    with like(name, library) as make:
        is_kept_until_its_consumer_has_used_it(make(library, (3,)), library, p, c)


@pytest.mark.parametrize("name", ["torch", "torch without a table"])
def test_record_stream_is_called_for_every_stream_before_a_tensor_is_released(name: str, library: Library) -> None:
    driver = library.driver
    c, p = driver.stream(), driver.stream()
    with like(name, library) as make:
        x = make(library, (3,)).fill(p, 5)
        buf = fanin.InputBuffer(1, stream=sys.modules["torch"].cuda.Stream(c.handle))
        buf.add(0, x, stream=p)
        assert buf.take()[0] is x
        assert library.recorded == [(x.address, c.handle)]
        library.recorded.clear()
        legacy = fanin.Stream("cuda:0", 1)
        buf.add(0, x, stream=p)
        p.synchronize()
        assert buf.take(legacy)[0] is x
        assert (x.address, 0) in library.recorded  # torch's own number of the legacy default stream


@pytest.mark.parametrize("pools", [True, False])
def test_adds_and_a_take_inside_torchs_graph_are_replayed(library: Library, pools: bool) -> None:
    """As `with torch.cuda.graph(g):` captures them: globally, on torch's current stream, with streams that are forked
    from it and joined by the take. Replays follow their inputs.
    """
    driver = library.driver
    driver.set(pools=pools)
    c, *forked = (driver.stream() for _ in range(4))
    with torch_like(library, True) as make, library.on(c):
        xs = [make(library, (8,)).fill(c, k + 1) for k in range(5)]

        def total() -> Any:
            buf = fanin.InputBuffer(1, stream=sys.modules["torch"].cuda.current_stream(0))
            e = c.record()
            for s in forked:
                s.wait(e)
            for k, x in enumerate(xs):
                buf.add(0, x, key=k, stream=forked[k % 3])
            return buf.take()[0]

        before = total()
        driver.synchronize()
        driver.begin_capture(c)
        out = total()
        gc.collect()
        graph = driver.end_capture(c)
        assert values(before, c) == [15] * 8
        for more in (0, 10):
            for k, x in enumerate(xs):
                x.fill(c, k + 1 + more)
            driver.launch_graph(graph, c)
            assert values(out, c) == [15 + 5 * more] * 8
        driver.destroy_graph(graph)
    fanin.trim()


@pytest.mark.parametrize("which", ["a thread's own", "one that may be destroyed"])
def test_for_a_stream_whose_handle_may_change_meaning_the_memory_is_kept_instead_of_recorded(
    library: Library, which: str
) -> None:
    """torch uses the stream when the tensor is freed, on any thread: there 2 may be another stream, and the handle of
    a destroyed one is invalid.
    """
    driver = library.driver
    p = driver.stream()
    c = fanin.Stream("cuda:0", 2) if which == "a thread's own" else driver.stream()
    with torch_like(library, True) as make:
        is_kept_until_its_consumer_has_used_it(make(library, (3,)), library, p, c)


def test_record_stream_is_called_for_the_parts_of_an_object_too(library: Library) -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __fanin_parts__(self) -> Any:
            return self.parts

        def __add__(self, other: Any) -> Any:
            return self

    c, p = library.driver.stream(), library.driver.stream()
    with torch_like(library, table=True) as make:
        pair = Pair(make(library, (3,)).fill(p, 5), make(library, (4,)).fill(p, 5))
        sparse = fanin.Sparse("coo", (library.driver.array(np.array([[0, 2]])), make(library, (2,)).fill(p, 1)), (4,))
        buf = fanin.InputBuffer(2, stream=sys.modules["torch"].cuda.Stream(c.handle))
        buf.add(0, pair, stream=p)
        buf.add(1, sparse, stream=p)
        assert buf.take() == [pair, sparse]
        assert library.recorded == [(x.address, c.handle) for x in (*pair.parts, sparse.parts[1])]
