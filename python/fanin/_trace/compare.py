"""Which node, slot and key differ first between two runs, or between the ranks of one (rules G3, G4)."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from .._checks import flag
from .._files import path_text
from .._words import counted, names_nearest, ordinal, printable, type_of
from .digests import CONTRIBUTION, HOOKED, LEAF, SUM, THE_CALLER, Place, Record, Run, Unit, from_json, run_of
from .ranks import RanksTrace
from .recording import Trace

__tracebackhide__ = True  # no frames of ours in reports of pytest

WHAT = {CONTRIBUTION: "contribution", SUM: "sum", HOOKED: "sum after hooks", LEAF: "leaf"}


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs; prints as sentences."""

    node: str  #: Whose slot it is; of a buffer its name
    slot: int
    key: int | None  #: Of a contribution: its key; None: it has none
    rank: int | None  #: The rank that differs; None: the runs have no ranks
    what: str  #: "contribution", "sum", "sum after hooks" or "leaf"
    reason: str  #: "value", "dtype", "shape", "order", "missing"
    maker: str  #: The node that made a contribution; "" for the caller, and of a sum
    unit: int  #: Which pass or buffer of the run it is in, from 0 on
    text: str = field(repr=False)  #: The sentences

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Comparison:
    """The result of `fanin.compare`; prints as sentences, and is true where digests were compared and none differs."""

    difference: Difference | None  #: The first one; None: there is none
    compared: int  #: Digests that were equal, up to the first difference
    unknown: int  #: Gradients and sums that have no digest, up to there
    passes: int  #: Passes of one run
    buffers: int  #: Buffers that were taken outside of passes

    def __bool__(self) -> bool:
        return self.difference is None and self.compared > 0

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        if not self.compared:
            return f"nothing was compared: {counted(self.unknown, 'digest')} missing"
        kinds = [(self.passes, "pass", "passes"), (self.buffers, "buffer", "buffers")]
        of = " and ".join(f"{n} {one if n == 1 else more}" for n, one, more in kinds if n)
        without = f"; {counted(self.unknown, 'digest')} missing" if self.unknown else ""
        equal = f"{counted(self.compared, 'digest')} of {of} {'is' if self.compared == 1 else 'are'} equal"
        return f"no difference: {equal}{without}"


class Named(NamedTuple):
    """A run, as messages call it."""

    name: str
    run: Run


# Reading


def runs_in(given: Any, what: str) -> list[Run]:
    """The runs of a trace, or of a file that one was saved to: one for each rank."""
    if isinstance(given, Trace):
        if not given._digests:
            raise ValueError(f"{what}: the trace has no digests: record it with fanin.trace(digests=True)")
        return whole([run_of(given.lines, given.dropped)], what)
    if isinstance(given, RanksTrace):
        return whole([run_of(mine) for mine in given.lines], what)
    path = path_text(given, what)
    with open(path, "rb") as file:
        text = file.read()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: it is no JSON: {e}") from None
    other = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(other, dict) or other.get("made by") != "fanin":
        raise ValueError(f"{path}: it is no trace of fanin's: save one with fanin.trace(digests=True).save(path)")
    if other.get("digests") is None:
        raise ValueError(f"{path}: the trace has no digests: record it with fanin.trace(digests=True)")
    try:
        runs = from_json(other["digests"])
    except ValueError as e:
        raise ValueError(f"{path}: broken: {e}" if "of version" not in str(e) else f"{path}: {e}") from None
    return whole(runs, path)


def whole(runs: list[Run], what: str) -> list[Run]:
    """The runs, if no line is missing and there is something to compare."""
    for rank, run in enumerate(runs):
        of = f", rank {rank}" * (len(runs) > 1)
        if run.dropped:
            raise ValueError(
                f"{what}{of}: {counted(run.dropped, 'line')} did not fit and are lost: record with a larger capacity="
            )
        if not any(unit.records for unit in run.units):
            raise ValueError(f"{what}{of}: it has no digests: no pass and no buffer ran while it recorded")
    return runs


# The graphs


def check_graphs(runs: Sequence[Named], place: Place, units: Sequence[Unit]) -> None:
    """ValueError that names the first other node, unless a unit of all runs is of one graph."""
    first, unit = runs[0], units[0]
    which = where_of(place)
    for other, theirs in zip(runs[1:], units[1:], strict=True):
        for (has, this), (lacks, that) in itertools.permutations([(first, unit), (other, theirs)]):
            ran = set(that.nodes)
            for place in this.nodes:
                if place not in ran:
                    what = f"{named(place)} ran in {has.name} and not in {lacks.name}"
                    refuse(first, other, f"first other node: {which}: {what}")
        for (has, this), (lacks, that) in itertools.permutations([(first, unit), (other, theirs)]):
            known = {record.subject for record in that.records}
            for r in this.records if unit.nodes else ():
                if r.what == CONTRIBUTION and r.subject not in known:
                    what = f"{of_edge(r.source, r.edge)} leads to slot {r.slot} of {named(r.node)}"
                    refuse(first, other, f"first other node: {which}: {what} in {has.name} and not in {lacks.name}")


def refuse(first: Named, other: Named, why: str) -> NoReturn:
    raise ValueError(f"{first.name} and {other.name} are not runs of one graph: {why}")


def named(place: Place) -> str:
    name, at = place
    label = printable(name) or "a node that did not run"
    return f"node {label}" + (f" (the {ordinal(at + 1)} of that name, the last made first)" if at else "")


def of_edge(source: Place, edge: int) -> str:
    return f"root {edge}" if source == THE_CALLER else f"edge {edge} of {named(source)}"


def where_of(place: Place) -> str:
    """A unit: the name of a buffer, or "" for a pass, and which one of that name."""
    name, at = place
    return f"buffer {printable(name)}, taken the {ordinal(at + 1)} time" if name else f"pass {at + 1}"


def placed(run: Run, passes_alone: bool) -> dict[Place, Unit]:
    """The units of a run: threads may fill buffers in another order, but each of one name in its own."""
    count: Counter[str] = Counter()
    found = {}
    for unit in run.units:
        if not (passes_alone and unit.name):
            found[unit.name, count[unit.name]] = unit
        count[unit.name] += 1
    return found


# The walk


class Found(NamedTuple):
    """The first difference of runs of one graph."""

    nth: int  #: Of the unit, among all
    place: int  #: In the order of the unit's records
    odd: list[int]  #: The runs that differ from most
    reason: str
    record: Record  #: Of the first run that has it


class Walk:
    """Looks for the first difference of several runs of one graph."""

    def __init__(self, runs: Sequence[Named], leaves: bool, passes_alone: bool) -> None:
        self.runs, self.leaves = runs, leaves
        self.units = [placed(one.run, passes_alone or leaves) for one in runs]
        self.places = merged([list(units) for units in self.units])
        self.compared = self.unknown = 0

    def first(self) -> Found | None:
        """The first difference of all."""
        lacking: tuple[Place, list[bool]] | None = None
        for index, place in enumerate(self.places):
            units = [some[place] for some in self.units if place in some]
            if len(units) < len(self.runs):
                lacking = lacking or (place, [place in some for some in self.units])
                continue
            check_graphs(self.runs, place, units)
            found = self.in_buffer(units) if place[0] else self.in_pass(units)
            if found:
                return found._replace(nth=index)
        if lacking:
            place, there = lacking
            has, lacks = self.runs[there.index(True)], self.runs[there.index(False)]
            what = f"{where_of(place)} ran in {has.name} and not in {lacks.name}, and all before it is equal"
            refuse(self.runs[0], next(one for one in (has, lacks) if one is not self.runs[0]), what)
        return None

    def in_pass(self, units: Sequence[Unit]) -> Found | None:
        found = [{record.subject: record for record in unit.records} for unit in units]
        for at, subject in enumerate(merged([[record.subject for record in unit.records] for unit in units])):
            records = [one.get(subject) for one in found]
            if self.leaves and subject[0] != LEAF:
                continue
            odd = self.differ(records)
            if odd:
                record = next(r for r in records if r)
                return Found(0, at, odd, self.reason(units, records, odd), record)
        return None

    def in_buffer(self, units: Sequence[Unit]) -> Found | None:
        """Contributions are equal in whatever order, so that an exact sum of them is; then come the sums."""
        of_slots = [by_slot(unit) for unit in units]
        at = 0
        for slot in dict.fromkeys(itertools.chain.from_iterable(of_slots)):
            mine = [some.get(slot, []) for some in of_slots]
            given = [[r for r in records if r.what == CONTRIBUTION] for records in mine]
            bags = [Counter((r.digest, r.text) for r in records) for records in given]
            if any(bag != bags[0] for bag in bags):
                found = self.in_pass([Unit("", (), tuple(records)) for records in given])
                if found:
                    return found._replace(place=at + found.place)
            else:
                self.compared += sum(r.is_known for r in given[0])
                self.unknown += sum(not r.is_known for r in given[0])
            at += max(map(len, given))
            sums = [[r for r in records if r.what == SUM] for records in mine]
            for i in range(max(map(len, sums))):
                records = [some[i] if i < len(some) else None for some in sums]
                odd = self.differ(records)
                if odd:
                    return Found(0, at, odd, self.reason(units, records, odd), next(r for r in records if r))
                at += 1
        return None

    def differ(self, records: Sequence[Record | None]) -> list[int]:
        """The runs whose record is not that of most (where as many have another one: of the first)."""
        there = [r for r in records if r is not None]
        blind = not all(r.is_known for r in there)
        if blind and len(there) == len(records) and len({r.kind for r in there}) == 1:
            self.unknown += 1
            return []
        bits = [r and (0 if blind else r.digest, r.kind) for r in records]
        count = Counter(bits)
        if len(count) == 1:
            self.compared += 1
            return []
        most = max(count.values())
        usual = bits[0] if count[bits[0]] == most else next(b for b in bits if count[b] == most)
        return [i for i, b in enumerate(bits) if b != usual]

    def reason(self, units: Sequence[Unit], records: Sequence[Record | None], odd: Sequence[int]) -> str:
        this = odd[0]
        other = next(i for i in range(len(records)) if i not in odd)
        a, b = records[other], records[this]
        if a is None or b is None:
            return "missing"
        if a.what == SUM and keys_of(units[other], a) != keys_of(units[this], b):
            return "order"
        if a.kind == b.kind:
            return "value"
        words = [r.kind.partition(" (")[0] for r in (a, b)]
        return "dtype" if words[0] != words[1] else "shape"


def by_slot(unit: Unit) -> dict[int, list[Record]]:
    """The records of each slot, in their order."""
    found: dict[int, list[Record]] = {}
    for record in unit.records:
        found.setdefault(record.slot, []).append(record)
    return found


def merged(orders: Sequence[Sequence[Any]]) -> list[Any]:
    """The items of all orders: those of the first in its order, each other one after what it follows in its own."""
    begin = object()
    after: dict[Any, Any] = {}  # of each item the one behind it
    for order in orders:
        before: Any = begin
        for item in order:
            if item not in after:
                after[item] = after.get(before, begin)
                after[before] = item
            before = item
    made = []
    item = after.get(begin, begin)
    while item is not begin:
        made.append(item)
        item = after[item]
    return made


def keys_of(unit: Unit, record: Record) -> list[tuple[Any, ...]]:
    """The contributions of a sum in the order in which they were added: by key, else as they arrived."""
    given = [r for r in unit.records if r.what == CONTRIBUTION and (r.node, r.slot) == (record.node, record.slot)]
    if unit.nodes:
        return [(r.source, r.edge) for r in sorted(given, key=lambda r: r.key)]
    return [(r.digest, r.text) for r in (sorted(given, key=lambda r: r.key) if given and given[0].key >= 0 else given)]


# Sentences


def sentences(walk: Walk, found: Found) -> str:
    """What differs, and who made it."""
    runs, odd, reason, of = walk.runs, found.odd, found.reason, found.record
    place = walk.places[found.nth]
    units = [some[place] for some in walk.units]
    unit = units[0]
    usual = next(i for i in range(len(runs)) if i not in odd)
    this, that = runs[usual].name, " and ".join(runs[i].name for i in odd)
    records = [next((r for r in u.records if same(r, of)), None) for u in units]
    a, b = records[usual], records[odd[0]]
    text = f"first difference of {that} and {this}: {where_of(place)}, {slot_of(unit, of)}"
    if of.what == CONTRIBUTION:
        text += f", {key_of(of, unit.name)}"
    text += f": {WHAT[of.what]} {shown(b)}, not {shown(a)}."
    return f"{text}\n{cause(unit, units, of, reason, usual, odd[0], a, b)}"


def key_of(of: Record, in_unit: object) -> str:
    """The key of a contribution, for the sentence; of one without a key its place in the unit, if that has a name."""
    if of.key >= 0:
        return f"key {of.key}"
    return f"the {ordinal(of.edge + 1)} contribution" if in_unit else "no key"


def same(a: Record, b: Record) -> bool:
    return a.subject == b.subject


def slot_of(unit: Unit, of: Record) -> str:
    if not unit.name:
        return f"slot {of.slot} of {named(of.node)}"
    name = of.node[0]  # of a slot that has one, else of its buffer
    return f"slot {of.slot}" if name in ("", unit.name) else f"slot {of.slot} ({name})"


def shown(record: Record | None) -> str:
    if record is None:
        return "missing"
    text = printable(record.text)
    return f"{text} {record.digest:016x}" if record.digest else text


def differing_sums(units: Sequence[Unit], leaf: Record, usual: int, odd: int) -> bool:
    """Whether what the two runs added to the leaf differs, which is so only where sums were not compared."""
    added = [
        {r.what: (r.digest, r.kind) for r in units[i].records if r.what in (SUM, HOOKED) and r.node == leaf.node}
        for i in (usual, odd)
    ]
    return added[0] != added[1]


def cause(
    unit: Unit,
    units: Sequence[Unit],
    of: Record,
    reason: str,
    usual: int,
    odd: int,
    a: Record | None,
    b: Record | None,
) -> str:
    """Who made the difference."""
    if of.what == CONTRIBUTION:
        if unit.name:
            return "The caller of add() gave it: look at what made this gradient."
        if of.source == THE_CALLER:
            return f"The caller of the pass gave it, as root {of.edge}: what differs was made before the pass."
        sums = [r for r in unit.records if r.what in (SUM, HOOKED) and r.node == of.source]
        got = "its own sums are equal"
        if any(not r.is_known for r in sums):
            got = "of its own sums those that have a digest are equal"
        return f"{named(of.source)} made it at index {of.edge}: {got}, so look at its function, its hooks and its data."
    if of.what == HOOKED:
        return f"A hook of slot {of.slot} of {named(of.node)} made it: the sum before the hooks is equal."
    if of.what == LEAF and reason == "missing":
        return "It was not accumulated: the pass ended before, or a hook raised."
    if of.what == LEAF and differing_sums(units, of, usual, odd):
        return "The sum of this pass differs, too; with leaves=True it was not compared."
    if of.what == LEAF:
        return (
            "The sum of this pass is equal: the leaf's gradient before the pass differs, or weight= of the"
            " pass does, or other code changed it (a reducer, a hook after accumulation)."
        )
    if reason == "order":
        orders = [keys_of(units[i], of) for i in (usual, odd)]
        at = next((i for i, (x, y) in enumerate(zip(*orders, strict=False)) if x != y), 0)
        if unit.name and any(r.key < 0 for r in unit.records if r.what == CONTRIBUTION):
            return (
                f"Equal contributions arrived in another order, from the {ordinal(at + 1)} on, and have no keys: give"
                ' add(key=), or accumulate="exact".'
            )
        if unit.name:
            return f"Equal contributions have other keys, from the {ordinal(at + 1)} key on: they were swapped."
        gave = [of_edge(*order[at]) for order in orders]
        return (
            f"Equal contributions have other keys: the {ordinal(at + 1)} is {gave[1]}, not {gave[0]}: nodes were made,"
            " or edges given, in another order."
        )
    if reason in ("dtype", "shape"):
        return (
            f"Equal contributions gave a sum of another {reason}: look at slots=, Slot(dtype=) and hooks of this slot."
        )
    if reason == "missing":
        return "It was not taken: the pass or the take ended before."
    return (
        "Equal contributions with equal keys gave another sum: a race (fanin.sim finds it), memory that was written in"
        " place meanwhile (debug=True finds it), another accumulate=, or other weights at the take."
    )


# fanin.compare


@names_nearest
def compare(
    a: str | os.PathLike[str] | Trace | RanksTrace,
    b: str | os.PathLike[str] | Trace | RanksTrace | None = None,
    *,
    ranks: bool = False,
    leaves: bool = False,
) -> Comparison:
    """Find the first contribution, sum or leaf in which two runs differ, in the order of their passes.

    A difference is where a node that got equal sums gave another gradient ("node attn.3 made it"), or where equal
    contributions gave another sum (another order, another dtype, a race). What comes after it mostly follows from it,
    and is not listed. Exact sums of equal contributions are equal in any order, and count as such. Names of nodes, and
    where there are several of one name their order of creation, say which nodes of the two runs are the same.

    Parameters
    ----------
    a, b : str, os.PathLike or Trace
        Traces that were recorded with `fanin.trace(digests=True)`, or the files that they were saved to; `b` is left
        out with `ranks`. A run of several ranks (`fanin.dist.gather_trace`) is compared rank by rank.
    ranks : bool
        Compare the ranks of `a` with each other: all should have computed the same.
    leaves : bool
        Compare only what leaves have after each pass: with `ranks`, where ranks have data of their own and share the
        sums of a reducer.

    Returns
    -------
    Comparison
        True where nothing differs; `difference` names node, slot, key and rank. `print` it.

    Raises
    ------
    ValueError
        For a trace without digests, a broken file, another version, lines that were lost, or runs of different graphs,
        with the file and the cause.
    OSError
        If a file cannot be read.

    >>> def run(c):
    ...     w = fanin.Leaf(np.zeros(2), name="w")
    ...     low = fanin.Node(lambda g: c * g, edges=[(w, 0)], name="low")
    ...     with fanin.trace(digests=True) as t:
    ...         fanin.backward([(low, 0, np.ones(2))])
    ...     return t
    >>> print(fanin.compare(run(2.0), run(2.0)))
    no difference: 5 digests of 1 pass are equal
    >>> fanin.compare(run(2.0), run(2.5)).difference.maker
    'low'
    """
    ranks, leaves = flag("compare: ranks", ranks), flag("compare: leaves", leaves)
    for what, given in (("a", a), ("b", b)):
        if not isinstance(given, str | os.PathLike | Trace | RanksTrace) and not (what == "b" and given is None):
            raise TypeError(f"compare: {what}: expected a trace or the path of one, got {type_of(given)}")
    if ranks != (b is None):
        raise ValueError(
            "compare: b: with ranks=True the ranks of one run are compared: leave b out"
            if ranks
            else "compare: b: expected a second trace, or ranks=True to compare the ranks of the first"
        )
    mine = runs_in(a, "compare: a")
    if ranks:
        if len(mine) < 2:
            raise ValueError(f"{called(a, 'a')}: it is of one rank: save that of fanin.dist.gather_trace")
        return result([([Named(f"rank {r}", run) for r, run in enumerate(mine)], None)], leaves)
    theirs = runs_in(b, "compare: b")
    names = called(a, "a"), called(b, "b")
    if len(mine) != len(theirs):
        raise ValueError(f"{names[0]} and {names[1]}: they are of {len(mine)} and {len(theirs)} ranks")
    pairs = []
    for rank, runs in enumerate(zip(mine, theirs, strict=True)):
        of = f" (rank {rank})" * (len(mine) > 1)
        pairs.append(([Named(f"{name}{of}", run) for name, run in zip(names, runs, strict=True)], rank if of else None))
    return result(pairs, leaves)


def called(given: object, what: str) -> str:
    return os.fspath(given) if isinstance(given, str | os.PathLike) else what


def result(groups: Sequence[tuple[list[Named], int | None]], leaves: bool) -> Comparison:
    """Of the groups that are compared among themselves, the earliest difference."""
    best: tuple[tuple[int, int], Difference] | None = None
    compared = unknown = passes = buffers = 0
    for runs, rank in groups:
        between_ranks = rank is None and runs[0].name == "rank 0"
        walk = Walk(runs, leaves, between_ranks)  # each rank sums buckets of its own
        found = walk.first()
        compared, unknown = compared + walk.compared, unknown + walk.unknown
        passes += sum(not name for name, _ in walk.places)
        buffers += sum(name != "" for name, _ in walk.places)
        if found is None or (best and best[0] <= found[:2]):
            continue
        record, odd, reason = found.record, found.odd, found.reason
        text = sentences(walk, found)
        made = record.source[0] if record.what == CONTRIBUTION and record.source != THE_CALLER else ""
        difference = Difference(
            record.node[0],
            record.slot,
            record.key if record.key >= 0 else None,
            odd[0] if between_ranks else rank,
            WHAT[record.what],
            reason,
            made,
            found.nth,
            text,
        )
        best = found[:2], difference
    return Comparison(best and best[1], compared, unknown, passes, buffers)
