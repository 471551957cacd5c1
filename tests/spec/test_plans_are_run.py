"""The plan is what runs: each field of a plan is read by what carries plans out, and rules alone set their bits.

The compiler finds the struct of a field (kit/tree.py); each checker has a planted fault that it must find.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kit.support import CSRC, cache_dir, compiler
from kit.tree import (
    c_functions,
    facts_never_set,
    places_compared,
    plan_fields,
    rule_bits_set,
    without_comments,
)

pytestmark = pytest.mark.tools

#: What describes plans and carries nothing out: for them alone nothing need be planned.
TELLERS = {"buffer/explain.c"}
#: Fields that only describe a plan and are not carried out, each with its reader.
SAYS = {
    "rules": "trace and explain",
    "device": "a stream's number is asked as a whole",
    "stream": "a stream's number is asked as a whole",
}

#: Fields that no code carries out yet, with the date of the finding. The list may only shrink.
KNOWN_UNREAD: dict[str, str] = {}
#: Files in which bits of rules are set beside the rules. The list may only shrink.
KNOWN_SETTERS: dict[str, str] = {}


@dataclass(frozen=True)
class Question:
    """A question of a rule, and the one function that answers it for every contribution."""

    rule: str
    text: str
    answer: str
    #: functions that call it: on the path of plain entries, and on the general one
    asked: tuple[str, ...]
    #: the words of an answer
    words: str
    #: a line that answers again
    again: str
    #: parts of the answer that have a name of their own, and what reads facts for it in the same words
    parts: tuple[str, ...] = ()


#: Each A-rule, and after them the questions beyond these that a contribution meets on both roads.
QUESTIONS = [
    Question(
        "A1",
        "do the terms' own operators make the sum (also A8)?",
        "fan_accum_calls_out",
        ("fan_accum", "batch_calls_out"),
        r"\b(?:recording|create_graph) \|\|",
        "return b->create_graph || state->objects;",
    ),
    *(
        Question(
            rule,
            text,
            "fan_accum",
            ("fan_plan_plain_fold", "fold_accum"),
            rf"\bFAN_A\({rule[1:]}\)",
            f"plan.rules |= FAN_A({rule[1:]});",
            ("accum_arrays",),
        )
        for rule, text in {
            "A2": "what does a zero add?",
            "A3": "is a dense operand written that comes to a sparse one?",
            "A4": "or does the sum get memory of its own?",
            "A5": "are two sparse ones merged?",
            "A7": "does a sum get memory of its own?",
            "A8": "is it the objects' own?",
        }.items()
    ),
    Question(
        "A6",
        "may this memory be written?",
        "fan_reusable",
        ("fan_plain_may_write", "fan_term_may_write"),
        r"\breturn FAN_REUSE_",
        "return FAN_REUSE_HELD;",
    ),
    Question(
        "A6",
        "can no other code reach it?",
        "fan_reuse_free",
        ("fan_reusable", "fan_plain_may_write"),
        r"\|\| (?:\w+->)?donated\b|\bdonated \|\|",
        "return first->owned || first->donated || first->alone;",
    ),
    Question(
        "A9",
        "does its shape fit?",
        "fan_accum_fit",
        ("fan_slot_takes", "check_shape"),
        r"\bfan_broadcasts_from\(",
        "return fan_broadcasts_from(ndim, shape, spec->ndim, spec->shape);",
    ),
    Question(
        "A9",
        "are two shapes the same?",
        "fan_shape_same",
        ("fan_plain_same", "fan_accum_fit"),
        r"\bmemcmp\([^;]*\bshape\b|\bshape\[\w+\] [!=]= \w+(?:->\w+)?\[",
        "return memcmp(a->shape, b->shape, sizeof b->shape) == 0;",
    ),
    Question(
        "A10",
        "does its dtype fit?",
        "fan_accum_dtype_fit",
        ("fan_slot_takes", "check_dtype"),
        r"\bfan_dtype_can_cast\(|\bspec->dtype [!=]= (?!FAN_DT_NONE)",
        "return spec->dtype == kind->dtype;",
    ),
    Question(
        "A11",
        "in which dtype does the sum run?",
        "fan_accum_dtype",
        ("fan_plain_accum", "fan_accum_dtype_of"),
        r"\bfan_dtype_accumulate\(",
        "return wish == FAN_DT_NONE ? fan_dtype_accumulate(dtype) : wish;",
    ),
    Question(
        "A12",
        "how does it get to the slot's device?",
        "fan_accum_move",
        ("fan_slot_takes", "check_device"),
        r"\breturn FAN_MOVE_|[^=!]= FAN_MOVE_",
        "out->to.move = FAN_MOVE_UPLOAD;",
    ),
    Question(
        "A13",
        "does the sum stay expanded? (Plain entries never are.)",
        "fan_plan_fold",
        ("fan_fold_decide",),
        r"\bFAN_A\(13\)|\bexpanded = \w+->expanded\b",
        "plan.expanded = facts->expanded;",
    ),
    Question(
        "A14",
        "is it handed through?",
        "fan_plan_take",
        ("take_plain_way", "take_plan_and_sum"),
        r"(?:\breturn|[^=!]=) FAN_TAKE_HAND\b|\bhanded = |\bFAN_A\(14\)",
        "bool handed = n == 1 && !options->scale.on;",
        ("fan_plan_take_way",),
    ),
    Question(
        "A15",
        "which contributions may be summed now?",
        "fan_list_ready",
        ("budget_plain_prefix", "fan_slot_due"),
        r"\bfan_entry_parked\(&\w+\[\w+\]\)",
        "while (m < n && fan_entry_parked(&first[m]))",
    ),
    Question(
        "A15",
        "is it the next by its key?",
        "fan_key_is_next",
        ("add_in_place_fits", "target_facts", "fan_list_ready"),
        r"\bkey\)? [!=]= (?:\w+->)*next(?:_key)?\b|[!=]= (?:\w+->)*next_key\b"
        r"|\bkey \+ 1 [!=]=|[!=]= [^;&|]*\bkey \+ 1\b",
        "return (uint64_t)one->key == (uint64_t)first->key + 1;",
    ),
    Question(
        "A15",
        "is a key missing?",
        "fan_keys_whole",
        ("take_keys_whole", "take_has_all_keys"),
        r"\blast \+ 1 [!=]=|\blast (?:- \w+ )?[!=]= [^;]*\bn\b",
        "return last == state->next_key + n - 1;",
    ),
    Question(
        "A15",
        "are there keys and none in one slot?",
        "fan_keys_mix",
        ("add_plain_park", "check_key"),
        r"(?:keyed > 0|key [<>]=? 0)\) [!=]= \(",
        "return list->n && (list->entries[0].key < 0) != (one->key < 0);",
    ),
    Question(
        "A16",
        "has this key contributed?",
        "fan_list_has",
        ("check_key",),
        r"<= fan_entry_key\(|fan_entry_key\([^;]*\) == key\b",
        "return key <= fan_entry_key(&list->entries[0]);",
        ("list_in_sum", "list_is_at"),
    ),
    Question(
        "A16",
        "how many are still to come?",
        "fan_slot_missing",
        ("add_plain_park", "check_key", "take_plain_claim_slot", "take_claim"),
        r"ount(?:\([^)]*\))? (?:[<>]=?|[!=]=|-) \w+->expected|->expected (?:[<>]=?|[!=]=|-) (?!0\b)",
        "return s->expected - fan_slot_count(s);",
    ),
    Question(
        "D5",
        "do its Python ints leave their dtype?",
        "fan_int_run_leaves",
        ("take_stays_in_int64", "budget_ints_wait", "dense_check_ints"),
        r"\b__builtin_add_overflow\(\w*(?:total|sum|run)|\bsum >= half\b",
        "if (__builtin_add_overflow(total, number, &total))",
    ),
    Question(
        "D11",
        "is it copied into out=?",
        "fan_plan_take",
        ("take_plain_way", "take_plan_and_sum"),
        r"\bout_overlaps_inputs \|\|",
        "bool copy = facts->out_overlaps_inputs || facts->stats;",
        ("fan_plan_take_way",),
    ),
    Question(
        "D35",
        "which contribution is named that is not finite?",
        "fan_sum_stats_blame",
        ("take_keep_stats", "fan_fold_collect_stats", "commit_made_sum"),
        r"\bhas_nonfinite = (?:true|\w+->nonfinite)",
        "kept->has_nonfinite = true;",
    ),
    Question(
        "S12",
        "does a newer event cover it?",
        "order_term_covers",
        (),
        r"\bfan_event_covers\(",
        "if (fan_event_covers(a, b))",
    ),
    Question(
        "Park and fold",
        "is the budget passed?",
        "fan_budget_exceeded",
        ("budget_plain_due", "fan_slot_due"),
        r"> b->limits\.|\bparked > alone\b",
        "return parked > b->limits.held;",
    ),
    Question(
        "Park and fold",
        "can it be?",
        "fan_budget_near",
        ("add_plain_count", "add_in_place_plan", "fan_slot_due"),
        r"[<>]=? b->(?:budget|fold_threshold)\b",
        "bool due = parked + bytes > b->budget;",
    ),
    # Facts: of a value, and of a plain entry, which has none.
    Question(
        "A6", "does the buffer alone hold a value?", "fan_term_may_write", (), r"\bb->frontend->unshared\(",
        "return b->frontend->unshared(one->object);",
    ),
    Question(
        "A6", ".. and an entry?", "fan_plain_unshared", ("fan_plain_may_write", "fold_gather_plain"),
        r"\bplain->unshared\(", "return b->frontend->plain->unshared(one->object);",
    ),
    Question(
        "S2", "is a value unchanged since it came?", "fan_value_unmoved", ("fan_slot_check_unmoved",),
        r"\bfrontend->is_unchanged\(", "return b->frontend->is_unchanged(value);",
    ),
    Question(
        "S2", ".. and an entry?", "fan_plain_unchanged", ("fan_plain_all_unchanged", "add_in_place_unchanged"),
        r"\bplain->is_unchanged\(", "return b->frontend->plain->is_unchanged(one->object, kind, one->data);",
    ),
    Question(
        "S2", "has its memory its value?", "fan_plain_has_value", ("fan_plain_has_values", "add_in_place_begin"),
        r"->has_own_value\(", "return plain->has_own_value(one->object);",
    ),
]  # fmt: skip


def bodies(csrc: Path) -> dict[str, list[tuple[str, str]]]:
    """The functions of buffer/ by name: their files and texts."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(csrc.glob("buffer/*.[ch]")):
        text = path.read_text()
        lines = without_comments(text).split("\n")
        for f in c_functions(text):
            body = "\n".join(lines[f.line - 1 : f.line - 1 + f.lines])
            found.setdefault(f.name, []).append((path.name, body))
    return found


def answered_twice(csrc: Path, questions: list[Question]) -> list[str]:
    """Where a question is answered outside its function, which functions are missing, and which no longer call them."""
    wrong, functions = [], bodies(csrc)
    for q in questions:
        own, said = {q.answer, *q.parts}, f"{q.rule}: {q.text}"
        answering = set()
        for name, places in functions.items():
            for file, body in places:
                if re.search(q.words, body.partition("{")[2]):
                    answering.add(name)
                    if name not in own:
                        wrong.append(f"buffer/{file}: {name} answers again: {said}")
        if not own & answering:
            wrong.append(f"{q.answer} does not answer any more: {said}")
        for name in q.asked:
            if not any(re.search(rf"\b{q.answer}\(", body.partition("{")[2]) for _, body in functions.get(name, [])):
                wrong.append(f"{name} does not call {q.answer} any more: {said}")
    return wrong


def unread(readers: dict[str, set[str]], known: dict[str, str]) -> list[str]:
    """The fields of plans that no code carries out, and listed ones that no longer exist."""
    nobody = {f for f, files in readers.items() if not files - TELLERS and f.partition(".")[2] not in SAYS}
    return [
        f"{field} is read by nobody{' but ' + ', '.join(sorted(readers[field])) if readers[field] else ''}: "
        "a plan says what is done, and only that"
        for field in sorted(nobody - set(known))
    ] + [f"{field} is read now, or gone: take it off KNOWN_UNREAD" for field in sorted(set(known) - nobody)]


def setters(wrong: list[str], known: dict[str, str]) -> list[str]:
    """The places outside the rules that set a rule's bit, and listed ones that no longer exist."""
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


def test_overlap_of_bytes_is_checked_in_one_place() -> None:
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
        # .. nor by code that reads a field of that name of another struct, or only writes it
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
def test_a_planted_unread_field_is_found(old: str, new: str, sentences: list[str], tmp_path: Path) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer/sync.h").write_text(SYNC)
    (tmp_path / "buffer/run.c").write_text(RUNS.replace(old, new))
    (tmp_path / "buffer/sync.c").write_text('#include "buffer/sync.h"\n')
    assert unread(fields(tmp_path, tmp_path), {}) == sentences


def test_code_that_only_reports_a_plan_does_not_count_as_carrying_it_out() -> None:
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


@pytest.mark.parametrize("q", QUESTIONS, ids=lambda q: f"{q.rule}-{q.answer}")
def test_a_planted_second_answer_is_found(q: Question, tmp_path: Path) -> None:
    """Planted in a copy of the sources: a second answer, a missing function, and a path that no longer calls it."""
    shutil.copytree(CSRC / "buffer", tmp_path / "buffer")
    file = tmp_path / "buffer" / "add.c"
    text = file.read_text()
    said = f"{q.rule}: {q.text}"
    file.write_text(text + f"\nbool planted(const fan_buffer *b)\n{{\n    {q.again}\n}}\n")
    assert answered_twice(tmp_path, [q]) == [f"buffer/add.c: planted answers again: {said}"]
    file.write_text(text + f"\nbool planted(const fan_buffer *b)\n{{\n    return true; /* {q.again} */\n}}\n")
    assert answered_twice(tmp_path, [q]) == []
    gone = replace(q, answer="gone", parts=())
    wrong = answered_twice(tmp_path, [gone])
    assert f"gone does not answer any more: {said}" in wrong
    assert {f"{name} does not call gone any more: {said}" for name in q.asked} <= set(wrong)


def test_each_rule_has_its_question() -> None:
    rules = {f"A{n}" for n in range(1, 17)}
    assert rules <= {q.rule for q in QUESTIONS}
    assert f"#define FAN_A_RULES {len(rules)}\n" in (CSRC / "buffer" / "rules.h").read_text()


# The questions


def test_every_fact_that_a_rule_reads_is_set() -> None:
    assert facts_never_set(CSRC) == []


def test_a_planted_unset_fact_is_found(tmp_path: Path) -> None:
    """A field that is only copied from one of the same name is not set."""
    (tmp_path / "buffer").mkdir()
    rule = "typedef struct fan_reuse {\n    bool dense; /* x */\n    bool lent;\n} fan_reuse;\n"
    rule += "int ask(const fan_reuse *f);\n"
    (tmp_path / "buffer/accum.h").write_text(rule)
    (tmp_path / "buffer/x.c").write_text("fan_reuse f = {.dense = a->dense && b,\n .lent = v->lent};\n")
    assert facts_never_set(tmp_path) == ["buffer/accum.h: fan_reuse.lent is read and never set"]
    (tmp_path / "buffer/y.c").write_text("void lend(fan_value *v) { if (v->lent == 1) v->other = 2; }\n")
    assert len(facts_never_set(tmp_path)) == 1, "to compare is not to set"
    (tmp_path / "buffer/y.c").write_text("void lend(fan_value *v) { v->lent = true; }\n")
    assert facts_never_set(tmp_path) == []
