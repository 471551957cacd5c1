"""Every tests/c/test_*.c is a program that checks a piece of the core without Python: each is a test here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.support import TEST_C

pytestmark = [pytest.mark.core, pytest.mark.once]

PROGRAMS = sorted(p.name for p in TEST_C.glob("test_*.c"))


def sized(name: str) -> list[Any]:
    """A program once, or, where it has two sizes, as a sample and, marked `full`, with the word for the whole."""
    text = (TEST_C / name).read_text()
    # A program with threads in it is run again under the thread sanitizer.
    marks = [pytest.mark.threads] if "pthread_create" in text else []
    once = [pytest.param(name, (), marks=marks, id=name)]
    if "check_is_full(" not in text:
        return once
    return [*once, pytest.param(name, ("full",), marks=[*marks, pytest.mark.full], id=f"{name} full")]


def checks_made(output: str) -> int:
    """The N of the last line "ok N checks"; AssertionError where that is not the last line, or N is 0."""
    lines = output.strip().splitlines()
    found = re.fullmatch(r"ok (\d+) checks", lines[-1].strip()) if lines else None
    assert found, f"the last line is not 'ok N checks':\n{output[-2000:]}"
    assert int(found[1]) > 0, "the program checked nothing"
    return int(found[1])


@pytest.mark.parametrize(("name", "words"), [size for name in PROGRAMS for size in sized(name)])
def test_a_c_program_passes_its_checks(
    name: str, words: tuple[str, ...], c_program: Callable[..., Callable[..., object]]
) -> None:
    done = c_program(name)(*words)
    print(done.stdout)  # type: ignore[attr-defined]
    checks_made(done.stdout)  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
def test_sums_of_other_random_arrays_are_the_models_too(
    seed: int, c_program: Callable[..., Callable[..., Any]]
) -> None:
    checks_made(c_program("test_sum.c")(f"seed={seed}").stdout)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(8))
def test_window_sums_of_many_random_blocks_of_each_dtype_are_exact(
    which: int, c_program: Callable[..., Callable[..., Any]]
) -> None:
    text = c_program("test_window.c")("100000", str(which)).stdout
    print(text)
    (blocks,) = re.findall(r"^\w+: (\d+) blocks$", text, re.MULTILINE)
    assert int(blocks) >= 100_000
    assert re.search(r"^\d{5,} sums, 0 wrong$", text, re.MULTILINE)
    checks_made(text)


def test_the_runner_finds_a_planted_failure(c_program: Callable[..., Callable[..., object]], tmp_path: Path) -> None:
    good, bad, idle = (tmp_path / f"{n}.c" for n in ("good", "bad", "idle"))
    text = '#include "check.h"\nint main(void) {{ {} return check_done(); }}\n'
    good.write_text(text.format('CHECK(1 == 1); CHECK_STR("a", "a");'))
    bad.write_text(text.format("CHECK(1 == 1); CHECK_INT(2 + 2, 5);"))
    idle.write_text(text.format(""))
    assert checks_made(c_program(str(good), core=False)().stdout) == 2  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=r"bad\.c:2: CHECK failed: 2 \+ 2 == 5\n    got 4, expected 5"):
        c_program(str(bad), core=False)()
    with pytest.raises(AssertionError, match="checked nothing"):
        checks_made(c_program(str(idle), core=False)().stdout)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="the last line is not"):
        checks_made("ok 3 checks\nand then it went on\n")


def test_the_runner_finds_a_planted_crash(c_program: Callable[..., Callable[..., object]], tmp_path: Path) -> None:
    source = tmp_path / "crash.c"
    source.write_text("#include <stdlib.h>\nint main(void) { abort(); }\n")
    with pytest.raises(AssertionError, match="exit status -6"):
        c_program(str(source), core=False)()


@pytest.mark.parametrize(
    ("acts", "dies"),
    [
        ("fan_host_sched_locked(t, 0, 5); fan_host_sched_unlocking(t, 0, 5);", False),
        ("fan_host_sched_unlocking(t, 0, 5);", True),
        ("fan_host_sched_locked(t, 0, 5); fan_host_sched_unlocking(t, 0, 5); fan_host_sched_unlocking(t, 0, 5);", True),
        ("fan_host_sched_locked(t, 1, 5); fan_host_sched_unlocking(t, 0, 5);", True),
    ],
)
def test_unlocking_a_lock_that_is_not_held_ends_the_run(
    acts: str, dies: bool, c_program: Callable[..., Callable[..., object]], tmp_path: Path
) -> None:
    """So the proof finds a removed lock of the buffer, even if it has other effects."""
    source = tmp_path / "unlock.c"
    source.write_text(
        '#include "check.h"\n#include "device/sim/host_sched.h"\n'
        "int main(void) { int a; fan_host_sched *t ="
        f" fan_host_sched_new(1); for (int i = 0; i < 2; i++)"
        f" CHECK_OK(fan_host_sched_spawn(t, &a, NULL)); {acts}"
        " fan_host_sched_end(t, 0); fan_host_sched_end(t, 1); fan_host_sched_free(t); return check_done(); }\n"
    )
    if dies:
        with pytest.raises(AssertionError, match="exit status -6"):
            c_program(str(source))()
    else:
        checks_made(c_program(str(source))().stdout)  # type: ignore[attr-defined]
