"""Lists of contributions as data: drawn, written as Python, made smaller.

A `Term` is one contribution in plain values. Its text is the expression that makes it, with the functions of this
module; the tests evaluate that text, so that a list which fails is printed as the very program that failed.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse

import fanin
from kit.partial_lists import an_index
from kit.recipes import SCIPY, SHAPES, Sub, Word, text_of, values
from kit.values import DTYPES, FLOATS, LOW, bits

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

NAMES = [d.name for d in DTYPES]
FLOAT_NAMES = [d.name for d in FLOATS]
FORMATS = ("coo", "csr", "csc", "bsr", "bsc")
WIDE = 3000  # places along the long axes of expanded gradients

# ---------------------------------------------------------------- 1. What the texts call


def array(numbers: list[Any], dtype: str, shape: Any) -> Any:
    """An array in C order; each number is one of the dtype."""
    d = np.dtype(dtype)
    return np.array(numbers, d if d.kind in "bui" or not numbers else None).astype(d).reshape(shape)


def fortran(x: Any) -> Any:
    """The same array with its first axis the fastest."""
    return x.copy("F")


def backwards(x: Any) -> Any:
    """The same array with a negative stride."""
    return x[::-1].copy()[::-1]


def gapped(x: Any) -> Any:
    """The same array as every second number of a larger one."""
    wide = np.zeros((*x.shape, 2), x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def unaligned(x: Any) -> Any:
    """The same array one byte after a multiple of its itemsize."""
    raw = np.zeros(x.nbytes + 1, np.uint8)
    y = raw[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def part(x: Any) -> Any:
    """The same array as the first half of another one."""
    return np.concatenate([x, x])[: len(x)]


def subclass(x: Any) -> Any:
    return x.view(Sub)


def expanded(x: Any, shape: Any) -> Any:
    """x repeated without memory of its own, also as a tensor."""
    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x.expand(shape)


def sparse(family: str, format: str, index: list[Any], values: Any, shape: Any) -> Any:
    """Entry n, a number or a block, is values[n] at index[n]; compressed formats keep the order within a line."""
    axes = len(shape) - values.ndim + 1 if format == "coo" else 2
    parts = (np.ascontiguousarray(np.array(index, np.int64).reshape(len(index), axes).T), values)
    if format != "coo":
        by_column = format in ("csc", "bsc")
        block = values.shape[1:] or (1, 1)
        major = parts[0][int(by_column)]
        order = np.argsort(major, kind="stable")
        lines = np.bincount(major, minlength=shape[by_column] // block[by_column])
        parts = (np.concatenate([[0], np.cumsum(lines)]), parts[0][1 - by_column][order], values[order])
    if family == "fanin":
        return fanin.Sparse(format, parts, shape)
    if family == "torch":
        parts = tuple(map(tensor, parts))
        if format == "coo":
            return torch().sparse_coo_tensor(*parts, shape)
        return getattr(torch(), f"sparse_{format}_tensor")(*parts, size=shape)
    make = getattr(scipy.sparse, f"{format}_{family.removeprefix('scipy ')}")
    return make((values, tuple(parts[0])) if format == "coo" else parts[::-1], shape=shape)


def scribble(x: Any) -> None:
    """Write over all memory of a contribution, where that can be done."""
    if isinstance(x, fanin.Partial):
        x = x.values
    names = () if isinstance(x, np.ndarray | np.generic) else ("data", "indices", "indptr", "row", "col")
    for y in [x, *getattr(x, "parts", ()), *(getattr(x, n, None) for n in names)]:
        if isinstance(y, np.ndarray) and y.flags.writeable:
            y[...] = 0


def torch() -> Any:
    import torch as module

    return module


def tensor(x: Any) -> Any:
    """The same memory as a torch tensor."""
    if x.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        whole = torch().from_numpy(x.view(f"i{x.itemsize}"))
        return whole.view(getattr(torch(), x.dtype.name))
    return torch().from_numpy(x)


HELPERS = [
    array,
    fortran,
    backwards,
    gapped,
    read_only,
    unaligned,
    part,
    subclass,
    expanded,
    sparse,
    scribble,
    tensor,
    torch,
]
NAMESPACE: dict[str, Any] = {f.__name__: f for f in HELPERS}
NAMESPACE |= {"np": np, "fanin": fanin, "ml_dtypes": ml_dtypes, "scipy": scipy, "nan": math.nan, "inf": math.inf}
NAMESPACE |= {"Word": Word, "Sub": Sub}
LAYOUTS = ("fortran", "backwards", "gapped", "read_only", "unaligned", "part", "subclass")

# ---------------------------------------------------------------- 2. A contribution, a list, what is wanted of its sum


def number(x: Any) -> str:
    if isinstance(x, complex):
        return f"complex({x.real}, {x.imag})"
    return str(x)


@dataclass(frozen=True)
class Term:
    kind: str  # dense, sparse, partial, zero, none, python, numpy, object, again
    dtype: str = "float64"
    shape: Shape = ()
    numbers: tuple[Any, ...] = ()  # of a dense one its elements in C order, of a sparse one those of its values
    layout: str = "C"  # of a dense one one of LAYOUTS or "expanded", of a sparse one its format
    base: Shape = ()  # the shape of the memory of an expanded one, of the values of a sparse one
    index: tuple[Shape, ...] = ()  # of a sparse one the place of each entry; of "again" that of the earlier term
    family: str = "numpy"  # whose class: numpy or torch; of a sparse one fanin, scipy array, scipy matrix, torch
    weight: Any = None  # what it is multiplied by, where the list has weights; None: 1
    at: Any = None  # of a partial one the place of its values, whose shape is `base`

    def text(self) -> str:
        """The expression that makes it."""
        if self.kind == "none":
            return "None"
        if self.kind == "zero":
            return f"fanin.Zero({self.shape}, {self.dtype!r})"
        if self.kind == "object":
            return f"Word({self.numbers[0]!r})"
        if self.kind == "again":
            return f"g[{self.index[0][0]}]"
        if self.kind == "python":
            return number(self.numbers[0])
        some = f"[{', '.join(map(number, self.numbers))}]"
        if self.kind == "numpy":
            return f"array({some}, {self.dtype!r}, (1,))[0]"
        if self.kind == "sparse":
            stored = f"array({some}, {self.dtype!r}, {self.base})"
            return f"sparse({self.family!r}, {self.layout!r}, {list(self.index)}, {stored}, {self.shape})"
        if self.kind == "partial":
            return f"fanin.Partial(array({some}, {self.dtype!r}, {self.base}), {self.at!r}, {self.shape})"
        memory = self.base if self.layout == "expanded" else self.shape
        text = f"array({some}, {self.dtype!r}, {memory})"
        if self.layout in LAYOUTS:
            text = f"{self.layout}({text})"
        if self.family == "torch":
            text = f"tensor({text})"
        return f"expanded({text}, {self.shape})" if self.layout == "expanded" else text

    def make(self, g: list[Any]) -> Any:
        """What its text makes, without the compiler."""
        if self.kind == "none":
            return None
        if self.kind == "zero":
            return fanin.Zero(self.shape, self.dtype)
        if self.kind == "object":
            return Word(self.numbers[0])
        if self.kind == "again":
            return g[self.index[0][0]]
        if self.kind == "python":
            return self.numbers[0]
        if self.kind == "numpy":
            return array(list(self.numbers), self.dtype, (1,))[0]
        if self.kind == "sparse":
            stored = array(list(self.numbers), self.dtype, self.base)
            return sparse(self.family, self.layout, list(self.index), stored, self.shape)
        if self.kind == "partial":
            return fanin.Partial(array(list(self.numbers), self.dtype, self.base), self.at, self.shape)
        x = array(list(self.numbers), self.dtype, self.base if self.layout == "expanded" else self.shape)
        x = NAMESPACE[self.layout](x) if self.layout in LAYOUTS else x
        x = tensor(x) if self.family == "torch" else x
        return expanded(x, self.shape) if self.layout == "expanded" else x


@dataclass(frozen=True)
class Wanted:
    """The declaration of the slot, and what is wanted of the sum."""

    shape: Shape | None = None
    dtype: str | None = None
    accumulate: str | None = None
    stats: bool = False
    scale: Any = None
    writable: bool = False
    out: str | None = None  # the dtype of an array for the sum
    weights: bool = False  # the contributions come with their weights (W1)
    mean: bool = False  # over the sum of these (W3)

    def slot(self) -> str:
        """The text of its fanin.Slot; "" for one that declares nothing."""
        declared = [f"{n}={getattr(self, n)!r}" for n in ("shape", "dtype") if getattr(self, n) is not None]
        return f"fanin.Slot({', '.join(declared)})" if declared else ""

    def words(self) -> list[str]:
        """What is wanted, in words, for the count of what was met."""
        names = ("shape", "dtype", "stats", "writable", "out", "weights", "mean")
        found = [n for n in names if getattr(self, n) not in (None, False)]
        found += ["scale"] * (self.scale is not None)
        found += [] if self.accumulate is None else ["exact" if self.accumulate == "exact" else "wider"]
        return found or ["nothing"]


@dataclass(frozen=True)
class Case:
    terms: tuple[Term, ...]
    wanted: Wanted = field(default_factory=Wanted)
    flavour: str = ""

    def made(self) -> list[Any]:
        """The contributions, once; the same texts make others in memory of their own."""
        g: list[Any] = []
        for x in self.terms:
            g.append(x.make(g))
        return g

    @property
    def weights(self) -> list[Any] | None:
        """The weights of the contributions; None: they have none."""
        return [x.weight for x in self.terms] if self.wanted.weights else None

    @property
    def shape(self) -> Shape:
        """Of the sum."""
        if self.wanted.shape is not None:
            return self.wanted.shape
        return next((x.shape for x in self.terms if x.kind not in ("none", "object", "again")), ())


@lru_cache(30_000)
def compiled(text: str) -> Any:
    return compile(text, "<way>", "exec")


def helpers(text: str) -> str:
    """The sources of the functions that a text calls, and the imports."""
    used: list[Any] = []
    found = [f for f in HELPERS if f.__name__ + "(" in text]
    if "Word(" in text:
        found += [text_of, Word, bits]
    if subclass in found:
        found.append(Sub)
    for f in found:
        source = inspect.getsource(f)
        used += [f, *(other for other in HELPERS if other is not f and other.__name__ + "(" in source)]
    unique = [f for f in [*HELPERS, Sub, bits, text_of, Word] if f in used]
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "from typing import Any", ""]
    lines += ["import ml_dtypes", "import numpy as np", "import scipy.sparse", "from numpy import inf, nan", ""]
    lines += ["import fanin", "", "LOW: list = []", "Array = Any"]
    return "\n".join(lines) + "\n\n\n" + "\n\n".join(inspect.getsource(f) for f in unique)


# ---------------------------------------------------------------- 3. Drawn


def numbers(draw: random.Random, dtype: str, count: int) -> tuple[Any, ...]:
    """Numbers of a dtype that are likely to go wrong."""
    made = values((count,), NAMES.index(dtype), draw)
    return tuple((made.astype(np.float64) if made.dtype in LOW else made).tolist())


def few(draw: random.Random, dtype: str, count: int) -> tuple[Any, ...]:
    """Numbers of which several sums differ by their order and their dtype, and none is special."""
    d = np.dtype(dtype)
    some: list[Any] = [True, False] if d.kind == "b" else [1, 2, 3, 100, 120, 127] if d.kind in "ui" else []
    if not some:
        reals = [1.0, 3.0, 0.1, 1 / 3, 200.0, 2049.0, 60000.0] + [1e200, 1e-200] * (d.name in ("float64", "complex128"))
        made = np.array([draw.choice(reals) for _ in range(count)])
        with np.errstate(all="ignore"):
            made = made.astype(d)
        return tuple((made.astype(np.float64) if d in LOW else made).tolist())
    return tuple(draw.choice(some) for _ in range(count))


@dataclass
class Drawing:
    """One list is drawn: its shape, its dtypes, the classes of its arrays."""

    draw: random.Random
    families: tuple[str, ...] = ("numpy",)
    shape: Shape = ()
    dtypes: list[str] = field(default_factory=list)
    wanted: Wanted = field(default_factory=Wanted)
    flavour: str = ""

    def numbers(self, dtype: str, count: int) -> tuple[Any, ...]:
        return (numbers if self.draw.random() < 0.4 else few)(self.draw, dtype, count)

    def outer(self) -> Shape:
        """The shape of a contribution: the sum's, or one that is summed to it."""
        if self.wanted.shape is None or self.draw.random() < 0.6:
            return self.shape
        most = WIDE if self.flavour == "expanded" else 3
        wider = tuple(self.draw.choice([1, most]) if n == 1 else n for n in self.shape)
        return wider if self.draw.random() < 0.4 else (self.draw.choice([2, 3]), *wider)

    def dense(self) -> Term:
        draw, shape, dtype = self.draw, self.outer(), self.draw.choice(self.dtypes)
        family = draw.choice(self.families)
        layouts = ["C", "C", "C", "fortran", "gapped", "expanded"]
        layouts += ["backwards", "read_only", "unaligned", "part", "subclass"] if family == "numpy" else []
        layout = draw.choice(layouts)
        if layout == "expanded" or not shape:
            return self.expanded(shape, dtype, family)
        return Term("dense", dtype, shape, self.numbers(dtype, math.prod(shape)), layout, family=family)

    def expanded(self, shape: Shape | None = None, dtype: str = "", family: str = "") -> Term:
        draw = self.draw
        shape = self.outer() if shape is None else shape
        dtype = dtype or draw.choice(self.dtypes)
        family = family or draw.choice(self.families)
        if not shape or 0 in shape:
            return Term("dense", dtype, shape, self.numbers(dtype, math.prod(shape)), family=family)
        base = tuple(1 if n >= WIDE or draw.random() < 0.7 else n for n in shape)
        return Term("dense", dtype, shape, self.numbers(dtype, math.prod(base)), "expanded", base, family=family)

    def sparse(self, formats: tuple[str, ...] = FORMATS) -> Term:
        draw, shape = self.draw, self.shape
        if self.wanted.shape is not None and draw.random() < 0.3:
            shape = self.outer()
        if len(shape) != 2:
            formats = ("coo",)
        format, dtype = draw.choice(formats), draw.choice(self.dtypes)
        count = draw.choice([0, 1, 2, 3, 4, 6]) if 0 not in shape else 0
        axes = len(shape)
        block: tuple[int, ...] = ()
        family = draw.choice(["fanin", "fanin", *(["scipy array", "scipy matrix"] if len(shape) == 2 else [])])
        if "torch" in self.families and draw.random() < 0.5:
            family = "torch"
        if format in ("bsr", "bsc"):
            block = tuple(draw.choice([k for k in (1, 2) if n % k == 0 and n]) if n else 1 for n in shape)
        elif format == "coo" and len(shape) > 1 and family in ("fanin", "torch") and draw.random() < 0.4:
            axes = 1
        lines = [n // b for n, b in zip(shape, block, strict=True)] if block else shape[:axes]
        index = tuple(tuple(draw.randrange(n) for n in lines) for _ in range(count))
        base = (count, *block) if block else (count, *shape[axes:])
        if family.startswith("scipy") and (format == "bsc" or np.dtype(dtype) not in SCIPY):
            family = "fanin"
        if family == "torch" and (format in ("csc", "bsc") or dtype.startswith("float8")):
            family = "fanin"
        return Term("sparse", dtype, shape, self.numbers(dtype, math.prod(base)), format, base, index, family)

    def twice(self) -> Term:
        """A sparse one of floats with a place or two, of whose numbers the last is mostly minus the first: summed one
        after the other, what is between them is rounded.
        """
        draw, shape = self.draw, self.shape
        dtype = draw.choice([d for d in self.dtypes if d in FLOAT_NAMES] or ["float64"])
        count = draw.choice([3, 4, 6]) if 0 not in shape else 0
        places = [tuple(draw.randrange(n) for n in shape) for _ in range(draw.choice([1, 1, 2])) if count]
        index = tuple(draw.choice(places) for _ in range(count))
        stored = few(draw, dtype, len(index))
        if stored and draw.random() < 0.8:
            stored = (*stored[:-1], -stored[0])
        format = draw.choice(["coo", "csr", "csc"]) if len(shape) == 2 else "coo"
        return Term("sparse", dtype, shape, stored, format, (count,), index, "fanin")

    def partial(self) -> Term:
        draw, shape, dtype = self.draw, self.outer(), self.draw.choice(self.dtypes)
        at = an_index(draw, shape)
        base = np.shape(np.diagonal(np.zeros(shape), at.offset, at.axis1, at.axis2)
                        if isinstance(at, fanin.Diagonal) else np.zeros(shape)[at])  # fmt: skip
        return Term("partial", dtype, shape, self.numbers(dtype, math.prod(base)), "C", base, at=at)

    def zero(self) -> Term:
        return Term("zero", self.draw.choice(self.dtypes + NAMES), self.shape)

    def python(self) -> Term:
        some = [True, False, 0, 1, -1, -2, 100, 300, 2**40, 2**62, 0.5, -0.0, 0.1, math.inf, 1j, complex(1, 0.1)]
        return Term("python", "", (), (self.draw.choice(some),))

    def numpy(self) -> Term:
        dtype = self.draw.choice(self.dtypes)
        return Term("numpy", dtype, (), self.numbers(dtype, 1))

    def object(self) -> Term:
        return Term("object", "", (), (self.draw.choice("abc"),))

    def none(self) -> Term:
        return Term("none")

    def wrong(self) -> Term:
        """What is likely to be refused: another shape, or any dtype."""
        shape = self.draw.choice([(*self.shape, 1), (5, 7), self.shape])
        dtype = self.draw.choice(NAMES)
        return Term("dense", dtype, shape, self.numbers(dtype, math.prod(shape)))

    def scalar(self) -> Term:
        return self.draw.choice([self.python, self.python, self.numpy, self.numpy, self.dense])()


#: What a list is made of: how often it is drawn, and which kinds of terms, the likelier the oftener.
FLAVOURS: dict[str, tuple[int, list[str]]] = {
    "dense": (5, ["dense"]),
    "expanded": (3, ["expanded", "expanded", "expanded", "dense"]),
    "sparse": (5, ["sparse"]),
    "sparse and dense": (3, ["sparse", "sparse", "dense"]),
    "partial": (4, ["partial", "partial", "partial", "dense"]),
    "partial and sparse": (3, ["partial", "sparse", "partial", "dense"]),
    "zeros": (3, ["zero", "zero", "dense", "sparse", "expanded"]),
    "scalars": (4, ["scalar", "scalar", "scalar", "zero"]),
    "objects": (1, ["object", "dense", "object", "sparse"]),
    "wrong": (2, ["dense", "wrong", "sparse"]),
}


def wanted(draw: random.Random, dtypes: list[str], shape: Shape, flavour: str) -> Wanted:
    """A declaration, and options of a take."""
    if flavour == "objects" or draw.random() < 0.12:
        return Wanted()
    found: dict[str, Any] = {}
    declared = draw.random() < 0.15  # both, and one that a target takes
    if (declared or draw.random() < 0.25) and flavour != "scalars":
        found["shape"] = shape
    if declared and flavour in ("dense", "expanded", "zeros"):
        found["dtype"] = draw.choice(["float32", "float64", "complex128", "int64"])
    elif draw.random() < 0.3:
        found["dtype"] = draw.choice([draw.choice(NAMES), widest(dtypes), widest(dtypes), "float64", "float32"])
    if draw.random() < 0.2:
        found["accumulate"] = draw.choice(
            ["exact", "exact", "float64", widest([*dtypes, found.get("dtype") or "bool"])]
        )
    found["stats"] = draw.random() < 0.4
    if draw.random() < 0.35:
        turned = [] if found.get("accumulate") == "exact" else [1j, complex(0.5, 1)]
        found["scale"] = draw.choice([0.5, 2.5, 2, -1, 3, 0.1, True, 1e300, 2**40, *turned])
    if draw.random() < 0.25:
        found["out"] = draw.choice([*dtypes, widest(dtypes), "float64", "complex128"])
    elif draw.random() < 0.25:
        found["writable"] = True
    found["weights"], found["mean"] = draw.random() < 0.3, draw.random() < 0.2
    return Wanted(**found)


def weight(draw: random.Random, x: Term, flavour: str) -> Any:
    """A weight for a contribution, mostly one that it takes; None: none."""
    if draw.random() < 0.15 or x.kind == "again":
        return None
    whole = [2, 3, -1, 0, 1, 5, 2.0, 1.0]
    real = [0.5, 0.1, -1.5, 1 / 3, 7.25, -0.0, 300.0, 1e-3]
    dtype = np.dtype(x.dtype) if x.kind in ("dense", "sparse", "numpy") else None
    integers = dtype is not None and dtype.kind in "bui" and dtype not in LOW
    if flavour == "wrong" and draw.random() < 0.2:
        return draw.choice([0.5, 1j, 1e39, 1e300, 1e-42, 1e-6])
    if x.kind == "python" and isinstance(x.numbers[0], int):
        return draw.choice([None, None, None, None, 2])
    if x.kind == "object":
        return draw.choice([None, *whole])
    return draw.choice(whole if integers else whole + real)


def widest(dtypes: list[str]) -> str:
    """A dtype that holds all of these: NumPy's for its own dtypes."""
    plain = [d for d in dtypes if np.dtype(d) not in LOW]
    if not plain:
        return "float32"
    found = np.result_type(*map(np.dtype, plain))
    return found.name if found.kind in "fcui" else "float32"


def case(draw: random.Random, families: tuple[str, ...] = ("numpy",), flavours: tuple[str, ...] = ()) -> Case:
    """One list."""
    flavour = draw.choice(
        [f for f, (often, _) in FLAVOURS.items() for _ in range(often) if f in (flavours or FLAVOURS)]
    )
    pool = draw.choice([NAMES, NAMES, FLOAT_NAMES, ["float32"], ["float64"], ["float16", "float32"]])
    if flavour == "partial and sparse":  # P4: of one kind of numbers
        pool = draw.choice([FLOAT_NAMES, ["float32"], ["int32", "int64"], ["complex64", "complex128"]])
    dtypes = draw.sample(pool, min(len(pool), draw.choice([1, 1, 2, 3])))
    shape: Shape = () if flavour == "scalars" else draw.choice([s for s in SHAPES if s])
    if flavour == "expanded" and draw.random() < 0.25:
        shape = draw.choice([(WIDE,), (WIDE, 2), (1,), (1, 2)])
    drawing = Drawing(draw, families, shape, dtypes, wanted(draw, dtypes, shape, flavour), flavour)
    kinds = FLAVOURS[flavour][1]
    terms: list[Term] = []
    for _ in range(draw.choice([1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6])):
        earlier = [i for i, x in enumerate(terms) if x.kind == "dense"]
        if earlier and draw.random() < 0.06:
            terms.append(Term("again", index=((draw.choice(earlier),),)))
        else:
            terms.append(drawing.none() if draw.random() < 0.08 else getattr(drawing, draw.choice(kinds))())
    if flavour == "sparse" and draw.random() < 0.1:  # one alone, which is handed through, and measured as its sum is
        terms = [drawing.twice()]
        scale = drawing.wanted.scale
        real = None if isinstance(scale, complex) else scale
        drawing.wanted = replace(drawing.wanted, accumulate="exact", stats=True, scale=real)
    if drawing.wanted.weights:
        terms = [replace(x, weight=weight(draw, x, flavour)) for x in terms]
    return Case(tuple(terms), drawing.wanted, flavour)


# ---------------------------------------------------------------- 4. Made smaller


def dropped(c: Case, k: int) -> Case:
    """The list without term k; what was the same array again is then an array of its own."""
    terms = []
    for i, x in enumerate(c.terms):
        if i == k:
            continue
        if x.kind == "again":
            at = x.index[0][0]
            x = c.terms[at] if at == k else replace(x, index=((at - (at > k),),))
        terms.append(x)
    return replace(c, terms=tuple(terms))


def smaller(c: Case) -> Iterator[Case]:
    """Lists that are a little less: without a term, without a wish, with one number, one axis, one entry less."""
    for k in range(len(c.terms) if len(c.terms) > 1 else 0):
        yield dropped(c, k)
    for n in ("stats", "scale", "writable", "out", "accumulate", "shape", "dtype", "mean", "weights"):
        default = getattr(Wanted, n)
        if getattr(c.wanted, n) != default:
            yield replace(c, wanted=replace(c.wanted, **{n: default}))
    kinds = {x.kind for x in c.terms}
    if kinds <= {"dense", "zero", "none", "again"}:
        for axis in range(len(c.shape)):
            yield from narrower(c, axis)
    for k, x in enumerate(c.terms):
        for y in plainer(x):
            yield replace(c, terms=(*c.terms[:k], y, *c.terms[k + 1 :]))


def narrower(c: Case, axis: int) -> Iterator[Case]:
    """One place along an axis, counted from the last one, where all contributions have it."""
    n = len(c.shape) - axis
    if any(len(x.shape) < n for x in c.terms if x.kind in ("dense", "zero")):
        return
    if all(x.shape[len(x.shape) - n] <= 1 for x in c.terms if x.kind in ("dense", "zero")):
        return
    terms = []
    for x in c.terms:
        if x.kind in ("dense", "zero"):
            at = len(x.shape) - n
            shape = (*x.shape[:at], min(x.shape[at], 1), *x.shape[at + 1 :])
            if x.kind == "dense":
                memory = x.base if x.layout == "expanded" else x.shape
                numbers = np.array(range(math.prod(memory)), int).reshape(memory)[(*[slice(None)] * at, slice(0, 1))]
                x = replace(x, numbers=tuple(x.numbers[i] for i in numbers.reshape(-1)))
                x = replace(x, base=numbers.shape if x.layout == "expanded" else ())
            x = replace(x, shape=shape)
        terms.append(x)
    shape = c.wanted.shape
    if shape is not None:
        at = len(shape) - n
        shape = (*shape[:at], min(shape[at], 1), *shape[at + 1 :])
    yield replace(c, terms=tuple(terms), wanted=replace(c.wanted, shape=shape))


def plainer(x: Term) -> Iterator[Term]:
    """The same contribution with less about it."""
    if x.weight is not None:
        yield replace(x, weight=None)
    if x.kind == "sparse":
        size = math.prod(x.base[1:])
        for k in range(len(x.index)):
            rest = x.numbers[: k * size] + x.numbers[(k + 1) * size :]
            index = x.index[:k] + x.index[k + 1 :]
            yield replace(x, numbers=rest, index=index, base=(len(index), *x.base[1:]))
        if x.family != "fanin":
            yield replace(x, family="fanin")
    if x.kind == "dense" and x.layout not in ("C", "expanded"):
        yield replace(x, layout="C")
    if x.kind == "dense" and x.family == "torch":
        yield replace(x, family="numpy")
    one: Any = True if x.dtype == "bool" else 1 if x.dtype.startswith(("int", "uint")) else 1.0
    if x.kind in ("dense", "sparse", "partial", "numpy") and any(y != one for y in x.numbers):
        yield replace(x, numbers=(one,) * len(x.numbers))


def smallest(c: Case, fails: Callable[[Case], bool], tries: int = 400) -> Case:
    """A list that still fails, of which no smaller one that is a step away does."""
    while True:
        for less in smaller(c):
            tries -= 1
            if tries < 0:
                return c
            if fails(less):
                c = less
                break
        else:
            return c
