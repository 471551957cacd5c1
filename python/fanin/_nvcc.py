"""The CUDA compiler nvcc: where it is, what it compiles for, and the flags that keep the CPU's bits.

`csrc/device/kernels/build.py` loads this file by its path, before fanin is built: it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__tracebackhide__ = True  # no frames of ours in reports of pytest

__all__: list[str] = []

#: Results are promised bit by bit: the compiler contracts and flushes nothing. NVRTC gets the same flags.
EXACT = ("--fmad=false", "--ftz=false", "--std=c++17")
#: The source of the kernels, among the texts that the core embeds.
KERNELS = "device/kernels/kernels.cu"
#: How much of a compiler's messages an error has.
LOG = 600


def toolkit() -> Path:
    """The folder of the CUDA toolkit, if there is one."""
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def places() -> Iterator[Path]:
    """Where nvcc may be: NVCC, the toolkit, PATH, and NVIDIA's wheels (nvidia-cuda-nvcc)."""
    if named := os.environ.get("NVCC"):
        yield Path(named)
    yield toolkit() / "bin/nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    for folder in sys.path:
        yield from Path(folder, "nvidia").glob("*/bin/nvcc")


def find() -> Path | None:
    """The first nvcc that is there."""
    return next((path for path in places() if path.is_file()), None)


class Nvcc:
    """An nvcc that answers. OSError with the reason for one that does not."""

    name = "nvcc"
    options: tuple[str, ...] = EXACT

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        version = self.run(["--version"])
        codes = self.run(["--list-gpu-code"])
        release = re.search(r"release (\d+)\.(\d+)", version)
        if not release:
            raise OSError(f"--version names no release: {version.strip()[:LOG]}")
        self.version = (int(release[1]), int(release[2]))
        self.archs = sorted(int(number) for number in re.findall(r"\bsm_(\d+)\b", codes))

    def run(self, words: Sequence[str], folder: str = "") -> str:
        """What nvcc prints; it writes its temporary files to `folder`. OSError with its messages if it fails.

        Ctrl-C ends nvcc and all that it started. On the main thread, which alone gets the KeyboardInterrupt, they have
        a process group of their own, and this ends the group; on another thread they stay in the caller's group, which
        the terminal interrupts.
        """
        home = Path(self.path).parent
        env = {
            **os.environ,
            "PATH": f"{home}:{home.parent}/nvvm/bin:{os.environ.get('PATH', '')}",
            "TMPDIR": folder or tempfile.gettempdir(),
        }
        grouped = threading.current_thread() is threading.main_thread()
        process = subprocess.Popen(
            [self.path, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=env,
            process_group=0 if grouped else None,
        )
        try:
            printed, messages = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                if grouped:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.communicate()  # until the last of the group has closed its output
            raise
        if process.returncode:
            raise OSError(f"{_ended(process.returncode)}: {(messages or printed).strip()[:LOG]}")
        return printed

    def build(self, sources: Mapping[str, str], options: Sequence[str]) -> bytes:
        """The file that nvcc makes of the kernels. OSError with its messages if they do not compile."""
        with tempfile.TemporaryDirectory(prefix="fanin-") as folder:
            for name, text in sources.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            out = Path(folder, "kernels")
            self.run([f"-I{folder}", *options, *EXACT, str(Path(folder, KERNELS)), "-o", str(out)], folder)
            return out.read_bytes()

    def compile(self, sources: Mapping[str, str], arch: str) -> bytes:
        """The CUBIN for "sm_90", the PTX for "compute_90". OSError with nvcc's messages if it does not compile."""
        form = "-cubin" if arch.startswith("sm_") else "-ptx"
        return self.build(sources, [form, f"--gpu-architecture={arch}"])


def _ended(code: int) -> str:
    """How a process that failed ended."""
    if code > 0:
        return f"exit status {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
