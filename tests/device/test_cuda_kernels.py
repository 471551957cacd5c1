"""The CUDA kernels: what the build embeds, what compilers make of them, and what a driver does with an image."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin import _core, _nvcc
from kit import machine_code
from kit.fake_nvcc import MADE, calls, fake_nvcc
from kit.support import CSRC, ROOT, RUNGS, emptied

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


def embedded(text: str, name: str) -> bytes:
    """The bytes of an array in the header that build.py writes."""
    (body,) = re.findall(rf"{name}\[\] =([^;]+);", text)
    return bytes(int(byte, 8) for byte in re.findall(r"\\(\d{3})", body))


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """build.py on a copy of the sources, with one nvcc or none."""
    inside = [f"csrc/{name}" for name in ("device/kernels/build.py", *machine_code.build.sources())]
    for name in (*inside, "python/fanin/_nvcc.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def run(*words: str, nvcc: Path | None) -> Any:
        env = {
            **os.environ,
            "NVCC": str(nvcc or ""),
            "CUDA_HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": "",
        }
        script = str(tmp_path / "csrc/device/kernels/build.py")
        return subprocess.run([sys.executable, "-S", script, *words], capture_output=True, text=True, env=env)

    return run


def test_machine_code_is_made_once_for_the_architectures_that_nvcc_supports(build: Any, tmp_path: Path) -> None:
    nvcc, out = fake_nvcc(tmp_path), tmp_path / "new/embedded.h"
    first = build("--nvcc", str(out), nvcc=nvcc)
    assert first.returncode == 0, first.stderr
    text = out.read_text()
    assert embedded(text, "fan_kernels_fatbin") == MADE
    assert 'fan_kernels_made[] = "sm_75, sm_90 and PTX for compute_90, by nvcc 13.2"' in text
    (called,) = (call for call in calls(nvcc) if "-fatbin" in call)
    assert set(_nvcc.EXACT) <= set(called.split()) and "sm_80" not in called and "--compress-mode" not in called
    assert build("--nvcc", str(out), nvcc=nvcc).returncode == 0
    assert sum("-fatbin" in call for call in calls(nvcc)) == 1  # it was there
    with (tmp_path / "csrc/device/kernels/args.h").open("a") as f:
        f.write("/* */")
    assert build("--nvcc", str(out), nvcc=nvcc).returncode == 0
    assert sum("-fatbin" in call for call in calls(nvcc)) == 2


def test_only_the_source_is_embedded_unless_a_build_requests_machine_code(build: Any, tmp_path: Path) -> None:
    nvcc, out = fake_nvcc(tmp_path), tmp_path / "embedded.h"
    done = build(str(out), nvcc=nvcc)
    assert done.returncode == 0 and "the source alone" in done.stdout
    text = out.read_text()
    assert "fan_kernels_fatbin_bytes = 0;" in text and 'fan_kernels_made[] = ""' in text
    assert json.loads(zlib.decompress(embedded(text, "fan_kernels_source"))) == machine_code.build.sources()
    assert calls(nvcc) == []


@pytest.mark.parametrize(
    ("change", "code", "printed"),
    [
        (None, 2, r"no nvcc in any of .*/bin/nvcc"),
        (("*) while", "*) echo 'kernels.cu(7): no' >&2; exit 3; while"), 1, r"exit status 3: kernels\.cu\(7\): no"),
        (("*) while", "*) kill -9 $$; while"), 1, "ended by SIGKILL"),
        (("release", "of"), 1, "names no release"),
        (("sm_75 sm_90", "sm_50"), 1, "compiles for none of sm_75"),
    ],
)
def test_a_build_that_requests_machine_code_fails_without_it_and_writes_nothing(
    build: Any, tmp_path: Path, change: tuple[str, str] | None, code: int, printed: str
) -> None:
    nvcc = fake_nvcc(tmp_path, *change) if change else None
    done = build("--nvcc", str(tmp_path / "embedded.h"), nvcc=nvcc)
    assert done.returncode == code and re.search(printed, done.stdout), done
    assert not (tmp_path / "embedded.h").exists()


@pytest.mark.once
def test_every_byte_is_embedded_as_it_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3 + b'0123\\"??/%'
    (tmp_path / "bytes.c").write_text(
        "#include <stdio.h>\n"
        + machine_code.build.array("some", data)
        + machine_code.build.array("none", b"")
        + "int main(void) { return fwrite(some, 1, some_bytes, stdout) != some_bytes || none_bytes; }\n"
    )
    words = [
        *shlex.split(os.environ.get("CC", "cc")),
        "-Wall",
        "-Wextra",
        "-Werror",
        "-std=c11",
        "bytes.c",
        "-o",
        "bytes",
    ]
    subprocess.run(words, cwd=tmp_path, check=True, env=emptied())
    assert subprocess.run([tmp_path / "bytes"], stdout=subprocess.PIPE, check=True, env=emptied()).stdout == data


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


def test_the_error_of_a_driver_that_cannot_load_the_kernels_has_call_and_code(driver: FakeDriver) -> None:
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
    assert (_core.kernels_made() or "none built in") in " ".join(str(fanin.info()).split())


@pytest.mark.parametrize(
    ("embedded", "compiled", "loaded"),
    [
        ((0, 0), "--", "machine code | 1 loads 0 unloads | fine | not wanted"),
        ((0, 0), (0, 0), "machine code | 1 loads 0 unloads | fine | not wanted"),
        ((209, 0), "--", "machine code | 1 loads 0 unloads | failed | wanted"),
        ((209, 0), (0, 0), "machine code compiled | 2 loads 0 unloads | fine | not wanted"),
        ((0, 200), (0, 0), "machine code compiled | 2 loads 1 unloads | fine | not wanted"),  # loaded lazily
        ((999, 0), (0, 0), "machine code compiled | 2 loads 0 unloads | fine | not wanted"),  # by any code
        ((2, 0), (0, 0), "machine code | 1 loads 0 unloads | failed | not wanted"),
        ((0, 2), "--", "machine code | 1 loads 1 unloads | failed | not wanted"),
        ((700, 0), "--", "machine code | 1 loads 0 unloads | failed | not wanted"),
        ((0, 719), (0, 0), "machine code | 1 loads 0 unloads | failed | not wanted"),
        ("--", (0, 0), "compiled | 1 loads 0 unloads | fine | not wanted"),
        ("--", (218, 0), "compiled | 1 loads 0 unloads | failed | not wanted"),
        ((209, 0), (0, 500), "machine code compiled | 2 loads 1 unloads | failed | not wanted"),
    ],
)
def test_an_image_that_the_driver_refuses_is_replaced_by_the_next(
    c_program: Any, embedded: Any, compiled: Any, loaded: str
) -> None:
    """At the load or at a look-up, by any code but that of a failed allocation and those after which nothing works."""
    sources = [str(p) for rung in RUNGS for p in sorted((CSRC / rung).glob("**/*.c")) if p.parent.name != "kernels"]
    program = "load_kernels_alone.c" if embedded == "--" else "load_kernels.c"
    done = c_program(program, *sources, core=False)(*map(str, (*embedded, *compiled)))
    assert done.stdout.startswith(loaded), done.stdout
    assert ("cuModule" in done.stdout) == ("failed" in loaded)
