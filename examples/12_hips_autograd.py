"""HIPS autograd with fanin's pass: fanin's engine runs its graph and sums its fan-ins.

    pip install autograd && python examples/12_hips_autograd.py

autograd keeps, for each value, a node with its parents and a function `vjp` from the gradient of the value to those of
the parents. That is a `fanin.Node`. `fanin.grad` replaces its own pass with a dict and `add_outgrads`; everything else
(tracing, operations, second derivatives, containers) stays as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fanin

try:
    import autograd
    import autograd.core
    import autograd.numpy as np
    from autograd.core import sum_outgrads
    from autograd.tracer import toposort
except ImportError:
    print("this example needs autograd, which is not installed")
    sys.exit(0)


#: Arrays are summed by the buffer; boxes of an outer derivative, tuples, lists and dicts as autograd does it.
SLOT = fanin.Slot(combine=lambda a, b: sum_outgrads([a, b]))


def step(vjp: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The gradients of a node for its parents; the gradient of an index is an object, converted to its array."""
    return lambda g: tuple(sum_outgrads([gradient]) for gradient in vjp(g))


def backward_pass(g: Any, end: Any) -> Any:
    """In the place of `autograd.core.backward_pass`: the gradient of the one input, given that of the result."""
    made: dict[Any, fanin.Node] = {}
    order = list(toposort(end))  # each before its parents; last of all the input
    for node in reversed(order):
        made[node] = fanin.Node(step(node.vjp), edges=[(made[parent], 0) for parent in node.parents], slots=[SLOT])
    [gradient] = fanin.grad([(made[end], 0, g)], [made[order[-1]]])
    return gradient


@contextlib.contextmanager
def on_fanin() -> Iterator[None]:
    """All of autograd's reverse mode runs on fanin's engine while it lasts."""
    own, autograd.core.backward_pass = autograd.core.backward_pass, backward_pass
    try:
        yield
    finally:
        autograd.core.backward_pass = own


def loss(parameters: Any, x: Any) -> Any:
    """A network of two layers with its parameters in a dict."""
    hidden = np.tanh(np.dot(x, parameters["w"]) + parameters["b"])
    return np.sum(np.dot(hidden, parameters["v"]) ** 2) + 0.1 * np.sum(parameters["w"] ** 2)


def deep(x: Any) -> Any:
    for _ in range(20_000):
        x = x * 1.0001
    return x


def main() -> None:
    r = np.random.RandomState(0)
    parameters = {"w": r.randn(4, 5), "b": r.randn(5), "v": r.randn(5, 2)}
    x = r.randn(8, 4)
    gradient, curve = autograd.grad(loss), autograd.hessian(lambda x: np.sum(np.sin(x) * x**2))
    own, own_hessian, own_deep = gradient(parameters, x), curve(x[0]), autograd.grad(deep)(1.5)
    with on_fanin():
        ours, our_hessian, our_deep = gradient(parameters, x), curve(x[0]), autograd.grad(deep)(1.5)
    print("gradients:", {name: bool(np.allclose(ours[name], own[name], rtol=1e-14)) for name in sorted(own)})
    print("second derivatives:", bool(np.allclose(our_hessian, own_hessian, rtol=1e-14)))
    print("20,000 operations deep:", our_deep == own_deep)


if __name__ == "__main__":
    main()
