"""The command line, but for the demo."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fanin
from fanin.cli import main
from kit.prepared import NUMPY, run_prepared
from kit.sample import every
from kit.support import ROOT, run_python

CHECK_ME = ROOT / "examples" / "06_check_me.py"

COMMANDS = ["demo", "check", "compare", "info"]


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# What all have in common


def test_help_has_examples_everywhere_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_prepared(["-m", "fanin", "--help"]).stdout
    assert all(re.search(rf"^    {command} +\w+", whole, re.MULTILINE) for command in COMMANDS), whole
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        with pytest.raises(SystemExit) as e:
            main([command, "--help"])
        assert e.value.code == 0
        text = printed(capsys)
        assert f"examples:\n  fanin {command}" in text
        assert max(map(len, text.splitlines())) <= 80, text


def test_the_version_is_printed() -> None:
    assert run_python(["-m", "fanin", "--version"]).stdout == f"fanin {fanin.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        *([], ["dance"], ["check"], ["info", "more"]),
        *(["demo", "--steps", "0"], ["demo", "--seed", "-1"], ["demo", "--rate", "nan"], ["demo", "--rate", "0"]),
        *(["check", "x.py", "--limit", "0"], ["check", "x.py", "--samples", "-1"], ["check", "x.py", "--limit", "x"]),
    ],
)
def test_invalid_arguments_are_refused_with_the_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(words)
    assert e.value.code == 2
    assert capsys.readouterr().err.startswith("usage: fanin")


def test_invalid_arguments_end_the_process_with_2_and_no_traceback() -> None:
    done = run_prepared(["-m", "fanin", "dance"], check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: fanin")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    every(4, [["info"], ["--version"], ["--help"], ["check", str(CHECK_ME), "--scenario", "a_pass_may_be_cleared"]]),
)
def test_output_that_is_closed_or_full_ends_it_quietly(words: list[str]) -> None:
    run = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "fanin", *words]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *run], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
    both = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *run], text=True)
    assert both.returncode == 0
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *run], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "fanin: [Errno 28] No space left on device\n")


def test_an_interrupt_ends_it_in_a_word(tmp_path: Path) -> None:
    words = [sys.executable, "-u", "-m", "fanin", "demo", "--epochs", "500", "--out", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert "digits to learn" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        assert child.stderr.read() == "\nfanin: interrupted\n"
        assert child.wait() == 130
    assert not list(tmp_path.iterdir())


def test_no_command_brings_in_what_it_does_not_need() -> None:
    code = (
        "import sys; from fanin.cli import main; main(['info']);"
        "print([m for m in ('threadpoolctl', 'scipy', 'torch') if m in sys.modules])"
    )
    assert run_prepared(code, imports=NUMPY).stdout.endswith("[]\n")


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = ["check", str(CHECK_ME), "--scenario", "scratch_memory_is_shared"]
    for shown, coloured in ((Terminal(), True), (io.StringIO(), False)):
        with contextlib.redirect_stdout(shown):
            assert main(words) == 1
        assert "race" in shown.getvalue() and ("\x1b[31m" in shown.getvalue()) == coloured
        assert ("\x1b" in shown.getvalue()) == coloured


# info


@pytest.mark.parametrize("columns", [50, 80, 130])
def test_info_has_the_width_of_columns(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["info"]) == 0
    lines = printed(capsys).splitlines()
    longest = max(len(line) for line in lines if len(line.split()) > 2)  # a path is not broken
    assert columns - 25 < longest <= columns


def test_info_lists_what_is_available(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = printed(capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(
        re.search(rf"^{word} ", text, re.MULTILINE) for word in ("fanin", "python", "numpy", "backends", "devices")
    )
    assert main(["info", "--json"]) == 0
    assert json.loads(printed(capsys)) == fanin.info(), "data, as the function gives it"


# check


def test_check_finds_a_race_and_prints_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(CHECK_ME)]) == 1
    text = printed(capsys)
    assert all(len(line) <= 80 for line in text.partition("\n\n")[0].splitlines())
    assert re.search(r"^  keyed_sums_in_any_order +\d+, all +0 +0 +0 +1 +ok$", text, re.MULTILINE)
    assert re.search(r"^  scratch_memory_is_shared +\d+, all +1 +0 +0 +\d +FAILED$", text, re.MULTILINE)
    assert "scratch_memory_is_shared: RaceError: race on 32 bytes of sim:0" in text
    assert "06_check_me.py:" in text
    again = re.search(r"^again: fanin (check \S+ --scenario \w+ --schedule '(\w+)')$", text, re.MULTILINE)
    assert again
    words = shlex.split(again[1])
    assert main(words) == 1
    assert "RaceError: race on 32 bytes" in printed(capsys)
    # In the order in which one has ended before the other begins, it is luck, and no race.
    assert main([*words[:-1], ""]) == 0


def test_the_command_to_replay_is_quoted_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "check me.py"
    file.write_text(CHECK_ME.read_text())
    assert main(["check", str(file), "--scenario", "scratch_memory_is_shared"]) == 1
    again = re.search(r"^again: fanin (.*)$", printed(capsys), re.MULTILINE)
    assert again
    assert main(shlex.split(again[1])) == 1


STUCK = """
import threading
import numpy as np
import fanin

@fanin.sim.scenario
def behind_a_lock(m):
    lock, buf = threading.Lock(), fanin.InputBuffer(1)
    def locked():
        with lock:
            buf.add(0, np.ones(2))
    m.spawn(locked, name="first")
    m.spawn(locked, name="second")
    m.join()

@fanin.sim.scenario
def a_list_between_threads(m):
    seen = []
    def append_i(i):
        m.stream()
        seen.append(i)
        m.stream()
    for i in range(2):
        m.spawn(append_i, i)
    m.join()
    return seen
"""


def test_check_reports_a_thread_that_waits_for_a_foreign_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stuck.py"
    file.write_text(STUCK)
    assert main(["check", str(file), "--scenario", "behind_a_lock", "--stuck-after", "0.3"]) == 1
    text = printed(capsys)
    assert "StuckError" in text and "with lock:" in text and re.search(r"host thread '(first|second)':", text)
    with pytest.raises(SystemExit):
        main(["check", str(file), "--stuck-after", "0"])


def test_check_tries_all_orders_without_the_reduction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shared.py"
    file.write_text(STUCK)
    words = ["check", str(file), "--scenario", "a_list_between_threads"]
    assert main(words) == 0
    assert re.search(r"a_list_between_threads +1, all +0 +0 +0 +1 +ok$", printed(capsys), re.MULTILINE)
    assert main([*words, "--no-reduce"]) == 1
    assert re.search(r"a_list_between_threads +\d+, all +0 +0 +0 +2 +FAILED$", printed(capsys), re.MULTILINE)


def test_check_is_content_with_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "check",
        str(CHECK_ME),
        "--scenario",
        "keyed_sums_in_any_order",
        "--limit",
        "1",
        "--samples",
        "3",
        "--seed",
        "4",
    ]
    assert main(words) == 3
    text = printed(capsys)
    assert re.search(r" 4, 3 at random +0 +0 +0 +1 +incomplete$", text, re.MULTILINE)
    assert "keyed_sums_in_any_order: incomplete: no fault was found, but orders are missing" in text
    assert main(words[:4]) == 0
    assert re.search(r" all +0 +0 +0 +1 +ok$", printed(capsys), re.MULTILINE)


OTHERS = """
import fanin, numpy as np

@fanin.sim.scenario
def without_keys(m):
    buf = fanin.InputBuffer(1)
    buf.add(0, 1e16)
    for value in (1.0, -1e16):
        m.spawn(buf.add, 0, value)
    m.join()
    return buf.take()

@fanin.sim.scenario(seed=3)
def raises(m):
    raise ZeroDivisionError("of its own")
"""


def test_check_shows_differing_results_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "others.py"
    file.write_text(OTHERS)
    assert main(["check", str(file)]) == 1
    text = printed(capsys)
    assert re.search(
        r"^without_keys: the result depends on the order: (\[0.0\] or \[1.0\]|\[1.0\] or \[0.0\])$", text, re.MULTILINE
    )
    assert "raises: ZeroDivisionError: of its own" in text
    assert "--scenario raises --seed 3 --schedule ''" in text


@pytest.mark.parametrize(
    ("text", "words", "refusal"),
    [
        (None, [], "there is no file"),
        ("x = 1", [], "has no scenarios: mark functions"),
        ("x = ", [], "could not be imported"),
        ("import nowhere_at_all", [], "could not be imported"),
        ("import sys; sys.exit(5)", [], "could not be imported"),
        ("import fanin\nfanin.sim.scenario(3)", [], "could not be imported"),
        ("import fanin\nfanin.sim.scenario(nonsense=3)(lambda m: 0)", [], "could not be imported"),
        (
            "import fanin\n@fanin.sim.scenario(limit=0)\ndef s(m): pass",
            [],
            "s: explore: limit: expected an integer of at least 1, got 0",
        ),
        (
            OTHERS,
            ["--scenario", "raises", "--schedule", "!"],
            "--schedule '!' is no schedule: it has one character for each step",
        ),
        (OTHERS, ["--scenario", "raises", "--schedule", "w"], "as in --schedule 0110"),
        (None, ["--schedule", "0 1"], "--schedule '0 1' is no schedule"),
        (
            OTHERS,
            ["--scenario", "without_keys", "--schedule", "99"],
            "schedule '99' does not fit: a thread that it names could not act",
        ),
        (OTHERS, ["--scenario", "nobody"], "has no scenario 'nobody'; it has without_keys, raises"),
        (OTHERS, ["--schedule", "01"], "add --scenario, one of without_keys, raises"),
    ],
)
def test_check_refuses_what_it_cannot_use(
    text: str | None, words: list[str], refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert main(["check", str(file), *words]) == 2
    assert refusal in capsys.readouterr().err
