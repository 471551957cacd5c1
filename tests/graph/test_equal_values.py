"""Values that are equal and not the same, as arguments that are part of a recording: each has recordings of its own, in
a graph tree and in a step of tape.compiled.
"""

from __future__ import annotations

import datetime
import random
import struct
import zlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import tape
from kit.sample import sizes

pytestmark = pytest.mark.core
Pair = namedtuple("Pair", "a b")
NAN, OTHER_NAN = (struct.unpack("d", struct.pack("Q", bits))[0] for bits in (0x7FF8 << 48, 0xFFF8 << 48))


@dataclass(frozen=True)
class Frozen:
    it: object


class Own:
    """Equal by a comparison of its own."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.it == other.it

    def __hash__(self) -> int:
        return hash(self.it)


def text(x: Any) -> str:
    """A text with every type and bit of a value."""
    kind = type(x).__name__
    if isinstance(x, float):
        return f"{kind} {struct.pack('d', x).hex()}"
    if isinstance(x, complex):
        return f"{kind} {struct.pack('dd', x.real, x.imag).hex()}"
    if isinstance(x, tuple | frozenset):
        return f"{kind}({', '.join(map(text, x))})"
    if isinstance(x, Frozen | Own):
        return f"{kind}<{text(x.it)}>"
    return f"{kind} {x!r}"


def number(x: Any) -> float:
    return float(zlib.crc32(text(x).encode()))


def in_tree() -> Callable[[Any], float]:
    tree = fanin.GraphTree("cpu", memory=1 << 16)
    f = tree.function(lambda x, k: x + number(k))

    def call(k: Any) -> float:
        with tree.step():
            return float(f(np.zeros(1), k).numpy()[0])

    return call


def in_step() -> Callable[[Any], float]:
    step = tape.compiled(lambda x, k: tape.array(x) + number(k))
    return lambda k: float(step(np.zeros(1), k).numpy()[0])


RECORDERS = {"graph tree": in_tree, "compiled": in_step}

EQUAL: dict[str, tuple[Any, Any]] = {
    "zeros in a frozenset": (frozenset([0.0]), frozenset([-0.0])),
    "a frozenset in another order": (frozenset([0, 8]), frozenset([8, 0])),
    "a frozen dataclass": (Frozen(1), Frozen(True)),
    "zeros in a frozen dataclass": (Frozen((0.0,)), Frozen((-0.0,))),
    "decimals": (Decimal("1.0"), Decimal("1.00")),
    "ranges": (range(0, 3, 2), range(0, 4, 2)),
    "NaNs": (NAN, OTHER_NAN),
    "NaNs in a tuple": ((NAN,), (OTHER_NAN,)),
    "a class with a comparison of its own": (Own(1), Own(1.0)),
    "a named tuple": (Pair(1, 2), Pair(1, 2.0)),
    "times": (
        datetime.datetime(2020, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
        datetime.datetime(2020, 1, 1, 0, tzinfo=datetime.UTC),
    ),
}


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_of_other_types_or_bits_have_recordings_of_their_own(name: str, recorder: str) -> None:
    call, (one, two) = RECORDERS[recorder](), EQUAL[name]
    for k in (one, one, one, two, two, two, one):
        assert call(k) == number(k)


@pytest.mark.parametrize("recorder", RECORDERS)
def test_the_same_value_made_again_is_replayed(recorder: str) -> None:
    runs: list[object] = []
    makers: list[Callable[[], Any]] = [
        lambda: Frozen((0.0, Decimal("1.0"))), lambda: Pair(1, NAN), lambda: frozenset([Fraction(1, 3)]),
        lambda: Own(range(3)), lambda: datetime.date(2020, 1, 1), lambda: np.float32(1), lambda: "a".upper,
    ]  # fmt: skip
    for make in makers:
        runs.clear()

        def plain(x: Any, k: Any) -> Any:
            runs.append(k)
            return x * 2.0

        if recorder == "compiled":
            step = tape.compiled(plain)
            for _ in range(4):
                step(np.ones(1), make())
            assert len(runs) == 2 and step.stats.replayed == 2, make
            continue
        tree = fanin.GraphTree("cpu", memory=1 << 16)
        f: Any = tree.function(plain)
        for _ in range(4):
            with tree.step():
                f(np.ones(1), make())
        assert f.last.did == "replayed" and len(runs) == 2, make


def test_an_object_that_is_changed_in_place_is_recorded_again() -> None:
    for name in RECORDERS:
        call, own = RECORDERS[name](), Own(1)
        for it in (1, 1, 1, 2, 2, 1.0, 1):
            own.it = it
            assert call(own) == number(own), name


def nest(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([0, 1, True, False, 0.0, -0.0, 1.0, NAN, OTHER_NAN, 0j, -0j, Decimal("1.0"), Decimal(1), "a"])
    kind = rng.choice([tuple, frozenset, Frozen, Own, Pair])
    if kind in (Frozen, Own):
        return kind(nest(rng, depth - 1))
    if kind is Pair:
        return Pair(nest(rng, depth - 1), nest(rng, depth - 1))
    return kind([nest(rng, depth - 1) for _ in range(rng.randrange(3))])


@pytest.mark.parametrize("count", sizes(40, 400))
@pytest.mark.parametrize("recorder", RECORDERS)
def test_random_nests_of_values_are_never_taken_for_each_other(recorder: str, count: int) -> None:
    same = other = 0
    for seed in range(count):
        rng = random.Random(seed)
        call = RECORDERS[recorder]()
        values = [nest(random.Random(f"{seed} {rng.randrange(4)}"), rng.randrange(4)) for _ in range(8)]
        for one, two in zip([values[0], *values], values, strict=False):
            same, other = same + (text(one) == text(two)), other + (text(one) != text(two))
            assert call(two) == number(two), (seed, text(two))
    print(f"{recorder}: {same} calls with the value of the call before, {other} with another one")
    assert min(same, other) > count
