"""A fork of the prepared process is as good as a Python of its own (kit/prepared.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.prepared import NUMPY, run_prepared
from kit.support import run_python

pytestmark = pytest.mark.core

#: A program that prints its own state.
SELF = """
import sys, threading
print(__name__, sys.argv, sorted(n for n in globals() if n[0] != "_"), threading.active_count())
print(sys.stdin.read(), file=sys.stderr)
"""


def test_a_prepared_program_starts_like_one_in_a_new_python() -> None:
    new, forked = run_python(SELF, "an argument"), run_prepared(SELF, "an argument")
    assert (forked.stdout, forked.stderr) == (new.stdout, new.stderr)


WORDS = """
import os, sys, warnings
print(__name__, sys.argv, os.getcwd(), os.environ["OF_A_TEST"], sys.path[0])
warnings.warn("one")
"""


def last_message(stderr: str) -> list[str]:
    """The last warning or error, without its place, and without the line of code below, which -c has from 3.13 on."""
    return [line.split(": ", 1)[-1] for line in stderr.splitlines() if line[:1] != " "][-1:]


@pytest.mark.parametrize(
    "words", [["-c", WORDS], ["said.py"], ["-m", "said"], ["-W", "error", "said.py"]], ids=" ".join
)
def test_a_prepared_process_runs_code_files_and_modules_as_a_new_python_does(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(WORDS)
    how: dict[str, Any] = {"env": {"OF_A_TEST": "here"}, "cwd": tmp_path, "check": False}
    new, forked = run_python([*words, "more"], **how), run_prepared([*words, "more"], **how)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert last_message(forked.stderr) == last_message(new.stderr)


@pytest.mark.unsanitized  # a sanitized build forks none
def test_a_fork_of_a_python_with_numpy_alone_imports_fanin_itself() -> None:
    code = (
        "import sys, numpy; print('fanin' in sys.modules, 'json' in sys.modules); import fanin; print(fanin.__name__)"
    )
    assert run_prepared(code, imports=NUMPY).stdout == "False False\nfanin\n"
    assert run_prepared("import sys; print('fanin' in sys.modules)").stdout == "True\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os; os._exit(4)", 4),
        ("raise ValueError('mine')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_a_prepared_process_ends_with_the_status_of_the_code(code: str, status: int) -> None:
    done = run_prepared(code, check=False)
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.endswith("ValueError: mine\n") or not done.stderr
    if status:
        with pytest.raises(AssertionError, match=f"exit status {status}"):
            run_prepared(code)


def test_a_prepared_process_ends_as_an_interpreter_does() -> None:
    code = """
import atexit, threading
atexit.register(print, "at exit")
class Last:
    def __del__(self):
        print("let go")
last = Last()
threading.Thread(target=print, args=("a thread",)).start()
"""
    assert run_prepared(code).stdout.splitlines() == ["a thread", "at exit", "let go"]


def test_a_program_leaves_no_state_for_the_next() -> None:
    run_prepared("import fanin; fanin.left = fanin.InputBuffer(1); fanin.set_options(debug=True); fanin.add_n([1, 2])")
    assert run_prepared("import fanin; print(hasattr(fanin, 'left'), fanin.counters().adds)").stdout == "False 0\n"
