"""The C core (csrc/py). Public names are documented where the package shows them; the rest is for our own modules."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
    final,
    overload,
)

import numpy as np
from typing_extensions import TypeVar, disjoint_base

from ._engine import Edges, HookHandle
from ._interop.protocols import DTypeLike, NDArray, StreamLike
from .graph.pipelines import Pipeline
from .graph.trees import FunctionStats, GraphStats, Outcome, Recording
from .options import Counters, ProcessCounters
from .slots import Slot, Stats

# ---------------------------------------------------------------- the buffer

@final
class Target:
    """The result of InputBuffer.target: a context that lends an array to add into."""
    def __enter__(self) -> Any: ...  # step
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> Literal[False]: ...  # step
    def _lend(self, origin: int, undeclared: object, /) -> Any:  # step
        """Begin as `__enter__`, and return an array of the library with this number (`_interop.classes`). A slot that
        declares its shape alone needs `undeclared`, the dtype of its sum.
        """
    def _cancel(self) -> None:  # step
        """End without a contribution, where nothing was written."""

@final
class InputBuffer:
    """Sums gradients slot by slot: add them from any thread and on any stream, then take the sums.

    Parameters
    ----------
    slots : int, or sequence of arrays and fanin.Slot
        A number of slots; or for each slot an example array, whose shape, dtype and device it declares, or a Slot.
    budget : int, math.inf or "auto"
        Bytes of contributions that may wait to be summed; 0 sums at each add. "auto" limits memory that the buffer
        alone keeps alive to a part of the second-level cache, and memory with other references to 64 MiB. The bits of
        the sums do not depend on it. Default: `set_options(budget=)`, which is "auto" at first.
    accumulate : dtype or "exact", optional
        The dtype in which sums run. Default: float32 for float16, bfloat16 and float8, else the dtype itself. "exact"
        sums floats as real numbers and rounds once, so the order does not matter; a gradient that is summed to the
        slot's shape is summed in the usual way before that.
    stats : bool
        Compute the norm, largest element and number of non-finite elements of each sum, for `stats()`.
    stream : stream, optional
        The consumer's stream.
    leaf : bool
        The consumer accumulates into `.grad`.
    create_graph : bool
        Sums use the arrays' own `+`, so that they can be differentiated.
    name : str, optional
        The buffer's name in messages, traces and pictures.

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
    ) -> InputBuffer: ...  # step, fast
    @property
    def name(self) -> str:
        """Its name in messages, traces and pictures."""
    @property
    def budget(self) -> float | Literal["auto"]:
        """Bytes of contributions that may wait to be summed: "auto", a number, or math.inf."""
    @property
    def counters(self) -> Counters:  # step
        """The work it has done so far: a fanin.Counters."""
    def add(
        self,
        slot: int,
        gradient: object,
        *,
        key: int | None = None,
        stream: StreamLike | None = None,
        donate: bool = False,
        copy: bool = False,
        weight: complex | None = None,
    ) -> None:  # step, fast
        """Add one gradient to a slot.

        Do not write into the gradient until the sum is taken: the buffer may keep a reference to it. If an error is
        raised, the buffer is unchanged.

        Parameters
        ----------
        slot : int
            The index of the slot.
        gradient : array, number or None
            An ndarray, torch.Tensor, jax.Array, SciPy sparse array, fanin.Sparse, an array of a simulated device, a
            number, fanin.Zero, or an object with its own `+`. None is undefined: it counts as a contribution and adds
            nothing.
        key : int, optional
            A non-negative number of the edge: the sum is the left fold in the order of keys, whatever the order of
            arrival.
        stream : stream, optional
            The stream on which the gradient was made.
        donate : bool
            Allow the buffer to write the sum into the gradient's memory. Nothing else may use that memory until take().
        copy : bool
            Copy the gradient, so that you may write into it at once. Excludes `donate`.
        weight : number, optional
            What the gradient is multiplied by, in the accumulation dtype, when it is summed; `take(mean=True)` divides
            by the sum of the weights. None: 1.

        Raises
        ------
        IndexError
            For a slot that does not exist.
        TypeError
            If the gradient is no array, `stream` no stream, or `weight` no number.
        ValueError
            For a shape, dtype, key, weight or number of contributions that does not fit.
        OverflowError
            For a Python int that does not fit int64.
        BufferError
            For an array that cannot be imported.
        RuntimeError
            If the slot is poisoned.

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
        weights: Sequence[complex | None] | None = None,
    ) -> None:  # step
        """Add gradients[i] to slots[i] for each i, in one call: all of them or, with an error, none.

        Raises the errors of `add`, and ValueError if the lengths differ.

        Parameters
        ----------
        slots : sequence of int
            A slot may occur more than once.
        gradients : sequence
            As many gradients, each as for `add`.
        keys : sequence of int or None, optional
            As many keys, each as for `add`.
        stream : stream, optional
            The stream on which all of them were made.
        donate : bool
            As for `add`, for all of them.
        copy : bool
            As for `add`, for all of them.
        weights : sequence of number or None, optional
            As many weights, each as for `add`.

        >>> buf = fanin.InputBuffer(2)
        >>> buf.add_many([0, 1, 0], [np.ones(2), np.ones(3), np.ones(2)])
        >>> buf.take()
        [array([2., 2.]), array([1., 1., 1.])]
        """
    def target(
        self, slot: int, *, key: int | None = None, stream: StreamLike | None = None, weight: complex | None = None
    ) -> Target:
        """Return a context that lends an array, in the accumulation dtype, into which a producer adds by itself.

        The array is the slot's running sum if the buffer made that or got it by `donate=`, `key` comes next, the
        producer's stream is the one that sums, and no `weight` is given; other calls for the slot then wait for the
        end of the block. Otherwise it holds zeros, and becomes a contribution at the end. If the body raises, the zeros
        are dropped; a slot whose running sum was lent is poisoned, and all its calls but clear() raise RuntimeError. Do
        not write into the array after the block.

        Parameters
        ----------
        slot : int
            The index of a slot that declares its shape and dtype.
        key : int, optional
            As for `add`.
        stream : stream, optional
            The producer's stream.
        weight : number, optional
            As for `add`: multiplies what was added, at the end.

        Raises
        ------
        IndexError
            For a slot that does not exist.
        TypeError
            If `stream` is no stream.
        ValueError
            For an undeclared slot, or a key, weight or number of contributions that does not fit.

        >>> buf = fanin.InputBuffer([np.empty(3, np.float16)])
        >>> with buf.target(0) as out:
        ...     out += np.float32([1, 2, 3])
        >>> buf.take()
        [array([1., 2., 3.], dtype=float16)]
        """
    def expect(self, slot: int, n: int) -> None:  # step
        """Set the number of contributions that each pass adds to a slot; take() does not reset it.

        One contribution too many is a ValueError at add, a missing one at take.

        Parameters
        ----------
        slot : int
            The index of the slot.
        n : int
            The number of contributions.

        >>> buf = fanin.InputBuffer(1)
        >>> buf.expect(0, 2)
        >>> buf.add(0, 1.0)
        >>> buf.ready(0)
        False
        """
    def ready(self, slot: int, /) -> bool:  # step
        """Return whether all contributions that `expect` announced were added; ValueError without expect."""
    @overload
    def take(
        self,
        stream: StreamLike | None = None,
        *,
        slot: None = None,
        out: Sequence[object] | None = None,
        scale: complex | None = None,
        writable: bool = False,
        mean: bool = False,
        weights: Mapping[int, complex] | Sequence[complex] | None = None,
    ) -> list[Any]:  # step, fast
        """Return all sums as a list with an entry for each slot, None where it is undefined; the buffer is then empty.

        A single contribution comes back as the object that was added; of a torch tensor that requires a gradient, as
        its detach(). If an error is raised, no sum is lost.

        Parameters
        ----------
        stream : stream, optional
            The stream on which the sums are ready. Default: the buffer's stream, else the stream that was current at
            the slot's first gradient (rule S5).
        slot : int, optional
            Take only this slot, and return its sum instead of a list; the others keep their contributions.
        out : list of arrays or None, optional
            Arrays to write the sums into; with `slot` one array.
        scale : number, optional
            Multiplies the sums in the same pass over memory, before the one rounding.
        writable : bool
            Copy each sum whose memory has other references.
        mean : bool
            Divide each sum by the sum of the weights of all contributions of its slot, undefined ones too; a
            contribution without a weight counts 1.
        weights : dict from key to number, or list, optional
            Weights of contributions that came without; of a slot without keys, in the order of arrival. All
            contributions must still wait: make the buffer with `budget=math.inf`.

        Raises
        ------
        ValueError
            For `out`, `scale` or `weights`, for a mean of integers, or if a contribution is missing.
        ZeroDivisionError
            For a mean whose weights sum to 0.
        BufferError
            If `out` cannot be written.
        OverflowError
            For a sum of Python ints that does not fit.
        RuntimeError
            If a slot is poisoned, or within a target of a slot.

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
        mean: bool = False,
        weights: Mapping[int, complex] | Sequence[complex] | None = None,
    ) -> Any: ...  # step, fast
    def stats(self, slot: int, /) -> Stats | None:  # step
        """Return the fanin.Stats of the sum that was last taken of a slot; None if that is undefined, or an object.

        They are computed in the pass over memory that makes the sum, and forgotten at the slot's next add. On a
        device with streams the first call blocks until the stream that summed has done so.

        Raises
        ------
        ValueError
            If the buffer was made without stats=True, or no sum was taken.
        CaptureError
            While that stream is captured, and for a sum that was made during a capture.

        >>> buf = fanin.InputBuffer(1, stats=True)
        >>> buf.add(0, np.array([3.0, np.inf]), key=0)
        >>> buf.add(0, np.array([1.0, 1.0]), key=1)
        >>> _ = buf.take()
        >>> buf.stats(0)
        Stats(count=2, sumsq=16.0, absmax=4.0, nonfinite=1, first_bad_key=0, norm=4.0)
        """
    def clear(self) -> None:  # step
        """Drop all contributions and sums, also of poisoned slots: for passes that failed."""
    def explain(self, slot: int, /) -> str:  # step
        """Explain past and next decisions for a slot, in sentences with the numbers of the rules.

        >>> buf = fanin.InputBuffer(1, name="w1")
        >>> print(buf.explain(0))
        w1: slot 0: nothing has come yet.
        """
    def __getitem__(self, slot: int, /) -> Any: ...  # step
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn: ...
    def __repr__(self) -> str: ...  # step

# collector.c
def _collectors(
    buffer: InputBuffer,
    small: list[bool],
    came: bytearray,
    otherwise: Callable[..., object],
    now: list[Any],
    task: Callable[[], int],
    weigh: Callable[[int, Any], int | float | None],
    /,
) -> list[Callable[[object], object]]:
    """The hooks of fanin.torch.accumulate, one for each slot.

    Each adds a copy of its parameter's gradient if that is `small`, dense and detached, and sets its byte in `came`; it
    calls `otherwise` with all others. The parameter gets nothing. `now` is empty, or has the pass, `task()`, that
    brought the last gradient, and its weight; of another pass it is `weigh(pass, gradient)`, which sets `now`.
    """

def _take_over(buffer: InputBuffer, slot: int | None, out: Any, divisor: tuple[float, ...], /) -> Any:
    """The sums of all slots, or of one, over the exact sum of some numbers: `take(mean=True)`, whose divisor the caller
    counts.
    """

# producers.c
def _fan_ins(
    roots: list[tuple[Any, int]], least: int, few: int, /
) -> tuple[set[Any] | None, dict[tuple[Any, int], list[tuple[Any, int]]]]:
    """The nodes of a graph of torch's, if there are more than `few`, and of each place (a node, and the index of one of
    its gradients) at which `least` gradients or more meet: the nodes and edges that they come from. A pass begins with
    gradients at the places `roots`, whose number among these is an edge of None.
    """

def _in_order(slots: list[list[tuple[Any, int]]], roots: list[Any], /) -> tuple[list[Any], bytes]:
    """The nodes that make the gradients of some slots, and four numbers (C's int) for each gradient: of the node among
    these, its edge, the slot, the key. The keys of a slot are in the order in which torch's engine makes its gradients
    on one thread. `roots` has the nodes in the place of None.
    """

def _remove_hooks(handles: list[Any], /) -> None:
    """Remove hooks of nodes, and empty the list of their handles."""

def _producers(
    buffer: InputBuffer,
    task: list[int],
    current: Callable[[], int],
    coming: list[int],
    kept: list[int],
    places: dict[int, Any],
    empty_like: Callable[[Any], Any],
    add: Callable[..., object],
    take: Callable[..., object],
    acquire: Callable[[], object],
    release: Callable[[], object],
    arrive: Callable[[int, int, Any], Any],
    each: list[tuple[tuple[int, int, int, object], ...]],
    /,
) -> list[Callable[[Any, Any], Any]]:
    """The hooks of fanin.torch.backward, one for each node whose edges `each` has: the index of an edge, the slot and
    key of its gradient, the dtype.

    In the pass `task`, as `current` returns it, a hook adds each plain gradient to the buffer, and calls `arrive` with
    all others, and with those of an edge whose dtype is None. `coming` and `kept` count them by slot. In `places` it
    keeps memory of `empty_like`, which replaces the first gradient of a slot, and to which `take(slot=, out=)` writes
    the sum when the last one has come.
    """

_T = TypeVar("_T")

# add_n.c
def add_n_over(
    arrays: Iterable[Any],
    out: Any,
    accumulate: DTypeLike | None,
    scale: complex | None,
    weights: Iterable[complex | None] | None,
    divisor: tuple[float, ...],
    /,
) -> Any:
    """The mean of weighted arrays over the exact sum of some numbers: `add_n(mean=True)`, whose divisor the caller
    counts.
    """

def add_n(
    arrays: Iterable[_T],
    *,
    out: object = None,
    keys: Iterable[int] | None = None,
    accumulate: DTypeLike | None = None,
    scale: complex | None = None,
    stats: bool = False,
    weights: Iterable[complex | None] | None = None,
    mean: bool = False,
) -> _T:  # step, fast
    """Sum arrays of one shape in one pass over memory, with one rounding.

    Parameters
    ----------
    arrays : sequence
        At least one array or number; None adds nothing. The sum is the left fold in their order, or in that of `keys`.
    out : array, optional
        Where to write the sum. Default: fresh memory.
    keys : sequence of int, optional
        One for each array.
    accumulate : dtype or "exact", optional
        The dtype in which the sum runs. Default: float32 for float16, bfloat16 and float8, else the promotion of all.
    scale : number, optional
        Multiplies the sum before the rounding.
    stats : bool
        Return a pair: the sum, and its fanin.Stats (None for an object).
    weights : sequence of number or None, optional
        One for each array, which it is multiplied by; None is 1.
    mean : bool
        Divide the sum by the sum of the weights.

    Raises
    ------
    TypeError
        If an item is no array.
    ValueError
        For shapes, dtypes, keys or weights that do not fit, or an empty sequence.
    ZeroDivisionError
        For a mean whose weights sum to 0.
    BufferError
        If `out` cannot be written.
    OverflowError
        For a sum of Python ints that does not fit int64.

    >>> fanin.add_n([np.float16([1, 2]), np.float16([3, 4]), np.float16([5, 6])])
    array([ 9., 12.], dtype=float16)
    """

# add_rows.c
def add_rows(ids: NDArray, rows: object, n: int, accumulate: DTypeLike | None, /) -> Any:
    """fanin.add_rows, of int64 ids without gaps, one for each row."""

# ---------------------------------------------------------------- the engine

@disjoint_base
class Node:
    """An operation of a graph, which a pass runs backward.

    Parameters
    ----------
    fn : callable
        `fn(*sums)` gets the sums of the gradients of its slots, None where one is undefined, and returns one
        gradient (or None) per edge, as a tuple or list; a single one if there is one edge. It must not write into
        its sums (`g = g * 10`, not `g *= 10`): they may have other references, and then an ndarray is read-only
        while it runs.
    inputs : int
        The number of its slots.
    edges : sequence of (node, slot) or None
        Where its gradients go: a Node or Leaf and one of its slots. None: the gradient is not needed.
    slots : sequence, optional
        For each input an example array, a fanin.Slot or None: incoming gradients are checked against it.
    release : callable, optional
        Called when the graph is freed there.
    name : str, optional
        Its name in messages.
    stream : stream, optional
        The stream on which its sums are ready, it runs, and its gradients are then ready.
    device : str, optional
        Use that device's current stream, or "cpu". Without `stream` and `device`: the current stream of the
        device that `slots` declare, else the stream that was made current last.
    group : str or object, optional
        Of the nodes with one group, one runs at a time in a pass of several workers. Objects are compared by
        identity.
    boxed : bool
        Call `fn(sums)` with a list of the sums in place of `fn(*sums)`: nothing of fanin's holds them any more, so a
        sum that `fn` pops from the list is freed as soon as `fn` drops it. Of a sum that other code holds, too, only
        that reference goes. Such a node has no post-hooks, and no function in C.

    Raises
    ------
    TypeError
        For fn, an edge that is no pair, a group that is a number, or boxed=True with a function in C.
    IndexError
        For a slot that does not exist.
    ValueError
        For inputs, slots, or a stream of another device.

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
        edges: Iterable[Edge] | None = (),
        *,
        slots: Iterable[object] | None = None,
        release: Callable[[], object] | None = None,
        name: object = None,
        stream: StreamLike | None = None,
        device: str | None = None,
        group: object = None,
        boxed: bool = False,
    ) -> None: ...  # step
    @property
    def fn(self) -> Callable[..., Any] | None:  # step
        """Its function; None after the graph was freed there."""
    @property
    def inputs(self) -> int:
        """The number of its slots."""
    @property
    def edges(self) -> Edges:  # step
        """Where its gradients go: a sequence of (node, slot) and None, with append()."""
    @property
    def grad(self) -> Any:  # step
        """The sums that retain_grad() keeps: of one slot its sum, of several a tuple; None if there is none. Set it
        to None to forget them.
        """
    @grad.setter
    def grad(self, value: None) -> None: ...  # step
    @property
    def name(self) -> str | None:
        """Its name in messages; None without one."""
    @property
    def group(self) -> object:
        """Of the nodes with one group, one runs at a time in a pass; None without one."""
    @property
    def boxed(self) -> bool:
        """Whether its function gets a list of its sums."""
    @property
    def sequence_nr(self) -> int:
        """Its number among all nodes and leaves, in the order of creation."""
    @property
    def stream(self) -> Stream | None:
        """Its stream, on which its sums and its gradients are ready; None if it has none."""
    @property
    def device(self) -> str:
        """The name of the device where it runs; "cpu" if it has no stream."""
    @property
    def freed(self) -> bool:  # step
        """Whether a pass without keep_graph has run it."""
    def needs(self, edge: int, /) -> bool:  # step
        """Whether the gradient of an edge is needed.

        It is not if the edge is None, nor, while the node runs, if inputs= leaves it out. Of several passes the
        innermost on this thread counts, else the latest walk that waits for the node.
        """
    def register_hook(self, hook: Hook, slot: int = 0) -> HookHandle:  # step
        """Call `hook(sum)` with the sum of a slot, if it is defined, once in each pass; a result that is not None
        replaces the sum.

        The result must have the same shape, dtype and device. Returns a handle with `remove()`.
        """
    def register_prehook(self, hook: Callable[[Sums], object], /) -> HookHandle:  # step
        """Call `hook(sums)` with the tuple of all sums before the node runs; a result that is not None replaces them.

        Returns a handle with `remove()`.
        """
    def register_posthook(self, hook: Callable[[Sums, Sums], object], /) -> HookHandle:  # step
        """Call `hook(sums, gradients)` with both tuples after the node has run; a result that is not None replaces the
        gradients.

        Returns a handle with `remove()`.
        """
    def retain_grad(self, slot: int = 0) -> None:  # step
        """Keep the sum of a slot in `grad`, after the slot's hooks; later passes add to it.

        Raises IndexError for a slot that does not exist.
        """
    def _edges(self) -> list[Edge]:  # step
        """Where its gradients go, as a list."""
    def _append_edge(self, edge: Edge, /) -> None:  # step
        """Edges.append."""
    def _remove_hook(self, hook: object, /) -> None:  # step
        """HookHandle.remove."""
    def _free(self) -> None:  # step
        """Drop its function and call its release: fanin.free does this for a graph."""
    def _sum_into(self, arrays: tuple[object, ...], /) -> None:
        """Write the sums of its slots into these arrays: fanin.tape's output buffers."""
    def __repr__(self) -> str: ...  # step

_A = TypeVar("_A", default=Any)  # of a leaf: its array

@final
class Leaf(Generic[_A]):
    """Where gradients end: each pass adds its sum to `.grad`, in place once that exists.

    Parameters
    ----------
    array : array, optional
        Gradients have its shape, dtype and device. Those of a torch tensor that requires one are in the tensor's
        own `.grad`.
    like : (shape, dtype, device), optional
        Instead of `array`, for memory that has another owner; needs a function as `accumulate`.
    accumulate : dtype or callable, optional
        A dtype in which passes are summed, rounded when `.grad` is read. Then `.grad` is the leaf's own: of a
        tensor that requires a gradient give x.detach(); to change it, set it. Or a function that is called with
        each pass's sum.
    grad_dtype : dtype, optional
        Another dtype of the gradients.
    name : str, optional
        Its name in messages.
    stream : stream, optional
        Where it accumulates. Default: the current stream of the array's device.

    Raises
    ------
    TypeError
        Without an array.
    ValueError
        For a dtype, one of integers or bool too, or a stream of another device.

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
    def __new__(
        cls,
        array: _A,
        *,
        like: None = None,
        accumulate: DTypeLike | Callable[[Any], object] | None = None,
        grad_dtype: None = None,
        name: object = None,
        stream: StreamLike | None = None,
    ) -> Leaf[_A]: ...  # step
    @overload
    def __new__(
        cls,
        array: object,
        *,
        like: None = None,
        accumulate: DTypeLike | Callable[[Any], object] | None = None,
        grad_dtype: DTypeLike,
        name: object = None,
        stream: StreamLike | None = None,
    ) -> Leaf[Any]: ...  # step
    @overload
    def __new__(
        cls,
        array: None = None,
        *,
        like: tuple[Sequence[int] | None, DTypeLike | None, str | None] | Slot,
        accumulate: Callable[[Any], object],
        grad_dtype: DTypeLike | None = None,
        name: object = None,
        stream: StreamLike | None = None,
    ) -> Leaf[Any]: ...  # step
    @property
    def grad(self) -> _A | Any:  # step
        """The sum of the gradients of all passes since it was None; may be set. An array like the leaf's own; sparse
        after sparse gradients alone, and None before the first pass.
        """
    @grad.setter
    def grad(self, value: object) -> None: ...  # step
    @grad.deleter
    def grad(self) -> None: ...
    @property
    def array(self) -> _A:
        """The array that it was made of; None with like=."""
    @property
    def stream(self) -> Stream | None:
        """The stream on which it accumulates; None on the CPU."""
    @property
    def name(self) -> str | None:
        """Its name in messages; None without one."""
    @property
    def sequence_nr(self) -> int:
        """Its number among all nodes and leaves, in the order of creation."""
    def register_hook(self, hook: Hook, slot: int = 0) -> HookHandle:  # step
        """Call `hook(sum)` with the pass's sum, if it is defined, before it is accumulated; a result that is not None
        replaces the sum.

        The result must have the same shape, dtype and device. Returns a handle with `remove()`.
        """
    def register_post_accumulate_grad_hook(self, hook: Callable[[Leaf], object], /) -> HookHandle:  # step
        """Call `hook(leaf)` after the pass's sum was added to `.grad`.

        Returns a handle with `remove()`.
        """
    def _remove_hook(self, hook: object, /) -> None:  # step
        """HookHandle.remove."""

@final
class Walk:
    """The iterator of `walk`: yields (node, sums), and takes gradients by `give`."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> tuple[Node, Sums]: ...  # step
    def give(self, gradients: object, /) -> None:  # step
        """Give the gradients of the last node, as its function would have returned them.

        Raises what `backward` raises for them; then the pass has ended.
        """
    def close(self) -> None:  # step
        """End the pass. Calling it again does nothing."""
    def explain(self, node: Node | Leaf | None = None) -> str:  # step
        """Which edges have delivered gradients and which have not, for a node, or for each node that has not run.

        Of a pass that has ended early: the same at its end. Empty if all nodes have run.

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

# pass.c
def backward(
    roots: Iterable[Root],
    inputs: Iterable[Leaf | tuple[Leaf, int]] | dict[Any, Leaf] | None = None,
    *,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    detect: bool | None = None,
    schedule: Schedule | None = None,
    progress: Callable[[int, int], object] | None = None,
    one: Callable[[Node | Leaf, int], object] | None = None,
    budget: float | Literal["auto"] | None = None,
    workers: int = 1,
    reducer: object = None,
    weight: complex | None = None,
) -> None:  # step
    """Run a pass backward over the graph of some nodes, and add the gradients of leaves to their `.grad`.

    A node runs when all its gradients have come; of several ready nodes, the newest runs first.

    Parameters
    ----------
    roots : sequence of (node, slot, gradient)
        Where the pass begins. Without a gradient, or with None, it is one if the slot declares a shape of one
        element, or what `one` returns. A node alone means its slot 0.
    inputs : sequence of leaves, or dict of them, optional
        Only these leaves (of a dict: its values) accumulate, and only nodes that lead to one of them run.
    keep_graph : bool, optional
        Nodes keep their functions, for another pass. Default: the value of `create_graph`.
    create_graph : bool
        The pass records itself: sums use the arrays' own `+` and each `.grad` becomes a new object (rules A1,
        L6), so functions whose operations make nodes return gradients that can be differentiated again.
    detect : bool, optional
        The first gradient with an inf or NaN ends the pass (FloatingPointError), with the node that made it.
        Default: `set_options(detect=)`.
    schedule : callable, optional
        `schedule(ready)` returns one of the ready nodes, which runs next. Every choice gives the same bits.
    progress : callable, optional
        `progress(ran, known)` is called with how many of all nodes and leaves have run: 0 first, then more each
        time. An exception in it ends the pass.
    one : callable, optional
        `one(node, slot)` returns the gradient of a root that has none.
    budget : int, float or "auto", optional
        Bytes that may wait in each buffer of this pass (see `InputBuffer`). Default: `set_options(budget=)`, as it is
        when the pass begins.
    workers : int
        Threads that run nodes, the caller's included, with the same bits for every number. It pays where
        functions release the interpreter's lock, as NumPy's do. `schedule` and `create_graph` need one worker.
    reducer : fanin.dist.Reducer, optional
        The gradients of its leaves are summed over ranks; their sums travel while the pass runs, and are added to
        `.grad` at its end. Excludes `create_graph`.
    weight : number, optional
        What each leaf's sum of this pass is multiplied by, in the accumulation dtype, before it is added to `.grad`;
        hooks of the leaf's gradient receive the sum without it. With `reducer=` it is the weight of the pass's
        contribution. None: 1.

    Raises
    ------
    TypeError, ValueError
        For roots, inputs or gradients that do not fit.
    IndexError
        For a slot that does not exist.
    RuntimeError
        If the graph was freed, or passes are nested 1,000 deep.

    Exceptions of nodes and hooks end the pass too, with a note that names the node; then each leaf has its whole
    gradient, or none of it.

    >>> w = fanin.Leaf(np.array([1.0, 2.0]), name="w")
    >>> square = fanin.Node(lambda g: g * 2 * w.array, edges=[(w, 0)], name="square")
    >>> total = fanin.Node(lambda g: g * np.ones(2), edges=[(square, 0)], slots=[fanin.Slot(())], name="total")
    >>> fanin.backward([total])
    >>> w.grad
    array([2., 4.])

    On a device nodes and leaves use the stream that was current where they were made; at the end the caller's
    stream waits for it:

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
    budget: float | Literal["auto"] | None = None,
    workers: int = 1,
) -> list[Any]:  # step
    """Run a pass and return the gradients of `inputs` as a list; no leaf changes.

    Parameters
    ----------
    inputs : sequence
        Leaves, nodes (their slot 0) and (node, slot). The result has None where no gradient comes. Hooks of the
        slots have run on the sums.

    The other parameters and the exceptions are those of `backward`.

    >>> x = fanin.Leaf(np.array([1.0, 2.0]))
    >>> cube = fanin.Node(lambda g: g * 3 * x.array**2, edges=[(x, 0)])
    >>> fanin.grad([(cube, 0, np.ones(2))], [x])
    [array([ 3., 12.])]
    """

def order_steps(
    roots: Iterable[Root], inputs: Iterable[Leaf | Node | tuple[Leaf | Node, int]] | None, /
) -> list[tuple[Node | Leaf, int, bool]]:  # step
    """The nodes of a pass in their order: (node, the step after which it is ready or -1, whether its function runs)."""

def leaves_divert(takers: list[tuple[Leaf, tuple[Any, ...], tuple[Any, ...]]], keeps: bool, /) -> None:
    """Call functions with each pass's sums for leaves, after their hooks, in place of accumulation and of the hooks
    after it. An error if a leaf has a function already.

    Of each leaf there are two tuples (fn, kept, i, own); the second one counts if `keeps`, and it has no `.grad` yet. A
    sum without other references goes to `own`, if it is not None, and the pass has no reference to it then; else, with
    the leaf's strides and the dtype of its gradients, it becomes kept[i] of a dict, if there is none, without a call.
    Every other one goes to `fn`.
    """

def leaves_undivert(takers: list[tuple[Leaf, tuple[Any, ...], tuple[Any, ...]]], /) -> None:
    """Accumulate again in each leaf that has one of these functions."""

def leaf_dtype(leaf: Leaf, /) -> str | None:
    """The dtype of the leaf's gradients: its array's, or that of `grad_dtype`; None if it declares none."""

def leaves_accumulate(leaves: list[Any], sums: list[Any], first: int, /) -> tuple[int, BaseException] | None:
    """Add each sum that is not None, from the one with the number `first` on, to the `.grad` of its leaf, and run the
    hooks that run after that; each becomes None in the list before. What is no `Leaf` has a method `accumulate`. After
    an error, the number of its leaf and the error; the leaves after it are left.
    """

# walk.c
def walk(
    roots: Iterable[Root],
    inputs: Iterable[Leaf | tuple[Leaf, int]] | dict[Any, Leaf] | None = None,
    *,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    detect: bool | None = None,
    schedule: Schedule | None = None,
    progress: Callable[[int, int], object] | None = None,
    one: Callable[[Node | Leaf, int], object] | None = None,
    budget: float | Literal["auto"] | None = None,
) -> Walk:  # step
    """A pass that the caller runs: an iterator of (node, sums), in the order in which `backward` runs the nodes.

    `give(gradients)` takes what the node's function would have returned; then comes the next node. Leaves
    accumulate by themselves. Parameters, hooks, freeing of nodes and exceptions are those of `backward`.
    `close()` ends the pass.

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
    def wait(self, other: StreamLike | Event, /) -> None:  # step
        """Hold back work queued here from now on until `other` has passed.

        `other` is an Event (its last record) or a Stream (all work queued on it so far). The host does not wait.
        """
    def record(self) -> Event:  # step
        """Return an Event after all work queued here so far."""
    def synchronize(self) -> None:  # step
        """Block until everything queued here has run."""
    def __cuda_stream__(self) -> tuple[int, int]:
        """(0, handle), for other libraries; TypeError for a simulated device's."""
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
    def stream(self) -> Stream | None:  # step
        """The stream it was last recorded on; None before."""
    def record(self, stream: Stream | None, /) -> None:  # step
        """Record the point in `stream` after all work queued there so far.

        Later waits use the new point; queued waits keep the old one. None is the device's current stream.
        """
    def query(self) -> bool:  # step
        """True if all work before the point has run, and for an event that was never recorded.

        On a simulated device one piece of work runs after each False; under `fanin.sim.explore` both answers are
        tried.
        """
    def synchronize(self) -> None:  # step
        """Block until all work before the point has run."""
    def __reduce__(self) -> NoReturn: ...
    def __repr__(self) -> str: ...  # step

# ---------------------------------------------------------------- graph trees

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Role = Literal["auto", "copy", "static", "accumulate"]

@final
class GraphStep:
    """One iteration of a graph tree, made by `GraphTree.step`."""
    def __enter__(self) -> Self:  # step
        """Begin the step."""
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:  # step
        """End the step: its outputs must not be used from then on."""

@final
class GraphFunction(Generic[_P, _R]):
    """A function of a graph tree, made by `GraphTree.function`; call it with arrays, inside a step."""
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def __get__(self, owner: object, kind: type | None = None, /) -> Any: ...
    def explain(self) -> str:  # step
        """The outcome of the last call in a sentence with the rules (docs/graph-trees.md); if it was no replay, also
        the reason and the remedy.
        """
    @property
    def last(self) -> Outcome | None:  # step
        """The outcome of the last call; None before the first."""
    @property
    def stats(self) -> FunctionStats:  # step
        """Figures of its calls and recordings."""
    @property
    def _tree(self) -> GraphTree:
        """The tree that it is a function of."""
    @property
    def _form(self) -> object:
        """What `_put_form` got in the function's last run, at a replay in the run that was recorded; None: nothing."""
    def _put_form(self, form: object, /) -> None:
        """Keep an object of the function that runs, with its recording."""
    @property
    def name(self) -> str:
        """The function's name in messages."""

@final
class GraphTree:
    """Functions of arrays on a device that are recorded once and replayed, in one range of memory.

        tree = fanin.GraphTree("cpu")          # or "cuda:0", "sim:0"
        step = tree.function(lambda x, w: np.tanh(x @ w), roles=("copy", "static"))
        for x in batches:
            with tree.step():
                y = step(x, w)
                print(step.last.did, y.numpy())   # warmed, recorded, replayed, replayed, ..

    On the CPU operands are ndarrays, and outputs are handles whose values `numpy()` copies
    (docs/graph-trees.md).

    Parameters
    ----------
    device : str
        "cpu", or a device with streams.
    memory : int
        Bytes of the range.
    limit : int
        The number of further recordings because an operand is at another place; then the operand is copied.
    strict : bool
        Raise an error for a static operand at another place.
    verify : int
        The first `verify` replays of each recording also run the plain function; a difference in any bit is a
        CaptureError that names the array.
    """
    def __new__(
        cls, device: str, *, memory: int = 67108864, limit: int = 8, strict: bool = False, verify: int = 0
    ) -> GraphTree: ...
    def function(
        self,
        fn: Callable[_P, _R],
        *,
        roles: _Role | Sequence[_Role] = "auto",
        keep: bool | Sequence[bool] | Literal["held"] = False,
        key: Callable[_P, object] | None = None,
        only: Iterable[int] | None = None,
        min_kernels: int = 0,
    ) -> GraphFunction[_P, _R]:  # step
        """Make a function of arrays that is warmed up, then recorded, and from then on replayed.

        Parameters
        ----------
        fn : callable
            Gets arrays, and returns an array, None, or a tuple or list of them.
        roles : str, or sequence of str
            For all operands, or for each: "copy" (copied in before each replay), "static" (stays where it is),
            "accumulate" (the caller's memory, added into), "auto" (an output of this step is used in place, all
            else is copied).
        keep : bool, sequence of bool, or "held"
            Outputs that are copied out of the tree's memory, and outlive the step. "held": those that are still held
            when the step ends, copied then.
        key : callable, optional
            Called with the operands; calls with different results have different recordings.
        only : iterable of int, optional
            The sizes of the first array's first axis that are recorded; the function runs plainly with others.
        min_kernels : int
            Runs plainly where its recording has fewer kernels, copies and fills.
        """
    def pipeline(self, parts: object, *, min_kernels: int = 0) -> Pipeline:  # step
        """Make a step of several recorded pieces, with parts on the host between them that run in each call
        (docs/pipelines.md).

            def train(x, want, w):
                loss, g = gradient(x, want, w)  # a function of the tree: a piece
                if np.isnan((yield loss)):  # the host reads
                    return None
                update(w, g, np.array(0.1))
                return loss

            step = tree.pipeline(train)

        Parameters
        ----------
        parts : generator function, or sequence of callables
            A generator function calls functions of the tree, and yields their outputs where it reads them: it is sent
            their values. Or pieces and host parts in turn: each gets what the one before returned.
        min_kernels : int
            Of pieces in a sequence that are no functions of the tree yet: those with fewer kernels run plainly.
        """
    def warm_again(self) -> None:  # step
        """Free all recordings: each function is warmed up and recorded again."""
    @property
    def recordings(self) -> list[Recording]:  # step
        """The recordings, the oldest first."""
    def _copied(self, array: object, /) -> object:  # step
        """A copy of an array of the tree in its own memory; anything else as it is."""
    def step(self) -> GraphStep:
        """One iteration: `with tree.step():`. Outputs of its calls must not be used after its end."""
    def close(self) -> None:  # step
        """Free all recordings and the memory; later calls fail."""
    def plot(self, path: str | PathLike[str] | None = None, /) -> str:
        """A picture of the tree, as SVG text that a notebook shows; also written to `path` if given. ValueError for a
        file name with another ending than .svg; OSError if it cannot be written.
        """
    def _repr_svg_(self) -> str | None:
        """The picture for a notebook; None of a closed tree."""
    def _memory(self) -> list[tuple[int, int, int, bool]]:  # step
        """(node, from, to, as an output) of each piece of the tree's memory that a recording uses."""
    def _recordings(self) -> list[tuple[int, int, str, int, int, int, bool, int]]:  # step
        """(node, parent, function, owns, reaches, replays, on the path, kernels) of each recording."""
    def __enter__(self) -> Self:
        """The tree."""
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:  # step
        """Close it."""
    @property
    def stats(self) -> GraphStats:  # step
        """The numbers of recordings, bytes and calls: a GraphStats."""
    @property
    def closed(self) -> bool:  # step
        """Whether it was closed."""
    @property
    def device(self) -> str:
        """The name of its device, as in "sim:0"."""
    def __repr__(self) -> str: ...  # step

@disjoint_base
class CorePipeline:
    """The call of a pipeline, from which `fanin.graph.Pipeline` is derived."""
    def __new__(
        cls,
        tree: GraphTree,
        body: Callable[..., Generator[Any, Any, Any]] | None,
        parts: tuple[Callable[..., Any], ...],
        stop: type,
        /,
    ) -> Self: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def _calls(self) -> list[Any]:
        """Of the last call: the functions of the tree that it called, each followed by its outcome unless it failed."""
    @property
    def _tree(self) -> GraphTree:
        """Its tree."""

_Index = SupportsIndex | slice | EllipsisType | None
_Axis = SupportsIndex | tuple[SupportsIndex, ...] | None

# Operators and methods of arrays on the CPU: of the functions of a graph tree. Outside they give ndarrays.
class _OfNumPy:
    def __setitem__(self, index: _Index | tuple[_Index, ...], value: object, /) -> None: ...
    def __delitem__(self, index: object, /) -> NoReturn: ...
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
    def __pow__(self, other: object, mod: None = None, /) -> Array: ...
    def __ipow__(self, other: object, mod: None = None, /) -> Self: ...
    def __rpow__(self, other: object, mod: None = None, /) -> Array: ...
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
    def T(self) -> Array: ...  # python
    @property
    def address(self) -> int:
        """The address of its first element."""
    @property
    def users(self) -> tuple[Stream, ...]:  # step
        """The streams that used its memory, its owner first."""
    def numpy(self) -> NDArray:  # step
        """Wait for the device's current stream alone, and copy the values to a new ndarray."""
    def transpose(self, *axes: SupportsIndex | Iterable[SupportsIndex]) -> Array: ...  # python
    def reshape(self, *shape: SupportsIndex | Iterable[SupportsIndex]) -> Array: ...  # python
    def broadcast_to(self, *shape: SupportsIndex | Iterable[SupportsIndex]) -> Array: ...  # python
    def _view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], /) -> Array: ...
    def _broadcast(self, shape: tuple[int, ...], /) -> Array: ...
    def record_stream(self, stream: Stream, /) -> None:  # step
        """Keep the memory, after the last reference to it, until all work now queued on `stream` has run."""
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
    ) -> object:  # step
        """A capsule over the array's memory, for which the consumer's stream waits: None and 1 are the legacy
        default stream, 2 the per-thread one, -1 waits for nothing.
        """
    def __complex__(self) -> complex: ...  # python
    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, n): CUDA device n."""
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3; its stream is the device's current one, which waits for all work on the memory."""
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray: ...  # python
    def __array_ufunc__(self, *args: object, **kwargs: object) -> object: ...  # python
    def __array_function__(self, *args: object, **kwargs: object) -> object: ...  # python
    def __reduce__(self) -> NoReturn: ...  # python

# stream.c
def current_stream(device: str | None, /) -> Stream | None:
    """The current stream of a device on this thread; None without streams."""

def stream_pushed(device: str, /) -> Stream | None:
    """The innermost stream pushed for a device on this thread; None: none."""

def stream_push(stream: Stream, /) -> None:
    """Make `stream` the current stream of its device on this thread."""

def stream_pop(stream: Stream, /) -> None:
    """Undo the innermost stream_push of `stream`."""

def build_info() -> dict[str, str]:
    """How this library was built."""

# backends.c
def devices() -> list[str]:
    """The names of the devices that a caller can name now."""

def backend_of_dlpack(type: int, /) -> str | None:
    """The name of the backend whose devices read memory of a DLPack device type, or None."""

# cuda.c
def cuda_active(index: int, /) -> bool:
    """Whether this process uses a device: only then can it have streams."""

def cuda_here() -> int:
    """The device whose primary context is current on this thread; -1: none in use."""

def cuda_holding(address: int, /) -> int:
    """The device that owns an address, according to the driver; -1: none."""

def cuda_use(path: str | None, /) -> None:
    """Use this CUDA driver from now on; None: the system's. It is opened at its first use."""

class _CudaInfo(TypedDict, total=False):
    why: str
    code: int
    path: str
    version: int
    devices: tuple[str, ...]
    kernels: dict[str, str]
    missing: dict[str, str]

def cuda_info() -> _CudaInfo:
    """The features of the CUDA driver, or why there is none."""

def cuda_leave_out(*words: str) -> None:
    """Make the CUDA backend leave these bits out of plans, and no others: for proofs."""

def kernels_source() -> bytes:
    """kernels.cu and the headers that it includes: zlib of JSON, {name: text}."""

def kernels_made() -> str:
    """What nvcc made of them when the package was built; "" where the build embedded no machine code."""

# ---------------------------------------------------------------- kernels on the CPU

# cpu_kernel.c
def cpu_launch(fn: Callable[..., object], name: str, reads: tuple[object, ...], writes: tuple[object, ...], /) -> None:
    """Call fn(*reads, *writes) on the CPU, now, or in each replay of this thread's recording."""

def cpu_empty(shape: tuple[int, ...], dtype: DTypeLike, /) -> Array:
    """A new array of fanin's on the CPU; inside a function of a graph tree in the tree's memory."""

def cpu_wants_handles() -> bool:
    """Whether this thread is in a function of a graph tree on the CPU."""

# ---------------------------------------------------------------- the simulated machine

@disjoint_base
class Machine:
    """The core of fanin.sim.Machine."""
    def __new__(
        cls,
        devices: int,
        seed: int,
        schedule: int,
        starve: int,
        memory: int,
        launch_us: float,
        gbytes_per_s: float,
        /,
    ) -> Self: ...
    @property
    def devices(self) -> int:
        """The number of its devices."""
    @property
    def seed(self) -> int:
        """The seed by which it picks the next work to run."""
    @property
    def races(self) -> int:  # step
        """The number of races that it found."""
    @property
    def host_us(self) -> float:  # step
        """The clock of the host, in microseconds."""
    @property
    def device_us(self) -> float:  # step
        """When the last queued work ends, in microseconds."""
    @property
    def abandoned(self) -> bool:
        """True after _give_up()."""
    @property
    def host_schedule(self) -> str:  # step
        """The host thread that ran each step: one character each."""
    @property
    def streams(self) -> tuple[Stream, ...]:  # step
        """The streams of the machine that are referenced."""
    @property
    def _steps(self) -> int:
        """How often one of the host threads was chosen."""
    def _stream(self, device: int, blocking: bool, name: str | None, /) -> Stream:  # step
        """A new stream; messages about races show the name."""
    def _event(self, device: int, /) -> Event:  # step
        """A new event."""
    def _array(self, ndarray: NDArray, device: int, /) -> Array:  # step
        """A copy on a device."""
    def _empty(self, shape: tuple[int, ...], dtype: DTypeLike, device: int, /) -> Array:  # step
        """Poisoned memory on a device."""
    def _launch(
        self,
        stream: Stream,
        fn: Callable[..., object],
        reads: tuple[Array, ...],
        writes: tuple[Array, ...],
        name: str,
        us: float,
        stacklevel: int,
        /,
    ) -> None:  # step
        """Queue a kernel; messages name the line of the stacklevel-th frame outside fanin."""
    def _synchronize(self) -> None:  # step
        """Run all queued work."""
    def _step(self) -> bool:  # step
        """Run one piece of queued work; return False if none can run."""
    def _pending(self) -> None:
        """Raise a race that no call has raised yet."""
    def _forget(self) -> None:
        """Make the queued kernels of the user do nothing."""
    def _check(self, on: bool, /) -> None:
        """Switch the checker on or off."""
    def _begin_capture(self, stream: Stream, mode: int, /) -> None:  # step
        """Begin to capture the work queued on a stream."""
    def _end_capture(self, stream: Stream, /) -> object:  # step
        """End the capture and return its graph, in a capsule."""
    def _launch_graph(self, graph: object, stream: Stream, /) -> None:  # step
        """Queue a graph."""
    def _leave_out(self, *words: str) -> None:  # step
        """Leave these bits out of all plans, and no others."""
    def _spawn(self) -> int:  # step
        """Register a host thread and return its number."""
    def _thread_apart(self, number: int, /) -> None:
        """Promise that threads of other numbers share no host memory and no graph with this one."""
    def _thread_begin(self, actor: int, /) -> bool:
        """Begin a spawned thread; if this returns False, the thread must return at once."""
    def _thread_end(self, actor: int, /) -> None:
        """End a spawned thread: its last call."""
    def _limit(self, steps: int, /) -> None:
        """Report host threads that act more often as endless."""
    def _break(self, text: str, /) -> int:
        """Give up the thread that acts, which does not return, and return its number, or -1."""
    def _saw_thread(self, actor: int, /) -> None:  # step
        """Record that the calling thread reads how another one ended."""
    def _after_thread(self, actor: int, /) -> None:
        """Order the calling thread's next step after a thread that has ended."""
    def _join(self) -> None:
        """Run the host threads to their end."""
    def _stuck(self, actor: int, /) -> bool:
        """Whether, after a deadlock, the thread will never end."""
    def _enter(self) -> None:
        """Make "sim:0" the name of its first device on this thread."""
    def _leave(self) -> None:
        """Undo the innermost _enter."""
    def _follow(self, search: object, /) -> None:
        """Let a search choose among the host threads."""
    def _give_up(self) -> None:
        """End the host threads."""

class _SearchState(TypedDict):
    anew: int
    runs: int
    abandoned: int
    complete: bool
    strayed: bool
    schedule: str

# search.c
def explore_new(reduce: bool, limit: int, /) -> object:
    """A search over the orders of host threads."""

def explore_begin(search: object, /) -> bool:
    """Start the next run; False when all have been run."""

def explore_end(search: object, /) -> None:
    """End a run."""

def explore_state(search: object, /) -> _SearchState:
    """anew, runs, abandoned, complete, strayed, schedule."""

def explore_replay(search: object, schedule: str, /) -> None:
    """The next run follows a schedule."""

def explore_sample(search: object, seed: int, /) -> None:
    """The next run is a sample."""

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
    int,
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
    int,
]

@final
class Trace:
    """The core of fanin.trace: a ring of lines."""
    def __new__(cls, capacity: int, digests: bool = False) -> Trace: ...
    @property
    def dropped(self) -> int:  # step
        """The number of lines that newer ones replaced."""
    def begin(self) -> None:  # step
        """Start to record the work of this thread."""
    def end(self) -> None:  # step
        """Stop recording."""
    def lines(self) -> list[_TraceLine]:  # step
        """The lines, oldest first, as tuples."""
    def settle(self) -> None:
        """Read the copies that digests of devices have left."""
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

# options.c
def get_options() -> _Options:  # step
    """The process's options, as a dict."""

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
) -> _Options:  # step
    """Set the options that are not None; return the previous options, as a dict."""

def counters() -> ProcessCounters:  # step
    """Return the work of all buffers of this process so far: a fanin.ProcessCounters."""

def workers() -> int:  # step
    """Return the number of threads that make a large sum together."""

def trim() -> int:  # step
    """Free the memory that is kept for large results, and on CUDA devices all unused memory; return the number
    of bytes.

    `set_options(pool_bytes=)` limits how much is kept. On a device it waits for destroyed streams, so no
    stream that fanin was never given may be captured meanwhile.

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

# exchange.c
def device_array(device: str, array: NDArray, empty: bool, /) -> Array:
    """A new array like an ndarray on a device with streams, with its values unless `empty`."""

def table_known(table: object, origin: int, /) -> bool:
    """Allocate sums of this origin by this exchange table from now on (None: by the core); return whether the
    table is known.
    """

def read_by_table(type: type, origin: int, asks_value: bool, /) -> None:
    """Read arrays of exactly this type on a CUDA device by the exchange table of their origin from now on;
    origin -1: no longer. asks_value: check is_neg, is_conj and requires_grad first.
    """

def table_take(table: object, x: object, /) -> object:
    """Return a capsule over x by its exchange table; no stream waits."""

def table_give(table: object, capsule: object, /) -> object:
    """Return a library's array over the memory of a capsule's tensor."""

def table_stream(table: object, device: int, /) -> int:
    """The handle of a library's current stream on a CUDA device."""

def hold_for(owner: object, streams: list[Stream], /) -> object:
    """An object that, after its last reference, keeps `owner` until the work that the streams have queued so far
    has run.
    """

def quick_tensors(
    type: type,
    table: object,
    is_neg: object,
    requires_grad: object,
    plain: tuple[object, ...],
    graph: object,
    origin: int,
    /,
) -> bool:
    """Read exact torch tensors through torch's exchange table from now on; return whether the table is known.

    plain: a function that returns whether getters of tensors run Python code, then pairs of a getter and its value
    for tensors that the table reads.
    """

def dtype_name(dtype: object, /) -> str | None:
    """The name of a dtype that is summed (NumPy's, torch's, a name); None for None."""

def can_cast(from_dtype: object, to_dtype: object, /) -> bool:
    """Whether a gradient is cast so (D6)."""

def is_no_gradient(x: object, /) -> bool:
    """Whether it means that there is no gradient: None, or an array of JAX's float0 (S2)."""

@final
class _Exporter:
    """An array of the core for _interop.arrays, which converts it to the caller's library."""
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule over the array's memory."""
    def __dlpack_device__(self) -> tuple[Literal[1], Literal[0]]:
        """(1, 0): host memory."""
    def numpy(self) -> NDArray:
        """An ndarray over the same memory."""
    def compact(self) -> tuple[_Exporter, tuple[int, ...]]:
        """The same array without what its expanded axes repeat (A13), and the shape with it."""

# ---------------------------------------------------------------- who shares memory

_Shared = tuple[tuple[int, ...], tuple[int, ...]] | str | None

# overlap.c
def overlap(a: object, b: object, budget: float | None = None, /) -> _Shared:
    """None if the arrays are disjoint; a witness, two tuples of ints; or a str, the reason for "unknown"."""

def overlaps_itself(a: object, budget: float | None, /) -> _Shared:
    """As overlap, for two elements of one array."""

def overlaps(arrays: Iterable[object], budget: float | None, /) -> tuple[object, tuple[int, ...], int, bool, bool]:
    """(found, the component of each array, how many components, whether they are exact, whether no pair is hard)."""

def overlaps_verdict(found: object, i: int, j: int, budget: float | None, /) -> _Shared:
    """As overlap, for arrays i and j."""

def overlaps_pairs(found: object, budget: float | None, /) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The pairs that are not surely disjoint, and the undecided ones."""

def address(a: NDArray, /) -> int:
    """The address of the first element of an ndarray."""

# ---------------------------------------------------------------- audits

# elements.c
def _elements(tensor: object, places: NDArray | None, /) -> NDArray | None:
    """The elements of a torch tensor at some places of int32, None: all, as float64 of one of float64, else as float32.
    None: it is not an exact tensor of float64, float32, float16 or bfloat16 on the host in C order.
    """

def _adds_up(before: NDArray, gradient: NDArray, after: NDArray, dtype: str, /) -> bool:
    """Whether before + gradient, rounded to `dtype`, has the bits of `after`: arrays of float64 for float64, else of
    float32. False also where NaNs or subnormal numbers differ in their bits, and for other arrays.
    """

# ---------------------------------------------------------------- analysis

# analysis.c
def layout(arrays: Iterable[object], budget: float | None, /) -> tuple[object, tuple[int, ...], tuple[int, ...]]:
    """(layout, for each array its component, for each its offset there)."""

def layout_check(
    layout: object, arrays: Iterable[object], /
) -> (
    tuple[
        int,
        Literal["dtype", "device", "shape", "strides", "read-only", "writable", "apart", "offset", "overlap"],
        int | None,
    ]
    | None
):
    """None, or the first difference: (index, what, other index or None)."""

def snapshot(arrays: Iterable[object], /) -> tuple[object, tuple[object, ...]]:
    """(snapshot, the arrays, which the caller must hold as long)."""

def snapshot_changed(snapshot: object, which: Sequence[int] | None, /) -> list[int]: ...
def snapshot_restore(snapshot: object, i: int, data: int | None, /) -> None: ...
def snapshot_data(snapshot: object, i: int, /) -> int: ...
def snapshot_elsewhere(snapshot: object, arrays: tuple[object, ...], /) -> list[int]: ...
def restride(a: NDArray, strides: tuple[int, ...], /) -> None:
    """Give an ndarray strides that it had before, without a check that they stay within its memory."""

# ---------------------------------------------------------------- exact sums

# window.c
def window_new(dtype: DTypeLike, size: int, /) -> object:
    """The empty exact sum of `size` elements of a real or complex float dtype."""

def window_add(window: object, arrays: tuple[object, ...], /) -> None:
    """Add arrays of one shape on the CPU, each with the window's number of elements. Nothing is added on errors."""

def window_wide(window: object, /) -> object:
    """The same sum, as one of float64 or complex128."""

def window_room(window: object, /) -> int:
    """The bytes that window_pack needs at most."""

def window_pack(window: object, out: NDArray, /) -> int:
    """Write the sum as a message to `out`, an array of uint8; return the number of bytes."""

def window_merge_packed(window: object, message: NDArray, /) -> int:
    """Add the message at the begin of an array of uint8 at a multiple of 8, and return its number of bytes. Nothing is
    added on errors.
    """

def message_new(size: int, /) -> NDArray:
    """An array of uint8, not zeroed; a large one reuses memory as sums do."""

def window_round(window: object, out: object, scale: complex | None, /) -> None:
    """Write the sum, times `scale`, rounded once, to an array with the window's number of elements."""

def exact_into(terms: list[object], out: object, scale: complex | None, /) -> bool:
    """Write the exact sum of a few small arrays of one shape and dtype, times `scale`, rounded once, to `out`, of the
    same. False: nothing was written, as `add_n` must do it.
    """

@final
class EventCount:
    """A number that only grows; threads wait until it is large enough, a step of explored schedules without polling."""
    def __new__(cls) -> EventCount: ...
    def advance(self) -> None:
        """Add one."""
    def end(self) -> None:
        """Release all threads that wait, now and later."""
    def wait(self, n: int, timeout: float | None = None, /) -> bool:
        """Wait until the number is at least `n`, until `end`, or for `timeout` seconds; return whether it is."""
    @property
    def value(self) -> int:
        """The number."""

class Block:
    """A context manager that calls `_begin()` and `_end(error)` of its subclass: the latter after a failed `_begin`,
    too, and again as long as an exception that is no Exception, as of Ctrl-C, ends it before it is complete.
    """
    def __enter__(self) -> Any:
        """Return what `_begin` returns."""
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> Literal[False]:
        """Raise what `_end` raises, or an interruption of it."""

# ranks.c
def trace_bucket(label: str, group: int, number: int, bucket: int, begin_ns: int, sends: tuple[int, ...], /) -> None:
    """Write a step of bucket `bucket` of the pass `number` of a group to the traces that record this thread, and one
    line for each other rank to which it sent bytes: `sends`.
    """

def tracing() -> bool:
    """Whether a trace records this thread."""

def copy_plain(from_: Any, to: Any, /) -> bool:
    """Copy an ndarray, or a torch.Tensor of real numbers without gaps, into an ndarray of the same dtype and shape;
    return whether they are such.
    """

def gate_hook(gate: list[Any], place: int, otherwise: Callable[[tuple[Any]], tuple[None]], /) -> Callable[..., Any]:
    """A hook of torch's AccumulateGrad, which copies a plain gradient as `copy_plain` to its place if the gate is open,
    and calls `otherwise` with all others. The gate of a bucket is a list: empty, or a bytearray of the places that have
    a gradient, the list of arrays at these places, and a list, which is empty while no pass has a weight.
    """

def heads_compare(messages: list[NDArray], sizes: Sequence[int], own: NDArray, head: int, alike: int, /) -> int:
    """What the first messages of all ranks, of which so many bytes came, are beside this rank's `own`: 0 if their
    heads, of `head` bytes, are the same; 1 if some differ after their first `alike` bytes; 2 if one differs before; 3
    if one ends before its head, or before the end of `own`. The first rank of 2 and 3 decides.
    """

def yield_thread() -> None:
    """Let other threads and processes use this core. Unlike os.sched_yield before Python 3.12, it releases the GIL."""

# requests.c
def requests_new(library: NDArray, receives: list[NDArray], sends: list[NDArray], /) -> NDArray | None:
    """The state of messages from and to ranks, each an array of bytes; those of this rank, and those without bytes, are
    none. None if one has more bytes than an int counts. library: what is needed of an MPI library.
    """

def requests_run(state: NDArray, begin: bool, /) -> int:
    """Start the messages that `state` describes, if `begin`; then look at them for a short while. Return 0 if all are
    complete, -1 if some are not, else the library's error. Without the GIL.
    """

# float_mode.c
def in_default_modes(call: Callable[[], _T], /) -> _T:
    """Return `call()`, which runs in the default floating-point modes (rule A15): for arithmetic of fanin in Python,
    not for code of users.
    """

# ---------------------------------------------------------------- errors

class RaceError(RuntimeError):
    """Two operations touch the same memory, one writes, and nothing orders them. The message names both, their
    streams, their Python lines, and the wait that is missing.
    """

class CaptureError(RuntimeError):
    """A call that is not legal while a stream is captured."""

class DeviceError(RuntimeError):
    """A call of a device's driver failed. `code` is the driver's number for it."""

    code: int

class DeviceOutOfMemoryError(DeviceError, MemoryError):
    """A device has too little memory left."""

class DTypeError(ValueError, TypeError, BufferError):
    """A dtype that is not summed, given or named: float128, foreign byte order, strings, datetimes, records, the
    other types of ml_dtypes. It is each of the classes by which NumPy, DLPack and array libraries call this.
    """

class StreamMismatchWarning(RuntimeWarning):
    """A leaf accumulates on another stream than its gradient was made on, so each pass waits (rule S6). Given once
    per process.
    """
