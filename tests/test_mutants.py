"""Every planted fault of the buffer is found by the proof program, or docs/proof.md says why it changes nothing.

The list is read from the sources: the plan bits of csrc/buffer/sync.h and each FAN_MUT of csrc/buffer.
"""

from __future__ import annotations

import re

import pytest

import fanin
from fanin.sim import Machine
from proof_program import Line, results, side_by_side
from support import CSRC, ROOT, compiler

pytestmark = [pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")]

PAGE = ROOT / "docs" / "proof.md"

#: What whoever drives the buffer owes it: faults of the proof's own driver.
DRIVER = [f"driver:{word}" for word in ("count", "import-wait", "alias-wait", "alias-mark", "sync", "elide", "donate")]

#: Those that survive alone, each with another that guards the same edge.
SURVIVORS = {
    "S9.mark": "S13.mark",
    "S22.mark": "S19.mark",
    "mut:21": "S18.record",
    "mut:10": "driver:donate",
    "driver:donate": "mut:10",
}


def plan_words(text: str) -> list[str]:
    """The plan bits of a header's X-list."""
    return re.findall(r"X\(S\d+_[A-Z]+, \"(S\d+\.\w+)\"\)", text)


def mutants_of(text: str) -> set[str]:
    """The numbers of the planted faults in a source, as the program names them."""
    return {f"mut:{n}" for n in re.findall(r"FAN_MUT\((\d+)\)", text)}


PLAN = plan_words((CSRC / "buffer" / "sync.h").read_text())
MUTANTS = sorted(
    set().union(*(mutants_of(p.read_text()) for p in CSRC.glob("**/*.[ch]"))), key=lambda name: int(name.split(":")[1])
)


def kills(lines: list[Line]) -> dict[str, Line]:
    return {line.words[0]: line for line in lines if line.kind == "kill"}


def told(page: str, name: str) -> bool:
    """Whether a table of the page has a row for the fault."""
    return re.search(rf"^\| `{re.escape(name)}` \|", page, re.MULTILINE) is not None


def test_the_list_is_read_from_the_sources() -> None:
    assert len(PLAN) == len(set(PLAN)) >= 21
    assert {"S9.record", "S13.mark", "S22.wait"} <= set(PLAN)
    assert [f"mut:{n}" for n in range(1, len(MUTANTS) + 1)] == MUTANTS, "the numbers of planted faults have a gap"
    assert plan_words('X(S9_MARK, "S9.mark") \\\n X(S12_WAIT, "S12.wait")') == ["S9.mark", "S12.wait"]
    assert mutants_of("if (FAN_MUT(3) || !FAN_MUT(14))") == {"mut:3", "mut:14"}


@pytest.mark.parametrize("name", [*PLAN, *MUTANTS, *DRIVER])
def test_the_page_tells_every_planted_fault(name: str) -> None:
    assert told(PAGE.read_text(), name), f"docs/proof.md has no row for {name}"


def test_every_planted_fault_is_killed() -> None:
    faults = [name for name in (*PLAN, *MUTANTS, *DRIVER) if name not in SURVIVORS]
    found = kills(side_by_side([("kill", *faults[i::2]) for i in (0, 1)]))
    assert set(found) == set(faults)
    for name, line in found.items():
        assert line["failing"] > 0, f"{name} survives"
        assert line["failing"] <= line["of"] or "verdict=crashed" in line.words


def test_what_survives_alone_is_killed_with_its_partner() -> None:
    names = list(dict.fromkeys(n for s, p in SURVIVORS.items() for n in (s, p, f"{s}+{p}")))
    found = kills(side_by_side([("kill", "shallow", *names[i::2]) for i in (0, 1)]))
    for survivor, partner in SURVIVORS.items():
        assert found[survivor]["failing"] == 0, f"{survivor} is killed: docs/proof.md says that it survives"
        both, alone = found[f"{survivor}+{partner}"]["failing"], found[partner]["failing"]
        assert both > alone, f"{survivor} guards nothing that {partner} does not guard"


@pytest.mark.slow
def test_what_survives_alone_survives_the_larger_sizes() -> None:
    found = kills(side_by_side([("kill", "deep", name) for name in SURVIVORS], timeout=3600))
    assert set(found) == set(SURVIVORS)
    for name, line in found.items():
        assert line["failing"] == 0, name


@pytest.mark.parametrize("survivor", SURVIVORS)
def test_what_survives_alone_has_its_argument_on_the_page(survivor: str) -> None:
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
            del out  # nobody has waited for what fills it

    taken()
    with pytest.raises(fanin.RaceError, match=r"memory is given back .* while 'fill' .* writes it"):
        taken("S22.mark")


def test_the_hunter_finds_nothing_where_nothing_is_planted() -> None:
    (line,) = kills(results("kill", "shallow", "none")).values()
    assert line["failing"] == 0 and line["of"] == 8_872
