"""micrograd with fanin's pass, to any depth.

    pip install micrograd && python examples/13_micrograd.py

micrograd's `Value._backward` reads `self.grad` and adds to that of each child: it becomes a `fanin.Node`'s function
that returns these additions. micrograd's own pass recurses and ends at a thousand operations in a row; this one does
not.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import fanin

try:
    from micrograd.engine import Value
    from micrograd.nn import MLP
except ImportError:
    raise SystemExit(print("this example needs micrograd, which is not installed")) from None


def children_first(end: Any) -> list[Any]:
    """All that a value was made of, and itself; in a loop."""
    done, waiting = {}, [(end, False)]
    while waiting:
        value, left = waiting.pop()
        if left:
            done[id(value)] = value
        elif id(value) not in done:
            waiting.append((value, True))
            waiting += [(child, False) for child in value._prev if id(child) not in done]
    return list(done.values())


def step(value: Any, children: list[Any]) -> Callable[[Any], Any]:
    """The additions of a value's `_backward` to its children."""

    def fn(g: Any) -> Any:
        value.grad = g if children else value.grad + g  # parameters sum over passes, as micrograd's do
        kept = [child.grad for child in children]
        for child in children:
            child.grad = 0
        value._backward()
        made = tuple(child.grad for child in children)
        for child, grad in zip(children, kept, strict=True):
            child.grad = grad
        return made

    return fn


def backward(self: Any) -> None:
    """In the place of `Value.backward`."""
    made: dict[int, fanin.Node] = {}
    for value in children_first(self):
        of = list(value._prev)
        made[id(value)] = fanin.Node(step(value, of), edges=[(made[id(child)], 0) for child in of])
    fanin.backward([(made[id(self)], 0, 1)])


@contextlib.contextmanager
def on_fanin() -> Iterator[None]:
    """Every `Value.backward` runs on fanin's engine while it lasts."""
    own, Value.backward = Value.backward, backward
    try:
        yield
    finally:
        Value.backward = own


def gradients(points: int = 20) -> list[float]:
    """Of the parameters of a small network, after one pass backward."""
    random.seed(1)
    model = MLP(2, [8, 8, 1])
    xs = [[random.uniform(-1, 1), random.uniform(-1, 1)] for _ in range(points)]
    loss = sum((1 + -model(x) * (1 if x[0] * x[1] > 0 else -1)).relu() for x in xs) * (1 / points)
    loss.backward()
    return [p.grad for p in model.parameters()]


def main() -> None:
    own = gradients()
    with on_fanin():
        ours = gradients()
        x = end = Value(1.0)
        for _ in range(20_000):
            end = end * 1.0001
        end.backward()
    same = all(math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-15) for a, b in zip(own, ours, strict=True))
    print(f"{len(own)} parameters, as micrograd has them: {same}")
    print(f"20,000 operations in a row: {x.grad:.4f}")


if __name__ == "__main__":
    main()
