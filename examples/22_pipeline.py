"""A training step with decisions on the host, recorded in three pieces: it clips by the norm of the gradient and ends
early where the loss is a NaN. On the CPU; `fanin.GraphTree("cuda:0")` is the same.
"""

import numpy as np

import fanin

tree = fanin.GraphTree("cpu")


def gradient(x, want, w):
    wrong = x @ w - want
    return np.mean(wrong * wrong), x.T @ wrong / len(x)


def norm(g):
    return np.sqrt(np.sum(g * g))


def update(w, g, rate):
    w -= rate * g


gradient = tree.function(gradient, roles=("copy", "copy", "static"))
norm = tree.function(norm)
update = tree.function(update, roles=("static", "auto", "copy"))


@tree.pipeline
def train(x, want, w):
    loss, g = gradient(x, want, w)
    if np.isnan((yield loss)):  # the host reads
        return None
    n = yield norm(g)
    update(w, g, np.array(0.5 * min(1.0, 1.0 / n)))  # `g` was made two pieces before
    return loss


def main():
    rng, w = np.random.default_rng(0), np.zeros(3)
    for i in range(60):
        x = rng.standard_normal((16, 3))
        if i == 3:
            x[0] = np.nan
        loss = train(x, x @ [1.0, 2.0, 3.0], w)
        if i < 5 or i == 59:
            pieces = ", ".join(f"{name} {did}" for name, did in train.last)
            print(f"step {i:2}: loss {'skipped' if loss is None else f'{float(loss):.4f}'}: {pieces}")
    print("w", w.round(3))
    print(train.explain())
    for piece, figures in zip(train.pieces, train.stats, strict=True):
        print(f"{piece.name}: {figures.replayed} replays of {figures.nodes} recording")


if __name__ == "__main__":
    main()
