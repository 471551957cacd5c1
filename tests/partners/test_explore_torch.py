"""Threads of a simulated machine that add torch tensors: the reduction of explore loses no outcome."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kit.explored import differs, draw

pytestmark = pytest.mark.partners


def test_the_reduction_loses_no_outcome_of_random_scenarios_with_tensors() -> None:
    several = ended = 0
    for seed in range(16):
        program, options = draw(seed, ("torch",))
        words, reduced, _ = differs(program, options, 40)
        assert not words, f"seed {seed}: {options} {program}: {words}"
        several += len(reduced.results) > 1
        ended += reduced.complete
    assert several >= 4 and ended >= 10, (several, ended)
