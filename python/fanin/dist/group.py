"""Groups of ranks: which engine, which thread may use it, and how the ranks agree on each sum before data travels."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import math
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np

from fanin import _core
from fanin._interop.classes import attribute
from fanin._interop.protocols import NDArray
from fanin._words import names_nearest, type_of
from fanin.errors import PeerError

from .counters import GroupCounters, Outgoing, Tally, sent_to
from .engine import Engine, end_reason
from .frames import (
    FRAME,
    FULL,
    HEAD_SIZE,
    NO_STEP,
    ByExchange,
    CutShort,
    Head,
    Known,
    lengths_of,
    read,
    room_of,
)
from .layout import digest, levels_of
from .survivors import agreed

__tracebackhide__ = True  # no frames of ours in reports of pytest

Header = dict[str, Any]  #: of ranks that sent the same text it is one object: nothing may write to it
_encode = json.JSONEncoder(separators=(",", ":")).encode

_numbers = itertools.count(1)
_process = os.getpid()


def _forked() -> None:
    global _process
    _process = os.getpid()
    _known.clear()  # another thread may have held a lock


class _Here(threading.local):
    """Thread-local: the group of the thread's rank, and the thread's last use of a group."""

    default: Group | None = None
    inside: Use | None = None


_here = _Here()

#: Seconds after which a rank no longer waits for another; None: it waits without a limit; "group": the group's.
TimeLimit = float | Literal["group"] | None


def _ends(group: weakref.ref[Group]) -> None:
    """Python ends."""
    here = group()
    if here is not None:
        here._at_exit()


_skips: list[Callable[[Group, object, TimeLimit], list[Any]]] = []


def skips_by(function: Callable[[Group, object, TimeLimit], list[Any]]) -> Callable[..., list[Any]]:
    """What `Group.skip` calls: of a module that knows the calls in which a rank can take part (skip.py)."""
    _skips.append(function)
    return function


def set_default(group: Group) -> None:
    """Make a group that of this thread (fanin.dist.group)."""
    _here.default = group


def get_default() -> Group | None:
    """The group of this thread."""
    return _here.default


class Group:
    """The ranks that make sums together (`fanin.dist.group`).

    Parameters
    ----------
    engine : Engine
        The operations of this rank.
    nodes : int or sequence of int, optional
        Which ranks share a node, as for `fanin.dist.group`; the same on every rank. Default: what the engine says.
    timeout : float, optional
        Seconds after which this rank no longer waits for another. None: it waits without a limit.

    Raises
    ------
    TypeError, ValueError
        If `timeout` is neither None nor a positive number, or `nodes` does not fit.

    >>> fanin.dist.threads(2, lambda group: (group.rank, group.size, group.name))
    [(0, 2, '2 threads'), (1, 2, '2 threads')]
    """

    __slots__ = (
        "__weakref__",
        "_alike",
        "_between",
        "_closed",
        "_engine",
        "_flat",
        "_former",
        "_last",
        "_left",
        "_levels",
        "_no_exit",
        "_nodes",
        "_nodes_text",
        "_number",
        "_padded",
        "_passes",
        "_plans",
        "_process",
        "_room",
        "_rows",
        "_size_of_next",
        "_step",
        "_tally",
        "_uses",
        "timeout",
    )

    def __init__(
        self, engine: Engine, *, nodes: int | Sequence[int] | None = None, timeout: float | None = 300.0
    ) -> None:
        self._engine = engine
        if nodes is None:
            nodes = getattr(engine, "nodes", 1)
        self._place(nodes_of("group", nodes, engine.size))
        self.timeout = seconds("group", timeout)
        self._number = next(_numbers)  #: for traces
        self._passes = 0
        self._step: int | None = None
        self._tally = Tally()
        self._closed: str | None = None
        self._left = False  #: this rank has closed it
        self._former = tuple(range(engine.size))
        self._process = os.getpid()
        self._uses: dict[str, Use] = {}  #: "now": the one that has begun
        at_exit = functools.partial(_ends, weakref.ref(self))
        atexit.register(at_exit)  # after the engine's own, so it runs before that
        self._no_exit = weakref.finalize(
            self, atexit.unregister, at_exit
        )  #: drops that entry, at this group's end, too
        self._no_exit.atexit = False
        #: Whether the first messages of a rank to all others are the same.
        self._alike = getattr(engine, "alike", not hasattr(engine, "share"))
        self._room = room_of(engine.size, self._alike)
        self._rows: list[NDArray] = []  #: what the first message of each rank is received into
        self._padded: bool = getattr(engine, "padded", False)  #: first messages of all ranks have one size
        self._size_of_next = FRAME  #: .. that of the next ones, which all ranks know
        self._last: Known | None = None  #: what was sent last

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._engine.size

    @property
    def name(self) -> str:
        """The engine's name for it."""
        return self._engine.name

    @property
    def nodes(self) -> tuple[int, ...]:
        """For each rank the number of its node, from 0 in the order of their first ranks.

        >>> fanin.dist.threads(4, lambda group: group.nodes, nodes=2)[0]
        (0, 0, 1, 1)
        """
        return self._nodes

    @property
    def former_ranks(self) -> tuple[int, ...]:
        """For each rank its number in the group of which `survivors` made this one; for another group its number.

        >>> fanin.dist.threads(2, lambda group: group.former_ranks)[0]
        (0, 1)
        """
        return self._former

    @property
    def step(self) -> int | None:
        """The number of this rank's training step; None, the default: it is not known.

        Set it at the beginning of each step. It travels with each sum, and ranks at different steps raise
        fanin.PeerError, which names them. Without it the sums of a rank that left a step out, because its loader or
        its forward raised and the loop went on, pair with the sums of another step of the others, in silence.

        Raises
        ------
        TypeError, ValueError
            When it is set to neither None nor a non-negative integer.

        >>> def train(group):
        ...     for group.step in range(3):
        ...         if (group.rank, group.step) == (1, 1):
        ...             continue  # its batch could not be read
        ...         fanin.dist.add_n([np.ones(2)], group)
        >>> fanin.dist.threads(2, train)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fanin.errors.PeerError: add_n, pass 2, bucket 0: rank 1 is at step 2, ... rank 0 at step 1, ...
        """
        return self._step

    @step.setter
    def step(self, number: int | None) -> None:
        if number is not None:
            if isinstance(number, bool) or not hasattr(number, "__index__"):
                raise TypeError(f"group.step: expected an integer, or None, got {type_of(number)}")
            number = operator.index(number)
            if not 0 <= number < 1 << 63:
                raise ValueError(f"group.step: expected a non-negative int64, got {number}")
        self._step = number

    def _place(self, nodes: tuple[int, ...]) -> None:
        self._nodes, self._levels = nodes, levels_of(self.rank, nodes)
        self._flat = levels_of(self.rank, [0] * self.size)
        self._nodes_text = shortly(nodes)
        self._between = sum(node != nodes[self.rank] for node in nodes)  #: ranks of other nodes
        self._plans: dict[object, Any] = {}  #: the least recently used one first

    def _receives(self) -> list[NDArray]:
        """Memory for the first message of each rank."""
        if not self._rows:
            self._rows = list(np.empty((self.size, self._room), np.uint8))
        return self._rows

    @property
    def closed(self) -> str | None:
        """Why the group is closed; None while it is open."""
        return self._closed

    @property
    def counters(self) -> GroupCounters:
        """The work of this rank in this group so far.

        >>> def one_each(group):
        ...     fanin.dist.add_n([np.ones(512)], group)
        ...     return group.counters.sums, group.counters.bytes_sent >= 2 * 2048
        >>> fanin.dist.threads(2, one_each)
        [(1, True), (1, True)]
        """
        return self._tally.counters()

    def __repr__(self) -> str:
        state = f", closed: {self._closed}" if self._closed else ""
        return f"<fanin.dist.Group: rank {self.rank} of {self.size}, {self.name}{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self.close(f"failed: {kind.__name__}: {error}" if kind else "was closed by this rank")

    def close(self, reason: str = "was closed by this rank") -> None:
        """Close the group; the passes of the other ranks then end with fanin.PeerError. Closing it twice does nothing.

        >>> fanin.dist.threads(2, lambda group: (group.close(), group.closed))[0]
        (None, 'it was closed by this rank')
        """
        if self._process != os.getpid():
            return
        if self._closed is None:
            self._closed = f"it {reason}"
            others = f"rank {self.rank} {reason}"
            orderly = reason == "was closed by this rank"
            if orderly:
                others = f"rank {self.rank} closed its group"
            self._leave(f"{others} {self._after()}", orderly)
        self._left = True
        self._no_exit()
        self._engine.close()

    def _at_exit(self) -> None:
        """Python ends: the other ranks may wait for this one."""
        if self._closed is None and self._process == os.getpid():
            why = end_reason()
            self._leave(f"rank {self.rank} ended {self._after()}{why}", not why)

    def _leave(self, reason: str, orderly: bool) -> None:
        """Tell the other ranks, which may wait for this one, why it makes no more calls."""
        retire = getattr(self._engine, "retire", None) if orderly else None
        (retire or self._engine.abort)(reason)

    def _after(self) -> str:
        """Its last pass, by which the other ranks see whose passes are fewer."""
        return f"after pass {self._passes}" if self._passes else "before a pass"

    def abort(self, reason: str) -> None:
        """Close the group because of an error, and end the other ranks' waits as far as the engine can."""
        self._closed = self._closed or reason
        self._engine.abort(reason)

    def interrupted(self, error: BaseException) -> None:
        """`abort`, because of Ctrl-C."""
        self.abort(f"rank {self.rank} was interrupted: {type(error).__name__}")

    def barrier(self, timeout: TimeLimit = "group") -> None:
        """Wait until every rank has called it.

        >>> _ = fanin.dist.threads(2, lambda group: group.barrier())
        """
        with self.call("barrier", timeout) as call:
            call.meet({})

    def skip(self, step: int | None = None, *, reducers: Any = (), timeout: TimeLimit = "group") -> list[Any]:
        """Take part in all calls of one step without contributions, and return when the other ranks have left the step.

        It is for a rank that has nothing in this step, because its loader or its forward raised. Every rank sets
        `group.step`. The others' sums go on: they are those of the ranks that bring something, and this rank gets them,
        too, so that its parameters stay those of the others: each `fanin.dist.add_n` in the list that is returned, each
        pass of a reducer in `.grad`. What this rank has given to `Reducer.accumulate` since the last sum is dropped.

        Parameters
        ----------
        step : int, optional
            The number of the step, to which `group.step` is set. Default: `group.step`.
        reducers : Reducer or sequence of Reducer
            Those whose passes the others run in a step, made with missing="skip".
        timeout : float or "group", optional
            Seconds after which this rank no longer waits for the next call of another. None: it waits without a limit.
            Default: the group's.

        Raises
        ------
        TypeError, ValueError
            For a step or reducers that do not fit; without `group.step` if no step is given. On this rank, with a
            PeerError on the others, for a pass of a reducer with missing="error".
        RuntimeError
            On this rank, with a PeerError on the others: for a pass of a reducer that was not given, and for calls in
            which a rank must have data: `Reducer.norm` of shards, hooks of DDP and FSDP2, `gather_trace`.
        fanin.PeerError
            On every rank: another rank has no `group.step`, or is at an earlier step. On this rank: another rank failed
            or is gone. If the others close the group or end without an error, `skip` returns.

        >>> def train(group):
        ...     for group.step in range(3):
        ...         if (group.rank, group.step) == (1, 1):
        ...             [total] = group.skip()  # its batch could not be read
        ...         else:
        ...             total = fanin.dist.add_n([np.full(2, 10.0**group.step)], group)
        ...         print(total) if group.rank == 1 else None
        >>> _ = fanin.dist.threads(2, train)
        [2. 2.]
        [10. 10.]
        [200. 200.]
        """
        limit_of("skip", timeout, None)
        self.step = self.step if step is None else step
        if self.step is None:
            raise ValueError("skip: expected a step, or group.step to be set at the beginning of each step")
        return _skips[0](self, reducers, timeout)

    def survivors(self, timeout: TimeLimit = "group") -> Group:
        """Make a new group of the ranks that are left, after a PeerError that closed this one.

        Every rank that is left calls it, and gets a group of the same ranks, numbered anew in their order. Each rank is
        waited for that is not known to be gone: because its connection was lost, or because it closed this group or
        ended. `former_ranks` of the new group has for each rank its number in this one. `fanin.dist.group(x)` returns
        the new group, for the `x` of this one, too. Reducers and blocks are made anew, with the new group.

        Parameters
        ----------
        timeout : float or "group", optional
            Seconds after which ranks that have not come are left out. None: they are waited for without a limit.
            Default: the group's.

        Raises
        ------
        RuntimeError
            If this group is open, was closed by this rank, or was made before fork(); if another thread uses it; for
            an engine whose groups cannot go on without a rank, such as MPI's.
        fanin.PeerError
            On every rank that has come: a rank was lost meanwhile; call it again. On this rank: the others have made
            the new group without it, as it came late; or the store of torch.distributed is gone, which is in the
            process of one of the ranks.

        >>> def train(group):
        ...     if group.rank == 1:
        ...         raise OSError("no disk")
        ...     try:
        ...         fanin.dist.add_n([np.ones(2)], group)
        ...     except fanin.PeerError as e:
        ...         group = group.survivors()
        ...         print(group.former_ranks, fanin.dist.add_n([np.ones(2)], group)) if group.rank == 0 else None
        >>> fanin.dist.threads(3, train)
        Traceback (most recent call last):
        OSError: no disk
        """
        limit = limit_of("survivors", timeout, self.timeout)
        if self._process != os.getpid():
            raise RuntimeError(f"survivors: the group {self.name} was made before fork(): a child makes its own")
        if self._closed is None:
            raise RuntimeError(f"survivors: the group {self.name} is open: expected a PeerError that closed it before")
        if self._left:
            raise RuntimeError(f"survivors: this rank has closed the group {self.name} itself: it takes no part")
        if self._uses:
            raise RuntimeError(f"survivors: a thread uses the group {self.name}: expected its call to end first")
        if not hasattr(self._engine, "remade"):
            why = getattr(self._engine, "no_survivors", "its engine has no survivors")
            raise RuntimeError(f"survivors: {self.name} cannot go on without a rank: {why}")
        engine, members = agreed(cast(Any, self._engine), self.rank, self.size, limit)
        made = Group(engine, nodes=[self.nodes[rank] for rank in members], timeout=self.timeout)
        made._former = tuple(members)
        made._step = self._step
        self._replace(made)
        return made

    def _replace(self, made: Group) -> None:
        """Make `fanin.dist.group` return another group in the place of this one."""
        if _here.default is self:
            _here.default = made
        for known in list(_known.values()):
            if known.group is self:
                known.group = made

    def entered(self, name: str) -> Use:
        """This thread alone uses the group inside."""
        return Use(self, name)

    def call(self, name: str, timeout: TimeLimit) -> _OneCall:
        """One pass of one bucket. If its body raises, every rank's pass ends."""
        return _OneCall(self, name, timeout)


class Use(_core.Block):
    """A thread's use of a group: Its beginning refuses a second one, its end may be repeated, and come without it."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    @property
    def holds(self) -> bool:
        """Whether it has begun, and has not ended."""
        return self.group._uses.get("now") is self

    def _begin(self) -> Any:
        group = self.group
        if group._process != _process:
            raise RuntimeError(f"{self.name}: the group {group.name} was made before fork(): a child makes its own")
        outer = _here.inside
        if outer is not None and outer.holds:
            which = "the same" if outer.group is group else "another"
            raise RuntimeError(f"{self.name}: this thread is inside a pass of {which} group: expected it to end first")
        if group._uses.setdefault("now", self) is not self:
            raise RuntimeError(
                f"{self.name}: another thread uses the group {group.name}: expected one thread at a time"
            )
        _here.inside = self
        if group._closed is not None:
            raise RuntimeError(f"{self.name}: the group {group.name} is closed: {group._closed}")

    def _end(self, error: BaseException | None) -> None:
        uses = self.group._uses
        if uses.get("now") is self:
            _here.inside = None
            del uses["now"]


class _OneCall(Use):
    """A use of a group for one call, which its `with` has."""

    def __init__(self, group: Group, name: str, timeout: TimeLimit) -> None:
        self.group, self.name, self.timeout = group, name, timeout
        self.made: Call | None = None

    if TYPE_CHECKING:

        def __enter__(self) -> Call: ...

    def _begin(self) -> Call:
        super()._begin()
        group, name = self.group, self.name
        group._passes = number = group._passes + 1
        self.made = call = Call(group, name, number, 0, group.timeout, name)
        call.timeout = limit_of(name, self.timeout, group.timeout)
        return call

    def _end(self, error: BaseException | None) -> None:
        if self.group._uses.get("now") is not self:
            return
        try:
            if self.made is not None:
                self.made._end(error)
            elif error is not None and not isinstance(error, Exception):  # else it was refused
                self.group.interrupted(error)
        finally:
            super()._end(error)


def seconds(call: str, timeout: object) -> float | None:
    """The time limit; TypeError or ValueError if it is neither None nor a positive number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"{call}: timeout: expected a number of seconds, or None for no limit, got {type_of(timeout)}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"{call}: timeout: expected a positive number of seconds, or None for no limit, got {timeout}")
    return timeout


def limit_of(call: str, timeout: object, default: float | None) -> float | None:
    """The time limit of one call: `default`, the group's, for "group"."""
    if isinstance(timeout, str) and timeout == "group":
        return default
    return seconds(call, timeout)


def nodes_of(call: str, nodes: int | Sequence[int], size: int) -> tuple[int, ...]:
    """The number of each rank's node, from 0 in the order of their first ranks; TypeError or ValueError for others."""
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if nodes < 1 or size % nodes:
            raise ValueError(f"{call}: nodes: expected a number that divides the {size} ranks evenly, got {nodes}")
        return tuple(r * nodes // size for r in range(size))
    if not isinstance(nodes, list | tuple):
        raise TypeError(f"{call}: nodes: expected a number of nodes, or each rank's, got {type_of(nodes)}")
    for n in nodes:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(f"{call}: nodes: expected each rank's node as an integer, got {type_of(n)}")
    if len(nodes) != size:
        raise ValueError(f"{call}: nodes: expected the node of each of {size} ranks, got {len(nodes)}")
    numbers = {node: k for k, node in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[node] for node in nodes)


def shortly(nodes: Sequence[int]) -> str:
    """Which ranks share a node, for messages: runs of ranks of one node, or a digest of many."""
    text = "+".join(f"{len(list(run))} of {node}" for node, run in itertools.groupby(nodes))
    return text if len(text) <= 80 else digest(text)


class Call(_core.Block):
    """One bucket of one pass: first `meet`, then data.

    An exception before `meet` travels in the header's place. After it, an exception that is not raised by every rank
    closes the group, because the other ranks may wait for data.
    """

    data_ns = (0, 0)  #: when its data began and ended to travel
    _shared_ns = (0, 0)  #: .. its first message
    _summing = 0  #: since when the owner sums what came
    _met = _over = False
    options: str | None = None  #: what a rank that skips the call needs to take part in it

    def __init__(
        self, group: Group, name: str, number: int, bucket: int, timeout: float | None, title: str | None = None
    ) -> None:
        self.group, self.name, self.timeout = group, name, timeout
        self.number, self.bucket, self.step = number, bucket, group._step
        self.title = title  #: in traces; None: the bucket

    @functools.cached_property
    def at(self) -> Header:
        """The first fields of its header, which are equal on all ranks."""
        return {
            "step": self.step,
            "call": self.name,
            "pass": self.number,
            "bucket": self.bucket,
            "nodes": self.group._nodes_text,
        }

    def _begin(self) -> Self:
        return self

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            if self._summing:
                self._summed()
            begin, end = self.data_ns
            if begin:
                tally = self.group._tally
                tally.sums += 1
                tally.data_ns += end - begin
        elif self._over or self.group.closed:
            pass
        elif self._met or not isinstance(error, Exception):
            self.group.abort(f"rank {self.group.rank} failed: {type(error).__name__}: {error}")
        else:
            try:
                self.meet({}, failure=failure_of(error))
            except PeerError:
                pass  # this rank raises its own error

    def refuse(self, message: str, rank: int | None = None, leaf: str | None = None) -> PeerError:
        """The error of something that every rank sees in the same headers: the group stays open."""
        self._over = True
        return PeerError(f"{self.where}: {message}", rank, leaf)

    def no_divisor(self, message: str) -> ZeroDivisionError:
        """The error of a mean without a divisor, which every rank sees in the same headers: the group stays open."""
        self._over = True
        return ZeroDivisionError(f"{self.where}: {message}")

    @property
    def where(self) -> str:
        return f"{self.name}, pass {self.at['pass']}, bucket {self.at['bucket']}"

    def start(self, operation: str, *args: Any, step: str = "headers", sent: Outgoing | None = None) -> Any:
        """The result of an engine's operation; a PeerError that closes the group if it does not come. `step`: its name
        in traces. After one "to .." terms are summed. sent: what it sends, where that is known before.
        """
        self._summed()
        engine, header = self.group._engine, operation == "exchange"
        begin = time.monotonic_ns()
        result = self._waited(getattr(engine, operation), *args)
        end = time.monotonic_ns()
        if sent is None:
            sizes = [len(args[0])] * engine.size if header else [len(x) for x in args[0]]
            sent = sent_to(sizes, engine.rank, self.group._nodes)
        self.group._tally.sent(sent, begin, end, header)
        if not header:
            self.data_ns = (self.data_ns[0] or begin, end)
        self.trace(step, begin, () if header else sent.sizes)
        if step.startswith("to "):
            self._summing = time.monotonic_ns()
        return result

    def _waited(self, operation: Callable[..., Any], *args: Any) -> Any:
        """The result of an operation that is started here; a PeerError that closes the group if it does not come."""
        try:
            return operation(*args).wait(self.timeout)
        except TimeoutError as e:
            within = "" if self.timeout is None else f" within {self.timeout:g} s"
            reason = (str(e) or "no answer") + within
            self.group.abort(reason)
            rank = getattr(e, "rank", None)
            raise PeerError(f"{self.where}: {reason}; the group {self.group.name} is closed", rank) from None
        except Exception as e:
            reason = str(e) if isinstance(e, PeerError) else f"rank {self.group.rank} failed: {type(e).__name__}: {e}"
            self.group.abort(reason)
            rank = e.rank if isinstance(e, PeerError) else None
            raise PeerError(f"{self.where}: {reason}; the group {self.group.name} is closed", rank) from e
        except BaseException as e:
            self.group.interrupted(e)
            raise

    def share(self, sends: list[NDArray], sent: int, between: int, again: bool = False) -> Sequence[int]:
        """Send the first messages of this rank, and receive those of all others into `Group._receives`; return how many
        bytes each rank sent to this one, or more. sent, between: the bytes of all messages, and of those to other
        nodes. again: this rank sends the same list often.
        """
        group = self.group
        engine, rows, tally = group._engine, group._rows or group._receives(), group._tally
        begin = time.monotonic_ns()
        share = getattr(engine, "share", None)
        if share is None:
            sizes: Sequence[int] = self._waited(ByExchange, engine, sends, rows)
        elif group._padded:
            sizes = self._padded(share, sends, rows, again)
        else:
            sizes = self._waited(share, sends, rows, again)
        end = time.monotonic_ns()
        self._shared_ns = begin, end
        tally.messages += len(rows) - 1
        tally.first_bytes += sent
        tally.wait_ns += end - begin
        if group._between:
            tally.messages_between += group._between
            tally.first_between += between
        return sizes

    def _padded(
        self, share: Callable[..., Any], sends: Sequence[NDArray], rows: Sequence[NDArray], again: bool
    ) -> Sequence[int]:
        """`share` of an engine whose messages have one size: the one that all ranks know, and then the rest of longer
        ones.
        """
        group = self.group
        size, group._size_of_next = group._size_of_next, FRAME
        self._waited(share, [x[:size] for x in sends], [row[:size] for row in rows], again)
        found = [lengths_of(rows[r] if r != group.rank else sends[r]) for r in range(len(rows))]
        longest = min(max(length for length, _ in found), len(rows[0]))
        if longest > size:
            self._waited(share, [x[size:longest] for x in sends], [row[size:longest] for row in rows], again)
        group._size_of_next = max(HEAD_SIZE, min(len(rows[0]), max(after for _, after in found) or FRAME))
        return [longest] * len(rows)

    def expect(self, known: Known | None, length: int) -> int:
        """Note what this rank sends, and of how many bytes; return those of what it sent after it the last time."""
        group = self.group
        if group._last is not None:
            group._last.after = length
        group._last = known
        return 0 if known is None else known.after

    def met(self, step: str, sends: Sequence[NDArray]) -> None:
        """All ranks have the same plan; `step`: what came with their heads, "headers" for nothing."""
        self._met = True
        self.group._tally.planned += 1
        if step != "headers":
            self.data_ns = self._shared_ns
            self._summing = self._shared_ns[1]
        if _core.tracing():
            sizes = [len(x) for x in sends]
            sizes[self.group.rank] = 0
            self.trace(step, self._shared_ns[0], () if step == "headers" else tuple(sizes))

    def _summed(self) -> None:
        """The owner's sum, if one was made since data came, has ended."""
        if self._summing:
            self.data_ns = (self.data_ns[0], time.monotonic_ns())
            self.trace("sum", self._summing)
            self._summing = 0

    def trace(self, step: str, begin_ns: int, sends: tuple[int, ...] = ()) -> None:
        """Write a step since `begin_ns` to the traces of this thread, with the bytes sent to each rank."""
        if _core.tracing():
            label = f"{self.title or f'bucket {self.bucket}'}: {step}"
            _core.trace_bucket(label, self.group._number, self.number, self.bucket, begin_ns, sends)

    def say(self, header: Header) -> list[Header]:
        """Send every rank a header with this call's place, and return those of all."""
        return self._exchange({**self.at, **header})

    def _exchange(self, header: Header) -> list[Header]:
        """The headers of all ranks, of which this rank sends one."""
        data = np.frombuffer(_encode(header).encode(), np.uint8)
        step = NO_STEP if self.step is None else self.step
        room = self.group._room
        length = min(HEAD_SIZE + len(data), room)
        self.expect(None, length)
        head = Head(FULL, len(data), step=step, number=self.number, bucket=self.bucket, length=length)
        message = np.concatenate([np.frombuffer(head.write(), np.uint8), data])
        begin = time.monotonic_ns()
        try:
            messages, heads = self._heads(message[:room])
            if any(h.kind != FULL for h in heads):  # a rank had a plan, and sends its header now, too
                messages, heads = self._heads(message[:room])
            texts = [m[HEAD_SIZE : HEAD_SIZE + h.body].tobytes() for m, h in zip(messages, heads, strict=True)]
            self.trace("headers", begin)
            longest = HEAD_SIZE + max(h.body for h in heads) - room
            if longest > 0:
                rests = self.start("exchange", message[room:].tobytes().ljust(longest, b"\0"))
                texts = [(text + rest)[: h.body] for text, rest, h in zip(texts, rests, heads, strict=True)]
            if any(len(text) < h.body for text, h in zip(texts, heads, strict=True)):
                raise CutShort("a header ends before its end")
            made = {text: json.loads(text.decode()) for text in set(texts)}  # those of most ranks are alike
            return [made[text] for text in texts]
        except (ValueError, UnicodeDecodeError):
            raise self.unreadable() from None

    def _heads(self, message: NDArray) -> tuple[list[NDArray], list[Head]]:
        """The first messages of all ranks, and their heads."""
        group = self.group
        size = len(message)
        sizes = self.share([message] * group.size, size * (group.size - 1), size * group._between)
        messages = [row[:size] for row, size in zip(group._receives(), sizes, strict=True)]
        messages[group.rank] = message
        return messages, [read(m) for m in messages]

    def unreadable(self) -> PeerError:
        """The error of a message that is none, which closes the group."""
        self.group.abort("a header cannot be read")
        return PeerError(f"{self.where}: a header cannot be read; the group is closed")

    def meet(self, header: Header, *, digest: str = "", failure: Header | None = None) -> list[Header]:
        """Exchange headers, and return those of all ranks if no rank failed and all are at the same place."""
        own = {"digest": digest, "failure": failure, **header}
        headers = self.say(own)
        while any("skip" in h for h in headers):
            self.check_steps(headers)
            self.say({"digest": digest, "options": self.options})
            headers = self.say(own)
        self._met = True
        for rank, h in enumerate(headers):
            if h["failure"]:
                leaf, text = h["failure"]["leaf"], h["failure"]["text"]
                raise self.refuse(f"rank {rank} failed{text}", rank, leaf)
        for rank, h in enumerate(headers):
            mine, other = (", ".join(f"{k} {x[k]}" for k in self.at if x[k] is not None) for x in (headers[0], h))
            if mine != other:
                raise self.refuse(f"rank {rank} is at {other}, rank 0 at {mine}", rank)
        return headers

    def check_steps(self, headers: Sequence[Header]) -> None:
        """Raise an error on every rank if one has no step, or makes a call in a step before one that another skips."""
        last, skipping = max((h["step"], rank) for rank, h in enumerate(headers) if "skip" in h)
        for rank, h in enumerate(headers):
            if "skip" in h:
                continue
            if h["step"] is None:
                raise self.refuse(
                    f"rank {skipping} skips step {last}, and rank {rank} has no group.step: expected every rank to set"
                    " it at the beginning of each step",
                    rank,
                )
            if h["step"] < last:
                raise self.refuse(
                    f"rank {skipping} skips step {last}, and rank {rank} is at step {h['step']}, call {h['call']}, pass"
                    f" {h['pass']}",
                    rank,
                )

    def compare(self, headers: list[Header], parts: list[list[str]]) -> None:
        """Raise an error on every rank if digests differ, with the first part that does: [leaf, description]."""
        rank = next((r for r, h in enumerate(headers) if h["digest"] != headers[0]["digest"]), None)
        if rank is None:
            return
        every = self._exchange({"parts": parts})
        for a, b in itertools.zip_longest(every[0]["parts"], every[rank]["parts"]):
            a = a or ["", "nothing"]
            b = b or [a[0], "nothing"]
            if a != b:
                leaf = b[0] or a[0]
                a_text, b_text = (f"{n}: {t}" if n else t for n, t in ((a[0] or leaf, a[1]), b))
                raise self.refuse(f"rank {rank} has {b_text}; rank 0 has {a_text}", rank, leaf or None)
        raise AssertionError("digests differ, and no part does")


def failure_of(error: BaseException) -> Header:
    """The fields of a header that report an exception: its text with the engine's notes, and the leaf."""
    notes = getattr(error, "__notes__", [])
    place = f" ({'; '.join(notes)[:300]})" if notes else ""
    text = f"{place}: {type(error).__name__}: {str(error)[:600]}"
    return {"text": text, "leaf": getattr(error, "leaf", None)}


def weakly(x: object, ended: Callable[[], object]) -> object:
    """A weak reference to a communicator, at whose end `ended` is called; itself if it takes none. A reference to a
    process group that was destroyed would keep its threads until Python ends.
    """
    try:
        return weakref.ref(x, lambda _: ended())
    except TypeError:
        return x


class _Known:
    """A communicator and its group. The lock: one thread at a time makes the group."""

    def __init__(self, x: object) -> None:
        number = id(x)
        self.x = weakly(x, lambda: _known.pop(number, None))
        self.lock = threading.Lock()
        self.group: Group | None = None


_known: dict[int, _Known] = {}  # by id
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@names_nearest
def group(x: object = None, *, nodes: int | Sequence[int] | None = None, timeout: TimeLimit = "group") -> Group:
    """The group of ranks of a communicator.

    The first call for a communicator or process group is collective: every rank of it must make it. Later calls return
    the same group.

    Parameters
    ----------
    x : optional
        An mpi4py communicator; a torch.distributed ProcessGroup; an object whose `__fanin_group__()` returns an engine
        (`fanin.dist.Engine`) or a group; a group. Default: the rank's group inside `fanin.dist.threads`; else
        torch.distributed's world, if it is initialised; else MPI.COMM_WORLD.
    nodes : int or sequence of int, optional
        Which ranks share a node: the number of each rank's node, or how many nodes the ranks fill in their order. Sums
        over several nodes then are made inside nodes first. Every rank must give the same. Default: as before; for a
        new group, what MPI or the names of the hosts say.
    timeout : float or "group", optional
        Seconds after which this rank no longer waits for another. None: it waits without a limit. Default: the
        group's, as before; 300 for a new group.

    Raises
    ------
    TypeError
        If `x` is none of these.
    RuntimeError
        Without `x`, if there is neither torch.distributed's world nor mpi4py, or if a launcher's environment says more
        ranks than the one that was found has (naming it in `x` uses it as it is); for an MPI without
        MPI_THREAD_MULTIPLE.
    ValueError
        For a communicator that was freed, a process group that was destroyed, an intercommunicator, `nodes` that are
        not those of all ranks, or a `timeout` that is not positive.
    fanin.PeerError
        If ranks give different `nodes`, or those of a rank are refused.

    >>> fanin.dist.threads(2, lambda group: fanin.dist.group() is group)
    [True, True]
    """
    limit_of("group", timeout, None)  # refused before ranks meet
    made = _group(x)
    made.timeout = limit_of("group", timeout, made.timeout)
    if nodes is not None:
        with made.call("group", "group") as call:
            placed = nodes_of("group", nodes, made.size)
            call.at["nodes"] = shortly(placed)
            call.meet({})
        made._place(placed)
    return made


#: Where a launcher says how many ranks it started, and what makes them one group.
_LAUNCHERS = {
    "WORLD_SIZE": "call torch.distributed.init_process_group() before fanin.dist.group()",
    "OMPI_COMM_WORLD_SIZE": "mpi4py is of another MPI than the launcher: install mpi4py for Open MPI",
    "PMI_SIZE": "mpi4py is of another MPI than the launcher: start the ranks with the launcher of mpi4py's MPI",
    "PMIX_RANK": "mpi4py is of another MPI than the launcher: start the ranks with the launcher of mpi4py's MPI",
    "SLURM_NTASKS": "start the ranks with the launcher of mpi4py's MPI, or with the srun --mpi= that it needs",
}


def _all_launched(size: int, found: str, expression: str) -> None:
    """RuntimeError if a launcher started more ranks than a communicator has that nobody named: its ranks would train
    without the others, in silence.
    """
    for variable, remedy in _LAUNCHERS.items():
        text = os.environ.get(variable, "")
        if not text.isdecimal():
            continue
        started = int(text)
        least = ""
        if variable == "PMIX_RANK":  # PMIx tells a process its number alone
            started += 1
            least = "at least "
        if started > size:
            raise RuntimeError(
                f"group: {variable}={text} says that {least}{started} ranks were started, and {found} has {size}:"
                f" {remedy}; fanin.dist.group({expression}) uses it as it is"
            )


def _group(x: object) -> Group:
    if x is None:
        if _here.default is not None:
            return _here.default
        is_initialized = attribute("torch.distributed", "is_initialized")
        if is_initialized is not None and is_initialized():
            world = sys.modules["torch.distributed"].group.WORLD
            _all_launched(world.size(), "torch.distributed's world", "torch.distributed.group.WORLD")
            x = world
    if x is None:
        try:
            from mpi4py import MPI
        except ImportError as e:
            installed = find_spec("mpi4py") is not None
            found = f"mpi4py that cannot be imported: {e}" if installed else "none"
            raise RuntimeError(
                "group: expected torch.distributed to be initialised, or mpi4py (pip install 'fanin[mpi]'), or a group"
                f" by fanin.dist.threads; found {found}"
            ) from None
        everyone: Any = MPI.COMM_WORLD
        if MPI.Is_initialized() and not MPI.Is_finalized():  # else its engine refuses it
            _all_launched(everyone.Get_size(), "MPI.COMM_WORLD", "MPI.COMM_WORLD")
        x = everyone
    if isinstance(x, Group):
        return x
    known = _known.setdefault(id(x), _Known(x))
    with known.lock:
        if known.group is not None and known.group.closed is None:
            return known.group
        module, engine = type(x).__module__.partition(".")[0], None
        if callable(offer := getattr(x, "__fanin_group__", None)):
            engine = offer()
        elif module == "mpi4py":
            from .mpi import MPIEngine

            engine = MPIEngine(x)
        elif module == "torch" and "torch.distributed" in sys.modules:
            from .processes import TorchEngine

            engine = TorchEngine(x)
        else:
            raise TypeError(
                "group: expected an mpi4py communicator, a torch.distributed ProcessGroup or an object with"
                f" __fanin_group__, got {type_of(x)}"
            )
        known.group = engine if isinstance(engine, Group) else Group(engine)
        return known.group
