"""The pages in docs/: one sentence a line, decisions in order, and what they name exists."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import runpy
import types
from pathlib import Path
from typing import Any

import pytest

import fanin
from kit.sentences import one_a_line
from kit.support import CSRC, ROOT, TESTS, run_python

pytestmark = pytest.mark.tools

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), CSRC / "README.md", TESTS / "README.md"])
DESIGN = ROOT / "docs" / "design.md"
DECISIONS = ROOT / "docs" / "decisions.md"

DECISION = re.compile(r"^### D(\d+)\. (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_a_page_has_one_sentence_a_line(page: Path) -> None:
    text = page.read_text()
    assert text == one_a_line(text), f"python tests/kit/sentences.py {page.relative_to(ROOT)}"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("One. Two\nends here. `Three`!", ["One.", "Two ends here.", "`Three`!"]),
        ("- An item. Its\n  second (D7. Fold).\n- k0 .. K", ["- An item.", "  Its second (D7. Fold).", "- k0 .. K"]),
        ("See `a. B` and [x](y. Z), e.g. NumPy. It", ["See `a. B` and [x](y. Z), e.g. NumPy.", "It"]),
        ("| A. B |\n```\nA. B\n```\n# A. B", ["| A. B |", "```", "A. B", "```", "# A. B"]),
        ("> One. Two\n> ends", ["> One.", "> Two ends"]),
    ],
)  # fmt: skip
def test_two_sentences_in_a_line_are_found(text: str, lines: list[str]) -> None:
    assert one_a_line(text).split("\n") == lines
    assert one_a_line("\n".join(lines)).split("\n") == lines


def wrong_decisions(text: str, cited: dict[str, set[int]]) -> list[str]:
    """Decisions that are out of order in their section, given twice, or cited and not there."""
    sections = [[int(n) for n, _ in DECISION.findall(part)] for part in re.split(r"^## ", text, flags=re.MULTILINE)]
    numbers = [n for section in sections for n in section]
    wrong = [f"D{b} follows D{a}" for section in sections for a, b in itertools.pairwise(section) if b <= a]
    wrong += [f"D{n} is given twice" for n in sorted(set(numbers)) if numbers.count(n) > 1]
    return wrong + [f"{where} cites D{n}" for where, found in cited.items() for n in sorted(found - set(numbers))]


def cited_decisions() -> dict[str, set[int]]:
    """The decisions that code, tests and pages cite."""
    found = {}
    for folder in (CSRC, ROOT / "python", TESTS / "reference", ROOT / "docs", ROOT / "benchmarks"):
        for path in folder.glob("**/*"):
            if path.suffix in (".c", ".h", ".py", ".md", ".cu"):
                numbers = re.findall(r"(?<![\w.#\"'])D([1-9]\d?)(?![\w.\"'=]|\.\d)", path.read_text())
                found[str(path.relative_to(ROOT))] = {int(n) for n in numbers}
    return found


def test_decisions_are_in_order_and_unique_and_cited_ones_exist() -> None:
    text, cited = DECISIONS.read_text(), cited_decisions()
    assert len(DECISION.findall(text)) >= 75 and sum(map(len, cited.values())) > 100
    assert not wrong_decisions(text, cited)


def test_planted_wrong_decisions_are_found() -> None:
    text = "## x\n### D1. One\n### D3. Three\n### D2. Two\n## y\n### D1. Again\n"
    assert wrong_decisions(text, {"a.c": {1, 9}}) == ["D2 follows D3", "D1 is given twice", "a.c cites D9"]


def test_the_first_hour_changes_a_rule_that_is_there_and_names_its_test() -> None:
    hour = (ROOT / "CONTRIBUTING.md").read_text().partition("## The first hour")[2].partition("\n## ")[0]
    edit = re.search(r"^sed -i 's/(.+)/(.+)/' (\S+)$", hour, re.MULTILINE)
    assert edit and (ROOT / edit[3]).read_text().count(edit[1]) == 1
    command = re.search(r"pytest -q (\S+\.py)", hour)
    test = re.search(r"It fails in `(\w+)`", hour)
    assert command and test and f"def {test[1]}(" in (ROOT / command[1]).read_text()


def site() -> dict[str, Any]:
    """What docs/conf.py defines."""
    return runpy.run_path(str(ROOT / "docs/conf.py"))


def test_the_api_pages_show_every_public_module_and_name() -> None:
    """But for modules whose names the package shows itself, and those of commands."""
    pages = site()["API"]
    shown = [name for _, names in pages.values() for name in names.split()]
    modules = {p.stem if p.is_file() else p.name for p in (ROOT / "python/fanin").iterdir() if p.suffix in (".py", "")}
    elsewhere = {"slots", "partial", "streams", "options", "errors", "include", "cli", "conformance"}
    public = {f"fanin.{m}" for m in modules if not m.startswith("_") and m not in elsewhere}
    assert sorted(shown) == sorted({*fanin.__all__, *public} - {"__version__", "sim"})
    listed = re.findall(r"^api/(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert listed == list(pages)


def test_the_index_of_the_api_has_a_line_for_each_name_under_the_title_of_its_page() -> None:
    """In a process of its own: the modules are imported without torch."""
    pytest.importorskip("sphinx", reason="sphinx is not installed: the extra docs")
    code = f"import runpy; print(runpy.run_path({str(ROOT / 'docs/conf.py')!r})['api_index']())"
    index = run_python(code).stdout
    sections = dict(part.split("\n", 1) for part in index.split("\n## ")[1:])
    assert list(sections) == [title for title, _ in site()["API"].values()]
    named = dict(re.findall(r"^- `([\w.]+)`: (.+)$", index, re.MULTILINE))
    assert {f"fanin.{name}" for name in fanin.__all__} - {"fanin.__version__"} <= set(named)
    assert named["InputBuffer.add"] == "Add one gradient to a slot."
    assert "fanin.torch.accumulate" in named and "fanin.sim.Machine" in named


def test_a_summary_is_the_first_sentence() -> None:
    def documented() -> None:
        """Sum `a` and
        b*. Raise nothing.

        More.
        """

    assert site()["summary"](documented) == "Sum `a` and b\\*."


def twice(labels: list[str]) -> list[str]:
    """Labels of the navigation that a reader takes for one another."""
    plain = [label.lower().removeprefix("the ") for label in labels]
    return sorted({label for label in plain if plain.count(label) > 1})


def test_the_navigation_has_no_two_entries_of_one_name() -> None:
    trees = [re.findall(r"^(.+?) <[\w-]+>$", page.read_text(), re.MULTILINE) for page in (ROOT / "docs").glob("*.md")]
    labels = [*itertools.chain(*trees), *(title for title, _ in site()["API"].values())]
    assert "Engine" in labels and twice(labels) == []
    assert twice(["Engine", "The engine", "API"]) == ["engine"]


def test_the_site_links_the_repository_of_the_installed_package() -> None:
    repository = site()["repository"]
    urls = ["Homepage, https://host.example/home", "Source, https://host.example/group/name"]
    assert repository(urls) == "https://host.example/group/name" and repository([]) == ""


#: Words that newcomers search the site for, and the page that answers; the search prefers headings.
SEARCHED = {
    "broadcast": "broadcasting",
    "unbroadcast": "broadcasting",
    "double backward": "double-backward",
    "optimizer": "optimizer",
    "accumulate": "accumulation",
    "checkpoint": "checkpointing",
    "debug": "debugging",
}


@pytest.mark.parametrize(("words", "page"), SEARCHED.items())
def test_words_that_newcomers_search_for_are_in_a_heading_of_the_page_that_answers(words: str, page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert any(words in heading.lower() for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


def test_a_number_in_running_text_is_a_link() -> None:
    numbers = site()["NUMBER"].findall
    assert numbers("as S8, (A1) and S12-S17; D7, T18. E4M3, xS1, A1.5, utf-A1, 2 MB L2, 2 MB of L2, S123") == [
        *("S8", "A1", "S12", "S17", "D7", "T18")
    ]


def test_code_that_is_a_public_name_is_found() -> None:
    public_name = site()["public_name"]
    known = ["fanin.grad", "fanin.InputBuffer", "fanin.InputBuffer.take", "fanin.sim.Machine.empty", "fanin.tape.add"]
    names = ("InputBuffer", "fanin.grad(roots)", "buf.take(out=x)", "Machine.empty")
    assert [public_name(code, known) for code in names] == [known[1], known[0], known[2], known[3]]
    assert {public_name(code, known) for code in ("stream", "x + y", "np.add", "fanin.gone", "add")} == {None}


def test_text_after_the_sections_of_a_docstring_is_no_parameter() -> None:
    text = "Sum.\n\nParameters\n----------\nx : int\n    One.\n\n>>> f(1)\n2\n"
    made = site()["as_restructured"](text.splitlines())
    assert made[made.index(">>> f(1)") - 2 :][:2] == ["Examples", "--------"]
    assert "Notes" in site()["as_restructured"](text.replace(">>> f(1)", "It adds").splitlines())


SHOWN = ("fanin", "fanin.sim", "fanin.graph", "fanin.tape", "fanin.analysis", "fanin.descriptors", "fanin.testing")


def without_docstring(module: types.ModuleType) -> list[str]:
    """The public functions, classes, methods and properties of a module that have no docstring: the page omits them."""
    missing = []
    names = getattr(module, "__all__", [k for k in vars(module) if not k.startswith("_")])
    for name in names:
        o = getattr(module, name)
        if not (inspect.isclass(o) or inspect.isroutine(o)) or not o.__module__.startswith(module.__name__):
            continue
        if not inspect.getdoc(o):
            missing.append(name)
        for method, value in vars(o).items() if inspect.isclass(o) else ():
            is_shown = inspect.isroutine(value) or isinstance(value, property | functools.cached_property)
            if is_shown and not method.startswith("_") and not inspect.getdoc(getattr(o, method)):
                missing.append(f"{name}.{method}")
    return missing


@pytest.mark.parametrize("name", SHOWN)
def test_everything_public_has_a_docstring(name: str) -> None:
    assert not without_docstring(importlib.import_module(name))


def test_a_planted_function_without_a_docstring_is_found() -> None:
    code = "def f(): pass\nclass C:\n  'c'\n  def m(self): pass\n  @property\n  def p(self): return 1\n"
    module = types.ModuleType("planted")
    exec(code, vars(module))
    assert without_docstring(module) == ["f", "C.m", "C.p"]


#: A path of the tree as pages write it: with a folder, and what it ends in.
NAMED = re.compile(r"`((?:csrc/|python/|tests/|docs/|benchmarks/|examples/|\.ci/)?[\w.-]+/[\w./-]*\w)`")


def missing_files(text: str) -> list[str]:
    """The paths in backticks that are nowhere: from the root, from csrc/, or from python/fanin/."""
    places = (ROOT, CSRC, ROOT / "python" / "fanin", TESTS, ROOT / "python")
    gone = []
    for name in NAMED.findall(text):
        ends = ("", ".c", ".h", ".py") if "." not in name.rpartition("/")[2] else ("",)
        if not any((place / (name + end)).exists() for place in places for end in ends):
            gone.append(name)
    return sorted(set(gone))


@pytest.mark.parametrize("page", ["docs/design.md", "docs/decisions.md", "CONTRIBUTING.md", "csrc/README.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert NAMED.search(text)
    assert not missing_files(text)


def missing_in_drawings(text: str) -> list[str]:
    """The C files that a page's drawings name and that csrc/ has not."""
    drawn = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    names = {path.name for path in CSRC.glob("**/*.[ch]")}
    return sorted(set(re.findall(r"[\w-]+\.[ch]\b", drawn)) - names)


def test_the_files_on_the_road_of_a_gradient_exist() -> None:
    text = DESIGN.read_text()
    assert text.count(".c") > 20 and not missing_in_drawings(text)


def test_a_planted_name_in_a_drawing_is_found() -> None:
    assert missing_in_drawings("`gone.c`\n```\nbase/mem.c -> away.c (x.h)\n```\n") == ["away.c", "x.h"]


def test_a_planted_name_of_no_file_is_found() -> None:
    assert missing_files("`docs/design.md` `base/mem` `base/planted` `csrc/gone.c` `a / b`") == [
        "base/planted",
        "csrc/gone.c",
    ]
