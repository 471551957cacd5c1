"""Writes the header with what the build embeds of the CUDA kernels: python csrc/device/kernels/build.py [--nvcc] FILE

The header has the source, which NVRTC or nvcc compiles when a device is first used, and with --nvcc machine code for
each of the architectures below that this nvcc knows, and PTX for later ones. Exit status 2: there is no nvcc; 1: nvcc
refuses the kernels; then nothing is written. Machine code that FILE has already is kept if it is of these sources and
this nvcc. python/fanin/_nvcc.py has where nvcc may be, and its flags.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent
ARCHITECTURES = (75, 80, 90, 100, 120)

spec = importlib.util.spec_from_file_location("_nvcc", CSRC.parent / "python/fanin/_nvcc.py")
_nvcc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_nvcc)


def sources(name: str = _nvcc.KERNELS) -> dict[str, str]:
    """The text of a file, and of all that it includes of the tree, by name."""
    text = (CSRC / name).read_text()
    found = {name: text}
    for included in re.findall(r'^#include "(.+)"', text, re.MULTILINE):
        found |= sources(included)
    return found


def fatbin(nvcc: _nvcc.Nvcc, archs: list[int]) -> bytes:
    """The machine code for some architectures and PTX for the last of them, compressed."""
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    codes.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    smaller = ["--compress-mode=size"] if "--compress-mode" in nvcc.run(["--help"]) else []
    return nvcc.build(sources(), ["-fatbin", "--threads=0", *smaller, *codes])


def array(name: str, data: bytes) -> str:
    """Bytes as C has them: one string, which a compiler reads many times faster than a list of numbers."""
    lines = [data[i : i + 40] for i in range(0, len(data), 40)]
    body = "\n    ".join('"' + "".join(f"\\{byte:03o}" for byte in line) + '"' for line in lines) or '""'
    return f"_Alignas(16) const unsigned char {name}[] =\n    {body};\nconst size_t {name}_bytes = {len(data)};\n"


def header(nvcc: _nvcc.Nvcc | None, out: Path) -> None:
    """Writes what embedded.c includes, if it is not there already. OSError if nvcc refuses the kernels."""
    source = json.dumps(sources()).encode()
    archs = [a for a in ARCHITECTURES if nvcc and a in nvcc.archs]
    made = ""
    if nvcc:
        if not archs:
            raise OSError(f"it compiles for none of {', '.join(f'sm_{a}' for a in ARCHITECTURES)}")
        release = ".".join(map(str, nvcc.version))
        made = f"{', '.join(f'sm_{a}' for a in archs)} and PTX for compute_{archs[-1]}, by nvcc {release}"
    first = f"/* Made by build.py from {hashlib.sha256(source).hexdigest()} for {made or 'the first use'}. */\n"
    if out.exists() and out.read_text().startswith(first):
        return
    code = fatbin(nvcc, archs) if nvcc else b""
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
    if "--nvcc" not in words:
        header(None, Path(out))
        return 0
    path = _nvcc.find()
    if not path:
        print(f"no nvcc in any of {', '.join(map(str, _nvcc.places()))}")
        return 2
    try:
        header(_nvcc.Nvcc(path), Path(out))
    except OSError as e:
        print(f"{path} failed: {e}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
