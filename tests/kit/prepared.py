"""Python in a process of its own, forked from a prepared one (kit/forking.py): a new Python imports NumPy and fanin for
longer than most programs take.

The child runs its program as a new interpreter does, as `__main__`, and ends as an interpreter ends; fanin has made
nothing before it. A program that is about what is imported is forked from a process that has imported NumPy alone
(`imports=NUMPY`). One that is about the start itself is for `kit.support.run_python`: the environment that NumPy reads
then, standard streams that are closed, options of the interpreter other than -W.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.support import TESTS, judged, run_python, sanitizer

#: What is imported before the fork.
FANIN = (
    "numpy.random",
    "pytest",
    "fanin.analysis",
    "fanin.cli.demo",
    "fanin.dist",
    "fanin.sim",
    "fanin.tape",
    "fake_cuda",
)
NUMPY = ("numpy",)


def _path() -> str:
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])


@functools.cache
def _server(imports: tuple[str, ...]) -> Any:
    """One for each process of tests. BLAS has no threads there: it forks."""
    return subprocess.Popen(
        [sys.executable, "-P", str(TESTS / "kit" / "forking.py"), *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _path(), "OPENBLAS_NUM_THREADS": "1"},
    )


_started: list[tuple[str, ...]] = []


def end() -> None:
    """The end of the process of tests: those that are prepared end with it."""
    for imports in _started:
        _server(imports).communicate()
    _started.clear()
    _server.cache_clear()


def _status_of(imports: tuple[str, ...], request: dict[str, Any]) -> int:
    """The exit status of a program."""
    if imports not in _started:
        _started.append(imports)
    server = _server(imports)
    server.stdin.write(repr(request) + "\n")
    server.stdin.flush()
    status = server.stdout.readline()
    assert status, "the prepared process has ended"
    return int(status)


def run_prepared(
    code: str | Sequence[str],
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
    imports: tuple[str, ...] = FANIN,
) -> subprocess.CompletedProcess[str]:
    """As `run_python`, in a fork of the prepared process."""
    if sanitizer() or not hasattr(os, "fork"):
        return run_python(code, *args, env=env, cwd=cwd, check=check)
    words = [*(["-c", code] if isinstance(code, str) else code), *args]
    request: dict[str, Any] = {"words": words, "folder": os.fspath(cwd or os.getcwd())}
    request["env"] = {**os.environ, "PYTHONPATH": _path(), **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        status = _status_of(imports, request | {"out": str(out), "err": str(err)})
        said = [file.read_text(errors="replace") for file in (out, err)]
    return judged(subprocess.CompletedProcess([sys.executable, *words], status, *said), check)
