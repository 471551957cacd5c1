"""What used to leave the fast path, beside what always took it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import fanin

from .timing import Result, at_most, measure, peer, pinned

EIGHT = "for g in {gs}:\n    {buf}.add(0, g)\n{buf}.take({how})"


def low(quick: bool, where: str) -> Iterator[Result]:
    """One add to a slot that is declared of a low dtype."""
    torch, ml_dtypes = peer("torch"), peer("ml_dtypes")
    names: dict[str, Any] = {"f4": fanin.InputBuffer(1, budget=float("inf")).add, "x_f4": np.ones(16, "f4")}
    work: dict[str, Any] = {"float32 ndarray": "f4(0, x_f4)", "float32 tensor": None}
    for name in ("bfloat16", "float8_e4m3fn"):
        names[name] = fanin.InputBuffer([fanin.Slot(dtype=name)], budget=float("inf")).add
        work |= {f"{name} ndarray": None, f"{name} tensor": None}
        if ml_dtypes is not None:
            names[f"x_{name}"] = np.ones(16, getattr(ml_dtypes, name))
            work[f"{name} ndarray"] = f"{name}(0, x_{name})"
        if torch is not None:
            names |= {
                f"t_{name}": torch.ones(16).to(getattr(torch, name)),
                f"of_{name}": fanin.InputBuffer([fanin.Slot(dtype=name)], budget=float("inf")).add,
            }
            work[f"{name} tensor"] = f"of_{name}(0, t_{name})"
    if torch is not None:
        fanin.InputBuffer(1).add(0, torch.ones(1))  # the first tensor of a process is met by the general path
        names |= {"t_f4": torch.ones(16), "of_f4": fanin.InputBuffer(1, budget=float("inf")).add}
        work["float32 tensor"] = "of_f4(0, t_f4)"
    targets = [
        at_most(1.35, f"{name} {kind}", f"float32 {kind}")
        for name in ("bfloat16", "float8_e4m3fn")
        for kind in ("ndarray", "tensor")
    ]
    yield measure(
        f"one add of 16 numbers to a declared slot, core {where}",
        work,
        base="float32 ndarray",
        names=names,
        targets=targets,
        rounds=3 if quick else 300,
        calls=64,
    )


def takes(quick: bool, where: str) -> Iterator[Result]:
    """Eight adds of 16 float32 and a take with each wish, into slots of each kind."""
    torch = peer("torch")
    names: dict[str, Any] = {
        "gs": [np.full(16, i + 0.5, "f4") for i in range(8)],
        "out": [np.empty(16, "f4")],
        "buf": fanin.InputBuffer(1),
    }
    names |= {
        "combines": fanin.InputBuffer([fanin.Slot(combine=lambda a, b: (a, b))]),
        "learns": fanin.InputBuffer(1, stats=True),
    }
    wishes = {"writable=True": "writable=True", "scale=0.5": "scale=0.5", "out=": "out=out"}
    work: dict[str, Any] = {"take()": EIGHT.format(gs="gs", buf="buf", how="")}
    work |= {name: EIGHT.format(gs="gs", buf="buf", how=how) for name, how in wishes.items()}
    work |= {
        "combine=": EIGHT.format(gs="gs", buf="combines", how=""),
        "stats=True": EIGHT.format(gs="gs", buf="learns", how=""),
    }
    how: dict[str, Any] = {"rounds": 3 if quick else 300, "calls": 16}
    targets = [at_most(1.1, name, "take()") for name in ("writable=True", "scale=0.5", "out=")]
    yield measure(
        f"eight adds of 16 float32 and a take, core {where}", work, base="take()", names=names, targets=targets, **how
    )
    if torch is None:
        return
    names |= {"gs": [torch.full((16,), i + 0.5) for i in range(8)], "out": [torch.empty(16)]}
    work = {"take()": EIGHT.format(gs="gs", buf="buf", how="")} | {
        name: EIGHT.format(gs="gs", buf="buf", how=word) for name, word in wishes.items()
    }
    work["torch, s = s + g"] = "s = gs[0] + gs[1]\nfor g in gs[2:]:\n    s = s + g"
    targets += [at_most(0.34, "take()", "torch, s = s + g")]
    yield measure(
        f"eight adds of torch tensors and a take, core {where}",
        work,
        base="take()",
        names=names,
        targets=targets,
        **how,
    )


def small_things(quick: bool, where: str) -> Iterator[Result]:
    """Numbers, copies, donations, undefined gradients; arrays that are made, and reads."""
    names: dict[str, Any] = {
        "add": (buf := fanin.InputBuffer(1)).add,
        "take": buf.take,
        "a": np.ones(16, "f4"),
        "b": np.ones(16, "f4"),
    }
    names |= {
        "x": 1.5,
        "y": 2.5,
        "n": 3,
        "p": np.float64(1.5),
        "q": np.float32(2.5),
        "buf": buf,
        "fanin": fanin,
        "slots": [fanin.Slot(shape=(16,), dtype="float32")],
    }
    how: dict[str, Any] = {"names": names, "rounds": 3 if quick else 300, "calls": 64}
    two = "add(0, {0})\nadd(0, {1})\ntake()"
    work = {"two ndarrays": two.format("a", "b"), "two floats": two.format("x", "y"), "two ints": two.format("n", "n")}
    work |= {"two np.float64": two.format("p", "p"), "two np.float32": two.format("q", "q")}
    work |= {
        "two donated": two.format("a, donate=True", "b, donate=True"),
        "two copied": two.format("a, copy=True", "b, copy=True"),
        "None and one": two.format("None", "a"),
    }
    work |= {"two a.copy()": "a.copy()\nb.copy()"}
    yield measure(f"two adds and the take, core {where}", work, base="two ndarrays", **how)
    made = {
        "InputBuffer(1)": "fanin.InputBuffer(1)",
        "InputBuffer([slot])": "fanin.InputBuffer(slots)",
        "Slot(shape=, dtype=, name=)": "fanin.Slot(shape=(16,), dtype='float32', name='w')",
    }
    yield measure(
        f"made and asked, core {where}",
        made | {"buf.counters": "buf.counters", "fanin.counters()": "fanin.counters()"},
        base="InputBuffer(1)",
        **how,
    )


def results(quick: bool) -> Iterator[Result]:
    """All of them, in ns."""
    with pinned() as where:
        yield from low(quick, where)
        yield from takes(quick, where)
        yield from small_things(quick, where)
