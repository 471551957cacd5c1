"""Descriptions of objects for the core (fanin/_interop/records.py): tuples that it distinguishes by their number of
fields.
"""

from __future__ import annotations

import re
from typing import Any, get_args

import numpy as np
import pytest

import fanin
from fanin._interop import arrays, records
from kit.support import CSRC


def sizes(union: Any) -> dict[str, int]:
    return {t.__name__: len(t._fields) for t in get_args(union) if issubclass(t, tuple)}


@pytest.mark.parametrize("union", [records.Description, records.Memory, records.Source])
def test_no_two_records_that_may_stand_in_one_place_have_as_many_fields(union: Any) -> None:
    found = sizes(union)
    assert len(found) > 1 and len(set(found.values())) == len(found), found


def test_the_core_knows_as_many_fields_as_the_records_have() -> None:
    text = "".join(p.read_text() for p in sorted((CSRC / "py").rglob("*.c")))
    for name, size in sizes(records.Description).items():
        constant = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() + "_FIELDS"
        assert re.search(rf"\b{constant} = {size}\b", text), f"{name} has {size} fields"


def test_what_is_no_record_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (("dense",) * 5, (), None, records.Capsule(None, 1, 0, 0)):
        monkeypatch.setattr(arrays, "describe", lambda *a, wrong=wrong: wrong)
        with pytest.raises(SystemError, match="no record"):
            fanin.InputBuffer(1).add(0, memoryview(np.ones(2)))
