"""The stream rules, proved on the buffer's own code and the simulated machine: docs/proof.md states the claim.

tests/c/proof.c does the work; the tests here choose its size, and check its numbers.
"""

from __future__ import annotations

import pytest

from kit.proof_program import Line, added, proof, results, side_by_side
from kit.sample import sizes
from kit.support import compiler

pytestmark = [pytest.mark.once, pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")]

#: Waits, records and marks, faults of the buffer's code and of its drivers that whole adds can find: they test the
#: tests.
WHOLE_FAULTS = [
    *(
        "S9.record",
        "S10.record",
        "S11.record",
        "S12.record",
        "S12.wait",
        "S12.mark",
        "S13.wait",
        "S13.mark",
        "S15.record",
    ),
    *("S18.record", "S18.wait", "S19.mark", "S20.wait", "S20.mark", "S21.wait", "S21.mark", "S21.record", "S22.wait"),
    *(
        "S22.record",
        "S9.mark+S13.mark",
        "S22.mark+S19.mark",
        "fault:NO_RECORD_BEHIND_SUM+S18.record",
        "fault:WRITE_WITHOUT_WAIT+driver:donate",
    ),
    *(
        f"fault:{name}"
        for name in (
            *("WAIT_AFTER_SUM", "RECORD_BEFORE_SUM", "SUM_ON_LAST_PRODUCER", "MARK_ON_PRODUCER", "READY_STREAM_STAYS"),
            *("WRITE_SHARED", "REFCOUNT_IS_ENOUGH", "RECORD_ON_CONSUMER", "RECORD_BEFORE_CONVERSION"),
            *("RECORD_AFTER_FOLD", "FOLD_UNORDERED", "OLDEST_EVENT"),
        )
    ),
    *(f"driver:{word}" for word in ("count", "import-wait", "alias-wait", "alias-mark", "sync")),
]

#: A fault that needs three streams: two producers' and that of the sum.
REUSED = "fault:EVENT_REUSED"

#: Faults that depend on names of streams: for them a class of configurations is not alike, and only sleep sets are
#: checked.
NAME_FAULTS = ["fault:STREAMS_BY_NUMBER", "fault:STREAMS_BY_DEVICE"]


def faults(names: list[str]) -> list[str]:
    return [f"fault={name}" for name in names]


def parts(n: int) -> list[str]:
    """All n parts of a search, which run side by side."""
    return [f"part={i}/{n}" for i in range(n)]


#: The sample of each search: its first part of so many. The planted faults of samples, below, are found in these.
THREE, OTHER, TWO_SPLIT, SPLIT = "part=0/64", "part=0/64", "part=0/24", "part=0/8"


def clean(lines: list[Line]) -> None:
    assert lines
    for line in lines:
        assert line["traces"] > 0 and line["configurations"] > 0, line
        assert line["races"] == line["others"] == line["failing"] == 0, line


def test_the_sizes_are_those_of_the_plan() -> None:
    raw = {(int(x["K"]), int(x["D"]), int(x["S"])): int(x["raw"]) for x in results("sizes")}
    assert raw[1, 1, 2] == 112
    assert raw[1, 2, 1] == 80
    assert raw[1, 2, 2] == 1_728
    assert raw[2, 2, 2] == 10_368
    assert raw[3, 2, 2] == 62_208
    assert raw[2, 3, 3] == 1_143_072
    assert raw[4, 2, 2] == 373_248


# Adds are steps: every order of the host


@pytest.mark.core
@pytest.mark.rule("S8", "S9", "S10", "S11", "S18", "S19", "S20", "S21", "S22")
def test_one_producer_never_races_with_every_option() -> None:
    (line,) = results("whole", "1", "2", "2", "most")
    clean([line])
    assert line["configurations"] == 7_408


@pytest.mark.rule("S9", "S12", "S13", "S15", "S16", "S17", "S19")
def test_two_producers_never_race_in_any_configuration() -> None:
    (line,) = results("whole", "2", "2", "2", "few")
    clean([line])
    assert line["configurations"] == 2 * (1_352 + 1_300)  # budgets 0 and infinite; with keys and without
    assert line["traces"] == 68_200


@pytest.mark.rule("S13", "S18", "S21", "S22")
@pytest.mark.parametrize(("part", "configurations"), sizes((OTHER, 582), ("part=0/8", 4_470)))
def test_two_producers_never_race_with_other_options(part: str, configurations: int) -> None:
    (line,) = results("whole", "2", "2", "2", "most", part)
    clean([line])
    assert line["configurations"] == configurations


@pytest.mark.rule("S12", "S15", "S17")
@pytest.mark.parametrize(
    ("parts", "shapes", "configurations", "traces"),
    sizes(([THREE], 124, 380, 48_365), (parts(4), 7_888, 2 * (7_888 + 4_392), 2_924_732)),  # as above
)
def test_three_producers_never_race_in_any_configuration(
    parts: list[str], shapes: int, configurations: int, traces: int
) -> None:
    lines = side_by_side([("whole", "3", "2", "2", "few", part) for part in parts])
    clean(lines)
    assert added(lines, "shapes") == shapes
    assert added(lines, "configurations") == configurations
    assert added(lines, "traces") == traces


# Lock, unlock and device calls are steps


@pytest.mark.core
@pytest.mark.threads
def test_split_locks_on_one_stream_lose_nothing_and_never_hang() -> None:
    lines = results("split", "1", "1")
    clean(lines)
    assert len(lines) == 6


@pytest.mark.parametrize(("parts", "shapes", "traces"), sizes(([TWO_SPLIT], 3, 1_000), (parts(2), 76, 10_000)))
def test_two_split_adds_never_race_in_any_configuration(parts: list[str], shapes: int, traces: int) -> None:
    lines = side_by_side([("split", "2", "2", "scene=adds", part) for part in parts])
    clean(lines)
    assert added(lines, "shapes") == shapes
    assert added(lines, "traces") > traces


@pytest.mark.parametrize(("part", "traces"), sizes((SPLIT, 1_000), ("part=0/1", 10_000)))
def test_a_split_add_beside_take_ready_snapshot_or_clear_never_races(part: str, traces: int) -> None:
    scenes = [f"scene={s}" for s in ("take", "ready", "look", "clear", "takes")]
    lines = side_by_side([("split", D, S, scene, part) for scene in scenes for D, S in (("1", "2"), ("2", "1"))])
    clean(lines)
    assert len(lines) == 10
    assert added(lines, "traces") > traces


# The reductions lose nothing


def same(lines: list[Line], count: int) -> None:
    """Each fault fails in the same classes of configurations in the full search and in the reduced one."""
    ends = [line for line in lines if line.kind == "checked"]
    assert ends and added(ends, "faults") == count
    assert added(ends, "different") == 0
    assert added(ends, "failing") > 0 and added(ends, "failing_reduced") > 0
    assert added(ends, "traces") > added(ends, "traces_reduced") > 0


@pytest.mark.parametrize(("of_one", "of_two"), sizes(("part=0/8", "part=0/12"), ("part=0/3", "part=0/3")))
def test_reduced_and_full_search_fail_in_the_same_configurations(of_one: str, of_two: str) -> None:
    one = [("check", "1", D, S, "most", of_one, *faults(WHOLE_FAULTS)) for D, S in (("1", "2"), ("2", "1"))]
    two = [("check", "2", D, S, "few", of_two, *faults(WHOLE_FAULTS)) for D, S in (("1", "2"), ("2", "1"))]
    more = ("check", "2", "2", "2", "few", "part=0/64", *faults([REUSED]))
    lines = side_by_side([*one, *two, more])
    same(lines, 4 * len(WHOLE_FAULTS) + 1)
    found = {line.words[0] for line in lines if line.kind == "check" and line["failing"] > 0}
    assert found == {*WHOLE_FAULTS, REUSED}, "a fault that fails nowhere checks nothing"


def test_sleep_sets_lose_nothing_if_faults_depend_on_names() -> None:
    lines = side_by_side(
        [("check", "2", D, S, "few", "names", "part=0/3", *faults(NAME_FAULTS)) for D, S in (("1", "2"), ("2", "1"))]
    )
    same(lines, 2 * len(NAME_FAULTS))


@pytest.mark.parametrize(
    ("one", "two", "runs"),
    sizes((("samples=10", "part=0/8"), ("samples=10", "part=0/16"), 1_000), (("samples=60",), ("samples=10",), 10_000)),
)
def test_random_orders_find_nothing_that_the_search_of_split_locks_missed(
    one: tuple[str, ...], two: tuple[str, ...], runs: int
) -> None:
    order, locks = ["S12.wait", "S12.mark", "driver:count"], ["none", "fault:READY_TOO_SOON", "fault:TAKE_IGNORES_ADDS"]
    samples = [
        ("sample", "1", "1", *one, *faults([*order, *locks])),
        ("sample", "1", "2", *two, *faults(order)),
    ]
    ends = [line for line in side_by_side(samples) if line.kind == "sampled"]
    assert added(ends, "faults") == 2 * len(order) + len(locks)
    assert added(ends, "missed") == 0
    assert added(ends, "failing_sampled") > 0 and added(ends, "runs") > runs


# The second oracle


@pytest.mark.parametrize("samples", sizes(500, 1000))
def test_a_configuration_without_races_has_the_right_value(samples: int) -> None:
    runs = [("values", "2", "2", "2", f"samples={2 * samples}"), ("values", "3", "2", "2", f"samples={samples}")]
    ends = [line for line in side_by_side(runs) if line.kind == "judged"]
    assert added(ends, "clean") > 1.5 * samples
    assert added(ends, "racy") == added(ends, "clean_wrong") == 0


@pytest.mark.parametrize("samples", sizes(30, 120))
def test_most_configurations_with_races_have_a_wrong_value(samples: int) -> None:
    runs = [("values", K, "2", "2", f"samples={samples}", f"seed={K}", *faults(WHOLE_FAULTS)) for K in ("1", "2")]
    ends = [line for line in side_by_side(runs) if line.kind == "judged"]
    assert added(ends, "clean") > 8 * samples and added(ends, "clean_wrong") == 0
    assert added(ends, "racy") > 4 * samples
    assert added(ends, "racy_wrong") > added(ends, "racy") / 2


# Each checker finds its planted fault


@pytest.mark.parametrize(
    "verdict, args",
    [
        ("race", ("whole", "2", "1", "2", "few", "fault=S12.wait")),
        ("race", ("split", "1", "2", "scene=adds", "first", "fault=S12.wait")),
        ("miscount", ("whole", "2", "1", "1", "few", "fault=driver:count")),
        ("miscount", ("split", "1", "1", "scene=take", "first", "fault=fault:TAKE_IGNORES_ADDS")),
        ("written", ("whole", "2", "1", "1", "few", "fault=fault:WRITE_SHARED")),
        ("unsound", ("whole", "1", "1", "2", "few", "fault=driver:elide")),
        ("stuck", ("split", "1", "1", "scene=adds", "first", "fault=fault:SLOT_KEPT")),
        # .. in each sample
        ("race", ("whole", "3", "2", "2", "few", THREE, "first", "fault=S12.wait")),
        ("race", ("whole", "3", "2", "2", "few", THREE, "first", "fault=S15.record")),
        ("race", ("whole", "2", "2", "2", "most", OTHER, "first", "fault=S21.wait")),
        ("race", ("split", "2", "2", "scene=adds", TWO_SPLIT, "first", "fault=S12.wait")),
        ("race", ("split", "2", "2", "scene=adds", TWO_SPLIT, "first", "fault=fault:PARKED_EARLY")),
        ("miscount", ("split", "1", "2", "scene=take", SPLIT, "first", "fault=fault:TAKE_IGNORES_ADDS")),
        ("miscount", ("split", "2", "1", "scene=ready", SPLIT, "first", "fault=fault:READY_TOO_SOON")),
    ],
)
def test_a_checker_finds_its_planted_fault(verdict: str, args: tuple[str, ...]) -> None:
    done = proof(*args, check=False)
    assert f"  {verdict}: " in done.stdout, done.stdout[-2000:]


def test_a_failing_order_is_replayed_from_the_printed_line() -> None:
    done = proof("whole", "2", "1", "2", "few", "first", "fault=S12.wait", check=False)
    first = next(line for line in done.stdout.splitlines() if line.startswith("  first: "))
    configuration, schedule, planted = first.removeprefix('  first: "').replace('"', "").rsplit(" ", 2)
    again = proof("replay", configuration, schedule, planted)
    assert "verdict race: " in again.stdout
    without = proof("replay", configuration, schedule)
    assert "verdict fine: " in without.stdout


# The longer run


@pytest.mark.slow
def test_two_producers_never_race_with_every_option() -> None:
    lines = side_by_side([("whole", "2", "2", "2", "all", f"part={i}/8") for i in range(8)])
    clean(lines)
    assert added(lines, "shapes") == 1_360
    assert added(lines, "configurations") == 227_124


@pytest.mark.slow
@pytest.mark.parametrize("K, D, S, shapes", [(2, 3, 3, 4_388), (3, 2, 3, 27_482), (3, 3, 2, 20_528)])
def test_more_streams_never_race_in_any_configuration(K: int, D: int, S: int, shapes: int) -> None:
    lines = side_by_side([("whole", str(K), str(D), str(S), "few", f"part={i}/4") for i in range(4)])
    clean(lines)
    assert added(lines, "shapes") == shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    "K, D, S, options, parts, of",
    [(3, 2, 2, "most", 2, 256), (3, 3, 3, "few", 2, 128), (4, 2, 2, "few", 2, 256)],
)
def test_samples_of_larger_sizes_never_race(K: int, D: int, S: int, options: str, parts: int, of: int) -> None:
    clean(side_by_side([("whole", str(K), str(D), str(S), options, f"part={i}/{of}") for i in range(parts)]))


@pytest.mark.slow
def test_split_locks_never_race_in_any_configuration() -> None:
    scenes = ("adds", "take", "ready", "look", "clear", "takes")
    lines = side_by_side([("split", "2", "2", f"scene={s}", "imports") for s in scenes])
    clean(lines)
    assert added(lines, "configurations") == 6 * 860


@pytest.mark.slow
def test_reduced_and_full_search_agree_on_two_devices_with_two_streams() -> None:
    every = faults(["none", *WHOLE_FAULTS, REUSED])
    same(
        side_by_side([("check", "2", "2", "2", "few", f"part={i}/64", *every) for i in (0, 1)]),
        2 * len(every),
    )
    same(side_by_side([("check", "1", "2", "2", "most", "part=0/4", *every)]), len(every))
