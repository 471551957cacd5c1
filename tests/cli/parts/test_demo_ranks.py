"""The demo on several ranks: the same weights for each number of them, and an error where they differ."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import Any

import pytest

from fanin import dist
from fanin.cli import demo, main
from kit.ranks import NO_MPI, under_mpiexec


def digests(text: str) -> list[str]:
    return re.findall(r"([0-9a-f]{16})  accuracy", text)


def test_the_weights_are_the_same_on_1_2_and_3_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "3", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert len(digests(out)) == 3 and len(set(digests(out))) == 1
    assert "1 rank, threads" in out and "3 ranks, threads" in out and "loss: " in out and "the same bits" in out


def test_sums_in_the_order_of_ranks_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = dist.Reducer

    class ByRank(made):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "order": "rank"})

        def at(self, key: int | None = None) -> Any:
            return super().at(None)

        def accumulate(self, key: int | None = None) -> Any:
            return super().accumulate(None)

    monkeypatch.setattr(dist, "Reducer", ByRank)
    assert main(["demo", "--ranks", "2", "--steps", "2"]) == 1
    out = capsys.readouterr().out
    assert len(set(digests(out))) == 2 and "the weights differ" in out


def test_ranks_that_end_differently_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train_rank", lambda group, options: demo.Trained(f"{group.rank:016x}", 0.9, []))
    assert demo.train_ranks(argparse.Namespace(ranks=2, checks=None, out=None, graph=False, leave_out=None)) == 1
    assert "rank 1 of 2 ended with other weights" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "9", "x"])
def test_a_number_of_ranks_that_does_not_fit_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["demo", "--ranks", number])
    assert e.value.code == 2 and "--ranks" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--graph"], ["--leave-out", "S12.wait"], ["--checks", "2"], ["--out", "here"]])
@pytest.mark.parametrize("launched", [False, True])
def test_commands_for_one_process_are_refused_on_ranks(
    words: list[str], launched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if launched:
        monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["demo", *words, *([] if launched else ["--ranks", "2"])]) == 2
    assert f"{words[0]} is for one process" in capsys.readouterr().err


def test_ranks_train_on_the_cpu_with_cpu_given_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "2", "--cpu", "--steps", "1"]) == 0
    assert len(digests(capsys.readouterr().out)) == 2


@pytest.mark.partners
def test_torchrun_gives_the_same_weights() -> None:
    pytest.importorskip("torch")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fanin", "demo", "--steps", "4"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, torch.distributed (gloo)" in done.stdout and len(set(digests(done.stdout))) == 1


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
def test_mpiexec_gives_the_same_weights() -> None:
    done = under_mpiexec(2, "-m", "fanin", "demo", "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, " in done.stdout and len(digests(done.stdout)) == 2 and len(set(digests(done.stdout))) == 1
