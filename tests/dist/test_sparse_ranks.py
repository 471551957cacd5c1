"""Sparse gradients over ranks: rows travel and not the table, with the bits of whole tables; and planted faults."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanin
from fanin import dist
from fanin.dist import sparse
from fanin.dist.group import Group
from fanin.dist.reducer import Reducer
from kit.ranks import NO_MPI, under_mpiexec
from kit.sample import sizes
from kit.values import bits

pytestmark = pytest.mark.core

ROWS, WIDTH = 600, 32


def parts(k: int, dtype: str = "f4") -> tuple[Any, Any]:
    """The numbers and values of the rows of contribution k, of which some come twice."""
    rng = np.random.default_rng(k)
    rows = np.sort(rng.choice(ROWS - 50, 6, replace=False))
    if k % 3 == 1:
        rows = np.r_[rows, rows[:2]]
    return rows, (rng.standard_normal((len(rows), WIDTH)) * 2.0 ** rng.integers(-6, 6, (len(rows), WIDTH))).astype(
        dtype
    )


def coo(k: int, dtype: str = "f4") -> Any:
    scipy = pytest.importorskip("scipy.sparse")
    rows, values = parts(k, dtype)
    r, c = np.nonzero(np.ones_like(values))
    return scipy.coo_array((values.ravel(), (rows[r], c)), shape=(ROWS, WIDTH))


def dense(k: int, dtype: str = "f4") -> Any:
    made: Any = np.zeros((ROWS, WIDTH), dtype)
    rows, values = parts(k, dtype)
    np.add.at(made, rows, values)
    return made


def summed(n: int, each: int, make: Any, nodes: int = 1, **options: Any) -> list[Any]:
    """The bytes of the sum, and those that a rank sends."""

    def rank(group: Group) -> Any:
        mine = range(group.rank * each, (group.rank + 1) * each)
        out = dist.add_n([make(k) for k in mine], group, **options)
        return None if out is None else bits(out), group.counters.bytes_sent

    return dist.threads(n, rank, nodes=nodes, timeout=None)


CASES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {"order": "key", "scale": -0.5}),
    (1, 1, {"order": "exact", "mean": True, "weights": [-1.5]}),
    (2, 1, {"order": "rank", "wire": "bfloat16", "scale": float("inf")}),
    (1, 2, {"order": "exact", "into": 1}),
    (2, 2, {"order": "key", "wire_out": "float16"}),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("n", "dtypes"), sizes((4, ("f4",)), (6, ("f4", "f8", "c16"))))
def test_rows_have_the_bits_of_whole_tables_in_fewer_bytes(n: int, dtypes: Any) -> None:
    for dtype, (each, nodes, options) in itertools.product(dtypes, CASES):
        few = summed(n, each, lambda k, d=dtype: coo(k, d), nodes, **options)
        whole = summed(n, each, lambda k, d=dtype: dense(k, d), nodes, **options)
        assert [a for a, _ in few] == [a for a, _ in whole], (dtype, options)
        assert max(b for _, b in few) < max(b for _, b in whole) / 4, (dtype, options)


@pytest.mark.parametrize(
    ("each", "options"),
    [(1, {"into": "shard"}), (1, {"wire": "float8_e5m2"}), (1, {"wire_out": "float8_e4m3fn"}), (2, {"order": "exact"})],
)
def test_tables_travel_whole_where_rows_cannot(each: int, options: dict[str, Any]) -> None:
    few, whole = summed(2, each, coo, **options), summed(2, each, dense, **options)
    assert [a for a, _ in few] == [a for a, _ in whole]
    assert min(b for _, b in few) > min(b for _, b in whole) * 0.9


def test_a_dense_term_of_one_rank_makes_the_sum_dense() -> None:
    few = summed(2, 1, lambda k: coo(k) if k else dense(k))
    whole = summed(2, 1, dense)
    assert [a for a, _ in few] == [a for a, _ in whole] and few[1][1] > 0.4 * dense(0).nbytes


def test_every_sum_of_sparse_arrays_sends_its_own_rows() -> None:
    """No plan is made of one: the second call has other rows."""

    def rank(group: Group) -> Any:
        return [bits(dist.add_n([coo(k + group.rank)], group)) for k in (0, 0, 5, 9)], group.counters.planned

    expected = [bits(fanin.add_n([dense(k), dense(k + 1)])) for k in (0, 0, 5, 9)]
    assert dist.threads(2, rank, timeout=None) == [(expected, 0)] * 2


def tables(group: Group, make: Any, order: Any, missing: bool) -> Any:
    """Two steps of a reducer whose one bucket has a table between two dense leaves, and of one with the table alone."""
    made = []
    for bucket_bytes in (1, 1 << 20):
        leaves = [fanin.Leaf(np.zeros(s, "f4"), name=f"w{i}") for i, s in enumerate(((5,), (ROWS, WIDTH), (7, 3)))]
        reducer = Reducer(leaves, group, order=order, bucket_bytes=bucket_bytes, missing="skip", scale=0.3)
        for step in range(2):
            roots = [(w, 0, np.full(w.array.shape, 0.1 + group.rank, "f4")) for w in (leaves[0], leaves[2])]
            if not (missing and group.rank == 1):
                roots.append((leaves[1], 0, make(2 * step + group.rank)))
            if order != "exact":
                with reducer.accumulate():
                    fanin.backward([(leaves[1], 0, make(20 + group.rank))])
            fanin.backward(roots, reducer=reducer)
            made += [bits(np.asarray(w.grad)) for w in leaves]
    return made, reducer.explain(leaves[1])


def of_parts(k: int) -> fanin.Sparse:
    rows, values = parts(k)
    return fanin.Sparse("coo", (rows[None], values), (ROWS, WIDTH))


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("order", ["key", "exact", "rank"])
def test_a_reducer_sends_rows_of_its_tables(order: Any, missing: bool) -> None:
    few = dist.threads(3, lambda g: (tables(g, of_parts, order, missing), g.counters.bytes_sent), timeout=None)
    whole = dist.threads(3, lambda g: (tables(g, dense, order, missing), g.counters.bytes_sent), timeout=None)
    assert [made for (made, _), _ in few] == [made for (made, _), _ in whole]
    assert max(sent for _, sent in few) < max(sent for _, sent in whole) / 4
    assert "Rows of w1 travel instead of the whole: at most " in few[0][0][1] and "(N13)" not in whole[0][0][1]


def test_a_rank_that_skips_takes_part_in_a_sum_of_rows() -> None:
    def rank(group: Group) -> Any:
        group.step = 1
        if group.rank == 2:
            return [bits(x) for x in group.skip()]
        return [bits(dist.add_n([coo(group.rank)], group))]

    assert dist.threads(3, rank, timeout=None) == [[bits(fanin.add_n([dense(0), dense(1)]))]] * 3


# ---------------------------------------------------------------- other engines

TABLES = """
import sys
import numpy as np
import fanin
from fanin import dist
sys.path.insert(0, TESTS)
from dist.test_sparse_ranks import dense, parts, ROWS, WIDTH
def of_torch(k):
    import torch
    rows, values = parts(k)
    return torch.sparse_coo_tensor(torch.from_numpy(rows[None].copy()), torch.from_numpy(values), (ROWS, WIDTH))
def wrongs(group, make):
    found = []
    for order in ("key", "exact"):
        before = group.counters.bytes_sent
        total = dist.add_n([make(group.rank)], group, order)
        sent = group.counters.bytes_sent - before
        every = [dense(k) for k in range(group.size)]
        expected = fanin.add_n(every, accumulate="exact" if order == "exact" else None)
        if np.asarray(total).tobytes() != expected.tobytes() or sent > expected.nbytes / 4:
            found.append((order, sent))
    return found
"""


def program(how: str) -> str:
    folder = Path(__file__).resolve().parents[1]
    return TABLES.replace("TESTS", repr(str(folder))) + how


@pytest.mark.partners
@pytest.mark.skipif(NO_MPI, reason="mpi4py and mpiexec: pip install 'fanin[mpi]'")
def test_rows_travel_over_mpi() -> None:
    run = "from dist.test_sparse_ranks import coo\nassert not wrongs(dist.group(), coo)"
    done = under_mpiexec(3, "-c", program(run))
    assert done.returncode == 0, done.stderr


GLOO = """
import os
import torch.distributed as td
td.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
found = wrongs(dist.group(), of_torch)
print(found)
sys.stdout.flush()
td.barrier()
os._exit(bool(found))
"""


@pytest.mark.partners
def test_rows_of_tensors_travel_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-c", program(GLOO), str(tmp_path / "meet")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    made = [subprocess.Popen([*words, str(r)], env=environment, stderr=subprocess.PIPE, text=True) for r in range(2)]
    errors = [p.communicate()[1] for p in made]
    assert [p.returncode for p in made] == [0, 0], errors


# ---------------------------------------------------------------- planted faults


def found(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, of: Any = sparse) -> bool:
    """Whether the law above finds a fault."""
    monkeypatch.setattr(of, name, fault)
    few, whole = summed(3, 1, coo, scale=-0.5), summed(3, 1, dense, scale=-0.5)
    return [a for a, _ in few] != [a for a, _ in whole]


def test_rows_that_are_not_sent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of = sparse.rows_of
    assert not found(monkeypatch, "rows_of", rows_of)
    assert found(monkeypatch, "rows_of", lambda x: rows_of(x)[1:])


def test_zeros_in_the_place_of_what_absent_rows_are_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplied by a negative scale they are -0.0."""
    spread = sparse.Few.spread_leaf

    def zeros(self: Any, i: int, raw: Any, out: Any) -> None:
        raw.reshape(len(self.taken[i]), -1)[-1] = 0
        spread(self, i, raw, out)

    assert found(monkeypatch, "spread_leaf", zeros, sparse.Few)
