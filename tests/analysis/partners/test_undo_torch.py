"""A wrapped function of tensors that raises: its changes are undone, or the error names those that are not."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fanin.analysis import functionalize

torch = pytest.importorskip("torch")

from fanin.analysis.tensors import RunTensors, SavedTensor  # noqa: E402

pytestmark = pytest.mark.partners


class Stop(Exception):
    """What the functions raise."""


def undone(fn: Callable[..., object], *args: Any) -> list[str]:
    """Has a function run, which raises Stop at its end; the notes of the error."""

    def stops(*args: Any) -> None:
        fn(*args)
        raise Stop

    with pytest.raises(Stop) as caught:
        functionalize(stops)(*args)
    return getattr(caught.value, "__notes__", [])


def leaf(n: int = 3) -> Any:
    x = torch.ones(n, requires_grad=True)
    x.grad = torch.full((n,), 5.0)
    return x


GRADS = {
    "data": lambda x: setattr(x.grad, "data", torch.zeros(1)),
    "resize_": lambda x: x.grad.resize_(0),
    "storage": lambda x: x.grad.untyped_storage().resize_(0),
    "set_": lambda x: x.grad.set_(torch.zeros(7)),
    "values": lambda x: x.grad.zero_(),
    "replaced": lambda x: setattr(x, "grad", torch.zeros_like(x)),
    "None": lambda x: setattr(x, "grad", None),
    "requires_grad": lambda x: x.grad.requires_grad_(),
    "as_strided_": lambda x: x.grad.as_strided_((2,), (1,)),
    "dtype": lambda x: setattr(x.grad, "data", x.grad.data.double()),
}


@pytest.mark.parametrize("n", [3, 1_000, 10_000_000])
@pytest.mark.parametrize("how", GRADS)
def test_a_gradient_is_restored_after_every_change(how: str, n: int) -> None:
    if n > 1_000 and how not in ("data", "resize_", "storage"):
        pytest.skip("memory of this size matters where it is given up")
    x = leaf(n)
    grad, version = x.grad, x.grad._version
    held = []
    assert not undone(lambda x: (GRADS[how](x), held.append(torch.zeros(n))), x)
    assert x.grad is grad and grad.dtype == torch.float32 and not grad.requires_grad
    assert grad.shape == (n,) and grad.stride() == (1,) and bool((grad == 5).all()) and grad._version == version
    assert bool((held[0] == 0).all())


def test_a_sparse_gradient_is_put_back() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    x.grad = torch.eye(4, 3).to_sparse()
    grad, dense = x.grad, torch.eye(4, 3)
    for fn in (
        lambda x: x.grad._values().zero_(),
        lambda x: x.grad._values().resize_(0),
        lambda x: setattr(x.grad, "data", (x.grad * 0).detach()),
        lambda x: x.grad.sparse_resize_((9, 9), 2, 0),
        lambda x: setattr(x, "grad", None),
        lambda x: x.grad.mul_(3),
    ):
        assert not undone(fn, x)
        assert x.grad is grad and torch.equal(grad.to_dense(), dense)


DATA = {
    "double": lambda x: setattr(x, "data", x.data.double()),
    "half": lambda x: setattr(x, "data", x.data.half()),
    "int": lambda x: setattr(x, "data", torch.zeros(9, dtype=torch.int64)) if not x.requires_grad else None,
    "complex": lambda x: setattr(x, "data", x.data.to(torch.complex64)),
    "set_": lambda x: setattr(x, "data", torch.empty(0).set_(torch.zeros(100).untyped_storage(), 5, (2, 2), (3, 1))),
    "storage": lambda x: x.untyped_storage().resize_(0),
    "more": lambda x: x.untyped_storage().resize_(1 << 20),
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("how", DATA)
def test_a_tensor_of_other_data_is_put_back(how: str, asks: bool) -> None:
    x = torch.arange(4.0).requires_grad_(asks)
    assert not undone(DATA[how], x)
    assert x.dtype == torch.float32 and x.detach().tolist() == [0, 1, 2, 3] and x.requires_grad == asks


def test_a_module_of_another_dtype_is_put_back() -> None:
    layer = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in layer.parameters()]
    assert not undone(lambda *_: layer.double(), *layer.parameters())
    assert all(p.dtype == torch.float32 and torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
    layer(torch.ones(3)).sum().backward()


@pytest.mark.parametrize(
    ("make", "bit"),
    [(lambda z: z.conj(), "is_conj"), (lambda z: z.conj().imag, "is_neg"), (lambda z: z.conj()[1:], "is_conj")],
    ids=["conj", "neg", "part"],
)
@pytest.mark.parametrize("how", ["data", "set_", "resize_"])
def test_conjugate_and_negative_bits_are_put_back(make: Callable[[Any], Any], bit: str, how: str) -> None:
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    x = make(z)
    was = x.clone()

    def moves(x: Any) -> None:
        if how == "data":
            x.data = torch.zeros(2, dtype=x.dtype)
        elif how == "set_":
            x.set_(torch.zeros(2, dtype=x.dtype))
        else:
            x.resize_(100)

    assert not undone(moves, x)
    assert getattr(x, bit)() and torch.equal(x, was)


def test_views_of_one_call_are_put_back_beside_their_base() -> None:
    for split in (lambda b: b.unbind(0)[0], lambda b: b.split(1)[1], lambda b: b[0], lambda b: b.view(-1)):
        l = torch.arange(6.0).view(2, 3).requires_grad_()
        b = l * 1
        v = split(b)
        assert not undone(lambda b, v: b.mul_(2), b, v)
        assert torch.equal(b, l) and torch.equal(v, split(l))
        v.sum().backward()
        assert l.grad.sum() == v.numel()


def test_a_class_and_attributes_are_put_back() -> None:
    class Mine(torch.Tensor):
        pass

    for x in (torch.ones(2), leaf(2), torch.nn.Parameter(torch.ones(2))):
        kind = type(x)

        def other(x: Any) -> None:
            x.__class__ = Mine
            x.more = 1

        assert not undone(other, x)
        assert type(x) is kind and not hasattr(x, "more")


def test_retain_grad_is_undone_or_reported() -> None:
    w = leaf()

    def keeps(b: Any) -> None:
        b.mul_(w)
        b.retain_grad()

    for make in (lambda: torch.ones(3), lambda: w * 1):
        b = make()
        notes = undone(keeps, b)
        if b.is_leaf:
            assert not notes and not b.retains_grad and not b.requires_grad
        else:
            assert notes == [
                "functionalize: args[0] could not be put back: RuntimeError: it retains its gradient from now on"
            ]
        assert torch.equal(b, make())
        w.grad = None
        (b * w).sum().backward()
        assert (w.grad == (1 if b.is_leaf else 2)).all()


def test_a_gradient_that_was_retained_before_still_is() -> None:
    l = torch.ones(3, requires_grad=True)
    b = l * 2
    b.retain_grad()
    assert not undone(lambda b: b.copy_(b.sin()), b)
    assert b.retains_grad
    (b * 3).sum().backward()
    assert b.grad.tolist() == [3, 3, 3] and l.grad.tolist() == [6, 6, 6]


def test_the_undone_graph_is_freed() -> None:
    l = torch.ones(3, requires_grad=True)
    b = l * 1
    called: list[object] = []

    def twice(b: Any) -> None:
        two = torch.full((3,), 2.0)
        b.mul_(two)  # the node saves it
        b.register_hook(called.append)
        b.copy_(b.sin())
        saved.append(weakref.ref(two))

    saved: list[Any] = []
    for _ in range(20):
        assert not undone(twice, b)
    gc.collect()
    assert not any(two() is not None for two in saved), "an edge to the undone graph is left"
    depth, node = 0, b.grad_fn
    while node is not None:
        depth, node = depth + 1, next((n for n, _ in node.next_functions if n is not None), None)
    assert depth <= 4, "each retry makes the history longer"
    b.sum().backward()
    assert l.grad.tolist() == [1, 1, 1] and not called


def test_state_that_cannot_be_restored_is_a_note_and_all_else_is_restored() -> None:
    x, y = torch.ones(3), leaf()
    other = torch.ones(3).to_sparse()

    def swaps(x: Any, y: Any) -> None:
        y.detach().zero_()
        y.grad = None
        torch.utils.swap_tensors(x, other)

    notes = undone(swaps, x, y)
    assert y.tolist() == [1, 1, 1] and y.grad.tolist() == [5, 5, 5]
    assert notes == [] if str(x.layout) == "torch.strided" else "args[0] could not be put back: " in notes[0]


# Random functions

HOSTILE: dict[str, Callable[[Any, Any], object]] = {
    "mul_": lambda x, y: x.mul_(2),
    "times": lambda x, y: x.mul_(y.detach().sum()),
    "grown": lambda x, y: x.mul_(torch.ones((), requires_grad=True) * 2),
    "sin": lambda x, y: x.copy_(x.sin()),
    "quiet": lambda x, y: quietly(lambda: x.add_(1)),
    "unbind": lambda x, y: quietly(lambda: x.unbind(0)[0].zero_()),
    "detached": lambda x, y: x.detach().zero_(),
    "double": lambda x, y: setattr(x, "data", x.data.double()),
    "data": lambda x, y: setattr(x, "data", torch.zeros(5)),
    "data of another": lambda x, y: setattr(x, "data", y.data),
    "resize_": lambda x, y: quietly(lambda: x.resize_(50)),
    "set_": lambda x, y: quietly(lambda: x.set_(torch.zeros(2))) if not x.requires_grad else None,
    "storage": lambda x, y: x.untyped_storage().resize_(0),
    "larger storage": lambda x, y: x.untyped_storage().resize_(4096),
    "t_": lambda x, y: quietly(lambda: x.t_()),
    "as_strided_": lambda x, y: quietly(lambda: x.as_strided_((2,), (1,), 0)),
    "detach_": lambda x, y: x.detach_(),
    "requires_grad_": lambda x, y: x.requires_grad_(not x.requires_grad),
    "grad": lambda x, y: setattr(x, "grad", torch.ones_like(x)) if x.is_leaf else None,
    "no grad": lambda x, y: setattr(x, "grad", None) if x.is_leaf else None,
    "grad.data": lambda x, y: setattr(x.grad, "data", torch.zeros(1)) if x.is_leaf and x.grad is not None else None,
    "grad.resize_": lambda x, y: x.grad.resize_(0) if x.is_leaf and x.grad is not None else None,
    "grad.zero_": lambda x, y: x.grad.zero_() if x.is_leaf and x.grad is not None else None,
    "grad storage": lambda x, y: x.grad.untyped_storage().resize_(0) if x.is_leaf and x.grad is not None else None,
    "grad asks": lambda x, y: x.grad.requires_grad_() if x.is_leaf and x.grad is not None else None,
    "hook": lambda x, y: x.register_hook(lambda g: g * 7) if x._base is None else None,
    "attribute": lambda x, y: setattr(x, "mine", 1),
    "class": lambda x, y: setattr(x, "__class__", Mine),
    "look": lambda x, y: x.grad_fn,
}


class Mine(torch.Tensor):
    """A class that a function gives a tensor."""


def quietly(write: Callable[[], object]) -> None:
    with torch.no_grad():
        write()


def state_of(x: Any) -> tuple[object, ...]:
    """All that an undo promises to put back."""
    storage = x.untyped_storage()
    grad = x.grad if x.is_leaf else None
    return (
        type(x), x.dtype, x.shape, x.stride(), x.storage_offset(), storage._cdata, storage.nbytes(), x._version,
        x.requires_grad, x.is_leaf, x.retains_grad, x.detach().tolist(), dict(x.__dict__), x.is_conj(),
        len(x._backward_hooks or ()), id(grad) if grad is not None else None,
        None if grad is None else state_of(grad),
    )  # fmt: skip


def arguments(r: random.Random) -> tuple[list[Any], list[Any]]:
    """A few tensors that may share memory, and the leaves that their gradients go to."""
    made: list[Any] = []
    leaves: list[Any] = []
    for _ in range(r.randint(1, 3)):
        asks = r.random() < 0.7
        base = torch.arange(12.0).reshape(4, 3) + 1
        if asks:
            leaves.append(base.requires_grad_())
        x = base * 1 if asks and r.random() < 0.6 else base
        if x.is_leaf and r.random() < 0.5:
            x.grad = torch.full_like(x, 5.0)
        views = [lambda x=x: x[1:], lambda x=x: x.t(), lambda x=x: x.unbind(0)[1], lambda x=x: x.view(-1)]
        made.append(r.choice(views)() if r.random() < 0.4 else x)
        if r.random() < 0.3:
            made.append(r.choice([x, r.choice(views)()]))
    return made, leaves


def raises_at_random(seed: int, seen: Counter[str]) -> str:
    """One function and its arguments; "" if everything is restored, and gradients reach the same leaves. `seen` counts
    the steps.
    """
    r = random.Random(seed)
    steps = [(r.choice(list(HOSTILE)), r.random(), r.random()) for _ in range(r.randint(1, 6))]
    kept, before = arguments(random.Random(seed + 1))
    losses = [(x * x).sum() for x in kept if x.requires_grad]
    states = [state_of(x) for x in kept]

    def fn(*args: Any) -> None:
        pool = list(args)
        for name, i, k in steps:
            x, y = pool[int(i * len(pool))], pool[int(k * len(pool))]
            try:
                HOSTILE[name](x, y)
            except (RuntimeError, ValueError, TypeError, IndexError):
                seen["steps that raise"] += 1
                continue
            seen[f"did {name}"] += 1
            if name in ("storage", "grad storage"):
                return  # torch itself would read freed memory

    asks = any(x.requires_grad for x in kept)
    seen["programs whose tensors ask for gradients" if asks else "programs without gradients"] += 1
    notes = undone(fn, *kept)
    if notes:
        return f"{steps}: {notes}"
    for u, (x, state) in enumerate(zip(kept, states, strict=True)):
        if (now := state_of(x)) != state:
            return f"{steps}: args[{u}]: {[(a, b) for a, b in zip(state, now, strict=True) if a != b]}"
    others, after = arguments(random.Random(seed + 1))
    losses += [(x * 3).sum() for x in kept if x.requires_grad]
    beside = [(x * x).sum() for x in others if x.requires_grad] + [(x * 3).sum() for x in others if x.requires_grad]
    for ours, theirs in ((losses, before), (beside, after)):
        for leaf in theirs:
            leaf.grad = None
        if ours:
            torch.stack(ours).sum().backward()
    for a, b in zip(before, after, strict=True):
        if (a.grad is None) != (b.grad is None) or (a.grad is not None and not torch.equal(a.grad, b.grad)):
            return f"{steps}: gradient {a.grad}, expected {b.grad}"
    return ""


def undone_at_random(n: int) -> None:
    """Run this many functions that raise; AssertionError with the first ones that leave a change."""
    first, seen = 1_000_003 * n, Counter[str]()
    wrong = {seed: said for seed in range(first, first + n) if (said := raises_at_random(seed, seen))}
    print(f"{n} functions from seed {first}: {len(wrong)} leave something behind; {dict(seen)}")
    assert not wrong, (len(wrong), dict(list(wrong.items())[:3]))
    assert all(seen[f"did {name}"] for name in HOSTILE), "a step never succeeds"
    assert seen["programs whose tensors ask for gradients"] > n / 2 and seen["programs without gradients"]


@pytest.mark.parametrize("n", [300, pytest.param(8_000, marks=pytest.mark.slow)])
def test_random_functions_that_raise_change_nothing(n: int) -> None:
    undone_at_random(n)


@pytest.mark.parametrize(
    ("what", "name"),
    [(SavedTensor, name) for name in ("undo_bytes", "undo_rest", "count", "_undo_history")]
    + [(RunTensors, "_save_grads"), (RunTensors, "_forget_history")],
)
def test_the_random_functions_find_a_step_of_the_undo_that_is_left_out(
    what: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what, name, lambda *_: [])
    with pytest.raises((AssertionError, RuntimeError)):
        undone_at_random(300)
