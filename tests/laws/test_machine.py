"""A state machine: the core in C against the description in NumPy, step by step, to the last bit.

Both get the same calls. Both must raise the same type of error, or return the same: kind, dtype, shape, bits (of NaNs,
that it is one), and the very object that was added where it is handed through. What a caller holds must look the same
in both worlds after every step.

    FANIN_SEED=7 pytest tests/laws/test_machine.py      another seed; "random" draws one and prints it
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
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
from fanin import reference
from laws.worlds import KINDS, SHAPES, World, joined, recipes
from spec.kit import DTYPES, show

PLAIN = [i for i, d in enumerate(DTYPES) if d.kind in "buifc"]  # those that NumPy knows
RECORDED = ["dense"] * 6 + ["again", "none", "object", "wrong shape"]
PICKS = st.integers(0, 10**6)


class Twins(RuleBasedStateMachine):
    """Two buffers, two worlds. `candidate` is held against the reference; `seen` counts what happened."""

    candidate: Any = None
    seen: Counter[str] = Counter()

    @initialize(
        count=st.integers(1, 3),
        budget=st.sampled_from([0, 1, 24, 100, None, math.inf]),
        recording=st.integers(0, 11),
        seed=PICKS,
    )
    def begin(self, count: int, budget: Any, recording: int, seed: int) -> None:
        draw = random.Random(seed)
        self.recording = recording == 0
        self.shapes = [draw.choice(SHAPES) for _ in range(count)]
        few = draw.choice([1, 2, 2, 3, len(DTYPES)])
        self.dtypes = draw.sample(PLAIN if self.recording else range(len(DTYPES)), min(few, len(PLAIN)))
        self.keyed = [False] * count
        slots = [self.declared(shape, draw) for shape in self.shapes]
        wish = draw.choice([None] * 6 + ["float64", "float32"])
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
            accumulate=draw.choice([None] * 5 + ["float32", "float64", "int64", "float16"]),
            combine=joined if draw.random() < 0.1 else None,
        )

    def both(self, what: str, call: Any) -> tuple[Any, Any] | None:
        """call(buffer, world) on both; the results, or None where both raised the same."""
        outcomes = []
        for buffer, world in zip((self.ours, self.theirs), self.worlds, strict=True):
            try:
                outcomes.append((None, call(buffer, world)))
            except Exception as e:
                outcomes.append((e, None))
        (error, mine), (other, theirs) = outcomes
        assert type(error) is type(other), f"{what}: the reference: {error!r}; the candidate: {other!r}"
        self.seen[f"{what}: {type(error).__name__ if error else 'ok'}"] += 1
        return None if error else (mine, theirs)

    # Steps

    @rule(data=st.data(), slot=PICKS, flags=PICKS)
    def add(self, data: Any, slot: int, flags: int) -> None:
        slot %= len(self.ours)
        shape = self.shapes[slot]
        shapes = [shape] * 5
        if self.ours.slots[slot].shape is not None:
            shapes += [(2, *shape), tuple(3 if n == 1 else n for n in shape)]
        recipe = data.draw(recipes(RECORDED if self.recording else KINDS, self.dtypes, shapes))
        draw = random.Random(flags)
        donate = draw.random() < 0.25 and recipe.kind not in ("again", "sparse")
        copy = draw.random() < 0.1 and not donate
        keyed = self.keyed[slot] ^ (draw.random() < 0.01)
        key = draw.choice([0, 0, 1, 1, 2, 3, 4, 2**40, -1 if draw.random() < 0.2 else 5]) if keyed else None

        def call(buffer: Any, world: World) -> None:
            buffer.add(slot, world.make(recipe, donate), key=key, donate=donate, copy=copy)

        if self.both("add", call) is None and donate:
            for world in self.worlds:
                world.donated.discard(len(world.things) - 1)
        self.added += 1

    @rule(data=st.data(), slot=PICKS, seed=PICKS)
    def add_some(self, data: Any, slot: int, seed: int) -> None:
        for i in range(seed % 4 + 1):
            self.add(data, slot, seed + i)

    @precondition(lambda self: self.added)
    @rule(slot=PICKS)
    def look(self, slot: int) -> None:
        slot %= len(self.ours)
        found = self.both("look", lambda buffer, _: buffer[slot])
        if found:
            self.compare("look", [found[0]], [found[1]])

    @precondition(lambda self: self.added > 1)
    @rule(how=st.sampled_from(["plain"] * 6 + ["scale", "writable", "out", "out", "out and scale"]), seed=PICKS)
    def take(self, how: str, seed: int) -> None:
        scale = random.Random(seed).choice([1, 2, -1, 3.0, 0.5, 0.1, 1j, 2 + 1j, True, math.inf, 2**40])

        def call(buffer: Any, world: World) -> Any:
            outs = self.outs(world, random.Random(seed)) if "out" in how else None
            result = buffer.take(out=outs, scale=scale if "scale" in how else None, writable=how == "writable")
            assert outs is None or all(r is None or o is None or r is o for r, o in zip(result, outs, strict=True))
            return result

        found = self.both(f"take {how}", call)
        if found is None:
            return
        self.compare("take", *found)
        for mine, theirs in zip(*found, strict=True):
            if how == "plain":
                which = [w.which(x) for w, x in zip(self.worlds, (mine, theirs), strict=True)]
                assert which[0] == which[1], f"handed through: {which}"
                self.seen["take: handed through"] += which[0] is not None and which[0] not in self.worlds[0].donated
                self.seen["take: into a donated one"] += which[0] in self.worlds[0].donated
            if how == "writable" and isinstance(theirs, np.ndarray) and not isinstance(theirs, np.ma.MaskedArray):
                assert theirs.flags.writeable
            if isinstance(mine, np.ndarray) and mine.ndim and mine.strides[0] == 0 and mine.shape[0] > 1:
                self.seen["take: expanded"] += 1
        self.begin_pass(seed)

    @rule(what=st.sampled_from(["clear", "expect", "ready", "miss"]), slot=PICKS, n=st.integers(1, 12))
    def other(self, what: str, slot: int, n: int) -> None:
        slot %= len(self.ours)
        if what == "clear" and n == 1:
            self.both("clear", lambda buffer, _: buffer.clear())
            self.begin_pass(slot)
        elif what == "expect" and (n == 2 or self.ours.expected[slot]):
            came = len(self.ours.passes[slot].came)
            self.both("expect", lambda buffer, _: buffer.expect(slot, max(1, came - 1 + n % 3)))
        elif what == "ready":
            found = self.both("ready", lambda buffer, _: buffer.ready(slot))
            assert found is None or found[0] == found[1]
        elif what == "miss":
            self.both("miss", lambda buffer, _: buffer.add([-1, 3, 2**70][n % 3], 1.0))

    def begin_pass(self, seed: int) -> None:
        self.worlds = (World(), World())
        self.keyed = [random.Random(seed + i).random() < 0.5 for i in range(len(self.keyed))]
        self.added = 0

    # What is compared

    def outs(self, world: World, draw: random.Random) -> list[Any]:
        """One array a slot: fresh, or one that was added, or, rarely, what does not fit."""
        outs = []
        for shape in self.shapes:
            mine = [x for i, x in enumerate(world.things)
                    if isinstance(x, np.ndarray) and x.shape == shape and i not in world.donated]  # fmt: skip
            dtype = DTYPES[draw.choice([*self.dtypes, DTYPES.index(np.dtype(np.complex128)), DTYPES.index(np.dtype(np.float64))])]
            kind = draw.choice(["fresh", "fresh", "fresh", "added", "none", "wrong", "reversed"])
            if kind == "added" and mine:
                outs.append(draw.choice(mine))
            elif kind == "none":
                outs.append(None)
            elif kind == "wrong" and draw.random() < 0.3:
                outs.append(np.zeros((9, 9)))
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
            assert mine == theirs, "the candidate wrote into what its caller holds, or left undone what it should write"


SEED = os.environ.get("FANIN_SEED", "0")
QUICK = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def run(candidate: Any, seed: int, how: settings) -> Counter[str]:
    """Holds the candidate against the reference; what happened, counted."""
    machine: Any = type("Twins", (Twins,), {"candidate": staticmethod(candidate), "seen": Counter()})
    machine._hypothesis_internal_use_seed = seed
    run_state_machine_as_test(machine, settings=how)
    return machine.seen  # type: ignore[no-any-return]


#: what must have happened in a run of the usual size, or the machine has not tested it
HAPPENED = [
    *("add: ok", "add: ValueError", "add: TypeError", "add: BufferError", "look: ok", "clear: ok", "miss: IndexError"),
    *("take plain: ok", "take plain: ValueError", "take scale: ok", "take scale: ValueError", "take writable: ok"),
    *("take out: ok", "take out: ValueError", "take out: BufferError", "take out and scale: ok", "take scale: TypeError"),
    *("expect: ok", "expect: ValueError", "ready: ok", "ready: ValueError"),
    *(f"{what}: {kind}" for what in ("take", "look") for kind in ("array", "sparse", "zero", "object", "undefined")),
    *("take: NumPy scalar", "take: Python", "take: handed through", "take: into a donated one", "take: expanded"),
]


def happened(seen: Counter[str]) -> None:
    missing = [what for what in HAPPENED if not seen[what]]
    assert not missing, f"never happened: {missing}; {dict(seen)}"


@pytest.mark.core
@pytest.mark.rule("A1", "A2", "A5", "A6", "A7", "A8", "A9", "A10", "A11", "A13", "A14", "A15", "A16")
def test_the_core_does_what_the_description_says() -> None:
    seed = random.SystemRandom().randrange(2**32) if SEED == "random" else int(SEED)
    print(f"FANIN_SEED={seed}")
    seen = run(fanin.InputBuffer, seed, QUICK)
    happened(seen)
    print(dict(sorted(seen.items())))


@pytest.mark.slow
def test_the_core_does_what_the_description_says_for_long() -> None:
    seed = random.SystemRandom().randrange(2**32) if SEED in ("random", "0") else int(SEED)
    print(f"FANIN_SEED={seed}")
    happened(run(fanin.InputBuffer, seed, settings(QUICK, max_examples=20_000)))


# The machine itself


def test_the_description_does_what_it_says() -> None:
    """Against itself nothing differs, and everything that should happen does."""
    happened(run(reference.InputBuffer, 0, settings(QUICK, max_examples=120)))
