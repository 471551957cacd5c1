"""An optimizer that steps within a block of `accumulate`, where the sums are not in `.grad` yet."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._interop.torch_leaves import word

__tracebackhide__ = True  # no frames of ours in reports of pytest

Accumulate = Any  # a block of fanin.torch.accumulate, whose module imports this one

NAMED = 3  # of the parameters in a message
_lock = threading.Lock()
_open: dict[int, weakref.ref[Accumulate]] = {}  # a dict, whose values are copied in one step
_is_watched = False


def opened(block: Accumulate) -> None:
    """Have optimizers say that they step parameters of the block.

    torch's hook of all optimizers stays after the first block: a step of another thread that goes through these hooks
    while one is removed raises.
    """
    global _is_watched
    with _lock:
        if not _is_watched:
            register_optimizer_step_pre_hook(_before_step)
            _is_watched = True
    _open[id(block)] = weakref.ref(block)


def closed(block: Accumulate) -> None:
    """May be repeated."""
    _open.pop(id(block), None)


def _before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """RuntimeError if a step would do nothing, or read an earlier `.grad` alone; a RuntimeWarning if it leaves
    parameters of a block out.
    """
    blocks = [block for block in (ref() for ref in [*_open.values()]) if block is not None]
    if not blocks:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    call = f"accumulate: {type(optimizer).__name__}.step() within the block steps"
    early = [*_names_of([p for p in parameters if p.grad is not None], [b for b in blocks if b._keeps_grads])]
    if early:
        raise RuntimeError(
            f"{call} {_words(early)} by the .grad from before the block, without the block's sum: call it before the"
            " block for that .grad, or after it for both"
        )
    left_out = [*_names_of([p for p in parameters if p.grad is None], blocks)]
    if not left_out:
        return
    last = "" if all(block._keeps_grads for block in blocks) else ", or use block.last(step)"
    message = (
        f"{call} nothing of {_words(left_out)}, whose .grad is there from the end of the block on: call it after the"
        f" block{last}"
    )
    if all(p.grad is None for p in parameters):
        raise RuntimeError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _names_of(parameters: list[torch.Tensor], blocks: list[Accumulate]) -> Iterator[str | int]:
    """The names of those whose gradients one of the blocks collects."""
    for p in parameters:
        names = [name for name in (block._name_of(p) for block in blocks) if name is not None]
        yield from names[:1]


def _words(names: list[str | int]) -> str:
    named = ", ".join(word(name) for name in names[:NAMED])
    if len(names) > NAMED:
        return f"{named} and {len(names) - NAMED} more"
    return named
