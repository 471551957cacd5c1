"""Which test files are left out before they are imported: by a selection of marks, or where the sources are missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kit.selection import left_out
from kit.support import ROOT, TESTS, run_python

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
    files = [path for path in TESTS.rglob("test_*.py") if left_out(path.read_text(), "not partners and not tools")]
    assert TESTS / "package/test_selection.py" in files
    assert len(files) > 30 and sum(path.parent.name in ("partners", "fanin_torch") for path in files) > 20


READS = "from kit.support import CSRC\nTEXT = (CSRC / 'README.md').read_text()\ndef test_reads():\n    pass\n"
BUILDS = "def test_builds(c_program):\n    c_program('test_keys.c')\n"
NEITHER = "def test_neither():\n    pass\n"


@pytest.mark.parametrize(
    ("sources", "outcomes"), [(True, "1 failed, 2 passed"), (False, "1 passed, 2 skipped")], ids=["with", "without"]
)
def test_a_copy_of_the_tests_alone_skips_what_needs_the_sources(tmp_path: Path, sources: bool, outcomes: str) -> None:
    """With a folder csrc/ that has no sources of C the program is not skipped: it does not build."""
    for name in ("kit", "fake_cuda"):
        shutil.copytree(TESTS / name, tmp_path / "tests" / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in {"test_reads": READS, "test_builds": BUILDS, "test_neither": NEITHER}.items():
        (tmp_path / f"tests/{name}.py").write_text(text)
    if sources:
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc/README.md").touch()
    done = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, check=False)
    assert done.stdout.splitlines()[-1].startswith(outcomes), done.stdout
