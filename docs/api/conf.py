"""The API page, rendered from the docstrings: `python -m sphinx -W docs/api build/api` makes build/api/index.html.

Docstrings are plain text in which `names` are code, indented lines are an example, a table is drawn with bars, and
parameters, results and errors are in numpydoc sections. `read` converts all but the sections, and napoleon those.
"""

from __future__ import annotations

import re
from typing import Any

project = "fanin"
author = "the authors of fanin"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_google_docstring = False
napoleon_use_rtype = False
suppress_warnings = ["ref.python"]  # words of types, such as "device", are names of attributes, too
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px"}
default_role = "code"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch"]  # fanin.torch can be read without it


#: Sections whose lines napoleon reads; an example after them is converted again.
SECTIONS = {"Parameters", "Returns", "Raises"}


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText: indented lines and tables become literal blocks."""
    made: list[str] = []
    shown = example = section = False
    for at, line in enumerate(lines):
        if at + 1 < len(lines) and lines[at + 1].startswith("---"):
            section = line in SECTIONS
        is_table = line.startswith("|")
        example = line.startswith(">>>") or (example and bool(line.strip()))
        if not line.strip() or example:
            shown = shown and not example
            made.append(line)
        elif not section and (is_table or line.startswith("    ")):
            if not shown:
                made += ["", "::", ""]
            shown = True
            made.append(f"    {line}" if is_table else line)
        else:
            if shown:
                made.append("")
            shown = False
            parts = re.split(r"(`[^`]*`)", line)
            made.append(
                "".join(p if i % 2 else re.sub(r"(?<!\*)\*(?!\*)|\|", r"\\\g<0>", p) for i, p in enumerate(parts))
            )
    return made


def read(app: Any, what: str, name: str, o: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured(lines)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", read, priority=400)  # before napoleon
