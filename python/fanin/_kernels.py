"""Compiles the CUDA kernels for a device for which the build embedded none, by NVRTC or nvcc, and keeps them on disk.

The core calls `image` when a device is first used and has no kernels: the build embedded no machine code, as is usual,
or this driver refuses what it embedded. The source is the one that was embedded at build, so it always fits the core.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from . import _core, _nvcc
from .errors import DeviceError

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__: list[str] = []

#: NVRTC has no C library; these are the names of it that the kernels use.
HEADERS = {
    "stdint.h": """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define INT64_C(x) x##L
#define UINT64_C(x) x##UL
#define UINT32_C(x) x##U
#define UINT64_MAX 0xffffffffffffffffUL
#define INT64_MAX 0x7fffffffffffffffL
#define INT64_MIN (-INT64_MAX - 1)
""",
    **dict.fromkeys(("stddef.h", "stdbool.h", "string.h", "math.h"), ""),
}
#: Images that come with a driver, by the real path of its library: the fake driver's.
IMAGES: dict[str, bytes] = {}
#: The lowest compute capability for which kernels.cu is written.
LOWEST = 75
#: A file of the cache that is not renamed after so many seconds was left by a process that ended.
LEFT_BEHIND = 3600


class Compiler(Protocol):
    """What Nvrtc and Nvcc share."""

    name: str
    path: str
    version: tuple[int, int]
    #: The architectures for which it makes machine code, in ascending order: 90 is sm_90.
    archs: list[int]
    options: tuple[str, ...]

    def compile(self, sources: Mapping[str, str], arch: str) -> bytes:
        """The CUBIN for "sm_90", the PTX for "compute_90". OSError with the compiler's messages if it fails."""


class Nvrtc:
    """An open libnvrtc."""

    name = "NVRTC"
    options: tuple[str, ...] = (*_nvcc.EXACT, "--device-as-default-execution-space")

    def __init__(self, path: str) -> None:
        # NVRTC opens libnvrtc-builtins by its bare name, which the loader finds only if it is open already.
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so*") if "/" in path else ():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
        self._lib = ctypes.CDLL(path)
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        self.path, self.version, self.archs = path, (major.value, minor.value), sorted(archs)

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise OSError(f"{name} failed: {self._lib.nvrtcGetErrorString(code).decode()}")

    def _text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(name, program, text)
        return text.raw

    def compile(self, sources: Mapping[str, str], arch: str) -> bytes:
        """As `Compiler.compile`."""
        headers = {**HEADERS, **sources}
        text = headers.pop(_nvcc.KERNELS)
        options = [f"--gpu-architecture={arch}", *self.options]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernels.cu", len(headers),
            _strings(headers.values()), _strings(headers),
        )  # fmt: skip
        try:
            try:
                self._call("nvrtcCompileProgram", program, len(options), _strings(options))
            except OSError as e:
                log = self._text("nvrtcGetProgramLog", program).decode(errors="replace")
                raise OSError(f"{e}: {log[: _nvcc.LOG]}") from None
            return self._text("nvrtcGetCUBIN" if arch.startswith("sm_") else "nvrtcGetPTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def _strings(texts: object) -> object:
    encoded = [str(t).encode() for t in texts]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def places() -> Iterator[str]:
    """Paths and names under which libnvrtc may be: NVIDIA's wheels, the CUDA toolkit, the loader's own folders."""
    for folder in sys.path:
        yield from map(str, Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*"))
    yield from (str(_nvcc.toolkit() / f"{lib}/libnvrtc.so") for lib in ("lib64", "lib"))
    yield from (f"libnvrtc.so.{version}" for version in ("13", "12", "11.2"))


def found() -> list[Nvrtc]:
    """Each libnvrtc that opens, one for each version."""
    versions: dict[tuple[int, int], Nvrtc] = {}
    for path in places():
        with contextlib.suppress(OSError, AttributeError):  # missing, or older than nvrtcGetSupportedArchs
            nvrtc = Nvrtc(path)
            versions.setdefault(nvrtc.version, nvrtc)
    return list(versions.values())


def compilers(major: int, why: list[str]) -> Iterator[Compiler]:
    """The compilers, the best first; `why` gets the reason of an nvcc that does not answer.

    Code of a compiler of a later major version than the driver's is refused, so such a compiler comes last. NVRTC comes
    before nvcc, which needs a C compiler and seconds more: where an NVRTC serves, nvcc is not even run.
    """

    def fits(compiler: Compiler) -> bool:
        return not major or compiler.version[0] <= major

    libraries = sorted(found(), key=lambda n: n.version, reverse=True)
    yield from (n for n in libraries if fits(n))
    rest: list[Compiler] = [n for n in libraries if not fits(n)]
    if path := _nvcc.find():
        try:
            rest.append(_nvcc.Nvcc(path))
        except OSError as e:
            why.append(f"nvcc ({path}): {e}")
    yield from sorted(rest, key=lambda n: (fits(n), n.version), reverse=True)


def _dotted(compute: int) -> str:
    return f"{compute // 10}.{compute % 10}"


def target(compiler: Compiler, compute: int) -> str:
    """The architecture to compile for: sm_90 if the compiler knows the device, compute_90 (PTX) for a later one, ""
    for one that is too old."""
    if compute in compiler.archs:
        return f"sm_{compute}"
    older = [a for a in compiler.archs if a < compute]
    return f"compute_{older[-1]}" if older else ""


def folder() -> Path:
    """Where compiled kernels are kept. RuntimeError if there is no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fanin" / "kernels"


def read(path: Path) -> bytes | None:
    """What `write` kept; None if there is nothing, or it is damaged: the file begins with the hash of what follows."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[32:]
    return code if hashlib.sha256(code).digest() == data[:32] else None


def write(path: Path, code: bytes) -> None:
    """Keep `code` whole or not at all, also while other processes write the same file. OSError if it cannot be kept."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in path.parent.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > LEFT_BEHIND:
                old.unlink()
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def announce(words: str, kept: Path | None) -> None:
    """One line on stderr before a compilation, which takes from ten seconds to a minute. FANIN_QUIET=1: none."""
    if os.environ.get("FANIN_QUIET", "") not in ("", "0"):
        return
    often = f"once; kept in {kept}" if kept else "in each process: there is no home folder to keep them"
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is closed
        sys.stderr.write(f"fanin: compiling the CUDA kernels for {words} ({often})\n")
        sys.stderr.flush()


def compiled(compiler: Compiler, arch: str) -> tuple[bytes, str]:
    """The kernels for `arch`, from the cache or compiled, and words for `fanin.info`."""
    source = _core.kernels_source()
    version = ".".join(map(str, compiler.version))
    words = f"{arch} by {compiler.name} {version}"
    made_by = [compiler.name, version, arch, compiler.options, HEADERS]
    key = hashlib.sha256(json.dumps(made_by).encode() + source).hexdigest()
    try:
        path = folder() / f"{arch}-{key[:32]}"
    except RuntimeError:
        path = None
    code = read(path) if path else None
    if code is not None:
        return code, words
    announce(words, path.parent if path else None)
    code = compiler.compile(json.loads(zlib.decompress(source)), arch)
    try:
        if path:
            write(path, code)
    except OSError as e:
        words += f", not kept: {e.strerror}"
    return code, words


def image(driver: str, version: int, compute: int, refused: str) -> tuple[bytes, str]:
    """Kernels that `driver` takes for a device, and words for `fanin.info`. DeviceError says what to install.

    `version` is the driver's (12040: CUDA 12.4), `compute` the device's compute capability (89: 8.9), `refused` why
    the device has none so far.
    """
    if ready := IMAGES.get(os.path.realpath(driver)):
        return ready, f"{driver}'s own"
    if compute < LOWEST:
        raise DeviceError(f"{refused}. The kernels need compute 7.5 or later, and this device is {_dotted(compute)}")
    major = version // 1000
    why: list[str] = []
    for compiler in compilers(major, why):
        name = f"{compiler.name} {compiler.version[0]}.{compiler.version[1]} ({compiler.path})"
        arch = target(compiler, compute)
        if not arch:
            least = f"compute {_dotted(compiler.archs[0])} and later" if compiler.archs else "no device"
            why.append(f"{name} compiles for {least}")
            continue
        try:
            return compiled(compiler, arch)
        except OSError as e:
            why.append(f"{name}: {e}")
    extra = "cuda12" if 0 < major < 13 else "cuda"
    toolkit = f"CUDA toolkit, version {major} or earlier" if major else "CUDA toolkit"
    raise DeviceError(
        f"{refused}. NVRTC or nvcc would compile them for this device (compute {_dotted(compute)}): pip install"
        f" fanin[{extra}] brings NVRTC, and nvcc is part of the {toolkit} (name it by NVCC, CUDA_HOME or PATH). "
        + "; ".join(why or ["No libnvrtc and no nvcc was found"])
    )
