"""Real JAX arrays on the CPU: read by DLPack, never written, and JAX arrays come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fanin
from fanin import Slot
from kit import hooks

pytestmark = pytest.mark.partners

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

DTYPES = (
    "bool",
    "int8",
    "int32",
    "uint8",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
)


def through(*gradients: Any, slot: Slot | None = None, **how: Any) -> Any:
    buf = fanin.InputBuffer([slot or Slot()], **how)
    for g in gradients:
        buf.add(0, g)
    return buf.take()[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back_as_arrays_of_it(dtype: str) -> None:
    x, y = jnp.array([[0, 1], [1, 1]]).astype(dtype), jnp.array([[1, 0], [1, 0]]).astype(dtype)
    result = through(x, y)
    assert isinstance(result, jax.Array)
    assert result.dtype == x.dtype
    assert np.array_equal(
        np.asarray(result).astype(complex), np.asarray(x | y if dtype == "bool" else x + y).astype(complex)
    )
    assert through(x) is x


def test_shapes_and_sizes() -> None:
    for shape in ((), (0,), (3, 0), (1, 1), (2, 3, 4)):
        x = jnp.ones(shape, jnp.float32)
        result = through(x, x)
        assert (result.shape, isinstance(result, jax.Array)) == (shape, True)


def test_a_jax_array_is_never_written_even_donated() -> None:
    x = jnp.ones(4)
    buf = fanin.InputBuffer(1, budget=0)
    buf.add(0, x, donate=True)
    buf.add(0, jnp.ones(4))
    assert buf.take()[0].tolist() == [2] * 4
    assert x.tolist() == [1] * 4
    with pytest.raises(BufferError, match="read-only"):
        fanin.add_n([x, x], out=x)


def test_a_transposed_result() -> None:
    x = jnp.arange(6.0).reshape(2, 3).T
    assert np.array_equal(np.asarray(through(x, x)), 2 * np.asarray(x))


def test_with_doubles_of_numpy() -> None:
    result = through(jnp.ones(3, jnp.float32), np.ones(3, np.float32))
    assert isinstance(result, jax.Array)
    assert type(through(np.ones(3), jnp.ones(3))) is np.ndarray
    result = through(jnp.ones(3, jnp.float32), np.full(3, 2.0**-40))
    assert (isinstance(result, jax.Array), result.dtype) == (True, np.float64)
    assert np.asarray(result).tolist() == [1 + 2.0**-40] * 3


def test_tracers_are_objects() -> None:
    def f(x: Any) -> Any:
        return through(x, x, 2 * x).sum()

    assert jax.grad(f)(jnp.ones(3)).tolist() == [4, 4, 4]
    assert jax.jit(f)(jnp.ones(3)).item() == 12
    assert jax.vmap(lambda x: through(x, x))(jnp.ones((2, 3))).shape == (2, 3)


def test_a_deleted_array_is_refused() -> None:
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(BufferError, match=r"slot 0: the jax\.Array has been deleted"):
        through(x)


def test_random_keys_have_no_sum() -> None:
    with pytest.raises(
        TypeError, match=r"slot 0: a jax\w*\.PRNGKeyArray of dtype key<fry> has no sum; expected numbers"
    ):
        through(jax.random.key(0))


@pytest.mark.parametrize("keep", [False, True])
def test_arrays_that_their_maker_drops_are_summed_early(keep: bool) -> None:
    one = 4 * 2000
    hooks.auto_budget(4 * one, 10 * one)
    buf, kept = fanin.InputBuffer(1), []
    try:
        for k in range(40):
            g = jnp.full((2000,), float(k), jnp.float32)
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
    assert bool((buf.take()[0] == sum(range(40))).all())


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_cotangents_of_integers_are_no_gradients(transform: Any) -> None:
    pull = transform(lambda x, i: jax.vjp(lambda x, i: (x * i).sum(), x, i)[1](jnp.ones(())))
    edges = [(w, 0) for w in (fanin.Leaf(jnp.zeros(3)), fanin.Leaf(jnp.zeros(3)))]
    absent = pull(jnp.ones(3), jnp.arange(3))[1]
    assert absent.dtype == jax.dtypes.float0
    for _ in range(2):
        node = fanin.Node(lambda g: pull(jnp.ones(3), jnp.arange(3)), edges=edges)
        fanin.backward([(node, 0, jnp.ones(()))])
    assert np.array_equal(edges[0][0].grad, [0, 2, 4]) and edges[1][0].grad is None
    assert through(absent, absent) is None
    assert np.array_equal(through(absent, jnp.ones(3)), np.ones(3))
