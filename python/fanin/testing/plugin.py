"""The pytest plugin: the fixture `sim_machine`, the marker `explore`, options for `fanin.conformance`.

It imports fanin only when a test needs it.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fanin.sim import Machine

    Reports = Generator[None, pytest.TestReport, pytest.TestReport]

__tracebackhide__ = True  # no frames of ours in reports of pytest

FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fanin")
    group.addoption(
        "--fanin-seed",
        type=int,
        default=None,
        metavar="N",
        help="seed of the machines that sim_machine makes (default: one for each test, from its name)",
    )
    group.addoption(
        "--fanin-buffer",
        default="fanin:InputBuffer",
        metavar="MODULE:NAME",
        help="what the suite fanin.conformance calls to make a buffer of n slots (default: %(default)s)",
    )
    group.addoption(
        "--fanin-engine",
        default="fanin.conformance.engines:Fanin",
        metavar="MODULE:NAME",
        help="what the suite fanin.conformance calls to make an engine (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "explore(**options): run the test under every order in which the host threads of sim_machine may act; "
        "options are those of fanin.sim.explore, and incomplete=True: it passes where nothing was found in some orders",
    )


def seed_of(item: pytest.Item) -> int:
    """The seed of the option, or one of the test's own."""
    asked = item.config.getoption("--fanin-seed")
    return zlib.crc32(item.nodeid.encode()) if asked is None else int(asked)


@pytest.fixture
def sim_machine(request: pytest.FixtureRequest) -> Iterator[Machine | None]:
    """A fresh `fanin.sim.Machine` of two devices, entered; when the test passes, it is synchronized and checked for
    races.

    Its seed is the test's own and is shown if the test fails; `--fanin-seed` sets another.
    """
    if request.node.get_closest_marker("explore"):
        yield None  # each run has its own machine (pytest_pyfunc_call)
        return
    import fanin

    machine = fanin.sim.Machine(devices=2, seed=seed_of(request.node))
    machine.__enter__()
    yield machine
    failed = request.node.stash.get(FAILED, False)
    machine.__exit__(AssertionError if failed else None, None, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Reports:
    report = yield
    if call.when == "call" and report.failed:
        item.stash[FAILED] = True
    if report.failed and "sim_machine" in getattr(item, "fixturenames", ()):
        report.sections.append(("fanin", f"seed of sim_machine: --fanin-seed={seed_of(item)}"))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("explore")
    if mark is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    if "sim_machine" not in names:
        pytest.fail("a test marked explore takes the fixture sim_machine and spawns its threads on it", pytrace=False)
    import fanin

    given = {name: pyfuncitem.funcargs[name] for name in names if name != "sim_machine"}

    def run(machine: Machine) -> object:
        return pyfuncitem.obj(sim_machine=machine, **given)

    run.__name__ = pyfuncitem.name
    options = {"seed": seed_of(pyfuncitem), "stop_at_first": True, **mark.kwargs}
    may_miss = options.pop("incomplete", False)
    report = fanin.sim.explore(run, **options)
    if report.error is not None:
        report.error.add_note(f"{report.name}: schedule {report.schedule!r}, seed {options['seed']}")
        raise report.error
    if not report.ok and not (may_miss and report.outcome == "incomplete"):
        pytest.fail(str(report), pytrace=False)
    return True
