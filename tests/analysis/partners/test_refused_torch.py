"""The refusals of `functionalize` and `collect_metadata`: each row of the page's table has cases that raise it."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fanin.analysis import BehaviourChangedError, LayoutChangedError, collect_metadata, functionalize
from kit.support import ROOT

pytestmark = [pytest.mark.partners, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch", reason="torch is not installed")


@dataclass
class Box:
    array: Any


class Mine(torch.Tensor):  # type: ignore[misc,name-defined]
    """A subclass."""


class AsItIs(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """Gives its input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return -g


def inferred() -> Any:
    """A tensor of inference mode."""
    with torch.inference_mode():
        return torch.ones(2)


def marked() -> Any:
    """A tensor with an attribute."""
    x = torch.ones(2)
    x.mark = 1
    return x


def nothing(*args: Any) -> None:
    """It does nothing with what it is given."""


def given(*args: Any, fn: Callable[..., Any] = nothing) -> list[Callable[[], Any]]:
    """A call of the wrapper, and a collection."""
    return [lambda: functionalize(fn)(*args), lambda: collect_metadata(fn, list(args))]


def compiled(fn: Callable[..., Any], *args: Any, by: Any = lambda pure: pure) -> list[Callable[[], Any]]:
    """Two calls with a compiler: of arrays the second one runs what was compiled."""

    def call() -> None:
        f = functionalize(fn, compiler=by)
        for _ in range(2):
            f(*args)

    return [call]


def held(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """Calls of a wrapper that holds the first."""

    def call() -> None:
        f = functionalize(fn, calls[0], guard="error")
        for args in calls:
            f(*args)

    return [call]


def itself() -> list[Any]:
    box: list[Any] = [np.zeros(2)]
    box.append(box)
    return box


def quietly(make: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def quantized() -> Any:
    return quietly(torch.quantize_per_tensor, torch.ones(2), 0.1, 0, torch.qint8)


def generator(x: Any) -> Any:
    yield x


async def coroutine(x: Any) -> Any:
    return x


def leaves_autocast(x: Any) -> None:
    torch.set_autocast_enabled("cpu", True)


def shown(x: Any) -> list[Callable[[], Any]]:
    """Something that shows its memory beside an array of the same memory."""
    array = np.frombuffer(x, "u1") if not isinstance(x, torch.Tensor) else x.numpy()
    return [lambda: collect_metadata(nothing, [array, x]), *compiled(nothing, array, x)]


def gives(make: Callable[[Any], Any], x: Any = None) -> list[Callable[[], Any]]:
    """A function that returns what `make` makes of its argument."""
    x = np.zeros(4) if x is None else x
    return [lambda: collect_metadata(make, [x]), *compiled(make, x)]


def grows(x: Any) -> None:
    x.resize(9, refcheck=False)


def collected(x: Any) -> None:
    collect_metadata(nothing, [x])


def mapped(call: Callable[[Any], Any]) -> None:
    torch.func.vmap(call)(torch.ones(3, 2))


def negative() -> Any:
    return torch.ones(2, dtype=torch.complex64).conj().imag


def slices() -> Any:
    return functionalize(lambda x, i: x[i : i + 1], [torch.arange(4.0), 0])


def writes_where_negative() -> Any:
    return functionalize(lambda x: x.add_(1) if x[0] < 0 else x * 2, [torch.ones(2)])


X, FLAT = np.zeros(4), torch.zeros(8)
BYTES = bytearray(8)
PURE = functionalize(lambda x: x * 2, [X])

#: The beginning of each row -> (the error, the cases)
REFUSED: dict[str, tuple[type[BaseException], list[Callable[[], Any]]]] = {
    "object arrays": (
        TypeError,
        [
            *given(np.array([1, None])),
            *given(np.array(["a"], dtype=np.dtypes.StringDType())),
            *given(np.ma.array([1])),
            *given(np.zeros(2).view(np.recarray)),
        ],
    ),
    "containers": (
        TypeError,
        [*given(Box(X)), *given({1: Box(X)}), *given(partial(nothing, X)), *given({(1,): {0: Box(X)}})],
    ),
    "iterators (generators": (
        TypeError,
        [*given(iter([X])), *given(zip([X], [X], strict=True)), *given(map(abs, [X])), *given({1: X}.values())]
        + [*given(itertools.chain([X])), *given(np.nditer(X)), *given(y for y in [X])],
    ),
    "lists and dicts": (RecursionError, given(itself())),
    "arrays of two libraries": (TypeError, given(X, FLAT)),
    "arrays that reach": (ValueError, [*given(as_strided(np.zeros(1), (2,), (1 << 62,)))]),
    "tensor subclasses": (
        TypeError,
        [
            *given(torch.ones(2).as_subclass(Mine)),
            *given(quietly(torch.nested.nested_tensor, [torch.ones(2), torch.ones(1)])),
            *[partial(mapped, call) for call in (partial(functionalize(nothing)), collected)],
        ],
    ),
    "tensors on other devices": (
        ValueError,
        [given(t)[0] for t in (torch.ones(2, device="meta"), torch.ones(2).to_sparse(), quantized())],
    ),
    "a bytearray": (TypeError, [*shown(BYTES), *shown(memoryview(BYTES)), *shown(torch.zeros(2))]),
    "more or fewer": (
        TypeError,
        [
            *given(X, X, fn=lambda x: None),
            *given(fn=lambda x: None),
            lambda: collect_metadata(nothing, X),  # type: ignore[arg-type]
            lambda: functionalize(nothing, X),  # type: ignore[arg-type]
        ],
    ),
    "what is no function, generator": (
        TypeError,
        [case for fn in (3, generator, coroutine) for case in given(X, fn=fn)],  # type: ignore[arg-type]
    ),
    "unknown `guard`": (
        ValueError,
        [
            lambda: functionalize(nothing, guard="no"),
            lambda: functionalize(nothing, lend=True, guard="error"),
            lambda: functionalize(nothing, lend=True, compiler=lambda pure: pure),
            lambda: functionalize(nothing, layouts=0),
            lambda: collect_metadata(nothing, [X], requires_grad=[]),
            lambda: collect_metadata(nothing, [X], args_descs=[]),
        ],
    ),
    "a static input": (IndexError, [lambda: collect_metadata(nothing, [X], static_input_indices=[1])]),
    "another layout": (LayoutChangedError, held(nothing, (X,), (X[1:],))),
    "writes, geometry": (
        BehaviourChangedError,
        [
            *held(lambda x, on: x.fill(1) if on[0] else None, (X, [0]), (X, [1])),
            *held(lambda x, on: x if on[0] else None, (X, [0]), (X, [1])),
        ],
    ),
    "iterators, and": (
        TypeError,
        [
            *gives(iter),
            *gives(memoryview),
            *gives(lambda x: x.flat),
            *gives(Box),
            *gives(torch.from_numpy),
            *gives(lambda x: np.ctypeslib.as_ctypes(x)),
            *gives(lambda x: x[0], np.zeros(2, "i4,f4")),
        ],
    ),
    "subclasses of ndarray": (TypeError, compiled(lambda x: np.ma.array(x, copy=False), X)),
    "autocast": (RuntimeError, [lambda: collect_metadata(leaves_autocast, [FLAT])]),
    "a function that changes": (
        ValueError,
        [
            *compiled(lambda box: box.append(1), [X]),
            lambda: functionalize(grows, [np.zeros(2)], compiler=lambda pure: pure)(np.zeros(2)),
            *compiled(lambda x: x.resize_(20), torch.zeros(2)),
        ],
    ),
    "written tensors": (
        ValueError,
        [
            *compiled(lambda a, b: a.add_(1), FLAT[:4], FLAT.view(torch.int32)[2:]),
            *compiled(lambda a, b: a.add_(1), torch.from_numpy(X), torch.from_numpy(X)),
            *compiled(lambda a: a.detach().numpy().fill(1), FLAT[:1].expand(3)),
        ],
    ),
    "tensors whose conjugate": (
        ValueError,
        [
            *compiled(lambda x: x * 2, torch.ones(2, dtype=torch.complex64).conj()),
            *compiled(lambda x: x * 2, negative()),
        ],
    ),
    "a view by a `torch": (
        ValueError,
        [
            *compiled(AsItIs.apply, torch.ones(2, requires_grad=True)),
            *compiled(lambda x: x.detach().numpy(), torch.ones(2)),
            *compiled(lambda x: x.untyped_storage(), torch.ones(2)),
            *compiled(lambda x: x.grad_fn, torch.ones(2, requires_grad=True)),
            lambda: functionalize(lambda x: AsItIs.apply(x), [torch.ones(2, requires_grad=True)]).pure,
        ],
    ),
    "attributes, `.grad`": (
        ValueError,
        [
            *compiled(lambda x: setattr(x, "mark", 1), torch.ones(2)),
            *compiled(lambda x: setattr(x, "grad", torch.ones(2)), torch.ones(2, requires_grad=True)),
            *compiled(lambda x: x.register_hook(abs), torch.ones(2, requires_grad=True)),
            *compiled(lambda x: x.requires_grad_(), torch.ones(2)),
            *compiled(lambda x: x.detach_(), torch.ones(2, requires_grad=True) * 1),
            *compiled(lambda x: x.detach().requires_grad_(), torch.ones(2, requires_grad=True)),
            *compiled(lambda x: x.retain_grad(), torch.ones(2, requires_grad=True) * 1),
            *compiled(lambda x: setattr(x, "__class__", torch.nn.Parameter), torch.ones(2)),
            *compiled(nothing, marked()),
            *compiled(lambda x: x.is_leaf, torch.ones(2, requires_grad=True)),
            *compiled(lambda x: x.grad, torch.ones(2, requires_grad=True)),
            lambda: functionalize(lambda x: x.is_leaf, [torch.ones(2, requires_grad=True)]).pure,
        ],
    ),
    "`storage_offset()`": (
        ValueError,
        [
            *compiled(lambda x: x.as_strided((2,), (1,), 0), torch.arange(9.0)[4:7]),
            *compiled(lambda x: x.storage_offset(), torch.arange(9.0)[4:7]),
            *compiled(lambda x: x.untyped_storage().nbytes(), torch.arange(9.0)[4:7]),
            lambda: functionalize(lambda x: x.storage_offset(), [torch.arange(9.0)[4:7]]).pure,
        ],
    ),
    "a written tensor that torch": (
        RuntimeError,
        [
            *compiled(lambda x: x.mul_(2), (torch.ones(2, 3, requires_grad=True) * 1).unbind(0)[0]),
            *compiled(lambda x: x.mul_(2), inferred()),
        ],
    ),
    "another view": (
        ValueError,
        [
            lambda: slices().pure(torch.arange(4.0), 2),
            lambda: writes_where_negative().pure(-torch.ones(2)),
        ],
    ),
    "what is no function, or a compiler": (
        TypeError,
        [
            lambda: functionalize(nothing, compiler=3),  # type: ignore[arg-type]
            *compiled(lambda x: x * 2, X, by=lambda pure: None),
        ],
    ),
    "values of another number": (
        ValueError,
        [
            *compiled(lambda x: x * 2, np.zeros(2), by=lambda pure: lambda *inner: []),
            *compiled(lambda x: x.fill(1), np.zeros(2), by=lambda pure: lambda *inner: [np.zeros(3), None]),
        ],
    ),
    "arguments of another number": (
        ValueError,
        [
            lambda: PURE.pure(),
            lambda: PURE.pure(X[1:]),
            lambda: PURE.pure(X.astype("f4")),
            lambda: functionalize(lambda x, n: x if n else x * 2, [X, 0]).pure(X, 1),
        ],
    ),
}


def rows() -> list[str]:
    page = (ROOT / "docs" / "analysis.md").read_text()
    table = page.partition("### What is refused")[2].partition("**Limits.**")[0]
    return re.findall(r"^\| (?!what \|)(.*) \|$", table, re.MULTILINE)


@pytest.mark.parametrize("what", REFUSED)
def test_each_row_of_the_table_is_refused_with_its_error(what: str) -> None:
    (row,) = [row for row in rows() if row.startswith(what)]
    error, cases = REFUSED[what]
    assert error.__name__ in row.rpartition(" | ")[2]
    for case in cases:
        try:
            with pytest.raises(error) as raised:
                case()
        finally:
            torch.set_autocast_enabled("cpu", False)
        assert type(raised.value) is error, raised.value
        said = str(raised.value)
        assert re.search(r"functionalize|collect_metadata|pure|contains itself", said), said


def test_every_row_of_the_table_has_a_case() -> None:
    assert len(rows()) == len(REFUSED) and not X.any() and not FLAT.any()


def test_collect_metadata_refuses_the_tensors_that_functionalize_refuses() -> None:
    for t in (torch.ones(2, device="meta"), torch.ones(2).to_sparse(), quantized()):
        with pytest.raises(
            ValueError, match=r"collect_metadata: args\[0\]: expected a (strided tensor on the CPU|tensor)"
        ):
            collect_metadata(nothing, [t])
    with pytest.raises(TypeError, match="as a list; got None"):
        compiled(lambda x: x * 2, np.zeros(2), by=lambda pure: lambda *inner: None)[0]()
