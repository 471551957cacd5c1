"""The audit of a training loop: hooks that show a ledger what passes make, what arrives, and what is read."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from ... import _core
from ..._checks import sequence
from ..._interop.torch import skip_frames
from ..._interop.torch_leaves import accumulators, is_weighed, leaves_of, sharded, taker, word
from ..._words import names_nearest, type_of
from ...audit import Ledger, Row
from ...audit.record import Record
from ...audit.rounding import Vector, empty, rounded, same
from ...audit.rows import check
from .. import calls
from . import ranks
from .samples import DTYPES, Samples, Unlike, refuse_dispatching
from .uses import Uses

__tracebackhide__ = True  # no frames of ours in reports of pytest


class Watched:
    """One parameter of an audit."""

    __slots__ = ("excuse", "name", "parameter", "record", "replica", "samples", "size")

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name, self.parameter = name, parameter
        self.record: Record | None = None
        self.samples: Samples | None = None
        self.excuse = ""  # why this step is not judged
        self.replica: Any = None  # the DistributedDataParallel that averages its gradient
        self.size = parameter.numel()

    def total(self) -> tuple[torch.Tensor | None, bool]:
        """The sum, and whether other code makes it beside `.grad`."""
        main = self.parameter.__dict__.get("main_grad")
        if isinstance(main, torch.Tensor):
            return main, True
        return self.parameter.grad, False


class audit(_core.Block):
    """Compare what backward passes make with what the optimizer reads: a context manager around a loop as it is.

    Three hooks a parameter show what a pass made, whether a block takes it, and what arrived; a hook of the optimizer
    shows what it reads:

    - each arrival is checked bit for bit: the sum before it, plus the gradient, is the sum after it;
    - between arrivals, and before the optimizer's step, the sum must stay as it is; what changed it is named: cleared,
      multiplied by one number, one gradient lost, twice or alone, or changed by other code;
    - `loss` shows the weight of each micro-batch, which is compared with `expect`.

    The audit looks at 256 elements of each gradient, among those that are not zero: a fault that changes a fraction f
    of the elements is seen with probability 1 - (1 - f)^256. It keeps at most 4 KB for a parameter, whatever the
    number of micro-batches (more for float64). It changes nothing: neither gradients nor their order, and an error
    inside of the audit makes a parameter "not judged".

    `print(audit)` shows a table, `rows` has it as data. Begin the block where a step begins, before its first pass.

    Parameters
    ----------
    named_parameters : iterable of (str, torch.Tensor), or of torch.Tensor
        What `model.named_parameters()` gives. Frozen parameters of the optimizer are reported.
    optimizer : torch.optim.Optimizer or None
        Its `step` reads the gradients. None: call `read` where they are read.
    expect : str
        "mean": each of K micro-batches counts 1/K; "sum": each counts 1.
    weights : sequence of float, optional
        What the micro-batches of a step count relative to each other, such as numbers of tokens; or give each to
        `loss`.
    every : int
        One step in so many is audited, the first one among them.
    full : bool
        Look at every element: two more copies of the gradients.
    uses : bool
        Count the uses of each parameter in the forward, and those that lead to a gradient: a tied weight of which one
        use is detached is a warning, since it may be meant. Not for code under `torch.compile`.
    strict : bool
        Raise AuditError in `optimizer.step()`, before it reads, if there is a fault.

    Raises
    ------
    TypeError
        Not a tensor, not a leaf, or a module; an optimizer that is no torch.optim.Optimizer.
    ValueError
        No parameters, two of one name, or none that the optimizer has; an unknown `expect`; an `every` that is no
        positive number. On entry: a parameter that another audit watches.
    RuntimeError
        Parameters that FSDP or DTensor shards; an entry within a function that torch.compile compiles.
    fanin.audit.AuditError
        See `strict`; `.grad` stays as it is.

    Notes
    -----
    `.grad`, `main_grad` beside it, `GradScaler`, `clip_grad_norm_`, blocks of `fanin.torch.accumulate` and
    `DistributedDataParallel` with `no_sync` are followed. For `DistributedDataParallel` all ranks open the audit for
    the same parameters, and `optimizer.step()` has one more all-reduce in each audited step.
    Source: `Tensor.register_hook`, `Tensor.register_post_accumulate_grad_hook`, `Optimizer.register_step_pre_hook`.

    Examples
    --------
    >>> with fanin.torch.audit(model.named_parameters(), optimizer) as audit:  # doctest: +SKIP
    ...     for step in range(100):
    ...         for x, y in micro_batches:
    ...             loss = audit.loss(criterion(model(x), y))
    ...             (loss / len(micro_batches)).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> print(audit)  # doctest: +SKIP
    """

    __slots__ = (
        "__weakref__",
        "_active",
        "_again",
        "_begun",
        "_by_id",
        "_crossed",
        "_frozen",
        "_hooks",
        "_lock",
        "_nodes",
        "_on",
        "_optimizer",
        "_queued",
        "_reading",
        "_reads",
        "_step",
        "_uses",
        "_using",
        "_watched",
        "every",
        "full",
        "ledger",
        "strict",
    )

    @names_nearest
    def __init__(
        self,
        named_parameters: Iterable[torch.Tensor | tuple[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer | None,
        *,
        expect: Literal["mean", "sum"] = "mean",
        weights: Sequence[float] | None = None,
        every: int = 10,
        full: bool = False,
        uses: bool = False,
        strict: bool = False,
    ) -> None:
        self._active = self._begun = self._again = self._using = False
        if type(every) is not int or every < 1:
            raise ValueError(f"audit: every is a positive number of steps, not {every!r}")
        self.every, self.full, self.strict = every, full, strict
        self.ledger = Ledger(expect=expect, weights=weights, full=full)
        given: Any = named_parameters
        if not isinstance(named_parameters, torch.Tensor | torch.nn.Module):
            given = sequence("audit: parameters", named_parameters, "tensors")
        tensors, names = leaves_of("audit", given)
        for i, what in sharded(tensors):
            raise RuntimeError(
                f"audit: {word(names[i])} is sharded by {what}, whose sums an audit does not follow: audit the model"
                " unsharded, on one process"
            )
        self._watched = [Watched(word(name), p) for name, p in zip(names, tensors, strict=True)]
        self._by_id = {id(one.parameter): one for one in self._watched}
        called = Counter(one.name for one in self._watched)
        twice = [name for name, count in called.items() if count > 1]
        if twice:
            raise ValueError(f"audit: two parameters are called {twice[0]}: give each a name of its own")
        pairs = [
            (word(i if not isinstance(x, tuple) else x[0]), x[1] if isinstance(x, tuple) else x)
            for i, x in enumerate(given)
        ]
        self._frozen = [(name, p) for name, p in pairs if not p.requires_grad]
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"audit: expected a torch.optim.Optimizer, got {type_of(optimizer)}: give None, and call audit.read()"
                " where the gradients are read"
            )
        self._optimizer = optimizer
        if optimizer is not None and not any(id(p) in self._by_id for p in self._optimized()):
            raise ValueError(
                f"audit: the {type(optimizer).__name__} has none of the parameters that require a gradient: give those"
                " that it has, or None in its place, and call audit.read() where the gradients are read"
            )
        self._uses = Uses(one.parameter for one in self._watched) if uses else None
        self._lock = threading.RLock()
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # which have hooks, and live as long as references to them
        self._step = 0
        self._reads = 0
        self._on = False
        self._reading = False  # the optimizer reads: what arrives meanwhile belongs to no step
        self._crossed = False  # something arrived meanwhile
        self._queued = -1  # the pass at whose end averages over ranks are looked at

    def _optimized(self) -> list[torch.Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [p for group in groups for p in group["params"]]

    # The block

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    def _begin(self) -> Self:
        self._again = self._begun
        if self._again:
            raise ValueError("audit: the block has begun already: expected it to end first")
        self._begun = True
        if torch.compiler.is_compiling():
            raise RuntimeError("audit: enter the block outside of the function that torch.compile compiles")
        with _lock:
            for other in [*_audits]:
                shared = [one.name for one in self._watched if id(one.parameter) in other._by_id]
                if other._active and shared:
                    raise ValueError(f"audit: {shared[0]} is watched by another audit: end that one first")
            _audits.add(self)
            self._active = True
        for one in self._watched:
            if not one.parameter.requires_grad:
                raise RuntimeError(
                    f"audit: {one.name} required a gradient when it was given, and requires none now: make the audit"
                    " anew"
                )
        modules = ranks.replicas([one.parameter for one in self._watched])
        me: weakref.ref[Any] = weakref.ref(self)
        tensors = [one.parameter for one in self._watched]
        self._nodes = accumulators("audit", tensors, [one.name for one in self._watched])
        skips = functools.cache(skip_frames)  # not longer than a block: torch._dynamo.reset() may forget what it did
        for one, node in zip(self._watched, self._nodes, strict=True):
            one.replica = modules.get(id(one.parameter))
            one.excuse = ""
            if one.record is not None:
                one.record.forget()
            made, reached, arrived = (_skipped(hook, skips) for hook in _hooks(me, one))
            # Only C code runs between a registration and the list: Ctrl-C between two would leave a hook.
            self._hooks.extend(map(one.parameter.register_hook, [made]))
            self._hooks.extend(map(node.register_prehook, [reached]))
            self._hooks.extend(map(one.parameter.register_post_accumulate_grad_hook, [arrived]))
        if self._optimizer is not None:
            self._hooks.extend(map(self._optimizer.register_step_pre_hook, [_skipped(_before_step(me), skips)]))
        calls.watch(self)
        self.ledger.losses.start()
        self._on = self._step % self.every == 0
        if self._uses is not None:
            self._using = True
            self._uses.__enter__()  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def _end(self, error: BaseException | None) -> None:
        """End the block, or one that could not begin. Ctrl-C repeats it."""
        if self._again:  # what ends is the entry that was refused: the block goes on
            self._again = False
            return
        if not self._begun:
            raise RuntimeError("audit: __exit__ without __enter__")
        if self._using and self._uses is not None:
            self._using = False
            self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call, unused-ignore]
        unread = error is None and self._active and not self._reads
        self._leave()
        self._begun = False
        if unread:
            where = "optimizer.step() was not called" if self._optimizer is not None else "read() was not called"
            self.ledger._rows.append(Row("the loop", "not judged", f"{where} in the audit"))

    def _leave(self) -> None:
        """Remove every hook. May be repeated."""
        self._on = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._nodes.clear()
        calls.unwatch(self)
        _audits.discard(self)
        self._active = False

    def __del__(self) -> None:
        if getattr(self, "_active", False) and not sys.is_finalizing():
            self._leave()

    def __repr__(self) -> str:
        state = "active" if self._active else "not active"
        return f"<fanin.torch.audit: {len(self._watched)} parameters, {self._reads} steps read, {state}>"

    def __str__(self) -> str:
        return str(self.ledger)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all steps that were audited."""
        return self.ledger.rows

    # Calls of the loop

    def loss(self, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        """Show the loss of a micro-batch, before the loop divides or scales it, and return it.

        Parameters
        ----------
        loss : torch.Tensor
            A single number.
        weight : float, optional
            What the micro-batch should count relative to the others, such as its number of tokens.

        Raises
        ------
        TypeError
            Not a tensor, as after `loss.item()`.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"audit: loss: expected a tensor, the one whose backward() runs, got {type_of(loss)}")
        if not self._on:
            return loss
        with self._lock:
            known = self.ledger.losses.add(weight)
        if loss.numel() != 1:
            known.unlike = f"audit.loss got {loss.numel()} numbers: give the mean, as one number"
        elif loss.requires_grad:
            known.tolerance = 16 * torch.finfo(loss.dtype).eps
            me: weakref.ref[Any] = weakref.ref(self)

            def weigh(g: torch.Tensor) -> None:
                audit = me()
                if audit is not None and audit._on and len(known.weights) < 64:
                    known.weights.append((torch._C._current_graph_task_id(), float(g.detach())))

            loss.register_hook(_uncompiled(weigh))  # type: ignore[no-untyped-call, unused-ignore]
        return loss

    @contextlib.contextmanager
    def micro_batch(self) -> Generator[None]:
        """Mark the passes of one micro-batch: where it has several, or several losses."""
        self.ledger.losses.begin()
        try:
            yield
        finally:
            self.ledger.losses.end()

    def factor(self, f: float) -> None:
        """Declare that the loop multiplies the gradients of this step by a number, once, after they were summed."""
        if self._on:
            self.ledger.factor(f)

    def discard(self) -> None:
        """Declare that the loop drops the gradients of this step so far, as those of another loss or of an overflow."""
        with self._lock:
            self.ledger.discard()

    def read(self) -> list[Row]:
        """Compare now, and end the step: where no optimizer of torch reads the gradients.

        Returns
        -------
        list of Row
            Empty if this step is not audited.
        """
        return self._read(None, False)

    # Hooks

    def _made(self, one: Watched, gradient: torch.Tensor) -> None:
        """A pass has made a gradient."""
        if one.excuse:
            return
        total, beside = one.total()
        record, samples = one.record, one.samples
        taken = taker(one.parameter)
        if taken is not None:
            self.ledger.losses.pass_runs(torch._C._current_graph_task_id())
        if taken == "Reducer":
            raise Unlike("fanin.dist sums it over ranks")
        if taken is not None and is_weighed(one.parameter):
            raise Unlike("a block of accumulate weighs its gradients, or makes their mean")
        refuse_dispatching("gradient", gradient)
        if record is None or samples is None:
            record, samples = self._follow(one, gradient if total is None or gradient.is_sparse else total, gradient)
        elif not record.began and samples.sparse != gradient.is_sparse:
            raise Unlike("its gradients are sparse and dense")
        if gradient.shape != samples.shape:
            samples.check(gradient)
        x = samples.at(gradient)
        if not (taken and record.began) and samples.dead(x, gradient):
            samples.choose(gradient)
            record.renewed(None if total is None else samples.at(total))
            record.pending.clear()
            x = samples.at(gradient)
        before = self._sum(one, total)
        record.made(x, before, threading.get_ident(), taken is not None)
        if beside and one.parameter.__dict__.get("grad_added_to_main_grad"):
            raise Unlike("a kernel adds its gradients to main_grad")

    def _follow(self, one: Watched, like: torch.Tensor, gradient: torch.Tensor) -> tuple[Record, Samples]:
        """Begin to follow a parameter, at its first gradient."""
        samples = Samples(one.name, like, self.full, one.replica is not None)
        samples.choose(gradient)
        record = self.ledger.records[one.name] = Record(one.name, samples.dtype)
        one.samples, one.record = samples, record
        return record, samples

    def _arrived(self, one: Watched) -> None:
        """The pass has added it."""
        self.ledger.losses.pass_runs(torch._C._current_graph_task_id())
        record = one.record
        if record is None or one.excuse:
            return
        total, beside = one.total()
        key = threading.get_ident()
        if beside:
            record.arrived(None, key, visible=False)
            return
        record.arrived(self._sum(one, total), key)
        replica = one.replica
        if replica is not None and replica.require_backward_grad_sync:
            if replica._comm_hooks:
                raise Unlike("a communication hook sums it over ranks")
            record.reducing = True
            self._at_end_of_pass()

    def _sum(self, one: Watched, total: torch.Tensor | None) -> Vector | None:
        """The sampled elements of a sum."""
        samples, record = one.samples, one.record
        if total is None or samples is None or record is None:
            return None
        if total.dtype is not samples.tensor_dtype and (record.undelivered or not record.began):
            wider = Samples(one.name, total, self.full, one.replica is not None)  # main_grad, made meanwhile
            wider.index, wider.places = samples.index, samples.places
            if wider.dtype != "float64" and record.dtype != "float64":
                one.samples, record.dtype = wider, wider.dtype
                samples = wider
        samples.check(total)
        return samples.at(total)

    def _excuse(self, one: Watched, e: Exception) -> None:
        one.excuse = str(e) if isinstance(e, Unlike) else f"the audit failed: {type(e).__name__}: {e}"

    def _read(self, optimizer: Any, closure: bool) -> list[Row]:
        """The optimizer reads: compare, and begin the next step."""
        rows: list[Row] = []
        try:
            if self._on:
                rows = self._compare(optimizer, closure)
        finally:
            with self._lock:
                self._next()
        if self.strict:
            check(rows)
        return rows

    def _next(self) -> None:
        """Begin the next step."""
        self._reads += 1
        self._step += 1
        was, self._on = self._on, self._step % self.every == 0
        crossed, self._crossed, self._reading = self._crossed, False, False
        if was:
            for one in self._watched:
                one.excuse = ""
            if self._uses is not None:
                self._uses.start()
        if self._on and (crossed or not was):
            for record in self.ledger.records.values():
                record.forget()
            self.ledger.losses.start()
        if self._on and crossed:
            for one in self._watched:
                one.excuse = "a pass ran while the optimizer's step began"

    def _compare(self, optimizer: Any, closure: bool) -> list[Row]:
        """The rows of this step. No lock is held while this rank waits for others."""
        with self._lock:
            self._reading = True
            values = self._values()
        modules = {one.name: one.replica for one in self._watched if one.replica is not None}
        total, size = self.ledger.losses.total(), 1
        if modules:
            records = {name: self.ledger.records[name] for name in modules if name in values}
            total, size = ranks.average(records, modules, total)
        with self._lock:
            return self._close(optimizer, closure, values, total, size)

    def _values(self) -> dict[str, Vector | None]:
        """The sampled elements of what the optimizer reads."""
        values: dict[str, Vector | None] = {}
        for one in self._watched:
            record = one.record
            if record is None:
                if one.excuse:
                    self.ledger.records.setdefault(one.name, Record(one.name, "float32")).excuse = one.excuse
                continue
            values[one.name] = None
            try:
                if not one.excuse:
                    values[one.name] = y = self._sum(one, one.total()[0])
                    record.look(y, "before the step")
            except Exception as e:
                self._excuse(one, e)
        return values

    def _close(
        self, optimizer: Any, closure: bool, values: dict[str, Vector | None], total: float, size: int
    ) -> list[Row]:
        """The rows of this step, which ends. total, size: what the weights sum to on each of so many ranks."""
        for one in self._watched:
            if one.record is not None:
                one.record.excuse = one.excuse or one.record.excuse
                if closure:
                    one.record.excuse = "step(closure) makes gradients within the step"
                elif one.record.excuse:
                    values[one.name] = None
        self._notes(optimizer)
        records = self.ledger.records
        ordered = [one.name for one in self._watched if one.name in records]
        self.ledger.records = {name: records[name] for name in dict.fromkeys([*ordered, *records])}
        scaled = getattr(optimizer, "grad_scale", None)  # of GradScaler, for an optimizer that unscales by itself
        scale = 1.0 if scaled is None else 1 / float(scaled)
        if self.ledger.losses.expect == "sum":
            scale /= size  # ranks average
        return self.ledger.close(values, scale, self._step, total)

    def _at_end_of_pass(self) -> None:
        """Look at the averages over ranks when they are there: after the callback of DistributedDataParallel, which is
        queued before the pass ends.
        """
        number = torch._C._current_graph_task_id()
        if self._queued == number:
            return
        self._queued = number
        me = weakref.ref(self)
        engine = torch.autograd.Variable._execution_engine

        def averaged() -> None:
            audit = me()
            if audit is not None and audit._on:
                with audit._lock:
                    if not audit._reading:
                        audit._averaged()

        engine.queue_callback(lambda: engine.queue_callback(averaged))

    def _averaged(self) -> None:
        """Ranks have averaged their gradients, also those that this rank did not make."""
        for one in self._watched:
            total = one.parameter.grad
            if one.replica is None or one.excuse or total is None:
                continue
            try:
                if one.record is None:
                    self._follow(one, total, total)
                record, now = one.record, self._sum(one, total)
                assert record is not None
                if not record.began and not empty(now):
                    record.began = record.reducing = record.moving = True
                    record.last = None
                if record.reducing:
                    record.look(now, "")
            except Exception as e:
                self._excuse(one, e)

    def _notes(self, optimizer: Any) -> None:
        """What the optimizer does not read."""
        if self._optimizer is None:
            return
        optimized = {id(p) for p in self._optimized()}
        for one in self._watched:
            record = one.record
            if record is None and id(one.parameter) in optimized:
                record = self.ledger.records.setdefault(one.name, Record(one.name, "float32"))
            if record is None:
                continue
            if self._uses is not None:
                words = self._uses.words(one.parameter)
                if words:
                    record._find("warning", words)
            if not one.parameter.requires_grad:
                record._find("warning", "frozen within the audit: requires_grad is False")
            elif record.began and id(one.parameter) not in optimized and not one.total()[1]:
                record._find("fault", "not in the optimizer, and has gradients")
            if record.began and id(one.parameter) in optimized:
                self._beside(one, record)
        for name, p in self._frozen:
            if id(p) in optimized:
                frozen = self.ledger.records.setdefault(name, Record(name, "float32"))
                frozen._find("warning", "frozen: the optimizer has it, and requires_grad is False")

    def _beside(self, one: Watched, record: Record) -> None:
        """A sum in `main_grad`: whether `.grad`, which the optimizer reads, is that sum."""
        total, beside = one.total()
        grad, samples = one.parameter.grad, one.samples
        if not beside or total is None or samples is None or one.excuse:
            return
        if grad is None:
            record._find("note", "main_grad has the sum, and .grad is None: what the optimizer reads is not judged")
            return
        dtype = DTYPES.get(grad.dtype)
        if dtype is None or grad.shape != total.shape or grad.layout != total.layout:
            record._find("warning", "the optimizer reads .grad, which is unlike main_grad")
        elif not same(rounded(samples.at(total), dtype), samples.at(grad), dtype):
            record._find("warning", "the optimizer reads .grad, which is not main_grad")

    # Calls that change gradients by intent

    def begin(self) -> object:
        """The sums before a call."""
        return self._sums() if self._on else None

    def end(self, before: Any, mark: str, scale: float) -> None:
        """The sums after it."""
        if before is None or not self._on:
            return
        with self._lock:
            after = self._sums()
            for one in self._watched:
                if one.record is not None and one.name in before and one.name in after:
                    one.record.seen(before[one.name], after[one.name], mark, scale)

    def _sums(self) -> dict[str, Vector | None]:
        found = {}
        with self._lock:
            for one in self._watched:
                try:
                    if one.record is not None and not one.excuse:
                        found[one.name] = self._sum(one, one.total()[0])
                except Exception as e:
                    self._excuse(one, e)
        return found

    def reads(self) -> int:
        """How many steps were read."""
        return self._reads

    def skipped(self) -> None:
        """GradScaler has skipped the step: begin it anew."""
        if self._on:
            with self._lock:
                self.ledger.discard()
                for one in self._watched:
                    one.excuse = ""

    def has(self, parameters: Iterable[object]) -> bool:
        """Whether one of them is watched."""
        return any(id(p) in self._by_id for p in parameters)

    def steps_by(self, optimizer: object) -> bool:
        """Whether it is the audit's optimizer."""
        return optimizer is self._optimizer


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile does not trace, if it is in use: importing it takes seconds."""
    if "torch._dynamo" not in sys.modules:
        return hook
    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call, unused-ignore]
    return disabled


def _skipped(hook: Any, skips: Callable[[types.CodeType], bool]) -> Any:
    """The same without a wrapper, which takes 1 us a call. Dynamo does not trace this call well. The hooks of all
    parameters have few code objects: `skips` is asked once for each.
    """
    if not skips(hook.__code__):
        return _uncompiled(hook)
    hook._torchdynamo_disable = True
    return hook


def _hooks(me: weakref.ref[audit], one: Watched) -> tuple[Callable[[Any], None], ...]:
    """The hooks of a parameter: of the tensor, of the node that adds to `.grad`, and after it. They refer to no audit,
    so that a dropped one ends, and raise nothing.
    """

    def made(gradient: torch.Tensor) -> None:
        audit = me()
        if audit is not None and audit._on:
            with audit._lock:
                if audit._reading:
                    audit._crossed = True
                    return
                try:
                    audit._made(one, gradient)
                except Exception as e:
                    audit._excuse(one, e)

    def reached(gradients: Any) -> None:
        audit = me()
        if audit is not None and audit._on and one.record is not None and one.record.offered:
            with audit._lock:
                if not audit._reading:
                    one.record.reached(threading.get_ident())

    def arrived(parameter: torch.Tensor) -> None:
        audit = me()
        if audit is not None and audit._on:
            with audit._lock:
                if audit._reading:
                    audit._crossed = True
                    return
                try:
                    audit._arrived(one)
                except Exception as e:
                    audit._excuse(one, e)

    return made, reached, arrived


def _before_step(me: weakref.ref[audit]) -> Callable[..., None]:
    """The hook of the optimizer."""

    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        audit = me()
        if audit is not None and audit._active:
            closure = kwargs.get("closure") is not None or any(callable(x) for x in args)
            audit._read(optimizer, closure)

    return before


_lock = threading.RLock()  # held while a block begins
_audits: weakref.WeakSet[audit] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked child: the audits of the parent end."""
    for one in [*_audits]:
        one._lock = threading.RLock()  # a thread of the parent may hold it
        if one._active:
            one._leave()


os.register_at_fork(after_in_child=_forget_all)
