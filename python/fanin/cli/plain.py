"""The demo's network once more, in plain float64 NumPy: what its gradients are held against.

It shares no code with `fanin.tape`: each derivative is written down by hand, convolutions are sums over shifts, and
gradients are added by `+=`.
"""

from __future__ import annotations

import numpy as np

from fanin._interop.protocols import NDArray

Arrays = dict[str, NDArray]


def around(x: NDArray, size: int) -> list[tuple[int, int, NDArray]]:
    """(i, j, x shifted by i, j) for each place (i, j) of a kernel."""
    rim, h, w = size // 2, x.shape[1], x.shape[2]
    padded = np.pad(x, [(0, 0), (rim, rim), (rim, rim), (0, 0)])
    return [(i, j, padded[:, i : i + h, j : j + w]) for i in range(size) for j in range(size)]


def conv(x: NDArray, kernel: NDArray) -> NDArray:
    total: NDArray = sum(shifted @ kernel[i, j] for i, j, shifted in around(x, len(kernel)))
    return total


def conv_back(x: NDArray, kernel: NDArray, g: NDArray) -> tuple[NDArray, NDArray]:
    """The gradients of x and of the kernel."""
    dk = np.empty_like(kernel)
    for i, j, shifted in around(x, len(kernel)):
        dk[i, j] = np.einsum("nhwc,nhwd->cd", shifted, g)
    return conv(g, kernel[::-1, ::-1].swapaxes(2, 3)), dk


def gradients(p: Arrays, digits: NDArray, labels: NDArray, count: int, blocks: int) -> tuple[NDArray, Arrays, NDArray]:
    """(loss, gradients by name, gradient of the embedded pixels) of one micro-batch, all in float64."""
    p = {name: np.asarray(value, np.float64) for name, value in p.items()}
    n = len(digits)

    x = p["intensity"][digits] + p["position"]
    h = np.tanh(conv(x, p["conv"]))
    steps = []
    for _ in range(blocks):
        t = np.tanh(conv(h, p["block"]))
        steps.append((h, t))
        h = h + t
    pooled = h.reshape(n, 4, 2, 4, 2, -1).mean((2, 4)).reshape(n, -1)
    flat = x.reshape(n, -1)
    side = np.tanh(flat @ p["side"])
    joined = pooled + side
    logits = joined @ p["out"] + p["bias"]
    e = np.exp(logits - logits.max(1, keepdims=True))
    softmax = e / e.sum(1, keepdims=True)
    loss = -np.log(softmax[np.arange(n), labels]).sum() / count

    d: Arrays = {}
    dlogits = softmax.copy()
    dlogits[np.arange(n), labels] -= 1
    dlogits /= count
    d["bias"] = dlogits.sum(0)
    d["out"] = joined.T @ dlogits
    djoined = dlogits @ p["out"].T
    dside = djoined * (1 - side**2)
    d["side"] = flat.T @ dside
    dx = (dside @ p["side"].T).reshape(x.shape)
    dh = np.repeat(np.repeat(djoined.reshape(n, 4, 4, -1), 2, 1), 2, 2) / 4
    d["block"] = np.zeros_like(p["block"])
    for before, t in reversed(steps):
        through, dk = conv_back(before, p["block"], dh * (1 - t**2))
        d["block"] += dk
        dh = dh + through
    first = np.tanh(conv(x, p["conv"]))
    through, d["conv"] = conv_back(x, p["conv"], dh * (1 - first**2))
    dx = dx + through
    d["position"] = dx.sum(0)
    d["intensity"] = np.zeros_like(p["intensity"])
    np.add.at(d["intensity"], digits, dx)
    return loss, d, dx
