"""Sums and arrays of ours that go out to GPU libraries, on the fake driver."""

from __future__ import annotations

import gc
import re
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin import _core
from fanin._interop import arrays
from fanin._interop.classes import TORCH
from fanin.sim import Machine
from kit import standins
from kit.exchange_cuda import like, ready_on, torch_like, values
from kit.hostile import get_name, get_pointer, set_name
from kit.standins import DLArray, Library, adopt, table_array

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", ["table", "torch"])
def test_sums_are_allocated_by_the_library_that_offers_it(name: str, library: Library) -> None:
    driver = library.driver
    a, s = driver.stream(), driver.stream()
    with like(name, library) as make, library.on(a):  # its allocator's stream is not the sum's
        buf = fanin.InputBuffer(1, stream=sys.modules["torch"].cuda.Stream(s.handle) if name == "torch" else s)
        for value in (1, 2):
            buf.add(0, make(library, (2, 3)).fill(s, value), stream=s)
        live = driver.live()
        [total] = buf.take()
        assert type(total) is make and library.allocated == 1
        assert driver.live() == live + 1  # its own block, and none of ours
        assert library.allocated_on == [s.handle if name == "torch" else a.handle]
        assert values(total, s) == [[3, 3, 3]] * 2


def test_a_sum_on_a_stream_of_torchs_own_waits_for_nothing_that_torch_runs_elsewhere(library: Library) -> None:
    """Its allocator uses the current stream: during the call, that is the sum's."""
    driver = library.driver
    backward, s, others = driver.stream(), driver.stream(), driver.stream()
    with like("torch", library) as make, library.on(backward):
        for stream, waits in ((sys.modules["torch"].cuda.Stream(s.handle), 0), (others, 1)):
            buf = fanin.InputBuffer(1, stream=stream)
            used = s if waits == 0 else others
            for value in (1, 2):
                buf.add(0, make(library, (2, 3)).fill(used, value), stream=used)
            before = driver.calls("StreamWaitEvent")
            [total] = buf.take()
            assert driver.calls("StreamWaitEvent") == before + waits, waits
            assert library.stream() == backward.handle  # as it was
            assert values(total, used) == [[3, 3, 3]] * 2
        assert library.allocated_on == [s.handle, backward.handle] and driver.races == 0


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


def test_row_44_our_array_makes_the_consumers_stream_wait(driver: FakeDriver) -> None:
    """Each integer of the protocol; -1 requests no wait, and then there is a race unless other code waits."""
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
        versioned = {"max_version": (1, 3)} if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else {"copy": True}
        host = np.from_dlpack(Offer(x, dl_device=(1, 0), **versioned))
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
            BufferError, match=r"read-only, and an unversioned capsule has no flag for that; pass max_version=\(1, 0\)"
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


def test_row_34_the_deleter_of_an_export_may_run_on_a_thread_without_python(driver: FakeDriver) -> None:
    import ctypes
    import threading

    live = driver.live()
    capsule = driver.array(np.ones(10, "f4")).__dlpack__(stream=-1)
    at = get_pointer(capsule, b"dltensor")
    set_name(capsule, b"used_dltensor")
    plain = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # which releases the GIL
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
            with pytest.raises(BufferError, match="sim:0, which no other library supports"):
                ask()


def test_row_47_an_exported_sum_is_not_written_by_the_next_pass(library: Library) -> None:
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


def test_a_lazily_conjugated_or_negated_tensor_is_resolved_on_torchs_stream_and_waited_for(library: Library) -> None:
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
def test_a_sum_that_its_library_refuses_is_not_lost(name: str, library: Library) -> None:
    s = library.driver.stream()
    with like(name, library) as make, pytest.MonkeyPatch.context() as patch:

        def refuses(*args: Any, **how: Any) -> Any:
            raise AssertionError("not today")

        _core.table_known(None, TORCH)
        x = [make(library, (3,)).fill(s, value) for value in (1, 2)]
        made = arrays.kind_of_library(x[0]) if name != "torch" else TORCH
        kinds = list(arrays.KINDS)
        kinds[made - _core.FROM_FOREIGN] = arrays.Kind(name, refuses, refuses)
        patch.setattr(arrays, "KINDS", kinds)
        buf = fanin.InputBuffer(1, stream=s)
        for g in x:
            buf.add(0, g, stream=s)
        [total] = buf.take()
        assert type(total) is _core.Array and values(total, s) == [3, 3, 3]


def test_a_torch_tensor_is_returned_even_if_record_stream_fails_and_the_failure_is_shown(library: Library) -> None:
    c, p = library.driver.stream(), library.driver.stream()
    shown: list[Any] = []
    with torch_like(library, table=True) as make, pytest.MonkeyPatch.context() as patch:
        x = make(library, (3,)).fill(p, 5)
        buf = fanin.InputBuffer(1, stream=sys.modules["torch"].cuda.Stream(c.handle))
        buf.add(0, x, stream=p)
        patch.setattr(make, "record_stream", lambda self, s: 1 / 0)
        patch.setattr("sys.unraisablehook", lambda what: shown.append(what.exc_type))
        assert buf.take()[0] is x
    assert shown == [ZeroDivisionError]
