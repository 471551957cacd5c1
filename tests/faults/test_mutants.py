"""Every planted fault of the buffer is found by the proof program, or docs/proof.md explains why it changes nothing.

The list is read from the sources: the plan bits of csrc/buffer/sync.h and the buffer's faults of csrc/base/fault.h.
"""

from __future__ import annotations

import re

import pytest

import fanin
from fanin.sim import Machine
from kit.proof_program import Line, results, side_by_side
from kit.sample import sizes
from kit.support import CSRC, ROOT, compiler

pytestmark = [pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")]

PAGE = ROOT / "docs" / "proof.md"

#: Duties of the code that drives the buffer: faults of the proof's own driver.
DRIVER = [f"driver:{word}" for word in ("count", "import-wait", "alias-wait", "alias-mark", "sync", "elide", "donate")]

#: Where those are found that need more than the first grounds: the sample hunts there alone.
GROUNDS = {
    "whole K=1 D=2 S=1": ["S10.record", "S11.record", "S13.mark", "S21.record", "S21.wait", "S22.record", "S22.wait"]
    + ["fault:MARK_ON_PRODUCER", "fault:RECORD_AFTER_FOLD", "fault:STREAMS_BY_NUMBER"],
    "whole K=2 D=1 S=2": ["S12.mark", "S12.record", "S12.wait", "fault:OLDEST_EVENT", "fault:REFCOUNT_IS_ENOUGH"]
    + ["fault:WRITE_SHARED"],
    "whole K=2 D=2 S=1": ["S15.record"],
    "whole K=2 D=2 S=2": ["fault:EVENT_REUSED"],
    "split D=1 S=1 scene=adds": ["fault:SLOT_LOCK"],
    "split D=1 S=1 scene=take": ["fault:ADD_IGNORES_TAKE", "fault:SLOT_CLAIMED_TWICE", "fault:TAKE_IGNORES_ADDS"],
    "split D=1 S=1 scene=ready": ["fault:READY_TOO_SOON"],
    "split D=1 S=2 scene=adds": ["fault:PARKED_EARLY"],
}

#: Those that survive alone, each with another that guards the same edge.
SURVIVORS = {
    "S9.mark": "S13.mark",
    "S22.mark": "S19.mark",
    "fault:NO_RECORD_BEHIND_SUM": "S18.record",
    "fault:WRITE_WITHOUT_WAIT": "driver:donate",
    "driver:donate": "fault:WRITE_WITHOUT_WAIT",
}


def plan_words(text: str) -> list[str]:
    """The plan bits of a header's X-list."""
    return re.findall(r"X\(S\d+_[A-Z]+, \"(S\d+\.\w+)\"\)", text)


def faults_of(text: str) -> dict[str, str]:
    """Planted faults with what each breaks, from an X-list of base/fault.h."""
    return {f"fault:{name}": said for name, said in re.findall(r"X\((\w+)\) /\* (.*?) \*/", text)}


def of_the_buffer(text: str) -> str:
    """The list of those that the proof program finds."""
    listed = re.search(r"define FAN_BUFFER_FAULTS\(X\)(.*?)\n#define", text, re.DOTALL)
    assert listed
    return listed[1]


def planted_in(text: str) -> set[str]:
    """The faults that a source has room for."""
    return {f"fault:{name}" for name in re.findall(r"FAN_FAULT\((\w+)\)", text)}


PLAN = plan_words((CSRC / "buffer" / "sync.h").read_text())
FAULTS = faults_of(of_the_buffer((CSRC / "base" / "fault.h").read_text()))
#: Those that a test of their own finds, which the page names.
ELSEWHERE = {
    name: said for name, said in faults_of((CSRC / "base" / "fault.h").read_text()).items() if name not in FAULTS
}


def kills(lines: list[Line]) -> dict[str, Line]:
    return {line.words[0]: line for line in lines if line.kind == "kill"}


def has_row(page: str, name: str) -> bool:
    """Whether a table of the page has a row for the fault."""
    return re.search(rf"^\| `{re.escape(name)}` \|", page, re.MULTILINE) is not None


def test_the_list_is_read_from_the_sources() -> None:
    assert len(PLAN) == len(set(PLAN)) >= 21
    assert {"S9.record", "S13.mark", "S22.wait"} <= set(PLAN)
    assert len(FAULTS) >= 24
    assert set(FAULTS) <= set().union(*(planted_in(p.read_text()) for p in (CSRC / "buffer").glob("*.[ch]")))
    assert plan_words('X(S9_MARK, "S9.mark") \\\n X(S12_WAIT, "S12.wait")') == ["S9.mark", "S12.wait"]
    assert planted_in("if (FAN_FAULT(SLOT_KEPT) || !FAN_FAULT(WRITE_SHARED))") == {
        "fault:SLOT_KEPT",
        "fault:WRITE_SHARED",
    }
    planted = "#define FAN_BUFFER_FAULTS(X) X(A_B) /* what */\n#define FAN_EXACT_FAULTS(X) X(C) /* else */"
    assert faults_of(of_the_buffer(planted)) == {"fault:A_B": "what"}
    assert faults_of(planted) == {"fault:A_B": "what", "fault:C": "else"}
    assert len(ELSEWHERE) >= 33


@pytest.mark.parametrize("name", [*PLAN, *FAULTS, *DRIVER])
def test_the_page_lists_every_planted_fault(name: str) -> None:
    assert has_row(PAGE.read_text(), name), f"docs/proof.md has no row for {name}"
    assert name not in FAULTS or f"| `{name}` | {FAULTS[name]} |" in PAGE.read_text(), "base/fault.h says it otherwise"


def finder(page: str, name: str, said: str) -> tuple[str, str]:
    """The file and the test that the page's row for a fault names."""
    row = re.search(rf"^\| `{name}` \| {re.escape(said)} \| `([\w/]+\.py)::(\w+)` \|$", page, re.MULTILINE)
    assert row, f"docs/proof.md has no row for {name}: | `{name}` | {said} | `file::test` |"
    return row[1], row[2]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_page_names_the_test_that_finds_a_fault_elsewhere(name: str) -> None:
    file, test = finder(PAGE.read_text(), name, ELSEWHERE[name])
    text = (ROOT / file).read_text()
    assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
    text += "".join((ROOT / "tests" / "kit" / f"{kit}.py").read_text() for kit in re.findall(r"from kit\.(\w+)", text))
    word = name.removeprefix("fault:")
    assert word in text or word.replace("NO_FOOTPRINT_", "OF_") in text, f"{file} does not plant {word}"


def test_a_row_without_its_test_is_found() -> None:
    assert finder("| `fault:A` | what (x) | `tests/a.py::test_b` |", "fault:A", "what (x)") == ("tests/a.py", "test_b")
    for page in ("| `fault:A` | else | `tests/a.py::test_b` |", "| `fault:A` | what (x) | race |"):
        with pytest.raises(AssertionError, match="has no row for fault:A"):
            finder(page, "fault:A", "what (x)")


def test_every_fault_has_a_place_where_it_is_planted() -> None:
    text = (CSRC / "base" / "fault.h").read_text()
    listed = {f"fault:{name}" for name in re.findall(r"X\((\w+)\) /\*", text)}
    planted = set().union(*(planted_in(p.read_text()) for p in CSRC.glob("**/*.[ch]") if p.name != "fault.h"))
    footprints = {name for name in listed if name.startswith("fault:NO_FOOTPRINT_")}  # planted by their number
    assert planted == listed - footprints and len(footprints) >= 15


def hunts(grounds: dict[str, list[str]]) -> list[tuple[str, ...]]:
    """Runs of the program that hunt on the grounds named, and two for all other faults."""
    there = {name for names in grounds.values() for name in names}
    others = [name for name in (*PLAN, *FAULTS, *DRIVER) if name not in there and name not in SURVIVORS]
    on_grounds = [(f"where={ground}", *names) for ground, names in grounds.items()]
    return [*on_grounds, *(tuple(others[i::2]) for i in (0, 1))]


@pytest.mark.parametrize(("words", "grounds"), sizes((["soon"], GROUNDS), ([], {})))
def test_every_planted_fault_is_killed(words: list[str], grounds: dict[str, list[str]]) -> None:
    """The sample ends where a fault is found; the whole counts the configurations that fail."""
    found = kills(side_by_side([("kill", *words, *hunt) for hunt in hunts(grounds)]))
    assert set(found) == {*PLAN, *FAULTS, *DRIVER} - set(SURVIVORS)
    for name, line in found.items():
        assert line["failing"] > 0, f"{name} survives"
        assert line["failing"] <= line["of"] or "verdict=crashed" in line.words


def both(survivor: str, partner: str) -> str:
    """Two faults planted at once; the order of the pair makes no other run."""
    return "+".join(sorted((survivor, partner)))


@pytest.mark.parametrize("part", sizes("part=1/24", "part=0/1"))
def test_a_mutant_that_survives_alone_is_killed_with_its_partner(part: str) -> None:
    names = list(dict.fromkeys(n for s, p in SURVIVORS.items() for n in (s, p, both(s, p))))
    found = kills(side_by_side([("kill", "shallow", part, *names[i::2]) for i in (0, 1)]))
    for survivor, partner in SURVIVORS.items():
        assert found[survivor]["failing"] == 0, f"{survivor} is killed: docs/proof.md says that it survives"
        assert found[both(survivor, partner)]["failing"] > found[partner]["failing"], (
            f"{survivor} guards nothing that {partner} does not guard"
        )


@pytest.mark.slow
def test_a_mutant_that_survives_alone_survives_the_larger_sizes() -> None:
    found = kills(side_by_side([("kill", "deep", name) for name in SURVIVORS]))
    assert set(found) == set(SURVIVORS)
    for name, line in found.items():
        assert line["failing"] == 0, name


@pytest.mark.parametrize("survivor", SURVIVORS)
def test_a_mutant_that_survives_alone_has_its_argument_on_the_page(survivor: str) -> None:
    section = PAGE.read_text().partition("## What survives")[2].partition("\n## ")[0]
    assert re.search(rf"^- \*\*`{re.escape(survivor)}`", section, re.MULTILINE), (
        f"docs/proof.md gives no argument for {survivor}"
    )


def test_the_mark_of_out_alone_is_found_by_a_slot_of_zeros() -> None:
    """S22.mark, which the proof's driver cannot find alone: it has no symbolic zeros."""

    def taken(*left_out: str) -> None:
        with Machine(1) as m:
            m.leave_out(*left_out)
            buf, out = fanin.InputBuffer(1), m.empty(4)
            for _ in range(2):
                buf.add(0, fanin.Zero((4,), "float64"))
            buf.take(out=[out])
            del out  # no stream has waited for the work that fills it

    taken()
    with pytest.raises(fanin.RaceError, match=r"memory is freed .* while 'fill' .* writes it"):
        taken("S22.mark")


@pytest.mark.parametrize(("part", "configurations"), sizes(("part=1/24", 488), ("part=0/1", 8_872)))
def test_the_hunter_finds_nothing_where_nothing_is_planted(part: str, configurations: int) -> None:
    (line,) = kills(results("kill", "shallow", part, "none")).values()
    assert line["failing"] == 0 and line["of"] == configurations
