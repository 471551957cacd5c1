"""Writes the header with what the build embeds of the CUDA kernels: python csrc/device/kernels/build.py [--nvcc] FILE

The header has the source, for NVRTC, and with --nvcc machine code for each of the architectures below that this nvcc
knows, and PTX for later ones. Exit status 2: there is no nvcc, and the header has no machine code; 1: nvcc refuses the
kernels. Machine code that FILE has already is kept if it is of these sources and this nvcc.

nvcc is looked for in NVCC, CUDA_HOME/bin, PATH, and the site-packages of this Python (nvidia-cuda-nvcc).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent
KERNELS = "device/kernels/kernels.cu"
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
#: Results are promised bit by bit: nothing is contracted or flushed. fanin._kernels gives NVRTC the same.
EXACT = ("-fmad=false", "-ftz=false", "-std=c++17", "-O3")


def sources(name: str = KERNELS) -> dict[str, str]:
    """The text of a file, and of all that it includes of the tree, by name."""
    text = (CSRC / name).read_text()
    found = {name: text}
    for included in re.findall(r'^#include "(.+)"', text, re.MULTILINE):
        found |= sources(included)
    return found


def nvcc() -> Path | None:
    """The compiler, if there is one."""
    places = [
        os.environ.get("NVCC"),
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc"),
        shutil.which("nvcc"),
    ]
    places += [Path(p, "nvidia/cu13/bin/nvcc") for p in sys.path if p]
    return next((Path(p) for p in places if p and Path(p).is_file()), None)


def output(tool: Path, option: str) -> str:
    """What nvcc prints."""
    return subprocess.run([str(tool), option], capture_output=True, text=True, check=True).stdout


def run_nvcc(tool: Path, words: list[str]) -> None:
    """nvcc with its own tools on the path."""
    env = {**os.environ, "PATH": f"{tool.parent}:{tool.parent.parent}/nvvm/bin:{os.environ.get('PATH', '')}"}
    subprocess.run([str(tool), f"-I{CSRC}", *words], check=True, env=env)


def release(tool: Path) -> str:
    """The compiler's release, as in "13.0"."""
    found = re.search(r"release ([\d.]+)", output(tool, "--version"))
    return found[1] if found else "unknown"


def known(tool: Path) -> list[str]:
    """Those of the architectures that this nvcc compiles for."""
    codes = output(tool, "--list-gpu-code").split()
    return [a for a in ARCHITECTURES if a in codes]


def fatbin(tool: Path, archs: list[str]) -> bytes:
    """The machine code for some architectures and PTX for the last of them, compressed."""
    last = archs[-1].removeprefix("sm_")
    codes = [f"-gencode=arch=compute_{a.removeprefix('sm_')},code={a}" for a in archs]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "kernels.fatbin")
        smaller = ["--compress-mode=size"] if "--compress-mode" in output(tool, "--help") else []
        words = [*smaller, *codes, f"-gencode=arch=compute_{last},code=compute_{last}", "-fatbin", "--threads=0"]
        run_nvcc(tool, [*words, *EXACT, str(CSRC / KERNELS), "-o", str(out)])
        return out.read_bytes()


def array(name: str, data: bytes) -> str:
    """Bytes as C has them."""
    lines = [", ".join(map(str, data[i : i + 40])) for i in range(0, len(data), 40)]
    body = ",\n    ".join(lines) or "0"
    return f"_Alignas(16) const unsigned char {name}[] = {{\n    {body}}};\nconst size_t {name}_bytes = {len(data)};\n"


def header(tool: Path | None, out: Path) -> None:
    """Writes what embedded.c includes, if it is not there already."""
    source = json.dumps(sources()).encode()
    archs = known(tool) if tool else []
    made = f"{', '.join(archs)} and PTX for compute_{archs[-1][3:]}, by nvcc {release(tool)}" if tool and archs else ""
    first = f"/* Made by build.py from {hashlib.sha256(source).hexdigest()} for {made or 'NVRTC'}. */\n"
    if out.exists() and out.read_text().startswith(first):
        return
    code = fatbin(tool, archs) if tool and archs else b""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        first
        + array("fan_kernels_fatbin", code)
        + f'const char fan_kernels_made[] = "{made}";\n'
        + array("fan_kernels_source", zlib.compress(source, 9))
    )
    print(f"{out.name}: {len(code)} bytes for {made}" if code else f"{out.name}: the source alone")


def main() -> int:
    *words, out = sys.argv[1:]
    wanted = "--nvcc" in words
    tool = nvcc() if wanted else None
    try:
        header(tool, Path(out))
    except subprocess.CalledProcessError as e:
        print(f"{tool} failed: {e}")
        header(None, Path(out))
        return 1
    if wanted and not tool:
        print("no nvcc: NVRTC compiles the kernels when a device is first used")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
