"""Sums over ranks for torch's own data parallelism: `fanin.torch.ddp_hook` and `fanin.torch.ReduceScatter`."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fanin import _core
from fanin._interop.protocols import DTypeLike
from fanin._words import type_of
from fanin.dist import plans
from fanin.dist.group import Call, Group, TimeLimit, failure_of, limit_of, weakly
from fanin.dist.group import group as group_of
from fanin.dist.layout import Layout, digest, host, leaf_of
from fanin.dist.options import Options, Order
from fanin.dist.sender import Sender
from fanin.dist.sums import Term, finish, headers_of, levels_for, planned, prepare
from fanin.dist.wire import names_of, on_wire

__tracebackhide__ = True  # no frames of ours in reports of pytest

#: The thread of each group that sends the buckets of its replicas, in the order in which they became ready.
_senders: weakref.WeakKeyDictionary[Group, Sender] = weakref.WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_senders.clear)  # a child has no such threads


#: The group of each process group, by id, with a reference to it. A closed group stays closed: making another is
#: collective, and would wait for ranks whose group is open.
Known = dict[int, tuple[object, Group]]


def _group(call: str, x: object, known: Known) -> Group:
    """The group of a process group; RuntimeError where it cannot carry messages."""
    distributed = torch.distributed
    if isinstance(x, Group):
        return x
    if x is None and distributed.is_available() and distributed.is_initialized():
        x = distributed.group.WORLD
    if x is None:
        raise RuntimeError(f"{call}: expected torch.distributed to be initialised: call init_process_group()")
    process_group = isinstance(x, distributed.ProcessGroup)
    if process_group and distributed.get_backend(x) == "nccl" and not torch.cuda.is_available():  # type: ignore[arg-type, unused-ignore]
        raise RuntimeError(f"{call}: the process group is of NCCL, and there is no GPU: make it with Gloo")
    number = id(x)
    if number not in known:
        known[number] = weakly(x, lambda: known.pop(number, None)), group_of(x)
    return known[number][1]


def _options(
    call: str,
    order: Order,
    accumulate: DTypeLike | None,
    scale: complex | None,
    wire: DTypeLike | None = None,
    wire_out: DTypeLike | None = None,
) -> Options:
    """The options of a sum; TypeError or ValueError if they do not fit one another."""
    if not isinstance(order, str) or order not in ("key", "exact", "rank"):
        raise ValueError(f'{call}: expected order="key", "exact" or "rank", got {order!r}')
    exact = isinstance(accumulate, str) and accumulate == "exact"
    name = None if accumulate is None else "exact" if exact else _core.dtype_name(accumulate)
    if order == "exact" and name not in (None, "exact"):
        raise ValueError(f'{call}: order="exact" sums exactly and rounds once: leave out accumulate={accumulate!r}')
    if scale is not None and not isinstance(scale, int | float | complex):
        raise TypeError(f"{call}: scale: expected a number, got {type_of(scale)}")
    sent, back = names_of(call, wire, wire_out)
    return Options(order, scale, accumulate=name, wire=sent, wire_out=back)


def mean_factor(group: Group) -> float:
    """1 / the number of ranks, the same number in every floating-point mode."""
    return _core.in_default_modes(lambda: 1 / group.size)


class _Brought(NamedTuple):
    """What a rank brings to a sum: all ranks must bring the same."""

    title: str  #: of one of the tensors, of which {} is the number
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]  #: of the tensors, which lie side by side
    bounds: tuple[int, ...] | None = None  #: of the ranks' shards; None: of whole blocks (N1)

    @property
    def parts(self) -> list[list[str]]:
        """[name, dtype and shape] of each tensor, for messages and digests."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [[self.title.format(i), f"{dtype} of shape {shape}"] for i, shape in enumerate(self.shapes)]

    def layout(self, x: torch.Tensor, options: Options, ranks: int) -> Layout:
        """.. where they lie as one leaf."""
        made = Layout([leaf_of(x, "the bucket")], ranks)
        (segment,) = made.segments
        if self.bounds is not None:
            segment = replace(segment, bounds=self.bounds)
        sizes = [math.prod(shape) for shape in self.shapes]
        made.segments = (on_wire(segment, options.wire, options.wire_out, sizes),)
        return made


def shape_of(p: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter's gradient in a bucket of DDP, which has complex ones as pairs of real numbers."""
    return (*p.shape, 2) if p.is_complex() else tuple(p.shape)


def _sum(call: Call, x: torch.Tensor, brought: _Brought, options: Options) -> torch.Tensor:
    """The sum of a flat tensor over ranks, or this rank's shard of it."""
    group = call.group
    name = call.name, options.text, brought
    plan = plans.find(group, name)
    total: torch.Tensor
    if isinstance(plan, plans.Plan):
        keys = plan.meet(call, x)
        if keys is not None:
            total = planned(call, plan, x, keys)
            return total
        plan = None
    layout = brought.layout(x, options, group.size)
    sent = prepare(layout, [Term(layout.flatten([x]))], options, group)
    keys = None if plan is None else plan.meet(call)
    if keys is not None:
        total = finish(call, layout, sent, headers_of(keys), options, [x])[0]
        return total
    parts = [["", options.text], *brought.parts]
    headers = call.meet(sent.header, digest=digest(parts))
    call.compare(headers, parts)
    total = finish(call, layout, sent, headers, options, [x])[0]
    if x.numel():
        facts = call.name, parts, brought.bounds, group.size, group._nodes_text
        plans.put(group, name, _plan(group, layout, options, facts))
    return total


def _plan(group: Group, layout: Layout, options: Options, facts: tuple[object, ...]) -> plans.Agreed:
    """The plan of a sum, or of its headers alone where elements travel in a narrower dtype."""
    segment = layout.segments[0]
    if segment.wire is not None or segment.wire_out is not None:
        return plans.Agreed(facts)
    flat = len(levels_for(group, segment, options)) == 1
    return plans.Plan(layout, options, flat, facts)


# ---- DistributedDataParallel


class _End:
    """A callback at the end of a pass of torch's engine, which drops it uncalled if the pass raises."""

    _failed: Callable[[], None] | None = None

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended = ended
        self._failed = failed

    def __call__(self) -> None:
        self.forget()
        self._ended()

    def forget(self) -> None:
        self._failed = None

    def __del__(self) -> None:
        if self._failed is not None:
            self._failed()


def _at_end(callback: Callable[[], None]) -> None:
    """Call `callback` after the pass of this thread, and after the callbacks that it has already."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined, unused-ignore]


class Place(NamedTuple):
    """The number of a bucket in its pass, and whether it is the last one."""

    number: int
    last: bool


class _Pass:
    """One backward pass of a replica, in which every bucket is summed once."""

    def __init__(self, hook: _Hook, group: Group) -> None:
        self.hook, self.group = hook, group
        group._passes += 1
        self.number = group._passes
        self.complete = False  # the last bucket was given to the sending thread
        self.sums, self.over = 0, False  # buckets that this thread has summed, and whether the last one is among them
        self.error: BaseException | None = None  # the first; every rank has one for the same bucket
        self.watched = False  # torch calls or drops an _End of this pass

    def watch(self) -> None:
        """A pass of torch's engine runs a bucket: there are several if backward() is called for parts of a model."""
        if self.watched:
            return
        end = _End(self.ended, self.failed)
        try:
            _at_end(end)
            self.watched = True
        except RuntimeError:  # no pass runs: at the end of join() this rank takes part in the passes of others
            end.forget()

    def call(self, bucket: int) -> Call:
        limit = limit_of("ddp_hook", self.hook.timeout, self.group.timeout)
        return Call(self.group, "ddp_hook", self.number, bucket, limit)

    def sum(self, bucket: Any, place: Place, x: torch.Tensor, brought: _Brought, future: Any) -> None:
        """Sum a bucket, on the sending thread. After an error the future has this rank's own gradients."""
        total = bucket
        self.sums, self.over = self.sums + 1, place.last
        try:
            if self.error is None:
                options = self.hook.options
                if options.scale is None:
                    options = replace(options, scale=mean_factor(self.group))
                with self.group.entered("ddp_hook"), self.call(place.number) as call:
                    if x.layout is not torch.strided:
                        raise TypeError(
                            "ddp_hook: a bucket is a sparse gradient, as of Embedding(sparse=True): expected dense"
                        )
                    total = _sum(call, x, brought, options).to(bucket.device)
        except BaseException as e:
            self.error = e
        future.set_result(total)

    def ended(self) -> None:
        """The pass reached its end. After the last bucket DDP waits for all of them next: raise after that."""
        self.watched = False
        if self.complete:
            self.leave()
            _at_end(self.check)

    def leave(self) -> None:
        """The next bucket is of another pass. After Ctrl-C, that may be the current one already."""
        if self.hook.current is self:
            self.hook.current = None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def failed(self) -> None:
        """The pass raised. The other ranks may wait for this rank's next bucket: end their passes."""
        self.leave()
        try:
            _sender(self.group).put(self.send_failure)
        except RuntimeError:  # its thread cannot start
            self.send_failure()

    def send_failure(self) -> None:
        """On the sending thread, after the buckets that the pass gave it before it raised."""
        if self.error is None and not self.over:
            self.error = RuntimeError("the backward pass raised an exception")
            with contextlib.suppress(Exception), self.group.entered("ddp_hook"):
                self.call(self.sums).meet({}, failure=failure_of(self.error))


class _Hook:
    """What `ddp_hook` returns is the method `ddp_hook` of such an object."""

    def __init__(self, options: Options, timeout: TimeLimit) -> None:
        limit_of("ddp_hook", timeout, None)  # refused before a pass
        self.options, self.timeout = options, timeout
        self.known: Known = {}
        self.current: _Pass | None = None

    def ddp_hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        """Start the sum of a bucket, and return the future that DDP waits for."""
        run = self.current or _Pass(self, _group("ddp_hook", state, self.known))
        run.watch()
        self.current = run
        x = bucket.buffer()
        place = Place(bucket.index(), bucket.is_last())
        shapes = tuple([shape_of(p) for p in bucket.parameters()])
        brought = _Brought("parameter {} of the bucket", x.dtype, shapes)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        _sender(run.group).put(partial(run.sum, x, place, host(x), brought, future))
        run.complete = place.last
        if not run.watched:
            future.wait()
            if run.complete or run.error is not None:
                self.current = None
            run.check()
        return future


def _sender(group: Group) -> Sender:
    if group not in _senders:
        _senders[group] = Sender(group, "fanin.torch")
    return _senders[group]


def ddp_hook(
    order: Order = "key",
    accumulate: DTypeLike | None = None,
    *,
    scale: complex | None = None,
    wire: DTypeLike | None = None,
    wire_out: DTypeLike | None = None,
    timeout: TimeLimit = "group",
) -> Callable[[Any, Any], Any]:
    """Make a communication hook with which `DistributedDataParallel` sums gradients with one rounding.

    `model.register_comm_hook(state, fanin.torch.ddp_hook())`: `state` is the process group that DDP was made with, or
    None for the default one. The bits do not depend on the sizes of buckets. Buckets travel while the pass runs.

    Parameters
    ----------
    order : "key", "exact" or "rank"
        "key" and "rank": the left fold in the order of ranks. "exact": the exact sum, rounded once, so that it does not
        depend on which rank brings which gradient, or on how many there are.
    accumulate : DTypeLike, optional
        The dtype in which the sums run. Default: float32 for float16, bfloat16 and float8, else the dtype itself.
    scale : number, optional
        Multiplies each sum before the rounding. Default: 1 / the number of ranks, for DDP's mean.
    wire, wire_out : DTypeLike, optional
        The narrower dtypes as which gradients and sums travel, as for `fanin.dist.add_n`. float8 has a power of two
        for each 256 elements of a parameter, in the order in which DDP's bucket has them.
    timeout : float or "group", optional
        Seconds after which this rank no longer waits for another. None: it waits without a limit. Default: the
        group's, 300.

    Returns
    -------
    callable
        For one replica: each has a hook of its own.

    Raises
    ------
    TypeError, ValueError
        For options that do not fit; in a pass, for a bucket with sparse gradients.
    fanin.PeerError
        In a pass, on every rank: if a rank's pass raised, or its gradients or options differ. The next pass works,
        unless a rank raised: DDP itself then refuses that rank's next forward.
    RuntimeError
        In a pass: without a process group, for one of NCCL without a GPU, or if the group is closed, as it is after a
        rank was gone or late by `timeout`.

    Notes
    -----
    A hook whose group is closed raises for ever: make a new replica with a new hook, on every rank.

    The error is raised at the end of the pass. Then `.grad` has sums of some buckets and this rank's own gradients of
    the others: call `zero_grad()`. A rank that raises before its first bucket, or in `fanin.torch.backward`, is late.

    Examples
    --------
    >>> model = torch.nn.parallel.DistributedDataParallel(net)  # doctest: +SKIP
    >>> model.register_comm_hook(None, fanin.torch.ddp_hook(order="exact"))  # doctest: +SKIP
    """
    return _Hook(_options("ddp_hook", order, accumulate, scale, wire, wire_out), timeout).ddp_hook


# ---- FSDP2


class ReduceScatter:
    """Sum the gradients of FSDP2 with one rounding: `module.set_custom_reduce_scatter(fanin.torch.ReduceScatter())`.

    Call it for each module that `fully_shard` was called for. FSDP's mean, or the factor of
    `set_gradient_divide_factor`, multiplies before the rounding. For float16 and float64 FSDP divides itself, before
    and after the sum; with `set_force_sum_reduction_for_comms(True)` after it. With shards and replicas (a mesh of two
    dimensions) the sum over replicas is torch's.

    Parameters
    ----------
    order : "key", "exact" or "rank"
        As for `ddp_hook`.
    accumulate : DTypeLike, optional
        As for `ddp_hook`.
    timeout : float or "group", optional
        Seconds after which this rank no longer waits for another. None: it waits without a limit. Default: the
        group's, 300.

    Raises
    ------
    TypeError, ValueError
        For options that do not fit; in a pass, for a reduction that is no sum.
    fanin.PeerError
        In a pass, on every rank: if a rank's gradients or options differ, or a rank is gone or late.
    RuntimeError
        In a pass: for a process group of NCCL without a GPU, or a group that is closed.

    Examples
    --------
    >>> torch.distributed.fsdp.fully_shard(net)  # doctest: +SKIP
    >>> net.set_custom_reduce_scatter(fanin.torch.ReduceScatter(order="exact"))  # doctest: +SKIP
    """

    __slots__ = (
        "__weakref__",
        "_known",
        "_options",
        "_timeout",
    )

    def __init__(
        self, order: Order = "key", accumulate: DTypeLike | None = None, *, timeout: TimeLimit = "group"
    ) -> None:
        self._options = replace(_options("ReduceScatter", order, accumulate, None), into="shard")
        limit_of("ReduceScatter", timeout, None)  # refused before a pass
        self._timeout = timeout
        self._known: Known = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor for FSDP's gradients.

        Parameters
        ----------
        size : sequence of int
            Its shape.
        dtype : torch.dtype
            Its dtype.
        device : torch.device
            Its device.
        """
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum of all ranks' `input_tensor` into `output_tensor`.

        Parameters
        ----------
        output_tensor : torch.Tensor
            As many elements as a rank gets.
        input_tensor : torch.Tensor
            The parts of all ranks, side by side.
        group : ProcessGroup
            The ranks.
        op : ReduceOp
            SUM, AVG or PREMUL_SUM.
        async_op : bool
            False: the sum is complete on return.
        """
        if async_op:
            raise ValueError("ReduceScatter: expected async_op=False, as FSDP2 calls it")
        ranks = _group("ReduceScatter", group, self._known)
        n = output_tensor.numel()
        with ranks.call("ReduceScatter", self._timeout) as call:
            ops, factor = torch.distributed.ReduceOp, None
            if op == ops.AVG:
                factor = mean_factor(ranks)
            elif op == ops.PREMUL_SUM:
                factor = float(op.__getstate__()[1])
            elif op != ops.SUM:
                raise ValueError(f"ReduceScatter: expected a sum or a mean, got {op}")
            options = replace(self._options, scale=factor)
            if input_tensor.numel() != n * ranks.size or input_tensor.dtype != output_tensor.dtype:
                raise ValueError(
                    f"ReduceScatter: expected {ranks.size} * {n} elements of {output_tensor.dtype}, got"
                    f" {input_tensor.numel()} of {input_tensor.dtype}"
                )
            bounds = tuple([n * r for r in range(ranks.size + 1)])
            shape = tuple(input_tensor.shape)
            brought = _Brought("the gradients of a module", input_tensor.dtype, (shape,), bounds)
            total = _sum(call, input_tensor, brought, options)
        output_tensor.view(-1).copy_(total)
