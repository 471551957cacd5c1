"""Each part of kit/parts.py can be removed from a copy of the tree: the rest builds, imports and passes its tests."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fanin
from kit.core_names import SIGNATURES
from kit.parts import (
    CORE,
    PAGES,
    PARTS,
    WITHOUT_PYTHON,
    core_tests,
    folders_of,
    needed_by,
    part_of,
    remove,
    wrong_edges,
)
from kit.support import CSRC, ROOT, cache_dir, compiler, core_file, emptied, run_python, sanitizer
from kit.tree import Edge, c_edges, compile_objects, python_edges

pytestmark = pytest.mark.tools

#: Imports every module that a copy of the package has, then sums, runs a pass and calls what is lazy.
USE = """
import contextlib, importlib, importlib.util, io, pkgutil, sys
import numpy as np
gone, core_functions = sys.argv[1:2], sys.argv[2:]
where = importlib.util.find_spec("fanin").submodule_search_locations
spec = importlib.machinery.PathFinder.find_spec("fanin._core", where)
sys.modules["fanin._core"] = core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
for name in core_functions:
    delattr(core, name)
import fanin
OPTIONAL = {"torch", "jax", "scipy", "pytest", "mpi4py"}
for module in pkgutil.walk_packages(fanin.__path__, "fanin."):
    if module.name in ("fanin.conformance.conftest", "fanin.cli.demo", "fanin.cli.check", "fanin.__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as e:
        missing = e if e.name else e.__cause__
        door = module.name == "fanin.descriptors" and "analysis" in gone
        expected = {"fanin.analysis"} if door else OPTIONAL
        assert missing is not None and missing.name in expected, (module.name, e)
buf = fanin.InputBuffer(2)
buf.add(0, np.ones(3)); buf.add(0, np.ones(3).astype("f4"))
assert buf.take()[0].tolist() == [2, 2, 2]
w = fanin.Leaf(np.ones(2))
fanin.backward([(fanin.Node(lambda g: 2 * g, edges=[(w, 0)]), 0, np.ones(2))])
assert w.grad.tolist() == [2, 2]
assert fanin.overlap(np.ones(2), np.ones(2)).kind == "disjoint"
from fanin import cli
assert cli.main(["info"]) == 0
names = {"sim": ["sim"], "graph": ["graph", "GraphTree"], "analysis": ["analysis", "descriptors"], "dist": ["dist"]}
names["audit"] = ["audit"]
if importlib.util.find_spec("torch"):
    names["torch"] = ["torch"]
for part in names:
    for name in names[part]:
        try:
            getattr(fanin, name)
        except ModuleNotFoundError as e:
            assert part in gone and e.name == f"fanin.{part}" and f"fanin.{part}" in str(e), e
            assert name not in dir(fanin)
        else:
            assert part not in gone and name in dir(fanin), name
from fanin import tape
x = tape.parameter(np.ones(2))
tape.backward((x * x).sum())
assert x.grad.tolist() == [2, 2]
try:
    tape.compiled(lambda: None)
except ModuleNotFoundError as e:
    assert "graph" in gone and e.name == "fanin.graph" and "fanin.tape.compiled needs fanin.graph" in str(e), e
else:
    assert "graph" not in gone
for command, parts in {"demo": ("sim", "dist"), "check": ("sim",)}.items():
    for part in set(parts) & set(gone):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            assert cli.main([command, "--anything", "x"]) == 2
        assert f"fanin.{command} needs fanin.{part}" in printed.getvalue(), printed.getvalue()
assert hasattr(core, "_C_API") == ("api" not in gone)
assert hasattr(core, "Machine") or "sim" in gone
print("the rest works")
"""


def test_each_part_has_folders_for_its_sources_and_tests_a_readme_and_a_page() -> None:
    assert sorted(fanin.PARTS) == sorted(PARTS.keys() - WITHOUT_PYTHON)
    for part, names in PARTS.items():
        folders = folders_of(ROOT, part)
        assert f"tests/{names[-1]}" in folders and len(folders) > 1, (part, folders)
        home = WITHOUT_PYTHON.get(part, f"python/fanin/{part}")
        assert home in folders and (ROOT / home / "README.md").is_file(), part
        assert all((ROOT / "docs" / page).is_file() for page in PAGES[part]), part


def not_in_readme(home: Path) -> list[str]:
    """The modules of a part's folder that its README does not name."""
    text = (home / "README.md").read_text()
    modules = sorted({p.stem for p in home.glob("*.py")} - {"__init__"})
    return [name for name in modules if not re.search(rf"`{name}(\.py)?`", text)]


def test_the_readme_of_each_part_names_its_modules(tmp_path: Path) -> None:
    for part in sorted(PARTS.keys() - WITHOUT_PYTHON.keys()):
        assert not_in_readme(ROOT / "python/fanin" / part) == [], part
    for name in ("__init__.py", "sums.py", "wire.py", "products.py"):
        (tmp_path / name).touch()
    (tmp_path / "README.md").write_text("| `sums`, `wire.py` | products |")
    assert not_in_readme(tmp_path) == ["products"]


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        ("tests/buffer", set()),
        ("tests/buffer/sim", {"sim"}),
        ("tests/capi/sim", {"api", "sim"}),
        ("tests/device", {"sim"}),
        ("tests/engine/dist", {"dist"}),
        ("tests/fanin_torch", {"torch"}),
        ("tests/fanin_torch/audit", {"audit", "torch"}),
        ("tests/laws/parts", set(PARTS)),
    ],
)
def test_the_names_of_folders_are_the_parts_that_tests_need(folder: str, parts: set[str]) -> None:
    assert (ROOT / folder).is_dir() and needed_by(folder) == parts


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the package, each without the Python files of one part: the core that is built has its functions."""
    built = core_file()
    assert built
    top = tmp_path_factory.mktemp("parts")
    for part in PARTS:
        package = top / part / "python"
        shutil.copytree(ROOT / "python", package, ignore=shutil.ignore_patterns("__pycache__"))
        if not (package / "fanin" / built.name).exists():
            shutil.copy(built, package / "fanin")
        assert part in WITHOUT_PYTHON or f"python/fanin/{part}" in remove(top / part, part)
    return top


def core_functions(part: str) -> list[str]:
    """The functions of fanin._core that the C files of a part define, and of the C API the table."""
    files = [
        p for folder in folders_of(ROOT, part) if folder.startswith("csrc/") for p in (ROOT / folder).glob("**/*.c")
    ]
    names = {name for p in files for name in re.findall(r"py/declared/(\w+)\.h", p.read_text())}
    headers: dict[str, str] = runpy.run_path(str(SIGNATURES.with_name("declare.py")))["headers"](SIGNATURES.read_text())
    tables = [headers[n].partition("_functions[] = {")[2] for n in names if n in headers]
    functions = [f for table in tables for f in re.findall(r'^    {"(\w+)"', table, re.MULTILINE)]
    return sorted(functions + ["_C_API"] * (part == "api"))


@pytest.mark.parametrize("part", PARTS)
def test_the_package_works_without_a_part(part: str, copies: Path) -> None:
    assert bool(core_functions(part)) == (part not in ("audit", "dist", "torch"))
    done = run_python(USE, part, *core_functions(part), env={"PYTHONPATH": str(copies / part / "python")})
    assert done.stdout.endswith("the rest works\n")


def test_the_whole_package_passes_the_same_check() -> None:
    assert run_python(USE).stdout.endswith("the rest works\n")


def test_a_planted_use_of_a_missing_part_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "python" / "fanin" / "sim")
    with (tmp_path / "python" / "fanin" / "slots.py").open("a") as f:
        f.write("\nfrom .sim import Machine\n")
    done = run_python(USE, "sim", env={"PYTHONPATH": str(tmp_path / "python")}, check=False)
    assert done.returncode and "No module named 'fanin.sim'" in done.stderr


def pytest_in(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What pytest does in a copy of the tree."""
    env = emptied() | {"PYTHONPATH": os.pathsep.join([str(tree / "python"), str(tree / "tests")])}
    command = [sys.executable, "-m", "pytest", "-qq", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


def with_tests(tree: Path, part: str) -> list[str]:
    """Give a copy of the package the tests that do not need a part, and what they read; returns their folders."""
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    remove(tree, part)
    for name in ("csrc", "docs", "benchmarks", "examples"):
        if not (tree / name).exists():
            (tree / name).symlink_to(ROOT / name)
    return core_tests(tree)


#: Those of other libraries and of the sources are left out.
ORDINARY = "not partners and not tools"


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_of_the_core_import_without_a_part(part: str, copies: Path) -> None:
    folders = with_tests(copies / part, part)
    assert {"tests/array", "tests/buffer", "tests/engine", "tests/laws", "tests/spec", "tests/tape"} <= set(folders)
    assert ("tests/buffer/sim" in folders) == (part != "sim")
    done = pytest_in(copies / part, "--collect-only", "-m", ORDINARY, *folders)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_planted_import_of_a_part_in_a_test_of_the_core_is_found(copies: Path) -> None:
    with_tests(copies / "sim", "sim")
    planted = copies / "sim" / "tests" / "buffer" / "test_planted.py"
    planted.write_text("from fanin.sim import Machine\n\n\ndef test_machine() -> None:\n    Machine()\n")
    done = pytest_in(copies / "sim", "--collect-only", "-m", ORDINARY, "tests/buffer")
    planted.unlink()
    assert done.returncode and "No module named 'fanin.sim'" in done.stdout, done.stdout[-3000:]
    assert "ERROR tests/buffer/test_planted.py" in done.stdout


@pytest.fixture(scope="module")
def built_without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A part, and a copy of the tree that was built without it."""
    if sanitizer():
        pytest.skip("the ordinary build is what a copy makes")
    part, tree = request.param, tmp_path_factory.mktemp("built") / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "build", ".git", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=ignored)
    remove(tree, part)
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    env = emptied() | {"FANIN_DEV": "1"}
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return part, tree


@pytest.mark.slow
@pytest.mark.parametrize("built_without", PARTS, indirect=True)
def test_a_copy_of_the_tree_without_a_part_builds_and_works(built_without: tuple[str, Path]) -> None:
    part, tree = built_without
    done = run_python(USE, part, env={"PYTHONPATH": str(tree / "python")})
    assert done.stdout.endswith("the rest works\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built_without", "folder"),
    [(part, folder) for part in PARTS for folder in core_tests(ROOT) if part not in needed_by(folder)],
    indirect=["built_without"],
)
def test_a_copy_of_the_tree_without_a_part_passes(built_without: tuple[str, Path], folder: str) -> None:
    _, tree = built_without
    files = [path.relative_to(tree).as_posix() for path in sorted((tree / folder).glob("test_*.py"))]
    done = pytest_in(tree, "-x", "-m", f"not slow and not full and {ORDINARY}", *files)
    assert done.returncode in (0, 5), done.stdout[-3000:]


# Imports between parts


def test_parts_use_the_core_alone_and_the_core_uses_no_part() -> None:
    edges = python_edges(ROOT / "python" / "fanin")
    every = {*PARTS, "audit and torch", CORE, "tools"}
    assert {part_of(f"python/{e.here}") for e in edges} == every - WITHOUT_PYTHON.keys()
    assert wrong_edges(edges, "python") == []


def test_in_c_too() -> None:
    if not compiler() or sys.platform != "linux":
        pytest.skip("object files are read as ELF, which is Linux's, and need a C compiler")
    edges = c_edges(CSRC, compile_objects(CSRC, compiler(), cache_dir()))
    assert {part_of(f"csrc/{e.here}") for e in edges} == {"sim", "graph", "analysis", "api", "api and sim", CORE}
    assert wrong_edges(edges, "csrc") == []


@pytest.mark.parametrize(
    ("here", "there", "parts"),
    [
        ("fanin/slots", "fanin/sim/machine", f"{CORE} may not use sim"),
        ("fanin/graph/trees", "fanin/analysis/records", "graph may not use analysis"),
        ("fanin/_interop/export", "fanin/analysis/descriptors", f"{CORE} may not use analysis"),
        ("fanin/_interop/torch_leaves", "fanin/torch/__init__", f"{CORE} may not use torch"),
        ("fanin/dist/reducer", "fanin/torch/accumulation", "dist may not use torch"),
        ("fanin/tape", "fanin/dist/__init__", f"{CORE} may not use dist"),
    ],
)
def test_a_planted_import_of_a_part_is_found(here: str, there: str, parts: str) -> None:
    assert wrong_edges([Edge(here, there, "line 1")], "python") == [f"{parts}: line 1"]
    assert wrong_edges([Edge(there, here, "line 1")], "python") == (
        ["analysis may not use graph: line 1"] if here == "fanin/graph/trees" else []
    )
