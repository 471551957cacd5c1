"""Every rule of the overlap core and of layouts is one that tests/c/test_overlap.c would miss: each is broken once, and
the program must fail.

Each costs a compiler's run: some are part of the ordinary run.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kit import support
from kit.sample import every
from kit.support import CSRC, TEST_C, compiler, emptied

pytestmark = [pytest.mark.skipif(not compiler(), reason="no C compiler: set CC")]

#: file -> planted faults: (the source text, its replacement)
MUTANTS: dict[str, dict[str, tuple[str, str]]] = {
    "array/overlap": {
        "an empty axis": ("empty |= r->shape[i] <= 0;", "empty |= r->shape[i] < 0;"),
        "the start of a negative stride": ("far |= __builtin_sub_overflow(lo, way, &lo);", "(void)lo;"),
        "what is too far": ("far |= reach >= FARTHEST;", ""),
        "the end of memory": ("far |= __builtin_add_overflow(lo, reach, &last)", "last = lo + reach"),
        "a tooth joins what touches it": ("sorted[i].step <= tooth;", "sorted[i].step <= tooth + 1;"),
        "a tooth's length": (
            "tooth += sorted[i].step * (sorted[i].count - 1);",
            "tooth += sorted[i].step * sorted[i].count;",
        ),
        "axes join without a gap": ("times <= top->count)", "times <= top->count + 1)"),
        "axes join as multiples": ("times * top->step == step &&", ""),
        "extents": (
            "fan_comb_extent(b)))\n        return true;",
            "fan_comb_extent(b)) || a->last <= b->lo)\n        return true;",
        ),
        "the places within elements": ("a->tooth + b->tooth - 2, (int64_t)", "a->tooth + b->tooth - 1, (int64_t)"),
        "the second is counted from its end": ("(int64_t)(b->last - a->lo))", "(int64_t)(b->last - a->lo - 1))"),
        "an element of the second": ("most - fan__equation_given(", "fan__equation_given("),
        "an index seen backwards": ("s->index[i] = r->shape[i] - 1 - s->index[i];", "(void)0;"),
        "an index within its axis": (
            "fan_min(equation_quotient(way, m->step), m->count - 1)",
            "equation_quotient(way, m->step)",
        ),
        "one step at least": ("sorted[k].count - 2};", "sorted[k].count - 1};"),
        "differences of both signs": ("sorted[j].step, 2 * most};", "sorted[j].step, most};"),
        "what lies below": ("if (below < step)", "if (below <= step)"),
        "a stride of 0": ("r->shape[i] > 1 && r->strides[i] == 0)", "r->strides[i] == 0)"),
    },
    "array/equation": {
        "the table's pieces": (
            "reach += by;\n            int64_t some",
            "reach += by, piece++;\n            int64_t some",
        ),
        "the grid's remainder": ("if (rest > width)", "if (rest >= width)"),
        "whole: the divisor stays": ("e->whole[k] && same_gcd &&", "e->whole[k] &&"),
        "whole: no gap": ("step <= e->reach[k] + e->gcd[k];", "step <= e->reach[k] + 2 * e->gcd[k];"),
        "a sum's divisor": ("if (gcd > 1 && equation_remainder(r, gcd) != 0)", "if (false)"),
        "a window's end": ("fan_min(equation_quotient(r, step), e->t[k - 1].most)", "equation_quotient(r, step)"),
        "a window's last value": (
            "equation_quotient(last - first, jump) + 1;",
            "equation_quotient(last - first, jump);",
        ),
        "a window's first value": ("first += up;", "first += 1;"),
        "the table's words": ("from[(ptrdiff_t)i - 1] >> (64 - part);", "from[(ptrdiff_t)i] >> (64 - part);"),
        "the table's end": ("some = fan_min(reach / 64 + 1, words);", "some = fan_min(reach / 64, words);"),
        "the table's way back": ("        r -= x * t->step;\n    }\n    return FOUND;", "    }\n    return FOUND;"),
        "a sum seen from the other end": ("e->x[k] = e->t[k].most - e->x[k];", "(void)0;"),
        "each gives once": ("            e->x[k] -= x;\n", ""),
    },
    "array/overlap_list": {
        "the order of stretches": ("while (at < n && s[at - 1].from <= s[at].from);", "while (at < n);"),
        "an arc past the end": (
            "out[m++] = stretch_of(0, from + more - circle, run[i].index);",
            "(void)0;",
        ),
        "an arc's length": ("if (c->axes[k].step % g != 0)", "if (c->axes[k].step % g == 0)"),
        "stretches that have ended": ("if (s[j].to < s[i].from)", "if (s[j].to <= s[i].from)"),
        "each pair once": ("by_members(&w->pairs[kept - 1], &w->pairs[i]) != 0)", "true)"),
        "lists keep their tails": ("    if (open->tail == at)\n        open->tail = before;\n", ""),
        "members that have ended": (
            "        if (s[at].to < s[i].from) {\n            overlaps_leave",
            "        if (s[at].to <= s[i].from) {\n            overlaps_leave",
        ),
        "a sweep that gave up is not done": (
            "(int64_t)(i + ahead))\n            return FAN_OK;",
            "(int64_t)(i + ahead))\n            break;",
        ),
        "runs": ("end < n && s[end].from <= last;", "end < n && s[end].from < last;"),
        "a newcomer's component": (
            "    w->parent[fan_max(one, two)] = (uint32_t)fan_min(one, two);\n",
            "",
        ),
        "what covers has all bytes": ("room = b->axes[k].count - a->axes[i].count;", "(void)0;"),
        "what covers has all of the tooth": ("return i < 0 && offset + a->tooth <= b->tooth;", "return i < 0;"),
        "axes that what covers has not": ("return i < 0 && offset", "return offset"),
        "what is covered leaves, not what covers": (
            "        if (overlaps_covers(w, &s[i], &s[at]))\n",
            "        if (true)\n",
        ),
        "covered means covered": ("covered |= relation == COVERED;", "covered |= relation != APART;"),
        "all against those set aside": ("for (size_t j = 0; j < i; j++) {", "for (size_t j = 1; j < i; j++) {"),
        "those set aside are joined": ("FAN_TRY(overlaps_join(w, run[j].index, run[i].index, &v));", "(void)v;"),
        "the rest of a run": (
            "return sweep_runs(w, run, n - aside);",
            "return sweep_runs(w, run, n - aside - 1);",
        ),
        "the smaller number is the root": (
            "w->parent[fan_max(one, two)] = (uint32_t)fan_min(one, two);",
            "w->parent[fan_min(one, two)] = (uint32_t)fan_max(one, two);",
        ),
    },
    "array/layout": {
        "strides along an axis of extent 1": ("&& a->shape[i] > 1)", ")"),
        "clusters that touch": ("bytes = was->reach + 1;", "bytes = was->reach;"),
        "every array lies where it lay": (
            "if (!p->empty && start != (uintptr_t)clusters[p->cluster].data)",
            "if (!p->empty && start != (uintptr_t)clusters[p->cluster].data && i == 0)",
        ),
        "who is parted": ("if (all->label[*was] != all->label[i])", "if (false)"),
        "who lies elsewhere": ("if (moved(all, i, *was))", "if (false)"),
        "who has met": ("if (other_component(all, i, *is))", "if (false)"),
        "who may be written": ("if (!was->writable && is->writable)", "if (false)"),
    },
}


def quietly(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=emptied())
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def program(folder: Path, broken: str, text: str) -> Path:
    """tests/c/test_overlap.c with the rungs that it uses; the file `broken` with another text."""
    flags = tuple(support.c_flags())
    rungs = [p for rung in ("base", "array") for p in sorted((CSRC / rung).glob("**/*.c"))]
    objects = [support.object_of(p, flags) for p in (TEST_C / "test_overlap.c", *rungs) if p != CSRC / f"{broken}.c"]
    (folder / "broken.c").write_text(text)
    quietly([*compiler(), *flags, "-O1", "-w", "-c", str(folder / "broken.c"), "-o", str(folder / "broken.o")])
    quietly([*compiler(), *flags, *map(str, objects), str(folder / "broken.o"), "-lm", "-o", str(folder / "program")])
    return folder / "program"


def passes(path: Path, noun: str, size: str = "1") -> bool:
    """Whether the checks of a noun are content: a sample of them by this seed, or the "full" ones. No broken rule makes
    the program loop: there is no limit of time.
    """
    done = subprocess.run([str(path), size, noun], capture_output=True, text=True, env=emptied())
    return done.returncode == 0 and "ok " in done.stdout


def noun_of(file: str) -> str:
    """The checks of tests/c/test_overlap.c that a file answers to."""
    return {"equation": "overlap", "stretch": "overlap_list"}.get(Path(file).name, Path(file).name)


@pytest.mark.parametrize("file", every(len(MUTANTS), [*MUTANTS]))
def test_the_program_passes_without_a_planted_fault(file: str, tmp_path: Path) -> None:
    assert passes(program(tmp_path, file, (CSRC / f"{file}.c").read_text()), noun_of(file))


EVERY = [(file, rule) for file, rules in MUTANTS.items() for rule in rules]


def test_each_rule_is_in_its_file_once() -> None:
    missing = [
        (file, rule) for file, rule in EVERY if (CSRC / f"{file}.c").read_text().count(MUTANTS[file][rule][0]) != 1
    ]
    assert EVERY and not missing


@pytest.mark.parametrize(("file", "rule"), every(10, EVERY))
def test_a_broken_rule_is_found(file: str, rule: str, tmp_path: Path) -> None:
    text, (is_, broken) = (CSRC / f"{file}.c").read_text(), MUTANTS[file][rule]
    made = program(tmp_path, file, text.replace(is_, broken))
    assert not (passes(made, noun_of(file)) and passes(made, noun_of(file), "full"))
