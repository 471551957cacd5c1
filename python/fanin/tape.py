"""A small reverse-mode array library, whose every sum of gradients is a `fanin.InputBuffer`.

    w = tape.parameter(np.ones((3, 4)))
    loss = tape.tanh(tape.array(np.ones((2, 3))) @ w).mean()
    tape.backward(loss)
    w.grad                                        # an ndarray of shape (3, 4)

On a simulated machine the same program runs late, on the streams that are current when an operation is called:

    with fanin.sim.Machine(devices=2) as m:
        d0, d1 = tape.devices(m)
        w = tape.parameter(np.ones((3, 4)), d0)
        with fanin.stream(m.stream(device=0)):    # this operation runs there, and so does its backward (E4)
            y = tape.array(x, d0) @ w

To be read from top to bottom:

1. Where: devices, streams, kernels.
2. Values, and the nodes that made them.
3. Operations.
4. The pass backward.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import fanin
from fanin._interop.protocols import NDArray
from fanin._words import counted

Shape = tuple[int, ...]
Array = NDArray | fanin.sim.Array  # on the CPU, or on a device of a machine
Gradient = Array | fanin.Sparse
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
        if self.machine is None:
            return np.array(value)
        put: fanin.sim.Array = self.machine.array(value, device=self.index)
        return put

    def empty(self, shape: Shape, dtype: npt.DTypeLike) -> Array:
        """Memory there, to be written."""
        return np.empty(shape, dtype) if self.machine is None else self.machine.empty(shape, dtype, device=self.index)

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
    stream: Stream = None
    name: str = "kernel"


_here = _Here()


@contextmanager
def at(device: Device, stream: Stream, name: str) -> Iterator[None]:
    """Kernels run on this stream (on the CPU: at once) until the block ends."""
    before = _here.device, _here.stream, _here.name
    _here.device, _here.stream, _here.name = device, stream, name
    try:
        with fanin.stream(stream) if stream is not None else nullcontext():
            yield
    finally:
        _here.device, _here.stream, _here.name = before


def its(arrays: Sequence[Array]) -> list[fanin.sim.Array]:
    """Of a machine, as all arrays of its kernels are."""
    return cast(list[fanin.sim.Array], list(arrays))


def launch(fn: Callable[..., object], reads: Sequence[Array], writes: Sequence[Array]) -> None:
    """Do `fn(*reads, *writes)` here."""
    machine = _here.device.machine
    if machine is None or _here.stream is None:
        fn(*reads, *writes)
    else:
        machine.launch(_here.stream, fn, reads=its(reads), writes=its(writes), name=_here.name)


def run(fn: Callable[..., object], *reads: Array, shape: Shape | None = None,
        dtype: npt.DTypeLike | None = None, device: Device | None = None) -> Array:  # fmt: skip
    """A new array that a kernel `fn(*reads, out)` fills; of the reads' common shape and dtype unless told otherwise."""
    shape = np.broadcast_shapes(*(x.shape for x in reads)) if shape is None else shape
    out = (device or _here.device).empty(shape, dtype or np.result_type(*(x.dtype for x in reads)))
    launch(fn, reads, [out])
    return out


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


def moved(x: Gradient, device: Device) -> Gradient:
    """x on a device: itself if it lies there, else a copy, made here. Sparse ones part by part."""
    if isinstance(x, fanin.Sparse):
        return fanin.Sparse(x.format, tuple(moved(part, device) for part in x.parts), x.shape)
    return x if getattr(x, "device", "cpu") == device.name else run(copy, x, device=device)


# ---------------------------------------------------------------- 2. Values, and the nodes that made them

Gradients = Sequence[Gradient | None]
Back = Callable[[list[Gradient | None], list[bool]], Gradients]
Hook = Callable[[Gradient], Gradient | None]


class Node:
    """An operation that was done. `back(grads, need)` takes the gradients of what it made and gives those of what it
    took.
    """

    made = itertools.count()

    def __init__(self, name: str, inputs: Sequence[Var], back: Back, device: Device) -> None:
        self.name, self.inputs, self.back = name, inputs, back
        self.number = next(Node.made)  # the larger, the later
        self.device, self.stream = device, device.current()  # its canonical ones: it runs there, backward too
        self.outputs: list[fanin.Slot] = []  # what the gradient of each has to be
        self.stages: list[Array] | None = None  # memory for the sums of its gradients
        self.hooks: list[tuple[int, Hook]] = []

    def __repr__(self) -> str:
        return f"<{self.name}, node {self.number}>"


class Leaf(Node):
    """Where gradients of a parameter end: in `grad` (rules L)."""

    def __init__(self, name: str, device: Device) -> None:
        super().__init__(name, (), lambda grads, need: (), device)
        self.grad: Gradient | None = None

    def accumulate(self, g: Gradient, caller: Stream) -> Gradient:
        """`.grad += g`, in place where that can be (L1, L2, L5), when `caller` is done with it (S20)."""
        if self.grad is None:
            self.grad = g
            return g
        if self.stream is not None and caller is not None and self.stream != caller:
            self.stream.wait(caller)
        total = fanin.InputBuffer(1, stream=self.stream, name=f"{self.name}.grad")
        total.add(0, self.grad, stream=self.stream, donate=True)
        total.add(0, g, stream=self.stream)
        [self.grad] = made = total.take()
        return cast(Gradient, made[0])


class Var:
    """An array, the node that made it (None: a constant), and the stream on which it is ready (None: everywhere)."""

    def __init__(self, data: Array, device: Device, node: Node | None = None, slot: int = 0) -> None:
        self.data, self.device, self.node, self.slot = data, device, node, slot
        self.shape: Shape = tuple(data.shape)
        self.dtype = data.dtype
        self.stream: Stream = None
        self.ready: fanin.Event | None = None  # the event behind it

    def made_on(self, stream: Stream) -> Var:
        self.stream, self.ready = stream, stream.record() if stream is not None else None
        return self

    def needed_on(self, stream: Stream) -> Array:
        """Its array, for work on `stream`, which waits where it must."""
        if self.ready is not None and stream is not None and self.stream != stream:
            stream.wait(self.ready)
        return self.data

    def numpy(self) -> NDArray:
        """Its value on the host."""
        array = self.needed_on(self.device.current())
        return array if isinstance(array, np.ndarray) else array.numpy()

    def leaf(self) -> Leaf:
        if not isinstance(self.node, Leaf):
            raise TypeError(
                f"{self!r} is no parameter and keeps no gradient; tape.grad(loss, [x]) gives that of any value"
            )
        return self.node

    @property
    def grad(self) -> Any:  # as the parameter's arrays are
        """The gradient of a parameter, summed over all passes since it was None."""
        return self.leaf().grad

    @grad.setter
    def grad(self, value: Gradient | None) -> None:
        self.leaf().grad = value

    def register_hook(self, fn: Hook) -> None:
        """`fn` sees the finished sum of this value's gradients, once in each pass; what it returns, if not None,
        replaces it.
        """
        if self.node is None:
            raise TypeError(f"{self!r} is a constant: no gradient gets here")
        self.node.hooks.append((self.slot, fn))

    def __repr__(self) -> str:
        return f"<Var {self.shape} {self.dtype} on {self.device.name}, {self.node or 'constant'}>"

    def __add__(self, other: Var | npt.ArrayLike) -> Var:
        return add(self, lift(other, self))

    def __sub__(self, other: Var | npt.ArrayLike) -> Var:
        return sub(self, lift(other, self))

    def __rsub__(self, other: Var | npt.ArrayLike) -> Var:
        return sub(lift(other, self), self)

    def __mul__(self, other: Var | npt.ArrayLike) -> Var:
        return mul(self, lift(other, self))

    def __matmul__(self, other: Var) -> Var:
        return matmul(self, other)

    def __neg__(self) -> Var:
        return mul(self, lift(-1, self))

    __radd__, __rmul__ = __add__, __mul__

    @property
    def T(self) -> Var:
        return transpose(self)

    def reshape(self, *shape: int) -> Var:
        return reshape(self, shape)

    def sum(self, axis: Axis = None) -> Var:
        return total(self, axis)

    def mean(self, axis: Axis = None) -> Var:
        return total(self, axis, 1 / math.prod(self.shape[i] for i in axes_of(self, axis)))

    def to(self, device: Device, on: Device | None = None, stage: Array | None = None) -> Var:
        return to(self, device, on, stage)


def array(value: npt.ArrayLike, device: Device = cpu) -> Var:
    """A constant: a copy of an ndarray on a device."""
    return Var(device.put(value), device)


def parameter(value: npt.ArrayLike, device: Device = cpu, name: str = "parameter") -> Var:
    """A value whose gradients are wanted: they are summed into its `.grad`, on the stream that is current now."""
    var = Var(device.put(value), device, Leaf(name, device))
    var.leaf().outputs.append(fanin.Slot(var.shape, var.dtype, device.name))
    return var


def lift(x: Var | npt.ArrayLike, like: Var) -> Var:
    return x if isinstance(x, Var) else array(np.asarray(x, like.dtype), like.device)


def update(
    fn: Callable[..., object], reads: Sequence[Var | Array], writes: Sequence[Var | Array], name: str = "update"
) -> None:
    """Change Vars or arrays in place by `fn(*reads, *writes)`, on the current stream of the first that is written, a
    Var.

    Whoever else reads them must be known to that stream; after `backward`, all that took part in it are.
    """
    device = cast(Var, writes[0]).device
    stream = device.current()
    with at(device, stream, name):
        launch(fn, *([x.needed_on(stream) if isinstance(x, Var) else x for x in xs] for xs in (reads, writes)))
    for x in writes:
        if isinstance(x, Var):
            x.made_on(stream)


# ---------------------------------------------------------------- 3. Operations


def custom(name: str, forward: Callable[..., Sequence[Array]], inputs: Sequence[Var], back: Back,
           device: Device | None = None) -> list[Var]:  # fmt: skip
    """An operation: `forward(*arrays)` gives arrays; `back(grads, need)` a gradient, or None, for each input.

    It runs on the current stream of `device` (default: the first input's), wherever the arrays lie: others are read
    over the link.
    """
    node = Node(name, inputs, back, device or inputs[0].device)
    if any(x.device.machine is not node.device.machine for x in inputs):
        raise ValueError(f"{name}: {', '.join(map(repr, inputs))} lie on no one machine")
    arrays = [x.needed_on(node.stream) for x in inputs]
    with at(node.device, node.stream, name):
        made = [Var(y, node.device.of(y)) for y in forward(*arrays)]
    for slot, y in enumerate(made):
        y.made_on(node.stream)
        if any(x.node for x in inputs):
            y.node, y.slot = node, slot
            node.outputs.append(fanin.Slot(y.shape, y.dtype, y.device.name))
    return made


Vjp = Callable[[Any, Array], Gradient]  # of the gradient and the value of the result


def op(name: str, forward: Callable[..., Array], inputs: Sequence[Var], *vjps: Vjp | None,
       device: Device | None = None) -> Var:  # fmt: skip
    """An operation with one result y: `vjps[i](g, y)` makes, of y's gradient, that of input i, or something that
    broadcasts from it: the input's slot sums it to the shape (A9).
    """

    value: list[Array] = []

    def back(grads: list[Gradient | None], need: list[bool]) -> Gradients:
        return [vjp(grads[0], *value) if vjp and n else None for vjp, n in zip(vjps, need, strict=True)]

    [y] = custom(name, lambda *arrays: [forward(*arrays)], inputs, back, device)
    value.append(y.data)  # the array, not y, which knows this node: what nobody holds any more is freed at once
    return y


def add(a: Var, b: Var) -> Var:
    return op("add", lambda x, y: run(np.add, x, y), [a, b], lambda g, y: g, lambda g, y: g)


def sub(a: Var, b: Var) -> Var:
    return op("sub", lambda x, y: run(np.subtract, x, y), [a, b], lambda g, y: g, lambda g, y: run(np.negative, g))


def mul(a: Var, b: Var) -> Var:
    return op("mul", lambda x, y: run(np.multiply, x, y), [a, b],
              lambda g, y: run(np.multiply, g, b.data), lambda g, y: run(np.multiply, g, a.data))  # fmt: skip


def matmul(a: Var, b: Var) -> Var:
    """Of matrices: (n, k) with (k, m) is (n, m)."""

    def product(x: Array, y: Array) -> Array:
        return run(np.matmul, x, y, shape=(x.shape[0], y.shape[1]))

    return op("matmul", product, [a, b], lambda g, y: product(g, b.data.T), lambda g, y: product(a.data.T, g))


def tanh(a: Var) -> Var:
    return op("tanh", lambda x: run(np.tanh, x), [a],
              lambda g, y: run(lambda g, y, out: np.multiply(g, 1 - y * y, out), g, y))  # fmt: skip


def relu(a: Var) -> Var:
    return op("relu", lambda x: run(lambda x, out: np.maximum(x, 0, out=out), x), [a],
              lambda g, y: run(lambda g, y, out: np.multiply(g, y > 0, out), g, y))  # fmt: skip


def reshape(a: Var, shape: Shape) -> Var:
    return op("reshape", lambda x: reshaped(x, shape), [a], lambda g, y: reshaped(g, a.shape))


def transpose(a: Var, axes: Shape | None = None) -> Var:
    axes = tuple(range(len(a.shape)))[::-1] if axes is None else axes
    back = tuple(np.argsort(axes).tolist())
    return op("transpose", lambda x: x.transpose(*axes), [a], lambda g, y: g.transpose(*back))


def split(a: Var, parts: int) -> list[Var]:
    """Equal parts along the first axis: one node with several slots, some of which may get no gradient (S2)."""
    n = a.shape[0] // parts

    def back(grads: list[Gradient | None], need: list[bool]) -> Gradients:
        def join(*args: NDArray) -> None:
            views = iter(args[:-1])
            for i, g in enumerate(grads):
                args[-1][i * n : (i + 1) * n] = 0 if g is None else next(views)

        return [run(join, *(cast(Array, g) for g in grads if g is not None), shape=a.shape, dtype=a.dtype)]

    if n * parts != a.shape[0]:
        raise ValueError(f"split: {a.shape[0]} rows cannot be cut into {parts} equal parts")
    return custom("split", lambda x: [x[i * n : (i + 1) * n] for i in range(parts)], [a], back)


Axis = int | Sequence[int] | None


def axes_of(a: Var, axis: Axis) -> Shape:
    return tuple(range(len(a.shape))) if axis is None else tuple(np.atleast_1d(axis).tolist())


def total(a: Var, axis: Axis = None, scale: float = 1) -> Var:
    """The sum over some axes (default: all), times a number. Its gradient is one number for many: a view that repeats
    itself.
    """
    axes = axes_of(a, axis)
    kept = tuple(1 if i in axes else n for i, n in enumerate(a.shape))

    def add_up(x: Array) -> Array:
        return run(lambda x, out: np.multiply(x.sum(axes, keepdims=True), scale, out), x, shape=kept)

    def spread(g: Array, y: Array) -> Array:
        return expanded(g if scale == 1 else run(lambda g, out: np.multiply(g, scale, out), g), a.shape)

    return reshape(op("sum", add_up, [a], spread), tuple(n for i, n in enumerate(a.shape) if i not in axes))


def pool(a: Var, size: int) -> Var:
    """Of images (n, height, width, channels): the mean of each square."""
    n, h, w, c = a.shape
    return reshape(a, (n, h // size, size, w // size, size, c)).mean((2, 4))


def patches(a: Var, size: int) -> Var:
    """Of images (n, height, width, channels): the square around each pixel as a row, zeros beyond the edge (im2col)."""
    n, h, w, c = a.shape
    rim = size // 2
    shape = (n, h, w, size, size, c)

    def squares(x: NDArray, out: NDArray) -> None:
        padded = np.pad(x, [(0, 0), (rim, rim), (rim, rim), (0, 0)])
        for i, j in np.ndindex(size, size):
            out[:, :, :, i, j] = padded[:, i : i + h, j : j + w]

    def paste(g: NDArray, out: NDArray) -> None:
        padded = np.zeros((n, h + 2 * rim, w + 2 * rim, c), g.dtype)
        for i, j in np.ndindex(size, size):
            padded[:, i : i + h, j : j + w] += g[:, :, :, i, j]
        out[...] = padded[:, rim : rim + h, rim : rim + w]

    y = op("patches", lambda x: run(squares, x, shape=shape), [a], lambda g, y: run(paste, g, shape=a.shape))
    return reshape(y, (n * h * w, size * size * c))


def conv2d(a: Var, kernel: Var) -> Var:
    """Images (n, height, width, c) with a kernel (size, size, c, d), size odd: images (n, height, width, d)."""
    size, _, c, d = kernel.shape
    y = matmul(patches(a, size), reshape(kernel, (size * size * c, d)))
    return reshape(y, (*a.shape[:3], d))


def embedding(table: Var, index: Var) -> Var:
    """Rows of a table. The table's gradient is sparse: what was read where, row by row."""
    n, width = math.prod(index.shape), table.shape[1]

    def look_up(t: Array, i: Array) -> Array:
        return run(lambda t, i, out: np.take(t, i, 0, out), t, i, shape=(*index.shape, width), dtype=table.dtype)

    def rows(g: Array, y: Array) -> fanin.Sparse:
        return fanin.Sparse("coo", (reshaped(index.data, (1, n)), reshaped(g, (n, width))), table.shape)

    return op("embedding", look_up, [table, index], rows, None)


def cross_entropy(logits: Var, labels: Var, count: int | None = None) -> Var:
    """The mean over the rows of -log softmax(row)[label]; with `count`, their sum divided by it."""
    n = count or logits.shape[0]

    def log_softmax(z: NDArray) -> NDArray:
        z = z - z.max(1, keepdims=True)
        z -= np.log(np.exp(z).sum(1, keepdims=True))
        return z

    def loss(z: NDArray, t: NDArray, out: NDArray) -> None:
        out[...] = -log_softmax(z)[np.arange(len(z)), t].sum() / n

    def slope(g: NDArray, z: NDArray, t: NDArray, out: NDArray) -> None:
        p = np.exp(log_softmax(z))
        p[np.arange(len(z)), t] -= 1
        np.multiply(p, g / n, out)

    def back(g: Array, y: Array) -> Array:
        return run(slope, g, logits.data, labels.data, shape=logits.shape, dtype=logits.dtype)

    return op("cross entropy", lambda z, t: run(loss, z, t, shape=(), dtype=z.dtype), [logits, labels], back, None)


def to(a: Var, device: Device, on: Device | None = None, stage: Array | None = None) -> Var:
    """A copy on another device. It is made on a stream of a's device, or of the device `on`: who pushes, or who pulls.

    `stage`: memory like it, on `device`, to sum its gradient in before that goes back over the link. Copies on one
    stream may share it.
    """
    y = op("copy", lambda x: run(copy, x, device=device), [a], lambda g, y: moved(g, a.device), device=on)
    if y.node and stage is not None:
        y.node.stages = [stage]
    return y


# ---------------------------------------------------------------- 4. The pass backward


def backward(
    losses: Var | Sequence[Var], gradients: Sequence[object] | None = None, *, budget: float | None = None
) -> None:
    """Add the gradients of the sum of some values to the `.grad` of each parameter that they depend on.

    `gradients`: an array to begin with for each value (default: ones). `budget`: of the buffers. When it returns, the
    caller's current streams wait for all that was done. If a node fails, the pass ends; each leaf then has its whole
    gradient or none of it (E6).
    """
    Pass(losses, gradients, None, budget).run()


def grad(losses: Var | Sequence[Var], inputs: Sequence[Var], gradients: Sequence[object] | None = None, *,
         budget: float | None = None) -> list[Any]:  # fmt: skip
    """The gradients of the sum of some values with respect to `inputs`, ready on the caller's current streams; no
    `.grad` changes.
    """
    for x in inputs:
        if x.node is None:
            raise TypeError(f"grad: {x!r} has no gradient; make it a tape.parameter")
    this = Pass(losses, gradients, {x.node: x.device for x in inputs if x.node}, budget)
    this.run()
    return [this.results[x.node][x.slot] if x.node in this.results else None for x in inputs]


def reachable(nodes: Sequence[Node]) -> list[Node]:
    """All nodes that these depend on, and themselves, the earliest made first."""
    found, todo = set(nodes), list(nodes)
    while todo:
        new = {x.node for x in todo.pop().inputs if x.node} - found
        found |= new
        todo += new
    return sorted(found, key=lambda node: node.number)


Edge = tuple["Node | None", int]  # input i of a node; of None: root i of the pass


class Pass:
    """One pass: a buffer for each node that waits for gradients, and a queue of the nodes that are ready."""

    def __init__(self, losses: Var | Sequence[Var], gradients: Sequence[object] | None,
                 wanted: dict[Node, Device] | None, budget: float | None) -> None:  # fmt: skip
        self.roots = [losses] if isinstance(losses, Var) else list(losses)
        self.gradients = [None] * len(self.roots) if gradients is None else list(gradients)
        if len(self.gradients) != len(self.roots):
            raise ValueError(
                f"backward: expected {counted(len(self.roots), 'gradient')} to begin with, got {len(self.gradients)}"
            )
        for x in self.roots:
            if x.node is None:
                raise TypeError(f"backward: {x!r} depends on no parameter")
        nodes = reachable([x.node for x in self.roots if x.node])
        self.wanted, self.budget = (
            wanted,
            budget,
        )  # wanted: captured for the caller, from which device; None: all leaves
        self.needed: set[Node | None] = set(nodes) if wanted is None else set()  # E8
        for node in nodes:
            if wanted and (node in wanted or any(x.node in self.needed for x in node.inputs)):
                self.needed.add(node)
        # E1: the edges to each slot are counted, which gives each its key; a node is ready when all have contributed.
        edges: list[tuple[Edge, Var]] = [((None, i), x) for i, x in enumerate(self.roots)]
        edges += [((node, i), x) for node in reversed(nodes) for i, x in enumerate(node.inputs)]
        self.keys: dict[Edge, int] = {}
        self.expected: Counter[tuple[Node | None, int]] = Counter()
        self.due: Counter[Node | None] = Counter()
        for edge, x in edges:
            if x.node in self.needed:
                self.keys[edge] = self.expected[x.node, x.slot]
                self.expected[x.node, x.slot] += 1
                self.due[x.node] += 1
        self.buffers: dict[Node, fanin.InputBuffer] = {}
        self.ready: list[tuple[bool, int, Node]] = []
        self.results: dict[Node, list[Gradient | None]] = {}
        self.ended: list[tuple[Device, Stream, Gradient]] = []  # S20: what was made on which stream for the caller
        there = {x.device for _, x in edges} | {node.device for node in nodes}
        self.callers = {device: device.current() for device in there}  # as they are now

    def run(self) -> None:
        node = None
        try:
            for i, (x, g) in enumerate(zip(self.roots, self.gradients, strict=True)):
                with at(x.device, self.callers[x.device], "seed"):  # by the rules for any other gradient (S20)
                    if g is None:
                        g = run(lambda out: out.fill(1), shape=x.shape, dtype=x.dtype)
                    elif not hasattr(g, "device") or isinstance(g, np.ndarray | np.generic):
                        g = x.device.put(np.asarray(g, x.dtype))
                    self.give((None, i), x, cast(Gradient, g))
            while self.ready:
                node = heapq.heappop(self.ready)[-1]
                self.step(node)
        except Exception as e:
            e.add_note(f"the pass backward ended in {node or 'its roots'}")
            raise
        finally:
            self.buffers.clear()
            for device, caller in self.callers.items():
                made = [(stream, g) for d, stream, g in self.ended if d == device and stream is not None]
                if caller is not None and made:
                    fanin._core.pass_end(caller, [stream for stream, _ in made], [g for _, g in made])

    def give(self, edge: Edge, x: Var, g: Gradient | None) -> None:
        """Add a gradient of x, made here, to the buffer of x's node, if that is needed."""
        node = x.node
        if node is None or edge not in self.keys:
            return
        try:
            shape = x.shape if g is None else tuple(g.shape)
            if len(shape) < len(x.shape) or any(
                a not in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)
            ):
                raise ValueError(f"expected {x.shape}, got {shape}")
            if node not in self.buffers:
                self.buffers[node] = fanin.InputBuffer(
                    node.outputs, budget=self.budget, stream=node.stream, leaf=isinstance(node, Leaf), name=node.name
                )
                for slot in range(len(node.outputs)):
                    self.buffers[node].expect(slot, self.expected[node, slot])
            g = g if g is None else moved(g, x.device)
            self.buffers[node].add(x.slot, g, key=self.keys[edge], stream=_here.stream)
        except (AttributeError, TypeError, ValueError, BufferError) as e:
            who = f"{edge[0].name} returned" if edge[0] else "backward was given"
            kind = TypeError if isinstance(e, AttributeError) else type(e)
            raise kind(f"{who} an invalid gradient at index {edge[1]}: {e}") from None  # V2, V3
        self.due[node] -= 1
        if self.due[node] == 0:
            heapq.heappush(self.ready, (not isinstance(node, Leaf), -node.number, node))  # E2

    def step(self, node: Node) -> None:
        """Take the sums of a node that is ready, and go on from there (E4)."""
        leaf = isinstance(node, Leaf) and self.wanted is None
        goes_on = any(x.node in self.needed for x in node.inputs)
        captured = self.wanted.get(node) if self.wanted else None
        stream = self.callers[captured] if captured and not goes_on else node.stream
        grads = self.buffers.pop(node).take(stream, out=node.stages, writable=leaf)
        with at(node.device, stream, f"{node.name}'"):
            for slot, hook in node.hooks:
                changed = None if grads[slot] is None else hook(grads[slot])
                grads[slot] = grads[slot] if changed is None else changed
            if captured:
                self.results[node] = grads
                self.ended += [(captured, stream, g) for g in grads if g is not None]
            if isinstance(node, Leaf) and leaf and grads[0] is not None:
                whole = node.accumulate(grads[0], self.callers[node.device])
                self.ended.append((node.device, stream, whole))
            if goes_on:
                self.go_on(node, grads)

    def go_on(self, node: Node, grads: list[Gradient | None]) -> None:
        """The node's own backward; what it gives goes to the nodes before."""
        need = [x.node in self.needed for x in node.inputs]
        made = [None] * len(need) if all(g is None for g in grads) else node.back(grads, need)
        if not isinstance(made, tuple | list) or len(made) != len(need):  # V1
            got = len(made) if isinstance(made, tuple | list) else f"a {type(made).__name__}"
            raise ValueError(f"{node.name} returned an invalid number of gradients: expected {len(need)}, got {got}")
        for i, x in enumerate(node.inputs):
            self.give((node, i), x, made[i])
