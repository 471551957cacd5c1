"""What nvcc makes of the kernels for sm_90, read without NVIDIA's disassembler: instructions for 16 bytes of a source.

python tests/kit/machine_code.py [--ptx | --newer | --registers] prints the table of docs/performance.md. With --ptx it
is of the kept PTX, as ptxas compiles it for sm_90: that is what a driver makes of it; with --newer of the second one,
which has a few kernels. With --registers it is what ptxas says of each kernel of both (benchmarks/results). Each
instruction has 16 bytes; of its first word the last 12 bits say what it does. A loop is what lies between a backward
branch and its target.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc/device/kernels"))

LOAD, BRANCH = 0x981, 0x947
#: Bits 73 to 75 of a load say how much: 6 is 16 bytes.
SIXTEEN = 6
#: The most instructions for 16 bytes of a source that a fold may take.
BOUNDS = {"float16": 20, "bfloat16": 30, "e4m3fn": 60, "e5m2": 60, "single": 10, "doubled": 14, "twice": 8}
#: Of the kept PTX, which has no conversion of float8_e4m3fn by the hardware: the second one has.
PTX_BOUNDS = {**BOUNDS, "e4m3fn": 100}
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


def tools() -> Any:
    """build.py, if nvcc is at hand."""
    import build  # type: ignore[import-not-found]

    return build if build.nvcc() else None


def kept_texts() -> tuple[str, str]:
    """The kept PTX, and the second one."""
    import build  # type: ignore[import-not-found]

    first, second = build.kept()
    return first, second


def kept(folder: str, newer: bool = False) -> Path:
    """The kept PTX, or the second one, as a file."""
    source = Path(folder, "kernels.ptx")
    source.write_text(kept_texts()[newer])
    return source


def registers(newer: bool) -> str:
    """Of each kernel of the kept PTX, or the second one: registers of a thread / bytes of stack / bytes spilled."""
    build = tools()
    rows: dict[str, list[str]] = {"": [], "bytes of machine code": []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.cubin")
        for arch in build.NEWER_ARCHITECTURES if newer else build.ARCHITECTURES:
            words = [
                str(build.nvcc().parent / "ptxas"),
                "-v",
                f"-arch={arch}",
                str(kept(folder, newer)),
                "-o",
                str(out),
            ]
            said = subprocess.run(words, check=True, capture_output=True, text=True).stderr
            rows[""].append(arch)
            rows["bytes of machine code"].append(str(out.stat().st_size))
            entry = r"entry function '(\w+)'.*\n.*\n\s+(\d+) bytes stack frame, (\d+) bytes spill.*\n.*Used (\d+) reg"
            for name, stack, spilled, used in sorted(re.findall(entry, said)):
                rows.setdefault(name, []).append(f"{used}/{stack}/{spilled}")
    return "\n".join(f"{name:<26}" + "".join(f"{x:>14}" for x in row) for name, row in rows.items())


def cubin(of: str = "") -> bytes:
    """Machine code for sm_90: of the sources, of the kept "ptx", or of the "newer" one."""
    build = tools()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.cubin")
        if of:
            words = [
                str(build.nvcc().parent / "ptxas"),
                "-arch=sm_90",
                str(kept(folder, of == "newer")),
                "-o",
                str(out),
            ]
            subprocess.run(words, check=True)
        else:
            build.run_nvcc(
                build.nvcc(), ["-cubin", "-arch=sm_90", *build.EXACT, str(build.HERE / "kernels.cu"), "-o", str(out)]
            )
        return out.read_bytes()


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
    if "--registers" in sys.argv:
        print(registers(False), registers(True), sep="\n\n")
        return
    print("| numbers | before | now | at most |\n|---|---|---|---|")
    of = next((word for word in ("ptx", "newer") if f"--{word}" in sys.argv), "")
    for kind, loop in table(cubin(of)).items():
        print(f"| `{kind}` | {BEFORE[kind]} | {loop.instructions / loop.loads:.1f} | {BOUNDS[kind]} |")


if __name__ == "__main__":
    main()
