"""What the tests of exchange share: a library on the fake driver, and collections that cost little."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fanin.testing import FakeDriver
from kit.standins import Library


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """What there is so far is no garbage: leave it out of the many collections of a file."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def library(driver: FakeDriver) -> Library:
    return Library(driver)
