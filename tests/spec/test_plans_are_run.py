"""The plan is what runs: each field of a plan is read by what carries plans out, and rules alone set their bits.

Whose field a name is, the compiler says (kit/tree.py); each checker has a planted fault that it must find.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kit.support import CSRC, cache_dir, compiler
from kit.tree import (
    c_functions,
    facts_nobody_sets,
    places_compared,
    plan_fields,
    rule_bits_set,
    without_comments,
)

pytestmark = pytest.mark.tools

#: What describes plans and carries nothing out: for them alone nothing need be planned.
TELLERS = {"buffer/explain.c"}
#: What a plan says of itself and nobody carries out, each with what reads it.
SAYS = {
    "rules": "trace and explain",
    "device": "a stream's number is asked as a whole",
    "stream": "a stream's number is asked as a whole",
}

#: Fields that nobody carries out yet, since when that is known. The list may only shrink.
KNOWN_UNREAD: dict[str, str] = {}
#: Files in which bits of rules are set beside the rules. The list may only shrink.
KNOWN_SETTERS: dict[str, str] = {}


#: What a contribution's road asks -> the words by which it is asked, and the functions of buffer/ that answer it. Each
#: function has its own subject: a contribution on its way in, plain entries, terms of a fold, an array of the taker's.
QUESTIONS: dict[str, tuple[str, set[str]]] = {
    "does it have the slot's shape (A9)?": (
        r"\bfan_accum_fit\(",
        {"fan_slot_takes", "add_check_shape", "take_zeros"},
    ),
    "may this memory be written (A6)?": (
        r"\bfan_reusable\(",
        {"fan_term_may_write", "fan_plain_may_write"},
    ),
    "does the buffer alone hold it (A6)?": (
        r"->unshared\(",
        {"fan_plain_unshared", "fan_term_may_write"},
    ),
    "is it handed through (A14)?": (r"(?:return|[^=!]=) FAN_TAKE_HAND\b", {"fan_plan_take_way"}),
    "is it copied into out= (D11)?": (r"\bout_overlaps_inputs \|\|", {"fan_plan_take_way"}),
    "is it unchanged since it came?": (
        r"->is_unchanged\(",
        {
            "fan_plain_unchanged",
            "fan_value_unmoved",
        },
    ),
    "how many are still to come (A16)?": (
        r"ount(?:\([^)]*\))? (?:[<>]=?|[!=]=|-) \w+->expected|->expected (?:[<>]=?|[!=]=|-) (?!0\b)",
        {"fan_slot_missing"},
    ),
    "has its memory its value?": (r"->has_own_value\(", {"fan_plain_has_value"}),
    "does a newer event cover it (S12)?": (r"\bfan_event_covers\(", {"order_term_covers"}),
    "is the budget passed?": (r"\bfan_budget_exceeded\(", {"fan_slot_due", "budget_plain_due"}),
}


def answered_twice(csrc: Path, questions: dict[str, tuple[str, set[str]]]) -> list[str]:
    """Where a question of `questions` is asked beside the functions that answer it, and which of them ask no more."""
    wrong, answering = [], {question: set[str]() for question in questions}
    for path in sorted(csrc.glob("buffer/*.[ch]")):
        text = path.read_text()
        lines = without_comments(text).split("\n")
        for f in c_functions(text):
            body = "\n".join(lines[f.line - 1 : f.line - 1 + f.lines])
            for question, (words, owners) in questions.items():
                if f.name not in words and re.search(words, body):
                    answering[question].add(f.name)
                    if f.name not in owners:
                        wrong.append(f"buffer/{path.name}: {f.name} answers again: {question}")
    return wrong + [
        f"{question} {owner} does not answer it any more: take it off QUESTIONS"
        for question, (_, owners) in questions.items()
        for owner in sorted(owners - answering[question])
    ]


def unread(readers: dict[str, set[str]], known: dict[str, str]) -> list[str]:
    """The fields of plans that nobody carries out, and what is known and gone."""
    nobody = {f for f, files in readers.items() if not files - TELLERS and f.partition(".")[2] not in SAYS}
    return [
        f"{field} is read by nobody{' but ' + ', '.join(sorted(readers[field])) if readers[field] else ''}: "
        "a plan says what is done, and only that"
        for field in sorted(nobody - set(known))
    ] + [f"{field} is read now, or gone: take it off KNOWN_UNREAD" for field in sorted(set(known) - nobody)]


def setters(wrong: list[str], known: dict[str, str]) -> list[str]:
    """The places that set a rule's bit beside the rules, and what is known and gone."""
    gone = set(known) - {w.partition(":")[0] for w in wrong}
    return [w for w in wrong if w.partition(":")[0] not in known] + [
        f"{file} sets no rule's bit any more: take it off KNOWN_SETTERS" for file in sorted(gone)
    ]


def fields(csrc: Path, cache: Path) -> dict[str, set[str]]:
    if not compiler():
        pytest.skip("no C compiler: set CC")
    if sys.platform != "linux":
        pytest.skip("the compiler's warnings are read as GCC writes them")
    return plan_fields(csrc, compiler(), cache)


def test_every_field_of_a_plan_is_carried_out() -> None:
    readers = fields(CSRC, cache_dir())
    assert len(readers) >= 15, f"hardly a plan was found: {sorted(readers)}"
    assert not unread(readers, KNOWN_UNREAD)


def test_a_rule_s_bit_is_set_by_the_rules_alone() -> None:
    assert not setters(rule_bits_set(CSRC), KNOWN_SETTERS)


def test_whose_bytes_meet_is_asked_in_one_place() -> None:
    assert not places_compared(CSRC)


def test_each_question_about_a_contribution_is_answered_in_one_place() -> None:
    assert not answered_twice(CSRC, QUESTIONS)


# The checkers themselves

SYNC = """
typedef struct fan_slot_state { int stream; } fan_slot_state;
typedef struct fan_add_plan {
    int wait, mark[2]; /* who */
    fan_slot_state slot;
    unsigned rules;
} fan_add_plan;
typedef struct fan_other { int wait; } fan_other;
fan_add_plan fan_plan_add(fan_slot_state slot);
"""
RUNS = """#include "buffer/sync.h"
int fan_run(fan_slot_state s);
int fan_run(fan_slot_state s)
{
    fan_add_plan p = fan_plan_add(s);
    if (p.wait || p.mark[1])
        return p.slot.stream;
    return 0;
}
"""


@pytest.mark.parametrize(
    ("old", "new", "sentences"),
    [
        ("", "", []),
        ("p.wait || ", "", ["fan_add_plan.wait is read by nobody: a plan says what is done, and only that"]),
        # .. nor by who reads a field of that name of something else, or only writes it
        (
            "p.wait || ",
            "(fan_other){1}.wait || ",
            ["fan_add_plan.wait is read by nobody: a plan says what is done, and only that"],
        ),
        (
            "if (p.wait || p.mark[1])",
            "p.wait = 1; p.mark[1] |= 2;\n    if (s.stream)",
            [
                "fan_add_plan.mark is read by nobody: a plan says what is done, and only that",
                "fan_add_plan.wait is read by nobody: a plan says what is done, and only that",
            ],
        ),
    ],
)
def test_a_planted_field_that_nobody_reads_is_found(old: str, new: str, sentences: list[str], tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/sync.h").write_text(SYNC)
    (tmp_path / "buffer/run.c").write_text(RUNS.replace(old, new))
    (tmp_path / "buffer/sync.c").write_text('#include "buffer/sync.h"\n')
    assert unread(fields(tmp_path, tmp_path), {}) == sentences


def test_who_only_tells_of_a_plan_does_not_carry_it_out() -> None:
    read = {"fan_p.a": {"buffer/explain.c"}, "fan_p.b": {"buffer/explain.c", "buffer/add.c"}, "fan_p.rules": set()}
    assert unread(read, {}) == [
        "fan_p.a is read by nobody but buffer/explain.c: a plan says what is done, and only that"
    ]
    assert unread(read, {"fan_p.a": "2026-11-22", "fan_p.b": "2026-11-22"}) == [
        "fan_p.b is read now, or gone: take it off KNOWN_UNREAD"
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("p.rules |= FAN_A(6);", 1),
        ("p.rules = in_place ? FAN_A(6) : FAN_A(7);", 2),
        ("if (x && FAN_S(3))", 1),
        ("bool in_place = p.rules & FAN_A(6);", 0),
        ("bool in_place = p.rules & (FAN_A(6) | FAN_A(3));", 0),
        ('/* FAN_A(6) */ "FAN_A(6)";', 0),
    ],
)
def test_a_planted_bit_is_found(line: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/accum.c").write_text("p.rules |= FAN_A(6);\n")
    (tmp_path / "buffer/fold.c").write_text(f"\n{line}\n")
    wrong = rule_bits_set(tmp_path)
    assert len(wrong) == found and all(w.startswith("buffer/fold.c:2: FAN_") for w in wrong)
    assert setters(wrong, {"buffer/fold.c": "2026-11-22"}) == (
        [] if found else ["buffer/fold.c sets no rule's bit any more: take it off KNOWN_SETTERS"]
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("facts.disjoint = p->terms[k].data + p->bytes <= first->data;", True),
        ("if (outs[at - 1].data + outs[at - 1].bytes > end)", True),
        ("return (x->data > y->data) - (x->data < y->data);", True),
        ("return (uintptr_t)a + bytes <= (uintptr_t)b;", True),
        ("if (src[i] < to + bytes && to < src[i] + bytes)", True),
        ("return !fan_flats_meet(a->data, bytes, data, bytes);", False),
        ("if (src[i] != to && data == a->data && n < 3)", False),
        ("return parked + b->bytes << 2;", False),
        ('/* a->data < b->data */ "a.data < b"', False),
    ],
)
def test_a_planted_comparison_of_places_is_found(line: str, found: bool, tmp_path: Path) -> None:
    for folder in ("array", "buffer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "array/extents.c").write_text("return a->data < b->data;\n")
    (tmp_path / "buffer/fold.c").write_text(f"#include <data.h>\n{line}\n")
    wrong = places_compared(tmp_path)
    assert len(wrong) == found and all(w.startswith("buffer/fold.c:2: ") for w in wrong)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return fan_reusable(&facts) == FAN_REUSE_YES;", ["again answers again: is it free?"]),
        ("return facts->reusable; /* fan_reusable(&facts) */", []),
        ("", []),
    ],
)
def test_a_planted_second_answer_is_found(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/once.c").write_text("bool once(const fan_reuse *f)\n{\n    return fan_reusable(f);\n}\n")
    (tmp_path / "buffer/x.c").write_text(f"bool again(const fan_reuse *facts)\n{{\n    {line}\n}}\n")
    questions = {"is it free?": (r"\bfan_reusable\(", {"once"})}
    assert answered_twice(tmp_path, questions) == [f"buffer/x.c: {said}" for said in found]
    (tmp_path / "buffer/x.c").write_text(f"bool again(const fan_reuse *facts) {{ {line} }}\n")
    assert answered_twice(tmp_path, questions) == [f"buffer/x.c: {said}" for said in found]
    (tmp_path / "buffer/once.c").write_text("")
    assert (
        answered_twice(tmp_path, questions)[-1] == "is it free? once does not answer it any more: take it off QUESTIONS"
    )


# The questions


def test_every_fact_that_a_rule_asks_is_set_by_somebody() -> None:
    assert facts_nobody_sets(CSRC) == []


def test_a_planted_fact_that_nobody_sets_is_found(tmp_path: Path) -> None:
    """A field that is only handed on from one of the same name is set by nobody."""
    (tmp_path / "buffer").mkdir()
    rule = "typedef struct fan_reuse {\n    bool dense; /* x */\n    bool lent;\n} fan_reuse;\n"
    rule += "int ask(const fan_reuse *f);\n"
    (tmp_path / "buffer/accum.h").write_text(rule)
    (tmp_path / "buffer/x.c").write_text("fan_reuse f = {.dense = a->dense && b,\n .lent = v->lent};\n")
    assert facts_nobody_sets(tmp_path) == ["buffer/accum.h: fan_reuse.lent is asked for and set by nobody"]
    (tmp_path / "buffer/y.c").write_text("void lend(fan_value *v) { if (v->lent == 1) v->other = 2; }\n")
    assert len(facts_nobody_sets(tmp_path)) == 1, "to compare is not to set"
    (tmp_path / "buffer/y.c").write_text("void lend(fan_value *v) { v->lent = true; }\n")
    assert facts_nobody_sets(tmp_path) == []
