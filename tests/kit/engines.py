"""Engines and buffers of others, as `fanin.conformance` calls them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import fanin
from reference import InputBuffer
from reference import engine as reference
from reference.buffer import Slot

Pullback = Callable[[Any], Sequence[Any]]

ONE_THREAD = "written for one thread"
HOST = "its arrays are on the host"


def plus(a: Any, b: Any) -> Any:
    """a + b; on the simulated machine a kernel on the current stream."""
    return fanin.add_n([a, b]) if isinstance(a, fanin.sim.Array) else a + b


# The reference, and a dict of +=


class ReferenceBuffer(InputBuffer):
    lacks: ClassVar[Mapping[str, str]] = {"threads": ONE_THREAD, "streams": HOST}

    def __init__(self, n: int) -> None:
        super().__init__(n)


class Reference:
    """reference.engine."""

    lacks: Mapping[str, str] = {"threads": ONE_THREAD}

    def leaf(self, array: Any) -> Any:
        return (reference.Leaf(array), 0)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        return (reference.Node(pullback, edges=inputs, slots=[Slot(shape=value.shape, dtype=value.dtype)]), 0)

    def backward(self, root: Any, gradient: Any) -> None:
        reference.backward([(*root, gradient)])

    def grad(self, leaf: Any) -> Any:
        return leaf[0].grad


class DictBuffer:
    """`sums[slot] += gradient`."""

    lacks: Mapping[str, str] = {"threads": ONE_THREAD}

    def __init__(self, n: int) -> None:
        self.n, self.sums = n, dict[int, Any]()

    def add(self, slot: int, g: Any, *, stream: Any = None) -> None:
        if g is None:
            return
        if slot not in self.sums:
            self.sums[slot] = g
        elif isinstance(g, fanin.sim.Array):
            with fanin.stream(stream):
                self.sums[slot] = plus(self.sums[slot], g)
        else:
            self.sums[slot] += g

    def take(self, stream: Any = None) -> list[Any]:
        sums, self.sums = self.sums, {}
        return [sums.get(i) for i in range(self.n)]


class Value:
    """A value of Dict, or a leaf."""

    numbers = itertools.count()

    def __init__(self, pullback: Pullback | None = None, inputs: Sequence[Value] = (), stream: Any = None) -> None:
        self.number, self.pullback, self.inputs, self.stream = next(Value.numbers), pullback, inputs, stream
        self.grad: Any = None


class Dict:
    """An engine as it is often begun: the graph in the order in which it was made, and a dict of +=."""

    lacks: Mapping[str, str] = {"threads": ONE_THREAD}

    def leaf(self, array: Any) -> Value:
        return Value()

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Value], *, stream: Any = None) -> Value:
        return Value(pullback, inputs, stream)

    def backward(self, root: Value, gradient: Any) -> None:
        found, stack = {root}, [root]
        while stack:
            new = [x for x in stack.pop().inputs if x not in found]
            found.update(new)
            stack += new
        sums = {root: gradient}
        for v in sorted(found, key=lambda v: -v.number):
            g = sums.pop(v, None)
            if g is None:
                continue
            if v.pullback is None:
                v.grad = g if v.grad is None else plus(v.grad, g)
                continue
            for x, part in zip(v.inputs, self.call(v, g), strict=False):
                self.accumulate(sums, x, part)

    def call(self, v: Value, g: Any) -> Sequence[Any]:
        assert v.pullback is not None
        if v.stream is None:
            return v.pullback(g)
        with fanin.stream(v.stream):
            return v.pullback(g)

    def accumulate(self, sums: dict[Value, Any], x: Value, part: Any) -> None:
        if part is None:
            return
        if x not in sums:
            sums[x] = part
        elif isinstance(part, fanin.sim.Array):
            sums[x] = plus(sums[x], part)
        else:
            sums[x] += part

    def grad(self, leaf: Value) -> Any:
        return leaf.grad


# Other people's


class Torch:
    """torch.autograd, by a Function whose backward calls the pullback.

    An array of the suite is one tensor, which stays referenced as long as the suite may use the array: torch
    writes into tensors that have no other reference.
    """

    lacks: Mapping[str, str] = {"streams": HOST, "arrays": "torch.from_numpy takes no read-only arrays"}

    def __init__(self) -> None:
        import torch

        self.torch, self.tensors = torch, dict[int, tuple[Any, Any]]()
        engine = self

        class Operation(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Any, pullback: Pullback, *inputs: Any) -> Any:
                ctx.pullback = pullback
                return torch.tensor(value)

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                array = g.numpy()
                engine.tensors[id(array)] = (array, g)
                return (None, None, *(None if p is None else engine.tensor(p) for p in ctx.pullback(array)))

        self.operation = Operation

    def tensor(self, array: Any) -> Any:
        return self.tensors.setdefault(id(array), (array, self.torch.from_numpy(array)))[1]

    def leaf(self, array: Any) -> Any:
        return self.torch.tensor(array, requires_grad=True)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        with self.torch.enable_grad():
            return self.operation.apply(value, pullback, *inputs)

    def backward(self, root: Any, gradient: Any) -> None:
        root.backward(self.tensor(gradient))

    def grad(self, leaf: Any) -> Any:
        return None if leaf.grad is None else leaf.grad.numpy()


class Hips:
    """HIPS autograd, by a primitive for each operation. It has no leaves: each is a root that keeps its gradient."""

    lacks: Mapping[str, str] = {
        "accumulate": "it returns gradients and keeps none",
        "undefined": "its gradients are arrays of a vector space",
        "streams": HOST,
    }

    def __init__(self) -> None:
        from autograd import core, extend, tracer

        self.core, self.extend, self.tracer = core, extend, tracer
        self.kept: dict[Any, Any] = {}

    def leaf(self, array: Any) -> Any:
        node = self.core.VJPNode.new_root()
        node.vjp = lambda g: self.kept.update({node: g}) or ()
        return self.tracer.new_box(array, 0, node)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        @self.extend.primitive
        def operation(*arrays: Any) -> Any:
            return value

        self.core.defvjp_argnums(operation, lambda argnums, ans, args, kwargs: pullback)
        return operation(*inputs)

    def backward(self, root: Any, gradient: Any) -> None:
        self.core.backward_pass(gradient, root._node)

    def grad(self, leaf: Any) -> Any:
        return self.kept.get(leaf._node)


class Micrograd:
    """micrograd. Its sums are written by each operation, with +=, so they are here; its values hold arrays."""

    lacks: Mapping[str, str] = {"threads": "no lock protects its +=", "streams": HOST}

    def __init__(self) -> None:
        from micrograd.engine import Value

        self.value = Value

    def leaf(self, array: Any) -> Any:
        return self.value(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        out = self.value(value, tuple(inputs))

        def backward() -> None:
            for x, g in zip(inputs, pullback(out.grad), strict=False):
                if g is not None:
                    x.grad += g

        out._backward = backward
        return out

    def backward(self, root: Any, gradient: Any) -> None:
        """It begins with 1: an operation above the root gives the gradient."""
        self.op(root.data, lambda g: (gradient,), [root]).backward()

    def grad(self, leaf: Any) -> Any:
        return None if isinstance(leaf.grad, int) else leaf.grad


class MyGrad:
    """MyGrad, by an Operation. It calls it once for each input: the first call runs the pullback."""

    lacks: Mapping[str, str] = {
        "accumulate": "a new pass replaces the gradients of the one before",
        "streams": HOST,
    }

    def __init__(self) -> None:
        import mygrad
        from mygrad._utils import SkipGradient
        from mygrad.operation_base import Operation

        class Op(Operation):  # type: ignore[misc]
            def __call__(self, *inputs: Any, value: Any, pullback: Pullback) -> Any:
                self.variables, self.pullback = inputs, pullback
                return np.array(value)

            def backward_var(self, grad: Any, index: int, **options: Any) -> Any:
                if index == 0:
                    self.parts = self.pullback(grad)
                if self.parts[index] is None:
                    raise SkipGradient
                return self.parts[index]

        self.tensor, self.operation = mygrad.Tensor, Op

    def leaf(self, array: Any) -> Any:
        return self.tensor(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        return self.tensor._op(self.operation, *inputs, op_kwargs={"value": value, "pullback": pullback})

    def backward(self, root: Any, gradient: Any) -> None:
        root.backward(gradient)

    def grad(self, leaf: Any) -> Any:
        return leaf.grad


class Tinygrad:
    """tinygrad, by a call with a gradient function, which computes the gradient, runs the pullback on it, and puts the
    results into the graph. What runs late in tinygrad is therefore run at once.
    """

    lacks: Mapping[str, str] = {
        "threads": "a pass goes through all tensors of the process",
        "streams": HOST,
        "arrays": "its gradients are its own arrays",
    }

    def __init__(self) -> None:
        import os

        os.environ.update(DEV="PYTHON", CACHELEVEL="0")  # no compiler, no data base of compiled kernels
        from tinygrad import Tensor

        self.tensor = Tensor

    def array(self, x: Any) -> Any:
        return self.tensor(np.array(x)).realize()

    def leaf(self, array: Any) -> Any:
        return self.array(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        def gradient(g: Any, call: Any) -> Any:
            parts = pullback(self.tensor(g).numpy())
            return tuple(None if p is None else self.array(p).uop for p in parts)

        body = sum((x.as_param(i) for i, x in enumerate(inputs[1:], 1)), inputs[0].as_param(0))
        return inputs[0].call(*inputs[1:], fxn=self.tensor(body.uop.maketuple(body.uop)), grad_fxn=gradient)

    def backward(self, root: Any, gradient: Any) -> None:
        root.backward(self.array(gradient))

    def grad(self, leaf: Any) -> Any:
        return None if leaf.grad is None else leaf.grad.numpy()


class Paddle:
    """PaddlePaddle, by a PyLayer. As for torch, an array of the suite is one tensor, which shares its memory."""

    lacks: Mapping[str, str] = {"streams": HOST, "arrays": "paddle.from_dlpack takes no read-only arrays"}

    def __init__(self) -> None:
        import paddle

        self.paddle, self.tensors = paddle, dict[int, tuple[Any, Any]]()
        engine = self

        class Operation(paddle.autograd.PyLayer):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, *inputs: Any, value: Any, pullback: Pullback) -> Any:
                ctx.pullback = pullback
                return paddle.to_tensor(value)

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                own = g.detach()
                array = np.from_dlpack(own)
                engine.tensors[id(array)] = (array, own)
                parts = [None if p is None else engine.tensor(p) for p in ctx.pullback(array)]
                return parts[0] if len(parts) == 1 else tuple(parts)

        self.operation = Operation

    def tensor(self, array: Any) -> Any:
        return self.tensors.setdefault(id(array), (array, self.paddle.from_dlpack(array)))[1]

    def leaf(self, array: Any) -> Any:
        return self.paddle.to_tensor(array, stop_gradient=False)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        with self.paddle.enable_grad():
            return self.operation.apply(*inputs, value=value, pullback=pullback)

    def backward(self, root: Any, gradient: Any) -> None:
        root.backward(self.tensor(gradient))

    def grad(self, leaf: Any) -> Any:
        return None if leaf.grad is None else leaf.grad.numpy()


class DeZero:
    """DeZero, by a Function. Its gradients are variables. It needs np.int, which NumPy has no more."""

    lacks: Mapping[str, str] = {"threads": "written for one thread: a switch of the module", "streams": HOST}

    def __init__(self) -> None:
        if not hasattr(np, "int"):
            np.int = int  # type: ignore[attr-defined]
        from dezero.core import Function, Variable

        class Operation(Function):  # type: ignore[misc]
            def __init__(self, value: Any, pullback: Pullback) -> None:
                self.value, self.pullback = value, pullback

            def forward(self, *arrays: Any) -> Any:
                return np.array(self.value)

            def backward(self, g: Any) -> Any:
                return tuple(None if p is None else Variable(p) for p in self.pullback(g.data))

        self.variable, self.operation, self.alive = Variable, Operation, list[Any]()

    def leaf(self, array: Any) -> Any:
        return self.variable(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        from dezero.core import using_config

        with using_config("enable_backprop", True):
            self.alive.append(self.operation(value, pullback)(*inputs))  # a function refers to its result weakly
        return self.alive[-1]

    def backward(self, root: Any, gradient: Any) -> None:
        root.grad = self.variable(gradient)
        root.backward()

    def grad(self, leaf: Any) -> Any:
        return None if leaf.grad is None else leaf.grad.data


class SmallPebble:
    """SmallPebble, by a function for each input of an operation: the first call runs the pullback. It has no leaves,
    and begins with 1: an operation above the root gives the gradient.
    """

    lacks: Mapping[str, str] = {
        "accumulate": "it returns gradients and keeps none",
        "undefined": "each of its functions returns an array",
        "streams": HOST,
    }

    def __init__(self) -> None:
        import smallpebble

        self.pebble, self.kept = smallpebble, dict[Any, Any]()

    def leaf(self, array: Any) -> Any:
        return self.pebble.Variable(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        parts: list[Any] = []

        def part(index: int) -> Callable[[Any], Any]:
            def function(g: Any) -> Any:
                if index == 0:
                    parts[:] = pullback(g)
                return parts[index]

            return function

        return self.pebble.Variable(value, [(x, part(i)) for i, x in enumerate(inputs)])

    def backward(self, root: Any, gradient: Any) -> None:
        self.kept |= self.pebble.get_gradients(self.op(root.array, lambda g: (gradient,), [root]))

    def grad(self, leaf: Any) -> Any:
        return self.kept.get(leaf)


class Edugrad:
    """edugrad, by an Operation. It begins at a scalar: an operation above the root gives the gradient. A gradient that
    is zero counts as none, because that is what each value begins with.
    """

    lacks: Mapping[str, str] = {
        "threads": "no lock protects its +=",
        "undefined": "each of its gradients is an array",
        "streams": HOST,
    }

    def __init__(self) -> None:
        from edugrad import tensor

        self.module = tensor

    def leaf(self, array: Any) -> Any:
        return self.module.Tensor(array)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any]) -> Any:
        class Operation(self.module.Operation):  # type: ignore[misc, name-defined]
            @staticmethod
            def forward(ctx: Any, *arrays: Any) -> Any:
                return value

            @staticmethod
            def backward(ctx: Any, g: Any) -> Any:
                return pullback(g)

        return self.module.tensor_op(Operation)(*inputs)

    def backward(self, root: Any, gradient: Any) -> None:
        self.op(np.float64(0), lambda g: (gradient,), [root]).backward()

    def grad(self, leaf: Any) -> Any:
        return leaf.grad if leaf.grad.any() else None
