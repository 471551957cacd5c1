"""The houses of the repository: what belongs to each, and what each may import."""

from __future__ import annotations

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from kit.tree import Edge

#: The files of each house, as patterns from the root; a copy of the tree without them builds and passes.
HOUSES: dict[str, tuple[str, ...]] = {
    "sim": (
        "python/fanin/sim",
        "csrc/py/sim/*.c",
        "tests/sim",
        "docs/simulated-device.md",
    ),
    "graph": (
        "python/fanin/graph",
        "csrc/graph",
        "csrc/py/graph",
        "tests/graph",
        "docs/graph-trees.md",
        "docs/recorded-steps.md",
    ),
    "analysis": (
        "python/fanin/analysis",
        "python/fanin/descriptors*",
        "csrc/py/analysis",
        "csrc/analysis",
        "tests/analysis",
        "docs/analysis.md",
    ),
}
CORE = "the core"
#: Parts of the package that may import every house: commands, the pytest plugin, the suite for other engines.
TOOLS = ("python/fanin/cli", "python/fanin/testing", "python/fanin/conformance", "python/fanin/__main__")
#: Files of the core that name a house: the first use imports it; the module registers its types, if they are there;
#: functions for tests read the struct of a machine.
DOORS = ("python/fanin/__init__", "csrc/py/module")


#: How a test names a house: its modules, what the core has of it, and the fixtures that make a machine.
NAMES = {
    "sim": r"\bsim\b|\bMachine\b|explore|simulat|demo\b|\ba_world\b|[(,] ?(?:w|driver): ",
    "graph": r"fanin\.graph|import graph\b|\bGraphTree|graph_tree|\bcompiled\(|begin_capture|CaptureError|--graph",
    "analysis": r"\banalysis\b|descriptors|functionalize|snapshot|\brestride\b",
}
#: .. and every house: the benchmarks, of which some rows measure it.
EVERY_HOUSE = r"|(?:import|from) benchmarks\b"
#: Folders of tests of the core: no C programs, whose makefile names every house, and no tests of other libraries.
CORE_TESTS = ("array", "buffer", "cli", "device", "engine", "interop", "isolated", "laws", "spec", "tape")


def core_tests(tests: Path, house: str) -> list[str]:
    """The files of tests of the core that do not name a house, and import nothing of the tests that does."""
    named = re.compile(NAMES[house] + EVERY_HOUSE)

    def names(path: Path, above: tuple[Path, ...] = ()) -> bool:
        text = path.read_text()
        imports = re.findall(r"^from ([\w.]+) import ([\w, ]*)", text, re.MULTILINE)
        modules = {name for of, these in imports for name in (of, *(f"{of}.{x.strip()}" for x in these.split(",")))}
        files = {tests / f"{name.replace('.', '/')}.py" for name in modules}
        inner = [f for f in files if f.exists() and f not in (*above, path)]
        return bool(named.search(text)) or any(names(f, (*above, path)) for f in inner)

    every = sorted(f for folder in CORE_TESTS for f in (tests / folder).glob("test_*.py"))
    local = {f.parent for f in every if (f.parent / "conftest.py").exists() and names(f.parent / "conftest.py")}
    return [f.relative_to(tests).as_posix() for f in every if f.parent not in local and not names(f)]


def house_of(path: str) -> str:
    """The house of a file, given from the root, with or without its suffix; CORE: of none."""
    for house, patterns in HOUSES.items():
        for pattern in patterns:
            if any(fnmatch(path, p) for p in (pattern, f"{pattern}/*", pattern.removesuffix(".*").removesuffix(".c"))):
                return house
    return "tools" if path.startswith(TOOLS) else CORE


def wrong_edges(edges: list[Edge], root: str) -> list[str]:
    """What files under `root` import, include or call of a house that they may not."""
    wrong = []
    for e in edges:
        here, there = house_of(f"{root}/{e.here}"), house_of(f"{root}/{e.there}")
        if there != here and there != CORE and here != "tools" and not f"{root}/{e.here}".startswith(DOORS):
            wrong.append(f"{here} may not use {there}: {e.why}")
    return wrong


def remove(tree: Path, house: str) -> list[str]:
    """Remove a house from a copy of the tree; returns the paths removed."""
    removed = []
    for pattern in HOUSES[house]:
        for path in sorted(tree.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path.relative_to(tree).as_posix())
    return removed
