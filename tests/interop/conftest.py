"""What the tests of exchange share: a library on the fake driver."""

from __future__ import annotations

import pytest

from fake_cuda import FakeDriver
from kit.standins import Library


@pytest.fixture
def library(driver: FakeDriver) -> Library:
    return Library(driver)
