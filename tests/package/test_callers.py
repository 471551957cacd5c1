"""The package holds nothing for tests alone: what it does not show, it calls.

Names of the C core, and private names in Python. What a release's objects show each other is read in test_sources.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from fanin import _core
from kit.core_names import public
from kit.support import ROOT

pytestmark = pytest.mark.tools

PACKAGE = ROOT / "python" / "fanin"
#: Called by the tests of other engines, and not by the package.
SUITE = "conformance"
#: Names that other libraries use: IPython, pytest.
PROTOCOLS = {"_repr_svg_", *(f"pytest_{x}" for x in ("addoption", "configure", "runtest_makereport", "pyfunc_call"))}

#: The names of the core that users meet.
PUBLIC = public()

#: Names of the core that other extensions in C use, by fanin.h: the capsule, and the type of a node's function.
BY_C = {"_C_API", "CFunction"}


def trees(folders: Iterable[Path]) -> dict[Path, ast.Module]:
    return {p: ast.parse(p.read_text()) for folder in folders for p in sorted(folder.rglob("*.py"))}


def uses(found: Mapping[Path, ast.Module]) -> set[str]:
    """The names that code reads: variables, attributes, imports, and strings that are names (getattr)."""
    seen: set[str] = set()
    for node in (node for tree in found.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            seen.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            seen.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            seen.add(node.value)
    return seen


# The core


def core_names(core: ModuleType, public: set[str]) -> Iterator[tuple[str, str]]:
    """(name, where) of all that code outside of the package may not use: functions and constants of the core that are
    not public, and members of its types that begin with an underscore.
    """
    for name, value in vars(core).items():
        if name.startswith(("__", "_test_")) or name in BY_C:  # those are in development builds alone
            continue
        if name not in public:
            yield name, f"_core.{name}"
        if isinstance(value, type) and value.__module__.startswith("fanin"):
            members = (m for m in vars(value) if not m.startswith("__"))
            yield from ((m, f"_core.{name}.{m}") for m in members if m.startswith("_") or name not in public)


def without_a_caller(core: ModuleType, public: set[str], called: set[str]) -> list[str]:
    return [f"{where} has no caller in the package" for name, where in core_names(core, public) if name not in called]


def test_each_name_of_the_core_is_public_or_called_by_the_package() -> None:
    """Or by the fake driver, which puts itself in the place of CUDA's."""
    called = uses(trees([PACKAGE, ROOT / "tests" / "fake_cuda"]))
    assert len(list(core_names(_core, PUBLIC))) > 80, "hardly a name was read"
    assert without_a_caller(_core, PUBLIC, called) == []


def test_a_planted_name_of_the_core_is_found() -> None:
    kind = type("Machine", (), {"__module__": "fanin._core", "_join": 1, "_fail_at": 2, "races": 3})
    inner = type("Layout", (), {"__module__": "fanin._core", "same": 1, "hash": 2})
    planted = ModuleType("planted")
    planted.__dict__.update(Machine=kind, Layout=inner, trim=len, kernels_hash=len, _test_fault=len)
    assert without_a_caller(planted, {"Machine", "trim"}, {"_join", "Layout", "same"}) == [
        "_core.Machine._fail_at has no caller in the package",
        "_core.Layout.hash has no caller in the package",
        "_core.kernels_hash has no caller in the package",
    ]


def test_the_stubs_name_what_a_release_has() -> None:
    stub = ast.parse((PACKAGE / "_core.pyi").read_text())
    named = {n.name for n in stub.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    named |= {n.target.id for n in stub.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    here = {name for name in vars(_core) if not name.startswith(("__", "_test_"))} - BY_C
    assert here - named == set()
    assert not any(name.startswith("_test_") for name in named)
    assert {name for name in named - here if not name.startswith("_")} == set()


# Python


def private_names(tree: ast.Module, shown: set[str]) -> Iterator[tuple[str, int]]:
    """(name, line) of what a module has for the package alone: its functions, classes and constants that are not shown,
    and what begins with an underscore in its classes.
    """
    for holder in (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef)):
        for node in holder.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            else:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
            inside = isinstance(holder, ast.ClassDef)
            for name in names:
                if not name.startswith("__") and (name.startswith("_") or not inside) and name not in shown:
                    yield name, node.lineno


def dead_names(found: Mapping[Path, ast.Module], called: set[str], shown: set[str]) -> list[str]:
    return [
        f"{path.name}:{line}: {name} is private, and the package does not use it"
        for path, tree in found.items()
        for name, line in private_names(tree, shown)
        if name not in called | PROTOCOLS
    ]


def shown_names(found: Mapping[Path, ast.Module]) -> set[str]:
    """All that `__all__` names in the modules of the package."""
    lists = [
        node.value
        for tree in found.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    return {str(name) for x in lists for name in ast.literal_eval(x)}


def test_each_private_name_of_the_package_is_used_there() -> None:
    """Or by a benchmark, whose clock is the command line's, or by the core, which names it."""
    found = {p: t for p, t in trees([PACKAGE]).items() if SUITE not in p.parts}
    called = uses(found) | uses(trees([ROOT / "benchmarks"]))
    called |= {
        name for f in sorted((ROOT / "csrc" / "py").rglob("*.c")) for name in re.findall(r'"(\w+)"', f.read_text())
    }
    assert sum(1 for tree in found.values() for _ in private_names(tree, set())) > 800, "hardly a name was read"
    assert dead_names(found, called, shown_names(found)) == []


def test_a_planted_private_name_is_found() -> None:
    text = "A = 1\n_B = 2\ndef f(): return A\ndef g(): return f()\n"
    text += "class C:\n    def _h(self): ...\n    def i(self): ...\n"
    planted = {Path("x.py"): ast.parse(text)}
    assert dead_names(planted, uses(planted), {"C"}) == [
        "x.py:2: _B is private, and the package does not use it",
        "x.py:4: g is private, and the package does not use it",
        "x.py:6: _h is private, and the package does not use it",
    ]
    used = {**planted, Path("y.py"): ast.parse("from x import _B\ng()\nC()._h()\n")}
    assert dead_names(used, uses(used), {"C"}) == []
