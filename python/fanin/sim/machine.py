"""The machine, and its host threads, which it runs one at a time."""

from __future__ import annotations

import math
import operator
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, Self, TypeVar, cast, final, overload

import numpy as np

from .. import _core
from .._array import ints
from .._checks import flag, integer, number
from .._interop.classes import is_scipy
from .._interop.protocols import DTypeLike, ScipySparse
from .._threads import here
from .._trace.recording import active, begin_names, end_names, settle
from .._words import counted, names_nearest, type_of
from ..slots import Sparse

__tracebackhide__ = True  # no frames of ours in reports of pytest

Array = _core.Array
T = TypeVar("T")


T_co = TypeVar("T_co", covariant=True)

SCHEDULES = ("seeded", "fifo", "lifo", "starve", "round robin")


class DeadlockError(RuntimeError):
    """The remaining queued work or host threads can never continue. The message names what each waits for."""


@dataclass(frozen=True)
class Clock:
    """Simulated time in microseconds: the host's time for queueing, and the end of the last work."""

    host_us: float
    device_us: float


@final
class Graph:
    """A captured graph of a simulated machine: Machine.launch_graph queues it."""

    __slots__ = ("__weakref__", "_captured", "_machine")

    def __init__(self, machine: Machine, captured: object) -> None:
        self._machine, self._captured = machine, captured

    def __repr__(self) -> str:
        return f"<fanin.sim graph of {self._machine!r}>"


class StuckError(DeadlockError):
    """A host thread does not return from its step: it waits for something outside of the machine. The message has the
    stacks.
    """


class Abandoned(BaseException):
    """The search has given up this run of a scenario, because other orders cover it."""


class Thread(Generic[T_co]):
    """A host thread of a machine, made by `Machine.spawn`."""

    def __init__(self, machine: Machine, actor: int, name: str, apart: int | None, call: Callable[[], T_co]) -> None:
        self.name = name
        maker = machine._running
        if apart is None:
            apart = maker._apart if maker else 0
        self._apart: int = apart
        self._exception: BaseException | None = None
        self._machine, self._actor, self._call = machine, actor, call
        self._turn = machine._turns[actor] = machine._turns.get(actor, 0) + 1
        self._value: T_co
        self._ended = False
        self._traces = active().copy()
        self._os = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        machine, cores = self._machine, []
        if not machine._thread_begin(self._actor):
            return
        try:
            machine._enter()
            machine._here.thread = self
            machine._thread_apart(self._apart)
            here.spawn = machine.spawn
            for trace in self._traces:
                cores.append(trace._beside())
                cores[-1].begin()
            self._value = self._call()
            self._ended = True
        except BaseException as e:
            self._exception = e
            machine._failed.append(self)
        finally:
            for core in cores:
                core.end()
            machine._leave()
            machine._thread_end(self._actor)

    @property
    def exception(self) -> BaseException | None:
        """The exception of the function; None if it raised none, or has not ended."""
        self._look()
        return self._exception

    @property
    def result(self) -> T_co:
        """The result of the function. Raises the function's exception, or RuntimeError before it has ended."""
        if not self._look():
            raise RuntimeError(f"thread {self.name!r} has not ended: threads run at Machine.join()")
        if self._exception is not None:
            raise self._exception
        return self._value

    def _look(self) -> bool:
        """Whether it has ended; if so, the caller's next step comes after that."""
        self._machine._saw_thread(self._actor)
        ended = self._ended or self._exception is not None
        if ended and self._machine._turns[self._actor] == self._turn:  # else the number was spawned again after a join
            self._machine._after_thread(self._actor)
        return ended

    def __repr__(self) -> str:
        ended = self._look()
        state = "ended" if ended else "not ended"
        if self._exception is not None:
            state = "raised"
        return f"<fanin.sim.Thread {self.name!r}, {state}>"


class Machine(_core.Machine):
    """A machine of simulated devices.

    As a context manager it gives its devices their names, "sim:0" and so on, on this thread and on those it spawns; at
    the end of the block it joins its threads and synchronizes. If the block raises, queued work is dropped. After the
    last block, calls that are given a stream of it, or a gradient on it, raise RuntimeError; results can still be read,
    and another `with` opens it again.

    Parameters
    ----------
    devices : int
        The number of devices, 1 to 64.
    seed : int
        Picks the order of runnable work, with `schedule`.
    schedule : str
        "seeded" (at random, by the seed), "fifo" (in the order of queueing), "lifo" (the newest first), "round robin",
        or "starve" (the stream whose handle is `starve` runs last).
    starve : int
        The handle for "starve".
    memory : int
        Bytes of each device's arena.
    check : bool
        Check all accesses for races.
    launch_us, gbytes_per_s : float
        The cost model of the clock.
    """

    @names_nearest
    def __new__(
        cls,
        devices: int = 2,
        seed: int = 0,
        *,
        schedule: str = "seeded",
        starve: int = 1,
        memory: int | None = None,
        check: bool = True,
        launch_us: float = 0,
        gbytes_per_s: float = 0,
    ) -> Self:
        if not 1 <= integer("Machine: devices", devices) <= 64:
            raise ValueError(f"Machine: devices: expected a number from 1 to 64, got {devices}")
        seed, starve = integer("Machine: seed", seed), integer("Machine: starve", starve)
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise ValueError(f"Machine: schedule: expected one of {', '.join(map(repr, SCHEDULES))}, got {schedule!r}")
        if memory is not None and not 0 < integer("Machine: memory", memory) < 1 << 63:
            raise ValueError(f"Machine: memory: expected a number of bytes for each device, got {memory}")
        launch_us = not_negative("Machine: launch_us", launch_us)
        gbytes_per_s = not_negative("Machine: gbytes_per_s", gbytes_per_s)
        self = super().__new__(
            cls, devices, seed, SCHEDULES.index(schedule), starve, memory or 0, launch_us, gbytes_per_s
        )
        self.schedule = schedule
        self._waiting = []
        self._started = []
        self._failed = []
        self._turns = {}
        self._here = threading.local()
        self._names = {}
        if not flag("Machine: check", check):
            self._check(False)
        return self

    schedule: str
    _waiting: list[Thread[object]]  # spawned; they run at join
    _started: list[Thread[object]]
    _failed: list[Thread[object]]  # in the order in which they raised
    _turns: dict[int, int]  # for each number of a host thread: how many threads have had it
    _joining = False
    _dead = False  # its host threads ended in a deadlock, or early: it cannot continue
    _stuck_after = math.inf  # seconds after which a thread that does not return from its step is reported
    _here: threading.local  # .thread: the machine's thread that runs here
    _names: dict[tuple[int, int], str]  # of streams, by device and handle

    def __repr__(self) -> str:
        held = f"{counted(self.devices, 'device')}, {counted(len(self.streams), 'stream')}"
        return f"<fanin.sim.Machine: {held}, {counted(self.races, 'race')}, seed {self.seed}, {self.schedule}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle or copy {self!r}")

    # Scope

    def __enter__(self) -> Self:
        self._enter()
        begin_names(self._names)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        try:
            if kind is None and not self._dead:
                settle()
                self.synchronize()
                return
        except BaseException:
            self._drop()
            raise
        else:
            self._drop()
        finally:
            end_names(self._names)
            self._leave()

    def _drop(self) -> None:
        """After a failure: end the host threads and drop queued work."""
        if self._waiting:
            self._dead = True
            self._give_up()
            try:
                self._run_threads()
            except Exception:
                pass  # it gives up
        self._failed.clear()
        self._forget()

    # Streams, events, memory, work

    def _numbered(self, device: int) -> int:
        """A device's number."""
        try:
            device = operator.index(device)
        except TypeError:
            raise TypeError(f"expected a device's number, 0 to {self.devices - 1}, got {device!r}") from None
        if not 0 <= device < self.devices:
            raise ValueError(
                f"device {device}: this machine has {self.devices} device{'s' * (self.devices > 1)}, numbered from 0"
            )
        return device

    def stream(self, device: int = 0, *, blocking: bool = False, name: str | None = None) -> _core.Stream:
        """Make a new stream. A blocking one synchronizes with the device's legacy default stream, as in CUDA.

        A dropped stream still runs its queued work, and then ends; `streams` has those that are referenced. Traces,
        their pictures and messages about races show the `name`.
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"stream: name: expected a str, got {type_of(name)}")
        given: object = device
        if isinstance(given, str):
            numbers = f"a device's number, 0 to {self.devices - 1}"
            raise TypeError(f"stream: expected {numbers}, got {given!r}: a name is given as name={given!r}")
        device = self._numbered(device)
        made = self._stream(device, flag("stream: blocking", blocking), name)
        if name is not None:
            self._names[device, made.handle] = name
        return made

    def event(self, device: int = 0) -> _core.Event:
        """Make a new event, to be recorded on streams of `device`."""
        return self._event(self._numbered(device))

    @overload
    def array(self, value: Sparse | ScipySparse, device: int = 0) -> Sparse: ...  # type: ignore[overload-overlap]
    @overload
    def array(self, value: object, device: int = 0) -> Array: ...
    def array(self, value: object, device: int = 0) -> Array | Sparse:
        """Copy an ndarray (or anything that `np.asarray` takes) to a device, ordered before all work queued later.

        SciPy's sparse arrays and `fanin.Sparse` become a `fanin.Sparse` with parts on the device.
        """
        device = self._numbered(device)
        parts = sparse_parts(value)
        if parts is None:
            return self._array(np.asarray(value), device)
        kind, arrays, shape = parts
        return Sparse(kind, tuple(self._array(np.asarray(a), device) for a in arrays), shape)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64", device: int = 0) -> Array:
        """Make an array of poisoned memory on a device; a kernel must write it before it is read."""
        return self._empty(ints(shape, "empty: shape: "), dtype, self._numbered(device))

    def launch(
        self,
        stream: _core.Stream,
        fn: Callable[..., object],
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        name: str | None = None,
        us: float | None = None,
        *,
        stacklevel: int = 1,
    ) -> None:
        """Queue a kernel on a stream: when it runs, `fn(*read_views, *write_views)` is called with NumPy views.

        The read views are read-only. The kernel must not access other memory that other streams write. An exception of
        `fn` is raised by the call that runs it: `synchronize`, `numpy()`, `step`. The views end with the kernel: if it
        keeps one, that call raises a RuntimeError. Views in the traceback of a kernel that raised keep the values of
        that moment.

        Parameters
        ----------
        stream : Stream
            The stream.
        fn : callable
            The kernel; its result is ignored.
        reads, writes : sequence of Array
            The arrays that it reads and writes.
        name : str
            For messages and traces.
        us : float
            Its duration on the clock. Default: by the cost model.
        stacklevel : int
            Whose line messages name, as in `warnings.warn`: 1 for the call of `launch`, 2 for that of the function
            around it.

        Raises
        ------
        RaceError
            An access to the same bytes is not ordered with this one.
        """
        us = -1.0 if us is None else not_negative("launch: us", us)
        stacklevel = integer("launch: stacklevel", stacklevel, 1)
        if not callable(fn):
            raise TypeError(no_kernel(stream, fn))
        arrays = arrays_of(reads, "reads is a sequence of arrays, as in reads=[x]")
        written = arrays_of(writes, "writes is a sequence of arrays, as in writes=[y]")
        if name is None:
            name = getattr(fn, "__name__", None)
            name = name if isinstance(name, str) else "kernel"
        elif not isinstance(name, str):
            raise TypeError(f"launch: name is a string, not {type(name).__name__}")
        self._launch(stream, fn, arrays, written, name, us, stacklevel)

    def synchronize(self) -> None:
        """Join the host threads, run all queued work, and raise a race that no call has raised yet.

        DeadlockError, with the names of the blocked work, if some of it can never run.
        """
        if self._running is None:
            self.join()
        self._synchronize()
        self._pending()

    def step(self) -> bool:
        """Run one piece of queued work; False if none can run."""
        return self._step()

    # Capture

    def begin_capture(self, stream: _core.Stream, mode: str = "global") -> None:
        """Capture work queued on `stream`, and on every stream that waits for captured work, instead of running it.

        CUDA's rules apply, and a violation has CUDA's code (900 to 908) in its message; `mode` is "global",
        "thread-local" or "relaxed". CaptureError if the stream is the legacy default or captured already.

        >>> import fanin, numpy as np
        >>> with fanin.sim.Machine() as m:
        ...     s, x = m.stream(), m.array(np.zeros(2))
        ...     m.begin_capture(s)
        ...     m.launch(s, lambda x: np.add(x, 1, out=x), writes=[x])
        ...     graph = m.end_capture(s)
        ...     for _ in range(3):
        ...         m.launch_graph(graph, s)
        ...     s.synchronize()
        ...     x.numpy()
        array([3., 3.])
        """
        modes = ("global", "thread-local", "relaxed")
        if mode not in modes:
            raise ValueError(f"begin_capture: expected a mode among {modes}, got {mode!r}")
        self._begin_capture(stream, modes.index(mode))

    def end_capture(self, stream: _core.Stream) -> Graph:
        """End the capture that began on `stream`, and return its graph, which keeps the memory that it uses.

        CaptureError if a stream that joined was not joined back, if the capture was broken, or if it began elsewhere.
        """
        return Graph(self, self._end_capture(stream))

    def launch_graph(self, graph: Graph, stream: _core.Stream) -> None:
        """Queue a graph on `stream`, as one piece of work; each launch is checked for races."""
        if not isinstance(graph, Graph):
            raise TypeError(
                f"launch_graph: expected a graph, as end_capture gives it, not {type(cast(object, graph)).__name__}"
            )
        if graph._machine is not self:
            raise ValueError(f"launch_graph: {graph!r} is of another machine")
        self._launch_graph(graph._captured, stream)

    def leave_out(self, *words: str) -> None:
        """Leave these waits, records and marks, and no others, out of all plans from now on, to show their purpose.

        A word names a rule ("S12") or one bit of its plan ("S12.wait"); without words nothing is left out. The
        ValueError for an unknown word lists the words.
        """
        self._leave_out(*words)

    def clock(self) -> Clock:
        """Return the simulated time, by a simple cost model: it gives overlap, not performance."""
        return Clock(self.host_us, self.device_us)

    # Host threads

    @property
    def _running(self) -> Thread[object] | None:
        """The machine's thread that is running now, if this is one."""
        return getattr(self._here, "thread", None)

    def spawn(
        self, fn: Callable[..., T], *args: object, name: str | None = None, apart: int | None = None
    ) -> Thread[T]:
        """Make a host thread that calls `fn(*args)`; `join` runs the threads in turns, one at a time.

        `apart`: a promise that threads of different numbers share no host arrays and no graph: `explore` then does not
        order what they do with theirs. Default: the number of the thread that spawns, at first 0.
        They switch only in calls of fanin. A thread must not wait for another one by other means than fanin's. A
        machine has at most 32 at a time; ValueError beyond.
        """
        if not callable(fn):
            raise TypeError(f"spawn: {fn!r} cannot be called")
        if not isinstance(name, str | None):
            raise TypeError(f"spawn: name: expected a str, got {type_of(name)}")
        if apart is not None and (isinstance(apart, bool) or not isinstance(apart, int) or not 0 <= apart < 1 << 31):
            raise ValueError(f"spawn: apart: expected a non-negative number, got {apart!r}")
        actor = self._spawn()
        try:
            named = name or f"{getattr(fn, '__name__', 'thread')}[{actor}]"
            thread = Thread(self, actor, named, apart, lambda: fn(*args))
        except BaseException:
            self._thread_end(actor)  # join would wait for it
            raise
        if self._joining:
            self._started.append(thread)
            thread._os.start()
        else:
            self._waiting.append(thread)
        return thread

    def join(self) -> None:
        """Run the spawned threads to their end, and raise the first exception that one of them raised.

        DeadlockError if the remaining threads wait for each other.
        """
        if self._running is not None:
            raise RuntimeError(f"join: thread {self._running.name!r} is one of those that would be joined")
        if self._dead:
            raise RuntimeError(f"join: {self!r} gave up when its host threads could not go on; make a new one")
        self._run_threads()
        if self.abandoned:
            raise Abandoned
        failed, self._failed = self._failed, []
        if failed:
            first = cast(BaseException, failed[0]._exception)
            first.add_note(f"raised in host thread {failed[0].name!r} of {self!r}, order {self.host_schedule!r}")
            for other in failed[1:]:
                first.add_note(f"then thread {other.name!r} raised {other._exception!r}")
            raise first

    def _run_threads(self) -> None:
        if not self._waiting:
            return  # an interrupt here ends no thread, so the machine can continue
        waiting, self._waiting = self._waiting, []
        self._joining = True
        try:
            for i, thread in enumerate(waiting):
                try:
                    thread._os.start()
                except BaseException:
                    for other in waiting[i:]:
                        self._thread_end(other._actor)
                    self._give_up()
                    self._join()  # so that the waiting threads end
                    raise
                self._started.append(thread)
            if self._started:
                interruptible(self._join, self._watch())
        except BaseException as e:
            self._dead = True
            self._give_up()
            if isinstance(e, (KeyboardInterrupt, StuckError)):
                self._started.clear()  # they may never end: do not wait for them
            raise
        finally:
            for thread in self._started:
                while thread._os.is_alive() and not self._stuck(thread._actor):
                    thread._os.join(0.05)
            self._started.clear()
            self._joining = False

    def _watch(self) -> Callable[[], None]:
        """A function to call from time to time while threads run: it raises StuckError if one does not return from its
        step.
        """
        began, seen = time.monotonic(), -1

        def look() -> None:
            nonlocal began, seen
            now, steps = time.monotonic(), self._steps
            if steps != seen:
                began, seen = now, steps
            elif now - began > self._stuck_after:
                frames, stacks = sys._current_frames(), ""
                for thread in self._started:
                    if frame := frames.get(thread._os.ident or -1):
                        stacks += f"host thread {thread.name!r}:\n{''.join(traceback.format_stack(frame))}"
                actor = self._break("a host thread does not return from its step")
                began = now
                if actor >= 0:
                    name = next((t.name for t in self._started if t._actor == actor), str(actor))
                    raise StuckError(
                        f"host thread {name!r} has not returned from its step for {self._stuck_after:g} s: it waits"
                        " for something outside of the machine (another thread's threading.Lock or queue, the"
                        f" network), or computes that long (stuck_after=)\n{stacks}"
                    )

        return look


def arrays_of(given: Sequence[Array], expected: str) -> tuple[Array, ...]:
    """A tuple: code that runs meanwhile cannot change it."""
    try:
        if not isinstance(cast(object, given), Array):
            return tuple(given)
    except TypeError:
        pass
    raise TypeError(f"launch: {expected}")


def no_kernel(stream: object, fn: object) -> str:
    """The message for a kernel of a launch that cannot be called."""
    if callable(stream):
        return "launch: expected the stream before the kernel: launch(stream, fn, ..)"
    return f"launch: fn: expected a function, called with NumPy views, got {type_of(fn)}, which cannot be called"


def not_negative(what: str, x: float) -> float:
    x = number(what, x)
    if not 0 <= x < math.inf:
        raise ValueError(f"{what}: expected a finite non-negative number, got {x:g}")
    return x


def interruptible(call: Callable[[], object], meanwhile: Callable[[], None]) -> None:
    """Run call() on its own thread, if one can be started, so that Ctrl-C works meanwhile, and call `meanwhile`
    repeatedly.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()
    else:
        while thread.is_alive():
            thread.join(0.05)  # with a timeout: a signal just before a wait begins does not end it
            meanwhile()
    if raised:
        raise raised[0]


def sparse_parts(value: object) -> tuple[str, tuple[object, ...], tuple[int, ...]] | None:
    """(format, parts, shape) of a `fanin.Sparse` or of a SciPy sparse array; None for anything else."""
    if isinstance(value, Sparse):
        return value.format, value.parts, value.shape
    if not is_scipy(value):
        return None
    kind, shape = value.format, value.shape
    if kind == "coo":
        coords = getattr(value, "coords", None) or (getattr(value, "row", None), getattr(value, "col", None))
        return kind, (np.stack([np.asarray(c, np.int64) for c in coords]), getattr(value, "data", None)), shape
    if kind in ("csr", "csc", "bsr"):
        return kind, tuple(getattr(value, name) for name in ("indptr", "indices", "data")), shape
    raise TypeError(f"Machine.array: SciPy's {kind!r} has no parts for a device: pass x.tocoo() or x.tocsr()")
