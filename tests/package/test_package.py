"""The package: what an import brings with it, and that an sdist builds a wheel that installs and imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fanin import _nvcc
from kit.fake_nvcc import calls, fake_nvcc
from kit.prepared import NUMPY, run_prepared
from kit.support import ROOT, emptied, sanitizer

#: What fanin works with where the caller already does, and never imports itself.
NEVER = ("torch", "scipy", "ml_dtypes", "jax", "cupy", "autograd", "mpi4py", "pytest", "threadpoolctl")

SHOW_NEW = """
import sys, json
import numpy
before = set(sys.modules)
import fanin
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before})))
"""


def foreign(new: list[str]) -> list[str]:
    """The top-level modules among `new` that are neither ours, NumPy's nor the standard library's."""
    return sorted(m for m in new if m not in {"fanin", "numpy"} and m not in sys.stdlib_module_names)


@pytest.mark.core
def test_an_import_brings_numpy_and_nothing_else() -> None:
    new = json.loads(run_prepared(SHOW_NEW, imports=NUMPY).stdout)
    assert "fanin" in new
    assert foreign(new) == []
    assert not set(NEVER) & set(new)


@pytest.mark.core
def test_an_import_leaves_out_what_only_some_calls_need() -> None:
    """Modules that cost more than the rest of the import: compressors for tempfile, subprocess, pictures of traces."""
    late = {"tempfile", "subprocess", "json", "fanin._trace.picture", "fanin._trace.passes", "fanin.tape"}
    code = "import sys, numpy; before = set(sys.modules); import {}; print(sorted({} & sys.modules.keys() - before))"
    assert run_prepared(code.format("fanin", late), imports=NUMPY).stdout.strip() == "[]"
    assert run_prepared(code.format("fanin, tempfile", late), imports=NUMPY).stdout.strip() == "['tempfile']"


@pytest.mark.core
def test_an_import_starts_no_thread_and_warns_of_nothing() -> None:
    code = "import threading, warnings; warnings.simplefilter('error'); import fanin; print(threading.active_count())"
    assert run_prepared(code, imports=NUMPY).stdout.strip() == "1"
    tasks = (
        "import os, numpy; n = len(os.listdir('/proc/self/task')); import fanin;"
        " print(len(os.listdir('/proc/self/task')) - n)"
    )
    if Path("/proc/self/task").is_dir() and "thread" not in sanitizer():
        assert run_prepared(tasks, imports=NUMPY).stdout.strip() == "0"


def version_errors(version: str, changelog: str, citation: str) -> list[str]:
    """What is wrong with a version: between releases it is the next one with .dev0, as the changelog and citation have
    it.
    """
    release, dev, _ = version.partition(".dev0")
    head = re.search(r"^## \[(.*)\] - (.*)$", changelog, re.MULTILINE)
    wrong = []
    if not head or head[1] != release:
        wrong.append("the changelog begins with another version")
    elif (head[2] == "unreleased") != bool(dev):
        wrong.append(f"{version} is {head[2]} in the changelog")
    if f"\nversion: {version}\n" not in citation:
        wrong.append("CITATION.cff has another version")
    return wrong


@pytest.mark.tools
@pytest.mark.core
def test_the_version_is_that_of_the_changelog_and_is_no_release_before_its_day() -> None:
    import fanin

    assert f'__version__ = "{fanin.__version__}"' in (ROOT / "python" / "fanin" / "_version.py").read_text()
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    assert version_errors(fanin.__version__, changelog, citation) == []
    release = fanin.__version__.removesuffix(".dev0")
    assert version_errors(release, f"## [{release}] - 2027-01-31\n", f"\nversion: {release}\n") == []
    assert len(version_errors(release, f"## [{release}] - unreleased\n", citation)) == 1 + (
        release != fanin.__version__
    )
    assert version_errors("9.9", changelog, citation)[0] == "the changelog begins with another version"


def metadata(folder: Path, url: str | None, **env: str) -> str:
    """What the package index shows: the metadata of a build with FANIN_URL; None: without."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    env = emptied(env if url is None else {**env, "FANIN_URL": url})
    if url is None:
        env.pop("FANIN_URL", None)
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=env)
    return (folder / "fanin.egg-info" / "PKG-INFO").read_text()


def private_names(text: str) -> list[str]:
    """The attributes of other objects whose names begin with one underscore, in a Python source."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    return [node.attr for node in nodes if node.attr.startswith("_") and not node.attr.startswith("__")]


@pytest.mark.tools
def test_the_build_uses_no_private_method_of_setuptools() -> None:
    assert private_names((ROOT / "setup.py").read_text()) == []
    assert private_names("self.compiler.compile([source])\nself.compiler._compile(source)\n") == ["_compile"]


@pytest.mark.tools
def test_links_of_the_readme_hold_on_the_package_index(tmp_path: Path) -> None:
    text = metadata(tmp_path, "https://repository.invalid/fanin/")
    assert "Project-URL: Changelog, https://repository.invalid/fanin/blob/main/CHANGELOG.md\n" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "https://repository.invalid/fanin/raw/main/docs/scene.svg" in links
    assert links and [link for link in links if not link.startswith("https://")] == []


@pytest.mark.tools
def test_a_build_without_an_address_names_none(tmp_path: Path) -> None:
    text = metadata(tmp_path, "")
    assert "Project-URL" not in text and "Home-page" not in text and "](docs/tutorial.md)" in text


REMOTES = {
    "https://github.invalid/a/fanin.git": "https://github.invalid/a/fanin",
    "https://user:secret@github.invalid/a/fanin/": "https://github.invalid/a/fanin",
    "git@github.invalid:a/fanin.git": "https://github.invalid/a/fanin",
    "ssh://git@gitlab.invalid:22/a/b/fanin.git": "https://gitlab.invalid/a/b/fanin",
    "/srv/fanin.git": None,
}


@pytest.mark.tools
@pytest.mark.parametrize("remote", REMOTES)
def test_a_build_of_a_clone_has_the_address_of_its_remote_without_user_and_password(
    remote: str, tmp_path: Path
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no clone")
    of_git = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "remote.origin.url", "GIT_CONFIG_VALUE_0": remote}
    text = metadata(tmp_path, None, **of_git)
    found = re.search(r"^Home-page: (.*)$", text, re.MULTILINE)
    assert (found[1] if found else None) == REMOTES[remote]
    assert "secret" not in text and "\nLicense: BSD-3-Clause AND CC-BY-4.0\n" in text, "as pip show reads them"


def quietly(*words: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=cwd,
        # As a release is made: the time of its commit.
        env=emptied(
            {"FANIN_DEV": "", "FANIN_SANITIZE": "", "FANIN_NVCC": "", "SOURCE_DATE_EPOCH": "1767225600", **env}
        ),
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_sdist_builds_a_wheel_that_installs_and_imports(tmp_path: Path) -> None:
    """As a user has it: from the sdist alone, in fresh virtual environments. Needs a package index."""
    tools, user = tmp_path / "tools", tmp_path / "user"
    quietly(sys.executable, "-m", "venv", str(tools), cwd=tmp_path)
    quietly(str(tools / "bin" / "pip"), "install", "-q", "build", cwd=tmp_path)
    # The sdist is made from a copy, so that a build leaves no file in the tree.
    copy = tmp_path / "copy"
    import shutil

    everywhere = shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "scratch", "*.egg-info")
    shutil.copytree(
        ROOT,
        copy,  # `dist` at the top alone: fanin.dist and its tests are sources
        ignore=lambda folder, names: {*everywhere(folder, names), *({"dist"} if Path(folder) == ROOT else ())},
    )
    quietly(str(tools / "bin" / "python"), "-m", "build", "--sdist", "-o", str(tmp_path), str(copy), cwd=tmp_path)
    (sdist,) = tmp_path.glob("fanin-*.tar.gz")
    again = tmp_path / "again"
    quietly(str(tools / "bin" / "python"), "-m", "build", "--sdist", "-o", str(again), str(copy), cwd=tmp_path)
    assert [p.read_bytes() for p in again.iterdir()] == [sdist.read_bytes()], "another sdist of the same sources"
    with tarfile.open(sdist) as archive:
        inside = {"/".join(n.split("/")[1:]) for n in archive.getnames()}
    for path in [*ROOT.glob("csrc/**/*.[ch]"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/*.md")]:
        assert str(path.relative_to(ROOT)) in inside, f"the sdist lacks {path.relative_to(ROOT)}"
    assert {"LICENSE", "README.md", "CHANGELOG.md", "python/fanin/py.typed", "csrc/py/core.pyi"} <= inside
    data = {"fanin/cli/digits.npz", "fanin/cli/digits-license.txt"}
    assert {f"python/{name}" for name in data} <= inside

    nvcc = fake_nvcc(tmp_path / "toolkit")
    words = [str(tools / "bin" / "pip"), "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(sdist)]
    quietly(*words, cwd=tmp_path, NVCC=str(nvcc))
    assert calls(nvcc) == [], "a build runs nvcc that did not ask for machine code"
    (wheel,) = tmp_path.glob("fanin-*.whl")
    assert wheel.stat().st_size < 3_000_000
    quietly(str(tools / "bin" / "pip"), "wheel", "-q", "--no-deps", "-w", str(again), str(sdist), cwd=tmp_path)
    assert (again / wheel.name).read_bytes() == wheel.read_bytes(), "another wheel of the same sources"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        library = archive.read(next(n for n in names if n.startswith("fanin/_core.") and n.endswith(".so")))
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert {"fanin/py.typed", "fanin/_core.pyi", "fanin/__init__.py", "fanin/include/fanin.h", *data} <= set(names)
    others = [n for n in names if n != "fanin/include/fanin.h"]
    assert not [n for n in others if n.endswith((".c", ".h", ".o")) or n.startswith(("tests/", "csrc/"))]
    assert not [n for n in names if "inside" in n or "hooks" in n]
    assert b"_test_" not in library and b"rules_accum" not in library, "what tests alone ask for is in the wheel"
    assert "BSD-3-Clause AND CC-BY-4.0" in metadata
    assert "Requires-Dist: numpy>=1.26\n" in metadata

    quietly(sys.executable, "-m", "venv", str(user), cwd=tmp_path)
    quietly(str(user / "bin" / "pip"), "install", "-q", str(wheel), cwd=tmp_path)
    said = quietly(
        str(user / "bin" / "python"),
        "-c",
        "import fanin, numpy as np; print(fanin.__file__); print(fanin.add_n([np.ones(3), np.ones(3)]).tolist());"
        " print(fanin.info()['kernels'])",
        cwd=tmp_path,
    ).splitlines()
    assert said[0].startswith(str(user)) and said[1] == "[2.0, 2.0, 2.0]" and "'nvcc': None" in said[2]
    assert "demo" in quietly(str(user / "bin" / "fanin"), "--help", cwd=tmp_path)

    # And once more with nvcc, where there is one: the same package with machine code for each architecture.
    if not _nvcc.find():
        pytest.skip("the rest needs nvcc")
    quietly(
        str(user / "bin" / "pip"),
        "install",
        "-q",
        "--force-reinstall",
        "--no-deps",
        str(sdist),
        cwd=tmp_path,
        FANIN_NVCC="1",
    )
    made = quietly(str(user / "bin" / "python"), "-c", "import fanin; print(fanin.info()['kernels'])", cwd=tmp_path)
    assert "['sm_75'" in made and "'ptx': 'compute_" in made
