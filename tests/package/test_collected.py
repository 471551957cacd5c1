"""Every test file is collected: by default pytest skips folders of some names, "dist" among them."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePath

import pytest

from kit.support import ROOT

pytestmark = pytest.mark.tools


def left_out(files: list[PurePath], patterns: list[str]) -> list[str]:
    """The files, given from the root, in a folder whose name pytest does not enter."""
    return [str(file) for file in files if any(fnmatch(part, p) for part in file.parts[:-1] for p in patterns)]


def test_no_test_file_is_in_a_folder_that_pytest_leaves_out(pytestconfig: pytest.Config) -> None:
    files: list[PurePath] = [path.relative_to(ROOT) for path in Path(ROOT, "tests").rglob("test_*.py")]
    assert len(files) > 200
    assert left_out(files, pytestconfig.getini("norecursedirs")) == []


def test_a_folder_that_is_left_out_is_found() -> None:
    """The patterns are those that pytest has by default."""
    patterns = ["*.egg", ".*", "_darcs", "build", "CVS", "dist", "node_modules", "venv", "{arch}"]
    files = [PurePath("tests/dist/test_sums.py"), PurePath("tests/array/sim/test_sums.py")]
    assert left_out(files, patterns) == ["tests/dist/test_sums.py"]
