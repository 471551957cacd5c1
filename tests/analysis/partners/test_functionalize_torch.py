"""`functionalize` of functions on torch tensors: the law over random programs, and what each tensor is afterwards."""

from __future__ import annotations

import os
import random
import re
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fanin.analysis import BehaviourChangedError, LayoutChangedError, OutputType, collect_metadata, functionalize

pytestmark = [pytest.mark.partners]

torch = pytest.importorskip("torch", reason="torch is not installed")

from kit import programs_torch  # noqa: E402

SEED = os.environ.get("FANIN_SEED", "20261121")
DTYPES = [torch.float32, torch.float32, torch.float64, torch.int32, torch.uint8, torch.bfloat16, torch.complex64]


class World:
    """One or two storages, aligned or not, tensors on them, some with a history or requiring a gradient; the
    arguments, and the leaves of all graphs.
    """

    def __init__(self, layout: int, data: int, gradients: bool = False) -> None:
        draw, fill = random.Random(layout), random.Random(data)
        self.storages = [self.storage(draw, fill) for _ in range(draw.choice([1, 1, 2]))]
        self.leaves: list[Any] = []
        kinds = (
            ["plain"] * len(self.storages)
            if not gradients
            else [draw.choice(["plain", "leaf", "grown"]) for _ in self.storages]
        )
        self.roots = [self.root(s, kind) for s, kind in zip(self.storages, kinds, strict=True)]
        self.tensors = [self.view(draw.choice(self.roots), draw) for _ in range(draw.choice([1, 2, 3, 4]))]
        if gradients:
            self.tensors = [draw.choice(self.roots) if draw.random() < 0.2 else t for t in self.tensors]
            self.leaves.append(torch.full((), 2.0).requires_grad_())
            self.tensors.append(self.leaves[-1])
        args: list[Any] = [*self.tensors, 3]
        if draw.random() < 0.3:
            args.append(draw.choice(self.tensors))
        if draw.random() < 0.2:
            args = [args[0], {"rest": args[1:]}]
        self.args = args

    def storage(self, draw: random.Random, fill: random.Random) -> Any:
        noise = torch.frombuffer(bytearray(fill.randbytes(128)), dtype=torch.uint8)
        if draw.random() < 0.5:
            return noise.clone()
        memory = np.zeros(256, "u1")
        start = -memory.ctypes.data % 64 + draw.choice([0, 8, 16, 24])
        whole = torch.from_numpy(memory[start : start + 128])
        return whole.copy_(noise)

    def root(self, storage: Any, kind: str) -> Any:
        """The tensor that all of a storage's are views of."""
        if kind == "plain":
            return storage
        floats = storage.view(torch.float32)
        floats.copy_(torch.arange(32.0) % 7)
        if kind == "leaf":
            self.leaves.append(floats.detach().requires_grad_())
            return self.leaves[-1]
        self.leaves.append(torch.ones(32, requires_grad=True))
        grown = self.leaves[-1] * 1
        grown.data = floats.detach()
        return grown

    def view(self, root: Any, draw: random.Random) -> Any:
        dtype = draw.choice(DTYPES)
        flat = root.view(dtype) if root.dtype == torch.uint8 else root
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


def body(numbers: list[int], stops: bool = False) -> Any:
    """The function that a list of numbers is."""
    steps = (
        programs_torch.VIEWS
        + programs_torch.WRITES
        + programs_torch.WRITES
        + programs_torch.GEOMETRY
        + programs_torch.FRESH
        + tuple(f"no_grad {op}" for op in programs_torch.WRITES)
        + ("resize_", "requires_grad_", "detach_", "thread", "iterator")
    )

    def fn(*args: Any) -> Any:
        pool = [x for x in leaves(args) if isinstance(x, torch.Tensor)]
        for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=False):
            step = steps[a % len(steps)]
            if step == "data":
                continue  # gives the tensor other storage than its own
            try:
                x = pool[b % len(pool)]
                if step == "resize_":
                    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
                    if c % 7 > room or (stops and not (x.is_contiguous() and 0 < c % 7 <= x.numel())):
                        continue  # new memory holds anything; what the arguments do not show is not put back
                    x.resize_((c % 7,)).zero_()
                elif step == "requires_grad_":
                    x.requires_grad_()
                elif step == "detach_":
                    x.detach_()
                elif step == "thread":
                    other = threading.Thread(target=lambda x=x: x.detach().zero_())
                    other.start()
                    other.join()
                elif step == "iterator":
                    pool.extend(y for y in iter(x[:2] if x.ndim else [x]))
                elif a % 5 == 0:
                    np.asarray(pool[b % len(pool)].numpy())[...] = 1
                elif a % 7 == 0 and pool[b % len(pool)].is_contiguous():
                    pool.append(pool[b % len(pool)].view(torch.uint8))
                else:
                    programs_torch.apply(pool, (step, b, c))
            except (RuntimeError, TypeError, ValueError, ArithmeticError, IndexError):
                continue
        if stops:
            raise KeyError
        return [pool[n % len(pool)] for n in numbers[:4]] + [pool[-1], None]

    return fn


def place(t: Any, w: World) -> Any:
    starts = [s.data_ptr() for s in w.storages]
    start = t.untyped_storage().data_ptr()
    return (starts.index(start), t.storage_offset() * t.element_size()) if start in starts else None


def description(result: Any, w: World) -> list[Any]:
    names = {id(t): f"argument {i}" for i, t in enumerate(w.tensors)}
    described: list[Any] = [s.tolist() for s in w.storages]
    described += [(tuple(t.shape), t.stride(), place(t, w), t.dtype) for t in w.tensors]
    own: dict[int, int] = {}
    for o in leaves(result):
        if isinstance(o, torch.Tensor):
            where = place(o, w)
            shared = None if where else own.setdefault(o.untyped_storage().data_ptr(), len(own))
            described.append(
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
            described.append(o)
    return described


def of_autograd(result: Any, w: World) -> list[Any]:
    """Which tensors require a gradient, which are leaves, versions, and the gradients of all leaves of all histories,
    of first and second order.
    """
    tensors = [t for t in (*w.tensors, *w.roots, *leaves(result)) if isinstance(t, torch.Tensor)]
    described: list[Any] = []
    ends = []
    for t in tensors:
        try:
            described.append((t.requires_grad, t.is_leaf, t._version))
            ends += [t] if t.requires_grad and t.grad_fn is not None else []
        except RuntimeError as e:  # a view of a custom function whose base was written
            described.append(str(e))
    of = [t for t in w.leaves if t.requires_grad]
    if not ends or not of:
        return described
    try:
        total = sum((torch.view_as_real(t) if t.is_complex() else t).double().square().sum() for t in ends)
        first = torch.autograd.grad(total, of, create_graph=True, allow_unused=True)
        described += [None if g is None else repr(g.tolist()) for g in first]
        again = [g for g in first if g is not None and g.requires_grad]
        if again:
            second = torch.autograd.grad(sum(g.sum() for g in again), of, allow_unused=True)
            described += [None if g is None else repr(g.tolist()) for g in second]
    except RuntimeError as e:
        described.append(re.sub("0x[0-9a-f]+", "..", str(e)))
    return described


def law(count: int, seed: Any) -> Counter[str]:
    """Many programs, gradients and all: a call of the wrapper is one of the function, and a call that raises is
    none.
    """
    print(f"FANIN_SEED={seed}")
    source, seen = random.Random(seed), Counter[str]()
    for k in range(count):
        layout, numbers = source.getrandbits(32), [source.getrandbits(16) for _ in range(3 * (k % 6))] + [1, 2, 3]
        stops = k % 3 == 0
        fn, where = body(numbers, stops), f"program {k} of seed {seed}: layout {layout}, {numbers}"
        f = functionalize(fn, lend=k % 8 == 7 and not stops)
        for data in (1, 2) if k % 2 else (1,):
            one, two = World(layout, data + k, True), World(layout, data + k, True)
            before = description([], two), of_autograd([], one)
            if stops:
                with pytest.raises(KeyError):
                    f(*two.args)
                assert before == (description([], two), of_autograd([], two)), where
                seen["undone"] += 1
                continue
            one = World(layout, data + k, True)
            expected, found = fn(*one.args), f(*two.args)
            assert description(expected, one) == description(found, two), where
            described = of_autograd(expected, one), of_autograd(found, two)
            assert described[0] == described[1], where
            seen["gradients"] += any(isinstance(x, str) and x.startswith("[") for x in described[0])
            seen["errors of a backward"] += isinstance(described[0][-1], str) and not described[0][-1].startswith("[")
        seen["programs"] += 1
    return seen


@pytest.mark.parametrize("part", range(4))
def test_gradients_and_values_of_random_programs_are_those_of_the_function_itself(part: int) -> None:
    seed = random.randrange(2**32) if SEED == "random" else f"{SEED}, quarter {part}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = law(2500, seed)
    print(dict(seen))
    assert seen["undone"] > 1000 and seen["gradients"] > 1500 and seen["errors of a backward"] > 700, seen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_the_law_holds_for_many_more_programs_with_gradients(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = law(10_000, f"{SEED}, part {part}")
    print(dict(seen))
    assert seen["undone"] > 4500 and seen["gradients"] > 6000 and seen["errors of a backward"] > 3000, seen


def test_calling_the_wrapper_has_the_effects_of_calling_the_function() -> None:
    seed = random.randrange(2**32) if SEED == "random" else SEED
    print(f"FANIN_SEED={seed}")
    source, seen = random.Random(seed), Counter[str]()
    for k in range(2000):
        layout, numbers = source.getrandbits(32), [source.getrandbits(16) for _ in range(3 * (k % 7))] + [1, 2, 3]
        fn = body(numbers)
        f = functionalize(fn, lend=k % 4 == 3)
        for data in (1, 2) if k % 2 else (1,):
            one, two = World(layout, data + k), World(layout, data + k)
            before = description([], one)
            expected, found = description(fn(*one.args), one), description(f(*two.args), two)
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
def test_a_write_to_a_view_of_another_dtype_changes_the_version_of_a_saved_tensor(name: str) -> None:
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


def test_state_that_cannot_be_restored_is_named() -> None:
    x = torch.zeros(3)
    f = functionalize(lambda a, b: a.add_(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    subclass = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    for bad, error, words in [
        (subclass, TypeError, r"args\[1\]: expected a plain torch.Tensor or a Parameter, got a Mine"),
        (torch.ones(2).to_sparse(), ValueError, r"args\[1\]: .*sparse"),
        (torch.ones(2, device="meta"), ValueError, r"args\[1\]: .*meta"),
        (quantized, ValueError, r"args\[1\]: .*quantized"),
        (np.ones(2), TypeError, r"args\[0\] is a Tensor and args\[1\] is an ndarray"),
    ]:
        with pytest.raises(error, match=words):
            f(x, bad)
    y = torch.ones(2)
    f(x, y)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"args\[1\]: .*torch.func"):
            torch.func.vmap(lambda row: f(x, row))(torch.ones(3, 2))
    assert x.tolist() == [1, 1, 1]


def keeps(fn: Any, make: Any, *, call: Any = None) -> None:
    """`description` returns the same for a call of the wrapper as for one of the function; twice, as the second call
    takes another path.
    """
    f = functionalize(fn)
    for _ in range(2):
        described = []
        for run in (fn, f):
            args = make()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                described.append(call(run, args))
        assert described[0] == described[1]


def unaligned(n: int, at: int) -> Any:
    """A tensor of n floats whose storage begins at `at` modulo 64."""
    memory = np.zeros(4 * n + 128, "u1")
    start = -memory.ctypes.data % 64 + at
    whole = memory[start : start + 4 * n].view("f4")
    whole[:] = np.arange(n)
    return torch.from_numpy(whole)


STORAGE = {
    "as_strided of an unaligned storage": (lambda x: x.as_strided((3,), (1,), 0).clone(), lambda: unaligned(6, 4)[2:]),
    "set_ to its own storage": (
        lambda x: x.set_(x.untyped_storage(), 1, (2,), (2,)).clone(),
        lambda: unaligned(6, 12)[2:],
    ),
    "a view of another dtype": (lambda x: x.view(torch.float64).clone(), lambda: unaligned(6, 4)[:4]),
    "resize_ within the storage": (lambda x: x.resize_(8).clone(), lambda: torch.arange(8.0)[:2]),
    "resize_ within the storage, and a write": (lambda x: x.resize_(8).zero_(), lambda: torch.arange(8.0)[:2]),
    "resize_ beyond it": (lambda x: (x.add_(10).resize_(8)[2:].zero_(), x)[1], lambda: torch.arange(2.0)),
    "resize_ from nothing": (lambda x: x.resize_(4).fill_(3), lambda: torch.empty(0)),
    "resize_ of what cannot be": (lambda x: x.add_(10).resize_(80), lambda: unaligned(6, 4)),
    "other data": (lambda x: setattr(x, "data", torch.ones(5)), lambda: torch.arange(3.0)),
    "set_ to another storage": (lambda x: x.set_(torch.ones(5)), lambda: torch.arange(3.0)),
}


@pytest.mark.parametrize("name", STORAGE)
def test_storages_are_the_callers_own(name: str) -> None:
    fn, make = STORAGE[name]

    def call(run: Any, args: Any) -> Any:
        x = args[0]
        whole = x if x._base is None else x._base
        try:
            out = run(x)
        except RuntimeError as e:
            # Natively what came before the error stays; the wrapper leaves all as it was.
            if run is not fn:
                assert x.tolist() == make().tolist() and x._version == 0
            return str(e)
        return (
            (out.tolist() if out is not None else None),
            out is x,
            x.tolist(),
            x.stride(),
            whole.untyped_storage().tolist(),
            x.storage_offset(),
        )

    keeps(fn, lambda: (make(),), call=call)


def test_a_call_that_raises_leaves_storages_as_they_were() -> None:
    for name, (fn, make) in STORAGE.items():

        def stops(x: Any, fn: Any = fn) -> None:
            fn(x)
            x.zero_()
            raise KeyError

        f = functionalize(stops)
        for _ in range(2):
            x = make()
            where = (
                x.data_ptr(),
                x.stride(),
                x.storage_offset(),
                x.untyped_storage()._cdata,
                x.untyped_storage().nbytes(),
            )
            with pytest.raises((KeyError, RuntimeError)):
                f(x)
            now = x.data_ptr(), x.stride(), x.storage_offset(), x.untyped_storage()._cdata, x.untyped_storage().nbytes()
            assert x.tolist() == make().tolist() and x._version == 0, name
            assert now[1:] == where[1:] and (now[0] == where[0] or "beyond" in name or "nothing" in name), name


def test_attributes_set_on_a_tensor_stay_unless_the_function_raises() -> None:
    def fn(x: Any, stop: bool) -> Any:
        x.grad, x.tag = torch.ones(3), "new"
        v = x.view(-1)[:2].requires_grad_()
        if stop:
            x.requires_grad_()
            raise KeyError
        return v, v * 2

    for stop in (False, True):
        f = functionalize(fn)
        for _ in range(2):
            x = torch.zeros(3)
            x.grad = old = torch.zeros(3)
            x.other = 1
            if stop:
                with pytest.raises(KeyError):
                    f(x, stop)
                assert x.grad is old and x.__dict__ == {"other": 1} and not x.requires_grad
                continue
            v, twice = f(x, stop)
            twice.sum().backward()
            assert v.requires_grad and v.is_leaf and v._base is x and v.grad.tolist() == [2, 2]
            assert x.grad.tolist() == [1, 1, 1] and x.tag == "new" and not x.requires_grad


def test_forward_mode_works() -> None:
    forward = torch.autograd.forward_ad
    f = functionalize(lambda x, y: x.mul_(y) * 2)
    with warnings.catch_warnings(), forward.dual_level():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x, y = forward.make_dual(torch.full((2,), 3.0), torch.ones(2)), torch.full((2,), 5.0)
            assert forward.unpack_dual(f(x, y)).tangent.tolist() == [10, 10]
            assert forward.unpack_dual(x).tangent.tolist() == [5, 5]


def test_the_default_device_is_none_of_its_business() -> None:
    x = torch.zeros(3)
    with torch.device("meta"):
        f = functionalize(lambda x: (x.add_(1), x[1:])[1], (x,), guard="error")
        assert f(x).data_ptr() == x.data_ptr() + 4
        assert collect_metadata(lambda x: x.add_(1), [x]).input_info[0].mutates_data
        with pytest.raises(BehaviourChangedError):
            functionalize(lambda x, on: x.add_(1) if on[0] else None, (x, [False]), guard="error")(x, [True])
    assert x.tolist() == [1, 1, 1]


# Gradients


def grown(leaf: Any) -> Any:
    return leaf * 1


#: name -> (function of a tensor x with a gradient, and w, a leaf)
GRADIENTS = {
    "read": lambda x, w: x * w,
    "written": lambda x, w: (x.mul_(w), x * 2)[1],
    "written through a view": lambda x, w: (x[1:].mul_(w[1:]), x * x)[1],
    "written, and a view of it": lambda x, w: (x.mul_(w), x[1:])[1],
    "a view, then a write": lambda x, w: (x[:2], x.mul_(w))[0],
    "no_grad write": lambda x, w: (write_quietly(x), x * w)[1],
    "no_grad region": lambda x, w: quietly(x, w),
    "detached": lambda x, w: x.detach() * w,
    "written through detach": lambda x, w: (x.detach().mul_(3), x * w)[1],
    "saved, then written": lambda x, w: (x * x, x.add_(w))[0],
    "detach_": lambda x, w: x.detach_() * w,
    "grad inside": lambda x, w: torch.autograd.grad((x * x * w).sum(), x, create_graph=True)[0],
    "hook": lambda x, w: (x.register_hook(lambda g: g * 10), x * w)[1],
    "retain_grad": lambda x, w: (x.retain_grad(), x * w)[1],
    "requires_grad_ of w": lambda x, w: x * w.requires_grad_(False),
    "unbind": lambda x, w: x.unbind()[1] * w,
    "written through unbind": lambda x, w: x.unbind()[1].mul_(2),
    "backward inside": lambda x, w: ((x * w).sum().backward(), x.detach() * w)[1],
    "chain": lambda x, w: ((x.exp() * w).cumsum(0).mul_(w), x)[0],
}


def write_quietly(x: Any) -> None:
    with torch.no_grad():
        x.add_(1)


def quietly(x: Any, w: Any) -> Any:
    with torch.no_grad():
        y = x * w
    return y + w


KINDS = {
    "leaf": lambda: torch.arange(1.0, 4.0).requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(1.0, 4.0)),
    "grown": lambda: grown(torch.arange(1.0, 4.0).requires_grad_()),
    "view": lambda: grown(torch.arange(5.0).requires_grad_())[1:4],
    "view of a leaf": lambda: torch.arange(5.0).requires_grad_()[1:4],
    "plain": lambda: torch.arange(1.0, 4.0),
    "plain view": lambda: torch.arange(5.0)[1:4],
}


def of_graph(t: Any) -> Any:
    """The leaves of a graph."""
    found, seen, left = [], set(), [t.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        left += [next_ for next_, _ in node.next_functions]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_function_itself(name: str, kind: str) -> None:
    def call(run: Any, args: Any) -> Any:
        x, w = args
        fired: list[Any] = []
        if x.requires_grad:
            x.register_hook(lambda g: fired.append(g.tolist()))
        leaves = [y for y in ([x] if x.is_leaf else of_graph(x)) if y.requires_grad] + [w]
        described: list[Any] = []
        try:
            out = run(x, w)
            described += [(t.requires_grad, t.is_leaf, t.tolist(), t._version) for t in (out, x, w)]
            if out.requires_grad:
                first = torch.autograd.grad(out.sum(), leaves, create_graph=True, allow_unused=True)
                described += [None if g is None else g.tolist() for g in first]
                second = [g for g in first if g is not None and g.requires_grad]
                if second:
                    twice = torch.autograd.grad(
                        sum((g * g).sum() for g in second), leaves, allow_unused=True, retain_graph=True
                    )
                    described += [None if g is None else g.tolist() for g in twice]
                out.sum().backward()
                described += [None if y.grad is None else y.grad.tolist() for y in (*leaves, x)]
        except RuntimeError as e:
            described.append(str(e))
        return described, fired

    keeps(GRADIENTS[name], lambda: (KINDS[kind](), torch.full((3,), 2.0).requires_grad_()), call=call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [name for name in GRADIENTS if "inside" not in name]
)  # buffers that a backward freed stay freed
def test_a_call_that_raises_leaves_gradients_as_they_were(name: str, kind: str) -> None:
    def stops(x: Any, w: Any) -> None:
        GRADIENTS[name](x, w)
        raise KeyError

    def state(x: Any, w: Any, saved: Any, graph: Any) -> Any:
        described = [(t.requires_grad, t.is_leaf, t.tolist(), t._version, t.grad) for t in (w, *graph)]
        described.append((x.requires_grad, x.is_leaf, x.tolist(), x._version))
        total = (x * 3).sum() + saved
        leaves = [t for t in (w, *graph) if t.requires_grad]
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
        return described, [None if g is None else g.tolist() for g in grads]

    f = functionalize(stops)
    for _ in range(2):
        described = []
        for touch in (False, True):
            x, w = KINDS[kind](), torch.full((3,), 2.0).requires_grad_()
            graph = [x] if x.is_leaf else of_graph(x)
            saved = (x * x * w).sum()
            if touch:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with pytest.raises((KeyError, RuntimeError)):
                        f(x, w)
            described.append(state(x, w, saved, graph))
        assert described[0] == described[1]


HOLDERS = {
    "nobody": lambda v, w: None,
    "a graph that has saved it": lambda v, w: (v * w).exp() + v * w,
    "a weak reference": lambda v, w: weakref.ref(v),
    "a trace": lambda v, w: torch.jit.trace(lambda a: a * v, (torch.ones(3),)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("who", HOLDERS)
def test_a_view_that_gains_a_history_loses_it_if_the_function_raises_even_if_referenced(who: str) -> None:
    def stops(v: Any, w: Any) -> None:
        v.mul_(w)
        raise KeyError

    f = functionalize(stops)
    for _ in range(2):
        base, w = torch.arange(4.0), torch.full((3,), 2.0, requires_grad=True)
        v = base[1:]
        held = HOLDERS[who](v, w)
        with pytest.raises(KeyError):
            f(v, w)
        assert (v.requires_grad, v.grad_fn, v.is_leaf, v._base is base) == (False, None, True, True)
        assert base.tolist() == [0, 1, 2, 3] and v._version == 0 and not base.requires_grad
        if isinstance(held, torch.Tensor):
            found = torch.autograd.grad(held.sum(), w)[0]
            assert torch.equal(found, (v * (v * 2).exp() + v).detach())
        v.add_(1)
        assert base.tolist() == [0, 2, 3, 4] and base._version == 1


def test_a_view_to_which_c_has_a_weak_reference_keeps_an_end_that_leads_nowhere() -> None:
    """Nothing can be swapped into its place; values, versions and gradients of leaves are as they were."""

    def stops(v: Any, w: Any) -> None:
        v.mul_(w)
        raise KeyError

    base, w = torch.arange(4.0), torch.full((3,), 2.0, requires_grad=True)
    v = base[1:]
    held = torch._C._WeakTensorRef(v)
    with pytest.raises(KeyError):
        functionalize(stops)(v, w)
    assert not held.expired() and v.requires_grad and not base.requires_grad
    assert v.tolist() == [1, 2, 3] and v._version == 0
    (v * w).sum().backward()
    assert w.grad.tolist() == [1, 2, 3]


def test_a_later_write_to_a_tensor_saved_for_backward_is_found() -> None:
    for run in (lambda fn: fn, functionalize):
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        out = run(lambda x, w: (x * w).sum())(x, w)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        with torch.inference_mode():
            y = torch.ones(3)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            run(lambda y: y.add_(1))(y)
        assert run is not functionalize or y.tolist() == [1, 1, 1]


def test_an_optimizer_step_is_undone_where_it_raises() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    opt = torch.optim.SGD([w], lr=0.5)

    def step(w: Any, x: Any, stop: bool) -> Any:
        loss = (w * x).sum()
        loss.backward()
        opt.step()
        if stop:
            raise KeyError
        return loss

    f = functionalize(step)
    f(w, torch.ones(3), False)
    assert w.tolist() == [0.5] * 3 and w.grad.tolist() == [1, 1, 1]
    for _ in range(2):
        with pytest.raises(KeyError):
            f(w, torch.ones(3), True)
        assert w.tolist() == [0.5] * 3 and w.grad.tolist() == [1, 1, 1]


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
    for name in ("meta", "pure"):  # for tensors a run on copies finds them
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
    with pytest.raises(TypeError, match=r"output\[0\] is a Held that holds memory of an input"):
        collect_metadata(lambda x, y: Held(x[0][1:]), [[x, x.clone()], x])
    assert functionalize(lambda x: Held(x[1:]))(x).tensor._base is x
    for run in (
        lambda x: functionalize(lambda h: None)(x),
        lambda x: collect_metadata(lambda h, y: None, [x, torch.ones(1)]),
    ):
        for box in (Held(x), {x}, {1: Held([x])}):
            with pytest.raises(TypeError, match=r"args\[0\].*: expected arrays in lists, .* that holds a Tensor"):
                run(box)


# The pure function


def itself(pure: Any) -> Any:
    return pure


def traced(pure: Any) -> Any:
    """torch.fx in between: the graph of one run, for each layout."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graphs: list[Any] = []

    def run(*inner: Any) -> Any:
        if not graphs:
            graphs.append(make_fx(pure)(*[x.detach() if isinstance(x, torch.Tensor) else x for x in inner]))
        return graphs[0](*inner)

    return run


def traces_detach() -> bool:
    """Whether torch.fx records `detach`: torch 2.14 records an alias, through which gradients flow."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: x.detach())(torch.ones(1))
    return not graph(torch.ones(1, requires_grad=True)).requires_grad


def test_torch_fx_loses_a_detach_since_torch_2_14() -> None:
    assert traces_detach() == (torch.__version__ < (2, 14))


def dynamo(pure: Any) -> Any:
    """One graph for all of it: nothing in the pure function's own code ends a graph.

    What was compiled for others counts towards torch's limit, and is given up.
    """
    torch.compiler.reset()
    return torch.compile(pure, backend="eager", fullgraph=True)


def overlapping() -> tuple[Any, ...]:
    leaf = torch.arange(6.0).requires_grad_()
    flat = leaf * 1
    return leaf, (flat[:4], flat[2:], torch.full((4,), 2.0).requires_grad_())


def alone() -> tuple[Any, ...]:
    leaf = torch.arange(8.0).requires_grad_()
    return leaf, ((leaf * 1)[::2], torch.ones(4), torch.full((4,), 2.0).requires_grad_())


PURE = {
    "written": lambda a, b, w: (a.mul_(w), a * b)[1],
    "views": lambda a, b, w: (b.add_(1), a[1:], b.view(2, 2), a)[1:],
    "no write": lambda a, b, w: a.view(-1)[:2] * w[:2] if a.is_contiguous() else a * w,
    "no_grad": lambda a, b, w: (write_quietly(b), a * w)[1],
    "detached": lambda a, b, w: (a.detach().mul_(2), a.detach(), a + b)[1:],
    "geometry": lambda a, b, w: (a.mul_(w).unsqueeze_(0), b[1:])[1],
    "geometry and a view": lambda a, b, w: (a.unsqueeze_(0), a[:, 1:])[1],
    "twice": lambda a, b, w: (a[1:], a[1:], w, 3, None, {"k": [a * w]}),
}


@pytest.mark.parametrize("compiler", [itself, traced, dynamo])
@pytest.mark.parametrize("make", [overlapping, alone])
@pytest.mark.parametrize("name", PURE)
def test_a_compiled_pure_function_does_what_the_function_does(name: str, make: Any, compiler: Any) -> None:
    fn = PURE[name]
    f = functionalize(fn, compiler=compiler)
    for _ in range(2):
        described = []
        for run in (fn, f):
            leaf, args = make()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = leaves(run(*args))
            tensors = [t for t in (*out, *args) if isinstance(t, torch.Tensor)]
            grown = [t for t in tensors if t.requires_grad]
            grads = torch.autograd.grad(
                sum((t * t).sum() for t in grown), (leaf, args[2]), create_graph=True, allow_unused=True
            )
            twice = [g for g in grads if g is not None and g.requires_grad]
            second = (
                torch.autograd.grad(sum(g.sum() for g in twice), (leaf, args[2]), allow_unused=True) if twice else ()
            )
            described.append(
                (
                    [(t.tolist(), t.requires_grad, t.is_leaf, t.stride()) for t in tensors],
                    [[t is a for a in args] for t in out],
                    [
                        (
                            t.data_ptr() - args[0].untyped_storage().data_ptr()
                            if t._base is not None and t._base is args[0]._base
                            else None
                        )
                        for t in tensors
                    ],
                    [None if g is None else g.tolist() for g in (*grads, *second)],
                )
            )
        if name == "detached" and compiler is traced and not traces_detach():
            *others, grads = zip(*described, strict=True)  # torch's trace has other gradients
            assert all(a == b for a, b in others) and grads[0] != grads[1]
        else:
            assert described[0] == described[1]


def test_the_pure_function_of_tensors_writes_nothing_and_has_slots() -> None:
    leaf, args = overlapping()
    f = functionalize(lambda a, b, w: (a.mul_(w), b[1:], a * b)[1:], args)
    pure = f.pure
    assert [x.expr() for x in pure.input_descs] == ["__make_synthetic_base(args[0])", "args[2]"]
    assert [x.expr() for x in pure.output_descs] == [
        "__input_mutation(__make_synthetic_base(args[0]))",
        "output[0]",
        "output[1]",
    ]
    inner = pure.inner(args, args)
    before = [x.detach().clone() for x in inner]
    values = pure(*inner)
    assert all(torch.equal(x, y) for x, y in zip(inner, before, strict=True)) and inner[0].grad_fn is not None
    assert values[0].tolist() == [0, 2, 4, 6, 4, 5] and torch.autograd.grad(values[0].sum(), leaf)[0].tolist() == [
        2,
        2,
        2,
        2,
        1,
        1,
    ]
    assert [x.expr() for x in pure.inner_meta.traced_tangents_descs][:1] == [
        "__output_tangent(__input_mutation(__make_synthetic_base(args[0])))"
    ]
    for bad, error, words in [
        ((inner[0],), ValueError, "expected 2 arguments"),
        (
            (inner[0][1:], inner[1]),
            ValueError,
            r"__make_synthetic_base\(args\[0\]\): expected a tensor of torch.float32, shape \(6,\)",
        ),
        ((inner[0], 3), TypeError, r"args\[2\]: expected a tensor .* got an int"),
    ]:
        with pytest.raises(error, match=words):
            pure(*bad)


def test_the_refusals_of_a_compiled_function_of_tensors_name_the_cause() -> None:
    flat = torch.zeros(8)
    for fn, args, words in [
        (
            lambda a, b: a.add_(1),
            (flat[:4], flat.view(torch.int32)[2:]),
            r"args\[0\], args\[1\] share memory, are written, and have different dtypes, torch.float32, torch.int32",
        ),
        (lambda a: a.resize_(20), (torch.zeros(2),), r"args\[0\] is given other storage"),
        (lambda box: box.append(1), ([torch.zeros(2)],), "changes a list or dict"),
        (lambda a, b: a.add_(1), (torch.from_numpy(n := np.zeros(4)), torch.from_numpy(n)), "through several storages"),
    ]:
        with pytest.raises(ValueError, match=words):
            functionalize(fn, compiler=itself)(*args)
    assert not flat.any()
    f = functionalize(lambda a, b: (a.add_(1), a * 2)[1], compiler=lambda pure: lambda *inner: pure(*inner)[:1])
    with pytest.raises(
        ValueError,
        match=r"expected 2 values of the compiled function, __input_mutation\(args\[0\]\), output\[0\]; got 1",
    ):
        f(flat, 3)
    assert not flat.any()


def test_a_compiled_function_is_made_again_if_gradients_are_required() -> None:
    made = []
    f = functionalize(lambda x, w: (x.mul_(w), x * 1)[1], compiler=lambda pure: made.append(pure) or pure)
    for asks in (False, True, True, False):
        w = torch.full((2,), 3.0).requires_grad_(asks)
        x = torch.ones(2)
        out = f(x, w)
        assert out.requires_grad is asks and x.requires_grad is asks and x.tolist() == [3, 3]
    with torch.no_grad():
        assert not f(torch.ones(2), w.requires_grad_()).requires_grad
    assert len(made) == 3
    box = [torch.ones(2)]
    g = functionalize(lambda box: (box[0].add_(1), box)[1], compiler=itself)
    assert g(box) is box and g(box) is box and box[0].tolist() == [3, 3]
