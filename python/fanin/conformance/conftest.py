"""The buffer under test."""

from __future__ import annotations

import importlib
import inspect

import pytest

from .protocols import Make


@pytest.fixture(scope="session")
def make_buffer(request: pytest.FixtureRequest) -> Make:
    """The function that `--fanin-buffer` names."""
    word = request.config.getoption("--fanin-buffer", None)
    if word is None:
        pytest.exit("fanin.conformance needs its plugin: pytest -p fanin.testing.plugin --pyargs ..", returncode=4)
    module, colon, name = word.partition(":")
    if not colon:
        pytest.exit(f"--fanin-buffer: expected MODULE:NAME, as in fanin:InputBuffer, not {word!r}", returncode=4)
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[return-value]


@pytest.fixture
def keyed(make_buffer: Make) -> Make:
    """The same, for laws about keys."""
    add = make_buffer(1).add
    try:
        known = inspect.signature(add).parameters
    except (TypeError, ValueError):
        return make_buffer
    if "key" not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        pytest.skip("this buffer's add has no key=")
    return make_buffer
