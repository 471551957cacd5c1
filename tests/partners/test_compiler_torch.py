"""`functionalize(fn, compiler=..)` and `.pure` of tensors beside the function itself: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fanin.analysis import functionalize

torch = pytest.importorskip("torch")
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


@pytest.mark.parametrize("write", [lambda x: x.detach().mul_(2), lambda x: x.data.mul_(2)], ids=["detach", "data"])
@pytest.mark.parametrize("grown", [False, True])
def test_a_write_that_autograd_does_not_see_is_written_back_so(write: Any, grown: bool) -> None:
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
    for wrap in (lambda f: f, lambda f: lambda x, w: f(x * 1, w) + f(x, w).sum()):
        x, z, w = torch.arange(3.0), torch.arange(3.0), torch.full((), 2.0)
        call, plain = torch.compile(wrap(f), backend="eager"), wrap(fn)
        for _ in range(2):
            assert torch.equal(call(x, w), plain(z, w)) and torch.equal(x, z)
    assert bool(compiled) == (inner == "eager")
