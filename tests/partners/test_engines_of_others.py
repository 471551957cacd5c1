"""HIPS autograd, micrograd and MyGrad on fanin's engine (examples/12 to 14), beside their own passes; an engine of
one's own (18) beside HIPS autograd.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fanin
from kit.support import ROOT

pytestmark = pytest.mark.partners


def example(name: str, package: str) -> Any:
    """The example as a module; skipped without its package."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each pass of ours: an example that walks its own way would be as right, and prove nothing."""
    seen: list[int] = []
    for name in ("grad", "backward"):
        own = getattr(fanin, name)
        monkeypatch.setattr(fanin, name, lambda *args, own=own, **how: seen.append(1) or own(*args, **how))
    return seen


# HIPS autograd


@pytest.fixture(scope="module")
def hips() -> Any:
    return example("12_hips_autograd", "autograd")


def hips_functions() -> dict[str, Callable[[Any], Any]]:
    import autograd.numpy as anp
    from autograd.scipy.special import logsumexp

    def loop(x: Any) -> Any:
        total = x
        for i in range(20):
            total = total + anp.sin(x) * total / (i + 1.0)
        return anp.sum(total)

    def indexed(x: Any) -> Any:
        return x[0] * x[1] + anp.sum(x[1:] ** 2) + anp.sum(x[anp.array([0, 0, 2])]) + x[2]

    return {
        "sum": lambda x: anp.sum(x * x * x),
        "loop": loop,
        "indexed": indexed,
        "tuple": lambda x: (lambda a, b: anp.sum(a * b))(*(anp.exp(x), anp.tanh(x))),
        "matrix": lambda x: anp.linalg.det(anp.outer(x, x) + anp.diag(anp.exp(x))),
        "where": lambda x: anp.sum(anp.where(x > 0, x**2, anp.cos(x))),
        "logsumexp": lambda x: logsumexp(anp.concatenate([x, 2 * x])),
        "reshaped": lambda x: anp.sum(anp.reshape(anp.tile(x, 2), (2, -1)).T ** 3),
        "complex": lambda x: anp.sum(anp.abs(anp.fft.fft(x + 0j)) ** 2),
    }


@pytest.mark.parametrize("name", ["sum", "loop", "indexed", "tuple", "matrix", "where", "logsumexp", "reshaped",
                                  "complex"])  # fmt: skip
def test_hips_gives_its_own_derivatives_on_our_engine(name: str, hips: Any, passes: list[int]) -> None:
    """The first and the second one, which is a pass over a pass; and against finite differences, by its own checker."""
    import autograd
    from autograd.test_util import check_grads

    fn = hips_functions()[name]
    x = np.array([0.3, -1.2, 2.1])
    own, own_curve = autograd.grad(fn)(x), autograd.hessian(fn)(x)
    assert not passes
    with hips.on_fanin():
        ours, curve = autograd.grad(fn)(x), autograd.hessian(fn)(x)
        assert len(passes) >= 5
        check_grads(fn, modes=["rev"], order=2)(x)
    assert np.allclose(ours, own, rtol=1e-13, atol=1e-15) and np.allclose(curve, own_curve, rtol=1e-12, atol=1e-14)
    assert autograd.core.backward_pass is not hips.backward_pass


def test_hips_containers_on_our_engine(hips: Any, passes: list[int]) -> None:
    import autograd
    import autograd.numpy as anp

    def loss(parameters: Any) -> Any:
        (w, b), more = parameters["layer"], parameters["more"]
        return anp.sum(anp.tanh(w @ b + more[0]) ** 2) + more[1] ** 2 * anp.sum(parameters["layer"][0])

    parameters = {"layer": (np.ones((3, 2)), np.array([1.0, 2.0])), "more": [np.arange(3.0), 2.5]}
    own = autograd.grad(loss)(parameters)
    with hips.on_fanin():
        ours = autograd.grad(loss)(parameters)
    assert passes
    flat = [autograd.misc.flatten(x)[0] for x in (own, ours)]
    assert np.allclose(*flat, rtol=1e-14) and type(ours["layer"]) is tuple and type(ours["more"]) is list


def test_hips_jacobians_and_vector_products_on_our_engine(hips: Any, passes: list[int]) -> None:
    import autograd
    import autograd.numpy as anp

    def fn(x: Any) -> Any:
        return anp.array([anp.sum(x**2), anp.prod(x), x[0] * x[2]])

    x = np.array([0.3, -1.2, 2.1])
    whole = autograd.jacobian(fn)(x), autograd.make_hvp(lambda x: anp.sum(fn(x)))(x)[0](np.ones(3))
    with hips.on_fanin():
        ours = autograd.jacobian(fn)(x), autograd.make_hvp(lambda x: anp.sum(fn(x)))(x)[0](np.ones(3))
        assert autograd.elementwise_grad(autograd.elementwise_grad(anp.sin))(x) == pytest.approx(-np.sin(x))
    assert all(np.allclose(a, b, rtol=1e-13) for a, b in zip(ours, whole, strict=True)) and len(passes) > 5


def test_an_error_in_a_derivative_of_hips_names_our_node(hips: Any) -> None:
    import autograd
    from autograd.extend import defvjp, primitive

    @primitive
    def bad(x: Any) -> Any:
        return x

    def throws(ans: Any, x: Any) -> Any:
        def vjp(g: Any) -> Any:
            raise ZeroDivisionError("no derivative")

        return vjp

    defvjp(bad, throws)
    with hips.on_fanin(), pytest.raises(ZeroDivisionError) as caught:
        autograd.grad(lambda x: bad(x) * 2.0)(1.0)
    assert "nodes had run" in caught.value.__notes__[0]


# micrograd


@pytest.fixture(scope="module")
def micro() -> Any:
    return example("13_micrograd", "micrograd")


def expression(r: random.Random, Value: Any) -> tuple[Any, list[Any]]:
    """A value made of a few others in many ways, and all of them."""
    values = [Value(r.uniform(0.5, 2.0)) for _ in range(3)]
    for _ in range(r.randint(5, 40)):
        a, b = r.choice(values), r.choice(values)
        new = r.choice([
            lambda a=a, b=b: a + b * 0.5, lambda a=a, b=b: a * b * 0.3, lambda a=a, b=b: (a - b).relu(),
            lambda a=a: a**2 * 0.1, lambda a=a, b=b: a / (b * b + 1.0), lambda a=a: 1.5 - a,
        ])()  # fmt: skip
        values.append(new)
    return sum(values[-4:], values[0]), values


def test_micrograd_gives_its_own_gradients_on_our_engine(micro: Any, passes: list[int]) -> None:
    """Of every value in between, too; its sums run in an order of its own, so the last bits may differ."""
    from micrograd.engine import Value

    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for k in range(200):
        end, values = expression(random.Random(seed + k), Value)
        end.backward()
        assert len(passes) == k
        with micro.on_fanin():
            ours_end, ours = expression(random.Random(seed + k), Value)
            ours_end.backward()
        for a, b in zip(ours, values, strict=True):
            assert a.data == b.data and a.grad == pytest.approx(b.grad, rel=1e-9, abs=1e-9), seed + k


def test_micrograd_trains_as_it_does_by_itself(micro: Any, passes: list[int]) -> None:
    """Gradients of parameters add up over passes until they are set to zero."""
    from micrograd.nn import MLP

    def train() -> list[float]:
        random.seed(3)
        model = MLP(2, [4, 1])
        losses = []
        for _ in range(5):
            model.zero_grad()
            for x, y in (([0.5, -1.0], 1), ([1.5, 0.3], -1)):
                loss = (model(x) - y) ** 2
                loss.backward()
                losses.append(loss.data)
            for p in model.parameters():
                p.data -= 0.05 * p.grad
        return losses

    own = train()
    with micro.on_fanin():
        ours = train()
    assert ours == pytest.approx(own, rel=1e-9) and len(passes) == 10


# MyGrad


@pytest.fixture(scope="module")
def my() -> Any:
    return example("14_mygrad", "mygrad")


def my_programs() -> dict[str, Callable[[Any, Any], tuple[Any, list[Any]]]]:
    """Each returns a result and the tensors whose gradients are checked."""
    import mygrad as mg
    from mygrad.nnet.layers import batchnorm, conv_nd, max_pool
    from mygrad.nnet.losses import softmax_crossentropy

    def squares(mg: Any, r: Any) -> Any:
        x = mg.tensor(r.randn(3, 4))
        y = x * x + mg.exp(x) * x
        return y.sum(), [x, y]

    def broadcast(mg: Any, r: Any) -> Any:
        x, b = mg.tensor(r.randn(3, 4)), mg.tensor(r.randn(4))
        return ((x + b) * b).mean() + b.sum(), [x, b]

    def views(mg: Any, r: Any) -> Any:
        x = mg.tensor(r.randn(4, 4))
        y = +x
        a, b = y[::2], y.T
        y[0, 0] = a[1, 1] * 3.0
        return (a * a).sum() + (b * y).sum(), [x, y, a, b]

    def constants(mg: Any, r: Any) -> Any:
        x, c = mg.tensor(r.randn(3)), mg.tensor(r.randn(3), constant=True)
        y = x * c + c * c
        return y.sum(), [x, c, y]

    def single(mg: Any, r: Any) -> Any:
        x = mg.tensor(r.randn(5).astype(np.float32))
        return mg.sum(mg.sqrt(x**2 + 1) / (x + 10)), [x]

    def einsum(mg: Any, r: Any) -> Any:
        a, b = mg.tensor(r.randn(3, 4)), mg.tensor(r.randn(4, 3))
        return mg.einsum("ij,jk,kl->il", a, b, a).sum(), [a, b]

    def network(mg: Any, r: Any) -> Any:
        x, k = mg.tensor(r.randn(2, 1, 6, 6)), mg.tensor(r.randn(3, 1, 3, 3))
        gamma, beta = mg.tensor(r.rand(3)), mg.tensor(r.rand(3))
        y = max_pool(batchnorm(conv_nd(x, k, stride=1), gamma=gamma, beta=beta, eps=1e-5), (2, 2), 2)
        return softmax_crossentropy(y.reshape(2, -1), np.array([1, 3])), [x, k, gamma, beta]

    def not_scalar(mg: Any, r: Any) -> Any:
        x = mg.tensor(r.randn(3, 2))
        return x * 3.0 + mg.concatenate([x[:1], x[1:] ** 2]), [x]

    assert mg
    return {f.__name__: f for f in (squares, broadcast, views, constants, single, einsum, network, not_scalar)}


@pytest.mark.parametrize("name", ["squares", "broadcast", "views", "constants", "single", "einsum", "network",
                                  "not_scalar"])  # fmt: skip
def test_mygrad_gives_its_own_gradients_on_our_engine(name: str, my: Any, passes: list[int]) -> None:
    import mygrad as mg

    def gradients() -> list[Any]:
        end, tensors = my_programs()[name](mg, np.random.RandomState(0))
        end.backward()
        assert end.creator is None  # the graph was cleared
        return [t.grad for t in tensors]

    own = gradients()
    assert not passes
    with my.on_fanin():
        ours = gradients()
    assert len(passes) == 1
    for a, b in zip(ours, own, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and np.allclose(a, b, rtol=1e-5 if a.dtype == np.float32 else 1e-12)


def test_mygrad_takes_a_gradient_to_begin_with_and_refuses_one_that_does_not_fit(my: Any) -> None:
    import mygrad as mg

    with my.on_fanin():
        x = mg.tensor([1.0, 2.0, 3.0])
        (x**2).backward([1.0, 0.0, 10.0])
        assert x.grad.tolist() == [2, 0, 60]
        (x * 2).backward(3.0)
        assert x.grad.tolist() == [6, 6, 6]  # not added: MyGrad begins anew
        with pytest.raises(ValueError):
            (x**2).backward(np.ones((2, 2)))


def test_mygrad_does_not_track_if_tracking_is_off(my: Any, passes: list[int]) -> None:
    import mygrad as mg

    with my.on_fanin(), mg.no_autodiff:
        x = mg.tensor([1.0])
        (x * 2).backward()
    assert x.grad is None and not passes


# an engine of one's own


def of_three(r: random.Random, np: Any) -> Callable[[Any], Any]:
    """A random function of an array, written with one module's functions of NumPy's names."""
    steps = [
        (r.choice(["add", "subtract", "multiply", "divide", "sin", "cos", "tanh", "exp"]), r.random(), r.random())
        for _ in range(r.randint(3, 10))
    ]

    def f(x: Any) -> Any:
        values = [x, x * 0.5]
        for name, i, k in steps:
            a, b = values[int(i * len(values))], values[int(k * len(values))]
            if name in ("sin", "cos", "tanh"):
                values.append(getattr(np, name)(a))
            elif name == "exp":
                values.append(np.exp(np.tanh(a)))
            elif name == "divide":
                values.append(a / (b * b + 1.0))
            else:
                values.append(getattr(np, name)(a, b))
        return values[-1] * values[-2]

    return f


@pytest.mark.parametrize("order", [1, 2, 3])
def test_an_engine_of_ones_own_has_the_derivatives_of_hips_autograd(order: int, passes: list[int]) -> None:
    ours = example("18_own_engine", "autograd")
    import autograd
    import autograd.numpy as anp

    def nth(grad: Callable[..., Any], np: Any, total: Callable[[Any], Any], seed: int) -> Callable[[Any], Any]:
        """The derivative of that order of the sum of a random function; each in between is summed."""
        f: Callable[[Any], Any] = of_three(random.Random(seed), np)
        for k in range(order):
            f = grad(lambda x, f=f: total(f(x)), k + 1 < order)
        return f

    for seed in range(30):
        theirs = nth(lambda f, _: autograd.grad(f), anp, anp.sum, seed)
        mine = nth(lambda f, more: ours.grad(f, create_graph=more), np, np.add.reduce, seed)
        x = np.random.default_rng(seed).uniform(0.2, 1.5, 3)
        np.testing.assert_allclose(mine(x), theirs(x), rtol=1e-9, atol=1e-12, err_msg=f"seed {seed}")
    assert len(passes) == 30 * order
