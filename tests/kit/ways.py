"""The ways by which a list of contributions can be brought into a buffer: one table. A new way is a new row.

A way is text: `program` writes the Python that brings one list in, and the law runs that text. It uses the names

    make     functions, of which each makes one contribution in memory of its own
    g        the contributions, made once: other references keep them alive
    put      copies to where the place is (on the host: nothing)
    s        streams of the place
    seen     snapshots

and sets `result`, and `stats` and `norm` if they are wanted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from kit import c_api
from kit.lists import FLAVOURS, Case, Term, Wanted
from reference import numbers as reference

#: What a way does with the objects that it adds.
HOLDS = {
    "kept": ("g[{i}]", ""),
    "alone": ("make[{i}]()", ""),  # the buffer has the one reference
    "donated": ("make[{i}]()", ", donate=True"),
    "copied": ("g[{i}]", ", copy=True"),
}
BUDGETS = ("inf", 0, 0, 1, 24, 100, '"auto"')
#: What else a way does between its adds and before the take.
LOOKS = ("nothing", "nothing", "nothing", "snapshots", "explain", "a failed take", "trace", "digests", "debug")
#: What the buffer has done before, or does beside.
LIVES = ("first", "first", "second", "cleared", "beside")
PLACES = ("host", "sim", "fake")
#: The options of a sum; see `Wanted.words`.
WORDS = ("nothing", "shape", "dtype", "exact", "wider", "scale", "out", "writable", "stats", "weights", "mean")


@dataclass(frozen=True)
class Way:
    """One way: a row of ENTRIES, and how its steps are made."""

    entry: str
    order: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    budget: Any = "inf"
    hold: str = "kept"
    look: str = "nothing"
    life: str = "first"
    place: str = "host"
    one: bool = False  # take(slot=) in the place of take()
    late: bool = False  # the weights are given at the take (W5)

    @property
    def slot(self) -> int:
        return int(self.life == "beside")

    def __str__(self) -> str:
        said = [self.entry, f"order {self.order}" * (self.order != tuple(range(len(self.order))))]
        said += [f"keys {self.keys}" if self.keys else "", f"budget {self.budget}", self.hold, self.look, self.life]
        said += ["take(slot=)" * self.one, "late weights" * self.late, self.place * (self.place != "host")]
        return ", ".join(x for x in said if x not in ("", "nothing", "first"))


Lines = list[str]


def anything(case: Case) -> bool:
    return True


@dataclass(frozen=True)
class Entry:
    """A row: how a list enters. `lines` writes the adds, `fits` limits the lists, `whole`: it makes the result, too."""

    lines: Callable[[Case, Way], Lines]
    keyed: bool = False
    fits: Callable[[Case], bool] = anything
    whole: bool = False
    words: tuple[str, ...] = WORDS  # what can be wanted of it, and
    flavours: tuple[str, ...] = tuple(FLAVOURS)  # of which lists: each such cell must be met
    same: bool = True  # one contribution comes back as itself
    written: bool = False  # its sum can be written, so that no element is that of another
    python: bool = True  # it gives the very objects in and out, and takes every option of the buffer
    places: tuple[str, ...] = PLACES
    holds: tuple[str, ...] = tuple(HOLDS)


def given(way: Way, i: int, stream: int = 1) -> str:
    text = HOLDS[way.hold][0].format(i=i)
    return text if way.place == "host" else f"placed({text}, s[{stream}])"


def stream(way: Way, i: int) -> str:
    return "" if way.place == "host" else f", stream=s[{i % 3}]"


def early(case: Case, way: Way) -> list[Any] | None:
    """The weights that come with the contributions; None: there are none."""
    return None if way.late else case.weights


def weight(case: Case, way: Way, i: int) -> str:
    weights = early(case, way)
    return "" if weights is None or weights[i] is None else f", weight={weights[i]!r}"


def weights(case: Case, way: Way) -> str:
    """Of several contributions in one call."""
    some = early(case, way)
    return "" if some is None else f", weights={[some[i] for i in way.order]!r}"


def key(way: Way, i: int) -> str:
    return f", key={way.keys[i]}" if way.keys else ""


def adds(case: Case, way: Way) -> Lines:
    lines = []
    for i in way.order:
        options = f"{key(way, i)}{weight(case, way, i)}{stream(way, i)}{HOLDS[way.hold][1]}"
        lines.append(f"buf.add({way.slot}, {given(way, i, i % 3)}{options})")
        lines += [*written(case, way, (i,)), *lines_between(way)]
    return lines


def written(case: Case, way: Way, some: tuple[int, ...]) -> Lines:
    """What was copied may be written at once."""
    copied = way.hold == "copied" and way.place == "host" and all(x.kind != "again" for x in case.terms)
    return [f"scribble(g[{i}])" for i in some] if copied else []


def lines_between(way: Way) -> Lines:
    snapshot = f"seen.append(shown_now(lambda: buf[{way.slot}]))"
    if way.place != "host":
        snapshot = f"with fanin.stream(s[0]): {snapshot}"
    lines = {"snapshots": [snapshot], "explain": [f"buf.explain({way.slot})"]}.get(way.look, [])
    return lines + (["buf.add(0, other())"] if way.life == "beside" else [])


def add_many(case: Case, way: Way) -> Lines:
    some = ", ".join(given(way, i) for i in way.order)
    keys = f", keys={[way.keys[i] for i in way.order]}" if way.keys else ""
    where = weights(case, way) + (", stream=s[1]" if way.place != "host" else "")
    return [f"buf.add_many({[way.slot] * len(way.order)}, [{some}]{keys}{where}{HOLDS[way.hold][1]})",
            *written(case, way, way.order), *lines_between(way)]  # fmt: skip


def add_in_two(case: Case, way: Way) -> Lines:
    half = len(way.order) // 2
    lines = []
    for order in (way.order[:half], way.order[half:]):
        if order:
            lines += add_many(case, replace(way, order=order))
    return lines


def add_n(case: Case, way: Way) -> Lines:
    w = case.wanted
    some = ", ".join(given(way, i) for i in way.order)
    options = f", keys={[way.keys[i] for i in way.order]}" if way.keys else ""
    options += f", accumulate={w.accumulate!r}" if w.accumulate else ""
    options += f", scale={w.scale}" if w.scale is not None else ""
    options += ", out=out" if w.out else ""
    options += ", stats=True" if w.stats else ""
    options += weights(case, way) + (", mean=True" if w.mean else "")
    return [f"result{', stats' if w.stats else ''} = fanin.add_n([{some}]{options})"]


def target(case: Case, way: Way) -> Lines:
    """The producer adds by itself, but for what only a buffer can add."""
    lines = []
    for i in way.order:
        if case.terms[i].kind == "dense":
            lines += [f"with buf.target({way.slot}{key(way, i)}) as x:", f"    x += g[{i}]", *lines_between(way)]
        else:
            lines += [f"buf.add({way.slot}, g[{i}]{key(way, i)})", *lines_between(way)]
    return lines


def backward(case: Case, way: Way) -> Lines:
    """A node's function returns the list; a consumer's gets the sum."""
    some = ", ".join(given(way, i) for i in way.order)
    slots = case.wanted.slot()
    return [
        "got = []",
        f"consumer = fanin.Node(lambda x: got.append(x), slots=[{slots or 'None'}])",
        f"producer = fanin.Node(lambda _: ({some},), edges=[(consumer, 0)] * {len(case.terms)})",
        "fanin.backward([(producer, 0, np.ones(1))])",
        "result = got[0] if got else None",
    ]


def c_views(case: Case, way: Way) -> Lines:
    return [f"buf.add(0, g[{i}]{key(way, i)}{weight(case, way, i)}{HOLDS[way.hold][1]})" for i in way.order]


def c_values(case: Case, way: Way) -> Lines:
    made = [f"None if g[{i}] is None else c_api.value(g[{i}])" for i in range(len(case.terms))]
    return [f"buf.add(0, {made[i]}{key(way, i)}{weight(case, way, i)})" for i in way.order]


def c_many(case: Case, way: Way) -> Lines:
    keys = f", keys={[way.keys[i] for i in way.order]}" if way.keys else ""
    return [
        f"buf.add_many({[0] * len(way.order)}, [{', '.join(f'g[{i}]' for i in way.order)}]{keys}{weights(case, way)})"
    ]


def c_handle(case: Case, way: Way) -> Lines:
    """The C API's handle of an InputBuffer: every second contribution comes through it."""
    lines = ["handle = c_api.Buffer.of_python(buf)"]
    for n, i in enumerate(way.order):
        name = "handle" if n % 2 == 0 else "buf"
        lines.append(f"{name}.add(0, g[{i}]{key(way, i)}{weight(case, way, i)})")
    return lines


# Which lists fit


def undeclared(case: Case) -> bool:
    w = case.wanted
    return w.shape is None and w.dtype is None and not w.writable


def plain(case: Case) -> bool:
    """Dense ndarrays of dtypes that the C API names, and None; no combination that C has no words for."""
    c_known = all(np.dtype(x.dtype) in c_api.DTYPES for x in case.terms if x.kind == "dense")
    w = case.wanted
    declared = w.dtype is None or np.dtype(w.dtype) in c_api.DTYPES
    accumulate = w.accumulate in (None, "exact") or np.dtype(w.accumulate) in c_api.DTYPES
    out = w.out is None or np.dtype(w.out) in c_api.DTYPES
    ndarrays = all(x.kind in ("dense", "none", "again") and x.family == "numpy" for x in case.terms)
    return ndarrays and c_known and declared and accumulate and out


def negative_zero(x: Any) -> bool:
    """Whether adding it to a zero changes it."""
    parts = (complex(x).real, complex(x).imag)
    return any(part == 0 and math.copysign(1, part) < 0 for part in parts)


def own_shape(case: Case) -> bool:
    """Of a target: the slot declares shape and dtype, and the arrays are of them."""
    w = case.wanted
    if w.weights:  # a target has none
        return False
    plain_dtype = w.dtype in ("float32", "float64", "complex64", "complex128", "int32", "int64")
    if w.shape is None or not plain_dtype or w.accumulate == "exact":
        return False
    dense = [x for x in case.terms if x.kind == "dense"]
    fits = all(x.shape == w.shape and reference.promotion({x.dtype, w.dtype}) == np.dtype(w.dtype) for x in dense)
    signed = any(x.kind == "dense" and any(map(negative_zero, x.numbers)) for x in dense)
    low = any(np.dtype(x.dtype).kind == "V" or np.dtype(x.dtype).itemsize == 1 for x in dense)
    others = all(x.kind in ("dense", "none", "zero") and x.family == "numpy" for x in case.terms)
    return bool(dense) and fits and others and not signed and not low


def in_a_pass(case: Case) -> bool:
    w = case.wanted
    weighs = w.weights or w.mean
    return w.accumulate is None and w.scale is None and w.out is None and not (w.writable or w.stats or weighs)


SUMMED = {
    "fits": undeclared,
    "whole": True,
    "places": ("host",),
    "holds": ("kept", "alone"),
    "words": ("nothing", "exact", "wider", "scale", "out", "stats", "weights", "mean"),
    "same": False,
    "written": True,
}
LENT = {
    "fits": own_shape,
    "places": ("host",),
    "holds": ("kept",),
    "words": ("shape", "dtype", "scale", "stats", "mean"),
    "flavours": ("dense", "expanded"),
}
IN_A_PASS = {
    "fits": in_a_pass,
    "whole": True,
    "places": ("host",),
    "holds": ("kept", "alone"),
    "words": ("nothing", "shape", "dtype"),
}
IN_C = {"fits": plain, "python": False, "places": ("host",), "holds": ("kept",), "flavours": ("dense", "expanded")}
HANDLE = IN_C | {"python": True, "same": False}

#: The table: add a row for each new way.
ENTRIES: dict[str, Entry] = {
    "add": Entry(adds),
    "add, keys": Entry(adds, keyed=True),
    "add_many": Entry(add_many),
    "add_many, keys": Entry(add_many, keyed=True),
    "add_many twice, keys": Entry(add_in_two, keyed=True),
    "add_n": Entry(add_n, **SUMMED),
    "add_n, keys": Entry(add_n, keyed=True, **SUMMED),
    "target": Entry(target, **LENT),
    "target, keys": Entry(target, keyed=True, **LENT),
    "backward": Entry(backward, **IN_A_PASS),
    "C views": Entry(c_views, **IN_C | {"holds": ("kept", "copied")}),
    "C views, keys": Entry(c_views, keyed=True, **IN_C | {"holds": ("kept", "copied")}),
    "C values, keys": Entry(c_values, keyed=True, **IN_C),
    "C many, keys": Entry(c_many, keyed=True, **IN_C),
    "C handle, keys": Entry(c_handle, keyed=True, **HANDLE),
}


#: What a list must have for a row.
CONDITIONS = {row.fits for row in ENTRIES.values()}


def cells(place: str) -> set[tuple[str, str, str]]:
    """(row, flavour, word): what a run of the law must have met."""
    found = set()
    for name, row in ENTRIES.items():
        for flavour, word in product(row.flavours, row.words):
            objects = flavour == "objects" and (word != "nothing" or place != "host")
            exact = place != "host" and word == "exact" and flavour.startswith("sparse")
            if place in row.places and not (objects or exact) and not (flavour == "scalars" and word == "shape"):
                found.add((name, flavour, word))
    return found


def drawn(draw: random.Random, case: Case, place: str, entry: str) -> Way:
    """A way for this list by a row of the table that fits it."""
    row = ENTRIES[entry]
    n = len(case.terms)
    again = any(x.kind == "again" for x in case.terms)
    holds = [h for h in row.holds if not again or h in ("kept", "copied")]
    order, keys = tuple(range(n)), None
    if row.keyed:
        order = tuple(draw.sample(range(n), n))
        keys = tuple(range(n)) if draw.random() < 0.7 else tuple(sorted(draw.sample(range(20), n)))
    if row.whole:
        return Way(entry, order, keys, hold=draw.choice(holds), place=place)
    life = draw.choice(LIVES) if row.python else "first"
    options = case.wanted.scale is not None or case.wanted.mean  # which the other slot may refuse
    if life == "beside" and (entry == "C handle, keys" or options):
        life = "second"
    look = draw.choice(LOOKS) if row.python and not entry.startswith(("target", "C")) else "nothing"
    budget, one = draw.choice(BUDGETS), draw.random() < 0.4
    late = case.wanted.weights and row.keyed and not entry.startswith("target") and draw.random() < 0.3
    if late:  # all wait until the take; a snapshot before it would have other weights
        budget, life = "inf", "second" if life == "beside" else life
        empty = all(x.kind == "none" for x in case.terms)  # whose take with a wrong out= does not fail
        if look == "snapshots" or (look == "a failed take" and empty):
            look = "nothing"
    return Way(entry, order, keys, budget, draw.choice(holds), look, life, place, one, late)


def program(case: Case, way: Way) -> str:
    """The way as Python, but for `make`, `g`, `out` and `other`."""
    row = ENTRIES[way.entry]
    lines = row.lines(case, way)
    if row.whole:
        return "\n".join(lines)
    lines = [*constructor(case, way), *before(way), *lines, *taken(case, way)]
    if way.look in ("trace", "digests", "debug"):
        block = {
            "trace": "with fanin.trace():",
            "digests": "with fanin.trace(digests=True):",
            "debug": "with fanin.set_options(debug=True):",
        }[way.look]
        lines = [block, *("    " + line for line in lines)]
    return "\n".join(lines)


def constructor(case: Case, way: Way) -> Lines:
    w = case.wanted
    if not ENTRIES[way.entry].python:
        return [c_constructor(w, way)]
    slot = w.slot()
    if way.place != "host":
        slot = (
            f"fanin.Slot({slot.removeprefix('fanin.Slot(').removesuffix(')')}{', ' if slot else ''}device={{place!r}})"
        )
        slot = slot.replace("{place!r}", repr("sim:0" if way.place == "sim" else "cuda:0"))
    slots = f"[fanin.Slot(), {slot or 'fanin.Slot()'}]" if way.life == "beside" else f"[{slot}]" if slot else "1"
    options = f", budget={way.budget}" + (", stats=True" if w.stats else "")
    options += f", accumulate={w.accumulate!r}" if w.accumulate else ""
    options += ", stream=s[0]" if way.place != "host" else ""
    return [f"buf = fanin.InputBuffer({slots}{options})"]


def c_constructor(w: Wanted, way: Way) -> str:
    declared = [f"{n}={getattr(w, n)!r}" for n in ("shape", "dtype") if getattr(w, n) is not None]
    declared += ["exact=True"] if w.accumulate == "exact" else [f"accumulate={w.accumulate!r}"] if w.accumulate else []
    slots = f"declared=[c_api.declared({', '.join(declared)})], " if declared else ""
    budget = {"inf": "c_api.FUSED", 0: "c_api.EAGER", '"auto"': "c_api.AUTO"}.get(way.budget, way.budget)
    return f"buf = c_api.Buffer(1, {slots}budget={budget}{', flags=c_api.STATS' if w.stats else ''})"


def before(way: Way) -> Lines:
    if way.life not in ("second", "cleared"):
        return []
    end = {"second": "buf.take()", "cleared": "buf.clear()"}[way.life]
    return [f"buf.add({way.slot}, other())", f"buf.add({way.slot}, other())", end]


def taken(case: Case, way: Way) -> Lines:
    w = case.wanted
    how = [f"scale={w.scale}"] if w.scale is not None else []
    how += ["writable=True"] if w.writable else []
    how += ["mean=True"] if w.mean else []
    if way.late and case.weights is not None and way.keys is not None:
        given = {k: 1 if x is None else x for k, x in zip(way.keys, case.weights, strict=True)}
        how.append(f"weights={given!r}")
    if w.out:
        how.append("out=out" if way.one and ENTRIES[way.entry].python else f"out=[{'None, ' * way.slot}out]")
    lines = ["refused(lambda: buf.take(out=[np.zeros((9, 9, 9))] * len(buf)))"] if way.look == "a failed take" else []
    if ENTRIES[way.entry].python and way.one:
        take = f"result = buf.take({', '.join([f'slot={way.slot}', *how])})"
    else:
        take = f"result = buf.take({', '.join(how)})[{way.slot}]"
    lines.append(take if way.place == "host" else f"with fanin.stream(s[0]): {take}")
    if w.stats:
        lines.append(f"stats = buf.stats({way.slot})")
    if w.stats and ENTRIES[way.entry].python and way.life != "beside":
        lines.append("norm = fanin.global_norm(buf)")
    return lines


def terms_of(case: Case) -> list[Term]:
    """The terms of a list; a repeated one is the term that it repeats."""
    found: list[Term] = []
    for x in case.terms:
        found.append(found[x.index[0][0]] if x.kind == "again" else x)
    return found
