"""A batch's last pass, in which an optimizer steps leaf by leaf: `block.last(step)` of `fanin.torch.accumulate`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import _core
from .._interop.torch_leaves import Later, accumulators, after_hooks, word
from .target import written_later

__tracebackhide__ = True  # no frames of ours in reports of pytest

Accumulate = Any  # a block of fanin.torch.accumulate, whose module imports this one

STEPPED = "a parameter was stepped in last(step)"  # from here on no weight can count


class Last(_core.Block):
    """The result of `accumulate.last`: each parameter is stepped when its gradient has arrived."""

    def __init__(self, block: Accumulate, step: Callable[[torch.Tensor], object]) -> None:
        self._block, self._step = block, step
        self._token = block._passes.announce("last(step)", weighs=False)
        self._began = self._again = False
        self._waits: dict[int, bool] = {}  # the slots that were not stepped yet; threads take them out
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def _begin(self) -> None:
        self._again = self._began
        if self._again:
            raise RuntimeError("accumulate: last(step) is entered once: call last(step) again")
        block = self._block
        block._passes.enter(self._token)
        block._check_open("last(step)")
        if block._last is not None:
            raise RuntimeError("accumulate: last(step) within last(step): expected the first to end first")
        replaced = [slot for slot in range(len(block._parameters)) if block._taking.is_replaced(slot)]
        if replaced:
            raise RuntimeError(
                f"accumulate: last(step): the tensor of {block._words(replaced)} was replaced within the block, as by"
                " set_(): replace tensors outside of the block, or assign to .data"
            )
        self._began, block._last = True, self
        self._waits = dict.fromkeys(range(len(block._parameters)), True)
        nodes = accumulators("accumulate", block._parameters, block._names)
        # They run after the block's own hooks, and refer to nothing that a dropped block needs to end.
        me = weakref.ref(self)
        hooks = [functools.partial(_arrived, me, slot) for slot in range(len(nodes))]
        if nodes:
            self._hooks.extend(map(type(nodes[0]).register_prehook, nodes, hooks))

    def arrived(self, slot: int) -> None:
        """All of a parameter's gradients of this pass have been collected."""
        if self._waits.pop(slot, False):
            self._finish(slot)
        elif self._block._came[slot]:
            raise RuntimeError(
                f"accumulate: last(step): a second gradient of {word(self._block._names[slot])} came after its step, as"
                " of a second pass, or of reentrant checkpoints that share it: it is in the next sum; run one pass"
                " within last()"
            )

    def _finish(self, slot: int) -> None:
        """Finish a sum, step, and free it."""
        self._block._passes.freeze(STEPPED)
        finished = Step(self._block, slot)
        with finished:
            if finished.there:
                self._run(slot)

    def _run(self, slot: int) -> None:
        p = self._block._parameters[slot]
        try:
            with torch.no_grad():
                for after in [*after_hooks(p).values()]:
                    if isinstance(after, Later):  # else torch has run it
                        after.hook(p)
                self._step(p)
        except BaseException as e:
            e.add_note(f"accumulate: raised in last(step), in the step of {word(self._block._names[slot])}")
            raise

    def _end(self, error: BaseException | None) -> None:
        if self._again:
            self._again = False
            return
        if not self._began:
            if error is None:
                raise RuntimeError("accumulate: __exit__ of last(step) without __enter__")
            return
        was_open = self._block._last is self
        self.close()
        if error is None and not was_open:
            raise RuntimeError("accumulate: the block ended before its last(step): end last() within the block")
        try:
            for slot in [*self._waits] if error is None else ():
                if self._waits.pop(slot, False):
                    self._finish(slot)
        finally:
            self._block._passes.stepped()

    def close(self) -> None:
        """Step no more in passes. May be repeated."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._block._last is self:
            self._block._last = None


def _arrived(last: weakref.ref[Last], slot: int, gradients: tuple[torch.Tensor | None]) -> None:
    one = last()
    if one is not None:
        one.arrived(slot)


class Step(_core.Block):
    """Takes a sum and leaves it where `into` names; at the end the parameter begins anew. The end may be repeated."""

    def __init__(self, block: Accumulate, slot: int) -> None:
        self._block, self._slot = block, slot
        self._sums: dict[int, torch.Tensor | None] = {}  # empty until the sum was taken
        self._kept: torch.Tensor | None = None  # the sum, where `into` names
        self._next: list[torch.Tensor | None] = []  # the first term of what comes next
        self._added: list[object] = []  # holds one object when the buffer has it
        self.there = False  # there is a sum

    def _begin(self) -> None:
        block, slot = self._block, self._slot
        if block._is_rewritten(slot):
            raise RuntimeError(written_later(word(block._names[slot])))
        if block.mean and block._came[slot] and not block._passes.divisor(slot):
            raise ZeroDivisionError(
                f"accumulate: last(step): the mean of {word(block._names[slot])} has a divisor of 0: it is not stepped,"
                " and the block keeps its sum"
            )
        block._aliases.pop(slot, None)
        try:
            block._take_one(slot, self._sums)
            block._add_to_first(slot, self._sums)
            self._leave()
        except Exception as e:
            raise RuntimeError(
                f"accumulate: there is no .{block.into} for the sum of {word(block._names[slot])}: {e}"
            ) from e

    def _leave(self) -> None:
        block, slot = self._block, self._slot
        if self._sums[slot] is not None:
            block._leave_one(slot, self._sums[slot])
            self._kept = getattr(block._parameters[slot], block.into)
            self.there = True

    def _end(self, error: BaseException | None) -> None:
        block, slot, into = self._block, self._slot, self._block.into
        if self._sums.get(slot) is None:
            return
        if self._kept is None:
            self._leave()
        p = block._parameters[slot]
        if not self._next:
            now = getattr(p, into, None)
            made_here = now is self._kept and now is not block._firsts[slot]
            self._next.append(None if error is None and made_here else now)
        [first] = self._next
        block._firsts[slot] = first
        block._came[slot] = 0
        if block.mean:  # it is no term: the next mean is added to it
            block._passes.step(slot)
            block._added.pop(slot, None)
        elif first is not None and not self._added:
            add = functools.partial(block._buffer.add, donate=first.dtype == block._sums[slot])
            with block._named():
                self._added.extend(map(add, [slot], [first.detach()]))
        if into == "grad" or first is None:
            setattr(p, into, None)
