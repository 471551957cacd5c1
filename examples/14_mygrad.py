"""MyGrad with fanin's pass: tensors and the operations that created them.

    pip install mygrad && python examples/14_mygrad.py

A tensor of MyGrad has its creator, an operation with a `backward` that adds to the `_grad` of each of its variables. As
a `fanin.Node`'s function it takes the tensor's sum and returns these additions; everything else stays MyGrad's.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fanin

try:
    import mygrad as mg
    from mygrad._utils import collect_all_tensors_and_clear_grads
except ImportError:
    print("this example needs mygrad, which is not installed")
    sys.exit(0)


def step(tensor: Any, variables: list[Any]) -> Callable[[Any], Any]:
    """The additions of a tensor's creator to its variables."""

    def fn(g: Any) -> Any:
        tensor._grad = g
        if not variables:
            return ()
        for variable in variables:
            variable._grad = None
        tensor.creator.backward(g)
        made = tuple(variable._grad for variable in variables)  # None: the operation passed it over
        for variable in variables:
            variable._grad = None
        return made

    return fn


def backward(self: Any, grad: Any = None) -> None:
    """In the place of `Tensor.backward`."""
    if not mg._utils.graph_tracking.TRACK_GRAPH:
        return
    if not self.constant:
        order: deque[Any] = deque()
        collect_all_tensors_and_clear_grads(self, set(), order)  # each before those that it was made of
        made: dict[int, fanin.Node] = {}
        for tensor in reversed(order):
            creator = tensor.creator
            variables = {id(v): v for v in creator.variables if not v.constant} if creator is not None else {}
            made[id(tensor)] = fanin.Node(
                step(tensor, list(variables.values())),
                edges=[(made[v], 0) for v in variables],
                slots=[fanin.Slot(shape=tensor.shape, dtype=tensor.dtype)],
            )
        first = np.array(np.broadcast_to(np.asarray(1.0 if grad is None else grad, self.dtype), self.shape))
        fanin.backward([(made[id(self)], 0, first)])
    self.clear_graph()


@contextlib.contextmanager
def on_fanin() -> Iterator[None]:
    """Every `Tensor.backward` runs on fanin's engine while it lasts."""
    own, mg.Tensor.backward = mg.Tensor.backward, backward
    try:
        yield
    finally:
        mg.Tensor.backward = own


def gradients() -> list[Any]:
    """Of a small network, with a fan-in, a view, and an update in place."""
    r = np.random.RandomState(0)
    w, b, x = mg.tensor(r.randn(4, 5)), mg.tensor(r.randn(5)), r.randn(8, 4)
    hidden = mg.tanh(x @ w + b)
    rows = hidden[::2]  # a view
    scaled = +hidden
    scaled[1] = rows[0] * 3.0  # in place
    loss = (hidden * scaled).sum() + (rows**2).mean() + 0.1 * (w**2).sum()
    loss.backward()
    return [w.grad, b.grad, hidden.grad, rows.grad]


def main() -> None:
    own = gradients()
    with on_fanin():
        ours = gradients()
    for name, a, b in zip(("w", "b", "hidden", "rows"), ours, own, strict=True):
        print(f"{name}: {bool(np.allclose(a, b, rtol=1e-14))}")


if __name__ == "__main__":
    main()
