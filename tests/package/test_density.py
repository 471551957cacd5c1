"""The folders of C that have one step a line keep it (CONTRIBUTING.md, Style)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.density import Density, density, of_folder, without_braces
from kit.support import CSRC, TEST_C

pytestmark = pytest.mark.tools

#: The folders of csrc, with those of py; and of the tests: C programs, and the driver that the tests use.
FOLDERS = {
    **{path.relative_to(CSRC).as_posix(): path for path in sorted(CSRC.glob("*")) if path.is_dir()},
    **{path.relative_to(CSRC).as_posix(): path for path in sorted(CSRC.glob("py/*")) if path.is_dir()},
    "tests/c": TEST_C,
    "tests/fake_cuda": TEST_C.parent / "fake_cuda",
}


def too_much(found: Density) -> list[str]:
    """What lines of code hold too much of, in 1,000 of them: a rule may have a few exceptions."""
    limits = {"conditional": 20.0, "several": 0.3, "heavy": 1.2, "packed": 1.0}
    return [name for name, limit in limits.items() if found.in_1000(getattr(found, name)) > limit]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_done_has_one_step_a_line(folder: str) -> None:
    found = of_folder(FOLDERS[folder])
    assert found.lines > 100
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


@pytest.mark.parametrize("folder", [CSRC, TEST_C, TEST_C.parent / "fake_cuda"], ids=lambda folder: folder.name)
def test_a_body_of_more_than_one_line_has_braces(folder: Path) -> None:
    sources = [*folder.rglob("*.c"), *folder.rglob("*.h")]
    assert len(sources) > 1
    found = {str(path): lines for path in sources if (lines := without_braces(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "body",
    [
        "    f(a,\n      b);",
        "    /* why */\n    f(a, b);",
        "    for (;;)\n        f(a, b);",
        "    return (type){\n        .a = b,\n    };",
    ],
)
@pytest.mark.parametrize("head", ["if (a && (b || c))", "for (;;)", "while (f(a))", "if (a)\n    b();\nelse", "do"])
def test_a_planted_body_of_several_lines_without_braces_is_found(head: str, body: str) -> None:
    end = "\nwhile (a);" if head == "do" else ""
    line = 1 + head.count("\n")
    assert without_braces(f"{head}\n{body}{end}\n") == [line]
    assert without_braces(f"{head} {{\n{body}\n}}{end}\n") == []


@pytest.mark.parametrize(
    "source",
    [
        "if (a) /* why */\n    b(); /* why */\nelse if (c)\n    d();\nelse\n    e();\n",
        "if (a)\n    SUM(double)\nelse if (b)\n    SUM(float)\nelse\n    SUM(low)\nreturn c;\n",
        "do {\n    a();\n    b();\n} while (c);\nd();\n",
        "#define A(x) \\\n    if (x) \\\n        f(x, \\\n          x)\n",
        "/* if (a)\n    f(a,\n      b); */\n",
        "while (a())\n    ;\nb();\n",
    ],
)
def test_bodies_of_one_line_macros_and_comments_need_no_braces(source: str) -> None:
    assert without_braces(source) == []
