"""What may be asked of every file of the product: functions of 60 lines, lines of 120 columns, the field's words, no
name that nobody uses.

Each checker has a planted fault that it must find.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from kit.support import CSRC, ROOT, cache_dir, compiler
from kit.tree import (
    Function,
    c_files,
    c_functions,
    compile_objects,
    functions,
    identifiers,
    names_in_text,
    python_functions,
    used_by_nobody,
    wide_lines,
)

pytestmark = pytest.mark.core

LINES = 60
FILE_LINES = 1000  #: of tests

# Lengths


def long_functions(found: Iterable[Function]) -> list[str]:
    return [f"{f.name} in {f.file} is longer than {LINES} lines" for f in found if f.lines > LINES]


def test_no_function_is_longer_than_60_lines() -> None:
    found = functions(ROOT)
    assert sum(f.file.startswith("csrc/") for f in found) > 1500, "hardly a function of C was read"
    assert sum(f.file.startswith("python/") for f in found) > 800, "hardly a function of Python was read"
    assert not long_functions(found)


def sources_of_tests(root: Path) -> list[Path]:
    return sorted(p for p in (root / "tests").glob("**/*") if p.suffix in (".py", ".c", ".h"))


def long_files(root: Path) -> list[str]:
    """The files of tests that no one reads to the end."""
    lengths = {p: len(p.read_text().splitlines()) for p in sources_of_tests(root)}
    return [f"{p.relative_to(root).as_posix()} has {n} lines" for p, n in lengths.items() if n > FILE_LINES]


def test_no_function_of_tests_is_longer_and_no_file_of_theirs_than_1000_lines() -> None:
    found: list[Function] = []
    for path in sources_of_tests(ROOT):
        read = python_functions if path.suffix == ".py" else c_functions
        found += read(path.read_text(), path.relative_to(ROOT).as_posix())
    assert len(found) > 3000, "hardly a test was read"
    assert long_functions(found) == []
    assert long_files(ROOT) == []


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests" / "c").mkdir(parents=True)
    (tmp_path / "tests/a.py").write_text("x = 1\n" * FILE_LINES)
    assert long_files(tmp_path) == []
    (tmp_path / "tests/c/b.c").write_text("int x;\n" * (FILE_LINES + 1))
    assert long_files(tmp_path) == ["tests/c/b.c has 1001 lines"]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_planted_long_function_is_found(extra: int) -> None:
    body = "    x++;\n" * (LINES - 5 + extra)
    c = f"static int\nf(int x,\n  int y)\n{{\n{body}}}\n\nint g(void)\n{{\n    return '{{';\n}}\n"
    assert [(f.name, f.lines) for f in c_functions(c)] == [("f", LINES + extra), ("g", 4)]
    said = '    """Says\n\n    much.\n    """\n'
    python = "class A:\n    def f(self):\n    " + said + "        x = 1\n" * (LINES - 1 + extra)
    assert [(f.name, f.lines) for f in python_functions(python)] == [("f", 60 + extra)]
    found = [*c_functions(c, "a.c"), *python_functions(python, "a.py")]
    assert long_functions(found) == [f"f in {file} is longer than 60 lines" for file in ("a.c", "a.py")] * extra


def test_no_line_is_wider_than_120_columns() -> None:
    assert not wide_lines(ROOT)


def test_a_planted_wide_line_is_found(tmp_path: Path) -> None:
    for name in ("csrc/base", "python/fanin/include", "tests/c", ".ci"):
        (tmp_path / name).mkdir(parents=True)
    package = ["python/fanin/include/x.h", "python/fanin/x.py", "python/fanin/x.pyi"]
    where = ["csrc/base/x.h", *package, "tests/c/test_x.c", "tests/test_x.py", ".ci/run"]
    for columns, found in ((120, []), (121, ["csrc/base/x.h:2", *(f"{name}:2" for name in where[1:])])):
        for name in where:
            begin, end = ("/* ", " */") if name.endswith((".h", ".c")) else ("# ", "")
            text = begin + "x" * (columns - len(begin + end)) + end
            (tmp_path / name).write_text(f"\n{text}\n")
        assert wide_lines(tmp_path) == found


# Any

#: Lines of the package on which `Any` stands. What is merely handed on is an object, of another library's object a
#: Protocol says what is asked for. It may only become fewer.
LINES_OF_ANY = 139


def lines_of_any(root: Path) -> int:
    sources = (p for p in (root / "python").glob("**/*.py*") if p.suffix in (".py", ".pyi"))
    return sum(bool(re.search(r"\bAny\b", line)) for p in sources for line in p.read_text().splitlines())


def test_any_stands_on_no_more_lines_than_it_did() -> None:
    assert 0 < lines_of_any(ROOT) <= LINES_OF_ANY


def test_a_planted_line_of_any_is_counted(tmp_path: Path) -> None:
    (tmp_path / "python/fanin").mkdir(parents=True)
    (tmp_path / "python/fanin/x.py").write_text("x: Any = Many\ndef f(y: Any) -> Any: ...\n")
    (tmp_path / "python/fanin/y.pyi").write_text("z: dict[str, Any]\n")
    assert lines_of_any(tmp_path) == 3


# Names


def release(csrc: Path, cache: Path) -> dict[str, Path]:
    """The objects of a release."""
    if not compiler():
        pytest.skip("no C compiler: set CC")
    if sys.platform != "linux":
        pytest.skip("object files are read as ELF, which is Linux's")
    return compile_objects(csrc, compiler(), cache)


def dead(csrc: Path, cache: Path) -> list[str]:
    """Names that the objects of a release show each other and nobody uses: static, dead, or there for tests alone."""
    found = used_by_nobody(release(csrc, cache))
    entries = re.compile(r"PyInit__\w+|cu[A-Z]\w+|fanFake\w+")  # who loads a library asks for these
    return [f"{name} of {file}" for name, file in found.items() if not entries.fullmatch(name)]


def test_every_global_name_is_used_by_another_file() -> None:
    """What tests alone ask is there under FAN_TEST; what one file alone asks is static; what nobody asks is gone."""
    assert not dead(CSRC, cache_dir())


def test_a_planted_dead_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/a.c").write_text("int fan_used(void) { return 1; }\nint fan_own(void) { return 1; }\n")
    (tmp_path / "base/b.c").write_text("int fan_used(void);\nint PyInit__core(void) { return fan_used(); }\n")
    assert dead(tmp_path, tmp_path) == ["fan_own of base/a.c"]
    (tmp_path / "base/a.c").write_text("int fan_used(void) { return 1; }\n#ifdef FAN_TEST\nint fan_own;\n#endif\n")
    assert dead(tmp_path, tmp_path) == []


def for_tests_alone(objects: dict[str, Path]) -> list[str]:
    """The sources whose release object names something that only tests ask Python for."""
    return [
        f"{name} names {match[0].decode()} for tests alone: it belongs under FAN_TEST, or into tests/c/inside.c"
        for name, obj in objects.items()
        if (match := re.search(rb"\b(_test_\w+|rules_\w+(?=\())", obj.read_bytes()))
    ]


def test_a_release_shows_python_nothing_for_tests_alone() -> None:
    assert not for_tests_alone(release(CSRC, cache_dir()))


def test_a_planted_function_for_tests_is_found(tmp_path: Path) -> None:
    (tmp_path / "py").mkdir()
    (tmp_path / "py/x.c").write_text(
        'const char *fan_x = "test_x";\n#ifdef FAN_TEST\nconst char *y = "_test_y";\n#endif\n'
    )
    assert for_tests_alone(release(tmp_path, tmp_path)) == []
    (tmp_path / "py/x.c").write_text('const char *fan_x[] = {"x", "_test_y"};\n')
    assert for_tests_alone(release(tmp_path, tmp_path)) == [
        "py/x.c names _test_y for tests alone: it belongs under FAN_TEST, or into tests/c/inside.c"
    ]


def test_the_table_of_a_tree_counts_what_the_tests_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kit import measure_tree

    if not compiler() or sys.platform != "linux":
        pytest.skip("no C compiler whose objects are ELF: set CC")
    (tmp_path / "csrc/base").mkdir(parents=True)
    (tmp_path / "python/fanin").mkdir(parents=True)
    (tmp_path / "csrc/base/a.c").write_text("int fan_b(void);\nint fan_a(void) { return fan_b(); }\n")
    (tmp_path / "csrc/base/b.c").write_text(
        "int fan_a(void);\nint fan_b(void) { int unadd = fan_a(); return unadd; }\n"
    )
    (tmp_path / "python/fanin/x.py").write_text("x: Any = 1  # " + "x" * 107 + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["measure_tree.py", str(tmp_path)])
        measure_tree.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [
        "| csrc/base | 2 files, 6 lines |",
        "| python/fanin | 1 files, 2 lines |",
        "| largest file | csrc/base/a.c, 3 lines |",
        "| functions over 60 lines | 0 |",
        "| .. of tests | 0 |",
        "| lines over 120 columns | 1 |",
        "| in circles | 2 files of C, 0 folders of C, 0 files of Python |",
        "| old words left | 1 words, 2 uses |",
        "| rule bits set beside the rules | 0 |",
        "| lines of the package with Any | 1 |",
    ]


# Words

#: Words that this tree had for what the field has a word for, with that word. A pattern is matched against whole names
#: in code.
OLD_WORDS = {
    r"fan_place(_\w+)?": "fan_stream_id",
    r"fan_known(_\w+)?": "fan_sum_stats",
    r"(fan_)?told(_\w+)?": "fan_device_stats",
    r"(fan_)?figures(_\w+)?": "fan_stats_out",
    r"(FAN_JOB_SURVEY|survey\w*)": "FAN_JOB_STATS, measure",
    r"(fan_)?blame(_\w+)?": "find_first_nonfinite",
    r"(fan_)?tell(_\w+)?": "fan_fold_collect_stats",
    r"spoiled": "has_nonfinite",
    r"(fan_)?known_astray": "fault STATS_WRONG_STREAM",
    r"fan_plains?(_\w+)?": "fan_fast",
    r"(fan_)?(slot_)?thicken\w*": "fan_slot_materialize",
    r"unwatched": "fast_path_allowed",
    r"(adds_)?at_once": "inplace, can_add_inplace",
    r"unadd": "remove_last",
    r"objects_ahead": "prefetch",
    r"farewell": "deferred_drops",
    r"draft": "slot_specs",
    r"cuts?(_\w+)?": "slot_take",
    r"former": "old_sum",
    r"placed": "slot_order",
    r"loan": "library_array",
    r"lent": "exposed",
    r"settled?": "wait_for_users, exclusive",
    r"(fan_memory_)?used_on": "record_stream",
    r"fan_memory_own": "fan_memory_set_stream",
    r"reap": "free_pending",
    r"lesson": "event_clock",
    r"draw_(first|last)": "ticket_begin, ticket_end",
    r"(fan_)?(batch_)?fate|FAN_FATE_\w+": "job_state",
    r"strike|enlist": "list_remove, list_add",
    r"fan_turns?(_\w+)?": "fan_host_sched",
    r"fan_site(_\w+)?": "call_site",
    r"fan_team(_\w+)?": "fan_workers",
    r"fan_draw(_\w+)?": "fan_rng",
    r"fan_low(_\w+)?": "fan_lowp",
    r"fan_modulus(_\w+)?": "fan_complex_abs",
    r"fan_walk(_\w+)?": "fan_nditer",
    r"fan_mut(ant|_\w+)?|FAN_MUT": "FAN_FAULT",
    r"FAN_(BUFFER|STATE|RACE|NOMEM|VALUE|INDEX|TYPE|EXTERN)": "FAN_ERR_*",
    r"FAN_(DISJOINT|OVERLAP|FAR|HARD)": "FAN_OVERLAP_*",
    r"FAN_(UNDEFINED|ZERO|DENSE|SPARSE|OBJECT)": "FAN_FORM_*",
    r"FAN_(BOOL|U?INT(8|16|32|64)|B?FLOAT\d+\w*|COMPLEX(64|128)|NO_DTYPE)": "FAN_DT_*",
    r"Facts|Member|flagged|thawed|to_home": "GroupFlags, GroupMember, to_caller",
    r"(\w+_)?still": "is_unchanged",
    r"fan_(order|value)_mark": "fan_order_record_stream, fan_value_record_stream",
    r"fan_k_tell": "fan_k_stats_end",
    r"\w*short_way\w*": "fast path",
}
#: Words that are plain English elsewhere, and had a meaning of ours in these folders: names there are not called so.
OLD_WORDS_IN = {
    "csrc": {
        r"site": "call_site",
        r"(\w+_)?apart": "disjoint",
        r"(\w+_)?meets(_\w+)?": "may_overlap, conflicts_with",
        r"books": "block_table",
        r"soon": "ahead, prefetch",
        r"n?spares?(_\w+)?|FAN_SPARES": "freelist, scratch",
        r"few|FAN_FEW_\w+": "inline_edges, on_stack",
        r"later": "node_hooks, newer",
    },
    "csrc/device": {r"known": "clock, event_clock"},
    "csrc/py": {r"many(_\w+)?": "batch_source, several"},
    "tests/spec": {r"Place": "StreamId"},
}


def everything(root: Path) -> list[Path]:
    """All that people write: sources of the product, of tests, benchmarks and examples, and the pages."""
    folders = [root / name for name in ("python", "tests", "benchmarks", "examples")]
    sources = [p for f in folders for p in sorted(f.glob("**/*")) if p.suffix in (".py", ".pyi", ".c", ".h")]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("csrc/*.md"), *root.glob("tests/*.md")]
    return [*c_files(root / "csrc"), *sources, *sorted(pages)]


def old_word(name: str, path: Path, root: Path) -> str | None:
    """The word that stands for this one in that file today; None: it is no old one."""
    lists = [OLD_WORDS]
    lists += [words for folder, words in OLD_WORDS_IN.items() if (root / folder) in path.parents]
    return next((new for words in lists for old, new in words.items() if re.fullmatch(old, name)), None)


def old_words(paths: Iterable[Path], root: Path = ROOT) -> dict[str, str]:
    """Each old word that is a name in these files, with a sentence that says where first."""
    found: dict[str, str] = {}
    asked: dict[tuple[str, Path], str | None] = {}
    for path in paths:
        names = [] if path.suffix == ".md" else identifiers(path)
        for line, name in [*names, *names_in_text(path)]:
            key = (name, path.parent)
            if key not in asked:
                asked[key] = old_word(name, path, root)
            if asked[key]:
                found.setdefault(name, f"{path.name}:{line}: {name} has another word: {asked[key]}")
    return found


def test_no_old_word_is_left() -> None:
    paths = everything(ROOT)
    assert {".c", ".h", ".cu", ".py", ".pyi", ".md"} <= {p.suffix for p in paths} and len(paths) > 500
    assert list(old_words(paths).values()) == []


def test_a_planted_old_word_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text(
        '/* fan_walks */ char *s = "fan_walk"; fan_nditer w;\nint fan_walk_next(fan_low x);\n'
    )
    (tmp_path / "x.py").write_text('unadd_it = 1\n"""unadd"""  # unadd\nx.unadd()\n')
    assert list(old_words(sorted(tmp_path.iterdir())).values()) == [
        "x.c:2: fan_walk_next has another word: fan_nditer",
        "x.c:2: fan_low has another word: fan_lowp",
        "x.py:3: unadd has another word: remove_last",
    ]


@pytest.mark.parametrize(
    ("where", "name", "new"),
    [
        ("csrc/device/x.c", "known", "clock, event_clock"),
        ("csrc/py/x.c", "site", "call_site"),
        ("csrc/array/x.c", "flats_apart", "disjoint"),
        ("csrc/array/x.c", "meets_itself", "may_overlap, conflicts_with"),
        ("csrc/graph/x.h", "books", "block_table"),
        ("csrc/engine/x.c", "soon", "ahead, prefetch"),
        ("csrc/py/x.c", "nspares", "freelist, scratch"),
        ("csrc/engine/x.h", "few", "inline_edges, on_stack"),
        ("csrc/py/x.c", "many", "batch_source, several"),
        ("csrc/py/x.c", "later", "node_hooks, newer"),
        ("tests/spec/x.py", "Place", "StreamId"),
    ],
)
def test_a_word_that_is_old_in_a_folder_is_found_there_alone(where: str, name: str, new: str, tmp_path: Path) -> None:
    path, other = tmp_path / where, tmp_path / "python/fanin" / Path(where).name
    for one in (path, other):
        one.parent.mkdir(parents=True)
        one.write_text(f"/* the {name} ones */ int {name};\n" if one.suffix != ".py" else f"{name} = 1  # {name}\n")
    assert list(old_words([path, other], tmp_path).values()) == [f"{path.name}:1: {name} has another word: {new}"]
    path.write_text("/* many a site is known to few, later */\n" if path.suffix != ".py" else "# Place\n")
    assert old_words([path, other], tmp_path) == {}


def test_a_sentence_may_tell_what_a_name_must_not(tmp_path: Path) -> None:
    """Quoted, as code is, told is a name; in a sentence it is English: of comments and pages names alone are read."""
    page, source, script = (tmp_path / name for name in ("a.md", "b.c", "c.py"))
    page.write_text("It is told, cut and placed: `fan_nditer`.\n\n```python\nx = 1  # told\n```\n")
    source.write_text('/* What it is told is placed. */\nchar *s = "/* `told` */";\n')
    script.write_text('def f():\n    """What is told."""  # and cut\n')
    assert old_words([page, source, script]) == {}
    page.write_text("It is told.\n`cuts` are.\n\n```\nx.placed\n```\n")
    source.write_text("/* What\n * it is `told`; see fan_walk_next. */\n")
    script.write_text('def f():\n    """What\n    fan_draw says."""  # `lent`\n')
    assert sorted(where.partition(" ")[0] for where in old_words([page, source, script]).values()) == [
        *("a.md:2:", "a.md:5:", "b.c:2:", "b.c:2:", "c.py:3:", "c.py:3:")
    ]


# Forks


def forks(root: Path) -> list[str]:
    """Where a test forks the process that it runs in."""
    found = []
    for path in sorted((root / "tests").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty"):
                found.append(f"{path.relative_to(root).as_posix()}:{node.lineno}")
    return found


def test_one_function_forks_the_process_of_the_tests() -> None:
    """It expects the warnings of libraries that other tests have imported."""
    assert [place.split(":")[0] for place in forks(ROOT)] == ["tests/kit/child.py"]


def test_a_planted_fork_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a.py").write_text('import os\nx = "os.fork()"\nos.fork()\n')
    assert forks(tmp_path) == ["tests/a.py:3"]
