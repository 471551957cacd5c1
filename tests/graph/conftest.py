"""The worlds of graph trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(params=["sim", "fake", "cpu"])
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    """A world of one device: the simulated machine, the CUDA backend over the fake driver, the CPU."""
    return a_world(request.param, 1, seed=7)
