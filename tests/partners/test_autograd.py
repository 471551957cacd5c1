"""HIPS autograd: its boxes and its own containers are objects; they sum by their own `+`, or by autograd's own addition
as `combine`.
"""

from __future__ import annotations

from typing import Any

import pytest

import fanin
from fanin import Slot

pytestmark = pytest.mark.partners

autograd = pytest.importorskip("autograd", reason="autograd is not installed")
np: Any = pytest.importorskip("autograd.numpy")


def through(*gradients: Any, slot: Slot | None = None) -> Any:
    buf = fanin.InputBuffer([slot or Slot()])
    for g in gradients:
        buf.add(0, g)
    return buf.take()[0]


def test_boxes_are_summed_by_their_own_plus_so_that_they_can_be_differentiated() -> None:
    def f(x: Any) -> Any:
        return np.sum(through(x, x * x, np.ones(3), 2.0 * x))

    assert autograd.grad(f)(np.ones(3)).tolist() == [5, 5, 5]
    assert autograd.grad(lambda x: np.sum(through(np.ones(3), x)))(np.ones(3)).tolist() == [1, 1, 1]


def test_a_second_derivative_goes_through_a_sum() -> None:
    def f(x: Any) -> Any:
        return np.sum(through(x**3, x**2))

    assert autograd.elementwise_grad(autograd.elementwise_grad(f))(np.array([2.0])).tolist() == [14.0]


def test_containers_of_gradients_sum_by_the_vector_space_of_autograd() -> None:
    from autograd.core import vspace

    def add(a: Any, b: Any) -> Any:
        return vspace(a).add(a, b)

    result = through({"w": np.ones(2)}, {"w": np.ones(2)}, slot=Slot(combine=add))
    assert result["w"].tolist() == [2, 2]


def test_sparse_objects_of_autograd() -> None:
    from autograd.numpy.numpy_vjps import untake

    x = np.arange(4.0)
    sparse = untake(np.array([1.0]), np.array([2]), None if False else autograd.core.vspace(x))
    result = through(np.ones(4), sparse, slot=Slot(combine=lambda a, b: autograd.core.add_outgrads((a, False), b)[0]))
    assert result.tolist() == [1, 1, 2, 1]


def test_metadata_of_a_step_with_autograd_inside_is_that_of_its_memory() -> None:
    from fanin.analysis import collect_metadata

    def step(w: Any) -> Any:
        w -= 0.1 * autograd.grad(lambda w: (w * w).sum())(w)
        return w[1:]

    w = np.ones(3)
    meta = collect_metadata(step, [w], watch=False)
    assert meta.input_info[0].mutates_data and meta.output_info[0].base_idx == 0 and w.tolist() == [1, 1, 1]
