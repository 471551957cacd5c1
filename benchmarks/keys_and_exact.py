"""What keys out of order and exact sums cost beside the plain sum.

"wide" has exponents over 80 powers of two, "any bits" every float32 there is: what needs the integer path of exact
sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

import fanin

from .common import effort, size_text
from .timing import Result, Work, at_most, measure, pinned

Make = Callable[[np.random.Generator, int], np.ndarray]


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n, np.float32)


def wide(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.ldexp(rng.standard_normal(n, np.float32), rng.integers(-40, 41, n, np.int32))


def any_bits(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.integers(0, 2**32, n, np.uint32).view(np.float32)
    x[~np.isfinite(x)] = 1
    return x


def half(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n * 2, np.float32).astype(np.float16)


def double(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n // 2)


def exact(title: str, make: Make, n: int, size: int, most: float | None, quick: bool, where: str) -> Result:
    rng = np.random.default_rng(0)
    inputs = [make(rng, size // 4) for _ in range(n)]
    out = np.zeros_like(inputs[0])
    work = {
        "plain": lambda: fanin.add_n(inputs, out=out),
        "exact": lambda: fanin.add_n(inputs, out=out, accumulate="exact"),
    }
    return measure(
        f"exact sums: {n} x {size_text(size)} {title}, core {where}", work, base="plain",
        targets=[] if most is None else [at_most(most, "exact", "plain")], **effort((n + 1) * size, quick),
    )  # fmt: skip


def exact_sparse(n: int, entries: int, quick: bool, where: str) -> Result:
    """Gradients of an embedding: rows of 64 numbers, most of them met by several."""
    rng = np.random.default_rng(0)
    shape = (2 * entries, 64)
    inputs = [
        fanin.Sparse("coo", (rng.integers(0, shape[0], (1, entries)), normal(rng, entries * 64).reshape(-1, 64)), shape)
        for _ in range(n)
    ]
    plain, scale = fanin.InputBuffer(1, budget=float("inf")), 1.0
    whole = fanin.InputBuffer(1, budget=float("inf"), accumulate="exact")

    def taken(buf: fanin.InputBuffer) -> Work:
        def pass_() -> None:
            for x in inputs:
                buf.add(0, x)
            buf.take(scale=scale)  # scaled, or the plain sum would only be one entry behind the other

        return pass_

    return measure(
        f"exact sums: {n} x {entries} rows of 64 float32 (COO), core {where}",
        {"plain": taken(plain), "exact": taken(whole)}, base="plain", **effort((n + 1) * entries * 256, quick),
    )  # fmt: skip


def keys(n: int, size: int, quick: bool, where: str) -> Result:
    """The same sum by arrival, by keys that come in order, and by keys that come last to first; all parked, as the
    budget has no effect.
    """
    inputs = [np.full(size // 4, k + 0.5, "f4") for k in range(n)]
    out = np.zeros_like(inputs[0])
    buf = fanin.InputBuffer(1, budget=float("inf"))

    def adds(order: list[int], keyed: bool) -> Callable[[], None]:
        def pass_() -> None:
            for k in order:
                buf.add(0, inputs[k], key=k if keyed else None)
            buf.take(out=[out])

        return pass_

    back = list(range(n))[::-1]
    middle = [*back[::2], *back[1::2]]
    work: Work = {
        "by arrival": adds(back[::-1], False),
        "keys in order": adds(back[::-1], True),
        "keys last to first": adds(back, True),
        "keys mixed": adds(middle, True),
    }
    return measure(
        f"keys: {n} x {size_text(size)} float32, core {where}",
        work,
        base="by arrival",
        targets=[at_most(1.02, name, "by arrival") for name in ("keys last to first", "keys mixed")],
        **effort((n + 1) * size, quick),
    )


def ways(order: list[int], gradients: list[np.ndarray]) -> dict[str, Callable[[], None]]:
    """One slot and many small gradients whose keys come in this order: by `add`, by `add_many`, by `add_n`, and by the
    general path (strided ones).
    """
    keys, few = [*map(int, order)], len(gradients)
    given, apart = [gradients[k % few] for k in keys], [np.repeat(g, 2)[::2] for g in gradients]
    buf, slots = fanin.InputBuffer(1, budget=float("inf")), [0] * len(keys)

    def adds(some: list[np.ndarray]) -> Callable[[], None]:
        def pass_() -> None:
            for k in keys:
                buf.add(0, some[k % few], key=k)
            buf.take()

        return pass_

    def many() -> None:
        buf.add_many(slots, given, keys=keys)
        buf.take()

    return {
        "add": adds(gradients),
        "add_many": many,
        "add_n": lambda: fanin.add_n(given, keys=keys),
        "add, general path": adds(apart),
    }


def small_keys(n: int, quick: bool, where: str) -> Iterator[Result]:
    """n small gradients into one slot."""
    gradients = [np.full(16, k + 0.5, "f4") for k in range(64)]
    some = [*map(int, np.random.default_rng(1).permutation(n))]
    orders = {"in order": list(range(n)), "last to first": list(range(n))[::-1], "shuffled": some}
    all_ = {name: ways(order, gradients) for name, order in orders.items()}
    for way in all_["in order"]:
        yield measure(
            f"keys: {n} x 64 B into one slot, {way}, core {where}",
            {name: of[way] for name, of in all_.items()},
            base="in order",
            unit="us",
            targets=[at_most(2, name, "in order") for name in ("last to first", "shuffled")],
            rounds=2 if quick else 11,
        )
    work = {name: all_["in order"][name] for name in ("add", "add_many", "add_n")}
    given = [gradients[k % 64] for k in range(n)]
    yield measure(
        f"{n} x 64 B into one slot, core {where}",
        work | {"add_n without keys": lambda: fanin.add_n(given)},
        base="add",
        unit="us",
        targets=[at_most(1.1, name, "add") for name in ("add_many", "add_n", "add_n without keys")],
        rounds=2 if quick else 11,
    )


def results(quick: bool) -> Iterator[Result]:
    """All rows."""
    size = (1 if quick else 128) << 20
    with pinned() as where:
        yield keys(8, size, quick, where)
        yield from small_keys(800 if quick else 80_000, quick, where)
        yield exact("float32", normal, 8, size, 1.5, quick, where)
        yield exact("float32", normal, 2, size, None, quick, where)
        yield exact("float32, wide", wide, 8, size, None, quick, where)
        yield exact("float32, any bits", any_bits, 8, size // 4, None, quick, where)
        yield exact("float16", half, 8, size, 1.5, quick, where)
        yield exact("float64", double, 8, size, 3, quick, where)
        yield exact_sparse(8, 64 if quick else 4096, quick, where)
