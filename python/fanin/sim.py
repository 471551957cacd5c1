"""A simulated machine of devices with streams, which runs work late, in any order that is allowed, and finds races.

    m = fanin.sim.Machine(devices=2, seed=0)
    with m:                                               # "sim:0" names its first device
        a, b = m.stream(), m.stream()
        x, y = m.array(np.ones(4)), m.empty(4)
        m.launch(a, lambda x, y: np.multiply(x, 2, out=y), reads=[x], writes=[y], name="double")
        b.wait(a.record())                                # without it, the next line is a race
        m.launch(b, lambda y: ..., reads=[y])

Streams and events mean what CUDA says. Nothing runs when it is queued; `synchronize`, `numpy()` and `step` run
what may run, in an order that the seed picks. Each access is held against happens-before when it is queued: a
race is found whatever order was picked. What one run cannot cover is the order in which host threads act:
`spawn` starts threads that the machine runs one at a time, and `explore` tries every order of theirs.
"""

from __future__ import annotations

import gc
import math
import operator
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

import numpy as np

from . import _core
from ._trace.recording import active
from ._words import counted

__all__ = [
    "Array",
    "Clock",
    "DeadlockError",
    "Machine",
    "Report",
    "StuckError",
    "Thread",
    "explore",
    "replay",
    "scenario",
    "scenarios",
]

Array = _core.Array
T = TypeVar("T")

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


class Thread(Generic[T]):
    """A host thread of a machine, made by `Machine.spawn`."""

    def __init__(self, machine: Machine, actor: int, name: str, call: Callable[[], T]) -> None:
        self.name = name
        self.exception: BaseException | None = None
        self._machine, self._actor, self._call = machine, actor, call
        self._turn = machine._turns[actor] = machine._turns.get(actor, 0) + 1
        self._value: T
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
            self.exception = e
            machine._failed.append(self)
        finally:
            for core in cores:
                core.end()
            machine._leave()
            machine._thread_end(self._actor)

    @property
    def result(self) -> T:
        """What the function returned. What it raised, if it raised. RuntimeError before it has ended."""
        self._machine._saw_thread(self._actor)
        if self.exception is None and not self._ended:
            raise RuntimeError(f"thread {self.name!r} has not ended: threads run at Machine.join()")
        if self._machine._turns[self._actor] == self._turn:  # else whoever asks was spawned after it was joined
            self._machine._after_thread(self._actor)
        if self.exception is not None:
            raise self.exception
        return self._value

    def _stack(self) -> str:
        """Where it is now."""
        frame = sys._current_frames().get(self._os.ident or -1)
        lines = traceback.format_stack(frame) if frame else []
        return f"host thread {self.name!r}:\n{''.join(lines)}" if lines else ""

    def __repr__(self) -> str:
        state = "raised" if self.exception is not None else "ended" if self._ended else "not ended"
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
    _waiting: list[Thread[Any]]  # spawned; their turn comes at join
    _started: list[Thread[Any]]
    _failed: list[Thread[Any]]  # in the order in which they raised
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

    def __reduce__(self) -> Any:
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

    def array(self, value: Any, device: int = 0) -> Any:
        """A copy of an ndarray (or of what `np.asarray` makes one of) on a device, ordered before all that is queued
        later.

        SciPy's sparse arrays and `fanin.Sparse` become a `fanin.Sparse` whose parts lie on the device.
        """
        device = self._numbered(device)
        parts = sparse_parts(value)
        if parts is None:
            return self._array(np.asarray(value), device)
        import fanin

        kind, arrays, shape = parts
        return fanin.Sparse(kind, tuple(self._array(np.asarray(a), device) for a in arrays), shape)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float64", device: int = 0) -> Array:
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

    def end_capture(self, stream: _core.Stream) -> Any:
        """End the capture that began on `stream`: the graph of what was captured, which keeps the memory that it uses.

        CaptureError where a stream that was pulled in has not been joined back, where the capture was broken, or where
        it began elsewhere.
        """
        return self._end_capture(stream)

    def launch_graph(self, graph: Any, stream: _core.Stream) -> None:
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
    def _running(self) -> Thread[Any] | None:
        """Which of its threads this one is."""
        return getattr(self._here, "thread", None)

    def spawn(self, fn: Callable[..., T], *args: Any, name: str | None = None) -> Thread[T]:
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
            first = cast(BaseException, failed[0].exception)
            first.add_note(f"raised in host thread {failed[0].name!r} of {self!r}, order {self.host_schedule!r}")
            for other in failed[1:]:
                first.add_note(f"then thread {other.name!r} raised {other.exception!r}")
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

    def _start(self, threads: list[Thread[Any]]) -> None:
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


def sparse_parts(value: Any) -> tuple[str, tuple[Any, ...], tuple[int, ...]] | None:
    """(format, parts, shape) of a `fanin.Sparse` or of a SciPy sparse array; None for anything else."""
    import fanin

    if isinstance(value, fanin.Sparse):
        return value.format, value.parts, value.shape
    if not type(value).__module__.startswith("scipy.sparse"):
        return None
    kind, shape = value.format, value.shape
    if kind == "coo":
        coords = getattr(value, "coords", None) or (value.row, value.col)
        return kind, (np.stack([np.asarray(c, np.int64) for c in coords]), value.data), shape
    if kind in ("csr", "csc", "bsr"):
        return kind, (value.indptr, value.indices, value.data), shape
    raise TypeError(
        f"Machine.array: SciPy's {kind!r} has no parts that a device could hold: say x.tocoo() or x.tocsr()"
    )


# Exploring


Scenario = Callable[[Machine], Any]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Report:
    """What `explore` found. `ok` when every order ran without a race, a deadlock or an error, to one result."""

    name: str
    runs: int
    """Orders that were run to their end."""
    complete: bool
    """True when these are all orders, or stand for all."""
    skipped: int
    """Orders given up before their end because they differ from others by steps that commute; `limit` does not count
    them.
    """
    sampled: int
    """How many of `runs` were drawn at random, beyond the limit."""
    repeats: bool
    """False when the scenario did other things in one run than in another for the same order: then nothing is complete.
    """
    races: int
    deadlocks: int
    errors: int
    results: tuple[Any, ...]
    """The different results, the first run's first."""
    schedule: str | None
    """The order of the first run that failed or differed; None if none did."""
    error: BaseException | None
    """What that run raised, if it did."""
    run: Callable[[str], Any] = field(repr=False)

    def __repr__(self) -> str:
        orders = f"{counted(self.runs, 'order')}{'' if self.complete else ', not all'}"
        found = [
            counted(self.races, "race"),
            counted(self.deadlocks, "deadlock"),
            counted(self.errors, "error"),
            counted(len(self.results), "result"),
        ]
        return f"<fanin.sim.Report {self.name!r}: {orders}, {', '.join(found)}, {'ok' if self.ok else 'failed'}>"

    @property
    def ok(self) -> bool:
        return not (self.races or self.deadlocks or self.errors or len(self.results) > 1)

    def replay(self, schedule: str | None = None) -> Any:
        """Run the scenario once more in the order that failed (or in another), and return or raise what it does."""
        schedule = self.schedule if schedule is None else schedule
        if schedule is None:
            raise ValueError("replay: no run failed, so there is none to replay; name a schedule")
        return self.run(schedule)

    def __str__(self) -> str:
        def count(n: int, word: str) -> str:
            return f"{n or 'no'} {word}{'' if n == 1 else 's'}"

        how = "all of them" if self.complete else f"not all: {self.sampled} of these were drawn at random"
        found = [count(self.races, "race"), count(self.deadlocks, "deadlock")]
        found += [count(self.errors, "error")] if self.errors else []
        found += [f"{len(self.results)} different results"] if len(self.results) > 1 else []
        text = f"{self.name}: {count(self.runs, 'order')} of host threads ({how}), {', '.join(found)}"
        if self.skipped:
            text += f"; {count(self.skipped, 'order')} given up early, as others stand for them"
        if not self.repeats:
            text += "\nthe scenario did not repeat itself: the same order of threads led elsewhere"
        if self.schedule is not None:
            text += f"\nschedule {self.schedule!r}"
        if self.error is not None:
            text += f": {type(self.error).__name__}: {self.error}"
        elif self.schedule is not None:
            text += ": its result differs from the first run's"
        return text


@dataclass
class _Run:
    """One run of a scenario: what came of it."""

    schedule: str = ""
    abandoned: bool = False
    race: bool = False
    error: BaseException | None = None
    value: Any = None
    bits: Any = None


def _run(
    scenario: Scenario, make: Callable[[], Machine], search: Any, steps: int = 0, stuck_after: float = math.inf
) -> _Run:
    """One run, in the order that the search says. It has begun; here it ends."""
    run, machine = _Run(), make()
    machine._follow(search)
    machine._limit(steps)
    machine._stuck_after = stuck_after
    collecting = gc.isenabled()
    gc.disable()  # what an earlier run left would be freed, locks and all, in the middle of some thread's step
    try:
        with machine:
            value = scenario(machine)
            machine.synchronize()
            run.value, run.bits = value, bits_of(value)
    except Abandoned:
        run.abandoned = True
    except Exception as e:
        run.error = e
    finally:
        machine._give_up()  # it follows the search no further
        if collecting:
            gc.enable()
    run.race = machine.races > 0
    run.schedule = _core.explore_state(search)["schedule"]
    _core.explore_end(search)
    del machine
    gc.collect(0)  # all that the run left is young
    return run


def explore(
    scenario: Scenario,
    *,
    limit: int = 2000,
    samples: int = 200,
    seed: int = 0,
    reduce: bool = True,
    devices: int = 2,
    machine: Callable[..., Machine] = Machine,
    stop_at_first: bool = False,
    steps: int = 10_000,
    stuck_after: float = 60,
) -> Report:
    """Run `scenario(machine)` under every order in which the host threads it spawns may act, and compare.

    Each run has a machine of its own, made by `machine(devices=devices, seed=seed)`. Orders that differ only by steps
    that commute are run once (`reduce=False` runs them all); what threads share beyond fanin (a list, a counter) is no
    step of theirs, so results that hang on it need that. Beyond `limit` runs, `samples` more are drawn at random by
    `seed`, and the report says so. Results are compared by their bits; arrays on a device are read at the end.

    What `Event.query` says of work that the caller has not waited for is chosen, too: "not yet" three times at most,
    and "yes". A run of more than `steps` turns, or with a thread that asks in vain while no other acts, is a deadlock;
    so is, as a StuckError with the stacks that ends the search, a thread that does not come back for `stuck_after`
    seconds, since it waits for what the machine does not know (a `threading.Lock` that another thread holds).

    >>> import fanin, numpy as np
    >>> def scenario(m):
    ...     buf = fanin.InputBuffer(1)
    ...     for i in range(2):
    ...         m.spawn(lambda i=i: buf.add(0, np.full(2, i + 0.5), key=i))
    ...     m.join()
    ...     return buf.take()
    >>> fanin.sim.explore(scenario).ok
    True
    """
    if steps < 1 or not stuck_after > 0:
        raise ValueError(f"explore: steps is at least 1 and stuck_after more than 0, not {steps} and {stuck_after}")
    for word, given, least in (("limit", limit, 1), ("samples", samples, 0)):
        if given < least:
            raise ValueError(f"explore: {word}: expected an integer from {least} on, got {given}")

    def make() -> Machine:
        return machine(devices=devices, seed=seed)

    def once(schedule: str) -> Any:
        return replay(
            scenario, schedule, seed=seed, devices=devices, machine=machine, steps=steps, stuck_after=stuck_after
        )

    runs = 0
    results: dict[Any, Any] = {}
    counts = {"races": 0, "deadlocks": 0, "errors": 0}
    first_failure: _Run | None = None

    def note(run: _Run) -> bool:
        """True when the search need not go on."""
        nonlocal first_failure, runs
        runs += 1
        failed = run.race or run.error is not None
        if run.race:
            counts["races"] += 1
        elif isinstance(run.error, DeadlockError):
            counts["deadlocks"] += 1
        elif run.error is not None:
            counts["errors"] += 1
        elif run.bits not in results:
            failed = bool(results)
            results[run.bits] = run.value
        if failed and first_failure is None:
            first_failure = run
        return failed and (stop_at_first or isinstance(run.error, StuckError))

    search = _core.explore_new(reduce, limit)
    stopped, anew = False, 0
    while not stopped and _core.explore_begin(search):
        run = _run(scenario, make, search, steps, stuck_after)
        if (begun := _core.explore_state(search)["anew"]) != anew:  # what was found is found again
            anew, runs, first_failure = begun, 0, None
            results.clear()
            counts.update(dict.fromkeys(counts, 0))
        elif not run.abandoned:
            stopped = note(run)
    state = _core.explore_state(search)
    complete = state["complete"] and not stopped
    sampled = 0
    while not stopped and not complete and sampled < samples:
        _core.explore_sample(search, seed * 1_000_003 + sampled)
        _core.explore_begin(search)
        stopped = note(_run(scenario, make, search, steps, stuck_after))
        sampled += 1
    return Report(
        name=str(
            getattr(scenario, "__name__", None) or getattr(getattr(scenario, "func", None), "__name__", "scenario")
        ),
        runs=runs,
        complete=complete,
        skipped=state["abandoned"],
        repeats=not _core.explore_state(search)["strayed"],
        sampled=sampled,
        results=tuple(results.values()),
        schedule=first_failure.schedule if first_failure else None,
        error=first_failure.error if first_failure else None,
        run=once,
        **counts,
    )


def replay(
    scenario: Scenario,
    schedule: str,
    *,
    seed: int = 0,
    devices: int = 2,
    machine: Callable[..., Machine] = Machine,
    steps: int = 10_000,
    stuck_after: float = 60,
) -> Any:
    """Run a scenario in one order of host threads, as a `Report` prints it; returns or raises what it does.

    ValueError if the schedule does not fit the scenario.
    """
    search = _core.explore_new(False, 1)
    _core.explore_replay(search, schedule)
    _core.explore_begin(search)
    run = _run(scenario, lambda: machine(devices=devices, seed=seed), search, steps, stuck_after)
    if _core.explore_state(search)["strayed"]:
        raise ValueError(
            f"replay: schedule {schedule!r:.100} does not fit: a thread that it names could not act; this run went"
            f" {run.schedule!r}"
        )
    if run.error is not None:
        raise run.error
    return run.value


@overload
def scenario(fn: F) -> F: ...


@overload
def scenario(**options: Any) -> Callable[[F], F]: ...


def scenario(fn: Any = None, **options: Any) -> Any:
    """Mark a function of a Machine as a scenario, which `fanin check FILE.py` explores.

    `@scenario` alone, or with options of `explore`: `@scenario(limit=100)`.
    """

    unknown = sorted(options.keys() - (explore.__kwdefaults__ or {}).keys())
    if unknown:
        raise TypeError(
            f"scenario: explore has no option {unknown[0]!r}; it has {', '.join(explore.__kwdefaults__ or {})}"
        )

    def mark(f: F) -> F:
        if not callable(f) or not hasattr(f, "__dict__"):
            raise TypeError(f"scenario: expected a function of a Machine, got a {type(f).__name__}")
        f.__fanin_scenario__ = options  # type: ignore[attr-defined]
        return f

    return mark if fn is None else mark(fn)


def scenarios(module: ModuleType) -> Iterator[tuple[str, Scenario, dict[str, Any]]]:
    """(name, function, options) of each scenario that a module marks, in the order of its lines."""
    for name, value in list(vars(module).items()):
        options = getattr(value, "__fanin_scenario__", None)
        if isinstance(options, dict) and callable(value):
            yield name, value, options


def bits_of(value: Any) -> Any:
    """Something hashable that is equal for results that are the same, bit by bit."""
    if isinstance(value, Array):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Thread):
        return bits_of(value.result)
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("<dd", value.real, value.imag)
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(bits_of, value))
    if isinstance(value, dict):
        return "dict", frozenset((bits_of(k), bits_of(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(bits_of, value))
    parts = sparse_parts(value)
    if parts is not None:
        return "sparse", parts[0], tuple(map(bits_of, parts[1])), parts[2]
    if getattr(type(value), "__eq__", None) is not object.__eq__ and type(value).__hash__ is not None:
        return value
    return type(value).__qualname__
