"""The law of the ways: a list of contributions has one sum, whichever way brings it in.

`broken` runs one list by one way and returns what differs from the whole list's `Expected`, in sentences; `script`
writes the list and the way as a program; `report` makes the list smaller first.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

import fanin
from fanin import _core
from kit import c_api
from kit.lists import NAMESPACE, WIDE, Case, Term, array, case, compiled, helpers, smallest
from kit.values import added_up, bits, stored
from kit.ways import CONDITIONS, ENTRIES, Way, drawn, program, terms_of
from kit.world import World, world
from reference import whole
from reference.numbers import compact, expanded, name_of

# ---------------------------------------------------------------- 1. A list, brought in


@dataclass
class Outcome:
    """What one way made of a list."""

    result: Any = None
    stats: Any = None
    norm: float | None = None
    seen: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    written: list[int] = field(default_factory=list)  # referenced contributions whose memory changed
    shared: list[int] = field(default_factory=list)  # referenced contributions that share memory with the result
    same: int | None = None  # the contribution that came back as itself
    bytes_written: int = 0  # by the buffer, as its counters have it
    counters: dict[str, int] = field(default_factory=dict)
    explained: str = ""


def refused(call: Callable[[], Any]) -> None:
    """A call that raises where there is a sum, and changes nothing."""
    try:
        call()
    except (ValueError, TypeError, BufferError, OverflowError):
        return


def shown_now(call: Callable[[], Any]) -> Any:
    """A snapshot, or why there is none: what has come so far may have no sum, though the whole list has."""
    try:
        return call()
    except (ValueError, TypeError, OverflowError) as e:
        return e


def other(c: Case) -> Any:
    """A contribution of another pass, or of another slot."""
    w = c.wanted
    plain = "float32" if w.scale is None else "complex128"
    dtype = w.dtype or (w.accumulate if w.accumulate not in (None, "exact") else plain)
    return np.ones(w.shape or (2,), np.dtype(dtype))


def out_of(c: Case) -> Any:
    return array([1] * math.prod(c.shape), c.wanted.out, c.shape) if c.wanted.out else None


def run(c: Case, way: Way, place: Place | None = None, account: bool = False) -> Outcome:
    """Bring a list in; with `account` the buffer's counters and words are kept, too."""
    names = NAMESPACE | {
        "seen": [],
        "refused": refused,
        "shown_now": shown_now,
        "c_api": c_api,
        "result": None,
        "stats": None,
        "norm": None,
    }
    text = program(c, way)
    names["g"] = g = c.made() if "g[" in text else []
    names["make"] = [lambda x=x: x.make(g) for x in c.terms]
    names["other"] = lambda: place.contribution(other(c)) if place else other(c)
    names["out"] = out_of(c)
    if place:
        names |= {"placed": place.contribution, "s": place.streams}
        if names["out"] is not None:
            names["out"] = place.contribution(names["out"], place.streams[0])
    images = [image(x) for x in g]
    found = Outcome()
    with np.errstate(all="ignore"):
        try:
            for line in statements(text):
                exec(compiled(line), names)
        except Exception as e:
            found.error = e.with_traceback(None)
    if place:
        place.streams[0].synchronize()
    if way.hold != "copied":
        found.written = [i for i, x in enumerate(g) if image(x) != images[i]]
    if "buf" in names and ENTRIES[way.entry].python:
        found.bytes_written = names["buf"].counters["bytes_written"]
    if account and "buf" in names:
        found.counters, found.explained = dict(names["buf"].counters), names["buf"].explain(way.slot)
    result, found.stats, found.norm, found.seen = (names[n] for n in ("result", "stats", "norm", "seen"))
    if found.error is None and way.place == "host":
        found.same = next((i for i, x in enumerate(g) if x is result and x is not None), None)
        ours = memory_of(result)
        found.shared = [
            i for i, x in enumerate(g) if any(np.may_share_memory(a, b) for a in ours for b in memory_of(x))
        ]
    found.result = result
    return found


def statements(text: str) -> list[str]:
    """A program's statements: many are those of other programs, which are compiled already."""
    return re.sub(r"\n(?! )", "\0", text).split("\0")


def memory_of(x: Any) -> list[Any]:
    """The arrays of x, as ndarrays."""
    if isinstance(x, np.ndarray | np.generic):
        return [x] if isinstance(x, np.ndarray) else []
    if isinstance(x, fanin.Partial):
        return [x.values]
    if type(x).__name__ == "Tensor":
        if x.layout != torch_layout(x, "strided"):
            return []
        return [bytes_of(x)]
    parts = [*getattr(x, "parts", ()), *(getattr(x, n, None) for n in ("data", "indices", "indptr"))]
    return [
        y
        for part in parts
        for y in (memory_of(part) if type(part).__name__ == "Tensor" else [part])
        if isinstance(y, np.ndarray)
    ]


def torch_layout(x: Any, name: str) -> Any:
    import torch

    return getattr(torch, name)


def bytes_of(x: Any) -> Any:
    """The storage of a tensor, as an ndarray of bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


def image(x: Any) -> Any:
    return [a.tobytes() for a in memory_of(x)]


@dataclass
class Place:
    """A device on which lists are brought in."""

    world: World
    streams: list[Any]

    def contribution(self, x: Any, stream: Any = None) -> Any:
        """A contribution there, written by a kernel on this stream: a sum that does not wait for it races."""
        if x is None or isinstance(x, fanin.Zero | bool | int | float | complex | np.generic):
            return x
        if isinstance(x, fanin.Partial):
            return fanin.Partial(self.made(x.values, stream), x.at, x.shape)
        parts = sparse_parts(x)
        if parts is None:
            return self.made(x, stream)
        format, arrays, shape = parts
        return fanin.Sparse(format, tuple(self.made(np.asarray(a), stream) for a in arrays), shape)

    def made(self, x: Any, stream: Any) -> Any:
        axes = expanded(x)
        base = compact(x, axes)
        there = self.world.array(base)
        if stream is not None and x.size:
            self.world.launch(stream, lambda view: np.copyto(view, base), writes=[there])
        return there.broadcast_to(x.shape) if axes else there


def sparse_parts(x: Any) -> Any:
    from fanin.sim.machine import sparse_parts as parts

    return parts(x)


@contextmanager
def place(kind: str) -> Iterator[Place]:
    with world(kind, 1) as w:
        there = Place(w, [w.stream() for _ in range(3)])
        yield there
        there.streams.clear()


# ---------------------------------------------------------------- 2. A result, described


def numpy_of(x: Any) -> Any:
    """A tensor's or a device's numbers as an ndarray."""
    if isinstance(x, _core.Array):
        return x.numpy()
    if type(x).__name__ == "Tensor":
        import torch

        x = x.detach()
        if x.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            name = str(x.dtype).removeprefix("torch.")
            return x.contiguous().view(torch.int16 if x.itemsize == 2 else torch.int8).numpy().view(np.dtype(name))
        return x.resolve_conj().resolve_neg().numpy()
    return x


def entries_of(x: Any) -> Any:
    """(format, index -> bits in the order in which they are stored) of a sparse gradient, or None."""
    if type(x).__name__ == "Tensor":
        layout = str(x.layout).removeprefix("torch.")
        if layout == "strided":
            return None
        if layout == "sparse_coo":
            return entries_of(fanin.Sparse("coo", (x._indices().numpy(), numpy_of(x._values())), tuple(x.shape)))
        format = layout.removeprefix("sparse_")
        by_column = format in ("csc", "bsc")
        pointers = x.ccol_indices() if by_column else x.crow_indices()
        minor = x.row_indices() if by_column else x.col_indices()
        return entries_of(fanin.Sparse(format, (pointers.numpy(), minor.numpy(), numpy_of(x.values())), tuple(x.shape)))
    if isinstance(x, fanin.Sparse):
        return fanin.Sparse(x.format, tuple(map(numpy_of, x.parts)), x.shape)
    return x if hasattr(x, "format") and hasattr(x, "tocoo") else None


def described(x: Any) -> dict[str, Any]:
    """What a result shows, by name."""
    if x is None:
        return {"kind": "NoneType"}
    if type(x).__name__ == "Word":
        return {"kind": "Word", "bits": repr(x)}
    if isinstance(x, fanin.Zero):
        return {"kind": "Zero", "bits": (tuple(x.shape), str(np.dtype(x.dtype)))}
    found = {"kind": type(x).__name__}
    entries = entries_of(x)
    if entries is not None:
        numbers = entries.parts[-1] if hasattr(entries, "parts") else entries.data
        merged = {at: bits(np.asarray(value, numbers.dtype)).hex() for at, value in added_up(entries).items()}
        order = [at for at, _ in stored(entries)]
        found |= {"dtype": name_of(numbers.dtype), "shape": tuple(x.shape), "format": entries.format}
        return found | {"bits": merged, "order": order}
    dense = numpy_of(x)
    found |= {"dtype": name_of(np.asarray(dense).dtype), "shape": np.shape(dense), "bits": bits(dense).hex()}
    if isinstance(dense, np.ndarray) or type(x).__name__ in ("Array", "Tensor"):
        strides = x.strides if isinstance(x, _core.Array) else dense.strides
        if type(x).__name__ == "Tensor":
            strides = tuple(n * x.itemsize for n in x.stride())
        found["strides"] = steps(np.shape(dense), strides)
        if isinstance(dense, np.ndarray):
            found["writable"] = dense.flags.writeable
    return found


def steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of the axes that have more than one place; none of an empty array (D46)."""
    return () if 0 in shape else tuple(step for n, step in zip(shape, strides, strict=True) if n > 1)


# ---------------------------------------------------------------- 3. What must come out, and what differs


@dataclass
class Law:
    """What a list must give: by the description of the whole, worked out once for all ways."""

    case: Case
    expected: whole.Expected | None = None
    error: BaseException | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        c, w = self.case, self.case.wanted
        self.numbers = replace(c, terms=tuple(map(as_numpy, c.terms))).made()
        self.terms = terms_of(c)
        options = {"scale": w.scale, "writable": w.writable, "out": out_of(c), "weights": c.weights, "mean": w.mean}
        with np.errstate(all="ignore"):
            try:
                self.slot = fanin.Slot(shape=w.shape, dtype=w.dtype, accumulate=w.accumulate)
                self.expected = whole.expected(self.numbers, self.slot, **options)
            except Exception as e:
                self.error = e
            else:
                self.kind = kind_of(self.expected.value, self.terms)

    @cached_property
    def described(self) -> dict[str, Any]:
        """What the sum shows on the host."""
        assert self.expected is not None
        return described(self.expected.value)

    def named(self, kind: type[BaseException], places: Iterable[int]) -> bool:
        """Whether an error of this type may name a contribution at one of these places."""
        with np.errstate(all="ignore"):
            return whole.refused(self.numbers, self.slot, kind, places, self.case.weights)

    def again(self, i: int, j: int | None) -> bool:
        """Whether contributions i and j are one object."""
        return j is not None and self.numbers[i] is self.numbers[j]

    @cached_property
    def snapshot(self) -> whole.Expected | None:
        """Of the sum without the options of a take; None if that has none."""
        w = self.case.wanted
        plain = w.scale is None and w.out is None and not (w.writable or w.mean)
        if self.expected is not None and plain:
            return self.expected
        try:
            with np.errstate(all="ignore"):
                return whole.expected(self.numbers, self.slot, weights=self.case.weights)
        except Exception:
            return None


def as_numpy(x: Term) -> Term:
    return replace(x, family={"dense": "numpy", "sparse": "fanin"}[x.kind]) if x.family == "torch" else x


def kind_of(value: Any, terms: list[Term]) -> str:
    """D15: the kind of the first contribution that is an array."""
    first = next((x for x in terms if x.kind in ("dense", "sparse", "partial")), None)
    own = type(value).__name__
    if first is not None and first.family == "torch" and own in ("ndarray", "Sparse"):
        return "Tensor"
    return own


def broken(law: Law, way: Way, place: Place | None = None) -> list[str]:
    """What one way does otherwise than the list as a whole."""
    found = run(law.case, way, place)
    wrong = [f"contribution {i}, which other code holds, was written" for i in found.written]
    if found.error is not None:
        return wrong + error_differs(law, way, found.error)
    if law.expected is None:
        return [*wrong, f"expected {law.error!r}, got {shown(found.result)}"]
    expected = law.expected
    wrong += differences(law, way, expected, found.result, found)
    if found.seen:
        last = law.snapshot
        if last is not None:
            wrong += [f"the last snapshot: {x}" for x in snapshot_differs(last, found.seen[-1], way)]
    if found.stats is not None or (law.case.wanted.stats and way.entry != "backward"):
        wrong += figures_differ(expected.figures, found)
        wrong += bad_key_differs(expected.figures, found.stats, way)
    return wrong


def roads_differ(c: Case, way: Way) -> list[str]:
    """How the path of plain entries (D27) and the general one, which a trace takes, differ in counts, messages and
    errors; the budget is infinite, as when a finite one is passed is each road's own affair.
    """
    way = replace(way, budget="inf", look="nothing", life="first" if way.life == "beside" else way.life)
    short, general = run(c, way, account=True), run(c, replace(way, look="trace"), account=True)
    pairs = {
        "counters": (short.counters, general.counters),
        "explain": (short.explained, general.explained),
        "error": (repr(short.error), repr(general.error)),
        "same": (short.same, general.same),
        "result": (described(short.result), described(general.result)),
    }
    return [f"{name}: by the short road {a}, by the general one {b}" for name, (a, b) in pairs.items() if a != b]


def error_differs(law: Law, way: Way, e: BaseException) -> list[str]:
    what = f"{type(e).__name__}: {e}"
    if isinstance(e, c_api.Failed):
        e = as_python(e)
    if law.expected is not None:
        return [f"expected {shown(law.expected.value)}, got {what}"]
    key = getattr(e, "key", None)
    named = key is not None and way.keys is not None and way.entry != "backward"
    places = [i for i, k in enumerate(way.keys or ()) if k == key] if named else range(len(law.terms))
    in_order = places == [getattr(law.error, "place", None)]  # the one that is refused in the order of keys
    allowed = type(e) is type(law.error) and (in_order or not named)
    if not allowed and not law.named(type(e), places):
        if type(e) is type(law.error):
            return [f"the error names key {key}, which is not the one that cannot be added: {what}"]
        return [f"expected {law.error!r}, got {what}"]
    slot = getattr(e, "slot", None)
    in_buffer = not ENTRIES[way.entry].whole
    by_an_add = way.keys is not None and hasattr(law.error, "place")
    if in_buffer and (slot != way.slot or (by_an_add and key is None)):
        return [f"the error names slot {slot}, key {key} in the place of slot {way.slot}: {what}"]
    return []


def as_python(e: c_api.Failed) -> BaseException:
    made = c_api.exception_of(e)
    for name in ("slot", "key"):
        if getattr(e, name) >= 0:
            setattr(made, name, getattr(e, name))
    return made


def shown(x: Any) -> str:
    if isinstance(x, fanin.Sparse):
        return f"Sparse({x.format!r}, {tuple(numpy_of(part).tolist() for part in x.parts)}, {x.shape})"
    return f"{type(x).__name__} {numpy_of(x)!r}"


def differences(law: Law, way: Way, expected: whole.Expected, result: Any, found: Outcome) -> list[str]:
    wrong = []
    mine = dict(law.described) if way.place == "host" else described(at_place(expected, way))
    theirs = described(result)
    alone = len([x for x in law.terms if x.kind not in ("none", "zero")]) == 1
    row = ENTRIES[way.entry]
    if way.place != "host":
        mine["kind"] = {"Zero": "Zero", "NoneType": "NoneType"}.get(
            mine["kind"], "Sparse" if "order" in mine else "Array"
        )
    elif row.python and not way.entry.startswith("target"):
        mine["kind"] = law.kind
        if law.case.wanted.out and expected.value is not None:
            mine["kind"] = "ndarray"
        if theirs["kind"] == "Sub" and (way.hold in ("donated", "alone") or mine["kind"] == "Sub"):
            mine["kind"] = "Sub"  # in the memory that was given away, or the very contribution
        elif mine["kind"] == "Sub":
            mine["kind"] = "ndarray"
    else:
        mine["kind"] = theirs["kind"]
    copied = way.hold == "copied" or not row.same or way.place != "host" or law.case.wanted.writable
    if alone and (copied or expected.same is None):
        mine |= as_merged(expected, theirs)
    for name in ("kind", "dtype", "shape", "format", "bits"):
        if mine.get(name) != theirs.get(name):
            wrong.append(f"{name}: expected {mine.get(name)}, got {theirs.get(name)}")
    if wrong:
        return [*wrong, f"expected {shown(expected.value)}, got {shown(result)}"]
    wrong += memory_differs(law, way, expected, theirs, found)
    wrong += strides_differ(law, way, expected, theirs)
    if stays_expanded(law.case, way) and found.bytes_written >= WIDE // 2:
        most = f"fewer than {WIDE // 2}, as expanded axes are not written out"
        wrong.append(f"bytes written: expected {most}, got {found.bytes_written}")
    if mine.get("order") != theirs.get("order"):
        wrong.append(f"places of the stored entries: expected {mine['order']}, got {theirs['order']}")
    return wrong


def as_merged(expected: whole.Expected, theirs: dict[str, Any]) -> dict[str, Any]:
    """A copy of one sparse contribution may have its entries as they are, or merged and in order."""
    merged = described(expected.merged) if expected.merged is not None else {}
    same = "order" in theirs and merged.get("order") == theirs["order"]
    return {name: merged[name] for name in ("bits", "order")} if same else {}


def stays_expanded(c: Case, way: Way) -> bool:
    """Whether no step of the way needs the elements of long expanded axes one by one (A13)."""
    w = c.wanted
    lent = way.entry.startswith("target")
    more = way.look == "snapshots" or way.life != "first"
    wide = [x for x in c.terms if x.layout == "expanded" and WIDE in x.shape and all(n < WIDE for n in x.base)]
    if any(x.shape != c.shape and WIDE in c.shape for x in wide):
        return False  # what is summed to a long shape is written there
    others = [x for x in c.terms if x.kind not in ("none", "zero", "again") and x not in wide]
    return bool(wide) and not others and not (lent or more) and not w.writable and w.out is None


def memory_differs(law: Law, way: Way, expected: whole.Expected, theirs: dict[str, Any], found: Outcome) -> list[str]:
    """A14: the very contribution, or memory of its own; A13, D16: its strides."""
    row, w = ENTRIES[way.entry], law.case.wanted
    if not row.python or way.place != "host" or way.hold not in ("kept", "copied") or way.entry.startswith("target"):
        return []
    wrong = []
    one = None if expected.same is None else law.terms[expected.same].kind
    handed = expected.same if way.hold == "kept" or one in ("object", "zero") else None
    if not row.same:
        pass
    elif one in ("dense", "sparse", "object", "zero"):
        if found.same != handed and (handed is None or not law.again(handed, found.same)):
            wrong.append(f"same: expected contribution {handed} itself, got {found.same}")
    elif one is None and found.same is not None and ("strides" in theirs or "order" in theirs):
        wrong.append(f"same: expected an object of its own, got contribution {found.same} itself")
    if found.shared and found.same is None and "order" not in theirs:
        wrong.append(f"memory: the result is in that of contribution {found.shared[0]}, which other code holds")
    if w.writable and theirs.get("writable") is False:
        wrong.append("writable: expected memory that can be written")
    return wrong


def strides_differ(law: Law, way: Way, expected: whole.Expected, theirs: dict[str, Any]) -> list[str]:
    """A13, D16: a sum's own memory has the axes of the first array, and none where all merely repeat themselves."""
    python = ENTRIES[way.entry].python and not way.entry.startswith("target")
    own = python and way.hold in ("kept", "copied") and not law.case.wanted.out
    if not own or "strides" not in theirs or expected.same is not None or expected.strides is None:
        return []
    mine = steps(theirs["shape"], expected.strides)
    if 0 in mine and ENTRIES[way.entry].written:
        mine = steps(theirs["shape"], np.empty(theirs["shape"], theirs["dtype"]).strides)
    return [] if mine == theirs["strides"] else [f"strides: expected {mine}, got {theirs['strides']}"]


def at_place(expected: whole.Expected, way: Way) -> Any:
    """A device has no numbers of Python's."""
    numbers = way.place != "host" and isinstance(expected.value, bool | int | float | complex | np.generic)
    return np.asarray(expected.value).astype(expected.dtype) if numbers else expected.value


def snapshot_differs(expected: whole.Expected, seen: Any, way: Way) -> list[str]:
    if isinstance(seen, Exception):
        return [f"expected {shown(expected.value)}, got {seen!r}"]
    mine, theirs = described(at_place(expected, way)), described(seen)
    mine |= as_merged(expected, theirs)
    return [
        f"{name}: expected {mine.get(name)}, got {theirs.get(name)}"
        for name in ("dtype", "shape", "format", "bits")
        if mine.get(name) != theirs.get(name)
    ]


def bad_key_differs(expected: whole.Figures | None, s: Any, way: Way) -> list[str]:
    """D35: the key of the first contribution with an inf or NaN, if the sum has one."""
    if expected is None or not hasattr(s, "first_bad_key"):
        return []
    i = expected.first_bad
    key = None if i is None or way.keys is None else way.keys[i]
    got = None if s.first_bad_key == -1 else s.first_bad_key  # as C has it
    return [] if got == key else [f"first_bad_key: expected {key}, got {got}"]


def figures_differ(expected: whole.Figures | None, found: Outcome) -> list[str]:
    s = found.stats
    if expected is None:
        undefined = s is None or not getattr(s, "defined", True)
        return [] if undefined else [f"statistics of no sum: {s}"]
    if s is None:
        return ["no statistics"]
    wrong = []
    if s.count not in expected.count:
        wrong.append(f"count: expected {' or '.join(map(str, expected.count))}, got {s.count}")
    if s.nonfinite != expected.nonfinite:
        wrong.append(f"nonfinite: expected {expected.nonfinite}, got {s.nonfinite}")
    if not near(s.absmax, expected.absmax):
        wrong.append(f"absmax: expected {expected.absmax!r}, got {s.absmax!r}")
    if 1e-290 < expected.sumsq < math.inf and not near(s.sumsq, expected.sumsq):  # which has no range beyond (D41)
        wrong.append(f"sumsq: expected {expected.sumsq!r}, got {s.sumsq!r}")
    norm = math.inf if expected.nonfinite else expected.norm
    if hasattr(s, "norm") and not near(s.norm, expected.norm):
        wrong.append(f"norm: expected {expected.norm!r}, got {s.norm!r}")
    if found.norm is not None and not near(found.norm, norm):
        wrong.append(f"global_norm: expected {norm!r}, got {found.norm!r}")
    return wrong


def near(a: float, b: float) -> bool:
    """To twelve digits, or to the last places of the smallest numbers."""
    return a == b or math.isclose(a, b, rel_tol=1e-12, abs_tol=2e-323)


# ---------------------------------------------------------------- 4. Many lists


def script(c: Case, way: Way) -> str:
    """A program that a person can run: the list, and the way."""
    makes = "\n".join(f"    lambda: {x.text()}," for x in c.terms)
    text = program(c, way)
    lines = [f"make = [\n{makes}\n]"]
    if "g[" in text + makes:
        lines.append("g: list = []\nfor one in make:\n    g.append(one())")
    lines.append("seen: list = []" if "seen." in text else "")
    if "other()" in text:
        o = other(c)
        lines.append(f"other = lambda: {'placed' if way.place != 'host' else ''}(np.ones({o.shape}, {o.dtype.name!r}))")
    if c.wanted.out:
        lines.append(f"out = array({[1] * math.prod(c.shape)}, {c.wanted.out!r}, {c.shape})")
    if way.place != "host":
        lines.insert(
            0,
            f"from kit.law import place\nat = place({way.place!r}).__enter__()\n"
            "placed, s = at.contribution, at.streams",
        )
    if "c_api." in text:
        lines.insert(0, "from kit import c_api")
    if "out" in text and way.place != "host" and c.wanted.out:
        lines.append("out = placed(out)")
    if "refused(" in text or "shown_now(" in text:
        lines.insert(0, "from kit.law import refused, shown_now")
    body = "\n".join(x for x in lines if x) + "\n" + text + "\nprint(repr(result))"
    body += "\nprint(stats)" if "stats" in text else ""
    return helpers(makes + body) + "\n\n" + body


def report(law: Law, way: Way, wrong: list[str], place: Place | None = None) -> str:
    """The failing list made smaller, as a program, and what is wrong with it."""
    subject = [first_word(x) for x in wrong]

    def fails(c: Case) -> bool:
        for less in ways_like(way, len(c.terms)):
            if ENTRIES[way.entry].fits(c) and any(first_word(x) in subject for x in broken(Law(c), less, place)):
                return True
        return False

    small = smallest(law.case, fails)
    for less in ways_like(way, len(small.terms)):
        said = broken(Law(small), less, place)
        if any(first_word(x) in subject for x in said):
            return f"{less}\n  " + "\n  ".join(said) + f"\n# ----\n{script(small, less)}"
    return f"{way}\n  " + "\n  ".join(wrong) + f"\n# ----\n{script(law.case, way)}"


def first_word(sentence: str) -> str:
    return re.split(r"[ :,]", sentence.removeprefix("the last snapshot: "))[0]


def ways_like(way: Way, n: int) -> Iterator[Way]:
    """The same way for a list of n: in the orders that are left, the plain way first."""
    kept = [k for k in way.order if k < n]
    orders = [tuple(kept)]
    if ENTRIES[way.entry].keyed:
        orders = [tuple(range(n)), tuple(kept), *(tuple(np.roll(range(n), k).tolist()) for k in range(1, n))]
    for plain in (True, False):
        for order in dict.fromkeys(orders):
            keys = tuple(range(n)) if way.keys else None
            less = replace(way, order=order, keys=keys)
            yield replace(less, look="nothing", life="first", one=False) if plain else less


@dataclass
class Tally:
    """What was met: lists by outcome, and cells of (row, flavour, option)."""

    outcomes: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    orders: Counter[tuple[int, ...]] = field(default_factory=Counter)  # of arrival, of three keyed ones at most

    def meet(self, law: Law, way: Way) -> None:
        self.outcomes["summed" if law.expected is not None else "refused"] += 1
        self.kinds[law.kind] += 1
        for word in law.case.wanted.words():
            self.cells[way.entry, law.case.flavour, word] += 1
        self.marks.update([f"budget {way.budget}", way.hold, way.look, way.life])
        if way.keys and len(way.order) <= 3:
            self.orders[way.order] += 1


def hold(
    seed: int, lists: range, kind: str = "host", ways: int = 4, families: tuple[str, ...] = ("numpy",),
    found: Callable[[str], None] | None = None, flavours: tuple[str, ...] = (), shrink: bool = True,
) -> Tally:  # fmt: skip
    """Check the law: `lists` random lists by some ways each. A list that breaks it raises, or is passed to `found`."""
    print(f"seed {seed}")
    tally = Tally()
    at: Place | None = None
    entered: Any = None
    try:
        for n in lists:
            if kind != "host" and (at is None or n % 500 == 0):
                if entered is not None:
                    entered.__exit__(None, None, None)
                entered = place(kind)
                at = entered.__enter__()
            draw = random.Random(f"{seed} {n}")
            c = case(draw, families, flavours)
            while kind != "host" and not on_devices(c):
                c = case(draw, families, flavours)
            law = Law(c)
            for way in some_ways(draw, c, kind, ways, tally):
                wrong = broken(law, way, at)
                tally.meet(law, way)
                if wrong:
                    if at is not None:
                        at.world.failed = True  # races of a list that is reported are not judged once more
                    said = report(law, way, wrong, at) if shrink else f"{way}: {wrong}"
                    text = f"seed {seed}, list {n}: {said}"
                    if found is None:
                        raise AssertionError(text)
                    found(text)
                    break
    finally:
        if entered is not None:
            entered.__exit__(None, None, None)
    return tally


def some_ways(draw: random.Random, c: Case, kind: str, count: int, tally: Tally) -> list[Way]:
    """By the row that fits and was met least for such a list; others at random."""
    fits = {f: f(c) for f in CONDITIONS}
    rows = [n for n, row in ENTRIES.items() if kind in row.places and fits[row.fits]]
    words = c.wanted.words()
    least = min(rows, key=lambda n: min(tally.cells[n, c.flavour, word] for word in words))
    return [drawn(draw, c, kind, n) for n in (least, *draw.choices(rows, k=count - 1))]


def on_devices(c: Case) -> bool:
    """Objects have no parts that can be compared; exact sums of sparse gradients are the host's (D36)."""
    kinds = {x.kind for x in c.terms}
    return "object" not in kinds and not (c.wanted.accumulate == "exact" and "sparse" in kinds)
