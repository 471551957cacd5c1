"""Calls within a block of `accumulate` that read or change gradients, where the sums are not in `.grad` yet:
optimizers' steps, `clip_grad_norm_` and `GradScaler.unscale_`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._interop.torch_leaves import word
from . import calls

__tracebackhide__ = True  # no frames of ours in reports of pytest

Accumulate = Any  # a block of fanin.torch.accumulate, whose module imports this one

NAMED = 3  # of the parameters in a message
_lock = threading.RLock()  # a block that is dropped while one begins closes on the same thread
_open: dict[int, weakref.ref[Accumulate]] = {}  # a dict, whose values are copied in one step
_is_watched = False


def opened(block: Accumulate) -> None:
    """Have optimizers, and calls that change gradients, say that they leave parameters of the block out.

    torch's hook of all optimizers stays after the first block: a step of another thread that goes through these hooks
    while one is removed raises.
    """
    global _is_watched
    with _lock:
        if not _is_watched:
            register_optimizer_step_pre_hook(_before_step)
            _is_watched = True
        _open[id(block)] = weakref.ref(block)
        calls.guard(_before_call)


def closed(block: Accumulate) -> None:
    """May be repeated."""
    with _lock:
        _open.pop(id(block), None)
        if not _open:
            calls.unguard(_before_call)


def _blocks() -> list[Accumulate]:
    return [block for block in (ref() for ref in [*_open.values()]) if block is not None]


def _before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """RuntimeError if a step would do nothing, or read an earlier `.grad` alone; a RuntimeWarning if it leaves
    parameters of a block out.
    """
    if not _open:
        return
    call = f"{type(optimizer).__name__}.step()"
    _check(call, "steps", [p for group in optimizer.param_groups for p in group["params"]], ", or use block.last(step)")


def _before_call(call: str, parameters: list[torch.Tensor]) -> None:
    """The same of a call that clips or unscales gradients."""
    if _open:
        _check(call, "unscales" if "unscale" in call else "clips", parameters, "", 7)


def _check(call: str, does: str, parameters: list[torch.Tensor], instead: str, level: int = 4) -> None:
    """level: how many calls above is the user's, for the warning."""
    blocks = _blocks()
    what = f"accumulate: {call} within the block {does}"
    early = [*_names_of([p for p in parameters if p.grad is not None], [b for b in blocks if b._keeps_grads])]
    if early:
        raise RuntimeError(
            f"{what} {_words(early)} with the .grad from before the block alone: call it before the block for that"
            " .grad, or after it for both"
        )
    left_out = [*_names_of([p for p in parameters if p.grad is None], blocks)]
    if not left_out:
        return
    if all(block._keeps_grads for block in blocks):
        instead = ""  # they have no last(step)
    message = (
        f"{what} nothing of {_words(left_out)}, whose .grad is there from the end of the block on: call it after the"
        f" block{instead}"
    )
    if does == "unscales" or all(p.grad is None for p in parameters):  # what is unscaled once stays as it is
        raise RuntimeError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=level)


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
