"""The CUDA backend, the exchange of arrays and the fake driver, used by several threads at once: what the thread sanitizer is to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fanin.testing import fake_library
from test_c import checks_made

pytestmark = [pytest.mark.core, pytest.mark.threads]


def test_threads_with_no_lock_between_them_race_for_nothing(c_program: Callable[..., Callable[..., Any]]) -> None:
    """In C: an interpreter's lock would order most of what its threads do."""
    done = c_program("threads_cuda.c")(str(fake_library()))
    assert checks_made(done.stdout) > 100
