"""Kernels that NVRTC compiles when a device is first used, and the cache that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin import _core, _kernels
from kit.pymutants import Mutant, survivors
from kit.support import run_python

pytestmark = pytest.mark.core

CODE = bytes(range(256)) * 4000


class StandIn:
    """What is used of Nvrtc, without NVIDIA's library: counts its compilations."""

    path = "libnvrtc.so"

    def __init__(
        self, code: bytes = CODE, version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (75, 90)
    ) -> None:
        self.code, self.version, self.archs, self.compiled = code, version, list(archs), 0

    def compile(self, sources: dict[str, str], options: list[str], cubin: bool) -> bytes:
        assert "device/kernels/kernels.cu" in sources and "--fmad=false" in options
        assert cubin == any(o.startswith("--gpu-architecture=sm_") for o in options)
        self.compiled += 1
        return self.code


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fanin" / "kernels"


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


def get(nvrtc: Any, arch: str = "sm_90") -> tuple[bytes, str]:
    return _kernels.compiled(nvrtc, arch)


# The cache


def test_kernels_are_compiled_once_and_read_from_then_on(cache: Path) -> None:
    first, second = StandIn(), StandIn(b"not compiled")
    assert get(first) == get(second) == (CODE, "sm_90 by NVRTC 13.0")
    assert (first.compiled, second.compiled) == (1, 0)
    (kept,) = files(cache)
    assert kept.name.startswith("sm_90-") and cache.stat().st_mode & 0o077 == 0


def test_another_architecture_version_source_or_option_is_compiled_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = StandIn()
    get(nvrtc)
    get(nvrtc, "compute_90")
    get(nvrtc, "sm_75")
    nvrtc.version = (13, 1)
    get(nvrtc)
    with monkeypatch.context() as m:
        m.setattr(_kernels, "OPTIONS", (*_kernels.OPTIONS, "--use_fast_math"))
        get(nvrtc)
    sources = json.loads(zlib.decompress(_core.kernels_source()))
    changed = zlib.compress(json.dumps({**sources, "device/kernels/args.h": "/* */"}).encode())
    with monkeypatch.context() as m:
        m.setattr(_core, "kernels_source", lambda: changed)
        get(nvrtc)
    assert nvrtc.compiled == len(files(cache)) == 6


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 40_000, len(CODE) + 31])
def test_a_file_that_was_cut_short_is_compiled_again_and_replaced(cache: Path, length: int) -> None:
    get(StandIn())
    (kept,) = files(cache)
    os.truncate(kept, length)
    nvrtc = StandIn()
    assert get(nvrtc)[0] == CODE and nvrtc.compiled == 1
    assert files(cache) == [kept] and _kernels.read(kept) == CODE


@pytest.mark.parametrize("at", [0, 31, 32, 50_000])
def test_a_file_with_one_wrong_bit_is_compiled_again_and_replaced(cache: Path, at: int) -> None:
    get(StandIn())
    (kept,) = files(cache)
    data = bytearray(kept.read_bytes())
    data[at] ^= 1
    kept.write_bytes(data)
    nvrtc = StandIn()
    assert get(nvrtc)[0] == CODE and nvrtc.compiled == 1 and _kernels.read(kept) == CODE


def test_a_process_that_is_killed_before_the_rename_leaves_nothing_that_is_read(cache: Path) -> None:
    code = (
        "import os, signal, sys; from fanin import _kernels\n"
        "_kernels.os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "_kernels.write(_kernels.Path(sys.argv[1]), b'x' * 100000)\n"
    )
    done = run_python(code, str(cache / "sm_90-0"), check=False)
    assert done.returncode == -9
    (left,) = files(cache)
    assert left.suffix == ".tmp" and _kernels.read(cache / "sm_90-0") is None
    nvrtc = StandIn()
    get(nvrtc)
    assert nvrtc.compiled == 1 and left in files(cache)  # it may be another process's that is at work
    os.utime(left, times=(0, time.time() - 2 * _kernels.LEFT_BEHIND))
    get(nvrtc, "sm_75")
    assert left not in files(cache) and len(files(cache)) == 2


def test_two_processes_that_write_and_read_at_once_see_whole_files_alone(cache: Path) -> None:
    code = (
        "import hashlib, sys; from pathlib import Path; from fanin import _kernels\n"
        "path, fill = Path(sys.argv[1]), sys.argv[2].encode()\n"
        "whole = {b * 300_000 for b in (b'a', b'b')}\n"
        "seen = set()\n"
        "for _ in range(100):\n"
        "    _kernels.write(path, fill * 300_000)\n"
        "    code = _kernels.read(path)\n"
        "    assert code in whole, code and len(code)\n"
        "    seen.add(code[:1])\n"
        "print(len(seen))\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(cache / "sm_90-0"), fill], stdout=subprocess.PIPE, text=True)
        for fill in "ab"
    ]
    for process in both:
        out, _ = process.communicate()
        assert process.returncode == 0 and out.strip() in ("1", "2")
    assert [p.name for p in files(cache)] == ["sm_90-0"]


def test_kernels_that_cannot_be_kept_are_used_and_info_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert get(StandIn()) == (CODE, "sm_90 by NVRTC 13.0, not kept: Not a directory")
    if os.geteuid():  # root writes into folders that are read-only
        (tmp_path / "closed").mkdir(mode=0o500)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "closed"))
        assert get(StandIn()) == (CODE, "sm_90 by NVRTC 13.0, not kept: Permission denied")


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert get(StandIn())[0] == CODE


def test_a_disk_that_fills_up_leaves_no_part_of_a_file(cache: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from fanin import _kernels\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: _kernels.write(Path(sys.argv[1]), b'x' * 100_000)\n"
        "except OSError as e: print(e.strerror)\n"
    )
    assert run_python(code, str(cache / "sm_90-0")).stdout.strip() == "File too large"
    assert files(cache) == []


#: Changes of _kernels.py that the checks of the cache must notice.
MUTANTS = [
    Mutant("fanin._kernels", old, new)
    for old, new in (
        ("os.replace(name, path)", "path.write_bytes(Path(name).read_bytes())"),
        ("os.unlink(name)\n        raise", "raise"),
        ("if hashlib.sha256(code).digest() == data[:32] else None", ""),
        ("json.dumps([version, options, HEADERS])", "json.dumps([options, HEADERS])"),
        ("json.dumps([version, options, HEADERS])", "json.dumps([version, HEADERS])"),
        ("HEADERS]).encode() + source)", "HEADERS]).encode())"),
        ("time.time() - old.stat().st_mtime > LEFT_BEHIND", "True"),
        ("time.time() - old.stat().st_mtime > LEFT_BEHIND", "False"),
        ("mkdir(mode=0o700,", "mkdir("),
    )
]


@pytest.mark.slow
def test_the_checks_of_the_cache_notice_planted_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(1000))

    def cache() -> Path:
        home = tmp_path / str(next(turns))
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        return home / "fanin" / "kernels"

    def once() -> None:
        test_kernels_are_compiled_once_and_read_from_then_on(cache())

    def anew() -> None:
        with pytest.MonkeyPatch.context() as m:
            test_another_architecture_version_source_or_option_is_compiled_anew(cache(), m)

    def damaged() -> None:
        for length in (0, 32, 40_000):
            test_a_file_that_was_cut_short_is_compiled_again_and_replaced(cache(), length)

    def left() -> None:
        folder = cache()
        folder.mkdir(parents=True)
        young, old = folder / "young.tmp", folder / "old.tmp"
        young.touch()
        old.touch()
        os.utime(old, times=(0, 0))
        get(StandIn())
        assert young.exists() and not old.exists()

    def whole_or_nothing() -> None:
        folder = cache()
        with pytest.MonkeyPatch.context() as m:
            m.setattr(_kernels.os, "replace", fails)
            assert get(StandIn())[1].endswith("not kept: full")
        assert files(folder) == []

    def fails(*_: object) -> None:
        raise OSError(28, "full")

    assert survivors(MUTANTS, [once, anew, damaged, left, whole_or_nothing]) == []


# Which compiler, and what for


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[list[StandIn]]:
    """The compilers that `image` finds."""
    found: list[StandIn] = []
    monkeypatch.setattr(_kernels, "found", lambda: found)
    yield found


def image(version: int = 13000, compute: int = 90) -> tuple[bytes, str]:
    return _kernels.image("libcuda.so.1", version, compute, "cuda:0 has no kernels")


@pytest.mark.parametrize(
    ("driver", "compute", "words"),
    [
        (13000, 90, "sm_90 by NVRTC 13.0"),
        (13000, 75, "sm_75 by NVRTC 13.0"),
        (13000, 121, "compute_90 by NVRTC 13.0"),
        (12040, 90, "sm_90 by NVRTC 12.9"),
        (12040, 80, "compute_75 by NVRTC 12.9"),
        (0, 90, "sm_90 by NVRTC 13.0"),
    ],
)
def test_the_newest_compiler_that_is_no_major_version_later_than_the_driver_compiles(
    compilers: list[StandIn], driver: int, compute: int, words: str
) -> None:
    compilers += [StandIn(version=(12, 9)), StandIn(version=(12, 4)), StandIn(version=(13, 0))]
    assert image(driver, compute) == (CODE, words)


def test_a_later_compiler_is_tried_where_there_is_no_other(compilers: list[StandIn]) -> None:
    compilers.append(StandIn(version=(14, 0)))
    assert image() == (CODE, "sm_90 by NVRTC 14.0")


@pytest.mark.parametrize(("driver", "extra"), [(13000, "fanin[cuda]"), (12040, "fanin[cuda12]"), (0, "fanin[cuda]")])
def test_without_a_compiler_the_error_names_the_command_that_helps(
    compilers: list[StandIn], driver: int, extra: str
) -> None:
    with pytest.raises(fanin.DeviceError, match="cuda:0 has no kernels") as e:
        image(driver)
    text = str(e.value)
    assert f"pip install {extra};" in text and "FANIN_NVCC=1" in text and "No libnvrtc was found" in text


def test_a_compiler_that_fails_or_knows_no_such_gpu_is_named_with_the_reason(compilers: list[StandIn]) -> None:
    class Failing(StandIn):
        def compile(self, *_: object, **__: object) -> bytes:
            raise OSError("nvrtcCompileProgram failed: kernels.cu(1): error")

    compilers += [Failing(), StandIn(version=(12, 9), archs=(100,))]
    with pytest.raises(fanin.DeviceError) as e:
        image()
    assert r"NVRTC 13.0 (libnvrtc.so): nvrtcCompileProgram failed: kernels.cu(1): error" in str(e.value)
    assert "NVRTC 12.9 (libnvrtc.so) compiles for compute 10.0 and later" in str(e.value)
    compilers.append(StandIn(version=(11, 8)))
    assert image() == (CODE, "sm_90 by NVRTC 11.8")  # an older one that works


def test_a_gpu_that_is_older_than_the_kernels_is_refused_by_name(compilers: list[StandIn]) -> None:
    compilers.append(StandIn(archs=(50, 70, 75)))
    with pytest.raises(fanin.DeviceError, match=r"need compute 7\.5 or later, and this device is 7\.0"):
        image(12000, 70)


def test_each_folder_of_nvidias_wheels_and_of_the_toolkit_is_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = [tmp_path / "nvidia" / p for p in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12")]
    for path in wheels:
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    places = list(_kernels.places())
    assert sorted(places[:2]) == sorted(map(str, wheels)) and places[2] == "/opt/cuda/lib64/libnvrtc.so"
    assert all(n.path not in map(str, wheels) for n in _kernels.found())  # files that are no libraries are passed over


# With a driver


@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
def test_a_device_without_kernels_raises_the_error_and_works_once_a_compiler_is_there(
    driver: FakeDriver, compilers: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels, "IMAGES", {})
    driver.set(compute=(9, 0))
    with pytest.raises(fanin.DeviceError, match=r"cuda:0 has no kernels.*pip install fanin\[cuda12\]"):
        driver.array(np.ones(3))
    assert driver.live("contexts") == driver.live("modules") == 0
    compilers.append(StandIn(b"\x7fELF" + bytes(4) + b"\x08" + bytes(39) + bytes([0, 90, 0, 0]), version=(12, 4)))
    x = driver.array(np.ones(3))
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]
    assert fanin.info()["kernels"]["loaded"] == {"cuda:0": "sm_90 by NVRTC 12.4"}
    driver.array(np.ones(3), device=1)
    assert compilers[0].compiled == 1  # the second device's came from the cache


@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
def test_compiled_kernels_that_the_driver_refuses_are_told_by_call_and_code(
    driver: FakeDriver, compilers: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels, "IMAGES", {})
    compilers.append(StandIn(b"// no PTX of ours\0"))
    with pytest.raises(fanin.DeviceError, match=r"cuModuleLoadData.*\(200\)"):
        driver.array(np.ones(3))


@pytest.mark.partners
@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
@pytest.mark.parametrize("compute", [75, 90, 93])
def test_what_the_real_nvrtc_compiles_is_loaded_and_kept(
    driver: FakeDriver, cache: Path, monkeypatch: pytest.MonkeyPatch, compute: int
) -> None:
    if not _kernels.found():
        pytest.skip("no libnvrtc: pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(_kernels, "IMAGES", {})
    driver.set(version=13000, compute=(compute // 10, compute % 10))
    x = driver.array(np.ones(3))
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]
    loaded = fanin.info()["kernels"]["loaded"]["cuda:0"]
    assert loaded.startswith("compute_90 by" if compute == 93 else f"sm_{compute} by NVRTC")
    (kept,) = files(cache)
    data = kept.read_bytes()
    assert hashlib.sha256(data[32:]).digest() == data[:32]
