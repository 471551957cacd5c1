"""Makes ptx.c from kernels.cu: python csrc/device/kernels/build.py [--check | --again | --fatbin FILE]

The PTX is kept in the tree, so that the package builds where there is no nvcc; the driver compiles it for its own GPU.
With --check nothing is written: exit status 1 where ptx.c does not belong to the sources, which needs no nvcc. With
--again they are compiled too, and exit status 1 says that nvcc or ptxas refuses them, or that the release of nvcc that
made ptx.c makes something else now; 2 that there is no nvcc.

With --fatbin, FILE becomes a header with the machine code for each of the architectures below that this nvcc knows, and
PTX for later ones: setup.py asks for it. Exit status 2 says that there is no nvcc; nothing is done where FILE is of
these sources and this nvcc.

nvcc is looked for in NVCC, CUDA_HOME/bin, PATH, and the site-packages of this Python (nvidia-cuda-nvcc). Where ptxas is
beside it, the PTX is compiled for each of the architectures below as a trial.

There are two: one for every GPU, and one of the few kernels that a later architecture's instructions make shorter.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent
SOURCES = [
    HERE / "kernels.cu",
    HERE / "args.h",
    CSRC / "array/lowp.h",
    CSRC / "array/complex_abs.h",
    CSRC / "array/device_stats.h",
    CSRC / "array/dtype.h",
]
OUT = HERE / "ptx.c"
LOWEST = "compute_75"
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
#: From here on there is a conversion of float8_e4m3fn: a second PTX has the kernels that use it, and no others.
NEWER = "compute_89"
NEWER_ARCHITECTURES = ("sm_89", "sm_90", "sm_100", "sm_120")
CONVERSION = "e4m3x2"
#: Bits are promised: nothing is contracted or flushed.
EXACT = ("-fmad=false", "-ftz=false", "-std=c++17", "-O3")
#: The oldest PTX that says all that is in there: drivers of CUDA 11.0 read it; 12.1 the second one.
VERSION, NEWER_VERSION = "7.0", "8.1"


def source_hash() -> str:
    """What ptx.c must say to belong to the sources as they are."""
    text = hashlib.sha256()
    for path in SOURCES:
        text.update(path.name.encode() + b"\0" + path.read_bytes())
    return text.hexdigest()


def kept_hash() -> str:
    """What ptx.c says."""
    found = re.search(r"^/\* Sources: (\w+) \*/$", OUT.read_text(), re.MULTILINE) if OUT.exists() else None
    return found[1] if found else ""


def nvcc() -> Path | None:
    """The compiler, if there is one."""
    places = [
        os.environ.get("NVCC"),
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc"),
        shutil.which("nvcc"),
    ]
    places += [Path(p, "nvidia/cu13/bin/nvcc") for p in sys.path if p]
    return next((Path(p) for p in places if p and Path(p).is_file()), None)


def asked(tool: Path, question: str) -> str:
    """What nvcc answers."""
    return subprocess.run([str(tool), question], capture_output=True, text=True, check=True).stdout


def run_nvcc(tool: Path, words: list[str]) -> None:
    """nvcc with its own tools on the path."""
    env = {**os.environ, "PATH": f"{tool.parent}:{tool.parent.parent}/nvvm/bin:{os.environ.get('PATH', '')}"}
    subprocess.run([str(tool), f"-I{CSRC}", *words], check=True, env=env)


def ptx(tool: Path, arch: str, version: str) -> str:
    """The PTX, without what differs from machine to machine or asks for a newer driver than the code needs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.ptx")
        run_nvcc(tool, ["-ptx", f"-arch={arch}", *EXACT, str(HERE / "kernels.cu"), "-o", str(out)])
        text = out.read_text()
    text = re.sub(r"_ZZ?N\d+_INTERNAL_[0-9a-f]+_\d+_kernels_cu_[0-9a-f]+", "_fan", text)
    text = re.sub(r"^\.version .*$", f".version {version}", text, flags=re.M)
    lines = [line.strip() for line in text.splitlines()]
    lines = [
        re.sub(r"\s+", " ", line)
        for line in lines
        if line and not line.startswith("//") and "used_bytes_mask" not in line
    ]
    return "\n".join(lines) + "\n"


def those_with(word: str, text: str) -> str:
    """Of a PTX the kernels in which the word stands, and what they name."""
    head, *rest = re.split(r"^(?=\.visible \.entry |\.func |\.shared |\.const |\.global )", text, flags=re.M)
    parts: dict[str, str] = {}
    for part in rest:
        found = re.search(r"(?:\.entry |\.func (?:\(.*?\) )?|\.b8 )(\w+)", part)
        parts[found[1] if found else ""] = part
    wanted: set[str] = set()
    more = {name for name, part in parts.items() if ".entry" in part and word in part}
    while more - wanted:
        wanted |= more
        more = {name for w in wanted for name in re.findall(r"\w+", parts[w]) if name in parts}
    return head + "".join(part for name, part in parts.items() if name in wanted)


def tried(tool: Path, text: str, archs: tuple[str, ...]) -> str:
    """The PTX, which ptxas takes for all of these, where it is at hand."""
    ptxas = tool.parent / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.ptx")
        out.write_text(text)
        for arch in archs if ptxas.exists() else ():
            subprocess.run([str(ptxas), f"-arch={arch}", str(out), "-o", str(Path(folder, "x.cubin"))], check=True)
    return text


def compiled(tool: Path) -> tuple[str, str]:
    """The PTX for all, and the second one."""
    newer = those_with(CONVERSION, ptx(tool, NEWER, NEWER_VERSION))
    return (
        tried(tool, ptx(tool, LOWEST, VERSION), ARCHITECTURES),
        tried(tool, newer, NEWER_ARCHITECTURES),
    )


def release(tool: Path) -> str:
    """The compiler's release, as in "13.0"."""
    found = re.search(r"release ([\d.]+)", asked(tool, "--version"))
    return found[1] if found else "unknown"


def known(tool: Path) -> list[str]:
    """Those of the architectures that this nvcc compiles for."""
    said = asked(tool, "--list-gpu-code").split()
    return [a for a in ARCHITECTURES if a in said]


def fatbin(tool: Path, archs: list[str]) -> bytes:
    """The machine code for some architectures and PTX for the last of them, compressed."""
    last = archs[-1].removeprefix("sm_")
    codes = [f"-gencode=arch=compute_{a.removeprefix('sm_')},code={a}" for a in archs]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.fatbin")
        smaller = ["--compress-mode=size"] if "--compress-mode" in asked(tool, "--help") else []
        what = [*smaller, *codes, f"-gencode=arch=compute_{last},code=compute_{last}", "-fatbin", "--threads=0"]
        run_nvcc(tool, [*what, *EXACT, str(HERE / "kernels.cu"), "-o", str(out)])
        return out.read_bytes()


def header(tool: Path, out: Path) -> int:
    """Writes what fatbin.c includes, if it is not there already."""
    archs = known(tool)
    if not archs:
        print(f"{tool} compiles for none of {', '.join(ARCHITECTURES)}")
        return 1
    made = f"{', '.join(archs)} and PTX for compute_{archs[-1].removeprefix('sm_')}, by nvcc {release(tool)}"
    first = f"/* Made by build.py from kernels.cu ({source_hash()}) for {made}. */"
    if out.exists() and out.read_text().startswith(first):
        return 0
    code = fatbin(tool, archs)
    lines = [", ".join(f"{b}" for b in code[i : i + 40]) for i in range(0, len(code), 40)]
    body = ",\n    ".join(lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f"{first}\n_Alignas(16) const unsigned char fan_kernels_fatbin[] = {{\n    {body}}};\n"
        "const size_t fan_kernels_fatbin_bytes = sizeof fan_kernels_fatbin;\nconst char fan_kernels_made[] ="
        f' "{made}";\n'
    )
    print(f"{out.name}: {len(code)} bytes for {made}")
    return 0


def c_text(text: str) -> str:
    """As C has it."""
    return "\n".join(f'    "{line}\\n"' for line in text.replace("\\", "\\\\").replace('"', '\\"').splitlines())


def c_file(texts: tuple[str, str], by: str) -> str:
    """ptx.c: made, not written."""
    return (
        f"/* Made by build.py from kernels.cu for {LOWEST}, PTX {VERSION}, and {NEWER}, PTX {NEWER_VERSION},"
        f" by nvcc {by}. Not to be edited. */\n"
        '#include "device/kernels/image.h"\n\n'
        f"/* Sources: {source_hash()} */\n\nconst char fan_kernels_ptx[] =\n{c_text(texts[0])};\n\n"
        f"const char fan_kernels_ptx_newer[] =\n{c_text(texts[1])};\n"
    )


def kept() -> tuple[str, str]:
    """What ptx.c has: the PTX for all, and the second one."""
    texts = OUT.read_text().split("const char fan_kernels_ptx_newer[]")
    lines = [re.findall(r'^    "(.*)\\n"', text, flags=re.M) for text in texts]
    first, second = ("".join(f"{line}\n" for line in part).replace('\\"', '"').replace("\\\\", "\\") for part in lines)
    return first, second


def main() -> int:
    words = sys.argv[1:]
    tool = nvcc()
    if words[:1] == ["--fatbin"] and len(words) == 2:
        if not tool:
            print("no nvcc: the kernels go in as PTX")
            return 2
        return header(tool, Path(words[1]))
    if words and kept_hash() != source_hash():
        print("ptx.c is stale: it was made of other sources. Run: python csrc/device/kernels/build.py")
        return 1
    if words == ["--check"]:
        print("ptx.c belongs to the sources")
        return 0
    if not tool:
        print(
            "no nvcc: set NVCC or CUDA_HOME, or pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt"
            " nvidia-cuda-runtime"
        )
        return 2
    text = c_file(compiled(tool), release(tool))
    if words == ["--again"]:
        same_release = f"by nvcc {release(tool)}." in OUT.read_text()[:200]
        if same_release and text != OUT.read_text():
            print(f"ptx.c is not what {tool} makes of the sources")
            return 1
        print(
            f"nvcc {release(tool)}"
            f" {'makes the same ptx.c' if same_release else 'takes the sources; ptx.c was made by another release'}"
        )
        return 0
    OUT.write_text(text)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes, by nvcc {release(tool)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
