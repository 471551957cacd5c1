"""Samples: a long test has two sizes. The ordinary run takes a sample, whose size is chosen by the planted faults that
it must find; the mark `full` takes the whole, and `.ci/run` runs it.

The test of a planted fault uses the sample's size, so that a sample that became too small fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def values(case: Any) -> tuple[Any, ...]:
    """A case as `parametrize` takes it: a tuple is several values, anything else is one."""
    return case if isinstance(case, tuple) else (case,)


def sizes(sample: Any, full: Any) -> list[Any]:
    """The two sizes of one test, for `parametrize`."""
    return [
        pytest.param(*values(sample), id="sample"),
        pytest.param(*values(full), id="full", marks=pytest.mark.full),
    ]


def every(step: int, cases: Sequence[Any]) -> list[Any]:
    """Cases for `parametrize`: the first of each `step` is in the sample, the others are `full`."""
    return [pytest.param(*values(case), marks=pytest.mark.full if i % step else ()) for i, case in enumerate(cases)]
