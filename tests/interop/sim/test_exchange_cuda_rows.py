"""Tensors and interfaces of a device that lie: the rows of the table of faults, and the exchange table."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver, use_driver
from fanin._interop.classes import table_of
from kit import standins
from kit.exchange_cuda import like, values
from kit.hostile import Deleter
from kit.sample import sizes
from kit.standins import DLArray, InterfaceArray, Library, table_array

pytestmark = pytest.mark.core


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
    assert not library.requests  # its memory was not requested


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


@pytest.mark.parametrize("versioned", [True, False])
def test_row_30_without_a_deleter_the_producer_is_kept_alive_until_its_users_have_passed(
    library: Library, versioned: bool
) -> None:
    driver, s = library.driver, library.driver.stream()

    class Bare(Lying):
        change = staticmethod(setting("deleter", None))  # type: ignore[assignment]

    Bare.versioned = versioned

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
        assert library.requests[0] == {"max_version": (1, 3)}  # the host has no streams
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
    assert values(buf.take()[0], s) == [2, 2, 2] and len(library.requests) == 2


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
    requests: list[int] = []

    def give(managed: int, out: Any) -> int:
        Deleter(standins.Versioned.from_address(managed).deleter)(managed)  # it had it, errors too
        return -1

    def lying(x: int, out: Any) -> int:
        requests.append(x)
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
    assert lie in ("give", "current") or requests
    gc.collect()
    assert len(library.freed) - freed == library.allocated, "what it gave and we could not use went back"
    assert values(total, s) == [3, 3, 3]
    del buf, total, terms, x, kept
    library.driver.synchronize()
    library.driver.array(np.zeros(1))  # polls the released tensors
    gc.collect()
    assert not library.held


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
        ({"typestr": "i4,("}, TypeError, "expected one like '<f4'"),  # np.dtype raises SyntaxError
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


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        pytest.param("torch", False, id="torch"),
        pytest.param("table", False, id="table"),
        pytest.param("torch", True, id="ready on another stream"),
    ],
)
@pytest.mark.parametrize("n", sizes(200, 10_000))
def test_arrays_of_a_library_cost_few_driver_calls_a_flush(library: Library, kind: str, n: int, apart: bool) -> None:
    """One event for each stream and call, and no question for what cannot have passed."""
    terms = 8
    driver = library.driver
    s = driver.stream()
    p = driver.stream() if apart else s
    with like(kind, library) as made, library.on(s):
        memory = [standins.Memory(library, 16 * n, 0) for _ in range(terms + 1)]
        rows = [[made(library, (4,), np.float32, memory=m, offset=16 * i) for i in range(n)] for m in memory]
        outs = rows.pop()
        buf = fanin.InputBuffer(n, stream=s)
        before = driver.calls()
        for _ in range(terms):
            buf.add_many(range(n), rows.pop(), stream=p)
        adds, before = driver.calls() - before, driver.calls()
        with fanin.stream(s):
            buf.take(out=outs)
        flush = driver.calls() - before
        assert flush <= 64, flush
        assert adds <= terms * 16, adds
        driver.synchronize()
        assert driver.races == 0
        del rows, outs, buf


def test_what_leaves_in_one_call_goes_back_once_its_stream_has_passed(library: Library) -> None:
    driver = library.driver
    s = driver.stream()
    with like("table", library) as made, library.on(s):
        buf = fanin.InputBuffer(20, stream=s)
        outs = [made(library, (4,)) for _ in range(20)]
        for _ in range(3):
            buf.add_many(range(20), [made(library, (4,)) for _ in range(20)], stream=s)
        records = driver.calls("EventRecord")
        with fanin.stream(s):
            buf.take(out=outs)
        assert driver.calls("EventRecord") == records + 1
        waiting = len(library.held)
        assert waiting >= 60, "nothing has run"
        driver.synchronize()
        queries = driver.calls("EventQuery")
        for _ in range(4):  # each polls some of the waiting ones
            fanin.add_n([outs[0], outs[1]])
        assert len(library.held) <= waiting - 60
        assert driver.calls("EventQuery") - queries <= 12, "one for each that goes"
