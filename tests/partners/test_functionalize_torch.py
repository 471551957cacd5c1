"""`functionalize` of functions on torch tensors: the law over random programs, and what each tensor is afterwards."""

from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fanin.analysis import BehaviourChangedError, LayoutChangedError, OutputType, collect_metadata, functionalize

pytestmark = [pytest.mark.partners]

torch = pytest.importorskip("torch", reason="torch is not installed")

import programs_torch  # noqa: E402

SEED = os.environ.get("FANIN_SEED", "20261121")
DTYPES = [torch.float32, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bfloat16, torch.complex64]


class World:
    """One or two storages, tensors on them, the arguments."""

    def __init__(self, layout: int, data: int) -> None:
        draw, fill = random.Random(layout), random.Random(data)
        self.storages = [
            torch.frombuffer(bytearray(fill.randbytes(128)), dtype=torch.uint8).clone()
            for _ in range(draw.choice([1, 1, 2]))
        ]
        self.tensors = [self.view(draw.choice(self.storages), draw) for _ in range(draw.choice([1, 2, 3, 4]))]
        args: list[Any] = [*self.tensors, 3]
        if draw.random() < 0.3:
            args.append(draw.choice(self.tensors))
        if draw.random() < 0.2:
            args = [args[0], {"rest": args[1:]}]
        self.args = args

    def view(self, storage: Any, draw: random.Random) -> Any:
        dtype = draw.choice(DTYPES)
        flat = storage.view(dtype)
        size = [draw.choice([1, 2, 3]) for _ in range(draw.choice([0, 1, 2, 2]))]
        if draw.random() < 0.05 and size:
            size[0] = 0
        stride = [draw.choice([0, 1, 2, 3]) if draw.random() < 0.3 else 1 + 2 * d for d in range(len(size))]
        reach = sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
        return flat.as_strided(size, stride, draw.randrange(max(1, flat.numel() - reach)))


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [x for item in tree for x in leaves(item)]
    return [x for item in tree.values() for x in leaves(item)] if isinstance(tree, dict) else [tree]


def body(numbers: list[int]) -> Any:
    """The function that a list of numbers is."""
    steps = (
        programs_torch.VIEWS
        + programs_torch.WRITES
        + programs_torch.WRITES
        + programs_torch.GEOMETRY
        + programs_torch.FRESH
    )

    def fn(*args: Any) -> Any:
        pool = [x for x in leaves(args) if isinstance(x, torch.Tensor)]
        for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=False):
            step = steps[a % len(steps)]
            if step == "data":
                continue  # gives the tensor other storage than its own
            try:
                if a % 5 == 0:
                    np.asarray(pool[b % len(pool)].numpy())[...] = 1
                elif a % 7 == 0 and pool[b % len(pool)].is_contiguous():
                    pool.append(pool[b % len(pool)].view(torch.uint8))
                else:
                    programs_torch.apply(pool, (step, b, c))
            except (RuntimeError, TypeError, ValueError, ArithmeticError, IndexError):
                continue
        return [pool[n % len(pool)] for n in numbers[:4]] + [pool[-1], None]

    return fn


def place(t: Any, w: World) -> Any:
    starts = [s.data_ptr() for s in w.storages]
    start = t.untyped_storage().data_ptr()
    return (starts.index(start), t.storage_offset() * t.element_size()) if start in starts else None


def tell(result: Any, w: World) -> list[Any]:
    names = {id(t): f"argument {i}" for i, t in enumerate(w.tensors)}
    told: list[Any] = [s.tolist() for s in w.storages]
    told += [(tuple(t.shape), t.stride(), place(t, w), t.dtype) for t in w.tensors]
    own: dict[int, int] = {}
    for o in leaves(result):
        if isinstance(o, torch.Tensor):
            where = place(o, w)
            shared = None if where else own.setdefault(o.untyped_storage().data_ptr(), len(own))
            told.append(
                (
                    names.setdefault(id(o), f"output {len(names)}"),
                    tuple(o.shape),
                    o.stride(),
                    o.dtype,
                    o.is_conj(),
                    where,
                    shared,
                    repr(o.tolist()),
                )
            )
        else:
            told.append(o)
    return told


def test_calling_the_wrapper_leaves_all_as_calling_the_function_itself() -> None:
    seed = random.randrange(2**32) if SEED == "random" else SEED
    print(f"FANIN_SEED={seed}")
    source, seen = random.Random(seed), Counter[str]()
    for k in range(2000):
        layout, numbers = source.getrandbits(32), [source.getrandbits(16) for _ in range(3 * (k % 7))] + [1, 2, 3]
        fn = body(numbers)
        f = functionalize(fn, lend=k % 4 == 3)
        for data in (1, 2) if k % 2 else (1,):
            one, two = World(layout, data + k), World(layout, data + k)
            before = tell([], one)
            expected, found = tell(fn(*one.args), one), tell(f(*two.args), two)
            assert expected == found, f"program {k} of seed {seed}: layout {layout}, {numbers}"
            seen["written"] += before[: len(one.storages)] != expected[: len(one.storages)]
            seen["untouched"] += before == expected[: len(before)]
            seen["views"] += any(isinstance(t, tuple) and len(t) == 8 and t[5] is not None for t in expected)
            seen["geometry"] += before[len(one.storages) :] != expected[len(one.storages) : len(before)]
    assert seen["written"] > 700 and seen["untouched"] > 300 and seen["views"] > 1000 and seen["geometry"] > 20, seen


def test_outputs_are_views_of_the_callers_tensors() -> None:
    flat = torch.arange(8.0)
    a, b = flat[:5], flat[3:]

    def fn(a: Any, b: Any) -> Any:
        b += 1
        return a, a[1:], b.view(torch.int32), b.numpy()[1:]

    f = functionalize(fn)
    for k in (1, 2):
        version = flat._version
        out = f(a, b)
        assert out[0] is a and out[1]._base is flat and out[1].data_ptr() == a.data_ptr() + 4
        assert (
            out[2].dtype == torch.int32 and out[2].data_ptr() == b.data_ptr() and out[3].ctypes.data == b.data_ptr() + 4
        )
        assert flat.tolist() == [0, 1, 2, *(x + k for x in (3.0, 4, 5, 6, 7))]
        assert flat._version > version, "whoever saved the tensor for a backward is told that it was written"


VIEWS_OF_OTHER_DTYPES = {
    "int32": (torch.float32, lambda x: x.view(torch.int32)),
    "int16": (torch.float32, lambda x: x.view(torch.int16)),
    "int64": (torch.float32, lambda x: x.view(torch.int64)),
    "uint8, from 1 on": (torch.float32, lambda x: x[1:].view(torch.uint8)),
    "real": (torch.complex64, lambda x: x.real),
    "imag": (torch.complex64, lambda x: x.imag),
    "view_as_real": (torch.complex64, torch.view_as_real),
    "floats of complex": (torch.complex64, lambda x: x.view(torch.float32)),
    "int32 of complex": (torch.complex64, lambda x: x.view(torch.int32)),
    "doubles of complex": (torch.complex64, lambda x: x.view(torch.float64)),
    "view_as_complex": (torch.float32, lambda x: torch.view_as_complex(x.view(2, 2))),
    "doubles as complex": (torch.float32, lambda x: x.view(torch.float64)[:1].view(torch.complex64)),
    "empty": (torch.float32, lambda x: x[4:].view(torch.int32)),
}


@pytest.mark.parametrize("name", VIEWS_OF_OTHER_DTYPES)
def test_a_write_to_a_view_of_another_dtype_is_counted_by_whoever_saved_the_tensor(name: str) -> None:
    dtype, view = VIEWS_OF_OTHER_DTYPES[name]
    x, w = torch.arange(4).to(dtype), torch.ones(4, dtype=dtype, requires_grad=True)
    expected = view(x)
    v = functionalize(view)(x)
    y = (w * x).sum().abs()
    assert v.dtype == expected.dtype and v.stride() == expected.stride() and v.data_ptr() == expected.data_ptr()
    assert v._base is x or expected._base is not x
    v.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_gradients_follow_the_views_of_complex_numbers_that_eager_follows() -> None:
    for name in ("real", "imag", "view_as_real", "view_as_complex"):
        dtype, view = VIEWS_OF_OTHER_DTYPES[name]
        grads = []
        for fn in (view, functionalize(view)):
            x, w = torch.arange(4).to(dtype), torch.ones((), requires_grad=True)
            fn(x).mul_(w)
            x.abs().sum().backward()
            grads.append(w.grad)
        assert torch.equal(*grads), name


def test_a_write_that_changes_no_byte_is_counted() -> None:
    x, y = torch.ones(3), torch.ones(3)
    f = functionalize(lambda a, b: (a[1:].mul_(1), b.sum())[1])
    for _ in range(2):
        versions = x._version, y._version
        f(x, y)
        assert x._version > versions[0] and y._version == versions[1]
    with torch.inference_mode():
        z = torch.ones(3)
        f(z, z.clone())
    assert z.tolist() == [1, 1, 1]


def test_what_cannot_be_rebuilt_is_named() -> None:
    x = torch.zeros(3)
    f = functionalize(lambda a, b: a.add_(1))
    for bad, error, words in [
        (torch.ones(2, requires_grad=True), ValueError, r"args\[1\]: expected a tensor that asks for no gradient"),
        (torch.nn.Parameter(torch.ones(2)), TypeError, r"args\[1\]: expected a plain torch.Tensor, got Parameter"),
        (torch.ones(2, dtype=torch.complex64).conj(), ValueError, r"args\[1\]: .*conjugate"),
        (torch.ones(2).to_sparse(), ValueError, r"args\[1\]: .*sparse"),
        (torch.ones(2, device="meta"), ValueError, r"args\[1\]: .*meta"),
        (np.ones(2), TypeError, r"args\[0\] is a Tensor and args\[1\] is a ndarray"),
    ]:
        with pytest.raises(error, match=words):
            f(x, bad)
    y = torch.ones(2)
    f(x, y)
    with pytest.raises(ValueError, match=r"args\[1\]: expected a tensor that asks for no gradient"):
        f(x, y.requires_grad_())
    assert x.tolist() == [1, 1, 1]


def test_other_storage_and_gradients_asked_for_are_refused_before_a_write() -> None:
    def moves(a: Any, b: Any) -> None:
        a.add_(1)
        b.set_(torch.zeros(9))

    def asks(a: Any, b: Any) -> None:
        a.add_(1)
        b.requires_grad_()

    for fn, words in [
        (moves, "other storage"),
        (asks, "ask for a gradient"),
        (lambda a, b: (a.add_(1), b.resize_(50)), "other storage"),
    ]:
        a, b = torch.zeros(2), torch.zeros(2)
        with pytest.raises(ValueError, match=rf"args\[1\] was .*{words}"):
            functionalize(fn)(a, b)
        assert a.tolist() == [0, 0] and tuple(b.shape) == (2,)


def test_layouts_and_behaviour_are_held_with_the_guard() -> None:
    def fn(a: Any, b: Any, on: bool) -> Any:
        a += 1
        if on:
            b += 1
        return a

    a, b = torch.zeros(2), torch.zeros(2)
    f = functionalize(fn, (a, b, False), guard="error")
    assert f.meta.input_info[0].mutates_data and f.meta.output_info[0].output_type is OutputType.is_input
    f(a, b, False)
    with pytest.raises(BehaviourChangedError, match=r"args\[1\] is written by this call"):
        f(a, b, True)
    for args, words in [
        ((a, a, False), "overlap"),
        ((a, b.double(), False), "dtype: expected torch.float32, found torch.float64"),
        ((a, b[:1], False), "shape"),
    ]:
        with pytest.raises(LayoutChangedError, match=words):
            f(*args)
    assert a.tolist() == [1, 1] and b.tolist() == [0, 0]
    for name in ("meta", "pure"):
        g = functionalize(fn)
        g(a, b, False)
        with pytest.raises(AttributeError, match=f"functionalize: .{name} "):
            getattr(g, name)


def test_metadata_of_nested_tensors_is_collected() -> None:
    def fn(state: dict[str, Any], *, g: Any) -> Any:
        state["w"] -= g
        return state["w"][1:]

    meta = collect_metadata(fn, [{"n": 1, "w": torch.ones(3)}], {"g": torch.ones(3)})
    assert [i.mutates_data for i in meta.input_info] == [False, True, False]
    assert [(o.output_type, o.base_idx) for o in meta.output_info] == [(OutputType.alias_of_input, 1)]


@dataclass
class Held:
    tensor: Any


def test_containers_of_tensors_are_taken_apart_or_refused() -> None:
    def fn(state: Any) -> Any:
        state["w"] += 1
        best = torch.max(state["w"].view(2, 2), 0, out=(state["v"], state["i"]))
        return best, OrderedDict(tail=state["w"][1:])

    for call in (fn, functionalize(fn)):
        state = OrderedDict(w=torch.zeros(4), v=torch.zeros(2), i=torch.zeros(2, dtype=torch.int64))
        best, out = call(state)
        assert best.values is state["v"] and best.indices is state["i"] and type(best) is torch.return_types.max_out
        assert out["tail"]._base is state["w"] and state["w"].tolist() == [1, 1, 1, 1]
    assert [i.mutates_data for i in collect_metadata(fn, [state]).input_info] == [True, True, True]

    x = torch.zeros(3)
    for run in (lambda fn, x: functionalize(fn)(x), lambda fn, x: collect_metadata(fn, [[x, x.clone()], x])):
        with pytest.raises(TypeError, match=r"output\[0\] is a Held that holds memory of an input"):
            run(lambda x, y=None: Held((x[0] if isinstance(x, list) else x)[1:]), x)
    for run in (
        lambda x: functionalize(lambda h: None)(x),
        lambda x: collect_metadata(lambda h, y: None, [x, torch.ones(1)]),
    ):
        for box in (Held(x), {x}, {1: Held([x])}):
            with pytest.raises(TypeError, match=r"args\[0\].*: expected arrays in lists, .* that holds a Tensor"):
                run(box)
