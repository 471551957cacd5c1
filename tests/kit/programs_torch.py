"""Random functions on torch tensors: views, writes, duplicates, no-grad; and the arguments to call them with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = tuple[str, int, int]

VIEWS = (
    "t",
    "select",
    "slice",
    "flat",
    "expand",
    "unbind",
    "split",
    "detach",
    "unsqueeze",
    "alias",
    "diagonal",
    "data",
)
WRITES = ("mul_", "add_", "zero_", "copy_", "setitem")
GEOMETRY = ("t_", "unsqueeze_", "squeeze_", "transpose_")
FRESH = ("plus", "times", "clone", "custom")


class Viewed(torch.autograd.Function):
    """A view with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def apply(pool: list[Any], step: Step) -> None:
    """One step: an operation on a tensor of the pool, whose results join the pool."""
    op, which, how = step
    x = pool[which % len(pool)]
    if op.startswith("no_grad "):
        with torch.no_grad():
            apply(pool, (op.removeprefix("no_grad "), which, how))
    elif op == "t":
        pool.append(x.transpose(0, -1) if x.ndim else x.view(x.shape))
    elif op == "select":
        pool.append(x[how % x.shape[0]] if x.ndim > 1 else x.view(x.shape))
    elif op == "slice":
        pool.append(x[how % 2 :] if x.ndim else x.view(x.shape))
    elif op == "flat":
        pool.append(x.view(-1) if x.is_contiguous() else x.unsqueeze(0))
    elif op == "expand":
        pool.append(x.unsqueeze(0).expand(2, *x.shape))
    elif op == "unbind":
        pool.extend(x.unbind(0) if x.ndim else [x.view(x.shape)])
    elif op == "split":
        pool.extend(x.split(2) if x.ndim else [x.view(x.shape)])
    elif op == "detach":
        pool.append(x.detach())
    elif op == "data":
        pool.append(x.data)
    elif op == "unsqueeze":
        pool.append(x.unsqueeze(0))
    elif op == "alias":
        pool.append(x.view(x.shape))
    elif op == "diagonal":
        pool.append(x.diagonal() if x.ndim > 1 else x.view(x.shape))
    elif op == "mul_":
        x.mul_(2)
    elif op == "add_":
        x.add_(pool[how % len(pool)].detach().sum() if how % 2 else 1)
    elif op == "zero_":
        x.zero_()
    elif op == "copy_":
        x.copy_(torch.ones(()))
    elif op == "setitem":
        x[...] = 3.0
    elif op == "t_":
        x.transpose_(0, -1) if x.ndim else x.unsqueeze_(0)
    elif op == "unsqueeze_":
        x.unsqueeze_(0)
    elif op == "squeeze_":
        x.squeeze_()
    elif op == "transpose_":
        x.transpose_(-1, 0) if x.ndim else x.unsqueeze_(0)
    elif op == "plus":
        pool.append(x + 1)
    elif op == "times":
        pool.append(x * pool[how % len(pool)].sum())
    elif op == "custom":
        pool.append(Viewed.apply(x))
    elif op == "clone":
        pool.append(x.clone())
    else:
        raise AssertionError(op)


@dataclass(frozen=True)
class Program:
    kinds: tuple[str, ...]
    steps: tuple[Step, ...]
    outs: tuple[int | str, ...]
    keep: bool
    no_empty_writes: bool = False  #: what writes no element is left out

    def args(self) -> list[Any]:
        """What to call it with: always the same."""
        made: list[Any] = []
        for n, kind in enumerate(self.kinds):
            base = torch.arange(12.0).reshape(4, 3) + n
            if kind == "leaf":
                made.append(base.requires_grad_())
            elif kind == "grown":
                made.append(base.requires_grad_() * 1)
            elif kind == "view":
                made.append(base.requires_grad_().clone()[1:])
            elif kind == "transposed":
                made.append(base.t())
            elif kind == "expanded":
                made.append(base[:1].expand(4, 3))
            elif kind == "again":
                made.append(made[0])
            elif kind == "number":
                made.append(7)
            else:
                made.append(base)
        return made

    def pool(self, *args: Any) -> list[Any]:
        """All tensors that it is given or makes."""
        pool = [x for x in args if isinstance(x, torch.Tensor)]
        for step in self.steps:
            writes = step[0].removeprefix("no_grad ") in WRITES
            if not (self.no_empty_writes and writes and pool[step[1] % len(pool)].numel() == 0):
                apply(pool, step)
        return pool

    def fn(self, *args: Any) -> list[Any]:
        pool = self.pool(*args)
        outs: list[Any] = []
        for o in self.outs:
            if isinstance(o, int):
                outs.append(pool[o % len(pool)])
            elif o == "number":
                outs.append(3)
            elif o == "none":
                outs.append(None)
            elif o == "twin":
                y = pool[-1] * 2
                outs += [y, y.detach()]
            elif o == "pieces":
                y = pool[-1] * 2
                outs += [y.unsqueeze(0), y.unsqueeze(-1), y.view(y.shape)][: 2 + len(self.steps) % 2]
            elif o == "lone":
                outs.append((pool[0] * 2).unsqueeze(0))
            elif o == "unbound":
                y = pool[-1] * 2
                outs += [*y.unsqueeze(0).unbind(-1), *([y] if len(self.steps) % 2 else [])]
            elif o == "last two":
                outs += pool[-2:]
        return outs


#: Arguments that require a gradient.
ASKING = ("leaf", "grown", "view")


def program(rng: random.Random, gradients: bool = False) -> Program:
    """A random program; with `gradients`, most of its arguments require one."""
    kinds = [
        "plain",
        *rng.choices(
            ("plain", "leaf", "grown", "view", "transposed", "expanded", "again", "number"), k=rng.randint(0, 2)
        ),
    ]
    rng.shuffle(kinds)
    if kinds[0] in ("again", "number"):
        kinds[0] = rng.choice(("plain", "grown", "view"))
    if gradients:
        kinds = [rng.choice(ASKING) if k in ("plain", "transposed") and rng.random() < 0.7 else k for k in kinds]
    steps = []
    for _ in range(rng.randint(0, 6)):
        family: tuple[str, ...] = rng.choices((VIEWS, WRITES, GEOMETRY, FRESH), (5, 3, 1, 3))[0]
        op = rng.choice(family)
        if rng.random() < 0.2:
            op = f"no_grad {op}"
        steps.append((op, rng.randint(0, 11), rng.randint(0, 7)))
    outs: list[int | str] = [rng.randint(0, 11) for _ in range(rng.randint(0, 4))]
    more = ("number", "none", "twin", "last two", "pieces", "lone", "unbound")
    outs += rng.choices(more, (1, 1, 2, 2, 2, 2, 2), k=rng.randint(0, 2))
    return Program(tuple(kinds), tuple(steps), tuple(outs), rng.random() < 0.5)


def base_program(rng: random.Random) -> tuple[Callable[..., Any], list[Any]]:
    """A function of two views of one base, which it may write, and of one or two other tensors, in any order; and
    arguments for it.
    """
    grad = rng.random() < 0.7
    base = torch.arange(12.0, requires_grad=grad)
    base = base * 1 if grad else base
    spans = rng.choice((((0, 8), (4, 12)), ((0, 6), (3, 9)), ((0, 12), (2, 5))))
    views = [base[a:b] for a, b in spans]
    others = [torch.ones(4, requires_grad=rng.random() < 0.5) * 1 for _ in range(rng.randint(1, 2))]
    args = [*views, *others]
    order = list(range(len(args)))
    rng.shuffle(order)
    args = [args[i] for i in order]
    one, two = order.index(0), order.index(1)
    writes = [i for i in (one, two, *range(len(args))) if rng.random() < 0.4] or [one]
    pick = [rng.choice(("view", "input", "plus", "kept")) for _ in range(rng.randint(0, 3))]
    which = [rng.randrange(len(args)) for _ in pick]

    def fn(*xs: Any) -> list[Any]:
        for i in writes:
            xs[i].mul_(2)
        outs: list[Any] = []
        for what, i in zip(pick, which, strict=True):
            x = xs[i]
            if what == "view":
                outs.append(x[1:])
            elif what == "input":
                outs.append(x)
            elif what == "plus":
                outs.append(x + 1)
            else:
                y = x * 3
                outs += [y[:1], y[1:]]
        return outs

    return fn, args


def dedupe(args: list[Any]) -> tuple[list[bool], list[int]]:
    """For each argument whether it is the first that is this tensor, and its position among the first ones."""
    seen: dict[int, int] = {}
    mask, positions = [], []
    for x in args:
        new = not isinstance(x, torch.Tensor) or id(x) not in seen
        mask.append(new)
        if new:
            position = sum(mask) - 1
            if isinstance(x, torch.Tensor):
                seen[id(x)] = position
            positions.append(position)
        else:
            positions.append(seen[id(x)])
    return mask, positions
