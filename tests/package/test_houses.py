"""Each house (fanin.sim, fanin.graph, fanin.analysis) can be removed from a copy of the tree: the rest works."""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fanin
from kit.core_names import SIGNATURES
from kit.houses import CORE, HOUSES, core_tests, house_of, remove, wrong_edges
from kit.support import CSRC, ROOT, cache_dir, compiler, core_file, emptied, run_python, sanitizer
from kit.tree import Edge, c_edges, compile_objects, python_edges

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
OPTIONAL = {"torch", "matplotlib", "jax", "scipy", "pytest", "rich", "mpi4py"}
for module in pkgutil.walk_packages(fanin.__path__, "fanin."):
    if module.name in ("fanin.conformance.conftest", "fanin.cli.demo", "fanin.cli.check", "fanin.__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as e:
        missing = e if e.name else e.__cause__
        assert missing is not None and missing.name in OPTIONAL, (module.name, e)
buf = fanin.InputBuffer(2)
buf.add(0, np.ones(3)); buf.add(0, np.ones(3).astype("f4"))
assert buf.take()[0].tolist() == [2, 2, 2]
w = fanin.Leaf(np.ones(2))
fanin.backward([(fanin.Node(lambda g: 2 * g, edges=[(w, 0)]), 0, np.ones(2))])
assert w.grad.tolist() == [2, 2]
assert fanin.overlap(np.ones(2), np.ones(2)).kind == "disjoint"
from fanin import cli
assert cli.main(["info"]) == 0
names = {"sim": ["sim"], "graph": ["graph", "GraphTree"], "analysis": ["analysis", "descriptors"]}
for house in names:
    for name in names[house]:
        try:
            getattr(fanin, name)
        except ModuleNotFoundError as e:
            assert house in gone and e.name == f"fanin.{house}" and f"fanin.{house}" in str(e), e
            assert name not in dir(fanin)
        else:
            assert house not in gone and name in dir(fanin), name
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
if "sim" in gone:
    for command in ("demo", "check"):
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            assert cli.main([command, "--anything", "x"]) == 2
        assert f"fanin.{command} needs fanin.sim" in printed.getvalue(), printed.getvalue()
print("the rest works")
"""
#: Bytes: a sample is drawn from tests of the buffer that are no larger.
SMALL = 12000


def test_the_table_names_each_house_and_every_pattern_has_files() -> None:
    assert sorted(HOUSES) == sorted(fanin.HOUSES)
    for house, patterns in HOUSES.items():
        assert [p for p in patterns if not list(ROOT.glob(p))] == [], house
        assert (ROOT / "python" / "fanin" / house / "README.md").is_file(), house


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the package, each without the Python files of one house: the core that is built has its functions."""
    built = core_file()
    assert built
    top = tmp_path_factory.mktemp("houses")
    for house in HOUSES:
        package = top / house / "python"
        shutil.copytree(ROOT / "python", package, ignore=shutil.ignore_patterns("__pycache__"))
        if not (package / "fanin" / built.name).exists():
            shutil.copy(built, package / "fanin")
        assert f"python/fanin/{house}" in remove(top / house, house)
    return top


def core_functions(house: str) -> list[str]:
    """The functions of fanin._core that the C files of a house define."""
    files = [p for pattern in HOUSES[house] for p in ROOT.glob(f"{pattern}/*.c" if "." not in pattern else pattern)]
    names = {name for p in files if p.suffix == ".c" for name in re.findall(r"py/declared/(\w+)\.h", p.read_text())}
    headers: dict[str, str] = runpy.run_path(str(SIGNATURES.with_name("declare.py")))["headers"](SIGNATURES.read_text())
    tables = [headers[n].partition("_functions[] = {")[2] for n in names]
    return sorted(f for table in tables for f in re.findall(r'^    {"(\w+)"', table, re.MULTILINE))


@pytest.mark.parametrize("house", HOUSES)
def test_the_package_works_without_a_house(house: str, copies: Path) -> None:
    assert core_functions(house)
    done = run_python(USE, house, *core_functions(house), env={"PYTHONPATH": str(copies / house / "python")})
    assert done.stdout.endswith("the rest works\n")


def test_the_whole_package_passes_the_same_check() -> None:
    assert run_python(USE).stdout.endswith("the rest works\n")


def test_a_planted_use_of_a_missing_house_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "python" / "fanin" / "sim")
    with (tmp_path / "python" / "fanin" / "slots.py").open("a") as f:
        f.write("\nfrom .sim import Machine\n")
    done = run_python(USE, "sim", env={"PYTHONPATH": str(tmp_path / "python")}, check=False)
    assert done.returncode and "No module named 'fanin.sim'" in done.stderr


def passes(tree: Path, files: list[str], env: dict[str, str]) -> None:
    """Run quick tests of a copy of the tree."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *files]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout[-3000:]


@pytest.mark.parametrize("house", HOUSES)
def test_tests_of_the_core_pass_without_a_house_a_sample(house: str, copies: Path) -> None:
    tree = copies / house
    rest = [f for f in core_tests(ROOT / "tests", house) if f.startswith("buffer/")]
    small = [f for f in rest if (ROOT / "tests" / f).stat().st_size < SMALL]
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tree)
    remove(tree, house)
    for name in ("csrc", "docs", "benchmarks", "examples"):
        (tree / name).symlink_to(ROOT / name)
    env = emptied() | {"PYTHONPATH": os.pathsep.join([str(tree / "python"), str(tree / "tests")])}
    passes(tree, [f"tests/{random.Random(house).choice(small)}"], env)


def test_a_test_that_names_a_house_itself_or_by_its_kit_is_not_of_the_rest(tmp_path: Path) -> None:
    for name, text in {
        "kit/worlds.py": "from fanin.sim import Machine\n",
        "kit/plain.py": "import numpy\n",
        "buffer/test_by_module.py": "from kit import plain, worlds\n",
        "buffer/test_by_kit.py": "from kit.worlds import it\n",
        "buffer/test_itself.py": "import fanin\nfanin.sim\n",
        "buffer/test_core.py": "from kit.plain import it\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_tests(tmp_path, "sim") == ["buffer/test_core.py"]
    assert len(core_tests(tmp_path, "graph")) == 4
    assert all(len(core_tests(ROOT / "tests", house)) > 20 for house in HOUSES)


@pytest.fixture(scope="module")
def built_without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A house, and a copy of the tree that was built without it."""
    if sanitizer():
        pytest.skip("the ordinary build is what a copy makes")
    house, tree = request.param, tmp_path_factory.mktemp("built") / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "build", ".git", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=ignored)
    remove(tree, house)
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    env = emptied() | {"FANIN_DEV": "1", "FANIN_NVCC": "0"}
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return house, tree


@pytest.mark.slow
@pytest.mark.parametrize("built_without", HOUSES, indirect=True)
def test_a_copy_of_the_tree_without_a_house_builds_and_works(built_without: tuple[str, Path]) -> None:
    house, tree = built_without
    done = run_python(USE, house, env={"PYTHONPATH": str(tree / "python")})
    assert done.stdout.endswith("the rest works\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("built_without", "file"),
    [(house, file) for house in HOUSES for file in core_tests(ROOT / "tests", house)],
    indirect=["built_without"],
)
def test_a_copy_of_the_tree_without_a_house_passes(built_without: tuple[str, Path], file: str) -> None:
    _, tree = built_without
    env = emptied() | {"FANIN_NVCC": "0", "PYTHONPATH": os.pathsep.join([str(tree / "python"), str(tree / "tests")])}
    passes(tree, [f"tests/{file}"], env)


# Imports between houses


def test_houses_use_the_core_alone_and_the_core_uses_no_house() -> None:
    edges = python_edges(ROOT / "python" / "fanin")
    assert {house_of(f"python/{e.here}") for e in edges} == {*HOUSES, CORE, "tools"}
    assert wrong_edges(edges, "python") == []


def test_in_c_too() -> None:
    if not compiler() or sys.platform != "linux":
        pytest.skip("object files are read as ELF, which is Linux's, and need a C compiler")
    edges = c_edges(CSRC, compile_objects(CSRC, compiler(), cache_dir()))
    assert {house_of(f"csrc/{e.here}") for e in edges} >= {*HOUSES, CORE}
    assert wrong_edges(edges, "csrc") == []


@pytest.mark.parametrize(
    ("here", "there", "houses"),
    [
        ("fanin/slots", "fanin/sim/machine", f"{CORE} may not use sim"),
        ("fanin/graph/trees", "fanin/analysis/records", "graph may not use analysis"),
        ("fanin/_interop/export", "fanin/analysis/descriptors", f"{CORE} may not use analysis"),
    ],
)
def test_a_planted_import_of_a_house_is_found(here: str, there: str, houses: str) -> None:
    assert wrong_edges([Edge(here, there, "line 1")], "python") == [f"{houses}: line 1"]
    assert wrong_edges([Edge(there, here, "line 1")], "python") == (
        [] if here.startswith(("fanin/slots", "fanin/_interop")) else ["analysis may not use graph: line 1"]
    )
