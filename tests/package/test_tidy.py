"""clang-tidy's checks of C (.clang-tidy)."""

from __future__ import annotations

import runpy
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from kit.support import CSRC, ROOT

pytestmark = pytest.mark.tools
TIDY = Path(sysconfig.get_path("scripts")) / "clang-tidy"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How the core is compiled, with the headers that the build makes."""
    if not TIDY.exists():
        pytest.skip("clang-tidy is not installed: the extra dev")
    made = tmp_path_factory.mktemp("declared")
    runpy.run_path(str(CSRC / "py" / "declare.py"))["write"](made)
    folders = [CSRC, ROOT / "python/fanin/include", made, sysconfig.get_path("include"), np.get_include()]
    return ["-std=c11", "-DFAN_TEST=1", *(f"-I{folder}" for folder in folders)]


def tidy(files: list[Path], flags: list[str]) -> str:
    """What clang-tidy finds in files; "" for nothing."""
    config = f"--config-file={ROOT / '.clang-tidy'}"
    done = subprocess.run([TIDY, "--quiet", config, *files, "--", *flags], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_conditional_operators_are_not_nested_and_no_function_is_too_complex(flags: list[str]) -> None:
    files = sorted(CSRC.rglob("*.c"))
    assert len(files) > 100
    assert not tidy(files, flags)


def test_a_planted_one_is_found(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "planted.c"
    file.write_text("int f(int a, int b);\nint f(int a, int b)\n{\n    return a ? 1 : b ? 2 : 3;\n}\n")
    assert "readability-avoid-nested-conditional-operator" in tidy([file], flags)
    file.write_text("int f(int a, int b);\nint f(int a, int b)\n{\n    return a ? 1 : b;\n}\n")
    assert not tidy([file], flags)
    inner = "for (int j = 0; j < b; j++)\n            if (a & j)\n                if (j > i)\n"
    for loops, found in ((2, False), (3, True)):  # each counts 1 + 2 + 3 + 4
        body = f"    for (int i = 0; i < a; i++)\n        {inner}                    n++;\n" * loops
        file.write_text(f"int f(int a, int b);\nint f(int a, int b)\n{{\n    int n = 0;\n{body}    return n;\n}}\n")
        assert ("readability-function-cognitive-complexity" in tidy([file], flags)) == found
