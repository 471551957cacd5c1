"""The proof of the stream rules on the shipped C code, and the faults that it must find (docs/proof.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fanin import _core
from support import CSRC, build_c, run_c

SOURCES = ["proof.c", "proof_config.c", "proof_run.c", "proof_split.c", "proof_values.c"]
MUTANTS = sorted({int(n) for p in (CSRC / "buffer").glob("*.c") for n in re.findall(r"FAN_MUT\((\d+)\)", p.read_text())})
# Two marks, each of which guards an edge that another guards too: alone neither shows, together they do.
PAIRED = {"S9.mark": "S9.mark+S13.mark", "S22.mark": "S22.mark+S19.mark"}
# Argued in docs/proof.md to be without effect on order.
EQUIVALENT = {10, 21}


@pytest.fixture(scope="module")
def proof() -> Path:
    return build_c(SOURCES, "-O2", "-Wl,--wrap=fan_device_run")


def numbers(line: str) -> dict[str, int]:
    return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)(?![\w.])", line)}


def judged(proof: Path, *args: str, timeout: float = 600) -> list[dict[str, int]]:
    lines = [x for x in run_c(proof, *args, timeout=timeout).stdout.splitlines() if x.startswith(args[0])]
    assert lines
    return [numbers(x) for x in lines]


@pytest.mark.rule("S8", "S9", "S10", "S11", "S12", "S13", "S15", "S18", "S19")
@pytest.mark.parametrize(
    ("sizes", "configurations"),
    [(("1", "2", "2"), 100), (("2", "2", "2"), 5000), (("3", "2", "1", "few"), 500)],
    ids=["one producer", "two producers", "three producers"],
)
def test_no_order_of_whole_adds_can_race(proof: Path, sizes: tuple[str, ...], configurations: int) -> None:
    [found] = judged(proof, "whole", *sizes)
    assert found["configurations"] >= configurations
    assert found["traces"] > found["configurations"]
    assert (found["races"], found["others"], found["failing"]) == (0, 0, 0)


@pytest.mark.slow
def test_no_order_of_whole_adds_of_three_producers_on_two_streams_of_two_devices_can_race(proof: Path) -> None:
    [found] = judged(proof, "whole", "3", "2", "2", "few", timeout=3600)
    assert found["configurations"] > 5000
    assert (found["races"], found["others"], found["failing"]) == (0, 0, 0)


def test_no_order_of_locks_and_device_calls_can_race(proof: Path) -> None:
    for found in judged(proof, "split", "1", "2"):
        assert found["traces"] > 0
        assert (found["races"], found["others"], found["failing"]) == (0, 0, 0)


@pytest.mark.slow
def test_no_order_of_locks_and_device_calls_on_two_devices_can_race(proof: Path) -> None:
    for found in judged(proof, "split", "2", "2", timeout=3600):
        assert (found["races"], found["others"], found["failing"]) == (0, 0, 0)


def killed(proof: Path, name: str) -> bool:
    out = run_c(proof, "kill", name, check=False).stdout
    line = next(x for x in out.splitlines() if x.startswith(f"kill {name} "))
    return numbers(line)["failing"] > 0


@pytest.mark.parametrize("word", _core.rules_plan_words())
def test_a_wait_record_or_mark_that_is_left_out_is_found(proof: Path, word: str) -> None:
    assert killed(proof, PAIRED.get(word, word))


@pytest.mark.parametrize("mutant", [n for n in MUTANTS if n not in EQUIVALENT])
def test_a_lock_or_an_order_that_is_broken_is_found(proof: Path, mutant: int) -> None:
    assert killed(proof, f"mut:{mutant}")


def test_every_planted_fault_is_known() -> None:
    assert len(MUTANTS) >= 20
    assert set(MUTANTS) >= EQUIVALENT
    assert set(_core.rules_plan_words()) >= set(PAIRED)
