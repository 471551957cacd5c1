"""Each house (fanin.sim, fanin.graph, fanin.analysis) can be removed from a copy of the tree: the rest works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fanin
from kit.houses import CORE, HOUSES, house_of, remove, wrong_edges
from kit.support import CSRC, ROOT, cache_dir, compiler, core_file, emptied, run_python, sanitizer
from kit.tree import Edge, c_edges, compile_objects, python_edges

#: Imports every module that a copy of the package has, then sums, runs a pass and calls what is lazy.
USE = """
import importlib, pkgutil, sys
import numpy as np
import fanin
gone = sys.argv[1:]
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
print("the rest works")
"""


def test_the_table_names_each_house_and_every_pattern_has_files() -> None:
    assert sorted(HOUSES) == sorted(fanin.HOUSES)
    for house, patterns in HOUSES.items():
        assert [p for p in patterns if not list(ROOT.glob(p))] == [], house
        assert (ROOT / "python" / "fanin" / house / "README.md").is_file(), house


@pytest.mark.parametrize("house", HOUSES)
def test_the_package_works_without_a_house(house: str, tmp_path: Path) -> None:
    """Its Python files alone are removed: the core that is built has its functions still."""
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__"))
    built = core_file()
    assert built
    if not (tmp_path / "python" / "fanin" / built.name).exists():
        shutil.copy(built, tmp_path / "python" / "fanin")
    removed = remove(tmp_path, house)
    assert f"python/fanin/{house}" in removed
    done = run_python(USE, house, env={"PYTHONPATH": str(tmp_path / "python")})
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


#: Tests of the rest that run in a copy without the house.
REST = {
    "sim": ("array/test_exact.py", "analysis/test_functionalize_guard.py", "analysis/test_analysis_records.py"),
    "graph": ("buffer/test_kinds.py", "engine/test_engine_rules.py", "analysis/test_collect.py"),
    "analysis": ("buffer/test_kinds.py", "engine/test_engine_rules.py", "array/test_sums.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize("house", HOUSES)
def test_a_copy_of_the_tree_without_a_house_builds_and_passes(house: str, tmp_path: Path) -> None:
    if sanitizer():
        pytest.skip("the ordinary build is what a copy makes")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "build", ".git", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=ignored)
    remove(tree, house)
    env = emptied() | {"FANIN_DEV": "1", "FANIN_NVCC": "0"}
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    env["PYTHONPATH"] = os.pathsep.join([str(tree / "python"), str(tree / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", USE, house], cwd=tree, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("the rest works\n"), done.stderr[-3000:]
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *(f"tests/{one}" for one in REST[house]),
    ]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


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
        ("fanin/_interop/export", "fanin/analysis/descriptors/base", f"{CORE} may not use analysis"),
    ],
)
def test_a_planted_import_of_a_house_is_found(here: str, there: str, houses: str) -> None:
    assert wrong_edges([Edge(here, there, "line 1")], "python") == [f"{houses}: line 1"]
    assert wrong_edges([Edge(there, here, "line 1")], "python") == (
        [] if here.startswith(("fanin/slots", "fanin/_interop")) else ["analysis may not use graph: line 1"]
    )
