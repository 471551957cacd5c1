"""Real torch tensors on the CPU: every dtype and layout, both ways; and nothing is read as if its memory held its value
where it does not.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot, Sparse, _core
from fanin._interop.arrays import export_device
from fanin._interop.classes import TORCH, table_of
from kit import hooks

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

torch = pytest.importorskip("torch", reason="torch is not installed")

REAL = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES = (*REAL, "uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")


def through(*gradients: Any, slot: Slot | None = None, budget: float | None = None, **how: Any) -> Any:
    buf = fanin.InputBuffer([slot or Slot()], budget=budget, **how)
    for g in gradients:
        buf.add(0, g)
    return buf.take()[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_come_back_as_tensors_of_it(dtype: str) -> None:
    kind = getattr(torch, dtype)
    x, y = torch.tensor([[0, 1], [1, 1]]).to(kind), torch.tensor([[1, 0], [1, 0]]).to(kind)
    result = through(x, y)
    assert type(result) is torch.Tensor
    assert result.dtype == kind
    want = torch.tensor([[1, 1], [1 if dtype == "bool" else 2, 1]])
    assert torch.equal(result.to(torch.complex128), want.to(torch.complex128))
    assert not result.requires_grad
    result.fill_(0)  # it is its own memory
    assert through(x) is x


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[::2, 1::2],
        lambda t: t[1:1],
        lambda t: t[0, 0],
        lambda t: t[:1].expand(4, 6),
        lambda t: t[None],
        lambda t: t.as_strided((3, 3), (1, 1)),
        lambda t: t[:, :1],
    ],
)
def test_any_strides_are_summed_and_never_written(view: Any, dtype: str) -> None:
    base = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    kept = base.clone()
    x = view(base)
    for budget in (0, None):
        result = through(x, x, budget=budget)
        assert result.shape == x.shape
        assert torch.equal(result.to(torch.float64), (x | x if dtype == "bool" else x + x).to(torch.float64))
        assert torch.equal(base, kept)


def test_conjugate_and_negative_bits_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    for x in (z.conj(), z.conj().imag, z.imag, z.real, z.conj().real, z.conj().T if z.ndim > 1 else z.conj()):
        result = through(x, x)
        assert torch.equal(result, (x + x).resolve_conj().resolve_neg())
        assert through(x) is x
    x = z.conj()
    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, x, donate=True)
    buf.add(0, z)
    assert torch.equal(buf.take()[0], x + z)
    assert z.tolist() == [1 + 2j, 3 - 4j], "the memory of a donated conjugate is not its value"
    with pytest.raises(BufferError, match=r"out: .* conjugate bit: give out=x\.resolve_conj\(\)"):
        fanin.add_n([z, z], out=x)


def test_tensors_that_require_a_gradient_are_detached() -> None:
    x = torch.ones(3, requires_grad=True)
    p = torch.nn.Parameter(torch.ones(3))
    for t in (x, p, x * 2):
        assert not through(t).requires_grad
        assert not through(t, t).requires_grad
    with pytest.raises(BufferError, match=r"give x\.detach\(\)"):
        fanin.add_n([x, x], out=p)


def test_under_create_graph_sums_are_differentiable() -> None:
    x = torch.ones(3, requires_grad=True)
    buf = fanin.InputBuffer([Slot(shape=(1,), dtype=torch.float64)], create_graph=True)
    buf.add(0, x * 2)
    buf.add(0, x * x)
    (result,) = buf.take()
    assert (result.dtype, result.shape) == (torch.float64, (1,))
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad.tolist() == [4, 4, 4]
    buf = fanin.InputBuffer(1, create_graph=True)
    for _ in range(3):
        buf.add(0, x)
    assert buf.take()[0].requires_grad


def test_a_donated_grad_takes_the_sum_and_keeps_its_identity() -> None:
    grad = torch.ones(4)
    view = grad[1:]
    buf = fanin.InputBuffer(1)
    buf.add(0, grad, donate=True)
    buf.add(0, torch.full((4,), 2.0))
    assert buf.take()[0] is grad
    assert view.tolist() == [3, 3, 3]


def test_each_out_of_a_take_is_counted_once_and_looked_at_again_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[Any] = []
    count = torch.autograd.graph.increment_version

    def note(x: Any) -> None:
        counted.append(x)
        count(x)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", note)
    buf = fanin.InputBuffer(3)
    for slot in (0, 2):
        for x in (1.0, 2.0):
            buf.add(slot, torch.full((4,), x))
    outs = [torch.zeros(4) for _ in range(3)]
    versions = [o._version for o in outs]
    sums = buf.take(out=outs)
    assert sums[0] is outs[0] and sums[1] is None and sums[2] is outs[2]
    assert [o._version - v for o, v in zip(outs, versions, strict=True)] == [1, 0, 1]
    assert sorted(map(id, counted)) == sorted([id(outs[0]), id(outs[2])]) and outs[2].tolist() == [3] * 4

    def move(x: Any) -> None:
        x.untyped_storage().resize_(0)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", move)
    for x in (1.0, 2.0):
        buf.add(0, torch.full((4,), x))
    with pytest.raises((BufferError, RuntimeError, ValueError)):
        buf.take(slot=0, out=torch.zeros(4))
    monkeypatch.undo()
    assert buf.take(slot=0).tolist() == [3] * 4


def test_out_is_written_and_torch_is_told() -> None:
    out = torch.zeros(3)
    version = out._version
    assert fanin.add_n([torch.ones(3), torch.ones(3)], out=out) is out
    assert out.tolist() == [2, 2, 2]
    assert out._version > version


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "complex64"])
def test_sparse_tensors_of_every_layout(layout: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    dense = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 4], [0, 5, 6, 0]]).to(kind)
    how = {"blocksize": (2, 2)} if layout in ("sparse_bsr", "sparse_bsc") else {}
    x = dense.to_sparse(layout=getattr(torch, layout), **how)
    assert through(x) is x
    result = through(x, x)
    assert result.layout == x.layout
    assert result.dtype == kind
    assert torch.equal(result.to_dense(), dense + dense)
    assert torch.equal(x.to_dense(), dense)
    for gradients in ((x, dense), (dense, x)):
        result = through(*gradients)
        assert result.layout == torch.strided
        assert torch.equal(result, dense + dense)


@pytest.mark.filterwarnings("ignore")
def test_the_exchange_table_throws_for_one_tensor_of_a_process_at_most() -> None:
    coo = torch.eye(4).to_sparse()
    ragged = [torch.ones(2), torch.ones(3)]
    others = [
        coo,
        coo.to_sparse_csr(),
        torch.ones(3, device="meta"),
        torch.nested.nested_tensor(ragged),
        torch.nested.nested_tensor(ragged, layout=torch.jagged),
    ]
    before = hooks.tensor_throws()
    buf = fanin.InputBuffer(1)
    for x in others * 3:
        buf.add(0, x)
        buf.add(0, x)
        assert buf.take()[0].layout == x.layout
    weight = torch.nn.Embedding(10, 3, sparse=True)
    with fanin.torch.accumulate(weight.parameters()):
        for _ in range(3):
            weight(torch.tensor([1, 2])).sum().backward()
    fanin.torch.backward(weight(torch.tensor([1, 2])).sum())
    assert hooks.tensor_throws() - before <= (before == 0)


class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
    """Counts what is read of tensors while it is at work."""

    calls = 0

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "layout" in repr(fn)
        return fn(*args, **kwargs or {})


def test_under_a_mode_reading_a_dense_tensor_runs_no_python_code() -> None:
    through(torch.eye(4).to_sparse())  # from the first of these on all are checked
    x = torch.ones(3)
    with Mode() as mode:
        assert through(x, x).tolist() == [2, 2, 2]
    assert mode.calls == 0


def test_the_sparse_gradients_of_an_embedding() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    grads = []
    for index in ([1, 2, 2], [2, 9]):
        (g,) = torch.autograd.grad(table(torch.tensor(index)).sum(), table.weight)
        assert g.layout == torch.sparse_coo
        grads.append(g)
    result = through(*grads)
    assert result.layout == torch.sparse_coo
    assert torch.equal(result.to_dense(), grads[0].to_dense() + grads[1].to_dense())


def test_sparse_parts_that_are_tensors_come_back_as_tensors() -> None:
    x = Sparse("coo", (torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])), (4,))
    result = through(x, x)
    assert isinstance(result, Sparse)
    assert all(type(p) is torch.Tensor for p in result.parts)
    assert type(through(x, torch.ones(4))) is torch.Tensor


def test_read_only_indices_come_back_as_tensors_of_their_own_memory() -> None:
    """A tensor can be written: it must not lie over what its owner said is not to be."""
    indices = np.array([[0, 2]])
    indices.setflags(write=False)
    x = Sparse("coo", (indices, torch.tensor([1.0, 2.0], dtype=torch.float64)), (4,))
    result = through(x, slot=Slot(dtype="float32"))
    result.parts[0].fill_(3)
    assert indices.tolist() == [[0, 2]]


def test_what_is_no_plain_tensor_is_an_object_or_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(3))
        assert type(through(fake, fake)) is type(fake)
    meta = torch.ones(3, device="meta")
    assert through(meta, meta).device.type == "meta"
    seen = []
    torch.func.vmap(lambda t: seen.append(through(t, t)) or t)(torch.ones(2, 3))
    assert seen[0] is not None

    class Mine(torch.Tensor):
        pass

    mine = torch.ones(3).as_subclass(Mine)
    for gradients in ((mine, mine), (mine, torch.ones(3)), (torch.ones(3), mine)):
        assert type(through(*gradients)) is Mine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        half = torch.ones(3, dtype=torch.complex32)
    with pytest.raises(BufferError, match="quantized"):
        through(quantized)
    assert through(nested, nested).is_nested
    with pytest.raises(BufferError, match="slot 0"):
        through(half)
    zero = torch._efficientzerotensor((3,))
    assert through(zero, torch.ones(3)).tolist() == [1, 1, 1]


def test_dtypes_may_be_torchs() -> None:
    assert through(torch.ones(3), slot=Slot(dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert through(np.ones(3), slot=Slot(dtype=torch.float32)).dtype == np.float32
    with pytest.raises(ValueError, match=r"dtype torch.complex32 is not summed"):
        Slot(dtype=torch.complex32)


def test_mixed_with_ndarrays_the_first_decides() -> None:
    assert type(through(torch.ones(3), np.ones(3))) is torch.Tensor
    assert type(through(np.ones(3), torch.ones(3))) is np.ndarray
    assert through(torch.ones(3), np.ones(3)).dtype == torch.float64
    assert type(through(1.0, torch.ones(()))) is torch.Tensor


def test_accumulation_is_in_float32_and_rounds_once() -> None:
    terms = [torch.full((4,), 1.0), *[torch.full((4,), 2.0**-9)] * 8]
    low = [t.to(torch.bfloat16) for t in terms]
    assert torch.equal(through(*low), sum(terms).to(torch.bfloat16))
    assert not torch.equal(sum(low), through(*low)), "torch rounds each time"


def test_memory_is_given_back_when_torch_drops_it() -> None:
    gc.collect()
    before = hooks.memory()[0]
    result = through(torch.ones(100_000), torch.ones(200_000)[::2])  # strided: the result's memory is ours, not torch's
    view = result[10:]
    del result
    gc.collect()
    assert hooks.memory()[0] > before
    assert view.sum().item() == 199_980
    del view
    gc.collect()
    assert hooks.memory()[0] == before


def test_torchs_exchange_table_takes_and_gives_tensors() -> None:
    table = table_of(torch.Tensor)
    assert table is not None and table is table_of(torch.Tensor)
    x = torch.arange(6.0).reshape(2, 3).T
    capsule = _core.table_take(table, x)
    back = _core.table_give(table, capsule)
    assert type(back) is torch.Tensor and back.data_ptr() == x.data_ptr() and back.stride() == x.stride()
    assert torch.equal(back, x)
    with pytest.raises(ValueError):
        _core.table_give(table, capsule)  # it was taken
    with pytest.raises(TypeError, match="exchange table"):
        _core.table_take(object(), x)
    for bad in (None, 3):
        with pytest.raises((TypeError, RuntimeError, BufferError)):
            _core.table_take(table, bad)


def test_a_parameter_has_the_table_of_a_tensor() -> None:
    assert table_of(torch.nn.Parameter) is table_of(torch.Tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_sum_of_ours_on_a_device_that_torch_has_not_comes_back_as_our_array(a_world: Any) -> None:

    driver = a_world("fake", 1).driver
    x = driver.array(np.ones(3, "f4"))
    assert export_device(TORCH, x) is x
    host = torch.from_dlpack(Host(x))
    assert host.tolist() == [1, 1, 1]
    del x, host
    driver.synchronize()


class Host:
    """An array of a device, as a copy on the host."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        return self.x.__dlpack__(dl_device=(1, 0), max_version=how.get("max_version"))


def parked(*tensors: Any, **how: Any) -> fanin.InputBuffer:
    """Of a process that has met torch before: tensors are read through its exchange table."""
    through(torch.ones(2), torch.ones(2))
    buf = fanin.InputBuffer(1, **how)
    for k, t in enumerate(tensors):
        buf.add(0, t, key=k)
    return buf


def test_the_fast_path_reads_values_not_memory() -> None:
    x = torch.arange(4.0)
    minus = torch._neg_view(x)
    assert minus.is_contiguous() and minus.is_neg()
    for tensors, want in [((minus, minus), [0, -2, -4, -6]), ((x, minus), [0] * 4), ((minus, x, x), [0, 1, 2, 3])]:
        assert parked(*tensors).take()[0].tolist() == want
        assert parked(*tensors)[0].tolist() == want
        assert parked(*tensors, budget=0).take()[0].tolist() == want
        assert parked(*tensors).take(scale=2)[0].tolist() == [2 * w for w in want]
    assert parked(minus).take()[0].tolist() == [0, -1, -2, -3]
    zero = torch._efficientzerotensor(4)
    assert parked(x, zero, x).take()[0].tolist() == [0, 2, 4, 6]
    z = (torch.ones(4) + 2j * torch.ones(4)).conj()
    assert parked(z, z).take()[0].tolist() == [2 - 4j] * 4


def test_the_fast_path_detaches() -> None:
    x = torch.ones(3, requires_grad=True)
    for tensors in ((x,), (x, x), (torch.ones(3), x)):
        (sum_,) = parked(*tensors).take()
        assert not sum_.requires_grad and sum_.tolist() == [len(tensors)] * 3
    y = torch.ones(3)
    buf = parked(y, y)
    y.requires_grad_()  # meanwhile
    assert not buf.take()[0].requires_grad


def test_the_fast_path_and_the_long_one_meet() -> None:
    x = torch.ones(3)
    for late in (
        np.ones(3, np.float32),
        torch.ones(3, dtype=torch.float64),
        torch.ones(6)[::2],
        torch.nn.Parameter(torch.ones(3)),
        fanin.Zero((3,), "float32"),
    ):
        (sum_,) = parked(x, x, late).take()
        assert type(sum_) is torch.Tensor and sum_.tolist() == ([2] * 3 if isinstance(late, fanin.Zero) else [3] * 3)
    buf = parked(x, x)
    explained = buf.explain(0)
    assert "torch" not in explained and "S3" in explained
    assert buf.take(writable=True)[0].tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="shape"):
        parked(x, torch.ones(4))
    buf = parked(x, x)
    with pytest.raises(ValueError, match="key 1"):
        buf.add(0, x, key=1)
    assert buf.take()[0].tolist() == [2, 2, 2]
    out = torch.zeros(3)
    assert parked(x, x).take(out=[out])[0] is out and out.tolist() == [2, 2, 2]
    for dtype in REAL:
        t = torch.ones(5, dtype=getattr(torch, dtype))
        (sum_,) = parked(t, t).take()
        assert sum_.dtype == t.dtype and sum_.sum() == (5 if dtype == "bool" else 10)
        sum_.fill_(0)
        assert t.sum() == 5


def test_tensors_that_are_made_others_meanwhile_are_found() -> None:
    changes: list[Any] = [
        lambda x: x.resize_(4),
        lambda x: x.set_(torch.ones(3)),
        lambda x: setattr(x, "data", torch.ones(4096)),
        lambda x: x.resize_(1 << 20),
        lambda x: x.unsqueeze_(0),
    ]
    for change in changes:
        for call in ("take", "scaled", "snapshot"):
            x = torch.ones(4096)
            buf = parked(x, torch.ones(4096))
            change(x)
            with pytest.raises(RuntimeError, match="changed after it was added"):
                buf.take() if call == "take" else buf.take(scale=1.0) if call == "scaled" else buf[0]
            buf.clear()


def test_a_mode_that_makes_other_tensors_is_no_crash() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (FakeTensorMode(), torch.inference_mode(), torch.no_grad()):
        buf = parked(torch.ones(4096), torch.ones(4096))
        with mode:
            try:
                sums = buf.take()
            except Exception as e:
                assert str(e)
                sums = None
        if sums is None:
            sums = buf.take()
        if type(sums[0]) is torch.Tensor:
            assert sums[0].shape == (4096,)
    buf = parked(torch.ones(3), torch.ones(3))
    taken: list[Any] = []

    def take(x: Any) -> Any:
        taken.extend(buf.take())
        return x

    torch.func.functionalize(take)(torch.ones(3))
    assert taken[0].shape == (3,)


@pytest.mark.parametrize("slots", [(0, 0), (0, 1)])
@pytest.mark.parametrize("budget", [None, 0])
def test_a_mode_that_changes_a_tensor_while_another_is_converted_is_detected(
    slots: tuple[int, int], budget: Any
) -> None:
    """fanin calls the libraries of all arrays before it reads the first one, so that no library changes an array
    between the read and the sum. With budget=0 the sum of a slot of its own is made before the other array's library is
    called.
    """
    from torch.overrides import TorchFunctionMode

    x, y = torch.ones(4096), torch.ones(4096)

    class Shrinks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.is_neg and args[0] is y and x.numel():
                x.set_(torch.ones(0))
            return func(*args, **(kwargs or {}))

    buf = fanin.InputBuffer(2, budget=budget)
    for slot, t in ((slots[0], x), (slots[0], x.clone()), (slots[1], y), (slots[1], y.clone())):
        if budget is None:
            buf.add(slot, t)
    summed = budget == 0 and slots == (0, 1)
    refused = pytest.raises((RuntimeError, ValueError), match=r"changed after it was added|shape")
    with Shrinks(), contextlib.nullcontext() if summed else refused:
        if budget is not None:
            for slot, t in ((slots[0], x), (slots[1], y), (slots[0], x), (slots[1], y)):
                buf.add(slot, t)
        sums = buf.take()
    if summed:
        assert x.numel() == 0 and [s.tolist() for s in sums] == [[2.0] * 4096] * 2
    with Shrinks(), pytest.raises((RuntimeError, ValueError, BufferError)):
        x.set_(torch.ones(4096))
        fanin.add_n([x, y])


@pytest.mark.rule("A6")
@pytest.mark.parametrize("during", ["take", "add"])
@pytest.mark.parametrize("budget", ["auto", 0, 1 << 30])
@pytest.mark.parametrize("how", [{}, {"copy": True}])
@pytest.mark.parametrize("numbers", [4, 100_000])
def test_memory_that_a_mode_keeps_is_never_written(numbers: int, how: Any, budget: Any, during: str) -> None:
    from torch.overrides import TorchFunctionMode

    kept: list[tuple[Any, Any]] = []

    class Keeps(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            kept.extend((x, x.detach().clone()) for x in args if isinstance(x, torch.Tensor))
            return result

    for slots, terms in ((1, 2), (1, 5), (2, 3)):
        buf = fanin.InputBuffer(slots, budget=budget)
        with Keeps() if during == "add" else contextlib.nullcontext():
            for i in range(terms):
                buf.add(0, torch.full((numbers,), i + 1.0), **how)
        with Keeps() if during == "take" else contextlib.nullcontext():
            total = buf.take()[0]
        assert torch.equal(total, torch.full((numbers,), terms * (terms + 1) / 2))
    assert all(torch.equal(x, before) for x, before in kept)


def test_small_sums_are_memory_of_ours_which_any_thread_may_drop() -> None:
    warm = [through(torch.ones(3), torch.ones(3)), fanin.add_n([torch.ones(3), torch.ones(3)])]
    del warm
    gc.collect()
    before = hooks.memory()[0]
    sums = [fanin.add_n([torch.full((4, 5), 1.5), torch.ones(4, 5)]) for _ in range(3)]
    sums += [through(torch.full((4, 5), 1.5), torch.ones(4, 5))]
    assert hooks.memory()[0] == before + len(sums)
    for s in sums:
        assert s.data_ptr() % 64 == 0
        assert s.stride() == (5, 1) and not s.requires_grad
        s += 1
        assert s.tolist() == [[3.5] * 5] * 4
    del s
    one = threading.Thread(target=sums.clear)
    one.start()
    one.join()
    gc.collect()
    assert hooks.memory()[0] == before


def test_add_n_reads_values_not_memory() -> None:
    x = torch.ones(3)
    assert fanin.add_n([torch._neg_view(x), x * 3]).tolist() == [2, 2, 2]
    grad = fanin.add_n([x, torch.ones(3, requires_grad=True)])
    assert grad.tolist() == [2, 2, 2] and not grad.requires_grad


def test_wrapped_tensors_do_not_take_the_fast_path() -> None:
    def sums(t: Any) -> Any:
        buf = fanin.InputBuffer(1)
        buf.add(0, t)
        buf.add(0, t)
        return buf.take()[0]

    through(torch.ones(2), torch.ones(2))
    assert torch.vmap(sums)(torch.arange(6.0).reshape(2, 3)).tolist() == [[0, 2, 4], [6, 8, 10]]
    wrapped = torch._to_functional_tensor(torch.ones(3))
    assert torch._from_functional_tensor(sums(wrapped)).tolist() == [2, 2, 2]


def test_tensors_that_are_parked_are_held_and_let_go() -> None:
    t = torch.ones(3)
    gone = weakref.ref(t)
    buf = parked(t, torch.ones(3))
    del t
    gc.collect()
    assert gone() is not None
    assert buf.take()[0].tolist() == [2, 2, 2]
    assert gone() is None


def test_an_abandoned_pass_with_tensors_in_a_cycle_is_freed() -> None:
    buf = fanin.InputBuffer(1)
    t = torch.ones(3)
    t.mine = buf
    buf.add(0, t)
    ref = weakref.ref(buf)
    del buf, t
    gc.collect()
    assert ref() is None


def test_a_cuda_tensor_is_refused_by_name() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    with pytest.raises(BufferError, match="cuda:0"):
        through(torch.ones(3, device="cuda"))


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_parts_that_somebody_changed_are_errors(layout: str) -> None:
    def parts() -> tuple[Any, dict[str, Any]]:
        eye = torch.eye(4)
        t: Any = (
            eye.to_sparse()
            if layout == "coo"
            else getattr(eye, f"to_sparse_{layout}")(*([(2, 2)] if layout in ("bsr", "bsc") else []))
        )
        if layout == "coo":
            return t, {"indices": t._indices(), "values": t._values()}
        rows = layout in ("csr", "bsr")
        return t, {
            "pointers": t.crow_indices() if rows else t.ccol_indices(),
            "indices": t.col_indices() if rows else t.row_indices(),
            "values": t.values(),
        }

    for name in parts()[1]:
        changes = [lambda p: p.untyped_storage().resize_(0)]
        changes += [] if name == "values" else [lambda p: p.fill_(2**40), lambda p: p.fill_(-5)]
        for change in changes:
            t, by_name = parts()
            change(by_name[name])
            buf = fanin.InputBuffer(1, name="grads")
            with pytest.raises((ValueError, BufferError), match=r"^grads: slot 0: "):
                buf.add(0, t)


def test_a_storage_that_was_resized_while_parked_is_not_read() -> None:
    for stats in (False, True):
        for strided in (False, True):
            t = torch.ones(2000)[::2] if strided else torch.ones(1000)
            buf = fanin.InputBuffer(1, name="grads", stats=stats)
            buf.add(0, t, key=3)
            buf.add(0, torch.ones(1000), key=4)
            t.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match=r"^grads: slot 0: the gradient added with key 3 was changed"):
                buf.take()


def test_an_export_that_torch_refuses_loses_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        buf = fanin.InputBuffer(4)
        for _ in range(2):
            buf.add(0, torch.ones(3, 2).t())
            buf.add(1, torch.ones(4))
            buf.add(2, torch.eye(3).to_sparse())
            buf.add(3, torch.eye(3).to_sparse_csr())
        return buf

    def dense(sums: list[Any]) -> list[Any]:
        return [(s if s.layout == torch.strided else s.to_dense()).tolist() for s in sums]

    def fail(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    places = [
        (torch.utils.dlpack, "from_dlpack"),
        (torch, "sparse_coo_tensor"),
        (torch, "sparse_compressed_tensor"),
        (torch.autograd.graph, "increment_version"),
    ]
    for place, how in itertools.product(places, ({}, {"scale": 2.0}, {"writable": True}, {"out": 1})):
        if (place[1] == "increment_version") != ("out" in how):
            continue
        given: dict[str, Any] = {**how, "out": [None, torch.full((4,), 7.0), None, None]} if "out" in how else how
        want = dense(full().take(**given))
        if "out" in how:
            given["out"][1].fill_(7)
        buf = full()
        with monkeypatch.context() as m:
            m.setattr(*place, fail)
            with pytest.raises(KeyboardInterrupt):
                buf.take(**given)
        if "out" in how:
            assert given["out"][1].tolist() == [7.0] * 4  # nothing was written
        assert dense(buf.take(**given)) == want
        assert buf.take() == [None] * 4


@pytest.mark.parametrize("kind", ["dense", "strided", "transposed", "detached"])
@pytest.mark.parametrize("keep", [False, True])
def test_tensors_that_their_maker_drops_are_summed_early(kind: str, keep: bool) -> None:
    """The default budget: of which the buffer has the only Python object, those are its own."""
    one = 8 * 2000
    hooks.auto_budget(4 * one, 10 * one)
    buf, kept = fanin.InputBuffer(1), []
    try:
        for k in range(40):
            g = torch.full((1000, 4) if kind == "strided" else (1000, 2), float(k), dtype=torch.float64)
            g = {"strided": lambda x: x[:, ::2], "transposed": lambda x: x.t(), "detached": lambda x: x.detach()}.get(
                kind, lambda x: x
            )(g)
            if keep:
                kept.append(g)
            buf.add(0, g)
            del g
    finally:
        hooks.auto_budget()
    now = buf.counters
    assert (
        (now.folds, now.peak_parked_bytes) == (3, 11 * one)
        if keep
        else (now.folds >= 6 and now.peak_parked_bytes <= 6 * one)
    ), now
    total = buf.take()[0]
    assert type(total) is torch.Tensor and bool((total == sum(range(40))).all())
    assert all(bool((g == k).all()) for k, g in enumerate(kept))


def test_a_tensor_that_torch_keeps_is_not_written() -> None:
    """What is the buffer's alone for the budget need not be so for A6: torch may have more than Python shows."""
    hooks.auto_budget(1, 1 << 26)
    try:
        buf, base = fanin.InputBuffer(1), torch.ones(100)
        for k in range(5):
            buf.add(0, base.view(10, 10) if k == 0 else torch.ones(10, 10))
        assert bool((base == 1).all()) and bool((buf.take()[0] == 5).all()) and bool((base == 1).all())
    finally:
        hooks.auto_budget()


@pytest.mark.parametrize("donate", [False, True])
def test_a_tensor_is_added_into_the_sum_at_once_where_the_budget_is_passed(donate: bool) -> None:
    """The second makes the sum, or is added into the donated first; later ones are added in place, on the fast path."""
    buf = fanin.InputBuffer(1, budget=0)
    large = [torch.full((1 << 18,), float(k)) for k in range(4)]
    for k, x in enumerate(large):
        buf.add(0, x, donate=donate and k == 0)
    assert buf.counters.in_place == (3 if donate else 2) and buf.counters.folds >= 3
    (total,) = buf.take()
    assert total.unique().tolist() == [6.0] and (total.data_ptr() == large[0].data_ptr()) == donate


@pytest.mark.parametrize("spoil", ["resize", "neg", "grad", "resize sum", "grad sum"])
def test_what_is_not_what_it_was_is_not_added_into_a_donated_sum_at_once(spoil: str) -> None:
    buf, first = fanin.InputBuffer(1, budget=0), torch.ones(1 << 18)
    buf.add(0, first, donate=True)
    buf.add(0, torch.ones(1 << 18))
    one = torch._neg_view(torch.ones(1 << 18)) if spoil == "neg" else torch.ones(1 << 18)
    if spoil == "resize sum":
        first.set_(torch.ones(0))
    elif spoil.startswith("grad"):
        (first if spoil == "grad sum" else one).requires_grad_()
    before = buf.counters.in_place
    if spoil == "resize sum":
        with pytest.raises(RuntimeError, match="changed"):
            buf.add(0, one)
            buf.take()
        assert buf.counters.in_place == before
        return
    if spoil == "resize":
        one.untyped_storage().resize_(0)
        with pytest.raises((RuntimeError, BufferError)):
            buf.add(0, one)
        assert buf.take()[0].unique().tolist() == [2.0]
        return
    buf.add(0, one)
    assert buf.counters.in_place == before + 1 and buf.take()[0].detach().unique().tolist() == [
        1.0 if spoil == "neg" else 3.0
    ]


@pytest.mark.parametrize("kind", ["dispatch", "function"])
def test_memory_that_a_mode_keeps_during_an_add_is_not_written_afterwards(kind: str) -> None:
    """A mode receives every tensor that a call of the library makes, on the general path, too. While it keeps a
    detached alias, nothing writes that memory, unless it was donated.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    kept: list[tuple[Any, list[float]]] = []

    def keep(result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            kept.append((result, result.tolist()))
        return result

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return keep(func(*args, **(kwargs or {})))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return keep(func(*args, **(kwargs or {})))

    seen = written = 0
    for dtype, budget, stats, donate, strided in itertools.product(
        (torch.float32, torch.bfloat16), (None, 0), (False, True), (False, True), (False, True)
    ):
        kept.clear()
        given = [torch.full((2, 8), float(k), dtype=dtype) for k in range(1, 6)]
        own = {t.data_ptr() for t in given} if donate else set()
        buf = fanin.InputBuffer(1, budget=budget, stats=stats)
        with Function() if kind == "function" else Dispatch():
            for t in given:
                buf.add(0, t.t() if strided else t, donate=donate)
            before = list(kept)
            (total,) = buf.take()
        assert total.float().unique().tolist() == [15.0]
        changed = [t.data_ptr() in own for t, then in before if t.tolist() != then]
        assert all(changed), (dtype, budget, stats, donate, strided)
        seen += len(before)
        written += len(changed)
    assert seen > 50 and (kind == "function" or written), (seen, written)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_a_strided_tensor_on_the_cpu_is_imported_without_python(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, dtype=getattr(torch, dtype))
    want = through(x, x, slot=Slot(accumulate="complex128" if dtype == "complex64" else "float32"))

    def describe(x: object, *how: object) -> object:
        raise AssertionError(f"{x!r} was described")

    monkeypatch.setattr("fanin._interop.arrays.describe", describe)
    assert torch.equal(through(x, x, slot=Slot(accumulate="complex128" if dtype == "complex64" else "float32")), want)
    with pytest.raises(AssertionError, match="was described"):  # its memory does not hold its value
        through(torch._neg_view(x), torch._neg_view(x))
