"""Builds `fanin._core` from csrc/.  What is not about C stands in pyproject.toml.

Three builds, chosen by the environment:

    (nothing)                             release: optimised and hardened, no asserts
    FANIN_DEV=1                           warnings are errors, asserts on, -g -O1
    FANIN_SANITIZE="address,undefined"    or "thread": the same with sanitizers, without hardening

FANIN_JOBS=n sets how many compilers run at once (default: the processors at hand).
FANIN_NVCC=1 embeds machine code of the CUDA kernels for five architectures, which takes nvcc minutes, and fails without
nvcc. Without machine code NVRTC or nvcc compiles them for the device in use, when it is first used (fanin._kernels).
FANIN_URL, the repository's address, which a hosted release sets: links of README.md become absolute, and the package
has project URLs. Default: that of the sdist, or of the clone's remote `origin`, if it is on the web.
The build prints which flags the compiler refuses, and leaves them out.
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

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").glob("**/*.c"))
PUBLIC = "python/fanin/include"  # fanin.h, which others include, too
HEADERS = sorted(str(p.relative_to(ROOT)) for where in ("csrc", PUBLIC) for p in (ROOT / where).glob("**/*.h"))

DEV = os.environ.get("FANIN_DEV", "") not in ("", "0")
SANITIZE = os.environ.get("FANIN_SANITIZE", "").replace(" ", "")
BUILD = SANITIZE or ("dev" if DEV else "release")
NVCC = os.environ.get("FANIN_NVCC", "") not in ("", "0")


def web_address(remote: str) -> str:
    """The https address of a remote of git, without user and password; "" of one that is not on the web."""
    found = re.fullmatch(
        r"(?:https://|(?:ssh://)?git@)(?:[^/@]*@)?([\w.-]+\.\w+)(?::\d+)?[/:](\S+?)(?:\.git)?/*", remote
    )
    return f"https://{found[1]}/{found[2]}" if found else ""


def repository() -> str:
    """The address of the repository: FANIN_URL, that of the sdist, or that of the clone; "" if there is none."""
    if "FANIN_URL" in os.environ:
        return os.environ["FANIN_URL"].rstrip("/")
    if (ROOT / "PKG-INFO").is_file():
        found = re.search(
            r"^Project-URL: Source, (\S+)$", (ROOT / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE
        )
        return found[1] if found else ""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    asked = subprocess.run(["git", "config", "--get", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True)
    return web_address(asked.stdout.strip())


URL = repository()

MACROS = [
    ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
    ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
    ("FAN_BUILD", f'"{BUILD}"'),
]

# The same in every build.  Results are promised bit by bit: no contraction, never -ffast-math.
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

#: Files with loops over many numbers, whose speed is worth what -O3 costs. They take the compiler longest.
LOOPS = {f"csrc/array/{name}.c" for name in ("exact_loops", "sum_avx2", "sum_avx512", "sum_base", "convert", "reduce")}
LOOPS |= {f"csrc/array/{name}.c" for name in ("exact", "sparse", "sum", "superacc")}

#: The file of csrc/py that defines a macro before it includes py.h.
IMPORTS_NUMPY = "csrc/py/base/state.c"
#: For so few files of csrc/py the header is not compiled by itself.
FEW = 8

LINK = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-pthread"]


def wanted_flags() -> tuple[list[str], list[str]]:
    """What we would like to say to the compiler and to the linker."""
    if SANITIZE:
        if not set(SANITIZE.split(",")) <= {"address", "undefined", "thread"}:
            raise SystemExit(f"FANIN_SANITIZE={SANITIZE!r}: expected address, undefined or thread, joined by commas")
        # Fortify would hide the calls that the sanitizers watch; the interpreter's own -fwrapv would
        # hide signed overflow.
        san = [f"-fsanitize={SANITIZE}", f"-fno-sanitize-recover={SANITIZE}"]
        if SANITIZE == "thread":
            san = san[:1]  # reports end the process by TSAN_OPTIONS instead
        return (
            [*ALWAYS, *WARN, "-Werror", "-UNDEBUG", "-DFAN_TEST=1", "-g", "-O1", "-U_FORTIFY_SOURCE"]
            + ["-fno-omit-frame-pointer", "-fno-wrapv", *san],
            [*LINK, f"-fsanitize={SANITIZE}"],
        )
    if DEV:
        # Fortify wants at least -O1, which the development build has.
        return (
            [*ALWAYS, *HARDEN, *WARN, "-Werror", "-UNDEBUG", "-DFAN_TEST=1", "-g", "-O1"],
            LINK,
        )
    return [*ALWAYS, *HARDEN, "-Wall", "-DNDEBUG", "-g0", "-O2"], LINK


def weight(source: str) -> tuple[bool, int]:
    """How long the compiler takes, roughly: the longest files come first, so that all compilers end together."""
    return source in LOOPS, os.path.getsize(ROOT / source)


def embed_kernels(folder: Path) -> str:
    """Writes device/kernels/embedded.h in `folder`: the CUDA kernels' source, and with FANIN_NVCC=1 machine code."""
    wanted = ["--nvcc"] if NVCC else []
    if wanted:
        print("fanin: nvcc compiles the CUDA kernels for each architecture, which takes minutes", flush=True)
    script, out = str(ROOT / "csrc/device/kernels/build.py"), str(folder / "device/kernels/embedded.h")
    done = subprocess.run([sys.executable, script, *wanted, out], stdout=subprocess.PIPE, text=True)
    print(f"fanin: {done.stdout.strip() or 'embedded.h is as it should be'}", flush=True)
    if done.returncode and wanted:
        raise SystemExit("FANIN_NVCC=1: nvcc is missing or refuses the kernels, see above")
    if done.returncode:
        raise SystemExit(f"{script} failed, see above")
    return out


def declare(folder: Path) -> list[str]:
    """Writes py/declared/*.h in `folder`: what csrc/py/core.pyi declares, as C."""
    subprocess.run([sys.executable, str(ROOT / "csrc/py/declare.py"), str(folder)], check=True)
    return sorted(str(path) for path in (folder / "py/declared").glob("*.h"))


class BuildCore(build_ext):
    """build_ext that asks the compiler first, compiles in parallel, and knows the headers."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # setuptools looks at times alone and would miss changed flags: compile_parallel knows what is stale.
        self.anew, self.force = bool(self.force), True

    def run(self) -> None:
        super().run()
        self.write_stub()

    def write_stub(self) -> None:
        """Copy the core's declarations beside it: type checkers and editors read fanin/_core.pyi."""
        folder = ROOT / "python" if self.inplace else Path(self.build_lib).resolve()
        shutil.copyfile(ROOT / "csrc/py/core.pyi", folder / "fanin/_core.pyi")

    def build_extension(self, ext: Extension) -> None:
        import sysconfig

        import numpy

        missing = sorted({*LOOPS, IMPORTS_NUMPY} - set(SOURCES))
        if missing:
            raise SystemExit(f"csrc/ lacks {', '.join(missing)}: this is not a whole copy of the sources")
        self.probe = list(self.compiler.compiler_so)
        # Some interpreters were linked with an -rpath of their own: it has no business in our library.
        self.compiler.linker_so = [a for a in self.compiler.linker_so if not a.startswith("-Wl,-rpath")]
        compile_flags, link_flags = wanted_flags()
        # Other people's headers are not ours to warn about.
        for folder in (sysconfig.get_path("include"), numpy.get_include()):
            compile_flags += ["-isystem", folder]
        ext.extra_compile_args = self.accepted(compile_flags, link=False)
        ext.extra_link_args = self.accepted(link_flags, link=True)
        ext.depends = [*ext.depends, embed_kernels(Path(self.build_temp)), *declare(Path(self.build_temp))]
        ext.define_macros = [*ext.define_macros, ("FAN_EMBEDDED", "1")]
        ext.include_dirs = [*ext.include_dirs, self.build_temp]
        self.compiler.compile = self.compile_parallel
        super().build_extension(ext)

    def accepted(self, flags: list[str], *, link: bool) -> list[str]:
        """The flags that the compiler takes: all at once, or, where it refuses, one by one."""
        if self.takes(flags, link=link):
            return flags
        kept: list[str] = []
        refused: list[str] = []
        at = 0
        while at < len(flags):
            width = 2 if flags[at] == "-isystem" else 1
            one = flags[at : at + width]
            (kept if self.takes(one, link=link) else refused).extend(one)
            at += width
        must = [f for f in refused if f.startswith(("-std", "-ffp-contract", "-fsanitize"))]
        if must:
            raise SystemExit(
                f"this compiler ({' '.join(self.probe)}) refuses {' '.join(must)}, without which fanin is not built"
            )
        if refused:
            print(f"fanin: left out, the compiler refuses them: {' '.join(refused)}", flush=True)
        return kept

    def takes(self, flags: list[str], *, link: bool) -> bool:
        # Fortify says nothing without optimisation; -Werror makes "unknown flag" a refusal in clang.
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text("int fan_probe(int x);\nint fan_probe(int x) { return x; }\n")
            mode = ["-shared", "-fPIC"] if link else ["-c"]
            command = [*self.probe, "-O1", "-Werror", *flags, *mode, str(source)]
            done = subprocess.run([*command, "-o", str(Path(folder, "probe.out"))], capture_output=True)
            return done.returncode == 0

    def precompiled(self, flags: list[str]) -> list[str]:
        """The flags by which a file of csrc/py begins with py.h as the compiler has read it already.

        Python's own headers take the compiler as long as the text of such a file. None where the compiler cannot, and
        with ccache, which would cache nothing.
        """
        if any(Path(word).name == "ccache" for word in self.probe):
            return []
        header = Path(self.build_temp, "py.h")
        header.write_text('#include "py/base/py.h"\n')
        command = [*self.probe, *flags, "-x", "c-header", str(header), "-o", f"{header}.gch"]
        done = subprocess.run(command, capture_output=True)
        return ["-include", str(header)] if done.returncode == 0 else []

    def compile_parallel(
        self,
        sources,
        output_dir=None,
        macros=None,
        include_dirs=None,
        debug=0,
        extra_preargs=None,
        extra_postargs=None,
        depends=None,
    ):
        """CCompiler.compile, several files at a time; a file is skipped that has not changed."""
        compiler = self.compiler
        macros, objects, post, pp_opts, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
        # What an object depends on: its source, every header, this file, and the flags.
        stamp = Path(output_dir or ".", "fanin-flags.json")
        says = json.dumps([list(compiler.compiler_so), cc_args, post], indent=0)
        stale = self.anew or not stamp.exists() or stamp.read_text() != says
        newest = max(os.path.getmtime(name) for name in [*(depends or []), __file__])

        def fresh(obj: str, src: str) -> bool:
            if stale or not os.path.exists(obj):
                return False
            return os.path.getmtime(obj) > max(newest, os.path.getmtime(src))

        todo = [(obj, *build[obj]) for obj in objects if obj in build and not fresh(obj, build[obj][0])]
        todo.sort(key=lambda one: weight(one[1]), reverse=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)  # written when all is built: a build that failed is done again
        jobs = int(os.environ.get("FANIN_JOBS") or os.cpu_count() or 1)
        more = {src: ["-O3"] if BUILD == "release" and src in LOOPS else [] for _, src, _ in todo}
        python = [src for src in more if src.startswith("csrc/py/") and src != IMPORTS_NUMPY]
        if len(python) > FEW:
            more |= dict.fromkeys(python, self.precompiled([*cc_args, *post]))
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            work = [
                pool.submit(compiler._compile, obj, src, suffix, cc_args, [*post, *more[src]], pp_opts)
                for obj, src, suffix in todo
            ]
            for one in work:
                one.result()
        stamp.write_text(says)
        return objects


class SameSdist(sdist):
    """sdist whose archive depends on the sources alone, and on SOURCE_DATE_EPOCH, the time of all files."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        time = int(os.environ.get("SOURCE_DATE_EPOCH") or 315532800)  # 1980, where a zip file's time begins

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
        f"fanin is built on Linux (tested) and macOS (untested), not on {sys.platform}: "
        "its C core uses POSIX threads and a GCC-like compiler."
    )


def readme() -> str:
    """README.md; with an address, its links hold on a package index, too."""
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
    # Old setuptools reject pyproject's `license = "..."`, and `pip show` of pip 24 shows no license_expression.
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
