"""Writes the stub of the C core: the typed signatures of core.pyi with the docstrings of the built core.

    python csrc/py/stub.py FOLDER/fanin/_core.pyi        # FOLDER has the package with its built core

The build calls it. Type checkers read the signatures, editors the docstrings, which they cannot read from C.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # pip's build environment drops the folder of an earlier editable install from PYTHONPATH
    sys.path.insert(0, str(Path(sys.argv[1]).resolve().parents[1]))

import fanin
from fanin import _core

SIGNATURES = Path(__file__).with_name("core.pyi")


def public() -> set[str]:
    """The names of the core that users meet: those that the package shows, and what such an object gives."""
    shown = {id(getattr(fanin, name)) for name in dir(fanin) if name in fanin.__all__}
    if importlib.util.find_spec("fanin.sim"):
        shown |= {id(getattr(fanin.sim, name)) for name in fanin.sim.__all__}
    given = {"Target", "Machine", "HookHandle", "Edges", "Walk", "GraphFunction", "GraphStep"}
    return {
        name for name in dir(_core) if name in given or (id(getattr(_core, name)) in shown and not name.startswith("_"))
    }


def wanted(node: ast.stmt, parent: str = "") -> str | None:
    """The docstring that a class, a function, a method or a property is to have; None where it is to have none
    of ours.
    """
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    if parent.startswith("_"):
        return None  # ours, of the stub file alone
    holder: Any = getattr(_core, parent, None) if parent else _core
    if holder is None or node.name.startswith("_") or (not parent and node.name not in public()):
        return None
    if parent and node.name not in vars(holder):
        return None  # inherited
    return inspect.getdoc(getattr(holder, node.name))


def wrapped(lines: list[str], width: int) -> list[str]:
    """A paragraph whose lines are at most `width` columns, its last one with room for closing quotes."""
    if ">>>" in lines[0] or all(len(line) <= width for line in lines):
        return lines
    return textwrap.wrap(" ".join(lines), width - 3, break_long_words=False, break_on_hyphens=False)


def quoted(text: str, indent: str) -> str:
    """A docstring as it stands in the file."""
    mark = 'r"""' if "\\" in text else '"""'
    lines = [
        line for part in (mark + text).split("\n\n") for line in [*wrapped(part.splitlines(), 119 - len(indent)), ""]
    ]
    lines.pop()
    body = "\n".join(indent + line if line else "" for line in lines)
    return body + ('"""' if len(lines) == 1 else f'\n{indent}"""')


def with_docstrings(text: str) -> str:
    """The file with the docstrings of the core."""
    lines = text.splitlines()
    edits: list[
        tuple[int, int, int, str]
    ] = []  # (line, column, last line, what stands there instead of all that follows)

    def visit(node: ast.stmt, parent: str, indent: str) -> None:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            return
        first = node.body[0]
        replaced = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)  # a docstring, or ...
        overloaded = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id == "overload"]
        key = (parent, node.name)
        doc = None if overloaded and key in seen else wanted(node, parent)
        seen.add(key)
        if doc:
            said = quoted(doc, indent + "    ")
            if replaced:
                assert first.end_lineno
                beside = (
                    lines[first.lineno - 1][: first.col_offset].strip() != ""
                )  # what stands before it in its line stays
                edits.append((first.lineno, first.col_offset if beside else 0, first.end_lineno, said))
            else:
                at = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
                edits.append((at, 0, at - 1, said))
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                visit(one, node.name, indent + "    ")

    seen: set[tuple[str, str]] = set()
    for node in ast.parse(text).body:
        visit(node, "", "")
    for line, column, last, said in sorted(edits, reverse=True):
        head = [lines[line - 1][:column].rstrip()] if column else []
        lines[line - 1 : last] = [*head, *said.split("\n")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(with_docstrings(SIGNATURES.read_text()))
