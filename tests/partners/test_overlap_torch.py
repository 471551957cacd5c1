"""torch's tensors: what shares memory, beside torch's own answer, which is neither an upper nor a lower bound."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

import fanin
from fanin.analysis.memory import Layout

pytestmark = pytest.mark.partners

torch = pytest.importorskip("torch", reason="torch is not installed")

SEED = 20261121


def theirs(tensors: list[Any]) -> set[int]:
    """torch's answer for tensors of one storage."""
    from torch._functorch._aot_autograd.input_output_analysis import compute_overlapping_inputs

    return set(compute_overlapping_inputs(None, tensors, list(range(len(tensors)))))


def exactly(tensors: list[Any]) -> set[int]:
    """NumPy's exact answer, by bytes."""
    seen = [
        np.lib.stride_tricks.as_strided(t.detach().numpy(), t.shape, [s * t.element_size() for s in t.stride()])
        for t in tensors
    ]
    return {
        k for i, j in itertools.combinations(range(len(seen)), 2) if np.shares_memory(seen[i], seen[j]) for k in (i, j)
    }


def ours(tensors: list[Any]) -> set[int]:
    return set(fanin.sharing.overlaps(tensors).indices)


def blocks(rng: Any, n: int) -> list[Any]:
    m = torch.zeros(8, 9)
    out = []
    for _ in range(n):
        i, j = int(rng.integers(0, 8)), int(rng.integers(0, 9))
        h, w = int(rng.integers(1, 9 - i)), int(rng.integers(1, 10 - j))
        out.append(m[i : i + h, j : j + w])
    return out


def test_random_blocks_have_numpys_answer_where_torch_differs() -> None:
    """Of torch's answers those that differ are counted: it misses overlaps of row windows."""
    rng = np.random.default_rng(SEED)
    seen: Counter[str] = Counter()
    for _ in range(3000):
        pair = blocks(rng, 2)
        assert ours(pair) == exactly(pair)
        seen["overlap" if ours(pair) else "disjoint"] += 1
        seen[
            "torch misses it"
            if ours(pair) - theirs(pair)
            else "torch sees one"
            if theirs(pair) - ours(pair)
            else "agreed"
        ] += 1
    print(seen)
    assert min(seen[w] for w in ("overlap", "disjoint", "agreed", "torch misses it")) > 300, f"seed {SEED}: {seen}"


def test_step_slices_have_numpys_answer_where_torch_differs() -> None:
    rng = np.random.default_rng(SEED)
    seen: Counter[str] = Counter()
    v = torch.zeros(5, 6, 7)
    for _ in range(3000):
        pair = [
            v[tuple(slice(int(rng.integers(0, 3)), None, int(rng.integers(1, 4))) for _ in range(3))] for _ in range(2)
        ]
        assert ours(pair) == exactly(pair)
        seen[
            "torch sees one"
            if theirs(pair) - ours(pair)
            else "torch misses it"
            if ours(pair) - theirs(pair)
            else "agreed"
        ] += 1
    print(seen)
    assert min(seen[w] for w in ("torch sees one", "agreed")) > 300, f"seed {SEED}: {seen}"


def test_row_windows_that_share_rows_overlap() -> None:
    m = torch.zeros(8, 9)
    pair = [m[0:4, 0:4], m[2:6, 0:4]]
    assert theirs(pair) == set()
    assert ours(pair) == exactly(pair) == {0, 1}
    assert fanin.overlap(*pair).witness == ((2, 0), (0, 0))


def test_tensors_of_two_dtypes_are_compared_in_bytes() -> None:
    x = torch.zeros(12)
    pair = [x[0:8], x.view(torch.int8)[8:40]]
    assert theirs(pair) == set()
    assert ours(pair) == exactly(pair) == {0, 1}
    assert not fanin.overlap(x[0:8], x.view(torch.int8)[32:])


def test_tensors_and_ndarrays_of_one_memory_are_compared() -> None:
    x = np.zeros((4, 5), "f4")
    t = torch.from_numpy(x)
    assert fanin.overlap(t[2:], x[:, 1]).witness == ((1, 1), (3,))
    assert not fanin.overlap(t[:, 0], x[:, 1])
    assert fanin.sharing.overlaps([t[:, i] for i in range(5)] + [x[1]]).components == ((0, 1, 2, 3, 4, 5),)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_tensors_are_compared_by_their_memory_not_their_meaning() -> None:
    """Tensors that require gradients, parameters, conjugates, negatives, dtypes of torch alone."""
    for x in (
        torch.zeros(4, requires_grad=True),
        torch.nn.Parameter(torch.zeros(4)),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj().imag,
        torch.zeros(4, dtype=torch.float8_e4m3fnuz),
        torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(()),
    ):
        first = x if x.ndim == 0 else x[:1]
        assert fanin.overlap(x, first) and fanin.sharing.overlaps_itself(x).kind == "disjoint", x
        assert x.ndim == 0 or not fanin.overlap(x[1:], first), x
    assert fanin.sharing.overlaps_itself(torch.zeros(3).expand(2, 3)).witness == ((1, 0), (0, 0))
    assert not fanin.overlap(torch.zeros(0), torch.zeros(0))


def wrapped() -> Any:
    class Wrapper(torch.Tensor):  # type: ignore[misc,name-defined]
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    return Wrapper(torch.zeros(3))


NO_ARRAYS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "meta": (lambda: torch.zeros(3, device="meta"), "has no memory"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), ""),
    "a wrapper": (wrapped, "wraps other tensors"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NO_ARRAYS)
def test_an_object_that_is_no_single_tensor_is_refused_by_its_place(name: str) -> None:
    make, words = NO_ARRAYS[name]
    with pytest.raises(TypeError, match=rf"^overlaps: array 1: .*{words}"):
        fanin.sharing.overlaps([torch.zeros(3), make()])


def test_a_tensor_of_a_transform_is_refused() -> None:
    def inside(x: Any) -> Any:
        with pytest.raises(TypeError, match=r"^overlaps_itself: "):
            fanin.sharing.overlaps_itself(x)
        return x

    torch.vmap(inside)(torch.zeros(3, 2))


def test_a_layout_of_tensors_is_checked() -> None:
    def made(at: int = 8) -> list[Any]:
        x = torch.zeros(20)
        return [x[:10], x[at:], torch.nn.Parameter(torch.zeros(2, 3))]

    layout = Layout(made())
    assert layout.check(made()) is None
    assert layout.check(made(12)[:1] + made()[1:]) == (1, "apart", 0)
    assert layout.check([*made()[:2], torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))]) == (2, "dtype", None)
