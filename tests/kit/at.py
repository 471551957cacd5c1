"""Where another thread is, without a clock."""

from __future__ import annotations

import linecache
import os
import sys
import threading


def until_at(thread: threading.Thread, text: str) -> None:
    """Wait until the innermost Python frame of a thread is at a line with `text`, which calls a function in C.

    This thread then has the interpreter's lock, so the other one is inside that function and has released it: it
    waits there. The call needs a line of its own after the `def`, because a thread may also be stopped at a `def`.
    """
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None and text in _line(frame.f_code.co_filename, frame.f_lineno):
            return
        if thread.ident is not None and not thread.is_alive():
            raise AssertionError(f"{thread.name} has ended, and was never at {text!r}")
        os.sched_yield()


def _line(file: str, number: int) -> str:
    """A line of a file, or of the text that `python -c` runs."""
    if file != "<string>":
        return linecache.getline(file, number)
    lines = sys.orig_argv[sys.orig_argv.index("-c") + 1].splitlines()
    return lines[number - 1] if number <= len(lines) else ""
