"""README.md says what is so: its Python runs, its two commands are there once, and .ci/run runs its test command."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support import ROOT, run_python

README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"

DEMO = 'python3 -m venv .venv && .venv/bin/pip install ".[demo]" && .venv/bin/fanin demo'
TEST = 'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/python -m pytest'

BLOCK = re.compile(r"^(?P<before><!-- .*? -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str, str | None]]:
    """(line, code, expected output) of each Python block.

    What a block prints is the fenced block without a language, or `text`, that follows it directly, if there is one.
    `<!-- skip: why -->` above a block says why it is not run.
    """
    found: list[tuple[int, str, str | None]] = []
    matches = list(BLOCK.finditer(text))
    for at, match in enumerate(matches):
        if match["kind"] != "python" or (match["before"] or "").startswith("<!-- skip:"):
            continue
        expected = None
        if at + 1 < len(matches) and matches[at + 1]["kind"] in ("", "text", "output"):
            after = matches[at + 1]
            if text[match.end() : after.start()].strip() == "" and not after["before"]:
                expected = after["body"]
        found.append((text.count("\n", 0, match.start()) + 1, match["body"], expected))
    return found


def matches(expected: str, got: str) -> bool:
    """Whether `got` is `expected`, where a line `...` stands for any lines and `...` within a line for any text."""
    pattern = re.escape("\n".join(line.rstrip() for line in expected.strip().splitlines()))
    pattern = pattern.replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in got.strip().splitlines()), re.DOTALL) is not None


BLOCKS = python_blocks(README.read_text())


def test_the_readme_shows_code() -> None:
    assert len(BLOCKS) >= 2, "README.md promises short examples"


@pytest.mark.parametrize("at", range(len(BLOCKS)), ids=[f"line{line}" for line, _, _ in BLOCKS])
def test_the_readme_code_runs_and_prints_what_it_says(at: int, tmp_path: Path) -> None:
    _, code, expected = BLOCKS[at]
    done = run_python(code, cwd=tmp_path, check=False)
    # A block may end in an error that it shows: then the error is part of what is printed.
    said = done.stdout + (done.stderr if done.returncode and expected is not None else "")
    if expected is None:
        assert done.returncode == 0, done.stderr
    else:
        assert matches(expected, said), f"expected:\n{expected}\ngot:\n{said}\n{done.stderr}"


def broken_links(page: Path, text: str) -> list[str]:
    """The links of a page to files that are not there, or that lead out of the repository."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("https://", "#")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                found.append(link)
    return found


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "csrc" / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    assert broken_links(README, "[a](docs/rules.md) [b](docs/no.md) ![c](../x.svg) [d](https://x.y)") == ["docs/no.md", "../x.svg"]


def test_the_code_of_the_page_on_migrating_runs(tmp_path: Path) -> None:
    code = "".join(code for _, code, _ in python_blocks((ROOT / "docs" / "migrating.md").read_text()))
    run_python(code + "assert w.tolist() == grads['w'].tolist() == [3, 3, 3]\n", cwd=tmp_path)


@pytest.mark.parametrize("command", [DEMO, TEST])
def test_each_command_stands_in_the_readme_once(command: str) -> None:
    lines = [line.strip() for line in README.read_text().splitlines()]
    assert lines.count(command) == 1
    assert sum("python3 -m venv" in line for line in lines) == 2


def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    asked = subprocess.run(
        ["bash", str(CI), "--print-test-command"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == TEST
    assert "-m pytest" not in TEST.replace(".venv/bin/python -m pytest", ""), "one pytest, one command"


def test_ci_can_be_read_by_bash() -> None:
    assert CI.stat().st_mode & 0o111, ".ci/run is not executable"
    done = subprocess.run(["bash", "-n", str(CI)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The checkers themselves


def test_blocks_are_found_with_their_output() -> None:
    text = (
        "a\n```python\nprint(1)\n```\n\n```\n1\n```\n"
        "```python\nprint(2)\n```\ntext between\n```\nnot its output\n```\n"
        "<!-- skip: needs a GPU -->\n```python\nboom\n```\n```sh\nls\n```\n"
    )
    assert python_blocks(text) == [(2, "print(1)\n", "1\n"), (9, "print(2)\n", None)]


def test_a_wrong_output_is_found() -> None:
    assert matches("1\n...\n3\n", "1\n2\n2.5\n3\n")
    assert matches("a ... c", "a b b c\n")
    assert not matches("1\n3\n", "1\n2\n")
    assert not matches("1", "1\n2")
