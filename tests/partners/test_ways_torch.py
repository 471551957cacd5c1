"""The law of the ways with torch tensors among NumPy's and SciPy's arrays: kinds of results, too (kit/law.py)."""

from __future__ import annotations

import os

import pytest

from kit import law
from kit.lists import FLAVOURS

pytest.importorskip("torch")
pytestmark = pytest.mark.partners
SEED = int(os.environ.get("FANIN_SEED", "0"))
MIXED = tuple(f for f in FLAVOURS if f != "objects")  # the text of an object's sum names the class beside it


@pytest.mark.rule("A14", "A15")
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The given NumPy array is not writable")
def test_a_list_of_tensors_and_arrays_has_one_sum_of_one_kind_whichever_way_brings_it_in() -> None:
    tally = law.hold(SEED, range(4_000), ways=3, families=("numpy", "torch"), flavours=MIXED)
    assert min(tally.outcomes.values()) > 100, tally.outcomes
    assert tally.kinds["Tensor"] > 500 < tally.kinds["ndarray"], tally.kinds
