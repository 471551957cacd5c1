"""A fork of a Python that has imported fanin is as good as a Python of its own (kit/warm.py)."""

from __future__ import annotations

import pytest

from kit.support import run_python
from kit.warm import run_warm

pytestmark = pytest.mark.core

#: What a program says of itself.
SELF = """
import sys, threading
print(__name__, sys.argv, sorted(n for n in globals() if n[0] != "_"), threading.active_count())
print(sys.stdin.read(), file=sys.stderr)
"""


def test_it_finds_the_process_that_a_new_python_finds() -> None:
    new, forked = run_python(SELF, "an argument"), run_warm(SELF, "an argument")
    assert (forked.stdout, forked.stderr) == (new.stdout, new.stderr)


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
def test_it_ends_with_the_status_of_the_code(code: str, status: int) -> None:
    done = run_warm(code, check=False)
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.endswith("ValueError: mine\n") or not done.stderr
    if status:
        with pytest.raises(AssertionError, match=f"exit status {status}"):
            run_warm(code)


def test_it_ends_as_an_interpreter_ends() -> None:
    code = """
import atexit, threading
atexit.register(print, "at exit")
class Last:
    def __del__(self):
        print("let go")
last = Last()
threading.Thread(target=print, args=("a thread",)).start()
"""
    assert run_warm(code).stdout.splitlines() == ["a thread", "at exit", "let go"]


def test_what_one_leaves_the_next_does_not_find() -> None:
    run_warm("import fanin; fanin.left = fanin.InputBuffer(1); fanin.set_options(debug=True); fanin.add_n([1, 2])")
    assert run_warm("import fanin; print(hasattr(fanin, 'left'), fanin.counters().adds)").stdout == "False 0\n"
