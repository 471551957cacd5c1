"""What nvcc or NVRTC makes of the kernels, read without NVIDIA's disassembler: instructions for 16 bytes of a source.

python tests/kit/machine_code.py prints the table of docs/performance.md, for sm_90. Each instruction has 16 bytes; the
last 12 bits of its first word are its operation. A loop is what lies between a backward branch and its target.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from fanin import _kernels, _nvcc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc/device/kernels"))

import build  # type: ignore[import-not-found]  # noqa: E402

LOAD, BRANCH = 0x981, 0x947
#: Bits 73 to 75 of a load are its width: 6 means 16 bytes.
SIXTEEN = 6
#: The most instructions for 16 bytes of a source that a fold may take.
BOUNDS = {"float16": 20, "bfloat16": 30, "e4m3fn": 60, "e5m2": 60, "single": 10, "doubled": 14, "twice": 8}
#: Where ptxas begins with the first of four reads before the last of them is begun.
FEWER_AHEAD = {"e4m3fn"}
#: Before the loads were grouped and the hardware's conversions used.
BEFORE = {
    "float16": 155.5,
    "bfloat16": 27.5,
    "e4m3fn": 293,
    "e5m2": 293,
    "single": 9.2,
    "doubled": 13.2,
    "twice": 7.2,
}


def compilers() -> list[str]:
    """Which of "nvcc" and "NVRTC" are at hand."""
    return [*(["nvcc"] if _nvcc.find() else []), *(["NVRTC"] if _kernels.found() else [])]


def compiled(compiler: str, arch: str) -> bytes:
    """The kernels for "sm_90", or as PTX for "compute_75"."""
    path = _nvcc.find()
    by = _nvcc.Nvcc(path) if compiler == "nvcc" and path else _kernels.found()[0]
    return by.compile(build.sources(), arch)


def ptx(compiler: str) -> str:
    """The PTX for the oldest GPUs that the kernels are for."""
    return compiled(compiler, "compute_75").decode().rstrip("\0")


def cubin(compiler: str) -> bytes:
    """Machine code for sm_90."""
    return compiled(compiler, "sm_90")


def texts(code: bytes) -> dict[str, list[tuple[int, int]]]:
    """The instructions of each kernel: two words each."""
    offset, size, count, names = *struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HHH", code, 58)
    heads = [struct.unpack_from("<IIQQQQ", code, offset + i * size) for i in range(count)]
    table = heads[names][4]
    found = {}
    for name, _, _, _, at, length in heads:
        end = code.index(b"\0", table + name)
        called = code[table + name : end].decode()
        if called.startswith(".text.fan_"):
            found[called.removeprefix(".text.")] = [
                struct.unpack_from("<QQ", code, at + i) for i in range(0, length, 16)
            ]
    return found


@dataclass(frozen=True)
class Loop:
    """A loop: how many instructions it has, and how many of them read 16 bytes."""

    instructions: int
    loads: int
    #: Such reads that are begun before the first instruction that takes what one of them read.
    in_flight: int


def ahead(text: list[tuple[int, int]]) -> int:
    """How many reads of 16 bytes come before one of them is used: bits 24 to 39 and 64
    to 71 name what an instruction takes."""
    begun: set[int] = set()
    count = 0
    for low, high in text:
        load = low & 0xFFF == LOAD
        if begun & ({low >> 24 & 0xFF} if load else {low >> 24 & 0xFF, low >> 32 & 0xFF, high & 0xFF}):
            break
        if load and high >> 9 & 7 == SIXTEEN:
            count += 1
            begun |= set(range(low >> 16 & 0xFF, (low >> 16 & 0xFF) + 4))
    return count


def loops(text: list[tuple[int, int]]) -> list[Loop]:
    """The innermost loops that read 16 bytes at a time."""
    found: list[tuple[int, int]] = []
    for i, (low, high) in enumerate(text):
        if low & 0xFFF == BRANCH:
            jump = low >> 16 & 0xFF | (low >> 34) << 8 | (high & 0x3FFFF) << 38
            jump -= (jump >> 55 & 1) << 56  # in words of 4 bytes
            target = i + 1 + jump // 4
            if target <= i and not any(a >= target for a, _ in found):
                found.append((target, i + 1))
    made = []
    for begin, end in found:
        places = [i for i in range(begin, end) if text[i][0] & 0xFFF == LOAD and text[i][1] >> 9 & 7 == SIXTEEN]
        if places:
            made.append(Loop(end - begin, len(places), ahead(text[begin:end])))
    return made


def table(code: bytes) -> dict[str, Loop]:
    """Of each fold the loop over its sources."""
    kernels = texts(code)
    return {k: loops(kernels[f"fan_fold_{k}"])[0] for k in BOUNDS if f"fan_fold_{k}" in kernels}


def main() -> None:
    print("| numbers | before | now | at most |\n|---|---|---|---|")
    for kind, loop in table(cubin(compilers()[0])).items():
        print(f"| `{kind}` | {BEFORE[kind]} | {loop.instructions / loop.loads:.1f} | {BOUNDS[kind]} |")


if __name__ == "__main__":
    main()
