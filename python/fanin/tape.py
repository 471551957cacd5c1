"""A small reverse-mode array library: each operation is a `fanin.Node`, each parameter a `fanin.Leaf`.

    w = tape.parameter(np.ones((3, 4)))
    loss = tape.tanh(tape.array(np.ones((2, 3))) @ w).mean()
    tape.backward(loss)
    w.grad                                        # an ndarray of shape (3, 4)

Derivatives are written in the operations of this module, so a pass may record itself and be differentiated again:

    [slope] = tape.grad(loss, [w], create_graph=True)
    [curve] = tape.grad((slope * v).sum(), [w])   # a Hessian-vector product

On a simulated machine the same program runs late, on the streams that are current when an operation is called:

    with fanin.sim.Machine(devices=2) as m:
        d0, d1 = tape.devices(m)
        w = tape.parameter(np.ones((3, 4)), d0)
        with fanin.stream(m.stream(device=0)):    # this operation runs there, and so does its backward (E4)
            y = tape.array(x, d0) @ w

The module reads from top to bottom:

1. Where: devices, streams, kernels.
2. Values.
3. The class of operations.
4. Operations.
5. The pass backward.
6. A step recorded once, and replayed.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

import fanin
from fanin import _array, _core, options
from fanin._checks import flag, function, integer, number, sequence
from fanin._interop.protocols import DType, NDArray
from fanin._words import counted, names_nearest, type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: Whether a function of a graph tree is running; never without fanin.graph.
_in_graph_tree: Callable[[], bool] = getattr(_core, "cpu_wants_handles", lambda: False)
NUMPY_1 = np.lib.NumpyVersion(np.__version__) < "2.0.0"
Shape = tuple[int, ...]
Array = NDArray | _core.Array  # on the CPU, or on a device of a machine
Gradient = Array | fanin.Sparse
Places = Sequence[_core.Array]  # on a machine, all of them
Stream = fanin.Stream | None  # None: the CPU, which has none

# ---------------------------------------------------------------- 1. Where: devices, streams, kernels


@dataclass(frozen=True)
class Device:
    """Where arrays lie and work is done: the CPU, or a device of a simulated machine."""

    machine: fanin.sim.Machine | None = None
    index: int = 0

    @property
    def name(self) -> str:
        """As fanin calls it: "cpu", "sim:0"."""
        return "cpu" if self.machine is None else f"sim:{self.index}"

    def current(self) -> Stream:
        """Its current stream on this thread; None on the CPU."""
        return None if self.machine is None else fanin.current_stream(self.name)

    def put(self, value: npt.ArrayLike) -> Array:
        """A copy of an ndarray there."""
        if self.machine is None and _in_graph_tree():
            if not plain(value):
                here = value if isinstance(value, _core.Array) else np.asarray(value)
                return cast(Array, _array.cpu_arrays().copy_as_it_lies(here))
            numbers = np.asarray(value)
            return run(partial(copy, numbers), shape=numbers.shape, dtype=numbers.dtype)
        if self.machine is None:
            return np.array(value)
        put: _core.Array = self.machine.array(value, device=self.index)
        return put

    def empty(self, shape: Shape, dtype: npt.DTypeLike) -> Array:
        """Memory there, to be written."""
        if self.machine is not None:
            return self.machine.empty(shape, dtype, device=self.index)
        if _in_graph_tree():
            return _core.cpu_empty(shape, np.dtype(dtype))
        return np.empty(shape, dtype)

    def of(self, x: Array) -> Device:
        """The device on which an array lies, this one or another of its machine."""
        name = getattr(x, "device", "cpu")
        return self if name == self.name else Device(self.machine, int(name.partition(":")[2]))


cpu = Device()


def devices(machine: fanin.sim.Machine) -> list[Device]:
    """The devices of a machine, in order."""
    return [Device(machine, i) for i in range(machine.devices)]


class _Here(threading.local):
    """Where the kernels of the operation at hand run, and what they are called."""

    device: Device = cpu
    name: str = "kernel"
    back: bool = False  # in the backward of an operation, which does not record itself


_here = _Here()


class at(_core.Block):
    """Kernels run on this stream (on the CPU: at once) until the block ends."""

    def __init__(self, device: Device, name: str, stream: Stream, back: bool = False) -> None:
        self.now = {"device": device, "name": name, "back": back}
        self.before: dict[str, object] = {}
        self.stream = None if stream is None else fanin.stream(stream)
        self.streams = False  # whether that is the current stream

    def _begin(self) -> None:
        self.before = {"device": _here.device, "name": _here.name, "back": _here.back}
        vars(_here).update(self.now)
        if self.stream is not None:
            self.stream.__enter__()
            self.streams = True

    def _end(self, error: BaseException | None) -> None:
        vars(_here).update(self.before)
        if self.stream is not None and self.streams:
            self.streams = False
            self.stream.__exit__(None, None, None)


def launch(fn: Callable[..., object], reads: Sequence[Array], writes: Sequence[Array]) -> None:
    """Do `fn(*reads, *writes)` here."""
    machine, stream = _here.device.machine, _here.device.current()
    if machine is None or stream is None:
        if _in_graph_tree():
            no_numbers_of_numpy(_here.name, reads)
            _core.cpu_launch(fn, _here.name, tuple(reads), tuple(writes))
        else:
            fn(*reads, *writes)
    else:
        machine.launch(stream, fn, reads=cast(Places, reads), writes=cast(Places, writes), name=_here.name)


def run(fn: Callable[..., object], *reads: Array, shape: Shape | None = None,
        dtype: npt.DTypeLike | None = None, device: Device | None = None) -> Array:  # fmt: skip
    """Make an array that a kernel `fn(*reads, out)` fills, by default of the reads' common shape and dtype."""
    shape = np.broadcast_shapes(*(x.shape for x in reads)) if shape is None else shape
    out = (device or _here.device).empty(shape, dtype or common(x.dtype for x in reads))
    launch(fn, reads, [out])
    return out


def common(dtypes: Iterable[DType]) -> DType:
    """The dtype to which all promote."""
    return np.result_type(*dict.fromkeys(dtypes))  # NumPy takes long for each


def no_numbers_of_numpy(name: str, xs: Iterable[object]) -> None:
    """CaptureError for NumPy's numbers, and arrays of types of their own, in a function of a graph tree."""
    for x in xs:
        if isinstance(x, np.ndarray | np.generic) and type(x) is not np.ndarray:
            raise fanin.CaptureError(
                f"{name}: {x!r}, {type_of(x)}, may depend on values that change between replays:"
                " pass it as an ndarray, or make it by operations"
            )


def plain(x: object) -> bool:
    """Whether something is made of Python's numbers alone."""
    return all(map(plain, x)) if isinstance(x, list | tuple) else type(x) in (bool, int, float, complex)


def copy(x: NDArray, out: NDArray) -> None:
    """A kernel."""
    out[...] = x


def reshaped(x: Array, shape: Shape) -> Array:
    """x in another shape: a view where that can be, else a copy."""
    try:
        return x.reshape(shape)
    except ValueError:
        return run(copy, x).reshape(shape)


def expanded(x: Array, shape: Shape) -> Array:
    """A view of x that repeats itself (A13)."""
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.broadcast_to(*shape)


def moved(x: Gradient | fanin.Partial, device: Device) -> Gradient | fanin.Partial:
    """x on a device: itself if it lies there, else a copy, made here. Sparse and partial ones part by part."""
    if isinstance(x, fanin.Partial):
        return fanin.Partial(moved(x.values, device), x.at, x.shape)
    if isinstance(x, fanin.Sparse):
        return fanin.Sparse(x.format, tuple(moved(part, device) for part in x.parts), x.shape)
    return x if getattr(x, "device", "cpu") == device.name else run(copy, x, device=device)


# ---------------------------------------------------------------- 2. Values

Edge = tuple[fanin.Node | fanin.Leaf, int]


class Var:
    """An array, the (node, slot) that gets its gradient (None: a constant), and the stream on which it is ready (None:
    everywhere).
    """

    edge: Edge | None = None
    stream: Stream = None
    ready: fanin.Event | None = None  # the event after it
    __array_ufunc__ = None  # ndarray + Var is Var.__radd__

    def __init__(self, data: Array, device: Device) -> None:
        self.data, self.device = data, device

    @property
    def shape(self) -> Shape:
        """The shape of its array."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> DType:
        """The dtype of its array."""
        return self.data.dtype

    @property
    def node(self) -> fanin.Node | fanin.Leaf | None:
        """The node that made it, a parameter's leaf; None: it is a constant."""
        return self.edge and self.edge[0]

    def __fanin_parts__(self) -> list[Array]:
        return [self.data]

    def made_on(self, stream: Stream) -> Var:
        """Record that `stream` makes the array; return self."""
        self.stream, self.ready = stream, stream.record() if stream is not None and not _here.back else None
        return self

    def needed_on(self, stream: Stream) -> Array:
        """Its array, for work on `stream`, which waits where it must."""
        if self.stream is not None and stream is not None and self.stream != stream:
            stream.wait(self.ready or self.stream)
        return self.data

    def numpy(self) -> NDArray:
        """Its value on the host."""
        if _in_graph_tree():
            raise fanin.CaptureError(
                f"{self!r}.numpy(): a step that is recorded cannot read values on the host: what is done with them"
                " would not be done again. Return the Var"
            )
        array = self.needed_on(self.device.current())
        return array if isinstance(array, np.ndarray) else array.numpy()

    def leaf(self) -> fanin.Leaf:
        """The leaf that keeps the gradient; TypeError if this is no parameter."""
        if not isinstance(self.node, fanin.Leaf):
            raise TypeError(f"{self!r} is no parameter and keeps no gradient: tape.grad(loss, [x]) gives it")
        return self.node

    @property
    def grad(self) -> Any:  # as the parameter's arrays are
        """The gradient of a parameter, summed over all passes since it was None; a Var where one recorded itself."""
        return self.leaf().grad

    @grad.setter
    def grad(self, value: Gradient | Var | None) -> None:
        self.leaf().grad = value

    def register_hook(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the finished sum of this value's gradients, once in each pass; a result other than None
        replaces it.
        """
        if self.edge is None:
            raise TypeError(f"{self!r} is a constant: no gradient gets here")
        function("register_hook: fn", fn)
        self.edge[0].register_hook(fn, self.edge[1])

    def __repr__(self) -> str:
        return f"<Var {self.shape} {self.dtype} on {self.device.name}, {self.node or 'constant'}>"

    def __add__(self, other: Var | npt.ArrayLike) -> Var:
        return add(self, other)

    def __radd__(self, other: npt.ArrayLike) -> Var:
        return add(other, self)

    def __sub__(self, other: Var | npt.ArrayLike) -> Var:
        return sub(self, other)

    def __rsub__(self, other: npt.ArrayLike) -> Var:
        return sub(other, self)

    def __mul__(self, other: Var | npt.ArrayLike) -> Var:
        return mul(self, other)

    def __rmul__(self, other: npt.ArrayLike) -> Var:
        return mul(other, self)

    def __matmul__(self, other: Var | npt.ArrayLike) -> Var:
        return matmul(self, other)

    def __rmatmul__(self, other: npt.ArrayLike) -> Var:
        return matmul(other, self)

    def __neg__(self) -> Var:
        return neg(self)

    @property
    def T(self) -> Var:
        """The transpose: the axes in reverse order."""
        return transpose(self)

    def reshape(self, *shape: int) -> Var:
        """Return it in another shape with as many elements."""
        for n in shape:
            integer("reshape: shape", n)
        return reshape(self, shape)

    def __getitem__(self, at: Any) -> Var:
        """Return a part of it, by a basic index: integers, slices, None and `...`."""
        return sliced(self, basic("index", at))

    __iter__ = None  # a Var is no sequence: `split` gives its parts

    def sum(self, axis: Axis = None) -> Var:
        """Return the sum over some axes (default: all)."""
        return total(self, axis)

    def mean(self, axis: Axis = None) -> Var:
        """Return the mean over some axes (default: all)."""
        return total(self, axis, share(math.prod(self.shape[i] for i in axes_of(self, axis))))

    def to(self, device: Device, on: Device | None = None, stage: Array | None = None) -> Var:
        """Copy it to another device, as the function `to` does."""
        return to(self, device, on, stage)


def array(value: npt.ArrayLike, device: Device = cpu) -> Var:
    """A constant: a copy of an ndarray on a device."""
    return put_on("array", value, device)


def put_on(call: str, value: npt.ArrayLike, device: Device) -> Var:
    """A copy of the numbers of a call on a device."""
    check_device(call, device)
    if not isinstance(value, _core.Array):
        checked = numbers(call, value)
        if not _in_graph_tree():  # which reads the value as it was given
            value = checked
    return Var(device.put(value), device)


def parameter(value: npt.ArrayLike, device: Device = cpu, name: str = "parameter") -> Var:
    """Make a value whose gradients are summed into its `.grad`, on the stream that is current now."""
    if not isinstance(name, str):
        raise TypeError(f"parameter: name: expected a str, got {type_of(name)}")
    var = put_on("parameter", value, device)
    if var.dtype.kind in "iub":
        raise ValueError(f"parameter: value: expected real or complex floats, got {var.dtype}: x.astype(float)")
    var.edge = fanin.Leaf(var.data, name=name, stream=device.current()), 0
    return var


def check_device(call: str, device: object) -> None:
    """Check that an argument is a device of this module."""
    if not isinstance(device, Device):
        raise TypeError(f"{call}: device: expected a fanin.tape.Device, got {type_of(device)}")


def check_value(call: str, what: str, x: object) -> None:
    """Check that an argument has a shape, as a Var and an array have."""
    if not hasattr(x, "shape"):
        raise TypeError(f"{call}: {what}: expected a Var or an array, got {type_of(x)}")


def check_var(call: str, what: str, x: object) -> None:
    """Check that an argument is a Var."""
    if not isinstance(x, Var):
        raise TypeError(f"{call}: {what}: expected a Var, got {type_of(x)}")


def numbers(name: str, x: object) -> NDArray:
    """An array of numbers as an ndarray; TypeError for everything that would lose its meaning, by the name of the
    operation.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, whose mask would be lost: pass x.filled(value)")
    if isinstance(x, np.ndarray) and type(x) not in (np.ndarray, np.memmap):
        raise TypeError(f"{name}: got {type_of(x)}, whose own operators would not be used: pass np.asarray(x)")
    if isinstance(x, Var):
        raise TypeError(f"{name}: expected an array of numbers, got {x!r}")
    made = np.asarray(x)
    if made.dtype.kind not in NUMBERS and (made.dtype.kind != "V" or made.dtype.type is np.void):  # V: bfloat16, too
        got = f"{type_of(x)} of {made.dtype}" if made.shape else type_of(x)
        raise TypeError(f"{name}: expected numbers or an array of numbers, got {got}")
    return made


def plain_operand(name: str, x: object) -> object:
    """An input of an operation that has no Var: an array or a number as it is, else an ndarray."""
    ready = x.dtype.kind != "O" if type(x) is np.ndarray else isinstance(x, int | float | np.number | _core.Array)
    return x if ready else numbers(name, x)


NUMBERS = "biufc"  # kinds of dtypes
WIDTHS = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # a kind holds those of lesser numbers


def array_of(name: str, x: object) -> NDArray:
    """`numbers` that a replay may read, where a step is recorded."""
    if _in_graph_tree():
        no_numbers_of_numpy(name, [x])
    return numbers(name, x)


def fitted(name: str, x: object, like: Var) -> NDArray:
    """An ndarray of a Var's dtype, for an operation. Numbers of a wider kind do not fit, such as floats into integers,
    nor integers beyond its range.
    """
    made, wanted = numbers(name, x), like.dtype
    own = made.dtype
    if WIDTHS[own.kind] > WIDTHS[wanted.kind]:
        raise TypeError(f"{name}: {own} beside {like!r} would lose values in {wanted}: make that one of {own}")
    if own.kind in "iu" and wanted.kind in "iu" and made.size and not np.can_cast(own, wanted):
        limits = np.iinfo(wanted)
        beyond = [n for n in (int(made.min()), int(made.max())) if not limits.min <= n <= limits.max]
        if beyond:
            raise OverflowError(
                f"{name}: {beyond[0]} beside {like!r} does not fit into {wanted}, from {limits.min} to {limits.max}:"
                f" make that one of {own}"
            )
    return made.astype(wanted, copy=False)


def update(
    fn: Callable[..., object], reads: Sequence[Var | Array], writes: Sequence[Var | Array], name: str = "update"
) -> None:
    """Change Vars or arrays in place by `fn(*reads, *writes)`, on the current stream of the first written one, a Var or
    an array on the CPU.

    That stream must be ordered after all other readers; after `backward`, it is ordered after the whole pass. A later
    pass over an operation whose derivative reads what is written here is a RuntimeError.
    """
    device = writes[0].device if isinstance(writes[0], Var) else cpu
    stream = device.current()
    for x in writes:
        _writes.add(
            x.data if isinstance(x, Var) else x, device, name if name != "update" else getattr(fn, "__name__", "update")
        )
    with at(device, name, stream):
        launch(fn, *([x.needed_on(stream) if isinstance(x, Var) else x for x in xs] for xs in (reads, writes)))
    for x in writes:
        if isinstance(x, Var):
            x.made_on(stream)


class _Writes:
    """The newest write of `update` to each piece of memory. A view shares the memory of its base."""

    def __init__(self) -> None:
        self.count = 0  # of all writes
        self._lock = threading.Lock()
        self._of_host: dict[int, tuple[int, str, object]] = {}  # by the id of the ndarray that owns the memory
        self._of_devices = weakref.WeakKeyDictionary[object, dict[tuple[str, int, int], tuple[int, str]]]()

    def add(self, x: Array, device: Device, by: str) -> None:
        """Count a write to the memory of x."""
        with self._lock:
            self.count += 1
            if isinstance(x, np.ndarray):
                base = owner(x)
                key = id(base)
                # No Python runs in it, in which an exception, as of Ctrl-C, would be lost.
                end = weakref.ref(base, partial(self._of_host.pop, key))
                self._of_host[key] = self.count, by, end
            else:
                self._of_devices.setdefault(device.machine or cpu, {})[extent(x)] = self.count, by

    def after(self, x: object, device: Device, count: int) -> str | None:
        """The name of the newest write to the memory of x, if it came after so many writes."""
        if isinstance(x, np.ndarray):
            number, by, _ = self._of_host.get(id(owner(x)), (0, "", None))
            return by if number > count else None
        if not isinstance(x, _core.Array):
            return None
        where, low, high = extent(x)
        for (there, start, end), (number, by) in self._of_devices.get(device.machine or cpu, {}).items():
            if number > count and where == there and low < end and start < high:
                return by
        return None


_writes = _Writes()


def owner(x: NDArray) -> NDArray:
    """The ndarray whose memory x is a view of; x itself if it is none."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def extent(x: _core.Array) -> tuple[str, int, int]:
    """The device of an array, and the addresses between which it lies."""
    reach = [(n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)]
    low = x.address + sum(r for r in reach if r < 0)
    return x.device, low, x.address + sum(r for r in reach if r > 0) + x.itemsize


# ---------------------------------------------------------------- 3. The class of operations

Vjp = Callable[..., object]


def weak(x: Any, dtype: DType) -> Any:
    """A Python number as NumPy 2 promotes it: NumPy 1 makes float64 of a float32 scalar times a Python number."""
    return dtype.type(x) if NUMPY_1 and type(x) is float and dtype.kind in "fc" else x


def promoted(args: Sequence[Any]) -> Sequence[Any]:
    """Arguments with Python numbers as NumPy 2 promotes them."""
    dtypes = [x.dtype for x in args if hasattr(x, "dtype")] if NUMPY_1 else []
    return [weak(x, np.result_type(*dtypes)) for x in args] if dtypes else args


def of_numpy_2(forward: Callable[..., object]) -> Callable[..., object]:
    """The function with its Python numbers promoted as by NumPy 2."""
    return (lambda *args: forward(*promoted(args))) if NUMPY_1 else forward


Me = list[weakref.ref[fanin.Node]]  # of the node itself, once it is there


class Op:
    """An operation with one result, called with its inputs, one for each of `vjps`, and with further arguments.

    `forward(*arrays)` returns an ndarray. `vjps[i](g, y, *args)` makes, of the result's gradient g, the gradient of
    input i, or one that broadcasts from it: the input's slot sums it to the shape (A9). y is the result if `result` is
    true. They work on arrays and on Vars. `shape(*args)` is the shape of the result, for devices, where it is needed
    before the result; without it, inputs broadcast. `view`: whether the result is a view. `reads[i]`: the places of the
    arguments whose values `vjps[i]` reads, -1 for the result; default: all.

    In a graph tree the result of an operation of your own lies in C order. Inputs and index arrays that are no Vars are
    read when the operation is called: those that a derivative reads are copied. Arguments that it reads are guarded: a
    write by `update` before the pass is a RuntimeError.
    """

    def __init__(self, name: str, forward: Callable[..., object], *vjps: Callable[..., Any], view: bool = False,
                 shape: Callable[..., Shape] | None = None, result: bool = False,
                 reads: Sequence[Sequence[int]] | None = None) -> None:  # fmt: skip
        self.name, self.forward, self.vjps, self.n = name, forward, vjps, len(vjps)
        self.compute = of_numpy_2(forward)
        self.view, self.shape, self.result, self.reads = view, shape, result, reads
        self.ours = getattr(forward, "__module__", "") == __name__  # it may run on other values, to see its result

    def __call__(self, *args: object) -> Var:  # of arrays alone an array: in a pass that does not record itself
        device, others = None, False
        edges: list[Edge] = []
        live: list[int] = []
        arrays: list[object] = []
        for x in args:
            if type(x) is Var:
                device = device or x.device
                if x.edge and len(arrays) < self.n:
                    edges.append(x.edge)
                    live.append(len(arrays))
                x = x.data
            elif type(x) is not float and type(x) is not int and (len(arrays) < self.n or type(x) is np.ndarray):
                others = True
            arrays.append(x)
        if device is None:
            if others:
                args = tuple([plain_operand(self.name, x) for x in args[: self.n]]) + args[self.n :]
            return cast(Var, self.in_tree(args) if _in_graph_tree() else self.compute(*args))
        if others:
            args = self.admitted(args, live)
            arrays = [x.data if type(x) is Var else x for x in args]
        if device.machine is not None or _in_graph_tree():
            return self.on_device(device, args, live)
        data = self.compute(*arrays)
        y = Var(data if type(data) is np.ndarray else np.asarray(data), device)
        if edges:
            me: Me | None = [] if len(live) > 1 else None  # one object less for each node of one input
            result = y.data if self.result else None
            count = _writes.count
            saved: Saved = (count, self.digests(arrays, result, live)) if options.debugging else count
            fn = partial(gradients, self.vjps[live[0]], arrays, result, self, args, live, me, saved)
            node = fanin.Node(fn, 1, edges, slots=(y.data,), name=self.name)
            if me is not None:
                me.append(weakref.ref(node))
            y.edge = node, 0
        return y

    def admitted(self, args: Sequence[object], live: Sequence[int]) -> tuple[object, ...]:
        """The arguments with inputs that are no Vars as ndarrays of the first Var's dtype, and copies of arrays that a
        derivative reads: their owner may write to them.
        """
        if _in_graph_tree():
            no_numbers_of_numpy(self.name, args)
        like = next((x for x in args[: self.n] if type(x) is Var), None)
        copies = not _in_graph_tree()  # which refuses writes that it does not record
        made = list(args)
        for i, x in enumerate(args):
            kind = type(x)
            if kind is Var or kind is float or kind is int or isinstance(x, _core.Array):
                continue
            fits = isinstance(x, np.ndarray) and kind is np.ndarray and (like is None or x.dtype == like.data.dtype)
            if i < self.n and not fits:
                made[i] = fitted(self.name, x, like) if like else numbers(self.name, x)
            if copies and made[i] is x and isinstance(x, np.ndarray):
                read = any(i in self.places(j, args) for j in live)
                made[i] = x.copy("K") if read else x
        return tuple(made)

    def places(self, i: int, args: Sequence[object]) -> Sequence[int]:
        """The places of the arguments that the i-th derivative reads, -1 for the result."""
        return range(-1, len(args)) if self.reads is None else self.reads[i]

    def read(self, live: Sequence[int], need: Sequence[bool], args: Sequence[object], records: bool) -> set[int]:
        """The places that the needed derivatives read now; a pass that records itself makes the result again."""
        read = {place for i, n in zip(live, need, strict=True) if n for place in self.places(i, args)}
        return read | set(range(self.n)) if records and self.result else read

    def digests(self, arrays: Sequence[object], result: object, live: Sequence[int]) -> dict[int, int]:
        """Of each argument that a derivative reads: a digest of its bytes."""
        read = {place for i in live for place in self.places(i, arrays)}
        values = {place: result if place < 0 else arrays[place] for place in read}
        return {place: hash(x.tobytes()) for place, x in values.items() if isinstance(x, np.ndarray)}

    def check(self, args: Sequence[object], arrays: Sequence[object], result: object, read: Iterable[int],
              saved: Saved, device: Device) -> None:  # fmt: skip
        """RuntimeError for a write, since the operation was called, to what its derivatives read."""
        count, digests = saved if isinstance(saved, tuple) else (saved, {})
        for place in sorted(set(read)):
            x = result if place < 0 else arrays[place]
            by = _writes.after(x, device, count)
            if by is None and (place not in digests or hash(cast(NDArray, x).tobytes()) == digests[place]):
                continue
            what = "its result" if place < 0 else f"its argument {place}, {args[place]!r},"
            by = "a write without tape.update (found by debug=True)" if by is None else f"tape.update of {by!r}"
            raise RuntimeError(
                f"{self.name}: {by} has changed {what} after {self.name} was called, and the derivative needs the value"
                f" of then: run the pass before the write, call {self.name} again after it, or give it a copy,"
                " x.to(x.device)"
            )

    def recorded(self, args: Any, live: list[int], need: Sequence[bool], g: Var) -> list[Var | None]:
        """The gradients of some inputs as Vars. The result, if needed, is made again, so that it leads back."""
        with at(_here.device, _here.name, None):
            y = self(*args) if self.result else None
            vjps = [self.vjps[i] if n else None for i, n in zip(live, need, strict=True)]
            return [vjp and sum_to(vjp(g, y, *args), args[i].shape) for i, vjp in zip(live, vjps, strict=True)]

    def on_device(self, device: Device, args: Any, live: list[int]) -> Var:
        """Return the result, computed by a kernel on `device`, with a node that computes the gradients there."""
        if device.machine is not None:  # kernels run late, when the caller may have written into his own
            args = [x.copy() if type(x) is np.ndarray else x for x in args]

        saved, data = _writes.count, [x.data if type(x) is Var else x for x in args]

        def back(grads: Sequence[Any], need: Sequence[bool]) -> list[Any]:
            if saved != _writes.count:
                read = self.read(live, need, args, records=not _here.back)
                self.check(args, data, y[0] and y[0].data, read, saved, device)
            if not _here.back:
                return self.recorded(held(args, data), live, need, grads[0])
            xs = [Var(a, x.device) if type(x) is Var else x for x, a in zip(args, data, strict=True)]  # without edges
            grads = [dense(g) for g in grads]
            return [self.vjps[i](*grads, *y, *xs) if n else None for i, n in zip(live, need, strict=True)]

        inputs = [x for x in args if type(x) is Var]
        [made] = step(self.name, lambda *xs: [self.queued(args, xs)], inputs, [args[i] for i in live], back, device)
        y = [Var(made.data, device) if self.result else None]
        return made

    def queued(self, args: Any, arrays: Sequence[Array]) -> Array:
        """The result on a device, where a kernel will make it; `arrays` are the data of the Vars among `args`."""
        if self.view:
            return cast(Array, self.forward(*arrays, *args[1:]))
        if _here.device.machine is None:
            data = iter(arrays)
            return self.in_tree([next(data) if type(x) is Var else x for x in args])
        return self.on_arrays(args, [i for i, x in enumerate(args) if type(x) is Var], arrays)

    def in_tree(self, xs: Sequence[Any]) -> Array:
        """The result in a function of a graph tree on the CPU, which a kernel fills. One of NumPy or of this module has
        the layout that NumPy gives it, so that later sums have the same bits.
        """
        no_numbers_of_numpy(self.name, xs)
        if self.view:
            return cast(Array, self.forward(*xs))
        if isinstance(self.forward, np.ufunc):
            return cast(Array, _array.cpu_arrays().of_ufunc(self.forward, "__call__", *promoted(xs)))
        places = [i for i, x in enumerate(xs) if isinstance(x, _core.Array | np.ndarray)]
        arrays = [xs[i] for i in places]
        if not self.ours:
            return self.on_arrays(xs, places, arrays)
        out: Array = _array.cpu_arrays().like(self.compute, xs)
        launch(self.kernel(xs, places), arrays, [out])
        return out

    def on_arrays(self, args: Sequence[Any], places: list[int], arrays: Sequence[Array]) -> Array:
        """The result of a kernel on the arguments at `places`, of the shape that `shape` and the inputs give."""
        of = args[: self.n or 1]
        shape = self.shape(*args) if self.shape else np.broadcast_shapes(*(getattr(x, "shape", ()) for x in of))
        dtype = np.result_type(*(getattr(x, "dtype", x) for x in of))
        return run(self.kernel(args, places), *arrays, shape=shape, dtype=dtype)

    def kernel(self, args: Sequence[object], places: list[int]) -> Callable[..., None]:
        """A kernel whose arrays are the arguments at `places` and the result."""
        fixed = [None if i in places else x for i, x in enumerate(args)]  # no Var: a kernel that waits holds no graph
        on_cpu, ours = _here.device.machine is None, self.ours

        def kernel(*views: NDArray) -> None:
            xs, out = fixed.copy(), views[-1]
            for i, view in zip(places, views, strict=False):
                xs[i] = view
            new = np.asarray(self.compute(*xs))
            if (new.shape, new.dtype) != (out.shape, out.dtype):  # which NumPy would broadcast, or convert
                raise fanin.CaptureError(
                    f"{self.name}: its result has shape {new.shape} and dtype {new.dtype}, but shape= and the inputs"
                    f" give shape {out.shape} and dtype {out.dtype}: use operations whose results have one shape and"
                    " dtype, or call this one outside"
                )
            if on_cpu and not ours and not in_order(new):
                raise fanin.CaptureError(
                    f"{self.name}: its result lies in another order of axes than C's, which a recording cannot know,"
                    " and sums of it would have other bits: return np.ascontiguousarray(result)"
                )
            out[...] = new

        return kernel


Saved = int | tuple[int, dict[int, int]]  # the number of writes when an operation was called; with debug=True, digests


def gradients(vjp: Vjp, arrays: Sequence[object], y: object, op: Op, args: Sequence[object], live: list[int],
              me: Me | None, saved: Saved, g: object) -> object:  # fmt: skip
    """The function of a node on the CPU: of arrays, or of Vars in a pass that records itself."""
    if saved != _writes.count:
        read = op.read(live, needs(me, live), args, records=type(g) is Var)
        op.check(args, arrays, y, read, saved, cpu)
    if type(g) is Var:
        return op.recorded(held(args, arrays), live, needs(me, live), g)
    if g is None:
        return [None] * len(live)
    if type(g) is fanin.Sparse:
        g = dense(g)
    if not me:
        return vjp(g, y, *arrays)  # of one input
    return [op.vjps[i](g, y, *arrays) if n else None for i, n in zip(live, needs(me, live), strict=True)]


def in_order(x: NDArray) -> bool:
    """Whether its axes lie in C's order, perhaps with gaps."""
    steps = [abs(step) for n, step in zip(x.shape, x.strides, strict=True) if n > 1]
    return steps == sorted(steps, reverse=True)


def held(args: Sequence[object], arrays: Sequence[object]) -> list[object]:
    """The arguments with the arrays that they had when the operation was called; `.data` may be another now."""

    def of(x: object, data: object) -> object:
        if type(x) is not Var or x.data is data:
            return x
        then = Var(cast(Array, data), x.device)
        then.edge = x.edge
        return then

    return [of(x, data) for x, data in zip(args, arrays, strict=True)]


def needs(me: Me | None, edges: Sequence[object]) -> list[bool]:
    """Which edges need a gradient. `me`: a weak reference to the node, whose function must not hold it, so that it is
    freed at once.
    """
    node = me[0]() if me else None
    return [True] * len(edges) if node is None else list(map(node.needs, range(len(edges))))


def step(name: str, forward: Callable[..., Sequence[Array]], inputs: Sequence[Var], wanted: Sequence[Var],
         back: Callable[[Sequence[Any], Sequence[bool]], object], device: Device) -> list[Var]:  # fmt: skip
    """An operation of several results, or on a device. `back(grads, need)` gets Vars and returns Vars or arrays for the
    inputs that are `wanted`; while `_here.back` is set, nothing is recorded.
    """
    if any(x.device.machine is not device.machine for x in inputs):
        raise ValueError(f"{name}: {', '.join(map(repr, inputs))} lie on no one machine")
    stream, edges = device.current(), [x.edge for x in wanted]
    me: Me = []
    arrays = [x.data if stream is None else x.needed_on(stream) for x in inputs]
    with at(device, _here.name if _here.back else name, stream, _here.back):
        made = [made_var(y, device, stream) for y in forward(*arrays)]
    shapes, there = [x.data.shape for x in wanted], [y.device for y in made]
    lie = [] if device.machine is None else [x.device for x in wanted]

    def fn(*grads: Any) -> object:
        records = Var in map(type, grads)
        if all(g is None for g in grads):
            return [None] * len(edges)
        with at(device, name if records else f"{name}'", stream, not records):
            own = [g if g is None or records else Var(g, d) for g, d in zip(grads, there, strict=True)]
            gs = back(own, needs(me, edges))
            if not isinstance(gs, list | tuple) or len(gs) != len(edges):
                return gs  # the engine reports the error (V1)
            if records:
                return [sum_to(g, tuple(shape)) if type(g) is Var else g for g, shape in zip(gs, shapes, strict=True)]
            data = [g.data if type(g) is Var else g for g in gs]
            if not lie:
                return data
            return [g if _core.is_no_gradient(g) else moved(g, d) for g, d in zip(data, lie, strict=True)]

    if any(edges):
        node = fanin.Node(fn, edges=edges, slots=slots_of(made, device), name=name, stream=stream)
        me.append(weakref.ref(node))
        for slot, y in enumerate(made):
            y.edge = node, slot
    return made


def made_var(y: Array, device: Device, stream: Stream) -> Var:
    """A result of work on `stream` of `device`."""
    if device is cpu:
        return Var(y, cpu)
    return Var(y, device.of(y)).made_on(stream)


def slots_of(made: Sequence[Var], device: Device) -> list[Any]:
    """The slots of a node with these results; results that are alike share one declaration."""
    if device is cpu:
        return [y.data for y in made]
    known: dict[tuple[Shape, DType, str | None], fanin.Slot] = {}
    slots, name = [], device.name
    for y in made:
        there = y.device is device or y.device == device
        key = y.shape, y.dtype, name if there else None
        if key not in known:
            known[key] = fanin.Slot(*key)
        slots.append(known[key])
    return slots


def custom(name: str, forward: Callable[..., Sequence[Array]], inputs: Sequence[Var],
           back: Callable[[list[Any], list[bool]], object], device: Device | None = None) -> list[Var]:  # fmt: skip
    """An operation of your own: `forward(*arrays)` gives arrays; `back(grads, need)` a gradient, or None, for each
    input. Both make arrays by NumPy, or by `run`; in a pass that records itself `back` gets Vars, and gives Vars.

    It runs on the current stream of `device` (default: the first input's), wherever the arrays lie: others are read
    over the link.
    """

    def unwrapped(grads: Sequence[object], need: Sequence[bool]) -> object:
        return back([g.data if _here.back and type(g) is Var else g for g in grads], list(need))

    return step(name, forward, inputs, inputs, unwrapped, device or inputs[0].device)


def dense(g: object) -> object:
    """A gradient for derivatives: the sum of an embedding's gradients as an array, any other unchanged."""
    data: object = g.data if type(g) is Var else g
    if type(data) is not fanin.Sparse or data.format != "coo":
        return g
    made = run(scatter, *data.parts, shape=data.shape, dtype=data.parts[1].dtype)
    return Var(made, g.device) if type(g) is Var else made


def scatter(index: NDArray, values: NDArray, out: NDArray) -> None:
    """A kernel."""
    out.fill(0)
    np.add.at(out, tuple(index), values)


def sum_to(x: Var, shape: Shape) -> Var:
    """A9, recorded: x summed to a shape from which it was broadcast."""
    has, lead = x.shape, len(x.shape) - len(shape)
    if has == shape:
        return x
    if lead < 0 or any(n not in (1, has[lead + i]) for i, n in enumerate(shape)):
        wanted = f"a gradient of shape {shape} (or of a shape that is broadcast from it)"
        raise ValueError(f"expected {wanted}, got {has} (A9)")
    return reshape(total(x, [i for i in range(len(has)) if i < lead or has[i] != shape[i - lead]]), shape)


# ---------------------------------------------------------------- 4. Operations

NONE = ((),)  # of one derivative that reads no values
neg: Op = Op("neg", np.negative, lambda g, y, a: -g, reads=NONE)
add = Op("add", np.add, lambda g, y, a, b: g, lambda g, y, a, b: g, reads=NONE * 2)
sub = Op("sub", np.subtract, lambda g, y, a, b: g, lambda g, y, a, b: -g, reads=NONE * 2)
mul = Op("mul", np.multiply, lambda g, y, a, b: g * b, lambda g, y, a, b: g * a, reads=((1,), (0,)))
product = Op("matmul", np.matmul, lambda g, y, a, b: g @ b.T, lambda g, y, a, b: a.T @ g,
            shape=lambda a, b: (a.shape[0], b.shape[1]), reads=((1,), (0,)))  # fmt: skip


def matmul(a: object, b: object) -> Var:
    """Of matrices: (n, k) with (k, m) is (n, m)."""
    a, b = (x if isinstance(x, Var | _core.Array) else array_of("matmul", x) for x in (a, b))
    shapes = [tuple(getattr(x, "shape", ())) for x in (a, b)]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][0]:
        raise ValueError(
            f"matmul: expected two matrices, got shapes {shapes[0]} and {shapes[1]}; (n, k) with (k, m) is (n, m)"
        )
    return product(a, b)


_ones: dict[DType, NDArray] = {}  # by dtype: NumPy takes longer for a number of Python


def tanh_slope(g: Any, y: Any, a: object) -> object:
    """The derivative of tanh by its result, times g."""
    square = y * y
    if type(square) is not np.ndarray or type(g) is not np.ndarray:
        return g * (1 - square)
    dtype = square.dtype
    if g.dtype is not dtype or g.strides != square.strides:
        return g * (1 - square)
    one = _ones.get(dtype)
    if one is None:
        one = _ones[dtype] = np.ones((), dtype)
    np.subtract(one, square, square)
    return np.multiply(g, square, square)


tanh = Op("tanh", np.tanh, tanh_slope, result=True, reads=((-1,),))
positive = Op("positive", lambda x: (x > 0).astype(x.dtype))
relu = Op("relu", lambda x: np.maximum(x, 0), lambda g, y, a: g * positive(a), reads=((0,),))
reshape: Op = Op("reshape", reshaped, lambda g, y, a, shape: reshape(g, tuple(a.shape)), view=True, reads=NONE)
expand: Op = Op("expand", expanded, lambda g, y, a, shape: g, view=True, reads=NONE)
permute: Op = Op("transpose", lambda x, axes: x.transpose(*axes),
             lambda g, y, a, axes: permute(g, np.argsort(axes).tolist()), view=True, reads=NONE)  # fmt: skip


def transpose(a: Var, axes: Sequence[int] | None = None) -> Var:
    """Permute the axes (default: reverse them)."""
    check_value("transpose", "a", a)
    return permute(a, tuple(range(len(a.shape)))[::-1] if axes is None else axes_of(a, axes, "transpose: axes"))


# Parts of an array: the gradient of each is a `fanin.Partial`, which its sum adds in its place.

At = Any  # a basic index, or a fanin.Diagonal


def read_at(x: Array, at: At) -> Array:
    """x at a basic index, or along a diagonal."""
    if isinstance(at, fanin.Diagonal):
        return cast(Array, np.diagonal(cast(NDArray, x), at.offset, at.axis1, at.axis2))
    return x[at]


def shape_at(shape: Shape, at: At) -> Shape:
    """The shape of a part."""
    return np.shape(read_at(np.broadcast_to(np.int8(0), shape), at))


def written_at(x: NDArray, at: At, shape: Shape) -> NDArray:
    """Return zeros of `shape` with x in its place."""
    return cast(NDArray, fanin.Partial(x, at, shape).dense())


def part_of(g: Var | Array, at: At, shape: Shape) -> object:
    """The gradient of a whole whose part has the gradient g; dense in a pass that records itself."""
    if type(g) is Var and not _here.back:
        return written(g, at, shape)
    return fanin.Partial(g.data if type(g) is Var else g, at, shape)


sliced: Op = Op("index", read_at, lambda g, y, a, at: part_of(g, at, tuple(a.shape)), view=True, reads=NONE)
diagonals: Op = Op("diagonal", read_at, lambda g, y, a, at: part_of(g, at, tuple(a.shape)), reads=NONE,
                   shape=lambda a, at: shape_at(tuple(a.shape), at))  # fmt: skip
written: Op = Op("written", written_at, lambda g, y, a, at, shape: read_part(g, at), reads=NONE,
                 shape=lambda a, at, shape: shape)  # fmt: skip


def read_part(a: Var, at: At) -> Var:
    """A part of a value, or of a gradient."""
    return diagonals(a, at) if isinstance(at, fanin.Diagonal) else sliced(a, at)


def basic(name: str, at: At) -> At:
    """A basic index, with its integers as Python's."""
    entries = at if isinstance(at, tuple) else (at,)
    for i in entries:
        if i is None or i is Ellipsis or isinstance(i, slice):
            continue
        if isinstance(i, bool | np.bool_ | list | np.ndarray | Var | _core.Array) or not hasattr(type(i), "__index__"):
            raise TypeError(
                f"{name}: {type_of(i)} is no basic index; expected integers, slices, None and ...; for rows by their"
                " numbers use tape.embedding or tape.gathered"
            )
    return at


def take(a: Var, i: int, axis: int = 0) -> Var:
    """The element `i` along an axis, which the result lacks."""
    check_var("take", "a", a)
    [k] = axes_of(a, integer("take: axis", axis), "take: axis")
    return a[(slice(None),) * k + (integer("take: i", i),)]


def diagonal(a: Var, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Var:
    """The diagonal of two axes, along the last axis of the result, as `numpy.diagonal` reads it."""
    check_var("diagonal", "a", a)
    one, two = axes_of(a, (axis1, axis2), "diagonal: axes")
    return diagonals(a, fanin.Diagonal(offset, one, two))


def joined(*arrays: NDArray, axis: int = 0) -> None:
    """A kernel: all but the last array, one behind the other, into the last."""
    np.concatenate(arrays[:-1], axis, arrays[-1], casting="same_kind")


def rows(a: Var, i: int, n: int) -> Var:
    """The n rows from the i-th on."""
    return sliced(a, slice(i, i + n))


def split(a: Var, parts: int) -> list[Var]:
    """Equal parts along the first axis: one node with several slots, some of which may get no gradient (S2)."""
    check_var("split", "a", a)
    integer("split: parts", parts)
    if parts < 1 or not a.shape or a.shape[0] % parts:
        raise ValueError(f"split: {a.shape[0] if a.shape else 'no'} rows cannot be cut into {parts} equal parts")
    n, shape = a.shape[0] // parts, a.shape
    places = [slice(i * n, (i + 1) * n) for i in range(parts)]

    def back(grads: Sequence[Any], need: Sequence[bool]) -> list[object]:
        gs: list[Any] = [dense(g) for g in grads]
        if not _here.back or None in gs:
            return [None if g is None else part_of(g, at, shape) for g, at in zip(gs, places, strict=True)]
        whole: Array = run(joined, *[g.data for g in gs], shape=shape)
        return [whole] + [None] * (parts - 1)

    return step("split", lambda x: [x[at] for at in places], [a], [a] * parts, back, a.device)


def concatenate(xs: Sequence[Var], axis: int = 0) -> Var:
    """The values one behind the other along an axis."""
    given = sequence("concatenate: xs", xs, "values")
    for x in given:
        check_var("concatenate", "xs", x)
    if not given:
        raise ValueError("concatenate: expected at least one value")
    first = given[0]
    [k] = axes_of(first, integer("concatenate: axis", axis), "concatenate: axis")
    shapes = [x.shape for x in given]
    before, behind = shapes[0][:k], shapes[0][k + 1 :]
    for one in dict.fromkeys(shapes):
        if len(one) != len(shapes[0]) or one[:k] != before or one[k + 1 :] != behind:
            raise ValueError(f"concatenate: shapes {shapes[0]} and {one} differ beside axis {k}")
    ends = list(itertools.accumulate([one[k] for one in shapes]))
    prefix = (slice(None),) * k
    places = [(*prefix, slice(end - one[k], end)) for one, end in zip(shapes, ends, strict=True)]
    shape = (*before, ends[-1], *behind)

    def back(grads: Sequence[Any], need: Sequence[bool]) -> list[object]:
        g = cast(Var, dense(grads[0]))
        plain = _here.back and g.device is cpu and not _in_graph_tree()
        read: Callable[[Any, At], object] = operator.getitem if plain else sliced
        whole = g.data if plain else g
        return [read(whole, at) if n else None for at, n in zip(places, need, strict=True)]

    dtype = common(x.dtype for x in given)

    def forward(*arrays: Array) -> list[Array]:
        return [run(partial(joined, axis=k), *arrays, shape=shape, dtype=dtype)]

    [made] = step("concatenate", forward, given, given, back, first.device)
    return made


def stack(xs: Sequence[Var], axis: int = 0) -> Var:
    """The values along a new axis."""
    given = sequence("stack: xs", xs, "values")
    for x in given:
        check_var("stack", "xs", x)
        if x.shape != given[0].shape:
            raise ValueError(f"stack: shapes {given[0].shape} and {x.shape} differ")
    if not given:
        raise ValueError("stack: expected at least one value")
    n, k = len(given[0].shape) + 1, integer("stack: axis", axis)
    if not -n <= k < n:
        raise ValueError(f"stack: axis {k}: expected one of {n} axes")
    k %= n
    return concatenate([reshape(x, (*x.shape[:k], 1, *x.shape[k:])) for x in given], k)


Axis = int | Sequence[int] | None


def axes_of(a: Var | Array, axis: Axis, what: str = "axis") -> Shape:
    """Return the axes as non-negative numbers (None: all)."""
    n = len(a.shape)
    is_one = hasattr(type(axis), "__index__") and not isinstance(axis, np.ndarray)
    listed: Iterable[object] = [axis]
    if axis is None:
        listed = range(n)
    elif not is_one:
        listed = sequence(what, axis, "integers")
    given = [integer(what, i) for i in listed]
    axes = tuple(i + n if i < 0 else i for i in given)
    if any(not 0 <= i < n for i in axes) or len(set(axes)) < len(axes):
        raise ValueError(f"axis {axis}: expected axes of a value of shape {tuple(a.shape)}, each of them once")
    return axes


def share(n: int) -> float:
    """Return the weight of one of n in their mean: NaN for a mean of nothing."""
    return 1 / n if n else math.nan


def add_up(x: NDArray, axes: Shape, scale: float) -> object:
    """Return the sum over `axes`, times `scale`."""
    if scale == 1:
        return x.sum(axes)
    if x.dtype == np.float16:  # whose sum may be infinite where the mean is not
        return (x.sum(axes, np.float32) * scale).astype(x.dtype)
    return x.sum(axes) * scale


def spread(g: Var | NDArray, y: object, a: Var | NDArray, axes: Shape, scale: float) -> Var:
    """One number for many: a view that repeats itself (A13)."""
    kept = tuple(1 if i in axes else n for i, n in enumerate(a.shape))
    factor = scale if type(g) is Var else weak(scale, g.dtype)
    return expand(reshape(g if scale == 1 else g * factor, kept), tuple(a.shape))


summed = Op("sum", add_up, spread,
            shape=lambda a, axes, scale: tuple(n for i, n in enumerate(a.shape) if i not in axes),
            reads=NONE)  # fmt: skip


def total(a: Var | Array, axis: Axis = None, scale: float = 1) -> Var:
    """The sum over some axes (default: all), times a number."""
    check_value("total", "a", a)
    number("total: scale", scale)
    return summed(a, axes_of(a, axis), scale)


def pool(a: Var, size: int) -> Var:
    """Of images (n, height, width, channels): the mean of each square."""
    n, h, w, c = a.shape
    return a.reshape(n, h // size, size, w // size, size, c).mean((2, 4))


def windows(x: NDArray, size: int) -> NDArray:
    """Return, for each pixel of (n, h, w, c), the size x size pixels around it, zeros outside."""
    (n, h, w, c), rim = x.shape, size // 2
    whole = np.pad(x, [(0, 0), (rim, rim), (rim, rim), (0, 0)])
    out = np.empty((n, h, w, size, size, c), x.dtype)
    for i, j in np.ndindex(size, size):
        out[:, :, :, i, j] = whole[:, i : i + h, j : j + w]
    return out


def paste(g: NDArray, size: int) -> NDArray:
    """Add the windows of each pixel up again: the transpose of `windows`."""
    (n, h, w, *_, c), rim = g.shape, size // 2
    whole = np.zeros((n, h + 2 * rim, w + 2 * rim, c), g.dtype)
    for i, j in np.ndindex(size, size):
        whole[:, i : i + h, j : j + w] += g[:, :, :, i, j]
    return whole[:, rim : rim + h, rim : rim + w]


#: Of images (n, height, width, channels): the square around each pixel, zeros beyond the edge; and its adjoint.
squares: Op = Op("patches", windows, lambda g, y, a, size: pasted(g, size),
             shape=lambda a, size: (*a.shape[:3], size, size, a.shape[3]), reads=NONE)  # fmt: skip
pasted: Op = Op("pasted", paste, lambda g, y, a, size: squares(g, size),
             shape=lambda a, size: (*a.shape[:3], a.shape[5]), reads=NONE)  # fmt: skip


def patches(a: Var, size: int) -> Var:
    """Of images (n, height, width, channels): the square around each pixel as a row (im2col)."""
    n, h, w, c = a.shape
    return reshape(squares(a, size), (n * h * w, size * size * c))


def conv2d(a: Var, kernel: Var) -> Var:
    """Images (n, height, width, c) with a kernel (size, size, c, d), size odd: images (n, height, width, d)."""
    size, _, c, d = kernel.shape
    y = patches(a, size) @ kernel.reshape(size * size * c, d)
    return y.reshape(*a.shape[:3], d)


def add_rows(g: NDArray, index: NDArray, shape: Shape) -> NDArray:
    """Return zeros of `shape` with row i of `g` added to row index[i]."""
    y = np.zeros(shape, g.dtype)
    np.add.at(y, index, g)
    return y


def read_rows(table: NDArray, index: NDArray) -> NDArray:
    """Return rows of a table."""
    if index.size and index.min() < 0:
        raise IndexError(
            f"rows of a table: expected indices from 0 to {len(table) - 1}, got {index.min()}: index % {len(table)}"
            " counts from the end"
        )
    return table[index]


def rows_read(g: Var | NDArray, y: object, table: Var | NDArray, index: Var | NDArray) -> object:
    """The gradient of rows read from a table, row by row; dense in a pass that records itself, like sums of Vars."""
    if type(g) is Var and not _here.back:
        return scattered(g, index, table.shape)
    if _here.device.machine is None and _in_graph_tree():
        raise fanin.CaptureError(
            "embedding: its gradient is sparse, which a function of a graph tree cannot record: use tape.gathered"
        )
    if type(index) is np.ndarray and _here.device.machine is not None:
        index = array(index, _here.device)
    if index.dtype not in (np.int32, np.int64):  # those of sparse gradients
        wide = run(copy, index.data if isinstance(index, Var) else index, dtype=np.int64)
        index = Var(wide, _here.device)
    n = math.prod(index.shape)
    parts = (reshape(index, (1, n)), reshape(g, (n, *table.shape[1:])))
    return fanin.Sparse("coo", tuple(x.data if type(x) is Var else x for x in parts), tuple(table.shape))


def integers(name: str, x: object) -> Any:
    """An array of integers, for an operation: a Var, or what makes an ndarray."""
    made: Any = x if isinstance(x, Var | _core.Array) else array_of(name, x)
    if isinstance(x, list | tuple) and not made.size:  # of no integers, which NumPy makes an array of floats
        made = made.astype(np.intp)
    if made.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {made.dtype}")
    return made


looked_up = Op("embedding", read_rows, rows_read,
               shape=lambda table, index: (*index.shape, *table.shape[1:]), reads=((1,),))  # fmt: skip
scattered: Op = Op("scattered", add_rows, lambda g, y, a, index, shape: looked_up(g, index),
               shape=lambda a, index, shape: shape, reads=((1,),))  # fmt: skip
densely_looked_up = Op("gathered", read_rows, lambda g, y, table, index: scattered(g, index, tuple(table.shape)),
              shape=lambda table, index: (*index.shape, *table.shape[1:]), reads=((1,),))  # fmt: skip


def embedding(table: Var, index: object) -> Var:
    """Rows of a table, by their numbers from 0. The table's gradient is sparse, if it is a parameter, or a copy of
    one.
    """
    check_value("embedding", "table", table)
    return looked_up(table, integers("embedding", index))


def gathered(table: Var, index: object) -> Var:
    """`embedding` with a dense gradient, as a recorded step needs (6): the size of a sparse sum depends on values."""
    check_value("gathered", "table", table)
    return densely_looked_up(table, integers("gathered", index))


def log_softmax(z: NDArray) -> NDArray:
    """Return the logarithm of the softmax of each row."""
    if np.ndim(z) != 2:
        raise ValueError(f"softmax: expected rows, an array of two axes, got one of {np.ndim(z)}")
    if not z.size:  # rows of nothing have no maximum
        return z.copy()
    z = z - z.max(1, keepdims=True)
    z -= np.log(np.exp(z).sum(1, keepdims=True))
    return z


def picked(z: NDArray, labels: NDArray) -> NDArray:
    """The element of each row at its label."""
    if labels.size and labels.min() < 0:
        raise IndexError(f"cross entropy: expected non-negative labels, got {labels.min()}")
    found: NDArray = z[np.arange(len(z)), labels]
    return found


def softmax_slope(g: Var | NDArray, y: object, z: object, *_: object) -> object:
    """Return the gradient of the softmax of each row of z, for the gradient g of the result."""
    p = softmax(z)
    return p * (g - reshape(total(g * p, 1), (p.shape[0], 1)))


def negative_mean(z: NDArray, labels: NDArray, n: int) -> object:
    """Return the sum of the negative log softmax of each row at its label, divided by n; of nothing it is NaN."""
    if n:
        return -picked(log_softmax(z), labels).sum() / n
    with np.errstate(divide="ignore", invalid="ignore"):
        return -picked(log_softmax(z), labels).sum() / n


def chances(z: NDArray) -> NDArray:
    """Return the softmax of each row."""
    p: NDArray = np.exp(log_softmax(z))
    return p


softmax: Op = Op("softmax", chances, softmax_slope, reads=((0,),))
excess = Op("excess", lambda z, t: chances(z) - (t[:, None] == np.arange(z.shape[1])), softmax_slope, reads=((0,),))
entropy = Op("cross entropy", negative_mean, lambda g, y, z, t, n: excess(z, t) * (g * (1 / n if n else math.inf)),
             shape=lambda z, t, n: (), reads=((0, 1),))  # fmt: skip


def cross_entropy(logits: Var, labels: object, count: int | None = None) -> Var:
    """The mean over the rows of -log softmax(row)[label]; with `count`, their sum divided by it. Of no rows it is
    NaN.
    """
    check_value("cross_entropy", "logits", logits)
    if count is not None:
        integer("cross_entropy: count", count)
    given = integers("cross_entropy", labels)
    if len(logits.shape) != 2 or given.shape != logits.shape[:1]:
        raise ValueError(f"cross_entropy: expected a label for each row, got {given.shape} for {logits.shape}")
    return entropy(logits, given, logits.shape[0] if count is None else count)


def to(a: Var, device: Device, on: Device | None = None, stage: Array | None = None) -> Var:
    """Copy to another device, on a stream of a's device, or of the device `on`.

    `stage`: memory of the same shape on `device`, in which the gradient is summed before it is copied back. Copies on
    one stream may share it.
    """
    on, home = on or a.device, a.device

    def back(grads: Sequence[Any], need: Sequence[bool]) -> list[Any]:
        if not _here.back:
            return [to(grads[0], home, on)]
        return [*grads] if stage is None else [run(copy, grads[0].data, device=home)]  # `step` moves what is elsewhere

    [y] = step("copy", lambda x: [run(copy, x, device=device)], [a], [a], back, on)
    if isinstance(y.node, fanin.Node) and stage is not None:
        y.node._sum_into((stage,))
    return y


# ---------------------------------------------------------------- 5. The pass backward


def roots_of(
    losses: Var | Sequence[Var], gradients: Sequence[object] | None, recording: bool
) -> list[tuple[fanin.Node | fanin.Leaf, int, object]]:
    """(node, slot, gradient) of each value to begin with."""
    values = [losses] if isinstance(losses, Var) else sequence("backward: losses", losses, "values")
    given = [None] * len(values) if gradients is None else sequence("backward: gradients", gradients, "gradients")
    if len(given) != len(values):
        raise ValueError(f"backward: expected {counted(len(values), 'gradient')} to begin with, got {len(given)}")
    roots = []
    for x, g in zip(values, given, strict=True):
        check_var("backward", "losses", x)
        if x.edge is None:
            raise TypeError(f"backward: {x!r} depends on no parameter")
        with at(x.device, "seed", x.device.current()):
            if g is None:
                g = run(lambda out: out.fill(1), shape=x.shape, dtype=x.dtype)
            elif type(g) in (bool, int, float, complex):  # a number of the step's own, in a recorded one too
                fitted("backward", g, x)
                g = run(lambda out, number=g: out.fill(number), shape=(), dtype=x.dtype)
            elif isinstance(g, Var):
                g = g if recording else g.needed_on(x.device.current())
            elif not hasattr(g, "device") or isinstance(g, np.ndarray | np.generic):
                g = x.device.put(fitted("backward", g, x))
        if recording:
            g = sum_to(g if isinstance(g, Var) else Var(cast(Array, g), x.device), x.shape)
        roots.append((*x.edge, g))
    return roots


def backward(losses: Var | Sequence[Var], gradients: Sequence[object] | None = None, *, budget: float | None = None,
             create_graph: bool = False, progress: Callable[[int, int], object] | None = None,
             reducer: object = None, weight: complex | None = None) -> None:  # fmt: skip
    """Add the gradients of the sum of some values to the `.grad` of each parameter that they depend on.

    When it returns, the caller's current streams wait for the whole pass. If a node fails, the pass ends; each leaf
    then has its whole gradient or none of it (E6).

    Parameters
    ----------
    losses : Var, or sequence of Var
        The values.
    gradients : sequence
        An initial gradient for each value. Default: ones.
    budget : int, float or "auto"
        The budget of this pass's buffers.
    create_graph : bool
        The pass records itself: `.grad` becomes a Var, which can be differentiated.
    progress : callable
        `progress(ran, known)`, as for `fanin.backward`.
    reducer : fanin.dist.Reducer
        Sums the gradients of its parameters over ranks.
    weight : number, optional
        Multiplies what is added to each `.grad`, as for `fanin.backward`.
    """
    create_graph = flag("backward: create_graph", create_graph)
    fanin.backward(
        roots_of(losses, gradients, create_graph),
        keep_graph=True,
        create_graph=create_graph,
        progress=progress,
        budget=budget,
        reducer=reducer,
        weight=weight,
    )


def grad(losses: Var | Sequence[Var], inputs: Sequence[Var], gradients: Sequence[object] | None = None, *,
         budget: float | None = None, create_graph: bool = False) -> list[Any]:  # fmt: skip
    """The gradients of the sum of some values with respect to `inputs`, ready on the caller's current streams; no
    `.grad` changes. With `create_graph` they are Vars, which can be differentiated.
    """
    for x in inputs:
        if x.edge is None:
            raise TypeError(f"grad: {x!r} has no gradient; make it a tape.parameter")
    roots = roots_of(losses, gradients, create_graph)
    edges = [cast(Edge, x.edge) for x in inputs]
    return fanin.grad(roots, edges, keep_graph=True, create_graph=create_graph, budget=budget)


# ---------------------------------------------------------------- 6. A step recorded once, and replayed

Label = tuple[object, ...]  # ("argument", 0, "key")
Arrays = tuple[NDArray, ...]
Grads = tuple[NDArray | None, ...]  # None: it is not there
R = TypeVar("R")  # the result of a step

_invoke: Callable[..., object] = operator.call
#: Run an iterator in C: the interpreter checks for Ctrl-C before and after alone.
_at_once: Callable[[Iterable[object]], object] = partial(deque, maxlen=0)


@names_nearest
def compiled(step: Callable[..., R], *, static: Sequence[Var | NDArray] = (), memory: int = 1 << 30, limit: int = 8,
             verify: int = 0) -> Compiled[R]:  # fmt: skip
    """Make a step that is recorded on the CPU, and from then on replayed: its kernels run again, without nodes, buffers
    and rules.

        step = tape.compiled(train, static=[*parameters, *speeds])
        for x, labels in batches:
            loss = step(x, labels)

    The step is a function of a graph tree (`fanin.GraphTree`): its first call with arguments of a kind warms it up, the
    second one records it, later ones replay it. Inside, arrays are handles of the tree, whose operations by NumPy are
    recorded, too. Arguments, by position or name, are ndarrays and constant Vars, whose values are copied in, and dicts
    of these; any other argument's value selects the recording. Results (None, a Var, an ndarray, tuples, lists and
    dicts of these) are copies. Gradients are added to existing `.grad` arrays in place, as `backward` does.

    A replay does not repeat branches on values, Python numbers, NumPy's work on other arrays, or printing. A detected
    difference (an array that is no argument and not static, memory kept past the step, a value read by `.numpy()`) is a
    CaptureError, and arrays and gradients are as before the call.

    Parameters
    ----------
    step : callable
        The step.
    static : sequence of Var or ndarray
        Parameters and arrays that stay in place and that the step may read and change.
    memory : int
        Bytes of address space for the arrays of the largest call; those that are never used take no memory.
    limit : int
        The number of further recordings because a static array is at another place; then it is copied, or, if the step
        writes into it, the step runs plainly.
    verify : int
        In the first `verify` replays of each recording the plain step runs as well, and all results, gradients and
        static arrays are compared bit by bit. A difference is a CaptureError that names the first array. This finds
        differences that cannot be detected otherwise: a number that changes, a branch, hooks added later.
    """
    fanin._need("graph", "tape.compiled")
    function("compiled: step", step)
    if inspect.isgeneratorfunction(step):
        raise TypeError(
            "compiled: a step that yields where the host reads is made of several recordings: GraphTree.pipeline, whose"
            " pieces may use the tape (docs/pipelines.md)"
        )
    given = sequence("compiled: static", static, "values and arrays")
    given = list({id(x): x for x in given}.values())  # each once
    return Compiled(step, given, integer("compiled: memory", memory), integer("compiled: limit", limit), verify)


class _Call:
    """A call of a step, and what it found."""

    __slots__ = ("args", "arrays", "before", "grads", "kwargs", "static")

    def __init__(self, args: Sequence[object], kwargs: dict[str, object], arrays: Arrays, static: Arrays, grads: Grads):
        self.args, self.kwargs, self.arrays, self.static, self.grads = args, kwargs, arrays, static, grads
        self.before: list[tuple[NDArray, NDArray]] | None = None  # arrays and their values before the step ran


@dataclass(frozen=True)
class _Out:
    """A place in a result: of which output, and whether that is a Var's."""

    at: int
    is_var: bool


@dataclass
class _Form:
    """What a run of the step left, as the outputs of the tree's function."""

    result: object = None  # with an _Out for each array
    axes: list[list[int] | None] = field(default_factory=list)  # of each output, if it does not lie in C's order
    ends: list[tuple[int, int | None]] = field(default_factory=list)  # leaves whose .grad became an output, or None
    adds: list[tuple[int, int]] = field(default_factory=list)  # leaves to whose .grad an output is copied back


class _Kind:
    """The calls with arguments and gradients of the same types: a function of the step's tree."""

    def __init__(self, step: Compiled[Any], call: _Call, shared: tuple[int, ...], values: bool) -> None:
        def run(*operands: _core.Array) -> tuple[_core.Array, ...]:
            outputs, form = step._run(self, operands)
            self.fn._put_form(form)
            return outputs

        run.__name__ = getattr(step.step, "__name__", type(step.step).__name__)
        run.__wrapped__ = step.step  # type: ignore[attr-defined]
        self.shared = shared  # the leaves whose .grad shares memory with another array: it is used where it lies
        there = [i for i, g in enumerate(call.grads) if g is not None]
        roles = ["copy"] * len(call.arrays) + ["static"] * len(call.static)
        roles += ["static" if i in shared else "copy" for i in there] + ["auto"] * values
        self.fn: Any = step._tree.function(run, roles=cast(Any, roles))


class Compiled(Generic[R]):
    """The result of `compiled`. Calls from several threads run one after the other."""

    def __init__(
        self, step: Callable[..., R], static: list[Var | NDArray], memory: int, limit: int, verify: int
    ) -> None:
        for i, x in enumerate(static):
            if type(_data(x)) is not np.ndarray:
                raise TypeError(f"compiled: static[{i}]: expected a Var or an ndarray on the CPU, got {x!r}")
        if type(verify) is not int or verify < 0:
            raise ValueError(f"compiled: verify: expected how many replays are verified, got {verify!r}")
        self.step, self.static = step, static
        self._tree = fanin.GraphTree("cpu", memory=memory, limit=limit, verify=verify)
        self._vars = [x if isinstance(x, Var) else Var(x, cpu) for x in static]
        leaves = [x.node for x in static if isinstance(x, Var) and isinstance(x.node, fanin.Leaf)]
        self._leaves = list(dict.fromkeys(leaves))
        self._kinds: dict[object, _Kind] = {}
        self._positional: set[object] = set()  # types of calls with ndarrays by position alone
        self._latest: _Kind | None = None
        self._call: _Call | None = None  # the one that runs, until its effects are there
        self._lock = threading.RLock()

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind it as a method, as functions are."""
        return self if owner is None else MethodType(self, owner)

    @property
    def last(self) -> fanin.graph.Outcome | None:
        """The outcome of the last call, as of a graph tree's function: what it did, and why; None before the first."""
        return self._latest.fn.last if self._latest else None

    @property
    def stats(self) -> fanin.graph.GraphStats:
        """Figures of the step's graph tree: calls of each kind, recordings, memory."""
        return self._tree.stats

    def __call__(self, *args: object, **kwargs: object) -> R:
        if _in_graph_tree():  # a part of another step, or of a function of a graph tree
            return self.step(*args, **kwargs)
        with self._lock:
            if self._call is not None:
                raise RuntimeError("a compiled step cannot be called by one of its own kernels")
            static, grads = tuple(map(_DATA, self._vars)), tuple(map(_GRAD, self._leaves))
            types: object = (*map(type, args), None, *map(type, grads))
            kind = None if kwargs else self._kinds.get(types)  # of ndarrays by position, without gradients
            call = _Call(args, kwargs, cast(Arrays, args), static, grads)
            operands: tuple[object, ...] = args + static
            if kind is None:
                kind, operands = self._kind_of(call, types)
            self._latest, self._call = kind, call
            try:
                with self._tree.step():
                    outputs = kind.fn(*operands)
                    form: _Form = kind.fn._form
                    values = list(map(_value, outputs, form.axes))
                result = cast(R, _mapped(form.result, partial(_given, values)))
                if form.ends or form.adds or call.before is not None:
                    self._end(call, form, values)
                return result
            except BaseException as e:
                if self._call is not None:
                    self._restore(call)
                if isinstance(e, Exception) and "operand" in str(e):
                    e.add_note(self._operands(call))
                raise
            finally:
                self._call = None

    # ---- before the call

    def _kind_of(self, call: _Call, types: object) -> tuple[_Kind, tuple[object, ...]]:
        """The function for a call, and its operands."""
        values: tuple[object, ...] = ()
        if call.kwargs or types not in self._positional:
            call.arrays, form, values = _flat(call.args, call.kwargs)
            types = (types, form, bool(values))
        there = tuple([g for g in call.grads if g is not None])
        for i, g in enumerate(call.grads):
            if g is not None and (type(g) is not np.ndarray or not g.flags.writeable):
                what = "a read-only ndarray" if type(g) is np.ndarray else type_of(g)
                raise fanin.CaptureError(
                    f"compiled: .grad of {self._leaves[i]!r} is {what}: expected a writable ndarray"
                    " (an array of a graph tree: another thread is in a call of a step of this parameter)"
                )
        shared: tuple[int, ...] = ()
        if there:  # which share memory with another array: they are used where they lie
            _, labels, count, _, _ = _core.overlaps((*call.arrays, *call.static, *there), None)
            if count < len(labels):
                own = iter(labels[len(call.arrays) + len(call.static) :])
                found = [-1 if g is None else next(own) for g in call.grads]
                shared = tuple([i for i, label in enumerate(found) if label >= 0 and labels.count(label) > 1])
        kind = self._kinds.get((types, shared))
        if kind is None:
            kind = self._kinds[types, shared] = _Kind(self, call, shared, bool(values))
            if not call.kwargs and all(type(x) is np.ndarray for x in call.args):
                plain = (*map(type, call.args), None, *map(type, call.grads))
                self._positional.add(plain)
                self._kinds[(plain, shared) if there else plain] = kind
        return kind, (*call.arrays, *call.static, *there, *([values] if values else []))

    def _operands(self, call: _Call) -> str:
        """A note that names the operands of the tree's function."""
        names = [_label(label) for label, kind in _flat(call.args, call.kwargs)[1] if kind in (np.ndarray, Var)]
        names += [f"static[{i}]" for i in range(len(self.static))]
        names += [f".grad of {leaf!r}" for leaf, g in zip(self._leaves, call.grads, strict=True) if g is not None]
        return ", ".join(f"operand {i} is {name}" for i, name in enumerate(names))

    # ---- the step as a function of the tree

    def _run(self, kind: _Kind, operands: Sequence[_core.Array]) -> tuple[tuple[_core.Array, ...], _Form]:
        """Run the step on handles: warmed up, recorded, or as it is."""
        call = cast(_Call, self._call)
        for i, x in enumerate(call.static):
            if type(x) is not np.ndarray:
                raise fanin.CaptureError(
                    f"compiled: static[{i}] has {type_of(x)}: expected an ndarray (an array of a graph tree: another"
                    " thread is in a call of a step of this parameter)"
                )
        if call.before is None:
            arrays = [x for x in (*call.arrays, *call.static, *call.grads) if x is not None]
            call.before = [(x, _once(x).copy("K")) for x in arrays]
        inside, given = iter(operands[: len(call.arrays)]), iter(operands[len(call.arrays) :])
        there = [next(given) for _ in call.static]
        mine = [None if g is None else next(given) for g in call.grads]

        own = [g if g is None or i in kind.shared else cast(Any, g).copy("K") for i, g in enumerate(mine)]
        try:
            self._set(there, own)
            args = [_handled(x, inside) for x in call.args]
            result = self.step(*args, **{name: _handled(x, inside) for name, x in call.kwargs.items()})
            return self._left(kind, result, operands[: len(call.arrays)], there, own)
        finally:
            # none of the tree's memory; the caller's own follow after the call
            self._set(call.static, [None] * len(own))

    def _set(self, data: Sequence[object], grads: Sequence[object]) -> None:
        sets: list[tuple[object, str, object]] = [(x, "data", y) for x, y in zip(self._vars, data, strict=True)]
        sets += [(leaf, "grad", g) for leaf, g in zip(self._leaves, grads, strict=True)]
        _at_once(map(setattr, *zip(*sets, strict=True)) if sets else ())

    def _left(
        self, kind: _Kind, result: object, given: Sequence[_core.Array], there: Sequence[object], own: Sequence[Any]
    ) -> tuple[tuple[_core.Array, ...], _Form]:
        """What the step left: its results and gradients as outputs."""
        outputs, form = list[_core.Array](), _Form()

        def out(x: Array) -> int:
            outputs.append(cast(_core.Array, x))
            order = sorted(range(x.ndim), key=lambda k: -abs(x.strides[k]))
            form.axes.append(None if order == [*range(x.ndim)] else order)
            return len(outputs) - 1

        def returned(x: object) -> object:
            data = _data(x)
            handle = isinstance(data, _core.Array)
            if type(data) is np.ndarray or (handle and (not data.size or any(_meet(data, y) for y in given))):
                data = cpu.put(data)
            if x is not None and not isinstance(data, _core.Array):
                raise fanin.CaptureError(
                    f"compiled: the step returned {x!r}, which no recorded operation made: each replay would give the"
                    " same again. Return Vars, or arrays that operations made"
                )
            return None if x is None else _Out(out(data), isinstance(x, Var))

        form.result = _mapped(result, returned)
        for i, (x, data) in enumerate(zip(self._vars, there, strict=True)):
            if x.data is not data:
                raise fanin.CaptureError(
                    f"compiled: the step puts another array into static[{i}].data: write into the one that is there,"
                    " x.data[...] = y, or by tape.update"
                )
        for i, (leaf, was) in enumerate(zip(self._leaves, own, strict=True)):
            now = leaf.grad
            if now is not None and not isinstance(now, _core.Array):
                raise fanin.CaptureError(
                    f"compiled: the step leaves {type_of(now)} in .grad of {leaf!r}: expected an array made by"
                    " operations: one made by NumPy alone each replay would leave again"
                )
            if was is not None and i not in kind.shared:
                form.adds.append((i, out(was)))
            if now is not was and not (was is not None and now is not None and _same(now, was)):
                form.ends.append((i, None if now is None else out(now)))
        return tuple(outputs), form

    # ---- after the call

    def _end(self, call: _Call, form: _Form, values: Sequence[NDArray]) -> None:
        """Gradients go where they belong (L5, L8), all or none: first what may fail."""
        grads = dict(enumerate(call.grads)) if call.before is not None else {}  # which the run took away
        for i, k in form.ends:
            grads[i] = None if k is None else values[k]
        n, m = len(grads), len(form.adds)
        _at_once(
            map(
                _invoke,
                (*itertools.repeat(setattr, n), *itertools.repeat(operator.setitem, m), setattr),
                (*[self._leaves[i] for i in grads], *[call.grads[i] for i, _ in form.adds], self),
                (*itertools.repeat("grad", n), *itertools.repeat(..., m), "_call"),
                (*grads.values(), *[values[k] for _, k in form.adds], None),
            )
        )

    def _restore(self, call: _Call) -> None:
        """All is as before the call; what a replay wrote into static arrays stays, as after a plain step that fails."""
        self._set(call.static, call.grads)
        for x, was in call.before or ():
            if x.flags.writeable:
                np.copyto(_once(x), was)


_DATA: Callable[[Var], NDArray] = operator.attrgetter("data")
_GRAD: Callable[[fanin.Leaf], NDArray | None] = operator.attrgetter("grad")


def _data(x: object) -> Any:
    """The array of a Var, or whatever else it is."""
    return x.data if isinstance(x, Var) else x


def _handled(x: object, inside: Iterator[_core.Array]) -> object:
    """An argument with the next handles in the place of its arrays."""
    if type(x) is dict:
        return {k: _handled(y, inside) for k, y in x.items()}
    if type(x) is np.ndarray:
        return next(inside)
    return Var(next(inside), cpu) if isinstance(x, Var) else x


def _flatten(
    label: Label, x: object, arrays: list[NDArray], form: list[tuple[Label, object]], values: list[object]
) -> None:
    """Add an argument to what `_flat` returns. No closure: one that calls itself is a cycle, which keeps the arrays."""
    data = _data(x)
    if isinstance(x, Var) and x.edge is not None:
        raise TypeError(f"compiled: {_label(label)} is {x!r}: a parameter belongs in static=, a result made inside")
    if type(data) is np.ndarray:
        arrays.append(data)
        form.append((label, np.ndarray if data is x else Var))
    elif type(x) is dict:
        form.append((label, dict))
        for k, y in x.items():
            if type(k) is not str:
                values.append(k)
            _flatten((*label, k), y, arrays, form, values)
    elif isinstance(x, Var | np.ndarray | list):
        raise TypeError(
            f"compiled: {_label(label)}: expected an ndarray, a Var on the CPU, a dict of such or a plain value,"
            f" got {data!r}"
        )
    else:
        form.append((label, None))
        values.append(x)


def _flat(
    args: Sequence[object], kwargs: dict[str, object]
) -> tuple[Arrays, tuple[tuple[Label, object], ...], tuple[object, ...]]:
    """The arrays among arguments, of each argument where it is and its type, and values that are no arrays."""
    arrays, form, values = list[NDArray](), list[tuple[Label, object]](), list[object]()

    for i, x in enumerate(args):
        _flatten(("argument", i), x, arrays, form, values)
    for name, x in kwargs.items():
        _flatten(("argument", name), x, arrays, form, values)
    return tuple(arrays), tuple(form), tuple(values)


def _label(label: Label) -> str:
    return f"{label[0]} {label[1]}" + "".join(f"[{k!r}]" for k in label[2:])


def _once(x: NDArray) -> NDArray:
    """A view without what a broadcast array repeats."""
    if 0 not in x.strides:
        return x
    return x[tuple([slice(None) if step else slice(1) for step in x.strides])]


def _same(one: _core.Array, two: _core.Array) -> bool:
    """Whether two arrays are of the same elements."""
    return (one.address, one.shape, one.strides, one.dtype) == (two.address, two.shape, two.strides, two.dtype)


def _meet(one: _core.Array, two: _core.Array) -> bool:
    """Whether the addresses between which two arrays lie have any in common."""
    (_, low, high), (_, start, end) = extent(one), extent(two)
    return low < end and start < high


def _mapped(x: object, fn: Callable[[Any], object]) -> object:
    """`fn` of all that is no tuple, list or dict in it."""
    if isinstance(x, dict):
        return {k: _mapped(y, fn) for k, y in x.items()}
    if type(x) is tuple or type(x) is list:
        return type(x)([_mapped(y, fn) for y in cast(Iterable[object], x)])
    return fn(x)


def _value(x: Any, axes: list[int] | None) -> NDArray:
    """A copy of an output, which lies as it does."""
    if type(x) is np.ndarray:  # an operand itself
        return x.copy("K")
    made: NDArray = x.numpy() if axes is None else x.transpose(*axes).numpy()
    return made if axes is None else made.transpose(np.argsort(axes))


def _given(values: Sequence[NDArray], out: _Out | None) -> object:
    """What the caller gets in the place of an output."""
    if out is None:
        return None
    return Var(values[out.at], cpu) if out.is_var else values[out.at]
