"""Random programs of views and writes, and the world of arrays that they run on; made anew from a seed as often as
needed.

A program is a list of numbers; each step reads the state of the world and takes the numbers as choices. So the same
numbers do the same in two equal worlds, any list of numbers is a program, and a shorter list is a smaller one.
"""

from __future__ import annotations

import ctypes
import functools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import fanin
from fanin._core import address

RECORD = np.dtype([("a", "i2"), ("b", ">f4"), ("c", "u1", (2,))])
DTYPES = [np.dtype(d) for d in ("f8", "f4", "i4", "u1", ">f8", ">i2", "c8", "?", "S3", "M8[s]", "f2")] + [
    RECORD,
    np.dtype("V0"),
]
NAMES = {d: f"dtype {d}" for d in DTYPES}
BLOCK = 96


@dataclass
class World:
    """Storages (all the memory there is), the arrays on them, and the arguments, in which arrays come twice or in
    containers.
    """

    storages: list[Any]
    arrays: list[np.ndarray[Any, Any]]
    args: tuple[Any, ...]
    kinds: set[str] = field(default_factory=set)

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, Any]]:
        """Of each storage its address, its size, and an array that is all of it."""
        whole = [s if isinstance(s, np.ndarray) else np.frombuffer(s, "u1") for s in self.storages]
        return [(address(m), m.nbytes, m) for m in whole]

    def memory(self) -> list[bytes]:
        return [bytes(s) if isinstance(s, (bytes, bytearray)) else s.tobytes() for s in self.storages]


def noise(draw: random.Random, size: int) -> Any:
    return np.frombuffer(draw.randbytes(size), "u1").copy()


def view_of(storage: Any, draw: random.Random, kinds: set[str]) -> np.ndarray[Any, Any]:
    """A random view of a storage of bytes."""
    dtype = draw.choice(DTYPES[:6] * 3 + DTYPES)
    size = max(dtype.itemsize, 1)
    ndim = draw.choice([0, 1, 1, 1, 2, 2, 3])
    shape, strides, low, high = [], [], 0, 0
    for _ in range(ndim):
        n = draw.choice([1, 2, 3, 3, 4] if draw.random() < 0.96 else [0])
        stride = size * draw.choice([1, 1, 2, 3, 5, -1, -2]) if draw.random() < 0.9 else draw.choice([0, 0, 1, 3])
        if n and (n - 1) * abs(stride) + high - low + size > len(storage):
            n = 1
        reach = (n - 1) * stride if n else 0
        low, high = low + min(reach, 0), high + max(reach, 0)
        shape.append(n)
        strides.append(stride)
    room = len(storage) - size - (high - low)
    start = -low + (
        draw.randrange(room + 1) if draw.random() < 0.3 else draw.randrange(0, room + 1, size) if room > 0 else 0
    )
    view = np.ndarray(tuple(shape), dtype, buffer=storage, offset=start, strides=tuple(strides))
    kinds.add(NAMES[dtype])
    kinds |= {"0-d"} if not shape else {"empty"} if 0 in shape else set()
    kinds |= {"reversed"} if any(s < 0 for s in strides) else set()
    kinds |= {"zero stride"} if any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True)) else set()
    return view


def world(layout: int, data: int) -> World:
    """The world of two seeds: how arrays lie, and what is in them."""
    draw, fill = random.Random(layout), random.Random(data)
    storages: list[Any] = []
    arrays: list[np.ndarray[Any, Any]] = []
    kinds: set[str] = set()
    for _ in range(draw.choice([1, 1, 2])):
        memory = noise(fill, BLOCK)
        storages.append(memory)
        for _ in range(draw.choice([1, 2, 2, 3])):
            arrays.append(view_of(memory, draw, kinds))
    if draw.random() < 0.5:  # arrays that own their memory, and views of them
        shape = draw.choice([(6,), (2, 3), (4, 1), (2, 2, 2), ()])
        own = np.zeros(shape, draw.choice(DTYPES[:6]), order=draw.choice("CF"))
        storages.append(own)
        own.reshape(-1, order="A")[...] = noise(fill, own.size).reshape(-1)
        arrays.append(own)
        kinds.add("owner")
        if own.ndim and draw.random() < 0.5:
            arrays.append(own[::-1] if draw.random() < 0.5 else own[1:])
    if draw.random() < 0.1:
        constant = fill.randbytes(16)
        storages.append(constant)
        arrays.append(np.frombuffer(constant, draw.choice(["u1", "f4", "i8"])))
        kinds.add("bytes")
    if draw.random() < 0.2:
        a = draw.choice(arrays)
        arrays.append(np.broadcast_to(a, (2, *a.shape)))
        kinds.add("broadcast")
    if draw.random() < 0.2:
        a = draw.choice(arrays)
        arrays.append(a.view())
        kinds.add("twin")
    if draw.random() < 0.2:
        draw.choice(arrays).flags.writeable = False
        kinds.add("read-only")
    args: list[Any] = list(arrays)
    if draw.random() < 0.25:
        args.append(draw.choice(arrays))
        kinds.add("duplicate")
    draw.shuffle(args)
    if draw.random() < 0.3:
        args.insert(draw.randrange(len(args) + 1), draw.choice([3, None, "word", 2.5]))
    if draw.random() < 0.2:
        at = draw.randrange(len(args))
        args[at:] = [draw.choice([list, tuple, lambda x: dict(zip("pqrstuvwxyz", x, strict=False))])(args[at:])]
        kinds.add("container")
    return World(storages, arrays, tuple(args), kinds)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from leaves(item)
    else:
        yield tree


class Stop(Exception):
    """What a program raises midway."""


class Choices:
    """Numbers taken one after the other; 0 when they are used up."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = iter(numbers)

    def of(self, n: int) -> int:
        return next(self.numbers, 0) % n

    def among(self, things: Any) -> Any:
        return things[self.of(len(things))]


def slices_of(x: Any, c: Choices) -> Any:
    """An index that gives a view."""
    if x.ndim == 0:
        return ()
    words = []
    for n in x.shape[: 1 + c.of(2)]:
        words.append(
            c.among(
                [
                    slice(None),
                    slice(1, None),
                    slice(None, None, -1),
                    slice(0, max(n - 1, 0)),
                    slice(None, None, 2),
                    slice(n, n),
                    None if n == 0 else c.of(n),
                ]
            )
        )
    return tuple(w for w in words if w is not None)


def same_size(dtype: Any) -> str:
    return {1: "u1", 2: "i2", 4: "f4", 8: "i8"}.get(dtype.itemsize, dtype)


#: Functions that mostly return their argument itself.
ITSELF = (
    np.asarray,
    np.ascontiguousarray,
    np.atleast_1d,
    np.squeeze,
    np.real,
    lambda x: np.array(x, copy=None),
    lambda x: x.conj(),
    lambda x: x.astype(x.dtype, copy=False),
)


VIEWS: dict[str, Callable[[Any, Choices], Any]] = {
    "slice": lambda x, c: x[slices_of(x, c)],
    "slice, as an array": lambda x, c: x[(*slices_of(x, c), ...)],
    "transpose": lambda x, c: x.T,
    "reshape": lambda x, c: x.reshape(-1),
    "ravel": lambda x, c: np.ravel(x),
    "expand": lambda x, c: np.broadcast_to(x, (2, *x.shape)),
    "stride 0": lambda x, c: as_strided(x, (2, *x.shape), (0, *x.strides)),
    "other dtype": lambda x, c: x.view(same_size(x.dtype)),
    "bytes": lambda x, c: x.view("u1") if x.ndim and x.flags.c_contiguous else x[...],
    "field": lambda x, c: x[c.among(x.dtype.names)] if x.dtype.names else x.real,
    "newaxis": lambda x, c: x[None],
    "asarray": lambda x, c: np.asarray(x)[...],
    "frombuffer": lambda x, c: (
        np.frombuffer(x, "u1")
        if x.size and x.flags.c_contiguous and x.dtype.kind in "fiu" and x.dtype.isnative
        else x[...]
    ),
    "diagonal": lambda x, c: x.diagonal() if x.ndim > 1 else x[...],
    "flip": lambda x, c: np.flip(x),
    "copy": lambda x, c: x.copy(),
    "zeros": lambda x, c: np.zeros((2, 3)),
    "zeros like": lambda x, c: np.zeros_like(x),
    "fancy": lambda x, c: x[[0]] if x.ndim and len(x) else x.copy(),
    "parts of a new one": lambda x, c: (lambda t: [t[1:], t[: c.of(3)]])(np.arange(4.0)),
    "itself": lambda x, c: x,
    "itself, by a function": lambda x, c: c.among(ITSELF)(x),
}


def halved(x: Any, c: Choices) -> None:
    if x.dtype.kind in "fiuc":
        np.add(x, x.dtype.type(c.of(5) + 1), out=x, casting="unsafe")
    else:
        x[...] = x[::-1] if x.ndim else x


def by_memory(x: Any, c: Choices) -> None:
    if (
        x.size
        and x.flags.c_contiguous
        and x.flags.writeable
        and x.dtype.itemsize
        and x.dtype.kind in "fiu"
        and x.dtype.isnative
    ):
        memoryview(x).cast("B")[c.of(x.nbytes)] = c.of(256)


def by_c(x: Any, c: Choices) -> None:
    if x.size and x.flags.writeable and x.dtype.itemsize:
        ctypes.memset(x.ctypes.data, c.of(256), 1)


def assigned(x: Any, c: Choices) -> None:
    x[slices_of(x, c)] = (
        np.zeros((), x.dtype)
        if c.of(3)
        else (
            np.frombuffer(bytes(range(1, 1 + x.dtype.itemsize)) or b"", x.dtype)[0]
            if x.dtype.itemsize
            else x.dtype.type()
        )
    )


#: Other ways to name the written array to NumPy; some change no byte.
TOLD = (
    lambda x: np.clip(x, 0, 9, x),
    lambda x: x.clip(1, 99, x),
    lambda x: np.round(x, 0, x),
    lambda x: np.take(x.copy(), range(len(x)), 0, x),
    lambda x: np.concatenate([x.copy()], 0, x),
    lambda x: np.cumsum(x.copy(), 0, None, x),
    lambda x: x[None].sum(0, None, x.copy()),
    lambda x: np.sum(x[None].copy(), 0, None, x),
    lambda x: np.nan_to_num(x, copy=False),
    lambda x: np.copyto(dst=x, src=x.copy()),
    lambda x: np.put(a=x, ind=[0], v=x.ravel()[:1].copy()),
    lambda x: np.place(arr=x, mask=np.zeros(x.shape, bool), vals=[1]),
    lambda x: np.fill_diagonal(a=x, val=1),
    lambda x: np.median(x, overwrite_input=True),
    lambda x: np.put_along_axis(arr=x, indices=np.zeros((1,) * x.ndim, int), values=1, axis=0),
    lambda x: setattr(x, "real", x.copy()),
)


WRITES: dict[str, Callable[[Any, Choices], None]] = {
    "item": assigned,
    "out": halved,
    "fill": lambda x, c: (
        x.fill(np.ones((), "u1").view("u1").astype(x.dtype)[()]) if x.dtype.kind in "fiu" else assigned(x, c)
    ),
    "asarray": lambda x, c: assigned(np.asarray(x), c),
    "memoryview": by_memory,
    "memset": by_c,
    "sort": lambda x, c: x.sort() if x.ndim and x.dtype.kind in "fiuS" else assigned(x, c),
    "byteswap": lambda x, c: x.byteswap(inplace=True) if x.dtype.kind in "fi" else assigned(x, c),
    "flat": lambda x, c: x.flat.__setitem__(0, x.flat[-1]) if x.size else None,
    "swap halves": lambda x, c: x[1:].__setitem__(slice(None), x[:-1].copy()) if x.ndim and len(x) > 1 else None,
    "copyto": lambda x, c: np.copyto(x, np.flip(x)),
    "by position or name": lambda x, c: c.among(TOLD)(x) if x.ndim and x.dtype.kind in "fiuc" else assigned(x, c),
}


def reshaped(x: Any, c: Choices) -> None:
    x.shape = c.among([(x.size,), (x.size, 1), (1, x.size), tuple(reversed(x.shape))])


def retyped(x: Any, c: Choices) -> None:
    x.dtype = same_size(x.dtype)


def restrided(x: Any, c: Choices) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if x.ndim and x.size:
            x.strides = (0, *x.strides[1:])


GEOMETRY: dict[str, Callable[[Any, Choices], None]] = {"shape": reshaped, "dtype": retyped, "strides": restrided}


def rewritten(x: Any, y: Any, seen: Counter[str]) -> None:
    """x[...] = y if NumPy defines the result: not if it may fail half-way, and not if it leaves open which element is
    written last.
    """
    if x.dtype.kind in "SU" and x.dtype != y.dtype:
        return
    if y.size == 1 or not fanin.sharing.overlaps_itself(x):
        x[...] = y
        seen["write: another's"] += 1


def boxes_changed(args: tuple[Any, ...], c: Choices, pool: list[Any], seen: Counter[str]) -> None:
    for box in args:
        if isinstance(box, list):
            box.append(c.among(pool))
            seen["list changed"] += 1
        elif isinstance(box, dict):
            box["new"] = c.among(pool)
            box.pop("p", None)
            seen["dict changed"] += 1


def step(args: tuple[Any, ...], c: Choices, pool: list[Any], seen: Counter[str], containers: bool) -> None:
    """One line of the function: a view is made, something is written, or changed."""
    x, kind = c.among(pool), c.of(20)
    if kind < 9:
        name = c.among(list(VIEWS))
        made = VIEWS[name](x, c)
        seen[f"view: {name}"] += 1
        pool += [o for o in (made if isinstance(made, list) else [made]) if isinstance(o, np.ndarray)]
    elif kind < 16:
        name = c.among(list(WRITES))
        WRITES[name](x, c)
        seen[f"write: {name}"] += 1
    elif kind == 16:
        rewritten(x, c.among(pool), seen)
    elif kind == 17:
        name = c.among(list(GEOMETRY))
        GEOMETRY[name](x, c)
        seen[f"geometry: {name}"] += 1
    elif kind == 18 and c.of(4) == 0:
        x.flags.writeable = bool(c.of(2))
        seen["flags"] += 1
    elif kind == 19 and c.of(6) == 0:
        raise Stop
    elif kind == 19 and containers:
        boxes_changed(args, c, pool, seen)


def result(args: tuple[Any, ...], c: Choices, pool: list[Any], containers: bool) -> Any:
    """What the function returns."""
    picked = [c.among(pool) for _ in range(c.of(5))]
    shape = c.of(7)
    if shape == 0:
        return None
    if shape == 1 and picked:
        return picked[0]
    if shape == 2:
        return {"a": picked, "b": (picked[:1], 7)}
    if shape == 3 and containers:
        return [args[0], *picked, picked]
    if shape == 4:
        return (*picked, np.float32(3), None)
    return tuple(picked) + tuple(pool[-2:])


def program(numbers: list[int], seen: Counter[str], containers: bool = True) -> Callable[..., Any]:
    """The function that a list of numbers is."""

    def fn(*args: Any) -> Any:
        c = Choices(numbers)
        pool = [x for x in leaves(args) if isinstance(x, np.ndarray)]
        for _ in range(2 + c.of(5)):
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    step(args, c, pool, seen, containers)
            except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as e:
                seen[f"refused: {type(e).__name__}"] += 1
        return result(args, c, pool, containers)

    return fn


def numbers(draw: random.Random) -> list[int]:
    """A random program."""
    return [draw.getrandbits(16) for _ in range(40)]


# The oracle


def place(x: Any, w: World) -> Any:
    """Where an array begins: (storage, bytes from its start), or None where it is no storage's."""
    start = address(x)
    for s, (low, size, memory) in enumerate(w.spans):
        if low <= start < low + size or (start == low + size and x.size == 0 and root(x) is memory):
            return s, start - low
    return None


def root(x: Any) -> Any:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def form(x: Any) -> Any:
    return x.dtype, x.shape, x.strides, x.flags.writeable, type(x)


class Base:
    """The owner of an output's memory by its `base`; one without it (as_strided keeps an object of its own) agrees with
    all.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Base) and (None in (self.name, other.name) or self.name == other.name)

    def __repr__(self) -> str:
        return f"base {self.name}"


def description(result: Any, w: World) -> list[Any]:
    """Everything observable of a world and a result after a run, in a form by which two worlds can be compared."""
    described: list[Any] = [w.memory()]
    inputs = {id(a): f"array {i}" for i, a in enumerate(w.arrays)}
    for a in w.arrays:
        described.append(("argument", form(a), place(a, w)))
    names = dict(inputs)
    owned: list[Any] = []
    seen_boxes: dict[int, int] = {
        id(box): -1 - i for i, box in enumerate(w.args) if isinstance(box, (list, dict, tuple))
    }

    def walk(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            known = names.setdefault(id(x), f"output {len(names)}")
            where = place(x, w)
            empty = x.size == 0 or x.dtype.itemsize == 0
            base = Base(inputs.get(id(root(x))) if not empty else None)
            relation = []
            if where is None and not empty:
                relation = [address(x) - address(o) if fanin.overlap(x, o) else None for o in owned]
                owned.append(x)
            return known, form(x), None if empty else where, base, x.flags.owndata, relation, x.tobytes()
        if isinstance(x, (list, tuple, dict)):
            if id(x) in seen_boxes:
                return "box", seen_boxes[id(x)]
            if isinstance(x, (list, dict)):
                seen_boxes[id(x)] = len(seen_boxes)
            items = list(x.items()) if isinstance(x, dict) else list(enumerate(x))
            return type(x), [(k, walk(v)) for k, v in items]
        return type(x), repr(x)

    described.append(walk(result))
    for box in w.args:
        if isinstance(box, (list, dict, tuple)):
            seen_boxes.pop(id(box), None)
        described.append(walk(box))
    return described
