"""The mutation script: its mutants and verdicts; and, with `-m slow`, that it kills the mutants that must die."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import mutate
from kit.support import ROOT, compiler

pytestmark = pytest.mark.tools


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
    assert {x.strip() for x in mutate.variants("    if a is not None and b < 1:  # is", python=True)} == {
        "if a is None and b < 1:  # is",
        "if a is not None or b < 1:  # is",
        "if a is not None and b <= 1:  # is",
        "if a is not None and b < 2:  # is",
        "if not (a is not None and b < 1):",
    }
    assert {x.strip() for x in mutate.variants("    elif a:", python=True)} == {"elif not (a):"}
    assert {x.strip() for x in mutate.variants("    self.put(one)", python=True)} == {"pass"}
    assert {x.strip() for x in mutate.variants("    n += m", python=True)} == {"n -= m", "pass"}
    text = 'def f(n):\n    """n < 1"""\n    if n < 1:\n        raise E(\n  n < 2\n )\n    return n\nA < 1\n'
    assert [n for n, _ in mutate.lines_of_python(text)] == [3, 7]


def test_each_file_and_its_likely_tests_exist() -> None:
    files = [path.relative_to(ROOT / "csrc").as_posix() for path in ROOT.glob("csrc/**/*.c")] + [*mutate.PYTHON]
    for table in (mutate.NEAR, mutate.NEAR_IN_C):
        assert not [key for key in table if not any(file.startswith(key.rstrip("/")) for file in files)]
    assert not [test for tests in mutate.NEAR.values() for test in tests if not (ROOT / "tests" / test).exists()]


def test_the_seed_draws_the_same_mutants_and_every_one_is_there() -> None:
    some = mutate.drawn(7, 60)
    assert some == mutate.drawn(7, 60) != mutate.drawn(8, 60)
    assert len({(m.file, m.line) for m in some}) == 60 and len({m.file.split("/")[1] for m in some}) >= 4
    for m in some:
        assert (ROOT / m.file).read_text().splitlines()[m.line - 1] == m.old != m.new


def test_each_folder_has_its_share_of_a_draw_and_a_longer_draw_begins_with_the_shorter() -> None:
    some, more = mutate.drawn(7, 60), mutate.drawn(7, 120)
    assert more[:60] == some
    every = [m for m in mutate.candidates() if mutate.folder_of(m)]
    for folder in mutate.FOLDERS:
        share = sum(m.file.split("/")[1] == folder for m in every) / len(every)
        assert abs(sum(m.file.split("/")[1] == folder for m in more) - 120 * share) <= 1, folder


def test_each_file_has_tests_that_are_run_first_and_those_are_there() -> None:
    for file in {m.file for m in mutate.candidates()}:
        tests = mutate.near(file)
        assert any("::" not in t for t in tests) and all((ROOT / t.partition("::")[0]).is_file() for t in tests), file
    assert all((ROOT / f"tests/c/test_{c}.c").is_file() for programs in mutate.NEAR_IN_C.values() for c in programs)


def test_a_draw_may_be_of_some_folders_or_files() -> None:
    assert {m.file.split("/")[1] for m in mutate.drawn(7, 60, among=["engine", "graph"])} == {"engine", "graph"}
    some = ["device/sim", "py/buffer", "python/fanin/dist"]
    below = {m.file.rpartition("/")[0] for m in mutate.drawn(7, 40, among=some)}
    assert below == {"csrc/device/sim", "csrc/py/buffer", "python/fanin/dist"}
    assert {m.file for m in mutate.drawn(7, 20, among=["array/rows.c"])} == {"csrc/array/rows.c"}
    assert not mutate.drawn(7, 1, among=["none"])


#: A test that ends in the named way -> pytest's status and the verdict; None: it survives.
ENDS = {
    "pass": None,
    "assert False": "tests/test_one.py::test_one",
    "os.kill(os.getpid(), signal.SIGSEGV)": "tests/test_one.py::test_one: signal 11",
    "while True: pass": "tests/test_one.py::test_one: no end in 10 times the processor time without a mutant",
    "signal.pause()": "tests/test_one.py::test_one: no end, no thread runs",
    "subprocess.run(['sleep', '60'])": "tests/test_one.py::test_one: no end, no thread runs",
    # A process that waits for another, which runs, is not stuck.
    "subprocess.run([sys.executable, '-c', 'for _ in range(20_000_000): pass'])": None,
}


def one_test(root: Path, body: str, before: str = "") -> Path:
    (root / "tests").mkdir(exist_ok=True)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -p no:fanin\n")
    (root / "tests/test_one.py").write_text(
        f"import os, signal, subprocess, sys\n{before}\ndef test_one():\n    {body}\n"
    )
    return root


@pytest.mark.parametrize("body", ENDS)
def test_a_mutant_dies_of_a_failed_test_a_signal_or_tests_that_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """The limit is that of a test that does nothing; the checks are so close that each test has many."""
    monkeypatch.setattr(mutate, "PAUSE", 0.05)
    tests = ["tests/test_one.py"]
    tree = one_test(tmp_path, "pass")
    limit = mutate.Times.of(tree, tests).limit(tests)
    one_test(tree, body)
    assert mutate.killer(tree, [(tests, limit)]) == ENDS[body]


@pytest.mark.parametrize(("step", "looks"), [(0.01, mutate.STILL + 1), (0.1, 2 * mutate.STILL + 1)])
def test_a_thread_that_wakes_up_to_see_whether_a_signal_has_come_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float, looks: int
) -> None:
    """`step`: the processor seconds that each of the first checks finds; later ones find no more."""
    seen: list[float] = []

    def busy(_: int) -> tuple[bool, float]:
        assert len(seen) < 3 * mutate.STILL, "the tests are not found to wait"
        seen.append(step * min(len(seen) + 1, mutate.STILL + 1))
        return False, seen[-1]

    monkeypatch.setattr(mutate, "PAUSE", 0.01)
    monkeypatch.setattr(mutate, "busy", busy)
    tree = one_test(tmp_path, "signal.pause()")
    verdict = mutate.killer(tree, [(["tests/test_one.py"], None)])
    assert verdict and verdict.endswith("no end, no thread runs")
    assert looks - 1 <= len(seen) <= looks + 1, seen


def test_a_mutant_dies_where_a_module_is_not_collected(tmp_path: Path) -> None:
    tree = one_test(tmp_path, "pass", "raise OSError")
    assert mutate.killer(tree, [(["tests/test_one.py"], None)]) == "tests/test_one.py"


def test_the_limits_follow_from_the_times_without_a_mutant_and_the_fastest_tests_come_first(tmp_path: Path) -> None:
    tree = one_test(tmp_path, "pass", "@__import__('pytest').mark.parametrize('c', ['x', 'y'])\ndef test_c(c): pass\n")
    tests = ["tests/test_one.py::test_c[x]", "tests/test_one.py"]
    times = mutate.Times.of(tree, tests)
    assert set(times.tests) == set(tests) and times.start > 0 and all(n >= 0 for n in times.tests.values())
    assert mutate.Times.of(tree, ["tests"]).tests.keys() == {"tests"}
    m = mutate.drawn(7, 1, among=["engine"])[0]
    likely = mutate.Times(2, {t: float(n) for n, t in enumerate(reversed(mutate.near(m.file)))})
    fast, slow, rest = mutate.commands_of(m, likely, mutate.Times(1, {"tests/laws": 7}), ["tests/laws"])
    assert fast[0] + slow[0] == mutate.near(m.file)[::-1]
    limits = [mutate.FACTOR * (2 + sum(likely.tests[t] for t in part)) for part, _ in (fast, slow)]
    assert [fast[1], slow[1]] == limits == sorted(limits)
    assert rest == (["tests/laws"], mutate.FACTOR * 8)
    (tree / "tests/test_one.py").write_text("def test_one(): assert False\n")
    with pytest.raises(SystemExit, match="the tests do not pass without a mutant"):
        mutate.Times.of(tree, tests[1:])


def test_the_time_of_a_test_is_that_of_its_own_work_and_of_the_processes_that_it_waits_for(tmp_path: Path) -> None:
    """Compared with each other, in one process: a machine that is busy or slow makes all of them longer."""
    work = "for _ in range(10_000_000): pass"
    tests = {
        "idle": "pass",
        "works": work,
        "waits": f"subprocess.run([sys.executable, '-S', '-c', {work!r}], check=True)",
    }
    functions = "".join(f"def test_{name}():\n    {body}\n" for name, body in tests.items())
    tree = one_test(tmp_path, "pass", functions)
    ids = {name: f"tests/test_one.py::test_{name}" for name in tests}
    times = mutate.Times.of(tree, [*ids.values(), "tests"]).tests
    assert times[ids["idle"]] < min(times[ids["works"]], times[ids["waits"]])


@pytest.mark.parametrize(
    ("status", "body", "options"),
    [
        (2, "raise KeyboardInterrupt", []),
        (3, "pass", ["-p", "broken"]),
        (4, "pass", ["--no-such-option"]),
        (4, "pass", ["tests/none.py"]),
        (5, "pass", ["-k", "none"]),
    ],
)
def test_other_statuses_of_pytest_are_no_verdict(tmp_path: Path, status: int, body: str, options: list[str]) -> None:
    tree = one_test(tmp_path, body)
    (tree / "python").mkdir()
    (tree / "python/broken.py").write_text("def pytest_runtest_protocol(item):\n    raise OSError\n")
    with pytest.raises(RuntimeError, match=f"ended with status {status}, which is no verdict"):
        mutate.killer(tree, [(["tests/test_one.py", *options], None)])


def test_a_test_that_fails_without_the_mutant_is_found(tmp_path: Path) -> None:
    tree = one_test(tmp_path, "assert False", "def test_two(): pass\n")
    killers = {"tests/test_one.py::test_one: signal 11", "tests/test_one.py::test_two", "tests/test_one.py::test_one"}
    assert mutate.fail_anyway(tree, killers) == [
        "tests/test_one.py::test_one",
        "tests/test_one.py::test_one: signal 11",
    ]


def fixed(monkeypatch: pytest.MonkeyPatch, verdicts: list[str | Exception], failing: list[str]) -> list[mutate.Mutant]:
    """The tool judges one mutant after the other so, without building anything; returns those that it judges."""
    seen: list[mutate.Mutant] = []

    def judge(tree: Path, m: mutate.Mutant, commands: list[mutate.Command]) -> str:
        seen.append(m)
        verdict = verdicts[len(seen) - 1]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(mutate, "judge", judge)
    monkeypatch.setattr(mutate, "built", lambda tree: True)
    monkeypatch.setattr(mutate, "copy_of", lambda root, to: to)
    monkeypatch.setattr(mutate.Times, "of", lambda tree, tests: mutate.Times(0, dict.fromkeys(tests, 0.0)))
    monkeypatch.setattr(mutate, "fail_anyway", lambda tree, killers: failing)
    return seen


def test_verdicts_are_printed_and_kept_in_a_file_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p for p in ROOT.rglob("*mutants*") if ".git" not in p.parts}
    seen = fixed(monkeypatch, ["tests/x.py::test_x", "survives", "changes nothing", "tests/y.py::test_y"], [])
    args = ["--seed", "7", "--folders", "engine", "--verdicts", str(tmp_path / "v")]
    assert mutate.main([*args, "--count", "2"]) == 1, "one survives"
    assert "1 die" in capsys.readouterr().out and len(seen) == 2
    assert [*mutate.judged(tmp_path / "v").values()] == ["tests/x.py::test_x", "survives"]
    mutate.main([*args, "--count", "4"])
    assert len({*seen}) == len(seen) == 4, "what is judged is not judged again"
    assert "4 of 4 judged; of 3 that can be noticed 2 die" in capsys.readouterr().out
    mutate.main([*args, "--count", "4", "--list"])
    assert "[tests/y.py::test_y]" in capsys.readouterr().out
    assert {p for p in ROOT.rglob("*mutants*") if ".git" not in p.parts} == before, "nothing is written into the tree"


def test_a_run_ends_with_a_message_where_a_status_is_no_verdict_or_a_killer_fails_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixed(monkeypatch, [RuntimeError("pytest --x ended with status 4")], [])
    with pytest.raises(SystemExit, match="no verdict: pytest --x ended with status 4"):
        mutate.main(["--seed", "7", "--count", "1"])
    fixed(monkeypatch, ["tests/x.py::test_x"], ["tests/x.py::test_x"])
    with pytest.raises(SystemExit, match="fail without a mutant too"):
        mutate.main(["--seed", "7", "--count", "1"])


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
    assert mutate.object_code(ROOT, "csrc/py/engine/hooks.c")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/one.c").write_text('#include "not/there.h"\n')
    with pytest.raises(RuntimeError, match=r"csrc/one.c does not compile as it is"):
        mutate.judge(tmp_path, mutate.Mutant("csrc/one.c", 1, '#include "not/there.h"', ";"), [])


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")
def test_a_fold_that_counts_its_values_down_dies(tmp_path: Path) -> None:
    tree = mutate.copy_of(ROOT, tmp_path)
    assert mutate.built(tree)
    (m,) = (m for m in mutate.candidates(tree) if m.new.strip() == "gathered->nvalues--;")
    assert mutate.judge(tree, m, [(["tests/buffer/test_out.py"], 300)]).startswith("tests/buffer/test_out.py::")
