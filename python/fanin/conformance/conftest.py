"""The buffer and the engine under test."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from .protocols import Engine, Make
from .values import takes


def named(request: pytest.FixtureRequest, option: str) -> Any:
    """The object that an option names, as in fanin:InputBuffer."""
    word = request.config.getoption(option, None)
    if word is None:
        pytest.exit("fanin.conformance needs its plugin: pytest -p fanin.testing.plugin --pyargs ..", returncode=4)
    module, _, name = word.partition(":")
    if not name:
        pytest.exit(f"{option}: expected MODULE:NAME, as in fanin:InputBuffer, not {word!r}", returncode=4)
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.fixture(scope="session")
def make_buffer(request: pytest.FixtureRequest) -> Make:
    """The function that `--fanin-buffer` names."""
    return named(request, "--fanin-buffer")  # type: ignore[no-any-return]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """A new engine from the function that `--fanin-engine` names."""
    return named(request, "--fanin-engine")()  # type: ignore[no-any-return]


@pytest.fixture
def keyed(make_buffer: Make) -> Make:
    """The buffer under test, for laws about keys."""
    if not takes(make_buffer(1).add, "key"):
        pytest.skip("this buffer's add has no key=")
    return make_buffer
