"""A Python that has imported fanin, and gives each program a fork of itself (kit/forking.py): a process of its own,
without the time in which Python and NumPy start, which is longer than most programs take.

For programs that run to their end. Not for those that are about the start itself: the environment that NumPy reads
then, standard streams that are closed, options of the interpreter other than -W. A program that is about what is
imported gets a fork of a Python that has imported NumPy alone (`imports=NUMPY`).
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kit.support import TESTS, judged, run_python, sanitizer

#: What programs import, but for libraries beside NumPy. The fake driver imports pytest.
FANIN = ("numpy.random", "fanin.analysis", "fanin.cli.demo", "fanin.dist", "fanin.sim", "fanin.tape", "fake_cuda")
NUMPY = ("numpy",)


class Warm:
    """The process that forks. Its BLAS has no threads, which a fork would lose."""

    def __init__(self, imports: Sequence[str]) -> None:
        self.path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(TESTS / "kit" / "forking.py"), *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": self.path, "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, asked: dict[str, object]) -> int:
        """The exit status of a program, as `subprocess` has it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(repr(asked) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process that forks ended with {self.process.wait()}"
        return int(answer)


@functools.cache
def warm(owner: int, imports: Sequence[str]) -> Warm:
    """The one of the process `owner`: a fork of the tests' own process gets another."""
    made = Warm(imports)

    def end() -> None:
        if os.getpid() == owner:
            made.process.communicate()

    atexit.register(end)
    return made


def run_warm(
    code: str | Sequence[str],
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
    imports: tuple[str, ...] = FANIN,
) -> subprocess.CompletedProcess[str]:
    """As `support.run_python`, in a fork; under a sanitizer, some of which forbid forks, in a Python of its own."""
    if sanitizer():
        return run_python(code, *args, env=env, cwd=cwd, check=check)
    beside = warm(os.getpid(), imports)
    words = [*(["-c", code] if isinstance(code, str) else code), *args]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = beside.run(
            {
                "words": words,
                "env": {**os.environ, "PYTHONPATH": beside.path, **(env or {})},
                "cwd": os.fspath(cwd or os.getcwd()),
                "out": str(out),
                "err": str(err),
            }
        )
        said = [path.read_text(errors="replace") for path in (out, err)]
    return judged(subprocess.CompletedProcess([sys.executable, *words], status, *said), check)
