"""The text of the kernels: PTX and machine code, when they are made, and what a driver does with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import _core
from fanin.testing import FakeDriver
from kit import machine_code
from kit.support import CSRC, ROOT, RUNGS, core_file

pytestmark = pytest.mark.core


def test_the_ptx_belongs_to_the_kernels_source() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "csrc/device/kernels/build.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "belongs to the sources" in done.stdout


def test_no_float_operation_of_the_ptx_is_contracted_flushed_or_rounded_otherwise() -> None:
    text = (ROOT / "csrc/device/kernels/ptx.c").read_text()
    used = set(re.findall(r"\b((?:add|sub|mul|fma|mad|div)\.[a-z.]*f(?:32|64))\b", text))
    assert used == {f"{op}.rn.f{n}" for op in ("add", "sub", "mul") for n in (32, 64)}
    counts = re.findall(r"\b(?:atom|red)\.[a-z.]*[us]?\d*", text)
    assert ".ftz" not in text and set(counts) == {"atom.shared.add.u32"}  # of which the order does not matter


def test_no_kernel_has_a_stack() -> None:
    """A driver sets it aside for all threads that the GPU could run, at the first launch."""
    text = (ROOT / "csrc/device/kernels/ptx.c").read_text()
    assert ".local" not in text and "fan_any" in text


@pytest.mark.slow
def test_nvcc_takes_the_kernels_and_ptxas_the_ptx_for_every_architecture() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "csrc/device/kernels/build.py"), "--again"], capture_output=True, text=True
    )
    if done.returncode == 2:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_fold_takes_few_instructions_for_16_bytes_and_has_four_loads_in_flight() -> None:
    if not machine_code.tools():
        pytest.skip("no nvcc")
    for ptx in (False, True):
        for kind, loop in machine_code.table(machine_code.cubin(ptx)).items():
            # float8_e4m3fn of the kept PTX has no conversion of the hardware's: it is that of sm_89
            most = 100 if ptx and kind == "e4m3fn" else machine_code.BOUNDS[kind]
            assert loop.instructions <= most * loop.loads, (kind, ptx, loop)
            assert loop.loads % 4 == 0 and (loop.in_flight >= 4 or kind in machine_code.FEWER_AHEAD), (kind, ptx, loop)


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
    for name in (
        "device/kernels/kernels.cu",
        "device/kernels/args.h",
        "device/kernels/ptx.c",
        "device/kernels/build.py",
        "array/lowp.h",
        "array/complex_abs.h",
        "array/device_stats.h",
        "array/dtype.h",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / "csrc" / name).read_bytes())

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


def test_a_kernel_that_was_changed_makes_the_ptx_stale(build: Any, tmp_path: Path) -> None:
    assert build("--check", nvcc=None).returncode == 0
    with (tmp_path / "device/kernels/args.h").open("a") as f:
        f.write("/* */")
    done = build("--check", nvcc=None)
    assert done.returncode == 1 and "stale" in done.stdout


def test_machine_code_is_made_for_the_architectures_that_nvcc_knows_and_once(build: Any, tmp_path: Path) -> None:
    nvcc, out = tmp_path / "nvcc", tmp_path / "made/fatbin.h"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    first = build("--fatbin", str(out), nvcc=nvcc)
    assert first.returncode == 0, first.stderr
    text = out.read_text()
    assert f"{{\n    {', '.join(map(str, b'PFU' + bytes([0o272]) + b' and what comes after'))}}}" in text
    assert 'fan_kernels_made[] = "sm_75, sm_90 and PTX for compute_90, by nvcc 99.1"' in text
    called = (tmp_path / "nvcc.log").read_text()
    assert "-fmad=false" in called and "sm_80" not in called and "--compress-mode" not in called
    assert called.count("-fatbin") == 1
    assert build("--fatbin", str(out), nvcc=nvcc).returncode == 0
    assert (tmp_path / "nvcc.log").read_text().count("-fatbin") == 1  # it was there
    with (tmp_path / "device/kernels/args.h").open("a") as f:
        f.write("/* */")
    assert build("--fatbin", str(out), nvcc=nvcc).returncode == 0
    assert (tmp_path / "nvcc.log").read_text().count("-fatbin") == 2


def test_without_nvcc_no_machine_code_is_made_and_it_is_said(build: Any, tmp_path: Path) -> None:
    done = build("--fatbin", str(tmp_path / "fatbin.h"), nvcc=None)
    assert (done.returncode, done.stdout) == (2, "no nvcc: the kernels go in as PTX\n")
    assert not (tmp_path / "fatbin.h").exists()


def test_machine_code_that_the_driver_cannot_use_gives_way_to_the_ptx(driver: FakeDriver) -> None:
    driver.fail(0, 209, call="ModuleLoadData")
    if not _core.kernels_made():
        with pytest.raises(fanin.DeviceError, match="209") as e:
            driver.array(np.ones(3))
        assert e.value.code == 209
        return
    x = driver.array(np.ones(3))
    assert driver.calls("ModuleLoadData") == 2
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]


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
        assert found == {"machine_code": [], "ptx": "compute_75", "nvcc": None}
    assert (_core.kernels_made() or "PTX for compute_75 (built without nvcc)") in str(fanin.info())


def test_the_built_library_has_the_ptx_of_the_tree() -> None:
    tree, library = (ROOT / "csrc/device/kernels/ptx.c").read_text(), core_file()
    ptx = "".join(re.findall(r'^    "(.*)"', tree, re.MULTILINE)).replace("\\n", "\n").replace('\\"', '"')
    assert len(ptx) > 100_000 and library
    assert ptx.encode() in library.read_bytes()


@pytest.mark.parametrize(
    ("codes", "loaded"),
    [
        ((0, 0, 0), "machine code | 1 loads 0 unloads | fine"),
        ((209, 0, 0), "machine code ptx | 2 loads 0 unloads | fine"),
        ((0, 200, 0), "machine code ptx | 2 loads 1 unloads | fine"),  # a driver that loads lazily says it late
        ((0, 500, 0), "machine code ptx | 2 loads 1 unloads | fine"),
        ((999, 0, 0), "machine code ptx | 2 loads 0 unloads | fine"),  # in whatever words
        ((2, 0, 0), "machine code | 1 loads 0 unloads | failed"),
        ((0, 2, 0), "machine code | 1 loads 1 unloads | failed"),
        ((700, 0, 0), "machine code | 1 loads 0 unloads | failed"),
        ((0, 719, 0), "machine code | 1 loads 0 unloads | failed"),
        ((209, 0, 218), "machine code ptx | 2 loads 0 unloads | failed"),
    ],
)
def test_an_image_that_cannot_be_used_gives_way_whenever_that_is_said(
    c_program: Any, codes: tuple[int, ...], loaded: str
) -> None:
    """At the load or at a look-up, by any code but that of short memory and those after which nothing works."""
    sources = [str(p) for rung in RUNGS for p in sorted((CSRC / rung).glob("**/*.c")) if p.parent.name != "kernels"]
    done = c_program("load_kernels.c", *sources, core=False)(*map(str, codes))
    assert done.stdout.startswith(loaded), done.stdout
    assert ("cuModule" in done.stdout) == loaded.endswith("failed")
