"""Traces: lines, Chrome's format, pictures, graphs."""

from __future__ import annotations

import contextlib
import fractions
import itertools
import json
import os
import random
import re
import stat
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin._svg import apart, text_width
from fanin._trace import plot
from fanin._trace.chrome import chrome
from fanin._trace.line import Line
from fanin._trace.part import follows_of
from fanin._trace.picture import Lane, Neighbours, place
from fanin._trace.plot import Sheet, placed
from fanin._trace.recording import Trace
from fanin._words import type_of
from fanin.sim import Machine
from kit.pictures import Read, outside
from kit.sample import sizes

pytestmark = pytest.mark.core


def one_pass(out: tuple[str, ...] = (), producers: int = 3) -> Trace:
    """A pass over two buffers on two devices; returns its trace. With something left out, the race ends it."""
    with fanin.trace() as t, Machine(2) as m:
        m.leave_out(*out)
        c = m.stream(0)
        streams = [m.stream(i % 2) for i in range(producers)]
        for name in ("w1", "w2"):
            buf = fanin.InputBuffer([fanin.Slot(name=name)], stream=c, name="layer")
            for key, s in enumerate(streams):
                g = m.empty(256, "float32", device=0)
                m.launch(s, lambda v, key=key: v.fill(key), writes=[g], name=f"backward {name}.{key}", us=20)
                buf.add(0, g, key=key, stream=s)
            (total,) = buf.take()
            m.launch(c, lambda v: None, reads=[total], name=f"step {name}")
    return t


@pytest.fixture(scope="module")
def t() -> Trace:
    return one_pass()


# Lines


def test_without_a_trace_nothing_is_recorded() -> None:
    t = fanin.trace()
    fanin.add_n([np.ones(3), np.ones(3)])
    assert len(t) == 0 and t.lines == () and t.dropped == 0


def test_lines_list_the_decisions_in_order(t: Trace) -> None:
    assert len(t) == len(t.lines) > 20
    assert all(isinstance(line, Line) for line in t.lines)
    times = [line.host_ns for line in t.lines]
    assert times == sorted(times)
    kinds = {line.kind for line in t.lines}
    assert {"add", "fold", "take", "record", "wait", "kernel"} <= kinds
    added = [line for line in t.lines if line.kind == "add"]
    assert [(line.label, line.key) for line in added] == [(w, k) for w in ("w1", "w2") for k in range(3)]
    assert "S9" in added[0].rules and added[0].how == "a" and added[0].bytes == 1024
    fold, _ = [line for line in t.lines if line.kind == "fold"]
    assert fold.count == 3 and {"S12", "S13", "S16", "S17"} <= set(fold.rules)
    waits = [line for line in t.lines if line.kind == "wait"]
    recorded = {line.event for line in t.lines if line.kind == "record"}
    assert waits and all(line.event in recorded for line in waits)
    for line in t.lines:
        assert line.kind in str(line)
    with pytest.raises(AttributeError):
        added[0].kind = "x"  # type: ignore[misc]


def test_each_line_names_its_slot() -> None:
    buf = fanin.InputBuffer(3)
    with fanin.trace() as t:
        for slot in (2, 1, 2):
            buf.add(slot, fanin.Sparse("coo", (np.zeros((2, 1), int), np.ones(1)), (3, 3)))
        buf.take()
    assert [(x.kind, x.slot) for x in t.lines] == [
        *[("add", slot) for slot in (2, 1, 2)],
        ("fold", 2),
        *[("take", slot) for slot in (1, 2)],
    ]


def test_lines_about_objects_are_on_the_host() -> None:
    buf = fanin.InputBuffer(1)
    with fanin.trace() as t:
        for _ in range(2):
            buf.add(0, fractions.Fraction(1, 2))
        buf.take()
    assert [(x.kind, x.device) for x in t.lines] == [("add", -1), ("add", -1), ("fold", -1), ("take", -1)]


@pytest.mark.rule("S21")
def test_the_line_of_an_add_that_converts_names_the_rule() -> None:
    with Machine(1) as m, fanin.trace() as t:
        s = m.stream()
        buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float32", device="sim:0")], stream=s)
        for dtype in ("float64", "float32"):
            buf.add(0, m.array(np.ones(2, dtype)), stream=s)
    assert ["S21" in x.rules for x in t.lines if x.kind == "add"] == [True, False]


def test_a_trace_may_be_entered_again_and_continues() -> None:
    t = fanin.trace()
    for n in (1, 2):
        with t:
            assert "recording" in repr(t)
            fanin.add_n([np.ones(3), np.ones(3)])
        assert len(t) == n * (len(t) // n) > 0
    with t, pytest.raises(RuntimeError, match="recording already"):
        t.__enter__()


def test_traces_nest() -> None:
    with fanin.trace() as outer:
        fanin.add_n([np.ones(3), np.ones(3)])
        with fanin.trace() as inner:
            fanin.add_n([np.ones(3), np.ones(3)])
    assert len(outer) == 2 * len(inner) > 0


def test_a_trace_is_of_its_thread() -> None:
    with fanin.trace() as t:
        other = threading.Thread(target=lambda: fanin.add_n([np.ones(3), np.ones(3)]))
        other.start()
        other.join()
    assert len(t) == 0


def test_a_trace_records_the_host_threads_of_a_machine() -> None:
    with fanin.trace() as t, Machine() as m:
        c = m.stream()
        buf = fanin.InputBuffer(1, stream=c)

        def producer(key: int) -> None:
            s = m.stream()
            g = m.empty(4)
            m.launch(s, lambda v: v.fill(1), writes=[g])
            buf.add(0, g, key=key, stream=s)

        for key in range(3):
            m.spawn(producer, key)
        m.join()
        buf.take()
    assert sorted(line.key for line in t.lines if line.kind == "add") == [0, 1, 2]


def test_only_the_newest_lines_are_kept() -> None:
    with fanin.trace(capacity=4) as t:
        for _ in range(10):
            fanin.add_n([np.ones(3), np.ones(3)])
    assert len(t) == 4 and t.dropped > 0
    with pytest.raises(ValueError, match="capacity"):
        fanin.trace(capacity=0)


def test_a_trace_that_is_dropped_while_it_records_does_no_harm() -> None:
    t = fanin.trace()
    t.__enter__()
    from fanin._trace.recording import active

    active().remove(t)
    del t
    fanin.add_n([np.ones(3), np.ones(3)])


# Chrome's format


def events(t: Trace, **want: Any) -> list[dict[str, Any]]:
    every = chrome(t.picture())["traceEvents"]
    return [e for e in every if all(e.get(k) == v for k, v in want.items())]


def test_a_saved_trace_is_what_perfetto_reads(t: Trace, tmp_path: Path) -> None:
    path = tmp_path / "pass.json"
    t.save(path)
    whole = json.loads(path.read_text())
    assert whole["schemaVersion"] == 1 and "simulated" in whole["otherData"]["clock"]
    for e in whole["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(e)
        assert e["ph"] == "M" or isinstance(e["ts"], (int, float))
        assert e["ph"] != "X" or e["dur"] >= 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()
    assert [p.name for p in tmp_path.iterdir()] == ["pass.json"]


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_processes_are_devices_and_threads_are_streams(t: Trace) -> None:
    names = {(e["pid"], e["args"]["name"]) for e in events(t, name="process_name")}
    assert {(0, "device 0"), (1, "device 1")} <= names
    kernels = [e for e in events(t, ph="X") if e["name"].startswith("backward")]
    assert len(kernels) == 6 and {e["pid"] for e in kernels} == {0, 1}
    sums = events(t, ph="X", cat="accumulate")
    assert {e["args"]["buffer"] for e in sums} == {"w1", "w2"}


def test_slices_of_one_track_nest(t: Trace) -> None:
    tracks: dict[Any, list[tuple[float, float]]] = {}
    for e in events(t, ph="X"):
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        for a in spans:
            for b in spans:
                assert not (a[0] < b[0] - 1e-6 and b[0] + 1e-6 < a[1] and a[1] < b[1] - 1e-6), (a, b)


def test_each_wait_is_an_arrow_between_slices(t: Trace) -> None:
    waits = [line for line in t.lines if line.kind == "wait"]
    starts, ends = events(t, ph="s"), events(t, ph="f")
    assert len(starts) == len(ends) == len(waits)
    assert {e["id"] for e in starts} == {e["id"] for e in ends}
    assert all(e["bp"] == "e" for e in ends)
    slices = events(t, ph="X")
    for e in [*starts, *ends]:
        assert any(
            (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] - 1e-6 <= e["ts"] <= s["ts"] + s["dur"] + 1e-6
            for s in slices
        ), e
    by_id = {e["id"]: e for e in ends}
    assert all(e["ts"] <= by_id[e["id"]]["ts"] + 1e-6 for e in starts)


def test_parked_bytes_are_a_counter_that_ends_at_zero(t: Trace) -> None:
    counts = events(t, ph="C", name="parked bytes of w1")
    values = [e["args"]["bytes"] for e in counts]
    assert max(values) == 3 * 1024 and values[-1] == 0


def test_a_race_is_a_red_instant(tmp_path: Path) -> None:
    with fanin.trace() as t, pytest.raises(fanin.RaceError), fanin.trace() as inner, Machine(2) as m:
        m.leave_out("S12.wait")
        c, p = m.stream(), m.stream()
        buf = fanin.InputBuffer(1, stream=c)
        for _ in range(2):
            g = m.empty(4)
            m.launch(p, lambda v: v.fill(1), writes=[g], name="produce")
            buf.add(0, g, stream=p)
            p = m.stream()
        buf.take()
    assert not events(t, name="RACE")
    (race,) = events(inner, name="RACE")
    assert race["ph"] == "i" and race["cname"] == "terrible" and "produce" in race["args"]["text"]
    assert "color=red" in inner.dot()
    inner.plot(tmp_path / "race.svg")
    assert "#d00000" in (tmp_path / "race.svg").read_text()


def test_without_a_simulated_clock_the_order_is_logical() -> None:
    with fanin.trace() as t:
        fanin.add_n([np.ones(3), np.ones(3)])
    picture = t.picture()
    assert repr(picture) == "<Picture: 1 lane, 1 slice>"
    assert picture.clock.startswith("logical order")
    assert picture.lanes == [Lane(-1, 0)]
    assert all(s.end - s.start == 1 for s in picture.slices)


def test_waits_for_what_was_recorded_before_the_trace_draw_no_arrow() -> None:
    line = Line("wait", "", False, 0, -1, 0, 0, -1, (), 2, 3, 99, 0, 1, -1, -1, "")
    assert place([line]).arrows == []


def test_an_empty_trace_is_a_file_and_a_picture_too(tmp_path: Path) -> None:
    t = fanin.trace()
    t.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"] == []
    assert t.dot().startswith("digraph")
    t.plot(tmp_path / "a.svg")
    assert ET.fromstring((tmp_path / "a.svg").read_bytes()).tag.endswith("svg")


@pytest.mark.parametrize("what", ["save", "plot"])
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", FileNotFoundError),
        ("missing/pass.svg", FileNotFoundError),
        ("file/pass.svg", NotADirectoryError),
        (".", IsADirectoryError),
        ("folder", IsADirectoryError),
        ("x" * 300, OSError),
        ("a\0b", ValueError),
        (None, TypeError),
        (b"pass.svg", TypeError),
        (7, TypeError),
        (["pass.svg"], TypeError),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_a_path_that_cannot_be_written_is_named_and_nothing_is_left(
    t: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, path: Any, error: type[Exception]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("before")
    for given in [path, Path(path)] if isinstance(path, str) and path else [path]:
        with pytest.raises(error) as caught:
            getattr(t, what)(given)
        said = caught.value
        assert type(said) is error or error is OSError
        if isinstance(said, OSError):
            assert said.filename == str(path) and said.errno
        else:
            assert str(said).startswith(f"trace.{what}: ") and ("NUL" in str(said) or type_of(path) in str(said))
        assert ".tmp" not in str(said) and ".pass" not in str(said)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_a_folder_that_may_not_be_written_is_named(t: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".pass.json.abcd"))

    monkeypatch.setattr("tempfile.mkstemp", refused)
    with pytest.raises(PermissionError) as caught:
        t.save(tmp_path / "pass.json")
    assert caught.value.filename == str(tmp_path / "pass.json")


def test_a_long_name_is_no_hindrance(t: Trace, tmp_path: Path) -> None:
    t.save(tmp_path / ("x" * 250))
    assert (tmp_path / ("x" * 250)).stat().st_size


def test_a_file_appears_whole_or_not_at_all(t: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pass.json"
    path.write_text("before")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        t.save(path)
    assert caught.value.filename == str(path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["pass.json"]


# Pictures and graphs


def drawn_by(t: Trace, path: Path, **how: Any) -> Read:
    """The picture that `plot` writes."""
    t.plot(path, **how)
    return Read(path.read_bytes())


def test_a_picture_is_drawn_with_the_same_bytes_again(t: Trace, tmp_path: Path) -> None:
    picture = drawn_by(t, tmp_path / "pass.svg", title="one <pass> & more")
    assert picture.texts()[0] == "one <pass> & more"
    t.plot(str(tmp_path / "again.SVG"), title="one <pass> & more")
    t.plot(tmp_path / "again", title="one <pass> & more")
    for name in ("again.SVG", "again"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "pass.svg").read_bytes()


def test_drawn_shapes_lie_within_the_picture(t: Trace, tmp_path: Path) -> None:
    """A second trace of one machine begins late on its clock."""
    with Machine(1) as m:
        g = m.empty(1 << 16, "float32")
        m.launch(m.stream(), lambda v: v.fill(1), writes=[g], name="before", us=5000)
        m.synchronize()
        with fanin.trace() as late:
            fanin.add_n([g, g])
        m.synchronize()
    for trace in (t, late, primed_pass(), primed_pass("S12.wait"), fanin.trace()):
        picture = drawn_by(trace, tmp_path / "pass.svg")
        assert outside(picture) == []
        assert len(picture.shapes("bars")) == len(trace.picture().slices), "these have room"


def test_a_shape_outside_of_its_picture_is_found() -> None:
    for shape in (
        '<rect x="90" y="5" width="20" height="5"/>',
        '<text x="5" y="105">a</text>',
        '<circle cx="-9" cy="5" r="1"/>',
        '<path d="M5 5V6H120"/>',
        '<path d="M5 5L6 140"/>',
    ):
        start = '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="100">'
        assert len(outside(Read(f"{start}{shape}</svg>"))) == 1, shape
        assert outside(Read(f"{start}<rect x='5' y='5' width='9' height='9'/></svg>")) == []


def primed_pass(leave_out: str = "") -> Trace:
    """Two producers of which the second's work is long, a consumer, a wait that holds already, and names that do
    not fit.
    """
    with contextlib.suppress(fanin.RaceError), fanin.trace() as t, Machine(1) as m:
        if leave_out:
            m.leave_out(leave_out)
        consumer, first, second = m.stream(), m.stream(), m.stream()
        buf = fanin.InputBuffer([fanin.Slot(name="w")], stream=consumer)
        for s, us, name in ((first, 1, "multiply'"), (first, 1, "reshape'"), (second, 900, "matmul'")):
            g = m.empty(256, "float32")
            m.launch(s, lambda v: v.fill(1), writes=[g], name=name, us=us)
            buf.add(0, g, stream=s)
        buf.take()
        e = first.record()
        consumer.wait(e)
        consumer.wait(e)
    return t


def test_a_picture_has_one_message_names_in_its_bars_and_a_reference_to_the_times(tmp_path: Path) -> None:
    picture = drawn_by(primed_pass(), tmp_path / "a.svg")
    assert picture.texts("message") == ["Two streams meet here: the sum waits for both."]
    assert sorted(picture.texts("words")) == ["matmul'", "multiply'", "reshape'", "sum w"]
    assert "waits" in picture.texts()
    said = picture.notes()
    assert "A prime, as in multiply', marks the backward step" in said and "not to scale" in said
    assert 'trace.save("pass.json") has the times, for https://ui.perfetto.dev.' in said and "Left out" not in said
    assert any(tip.startswith("multiply': 1.0 us") for tip in picture.tips("bars"))


def test_a_picture_without_work_has_a_text(tmp_path: Path) -> None:
    picture = drawn_by(fanin.trace(), tmp_path / "a.svg")
    assert picture.texts() == ["No work was recorded."] and outside(picture) == []


def test_a_race_has_a_rim_and_its_message_and_is_the_only_message(tmp_path: Path) -> None:
    picture = drawn_by(primed_pass("S12.wait"), tmp_path / "a.svg")
    [rim] = picture.shapes("races")
    assert rim.attrib["fill"] == "none" and rim.attrib["stroke"] == "#d00000"
    assert "".join(picture.texts("races")).startswith("race on") and picture.texts("message") == []


def test_a_sum_has_the_place_of_each_thing_that_it_adds(t: Trace) -> None:
    picture = t.picture()
    assert [one.work.name for one in picture.sums] == ["sum w1", "sum w2"]
    for one in picture.sums:
        made = [Neighbours(picture).before(lane, when) for lane, when in one.terms]
        assert [work.name for work in made if work] == [f"backward {one.work.buffer}.{key}" for key in range(3)]
        assert len(one.producers) == 3
    assert [len(one.producers) for one in primed_pass().picture().sums] == [2], "two of three came from one stream"


@pytest.mark.parametrize("producers", [5, 6, 9])
def test_a_picture_has_at_most_six_lanes_and_the_number_of_omitted_ones(producers: int, tmp_path: Path) -> None:
    t = one_pass(producers=producers)
    picture = drawn_by(t, tmp_path / "a.svg")
    lanes, bars = len(t.picture().lanes), len(t.picture().slices)
    assert len(picture.texts("lanes")) == 6 and lanes == producers + 1 and outside(picture) == []
    missing = bars - len(picture.shapes("bars"))
    left = re.search(r"Left out: (?:(\d+) lanes? and )?(\d+) bars\.", picture.notes())
    assert [int(n or 0) for n in left.groups()] == [lanes - 6, missing] if left else (lanes, missing) == (6, 0)
    assert "sum w1" in picture.texts("words")


def test_a_lane_has_the_name_of_its_stream_or_is_called_by_its_work(tmp_path: Path) -> None:
    with fanin.trace() as t, Machine(1) as m:
        consumer, first, second = m.stream(name="main"), m.stream(name="a copy stream"), m.stream()
        for s in (consumer, first, second):
            m.launch(s, lambda: None, name="scale")
    assert drawn_by(t, tmp_path / "a.svg").texts("lanes") == ["main stream", "a copy stream", "stream of scale"]
    again = drawn_by(t, tmp_path / "a.svg", names={(0, first.handle): "copies"})
    assert again.texts("lanes") == ["copies stream", "main stream", "stream of scale"], "given names come first"
    t.save(tmp_path / "a.json")
    assert "(main)" in (tmp_path / "a.json").read_text()


def test_a_trace_that_begins_later_has_the_names_of_its_machine_and_no_other(tmp_path: Path) -> None:
    with Machine(1) as other:
        other.stream(name="of another machine")
    with Machine(1) as m, m:
        with m:
            one, two = m.stream(name="one"), m.stream()
        with fanin.trace() as t:
            for s in (one, two):
                m.launch(s, lambda: None, name="work")
    assert t.picture().names == {(0, one.handle): "one"}
    with pytest.raises(TypeError, match="stream: name: expected a str, got an int"):
        m.stream(name=3)  # type: ignore[arg-type]


def test_streams_of_one_name_are_distinguished(tmp_path: Path) -> None:
    with fanin.trace() as t, Machine(1) as m:
        for s in (m.stream(), m.stream()):
            m.launch(s, lambda: None, name="scale")
        m.launch(fanin.current_stream("sim:0"), lambda: None, name="seed")
    assert drawn_by(t, tmp_path / "a.svg").texts("lanes") == [
        "default stream",
        "stream of scale (2)",
        "stream of scale (3)",
    ]


def test_lanes_are_sorted_by_device_and_role(tmp_path: Path) -> None:
    t = primed_pass()
    consumer, first, second = (Lane(0, k) for k in (2, 3, 4))
    assert t.picture().in_order({}) == [first, second, consumer], "producers, then who sums"
    assert t.picture().in_order({second: "b", consumer: "c"}) == [second, consumer, first], "as they are listed"
    t.save(tmp_path / "a.json", names={second: "b", consumer: "c"})
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    index = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index" and e["pid"] == 0}
    assert index[4] < index[2] < index[3]
    picture = drawn_by(t, tmp_path / "a.svg", names={second: "b"})
    assert picture.texts("lanes") == ["b stream", "stream of multiply'", "stream of w"]
    with fanin.trace() as both, Machine(2) as m:
        for device in (1, 0):
            g = m.empty(4, device=device)
            m.launch(m.stream(device=device), lambda v: v.fill(1), writes=[g])
    assert [lane.device for lane in both.picture().in_order({Lane(1, 2): "first"})] == [0, 1]


def test_arrows_are_drawn_below_the_bars_and_lead_to_the_sum(tmp_path: Path) -> None:
    picture = drawn_by(primed_pass(), tmp_path / "a.svg")
    assert len(picture.shapes("wires", "path")) == len(picture.shapes("heads", "path")) == 2
    assert picture.at("wires") < picture.at("bars") < picture.at("heads")


def out_of_order(sheet: Sheet) -> list[str]:
    """What a picture shows wrongly: bars of a lane that meet, work left of what it waits for, names without room."""
    wrong = []
    for bars in sheet.part.rows.values():
        for one, next_ in itertools.pairwise(sheet.bars[id(work)] for work in bars):
            if one.right > next_.x:
                wrong.append(f"{one.name} and {next_.name} meet")
    for f in follows_of(sheet.picture):
        source, target = sheet.bars.get(id(f.source)), sheet.bars.get(id(f.target))
        if f.is_wait and source and target and source.right > target.x:
            wrong.append(f"{target.name} is left of {source.name}")
    for bar in sheet.bars.values():
        if text_width(bar.name, plot.NAME) > bar.width:
            wrong.append(f"{bar.name} has no room")
    return wrong


def waiting(works: int, streams: int, seed: int) -> Trace:
    """Work on streams that wait for each other at random, with names of several lengths."""
    draw = random.Random(seed)
    with fanin.trace(capacity=1 << 20) as t, Machine(1) as m:
        queues = [m.stream() for _ in range(streams)]
        for i in range(works):
            name = draw.choice(["add", "matmul", f"an operation with a long name, the {i}th <&> \x07\n"])
            m.launch(draw.choice(queues), lambda: None, name=name, us=draw.expovariate(0.05))
            if draw.random() < 0.5:
                one, other = draw.sample(queues, 2)
                one.wait(other.record())
    return t


@pytest.mark.parametrize("traces", sizes(30, 100))
def test_in_any_picture_bars_lie_in_the_order_that_waits_enforce(traces: int) -> None:
    whole = arrows = 0
    for seed in range(traces):
        t = waiting(4 + seed % 30, 2 + seed % 9, seed)
        sheet = Sheet(t.picture(), {})
        assert out_of_order(sheet) == [], seed
        assert outside(Read(plot.draw(t.picture()))) == [], seed
        assert len(sheet.lanes) <= 6
        whole += sheet.part.left_out == (0, 0)
        arrows += len(sheet.wires)
    assert whole > 3 and arrows > traces


def test_a_picture_in_a_wrong_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "placed", lambda rows, follows, focus=None: placed(rows, [], focus))
    found = out_of_order(Sheet(primed_pass().picture(), {}))
    assert sorted(found) == ["sum w is left of matmul'", "sum w is left of reshape'"]


@pytest.mark.parametrize("works", sizes((400,), (3000,)))
def test_of_thousands_of_works_a_picture_shows_the_first_that_have_room(works: int, tmp_path: Path) -> None:
    t = waiting(works, 40, 3)
    picture = drawn_by(t, tmp_path / "a.svg")
    shown = len(picture.shapes("bars"))
    assert outside(picture) == [] and 6 <= shown <= 60
    assert f"Left out: 34 lanes and {works - shown} bars." in picture.notes()


def test_numbers_are_moved_apart_and_no_further() -> None:
    rng = np.random.default_rng(5)
    moved = 0
    for _ in range(300):
        places = sorted(rng.uniform(0, 100, int(rng.integers(0, 12))).tolist())
        made = apart(places, [5] * (len(places) - 1), 2, 98)
        assert len(made) == len(places)
        assert all(b - a >= 5 - 1e-9 for a, b in itertools.pairwise(made)) and all(
            2 - 1e-9 <= x <= 98 + 1e-9 for x in made
        )
        if all(b - a >= 5 for a, b in itertools.pairwise(places)) and all(2 <= x <= 98 for x in places):
            assert np.allclose(made, places)
        else:
            moved += 1
    assert 50 < moved < 290, "seed 5"
    assert apart([50, 50], [5], 0, 100) == [47.5, 52.5]


def test_a_notebook_shows_the_picture(t: Trace) -> None:
    shown = t._repr_svg_()
    assert shown is not None and ET.fromstring(shown).tag.endswith("svg")
    assert "max-width: 100%" in ET.fromstring(shown).attrib["style"]
    assert fanin.trace()._repr_svg_() is None, "nothing to draw"
    with fanin.trace() as now:
        fanin.add_n([np.ones(3), np.ones(3)])
        assert now._repr_svg_() is None, "it is still recording"
        assert repr(now) == f"<fanin.Trace: {len(now)} lines, recording>"
    assert now._repr_svg_() and repr(now) == f"<fanin.Trace: {len(now)} lines>"


@pytest.mark.parametrize("name", ["pass.png", "pass.pdf", "pass.xyz", "a.svg.gz"])
def test_a_file_of_another_kind_is_refused_with_the_remedy(t: Trace, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"^trace\.plot: expected a file name that ends in \.svg, got .*rsvg-convert"):
        t.plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_has_the_order_of_its_work(t: Trace) -> None:
    text = t.dot()
    assert text.startswith("digraph fanin {") and text.rstrip().endswith("}")
    assert text.count("{") == text.count("}")
    assert text.count("subgraph cluster_") == len(t.picture().lanes)
    assert "style=dashed" in text and "style=bold" in text
    assert '"backward w1.0"' in text


def test_a_trace_that_was_not_entered_here_cannot_be_left() -> None:
    t = fanin.trace()
    with pytest.raises(RuntimeError, match="__exit__ without __enter__ on this thread"):
        t.__exit__(None, None, None)
    with t:
        fanin.add_n([1.0, 2.0])
        raised: list[BaseException] = []

        def leave() -> None:
            try:
                t.__exit__(None, None, None)
            except RuntimeError as e:
                raised.append(e)

        other = threading.Thread(target=leave)
        other.start()
        other.join()
        assert len(raised) == 1
        fanin.add_n([1.0, 2.0])
        recorded = len(t)
        fanin.add_n([1.0, 2.0])
        assert len(t) > recorded, "it still records"
    with pytest.raises(RuntimeError, match="__exit__ without __enter__"):
        t.__exit__(None, None, None)
