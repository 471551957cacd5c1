"""Ctrl-C at a chosen line of the sources."""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether a `__del__` runs: Python calls it anywhere, and its exceptions reach no caller."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def raised_at(n: int, fn: Callable[[], object], files: tuple[str, ...]) -> str:
    """Call `fn`; raise KeyboardInterrupt at its n-th line in these files. Return the
    line, or "" if there are fewer. The line of a `with` comes again at its end: not there, since Python raises no
    KeyboardInterrupt before it has called `__exit__`, which an exception of this function would skip.
    """
    left = itertools.count(n, -1)
    came: list[str] = []
    last: dict[FrameType, int] = {}

    def line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not came:
            path, number = frame.f_code.co_filename, frame.f_lineno
            leaves_with = number < last.get(frame, 0) and linecache.getline(path, number).lstrip().startswith("with ")
            last[frame] = number
            if not leaves_with and next(left) == 0:
                came.append(f"{path}:{number}")
                raise KeyboardInterrupt(came[0])
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        ours = frame.f_code.co_filename.startswith(files) and not in_finalizer(frame)
        return line if ours else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        fn()
    except KeyboardInterrupt as e:
        assert e.args == tuple(came)
    finally:
        sys.settrace(before)
    return came[0] if came else ""
