"""The digests of a trace, in an order that two runs share, and as JSON in its file (rules G2 to G4).

A run is a list of units: backward passes, and buffers that were filled and taken outside of passes. A unit has its
records in the order in which a reader looks for the first difference: the gradients of the roots; then, of each node in
the order in which nodes ran, its sums, what a leaf has, and the gradients that it gave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .line import Line

__tracebackhide__ = True  # no frames of ours in reports of pytest

VERSION = 1
CALLER = -1  #: the node of a root's gradient, as a line has it
CONTRIBUTION, SUM, HOOKED, LEAF = "c", "s", "h", "l"

#: A node of a pass: its name, and which of the nodes of that name it is, the one that was made last first.
Place = tuple[str, int]
THE_CALLER: Place = ("", 0)


class Record(NamedTuple):
    """The digest of a contribution, a sum or a leaf."""

    what: str
    source: Place  #: Who gave a contribution; of others the node itself
    edge: int  #: Of a contribution: the edge of its node, or the root
    node: Place  #: Whose slot it is
    slot: int
    key: int  #: -1: none
    digest: int  #: 0: none
    text: str  #: "float32 (3, 4)", and why it has no digest

    @property
    def subject(self) -> tuple[Any, ...]:
        """What is the same in two runs."""
        if self.what == CONTRIBUTION:
            return self.what, self.source, self.edge, self.node, self.slot
        return self.what, self.node, self.slot

    @property
    def kind(self) -> str:
        """Dtype and shape, without the reason for a missing digest."""
        return self.text.partition(": ")[0]

    @property
    def is_known(self) -> bool:
        """Whether two such records can be compared."""
        return self.digest != 0 or self.text == "None"


@dataclass(frozen=True)
class Unit:
    """A pass, or a buffer between two takes."""

    name: str  #: "" for a pass
    nodes: tuple[Place, ...]  #: In the order in which they ran; of a buffer none
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Run:
    """The units of one thread's or one rank's trace."""

    units: tuple[Unit, ...]
    dropped: int = 0


# From lines


def run_of(lines: Sequence[Line], dropped: int = 0) -> Run:
    """The digests of a trace's lines."""
    passes: dict[int, list[Line]] = {}
    buffers: dict[int, list[list[Line]]] = {}
    first: list[tuple[int, Unit]] = []  # units, each with the time of its first line
    for line in lines:
        if line.kind == "node" or (line.kind == "digest" and line.pass_number):
            passes.setdefault(line.pass_number, []).append(line)
        elif line.kind == "digest":
            lives = buffers.setdefault(line.buffer, [[]])
            if line.how == CONTRIBUTION and lives[-1] and lives[-1][-1].how == SUM:
                lives.append([])
            lives[-1].append(line)
    for mine in passes.values():
        if any(line.kind == "digest" for line in mine):
            first.append((mine[0].host_ns, pass_of(mine)))
    names: dict[int, dict[int, str]] = {}  # of each buffer those of its slots
    for line in lines:
        if line.kind in ("add", "take"):
            names.setdefault(line.buffer, {})[line.slot] = line.label
    for number, lives in buffers.items():
        for life in lives:
            first.append((life[0].host_ns, buffer_of(life, names.get(number, {}))))
    return Run(tuple(unit for _, unit in sorted(first, key=lambda pair: pair[0])), dropped)


def pass_of(lines: Sequence[Line]) -> Unit:
    """A pass, of its lines of nodes and digests."""
    ran = list(dict.fromkeys(line.node for line in lines if line.kind == "node"))
    digests = [line for line in lines if line.kind == "digest"]
    begun = [n for line in digests for n in (line.node, line.to) if n != CALLER]
    ran = list(dict.fromkeys([*ran, *begun]))  # the pass ended before those that are begun alone
    places = place_all({line.node: name_of(line) for line in lines if line.kind == "node"}, ran)
    order = {n: i for i, n in enumerate(ran)}
    made = []
    for line in digests:
        source = THE_CALLER if line.node == CALLER else places[line.node]
        record = Record(line.how, source, line.count, places[line.to], line.slot, line.key, line.digest, line.label)
        step = -1 if line.node == CALLER else order[line.node]
        late = "shlc".index(line.how)
        made.append(((step, late, line.count if line.how == CONTRIBUTION else line.slot), record))
    records = tuple(record for _, record in sorted(made, key=lambda pair: pair[0]))
    return Unit("", tuple(places[n] for n in ran), records)


def name_of(line: Line) -> str:
    """Of the line of a node. The number of one that was given no name is no part of it."""
    return line.label.removesuffix(f" {line.node}") if line.in_place else line.label


def place_all(names: Mapping[int, str], numbers: Iterable[int]) -> dict[int, Place]:
    """The places of nodes: of those of one name the one that was made last is first."""
    count: Counter[str] = Counter()
    places: dict[int, Place] = {}
    for n in sorted(numbers, reverse=True):
        name = names.get(n, "")
        places[n] = name, count[name]
        count[name] += 1
    return places


def buffer_of(lines: Sequence[Line], names: Mapping[int, str]) -> Unit:
    """What a buffer got until its takes. Contributions without keys are numbered as they arrived."""
    records, arrived = [], Counter[int]()
    for line in lines:
        node = (names.get(line.slot, "buffer"), 0)
        edge = line.key
        if line.how == CONTRIBUTION and line.key < 0:
            edge = arrived[line.slot]
            arrived[line.slot] += 1
        records.append(Record(line.how, THE_CALLER, edge, node, line.slot, line.key, line.digest, line.label))
    late = sorted(records, key=lambda r: r.what == SUM)
    return Unit(names[min(names)] if names else "buffer", (), tuple(late))


# JSON


def as_json(runs: Sequence[Run]) -> dict[str, object]:
    """What a trace's file has of the digests: of each rank its units."""
    return {
        "version": VERSION,
        "ranks": [{"dropped": run.dropped, "units": [unit_json(unit) for unit in run.units]} for run in runs],
    }


def unit_json(unit: Unit) -> dict[str, object]:
    records = [[r.what, *r.source, r.edge, *r.node, r.slot, r.key, f"{r.digest:016x}", r.text] for r in unit.records]
    return {"name": unit.name, "nodes": [list(place) for place in unit.nodes], "records": records}


def from_json(found: object) -> list[Run]:
    """The runs that `as_json` wrote. ValueError says what is wrong."""
    whole = checked(found, dict, "digests")
    version = whole.get("version")
    if version != VERSION:
        raise ValueError(f"its digests are of version {version!r}, and this fanin reads version {VERSION}")
    runs = []
    for i, rank in enumerate(checked(whole.get("ranks"), list, "ranks")):
        where = f"ranks[{i}]"
        rank = checked(rank, dict, where)
        units = checked(rank.get("units"), list, f"{where}.units")
        made = tuple(unit_from(unit, f"{where}.units[{j}]") for j, unit in enumerate(units))
        runs.append(Run(made, natural(rank.get("dropped"), f"{where}.dropped")))
    return runs


def unit_from(found: object, where: str) -> Unit:
    unit = checked(found, dict, where)
    name = checked(unit.get("name"), str, f"{where}.name")
    nodes = [
        place_from(place, f"{where}.nodes[{i}]")
        for i, place in enumerate(checked(unit.get("nodes"), list, f"{where}.nodes"))
    ]
    records = [
        record_from(record, f"{where}.records[{i}]")
        for i, record in enumerate(checked(unit.get("records"), list, f"{where}.records"))
    ]
    known = {THE_CALLER, *nodes}
    for i, record in enumerate(records):
        if nodes and not {record.source, record.node} <= known:
            raise ValueError(f"{where}.records[{i}]: its node is not among the nodes of the pass")
    return Unit(name, tuple(nodes), tuple(records))


def place_from(found: object, where: str) -> Place:
    parts = checked(found, list, where)
    if len(parts) != 2:
        raise ValueError(f"{where}: expected a name and a number, got {len(parts)} values")
    return checked(parts[0], str, where), natural(parts[1], where)


def record_from(found: object, where: str) -> Record:
    parts = checked(found, list, where)
    if len(parts) != 10:
        raise ValueError(f"{where}: expected 10 values, got {len(parts)}")
    what, source, source_at, edge, node, node_at, slot, key, digest, text = parts
    if what not in (CONTRIBUTION, SUM, HOOKED, LEAF):
        raise ValueError(f"{where}: expected a contribution, a sum or a leaf, got {what!r}")
    try:
        bits = int(checked(digest, str, where), 16)
    except ValueError:
        bits = -1
    if not 0 <= bits < 1 << 64:
        raise ValueError(f"{where}: expected a digest of 16 hexadecimal digits, got {digest!r}")
    return Record(
        what,
        place_from([source, source_at], where),
        integer(edge, where),
        place_from([node, node_at], where),
        natural(slot, where),
        integer(key, where),
        bits,
        checked(text, str, where),
    )


def checked(found: object, kind: type, where: str) -> Any:
    """The value, if it is of the kind."""
    if not isinstance(found, kind):
        raise ValueError(f"{where}: expected a {kind.__name__}, got {type(found).__name__}")
    return found


def integer(found: object, where: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or abs(found) >= 1 << 63:
        raise ValueError(f"{where}: expected an integer, got {found!r}")
    return found


def natural(found: object, where: str) -> int:
    if integer(found, where) < 0:
        raise ValueError(f"{where}: expected a number from 0 on, got {found!r}")
    return integer(found, where)
