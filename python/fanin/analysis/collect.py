"""Collects what a function does to its inputs and what its outputs are, in one run on copies.

One collector (`metadata`) makes the records from an adapter's observations: `ObservedArrays` here compares memory and
reads the log of tracked ndarrays; `tensors.ObservedTensors` reads the operations on tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._checks import flag, function, integer, sequence
from .._core import address
from .._interop.protocols import NDArray
from . import trees
from .arrays import Array, CallerContainers, Geometry, Plan, RunArrays, plain, plan, private_copies
from .calls import (
    Call,
    call_of,
    check_arrays,
    check_function,
    check_given,
    check_hidden,
    check_keywords,
    check_signature,
    outcome_of,
)
from .descriptors import (
    AOTInput,
    DifferentiableAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)
from .guards import components_of
from .memory import Layout
from .records import (
    PLAIN_TYPES,
    InputAliasInfo,
    MetadataKey,
    OutputAliasInfo,
    OutputType,
    TangentMeta,
    ViewAndMutationMeta,
    ViewMetaSequence,
)

if TYPE_CHECKING:
    from .tensors import ObservedTensors

__tracebackhide__ = True  # no frames of ours in reports of pytest

# An ndarray that records writes to it, and the input that it is a view of: what memory does not show, as a write that
# left every byte as it was (`x *= 1`), or which of several overlapping inputs an output is a view of. Memory shows what
# the class misses: writes by `np.asarray(x)`, a memoryview or C code. So it only adds to what was written.


class Log:
    """Which arrays were written through tracked views, while there is a `run`.

    `writes`: (number of the array whose view was written, whether gradients were on). `met`: the numbers of all arrays
    that share a byte with what was written.
    """

    def __init__(self, grad_enabled: Callable[[], bool] | None) -> None:
        self.grad_enabled = grad_enabled
        self.writes: set[tuple[int, bool]] = set()
        self.met: set[int] = set()
        self.run: RunArrays | None = None
        self._seen: set[object] = set()

    def note(self, array: Tracked) -> None:
        """A write through `array`, if that is a view of an input, has an element, and can be written: some functions
        accept another one, and leave it alone.
        """
        origin, run = array.fanin_origin, self.run
        if origin is None or run is None or array.size == 0 or not array.flags.writeable:
            return
        number = run.plan.where[origin].group
        if not 0 <= address(array) - run.began(number) < max(run.plan.groups[number].size, 1):
            return
        self.writes.add((origin, self.grad_enabled is None or bool(self.grad_enabled())))
        self.met.add(origin)
        others = run.plan.groups[number].numbers
        key = (address(array), array.shape, array.strides, array.dtype.itemsize)
        if len(others) == 1 or key in self._seen:
            return
        self._seen.add(key)
        mine = plain(array)
        self.met.update(u for u in others if u not in self.met and _core.overlap(mine, run.as_it_was(u)))


class Tracked(NDArray):
    """See the top of this file. What is computed from tracked arrays is plain; views of them are tracked."""

    fanin_log: Log | None
    fanin_origin: int | None

    def __array_finalize__(self, other: object) -> None:
        self.fanin_log = getattr(other, "fanin_log", None)
        self.fanin_origin = getattr(other, "fanin_origin", None)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: object, out: tuple[object, ...] | None = None, **kwargs: object
    ) -> object:
        call: Callable[..., object] = ufunc if method == "__call__" else getattr(ufunc, method)
        given = [plain(x) if type(x) is Tracked else x for x in inputs]
        if out is None:
            result = call(*given, **kwargs)
            if method == "at":
                written(inputs[0])
            return result
        result = call(*given, out=tuple([plain(x) if type(x) is Tracked else x for x in out]), **kwargs)
        for o in out:
            written(o)
        if isinstance(result, tuple):
            return tuple([o if o is not None else made for o, made in zip(out, result, strict=True)])
        return out[0]

    def __array_function__(
        self, func: Callable[..., object], types: object, args: Iterable[object], kwargs: Mapping[str, object]
    ) -> object:
        result = func(*stripped(args), **stripped(kwargs))
        names = parameters(func)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if names and writes_first(func, given, given.get(names[0])):
            written(given[names[0]])
        out = given.get("out")
        for o in out if isinstance(out, tuple) else (out,):
            written(o)
        return out if isinstance(out, Tracked) else result

    def __getitem__(self, key: Any) -> Any:
        if not basic(key):
            result = plain(self)[stripped(key)]
            if not isinstance(result, np.ndarray) or result.base is None:
                return result
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: object) -> None:
        super().__setitem__(key, value)
        written(self)

    def view(self, *args: object, **kwargs: object) -> Any:
        """A view that stays tracked where an ndarray is requested."""
        kind = kwargs.get("type", args[-1] if args else None)
        if kind is not np.ndarray:
            return super().view(*args, **kwargs)
        rest = [a for a in args if a is not np.ndarray]
        return super().view(*rest, **{k: v for k, v in kwargs.items() if k != "type"})

    def __array__(self, *args: object, **kwargs: Any) -> Any:
        return plain(self).__array__(*args, **kwargs)


#: What an index may consist of that gives a view.
BASIC = (int, slice, type(None), type(...), str, np.integer)


def basic(key: object) -> bool:
    """Whether an index gives a view, or an element."""
    return all(isinstance(k, BASIC) for k in key) if type(key) is tuple else isinstance(key, BASIC)


def stripped(x: Any) -> Any:
    """Arguments without tracked arrays; containers other than list, tuple and dict are not entered."""
    if type(x) is Tracked:
        return plain(x)
    if type(x) in (list, tuple):
        return type(x)(stripped(item) for item in x)
    return {k: stripped(v) for k, v in x.items()} if type(x) is dict else x


def written(x: object) -> None:
    if type(x) is Tracked and x.fanin_log is not None:
        x.fanin_log.note(x)


#: Functions that write their first argument.
WRITERS = frozenset({np.copyto, np.place, np.put, np.put_along_axis, np.putmask, np.fill_diagonal})


def writes_first(func: object, given: dict[str, object], first: object) -> bool:
    if func is np.nan_to_num:
        return not given.get("copy", True) and isinstance(first, np.ndarray) and first.dtype.kind in "fc"
    return func in WRITERS or bool(given.get("overwrite_input"))


#: Parameters of functions that may be written in C, without a signature.
NAMES: dict[object, tuple[str, ...]] = {
    np.concatenate: ("arrays", "axis", "out"),
    np.dot: ("a", "b", "out"),
    np.copyto: ("dst", "src", "casting", "where"),
    np.putmask: ("a", "mask", "values"),
}


@functools.cache
def parameters(func: Callable[..., object]) -> tuple[str, ...]:
    if func in NAMES:
        return NAMES[func]
    try:
        every = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


#: Methods of ndarray that write it.
IN_PLACE = ("fill", "sort", "partition", "put", "setfield", "resize")

#: Which argument of a method is `out`, counted from 0.
OUT_AT = {
    **dict.fromkeys(("argmax", "argmin", "choose", "dot", "round", "min", "max", "all", "any"), 1),
    **dict.fromkeys(("mean", "sum", "prod", "std", "var", "cumsum", "cumprod", "take", "compress", "clip"), 2),
    "trace": 4,
}

#: Methods that make an array of their own, and would make it a tracked one.
FRESH = (
    *OUT_AT, "argpartition", "argsort", "astype", "byteswap", "conj", "conjugate", "copy", "flatten", "nonzero",
    "repeat", "searchsorted", "ptp", "__copy__", "__deepcopy__",
)  # fmt: skip


def writing(name: str) -> Callable[..., object]:
    """A method that notes the write and does it."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: object, **kwargs: object) -> object:
        result = whole(self, *args, **kwargs)
        written(self)
        return result

    method.__name__ = name
    return method


def making(name: str) -> Callable[..., object]:
    """A method whose result is plain; `out=` and an in-place byteswap are writes."""
    whole = getattr(np.ndarray, name)

    def method(self: Tracked, *args: object, **kwargs: object) -> object:
        at = OUT_AT.get(name, len(args))
        out = args[at] if at < len(args) else kwargs.get("out")
        if name == "byteswap" and (args or kwargs):
            result = whole(self, *args, **kwargs)
            written(self)
            return result
        result = whole(plain(self), *stripped(args), **stripped(kwargs))
        written(out)
        return out if isinstance(out, Tracked) else result

    method.__name__ = name
    return method


for _name in IN_PLACE:
    setattr(Tracked, _name, writing(_name))
for _name in FRESH:
    if hasattr(np.ndarray, _name):
        setattr(Tracked, _name, making(_name))


def assigned(name: str) -> property:
    """An attribute whose assignment writes elements."""
    whole = getattr(np.ndarray, name)

    def assign(self: Tracked, value: object) -> None:
        whole.__set__(self, value)
        written(self)

    return property(whole.__get__, assign)


for _name in ("real", "imag", "flat"):
    setattr(Tracked, _name, assigned(_name))


# The collector


KINDS = {
    "input": OutputType.is_input,
    "view": OutputType.alias_of_input,
    "output": OutputType.alias_of_intermediate_base_is_user_output,
}


def collect_metadata(
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, object] | None = None,
    *,
    keep_input_mutations: bool = False,
    requires_grad: Sequence[bool] | None = None,
    grad_enabled: Callable[[], bool] | None = None,
    static_input_indices: Sequence[int] = (),
    args_descs: Sequence[AOTInput] | None = None,
    watch: bool = True,
) -> ViewAndMutationMeta:
    """Run a function once, on private copies of its arguments, and return what it did to each input and what each
    output is.

    `args`, `kwargs`: the function's arguments; lists, tuples, named tuples, dicts, OrderedDicts and defaultdicts among
    them are flattened, and `input_info` has one record for each leaf, in order, keyword arguments last by their names;
    generators, and containers and dataclasses of other classes that hold arrays, are refused. Arrays are NumPy's (all
    of them), or torch tensors on the CPU (all of them). The caller's arrays are as they were afterwards, whatever the
    function does, also where it raises.

    An input counts as written where one of its bytes changed, by whatever route, or where NumPy wrote it by a tracked
    call though no byte changed. So of two inputs that overlap, both are written where their common bytes are.
    `mutations_hidden_from_autograd`: only memory shows the writes (they went by `np.asarray`, a memoryview, C).
    `keep_input_mutations`, `requires_grad` (for each leaf; not for tensors, which have it) and `grad_enabled` (called
    at each tracked write) fill the columns about autograd; NumPy has none of its own. `static_input_indices`: leaves
    that stay where they are from call to call, for the record. `args_descs`: what each leaf is (default: PlainAOTInput
    by position); tangents and messages name it so. `watch`: False runs the function on plain ndarrays, for one that
    takes no subclass (HIPS autograd inside); writes that change no byte are not seen then.

    TypeError: arguments that the function does not take, or arrays that are not all in their memory (object dtype,
    subclasses); named by descriptor.

    >>> from fanin.analysis import collect_metadata
    >>> def step(w, g):
    ...     w -= g
    ...     return w[1:], w.sum()
    >>> meta = collect_metadata(step, [np.ones(3), np.ones(3)])
    >>> [info.mutates_data for info in meta.input_info]
    [True, False]
    >>> [(info.output_type.name, info.base_idx) for info in meta.output_info]
    [('alias_of_input', 0), ('non_alias', None)]
    """
    args = check_given(args, "args", "collect_metadata")
    kwargs = check_keywords(kwargs, "kwargs", "collect_metadata")
    check_function(fn, "collect_metadata")
    if grad_enabled is not None:
        function("collect_metadata: grad_enabled", grad_enabled)
    watch = flag("collect_metadata: watch", watch)
    keep_input_mutations = flag("collect_metadata: keep_input_mutations", keep_input_mutations)
    call = call_of(args, kwargs, "collect_metadata")
    check_signature(fn, args, kwargs, "collect_metadata")
    if requires_grad is not None:
        requires_grad = tuple(map(bool, sequence("collect_metadata: requires_grad", requires_grad, "bools")))
    check_flags(call, requires_grad, "collect_metadata")
    what, count = "collect_metadata: static_input_indices", len(call.leaves)
    static = tuple(integer(what, i) for i in sequence(what, static_input_indices, "integers"))
    for i in static:
        if not 0 <= i < count:
            raise IndexError(
                f"collect_metadata: static_input_indices: there is no input {i}: there are {count}, from 0 on"
            )
    if args_descs is not None:
        args_descs = tuple(sequence("collect_metadata: args_descs", args_descs, "descriptors"))
        if len(args_descs) != count:
            raise ValueError(
                f"collect_metadata: args_descs: expected a descriptor for each of the {count} inputs, got"
                f" {len(args_descs)}"
            )
        for i, desc in enumerate(args_descs):
            if not isinstance(desc, AOTInput):
                raise TypeError(
                    f"collect_metadata: args_descs[{i}]: expected a descriptor of an input, got {desc!r:.80}"
                )
        call = dataclasses.replace(call, descs=args_descs)
    observed: ObservedArrays | ObservedTensors
    if call.tensors:
        from .tensors import ObservedTensors, RunTensors

        check_arrays(call, RunTensors.check, "collect_metadata")
        observed = ObservedTensors(call, (args, kwargs))
        observed.run(fn)
    else:
        check_arrays(call, RunArrays.check, "collect_metadata")
        layout = plan(call.arrays, components_of(Layout(call.arrays)))
        observed = observe_arrays(fn, call, (args, kwargs), layout, grad_enabled, requires_grad, watch)
    return metadata(observed, call, keep_input_mutations, static)


def metadata(
    observed: ObservedArrays | ObservedTensors,
    call: Call,
    keep_input_mutations: bool = False,
    static_input_indices: Sequence[int] = (),
) -> ViewAndMutationMeta:
    """The records of a run. Tangents are, in this order, those of new values of inputs, of outputs that pass through,
    of intermediate bases.
    """
    inputs = [observed.input_info(i, keep_input_mutations) for i in range(len(call.leaves))]
    outputs = observed.output_infos(inputs)
    tangents: list[tuple[TangentMeta, DifferentiableAOTOutput]] = [
        (observed.new_value(i), InputMutationAOTOutput(call.desc(i)))
        for i, info in enumerate(inputs)
        if info.has_mutation_tangent
    ]
    tangents += [
        (observed.result(j), PlainAOTOutput(j))
        for j, info in enumerate(outputs)
        if info.output_type in PLAIN_TYPES and info.requires_grad_for_backward
    ]
    tangents += [
        (TangentMeta.of(base), IntermediateBaseAOTOutput(PlainAOTOutput(j)))
        for base, j in observed.saved
        if outputs[j].requires_grad
    ]
    return observed.finished(
        ViewAndMutationMeta(
            tuple(inputs),
            tuple(outputs),
            len(observed.saved),
            keep_input_mutations,
            traced_tangents=tuple(meta for meta, _ in tangents),
            traced_tangents_descs=tuple(TangentAOTInput(of) for _, of in tangents),
            static_input_indices=tuple(static_input_indices),
        )
    )


def check_flags(call: Call, requires_grad: Sequence[bool] | None, api: str) -> None:
    if requires_grad is not None and len(requires_grad) != len(call.leaves):
        raise ValueError(
            f"{api}: requires_grad: expected a flag for each of the {len(call.leaves)} inputs, got {len(requires_grad)}"
        )


def observe_arrays(
    fn: Callable[..., object],
    call: Call,
    given: trees.Arguments,
    layout: Plan,
    grad_enabled: Callable[[], bool] | None = None,
    requires_grad: Sequence[bool] | None = None,
    watch: bool = True,
) -> ObservedArrays:
    """One run on copies, tracked ones with `watch`. TypeError for a result that hides memory of an input."""
    log = Log(grad_enabled) if watch else None
    run = RunArrays(layout, private_copies(layout, call.arrays, Tracked if watch else np.ndarray))
    if log is not None:
        for number, array in enumerate(run.arrays):
            array.fanin_log, array.fanin_origin = log, number
        log.run = run
    leaves = [leaf if u is None else run.arrays[u] for leaf, u in zip(call.leaves, call.index, strict=True)]
    args, kwargs = tree = call.copied(given, leaves)
    containers = CallerContainers(tree)
    try:
        value = fn(*args, **kwargs)
    except TypeError as e:
        if watch and Tracked.__name__ in str(e):
            e.add_note(
                "fanin: the function ran on copies of a subclass of ndarray, which it refuses: expected"
                " collect_metadata(.., watch=False), or functionalize without example_args"
            )
        raise
    if log is not None:
        log.run = None
    observed = ObservedArrays(call, run, value, log, requires_grad=requires_grad)
    observed.tree, observed.containers = tree, containers
    check_hidden(run, observed.outputs, "collect_metadata")
    return observed


class ObservedArrays:
    """The observations of a run on ndarrays. `log`: the writes of tracked arrays, if any. `earlier`: arrays that count
    as written in any case. `requires_grad`: for each leaf.
    """

    tree: trees.Arguments  #: of a run on copies: these, and what its lists and dicts held
    containers: CallerContainers

    def __init__(
        self,
        call: Call,
        run: RunArrays,
        value: object,
        log: Log | None,
        earlier: frozenset[int] = frozenset(),
        requires_grad: Sequence[bool] | None = None,
    ) -> None:
        self.requires_grad = requires_grad
        self.call, self.run, self.value, self.log, self.earlier = call, run, value, log, earlier
        self.outputs: list[Any] = []
        self.bases: list[Array] = []
        self.saved: list[tuple[Array, int]] = []  #: intermediates that are returned on behalf of an output, and which
        self.outcome = outcome_of(run, value, self.outputs, self.bases)
        self.moved = dict(self.outcome.geometry)

    def input_info(self, leaf: int, keep_input_mutations: bool) -> InputAliasInfo:
        u, log = self.call.index[leaf], self.log
        requires_grad = bool(self.requires_grad and self.requires_grad[leaf])
        if u is None:
            return InputAliasInfo(
                requires_grad=requires_grad,
                keep_input_mutations=keep_input_mutations,
                mutations_hidden_from_autograd=True,
            )
        resized = u in self.outcome.resized
        near = set(self.run.plan.groups[self.run.plan.where[u].group].numbers)
        # Includes writes by arrays that share the bytes.
        seen = {enabled for origin, enabled in log.writes if origin in near} if log else set()
        itself = log is not None and u in log.met
        data = not resized and (u in self.earlier or itself or u in self.run.changed)
        return InputAliasInfo(
            mutates_data=data,
            mutates_metadata=resized or u in self.moved,
            mutations_hidden_from_autograd=not seen if log else not data,
            mutations_under_no_grad_or_inference_mode=data and seen == {False},
            mutates_storage_metadata=resized,
            requires_grad=requires_grad,
            keep_input_mutations=keep_input_mutations,
        )

    def output_infos(self, inputs: Sequence[InputAliasInfo]) -> list[OutputAliasInfo]:
        infos, shared = [], set[int]()
        for j, (o, place) in enumerate(zip(self.outputs, self.outcome.places, strict=True)):
            if not place.array:
                infos.append(OutputAliasInfo(OutputType.non_alias, type(o)))
                continue
            requires_grad = any(self.requires_grad or ()) and bool(np.issubdtype(o.dtype, np.inexact))
            base: int | None = place.base
            if place.kind in KINDS:
                kind = KINDS[place.kind]
                base = place.base if place.kind == "output" else self.call.first[place.base]
            elif place.kind == "shared":
                kind = OutputType.alias_of_intermediate
                if place.base not in shared:
                    shared.add(place.base)
                    kind = OutputType.alias_of_intermediate_save_as_output
                    self.saved.append((plain(self.bases[place.base]), j))
            else:
                kind, base = OutputType.non_alias if place.own else OutputType.unsafe_view_alias, None
            recipe = None
            moved = place.kind == "view" and place.base in self.moved
            if base is not None and kind is not OutputType.is_input and not moved:
                recipe = ViewMetaSequence(MetadataKey(o.shape, "strided", False, o.strides, place.offset), o.dtype)
            raw = np.ndarray if isinstance(o, Tracked) else type(o)
            infos.append(OutputAliasInfo(kind, raw, base, frozenset(), requires_grad, requires_grad, recipe))
        return infos

    def new_value(self, leaf: int) -> TangentMeta:
        u = self.call.index[leaf]
        assert u is not None
        now = self.moved.get(u) or Geometry.of(self.call.arrays[u])
        return TangentMeta(np.ndarray, now.shape, now.dtype, now.strides)

    def result(self, output: int) -> TangentMeta:
        return TangentMeta.of(plain(self.outputs[output]))

    def finished(self, meta: ViewAndMutationMeta) -> ViewAndMutationMeta:
        """The records with the fields of this library alone."""
        return meta
