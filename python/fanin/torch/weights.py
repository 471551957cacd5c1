"""What the passes of a block of `fanin.torch.accumulate` weigh: `block.weight(w)`, and the divisor of a mean."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.function as torch_function

from .. import _core
from .._weights import Kind, Weight, exact_sum, kind_of

__tracebackhide__ = True  # no frames of ours in reports of pytest

Accumulate = Any  # a block of fanin.torch.accumulate, whose module imports this one

#: The place in torch's thread-local state that a pass hands on to all of its threads, and to passes within it.
HERE = "fanin.torch.accumulate: weights"
NO_PASS = -1  # torch counts its passes from 0
_task: Callable[[], int] = torch._C._current_graph_task_id
_remove: Callable[[str], object] | None = getattr(torch._C, "_remove_obj_from_tls", None)
#: The functions through which torch's engine runs a pass, and calls a function written in Python.
_RUNS: CodeType | None = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_CALLS: CodeType = torch_function.BackwardCFunction.apply.__code__
_OURS = ("fanin.torch.weights", "fanin.torch.accumulation", "fanin._interop.torch_leaves", "fanin.dist.reducer")


class Passes:
    """The weights of a block's passes. It does not refer to the block, so that a dropped one ends.

    A pass inside `with block.weight(w)` finds the weight in torch's thread-local state, which torch hands on to the
    threads of its devices. Any other pass weighs 1. Passes are known by torch's number, and only when they bring a
    gradient.
    """

    def __init__(self, mean: bool) -> None:
        self.mean = mean
        #: Read by the collectors in C. Empty: each gradient is the plain term. Else the last pass that brought a
        #: gradient, and its weight; None: 1.
        self.now: list[Any] = []
        self.start()

    def close(self) -> None:
        """End the block: no gradient may come any more. May be repeated."""
        for entry in self.opened:
            entry.over = entry.over or "the end of the block"
        if any(entry.passes is self for entry in entries()):
            _leave(tuple(entry for entry in entries() if entry.passes is not self))

    def start(self) -> None:
        """Begin a block."""
        self.now[:] = [NO_PASS, None] if self.mean else []
        self.opened: list[Entry] = []  #: each `with` that counts, also those that have ended
        self.alone: dict[int, None] = {}  #: the passes outside of all
        self.steps: dict[int, Fraction] = {}  #: for a slot: the sum of all weights at its last step in `last(step)`
        self.frozen: str | None = None  #: why no other weight can count now
        self.keyed: Entry | None = None  #: of `at(key, weight=)`
        self.threads: dict[torch.device, int] = {}  #: those of torch that run the passes of devices
        self.unentered: dict[object, Unentered] = {}  #: `weight(w)` and `last(step)` that no `with` has entered yet

    def weigh(self, number: int, gradient: torch.Tensor, functions: int = 0) -> Weight | None:
        """The weight of the pass with this number, which runs here and is counted with its first gradient; None: 1.
        `functions`: how many of its functions in Python are running.
        """
        entry = self.here() or self.keyed
        if entry is None and self.unentered:
            self._check_entered(threading.get_ident())
        if entry is not None:
            entry.arrive()
        elif self.mean and number not in self.alone:
            self._check_outermost(number, gradient, functions)
            self._check_frozen("a pass")
            self.alone[number] = None
        weight = None if entry is None else entry.factor
        if self.now:
            self.now[:] = [number, weight]
        return weight

    def weight_here(self, gradient: torch.Tensor) -> Weight | None:
        return self.weigh(_task(), gradient)

    def here(self) -> Entry | None:
        """What this thread is inside, or the one that began the pass that runs here."""
        for entry in entries():
            if entry.passes is self:
                return entry
        return None

    def count(self, entry: Entry) -> None:
        self._check_frozen("a weight")
        self.opened.append(entry)
        if not self.now:
            self.now[:] = [NO_PASS, None]

    def forget(self) -> None:
        """The collectors look for the weight of the next gradient's pass anew."""
        if self.now:
            self.now[:] = [NO_PASS, None]

    def total(self) -> Fraction:
        """The sum of all weights."""
        return exact_sum([entry.weight for entry in self.opened]) + len(self.alone)

    def divisor(self, slot: int) -> Fraction:
        """The sum of the weights since the slot's last step."""
        return self.total() - self.steps.get(slot, Fraction(0))

    def kind(self) -> Kind:
        return kind_of(entry.weight for entry in self.opened)

    def _is_within(self, device: torch.device, functions: int) -> bool:
        """Whether a pass was begun by a function or a hook of another pass: then a function of Python that torch's
        engine called is on the stack, or two passes are. Deep within passes torch takes other threads, whose stacks
        are empty, as are those of the one thread of a device that is not the CPU.
        """
        runs, calls, empty = 0, 0, True
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            calls += frame.f_code is _CALLS
            runs += frame.f_code is _RUNS
            empty = empty and frame.f_globals.get("__name__") in _OURS
            frame = frame.f_back
        if not empty:
            return runs > 1 or calls > functions
        ours = threading.get_ident()
        return device.type == "cpu" or self.threads.setdefault(device, ours) != ours

    def freeze(self, why: str) -> None:
        """No other weight may count, where a mean has been made."""
        if self.mean and self.frozen is None:
            self.frozen = why

    def step(self, slot: int) -> None:
        """The slot has been stepped, and begins anew."""
        self.steps[slot] = self.total()

    def stepped(self) -> None:
        """`last(step)` has ended: gradients that come now are of the next means, which lack the weights so far."""
        self.frozen = None
        for entry in self.opened if self.mean and self.steps else ():
            entry.over = entry.over or "last(step), in the same weight(w): begin another one for this pass"
        self.forget()

    def announce(self, call: str, weighs: bool) -> object:
        """Note a context manager that was made; the result is for `enter`."""
        token = object()
        self.unentered[token] = Unentered(call, threading.get_ident(), weighs)
        if weighs and not self.now:
            self.now[:] = [NO_PASS, None]
        return token

    def enter(self, token: object) -> None:
        """The context manager is entered."""
        self.unentered.pop(token, None)

    def why_unentered(self) -> str | None:
        """The error of a block that ends while a context manager was never entered."""
        for one in [*self.unentered.values()]:
            done = "weighed no pass" if one.weighs else "stepped no parameter"
            return f"accumulate: {one.call} was called and never entered, so it {done}: use `with block.{one.call}:`"
        return None

    def _check_entered(self, thread: int) -> None:
        """RuntimeError for a pass outside of all weights, where its thread called weight(w) without a `with`."""
        for one in [*self.unentered.values()]:
            if one.weighs and one.thread == thread:
                raise RuntimeError(
                    f"accumulate: a pass runs after {one.call}, which was not entered: use `with block.{one.call}:`"
                    " around the pass"
                )

    def _check_frozen(self, what: str) -> None:
        if self.frozen is not None:
            raise RuntimeError(
                f"accumulate: {what} begins after {self.frozen}, whose mean would lack it: begin it before"
            )

    def _check_outermost(self, number: int, gradient: torch.Tensor, functions: int) -> None:
        """RuntimeError for a pass within a pass, which would count twice."""
        if number == NO_PASS:
            raise RuntimeError(
                "accumulate(mean=True): a gradient came outside of a backward pass: use `with block.weight(1):`"
            )
        if self._is_within(gradient.device, functions):
            raise RuntimeError(
                "accumulate(mean=True): a gradient came from a pass within a pass, as of"
                " checkpoint(use_reentrant=True), and the number of passes is not known: put the micro-batch into"
                " `with block.weight(1):`"
            )


class Unentered(NamedTuple):
    """A context manager of the block that no `with` has entered yet."""

    call: str
    thread: int
    weighs: bool


class Entry:
    """A weight that counts once."""

    def __init__(self, passes: Passes, weight: Weight) -> None:
        self.passes, self.weight = passes, weight
        self.factor = None if weight == 1 else weight  #: None: the plain term
        self.came = False  #: a gradient has come
        self.over: str | None = None  #: why no gradient may come any more

    def arrive(self) -> None:
        if self.over is not None:
            raise RuntimeError(f"accumulate: a gradient came after {self.over}")
        self.came = True


class Weighted(_core.Block):
    """The result of `accumulate.weight`."""

    def __init__(self, block: Accumulate, weight: Weight) -> None:
        self._block, self._weight = block, weight
        self._token = block._passes.announce(f"weight({weight})", weighs=True)
        self._entry: Entry | None = None
        self._before: list[tuple[Entry, ...]] = []  # what this thread was inside of, while it is inside of this
        self._again = False

    def _begin(self) -> None:
        self._again = self._entry is not None
        if self._again:
            raise RuntimeError("accumulate: a weight is entered once: call weight(w) again")
        block = self._block
        block._passes.enter(self._token)
        block._check_weights("weight(w)")
        passes: Passes = block._passes
        here = passes.here()
        if (here is not None and here.over is None) or passes.keyed is not None:
            outer = "weight(w)" if passes.keyed is None else "at(key, weight=)"
            raise RuntimeError(
                f"accumulate: weight(w) within {outer}: a pass has one weight: expected the first to end first"
            )
        self._entry = entry = Entry(passes, self._weight)
        passes.count(entry)
        self._before.append(entries())
        torch._C._stash_obj_in_tls(HERE, (entry, *self._before[0]))

    def _end(self, error: BaseException | None) -> None:
        if self._again:
            self._again = False
            return
        entry = self._entry
        if entry is None:
            if error is None:
                raise RuntimeError("accumulate: __exit__ of weight(w) without __enter__")
            return
        here = entries()
        if entry in here:
            _leave(tuple(one for one in here if one is not entry))
        entry.over = entry.over or "the end of its weight(w): join the thread of its pass within the `with`"
        entry.passes.forget()
        if error is not None and not entry.came and entry in entry.passes.opened:
            entry.passes.opened.remove(entry)


def entries() -> tuple[Entry, ...]:
    """What this thread is inside of, of all blocks."""
    if not torch._C._is_key_in_tls(HERE):
        return ()
    found: tuple[Entry, ...] = torch._C._get_obj_in_tls(HERE)
    return found


def _leave(left: tuple[Entry, ...]) -> None:
    """This thread is inside of `left` alone. An object that a thread has there at its end is dropped by torch, which
    takes the interpreter's lock for it: if Python ends meanwhile, the process aborts.
    """
    if left or _remove is None:
        torch._C._stash_obj_in_tls(HERE, left)
    else:
        _remove(HERE)
