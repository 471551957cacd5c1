"""An engine of your own: arrays that record their operations, and derivatives of any order.

    python examples/18_own_engine.py

A node is of a class with its data as attributes; `fanin` runs the pass and sums. A pass has two modes. In an ordinary
pass gradients are ndarrays, and nothing is recorded. With `create_graph=True` they are recorded values like those of
the forward, so each rule's operations and the sums make nodes, and the result can be differentiated again. One rule
serves both, because NumPy's functions take either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fanin


def shaped(g: Any, shape: tuple[int, ...]) -> Any:
    """g summed over the axes that broadcasting has put before."""
    while len(g.shape) > len(shape):
        g = np.add.reduce(g)
    return g


#: Of each function of NumPy's: the gradients of its operands, by that of its result.
RULES: dict[Any, Callable[..., tuple[Any, ...]]] = {
    np.add: lambda g, x, y: (g, g),
    np.subtract: lambda g, x, y: (g, -1.0 * g),
    np.multiply: lambda g, x, y: (g * y, g * x),
    np.divide: lambda g, x, y: (g / y, -1.0 * g * x / (y * y)),
    np.sin: lambda g, x: (g * np.cos(x),),
    np.cos: lambda g, x: (-1.0 * g * np.sin(x),),
    np.exp: lambda g, x: (g * np.exp(x),),
    np.tanh: lambda g, x: (g * (1.0 - np.tanh(x) * np.tanh(x)),),
    "sum": lambda g, x: (g * np.ones(x.shape),),
}


class Operation(fanin.Node):
    """An operation and its operands."""

    def __init__(self, rule: Any, operands: list[Any], shape: tuple[int, ...]) -> None:
        self.rule, self.operands = RULES[rule], operands
        edges = [(x.node, 0) if isinstance(x, Value) else None for x in operands]
        super().__init__(self.gradients, edges=edges, name=getattr(rule, "__name__", rule))

    def gradients(self, g: Any) -> tuple[Any, ...]:
        recorded = isinstance(g, Value)
        xs = [x.array if isinstance(x, Value) and not recorded else x for x in self.operands]
        wanted = zip(self.rule(g, *xs), self.operands, strict=True)
        return tuple(shaped(d, x.shape) if isinstance(x, Value) else None for d, x in wanted)


class Value(np.lib.mixins.NDArrayOperatorsMixin):
    """An array, and the node that receives its gradient."""

    def __init__(self, array: Any, node: fanin.Node | fanin.Leaf | None = None) -> None:
        self.array = np.asarray(array)
        self.node = fanin.Leaf(self.array) if node is None else node

    shape = property(lambda self: self.array.shape)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any) -> Value:
        rule = ufunc if method == "__call__" else "sum" if (ufunc, method) == (np.add, "reduce") else None
        if rule not in RULES:
            return NotImplemented
        made = getattr(ufunc, method)(*[x.array if isinstance(x, Value) else x for x in operands])
        return Value(made, Operation(rule, list(operands), made.shape))


def grad(f: Callable[..., Value], create_graph: bool = False) -> Callable[..., Any]:
    """The derivative of f, whose result is a single number, by its first operand."""

    def derivative(x: Any, *more: Any) -> Any:
        x = x if isinstance(x, Value) else Value(x)
        y = f(x, *more)
        one = np.ones(y.shape)
        return fanin.grad([(y.node, 0, Value(one) if create_graph else one)], [x.node], create_graph=create_graph)[0]

    return derivative


if __name__ == "__main__":
    wave = lambda x: np.add.reduce(np.sin(x) * np.exp(x))  # noqa: E731
    at = np.array([0.5, 1.0, 2.0])
    print("first:", grad(wave)(at))
    slope = grad(wave, create_graph=True)
    print("second:", grad(lambda x: np.add.reduce(slope(x)))(at), "=", 2 * np.exp(at) * np.cos(at))
