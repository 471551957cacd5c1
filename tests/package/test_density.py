"""The folders of C that have one step a line keep it (CONTRIBUTING.md, Style)."""

from __future__ import annotations

import pytest

from kit.density import Density, density, of_folder
from kit.support import CSRC

pytestmark = pytest.mark.tools

#: The folders that are done.
FOLDERS = (
    "array",
    "base",
    "buffer",
    "device",
    "engine",
    "py/api",
    "py/arrays",
    "py/buffer",
    "py/device",
    "py/engine",
    "py/module",
)


def too_much(found: Density) -> list[str]:
    """What lines of code hold too much of, in 1,000 of them: a rule may have a few exceptions."""
    limits = {"conditional": 20.0, "several": 0.3, "heavy": 1.2, "packed": 1.0}
    return [name for name, limit in limits.items() if found.in_1000(getattr(found, name)) > limit]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_done_has_one_step_a_line(folder: str) -> None:
    found = of_folder(CSRC / folder)
    assert found.lines > 400
    assert not too_much(found), str(found)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("return a ? b : c;", "conditional"),
        ("return a ? b : c ? d : e;", "several"),
        ("if (a && b && (c || d))\n    f();", "heavy"),
        ("int64_t a = 1, b = f(2, 3);", "packed"),
        ("const fan_slot *a = b, *c = d;", "packed"),
    ],
)
def test_a_planted_line_of_several_steps_is_found(line: str, name: str) -> None:
    plain = "f(a, b);\n" * 40
    assert not too_much(density([plain]))
    assert name in too_much(density([plain + line + "\n"]))


def test_comments_texts_macros_and_calls_are_no_steps() -> None:
    source = "/* a ? b : c */\n#define A(x) ((x) ? 1 : 2)\nf(\"a && b || c && d\", '?');\nint a = f(b = 1, c = 2), d;\n"
    assert density([source]) == Density(lines=2, tokens=24, conditional=0, several=0, heavy=0, packed=0)
