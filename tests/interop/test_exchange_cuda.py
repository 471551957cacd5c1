"""Arrays and streams of GPU libraries, in and out, on the fake driver: stand-ins that behave as the libraries'
specifications say (kit/standins.py). The numbers are rows of the table of faults that the exchange was built
against; what the host's side of a row is, test_exchange_dlpack.py has.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from fanin import _core
from fanin._interop import arrays, describe, dlpack, export, streams, torch
from fanin._interop.origins import TORCH
from fanin._interop.tables import TABLE, table_of
from fanin._sim.machine import SCHEDULES
from fanin.sim import Machine
from fanin.testing import FakeDriver, use_driver
from kit import hooks, standins
from kit.hostile import Deleter, get_name, get_pointer, set_name
from kit.standins import DLArray, InterfaceArray, Library, ProtocolStream, adopt, installed, table_array

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """What there is so far is no garbage: leave it out of the many collections below."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def library(driver: FakeDriver) -> Library:
    return Library(driver)


@contextlib.contextmanager
def torch_like(library: Library, table: bool) -> Iterator[type[Any]]:
    """torch's class: the core is told of its table, and forgets it at the end."""
    with installed("torch", standins.torch(library, table=table)) as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "quicken", lambda: None)
        if _core.table_known(getattr(module.Tensor, TABLE, None), TORCH):
            _core.read_by_table(module.Tensor, TORCH, True)
        try:
            yield module.Tensor
        finally:
            _core.table_known(None, TORCH)
            _core.read_by_table(module.Tensor, -1, False)


@contextlib.contextmanager
def like(name: str, library: Library) -> Iterator[type[Any]]:
    """The class of arrays of a library of this name."""
    if name == "dlpack":
        yield DLArray
    elif name == "legacy":
        yield standins.LegacyArray
    elif name == "table":
        yield table_array(library)
    elif name.startswith("torch"):
        with torch_like(library, name == "torch") as made:
            yield made
    elif name == "cupy":
        with installed("cupy", standins.cupy(library)) as module:
            yield module.ndarray
    else:
        with installed("numba", standins.numba(library)) as module, fanin.set_options(raw_addresses=True):
            yield module.DeviceNDArray


EVERY = ["dlpack", "legacy", "table", "torch", "torch without a table", "cupy", "numba"]
#: Those that tell a current stream.
CURRENT = ["table", "torch", "torch without a table", "cupy", "numba"]


def ready_on(x: Any, s: fanin.Stream) -> None:
    """Numba's arrays say themselves where they are ready."""
    if isinstance(x, InterfaceArray):
        x.ready = s.handle


def values(x: Any, s: fanin.Stream) -> Any:
    """What is read on `s`, of a library's array or of ours."""
    if isinstance(x, standins.Array):
        return x.read(s)
    with fanin.stream(s):
        return x.numpy().tolist()


# Streams of others, in


def test_anything_with_the_stream_protocol_is_a_stream(driver: FakeDriver) -> None:
    s, t = driver.stream(), driver.stream(1)
    with fanin.stream(ProtocolStream((0, s.handle))) as ours:
        assert ours == s == fanin.current_stream("cuda:0")
    with fanin.stream(ProtocolStream((0, t.handle))) as ours:  # it names no device: its handle tells
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


def test_row_45_a_stream_of_another_device_than_it_says_is_refused(driver: FakeDriver) -> None:
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
        (ProtocolStream(7), TypeError, r"__cuda_stream__\(\) gave 7; expected \(version, handle\)"),
        (ProtocolStream((0,)), TypeError, r"expected \(version, handle\)"),
        (ProtocolStream((1, 7)), TypeError, "has version 1; expected 0"),
        (ProtocolStream((0, "7")), TypeError, "has handle '7'; expected an integer"),
        (ProtocolStream((0, True)), TypeError, "has handle True; expected an integer"),
        (ProtocolStream((0, -1)), ValueError, "has handle -1"),
        (ProtocolStream((0, 2**64)), ValueError, "fits 64 bits"),
        (7, TypeError, r"the number 7: say fanin.Stream\(device, 7\)"),
        ("cuda:0", TypeError, "anything with __cuda_stream__, or None"),
        (np.ones(2), TypeError, "got a?n? ?numpy.ndarray"),
    ],
)
def test_what_is_no_stream_is_a_type_error_that_says_what_would_be(
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


def test_what_a_stream_raises_reaches_the_caller(driver: FakeDriver) -> None:
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


def test_our_streams_offer_themselves_by_the_protocol(driver: FakeDriver) -> None:
    s = driver.stream()
    assert s.__cuda_stream__() == (0, s.handle)
    assert fanin.Stream("cuda:0", 0).__cuda_stream__() == (0, 1)
    with Machine() as m, pytest.raises(TypeError, match="sim:0"):
        m.stream().__cuda_stream__()


# Arrays in, by every way


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", EVERY)
def test_arrays_of_a_library_are_summed_where_their_streams_say(a_world: Any, name: str, schedule: str) -> None:
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
def test_a_tensor_whose_memory_is_not_its_value_is_not_read_by_its_table(
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


def test_a_gradient_that_is_said_to_be_ready_elsewhere_is_a_race_that_is_found(a_world: Any) -> None:
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


def test_row_46_a_producer_that_ignores_our_stream_is_a_race_that_is_found(a_world: Any) -> None:
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
def test_row_44_dlpack_is_asked_with_the_integer_that_the_stream_has(
    library: Library, given: str, said: int | None
) -> None:
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
    assert library.asked == [{"max_version": (1, 3), "stream": s.handle if said is None else said}]
    assert buf.take()[0] is x


def test_row_5_a_producer_before_dlpack_1_is_asked_without_a_version_and_with_the_stream(library: Library) -> None:
    s = library.driver.stream()
    buf = fanin.InputBuffer(1)
    x = standins.LegacyArray(library, (3,))
    buf.add(0, x, stream=s)
    assert library.asked == [{"stream": s.handle}] and buf.take()[0] is x


# Rows 6 to 30 on a device


class Lying(DLArray):
    """A tensor whose struct is changed on its way."""

    change: Callable[[Any], None]

    def __dlpack__(self, **how: Any) -> Any:
        capsule = super().__dlpack__(**how)
        offered = self.library.held[next(reversed(self.library.held))]
        self.sent = offered
        type(self).change(offered.managed)
        return capsule


def setting(path: str, value: Any) -> Callable[[Any], None]:
    def change(managed: Any) -> None:
        at = managed
        *way, last = path.split(".")
        for name in way:
            at = getattr(at, name)
        setattr(at, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (setting("major", 2), BufferError, r"DLPack version 2\.3"),  # row 6
        # rows 9, 10
        (setting("tensor.device_type", 1), BufferError, r"the tensor is on device \(1, 0\); expected cuda:0"),
        (setting("tensor.device_type", 10), BufferError, "ROCm device 0; expected cuda:0"),
        (setting("tensor.device_type", 13), BufferError, "__dlpack_device__ named device type 2"),
        (setting("tensor.device_id", 1), BufferError, "CUDA device 1; expected cuda:0"),
        (setting("tensor.ndim", -1), ValueError, "-1 axes"),  # row 11
        (setting("tensor.ndim", 65), ValueError, "65 axes"),
        (setting("tensor.shape", None), ValueError, "no shape"),
        (setting("tensor.byte_offset", 2**63), ValueError, "byte_offset"),  # row 20
        (setting("tensor.byte_offset", 2), BufferError, "not aligned"),  # row 22
        (setting("tensor.data", None), ValueError, "address NULL"),  # row 21
        (setting("tensor.bits", 0), BufferError, "0 bits"),  # row 24
        (setting("tensor.lanes", 2), BufferError, "2 lanes"),
        (setting("tensor.code", 3), BufferError, "type code 3"),
    ],
)  # fmt: skip
def test_rows_6_9_to_11_20_to_22_and_24_a_tensor_that_lies_is_refused_and_given_back_once(
    library: Library, change: Any, error: type[Exception], words: str
) -> None:
    class This(Lying):
        pass

    This.change = staticmethod(change)  # type: ignore[method-assign]
    x = This(library, (2, 3))
    buf = fanin.InputBuffer(1, name="grads")
    with pytest.raises(error, match=words) as caught:
        buf.add(0, x, key=3)
    assert str(caught.value).startswith("grads: slot 0, key 3: ")
    assert x.sent.deleted == 1
    assert buf.take() == [None]


@pytest.mark.parametrize(
    ("shape", "strides", "error", "words"),
    [
        ((-1, 3), (12, 4), ValueError, "negative"),  # row 12
        ((2**32, 2**32, 16), (4, 4, 4), ValueError, "more"),  # row 13
        ((2**40, 2), (2**62, 4), ValueError, "more|leave|bytes"),  # row 14
    ],
)
def test_rows_12_to_14_geometry_that_cannot_be_is_a_value_error(
    library: Library, shape: Any, strides: Any, error: Any, words: str
) -> None:
    x = DLArray(library, shape, memory=standins.Memory(library, 8, 0), strides=strides)
    with pytest.raises(error):
        fanin.InputBuffer(1).add(0, x)
    gc.collect()
    assert not library.held


@pytest.mark.parametrize("device", [(2, 2), (2, 10**30), (13, 7), (2, -1)])
def test_row_10_a_device_that_is_not_there_is_named(library: Library, device: tuple[int, int]) -> None:
    x = DLArray(library, (3,))
    x.device_type, x.device_id = device
    with pytest.raises(BufferError, match=f"DLArray is on CUDA device {device[1]}, which cannot be used"):
        fanin.InputBuffer(1).add(0, x)
    assert not library.asked  # its memory was not asked for


def test_row_10_without_a_driver_the_error_says_so() -> None:
    driver = FakeDriver(1)
    with use_driver(driver):
        library = Library(driver)
        x = DLArray(library, (3,))
    with pytest.raises(BufferError, match="is on CUDA device 0, which cannot be used: no CUDA driver"):
        fanin.InputBuffer(1).add(0, x)


def test_row_15_strides_null_and_rows_16_17_and_20_any_layout_is_read(library: Library) -> None:
    driver, s = library.driver, library.driver.stream()

    class Plain(Lying):
        change = staticmethod(setting("tensor.strides", None))  # type: ignore[assignment]

    whole = DLArray(library, (4, 6)).fill(s, 1)
    driver.launch(s, lambda v: np.copyto(v, np.arange(24, dtype="f4").reshape(4, 6)), writes=[whole])
    table = np.arange(24.0).reshape(4, 6)
    item = 4
    views = {
        "strides NULL": (Plain(library, (4, 6), memory=whole.memory), table),
        "negative": (DLArray(library, (4, 6), memory=whole.memory, strides=(-24, 4), offset=3 * 24), table[::-1]),
        "stride 0": (DLArray(library, (3, 6), memory=whole.memory, strides=(0, 4)), np.broadcast_to(table[0], (3, 6))),
        "overlapping": (
            DLArray(library, (3, 3), memory=whole.memory, strides=(item, item)),
            np.lib.stride_tricks.as_strided(table, (3, 3), (8, 8)),
        ),
        "transposed": (DLArray(library, (6, 4), memory=whole.memory, strides=(4, 24)), table.T),
        "offset": (DLArray(library, (2, 2), memory=whole.memory, strides=(24, 4), offset=8), table[:2, 2:4]),
        "no axes": (DLArray(library, (), memory=whole.memory, offset=20), table[0, 5]),
    }
    for name, (x, want) in views.items():
        buf = fanin.InputBuffer(1, stream=s)
        buf.add(0, x, stream=s)
        buf.add(0, x, stream=s)
        assert values(buf.take()[0], s) == (2 * want).tolist(), name


def test_row_18_an_empty_tensor_may_point_anywhere(library: Library) -> None:
    x = DLArray(library, (0, 3), memory=standins.types.SimpleNamespace(address=12345))
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    assert values(buf.take()[0], s) == []


@pytest.mark.parametrize(
    ("versioned", "read_only", "written"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_rows_27_and_28_a_donated_tensor_is_written_where_it_says_that_it_may_be(
    library: Library, versioned: bool, read_only: bool, written: bool
) -> None:
    s = library.driver.stream()

    class Made(DLArray):
        pass

    Made.versioned, Made.read_only = versioned, read_only
    x, y = Made(library, (3,)).fill(s, 1), Made(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s, budget=0)
    buf.add(0, x, stream=s, donate=True)
    buf.add(0, y, stream=s)
    assert values(buf.take()[0], s) == [3, 3, 3]
    assert x.read(s) == ([3, 3, 3] if written else [1, 1, 1])


@pytest.mark.parametrize("read_only", [False, True])
def test_row_27_out_on_a_device_must_be_writable(library: Library, read_only: bool) -> None:
    s, t = library.driver.stream(), library.driver.stream()

    class Made(DLArray):
        pass

    Made.read_only = read_only
    x, out = DLArray(library, (3,)).fill(s, 2), Made(library, (3,)).fill(t, 9)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    if read_only:
        with pytest.raises(BufferError, match="read-only"):
            buf.take(t, out=[out])
    else:
        assert buf.take(t, out=[out])[0] is out
        assert out.read(t) == [4, 4, 4]


def test_row_30_without_a_deleter_the_producer_is_kept_alive_until_its_users_have_passed(library: Library) -> None:
    driver, s = library.driver, library.driver.stream()

    class Bare(Lying):
        change = staticmethod(setting("deleter", None))  # type: ignore[assignment]

    x = Bare(library, (3,)).fill(s, 1)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    address = x.address
    for offered in library.held.values():
        offered.memory = None
    del x, offered
    buf.take()
    gc.collect()
    assert address not in library.freed
    driver.synchronize()
    driver.array(np.ones(1))  # polls
    gc.collect()
    assert library.freed == [address]


@pytest.mark.parametrize("kind", [2, 13, 3])
def test_managed_memory_is_the_devices_and_pinned_memory_the_hosts(library: Library, kind: int) -> None:
    s = library.driver.stream()

    class Made(DLArray):
        device_type = kind

    if kind == 3:
        host = np.arange(3, dtype="f4")
        x = Made(library, (3,), memory=standins.types.SimpleNamespace(address=host.ctypes.data))
        assert fanin.add_n([x, x]).tolist() == [0, 2, 4]
        assert library.asked[0] == {"max_version": (1, 3)}  # the host has no streams
        return
    x = Made(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    assert values(buf.take()[0], s) == [4, 4, 4]


# The exchange table


def test_a_table_of_a_newer_major_version_is_walked_to_an_older_one(library: Library) -> None:
    make = table_array(library)
    older = standins._forever[-1][0]

    class Newer(DLArray):
        pass

    newer, Newer.__dlpack_c_exchange_api__ = standins.table_for(library, Newer, major=2, older=older)  # type: ignore[attr-defined]
    standins._forever.append(newer)
    assert table_of(Newer) is not None and table_of(make) is not None

    class Strange(DLArray):
        pass

    alone, Strange.__dlpack_c_exchange_api__ = standins.table_for(library, Strange, major=2)  # type: ignore[attr-defined]
    standins._forever.append(alone)
    assert table_of(Strange) is None
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for _ in range(2):
        buf.add(0, Strange(library, (3,)).fill(s, 1), stream=s)  # by DLPack then
    assert values(buf.take()[0], s) == [2, 2, 2] and len(library.asked) == 2


def test_a_table_that_refuses_to_allocate_leaves_the_sum_to_us(library: Library) -> None:
    make = table_array(library, refuses=True)
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for _ in range(2):
        buf.add(0, make(library, (3,)).fill(s, 1), stream=s)
    [total] = buf.take()
    assert type(total) is make and library.allocated == 0
    assert values(total, s) == [2, 2, 2]


@pytest.mark.parametrize(
    "lie", ["give", "look", "no memory", "elsewhere", "another dtype", "another shape", "other strides", "current"]
)
def test_an_allocator_that_fails_half_way_or_lies_leaves_the_sum_to_us(library: Library, lie: str) -> None:
    make = table_array(library)
    table = standins._forever[-1][0]
    kept: list[Any] = [dict(table._objects)]  # its functions live as long as it has them
    look: Any = standins.LOOK(standins.ctypes.cast(table.look, standins.c_void_p).value)
    asked: list[int] = []

    def give(managed: int, out: Any) -> int:
        Deleter(standins.Versioned.from_address(managed).deleter)(managed)  # it had it, errors too
        return -1

    def lying(x: int, out: Any) -> int:
        asked.append(x)
        if lie == "look" or look(x, out):
            return -1
        t = out[0]
        if lie == "no memory":
            t.data = None
        elif lie == "elsewhere":
            t.device_id = 1
        elif lie == "another dtype":
            t.bits = 64
        elif lie == "another shape":
            (standins.ctypes.c_int64 * 1).from_address(t.shape)[0] = 2
        elif lie == "other strides":
            (standins.ctypes.c_int64 * 1).from_address(t.strides)[0] = 2
        return 0

    if lie == "give":
        table.give = standins.GIVE(give)
    elif lie == "current":
        table.current = standins.CURRENT(lambda kind, index, out: -1)
    else:
        table.look = standins.LOOK(lying)
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    terms = [make(library, (3,)).fill(s, v) for v in (1, 2)]
    freed = len(library.freed)
    with fanin.stream(s):
        for x in terms:
            buf.add(0, x)
        [total] = buf.take()
    assert lie in ("give", "current") or asked
    gc.collect()
    assert len(library.freed) - freed == library.allocated, "what it gave and we could not use went back"
    assert values(total, s) == [3, 3, 3]
    del buf, total, terms, x, kept
    library.driver.synchronize()
    library.driver.array(np.zeros(1))  # looks at what left
    gc.collect()
    assert not library.held


# __cuda_array_interface__


def test_rows_39_and_40_a_raw_address_is_believed_only_where_that_was_said(library: Library) -> None:
    s = library.driver.stream()
    x = InterfaceArray(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    with pytest.raises(TypeError, match=r"has no \+"):
        buf.add(0, x, stream=s)
    with fanin.set_options(raw_addresses=True):
        buf.add(0, x, stream=s)
        buf.add(0, x, stream=s)
    assert values(buf.take()[0], s) == [4, 4, 4]
    with pytest.raises(TypeError):
        buf.add(0, x, stream=s)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"mask": object()}, BufferError, "mask, which would be lost"),
        ({"version": 3, "data": (None, False)}, ValueError, "address NULL"),
        ({"data": 7}, TypeError, r"expected \(address, read-only\)"),
        ({"data": ("7", False)}, TypeError, "has address '7'"),
        ({"data": (0x100, False)}, BufferError, "0x100, where no CUDA device has memory"),
        ({"shape": 3}, TypeError, "expected tuples"),
        ({"shape": (True,)}, TypeError, "has extent True"),
        ({"shape": (-1,)}, ValueError, "has extent -1"),
        ({"shape": (2**63,)}, ValueError, "64 bits|fit"),
        ({"shape": (3,) * 65, "strides": None}, ValueError, "64"),
        ({"shape": (2**40, 2**40), "strides": None}, ValueError, "."),
        ({"strides": (4, 4)}, ValueError, "1 axes and 2 strides"),
        ({"strides": (2**62,)}, ValueError, "."),
        ({"strides": (2,)}, BufferError, "not aligned"),
        ({"typestr": "what"}, TypeError, "expected one like '<f4'"),
        ({"typestr": "i4,("}, TypeError, "expected one like '<f4'"),  # np.dtype says SyntaxError
        ({"typestr": None}, TypeError, "has typestr None; expected one like '<f4'"),  # which np.dtype takes for float64
        ({"typestr": float}, TypeError, "expected one like '<f4'"),
        ({"strides": (2**63,)}, ValueError, r"strides \(9223372036854775808,\): a number does not fit 64 bits"),
        ({"typestr": ">f4"}, BufferError, "foreign byte order"),
        ({"typestr": "<M8[s]"}, ValueError, "datetime64"),
        ({"stream": 0}, ValueError, "has stream 0"),
        ({"stream": -5}, ValueError, "has stream -5"),
        ({"stream": True}, TypeError, "has stream True"),
        ({"stream": 0x1234560}, fanin.DeviceError, "INVALID_HANDLE"),
    ],
)
def test_rows_39_41_and_44_an_interface_that_cannot_be_is_refused(
    library: Library, changed: Any, error: type[Exception], words: str
) -> None:
    x = InterfaceArray(library, (3,))
    x.changed = changed
    buf = fanin.InputBuffer(1)
    with fanin.set_options(raw_addresses=True), pytest.raises(error, match=words):
        buf.add(0, x, stream=library.driver.stream())
    assert buf.take() == [None]


def test_an_interfaces_stream_is_waited_for(library: Library) -> None:
    p, q, c = (library.driver.stream() for _ in range(3))
    buf = fanin.InputBuffer(1, stream=c)
    with fanin.set_options(raw_addresses=True):
        for s in (p, q):
            x = InterfaceArray(library, (3,)).fill(s, 1)
            x.ready = s.handle
            buf.add(0, x, stream=c)  # ready on c only once c has waited
    assert values(buf.take()[0], c) == [2, 2, 2]


def test_an_interface_that_is_read_only_is_not_written(library: Library) -> None:
    s = library.driver.stream()
    x = InterfaceArray(library, (3,)).fill(s, 1)
    x.changed = {"data": (x.address, True)}
    with fanin.set_options(raw_addresses=True):
        buf = fanin.InputBuffer(1, stream=s, budget=0)
        buf.add(0, x, stream=s, donate=True)
        buf.add(0, x, stream=s)
        assert values(buf.take()[0], s) == [2, 2, 2]
        assert x.read(s) == [1, 1, 1]
        with pytest.raises(BufferError, match="read-only"):
            buf.take(out=[x])


def test_an_address_tells_its_device(library: Library) -> None:
    t = library.driver.stream(1)
    x = InterfaceArray(library, (3,), device=1).fill(t, 1)
    buf = fanin.InputBuffer(1, stream=t)
    with fanin.set_options(raw_addresses=True):
        buf.add(0, x, stream=t)
        buf.add(0, x, stream=t)
    [total] = buf.take()
    assert total.device == "cuda:1" and values(total, t) == [2, 2, 2]


# Lifetime


@pytest.mark.parametrize("name", EVERY)
def test_memory_of_a_library_is_let_go_only_when_all_that_used_it_has_run(name: str, library: Library) -> None:
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


@pytest.mark.parametrize("name", ["dlpack", "table", "cupy", "numba"])
def test_what_is_handed_through_keeps_its_memory_until_its_consumer_has_used_it(name: str, library: Library) -> None:
    """A14: the very object comes back, and its library knows nothing of the consumer's stream: a second hold is
    kept.
    """
    driver = library.driver
    c, p = driver.stream(), driver.stream()
    with like(name, library) as make:
        x = make(library, (3,)).fill(p, 5)
        buf = fanin.InputBuffer(1, stream=c)
        buf.add(0, x, stream=p)
        [same] = buf.take()
        assert same is x
        driver.synchronize()
        driver.array(np.ones(1))  # polls: what the buffer had is gone
        seen: list[Any] = []
        driver.launch(c, lambda v: seen.append(v.tolist()), reads=[x])
        address = x.address
        del x, same
        gc.collect()
        assert address not in library.freed
        driver.synchronize()
        driver.array(np.ones(1))  # polls
        gc.collect()
        assert seen == [[5, 5, 5]] and library.freed == [address]


@pytest.mark.parametrize("name", ["torch", "torch without a table"])
def test_torch_is_told_of_every_stream_before_a_tensor_leaves(name: str, library: Library) -> None:
    driver = library.driver
    c, p = driver.stream(), driver.stream()
    with like(name, library) as make:
        x = make(library, (3,)).fill(p, 5)
        buf = fanin.InputBuffer(1, stream=c)
        buf.add(0, x, stream=p)
        assert buf.take()[0] is x
        assert library.recorded == [(x.address, c.handle)]
        library.recorded.clear()
        legacy = fanin.Stream("cuda:0", 1)
        buf.add(0, x, stream=p)
        p.synchronize()
        assert buf.take(legacy)[0] is x
        assert (x.address, 0) in library.recorded  # torch's own number of the legacy default stream


def test_the_parts_of_an_object_are_told_too(library: Library) -> None:
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
        buf = fanin.InputBuffer(2, stream=c)
        buf.add(0, pair, stream=p)
        buf.add(1, sparse, stream=p)
        assert buf.take() == [pair, sparse]
        assert library.recorded == [(x.address, c.handle) for x in (*pair.parts, sparse.parts[1])]


# Sums, out


@pytest.mark.parametrize("name", ["table", "torch"])
def test_sums_are_allocated_by_the_library_that_offers_it(name: str, library: Library) -> None:
    driver = library.driver
    a, s = driver.stream(), driver.stream()
    with like(name, library) as make, library.on(a):  # its allocator's stream is not the sum's
        buf = fanin.InputBuffer(1, stream=s)
        for value in (1, 2):
            buf.add(0, make(library, (2, 3)).fill(s, value), stream=s)
        live = driver.live()
        [total] = buf.take()
        assert type(total) is make and library.allocated == 1
        assert driver.live() == live + 1  # its own block, and none of ours
        if name == "torch":
            assert (total.address, s.handle) in library.recorded
        assert values(total, s) == [[3, 3, 3]] * 2


def test_what_an_allocator_gives_is_written_behind_its_own_stream(library: Library) -> None:
    """A caching allocator gives memory that its own stream may still read."""
    driver = library.driver
    a, s = driver.stream(), driver.stream()
    make = table_array(library)
    reused = make(library, (3,))
    taken = make.__init__

    def again(
        self: Any,
        lib: Any,
        shape: Any,
        dtype: Any = np.float32,
        device: int = 0,
        memory: Any = None,
        *rest: Any,
        **how: Any,
    ) -> None:
        taken(self, lib, shape, dtype, device, memory or reused.memory, *rest, **how)

    g = [make(library, (3,)).fill(s, value) for value in (1, 2)]
    old: list[Any] = []
    driver.launch(a, lambda v: v.fill(7), writes=[reused])
    driver.launch(a, lambda v: old.append(v.tolist()), reads=[reused])
    make.__init__ = again  # type: ignore[method-assign]
    with library.on(a):
        buf = fanin.InputBuffer(1, stream=s)
        for x in g:
            buf.add(0, x, stream=s)
        [total] = buf.take()
    assert values(total, s) == [3, 3, 3] and old == [[7, 7, 7]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dlpack", "Array"),
        ("table", "TableArray"),
        ("torch without a table", "Tensor"),
        ("cupy", "ndarray"),
        ("numba", "DeviceNDArray"),
    ],
)
def test_sums_come_back_in_the_library_of_what_came_in(name: str, kind: str, library: Library) -> None:
    s = library.driver.stream()
    with like(name, library) as make, library.on(s):
        buf = fanin.InputBuffer(1, stream=s)
        for value in (1, 2):
            x = make(library, (2, 2)).fill(s, value)
            ready_on(x, s)
            buf.add(0, x, stream=s)
        [total] = buf.take()
        assert type(total).__name__ == kind
        assert values(total, s) == [[3, 3], [3, 3]]
        del total, x
        gc.collect()


def test_a_layout_that_an_allocator_does_not_make_is_kept_all_the_same(library: Library) -> None:
    make = table_array(library)
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s)
    for value in (1, 2):
        x = make(library, (2, 3)).fill(s, value)
        buf.add(0, make(library, (3, 2), memory=x.memory, strides=(4, 12)), stream=s)
    [total] = buf.take()
    assert type(total) is make and total.strides == (4, 12) and library.allocated == 0
    assert values(total, s) == [[3, 3]] * 3


# fanin's own arrays, out


def test_row_44_our_array_makes_the_consumers_stream_wait(driver: FakeDriver) -> None:
    """Each integer of the protocol; -1 asks for no waiting, and then there is a race unless somebody else waits."""
    library = Library(driver)
    p, q = driver.stream(), driver.stream()
    x = driver.empty((3,), np.float32)
    for stream, on in (
        (q.handle, q),
        (None, fanin.Stream("cuda:0", 1)),
        (1, fanin.Stream("cuda:0", 1)),
        (2, fanin.Stream("cuda:0", 2)),
    ):
        driver.launch(p, lambda v: v.fill(3), writes=[x])
        y = adopt(library, DLArray, x.__dlpack__(stream=stream, max_version=(1, 3)))
        assert y.read(on) == [3, 3, 3]
        assert on in x.users
        p.wait(on)
        del y
    calls = driver.calls("StreamWaitEvent"), driver.calls("EventRecord")
    adopt(library, DLArray, x.__dlpack__(stream=-1))
    assert (driver.calls("StreamWaitEvent"), driver.calls("EventRecord")) == calls


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (0, ValueError),
        (-2, ValueError),
        (2**64, ValueError),
        (True, TypeError),
        ("1", TypeError),
        (1.0, TypeError),
        (0x1234560, fanin.DeviceError),
    ],
)
def test_row_44_what_is_no_stream_of_the_protocol_is_refused(
    driver: FakeDriver, stream: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        driver.array(np.ones(3)).__dlpack__(stream=stream)


def test_row_45_a_stream_of_another_device_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="not of cuda:0"):
        driver.array(np.ones(3)).__dlpack__(stream=driver.stream(1).handle)


def test_our_array_says_its_device_and_its_version(driver: FakeDriver) -> None:
    for index in range(2):
        x = driver.array(np.ones((2, 3), "f4"), index)
        assert x.__dlpack_device__() == (2, index)
        for version, name in (
            ((1, 3), b"dltensor_versioned"),
            ((1, 0), b"dltensor_versioned"),
            ((0, 8), b"dltensor"),
            (None, b"dltensor"),
        ):
            capsule = x.__dlpack__(stream=-1, max_version=version)
            assert get_name(capsule) == name
            struct = standins.Versioned if name.endswith(b"versioned") else standins.Legacy
            t = struct.from_address(get_pointer(capsule, name)).tensor
            assert (t.device_type, t.device_id, t.data, t.ndim, t.code, t.bits) == (2, index, x.address, 2, 2, 32)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_every_dtype_goes_out_and_comes_in_as_itself(driver: FakeDriver, dtype: str) -> None:
    d = np.dtype(getattr(ml_dtypes, dtype, dtype))
    s = driver.stream()
    x = driver.array(np.arange(6).astype(d).reshape(2, 3))

    class Through:
        """Only DLPack is left of it."""

        def __dlpack_device__(self) -> Any:
            return x.__dlpack_device__()

        def __dlpack__(self, **how: Any) -> Any:
            return x.__dlpack__(**how)

        __add__ = None

    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, Through(), stream=s)
    buf.add(0, Through(), stream=s)
    with fanin.stream(s):
        got = buf.take()[0].numpy()
        alone = x.numpy()
    assert got.dtype == d and got.tobytes() == fanin.add_n([alone, alone]).tobytes()


def test_a_copy_goes_out_as_one_and_the_host_gets_one(driver: FakeDriver) -> None:
    p, q = driver.stream(), driver.stream()
    x = driver.empty((3,), np.float32)
    driver.launch(p, lambda v: v.fill(3), writes=[x])
    library = Library(driver)
    capsule = x.__dlpack__(stream=q.handle, max_version=(1, 3), copy=True)
    managed = standins.Versioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
    assert managed.flags == 2 and managed.tensor.data != x.address
    y = adopt(library, DLArray, capsule)
    assert y.read(q) == [3, 3, 3]
    with fanin.stream(q):
        host = np.from_dlpack(Offer(x, dl_device=(1, 0), max_version=(1, 3)))
    assert host.tolist() == [3, 3, 3]
    for how, error in (
        ({"dl_device": (1, 0), "copy": False}, BufferError),
        ({"dl_device": (1, 0), "stream": 1}, ValueError),
        ({"dl_device": (2, 1)}, BufferError),
        ({"dl_device": (10, 0)}, BufferError),
        ({"dl_device": "cpu"}, TypeError),
        ({"max_version": 1}, TypeError),
        ({"max_version": (1,)}, TypeError),
        ({"max_version": (2**70, 0)}, TypeError),
        ({"max_version": ("1", 0)}, TypeError),
        ({"dl_device": (2,)}, TypeError),
    ):
        with pytest.raises(error) as refused:
            x.__dlpack__(**how)  # type: ignore[arg-type]
        assert error is not TypeError or re.search(
            r"expected (max_version=\(major, minor\)|dl_device=\(type, id\)), got", str(refused.value)
        )


class Offer:
    def __init__(self, x: Any, **how: Any) -> None:
        self.x, self.how = x, how

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **asked: Any) -> Any:
        return self.x.__dlpack__(**self.how)


def test_row_27_a_view_that_repeats_itself_goes_out_read_only(driver: FakeDriver) -> None:
    x = driver.array(np.ones(3, "f4")).broadcast_to(2, 3)
    capsule = x.__dlpack__(stream=-1, max_version=(1, 0))
    assert standins.Versioned.from_address(get_pointer(capsule, b"dltensor_versioned")).flags == 1
    assert x.__cuda_array_interface__["data"][1] is True
    for how in ({}, {"copy": False}, {"max_version": (0, 8)}):
        with pytest.raises(
            BufferError, match=r"read-only, which an unversioned capsule cannot say; ask with max_version=\(1, 0\)"
        ):
            x.__dlpack__(stream=-1, **how)
    assert get_pointer(x.__dlpack__(stream=-1, copy=True), b"dltensor")


def test_rows_34_and_36_our_memory_goes_back_when_the_consumer_lets_go_and_its_stream_has_passed(
    driver: FakeDriver,
) -> None:
    q = driver.stream()
    library = Library(driver)
    gc.collect()
    live = driver.live()
    x = driver.array(np.ones(1000, "f4"))
    unused = x.__dlpack__(stream=-1)
    y = adopt(library, DLArray, x.__dlpack__(stream=q.handle))
    seen: list[Any] = []
    driver.launch(q, lambda v: seen.append(v.sum()), reads=[y])
    del x
    gc.collect()
    assert driver.live() == live + 1
    del unused
    del y
    gc.collect()
    assert driver.live() == live + 1  # q has not run
    driver.synchronize()
    driver.array(np.ones(1))  # polls
    assert driver.live() == live and seen == [1000]


def test_row_34_our_deleter_may_be_called_on_a_thread_without_python(driver: FakeDriver) -> None:
    import ctypes
    import threading

    live = driver.live()
    capsule = driver.array(np.ones(10, "f4")).__dlpack__(stream=-1)
    at = get_pointer(capsule, b"dltensor")
    set_name(capsule, b"used_dltensor")
    plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # which lets go of the GIL
    deleter = plain(standins.Legacy.from_address(at).deleter)
    other = threading.Thread(target=deleter, args=(at,))
    other.start()
    other.join()
    driver.array(np.ones(1))
    assert driver.live() == live


def test_our_array_has_version_3_of_the_interface(driver: FakeDriver) -> None:
    p, q = driver.stream(), driver.stream()
    x = driver.empty((2, 3), np.float32)
    driver.launch(p, lambda v: v.fill(3), writes=[x])
    with fanin.stream(q):
        said = x.T.__cuda_array_interface__
    assert said == {
        "shape": (3, 2),
        "typestr": "<f4",
        "data": (x.address, False),
        "strides": (4, 12),
        "version": 3,
        "stream": q.handle,
    }
    assert q in x.users
    library = Library(driver)
    memory = standins.types.SimpleNamespace(address=said["data"][0])
    assert DLArray(library, (3, 2), memory=memory, strides=said["strides"]).read(q) == [[3, 3]] * 3  # q waits for p
    assert x.__cuda_array_interface__["stream"] == 1  # never 0


def test_what_the_interface_cannot_name_has_none(driver: FakeDriver) -> None:
    x = driver.array(np.ones(3, ml_dtypes.bfloat16))
    assert not hasattr(x, "__cuda_array_interface__")
    with Machine() as m:
        y = m.array(np.ones(3))
        assert not hasattr(y, "__cuda_array_interface__")
        for ask in (y.__dlpack__, y.__dlpack_device__):
            with pytest.raises(BufferError, match="sim:0, which no other library knows"):
                ask()


def test_row_47_a_sum_that_was_handed_out_is_not_written_by_the_next_pass(library: Library) -> None:
    s = library.driver.stream()
    buf = fanin.InputBuffer(1, stream=s, budget=0)
    for _ in range(2):
        buf.add(0, library.driver.array(np.ones(3, "f4")), stream=s)
    [first] = buf.take()
    kept = adopt(library, DLArray, first.__dlpack__(stream=s.handle))
    for _ in range(3):
        buf.add(0, library.driver.array(np.ones(3, "f4")), stream=s)
    assert values(buf.take()[0], s) == [3, 3, 3]
    assert kept.read(s) == [2, 2, 2]


# torch, as far as it is asked


def test_a_tensor_whose_memory_is_not_its_value_is_resolved_on_torchs_stream_and_waited_for(library: Library) -> None:
    driver = library.driver
    p, c = driver.stream(), driver.stream()
    with torch_like(library, table=True) as make:

        def resolved(x: Any) -> Any:
            return make(library, x.shape).fill(p, -1)  # torch's work, on its current stream

        buf = fanin.InputBuffer(1, stream=c)
        for _ in range(2):
            x = make(library, (3,)).fill(p, 1)
            x.conjugated = resolved
            with library.on(p):
                buf.add(0, x, stream=c)
        with library.on(p):
            assert values(buf.take()[0], c) == [-2, -2, -2]


def test_a_tensor_on_a_device_that_is_neither_is_refused(library: Library) -> None:
    with torch_like(library, table=True) as make:

        class Elsewhere:
            type, index = "xpu", 0

            def __str__(self) -> str:
                return "xpu:0"

        make.device, make.device_type = Elsewhere(), 14
        with pytest.raises(BufferError, match="on xpu:0; expected memory of the host or of a CUDA device"):
            fanin.InputBuffer(1).add(0, make(library, (3,)))


@pytest.mark.parametrize("name", ["torch", "cupy", "numba"])
def test_a_sum_that_its_library_does_not_take_is_not_lost(name: str, library: Library) -> None:
    s = library.driver.stream()
    with like(name, library) as make, pytest.MonkeyPatch.context() as patch:

        def refuses(*args: Any, **how: Any) -> Any:
            raise AssertionError("not today")

        _core.table_known(None, TORCH)
        x = [make(library, (3,)).fill(s, value) for value in (1, 2)]
        made = export.kind_of_library(x[0]) if name != "torch" else TORCH
        kinds = list(export.KINDS)
        kinds[made - _core.FROM_FOREIGN] = export.Kind(name, refuses, refuses)
        patch.setattr(export, "KINDS", kinds)
        buf = fanin.InputBuffer(1, stream=s)
        for g in x:
            buf.add(0, g, stream=s)
        [total] = buf.take()
        assert type(total) is _core.Array and values(total, s) == [3, 3, 3]


def test_a_torch_tensor_whose_allocator_cannot_be_told_is_handed_out_and_the_failure_shown(library: Library) -> None:
    c, p = library.driver.stream(), library.driver.stream()
    shown: list[Any] = []
    with torch_like(library, table=True) as make, pytest.MonkeyPatch.context() as patch:
        x = make(library, (3,)).fill(p, 5)
        buf = fanin.InputBuffer(1, stream=c)
        buf.add(0, x, stream=p)
        patch.setattr(make, "record_stream", lambda self, s: 1 / 0)
        patch.setattr("sys.unraisablehook", lambda what: shown.append(what.exc_type))
        assert buf.take()[0] is x
    assert shown == [ZeroDivisionError]


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


@pytest.mark.parametrize(("code", "step"), [(701, 1), (2, 3)], ids=["rejected", "no memory"])
def test_every_driver_call_of_an_exchange_failed_once_gives_back_every_tensor_once(code: int, step: int) -> None:
    """One code for every call, the other for every third."""
    outcomes: dict[str, int] = {}
    library = Library(FakeDriver(1))
    make = table_array(library)
    made: list[int] = []
    assert (
        one_pass(library, make, lambda driver: made.append(driver.calls()), lambda: made.append(library.driver.calls()))
        == "done"
    )
    for at in range(0, made[1] - made[0], step):
        came = one_pass(library, make, lambda driver, at=at: driver.fail(at, code), lambda: None)
        outcomes[came] = outcomes.get(came, 0) + 1
    print(f"driver calls failed once each: {sum(outcomes.values())} of {made[1] - made[0]}: {outcomes}")
    assert (
        sum(outcomes.values()) * step > 300
        and min(outcomes.get(k, 0) for k in ("made", "added", "taken", "offered", "done")) > 0
    ), outcomes


def test_every_host_allocation_of_an_exchange_failed_once_gives_back_every_tensor_once() -> None:
    outcomes: dict[str, int] = {}
    gc.collect()
    baseline = hooks.memory()[0]
    tries = quiet = 0
    library = Library(FakeDriver(1))
    make = table_array(library)
    while quiet < 10 and tries < 400:
        came = one_pass(library, make, lambda driver, at=tries: hooks.fail_at(at, 1), lambda: hooks.fail_at(-1, 0))
        outcomes[came] = outcomes.get(came, 0) + 1
        quiet = quiet + 1 if came == "done" else 0
        tries += 1
    gc.collect()
    print(f"host allocations failed once each: {tries - quiet}: {outcomes}")
    assert hooks.memory()[0] == baseline
    assert (
        quiet == 10
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
    library.driver.array(np.ones(1))  # polls: what the buffer had is gone
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
def test_a_guard_that_is_left_out_is_found(scenario: Any, name: str | None, fault: Any, planted: bool) -> None:
    driver = FakeDriver(1)
    found = False
    with use_driver(driver), pytest.MonkeyPatch.context() as patch:
        if planted and name is not None:
            for module in (arrays, describe, dlpack, streams):  # wherever it is known
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
