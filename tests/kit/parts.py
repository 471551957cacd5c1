"""The core and the parts: which files belong to a part, what each may import, and which tests need it.

The folder decides: one with the name of a part, anywhere below csrc, python and tests, belongs to that part with all
its files. So tests/buffer/sim has the tests of the buffer that need the simulated machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kit.tree import Edge

#: The names of each part's folders, its own first. Python finds `import torch` in no folder that is called fanin_torch.
PARTS: dict[str, tuple[str, ...]] = {
    "sim": ("sim",),
    "graph": ("graph",),
    "analysis": ("analysis",),
    "audit": ("audit",),
    "dist": ("dist",),
    "torch": ("torch", "fanin_torch"),
    "api": ("api", "capi"),
}
#: The pages of each part, in docs.
PAGES: dict[str, tuple[str, ...]] = {
    "sim": ("simulated-device.md",),
    "graph": ("graph-trees.md", "recorded-steps.md"),
    "analysis": ("analysis.md",),
    "audit": ("audit.md",),
    "dist": ("ranks.md",),
    "torch": ("torch.md",),
    "api": ("c-api.md",),
}
#: The folder of a part's README where it has none in python/fanin.
WITHOUT_PYTHON = {"api": "csrc/py/api"}
#: Below these folders a name is a part's.
ROOFS = ("csrc", "python", "tests")
#: Folders of tests that need parts, in addition to those named after a part; EVERY is the need of the folder `parts`.
EVERY = "parts"
NEED: dict[str, tuple[str, ...]] = {
    "tests/c": tuple(PARTS),  # the programs of one folder, and of all folders before it
    "tests/device": ("sim",),  # the fake driver is made of csrc/device/sim
    "tests/faults": tuple(PARTS),
    "tests/gpu": tuple(PARTS),
    "tests/package": tuple(PARTS),  # of the whole tree
}
CORE = "the core"
#: Parts of the package that may import every part: commands, the pytest plugin, the suite for other engines.
TOOLS = ("python/fanin/cli/", "python/fanin/testing/", "python/fanin/conformance/", "python/fanin/__main__")
#: Files that name a part which may be missing: the first use imports it, or the linker finds nothing. fanin.torch sums
#: over ranks by fanin.dist, and audits by fanin.audit.
DOORS: dict[str, tuple[str, ...]] = {
    "python/fanin/__init__": tuple(PARTS),
    "python/fanin/descriptors": ("analysis",),
    "python/fanin/torch/__init__": ("audit", "dist"),
    "python/fanin/torch/accumulation": ("dist",),
    "csrc/py/api/table/table": ("sim",),
    "csrc/py/device/backends": ("sim",),
    "csrc/py/module/module": tuple(PARTS),
}


def parts_of(path: str) -> set[str]:
    """The parts to which a file or folder belongs. The path starts at the root; a file's suffix is optional."""
    roof, *folders = path.split("/")
    return {part for part, names in PARTS.items() if roof in ROOFS and set(folders) & set(names)}


def part_of(path: str) -> str:
    """As text: the parts of a file, "the core", or "tools"."""
    if path.startswith(TOOLS):
        return "tools"
    return " and ".join(sorted(parts_of(os.path.dirname(path)))) or CORE


def needed_by(folder: str) -> set[str]:
    """The parts that the tests in a folder need."""
    if EVERY in folder.split("/"):
        return set(PARTS)
    said = [parts for top, parts in NEED.items() if f"{folder}/".startswith(f"{top}/")]
    return parts_of(folder).union(*said)


def wrong_edges(edges: list[Edge], root: str) -> list[str]:
    """What files under `root` import, include or call of a part that they may not."""
    wrong = []
    for e in edges:
        here, there = f"{root}/{e.here}", f"{root}/{e.there}"
        may = parts_of(os.path.dirname(here)) | set(DOORS.get(here, ()))
        if not here.startswith(TOOLS) and not parts_of(os.path.dirname(there)) <= may:
            wrong.append(f"{part_of(here)} may not use {part_of(there)}: {e.why}")
    return wrong


def folders(tree: Path, roof: str) -> Iterator[str]:
    """The folders below a roof, from the root, each before those in it."""
    for top, names, _ in os.walk(tree / roof):
        names[:] = sorted(name for name in names if name != "__pycache__")
        yield Path(top).relative_to(tree).as_posix()


def folders_of(tree: Path, part: str) -> list[str]:
    """The folders of a part, from the root; of one in another the outer one alone."""
    every = [folder for roof in ROOFS for folder in folders(tree, roof) if part in parts_of(folder)]
    return [folder for folder in every if os.path.dirname(folder) not in every]


def core_tests(tree: Path) -> list[str]:
    """The folders of tests that are no part's own."""
    tops = sorted(path.name for path in (tree / "tests").iterdir() if path.is_dir())
    return [
        folder
        for top in tops
        if not parts_of(f"tests/{top}")
        for folder in folders(tree, f"tests/{top}")
        if any((tree / folder).glob("test_*.py"))
    ]


def remove(tree: Path, part: str) -> list[str]:
    """Remove a part from a copy of the tree, with the tests that need it; returns the paths removed. What a link in the
    copy leads to is left as it is, and so is what other tests compile or import from a folder that NEED names.
    """
    if (tree / ".git").exists():
        raise ValueError(f"{tree} is no copy")
    gone = [*folders_of(tree, part), *(f"docs/{page}" for page in PAGES[part])]
    for folder in folders(tree, "tests"):
        if part in needed_by(folder) and folder not in gone:
            tests = sorted(path.relative_to(tree).as_posix() for path in (tree / folder).glob("test_*.py"))
            gone += [folder] if part in parts_of(folder) or EVERY in folder.split("/") else tests
    removed = []
    for path in (tree / name for name in gone):
        if not path.resolve().is_relative_to(tree.resolve()):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
        else:
            continue
        removed.append(path.relative_to(tree).as_posix())
    return removed
