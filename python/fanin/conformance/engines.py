"""fanin's own engine, as the suite calls it: an example of the few methods that it needs of yours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fanin

from .protocols import Pullback


class Fanin:
    """A value is the edge to which its gradient goes: a node and its slot."""

    def leaf(self, array: Any) -> Any:
        return (fanin.Leaf(array), 0)

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any], *, stream: Any = None) -> Any:
        return (fanin.Node(pullback, edges=inputs, slots=[value], stream=stream), 0)

    def backward(self, root: Any, gradient: Any) -> None:
        fanin.backward([(*root, gradient)])

    def grad(self, leaf: Any) -> Any:
        return leaf[0].grad
