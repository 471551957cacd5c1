"""The law of the ways with torch tensors among NumPy's and SciPy's arrays: kinds of results, too (kit/law.py)."""

from __future__ import annotations

import os

import pytest

import fanin
from kit import law
from kit.lists import FLAVOURS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.partners
SEED = int(os.environ.get("FANIN_SEED", "0"))
MIXED = tuple(f for f in FLAVOURS if f != "objects")  # the text of an object's sum names the class beside it


@pytest.mark.rule("A13")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_sum_of_expanded_tensors_has_memory_of_its_own_for_what_it_repeats(dtype: str) -> None:
    x = torch.ones(1, 2, dtype=getattr(torch, dtype))
    buf = fanin.InputBuffer(1)
    for _ in range(2):
        buf.add(0, x.expand(3, 2))
    total = buf.take()[0]
    assert total.stride() == (0, 1) and total.untyped_storage().nbytes() == x.nbytes
    assert total.tolist() == [[2.0, 2.0]] * 3 and total.data_ptr() != x.data_ptr()


@pytest.mark.rule("A14", "A15")
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The given NumPy array is not writable")
def test_a_list_of_tensors_and_arrays_has_one_sum_of_one_kind_whichever_way_brings_it_in() -> None:
    tally = law.hold(SEED, range(4_000), ways=3, families=("numpy", "torch"), flavours=MIXED)
    assert min(tally.outcomes.values()) > 100, tally.outcomes
    assert tally.kinds["Tensor"] > 500 < tally.kinds["ndarray"], tally.kinds
