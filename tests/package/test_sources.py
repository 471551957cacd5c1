"""The names in the objects of a release: none is unused, none is for tests alone; numbers that leave the default
floating-point modes; and which tests fork.

Each checker has a planted fault that it must find.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.support import CSRC, ROOT, TESTS, cache_dir, compiler
from kit.tree import compile_objects, used_in_one_file_alone

pytestmark = pytest.mark.tools


def release(csrc: Path, cache: Path) -> dict[str, Path]:
    """The objects of a release."""
    if not compiler():
        pytest.skip("no C compiler: set CC")
    if sys.platform != "linux":
        pytest.skip("object files are read as ELF, which is Linux's")
    return compile_objects(csrc, compiler(), cache)


def dead(csrc: Path, cache: Path) -> list[str]:
    """Names that the objects of a release show each other and that no other file uses, nor the fake driver, which is
    linked with the lower rungs.
    """
    found = used_in_one_file_alone(release(csrc, cache))
    driver = {name for path in (TESTS / "fake_cuda").glob("*.[ch]") for name in re.findall(r"\w+", path.read_text())}
    return [
        f"{name} of {file}" for name, file in found.items() if not name.startswith("PyInit_") and name not in driver
    ]


def test_every_global_name_is_used_by_another_file() -> None:
    """Names that only tests use need FAN_TEST; names that one file uses are static; unused names are not there."""
    assert not dead(CSRC, cache_dir())


def test_a_planted_dead_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/a.c").write_text("int fan_used(void) { return 1; }\nint fan_own(void) { return 1; }\n")
    (tmp_path / "base/b.c").write_text("int fan_used(void);\nint PyInit__core(void) { return fan_used(); }\n")
    assert dead(tmp_path, tmp_path) == ["fan_own of base/a.c"]
    (tmp_path / "base/a.c").write_text("int fan_used(void) { return 1; }\n#ifdef FAN_TEST\nint fan_own;\n#endif\n")
    assert dead(tmp_path, tmp_path) == []


def for_tests_alone(objects: dict[str, Path]) -> list[str]:
    """The sources whose release object contains a Python name that only tests use."""
    return [
        f"{name} names {match[0].decode()} for tests alone: it belongs under FAN_TEST, or into tests/c/inside.c"
        for name, obj in objects.items()
        if (match := re.search(rb"\b(_test_\w+|rules_\w+(?=\())", obj.read_bytes()))
    ]


def test_a_release_shows_python_nothing_for_tests_alone() -> None:
    assert not for_tests_alone(release(CSRC, cache_dir()))


def test_a_planted_function_for_tests_is_found(tmp_path: Path) -> None:
    (tmp_path / "py").mkdir()
    (tmp_path / "py/x.c").write_text(
        'const char *fan_x = "test_x";\n#ifdef FAN_TEST\nconst char *y = "_test_y";\n#endif\n'
    )
    assert for_tests_alone(release(tmp_path, tmp_path)) == []
    (tmp_path / "py/x.c").write_text('const char *fan_x[] = {"x", "_test_y"};\n')
    assert for_tests_alone(release(tmp_path, tmp_path)) == [
        "py/x.c names _test_y for tests alone: it belongs under FAN_TEST, or into tests/c/inside.c"
    ]


def computed_beside_the_modes(csrc: Path) -> list[str]:
    """The functions in the default floating-point modes whose result a compiler may compute after them."""
    function = re.compile(
        r"^(?:static )?(?:inline )?(?:double|float) (\w+)\([^;{]*\)\n\{\n(.*?)^\}", re.MULTILINE | re.DOTALL
    )
    return [
        f"{name} of {path.name} returns a number without FAN_FLOAT_BARRIER"
        for path in sorted(csrc.glob("**/*.[ch]"))
        for name, body in function.findall(path.read_text())
        if "FAN_DEFAULT_FLOAT_MODE;" in body and "FAN_FLOAT_BARRIER(" not in body
    ]


def test_no_function_leaves_its_floating_point_modes_before_its_result() -> None:
    assert computed_beside_the_modes(CSRC) == []


def test_a_planted_result_without_a_barrier_is_found(tmp_path: Path) -> None:
    text = (
        "static double x(double a,\n                double b)\n{\n    FAN_DEFAULT_FLOAT_MODE;\n    return a + b;\n}\n"
    )
    (tmp_path / "x.c").write_text(text)
    assert computed_beside_the_modes(tmp_path) == ["x of x.c returns a number without FAN_FLOAT_BARRIER"]
    (tmp_path / "x.c").write_text(text.replace("return", "FAN_FLOAT_BARRIER(a);\n    return"))
    assert computed_beside_the_modes(tmp_path) == []


# Forks


def forks(root: Path) -> list[str]:
    """Where a test forks the process that it runs in."""
    found = []
    for path in sorted((root / "tests").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
                found.append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
    return found


def test_one_function_forks_the_process_of_the_tests() -> None:
    """It expects the warnings of libraries that other tests have imported. kit/forking.py is no process of tests."""
    assert {place.split(":")[0] for place in forks(ROOT)} == {"tests/kit/child.py", "tests/kit/forking.py"}


def test_a_planted_fork_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text('import os\nx = "os.fork()"\nos.fork()\n')
    assert forks(tmp_path) == ["tests/a.py:3"]


def test_ruff_reads_every_file_of_python() -> None:
    """Its default leaves out folders called dist, of which fanin.dist is one."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    words = [ruff, "check", "--show-files", "--no-respect-gitignore", "python"]  # a copy may lie in an ignored folder
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    seen = {Path(line) for line in done.stdout.splitlines()}
    assert set((ROOT / "python").rglob("*.py")) - seen == set()
