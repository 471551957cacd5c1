"""Python in a process of its own, forked from a prepared one: a new Python imports NumPy and fanin for longer than most
tests take.

The child runs the code as `python -c` does, as `__main__`, and ends as an interpreter ends; fanin has made nothing
before it. Code that needs an environment of its own, or looks at an import, is for `kit.support.run_python`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kit.support import TESTS, judged, run_python, sanitizer

#: Answers each request, a line, with the exit status of the child that ran its code.
SERVER = """
import gc, json, os, sys, types, warnings
import numpy, pytest
gc.freeze()  # else the collector looks at all of these at the end of each child
import fanin, fanin.sim
import fake_cuda, kit.at

def serve():
    for line in sys.stdin:
        request = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            return request
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

def become(request):
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["args"]]
    sys.orig_argv = [sys.executable, "-c", request["code"], *request["args"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return compile(request["code"], "<string>", "exec")

request = serve()
if request is not None:
    exec(become(request), sys.modules["__main__"].__dict__)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for each process of tests. BLAS has no threads there: it forks."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
    )


def end() -> None:
    """The end of the process of tests: the prepared one ends with it."""
    if _server.cache_info().currsize:
        _server().communicate()
        _server.cache_clear()


def run_prepared(code: str, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """As `run_python`, in a fork of the prepared process."""
    if sanitizer() or not hasattr(os, "fork"):
        return run_python(code, *args, check=check)
    server: Any = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        for file in (out, err):
            file.touch()
        request = {"code": code, "args": args, "folder": os.getcwd()}
        request |= {"out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = server.stdout.readline()
        assert status, "the prepared process has ended"
        said = [file.read_text(errors="replace") for file in (out, err)]
    return judged(subprocess.CompletedProcess([sys.executable, "-c", code, *args], int(status), *said), check)
