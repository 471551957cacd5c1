"""Threads of a simulated machine that add torch tensors: the reduction of explore loses no outcome."""

from __future__ import annotations

from typing import Any

import pytest

import fanin
from fanin.sim import Machine, explore
from fanin.sim.search import bits_of
from kit.explored import differs, draw
from kit.support import run_python

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.partners


def test_the_reduction_loses_no_outcome_of_random_scenarios_with_tensors() -> None:
    several = ended = 0
    for seed in range(16):
        program, options = draw(seed, ("torch",))
        words, reduced, _ = differs(program, options, 40)
        assert not words, f"seed {seed}: {options} {program}: {words}"
        several += len(reduced.results) > 1
        ended += reduced.complete
    assert several >= 4 and ended >= 10, (several, ended)


def test_tensors_are_compared_by_value_and_bits() -> None:
    def keyed(m: Machine) -> Any:
        buf = fanin.InputBuffer(1, budget=0)
        for k, value in enumerate((1e16, 1.0, -1e16)):
            m.spawn(lambda k=k, value=value: buf.add(0, torch.full((2,), value), key=k))
        m.join()
        return {"sum": buf.take()}

    assert explore(keyed).ok
    for a, b, same in (
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16), True),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), True),
        (torch.tensor(1.0, requires_grad=True), torch.tensor(1.0), True),
    ):
        assert (bits_of([a]) == bits_of([b])) == same, (a, b)


def test_arrays_of_jax_that_hang_on_the_order_are_told_apart() -> None:
    jnp = pytest.importorskip("jax.numpy")

    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer(1, budget=0)
        for value in (1e8, 1.0, -1e8):
            m.spawn(buf.add, 0, jnp.full(2, value, jnp.float32))
        m.join()
        return buf.take()

    report = explore(scenario)
    assert report.failed and len(report.results) > 1, report
    assert explore(lambda m: [jnp.ones(2, jnp.bfloat16)]).ok


FIRST = """
import torch, fanin

def scenario(m):
    buf = fanin.InputBuffer(1, budget=0)
    for value in (1e8, 1.0, -1e8):
        m.spawn(lambda value=value: buf.add(0, torch.tensor([value])))
    m.join()
    return buf.take(slot=0)

for _ in range(2):
    report = fanin.sim.explore(scenario)
    print(report.runs, report.complete, report.repeats, len(report.results), report.schedule is not None)
"""


def test_the_first_search_of_a_process_finds_what_every_other_finds() -> None:
    said = run_python(FIRST).stdout.splitlines()
    assert said == ["6 True True 2 True"] * 2


def test_sums_of_tensors_of_low_precision_are_the_same_in_every_order() -> None:
    def scenario(m: Machine) -> Any:
        buf = fanin.InputBuffer([fanin.Slot(dtype="bfloat16")], budget=0)
        for k, value in enumerate((256.0, 1.0, -256.0)):
            m.spawn(
                lambda k=k, value=value: buf.add(0, torch.full((2,), value, dtype=torch.bfloat16), key=k, copy=True)
            )
        m.join()
        return buf.take()

    report = explore(scenario)
    assert report.ok and report.runs > 1
    assert report.results[0][0].tolist() == [1.0, 1.0]
