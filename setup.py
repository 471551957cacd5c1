"""Build `fanin._core` from csrc/. Everything that is not about C is in pyproject.toml.

The environment selects one of three builds:

    (nothing)                             release: optimised and hardened, no asserts
    FANIN_DEV=1                           warnings are errors, asserts on, -g -O1
    FANIN_SANITIZE="address,undefined"    or "thread": the same with sanitizers, without hardening

FANIN_JOBS=n sets how many compilers run at once (default: the number of processors).
FANIN_NVCC=1 embeds machine code of the CUDA kernels for five architectures. This takes nvcc minutes; without nvcc the
build fails. Without embedded machine code, NVRTC or nvcc compiles the kernels when a device is first used
(fanin._kernels).
FANIN_URL is the repository's address, which a hosted release sets: it makes the links of README.md absolute, and gives
the package project URLs. Default: the address in the sdist, or that of the clone's remote `origin` if it is on the web.
The build omits the flags that the compiler rejects, and prints them.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("**/*.c"))
PUBLIC = "python/fanin/include"  # fanin.h, which users of the C API include, too
HEADERS = sorted(str(p.relative_to(ROOT)) for where in ("csrc", PUBLIC) for p in (ROOT / where).glob("**/*.h"))

DEV = os.environ.get("FANIN_DEV", "") not in ("", "0")
SANITIZE = os.environ.get("FANIN_SANITIZE", "").replace(" ", "")
BUILD = SANITIZE or ("dev" if DEV else "release")
NVCC = os.environ.get("FANIN_NVCC", "") not in ("", "0")


def web_address(remote: str) -> str:
    """Return the https address of a git remote, without user and password; "" if it is not on the web."""
    found = re.fullmatch(
        r"(?:https://|(?:ssh://)?git@)(?:[^/@]*@)?([\w.-]+\.\w+)(?::\d+)?[/:](\S+?)(?:\.git)?/*", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else ""


def repository() -> str:
    """Return the address of the repository: FANIN_URL, or that in the sdist, or that of the clone; "" without one."""
    if "FANIN_URL" in os.environ:
        return os.environ["FANIN_URL"].rstrip("/")
    if (ROOT / "PKG-INFO").is_file():
        found = re.search(
            r"^Project-URL: Source, (\S+)$", (ROOT / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE
        )
        return found[1] if found else ""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    done = subprocess.run(["git", "config", "--get", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True)
    return web_address(done.stdout.strip())


URL = repository()

MACROS = [
    ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
    ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
    ("FAN_BUILD", f'"{BUILD}"'),
]

# Flags of every build. Results are reproducible bit by bit: no contraction, never -ffast-math.
ALWAYS = ["-std=c11", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread"]

HARDEN = [
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=3",
    "-fstack-protector-strong",
    "-fstack-clash-protection",
    "-fcf-protection=full",
    "-ftrivial-auto-var-init=zero",
    "-fno-strict-overflow",
    "-fno-delete-null-pointer-checks",
    "-fexceptions",
]

WARN = [
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wsign-conversion",
    "-Wshadow",
    "-Wvla",
    "-Wformat=2",
    "-Wcast-align=strict",
]

#: Folder with the loops over many numbers. The release build compiles it with -O3; its files take the compiler longest.
LOOPS = "csrc/array/"

#: This file of csrc/py defines a macro before it includes py.h, so it cannot use the precompiled header.
IMPORTS_NUMPY = "csrc/py/base/state.c"
#: If at most this many files of csrc/py are out of date, they are compiled without a precompiled header.
FEW = 8

LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-pthread"]


def wanted_flags() -> tuple[list[str], list[str]]:
    """Return the flags for the compiler and for the linker, including flags that the compiler may reject."""
    if SANITIZE:
        if not set(SANITIZE.split(",")) <= {"address", "undefined", "thread"}:
            raise SystemExit(f"FANIN_SANITIZE={SANITIZE!r}: expected address, undefined or thread, joined by commas")
        # Fortify would hide calls from the sanitizers; the interpreter's own -fwrapv would hide signed overflow.
        san = [f"-fsanitize={SANITIZE}", f"-fno-sanitize-recover={SANITIZE}"]
        if SANITIZE == "thread":
            san = san[:1]  # TSAN_OPTIONS makes a report end the process instead
        return (
            [*ALWAYS, *WARN, "-Werror", "-UNDEBUG", "-DFAN_TEST=1", "-g", "-O1", "-U_FORTIFY_SOURCE"]
            + ["-fno-omit-frame-pointer", "-fno-wrapv", *san],
            [*LINK, f"-fsanitize={SANITIZE}"],
        )
    if DEV:
        # Fortify needs at least -O1.
        return (
            [*ALWAYS, *HARDEN, *WARN, "-Werror", "-UNDEBUG", "-DFAN_TEST=1", "-g", "-O1"],
            LINK,
        )
    return [*ALWAYS, *HARDEN, "-Wall", "-DNDEBUG", "-g0", "-O2"], LINK


def weight(source: str) -> tuple[bool, int]:
    """Return a sort key for the time that the compiler needs: with the longest first, all compilers end together.

    The key is True for files with loops, then the size in bytes.
    """
    return source.startswith(LOOPS), os.path.getsize(ROOT / source)


def embed_kernels(folder: Path) -> str:
    """Write device/kernels/embedded.h in `folder`: the CUDA kernels' source, and with FANIN_NVCC=1 machine code."""
    wanted = ["--nvcc"] if NVCC else []
    if wanted:
        print("fanin: nvcc compiles the CUDA kernels for each architecture, which takes minutes", flush=True)
    script, out = str(ROOT / "csrc/device/kernels/build.py"), str(folder / "device/kernels/embedded.h")
    done = subprocess.run([sys.executable, script, *wanted, out], stdout=subprocess.PIPE, text=True)
    print(f"fanin: {done.stdout.strip() or 'embedded.h is up to date'}", flush=True)
    if done.returncode and wanted:
        raise SystemExit("FANIN_NVCC=1: nvcc is missing or cannot compile the kernels, see above")
    if done.returncode:
        raise SystemExit(f"{script} failed, see above")
    return out


def declare(folder: Path) -> list[str]:
    """Write py/declared/*.h in `folder`: the declarations of csrc/py/core.pyi, as C."""
    subprocess.run([sys.executable, str(ROOT / "csrc/py/declare.py"), str(folder)], check=True)
    return sorted(str(path) for path in (folder / "py/declared").glob("*.h"))


class BuildCore(build_ext):
    """A build_ext that probes the compiler's flags, compiles in parallel, and skips objects that are up to date.

    It uses only the documented API of setuptools: the compiler's `compile`, `object_filenames`, `set_executables` and
    `link_shared_object`, and the command's `get_ext_fullpath` and `get_libraries`.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        # setuptools compares only times and would miss a changed flag, so `force` makes it link and copy in each build,
        # and `compile_sources` decides which objects are out of date.
        self.compile_all, self.force = bool(self.force), True

    def run(self) -> None:
        super().run()
        self.write_stub()

    def write_stub(self) -> None:
        """Copy the core's declarations to fanin/_core.pyi, for type checkers and editors."""
        folder = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        shutil.copyfile(ROOT / "csrc/py/core.pyi", folder / "fanin/_core.pyi")

    def build_extension(self, ext: Extension) -> None:
        import sysconfig

        import numpy

        if IMPORTS_NUMPY not in SOURCES or not any(source.startswith(LOOPS) for source in SOURCES):
            raise SystemExit(f"{IMPORTS_NUMPY} or {LOOPS} is missing: this copy of the sources is incomplete")
        self.probe = list(self.compiler.compiler_so)
        # Some interpreters were linked with an -rpath, which the library must not inherit.
        linker = [a for a in self.compiler.linker_so if not a.startswith("-Wl,-rpath")]
        self.compiler.set_executables(linker_so=linker)
        compile_flags, link_flags = wanted_flags()
        # The compiler prints no warnings for system headers, so the headers of Python and NumPy are included as such.
        for folder in (sysconfig.get_path("include"), numpy.get_include()):
            compile_flags += ["-isystem", folder]
        options = {
            "output_dir": self.build_temp,
            "macros": [*ext.define_macros, ("FAN_EMBEDDED", "1")],
            "include_dirs": [*ext.include_dirs, self.build_temp],
            "debug": self.debug,
        }
        flags = self.accepted(compile_flags, link=False)
        temp = Path(self.build_temp)
        depends = [*ext.depends, embed_kernels(temp), *declare(temp), __file__]
        self.compiler.link_shared_object(
            self.compile_sources(ext.sources, options, flags, depends),
            self.get_ext_fullpath(ext.name),
            libraries=self.get_libraries(ext),
            extra_postargs=self.accepted(link_flags, link=True),
            debug=self.debug,
            build_temp=self.build_temp,
            target_lang="c",
        )

    def accepted(self, flags: list[str], *, link: bool) -> list[str]:
        """Return the flags that the compiler accepts: try all at once and, if that fails, one by one."""
        if self.accepts(flags, link=link):
            return flags
        kept: list[str] = []
        refused: list[str] = []
        at = 0
        while at < len(flags):
            width = 2 if flags[at] == "-isystem" else 1
            one = flags[at : at + width]
            (kept if self.accepts(one, link=link) else refused).extend(one)
            at += width
        must = [f for f in refused if f.startswith(("-std", "-ffp-contract", "-fsanitize"))]
        if must:
            raise SystemExit(f"the compiler ({' '.join(self.probe)}) rejects {' '.join(must)}, which fanin needs")
        if refused:
            print(f"fanin: omitted flags that the compiler rejects: {' '.join(refused)}", flush=True)
        return kept

    def accepts(self, flags: list[str], *, link: bool) -> bool:
        # Fortify needs optimisation; clang rejects an unknown flag only with -Werror.
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("int fan_probe(int x);\nint fan_probe(int x) { return x; }\n")
            mode = ["-shared", "-fPIC"] if link else ["-c"]
            command = [*self.probe, "-O1", "-Werror", *flags, *mode, str(source)]
            done = subprocess.run([*command, "-o", str(Path(folder, "probe.out"))], capture_output=True)
            return done.returncode == 0

    def precompiled(self, options: dict[str, Any], flags: list[str]) -> list[str]:
        """Precompile py.h and return the flags that make a file of csrc/py include the result first.

        Python's headers take the compiler as long as the rest of such a file. Return no flags if the compiler cannot
        precompile, or is run by ccache, which could not cache objects that depend on a precompiled header.
        """
        if any(Path(word).name == "ccache" for word in self.probe):
            return []
        header = Path(self.build_temp, "py.h")
        source = Path(self.build_temp, "precompiled.c")
        header.write_text('#include "py/base/py.h"\n')
        source.write_text('#include "py/base/py.h"\n')
        try:
            [made] = self.compiler.compile(
                [str(source)], extra_preargs=["-x", "c-header"], extra_postargs=flags, **options
            )
        except CompileError:
            return []
        os.replace(made, f"{header}.gch")
        return ["-include", str(header)]

    def compile_sources(
        self, sources: list[str], options: dict[str, Any], flags: list[str], depends: list[str]
    ) -> list[str]:
        """Compile the sources whose objects are out of date, several at a time; return the names of all objects.

        An object depends on its source, on each of `depends` (all headers, and this file), and on the flags.
        """
        stamp = Path(self.build_temp, "fanin-flags.json")
        stamped = json.dumps([self.probe, options, self.include_dirs, flags], indent=0)
        all_stale = self.compile_all or not stamp.exists() or stamp.read_text() != stamped
        newest = max(os.path.getmtime(name) for name in depends)

        def fresh(source: str) -> bool:
            [made] = self.compiler.object_filenames([source], output_dir=self.build_temp)
            if all_stale or not os.path.exists(made):
                return False
            return os.path.getmtime(made) > max(newest, os.path.getmtime(source))

        stale = sorted((source for source in sources if not fresh(source)), key=weight, reverse=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)  # written after the last object, so that a failed build starts over
        more = {source: ["-O3"] if BUILD == "release" and source.startswith(LOOPS) else [] for source in stale}
        python = [source for source in stale if source.startswith("csrc/py/") and source != IMPORTS_NUMPY]
        if len(python) > FEW:
            more |= dict.fromkeys(python, self.precompiled(options, flags))

        def compile_one(source: str) -> None:
            self.compiler.compile([source], extra_postargs=[*flags, *more[source]], **options)

        jobs = int(os.environ.get("FANIN_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            list(pool.map(compile_one, stale))
        stamp.write_text(stamped)
        return self.compiler.object_filenames(sources, output_dir=self.build_temp)


class SameSdist(sdist):
    """sdist whose archive depends only on the sources and on SOURCE_DATE_EPOCH, the time of all files."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        time = int(os.environ.get("SOURCE_DATE_EPOCH") or 315532800)  # 1980, the earliest time in a zip file

        def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime, info.mode = time, 0o755 if info.isdir() or info.mode & 0o100 else 0o644
            return info

        name, top = f"{base_name}.tar.gz", Path(base_dir or ".")
        with (
            open(name, "wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, time) as packed,
            tarfile.open(mode="w", fileobj=packed, format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in [top, *sorted(top.rglob("*"))]:
                archive.add(path, recursive=False, filter=plain)
        return name


if not sys.platform.startswith(("linux", "darwin")):
    raise SystemExit(
        f"fanin builds on Linux (tested) and macOS (untested), not on {sys.platform}: "
        "its C core needs POSIX threads and a GCC-like compiler."
    )


def readme() -> str:
    """Return the text of README.md; if URL is set, with absolute links, which also work on a package index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if URL:
        text = re.sub(r"\]\((?!https://|#)(?=[^)]*\.svg\))", f"]({URL}/raw/main/", text)
        text = re.sub(r"\]\((?!https://|#)", f"]({URL}/blob/main/", text)
    return text


def urls() -> dict[str, str]:
    if not URL:
        return {}
    changes = f"{URL}/blob/main/CHANGELOG.md"
    return {"Homepage": URL, "Documentation": f"{URL}/tree/main/docs", "Source": URL, "Changelog": changes}


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    # Old setuptools reject `license = "..."` in pyproject.toml, and `pip show` of pip 24 shows no license_expression.
    license="BSD-3-Clause AND CC-BY-4.0",  # the digits
    url=URL or None,
    project_urls=urls(),
    ext_modules=[
        Extension(
            "fanin._core",
            sources=SOURCES,
            include_dirs=["csrc", PUBLIC],
            define_macros=MACROS,
            depends=HEADERS,
            language="c",
        ),
    ],
    cmdclass={"build_ext": BuildCore, "sdist": SameSdist},
)
