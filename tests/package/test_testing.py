"""fanin.testing and fanin.conformance, run as their users run them: by a pytest of their own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import fanin  # NumPy is imported once per process: here, not in a pytest within
from kit.prepared import NUMPY, run_prepared
from kit.support import ROOT

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.core

SUITE = """
import fanin, numpy as np, pytest

def test_machine(sim_machine):
    assert fanin.devices() == ["cpu", "sim:0", "sim:1"]
    x = sim_machine.array(np.ones(2))
    assert x.numpy().tolist() == [1, 1]

def test_failure_shows_its_seed(sim_machine):
    sim_machine.launch(sim_machine.stream(), lambda v: None, writes=[sim_machine.empty(1)])
    assert False

def test_races_fail_the_test(sim_machine):
    x = sim_machine.empty(1)
    sim_machine.launch(sim_machine.stream(), lambda v: None, writes=[x])
    try:
        sim_machine.launch(sim_machine.stream(), lambda v: None, writes=[x])
    except fanin.RaceError:
        raise

def scenario(m, order):
    a, b = m.stream(), m.stream()
    x = m.array(np.zeros(1))
    flag = []
    def writer():
        m.launch(a, lambda v: v.fill(1), writes=[x], name="write")
        flag.append(a.record())
    def reader():
        if flag:
            b.wait(flag[0])
        elif order:
            return
        m.launch(b, lambda v: None, reads=[x], name="read")
    m.spawn(writer)
    m.spawn(reader)

@pytest.mark.explore
def test_every_order(sim_machine, tmp_path):
    assert tmp_path.exists()
    scenario(sim_machine, True)

@pytest.mark.explore(limit=50)
def test_some_order(sim_machine):
    scenario(sim_machine, False)

@pytest.mark.explore
def test_different_results(sim_machine):
    seen = []
    s = sim_machine.stream()
    for i in range(2):
        sim_machine.spawn(lambda i=i: (s.record(), seen.append(i)))
    sim_machine.join()
    return seen[0]

@pytest.mark.explore
def test_without_a_machine():
    pass
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugins of others, which take long to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def pytest_of(pytester: pytest.Pytester, *args: str) -> str:
    assert fanin.__version__
    pytester.makeini("[pytest]\n")
    done = pytester.runpytest_inprocess("-p", "fanin.testing.plugin", "-p", "no:cacheprovider", "-rA", *args)
    return "\n".join([*done.outlines, *done.errlines, ""])


def test_the_plugin_runs_machines_and_every_order(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    out = pytest_of(pytester)
    passed = {"test_machine", "test_every_order"}
    failed = {
        "test_failure_shows_its_seed",
        "test_races_fail_the_test",
        "test_some_order",
        "test_different_results",
        "test_without_a_machine",
    }
    assert {w for w in passed | failed if f"PASSED test_suite.py::{w}\n" in out} == passed, out
    assert {w for w in passed | failed if f"FAILED test_suite.py::{w}" in out} == failed, out
    assert "seed of sim_machine: --fanin-seed=" in out
    assert "schedule '" in out
    assert "2 different results" in out
    assert "takes the fixture sim_machine" in out
    assert "ERROR" not in out, out


def test_a_failure_is_replayed_by_its_seed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_seed="def test_seed(sim_machine):\n    assert sim_machine.seed != 77\n")
    assert "1 passed" in pytest_of(pytester)
    assert "1 failed" in pytest_of(pytester, "--fanin-seed=77")


def test_the_suite_runs_on_our_own_buffer_and_engine_or_on_those_that_its_options_name(
    pytester: pytest.Pytester,
) -> None:
    out = pytest_of(pytester, "--pyargs", "fanin.conformance", "-q")
    assert " failed" not in out and " error" not in out and " passed" in out and "SKIPPED" not in out, out
    pytester.makepyfile(planted="class Engine:\n    pass\nclass Buffer(Engine):\n    def __init__(self, n): pass\n")
    pytester.syspathinsert()
    words = ["--fanin-buffer=planted:Buffer", "--fanin-engine=planted:Engine", "--tb=native"]
    out = pytest_of(pytester, "--pyargs", "fanin.conformance", "-q", *words)
    assert " passed" not in out and "has no attribute 'leaf'" in out and "has no attribute 'add'" in out, out


def test_the_suite_without_its_plugin_names_it(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\n")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--pyargs", "fanin.conformance")
    assert done.ret == 4 and "pytest -p fanin.testing.plugin" in done.stdout.str() + done.stderr.str()


def test_a_pytest_that_does_not_name_the_plugin_does_not_load_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "pytest11" not in project.get("entry-points", {})


def test_the_plugin_imports_no_torch() -> None:
    run_prepared("import sys, fanin.testing.plugin; assert 'torch' not in sys.modules", imports=NUMPY)


@pytest.mark.tools
def test_a_test_of_ours_is_not_called_by_an_address(pytester: pytest.Pytester) -> None:
    text = (Path(__file__).parents[1] / "conftest.py").read_text()
    hook = next(f for f in text.split("\n\n\n") if f.startswith("def pytest_itemcollected"))
    pytester.makeconftest("from __future__ import annotations\nimport pytest\n\n" + hook)
    called = "import pytest\n@pytest.mark.parametrize('x', [{}], ids={})\ndef test_x(x): pass\n"
    pytester.makepyfile(test_well=called.format("object()", "['an object']"))
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider").ret == pytest.ExitCode.OK
    pytester.makepyfile(test_badly=called.format("object()", "repr"))
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert done.ret != pytest.ExitCode.OK
    assert "a test is not called by an address" in done.stdout.str() + done.stderr.str()
