"""The tests of the stream rules on the simulated device, once more on the CUDA backend over the fake driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.sample import sizes
from kit.world import world
from spec.sim import test_streams_on_sim as sim

pytestmark = pytest.mark.core

RUNS = sim.SAMPLE
#: An omitted wait or mark is a race in one of them; the mark full runs the others.
SAMPLE = [RUNS[0], RUNS[2]]

#: What is about the simulated machine itself: its names, its arrays' operators, its own counter of unsound elisions.
OF_THE_MACHINE = {
    "test_a_third_producer_on_the_consumers_stream_does_not_wait_for_the_first_two": "makes its own machine",
    "test_objects_are_summed_with_the_accumulation_stream_current": "names sim:0",
    "test_a_host_number_is_copied_to_the_slots_device": "names sim:0",
    "test_on_the_cpu_there_is_no_stream_and_no_event": "no device",
    "test_the_capture_table_is_a_pure_function": "no device",
    "test_every_bit_of_a_plan_has_a_case": "no device",
    "test_an_omitted_bit_is_a_race_that_names_it": "below",
    "test_of_two_waits_for_one_edge_each_is_enough": "below",
    "test_a_race_found_by_the_checker_gives_a_wrong_sum_under_some_schedule": "makes its own machine",
}


@pytest.fixture(
    params=[pytest.param(run, marks=() if run in SAMPLE else pytest.mark.full, id=f"{run[0]}-{run[1]}") for run in RUNS]
)
def m(request: pytest.FixtureRequest, a_world: Callable[..., Any]) -> Any:
    """Handles count from 2 in the schedule `starve`."""
    schedule, number = request.param
    return a_world("fake", 2, number, schedule=schedule, starve=number)


for _name in [n for n in dir(sim) if n.startswith("test_") and n not in OF_THE_MACHINE]:
    globals()[_name] = getattr(sim, _name)


def test_cases_that_are_skipped_here_exist_on_the_simulated_device() -> None:
    assert all(hasattr(sim, name) for name in OF_THE_MACHINE)


def run(mutant: Any, schedule: str, number: int, *words: str) -> tuple[float, int, str]:
    with world("fake", 2, number, schedule=schedule, starve=number) as w:
        if words:
            w.judges_itself("what is left out shows under some schedule")
            w.leave_out(*words)
        off = mutant.run(w)
        w.synchronize()
        return off, w.races, w.race


@pytest.mark.rule("S8", "S9", "S10", "S11", "S12", "S13", "S15", "S18", "S19", "S20", "S21", "S22")
@pytest.mark.parametrize("runs", sizes(SAMPLE, RUNS))
@pytest.mark.parametrize("mutant", sim.MUTANTS, ids=lambda x: "+".join(x.words))
def test_an_omitted_bit_is_a_race(mutant: Any, runs: list[tuple[str, int]]) -> None:
    raced = 0
    for schedule, number in runs:
        off, races, said = run(mutant, schedule, number)
        assert (off, races) == (0, 0), said
    for schedule, number in runs:
        _, races, said = run(mutant, schedule, number, *mutant.words)
        assert not races or "missing: " in said
        raced += races >= 1
    # The backend calls the driver when memory is freed, not when it is dropped: by then the host may know that its
    # users pass.
    assert raced == len(runs) or (mutant.words[0].endswith("mark") and raced), raced


@pytest.mark.parametrize("mutant", [x for x in sim.MUTANTS if len(x.words) > 1], ids=lambda x: x.words[0])
def test_of_two_waits_for_one_edge_each_is_enough(mutant: Any) -> None:
    for word in mutant.words:
        off, races, said = run(mutant, "seeded", 0, word)
        assert (off, races) == (0, 0), said
