"""A mistake of one rank is an error on every rank, with every engine that carries the messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fanin import dist
from fanin.dist.group import Call
from kit import bad_ranks
from kit.ranks import NO_MPI, under_mpiexec

#: (ranks, nodes): sums in one level, and in two.
LEVELS = [(2, 1), (4, 2)]


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "nodes"), LEVELS)
def test_a_mistake_of_one_rank_is_an_error_on_all_ranks_that_are_threads(ranks: int, nodes: int) -> None:
    assert dist.threads(ranks, bad_ranks.wrongs, nodes=nodes, timeout=None) == [[]] * ranks


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="needs mpi4py and mpiexec: the extra mpi")
@pytest.mark.parametrize(("ranks", "nodes"), LEVELS)
def test_a_mistake_of_one_rank_is_an_error_on_all_ranks_of_mpi(ranks: int, nodes: int) -> None:
    group = f"dist.group(nodes={nodes}, timeout=None)"
    program = f"from fanin import dist; from kit.bad_ranks import wrongs; print(wrongs({group}))"
    done = under_mpiexec(ranks, "-c", program)
    assert (done.returncode, "".join(done.stdout.split())) == (0, "[]" * ranks), done.stdout + done.stderr


@pytest.mark.partners
def test_a_mistake_of_one_rank_is_an_error_on_all_ranks_of_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(2, bad_ranks.wrongs, tmp_path) == [[], []]


def in_two_levels(group: Any) -> list[str]:
    return bad_ranks.wrongs(dist.group(group, nodes=2))


@pytest.mark.partners
@pytest.mark.slow
def test_a_mistake_of_one_rank_is_an_error_on_all_ranks_of_gloo_in_two_levels(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dist.test_gloo import on_processes

    assert on_processes(4, in_two_levels, tmp_path) == [[]] * 4


@pytest.mark.core
def test_a_rank_that_is_not_named_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Call.refuse

    def nameless(self: Any, message: str, rank: int | None = None, leaf: str | None = None) -> Any:
        return real(self, message, None, leaf)

    monkeypatch.setattr(Call, "refuse", nameless)
    wrong = dist.threads(2, bad_ranks.wrongs, timeout=None)[0]
    assert len([w for w in wrong if "rank None is named" in w]) == len(bad_ranks.CASES)
