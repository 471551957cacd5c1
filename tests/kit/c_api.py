"""The C API by ctypes: each call releases the interpreter's lock, so that it runs as a thread of C would call it.

The structs are written down here once more; tests/package/test_c_abi.py holds them against fanin.h.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import fanin
from fanin import _core

ANY = ct.c_void_p
STATUS = ct.c_int

OK, TYPE, VALUE, STATE, NOMEM, PYTHON, INDEX, OVERFLOW, BUFFER, RACE, DEADLOCK, DEVICE, DEVICE_NOMEM, CAPTURE = range(
    14
)
ZERO_DIVISION = 14
AUTO, EAGER, FUSED = 0, 2**64 - 2, 2**64 - 1
SHAPE, DTYPE, ON_DEVICE, ACCUMULATE, EXACT = 1, 2, 4, 8, 16
KEY, DONATE, COPY, WEIGHT = 1, 2, 4, 8
WRITABLE, SCALE, MEAN, WEIGHTS = 1, 2, 4, 8
LEAF, STATS = 1, 2

#: fanin_dtype, and DLPack's code, of NumPy's dtypes.
DTYPES = {
    np.dtype(name): (number, code)
    for number, name, code in (
        (0, "?", 6), (1, "i1", 0), (2, "i2", 0), (3, "i4", 0), (4, "i8", 0),
        (5, "u1", 1), (6, "u2", 1), (7, "u4", 1), (8, "u8", 1),
        (9, "f2", 2), (13, "f4", 2), (14, "f8", 2), (15, "c8", 5), (16, "c16", 5),
    )
}  # fmt: skip
NUMPY = {number: dtype for dtype, (number, _) in DTYPES.items()}


class Struct(ct.Structure):
    """One whose first field, struct_size, is filled in."""

    def __init__(self, **fields: Any) -> None:
        if self._fields_[0][0] == "struct_size":
            fields.setdefault("struct_size", ct.sizeof(self))
        super().__init__(**fields)


class Failure(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("status", STATUS),
        ("code", ct.c_int32),
        ("slot", ct.c_int64),
        ("key", ct.c_int64),
        ("object", ct.c_char * 128),
        ("slot_name", ct.c_char * 128),
        ("expected", ct.c_char * 128),
        ("got", ct.c_char * 128),
        ("text", ct.c_char * 1024),
    ]


class Value(Struct):
    _fields_ = [
        ("array", ANY),
        ("data", ANY),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("size", ct.c_int64),
        ("dtype", ct.c_int),
        ("ndim", ct.c_int32),
        ("contiguous", ct.c_int32),
        ("device_type", ct.c_int16),
        ("device_id", ct.c_int16),
    ]


class Tensor(Struct):
    _fields_ = [
        ("data", ANY),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("ndim", ct.c_int32),
        ("code", ct.c_uint8),
        ("bits", ct.c_uint8),
        ("lanes", ct.c_uint16),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


DELETER = ct.CFUNCTYPE(None, ANY)


class Managed(Struct):
    _fields_ = [
        ("major", ct.c_uint32),
        ("minor", ct.c_uint32),
        ("manager_ctx", ANY),
        ("deleter", DELETER),
        ("flags", ct.c_uint64),
        ("tensor", Tensor),
    ]


class Stream(Struct):
    _fields_ = [("device_type", ct.c_int32), ("device_id", ct.c_int32), ("handle", ct.c_size_t)]


class Slot(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("declares", ct.c_uint32),
        ("ndim", ct.c_int32),
        ("shape", ct.POINTER(ct.c_int64)),
        ("dtype", ct.c_int),
        ("accumulate", ct.c_int),
        ("device_type", ct.c_int32),
        ("device_id", ct.c_int32),
        ("name", ct.c_char_p),
    ]


class BufferOptions(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("name", ct.c_char_p),
        ("slots", ct.POINTER(Slot)),
        ("budget", ct.c_uint64),
        ("stream", ct.POINTER(Stream)),
        ("accumulate", ct.c_int),
        ("flags", ct.c_uint32),
    ]


class AddOptions(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("flags", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("key", ct.c_int64),
        ("stream", ct.POINTER(Stream)),
        ("weight", ct.c_double),
        ("weight_imag", ct.c_double),
    ]


class Gradient(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("slot", ct.c_size_t),
        ("key", ct.c_int64),
        ("view", ct.POINTER(Tensor)),
        ("value", ct.POINTER(Value)),
        ("weight", ct.c_double),
        ("weight_imag", ct.c_double),
    ]


class Weight(Struct):
    _fields_ = [("key", ct.c_int64), ("weight", ct.c_double), ("weight_imag", ct.c_double)]


class TakeOptions(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("flags", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("stream", ct.POINTER(Stream)),
        ("out", ct.POINTER(ct.POINTER(Tensor))),
        ("scale", ct.c_double),
        ("scale_imag", ct.c_double),
        ("weights", ct.POINTER(Weight)),
        ("nweights", ct.c_size_t),
    ]


class Stats(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("count", ct.c_uint64),
        ("sumsq", ct.c_double),
        ("absmax", ct.c_double),
        ("nonfinite", ct.c_uint64),
        ("first_bad_key", ct.c_int64),
        ("defined", ct.c_int32),
        ("has_bad", ct.c_int32),
        ("norm", ct.c_double),
    ]


COUNTERS = [f.name for f in dataclasses.fields(fanin.Counters)]


class Counters(Struct):
    _fields_ = [("struct_size", ct.c_size_t), *((name, ct.c_uint64) for name in COUNTERS)]


class Edge(Struct):
    _fields_ = [("next", ANY), ("slot", ct.c_uint32)]


class Root(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("node", ANY),
        ("gradient", ct.POINTER(Value)),
        ("slot", ct.c_uint32),
        ("reserved", ct.c_uint32),
    ]


class PassOptions(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("flags", ct.c_uint32),
        ("workers", ct.c_uint32),
        ("inputs", ct.POINTER(Edge)),
        ("ninputs", ct.c_size_t),
    ]


class MachineOptions(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("seed", ct.c_uint64),
        ("devices", ct.c_int32),
        ("schedule", ct.c_int),
    ]


CALL, RELEASE = ct.CFUNCTYPE(STATUS, ANY), ct.CFUNCTYPE(None, ANY)


class Kernel(Struct):
    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("name", ct.c_char_p),
        ("call", CALL),
        ("release", RELEASE),
        ("ctx", ANY),
        ("reads", ct.POINTER(Value)),
        ("writes", ct.POINTER(Value)),
        ("nreads", ct.c_size_t),
        ("nwrites", ct.c_size_t),
    ]


#: The functions of the table in their order: result and arguments; "py": needs the interpreter.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "empty": (STATUS, ct.c_int, ct.c_int, ANY, ANY, ANY),
    "like": (STATUS, ANY, ANY, ANY),
    "share": (None, ANY, ANY),
    "wrap": (STATUS, ANY, ct.c_int, ct.c_int, ANY, ANY, ANY, ANY, ANY, ANY),
    "may_write": (ct.c_int, ANY),
    "drop": (None, ANY),
    "function_new": ("py", ct.py_object, ANY),
    "node_new": ("py", ct.py_object, ct.py_object, ANY, ct.c_size_t, ANY),
    "to_python": ("py", ct.py_object, ANY),
    "of_python": ("py", ct.c_int, ct.py_object, ANY),
    "of_managed": (STATUS, ANY, ANY, ANY),
    "to_managed": (STATUS, ANY, ANY, ANY),
    "buffer_new": (STATUS, ct.c_size_t, ANY, ANY, ANY),
    "buffer_free": (None, ANY),
    "buffer_add": (STATUS, ANY, ct.c_size_t, ANY, ANY, ANY),
    "buffer_add_value": (STATUS, ANY, ct.c_size_t, ANY, ANY, ANY),
    "buffer_add_many": (STATUS, ANY, ANY, ct.c_size_t, ANY, ANY),
    "buffer_expect": (STATUS, ANY, ct.c_size_t, ct.c_int64, ANY),
    "buffer_ready": (STATUS, ANY, ct.c_size_t, ANY, ANY),
    "buffer_take": (STATUS, ANY, ANY, ANY, ct.c_size_t, ANY),
    "buffer_take_one": (STATUS, ANY, ct.c_size_t, ANY, ANY, ANY),
    "buffer_target": (STATUS, ANY, ct.c_size_t, ANY, ANY, ANY, ANY),
    "target_end": (STATUS, ANY, ct.c_int, ANY),
    "buffer_clear": (STATUS, ANY, ANY),
    "buffer_stats": (STATUS, ANY, ct.c_size_t, ANY, ANY),
    "buffer_counters": (STATUS, ANY, ANY, ANY),
    "buffer_explain": ("py", ct.py_object, ANY, ct.c_size_t),
    "leaf_new": ("py", ct.py_object, ANY, ANY),
    "leaf_grad": ("py", ct.c_int, ct.py_object, ANY),
    "backward": ("py", ct.c_int, ANY, ct.c_size_t, ANY),
    "grad": ("py", ct.c_int, ANY, ct.c_size_t, ANY, ANY),
    "overlap": (STATUS, ANY, ANY, ct.c_uint64, ANY, ANY, ANY, ANY),
    "event_record": (STATUS, ANY, ANY, ANY),
    "event_free": (None, ANY),
    "stream_wait": (STATUS, ANY, ANY, ANY),
    "stream_sync": (STATUS, ANY, ANY),
    "value_read": (STATUS, ANY, ANY, ANY, ANY),
    "machine_new": (STATUS, ANY, ANY, ANY),
    "machine_entered": (STATUS, ANY, ANY),
    "machine_free": (None, ANY),
    "machine_enter": (STATUS, ANY, ANY),
    "machine_leave": (None, ANY),
    "machine_stream": (STATUS, ANY, ct.c_int32, ANY, ANY),
    "machine_array": (STATUS, ANY, ct.c_int32, ANY, ANY, ANY),
    "machine_launch": (STATUS, ANY, ANY, ANY, ANY),
    "machine_synchronize": (STATUS, ANY, ANY),
    "machine_races": (ct.c_uint64, ANY),
    "machine_spawn": (STATUS, ANY, ANY, ANY, ANY),
    "machine_join": (STATUS, ANY, ANY),
    "buffer_of_python": ("py", ANY, ct.py_object),
    "buffer_to_python": ("py", ct.py_object, ANY),
    "buffer_snapshot": (STATUS, ANY, ct.c_size_t, ANY, ANY, ANY),
}


class Table(ct.Structure):
    _fields_ = [("version", ct.c_uint32), ("size", ct.c_uint32), *((name, ANY) for name in FUNCTIONS)]


def _table() -> Table:
    get = ct.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ANY, [ct.py_object, ct.c_char_p]
    return Table.from_address(get(_core._C_API, b"fanin._core._C_API"))


table = _table()


def function(name: str) -> Any:
    result, *arguments = FUNCTIONS[name]
    if result == "py":
        return ct.PYFUNCTYPE(*arguments)(getattr(table, name))
    return ct.CFUNCTYPE(result, *arguments)(getattr(table, name))


api = type("Api", (), {name: staticmethod(function(name)) for name in FUNCTIONS})


class Failed(Exception):
    """A call of the API that did not return FANIN_OK."""

    def __init__(self, status: int, why: Failure) -> None:
        super().__init__(why.text.decode())
        self.status, self.slot, self.key, self.code = status, why.slot, why.key, why.code
        self.object, self.slot_name = why.object.decode(), why.slot_name.decode()
        self.expected, self.got = why.expected.decode(), why.got.decode()
        assert why.status == status and (why.code == 0 or status in (DEVICE, DEVICE_NOMEM))


def call(name: str, *arguments: Any) -> None:
    """One that ends in a failure: Failed unless it is FANIN_OK."""
    why = Failure()
    status = getattr(api, name)(*arguments, ct.byref(why))
    if status != OK:
        raise Failed(status, why)


def ints(numbers: Sequence[int]) -> Any:
    return (ct.c_int64 * len(numbers))(*numbers)


def view(x: Any) -> Tensor:
    """An ndarray's memory, which the tensor does not keep."""
    code = DTYPES[x.dtype][1]
    t = Tensor(device_type=1, ndim=x.ndim, code=code, bits=8 * x.itemsize, lanes=1, data=x.ctypes.data)
    t.shape = ints(x.shape)
    t.strides = ints([s // x.itemsize for s in x.strides])
    t.keep = x  # the tests' own convenience
    return t


def seen(v: Value) -> Any:
    """A copy of what a value shows; None of an undefined one."""
    if not v.array:
        return None
    dtype, shape = NUMPY[v.dtype], tuple(v.shape[: v.ndim])
    strides = tuple(v.strides[: v.ndim])
    if not v.size:
        return np.empty(shape, dtype)
    low = sum(min(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True))
    high = sum(max(0, s * (n - 1)) for s, n in zip(strides, shape, strict=True)) + dtype.itemsize
    raw = np.frombuffer((ct.c_char * (high - low)).from_address(v.data + low), "u1")
    return np.ndarray(shape, dtype, raw, -low, strides).copy()


def dropped(v: Value) -> Any:
    x = seen(v)
    api.drop(ct.byref(v))
    return x


def value(x: Any) -> Value:
    """A copy of an ndarray as memory of the core's."""
    v = Value()
    assert api.empty(DTYPES[x.dtype][0], x.ndim, ints(x.shape), ct.byref(v), None) == OK
    whole = x.copy("C")
    ct.memmove(v.data, whole.ctypes.data, x.nbytes)
    return v


class Deleted:
    """A tensor over an ndarray that counts the calls of its deleter, and calls `then` in it."""

    def __init__(self, x: Any, then: Any = None, major: int = 1, flags: int = 0, **fields: Any) -> None:
        self.x, self.calls, self.then = x, 0, then
        self.tensor = view(x)
        for name, field in fields.items():
            setattr(self.tensor, name, field)
        self.deleter = DELETER(self._delete)
        self.managed = Managed(major=major, minor=1, deleter=self.deleter, flags=flags, tensor=self.tensor)

    def _delete(self, managed: int) -> None:
        self.calls += 1
        assert managed == ct.addressof(self.managed)
        if self.then:
            self.then()

    def value(self) -> Value:
        v = Value()
        call("of_managed", ct.byref(self.managed), ct.byref(v))
        return v


class Buffer:
    """A buffer of the C API with InputBuffer's methods."""

    def __init__(self, slots: int = 1, declared: Sequence[Slot] | None = None, **options: Any) -> None:
        self.n = slots
        self.at = ANY()
        self.lent: list[Any] = []  # what the caller of C keeps until the take
        if declared is not None:
            options["slots"] = (Slot * len(declared))(*declared)
        call("buffer_new", slots, ct.byref(BufferOptions(**options)) if options else None, ct.byref(self.at))

    @classmethod
    def of_python(cls, buffer: fanin.InputBuffer) -> Buffer:
        """The handle of an InputBuffer."""
        b = cls.__new__(cls)
        b.n, b.lent = len(buffer), []
        b.at = ANY(api.buffer_of_python(buffer))
        return b

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        api.buffer_free(self.at)
        self.at = ANY()

    @staticmethod
    def _options(key: int | None, donate: bool, copy: bool, stream: Stream | None, weight: Any = None) -> Any:
        flags = (KEY if key is not None else 0) | (DONATE if donate else 0) | (COPY if copy else 0)
        flags |= 0 if weight is None else WEIGHT
        if not flags and stream is None:
            return None
        o = AddOptions(flags=flags, key=key or 0)
        if weight is not None:
            o.weight, o.weight_imag = complex(weight).real, complex(weight).imag
        if stream is not None:
            o.stream = ct.pointer(stream)
        return ct.byref(o)

    def add(
        self,
        slot: int,
        x: Any,
        key: Any = None,
        donate: bool = False,
        copy: bool = False,
        stream: Any = None,
        weight: Any = None,
    ) -> None:
        """An ndarray as a view, which the caller keeps; a Value; or None."""
        o = self._options(key, donate, copy, stream, weight)
        if not copy:
            self.lent.append(x)
        if isinstance(x, Value):
            call("buffer_add_value", self.at, slot, ct.byref(x), o)
        else:
            call("buffer_add", self.at, slot, None if x is None else ct.byref(view(x)), o)

    def add_many(
        self,
        slots: Sequence[int],
        xs: Sequence[Any],
        keys: Any = None,
        donate: bool = False,
        copy: bool = False,
        weights: Any = None,
    ) -> None:
        all_ = (Gradient * len(xs))()
        self.lent.append(xs)
        views = [None if x is None or isinstance(x, Value) else view(x) for x in xs]
        for i, x in enumerate(xs):
            all_[i].struct_size = ct.sizeof(Gradient)
            all_[i].slot, all_[i].key = slots[i], keys[i] if keys else 0
            if weights:
                by = complex(1 if weights[i] is None else weights[i])
                all_[i].weight, all_[i].weight_imag = by.real, by.imag
            if isinstance(x, Value):
                all_[i].value = ct.pointer(x)
            elif x is not None:
                all_[i].view = ct.pointer(views[i])
        o = self._options(0 if keys else None, donate, copy, None, None if weights is None else 1)
        call("buffer_add_many", self.at, all_, len(xs), o)

    def expect(self, slot: int, n: int) -> None:
        call("buffer_expect", self.at, slot, n)

    def ready(self, slot: int) -> bool:
        ready = ct.c_int()
        call("buffer_ready", self.at, slot, ct.byref(ready))
        return bool(ready.value)

    def take_values(
        self,
        slot: int | None = None,
        out: Any = None,
        scale: Any = None,
        writable: bool = False,
        stream: Any = None,
        mean: bool = False,
        weights: Any = None,
    ) -> Any:
        o = TakeOptions(flags=(WRITABLE if writable else 0) | (0 if scale is None else SCALE) | (MEAN if mean else 0))
        if weights is not None:
            some = (Weight * len(weights))()
            for at, (key, w) in zip(some, weights.items(), strict=True):
                at.key, at.weight, at.weight_imag = key, complex(w).real, complex(w).imag
            o.flags, o.weights, o.nweights = o.flags | WEIGHTS, some, len(weights)
        if scale is not None:
            o.scale, o.scale_imag = complex(scale).real, complex(scale).imag
        if stream is not None:
            o.stream = ct.pointer(stream)
        if out is not None:
            views = [None if x is None else view(x) for x in out]
            o.out = (ct.POINTER(Tensor) * len(views))(*(ct.pointer(t) if t else None for t in views))
        sums = (Value * (1 if slot is not None else self.n))()
        if slot is None:
            call("buffer_take", self.at, ct.byref(o), sums, self.n)
            self.lent.clear()
            return sums
        call("buffer_take_one", self.at, slot, ct.byref(o), sums)
        return sums[0]

    def take(self, slot: int | None = None, **how: Any) -> Any:
        sums = self.take_values(slot, **how)
        return dropped(sums) if slot is not None else [dropped(v) for v in sums]

    @contextlib.contextmanager
    def target(self, slot: int, key: int | None = None, weight: Any = None) -> Iterator[Any]:
        t, v = ANY(), Value()
        call("buffer_target", self.at, slot, self._options(key, False, False, None, weight), ct.byref(t), ct.byref(v))
        good = 0
        try:
            raw = (ct.c_char * (v.size * NUMPY[v.dtype].itemsize)).from_address(v.data)
            yield np.frombuffer(raw, NUMPY[v.dtype]).reshape(tuple(v.shape[: v.ndim]))
            good = 1
        finally:
            call("target_end", t, good)

    def clear(self) -> None:
        call("buffer_clear", self.at)

    def stats(self, slot: int) -> Stats:
        s = Stats()
        call("buffer_stats", self.at, slot, ct.byref(s))
        return s

    def counters(self) -> dict[str, int]:
        n = Counters()
        call("buffer_counters", self.at, ct.byref(n))
        return {name: getattr(n, name) for name in COUNTERS}

    def explain(self, slot: int) -> str:
        return api.buffer_explain(self.at, slot)


def declared(
    shape: Any = None,
    dtype: Any = None,
    accumulate: Any = None,
    exact: bool = False,
    name: str | None = None,
    device: Any = None,
) -> Slot:
    s = Slot()
    if shape is not None:
        s.declares |= SHAPE
        s.ndim, s.shape = len(shape), ints(shape)
    if dtype is not None:
        s.declares |= DTYPE
        s.dtype = DTYPES[np.dtype(dtype)][0]
    if accumulate is not None:
        s.declares |= ACCUMULATE
        s.accumulate = DTYPES[np.dtype(accumulate)][0]
    if exact:
        s.declares |= EXACT
    if device is not None:
        s.declares |= ON_DEVICE
        s.device_type, s.device_id = device
    s.name = name.encode() if name else None
    return s


def exception_of(e: Failed) -> Exception:
    """The exception that Python raises in the place of a status."""
    types = {TYPE: TypeError, VALUE: ValueError, INDEX: IndexError, OVERFLOW: OverflowError, BUFFER: BufferError}
    types[ZERO_DIVISION] = ZeroDivisionError
    types |= {NOMEM: MemoryError, RACE: fanin.RaceError}
    return types.get(e.status, RuntimeError)(str(e))


class ConformingBuffer:
    """A buffer of buffer_new, or with `python` the handle of an InputBuffer, for fanin.conformance.

    Gradients come and go as values over the memory of their arrays. The sum of one gradient is that value itself,
    so that it is shown as the array that it was made of.
    """

    def __init__(self, n: int, python: bool = False) -> None:
        self.c = Buffer.of_python(fanin.InputBuffer(n)) if python else Buffer(n)
        self.at: dict[int, Any] = {}  # the array at each address

    @staticmethod
    def stream(s: Any) -> Stream | None:
        return None if s is None else Stream(device_type=SIM, device_id=int(s.device[4:]), handle=s.handle)

    def shown(self, v: Value) -> Any:
        x = api.to_python(ct.byref(v))
        one = self.at.get(v.data) if v.data and v.device_type != SIM else None
        api.drop(ct.byref(v))
        return one if one is not None and one.shape == x.shape else x

    def add(self, slot: int, g: Any, *, key: int | None = None, stream: Any = None) -> None:
        v = Value()
        api.of_python(g, ct.byref(v))
        try:
            self.c.add(slot, v, key=key, stream=self.stream(stream))
        except Failed as e:
            raise exception_of(e) from None
        else:
            if isinstance(g, np.ndarray):
                self.at[v.data] = g
        finally:
            api.drop(ct.byref(v))

    def take(self, stream: Any = None) -> list[Any]:
        try:
            sums = self.c.take_values(stream=self.stream(stream))
        except Failed as e:
            raise exception_of(e) from None
        shown = [self.shown(v) for v in sums]
        self.at.clear()
        return shown

    def __getitem__(self, slot: int) -> Any:
        v = Value()
        call("buffer_snapshot", self.c.at, slot, None, ct.byref(v))
        return self.shown(v)

    def ready(self, slot: int) -> bool:
        return self.c.ready(slot)

    def expect(self, slot: int, n: int) -> None:
        self.c.expect(slot, n)

    def clear(self) -> None:
        self.c.clear()


def conforming_handle(n: int) -> ConformingBuffer:
    return ConformingBuffer(n, python=True)


# The engine


def backward(roots: Sequence[tuple[Any, int, Any]], inputs: Any = None, into: Any = None, **options: Any) -> None:
    """fanin.backward of Values; with `into`, fanin.grad: a list that gets the sums."""
    all_ = (Root * len(roots))()
    for i, (node, slot, gradient) in enumerate(roots):
        all_[i].struct_size, all_[i].node, all_[i].slot = ct.sizeof(Root), id(node), slot
        if gradient is not None:
            all_[i].gradient = ct.pointer(gradient)
    o = PassOptions(**options)
    if inputs is not None:
        o.inputs = (Edge * len(inputs))(*(Edge(next=id(node), slot=slot) for node, slot in inputs))
        o.ninputs = len(inputs)
    if into is None:
        api.backward(all_, len(roots), ct.byref(o))
        return
    sums = (Value * len(inputs))()
    if api.grad(all_, len(roots), ct.byref(o), sums) == 0:
        into += [dropped(v) for v in sums]


# The simulated machine

SIM = 12


class Machine:
    """A machine of the C API, entered by this thread."""

    def __init__(self, entered: bool = False, **options: Any) -> None:
        self.at, self.kept, self.released = ANY(), [], 0  # type: tuple[Any, list[Any], int]
        self.mine = not entered
        if entered:
            call("machine_entered", ct.byref(self.at))
            return
        call("machine_new", ct.byref(MachineOptions(**options)), ct.byref(self.at))
        call("machine_enter", self.at)

    def close(self) -> None:
        if self.at:
            if self.mine:
                api.machine_leave(self.at)
            api.machine_free(self.at)
            self.at = ANY()

    def stream(self, device: int = 0) -> Stream:
        s = Stream()
        call("machine_stream", self.at, device, ct.byref(s))
        return s

    def array(self, x: Any, device: int = 0) -> Value:
        v = Value()
        call("machine_array", self.at, device, ct.byref(view(x)), ct.byref(v))
        return v

    def _release(self, ctx: Any) -> None:
        self.released += 1

    def launch(
        self, stream: Stream, run: Any, reads: Sequence[Value] = (), writes: Sequence[Value] = (), name: str = "k"
    ) -> None:
        """`run` gets ndarrays over the device's memory."""
        spans = [(v.data, v.size, NUMPY[v.dtype]) for v in (*reads, *writes)]

        def work(ctx: Any) -> int:
            views = [np.frombuffer((ct.c_char * (n * d.itemsize)).from_address(at), d, n) for at, n, d in spans]
            return run(*views) or OK

        k = Kernel(name=name.encode(), call=CALL(work), release=RELEASE(self._release))
        k.reads, k.nreads = (Value * len(reads))(*reads), len(reads)
        k.writes, k.nwrites = (Value * len(writes))(*writes), len(writes)
        self.kept.append(k)
        call("machine_launch", self.at, ct.byref(stream), ct.byref(k))

    def spawn(self, run: Any) -> None:
        entry = RELEASE(lambda ctx: run())
        self.kept.append(entry)
        call("machine_spawn", self.at, entry, None)

    def join(self) -> None:
        call("machine_join", self.at)

    def synchronize(self) -> None:
        call("machine_synchronize", self.at)


def read(v: Value, stream: Stream | None = None) -> Any:
    """A device's value on the host, after what the stream has queued; drops it."""
    out = np.empty(tuple(v.shape[: v.ndim]), NUMPY[v.dtype])
    call("value_read", ct.byref(v), None if stream is None else ct.byref(stream), ct.byref(view(out)))
    api.drop(ct.byref(v))
    return out


def after(stream: Stream, other: Stream) -> None:
    """`stream` waits for what `other` has queued."""
    e = ANY()
    call("event_record", ct.byref(other), ct.byref(e))
    call("stream_wait", ct.byref(stream), e)
    api.event_free(e)
