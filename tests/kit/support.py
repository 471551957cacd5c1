"""What several tests need: where things are, how C programs are built, how Python is run beside this one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests"
TEST_C = TESTS / "c"

#: The rungs that a C test is built with: all but py/.
RUNGS = ("base", "array", "device", "buffer", "engine", "graph", "analysis")

#: The sources that some tests need are not beside a copy of tests/ that runs on an installed package.
WITHOUT_SOURCES = "" if CSRC.is_dir() else f"the sources are not beside {TESTS}"

#: What may be preloaded into this process and must not reach compilers and other tools.
PRELOADS = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")


def skip_without_sources() -> NoReturn:
    import pytest

    pytest.skip(WITHOUT_SOURCES, allow_module_level=True)


# Which build is this


@functools.cache
def core_file() -> Path | None:
    """The built `fanin._core`, found without importing it; None where there is none."""
    package = importlib.util.find_spec("fanin")
    for folder in (package.submodule_search_locations or []) if package else []:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder, "_core" + suffix)
            if path.exists():
                return path
    return None


@functools.cache
def sanitizer() -> str:
    """ "address", "thread", "undefined", several joined by commas, or "": read from the library itself.

    A sanitized library refers to its runtime's symbols by name, so the environment does not matter.
    """
    path = core_file()
    if path is None:
        return os.environ.get("FANIN_SANITIZE", "")
    data = path.read_bytes()
    marks = {"address": b"__asan_init", "thread": b"__tsan_init", "undefined": b"__ubsan_handle"}
    return ",".join(name for name, mark in marks.items() if mark in data)


def emptied(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what was preloaded, and with `env` on top."""
    clean = {k: v for k, v in os.environ.items() if k not in PRELOADS}
    clean.update(env or {})
    return clean


# Python beside this one

#: The first words of a sanitizer's report.
REPORT = re.compile(r": runtime error: |(ERROR|WARNING): (Address|Thread|Leak|UndefinedBehavior)Sanitizer")


def run_python(
    code: str | Sequence[str],
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Runs `code` (text for -c, or a list of arguments) in a Python of its own and returns its output.

    A sanitizer preloaded here is preloaded there, and what it reports is an AssertionError always. With
    `check`, so is an exit status other than 0; both show the whole output.
    """
    words = ["-c", code] if isinstance(code, str) else list(code)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS)])
    done = subprocess.run(
        [sys.executable, *words, *args],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )
    return judged(done, check)


def judged(done: subprocess.CompletedProcess[str], check: bool) -> subprocess.CompletedProcess[str]:
    """What Python beside this one has done, unless it is an error."""
    if WITHOUT_SOURCES and done.returncode != 0 and WITHOUT_SOURCES in done.stderr:
        skip_without_sources()
    if (check and done.returncode != 0) or REPORT.search(done.stderr):
        said = f"{done.stdout}\n{done.stderr}"
        raise AssertionError(f"exit status {done.returncode}\n{' '.join(done.args[1:])}\n{said}")
    return done


# C programs


def compiler() -> list[str]:
    """The C compiler, by CC or as `cc`; empty where there is none."""
    words = os.environ.get("CC", "cc").split()
    return words if words and shutil.which(words[0]) else []


def c_flags() -> list[str]:
    """How C tests are built; sanitized when the library under test is.

    Programs and shared libraries are built alike, so that all of a run share one object of each file of the core.
    The compiler takes longer than the tests do, and -Og is two and a half times as fast as -O2.
    """
    flags = ["-std=c11", "-Og", "-DFAN_TEST=1", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno"]
    flags += ["-fPIC", "-fvisibility=hidden", f"-I{CSRC}", f"-I{TEST_C}", f"-I{TESTS}", "-pthread"]
    which = sanitizer()
    if which:
        flags += [f"-fsanitize={which}", "-fno-omit-frame-pointer", "-g"]
        if "thread" not in which:
            flags += [f"-fno-sanitize-recover={which}"]
    return flags


def cache_dir() -> Path:
    """Where built objects are kept from run to run: a folder of this user's own."""
    path = Path(os.environ.get("FANIN_TEST_CACHE") or Path(tempfile.gettempdir(), f"fanin-c-{os.getuid()}"))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to someone else; set FANIN_TEST_CACHE to a folder of yours")
    return path


@contextlib.contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """One thread of all processes makes this file; another one waits, and then finds it made."""
    group = hashlib.sha256(out.name.encode()).hexdigest()[:2]
    with open(out.with_name(f"lock-{group}"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], out: Path) -> Path:
    """Runs `command -o out` unless `out` is there; it appears whole or not at all, and once for all processes."""
    if out.exists():
        return out
    with _only_one(out):
        if not out.exists():
            partial = out.with_name(f"{out.name}.part")
            done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, env=emptied())
            if done.returncode != 0:
                raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
            partial.replace(out)
    return out


def _includes(path: Path) -> list[Path]:
    """The files of ours that a C file includes, as it writes them: from csrc/ on, or beside it."""
    names = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', path.read_text(), re.MULTILINE)
    folders = (path.parent, CSRC, TEST_C, TESTS)
    return [
        next(f / name for f in folders if (f / name).exists())
        for name in names
        if any((f / name).exists() for f in folders)
    ]


_includes_of_header = functools.cache(_includes)


@functools.cache
def _header(path: Path) -> bytes:
    """A header's name and content."""
    return str(path).encode() + b"\0" + path.read_bytes()


def _headers(source: Path) -> bytes:
    """One hash over every header that the source includes, directly or through others."""
    seen: dict[Path, None] = dict.fromkeys(_includes(source))
    todo = list(seen)
    while todo:
        for path in _includes_of_header(todo.pop()):
            if path not in seen:
                seen[path] = None
                todo.append(path)
    text = hashlib.sha256()
    for path in sorted(seen):
        text.update(_header(path))
    return text.digest()


def object_of(source: Path, flags: tuple[str, ...]) -> Path:
    """The object of a C file, compiled once for all callers with the same file and flags."""
    return _object_of_core(source, flags) if CSRC in source.parents else _object(source, flags)


def _object(source: Path, flags: tuple[str, ...]) -> Path:
    cc = compiler()
    key = hashlib.sha256("\0".join([*cc, *flags, str(source)]).encode() + _headers(source) + source.read_bytes())
    return _compile([*cc, *flags, "-c", str(source)], cache_dir() / f"{source.stem}-{key.hexdigest()[:24]}.o")


#: The core's files do not change while tests run; those that tests write do.
_object_of_core = functools.cache(_object)


def build_c(
    sources: Sequence[str | os.PathLike[str]], *flags: str, core: bool = True, link: Sequence[str] = ()
) -> Path:
    """Builds a program from C files (names in tests/c, or paths) and, with `core`, all rungs below py/.

    Every object is kept under a hash of all that went into it, so that a second run compiles nothing. Flags for the
    linker (`link`, and "-Wl,..") make no other objects, and the core's files have no use for other folders' headers.
    Without the sources, the calling test is skipped.
    """
    if WITHOUT_SOURCES:
        skip_without_sources()
    paths = [TEST_C / s if not os.path.isabs(s) else Path(s) for s in sources]
    if core:
        paths += sorted(p for rung in RUNGS for p in (CSRC / rung).glob("**/*.c"))
    every = (*c_flags(), *flags)
    compiling = tuple(f for f in every if not f.startswith("-Wl,"))
    of_core = tuple(f for f in compiling if not f.startswith("-isystem"))

    def made(path: Path) -> Path:
        return object_of(path, of_core if CSRC in path.parents else compiling)

    if len(paths) > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(made, paths))
    else:
        objects = [made(p) for p in paths]
    key = hashlib.sha256("\0".join([*every, *link, *map(str, objects)]).encode()).hexdigest()[:24]
    command = [*compiler(), *every, *map(str, objects), *link, "-lm"]
    return _compile(command, cache_dir() / f"{paths[0].stem}-{key}")


def extension(name: str, sources: Sequence[Path], *flags: str) -> ModuleType:
    """A Python module made from C files without the core's; without a compiler, the calling test is skipped."""
    if not compiler():
        import pytest

        pytest.skip("no C compiler: set CC")
    link = ["-shared"] if sys.platform != "darwin" else ["-bundle", "-undefined", "dynamic_lookup"]
    path = build_c(sources, *flags, f"-isystem{sysconfig.get_path('include')}", core=False, link=link)
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run_c(
    program: str | os.PathLike[str],
    *args: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a built program; with `check`, an exit status other than 0 is an AssertionError that shows all."""
    done = subprocess.run(
        [str(program), *args],
        capture_output=True,
        text=True,
        errors="replace",
        # These programs free all their memory, unlike an interpreter, so leaks are checked too.
        env=emptied({"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", **(env or {})}),
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode != 0:
        raise AssertionError(
            f"{Path(program).name}: exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
        )
    return done


def conformance_words(buffer: str) -> list[str]:
    """What pytest is given to run the conformance suite on a buffer, "module:name"."""
    words = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-c", os.devnull, "-p", "fanin.testing.plugin"]
    return [*words, "--pyargs", "fanin.conformance", f"--fanin-buffer={buffer}"]


def conformance(buffer: str) -> subprocess.CompletedProcess[str]:
    """A run of the conformance suite on a buffer, as another engine's people run it."""
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *conformance_words(buffer)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
