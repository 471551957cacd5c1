"""`functionalize(fn, compiler=..)` and `.pure` of tensors beside the function itself: right, or refused by name."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fanin.analysis import functionalize

torch = pytest.importorskip("torch")

from kit.programs_torch import program  # noqa: E402
from kit.support import run_python  # noqa: E402

pytestmark = pytest.mark.partners


def same(pure: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler that compiles nothing."""
    return pure


def both(fn: Callable[..., Any], make: Callable[[], list[Any]], **how: Any) -> tuple[Any, Any]:
    """What the function and its compiled wrapper give, each with arguments of its own, and those."""
    one, two = make(), make()
    return (fn(*one), one), (functionalize(fn, compiler=same, **how)(*two), two)


@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        (lambda x: torch.view_as_real(x), torch.complex64),
        (lambda x: x.real, torch.complex64),
        (lambda x: x.imag, torch.complex64),
        (lambda x: torch.view_as_real(x)[1:, 1], torch.complex64),
        (lambda x: torch.view_as_complex(x.view(-1, 2)), torch.float32),
    ],
)
@pytest.mark.parametrize("part", [slice(None), slice(2, None)])
def test_gradients_of_parts_of_complex_numbers_reach_every_element(view: Any, dtype: Any, part: slice) -> None:
    def make() -> list[Any]:
        leaf = torch.arange(1.0, 9.0).to(dtype).requires_grad_()
        return [leaf, (leaf * 1)[part]]

    grads = []
    for compiler in (None, same):
        leaf, x = make()
        out = functionalize(view, compiler=compiler)(x)
        assert torch.equal(
            torch.view_as_real(out) if out.is_complex() else out,
            out if not out.is_complex() else torch.view_as_real(view(x)),
        )
        weights = torch.arange(1.0, out.numel() + 1).view(out.shape)
        (out * weights).abs().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads), grads


BITS = {
    "conj": lambda z: (z.conj(),),
    "imag": lambda z: (z.conj().imag,),
    "pair": lambda z: (z.conj(), z),
}


@pytest.mark.parametrize("how", BITS)
def test_a_tensor_whose_bytes_are_not_its_values_is_refused_at_each_call(how: str) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    args = BITS[how](z)
    named = r"functionalize: args\[0\]: expected a tensor whose bytes are its values, got one with its (conj|neg)"
    with pytest.raises(ValueError, match=named):
        functionalize(lambda *xs: xs[0][1:], compiler=same)(*args)
    f = functionalize(lambda *xs: xs[0][1:], compiler=same)
    plain = tuple(x.resolve_conj().resolve_neg() for x in args)
    f(*plain)
    with pytest.raises(ValueError, match=named):
        f(*args)
    assert torch.equal(functionalize(lambda *xs: xs[0][1:])(*args), args[0][1:]), "without a compiler it is right"


def test_an_output_is_a_view_of_any_of_the_arguments_that_share_its_bytes() -> None:
    """Arguments that are not written are copied one by one, and the recorded base is the smallest around an output."""

    def fn(x: Any, y: Any) -> list[Any]:
        return [None, x.split(2)[1], y.split(2)[1].detach(), x[3:3]]

    x = torch.arange(6.0)
    f = functionalize(fn, compiler=same)
    for y in (x[1:], x[2:5], x[:4]):
        f(x, y)
        for out, own in zip(f(x, y)[1:], fn(x, y)[1:], strict=True):
            assert torch.equal(out, own) and out.data_ptr() == own.data_ptr() and out.stride() == own.stride()
    g = functionalize(lambda x, y, i: (x if i < 2 else y)[int(i) :][:2], compiler=same)
    assert g(x, x[1:], 1.0).tolist() == [1, 2]
    assert g(x, x[1:], 1.5).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"output\[0\] is another view of args\[1\], otherwise than at the recorded"):
        g(x, x[1:], 0.0)
    with pytest.raises(ValueError, match=r"output\[0\] is another view of args\[1\], otherwise than at the recorded"):
        g(x, x[1:], 2.0)


def test_a_function_that_takes_another_part_than_was_recorded_is_an_error() -> None:
    f = functionalize(lambda x, i: x[i : i + 1], compiler=same)
    x = torch.arange(4.0)
    assert f(x, 0).tolist() == [0]
    with pytest.raises(ValueError, match=r"output\[0\] is another view of args\[0\], otherwise than at the recorded"):
        f.pure(x, 2)
    out = f(x, 2)
    assert out.tolist() == [2] and out.data_ptr() == x[2:].data_ptr() and f.layouts == 2
    by_float = functionalize(lambda x, i: x[int(i) :][:1], compiler=same)
    by_float(x, 0.0)
    with pytest.raises(ValueError, match="is another view"):
        by_float(x, 2.0)


def test_a_function_that_writes_what_it_did_not_write_is_an_error_and_writes_nothing() -> None:
    f = functionalize(lambda x, y: (y.mul_(3), x.add_(1) if x[0] > 0 else x * 2)[1], compiler=same)
    assert f(torch.full((2,), -1.0), torch.ones(1)).tolist() == [-2, -2]
    x, y = torch.ones(2), torch.ones(1)
    with pytest.raises(ValueError, match=r"args\[0\] is written by this call, and was not by the recorded one"):
        f(x, y)
    assert x.tolist() == [1, 1] and y.tolist() == [1]
    with pytest.raises(ValueError, match="is written by this call"):
        f.pure(*([y, x] if "args[1]" in f.pure.input_descs[0].expr() else [x, y]))


OTHERWISE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a view": (lambda x: x[1:] if x[0] > 0 else x[1:] * 1, r"output\[0\] is a view of args\[0\]"),
    "no view": (
        lambda x: x[1:] * 1 if x[0] > 0 else x[1:],
        r"output\[0\] is a value of its own, .* \(a view of args\[0\]\)",
    ),
    "no argument": (lambda x: x * 1 if x[0] > 0 else x, r"output\[0\] is a value of its own, .* \(args\[0\]\)"),
    "not moved": (lambda x: None if x[0] > 0 else (x.unsqueeze_(0), None)[1], r"args\[0\] has another geometry"),
    "moved": (lambda x: (x.unsqueeze_(0), None)[1] if x[0] > 0 else None, r"args\[0\] has another geometry"),
    "another tree": (lambda x: [x * 1] if x[0] > 0 else {"a": x * 1}, "the result is another tree"),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_function_that_returns_or_moves_otherwise_than_recorded_is_an_error(how: str) -> None:
    fn, said = OTHERWISE[how]
    f = functionalize(fn, compiler=same)
    f(torch.tensor([-1.0, 2.0]))
    x = torch.tensor([1.0, 2.0])
    for call in (f, f.pure):
        with pytest.raises(ValueError, match=f"pure: .*{said}"):
            call(x)
    assert x.tolist() == [1, 2]


def inference() -> Any:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make",
    [lambda: (torch.ones(2, 3, requires_grad=True) * 1).unbind(0)[0], inference],
    ids=["one of several views", "inference tensor"],
)
def test_a_tensor_that_cannot_be_written_is_an_error_before_anything_is_written(make: Callable[[], Any]) -> None:
    f = functionalize(lambda y, x: (y.add_(1), x.mul_(2), None)[2], compiler=same)
    f(torch.ones(2), torch.ones(3))
    for x in (make(), make()):
        y = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"functionalize: args\[1\] is written in place, and is .* nothing was"):
            f(y, x)
        assert y.tolist() == [1, 1] and x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("change", [lambda v: v.to_sparse(), lambda v: v.to("meta"), lambda v: v[:1], lambda v: None])
def test_a_value_that_is_no_tensor_of_its_slot_is_an_error_before_anything_is_written(change: Any) -> None:
    def compiler(pure: Any) -> Any:
        return lambda *inner: [change(v) if k == 1 else v for k, v in enumerate(pure(*inner))]

    x, y = torch.ones(3), torch.ones(2)
    with pytest.raises((TypeError, ValueError), match=r"functionalize: __input_mutation\(args\[1\]\): expected"):
        functionalize(lambda y, x: (y.add_(1), x.mul_(2), None)[2], compiler=compiler)(y, x)
    assert x.tolist() == [1, 1, 1] and y.tolist() == [1, 1]


@pytest.mark.parametrize("write", [lambda x: x.detach().mul_(2), lambda x: x.data.mul_(2)], ids=["detach", "data"])
@pytest.mark.parametrize("grown", [False, True])
def test_a_write_hidden_from_autograd_is_written_back_hidden(write: Any, grown: bool) -> None:
    def make() -> list[Any]:
        leaf = torch.ones(3, requires_grad=True)
        return [leaf * 1 if grown else leaf, torch.ones(2)]

    (_, [x, y]), (_, [x2, y2]) = both(lambda x, y: (y.add_(1), write(x), None)[2], make)
    assert torch.equal(x, x2) and torch.equal(y, y2) and x2.requires_grad and x2.is_leaf == x.is_leaf


@pytest.mark.parametrize(
    "compiler", [3, "inductor", lambda p: None, lambda p: 3], ids=["3", "inductor", "None", "a number"]
)
def test_a_compiler_that_gives_no_function_is_an_error_at_once(compiler: Any) -> None:
    import numpy as np

    if not callable(compiler):
        with pytest.raises(TypeError, match=r"functionalize: compiler: expected a function that takes \.pure, got"):
            functionalize(lambda x: x, compiler=compiler)
        return
    for x in (torch.ones(2), np.ones(2)):
        with pytest.raises(TypeError, match="functionalize: compiler: expected it to return a function, got"):
            functionalize(lambda x: x * 1, compiler=compiler)(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inner", [None, "eager", "aot_eager"])
def test_a_wrapper_is_a_graph_break_to_dynamo(inner: str | None) -> None:
    compiled: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(1)
        return graph.forward

    def fn(x: Any, w: Any) -> Any:
        x.mul_(w)
        return x[1:] * 2

    compiler = None if inner is None else torch.compile(backend=backend if inner == "eager" else inner)
    f = functionalize(fn, compiler=compiler)

    def twice(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, w: f(x * 1, w) + f(x, w).sum()

    for wrap in (lambda f: f, twice):
        x, z, w = torch.arange(3.0), torch.arange(3.0), torch.full((), 2.0)
        call, plain = torch.compile(wrap(f), backend="eager"), wrap(fn)
        for _ in range(2):
            assert torch.equal(call(x, w), plain(z, w)) and torch.equal(x, z)
    assert bool(compiled) == (inner == "eager")


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "attribute": (lambda x: setattr(x, "mine", 1), "attributes are set"),
    "gradient": (lambda x: setattr(x, "grad", torch.ones(3)), "\\.grad is set"),
    "hook": (lambda x: x.register_hook(lambda g: None), "a hook is added"),
    "asks": (lambda x: x.requires_grad_(not x.requires_grad), "requires_grad is set"),
    "detach_": (lambda x: (x * 1, x.detach_()), "(its history is cut|requires_grad is set)"),
    "leaf": (lambda x: x.is_leaf, "is_leaf is read"),
    "gradient read": (lambda x: x.grad, "\\.grad is read"),
    "gradient deleted": (lambda x: setattr(x, "grad", None), "\\.grad is set"),
    "class": (lambda x: setattr(x, "__class__", torch.nn.Parameter), "its class is set, or its gradient retained"),
    "retain_grad": (lambda x: (x * 1, x.retain_grad()), "its class is set, or its gradient retained"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_attributes_set_on_an_argument_are_refused_and_nothing_is_done(how: str) -> None:
    fn, said = REFUSED[how]
    x = torch.ones(3, requires_grad=True)
    x = x * 1 if how in ("detach_", "retain_grad") else x

    def writes(y: Any, x: Any) -> None:
        y.add_(1)
        fn(x)

    y, was = torch.ones(2), (x.requires_grad, x.is_leaf, dict(x.__dict__))
    with pytest.raises(ValueError, match=rf"functionalize: args\[1\]: {said}"):
        functionalize(writes, compiler=same)(y, x)
    assert y.tolist() == [1, 1] and was == (x.requires_grad, x.is_leaf, dict(x.__dict__))
    assert not x._backward_hooks
    recorded = functionalize(writes, [y, x])
    with pytest.raises(ValueError, match=rf"args\[1\]: {said}"):
        _ = recorded.pure
    functionalize(writes)(y, x)


def test_an_argument_with_attributes_is_refused_at_each_call() -> None:
    f = functionalize(lambda x: getattr(x, "mine", 0), compiler=same)
    x = torch.ones(1)
    assert f(x) == 0
    x.mine = 5
    with pytest.raises(ValueError, match=r"args\[0\]: it has attributes, which a copy has not"):
        f(x)


def test_a_leaf_of_its_own_on_the_memory_of_an_argument_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output\[0\] is a leaf of its own on the memory of an argument"):
        functionalize(lambda x: x.detach().requires_grad_(), compiler=same)(torch.ones(2, requires_grad=True))


PLACES: dict[str, Callable[[Any], Any]] = {
    "as_strided": lambda x: x.as_strided((2,), (1,), 0) * 1,
    "as_strided_scatter": lambda x: x.as_strided_scatter(torch.zeros(2), (2,), (1,), 0),
    "storage_offset": lambda x: x.storage_offset(),
    "storage_offset of a view": lambda x: x[1:].storage_offset(),
    "untyped_storage": lambda x: x.untyped_storage().nbytes(),
    "set_": lambda x: torch.empty(0).set_(x.untyped_storage(), 0, (2,), (1,)) * 1,
}


@pytest.mark.parametrize("how", PLACES)
def test_a_place_in_a_storage_that_is_read_is_refused_where_an_argument_begins_later(how: str) -> None:
    fn, whole = PLACES[how], torch.arange(9.0)
    late = r"functionalize: args\[0\]: its place in its storage is read, or counted from .* at element 4 of 9"
    with pytest.raises(ValueError, match=late):
        functionalize(fn, compiler=same)(whole[4:7])
    f = functionalize(fn, compiler=same)
    early = whole[:3].clone()
    for _ in range(2):
        ours, theirs = f(early), fn(early)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    with pytest.raises(ValueError, match=late):
        f(whole[4:7])
    recorded = functionalize(fn, [whole[4:7]])
    with pytest.raises(ValueError, match=late):
        _ = recorded.pure
    assert functionalize(lambda x: x.as_strided((2,), (2,)) * 1, compiler=same)(whole[4:7]).tolist() == [4, 6]


def test_tensors_of_a_closure_are_written_once_a_call() -> None:
    counts = torch.zeros(2)
    norm, beside = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)

    def fn(x: Any) -> Any:
        counts[1:].add_(1)
        return norm(x)

    f = functionalize(fn, compiler=same)
    x = torch.arange(12.0).view(4, 3)
    for calls in (1, 2):
        assert torch.equal(f(x), beside(x))
        assert counts.tolist() == [0, calls] and int(norm.num_batches_tracked) == calls
        assert torch.equal(norm.running_mean, beside.running_mean)


def test_changes_of_a_tensor_of_a_closure_happen_once_with_its_history_geometry_and_gradient() -> None:
    def outcome(compiler: Any) -> tuple[object, ...]:
        w = torch.full((3,), 2.0, requires_grad=True)
        z, grown, flat, whole = torch.full((3,), 3.0), w * 2, torch.zeros(2, 3), torch.zeros(4)
        layer, part = torch.nn.Linear(3, 1), whole[1:]
        torch.nn.init.ones_(layer.weight)

        def fn(x: Any) -> Any:
            z.mul_(w)
            grown.mul_(w * 3)
            flat.t_()
            part.add_(1)
            layer(x).sum().backward()
            return x * 1

        f = functionalize(fn, compiler=compiler)
        f(torch.ones(3))
        (z.sum() + grown.sum()).backward()
        versions = [t._version for t in (z, grown, whole)]
        return (
            z.tolist(),
            grown.tolist(),
            w.grad.tolist(),
            flat.shape,
            whole.tolist(),
            layer.weight.grad.tolist(),
            versions,
        )

    assert outcome(same) == outcome(None)


def test_views_are_copied_as_views_that_may_be_written() -> None:
    from fanin.analysis import collect_metadata

    leaf = torch.ones(3, requires_grad=True)
    for x in (torch.zeros(4)[1:], torch.zeros(2, 4)[0, 1:]):
        assert collect_metadata(lambda x, w: x.mul_(w), [x, leaf]).input_info[0].mutates_data
        out = functionalize(lambda x, w: x.mul_(w), compiler=same)(x, leaf)
        assert out is x and x.requires_grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(), (3,)])
def test_no_tensor_saved_for_a_compiled_backward_is_written_back_to(shape: tuple[int, ...]) -> None:
    grads = []
    for compiler in (None, same, torch.compile(backend="aot_eager")):
        leaf, w = torch.arange(3.0, requires_grad=True), torch.full(shape, 2.0, requires_grad=True)
        x = leaf * 1
        functionalize(lambda x, w: x.mul_(w), compiler=compiler)(x, w)
        (x * x).sum().backward()
        grads.append((x.tolist(), leaf.grad.tolist(), w.grad.tolist()))
    assert grads[0] == grads[1] == grads[2]


def test_vmap_of_a_pure_function_with_an_argument_with_gaps() -> None:
    f = functionalize(lambda x: (x.mul_(2), x.sum())[1], compiler=same)
    x = torch.arange(12.0).view(3, 4)[:, ::2]
    f(x.clone().as_strided((3, 2), (2, 1)))
    gaps = torch.arange(12.0).view(3, 4)[:, ::2]
    f(gaps)
    both = torch.stack([x, x + 1])
    new, total = torch.vmap(f.pure)(both)
    assert torch.equal(new, both * 2) and torch.equal(total, both.sum((1, 2)) * 2)
    for fn in (lambda x: x.mul_(2), lambda x: x[1:], lambda x: x.t_()):
        batch = torch.arange(24.0).view(2, 3, 4)[:, :, ::2]
        values = torch.vmap(functionalize(fn, [batch[0].clone()]).pure)(batch.clone())
        assert torch.equal(values[-1], torch.stack([fn(one.clone()) for one in batch]))


def test_a_size_is_one_result_and_arguments_by_name_keep_their_order() -> None:
    import numpy as np

    f = functionalize(lambda x: (x.shape, x * 1), compiler=same)
    for _ in range(2):
        assert f(torch.ones(2, 3))[0] == torch.Size([2, 3])
    h = functionalize(lambda x, size: x.view(size) * 1, compiler=same)
    assert [tuple(h(torch.ones(2, 3), torch.Size(size)).shape) for size in ([3, 2], [6], [3, 2])] == [
        (3, 2),
        (6,),
        (3, 2),
    ]
    for one in (torch.ones(1), np.ones(1)):
        g = functionalize(lambda **named: [*named, *(x * 1 for x in named.values())], compiler=same)
        for _ in range(2):
            assert g(b=one, a=one * 2) == ["b", "a", one, one * 2]
            assert g(a=one * 2, b=one) == ["a", "b", one * 2, one]


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("guard", ["error", "specialise"])
@pytest.mark.parametrize("compiles", [True, False])
def test_a_layout_is_recorded_once_by_several_threads(library: str, guard: str, compiles: bool) -> None:
    import numpy as np

    zeros = torch.zeros if library == "torch" else np.zeros
    made: list[int] = []
    wrong: list[BaseException] = []
    start = threading.Barrier(8)

    def compiler(pure: Any) -> Any:
        made.append(1)
        return pure

    f = functionalize(lambda x: x.__iadd__(1), guard=guard, compiler=compiler if compiles else None)

    def call() -> None:
        try:
            start.wait()
            for _ in range(10):
                assert f(zeros(3)).tolist() == [1, 1, 1]
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=call) for _ in range(8)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(switch)
    assert not wrong and f.layouts == 1 and len(made) == compiles


def test_a_layout_that_is_being_recorded_keeps_no_other_waiting() -> None:
    begun, other = threading.Event(), threading.Event()

    def compiler(pure: Any) -> Any:
        if not begun.is_set():
            begun.set()
            assert other.wait(), "the second layout waits for the first"
        return pure

    f = functionalize(lambda x: x * 2, compiler=compiler)
    first = threading.Thread(target=lambda: f(torch.ones(3)))
    first.start()
    begun.wait()
    assert f(torch.ones(4)).tolist() == [2] * 4
    other.set()
    first.join()
    assert f.layouts == 2


def test_a_function_that_calls_itself_is_recorded_by_one_thread() -> None:
    def fn(x: Any, n: float) -> Any:
        return x * 2 if n == 0 else f(x, n - 1)

    f = functionalize(fn, compiler=same)
    assert f(torch.ones(3), 2.0).tolist() == [2] * 3


def test_the_first_tensor_of_a_process_is_recorded_as_all_later_ones() -> None:
    code = """
import torch
from fanin.analysis import functionalize
f = functionalize(lambda x: x, guard="error")
for _ in range(3):
    f(torch.zeros(3))
"""
    run_python(code)


# Random functions


def outcome_of(call: Callable[..., Any], args: list[Any]) -> tuple[Any, ...] | str:
    """What a call leaves: results, arguments, and the gradients of what they were grown from; or its error."""
    try:
        outs = call(*args)
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    tensors = [x for x in [*args, *outs] if isinstance(x, torch.Tensor)]
    starts = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
    shown = []
    for o in tensors:
        place = next((i for i, s in enumerate(starts) if s == o.untyped_storage().data_ptr()), None)
        place = place if o.numel() else None  # it shares no byte
        where = None if place is None else (o.storage_offset(), o.stride())
        shown.append((tuple(o.shape), str(o.dtype), o.tolist(), o.requires_grad, place, where))
    grads: Any = None
    try:
        roots = [o for o in tensors if o.requires_grad and not o.is_leaf]
    except RuntimeError as e:  # of a view that autograd refuses to speak of
        return f"RuntimeError at a view: {str(e)[:60]}"
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad]
    if roots:
        try:
            torch.stack([(o * o).sum() for o in roots]).sum().backward()
            # A backward of AOTAutograd returns zeros if no gradient arrives, and None if none is required.
            grads = [None if x.grad is None or not x.grad.any() else x.grad.tolist() for x in leaves]
        except RuntimeError as e:
            return f"RuntimeError in backward: {str(e)[:60]}"
    return shown, grads


#: Functions that return a view and one without its gradient: AOTAutograd replays the second on the first.
DETACHED: dict[str, Callable[[Any], list[Any]]] = {
    "data of a piece": lambda x: [(piece := x.split(2)[1]), piece.data],
    "detached piece": lambda x: [(piece := x.split(2)[1]), piece.detach()],
    "piece of detached": lambda x: [x.detach().split(2)[1], x.split(2)[1]],
    "slice": lambda x: [x[1:], x[1:].detach()],
    "unbound": lambda x: [(row := x.unbind(0)[1]), row.detach()],
    "of a written one": lambda x: [x.mul_(2)[2:], x[2:].detach()],
}


@pytest.mark.parametrize("backend", ["aot", "aot_eager"])
def test_a_view_returned_beside_the_same_view_detached_is_right_under_aot(backend: str) -> None:
    code = f"""
import torch
from analysis.partners.test_compiler_torch import COMPILERS, DETACHED, functionalize, outcome_of

for name, fn in DETACHED.items():
    wrapper = functionalize(fn, compiler=COMPILERS[{backend!r}])
    for _ in range(2):
        leaf, other = (torch.arange(12.0).view(4, 3).requires_grad_() for _ in range(2))
        ours, theirs = outcome_of(wrapper, [leaf * 1]), outcome_of(fn, [other * 1])
        assert ours == theirs and not isinstance(ours, str), (name, ours, theirs)
        assert torch.equal(leaf.grad, other.grad), (name, leaf.grad, other.grad)
"""
    run_python(code)


REFUSALS = (
    "a compiled function cannot do that", "expected a tensor that is not expanded", "a base of tensors has one",
    "through several storages", "share memory that is written, but no history", "is given other storage",
    "otherwise than at the recorded call", "is written by this call", "has another geometry after this call",
)  # fmt: skip

#: What is done to `g`, which has a history, `part`, a view of it, and `w`, a leaf.
GROWN: dict[str, Callable[[Any, Any, Any], object]] = {
    "times": lambda g, part, w: g.mul_(w),
    "part": lambda g, part, w: part.mul_(w[1:]),
    "inner part": lambda g, part, w: g[:2].add_(w[:2] * 3),
    "sin": lambda g, part, w: g.copy_(g.sin() * w),
    "quiet": lambda g, part, w: quietly(lambda: g.add_(1)),
    "detached": lambda g, part, w: g.detach()[1:].add_(1),
    "leaf": lambda g, part, w: w.data.mul_(2),
    "moved": lambda g, part, w: g.unsqueeze_(0),
    "attribute": lambda g, part, w: setattr(w, "mine", 1),
}


def quietly(write: Callable[[], object]) -> None:
    with torch.no_grad():
        write()


def with_history(p: Any, r: random.Random) -> tuple[Callable[..., Any], Callable[[], list[Any]]]:
    """A random program that first writes a tensor with a history; and a function that makes its
    arguments from the leaves that get gradients.
    """
    weights = [1 if name in ("moved", "attribute") else 4 for name in GROWN]
    steps = r.choices(list(GROWN), weights, k=r.randint(1, 3))
    whole, gap = r.random() < 0.5, r.random() < 0.5

    def fn(source: Any, w: Any, g: Any, part: Any, *args: Any) -> list[Any]:
        for name in steps:
            GROWN[name](g, part, w)
        return [g * w, part[1:], *p.fn(*args)]

    def make() -> list[Any]:
        source = torch.arange(1.0, 5.0).requires_grad_()
        g = source * 1
        part = g[1:] if whole else (source * 2)[1:]
        if gap:
            g, part = g[:3], part[1:] if not whole else part[:2]
        return [source, torch.full((g.numel(),), 2.0, requires_grad=True), g, part, *p.args()]

    return fn, make


def compared(n: int, compiler: Any, first: int) -> tuple[Counter[str], dict[int, Any]]:
    """Random programs beside their compiled wrappers, called twice: how many were what, and those that differ."""
    seen: Counter[str] = Counter()
    wrong: dict[int, Any] = {}
    for seed in range(first, first + n):
        r = random.Random(seed)
        p = program(r, gradients=seed % 2 == 0)
        fn, make = (p.fn, p.args) if seed % 3 else with_history(p, r)
        wrapper = functionalize(fn, compiler=compiler)
        for turn in range(2):
            eager, ours = outcome_of(fn, make()), outcome_of(wrapper, make())
            if isinstance(ours, str) and any(words in ours for words in REFUSALS):
                seen[next(words for words in REFUSALS if words in ours)] += 1
            elif isinstance(ours, str) and FAILS in ours and not isinstance(eager, str):
                seen[FAILS] += 1
            elif isinstance(eager, str):
                seen["raises in both" if isinstance(ours, str) else "raises eagerly alone"] += 1
            elif eager != ours and compiler is not same and outcome_of(compiler(fn), make()) != eager:
                seen["the compiler alone differs"] += 1  # PyTorch makes writes to expanded views functional wrongly
            elif eager != ours:
                seen["differs"] += 1
                wrong[seed] = (turn, p, eager, ours)
            else:
                seen["the same"] += 1
                seen["the same, with gradients"] += eager[1] is not None
    return seen, wrong


def aot(pure: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile's backend "aot_eager" does with a graph, without Dynamo before it: forward and backward are
    traced, made functional, and run.
    """
    from functorch.compile import aot_function, nop

    return reported(aot_function(pure, nop, nop))


def aot_eager(pure: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled anew each time: Dynamo gives up where it has compiled one function often."""
    torch._dynamo.reset()
    return reported(torch.compile(pure, backend="aot_eager"))


def reported(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; its errors are PyTorch's, which replays some views of detached results wrongly."""

    def run(*inner: Any) -> Any:
        try:
            return compiled(*inner)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as e:
            if "pure: " in str(e) or (isinstance(e, AssertionError) and "ViewMeta sequence" not in str(e)):
                raise
            raise RuntimeError(f"{FAILS}: {type(e).__name__}: {e}") from e

    return run


#: What begins the error of a compiled function itself.
FAILS = "the compiler fails"

COMPILERS = {"same": same, "aot": aot, "aot_eager": aot_eager}


def compiled_at_random(backend: str, n: int) -> Counter[str]:
    """So many random programs compiled; AssertionError with the first that differ."""
    seen, wrong = compared(n, COMPILERS[backend], 7_000_000 + n)
    print(f"{n} programs from seed {7_000_000 + n}, {backend}: {dict(seen)}")
    assert not wrong, (seen, dict(list(wrong.items())[:2]))
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "n"),
    [
        ("same", 300),
        ("aot", 60),
        ("aot_eager", 6),
        pytest.param("same", 8_000, marks=pytest.mark.slow),
        pytest.param("aot", 8_000, marks=pytest.mark.slow),
        pytest.param("aot_eager", 300, marks=pytest.mark.slow),
    ],
)
def test_random_functions_do_compiled_what_they_do_themselves(backend: str, n: int) -> None:
    seen = compiled_at_random(backend, n)
    assert seen["the same"] > n / 2 and seen["the same, with gradients"] > n / 5, seen
    assert seen[FAILS] + seen["the compiler alone differs"] <= n / 25, seen
    assert n < 300 or (seen["raises in both"] and sum(seen[words] for words in REFUSALS) > n / 50), seen


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        ("TensorPure", "_mode", lambda *_: torch.no_grad()),
        ("TensorPure", "_view", lambda self, arrays, output, value: value),
        ("TensorPure", "region", lambda self, g, arrays: torch.zeros(self.sizes[self.bases.index(g)])),
        (None, "copied", lambda x, one, roomy: x.detach().clone()),
    ],
)
def test_the_random_functions_find_a_fault_of_the_compiled_wrapper(
    where: str | None, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fanin.analysis import tensors

    monkeypatch.setattr(tensors if where is None else getattr(tensors, where), name, fault)
    with pytest.raises(AssertionError):
        compiled_at_random("same", 300)
