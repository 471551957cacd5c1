"""Comments, docstrings and pages name no missing file, and the head of a C file names its own."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.support import CSRC, ROOT

pytestmark = pytest.mark.tools

#: A name, perhaps with folders, that ends as a file of ours does; no call of a method.
NAMED = re.compile(r"(?<![\w/.*<-])((?:[\w-]+/)*[A-Za-z_][\w-]*\.(?:c|h|cu|py|pyi|md))\b(?!\()")
#: Files of others, files that the build makes, names of examples, and a section of core.pyi.
ELSEWHERE = {
    "Python.h",
    "_core.pyi",
    "device/kernels/embedded.h",
    "docs.h",
    "fanin/_core.pyi",
    "file.py",
    "my_engine.py",
    "net.py",
    "search.c",
    "python/fanin/_core.pyi",
    "self.h",
    "train.py",
}
#: .. such as FILE.py, X.h and name.c.
EXAMPLE = re.compile(r"(?:.*/)?(?:\w|[A-Z]+|name|hidden|test_x)\.\w+")

#: The comment at the top of a file of C, which begins with the file's name; before it, switches of formatter and libc.
HEAD = re.compile(r"(?:(?://|#define )[^\n]*\n)*/\* (?:([a-z]\w*): )?")


def sources() -> list[str]:
    """The paths of all files of the tree, without those that are made."""
    folders = [ROOT / name for name in ("csrc", "python", "tests", "docs", "benchmarks", "examples")]
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    names = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
    return [name for name in names if "__pycache__" not in name and ".egg-info/" not in name]


def texts(path: str, source: str) -> Iterator[str]:
    """The comments of C and CUDA, the comments and docstrings of Python, or a whole page."""
    ending = path.rpartition(".")[2]
    if ending in ("c", "h", "cu"):
        yield from re.findall(r"/\*.*?\*/", source, re.DOTALL)
    elif ending in ("py", "pyi"):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            docstring = token.type == tokenize.STRING and token.string.endswith('"""')
            if docstring or token.type == tokenize.COMMENT:
                yield token.string
    elif ending == "md":
        yield source


def missing_files(path: str, source: str, files: set[str]) -> set[str]:
    """The names in a file's text of which no file is one; `files` are all paths and their ends, from each folder on."""
    names = {name for text in texts(path, source) for name in NAMED.findall(text)}
    return {name for name in names if name not in files | ELSEWHERE and not EXAMPLE.fullmatch(name)}


def ends(paths: list[str]) -> set[str]:
    return {"/".join(parts[i:]) for parts in (path.split("/") for path in paths) for i in range(len(parts))}


def test_every_file_that_a_comment_or_a_page_names_exists() -> None:
    paths = sources()
    files = ends(paths)
    found = {path: missing_files(path, Path(ROOT, path).read_text(), files) for path in paths if NAMED.fullmatch(path)}
    assert len(found) > 500
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.c", "/* see buffer/gone.c */ x = 1;"),
        ("a.py", '"""As gone.h has it."""\n'),
        ("a.py", "x = 1  # buffer/gone.py\n"),
        ("a.md", "The page `docs/gone.md`."),
    ],
)
def test_a_planted_name_of_a_missing_file_is_found(path: str, source: str) -> None:
    [name] = missing_files(path, source, ends(["csrc/buffer/add.c"]))
    assert "gone" in name
    assert not missing_files(path, source, ends(["csrc/" + name]))


def test_code_and_examples_name_any_file() -> None:
    assert not missing_files("a.c", 'include("gone.c") /* X.h, name.c, path/of/x.c */', set())
    assert not missing_files("a.py", 'open("gone.md")  # FILE.py\n', set())


def head_is_wrong(path: Path, source: str) -> bool:
    """Whether a file of C begins without a comment, or with another name; a source beside its header needs no name."""
    head = HEAD.match(source)
    if not head:
        return True
    name = head[1]
    return name != path.stem if path.suffix == ".h" else name not in (path.stem, None)


def test_each_file_of_c_begins_with_what_it_is_for() -> None:
    paths = [*CSRC.rglob("*.h"), *CSRC.rglob("*.c")]
    assert len(paths) > 250
    assert not [path for path in paths if head_is_wrong(path, path.read_text())]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.h", "#ifndef A_H\n/* a: what. */\n"),
        ("a.h", "/* b: what. */\n"),
        ("a.h", "/* What. */\n"),
        ("a.c", '#include "a.h"\n/* What. */\n'),
        ("a.c", "/* b: what. */\n"),
    ],
)
def test_a_planted_file_without_a_head_is_found(name: str, source: str) -> None:
    assert head_is_wrong(Path(name), source)


def test_a_head_may_stand_below_switches() -> None:
    assert not head_is_wrong(Path("a.h"), "// clang-format Language: Cpp\n/* a: what. */\n")
    assert not head_is_wrong(Path("a.c"), "#define _GNU_SOURCE\n/* What. */\n")
    assert not head_is_wrong(Path("a.c"), "/* a: what. */\n")
