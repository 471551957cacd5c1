"""The sum of one parameter in one step, followed from arrival to arrival at sampled elements.

Bits decide. An arrival is right if the sum before it plus the gradient, rounded to the dtype of the sum, has the bits
of the sum after it; between two arrivals, and before the optimizer reads it, the sum must keep its bits. Only what is
not right is described: cleared, multiplied by one number, one gradient lost, twice or alone, or changed by other code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import _core
from . import rounding
from .rounding import Factor, Vector, added, carrier, empty, factor, same
from .rows import VERDICTS, Row, Verdict
from .stories import Puzzle, told

__tracebackhide__ = True  # no frames of ours in reports of pytest

FEW = 8  # elements at which gradients are kept, to describe a fault
KEPT = 16  # gradients that are kept: a fault among more of them is described by the last ones alone
NAMED = 6  # arrivals that a message names
MARKS = 24  # different marks in a row of a table
NOT_NARROW = ("float64", "float32", rounding.ROWS)  # dtypes of sums that are not compared with a wider one
LOSS = 0.01  # a sum that a narrow dtype changes by more is a warning

#: What is wrong with an arrival: with all arrivals, and with some.
ARRIVALS: dict[str, tuple[Verdict, str, str]] = {
    "lost": ("fault", "no gradient reached the sum", "not in the sum: {}"),
    "replaced": (
        "fault",
        "only the last of {n} arrivals counts: each replaced the sum",
        "replaced the sum instead of adding to it: {}",
    ),
    "twice": ("fault", "each arrival counts twice", "counts twice: {}"),
    "doubled": ("fault", "each arrival doubles the sum", "doubled the sum: {}"),
    "cleared": ("fault", "the sum was cleared after each arrival", "the sum was cleared after {}, and is lost"),
    "scaled": ("fault", "the sum was multiplied at each arrival", "the sum was multiplied at {}"),
    "changed": (
        "warning",
        "changed by other code at each arrival",
        "changed by other code at {}",
    ),
}


@dataclass(slots=True)
class Pending:
    """A gradient that a pass made and that has not been seen in the sum yet."""

    gradient: Vector
    before: Vector | None
    delivered: bool = False  # torch has added it, but the sum is elsewhere


@dataclass(slots=True)
class Numbers:
    """The numbers of some arrivals; the first ones by themselves."""

    first: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, number: int) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(number)

    def __str__(self) -> str:
        named = ", ".join(map(str, self.first))
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return f"arrival{'s' if self.count > 1 else ''} {named}{more}"


class Record:
    """What is known of one parameter's sum in the step that runs.

    Parameters
    ----------
    name : str
        For rows.
    dtype : str
        The dtype of the sum: "float64", "float32", "float16" or "bfloat16".
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.name, self.dtype = name, dtype
        self.last: Vector | None = None  # the sum when it was last seen
        self.known = False  # whether `last` is of the step before, which the optimizer has read
        self.start()

    def start(self) -> None:
        """Begin a step: nothing has arrived."""
        self.began = False
        self.arrivals = 0
        self.pending: dict[int, Pending] = {}
        self.offered: dict[int, Vector] = {}  # gradients that a block may take
        self.crossed = False  # gradients of several threads arrive at once
        self.undelivered = 0  # gradients that a block has taken, which adds them later
        self.total: Vector | None = None  # the sum of the gradients, without the roundings of a narrow dtype
        self.terms = 0
        self.size: float | None = 0.0  # the sum of the largest values of the terms; None: that of `total`
        self.kept: list[Vector] = []
        self.anchor: Vector | None = None  # the sum before the gradients that are kept
        self.skipped = False  # whether a gradient after them is not kept
        self.wrong: dict[str, Numbers] = {}
        self.findings: dict[str, Verdict] = {}
        self.factors: list[tuple[Factor, str, str]] = []  # of changes: the factor, where, what else it could be
        self.unscaled = False  # whether a change was no factor that is known
        self.scale = (1.0, 1.0)  # between which numbers the product of the factors lies that were seen
        self.clips: list[float] = []  # the largest numbers that clipping by value left
        self.puzzles: list[Puzzle] = []  # changes that no factor and no story explains
        self.rounding_loss = 0.0
        self.marks: list[tuple[str, int]] = []
        self.excuse = ""  # why this step is not judged
        self.alone = 0  # gradients that did not go to the sum
        self.clipped = 0  # the arrival after which a call clipped the sum first
        self.moving = False  # whether a gradient was not zero
        self.reducing = False  # whether ranks average the sum after its last arrival
        self.drift: Vector | None = None  # what averages over ranks took from the sum: zero over all ranks
        self.moved: Vector | None = None  # how large the sums were then

    def forget(self) -> None:
        """Begin a step whose predecessor was not followed."""
        self.last, self.known = None, False
        self.start()

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays that the record holds between two arrivals."""
        arrays = {id(a): a for a in (self.last, self.total, self.anchor, *self.kept) if a is not None}
        return sum(a.nbytes for a in arrays.values())

    def discard(self, why: str) -> None:
        """Begin anew within a step: what has arrived is dropped by intent."""
        self.start()
        self._mark(why)

    # What happens

    def made(self, gradient: Vector, before: Vector | None, key: int = 0, taken: bool = False) -> None:
        """A pass has made a gradient.

        Parameters
        ----------
        gradient : array
            Its sampled elements.
        before : array or None
            Those of the sum, to which it is not added yet.
        key : int
            The thread of the pass.
        taken : bool
            Whether a block takes the gradient, to add it later.
        """
        waiting = self.pending.pop(key, None)
        if waiting is not None:
            self._settle(waiting, before)
        if not self.moving:
            self.moving = bool((np.isfinite(gradient) & (gradient != 0)).any())
        if self.offered.pop(key, None) is not None:
            self._stray()
        if taken:
            self.offered[key] = gradient
            return
        if self.undelivered:
            self._deliver(before)
        if self.pending:
            self.crossed = True
        if not self.began:
            self._begin(before)
        elif not self.crossed:
            self._between(before, f"after arrival {self.arrivals}")
        self.pending[key] = Pending(gradient, before)

    def reached(self, key: int = 0) -> None:
        """The gradient that a block takes has reached it: it is not of autograd.grad."""
        gradient = self.offered.pop(key, None)
        if gradient is not None:
            self.began = True
            self.undelivered += 1
            self.arrivals += 1
            self._mark("+")
            self._keep(gradient)

    def _stray(self) -> None:
        """A gradient did not go to the sum."""
        self.alone += 1
        self._mark("(+)")

    def arrived(self, after: Vector | None, key: int = 0, visible: bool = True) -> None:
        """The pass has added its gradient.

        Parameters
        ----------
        after : array or None
            The sum.
        key : int
            The thread of the pass.
        visible : bool
            False: other code adds the gradient to its sum later, so that `after` is not looked at.
        """
        if self.undelivered:
            if after is not None:
                self._deliver(after)
            return
        waiting = self.pending.get(key)
        if waiting is None:
            return
        if not visible:
            waiting.delivered = True
            return
        del self.pending[key]
        if self.crossed:
            self._cross(waiting, after)
        else:
            self._judge(waiting, after)

    def seen(self, before: Vector | None, after: Vector | None, mark: str, scale: float = 1.0) -> None:
        """A call changed the sum that is known to do so, such as clipping."""
        if not self.began:
            return
        self.look(before, f"before it was {mark}")
        self._weigh()
        changed = before is not None and after is not None and not same(before, after, self.dtype)
        if mark == "unscaled" and self.clipped:
            self._find("warning", "clipped before it was unscaled: the limit was compared with scaled gradients")
        if mark == "clipped" and changed and not self.clipped:
            self.clipped = self.arrivals
        self.scale = (self.scale[0] * scale, self.scale[1] * scale)
        self._mark(mark)
        self.last = after
        self._restart(after)

    def renewed(self, last: Vector | None) -> None:
        """The sampled elements are others from now on: the sum, as it is, at these."""
        self._weigh()
        self.last = last
        self._restart(last)

    def read(
        self,
        y: Vector | None,
        declared: list[float],
        shared: Sequence[float] = (),
        clips: Sequence[float] = (),
        weighed: bool = False,
    ) -> Row:
        """The optimizer reads the sum, and the step ends.

        Parameters
        ----------
        y : array or None
            What it reads.
        declared : list of float
            Factors that the loop said it applies.
        shared : sequence of float
            Factors of other parameters, which may explain changes of few elements.
        clips : sequence of float
            Numbers at which other parameters were clipped by value.
        weighed : bool
            Whether the factors are judged with the weights of the losses.
        """
        self.look(y, "before the step")
        self._weigh()
        if 0 < self.clipped < self.arrivals:
            words = (
                f"clipped after arrival {self.clipped} of {self.arrivals}: earlier gradients count less than later ones"
            )
            self._find("warning", words)
        if self.began:
            self._resolve(declared, shared, clips, weighed)
            self._sum_up()
        elif empty(y):
            self._find("note", "no gradient in this step")
        else:
            self._find("fault", "not cleared: no pass made a gradient, and the optimizer reads an earlier one")
        row = self._row()
        self.last, self.known = y, True
        return row

    def look(self, now: Vector | None, where: str) -> None:
        """Compare the sum with the one that was seen last."""
        for key in [*self.pending]:
            self._settle(self.pending.pop(key), now)
        if self.undelivered:
            self._deliver(now)
        elif self.began:
            self._between(now, where)

    # Steps of them

    def _begin(self, before: Vector | None) -> None:
        """The first arrival of a step: the sum must be empty."""
        self.began = True
        earlier, self.last = self.last if self.known else None, before
        self.anchor = None if before is None else before[:FEW].copy()
        if empty(before) or before is None:
            return
        self._mark("kept")
        self.total = before.astype(carrier(self.dtype))
        if earlier is None or same(earlier, before, self.dtype):
            self._find("fault", "not cleared: the sum begins with an earlier gradient")
            return
        f = factor(earlier, before, self.dtype)
        if f is None or not f.decided:
            self._find("warning", "not empty at the first arrival: changed by other code after the last step")
        else:
            self._find("fault", f"not cleared: the sum begins with {f.value:.4g} times the last step's gradient")

    def _settle(self, waiting: Pending, now: Vector | None) -> None:
        """What became of a gradient whose arrival was not seen, by the sum that is there now."""
        before = waiting.before
        right = added(before, waiting.gradient, self.dtype)
        if waiting.delivered or (now is not None and same(now, right, self.dtype)):
            self._judge(waiting, now)
        elif self.crossed:
            self.excuse = "a pass of another thread has not ended"
        else:  # of autograd.grad, or of a pass that raised
            self._stray()
            if self.arrivals == 0:
                self.began = False

    def _judge(self, waiting: Pending, after: Vector | None) -> None:
        """An arrival: whether the sum after it is the sum before it and the gradient."""
        before, gradient, dtype = waiting.before, waiting.gradient, self.dtype
        self.arrivals += 1
        self.last = after
        quickly = before is not None and after is not None and _core._adds_up(before, gradient, after, dtype)
        right = gradient if quickly else added(before, gradient, dtype)
        if after is not None and (quickly or same(after, right, dtype)):
            self._mark("+")
            self._keep(gradient, before, after)
            return
        kind = self._kind(before, gradient, right, after)
        self.wrong.setdefault(kind, Numbers()).add(self.arrivals)
        self._mark(kind)
        self._restart(after)

    def _kind(self, before: Vector | None, gradient: Vector, right: Vector, after: Vector | None) -> str:
        """What is wrong with an arrival."""
        dtype = self.dtype
        if after is None:
            return "lost"
        if not empty(before) and before is not None:
            if same(after, before, dtype):
                return "lost"
            if same(after, gradient, dtype):
                return "replaced"
            twice = added(before, rounding.times(2.0, gradient, dtype), dtype)
            if same(after, added(right, gradient, dtype), dtype) or same(after, twice, dtype):
                return "twice"
            doubled = added(rounding.times(2.0, before, dtype), gradient, dtype)
            if same(after, rounding.times(2.0, right, dtype), dtype) or same(after, doubled, dtype):
                return "doubled"
        elif empty(after) and not empty(gradient):
            return "lost"
        elif same(after, rounding.times(2.0, gradient, dtype), dtype):
            return "twice"
        f = factor(right, after, dtype)
        return "scaled" if f is not None and f.decided else "changed"

    def _cross(self, waiting: Pending, after: Vector | None) -> None:
        """An arrival among those of other threads: judged together when the last of them has arrived."""
        self.arrivals += 1
        self._mark("+")
        self._keep(waiting.gradient)
        self.last = after
        if self.pending:
            return
        self.crossed = False
        if self.total is None or after is None:
            self.excuse = "several threads at once, after another change"
        elif not rounding.within(after, self.total, self.dtype, self.terms, self._size(), wide=False):
            self._find("fault", "is not the sum of the gradients that several threads made at once")
        self._restart(after)

    def _deliver(self, now: Vector | None) -> None:
        """A block has added the gradients that it took."""
        count, self.undelivered = self.undelivered, 0
        self.last = now
        total = self.total
        if now is None or total is None:
            if now is None and self.moving:
                self._find("fault", f"a block took {count} gradients, and there is no sum")
            self._restart(now)
            return
        if not rounding.within(now, total, self.dtype, self.terms, self._size(), wide=True):
            stories = self._stories(now, wide=True)
            if len(stories) == 1:
                self._find("fault", stories[0])
            elif rounding.within(now, total, self.dtype, self.terms, self._size(), wide=False):
                if stories:
                    self._find("undecided", _either(["as it should be", *stories]))
            elif stories:
                self._find("undecided", _either(stories))
            else:
                self._find("warning", "the sum of a block was changed by other code")
        self._restart(now)

    def _between(self, now: Vector | None, where: str) -> None:
        """Nothing arrives: the sum must stay."""
        last = self.last
        if self.reducing and now is not None:
            self._average(last, now)
            return
        if last is not None and now is not None and same(last, now, self.dtype):
            return
        if empty(last) and empty(now):
            return
        if empty(now):
            if last is not None and not np.isfinite(last).all():
                self._find("note", f"cleared {where}: it was not finite")
            elif now is not None and last is not None and abs(last).max() <= 1024 * rounding.TINY[self.dtype]:
                self._find("warning", f"became zero {where}: it was at most {abs(last).max():.2g}")
                self.unscaled = True
            else:
                self.wrong.setdefault("cleared", Numbers()).add(self.arrivals)
            self._mark("cleared")
        elif now is not None:
            self._changed(now, where)
        self.last = now
        self._restart(now)

    def _average(self, last: Vector | None, now: Vector) -> None:
        """Ranks have replaced their sums by the mean."""
        self.reducing = False
        before = np.zeros(len(now)) if last is None else last.astype(np.float64)
        self.drift = (0 if self.drift is None else self.drift) + (before - now)
        self.moved = (0 if self.moved is None else self.moved) + abs(before) + abs(now)
        self._mark("mean")
        self._weigh()
        self.last = now
        self._restart(now)

    def averaged(self, drift: Vector, moved: Vector, ranks: int) -> None:
        """Judge the averages over ranks by what all ranks' sums lost and gained."""
        with np.errstate(all="ignore"):
            allowed = 2 * (ranks + 2) * rounding.ROUNDOFF[self.dtype] * moved + rounding.TINY[self.dtype]
            right = (abs(drift) <= allowed) | ~np.isfinite(drift)
        if not right.all():
            self._find("fault", "is not the mean of what the ranks had")

    def _changed(self, now: Vector, where: str) -> None:
        """Describe a change of the sum that no arrival made."""
        last = np.zeros_like(now) if self.last is None else self.last
        stories = self._stories(now)
        clip = rounding.clipped(last, now, self.dtype)
        if clip is not None and clip[1] and not stories:
            self._clip(clip[0], where, len(np.unique(abs(now))))
            return
        f = factor(last, now, self.dtype)
        if f is not None:
            self._mark(f"x{f.value:.4g}" if f.decided else "rewritten")
            if len(self.factors) < MARKS:
                self.factors.append((f, where, _either(stories)))
            if not f.decided and not stories and clip is not None and len(self.puzzles) < 2:
                self.factors.pop()
                self.unscaled = True
                self.puzzles.append(Puzzle(now, last, [*self.kept], self.anchor, self.arrivals, where, f))
            return
        self._mark("rewritten")
        self.unscaled = True
        if stories:
            self._find("fault" if len(stories) == 1 else "undecided", f"{_either(stories)} ({where})")
        elif self.skipped or len(self.puzzles) == 2:
            self._find("warning", f"changed by other code {where}")
        else:
            self.puzzles.append(Puzzle(now, last, [*self.kept], self.anchor, self.arrivals, where))

    def _clip(self, c: float, where: str, different: int) -> None:
        """The sum was clipped by value."""
        self.clips.append(c)
        self._mark("clipped")
        self._find("note", f"clipped by value at {c:.4g} {where}")
        self.unscaled = self.unscaled or different < rounding.ENOUGH

    def _stories(self, now: Vector, wide: bool = False) -> list[str]:
        """What could have become of the gradients that are kept, so that the sum is this one: bit for bit."""
        step = rounding.exact(self.dtype) if wide else self.dtype

        def is_now(total: Vector) -> bool:
            return same(rounding.rounded(total, self.dtype), now[:FEW], self.dtype)

        if self.skipped or not now[:FEW].any():
            return []
        return told(self.kept, self.anchor, self.arrivals, step, is_now)

    def _scaled_and_clipped(self, puzzle: Puzzle, factors: Sequence[float], clips: Sequence[float]) -> str:
        """Whether a sum was multiplied and then clipped as those of other parameters were."""
        for f, c in itertools.product(dict.fromkeys(factors), dict.fromkeys(clips)):
            wanted = np.clip(puzzle.last.astype(np.float64) * f, -c, c)
            allowed = 4 * rounding.ROUNDOFF[self.dtype] * abs(wanted) + rounding.TINY[self.dtype]
            if (abs(puzzle.now - wanted) <= allowed).all():
                return f"multiplied by {f:.4g} and clipped by value at {c:.4g}"
        return ""

    def _stories_of(self, puzzle: Puzzle, factors: Sequence[float], clips: Sequence[float]) -> list[str]:
        """What could have become of gradients before a change that other parameters had, too."""

        def scaled(f: float, total: Vector) -> bool:
            found = factor(total, puzzle.now[:FEW], self.dtype)
            return found is not None and found.has(f)

        def clipped(c: float, total: Vector) -> bool:
            return same(np.clip(total, -c, c), puzzle.now[:FEW], self.dtype)

        few = abs(puzzle.now[:FEW])
        if len(np.unique(few[few > 0])) < FEW // 2:
            return []
        tests = [functools.partial(scaled, f) for f in dict.fromkeys(factors)]
        # Of elements that are all clipped, only the sign is left.
        below = [c for c in dict.fromkeys(clips) if len(np.unique(few[(few > 0) & (few < c)])) >= FEW // 2]
        tests += [functools.partial(clipped, c) for c in below]
        each = (told(puzzle.kept, puzzle.anchor, puzzle.arrivals, self.dtype, test) for test in tests)
        return next(filter(None, each), [])

    def _keep(self, gradient: Vector, before: Vector | None = None, after: Vector | None = None) -> None:
        """Add a gradient to the sum that is compared at the end, and keep some of its elements.

        `after` is the sum with it, if it was seen; without roundings of a narrow dtype it is what is compared.
        """
        self.terms += 1
        self.size = None if after is not None else self._size() + _largest(gradient)
        if after is not None and self.dtype in NOT_NARROW:
            self.total = after
        else:
            self.total = added(self.total, gradient, rounding.exact(self.dtype))
            if self.total is gradient:
                self.total = gradient.copy()
        if len(self.kept) == KEPT and before is not None:
            self.kept.clear()
            self.anchor = before[:FEW].copy()
        if len(self.kept) < KEPT:
            self.kept.append(gradient[:FEW].copy())
        else:
            self.skipped = True

    def _size(self) -> float:
        if self.size is None:
            self.size = 0.0 if self.total is None else _largest(self.total)
        return self.size

    def _restart(self, now: Vector | None) -> None:
        """The sum is another one now: what was kept does not describe it any more."""
        self.kept.clear()
        self.skipped = False
        self.anchor = None if now is None else now[:FEW].copy()
        self.total = None if now is None else now.astype(carrier(self.dtype))
        self.terms = int(now is not None)
        self.size = None

    def _weigh(self) -> None:
        """Compare the sum with the one that has fewer roundings."""
        is_whole = self.terms > 1 and not self.undelivered
        if self.dtype in ("float16", "bfloat16") and is_whole and self.total is not None and self.last is not None:
            self.rounding_loss = max(self.rounding_loss, rounding.lost(self.last, self.total))

    # In words

    def _mark(self, mark: str) -> None:
        if self.marks and self.marks[-1][0] == mark:
            self.marks[-1] = (mark, self.marks[-1][1] + 1)
        elif len(self.marks) < MARKS:
            self.marks.append((mark, 1))
        else:
            self.marks[-1] = ("..", 1)

    def _find(self, verdict: Verdict, text: str) -> None:
        if len(self.findings) < MARKS:
            self.findings.setdefault(text, verdict)

    def _resolve(self, declared: list[float], shared: Sequence[float], clips: Sequence[float], weighed: bool) -> None:
        """Explain factors, or find them to be faults."""
        left = [*declared]
        u = 8 * rounding.ROUNDOFF[self.dtype]
        for f, where, told_of in self.factors:
            near = [d for d in left if f.has(d, u)]
            known = f.value if f.decided else next((d for d in (*near, *shared) if f.has(d, u)), None)
            others = sum(f.has(d) for d in shared) - f.decided
            if near:
                left.remove(near[0])
            if known is None:
                self.unscaled = True
                if told_of:
                    self._find("fault" if " or " not in told_of else "undecided", f"{told_of} ({where})")
                else:
                    self._find("warning", f"changed by other code {where}")
                continue
            if f.decided:
                self.scale = f.times(*self.scale)
            else:
                self.scale = (self.scale[0] * known, self.scale[1] * known)
            if not near and weighed and told_of and not others:
                self._find("undecided", f"{told_of} ({where}), or multiplied by {known:.4g}")
            if not near and not weighed:
                other = f" (or {told_of})" if told_of else ""
                text = f"multiplied by {known:.4g} {where}{other}: if the loop means it, declare audit.factor"
                self._find("undecided" if told_of else "fault", text)
        for puzzle in self.puzzles:
            clip = next((c for c in clips if same(np.clip(puzzle.last, -c, c), puzzle.now, self.dtype)), None)
            of = puzzle.factor
            if clip is not None:
                self._find("note", f"clipped by value at {clip:.4g} {puzzle.where}")
                continue
            if of is not None and any(of.has(d, u) for d in (*declared, *shared)):
                left = [d for d in left if not of.has(d, u)]
                continue
            both = self._scaled_and_clipped(puzzle, [*declared, *shared], clips)
            if both:
                self._find("note", f"{both} {puzzle.where}")
                continue
            stories = self._stories_of(puzzle, [*declared, *shared], clips)
            if stories:
                self._find("fault" if len(stories) == 1 else "undecided", f"{_either(stories)} ({puzzle.where})")
            else:
                self._find("warning", f"changed by other code {puzzle.where}")
        if left and not weighed and not self.unscaled and self.moving:
            each = ", ".join(f"{f:.4g}" for f in left)
            self._find("fault", f"not multiplied by {each}, which audit.factor declared")

    def _sum_up(self) -> None:
        """One sentence for each kind of wrong arrival."""
        twice = self.wrong.get("twice")
        if "doubled" in self.wrong and twice is not None and twice.first == [1]:  # of the first, both are the same
            self.wrong["doubled"].count += 1
            self.wrong["doubled"].first.insert(0, 1)
            del self.wrong["twice"]
        for kind, numbers in self.wrong.items():
            verdict, of_all, of_some = ARRIVALS[kind]
            n = self.arrivals
            text = of_some.format(numbers)
            if kind == "lost" and 1 < numbers.count == n - 1 and numbers.first[0] == 2:
                text = f"only the first of {n} arrivals counts"
            elif numbers.count == n and kind != "replaced":
                text = of_all.format(n=n)
            elif kind in ("replaced", "cleared") and 0 < n - 1 == numbers.count:
                text = f"only the last of {n} arrivals counts: the sum was {kind} each time"
            self._find(verdict, text)
        if self.rounding_loss > LOSS:
            self._find("warning", f"right, but {self.dtype} loses {100 * self.rounding_loss:.2g} %")
        if self.alone:
            self._find("note", f"gradients that did not go to the sum, as of autograd.grad: {self.alone}")

    def _row(self) -> Row:
        marks = " ".join(itertools.chain.from_iterable(_repeated(mark, n) for mark, n in self.marks))
        if self.excuse:
            return Row(self.name, "not judged", self.excuse, marks)
        if not self.findings:
            return Row(self.name, "right", "", marks)
        ordered = sorted(self.findings.items(), key=lambda item: VERDICTS.index(item[1]))
        return Row(self.name, ordered[0][1], "; ".join(text for text, _ in ordered[:4]), marks)


def _largest(x: Vector) -> float:
    """The largest absolute value that is finite."""
    largest = float(max(x.max(initial=0.0), -x.min(initial=0.0)))
    if largest < np.inf:
        return largest
    return float(abs(x[np.isfinite(x)]).max(initial=0.0))


def _repeated(mark: str, n: int) -> list[str]:
    return [mark] * n if n <= 4 else [f"{mark} ({n} times)"]


def _either(stories: list[str]) -> str:
    return " or ".join(stories[:3])
