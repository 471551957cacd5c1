"""Kernels that NVRTC or nvcc compiles when a device is first used, and the cache that keeps them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fake_cuda import FakeDriver
from fanin import _core, _kernels, _nvcc
from kit.fake_nvcc import calls, fake_nvcc
from kit.prepared import run_prepared
from kit.pymutants import Mutant, survivors

pytestmark = pytest.mark.core

CODE = bytes(range(256)) * 4000


class StandIn:
    """What is used of Nvrtc, without NVIDIA's library: counts its compilations."""

    name = "NVRTC"
    path = "libnvrtc.so"
    options = _kernels.Nvrtc.options

    def __init__(
        self, code: bytes = CODE, version: tuple[int, int] = (13, 0), archs: tuple[int, ...] = (75, 90)
    ) -> None:
        self.code, self.version, self.archs, self.compiled = code, version, list(archs), 0

    def compile(self, sources: dict[str, str], arch: str) -> bytes:
        assert "device/kernels/kernels.cu" in sources and arch.startswith(("sm_", "compute_"))
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


def test_another_architecture_version_source_or_option_is_compiled_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = StandIn()
    get(nvrtc)
    get(nvrtc, "compute_90")
    get(nvrtc, "sm_75")
    nvrtc.version = (13, 1)
    get(nvrtc)
    nvrtc.options = (*nvrtc.options, "--use_fast_math")
    get(nvrtc)
    nvrtc.options, nvrtc.name = StandIn.options, "nvcc"
    get(nvrtc)
    sources = json.loads(zlib.decompress(_core.kernels_source()))
    changed = zlib.compress(json.dumps({**sources, "device/kernels/args.h": "/* */"}).encode())
    with monkeypatch.context() as m:
        m.setattr(_core, "kernels_source", lambda: changed)
        get(nvrtc)
    assert nvrtc.compiled == len(files(cache)) == 7


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
    done = run_prepared(code, str(cache / "sm_90-0"), check=False)
    assert done.returncode == -9
    (left,) = files(cache)
    assert left.suffix == ".tmp" and _kernels.read(cache / "sm_90-0") is None
    nvrtc = StandIn()
    get(nvrtc)
    assert nvrtc.compiled == 1 and left in files(cache)  # it may be another process's that is at work
    os.utime(left, times=(0, time.time() - 2 * _kernels.LEFT_BEHIND))
    get(nvrtc, "sm_75")
    assert left not in files(cache) and len(files(cache)) == 2


def test_two_processes_that_write_and_read_at_once_read_only_whole_files(cache: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from fanin import _kernels\n"
        "path, other = Path(sys.argv[1]), os.fork()\n"
        "fill = b'a' if other else b'b'\n"
        "whole = {b * 300_000 for b in (b'a', b'b')}\n"
        "for _ in range(25):\n"
        "    _kernels.write(path, fill * 300_000)\n"
        "    code = _kernels.read(path)\n"
        "    assert code in whole, code and len(code)\n"
        "if other: assert os.waitpid(other, 0)[1] == 0\n"
    )
    run_prepared(code, str(cache / "sm_90-0"))
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
    assert run_prepared(code, str(cache / "sm_90-0")).stdout.strip() == "File too large"
    assert files(cache) == []


#: Changes of _kernels.py that the checks of the cache must notice.
MUTANTS = [
    Mutant("fanin._kernels", old, new)
    for old, new in (
        ("os.replace(name, path)", "path.write_bytes(Path(name).read_bytes())"),
        ("os.unlink(name)\n        raise", "raise"),
        ("if hashlib.sha256(code).digest() == data[:32] else None", ""),
        ("[compiler.name, version, arch,", "[version, arch,"),
        ("[compiler.name, version, arch,", "[compiler.name, arch,"),
        ("arch, compiler.options, HEADERS]", "arch, HEADERS]"),
        ("made_by).encode() + source)", "made_by).encode())"),
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
            test_another_architecture_version_source_or_option_is_compiled_again(cache(), m)

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
    monkeypatch.setattr(_nvcc, "find", lambda: None)
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
    assert f"pip install {extra} brings NVRTC" in text and "nvcc is part of the CUDA toolkit" in text
    assert ("version 12 or earlier" in text) == (driver == 12040)
    assert "No libnvrtc and no nvcc was found" in text


def test_a_compiler_that_fails_or_lacks_the_gpu_is_named_with_the_reason(compilers: list[StandIn]) -> None:
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


# nvcc

#: What the fake driver takes for machine code of sm_90.
CUBIN = b"\x7fELF" + bytes(4) + b"\x08" + bytes(39) + bytes([0, 90, 0, 0])


@pytest.fixture
def nvcc(compilers: list[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only nvcc that is found: a fake one."""
    path = fake_nvcc(tmp_path / "toolkit/bin", made=CUBIN)
    monkeypatch.setattr(_nvcc, "find", lambda: path)
    return path


def builds(nvcc: Path) -> list[str]:
    """The calls that compile."""
    return [call for call in calls(nvcc) if "-o" in call.split()]


@pytest.mark.parametrize(
    ("compute", "arch", "form"), [(90, "sm_90", "-cubin"), (75, "sm_75", "-cubin"), (121, "compute_90", "-ptx")]
)
def test_nvcc_compiles_the_embedded_source_for_the_device_and_once(
    nvcc: Path, cache: Path, compute: int, arch: str, form: str
) -> None:
    assert image(13000, compute) == image(13000, compute) == (CUBIN, f"{arch} by nvcc 13.2")
    (call,) = builds(nvcc)
    assert {form, f"--gpu-architecture={arch}", *_nvcc.EXACT} <= set(call.split())
    sources = json.loads(zlib.decompress(_core.kernels_source()))
    assert (nvcc.parent / "source").read_text() == sources[_nvcc.KERNELS]
    (kept,) = files(cache)
    assert kept.name.startswith(f"{arch}-") and _kernels.read(kept) == CUBIN


@pytest.mark.parametrize(
    ("driver", "nvrtc", "words"),
    [
        (13000, (13, 0), "sm_90 by NVRTC 13.0"),
        (13000, (12, 4), "sm_90 by NVRTC 12.4"),
        (13000, (14, 0), "sm_90 by nvcc 13.2"),  # such an NVRTC is too new for the driver
        (12040, (14, 0), "sm_90 by NVRTC 14.0"),  # both are
        (12040, (13, 2), "sm_90 by NVRTC 13.2"),
        (12040, (13, 1), "sm_90 by nvcc 13.2"),
    ],
)
def test_nvcc_compiles_where_no_nvrtc_fits_the_driver_as_well(
    compilers: list[StandIn], nvcc: Path, driver: int, nvrtc: tuple[int, int], words: str
) -> None:
    compilers.append(StandIn(version=nvrtc))
    assert image(driver)[1] == words
    fits = nvrtc[0] <= driver // 1000
    assert (calls(nvcc) == []) == fits, "where an NVRTC serves, nvcc is not run"


def test_nvcc_compiles_where_nvrtc_fails(compilers: list[StandIn], nvcc: Path) -> None:
    class Failing(StandIn):
        def compile(self, *_: object, **__: object) -> bytes:
            raise OSError("nvrtcCompileProgram failed")

    compilers.append(Failing())
    assert image() == (CUBIN, "sm_90 by nvcc 13.2")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("*) while", "*) echo 'kernels.cu(7): no' >&2; exit 3; while", r"exit status 3: kernels\.cu\(7\): no"),
        ("*) while", "*) kill -9 $$; while", r"ended by SIGKILL"),
        ("*) while", "*) exit 0; while", r"No such file"),
        ("release", "of", r"--version names no release: Cuda compilation tools, of 13\.2"),
        ("sm_50 sm_75 sm_90 sm_90a sm_999", "sm_100", r"compiles for compute 10\.0 and later"),
        ("sm_50 sm_75 sm_90 sm_90a sm_999", "", r"compiles for no device"),
        ("#!/bin/sh", "#!/no/such/shell", r"No such file"),
    ],
)
def test_an_nvcc_that_fails_is_named_with_its_messages_and_nothing_is_kept(
    nvcc: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    fake_nvcc(nvcc.parent, old, new)
    scratch = tmp_path / "scratch"
    scratch.mkdir(parents=True)
    monkeypatch.setattr(_nvcc.tempfile, "tempdir", str(scratch))
    with pytest.raises(fanin.DeviceError, match=message) as e:
        image()
    assert str(nvcc) in str(e.value) and "pip install fanin[cuda]" in str(e.value)
    assert files(cache) == [] and list(scratch.iterdir()) == []


def test_each_place_of_nvcc_is_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("named/nvcc", "toolkit/bin/nvcc", "path/nvcc", "site/nvidia/cu13/bin/nvcc")
    every = [fake_nvcc((tmp_path / name).parent) for name in names]
    monkeypatch.setenv("NVCC", str(every[0]))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    for path in every:
        assert _nvcc.find() == path
        path.unlink()
    assert _nvcc.find() is None


#: Compiles with the nvcc named first, in the main thread or in another one; with a fault planted in _nvcc if two more
#: words are given. The cache and temporary files are below the second word.
COMPILES = """
import os, sys, tempfile, threading
from pathlib import Path
from fanin import _kernels, _nvcc
nvcc, home, thread, old, new = sys.argv[1:]
os.environ["XDG_CACHE_HOME"], tempfile.tempdir = home + "/cache", home + "/scratch"
text = Path(_nvcc.__file__).read_text()
assert text.count(old) == 1 or not old
exec(compile(text.replace(old, new) if old else text, _nvcc.__file__, "exec"), vars(_nvcc))

def compiled():
    try:
        _kernels.compiled(_nvcc.Nvcc(Path(nvcc)), "sm_90")
    except BaseException as e:
        print(type(e).__name__, e, flush=True)
    ended.set()

ended = threading.Event()
if thread == "main":
    compiled()
else:
    threading.Thread(target=compiled).start()
    while not ended.is_set():
        try:
            ended.wait()
        except KeyboardInterrupt:
            pass
"""
#: What the fake nvcc starts, as the real one starts its own compilers.
WORKS = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
with open(sys.argv[1], "w", buffering=1) as fifo:
    print("begun", file=fifo)
    signal.sigtimedwait([signal.SIGUSR1], float(sys.argv[2]))
    print("survived", file=fifo)
"""


def interrupted(tmp_path: Path, thread: str, old: str = "", new: str = "", seconds: int = 600) -> tuple[str, str]:
    """What a process prints that is interrupted while nvcc compiles, and what became of nvcc's own child: "" if it
    was ended, "survived" if it worked on until it was done after `seconds`.

    The main thread alone is interrupted by a signal to the process, another one as by a terminal: the whole group.
    """
    for name in ("cache", "scratch"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "works.py").write_text(WORKS)
    works = f'"{sys.executable}" -I -S "$here/works.py" "$here/fifo" {seconds}'
    nvcc = fake_nvcc(tmp_path, "*) while", f"*) {works}; exit 9; while")
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILES, str(nvcc), str(tmp_path), thread, old, new],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with open(tmp_path / "fifo") as fifo:
        assert fifo.readline() == "begun\n"
        if thread == "main":
            os.kill(process.pid, signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)
        child = fifo.read().strip()
    printed, _ = process.communicate()
    return printed, child


@pytest.mark.parametrize(("thread", "printed"), [("main", "KeyboardInterrupt"), ("other", "OSError ended by SIGINT")])
def test_ctrl_c_ends_nvcc_and_all_that_it_started_and_leaves_nothing(tmp_path: Path, thread: str, printed: str) -> None:
    words, child = interrupted(tmp_path, thread)
    assert words.startswith(printed) and child == ""
    assert not (tmp_path / "cache/fanin").exists() and list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("os.killpg(process.pid, signal.SIGKILL)", "process.kill()"),
        ("os.killpg(process.pid, signal.SIGKILL)", "pass"),
        ("process_group=0 if grouped else None", "process_group=None"),
    ],
)
def test_the_check_of_ctrl_c_notices_planted_faults(tmp_path: Path, old: str, new: str) -> None:
    words, child = interrupted(tmp_path, "main", old, new, seconds=5)
    assert child == "survived" or not words.startswith("KeyboardInterrupt")


#: Changes of the two modules that the checks of nvcc must notice.
NVCC_MUTANTS = [
    *(
        Mutant("fanin._nvcc", old, new)
        for old, new in (
            ("*options, *EXACT, str(", "*options, str("),
            ('"-cubin" if arch.startswith("sm_") else "-ptx"', '"-cubin"'),
            ("if process.returncode:", "if process.returncode > 0:"),
            ("(messages or printed)", "printed"),
            ('r"\\bsm_(\\d+)\\b"', 'r"sm_(\\d\\d)"'),
        )
    ),
    *(
        Mutant("fanin._kernels", old, new)
        for old, new in (
            ("(n for n in libraries if fits(n))\n    rest", "libraries\n    rest"),
            ("(fits(n), n.version)", "n.version"),
            ('why.append(f"nvcc ({path}): {e}")', "pass"),
            ("if path := _nvcc.find():", "if path := None:"),
        )
    ),
]


@pytest.mark.slow
def test_the_checks_of_nvcc_notice_planted_faults(tmp_path: Path) -> None:
    turns = iter(range(1000))

    def checks(use: Callable[[Path, Path, list[StandIn], pytest.MonkeyPatch], None]) -> Callable[[], None]:
        """A check with an nvcc, a cache and a list of NVRTCs of its own."""

        def check() -> None:
            home = tmp_path / str(next(turns))
            nvcc = fake_nvcc(home / "toolkit/bin", made=CUBIN)
            compilers: list[StandIn] = []
            with pytest.MonkeyPatch.context() as m:
                m.setenv("XDG_CACHE_HOME", str(home))
                m.setattr(_kernels, "found", lambda: compilers)
                m.setattr(_nvcc, "find", lambda: nvcc)
                use(nvcc, home / "fanin/kernels", compilers, m)

        return check

    def later(nvcc: Path, cache: Path, _: list[StandIn], __: pytest.MonkeyPatch) -> None:
        test_nvcc_compiles_the_embedded_source_for_the_device_and_once(nvcc, cache, 121, "compute_90", "-ptx")

    def order(driver: int, nvrtc: tuple[int, int], words: str) -> Callable[[], None]:
        def use(nvcc: Path, _: Path, compilers: list[StandIn], __: pytest.MonkeyPatch) -> None:
            test_nvcc_compiles_where_no_nvrtc_fits_the_driver_as_well(compilers, nvcc, driver, nvrtc, words)

        return checks(use)

    def failure(old: str, new: str, message: str) -> Callable[[], None]:
        def use(nvcc: Path, cache: Path, _: list[StandIn], m: pytest.MonkeyPatch) -> None:
            test_an_nvcc_that_fails_is_named_with_its_messages_and_nothing_is_kept(
                nvcc, cache, cache.parent, m, old, new, message
            )

        return checks(use)

    every = [
        checks(later),
        order(13000, (14, 0), "sm_90 by nvcc 13.2"),
        order(12040, (13, 1), "sm_90 by nvcc 13.2"),
        failure("*) while", "*) echo no >&2; exit 3; while", "exit status 3: no"),
        failure("*) while", "*) kill -9 $$; while", "ended by SIGKILL"),
        failure("release", "of", "names no release"),
        failure("sm_50 sm_75 sm_90 sm_90a sm_999", "sm_100", "compute 10.0 and later"),
    ]
    assert survivors(NVCC_MUTANTS, every) == []


def line_of_progress(capsys: pytest.CaptureFixture[str], *, quiet: str) -> str:
    with pytest.MonkeyPatch.context() as m:
        m.setenv("FANIN_QUIET", quiet)
        get(StandIn())
    return capsys.readouterr().err


def test_one_line_announces_a_compilation_and_none_a_reading(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"fanin: compiling the CUDA kernels for sm_90 by NVRTC 13.0 (once; kept in {cache})\n"
    assert line_of_progress(capsys, quiet="") == expected
    assert line_of_progress(capsys, quiet="") == ""


@pytest.mark.parametrize(("quiet", "lines"), [("1", 0), ("0", 1)])
def test_fanin_quiet_silences_the_line(cache: Path, capsys: pytest.CaptureFixture[str], quiet: str, lines: int) -> None:
    assert len(line_of_progress(capsys, quiet=quiet).splitlines()) == lines


def test_a_process_without_stderr_compiles(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert get(StandIn())[0] == CODE


def test_an_nvcc_at_hand_answers() -> None:
    path = _nvcc.find()
    if not path:
        pytest.skip("no nvcc is at hand")
    nvcc = _nvcc.Nvcc(path)
    assert nvcc.version >= (11, 0) and {80, 90} & set(nvcc.archs)


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
    compilers.append(StandIn(CUBIN, version=(12, 4)))
    x = driver.array(np.ones(3))
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]
    assert fanin.info()["kernels"]["loaded"] == {"cuda:0": "sm_90 by NVRTC 12.4"}
    driver.array(np.ones(3), device=1)
    assert compilers[0].compiled == 1  # the second device's came from the cache


@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
def test_the_error_for_compiled_kernels_that_the_driver_refuses_has_call_and_code(
    driver: FakeDriver, compilers: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels, "IMAGES", {})
    compilers.append(StandIn(b"// no PTX of ours\0"))
    with pytest.raises(fanin.DeviceError, match=r"cuModuleLoadData.*\(200\)"):
        driver.array(np.ones(3))


@pytest.mark.partners
@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
@pytest.mark.parametrize("compute", [75, 90, 93])
def test_kernels_of_the_real_nvrtc_are_loaded_and_kept(
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


@pytest.mark.slow
@pytest.mark.skipif(bool(_core.kernels_made()), reason="the build embedded machine code")
@pytest.mark.parametrize("compute", [90, 93])
def test_kernels_of_the_real_nvcc_are_loaded_and_kept(
    driver: FakeDriver, cache: Path, monkeypatch: pytest.MonkeyPatch, compute: int
) -> None:
    if not _nvcc.find():
        pytest.skip("no nvcc is at hand")
    monkeypatch.setattr(_kernels, "IMAGES", {})
    monkeypatch.setattr(_kernels, "found", list)
    driver.set(version=13000, compute=(compute // 10, compute % 10))
    x = driver.array(np.ones(3))
    assert fanin.add_n([x, x]).numpy().tolist() == [2, 2, 2]
    loaded = fanin.info()["kernels"]["loaded"]["cuda:0"]
    assert loaded.startswith("compute_90 by nvcc" if compute == 93 else f"sm_{compute} by nvcc")
    (kept,) = files(cache)
    assert _kernels.read(kept)
