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
from fanin.testing import FakeDriver, use_driver
from kit import machine_code
from kit.support import CSRC, ROOT, RUNGS, core_file
from kit.values import E4M3, bits

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
    for of in ("", "ptx", "newer"):
        table = machine_code.table(machine_code.cubin(of))
        assert set(table) == ({"e4m3fn"} if of == "newer" else set(machine_code.BOUNDS))
        for kind, loop in table.items():
            most = (machine_code.PTX_BOUNDS if of == "ptx" else machine_code.BOUNDS)[kind]
            assert loop.instructions <= most * loop.loads, (kind, of, loop)
            assert loop.loads % 4 == 0 and (loop.in_flight >= 4 or kind in machine_code.FEWER_AHEAD), (kind, of, loop)


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
        assert found == {"machine_code": [], "ptx": "compute_75", "nvcc": None, "loaded": {}}
    assert (_core.kernels_made() or "PTX for compute_75 (built without nvcc)") in str(fanin.info())


def test_the_built_library_has_the_ptx_of_the_tree() -> None:
    library = core_file()
    assert library
    for ptx in machine_code.kept_texts():
        assert len(ptx) > 100_000 and ptx.encode() in library.read_bytes()


@pytest.mark.parametrize(
    ("compute", "machine_code", "newer", "ptx", "loaded"),
    [
        (90, (0, 0), (0, 0), (0, 0), "machine code | 1 loads 0 unloads | fine"),
        (75, (209, 0), (0, 0), (0, 0), "machine code ptx | 2 loads 0 unloads | fine"),
        (
            86,
            (0, 200),
            (0, 0),
            (0, 0),
            "machine code ptx | 2 loads 1 unloads | fine",
        ),  # one that loads lazily says it late
        (86, (0, 500), (0, 0), (0, 0), "machine code ptx | 2 loads 1 unloads | fine"),
        (75, (999, 0), (0, 0), (0, 0), "machine code ptx | 2 loads 0 unloads | fine"),  # in whatever words
        (90, (2, 0), (0, 0), (0, 0), "machine code | 1 loads 0 unloads | failed"),
        (90, (0, 2), (0, 0), (0, 0), "machine code | 1 loads 1 unloads | failed"),
        (90, (700, 0), (0, 0), (0, 0), "machine code | 1 loads 0 unloads | failed"),
        (90, (0, 719), (0, 0), (0, 0), "machine code | 1 loads 0 unloads | failed"),
        (75, (209, 0), (0, 0), (218, 0), "machine code ptx | 2 loads 0 unloads | failed"),
        (89, (209, 0), (0, 0), (0, 0), "machine code newer ptx ptx | 3 loads 0 unloads | fine"),
        (120, (0, 209), (0, 0), (0, 0), "machine code newer ptx ptx | 3 loads 1 unloads | fine"),
        (
            90,
            (209, 0),
            (222, 0),
            (0, 0),
            "machine code newer ptx ptx | 3 loads 0 unloads | fine",
        ),  # a driver before 12.1
        (90, (209, 0), (0, 500), (0, 0), "machine code newer ptx ptx ptx | 4 loads 2 unloads | fine"),
        (90, (209, 0), (2, 0), (0, 0), "machine code newer ptx | 2 loads 0 unloads | failed"),
        (90, (209, 0), (0, 2), (0, 0), "machine code newer ptx ptx | 3 loads 2 unloads | failed"),
        (90, (209, 0), (700, 0), (0, 0), "machine code newer ptx | 2 loads 0 unloads | failed"),
        (90, (209, 0), (0, 719), (0, 0), "machine code newer ptx ptx | 3 loads 0 unloads | failed"),
        (90, (209, 0), (0, 0), (218, 0), "machine code newer ptx ptx ptx | 4 loads 1 unloads | failed"),
    ],
)
def test_an_image_that_cannot_be_used_gives_way_whenever_that_is_said(
    c_program: Any, compute: int, machine_code: Any, newer: Any, ptx: Any, loaded: str
) -> None:
    """At the load or at a look-up, by any code but that of short memory and those after which nothing works."""
    sources = [str(p) for rung in RUNGS for p in sorted((CSRC / rung).glob("**/*.c")) if p.parent.name != "kernels"]
    codes = map(str, (compute, *machine_code, *newer, *ptx))
    done = c_program("load_kernels.c", *sources, core=False)(*codes)
    assert done.stdout.startswith(loaded), done.stdout
    assert ("cuModule" in done.stdout) == loaded.endswith("failed")


#: What a device from compute 8.9 on has where the package was built without nvcc, and an older one.
NEWER, OLDER = "PTX for compute_75, of float8_e4m3fn for compute_89", "PTX for compute_75"


def sums_are_right(driver: FakeDriver) -> None:
    """One by the kernel of which there are two, of all numbers, and one by another kernel."""
    x = np.arange(256, dtype="u1").view(E4M3)
    with np.errstate(all="ignore"):
        want = fanin.add_n([x, x[::-1].copy()])
    assert bits(fanin.add_n([driver.array(x), driver.array(x[::-1].copy())]).numpy()) == bits(want)
    y = driver.array(np.ones(4, "f4"))
    assert fanin.add_n([y, y]).numpy().tolist() == [2, 2, 2, 2]


@pytest.mark.skipif(bool(_core.kernels_made()), reason="the machine code is used")
@pytest.mark.parametrize(
    ("compute", "loaded"), [((7, 5), OLDER), ((8, 6), OLDER), ((8, 9), NEWER), ((9, 0), NEWER), ((12, 0), NEWER)]
)
def test_a_gpu_that_converts_float8_has_the_kernels_that_use_it(
    driver: FakeDriver, compute: tuple[int, int], loaded: str
) -> None:
    driver.set(compute=compute)
    assert "loaded" in fanin.info()["kernels"] and fanin.info()["kernels"]["loaded"] == {}
    sums_are_right(driver)
    assert fanin.info()["kernels"]["loaded"] == {"cuda:0": loaded}
    assert f"cuda:0 has {loaded}" in str(fanin.info())
    assert driver.calls("ModuleLoadData") == driver.live("modules") == (2 if loaded == NEWER else 1)


@pytest.mark.skipif(bool(_core.kernels_made()), reason="the machine code is used")
@pytest.mark.parametrize("call", ["ModuleLoadData", "ModuleGetFunction", "OccupancyMaxActiveBlocksPerMultiprocessor"])
def test_each_call_of_the_load_may_fail_once_and_the_older_ptx_is_loaded_instead(call: str) -> None:
    """A driver that is too old for the second PTX says so at one of them."""
    with use_driver(FakeDriver()) as first:
        first.set(compute=(8, 9))
        first.array(np.ones(1))
        most = first.calls(call)
    assert most > 1
    for at in range(most):
        for code, ends in ((222, False), (2, True), (719, True)):
            with use_driver(FakeDriver()) as each:
                each.set(compute=(8, 9))
                each.fail(at, code, call=call)
                if ends:
                    with pytest.raises(fanin.DeviceError, match=call):
                        each.array(np.ones(1))
                    assert code == 719 or each.live("modules") == 0
                    continue
                sums_are_right(each)
                assert fanin.info()["kernels"]["loaded"] == {"cuda:0": OLDER}
                assert each.live("modules") == 1


def test_the_second_ptx_has_the_kernels_that_convert_float8_e4m3fn_and_no_others() -> None:
    build = machine_code.kept_texts()
    assert set(re.findall(r"\.entry (\w+)", build[1])) == {f"fan_{k}_e4m3fn" for k in ("fold", "many", "fold_stats")}
    assert set(re.findall(r"\.entry (\w+)", build[1])) < set(re.findall(r"\.entry (\w+)", build[0]))
    assert "e4m3x2" in build[1] and "e4m3x2" not in build[0]
    assert ".target sm_75\n" in build[0] and ".target sm_89\n" in build[1]
