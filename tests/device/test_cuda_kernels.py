"""The CUDA kernels: what the build embeds, what compilers make of them, and what a driver does with an image."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin import _core
from kit import machine_code
from kit.support import CSRC, RUNGS

pytestmark = pytest.mark.core


@pytest.mark.slow
@pytest.mark.skipif(not machine_code.compilers(), reason="neither nvcc nor NVRTC is at hand")
@pytest.mark.parametrize("compiler", machine_code.compilers())
def test_no_float_operation_is_contracted_flushed_or_rounded_otherwise(compiler: str) -> None:
    text = machine_code.ptx(compiler)
    used = set(re.findall(r"\b((?:add|sub|mul|fma|mad|div)\.[a-z.]*f(?:32|64))\b", text))
    assert used == {f"{op}.rn.f{n}" for op in ("add", "sub", "mul") for n in (32, 64)}
    counts = re.findall(r"\b(?:atom|red)\.[a-z.]*[us]?\d*", text)
    assert ".ftz" not in text and set(counts) == {"atom.shared.add.u32"}  # of which the order does not matter
    # A driver sets a stack aside for all threads that the GPU could run, at the first launch.
    assert ".local" not in text and "fan_any" in text


@pytest.mark.slow
@pytest.mark.skipif(not machine_code.compilers(), reason="neither nvcc nor NVRTC is at hand")
@pytest.mark.parametrize("compiler", machine_code.compilers())
def test_a_fold_takes_few_instructions_for_16_bytes_and_has_four_loads_in_flight(compiler: str) -> None:
    table = machine_code.table(machine_code.cubin(compiler))
    assert set(table) == set(machine_code.BOUNDS)
    for kind, loop in table.items():
        assert loop.instructions <= machine_code.BOUNDS[kind] * loop.loads, (kind, loop)
        assert loop.loads % 4 == 0 and (loop.in_flight >= 4 or kind in machine_code.FEWER_AHEAD), (kind, loop)


#: An nvcc that says what it is asked, notes that it was, and compiles nothing.
NVCC = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
--version) echo "Cuda compilation tools, release 99.1, V99.1.0" ;;
--list-gpu-code) echo sm_50 sm_75 sm_90 sm_999 ;;
--help) echo "--threads" ;;
*) while [ "$1" != -o ]; do shift; done; printf 'PFU\\272 and what comes after' > "$2" ;;
esac
"""


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """build.py on a copy of the sources, told where nvcc is or that there is none."""
    for name in ("device/kernels/build.py", *machine_code.build.sources()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((CSRC / name).read_bytes())

    def run(*words: str, nvcc: Path | None) -> Any:
        env = {
            **os.environ,
            "NVCC": str(nvcc or ""),
            "CUDA_HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": "",
        }
        script = str(tmp_path / "device/kernels/build.py")
        return subprocess.run([sys.executable, "-S", script, *words], capture_output=True, text=True, env=env)

    return run


def test_machine_code_is_made_for_the_architectures_that_nvcc_knows_and_once(build: Any, tmp_path: Path) -> None:
    nvcc, out = tmp_path / "nvcc", tmp_path / "made/embedded.h"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    first = build("--nvcc", str(out), nvcc=nvcc)
    assert first.returncode == 0, first.stderr
    text = out.read_text()
    assert f"{{\n    {', '.join(map(str, b'PFU' + bytes([0o272]) + b' and what comes after'))}}}" in text
    assert 'fan_kernels_made[] = "sm_75, sm_90 and PTX for compute_90, by nvcc 99.1"' in text
    called = (tmp_path / "nvcc.log").read_text()
    assert "-fmad=false" in called and "sm_80" not in called and "--compress-mode" not in called
    assert called.count("-fatbin") == 1
    assert build("--nvcc", str(out), nvcc=nvcc).returncode == 0
    assert (tmp_path / "nvcc.log").read_text().count("-fatbin") == 1  # it was there
    with (tmp_path / "device/kernels/args.h").open("a") as f:
        f.write("/* */")
    assert build("--nvcc", str(out), nvcc=nvcc).returncode == 0
    assert (tmp_path / "nvcc.log").read_text().count("-fatbin") == 2


@pytest.mark.parametrize(("words", "code", "printed"), [(["--nvcc"], 2, "no nvcc: NVRTC"), ([], 0, "the source alone")])
def test_without_nvcc_the_source_alone_is_embedded(
    build: Any, tmp_path: Path, words: list[str], code: int, printed: str
) -> None:
    done = build(*words, str(tmp_path / "embedded.h"), nvcc=None)
    assert done.returncode == code and printed in done.stdout
    text = (tmp_path / "embedded.h").read_text()
    assert "fan_kernels_fatbin_bytes = 0;" in text and 'fan_kernels_made[] = ""' in text


def test_an_nvcc_that_fails_leaves_the_source_alone_and_the_build_is_told(build: Any, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC.replace("*) while", "*) exit 3; while"))
    nvcc.chmod(0o755)
    done = build("--nvcc", str(tmp_path / "embedded.h"), nvcc=nvcc)
    assert done.returncode == 1 and "exit status 3" in done.stdout
    assert "fan_kernels_fatbin_bytes = 0;" in (tmp_path / "embedded.h").read_text()


def test_the_source_that_the_core_embeds_is_the_trees() -> None:
    assert json.loads(zlib.decompress(_core.kernels_source())) == machine_code.build.sources()


def test_machine_code_that_the_driver_refuses_once_leaves_the_device_usable(driver: FakeDriver) -> None:
    """The kernels are compiled then, and the machine code is tried first again: this driver takes it."""
    if not _core.kernels_made():
        pytest.skip("the build embedded no machine code")
    driver.fail(0, 209, call="ModuleLoadData")
    x = driver.array(np.ones(3))
    assert driver.calls("ModuleLoadData") == 2
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]
    assert fanin.info()["kernels"]["loaded"]["cuda:0"] == "machine code"


def test_a_driver_that_cannot_load_the_kernels_is_told_by_call_and_code(driver: FakeDriver) -> None:
    driver.fail(0, 2, call="ModuleGetFunction")
    with pytest.raises(fanin.DeviceError, match=r"cuModuleGetFunction.*\(2\)"):
        driver.array(np.ones(3))
    assert driver.calls("ModuleLoadData") == driver.calls("ModuleUnload") == 1


def test_the_kernels_that_were_built_in_are_named() -> None:
    found = fanin.info()["kernels"]
    if _core.kernels_made():
        assert found["machine_code"][0].startswith("sm_") and found["ptx"].startswith("compute_") and found["nvcc"]
    else:
        assert found == {"machine_code": [], "ptx": None, "nvcc": None, "loaded": {}}
    assert (_core.kernels_made() or "built without nvcc") in " ".join(str(fanin.info()).split())


@pytest.mark.parametrize(
    ("embedded", "compiled", "loaded"),
    [
        ((0, 0), "--", "machine code | 1 loads 0 unloads | fine | not wanted"),
        ((0, 0), (0, 0), "machine code | 1 loads 0 unloads | fine | not wanted"),
        ((209, 0), "--", "machine code | 1 loads 0 unloads | failed | wanted"),
        ((209, 0), (0, 0), "machine code compiled | 2 loads 0 unloads | fine | not wanted"),
        ((0, 200), (0, 0), "machine code compiled | 2 loads 1 unloads | fine | not wanted"),  # loaded lazily
        ((999, 0), (0, 0), "machine code compiled | 2 loads 0 unloads | fine | not wanted"),  # by whatever code
        ((2, 0), (0, 0), "machine code | 1 loads 0 unloads | failed | not wanted"),
        ((0, 2), "--", "machine code | 1 loads 1 unloads | failed | not wanted"),
        ((700, 0), "--", "machine code | 1 loads 0 unloads | failed | not wanted"),
        ((0, 719), (0, 0), "machine code | 1 loads 0 unloads | failed | not wanted"),
        ("--", (0, 0), "compiled | 1 loads 0 unloads | fine | not wanted"),
        ("--", (218, 0), "compiled | 1 loads 0 unloads | failed | not wanted"),
        ((209, 0), (0, 500), "machine code compiled | 2 loads 1 unloads | failed | not wanted"),
    ],
)
def test_an_image_that_cannot_be_used_gives_way_whenever_the_driver_refuses_it(
    c_program: Any, embedded: Any, compiled: Any, loaded: str
) -> None:
    """At the load or at a look-up, by any code but that of short memory and those after which nothing works."""
    sources = [str(p) for rung in RUNGS for p in sorted((CSRC / rung).glob("**/*.c")) if p.parent.name != "kernels"]
    program = "load_kernels_alone.c" if embedded == "--" else "load_kernels.c"
    done = c_program(program, *sources, core=False)(*map(str, (*embedded, *compiled)))
    assert done.stdout.startswith(loaded), done.stdout
    assert ("cuModule" in done.stdout) == ("failed" in loaded)
