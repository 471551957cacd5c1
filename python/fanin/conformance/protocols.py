"""The attributes that the suite uses of the buffer under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Buffer(Protocol):
    """Slots in which gradients meet."""

    def add(self, slot: int, g: object, /, *, key: int | None = None) -> object: ...
    def __getitem__(self, slot: int, /) -> Any: ...
    def take(self) -> list[Any]: ...  # arrays of whichever kind came, or None
    def ready(self, slot: int, /) -> bool: ...
    def expect(self, slot: int, n: int, /) -> object: ...
    def clear(self) -> object: ...


Make = Callable[[int], Buffer]
