"""An interrupt of a compiled call leaves each argument whole: as before the call, or as after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kit.functionalized import interrupts


def writes(x: Any, y: Any, z: Any) -> Any:
    x += 1
    y *= 2
    z.shape = (3, 2)
    return x[1:]


def arrays() -> list[Any]:
    base = np.arange(8.0)
    return [base[:5], base[3:], np.arange(6)]


def facts(a: Any) -> Any:
    return a.tolist(), a.shape, a.strides


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_call_leaves_arrays_whole_or_untouched() -> None:
    seen = interrupts(writes, arrays, facts, range(1, 10**6, 41))
    assert seen["untouched"] and seen["whole"] and seen["ended"], seen


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_same_holds_at_every_instruction() -> None:
    seen = interrupts(writes, arrays, facts, range(1, 10**6))
    assert seen["untouched"] > 1000 and seen["whole"] and seen["ended"], seen
