"""`python -m benchmarks`: every row runs, its figures have their origin, the picture is drawn. No clock is asserted."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import benchmarks.__main__ as bench
import pytest
from benchmarks import callgrind, gpu, ranks, timing

from kit.support import ROOT, run_python

pytestmark = pytest.mark.tools

FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What one quick run of all rows prints and writes."""
    folder = tmp_path_factory.mktemp("bench") / "deep"
    file, picture = folder / "bench.json", folder / "bench.svg"
    words = ["--quick", "--json", str(file), "--plot", str(picture)]
    done = run_python(["-m", "benchmarks", *words], cwd=ROOT)
    assert done.stderr == ""
    return done.stdout, json.loads(file.read_text()), picture


def test_every_row_has_its_file() -> None:
    others = {"__init__", "__main__", "common", "timing", "callgrind", "report"}
    assert sorted(p.stem for p in FOLDER.glob("*.py")) == sorted({*bench.ROWS, *others})


def test_there_is_one_timing_loop() -> None:
    clocks = re.compile(r"\b(perf_counter|perf_counter_ns|monotonic|timeit)\b")
    rows = [p.name for p in FOLDER.glob("*.py") if clocks.search(p.read_text())]
    assert rows == ["timing.py"], "time is taken by benchmarks.timing.turns"


def test_no_benchmark_imports_the_tests_and_the_package_imports_no_benchmark() -> None:
    tests = re.compile(r"^\s*(?:from|import) (?:tests|kit|conftest)\b|[\"']tests[\"']", re.MULTILINE)
    assert [p.name for p in FOLDER.glob("*.py") if tests.search(p.read_text())] == []
    ours = re.compile(r"^\s*(?:from|import) benchmarks\b|[\"']benchmarks\b", re.MULTILINE)
    assert [p.name for p in (ROOT / "python").glob("**/*.py") if ours.search(p.read_text())] == []


def test_bench_writes_where_its_figures_come_from(quick: tuple[str, dict[str, Any], Path]) -> None:
    _, written, _ = quick
    assert {
        "cpu",
        "cores",
        "caches",
        "system",
        "python",
        "versions",
        "build",
        "gpus",
        "date",
        "command",
        "results",
    } == written.keys()
    assert written["versions"]["numpy"] and set(written["versions"]) == {"fanin", *timing.PEERS}
    assert written["command"].startswith("python -m benchmarks --quick")


def test_every_row_has_results_of_one_form(quick: tuple[str, dict[str, Any], Path]) -> None:
    _, written, _ = quick
    measured = {one["row"] for one in written["results"]}
    assert measured >= set(bench.ROWS) - {"low_precision", "torch_accumulate", "torch_passes", "gpu"}
    for one in written["results"]:
        assert {"row", "title", "unit", "base", "rounds", "rows", "absent", "targets"} <= one.keys()
        assert one["base"] in one["rows"]
        assert not set(one["absent"]) & set(one["rows"])
        for row in one["rows"].values():
            least, median = row
            assert 0 < least <= median
        for t in one["targets"]:
            assert t.keys() == {"row", "against", "must", "ratio", "seen", "seen_by_min", "met"}
            assert (t["met"] is None) == (t["seen"] is None)
            assert {t["row"], *t["against"]} <= set(one["rows"]) | set(one["absent"]) | {"numexpr", "jax.jit"}


def test_the_rows_of_a_gpu_run_on_the_fake_driver_too(a_world: Any) -> None:
    """Their work, not their time: there is no GPU to be fast, and no peer."""

    driver = a_world("fake", 1).driver
    assert isinstance(gpu.place(), gpu.Plain) and gpu.place().torch is None
    made = list(gpu.results_on(gpu.Plain(), True, 4096, 5))
    driver.synchronize()
    assert driver.races == 0, driver.race
    assert [one["title"].split(";")[0] for one in made] == [
        *(f"gpu: {n} x 4 KB float32" for n in (2, 4, 8, 16)),
        "gpu: float32 running sum of 4 x 4 KB bfloat16",
        *(f"gpu: (32, 32) float32 summed to {shape}" for shape in ("(32,)", "(32, 1)", "()")),
        *(f"gpu: 300 rows of 4 float32 into 50, {word}" for word in ("in any order", "sorted")),
        "gpu: 5 slots of 1 KB, in place",
        "gpu: host time of 1 KB gradients",
    ]
    for one in made:
        assert one["base"] in one["rows"] and all(t["row"] in one["rows"] for t in one["targets"])
        by_events = one["title"] != "gpu: host time of 1 KB gradients"  # times of the simulated machine's clock
        assert all(("device" in row) == by_events and row.get("device", 1) > 0 for row in one["rows"].values())
    assert {"torch add_ chain", "torch.compile of the sum", "cupy.fuse of the sum"} == set(made[0]["absent"])


WORK = {"key": 2e-10, "exact": 5e-10, "rank": 2e-10}


def a_point(size: int, n: int, late: float = 1) -> dict[str, Any]:
    """The measurements of a machine with fixed costs: 20 us a message, 0.3 ns a byte sent, WORK to sum one."""
    part, crowd = ranks.flat(size, n), max(1, n / len(timing.cores()))
    seconds = {k: crowd * (part.messages * 2e-5 + part.sent * 3e-10 + part.summed * c) for k, c in WORK.items()}
    return {"size": size, "ranks": n, "rows": {ranks.NAMES[k]: {"median": 1e3 * late * s} for k, s in seconds.items()}}


def test_the_model_of_ranks_finds_the_costs_of_a_machine_and_what_deviates_from_them() -> None:
    sizes = (1 << 20, 1 << 26)  # smaller sums have plans of fewer messages
    points = [a_point(size, n) for n in (2, 4, 8) for size in sizes]
    costs, deviations = ranks.fitted(points, WORK)
    assert costs == [pytest.approx(2e-5, rel=0.01), pytest.approx(3e-10, rel=0.01)]
    assert len(deviations) == 18 and max(map(abs, deviations.values())) < 1
    _, late = ranks.fitted([*points[:-1], a_point(1 << 26, 8, late=2)], WORK)
    assert [name for name, percent in late.items() if abs(percent) > 1] == [
        f"{order}, 64 MB, 8 ranks" for order in ranks.NAMES
    ]
    assert late["key, 64 MB, 8 ranks"] == pytest.approx(-50, abs=1)


def test_two_levels_of_ranks_send_one_sum_for_a_node_if_it_is_exact() -> None:
    for each in (1, 8):
        headers, inside, outside = ranks.sums("exact", 1 << 26, 64, each)["two levels"][-3:]
        assert (headers.messages, inside.messages, outside.messages) == (63, 14, 21)
        assert headers.sent == 63 * ranks.HEADER
        assert inside.sent == pytest.approx((2 if each == 1 else 2.5) * (1 << 26) * 7 / 8)
        assert outside.sent == pytest.approx(2.5 * (1 << 23) * 7 / 8 + 7 * 8)
    assert list(ranks.sums("exact", 1 << 26, 8, 1)) == ["flat"]


def test_two_levels_of_ranks_send_one_running_sum_from_node_to_node_in_the_other_orders() -> None:
    for order, each in itertools.product(("key", "rank"), (1, 8)):
        header, inside, outside, back = ranks.sums(order, 1 << 26, 64, each)["two levels"][-4:]
        assert (header.messages, inside.messages, back.messages) == (63, 14, 14)
        terms = each if order == "key" else 1
        assert inside.sent == pytest.approx((terms + 1) * (1 << 26) * 7 / 8, rel=0.2)
        assert outside.sent < 2.5 * (1 << 23), "no more than a ring of nodes sends"
    assert all(list(ranks.sums(order, 1 << 26, 8, 8)) == ["flat"] for order in ("key", "rank"))


def test_a_rank_with_several_contributions_sends_all_in_the_order_of_keys_and_one_sum_in_that_of_ranks() -> None:
    sent = {order: ranks.sums(order, 1 << 26, 4, 8)["flat"][-1].sent - 3 * ranks.HEADER for order in ranks.NAMES}
    part = (1 << 26) * 3 / 4
    assert sent == {"key": 9 * part, "exact": 2.5 * part, "rank": 2 * part}


def test_bench_prints_tables_and_marks_missing_libraries(quick: tuple[str, dict[str, Any], Path]) -> None:
    said, written, _ = quick
    for one in written["results"]:
        assert f"{one['title']}; {one['rounds']} round" in said
    absent = {name for one in written["results"] for name in one["absent"]}
    assert all(re.search(rf"^  {re.escape(name)} +absent", said, re.MULTILINE) for name in absent)
    assert re.search(r"^  targets +seen +by min", said, re.MULTILINE)


def test_bench_draws_bytes_per_second(quick: tuple[str, dict[str, Any], Path]) -> None:
    _, written, picture = quick
    text = picture.read_text()
    assert "<svg" in text and len(text) > 5000
    for one in written["results"]:
        one["rows"] = {name: {"min": least} for name, (least, _) in one["rows"].items()}
    curves = bench.points(written["results"])
    assert {"fanin", "NumPy", "reading alone"} <= set(curves)
    assert all(x > 0 and y > 0 for some in curves.values() for x, y in some)


def test_a_row_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert bench.main(["--quick", "--only", "life", "--json", str(file)]) == 0
    assert {one["row"] for one in json.loads(file.read_text())["results"]} == {"life"}
    assert "a whole life" in capsys.readouterr().out


def test_files_are_tried_before_the_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option in ("--json", "--plot"):
        for place, words in (
            (tmp_path / "file" / "x.svg", "File exists"),
            (tmp_path, "Is a directory"),
            (Path("/proc/x.svg"), "No such file"),
        ):
            assert bench.main(["--quick", "--only", "life", option, str(place)]) == 2
            said = capsys.readouterr()
            assert said.out == "" and words in said.err and str(place) in said.err


def test_a_picture_of_an_unknown_kind_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is not installed")
    assert bench.main(["--quick", "--only", "life", "--plot", str(tmp_path / "x.xyz")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no picture of this kind" in said.err and "svg" in said.err
    assert bench.main(["--quick", "--only", "life", "--plot", str(tmp_path / "plain")]) == 0
    assert (tmp_path / "plain").read_text().startswith("<?xml"), (
        "a name without an ending is a picture like others, under that very name"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


def test_without_matplotlib_a_picture_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "peer", lambda name: None)
    assert bench.main(["--quick", "--plot", str(tmp_path / "a.svg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# How time is taken


def test_turns_are_taken_and_each_variant_begins_in_a_round() -> None:
    order: list[str] = []
    work = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.turns(work, rounds=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab", "first unheard, then three rounds"
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_statements_can_use_names_and_the_number_of_the_call() -> None:
    seen: list[int] = []
    cleared: list[int] = []
    timing.turns(
        {"s": "note(k)"}, rounds=1, calls=3, names={"note": seen.append}, after=lambda: cleared.append(len(seen))
    )
    assert seen == [0, 1, 2] * 2
    assert cleared[-1] == 6


def test_a_slow_benchmark_runs_once_and_one_of_a_missing_library_never() -> None:
    ran: list[str] = []
    times = timing.turns({"slow": lambda: ran.append("slow"), "absent": None}, rounds=5, longest=0)
    assert ran == ["slow"] and len(times["slow"]) == 1 and "absent" not in times


def test_a_target_is_met_missed_or_nothing_to_compare_with() -> None:
    times = {"ours": [10.0, 20.0, 20.0], "one": [50.0, 60.0, 70.0], "two": [40.0, 40.0, 90.0]}
    faster = timing.at_least(2.5, "ours", "one", "two", "missing").outcome(times)
    assert (faster["seen"], faster["seen_by_min"], faster["met"]) == (2.0, 4.0, False)
    slower = timing.at_most(0.5, "ours", "one", "two").outcome(times)
    assert (slower["seen"], slower["met"]) == (0.5, True)
    assert timing.at_most(1, "ours", "missing").outcome(times)["met"] is None
    assert timing.at_most(1, "missing", "ours").outcome(times)["met"] is None


def test_the_run_that_is_kept_has_the_form_that_is_written_and_names_no_host_and_no_path(tmp_path: Path) -> None:
    import platform

    text = (FOLDER / "results.json").read_text()
    assert not re.search(r"/tmp/|/home/|/root/", text) and str(ROOT) not in text
    assert not (platform.node() and len(platform.node()) > 3 and platform.node() in text)
    kept = json.loads(text)
    timing.write(tmp_path / "new.json", [{"row": "x", "rows": {"a": {"min": 1.234567, "median": 2.0}}, "targets": []}])
    written = json.loads((tmp_path / "new.json").read_text())
    assert kept.keys() == written.keys() and written["results"][0]["rows"] == {"a": [1.2346, 2.0]}
    assert all(len(times) == 2 for one in kept["results"] for times in one["rows"].values())


def test_callgrind_dumps_are_read(tmp_path: Path) -> None:
    dump = tmp_path / "out.2"
    dump.write_text(
        "positions: line\nevents: Ir\n\nob=(1) /lib/one.so\nfn=(1) first\n10 5\n+1 2\ncob=(2) /lib/two.so\ncfn=(2)"
        " second\ncalls=3 0\n* 100\n-1 1\n\nob=(2)\nfn=(2)\n0 40\n"
    )
    assert callgrind.costs(dump) == {"first (one)": 8, "second (two)": 40}
