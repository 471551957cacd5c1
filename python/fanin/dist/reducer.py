"""Sums over ranks of the gradients of leaves, in buckets that travel while a pass runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Self

from fanin import _core
from fanin._interop.protocols import NDArray
from fanin._threads import here
from fanin._trace.recording import beside, recording
from fanin._words import counted, type_of

from . import sums
from .counters import BadTerm, SumStats
from .explain import explain
from .group import Call, Group, Header, failure_of
from .group import group as group_of
from .layout import Layout, digest, host, is_inexact, itemsize, leaf_of
from .norms import Squares, root
from .sums import Into, Options, Order, Sent, Term


class _Bucket:
    """Some leaves, and the contributions of this rank to their next sum."""

    def __init__(self, number: int, indices: Sequence[int], layout: Layout) -> None:
        self.number, self.indices, self.layout = number, indices, layout
        self.closed = _core.EventCount()  #: the passes in which it was closed
        self.terms: list[Term] = []
        self.masks: list[int] = []  #: for each term: the leaves that it has, as bits
        self.windows: dict[int, list[object]] = {}  #: exact sums of the terms so far, by segment
        self.total: list[NDArray] | None = None
        self.anywhere = 0  #: the leaves that any rank has, as bits
        self.bad: list[int] | None = None  #: the first contribution with an inf or NaN, its leaf, how many elements
        self.headers: list[Header] | None = None  #: of the last sum
        self.start()

    def start(self) -> None:
        """Begin a contribution."""
        made = [segment.empty() for segment in self.layout.segments]
        self.flats = [raw for raw, _ in made]
        self.places: list[Any] = [None] * len(self.indices)
        for segment, (_, elements) in zip(self.layout.segments, made, strict=True):
            for leaf, low, high in segment.places:
                self.places[leaf] = elements[low:high].reshape(self.layout.leaves[leaf].shape)
        self.mask = 0

    def reset(self) -> None:
        """Forget all contributions."""
        self.terms, self.masks, self.windows, self.total, self.anywhere, self.bad = [], [], {}, None, 0, None
        self.start()

    def put(self, i: int, gradient: Any, stats: bool) -> int:
        """Copy the gradient of leaf i of the bucket; return how many elements are inf or NaN, if they are counted."""
        leaf = self.layout.leaves[i]
        dtype = _core.dtype_name(gradient.dtype) if hasattr(gradient, "dtype") else leaf.dtype
        if tuple(getattr(gradient, "shape", leaf.shape)) != leaf.shape or dtype != leaf.dtype:
            raise ValueError(f"Reducer: {leaf.name}: expected {leaf.dtype} of shape {leaf.shape}, got {gradient!r:.80}")
        if self.mask >> i & 1:
            raise ValueError(f"Reducer: {leaf.name} got a second gradient: open accumulate() anew for each pass")
        if not leaf.size:
            return 0
        done = _core.add_n([host(gradient)], out=self.places[i], stats=stats)
        return done[1].nonfinite if stats else 0

    def finish(self, key: int | None, order: Order | None) -> None:
        """The contribution is complete: keep it, or add it to the exact sum."""
        flats = list(self.flats)
        for i, segment in enumerate(self.layout.segments if order == "exact" else ()):
            if is_inexact(segment.dtype):
                sums.window_add(self.windows.setdefault(i, sums.windows_of(segment)), segment, [flats[i]])
                flats[i] = flats[i][:0]
        self.terms.append(Term(flats, key))
        self.masks.append(self.mask)

    def sent(self, rank: int) -> Sent:
        """The messages to the owners."""
        packed = {i: sums.pack(windows, rank) for i, windows in self.windows.items()}
        return Sent(self.terms, packed, self.windows)


class Reducer:
    """Sums the gradients of leaves over ranks while backward passes run: `fanin.backward(roots, reducer=reducer)`.

    Every rank makes it with the same leaves, in the same order, and the same options.

    Parameters
    ----------
    leaves : sequence of fanin.Leaf, or parameters of fanin.tape
        Arrays on the CPU. The last ones travel first.
    group : optional
        A group, or what `fanin.dist.group` accepts.
    order : "key", "exact" or "rank", optional
        As for `fanin.dist.add_n`. Default: "key" if no rank has more than one contribution, else "rank".
    bucket_bytes : int
        Bytes of gradients that travel together. The bits do not depend on it.
    into : "all", "shard" or int
        "all": every rank's `.grad` gets the sum. "shard": `shards` has each leaf's elements that this rank owns, and no
        `.grad` changes. A rank: its `.grad` alone gets it.
    missing : "error" or "skip"
        Whether a leaf with a gradient on some ranks only is an error on every rank, or is summed over those ranks.
    scale : number, optional
        Multiplies each sum before the rounding.
    detect : bool
        A gradient with an inf or NaN ends the pass: FloatingPointError on its rank, and on the others a PeerError with
        rank and leaf. `fanin.backward(detect=True)` names the node that made it, too.
    stats : bool
        Count the inf and NaN of each contribution, so that `stats()` names the first bad one.
    timeout : float, optional
        Seconds after which a rank no longer waits for another. Default: the group's.

    Raises
    ------
    TypeError, ValueError
        For leaves or options that do not fit.

    >>> def train(group):
    ...     w = fanin.Leaf(np.zeros(2), name="w")
    ...     reducer = fanin.dist.Reducer([w], group, order="exact")
    ...     fanin.backward([(w, 0, np.array([1.0, group.rank]))], reducer=reducer)
    ...     return w.grad, reducer.norm()
    >>> fanin.dist.threads(3, train)[2]
    (array([3., 3.]), 4.242640687119285)
    """

    def __init__(
        self,
        leaves: Iterable[Any],
        group: object = None,
        *,
        order: Order | None = None,
        bucket_bytes: int = 25 << 20,
        into: Into = "all",
        missing: Literal["error", "skip"] = "error",
        scale: complex | None = None,
        detect: bool = False,
        stats: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.group: Group = group if isinstance(group, Group) else group_of(group)
        self.leaves = [_leaf(x, i) for i, x in enumerate(leaves)]
        self.missing = missing
        self.detect = detect
        self._count_bad = stats
        self._bad: BadTerm | None = None  #: of the last pass
        self.shards: list[Any] = [None] * len(self.leaves)  #: with into="shard": of each leaf the elements owned here
        self._options = Options(order, scale, into)
        self._options.check("Reducer", self.group.size)
        if missing not in ("error", "skip"):
            raise ValueError(f'Reducer: expected missing="error" or "skip", got {missing!r}')
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ValueError(f"Reducer: expected a positive number of bucket_bytes, got {bucket_bytes!r}")
        if len({id(leaf) for leaf in self.leaves}) < len(self.leaves):
            raise ValueError("Reducer: expected each leaf once")
        self._timeout = self.group.timeout if timeout is None else timeout
        self._buckets = self._divide(bucket_bytes)
        self._key: int | None = None
        self._lock = threading.Lock()  # of masks; held by no thread that calls or waits
        self._turn = 0  # passes so far ..
        self._ended, self._sent = _core.EventCount(), _core.EventCount()  # .. that ended on this rank, and the sender's
        self._passing = False
        self._error: BaseException | None = None  # by which the pass ended here
        self._failed: BaseException | None = None  # .. or its sums
        self._sender = ThreadPoolExecutor(1, "fanin.dist")
        self._open = ExitStack()

    def _divide(self, bucket_bytes: int) -> list[_Bucket]:
        specs = [leaf_of(leaf.array, leaf.name or f"leaf {i}") for i, leaf in enumerate(self.leaves)]
        groups: list[list[int]] = []
        room = 0
        for i in range(len(specs) - 1, -1, -1):
            n = specs[i].size * itemsize(specs[i].dtype)
            if not groups or n > room:
                groups.append([])
                room = bucket_bytes
            groups[-1].append(i)
            room -= n
        made = [_Bucket(b, g, Layout([specs[i] for i in g], self.group.size)) for b, g in enumerate(groups)]
        for bucket in made:
            self._options.check_dtypes(bucket.layout)
        self._parts = [["", f"{self._options.text}, missing={self.missing!r}, {len(made)} buckets"]]
        self._parts += [part for bucket in made for part in bucket.layout.parts]
        self._digest = digest(self._parts)
        return made

    def at(self, key: int | None) -> Self:
        """Set the key of the next pass's contribution (order="key"), and return the reducer."""
        self._key = None if key is None else sums.check_keys([key], 1)[0]
        return self

    # ---- contributions

    def _divert(self) -> None:
        """The leaves' sums go to the buckets until the pass ends."""
        for bucket in self._buckets:
            for i, index in enumerate(bucket.indices):
                leaf = self.leaves[index]
                _core.leaf_divert(leaf, partial(self._put, bucket, i))
                self._open.callback(_core.leaf_divert, leaf, None)

    def _put(self, bucket: _Bucket, i: int, gradient: Any) -> None:
        nonfinite = bucket.put(i, gradient, self.detect or self._count_bad)
        if nonfinite and self.detect:
            name = bucket.layout.leaves[i].name
            bad = FloatingPointError(f"Reducer: {name}: {counted(nonfinite, 'element')} inf or NaN")
            bad.leaf = name  # type: ignore[attr-defined]
            raise bad
        with self._lock:
            bucket.mask |= 1 << i
            whole = bucket.mask == (1 << len(bucket.indices)) - 1
            if nonfinite:
                one = [len(bucket.terms), i, nonfinite]
                bucket.bad = min(bucket.bad or one, one)
        if whole and self._passing:
            bucket.closed.advance()

    @contextmanager
    def accumulate(self, key: int | None = None) -> Iterator[None]:
        """The pass inside is one more contribution of this rank to the next sum; nothing travels.

        If it raises, the next sum's pass ends at once, on every rank.

        Parameters
        ----------
        key : int, optional
            The key of the contribution.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(2))
        ...     reducer = fanin.dist.Reducer([w], group, order="exact")
        ...     with reducer.accumulate():
        ...         fanin.backward([(w, 0, np.array([1.0, 1.0]))])
        ...     fanin.backward([(w, 0, np.array([1.0, 1.0]))], reducer=reducer)
        ...     return w.grad
        >>> fanin.dist.threads(2, train)[0]
        array([4., 4.])
        """
        number = self._key if key is None else self.at(key)._key
        self._key = None
        with self.group.entered("Reducer.accumulate"):
            failed: BaseException | None = None
            try:
                with self._open:
                    self._divert()
                    yield
                for bucket in self._buckets:
                    bucket.finish(number, self._options.order)
                    bucket.start()
            except BaseException as e:
                failed = e
            if failed is not None:
                self._fail(failed)
                raise failed

    def _fail(self, error: BaseException) -> None:
        """End the pass of every rank with this rank's error."""
        self.group._passes += 1
        self._turn += 1
        self._pass_ended(error)
        try:
            self._send(self.group._passes)
        except RuntimeError:
            pass  # this rank raises its own error
        finally:
            self._sent.advance()
            self._reset()

    def _reset(self) -> None:
        self._error, self._failed, self._key = None, None, None
        for bucket in self._buckets:
            bucket.reset()

    # ---- a pass: called by fanin.backward

    def _begin(self) -> None:
        pass_ = ExitStack()
        pass_.enter_context(self.group.entered("backward"))
        try:
            self._divert()
        except BaseException:
            self._open.close()
            pass_.close()
            raise
        self._pass = pass_
        self.group._passes += 1
        self._turn += 1
        self._passing = True
        self._travels: list[tuple[int, int]] = []
        rings, number = [] if here.spawn else beside(), self.group._passes

        def send() -> None:
            try:
                with recording(rings):
                    self._send(number)
            except BaseException as e:
                self._failed = e
            finally:
                self._sent.advance()

        (here.spawn or self._sender.submit)(send)

    def _end(self, error: BaseException | None) -> None:
        self._open.close()
        ended = time.monotonic_ns()
        with self._pass:
            self._pass_ended(error)
            try:
                self._sent.wait(self._turn)
                if self._failed is not None:
                    raise self._failed
            except BaseException as e:
                if self.group.closed is None and not isinstance(e, Exception):
                    self.group.close(f"rank {self.group.rank} was interrupted: {type(e).__name__}")
                self._reset()
                if error is None:
                    raise
                return
        self.group._tally.passed(self._travels, ended)
        self._bad = self._first_bad()
        made = self._results()
        self._reset()
        if self._options.into == "shard":
            self.shards = made
            return
        for leaf, total in zip(self.leaves, made, strict=True):
            if total is not None:
                _core.leaf_accumulate(leaf, total)

    def _pass_ended(self, error: BaseException | None) -> None:
        """No gradient comes any more: all buckets are closed."""
        self._passing, self._error = False, error
        self._ended.advance()  # before buckets: the sender reads the error when they are closed
        for bucket in self._buckets:
            if bucket.closed.value < self._turn:
                bucket.closed.advance()

    def _results(self) -> list[Any]:
        made: list[Any] = [None] * len(self.leaves)
        for bucket in self._buckets:
            flats, layout = bucket.total, bucket.layout
            if flats is None or self._options.into not in ("all", "shard", self.group.rank):
                continue
            like = [self.leaves[i].array for i in bucket.indices]
            if self._options.into == "shard":
                pieces = layout.shards(flats, self.group.rank, like)
            else:
                pieces = layout.unflatten(flats, like)
            for i, index in enumerate(bucket.indices):
                if bucket.anywhere >> i & 1:
                    made[index] = pieces[i]
        return made

    # ---- on the sending thread

    def _send(self, number: int) -> None:
        """Sum all buckets, in their order on every rank; then agree that no rank failed."""
        for bucket in self._buckets:
            failed = self._until(bucket)
            with self._call(number, bucket.number) as call:
                if failed is not None:
                    call.meet({}, failure=failure_of(failed))
                self._sum(call, bucket)
            self._travels.append(call.data_ns)
        failed = self._until(None)
        with self._call(number, len(self._buckets)) as call:
            call.title = "pass end"
            call.meet({}, failure=None if failed is None else failure_of(failed))

    def _until(self, bucket: _Bucket | None) -> BaseException | None:
        """Wait until a bucket is closed (None: until the pass has ended), and return this rank's error."""
        (self._ended if bucket is None else bucket.closed).wait(self._turn)
        return self._error if self._ended.value >= self._turn else None

    def _call(self, number: int, bucket: int) -> Call:
        return Call(self.group, "backward", number, bucket, self._timeout)

    def _sum(self, call: Call, bucket: _Bucket) -> None:
        begin = time.monotonic_ns()
        bucket.finish(self._key, self._options.order)
        sent = bucket.sent(self.group.rank)
        call.trace("pack", begin)
        mine = 0
        for mask in bucket.masks:
            mine |= mask
        headers = call.meet({**sent.header, "has": f"{mine:x}", "bad": bucket.bad}, digest=self._digest)
        call.compare(headers, self._parts)
        bucket.headers = headers
        has = [int(h["has"], 16) for h in headers]
        for mask in has:
            bucket.anywhere |= mask
        if self.missing == "error":
            for i, leaf in enumerate(bucket.layout.leaves):
                with_it = [r for r, mask in enumerate(has) if mask >> i & 1]
                if 0 < len(with_it) < len(has):
                    without = [r for r in range(len(has)) if r not in with_it]
                    raise call.refuse(
                        f"{leaf.name} has a gradient on ranks {with_it} and none on ranks {without}: expected it on all"
                        " or none, or missing='skip'",
                        without[0],
                        leaf.name,
                    )
        bucket.total = sums.Sum(call, bucket.layout, sent, headers, self._options).run() if bucket.anywhere else None

    # ---- what is known of the sums

    def _first_bad(self) -> BadTerm | None:
        """Of the last pass: by key, or without keys by rank and contribution; then by leaf."""
        found: list[tuple[tuple[int, ...], BadTerm]] = []
        for bucket in self._buckets:
            for rank, h in enumerate(bucket.headers or ()):
                if h["bad"]:
                    place, i, elements = h["bad"]
                    key = h["keys"][place]
                    term = BadTerm(rank, bucket.layout.leaves[i].name, elements, place, key)
                    found.append(((-1 if key is None else key, rank, place, bucket.indices[i]), term))
        return min(found, key=lambda one: one[0])[1] if found else None

    def explain(self, which: Any) -> str:
        """Sentences, with the numbers of the rules, about a bucket: who owns its elements, whose terms are summed in
        which order, what travelled as which type, with bytes. Of the last pass; no message is sent.

        Parameters
        ----------
        which : int, or a leaf
            The number of a bucket, or one of the leaves, of which only the elements are explained.

        Raises
        ------
        IndexError, ValueError
            For a bucket that does not exist, or a leaf that is not the reducer's.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(300, "f4"), name="w")
        ...     reducer = fanin.dist.Reducer([w], group)
        ...     fanin.backward([(w, 0, np.ones(300, "f4"))], reducer=reducer)
        ...     return reducer.explain(w)
        >>> print(fanin.dist.threads(2, train)[0])
        bucket 0 of 1: w: 300 elements, 1.172 KiB.
        w, float32: rank 0 owns elements 0 to 255, rank 1 owns elements 256 to 299 (N1).
        Terms: 1 of rank 0, 1 of rank 1.
        The owner folds from the left, in float32: key 0 of rank 0, key 1 of rank 1 (N2).
        This rank sent float32 to owners: 176 B.
        Each owner sends its part of the sum to all ranks, as float32; this rank 1 KiB to each (N6).
        """
        only = None
        if isinstance(which, int) and not isinstance(which, bool):
            if not 0 <= which < len(self._buckets):
                raise IndexError(f"explain: expected a bucket from 0 to {len(self._buckets) - 1}, got {which}")
            bucket = self._buckets[which]
        else:
            index = self.leaves.index(_leaf(which, 0)) if _leaf(which, 0) in self.leaves else -1
            if index < 0:
                raise ValueError(f"explain: expected a leaf of this reducer, got {which!r:.80}")
            bucket = next(b for b in self._buckets if index in b.indices)
            only = list(bucket.indices).index(index)
        where = f"bucket {bucket.number} of {len(self._buckets)}"
        return explain(where, bucket.layout, self._options, bucket.headers, self.group.rank, only)

    def norm(self) -> float:
        """The 2-norm of the sums, exact but for one rounding; inf if an element is inf or NaN.

        It is that of all `.grad`, or with into="shard" of all shards. Unless into="all", every rank must call it.
        """
        return self._over_ranks("Reducer.norm", False).norm

    def stats(self) -> SumStats:
        """Statistics of the sums, the same on every rank: their norm, their largest magnitude, how many elements are
        inf or NaN, and with `Reducer(stats=True)` the first contribution that brought one.

        They are those of all `.grad`, or with into="shard" of all shards. Unless into="all", every rank must call it.

        >>> def train(group):
        ...     w = fanin.Leaf(np.zeros(2), name="w")
        ...     reducer = fanin.dist.Reducer([w], group, stats=True)
        ...     fanin.backward([(w, 0, np.array([1.0, np.nan if group.rank == 2 else 1.0]))], reducer=reducer)
        ...     return reducer.stats()
        >>> fanin.dist.threads(3, train)[0]
        SumStats(norm=inf, absmax=3.0, nonfinite=1, bad=BadTerm(rank=2, leaf='w', elements=1, contribution=0, key=None))
        """
        return self._over_ranks("Reducer.stats", True)

    def _over_ranks(self, call_name: str, every: bool) -> SumStats:
        squares, absmax, nonfinite = Squares(), 0.0, 0
        mine = self.shards if self._options.into == "shard" else [leaf.grad for leaf in self.leaves]
        for x in mine if self._options.into in ("all", "shard", self.group.rank) else ():
            if x is not None:
                squares.add(x)
                if every:
                    one = _core.add_n([x], stats=True)[1]
                    absmax, nonfinite = max(absmax, one.absmax), nonfinite + one.nonfinite
        n, e = squares.total() if squares.finite else (0, 0)
        facts = {"squares": [f"{n:x}", e], "finite": squares.finite, "absmax": absmax, "nonfinite": nonfinite}
        headers: list[Header] = [facts]
        if self._options.into != "all":
            with self.group.call(call_name, self._timeout) as call:
                headers = call.meet(facts)
        finite = all(h["finite"] for h in headers)
        return SumStats(
            root([(int(h["squares"][0], 16), h["squares"][1]) for h in headers]) if finite else float("inf"),
            max(h["absmax"] for h in headers),
            sum(h["nonfinite"] for h in headers),
            self._bad,
        )


def _leaf(x: Any, i: int) -> Any:
    leaf = x if isinstance(x, _core.Leaf) else getattr(x, "edge", (None,))[0]
    if not isinstance(leaf, _core.Leaf):
        raise TypeError(f"Reducer: leaves[{i}]: expected a fanin.Leaf or a parameter of fanin.tape, got {type_of(x)}")
    if leaf.array is None:
        raise TypeError(f"Reducer: leaves[{i}]: expected a leaf made of an array, got one with like=")
    return leaf


def clip_norm(reducer: Reducer, max_norm: float) -> float:
    """Scale the sums in place so that their norm is at most `max_norm`, and return the norm before.

    Nothing is scaled if the norm is inf. Unless into="all", every rank must call it.

    Parameters
    ----------
    reducer : Reducer
        After a pass.
    max_norm : float
        A non-negative number.

    Raises
    ------
    ValueError
        For a negative `max_norm`.

    >>> def train(group):
    ...     w = fanin.Leaf(np.zeros(2))
    ...     reducer = fanin.dist.Reducer([w], group, order="exact")
    ...     fanin.backward([(w, 0, np.array([1.5, 2.0]))], reducer=reducer)
    ...     return fanin.dist.clip_norm(reducer, 1.0), w.grad
    >>> fanin.dist.threads(2, train)[0]
    (5.0, array([0.6, 0.8]))
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(f"clip_norm: expected a non-negative max_norm, got {max_norm!r}")
    norm = reducer.norm()
    if norm > max_norm and norm != float("inf"):
        mine = reducer.shards if reducer._options.into == "shard" else [leaf.grad for leaf in reducer.leaves]
        for x in mine:
            if x is not None:
                _core.add_n([x], out=x, scale=max_norm / norm)
    return norm
