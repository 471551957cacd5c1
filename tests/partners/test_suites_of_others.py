"""The test suites of HIPS autograd and micrograd, run as their authors run them, with our pass or our buffers in them.

Wheels leave the suites out, source distributions have them. In the folder FANIN_SUITES (.ci/run fills it) they lie as
`pip download --no-deps --no-binary autograd autograd==1.9.1` puts them there; without them these tests skip. MyGrad's
source distribution has no tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kit.support import ROOT, run_python

pytestmark = pytest.mark.partners

#: A plugin of the suite's pytest: WAY selects the engine; at the end it writes the number of calls of fanin's engine.
PLUGIN = '''
import contextlib, importlib.util, os, pathlib
import fanin

asked = 0

def counted(fn):
    def call(*args, **how):
        global asked
        asked += 1
        return fn(*args, **how)
    return call

@contextlib.contextmanager
def buffers():
    """HIPS autograd's pass over its graph, with an InputBuffer for each of its nodes."""
    import autograd.core as core
    from autograd.tracer import toposort

    slot = fanin.Slot(combine=lambda a, b: core.sum_outgrads([a, b]))

    def backward_pass(g, end):
        global asked
        asked += 1
        waiting = {end: fanin.InputBuffer([slot])}
        waiting[end].add(0, g)
        for node in toposort(end):
            [gradient] = waiting.pop(node).take()
            for parent, given in zip(node.parents, node.vjp(gradient)):
                if parent not in waiting:
                    waiting[parent] = fanin.InputBuffer([slot])
                waiting[parent].add(0, core.sum_outgrads([given]))
        return gradient

    own, core.backward_pass = core.backward_pass, backward_pass
    yield
    core.backward_pass = own

def engine():
    spec = importlib.util.spec_from_file_location("example", os.environ["EXAMPLE"])
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    fanin.grad, fanin.backward = counted(fanin.grad), counted(fanin.backward)
    return example.on_fanin()

way = {"own": contextlib.nullcontext, "engine": engine, "buffers": buffers}[os.environ["WAY"]]()
way.__enter__()

def pytest_sessionfinish():
    pathlib.Path("asked").write_text(str(asked))
'''


SUITES = [("autograd", "12_hips_autograd", "tests"), ("micrograd", "13_micrograd", "test")]


@pytest.fixture(scope="module", params=SUITES, ids=[package for package, _, _ in SUITES])
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """The package, our example for it, and a folder with its tests, unpacked."""
    package, example, tests = request.param
    for needed in (package, "torch") if package == "micrograd" else (package, "scipy"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    name = f"{package}-{importlib.metadata.version(package)}"
    archive = Path(os.environ.get("FANIN_SUITES", "."), f"{name}.tar.gz")
    if not archive.is_file():
        pytest.skip(f"FANIN_SUITES names no folder with {archive.name}")
    folder = tmp_path_factory.mktemp(package)
    with tarfile.open(archive) as tar:
        within = f"{name}/{tests}/"
        safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.0 to 3.11.3 have none
        tar.extractall(folder, [m for m in tar.getmembers() if m.name.startswith(within)], **safe)
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")  # its own configuration needs plugins that are not used here
    return package, example, folder


def outcomes(suite: tuple[str, str, Path], way: str) -> tuple[dict[str, str], int]:
    """What each test came to, and how many passes were ours."""
    _, example, folder = suite
    run_python(
        ["-m", "pytest", "-q", "-c", "pytest.ini", "-p", "plugin", "-p", "no:cacheprovider", "--junitxml", "seen.xml"],
        env={"WAY": way, "EXAMPLE": str(ROOT / "examples" / f"{example}.py"), "PYTEST_ADDOPTS": "",
             "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])},
        cwd=folder, check=False,
    )  # fmt: skip
    seen = {
        f"{case.get('classname')}::{case.get('name')}": next((child.tag for child in case), "passed")
        for case in ET.parse(folder / "seen.xml").iter("testcase")
    }
    return seen, int((folder / "asked").read_text())


def test_tests_that_pass_with_the_librarys_own_backward_pass_with_fanins(suite: tuple[str, str, Path]) -> None:
    """.. and in HIPS autograd's own pass with our buffers; micrograd has one gradient a value, and nothing to park."""
    tests, least, ways = {"autograd": (600, 5_000, ("engine", "buffers")), "micrograd": (2, 2, ("engine",))}[suite[0]]
    own, none = outcomes(suite, "own")
    assert none == 0 and len(own) >= tests
    assert "passed" in own.values() and not {"failure", "error"} & set(own.values())
    for way in ways:
        ours, passes = outcomes(suite, way)
        assert ours == own, {name: (was, ours.get(name)) for name, was in own.items() if ours.get(name) != was}
        assert passes >= least
