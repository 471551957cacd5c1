"""Shared memory, beside torch and NumPy:

.

Lists of pieces, columns and the like beside torch's own question (whose answer is not exact), their growth, pairs
beside np.shares_memory, the check of a recorded layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import fanin
from fanin.analysis.memory import Layout

from .timing import Result, Work, at_least, at_most, measure, peer, pinned

Array = np.ndarray[Any, Any]


def steps(n: int) -> list[Array]:
    x = np.zeros(5 * n)
    return [x[i::n] for i in range(n)]


def blocks(n: int) -> list[Array]:
    side = round(n**0.5)
    m = np.zeros((4 * side, 4 * side), "f4")
    return [m[4 * i : 4 * i + 4, 4 * j : 4 * j + 4] for i in range(side) for j in range(side)]


def heads(n: int) -> list[Array]:
    q = np.zeros((2, 2, 3, n // 3, 4), "f4")
    return [q[:, :, k, h] for k in range(3) for h in range(n // 3)]


def spanned(n: int) -> list[Array]:
    m = np.zeros((3, n))
    return [m, *m.T]


CUTS: dict[str, Callable[[int], list[Array]]] = {
    "separate pieces": lambda n: list(np.zeros((n, 8))),
    "columns": lambda n: list(np.zeros((3, n)).T),
    "blocks": blocks,
    "step slices": steps,
    "heads of a projection": heads,
    "columns and one that spans them": spanned,
}


def torch_question(tensors: list[Any]) -> Callable[[], Any] | None:
    """The question that torch answers for the inputs that share a storage."""
    try:
        from torch._functorch._aot_autograd.input_output_analysis import compute_overlapping_inputs
    except ImportError:
        return None
    which = list(range(len(tensors)))
    return lambda: compute_overlapping_inputs(None, tensors, which)


def beside_torch(name: str, n: int, ratio: float, quick: bool, where: str) -> Result:
    views = CUTS[name](n)
    torch = peer("torch")
    work: dict[str, Any] = {
        "ndarrays": lambda: fanin.sharing.overlaps(views).indices,
        "tensors": None,
        "torch, tensors": None,
    }
    if torch is not None:
        base = torch.from_numpy(views[0].base)
        tensors = [
            base.as_strided(v.shape, [s // v.itemsize for s in v.strides], offset(v) // v.itemsize) for v in views
        ]
        work |= {"tensors": lambda: fanin.sharing.overlaps(tensors).indices, "torch, tensors": torch_question(tensors)}
    return measure(
        f"which of {n} {name} share memory, core {where}", work, base="ndarrays", unit="us", rounds=3 if quick else 15,
        targets=[] if quick else [at_least(ratio, "tensors", "torch, tensors")],
    )  # fmt: skip


def by_position(quick: bool, where: str) -> Iterator[Result]:
    """The function under PyTorch's name, which also takes positions."""
    from fanin.analysis import compute_overlapping_inputs

    views, torch = CUTS["separate pieces"](100), peer("torch")
    kinds = {"ndarrays": views} | ({} if torch is None else {"tensors": list(map(torch.from_numpy, views))})
    which = list(range(len(views)))
    for kind, given in kinds.items():
        work: Work = {
            "overlaps(arrays).indices": lambda given=given: fanin.sharing.overlaps(given).indices,
            "compute_overlapping_inputs(arrays, indices)": lambda given=given: compute_overlapping_inputs(given, which),
        }
        base, named = work
        yield measure(
            f"which of 100 {kind} share memory, by position, core {where}", work, base=base, unit="us",
            rounds=5 if quick else 300, calls=10, targets=[at_most(1.5, named, base)],
        )  # fmt: skip


def offset(view: Array) -> int:
    """Bytes behind the start of its base."""
    assert view.base is not None
    there: int = view.__array_interface__["data"][0] - view.base.__array_interface__["data"][0]
    return there


def growth(name: str, quick: bool, where: str) -> Result:
    """Ten and a hundred times as many."""
    sizes = (100, 1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    lists = [CUTS[name](n) for n in sizes]
    work: Work = {
        f"{n}": lambda views=views: fanin.sharing.overlaps(views).components
        for n, views in zip(sizes, lists, strict=True)
    }
    first, _, last = work
    return measure(
        f"components of {name}, core {where}",
        work,
        base=first,
        unit="us",
        rounds=3 if quick else 15,
        targets=[at_most(250, last, first)],
    )


def pairs() -> dict[str, tuple[Array, Array]]:
    m, v = np.zeros((60, 90), "f4"), np.zeros((6, 7, 8, 9), "f4")
    return {
        "rows": (m[:30], m[30:]),
        "columns": (m[:, 3], m[:, 4]),
        "row windows": (m[0:40, 0:40], m[20:60, 0:40]),
        "step slices": (v[::2, ::-3], v[1::2, ::2].transpose(3, 2, 1, 0)),
        "one array": (m, m),
    }


def pair(name: str, quick: bool, where: str) -> Result:
    x, y = pairs()[name]
    names = {
        "shares": np.shares_memory,
        "overlap": fanin.overlap,
        "x": x,
        "y": y,
    }
    work = {
        "np.shares_memory(x, y)": "shares(x, y)",
        "fanin.overlap(x, y)": "overlap(x, y)",
    }
    return measure(
        f"two {name}, core {where}",
        work,
        base="np.shares_memory(x, y)",
        names=names,
        rounds=5 if quick else 300,
        calls=10,
        targets=[at_least(1, "fanin.overlap(x, y)", "np.shares_memory(x, y)")],
    )


def shares(x: Array, y: Array, most: int) -> None:
    """NumPy's exact answer, or that it gave up after `most` tries."""
    try:
        np.shares_memory(x, y, max_work=most)
    except np.exceptions.TooHardError:
        pass


def hard(quick: bool, where: str) -> Iterator[Result]:
    memory = np.empty(300_000_000, "i1")
    bad = (
        as_strided(memory, (1049,) * 3, (36674, 61119, 85569)),
        as_strided(memory[64023025:], (1049,) * 2, (12223, 12224)),
    )
    most = 10**6 if quick else 10**8
    work: Work = {
        f"np.shares_memory, given up after {most} tries": lambda: shares(*bad, most),
        "fanin.overlap": lambda: fanin.overlap(*bad),
    }
    first, mine = work
    yield measure(
        f"a pair that defeats a search, core {where}", work, base=first, unit="ms", rounds=3 if quick else 9,
        targets=[] if quick else [at_least(10, mine, first)],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    several = []
    for _ in range(10 if quick else 40):
        pair = [
            as_strided(memory[rng.integers(0, 1000) :], rng.integers(5, 90, 3), rng.integers(10_000, 600_000, 3) * 3)
            for _ in range(2)
        ]
        several.append(pair)
    works: Work = {
        f"np.shares_memory, at most {most} tries": lambda: [shares(x, y, most) for x, y in several],
        "fanin.overlap": lambda: [fanin.overlap(x, y) for x, y in several],
    }
    first, mine = works
    yield measure(
        f"{len(several)} pairs with large random strides, core {where}",
        works,
        base=first,
        unit="ms",
        rounds=3 if quick else 9,
    )


def guard(quick: bool, where: str) -> Result:
    """A hundred arrays, of which nothing differs; they lie elsewhere."""
    torch = peer("torch")
    one, two = ([*list(np.zeros((50, 20))), *list(np.zeros((20, 50)).T)] for _ in range(2))
    layout = Layout(one)
    work: dict[str, Any] = {
        "100 ndarrays": lambda: layout.check(two),
        "100 tensors": None,
        "np.may_share_memory of neighbours": lambda: [
            np.may_share_memory(x, y) for x, y in zip(two[1:], two, strict=False)
        ],
    }
    if torch is not None:
        tensors = [*torch.zeros(50, 20), *torch.zeros(20, 50).T]
        fanin.sharing.overlaps(tensors)
        recorded = Layout(tensors)
        work["100 tensors"] = lambda: recorded.check(tensors)
    return measure(
        f"does everything lie as it did, core {where}",
        work,
        base="100 ndarrays",
        unit="us",
        rounds=5 if quick else 300,
        calls=10,
    )


def results(quick: bool) -> Iterator[Result]:
    """All rows."""
    with pinned() as where:
        for name in ("separate pieces", "columns"):
            yield beside_torch(name, 100 if quick else 1_000, 20, quick, where)
            if not quick:
                yield beside_torch(name, 10_000, 100, quick, where)
        yield from by_position(quick, where)
        for name in CUTS:
            yield growth(name, quick, where)
        for name in pairs():
            yield pair(name, quick, where)
        yield from hard(quick, where)
        yield guard(quick, where)
