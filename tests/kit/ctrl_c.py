"""Ctrl-C at a chosen line, or bytecode, of the sources."""

from __future__ import annotations

import dis
import functools
import gc
import itertools
import linecache
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether a `__del__` runs: Python calls it anywhere, and its exceptions reach no caller."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@functools.cache
def inlined(code: CodeType) -> frozenset[int]:
    """The lines of comprehensions that are part of their function, as since Python 3.12: an exception of a trace
    function as one begins or ends passes the `with` around it. Python's own come in its loop, and reach that `with`.
    """
    begins = [one.positions for one in dis.get_instructions(code) if one.opname == "LOAD_FAST_AND_CLEAR"]
    return frozenset(place.lineno for place in begins if place is not None and place.lineno is not None)


def raised_at(n: int, fn: Callable[[], object], files: tuple[str, ...]) -> str:
    """Call `fn`; raise KeyboardInterrupt at its n-th line in these files. Return the
    line, or "" if there are fewer. The line of a `with` comes again at its end: not there, since Python raises no
    KeyboardInterrupt before it has called `__exit__`, which an exception of this function would skip. Nor at `inlined`
    ones.
    """
    left = itertools.count(n, -1)
    came: list[str] = []
    last: dict[FrameType, int] = {}

    def line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not came:
            path, number = frame.f_code.co_filename, frame.f_lineno
            leaves_with = number < last.get(frame, 0) and linecache.getline(path, number).lstrip().startswith("with ")
            last[frame] = number
            passes_with = leaves_with or number in inlined(frame.f_code)
            if not passes_with and next(left) == 0:
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


class Stop(BaseException):
    """What comes in the place of KeyboardInterrupt."""


@functools.cache
def uninterrupted(code: CodeType) -> frozenset[int]:
    """The bytecodes of `with` before which Python raises no KeyboardInterrupt: between `__enter__` and the body, and
    between the body and `__exit__`.
    """
    every = list(dis.get_instructions(code))
    found: set[int] = set()
    for k, one in enumerate(every):
        if one.opname == "BEFORE_WITH":
            found.add(every[k + 1].offset)
        if one.opname == "WITH_EXCEPT_START":
            found |= {every[k - 1].offset, one.offset}
        nones = every[k : k + 3]
        if len(nones) == 3 and all(x.opname == "LOAD_CONST" and x.argval is None for x in nones):
            found |= {x.offset for x in every[k : k + 5] if x.opname in ("LOAD_CONST", "PRECALL", "CALL")}
    return frozenset(found)


def stopped(at: int, run: Callable[[], None], files: str) -> bool:
    """Call `run`; raise Stop at its `at`-th bytecode in files whose paths begin with `files`. Return whether there are
    so many.
    """
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti not in uninterrupted(frame.f_code):
            left -= 1
            if left == 0:
                raise Stop
        return trace

    before = sys.gettrace()
    gc.disable()  # no block of an earlier test ends while this one is traced
    sys.settrace(trace)
    try:
        run()
    except Stop:
        assert left <= 0
    finally:
        sys.settrace(before)
        gc.enable()
        torch = sys.modules.get("torch")
        if torch is not None:  # of several contexts of one `with`, those that torch makes in C may be left open
            torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
    return left <= 0
