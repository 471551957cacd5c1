"""A state machine: the core in C against the description in NumPy, step by step, to the last bit.

Both get the same calls. Both must raise the same type of error, or return the same: kind, dtype, shape, bits (of NaNs,
that it is one), and the very object that was added where it is handed through. The caller's arrays must be equal
in both worlds after every step.

    FANIN_SEED=7 pytest tests/laws/test_machine.py      another seed; "random" draws one and prints it
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import fanin
from kit.recipes import KINDS, SCALARS, SHAPES, Given, joined, recipe
from kit.sample import sizes
from kit.values import DTYPES, LOW, bits, show
from reference import buffer as reference
from reference import numbers as reference_numbers

PLAIN = [i for i, d in enumerate(DTYPES) if d.kind in "buifc"]  # those of NumPy itself
HOWS = ["plain"] * 6 + ["scale", "writable", "out", "out", "out and scale"]
RECORDED = ["dense"] * 6 + ["none", "object"]
PICKS = st.binary(min_size=8, max_size=8).map(lambda b: int.from_bytes(b, "little"))  # even, unlike integers()


def castable(old: Any, new: Any) -> bool:
    order = reference.ORDER
    return order.index(reference.kind(old)) <= order.index(reference.kind(new))


class BufferPair(RuleBasedStateMachine):
    """Two buffers, two worlds. `candidate` is compared with the reference; `seen` counts the outcomes."""

    candidate: Any = None
    seen: Counter[str] = Counter()
    report: Any = staticmethod(note)

    @initialize(
        count=st.integers(1, 3),
        budget=st.sampled_from([0, 1, 24, 100, None, math.inf]),
        recording=st.integers(0, 11),
        seed=PICKS,
    )
    def begin(self, count: int, budget: Any, recording: int, seed: int) -> None:
        draw = random.Random(seed)
        self.recording, self.eager = recording == 0, budget not in (None, math.inf)
        self.shapes = [draw.choice(SHAPES) for _ in range(count)]
        few = draw.choice([1, 2, 2, 3, len(DTYPES)])
        self.dtypes = draw.sample(PLAIN if self.recording else range(len(DTYPES)), min(few, len(PLAIN)))
        if draw.random() < 0.2 and not self.recording:
            self.dtypes = [DTYPES.index(np.dtype(np.float64)), DTYPES.index(draw.choice(LOW))]
        self.keyed = [False] * count
        self.steps = 0
        slots = [self.declared(shape, draw) for shape in self.shapes]
        wish = draw.choice([None] * 12 + ["float64", "float32"])
        try:
            self.ours = reference.InputBuffer(slots, budget=budget, accumulate=wish, create_graph=self.recording)
        except ValueError:
            slots, wish = [fanin.Slot() for _ in slots], None
            self.ours = reference.InputBuffer(slots, budget=budget, create_graph=self.recording)
        self.theirs = self.candidate(slots, budget=budget, accumulate=wish, create_graph=self.recording)
        self.begin_pass(seed)

    def declared(self, shape: tuple[int, ...], draw: random.Random) -> Any:
        if self.recording:
            return fanin.Slot()
        return fanin.Slot(
            shape=draw.choice([None, None, shape]),
            dtype=draw.choice([None, None, DTYPES[draw.choice(self.dtypes)]]),
            accumulate=draw.choice([None] * 20 + ["float32", "float64", "int64", "float16"]),
            combine=joined if draw.random() < 0.1 else None,
        )

    def both(self, what: str, call: Any) -> tuple[Any, Any] | None:
        """call(buffer, world) on both; the results, or None where both raised the same."""
        outcomes = []
        for buffer, world in zip((self.ours, self.theirs), self.worlds, strict=True):
            try:
                with np.errstate(all="ignore"):
                    outcomes.append((None, call(buffer, world)))
            except Exception as e:
                outcomes.append((e, None))
        (error, mine), (other, theirs) = outcomes
        assert type(error) is type(other), f"{what}: the reference: {error!r}; the candidate: {other!r}"
        self.seen[f"{what}: {type(error).__name__ if error else 'ok'}"] += 1
        return None if error else (mine, theirs)

    # Steps

    @rule(slot=PICKS, seed=PICKS)
    def add(self, slot: int, seed: int) -> None:
        slot %= len(self.ours)
        self.steps += 1
        draw = random.Random(seed + self.steps)
        declared, came = self.ours.slots[slot], self.ours.passes[slot].came
        shape, dtypes = self.shapes[slot], self.dtypes
        shapes = [shape] * 5
        if declared.shape is not None:
            shapes += [(2, *shape), tuple(3 if n == 1 else n for n in shape)]
        if declared.dtype is not None and draw.random() < 0.9:
            dtypes = [i for i in dtypes if castable(DTYPES[i], declared.dtype)] or dtypes
        kinds = RECORDED if self.recording else KINDS if shape else SCALARS
        made = recipe(kinds, dtypes, shapes, draw)
        donate = draw.random() < 0.25 and made.kind not in ("again", "sparse") and made.layout != "subclass"
        if made.kind == "fraction" and self.eager:
            made = replace(
                made, kind="object"
            )  # a Fraction has no sum with an array: the time of the error is left open
        copy = draw.random() < 0.1 and not donate and not self.recording
        fresh = [k for k in (0, 1, 2, 3, 4, 5, 2**40) if k not in came]
        keyed = self.keyed[slot] ^ (draw.random() < 0.02)
        key = draw.choice(fresh[:3] * 9 + [1, 5]) if keyed else None
        if draw.random() < 0.01:  # one thing wrong at a time: which is found first is left open
            key, made = -1, replace(made, kind="dense", shape=shape)
        self.report(f"slot {slot}, key {key}, {made}{', donated' * donate}{', copied' * copy}")

        gradients = {id(world): world.make(made, donate) for world in self.worlds}

        def call(buffer: Any, world: Given) -> None:
            buffer.add(slot, gradients[id(world)], key=key, donate=donate, copy=copy)

        if self.both("add", call) is None and donate:
            for world in self.worlds:
                world.donated.discard(len(world.things) - 1)
        self.added += 1

    @rule(slot=PICKS, seed=PICKS)
    def add_some(self, slot: int, seed: int) -> None:
        for i in range(seed % 4 + 1):
            self.add(slot, seed + i)

    @precondition(lambda self: self.added)
    @rule(slot=PICKS)
    def look(self, slot: int) -> None:
        slot %= len(self.ours)
        found = self.both("look", lambda buffer, _: buffer[slot])
        if found:
            self.compare("look", [found[0]], [found[1]])

    @precondition(lambda self: self.added > 1)
    @rule(how=st.sampled_from(HOWS), seed=PICKS)
    def take(self, how: str, seed: int) -> None:
        self.steps += 1
        seed += self.steps
        scale = random.Random(seed).choice([1, 2, -1, 3.0, 0.5, 0.1, 1j, 2 + 1j, True, math.inf, 2**40])

        given = {id(w): self.outs(w, random.Random(seed)) if "out" in how else None for w in self.worlds}

        def call(buffer: Any, world: Given) -> Any:
            outs = given[id(world)]
            result = buffer.take(out=outs, scale=scale if "scale" in how else None, writable=how == "writable")
            assert outs is None or all(r is None or o is None or r is o for r, o in zip(result, outs, strict=True))
            return result

        gaps = [sorted(p.came) != list(range(len(p.came))) for p in self.ours.passes]
        found = self.both(f"take {how}", call)
        if found is None:
            return
        self.compare("take", *found)
        for mine, theirs, gap in zip(*found, gaps, strict=True):
            if how == "plain":
                which = [w.which(x) for w, x in zip(self.worlds, (mine, theirs), strict=True)]
                donated = self.worlds[0].donated  # a sum may be in the memory of any of these (A3, A6)
                free = which[1] in donated or (gap and which[0] in donated)
                assert free or which[0] == which[1], f"handed through: {which}"
                self.seen["take: handed through"] += which[0] is not None and which[0] not in self.worlds[0].donated
                self.seen["take: into a donated one"] += which[0] in self.worlds[0].donated
            if (
                how == "writable"
                and not self.recording
                and isinstance(theirs, np.ndarray)
                and not isinstance(theirs, np.ma.MaskedArray)
            ):
                assert theirs.flags.writeable
            if isinstance(mine, np.ndarray) and mine.ndim and mine.strides[0] == 0 and mine.shape[0] > 1:
                self.seen["take: expanded"] += 1
        self.begin_pass(seed)

    @precondition(lambda self: self.added > 1)
    @rule(slot=PICKS, how=st.sampled_from(HOWS), seed=PICKS)
    def take_one(self, slot: int, how: str, seed: int) -> None:
        """Of one slot; the others stay as they are."""
        self.steps += 1
        slot, seed = slot % len(self.ours), seed + self.steps
        scale = random.Random(seed).choice([1, 2, -1, 3.0, 0.5, 1j, True])
        given = {id(w): self.outs(w, random.Random(seed))[slot] if "out" in how else None for w in self.worlds}
        count = [len(p.came) for p in self.ours.passes]

        def call(buffer: Any, world: Given) -> Any:
            return buffer.take(
                slot=slot, out=given[id(world)], scale=scale if "scale" in how else None, writable=how == "writable"
            )

        found = self.both(f"take one {how}", call)
        if found is None:
            return
        self.compare("take one", [found[0]], [found[1]])
        assert [len(p.came) for p in self.ours.passes] == [n * (i != slot) for i, n in enumerate(count)]
        self.keyed[slot] = random.Random(seed).random() < 0.5

    @rule(what=st.sampled_from(["clear", "expect", "ready", "miss"]), slot=PICKS, n=st.integers(1, 12))
    def other(self, what: str, slot: int, n: int) -> None:
        slot %= len(self.ours)
        if what == "clear" and n == 1:
            self.both("clear", lambda buffer, _: buffer.clear())
            self.begin_pass(slot)
        elif what == "expect" and (n == 2 or self.ours.expected[slot]):
            self.steps += 1
            due = len(self.ours.passes[slot].came) + (self.steps + n) % 4 - 1
            self.both("expect", lambda buffer, _: buffer.expect(slot, due or 1))
        elif what == "ready":
            found = self.both("ready", lambda buffer, _: buffer.ready(slot))
            assert found is None or found[0] == found[1]
        elif what == "miss":
            self.both("miss", lambda buffer, _: buffer.add([-1, 3, 2**70][n % 3], 1.0))

    def begin_pass(self, seed: int) -> None:
        self.worlds = (Given(), Given())
        self.keyed = [random.Random(seed + i).random() < 0.5 for i in range(len(self.keyed))]
        self.added = 0

    # What is compared

    def outs(self, world: Given, draw: random.Random) -> list[Any]:
        """One array a slot: fresh, or one that was added, or, rarely, what does not fit."""
        outs = []
        for shape in self.shapes:
            mine = [x for i, x in enumerate(world.things)
                    if isinstance(x, np.ndarray) and x.shape == shape and i not in world.donated]  # fmt: skip
            dtype = DTYPES[
                draw.choice([*self.dtypes, DTYPES.index(np.dtype(np.complex128)), DTYPES.index(np.dtype(np.float64))])
            ]
            kind = draw.choice(["fresh", "fresh", "fresh", "added", "none", "wrong", "reversed"])
            if kind == "added" and mine:
                outs.append(draw.choice(mine))
            elif kind == "none":
                outs.append(None)
            elif kind == "wrong" and draw.random() < 0.5:
                outs.append(draw.choice([np.zeros((9, 9)), np.broadcast_to(np.zeros(()), shape), [0.0]]))
            else:
                x = np.zeros(shape, dtype)
                outs.append(x[::-1] if kind == "reversed" and x.ndim else x)
        return outs

    def compare(self, what: str, mine: list[Any], theirs: list[Any]) -> None:
        assert type(mine) is type(theirs)
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            assert show(x) == show(y), f"{what}: the reference: {x!r}; the candidate: {y!r}"
            self.seen[f"{what}: {show(x)[0]}"] += 1

    @invariant()
    def memory_is_the_same_in_both_worlds(self) -> None:
        if hasattr(self, "worlds"):
            mine, theirs = (w.image() for w in self.worlds)
            if mine != theirs:  # a NaN may have another sign
                mine, theirs = ([bits(x) for x in w.memory] for w in self.worlds)
            assert mine == theirs, "the candidate wrote into what its caller holds, or left undone what it should write"


SEED = os.environ.get("FANIN_SEED", "0")
QUICK = settings(
    max_examples=260,
    stateful_step_count=50,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def run(candidate: Any, seed: int, how: settings) -> Counter[str]:
    """Holds the candidate against the reference; what happened, counted."""
    machine: Any = type("BufferPair", (BufferPair,), {"candidate": staticmethod(candidate), "seen": Counter()})
    machine._hypothesis_internal_use_seed = seed
    run_state_machine_as_test(machine, settings=how)
    return machine.seen  # type: ignore[no-any-return]


#: This many programs meet everything in HAPPENED, and find each planted fault.
SAMPLE = 100


def drive(candidate: Any, seed: int, examples: int = SAMPLE, first: int = 0, steps: int = 50) -> Counter[str]:
    """The same without hypothesis: ten times as fast, evenly spread, and nothing is made smaller.

    `first`: the example that is run before those ahead of it.
    """
    machine: Any = type("BufferPair", (BufferPair,), {"candidate": staticmethod(candidate), "seen": Counter()})
    for example in [*range(first, examples), *range(first)]:
        draw, said = random.Random(f"{seed} {example}"), []
        pair = machine()
        pair.report = said.append
        try:
            budget = draw.choice([0, 1, 24, 100, None, math.inf])
            pair.begin(
                count=draw.randint(1, 3), budget=budget, recording=draw.randrange(12), seed=draw.randrange(2**60)
            )
            for _ in range(steps):
                step(pair, draw)
                pair.memory_is_the_same_in_both_worlds()
        except AssertionError as e:
            e.add_note(f"drive(seed={seed}), example {example}:\n  " + "\n  ".join(map(str, said)))
            raise
    return machine.seen  # type: ignore[no-any-return]


def step(pair: Any, draw: random.Random) -> None:
    what = draw.choice(["add"] * 4 + ["some", "look", "take", "one", "other"])
    slot, seed = draw.randrange(3), draw.randrange(2**60)
    if what == "take":
        pair.take(how=draw.choice(HOWS), seed=seed)
    elif what == "one" and pair.added > 1:
        pair.take_one(slot=slot, how=draw.choice(HOWS), seed=seed)
    elif what == "look":
        pair.look(slot=slot)
    elif what == "other":
        pair.other(what=draw.choice(["clear", "expect", "ready", "miss"]), slot=slot, n=draw.randint(1, 12))
    else:
        (pair.add if what == "add" else pair.add_some)(slot=slot, seed=seed)


#: what must have happened in a run of the usual size, or the machine has not tested it
HAPPENED = [
    *("add: ok", "add: ValueError", "add: TypeError", "add: DTypeError", "look: ok", "clear: ok", "miss: IndexError"),
    *("take plain: ok", "take scale: ok", "take scale: ValueError", "take writable: ok"),
    *(
        "take out: ok",
        "take out: ValueError",
        "take out: BufferError",
        "take out and scale: ok",
        "take scale: TypeError",
    ),
    *(
        "take one plain: ok",
        "take one scale: ok",
        "take one writable: ok",
        "take one out: ok",
        "take one out: ValueError",
        "take one out: BufferError",
    ),
    *("take one: array", "take one: sparse", "take one: object", "take one: undefined"),
    *("expect: ok", "expect: ValueError", "ready: ok", "ready: ValueError"),
    *(f"{what}: {kind}" for what in ("take", "look") for kind in ("array", "sparse", "zero", "object", "undefined")),
    *("take: NumPy scalar", "take: Python", "take: handed through", "take: into a donated one", "take: expanded"),
]


#: .. and what Hypothesis, which makes fewer programs, need not meet: each has one that it meets beside it
SELDOM = ("take out: BufferError",)


def happened(seen: Counter[str], seldom: Sequence[str] = ()) -> None:
    missing = [what for what in HAPPENED if not seen[what] and what not in seldom]
    assert not missing, f"never happened: {missing}; {dict(seen)}"


@pytest.mark.core
@pytest.mark.rule("A1", "A2", "A5", "A6", "A7", "A8", "A9", "A10", "A11", "A13", "A14", "A15", "A16")
@pytest.mark.parametrize("by", sizes("draws", "hypothesis"))
def test_the_core_matches_the_description(by: str) -> None:
    seed = random.SystemRandom().randrange(2**32) if SEED == "random" else int(SEED)
    print(f"FANIN_SEED={seed}")
    if by == "draws":
        seen = drive(fanin.InputBuffer, seed)
        happened(seen)
    else:
        seen = run(fanin.InputBuffer, seed, QUICK)
        happened(seen, SELDOM)
    print(dict(sorted(seen.items())))


@pytest.mark.slow
def test_the_core_matches_the_description_in_long_programs() -> None:
    seed = random.SystemRandom().randrange(2**32) if SEED in ("random", "0") else int(SEED)
    print(f"FANIN_SEED={seed}")
    happened(run(fanin.InputBuffer, seed, settings(QUICK, max_examples=20_000, deadline=None)))


# The machine itself: it finds what is planted


def copy_of(module: ModuleType, name: str) -> Any:
    """Another copy of a module; while it is made it is sys.modules[name]."""
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def copy_of_reference(fault: Callable[[Any], None]) -> Any:
    """InputBuffer of another copy of the description, with a fault."""
    try:
        numbers = copy_of(reference_numbers, "reference.numbers")
        module = copy_of(reference, "faulty")
    finally:
        sys.modules["reference.numbers"] = reference_numbers
        sys.modules.pop("faulty", None)
    module.numbers = numbers
    fault(module)
    return module.InputBuffer


def replace_number(m: Any, name: str, new: Any) -> None:
    """Replaces a function of the module `numbers` for all its callers."""
    for place in (m, m.numbers):
        if hasattr(place, name):
            setattr(place, name, new)


def wrap(owner: Any, name: str, how: Callable[..., Any]) -> None:
    """owner.name becomes how(its old self, ...)."""
    old = getattr(owner, name)

    def new(*a: Any, **k: Any) -> Any:
        return how(old, *a, **k)

    (replace_number if hasattr(owner, "numbers") else setattr)(owner, name, new)


def sums_the_last_two_first(m: Any) -> None:
    def whole(me: Any) -> Any:
        terms = me.parked()
        return functools.reduce(m.Sum.plus, [*terms[:-2], *terms[:-3:-1]], me.total)

    m.Pass.whole = whole


def sums_in_order_of_arrival(m: Any) -> None:
    m.Pass.parked = lambda me: [g for k, g in me.came.items() if k >= me.due]


def loses_the_fourth(m: Any) -> None:
    wrap(m.Pass, "parked", lambda old, me: [g for i, g in enumerate(old(me)) if i != 3])


def rounds_at_each_add(m: Any) -> None:
    wrap(m, "accumulation", lambda old, dtype, wish: dtype if wish is None else old(dtype, wish))


def rounds_twice(m: Any) -> None:
    replace_number(m, "to_odd", lambda x: x.astype(np.float32))


def widens_too_early(m: Any) -> None:
    def whole(me: Any) -> Any:
        types = frozenset(me.types())
        wide = {t: m.promotion(types) for t in types}
        terms = [replace(g, value=m.rounded(g.value, wide[g.type])) if g.form == "dense" else g for g in me.parked()]
        return functools.reduce(m.Sum.plus, terms, me.total)

    m.Pass.whole = whole


def writes_into_what_is_held(m: Any) -> None:
    def place(me: Any) -> Any:
        mine = replace(me.terms[0], donated=True) if me.terms else None
        return old(replace(me, terms=(mine, *me.terms[1:]))) if mine else None

    old = m.Sum.place
    m.Sum.place = place


def copies_what_it_should_hand_through(m: Any) -> None:
    wrap(m.Sum, "result", lambda old, me, scale=None, own=False: old(me, scale, True))


def lends_its_memory_to_a_snapshot(m: Any) -> None:
    wrap(m.Sum, "result", lambda old, me, scale=None, own=False: old(me, scale, False))


def forgets_keys(m: Any) -> None:
    m.InputBuffer._number = lambda self, i, key: len(self.passes[i].came) if key is None else key


def expects_nothing(m: Any) -> None:
    m.InputBuffer.expect = lambda self, slot, n: None


def keeps_a_slot_after_take(m: Any) -> None:
    def take(old: Any, self: Any, *a: Any, **k: Any) -> Any:
        before = self.passes[-1]
        result = old(self, *a, **k)
        if len(self.passes) > 1:
            self.passes[-1] = before
        return result

    wrap(m.InputBuffer, "take", take)


def adds_to_zero_first(m: Any) -> None:
    wrap(m, "plus", lambda old, a, b: old(old(np.zeros_like(a), a), b))


def loses_duplicates(m: Any) -> None:
    def put_plus(into: Any, index: Any, values: Any) -> None:
        into[index] = m.plus(into[index], values)

    replace_number(m, "put_plus", put_plus)


def adds_zeros_where_nothing_is_stored(m: Any) -> None:
    m.numbers.Entries.before = lambda me, dense: m.plus(me.filled(dense.shape), dense)


def scales_after_rounding(m: Any) -> None:
    def finished(old: Any, me: Any, scale: Any = None, into: Any = None) -> Any:
        value = old(me, None, into)
        return value if scale is None or me.form != "dense" else m.rounded(m.scaled(value, scale), value.dtype)

    wrap(m.Sum, "finished", finished)


def rounds_on_the_way_to_out(m: Any) -> None:
    def finished(old: Any, me: Any, scale: Any = None, into: Any = None) -> Any:
        return (
            m.rounded(old(me, scale), into.dtype) if into is not None and me.form == "dense" else old(me, scale, into)
        )

    wrap(m.Sum, "finished", finished)


def takes_scalars_for_float64(m: Any) -> None:
    wrap(m, "promotion", lambda old, types: old({m.WEAK.get(t, t) for t in types}))


def promotes_two_by_two(m: Any) -> None:
    wrap(
        m,
        "promotion",
        lambda old, types: functools.reduce(lambda a, b: old({a.name, b}), sorted(types)[1:], old(sorted(types)[:1])),
    )


def broadcasts_in_silence(m: Any) -> None:
    def fitted(old: Any, g: Any, slot: Any, shape: Any) -> Any:
        if g.form == "dense" and shape is not None and g.shape == () != shape:
            g = replace(g, shape=shape, value=np.broadcast_to(g.value, shape))
        return old(g, slot, shape)

    wrap(m, "fitted", fitted)


def raises_the_wrong_error(m: Any) -> None:
    def importable(old: Any, dtype: Any) -> Any:
        try:
            return old(dtype)
        except BufferError as e:
            raise ValueError(str(e)) from e

    wrap(m, "importable", importable)


def leaves_traces_of_a_failed_add(m: Any) -> None:
    def number(old: Any, self: Any, i: int, key: Any) -> Any:
        self.passes[i].keyed = key is not None
        return old(self, i, key)

    wrap(m.InputBuffer, "_number", number)


FAULTS = [
    sums_the_last_two_first,
    sums_in_order_of_arrival,
    loses_the_fourth,
    rounds_at_each_add,
    rounds_twice,
    widens_too_early,
    writes_into_what_is_held,
    copies_what_it_should_hand_through,
    lends_its_memory_to_a_snapshot,
    forgets_keys,
    expects_nothing,
    keeps_a_slot_after_take,
    adds_to_zero_first,
    loses_duplicates,
    adds_zeros_where_nothing_is_stored,
    scales_after_rounding,
    rounds_on_the_way_to_out,
    takes_scalars_for_float64,
    promotes_two_by_two,
    broadcasts_in_silence,
    raises_the_wrong_error,
    leaves_traces_of_a_failed_add,
]


#: Where those are found that few programs find.
FIRST = {
    rounds_twice: 50,
    widens_too_early: 14,
    adds_to_zero_first: 60,
    adds_zeros_where_nothing_is_stored: 40,
    scales_after_rounding: 37,
    rounds_on_the_way_to_out: 14,
    broadcasts_in_silence: 10,
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_found(fault: Callable[[Any], None]) -> None:
    candidate = copy_of_reference(fault)
    with pytest.raises(AssertionError):
        drive(candidate, seed=2, first=FIRST.get(fault, 0))


@pytest.mark.full
def test_the_description_agrees_with_itself_and_meets_every_case() -> None:
    """Against itself nothing differs, and everything that should happen does."""
    happened(drive(copy_of_reference(lambda m: None), seed=1, examples=200))
