"""A sum of `fanin.torch.accumulate`, lent to a kernel that adds into it: `block.target(p)`."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import _core
from .._interop.classes import TORCH
from .._interop.torch_leaves import has_memory, word
from .._words import type_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

Accumulate = Any  # a block of fanin.torch.accumulate, whose module imports this one


class Target(_core.Block):
    """The result of `accumulate.target`: a context that lends a tensor to add into. Its end may be repeated."""

    def __init__(self, block: Accumulate, slot: int) -> None:
        self.slot = slot
        self.thread = 0  # that began it
        self._block = block
        self._context: _core.Target | None = None
        self._given = self._over = self._again = False
        self._lent: torch.Tensor | None = None
        self._like: tuple[object, ...] = ()  # facts of the tensor that no kernel changes
        self._good: bool | None = None  # what was added counts; None: this is not decided
        self._wrong: str | None = None  # why it does not
        self._ended: list[object] = []  # holds one object when the core's target has ended

    def _begin(self) -> torch.Tensor:
        self._again = self._context is not None
        if self._again:
            raise RuntimeError("accumulate: a target is entered once: call target(p) again")
        block, slot = self._block, self.slot
        block._check_open("target(p)")
        name, p = word(block._names[slot]), block._parameters[slot]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"accumulate: target of {name}: gradients are enabled, as in backward(create_graph=True), and what is"
                " added to the sum cannot be differentiated: use it under torch.no_grad(), or in backward() without"
                " create_graph"
            )
        if p._backward_hooks:
            raise RuntimeError(
                f"accumulate: target of {name}: it has hooks of register_hook(), which would not see what is added to"
                " the sum: remove them, or return the gradient"
            )
        if p.device.type not in ("cpu", "cuda") or not has_memory(p):
            raise TypeError(
                f"accumulate: target of {name}: expected a tensor with memory of its own on the CPU or CUDA, got"
                f" {type_of(p)} on {p.device}"
            )
        stream: Any = torch.cuda.current_stream(p.device) if p.device.type == "cuda" else None
        weight = block._passes.weigh(torch._C._current_graph_task_id(), p, 1) if block._passes.now else None
        weighed = {} if weight is None else {"weight": weight}
        self.thread = threading.get_ident()
        with block._named(), torch.inference_mode(False), torch.no_grad():
            self._context = block._buffer.target(slot, stream=stream, **weighed)
            lent: torch.Tensor = self._context._lend(TORCH, block._sums[slot])
        self._lent = lent
        if lent.shape != p.shape:
            raise ValueError(
                f"accumulate: target of {name}: its shape was {tuple(lent.shape)} when the block was made, and is"
                f" {tuple(p.shape)} now"
            )
        self._like = _facts(lent)
        block._targets.add(self)
        self._given = True
        return lent

    def _end(self, error: BaseException | None) -> None:
        if self._again:
            self._again = False
            return
        context = self._context
        if context is None:
            if error is None:
                raise RuntimeError("accumulate: __exit__ of a target without __enter__")
            return
        if not self._given:  # nothing was written
            context._cancel()
            return
        block = self._block
        if not self._over:
            self._finish(context, error)
        if error is None and self._wrong is not None:
            raise RuntimeError(f"accumulate: target of {word(block._names[self.slot])}: {self._wrong}")

    def _finish(self, context: _core.Target, error: BaseException | None) -> None:
        """End the core's target, and empty the tensor, so that no later write meets the sum."""
        block, slot, lent = self._block, self.slot, self._lent
        if self._good is None:
            wrong = self._fault()
            self._wrong, self._good = wrong, error is None and wrong is None
        if lent is not None:
            alias = lent.detach()
            with torch.inference_mode(False), torch.no_grad():
                lent.set_(torch.empty(0, dtype=lent.dtype, device=lent.device).untyped_storage(), 0, (0,), (1,))
            references: Any = getattr(torch._C, "_storage_Use_Count", None)
            if references is None or references(alias.untyped_storage()._cdata) > 2:  # those of alias and of this call
                block._aliases.setdefault(slot, []).append((alias, alias._version))
            self._lent = None
        if not self._ended:
            if self._good:
                block._came[slot] = 1
            kind = None if self._good else RuntimeError
            with block._named():  # only C code runs between the end and the mark
                self._ended.extend(map(context.__exit__, [kind], [error], [None]))
        block._targets.discard(self)
        self._over = True

    def _fault(self) -> str | None:
        """Why what was added does not count."""
        lent = self._lent
        if lent is not None and lent.requires_grad:
            return "acc records a graph: what is added cannot be differentiated"
        if lent is not None and _facts(lent) != self._like:
            return "acc has other memory or another layout than at the beginning: only add to it in place"
        if self._block._came[-1]:
            return "the block ended first: the sum may lack what was added: join the thread within the block"
        return None

    def stop(self) -> None:
        """End in the place of the `with`: what was added until now counts. May be repeated."""
        if self._context is not None and self._given and not self._over:
            self._finish(self._context, None)
            self._wrong = self._wrong or "the block ended first: the sum has what was added until then"


def _facts(lent: torch.Tensor) -> tuple[object, ...]:
    return lent.data_ptr(), lent.shape, lent.stride(), lent.dtype, lent.device


def written_later(words: str) -> str:
    return (
        f"accumulate: a view of what target() lent was written after its `with`: the sum of {words} may have a part of"
        " that: write within the `with` only"
    )
