"""The table of faults that the exchange was built against, row by row: which test has a row on the host and which on a
device; and the device's side of those rows that test_exchange_cuda.py has not. A test that has a row bears its number:
`test_row_5_..`, `test_rows_12_to_14_and_20_..`.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from interop.sim.test_exchange_cuda_rows import Lying, setting
from kit import standins
from kit.exchange_cuda import values
from kit.hostile import IS_COPIED, NAMES, Versioned, get_name, new_capsule
from kit.prepared import run_prepared
from kit.standins import Array, DLArray, InterfaceArray, Library
from kit.support import TESTS

pytestmark = pytest.mark.core

#: The files that have the device's side of the rows.
DEVICE = [*Path(__file__).parent.glob("test_exchange_cuda*.py"), Path(__file__)]
#: .. and the host's.
HOST = [TESTS / "interop" / "test_exchange_dlpack.py"]

#: A row: what may be wrong.
ROWS = {
    1: "no __dlpack__, or no capsule",
    2: "__dlpack__ raises",
    3: "a capsule of another name",
    4: "one capsule consumed twice",
    5: "a producer that does not know max_version",
    6: "another major version",
    7: "a struct under the other's name",
    8: "unknown flags, a newer minor version",
    9: "a garbled device, or not the tensor's",
    10: "a device that is not there",
    11: "axes below 0 or above 64, no shape",
    12: "a negative extent",
    13: "extents whose product wraps",
    14: "strides that leave the address space",
    15: "strides NULL",
    16: "negative strides",
    17: "stride 0, elements that overlap",
    18: "no elements, and an address of nowhere",
    19: "no axes",
    20: "a byte offset",
    21: "address NULL",
    22: "unaligned elements",
    23: "memory that is not aligned to 256 bytes",
    24: "an element type that is not summed",
    25: "bytes that are no bool, long double",
    26: "foreign byte order",
    27: "read-only memory",
    28: "a capsule that cannot say so",
    29: "copied, or not, against what was asked",
    30: "no deleter",
    31: "a deleter that leaves an exception",
    32: "a deleter that throws in C++",
    33: "a deleter that comes back to us",
    34: "our deleter on a thread without Python",
    35: "our deleter at the process's end",
    36: "our capsule is dropped",
    37: "the producer edits its struct afterwards",
    38: "the producer frees memory that it lent",
    39: "an interface without its fields",
    40: "a forged address",
    41: "a buffer or an interface whose extents lie",
    42: "a callback changes the buffer",
    43: "numbers whose __index__ lies",
    44: "a stream that is none of the protocol's",
    45: "a stream of another device, or destroyed",
    46: "a producer that ignores our stream",
    47: "a consumer keeps what a slot sums into",
}

#: Rows that have no test on one side, and why.
NOT_ON_THE_HOST = {
    32: "it ends the process; SECURITY.md says so",
    38: "it cannot be seen; the producer is held, and what is held is row 30's",
    44: "the host has no streams",
    45: "the host has no streams",
    46: "the host has no streams",
}
NOT_ON_A_DEVICE = {
    32: "it ends the process; SECURITY.md says so",
    38: "it cannot be seen; the producer is held, and what is held is row 30's",
}

NAMED = re.compile(r"^(?:    )?def test_(\w*?rows?_\d\w*)", re.MULTILINE)
NUMBERS = re.compile(r"rows?_((?:\d+_|to_|and_)+)")


def rows_of(name: str) -> set[int]:
    """The rows that a test's name has: "row_5_x", "rows_12_to_14_20_and_21_x", "row_15_x_and_rows_16_and_17_y"."""
    found: set[int] = set()
    for run in NUMBERS.findall(name + "_"):
        words = [word for word in run.split("_") if word]
        for i, word in enumerate(words):
            if word.isdigit():
                low = int(words[i - 2]) if i > 1 and words[i - 1] == "to" else int(word)
                found |= set(range(low, int(word) + 1))
    return found


def tried_in(*files: Path) -> set[int]:
    names = [n for f in files for n in NAMED.findall(f.read_text())]
    return set().union(*(rows_of(n) for n in names))


def test_row_numbers_are_read_from_names_of_tests() -> None:
    assert rows_of("row_5_a_producer_of_2_axes") == {5}
    assert rows_of("rows_11_to_14_20_and_21_geometry") == {11, 12, 13, 14, 20, 21}
    assert rows_of("row_15_strides_null_and_rows_16_17_and_20_any_layout") == {15, 16, 17, 20}
    assert rows_of("rows_27_to_29_a") == {27, 28, 29} and rows_of("rows_9_and_10_b") == {9, 10}
    assert rows_of("what_has_no_number") == rows_of("arrows_2_x_") - {2} == set()
    assert NAMED.findall("def test_row_3_x() -> None:\n    def test_rows_4_and_5_y(a):\ndef test_z():") == [
        "row_3_x",
        "rows_4_and_5_y",
    ]


@pytest.mark.parametrize(
    ("side", "files", "without"),
    [
        ("the host", HOST, NOT_ON_THE_HOST),
        ("a device", DEVICE, NOT_ON_A_DEVICE),
    ],
)
def test_every_row_has_a_test_or_a_reason(side: str, files: list[Path], without: dict[int, str]) -> None:
    tried = tried_in(*files)
    missing = {n: words for n, words in ROWS.items() if n not in tried and n not in without}
    assert not missing, f"no test on {side} for {missing}"
    assert not tried & set(without), f"tried on {side}, and said not to be: {tried & set(without)}"
    assert tried <= set(ROWS) and sorted(ROWS) == list(range(1, 48))


# Rows 1 to 5: the call


def refused(library: Library, x: Any, kind: type[BaseException], match: str) -> None:
    """Adding x raises, and the slot is as it was: what it held comes out."""
    s = library.driver.stream()
    one = library.driver.array(np.ones(3, "f4"))
    buf = fanin.InputBuffer(1, stream=s, name="grads")
    buf.add(0, one, key=0, stream=s)
    with pytest.raises(kind, match=match) as caught:
        buf.add(0, x, key=7, stream=s)
    if issubclass(caught.type, BufferError | ValueError | TypeError):
        assert str(caught.value).startswith("grads: slot 0, key 7: ")
    assert buf.take()[0] is one


def test_row_1_a_producer_that_returns_no_capsule_is_a_type_error(library: Library) -> None:
    class Number(DLArray):
        def __dlpack__(self, **how: Any) -> Any:
            return 42

    class Mute(Array):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    refused(library, Number(library, (3,)), TypeError, "gave an int; expected a capsule")
    refused(library, Mute(library, (3,)), TypeError, r"has no \+")


class Sentinel(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("mine"), MemoryError("mine"), Sentinel("mine")])
@pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__", "__cuda_array_interface__"])
def test_row_2_an_error_of_the_producer_reaches_the_caller_unchanged(
    library: Library, error: BaseException, where: str
) -> None:
    def boom(self: Any, **how: Any) -> Any:
        raise error

    base = InterfaceArray if where.startswith("__cuda") else DLArray
    bad = type("Bad", (base,), {where: property(boom) if base is InterfaceArray else boom})
    buf = fanin.InputBuffer(1)
    with fanin.set_options(raw_addresses=True), pytest.raises(type(error)) as caught:
        buf.add(0, bad(library, (3,)))
    assert caught.value is error
    assert buf.take() == [None] and not library.held
    error.__traceback__ = None  # pytest keeps the exception, and it the frames


@pytest.mark.parametrize("name", [None, "", "dltensor_", "used_dltensor", "used_dltensor_versioned"])
def test_row_3_a_capsule_of_another_name_is_never_read(library: Library, name: str | None) -> None:
    byte = (ctypes.c_uint8 * 1)()  # a read of it as a tensor is out of bounds

    class Other(DLArray):
        def __dlpack__(self, **how: Any) -> Any:
            called = None if name is None else NAMES.setdefault(name, name.encode())
            return new_capsule(ctypes.addressof(byte), called, None)

    words = "consumed already" if name and name.startswith("used") else "neither a 'dltensor' nor"
    refused(library, Other(library, (3,)), BufferError, words)


class Same(DLArray):
    """The same capsule at every call."""

    capsule: Any = None

    def __dlpack__(self, **how: Any) -> Any:
        self.capsule = self.capsule or super().__dlpack__(**how)
        return self.capsule


def test_row_4_the_same_capsule_is_consumed_once(library: Library) -> None:
    s = library.driver.stream()
    x = Same(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    assert get_name(x.capsule) == b"used_dltensor_versioned"
    with pytest.raises(BufferError, match="consumed already"):
        buf.add(0, x, stream=s)
    assert buf.take()[0] is x
    x.capsule = None
    del x
    gc.collect()
    library.driver.synchronize()
    library.driver.array(np.ones(1))  # polls
    assert not library.held


@pytest.mark.threads
def test_row_4_of_many_threads_one_gets_the_capsule(library: Library) -> None:
    s = library.driver.stream()
    for _ in range(10):
        x = Same(library, (3,))
        x.capsule = DLArray.__dlpack__(x, stream=-1)
        bufs = [fanin.InputBuffer(1, stream=s) for _ in range(4)]
        start, won = threading.Barrier(4), []

        def consume(buf: Any, x: Any = x, start: Any = start, won: list[Any] = won) -> None:
            start.wait()
            try:
                buf.add(0, x, stream=s)
                won.append(buf)
            except BufferError:
                pass

        threads = [threading.Thread(target=consume, args=(b,)) for b in bufs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(won) == 1
        won.clear()


# Rows 7 to 29: the fields of the struct


def test_row_7_the_name_decides_which_struct_it_is(library: Library) -> None:
    """Read by the wrong struct, the numbers are nonsense: they must be found to be so. The deleter's place holds no
    address, so it is made NULL.
    """

    class Wrong(DLArray):
        def __dlpack__(self, **how: Any) -> Any:
            offered = standins.Offered(self, versioned=self.versioned)
            raw = (ctypes.c_uint8 * 128)()
            ctypes.memmove(raw, ctypes.addressof(offered.managed), ctypes.sizeof(offered.managed))
            ctypes.memset(ctypes.addressof(raw) + (56 if self.versioned else 16), 0, 8)
            self.sent, self.raw = offered, raw
            name = b"dltensor" if self.versioned else b"dltensor_versioned"
            return new_capsule(ctypes.addressof(raw), NAMES.setdefault(name.decode(), name), None)

    for versioned in (True, False):
        x = Wrong(library, (3,))
        x.versioned = versioned
        refused(library, x, BufferError, "device|version|bits")
        assert x.sent.deleted == 0
        library.held.clear()


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (setting("flags", 0xFFFF_FFFF_FFFF_FFF0), 8),
        (setting("minor", 99), 8),
        (setting("tensor.shape", None), 19),
    ],
)
def test_rows_8_and_19_unusual_but_valid_tensors_are_read(library: Library, change: Any, row: int) -> None:
    s = library.driver.stream()

    class This(Lying):
        pass

    def both(managed: Any) -> None:
        change(managed)
        if row == 19:
            managed.tensor.strides = None

    This.change = staticmethod(both)  # type: ignore[method-assign]
    x = This(library, () if row == 19 else (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    for _ in range(2):
        buf.add(0, x, stream=s)
    assert values(buf.take()[0], s) == (4 if row == 19 else [4, 4, 4])


@pytest.mark.parametrize("offset", [4, 60, 252])
@pytest.mark.parametrize("make", [DLArray, InterfaceArray])
def test_row_23_memory_need_be_aligned_to_its_elements_alone(library: Library, make: Any, offset: int) -> None:
    s = library.driver.stream()
    memory = standins.Memory(library, 512, 0)
    assert memory.address % 256 == 0
    x = make(library, (33,), memory=memory, offset=offset).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    with fanin.set_options(raw_addresses=True):
        for _ in range(2):
            buf.add(0, x, stream=s)
    assert values(buf.take()[0], s) == [4] * 33


@pytest.mark.parametrize("make", [DLArray, InterfaceArray])
def test_row_25_a_bool_is_whether_its_byte_is_zero(library: Library, make: Any) -> None:
    s = library.driver.stream()
    x, zero = make(library, (4,), "?"), make(library, (4,), "?")
    library.driver.launch(s, lambda v: np.copyto(v.view("u1"), np.array([0, 1, 2, 255], "u1")), writes=[x])
    zero.fill(s, False)
    buf = fanin.InputBuffer(1, stream=s)
    with fanin.set_options(raw_addresses=True):
        buf.add(0, x, stream=s)
        buf.add(0, zero, stream=s)
    [total] = buf.take()
    seen: list[Any] = []
    library.driver.launch(s, lambda v: seen.append(v.view("u1").tolist()), reads=[total])
    library.driver.synchronize()
    assert seen == [[0, 1, 1, 1]]


def test_row_25_long_double_is_refused_by_name(library: Library) -> None:
    class This(Lying):
        change = staticmethod(setting("tensor.bits", 128))  # type: ignore[assignment]

    x = This(library, (3,))
    refused(library, x, BufferError, "type code 2 with 128 bits")
    assert x.sent.deleted == 1
    y = InterfaceArray(library, (3,))
    y.changed = {"typestr": "<f16"}
    with fanin.set_options(raw_addresses=True):
        refused(library, y, BufferError, "a longdouble, which is not summed")


@pytest.mark.parametrize("typestr", [">f4", ">i4", ">c8"])
def test_row_26_foreign_byte_order_is_refused(library: Library, typestr: str) -> None:
    """Only the interface can express it."""
    x = InterfaceArray(library, (3,), "c8")
    x.changed = {"typestr": typestr}
    with fanin.set_options(raw_addresses=True):
        refused(library, x, BufferError, "foreign byte order")


def test_row_29_a_donated_tensor_flagged_as_copied_is_not_written_and_copy_copies(library: Library) -> None:
    s = library.driver.stream()

    class This(Lying):
        change = staticmethod(setting("flags", IS_COPIED))  # type: ignore[assignment]

    x, y = This(library, (3,)).fill(s, 1), DLArray(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s, budget=0)
    buf.add(0, x, stream=s, donate=True)
    buf.add(0, y, stream=s)
    assert values(buf.take()[0], s) == [3, 3, 3] and x.read(s) == [1, 1, 1]
    buf.add(0, y, stream=s, copy=True)
    y.fill(s, 100)  # its producer still writes it
    [own] = buf.take()
    assert own is not y and values(own, s) == [2, 2, 2]


# Rows 31 to 43: callbacks that misbehave


def test_row_31_an_exception_that_a_deleter_leaves_goes_to_the_hook(library: Library) -> None:
    leaves = ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p).value
    s = library.driver.stream()

    class This(Lying):
        change = staticmethod(setting("deleter", leaves))  # type: ignore[assignment]

    seen: list[Any] = []
    old, sys.unraisablehook = sys.unraisablehook, seen.append
    try:
        x = This(library, (3,)).fill(s, 1)
        buf = fanin.InputBuffer(1, stream=s)
        buf.add(0, x, stream=s)
        buf.add(0, x, stream=s)
        assert values(buf.take()[0], s) == [2, 2, 2]
        gc.collect()
        library.driver.array(np.ones(1))  # polls, and raises nothing
    finally:
        sys.unraisablehook = old
    assert [u.exc_type for u in seen] == [MemoryError, MemoryError]
    seen.clear()  # the collector does not traverse a preallocated MemoryError
    library.held.clear()


@pytest.mark.parametrize("how", ["add", "clear", "drop"])
def test_row_33_a_deleter_may_use_the_buffer_and_drop_the_last_reference_to_it(library: Library, how: str) -> None:
    """It is called late, by the call that finds all work on the memory done."""
    s = library.driver.stream()
    buf: Any = fanin.InputBuffer(1, stream=s)
    mine = [buf]
    calls: list[str] = []

    class Meddler(DLArray):
        def __dlpack__(self, **how: Any) -> Any:
            offered = standins.Offered(self)
            plain = offered._delete

            def delete(pointer: int | None) -> None:
                plain(pointer)
                meddle()

            offered.callback = standins.Deleter(delete)
            offered.managed.deleter = ctypes.cast(offered.callback, ctypes.c_void_p)
            kept.append(offered.callback)
            return offered.capsule()

    kept: list[Any] = []

    def meddle() -> None:
        calls.append(how)
        them = mine.pop() if mine else None
        if how == "add" and them is not None:
            them.add(0, other, stream=s)
        elif how == "clear" and them is not None:
            them.clear()

    other = library.driver.array(np.full(3, 5, "f4"))
    x = Meddler(library, (3,)).fill(s, 1)
    buf.add(0, x, stream=s)
    buf.add(0, x, stream=s)
    first = buf.take()[0]
    if how == "drop":
        del buf
    del x
    gc.collect()
    library.driver.synchronize()
    library.driver.array(np.ones(1))  # polls
    assert calls == [how, how] and not library.held
    assert values(first, s) == [2, 2, 2]
    if how == "add":
        assert values(buf.take()[0], s) == [5, 5, 5]


def test_row_35_tensors_referenced_at_exit_are_not_deleted() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
import fanin, numpy as np
from fake_cuda import FakeDriver, use_driver
from kit.standins import DLArray, Library
driver = FakeDriver(1)
used = use_driver(driver); used.__enter__()
s, library = driver.stream(), Library(driver)
x = DLArray(library, (3,)).fill(s, 1)
buf = fanin.InputBuffer(1, stream=s); buf.add(0, x, stream=s); buf.add(0, x, stream=s)
driver.synchronize()  # kernels in Python end with Python
cycle = [buf]; cycle.append(cycle)
out = fanin.add_n([x, x]).__dlpack__(stream=-1)
sys.modules['kept'] = (buf, out, cycle, used)
print('end')
"""
    assert run_prepared(code).stdout == "end\n"


def test_row_37_edits_of_the_producer_after_the_hand_over_have_no_effect(library: Library) -> None:
    s = library.driver.stream()

    class Kept(Lying):
        change = staticmethod(lambda managed: None)  # type: ignore[assignment]

    x, y = Kept(library, (3,)).fill(s, 1), DLArray(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    buf.add(0, x, stream=s)
    sent: Versioned = x.sent.managed
    x.sent.shape[0], x.sent.strides[0] = 10**9, 2**60
    sent.tensor.ndim, sent.tensor.data, sent.tensor.bits, sent.tensor.device_id = 60, 8, 3, 7
    buf.add(0, y, stream=s)
    assert values(buf.take()[0], s) == [3, 3, 3]


@pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__", "__cuda_array_interface__"])
def test_row_42_a_producer_may_change_the_buffer_while_it_is_called(library: Library, where: str) -> None:
    s = library.driver.stream()
    one = library.driver.array(np.ones(3, "f4"))
    base: Any = InterfaceArray if where.startswith("__cuda") else DLArray

    def meddle(self: Any, **how: Any) -> Any:
        if not self.asked:
            self.asked = True
            buf.add(0, one, stream=s)
            assert buf.take()[0] is one
            buf.add(0, one, stream=s)
        inherited = getattr(super(made, self), where)
        return inherited(**how) if callable(inherited) else inherited

    made = type("Meddler", (base,), {where: property(meddle) if base is InterfaceArray else meddle, "asked": False})
    x = made(library, (3,)).fill(s, 2)
    buf = fanin.InputBuffer(1, stream=s)
    with fanin.set_options(raw_addresses=True):
        buf.add(0, x, stream=s)
    assert x.asked and values(buf.take()[0], s) == [3, 3, 3]


def test_row_43_numbers_are_converted_once(library: Library) -> None:
    class Lying(int):
        def __index__(self) -> int:
            return 10**6

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    s = library.driver.stream()
    x = DLArray(library, (3,)).fill(s, 1)
    x.device_type, x.device_id = Lying(2), Lying(0)
    y = InterfaceArray(library, (3,)).fill(s, 2)
    y.changed = {"shape": (Lying(3),), "strides": (Lying(4),), "stream": Lying(s.handle)}
    buf = fanin.InputBuffer(2, stream=s)
    with fanin.set_options(raw_addresses=True):
        buf.add(Lying(1), x, stream=s)
        buf.add(Lying(1), y, stream=s)
    assert values(buf.take()[1], s) == [3, 3, 3]
    x.device_type = Lying(10)
    refused(library, x, BufferError, "ROCm")


def test_a_planted_row_without_a_test_is_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROWS, 48, "nobody's")
        with pytest.raises(AssertionError, match=r"no test on a device for \{48"):
            test_every_row_has_a_test_or_a_reason("a device", DEVICE, NOT_ON_A_DEVICE)
