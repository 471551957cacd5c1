"""`explore` runs a scenario under every order of its host threads; `scenario` marks one for `fanin check`."""

from __future__ import annotations

import gc
import inspect
import struct
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from .. import _core
from .._checks import flag, function, integer, positive
from .._interop.classes import is_tensor
from .._words import counted, names_nearest, type_of
from .machine import Abandoned, Array, DeadlockError, Machine, StuckError, Thread, sparse_parts

__tracebackhide__ = True  # no frames of ours in reports of pytest

Scenario = Callable[[Machine], object]
NDArray = npt.NDArray[np.generic]
F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class Report:
    """The result of `explore`. `ok` if every order ran without a race, a deadlock or an error, to one result.

    `failed` if a fault was found. Neither if orders are missing or results cannot be compared; see `outcome`.
    """

    name: str
    runs: int  #: Orders that were run to their end
    complete: bool  #: True if these are all orders, or cover all
    skipped: int  #: Orders given up early because others cover them; `limit` does not count them
    sampled: int  #: The number of `runs` that were drawn at random, beyond the limit
    repeats: bool  #: False if the scenario acted differently in two runs of the same order; then `complete` is False
    races: int
    deadlocks: int
    errors: int
    results: tuple[object, ...]  #: The different results, the first run's first
    schedule: str | None  #: The order of the first run that failed or differed; None if there is none
    error: BaseException | None  #: The exception of that run, if there is one
    incomparable: str | None  #: A type among the results without a value to compare: then the results may differ
    run: Callable[[str], object] = field(repr=False)

    def __repr__(self) -> str:
        orders = f"{counted(self.runs, 'order')}{'' if self.complete else ', not all'}"
        found = {"race": self.races, "deadlock": self.deadlocks, "error": self.errors, "result": len(self.results)}
        words = ", ".join(counted(n, word) for word, n in found.items())
        return f"<fanin.sim.Report {self.name!r}: {orders}, {words}, {self.outcome}>"

    @property
    def failed(self) -> bool:
        """Whether a race, a deadlock, an error or a second result was found."""
        return bool(self.races or self.deadlocks or self.errors or len(self.results) > 1)

    @property
    def outcome(self) -> str:
        """One of "failed", "cannot be compared", "incomplete" (no fault, but orders are missing) or "ok"."""
        if self.failed:
            return "failed"
        if self.incomparable is not None:
            return "cannot be compared"
        return "ok" if self.complete else "incomplete"

    @property
    def ok(self) -> bool:
        """Whether every order ran and none failed."""
        return self.outcome == "ok"

    @property
    def advice(self) -> str:
        """How to make the result certain, where orders are missing or results cannot be compared; else ""."""
        if self.incomparable is not None:
            return (
                f"cannot be compared: a result holds {self.incomparable}, which has no value: return its arrays and"
                " numbers, or give the class __eq__ and __hash__"
            )
        missing = "incomplete: no fault was found, but orders are missing: use a larger limit="
        return missing if self.outcome == "incomplete" else ""

    def replay(self, schedule: str | None = None) -> object:
        """Run the scenario once more in the order that failed, or in `schedule`; return its result or raise its
        exception.
        """
        schedule = self.schedule if schedule is None else schedule
        if schedule is None:
            raise ScheduleError("no run failed, so there is none to replay; name a schedule")
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
            text += f"; {count(self.skipped, 'order')} given up early, because others cover them"
        if not self.repeats:
            text += "\nthe scenario did not repeat itself: the same order of threads led to another run"
        if self.schedule is not None:
            text += f"\nschedule {self.schedule!r}"
        if self.error is not None:
            text += f": {type(self.error).__name__}: {self.error}"
        elif self.schedule is not None:
            text += ": its result differs from the first run's"
        return f"{text}\n{self.advice}" if self.advice else text


@dataclass(frozen=True)
class Scene:
    """The scenario, and how to make the machines for its runs."""

    scenario: Scenario
    make: Callable[[], Machine]
    steps: int  #: Steps after which a run counts as a deadlock
    stuck_after: float  #: Seconds after which a thread that does not return does

    def run(self, search: object) -> Run:
        """Run the scenario once, in the order that the search, which has begun, gives."""
        run, machine = Run(), self.make()
        machine._follow(search)
        machine._limit(self.steps)
        machine._stuck_after = self.stuck_after
        collecting = gc.isenabled()
        gc.disable()  # garbage of an earlier run, with locks, would be freed in the middle of a thread's step
        try:
            with machine:
                value = self.scenario(machine)
                machine.synchronize()
                run.value = value
                try:
                    run.bits = bits_of(value)
                except Incomparable as e:
                    run.incomparable = str(e)
        except Abandoned:
            run.abandoned = True
        except Exception as e:
            run.error = e
        finally:
            machine._give_up()  # it no longer follows the search
            if collecting:
                gc.enable()
        run.race = machine.races > 0
        run.schedule = _core.explore_state(search)["schedule"]
        _core.explore_end(search)
        del machine
        gc.collect(0)  # garbage of the run is young
        return run


@dataclass
class Run:
    """One run of a scenario and its outcome."""

    schedule: str = ""
    abandoned: bool = False
    race: bool = False
    error: BaseException | None = None
    value: object = None
    bits: Hashable = None
    incomparable: str | None = None


@dataclass
class Findings:
    """The findings of a search so far."""

    runs: int = 0
    sampled: int = 0
    races: int = 0
    deadlocks: int = 0
    errors: int = 0
    results: dict[Hashable, object] = field(default_factory=dict)
    first_failure: Run | None = None
    incomparable: str | None = None


class Search:
    """The orders of a scene's host threads, tried one after the other."""

    def __init__(self, scene: Scene, reduce: bool, limit: int, stop_at_first: bool) -> None:
        self.scene, self.stop_at_first = scene, stop_at_first
        self.orders = _core.explore_new(reduce, limit)
        self.found = Findings()
        self.stopped = False

    def note(self, run: Run) -> None:
        """Count a run; it failed also if it gave another result than the first."""
        found, failed = self.found, run.race or run.error is not None
        found.runs += 1
        found.incomparable = found.incomparable or run.incomparable
        if run.race:
            found.races += 1
        elif isinstance(run.error, DeadlockError):
            found.deadlocks += 1
        elif run.error is not None:
            found.errors += 1
        elif run.bits not in found.results:
            failed = bool(found.results)
            found.results[run.bits] = run.value
        if failed and found.first_failure is None:
            found.first_failure = run
        self.stopped = failed and (self.stop_at_first or isinstance(run.error, StuckError))

    def try_all(self) -> bool:
        """Run the orders up to the limit; return whether they are all orders, or cover all."""
        anew = 0
        while not self.stopped and _core.explore_begin(self.orders):
            run = self.scene.run(self.orders)
            if (begun := _core.explore_state(self.orders)["anew"]) != anew:  # the search restarted
                anew, self.found = begun, Findings()
            elif not run.abandoned:
                self.note(run)
        return _core.explore_state(self.orders)["complete"] and not self.stopped

    def strayed(self) -> bool:
        """Whether the same order of threads led to another run."""
        return bool(_core.explore_state(self.orders)["strayed"])


def scene_of(
    call: str,
    scenario: Scenario,
    machine: Callable[..., Machine],
    devices: int,
    seed: int,
    steps: int,
    stuck_after: float,
) -> Scene:
    """The scene of a call, whose arguments are checked."""
    function(f"{call}: scenario", scenario)
    function(f"{call}: machine", machine)
    make = partial(machine, devices=integer(f"{call}: devices", devices), seed=integer(f"{call}: seed", seed))
    return Scene(scenario, make, integer(f"{call}: steps", steps, 1), positive(f"{call}: stuck_after", stuck_after))


@names_nearest
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
    """Run `scenario(machine)` under every order in which its spawned host threads may act, and compare the results.

    Each run has its own machine. Results are compared bit by bit, in containers too: arrays of NumPy, torch, JAX and
    others by DLPack, numbers, strings, and objects with `__eq__` and `__hash__`; arrays on a device are read at the
    end. The search also chooses the answer of `Event.query` about work that the caller has not waited for: "not yet" at
    most three times, and "yes". A thread that polls in vain while no other acts is a deadlock.

    Parameters
    ----------
    scenario : callable
        A function of a Machine.
    limit : int
        Orders to run.
    samples : int
        Further orders, drawn at random by `seed`, if the limit was reached.
    seed : int
        For the machines and the samples.
    reduce : bool
        Run orders that differ only by independent steps once. Use False if threads share data beyond fanin (a list, a
        counter) on whose order the result depends.
    devices, machine
        Each run's machine is `machine(devices=devices, seed=seed)`.
    stop_at_first : bool
        Stop at the first fault.
    steps : int
        A run of more steps is a deadlock.
    stuck_after : float
        A thread that does not return from its step for so many seconds, because it waits for something outside of the
        machine (a `threading.Lock` that another thread holds), ends the search with a StuckError that has the stacks.
        `math.inf`: never.

    Returns
    -------
    Report
        The counts, the results, and a schedule of the first failure.

    Examples
    --------
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
    limit, samples = integer("explore: limit", limit, 1), integer("explore: samples", samples, 0)
    reduce, stop_at_first = flag("explore: reduce", reduce), flag("explore: stop_at_first", stop_at_first)
    scene = scene_of("explore", scenario, machine, devices, seed, steps, stuck_after)
    search = Search(scene, reduce, limit, stop_at_first)
    complete = search.try_all()
    found = search.found
    if search.strayed() and not (search.stopped or found.races or found.deadlocks or found.errors):
        # An import or a cache that fills adds steps to the first run alone.
        search = Search(scene, reduce, limit, stop_at_first)
        complete = search.try_all()
        search.found.results = found.results | search.found.results
        search.found.first_failure = search.found.first_failure or found.first_failure
    skipped = _core.explore_state(search.orders)["abandoned"]
    found = search.found
    while not (complete or search.stopped) and found.sampled < samples:  # orders beyond the limit, drawn at random
        _core.explore_sample(search.orders, seed * 1_000_003 + found.sampled)
        _core.explore_begin(search.orders)
        search.note(scene.run(search.orders))
        found.sampled += 1
    first, name = found.first_failure, getattr(scenario, "__name__", None)
    return Report(
        name=str(name or getattr(getattr(scenario, "func", None), "__name__", "scenario")),  # .func: of a partial one
        runs=found.runs,
        complete=complete,
        skipped=skipped,
        repeats=not search.strayed(),
        sampled=found.sampled,
        races=found.races,
        deadlocks=found.deadlocks,
        errors=found.errors,
        results=tuple(found.results.values()),
        schedule=first.schedule if first else None,
        error=first.error if first else None,
        incomparable=found.incomparable,
        run=lambda schedule: replay_scene(scene, schedule),
    )


class ScheduleError(ValueError):
    """There is no schedule, or it does not fit the scenario."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"replay: {reason}")
        self.reason = reason


def replay_scene(scene: Scene, schedule: str) -> object:
    """Run the scenario once in the order of a schedule; return its result or raise its exception."""
    search = _core.explore_new(False, 1)
    _core.explore_replay(search, schedule)
    _core.explore_begin(search)
    run = scene.run(search)
    if _core.explore_state(search)["strayed"]:
        raise ScheduleError(
            f"schedule {schedule!r:.100} does not fit: a thread that it names could not act; the order was"
            f" {run.schedule!r}"
        )
    if run.error is not None:
        raise run.error
    return run.value


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
    """Run a scenario in one order of host threads, as a `Report` prints it; return its result or raise its exception.

    ValueError if the schedule does not fit the scenario.
    """
    scene = scene_of("replay", scenario, machine, devices, seed, steps, stuck_after)
    if not isinstance(schedule, str):
        raise TypeError(f"replay: schedule: expected a str, got {type_of(schedule)}")
    return replay_scene(scene, schedule)


class Incomparable(Exception):
    """A result has no value to compare; the text names its type."""


def bits_of(value: object) -> Hashable:
    """A hashable value that is equal for results that are equal bit by bit. Incomparable if there is none."""
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
    if isinstance(value, BaseException):
        return "exception", type(value).__qualname__, bits_of(value.args)
    if isinstance(value, Enum):
        return type(value).__qualname__, value.name
    parts = sparse_parts(value)
    if parts is not None:
        return "sparse", parts[0], tuple(map(bits_of, parts[1])), parts[2]
    array = array_of(value)
    if array is not None and array.dtype == object:
        return "array", "object", array.shape, tuple(map(bits_of, array.ravel().tolist()))
    if array is not None:
        return "array", str(array.dtype), array.shape, array.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, tuple(bits_of(getattr(value, f.name)) for f in fields(value))
    if getattr(type(value), "__eq__", None) is not object.__eq__ and type(value).__hash__ is not None:
        return value
    raise Incomparable(type_of(value))


def array_of(value: object) -> NDArray | None:
    """The values of an array of any library, as bytes for types that NumPy lacks; None if it is no array."""
    if isinstance(value, Array):
        return value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if is_tensor(value):
        torch = sys.modules["torch"]
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        named = np.array([str(plain.dtype), *map(str, plain.shape)])  # bfloat16 and float8 are bytes to NumPy
        return np.concatenate([named.view(np.uint8), plain.reshape(-1).view(torch.uint8).numpy()])
    if hasattr(type(value), "__array__"):
        return np.asarray(value)
    return np.from_dlpack(cast(NDArray, value)) if hasattr(type(value), "__dlpack__") else None


@overload
def scenario(fn: F, /) -> F: ...


@overload
def scenario(**options: object) -> Callable[[F], F]: ...


def scenario(fn: F | None = None, /, **options: object) -> F | Callable[[F], F]:
    """Mark a function of a Machine as a scenario, which `fanin check FILE.py` explores.

    `@scenario` alone, or with options of `explore`: `@scenario(limit=100)`.
    """
    parameters = inspect.signature(explore).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise TypeError(f"scenario: explore has no option {unknown[0]!r}; it has {', '.join(known)}")

    def mark(f: F) -> F:
        if not callable(f) or not hasattr(f, "__dict__"):
            raise TypeError(f"scenario: expected a function of a Machine, got {type_of(f)}")
        f.__fanin_scenario__ = options  # type: ignore[attr-defined]
        return f

    return mark if fn is None else mark(fn)


def scenarios(module: ModuleType) -> Iterator[tuple[str, Scenario, dict[str, Any]]]:
    """(name, function, options) of each scenario that a module marks, in the order of its lines."""
    for name, value in list(vars(module).items()):
        options = getattr(value, "__fanin_scenario__", None)
        if isinstance(options, dict) and callable(value):
            yield name, value, options
