"""How the sources stand: files and lines by folder, the largest file, long functions, wide lines, circles, old words.

    python tests/kit/measure_tree.py [TREE ..]

Each TREE is a checkout (this one by default), and a column of the table. What is counted is what the tests of
tests/package ask: the product, which is csrc/ and python/.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit import tree
from kit.support import ROOT, cache_dir, compiler
from package.test_sources import LINES, lines_of_any, long_functions, old_words, sources_of_tests

Row = dict[str, str]


def files(root: Path) -> list[Path]:
    """The sources that people write."""
    python = (p for p in (root / "python").glob("**/*.py*") if p.suffix in (".py", ".pyi"))
    return [*tree.c_files(root / "csrc"), *sorted(python)]


def folders(root: Path) -> Row:
    """Folder -> files and lines."""
    count: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in files(root):
        folder = path.parent.relative_to(root).as_posix()
        count[folder] += 1
        lines[folder] += len(path.read_text().split("\n"))
    return {f: f"{count[f]} files, {lines[f]:,} lines" for f in sorted(count)}


def largest(root: Path) -> str:
    path = max(files(root), key=lambda p: len(p.read_text().split("\n")))
    return f"{path.relative_to(root).as_posix()}, {len(path.read_text().split(chr(10))):,} lines"


def long_of_tests(root: Path) -> str:
    """Functions of tests that are too long, of C and of Python."""
    found: list[tree.Function] = []
    for path in sources_of_tests(root):
        read = tree.python_functions if path.suffix == ".py" else tree.c_functions
        found += read(path.read_text(), path.relative_to(root).as_posix())
    return f"{len(long_functions(found))}"


def circles(root: Path) -> str:
    """How many folders have files in circles, and how many files those are."""
    csrc = root / "csrc"
    edges = tree.c_edges(csrc, tree.compile_objects(csrc, compiler(), cache_dir()))
    inside = [tree.in_circles(tree.inside(edges, f)) for f in sorted({tree.folder_of(e.here) for e in edges})]
    between = tree.in_circles(tree.between_folders(edges))
    python = tree.in_circles(tree.python_edges(root / "python" / "fanin"))
    return f"{sum(map(len, inside))} files of C, {len(between)} folders of C, {len(python)} files of Python"


def words(root: Path) -> str:
    paths = [p for p in files(root) if p.suffix != ".pyi"]
    found = old_words(paths)
    uses = sum(name in found for p in paths for _, name in tree.identifiers(p))
    return f"{len(found)} words, {uses:,} uses"


def beside_rules(root: Path) -> str:
    return f"{len(tree.rule_bits_set(root / 'csrc'))}"


WHAT: dict[str, Callable[[Path], str]] = {
    "largest file": largest,
    f"functions over {LINES} lines": lambda root: f"{len(long_functions(tree.functions(root)))}",
    ".. of tests": long_of_tests,
    "lines over 120 columns": lambda root: f"{len(tree.wide_lines(root)):,}",
    "in circles": circles,
    "old words left": words,
    "rule bits set beside the rules": beside_rules,
    "lines of the package with Any": lambda root: f"{lines_of_any(root)}",
}


def main() -> None:
    roots = [Path(a).resolve() for a in sys.argv[1:]] or [ROOT]
    columns: list[Row] = [{**folders(r), **{name: ask(r) for name, ask in WHAT.items()}} for r in roots]
    rows = sorted({f for r in roots for f in folders(r)}) + list(WHAT)
    print(f"| | {' | '.join(r.name for r in roots)} |\n|---|{'---|' * len(roots)}")
    for row in rows:
        print(f"| {row} | {' | '.join(column.get(row, '-') for column in columns)} |")


if __name__ == "__main__":
    main()
