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
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

import numpy as np

from .. import _core
from .._interop.protocols import DTypeLike
from .._trace.recording import active
from .._words import counted
from ..slots import Sparse
from .parts import sparse_parts

Array = _core.Array
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SCHEDULES = ("seeded", "fifo", "lifo", "starve", "round robin")


class DeadlockError(RuntimeError):
    """What is left, queued work or host threads, can never go on. The message names what each waits for."""


@dataclass(frozen=True)
class Clock:
    """Simulated time in microseconds: what the host spent on queueing, and when the last work ends."""

    host_us: float
    device_us: float


class StuckError(DeadlockError):
    """A host thread has its turn and does not come back: it waits for something that the machine does not know. The
    message has the stacks.
    """


class Abandoned(BaseException):
    """This run of a scenario need not go on: the search has seen all that it could show."""


class Thread(Generic[T_co]):
    """A host thread of a machine, made by `Machine.spawn`."""

    def __init__(self, machine: Machine, actor: int, name: str, call: Callable[[], T_co]) -> None:
        self.name = name
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
        """What the function raised; None if it raised nothing, or has not ended."""
        self._look()
        return self._exception

    @property
    def result(self) -> T_co:
        """What the function returned. What it raised, if it raised. RuntimeError before it has ended."""
        if not self._look():
            raise RuntimeError(f"thread {self.name!r} has not ended: threads run at Machine.join()")
        if self._exception is not None:
            raise self._exception
        return self._value

    def _look(self) -> bool:
        """Whether it has ended; what whoever asks does next comes after that."""
        self._machine._saw_thread(self._actor)
        ended = self._ended or self._exception is not None
        if ended and self._machine._turns[self._actor] == self._turn:  # else he was spawned after it was joined
            self._machine._after_thread(self._actor)
        return ended

    def _stack(self) -> str:
        """Where it is now."""
        frame = sys._current_frames().get(self._os.ident or -1)
        lines = traceback.format_stack(frame) if frame else []
        return f"host thread {self.name!r}:\n{''.join(lines)}" if lines else ""

    def __repr__(self) -> str:
        ended = self._look()
        state = "raised" if self._exception is not None else "ended" if ended else "not ended"
        return f"<fanin.sim.Thread {self.name!r}, {state}>"


class Machine(_core.Machine):
    """A machine of simulated devices.

    `devices` is their number (1 to 64). `seed` and `schedule` pick what runs next among all that may run: "seeded"
    (at random, by the seed), "fifo" (in the order of queueing), "lifo" (the newest first), "round robin", or "starve"
    (the stream whose handle is `starve` runs last). `memory` is the size in bytes of each device's arena. `launch_us`
    and `gbytes_per_s` set the cost model of the clock. With `check=False` nothing is held against happens-before.

    As a context manager it gives its devices their names, "sim:0" and so on, on this thread and on those it spawns; at
    the end of the block it joins its threads and synchronizes. If the block raises, what is queued is dropped.
    """

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
        if isinstance(devices, bool):
            raise TypeError(f"Machine: devices is a number of devices, 1 to 64, not {devices}")
        if not 1 <= operator.index(devices) <= 64:
            raise ValueError(f"Machine: a machine has 1 to 64 devices, not {devices}")
        if schedule not in SCHEDULES:
            raise ValueError(f"Machine: no schedule {schedule!r}: there are {', '.join(map(repr, SCHEDULES))}")
        if memory is not None and not 0 < operator.index(memory) < 1 << 63:
            raise ValueError(f"Machine: memory is a number of bytes for each device, not {memory}")
        launch_us = not_negative("Machine: launch_us", launch_us)
        gbytes_per_s = not_negative("Machine: gbytes_per_s", gbytes_per_s)
        self = super().__new__(
            cls, devices, seed, SCHEDULES.index(schedule), starve, memory or 0, True, launch_us, gbytes_per_s
        )
        self.schedule = schedule
        self._waiting = []
        self._started = []
        self._failed = []
        self._turns = {}
        self._joining = False
        self._dead = False
        self._stuck_after = math.inf
        self._here = threading.local()
        if not check:
            self._check(False)
        return self

    schedule: str
    _waiting: list[Thread[object]]  # spawned; their turn comes at join
    _started: list[Thread[object]]
    _failed: list[Thread[object]]  # in the order in which they raised
    _turns: dict[int, int]  # of each number of a host thread: how many had it
    _joining: bool
    _dead: bool  # its host threads ended in a deadlock, or early: nothing goes on after that
    _stuck_after: float  # seconds after which a thread that has its turn and does not come back is told of
    _here: threading.local  # .thread: which of ours this one is

    def __repr__(self) -> str:
        held = (
            f"{counted(self.devices, 'device')}, {counted(len(self.streams), 'stream')}, {counted(self.races, 'race')}"
        )
        return f"<fanin.sim.Machine: {held}, seed {self.seed}, {self.schedule}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle or copy {self!r}")

    # Scope

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._dead:
                self.synchronize()
                return
        except BaseException:
            self._drop()
            raise
        else:
            self._drop()
        finally:
            self._leave()

    def _drop(self) -> None:
        """After a failure: the host threads end, and what is queued does nothing."""
        if self._waiting:
            self._dead = True
            self._give_up()
            try:
                self._run_threads()
            except Exception:
                pass  # it was told to give up
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

    def stream(self, device: int = 0, *, blocking: bool = False) -> _core.Stream:
        """A new stream. A blocking one synchronizes with the device's legacy default stream, as CUDA says.

        One that is dropped runs what it was given, and is gone then; `streams` are those that somebody has.
        """
        return self._stream(self._numbered(device), blocking)

    def event(self, device: int = 0) -> _core.Event:
        """A new event, to be recorded on streams of `device`."""
        return self._event(self._numbered(device))

    def array(self, value: object, device: int = 0) -> Any:
        """A copy of an ndarray (or of what `np.asarray` makes one of) on a device, ordered before all that is queued
        later.

        SciPy's sparse arrays and `fanin.Sparse` become a `fanin.Sparse` whose parts lie on the device.
        """
        device = self._numbered(device)
        parts = sparse_parts(value)
        if parts is None:
            return self._array(np.asarray(value), device)
        kind, arrays, shape = parts
        return Sparse(kind, tuple(self._array(np.asarray(a), device) for a in arrays), shape)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float64", device: int = 0) -> Array:
        """An array of poisoned memory on a device: to be written by a kernel before it is read."""
        return self._empty(shape, dtype, self._numbered(device))

    def launch(
        self,
        stream: _core.Stream,
        fn: Callable[..., object],
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        name: str | None = None,
        us: float | None = None,
    ) -> None:
        """Queue a kernel on a stream: when it runs, `fn(*read_views, *write_views)` is called with NumPy views.

        The views of what it reads are read-only; what it returns is ignored. It must touch nothing else that other
        streams write. `us` is how long it takes on the clock (default: by the cost model). RaceError, here, if another
        access to the same bytes is not ordered with it. What `fn` raises is raised by the call that runs it:
        `synchronize`, `numpy()`, `step`. The views end with the kernel: one that is kept is a RuntimeError of that
        call. Those in the traceback of a kernel that raised show what was there then.
        """
        us = -1.0 if us is None else not_negative("launch: us", us)
        self._launch(stream, fn, reads, writes, name, us)

    def synchronize(self) -> None:
        """Join the host threads, run everything that is queued, and raise a race that no call has raised yet.

        DeadlockError, which names what cannot go on, when some of it never can.
        """
        if self._running is None:
            self.join()
        self._synchronize()
        self._pending()

    def step(self) -> bool:
        """Run one piece of queued work; False where none can run."""
        return self._step()

    # Capture

    def begin_capture(self, stream: _core.Stream, mode: str = "global") -> None:
        """Capture what is queued on `stream` from now on, and on every stream that waits for what is captured, instead
        of running it.

        What CUDA calls legal is legal here, and a violation has CUDA's code (900 to 908) in its message; `mode` is
        "global", "thread-local" or "relaxed". CaptureError where the stream is the legacy default or captured already.

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

    def end_capture(self, stream: _core.Stream) -> _core.Graph:
        """End the capture that began on `stream`: the graph of what was captured, which keeps the memory that it uses.

        CaptureError where a stream that was pulled in has not been joined back, where the capture was broken, or where
        it began elsewhere.
        """
        return self._end_capture(stream)

    def launch_graph(self, graph: _core.Graph, stream: _core.Stream) -> None:
        """Queue a graph on `stream`, as one piece of work; its memory is held against the checker each time."""
        self._launch_graph(graph, stream)

    def leave_out(self, *words: str) -> None:
        """Leave these waits, records and marks out of all plans from now on (and no others), to see what they are for.

        A word names a rule ("S12") or one bit of its plan ("S12.wait"); without words nothing is left out. ValueError
        lists the words.
        """
        self._leave_out(*words)

    def clock(self) -> Clock:
        """Simulated time, by a simple cost model: it gives overlap, not performance."""
        return Clock(self.host_us, self.device_us)

    # Host threads

    @property
    def _running(self) -> Thread[object] | None:
        """Which of its threads this one is."""
        return getattr(self._here, "thread", None)

    def spawn(self, fn: Callable[..., T], *args: object, name: str | None = None) -> Thread[T]:
        """A host thread that calls `fn(*args)`; it runs at `join`, by turns with the others, one at a time.

        Turns change where fanin is called, never elsewhere. It must not wait for another thread by other means than
        fanin's. A machine has 32 at a time; ValueError beyond.
        """
        if not callable(fn):
            raise TypeError(f"spawn: {fn!r} cannot be called")
        actor = self._spawn()
        thread = Thread(self, actor, name or f"{getattr(fn, '__name__', 'thread')}[{actor}]", lambda: fn(*args))
        if self._joining:
            self._started.append(thread)
            thread._os.start()
        else:
            self._waiting.append(thread)
        return thread

    def join(self) -> None:
        """Run the spawned threads to their end, and raise the first exception that one of them raised.

        DeadlockError when those that are left wait for each other.
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
            return  # an interrupt here ends no thread, and so not the machine
        waiting, self._waiting = self._waiting, []
        self._joining = True
        try:
            self._start(waiting)
            if self._started:
                interruptible(self._join, self._watch())
        except BaseException as e:
            self._dead = True
            self._give_up()
            if isinstance(e, (KeyboardInterrupt, StuckError)):
                self._started.clear()  # they may never end, and will not be waited for
            raise
        finally:
            for thread in self._started:
                while thread._os.is_alive() and not self._stuck(thread._actor):
                    thread._os.join(0.05)
            self._started.clear()
            self._joining = False

    def _watch(self) -> Callable[[], None]:
        """To be called now and then while threads act: StuckError when one of them has its turn and does not
        come back.
        """
        began, seen = time.monotonic(), -1

        def look() -> None:
            nonlocal began, seen
            now, steps = time.monotonic(), self._steps
            if steps != seen:
                began, seen = now, steps
            elif now - began > self._stuck_after:
                stacks = "".join(thread._stack() for thread in self._started)
                who = self._break("a host thread has its turn and does not come back")
                began = now
                if who >= 0:
                    name = next((t.name for t in self._started if t._actor == who), str(who))
                    raise StuckError(
                        f"host thread {name!r} has its turn and has not come back for {self._stuck_after:g} s: it waits"
                        " for what the machine does not know (a threading.Lock or a queue of another thread's, the"
                        f" network), or computes that long; see stuck_after\n{stacks}"
                    )

        return look

    def _start(self, threads: list[Thread[object]]) -> None:
        for i, thread in enumerate(threads):
            try:
                thread._os.start()
            except BaseException:
                for other in threads[i:]:
                    self._thread_end(other._actor)
                self._give_up()
                self._join()  # so that those that wait for their turn end
                raise
            self._started.append(thread)


def not_negative(what: str, x: float) -> float:
    x = float(x)
    if not 0 <= x < math.inf:
        raise ValueError(f"{what} is a finite number, 0 or more, not {x:g}")
    return x


def interruptible(call: Callable[[], object], meanwhile: Callable[[], None]) -> None:
    """call(), on a thread of its own where there can be one: so Ctrl-C is heard while it waits, and `meanwhile` is
    called now and then.
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
            thread.join(0.05)  # not for ever: a signal that comes just before a wait begins does not end it
            meanwhile()
    if raised:
        raise raised[0]
