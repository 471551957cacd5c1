"""Fixtures for every test. Plain helpers are in kit/support.py: `from kit.support import run_python`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from kit.support import build_c, compiler, core_file, run_c, run_python, sanitizer

# What runs in the background ignores Ctrl-C, and so would the processes that are sent it here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"fanin: {core_file() or 'not built'}, sanitizer: {sanitizer() or 'none'}"


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test says does not depend on whether a GPU is plugged in: but for those marked gpu there is no driver,
    unless a test names one.
    """
    if request.node.get_closest_marker("gpu") or core_file() is None:
        yield
        return
    from fanin.testing import use_driver

    with use_driver("libcuda-of-no-machine.so.1"):
        yield


@pytest.fixture(scope="session")
def sanitized() -> str:
    """Which sanitizers the library under test was built with, as in "address,undefined"; "" for none."""
    return sanitizer()


@pytest.fixture(scope="session")
def c_program() -> Callable[..., Callable[..., subprocess.CompletedProcess[str]]]:
    """c_program("test_x.c", ..., flags=()) builds tests/c/test_x.c with every rung below py/ and gives a
    function that runs it: `run(*args, timeout=, check=True)` -> CompletedProcess."""
    if not compiler():
        pytest.skip("no C compiler: set CC")

    def build(
        *sources: str, flags: tuple[str, ...] = (), core: bool = True
    ) -> Callable[..., subprocess.CompletedProcess[str]]:
        program = build_c(sources, *flags, core=core)

        def run(*args: str, **how: object) -> subprocess.CompletedProcess[str]:
            return run_c(program, *args, **how)  # type: ignore[arg-type]

        return run

    return build


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """support.run_python: runs code in a Python of its own."""
    return run_python
