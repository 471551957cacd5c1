"""What the tests of rules run on: the description in NumPy and the core in C, by the same tests."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import fanin
from reference import buffer as reference


@pytest.fixture(params=["reference", "C"])
def lib(request: pytest.FixtureRequest) -> ModuleType:
    """The implementation under test: it has InputBuffer, Slot, Sparse and Zero."""
    return reference if request.param == "reference" else fanin


@pytest.fixture
def make_buffer(lib: ModuleType) -> Callable[..., Any]:
    """InputBuffer of the implementation under test."""
    return lib.InputBuffer  # type: ignore[no-any-return]


@pytest.fixture
def total(make_buffer: Callable[..., Any]) -> Callable[..., Any]:
    """total(a, b, ...): the sum of one slot to which these were added in this order; options go to the buffer,
    `slot=` declares it, `out=`, `scale=`, `writable=` go to take."""

    def take(
        *gradients: Any, slot: Any = None, out: Any = None, scale: Any = None, writable: bool = False, **how: Any
    ) -> Any:
        buffer = make_buffer(1 if slot is None else [slot], **how)
        for g in gradients:
            buffer.add(0, g)
        return buffer.take(out=None if out is None else [out], scale=scale, writable=writable)[0]

    return take
