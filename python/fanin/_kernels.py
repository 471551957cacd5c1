"""Compiles the CUDA kernels with NVRTC for a device for which the build embedded none, and keeps them on disk.

The core calls `image` when a device is first used and has no kernels: fanin was built without nvcc, or this driver is
older than the nvcc that built it. The source is the one that was embedded at build, so it always fits the core.
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
from collections.abc import Iterator
from pathlib import Path

from . import _core
from .errors import DeviceError

__all__: list[str] = []

#: Results are promised bit by bit: nothing is contracted or flushed. build.py gives nvcc the same.
OPTIONS = ("--fmad=false", "--ftz=false", "--std=c++17", "--device-as-default-execution-space")
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
#: How much of a compiler's log an error has.
LOG = 600
#: A file of the cache that is not renamed after so many seconds was left by a process that ended.
LEFT_BEHIND = 3600


class Nvrtc:
    """An open libnvrtc."""

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

    def compile(self, sources: dict[str, str], options: list[str], cubin: bool) -> bytes:
        """The CUBIN, or the PTX, of kernels.cu. OSError with the compiler's log if it does not compile."""
        headers = {**HEADERS, **sources}
        text = headers.pop("device/kernels/kernels.cu")
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
                raise OSError(f"{e}: {log[:LOG]}") from None
            return self._text("nvrtcGetCUBIN" if cubin else "nvrtcGetPTX", program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def _strings(texts: object) -> object:
    encoded = [str(t).encode() for t in texts]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def places() -> Iterator[str]:
    """Paths and names under which libnvrtc may be: NVIDIA's wheels, the CUDA toolkit, the loader's own folders."""
    for folder in sys.path:
        yield from map(str, Path(folder, "nvidia").glob("*/lib/libnvrtc.so.*"))
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    yield from (str(toolkit / f"{lib}/libnvrtc.so") for lib in ("lib64", "lib"))
    yield from (f"libnvrtc.so.{version}" for version in ("13", "12", "11.2"))


def found() -> list[Nvrtc]:
    """Each libnvrtc that opens, one for each version."""
    versions: dict[tuple[int, int], Nvrtc] = {}
    for path in places():
        with contextlib.suppress(OSError, AttributeError):  # missing, or older than nvrtcGetSupportedArchs
            nvrtc = Nvrtc(path)
            versions.setdefault(nvrtc.version, nvrtc)
    return list(versions.values())


def _dotted(compute: int) -> str:
    return f"{compute // 10}.{compute % 10}"


def target(nvrtc: Nvrtc, compute: int) -> str:
    """The architecture to compile for: sm_90 if NVRTC knows the device, compute_90 (PTX) for a later one, "" for one
    that is too old."""
    if compute in nvrtc.archs:
        return f"sm_{compute}"
    older = [a for a in nvrtc.archs if a < compute]
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


def compiled(nvrtc: Nvrtc, arch: str) -> tuple[bytes, str]:
    """The kernels for `arch`, from the cache or compiled, and words for `fanin.info`."""
    source = _core.kernels_source()
    options = [f"--gpu-architecture={arch}", *OPTIONS]
    version = ".".join(map(str, nvrtc.version))
    words = f"{arch} by NVRTC {version}"
    key = hashlib.sha256(json.dumps([version, options, HEADERS]).encode() + source).hexdigest()
    try:
        path = folder() / f"{arch}-{key[:32]}"
    except RuntimeError:
        path = None
    code = read(path) if path else None
    if code is not None:
        return code, words
    code = nvrtc.compile(json.loads(zlib.decompress(source)), options, arch.startswith("sm_"))
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
    # Code of a compiler of a later major version than the driver's is refused; so such a compiler comes last.
    compilers = sorted(found(), key=lambda n: (n.version[0] <= major or not major, n.version), reverse=True)
    why = []
    for nvrtc in compilers:
        name = f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} ({nvrtc.path})"
        arch = target(nvrtc, compute)
        if not arch:
            why.append(f"{name} compiles for compute {_dotted(nvrtc.archs[0])} and later")
            continue
        try:
            return compiled(nvrtc, arch)
        except OSError as e:
            why.append(f"{name}: {e}")
    extra = "cuda12" if 0 < major < 13 else "cuda"
    raise DeviceError(
        f"{refused}. NVRTC would compile them for this device (compute {_dotted(compute)}): pip install fanin[{extra}];"
        " or build fanin where nvcc is: FANIN_NVCC=1 pip install --no-binary fanin fanin. "
        + "; ".join(why or ["No libnvrtc was found"])
    )
