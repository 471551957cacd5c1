"""The rules and their tests: a test states every rule of S, A, W, P, V, E, L, G, H and R; every number cited exists.

A mark lists the rules that a test states: `@pytest.mark.rule("S8", "S9")`. Code and messages cite a rule by its number.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kit.support import CSRC, ROOT, TESTS

pytestmark = pytest.mark.tools

RULES = ROOT / "docs" / "rules.md"
FAMILIES = ("S", "A")
#: Families whose numbers are cited in tests by their marks alone: an E4 in a text may be a float8, an L2 a cache.
MARKED = ("W", "P", "V", "E", "L", "G", "H", "R")
#: How many rules each family has, and which numbers are given to what is still to come.
COUNTS = {"S": 22, "A": 16, "W": 8, "P": 5, "V": 3, "E": 18, "L": 9, "K": 4, "G": 4, "H": 2, "R": 10}
TO_COME: set[str] = set()
#: Rules that no test states yet, with the date of the finding: the list may only shrink.
KNOWN_UNSTATED: dict[str, str] = {}

ROW = re.compile(r"^\| ([A-Z]\d{1,2}) \|", re.MULTILINE)
# A number that is a word of its own: S12, not xS12, S12x, "S123", 0xA1, "A4_", A1.5 or -A1 (a name, a hash, a figure).
NUMBER = re.compile(r"(?<![\w\-.#])([SA]\d{1,2})(?![\w]|\.\d)")
RANGE = re.compile(r"(?<![\w\-.#])([SA])(\d{1,2})(?:-|\.\.|–| to )\1?(\d{1,2})(?![\w])")


def rules_of(text: str) -> list[str]:
    """The numbers of the rows of the tables, in the order of the page."""
    return ROW.findall(text)


def cited_in(text: str) -> set[str]:
    """The numbers of S- and A-rules in a text; of a range (S8-S11, A8-A10) both ends and all between."""
    found = set(NUMBER.findall(text))
    for family, low, high in RANGE.findall(text):
        found |= {f"{family}{n}" for n in range(int(low), int(high) + 1)}
    return found


def words_of_c(text: str) -> str:
    """The comments and the strings of a C file: where a rule is cited, and no name is mistaken for one."""
    parts = re.findall(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", text, re.DOTALL)
    return "\n".join(parts)


def words_of_python(text: str) -> str:
    """The comments and the string literals of a Python file."""
    import io
    import tokenize

    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(t.string for t in tokens if t.type in kinds)


def marked_in(text: str) -> Iterator[tuple[str, str]]:
    """(test, rule) for each rule that a `pytest.mark.rule(...)` names, on a test, a class, or in `pytestmark`."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rule"):
            continue
        if not ast.unparse(node.func).endswith("mark.rule"):
            continue
        for word in node.args:
            if isinstance(word, ast.Constant) and isinstance(word.value, str):
                yield f"line {node.lineno}", word.value


def files() -> Iterable[tuple[Path, str]]:
    """Every file that may cite rules, with the words in it."""
    own = Path(__file__).resolve()
    for path in sorted([*CSRC.glob("**/*.[ch]"), *(TESTS / "c").glob("*.[ch]")]):
        yield path, words_of_c(path.read_text())
    for folder in (ROOT / "python", TESTS, ROOT / "examples", ROOT / "benchmarks"):
        for path in sorted(folder.glob("**/*.py")):
            if path.resolve() != own:
                yield path, words_of_python(path.read_text())


@functools.cache
def all_marks() -> dict[str, list[str]]:
    """rule -> the tests that state it."""
    found: dict[str, list[str]] = {}
    own = Path(__file__).resolve()
    for path in sorted(TESTS.glob("**/*.py")):
        if path.resolve() != own:
            for where, rule in marked_in(path.read_text()):
                found.setdefault(rule, []).append(f"{path.relative_to(ROOT)}, {where}")
    return found


KNOWN = rules_of(RULES.read_text())
KNOWN_COUNTS = {family: sum(k[0] == family for k in KNOWN) for family in FAMILIES}


def test_the_page_of_rules_is_whole() -> None:
    assert len(KNOWN) == len(set(KNOWN)), "a number is given twice"
    for family, count in COUNTS.items():
        mine = [k for k in KNOWN if k[0] == family]
        whole = [f"{family}{n}" for n in range(1, count + 1)]
        assert mine == [k for k in whole if k not in TO_COME], f"family {family}: {mine}"


def counts_in(root: Path) -> dict[str, dict[str, int]]:
    """Each place that states the number of rules S and A, with the number; for a bit, its position."""
    explain = (root / "tests/buffer/sim/test_explain.py").read_text()
    bits = re.search(r"rules_of\(0b1 \| 1 << (\d+) \| 1 << (\d+) \| 1 << (\d+)\)", explain)
    assert bits, (
        "tests/buffer/sim/test_explain.py no longer asks rules_of for the first and last rules of both families"
    )
    last_s, first_a, last_a = map(int, bits.groups())
    header = (root / "csrc/buffer/rules.h").read_text()
    words = (root / "python/fanin/_words.py").read_text()
    own = (root / "tests/spec/test_rules_cited.py").read_text()
    page = rules_of((root / "docs/rules.md").read_text())

    def number(pattern: str, text: str) -> int:
        found = re.search(pattern, text, re.MULTILINE)
        assert found, f"{pattern} is nowhere"
        return int(found[1])

    return {
        "docs/rules.md": {family: sum(k[0] == family for k in page) for family in FAMILIES},
        "csrc/buffer/rules.h": {f: number(rf"^#define FAN_{f}_RULES (\d+)$", header) for f in FAMILIES},
        "python/fanin/_words.py": {"S": number(r"^S_RULES = (\d+)\b", words)},
        "tests/spec/test_rules_cited.py": {f: number(rf'^COUNTS = .*"{f}": (\d+)', own) for f in FAMILIES},
        "tests/buffer/sim/test_explain.py": {"S": last_s + 1, "A": last_a - first_a + 1, "S again": first_a},
    }


def stale_counts(root: Path) -> list[str]:
    """The places whose number of rules is not that of the page, which has them."""
    found = counts_in(root)
    page = found["docs/rules.md"]
    return [
        f"{place} says {count} rules of {family[0]}, docs/rules.md has {page[family[0]]}"
        for place, counts in found.items()
        for family, count in counts.items()
        if count != page[family[0]]
    ]


def test_every_place_that_counts_the_rules_counts_those_of_the_page() -> None:
    stale = stale_counts(ROOT)
    assert not stale, "\n".join(stale)


@pytest.mark.parametrize(
    ("place", "text", "family", "by"),
    [
        ("csrc/buffer/rules.h", "FAN_S_RULES {S}", "S", -1),
        ("csrc/buffer/rules.h", "FAN_A_RULES {A}", "A", 1),
        ("python/fanin/_words.py", "S_RULES = {S}", "S", 1),
        ("tests/spec/test_rules_cited.py", '"A": {A},', "A", -1),
        ("tests/buffer/sim/test_explain.py", "| 1 << {last})", "A", -1),
    ],
)
def test_a_planted_stale_count_is_named(place: str, text: str, family: str, by: int, tmp_path: Path) -> None:
    for name in counts_in(ROOT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = KNOWN_COUNTS
    stale = {**page, family: page[family] + by}
    old, new = (text.format(**n, last=n["S"] + n["A"] - 1) for n in (page, stale))
    whole = (tmp_path / place).read_text()
    assert old in whole
    (tmp_path / place).write_text(whole.replace(old, new, 1))
    said = f"{place} says {stale[family]} rules of {family}, docs/rules.md has {page[family]}"
    assert stale_counts(tmp_path) == [said]


def test_a_rule_more_on_the_page_names_every_place(tmp_path: Path) -> None:
    for name in counts_in(ROOT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    with (tmp_path / "docs/rules.md").open("a") as page:
        page.write(f"\n| A{KNOWN_COUNTS['A'] + 1} | one more | |\n")
    assert [said.partition(" ")[0] for said in stale_counts(tmp_path)] == [
        "csrc/buffer/rules.h",
        "tests/spec/test_rules_cited.py",
        "tests/buffer/sim/test_explain.py",
    ]


@pytest.mark.parametrize("rule", [k for k in KNOWN if k[0] in (*FAMILIES, *MARKED)])
def test_every_rule_is_stated_by_a_test(rule: str) -> None:
    stated = bool(all_marks().get(rule))
    assert stated != (rule in KNOWN_UNSTATED), (
        f"{rule} is stated: take it off KNOWN_UNSTATED"
        if stated
        else f"no test is marked @pytest.mark.rule({rule!r}): see docs/rules.md"
    )


def test_a_mark_names_a_rule() -> None:
    unknown = {rule: where for rule, where in all_marks().items() if rule not in KNOWN}
    assert not unknown, f"marked with rules that docs/rules.md does not have: {unknown}"


def test_every_number_cited_exists() -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(unknown)
        for path, words in files()
        if (unknown := cited_in(words) - set(KNOWN))
    }
    assert not wrong, f"cited, but not in docs/rules.md: {wrong}"


def test_the_core_cites_the_rules() -> None:
    """A checker that reads nothing finds nothing wrong: the rules' own files must cite most of them."""
    cited = set().union(*(cited_in(words) for path, words in files() if CSRC in path.parents))
    missing = [k for k in KNOWN if k[0] in FAMILIES and k not in cited]
    assert len(missing) <= 8, f"cited nowhere in csrc/: {missing}"


def test_the_option_rule_selects_the_tests_that_state_it(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.rule('A9', 'A10')\ndef test_a(): pass\n"
    (tmp_path / "test_x.py").write_text(
        marked + "@pytest.mark.rule('A1')\ndef test_b(): pass\ndef test_c(): pass\n"
        "@pytest.mark.rule('S9')\nclass TestD:\n    def test_d(self): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]

    def selected(*options: str) -> tuple[list[str], str]:
        done = subprocess.run(
            [*command, "--collect-only", "-p", "conftest", *options, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(TESTS)])},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        return re.findall(r"::(test_\w)$", done.stdout, re.MULTILINE), done.stdout + done.stderr

    assert selected()[0] == ["test_a", "test_b", "test_c", "test_d"]
    assert selected("--rule", "A10")[0] == ["test_a"]
    assert selected("--rule", "a1", "--rule", "S9")[0] == ["test_b", "test_d"]
    _, said = selected("--rule", "A99")
    assert "--rule A99: no test here is marked with it" in said


# The checkers themselves


def test_planted_citations_are_found() -> None:
    c = (
        '/* S9: see A3, (S12), S18-S20. 0xA1 and A1.5 are no rules. */\nint S99; // A77!\nchar *s = "S14 says'
        ' \\"A2\\"";'
    )
    assert cited_in(words_of_c(c)) == {"S9", "A3", "S12", "S18", "S19", "S20", "A77", "S14", "A2"}
    python = '"""As S8 and A8-A10 say."""\nS1 = 1  # A99\nx = "by S3"\n'
    assert cited_in(words_of_python(python)) == {"S8", "A8", "A9", "A10", "A99", "S3"}
    assert cited_in("sim:0, AS12, S123, A4_x, utf-A1, GA10x") == set()


def test_planted_marks_are_found() -> None:
    text = (
        "import pytest\npytestmark = [pytest.mark.core, pytest.mark.rule('A1')]\n"
        "@pytest.mark.rule('S8', 'S9')\ndef test_x(): pass\n"
        "@pytest.mark.parametrize('c', [pytest.param(1, marks=pytest.mark.rule('S10'))])\ndef test_y(c): pass\n"
        "obj.rule('S11')\n"
    )
    assert sorted(rule for _, rule in marked_in(text)) == ["A1", "S10", "S8", "S9"]


def test_planted_rows_are_found() -> None:
    assert rules_of("| rule | x |\n|---|---|\n| S1 | a |\n| A12 | S3 |\nS4 is text\n") == ["S1", "A12"]
