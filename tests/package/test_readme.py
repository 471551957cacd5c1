"""README.md and the pages are correct: their Python runs, the two commands are there once, and .ci/run runs the test
command.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.prepared import run_prepared
from kit.support import CSRC, ROOT, TESTS

README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"

DEMO = 'python3 -m venv .venv && .venv/bin/pip install ".[demo]" && .venv/bin/fanin demo'
TEST = (
    'python3 -m venv .venv && .venv/bin/pip install -q -e ".[test]" && .venv/bin/python -m pytest -n auto --dist'
    " loadfile"
)

BLOCK = re.compile(r"^(?P<before><!-- .*? -->\n)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str, str | None]]:
    """(line, code, expected output) of each Python block.

    What a block prints is the fenced block without a language, or `text`, that follows it directly, if there is one.
    `<!-- skip: why -->` above a block excludes it, with the reason.
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
    """Whether `got` is `expected`, where a line `...` matches any lines and `...` within a line any text."""
    pattern = re.escape("\n".join(line.rstrip() for line in expected.strip().splitlines()))
    pattern = pattern.replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in got.strip().splitlines()), re.DOTALL) is not None


BLOCKS = python_blocks(README.read_text())


def prose(text: str) -> list[str]:
    """The words of a page, without its code, the words in the place of pictures, and the addresses of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|!\[.*?\]\(.*?\)|(?<=\])\(.*?\)", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"[^\s|`*#-][^\s|]*", text)


@pytest.mark.tools
def test_the_readme_shows_code_and_takes_three_minutes_to_read() -> None:
    """At 270 words a minute."""
    assert BLOCKS and len(prose(README.read_text())) <= 3 * 270


@pytest.mark.tools
def test_words_of_prose_are_counted() -> None:
    text = "# One\n![no](a.svg) [two](b.md), `three`\n```\nno\n```\n| four | - |\n<!-- no -->\n"
    assert prose(text) == ["One", "[two],", "three`", "four"]


def broken_laws(page: str) -> list[str]:
    """The laws for buffers that a dict of += breaks, in the tables of docs/conformance.md."""
    lines = page.partition("### Laws of buffers")[2].partition("\n### ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row[0] for row in rows if row[rows[0].index("dict of +=")] == "no"]


@pytest.mark.tools
def test_the_readme_names_each_law_that_a_dict_breaks() -> None:
    broken = broken_laws((ROOT / "docs" / "conformance.md").read_text())
    without = README.read_text().partition("## Without it")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.*?) \| .+ \|$", without, re.MULTILINE)[1:] == broken
    assert len(broken) == 9 and "It breaks nine [laws]" in without


@pytest.mark.tools
def test_the_laws_that_a_dict_breaks_are_found_in_a_table() -> None:
    table = "| law | fanin | dict of += |\n|-|-|-|\n| a | yes | no |\n| b | no | yes |\n"
    page = f"### Laws of buffers\n{table}### Laws of engines\n"
    assert broken_laws(page) == ["a"]


@pytest.mark.tools
def test_the_readme_has_the_newest_benchmarks() -> None:
    run = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    median = {(row["title"], name): times[1] for row in run["results"] for name, times in row["rows"].items()}

    def times_as_fast(title: str, ours: str, peer: str) -> str:
        ratio = median[title, peer] / median[title, ours]
        return f"{ratio:.2g}"

    adds, chain = (
        "{} adds of 16 float32 and the take, core 1",
        "a chain of 100000 nodes of 16 float32, for each node, core 1",
    )
    eight, two = (times_as_fast(adds.format(n), "buf.add, N times, buf.take", "a + b, then +=") for n in (8, 2))
    text = README.read_text()
    assert f"eight small gradients are summed {eight} times as fast as by `+=` (two: {two} times)" in text
    torch = times_as_fast(chain, "fanin.grad", "torch, Python functions")
    assert f"100,000 nodes whose functions are in Python is {torch} times as fast as torch's engine" in text
    assert f"{run['cpu'].partition('(')[0]} " in text and f", {run['date'][:10]};" in text


@pytest.mark.parametrize("at", range(len(BLOCKS)), ids=[f"line{line}" for line, _, _ in BLOCKS])
def test_the_readme_code_runs_and_prints_its_output(at: int, tmp_path: Path) -> None:
    _, code, expected = BLOCKS[at]
    done = run_prepared(code, cwd=tmp_path, check=False)
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
        if link.startswith("pictures/"):  # the code of the page draws it, when the site is built
            if f'plot("{link.removeprefix("pictures/")}")' not in text:
                found.append(link)
        elif not link.startswith(("https://", "#")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                found.append(link)
    return found


PAGES = sorted(page for folder in (ROOT, ROOT / "docs", CSRC, TESTS) for page in folder.glob("*.md"))


@pytest.mark.tools
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.tools
def test_a_broken_link_is_found() -> None:
    text = "[a](docs/rules.md) [b](docs/no.md) ![c](../x.svg) [d](https://x.y) ![e](pictures/e.svg)"
    assert broken_links(README, text) == ["docs/no.md", "../x.svg", "pictures/e.svg"]
    assert broken_links(README, '![e](pictures/e.svg) t.plot("e.svg")') == []


MARK = "-- block --\n"
Blocks = list[tuple[int, str, str | None]]


def differing(blocks: Blocks, said: str) -> list[str]:
    """What blocks printed, where that is not what the page shows. A mark divides the outputs."""
    return [
        f"line {line}: {got}"
        for (line, _, expected), got in zip(blocks, said.split(MARK), strict=True)
        if expected is not None and not matches(expected, got)
    ]


def output_of(blocks: Blocks, folder: Path) -> list[str]:
    """What blocks that go on from each other print, where that is not what the page shows. The first use of the fake
    driver compiles it.
    """
    code = f"print({MARK!r}, end='')\n".join(code + "\n" for _, code, _ in blocks)
    return differing(blocks, run_prepared(code, cwd=folder).stdout)


#: A program: each block is pasted into the interpreter's plain prompt, where an empty line ends a statement, and ended
#: by Enter. Its errors go to stderr.
PROMPT = """
import code
console = code.InteractiveConsole({{"__name__": "__main__"}})
for at, block in enumerate({blocks!r}):
    print({mark!r} if at else "", end="")
    for line in [*block.splitlines(), ""]:
        console.push(line)
"""


def pasted(blocks: Blocks, folder: Path) -> list[str]:
    """Errors at the prompt of blocks that are pasted there, and outputs that are not what the page shows."""
    program = PROMPT.format(blocks=[code for _, code, _ in blocks], mark=MARK)
    done = run_prepared(program, cwd=folder)
    return [*filter(None, [done.stderr]), *differing(blocks, done.stdout)]


SHOWING = [page for page in PAGES if page.parent == ROOT / "docs" and python_blocks(page.read_text())]


def runnable(page: Path) -> Blocks:
    """The blocks of a page; where torch is not installed, those that do without."""
    blocks = python_blocks(page.read_text())
    return blocks if importlib.util.find_spec("torch") else [b for b in blocks if "import torch" not in b[1]]


@pytest.mark.parametrize("page", SHOWING, ids=lambda p: p.stem)
def test_the_code_of_a_page_runs_and_prints_its_output(page: Path, tmp_path: Path) -> None:
    """The blocks of a page go on from each other."""
    blocks = runnable(page)
    if not blocks:
        pytest.skip("every block of the page needs a library that is not installed")
    assert output_of(blocks, tmp_path) == []


#: Pages that a newcomer pastes into a prompt.
NEWCOMERS = (
    "ten-things",
    "tutorial",
    "broadcasting",
    "double-backward",
    "optimizer",
    "accumulation",
    "checkpointing",
    "debugging",
    "weights",
    "parts",
    "pipelines",
    "audit",
    "torch",
    "ranks",
)
PASTED = [README, *(ROOT / "docs" / f"{name}.md" for name in NEWCOMERS)]


@pytest.mark.parametrize("page", PASTED, ids=lambda p: p.stem)
def test_a_page_for_newcomers_can_be_pasted_into_a_prompt(page: Path, tmp_path: Path) -> None:
    blocks = runnable(page)
    if not blocks:
        pytest.skip("the code of this page needs torch, which is not installed")
    assert pasted(blocks, tmp_path) == []


def test_a_block_that_a_prompt_refuses_is_found(tmp_path: Path) -> None:
    def found(code: str, expected: str | None = None) -> str:
        return "".join(pasted([(1, code, expected)], tmp_path))

    assert found("class A:\n    x = 1\n    y = 2\n\nprint(A.y)\n", "2") == ""
    assert "IndentationError" in found("class A:\n    x = 1\n\n    y = 2\n")
    assert "SyntaxError" in found("for i in range(2):\n    x = i\nprint(x)\n")
    assert "NameError" in found("print(undefined)\n")
    assert found("print(1)\n", "2") == "line 1: 1\n"


@pytest.mark.tools
def test_the_tutorial_has_eight_steps_that_print_and_the_stated_length() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    steps = re.split(r"^## \d\. ", text, flags=re.MULTILINE)[1:]
    assert len(steps) == 8
    assert all(any(expected for _, _, expected in python_blocks(step)) for step in steps)
    lines = [sum(map(bool, code.split("\n"))) for _, code, _ in python_blocks(text)]
    assert f"in about {round(sum(lines), -1)} lines of Python; the block with the whole engine has {lines[2]}" in text


def test_a_block_that_prints_something_else_is_found(tmp_path: Path) -> None:
    assert output_of([(3, "x = 1", None), (9, "print(x)", "2")], tmp_path) == ["line 9: 1\n"]


@pytest.mark.parametrize(
    ("make", "fast"),
    [
        (lambda: np.ones(4), True),
        (lambda: np.ones((2, 2, 1, 1)), True),
        (lambda: 1.5, True),
        (lambda: fanin.Zero((4,), "f8"), False),
        (lambda: np.ones(8)[::2], True),
        (lambda: np.ones((4, 4))[::2, ::2], False),
        (lambda: np.ones(4)[::-1], False),
        (lambda: np.ones((2, 3)).T, True),
        (lambda: np.ones((1, 1, 1, 1, 4)), False),
        (lambda: np.ones(4, ">f8"), None),
        (lambda: np.ma.ones(4), False),
    ],
    ids=[
        "C order",
        "four axes",
        "a number",
        "a symbolic zero",
        "gaps",
        "gaps along two axes",
        "reversed",
        "another order",
        "five axes",
        "foreign byte order",
        "a subclass",
    ],
)
def test_the_page_lists_all_that_leaves_the_fast_path(make: Any, fast: bool | None) -> None:
    """An add on the fast path allocates nothing of the core's."""
    buf = fanin.InputBuffer(1)
    given = [make() for _ in range(3)]
    if fast is None:
        with pytest.raises((TypeError, ValueError, BufferError)):
            buf.add(0, given[0])
        return
    buf.add(0, given[0])  # the slot gets what a pass needs
    before = hooks.memory()[1]
    buf.add(0, given[1])
    buf.add(0, given[2])
    assert (hooks.memory()[1] == before) == fast


@pytest.mark.tools
@pytest.mark.parametrize("command", [DEMO, TEST])
def test_each_command_is_in_the_readme_once(command: str) -> None:
    lines = [line.strip() for line in README.read_text().splitlines()]
    assert lines.count(command) == 1
    assert sum("python3 -m venv" in line for line in lines) == 2


@pytest.mark.tools
def test_ci_runs_the_very_test_command_of_the_readme() -> None:
    asked = subprocess.run(
        ["bash", str(CI), "--print-test-command"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() == TEST
    assert "-m pytest" not in TEST.replace(".venv/bin/python -m pytest", ""), "one pytest, one command"


@pytest.mark.tools
@pytest.mark.parametrize("script", [CI, CI.with_name("conditions")], ids=lambda p: p.name)
def test_a_script_of_ci_can_be_read_by_bash(script: Path) -> None:
    assert script.stat().st_mode & 0o111, f"{script} is not executable"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The checkers themselves


@pytest.mark.tools
def test_blocks_are_found_with_their_output() -> None:
    text = (
        "a\n```python\nprint(1)\n```\n\n```\n1\n```\n"
        "```python\nprint(2)\n```\ntext between\n```\nnot its output\n```\n"
        "<!-- skip: needs a GPU -->\n```python\nboom\n```\n```sh\nls\n```\n"
    )
    assert python_blocks(text) == [(2, "print(1)\n", "1\n"), (9, "print(2)\n", None)]


@pytest.mark.tools
def test_a_wrong_output_is_found() -> None:
    assert matches("1\n...\n3\n", "1\n2\n2.5\n3\n")
    assert matches("a ... c", "a b b c\n")
    assert not matches("1\n3\n", "1\n2\n")
    assert not matches("1", "1\n2")


@pytest.mark.tools
def test_the_picture_of_the_readme_is_drawn_from_a_trace_and_has_few_labels(tmp_path: Path) -> None:
    drawn = tmp_path / "scene.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "scene.py", drawn], check=True)
    assert drawn.read_text() == (ROOT / "docs" / "scene.svg").read_text(), "python docs/scene.py draws it anew"
    words = re.findall(r"<text[^>]*>([^<]+)</text>", drawn.read_text())
    assert {"mul", "sin", "sum", "step", "waits for exp", "waits for sin", "wait for mul, left out"} <= set(words)
    assert len(words) <= 20 and "docs/scene.svg" in README.read_text()
