"""Arrays by DLPack from hostile producers: all their claims end in the right sum or in an exception, and each consumed
tensor is deleted exactly once. The numbers are rows of the table of faults that the exchange was built against.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.hostile import IS_COPIED, READ_ONLY, Deleter, Producer, Versioned, get_name, get_pointer, never, once, set_name
from kit.prepared import run_prepared

pytestmark = pytest.mark.core

ONE = np.array([10.0, 20.0, 30.0])


def refused(x: Any, kind: type[BaseException], match: str | None = None) -> None:
    """Adding x raises, and everything is as it was: the buffer, and the blocks of memory that we hold."""
    buf = fanin.InputBuffer(1, name="grads")
    buf.add(0, ONE, key=0)
    gc.collect()
    before = hooks.blocks()
    with pytest.raises(kind, match=match) as caught:
        buf.add(0, x, key=7)
    if issubclass(caught.type, BufferError | ValueError | TypeError):
        assert str(caught.value).startswith("grads: slot 0, key 7: ")
    del caught
    gc.collect()
    assert hooks.blocks() == before
    assert buf.take()[0] is ONE


def total(*arrays: Any) -> Any:
    return fanin.add_n(arrays)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    gc.collect()
    before = hooks.blocks()
    yield
    gc.collect()
    assert hooks.blocks() == before


# The checker of deleters itself


def test_a_planted_second_call_of_the_deleter_is_found() -> None:
    p = Producer()
    capsule = p.make()
    managed = Versioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
    set_name(capsule, b"used_dltensor_versioned")
    with pytest.raises(AssertionError, match="2 times"), once(p):
        Deleter(managed.deleter)(None)
        Deleter(managed.deleter)(None)


def test_a_planted_leak_of_the_tensor_is_found() -> None:
    p = Producer()
    with pytest.raises(AssertionError, match="0 times"), once(p):
        set_name(p.make(), b"used_dltensor_versioned")


# Honest producers


@pytest.mark.parametrize("versioned", [True, False])
def test_an_honest_tensor_is_summed_and_deleted_once(versioned: bool) -> None:
    p = Producer(versioned=versioned)
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]


def test_the_tensor_is_kept_until_the_take_which_returns_the_same_object() -> None:
    p = Producer()
    buf = fanin.InputBuffer(1)
    with once(p):
        buf.add(0, p)
        gc.collect()
        assert p.deleted == 0
        assert buf.take()[0] is p
    assert p.requests == [{"max_version": (1, 3)}]


DTYPES = ["bool", *(k + b for k in ("int", "uint") for b in ("8", "16", "32", "64"))]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_as_itself(dtype: str) -> None:
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    p = Producer(values)
    with once(p):
        result = total(p, np.zeros_like(values))
    assert result.dtype == values.dtype
    assert np.array_equal(result, values)


@pytest.mark.parametrize(
    ("code", "bits", "name"), [(4, 16, "bfloat16"), (10, 8, "float8_e4m3fn"), (12, 8, "float8_e5m2")]
)
def test_low_floats_arrive_by_their_own_codes(code: int, bits: int, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([0.5, 1.5, -2.0]).astype(getattr(ml_dtypes, name))
    p = Producer(values.view(f"uint{bits}"), dtype=(code, bits, 1))
    with once(p):
        result = total(p, np.zeros_like(values))
    assert result.dtype == values.dtype
    assert result.astype(float).tolist() == [0.5, 1.5, -2.0]


def test_pinned_host_memory_is_host_memory() -> None:
    p = Producer(device=(3, 0), said=(3, 0))
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]


# Rows 1-5: the call


def test_row_1_a_producer_that_returns_no_capsule_is_a_type_error() -> None:
    class Bad(Producer):
        def __dlpack__(self, **how: Any) -> Any:
            return 42

    refused(Bad(), TypeError, "gave an int; expected a capsule")


class Sentinel(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [ValueError("mine"), MemoryError("mine"), Sentinel("mine"), KeyboardInterrupt("mine")]
)
@pytest.mark.parametrize("where", ["__dlpack__", "__dlpack_device__"])
def test_row_2_an_error_of_the_producer_reaches_the_caller_unchanged(error: BaseException, where: str) -> None:
    def boom(self: Any, **how: Any) -> Any:
        raise error

    bad = type("Bad", (Producer,), {where: boom})()
    buf = fanin.InputBuffer(1)
    with pytest.raises(type(error)) as caught:
        buf.add(0, bad)
    assert caught.value is error
    assert buf.take() == [None]
    error.__traceback__ = None  # pytest keeps the exception, and it the frames


@pytest.mark.parametrize(
    "name", [None, "", "dl", "dltensor_", "dltensor_versioned2", "used_dltensor", "used_dltensor_versioned"]
)
def test_row_3_a_capsule_of_another_name_is_never_read(name: str | None) -> None:
    p = Producer()
    p.name = name
    p.managed = (ctypes.c_uint8 * 1)()  # one byte: a read of it as a tensor is out of bounds
    with never(p):
        refused(p, BufferError, "consumed already" if name and name.startswith("used") else "neither a 'dltensor' nor")


def test_row_4_the_same_capsule_is_consumed_once() -> None:
    class Same(Producer):
        def __dlpack__(self, **how: Any) -> Any:
            self.capsule = self.capsule or self.make()
            return self.capsule

    p = Same()
    with once(p):
        buf = fanin.InputBuffer(1)
        buf.add(0, p)
        assert get_name(p.capsule) == b"used_dltensor_versioned"
        with pytest.raises(BufferError, match="consumed already"):
            buf.add(0, p)
        assert buf.take()[0] is p


@pytest.mark.threads
def test_row_4_of_many_threads_one_gets_the_capsule() -> None:
    class Same(Producer):
        def __dlpack__(self, **how: Any) -> Any:
            return self.capsule

    for _ in range(50):
        p = Same()
        p.capsule = p.make()
        bufs = [fanin.InputBuffer(1) for _ in range(4)]
        start, won = threading.Barrier(4), []

        def consume(buf: Any, p: Any = p, start: Any = start, won: list[Any] = won) -> None:
            start.wait()
            try:
                buf.add(0, p)
                won.append(buf)
            except BufferError:
                pass

        with once(p):
            threads = [threading.Thread(target=consume, args=(b,)) for b in bufs]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(won) == 1
            won.clear()
            del bufs, threads


def test_row_5_a_producer_without_the_keyword_is_called_without_it() -> None:
    class Old(Producer):
        def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
            return self.make()

    p = Old(versioned=False)
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]


def test_row_5_a_type_error_from_within_is_the_producers_own() -> None:
    requests = []

    class Bad(Producer):
        def __dlpack__(self, **how: Any) -> Any:
            requests.append(how)
            return len(42)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        fanin.add_n([Bad()])
    assert len(requests) == 1


# Rows 6-10: version, flags, device


@pytest.mark.parametrize("version", [(2, 0), (0, 9), (2**32 - 1, 2**32 - 1)])
def test_row_6_of_another_major_version_only_the_prefix_is_read(version: tuple[int, int]) -> None:
    class Prefix(ctypes.Structure):
        _fields_ = Versioned._fields_[:5]

    p = Producer()
    p.managed = Prefix(*version, None, ctypes.cast(p.callback, ctypes.c_void_p), 0)
    with once(p):
        refused(p, BufferError, "version")


def test_row_7_the_name_decides_which_struct_it_is() -> None:
    p = Producer(versioned=True, name="dltensor")  # a versioned struct under the legacy name
    q = Producer(versioned=False, name="dltensor_versioned")
    # Read by the wrong struct, the numbers are nonsense: they must be found to be so. The deleter's place holds no
    # address, so it is made NULL.
    p.managed.flags = 0
    p.managed.tensor.device_type = 0
    for x in (p, q):
        raw = (ctypes.c_uint8 * 128)()
        ctypes.memmove(raw, ctypes.addressof(x.managed), ctypes.sizeof(x.managed))
        at = 56 if x is p else 16  # where the named struct has its deleter
        ctypes.memset(ctypes.addressof(raw) + at, 0, 8)
        x.managed = raw
        refused(x, BufferError)


def test_row_8_unknown_flags_and_a_newer_minor_version_are_accepted() -> None:
    p = Producer(version=(1, 99), flags=0xFFFF_FFFF_FFFF_FFF0)
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]


@pytest.mark.parametrize("said", [None, 1, (1,), (1, 0, 0), ("cpu", 0), (1.0, 0), "cpu", [1, "0"]])
def test_row_9_a_garbled_device_is_a_type_error(said: Any) -> None:
    p = Producer(said=said)
    with never(p):
        refused(p, TypeError, "expected \\(device type, device id\\)")
    assert p.requests == []


@pytest.mark.parametrize(
    ("said", "words"),
    [((2, 1), "CUDA device 1"), ((10**30, 0), "device \\(1000"), ((-1, 0), "device \\(-1"), ((10, 3), "ROCm device 3")],
)
def test_row_9_a_device_that_is_not_the_host_is_named(said: Any, words: str) -> None:
    p = Producer(said=said)
    with never(p):
        refused(p, BufferError, words)
    assert p.requests == [], "the device is asked first"


@pytest.mark.parametrize("device", [(2, 0), (3, 0), (0, 0), (-7, 0), (99, 0), (1, -1)])
def test_rows_9_and_10_the_tensors_own_device_counts(device: tuple[int, int]) -> None:
    p = Producer(device=device, said=(1, 0))
    with once(p):
        refused(p, BufferError, "device")


def test_row_9_a_device_of_int_subclasses_is_read_once() -> None:
    class Kind(enum.IntEnum):
        CPU = 1

    class Lying(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    p = Producer(said=(Kind.CPU, 0))
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]
    q = Producer(said=(Lying(2), 0))
    with never(q):
        refused(q, BufferError, "CUDA")


def test_without_a_device_method_the_tensors_own_counts() -> None:
    class Bare:
        def __init__(self, p: Producer) -> None:
            self.p = p

        def __dlpack__(self, **how: Any) -> Any:
            return self.p.make()

    p = Producer()
    with once(p):
        assert total(Bare(p), ONE).tolist() == [11, 22, 33]
    q = Producer(device=(2, 0))
    with once(q):
        refused(Bare(q), BufferError, "CUDA")


# Rows 11-24: geometry


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("how", [
    {"ndim": -1},
    {"ndim": 65, "shape": [1] * 65, "strides": [1] * 65},
    {"ndim": 2**31 - 1},
    {"shape": None},
    {"shape": [-1]},
    {"shape": [-(2**63)]},
    {"shape": [2**32, 2**32, 16], "strides": [0, 0, 0], "ndim": 3},
    {"shape": [2**62], "strides": [1]},
    {"shape": [2**63 - 1], "strides": None},
    {"shape": [2**32, 2**32, 0], "strides": None, "ndim": 3},
    {"strides": [2**60]},
    {"strides": [2**62]},
    {"strides": [-(2**63)]},
    {"shape": [3, 3], "strides": [2**59, 2**59], "ndim": 2},
    {"shape": [2**40], "strides": [2**40]},
    {"strides": [-(2**58)]},
    {"offset": 2**63},
    {"offset": 2**64 - 1},
    {"offset": 2**63 - 1, "data": 2**63},
    {"data": 2**64 - 8},
    {"data": 16, "strides": [-8]},
    {"data": None},
    {"data": 0, "offset": 64},
])  # fmt: skip
def test_rows_11_to_14_20_and_21_impossible_geometry_is_a_value_error(how: dict[str, Any], versioned: bool) -> None:
    p = Producer(versioned=versioned, **how)
    with once(p):
        refused(p, ValueError)


@pytest.mark.parametrize("version", [(1, 0), (1, 3)])
def test_row_15_strides_null_is_c_order(version: tuple[int, int]) -> None:
    values = np.arange(6.0).reshape(2, 3)
    p = Producer(values, strides=None, version=version)
    with once(p):
        assert total(p, np.zeros((2, 3))).tolist() == values.tolist()


@pytest.mark.parametrize("view", [
    lambda a: a[::-1],
    lambda a: a[:, ::-1],
    lambda a: a[::2, ::-3],
    lambda a: a.T,
    lambda a: np.broadcast_to(a[:, :1], (4, 5)),
    lambda a: np.lib.stride_tricks.as_strided(a, (6, 6), (8, 8)),
])  # fmt: skip
def test_rows_16_and_17_negative_zero_and_overlapping_strides_are_read(view: Callable[[Any], Any]) -> None:
    values = view(np.arange(24.0).reshape(4, 6))
    before = values.copy()
    p = Producer(values)
    with once(p):
        buf = fanin.InputBuffer(1, budget=0)
        buf.add(0, p, donate=True)
        buf.add(0, np.ones(values.shape))
        if not (p.array.size == 0 or np.array_equal(p.array, before + 1)):
            assert np.array_equal(p.array, before), "overlapping memory was written in part"
        (result,) = buf.take()
        assert np.array_equal(result.array if result is p else result, before + 1)


@pytest.mark.parametrize("shape", [[0], [3, 0, 2], [0, 2**40]])
def test_row_18_an_empty_tensor_may_point_anywhere(shape: list[int]) -> None:
    p = Producer(ndim=len(shape), shape=shape, strides=[2**62] * len(shape), data=0xDEAD, offset=2**64 - 1)
    with once(p):
        assert total(p, np.zeros(shape)).shape == tuple(shape)


def test_row_19_no_axes_shape_and_strides_null() -> None:
    p = Producer(np.array(2.5), shape=None, strides=None)
    with once(p):
        assert total(p, np.array(1.0)).item() == 3.5


def test_row_20_byte_offset_is_part_of_the_address() -> None:
    values = np.arange(8.0)
    p = Producer(values, shape=[3], offset=24)
    with once(p):
        assert total(p, np.zeros(3)).tolist() == [3, 4, 5]


@pytest.mark.parametrize("shift", [1, 2, 3, 7])
def test_rows_22_and_23_misaligned_memory_is_read(shift: int) -> None:
    raw = np.zeros(8 * 3 + 16, np.uint8)
    raw[shift : shift + 24] = np.array([1.0, 2.0, 3.0]).view(np.uint8)
    p = Producer(data=raw.ctypes.data, offset=shift)
    with once(p):
        assert total(p, ONE).tolist() == [11, 22, 33]


@pytest.mark.parametrize(
    "dtype",
    [
        (2, 0, 1),
        (2, 63, 1),
        (2, 80, 1),
        (2, 128, 1),
        (2, 8, 1),
        (0, 4, 1),
        (0, 128, 1),
        (1, 1, 1),
        (6, 1, 1),
        (5, 32, 1),
        (5, 96, 1),
        (4, 32, 1),
        (3, 64, 1),
        (7, 8, 1),
        (17, 4, 1),
        (255, 8, 1),
        (2, 64, 0),
        (2, 64, 2),
        (2, 32, 65535),
        (10, 16, 1),
        (12, 4, 1),
    ],
)
def test_row_24_element_types_that_are_not_summed_are_named(dtype: tuple[int, int, int]) -> None:
    p = Producer(dtype=dtype)
    with once(p):
        refused(p, BufferError, f"type code {dtype[0]} with {dtype[1]} bits and {dtype[2]} lanes")


def test_row_24_a_refusal_in_an_except_block_keeps_the_live_exception() -> None:
    p = Producer(dtype=(2, 80, 1))
    with once(p), pytest.raises(BufferError) as caught:
        try:
            raise KeyError("first")
        except KeyError:
            fanin.add_n([p])
    assert isinstance(caught.value.__context__, KeyError)


def test_row_25_a_bool_is_whether_its_byte_is_zero() -> None:
    p = Producer(np.array([0, 1, 2, 255], np.uint8), dtype=(6, 8, 1))
    with once(p):
        result = total(p, np.zeros(4, bool))
    assert result.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dtype", [">f8", ">i4", ">c16"])
def test_row_26_foreign_byte_order_is_refused_with_the_remedy(dtype: str) -> None:
    refused(np.ones(3, dtype), BufferError, "newbyteorder")


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_row_25_long_double_is_refused_by_name(dtype: str) -> None:
    refused(np.ones(3, dtype), BufferError, str(np.dtype(dtype)))


# Rows 27-31: which memory may be written, and when it is freed


@pytest.mark.parametrize(("how", "written"), [
    ({}, True),
    ({"flags": READ_ONLY}, False),
    ({"flags": IS_COPIED}, False),
    ({"flags": READ_ONLY | 0xF0}, False),
    ({"versioned": False}, False),
])  # fmt: skip
def test_rows_27_to_29_a_donated_tensor_is_written_if_its_flags_permit_it(how: dict[str, Any], written: bool) -> None:
    p = Producer(**how)
    with once(p):
        buf = fanin.InputBuffer(1, budget=0)
        buf.add(0, p, donate=True)
        buf.add(0, ONE)
        (result,) = buf.take()
        assert (result is p) == written
        assert p.array.tolist() == ([11, 22, 33] if written else [1, 2, 3])
        assert (p.array if result is p else result).tolist() == [11, 22, 33]
        del result


@pytest.mark.parametrize("how", [{"flags": READ_ONLY}, {"flags": IS_COPIED}, {"versioned": False}])
def test_row_27_out_must_be_writable(how: dict[str, Any]) -> None:
    p = Producer(**how)
    with once(p), pytest.raises(BufferError, match="read-only"):
        fanin.add_n([ONE, ONE], out=p)
    assert p.array.tolist() == [1, 2, 3]


def test_out_may_be_a_tensor_of_another_library() -> None:
    p = Producer()
    with once(p):
        assert fanin.add_n([ONE, ONE], out=p) is p
    assert p.array.tolist() == [20, 40, 60]


@pytest.mark.parametrize("versioned", [True, False])
def test_row_30_without_a_deleter_the_producer_is_kept_alive(versioned: bool) -> None:
    p = Producer(versioned=versioned, deleter=None)
    alive = weakref.ref(p)
    buf = fanin.InputBuffer(1)
    buf.add(0, p)
    buf.add(0, ONE)
    del p
    gc.collect()
    assert alive() is not None
    assert buf.take()[0].tolist() == [11, 22, 33]
    gc.collect()
    assert alive() is None


def test_row_31_an_exception_that_a_deleter_leaves_goes_to_the_hook() -> None:
    p = Producer(deleter=ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p))
    seen: list[Any] = []
    old, sys.unraisablehook = sys.unraisablehook, seen.append
    try:
        assert total(p, ONE).tolist() == [11, 22, 33]
        q = Producer(deleter=ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p), shape=[-1])
        with pytest.raises(ValueError, match="negative"):
            fanin.add_n([q])
    finally:
        sys.unraisablehook = old
    assert [u.exc_type for u in seen] == [MemoryError, MemoryError]


# Rows 33-43: callbacks that misbehave


@pytest.mark.parametrize("how", ["take", "clear", "del"])
def test_row_33_a_deleter_may_use_the_buffer_and_drop_the_last_reference_to_it(how: str) -> None:
    class Meddler(Producer):
        buf: Any = None

        def _count(self, pointer: int | None) -> None:
            super()._count(pointer)
            buf, self.buf = self.buf, None
            if how == "take":  # the slot is being taken: D22
                with pytest.raises(RuntimeError, match="from within"):
                    buf.add(0, ONE)
            elif how == "clear":
                buf.add(0, ONE)
                buf.clear()

    p = Meddler()
    with once(p):
        buf = fanin.InputBuffer(1)
        p.buf = buf if how != "del" else None
        buf.add(0, p)
        buf.add(0, ONE)
        if how == "take":
            assert buf.take()[0].tolist() == [11, 22, 33]
        elif how == "clear":
            buf.clear()
        del buf
    assert p.buf is None


def our_tensor() -> Any:
    """The `__dlpack__` of fanin's own arrays: a sum on its way to a foreign library."""
    caught: list[Any] = []

    class Space:
        __name__ = "somewhere"
        from_dlpack = staticmethod(lambda x: caught.append(x) or x)

    class Theirs(Producer):
        def __array_namespace__(self) -> Any:
            return Space

    from fanin._interop import arrays

    known = dict(arrays.namespaces), list(arrays.KINDS)
    try:
        assert total(Theirs(), ONE) is caught[0]
    finally:
        arrays.namespaces.clear()
        arrays.namespaces.update(known[0])
        arrays.KINDS[:] = known[1]
    return caught[0]


def test_an_exported_tensor_is_an_honest_one() -> None:
    ours = our_tensor()
    assert ours.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(ours).tolist() == [11, 22, 33]
    assert get_name(ours.__dlpack__()) == b"dltensor"
    assert get_name(ours.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    assert get_name(ours.__dlpack__(max_version=(9, 0), copy=True, dl_device=(1, 0))) == b"dltensor_versioned"
    for bad in ({"stream": 1}, {"max_version": 1}, {"max_version": ("1", 0)}, {"dl_device": (2, 0)}, {"dl_device": 3}):
        with pytest.raises((TypeError, ValueError, BufferError)):
            ours.__dlpack__(**bad)
    capsule = ours.__dlpack__(max_version=(1, 3), copy=True)
    sent = Versioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
    assert (sent.major, sent.minor, sent.flags, sent.tensor.ndim) == (1, 3, IS_COPIED, 1)


def test_row_36_an_exported_capsule_dropped_unconsumed_frees_its_memory() -> None:
    ours = our_tensor()
    gc.collect()
    before = hooks.memory()[0]
    for how in ({}, {"max_version": (1, 3)}, {"copy": True}):
        capsule = ours.__dlpack__(**how)
        assert hooks.memory()[0] > before
        del capsule
        assert hooks.memory()[0] == before


def test_row_34_the_deleter_of_an_export_may_run_on_a_thread_without_python() -> None:
    """NumPy's arrays call it wherever they are dropped; here the call comes with the GIL released."""
    ours = our_tensor()
    capsule = ours.__dlpack__(max_version=(1, 3))
    at = get_pointer(capsule, b"dltensor_versioned")
    sent = Versioned.from_address(at)
    set_name(capsule, b"used_dltensor_versioned")
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(sent.deleter)  # ctypes releases the GIL around foreign calls
    worker = threading.Thread(target=call, args=(at,))
    worker.start()
    worker.join()


def test_row_35_tensors_referenced_at_exit_are_not_deleted() -> None:
    code = """
import sys; sys.path.insert(0, {tests!r})
import fanin, numpy as np
from kit.hostile import Producer
p = Producer()
buf = fanin.InputBuffer(1); buf.add(0, p); buf.add(0, p)
cycle = [buf]; cycle.append(cycle)
keep = np.from_dlpack(np.ones(3)); out = fanin.add_n([keep, keep])
sys.modules['kept'] = (buf, out, cycle)
print('end')
"""
    from kit.support import TESTS

    assert run_prepared(code.format(tests=str(TESTS))).stdout == "end\n"


def test_row_37_edits_of_the_producer_after_the_hand_over_have_no_effect() -> None:
    p = Producer()
    with once(p):
        buf = fanin.InputBuffer(1)
        buf.add(0, p)
        p.shape[0], p.strides[0] = 10**9, 2**60
        p.managed.tensor.ndim, p.managed.tensor.data, p.managed.tensor.bits = 60, 8, 3
        buf.add(0, ONE)
        assert buf.take()[0].tolist() == [11, 22, 33]


def test_rows_39_and_40_array_interfaces_with_raw_addresses_are_not_read() -> None:
    class Forged:
        __array_interface__ = {"shape": (3,), "typestr": "<f8", "data": (8, False), "version": 3}
        __cuda_array_interface__ = __array_interface__
        __array_struct__ = property(lambda self: 1 / 0)

        def __array__(self, *args: Any, **kw: Any) -> Any:
            raise AssertionError("asked")

    refused(Forged(), TypeError, "has no \\+")


def test_row_41_the_buffer_protocol_is_read_by_numpy_and_released_once() -> None:
    import array

    x = array.array("d", [1, 2, 3])
    buf = fanin.InputBuffer(1)
    buf.add(0, x)
    with pytest.raises(BufferError):
        x.append(4)  # its memory is held
    buf.add(0, memoryview(ONE)[::-1])
    assert buf.take()[0].tolist() == [31, 22, 13]
    x.append(4)
    with pytest.raises(TypeError, match="no sum"):
        fanin.add_n([memoryview(np.zeros(2, "f8,i4"))])


def test_row_42_a_producer_may_change_the_buffer_while_it_is_called() -> None:
    class Meddler(Producer):
        def __dlpack__(self, **how: Any) -> Any:
            buf.add(0, np.full(3, 100.0))
            assert buf.take()[0].tolist() == [100, 100, 100]
            buf.add(0, ONE)
            return super().__dlpack__(**how)

    p = Meddler()
    with once(p):
        buf = fanin.InputBuffer(1)
        buf.add(0, p)
        assert buf.take()[0].tolist() == [11, 22, 33]


def test_row_43_slots_and_keys_are_converted_once() -> None:
    class Lying(int):
        def __index__(self) -> int:
            return 10**6

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Meddler:
        def __init__(self) -> None:
            self.requests = 0

        def __index__(self) -> int:
            self.requests += 1
            buf.clear()
            return self.requests - 1

    buf = fanin.InputBuffer(2)
    buf.add(Lying(1), ONE)
    assert buf.take() == [None, ONE]
    m = Meddler()
    buf.add(m, ONE, key=0)
    assert m.requests == 1
    with pytest.raises(IndexError):
        buf.add(type("Huge", (), {"__index__": lambda self: 2**64})(), ONE)


def test_row_47_an_exported_sum_is_not_written_by_the_next_pass() -> None:
    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, ONE)
    buf.add(0, ONE)
    (first,) = buf.take()
    kept = first.copy()
    buf.add(0, first)
    buf.add(0, ONE)
    snapshot = buf[0]
    buf.add(0, ONE)
    (second,) = buf.take()
    assert np.array_equal(first, kept)
    assert snapshot.tolist() == [30, 60, 90]
    assert second.tolist() == [40, 80, 120]
