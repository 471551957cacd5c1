"""The C core (csrc/py). Public names are documented where the package shows them; the rest is for our own modules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from types import EllipsisType, TracebackType
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    SupportsIndex,
    TypedDict,
    TypeVar,
    final,
    overload,
)

import numpy as np

from ._graph_trees import GraphStats, Outcome
from ._interop.protocols import DTypeLike, NDArray, StreamLike
from .options import Counters, ProcessCounters
from .slots import Slot, Stats

# ---------------------------------------------------------------- the buffer

@final
class Target:
    """What InputBuffer.target gives: a context that lends an array to add into."""
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> Literal[False]: ...

@final
class InputBuffer:
    """Gradients are added to its slots, from any thread and any stream; their sums are taken.

    slots: a count; or a sequence of example arrays, whose shape, dtype and device are taken, and of fanin.Slot.
    budget: bytes of contributions that may wait to be summed; 0 sums at each arrival, math.inf only when asked.
    "auto": what the buffer alone keeps alive, for whoever made it has dropped it, counts against a part of the
    second-level cache, and what somebody else holds against 64 MiB. None is what fanin.set_options says: "auto" at
    first. The bits of the sums do not depend on it. accumulate: the dtype in which sums run; by default float32 for
    float16, bfloat16 and float8, else the dtype itself. "exact": sums of floats are those of real numbers, rounded
    once, whatever the order (a gradient that is summed to the slot's shape is summed as ever before that). stats:
    `stats()` tells norms, largest elements and non-finite ones of what was taken, and waits for it on a device with
    streams. stream: the consumer's. leaf: the consumer accumulates into `.grad`. create_graph: sums are made by the
    arrays' own `+`, so that they can be differentiated. name: for messages, traces and pictures.

    >>> buf = fanin.InputBuffer([fanin.Slot(shape=(2,), dtype="float32", name="b1")])
    >>> buf.add(0, np.ones((5, 2), np.float32))   # summed to the declared shape
    >>> buf.take()
    [array([5., 5.], dtype=float32)]
    """
    def __new__(
        cls,
        slots: int | Iterable[object],
        *,
        budget: float | Literal["auto"] | None = None,
        accumulate: DTypeLike | None = None,
        stats: bool = False,
        stream: StreamLike | None = None,
        leaf: bool = False,
        create_graph: bool = False,
        name: object = None,
    ) -> InputBuffer: ...
    @property
    def name(self) -> str:
        """Its name in messages, traces and pictures."""
    @property
    def budget(self) -> float | Literal["auto"]:
        """Bytes of contributions that may wait to be summed: "auto", a number, or math.inf."""
    @property
    def counters(self) -> Counters:
        """What it has done so far: a fanin.Counters."""
    def add(
        self,
        slot: int,
        gradient: object,
        *,
        key: int | None = None,
        stream: StreamLike | None = None,
        donate: bool = False,
        copy: bool = False,
    ) -> None:
        """Add one gradient to a slot.

        The gradient is an array (ndarray, torch.Tensor, jax.Array, SciPy sparse, fanin.Sparse, an array of a
        simulated device), a number, fanin.Zero, an object with its own `+`, or None: undefined, which counts and
        adds nothing. Leave it as it is until the sum is taken: the buffer may keep a reference. `copy=True` lifts
        that. Without `donate` it is never written into; with it, nobody else touches it until take(), and the sum
        may be written there.

        key: an integer from 0 on, one per edge: the sum is the left fold in key order, whoever came first. stream:
        the one that the gradient was made on. donate and copy exclude each other.

        Raises IndexError (slot), TypeError (no array, no stream), ValueError (shape, dtype, key, count),
        OverflowError (a Python int that does not fit int64), BufferError (an array that cannot be imported),
        RuntimeError (the slot is poisoned). Then all is as before.

        >>> buf = fanin.InputBuffer(1)
        >>> buf.add(0, np.array([1.0, 2.0]))
        >>> buf.add(0, np.array([10.0, 20.0]))
        >>> buf.take()
        [array([11., 22.])]
        """
    def add_many(
        self,
        slots: Sequence[int],
        gradients: Sequence[object],
        *,
        keys: Sequence[int | None] | None = None,
        stream: StreamLike | None = None,
        donate: bool = False,
        copy: bool = False,
    ) -> None:
        """Add gradients[i] to slots[i] for each i, in one call: all of them or, with an error, none.

        slots: a sequence of ints; one slot may be there more than once. gradients: as many of what `add` takes.
        keys: as many ints (or None for each), stream, donate, copy: as `add` has them, for all.

        Raises what `add` raises, and ValueError where the lengths differ; then no gradient was added.

        >>> buf = fanin.InputBuffer(2)
        >>> buf.add_many([0, 1, 0], [np.ones(2), np.ones(3), np.ones(2)])
        >>> buf.take()
        [array([2., 2.]), array([1., 1., 1.])]
        """
    def target(self, slot: int, *, key: int | None = None, stream: StreamLike | None = None) -> Target:
        """A context that lends an array, in the accumulation dtype, for a producer that adds into the slot by itself.

        It is the running sum where that is safe: where it is the buffer's own, `key` comes next, and the producer's
        stream is the one that sums; the slot then waits for the end. Else it holds zeros, and counts as a
        contribution at the end. The slot must declare its shape and dtype. If the body raises, zeros that were lent
        are dropped; a slot whose running sum was lent answers every call but clear() with a RuntimeError. What was
        lent is not to be written after the block.

        Raises IndexError (slot), TypeError (stream), ValueError (an undeclared slot, key, count).

        >>> buf = fanin.InputBuffer([np.empty(3, np.float16)])
        >>> with buf.target(0) as out:
        ...     out += np.float32([1, 2, 3])
        >>> buf.take()
        [array([1., 2., 3.], dtype=float16)]
        """
    def expect(self, slot: int, n: int) -> None:
        """Say that each pass brings `n` contributions to a slot; this stays after take().

        One too many is then a ValueError at add, a missing one at take.

        >>> buf = fanin.InputBuffer(1)
        >>> buf.expect(0, 2)
        >>> buf.add(0, 1.0)
        >>> buf.ready(0)
        False
        """
    def ready(self, slot: int, /) -> bool:
        """Whether all contributions that were told to `expect` have come; ValueError without expect."""
    @overload
    def take(
        self,
        stream: StreamLike | None = None,
        *,
        slot: None = None,
        out: Sequence[object] | None = None,
        scale: complex | None = None,
        writable: bool = False,
    ) -> list[Any]:
        """All sums, as a list with an entry for each slot, None where it is undefined; the buffer is then empty.

        slot: of this one alone the sum comes back, bare, and only it is empty then: one buffer can serve a whole
        graph. `out` is one array. The sums are ready to be used on `stream`; by default the buffer's, else what was
        current at the slot's first gradient (S5). A single contribution comes back as the very object that was
        added (of a torch tensor that requires a gradient its detach()); `writable=True` copies what is not the
        buffer's alone. out: a list of arrays (or None) to write the sums into. scale: a number that multiplies the
        sums in the same pass, before the one rounding.

        Raises ValueError (out, scale, a contribution missing), BufferError (out cannot be written), OverflowError
        (a sum of Python ints that does not fit), RuntimeError (poisoned; from within a target of a slot).

        >>> buf = fanin.InputBuffer(2)
        >>> buf.add(0, np.float32([1, 2]))
        >>> buf.add(0, np.float32([3, 4]))
        >>> buf.take(scale=0.5)
        [array([2., 3.], dtype=float32), None]
        >>> buf.add(0, 1.0); buf.add(1, 2.0)
        >>> buf.take(slot=1), buf.take()
        (2.0, [1.0, None])
        """
    @overload
    def take(
        self,
        stream: StreamLike | None = None,
        *,
        slot: int,
        out: object = None,
        scale: complex | None = None,
        writable: bool = False,
    ) -> Any: ...
    def stats(self, slot: int, /) -> Stats | None:
        """What is known of the sum that was taken of a slot, until something is added to it again: a fanin.Stats;
        None where the sum is undefined, or an object. Gathered in the same pass over memory as the sum, where there
        is one.

        On a device with streams the sum leaves them there: the first call waits for the stream that summed, and
        blocks.

        Raises ValueError if the buffer was made without stats=True, or no sum was taken; CaptureError while that
        stream is captured, and of a sum that was made while it was.

        >>> buf = fanin.InputBuffer(1, stats=True)
        >>> buf.add(0, np.array([3.0, np.inf]), key=0)
        >>> buf.add(0, np.array([1.0, 1.0]), key=1)
        >>> _ = buf.take()
        >>> buf.stats(0)
        Stats(count=2, sumsq=16.0, absmax=4.0, nonfinite=1, first_bad_key=0)
        """
    def clear(self) -> None:
        """Empty it, also when it is poisoned; for passes that failed."""
    def explain(self, slot: int, /) -> str:
        """What was and will be decided for a slot, in sentences with the numbers of the rules.

        >>> buf = fanin.InputBuffer(1, name="w1")
        >>> print(buf.explain(0))
        w1: slot 0: nothing has come yet.
        """
    def __getitem__(self, slot: int, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...

def _collectors(
    buffer: InputBuffer,
    donate: list[bool | None],
    came: bytearray,
    otherwise: Callable[..., object],
    /,
) -> list[Callable[[object], object]]: ...
def add_n(
    arrays: Iterable[object],
    *,
    out: object = None,
    keys: Iterable[int] | None = None,
    accumulate: DTypeLike | None = None,
    scale: complex | None = None,
    stats: bool = False,
) -> Any:
    """The sum of arrays of one shape, in one pass and with one rounding.

    arrays: a sequence of at least one array or number (None adds nothing). The sum is the left fold in their order,
    or in that of `keys`, one integer each. It is in fresh memory, or in `out`. accumulate: the dtype in which it
    runs; by default float32 for float16, bfloat16 and float8, else the promotion of all. scale: a number that
    multiplies it before the rounding. stats: the answer is a pair: the sum and its fanin.Stats (None of an object).

    Raises TypeError (no array), ValueError (shapes, dtypes, keys, an empty sequence), BufferError (`out` cannot be
    written), OverflowError (a sum of Python ints that does not fit int64).

    >>> fanin.add_n([np.float16([1, 2]), np.float16([3, 4]), np.float16([5, 6])])
    array([ 9., 12.], dtype=float16)
    """

# ---------------------------------------------------------------- the engine

@final
class HookHandle:
    """What registering a hook gives: `remove()`, or the end of a `with`, takes the hook out again."""
    def remove(self) -> None:
        """Take the hook out; again does nothing."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> Literal[False]: ...

@final
class Edges:
    """The edges of a Node, as a sequence of (node, slot) and None."""
    def append(self, edge: Edge, /) -> None:
        """Add (node, slot), or None; it counts from the next pass on.

        Raises ValueError where it would close a cycle, TypeError and IndexError as Node does.
        """
    @overload
    def __getitem__(self, index: int, /) -> Edge: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[Edge]: ...
    def __iter__(self) -> Iterator[Edge]: ...
    def __len__(self) -> int: ...

class Node:
    """An operation of a graph that a pass goes backward over.

    fn: `fn(*sums)` gets the sums of the `inputs` gradients that come to its slots, None where one is undefined, and
    returns one gradient, or None, per edge, as a tuple or list; a bare one where there is one edge. It does not
    write its sums (`g = g * 10`, not `g *= 10`): others may have them, and then an ndarray is read-only while it
    runs. edges: for each (node, slot) of a Node or Leaf, or None where nobody needs that gradient. slots: for each
    input an example array, a fanin.Slot, or None: what comes is checked against it. release: called when the graph
    is freed there. name: what messages call it. stream: where its sums are ready for it, where it runs, and where
    its gradients are then ready; device: that device's current stream, or "cpu". Without either: the current stream
    of the device that `slots` declare, else the one that was made current last. group: a text, or an object that
    several share: of such nodes one runs at a time in a pass of several workers.

    Raises TypeError (fn, an edge that is no pair, a group that is a number), IndexError (a slot that is not there),
    ValueError (inputs, slots, a stream of another device).

    >>> w = fanin.Leaf(np.ones(2), name="w")
    >>> double = fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="double")
    >>> fanin.backward([(double, 0, np.array([1.0, 2.0]))])
    >>> w.grad
    array([2., 4.])
    >>> with fanin.sim.Machine() as m, fanin.stream(m.stream()) as s:
    ...     there = fanin.Node(lambda g: g, name="there")
    ...     there.stream == s, there.device
    (True, 'sim:0')
    """
    def __init__(
        self,
        fn: Callable[..., object],
        inputs: int = 1,
        edges: Iterable[Edge] = (),
        *,
        slots: Iterable[object] | None = None,
        release: Callable[[], object] | None = None,
        name: object = None,
        stream: StreamLike | None = None,
        device: str | None = None,
        group: object = None,
    ) -> None: ...
    @property
    def fn(self) -> Callable[..., Any] | None:
        """Its function; None once the graph was freed there."""
    @property
    def inputs(self) -> int:
        """How many gradients it receives."""
    @property
    def edges(self) -> Edges:
        """Where its gradients go: a sequence of (node, slot) and None, with append()."""
    @property
    def grad(self) -> Any:
        """What retain_grad() has kept: of one slot its sum, of several a tuple; None where nothing is. None may be
        set.
        """
    @grad.setter
    def grad(self, value: None) -> None:
        """What retain_grad() has kept: of one slot its sum, of several a tuple; None where nothing is. None may be
        set.
        """
    @property
    def name(self) -> str | None:
        """What messages call it; None without a name."""
    @property
    def group(self) -> object:
        """Of nodes with the same group one runs at a time in a pass; None without one."""
    @property
    def sequence_nr(self) -> int:
        """Its number among all nodes and leaves: the later made, the larger."""
    @property
    def stream(self) -> Stream | None:
        """Its stream: its gradients are ready there, and its sums for it; None where none is known."""
    @property
    def device(self) -> str:
        """The name of the device where it runs; "cpu" too where none is known."""
    @property
    def freed(self) -> bool:
        """Whether a pass without keep_graph has run it."""
    def needs(self, edge: int, /) -> bool:
        """Whether anybody needs the gradient of an edge: not where it is None, nor, while the node runs, where
        inputs= leaves it out. Of several passes the innermost on this thread answers, else the latest walk that
        waits for it.
        """
    def register_hook(self, hook: Hook, slot: int = 0) -> HookHandle:
        """Let `hook(sum)` see the sum of a slot, where it is defined, once in each pass; what it returns, if not
        None, replaces it.

        It must be of the same shape, dtype and device. Gives a handle with `remove()`.
        """
    def register_prehook(self, hook: Callable[[Sums], object], /) -> HookHandle:
        """Let `hook(sums)` see the tuple of all sums before the node runs; what it returns, if not None, replaces
        them all.

        Gives a handle with `remove()`.
        """
    def register_posthook(self, hook: Callable[[Sums, Sums], object], /) -> HookHandle:
        """Let `hook(sums, gradients)` see both tuples once the node has run; what it returns, if not None, replaces
        the gradients.

        Gives a handle with `remove()`.
        """
    def retain_grad(self, slot: int = 0) -> None:
        """Keep the sum of a slot in `grad`, as the slot's hooks leave it; a further pass adds its own.

        Raises IndexError for a slot that is not there.
        """
    def _free(self) -> None: ...
    def _sum_into(self, arrays: tuple[object, ...], /) -> None: ...

@final
class Leaf:
    """Where gradients end: each pass adds what comes to `.grad`, in place once that exists.

    array: gradients are of its shape, dtype and device; of a torch tensor that requires one they are in its own
    `.grad`. grad_dtype: another dtype for them. accumulate: a dtype in which passes are summed, rounded when
    `.grad` is read, which is then the leaf's own: of a tensor that requires a gradient give x.detach(). To change
    such a gradient, set it. Or a function that takes each pass's sum, for memory that somebody else owns, whose
    shape, dtype and device are then given by like. name: what messages call it. stream: where it accumulates;
    without one what is now the current stream of the array's device.

    Raises TypeError (no array), ValueError (dtypes, a stream of another device).

    >>> w = fanin.Leaf(np.zeros(2), name="w")
    >>> for _ in range(2):
    ...     fanin.backward([(w, 0, np.array([1.0, 2.0]))])
    >>> w.grad
    array([2., 4.])

    On a device it accumulates on its stream:

    >>> with fanin.sim.Machine() as m, fanin.stream(m.stream()) as s:
    ...     w = fanin.Leaf(m.array(np.zeros(2)))
    ...     for _ in range(2):
    ...         fanin.backward([(w, 0, m.array(np.array([1.0, 2.0])))])
    ...     w.grad.numpy(), w.grad.device, w.stream == s
    (array([2., 4.]), 'sim:0', True)
    """
    @overload
    def __init__(
        self,
        array: object,
        *,
        like: None = None,
        accumulate: DTypeLike | Callable[[Any], object] | None = None,
        grad_dtype: DTypeLike | None = None,
        name: object = None,
        stream: StreamLike | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        array: None = None,
        *,
        like: tuple[Sequence[int] | None, DTypeLike | None, str | None] | Slot,
        accumulate: Callable[[Any], object],
        grad_dtype: DTypeLike | None = None,
        name: object = None,
        stream: StreamLike | None = None,
    ) -> None: ...
    @property
    def grad(self) -> Any:
        """The sum of the gradients of all passes since it was None; may be set."""
    @grad.setter
    def grad(self, value: object) -> None:
        """The sum of the gradients of all passes since it was None; may be set."""
    @grad.deleter
    def grad(self) -> None:
        """The sum of the gradients of all passes since it was None; may be set."""
    @property
    def array(self) -> Any:
        """What it was made of; None with like=."""
    @property
    def stream(self) -> Stream | None:
        """The stream on which it accumulates; None on the CPU."""
    @property
    def name(self) -> str | None:
        """What messages call it; None without a name."""
    @property
    def sequence_nr(self) -> int:
        """Its number among all nodes and leaves: the later made, the larger."""
    def register_hook(self, hook: Hook, slot: int = 0) -> HookHandle:
        """Let `hook(sum)` see the pass's sum, where it is defined, before it is accumulated; what it returns, if
        not None, replaces it.

        It must be of the same shape, dtype and device. Gives a handle with `remove()`.
        """
    def register_post_accumulate_grad_hook(self, hook: Callable[[Leaf], object], /) -> HookHandle:
        """Let `hook(leaf)` see the leaf once `.grad` has the pass's sum.

        Gives a handle with `remove()`.
        """

@final
class Walk:
    """What walk gives: an iterator of (node, sums), which takes gradients by `give`."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[Node, Sums]: ...
    def give(self, gradients: object, /) -> None:
        """The gradients of the node that came last, as its function would have returned them.

        Raises what `backward` raises for a node that returned them; the pass has ended then.
        """
    def close(self) -> None:
        """End the pass here; again does nothing."""
    def explain(self, node: Node | Leaf | None = None) -> str:
        """Why a node, or each that has not run, has not run: which edges have not brought their gradients, and
        which have, in sentences.

        Of a pass that has ended early: what it said then. Empty where all have run.

        >>> w = fanin.Leaf(np.zeros(2), name="w")
        >>> low = fanin.Node(lambda g: g, edges=[(w, 0)], name="low")
        >>> top = fanin.Node(lambda g: g, edges=[(low, 0)], name="top")
        >>> p = fanin.walk([(top, 0, np.ones(2)), (low, 0, np.ones(2))])
        >>> node, sums = next(p)
        >>> print(p.explain(low))  # doctest: +ELLIPSIS
        low (node ...) has not run: slot 0 waits for edge 0 of top (node ...); slot 0 holds root 1
        """

Edge = tuple[Node | Leaf, int] | None
Root = tuple[Node | Leaf, int, object] | tuple[Node | Leaf, int] | Node | Leaf
Hook = Callable[[Any], object]
Sums = tuple[Any, ...]
Schedule = Callable[[tuple[Node, ...]], Node]

def backward(
    roots: Iterable[Root],
    inputs: Iterable[Leaf | tuple[Leaf, int]] | None = None,
    *,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    detect: bool | None = None,
    schedule: Schedule | None = None,
    progress: Callable[[int, int], object] | None = None,
    one: Callable[[Node | Leaf, int], object] | None = None,
    workers: int = 1,
) -> None:
    """Go backward over the graph behind some nodes, and add what reaches leaves to their `.grad`.

    roots: a sequence of (node, slot, gradient); without a gradient, or with None, it is one where the slot declares
    a shape of one element, or what `one(node, slot)` returns; a node alone is its slot 0. inputs: leaves: no others
    accumulate, and nodes run only where they lead to one. keep_graph: nodes keep their functions, for another pass;
    None: as create_graph says. create_graph: the pass records itself: sums are made by the arrays' own `+`, and
    each `.grad` becomes a new object (rules A1, L6), so that functions whose operations make nodes give gradients
    that can be differentiated. detect: the first gradient with an inf or NaN ends the pass (FloatingPointError),
    with the node that made it; None: as `set_options(detect=)` says. schedule: `schedule(ready)` picks the next of
    the nodes that are ready; the bits are the same whatever it picks. progress: `progress(ran, known)` is told how
    many of all nodes and leaves have run: 0 first, then more each time; what it raises ends the pass. workers: on
    up to so many threads nodes run at once, the caller's among them, with the same bits for every number; it pays
    where functions let go of the interpreter's lock, as NumPy's do; schedule and create_graph are for one worker.

    A node runs when all its gradients have come; of several, the one that was made last. An error ends the pass at
    that node and has a note that names it; each leaf then has its whole gradient, or none of it.

    Raises TypeError and ValueError (roots, inputs, gradients), IndexError (a slot), RuntimeError (a graph that was
    freed; passes inside passes, 1,000 deep), and what nodes and hooks raise.

    >>> w = fanin.Leaf(np.array([1.0, 2.0]), name="w")
    >>> square = fanin.Node(lambda g: g * 2 * w.array, edges=[(w, 0)], name="square")
    >>> total = fanin.Node(lambda g: g * np.ones(2), edges=[(square, 0)], slots=[fanin.Slot(())], name="total")
    >>> fanin.backward([total])
    >>> w.grad
    array([2., 4.])

    On a device nodes and leaves are on the stream that was current where they were made; at the end the caller's
    waits for it:

    >>> with fanin.sim.Machine() as m:
    ...     def double(g):
    ...         made = m.empty(2)
    ...         m.launch(fanin.current_stream("sim:0"), lambda v, to: np.add(v, v, out=to), reads=[g], writes=[made])
    ...         return made
    ...     with fanin.stream(m.stream()):
    ...         w = fanin.Leaf(m.array(np.zeros(2)))
    ...         node = fanin.Node(double, edges=[(w, 0)])
    ...     fanin.backward([(node, 0, m.array(np.ones(2)))])
    ...     w.grad.numpy()
    array([2., 2.])
    """

def grad(
    roots: Iterable[Root],
    inputs: Iterable[Leaf | Node | tuple[Leaf | Node, int]],
    *,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    detect: bool | None = None,
    schedule: Schedule | None = None,
    progress: Callable[[int, int], object] | None = None,
    one: Callable[[Node | Leaf, int], object] | None = None,
    workers: int = 1,
) -> list[Any]:
    """The sums that reach `inputs`, as a list, None where nothing does; no leaf changes.

    inputs: leaves, nodes (slot 0) and (node, slot). Their slots' hooks have seen the sums. The rest is as for
    `backward`.

    >>> x = fanin.Leaf(np.array([1.0, 2.0]))
    >>> cube = fanin.Node(lambda g: g * 3 * x.array**2, edges=[(x, 0)])
    >>> fanin.grad([(cube, 0, np.ones(2))], [x])
    [array([ 3., 12.])]
    """

def walk(
    roots: Iterable[Root],
    inputs: Iterable[Leaf | tuple[Leaf, int]] | None = None,
    *,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    detect: bool | None = None,
    schedule: Schedule | None = None,
    progress: Callable[[int, int], object] | None = None,
    one: Callable[[Node | Leaf, int], object] | None = None,
) -> Walk:
    """A pass by hand: an iterator of (node, sums), in the order in which `backward` runs the nodes.

    `give(gradients)` takes what the node's function would have returned; then comes the next. Leaves accumulate by
    themselves. Hooks run, nodes are freed, errors are raised as by `backward`, with the same arguments. `close()`
    ends the pass.

    >>> w = fanin.Leaf(np.zeros(2), name="w")
    >>> double = fanin.Node(lambda g: 2 * g, edges=[(w, 0)], name="double")
    >>> for node, sums in (p := fanin.walk([(double, 0, np.ones(2))])):
    ...     p.give(node.fn(*sums))
    >>> w.grad
    array([2., 2.])
    """

# ---------------------------------------------------------------- streams, events, arrays of devices

@final
class Stream:
    """A queue of a device: what is queued runs in order, and late.

    Two are equal when they are the same queue. `handle` is the number of a stream that exists; 0 and 1 are the
    legacy default stream. `fanin.sim.Machine.stream` makes new ones.
    """
    def __new__(cls, device: str, handle: int) -> Stream: ...
    @property
    def device(self) -> str:
        """The name of its device, as in "sim:0"."""
    @property
    def handle(self) -> int:
        """Its number on the device; 1 is the legacy default stream."""
    def wait(self, other: StreamLike | Event, /) -> None:
        """Hold back what is queued here from now on until `other` has passed.

        `other` is an Event (its last record counts, now) or a Stream (all that it has queued). The host does not wait.
        """
    def record(self) -> Event:
        """An Event behind all that is queued here now."""
    def synchronize(self) -> None:
        """Block until everything queued here has run."""
    def __cuda_stream__(self) -> tuple[int, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __lt__(self, other: object, /) -> NoReturn: ...
    def __le__(self, other: object, /) -> NoReturn: ...
    def __gt__(self, other: object, /) -> NoReturn: ...
    def __ge__(self, other: object, /) -> NoReturn: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> NoReturn: ...

@final
class Event:
    """A point in a stream's queue, which other streams and the host can wait for.

    `stream.record()` makes one and records it in one step.
    """
    def __new__(cls, device: str) -> Event: ...
    @property
    def device(self) -> str:
        """The name of its device, as in "sim:0"."""
    @property
    def stream(self) -> Stream | None:
        """The stream it was last recorded on; None before."""
    def record(self, stream: Stream | None, /) -> None:
        """Make this the point in `stream` behind all that is queued there now.

        Later waits see the new point; waits that are queued keep the old one. None is the device's current stream.
        """
    def query(self) -> bool:
        """True when all work before the point has run, and for an event that was never recorded.

        On a simulated device one piece of work runs after each answer of False; under `fanin.sim.explore` both
        answers are tried.
        """
    def synchronize(self) -> None:
        """Block until all work before the point has run."""
    def __reduce__(self) -> NoReturn: ...

@final
class Graph: ...

# ---------------------------------------------------------------- graph trees

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Role = Literal["auto", "copy", "static", "accumulate"]

@final
class GraphStep:
    """One iteration of a graph tree, made by `GraphTree.step`."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class GraphFunction(Generic[_P, _R]):
    """A function of a graph tree, made by `GraphTree.function`: called with arrays, inside of a step."""
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def explain(self) -> str:
        """What the last call did and, where it was no replay, why, and what to do; with the rules
        (docs/graph-trees.md).
        """
    @property
    def last(self) -> Outcome | None:
        """What the last call did, and why: an Outcome; None before the first."""
    @property
    def name(self) -> str:
        """The function's name, as messages say it."""

@final
class GraphTree:
    """Functions of arrays on a device, recorded once and replayed, all in one range of memory.

        tree = fanin.GraphTree("cpu")          # or "cuda:0", "sim:0"
        step = tree.function(lambda x, w: np.tanh(x @ w), roles=("copy", "static"))
        for x in batches:
            with tree.step():
                y = step(x, w)
                print(step.last.did, y.numpy())   # warmed, recorded, replayed, replayed, ..

    `memory`: bytes of that range. `limit`: how often a function is recorded anew because an operand lies elsewhere;
    then the operand is copied. `strict`: a static operand that lies elsewhere is an error. `verify`: the first so
    many replays of each recording run the function as it is beside them, and a bit that differs is a CaptureError
    that names the array. On the CPU operands are ndarrays, and outputs handles whose values `numpy()` copies
    (docs/graph-trees.md).
    """
    def __init__(
        self, device: str, *, memory: int = 67108864, limit: int = 8, strict: bool = False, verify: int = 0
    ) -> None: ...
    def function(
        self,
        fn: Callable[_P, _R],
        *,
        roles: _Role | Sequence[_Role] = "auto",
        keep: bool | Sequence[bool] = False,
        key: Callable[_P, object] | None = None,
    ) -> GraphFunction[_P, _R]:
        """A function of arrays that is warmed up, recorded and from then on replayed, by the calls before it.

        `roles`: of each operand, or one for all: "copy" (copied in before each replay), "static" (stays where it
        is), "accumulate" (the caller's memory, added into), "auto" (an output of this step stays where it is, all
        else is copied). `keep`: which outputs are copied out of the tree's memory, and outlive the step. `key`: is
        called with the operands; recordings are kept apart by what it gives.
        """
    def step(self) -> GraphStep:
        """One iteration: `with tree.step():`. What the calls in it give may not be touched after its end."""
    def close(self) -> None:
        """Let go of all recordings and of the memory; calls fail from then on."""
    def plot(self, path: str | PathLike[str] | None = None, /) -> object:
        """A picture of the tree, as a matplotlib figure; written to `path` where one is given."""
    def _memory(self) -> list[tuple[int, int, int, bool]]: ...
    def _recordings(self) -> list[tuple[int, int, str, int, int, int, bool]]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    @property
    def stats(self) -> GraphStats:
        """Recordings, bytes and calls: a GraphStats."""
    @property
    def closed(self) -> bool:
        """Whether it was closed."""
    @property
    def device(self) -> str:
        """The name of its device, as in "sim:0"."""

_Index = SupportsIndex | slice | EllipsisType | None
_Axis = SupportsIndex | tuple[SupportsIndex, ...] | None

# Operators and methods of arrays on the CPU: of the functions of a graph tree. Outside they give ndarrays.
class _OfNumPy:
    def __setitem__(self, index: _Index | tuple[_Index, ...], value: object, /) -> None: ...
    def __add__(self, other: object, /) -> Array: ...
    def __radd__(self, other: object, /) -> Array: ...
    def __iadd__(self, other: object, /) -> Self: ...
    def __sub__(self, other: object, /) -> Array: ...
    def __rsub__(self, other: object, /) -> Array: ...
    def __isub__(self, other: object, /) -> Self: ...
    def __mul__(self, other: object, /) -> Array: ...
    def __rmul__(self, other: object, /) -> Array: ...
    def __imul__(self, other: object, /) -> Self: ...
    def __truediv__(self, other: object, /) -> Array: ...
    def __rtruediv__(self, other: object, /) -> Array: ...
    def __itruediv__(self, other: object, /) -> Self: ...
    def __floordiv__(self, other: object, /) -> Array: ...
    def __rfloordiv__(self, other: object, /) -> Array: ...
    def __ifloordiv__(self, other: object, /) -> Self: ...
    def __mod__(self, other: object, /) -> Array: ...
    def __rmod__(self, other: object, /) -> Array: ...
    def __imod__(self, other: object, /) -> Self: ...
    def __pow__(self, other: object, /) -> Array: ...
    def __rpow__(self, other: object, /) -> Array: ...
    def __matmul__(self, other: object, /) -> Array: ...
    def __rmatmul__(self, other: object, /) -> Array: ...
    def __and__(self, other: object, /) -> Array: ...
    def __rand__(self, other: object, /) -> Array: ...
    def __iand__(self, other: object, /) -> Self: ...
    def __or__(self, other: object, /) -> Array: ...
    def __ror__(self, other: object, /) -> Array: ...
    def __ior__(self, other: object, /) -> Self: ...
    def __xor__(self, other: object, /) -> Array: ...
    def __rxor__(self, other: object, /) -> Array: ...
    def __ixor__(self, other: object, /) -> Self: ...
    def __lshift__(self, other: object, /) -> Array: ...
    def __rlshift__(self, other: object, /) -> Array: ...
    def __ilshift__(self, other: object, /) -> Self: ...
    def __rshift__(self, other: object, /) -> Array: ...
    def __rrshift__(self, other: object, /) -> Array: ...
    def __irshift__(self, other: object, /) -> Self: ...
    def __divmod__(self, other: object, /) -> tuple[Array, Array]: ...
    def __rdivmod__(self, other: object, /) -> tuple[Array, Array]: ...
    def __invert__(self) -> Array: ...
    def __neg__(self) -> Array: ...
    def __pos__(self) -> Array: ...
    def __abs__(self) -> Array: ...
    def __lt__(self, other: object, /) -> Array: ...
    def __le__(self, other: object, /) -> Array: ...
    def __gt__(self, other: object, /) -> Array: ...
    def __ge__(self, other: object, /) -> Array: ...
    def __bool__(self) -> bool: ...
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...
    def __complex__(self) -> complex: ...
    def all(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def any(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def argmax(self, axis: SupportsIndex | None = None, *args: object, **how: object) -> Array: ...
    def argmin(self, axis: SupportsIndex | None = None, *args: object, **how: object) -> Array: ...
    def argsort(self, axis: SupportsIndex | None = -1, kind: str | None = None, **how: object) -> Array: ...
    def astype(
        self, dtype: DTypeLike, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
    ) -> Array: ...
    def clip(self, *args: object, **how: object) -> Array: ...
    def conj(self) -> Array: ...
    def conjugate(self) -> Array: ...
    def copy(self, order: str = "C") -> Array: ...
    def cumprod(self, axis: SupportsIndex | None = None, *args: object, **how: object) -> Array: ...
    def cumsum(self, axis: SupportsIndex | None = None, *args: object, **how: object) -> Array: ...
    def dot(self, other: object) -> Array: ...
    def fill(self, value: object) -> None: ...
    def flatten(self, order: str = "C") -> Array: ...
    def item(self, *at: SupportsIndex) -> object: ...
    def max(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def mean(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def min(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def prod(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def ravel(self, order: str = "C") -> Array: ...
    def repeat(self, repeats: object, axis: SupportsIndex | None = None) -> Array: ...
    def round(self, decimals: SupportsIndex = 0) -> Array: ...
    def sort(self, axis: SupportsIndex = -1, kind: str | None = None, order: object = None, **how: object) -> None: ...
    def squeeze(self, axis: _Axis = None) -> Array: ...
    def std(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def sum(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...
    def swapaxes(self, axis1: SupportsIndex, axis2: SupportsIndex) -> Array: ...
    def take(self, indices: object, axis: SupportsIndex | None = None, *args: object, **how: object) -> Array: ...
    def tolist(self) -> object: ...
    def trace(self, *args: object, **how: object) -> Array: ...
    def var(self, axis: _Axis = None, *args: object, **how: object) -> Array: ...

@final
class Array(_OfNumPy):
    """An array on a device, made by `Machine.array` and `Machine.empty`, or by a graph tree.

    Indexing by integers, slices, ... and None gives views; values are read by `numpy()` or by kernels. On the CPU,
    where it is memory of a `fanin.GraphTree`, NumPy's functions and operators take it as well, and it has ndarray's
    methods that can be recorded, as in `x.sum()` and `x.astype(..)`.
    """
    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, axis by axis."""
    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Its NumPy dtype."""
    @property
    def device(self) -> str:
        """The name of its device, as in "sim:0"."""
    @property
    def ndim(self) -> int:
        """The number of its axes."""
    @property
    def size(self) -> int:
        """The number of its elements."""
    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
    @property
    def T(self) -> Array:
        """A view with the axes reversed."""
    @property
    def address(self) -> int:
        """Where its first element lies: to see which arrays share memory."""
    @property
    def users(self) -> tuple[Stream, ...]:
        """The streams that its memory is marked as used on, its owner first."""
    def numpy(self) -> NDArray:
        """The values as a new ndarray, after waiting for the device's current stream, and for that alone."""
    def transpose(self, *axes: SupportsIndex | Iterable[SupportsIndex]) -> Array:
        """A view with the axes in another order; reversed without `axes`."""
    def reshape(self, *shape: SupportsIndex | Iterable[SupportsIndex]) -> Array:
        """A view of another shape; ValueError where that needs a copy."""
    def broadcast_to(self, *shape: SupportsIndex | Iterable[SupportsIndex]) -> Array:
        """A view that repeats itself, not to be written."""
    def record_stream(self, stream: Stream, /) -> None:
        """Keep the memory, once nobody holds it, until what `stream` has queued by its last such use has run."""
    def __getitem__(self, index: _Index | tuple[_Index, ...], /) -> Array: ...
    def __iter__(self) -> Iterator[Array]: ...
    def __len__(self) -> int: ...
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...
    def __array__(self, *args: object, **kwargs: object) -> NDArray: ...
    def __array_ufunc__(self, *args: object, **kwargs: object) -> object: ...
    def __array_function__(self, *args: object, **kwargs: object) -> object: ...
    def __reduce__(self) -> NoReturn: ...

def current_stream(device: str | None, /) -> Stream | None: ...
def stream_pushed(device: str, /) -> Stream | None: ...
def stream_push(stream: Stream, /) -> None: ...
def stream_pop(stream: Stream, /) -> None: ...
def sim_devices() -> int: ...
def build_info() -> dict[str, str]: ...
def cuda_active(index: int, /) -> bool: ...
def cuda_here() -> int: ...
def cuda_holding(address: int, /) -> int: ...
def cuda_use(path: str | None, /) -> None: ...

class _CudaInfo(TypedDict, total=False):
    why: str
    code: int
    path: str
    version: int
    devices: tuple[str, ...]
    kernels: dict[str, str]
    missing: dict[str, str]

def cuda_info() -> _CudaInfo: ...
def cuda_leave_out(*words: str) -> None: ...
def kernels_source() -> bytes: ...
def kernels_made() -> str: ...
def cpu_launch(
    fn: Callable[..., object], name: str, reads: tuple[object, ...], writes: tuple[object, ...], /
) -> None: ...
def cpu_empty(shape: tuple[int, ...], dtype: DTypeLike, /) -> Array: ...
def cpu_wants_handles() -> bool: ...
def device_array(device: str, array: NDArray, empty: bool, /) -> Array: ...

# ---------------------------------------------------------------- the simulated machine

class Machine:
    """The core of fanin.sim.Machine."""
    def __new__(
        cls,
        devices: int,
        seed: int = ...,
        schedule: int = ...,
        starve: int = ...,
        memory: int = ...,
        run_work: bool = ...,
        launch_us: float = ...,
        gbytes_per_s: float = ...,
    ) -> Self: ...
    @property
    def devices(self) -> int:
        """How many devices it has."""
    @property
    def seed(self) -> int:
        """The seed that picks what runs next."""
    @property
    def races(self) -> int:
        """How many races were found."""
    @property
    def host_us(self) -> float:
        """The clock of the host, in microseconds."""
    @property
    def device_us(self) -> float:
        """When the last work queued ends, in microseconds."""
    @property
    def abandoned(self) -> bool:
        """True after the host threads were told to end."""
    @property
    def host_schedule(self) -> str:
        """Which host thread acted, step by step: one character each."""
    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that were made and that somebody has still."""
    @property
    def _steps(self) -> int: ...
    def _stream(self, device: int, blocking: bool, /) -> Stream: ...
    def _event(self, device: int, /) -> Event: ...
    def _array(self, ndarray: NDArray, device: int, /) -> Array: ...
    def _empty(self, shape: int | Sequence[int], dtype: DTypeLike, device: int, /) -> Array: ...
    def _launch(
        self,
        stream: Stream,
        fn: Callable[..., object],
        reads: Sequence[Array],
        writes: Sequence[Array],
        name: str | None,
        us: float,
        /,
    ) -> None: ...
    def _synchronize(self) -> None: ...
    def _step(self) -> bool: ...
    def _pending(self) -> None: ...
    def _forget(self) -> None: ...
    def _check(self, on: bool, /) -> None: ...
    def _begin_capture(self, stream: Stream, mode: int, /) -> None: ...
    def _end_capture(self, stream: Stream, /) -> Graph: ...
    def _launch_graph(self, graph: Graph, stream: Stream, /) -> None: ...
    def _leave_out(self, *words: str) -> None: ...
    def _spawn(self) -> int: ...
    def _thread_begin(self, actor: int, /) -> bool: ...
    def _thread_end(self, actor: int, /) -> None: ...
    def _limit(self, steps: int, /) -> None: ...
    def _break(self, text: str, /) -> int: ...
    def _saw_thread(self, actor: int, /) -> None: ...
    def _after_thread(self, actor: int, /) -> None: ...
    def _join(self) -> None: ...
    def _stuck(self, actor: int, /) -> bool: ...
    def _enter(self) -> None: ...
    def _leave(self) -> None: ...
    def _follow(self, search: object, /) -> None: ...
    def _give_up(self) -> None: ...

class _SearchState(TypedDict):
    anew: int
    runs: int
    abandoned: int
    complete: bool
    strayed: bool
    schedule: str

def explore_new(reduce: bool, limit: int, /) -> object: ...
def explore_begin(search: object, /) -> bool: ...
def explore_end(search: object, /) -> None: ...
def explore_state(search: object, /) -> _SearchState: ...
def explore_replay(search: object, schedule: str, /) -> None: ...
def explore_sample(search: object, seed: int, /) -> None: ...

# ---------------------------------------------------------------- traces

_TraceLine = tuple[
    str,
    str,
    bool,
    int,
    int,
    int,
    int,
    int,
    tuple[str, ...],
    int,
    int,
    int,
    int,
    int,
    float,
    float,
    str,
    int,
    int,
    int,
    int,
    int,
    int,
]

@final
class Trace:
    def __new__(cls, capacity: int) -> Trace: ...
    @property
    def dropped(self) -> int:
        """How many lines were pushed out by newer ones."""
    def begin(self) -> None:
        """Record what this thread does from now on."""
    def end(self) -> None:
        """Record no more."""
    def lines(self) -> list[_TraceLine]:
        """The lines, oldest first, as tuples."""
    def __len__(self) -> int: ...

# ---------------------------------------------------------------- options, counters, tests

class _Options(TypedDict):
    debug: bool
    warn_stream_mismatch: bool
    budget: float | Literal["auto"]
    isa: str
    threads: int
    pool_bytes: float
    capture_redirect: bool
    detect: bool

class _Pool(TypedDict):
    pool_bytes: int
    pool_peak_bytes: int
    pool_hits: int
    pool_misses: int

def get_options() -> _Options: ...
def set_options(
    debug: bool | None,
    warn_stream_mismatch: bool | None,
    budget: float | Literal["auto"] | None,
    isa: str | None,
    threads: int | None,
    pool_bytes: float | None,
    capture_redirect: bool | None,
    detect: bool | None,
    /,
) -> _Options: ...
def counters() -> ProcessCounters: ...
def workers() -> int: ...
def pool() -> _Pool: ...
def trim() -> int:
    """Give back to the system what is kept of the memory of large results that are gone, on CUDA devices of all
    memory that is not in use; returns how many bytes that were.

    How much is kept at most is `set_options(pool_bytes=)`. On a device it waits for streams that were destroyed, so
    no stream that fanin does not know may be captured meanwhile.

    >>> total = fanin.add_n([np.ones(1 << 18), np.ones(1 << 18)])
    >>> del total
    >>> fanin.trim() >= 2 ** 21
    True
    >>> fanin.trim()
    0
    """

# ---------------------------------------------------------------- exchange

FROM_NDARRAY: Final[int]
FROM_SPARSE: Final[int]
FROM_FOREIGN: Final[int]

def table_known(table: object, origin: int, /) -> bool: ...
def read_by_table(type: type, origin: int, asks_value: bool, /) -> None: ...
def table_take(table: object, x: object, /) -> object: ...
def table_give(table: object, capsule: object, /) -> object: ...
def table_stream(table: object, device: int, /) -> int: ...
def hold_for(owner: object, streams: list[Stream], /) -> object: ...
def quick_tensors(
    type: type, table: object, is_neg: object, requires_grad: object, graph: object, origin: int, /
) -> bool: ...
def dtype_name(dtype: object, /) -> str | None: ...
def can_cast(from_dtype: object, to_dtype: object, /) -> bool: ...

@final
class _Exporter:
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[Literal[1], Literal[0]]: ...
    def numpy(self) -> NDArray:
        """An ndarray over the same memory."""

# ---------------------------------------------------------------- who shares memory

@final
class Verdict:
    """Whether two arrays share a byte of memory: "disjoint", "overlap", or "unknown" and why.

    True in a condition unless they are surely disjoint: `if fanin.overlap(a, b): copy`. `witness` proves an
    overlap: the indices of an element of each array that hold one common byte. Verdicts are immutable, hashable,
    and equal if they say the same.

    >>> x = np.zeros((3, 4))
    >>> v = fanin.overlap(x[1:], x[:, 2])
    >>> v.kind, v.witness
    ('overlap', ((1, 2), (2,)))
    """
    @property
    def kind(self) -> Literal["disjoint", "overlap", "unknown"]:
        """One of "disjoint", "overlap", "unknown"."""
    @property
    def witness(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Of an overlap: an index into each array, two tuples of ints from 0 on, whose elements have a byte in
        common; else None.
        """
    @property
    def reason(self) -> str | None:
        """Why the answer is "unknown", in words; else None."""
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Overlaps:
    """Which of several arrays share memory, as `fanin.overlaps` found it.

    It knows addresses, shapes and strides as they were, and holds no array. What nobody could tell counts as an
    overlap. Its length is the number of arrays; to go through it is to go through `pairs`.

    >>> x = np.zeros(10)
    >>> found = fanin.overlaps([x[:4], x[2:6], x[6:], x[5:7]])
    >>> found.pairs
    ((0, 1), (1, 3), (2, 3))
    >>> found.components, found.indices
    (((0, 1, 2, 3),), (0, 1, 2, 3))
    """
    def __iter__(self) -> Iterator[tuple[int, int]]: ...
    @property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The arrays that hang together: a tuple of tuples of indices, each of two or more, ascending.

        Two arrays are in one component if a chain of overlaps leads from one to the other. Arrays that share memory
        with no other are in none.
        """
    @property
    def exact(self) -> bool:
        """Whether each component is exact.

        False: the budget ended before each question was answered, and `components` and `indices` may join arrays
        that share no byte; none that do is missing. A larger `budget`, or `float('inf')`, answers the rest.
        """
    @property
    def indices(self) -> tuple[int, ...]:
        """The indices of all arrays that share memory with another one, ascending."""
    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All pairs (i, j), i < j, of arrays that are not surely disjoint, ascending.

        Made when it is first asked for: there may be n * (n - 1) / 2.
        """
    @property
    def unknown(self) -> tuple[tuple[int, int], ...]:
        """Those of the pairs of which nobody could tell whether they overlap."""
    def verdict(self, i: int, j: int, /) -> Verdict:
        """The Verdict on arrays i and j, with its witness."""
    def __len__(self) -> int: ...

def address(a: NDArray, /) -> int: ...
def overlap(a: object, b: object, /, *, budget: float | None = None) -> Verdict:
    """Whether arrays a and b share a byte of memory: exactly, for any shapes, strides and dtypes.

    Only addresses, shapes and strides are looked at: views of one array, of different dtypes, of a file that is
    mapped twice at different addresses (then they are disjoint). An array is an ndarray, a torch or JAX tensor, an
    array on a device of fanin's, or whatever has a buffer or DLPack. The answer is a Verdict, with a witness if
    they overlap. Of most pairs it is known in a fraction of a microsecond. A few strange ones need a table of at
    most `budget` bytes (default 256 MiB; math.inf: no bound); if that is not enough the verdict is "unknown", never
    a guess, and never an exponential search.

    Raises TypeError for what is no single array in memory (sparse, masked, a tracer), ValueError for arrays of
    different devices. Source: docs/analysis.md.

    >>> m = np.zeros((6, 9))
    >>> fanin.overlap(m[0:4, 0:4], m[2:6, 0:4])
    <fanin.Verdict: overlap, at (2, 0) and (0, 0)>
    >>> bool(fanin.overlap(m[:, 0], m[:, 1]))
    False
    """

def overlaps(arrays: Iterable[object], /, *, budget: float | None = None) -> Overlaps:
    """Which of several arrays share memory: the pairs, the components that they form, the indices of all that take
    part.

    `arrays` and `budget` (for each pair) are as in `overlap`. Near-linear in the number of arrays for pieces,
    columns, blocks, step slices and heads of common arrays; only `pairs` takes as long as there are pairs, and is
    made when it is asked for. Raises as `overlap` does, and names the array. Source: docs/analysis.md.

    >>> flat = np.zeros(100)
    >>> w, b = flat[:90].reshape(9, 10), flat[90:]
    >>> fanin.overlaps([w, b, flat[85:95], np.zeros(3)]).components
    ((0, 1, 2),)
    >>> fanin.overlaps([w[:, i] for i in range(10)]).pairs
    ()
    """

def overlaps_itself(a: object, /, *, budget: float | None = None) -> Verdict:
    """Whether two different elements of array a share a byte of memory, so that writing one changes the other.

    Exact as `overlap` is; the witness is the two indices. Raises as `overlap` does. Source: docs/analysis.md.

    >>> fanin.overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3)))
    <fanin.Verdict: overlap, at (1, 0) and (0, 0)>
    >>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)
    >>> fanin.overlaps_itself(windows).kind
    'overlap'
    """

@final
class Recording:
    def __new__(cls) -> Recording: ...
    @property
    def kernels(self) -> int:
        """How many kernels it is made of."""
    @property
    def bytes(self) -> int:
        """Bytes of its memory."""
    @property
    def live(self) -> int:
        """How many arrays lie in its memory that somebody holds."""
    def begin(self) -> None:
        """This thread records; until `end`, only kernels may write into operands."""
    def end(self) -> None:
        """It does no more. CaptureError where something could not be recorded."""
    def empty(self, like: NDArray, /) -> NDArray:
        """Memory of the recording, of the dtype, shape and strides of another array."""
    def operand(self, array: NDArray, /) -> None:
        """Kernels may read and write this array, which is held."""
    def knows(self, array: NDArray, /) -> bool:
        """Whether a kernel may touch it."""
    def view(self, array: NDArray, /) -> NDArray:
        """The array once more, without a hold that keeps its memory from others."""
    def writes(self, array: NDArray, /) -> str | None:
        """The name of the first kernel that writes into an array; None: none does."""
    def launch(
        self, fn: Callable[..., object], name: str, reads: tuple[object, ...], writes: tuple[object, ...], /
    ) -> None:
        """Does fn(*reads, *writes), now and in each replay."""
    def bind(
        self, copied: tuple[NDArray, ...], static: tuple[NDArray, ...], grads: tuple[NDArray | None, ...], /
    ) -> None:
        """The arrays of its call, as tuples of views; None among grads: there was none."""
    def fits(self, copied: tuple[NDArray, ...], static: tuple[NDArray, ...], grads: tuple[object, ...], /) -> bool:
        """Whether the arrays of a call have the dtypes, shapes and strides of those that were bound, and lie there
        where they are not copied.
        """
    def overlaps(self, copied: tuple[NDArray, ...], grads: tuple[object, ...], /) -> tuple[int, str | int] | None:
        """None, or (index, name of a kernel that writes into that argument's memory, or index of a gradient that
        shares it).
        """
    def replay(
        self, copied: tuple[NDArray, ...] = (), grads: tuple[object, ...] = (), /
    ) -> tuple[int, str | int] | None:
        """All that was recorded once more, in the same order, on arrays that fit, which are copied in. What
        `overlaps` returns, if they are not: then nothing is done. With debug=True its memory is filled with bytes
        before that make NaNs of floats.
        """

@final
class Layout:
    def __new__(cls, arrays: Iterable[object], /, *, budget: float | None = None) -> Layout: ...
    @property
    def components(self) -> tuple[int, ...]:
        """For each array the number of its component, by first members; an array that shares with nobody has one of
        its own.
        """
    @property
    def offsets(self) -> tuple[int, ...]:
        """For each array the bytes from the first byte of its component to its element [0, 0, ..]."""
    def check(
        self, arrays: Iterable[object], /
    ) -> (
        tuple[
            int,
            Literal["dtype", "device", "shape", "strides", "read-only", "writable", "apart", "offset", "overlap"],
            int | None,
        ]
        | None
    ):
        """None if as many arrays lie as those that were recorded; else what differs first: (index, what, other
        index or None).

        what is "dtype", "device", "shape", "strides", "read-only", "writable", "apart" (shares no memory any more
        with what `other` hangs together with), "offset" (lies elsewhere, seen from `other`) or "overlap" (shares
        memory with `other`, and did not). ValueError for another number of arrays.
        """
    def __len__(self) -> int: ...

def restride(a: object, strides: tuple[int, ...], /) -> None: ...

class Snapshot:
    def __new__(cls, arrays: Iterable[object], /) -> Snapshot: ...
    @property
    def nbytes(self) -> int:
        """How many bytes are kept: those that the arrays show, of each about once."""
    def changed(self, which: Sequence[int] | None, /) -> list[int]:
        """The positions, among `which` (None: all), of arrays of which a byte is another one now; the memory that
        was read must still be there.
        """
    def elsewhere(self) -> list[int]:
        """The positions of arrays that begin elsewhere now, or have another shape, strides or dtype."""
    def restore(self, i: int, data: int | None = None, /) -> None:
        """Write the bytes of array i that differ, where they were; or as an array of the same geometry whose first
        element lies at `data`.
        """
    def data(self, i: int, /) -> int:
        """Where the first element of array i was."""
    def __len__(self) -> int: ...

# ---------------------------------------------------------------- errors

class RaceError(RuntimeError):
    """Two operations touch the same memory, one writes, and nothing orders them. The message names both, their
    streams, their Python lines, and the wait that is missing.
    """

class CaptureError(RuntimeError):
    """What was asked for is not legal while a stream is captured."""

class DeviceError(RuntimeError):
    """A call of a device's driver failed. `code` is the driver's number for it."""

    code: int

class DeviceOutOfMemoryError(DeviceError, MemoryError):
    """A device has no memory left for what was asked."""

class DTypeError(ValueError, TypeError, BufferError):
    """A dtype that is not summed, given or named: float128, foreign byte order, strings, datetimes, records, the
    other types of ml_dtypes. It is each of the classes by which NumPy, DLPack and array libraries call this.
    """

class StreamMismatchWarning(RuntimeWarning):
    """A leaf consumes on another stream than its gradient was made on: each pass waits there (rule S6). Given once
    per process.
    """
