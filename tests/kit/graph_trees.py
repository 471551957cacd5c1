"""Graph trees in a world (kit/world.py): helpers that many of their tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fanin


def launch(m: Any, fn: Callable[..., Any], reads: list[Any], writes: list[Any], stream: Any = None) -> None:
    m.launch(stream or m.current_stream(), fn, reads=reads, writes=writes)


def scaled(m: Any, factor: float) -> Callable[..., Any]:
    """A function that allocates, and multiplies by a number."""

    def times(x: Any) -> Any:
        y = m.empty(x.shape, x.dtype)
        launch(m, lambda a, b: np.multiply(a, factor, out=b), [x], [y])
        return y

    times.__name__ = f"times_{factor:g}"
    return times


def tree_on(m: Any, **more: Any) -> Any:
    return fanin.GraphTree(m.place(), **{"memory": 1 << 16, **more})


def did(function: Any) -> Any:
    return function.last.did
