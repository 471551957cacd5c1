"""The mutation script: what it draws, what it tells apart; and, with `-m slow`, that it kills what must die."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import mutate
from kit.support import ROOT, compiler


def test_a_line_has_the_mutants_that_one_would_think_of() -> None:
    made = {x.strip() for x in mutate.variants("    if (a < b && n != 3)  /* a < b */")}
    assert made >= {
        "if (a <= b && n != 3)  /* a < b */",
        "if (a < b || n != 3)  /* a < b */",
        "if (a < b && n == 3)  /* a < b */",
        "if (a < b && n != 4)  /* a < b */",
    }
    assert "if (!(a < b && n != 3))" in made and not any("a <= b */" in x for x in made), "comments are let be"
    assert ";" in {x.strip() for x in mutate.variants("    fan_free(x);")}
    assert "fold(b, a);" in {x.strip() for x in mutate.variants("    fold(a, b);")}
    assert not list(mutate.variants("    return status;"))


def test_the_seed_draws_the_same_mutants_and_every_one_is_there() -> None:
    some = mutate.drawn(7, 60)
    assert some == mutate.drawn(7, 60) != mutate.drawn(8, 60)
    assert len({(m.file, m.line) for m in some}) == 60 and len({m.file.split("/")[1] for m in some}) >= 4
    for m in some:
        assert (ROOT / m.file).read_text().splitlines()[m.line - 1] == m.old != m.new


def test_each_folder_has_its_share_of_a_draw_and_a_longer_draw_begins_with_the_shorter() -> None:
    some, more = mutate.drawn(7, 60), mutate.drawn(7, 120)
    assert more[:60] == some
    every = mutate.candidates()
    for folder in mutate.FOLDERS:
        share = sum(m.file.split("/")[1] == folder for m in every) / len(every)
        assert abs(sum(m.file.split("/")[1] == folder for m in more) - 120 * share) <= 1, folder


def test_each_file_has_tests_that_are_run_first_and_those_are_there() -> None:
    for file in {m.file for m in mutate.candidates()}:
        python, *c = mutate.near(file)
        assert python and all((ROOT / t).is_file() for t in python), file
        assert all(word == "or" or (ROOT / f"tests/c/test_{word}.c").is_file() for _, _, k in c for word in k.split())


def test_the_list_says_of_each_survivor_why_nothing_can_notice_it_and_of_the_others_who_does(tmp_path: Path) -> None:
    one = mutate.Mutant("csrc/base/one.c", 4, "    int b = a + 0;", "    ;")
    (tmp_path / "list").write_text(f"# a comment\n{mutate.written(one, 'equivalent: a reason')}\n")
    assert mutate.judged(tmp_path / "list") == {"csrc/base/one.c: int b = a + 0; -> ;": "equivalent: a reason"}
    assert mutate.judged(tmp_path / "none") == {}
    for mutant, verdict in mutate.judged().items():
        word = mutate.word_of(verdict)
        assert mutant.startswith("csrc/") and " -> " in mutant
        assert verdict != "survives", f"{mutant}: a test, a reason, or what is to be tested"
        assert word != "equivalent" or len(verdict) > len("equivalent: ") + 10, mutant
        if word == "dies":
            assert (ROOT / verdict.partition("::")[0].split()[0]).exists(), f"{mutant}: {verdict}"


@pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")
def test_what_changes_no_object_code_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "csrc" / "base").mkdir(parents=True)
    file = "csrc/base/one.c"
    lines = ["int one(int a);", "int one(int a)", "{", "    int b = a + 0;", "    return b;", "}"]
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    before = mutate.object_code(tmp_path, file)
    for new, same in (("    int b = a - 0;", True), ("    int b = a + 1;", False), ("    int b = a +;", None)):
        mutate.plant(tmp_path, mutate.Mutant(file, 4, lines[3], new))
        after = mutate.object_code(tmp_path, file)
        assert (after is None) if same is None else (after == before) == same
        (tmp_path / file).write_text("\n".join(lines) + "\n")


@pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")
def test_a_file_that_does_not_compile_as_it_is_has_no_verdict(tmp_path: Path) -> None:
    """What needs Python, NumPy and the public header compiles with the folders that are searched."""
    assert mutate.object_code(ROOT, "csrc/py/returned.c")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/one.c").write_text('#include "not/there.h"\n')
    with pytest.raises(RuntimeError, match=r"csrc/one.c does not compile as it is"):
        mutate.judge(tmp_path, mutate.Mutant("csrc/one.c", 1, '#include "not/there.h"', ";"), [], 1)


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")
def test_a_sum_that_subtracts_dies_and_a_mutant_that_does_nothing_is_told_apart(tmp_path: Path) -> None:
    tree = mutate.copy_of(ROOT, tmp_path)
    assert mutate.built(tree)
    m = next(
        m
        for m in mutate.candidates(tree)
        if m.file == "csrc/buffer/add_host.c" and m.new.strip() == ";" and "one->" in m.old
    )
    assert mutate.judge(tree, m, ["tests/buffer/test_out.py"], 300) not in (
        "survives",
        "changes nothing",
        "does not compile",
    ), m
