"""Rules A as a table: every pair of forms, every set of facts, every set of dtypes; Python and C, and rows by hand."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from kit.inside import inside
from kit.values import DTYPES, FLOATS, LOW
from reference import buffer as reference
from reference.buffer import AccumPlan, Side

pytestmark = pytest.mark.core

NAMES = [d.name for d in DTYPES]
FORMATS = ("coo", "csr", "csc", "bsr", "bsc")
SIDES = [
    Side("undefined"),
    Side("zero"),
    Side("dense"),
    Side("dense", reusable=True),
    *(Side("sparse", f) for f in FORMATS),
    Side("object"),
]


def accum_in_c(old: Side, new: Side, recording: bool = False) -> AccumPlan:
    return AccumPlan(**inside().rules_accum(tuple(old), tuple(new), recording))


@pytest.fixture(params=["page", "C"])
def accum(request: pytest.FixtureRequest) -> Any:
    return reference.accum if request.param == "page" else accum_in_c


DENSE, MINE, COO, CSR = Side("dense"), Side("dense", reusable=True), Side("sparse", "coo"), Side("sparse", "csr")
ZERO, NOTHING, OBJECT = Side("zero"), Side("undefined"), Side("object")


@pytest.mark.parametrize(
    ("rule", "old", "new", "recording", "action", "result"),
    [
        pytest.param(rule, *row, marks=pytest.mark.rule(*([rule] if rule else [])))
        for rule, *row in [
            ("A1", DENSE, DENSE, True, "object", "object"),
            ("A1", MINE, COO, True, "object", "object"),
            ("A2", MINE, ZERO, False, "skip", "dense"),
            ("A2", COO, ZERO, False, "skip", "sparse"),
            ("A2", OBJECT, ZERO, False, "skip", "object"),
            ("A2", ZERO, ZERO, True, "skip", "zero"),
            ("A2", ZERO, DENSE, False, "hand", "dense"),
            ("A2", ZERO, OBJECT, True, "hand", "object"),
            ("A3", COO, MINE, False, "into new", "dense"),
            ("A4", CSR, DENSE, False, "fresh", "dense"),
            ("A5", CSR, CSR, False, "merge", "sparse"),
            ("A5", COO, COO, False, "merge", "sparse"),
            ("A6", MINE, DENSE, False, "into old", "dense"),
            ("A6", MINE, CSR, False, "into old", "dense"),
            ("A7", DENSE, MINE, False, "fresh", "dense"),
            ("A7", DENSE, COO, False, "fresh", "dense"),
            ("A7", COO, CSR, False, "merge coo", "sparse"),
            ("A8", DENSE, OBJECT, False, "object", "object"),
            ("A8", OBJECT, CSR, False, "object", "object"),
            ("S2", MINE, NOTHING, False, "skip", "dense"),
            ("S2", NOTHING, NOTHING, True, "skip", "undefined"),
            ("", NOTHING, OBJECT, True, "hand", "object"),
            ("", NOTHING, ZERO, False, "hand", "zero"),
        ]
    ],
)
def test_the_sum_of_each_pair_of_kinds(
    accum: Any, rule: str, old: Side, new: Side, recording: bool, action: str, result: str
) -> None:
    assert accum(old, new, recording) == AccumPlan(action, result, frozenset({rule} - {""}))


@pytest.mark.rule("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8")
def test_every_pair_of_kinds_is_decided_in_c_as_on_the_page() -> None:
    table = {key: reference.accum(*key) for key in product(SIDES, SIDES, (False, True))}
    assert {key: accum_in_c(*key) for key in table} == table
    decided = {rule for plan in table.values() for rule in plan.rules}
    assert decided == {"S2", *(f"A{n}" for n in range(1, 9))}


@pytest.mark.rule("A3", "A6")
def test_memory_is_written_only_where_every_fact_allows_it() -> None:
    facts = (
        "dense",
        "writable",
        "same_dtype",
        "disjoint",
        "ours",
        "exposed",
        "donated",
        "unshared",
        "host",
        "exclusive",
        "read_later",
    )
    written = 0
    for values in product((False, True), repeat=len(facts)):
        f = dict(zip(facts, values, strict=True))
        alone = (f["ours"] and not f["exposed"]) or f["donated"] or (f["unshared"] and f["host"])
        plain = f["dense"] and f["writable"] and f["same_dtype"] and f["disjoint"]
        reusable = plain and alone and (f["host"] or f["exclusive"]) and not f["read_later"]
        assert (inside().rules_reusable(**f) == "it is reusable") == reusable, f
        written += reusable
    assert written == 36, "of 2048"


# dtypes


def promoted_in_c(names: Any) -> str | None:
    return inside().rules_promote(tuple(names))  # type: ignore[no-any-return]


def promoted(names: Any) -> str | None:
    try:
        return reference.promotion(set(names)).name
    except ValueError:
        return None


@pytest.fixture(params=["page", "C"])
def promote(request: pytest.FixtureRequest) -> Any:
    return promoted if request.param == "page" else promoted_in_c


@pytest.mark.rule("A10")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bfloat16", "float16"], "float32"),
        (["bfloat16", "int64"], "bfloat16"),
        (["float8_e5m2", "uint8", "bool"], "float8_e5m2"),
        (["float8_e5m2", "bfloat16"], "bfloat16"),
        (["float8_e4m3fn", "float16"], "float16"),
        (["float8_e4m3fn", "float8_e5m2"], None),
        (["float8_e4m3fn", "float64", "float8_e5m2"], None),
        (["bfloat16", "complex64"], "complex64"),
        (["bfloat16", "float16", "float8_e5m2"], "float32"),
        (["int8", "uint8", "float16"], "float16"),  # of all at once: int8 with uint8 alone is int16
        (["int16", "uint16", "float32"], "float32"),
        (["uint64", "int64"], "float64"),
        (["int32", "float16"], "float64"),
        (["int"], "int64"),
        (["int", "bool"], "int64"),
        (["int", "uint8"], "uint8"),
        (["float", "int8"], "float64"),
        (["float", "float16"], "float16"),
        (["float", "float8_e5m2"], "float8_e5m2"),
        (["complex", "float32"], "complex64"),
        (["complex", "bfloat16"], "complex64"),
        (["complex", "float64"], "complex128"),
        (["complex", "int8"], "complex128"),
        (["int", "float", "complex"], "complex128"),
    ],
)
def test_dtypes_are_promoted_all_at_once(promote: Any, names: list[str], expected: str | None) -> None:
    assert promote(names) == expected
    assert promote(names[::-1]) == expected


@pytest.mark.rule("A10")
def test_promotion_of_numpys_dtypes_is_numpys() -> None:
    if not np.__version__.startswith("1."):
        weak: dict[str, Any] = {"int": 1, "float": 1.0, "complex": 1j}
        plain = [n for n in NAMES if n not in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]
        for k, w in product((1, 2, 3), (0, 1, 2)):
            for names, scalars in product(combinations(plain, k), combinations(weak, w)):
                expected = np.result_type(*map(np.dtype, names), *(weak[s] for s in scalars))
                assert promoted((*names, *scalars)) == expected.name, (names, scalars)


@pytest.mark.rule("A10")
def test_every_promotion_is_decided_in_c_as_on_the_page() -> None:
    weak = [w for k in range(4) for w in combinations(("int", "float", "complex"), k)]
    none = 0
    for k in range(4):
        for names, w in product(combinations(NAMES, k), weak):
            if names or w:
                assert promoted_in_c((*names, *w)) == promoted((*names, *w)), (names, w)
                none += promoted((*names, *w)) is None
    assert none == 8 * (1 + 15), "two kinds of float8, alone and with one more"
    draw = random.Random(20)
    for _ in range(3000):
        names = tuple(draw.sample(NAMES, draw.randint(4, 17)))
        w = draw.choice(weak)
        assert promoted_in_c((*names, *w)) == promoted((*names, *w)), (names, w)


@pytest.mark.rule("A11")
def test_every_accumulation_dtype_is_decided_in_c_as_on_the_page() -> None:
    def page(dtype: str, wish: str | None) -> str | None:
        sum_, into = reference.dtype_of(dtype), None if wish is None else reference.dtype_of(wish)
        try:
            return reference.accumulation(sum_, into).name
        except ValueError:
            return None

    table = {key: page(*key) for key in product(NAMES, (None, *NAMES))}
    assert {key: inside().rules_accum_dtype(*key) for key in table} == table
    assert all(table[d.name, None] == ("float32" if d in LOW else d.name) for d in DTYPES)
    assert all(table[d.name, "float64"] == "float64" for d in FLOATS)
    assert table["float64", "float32"] is None, "it could not hold the sum"
    assert table["int8", "float32"] is table["bool", "int8"] is None, "there is no way back"
    assert table["float16", "float16"] == "float16"


@pytest.mark.rule("A9")
def test_every_fit_of_shapes_is_decided_in_c_as_numpy_broadcasts() -> None:
    shapes = [s for n in range(4) for s in product((0, 1, 2, 3), repeat=n)]
    answers = {"exact": 0, "reduce": 0, "no": 0}
    for slot, shape in product(shapes, repeat=2):
        try:
            broadcasts = np.broadcast_shapes(slot, shape) == shape
        except ValueError:
            broadcasts = False
        expected = "exact" if slot == shape else "reduce" if broadcasts else "no"
        assert inside().rules_fit(True, slot, shape) == expected, (slot, shape)
        assert inside().rules_fit(False, slot, shape) == ("exact" if slot == shape else "no"), (slot, shape)
        answers[expected] += 1
    assert min(answers.values()) > 80, answers
