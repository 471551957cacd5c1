"""`fanin.torch.backward`: torch's engine runs the pass, and fanin sums the gradients that meet in 16 bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.ctrl_c import raised_at
from kit.support import run_python

pytestmark = pytest.mark.partners

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
backward: Any = pytest.importorskip("fanin.torch").backward
fan_ins: Any = pytest.importorskip("fanin.torch.fan_ins")
checkpoint = torch.utils.checkpoint.checkpoint
BF16 = torch.bfloat16


def made_by_products(w: Any, factors: Any) -> tuple[Any, list[Any]]:
    """The sum of w * f over the factors; and the list of the gradients that reach w, in the order of the pass."""
    gradients: list[Any] = []
    terms = []
    for f in factors:
        term = w * f
        term.grad_fn.register_hook(lambda made, _: gradients.append(made[0].clone()))
        terms.append(term.float().sum())
    return torch.stack(terms).sum(), gradients


def folded(gradients: list[Any]) -> Any:
    """From the left in float32, rounded once."""
    total = gradients[0].float()
    for g in gradients[1:]:
        total = total + g.float()
    return total.to(gradients[0].dtype)


def factors(n: int, dtype: Any = BF16, size: int = 50, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    return [torch.randn(size).to(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [3, 4, 17])
def test_a_tensor_of_16_bits_that_is_used_three_times_or_more_has_one_rounding(dtype: Any, n: int) -> None:
    w = torch.randn(50).to(dtype).requires_grad_()
    loss, gradients = made_by_products(w, factors(n, dtype))
    backward(loss)
    assert len(gradients) == n
    assert torch.equal(w.grad, folded(gradients))
    if n == 17:
        ours, w.grad = w.grad, None
        made_by_products(w, factors(n, dtype))[0].backward()
        assert not torch.equal(w.grad, ours)


def test_a_pass_from_an_edge_is_torchs_own() -> None:
    x = torch.randn(50).to(BF16).requires_grad_()
    w = x * 1
    loss, _ = made_by_products(w, factors(9))
    edge = torch.autograd.graph.get_gradient_edge
    torch.autograd.backward([edge(loss), edge(w)], [torch.tensor(1.0), torch.ones(50).to(BF16)], retain_graph=True)
    by_torch, x.grad = x.grad, None
    backward([edge(loss), edge(w)], [torch.tensor(1.0), torch.ones(50).to(BF16)], retain_graph=True)
    assert torch.equal(x.grad, by_torch)
    with pytest.raises(RuntimeError, match="accumulate= with a GradientEdge"):
        backward(edge(loss), torch.tensor(1.0), accumulate="exact")


@pytest.mark.parametrize("given", [lambda w: iter([w]), lambda w: {"w": w}], ids=["iterator", "dict"])
def test_inputs_may_be_an_iterator_or_a_dict(given: Any) -> None:
    w, x = (torch.randn(50).to(BF16).requires_grad_() for _ in range(2))
    loss, gradients = made_by_products(w, factors(9))
    backward(loss + (x * 2).float().sum(), inputs=given(w))
    assert torch.equal(w.grad, folded(gradients))
    assert x.grad is None


def test_sums_of_two_and_sums_in_32_bits_are_those_of_torch() -> None:
    for dtype, n in ((BF16, 2), (torch.float32, 9), (torch.float64, 9)):
        w = torch.randn(50).to(dtype).requires_grad_()
        loss, _ = made_by_products(w, factors(n, dtype))
        loss.backward(retain_graph=True)
        ours, w.grad = w.grad, None
        backward(loss)
        assert torch.equal(w.grad, ours)


def test_the_sum_of_a_tensor_within_the_graph_is_what_its_hooks_receive() -> None:
    x = torch.randn(50).to(BF16).requires_grad_()
    w = x * 2
    seen = []
    w.register_hook(lambda g: seen.append(g.clone()))
    w.retain_grad()
    loss, gradients = made_by_products(w, factors(9))
    backward(loss)
    total = folded(gradients)
    assert torch.equal(seen[0], total)
    assert torch.equal(w.grad, total)
    assert torch.equal(x.grad, total * 2)


def test_two_edges_of_one_node_are_two_gradients() -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    gradients = []
    y = torch.addcmul(w, w, w)
    y.grad_fn.register_hook(lambda made, _: gradients.extend(g.clone() for g in made))
    y.sum().backward(torch.tensor(1.0, dtype=BF16), retain_graph=True)
    w.grad = None
    gradients.clear()
    backward(y.sum())
    assert len(gradients) == 3
    assert torch.equal(w.grad, folded(gradients))


class Undefined(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> None:
        return None


@pytest.mark.parametrize("undefined", [{0}, {2}, {4}, {0, 4}, {0, 1, 2, 3}, {1, 2, 3, 4}, {0, 1, 2, 3, 4}])
def test_producers_without_a_gradient_are_left_out(undefined: set[int]) -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    gradients, terms = [], []
    for i, f in enumerate(factors(5)):
        if i in undefined:
            terms.append(Undefined.apply(w).float().sum())
        else:
            term = w * f
            term.grad_fn.register_hook(lambda made, _: gradients.append(made[0].clone()))
            terms.append(term.float().sum())
    backward(torch.stack(terms).sum())
    assert len(gradients) == 5 - len(undefined)
    if gradients:
        assert torch.equal(w.grad, folded(gradients))
    else:
        assert w.grad is None


def test_a_gradient_to_begin_with_is_one_of_the_gradients_that_meet() -> None:
    x = torch.randn(50).to(BF16).requires_grad_()
    w = x * 1
    seen = []
    w.register_hook(lambda g: seen.append(g.clone()))
    loss, gradients = made_by_products(w, factors(5))
    first = torch.randn(50).to(BF16)
    backward([loss, w], [None, first])
    # The gradient to begin with comes from the newest node, so first.
    assert torch.equal(seen[0], folded([first, *gradients]))


def test_with_inputs_the_gradients_are_those_of_nodes_that_run() -> None:
    x, z = (torch.randn(50).to(BF16).requires_grad_() for _ in range(2))
    w = x * 1
    loss, gradients = made_by_products(w, factors(5))
    loss = loss + sum((z * f).float().sum() for f in factors(4, seed=1)) + (w.detach() * z).float().sum()
    loss.backward(inputs=[z], retain_graph=True)
    by_torch, z.grad = z.grad, None
    backward(loss, inputs=[z], retain_graph=True)
    assert x.grad is None
    assert not gradients
    assert not torch.equal(z.grad, by_torch)
    backward(loss, inputs=[x], retain_graph=True)
    assert torch.equal(x.grad, folded(gradients))
    gradients.clear()
    backward(loss, inputs=[w])  # no leaf: torch adds to its .grad
    assert torch.equal(w.grad, folded(gradients))


def test_a_producer_that_leads_to_no_input_is_not_waited_for() -> None:
    """The second path from w leads through a node whose other edge ends nowhere."""
    w, q = (torch.randn(50).to(BF16).requires_grad_() for _ in range(2))
    inner = w * 1
    terms = [(inner * f).float().sum() for f in factors(4)] + [(inner * q).float().sum()]
    loss = torch.stack(terms).sum()
    backward(loss, inputs=[q], retain_graph=True)
    assert torch.equal(q.grad, inner)
    assert w.grad is None


def test_hooks_of_a_producer_receive_what_it_made_and_may_replace_it() -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    terms = [w * f for f in factors(5)]
    seen = []
    for term in terms:
        term.grad_fn.register_hook(lambda made, _: (made[0] * 2, *made[1:]))
        term.grad_fn.register_hook(lambda made, _: seen.append(made[0].clone()))
    backward(torch.stack([t.float().sum() for t in terms]).sum())
    assert torch.equal(w.grad, folded(seen))


def test_other_passes_over_the_same_nodes_are_torchs_own() -> None:
    """A pass of another thread, and one within a hook, run the hooks of this pass."""
    w = torch.randn(50).to(BF16).requires_grad_()
    loss, gradients = made_by_products(w, factors(9))
    [by_torch] = torch.autograd.grad(loss, [w], retain_graph=True)
    ordinary = [*gradients]
    others: list[Any] = []
    begun: list[bool] = []

    def another() -> None:
        others.extend(torch.autograd.grad(loss, [w], retain_graph=True))

    def within(_: Any, __: Any) -> None:
        if not begun:
            begun.append(True)  # the other passes call this hook, too
            another()
            thread = threading.Thread(target=another)
            thread.start()
            thread.join()

    stack = loss.grad_fn.next_functions[0][0]
    stack.next_functions[4][0].register_hook(within)  # when some gradients have come
    backward(loss, retain_graph=True)
    assert len(others) == 2
    assert all(torch.equal(g, by_torch) for g in others)
    assert torch.equal(w.grad, folded(ordinary))
    assert not torch.equal(w.grad, by_torch)


def test_after_an_error_no_hook_is_left_and_the_next_pass_is_right() -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    loss, gradients = made_by_products(w, factors(9))
    calls = 0

    def fails(_: Any, __: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError("planted")

    loss.grad_fn.next_functions[0][0].next_functions[4][0].register_hook(fails)
    with pytest.raises(ZeroDivisionError, match="planted"):
        backward(loss, retain_graph=True)
    assert w.grad is None
    gradients.clear()
    backward(loss, retain_graph=True)
    assert torch.equal(w.grad, folded(gradients))
    w.grad = None
    total = folded(gradients)
    loss.backward()
    assert not torch.equal(w.grad, total)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_recorded_pass_is_torchs_own() -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    loss = (w * w * w * w).float().sum()
    backward(loss, create_graph=True)
    ours, w.grad = w.grad, None
    loss.backward(create_graph=True)
    assert torch.equal(ours, w.grad)
    assert ours.requires_grad
    w.grad = None
    for options in ({"accumulate": "exact"}, {"at": [w]}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}= with create_graph"):
            backward(loss, create_graph=True, **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(8, 8).to(BF16).requires_grad_()
    x = torch.randn(4, 8).to(BF16).requires_grad_()

    def once(y: Any) -> Any:
        return torch.tanh(y @ w)

    def pass_of(run: Any, checkpointed: bool) -> Any:
        w.grad = x.grad = None
        y = x
        for _ in range(6):
            y = checkpoint(once, y, use_reentrant=reentrant) if checkpointed else once(y)
        run(y.float().sum())
        return w.grad

    if reentrant:  # a pass of its own for each: torch's .grad += g
        assert torch.equal(pass_of(backward, True), pass_of(lambda loss: loss.backward(), True))
    else:
        assert torch.equal(pass_of(backward, True), pass_of(backward, False))
        assert not torch.equal(pass_of(backward, True), pass_of(lambda loss: loss.backward(), True))


@pytest.mark.parametrize("which", range(5))
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_node_that_made_nan(which: int) -> None:
    w = torch.zeros(3, dtype=BF16, requires_grad=True)
    terms = [w * f for f in factors(5, size=3)]
    terms[which] = w.sqrt() * 0
    loss = torch.stack([t.float().sum() for t in terms]).sum()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
        backward(loss)
    loss, gradients = made_by_products(w, factors(5, size=3))
    with torch.autograd.detect_anomaly():
        backward(loss)
    assert torch.equal(w.grad, folded(gradients))


@pytest.mark.parametrize("place", range(5))
def test_from_a_sparse_gradient_on_the_sum_is_torchs(place: int) -> None:
    w = torch.randn(6, 4).to(BF16).requires_grad_()
    ids = torch.tensor([1, 1, 3])

    def loss() -> Any:
        terms = [w * f for f in factors(5, size=4)]
        terms[place] = torch.nn.functional.embedding(ids, w, sparse=True)
        return torch.stack([t.float().sum() for t in terms]).sum()

    loss().backward()
    by_torch, w.grad = w.grad.to_dense(), None
    backward(loss())
    assert torch.allclose(w.grad.to_dense(), by_torch, rtol=0.02)
    with pytest.raises(RuntimeError, match="torch alone sums"):
        backward(loss(), at=[w])


def test_accumulate_is_the_dtype_of_every_sum() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    w = torch.ones(3, requires_grad=True)
    terms = sum((w * f).sum() for f in values)
    backward(terms, retain_graph=True)
    assert w.grad.tolist() != [2.0, 2.0, 2.0]
    for accumulate in ("exact", torch.float64, "float64"):
        w.grad = None
        backward(terms, accumulate=accumulate, retain_graph=True)
        assert w.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(TypeError):
        backward(terms, accumulate=torch.nn)


def test_at_names_tensors_whose_gradients_fanin_sums() -> None:
    w = torch.randn(50).to(BF16).requires_grad_()
    loss, gradients = made_by_products(w, factors(2))
    backward(loss, at=[w])
    assert torch.equal(w.grad, folded(gradients))
    for bad, error in (
        (3, TypeError),
        ([3], TypeError),
        ([torch.ones(2)], RuntimeError),
        (torch.ones(2), RuntimeError),
    ):
        with pytest.raises(error):
            backward(loss, at=bad)


def test_a_tensor_of_at_that_is_not_in_the_graph_is_refused_before_the_pass() -> None:
    w, other = (torch.randn(50).to(BF16).requires_grad_() for _ in range(2))
    loss, gradients = made_by_products(w, factors(5))
    for at in (other, [w, other * 2]):
        with pytest.raises(RuntimeError, match=r"at: item \d: its gradient \(\w*.*\) is not in the graph of the pass"):
            backward(loss, at=at, retain_graph=True)
    assert w.grad is None
    assert not gradients
    backward(loss, at=w)
    assert torch.equal(w.grad, folded(gradients))


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize("limited", [False, True])
def test_parameters_of_a_subclass(limited: bool) -> None:
    p = torch.nn.Parameter(torch.randn(50).to(BF16).as_subclass(Sub))
    terms = torch.stack([(p * f).float().sum() for f in factors(6)]).sum()
    terms.backward(retain_graph=True, inputs=[p] if limited else None)
    by_torch, p.grad = p.grad, None
    backward(terms, inputs=[p] if limited else None)
    assert type(p.grad) is type(by_torch)
    assert torch.allclose(p.grad, by_torch, rtol=0.05)


class Watched:
    """A graph, and the arguments of its hooks: what each producer makes for a place, and what arrives there."""

    def __init__(self, loss: Any, tensors: list[Any]) -> None:
        self.made: dict[Any, list[Any]] = {}
        self.got: dict[Any, Any] = {}
        self.nodes = set()
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node not in self.nodes:
                self.nodes.add(node)
                node.register_hook(self.producer(node))
                waiting += [to for to, _ in node.next_functions if to is not None]
        for t in tensors:
            edge = torch.autograd.graph.get_gradient_edge(t)
            t.register_hook(self.tensor((edge.node, edge.output_nr)))

    def producer(self, node: Any) -> Any:
        def hook(made: Any, _: Any) -> None:
            for place, g in zip(node.next_functions, made, strict=True):
                if place[0] is not None and g is not None:
                    self.made.setdefault(place, []).append(g.clone())

        return hook

    def tensor(self, place: Any) -> Any:
        def hook(g: Any) -> None:
            self.got.setdefault(place, g.clone())

        return hook


def drawn(rng: random.Random, leaves: list[Any]) -> list[Any]:
    """The leaves, and what random operations make of them."""
    operations = [torch.mul, torch.add, torch.maximum, lambda a, b: torch.addcmul(a, a, b)]
    made = list(leaves)
    for _ in range(rng.randrange(3, 25)):
        made.append(rng.choice(operations)(rng.choice(made), rng.choice(made)))
    return made


def test_random_graphs_sum_each_fan_in_of_three_and_more_once() -> None:
    """What arrives at each tensor is what the hooks of its producers saw, folded in float32."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    summed = others = limits = 0
    for _ in range(40):
        leaves = [torch.randn(4).to(BF16).requires_grad_() for _ in range(3)]
        tensors = drawn(rng, leaves)
        loss = torch.stack([t.float().sum() for t in rng.sample(tensors, 3)]).sum()
        graph = Watched(loss, tensors)
        reached = [x for x in leaves if torch.autograd.graph.get_gradient_edge(x).node in graph.nodes]
        limited = rng.sample(reached, rng.randrange(1, len(reached) + 1)) if rng.random() < 0.4 else None
        limits += limited is not None and len(limited) < len(reached)
        backward(loss, inputs=limited)
        for place, gradients in graph.made.items():
            if place not in graph.got:
                continue
            if len(gradients) < 3:
                others += 1
                continue
            assert torch.equal(graph.got[place], folded(gradients)), seed
            summed += 1
    assert summed > 20
    assert others > 20
    assert limits


def hooks_of(node: Any) -> int:
    """How many hooks a node has that receive what it made."""
    handle = node.register_hook(lambda *_: None)
    before = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return before


def lines_that_leave_hooks(run: Callable[[Any], object], files: tuple[str, ...]) -> tuple[int, list[str]]:
    """Call `run` with a loss, with Ctrl-C at each of its lines: how many there are, and which leave hooks."""
    bad = []
    for n in range(100_000):
        w = torch.randn(8).to(BF16).requires_grad_()
        terms = [w * f for f in factors(5, size=8)]
        loss = torch.stack([t.float().sum() for t in terms]).sum()
        came = raised_at(n, lambda loss=loss: run(loss), files)
        if any(hooks_of(t.grad_fn) for t in terms):
            bad.append(came)
        if not came:
            break
        w.grad = None
        backward(loss, retain_graph=True)
        assert torch.equal(w.grad, folded(factors(5, size=8)[::-1])), came
    return n, bad


def test_ctrl_c_at_any_line_leaves_no_hook() -> None:
    lines, bad = lines_that_leave_hooks(lambda loss: backward(loss, retain_graph=True), (fan_ins.__file__,))
    assert lines > 50
    assert not bad


def hooks_for_a_while(loss: Any) -> None:
    nodes = [to.next_functions[0][0].next_functions[0][0] for to, _ in loss.grad_fn.next_functions[0][0].next_functions]
    hooks = [node.register_hook(lambda *_: None) for node in nodes]
    for hook in hooks:
        hook.remove()


def test_hooks_that_ctrl_c_leaves_are_found() -> None:
    _, bad = lines_that_leave_hooks(hooks_for_a_while, (str(Path(__file__)),))
    assert bad


@pytest.mark.parametrize("accumulate", [torch.float16, torch.int32, torch.complex64])
def test_a_dtype_that_cannot_hold_a_sum_is_refused_before_the_pass(accumulate: Any) -> None:
    first, w = (torch.randn(5).requires_grad_() for _ in range(2))
    loss = sum((w * f).sum() for f in (1.0, 2.0, 3.0)) + (first * 2).sum()  # first has its gradient before w
    with pytest.raises(ValueError, match=r"AccumulateGrad have torch\.float32, whose sum cannot run in it"):
        backward(loss, accumulate=accumulate, retain_graph=True)
    assert first.grad is None
    backward(loss, accumulate=torch.float64)
    assert first.grad is not None


def test_what_is_no_dtype_is_refused_in_a_graph_without_sums() -> None:
    w = torch.randn(5).requires_grad_()
    with pytest.raises(ValueError, match="backward: accumulate: expected a dtype"):
        backward(w.sum(), accumulate="exactly")
    assert w.grad is None


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex32])
def test_a_dtype_that_fanin_does_not_sum_is_torchs(dtype: Any) -> None:
    w = torch.ones(5).to(dtype).requires_grad_()
    loss = sum((w.to(torch.complex64) * f).real.sum() for f in (1.0, 2.0, 4.0))
    errors = []
    for run in (lambda: loss.backward(retain_graph=True), lambda: backward(loss, retain_graph=True)):
        w.grad = None
        try:
            run()
        except NotImplementedError as e:  # torch sums no float8
            errors.append(str(e))
        else:
            assert w.grad.to(torch.complex64).tolist() == [7.0] * 5
    assert len({*errors}) == len(errors) // 2
    with pytest.raises(RuntimeError, match=f"AccumulateGrad has {dtype}: only torch sums it"):
        backward(loss, accumulate="exact")


def test_a_sparse_gradient_to_begin_with_is_torchs() -> None:
    w = torch.ones(5, dtype=BF16, requires_grad=True)
    backward([w, w, w], [torch.ones(5, dtype=BF16).to_sparse()] * 3)
    assert w.grad.to_dense().tolist() == [3.0] * 5


def test_what_torch_knows_of_the_places_of_a_node_is_read_once() -> None:
    """It is a new list each time, of all places of the node, which may be thousands."""

    class Node:
        read = 0

        @property
        def _input_metadata(self) -> list[Any]:
            self.read += 1
            what = SimpleNamespace(dtype=BF16, shape=(2,), device=torch.device("cpu"), is_nested_tensor=False)
            return [what] * 10

        def name(self) -> str:
            return "Unbind"

    node = Node()
    chosen, producers = fan_ins._chosen({(node, i): [(object(), 0)] * 3 for i in range(10)}, None, set())
    assert len(chosen) == len(producers) == 10
    assert node.read == 1


def test_passes_over_graphs_of_the_same_form_share_their_sums_and_their_bits_are_right() -> None:
    fan_ins._kept.clear()
    w = torch.ones(8, dtype=BF16, requires_grad=True)
    v = torch.ones(8, dtype=BF16, requires_grad=True)
    for i in range(4):
        gradients = factors(5 if i % 2 else 4, size=8)
        w.grad = v.grad = None
        backward(sum((w * f + v * f).float().sum() for f in gradients))
        assert torch.equal(w.grad, folded(gradients[::-1])) and torch.equal(v.grad, w.grad)
        assert len(fan_ins._kept) == min(i + 1, 2)
    for sums in fan_ins._kept.values():
        assert sums.hooks and not sums.places and sums.task == [fan_ins.NO_PASS]


def test_a_pass_within_a_pass_over_a_graph_of_the_same_form_has_sums_of_its_own() -> None:
    w = torch.ones(8, dtype=BF16, requires_grad=True)
    inner = torch.ones(8, dtype=BF16, requires_grad=True)
    gradients = factors(5, size=8)

    def loss(x: Any, hook: Callable[[Any], None] | None = None) -> Any:
        terms = [x * f for f in gradients]
        if hook is not None:
            terms[2].register_hook(hook)
        return torch.stack([t.float().sum() for t in terms]).sum()

    def step(_: Any) -> None:
        with torch.enable_grad():
            backward(loss(inner))

    for _ in range(2):
        w.grad = inner.grad = None
        backward(loss(w, step))
        assert torch.equal(w.grad, folded(gradients[::-1])) and torch.equal(inner.grad, w.grad)


def test_sums_are_not_kept_after_an_error() -> None:
    fan_ins._kept.clear()
    w = torch.ones(8, dtype=BF16, requires_grad=True)
    terms = [w * f for f in factors(5, size=8)]
    terms[1].register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(torch.stack([t.float().sum() for t in terms]).sum())
    assert not fan_ins._kept


def test_so_many_sums_are_kept_at_most() -> None:
    w = torch.ones(2, dtype=BF16, requires_grad=True)
    for n in range(3, 3 + 3 * fan_ins.KEPT):
        backward(sum((w * f).float().sum() for f in factors(n, size=2)))
        assert 0 < len(fan_ins._kept) <= fan_ins.KEPT


DEEP = """
import torch, fanin.torch

def step(y, w):
    return {"chain": lambda: y * w, "skips": lambda: y + torch.tanh(y * w)}[kind]()

for kind, stacked, kept in [("chain", False, False), ("chain", False, True), ("skips", False, False),
                            ("chain", True, False)]:
    w = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    y = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    states = []
    for _ in range(60000 if kind == "chain" else 25000):
        y = step(y, w)
        states += [y] if stacked else []
    loss = (torch.stack(states) if stacked else y).float().sum()
    del states
    fanin.torch.backward(loss)
    assert w.grad is not None
    if not kept:
        del y
    del loss
    y = None
    print("freed")
"""


def test_a_deep_graph_is_freed_without_the_stack() -> None:
    """torch 2.13 frees each node within the one before, if Python has read both; the end would be a signal."""
    assert run_python(DEEP).stdout.split() == ["freed"] * 4


def test_the_bands_of_a_deep_graph_hold_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_ins, "BAND", 10)
    w, y = (torch.ones(2).to(BF16).requires_grad_() for _ in range(2))
    for _ in range(95):
        y = y * w
    loss = y.float().sum()
    backward(loss, retain_graph=True)
    held, node = 0, loss.grad_fn
    while following := [n for n in node.metadata.get(fan_ins.HOLDS, ()) if n.next_functions]:
        [node] = following
        held += 1
    assert held == 9
