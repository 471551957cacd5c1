"""Fixtures for every test. Plain helpers are in kit/support.py: `from kit.support import run_python`."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kit import prepared
from kit.selection import left_out
from kit.support import (
    WITHOUT_SOURCES,
    build_c,
    compiler,
    core_file,
    run_c,
    run_python,
    sanitizer,
    skip_without_sources,
)

# What runs in the background ignores Ctrl-C, and so would the processes that are sent it here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A relative path is meant from here, and processes that are started here may run in other folders.
if PATHS := list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, PATHS))


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    if call.excinfo:  # reports of this suite show the frames of fanin
        for name in [name for name in sys.modules if name.partition(".")[0] == "fanin"]:
            sys.modules[name].__dict__.pop("__tracebackhide__", None)
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or not report.passed
    return report


def pytest_sessionfinish() -> None:
    prepared.end()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rule", action="append", default=[], metavar="RULE", help="only tests that state this rule of docs/rules.md"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """--rule A10 --rule S9: the tests that state one of them."""
    wanted = {word for given in config.getoption("--rule") for word in given.upper().split(",")}
    if wanted:
        kept = [i for i in items if any(wanted & set(mark.args) for mark in i.iter_markers("rule"))]
        if not kept:
            raise pytest.UsageError(f"--rule {','.join(sorted(wanted))}: no test here is marked with it")
        config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
        items[:] = kept


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which no test would be run is not imported: that takes as long as running it, in each worker."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and left_out(collection_path.read_text(), config.getoption("markexpr")):
        return True
    return None


#: How a test file names what is beside tests/.
NEEDS_SOURCES = re.compile(r"\b(CSRC|ROOT|TEST_C|SIGNATURES)\b|^from benchmarks\b", re.MULTILINE)


class WithoutSources(pytest.Module):
    """A test file that reads or builds the sources, where there are none."""

    def collect(self) -> Iterator[Any]:
        skip_without_sources()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> WithoutSources | None:
    if WITHOUT_SOURCES and NEEDS_SOURCES.search(module_path.read_text()):
        return WithoutSources.from_parent(parent, path=module_path)
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if " at 0x" in item.nodeid:  # the workers of one run would not agree on what there is to run
        raise pytest.UsageError(f"{item.nodeid}: a test is not called by an address: say ids=")


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """What there is before a file's first test is left out of the many collections to come: late in a long run each of
    them would take a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def searches_without_a_limit() -> None:
    """`explore` ends a search whose thread takes a minute for a step, which it does on a busy machine."""
    if core_file() is None or find_spec("fanin.sim") is None:
        return
    from fanin.sim import search

    for function in (search.explore, search.replay):
        inspect.unwrap(function).__kwdefaults__["stuck_after"] = math.inf


def pytest_report_header(config: pytest.Config) -> str:
    return f"fanin: {core_file() or 'not built'}, sanitizer: {sanitizer() or 'none'}"


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """The result of a test does not depend on a GPU: except those marked gpu, tests have no driver unless they name
    one.
    """
    if request.node.get_closest_marker("gpu") or core_file() is None:
        yield
        return
    from fake_cuda import use_driver

    with use_driver("libcuda-of-no-machine.so.1"):
        yield


@pytest.fixture(scope="session")
def sanitized() -> str:
    """Which sanitizers the library under test was built with, as in "address,undefined"; "" for none."""
    return sanitizer()


@pytest.fixture(scope="session")
def c_program() -> Callable[..., Callable[..., subprocess.CompletedProcess[str]]]:
    """c_program("test_x.c", ..., flags=()) builds tests/c/test_x.c with every rung below py/ and gives a
    function that runs it: `run(*args, check=True)` -> CompletedProcess."""
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


@pytest.fixture
def a_world(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """a_world("sim" | "fake" | "gpu", ..): a kit.world.world from here to the end of the test, when it is judged."""
    from kit.world import world

    with contextlib.ExitStack() as stack:
        made: list[Any] = []

        def enter(kind: str, *args: Any, **options: Any) -> Any:
            made.append(stack.enter_context(world(kind, *args, **options)))
            return made[-1]

        yield enter
        for one in made:
            one.failed |= request.node.stash.get(FAILED, False)


@pytest.fixture(params=["sim", "fake"])
def w(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    """A world of two devices: the simulated machine, then the fake driver."""
    return a_world(request.param)


@pytest.fixture
def driver(a_world: Callable[..., Any]) -> Any:
    """A fake driver of two devices, in use."""
    return a_world("fake").driver
