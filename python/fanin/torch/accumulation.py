"""Gradients of several passes of torch, collected: `fanin.torch.accumulate`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch

from .. import _core
from .._checks import flag
from .._interop.protocols import DTypeLike
from .._interop.torch_leaves import (
    Names,
    Taking,
    after_hooks,
    check_sum,
    counts_alone,
    counts_of,
    dense_sum,
    gradient_dtype,
    gradient_strides,
    has_memory,
    have_after_hooks,
    laid_out,
    leaves_of,
    recorded,
    word,
)
from .._weights import Weight, parts_of, weight_of
from .._words import names_nearest, type_of
from ..slots import Slot
from . import steps
from .last import Last
from .target import Target, written_later
from .weights import Entry, Passes, Weighted

if TYPE_CHECKING:
    from .. import dist

__tracebackhide__ = True  # no frames of ours in reports of pytest

R = TypeVar("R")

_task: Callable[[], int] = torch._C._current_graph_task_id

BUFFER = "accumulate"  # the name of the block's buffer, for messages
LARGE = 1 << 16  # bytes: copying more costs more than checking whether a copy is needed


class accumulate(_core.Block):
    """Collect the gradients of several backward passes and leave their sums in `.grad`: a context manager.

    A gradient that exists at the beginning is the first term, as in torch, and the sum is written into that tensor, so
    that a flat buffer or another view of its memory has the sum at the end, and perhaps a part of it before. Inside the
    block no gradient reaches `.grad`, which is None; so `zero_grad()` inside changes nothing. Several threads may run
    backward passes at once. At the end, also of a block that raised, each sum is left where `into` names; a parameter
    without a gradient keeps None. A block that is dropped without its exit ends then, with a ResourceWarning; so does
    one that is open when Python ends (by `atexit`), and over ranks no sum is made.

    Hooks of tensors (`register_hook`) run in each pass. Hooks of `register_post_accumulate_grad_hook` that exist when
    the block begins, such as those of an optimizer that steps in the backward pass, run once, after the sums are in
    `.grad`, unless the block raised. Hooks that run after the block's own, such as those of `AccumulateGrad` nodes,
    receive None.

    `DistributedDataParallel` receives no gradients in the block: run the passes in its `no_sync()` and reduce the sums.
    Without it the end of the block is an error, because the reduction leaves something else in `.grad`. A pass that
    still runs in another thread when the block ends raises an error in that thread.

    Parameters
    ----------
    parameters : iterable of torch.Tensor, or of (str, torch.Tensor)
        Leaves; `named_parameters()` gives names for errors. Tensors that require no gradient are skipped, a tensor that
        comes twice counts once.
    dtype : torch.dtype, DTypeLike or "exact"
        The dtype of the sums. Default: float32 for float16, bfloat16 and float8, else the parameter's own.
    into : str
        "grad", or "main_grad" for a tensor in the dtype of the sum beside `.grad`, which is made if there is none.
    budget : float or "auto"
        Bytes of gradients that are kept before they are folded into the running sums (`fanin.InputBuffer`). Default: 0
        if every sum has its parameter's dtype or, for 16 bits and fewer, float32, so that each gradient is added in
        place at once, as torch does.

    group : optional
        The block sums over the passes of all ranks of a group, or of what `fanin.dist.group` accepts: every rank opens
        a block for the same parameters. At its end the sums travel, and are added to an earlier `.grad`, which is kept
        in the block. Sums of 16-bit gradients run in float32. If a block raises, no rank's `.grad` changes, and the
        other ranks raise a PeerError.
    order : "key", "exact" or "rank", optional
        For ranks, as for `fanin.dist.Reducer`. "exact" keeps 8 bytes an element, "rank" a sum in the accumulation
        dtype, "key" every gradient. The key of a pass is its place, those of rank 0 first, or set by `at`. Default:
        "key" if no rank runs more than one pass, else "rank".
    scale : number, optional
        For ranks: multiplies each sum before the rounding.
    missing : "error" or "skip", optional
        For ranks, as for `fanin.dist.Reducer`. Default: "error".
    wire, wire_out : DTypeLike, optional
        For ranks: the narrower dtypes as which gradients and sums travel, as for `fanin.dist.Reducer`.
    mean : bool
        Divide each sum by the exact sum of the weights of all micro-batches (`weight`), for every parameter alike,
        whether a micro-batch reaches it or not. A pass outside of `weight` weighs 1, if it brings a gradient of the
        block. An earlier `.grad` is no term: the mean is added to it.

    Raises
    ------
    TypeError
        Not a tensor, not a leaf, or a module; a kind of parameter that docs/accumulation.md has as refused.
    ZeroDivisionError
        At the end of a block with `mean`: the weights sum to 0. `.grad` has the sums, not divided; over ranks none
        changes.
    ValueError
        An unknown `into`, no parameters, a parameter that another block collects, or a `grad_dtype` of None; options
        for ranks without `group`; `dtype`, `budget` or `into` with it.
    fanin.PeerError
        At the end of a block over ranks: another rank raised, is gone, or has other parameters or options.
    ImportError
        torch is not installed.
    RuntimeError
        Parameters that FSDP or DTensor shards; an exit without its beginning; in a backward pass, a gradient that
        records a graph (`create_graph=True`). At the end it names the parameters whose shape or dtype has changed, or
        whose earlier `.grad` has no memory any more (these keep the earlier `.grad`, the others have their sums), and
        those whose `.grad` was set within the block (these have the sum instead) or whose tensor was replaced there, as
        by `set_` (these have all gradients). Ctrl-C during the end is raised when the end is complete.

    Notes
    -----
    Source: hooks of `AccumulateGrad` nodes (`torch.autograd.graph.Node.register_prehook`); the sums follow rule A11 of
    docs/rules.md.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)  # doctest: +SKIP
    >>> with fanin.torch.accumulate(model.parameters(), dtype=torch.float32):  # doctest: +SKIP
    ...     for x in torch.randn(64, 8, 4, dtype=torch.bfloat16):
    ...         model(x).square().mean().backward()
    >>> model.weight.grad.dtype  # doctest: +SKIP
    torch.bfloat16

    The mean over all tokens of micro-batches whose losses are means over theirs:

    >>> with fanin.torch.accumulate(model.parameters(), mean=True) as block:  # doctest: +SKIP
    ...     for x, y in micro_batches:
    ...         with block.weight(y.numel()):
    ...             torch.nn.functional.cross_entropy(model(x), y).backward()

    Over ranks, each of which has some of the micro-batches:

    >>> with fanin.torch.accumulate(model.parameters(), group=fanin.dist.group(), order="exact"):  # doctest: +SKIP
    ...     for x in mine:
    ...         model(x).square().mean().backward()
    """

    __slots__ = (
        "__weakref__",
        "_active",
        "_added",
        "_again",
        "_aliases",
        "_began",
        "_buffer",
        "_came",
        "_collecting",
        "_dropped",
        "_firsts",
        "_group",
        "_joined",
        "_last",
        "_left_open",
        "_named_parameters",
        "_names",
        "_options",
        "_own",
        "_parameters",
        "_passes",
        "_reducer",
        "_rests",
        "_shapes",
        "_slots_by_id",
        "_sums",
        "_taking",
        "_targets",
        "_undivided",
        "_weighed",
        "into",
        "mean",
    )

    @names_nearest
    def __init__(
        self,
        parameters: Iterable[torch.Tensor | tuple[str, torch.Tensor]],
        dtype: DTypeLike | None = None,
        *,
        into: str = "grad",
        budget: float | Literal["auto"] | None = None,
        group: object = None,
        order: dist.options.Order | None = None,
        scale: complex | None = None,
        missing: Literal["error", "skip"] | None = None,
        wire: DTypeLike | None = None,
        wire_out: DTypeLike | None = None,
        mean: bool = False,
    ) -> None:
        self._active = self._began = self._dropped = self._again = False
        _blocks.add(self)
        self._collecting: dist.reducer._Collecting | None = None
        if not isinstance(into, str) or into not in ("grad", "main_grad"):
            raise ValueError(f'accumulate: into is "grad" or "main_grad", not {into!r}')
        self.into = into
        self.mean = flag("accumulate: mean", mean)
        self._passes = Passes(self.mean)
        self._parameters, self._names = leaves_of("accumulate", parameters)
        self._reducer: dist.Reducer | None = None
        here = (("dtype", dtype), ("budget", budget), ("into", None if into == "grad" else into))
        over = (("order", order), ("scale", scale), ("missing", missing), ("wire", wire), ("wire_out", wire_out))
        for option, value in over if group is None else here:
            if value is not None:
                raise ValueError(f"accumulate: {option}= is for sums {'over' if group is None else 'without'} ranks")
        if group is not None:
            from ..dist import resting

            self._named_parameters = [(word(name), p) for name, p in zip(self._names, self._parameters, strict=True)]
            self._options = {
                "order": order,
                "scale": scale,
                "missing": missing or "error",
                "wire": wire,
                "wire_out": wire_out,
                "mean": mean,
            }
            self._reducer = resting.awake(self._named_parameters, group, self._options)
            self._group, self._rests = self._reducer.group, False
            self._slots_by_id = {id(p): slot for slot, p in enumerate(self._parameters)}
            self._weighed = [] if order == "exact" else self._reducer._sums_run_in()
            return
        self._taking = Taking("accumulate", self._parameters, self._names)
        each = zip(self._parameters, self._names, strict=True)
        self._own = own = [gradient_dtype("accumulate", p, name, into) for p, name in each]
        self._shapes = [p.shape for p in self._parameters] if into == "main_grad" else []
        of = {d: _sum_dtype(d, dtype) for d in set(own)}
        self._sums = [of[d] for d in own]
        for p, name, d in zip(self._parameters, self._names, own, strict=True):
            if of[d] is not d or dtype == "exact":
                check_sum("accumulate", p, name, d, "exact" if dtype == "exact" else of[d])
        if budget is None and dtype != "exact" and all(of[d] in (d, _sum_dtype(d, None)) for d in of):
            budget = 0  # each gradient is added in place while it is in the cache, as torch does
        with self._named():
            self._buffer = _core.InputBuffer(self._slots(dtype), budget=budget, name=BUFFER)
        n = len(self._sums)
        self._firsts: list[torch.Tensor | None] = [None] * n  # earlier gradients, into which the sums are written
        self._joined: dict[int, torch.Tensor] = {}  # sums with what reached .grad all the same
        self._added: dict[int, torch.Tensor] = {}  # means with earlier gradients
        self._undivided: set[int] = set()  # sums whose mean has a divisor of 0
        self._targets: weakref.WeakSet[Target] = weakref.WeakSet()  # those that are open
        #: The dtypes in which weights are rounded.
        self._weighed = [] if dtype == "exact" else [str(d).removeprefix("torch.") for d in set(self._sums)]
        self._left_open: set[int] = set()  # slots whose target was open when the block ended
        self._aliases: dict[int, list[tuple[torch.Tensor, int]]] = {}  # of lent sums: views that were kept
        self._last: Last | None = None  # the one that is open
        self._came = bytearray(n + 1)  # 1: the slot received a gradient; the last: the block has ended

    def _slots(self, dtype: DTypeLike | None) -> list[Slot]:
        """A slot for each parameter; unnamed parameters of the same shape and dtype share one."""
        known: dict[tuple[torch.Size, torch.dtype, str | None], Slot] = {}
        slots = []
        for i, (p, own, name) in enumerate(zip(self._parameters, self._own, self._names, strict=True)):
            key = (p.shape, own, name if type(name) is str else None)
            slot = known.get(key)
            if slot is None:
                shape, own, called = key
                try:
                    slot = Slot(
                        shape=tuple(shape), dtype=own if self.into == "grad" else None, accumulate=dtype, name=called
                    )
                except (TypeError, ValueError) as e:
                    raise type(e)(f"slot {i}: {e}") from None
                known[key] = slot
            slots.append(slot)
        return slots

    def at(self, key: int, weight: float | None = None) -> Self:
        """Set the key of the gradients that come next, and return the block: for sums over ranks with order="key".

        Each key is for one pass, and is given once in all ranks.

        Parameters
        ----------
        key : int
            A non-negative number: the place of the pass among all passes of all ranks.
        weight : number, optional
            The weight of the pass, as of `weight`, until the next `at`. It counts now. Default: that of a
            `with block.weight(w)`, else 1.

        Raises
        ------
        RuntimeError
            Outside of the block, or without `group`; a weight within `with block.weight(w)`.
        TypeError, ValueError
            A key or a weight that is none.
        """
        if self._reducer is None or not self._active:
            raise RuntimeError("accumulate: at(key) is for a block over ranks: give group=, and call it in the block")
        entry = None
        if weight is not None:
            entry = Entry(self._passes, weight_of("accumulate: at(key, weight=)", weight, self._weighed))
            self._check_weights("at(key, weight=)")
            if self._passes.here() is not None:
                raise RuntimeError(
                    "accumulate: at(key, weight=) within weight(w): a pass has one weight: give it at one place"
                )
        self._reducer._collect_at(key)
        self._passes.keyed = None
        if entry is not None:
            self._passes.count(entry)
            self._passes.keyed = entry
        self._passes.forget()
        return self

    def weight(self, w: float) -> contextlib.AbstractContextManager[Any]:
        """Weigh the passes inside: `with block.weight(tokens): loss.backward()`.

        Each gradient of these passes is multiplied by the weight, in the dtype of the sum, before it is added; a pass
        outside weighs 1. With `mean=True` the weight counts once for each `with`, however many passes it holds, and for
        every parameter, reached or not. So `mean=True` and the means over tokens of micro-batches, each weighed by its
        number of tokens, make the mean over all tokens.

        The weight is that of all passes that begin within the `with` on its thread, on the devices and in passes within
        them, too. Several threads may each be in a `with` of their own.

        If the body raises, a weight counts if one of its gradients had come, because that one is in the sum. Otherwise
        it does not count, and the micro-batch may be tried again.

        Parameters
        ----------
        w : number
            A finite real number, also 0. Rounded to the dtype of the sum; as it is in the divisor of the mean.

        Returns
        -------
        context manager
            Enter it once.

        Raises
        ------
        TypeError
            Not a number, or an array or a tensor (give `x.item()`), or a complex number.
        ValueError
            A bool, NaN or inf, or inf in the dtype of the sum; an int that is no float exactly.
        RuntimeError
            Outside of the block, or within another weight of it; over ranks, after `last()`. In a backward pass: a
            gradient of a pass that began within a `with` that has ended, or that runs after a `weight` without a
            `with`. At the end of the block: a `weight` that no `with` entered.

        Examples
        --------
        >>> with fanin.torch.accumulate(model.parameters(), mean=True) as block:  # doctest: +SKIP
        ...     for x, y in micro_batches:
        ...         with block.weight((y != -100).sum().item()):
        ...             cross_entropy(model(x), y, ignore_index=-100).backward()
        """
        made = weight_of("accumulate: weight(w)", w, self._weighed)
        self._check_weights("weight(w)")
        return Weighted(self, made)

    def _check_weights(self, call: str) -> None:
        """RuntimeError where no pass can be weighed any more."""
        if self._reducer is None:
            self._check_open(call)
        elif not self._active or self._collecting is None or self._collecting.over:
            raise RuntimeError(f"accumulate: {call} outside of the block: call it between its beginning and its end")
        elif self._collecting.is_summed:
            raise RuntimeError(
                f"accumulate: {call} after last(), whose end has summed all gradients: call it before it, or in"
                " another block"
            )

    def target(self, p: torch.Tensor) -> Target:
        """Lend the running sum of a parameter to a kernel that adds into it, so that no gradient is made.

        `with block.target(p) as acc:` in the `backward` of a `torch.autograd.Function`, which returns None for the
        parameter, gives a tensor of the parameter's shape in the dtype of the sum; `acc.addmm_(x.t(), g)` adds to it,
        on the current stream. The end of the `with` counts it as one contribution, beside gradients that come in the
        usual way, as of a weight that is used twice.

        The tensor is the running sum, if it is complete, dense, in its own memory or that of an earlier gradient, and
        no other thread uses it; its strides are those of the sum. Else it holds zeros, which are added to the sum at
        the end of the `with`: so for "exact" sums, with a `budget`, within a `weight`, in a target within a target of
        the parameter, and while another thread has the sum. Write only by adding, and only within the `with`: after it,
        `acc` is empty, and a write to a view that was kept is an error at the end of the block, which names the
        parameter. (Writes that torch does not count, as through `acc.numpy()`, are not found.)

        If the body raises, zeros are dropped and the sum is as it was; a running sum that was lent has an unknown part
        of the body's writes: it is not left in `.grad`, and the end of the block names the parameter. An earlier
        `.grad` is then what the body left there.

        Parameters
        ----------
        p : torch.Tensor
            A parameter of the block: the object itself, which `ctx.saved_tensors` returns, but not within a checkpoint
            or other hooks of saved tensors. There keep it in `forward`: `ctx.w = w`.

        Returns
        -------
        context manager
            Enter it once.

        Raises
        ------
        TypeError
            Not a tensor; at the beginning of the `with`, a parameter without memory of its own, or one that is neither
            on the CPU nor on CUDA.
        ValueError
            The block does not have this parameter, or its shape has changed.
        RuntimeError
            Outside of the block; over ranks (`group=`); with gradients enabled, as in `backward(create_graph=True)`:
            what is added cannot be differentiated; a parameter with hooks of `register_hook`, which would not see what
            is added. At the end of the `with`: `acc` records a graph or has other memory (nothing was added if it held
            zeros), or the block has ended.

        Notes
        -----
        Source: `torch.Tensor.addmm_` with beta=1, and D34 of docs/decisions.md.

        Examples
        --------
        >>> class Linear(torch.autograd.Function):  # doctest: +SKIP
        ...     @staticmethod
        ...     def forward(ctx, x, w):
        ...         ctx.save_for_backward(x, w)
        ...         ctx.w = w
        ...         return x @ w
        ...
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         x, w = ctx.saved_tensors
        ...         with block.target(ctx.w) as acc:
        ...             acc.addmm_(x.t(), g)
        ...         return g @ w.t(), None
        """
        return Target(self, self._slot_of("target", p))

    def last(self, step: Callable[[torch.Tensor], object] | None = None) -> contextlib.AbstractContextManager[Any]:
        """Step an optimizer leaf by leaf in the last pass of a batch, so that no two finished sums are alive at once.

        Over ranks, without a step: the sums travel while the pass within `with block.last():` runs, and are in `.grad`
        at its end; a pass after it in the block is an error.

        In the pass within `with block.last(step):`, each parameter's sum is finished as soon as its gradient of this
        pass has arrived: it is left where `into` names, hooks after accumulation run, `step(p)` runs, without
        gradients enabled, and the sum is freed before the next one is made. So `step` need not clear `.grad`. A tensor
        that was there before the block stays, as `step` leaves it. Parameters that the pass does not reach and that
        have a sum are stepped at the end of the `with`, in the order of the block.

        After its step a parameter begins anew: gradients that come later in the block are a new sum, so that one block
        may hold many batches. Give each parameter an optimizer of its own:
        `optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}`.

        Each parameter takes one gradient within the `with`: several uses of it in one pass are one. In several threads,
        `step` may run for several parameters at once: join the threads within the `with`. What needs all gradients at
        once, as a clipped norm does, cannot be done in `step`.

        Parameters
        ----------
        step : callable
            Called with a parameter that has its sum. Over ranks: None.

        Returns
        -------
        context manager
            Enter it once.

        Raises
        ------
        TypeError
            `step` cannot be called.
        fanin.PeerError
            Over ranks, at the end: another rank raised, is gone, or has other parameters or options.
        RuntimeError
            Outside of the block; within another `last`; without a `with`, at the end of the block; a step over ranks
            (`group=`), or a second `last` there; a pass of another thread meanwhile; a parameter whose tensor was
            replaced within the block. In a backward pass: a second gradient for a parameter after its step, as of a
            second pass or of reentrant checkpoints that share it; the gradient stays in the sum. A sum that cannot be
            finished.
        BaseException
            What `step` raises, with a note that names the parameter, ends the pass; the sum of this parameter stays in
            `.grad` as `step` left it, and all others are in `.grad` at the end of the block. So it is with Ctrl-C.

        Notes
        -----
        Source: optimizers in the backward pass (`register_post_accumulate_grad_hook`), here with accumulation.

        Examples
        --------
        >>> with fanin.torch.accumulate(model.parameters()) as block:  # doctest: +SKIP
        ...     for x in batches[:-1]:
        ...         model(x).square().mean().backward()
        ...     with block.last(lambda p: optimizers[p].step()):
        ...         model(batches[-1]).square().mean().backward()
        """
        if self._collecting is not None and self._active and step is None:
            return self._collecting.at_last()
        if step is None and self._reducer is not None:
            raise RuntimeError("accumulate: last() outside of the block: call it between its beginning and its end")
        if step is None or not callable(step):
            raise TypeError(f"accumulate: last(step): expected a function of a parameter, got {type_of(step)}")
        return Last(self, step)

    def _slot_of(self, call: str, p: torch.Tensor) -> int:
        """The slot of a parameter of the block."""
        self._check_open(f"{call}(p)")
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"accumulate: {call}(p): expected a parameter of the block, got {type_of(p)}")
        slot = self._taking.slot_of(p)
        if slot is not None:
            return slot
        raise ValueError(
            f"accumulate: {call}(p): the block does not collect this tensor of shape {tuple(p.shape)}: expected one of"
            " its parameters itself, not a view or a copy, such as saved tensors are within a checkpoint (keep the"
            " parameter in forward: ctx.w = w)"
        )

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return _named(self._names)

    def _check_open(self, call: str) -> None:
        if self._reducer is not None:
            raise RuntimeError(f"accumulate: {call} is for a block without ranks: give no group=")
        if not self._active or not self._began or self._came[-1]:
            raise RuntimeError(f"accumulate: {call} outside of the block: call it between its beginning and its end")

    def _stop_targets(self, failed: dict[int, Exception]) -> None:
        """End the targets of this thread that are open; `take` waits for those of other threads. May be repeated."""
        for target in [*self._targets]:
            if target.thread == threading.get_ident():
                self._left_open.add(target.slot)
                try:
                    target.stop()
                except Exception as e:
                    failed[target.slot] = e

    def _is_rewritten(self, slot: int) -> bool:
        """Whether a view of the slot's lent sum was written after its `with`."""
        return any(alias._version != version for alias, version in self._aliases.get(slot, ()))

    def __repr__(self) -> str:
        if self._reducer is not None:
            return f"<fanin.torch.accumulate: {len(self._parameters)} parameters over {self._group!r}>"
        dtypes = sorted({str(d).removeprefix("torch.") for d in self._sums})
        state = f"{self._buffer.counters.adds} gradients so far" if self._active else "not collecting"
        many = f"{len(self._parameters)} parameter{'' if len(self._parameters) == 1 else 's'}"
        return f"<fanin.torch.accumulate: {many} into .{self.into}, sums in {', '.join(dtypes) or 'nothing'}: {state}>"

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _begin(self) -> Self:
        self._again = self._active
        if self._again:
            raise ValueError("accumulate: the block has begun already: expected it to end first")
        self._active = True
        self._began = self._dropped = False
        self._passes.start()
        if self._reducer is not None:
            if self._rests:
                from ..dist import resting

                self._reducer = resting.awake(self._named_parameters, self._group, self._options)
                self._rests = False
            self._collecting = self._reducer._collect(self._passes)
            self._collecting.__enter__()
            steps.opened(self)
            return self
        self._buffer.clear()  # of a gradient that came after the last end, in another thread, which got an error
        self._came[-1] = 0
        self._joined.clear()
        self._added.clear()
        self._undivided.clear()
        self._left_open.clear()
        self._aliases.clear()
        self._taking.weighs = self._passes.now
        self._taking.begin(self._collectors())
        self._firsts = [getattr(p, self.into, None) for p in self._parameters]
        for slot, first in enumerate(self._firsts):
            if first is not None:
                if not self.mean:  # else the mean is added to it
                    self._add_first(slot, first)
                if self.into == "grad":
                    self._parameters[slot].grad = None
        self._began = True
        if self.into == "grad":
            steps.opened(self)
        return self

    def _name_of(self, p: torch.Tensor) -> str | int | None:
        """The name of a parameter whose `.grad` the block keeps back; None for any other."""
        if not self._active:
            return None
        slot = None
        if self._reducer is None:
            slot = self._taking.slot_of(p) if self._last is None else None
        elif self._collecting is not None and not self._collecting.over and not self._collecting.is_summed:
            slot = self._slots_by_id.get(id(p))
        return None if slot is None else self._names[slot]

    @property
    def _keeps_grads(self) -> bool:
        """Whether an earlier `.grad` is in its place within the block."""
        return self._reducer is not None

    def _add_first(self, slot: int, first: torch.Tensor) -> None:
        """Add an earlier gradient. If it has the dtype of the sum, the sum is made in it."""
        with self._named():
            self._buffer.add(slot, first.detach(), donate=first.dtype == self._sums[slot])

    def _end(self, error: BaseException | None) -> None:
        if self._again:  # what ends is the entry that was refused: the block goes on
            self._again = False
            return
        if self._dropped:
            return
        if not self._active:
            raise RuntimeError("accumulate: __exit__ without __enter__")
        unentered = self._passes.why_unentered() if error is None else None
        if self._reducer is not None:
            self._end_over_ranks(error if unentered is None else RuntimeError(unentered))
            if unentered is not None:
                raise RuntimeError(unentered)
            return
        came = bytes(self._came)
        self._leave_all(self._began)
        if unentered is not None:
            raise RuntimeError(f"{unentered}; .{self.into} has the sum without it")
        if error is None:
            for p in have_after_hooks(itertools.compress(self._parameters, came)):
                for after in [*after_hooks(p).values()]:
                    after(p)

    def _end_over_ranks(self, error: BaseException | None) -> None:
        collecting = self._collecting
        try:
            steps.closed(self)
            if collecting is not None:
                collecting.__exit__(None, error, None)
        finally:
            self._active = collecting is not None and not collecting.over
        if error is None and not self._active:
            from ..dist import resting

            assert self._reducer is not None
            self._rests = True
            resting.rest(self._reducer, self._named_parameters, self._options)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._drop()

    def _drop(self) -> None:
        """End a block that nothing will end."""
        if not getattr(self, "_active", False):
            return
        self._dropped = True
        try:
            warnings.warn(f"accumulate: a block was dropped without its exit: {self!r}", ResourceWarning, stacklevel=3)
        finally:
            if self._reducer is None:
                self._leave_all(self._began)
            elif self._collecting is not None:
                steps.closed(self)
                self._collecting.drop()
                self._active = False

    def _collectors(self) -> Sequence[Callable[[tuple[torch.Tensor | None]], object]]:
        """The hooks of the parameters. They refer to the buffer and not to the block, so that a dropped block ends."""
        add, names, came, passes = self._buffer.add, self._names, self._came, self._passes
        parameters = self._parameters
        small = [p.nbytes < LARGE for p in parameters]
        # If the sum has the dtype of .grad, it may be made in the memory of a gradient.
        own = [dtype == total for dtype, total in zip(self._own, self._sums, strict=True)]
        counts = counts_alone()

        def ended(slot: int) -> RuntimeError:
            return RuntimeError(
                f"accumulate: the block ended while a backward pass ran in another thread, whose gradient of"
                f" {word(names[slot])} may not be in the sum: join the thread within the block"
            )

        def collect(
            slot: int, gradient: torch.Tensor, references: int, error: Exception | None, weight: Weight | None
        ) -> None:
            """Adds a gradient that is sparse, or the first large one."""
            with _named(names):
                if error is not None:
                    raise error
                if came[-1]:
                    raise ended(slot)
                if gradient.requires_grad:
                    raise RuntimeError(f"accumulate: {recorded(names[slot])}")
                alone = gradient.layout == torch.strided and counts_of(gradient, references) in counts
                p = parameters[slot]
                donate = alone and own[slot] and p.layout == gradient.layout and gradient.stride() == p.stride()
                # The buffer has the only reference to a new object, so that it sums while the gradient is in the cache.
                value = gradient.detach() if alone else gradient
                if weight is None:
                    add(slot, value, donate=donate, copy=not alone)
                else:
                    add(slot, value, donate=donate, copy=not alone, weight=weight)
                came[slot] = 1
                if came[-1]:
                    raise ended(slot)

        return _core._collectors(self._buffer, small, came, collect, passes.now, _task, passes.weigh)

    def _leave_all(self, began: bool) -> None:
        """Leave every sum, or restore the earlier gradient. Each step can be repeated, so that Ctrl-C between two steps
        is raised when all are done.
        """
        interrupt: BaseException | None = None
        steps.closed(self)
        sums: dict[int, torch.Tensor | None] = {}
        failed: dict[int, Exception] = {}
        found: tuple[list[int], dict[int, torch.Tensor]] | None = None if began else ([], {})
        left = True  # for _leave, which needs _firsts
        while self._active:
            try:
                if found is None:
                    found = self._set_within()
                if self._last is not None:
                    self._last.close()
                self._stop_targets(failed)
                self._taking.end()
                self._passes.close()
                self._came[-1] = 1
                self._take(sums, failed)
                was_set, strays = found
                if left:
                    self._join(sums, strays, failed)
                    self._add_to_firsts(sums, failed)
                    self._leave(sums, failed)
                left = False
                self._firsts = [None] * len(sums)
                self._came[:-1] = bytes(len(sums))
                self._active = False
            except BaseException as e:
                if isinstance(e, Exception):
                    raise
                interrupt = e
        if interrupt is not None:
            raise interrupt
        if failed:
            why = failed[min(failed)]
            raise RuntimeError(
                f"accumulate: there is no .{self.into} for the sum of {self._words(failed)}: {why}"
            ) from why
        if self._undivided:
            raise ZeroDivisionError(self._no_divisor(self._undivided))
        if strays:
            place = "in .grad"
            if self.into == "grad":
                place = "added to the mean, without a weight" if self.mean else "in the sum, with torch's roundings"
            raise RuntimeError(
                f"accumulate: the tensor of {self._words(strays)} was replaced within the block, as by set_() or"
                " torch.utils.swap_tensors(): torch made it a new AccumulateGrad node, without the block's hook; its"
                f" later gradients are {place}: replace tensors outside of the block, or assign to .data"
            )
        rewritten = [slot for slot in [*self._aliases] if self._is_rewritten(slot)]
        self._aliases.clear()
        if rewritten:
            raise RuntimeError(written_later(self._words(rewritten)))
        if self._left_open:
            raise RuntimeError(
                f"accumulate: a target of {self._words(self._left_open)} was open when the block ended: its sum has"
                " what was added until then: use `with block.target(p) as acc:` within the block"
            )
        if was_set:
            raise RuntimeError(
                f"accumulate: .grad of {self._words(was_set)} was set within the block, by an assignment or by"
                " DistributedDataParallel outside of no_sync(): what was set is not in the sum that is there now"
            )

    def _set_within(self) -> tuple[list[int], dict[int, torch.Tensor]]:
        """The parameters whose .grad was set in the block; and the .grad of those whose node torch has replaced."""
        was_set, strays = list[int](), dict[int, torch.Tensor]()
        for slot, (p, began) in enumerate(zip(self._parameters, self._taking.grads, strict=True)):
            if p.grad is None or (self.into == "main_grad" and p.grad is began):
                continue
            if self._taking.is_replaced(slot):
                strays[slot] = p.grad
            elif self.into == "grad":
                was_set.append(slot)
        return was_set, strays

    def _join(
        self, sums: dict[int, torch.Tensor | None], strays: dict[int, torch.Tensor], failed: dict[int, Exception]
    ) -> None:
        """Add gradients that reached .grad to the sums. A sum that is a tensor of the block's is not written, so that
        this can be repeated.
        """
        for slot, stray in strays.items() if self.into == "grad" else ():
            total = self._joined.get(slot, sums[slot])
            try:
                if slot not in self._joined:
                    self._joined[slot] = stray if total is None else total + stray
                    self._came[slot] = 1
            except Exception as e:
                failed[slot] = e
        sums.update(self._joined)

    def _add_to_firsts(self, sums: dict[int, torch.Tensor | None], failed: dict[int, Exception]) -> None:
        for slot in range(len(sums)) if self.mean else ():
            try:
                self._add_to_first(slot, sums)
            except Exception as e:
                failed[slot] = e

    def _add_to_first(self, slot: int, sums: dict[int, torch.Tensor | None]) -> None:
        """Add a mean to the earlier gradient, in a new tensor, so that this can be repeated."""
        first, mean = self._firsts[slot], sums[slot]
        if not self.mean or first is None or mean is None:
            return
        if slot not in self._added:
            self._added[slot] = _both(first, mean)
        sums[slot] = self._added[slot]

    def _taker(self, slots: Sequence[int], out: object, slot: int | None = None) -> Callable[[], Any]:
        """What takes the sums of slots that count the same weights, or of one: a function of C."""
        if self.mean:
            divisor = self._passes.divisor(slots[0])
            if divisor:
                return functools.partial(_core._take_over, self._buffer, slot, out, parts_of(divisor))
            self._undivided.update(one for one in slots if self._came[one])
        return functools.partial(self._buffer.take, slot=slot, out=out)

    def _no_divisor(self, slots: Iterable[int]) -> str:
        n = len(self._passes.opened) + len(self._passes.alone)
        return (
            f"accumulate: the mean of {self._words(slots)} has a divisor of 0, the sum of the weights of {n} passes:"
            f" .{self.into} has the sum, not divided"
        )

    def _words(self, slots: Iterable[int]) -> str:
        return ", ".join(word(self._names[slot]) for slot in sorted(slots))

    def _take(self, sums: dict[int, torch.Tensor | None], failed: dict[int, Exception]) -> None:
        """Take the sums out of the buffer, all at once, or, if that fails, one by one.

        Only C code runs between taking and storing them: Ctrl-C between two bytecodes would lose the sums.
        """
        n = len(self._parameters)
        if not sums and not self._passes.steps:
            with contextlib.suppress(Exception):
                outs = [self._out(slot) for slot in range(n)]
                wanted = outs if any(out is not None for out in outs) else None
                every = itertools.starmap(self._taker(range(n), wanted), [()])
                sums.update(zip(range(n), itertools.chain.from_iterable(every), strict=True))
        for slot in range(n):
            if slot not in sums:
                try:
                    self._take_one(slot, sums)
                except Exception as e:
                    failed[slot], sums[slot] = e, None
        self._buffer.clear()

    def _take_one(self, slot: int, sums: dict[int, torch.Tensor | None]) -> None:
        """Take one sum out of the buffer. Only C code runs between taking and storing it."""
        with self._named():
            one = itertools.starmap(self._taker([slot], self._out(slot), slot), [()])
            sums.update(zip([slot], one, strict=True))

    def _leave(self, sums: dict[int, torch.Tensor | None], failed: dict[int, Exception]) -> None:
        """Store each sum where `into` names."""
        for slot in range(len(self._parameters)):
            try:
                self._leave_one(slot, sums[slot])
            except Exception as e:  # the other parameters still get their sums
                failed[slot] = e

    def _leave_one(self, slot: int, total: torch.Tensor | None) -> None:
        """Store a sum where `into` names, in the earlier tensor if there was one. This can be repeated."""
        p, first, into = self._parameters[slot], self._firsts[slot], self.into
        kept = total
        try:
            if first is not None and first.layout == torch.strided:
                kept = first
                if self._came[slot] and not _has_memory(first):  # torch would write all the same
                    raise RuntimeError(f"the memory of its earlier .{into} was freed or cut")
                if self._came[slot] and total is not None and not _lies_in(total, first):
                    first.detach().copy_(total)
            elif total is not None:
                kept = laid_out(total, p)
        finally:
            if kept is not None:  # else .grad stays None, or what it was if the block could not begin
                setattr(p, into, kept)

    def _out(self, slot: int) -> torch.Tensor | None:
        """The tensor that a sum is written into: a large earlier gradient, or a new tensor for "main_grad". None: the
        buffer makes one.

        The sum usually lies in a donated gradient already. Copying into a small one is faster than checking it.
        """
        first, dtype, came = self._firsts[slot], self._sums[slot], self._came[slot]
        if first is not None and self.mean:
            return None
        if first is not None:
            rounded = came and first.layout == torch.strided and first.dtype != dtype and first.nbytes >= LARGE
            return first.detach() if rounded else None
        if self.into == "main_grad" and came:
            p = self._parameters[slot]
            if p.shape != self._shapes[slot]:
                return torch.empty(self._shapes[slot], dtype=dtype, device=p.device)
            return torch.empty_strided(p.shape, gradient_strides(p), dtype=dtype, device=p.device)
        return None


_blocks: weakref.WeakSet[accumulate] = weakref.WeakSet()


def _drop_all() -> None:
    """Ends the blocks that are open when Python ends: torch aborts the process where .grad is set later."""
    with contextlib.ExitStack() as each:
        for block in [*_blocks]:
            each.callback(block._drop)


atexit.register(_drop_all)


def _has_memory(x: torch.Tensor) -> bool:
    """Whether the memory of a dense tensor still reaches to its last element."""
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return bool(x.numel() == 0 or x.untyped_storage().nbytes() >= (last + 1) * x.itemsize)


def _lies_in(total: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether a sum was made in the memory of an earlier gradient. Tensors without memory have one address, 0."""
    return has_memory(first) and total.data_ptr() == first.data_ptr()


def _both(first: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The sum of an earlier gradient and a mean, in a new tensor."""
    if mean.layout == torch.strided:
        return dense_sum(mean, first)
    with torch.no_grad():
        return first + mean


def _sum_dtype(own: torch.dtype, accumulate: DTypeLike | None) -> torch.dtype:
    """The torch dtype of a sum that is left in the accumulation dtype."""
    if accumulate is None or (isinstance(accumulate, str) and accumulate == "exact"):
        return torch.float32 if own.itemsize < 4 else own
    named: torch.dtype = getattr(torch, str(_core.dtype_name(accumulate)))
    return named


@contextlib.contextmanager
def _named(names: Names) -> Generator[None]:
    """Errors of the buffer inside have messages about the parameter, not the slot."""
    try:
        yield
    except BaseException as e:
        reason, slot = getattr(e, "reason", None), getattr(e, "slot", None)
        if isinstance(reason, str) and getattr(e, "object", None) == BUFFER:
            e.args = (f"{BUFFER}: {reason}" if slot is None else f"{BUFFER}: {word(names[slot])}: {reason}",)
        raise
