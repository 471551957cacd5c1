"""fanin.torch: sums of micro-batches beside torch's own accumulation."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from kit import hooks
from kit.ctrl_c import stopped
from kit.prepared import run_prepared
from kit.torch_group import group_alone

pytestmark = [
    pytest.mark.partners,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
]

torch = pytest.importorskip("torch", reason="torch is not installed")
torch_leaves = pytest.importorskip("fanin._interop.torch_leaves")

Run = Callable[[Any], None]


def network(dtype: Any = None) -> Any:
    torch.manual_seed(3)
    parts = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*parts).to(dtype or torch.bfloat16)


def passes(model: Any, n: int = 48) -> list[Run]:
    """n backward passes, one micro-batch each."""
    torch.manual_seed(4)
    dtype = next(model.parameters()).dtype

    def one(x: Any) -> Run:
        return lambda model: model(x).square().mean().backward()

    return [one(torch.randn(4, 6).to(dtype)) for _ in range(n)]


def each(model: Any, runs: list[Run]) -> list[list[Any]]:
    """The gradients of every pass by itself, a list for each parameter."""
    got: list[list[Any]] = [[] for _ in model.parameters()]
    for run in runs:
        model.zero_grad()
        run(model)
        for k, p in enumerate(model.parameters()):
            got[k].append(p.grad)
    model.zero_grad()
    return got


@pytest.mark.parametrize("budget", [0, 100, None])
@pytest.mark.parametrize("dtype", [None, "float32", "float64", "exact"])
def test_the_sum_is_rounded_once_where_torch_rounds_every_time(dtype: Any, budget: Any) -> None:
    model = network()
    runs = passes(model)
    alone = each(model, runs)
    accumulate = getattr(torch, dtype) if dtype in ("float32", "float64") else dtype
    with fanin.torch.accumulate(model.parameters(), dtype=accumulate, budget=budget):
        for run in runs:
            run(model)
            assert all(p.grad is None for p in model.parameters())
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    worse = 0
    for grads, p, sum_ in zip(alone, model.parameters(), ours, strict=True):
        true = torch.stack(grads).double().sum(0)
        assert sum_.dtype == torch.bfloat16
        if dtype in ("float64", "exact"):
            assert torch.equal(sum_, true.bfloat16())
        else:
            assert (sum_.double() - true).abs().max() <= 2**-8 * true.abs().max()
        worse += int((p.grad.double() - true).norm() > 2 * (sum_.double() - true).norm())
    assert worse == len(ours), "torch's own is worse, or there was nothing to mend"


def test_float32_sums_are_those_of_torch_bit_by_bit() -> None:
    model = network(torch.float32)
    runs = passes(model, 5)
    with fanin.torch.accumulate(model.parameters()):
        for run in runs:
            run(model)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_a_gradient_that_is_there_is_the_first_term_and_an_optimizer_goes_on_from_the_sum() -> None:
    model = network(torch.float64)
    runs = passes(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs[0](model)
    kept = [p.grad for p in model.parameters()]
    values = [g.clone() for g in kept]
    collected = fanin.torch.accumulate(model.parameters())
    with collected:
        for run in runs[1:]:
            run(model)
    ours = [p.grad.clone() for p in model.parameters()]
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True)), "L5"
    assert not any(torch.equal(a, b) for a, b in zip(kept, values, strict=True))
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))
    optimizer.step()
    model.zero_grad()
    with collected:  # once more
        runs[0](model)
    assert all(p.grad is not None for p in model.parameters())
    runs[0](model)  # the hooks are gone
    assert all(p.grad is not None for p in model.parameters())


def test_what_came_before_an_error_is_left_and_the_error_goes_on() -> None:
    model = network(torch.float32)
    runs = passes(model, 2)
    with pytest.raises(ZeroDivisionError), fanin.torch.accumulate(model.parameters()):
        for run in runs:
            run(model)
        1 / 0
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_what_gets_no_gradient_keeps_none_and_frozen_ones_are_passed_over() -> None:
    model = network(torch.float32)
    model[0].weight.requires_grad_(False)
    other = torch.nn.Parameter(torch.ones(2))
    with fanin.torch.accumulate([*model.parameters(), other, other]):
        passes(model, 1)[0](model)
    assert other.grad is None
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None


@pytest.mark.parametrize("there", [False, True])
def test_main_grad_keeps_the_dtype_of_the_sum(there: bool) -> None:
    model = network()
    runs = passes(model)
    alone = each(model, runs)
    before = [torch.full(p.shape, 0.5) for p in model.parameters()]
    for p, b in zip(model.parameters(), before, strict=True):
        if there:
            p.main_grad = b
    with fanin.torch.accumulate(model.named_parameters(), dtype=torch.float32, into="main_grad"):
        for run in runs:
            run(model)
    for p, b, grads in zip(model.parameters(), before, alone, strict=True):
        start = torch.full(p.shape, 0.5) if there else -torch.zeros(p.shape)
        want = torch.zeros(0)
        for g in [start, *grads] if there else grads:
            want = g.float() if want.numel() == 0 else want + g.float()
        assert p.grad is None
        assert p.main_grad.dtype == torch.float32
        assert torch.equal(p.main_grad, want)
        assert (p.main_grad is b) == there


def test_sparse_gradients_stay_sparse() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    rows = [torch.tensor([1, 4]), torch.tensor([4, 7])]
    with fanin.torch.accumulate(table.parameters()):
        for r in rows:
            table(r).sum().backward()
    assert table.weight.grad.is_sparse
    want = torch.zeros(10, 3)
    want[[1, 7]] = 1
    want[4] = 2
    assert torch.equal(table.weight.grad.to_dense(), want)


def test_nonsense_is_refused_and_says_what_is_expected() -> None:
    model = network(torch.float32)
    weight = model[0].weight
    with pytest.raises(TypeError, match=r"expected several tensors, got one: give \[tensor\]"):
        fanin.torch.accumulate(weight)
    with pytest.raises(TypeError, match=r"got an int as parameters\[1\]"):
        fanin.torch.accumulate([weight, 3])
    with pytest.raises(TypeError, match=r"parameters\[0\] is no leaf"):
        fanin.torch.accumulate([weight * 2])
    with pytest.raises(ValueError, match="into is"):
        fanin.torch.accumulate([weight], into="grads")
    with fanin.torch.accumulate(model.named_parameters()):
        with pytest.raises(
            ValueError, match=r"the gradient of parameters\[0\] is collected by another block already, as 0.weight"
        ):
            fanin.torch.accumulate([weight]).__enter__()
        passes(model, 1)[0](model)
    assert weight.grad is not None
    weight.grad = None
    weight.main_grad = torch.ones(2)
    with (
        pytest.raises(ValueError, match=r"^accumulate: w: expected"),
        fanin.torch.accumulate([("w", weight)], into="main_grad"),
    ):
        pass
    with fanin.torch.accumulate([weight]):  # and it is free again
        pass


def test_a_block_that_cannot_begin_leaves_every_gradient_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    for k, p in enumerate((first, second, third)):
        p.grad = torch.full((2,), float(k))

    class Node:
        def __init__(self, good: bool) -> None:
            self.good = good

        def register_prehook(self, hook: Any) -> Any:
            if not self.good:
                raise RuntimeError("no hooks today")
            return torch.autograd.graph.get_gradient_edge(first).node.register_prehook(hook)

    monkeypatch.setattr(
        torch_leaves, "accumulators", lambda _, parameters, names: [Node(p is not second) for p in parameters]
    )
    with pytest.raises(RuntimeError, match="no hooks today"):
        fanin.torch.accumulate([first, second, third]).__enter__()
    assert [p.grad.tolist() for p in (first, second, third)] == [[0, 0], [1, 1], [2, 2]]


# What becomes of .grad


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_gradient_that_was_there_keeps_its_tensor_and_its_memory(dtype: str, into: str) -> None:
    """L5: a flat buffer, of which the gradients are views, has the sums, and a captured step reads them at the address
    that it recorded.
    """
    model = network(getattr(torch, dtype))
    runs = passes(model, 3)
    sums = torch.float32 if into == "main_grad" and dtype == "bfloat16" else getattr(torch, dtype)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=sums)
    views, at = [], 0
    for p in model.parameters():
        setattr(p, into, flat[at : at + p.numel()].view(p.shape))
        views.append(getattr(p, into))
        at += p.numel()
    for _ in range(2):
        with fanin.torch.accumulate(model.parameters(), into=into):
            for run in runs:
                run(model)
        assert all(getattr(p, into) is v for p, v in zip(model.parameters(), views, strict=True))
    before = flat.clone()
    for p in model.parameters():
        p.grad = None
    for run in [*runs, *runs]:
        run(model)
    plain = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
    tolerance = 0.1 if dtype == "bfloat16" else 1e-6
    assert (before.double() - plain).abs().max() <= tolerance * plain.abs().max() and plain.abs().max() > 0


def test_one_that_was_there_and_to_which_nothing_comes_is_left_as_it_is() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 7.0)
    was, version = p.grad, p.grad._version
    with fanin.torch.accumulate([p]):
        assert p.grad is None
    assert p.grad is was and was.tolist() == [7.0] * 3 and was._version == version


def test_zero_grad_inside_takes_nothing_from_the_sum() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = network(dtype)
        runs = passes(model, 4)
        with fanin.torch.accumulate(model.parameters()):
            for run in runs:
                run(model)
                model.zero_grad()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        with fanin.torch.accumulate(model.parameters()):
            for run in runs:
                run(model)
        assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


def test_gradients_of_one_memory_are_not_summed_into_each_other() -> None:
    """torch lets two leaves have views of one gradient as their .grad; neither is written here."""
    a, b = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(16))
    with fanin.torch.accumulate([a, b], budget=0):
        for k in (1.0, 10.0, 100.0):
            given = torch.full((16,), k)
            (a.view(-1) + b).backward(given)
            assert given.tolist() == [k] * 16
    assert a.grad.tolist() == [[111.0] * 4] * 4 and b.grad.tolist() == [111.0] * 16


# Messages


def test_a_gradient_that_records_a_graph_is_refused_by_name() -> None:
    model = network(torch.float32)
    x = torch.ones(4, 6)
    with fanin.torch.accumulate(model.named_parameters()):
        model(x).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"the gradient of \d\.\w+ records a graph.*create_graph=True"):
            model(x).square().mean().backward(create_graph=True)
        assert all(p.grad is None or not p.grad.requires_grad for p in model.parameters())
    assert all(p.grad is not None and not p.grad.requires_grad for p in model.parameters())


def test_an_iterator_that_was_used_up_is_no_model_without_parameters() -> None:
    parameters = network().parameters()
    list(parameters)
    with pytest.raises(
        ValueError,
        match=r"expected parameters, got none; an iterator, .* is empty once it has been used: call it again",
    ):
        fanin.torch.accumulate(parameters)
    with pytest.raises(ValueError, match=r"expected parameters, got none$"):
        fanin.torch.accumulate([])
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with fanin.torch.accumulate([frozen]):  # there is one, and it wants nothing
        pass
    with pytest.raises(TypeError, match=r"expected tensors, got a Sequential: give model\.parameters\(\)"):
        fanin.torch.accumulate(network())


def test_errors_name_the_parameter() -> None:
    w = torch.nn.Parameter(torch.ones(2, 3))
    for parameters, name in (([w], r"parameters\[0\]"), ([("layer.weight", w)], r"layer\.weight")):
        with pytest.raises(
            ValueError, match=rf"^accumulate: {name}: accumulate=float16 cannot hold a sum of dtype float32"
        ):
            fanin.torch.accumulate(parameters, torch.float16)
    with fanin.torch.accumulate([("layer.weight", w)]) as block:
        block._buffer.expect(0, 1)
        w.sum().backward()
        with pytest.raises(ValueError, match=r"^accumulate: layer\.weight: .*1 contribution") as refused:
            w.sum().backward()
        assert "slot" not in str(refused.value) and w.grad is None
    assert w.grad.tolist() == [[1.0] * 3] * 2


def test_it_says_what_it_is_and_what_it_has() -> None:
    model = network()
    block = fanin.torch.accumulate(model.parameters())
    assert repr(block) == "<fanin.torch.accumulate: 4 parameters into .grad, sums in float32: not collecting>"
    with block:
        for run in passes(model, 3):
            run(model)
        assert "12 gradients so far" in repr(block)
    one = fanin.torch.accumulate([torch.nn.Parameter(torch.ones(1))], into="main_grad", dtype="exact")
    assert repr(one) == "<fanin.torch.accumulate: 1 parameter into .main_grad, sums in float32: not collecting>"


def test_a_block_that_is_dropped_lets_go_of_its_parameters() -> None:
    model = network(torch.float32)
    runs = passes(model, 2)
    block = fanin.torch.accumulate(model.parameters())
    block.__enter__()
    gone = weakref.ref(block)
    runs[0](model)
    with pytest.warns(ResourceWarning, match="dropped without its exit.*4 gradients so far"):
        del block
        gc.collect()
    assert gone() is None and all(p.grad is not None for p in model.parameters()), "what had come is not lost"
    runs[1](model)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    for run in runs:
        run(model)
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))
    with fanin.torch.accumulate(model.parameters()):  # it may be collected again
        runs[0](model)


def test_what_is_taken_is_known_by_the_tensor_and_not_by_a_number() -> None:
    """A new parameter may get the id of one that was freed; a model that is dropped inside of a block blocks no other
    parameter.
    """
    for _ in range(200):
        p = torch.nn.Parameter(torch.ones(1))
        block = fanin.torch.accumulate([p])
        block.__enter__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del p, block
    gc.collect()
    assert not torch_leaves._takings


# Memory


def test_gradients_of_micro_batches_do_not_pile_up() -> None:
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    size = sum(p.numel() for p in model.parameters()) * 4
    block = fanin.torch.accumulate(model.parameters())
    with block:
        for _ in range(40):
            model(torch.ones(2, 256)).sum().backward()
        waiting = block._buffer.counters.peak_parked_bytes
    assert waiting <= size + max(hooks.auto_budget()[0], size), waiting
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_in_their_own_dtype_are_added_at_once_and_keep_no_memory() -> None:
    """As torch does; so a block holds one gradient of each parameter, and the one that arrives."""
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    model, x = torch.nn.Sequential(*layers), torch.randn(4, 64)
    size, largest = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    with fanin.torch.accumulate(model.parameters()) as block:
        for _ in range(8):
            model(x).square().mean().backward()
        counters = block._buffer.counters
    assert counters.peak_parked_bytes <= size + largest
    assert counters.in_place == 7 * len(list(model.parameters())), "into the first one, to which nothing else refers"
    with fanin.torch.accumulate(model.bfloat16().parameters()) as block:
        for _ in range(8):
            model(x.bfloat16()).square().mean().backward()
        counters = block._buffer.counters
    assert counters.peak_parked_bytes <= size / 2 + largest, "as wide sums, which are rounded once"
    assert counters.in_place == 7 * len(list(model.parameters())), "a .grad and the first gradient make the wide memory"


def test_a_sum_that_only_the_buffer_refers_to_is_checked_once_and_any_other_at_each_add() -> None:
    """Whether a sum's memory holds its value: other code that can reach the sum, by a weak reference, too, may have
    given the tensor other memory.
    """
    from torch.overrides import TorchFunctionMode

    asked: list[int] = []

    class Counts(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.is_neg:
                asked.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    fanin.InputBuffer(1).add(0, torch.ones(1))  # the first tensor of a process is not for the fast path
    for holds in (lambda t: None, weakref.ref, lambda t: t):
        buf = fanin.InputBuffer(1, budget=0)
        first = torch.ones(4)
        at, held = first.data_ptr(), holds(first)
        buf.add(0, first, donate=True)
        del first
        asked.clear()
        with Counts():
            for _ in range(4):
                buf.add(0, torch.ones(4))
        assert asked.count(at) == (1 if held is None else 4), holds
        assert buf.take()[0].tolist() == [5.0] * 4


@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_parameter_that_takes_no_gradient_any_more_keeps_no_other_from_its_own(into: str) -> None:
    """As where the block frees a parameter's data."""
    a, b, c, d = parameters = [torch.zeros(4, requires_grad=True) for _ in range(4)]
    first = torch.ones(4)
    setattr(c, into, first)
    block = fanin.torch.accumulate([("a", a), ("b", b), ("c", c), ("d", d)], into=into)
    refused = pytest.raises(RuntimeError, match=r"^accumulate: there is no \.grad for the sum of b, d: .*size")
    with refused if into == "grad" else contextlib.nullcontext(), block:
        for _ in range(2):
            sum(parameters).sum().backward()
        b.data = d.data = torch.empty(0)
    assert getattr(a, into).tolist() == [2.0] * 4 and b.grad is d.grad is None
    assert getattr(c, into) is first and first.tolist() == [3.0] * 4
    with fanin.torch.accumulate(parameters[:1]):  # no block takes it any more
        a.sum().backward()


# Several threads


@pytest.mark.parametrize("rounds", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_several_threads_run_passes_at_once(rounds: int) -> None:
    """Each adds all it has: the sums are those of small numbers, which no order changes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for i in range(rounds):
            dtype = (torch.float32, torch.bfloat16)[i % 2]
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(dtype)
            x = torch.ones(2, 6, dtype=dtype)
            for p in model.parameters():
                p.data.fill_(0.5)
            model(x).sum().backward()
            once = [p.grad.double() for p in model.parameters()]
            model.zero_grad()
            errors: list[BaseException] = []

            def work(model: Any = model, x: Any = x, errors: list[BaseException] = errors) -> None:
                try:
                    for _ in range(8):
                        model(x).sum().backward()
                except BaseException as e:
                    errors.append(e)

            threads = [threading.Thread(target=work) for _ in range(4)]
            with fanin.torch.accumulate(model.parameters()):
                for t in threads:
                    t.start()
                for t in threads:
                    t.join()
            assert not errors
            for p, g in zip(model.parameters(), once, strict=True):
                assert torch.equal(p.grad.double(), 32 * g), i
    finally:
        sys.setswitchinterval(interval)


# The end


HERE = str(Path(fanin.__file__).parent)


@pytest.mark.parametrize("into", ["grad", "main_grad"])
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_what_stops_the_end_of_a_block_anywhere_takes_no_gradient_along(into: str, step: int) -> None:
    at, stops = 1, 0
    while True:
        a, b, c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        first = torch.full((3,), 10.0)
        setattr(b, into, first)
        block = fanin.torch.accumulate([a, b, c], into=into)
        block.__enter__()
        for _ in range(2):
            (a * 2 + b * 3).sum().backward()
        if not stopped(at, lambda block=block: block.__exit__(None, None, None), HERE):
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del block  # before the first step of its exit, it is a block that is dropped
            gc.collect()  # else its end may be what the next round stops
        assert getattr(a, into).tolist() == [4.0] * 3, at
        assert getattr(b, into) is first and first.tolist() == [16.0] * 3, at
        assert getattr(c, into, None) is None
        with fanin.torch.accumulate([a, b, c]):  # no block takes them any more
            pass
        at += step
        stops += 1
    assert stops > 500 // step


# Which blocks have begun


def in_the_middle(at: int, call: Callable[[], None], act: Callable[[], None]) -> bool:
    """Calls `call`, and `act` before the bytecode `at` of `Taking.begin`. Whether there is one."""
    begin, left = torch_leaves.Taking.begin.__code__, at

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not begin:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left <= 0


def taking(p: Any, name: str) -> Any:
    return torch_leaves.Taking("accumulate", [p], [name])


def refuses(p: Any) -> None:
    with pytest.raises(ValueError, match="the gradient of mine is collected by another block already, as theirs"):
        taking(p, "mine").begin([lambda gradients: None])


@pytest.mark.parametrize("dropped", [False, True])
def test_a_block_that_ends_while_another_begins_hides_none(dropped: bool) -> None:
    other, p, at, met = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2)), 0, True
    while met:
        at += 1
        ends, theirs = taking(other, "other"), taking(p, "theirs")
        for one in (ends, theirs):
            one.begin([lambda gradients: None])
        held = [ends]
        del ends, one
        met = in_the_middle(at, lambda: refuses(p), held.clear if dropped else lambda held=held: held[0].end())
        theirs.end()
        held.clear()
    again = taking(p, "again")
    again.begin([lambda gradients: None])
    assert at > 50 and len(torch_leaves._takings) == 1
    again.end()
    assert torch_leaves._takings == []


def test_of_two_threads_that_begin_a_block_for_one_parameter_one_is_refused() -> None:
    p, at, met = torch.nn.Parameter(torch.ones(2)), 0, True
    while met:
        at += 1
        outcomes: list[str] = []
        both = [taking(p, "a"), taking(p, "b")]

        def begin(one: Any, outcomes: list[str] = outcomes) -> None:
            try:
                one.begin([lambda gradients: None])
                outcomes.append("begun")
            except ValueError:
                outcomes.append("refused")

        second = threading.Thread(target=begin, args=(both[1],))

        def meanwhile(second: threading.Thread = second) -> None:
            second.start()
            second.join(0.01)  # it waits where the first has the lock

        met = in_the_middle(at, lambda both=both: begin(both[0]), meanwhile)
        if met:
            second.join()
            assert sorted(outcomes) == ["begun", "refused"], at
        for one in both:
            one.end()
    assert at > 50


@pytest.mark.parametrize("size", [4, 1 << 17])
@pytest.mark.parametrize("left", [0, 2])
def test_what_has_no_memory_any_more_takes_no_other_gradient_along(left: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = (torch.nn.Parameter(torch.ones(size, dtype=dtype)) for _ in range(3))
        for p in (a, b, c):
            p.grad = torch.ones(size, dtype=dtype)
        there = b.grad
        block = fanin.torch.accumulate([("a", a), ("b", b), ("c", c)])
        with pytest.raises(RuntimeError, match=r"^accumulate: there is no \.grad for the sum of b: "), block:
            (a + b + c).sum().backward()
            there.untyped_storage().resize_(left)
        assert a.grad.tolist() == c.grad.tolist() == [2.0] * size and b.grad is there
        with fanin.torch.accumulate([a, c]):
            (a + c).sum().backward()
        assert a.grad.tolist() == [3.0] * size


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_a_block_that_is_entered_again_inside_itself_refuses_that_and_goes_on(ranks: int | None) -> None:
    def train(group: Any) -> list[Any]:
        p = torch.nn.Parameter(torch.ones(2))
        block = fanin.torch.accumulate([p], group=group)
        with block:
            (p * 3).sum().backward()
            with pytest.raises(ValueError, match=r"^accumulate: the block has begun already"), block:
                raise AssertionError("it is never here")
            (p * 5).sum().backward()
        first = p.grad.tolist()
        with block:
            (p * 2).sum().backward()
        second = p.grad.tolist()
        p.sum().backward()
        return [first, second, p.grad.tolist()]

    n = ranks or 1
    want = [[8.0 * n] * 2, [10.0 * n] * 2, [10.0 * n + 1] * 2]
    got = [train(None)] if ranks is None else fanin.dist.threads(ranks, train, timeout=None)
    assert got == [want] * n


def test_an_exit_without_its_beginning_is_an_error() -> None:
    block = fanin.torch.accumulate([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(RuntimeError, match=r"^accumulate: __exit__ without __enter__$"):
        block.__exit__(None, None, None)
    with block:
        pass
    with pytest.raises(RuntimeError, match="without __enter__"):
        block.__exit__(None, None, None)


def test_hooks_after_the_gradient_run_once_at_the_end() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    seen: list[Any] = []
    for one in (p, q):
        one.register_post_accumulate_grad_hook(lambda x: seen.append((x is p, x.grad.tolist())))
    with fanin.torch.accumulate([p, q]):
        for _ in range(3):
            p.sum().backward()
        assert not seen
    assert seen == [(True, [3.0, 3.0])]
    p.grad = None
    with pytest.raises(ZeroDivisionError), fanin.torch.accumulate([p]):
        p.sum().backward()
        1 / 0
    assert len(seen) == 1 and p.grad.tolist() == [1.0, 1.0]
    removed = p.register_post_accumulate_grad_hook(lambda x: 1 / 0)
    with fanin.torch.accumulate([p]):
        removed.remove()
        p.sum().backward()
    p.sum().backward()
    assert [grad for _, grad in seen] == [[3.0, 3.0], [2.0, 2.0], [3.0, 3.0]]


def test_an_optimizer_in_the_backward_pass_steps_once_with_the_sum() -> None:
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], 1.0)
    p.register_post_accumulate_grad_hook(lambda _: (optimizer.step(), optimizer.zero_grad()))
    with fanin.torch.accumulate([p]):
        for _ in range(3):
            p.sum().backward()
    assert p.tolist() == [-3.0, -3.0] and p.grad is None


def test_what_is_set_within_the_block_is_told() -> None:
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    with (
        pytest.raises(RuntimeError, match=r"^accumulate: \.grad of q was set within the block, by an assignment"),
        fanin.torch.accumulate([("p", p), ("q", q)]),
    ):
        (p + q).sum().backward()
        q.grad = torch.zeros(2)
    assert p.grad.tolist() == q.grad.tolist() == [1.0, 1.0]


def test_a_replica_that_would_not_be_synchronised_is_told(tmp_path: Any) -> None:
    with group_alone(tmp_path):
        model = torch.nn.Linear(2, 2)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        with (
            pytest.raises(RuntimeError, match=r"\.grad of .* was set within the block, .* DistributedDataParallel"),
            fanin.torch.accumulate(model.parameters()),
        ):
            replica(torch.ones(1, 2)).sum().backward()
        model.zero_grad()
        with fanin.torch.accumulate(model.parameters()), replica.no_sync():
            for _ in range(2):
                replica(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad.tolist() == [2.0, 2.0]


# What a gradient shares


def test_gradients_that_somebody_else_has_are_copied() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.nn.Parameter(torch.ones(8, dtype=dtype)) for _ in range(2))
        with fanin.torch.accumulate([a, b]):
            for k in (1.0, 2.0):
                given = torch.full((8,), k, dtype=dtype)
                (a + b).backward(given)
                a.backward(given)
                assert given.tolist() == [k] * 8
                given.fill_(-100)
            a.sum().backward()  # one number, expanded
        assert a.grad.tolist() == [7.0] * 8 and b.grad.tolist() == [3.0] * 8
        assert a.grad.is_contiguous()


def test_gradients_of_passes_of_fanins_own_are_collected() -> None:
    model = network(torch.float32)
    runs = passes(model, 3)
    with fanin.torch.accumulate(model.parameters()):
        for run in runs:
            run(model)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    own = torch.Tensor.backward
    torch.Tensor.backward = lambda self: fanin.torch.backward(self)  # type: ignore[method-assign]
    try:
        with fanin.torch.accumulate(model.parameters()):
            for run in runs:
                run(model)
    finally:
        torch.Tensor.backward = own  # type: ignore[method-assign]
    assert all(torch.equal(a, p.grad) for a, p in zip(ours, model.parameters(), strict=True))


@pytest.mark.parametrize("n", [8, 1 << 14, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_whose_memory_others_have_are_copied(n: int, dtype: Any) -> None:
    """torch itself lets `.grad` be a view of them: its sums are wrong then."""
    a, b = (torch.nn.Parameter(torch.ones(n, dtype=dtype)) for _ in range(2))
    kept: list[Any] = []
    given = torch.ones(n, dtype=dtype)
    with fanin.torch.accumulate([a, b]):
        for k in (1.0, 2.0, 5.0):
            given.fill_(k)
            (a.view(1, n) + b.view(1, n)).backward(given.view(1, n))
            assert given.eq(k).all()
        handles = [p.register_hook(kept.append) for p in (a, b)]
        for _ in range(2):
            (a * 2 + b * 3).sum().backward()
            for g in kept:
                g.fill_(-100)
        for h in handles:
            h.remove()
    assert a.grad.eq(12).all() and b.grad.eq(14).all() and len(kept) == 4
    assert all(g.eq(-100).all() for g in kept)


@contextlib.contextmanager
def frames_of_dynamo() -> Iterator[None]:
    """Dynamo evaluates frames, as while any thread runs a compiled function: calls of Python functions add references
    to their arguments.
    """
    from torch._C._dynamo.eval_frame import set_eval_frame

    before = set_eval_frame(False)
    try:
        yield
    finally:
        set_eval_frame(before)


@contextlib.contextmanager
def frames_kept() -> Iterator[None]:
    """A trace function reads the variables of each frame, as a debugger does, and so refers to them."""
    before = sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        frame.f_locals
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


MEASURED: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "dynamo": frames_of_dynamo,
    "traced": frames_kept,
    "fake": fake_tensors,
}


@pytest.fixture(params=MEASURED)
def measured(request: pytest.FixtureRequest) -> Iterator[None]:
    """The references that a gradient has are measured once in a process: wherever that happens they are the same."""
    measure = torch_leaves.counts_alone
    measure.cache_clear()
    with MEASURED[request.param]():
        measure()
    yield
    measure.cache_clear()


@pytest.mark.parametrize("frames", [contextlib.nullcontext, frames_of_dynamo])
def test_large_gradients_that_nothing_else_refers_to_are_not_copied(measured: None, frames: Any) -> None:
    for view in (False, True):  # the first one alone is counted: the others are added to it without a copy
        p = torch.nn.Parameter(torch.ones(256, 256))
        block = fanin.torch.accumulate([p])
        with block, frames():
            for _ in range(3):
                (torch.nn.functional.linear(torch.ones(1, 256), p) if view else p * 2).sum().backward()
        assert block._buffer.counters.copies == 0 and p.grad.eq(3 if view else 6).all()


class Made(torch.autograd.Function):  # type: ignore[misc,name-defined]
    """The gradient of a sum, as a function of its shape makes it."""

    @staticmethod
    def forward(ctx: Any, x: Any, make: Callable[[Any], Any]) -> Any:
        ctx.shape, ctx.make = x.shape, make
        return x.sum()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return ctx.make(ctx.shape), None


#: What refers to the memory of a new tensor, or to an object that leads to it.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "its storage": lambda t: t.untyped_storage(),
    "a weak reference to its storage": lambda t: weakref.ref(t.untyped_storage()),
    "a weak reference to it": weakref.ref,
    "a capsule": torch.utils.dlpack.to_dlpack,
    "an ndarray": lambda t: t.numpy(),
    "a tensor of its storage": lambda t: t.new_empty(0).set_(t.untyped_storage()),
    "a part": lambda t: t[3:],
    "another process": lambda t: t.share_memory_().shape,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_large_gradient_is_not_written_where_something_leads_to_its_memory(holder: str) -> None:
    kept: list[Any] = []

    def make(shape: Any) -> Any:
        made = torch.ones(shape)
        kept.append(HOLDERS[holder](made))
        return made

    p = torch.nn.Parameter(torch.ones(1 << 14))
    block = fanin.torch.accumulate([p])
    with block:
        for _ in range(3):
            Made.apply(p, make).backward()
    assert block._buffer.counters.copies == 1 and p.grad.eq(3).all() and len(kept) == 3


def test_a_large_gradient_that_is_a_view_of_a_tensor_that_something_refers_to_is_not_written() -> None:
    scratch = torch.empty(128, 128)
    made = iter((1.0, 2.0, 3.0))

    def make(shape: Any) -> Any:
        return scratch.fill_(next(made)).view(shape)

    p = torch.nn.Parameter(torch.ones(1 << 14))
    block = fanin.torch.accumulate([p])
    with block:
        for _ in range(3):
            Made.apply(p, make).backward()
            scratch.fill_(100)
    assert block._buffer.counters.copies == 1 and p.grad.eq(6).all() and scratch.eq(100).all()


@pytest.mark.parametrize(
    "lend", [torch.from_numpy, torch.from_dlpack, lambda a: torch.frombuffer(a, dtype=torch.float32)]
)
def test_a_large_gradient_is_not_written_where_its_memory_is_another_librarys(lend: Callable[[Any], Any]) -> None:
    lent: list[Any] = []

    def make(shape: Any) -> Any:
        lent.append(np.ones(shape, np.float32))
        return lend(lent[-1])

    p = torch.nn.Parameter(torch.ones(1 << 14))
    with fanin.torch.accumulate([p]):
        for _ in range(3):
            Made.apply(p, make).backward()
    assert p.grad.eq(3).all() and [a.max() for a in lent] == [1, 1, 1]


def test_a_hook_may_keep_the_storage_of_a_large_gradient() -> None:
    kept: list[Any] = []
    p = torch.nn.Parameter(torch.ones(1 << 14))
    p.register_hook(lambda g: kept.append(g.untyped_storage()))
    with fanin.torch.accumulate([p]):
        for k in (1, 2, 3):
            (p * k).sum().backward()
    seen = [torch.empty(0).set_(one)[0].item() for one in kept]
    assert p.grad.eq(6).all() and seen == [1, 2, 3]


@pytest.mark.parametrize("frames", [contextlib.nullcontext, frames_of_dynamo])
def test_large_gradients_that_others_refer_to_are_copied(measured: None, frames: Any) -> None:
    for holders in range(1, 5):
        p = torch.nn.Parameter(torch.ones(256, 256))
        kept: list[Any] = []
        p.register_hook(lambda g, kept=kept, n=holders: kept.extend([g] * n))
        block = fanin.torch.accumulate([p])
        with block, frames():
            for _ in range(2):
                (p * 2).sum().backward()
        assert block._buffer.counters.copies == 1, "the first; the second is read"
        assert p.grad.eq(4).all() and all(g.eq(2).all() for g in kept)


# What torch has beside


def checkpointed(reentrant: bool) -> Callable[[Any, Any], Any]:
    checkpoint = torch.utils.checkpoint.checkpoint
    return lambda m, x: checkpoint(m, x.requires_grad_(), use_reentrant=reentrant)


def compiled(m: Any, x: Any) -> Any:
    return torch.compile(m, backend="aot_eager")(x)


FEATURES: dict[str, tuple[Any, Any]] = {
    "plain": (lambda m, x: m(x), lambda m, y: y.square().mean().backward()),
    "retain_graph": (
        lambda m, x: m(x).square().mean(),
        lambda m, y: [y.backward(retain_graph=True), y.backward()],
    ),
    "several roots": (lambda m, x: m(x), lambda m, y: torch.autograd.backward([y.sum(), y.square().sum()])),
    "inputs": (lambda m, x: m(x), lambda m, y: y.sum().backward(inputs=list(m.parameters())[1:])),
    "grad beside": (
        lambda m, x: m(x),
        lambda m, y: [torch.autograd.grad(y.sum(), list(m.parameters()), retain_graph=True), y.sum().backward()],
    ),
    "checkpoint": (checkpointed(False), lambda m, y: y.square().mean().backward()),
    "checkpoint, reentrant": (checkpointed(True), lambda m, y: y.square().mean().backward()),
    "compiled": (compiled, lambda m, y: y.square().mean().backward()),
    "anomaly": (lambda m, x: m(x), lambda m, y: anomalous(y.square().mean())),
    "fanin's own pass": (lambda m, x: m(x), lambda m, y: fanin.torch.backward(y.square().mean())),
}


def anomalous(loss: Any) -> None:
    with torch.autograd.detect_anomaly():
        loss.backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEATURES)
def test_sums_are_those_of_torch_bit_by_bit_with_each_feature(name: str) -> None:
    forward, backward = FEATURES[name]
    model = network(torch.float32)
    torch.manual_seed(5)
    batches = [torch.randn(4, 6) for _ in range(3)]
    seen: list[list[Any]] = []
    sums: list[list[Any]] = []
    for block in (contextlib.nullcontext(), fanin.torch.accumulate(model.parameters())):
        order: list[Any] = []
        handles = [
            p.register_hook(lambda g, k=k, order=order: order.append((k, g.tolist())))
            for k, p in enumerate(model.parameters())
        ]
        with block:
            for x in batches:
                backward(model, forward(model, x.clone()))
        for h in handles:
            h.remove()
        seen.append(order)
        sums.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert seen[0] == seen[1] and seen[0], "hooks of tensors run in each pass"
    for a, b in zip(*sums, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))
    assert any(a is not None for a in sums[0])


@pytest.mark.parametrize(("own", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float64")])
def test_sums_have_the_dtype_that_a_parameter_wants_for_its_gradients(own: str, wanted: str) -> None:
    p = torch.nn.Parameter(torch.ones(64, dtype=getattr(torch, own)))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    p.grad_dtype = getattr(torch, wanted)
    parts = [torch.randn(64, dtype=torch.float64) for _ in range(9)]
    with fanin.torch.accumulate([p]):
        for x in parts:
            (p.to(p.grad_dtype) * x.to(p.grad_dtype)).sum().backward()
    assert p.grad.dtype == p.grad_dtype
    p.grad_dtype = None
    with pytest.raises(ValueError, match=r"^accumulate: the grad_dtype of w is None"):
        fanin.torch.accumulate([("w", p)])


@pytest.mark.filterwarnings("ignore")
def test_what_is_sharded_is_refused(tmp_path: Any) -> None:
    tensor, fsdp = pytest.importorskip("torch.distributed.tensor"), pytest.importorskip("torch.distributed.fsdp")
    with group_alone(tmp_path):
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        leaf = torch.nn.Parameter(tensor.distribute_tensor(torch.ones(4), mesh))
        flat = fsdp.FullyShardedDataParallel(torch.nn.Linear(3, 4), device_id=torch.device("cpu"))
        for parameters, what in (
            ([("w", leaf)], "w is sharded by DTensor"),
            (flat.parameters(), r"\[0\] is sharded by FSDP"),
        ):
            with pytest.raises(RuntimeError, match=rf"^accumulate: .*{what}"):
                fanin.torch.accumulate(parameters)


# What fails


def test_what_has_no_memory_for_its_sum_takes_no_other_gradient_along(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (torch.nn.Parameter(torch.ones(n)) for n in (3, 4))
    empty = torch.empty_strided

    def full(shape: Any, strides: Any, **how: Any) -> Any:
        if tuple(shape) == (4,):
            raise RuntimeError("no memory")
        return empty(shape, strides, **how)

    block = fanin.torch.accumulate([("a", a), ("b", b)], into="main_grad")
    with (
        pytest.raises(RuntimeError, match=r"^accumulate: there is no \.main_grad for the sum of b: .*no memory"),
        block,
    ):
        (a.sum() + b.sum()).backward()
        monkeypatch.setattr(torch, "empty_strided", full)
    assert a.main_grad.tolist() == [1.0] * 3 and not hasattr(b, "main_grad")


@pytest.mark.parametrize("n", [4, 1 << 15])
def test_a_pass_that_runs_past_the_end_of_the_block_loses_nothing_in_silence(n: int) -> None:
    p = torch.nn.Parameter(torch.ones(n))
    at_work, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(_: Any) -> None:
        at_work.set()
        ended.wait()

    node = torch.autograd.graph.get_gradient_edge(p).node
    node.register_prehook(wait)  # before that of the block
    loss = (p * 2).sum()

    def work() -> None:
        try:
            loss.backward()
        except RuntimeError as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    with fanin.torch.accumulate([("p", p)]):
        thread.start()
        at_work.wait()
    ended.set()
    thread.join()
    if errors:
        assert "the block ended while a backward pass ran in another thread" in str(errors[0]) and p.grad is None
    else:
        assert p.grad.eq(2).all()


def test_the_name_of_a_parameter_comes_from_the_errors_fields_and_not_from_its_message() -> None:
    buf = fanin.InputBuffer([fanin.Slot(2, "float32"), fanin.Slot(2, "float32", name="slot 0 (a)")], name="accumulate")
    with pytest.raises(ValueError, match="slot 1") as caught:
        buf.add(1, torch.ones(3))
    reason = getattr(caught.value, "reason")  # noqa: B009
    caught.value.args = ("another message altogether",)
    with pytest.raises(ValueError, match="accumulate: slot 0: b"), fanin.torch.accumulation._named(["w", "slot 0: b"]):
        raise caught.value
    assert caught.value.args == (f"accumulate: slot 0: b: {reason}",)


# Python's end

#: Ways to leave a block open to the end.
OPEN = {
    "a global": "block = fanin.torch.accumulate([p]); block.__enter__(); step()",
    "a loop that is a generator": """
def train():
    with fanin.torch.accumulate([p]):
        while True:
            yield step()
loop = train()
next(loop)
""",
    "a stack": """
stack = contextlib.ExitStack()
stack.enter_context(fanin.torch.accumulate([p]))
step()
""",
    "a cycle": """
gc.disable()
def circle():
    block = fanin.torch.accumulate([p])
    circle = [block.__enter__()]
    circle.append(circle)
    step()
circle()
""",
    "a large model": """
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(50)])
block = fanin.torch.accumulate([p, *model.parameters()]); block.__enter__(); step()
model(torch.ones(2, 64)).sum().backward()
""",
    "a thread": """
def run():
    with fanin.torch.accumulate([p]):
        step(); begun.set(); threading.Event().wait()
begun = threading.Event()
threading.Thread(target=run, daemon=True).start(); begun.wait()
""",
    "one that another's end leaves open": """
first = torch.nn.Parameter(torch.ones(2)); first.grad = torch.ones(2)
bad = fanin.torch.accumulate([first]); bad.__enter__(); first.sum().backward(); first.data = torch.ones(3)
block = fanin.torch.accumulate([p]); block.__enter__(); step()
""",
    "one that begins while Python ends": """
def late():
    global block
    block = fanin.torch.accumulate([p]); block.__enter__(); step()
atexit.register(late)
""",
}


@pytest.mark.parametrize("way", OPEN)
def test_a_block_that_is_open_when_python_ends_leaves_its_sums(way: str) -> None:
    begin = """
import atexit, contextlib, gc, threading, torch
atexit.register(lambda: print(p.grad.tolist(), flush=True))
import fanin.torch
p = torch.nn.Parameter(torch.ones(3))
def step():
    (p * 2).sum().backward()
"""
    done = run_prepared(begin + OPEN[way], imports=("torch",))
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]" and "__exit__ without" not in done.stderr


def test_a_block_that_begins_when_all_others_have_ended_ends_without_a_sum() -> None:
    code = """
import atexit, torch
def late():
    global block
    block = fanin.torch.accumulate([p]); block.__enter__(); (p * 2).sum().backward()
atexit.register(late)
import fanin.torch
p = torch.nn.Parameter(torch.ones(3))
"""
    assert run_prepared(code, imports=("torch",)).stderr == ""


# What is replaced within a block


def set_(p: Any, other: Any) -> None:
    with torch.no_grad():
        p.set_(other.detach())


REPLACE: dict[str, Callable[[Any, Any], None]] = {"set_": set_, "swap_tensors": torch.utils.swap_tensors}


@pytest.mark.parametrize("replace", REPLACE)
@pytest.mark.parametrize("earlier", [None, 10.0])
@pytest.mark.parametrize("n", [2, 1 << 14])
def test_gradients_after_a_tensor_was_replaced_are_in_the_sum_and_the_error_names_the_cause(
    replace: str, earlier: float | None, n: int
) -> None:
    for dtype in (None, "exact"):
        p, other = (torch.nn.Parameter(torch.full((n,), k)) for k in (1.0, 7.0))
        p.grad = None if earlier is None else torch.full((n,), earlier)
        with (
            pytest.raises(
                RuntimeError, match=r"^accumulate: the tensor of w was replaced within the block, as by set_"
            ),
            fanin.torch.accumulate([("w", p)], dtype=dtype),
        ):
            p.sum().backward()
            REPLACE[replace](p, other)
            (p * 2).sum().backward()
            (p * 3).sum().backward()
        assert p.grad.eq(6 + (earlier or 0)).all()
        p.grad = None
        with fanin.torch.accumulate([("w", p)]):
            p.sum().backward()
        assert p.grad.eq(1).all()


def test_data_that_is_assigned_within_a_block_is_no_other_tensor() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with fanin.torch.accumulate([p]):
        p.sum().backward()
        p.data = torch.full((2,), 2.0)
        (p * p).sum().backward()
    assert p.grad.tolist() == [5.0, 5.0]


def test_a_tensor_that_is_replaced_where_sums_go_to_main_grad_is_named() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with (
        pytest.raises(RuntimeError, match=r"the tensor of w was replaced .* its later gradients are in \.grad"),
        fanin.torch.accumulate([("w", p)], into="main_grad"),
    ):
        p.sum().backward()
        set_(p, torch.ones(2))
        (p * 2).sum().backward()
    assert p.main_grad.tolist() == [1.0, 1.0] and p.grad.tolist() == [2.0, 2.0]


def test_a_tensor_that_is_replaced_by_one_of_another_shape_is_named() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with (
        pytest.raises(RuntimeError, match=r"there is no \.grad for the sum of w: "),
        fanin.torch.accumulate([("w", p)]),
    ):
        p.sum().backward()
        set_(p, torch.ones(3))
        p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_hook_that_returns_a_gradient_that_requires_one_is_named() -> None:
    for n in (2, 1 << 14):
        p = torch.nn.Parameter(torch.ones(n))
        p.register_hook(lambda g: torch.ones(g.shape, requires_grad=True))
        with (
            pytest.raises(RuntimeError, match=r"the gradient of w records a graph .* a hook that returns a tensor"),
            fanin.torch.accumulate([("w", p)]),
        ):
            p.sum().backward()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, "exact"])
@pytest.mark.parametrize("n", [2, 1 << 14])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_gradient_whose_memory_is_freed_after_the_last_pass_is_named(dtype: Any, n: int, into: str) -> None:
    p, q = (torch.nn.Parameter(torch.ones(n)) for _ in range(2))
    for one in (p, q):
        setattr(one, into, torch.ones(n))
    earlier = getattr(p, into)
    block = fanin.torch.accumulate([("w", p), ("v", q)], dtype=dtype, **({} if into == "grad" else {"into": into}))
    with pytest.raises(RuntimeError, match=rf"there is no \.{into} for the sum of w: .* was freed or cut"), block:
        (p + q).sum().backward()
        earlier.untyped_storage().resize_(0)
    assert getattr(q, into).eq(2).all()


# Strides


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, "exact"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("into", ["grad", "main_grad"])
def test_a_sum_has_the_strides_of_its_parameter_whatever_those_of_the_gradients(
    dtype: Any, own: Any, into: str
) -> None:
    for n in (3, 64):
        p = torch.nn.Parameter(torch.ones(n, n, 4, 4, dtype=own).to(memory_format=torch.channels_last))
        q = torch.nn.Parameter(torch.ones(n, 64, dtype=own).t())
        ones = [torch.ones(x.shape, dtype=own) for x in (p, q)]
        for passes in (1, 2):
            with fanin.torch.accumulate([p, q], dtype=dtype, into=into):
                for _ in range(passes):
                    torch.autograd.backward([p, q], ones)
            for x, given in zip((p, q), ones, strict=True):
                got = getattr(x, into)
                assert got.stride() == x.stride() != given.stride() and got.eq(passes).all()
                setattr(x, into, None)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_of_an_embedding_of_16_bits_are_summed_in_the_block_if_they_are_sparse(sparse: bool) -> None:
    """torch sums the rows of a pass by itself for a dense gradient, in 16 bits, where 256 + 1 is 256."""
    table = torch.nn.Embedding(2, 3, sparse=sparse, dtype=torch.bfloat16)
    row = torch.zeros(1000, dtype=torch.long)
    with fanin.torch.accumulate(table.parameters()):
        for _ in range(2):
            table(row).sum().backward()
    grad = table.weight.grad
    dense = grad.to_dense() if sparse else grad
    assert dense.tolist() == [[2000 if sparse else 512] * 3, [0] * 3]
