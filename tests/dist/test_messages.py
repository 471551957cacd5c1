"""The page for operators has every error that ranks raise about each other, and no other text."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

import fanin
from kit.support import ROOT

pytestmark = [pytest.mark.tools, pytest.mark.core]

PAGE = ROOT / "docs" / "operating-ranks.md"
SOURCES = sorted((Path(fanin.__file__).parent / "dist").glob("*.py"))

#: Messages that hand on another one.
PASSED_ON = {"…", "… …", "…: …", "…: …; the group … is closed", "rank … ended: …"}


def text_of(node: ast.AST) -> str | None:
    """A string literal, in which … stands for what is formatted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else "…" for one in node.values]
        return "".join(map(str, parts))
    return None


def texts(tree: ast.AST) -> list[str]:
    return [text for node in ast.walk(tree) if (text := text_of(node)) is not None]


def raised(tree: ast.AST) -> list[str]:
    """The texts of errors about ranks: first arguments of PeerError and of the methods that make one."""
    made = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        text = text_of(node.args[0])
        if name in ("PeerError", "refuse", "no_divisor", "abort") and text:
            made.append(text)
    return made


def cells(page: str) -> list[str]:
    """The code of the first column of the tables of messages."""
    part = page.split("\n## Messages\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ") and " | " in line]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def unknown(page: str, sources: list[str]) -> list[str]:
    """Texts of the page that no source has."""
    every = list(itertools.chain.from_iterable(texts(ast.parse(source)) for source in sources))
    return [cell for cell in cells(page) if not any(cell in text for text in every)]


def missing(page: str, sources: list[str]) -> list[str]:
    """Errors of the sources that are not on the page."""
    known = cells(page)
    every = itertools.chain.from_iterable(raised(ast.parse(source)) for source in sources)
    return [text for text in every if text not in PASSED_ON and not any(cell in text for cell in known)]


def test_the_page_and_the_sources_have_the_same_messages() -> None:
    page, sources = PAGE.read_text(), [path.read_text() for path in SOURCES]
    assert len(cells(page)) > 20 and sum(len(raised(ast.parse(source))) for source in sources) > 15
    assert unknown(page, sources) == []
    assert missing(page, sources) == []


def test_a_message_that_the_page_lacks_or_invents_is_found() -> None:
    page, sources = PAGE.read_text(), [path.read_text() for path in SOURCES]
    row = "| `no rank brings an array"
    assert missing(page.replace(row, "| `no rank, no array"), sources) != []
    assert unknown(page.replace(row, "| `no rank, no array"), sources) != []
    new = 'def f(call, n):\n    raise call.refuse(f"rank {n} is tired", n)'
    assert missing(page, [new]) == ["rank … is tired"]
