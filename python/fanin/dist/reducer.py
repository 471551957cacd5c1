"""Sums over ranks of the gradients of leaves, in buckets that travel while a pass runs."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any, Literal, Self

import numpy as np

from fanin import _core
from fanin._interop.protocols import NDArray
from fanin._words import counted, type_of

from . import sums
from .group import Call, Group, failure_of
from .group import group as group_of
from .layout import Layout, digest, host, is_inexact, itemsize, leaf_of
from .norms import Squares, root
from .sums import Into, Options, Order, Sent, Term


class _Bucket:
    """Some leaves, and the contributions of this rank to their next sum."""

    def __init__(self, number: int, indices: Sequence[int], layout: Layout) -> None:
        self.number, self.indices, self.layout = number, indices, layout
        self.terms: list[Term] = []
        self.masks: list[int] = []  #: for each term: the leaves that it has, as bits
        self.partials: dict[int, sums.Partial] = {}  #: exact sums of the terms so far, by segment
        self.total: list[NDArray] | None = None
        self.anywhere = 0  #: the leaves that any rank has, as bits
        self.used: list[tuple[list[NDArray], list[Any]]] = []  #: memory of the terms
        self.spare: list[tuple[list[NDArray], list[Any]]] = []  #: .. and of earlier ones
        self.start()

    def start(self) -> None:
        """Begin a contribution."""
        self.flats, self.places = self.spare.pop() if self.spare else self.memory()
        self.has = bytearray(len(self.indices))  #: the leaves of which it has a gradient
        self.left = len(self.indices)  #: how many it lacks
        self.closed = False

    def memory(self) -> tuple[list[NDArray], list[Any]]:
        """Memory for a contribution: flat, and the place of each leaf in it."""
        flats, places = [], [None] * len(self.indices)
        for segment in self.layout.segments:
            raw, elements = segment.empty()
            flats.append(raw)
            for leaf, low, high in segment.places:
                places[leaf] = elements[low:high].reshape(self.layout.leaves[leaf].shape)
        return flats, places

    def reset(self) -> None:
        """Forget all contributions."""
        self.spare += [*self.used, (self.flats, self.places)] if self.places else self.used
        self.terms, self.masks, self.partials, self.total, self.anywhere, self.used = [], [], {}, None, 0, []
        self.start()

    def put(self, i: int, gradient: Any, detect: bool) -> None:
        """Take the gradient of leaf i of the bucket."""
        leaf = self.layout.leaves[i]
        if self.has[i]:
            raise ValueError(f"Reducer: {leaf.name} got a second gradient: open accumulate() anew for each pass")
        place = self.places[i]
        plain = type(gradient) is type(place) is np.ndarray and not detect
        if plain and gradient.dtype == place.dtype and gradient.shape == place.shape:
            place[...] = gradient
            return
        dtype = _core.dtype_name(gradient.dtype) if hasattr(gradient, "dtype") else leaf.dtype
        if tuple(getattr(gradient, "shape", leaf.shape)) != leaf.shape or dtype != leaf.dtype:
            raise ValueError(f"Reducer: {leaf.name}: expected {leaf.dtype} of shape {leaf.shape}, got {gradient!r:.80}")
        if leaf.size:
            done = _core.add_n([host(gradient)], out=place, stats=detect)
            if detect and done[1].nonfinite:
                bad = FloatingPointError(f"Reducer: {leaf.name}: {counted(done[1].nonfinite, 'element')} inf or NaN")
                bad.leaf = leaf.name  # type: ignore[attr-defined]
                raise bad

    def finish(self, key: int | None) -> None:
        """The contribution is complete."""
        for segment in self.layout.segments if self.left else ():
            for leaf, _, _ in segment.places:
                if not self.has[leaf]:
                    segment.leave_out(self.places[leaf])
        self.terms.append(Term(list(self.flats), key))
        self.masks.append(
            int.from_bytes(np.packbits(np.frombuffer(self.has, np.uint8), bitorder="little").tobytes(), "little")
        )
        self.used.append((self.flats, self.places))
        self.places = []

    def settle(self, order: Order | None) -> None:
        """Add the contribution to the exact sums, so that its memory is free."""
        term = self.terms[-1]
        for i, segment in enumerate(self.layout.segments if order == "exact" else ()):
            if is_inexact(segment.dtype):
                self.partials.setdefault(i, sums.Partial(segment)).waiting.append(term.flats[i])
                term.flats[i] = term.flats[i][:0]
        for one in self.partials.values():
            one.settle()
        if not any(map(len, term.flats)):
            self.spare.append(self.used.pop())

    def sent(self, rank: int) -> Sent:
        """The messages to the owners."""
        for i, one in self.partials.items():
            one.waiting.append(self.terms[-1].flats[i])
        return Sent(self.terms, {i: (one, *one.pack(rank)) for i, one in self.partials.items()})


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
        timeout: float | None = None,
    ) -> None:
        self.group: Group = group if isinstance(group, Group) else group_of(group)
        self.leaves = [_leaf(x, i) for i, x in enumerate(leaves)]
        self.missing = missing
        self.detect = detect
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
        self._takers = [
            (self.leaves[index], partial(self._put, bucket, i))
            for bucket in self._buckets
            for i, index in enumerate(bucket.indices)
        ]
        self._key: int | None = None
        self._lock = threading.Lock()  # of the counts of buckets
        self._state = threading.Condition()
        self._ended = False  # the pass at hand, on this rank
        self._error: BaseException | None = None  # .. by this
        self._sender = ThreadPoolExecutor(1, "fanin.dist")
        self._sending: Future[None] | None = None
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
        diverted: list[Any] = []

        def undo() -> None:
            for leaf in diverted:
                _core.leaf_divert(leaf, None)

        self._open.callback(undo)
        for leaf, take in self._takers:
            _core.leaf_divert(leaf, take)
            diverted.append(leaf)

    def _put(self, bucket: _Bucket, i: int, gradient: Any) -> None:
        bucket.put(i, gradient, self.detect)
        with self._lock:
            bucket.has[i] = 1
            bucket.left -= 1
            if bucket.left:
                return
        with self._state:
            bucket.closed = True
            self._state.notify_all()

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
                    bucket.finish(number)
                    bucket.settle(self._options.order)
                    bucket.start()
            except BaseException as e:
                failed = e
            if failed is not None:
                self._fail(failed)
                raise failed

    def _fail(self, error: BaseException) -> None:
        """End the pass of every rank with this rank's error."""
        self.group._passes += 1
        self._error, self._ended = error, True
        try:
            self._send(self.group._passes)
        except RuntimeError:
            pass  # this rank raises its own error
        finally:
            self._reset()

    def _reset(self) -> None:
        self._error, self._ended, self._key = None, False, None
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
        self._sending = self._sender.submit(self._send, self.group._passes)

    def _end(self, error: BaseException | None) -> None:
        assert self._sending is not None
        self._open.close()
        with self._pass:
            with self._state:
                self._error, self._ended = error, True
                self._state.notify_all()
            try:
                self._sending.result()
            except BaseException as e:
                if self.group.closed is None and not isinstance(e, Exception):
                    self.group.close(f"rank {self.group.rank} was interrupted: {type(e).__name__}")
                self._reset()
                if error is None:
                    raise
                return
        made = self._results()
        self._reset()
        if self._options.into == "shard":
            self.shards = made
            return
        for leaf, total in zip(self.leaves, made, strict=True):
            if total is not None:
                _core.leaf_accumulate(leaf, total)

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
            anywhere = f"{bucket.anywhere:b}"[::-1].ljust(len(bucket.indices), "0")
            for index, piece, has in zip(bucket.indices, pieces, anywhere, strict=True):
                if has == "1":
                    made[index] = piece
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
        failed = self._until(None)
        with self._call(number, len(self._buckets)) as call:
            call.meet({}, failure=None if failed is None else failure_of(failed))

    def _until(self, bucket: _Bucket | None) -> BaseException | None:
        """Wait until a bucket is closed (None: until the pass has ended), and return this rank's error."""
        with self._state:
            while not (self._ended or (bucket is not None and bucket.closed)):
                self._state.wait()
            return self._error

    def _call(self, number: int, bucket: int) -> Call:
        return Call(self.group, "backward", number, bucket, self._timeout)

    def _sum(self, call: Call, bucket: _Bucket) -> None:
        bucket.finish(self._key)
        sent = bucket.sent(self.group.rank)
        mine = 0
        for mask in bucket.masks:
            mine |= mask
        headers = call.meet({**sent.header, "has": f"{mine:x}"}, digest=self._digest)
        call.compare(headers, self._parts)
        has = [int(h["has"], 16) for h in headers]
        for mask in has:
            bucket.anywhere |= mask
        lacking = bucket.anywhere & ~reduce(operator.and_, has)
        if self.missing == "error" and lacking:
            i = (lacking & -lacking).bit_length() - 1
            name = bucket.layout.leaves[i].name
            with_it = [r for r, mask in enumerate(has) if mask >> i & 1]
            without = [r for r in range(len(has)) if r not in with_it]
            raise call.refuse(
                f"{name} has a gradient on ranks {with_it} and none on ranks {without}: expected it on all or none, or"
                " missing='skip'",
                without[0],
                name,
            )
        bucket.total = sums.Sum(call, bucket.layout, sent, headers, self._options).run() if bucket.anywhere else None

    # ---- the norm

    def norm(self) -> float:
        """The 2-norm of the sums, exact but for one rounding; inf if an element is inf or NaN.

        It is that of all `.grad`, or with into="shard" of all shards. Unless into="all", every rank must call it.
        """
        squares = Squares()
        mine = self.shards if self._options.into == "shard" else [leaf.grad for leaf in self.leaves]
        here = self._options.into in ("all", "shard", self.group.rank)
        for x in mine if here else ():
            if x is not None:
                squares.add(x)
        if self._options.into == "all":
            return root([squares.total()]) if squares.finite else float("inf")
        n, e = squares.total()
        with self.group.call("Reducer.norm", self._timeout) as call:
            headers = call.meet({"squares": [f"{n:x}", e], "finite": squares.finite})
        if not all(h["finite"] for h in headers):
            return float("inf")
        return root([(int(h["squares"][0], 16), h["squares"][1]) for h in headers])


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
