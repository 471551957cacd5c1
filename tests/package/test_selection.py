"""Which test files a selection of marks leaves out before they are imported (kit/selection.py)."""

from __future__ import annotations

import pytest

from kit.selection import left_out
from kit.support import TESTS

pytestmark = pytest.mark.tools

LINE = "pytestmark = pytest.mark.slow\n"
LIST = "pytestmark = [pytest.mark.core, pytest.mark.partners]\nx = [\n    pytest.mark.slow,\n]\n"
LINES = "pytestmark = [\n    pytest.mark.core,\n    pytest.mark.full,\n]\n"
ONE_TEST = "@pytest.mark.slow\ndef test_x():\n    pass\n"


@pytest.mark.parametrize(
    ("text", "selection", "out"),
    [
        (LINE, "not slow", True),
        (LINE, "core and not slow", True),
        (LINE, "slow", False),
        (LINE, "", False),
        (LIST, "not partners", True),
        (LIST, "not tools and not core", True),
        (LIST, "core and not slow", False),
        (LINES, "not full", True),
        (LINES, "full and not slow", False),
        (ONE_TEST, "not slow", False),
        (LINE, "not slow or core", False),
        (LINE, "not (slow)", False),
        (LINE, "(core or x) and not slow", False),
    ],
)
def test_a_file_is_left_out_where_its_own_marks_exclude_all_of_its_tests(text: str, selection: str, out: bool) -> None:
    assert left_out(text, selection) == out


def test_the_files_of_partners_and_of_tools_are_left_out_of_the_ordinary_run() -> None:
    files = [path for path in TESTS.glob("*/test_*.py") if left_out(path.read_text(), "not partners and not tools")]
    assert TESTS / "package/test_selection.py" in files
    assert len(files) > 30 and sum(path.parent.name == "partners" for path in files) > 20
