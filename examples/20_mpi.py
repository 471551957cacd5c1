"""NumPy on several processes: the micro-batches of a regression are dealt out to ranks, and the weights are the same,
bit by bit, for any number of ranks. Run it on four processes:

    mpiexec -n 4 python examples/20_mpi.py

It needs `pip install "fanin[mpi]"`. Without mpiexec its ranks are threads.
"""

import numpy as np

import fanin
from fanin import dist

MICRO_BATCHES = 12
rng = np.random.default_rng(0)
x = rng.standard_normal((MICRO_BATCHES, 64, 20)).astype(np.float32)
y = np.tanh(x @ rng.standard_normal(20).astype(np.float32))


def gradient(w: np.ndarray, k: int) -> np.ndarray:
    """The gradient of the mean squared error of one micro-batch, halved."""
    error = x[k] @ w - y[k]
    return x[k].T @ error / np.float32(len(error))


def train(group: dist.Group) -> bytes:
    """The weights after 50 steps, of which each rank computes some micro-batches."""
    w = np.zeros(20, np.float32)
    for _ in range(50):
        mine = [gradient(w, k) for k in range(group.rank, MICRO_BATCHES, group.size)]
        w -= np.float32(0.5) * dist.add_n(mine, group, order="exact", scale=1 / MICRO_BATCHES)
    return w.tobytes()


def differs(group: dist.Group) -> str:
    """The error of every rank if the last one brings another shape."""
    try:
        dist.add_n([np.ones(4 if group.rank == group.size - 1 else 3)], group)
    except fanin.PeerError as e:
        return f"PeerError: {e}"
    return "no error"


def report(group: dist.Group) -> None:
    weights, text = train(group), differs(group)
    if group.rank == 0:
        print(f"{group.size} ranks ({group.name}): the weights of one rank: {weights == alone}")
        print(text)


[alone] = dist.threads(1, train)
try:
    from mpi4py import MPI

    launched = MPI.COMM_WORLD.size > 1
except ImportError:
    launched = False
if launched:
    report(dist.group())
else:
    dist.threads(4, report)
