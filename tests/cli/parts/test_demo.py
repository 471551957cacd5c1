"""`fanin demo`: it learns, it is checked, and each wait that it leaves out is missed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from fanin.cli import demo, main, plain
from fanin.cli.screen import Progress
from kit.inside import inside
from kit.pictures import Read, outside
from kit.prepared import NUMPY, run_prepared
from kit.sample import every, sizes


def figure(text: str, row: str) -> float:
    """A number of the table."""
    found = re.search(rf"^  {row} +([\d.,e+-]+)%?$", text, re.MULTILINE)
    assert found, f"no row {row!r} in:\n{text}"
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(("words", "accuracy"), sizes((["--steps", "12"], 80), ([], 95)))
def test_the_demo_learns_and_reports_its_counts(words: list[str], accuracy: int, tmp_path: Path) -> None:
    done = run_prepared(["-W", "error", "-m", "fanin", "demo", "--checks", "4", "--out", str(tmp_path), *words])
    text = done.stdout
    assert figure(text, r"test accuracy \(held-out digits\)") >= accuracy
    assert figure(text, "largest relative deviation") < 1e-4
    assert figure(text, "gradients checked") == 4 * (7 + 4), "seven parameters, and the pixels of four micro-batches"
    assert figure(text, "races") == 0
    for row in ("adds", "sums", "kernels", "events", "waits", "waits elided"):
        assert figure(text, row) > 0
    rows = re.compile(r"^  (\w[\w ()-]*?)  +[\d.,e+-]+%?$", re.MULTILINE)
    assert len(rows.findall(text)) == 11
    assert "\x1b" not in text
    assert text.count("training ") == 10, "without a terminal: a line for each tenth of the way"
    assert done.stderr == ""
    trace = json.loads((tmp_path / "fanin-demo.json").read_text())
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert {"X", "s", "f", "M"} <= phases, "work, arrows, names"
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {0, 1}
    picture = Read((tmp_path / "fanin-demo.svg").read_bytes())
    assert outside(picture) == [] and "micro-batch b stream" in picture.texts("lanes")
    assert picture.texts("message") == ["Two streams meet here: the sum waits for both."]
    assert "sum add" in picture.texts("words") and "fanin-demo.json has all of it" in picture.notes()


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_bar_moves_within_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    shown = Terminal()
    with contextlib.redirect_stdout(shown):
        assert main(["demo", "--cpu", "--steps", "2", "--checks", "1", "--out", str(tmp_path)]) == 0
    drawn = [text.partition("\x1b[K")[0] for text in shown.getvalue().split("\r")[1:]]
    assert [re.search(r"training (\d)/2", text)[1] for text in drawn] == ["0"] * 11 + ["1"] * 12 + ["2"]  # type: ignore[index]
    one = [0, *(tenth / 10 for tenth in range(1, 11)), 1]  # of a pass, then the step itself
    assert [text.count("#") for text in drawn] == [round(15 * place) for place in one + [1 + x for x in one]]
    assert all(len(text) < 100 and text.count("#") + text.count("-  ") for text in drawn[1:])


@pytest.mark.parametrize(("columns", "bar"), [(20, False), (45, False), (80, True), (500, True)])
def test_a_bar_stays_in_its_line(columns: int, bar: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress, shown = Progress("training", 1000, moves=True), io.StringIO()
    with contextlib.redirect_stdout(shown):
        progress.step("loss 0.123, gradients within 1e-06")
    (text,) = re.findall(r"\r(.*)\x1b\[K", shown.getvalue())
    assert len(text) < columns and ("---" in text) == bar


# The digits


def test_the_digits_are_those_of_the_source() -> None:
    """Facts of https://doi.org/10.24432/C50P49: the test set has 1,797 images, of 174 to 183 of each digit."""
    images, labels = demo.handwritten()
    assert images.shape == (1797, 8, 8) and images.dtype == labels.dtype == np.int64
    assert images.min() == 0 and images.max() == 16 and images.sum() == 561_718
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0] and labels[:10].tolist() == list(range(10))
    digest = hashlib.sha256(images.astype("u1").tobytes() + labels.astype("u1").tobytes()).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_digits_have_their_source_and_license_beside_them() -> None:
    folder = Path(demo.__file__).parent
    words = (folder / "digits-license.txt").read_text()
    for fact in ("E. Alpaydin, C. Kaynak", "https://doi.org/10.24432/C50P49", "CC BY 4.0", "What was changed"):
        assert fact in words
    assert (folder / "digits.npz").stat().st_size < 50_000


# Its own checks find what they should


def short(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A training of one step: its exit status and what it printed."""
    status = main(["demo", "--steps", "1", "--out", str(tmp_path), *words])
    return status, capsys.readouterr().out


def test_the_accuracy_of_a_short_training_is_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = short(tmp_path, capsys, "--cpu")
    assert status == 0
    assert figure(text, r"test accuracy \(held-out digits\)") < 95
    assert "an accuracy of 95% is required after 88 steps; these were 1" in text


def test_too_low_an_accuracy_of_a_whole_training_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 0)
    status, text = short(tmp_path, capsys, "--cpu")
    assert status == 1
    assert "below 95%" in text
    assert "deviates" not in text


@pytest.mark.parametrize("fault", [1 + 3e-4, np.nan])
def test_a_gradient_that_deviates_is_an_error(
    fault: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plain.gradients

    def wrong(*args: Any) -> Any:
        loss, gradients, pixels = right(*args)
        return loss, {**gradients, "block": gradients["block"] * fault}, pixels

    monkeypatch.setattr(plain, "gradients", wrong)
    status, text = short(tmp_path, capsys, "--cpu")
    assert status == 1
    assert "a gradient deviates by" in text


def test_recorded_steps_give_the_bits_of_the_steps_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["demo", "--graph", "--steps", "4"]) == 0
    text = capsys.readouterr().out
    assert figure(text, "recordings") == 1
    assert figure(text, "replays") == 2
    assert figure(text, "their bytes") > 100_000
    assert "the same bits" in text
    assert re.search(r"ms a step, replayed +[\d.]+ \([\d.]+ times as fast\)", text)
    stats = tape.compiled(lambda: None).stats
    original = demo.train_step

    def other(net: demo.Net) -> Any:
        step, calls = original(net), [0]

        def shifted(digits: Any, labels: Any, rate: Any) -> Any:
            calls[0] += 1
            return step(digits, labels, rate * np.float32(calls[0]))

        shifted.stats = stats
        return shifted

    monkeypatch.setattr(demo, "recorded", other)
    assert main(["demo", "--graph", "--steps", "3"]) == 1
    assert "they differ" in capsys.readouterr().out


def test_without_threadpoolctl_the_demo_runs_and_names_the_package(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['threadpoolctl'] = None; from fanin.cli import main;"
        f"sys.exit(main(['demo', '--cpu', '--steps', '1', '--out', {str(tmp_path)!r}]))"
    )
    done = run_prepared(code)
    assert re.fullmatch(r'fanin demo: threadpoolctl, .*pip install "fanin\[demo\]"\n', done.stderr)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fanin-demo.json", "fanin-demo.svg"]


def test_the_demo_imports_nothing_but_numpy_and_threadpoolctl(tmp_path: Path) -> None:
    code = (
        "import sys, numpy.random; before = set(sys.modules); from fanin.cli import main;"
        f"main(['demo', '--cpu', '--steps', '1', '--out', {str(tmp_path)!r}]);"
        "print('new:', *{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    new = set(run_prepared(code, imports=NUMPY).stdout.partition("new: ")[2].split())
    assert "fanin" in new and new <= sys.stdlib_module_names | {"fanin", "numpy", "threadpoolctl"}


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"fanin demo: --out .*file: \[Errno \d+\] .*fanin-demo\.json'\n", said.err)
    (tmp_path / "fanin-demo.svg").mkdir()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fanin-demo.svg", "file"], "nothing of ours is left"


def test_a_file_that_cannot_be_written_in_the_end_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, fill: Any) -> None:
        raise OSError(28, "No space left on device", path)

    for module in ("_trace.recording", "_svg"):
        monkeypatch.setattr(f"fanin.{module}.write_whole", full)
    status, text = short(tmp_path, capsys)
    assert status == 2
    assert figure(text, "races") == 0, "the table is there"
    for name in ("fanin-demo.json", "fanin-demo.svg"):
        assert re.search(rf"^fanin demo: --out .*: \[Errno 28\].*{name}'$", text, re.MULTILINE)


def test_a_race_in_training_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def race(*args: Any) -> None:
        raise fanin.RaceError("race on 4 bytes")

    monkeypatch.setattr(demo, "step", race)
    status, text = short(tmp_path, capsys)
    assert status == 1
    assert "fanin demo: race on 4 bytes" in text


@pytest.mark.rule("S3")
def test_the_network_learns_on_the_cpu_by_the_same_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--cpu", "--steps", "6", "--checks", "2", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert status == 0, text
    assert "on the CPU; on one step in 3 each gradient is checked" in text
    assert figure(text, "gradients checked") == 2 * (4 + 7)
    assert "races" not in text and "waits" not in text
    assert {p.name for p in tmp_path.iterdir()} == {"fanin-demo.json", "fanin-demo.svg"}
    assert main(["demo", "--cpu", "--leave-out", "S12", "--out", str(tmp_path)]) == 2
    assert "without --cpu" in capsys.readouterr().err


# What each wait is for


def test_every_word_has_its_purpose() -> None:
    assert tuple(demo.PURPOSE) == tuple(inside().rules_plan_words())
    assert demo.COVERED.keys() <= demo.PURPOSE.keys()


@pytest.mark.rule("S9", "S10", "S11", "S12", "S13", "S15", "S18", "S19", "S20", "S21", "S22")
@pytest.mark.parametrize("word", [*(w for w in demo.PURPOSE if w not in demo.COVERED), *every(4, [*demo.COVERED])])
def test_an_omitted_wait_is_missing(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--leave-out", word])
    text = capsys.readouterr().out
    assert f"  {word:<10}  {demo.PURPOSE[word]}\n" in text
    if word in demo.COVERED:
        assert status == 0
        assert f"{word} is covered here: " in text
    else:
        assert status == 1
        assert "RaceError: race on" in text
        assert "demo.py:" in text
        (race,) = re.findall(r"RaceError: (race on .*)", text)
        streams = re.findall(r"(stream \d+|the legacy default stream)( of sim:\d)?", race)
        assert streams and all(device for _, device in streams), "every stream is named with its device"
        advice = re.search(r"missing: .* \((?:array\.record_stream\()?(Stream\(.*\))\)$", race)
        assert advice, race
        named = re.findall(r'Stream\("sim:(\d)", (\d+)\)', advice[1])
        assert len(named) == len(set(named)), "no stream is told to wait for itself"
        for device, handle in named:
            assert re.search(rf"(stream {handle}|the legacy default stream) of sim:{device}", race)


def test_marks_that_guard_one_edge_are_missed_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--leave-out", "S9.mark", "--leave-out", "S13.mark"]) == 1
    assert "missing: mark as used on" in capsys.readouterr().out


def test_a_rules_number_selects_all_of_its_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--leave-out", "S12"]) == 1
    text = capsys.readouterr().out
    assert all(word in text for word in ("S12.record", "S12.wait", "S12.mark"))


def test_a_word_that_no_plan_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--leave-out", "no rule"]) == 2
    assert "'no rule'" in capsys.readouterr().err
