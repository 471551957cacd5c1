"""The engines that the tests of a rule run on: the core's, and its reference in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fanin
from reference import engine as reference

ENGINES = {"core": fanin, "reference": reference}


@pytest.fixture(params=ENGINES)
def e(request: pytest.FixtureRequest) -> Any:
    """A module with Node, Leaf, backward and grad."""
    return ENGINES[request.param]


class Log(list[Any]):
    """What ran, in order; and functions that write themselves down there."""

    def node(self, name: str, give: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """A node's function: passes its one sum on, or what `give` makes of the sums."""

        def fn(*sums: Any) -> Any:
            self.append(name)
            return sums[0] if give is None else give(*sums)

        return fn

    def hook(self, name: str, result: Any = None) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            self.append(name)
            return result(*args) if callable(result) else result

        return hook


@pytest.fixture
def log() -> Log:
    return Log()
