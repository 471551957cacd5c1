"""Arrays and streams of GPU libraries that behave as their specifications say, over the fake driver's memory: DLPack,
its C exchange table, `__cuda_array_interface__`, and as much of torch, CuPy and Numba as fanin uses. These libraries
free memory as soon as the host has no reference to it: the code that drops the last reference must wait for the device.
"""

from __future__ import annotations

import ctypes
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, PYFUNCTYPE, c_char_p, c_int, c_int32, c_uint32, c_void_p
from typing import Any

import numpy as np

import fanin
from fake_cuda import FakeDriver
from fake_cuda.driver import DriverError
from fanin._interop import streams
from kit.hostile import NAMES, READ_ONLY, Deleter, Legacy, Tensor, Versioned, c_array, new_capsule

CODES = {"f": 2, "i": 0, "u": 1, "c": 5, "b": 6}


class Library:
    """One library: its memory, its current streams, and the requests that it got."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.current: dict[int, int] = {}  # handles, by device
        self.freed: list[int] = []
        self.held: dict[int, Any] = {}  # tensors on their way, by the address of their struct
        self.requests: list[Any] = []
        self.blocks: list[tuple[int, int]] = []  # (device, address)
        self.allocated = 0
        self.allocated_on: list[int] = []  # the handles of the streams that were current then
        if hasattr(driver, "at_end"):
            driver.at_end.append(self.close)
        self.recorded: list[tuple[int, int]] = []  # record_stream: (address, handle)

    def stream(self, device: int = 0) -> int:
        """The library's current stream on a device: the legacy default where none was set."""
        return self.current.get(device, 0)

    def close(self) -> None:
        """The library's end: its blocks go back to the driver."""
        for device, address in self.blocks:
            with self.driver.context(device):
                self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))
        self.blocks.clear()

    def on(self, s: fanin.Stream) -> AbstractContextManager[None]:
        return self.on_handle(int(s.device.rpartition(":")[2]), s.handle)

    @contextmanager
    def on_handle(self, device: int, handle: int) -> Iterator[None]:
        before = self.current.get(device)
        self.current[device] = handle
        try:
            yield
        finally:
            if before is None:
                del self.current[device]
            else:
                self.current[device] = before


class Memory:
    """A block of a library's; `freed` has its address as soon as nobody holds it."""

    def __init__(self, library: Library, size: int, device: int) -> None:
        at = ctypes.c_uint64()
        with library.driver.context(device):
            library.driver.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(size, 1)))
        self.address = at.value
        library.blocks.append((device, self.address))
        weakref.finalize(self, library.freed.append, self.address).atexit = False


class Array:
    """What all arrays here share: geometry, and kernels on them."""

    def __init__(
        self,
        library: Library,
        shape: Any,
        dtype: Any = np.float32,
        device: int = 0,
        memory: Any = None,
        strides: Any = None,
        offset: int = 0,
    ) -> None:
        self.library, self.shape, self.dtype, self.device_id = library, tuple(shape), np.dtype(dtype), device
        self.strides = tuple(strides if strides is not None else np.empty(self.shape, np.bool_).strides)
        if strides is None:
            self.strides = tuple(s * self.dtype.itemsize for s in self.strides)
        self.memory = memory or Memory(library, int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize, device)
        self.offset = offset

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def address(self) -> int:
        return int(self.memory.address) + self.offset

    def record_stream(self, stream: Any) -> None:
        """For `FakeDriver.launch`: a library's kernels mark nothing."""

    def fill(self, stream: fanin.Stream, value: float) -> Any:
        """A kernel that writes it, late."""
        self.library.driver.launch(stream, lambda v: v.fill(value), writes=[self], name="fill")
        return self

    def read(self, stream: fanin.Stream) -> list[Any]:
        """What a kernel on `stream` reads, once everything has run."""
        seen: list[Any] = []
        self.library.driver.launch(stream, lambda v: seen.append(v.copy()), reads=[self], name="read")
        self.library.driver.synchronize()
        return seen[0].tolist()  # type: ignore[no-any-return]


class Offered:
    """The structs of one tensor on its way, which keep its memory. `deleted` counts calls of the deleter."""

    def __init__(self, x: Array, *, versioned: bool = True, read_only: bool = False, device_type: int = 2) -> None:
        self.memory, self.library, self.deleted = x.memory, x.library, 0
        self.shape, self.strides = c_array(x.shape), c_array([s // x.dtype.itemsize for s in x.strides])
        self.callback = Deleter(self._delete)
        tensor = Tensor(
            x.address, device_type, x.device_id, x.ndim, CODES[x.dtype.kind], 8 * x.dtype.itemsize, 1,
            ctypes.cast(self.shape, c_void_p), ctypes.cast(self.strides, c_void_p), 0,
        )  # fmt: skip
        calls = ctypes.cast(self.callback, c_void_p)
        self.managed: Any = (
            Versioned(1, 3, None, calls, READ_ONLY if read_only else 0, tensor)
            if versioned
            else Legacy(tensor, None, calls)
        )
        self.address = ctypes.addressof(self.managed)
        x.library.held[self.address] = self

    def _delete(self, pointer: int | None) -> None:
        self.deleted += 1
        del self.library.held[self.address]

    def capsule(self) -> Any:
        name = "dltensor_versioned" if isinstance(self.managed, Versioned) else "dltensor"
        return new_capsule(self.address, NAMES.setdefault(name, name.encode()), ctypes.cast(drop_unused, c_void_p))


#: By address: a capsule that is being destroyed may not be held.
is_valid = PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
pointer_of = PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@PYFUNCTYPE(None, c_void_p)
def drop_unused(capsule: int) -> None:
    """The destructor of a capsule: the deleter, where nobody took the tensor."""
    for name, struct in ((b"dltensor_versioned", Versioned), (b"dltensor", Legacy)):
        if is_valid(capsule, name):
            at = pointer_of(capsule, name)
            Deleter(struct.from_address(at).deleter)(at)  # type: ignore[attr-defined]


def adopt(library: Library, make: type[Array], capsule: Any) -> Any:
    """`from_dlpack`: an array over what a capsule holds, which is given back with it."""
    from kit.hostile import get_name, get_pointer, set_name

    name = get_name(capsule)
    at = get_pointer(capsule, name)
    managed: Any = (Versioned if name == b"dltensor_versioned" else Legacy).from_address(at)
    set_name(capsule, NAMES.setdefault("used_" + name.decode(), b"used_" + name))
    return adopted(library, make, managed, at)


class Borrowed:
    """Another library's memory: the deleter is called when nobody holds it."""

    def __init__(self, address: int, managed: Any, at: int) -> None:
        self.address = address
        weakref.finalize(self, Deleter(managed.deleter), at).atexit = False


def adopted(library: Library, make: type[Array], managed: Any, at: int) -> Any:
    t = managed.tensor
    kinds = {v: k for k, v in CODES.items()}
    dtype = np.dtype(f"{kinds[t.code]}{t.bits // 8}") if t.code != 6 else np.dtype(bool)
    dims = [(ctypes.c_int64 * max(t.ndim, 1)).from_address(p)[: t.ndim] if t.ndim else [] for p in (t.shape, t.strides)]
    memory = Borrowed((t.data or 0) + t.byte_offset, managed, at)
    return make(library, dims[0], dtype, t.device_id, memory, [s * dtype.itemsize for s in dims[1]])


class DLArray(Array):
    """An array with DLPack 1.x, as the array API standard has it: the consumer's stream waits for the library's current
    one.
    """

    versioned = True
    read_only = False
    device_type = 2

    def __add__(self, other: Any) -> Any:
        raise AssertionError("fanin sums arrays itself")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device_type, self.device_id)

    def __dlpack__(self, **how: Any) -> Any:
        self.library.requests.append(how)
        stream = how.get("stream")
        assert stream is None or (type(stream) is int and stream != 0), stream
        if stream != -1:
            consumer = fanin.Stream(f"cuda:{self.device_id}", 1 if stream is None else stream)
            consumer.wait(fanin.Stream(f"cuda:{self.device_id}", self.library.stream(self.device_id)))
        return Offered(self, versioned=self.versioned, read_only=self.read_only, device_type=self.device_type).capsule()


class LegacyArray(DLArray):
    """An array with DLPack as it was before 1.0."""

    versioned = False

    def __dlpack__(self, *, stream: Any = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


# The C exchange table


class Header(ctypes.Structure):
    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("older", c_void_p)]


ALLOCATE = PYFUNCTYPE(c_int, POINTER(Tensor), POINTER(c_void_p), c_void_p, c_void_p)
TAKE = PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
GIVE = PYFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))
LOOK = PYFUNCTYPE(c_int, c_void_p, POINTER(Tensor))
CURRENT = PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))


class Table(ctypes.Structure):
    _fields_ = [
        ("header", Header),
        ("allocate", ALLOCATE),
        ("take", TAKE),
        ("give", GIVE),
        ("look", LOOK),
        ("current", CURRENT),
    ]


def python_object(pointer: int) -> Any:
    return ctypes.cast(pointer, ctypes.py_object).value


def table_for(
    library: Library, make: type[Array], *, older: Table | None = None, major: int = 1, refuses: bool = False
) -> tuple[Table, Any]:
    """A library's table over its arrays, and the capsule; nothing in it orders anything."""
    looked: dict[int, Any] = {}

    def allocate(like: Any, out: Any, ctx: Any, fail: Any) -> int:
        t = like.contents
        if refuses:
            return -1
        library.allocated += 1
        library.allocated_on.append(library.stream(t.device_id))
        shape = (ctypes.c_int64 * max(t.ndim, 1)).from_address(t.shape)[: t.ndim] if t.ndim else []
        kinds = {v: k for k, v in CODES.items()}
        try:
            out[0] = Offered(make(library, shape, f"{kinds[t.code]}{t.bits // 8}", t.device_id)).address
        except DriverError:
            return -1
        return 0

    def take(x: int, out: Any) -> int:
        a = python_object(x)
        out[0] = Offered(a, device_type=getattr(a, "device_type", 2)).address
        return 0

    def give(managed: int, out: Any) -> int:
        made = adopted(library, make, Versioned.from_address(managed), managed)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        out[0] = id(made)
        return 0

    def look(x: int, out: Any) -> int:
        a = python_object(x)
        dims = c_array(a.shape), c_array([s // a.dtype.itemsize for s in a.strides])
        looked[x] = dims
        pointers = [ctypes.cast(d, c_void_p).value for d in dims]
        out[0] = Tensor(a.address, 2, a.device_id, a.ndim, CODES[a.dtype.kind], 8 * a.dtype.itemsize, 1, *pointers, 0)
        return 0

    def current(kind: int, index: int, out: Any) -> int:
        out[0] = library.stream(index)
        return 0

    prior = None if older is None else ctypes.addressof(older)
    table = Table(Header(major, 3, prior), ALLOCATE(allocate), TAKE(take), GIVE(give), LOOK(look), CURRENT(current))
    capsule = new_capsule(
        ctypes.addressof(table), NAMES.setdefault("dlpack_exchange_api", b"dlpack_exchange_api"), None
    )
    return table, capsule


_forever: list[Any] = []  # a table lives as long as the process


def table_array(library: Library, **how: Any) -> type[DLArray]:
    """A class of arrays with an exchange table."""

    class TableArray(DLArray):
        pass

    table, TableArray.__dlpack_c_exchange_api__ = table_for(library, TableArray, **how)  # type: ignore[attr-defined]
    _forever.append((table, TableArray))
    return TableArray


# __cuda_array_interface__


class InterfaceArray(Array):
    """As Numba's: an address, and the stream that it is ready on."""

    ready: int | None = None
    changed: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        said = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": self.strides,
            "stream": self.ready,
        }
        return {**said, **self.changed}


# Streams


class ProtocolStream:
    """Anything with `__cuda_stream__`."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __cuda_stream__(self) -> Any:
        return self.said


# Whole libraries


@contextmanager
def installed(name: str, module: Any) -> Iterator[Any]:
    """Inside the block `import name` gives this."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


def cupy(library: Library) -> Any:
    """CuPy, as far as fanin calls it: arrays whose capsule keeps the array itself, streams with `ptr` and a device of
    -1, `from_dlpack`.
    """
    module: Any = types.ModuleType("cupy")

    class ndarray(DLArray):
        __module__ = "cupy"

        @property
        def data(self) -> Any:
            return types.SimpleNamespace(mem=self.memory)

        def __dlpack__(self, **how: Any) -> Any:
            capsule = super().__dlpack__(**how)
            library.held[next(reversed(library.held))].keeps = self
            return capsule

    class Stream:
        __module__ = "cupy.cuda.stream"
        device_id = -1

        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            cuda.device = self.index

        def __exit__(self, *error: Any) -> None:
            cuda.device = 0

    cuda = types.SimpleNamespace(
        device=0, Device=Device, Stream=Stream, get_current_stream=lambda: Stream(library.stream(cuda.device))
    )
    module.cuda, module.ndarray = cuda, ndarray
    module.from_dlpack = lambda x: adopt(
        library, ndarray, x.__dlpack__(stream=library.stream() or 1, max_version=(1, 0))
    )
    return module


def numba(library: Library) -> Any:
    """Numba, as far as fanin calls it: device arrays by `__cuda_array_interface__` alone."""
    module: Any = types.ModuleType("numba")

    class DeviceNDArray(InterfaceArray):
        __module__ = "numba.cuda.cudadrv.devicearray"

        @property
        def gpu_data(self) -> Any:
            return self.memory

    def as_cuda_array(x: Any) -> Any:
        said = x.__cuda_array_interface__
        memory = types.SimpleNamespace(address=said["data"][0], owner=x)
        return DeviceNDArray(library, said["shape"], said["typestr"], 0, memory, said["strides"])

    module.cuda = types.SimpleNamespace(as_cuda_array=as_cuda_array)
    module.DeviceNDArray = DeviceNDArray
    return module


def torch_tensor(library: Library) -> Any:
    """The type of torch's tensors."""

    class Tensor(Array):
        __module__ = "torch"
        is_nested = is_quantized = requires_grad = False
        layout = "torch.strided"
        conjugated: Callable[[Any], Any] | None = None

        @property
        def device(self) -> Any:
            return types.SimpleNamespace(type="cuda", index=self.device_id)

        def detach(self) -> Any:
            """Another tensor of the same memory."""
            return Tensor(library, self.shape, self.dtype, self.device_id, self.memory, self.strides, self.offset)

        def _is_zerotensor(self) -> bool:
            return False

        def is_conj(self) -> bool:
            return self.conjugated is not None

        is_neg = _is_zerotensor

        def resolve_conj(self) -> Any:
            return self.conjugated(self)  # type: ignore[misc]

        def resolve_neg(self) -> Any:
            return self

        def record_stream(self, s: Any) -> None:
            library.recorded.append((self.address, s.cuda_stream))

    return Tensor


def torch(library: Library, *, table: bool = True) -> Any:
    """torch, as far as fanin calls it for a CUDA tensor."""
    streams.of_torch.clear()  # handles of another driver
    module: Any = types.ModuleType("torch")
    Tensor = torch_tensor(library)

    class ExternalStream:
        __module__ = "torch.cuda"

        def __init__(self, handle: int, device: int = 0) -> None:
            assert handle > 1, "torch knows the legacy default stream by another number"
            self.cuda_stream, self.device_index = handle, device
            self.stream_id = handle

    class Stream(ExternalStream):
        """One of torch's own pool."""

        __module__ = "torch.cuda"

        def __init__(self, handle: int, device: int = 0) -> None:
            super().__init__(handle, device)
            self.stream_id = handle | 1

    def default_stream(device: int) -> Any:
        made = ExternalStream(2, device)
        made.cuda_stream = made.stream_id = 0
        return made

    def current_stream(device: int) -> Any:
        handle = library.stream(device)
        return Stream(handle, device) if handle > 1 else default_stream(device)

    if table:
        made, Tensor.__dlpack_c_exchange_api__ = table_for(library, Tensor)  # type: ignore[attr-defined]
        _forever.append((made, Tensor))
    module.Tensor = Tensor
    module._is_functional_tensor = lambda x: False
    module._C = types.SimpleNamespace(_functorch=types.SimpleNamespace(is_functorch_wrapped_tensor=lambda x: False))
    module.cuda = types.SimpleNamespace(
        ExternalStream=ExternalStream,
        Stream=Stream,
        default_stream=default_stream,
        current_stream=current_stream,
        stream=lambda s: library.on_handle(s.device_index, s.cuda_stream),
    )
    dlpack = types.SimpleNamespace(
        to_dlpack=lambda x: Offered(x, versioned=False).capsule(), from_dlpack=lambda c: adopt(library, Tensor, c)
    )
    module.utils = types.SimpleNamespace(dlpack=dlpack)
    module.autograd = types.SimpleNamespace(graph=types.SimpleNamespace(increment_version=lambda x: None))
    return module
