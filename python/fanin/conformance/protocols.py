"""The attributes that the suite uses of the buffer or engine under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Lacks = Mapping[str, str]
"""Optional: parts of the suite for which the subject has no call, each with the reason that a skipped law shows.

"threads": its calls belong to one thread; "streams": it holds no arrays of the simulated machine. Of engines also
"accumulate": gradients of several passes add up in a leaf; "undefined": a pullback may return None for an input; and
"arrays": gradients may be read-only or broadcast.
"""


class Buffer(Protocol):
    """Slots in which gradients meet. `add` and `take` alone are needed; laws about what a buffer lacks are skipped."""

    lacks: Lacks  # may be missing

    def add(self, slot: int, g: object, /, *, key: int | None = None, stream: Any = None) -> object: ...
    def __getitem__(self, slot: int, /) -> Any: ...
    def take(self, stream: Any = None) -> list[Any]: ...  # arrays of whichever kind came, or None
    def ready(self, slot: int, /) -> bool: ...
    def expect(self, slot: int, n: int, /) -> object: ...
    def clear(self) -> object: ...


Make = Callable[[int], Buffer]
Pullback = Callable[[Any], Sequence[Any]]


class Engine(Protocol):
    """Backward passes over graphs that the suite builds operation by operation. Values are the engine's own objects."""

    lacks: Lacks  # may be missing

    def leaf(self, array: Any) -> Any:
        """A value whose gradient is kept."""

    def op(self, value: Any, pullback: Pullback, inputs: Sequence[Any], *, stream: Any = None) -> Any:
        """The value that an operation made of `inputs`.

        `pullback(g)` is called with the gradient of the result, and returns a sequence with one gradient per input.
        `stream` is the stream on which the pullback runs; an engine whose `op` does not take it skips the laws about
        streams.
        """

    def backward(self, root: Any, gradient: Any) -> object:
        """A pass from `root`, whose gradient is given."""

    def grad(self, leaf: Any) -> Any:
        """The gradient of a leaf, as what NumPy can read; None if there is none."""
